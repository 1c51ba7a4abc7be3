"""Tests of estimates: a training step's counts against formulas and real steps, and the table."""

from functools import partial
from itertools import chain, repeat

import pytest
import torch
from measured_memory import measured_peak
from torch import nn

from loralib.training import estimate as module
from loralib.training.estimate import (
    LAYERS_TIMED,
    Estimate,
    Plan,
    Rows,
    estimate,
    measure_rate,
    notable_batches,
    rate_of,
)
from loralib.training.optimizer import AdamW
from loralib.training.step_cost import (
    LiveBytes,
    Memory,
    Training,
    _Operations,
    cost_of_batch,
)

CPU = torch.device("cpu")
ROWS, WIDE, INNER, OUT = 32, 64, 128, 10


def training_of(model: nn.Module, make=AdamW) -> Training:
    """A training loop whose loss is the sum of the model's output."""
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


def test_counts_of_a_small_step_follow_the_formulas():
    cost = cost_of_batch(two_layers, torch.randn(ROWS, WIDE), CPU)
    frozen, trained = WIDE * INNER + INNER, INNER * OUT + OUT
    assert (cost.parameters, cost.trained) == (frozen + trained, trained)
    assert cost.memory.weights == 4 * (frozen + trained)
    assert cost.memory.gradients == 4 * trained
    assert cost.memory.optimizer == 8 * trained
    # Forward through both layers, and the gradient of the second layer's weight.
    assert cost.operations == 2 * ROWS * (WIDE * INNER + 2 * INNER * OUT)


def test_memory_is_about_that_of_a_real_step(tmp_path):
    batch = torch.randn(4 * ROWS, WIDE)
    cost = cost_of_batch(two_layers, batch, CPU)
    assert cost.memory.total == pytest.approx(measured_peak(two_layers(), batch, tmp_path), rel=0.1)


class Packed(nn.Module):
    """Depends on values, and draws more random numbers than any machine can hold."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8)

    def forward(self, mask):
        lengths = mask.sum(1).tolist()
        assert mask.repeat(2**15, 1).sum().item() == 2**15 * sum(lengths)
        assert torch.rand(10**6, 10**7).shape == (10**6, 10**7)
        assert torch.arange(3).tolist() == [0, 1, 2]
        rows = self.embedding(torch.arange(mask.shape[1]))
        assert rows.t()[:, mask[0] == 1].shape == (8, lengths[0])
        return torch.cat([rows[:length] for length in lengths])


def test_batches_are_real_and_large_random_tensors_are_not():
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    held = cost_of_batch(lambda: training_of(Packed()), mask, CPU).memory.total
    assert held > 10**6 * 10**7 * 4


def test_weights_take_no_memory():
    def build() -> Training:
        model = nn.Linear(2_000_000, 1_000_000, bias=False, dtype=torch.bfloat16)
        return training_of(model, torch.optim.SGD)

    cost = cost_of_batch(build, torch.ones(1, 2_000_000, dtype=torch.bfloat16), CPU)
    assert cost.memory.weights == cost.memory.gradients == 4 * 10**12
    assert cost.memory.optimizer == 0
    assert cost.memory.activations < 10**9  # a single row's


def test_tied_weights_are_held_once_and_buffers_as_well():
    def build() -> Training:
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        model[1].weight = model[0].weight
        model.register_buffer("positions", torch.arange(4))
        return training_of(model)

    cost = cost_of_batch(build, torch.randn(2, 8), CPU)
    assert (cost.parameters, cost.memory.weights) == (64, 256 + 32)


def test_accumulated_gradients_take_memory_in_addition_to_the_next_ones():
    def build() -> Training:
        return training_of(nn.Linear(1000, 1000, bias=False), torch.optim.SGD)

    once, twice = (cost_of_batch(build, torch.randn(1, 1000), CPU, n) for n in (1, 4))
    assert twice.memory.total >= once.memory.total + 4 * 1000 * 1000
    assert twice.operations == once.operations


@pytest.mark.parametrize(
    ("make", "more"), [(AdamW, 4 * 10**6), (partial(torch.optim.SGD, momentum=0.9), 0)]
)
def test_what_an_update_holds_besides_the_state_is_counted(make, more):
    """AdamW's denominators; the batch itself, of one row, takes next to nothing."""
    build = lambda: training_of(nn.Linear(1000, 1000, bias=False), make)  # noqa: E731
    held = cost_of_batch(build, torch.randn(1, 1000), CPU).memory.activations
    assert more <= held < more + 10**5


