"""run_glue.py, from its command line to its files, in one process."""

import json
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compare import assert_same_bits
from glue_runs import LORA, SCRIPT, common, lora_of, on_rte, results
from launches import fork_server
from paths import SHARED

from loralib.adapters.fingerprint import fingerprint
from loralib.adapters.formats import read_adapter, write_adapter
from loralib.io.tensors import read_tensors
from loralib.training.locks import LOCK_NAME
from transformers import HfArgumentParser
from transformers.adapter_kinds import fitting_flag
from transformers.fine_tuning.lengths import check_length
from transformers.trainer_utils import list_checkpoints
from transformers.weight_files import read_weights

pytestmark = pytest.mark.slow

RTE_STEPS = 12


# ---- files of a run ----


def test_results_files(trained):
    assert results(trained).keys() == {"eval_loss", "eval_accuracy", "eval_samples"}
    assert results(trained)["eval_samples"] == 13
    train = json.loads((trained / "train_results.json").read_text())
    expected = {"train_runtime", "train_samples_per_second", "train_loss", "train_samples"}
    assert expected | {"epoch", "total_flos", "train_mem_cpu_peak"} == train.keys()
    assert (train["epoch"], train["train_samples"]) == (2.0, 45)
    everything = json.loads((trained / "all_results.json").read_text())
    assert everything == train | json.loads((trained / "eval_results.json").read_text())
    state = json.loads((trained / "trainer_state.json").read_text())
    assert (state["global_step"], state["max_steps"]) == (RTE_STEPS, RTE_STEPS)
    assert [r["step"] for r in state["log_history"] if "loss" in r] == [2, 4, 6, 8, 10, 12]


def test_predictions_are_label_names(trained):
    header, *rows = (trained / "test_results_rte.txt").read_text().splitlines()
    assert header == "index\tprediction"
    assert [row.split("\t")[0] for row in rows] == [str(n) for n in range(7)]
    assert {row.split("\t")[1] for row in rows} <= {"entailment", "not_entailment"}


@pytest.mark.parametrize("where", ["", "checkpoint-4", "checkpoint-12"])
def test_lora_files_hold_the_adapter_the_head_and_metadata(trained, tiny_base, where):
    folder = trained / where
    tensors = lora_of(folder)
    head = {f"classifier.{m}.{p}" for m in ("dense", "out_proj") for p in ("weight", "bias")}
    inside = "roberta.encoder.layer.{}.attention.self.{}.lora_{}"
    lora = {inside.format(n, m, ab) for n in (0, 1) for m in ("query", "value") for ab in "AB"}
    assert tensors.keys() == head | lora
    full = read_weights(folder)
    assert_same_bits(tensors, {name: full[name] for name in tensors})
    safe, metadata = read_tensors(folder / "pytorch_model_lora.safetensors")
    assert_same_bits(tensors, safe)
    base = {f"roberta.{name}": t for name, t in read_weights(tiny_base).items()}
    recorded = metadata.keys() - {"format", "digest"}
    assert {name: json.loads(metadata[name]) for name in recorded} == {
        "rank": 4,
        "alpha": 8,
        "targets": ["query", "value"],
        "bias": "none",
        "task": "rte",
        "head": "sequence_classification",
        "labels": ["entailment", "not_entailment"],
        "text_columns": ["sentence1", "sentence2"],
        "base": str(tiny_base),
        "base_fingerprint": fingerprint(base),
    }


def test_training_does_not_change_the_base(trained, tiny_base):
    base, full = read_weights(tiny_base), read_weights(trained)
    assert_same_bits(base, {name: full[f"roberta.{name}"] for name in base})


# ---- flags ----

FACTS = SHARED / "facts" / "nlu_cli.json"


def parse(run_glue, text: str) -> dict:
    """Returns the settings of a command line, by name."""
    types = (run_glue.ModelArguments, run_glue.DataTrainingArguments, run_glue.TrainingArguments)
    arguments = f"--model_name_or_path m --task_name rte --output_dir o {text}".split()
    parts = HfArgumentParser(types).parse_args_into_dataclasses(arguments)
    return {name: value for part in parts for name, value in vars(part).items()}


