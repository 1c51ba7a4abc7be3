"""DeBERTa-v2's tokenizer: upstream's ids, special and added tokens, files, errors and pickles."""

import base64
import copy
import json
import logging
import os
import pickle
import shutil
from pathlib import Path

import make_deberta_tokenizer_fixture as maker
import pytest
import sentencepiece
import torch
from compare import rounding
from datasets import Dataset
from datasets.fingerprint import Hasher
from encoder_options import ENCODER_TERMS
from launches import fork_server

from transformers import (
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    DebertaV2Config,
    DebertaV2Model,
    DebertaV2Tokenizer,
    DebertaV2TokenizerFast,
)

FIXTURE = json.loads(maker.FIXTURE.read_text("utf-8"))
MODEL = base64.b64decode(FIXTURE["model"])
PIECES = 110
PAD, CLS, SEP, UNK, MASK = 0, 1, 2, 3, PIECES


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A folder with spm.model, config.json and tokenizer_config.json, for reading only."""
    return maker.write_model(tmp_path_factory.mktemp("tiny"), MODEL)


@pytest.fixture
def folder(tiny, tmp_path) -> Path:
    """A copy of `tiny` that a test may change."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


@pytest.fixture
def tokenizer(tiny) -> DebertaV2Tokenizer:
    return DebertaV2Tokenizer.from_pretrained(tiny)


@pytest.fixture(scope="module")
def backend() -> sentencepiece.SentencePieceProcessor:
    """The sentencepiece library's own tokenizer of the same model."""
    return sentencepiece.SentencePieceProcessor(model_proto=MODEL)


def write(path: Path, content) -> None:
    path.write_text(json.dumps(content), "utf-8")


def ids_of(tokenizer) -> list[list[int]]:
    return tokenizer(list(maker.STRINGS))["input_ids"]


# -- The ids are upstream's ------------------------------------------------------------------------


@pytest.mark.parametrize("name", maker.CALLS)
def test_strings_have_upstreams_ids(tiny, name):
    def open_tiny(**settings):
        return DebertaV2Tokenizer.from_pretrained(tiny, **settings)

    ours = maker.string_ids(open_tiny, maker.CALLS[name])
    for string, row, expected in zip(maker.STRINGS, ours, FIXTURE["strings"][name], strict=True):
        assert row == expected, repr(string[:50])


@pytest.mark.parametrize("skip", ["False", "True"])
def test_decoded_texts_equal_upstreams(tiny, skip):
    tokenizer = DebertaV2TokenizerFast.from_pretrained(tiny)
    rows = FIXTURE["strings"]["single"]
    ours = tokenizer.batch_decode(rows, skip == "True", clean_up_tokenization_spaces=False)
    assert ours == FIXTURE["texts"][skip]


@pytest.mark.slow
@pytest.mark.skipif(not (maker.DATA / "glue").is_dir(), reason="needs GLUE in ../shared/data")
def test_glue_has_upstreams_ids(tmp_path):
    model = maker.train_on_glue(maker.DATA)
    assert maker.pieces_sum(model) == FIXTURE["glue model"], "training made a different model"
    tokenizer = AutoTokenizer.from_pretrained(maker.write_model(tmp_path, model))
    sums = dict(maker.glue_sums(tokenizer, maker.DATA))
    wrong = [name for name in FIXTURE["glue"] if sums.get(name) != FIXTURE["glue"][name]]
    assert len(sums) == len(FIXTURE["glue"]) == 13
    assert not wrong


def test_the_sentencepiece_model_normalizes_texts(tmp_path, backend):
    """The tokenizer has no rule of its own; the published model composes and folds characters."""
    trained = maker.io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(maker.make_tokenizer_fixture.CORPUS),
        model_writer=trained,
        vocab_size=110,
        normalization_rule_name="nmt_nfkc",
        **maker.PIECES,
        minloglevel=2,
    )
    text = "ﬁnding \u00a0 two\u3000words"
    tokenizer = DebertaV2Tokenizer.from_pretrained(maker.write_model(tmp_path, trained.getvalue()))
    alone = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    assert tokenizer.encode(text) == [CLS, *alone.encode("finding two words"), SEP]
    assert backend.encode(text) != backend.encode("finding two words")


def test_split_by_punct_splits_punctuation_off(tiny, backend):
    tokenizer = DebertaV2Tokenizer.from_pretrained(tiny, split_by_punct=True)
    words = ["rain", ",", " wind", "$", "is", ".", "", "”", " [", "MASK"]
    expected = [index for word in words for index in backend.encode(word)]
    assert tokenizer.encode("rain, wind$is.” [MASK", add_special_tokens=False) == expected
    assert tokenizer.encode("rain[MASK]")[-2:] == [MASK, SEP]