def test_live_bytes_count_new_storages_until_the_last_view_is_gone():
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
        few = torch.zeros(2, dtype=torch.float64)
        assert (live.held, live.peak) == (16, 400)
    assert len(view) + len(few) == 52


def test_products_are_counted_that_pytorch_has_no_formula_for():
    rows, width = 5, 4
    product = 2 * rows * rows * width
    with _Operations() as counter:
        torch.zeros(rows, rows).addmm_(torch.ones(rows, width), torch.ones(width, rows))
    assert counter.total == product
    q, k, v = torch.randn(3, 2, 3, rows, width).requires_grad_()
    with _Operations() as counter:
        out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
        assert counter.total == 2 * 3 * 2 * product
        out.sum().backward()
    assert counter.total == 2 * 3 * 7 * product


# ---- rates ----


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "fast", ""])
def test_invalid_rates_are_refused(text):
    with pytest.raises(ValueError, match=f"a number of GFLOP/s above 0, not {text}$"):
        rate_of(text)


def test_a_rate_is_given_in_gflop_per_second():
    assert rate_of("1.5e3") == 1.5e12


def test_a_rate_is_measured_by_whole_training_steps(monkeypatch):
    clock = iter(range(5, 100))
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    made = []

    def build() -> Training:
        made.append(two_layers())
        return made[-1]

    batch = torch.randn(ROWS, WIDE)
    operations = cost_of_batch(two_layers, batch, CPU).operations
    # Each step takes a second, and steps are made for two seconds.
    chosen_for = []
    monkeypatch.setattr(module, "choose_products", lambda *given, **_: chosen_for.append(given))
    assert measure_rate(build, batch, CPU, torch.bfloat16) == operations
    # Weight and bias were trained: in a step that is not timed, and in two that are.
    assert [int(state["step"]) for state in made[-1].optimizer.state.values()] == [3, 3]
    # As in a run, methods of products are chosen first.
    assert chosen_for == [(module.frozen_weights(made[-1].model), torch.bfloat16)]


# ---- the run ----


def test_notable_batches_are_the_typical_and_the_largest_ones():
    lengths = [4, 4, 15, 1, 9, 9]
    epochs = [[[0, 1], [2, 3], [4, 5]], [[0, 1], [2, 4], [3, 5]], [[0, 5], [2, 1], [3, 4]]]
    typical, largest, most_pairs = notable_batches(epochs[:1], lengths)
    assert typical == Rows([2, 3], 16)  # the mean is 14
    assert largest == Rows([4, 5], 18)
    assert most_pairs == Rows([2, 3], 16)  # pairs: 32, 226 and 162
    assert notable_batches(epochs, lengths) == (typical, Rows([2, 4], 24), Rows([2, 4], 24))


def test_of_a_run_without_end_the_first_epochs_are_searched():
    first, other = [[0], [1]], [[0, 1]]
    epochs = chain([first], repeat(other, 98), [[[0, 0, 1]]], repeat([[0] * 9]))
    assert notable_batches(epochs, [2, 3])[1] == Rows([0, 0, 1], 7)  # of the hundredth


def plan_of(**changes) -> Plan:
    settings = {
        "build": two_layers,
        "batch_of": lambda rows: torch.randn(len(rows), WIDE),
        "typical": Rows([0, 1], 20),
        "largest": Rows([0, 1, 2], 30),
        "most_pairs": Rows([0, 1, 2], 30),
        "batches": 2,
        "steps": 100,
        "total": 250,  # 50 make no step
        "device": CPU,
        "dtype": torch.float32,
        "devices": 1,
        "rate": 1e9,
    }
    return Plan(**settings | changes)


def test_memory_is_of_the_largest_batch_and_arithmetic_of_a_typical_one():
    plan = plan_of()
    taken = estimate(plan)
    assert taken.memory == cost_of_batch(two_layers, torch.randn(3, WIDE), CPU, 2).memory
    assert taken.operations == cost_of_batch(two_layers, torch.randn(2, WIDE), CPU).operations
    assert taken.rate == 1e9
    assert (taken.parameters, taken.trained) == (64 * 128 + 128 + 128 * 10 + 10, 128 * 10 + 10)


