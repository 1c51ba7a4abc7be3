"""Tests batches of sizes that recur, and steps as CUDA graphs, simulated and real."""

from contextlib import contextmanager, nullcontext
from itertools import pairwise

import pytest
import torch
from compare import assert_close_to_rounding
from simulated_gpu import GPUS, SimulatedGpu, to_cpu
from simulated_graphs import SimulatedGraphs
from torch import nn

import loralib as lora
from loralib.errors import TrainingError
from loralib.nn.packing import PackedRows
from loralib.training import cuda_graphs
from loralib.training.cuda_graphs import (
    FillingCollator,
    GraphedStep,
    fill_up,
    why_no_graphs,
)

WIDTH = 16
IGNORED = {"labels": -100}


def make_batch(lengths, columns=None, **more):
    """Rows of tokens 1, 2, … with a class for each row, and a target at each row's last token."""
    rows = PackedRows.from_lengths(lengths, columns)
    ids = rows.pad(torch.arange(1, 1 + sum(lengths)))
    ends = torch.zeros(rows.shape, dtype=torch.bool)
    for row, length in enumerate(lengths):
        ends[row, length - 1] = True
    labels = torch.arange(len(lengths)) % 3
    return {"input_ids": ids, "labels": labels, "packed_rows": rows.with_targets(ends), **more}


# ---- sizes ----


@pytest.mark.parametrize("longest", [None, 70])
@pytest.mark.parametrize("seed", range(8))
def test_sizes_recur_and_rows_stay(seed, longest):
    generator = torch.Generator().manual_seed(seed)
    rows = int(torch.randint(1, 40, (), generator=generator))
    lengths = torch.randint(1, 71, (rows,), generator=generator).tolist()
    batch = make_batch(lengths)
    filled = fill_up(batch, IGNORED, longest)
    before, after = batch["packed_rows"], filled["packed_rows"]
    assert after.is_filled
    assert after.lengths[:-1] == lengths
    assert 1 <= after.lengths[-1] <= 64
    assert after.shape[1] == after.longest == after.used_columns
    assert after.shape[1] == (64 if max(lengths) <= 64 else longest or 128)
    tokens = sum(lengths)
    step = len(after.index) & -len(after.index)  # the largest power of two that divides it
    assert step >= 8
    assert len(after.index) <= tokens + max(8, 1 + tokens // 8)
    assert torch.equal(after.pack(filled["input_ids"])[:tokens], before.pack(batch["input_ids"]))
    assert filled["labels"].tolist() == [*batch["labels"].tolist(), -100]
    assert after.targets[:rows].equal(before.targets)
    assert (after.targets[rows:] == tokens).all()
    assert len(after.targets) % 8 == 0


def test_few_sizes_stand_for_all():
    """320 to 472 tokens become a multiple of 32, and at least one more."""
    sizes = {len(fill_up(make_batch([n] * 8), IGNORED)["packed_rows"].index) for n in range(40, 60)}
    assert sizes == {352, 384, 416, 448, 480}


def test_the_added_row_fits_into_few_columns():
    """A batch of 660 tokens and more has steps of 64, which a row of 12 columns cannot hold."""
    for length in range(1, 61):
        rows = fill_up(make_batch([11] * length + [12] * (60 - length)), IGNORED, 12)["packed_rows"]
        assert rows.shape == (61, 12)
        assert len(rows.index) % 12 == 0


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(make_batch([3, 5], start_positions=torch.tensor([1, 2])), id="positions"),
        pytest.param(make_batch([3, 5], names=["a", "b"]), id="names"),
        pytest.param({"input_ids": torch.ones(2, 3)}, id="no rows"),
        pytest.param(
            {"packed_rows": PackedRows(torch.tensor([[0, 1, 1], [1, 1, 1]]))}, id="padded left"
        ),
        pytest.param({"packed_rows": PackedRows(torch.tensor([[1, 1], [0, 0]]))}, id="empty row"),
        pytest.param(make_batch([3, 5], columns=71), id="too wide"),
    ],
)
def test_other_batches_stay_as_they_are(batch):
    assert fill_up(batch, IGNORED, 70) is batch


def test_a_collator_fills_what_another_collates():
    filled = FillingCollator(make_batch, IGNORED, 64)([3, 5])
    assert filled["packed_rows"].lengths == [3, 5, 8]
    assert filled["labels"].tolist() == [0, 1, -100]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("cpu", False), "--cuda_graphs needs a GPU: leave it out"),
        (("cuda", True), "--cuda_graphs and --torch_compile do not go together: leave one out"),
    ],
)
def test_runs_that_cannot_use_graphs(given, message):
    device, torch_compile = given
    assert why_no_graphs(torch.device(device), torch_compile) == message
    assert why_no_graphs(torch.device("cuda"), False) is None


