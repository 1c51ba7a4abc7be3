"""Tests the flags of the optimizer, and the schedulers against their formulas."""

import argparse
import json
import logging
import math

import pytest
import torch
from torch import nn

import loralib as lora
import optimizer as optimizer_module
from loralib.training.optimizer import AdamW
from optimizer import (
    add_optimizer_params,
    constant,
    cosine,
    create_adam_optimizer,
    create_optimizer_scheduler,
    cycle,
    linear,
)


def parse(*flags: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_optimizer_params(parser)
    return parser.parse_args([str(flag) for flag in flags])


def tensors(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape)) for shape in shapes]


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(5, 3)
        self.ln_1 = nn.LayerNorm(3)
        self.mlp = nn.Linear(3, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.lm_head = nn.Linear(3, 5, bias=False)
        self.lm_head.weight = self.wte.weight


def names_in(model: nn.Module, group: dict) -> list[str]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[parameter] for parameter in group["params"]]


def test_every_trainable_parameter_is_trained_once():
    model = Small()
    flags = "--lr 0.5 --weight_decay 0.2 --correct_bias --adam_epislon 1e-3 --adam_beta1 0.7"
    (group,) = create_adam_optimizer(model, parse(*flags.split())).param_groups
    assert names_in(model, group) == [
        "wte.weight", "ln_1.weight", "ln_1.bias", "mlp.weight", "mlp.bias",
    ]  # fmt: skip
    names = ("lr", "weight_decay", "correct_bias", "eps", "betas")
    assert [group[name] for name in names] == [0.5, 0.2, True, 1e-3, (0.7, 0.98)]


def test_no_decay_bias_exempts_biases_and_layer_norms():
    model = Small()
    args = parse("--no_decay_bias", "--weight_decay", 0.2)
    decaying, undecayed = create_adam_optimizer(model, args).param_groups
    assert names_in(model, decaying) == ["wte.weight", "mlp.weight"]
    assert names_in(model, undecayed) == ["ln_1.weight", "ln_1.bias", "mlp.bias"]
    assert (decaying["weight_decay"], undecayed["weight_decay"]) == (0.2, 0.0)
    assert not decaying["correct_bias"]


def test_no_group_is_empty():
    model = nn.Linear(3, 3, bias=False)
    assert len(create_adam_optimizer(model, parse("--no_decay_bias")).param_groups) == 1


def test_a_frozen_model_is_an_error():
    with pytest.raises(ValueError, match="nothing to train"):
        create_adam_optimizer(Small().requires_grad_(False), parse())


@pytest.mark.parametrize("freeze_A", [False, True])
def test_lora_plus_trains_B_faster_at_every_step(freeze_A):
    flags = "--lr 0.1 --lora_plus_ratio 3 --weight_decay 0.2 --max_step 8 --warmup_step 2"
    model = nn.Sequential(
        lora.Linear(4, 3, r=2, variant="dora", freeze_A=freeze_A), lora.Linear(3, 3, r=1)
    )
    lora.mark_only_lora_as_trainable(model)
    optimizer = create_adam_optimizer(model, parse(*flags.split()))
    scheduler = create_optimizer_scheduler(optimizer, parse(*flags.split()))
    usual, faster = optimizer.param_groups
    assert [name.rpartition(".")[2] for name in names_in(model, faster)] == ["lora_B", "lora_B"]
    assert all(not name.endswith("lora_B") for name in names_in(model, usual))
    assert len(usual["params"]) == (2 if freeze_A else 3)
    assert [group["weight_decay"] for group in (usual, faster)] == [0.2, 0.2]
    for step in range(10):
        scheduler.step()
        assert scheduler.lr == usual["lr"] == 0.1 * linear(step, 2, 8)
        assert faster["lr"] == pytest.approx(3 * usual["lr"], rel=1e-15, abs=0)
    scheduler.load_state_dict({"step": 4, "lr": 0.05})
    assert (usual["lr"], faster["lr"]) == (0.05, pytest.approx(0.15, rel=1e-15))


