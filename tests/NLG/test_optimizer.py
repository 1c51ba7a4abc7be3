"""AdamW and the schedulers against the formulas, written out one number at a time."""

import argparse
import io
import json
import logging
import math
import re

import pytest
import torch
from torch import nn

import optimizer as optimizer_module
from optimizer import (
    AdamW,
    add_optimizer_params,
    constant,
    cosine,
    create_adam_optimizer,
    create_optimizer_scheduler,
    cycle,
    linear,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def parse(*flags: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_optimizer_params(parser)
    return parser.parse_args([str(flag) for flag in flags])


def reference(
    p: float,
    gradients: list[float],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    correct_bias: bool,
) -> float:
    """What AdamW makes of one number."""
    m = v = 0.0
    for t, g in enumerate(gradients, start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        c = math.sqrt(1 - betas[1] ** t) / (1 - betas[0] ** t) if correct_bias else 1
        p -= lr * c * m / (math.sqrt(v) + eps)
        p -= lr * weight_decay * p
    return p


def tensors(*shapes: tuple[int, ...], dtype=torch.float64, device="cpu") -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=dtype).to(device)) for shape in shapes]


def set_gradients(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("correct_bias", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_adamw_follows_the_formula(correct_bias, weight_decay, device):
    settings = {"lr": 0.02, "betas": (0.9, 0.98), "eps": 0.1, "weight_decay": weight_decay}
    settings["correct_bias"] = correct_bias
    parameters = tensors((3,), (2, 2), device=device)
    before = torch.cat([p.detach().flatten() for p in parameters]).tolist()
    optimizer, history = AdamW(parameters, **settings), []
    for step in range(7):
        set_gradients(parameters, step)
        history.append(torch.cat([p.grad.flatten() for p in parameters]).tolist())
        optimizer.step()
    after = torch.cat([p.detach().flatten() for p in parameters]).tolist()
    expected = [
        reference(p, list(gradients), **settings)
        for p, gradients in zip(before, zip(*history, strict=True), strict=True)
    ]
    assert after == pytest.approx(expected, rel=1e-12)


def test_defaults_are_those_of_the_release():
    (group,) = AdamW(tensors((2,))).param_groups
    names = ("lr", "betas", "eps", "weight_decay", "correct_bias")
    assert [group[name] for name in names] == [1e-5, (0.9, 0.98), 1e-6, 0.01, True]


def test_without_eps_and_decay_it_is_torchs():
    settings = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 0.0, "weight_decay": 0.0}
    ours, theirs = tensors((4, 3)), tensors((4, 3))
    optimizers = AdamW(ours, **settings), torch.optim.AdamW(theirs, **settings)
    for step in range(5):
        for parameters, optimizer in zip((ours, theirs), optimizers, strict=True):
            set_gradients(parameters, step)
            optimizer.step()
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-12, atol=0)


def test_a_tensor_without_a_gradient_stays_and_keeps_its_own_step():
    first, second = tensors((2,), (2,))
    optimizer = AdamW([first, second], lr=0.1, eps=1e-6)
    unmoved = second.detach().clone()
    set_gradients([first], 0)
    optimizer.step()
    assert torch.equal(second, unmoved)
    assert list(optimizer.state) == [first]
    set_gradients([first, second], 1)
    gradients, before = second.grad.tolist(), second.tolist()
    optimizer.step()
    assert [optimizer.state[p]["step"] for p in (first, second)] == [2, 1]
    expected = [
        reference(p, [g], 0.1, (0.9, 0.98), 1e-6, 0.01, True)
        for p, g in zip(before, gradients, strict=True)
    ]
    assert second.tolist() == pytest.approx(expected, rel=1e-12)


def test_state_survives_a_file():
    def trained(steps: range, parameters, optimizer) -> None:
        for step in steps:
            set_gradients(parameters, step)
            optimizer.step()

    whole = tensors((3,), (2, 2), dtype=torch.float32)
    optimizer = AdamW(whole, lr=0.1)
    trained(range(3), whole, optimizer)
    file = io.BytesIO()
    torch.save((optimizer.state_dict(), [p.detach() for p in whole]), file)
    trained(range(3, 6), whole, optimizer)

    file.seek(0)
    state, values = torch.load(file, weights_only=True)
    assert set(state["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    resumed = [nn.Parameter(value) for value in values]
    other = AdamW(resumed, lr=7.0)
    other.load_state_dict(state)
    trained(range(3, 6), resumed, other)
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


def test_a_closure_is_run_with_gradients():
    (p,) = tensors((2,))
    optimizer = AdamW([p], lr=0.1)

    def loss():
        optimizer.zero_grad()
        value = (p**2).sum()
        value.backward()
        return value

    first, second = optimizer.step(loss).item(), optimizer.step(loss).item()
    assert second < first


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_scaler_skips_an_overflow(device):
    ours, plain = tensors((3,), device=device), tensors((3,), device=device)
    scaler = torch.amp.GradScaler(device, init_scale=8.0)
    scaled, unscaled = AdamW(ours, lr=0.1), AdamW(plain, lr=0.1)
    for step in range(3):
        set_gradients(ours, step)
        set_gradients(plain, step)
        ours[0].grad *= 8.0
        if step == 1:
            ours[0].grad[0] = math.inf
        else:
            unscaled.step()
        scaler.scale(torch.zeros((), device=device))
        scaler.step(scaled)
        scaler.update(8.0)
    assert scaled.state[ours[0]]["step"] == 2
    torch.testing.assert_close(ours[0], plain[0], rtol=1e-12, atol=0)


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        AdamW(embedding.parameters()).step()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -1.0),
        ("lr", math.nan),
        ("lr", math.inf),
        ("eps", -1e-8),
        ("weight_decay", -0.1),
        ("betas", (1.0, 0.9)),
        ("betas", (0.9, -0.1)),
    ],
)
def test_hyperparameters_out_of_range(name, value):
    with pytest.raises(ValueError, match=f"^{name} ha.*{re.escape(str(value))}$"):
        AdamW(tensors((1,)), **{name: value})


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


