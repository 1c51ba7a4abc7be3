"""Calls of the tokenizers: padding, truncation and tensors; errors and warnings."""

import copy
import pickle
import random
import re

import make_tokenizer_fixture as maker
import numpy as np
import pytest
import torch
from tiny_tokenizer import CLS, PAD, SEP

from transformers import BatchEncoding, RobertaTokenizerFast

# ---- Calls: what they return ----


def test_one_text_and_a_batch(tokenizer):
    one, batch = tokenizer("a b"), tokenizer(["a b", "c"])
    assert list(one) == ["input_ids", "attention_mask"]
    assert batch["input_ids"][0] == one["input_ids"]
    assert batch["attention_mask"] == [[1] * len(row) for row in batch["input_ids"]]
    assert tokenizer([])["input_ids"] == []


def test_only_requested_columns_are_returned(tokenizer):
    batch = tokenizer(
        "a",
        "b",
        return_token_type_ids=True,
        return_attention_mask=False,
        return_special_tokens_mask=True,
    )
    assert list(batch) == ["input_ids", "token_type_ids", "special_tokens_mask"]
    assert batch["token_type_ids"] == [0] * 6
    assert batch["special_tokens_mask"] == [1, 0, 1, 1, 0, 1]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    ("settings", "length"),
    [
        ({"padding": True}, 5),
        ({"padding": "longest"}, 5),
        ({"padding": True, "pad_to_multiple_of": 4}, 8),
        ({"padding": True, "pad_to_multiple_of": 5}, 5),
        ({"padding": "max_length", "max_length": 9}, 9),
        ({"padding": "max_length", "max_length": 9, "pad_to_multiple_of": 8}, 16),
        ({"padding": "max_length", "max_length": 4, "truncation": True}, 4),
        ({"padding": "max_length"}, 12),
    ],
)
def test_padding(tiny, side, settings, length):
    tokenizer = RobertaTokenizerFast.from_pretrained(tiny, padding_side=side, model_max_length=12)
    plain = tokenizer(
        ["q", "zqx"], max_length=min(length, 12), truncation=True, add_special_tokens=True
    )["input_ids"]
    batch = tokenizer(["q", "zqx"], return_special_tokens_mask=True, **settings)
    for ids, mask, special, row in zip(*batch.values(), plain, strict=True):
        fill = length - len(row)
        before, after = (0, fill) if side == "right" else (fill, 0)
        assert ids == [PAD] * before + row + [PAD] * after
        assert mask == [0] * before + [1] * len(row) + [0] * after
        assert special == [int(index in (CLS, PAD, SEP)) for index in ids]


