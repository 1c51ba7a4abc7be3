"""Tests that GPT-2's steps and beam search do not wait for a GPU, and give the CPU's results.

Most tests use a simulated GPU, see simulated_gpu.py.
"""

import copy
import json
from pathlib import Path

import pytest
import torch
from compare import assert_close_to_rounding, rounding
from launches import launch
from paths import HELPERS
from simulated_gpu import GPUS, SimulatedGpu, on_cpu, to_cpu

import gpt2_ft
import loralib as lora
import model as model_module
from beam import BeamSettings, TreeCache, search
from data_utils import Row, collate
from gpt2_ft_arguments import parse_args
from gpu import DistEnv
from loralib.training.precision import Precision, cast_frozen
from model import GPT2Config, GPT2LMModel, head_loss

# The most launches of a step of two blocks: forward, backward, bfloat16's casts, the optimizer.
LAUNCHES = 150
# The files that wait at the end of an epoch, for its loss and its checkpoint.
FILES_AT_EPOCHS_END = {"losses.py", "tensors.py"}
# How many additions follow one another in the small model.
TERMS = 400


@pytest.fixture
def gpu():
    with SimulatedGpu() as gpu:
        yield gpu


@pytest.fixture
def steps(gpu, monkeypatch):
    """A list of the waits and the number of launches of each step, since the step before it."""
    found = []

    def note():
        found.append((list(gpu.waits), gpu.launches.total()))
        gpu.waits.clear()
        gpu.launches.clear()

    monkeypatch.setattr(gpt2_ft.watch, "beat", note)
    return found


# ---- training ----


def files_of(waits: list[str]) -> set[str]:
    return {Path(wait.rpartition(" in ")[2]).name.partition(":")[0] for wait in waits}


def test_no_step_waits(tiny, tmp_path, steps):
    """Only an epoch's first of four steps waits: for the model's copy, or for the checkpoint."""
    more = "--bf16 --log_interval 100 --clip 1.0 --label_smooth 0.1 --grad_acc 2 --no_cuda_graphs"
    gpt2_ft.main(tiny.flags(tmp_path, "--max_step", 8, *more.split()))
    assert len(steps) == 8
    (first, _), (after_an_epoch, _) = steps[0], steps[4]
    # Before the first step, the model is copied to the device.
    assert files_of(first) == {"gpt2_ft.py", "lora_layer.py"}
    assert all(wait.startswith("a copy to the device") for wait in first)
    assert files_of(after_an_epoch) == FILES_AT_EPOCHS_END
    for number, (waits, launches) in enumerate(steps):
        if number % 4 != 0:
            assert waits == []
            assert launches <= LAUNCHES


@pytest.mark.gpu
def test_no_step_waits_on_a_gpu(tiny, tmp_path, monkeypatch):
    """From the first step to the third and last, a wait for a real GPU is an error."""
    modes = iter(["error", "error", "default"])
    beat = lambda: torch.cuda.set_sync_debug_mode(next(modes))  # noqa: E731
    monkeypatch.setattr(gpt2_ft.watch, "beat", beat)
    try:
        half = ["--bf16"] if torch.cuda.is_bf16_supported(including_emulation=False) else []
        more = ["--log_interval", 100, "--no_cuda_graphs", *half]
        gpt2_ft.main(tiny.flags(tmp_path, "--max_step", 3, *more))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["--bf16", "--fp16"])
def test_frozen_weights_reach_the_device_in_half(tiny, tmp_path, gpu, monkeypatch, precision):
    moved = {}

    def note(model, args):
        moved.update({n: p.dtype for n, p in model.named_parameters() if p.is_cuda})
        moved["casts"] = gpu.launches["_to_copy"]
        return create_adam_optimizer(model, args)

    create_adam_optimizer = gpt2_ft.create_adam_optimizer
    monkeypatch.setattr(gpt2_ft, "create_adam_optimizer", note)
    gpt2_ft.main(tiny.flags(tmp_path, "--max_step", 1, precision, "--no_cuda_graphs"))
    assert moved.pop("casts") == 0
    half = {"--bf16": torch.bfloat16, "--fp16": torch.float16}[precision]
    assert moved == {name: torch.float32 if "lora_" in name else half for name in moved}
    assert "transformer.wte.weight" in moved


