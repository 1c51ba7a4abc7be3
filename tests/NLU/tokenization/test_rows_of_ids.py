"""Plain tokenizers, rows made from ids, and the calls of 4.4.2."""

import itertools

import make_token_alignment_fixture as maker
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers

from transformers import (
    DebertaV2Tokenizer,
    DebertaV2TokenizerFast,
    RobertaTokenizer,
    RobertaTokenizerFast,
)
from transformers.file_utils import PaddingStrategy, TensorType
from transformers.tokenization_utils_base import TruncationStrategy

PLAIN = {"roberta": RobertaTokenizer, "deberta-v2": DebertaV2Tokenizer}
FAST = {"roberta": RobertaTokenizerFast, "deberta-v2": DebertaV2TokenizerFast}
FIRST, SECOND = list(range(10, 18)), list(range(20, 25))
TEXT, PAIR = "the rain fell on the harbour", "she said that"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return maker.write_tokenizers(tmp_path_factory.mktemp("rows"))


@pytest.fixture(params=PLAIN)
def plain(request, folders):
    return PLAIN[request.param].from_pretrained(folders[request.param])


@pytest.fixture(params=[*itertools.product(PLAIN, (PLAIN, FAST))], ids=lambda each: each[0])
def tokenizer(request, folders):
    family, classes = request.param
    return classes[family].from_pretrained(folders[family])


# ---- Special tokens around ids ----


@pytest.mark.parametrize("pair", [None, SECOND, []])
def test_special_tokens_are_put_around_ids(tokenizer, pair):
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    between = [sep, sep] if "Roberta" in type(tokenizer).__name__ else [sep]
    row = tokenizer.build_inputs_with_special_tokens(FIRST, pair)
    assert row == [cls, *FIRST, *([sep] if pair is None else [*between, *pair, sep])]
    mask = tokenizer.get_special_tokens_mask(FIRST, pair)
    assert [index for index, special in zip(row, mask, strict=True) if not special] == [
        *FIRST,
        *(pair or []),
    ]
    assert tokenizer.get_special_tokens_mask(row, already_has_special_tokens=True) == mask
    assert len(tokenizer.create_token_type_ids_from_sequences(FIRST, pair)) == len(row)
    assert tokenizer.num_special_tokens_to_add(pair is not None) == sum(mask)
    with pytest.raises(ValueError, match="leave token_ids_1 out"):
        tokenizer.get_special_tokens_mask(row, row, already_has_special_tokens=True)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"add_special_tokens": False},
        {"truncation": "only_first", "max_length": 12},
        {"truncation": True, "max_length": 13, "return_special_tokens_mask": True},
        {"padding": "max_length", "max_length": 40, "return_token_type_ids": True},
        {"return_attention_mask": False},
        {"padding": True, "pad_to_multiple_of": 8},
    ],
)
@pytest.mark.parametrize("pair", [None, PAIR])
def test_rows_from_ids_equal_rows_from_texts(tokenizer, settings, pair):
    texts = [TEXT] if pair is None else [TEXT, pair]
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert tokenizer.prepare_for_model(*ids, **settings) == tokenizer(*texts, **settings)


def test_one_row_as_tensors_with_and_without_a_batch_axis(tokenizer):
    row = tokenizer.prepare_for_model(FIRST, return_tensors="pt", return_length=True)
    assert row.input_ids.shape == (row.length,) == (10,)
    rows = tokenizer.prepare_for_model(FIRST, return_tensors="pt", prepend_batch_axis=True)
    assert torch.equal(rows.input_ids[0], row.input_ids)


