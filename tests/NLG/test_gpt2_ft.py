"""Tests gpt2_ft.py against a plain trainer: losses, learning rates and weights, step by step."""

import itertools
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compare import assert_same_bits
from paths import HELPERS

import gpt2_ft
from data_utils import FT_Dataset
from loralib.io.tensors import read_tensors
from loralib.training import watch
from model import GPT2LMModel

pytestmark = pytest.mark.slow

SCRIPT = Path(gpt2_ft.__file__)

SCHEDULES = {
    "linear": "--scheduler linear --warmup_step 3 --max_epoch 3",
    "cosine": "--scheduler cosine --warmup_step 2 --max_epoch 3",
    "constant": "--scheduler constant --warmup_step 4 --max_step 10",
    "cycle": "--scheduler cycle --i_steps 2,5,11 --i_lrs 0.001,0.02,0.004 --max_step 7",
}
SETTINGS = {
    "scheduler": tuple(SCHEDULES),
    "grad_acc": (1, 3),
    "clip": (0.0, 0.5),
    "label_smooth": (0.0, 0.1),
    "obj": ("clm", "jlm"),
    "correct_bias": (False, True),
    "no_decay_bias": (False, True),
    "lora": (False, True),
}
# Every pair of values of two settings is in one of them.
CASES = [
    ("cosine", 1, 0.0, 0.1, "clm", False, True, True),
    ("cosine", 3, 0.5, 0.0, "jlm", True, False, False),
    ("linear", 1, 0.5, 0.1, "jlm", False, True, False),
    ("linear", 3, 0.0, 0.0, "clm", True, False, True),
    ("constant", 1, 0.5, 0.1, "clm", True, False, True),
    ("constant", 3, 0.0, 0.0, "jlm", False, True, False),
    ("cycle", 1, 0.5, 0.0, "clm", True, True, False),
    ("cycle", 3, 0.0, 0.0, "jlm", True, True, True),
    ("cycle", 3, 0.0, 0.1, "clm", False, False, False),
]


def query_value_key(bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
    query, key, value = bias.chunk(3)
    return query, value, key


@pytest.fixture
def compare(plain_trainer, read_metrics):
    """Compares a finished run with the plain trainer."""

    def compare_with(
        trial, argv: list[str], world_size: int = 1, valid_examples: list | None = None
    ) -> None:
        flags = gpt2_ft.parse_args(argv)
        weights = read_tensors(flags.init_checkpoint)[0]
        plain = plain_trainer(flags, weights, trial.config.n_head, trial.examples, world_size)
        work_dir = Path(flags.work_dir)
        rows, evaluations = read_metrics(work_dir)
        evaluated = {row["step"]: row for row in evaluations}
        best = math.inf
        for number, (row, (loss, lr)) in enumerate(
            itertools.zip_longest(rows, plain.steps(), fillvalue=(None, None)), start=1
        ):
            assert row["step"] == number
            assert row["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-9), f"step {number}"
            assert row["lr"] == pytest.approx(lr, rel=1e-12, abs=0)
            assert row["tokens_per_second"] > 0
            if number % flags.eval_interval == 0:
                valid_loss = plain.valid_loss(valid_examples or trial.valid_examples)
                best = min(best, math.exp(valid_loss))
                row = evaluated.pop(number)
                assert row["valid_loss"] == pytest.approx(valid_loss, rel=1e-5)
                assert row["valid_ppl"] == pytest.approx(math.exp(valid_loss), rel=1e-4)
                assert row["best_ppl"] == pytest.approx(best, rel=1e-4)
        assert not evaluated
        trained = read_tensors(work_dir / f"model.{number}.pt")[0]
        for name, tensor in trained.items():
            expected = plain.p[name.removeprefix("module.transformer.")]
            if name.endswith("c_attn.bias"):
                # The key's bias does not change a softmax. Its gradient is rounding noise, from
                # which AdamW makes steps.
                (*rest, key), (*right, right_key) = map(query_value_key, (tensor, expected))
                torch.testing.assert_close(key.double(), right_key, rtol=0, atol=1e-3)
                tensor, expected = torch.cat(rest), torch.cat(right)
            torch.testing.assert_close(tensor.double(), expected, rtol=1e-3, atol=1e-4)

    return compare_with


def test_every_pair_of_settings_is_in_a_case():
    for (i, first), (j, second) in itertools.combinations(enumerate(SETTINGS.values()), 2):
        pairs = {(case[i], case[j]) for case in CASES}
        assert pairs == set(itertools.product(first, second))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_training_follows_the_formulas(tiny, compare, tmp_path, case):
    setting = dict(zip(SETTINGS, case, strict=True))
    lr = 0.03 if setting["lora"] else 0.003
    more = f"{SCHEDULES[setting['scheduler']]} --lr {lr} --weight_decay 0.5 --eval_interval 4 "
    for name in ("grad_acc", "clip", "label_smooth", "obj"):
        more += f"--{name} {setting[name]} "
    more += " ".join(f"--{name}" for name in ("correct_bias", "no_decay_bias") if setting[name])
    argv = tiny.flags(tmp_path / "run", *more.split(), lora=setting["lora"])
    gpt2_ft.main(argv)
    compare(tiny, argv)


@pytest.mark.parametrize("size", [1, 2, 7, 100])
@pytest.mark.parametrize("obj", ["clm", "jlm"])
def test_an_evaluation_is_the_mean_over_all_targets(tiny, compare, tmp_path, size, obj):
    """It does not depend on the batch size, or on what training adds to the loss."""
    more = f"--valid_batch_size {size} --obj {obj} --max_step 2 --eval_interval 1 "
    more += "--label_smooth 0.2 --lora_dropout 0 --lr 0.03"
    argv = tiny.flags(tmp_path / "run", *more.split())
    gpt2_ft.main(argv)
    compare(tiny, argv)


def test_an_evaluation_has_neither_dropout_nor_gradients(tmp_path):
    path = tmp_path / "valid.jsonl"
    path.write_text(3 * '{"context": [1, 2], "completion": [3]}\n')
    model, modes = torch.nn.Linear(1, 1), []

    def loss_of(model, batch):
        modes.append((model.training, torch.is_grad_enabled()))
        return model.weight.sum()

    alone = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))
    gpt2_ft.evaluate(model, loss_of, FT_Dataset(path, 2, 8), alone)
    assert modes == [(False, False)] * 2
    assert model.training