# -- Special tokens around texts -------------------------------------------------------------------


def test_special_tokens_are_put_around_texts(tokenizer, backend):
    a, b = backend.encode("rain"), backend.encode("the harbour")
    one, two = tokenizer("rain"), tokenizer("rain", "the harbour", return_special_tokens_mask=True)
    assert one == {
        "input_ids": [CLS, *a, SEP],
        "token_type_ids": [0] * (len(a) + 2),
        "attention_mask": [1] * (len(a) + 2),
    }
    assert two["input_ids"] == [CLS, *a, SEP, *b, SEP]
    assert two["token_type_ids"] == [0] * (len(a) + 2) + [1] * (len(b) + 1)
    assert two["special_tokens_mask"] == [1, *[0] * len(a), 1, *[0] * len(b), 1]
    assert tokenizer.num_special_tokens_to_add() == 2
    assert tokenizer.num_special_tokens_to_add(pair=True) == 3
    bare = tokenizer("rain", "the harbour", add_special_tokens=False)
    assert bare["input_ids"] == [*a, *b]
    assert bare["token_type_ids"] == [0] * len(a) + [1] * len(b)
    assert tokenizer([])["input_ids"] == []


@pytest.mark.parametrize("text", ["", "   "])
def test_blank_texts_have_special_tokens_alone(tokenizer, text):
    assert tokenizer.encode(text) == [CLS, SEP]
    assert tokenizer.encode(text, text) == [CLS, SEP, SEP]


@pytest.mark.parametrize(
    ("strategy", "limit", "first", "second"),
    [
        ("longest_first", 12, 6, 3),
        (True, 9, 3, 3),
        (True, 8, 3, 2),
        ("only_first", 8, 2, 3),
        ("only_second", 13, 8, 2),
        (True, 3, 0, 0),
    ],
)
def test_truncation_of_pairs(tokenizer, strategy, limit, first, second):
    words = "1010101", "10"  # eight and three pieces, of which one is the space before them
    row = tokenizer(*words, truncation=strategy, max_length=limit)["input_ids"]
    middle = row.index(SEP)
    assert len(row) == limit
    assert (middle - 1, len(row) - middle - 2) == (first, second)


@pytest.mark.parametrize("strategy", ["only_first", "only_second"])
def test_truncating_a_text_that_is_too_short_is_an_error(tokenizer, strategy):
    short, long = "a", "the rain fell on the harbour"
    texts = (short, long) if strategy == "only_first" else (long, short)
    with pytest.raises(ValueError, match=f"truncation='{strategy}'") as error:
        tokenizer(*texts, truncation=strategy, max_length=6)
    assert "\n" not in str(error.value)


def test_truncation_side(tiny):
    left = DebertaV2Tokenizer.from_pretrained(tiny, truncation_side="left")
    whole = left.encode("the rain fell", add_special_tokens=False)
    assert left.encode("the rain fell", truncation=True, max_length=4) == [CLS, *whole[-2:], SEP]


# -- Tokens ----------------------------------------------------------------------------------------


def test_special_tokens(tokenizer):
    roles = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
    ids = [getattr(tokenizer, f"{role}_token_id") for role in roles]
    assert ids == [CLS, SEP, UNK, SEP, PAD, CLS, MASK]
    assert sorted(tokenizer.all_special_ids) == sorted(set(ids))
    assert tokenizer.vocab_size == PIECES
    assert len(tokenizer) == len(tokenizer.get_vocab()) == PIECES + 1
    assert tokenizer.get_vocab()["[MASK]"] == MASK
    assert tokenizer.convert_ids_to_tokens([CLS, MASK]) == ["[CLS]", "[MASK]"]
    assert tokenizer.convert_tokens_to_ids(["[SEP]", "no piece"]) == [SEP, UNK]
    with pytest.raises(ValueError, match=f"no token has the id {PIECES + 1}"):
        tokenizer.convert_ids_to_tokens([PIECES + 1])
    assert not tokenizer.is_fast


def test_a_mask_piece_of_the_model_is_used(tmp_path):
    model = maker.io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(maker.make_tokenizer_fixture.CORPUS),
        model_writer=model,
        vocab_size=112,
        control_symbols=["[PAD]", "[CLS]", "[SEP]", "[MASK]"],
        unk_piece="[UNK]",
        minloglevel=2,
    )
    tokenizer = DebertaV2Tokenizer.from_pretrained(maker.write_model(tmp_path, model.getvalue()))
    assert len(tokenizer) == tokenizer.vocab_size == 112
    assert tokenizer.mask_token_id < 112
    assert tokenizer.encode("[MASK]") == [
        tokenizer.cls_token_id,
        tokenizer.mask_token_id,
        tokenizer.sep_token_id,
    ]