def test_lora_plus_if_only_B_is_trained():
    flags = "--lr 0.1 --lora_plus_ratio 16 --max_step 8 --scheduler constant"
    model = lora.Linear(4, 3, r=2, freeze_A=True)
    lora.mark_only_lora_as_trainable(model)
    optimizer = create_adam_optimizer(model, parse(*flags.split()))
    scheduler = create_optimizer_scheduler(optimizer, parse(*flags.split()))
    (group,) = optimizer.param_groups
    scheduler.step()
    assert (scheduler.lr, group["lr"]) == (0.1, pytest.approx(1.6, rel=1e-15))


def rates(scheduler, count: int) -> list[float]:
    """Returns the rates of the optimizer's first group at its first steps."""
    found = []
    for _ in range(count):
        scheduler.step()
        assert scheduler.lr == scheduler.optimizer.param_groups[-1]["lr"]
        found.append(scheduler.optimizer.param_groups[0]["lr"])
    return found


def scheduler_for(*flags: object):
    first, second = tensors((1,), (1,))
    args = parse(*flags)
    return create_optimizer_scheduler(
        AdamW([{"params": [first]}, {"params": [second]}], lr=args.lr), args
    )


def half_cosine(x: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * x))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("linear --warmup_step 2", [0, 0.5, 1, 2 / 3, 1 / 3, 0, 0]),
        ("linear", [1, 0.8, 0.6, 0.4, 0.2, 0, 0]),
        ("linear --warmup_step 5", [0, 0.2, 0.4, 0.6, 0.8, 0, 0]),
        ("cosine --warmup_step 2", [0, 0.5, *map(half_cosine, (0.4, 0.6, 0.8)), 0, 0]),
        ("cosine", [1, *map(half_cosine, (0.2, 0.4, 0.6, 0.8)), 0, 0]),
        ("constant --warmup_step 4", [0, 0.25, 0.5, 0.75, 1, 1, 1]),
        ("constant", [1] * 7),
    ],
)
def test_rates_step_by_step(flags, expected):
    points = ["--i_steps", "0,9", "--i_lrs", "1,1"]  # which only cycle uses
    scheduler = scheduler_for("--lr", 0.3, "--max_step", 5, *points, "--scheduler", *flags.split())
    found = rates(scheduler, 7)
    assert found == pytest.approx([0.3 * factor for factor in expected], abs=1e-15)
    assert found == [scheduler.lr_at(step) for step in range(7)]
    assert scheduler.max_step == 5


def test_cycle_interpolates_between_its_points():
    flags = ["--scheduler", "cycle", "--i_steps", "1,3,7", "--i_lrs", "0.1,0.5,0.3"]
    scheduler = scheduler_for(*flags, "--lr", 9, "--max_step", 1000)
    expected = [0.1, 0.1, 0.3, 0.5, 0.45, 0.4, 0.35, 0.3, 0.3]
    found = rates(scheduler, 9)
    assert found == pytest.approx(expected)
    assert {type(rate) for rate in found} == {float}  # NumPy's would keep a checkpoint from loading
    assert scheduler.max_step == 7


def test_cycle_with_a_single_point_is_constant():
    scheduler = scheduler_for("--scheduler", "cycle", "--max_step", 6)
    assert rates(scheduler, 3) == [0.00025] * 3
    assert scheduler.max_step == 6


@pytest.mark.parametrize("factor", [linear, cosine, constant])
def test_factors_without_a_warmup_or_with_a_single_step(factor):
    assert factor(0, 0, 1) == 1
    assert factor(1, 0, 1) == (factor is constant)
    assert factor(0, 1, 1) == 0


def test_cycle_takes_any_step():
    assert [cycle(step, [2, 4], [1.0, 2.0]) for step in (0, 3, 10**9)] == [1.0, 1.5, 2.0]


