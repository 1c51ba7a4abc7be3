"""RoBERTa's tokenizer files: saved, opened, damaged and from the hub."""

import json
from pathlib import Path

import make_tokenizer_fixture as maker
import pytest
from datasets.fingerprint import Hasher
from launches import fork_server
from tiny_tokenizer import CLS, FIXTURE, PAD, SEP, VOCABULARY_SIZE, ids_of, write
from tokenizers import Tokenizer, models

from transformers import RobertaTokenizerFast


@pytest.mark.parametrize(
    "remaining",
    [
        None,
        ("tokenizer.json",),
        ("vocab.json", "merges.txt"),
        ("vocab.json", "merges.txt", "special_tokens_map.json", "tokenizer_config.json"),
    ],
)
def test_saved_and_opened_again(tokenizer, tmp_path, remaining):
    tokenizer.model_max_length = 77
    written = tokenizer.save_pretrained(tmp_path / "new" / "model")
    names = ["merges.txt", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(Path(path).name for path in written) == [*names, "vocab.json"]
    assert sorted(path.name for path in Path(written[0]).parent.iterdir()) == [*names, "vocab.json"]
    for path in map(Path, written):
        if remaining and path.name not in remaining:
            path.unlink()
    opened = RobertaTokenizerFast.from_pretrained(tmp_path / "new" / "model")
    assert ids_of(opened) == ids_of(tokenizer) == FIXTURE["strings"]["single"]
    if remaining is None or "tokenizer_config.json" in remaining:
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


def test_a_failed_save_leaves_the_old_files(tokenizer, folder, monkeypatch):
    tokenizer.save_pretrained(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(OSError, match="disk full"):
        tokenizer.save_pretrained(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_settings_come_from_arguments_then_the_map_then_the_configuration(folder):
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
def test_null_and_huge_limits_mean_no_limit(folder, limit):
    write(folder / "tokenizer_config.json", {"model_max_length": limit})
    tokenizer = RobertaTokenizerFast.from_pretrained(folder)
    assert tokenizer.model_max_length > 10**20
    assert len(tokenizer.encode("a b c", truncation=True)) == 5


def test_a_mask_token_given_as_a_string_strips_the_space_before_it(folder):
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


def test_an_added_token_with_another_id_is_an_error(folder):
    write(folder / "added_tokens.json", {"<a>": VOCABULARY_SIZE + 9})
    message = f"'<a>' has the id {VOCABULARY_SIZE + 9} in the files, but {VOCABULARY_SIZE} in"
    with pytest.raises(ValueError, match=message):
        RobertaTokenizerFast.from_pretrained(folder)


def test_special_tokens_missing_in_the_vocabulary_are_added(tmp_path, warnings):
    tokens = [token for token in FIXTURE["vocabulary"] if token not in ("<s>", "<mask>")]
    maker.write_vocabulary(tmp_path, tokens, FIXTURE["merges"])
    tokenizer = RobertaTokenizerFast.from_pretrained(tmp_path)
    assert sorted([tokenizer.cls_token_id, tokenizer.mask_token_id]) == [
        len(tokens),
        len(tokens) + 1,
    ]
    assert "<s>, <mask>" in warnings.text


def test_tokenizer_json_is_preferred_to_vocab_json(tokenizer, folder):
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
def test_a_folder_without_a_vocabulary_is_an_error(folder, missing):
    (folder / missing).unlink()
    message = "model' has no vocabulary: looked for tokenizer.json, or vocab.json with merges.txt"
    with pytest.raises(OSError, match=message):
        RobertaTokenizerFast.from_pretrained(folder)


def test_an_unknown_name_is_an_error_of_one_line(monkeypatch):
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


@pytest.mark.parametrize(
    ("content", "message"),
    [("[1]", "contains a list"), ("[" * 100_000, "not a JSON file")],
    ids=["list", "deep"],
)
def test_a_configuration_that_is_not_a_dict_is_an_error(folder, content, message):
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(OSError, match=f"tokenizer_config.json: {message}"):
        RobertaTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("added_tokens.json", {"<a>": []}),
        ("added_tokens.json", {"<a>": "5", "<b>": 5}),
        ("special_tokens_map.json", {"mask_token": {"lstrip": True}}),
        ("special_tokens_map.json", {"sep_token": 3}),
        ("tokenizer_config.json", {"added_tokens_decoder": 3}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": "<a>"}}),
        ("tokenizer_config.json", {"model_max_length": float("inf")}),
        ("tokenizer_config.json", {"padding_side": "top"}),
    ],
)
def test_wrong_values_in_files_are_errors_that_name_the_model(folder, name, content):
    write(folder / name, content)
    for override in ({}, {"truncation_side": "left"}):
        message = rf"^'{folder}': its tokenizer's files are damaged .+$"
        with pytest.raises(ValueError, match=message) as error:
            RobertaTokenizerFast.from_pretrained(folder, **override)
        assert "\n" not in str(error.value)


def test_another_model_s_tokenizer_json_is_an_error(tmp_path):
    backend = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="WordPiece model, but RoBERTa's is BPE"):
        RobertaTokenizerFast.from_pretrained(tmp_path)


def test_bad_settings_are_errors(tiny):
    with pytest.raises(ValueError, match=r"^padding_side is 'right' or 'left', not 'top'"):
        RobertaTokenizerFast.from_pretrained(tiny, padding_side="top")
    files = {"vocab_file": tiny / "vocab.json", "merges_file": tiny / "merges.txt"}
    with pytest.raises(ValueError, match=r"^padding_side is"):
        RobertaTokenizerFast.from_pretrained(tiny, **files, padding_side="top")
    with pytest.raises(ValueError, match="RoBERTa needs tokenizer"):
        RobertaTokenizerFast()


def test_settings_of_other_tokenizers_do_nothing(tiny, warnings):
    """They are accepted, as in 4.4.2, with a warning if one asks for something."""
    tokenizer = RobertaTokenizerFast.from_pretrained(tiny, do_lower_case=False)
    assert tokenizer.init_kwargs["do_lower_case"] is False
    assert not warnings.records
    other = RobertaTokenizerFast.from_pretrained(tiny, do_lower_case=True)
    assert other.init_kwargs["do_lower_case"] is True
    assert "has no setting do_lower_case" in warnings.text
    assert ids_of(other) == FIXTURE["strings"]["single"]
    with pytest.raises(TypeError, match=r"padding_sid .*\(did you mean padding_side\?\)"):
        RobertaTokenizerFast.from_pretrained(tiny, padding_sid="left")


def test_use_fast_changes_nothing(tiny):
    tokenizer = RobertaTokenizerFast.from_pretrained(tiny, use_fast=False)
    assert ids_of(tokenizer) == FIXTURE["strings"]["single"]


@pytest.mark.slow
def test_from_the_hub(tokenizer, hub_server, tmp_path):
    tokenizer.save_pretrained(hub_server.root / "someone" / "tiny")
    code = (
        "import sys; from transformers import RobertaTokenizerFast as R\n"
        "tokenizer = R.from_pretrained('someone/tiny', cache_dir=sys.argv[1])\n"
        "print(tokenizer.encode('The rain <mask>'))"
    )
    environment = {"HF_ENDPOINT": hub_server.url, "HOME": str(tmp_path), "PATH": ""}
    result = fork_server("hub").run(["-c", code, tmp_path / "cache"], environment, timeout=300)
    assert json.loads(result.stdout or "null") == tokenizer.encode("The rain <mask>"), result.stderr
    asked = " ".join(map(str, hub_server.requests))
    assert "tokenizer.json" in asked
    assert "vocab.json" not in asked
