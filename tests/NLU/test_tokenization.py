"""The tokenizers: upstream's ids, padding and truncation, files, errors, stable pickles."""

import copy
import json
import logging
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import make_tokenizer_fixture as maker
import numpy as np
import pytest
import torch
from datasets import Dataset
from datasets.fingerprint import Hasher
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from transformers import (
    BatchEncoding,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    RobertaTokenizerFast,
    tokenization_utils_base,
)

CLS, PAD, SEP, UNK = 0, 1, 2, 3


FIXTURE = json.loads(maker.FIXTURE.read_text("utf-8"))
VOCABULARY_SIZE = len(FIXTURE["vocabulary"])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A folder with vocab.json, merges.txt and special_tokens_map.json; not to be written to."""
    folder = tmp_path_factory.mktemp("tiny")
    return maker.write_vocabulary(folder, FIXTURE["vocabulary"], FIXTURE["merges"])


@pytest.fixture
def folder(tiny, tmp_path) -> Path:
    """A copy of `tiny` to change."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


@pytest.fixture
def tokenizer(tiny) -> RobertaTokenizerFast:
    return RobertaTokenizerFast.from_pretrained(tiny)


@pytest.fixture
def warnings(caplog):
    """The package's warnings, each of which is given once a process, heard anew."""
    tokenization_utils_base._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="transformers"):
        yield caplog
    tokenization_utils_base._warn_once.cache_clear()


def write(path: Path, content) -> None:
    path.write_text(json.dumps(content), "utf-8")


# -- The ids are upstream's ------------------------------------------------------------------------


@pytest.mark.parametrize("name", maker.CALLS)
def test_strings_have_upstreams_ids(tiny, name):
    def open_tiny(**settings):
        return RobertaTokenizerFast.from_pretrained(tiny, **settings)

    ours = maker.string_ids(open_tiny, maker.CALLS[name])
    for string, row, expected in zip(maker.STRINGS, ours, FIXTURE["strings"][name], strict=True):
        assert row == expected, repr(string[:50])


@pytest.mark.slow
@pytest.mark.skipif(
    not (maker.DATA / "glue").is_dir() or not (maker.DATA / "gpt2-vocab").is_dir(),
    reason="needs GLUE and GPT-2's vocabulary in ../shared/data",
)
def test_glue_has_upstreams_ids(tmp_path):
    vocabulary = maker.roberta_vocabulary(maker.DATA)
    tokenizer = RobertaTokenizerFast.from_pretrained(maker.write_vocabulary(tmp_path, *vocabulary))
    sums = dict(maker.glue_sums(tokenizer, maker.DATA))
    wrong = [name for name in FIXTURE["glue"] if sums.get(name) != FIXTURE["glue"][name]]
    assert len(sums) == len(FIXTURE["glue"]) == 28
    assert not wrong


def test_frame_of_a_pair(tokenizer):
    first, second = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in "ab")
    assert tokenizer("a")["input_ids"] == [CLS, *first, SEP]
    assert tokenizer("a", "b")["input_ids"] == [CLS, *first, SEP, SEP, *second, SEP]
    assert tokenizer.num_special_tokens_to_add() == 2
    assert tokenizer.num_special_tokens_to_add(pair=True) == 4


@pytest.mark.parametrize("string", maker.STRINGS)
def test_decoding_gives_the_text_back(tokenizer, string):
    # A mask takes the spaces before it along, so they are lost.
    expected = string if "<mask>" not in string else None
    row = tokenizer.encode(string, add_special_tokens=False)
    if expected is not None:
        assert tokenizer.decode(row) == expected
    assert tokenizer.batch_decode([torch.tensor(row)]) == [tokenizer.decode(np.array(row))]


def test_decoding_without_special_tokens_and_with_clean_up(tokenizer):
    text = "It is n't here , but there ."
    row = tokenizer.encode(text)
    assert tokenizer.decode(row) == f"<s>{text}</s>"
    assert tokenizer.decode(row, skip_special_tokens=True) == text
    cleaned = tokenizer.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=True)
    assert cleaned == "It isn't here, but there."


