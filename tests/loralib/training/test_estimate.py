"""What is counted of a training step, against formulas and against what real steps take."""

from functools import partial

import pytest
import torch
from measured_memory import measured_peak
from torch import nn

from loralib.training import estimate as module
from loralib.training.estimate import (
    LAYERS_TIMED,
    Estimate,
    LiveBytes,
    Memory,
    Plan,
    Rows,
    Training,
    cost_of_batch,
    estimate,
    measure_rate,
    notable_batches,
    rate_of,
)
from loralib.training.optimizer import AdamW

CPU = torch.device("cpu")
ROWS, WIDE, INNER, OUT = 32, 64, 128, 10


def training_of(model: nn.Module, make=AdamW) -> Training:
    """A loop whose loss is the sum of what the model returns."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make(trained, lr=1e-3)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Training(model, optimizer, lambda batch: model(batch).sum().backward(), update)


def two_layers(layers: int | None = None) -> Training:
    """A frozen layer and a trained one."""
    model = nn.Sequential(nn.Linear(WIDE, INNER), nn.ReLU(), nn.Linear(INNER, OUT))
    model[0].requires_grad_(False)
    return training_of(model)


def test_what_a_small_step_takes():
    cost = cost_of_batch(two_layers, torch.randn(ROWS, WIDE), CPU)
    frozen, trained = WIDE * INNER + INNER, INNER * OUT + OUT
    assert (cost.parameters, cost.trained) == (frozen + trained, trained)
    assert cost.memory.weights == 4 * (frozen + trained)
    assert cost.memory.gradients == 4 * trained
    assert cost.memory.optimizer == 8 * trained
    # Forward through both, and the gradient of the second one's weight.
    assert cost.operations == 2 * ROWS * (WIDE * INNER + 2 * INNER * OUT)


def test_memory_is_what_a_step_takes(tmp_path):
    batch = torch.randn(4 * ROWS, WIDE)
    cost = cost_of_batch(two_layers, batch, CPU)
    assert cost.memory.total == pytest.approx(measured_peak(two_layers(), batch, tmp_path), rel=0.1)


class Packed(nn.Module):
    """Decides by the values of a mask, and draws more numbers than any machine can hold."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8)

    def forward(self, mask):
        lengths = mask.sum(1).tolist()
        assert torch.rand(10**6, 10**7).shape == (10**6, 10**7)
        rows = self.embedding(torch.arange(mask.shape[1]))
        return torch.cat([rows[:length] for length in lengths])


def test_integers_are_real_and_large_random_numbers_are_not():
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    held = cost_of_batch(lambda: training_of(Packed()), mask, CPU).memory.total
    assert held > 10**6 * 10**7 * 4


def test_weights_take_no_memory():
    def build() -> Training:
        model = nn.Linear(2_000_000, 1_000_000, bias=False)
        return training_of(model, torch.optim.SGD)

    cost = cost_of_batch(build, torch.randn(1, 2_000_000), CPU)
    assert cost.memory.weights == cost.memory.gradients == 8 * 10**12
    assert cost.memory.optimizer == 0


def test_tied_weights_are_held_once():
    def build() -> Training:
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        model[1].weight = model[0].weight
        return training_of(model)

    cost = cost_of_batch(build, torch.randn(2, 8), CPU)
    assert (cost.parameters, cost.memory.weights) == (64, 256)


def test_accumulated_gradients_are_held_beside_the_next_ones():
    def build() -> Training:
        return training_of(nn.Linear(1000, 1000, bias=False), torch.optim.SGD)

    once, twice = (cost_of_batch(build, torch.randn(1, 1000), CPU, n) for n in (1, 4))
    assert twice.memory.total >= once.memory.total + 4 * 1000 * 1000
    assert twice.operations == once.operations


def test_bytes_that_are_held():
    weight = torch.ones(100)
    with LiveBytes([{"weight": weight}]) as live:
        view, copy = weight[:50], weight + 1
        assert live.held == 400
        again = copy.view(10, 10)
        assert live.held == 400
        del copy
        assert live.held == 400
        del again
        assert (live.held, live.peak) == (0, 400)
    assert len(view) == 50


# ---- rates ----


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "fast", ""])
def test_a_rate_that_is_none(text):
    with pytest.raises(ValueError, match=f"a number of GFLOP/s above 0, not {text}$"):
        rate_of(text)


def test_a_rate_is_in_gflop_a_second():
    assert rate_of("1.5e3") == 1.5e12


