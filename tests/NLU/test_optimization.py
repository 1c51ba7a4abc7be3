"""Schedules and Adafactor: 4.4.2's rates and weights, and what they refuse."""

import json
import math
import pickle

import make_upstream_4_4_fixture as maker
import pytest
import torch

from transformers import Adafactor, SchedulerType, get_scheduler, optimization
from transformers.activations import ACT2FN, get_activation

FIXTURE = json.loads(maker.FIXTURE.read_text("utf-8"))
SCHEDULES = [
    (name, index) for name, calls in maker.SCHEDULES.items() for index in range(len(calls))
]


def optimizer_of(lr=maker.PEAK):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


# ---- schedules ----


@pytest.mark.parametrize(("name", "index"), SCHEDULES)
def test_rates_are_upstreams(name, index):
    ours = maker.rates(name, maker.SCHEDULES[name][index])
    assert ours == pytest.approx(FIXTURE["rates"][name][index], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", maker.SCHEDULES)
def test_a_schedule_goes_on_from_a_step(name):
    """By `last_epoch`, and by its state."""
    call, optimizer = maker.SCHEDULES[name][0], optimizer_of()
    schedule = getattr(optimization, name)(optimizer, **call)
    for _ in range(5):
        optimizer.step()
        schedule.step()
    later = optimizer_of()
    later.param_groups[0]["initial_lr"] = maker.PEAK
    started = getattr(optimization, name)(later, **call, last_epoch=4)
    restored = getattr(optimization, name)(optimizer_of(), **call)
    restored.load_state_dict(pickle.loads(pickle.dumps(schedule.state_dict())))
    assert started.get_last_lr() == restored.get_last_lr() == schedule.get_last_lr()


@pytest.mark.parametrize("kind", SchedulerType)
def test_a_schedule_by_its_name_has_the_defaults(kind):
    function = optimization.TYPE_TO_SCHEDULER_FUNCTION[kind]
    call = {"num_warmup_steps": 3, "num_training_steps": 11}
    own = function.__code__.co_varnames[: function.__code__.co_argcount]
    named, direct = optimizer_of(), optimizer_of()
    by_name = get_scheduler(kind.value, named, **call)
    by_function = function(direct, **{name: call[name] for name in call if name in own})
    for _ in range(12):
        assert by_name.get_last_lr() == by_function.get_last_lr()
        for optimizer, schedule in ((named, by_name), (direct, by_function)):
            optimizer.step()
            schedule.step()


@pytest.mark.parametrize("kind", ["linear", "cosine", "cosine_with_restarts", "polynomial"])
def test_a_run_of_one_step_has_the_full_rate(kind):
    optimizer = optimizer_of()
    schedule = get_scheduler(kind, optimizer, num_warmup_steps=0, num_training_steps=1)
    assert schedule.get_last_lr() == pytest.approx([maker.PEAK], rel=1e-12)
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == pytest.approx([0.0], abs=2e-7)  # the polynomial's lr_end


@pytest.mark.parametrize("end", [0.3, 0.5])
def test_a_final_rate_that_is_not_below_the_learning_rate_is_refused(end):
    with pytest.raises(
        ValueError, match=rf"ends at {end}, which is not below the learning rate 0\.3"
    ):
        optimization.get_polynomial_decay_schedule_with_warmup(optimizer_of(0.3), 1, 9, lr_end=end)


@pytest.mark.parametrize(
    ("kind", "given", "missing"),
    [
        ("linear", {"num_training_steps": 9}, "num_warmup_steps"),
        ("constant_with_warmup", {}, "num_warmup_steps"),
        ("linear", {"num_warmup_steps": 0}, "num_training_steps"),
    ],
)
def test_a_schedule_without_the_steps_that_it_needs_is_refused(kind, given, missing):
    with pytest.raises(ValueError, match=f"^the {kind} schedule needs {missing}$"):
        get_scheduler(kind, optimizer_of(), **given)


# ---- Adafactor ----


@pytest.mark.parametrize("name", maker.ADAFACTORS)
def test_adafactors_weights_are_upstreams(name):
    settings = maker.ADAFACTORS[name]
    ours = maker.weights_after(lambda parameters: Adafactor(parameters, **settings))
    for mine, theirs in zip(ours, FIXTURE["adafactor"][name], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-7)


def test_adafactors_relative_steps():
    """The first update has a root mean square of 1, and the rate is min(0.01, 1/√t) of the size."""
    weight = torch.nn.Parameter(torch.full((2, 2), 4.0))
    weight.grad = torch.ones(2, 2)
    Adafactor([weight]).step()
    torch.testing.assert_close(weight.detach(), torch.full((2, 2), 4.0 - 0.01 * 4.0))


def test_adafactor_takes_a_closure_and_leaves_weights_without_gradients():
    used, unused = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2))

    def closure():
        loss = used.square().sum()
        loss.backward()
        return loss

    assert Adafactor([used, unused]).step(closure).item() == 4
    assert (used < 1).all()
    assert (unused == 1).all()


@pytest.mark.parametrize(("gradient", "dtype"), [(0.0, torch.float32), (1e-4, torch.float16)])
def test_adafactor_with_gradients_whose_squares_are_zero(gradient, dtype):
    """Such as the first ones of LoRA's A, and those whose squares half precision rounds to 0."""
    for shape in ((2,), (2, 2)):
        weight = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
        weight.grad = torch.full_like(weight, gradient)
        Adafactor([weight]).step()
        expected = torch.full_like(weight, 0.99 if gradient else 1.0)
        torch.testing.assert_close(weight.detach(), expected)


def test_adafactor_factors_each_matrix_of_a_stack():
    settings = {"lr": 0.1, "relative_step": False, "scale_parameter": False}
    torch.manual_seed(0)
    together, gradients = torch.randn(2, 3, 2, 4)
    apart = together.clone()
    for weights, grads in (([together], [gradients]), (apart.unbind(), gradients.unbind())):
        parameters = [torch.nn.Parameter(weight) for weight in weights]
        optimizer = Adafactor(parameters, **settings, clip_threshold=math.inf)
        for _ in range(2):
            for parameter, gradient in zip(parameters, grads, strict=True):
                parameter.grad = gradient * (1 + parameter.detach())
            optimizer.step()
    torch.testing.assert_close(together, apart)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.1}, "with lr, relative_step=False"),
        ({"relative_step": False}, "without relative_step needs lr"),
        ({"lr": 0.1, "relative_step": False, "warmup_init": True}, "needs relative_step=True"),
    ],
)
def test_adafactor_without_a_rate_or_with_two_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Adafactor([torch.nn.Parameter(torch.zeros(1))], **settings)


# ---- activations ----


def test_activations_by_name():
    x = torch.linspace(-4, 4, 33, dtype=torch.float64)
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    expected = {
        "gelu": 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
        "gelu_new": 0.5 * x * (1 + torch.tanh(inner)),
        "gelu_fast": 0.5 * x * (1 + torch.tanh(inner)),
        "linear": x,
        "mish": x * torch.tanh(torch.log1p(torch.exp(x))),
        "relu": x.clamp(min=0),
        "sigmoid": 1 / (1 + torch.exp(-x)),
        "silu": x / (1 + torch.exp(-x)),
        "swish": x / (1 + torch.exp(-x)),
        "tanh": torch.tanh(x),
    }
    assert ACT2FN.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(get_activation(name)(x), values)


@pytest.mark.parametrize("name", ["bogus", None])
def test_unknown_activations_are_refused(name):
    with pytest.raises(KeyError, match=f"unknown activation function '{name}'"):
        get_activation(name)
