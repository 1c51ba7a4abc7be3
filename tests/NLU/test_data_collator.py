"""The collators: shapes, types, labels, padding, and the tokens that masking hides."""

import json
import logging

import make_upstream_4_4_fixture as maker
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from torch.utils.data import DataLoader

from transformers import (
    BatchEncoding,
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    DataCollatorForWholeWordMask,
    DataCollatorWithPadding,
    InputFeatures,
    PreTrainedTokenizerFast,
    default_data_collator,
)
from transformers.data.data_collator import SameMasks

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
VOCABULARY_SIZE = 1000
PAD, MASK = 1, 4


def tokenizer_of(words: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the special ones and these words."""
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *words])}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")),
        cls_token="<s>",
        pad_token="<pad>",
        sep_token="</s>",
        unk_token="<unk>",
        mask_token="<mask>",
        padding_side="right",
    )


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return tokenizer_of([f"word{index}" for index in range(len(SPECIAL), VOCABULARY_SIZE)])


def with_padding(tokenizer, features):
    return DataCollatorWithPadding(tokenizer)(features)


def without_padding(_, features):
    return default_data_collator(features)


# -- Both stacking collators -----------------------------------------------------------------------


@pytest.mark.parametrize("collate", [without_padding, with_padding])
@pytest.mark.parametrize("format", [list, np.array, torch.tensor, tuple])
@pytest.mark.parametrize("container", [dict, BatchEncoding])
def test_rows_of_any_type_become_tensors(tokenizer, collate, format, container):
    rows = [
        container({"input_ids": format([5, 6]), "attention_mask": format([1, 1])}),
        container({"input_ids": format([7, 8]), "attention_mask": format([1, 0])}),
    ]
    batch = collate(tokenizer, rows)
    assert batch["input_ids"].tolist() == [[5, 6], [7, 8]]
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert batch["input_ids"].dtype == batch["attention_mask"].dtype == torch.int64
    assert list(rows[0]) == ["input_ids", "attention_mask"]


@pytest.mark.parametrize("collate", [without_padding, with_padding])
@pytest.mark.parametrize("name", ["label", "label_ids"])
@pytest.mark.parametrize(
    ("labels", "dtype"),
    [
        ([0, 2], torch.int64),
        ([True, False], torch.int64),
        ([np.int64(1), np.int64(0)], torch.int64),
        ([torch.tensor(1), torch.tensor(0)], torch.int64),
        ([0.5, 2.0], torch.float32),
        ([5, 4.5], torch.float32),
        ([np.float64(0.5), np.float64(1)], torch.float32),
        ([torch.tensor(0.5), torch.tensor(1.0)], torch.float32),
        ([torch.tensor(1), 0], torch.int64),
        ([[1, 0], [0, 1]], torch.int64),
    ],
)
def test_labels_become_integers_or_floats(tokenizer, collate, name, labels, dtype):
    rows = [{"input_ids": [5], name: label} for label in labels]
    batch = collate(tokenizer, rows)
    expected = [each.tolist() if hasattr(each, "tolist") else each for each in labels]
    assert batch["labels"].dtype == dtype
    assert batch["labels"].tolist() == expected
    assert name not in batch
    assert name in rows[0]


@pytest.mark.parametrize("collate", [without_padding, with_padding])
def test_features_of_the_processors_are_collated(tokenizer, collate):
    rows = [InputFeatures([5, 6], [1, 1], label=1), InputFeatures([7, 8], [1, 1], label=0)]
    batch = collate(tokenizer, rows)
    assert batch["input_ids"].tolist() == [[5, 6], [7, 8]]
    assert batch["labels"].tolist() == [1, 0]
    assert "token_type_ids" not in batch
    unlabeled = collate(tokenizer, [InputFeatures([5], [1])])
    assert set(unlabeled) == {"input_ids", "attention_mask"}


@pytest.mark.parametrize("collate", [without_padding, with_padding])
@pytest.mark.parametrize("label", [1, torch.tensor(1)])
@pytest.mark.parametrize("is_none", [True, False])
@pytest.mark.parametrize("name", ["label", "labels"])
def test_a_missing_label_is_refused(tokenizer, collate, label, is_none, name):
    """In whichever row, because a loss would take a single label for all rows' scores."""
    rows = [
        {"input_ids": [5], name: label},
        {"input_ids": [5], **({name: None} if is_none else {})},
    ]
    for batch in (rows, rows[::-1]):
        with pytest.raises(ValueError, match=f"{name}: cannot become a tensor"):
            collate(tokenizer, batch)


@pytest.mark.parametrize("collate", [without_padding, with_padding])
def test_a_batch_without_examples_is_refused(tokenizer, collate):
    with pytest.raises(ValueError, match="no examples"):
        collate(tokenizer, [])


# -- default_data_collator -------------------------------------------------------------------------


def test_default_leaves_out_strings_and_none():
    batch = default_data_collator([{"a": 1, "sentence": "x", "b": None, "c": 0.5}] * 2)
    assert {name: each.tolist() for name, each in batch.items()} == {"a": [1, 1], "c": [0.5, 0.5]}
    for rows in ([{"a": None}, {"a": 1}], [{"a": 1}, {"a": "x"}], [{"b": 1}, {"b": 1, "a": 1}]):
        with pytest.raises(ValueError, match="a: cannot become a tensor"):
            default_data_collator(rows)


@pytest.mark.parametrize("format", [list, torch.tensor])
def test_default_needs_rows_of_one_length(format):
    rows = [{"input_ids": format([5, 6])}, {"input_ids": format([7])}]
    with pytest.raises(ValueError, match="input_ids: rows of") as error:
        default_data_collator(rows)
    assert "\n" not in str(error.value)


# -- DataCollatorWithPadding -----------------------------------------------------------------------


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    ("settings", "length"),
    [
        ({}, 3),
        ({"padding": "max_length", "max_length": 5}, 5),
        ({"pad_to_multiple_of": 8}, 8),
    ],
)
def test_rows_are_padded_on_the_tokenizer_s_side(tokenizer, side, settings, length):
    tokenizer.padding_side = side
    rows = [
        {"input_ids": [5], "token_type_ids": [0], "label": 1},
        {"input_ids": [6, 7, 8], "token_type_ids": [0, 1, 1], "label": 0},
    ]
    batch = DataCollatorWithPadding(tokenizer, **settings)(rows)
    for index, row in enumerate(rows):
        real = len(row["input_ids"])
        fill = [PAD] * (length - real)
        ids = row["input_ids"] + fill if side == "right" else fill + row["input_ids"]
        assert batch["input_ids"][index].tolist() == ids
        assert batch["attention_mask"][index].tolist() == [int(each != PAD) for each in ids]
        assert batch["token_type_ids"][index].sum() == sum(row["token_type_ids"])
    assert batch["labels"].tolist() == [1, 0]
    assert all(batch[name].shape == (2, length) for name in batch if name != "labels")