def test_a_scheduler_resumes_where_it_stopped():
    flags = ["--lr", 0.3, "--max_step", 9, "--warmup_step", 4]
    whole = rates(scheduler_for(*flags), 9)
    stopped, resumed = scheduler_for(*flags), scheduler_for(*flags)
    rates(stopped, 7)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert resumed.lr == whole[6] == resumed.optimizer.param_groups[0]["lr"]
    assert rates(resumed, 2) == whole[7:]


@pytest.mark.parametrize("lr", [0.3, 0])
def test_before_its_first_step_a_scheduler_has_the_optimizers_rate(lr):
    assert scheduler_for("--lr", lr, "--max_step", 5, "--warmup_step", 3).lr == lr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "--max_step or --max_epoch"),
        ("--scheduler cycle", "--max_step or --max_epoch"),
        ("--scheduler cycle --i_steps 0,5", "--i_steps has 2 numbers and --i_lrs has 1"),
        ("--scheduler cycle --i_steps 5,5 --i_lrs 1,1", "larger than the one before"),
        ("--scheduler cycle --i_steps 7,5 --i_lrs 1,1", "larger than the one before"),
        ("--scheduler cycle --i_steps 0,five --i_lrs 1,1", "--i_steps '0,five': not whole"),
        ("--scheduler cycle --i_steps 0,1.5 --i_lrs 1,1", "--i_steps '0,1.5': not whole"),
        ("--scheduler cycle --i_steps 0,5 --i_lrs 1,", "--i_lrs '1,': not numbers"),
        ("--scheduler cycle --i_steps 0,5 --i_lrs 1,nan", "--i_lrs 1,nan: has to be"),
        ("--scheduler cycle --i_steps 0,5 --i_lrs 1,inf", "--i_lrs 1,inf: has to be"),
        ("--scheduler cycle --i_steps 0,5 --i_lrs 1,-1", "--i_lrs 1,-1: has to be"),
    ],
)
def test_flags_that_give_no_schedule(flags, message):
    with pytest.raises(ValueError, match=message):
        scheduler_for(*flags.split())


@pytest.mark.parametrize("name", ["inv_sqrt", "dev_perf", "sine"])
def test_unknown_schedulers_are_refused(name, capsys):
    with pytest.raises(SystemExit):
        parse("--scheduler", name)
    assert f"invalid choice: '{name}'" in capsys.readouterr().err
    args = parse("--max_step", 5)
    args.scheduler = name
    with pytest.raises(ValueError, match=f"--scheduler {name}: no such.*cosine.*linear.*cycle"):
        create_optimizer_scheduler(AdamW(tensors((1,))), args)


@pytest.mark.parametrize(("max_step", "warnings"), [(5, 1), (10, 0)])
def test_a_warmup_longer_than_the_run_is_warned_of(max_step, warnings, caplog):
    with caplog.at_level(logging.WARNING, logger=optimizer_module.__name__):
        scheduler = scheduler_for("--lr", 2, "--max_step", max_step, "--warmup_step", 10)
    assert len(caplog.records) == warnings
    assert rates(scheduler, 5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])
    assert all("the rate ends at 0.8, below --lr 2" in line for line in caplog.messages)


def test_help_lists_the_schedulers_of_the_release_that_are_missing(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "lists inv_sqrt and dev_perf" in text
    assert "{cosine,constant,linear,cycle}" in text


def test_defaults_of_the_flags():
    assert vars(parse()) == {
        "lr": 1e-5,
        "lora_plus_ratio": 1.0,
        "weight_decay": 0.01,
        "correct_bias": False,
        "adam_epislon": 1e-6,
        "no_decay_bias": False,
        "adam_beta1": 0.9,
        "adam_beta2": 0.98,
        "scheduler": "linear",
        "max_step": None,
        "max_epoch": None,
        "warmup_step": 0,
        "i_steps": "0",
        "i_lrs": "0.00025",
    }
