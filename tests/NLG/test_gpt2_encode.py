"""Tests NLG/src/gpt2_encode.py, and create_datasets.sh, which runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import format_converting_dart
import format_converting_e2e
import format_converting_webnlg
import gpt2_encode
from data_utils import FT_Dataset
from encoder import get_encoder

NLG = Path(__file__).resolve().parents[2] / "NLG"
ROWS = [
    {"context": "name : The Mill | Type : pub", "completion": "The Mill is a pub .", "cate": True},
    {"context": "x : <|endoftext|>", "completion": "Café £ 20", "more": [1]},
    {"context": "", "completion": "a\nb  c"},
]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def encode(folder, vocab, *flags):
    paths = ["--input", folder / "in.jsonl", "--output", folder / "out.jsonl", "--vocab", vocab]
    gpt2_encode.main([str(part) for part in (*paths, *flags)])
    return read_lines(folder / "out.jsonl")


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
@pytest.mark.parametrize("batch", [1, 2, 1024])
def test_rows(bos, eos, batch, tmp_path, vocab_folder, monkeypatch):
    monkeypatch.setattr(gpt2_encode, "BATCH", batch)
    write_lines(tmp_path / "in.jsonl", ROWS)
    flags = ["--add_bos"] * bos + ["--add_eos"] * eos
    encoder = get_encoder(vocab_folder)
    assert encode(tmp_path, vocab_folder, *flags) == [
        {
            "context": encoder.encode(row["context"]) + [50256] * bos,
            "completion": encoder.encode(" " + row["completion"]) + [50256] * eos,
        }
        for row in ROWS
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", ":2: not JSON"),
        (
            "name : Blue||Blue is",
            ":2: not JSON (Expecting value: line 1 column 1 (char 0)); formatted",
        ),
        ("[]", ":2: not a JSON object"),
        (
            '{"context": "a"}',
            ':2: "completion" is missing or not a text; to decode without one to compare with, '
            "give any text",
        ),
        ('{"context": 1, "completion": "a"}', ':2: "context" is missing or not a text'),
        (
            '{"context": [1], "completion": [2]}',
            ":2: holds token ids, not texts: give the file",
        ),
        ('{"context": "a", "completion": ""}', ":2: the completion is empty"),
        ('{"context": "a", "completion": " \\n"}', ":2: the completion is empty"),
        ('{"context": "a", "completion": "\\ud800"}', ':2: "completion" is not valid Unicode'),
    ],
)
def test_a_bad_line(line, message, tmp_path, vocab_folder):
    good = json.dumps(ROWS[0])
    (tmp_path / "in.jsonl").write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(ValueError) as error:  # noqa: PT011
        encode(tmp_path, vocab_folder)
    assert str(error.value).startswith(f"{tmp_path / 'in.jsonl'}{message}")
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_the_input_is_not_overwritten(tmp_path, vocab_folder):
    path = write_lines(tmp_path / "in.jsonl", ROWS)
    flags = [f"--input={path}", f"--output={path}", f"--vocab={vocab_folder}"]
    with pytest.raises(ValueError, match=r"in\.jsonl: is an input as well; give another name"):
        gpt2_encode.main(flags)
    assert read_lines(path) == ROWS


CORPORA = {
    "e2e/valid.txt": format_converting_e2e,
    "webnlg/dev.json": format_converting_webnlg,
    "dart/dart-v1.1.1-full-dev.json": format_converting_dart,
}


@pytest.mark.slow
@pytest.mark.parametrize("corpus", CORPORA)
@pytest.mark.parametrize("eos", [True, False])
def test_only_corpora_encoded_with_add_eos_show_their_ends(corpus, eos, tmp_path):
    data = NLG.parents[1] / "shared" / "data"
    if not (data / "nlg" / corpus).is_file() or not (data / "gpt2-vocab").is_dir():
        pytest.skip("GPT-2's vocabulary or the corpus is not on this machine")
    CORPORA[corpus].main([str(data / "nlg" / corpus), str(tmp_path / "in.jsonl")])
    encode(tmp_path, data / "gpt2-vocab", "--add_bos", *["--add_eos"] * eos)
    assert FT_Dataset(tmp_path / "out.jsonl", 8, 512).shows_ends() == eos


@pytest.mark.slow
def test_no_vocabulary_is_one_line_and_keeps_the_old_file(tmp_path):
    write_lines(tmp_path / "in.jsonl", ROWS)
    (tmp_path / "out.jsonl").write_text("old")
    script = NLG / "src" / "gpt2_encode.py"
    flags = ["--input", "in.jsonl", "--output", "out.jsonl", "--vocab", "."]
    result = subprocess.run(
        [sys.executable, str(script), *flags], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert "gpt2_encode.py: error: .: holds no vocabulary" in result.stderr
    assert (tmp_path / "out.jsonl").read_text() == "old"


E2E = "name : The Mill||The Mill is a pub . \n"
DART = [{"tripleset": [["a", "B", "c"]], "annotations": [{"text": "A text."}]}]


@pytest.fixture
def tree(tmp_path, vocab_folder):
    """A copy of the folder NLG, without data."""
    for name in ("create_datasets.sh", "src"):
        (tmp_path / name).symlink_to(NLG / name)
    # The script changes to the folder of the link, not to that of its target.
    (tmp_path / "vocab").symlink_to(vocab_folder)
    return tmp_path


def create_datasets(tree, *corpora):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(tree / "create_datasets.sh"), *corpora],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
    )


def fill(tree):
    """Writes E2E's training set and DART's dev set."""
    for name in ("e2e/train.txt", "dart/dart-v1.1.1-full-dev.json"):
        path = tree / "data" / name
        path.parent.mkdir(parents=True)
        path.write_text(E2E if name.endswith("txt") else json.dumps(DART))


def made(tree):
    return sorted(str(path.relative_to(tree / "data")) for path in tree.glob("data/*/*.jsonl"))


MADE = {
    "dart": ["dart/valid.jsonl", "dart/valid_formatted.jsonl"],
    "e2e": ["e2e/train.jsonl", "e2e/train_formatted.jsonl"],
}
TEXTS = {"e2e": ("name : The Mill", " The Mill is a pub ."), "dart": ("a : b : c", " A text.")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given_corpora", "made_corpora", "skipped"),
    [
        ([], ["dart", "e2e"], ["data/e2e/test.txt", "data/webnlg_challenge_2017/dev.json"]),
        (["dart"], ["dart"], ["data/dart/dart-v1.1.1-full-test.json"]),
    ],
)
def test_create_datasets(given_corpora, made_corpora, skipped, tree, vocab_folder):
    fill(tree)
    result = create_datasets(tree, *given_corpora)
    assert result.returncode == 0, result.stderr
    assert made(tree) == [name for corpus in made_corpora for name in MADE[corpus]]
    for name in skipped:
        assert f"{name} does not exist, skipped" in result.stdout.splitlines()
    encoder = get_encoder(vocab_folder)
    for corpus in made_corpora:
        (row,) = read_lines(tree / "data" / MADE[corpus][0])
        context, completion = map(encoder.encode, TEXTS[corpus])
        assert row == {"context": [*context, 50256], "completion": [*completion, 50256]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given_corpora", "message"),
    [
        ([], "data holds none of the corpora"),
        (["webnlg"], "the data of webnlg is missing"),
        (["squad"], "unknown corpus 'squad'"),
    ],
)
def test_create_datasets_without_data(given_corpora, message, tree):
    result = create_datasets(tree, *given_corpora)
    assert result.returncode == 1
    assert f"create_datasets.sh: error: {message}" in result.stderr


@pytest.mark.slow
def test_create_datasets_stops_at_a_bad_file(tree):
    fill(tree)
    (tree / "data" / "e2e" / "train.txt").write_text("no bars\n")
    result = create_datasets(tree)
    assert result.returncode == 1
    assert "data/e2e/train.txt:1: not of the form" in result.stderr
    assert made(tree) == []
