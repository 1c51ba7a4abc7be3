"""--estimate: its figures against what training steps take, and the flags that it refuses."""

import re
from itertools import chain

import pytest
import torch
from glue_runs import LORA, common, failure
from measured_memory import measured_peak
from simulated_gpu import SimulatedGpu

from loralib.training.step_cost import cost_of_batch
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    DebertaV2Config,
    RobertaConfig,
    TrainingArguments,
    trainer_estimate,
    training_args,
)
from transformers.data.data_collator import PackedCollator
from transformers.trainer_data import TrainingBatches
from transformers.trainer_estimate import published_settings, training_of

# Steps on fake tensors take a second each.
pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
LORA_OF_4 = {"apply_lora": True, "lora_r": 4, "lora_alpha": 8}
SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 130,
}
RELATIVE = {
    "relative_attention": True,
    "position_buckets": 16,
    "pos_att_type": "p2c|c2p",
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "conv_kernel_size": 3,
}
SHAPES = {
    "roberta": RobertaConfig(**SMALL),
    "roberta with LoRA": RobertaConfig(**SMALL, apply_lora=True, lora_r=4, lora_alpha=8),
    "DoRA, dropout": RobertaConfig(
        **SMALL, apply_lora=True, lora_r=4, lora_alpha=8, lora_variant="dora", lora_dropout=0.1
    ),
    "recomputed": RobertaConfig(**SMALL, gradient_checkpointing=True),
    "R-Drop": RobertaConfig(**SMALL, apply_lora=True, lora_r=4, lora_alpha=8, reg_loss_wgt=1.0),
    "adapters": RobertaConfig(**SMALL, apply_adapter=True, adapter_size=8),
    "deberta with LoRA": DebertaV2Config(
        **SMALL, **RELATIVE, apply_lora=True, lora_r=4, lora_alpha=8
    ),
}


ROWS, PADDED = [100, 90, 12, 3], [40] * 8


def classifier(config):
    model = AutoModelForSequenceClassification.from_config(config)
    if model.adapted_by:
        model.train_only(kind.part for kind in model.adapted_by)
    return model


def batch_of(lengths: list[int]) -> dict[str, torch.Tensor]:
    mask = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    ids = torch.randint(5, 300, mask.shape).where(mask == 1, 1)
    labels = torch.arange(len(lengths)) % 2
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize(
    ("shape", "half", "lengths"),
    [
        *((shape, False, ROWS) for shape in SHAPES if shape != "roberta with LoRA"),
        ("roberta with LoRA", True, ROWS),
        ("R-Drop", True, PADDED),
        ("recomputed", False, PADDED),
        ("deberta with LoRA", False, PADDED),
    ],
)
def test_memory_is_what_a_step_takes(tmp_path, shape, half, lengths):
    """Within a tenth of what PyTorch's allocator held, except for buffers inside of operations."""
    settings = {"report_to": ["none"], "no_cuda": True, "bf16": half}
    args = TrainingArguments(output_dir=str(tmp_path), **settings)

    def build():
        return training_of(classifier(SHAPES[shape]), args, None)

    batch = batch_of(lengths)
    measured = measured_peak(build(), batch, tmp_path)
    assert cost_of_batch(build, batch, CPU).memory.total == pytest.approx(measured, rel=0.1)


def test_memory_of_masked_language_modeling_is_what_a_step_takes(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), report_to=["none"], no_cuda=True)

    def build():
        return training_of(AutoModelForMaskedLM.from_config(SHAPES["roberta"]), args, None)

    batch = batch_of([60, 40, 40, 5])
    targets = torch.rand(batch["input_ids"].shape) < 0.2
    batch["labels"] = batch["input_ids"].where(targets, -100)
    measured = measured_peak(build(), batch, tmp_path)
    assert cost_of_batch(build, batch, CPU).memory.total == pytest.approx(measured, rel=0.1)


