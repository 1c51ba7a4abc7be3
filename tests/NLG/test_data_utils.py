"""Tests examples, batches and their order against the release's rules, with full padding."""

import json
import logging
import random
import re
from itertools import chain, islice
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DistributedSampler

from data_utils import (
    FT_Dataset,
    batches_from,
    batches_per_epoch,
    collate,
    training_batches,
    validation_batches,
)


def process(rank: int = 0, world_size: int = 1, device: str = "cpu") -> SimpleNamespace:
    return SimpleNamespace(rank=rank, world_size=world_size, device=torch.device(device))


def full_padding(context, completion, seq_len, joint_lm):
    """Returns an example's input, target and mask, padded with 0 to the sequence length."""

    def cut(values):
        return (values + [0] * seq_len)[:seq_len]

    tokens = context + completion
    masked = 0 if joint_lm else len(context) - 1
    mask = [0] * masked + [1] * (len(tokens) - 1 - masked)
    return cut(tokens), cut(tokens[1:]), cut(mask)


@pytest.fixture
def write(tmp_path):
    """Writes examples, given as (context, completion) or as text, to a file."""

    def write(*examples, name="train.jsonl"):
        lines = [
            example
            if isinstance(example, str)
            else json.dumps({"context": example[0], "completion": example[1]})
            for example in examples
        ]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        return tmp_path / name

    return write


def random_examples(count: int, longest: int = 6) -> list[tuple[list[int], list[int]]]:
    """Draws examples. Each begins with its own number, by which a test recognizes it."""
    drawn = random.Random(1)

    def some():
        return [drawn.randrange(1, 50257) for _ in range(drawn.randrange(1, longest))]

    return [([number, *some()], some()) for number in range(count)]


def first_tokens(batches) -> list[list[int]]:
    return [batch["input"][:, 0].tolist() for batch in batches]


@pytest.mark.parametrize("joint_lm", [False, True])
@pytest.mark.parametrize("seq_len", [1, 4, 5, 6, 7, 40])
def test_rows_are_the_releases_except_for_padding(write, seq_len, joint_lm):
    examples = [
        ([5, 6, 7], [8, 9, 10]),
        ([1], [2]),
        ([50256], [50256, 0, 0, 3]),
        *random_examples(8),
    ]
    dataset = FT_Dataset(write(*examples), len(examples), seq_len, joint_lm=joint_lm)
    assert all(row.tokens.dtype == torch.int32 for row in dataset)
    batch = collate(list(dataset))
    longest = min(seq_len, max(len(a) + len(b) for a, b in examples))
    for index, (context, completion) in enumerate(examples):
        rows = full_padding(context, completion, seq_len, joint_lm)
        for name, expected in zip(("input", "target", "mask"), rows, strict=True):
            assert batch[name][index].tolist() == expected[:longest]
            assert not any(expected[longest:])
    assert batch["input"].shape == batch["target"].shape == batch["mask"].shape
    assert batch["input"].dtype == batch["target"].dtype == torch.int64
    assert batch["mask"].dtype == torch.float32


@pytest.mark.parametrize("joint_lm", [False, True])
@pytest.mark.parametrize("seq_len", [3, 6, 64])
def test_a_batch_has_the_positions_of_the_tokens_that_its_loss_needs(write, seq_len, joint_lm):
    """They are those up to each row's last target or, in a row without targets, the first one."""
    dataset = FT_Dataset(
        write(*random_examples(12), ([1, 2, 3, 4], [5])), 13, seq_len, joint_lm=joint_lm
    )
    batch = collate(list(dataset))
    rows, mask = batch["packed_rows"], batch["mask"]
    last = [max(row.nonzero().flatten().tolist(), default=0) for row in mask]
    assert rows.shape == mask.shape
    assert rows.lengths == rows.spans == [position + 1 for position in last]
    assert torch.equal(rows.pack(mask).nonzero().flatten(), rows.targets)
    assert len(rows.targets) == mask.count_nonzero()


def test_a_batch_is_as_long_as_its_longest_row(write):
    dataset = FT_Dataset(write(([1], [2]), ([3], [4]), ([5, 6], [7, 8])), 1, 512)
    assert collate([dataset[0], dataset[1]])["input"].shape == (2, 2)
    assert collate([dataset[0], dataset[2]])["input"].shape == (2, 4)


@pytest.mark.parametrize("joint_lm", [False, True])
def test_without_a_context_the_first_token_is_no_target(write, joint_lm):
    batch = collate([FT_Dataset(write(([], [7, 8, 9])), 1, 8, joint_lm=joint_lm)[0]])
    assert batch["target"].tolist() == [[8, 9, 0]]
    assert batch["mask"].tolist() == [[1, 1, 0]]


