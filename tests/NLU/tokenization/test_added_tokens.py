"""Added tokens and the roles of special tokens: set, saved, pickled and opened again."""

import json
import pickle
from pathlib import Path

import make_token_alignment_fixture as maker
import pytest

from transformers import (
    TOKENIZER_MAPPING,
    AddedToken,
    DebertaV2Config,
    DebertaV2Tokenizer,
    DebertaV2TokenizerFast,
    RobertaConfig,
    RobertaTokenizer,
    RobertaTokenizerFast,
    SpecialTokensMixin,
)

CLASSES = {
    RobertaTokenizer: "roberta",
    RobertaTokenizerFast: "roberta",
    DebertaV2Tokenizer: "deberta-v2",
    DebertaV2TokenizerFast: "deberta-v2",
}
ROBERTA = [RobertaTokenizer, RobertaTokenizerFast]
DEBERTA = [DebertaV2Tokenizer, DebertaV2TokenizerFast]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return maker.write_tokenizers(tmp_path_factory.mktemp("added"))


@pytest.fixture
def open_one(folders):
    """Opens a tokenizer of the given class, with settings."""
    return lambda owner, **settings: owner.from_pretrained(folders[CLASSES[owner]], **settings)


@pytest.fixture(params=CLASSES)
def tokenizer(request, open_one):
    return open_one(request.param)


# ---- Adding ----


def test_added_tokens_are_not_split(tokenizer):
    size, vocabulary = len(tokenizer), tokenizer.vocab_size
    assert tokenizer.add_tokens(["zxqy", "two words"]) == 2
    assert tokenizer.add_tokens("zxqy") == tokenizer.add_tokens([]) == tokenizer.add_tokens("") == 0
    assert (len(tokenizer), tokenizer.vocab_size) == (size + 2, vocabulary)
    ids = tokenizer.encode("rainzxqy and two words.", add_special_tokens=False)
    assert [index for index in ids if index >= size] == [size, size + 1]
    assert tokenizer.convert_ids_to_tokens([size, size + 1]) == ["zxqy", "two words"]
    assert tokenizer.get_added_vocab().items() >= {"zxqy": size, "two words": size + 1}.items()
    assert tokenizer.get_vocab()["zxqy"] == tokenizer.convert_tokens_to_ids("zxqy") == size
    assert size not in tokenizer.all_special_ids


def test_special_tokens_are_added_by_role(tokenizer):
    size = len(tokenizer)
    given = {"pad_token": "<fill>", "additional_special_tokens": ["<x>", AddedToken("<y>")]}
    assert tokenizer.add_special_tokens(given) == 3
    assert tokenizer.add_special_tokens({}) == tokenizer.sanitize_special_tokens() == 0
    assert tokenizer.pad_token_id == size
    assert tokenizer.additional_special_tokens == ["<x>", "<y>"]
    assert tokenizer.additional_special_tokens_ids == [size + 1, size + 2]
    assert {size, size + 1, size + 2} <= set(tokenizer.all_special_ids)
    assert tokenizer(["a", "a b c"], padding=True)["input_ids"][0][-1] == size
    row = tokenizer.encode("rain<y>", add_special_tokens=False)
    assert row[-1] == size + 2
    assert tokenizer.decode(row, skip_special_tokens=True) == "rain"


@pytest.mark.parametrize("role", ["cls_token", "sep_token"])
def test_a_new_cls_or_sep_token_is_put_around_texts(tokenizer, role):
    tokenizer.add_special_tokens({role: "<frame>"})
    row = tokenizer("rain", "wind")["input_ids"]
    assert row[0 if role == "cls_token" else -1] == len(tokenizer) - 1
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in ("rain", "wind")]
    assert tokenizer.build_inputs_with_special_tokens(*ids) == row


def test_roles_can_be_set_by_ids(tokenizer):
    index = tokenizer.convert_tokens_to_ids(tokenizer.tokenize("rain"))[0]
    tokenizer.bos_token_id = index
    assert tokenizer.bos_token == tokenizer.convert_ids_to_tokens(index)
    tokenizer.bos_token_id = None
    assert tokenizer.bos_token is tokenizer.bos_token_id is None
    tokenizer.additional_special_tokens_ids = [index]
    assert tokenizer.additional_special_tokens_ids == [index]