@pytest.mark.parametrize("pairs", [range(2), range(9)])
def test_memory_is_of_the_batch_that_takes_most(pairs):
    """Either the batch of most tokens, which has three rows, or that of most pairs."""
    taken = estimate(plan_of(most_pairs=Rows(pairs, 20)))
    most = torch.randn(max(3, len(pairs)), WIDE)
    assert taken.memory == cost_of_batch(two_layers, most, CPU, 2).memory
    assert taken.operations == cost_of_batch(two_layers, torch.randn(2, WIDE), CPU).operations


def test_on_several_devices_gradients_take_memory_in_buckets_too():
    one, two = (estimate(plan_of(devices=count)) for count in (1, 2))
    assert two.memory.gradients == 2 * one.memory.gradients
    assert two.memory.total == one.memory.total + one.memory.gradients
    assert two.operations == one.operations


@pytest.mark.parametrize("rate", [None, 1e9])
def test_counting_and_measuring_are_announced(monkeypatch, caplog, rate):
    monkeypatch.setattr(module, "measure_rate", lambda *given: 7.0)
    caplog.set_level("INFO")
    estimate(plan_of(rate=rate))
    assert ["counting" in message for message in caplog.messages] == [
        True,
        *([False] * (rate is None)),
    ]
    assert "measuring the rate of this cpu with 2 layers" in caplog.text or rate


def test_without_a_given_rate_that_of_a_few_layers_is_measured(monkeypatch):
    measured = []
    monkeypatch.setattr(module, "measure_rate", lambda *given: measured.append(given) or 7.0)
    assert estimate(plan_of(rate=None)).rate == 7.0
    ((build, batch, *_),) = measured
    assert isinstance(build, partial)
    assert build.args == (LAYERS_TIMED,)
    assert len(batch) == 2  # the typical one


def test_an_estimate_is_printed_as_a_table():
    memory = Memory(3 * 2**29, 2**20, 2**21, 2**30)
    plan = plan_of(devices=4, most_pairs=Rows([0], 25))
    taken = Estimate(plan, 1_000_000, 2500, memory, 10**9, 1e10)
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
        "arithmetic of a step    8.000 GFLOP",
        "time of a step          0.2 s",
        "optimizer steps         100",
        "arithmetic of the run   1.000 TFLOP",
        "time of the run         25 s",
    ]


@pytest.mark.parametrize(
    ("operations", "shown"),
    [
        (10**6, ("0.008 GFLOP", "0.800 GFLOP")),
        (10**9, ("8.000 GFLOP", "800.000 GFLOP")),
        (125 * 10**9, ("1.000 TFLOP", "100.000 TFLOP")),
        (125 * 10**14, ("100.000 PFLOP", "10,000.000 PFLOP")),
    ],
)
def test_the_unit_of_arithmetic_fits_its_size(operations, shown):
    plan = plan_of(devices=4, total=200)
    taken = Estimate(plan, 1, 1, Memory(1, 1, 1, 1), operations, 1e10)
    lines = str(taken).splitlines()
    assert [line.split("  ")[-1].strip() for line in lines if "arithmetic" in line] == list(shown)


@pytest.mark.parametrize(
    ("memory", "shown"),
    [
        (Memory(2**18, 2**12, 2**13, 2**17), "0.250 0.004 0.008 0.125 0.387 MiB"),
        (Memory(2**28, 2**27, 2**27, 2**28), "256.000 128.000 128.000 256.000 768.000 MiB"),
        (Memory(2**29, 0, 0, 2**29), "0.500 0.000 0.000 0.500 1.000 GiB"),
    ],
)
def test_all_memory_is_in_the_unit_that_fits_its_total(memory, shown):
    lines = str(Estimate(plan_of(), 1, 1, memory, 1, 1e10)).splitlines()
    start = lines.index("memory a device") + 1
    *figures, unit = shown.split()
    assert [line.split()[1:] for line in lines[start : start + 5]] == [[f, unit] for f in figures]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_on_a_gpu_the_table_says_what_graphs_add(kind):
    plan = plan_of(device=torch.device(kind))
    taken = str(Estimate(plan, 10, 5, Memory(1, 1, 1, 1), 10**9, 1e10))
    row = "  with CUDA graphs      up to about a quarter more"
    assert (row in taken.splitlines()) == (kind == "cuda")


def test_without_a_number_of_steps_the_table_has_no_totals_of_the_run():
    taken = Estimate(plan_of(steps=None, rate=None), 10, 5, Memory(1, 1, 1, 1), 10**9, 1e10)
    assert "measured here" in str(taken)
    assert "of the run" not in str(taken)