def test_padding_does_not_warn(tokenizer, caplog):
    with caplog.at_level(logging.WARNING):
        DataCollatorWithPadding(tokenizer)([{"input_ids": [5]}, {"input_ids": [5, 6]}])
    assert not caplog.records


def test_padding_needs_a_padding_token(tokenizer):
    tokenizer.pad_token = None
    with pytest.raises(ValueError, match="no padding token"):
        DataCollatorWithPadding(tokenizer)([{"input_ids": [5]}])


def test_padding_in_worker_processes(tokenizer):
    rows = [{"input_ids": list(range(5, 6 + index)), "label": index} for index in range(4)]
    collator = DataCollatorWithPadding(tokenizer)
    batches = list(DataLoader(rows, batch_size=2, collate_fn=collator, num_workers=1))
    assert [tuple(batch["input_ids"].shape) for batch in batches] == [(2, 2), (2, 4)]
    assert torch.cat([batch["labels"] for batch in batches]).tolist() == [0, 1, 2, 3]


def test_a_batch_moves_and_has_attributes(tokenizer):
    batch = DataCollatorWithPadding(tokenizer)([{"input_ids": [5], "label": 1}])
    assert isinstance(batch, BatchEncoding)
    assert batch.to("cpu").labels.tolist() == [1]


# -- DataCollatorForTokenClassification ------------------------------------------------------------


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["labels", "label"])
@pytest.mark.parametrize("format", [list, np.array, torch.tensor])
@pytest.mark.parametrize(
    ("settings", "length", "fill"),
    [
        ({}, 3, -100),
        ({"padding": "max_length", "max_length": 5}, 5, -100),
        ({"pad_to_multiple_of": 8, "label_pad_token_id": -1}, 8, -1),
    ],
)
def test_labels_of_tokens_are_padded_like_the_tokens(
    tokenizer, side, name, format, settings, length, fill
):
    tokenizer.padding_side = side
    rows = [
        {"input_ids": [5], name: format([2])},
        {"input_ids": [6, 7, 8], name: format([0, 1, -100])},
    ]
    batch = DataCollatorForTokenClassification(tokenizer, **settings)(rows)
    for index, row in enumerate(rows):
        own, filling = list(row[name]), [fill] * (length - len(row["input_ids"]))
        expected = own + filling if side == "right" else filling + own
        assert batch["labels"][index].tolist() == expected
    assert batch["labels"].shape == batch["input_ids"].shape == (2, length)
    assert batch["labels"].dtype == torch.int64
    assert "label" not in batch
    assert name in rows[0]