def test_everything_that_needs_a_gradient_is_trained_once():
    model = Small()
    flags = "--lr 0.5 --weight_decay 0.2 --correct_bias --adam_epislon 1e-3 --adam_beta1 0.7"
    (group,) = create_adam_optimizer(model, parse(*flags.split())).param_groups
    assert names_in(model, group) == [
        "wte.weight", "ln_1.weight", "ln_1.bias", "mlp.weight", "mlp.bias",
    ]  # fmt: skip
    names = ("lr", "weight_decay", "correct_bias", "eps", "betas")
    assert [group[name] for name in names] == [0.5, 0.2, True, 1e-3, (0.7, 0.98)]


def test_biases_and_layer_norms_can_be_kept_from_decay():
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


def rates(scheduler, count: int) -> list[float]:
    """The rates that an optimiser has at its first steps."""
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
    scheduler = scheduler_for("--lr", 0.3, "--max_step", 5, "--scheduler", *flags.split())
    found = rates(scheduler, 7)
    assert found == pytest.approx([0.3 * factor for factor in expected], abs=1e-15)
    assert found == [scheduler.lr_at(step) for step in range(7)]
    assert scheduler.max_step == 5


def test_cycle_joins_its_points():
    flags = ["--scheduler", "cycle", "--i_steps", "1,3,7", "--i_lrs", "0.1,0.5,0.3"]
    scheduler = scheduler_for(*flags, "--lr", 9, "--max_step", 1000)
    expected = [0.1, 0.1, 0.3, 0.5, 0.45, 0.4, 0.35, 0.3, 0.3]
    assert rates(scheduler, 9) == pytest.approx(expected)
    assert scheduler.max_step == 7


def test_cycle_with_a_single_point_is_constant():
    scheduler = scheduler_for("--scheduler", "cycle", "--max_step", 6)
    assert rates(scheduler, 3) == [0.00025] * 3
    assert scheduler.max_step == 6


@pytest.mark.parametrize("factor", [linear, cosine, constant])
def test_factors_take_no_warmup_and_a_single_step(factor):
    assert factor(0, 0, 1) == 1
    assert factor(1, 0, 1) == (factor is constant)
    assert factor(0, 1, 1) == 0


def test_cycle_takes_any_step():
    assert [cycle(step, [2, 4], [1.0, 2.0]) for step in (0, 3, 10**9)] == [1.0, 1.5, 2.0]


def test_a_scheduler_goes_on_where_it_stopped():
    flags = ["--lr", 0.3, "--max_step", 9, "--warmup_step", 4]
    whole = rates(scheduler_for(*flags), 9)
    stopped, resumed = scheduler_for(*flags), scheduler_for(*flags)
    rates(stopped, 7)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert resumed.lr == whole[6] == resumed.optimizer.param_groups[0]["lr"]
    assert rates(resumed, 2) == whole[7:]


def test_before_its_first_step_a_scheduler_has_the_optimisers_rate():
    assert scheduler_for("--lr", 0.3, "--max_step", 5, "--warmup_step", 3).lr == 0.3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "--max_step or --max_epoch"),
        ("--max_step 0", "--max_step has to be at least 1, but is 0"),
        ("--max_step 5 --warmup_step -1", "--warmup_step"),
        ("--scheduler cycle", "--max_step or --max_epoch"),
        ("--scheduler cycle --i_steps 0,5", "--i_steps has 2 numbers and --i_lrs has 1"),
        ("--scheduler cycle --i_steps 5,5 --i_lrs 1,1", "larger than the one before"),
        ("--scheduler cycle --i_steps 7,5 --i_lrs 1,1", "larger than the one before"),
        ("--scheduler cycle --i_steps 0,five --i_lrs 1,1", "--i_steps '0,five': not whole"),
        ("--scheduler cycle --i_steps 0,1.5 --i_lrs 1,1", "--i_steps '0,1.5': not whole"),
        ("--scheduler cycle --i_steps 0,5 --i_lrs 1,", "--i_lrs '1,': not numbers"),
        ("--scheduler cycle --i_steps 0,5 --i_lrs 1,nan", "--i_lrs 1,nan: has to be"),
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
def test_a_warmup_after_the_end_is_worth_a_warning(max_step, warnings, caplog):
    with caplog.at_level(logging.WARNING, logger=optimizer_module.__name__):
        scheduler = scheduler_for("--lr", 1, "--max_step", max_step, "--warmup_step", 10)
    assert len(caplog.records) == warnings
    assert rates(scheduler, 5) == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])


def test_help_says_what_is_refused(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "lists inv_sqrt and dev_perf" in text
    assert "{cosine,constant,linear,cycle}" in text


def test_defaults_of_the_flags():
    assert vars(parse()) == {
        "lr": 1e-5,
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