def test_a_special_token_that_is_missing_is_added_with_a_warning(folder, caplog):
    with caplog.at_level(logging.WARNING, logger="transformers"):
        tokenizer = DebertaV2Tokenizer.from_pretrained(folder, sep_token="[END]")
    assert "may have no embedding: [END]" in caplog.text
    assert "[MASK]" not in caplog.text
    assert tokenizer.encode("")[-1] == tokenizer.sep_token_id >= PIECES


@pytest.mark.parametrize(
    "files",
    [
        {"added_tokens.json": {"[MASK]": MASK, "<a>": MASK + 1, "<ab>": MASK + 5}},
        {
            "tokenizer_config.json": {
                "added_tokens_decoder": {
                    "0": {"content": "[PAD]", "special": True},
                    str(MASK): {"content": "[MASK]", "special": True},
                    str(MASK + 1): {"content": "<a>", "special": False},
                    str(MASK + 5): {"content": "<ab>", "special": False},
                }
            }
        },
    ],
    ids=lambda files: next(iter(files)),
)
def test_added_tokens(folder, files):
    for name, content in files.items():
        write(folder / name, content)
    tokenizer = DebertaV2Tokenizer.from_pretrained(folder)
    assert tokenizer.encode("<ab><a>[MASK]") == [CLS, MASK + 5, MASK + 1, MASK, SEP]
    assert tokenizer.decode([MASK + 5]) == "<ab>"
    assert MASK + 1 not in tokenizer.all_special_ids
    assert tokenizer.vocab_size == PIECES


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ({"<a>": 5}, "'<a>' has the id 5 in the files, but the vocabulary has '.+' there"),
        ({"[SEP]": MASK}, rf"'\[SEP\]' has the id {MASK} in the files, .* has the id {SEP}"),
    ],
)
def test_added_tokens_whose_ids_are_taken_are_errors(folder, added, message):
    write(folder / "added_tokens.json", added)
    with pytest.raises(ValueError, match=message) as error:
        DebertaV2Tokenizer.from_pretrained(folder)
    assert "\n" not in str(error.value)


# -- Files and pickles -----------------------------------------------------------------------------


def test_saved_and_opened_again(tiny, tmp_path):
    settings = {
        "model_max_length": 77,
        "do_lower_case": True,
        "split_by_punct": True,
        "truncation_side": "left",
        "additional_special_tokens": ["<extra>"],
    }
    tokenizer = DebertaV2Tokenizer.from_pretrained(tiny, **settings)
    written = tokenizer.save_pretrained(tmp_path / "new" / "model")
    names = ["added_tokens.json", "special_tokens_map.json", "spm.model", "tokenizer_config.json"]
    assert sorted(Path(path).name for path in written) == names
    assert (tmp_path / "new" / "model" / "spm.model").read_bytes() == MODEL
    opened = DebertaV2Tokenizer.from_pretrained(tmp_path / "new" / "model")
    assert {name: getattr(opened, name) for name in settings} == settings
    assert opened.encode("<extra>") == [CLS, PIECES + 1, SEP]
    assert ids_of(opened) == ids_of(tokenizer) != FIXTURE["strings"]["single"]
    assert Hasher.hash(opened) == Hasher.hash(tokenizer)
    content = json.loads((tmp_path / "new" / "model" / "tokenizer_config.json").read_text())
    assert content["tokenizer_class"] == "DebertaV2Tokenizer"


def test_auto_tokenizer(tiny):
    for use_fast, kind in ((True, DebertaV2TokenizerFast), (False, DebertaV2Tokenizer)):
        tokenizer = AutoTokenizer.from_pretrained(tiny, use_fast=use_fast, model_max_length=9)
        assert type(tokenizer) is kind
        assert tokenizer.is_fast is use_fast
        assert tokenizer.model_max_length == 9


def test_damaged_and_missing_models_are_errors(folder):
    (folder / "spm.model").write_bytes(MODEL[: len(MODEL) // 2])
    with pytest.raises(OSError, match=r"spm\.model: not a SentencePiece model") as error:
        DebertaV2Tokenizer.from_pretrained(folder)
    assert "\n" not in str(error.value)
    (folder / "spm.model").unlink()
    with pytest.raises(OSError, match=r"has no vocabulary: looked for spm\.model"):
        DebertaV2Tokenizer.from_pretrained(folder)


def test_unknown_settings_warn(tiny, warnings):
    DebertaV2Tokenizer.from_pretrained(tiny, add_prefix_space=True)
    assert "DebertaV2Tokenizer has no setting add_prefix_space" in warnings.text


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))]
)
def test_copies(tokenizer, duplicate):
    other = duplicate(tokenizer)
    assert ids_of(other) == ids_of(tokenizer) == FIXTURE["strings"]["single"]
    assert Hasher.hash(other) == Hasher.hash(tokenizer)
    assert pickle.dumps(other) == pickle.dumps(tokenizer)