def test_tokens_without_labels_give_a_batch_without_labels(tokenizer):
    batch = DataCollatorForTokenClassification(tokenizer)([{"input_ids": [5, 6]}])
    assert set(batch) == {"input_ids", "attention_mask"}


@pytest.mark.parametrize("labels", [[1], [1, 2, 3], [[1, 2]]])
def test_other_numbers_of_labels_than_of_tokens_are_refused(tokenizer, labels):
    rows = [{"input_ids": [5], "labels": [0]}, {"input_ids": [5, 6], "labels": labels}]
    with pytest.raises(ValueError, match=r"row 1 of the batch has \d labels for its 2 tokens"):
        DataCollatorForTokenClassification(tokenizer)(rows)


# -- DataCollatorForLanguageModeling ---------------------------------------------------------------


def long_rows(count: int = 100, length: int = 400) -> list[dict[str, list[int]]]:
    """Rows of words between special tokens; every second row is one word shorter."""
    words = torch.randint(
        len(SPECIAL),
        VOCABULARY_SIZE,
        (count, length),
        generator=torch.Generator().manual_seed(1),
    ).tolist()
    return [{"input_ids": [0, *row[index % 2 :], 2]} for index, row in enumerate(words)]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("share", [0.15, 0.4, 1.0])
def test_targets_are_masked_replaced_or_unchanged_in_the_right_shares(tokenizer, share):
    rows = long_rows()
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=share, generator=seeded())
    plain, batch = tokenizer.pad(rows, return_tensors="pt"), collator(rows)
    ids, labels, before = batch["input_ids"], batch["labels"], plain["input_ids"]
    targets = labels != -100
    words = before >= len(SPECIAL)
    # Each share is allowed four standard deviations.
    count = int(targets.sum())
    assert abs(count / words.sum() - share) <= 4 * (share * (1 - share) / words.sum()) ** 0.5
    assert torch.equal(labels[targets], before[targets])
    assert torch.equal(ids[~targets], before[~targets])
    masked, unchanged = (ids == MASK) & targets, (ids == before) & targets
    replaced = targets & ~masked & ~unchanged
    for part, expected in ((masked, 0.8), (replaced, 0.1), (unchanged, 0.1)):
        spread = (expected * (1 - expected) / count) ** 0.5
        assert abs(part.sum() / count - expected) < 4 * spread
    assert len(ids[replaced].unique()) > VOCABULARY_SIZE / 4
    assert torch.equal(batch["attention_mask"], plain["attention_mask"])


def test_a_seeds_masks_are_upstreams(tmp_path):
    """With RoBERTa's tokenizer: with DeBERTa-v2's, 4.4.2 lets unknown tokens be targets."""
    recorded = json.loads(maker.FIXTURE.read_text("utf-8"))["masked"]
    assert maker.masked_texts(maker.open_tokenizer("roberta", tmp_path)) == recorded


def test_special_tokens_are_never_targets(tokenizer):
    rows = [{"input_ids": [0, 3, 5, MASK, 2, 2, 6]}, {"input_ids": [0]}]
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=1.0)
    batch = collator(rows)
    expected = [[-100, -100, 5, -100, -100, -100, 6], [-100] * 7]
    assert batch["labels"].tolist() == expected


def test_the_examples_own_special_tokens_mask_is_followed_too(tokenizer):
    rows = [{"input_ids": [0, 5, 6], "special_tokens_mask": [0, 1, 0]}, {"input_ids": [7]}]
    rows[1]["special_tokens_mask"] = [0]
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=1.0)
    batch = collator(rows)
    assert batch["labels"].tolist() == [[-100, -100, 6], [7, -100, -100]]
    assert "special_tokens_mask" not in batch


def test_the_generator_determines_the_targets(tokenizer):
    def collate(seed):
        return DataCollatorForLanguageModeling(tokenizer, generator=seeded(seed))(long_rows(4))

    first, same, other = collate(0), collate(0), collate(1)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["input_ids"], other["input_ids"])


def test_the_default_generator_determines_the_targets(tokenizer):
    collator = DataCollatorForLanguageModeling(tokenizer)
    batches = []
    for _ in range(2):
        torch.manual_seed(3)
        batches.append(collator(long_rows(4))["input_ids"])
    assert torch.equal(*batches)
    assert not torch.equal(batches[0], collator(long_rows(4))["input_ids"])


def test_each_pass_masks_the_same_tokens(tokenizer):
    plain, rows = DataCollatorForLanguageModeling(tokenizer), [[0, *range(10, 200), 2]] * 2
    before = torch.get_rng_state()
    passes = [SameMasks(plain, seed=5) for _ in range(2)]
    assert passes[0].collator.generator is None  # it could not be sent to a worker process
    batches = [[each(rows)["input_ids"] for _ in range(2)] for each in passes]
    assert all(map(torch.equal, *batches))
    assert not torch.equal(*batches[0])
    assert torch.equal(torch.get_rng_state(), before)
    assert plain.generator is None