def test_float16_waits_only_for_the_scaler(tiny, tmp_path, steps):
    gpt2_ft.main(
        tiny.flags(tmp_path, "--max_step", 3, "--fp16", "--log_interval", 100, "--no_cuda_graphs")
    )
    for waits, _ in steps[1:]:
        assert len(waits) == 1
        assert waits[0].startswith("_local_scalar_dense in ")
        assert "precision.py" in waits[0]


def test_logging_waits_once(tiny, tmp_path, steps):
    gpt2_ft.main(
        tiny.flags(tmp_path, "--max_step", 4, "--bf16", "--log_interval", 1, "--no_cuda_graphs")
    )
    assert [len(waits) for waits, _ in steps[1:]] == [1, 1, 1]


@pytest.mark.slow
def test_a_validation_waits_once(tiny, tmp_path, gpu, monkeypatch):
    """It does so with any number of batches."""
    waits = []

    def evaluate(*given):
        gpu.waits.clear()
        loss = _evaluate(*given)
        waits.append(list(gpu.waits))
        return loss

    _evaluate = gpt2_ft.evaluate
    monkeypatch.setattr(gpt2_ft, "evaluate", evaluate)
    more = "--max_step 2 --bf16 --eval_interval 1 --no_cuda_graphs"
    for size in (1, 7):
        gpt2_ft.main(tiny.flags(tmp_path / str(size), *more.split(), "--valid_batch_size", size))
    assert [len(each) for each in waits] == [1] * 4


@pytest.mark.slow
def test_a_step_whose_loss_is_not_finite_is_not_saved(tiny, tmp_path, gpu, error_of):
    """The rate explodes at the fifth step; the loss of the sixth is read in the eighth."""
    rates = "--scheduler cycle --i_steps 0,3,4,12 --i_lrs 0.01,0.01,1e30,1e30 --log_interval 100"
    error = error_of(tiny.flags(tmp_path, *rates.split(), "--no_cuda_graphs"))
    assert "the loss of step 6 is nan at learning rate 1e+30: that step is not saved" in error
    assert [path.name for path in tmp_path.glob("model.*")] == ["model.4.pt"]


def losses_of(work_dir: Path) -> list[float]:
    lines = (work_dir / "metrics.jsonl").read_text().splitlines()
    return [row.get("loss", row.get("valid_loss")) for row in map(json.loads, lines)]


