"""Tests gpt2_ft.py --estimate: its figures against measured steps, and the flags it refuses."""

import argparse
import os
import subprocess

import pytest
import torch
from covering import covering
from launches import preloaded_python
from measured_memory import measured_peak
from paths import ROOT
from torch.utils.data import DistributedSampler

import gpt2_ft
from data_utils import Row, collate
from loralib.training.step_cost import cost_of_batch
from model import GPT2Config, GPT2LMModel

# Steps on fake tensors take a second each.
pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SHAPE = {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 600, "n_positions": 128}
RANKS = (4, 0)  # LoRA, or all of it is trained


def flags(*more: str) -> argparse.Namespace:
    data = ("--train_data", "x", "--valid_data", "x", "--init_checkpoint", "x", "--max_step", "9")
    return gpt2_ft.parse_args([*data, *more])


def batch_of(lengths: list[int]) -> dict[str, torch.Tensor]:
    """Returns a batch of rows with these lengths, whose second halves are targets."""
    rows = (torch.randint(600, (length + 1,), dtype=torch.int32) for length in lengths)
    return collate([Row(row, len(row) - 1, len(row) // 2) for row in rows])


@pytest.mark.parametrize(
    ("rank", "half", "lengths"),
    covering(RANKS, [(), ("--bf16",)], [[100, 90, 12, 3], [40] * 8]),
)
def test_estimated_memory_is_within_a_tenth_of_a_steps_peak(tmp_path, rank, half, lengths):
    """The peak is that of PyTorch's allocator, without the buffers that operations use inside."""
    args = flags("--lora_dim", str(rank), "--label_smooth", "0.1", *half)
    config = GPT2Config(**SHAPE, lora_attn_dim=rank, lora_dropout=0.1)

    def build():
        return gpt2_ft.training_of(GPT2LMModel(config), args, CPU)

    batch = batch_of(lengths)
    measured = measured_peak(build(), batch, tmp_path)
    assert cost_of_batch(build, batch, CPU).memory.total == pytest.approx(measured, rel=0.1)


def test_estimated_operations_are_those_of_the_formula():
    """Each weight takes part in three products: forward, and the gradients of input and weight.

    The head computes its products for targets only.
    """
    config = GPT2Config(**SHAPE)
    rows, length, width = 8, 20, SHAPE["n_embd"]
    taken = cost_of_batch(
        lambda: gpt2_ft.training_of(GPT2LMModel(config), flags("--lora_dim", "0"), CPU),
        batch_of([length] * rows),
        CPU,
    )
    targets = rows * (length - (length + 1) // 2)
    tokens, blocks = rows * length, SHAPE["n_layer"]
    # For tokens that are no targets, the last block computes only queries, keys and values.
    weights = width**2 * ((12 * blocks - 9) * tokens + 9 * targets)
    weights += width * SHAPE["vocab_size"] * targets
    attention = blocks * rows * length**2 * width * 2
    # Forward q kᵀ and p v; backward the gradients of their four factors, and perhaps q kᵀ again.
    assert (taken.operations - 3 * 2 * weights) / attention in (6, 7)


# ---- the script ----


@pytest.fixture
def figures_of(tiny, tmp_path, capsys):
    """``figures_of(*flags)``: what the script prints, by the first words of each line."""

    def run(*more: object, rate: str = "100") -> dict[str, str]:
        argv = tiny.flags(tmp_path / "run", *more, "--estimate", "--estimate_rate", rate)
        gpt2_ft.main(argv)
        assert not (tmp_path / "run").exists()
        lines = capsys.readouterr().out.strip().splitlines()
        return {line[:24].strip(): line[24:].strip() for line in lines if line}

    return run


def test_a_run_on_data(figures_of, tiny):
    figures = figures_of("--max_epoch", 3, "--init_checkpoint", "not_there.pt")
    lora = 2 * (2 * 2 * 16 + 2 * 16 * 2)  # A and B of query and value, in two blocks
    assert figures["trained"].startswith(f"{lora:,} ")
    assert figures["optimizer steps"] == "12"  # 14 rows make four batches, in each of three epochs
    assert figures["a batch"].startswith("4 rows; ")
    assert figures["rate of a device"] == "100 GFLOP/s (given)"


@pytest.mark.parametrize(
    ("length", "steps"),
    [
        (("--max_epoch", 3, "--max_step", 100), "12"),
        (("--scheduler", "cycle", "--i_steps", "0,2,7", "--i_lrs", "1,2,0"), "7"),
    ],
)
def test_a_run_ends_with_its_schedule_or_its_last_epoch(figures_of, length, steps):
    assert figures_of(*length)["optimizer steps"] == steps


def test_without_lora_everything_is_trained(tiny, tmp_path, capsys):
    argv = tiny.flags(tmp_path / "run", "--max_step", 5, "--estimate", "--estimate_rate", "100")
    argv[argv.index("--lora_dim") + 1] = "0"
    gpt2_ft.main(argv)
    assert "(100.00 %)" in capsys.readouterr().out


def test_accumulation_and_more_devices(figures_of):
    figures = figures_of("--max_epoch", 7, "--grad_acc", 2, "--estimate_devices", 3)
    assert figures["an optimizer step"] == "6 batches, 2 a device"
    # An epoch's 16 rows are 6 on each device, which are one full batch of 4; two are an update.
    assert figures["optimizer steps"] == "3"
    # The seventh batch is computed, too.
    step, run = (float(figures[f"time of {what}"].split()[0]) for what in ("a step", "the run"))
    assert run == pytest.approx(step * 7 / 2, rel=1e-2)


class Searched(Exception):
    """Ends an estimate where it searches its batches: (the batches of each epoch, lengths)."""


def search(epochs, lengths):
    """Stands for `notable_batches`."""
    raise Searched(list(epochs), lengths)


def test_batches_of_all_devices_and_epochs_are_searched(figures_of, monkeypatch):
    monkeypatch.setattr(gpt2_ft, "notable_batches", search)
    with pytest.raises(Searched) as searched:
        figures_of("--max_epoch", 3, "--estimate_devices", 2, "--random_seed", 7)
    found, lengths = searched.value.args
    samplers = [DistributedSampler(lengths, 2, rank, seed=7) for rank in range(2)]
    expected = []
    for epoch in (1, 2, 3):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        # 16 rows with those that fill up the last batch: two batches of 4 on each device.
        expected.append([order[at : at + 4] for order in map(list, samplers) for at in (0, 4)])
    assert found == expected


def test_without_data_rows_have_the_maximum_length(figures_of):
    figures = figures_of("--train_data", "not_there.jsonl", "--max_step", 5)
    assert figures["a batch"] == "4 rows; 48 tokens, at most 48"
    assert figures["optimizer steps"] == "5"


def test_with_a_length_instead_of_data_the_number_of_steps_is_unknown(figures_of):
    figures = figures_of("--estimate_length", 5, "--max_epoch", 5)
    assert figures["a batch"] == "4 rows; 20 tokens, at most 20"
    assert "optimizer steps" not in figures


def test_float16_without_a_gpu(figures_of):
    assert figures_of("--max_step", 5, "--fp16")["computed in"] == "float16, on cpu"


def test_steps_with_cuda_graphs_are_counted_on_a_cpu(figures_of):
    assert figures_of("--max_step", 5, "--cuda_graphs") == figures_of("--max_step", 5)


def test_a_rate_is_measured_in_steps_of_two_blocks(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("loralib.training.estimate._TIMED", 1e-9)  # a single step
    gpt2_ft.main(tiny.flags(tmp_path / "run", "--max_step", 5, "--estimate"))
    assert "GFLOP/s (measured here)" in capsys.readouterr().out


@pytest.mark.parametrize("blocks", [1, 3])
def test_with_layers_changes_the_number_of_blocks(blocks):
    config = GPT2Config(**SHAPE, lora_attn_dim=4, lora_rank_pattern={"h.3.attn.c_attn": 2})
    other = config.with_layers(blocks)
    assert (other.n_layer, other.lora_rank_pattern) == (blocks, {})
    assert config.with_layers(4) is config


@pytest.mark.slow
def test_a_recipe_needs_no_files():
    script, flags = ROOT / "NLG" / "e2e_gpt2_md.sh", "--estimate --estimate_rate 9 "
    flags += "--estimate_length 4"
    path = f"{preloaded_python().parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", script, *flags.split()],
        env={**os.environ, "PATH": path, "NPROC": "3"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    # r = 4, query and value of 24 blocks, 1024 wide.
    assert f"trained                 {24 * 2 * 4 * 2 * 1024:,} " in done.stdout
    assert "devices                 3\n" in done.stdout


# ---- errors ----


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--estimate", "--estimate_rate", "0"], "a number of GFLOP/s above 0, not 0"),
        (["--estimate", "--estimate_rate", "fast"], "estimate_rate has to be a number of GFLOP"),
        (["--estimate", "--estimate_devices", "0"], "estimate_devices must be at least 1"),
        (["--estimate", "--estimate_length", "0"], "estimate_length must be at least 1"),
        (["--estimate_rate", "5"], "estimate_rate needs estimate"),
        (["--estimate_length", "5"], "estimate_length needs estimate"),
    ],
)
def test_values_that_are_refused(more, message):
    with pytest.raises(ValueError, match=message):
        flags(*more)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--seq_len", "999"], "--seq_len 999: the model has 32 positions"),
        (["--grad_acc", "2"], "the run has 1 steps, so it would make no update"),
    ],
)
def test_what_a_run_refuses(tiny, tmp_path, more, message):
    argv = tiny.flags(tmp_path / "run", "--estimate", "--max_step", "1", *more)
    with pytest.raises(ValueError, match=message):
        gpt2_ft.main(argv)