def test_tokens_and_ids(tokenizer):
    tokens = tokenizer.tokenize("the rain")
    assert "".join(tokens) == "theĠrain"
    assert len(tokens) < len("the rain")
    ids = tokenizer.convert_tokens_to_ids(tokens)
    assert tokenizer.convert_ids_to_tokens(ids) == tokens
    assert tokenizer.convert_ids_to_tokens([CLS, *ids, SEP], skip_special_tokens=True) == tokens
    assert tokenizer.convert_ids_to_tokens(SEP) == "</s>"
    assert tokenizer.convert_tokens_to_ids("not one token") == tokenizer.unk_token_id == UNK
    with pytest.raises(ValueError, match=f"no token has the id {VOCABULARY_SIZE}"):
        tokenizer.convert_ids_to_tokens([VOCABULARY_SIZE])


def test_special_tokens(tokenizer):
    roles = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
    ids = [getattr(tokenizer, f"{role}_token_id") for role in roles]
    assert ids == [CLS, SEP, UNK, SEP, PAD, CLS, VOCABULARY_SIZE - 1]
    assert sorted(tokenizer.all_special_ids) == sorted(set(ids))
    row = tokenizer.encode("a<mask>")
    assert tokenizer.get_special_tokens_mask(row) == [1] + [0] * (len(row) - 3) + [1, 1]
    with pytest.raises(ValueError, match="return_special_tokens_mask"):
        tokenizer.get_special_tokens_mask(row, already_has_special_tokens=False)


def test_special_tokens_can_be_set(tokenizer):
    tokenizer.pad_token = tokenizer.eos_token
    assert tokenizer(["a", "a b c"], padding=True)["input_ids"][0][-1] == SEP
    tokenizer.pad_token = "[PAD]"
    with pytest.raises(ValueError, match=r"pad_token '\[PAD\]' is not in the vocabulary"):
        _ = tokenizer.pad_token_id
    tokenizer.pad_token = None
    assert tokenizer.pad_token_id is None


def test_sizes(tokenizer):
    assert len(tokenizer) == tokenizer.vocab_size == len(tokenizer.get_vocab()) == VOCABULARY_SIZE
    assert tokenizer.is_fast
    assert isinstance(tokenizer.backend_tokenizer, Tokenizer)
    assert f"vocab_size={VOCABULARY_SIZE}" in repr(tokenizer)


# -- Calls: what they return -----------------------------------------------------------------------


def test_one_text_and_a_batch(tokenizer):
    one, batch = tokenizer("a b"), tokenizer(["a b", "c"])
    assert list(one) == ["input_ids", "attention_mask"]
    assert batch["input_ids"][0] == one["input_ids"]
    assert batch["attention_mask"] == [[1] * len(row) for row in batch["input_ids"]]
    assert tokenizer([])["input_ids"] == []


def test_rows_that_are_asked_for(tokenizer):
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
def test_every_mix_of_padding_truncation_and_lengths(
    tiny, padding, truncation, max_length, multiple
):
    """Rows of 9 and 3 tokens, by upstream's rules: what cannot be had is an error."""
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
def test_multiples_that_are_none(tokenizer, multiple):
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


def test_truncation_side(tiny):
    text = "qzxj"
    left = RobertaTokenizerFast.from_pretrained(tiny, truncation_side="left")
    whole = left.encode(text)
    row = left.encode(text, truncation=True, max_length=4)
    assert row == [CLS, *whole[3:5], SEP]
    assert left.encode(text, truncation="do_not_truncate", max_length=4) == row


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
    with pytest.raises(ValueError, match="encodings"):
        BatchEncoding({"input_ids": [[0]]}).word_ids()