def test_arithmetic_is_the_formula_s(tmp_path):
    """Each weight takes a product forward, and two backward: for inputs' gradients and its own."""
    args = TrainingArguments(output_dir=str(tmp_path), report_to=["none"], no_cuda=True)
    config = RobertaConfig(**{**SMALL, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0})
    rows, width, inner = 8, SMALL["hidden_size"], SMALL["intermediate_size"]
    taken = cost_of_batch(
        lambda: training_of(classifier(config), args, None), batch_of([1] * rows), CPU
    )
    layers = SMALL["num_hidden_layers"]
    weights = layers * (4 * width**2 + 2 * width * inner) + width**2 + 2 * width
    attention = layers * rows * width * 2
    # Forward q kᵀ and p v; backward the gradients of their factors, and perhaps q kᵀ once more.
    assert (taken.operations - 3 * 2 * rows * weights) / attention in (6, 7)


# ---- run_glue.py ----


@pytest.fixture
def estimate(run_glue, tmp_path, capsys):
    """Runs run_glue.py with --estimate, and returns the figures that it prints, by name."""

    def run(*arguments: object, rate: str = "100") -> dict[str, str]:
        flags = ["--do_train", "--output_dir", tmp_path / "out", "--estimate", "--no_cuda"]
        run_glue.main([str(word) for word in (*arguments, *flags, "--estimate_rate", rate)])
        assert not (tmp_path / "out").exists()
        lines = capsys.readouterr().out.strip().splitlines()
        return {line[:24].strip(): line[24:].strip() for line in lines if line}

    return run


def test_figures_of_a_run_on_data(estimate, tiny_base, tiny_glue):
    data = ["--task_name", "rte", "--data_dir", tiny_glue, "--num_train_epochs", 2]
    figures = estimate(*common(tiny_base), *data, *LORA)
    lora, head = 2 * 2 * 4 * (32 + 32), 32 * 32 + 32 + 2 * 32 + 2
    assert figures["trained"].startswith(f"{lora + head:,} ")
    assert figures["optimizer steps"] == "12"  # of 45 rows, 8 at a time, twice
    assert figures["a batch"].startswith("8 rows; ")
    assert figures["rate of a device"] == "100 GFLOP/s (given)"
    more = ["--pad_to_max_length", "--gradient_accumulation_steps", 4]
    other = estimate(*common(tiny_base), *data, *LORA, *more)
    assert other["a batch"] == figures["a batch"]
    # The first epoch has six batches, and the second ends with the fourth, at the run's last step.
    gflop = [float(each["arithmetic of the run"].split()[0]) for each in (figures, other)]
    assert gflop[1] == pytest.approx(gflop[0] * (6 + 4) / 12, abs=2e-3)


@pytest.mark.parametrize(("accumulated", "steps", "batches"), [(1, "4", 1), (5, "2", 2)])
def test_more_devices_make_fewer_updates(
    estimate, tiny_base, tiny_glue, accumulated, steps, batches
):
    data = ["--task_name", "rte", "--data_dir", tiny_glue, "--num_train_epochs", 2]
    flags = ["--estimate_devices", 3, "--gradient_accumulation_steps", accumulated]
    figures = estimate(*common(tiny_base), *data, *LORA, *flags)
    assert figures["optimizer steps"] == steps
    # Of the two in an epoch, if that is shorter than an accumulation.
    assert figures["an optimizer step"] == f"{3 * batches} batches, {batches} a device"


class Searched(Exception):
    """Ends an estimate where it searches its batches: (the batches of each epoch, lengths)."""


def search(epochs, lengths):
    """Stands for `notable_batches`."""
    raise Searched([sorted(batches) for batches in epochs], lengths)