@pytest.mark.skipif(not FACTS.is_file(), reason="the release's flags are absent from ../shared")
def test_every_flag_of_the_release_exists_with_its_default(run_glue):
    groups = json.loads(FACTS.read_text())
    ours = {}
    for group, flags in groups.items():
        names = [flag["flag"].removeprefix("--") for flag in flags]
        known = vars(getattr(run_glue, group))["__dataclass_fields__"]
        assert [name for name in names if name not in known] == []
        ours |= {name: known[name].default for name in names}
    release = {f["flag"].removeprefix("--"): f["default"] for g in groups.values() for f in g}
    differ = {name for name in ours if ours[name] != release[name]}
    required = {"model_name_or_path", "output_dir"}
    decided_later = {"adapter_type", "adapter_size", "max_seq_length"}
    # What an adapter's file or the model's settings decide later has no default here. Batches are
    # padded to their longest row by default.
    assert differ == required | decided_later | {"logging_dir", "pad_to_max_length"}
    config = run_glue.PretrainedConfig()
    assert (config.adapter_type, config.adapter_size) == ("houlsby", 64)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", (0.0, 0.0)),
        ("--apply_rdrop", (1.0, 0.0)),
        ("--apply_cutoff", (1.0, 0.1)),
        ("--reg_loss_wgt 0.5 --masking_prob 0.2", (0.5, 0.2)),
        ("--apply_rdrop --reg_loss_wgt 1.0", (1.0, 0.0)),
    ],
)
def test_consistency_flags(run_glue, flags, expected):
    settings = parse(run_glue, flags)
    assert (settings["reg_loss_wgt"], settings["masking_prob"]) == expected


@pytest.mark.parametrize(
    "flags",
    ["--apply_rdrop --apply_cutoff", "--apply_rdrop --masking_prob 0.1",
     "--apply_cutoff --reg_loss_wgt 0.5"],
)  # fmt: skip
def test_contradicting_consistency_flags_are_errors(run_glue, capsys, flags):
    with pytest.raises(SystemExit):
        parse(run_glue, flags)
    assert "leave out those flags, or --" in capsys.readouterr().err


def test_max_seq_length_is_checked_against_the_model_s_positions():
    from transformers import DebertaV2Config, RobertaConfig

    roberta = RobertaConfig(max_position_embeddings=66)
    relative = DebertaV2Config(max_position_embeddings=64, position_biased_input=False)
    absolute = DebertaV2Config(max_position_embeddings=64, position_biased_input=True)
    for config, longest in ((roberta, 64), (relative, 5000), (absolute, 64)):
        check_length(config, longest)
    for config, length in ((roberta, 65), (absolute, 65), (relative, 0), (roberta, -1)):
        with pytest.raises(ValueError, match=f"--max_seq_length {length}"):
            check_length(config, length)


# ---- adapters, biases, other targets ----

BASELINES = {
    "houlsby": ("--apply_adapter --adapter_size 4", "adapter"),
    "pfeiffer": ("--apply_adapter --adapter_type pfeiffer --adapter_size 4", "adapter"),
    "bitfit": ("--apply_bitfit", "bitfit"),
    "targets": ("--apply_lora --lora_r 2 --lora_alpha 4 --lora_targets key output", "lora"),
}


@pytest.mark.parametrize("format", ["bin", "safetensors", "folder", "split"])
@pytest.mark.parametrize("name", BASELINES)
def test_trained_weights_evaluate_to_the_same_results(
    glue, tiny_glue, tmp_path, split_lora, baseline, name, format
):
    """From its own file, or split from the full checkpoint, without flags about its shape."""
    flags, part = BASELINES[name]
    trained = baseline(name)
    given = {
        "bin": trained / f"pytorch_model_{part}.bin",
        "safetensors": trained / f"pytorch_model_{part}.safetensors",
        "folder": trained / "checkpoint-4",
        "split": tmp_path / f"{part}.safetensors",
    }[format]
    if format == "split":
        split_lora.main([str(trained), str(given), "--part", part])
        written = trained / f"pytorch_model_{part}.safetensors"
        assert_same_bits(read_tensors(given)[0], read_tensors(written)[0])
        assert read_tensors(given)[1] == read_tensors(written)[1]
    arguments = ["--task_name", "rte", "--data_dir", tiny_glue, "--do_eval", flags.split()[0]]
    glue(*arguments, f"--{part}_path", given, "--output_dir", "evaluated")
    assert results(tmp_path / "evaluated") == results(trained)