# ---- steps ----


class Model(nn.Module):
    """Classifies each row by its first token."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.ids = nn.Embedding(400, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)
        lora.add_lora(self, ["inner"], r=4, lora_alpha=8, modules_to_train=["head"])
        with torch.no_grad():
            self.inner.lora_B.normal_()

    def forward(self, batch):
        rows = batch["packed_rows"]
        hidden = self.inner(self.ids(rows.pack(batch["input_ids"])))
        return nn.functional.cross_entropy(self.head(hidden[rows.first]), batch["labels"])


def step_of(model):
    def step(batch, weight=1.0):
        loss = model(batch) * weight
        loss.backward()
        return loss.detach()

    return step


def gradients_of(model):
    return {n: to_cpu(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}


def moved(batch):
    return {name: part.to("cuda:0") for name, part in batch.items()}


@pytest.fixture
def graphs():
    with SimulatedGpu(), SimulatedGraphs() as graphs:
        yield graphs


LENGTHS = [[3, 5, 2], [7, 1, 1], [4, 4, 4], [30, 20, 31], [2, 2, 5]]


@pytest.mark.parametrize("kind", GPUS)
def test_losses_and_gradients_are_those_without_graphs(kind):
    """Gradients of two batches are added up, as in accumulation."""
    plain = Model()
    step, expected = step_of(plain), []
    for first, second in pairwise(LENGTHS):
        losses = [step(make_batch(first)), step(make_batch(second), 0.5)]
        expected.append((losses, gradients_of(plain)))
        plain.zero_grad()
    with kind(), SimulatedGraphs() if kind is SimulatedGpu else nullcontext():
        model = Model().to("cuda:0")
        graphed = GraphedStep(step_of(model), model)
        for (first, second), (losses, gradients) in zip(pairwise(LENGTHS), expected, strict=True):
            ours = [
                graphed(moved(fill_up(make_batch(first), IGNORED))),
                graphed(moved(fill_up(make_batch(second), IGNORED)), 0.5),
            ]
            for own, loss in zip(ours, losses, strict=True):
                assert_close_to_rounding(to_cpu(own), loss, WIDTH**2)
            found = gradients_of(model)
            assert found.keys() == gradients.keys()
            for name, gradient in gradients.items():
                assert_close_to_rounding(found[name], gradient, 100 * WIDTH)
            model.zero_grad()


def test_a_size_is_recorded_once(graphs):
    model = Model().to("cuda:0")
    step = GraphedStep(step_of(model), model)
    for lengths in LENGTHS:
        step(moved(fill_up(make_batch(lengths), IGNORED)))
    assert (graphs.recorded, graphs.replays) == (2, 5)
    step(moved(fill_up(make_batch(LENGTHS[0]), IGNORED)), 0.5)  # another constant
    assert (graphs.recorded, graphs.replays) == (3, 6)


def test_batches_stay_as_they_are(graphs):
    """A graph reads memory of its own, which the next batch of the size is copied to."""
    model = Model().to("cuda:0")
    step = GraphedStep(step_of(model), model)
    first, second = (moved(fill_up(make_batch(lengths), IGNORED)) for lengths in LENGTHS[:2])
    before = {name: first[name].clone() for name in ("input_ids", "labels")}
    step(first)
    step(second)
    assert graphs.recorded == 1
    for name, part in before.items():
        assert torch.equal(first[name], part)
    assert first["packed_rows"].lengths == [*LENGTHS[0], 6]


def test_recording_draws_no_random_numbers(graphs):
    """A run that records a size in another step, after a resume, draws the same numbers."""
    model = Model().to("cuda:0")
    drop = nn.Dropout(0.5)

    def step(batch):
        loss = model(batch) * drop(torch.ones(8, device="cuda:0")).sum()
        loss.backward()
        return loss.detach()

    graphed = GraphedStep(step, model)
    batch = moved(fill_up(make_batch(LENGTHS[0]), IGNORED))
    losses = []
    for _ in range(2):
        torch.manual_seed(1)
        losses.append([graphed(batch).item() for _ in range(3)])
    assert graphs.recorded == 1
    assert losses[0] == losses[1]
    assert len(set(losses[0])) > 1


def test_batches_that_are_not_filled_run_without_a_graph(graphs, caplog):
    model = Model().to("cuda:0")
    step = GraphedStep(step_of(model), model)
    for lengths in LENGTHS:
        step(moved(make_batch(lengths)))
    assert graphs.recorded == 0
    assert [record.message for record in caplog.records] == [
        "CUDA graphs take batches that are padded on the right, with a token in each row: others "
        "are computed without"
    ]
    assert model.inner.lora_B.grad.norm() > 0


def test_gradients_of_batches_with_and_without_graphs_are_added_up(graphs):
    plain, model = Model(), Model().to("cuda:0")
    step, graphed = step_of(plain), GraphedStep(step_of(model), model)
    for number, lengths in enumerate(LENGTHS):
        batch = make_batch(lengths)
        step(batch)
        graphed(moved(batch if number % 2 == 0 else fill_up(batch, IGNORED)))
    assert graphs.replays == 2
    found = gradients_of(model)
    for name, gradient in gradients_of(plain).items():
        assert_close_to_rounding(found[name], gradient, 100 * WIDTH)


def test_only_so_many_sizes_are_recorded(graphs, monkeypatch, caplog):
    monkeypatch.setattr(cuda_graphs, "_MOST_GRAPHS", 1)
    model = Model().to("cuda:0")
    step = GraphedStep(step_of(model), model)
    for lengths in LENGTHS:
        step(moved(fill_up(make_batch(lengths), IGNORED)))
    assert (graphs.recorded, graphs.replays) == (1, 4)
    assert [record.message for record in caplog.records] == [
        "there are CUDA graphs for 1 sizes of batch, the most that are recorded: batches of other "
        "sizes are computed without"
    ]


def test_a_graph_is_not_used_once_its_weights_have_moved(graphs):
    model = Model().to("cuda:0")
    step = GraphedStep(step_of(model), model)
    batch = moved(fill_up(make_batch(LENGTHS[0]), IGNORED))
    step(batch)
    model.head.weight.data = model.head.weight.data.clone()
    step(batch)
    model.head.bias.requires_grad_(False)
    step(batch)
    model.inner.eval()
    step(batch)
    assert graphs.recorded == 4


def replace_module(model):
    model.head = nn.Linear(WIDTH, 3, device="cuda:0")


def replace_parameter(model):
    model.head.bias = nn.Parameter(model.head.bias.detach().clone())


def add_buffer(model):
    model.head.register_buffer("more", torch.zeros(1, device="cuda:0"))  # the very last part


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("replace", [replace_module, replace_parameter, add_buffer])
def test_parts_that_are_replaced_are_an_error(graphs, replace, recorded):
    """A graph would train those that the model had before."""
    model = Model().to("cuda:0")
    step = GraphedStep(step_of(model), model)
    batch = moved(fill_up(make_batch(LENGTHS[0]), IGNORED))
    if recorded:
        step(batch)
    replace(model)
    with pytest.raises(TrainingError, match=r"^modules or tensors of the model were replaced"):
        step(batch)


@contextmanager
def failing_at_the_end():
    """PyTorch's block of a recording, which fails at its end if something in it has failed."""
    try:
        yield
    except BaseException:
        raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904