def test_each_batch_tells_the_watch_that_the_process_goes_on(tiny, monkeypatch, tmp_path):
    beats = []
    monkeypatch.setattr(watch, "beat", lambda: beats.append(1))
    gpt2_ft.main(tiny.flags(tmp_path / "run", "--max_step", 3, "--eval_interval", 2))
    evaluated = math.ceil(len(tiny.valid_examples) / 3)
    assert len(beats) == 3 + evaluated


@pytest.mark.parametrize(("flags", "dtype"), [([], torch.float32), (["--bf16"], torch.bfloat16)])
def test_training_and_evaluation_compute_in_the_flag_s_dtype(
    tiny, monkeypatch, tmp_path, flags, dtype
):
    found, forward, one = [], GPT2LMModel.forward, torch.ones(1, 1)

    def recording(model, *given):
        found.append((model.training, (one @ one).dtype))
        return forward(model, *given)

    monkeypatch.setattr(GPT2LMModel, "forward", recording)
    gpt2_ft.main(tiny.flags(tmp_path / "run", "--max_step", 2, "--eval_interval", 2, *flags))
    assert set(found) == {(True, dtype), (False, dtype)}


def test_best_ppl_is_the_lowest_perplexity_so_far(tiny, read_metrics, tmp_path):
    more = "--scheduler cycle --i_steps 0,3,4,8 --i_lrs 0,0.03,1,1 --eval_interval 1"
    gpt2_ft.main(tiny.flags(tmp_path / "run", *more.split()))
    rows = read_metrics(tmp_path / "run")[1]
    ppl = [row["valid_ppl"] for row in rows]
    assert [row["best_ppl"] for row in rows] == list(itertools.accumulate(ppl, min))
    assert min(ppl) < min(ppl[0], ppl[-1])


@pytest.mark.distributed
def test_two_processes_train_on_the_mean_gradient(launch, trial, compare, tmp_path):
    more = "--grad_acc 2 --clip 0.5 --label_smooth 0.1 --lr 0.01 --max_epoch 2 --eval_interval 3"
    argv = trial.flags(tmp_path / "run", *more.split())
    result = launch("torch.distributed.launch", SCRIPT, *argv, forks=True)
    assert result.returncode == 0, result.stderr
    compare(trial, argv, world_size=2)
    # Only one process logs.
    assert result.stderr.count(": valid_loss ") == 1