def test_batch_encoding_is_a_dict(tokenizer):
    batch = tokenizer(["a", "b"])
    assert dict(**batch) == {name: batch[name] for name in batch}
    for sidecar in (copy.copy(batch), copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        assert sidecar.input_ids == batch.input_ids
    with pytest.raises(AttributeError, match="token_type_ids"):
        _ = batch.token_type_ids
    one_row = BatchEncoding({"input_ids": [1, 2]}, tensor_type="pt", prepend_batch_axis=True)
    assert one_row.input_ids.tolist() == [[1, 2]]
    batch["labels"] = [1, 0]
    assert batch.convert_to_tensors("pt").labels.tolist() == [1, 0]


# -- pad -------------------------------------------------------------------------------------------


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


def test_pad_gives_what_a_padded_call_gives(tokenizer):
    texts = list(maker.STRINGS)
    rows = [tokenizer(text, return_special_tokens_mask=True) for text in texts]
    settings = {"padding": True, "pad_to_multiple_of": 8}
    called = tokenizer(texts, return_special_tokens_mask=True, **settings)
    assert tokenizer.pad(rows, **settings) == dict(called)


def test_pad_leaves_rows_alone_when_told(tokenizer):
    rows = {"input_ids": [[5], [6, 7]]}
    assert tokenizer.pad(rows, padding=False, return_attention_mask=False) == rows


# -- Bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ((["a", None],), {}, "text 1 is NoneType"),
        ((3,), {}, "text is a text or a list of texts, not int"),
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
def test_bad_calls(tokenizer, arguments, settings, message):
    with pytest.raises(ValueError, match=message) as error:
        tokenizer(*arguments, **settings)
    assert "\n" not in str(error.value)
    assert tokenizer.backend_tokenizer.truncation is None


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
        ([{"input_ids": [5], "text": "a"}], "text: makes no tensor"),
    ],
)
def test_bad_rows_to_pad(tokenizer, rows, message):
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
        (4, {}, "exceed the 4 tokens"),
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


# -- Files -----------------------------------------------------------------------------------------


def ids_of(tokenizer) -> list[list[int]]:
    return tokenizer(list(maker.STRINGS))["input_ids"]


