"""Tests of the alignment of tokens with words, characters and texts, which is upstream's."""

import copy
import itertools
import json
import pickle

import make_token_alignment_fixture as maker
import pytest
import torch

from transformers import (
    AddedToken,
    BatchEncoding,
    CharSpan,
    DebertaV2Tokenizer,
    DebertaV2TokenizerFast,
    PreTrainedTokenizerFast,
    RobertaTokenizer,
    RobertaTokenizerFast,
    TokenSpan,
    tokenization_utils_fast,
)

FIXTURE = json.loads(maker.FIXTURE.read_text("utf-8"))
FAST = {"roberta": RobertaTokenizerFast, "deberta-v2": DebertaV2TokenizerFast}
PLAIN = {"roberta": RobertaTokenizer, "deberta-v2": DebertaV2Tokenizer}
CONTEXT = "The rain fell on the harbour, and the boats came home before the evening."


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return maker.write_tokenizers(tmp_path_factory.mktemp("alignment"))


@pytest.fixture(params=FAST)
def family(request) -> str:
    return request.param


@pytest.fixture
def tokenizer(family, folders):
    return FAST[family].from_pretrained(folders[family])


# ---- Upstream's values ----


@pytest.mark.parametrize("call", maker.CALLS)
def test_alignment_equals_upstreams(family, folders, call):
    ours = maker.aligned(FAST[family], folders[family], call)
    expected = FIXTURE[family][call]
    assert ours.keys() == expected.keys()
    for entry in expected:
        for row, (mine, theirs) in enumerate(zip(ours[entry], expected[entry], strict=True)):
            assert mine == theirs, (entry, row)


# ---- Properties of the alignment ----


@pytest.mark.parametrize("text", maker.TEXTS)
def test_every_character_but_spaces_has_a_token_that_covers_it(tokenizer, text):
    batch = tokenizer(text, return_offsets_mapping=True)
    for place, char in enumerate(text):
        token = batch.char_to_token(place)
        assert token is not None or char.isspace()
        if token is not None:
            start, end = batch["offset_mapping"][token]
            assert start <= place < end
            assert batch.token_to_chars(token) == CharSpan(start, end)
            assert batch.char_to_word(place) == batch.token_to_word(token)


def test_words_tokens_and_characters_map_to_each_other(tokenizer):
    batch = tokenizer("rain fell", "the boats")
    for sequence, text in enumerate(("rain fell", "the boats")):
        for word, letters in enumerate(text.split()):
            tokens = batch.word_to_tokens(word, sequence_index=sequence)
            assert isinstance(tokens, TokenSpan)
            chars = batch.word_to_chars(0, word, sequence_index=sequence)
            assert text[slice(*chars)].strip() == letters
            for token in range(*tokens):
                assert batch.token_to_word(token) == batch.token_to_word(0, token) == word
                assert batch.token_to_sequence(token) == sequence
    assert batch.words() == batch.word_ids(0)
    assert batch.n_sequences == 2
    assert batch.token_to_sequence(0) is batch.token_to_chars(0) is batch.token_to_word(-1) is None
    assert batch.word_to_tokens(99) is None


def test_overlapping_windows_cover_the_whole_text(tokenizer):
    whole = tokenizer(CONTEXT, add_special_tokens=False)["input_ids"]
    batch = tokenizer(
        CONTEXT, truncation=True, max_length=12, stride=3, return_overflowing_tokens=True
    )
    rows = [
        [i for i, s in zip(row, batch.sequence_ids(n), strict=True) if s == 0]
        for n, row in enumerate(batch["input_ids"])
    ]
    assert all(len(row) <= 10 for row in rows)
    for before, after in itertools.pairwise(rows):
        assert before[-3:] == after[:3]
    assert rows[0] + [index for row in rows[1:] for index in row[3:]] == whole
    assert batch["overflow_to_sample_mapping"] == [0] * len(rows)