@pytest.fixture(scope="module")
def baseline(run_glue, tiny_base, tiny_glue, tmp_path_factory):
    """Returns the output folder of a short run of one of `BASELINES`, made once."""
    made = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name) / "out"
            arguments = ["--task_name", "rte", "--data_dir", tiny_glue, "--do_train", "--do_eval"]
            arguments += [*BASELINES[name][0].split(), "--max_steps", 4, "--save_steps", 4]
            arguments += ["--output_dir", made[name]]
            run_glue.main([*common(tiny_base), *map(str, arguments)])
        return made[name]

    return make


@pytest.mark.parametrize("name", ["houlsby", "bitfit"])
def test_a_baseline_changes_only_its_own_weights(baseline, tiny_base, name):
    out, part = baseline(name), BASELINES[name][1]
    assert sorted(path.name for path in out.glob("pytorch_model*")) == [
        "pytorch_model.bin",
        f"pytorch_model_{part}.bin",
        f"pytorch_model_{part}.safetensors",
    ]
    base, full = read_weights(tiny_base), read_weights(out)
    moved = {n for n, tensor in base.items() if not torch.equal(tensor, full[f"roberta.{n}"])}
    biases = {name for name in base if name.endswith("bias")}
    assert moved == (biases if name == "bitfit" else set())


@pytest.mark.slow
def test_lora_adapters_and_biases_resume_to_the_same_bits(glue, tiny_glue, tmp_path):
    """LoRA, adapters and biases, with --save_lora_only, which saves only these."""
    flags = ["--apply_adapter", "--adapter_size", 3, "--apply_bitfit", "--save_lora_only"]
    glue(*on_rte(tiny_glue, "whole"), *flags)
    shutil.copytree(tmp_path / "whole" / "checkpoint-4", tmp_path / "resumed" / "checkpoint-4")
    glue(*on_rte(tiny_glue, "resumed"), *flags)
    for part in ("lora", "adapter", "bitfit"):
        files = [tmp_path / out / f"pytorch_model_{part}.bin" for out in ("whole", "resumed")]
        assert_same_bits(*(read_tensors(file)[0] for file in files))
    assert not (tmp_path / "resumed" / "pytorch_model.bin").exists()

    paths = [word for part in ("lora", "adapter", "bitfit") for word in (f"--{part}_path", "whole")]
    switches = ["--apply_lora", "--apply_adapter", "--apply_bitfit"]
    arguments = ["--task_name", "rte", "--data_dir", tiny_glue, "--do_eval"]
    glue(*arguments, *switches, *paths, "--output_dir", "evaluated")
    assert results(tmp_path / "evaluated") == results(tmp_path / "whole")
    with pytest.raises(ValueError, match="trained with apply_adapter as well"):
        glue(*arguments, "--apply_lora", "--lora_path", "whole", "--output_dir", "evaluated")


@pytest.mark.parametrize(
    ("kind", "flags"), [("bitfit", []), ("adapter", ["--adapter_size", 4])], ids=str
)
def test_the_error_about_a_file_of_another_kind_names_flags_that_work(
    glue, tiny_glue, tmp_path, kind, flags
):
    arguments = ["--task_name", "rte", "--data_dir", tiny_glue]
    train = [*arguments, "--do_train", "--max_steps", 1, f"--apply_{kind}", *flags]
    glue(*train, "--output_dir", "out")
    for source in ("out", f"out/pytorch_model_{kind}.bin"):
        with pytest.raises(ValueError, match=f"holds what --apply_{kind} has trained") as error:
            glue(
                *(*arguments, "--do_eval", "--apply_lora", "--lora_r", 4, "--lora_alpha", 8),
                *("--lora_path", source, "--output_dir", "none"),
            )
        assert str(error.value).endswith(
            f"give it as --apply_{kind} --{kind}_path, and leave --apply_lora and every --lora_… "
            "flag out"
        )
        given = [f"--apply_{kind}", f"--{kind}_path", source, "--output_dir", "evaluated"]
        glue(*arguments, "--do_eval", *given)
    assert 0 <= results(tmp_path / "evaluated")["eval_accuracy"] <= 1