# ---- Truncation ----


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("stride", [0, 2, 100])
@pytest.mark.parametrize("how", ["longest_first", "only_first", "only_second", True])
@pytest.mark.parametrize("number", [0, 1, 4])
def test_truncate_sequences_returns_the_overflow_with_its_stride(plain, how, number, stride, side):
    plain.truncation_side = side
    first, second, cut = plain.truncate_sequences(FIRST, SECOND, number, how, stride)
    assert len(first) + len(second) == len(FIRST) + len(SECOND) - number
    assert how != "only_first" or second == SECOND
    assert how != "only_second" or first == FIRST
    left = side == "left"
    for whole, kept in ((FIRST, first), (SECOND, second)):
        assert kept == (whole[len(whole) - len(kept) :] if left else whole[: len(kept)])
        lost = len(whole) - len(kept)
        window = min(lost + stride, len(whole)) if lost else 0
        part, cut = cut[:window], cut[window:]
        assert part == (whole[:window] if left else whole[len(whole) - window :])
    assert not cut


def test_the_longer_sequence_is_cut_first(plain):
    lengths = [
        tuple(map(len, plain.truncate_sequences(FIRST, SECOND, number)[:2]))
        for number in range(1, 8)
    ]
    assert lengths == [(7, 5), (6, 5), (5, 5), (5, 4), (4, 4), (4, 3), (3, 3)]
    assert plain.truncate_sequences(FIRST, None, 3)[0] == FIRST[:5]
    assert plain.truncate_sequences(FIRST, None, 9) == ([], None, FIRST)
    assert plain.truncate_sequences(FIRST, SECOND, 3, "do_not_truncate") == (FIRST, SECOND, [])


@pytest.mark.parametrize("strategy", ["only_second", "only_first"])
def test_truncating_a_sequence_that_is_too_short_is_an_error(plain, strategy):
    with pytest.raises(ValueError, match=r"use a larger max_length, or longest_first") as error:
        plain.truncate_sequences([1], [2], 1, strategy)
    assert "\n" not in str(error.value)


def test_overflow_of_one_text_and_of_several(plain):
    whole = plain.encode(TEXT, add_special_tokens=False)
    settings = {"truncation": True, "max_length": 6, "stride": 1, "return_overflowing_tokens": True}
    row = plain(TEXT, **settings)
    assert row["input_ids"][1:-1] == whole[:4]
    assert row["overflowing_tokens"] == whole[3:]
    assert row["num_truncated_tokens"] == len(whole) - 4
    rows = plain(["the", TEXT], **settings)
    assert rows["overflowing_tokens"] == [[], whole[3:]]
    assert "overflow_to_sample_mapping" not in rows


# ---- Calls under their other names ----


def test_calls_of_different_names_agree(tokenizer):
    pairs = [(TEXT, PAIR), (PAIR, TEXT)]
    texts = [TEXT, PAIR]
    assert tokenizer.encode_plus(TEXT, PAIR) == tokenizer(TEXT, PAIR)
    assert tokenizer.batch_encode_plus(texts) == tokenizer(texts)
    assert tokenizer.batch_encode_plus(pairs) == tokenizer(texts, texts[::-1]) == tokenizer(pairs)
    assert tokenizer.encode(TEXT, PAIR, False) == tokenizer(TEXT, PAIR, False)["input_ids"]
    assert tokenizer(np.array(texts)) == tokenizer(each for each in texts) == tokenizer(texts)
    tokens = tokenizer.tokenize(TEXT, pair=PAIR, add_special_tokens=True)
    assert tokenizer.convert_tokens_to_ids(tokens) == tokenizer.encode(TEXT, PAIR)


def test_texts_as_tokens_and_as_ids(plain):
    tokens, ids = plain.tokenize(TEXT), plain.encode(TEXT, add_special_tokens=False)
    assert plain.encode(tokens) == plain.encode(ids) == plain.encode(TEXT)
    assert plain.encode(tokens, ids) == plain.encode(TEXT, TEXT)
    assert plain.encode(ids, return_tensors="pt").tolist() == [plain.encode(TEXT)]