def test_special_token_maps_agree_with_each_other(tokenizer):
    tokens, given = tokenizer.special_tokens_map, tokenizer.special_tokens_map_extended
    assert tokens.keys() == given.keys() <= set(SpecialTokensMixin.SPECIAL_TOKENS_ATTRIBUTES)
    assert {role: str(getattr(token, "content", token)) for role, token in given.items()} == tokens
    texts = [getattr(each, "content", each) for each in tokenizer.all_special_tokens_extended]
    assert texts == tokenizer.all_special_tokens
    assert len(set(texts)) == len(texts)
    tokenizer.eos_token = AddedToken("</e>", rstrip=True)
    assert tokenizer.eos_token == "</e>"
    assert tokenizer.special_tokens_map_extended["eos_token"].rstrip


@pytest.mark.parametrize("owner", DEBERTA)
def test_lowercasing_spares_special_tokens(open_one, owner):
    tokenizer = open_one(owner, do_lower_case=True)
    assert tokenizer.add_tokens(["Zx Qy", "ZX QY"]) == 1
    tokenizer.add_special_tokens({"additional_special_tokens": ["<X>"]})
    assert tokenizer.tokenize("A zX qY<X>[MASK]<x>")[1:4] == ["zx qy", "<X>", "[MASK]"]


@pytest.mark.parametrize("owner", ROBERTA)
def test_added_tokens_strip_spaces_as_their_flags_say(open_one, owner):
    tokenizer = open_one(owner)
    tokenizer.add_tokens([AddedToken("<l>", lstrip=True), AddedToken("<r>", rstrip=True), "<n>"])
    assert tokenizer.tokenize("a <l> b") == ["a", "<l>", "Ġb"]
    assert tokenizer.tokenize("a <r> b") == ["a", "Ġ", "<r>", "b"]
    assert tokenizer.tokenize("a <n> b") == ["a", "Ġ", "<n>", "Ġb"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.add_tokens([3]), "new_tokens: a token is a string or an AddedToken, not int"),
        (lambda t: t.add_tokens(3), "new_tokens is a list of tokens, not int"),
        (lambda t: t.add_special_tokens({"pad_token": 3}), "pad_token: a token is a string"),
        (
            lambda t: t.add_special_tokens({"additional_special_tokens": "<x>"}),
            "additional_special_tokens is a list of tokens, not str",
        ),
        (lambda t: setattr(t, "mask_token", 5), "mask_token: a token is a string"),
    ],
)
def test_values_that_are_not_tokens_are_refused(tokenizer, call, message):
    size = len(tokenizer)
    with pytest.raises(TypeError, match=message):
        call(tokenizer)
    with pytest.raises(ValueError, match="'pat_token' is not a special token's role: bos_token"):
        tokenizer.add_special_tokens({"pat_token": "<pad>"})
    assert len(tokenizer) == size


def test_a_role_whose_token_is_not_in_the_vocabulary_is_an_error(tokenizer):
    tokenizer.pad_token = "<fill>"
    with pytest.raises(
        ValueError, match=r"not in the vocabulary: add it by tokenizer.add_special_"
    ):
        tokenizer(["a", "a b"], padding=True)


# ---- Files and pickles ----