def test_the_error_about_patterns_names_flags_to_leave_out(glue, tiny_glue, tmp_path):
    arguments = ["--task_name", "rte", "--data_dir", tiny_glue, "--apply_lora"]
    patterns = ["--lora_rank_pattern", "layer.0.*.value=2", "--lora_alpha_pattern", "query=4"]
    glue(*arguments, "--do_train", "--max_steps", 1, *LORA, *patterns, "--output_dir", "out")
    arguments += ["--do_eval", "--lora_path", "out", "--output_dir", "evaluated"]
    way_out = "leave --lora_r, --lora_rank_pattern and --lora_alpha_pattern out: the file records"
    for flags in (["--lora_r", 8], ["--lora_alpha_pattern", "value=4"], [patterns[0], "query=3"]):
        with pytest.raises(ValueError, match=r"was trained with (rank|alpha)") as error:
            glue(*arguments, "--lora_alpha", 8, *flags)
        assert way_out in fitting_flag(error.value)
    glue(*arguments, "--lora_alpha", 8)
    assert results(tmp_path / "evaluated")["eval_samples"] > 0


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--reg_loss_wgt", 1.0, "--reg_loss_wgt 0.0, but this run has 1.0"),
        ("--lora_dropout", 0.1, "--lora_dropout 0.0, but this run has 0.1"),
        ("--apply_bitfit", True, "--apply_bitfit False, but this run has True"),
        ("--lora_targets", "key", "targets query, value, the model was built with key"),
    ],
)
def test_resuming_with_other_settings_is_an_error(
    glue, trained, tiny_glue, tmp_path, flag, value, message
):
    shutil.copytree(trained / "checkpoint-4", tmp_path / "out" / "checkpoint-4")
    with pytest.raises(ValueError, match=message):
        glue(*on_rte(tiny_glue, "out"), flag, value)


# ---- consistency training, memory, and the dropout of DeBERTa-v2's head ----


@pytest.mark.slow
@pytest.mark.parametrize("family", ["tiny_base", "tiny_deberta_base"])
def test_cutoff_with_gradient_checkpointing(glue, tiny_glue, tmp_path, request, family):
    """Gradient checkpointing keeps the bits of cutoff; the next run uses neither unless told to."""
    base = request.getfixturevalue(family)
    arguments = ["--task_name", "rte", "--data_dir", tiny_glue, "--do_train", "--do_eval", *LORA]
    # All rows are in one batch: dropout changes the loss of a few rows too much.
    arguments += ["--max_steps", 3, "--logging_steps", 1, "--per_device_train_batch_size", 45]
    glue(*arguments, "--output_dir", "plain", base=base)
    glue(*arguments, "--apply_cutoff", "--output_dir", "cutoff", base=base)
    memory = ["--gradient_checkpointing", "--output_dir", "checkpointing"]
    glue(*arguments, "--apply_cutoff", *memory, base=base)
    assert_same_bits(lora_of(tmp_path / "cutoff"), lora_of(tmp_path / "checkpointing"))
    first = [
        json.loads((tmp_path / out / "trainer_state.json").read_text())["log_history"][0]["loss"]
        for out in ("plain", "cutoff")
    ]
    # The losses of two passes are added, and how far their predictions differ.
    assert 1.6 < first[1] / first[0] < 3.5

    config = json.loads((tmp_path / "checkpointing" / "config.json").read_text())
    assert (config["reg_loss_wgt"], config["masking_prob"], config["unk_token_id"]) == (1, 0.1, 3)
    assert {0, 1, 2, 3} <= set(config["special_token_ids"])
    assert config["gradient_checkpointing"]
    # Training that model again uses either only if the flags ask for it again.
    glue(*arguments, "--max_steps", 1, "--output_dir", "next", base=tmp_path / "checkpointing")
    config = json.loads((tmp_path / "next" / "config.json").read_text())
    assert (config["reg_loss_wgt"], config["masking_prob"]) == (0, 0)
    assert not config["gradient_checkpointing"]