@pytest.mark.parametrize("flag", [None, "--group_by_length", "--dataloader_drop_last"])
def test_batches_of_all_devices_and_epochs_are_searched(
    estimate, tiny_base, tiny_glue, monkeypatch, flag
):
    monkeypatch.setattr(trainer_estimate, "notable_batches", search)
    data = ["--task_name", "rte", "--data_dir", tiny_glue, "--num_train_epochs", 3]
    with pytest.raises(Searched) as searched:
        estimate(*common(tiny_base), *data, "--estimate_devices", 4, *([flag] if flag else []))
    found, lengths = searched.value.args
    lengths = lengths if flag == "--group_by_length" else None
    drop = flag == "--dataloader_drop_last"
    ranks = [TrainingBatches(45, 8, 42, 4, rank, drop, lengths) for rank in range(4)]
    expected = []
    for epoch in range(3):
        for each in ranks:
            each.epoch = epoch
        expected.append(sorted(chain(*ranks)))
    assert found == expected


def test_a_length_replaces_the_data(estimate, tiny_base):
    figures = estimate(*common(tiny_base), "--task_name", "cola", "--estimate_length", 9)
    assert figures["a batch"] == "8 rows; 72 tokens, at most 72"
    assert figures["optimizer steps"] == f"{3 * -(-8551 // 8):,}"


def test_own_files_of_a_length_have_no_known_number_of_steps(estimate, tiny_base):
    own = [*common(tiny_base), "--train_file", "not_there.csv", "--estimate_length", 9]
    assert "optimizer steps" not in estimate(*own)
    assert estimate(*own, "--max_steps", 7)["optimizer steps"] == "7"


def test_adapter_files_need_not_exist_yet(estimate, tiny_base):
    figures = estimate(
        *common(tiny_base), "--task_name", "rte", *LORA, "--lora_path", "mnli/not_there.bin"
    )
    assert int(figures["parameters"].replace(",", "")) > 0


@pytest.mark.parametrize("half", ["--fp16", "--bf16"])
def test_half_precision_in_either_dtype(estimate, tiny_base, half):
    """float16 too, although training in it would need a GPU."""
    full = estimate(*common(tiny_base), *LORA, "--task_name", "rte")
    figures = estimate(*common(tiny_base), *LORA, "--task_name", "rte", half)
    assert figures["computed in"].startswith({"--fp16": "float16", "--bf16": "bfloat16"}[half])
    assert mib(figures["weights"]) < mib(full["weights"])


def test_steps_with_cuda_graphs_are_counted_on_a_cpu(estimate, tiny_base):
    flags = [*common(tiny_base), *LORA, "--task_name", "rte"]
    assert estimate(*flags, "--cuda_graphs") == estimate(*flags)