@pytest.mark.parametrize("copied", ["saved", "pickled"])
def test_added_tokens_survive_saving_and_pickling(tokenizer, tmp_path, copied):
    tokenizer.add_tokens(["zxqy", "two words"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<x>"], "sep_token": "<end>"})
    if copied == "saved":
        tokenizer.save_pretrained(tmp_path)
        other = type(tokenizer).from_pretrained(tmp_path)
    else:
        other = pickle.loads(pickle.dumps(tokenizer))
    texts = ["rain zxqy", "two words<x>and<end>"]
    assert other(texts, texts) == tokenizer(texts, texts)
    assert other.get_vocab() == tokenizer.get_vocab()
    assert other.special_tokens_map == tokenizer.special_tokens_map


@pytest.mark.parametrize(("plain", "fast"), [ROBERTA, DEBERTA])
def test_fast_and_plain_tokenizers_open_each_other_s_files(open_one, tmp_path, plain, fast):
    for writer, reader in ((plain, fast), (fast, plain)):
        tokenizer = open_one(writer, model_max_length=77)
        tokenizer.add_tokens(["zxqy"])
        tokenizer.add_special_tokens({"additional_special_tokens": ["<x>"]})
        folder = tmp_path / writer.__name__
        tokenizer.save_pretrained(folder)
        opened = reader.from_pretrained(folder)
        text = "rain zxqy<x>and on"
        assert opened.encode(text) == tokenizer.encode(text)
        assert opened.special_tokens_map == tokenizer.special_tokens_map
        assert opened.model_max_length == 77


def test_special_tokens_keep_rstrip_when_saved(open_one, tmp_path):
    for owner in ROBERTA:
        tokenizer = open_one(owner)
        token = AddedToken("<x>", rstrip=True)
        tokenizer.add_special_tokens({"additional_special_tokens": [token], "sep_token": token})
        tokenizer.save_pretrained(tmp_path)
        opened = owner.from_pretrained(tmp_path)
        assert opened.tokenize("a<x> b") == ["a", "<x>", "b"]
        assert opened.special_tokens_map_extended["sep_token"].rstrip


@pytest.mark.parametrize(("legacy", "warned"), [(None, False), (True, True), (False, False)])
def test_formats_that_lose_lstrip_warn(open_one, tmp_path, warnings, legacy, warned):
    tokenizer = open_one(RobertaTokenizerFast)
    tokenizer.add_tokens([AddedToken("<l>", lstrip=True)])
    tokenizer.save_pretrained(tmp_path, legacy_format=legacy)
    assert ("only in tokenizer.json" in warnings.text) is warned


@pytest.mark.parametrize(
    ("owner", "legacy", "vocabulary"),
    [
        (RobertaTokenizerFast, None, {"vocab.json", "merges.txt", "tokenizer.json"}),
        (RobertaTokenizerFast, True, {"vocab.json", "merges.txt"}),
        (RobertaTokenizerFast, False, {"tokenizer.json"}),
        (RobertaTokenizer, None, {"vocab.json", "merges.txt"}),
        (DebertaV2Tokenizer, None, {"spm.model", "added_tokens.json"}),
        (DebertaV2TokenizerFast, None, {"spm.model", "added_tokens.json"}),
    ],
)
def test_which_files_are_written(open_one, tmp_path, owner, legacy, vocabulary):
    tokenizer = open_one(owner)
    written = tokenizer.save_pretrained(tmp_path, legacy_format=legacy)
    settings = {"tokenizer_config.json", "special_tokens_map.json"}
    assert {Path(path).name for path in written} == settings | vocabulary
    assert {path.name for path in tmp_path.iterdir()} == settings | vocabulary
    assert owner.from_pretrained(tmp_path).encode("rain") == tokenizer.encode("rain")


def test_file_names_can_have_a_prefix(tokenizer, tmp_path):
    written = tokenizer.save_pretrained(tmp_path, filename_prefix="mine")
    assert all(Path(path).name.startswith("mine-") for path in written)
    vocabulary = tokenizer.save_vocabulary(tmp_path, "other")
    assert {Path(path).name for path in vocabulary} <= {
        "other-vocab.json",
        "other-merges.txt",
        "other-spm.model",
    }


# ---- Settings ----


def test_tokenizer_mapping_names_both_classes_of_each_model():
    assert TOKENIZER_MAPPING[RobertaConfig] == tuple(ROBERTA)
    assert TOKENIZER_MAPPING[DebertaV2Config] == tuple(DEBERTA)


def test_init_kwargs_are_the_settings_given(tokenizer, open_one):
    other = open_one(type(tokenizer), model_max_length=9, random_argument=False, verbose=False)
    assert other.init_kwargs["model_max_length"] == 9
    assert other.init_kwargs["random_argument"] is False
    assert other.init_kwargs["mask_token"] == other.mask_token
    assert other.init_kwargs is not other.init_kwargs
    assert tokenizer.init_inputs == ()
    assert tokenizer.name_or_path
    assert "random_argument" not in tokenizer.init_kwargs


def test_published_models_have_a_length_and_file_addresses(tokenizer):
    assert tokenizer.max_model_input_sizes
    assert tokenizer.vocab_files_names
    for name, length in tokenizer.max_model_input_sizes.items():
        assert length == 512
        for argument, file in tokenizer.vocab_files_names.items():
            assert tokenizer.pretrained_vocab_files_map[argument][name].endswith(
                f"{name}/resolve/main/{file}"
            )


def test_a_folder_named_like_a_published_model_has_its_length(folders, tmp_path, monkeypatch):
    """Its files do not say how long a row may be; the table of 4.4.2 does, by the name."""
    monkeypatch.chdir(tmp_path)
    Path("microsoft").mkdir()
    name = "microsoft/deberta-v2-xlarge"
    Path(name).symlink_to(folders["deberta-v2"])
    assert DebertaV2Tokenizer.from_pretrained(name).model_max_length == 512
    assert DebertaV2Tokenizer.from_pretrained(name, model_max_length=7).model_max_length == 7
    settings = json.loads(Path(name, "tokenizer_config.json").read_text())
    assert "model_max_length" not in settings


def test_special_tokens_count_toward_the_maximum_length(tokenizer):
    tokenizer.model_max_length = 20
    assert tokenizer.max_len_single_sentence == 18
    assert tokenizer.max_len_sentences_pair == 20 - tokenizer.num_special_tokens_to_add(pair=True)