def test_deprecated_settings_still_work(tokenizer):
    settings = {"max_length": 9, "truncation": "only_first"}
    with pytest.warns(FutureWarning, match="pad_to_max_length=True is deprecated"):
        old = tokenizer("rain", pad_to_max_length=True, **settings)
    assert old == tokenizer("rain", padding="max_length", **settings)
    with pytest.warns(FutureWarning, match="truncation_strategy='only_first' is deprecated"):
        old = tokenizer(TEXT, max_length=9, truncation_strategy="only_first")
    assert old == tokenizer(TEXT, **settings)
    with pytest.warns(FutureWarning):  # no length is given
        assert tokenizer("rain", pad_to_max_length=True) == tokenizer("rain")
    with pytest.raises(TypeError, match="have no argument max_len, trunc"):
        tokenizer("rain", max_len=3, trunc=True)


def test_settings_can_be_enums(tokenizer):
    named = tokenizer(
        TEXT,
        padding=PaddingStrategy.MAX_LENGTH,
        truncation=TruncationStrategy.ONLY_FIRST,
        max_length=7,
        return_tensors=TensorType.NUMPY,
    )
    plain = tokenizer(TEXT, padding="max_length", truncation="only_first", max_length=7)
    assert {name: rows[0].tolist() for name, rows in named.items()} == dict(plain)


def test_lengths(tokenizer):
    texts = ["the", TEXT]
    lengths = [len(row) for row in tokenizer(texts)["input_ids"]]
    assert tokenizer(texts, return_length=True)["length"] == lengths
    assert tokenizer(texts, return_length=True, padding=True)["length"] == [max(lengths)] * 2
    one = tokenizer("the", return_length=True)["length"]  # the form is upstream's
    assert one == ([lengths[0]] if tokenizer.is_fast else lengths[0])


def test_a_max_length_below_the_special_tokens_is_an_error(tokenizer):
    frame = tokenizer.num_special_tokens_to_add(pair=True)
    with pytest.raises(ValueError, match=f"give at least {frame + 1}"):
        tokenizer(TEXT, PAIR, truncation=True, max_length=frame - 1)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([("a", "b"), "c"], "row 0 is a pair, but row 1 is a single text"),
        ([("a", "b", "c")], "row 0 has 3 texts, but a pair has two"),
    ],
)
def test_batches_that_mix_pairs_and_texts_are_errors(tokenizer, batch, message):
    with pytest.raises(ValueError, match=message):
        tokenizer.batch_encode_plus(batch)


# ---- RobertaTokenizer's own ----


def test_add_prefix_space_puts_a_space_before_the_text(folders):
    plain = RobertaTokenizer.from_pretrained(folders["roberta"])
    always = RobertaTokenizer.from_pretrained(folders["roberta"], add_prefix_space=True)
    assert plain.encode("rain", add_prefix_space=True) == plain.encode(" rain")
    assert plain.tokenize("rain", add_prefix_space=True) == plain.tokenize(" rain")
    assert always.encode("rain") == plain.encode(" rain") != plain.encode("rain")
    assert plain.encode(" rain", add_prefix_space=True) == plain.encode(" rain")
    with pytest.raises(ValueError, match="errors='strict'"):
        RobertaTokenizer.from_pretrained(folders["roberta"], errors="strict")


def test_byte_encoder_and_decoder(folders):
    plain = RobertaTokenizer.from_pretrained(folders["roberta"])
    assert sorted(plain.byte_encoder) == list(range(256))
    assert sorted(plain.byte_decoder) == sorted(pre_tokenizers.ByteLevel.alphabet())
    text = "naïve \U0001f600\x00"
    letters = "".join(plain.tokenize(text))
    assert bytes(plain.byte_decoder[letter] for letter in letters) == text.encode()


def test_decode_can_put_spaces_between_added_tokens(plain):
    plain.add_tokens(["<x>", "<y>"])
    row = plain.encode("rain<x><y>wind", add_special_tokens=False)
    assert plain.decode(row, spaces_between_special_tokens=True) == "rain <x> <y> wind"
    assert plain.decode(row, spaces_between_special_tokens=False) == "rain<x><y>wind"