def test_cls_dropout_is_saved_and_applied(glue, tiny_deberta_base, tiny_glue, tmp_path):
    arguments = ["--task_name", "rte", "--data_dir", tiny_glue, "--do_train", *LORA]
    arguments += ["--max_steps", 1, "--max_seq_length", 500]
    for value in (None, 0.4):
        flag = [] if value is None else ["--cls_dropout", value]
        glue(*arguments, *flag, "--output_dir", f"out{value}", base=tiny_deberta_base)
        config = json.loads((tmp_path / f"out{value}" / "config.json").read_text())
        assert config["cls_dropout"] == value
    assert not torch.equal(
        *(lora_of(tmp_path / out)["pooler.dense.weight"] for out in ("outNone", "out0.4"))
    )


# ---- the adapter in a new run ----

ALPHA = ["--apply_lora", "--lora_alpha", "8"]
SPLITS = {
    f"{source}-{name}": (source, name)
    for source in ("", "checkpoint-12", "checkpoint-12/pytorch_model.bin")
    for name in ("lora.bin", "lora.safetensors")
}


@pytest.mark.parametrize(
    ("path", "flags"),
    [
        ("pytorch_model_lora.bin", LORA),
        ("pytorch_model_lora.safetensors", ["--apply_lora"]),
        ("pytorch_model_lora.safetensors", LORA),
        ("", ["--apply_lora"]),
        ("checkpoint-12", ["--apply_lora"]),
        # Where the file does not record the rank, the tensors' shapes give it.
        *((name, ALPHA if name.endswith(".bin") else ["--apply_lora"]) for name in SPLITS),
    ],
)
def test_base_and_adapter_evaluate_as_the_trained_model(
    glue, trained, tiny_glue, tmp_path, split_lora, path, flags
):
    adapter = trained / path
    if path in SPLITS:
        source, name = SPLITS[path]
        adapter = tmp_path / name
        split_lora.main([str(trained / source), str(adapter)])
    out = tmp_path / "evaluated"
    arguments = ["--task_name", "rte", "--data_dir", tiny_glue / "RTE", "--do_eval", *flags]
    glue(*arguments, "--lora_path", adapter, "--output_dir", out)
    assert results(out) == results(trained)


def test_an_adapter_in_peft_s_format_evaluates_as_the_trained_model(
    glue, trained, tiny_glue, tmp_path
):
    """Its own rank, alpha and targets are used, from the folder or from the file in it."""
    write_adapter(tmp_path / "peft", read_adapter(trained), "peft")
    arguments = ["--task_name", "rte", "--data_dir", tiny_glue, "--do_eval", "--apply_lora"]
    for path in ("peft", "peft/adapter_model.safetensors"):
        out = tmp_path / "evaluated" / Path(path).name
        glue(*arguments, "--lora_path", tmp_path / path, "--output_dir", out)
        assert results(out) == results(trained)


def test_an_adapter_with_biases_is_evaluated_and_not_trained_on(glue, trained, tiny_glue, tmp_path):
    adapter = read_adapter(trained)
    layer = "roberta.encoder.layer.0.attention.self.query"
    biases = {f"{layer}.bias": torch.full((len(adapter.tensors[f"{layer}.lora_B"]),), 9.0)}
    changed = replace(
        adapter,
        tensors=adapter.tensors | biases,
        metadata=replace(adapter.metadata, bias="lora_only"),
    )
    write_adapter(tmp_path / "peft", changed, "peft")
    flags = ["--task_name", "rte", "--data_dir", tiny_glue, "--apply_lora", "--lora_path"]
    glue(*flags, tmp_path / "peft", "--do_eval", "--output_dir", tmp_path / "evaluated")
    assert results(tmp_path / "evaluated") != results(trained)
    with pytest.raises(ValueError, match="contains biases of the base"):
        glue(*flags, tmp_path / "peft", "--do_train", "--output_dir", tmp_path / "trained")


@pytest.mark.parametrize("flags", [[], LORA, ["--apply_lora"]])
def test_a_full_checkpoint_with_lora_evaluates_as_the_trained_model(
    glue, trained, tiny_glue, tmp_path, flags
):
    arguments = ["--task_name", "rte", "--data_dir", tiny_glue, "--do_eval", "--do_predict"]
    glue(*arguments, *flags, "--output_dir", "evaluated", base=trained / "checkpoint-12")
    assert results(tmp_path / "evaluated") == results(trained)
    predicted = (tmp_path / "evaluated" / "test_results_rte.txt").read_text()
    assert predicted == (trained / "test_results_rte.txt").read_text()