@pytest.mark.distributed
def test_two_processes_with_graphs_train_on_the_mean_gradient(
    launch, trial, compare, read_metrics, tmp_path
):
    more = "--grad_acc 2 --clip 0.5 --label_smooth 0.1 --lr 0.01 --max_epoch 2 --eval_interval 3"
    argv = trial.flags(tmp_path / "run", *more.split())
    script = HELPERS / "graphed_run.py"
    result = launch("torch.distributed.launch", script, SCRIPT, *argv, forks=True)
    assert result.returncode == 0, result.stderr
    compare(trial, argv, world_size=2)
    steps = len(read_metrics(tmp_path / "run")[0])
    assert result.stderr.count(f"replays: {steps}\n") == 2


@pytest.mark.distributed
def test_two_processes_of_torchrun(launch_tiny, tiny, compare, tmp_path):
    """Three runs: of the full model, of LoRA, and with one example to evaluate.

    LoRA's run has five batches, so an epoch has two full ones for each process. Its third epoch
    ends after six steps, before step ⌈3 · 5 / 2⌉, at which the rate would be 0.
    """
    more = "--obj jlm --correct_bias --lr 0.003 --scheduler cosine --max_step 8 --grad_acc 3"
    whole = tiny.flags(tmp_path / "whole", *more.split(), "--eval_interval", 2, lora=False)
    more = "--train_batch_size 3 --clip 1 --max_epoch 3 --warmup_step 3 --lr 0.03 --eval_interval 2"
    adapted = tiny.flags(tmp_path / "lora", *more.split())
    # One of the processes has nothing to evaluate.
    one = tmp_path / "one.jsonl"
    one.write_text(json.dumps(tiny.valid_examples[0]))
    more = f"--max_step 2 --valid_data {one} --eval_interval 1 --lr 0.03"
    little = tiny.flags(tmp_path / "little", *more.split())
    result = launch_tiny("torch.distributed.run", whole, adapted, little)
    assert result.returncode == 0, result.stderr
    compare(tiny, whole, world_size=2)
    compare(tiny, adapted, world_size=2)
    compare(tiny, little, world_size=2, valid_examples=tiny.valid_examples[:1])


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--eval_interval", 3], "process 1 on .* has --eval_interval 3, process 0 on .* has 2"),
        (["--lora_targets", "query"], "process 1 on .* has --lora_targets "),
        (["--init_checkpoint", "another.pt"], "process 1 on .* has weights of .*ln_f.bias"),
    ],
)
def test_a_process_with_another_flag_or_base(launch_tiny, tiny, tmp_path, more, message):
    """Otherwise the processes would wait for each other forever, or train different models."""
    tensors = read_tensors(tiny.base)[0]
    name = next(name for name in tensors if name.endswith("ln_f.bias"))
    torch.save({**tensors, name: tensors[name] * 1.001}, tmp_path / "another.pt")
    more = [str(tmp_path / word) if word == "another.pt" else str(word) for word in more]
    given = ["--init_checkpoint", tiny.base, "--eval_interval", 2, "--max_step", 4]
    argv = tiny.flags(tmp_path / "run", *given, "--ddp_timeout", 20)
    result = launch_tiny("torch.distributed.run", argv, more=more)
    assert result.returncode != 0
    assert re.search(f"error: {message}", result.stderr), result.stderr
    assert "hang" not in result.stderr


@pytest.mark.distributed
@pytest.mark.parametrize("lora", [True, False], ids=["LoRA", "all of the model"])
def test_all_processes_start_from_the_first_ones_random_weights(launch_tiny, tiny, tmp_path, lora):
    base = ["--init_checkpoint", str(tiny.base)] if lora else []
    folders = [tmp_path / "one", tmp_path / "other"]
    runs = [tiny.flags(folder, "--max_step", 3, "--lr", 0.01, *base) for folder in folders]
    if not lora:
        runs = [without_base(argv) for argv in runs]
    result = launch_tiny("torch.distributed.run", *runs, draws=99)
    assert result.returncode == 0, result.stderr
    one, other = (read_tensors(folder / "model.3.pt")[0] for folder in folders)
    assert_same_bits(one, other)


def without_base(argv):
    """Returns a command line that trains a full model from random weights."""
    dropped = {"--init_checkpoint", "--lora_dim", "--lora_alpha"}
    pairs = zip(argv[::2], argv[1::2], strict=True)
    return [word for flag, value in pairs if flag not in dropped for word in (flag, value)]
