"""Helpers of the Trainer under upstream's names: nested tensors, samplers, gathering, smoothing."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compare import rounding
from small_trainers import SizedStream, Stream
from torch import nn

from loralib.errors import TrainingError
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.trainer_pt_utils import (
    DistributedLengthGroupedSampler,
    DistributedTensorGatherer,
    IterableDatasetShard,
    LabelSmoother,
    LengthGroupedSampler,
    SequentialDistributedSampler,
    _warn_of_others,
    get_length_grouped_indices,
    get_parameter_names,
    metrics_format,
    nested_concat,
    nested_detach,
    nested_expand_like,
    nested_new_like,
    nested_numpify,
    nested_truncate,
    predictions_of,
)
from transformers.trainer_utils import (
    default_compute_objective,
    is_main_process,
)

WIDE, NARROW = torch.arange(6.0).reshape(2, 3), torch.tensor([[7.0]])
JOINED = [[0, 1, 2], [3, 4, 5], [7, -100, -100]]


# ---- nested tensors ----


@pytest.mark.parametrize("convert", [lambda part: part, lambda part: part.numpy()])
def test_rows_of_different_widths_are_concatenated(convert):
    wide, narrow = convert(WIDE), convert(NARROW)
    assert nested_concat(wide, narrow).tolist() == JOINED
    assert type(nested_concat(wide, narrow)) is type(wide)
    nested = nested_concat([wide, (wide, narrow)], [narrow, (narrow, narrow)])
    assert nested[0].tolist() == JOINED
    assert isinstance(nested[1], tuple)
    assert nested[1][1].tolist() == [[7], [7]]
    assert nested_concat(narrow, wide, padding_index=0)[0].tolist() == [7, 0, 0]


def test_concatenating_different_types_is_an_error():
    with pytest.raises(TypeError, match="a Tensor and a tuple cannot be concatenated"):
        nested_concat(WIDE, (WIDE,))


def test_detach_numpify_and_truncate_nested_tensors():
    graph = (nn.Parameter(WIDE) * 2, [nn.Parameter(NARROW) * 2])
    detached = nested_detach(graph)
    assert not detached[0].requires_grad
    assert isinstance(detached, tuple)
    assert nested_numpify(graph)[1][0].tolist() == [[14]]
    assert nested_numpify(WIDE.bfloat16()).dtype == np.float32
    assert nested_truncate([WIDE, (WIDE,)], 1)[1][0].tolist() == [[0, 1, 2]]


def test_new_and_expanded_arrays_like_others():
    array = WIDE.numpy()
    assert nested_new_like([array], 4)[0].tolist() == [[-100] * 3] * 4
    assert nested_expand_like((array,), 4)[0].tolist() == [[0, 1, 2, -100], [3, 4, 5, -100]]


# ---- gathering ----


def gathered(make_step, world_size=2, count=7, sizes=(2, 1, 1)):
    """Returns what a gatherer makes of steps of `sizes` rows per process; row i has the value i."""
    gatherer = DistributedTensorGatherer(world_size, count)
    share = math.ceil(count / world_size)
    done = 0
    for size in sizes:
        rows = [
            (rank * share + done + place) % count
            for rank in range(world_size)
            for place in range(size)
        ]
        gatherer.add_arrays(make_step(np.array(rows, dtype=np.float32), size))
        done += size
    return gatherer.finalize()


def test_gathered_rows_are_in_the_set_s_order():
    assert gathered(lambda rows, size: rows).tolist() == list(range(7))
    nested = gathered(lambda rows, size: (rows, [rows * 10]))
    assert isinstance(nested, tuple)
    assert nested[1][0].tolist() == [10 * row for row in range(7)]


def test_rows_of_different_widths_are_gathered():
    found = gathered(lambda rows, size: np.repeat(rows[:, None], size + 1, axis=1))
    for row, values in enumerate(found.tolist()):
        assert values == [row] * (3 if row % 4 < 2 else 2) + [-100] * (0 if row % 4 < 2 else 1)


def test_finalize_without_all_rows_is_an_error():
    with pytest.raises(
        TrainingError, match="6 rows were added, but 7 examples make 8 rows on 2 processes"
    ):
        gathered(lambda rows, size: rows, sizes=(2, 1))
    assert DistributedTensorGatherer(2, 7).finalize() is None


# ---- samplers ----


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sequential_shares_are_consecutive(world_size, batch_size):
    data = list(range(10))
    shares = [
        SequentialDistributedSampler(data, world_size, rank, batch_size)
        for rank in range(world_size)
    ]
    assert {len(share) for share in shares} == {shares[0].num_samples}
    assert shares[0].num_samples % (batch_size or 1) == 0
    found = [index for share in shares for index in share]
    assert found[:10] == data
    assert found[10:] == [index % 10 for index in range(len(found) - 10)]


LENGTHS = [n * 7 % 23 for n in range(50)]


def test_length_grouped_indices_are_sorted_within_groups():
    order = get_length_grouped_indices(LENGTHS, 4, 3, torch.Generator().manual_seed(1))
    assert sorted(order) == list(range(50))
    assert LENGTHS[order[0]] == max(LENGTHS)
    for start in range(
        12, 48, 12
    ):  # all groups but the first, into which the longest example was moved
        group = [LENGTHS[index] for index in order[start + 1 : start + 12]]
        assert group == sorted(group, reverse=True)
    again = get_length_grouped_indices(LENGTHS, 4, 3, torch.Generator().manual_seed(1))
    assert order == again
    assert get_length_grouped_indices([], 4) == []


def test_length_sampler_takes_examples_or_lengths():
    torch.manual_seed(0)
    rows = [{"input_ids": [0] * length} for length in LENGTHS]
    sampler = LengthGroupedSampler(rows, 4)
    assert len(sampler) == 50
    assert LENGTHS[next(iter(sampler))] == max(LENGTHS)
    assert sorted(LengthGroupedSampler(None, 4, lengths=LENGTHS)) == list(range(50))
    with pytest.raises(ValueError, match="have no 'input_ids': give their lengths"):
        LengthGroupedSampler([1, 2], 4)


@pytest.mark.parametrize("drop_last", [False, True])
def test_length_sampler_of_several_processes(drop_last):
    shares = [
        DistributedLengthGroupedSampler(None, 4, 3, rank, 5, drop_last, LENGTHS)
        for rank in range(3)
    ]
    found = [list(share) for share in shares]
    assert {len(share) for share in found} == {16 if drop_last else 17} == {len(shares[0])}
    assert len({index for share in found for index in share}) == (48 if drop_last else 50)
    for share in shares:
        share.set_epoch(1)
    assert list(shares[0]) != found[0]


# ---- sets that can only be iterated over ----


@pytest.mark.parametrize("kind", [Stream, SizedStream])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    ("count", "processes"), [(21, 3), (24, 3), (27, 2), (5, 2), (3, 2), (21, 1)]
)
def test_shards_take_batches_in_turn(kind, count, processes, drop_last):
    whole = kind(count)
    whole.set_epoch(4)
    whole = list(whole)
    shards = [
        IterableDatasetShard(kind(count), 4, drop_last, processes, rank)
        for rank in range(processes)
    ]
    for shard in shards:
        shard.set_epoch(4)
    found = [list(shard) for shard in shards]
    assert {shard.num_examples for shard in shards} == {count}
    if kind is SizedStream:
        assert {len(shard) for shard in shards} == {len(found[0])}
    assert len({len(share) for share in found}) == 1
    steps = range(0, len(found[0]), 4)
    in_turn = [row for step in steps for share in found for row in share[step : step + 4]]
    if drop_last:
        assert in_turn == whole[: count // (4 * processes) * 4 * processes]
    elif processes == 1:
        assert in_turn == whole
    else:
        repeated = (whole * 4)[count : len(in_turn)]
        assert in_turn == whole + [row for row in repeated]


def test_a_set_s_generator_is_seeded_for_each_epoch():
    class Random(torch.utils.data.IterableDataset):
        generator = torch.Generator()

        def __iter__(self):
            return iter(torch.rand(6, generator=self.generator).tolist())

    shard = IterableDatasetShard(Random(), 1, seed=3)
    first = list(shard)
    shard.set_epoch(1)
    assert list(shard) == torch.rand(6, generator=torch.Generator().manual_seed(4)).tolist()
    shard.set_epoch(0)
    assert list(shard) == first


# ---- label smoothing ----


@pytest.mark.parametrize("ignored", [0, 3])
def test_label_smoothing_equals_its_formula(ignored):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 5, 12, generator=generator)
    labels = torch.randint(12, (4, 5), generator=generator)
    labels[range(ignored), 1] = -100
    before = labels.clone()
    log_p = F.log_softmax(logits.double(), dim=-1)
    losses = [
        -0.9 * log_p[row, place, labels[row, place]] - 0.1 * log_p[row, place].mean()
        for row in range(4)
        for place in range(5)
        if labels[row, place] >= 0
    ]
    expected = torch.stack(losses).mean()
    named = {"states": torch.zeros(4, 5, 16), "logits": logits}
    ours = SequenceClassifierOutput(logits=logits)
    for output in (ours, (logits,), {"y": logits}, named, logits):
        found = LabelSmoother(0.1)(output, labels)
        assert found.item() == pytest.approx(expected.item(), abs=rounding(expected, 20 * 12))
    assert torch.equal(labels, before)


def test_label_smoothing_without_labels_gives_0():
    logits = torch.randn(2, 3, 4, requires_grad=True)
    loss = LabelSmoother(0.1)((logits,), torch.full((2, 3), -100))
    loss.backward()
    assert loss == 0
    assert not logits.grad.any()


def test_labels_that_cannot_be_smoothed_are_errors():
    with pytest.raises(TrainingError, match="needs class labels, not numbers"):
        LabelSmoother()((torch.zeros(2, 3),), torch.zeros(2))
    with pytest.raises(TrainingError, match=r"labels have the shape \(2,\), .* has \(3, 3\)"):
        LabelSmoother()((torch.zeros(3, 3),), torch.zeros(2, dtype=torch.int64))


# ---- predictions, parameter names and metrics ----


@pytest.mark.parametrize(
    "states", [(torch.zeros(2, 4),), {"s": torch.zeros(2, 4)}, SimpleNamespace(s=torch.zeros(2, 4))]
)
def test_outputs_left_out_of_predictions_give_one_warning(caplog, states):
    logits = torch.randn(2, 3)
    _warn_of_others.cache_clear()
    for _ in range(2):
        (found,) = predictions_of({"loss": torch.tensor(1.0), "logits": logits, "s": states}, False)
        assert torch.equal(found, logits)
    assert caplog.text.count("they are left out of the predictions") == 1
    predictions_of({"logits": logits, "s": states}, False, but=["s"])
    assert caplog.text.count("left out") == 1


@pytest.mark.parametrize("shape", [(), (1,)])
def test_predictions_exclude_the_loss_of_a_tuple(shape):
    loss, logits = torch.ones(shape), torch.randn(2, 3)
    for outputs, with_loss in (((loss, logits), True), ((logits,), False)):
        (found,) = predictions_of(outputs, with_loss)
        assert found is logits
    (found,) = predictions_of({"logits": logits, "temperature": torch.tensor(2.0)}, False)
    assert found is logits


def test_parameter_names_exclude_those_of_forbidden_layers():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(2, 2), nn.LayerNorm(2)
            self.scale = nn.Parameter(torch.zeros(2))

    model = nn.Sequential(Block(), nn.ModuleList([Block()]))
    assert get_parameter_names(model, [nn.LayerNorm]) == [
        *("0.linear.weight", "0.linear.bias", "0.scale"),
        *("1.0.linear.weight", "1.0.linear.bias", "1.0.scale"),
    ]
    everything = {name for name, _ in model.named_parameters()}
    assert set(get_parameter_names(model, [])) == everything


def test_metrics_format_is_readable():
    assert metrics_format(
        {
            "train_runtime": 3661.257,
            "train_mem_cpu_peak": 5 * 2**20,
            "total_flos": 3.0 * 2**30,
            "train_loss": 0.123456,
            "train_samples": 12,
            "name": "x",
        }
    ) == {
        "train_runtime": "1:01:01.25",
        "train_mem_cpu_peak": "5.0 MiB",
        "total_flos": "3GF",
        "train_loss": 0.1235,
        "train_samples": 12,
        "name": "x",
    }


def test_the_default_objective_of_a_search():
    ignored_metrics = {"eval_runtime": 5.0, "eval_samples_per_second": 7.0, "epoch": 2.0}
    ignored_metrics["eval_mem_cpu_peak"] = 10**9
    given = {"eval_loss": 0.5, **ignored_metrics}
    assert default_compute_objective(given) == 0.5
    scored = {**given, "eval_accuracy": 0.25, "eval_f1": 0.5}
    assert default_compute_objective(scored) == 0.75
    assert given.keys() == {"eval_loss", *ignored_metrics}


def test_is_main_process():
    assert [is_main_process(rank) for rank in (-1, 0, 1)] == [True, True, False]
