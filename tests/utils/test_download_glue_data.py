"""Tests utils/download_glue_data.py on a local server that can misbehave."""

import importlib.util
import io
import re
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from loralib.io.downloads import ATTEMPTS
from transformers.data.processors.glue import glue_task, load_glue_split

SCRIPT = Path(__file__).parents[2] / "utils" / "download_glue_data.py"
WNLI_ROWS = {"train": 635, "dev": 71, "test": 146}
MRPC_HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("download_glue_data", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def mirror(file_server):
    file_server.url += "/glue/data"
    return file_server


def make_zip(members: dict[str, str], compression=zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, text in members.items():
            file.writestr(name, text)
    return buffer.getvalue()


def wnli_files(rows: dict[str, int] = WNLI_ROWS) -> dict[str, str]:
    members = {"WNLI/original/README": "as published", "__MACOSX/junk": "x"}
    for split, count in rows.items():
        columns = ["index", "sentence1", "sentence2", "label"][: 3 if split == "test" else 4]
        lines = ["\t".join(columns)]
        lines += [
            "\t".join([f"{i}", f'say "{i}', "two", f"{i % 2}"][: len(columns)])
            for i in range(count)
        ]
        members[f"WNLI/{split}.tsv"] = "\n".join(lines) + "\n"
    return members


@pytest.fixture
def wnli(mirror):
    mirror.files["/glue/data/WNLI.zip"] = make_zip(wnli_files())
    mirror.etags["/glue/data/WNLI.zip"] = '"one"'
    return mirror


def run(script, mirror, folder, tasks="WNLI", *more) -> int:
    return script.main(
        ["--data_dir", str(folder), "--tasks", tasks, "--base_url", mirror.url, *more]
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_download_then_skip(script, wnli, tmp_path):
    assert run(script, wnli, tmp_path) == 0
    assert names(tmp_path) == ["WNLI"]
    for member, text in wnli_files().items():
        if member.startswith("WNLI/"):
            assert (tmp_path / member).read_text() == text
    assert len(load_glue_split("wnli", tmp_path, "train")) == 635

    wnli.log.clear()
    assert run(script, wnli, tmp_path) == 0
    assert wnli.log == []


def test_base_url_may_end_in_a_slash(script, wnli, tmp_path):
    wnli.url += "/"
    assert run(script, wnli, tmp_path) == 0


def test_next_run_continues_where_the_last_gave_up(script, wnli, tmp_path, caplog):
    path = "/glue/data/WNLI.zip"
    wnli.cuts[path] = [100] * ATTEMPTS
    assert run(script, wnli, tmp_path) == 1
    assert "closed after 500 of" in caplog.records[-1].message
    assert names(tmp_path) == ["WNLI.zip.part", "WNLI.zip.part.etag"]
    assert (tmp_path / "WNLI.zip.part").read_bytes() == wnli.files[path][:500]

    wnli.log.clear()
    assert run(script, wnli, tmp_path) == 0
    assert wnli.log == [(path, "bytes=500-", '"one"')]
    assert names(tmp_path) == ["WNLI"]


@pytest.mark.parametrize(("status", "requests"), [(404, 1), (503, 5)])
def test_http_error_is_one_line(script, wnli, tmp_path, caplog, status, requests):
    wnli.errors["/glue/data/WNLI.zip"] = status
    assert run(script, wnli, tmp_path) == 1
    assert len(wnli.log) == requests
    message = caplog.records[-1].message
    assert re.fullmatch(rf"WNLI: http://\S+/glue/data/WNLI.zip: HTTP {status} .+", message)


def test_no_server_is_one_line(script, wnli, tmp_path, caplog):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        wnli.url = f"http://127.0.0.1:{closed.getsockname()[1]}/glue/data"
        assert run(script, wnli, tmp_path, "WNLI,RTE") == 1
    assert len(caplog.records) == ATTEMPTS  # the second task is not tried
    assert "refused" in caplog.records[-1].message
    assert "\n" not in caplog.records[-1].message


def truncated(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes) -> bytes:
    at = content.index(b"as published")
    return content[:at] + b"AS" + content[at + 2 :]


def misplaced(content: bytes) -> bytes:
    """It seems to have files before its begin."""
    return content[:-4] + bytes([content[-4] ^ 2]) + content[-3:]


def of_another_method(content: bytes) -> bytes:
    """It seems to be compressed by bzip2."""
    at = content.index(b"PK\x01\x02") + 10
    return content[:at] + bytes([zipfile.ZIP_BZIP2]) + content[at + 1 :]


@pytest.mark.parametrize("damage", [truncated, flipped, misplaced, of_another_method])
def test_damaged_zip(script, wnli, tmp_path, caplog, damage):
    good = make_zip(wnli_files(), zipfile.ZIP_STORED)
    wnli.files["/glue/data/WNLI.zip"] = damage(good)
    assert run(script, wnli, tmp_path) == 1
    assert "WNLI.zip is damaged" in caplog.records[-1].message
    assert names(tmp_path) == []

    wnli.files["/glue/data/WNLI.zip"] = good
    assert run(script, wnli, tmp_path) == 0


@pytest.mark.parametrize("name", ["../evil", "/evil", "WNLI/../../evil", "C:/evil", "..\\evil"])
def test_zip_that_leads_outside(script, wnli, tmp_path, caplog, name):
    wnli.files["/glue/data/WNLI.zip"] = make_zip(wnli_files() | {name: "evil"})
    assert run(script, wnli, tmp_path / "data") == 1
    assert "names a path outside" in caplog.records[-1].message
    assert names(tmp_path) == ["data"]
    assert names(tmp_path / "data") == []


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (wnli_files(WNLI_ROWS | {"dev": 70}), "WNLI/dev.tsv: expected 71 rows, found 70;"),
        ({"elsewhere/train.tsv": "x"}, "WNLI/train.tsv is missing;"),
        (
            wnli_files() | {"WNLI/dev.tsv": "index\tsentence1\tsentence2\tlabel\n0\ta\tb\n"},
            "WNLI/dev.tsv:2: expected 4 tab-separated columns, found 3;",
        ),
    ],
)
def test_zip_with_other_data(script, wnli, tmp_path, caplog, members, message):
    wnli.files["/glue/data/WNLI.zip"] = make_zip(members)
    assert run(script, wnli, tmp_path) == 1
    assert message in caplog.records[-1].message
    assert names(tmp_path) == []


def test_incomplete_folder_is_left_alone(script, wnli, tmp_path, caplog):
    (tmp_path / "WNLI").mkdir()
    (tmp_path / "WNLI" / "notes.txt").write_text("mine")
    assert run(script, wnli, tmp_path) == 1
    assert "WNLI/train.tsv is missing" in caplog.records[-1].message
    assert names(tmp_path / "WNLI") == ["notes.txt"]
    assert wnli.log == []


def test_a_failed_task_does_not_stop_the_others(script, wnli, tmp_path):
    assert run(script, wnli, tmp_path, "RTE,WNLI") == 1
    assert names(tmp_path) == ["WNLI"]


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        ("all", "CoLA SST MRPC QQP STS MNLI QNLI RTE WNLI diagnostic"),
        ("sst-2, STS-B,cola", "SST STS CoLA"),
        ("ax,rte,RTE", "diagnostic RTE"),
        ("SST2 stsb, MRPC", "SST STS MRPC"),
    ],
)
def test_task_names(script, names, keys):
    assert list(script.parse_tasks(names)) == keys.split()


