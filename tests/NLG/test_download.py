"""Tests NLG/src/download.py on local servers, some of which misbehave."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import download
from loralib.io.downloads import ATTEMPTS
from loralib.io.tensors import read_tensors, write_tensors

NLG = Path(__file__).resolve().parents[2] / "NLG"
DATA = NLG.parents[1] / "shared" / "data"
VOCAB = {"encoder.json": b'{"a": 1}', "vocab.bpe": b"a b\n" * 30_000}
MEANING = '"name[The Mill], eatType[pub]"'
TABLES = {
    "trainset.csv": f"mr,ref\n{MEANING},One.\n{MEANING},Isn't.\n",
    "devset.csv": f'mr,ref\n{MEANING},"Two, three."\n',
    "testset_w_refs.csv": f'"mr","ref"\n{MEANING},"Isn\'t."\n',
}
ROWS = {"trainset.csv": 2, "devset.csv": 1, "testset_w_refs.csv": 1}


def archive(tables, method=zipfile.ZIP_STORED, folder="e2e-dataset"):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", method) as file:
        for name, text in tables.items():
            file.writestr(f"{folder}/{name}", text)
    return content.getvalue()


@pytest.fixture
def published(file_server, monkeypatch):
    """The server holds small corpora, and the script knows no other addresses."""
    file_server.files = {f"/vocab/{name}": content for name, content in VOCAB.items()}
    file_server.files["/e2e.zip"] = archive(TABLES)
    file_server.files["/dart/train.json"] = b"[1, 2]"
    files = {
        "vocab": tuple(
            download.File(f"vocab/{name}", f"{file_server.url}/vocab/{name}", len(content))
            for name, content in VOCAB.items()
        ),
        "webnlg": (download.File("data/w/train.json", f"{file_server.url}/webnlg/train.json"),),
        "dart": (download.File("data/dart/train.json", f"{file_server.url}/dart/train.json"),),
    }
    monkeypatch.setattr(download, "FILES", files)
    monkeypatch.setattr(download, "E2E_URL", f"{file_server.url}/e2e.zip")
    splits = [(name, target, ROWS[name]) for name, target, _ in download.E2E_SPLITS]
    monkeypatch.setattr(download, "E2E_SPLITS", splits)
    return file_server


def fetch(folder, *names):
    download.main([*names, "--folder", str(folder)])


def contents_of(folder):
    """Returns {path: content} of all files in a folder, including hidden ones."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_vocab_and_corpora(published, tmp_path):
    fetch(tmp_path, "vocab", "e2e", "dart")
    context = b"name : The Mill | Type : pub||"
    assert contents_of(tmp_path) == {
        "vocab/encoder.json": VOCAB["encoder.json"],
        "vocab/vocab.bpe": VOCAB["vocab.bpe"],
        "data/e2e/train.txt": context + b"One . \n" + context + b"Isn 't . \n",
        "data/e2e/valid.txt": context + b"Two , three . \n",
        "data/e2e/test.txt": context + b"Is n't . \n",
        "data/dart/train.json": b"[1, 2]",
    }
    assert len(published.log) == 4


def test_existing_files_are_kept_and_not_downloaded(published, tmp_path):
    fetch(tmp_path, "vocab", "e2e", "dart")
    before, published.log[:] = contents_of(tmp_path), []
    fetch(tmp_path, "vocab", "e2e", "dart")
    assert published.log == []
    os.remove(tmp_path / "vocab" / "vocab.bpe")
    os.remove(tmp_path / "data" / "e2e" / "valid.txt")
    fetch(tmp_path, "vocab", "e2e", "dart")
    assert contents_of(tmp_path) == before
    assert published.paths() == ["/vocab/vocab.bpe", "/e2e.zip"]


@pytest.mark.parametrize(
    ("path", "name", "message"),
    [
        ("vocab/vocab.bpe", "vocab", "has 5 bytes, not 120,000; move it away and run again"),
        ("data/e2e/train.txt", "e2e", "has 1 lines, not 2; move it away and run again"),
    ],
)
def test_another_file_in_its_place_is_an_error_and_kept(path, name, message, published, tmp_path):
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_bytes(b"mine\n")
    with pytest.raises(OSError, match=message):
        fetch(tmp_path, name)
    assert (tmp_path / path).read_bytes() == b"mine\n"