def test_only_the_seed_determines_what_fills_the_last_batch(write):
    path = write(*random_examples(10))
    dataset = FT_Dataset(path, 8, 16, seed=3)
    assert (dataset.num_examples, dataset.num_batches, len(dataset)) == (10, 2, 16)
    firsts = [row.tokens[0].item() for row in dataset]
    assert firsts[:10] == list(range(10))
    assert set(firsts[10:]) <= set(range(10))
    random.seed(99)
    torch.manual_seed(99)
    assert firsts == [row.tokens[0].item() for row in FT_Dataset(path, 8, 16, seed=3)]
    others = [[row.tokens[0].item() for row in FT_Dataset(path, 8, 16, seed=n)] for n in range(9)]
    assert any(other != firsts for other in others)


def test_whole_batches_are_not_filled(write):
    assert len(FT_Dataset(write(*random_examples(6)), 3, 16)) == 6


@pytest.mark.parametrize("index", [-1, 4])
def test_rows_outside_the_dataset(write, index):
    dataset = FT_Dataset(write(([1], [2])), 4, 16)
    with pytest.raises(IndexError):
        dataset[index]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("", "is empty, with more lines after it"),
        ("[1]", "not a JSON object"),
        ('{"context": [1]}', 'has no "completion"'),
        ('{"completion": [1]}', 'has no "context"'),
        ('{"context": "words", "completion": [1]}', '"context" has to be a list of token ids'),
        ('{"context": [1], "completion": ["1"]}', '"completion" has to be a list of token ids'),
        ('{"context": [1.0], "completion": [1]}', '"context" has to be a list'),
        ('{"context": [true], "completion": [1]}', '"context" has to be a list'),
        ('{"context": [null], "completion": [1]}', '"context" has to be a list'),
        ('{"context": [1], "completion": []}', "the completion is empty"),
        (
            '{"context": [1, 100], "completion": [1]}',
            "has token 100, outside the vocabulary of 100",
        ),
        ('{"context": [1], "completion": [3, -1]}', "has token -1, outside"),
        ('{"context": [], "completion": [100]}', "has token 100, outside"),
        ('{"context": [1], "completion": [99999999999]}', "has token 99999999999, outside"),
        (f'{{"context": [1], "completion": [{2**63}]}}', f"has token {2**63}, outside"),
        (
            f'{{"context": [{-(2**63) - 1}], "completion": [1]}}',
            "has token -9223372036854775809, outside",
        ),
        (f'{{"context": [1], "completion": [{"1" * 5000}]}}', "not JSON|outside the vocabulary"),
        ('{"context": ' + "[" * 100_000, "is nested too deep"),
    ],
)
def test_a_bad_line_is_named(write, line, message):
    path = write(([0], [2]), line, ([99], [99]))
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}:2: .*{message}"):
        FT_Dataset(path, 1, 16, vocab_size=100)


def test_a_byte_order_mark_is_ignored(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"context": [1], "completion": [2]}\r\n')
    assert FT_Dataset(path, 1, 16)[0].tokens.tolist() == [1, 2]


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_line_that_is_not_utf_8_is_named(tmp_path, before):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"context": [1], "completion": [2]}\n' * before + b'{"\xff": 1}\n')
    with pytest.raises(
        ValueError, match=rf"^{re.escape(str(path))}:{before + 1}: not UTF-8 \(.* at byte 2\)$"
    ):
        FT_Dataset(path, 1, 16)


def test_the_release_s_fourth_argument_is_not_taken_for_another(write):
    """There it is a length, as in gpt2_beam.py; here it would have made contexts targets."""
    with pytest.raises(TypeError, match="positional arguments"):
        FT_Dataset(write(([1], [2])), 1, 16, 64)


@pytest.mark.parametrize(("batch_size", "seq_len"), [(0, 8), (-1, 8), (8, 0)])
def test_sizes_have_to_be_positive(write, batch_size, seq_len):
    with pytest.raises(ValueError, match="must be at least 1"):
        FT_Dataset(write(([1], [2])), batch_size, seq_len)


def test_examples_that_are_cut_are_counted(write, caplog, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    examples = [([1, 2], [3] * length) for length in (2, 3, 4)]
    path = write(*examples, ([1] * 4, [6]), ([1] * 5, [6]))
    with caplog.at_level(logging.WARNING):
        dataset = FT_Dataset(path, 5, 4)
    (record,) = caplog.records
    assert "2 of 5 examples take more than 4 positions" in record.getMessage()
    assert "1 of them lost the whole completion" in record.getMessage()
    assert collate(list(dataset))["mask"].sum(1).tolist() == [2, 3, 3, 1, 0]


def test_only_the_main_process_warns_and_only_of_cut_examples(write, caplog, monkeypatch):
    path = write(([1, 2], [3, 4]))
    with caplog.at_level(logging.WARNING):
        FT_Dataset(path, 1, 3)
        monkeypatch.setenv("RANK", "1")
        FT_Dataset(path, 1, 2)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("examples", "shows"),
    [
        ([([1], [2, 9]), ([1], [3, 4, 9])], True),
        ([([9, 1, 9], [2, 9]), ([9], [9])], True),  # as --add_bos: contexts end in it, too
        ([([], [2, 9]), ([], [3, 9])], True),
        ([([1], [2, 9])], True),
        ([([1], [2, 2])], False),
        ([([1], [2, 9]), ([1], [3, 4])], False),
        ([([1], [2, 9]), ([1], [3, 9, 4, 9])], False),
        ([([1], [2, 9]), ([1], [9, 3])], False),
        ([([1], [9, 2]), ([1], [3])], False),
    ],
)
def test_whether_completions_show_their_ends(write, examples, shows):
    """The answer depends neither on the sequence length nor on the objective."""
    path = write(*examples)
    for length, joint_lm in ((3, True), (3, False), (9, False)):
        dataset = FT_Dataset(path, 4, length, joint_lm=joint_lm)
        assert dataset.shows_ends() == shows