def test_a_package_that_loses_what_is_cut_off_is_refused(folders, monkeypatch):
    """As versions 0.23.1 and 0.23.2 of tokenizers do."""
    tokenizer = RobertaTokenizerFast.from_pretrained(folders["roberta"])
    cut = {"truncation": True, "max_length": 12}
    first = tokenizer(CONTEXT, **cut, return_overflowing_tokens=True)["input_ids"][0]
    monkeypatch.setattr(tokenization_utils_fast, "_keeps_what_is_cut_off", lambda: False)
    with pytest.raises(ValueError, match=r"tokenizers \S+ loses most of what it cuts off"):
        tokenizer(CONTEXT, **cut, return_overflowing_tokens=True)
    assert tokenizer(CONTEXT, **cut)["input_ids"] == first
    (row,) = tokenizer("a b", **cut, return_overflowing_tokens=True)["input_ids"]
    assert row == tokenizer("a b")["input_ids"]


def test_windows_are_mapped_to_their_texts(tokenizer):
    batch = tokenizer(
        ["a", CONTEXT, "b"],
        truncation=True,
        max_length=12,
        return_overflowing_tokens=True,
        padding=True,
        return_tensors="pt",
    )
    samples = batch["overflow_to_sample_mapping"]
    assert (samples[0], samples[-1]) == (0, 2)
    assert samples.bincount()[1] == len(samples) - 2
    assert batch["input_ids"].shape == (len(samples), 12)


def test_answers_are_found_in_windows(tokenizer):
    """The way question answering finds them: from characters to tokens, and back."""
    start = CONTEXT.index("boats")
    batch = tokenizer(
        ["what came home"],
        [CONTEXT],
        truncation="only_second",
        max_length=30,
        stride=6,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        padding="max_length",
    )
    found = 0
    for row, offsets in enumerate(batch["offset_mapping"]):
        first, last = (batch.char_to_token(row, place, 1) for place in (start, start + 4))
        if first is not None and last is not None:
            found += 1
            assert batch.sequence_ids(row)[first] == 1
            assert CONTEXT[offsets[first][0] : offsets[last][1]].strip() == "boats"
    assert found


def test_offsets_are_right_after_capitals_that_lowercase_to_two_characters(folders):
    tokenizer = DebertaV2TokenizerFast.from_pretrained(folders["deberta-v2"], do_lower_case=True)
    text = "İİ RAIN"
    batch = tokenizer(text, return_offsets_mapping=True)
    start, end = batch["offset_mapping"][-2]
    assert batch.tokens()[-2].endswith("in")
    assert text[start:end].endswith("IN")


def test_punctuation_that_is_split_off_is_a_word(folders):
    settings = {"split_by_punct": True}
    folder = folders["deberta-v2"]
    tokenizer = DebertaV2TokenizerFast.from_pretrained(folder, **settings)
    plain = DebertaV2Tokenizer.from_pretrained(folder, **settings)
    text = "rain,wind [MASK]."
    batch = tokenizer(text)
    assert batch["input_ids"] == plain(text)["input_ids"] == batch.encodings[0].ids
    words = [text[slice(*batch.word_to_chars(0, word))].strip() for word in range(5)]
    assert words == ["rain", ",", "wind", "[MASK]", "."]


# ---- The same ids everywhere ----


def test_encodings_have_the_ids_and_masks_of_their_rows(tokenizer):
    settings = {"padding": "max_length", "max_length": 20, "truncation": True}
    batch = tokenizer(list(maker.TEXTS), list(maker.TEXTS[::-1]), **settings)
    for row, encoding in enumerate(batch.encodings):
        assert encoding.ids == batch["input_ids"][row]
        assert encoding.attention_mask == batch["attention_mask"][row]
        assert encoding is batch[row]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"truncation": True, "max_length": 11},
        {"truncation": "only_second", "max_length": 64, "padding": True},
        {"add_special_tokens": False, "return_special_tokens_mask": True},
        {"padding": True, "return_tensors": "np", "return_token_type_ids": True},
    ],
)
def test_plain_tokenizers_give_the_same_as_fast_ones(family, folders, tokenizer, settings):
    plain = PLAIN[family].from_pretrained(folders[family])
    texts = maker.TEXTS[:3], maker.TEXTS[4:7]
    fast_batch, plain_batch = (each(*map(list, texts), **settings) for each in (tokenizer, plain))
    assert fast_batch.keys() == plain_batch.keys()
    for entry, rows in plain_batch.items():
        assert (
            torch.equal(torch.tensor(rows), torch.tensor(fast_batch[entry]))
            if ("return_tensors" in settings)
            else (rows == fast_batch[entry])
        )
    assert (plain.is_fast, plain_batch.is_fast, plain_batch.encodings) == (False, False, None)
    assert tokenizer.is_fast is fast_batch.is_fast is True
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert not isinstance(plain, PreTrainedTokenizerFast)