@pytest.mark.slow
def test_bf16_adapter_evaluates_as_the_trained_model(glue, tiny_glue, tmp_path):
    glue(*on_rte(tiny_glue, "half"), "--bf16", "--save_lora_only")
    arguments = ["--task_name", "rte", "--data_dir", tiny_glue, "--do_eval", "--apply_lora"]
    glue(*arguments, "--bf16", "--lora_path", "half", "--output_dir", "evaluated")
    assert results(tmp_path / "evaluated") == results(tmp_path / "half")


def reversed_classes(folder, to):
    """Copies a trained model with its head's classes reversed and one name in capitals."""
    shutil.copytree(folder, to)
    for checkpoint in list_checkpoints(to):
        shutil.rmtree(checkpoint)
    tensors = read_weights(to)
    for name in ("classifier.out_proj.weight", "classifier.out_proj.bias"):
        tensors[name] = tensors[name].flip(0)
    for path in {*to.glob("pytorch_model*"), *to.glob("*.safetensors")}:
        path.unlink()
    torch.save(tensors, to / "pytorch_model.bin")
    config = json.loads((to / "config.json").read_text())
    names = ["NOT_ENTAILMENT", "entailment"]
    config["id2label"] = dict(enumerate(names))
    config["label2id"] = {name: number for number, name in enumerate(names)}
    (to / "config.json").write_text(json.dumps(config))
    return to


def test_a_head_with_the_classes_in_another_order(glue, trained, tiny_glue, tmp_path):
    """Models on the hub may have another order, as roberta-large-mnli does."""
    model = reversed_classes(trained, tmp_path / "reversed")
    data = ["--task_name", "rte", "--data_dir", tiny_glue, "--do_eval", "--output_dir"]
    glue(*data, "eval", "--do_predict", base=model)
    assert results(Path("eval")) == pytest.approx(results(trained), abs=1e-6)
    words = [folder / "test_results_rte.txt" for folder in (Path("eval"), trained)]
    assert words[0].read_text() == words[1].read_text()
    glue(*data, "out", "--do_train", "--max_steps", 1, "--learning_rate", 1e-30, base=model)
    out = Path("out")
    assert results(out) == pytest.approx(results(trained), abs=1e-6)
    assert json.loads((out / "config.json").read_text())["id2label"] == {
        "0": "entailment",
        "1": "not_entailment",
    }


def test_an_adapter_can_start_training_for_another_task(glue, trained, tiny_glue, tmp_path, caplog):
    arguments = ["--task_name", "mnli", "--data_dir", tiny_glue, "--do_train", "--apply_lora"]
    path = trained / "pytorch_model_lora.safetensors"
    glue(*arguments, "--lora_path", path, "--max_steps", 1, "--output_dir", "next")
    assert "is for another task, so these are newly initialized: classifier.out_proj" in caplog.text
    tensors = lora_of(tmp_path / "next")
    assert tensors["classifier.out_proj.weight"].shape == (3, 32)
    name = "roberta.encoder.layer.0.attention.self.query.lora_A"
    assert (tensors[name] - lora_of(trained)[name]).abs().max() < 0.02


def test_training_an_adapted_model_warns_that_it_stays_adapted(glue, trained, tiny_glue, caplog):
    arguments = ["--task_name", "rte", "--data_dir", tiny_glue, "--do_eval"]
    glue(*arguments, "--output_dir", "silent", "--apply_lora", base=trained / "checkpoint-12")
    glue(*arguments, "--output_dir", "evaluated", base=trained / "checkpoint-12")
    assert "stays on" not in caplog.text
    arguments += ["--do_train", "--max_steps", 1]
    glue(*arguments, "--output_dir", "trained", base=trained / "checkpoint-12")
    assert caplog.text.count("checkpoint-12 was trained with --apply_lora, which stays on") == 1


def test_weights_that_an_adapter_loads_are_not_reported_as_new(glue, trained, tiny_glue, caplog):
    arguments = ["--task_name", "rte", "--data_dir", tiny_glue, "--apply_lora"]
    path = trained / "pytorch_model_lora.safetensors"
    glue(*arguments, "--do_eval", "--lora_path", path, "--output_dir", "out")
    assert "newly initialized" not in caplog.text
    glue(*arguments, "--do_train", "--max_steps", 1, "--lora_path", path, "--output_dir", "next")
    assert "newly initialized" not in caplog.text
    glue(*arguments, "--do_train", "--max_steps", 1, *LORA, "--output_dir", "new")
    assert "has no head weights: they are newly initialized" in caplog.text