@pytest.mark.slow
def test_a_run_has_the_cpus_losses(tiny, tmp_path):
    more = ["--max_step", "4", "--lr", "1e-4", "--eval_interval", "2"]
    gpt2_ft.main(tiny.flags(tmp_path / "cpu", *more))
    with SimulatedGpu():
        gpt2_ft.main(tiny.flags(tmp_path / "gpu", *more, "--no_cuda_graphs"))
    ours, theirs = losses_of(tmp_path / "gpu"), losses_of(tmp_path / "cpu")
    assert len(theirs) == 6
    assert ours == pytest.approx(theirs, abs=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("how", [[], ["--no_cuda_graphs", "--fp16"], ["--torch_compile"]])
def test_a_run_on_a_gpu_has_the_cpus_losses(tiny, tmp_path, monkeypatch, how):
    flags = ["--max_step", "4", "--lr", "1e-4", "--eval_interval", "2"]
    with monkeypatch.context() as hidden:
        hidden.setattr(torch.cuda, "is_available", lambda: False)
        gpt2_ft.main(tiny.flags(tmp_path / "cpu", *flags))
    gpt2_ft.main(tiny.flags(tmp_path / "gpu", *flags, *how))
    ours, theirs = losses_of(tmp_path / "gpu"), losses_of(tmp_path / "cpu")
    assert len(theirs) == 6
    assert ours == pytest.approx(theirs, abs=0.05 if "--fp16" in how else 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [[], ["--fp16"]])
def test_a_gpus_rate_is_measured(tiny, tmp_path, monkeypatch, precision):
    monkeypatch.setattr("loralib.training.estimate._TIMED", 0.1)
    more = ["--max_step", "4", "--estimate", "--estimate_length", "10", *precision]
    args = parse_args(list(map(str, tiny.flags(tmp_path, *more))))
    found = gpt2_ft.estimate_run(args, DistEnv(0, 1, 0, torch.device("cuda", 0)))
    assert found.rate > 0
    assert found.plan.device.type == "cuda"


@pytest.mark.gpu
@pytest.mark.parametrize("how", [[], ["--cuda_graphs"], ["--cuda_graphs", "--grad_acc", "2"]])
@pytest.mark.parametrize("gpus", [1, 2])
def test_two_processes_on_gpus(tiny, tmp_path, environment_with_gpus, gpus, how):
    """The losses are those on a CPU. Processes with a GPU each use NCCL, those on one GPU gloo."""
    if torch.cuda.device_count() < gpus:
        pytest.skip("needs two GPUs")
    script = [HELPERS / "tiny_gpt2_ft.py"]
    on_gpus = script if gpus == 2 else [HELPERS / "on_one_gpu.py", *script]
    losses = []
    for name, environment, command in (
        ("cpu", {"CUDA_VISIBLE_DEVICES": ""}, script),
        ("gpu", environment_with_gpus, on_gpus),
    ):
        more = [flag for flag in how if name == "gpu" or flag != "--cuda_graphs"]
        flags = tiny.flags(tmp_path / name, *["--max_step", "4", "--lr", "1e-4"], *more)
        calls = tmp_path / f"{name}.json"
        calls.write_text(json.dumps([{"argv": flags, "kill_in_step": None}]))
        run = launch(2, *command, calls, **environment)
        assert run.returncode == 0, run.stderr[-3000:]
        losses.append(losses_of(tmp_path / name))
    assert losses[1] == pytest.approx(losses[0], abs=1e-3)


def small_model(**settings) -> GPT2LMModel:
    torch.manual_seed(3)
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 30, "n_positions": 40}
    model = GPT2LMModel(GPT2Config(**shape | settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@pytest.mark.parametrize("at_once", [4, 2048])
@pytest.mark.parametrize(("dtype", "terms"), [(torch.float32, TERMS), (torch.bfloat16, 16)])
@pytest.mark.parametrize("kind", GPUS)
def test_losses_and_gradients_are_the_cpus(monkeypatch, kind, dtype, terms, at_once):
    """One of the rows has no target. `at_once` of the ten targets are computed at a time."""
    monkeypatch.setattr(model_module, "_TARGETS_AT_ONCE_ON_GPU", at_once)
    expected = small_model(lora_attn_dim=2)
    lora.mark_only_lora_as_trainable(expected)
    model = copy.deepcopy(expected)
    rows = [
        Row(torch.randint(30, (n + 1,)).int(), n, first) for n, first in ((9, 3), (4, 0), (7, 7))
    ]
    batch = collate(rows)
    names = ("input", "target", "mask", "packed_rows")

    def loss_of(network, device, **how):
        if dtype is not torch.float32:
            cast_frozen(network, dtype)
        *tensors, packed = (batch[name].to(device, **how) for name in names)
        with Precision(dtype, device).autocast():
            loss = network(*tensors, packed_rows=packed)
        loss.backward()
        return loss

    theirs = loss_of(expected, "cpu")
    with kind() as gpu:
        ours = loss_of(model.to("cuda:0"), "cuda")
        if kind is SimulatedGpu:
            assert gpu.launches["amax"] == -(-10 // at_once)
    assert_close_to_rounding(to_cpu(ours), theirs, terms, dtype)
    for (name, own), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None), name
        if own.grad is not None:
            assert own.grad.is_cuda
            allowed = rounding(0, terms, dtype, float(other.grad.norm()))
            assert (to_cpu(own.grad) - other.grad).norm() <= allowed, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradient_of_the_heads_loss_has_no_wrong_factor(gpu, dtype):
    """The factor 1 / 240.0001, rounded to half precision, would be off by 0.3 %."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(240, 32).to(dtype), torch.randn(50, 32).to(dtype)
    targets, mask, found = torch.randint(50, (240,)), torch.ones(240), []
    for device in ("cpu", "cuda:0"):
        given = [x.clone().to(device) for x in (hidden, weight, targets, mask)]
        leaf = given[0].requires_grad_()
        loss = head_loss(leaf, *given[1:], 0.1) / (given[3].sum() + 0.0001)
        found.append(on_cpu(torch.autograd.grad(loss, leaf)[0]).double())
    theirs, ours = found
    factor = (ours * theirs).sum() / (theirs * theirs).sum()
    assert factor.item() == pytest.approx(1, abs=5e-4)


# ---- beam search ----

PROMPTS = [[3, 9], [5], [1, 20, 7, 7, 12, 4, 26], [17, 2, 2, 8], [11]]


@pytest.mark.slow
@pytest.mark.parametrize("length_penalty", [0.8, -0.5])
@pytest.mark.parametrize("beams", [1, 3])
def test_beams_are_the_cpus(gpu, beams, length_penalty):
    settings = BeamSettings(
        beam=beams,
        eval_len=20,
        length_penalty=length_penalty,
        no_repeat_ngram_size=2,
        repetition_penalty=1.1,
        min_length=2,
        eos_token_ids=(3, 7, 12, 15, 28),
    )
    model = small_model().double().eval()
    expected = search(model, PROMPTS, settings)
    assert len({len(text) for text in expected}) > 1
    assert search(model.to("cuda:0"), PROMPTS, settings) == expected


def test_beams_with_gpus_as_the_default_device(gpu):
    model = small_model().eval().to("cuda:0")
    settings = BeamSettings(beam=3, eval_len=6, eos_token_ids=(29,))
    expected = search(model, PROMPTS, settings)
    with torch.device("cuda:0"):
        assert search(model, PROMPTS, settings) == expected


def test_all_layers_share_one_mask(gpu):
    """If the mask's rows were not aligned to 8 slots, PyTorch would copy it in each layer."""
    launched = []
    for layers in (1, 3):
        model = small_model(n_layer=layers).eval().to("cuda:0")
        gpu.launches.clear()
        search(model, PROMPTS, BeamSettings(beam=3, eval_len=4, eos_token_ids=(29,), min_length=4))
        assert gpu.launches["_scaled_dot_product_efficient_attention"] >= 3 * layers
        launched.append(
            [gpu.launches[name] for name in ("masked_fill", "bitwise_not", "zeros_like")]
        )
    assert launched[0] == launched[1]


def test_launches_of_a_step_of_beam_search(gpu):
    """Limits a layer's launches, and those of all else, which are the same for a larger model."""

    def launches_a_step(layers: int) -> int:
        model, counts = small_model(n_layer=layers).eval().to("cuda:0"), []
        for length in (4, 5):
            settings = BeamSettings(
                beam=3,
                eval_len=length,
                eos_token_ids=(29,),
                min_length=length,
                no_repeat_ngram_size=2,
            )
            gpu.launches.clear()
            search(model, PROMPTS, settings)
            counts.append(gpu.launches.total())
        return counts[1] - counts[0]

    one, three = launches_a_step(1), launches_a_step(3)
    a_layer = (three - one) / 2
    assert a_layer <= 13
    assert one - a_layer <= 75


@pytest.mark.slow
def test_beam_search_waits_when_its_cache_is_full(gpu):
    """It waits every `TreeCache.ROOM` steps: for scores, and for the size and slots of the copy."""
    model = small_model().eval().to("cuda:0")
    counts = []
    for copies in (0, 1, 3):
        length = TreeCache.ROOM * (copies + 1)
        settings = BeamSettings(beam=3, eval_len=length, eos_token_ids=(29,), min_length=length)
        gpu.waits.clear()
        search(model, PROMPTS, settings)
        counts.append(len(gpu.waits))
    assert counts == [counts[0] + 3 * copies for copies in (0, 1, 3)]