@pytest.mark.parametrize("tasks", ["WNLI,SNLI", "", ",", "mnli-mm"])
def test_unknown_task(script, wnli, tmp_path, capsys, tasks):
    with pytest.raises(SystemExit) as stop:
        run(script, wnli, tmp_path, tasks)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "task" in line
    assert wnli.log == []


def test_errors_and_help_list_glues_names(script, capsys):
    for arguments in (["--tasks", "SNLI"], ["--help"]):
        with pytest.raises(SystemExit):
            script.main(arguments)
        printed = "".join(capsys.readouterr())
        assert "CoLA, SST-2, MRPC, QQP, STS-B, MNLI," in " ".join(printed.split())


def test_tasks_may_be_separate_arguments(script, wnli, tmp_path):
    wnli.log.clear()
    arguments = ["--data_dir", str(tmp_path), "--base_url", wnli.url]
    assert script.main([*arguments, "--tasks", "WNLI", "wnli"]) == 0
    assert names(tmp_path) == ["WNLI"]


def test_help_to_a_closed_pipe_is_no_error():
    command = [sys.executable, str(SCRIPT), "--help"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() in (0, 141)  # some versions of argparse ignore the error


def test_a_file_that_the_user_put_there_is_not_downloaded(script, wnli, tmp_path, caplog):
    archive = wnli.files.pop("/glue/data/WNLI.zip")
    assert run(script, wnli, tmp_path) == 1
    message = caplog.records[-1].getMessage()
    assert message.startswith("WNLI: ")
    assert message.endswith(f"; run again, or put the file at {tmp_path / 'WNLI.zip'} yourself")
    (tmp_path / "WNLI.zip").write_bytes(archive)
    assert run(script, wnli, tmp_path) == 0
    assert names(tmp_path) == ["WNLI", "WNLI.zip"]


def test_a_wrong_file_that_the_user_put_there_is_kept(script, wnli, tmp_path, caplog):
    """It might not be possible to download it again."""
    path = tmp_path / "WNLI.zip"
    path.write_bytes(truncated(wnli.files.pop("/glue/data/WNLI.zip")))
    before = path.read_bytes()
    assert run(script, wnli, tmp_path) == 1
    message = caplog.records[-1].getMessage()
    assert message.startswith("WNLI: WNLI.zip is damaged: ")
    way_out = f"; remove {path} to download it again, or put the published file there"
    assert message.endswith(way_out)
    assert names(tmp_path) == ["WNLI.zip"]
    assert path.read_bytes() == before


def test_a_file_instead_of_the_folder_is_an_error_of_one_line(tmp_path):
    (tmp_path / "file").touch()
    command = [sys.executable, str(SCRIPT), "--data_dir", "file"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    expected = "download_glue_data.py: error: file: is a file, where a folder is needed\n"
    assert (ended.returncode, ended.stderr) == (1, expected)


def test_unusable_base_url(script, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script.main(["--data_dir", str(tmp_path), "--base_url", "ftp://somewhere"])
    assert "not an http or https address" in capsys.readouterr().err


def test_every_release_names_every_split(script):
    for key, release in script.RELEASES.items():
        assert set(release.rows) == set(glue_task(key).files)


def test_diagnostic(script, mirror, tmp_path):
    lines = ["index\tsentence1\tsentence2", *(f"{i}\ta\tb" for i in range(1104))]
    mirror.files["/glue/data/AX.tsv"] = "\n".join(lines).encode()
    assert run(script, mirror, tmp_path, "diagnostic") == 0
    assert names(tmp_path) == ["diagnostic"]
    assert len(load_glue_split("ax", tmp_path, "test")) == 1104


def msr_part(count: int) -> bytes:
    rows = (f"{i % 2}\t{i}\t{i + 10_000}\tfirst {i}\tsécond {i}" for i in range(count))
    return "\r\n".join((MRPC_HEADER, *rows)).encode("utf-8-sig")


@pytest.fixture
def mrpc(mirror):
    ids = "".join(f"{i}\t{i + 10_000}\n" for i in range(10, 4076, 10))
    mirror.files = {
        "/senteval/senteval_data/msr_paraphrase_train.txt": msr_part(4076),
        "/senteval/senteval_data/msr_paraphrase_test.txt": msr_part(1725),
        "/glue/data/mrpc_dev_ids.tsv": (ids + "1\t10001\n").encode(),
    }
    return mirror


def assert_mrpc(folder: Path) -> None:
    dev = (folder / "MRPC" / "dev.tsv").read_bytes().decode().splitlines()
    assert dev[:2] == [MRPC_HEADER, "1\t1\t10001\tfirst 1\tsécond 1"]
    train = (folder / "MRPC" / "train.tsv").read_bytes().decode().splitlines()
    assert train[:3] == [
        MRPC_HEADER,
        "0\t0\t10000\tfirst 0\tsécond 0",
        "0\t2\t10002\tfirst 2\tsécond 2",
    ]
    test = (folder / "MRPC" / "test.tsv").read_bytes().decode().splitlines()
    assert test[0] == MRPC_HEADER.replace("Quality", "index")
    assert test[6] == "5\t5\t10005\tfirst 5\tsécond 5"
    assert load_glue_split("mrpc", folder, "test")[5].label is None
    assert load_glue_split("mrpc", folder, "train")[1].label == "0"


def test_mrpc(script, mrpc, tmp_path):
    assert run(script, mrpc, tmp_path, "MRPC") == 0
    assert names(tmp_path) == ["MRPC"]
    assert_mrpc(tmp_path)


@pytest.mark.parametrize("ids", [None, "mrpc_dev_ids.tsv", "dev_ids.tsv"])
def test_mrpc_from_own_files(script, mrpc, tmp_path, ids):
    own = tmp_path / "own"
    own.mkdir()
    for path, content in mrpc.files.items():
        name = path.rpartition("/")[2]
        if name.endswith(".txt"):
            (own / name).write_bytes(content)
        elif ids is not None:
            (own / ids).write_bytes(content)
    before = names(own)
    assert run(script, mrpc, tmp_path / "data", "MRPC", "--path_to_mrpc", str(own)) == 0
    assert mrpc.paths() == ([] if ids else ["/glue/data/mrpc_dev_ids.tsv"])
    assert names(own) == before
    assert_mrpc(tmp_path / "data")


def test_mrpc_without_dev_ids(script, mrpc, tmp_path, caplog):
    del mrpc.files["/glue/data/mrpc_dev_ids.tsv"]
    assert run(script, mrpc, tmp_path, "MRPC") == 1
    assert "mrpc_dev_ids.tsv: HTTP 404" in caplog.records[-1].message
    assert "--path_to_mrpc" in caplog.records[-1].message
    assert "MRPC" not in names(tmp_path)


def test_mrpc_own_files_missing(script, mrpc, tmp_path, caplog):
    assert run(script, mrpc, tmp_path, "MRPC", "--path_to_mrpc", str(tmp_path)) == 1
    assert "msr_paraphrase_train.txt: no such file" in caplog.records[-1].message