def test_calls_do_not_change_the_tokenizer(tokenizer):
    before, pickled = Hasher.hash(tokenizer), pickle.dumps(tokenizer)
    tokenizer(["rain", "wind"], padding="max_length", truncation=True, max_length=4)
    tokenizer.decode([CLS])
    _ = tokenizer.all_special_ids, repr(tokenizer)
    assert Hasher.hash(tokenizer) == before
    assert pickle.dumps(tokenizer) == pickled


@pytest.mark.slow
def test_hash_is_the_same_in_another_process(tokenizer, tiny):
    code = (
        "import sys; from datasets.fingerprint import Hasher\n"
        "from transformers import DebertaV2Tokenizer as D\n"
        "print(Hasher.hash(D.from_pretrained(sys.argv[1])))"
    )
    result = fork_server("others").run(["-c", code, tiny], os.environ, timeout=300)
    assert result.stdout.strip() == Hasher.hash(tokenizer), result.stderr


def test_hash_tells_tokenizers_apart(tiny):
    settings = ({}, {"do_lower_case": True}, {"model_max_length": 9})
    hashes = {Hasher.hash(DebertaV2Tokenizer.from_pretrained(tiny, **each)) for each in settings}
    assert len(hashes) == 3


# -- Collators, datasets and scripts ---------------------------------------------------------------


def test_collators(tokenizer):
    rows = [tokenizer("the rain fell"), tokenizer("rain", "the harbour")]
    batch = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)(
        [{**row, "label": i} for i, row in enumerate(rows)]
    )
    assert batch["input_ids"].shape[1] % 8 == 0
    assert torch.equal(batch["attention_mask"] == 0, batch["input_ids"] == PAD)
    assert batch["token_type_ids"][1].sum() == rows[1]["token_type_ids"].count(1)
    assert batch["labels"].tolist() == [0, 1]
    generator = torch.Generator().manual_seed(0)
    masked = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.9, generator=generator)
    batch = masked(rows)
    assert (batch["input_ids"] == MASK).any()
    assert int(batch["input_ids"].max()) < len(tokenizer)
    special = torch.isin(batch["input_ids"], torch.tensor([CLS, SEP, PAD]))
    assert (batch["labels"][special & (batch["labels"] != -100)].numel()) == 0


def test_datasets_map_is_cached_across_calls(tokenizer):
    rows = Dataset.from_dict({"sentence": ["the rain", "d"]})

    def encode(examples):
        return tokenizer(examples["sentence"], truncation=True, max_length=4)

    first = rows.map(encode, batched=True)
    assert first["input_ids"] == encode(rows[:])["input_ids"]
    assert first._fingerprint == rows.map(encode, batched=True)._fingerprint


def test_run_glue(folder, tiny_glue, run_glue, tmp_path, monkeypatch):
    """Trains from a folder with spm.model, and evaluates the adapter that training wrote."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    shape = {"vocab_size": 120, "hidden_size": 16, "num_hidden_layers": 2, "conv_kernel_size": 3}
    shape |= {"num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 130}
    relative = {"relative_attention": True, "pos_att_type": "p2c|c2p", "position_buckets": 16}
    config = DebertaV2Config(**shape, **relative, gradient_checkpointing=True)
    DebertaV2Model(config).save_pretrained(folder)
    common = ["--model_name_or_path", str(folder), "--task_name", "rte", "--data_dir"]
    common += [str(tiny_glue), "--do_eval", "--apply_lora", "--lora_r", "2", "--lora_alpha", "4"]
    common += ["--report_to", "none", "--disable_tqdm"]
    run_glue.main([*common, "--do_train", "--max_steps", "3", "--output_dir", "first"])
    assert Path("first", "spm.model").read_bytes() == MODEL
    adapter = ["--lora_path", "first/pytorch_model_lora.safetensors", "--output_dir", "second"]
    run_glue.main([*common, *adapter])
    results = [
        json.loads(Path(out, "eval_results.json").read_text()) for out in ("first", "second")
    ]
    losses = [result["eval_loss"] for result in results]
    assert losses[0] == pytest.approx(losses[1], abs=rounding(losses[1], ENCODER_TERMS), rel=0)