@pytest.mark.parametrize(
    ("first", "second", "new_kinds"),
    [
        (["--apply_bitfit"], LORA, ["LoRA"]),
        (["--apply_bitfit"], ["--apply_adapter", "--adapter_size", "4"], ["adapter"]),
        (LORA, ["--apply_adapter", "--adapter_size", "4"], ["adapter"]),
        (["--apply_adapter", "--adapter_size", "4"], LORA, ["LoRA"]),
    ],
)
def test_weights_that_no_adapter_loads_are_reported_as_new(
    glue, tiny_glue, caplog, first, second, new_kinds
):
    arguments = ["--task_name", "rte", "--data_dir", tiny_glue, "--do_train", "--max_steps", 1]
    glue(*arguments, *first, "--output_dir", "out")
    caplog.clear()
    path = {"--apply_bitfit": "bitfit", "--apply_lora": "lora", "--apply_adapter": "adapter"}
    given = [*first, f"--{path[first[0]]}_path", "out", *second]
    glue(*arguments, *given, "--output_dir", "next")
    new = [message for message in caplog.messages if "newly initialized" in message]
    assert [message.partition(" weights")[0].split()[-1] for message in new] == new_kinds
    assert all(message.endswith("they are newly initialized") for message in new)


# ---- resuming ----


def test_an_output_folder_with_a_checkpoint_is_resumed(glue, trained, tiny_glue, tmp_path):
    shutil.copytree(trained / "checkpoint-4", tmp_path / "out" / "checkpoint-4")
    glue(*on_rte(tiny_glue, "out"))
    assert_same_bits(lora_of(tmp_path / "out"), lora_of(trained))
    assert results(tmp_path / "out") == results(trained)


@pytest.mark.parametrize("base", ["base", "checkpoint"])
def test_a_model_s_folder_is_not_resumed_as_a_checkpoint(
    glue, trained, tiny_base, tiny_glue, tmp_path, caplog, base
):
    folder = tiny_base if base == "base" else trained / "checkpoint-12"
    arguments = [*on_rte(tiny_glue, "out"), "--max_steps", 3, "--logging_steps", 1]
    glue(*arguments, base=folder)
    assert "resuming" not in caplog.text
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert [record["step"] for record in state["log_history"] if "loss" in record] == [1, 2, 3]


def test_overwrite_output_dir_starts_a_new_run(glue, trained, tiny_glue, tmp_path, caplog):
    shutil.copytree(trained, tmp_path / "out")
    glue(*on_rte(tiny_glue, "out"), "--overwrite_output_dir", "--max_steps", 5)
    assert "are replaced at the first save: to resume from them, stop it now" in caplog.text
    names = [Path(path).name for path in list_checkpoints(tmp_path / "out")]
    assert names == ["checkpoint-4"]
    assert json.loads((tmp_path / "out" / "trainer_state.json").read_text())["global_step"] == 5


@pytest.mark.slow
def test_a_run_that_is_killed_and_started_again_ends_with_the_same_bits(
    run_glue, tiny_base, tiny_glue, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)

    def arguments(out):
        long = [*on_rte(tiny_glue, out), "--max_steps", 60, "--save_steps", 5]
        return list(map(str, [*common(tiny_base), *long, "--save_total_limit", 2]))

    printed = [tmp_path / name for name in ("stdout", "stderr")]
    process = fork_server("NLU").start([SCRIPT, *arguments("killed")], os.environ, printed)
    deadline = time.monotonic() + 120
    while not list_checkpoints("killed") and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    assert process.returncode == -signal.SIGKILL
    assert not Path("killed/pytorch_model_lora.bin").exists()

    run_glue.main(arguments("killed"))
    run_glue.main(arguments("whole"))
    assert_same_bits(lora_of(tmp_path / "killed"), lora_of(tmp_path / "whole"))
    assert results(tmp_path / "killed") == results(tmp_path / "whole")
    hidden = {path.name for path in Path("killed").iterdir() if path.name.startswith(".")}
    assert hidden <= {LOCK_NAME}