@pytest.mark.parametrize("multiple", [None, 4, 5])
@pytest.mark.parametrize("max_length", [None, 8, 10])
@pytest.mark.parametrize("truncation", [False, True])
@pytest.mark.parametrize("padding", [False, True, "max_length"])
def test_combinations_of_padding_truncation_and_lengths(
    tiny, padding, truncation, max_length, multiple
):
    """Rows of 9 and 3 tokens follow upstream's rules, except that impossible lengths are errors."""
    tokenizer = RobertaTokenizerFast.from_pretrained(tiny, model_max_length=12)
    settings = {"padding": padding, "truncation": truncation, "max_length": max_length}
    lengths, limit = [9, 3], 12 if max_length is None else max_length
    cut = truncation or (max_length is not None and not padding)
    if cut:
        lengths = [min(length, limit) for length in lengths]
    target = max(lengths) if padding is True else limit
    rounded = -(-target // multiple) * multiple if multiple else target
    impossible = bool(padding and cut and multiple and limit % multiple)
    too_long = padding == "max_length" and target < max(lengths)
    if impossible or too_long:
        message = "cannot be padded to"
        message += f" a multiple of pad_to_multiple_of={multiple}" if impossible else f" {target}"
        with pytest.raises(ValueError, match=message):
            tokenizer(["q" * 7, "q"], **settings, pad_to_multiple_of=multiple)
    else:
        batch = tokenizer(["q" * 7, "q"], **settings, pad_to_multiple_of=multiple)
        rows = [len(ids) for ids in batch["input_ids"]]
        assert rows == ([rounded] * 2 if padding else lengths)


@pytest.mark.parametrize("multiple", [0, -8])
def test_pad_to_multiple_of_is_at_least_1(tokenizer, multiple):
    rows = {"input_ids": [[0, 5, 2]]}
    for call in (lambda **how: tokenizer("q", **how), lambda **how: tokenizer.pad(rows, **how)):
        with pytest.raises(ValueError, match=f"pad_to_multiple_of is at least 1, not {multiple}"):
            call(padding=True, pad_to_multiple_of=multiple)


def test_model_input_names_are_each_tokenizer_s_own_list(tiny):
    first, second = (RobertaTokenizerFast.from_pretrained(tiny) for _ in range(2))
    assert first.model_input_names == ["input_ids", "attention_mask"]
    first.model_input_names.append("token_type_ids")
    assert list(first("q")) == ["input_ids", "token_type_ids", "attention_mask"]
    assert second.model_input_names == RobertaTokenizerFast.model_input_names
    assert list(second("q")) == ["input_ids", "attention_mask"]


@pytest.mark.parametrize(
    ("strategy", "limit", "first", "second"),
    [
        ("longest_first", 9, 3, 2),
        (True, 8, 2, 2),
        ("only_first", 8, 1, 3),
        ("only_second", 9, 4, 1),
    ],
)
def test_truncation_of_pairs(tokenizer, strategy, limit, first, second):
    row = tokenizer("qzxj", "jxz", truncation=strategy, max_length=limit)["input_ids"]
    middle = row.index(SEP)
    assert len(row) == limit
    assert (middle - 1, len(row) - middle - 3) == (first, second)


def test_long_pairs_are_cut_like_short_ones_without_combining_all_that_is_cut_off(tokenizer):
    backend, chance = tokenizer.backend_tokenizer, random.Random(0)
    for lengths in [(150, 150), (150, 170), (170, 150), (150, 150), (150, 10), (10, 150)]:
        pair = tuple("".join(chance.choices("qzxjqzxj  🙂\n", k=length)) for length in lengths)
        backend.enable_truncation(9)
        (whole,) = backend.encode_batch([pair])
        backend.no_truncation()
        (ours,) = tokenizer(*pair, truncation=True, max_length=9).encodings
        for name in ("ids", "offsets", "word_ids", "sequence_ids"):
            assert getattr(ours, name) == getattr(whole, name)
        if min(lengths) > 10:
            assert len(whole.overflowing) > 1000
            assert len(ours.overflowing) < 200


def test_truncation_side(tiny):
    text = "qzxj"
    left = RobertaTokenizerFast.from_pretrained(tiny, truncation_side="left")
    whole = left.encode(text)
    row = left.encode(text, truncation=True, max_length=4)
    assert row == [CLS, *whole[3:5], SEP]
    assert left.encode(text, max_length=4) == row
    for settings in ({"truncation": "do_not_truncate"}, {"padding": "do_not_pad"}):
        assert left.encode(text, max_length=4, **settings) == whole


def test_tensors(tokenizer):
    batch = tokenizer(["a", "b c"], padding=True, return_tensors="pt")
    assert batch["input_ids"].shape == batch.attention_mask.shape == (2, 4)
    assert batch.input_ids.dtype == torch.int64
    assert batch.to("meta").input_ids.device.type == "meta"
    arrays = tokenizer(["a", "b c"], padding=True, return_tensors="np")
    assert isinstance(arrays["input_ids"], np.ndarray)
    assert tokenizer("a", return_tensors="pt")["input_ids"].shape == (1, 3)
    assert tokenizer.encode("a", return_tensors="np").shape == (1, 3)
    assert tokenizer([""], add_special_tokens=False, return_tensors="pt").input_ids.shape == (1, 0)


def test_word_ids_follow_the_padding(tokenizer):
    batch = tokenizer(["a", "b c"], padding=True)
    assert batch.word_ids(0) == [None, 0, None, None]
    assert batch.word_ids(1) == [None, 0, 1, None]
    with pytest.raises(ValueError, match="use a fast tokenizer"):
        BatchEncoding({"input_ids": [[0]]}).word_ids()


def test_batch_encoding_is_a_dict(tokenizer):
    batch = tokenizer(["a", "b"])
    assert dict(**batch) == {name: batch[name] for name in batch}
    for duplicate in (copy.copy(batch), copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        assert duplicate.input_ids == batch.input_ids
    with pytest.raises(AttributeError, match="token_type_ids"):
        _ = batch.token_type_ids
    one_row = BatchEncoding({"input_ids": [1, 2]}, tensor_type="pt", prepend_batch_axis=True)
    assert one_row.input_ids.tolist() == [[1, 2]]
    batch["labels"] = [1, 0]
    assert batch.convert_to_tensors("pt").labels.tolist() == [1, 0]


# ---- pad ----


@pytest.mark.parametrize("format", [list, np.array, torch.tensor])
def test_pad_takes_rows_in_any_form(tokenizer, format):
    rows = [{"input_ids": format([5, 6, 7]), "label": 1}, {"input_ids": format([8]), "label": 0}]
    batch = tokenizer.pad(rows, return_tensors="pt")
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, PAD, PAD]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["label"].tolist() == [1, 0]
    columns = {"input_ids": [row["input_ids"] for row in rows]}
    assert tokenizer.pad(columns)["input_ids"] == batch["input_ids"].tolist()
    one = tokenizer.pad({"input_ids": format([8])}, padding="max_length", max_length=3)
    assert one == {"input_ids": [8, PAD, PAD], "attention_mask": [1, 0, 0]}


def test_pad_finds_the_ids_by_the_name_of_the_model_s_input(tokenizer):
    rows = {"label": [1, 0], "input_ids": [[5, 6, 7], [8]]}
    assert tokenizer.pad(rows)["input_ids"] == [[5, 6, 7], [8, PAD, PAD]]
    tokenizer.model_input_names = ["inputs", "attention_mask"]
    renamed = {"label": [1, 0], "inputs": [[5, 6, 7], [8]]}
    assert tokenizer.pad(renamed)["inputs"] == [[5, 6, 7], [8, PAD, PAD]]
    assert tokenizer(["q", "zqx"], padding=True)["inputs"][0][-1] == PAD


def test_pad_gives_what_a_padded_call_gives(tokenizer):
    texts = list(maker.STRINGS)
    rows = [tokenizer(text, return_special_tokens_mask=True) for text in texts]
    settings = {"padding": True, "pad_to_multiple_of": 8}
    called = tokenizer(texts, return_special_tokens_mask=True, **settings)
    assert tokenizer.pad(rows, **settings) == dict(called)


def test_pad_without_padding_leaves_rows_as_they_are(tokenizer):
    rows = {"input_ids": [[5], [6, 7]]}
    assert tokenizer.pad(rows, padding=False, return_attention_mask=False) == rows


# ---- Bad input ----


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (("a", ["b"]), {}, "two lists of texts"),
        ((["a", "b"], ["c"]), {}, "2 texts, but 1 in text_pair"),
        (("a",), {"truncation": "shortest"}, "truncation is .*, not 'shortest'"),
        (("a",), {"padding": "most"}, "padding is .*, not 'most'"),
        (("a",), {"return_tensors": "tf"}, "return_tensors is .*, not 'tf'"),
        ((["a", "b c"],), {"return_tensors": "pt"}, "input_ids: rows of 3 to 4 items"),
        (("a", "b"), {"truncation": True, "max_length": 3}, "no room for the 4 special tokens"),
        (("a b c d",), {"truncation": "only_second", "max_length": 3}, "only_second.*not provided"),
        (("q", "z"), {"truncation": "only_first", "max_length": 5}, "only_first.* too short"),
        (("a b c",), {"padding": "max_length", "max_length": 3}, "5 tokens cannot be padded to 3"),
    ],
)
def test_bad_calls_are_errors_of_one_line(tokenizer, arguments, settings, message):
    with pytest.raises(ValueError, match=message) as error:
        tokenizer(*arguments, **settings)
    assert "\n" not in str(error.value)
    assert tokenizer.backend_tokenizer.truncation is None


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ((None,), {}, "text is a text or a list of texts, not NoneType"),
        ((3,), {}, "text is a text or a list of texts, not int"),
        ((["a", None],), {}, r"text 1 is NoneType \(None\), not a text"),
        ((["a", ["b", "c", "d"]], ["a", "b"]), {}, "text 1 is list .* pass is_split_into_words"),
        ((["a", 5],), {"is_split_into_words": True}, r"text 0: word 1 is int \(5\), not a string"),
        (([["a"], ["b", None]],), {"is_split_into_words": True}, "text 1: word 1 is NoneType"),
        (([["a"], 7],), {"is_split_into_words": True}, "text 1 is int .*not a list of words"),
    ],
)
def test_values_that_are_not_text_are_named(tiny, arguments, settings, message):
    tokenizer = RobertaTokenizerFast.from_pretrained(tiny, add_prefix_space=True)
    with pytest.raises(TypeError, match=message) as error:
        tokenizer(*arguments, **settings)
    assert isinstance(error.value, ValueError)  # scripts show a ValueError as one line
    assert "\n" not in str(error.value)