def test_without_mlm_the_labels_are_the_ids(tokenizer):
    rows = [torch.tensor([0, 5, 6]), [0, 7]]
    batch = DataCollatorForLanguageModeling(tokenizer, mlm=False, pad_to_multiple_of=4)(rows)
    assert batch["input_ids"].tolist() == [[0, 5, 6, PAD], [0, 7, PAD, PAD]]
    assert batch["labels"].tolist() == [[0, 5, 6, -100], [0, 7, -100, -100]]


def test_masking_needs_a_mask_token(tokenizer):
    tokenizer.mask_token = None
    with pytest.raises(ValueError, match="needs a tokenizer with a mask_token"):
        DataCollatorForLanguageModeling(tokenizer)
    assert DataCollatorForLanguageModeling(tokenizer, mlm=False)([{"input_ids": [5]}])


@pytest.mark.parametrize("share", [0, -0.1, 1.5])
def test_an_invalid_share_is_refused(tokenizer, share):
    with pytest.raises(
        ValueError, match=f"mlm_probability must be above 0 and at most 1, not {share}"
    ):
        DataCollatorForLanguageModeling(tokenizer, mlm_probability=share)


# -- DataCollatorForWholeWordMask ------------------------------------------------------------------


# A word's first token, and a later one.
SPELLINGS = {"byte-level": ("Ġa", "b"), "SentencePiece": ("▁a", "b"), "WordPiece": ("a", "##b")}
A, B = len(SPECIAL), len(SPECIAL) + 1


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_words_are_hidden_whole(spelling):
    """Of each word's three tokens, all or none are targets, up to the share of the row's tokens."""
    tokenizer = tokenizer_of([*SPELLINGS[spelling], *(f"x{i}" for i in range(50))])
    collator = DataCollatorForWholeWordMask(tokenizer, mlm_probability=0.2, generator=seeded())
    rows = [{"input_ids": [0, *[A, B, B] * count, 2]} for count in (6, 16) * 20]
    batch = collator(rows)
    targets = batch["labels"] != -100
    for index, row in enumerate(rows):
        count = len(row["input_ids"])
        inside = targets[index, 1 : count - 1].view(-1, 3)
        assert torch.equal(inside.any(1), inside.all(1))
        assert int(inside[:, 0].sum()) == round(0.2 * count) // 3
        assert not targets[index, [0, count - 1]].any()
        assert not targets[index, count:].any()
    plain = tokenizer.pad(rows, return_tensors="pt")
    assert torch.equal(batch["labels"][targets], plain["input_ids"][targets])
    assert torch.equal(batch["input_ids"][~targets], plain["input_ids"][~targets])
    assert torch.equal(batch["attention_mask"], plain["attention_mask"])
    share = (batch["input_ids"][targets] == MASK).float().mean()
    assert abs(share - 0.8) < 4 * (0.8 * 0.2 / int(targets.sum())) ** 0.5


def test_the_first_token_begins_a_word():
    """In a byte-level BPE, a text's first word has no space before it."""
    tokenizer = tokenizer_of(["Ġa", "b"])
    collator = DataCollatorForWholeWordMask(tokenizer, mlm_probability=0.5, generator=seeded())
    batch = collator([{"input_ids": [0, B, B, A, B, 2]}] * 30)
    targets = (batch["labels"] != -100)[:, 1:5].view(-1, 2, 2)
    assert torch.equal(targets.any(2), targets.all(2))
    assert torch.equal(targets.all(2).sum(1), torch.ones(30).long())


def test_a_row_without_special_tokens_begins_with_a_word():
    tokenizer = tokenizer_of(["Ġa", "b"])
    collator = DataCollatorForWholeWordMask(tokenizer, mlm_probability=1.0, generator=seeded())
    assert collator([[B, B, A, B]])["labels"].tolist() == [[B, B, A, B]]


def test_each_token_is_a_word_if_no_spelling_marks_words(tokenizer):
    collator = DataCollatorForWholeWordMask(tokenizer, mlm_probability=0.5, generator=seeded())
    batch = collator([[0, 5, 6, 7, 8, 2]])
    assert int((batch["labels"] != -100).sum()) == 3


def test_a_short_row_has_one_target(tokenizer):
    collator = DataCollatorForWholeWordMask(tokenizer, mlm_probability=0.05, generator=seeded())
    batch = collator([[0, 5, 6, 7, 2], [0, 5, 2]])
    assert (batch["labels"] != -100).sum(1).tolist() == [1, 1]


def test_whole_word_masking_refuses_mlm_false(tokenizer):
    with pytest.raises(ValueError, match="leave out mlm=False"):
        DataCollatorForWholeWordMask(tokenizer, mlm=False)