def test_a_measured_rate_is_of_whole_steps(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    made = []

    def build() -> Training:
        made.append(two_layers())
        return made[-1]

    batch = torch.randn(ROWS, WIDE)
    operations = cost_of_batch(two_layers, batch, CPU).operations
    # Steps of a second each, until two seconds are over.
    asked = []
    monkeypatch.setattr(module, "choose_products", lambda *given, **_: asked.append(given))
    assert measure_rate(build, batch, CPU, torch.bfloat16) == operations
    assert len(made[-1].optimizer.state) == 2  # it was trained
    # As a run would: its products are measured first.
    assert asked == [(module.frozen_weights(made[-1].model), torch.bfloat16)]


# ---- the run ----


def test_notable_batches():
    lengths = [15, 1, 9, 9, 4, 4]
    typical, largest, most_pairs = notable_batches([[0, 1], [2, 3], [4, 5]], lengths)
    assert typical == Rows([0, 1], 16)  # the mean is 14
    assert largest == Rows([2, 3], 18)
    assert most_pairs == Rows([0, 1], 16)  # 226, 162 and 32


def plan_of(**changes) -> Plan:
    settings = {
        "build": two_layers,
        "batch_of": lambda rows: torch.randn(len(rows), WIDE),
        "typical": Rows([0, 1], 20),
        "largest": Rows([0, 1, 2], 30),
        "most_pairs": Rows([0, 1, 2], 30),
        "batches": 2,
        "steps": 100,
        "device": CPU,
        "dtype": torch.float32,
        "devices": 1,
        "rate": 1e9,
    }
    return Plan(**settings | changes)


def test_memory_is_the_largest_batch_s_and_arithmetic_a_typical_one_s():
    plan = plan_of()
    taken = estimate(plan)
    assert taken.memory == cost_of_batch(two_layers, torch.randn(3, WIDE), CPU, 2).memory
    assert taken.operations == cost_of_batch(two_layers, torch.randn(2, WIDE), CPU).operations
    assert taken.rate == 1e9


@pytest.mark.parametrize("pairs", [range(2), range(9)])
def test_memory_is_the_batch_s_that_takes_most(pairs):
    """Of the one of most tokens, here three, and the one of most pairs."""
    taken = estimate(plan_of(most_pairs=Rows(pairs, 20)))
    most = torch.randn(max(3, len(pairs)), WIDE)
    assert taken.memory == cost_of_batch(two_layers, most, CPU, 2).memory
    assert taken.operations == cost_of_batch(two_layers, torch.randn(2, WIDE), CPU).operations


def test_on_several_devices_gradients_are_in_buckets_as_well():
    one, three = (estimate(plan_of(devices=count)) for count in (1, 3))
    assert three.memory.gradients == 2 * one.memory.gradients
    assert three.memory.total == one.memory.total + one.memory.gradients
    assert three.operations == one.operations


@pytest.mark.parametrize("rate", [None, 1e9])
def test_what_takes_long_is_said_before(monkeypatch, caplog, rate):
    monkeypatch.setattr(module, "measure_rate", lambda *given: 7.0)
    caplog.set_level("INFO")
    estimate(plan_of(rate=rate))
    assert ["counting" in said for said in caplog.messages] == [True, *([False] * (rate is None))]
    assert "measuring the rate of this cpu with 2 layers" in caplog.text or rate


def test_without_a_rate_that_of_few_layers_is_measured(monkeypatch):
    asked = []
    monkeypatch.setattr(module, "measure_rate", lambda build, *_: asked.append(build) or 7.0)
    assert estimate(plan_of(rate=None)).rate == 7.0
    (build,) = asked
    assert isinstance(build, partial)
    assert build.args == (LAYERS_TIMED,)


def test_the_table():
    memory = Memory(3 * 2**29, 2**20, 2**21, 2**30)
    taken = Estimate(plan_of(devices=4), 1_000_000, 2500, memory, 10**9, 1e10)
    assert str(taken).splitlines() == [
        "parameters              1,000,000",
        "trained                 2,500 (0.25 %)",
        "computed in             float32, on cpu",
        "devices                 4",
        "an optimizer step       8 batches, 2 a device",
        "a batch                 2 rows; 20 tokens, at most 30",
        "",
        "memory a device",
        "  weights                    1.500 GiB",
        "  gradients                  0.001 GiB",
        "  optimizer                  0.002 GiB",
        "  activations                1.000 GiB",
        "  total                      2.503 GiB",
        "",
        "rate of a device        10 GFLOP/s (given)",
        "arithmetic of a step    0.008 TFLOP",
        "time of a step          0.2 s",
        "optimizer steps         100",
        "arithmetic of the run   0.001 PFLOP",
        "time of the run         20 s",
    ]


def test_the_table_without_a_known_end():
    taken = Estimate(plan_of(steps=None, rate=None), 10, 5, Memory(1, 1, 1, 1), 10**9, 1e10)
    assert "measured here" in str(taken)
    assert "of the run" not in str(taken)