def test_a_file_with_nothing_to_learn_is_an_error(write):
    path = write(([1] * 5, [2]), ([1] * 6, [2]))
    with pytest.raises(ValueError, match="no example has a token to learn within 4 positions"):
        FT_Dataset(path, 1, 4)
    assert collate(list(FT_Dataset(path, 2, 4, joint_lm=True)))["mask"].sum() == 8


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("epoch", [1, 2])
def test_training_batches_come_in_the_samplers_order(write, world_size, epoch):
    dataset = FT_Dataset(write(*random_examples(18)), 4, 16)
    for rank in range(world_size):
        run = process(rank, world_size)
        sampler = DistributedSampler(dataset, world_size, rank, shuffle=True, seed=7)
        sampler.set_epoch(epoch)
        order = [dataset[index].tokens[0].item() for index in sampler]
        expected = [order[at : at + 4] for at in range(0, len(order) - 3, 4)]
        assert first_tokens(training_batches(dataset, run, 7, epoch)) == expected
        assert batches_per_epoch(dataset, run) == len(expected)


def test_epochs_and_seeds_have_different_orders(write):
    dataset = FT_Dataset(write(*random_examples(24)), 4, 16)
    orders = [
        first_tokens(training_batches(dataset, process(), seed, epoch))
        for seed, epoch in ((1, 1), (1, 2), (5, 1))
    ]
    assert orders[0] != orders[1] != orders[2] != orders[0]


@pytest.mark.parametrize("skip", [0, 1, 5, 6])
def test_batches_are_skipped_without_being_made(write, monkeypatch, skip):
    dataset = FT_Dataset(write(*random_examples(24)), 4, 16)
    whole = first_tokens(training_batches(dataset, process(), 1, 1))
    loaded = []
    get = FT_Dataset.__getitem__
    monkeypatch.setattr(
        FT_Dataset, "__getitem__", lambda self, index: loaded.append(index) or get(self, index)
    )
    assert first_tokens(training_batches(dataset, process(), 1, 1, skip=skip)) == whole[skip:]
    assert len(loaded) == 24 - 4 * skip


@pytest.mark.parametrize("step", [0, 1, 5, 6, 13])
def test_batches_from_a_step_continue_epoch_after_epoch(write, step):
    dataset = FT_Dataset(write(*random_examples(24)), 4, 16)
    epochs = [first_tokens(training_batches(dataset, process(), 1, epoch)) for epoch in (1, 2, 3)]
    from_step = islice(batches_from(dataset, process(), 1, step), 18 - step)
    assert first_tokens(from_step) == list(chain(*epochs))[step:]


def test_global_generators_are_left_alone(write):
    torch.manual_seed(5)
    random.seed(5)
    states = torch.get_rng_state(), random.getstate()
    dataset = FT_Dataset(write(*random_examples(9)), 4, 16)
    list(training_batches(dataset, process(), 1, 1))
    list(validation_batches(dataset, process()))
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()


@pytest.mark.parametrize("use", [batches_per_epoch, lambda *given: training_batches(*given, 1, 1)])
def test_too_few_examples_for_all_processes(write, use):
    dataset = FT_Dataset(write(*random_examples(8)), 8, 16)
    with pytest.raises(ValueError, match="8 training examples are too few for a batch of 8 on ea"):
        use(dataset, process(1, 2))


@pytest.mark.parametrize("world_size", [1, 2, 3, 11])
def test_validation_has_each_example_once(write, world_size):
    dataset = FT_Dataset(write(*random_examples(10)), 4, 16)
    shares = [
        first_tokens(validation_batches(dataset, process(rank, world_size)))
        for rank in range(world_size)
    ]
    for rank, share in enumerate(shares):
        assert list(chain(*share)) == list(range(rank, 10, world_size))
        assert all(len(batch) == 4 for batch in share[:-1])


@pytest.mark.gpu
def test_pinned_batches(write):
    dataset = FT_Dataset(write(*random_examples(8)), 4, 16)
    for batch in training_batches(dataset, process(device="cuda"), 1, 1):
        rows = batch.pop("packed_rows")
        assert all(tensor.is_pinned() for tensor in (*batch.values(), rows.index, rows.targets))