@pytest.mark.parametrize(
    ("name", "path", "spoil", "message"),
    [
        (
            "vocab",
            "/vocab/vocab.bpe",
            "absent",
            "HTTP 404 Not Found; try again, or put the file at ",
        ),
        ("vocab", "/vocab/vocab.bpe", "cut", "closed after 60,000 of 120,000 bytes"),
        ("vocab", "/vocab/vocab.bpe", "cut, unannounced", "got 60,000 bytes, not 120,000"),
        ("vocab", "/vocab/vocab.bpe", "longer", "got 120,001 bytes, not 120,000"),
        ("dart", "/dart/train.json", "a page", "Expecting value"),
        ("dart", "/dart/train.json", "cut", "closed after 3 of 6 bytes"),
        ("dart", "/dart/train.json", "cut, unannounced", "Expecting value"),
        ("e2e", "/e2e.zip", "absent", "put the file at .*/data/e2e/e2e-dataset.zip yourself$"),
        ("e2e", "/e2e.zip", "a page", "holds no e2e-dataset/trainset.csv"),
        ("e2e", "/e2e.zip", "another archive", "holds no e2e-dataset/trainset.csv"),
        ("e2e", "/e2e.zip", "fewer rows", "trainset.csv has 1 rows, not 2"),
    ],
)
def test_a_download_that_fails_leaves_no_file(name, path, spoil, message, published, tmp_path):
    if spoil == "absent":
        del published.files[path]
    elif spoil.startswith("cut"):
        published.cuts[path] = [len(published.files[path]) // 2] * ATTEMPTS
        published.unannounced.update([path] if "unannounced" in spoil else [])
    elif spoil == "longer":
        published.files[path] += b"!"
    elif spoil == "a page":
        published.files[path] = b"<html>log in</html>"
    elif spoil == "another archive":
        published.files[path] = archive({"other.csv": ""})
    else:
        published.files[path] = archive(TABLES | {"trainset.csv": TABLES["devset.csv"]})
    with pytest.raises(OSError, match=message) as error:
        fetch(tmp_path, name)
    assert f"{published.url}{path}" in str(error.value)
    left = set(contents_of(tmp_path)) - {"vocab/encoder.json"}
    kept = {".part", ".etag"} if spoil == "cut" else set()
    assert {Path(file).suffix for file in left} == kept


def test_a_broken_download_is_continued(published, tmp_path):
    published.cuts["/e2e.zip"] = [100] * ATTEMPTS
    published.etags["/e2e.zip"] = '"one"'
    with pytest.raises(OSError, match="the connection closed"):
        fetch(tmp_path, "e2e")
    published.log.clear()
    fetch(tmp_path, "e2e")
    assert published.log == [("/e2e.zip", "bytes=500-", '"one"')]
    assert {Path(path).suffix for path in contents_of(tmp_path)} == {".txt"}


def test_an_archive_that_the_user_put_there_is_not_downloaded(published, tmp_path):
    fetch(tmp_path / "downloaded", "e2e")
    path = tmp_path / "own" / "data" / "e2e" / "e2e-dataset.zip"
    path.parent.mkdir(parents=True)
    path.write_bytes(published.files["/e2e.zip"])
    published.log.clear()
    fetch(tmp_path / "own", "e2e")
    assert published.log == []
    own = contents_of(tmp_path / "own")
    assert own.pop("data/e2e/e2e-dataset.zip") == published.files["/e2e.zip"]
    assert own == contents_of(tmp_path / "downloaded")


def spoilt(damage: str) -> bytes:
    """Returns the archive with one kind of damage."""
    good = archive(TABLES, zipfile.ZIP_DEFLATED)
    start = good.index(b"trainset.csv") + len("trainset.csv")  # where its compressed bytes begin
    spoils = {
        "a page": b"<html>log in</html>",
        "nothing": b"",
        "half": good[: len(good) // 2],
        "another file's bytes": good[:start] + bytes(range(255, 245, -1)) + good[start + 10 :],
        "a password": bytes(1 if i in flags_of(good) else byte for i, byte in enumerate(good)),
        "a wrong place": good[:-4] + bytes([good[-4] ^ 2]) + good[-3:],
        "no folder": archive(TABLES, folder="e2e-dataset-master"),
        "another row": archive(TABLES | {"trainset.csv": TABLES["devset.csv"]}),
        "another table": archive(TABLES | {"trainset.csv": "a,b\n"}),
        "another encoding": archive(TABLES | {"trainset.csv": b"mr,ref\n\xe9,b\n"}),
    }
    return spoils[damage]


def flags_of(content: bytes) -> set[int]:
    """Returns the positions of the entries' flags in a zip file's directory."""
    return {found.start() + 8 for found in re.finditer(b"PK\x01\x02", content)}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("a page", "holds no e2e-dataset/trainset.csv (File is not a zip file)"),
        ("nothing", "holds no e2e-dataset/trainset.csv (File is not a zip file)"),
        ("half", "holds no e2e-dataset/trainset.csv (File is not a zip file)"),
        ("another file's bytes", "holds no e2e-dataset/trainset.csv (Error -3 while decompressing"),
        ("a password", "holds no e2e-dataset/trainset.csv (File 'e2e-dataset/trainset.csv' is enc"),
        ("a wrong place", "holds no e2e-dataset/trainset.csv ("),
        ("no folder", 'holds no e2e-dataset/trainset.csv ("There is no item named'),
        ("another row", "trainset.csv has 1 rows, not 2"),
        ("another table", "trainset.csv:1: the columns are a, b, not mr, ref"),
        ("another encoding", "'utf-8' codec can't decode byte 0xe9"),
        ("a folder", "Is a directory"),
    ],
)
def test_a_wrong_archive_that_the_user_put_there_is_an_error(damage, message, published, tmp_path):
    path = tmp_path / "data" / "e2e" / "e2e-dataset.zip"
    path.parent.mkdir(parents=True)
    if damage == "a folder":
        path.mkdir()
    else:
        path.write_bytes(spoilt(damage))
    way_out = "; remove it to download it again, or put the published file there"
    with pytest.raises(OSError, match=f"^e2e: {path}: {re.escape(message)}.*{way_out}$") as error:
        fetch(tmp_path, "e2e")
    assert "\n" not in str(error.value)
    assert set(contents_of(tmp_path)) <= {"data/e2e/e2e-dataset.zip"}