@pytest.mark.parametrize(
    "kept",
    [
        None,
        ("tokenizer.json",),
        ("vocab.json", "merges.txt"),
        ("vocab.json", "merges.txt", "special_tokens_map.json", "tokenizer_config.json"),
    ],
)
def test_saved_and_opened_again(tokenizer, tmp_path, kept):
    tokenizer.model_max_length = 77
    written = tokenizer.save_pretrained(tmp_path / "new" / "model")
    names = ["merges.txt", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(Path(path).name for path in written) == [*names, "vocab.json"]
    assert sorted(path.name for path in Path(written[0]).parent.iterdir()) == [*names, "vocab.json"]
    for path in map(Path, written):
        if kept and path.name not in kept:
            path.unlink()
    opened = RobertaTokenizerFast.from_pretrained(tmp_path / "new" / "model")
    assert ids_of(opened) == ids_of(tokenizer) == FIXTURE["strings"]["single"]
    if kept is None or "tokenizer_config.json" in kept:
        assert opened.model_max_length == 77
        assert Hasher.hash(opened) == Hasher.hash(tokenizer)


def test_settings_survive_saving(tiny, tmp_path):
    settings = {
        "padding_side": "left",
        "truncation_side": "left",
        "add_prefix_space": True,
        "trim_offsets": False,
        "additional_special_tokens": ["<extra>"],
        "unk_token": "<pad>",
    }
    tokenizer = RobertaTokenizerFast.from_pretrained(tiny, **settings)
    tokenizer.save_pretrained(tmp_path)
    opened = RobertaTokenizerFast.from_pretrained(tmp_path)
    assert {name: getattr(opened, name) for name in settings} == settings
    assert opened.encode("<extra>", add_special_tokens=False) == [VOCABULARY_SIZE]
    assert VOCABULARY_SIZE in opened.all_special_ids
    assert Hasher.hash(opened) == Hasher.hash(tokenizer)


def test_saving_replaces_files_whole(tokenizer, folder, monkeypatch):
    tokenizer.save_pretrained(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(OSError, match="disk full"):
        tokenizer.save_pretrained(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_configuration_forms(folder):
    mask = {**maker.MASK, "lstrip": False, "__type": "AddedToken"}
    settings = {"mask_token": mask, "model_max_length": 512, "name_or_path": "x", "use_fast": False}
    write(folder / "tokenizer_config.json", {**settings, "sep_token": "!"})
    write(folder / "special_tokens_map.json", {"sep_token": "?"})
    tokenizer = RobertaTokenizerFast.from_pretrained(folder)
    assert tokenizer.model_max_length == 512
    assert tokenizer.tokenize("a <mask>") == ["a", "Ġ", "<mask>"]
    assert tokenizer.sep_token == "?"
    assert tokenizer.encode("a")[-1] == tokenizer.convert_tokens_to_ids("?")
    opened = RobertaTokenizerFast.from_pretrained(folder, sep_token=".", model_max_length=9)
    assert opened.encode("a")[-1] == opened.convert_tokens_to_ids(".")
    assert opened.model_max_length == 9


@pytest.mark.parametrize("limit", [None, 10**30, 1e30])
def test_no_limit(folder, limit):
    write(folder / "tokenizer_config.json", {"model_max_length": limit})
    tokenizer = RobertaTokenizerFast.from_pretrained(folder)
    assert tokenizer.model_max_length > 10**20
    assert len(tokenizer.encode("a b c", truncation=True)) == 5


def test_mask_given_as_a_string_takes_the_space_before_it(folder):
    write(folder / "special_tokens_map.json", {"mask_token": "<mask>"})
    tokenizer = RobertaTokenizerFast.from_pretrained(folder)
    assert tokenizer.tokenize("a  <mask> b") == ["a", "<mask>", "Ġb"]


@pytest.mark.parametrize(
    "files",
    [
        {"added_tokens.json": {"<b>": VOCABULARY_SIZE + 1, "<a>": VOCABULARY_SIZE}},
        {
            "tokenizer_config.json": {
                "added_tokens_decoder": {
                    str(VOCABULARY_SIZE): {"content": "<a>", "special": False},
                    str(VOCABULARY_SIZE + 1): {"content": "<b>", "special": False},
                }
            }
        },
    ],
    ids=lambda files: next(iter(files)),
)
def test_added_tokens(folder, files):
    for name, content in files.items():
        write(folder / name, content)
    tokenizer = RobertaTokenizerFast.from_pretrained(folder)
    assert tokenizer.encode("<a><b>") == [CLS, VOCABULARY_SIZE, VOCABULARY_SIZE + 1, SEP]
    assert len(tokenizer) == VOCABULARY_SIZE + 2
    assert tokenizer.vocab_size == VOCABULARY_SIZE
    assert VOCABULARY_SIZE not in tokenizer.all_special_ids


def test_added_token_with_another_id(folder):
    write(folder / "added_tokens.json", {"<a>": VOCABULARY_SIZE + 9})
    message = f"'<a>' has the id {VOCABULARY_SIZE + 9} in the files, but {VOCABULARY_SIZE} in"
    with pytest.raises(ValueError, match=message):
        RobertaTokenizerFast.from_pretrained(folder)


def test_vocabulary_without_special_tokens(tiny, tmp_path, warnings):
    tokens = [token for token in FIXTURE["vocabulary"] if token not in ("<s>", "<mask>")]
    maker.write_vocabulary(tmp_path, tokens, FIXTURE["merges"])
    tokenizer = RobertaTokenizerFast.from_pretrained(tmp_path)
    assert sorted([tokenizer.cls_token_id, tokenizer.mask_token_id]) == [
        len(tokens),
        len(tokens) + 1,
    ]
    assert "<s>, <mask>" in warnings.text


def test_tokenizer_json_wins(tokenizer, folder):
    tokenizer.save_pretrained(folder)
    write(folder / "vocab.json", {"<s>": 0})
    assert ids_of(RobertaTokenizerFast.from_pretrained(folder)) == FIXTURE["strings"]["single"]


def test_older_tokenizer_json_with_baked_in_padding(tokenizer, folder):
    tokenizer.save_pretrained(folder)
    backend = tokenizer.backend_tokenizer
    backend.enable_truncation(5)
    backend.enable_padding(length=7, pad_id=PAD, pad_token="<pad>")
    content = json.loads(backend.to_str())
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    del content["model"]["byte_fallback"], content["model"]["ignore_merges"]
    write(folder / "tokenizer.json", content)
    assert ids_of(RobertaTokenizerFast.from_pretrained(folder)) == FIXTURE["strings"]["single"]


def test_add_prefix_space_reaches_a_tokenizer_json(tokenizer, folder):
    tokenizer.save_pretrained(folder)
    opened = RobertaTokenizerFast.from_pretrained(folder, add_prefix_space=True)
    assert ids_of(opened) == FIXTURE["strings"]["prefix space"]


@pytest.mark.parametrize("missing", ["vocab.json", "merges.txt"])
def test_folder_without_a_vocabulary(folder, missing):
    (folder / missing).unlink()
    message = "model' has no vocabulary: looked for tokenizer.json, or vocab.json with merges.txt"
    with pytest.raises(OSError, match=message):
        RobertaTokenizerFast.from_pretrained(folder)


def test_name_that_leads_nowhere(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OSError, match="no-such-model") as error:
        RobertaTokenizerFast.from_pretrained("no-such-model")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "vocab.json",
        "merges.txt",
        "tokenizer_config.json",
        "special_tokens_map.json",
    ],
)
def test_damaged_files_are_named(tokenizer, folder, name):
    tokenizer.save_pretrained(folder)
    if name in ("vocab.json", "merges.txt"):
        (folder / "tokenizer.json").unlink()
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2].removesuffix(b"\n").rstrip(b" "))
    if name == "merges.txt":
        (folder / name).write_text("#version: 0.2\nno-pair-here\n")
    with pytest.raises(OSError, match=name) as error:
        RobertaTokenizerFast.from_pretrained(folder)
    assert "\n" not in str(error.value)


