"""Tests NLG/src/encoder.py: its ids are upstream's, and it reads vocabularies of every format."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from encoded import END_OF_TEXT_ID
from encoder import END_OF_TEXT, Encoder, get_encoder

SRC = Path(__file__).parents[2] / "NLG" / "src"
TWO_FILES = [("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")]


@pytest.fixture(scope="session")
def upstream(encoder_fixture):
    """The vocabulary, and the ids that upstream's tokenizer computed with it."""
    return json.loads(encoder_fixture.FIXTURE.read_text("utf-8"))


@pytest.fixture(scope="session")
def vocabulary(upstream):
    return upstream["vocab"], [tuple(pair) for pair in upstream["merges"]]


@pytest.fixture(scope="session")
def encoder(vocabulary):
    return Encoder(*vocabulary)


def test_ids_are_upstreams(encoder, encoder_fixture, upstream):
    assert encoder.encode_batch(encoder_fixture.STRINGS) == upstream["strings"]
    assert [encoder.encode(text) for text in encoder_fixture.STRINGS] == upstream["strings"]


def test_decode_is_the_inverse(encoder, encoder_fixture, upstream):
    assert [encoder.decode(ids) for ids in upstream["strings"]] == list(encoder_fixture.STRINGS)


def test_decode_replaces_an_incomplete_character(encoder):
    ids = encoder.encode("é")
    assert encoder.decode(ids[:-1]) == "\ufffd"


@pytest.mark.parametrize("bad", [380, 50255, 50257, -1])
def test_an_id_without_token(encoder, bad):
    with pytest.raises(ValueError, match=f"no token of id {bad}$"):
        encoder.decode([3, bad, 4])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "e2e/valid.txt",
        "e2e/test.txt",
        "e2e/devset.csv",
        "e2e/testset_w_refs.csv",
        "webnlg/dev.json",
        "dart/dart-v1.1.1-full-dev.json",
    ],
)
def test_whole_corpora_in_gpt2s_vocabulary(name, encoder_fixture, upstream):
    data = encoder_fixture.DATA
    if not (data / "nlg" / name).is_file() or not (data / "gpt2-vocab").is_dir():
        pytest.skip(f"needs nlg/{name} and gpt2-vocab in {data}")
    encoder = get_encoder(data / "gpt2-vocab")
    texts = encoder_fixture.corpus_texts(data, name)
    ids = encoder.encode_batch(texts)
    assert encoder_fixture.checksum(ids) == upstream["corpora"][name]
    assert [encoder.decode(row) for row in ids] == texts


def write_tokenizer_json(folder, vocab, merges, *, kind="BPE", as_text=False):
    pairs = [" ".join(pair) if as_text else list(pair) for pair in merges]
    content = {"model": {"type": kind, "vocab": vocab, "merges": pairs}}
    (folder / "tokenizer.json").write_text(json.dumps(content), "utf-8")


@pytest.mark.parametrize("names", TWO_FILES)
def test_two_files(names, tmp_path, encoder_fixture, vocabulary, upstream):
    encoder_fixture.write_vocabulary(tmp_path, *vocabulary, names)
    encoder = get_encoder(str(tmp_path))
    assert encoder.encode_batch(encoder_fixture.STRINGS) == upstream["strings"]


@pytest.mark.parametrize("as_text", [True, False])
def test_tokenizer_json(as_text, tmp_path, encoder_fixture, vocabulary, upstream):
    write_tokenizer_json(tmp_path, *vocabulary, as_text=as_text)
    encoder = get_encoder(tmp_path)
    assert encoder.encode_batch(encoder_fixture.STRINGS) == upstream["strings"]


def without(vocab, token):
    return {name: number for name, number in vocab.items() if name != token}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda vocab: without(vocab, "!"), "lacks 1 of the 256 bytes"),
        (lambda vocab: without(vocab, END_OF_TEXT), f"the id None, not {END_OF_TEXT_ID}"),
        (lambda vocab: vocab | {END_OF_TEXT: 380}, f"the id 380, not {END_OF_TEXT_ID}"),
        (lambda vocab: without(vocab, "Ġpub"), "Ġpub"),
    ],
    ids=["byte", "no end", "other end", "merge"],
)
def test_a_vocabulary_that_is_not_gpt2s(change, message, tmp_path, encoder_fixture, vocabulary):
    vocab, merges = vocabulary
    encoder_fixture.write_vocabulary(tmp_path, change(vocab), merges, TWO_FILES[0])
    with pytest.raises(ValueError, match=message) as error:
        get_encoder(tmp_path)
    assert str(tmp_path / "encoder.json") in str(error.value)


def test_a_model_of_another_kind(tmp_path, vocabulary):
    write_tokenizer_json(tmp_path, *vocabulary, kind="WordPiece")
    with pytest.raises(ValueError, match="the model is WordPiece, not BPE"):
        get_encoder(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": "b"}'])
def test_a_damaged_file(content, tmp_path, encoder_fixture, vocabulary):
    encoder_fixture.write_vocabulary(tmp_path, *vocabulary, TWO_FILES[0])
    (tmp_path / "encoder.json").write_text(content)
    with pytest.raises(ValueError, match="not a vocabulary of GPT-2's kind"):
        get_encoder(tmp_path)


def test_a_folder_without_vocabulary(tmp_path, vocab_folder):
    shutil.copy(vocab_folder / "encoder.json", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"holds no vocabulary \(encoder.json with vocab"):
        get_encoder(tmp_path)


def encode_in_a_process(name, environment):
    """Returns the ids, or the error, of a process that reaches only the hub of `environment`."""
    code = f"""
from encoder import get_encoder
try:
    print(get_encoder({name!r}).encode(" The Mill"))
except OSError as error:
    print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=SRC, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("format", ["two files", "tokenizer.json"])
def test_from_the_hub_and_then_offline(
    format, hub_server, tmp_path, encoder, encoder_fixture, vocabulary
):
    repo = hub_server.root / "org" / "tiny"
    repo.mkdir(parents=True)
    if format == "two files":
        encoder_fixture.write_vocabulary(repo, *vocabulary, TWO_FILES[1])
    else:
        write_tokenizer_json(repo, *vocabulary)
    wanted = str(encoder.encode(" The Mill"))
    home = tmp_path / "home"
    assert encode_in_a_process("org/tiny", hub_server.environment(home)) == wanted
    offline = hub_server.environment(home, HF_HUB_OFFLINE="1")
    assert encode_in_a_process("org/tiny", offline) == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "offline", "message"),
    [
        ("vocab", "0", "'vocab' is neither a local folder nor a model on the hub"),
        ("no/such/folder", "0", "'no/such/folder': no such folder"),
        ("org/empty", "0", "'org/empty' has no vocab.json on the hub"),
        ("org/empty", "1", "'org/empty' is not a local folder and cannot be fetched: offline"),
    ],
)
def test_names_without_a_vocabulary_on_the_hub(name, offline, message, hub_server, tmp_path):
    (hub_server.root / "org" / "empty").mkdir(parents=True)
    environment = hub_server.environment(tmp_path / "home", HF_HUB_OFFLINE=offline)
    output = encode_in_a_process(name, environment)
    assert message in output
    assert "\n" not in output