def test_after_a_failure_the_others_are_still_fetched(published, tmp_path, caplog):
    del published.files["/vocab/vocab.bpe"]
    with pytest.raises(OSError, match=r"^vocab: .*/vocab/vocab.bpe: HTTP 404 Not Found"):
        fetch(tmp_path, "webnlg", "dart", "vocab")
    (line,) = (record.getMessage() for record in caplog.records if record.levelname == "ERROR")
    assert re.match(r"webnlg: .*/webnlg/train\.json: HTTP 404 Not Found", line)
    assert "vocab" not in line
    assert set(contents_of(tmp_path)) == {"data/dart/train.json", "vocab/encoder.json"}


@pytest.mark.parametrize("name", ["squad", "gpt2-xl"])
def test_an_unknown_name(name, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        fetch(tmp_path, name)
    assert f"invalid choice: '{name}'" in capsys.readouterr().err


def test_known_sizes_are_those_of_the_published_files():
    copies = {
        "encoder.json": "gpt2-vocab/encoder.json",
        "vocab.bpe": "gpt2-vocab/vocab.bpe",
        "webnlg_challenge_2017/dev.json": "nlg/webnlg/dev.json",
        "dart-v1.1.1-full-dev.json": "nlg/dart/dart-v1.1.1-full-dev.json",
    }
    if not all((DATA / copy).is_file() for copy in copies.values()):
        pytest.skip(f"needs gpt2-vocab, nlg/webnlg and nlg/dart in {DATA}")
    for file in (file for files in download.FILES.values() for file in files if file.size):
        (copy,) = (copy for end, copy in copies.items() if file.path.endswith(end))
        assert (DATA / copy).stat().st_size == file.size


def run_script(folder, environment, name, *arguments):
    """Runs a shell script of NLG/ in a folder of its own, because it changes that folder's data."""
    for part in (name, "src"):
        if not (folder / part).exists():
            (folder / part).symlink_to(NLG / part)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(folder / name), *arguments],
        env=environment | {"PATH": path},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_checkpoints_from_the_hub(hub_server, tmp_path):
    tensors = {"wte.weight": torch.arange(6.0).reshape(2, 3)}
    repo = hub_server.root / "openai-community"
    for name, file in (("gpt2", "pytorch_model.bin"), ("gpt2-medium", "model.safetensors")):
        (repo / name).mkdir(parents=True)
        write_tensors(repo / name / file, tensors)
    (repo / "gpt2-large").mkdir()
    tree = tmp_path / "tree"
    tree.mkdir()
    environment = hub_server.environment(tmp_path / "home")
    result = run_script(tree, environment, "download_pretrained_checkpoints.sh")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        "download.py: error: gpt2-large: 'openai-community/gpt2-large' has no pytorch_model.bin "
        "on the hub; try again, or put its pytorch_model.bin at "
        "pretrained_checkpoints/gpt2-large-pytorch_model.bin yourself"
    )
    made = tree / "pretrained_checkpoints"
    names = ["gpt2-medium-pytorch_model.bin", "gpt2-pytorch_model.bin"]
    assert sorted(os.listdir(made)) == names
    for name in names:
        assert torch.equal(read_tensors(made / name)[0]["wte.weight"], tensors["wte.weight"])
    assert torch.load(made / names[0], weights_only=True).keys() == tensors.keys()

    # An existing checkpoint needs no hub.
    shutil.rmtree(repo)
    result = run_script(tree, environment, "download_pretrained_checkpoints.sh", "gpt2")
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_download_data_fetches_everything_or_what_is_named(tmp_path):
    """A stand-in for python prints the arguments that it gets."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    (tmp_path / "download_data.sh").symlink_to(NLG / "download_data.sh")

    def arguments_for_python(*arguments):
        return subprocess.run(
            ["bash", str(tmp_path / "download_data.sh"), *arguments],
            env=os.environ | {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert arguments_for_python() == "src/download.py vocab e2e webnlg dart\n"
    assert arguments_for_python("dart") == "src/download.py dart\n"


def test_files_are_stored_where_create_datasets_reads_them():
    files = [file for files in download.FILES.values() for file in files]
    targets = [file.path for file in files] + [target for _, target, _ in download.E2E_SPLITS]
    assert len(targets) == len(set(targets)) == 11
    assert all(file.url.startswith("https://") for file in files)
    wanted = json.dumps((NLG / "create_datasets.sh").read_text())
    sources = [target for target in targets if target.startswith("data/")]
    assert all(str(Path(source).parent) in wanted for source in sources)
    assert all(Path(source).name in wanted for source in sources)
