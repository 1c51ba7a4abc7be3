"""RoBERTa's tokenizer has upstream's ids; special tokens, decoding, and other backends."""

import make_tokenizer_fixture as maker
import numpy as np
import pytest
import torch
from tiny_tokenizer import CLS, FIXTURE, PAD, SEP, UNK, VOCABULARY_SIZE
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from transformers import PreTrainedTokenizerFast, RobertaTokenizerFast

# ---- The ids are upstream's ----


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
    assert len(sums) == len(FIXTURE["glue"]) == 26
    assert not wrong


def test_special_tokens_around_one_text_and_a_pair(tokenizer):
    first, second = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in "ab")
    assert tokenizer("a")["input_ids"] == [CLS, *first, SEP]
    assert tokenizer("a", "b")["input_ids"] == [CLS, *first, SEP, SEP, *second, SEP]
    assert tokenizer.num_special_tokens_to_add() == 2
    assert tokenizer.num_special_tokens_to_add(pair=True) == 4


@pytest.mark.parametrize("string", maker.STRINGS)
def test_decoding_gives_the_text_back(tokenizer, string):
    # A mask strips the spaces before it, so decoding cannot give them back.
    expected = string if "<mask>" not in string else None
    row = tokenizer.encode(string, add_special_tokens=False)
    if expected is not None:
        assert tokenizer.decode(row, clean_up_tokenization_spaces=False) == expected
    assert tokenizer.batch_decode([torch.tensor(row)]) == [tokenizer.decode(np.array(row))]


def test_decoding_without_special_tokens_and_with_clean_up(tokenizer):
    text = "It is n't here , but there ."
    row = tokenizer.encode(text)
    plain = {"clean_up_tokenization_spaces": False}
    assert tokenizer.decode(row, **plain) == f"<s>{text}</s>"
    assert tokenizer.decode(row, skip_special_tokens=True, **plain) == text
    assert tokenizer.decode(row, skip_special_tokens=True) == "It isn't here, but there."


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
    for ask in (tokenizer.convert_ids_to_tokens, tokenizer.decode):
        with pytest.raises(ValueError, match="no token has the id -100"):
            ask([*ids, -100])


def test_special_tokens(tokenizer):
    roles = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
    ids = [getattr(tokenizer, f"{role}_token_id") for role in roles]
    assert ids == [CLS, SEP, UNK, SEP, PAD, CLS, VOCABULARY_SIZE - 1]
    assert sorted(tokenizer.all_special_ids) == sorted(set(ids))
    row = tokenizer.encode("a<mask>")
    mask = tokenizer.get_special_tokens_mask(row, already_has_special_tokens=True)
    assert mask == [1] + [0] * (len(row) - 3) + [1, 1]


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


# ---- Any backend ----


def word_level(**settings) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", **settings)


def test_other_backends_work(tmp_path):
    tokenizer = word_level(pad_token="[PAD]")
    batch = tokenizer(["a b", "b c b"], padding=True)
    assert batch["input_ids"] == [[0, 1, 3], [1, 2, 1]]
    assert batch["token_type_ids"] == [[0] * 3] * 2
    tokenizer.save_pretrained(tmp_path)
    opened = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert opened(["a b", "b c b"], padding=True) == batch
    with pytest.raises(ValueError, match="needs tokenizer_object or tokenizer_file"):
        PreTrainedTokenizerFast(pad_token="[PAD]")


def test_a_mask_token_with_flags_strips_spaces():
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