@pytest.mark.parametrize("block", [nullcontext, failing_at_the_end])
@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (RuntimeError, TrainingError, "^this step cannot be recorded as a CUDA graph .it waits.: "),
        (torch.OutOfMemoryError, torch.OutOfMemoryError, "^it waits$"),
        (KeyboardInterrupt, KeyboardInterrupt, "^it waits$"),
    ],
)
def test_steps_that_cannot_be_recorded(monkeypatch, block, error, raised, message):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: block())

    def run():
        raise error("it waits")

    with pytest.raises(raised, match=message):
        cuda_graphs._capture(run, None, None)


def test_the_error_about_memory_says_how_to_turn_graphs_off(graphs):
    def step(batch):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    batch = moved(fill_up(make_batch(LENGTHS[0]), IGNORED))
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\. .*--no_cuda_graphs"):
        GraphedStep(step, Model().to("cuda:0"))(batch)


def test_a_recording_that_cannot_end_says_why(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)

    @contextmanager
    def block(*_, **__):
        yield
        raise RuntimeError("a stream is left")

    monkeypatch.setattr(torch.cuda, "graph", block)
    with pytest.raises(TrainingError, match=r"recorded as a CUDA graph \(a stream is left\): "):
        cuda_graphs._capture(lambda: torch.zeros(()), None, None)


def test_a_step_that_reads_lengths_is_an_error(graphs):
    """It would use the lengths of the batch that was recorded for all others."""
    model = Model().to("cuda:0")

    def step(batch):
        return model(batch) * max(batch["packed_rows"].lengths)

    batch = moved(fill_up(make_batch(LENGTHS[0]), IGNORED))
    with pytest.raises(RuntimeError, match="a CUDA graph is for rows of any length"):
        GraphedStep(step, model)(batch)
    assert batch["packed_rows"].lengths == [3, 5, 2, 6]