def test_padding_needs_a_padding_token(tokenizer):
    tokenizer.pad_token = None
    with pytest.raises(ValueError, match="no padding token"):
        tokenizer(["a", "b c"], padding=True)
    assert len(tokenizer(["a", "b c"])["input_ids"]) == 2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "need 'input_ids'"),
        ([{"label": 1}], r"need 'input_ids'; they have \['label'\]"),
        ([{"input_ids": [5], "text": "a"}], "text: cannot become a tensor"),
        ([{"input_ids": [5]}, {"input_ids": [5], "token_type_ids": [1]}], "no 'token_type_ids'"),
        ([{"input_ids": [5], "token_type_ids": [1]}, {"input_ids": [5]}], "no 'token_type_ids'"),
    ],
)
def test_pad_refuses_bad_rows(tokenizer, rows, message):
    with pytest.raises(ValueError, match=message):
        tokenizer.pad(rows, return_tensors="pt")


@pytest.mark.parametrize(
    ("limit", "settings", "message"),
    [
        (None, {"truncation": True}, "truncation: no max_length"),
        (None, {"padding": "max_length"}, "padding: no max_length"),
        (None, {"max_length": 4}, "max_length without truncation"),
        (None, {"max_length": 4, "padding": True}, "max_length .*: it does nothing"),
        (99, {"pad_to_multiple_of": 8}, "pad_to_multiple_of without padding"),
        (4, {}, r"longer than the specified maximum .* \(9 > 4\): pass truncation=True"),
        (4, {"truncation": True, "max_length": 6}, "max_length=6 exceeds .*: 4"),
    ],
)
def test_warnings_come_once(tiny, warnings, limit, settings, message):
    tokenizer = RobertaTokenizerFast.from_pretrained(tiny, model_max_length=limit)
    for text in ("a b c d e", "a b c d e f g"):
        tokenizer(text, **settings)
    assert [record.levelname for record in warnings.records] == ["WARNING"]
    assert re.search(message, warnings.text)


@pytest.mark.parametrize(
    "settings", [{}, {"truncation": True}, {"padding": "max_length"}, {"padding": True}]
)
def test_ordinary_calls_do_not_warn(tiny, warnings, settings):
    tokenizer = RobertaTokenizerFast.from_pretrained(tiny, model_max_length=8)
    tokenizer(["a b", "c"], **settings)
    assert not warnings.records