@pytest.mark.parametrize("always_spaced", [False, True])
def test_plain_tokenizers_give_split_words_the_same_ids(family, folders, always_spaced):
    settings = {"add_prefix_space": True} if family == "roberta" else {}
    tokenizer = FAST[family].from_pretrained(folders[family], **settings)
    plain = PLAIN[family].from_pretrained(folders[family], **(settings if always_spaced else {}))
    for each in (tokenizer, plain):
        each.add_tokens(["<x>", AddedToken("ra", single_word=True)])
    added = ["<x>", "fell <x>", "rain", tokenizer.mask_token]
    words = [*map(list, maker.WORDS), added + ["<x>rain", "ra"] * always_spaced]
    ids = tokenizer(words, is_split_into_words=True)["input_ids"]
    assert plain(words, is_split_into_words=True)["input_ids"] == ids
    assert plain(words[0], is_split_into_words=True)["input_ids"] == ids[0]
    pairs = tokenizer(words[:2], words[4:], is_split_into_words=True)["input_ids"]
    assert plain(words[:2], words[4:], is_split_into_words=True)["input_ids"] == pairs
    rows = list(zip(words[:2], words[4:], strict=True))
    assert tokenizer.batch_encode_plus(rows, is_split_into_words=True)["input_ids"] == pairs
    plain.add_prefix_space = True  # no setting of the backend's any more
    assert plain(words, is_split_into_words=True)["input_ids"] == ids


# ---- What is refused ----


def test_plain_tokenizers_give_no_alignment(family, folders):
    plain = PLAIN[family].from_pretrained(folders[family])
    with pytest.raises(NotImplementedError, match="use a fast tokenizer"):
        plain("a", return_offsets_mapping=True)
    for ask in (BatchEncoding.word_ids, BatchEncoding.sequence_ids, BatchEncoding.tokens):
        with pytest.raises(ValueError, match="use a fast tokenizer"):
            ask(plain("a"))
    with pytest.raises(KeyError, match="only rows made by a fast tokenizer have indices"):
        plain("a")[0]


def test_split_words_need_add_prefix_space_in_roberta(folders):
    tokenizer = RobertaTokenizerFast.from_pretrained(folders["roberta"])
    with pytest.raises(ValueError, match="open the tokenizer with add_prefix_space=True"):
        tokenizer(["a", "b"], is_split_into_words=True)


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ((CONTEXT,), {"stride": 7}, "stride=7 is not smaller than the [78] tokens"),
        ((CONTEXT,), {"stride": -1}, "stride is a number of tokens, not -1"),
        (
            (["a", CONTEXT], ["b", CONTEXT]),
            {"truncation": "only_second", "stride": 2, "max_length": 60},
            "row 1: .*",
        ),
    ],
)
def test_strides_that_do_not_fit_are_errors(tokenizer, arguments, settings, message):
    settings = {"truncation": True, "max_length": 9, "return_overflowing_tokens": True, **settings}
    length = len(tokenizer(CONTEXT, add_special_tokens=False)["input_ids"])
    if "row" in message:  # the first text leaves the second one two tokens
        settings["max_length"] = length + 2 + tokenizer.num_special_tokens_to_add(pair=True)
    with pytest.raises(ValueError, match=message) as error:
        tokenizer(*arguments, **settings)
    assert "\n" not in str(error.value)
    assert "larger max_length" in str(error.value) or "-1" in str(error.value)


# ---- Copies ----


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))]
)
def test_copies_keep_the_alignment(tokenizer, duplicate):
    batch = tokenizer(["rain fell", "a"], padding=True)
    other = duplicate(batch)
    assert other == batch
    assert other.is_fast
    assert [other.word_ids(row) for row in (0, 1)] == [batch.word_ids(row) for row in (0, 1)]