@pytest.fixture
def gpu_without_bfloat16(monkeypatch):
    monkeypatch.setattr(training_args, "choose_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "an old GPU")


def test_float16_is_counted_on_a_gpu_without_bfloat16(gpu_without_bfloat16, tmp_path):
    asked = TrainingArguments(str(tmp_path), fp16=True)
    with trainer_estimate._without_output(asked) as own:
        assert (own.fp16, own.bf16, own.device.type) == (True, False, "cuda")
    with (
        pytest.raises(ValueError, match="an old GPU has none"),
        trainer_estimate._without_output(TrainingArguments(str(tmp_path), bf16=True)),
    ):
        pass


def test_on_a_cpu_float16_is_counted_as_bfloat16(tmp_path):
    asked = TrainingArguments(str(tmp_path), fp16=True, no_cuda=True)
    with trainer_estimate._without_output(asked) as own:
        assert (own.fp16, own.bf16, own.device.type) == (False, True, "cpu")


def test_steps_of_an_estimate_do_not_wait_for_a_scaler(make_classifier, tmp_path):
    args = TrainingArguments(str(tmp_path), report_to=["none"], fp16=True)
    model = make_classifier("roberta", num_labels=2, pad_token_id=1, **LORA_OF_4)
    model.train_only(("lora",))
    with SimulatedGpu() as gpu:
        training = trainer_estimate.training_of(model, args, lambda rows: rows)
        batch = {"input_ids": torch.full((2, 4), 5), "labels": torch.zeros(2, dtype=torch.int64)}
        batch = PackedCollator(lambda _: batch)([])
        training.add_gradients({name: x.pin_memory() for name, x in batch.items()})
        gpu.waits.clear()
        training.update()
        assert gpu.waits == []
        assert {str(p.dtype) for p in model.base_model.parameters()} == {
            "torch.float16",  # frozen weights
            "torch.float32",
        }


def mib(text: str) -> float:
    return float(re.fullmatch(r"([\d.]+) MiB", text)[1])


def test_the_rate_is_measured_with_few_layers(estimate, run_glue, tiny_base, monkeypatch):
    made = []

    def untrained_model(auto_class, config):
        made.append(config.num_hidden_layers)
        return classifier(config)

    monkeypatch.setattr("transformers.fine_tuning.script.untrained_model", untrained_model)
    monkeypatch.setattr("loralib.training.estimate._TIMED", 1e-9)  # a single step
    monkeypatch.setattr("loralib.training.estimate.LAYERS_TIMED", 1)
    arguments = [
        *common(tiny_base),
        *LORA,
        "--lora_layers",
        "1",
        "--task_name",
        "rte",
        "--do_train",
    ]
    arguments += ["--output_dir", "out", "--estimate", "--estimate_length", 5, "--no_cuda"]
    run_glue.main([str(word) for word in arguments])
    # All layers on fake tensors; then one on fake tensors, for its arithmetic, and one for real.
    assert made == [2, 1, 1]


PUBLISHED = {
    "roberta-base": (["--lora_r", 8, "--lora_alpha", 16], 124_647_170, 12 * 2 * 8 * 2 * 768),
    "roberta-large": (["--lora_r", 8, "--lora_alpha", 16], 355_361_794, 24 * 2 * 8 * 2 * 1024),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_s_shape_needs_no_files(estimate, name):
    rank, base, lora = PUBLISHED[name]
    figures = estimate(
        *("--model_name_or_path", name, "--task_name", "rte", "--apply_lora", *rank),
        *("--estimate_length", 4),
    )
    assert figures["parameters"] == f"{base + lora:,}"


def test_the_shape_of_deberta_v2_xxlarge():
    config = AutoConfig.from_pretrained(published_settings("microsoft/deberta-v2-xxlarge"))
    with torch.device("meta"):
        count = AutoModelForSequenceClassification.from_config(config).num_parameters()
    width, layers, span = 1536, 48, 2 * 256
    layer = 12 * width**2 + 13 * width
    convolution = 3 * width**2 + 3 * width
    embeddings = (128_100 + span) * width + 4 * width
    head = width**2 + width + 2 * width + 2
    assert count == embeddings + layers * layer + convolution + head


def test_a_folder_with_a_published_name_is_preferred(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert published_settings("roberta-base") is not None
    (tmp_path / "roberta-base").mkdir()
    assert published_settings("roberta-base") is None
    assert published_settings("roberta-huge") is None


# ---- what is refused ----


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--estimate", "--estimate_rate", "0"], "a number of GFLOP/s above 0, not 0"),
        (["--estimate", "--estimate_rate", "fast"], "estimate_rate has to be a number of GFLOP"),
        (["--estimate", "--estimate_rate=-3"], "above 0, not -3"),
        (["--estimate", "--estimate_devices", "0"], "estimate_devices must be at least 1, not 0"),
        (["--estimate", "--estimate_length", "0"], "estimate_length must be at least 1, not 0"),
        (["--estimate", "--estimate_length", "999"], "999: the model has 64 positions"),
        (["--estimate_rate", "5"], "estimate_rate needs estimate"),
        (["--estimate_devices", "5"], "estimate_devices needs estimate"),
        (["--estimate", "--do_train", "False", "--do_eval"], "add --do_train"),
        (["--estimate", "--lora_r", "4"], "--lora_r needs --apply_lora"),
    ],
)
def test_bad_flags_are_refused(run_glue, tiny_base, tmp_path, monkeypatch, capsys, flags, message):
    arguments = [*common(tiny_base), "--task_name", "rte", "--do_train"]
    line = failure(
        run_glue, [*arguments, "--output_dir", tmp_path / "out", *flags], monkeypatch, capsys
    )
    assert message in line
    assert not (tmp_path / "out").exists()