def test_configuration_that_is_no_dict(folder):
    write(folder / "tokenizer_config.json", [1])
    with pytest.raises(OSError, match=r"tokenizer_config.json: holds a list"):
        RobertaTokenizerFast.from_pretrained(folder)


def test_another_models_tokenizer_json(tmp_path):
    backend = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="WordPiece model, but RoBERTa's is BPE"):
        RobertaTokenizerFast.from_pretrained(tmp_path)


def test_bad_settings(tiny):
    with pytest.raises(TypeError, match="RobertaTokenizerFast has no setting do_lower_case"):
        RobertaTokenizerFast.from_pretrained(tiny, do_lower_case=True)
    with pytest.raises(ValueError, match="padding_side is 'right' or 'left', not 'top'"):
        RobertaTokenizerFast.from_pretrained(tiny, padding_side="top")
    with pytest.raises(ValueError, match="RoBERTa needs tokenizer"):
        RobertaTokenizerFast()


def test_use_fast_changes_nothing(tiny):
    tokenizer = RobertaTokenizerFast.from_pretrained(tiny, use_fast=False)
    assert ids_of(tokenizer) == FIXTURE["strings"]["single"]


@pytest.mark.slow
def test_from_the_hub(tokenizer, hub_server, tmp_path, monkeypatch):
    tokenizer.save_pretrained(hub_server.root / "someone" / "tiny")
    code = (
        "import sys; from transformers import RobertaTokenizerFast as R\n"
        "tokenizer = R.from_pretrained('someone/tiny', cache_dir=sys.argv[1])\n"
        "print(tokenizer.encode('The rain <mask>'))"
    )
    environment = {"HF_ENDPOINT": hub_server.url, "HOME": str(tmp_path), "PATH": ""}
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "cache")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert json.loads(result.stdout or "null") == tokenizer.encode("The rain <mask>"), result.stderr
    asked = " ".join(map(str, hub_server.requests))
    assert "tokenizer.json" in asked
    assert "vocab.json" not in asked


# -- Any backend -----------------------------------------------------------------------------------


def word_level(**settings) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", **settings)


def test_any_backend(tmp_path):
    tokenizer = word_level(pad_token="[PAD]")
    batch = tokenizer(["a b", "b c b"], padding=True)
    assert batch["input_ids"] == [[0, 1, 3], [1, 2, 1]]
    assert batch["token_type_ids"] == [[0] * 3] * 2
    tokenizer.save_pretrained(tmp_path)
    opened = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert opened(["a b", "b c b"], padding=True) == batch
    with pytest.raises(ValueError, match="needs tokenizer_object or tokenizer_file"):
        PreTrainedTokenizerFast(pad_token="[PAD]")


def test_special_token_with_flags():
    plain, stripping = (
        word_level(mask_token="<m>"),
        word_level(mask_token=AddedToken("<m>", lstrip=True, rstrip=True)),
    )
    for tokenizer in (plain, stripping):
        assert tokenizer.tokenize("a <m> b") == ["a", "<m>", "b"]
        assert tokenizer.mask_token == "<m>"
        assert tokenizer.mask_token_id in tokenizer.all_special_ids
    assert len(stripping("a <m> b").encodings[0].offsets) == 3
    assert stripping("a <m> b").encodings[0].offsets[1] == (1, 6)


# -- Pickles ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sidecar", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_copies(tokenizer, sidecar):
    other = sidecar(tokenizer)
    assert isinstance(other, PreTrainedTokenizerBase)
    assert ids_of(other) == ids_of(tokenizer)
    assert Hasher.hash(other) == Hasher.hash(tokenizer)
    assert pickle.dumps(other) == pickle.dumps(tokenizer)


@pytest.mark.parametrize(
    "settings",
    [
        {"padding": True},
        {"truncation": True, "max_length": 4},
        {"padding": "max_length", "truncation": True, "max_length": 4, "return_tensors": "pt"},
    ],
)
def test_calls_leave_no_trace(tokenizer, settings):
    before, pickled = Hasher.hash(tokenizer), pickle.dumps(tokenizer)
    tokenizer(["a b c", "d"], **settings)
    tokenizer.decode([CLS])
    _ = tokenizer.all_special_ids, repr(tokenizer)
    assert Hasher.hash(tokenizer) == before
    assert pickle.dumps(tokenizer) == pickled
    assert ids_of(tokenizer) == FIXTURE["strings"]["single"]


def test_hash_tells_tokenizers_apart(tiny):
    hashes = {
        Hasher.hash(RobertaTokenizerFast.from_pretrained(tiny, **settings))
        for settings in ({}, {"add_prefix_space": True}, {"model_max_length": 9})
    }
    assert len(hashes) == 3


@pytest.mark.slow
def test_hash_is_the_same_in_another_process(tokenizer, tiny):
    code = (
        "import sys; from datasets.fingerprint import Hasher\n"
        "from transformers import RobertaTokenizerFast as R\n"
        "print(Hasher.hash(R.from_pretrained(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(tiny)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == Hasher.hash(tokenizer)


def test_datasets_map_is_cached_across_calls(tokenizer):
    rows = Dataset.from_dict({"sentence": ["a b c", "d"]})

    def encode(examples):
        return tokenizer(examples["sentence"], truncation=True, max_length=4)

    first = rows.map(encode, batched=True)
    again = rows.map(encode, batched=True)
    assert first["input_ids"] == tokenizer(["a b c", "d"], truncation=True, max_length=4).input_ids
    assert first._fingerprint == again._fingerprint
