"""Tests of a run's output folder: made, locked, cleared, and removed if nothing was written."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from loralib.errors import TrainingError
from loralib.io.atomic import atomic_write
from loralib.training import output
from loralib.training.locks import sole_use
from loralib.training.output import appears, check_shared, output_folder, remove_folder


def test_a_folder_is_made_and_stays_if_something_is_written(tmp_path):
    folder = tmp_path / "a" / "out"
    with output_folder(folder, 0, 1):
        (folder / "model.pt").write_text("trained")
    assert [path.name for path in folder.iterdir()] == ["model.pt"]


def test_a_new_folder_is_removed_if_nothing_is_written(tmp_path):
    with pytest.raises(ValueError, match="bad flag"), output_folder(tmp_path / "out", 0, 1):
        raise ValueError("bad flag")
    assert list(tmp_path.iterdir()) == []


def test_the_folder_may_be_removed_during_the_run(tmp_path):
    with output_folder(tmp_path / "out", 0, 1):
        shutil.rmtree(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_that_existed_before_stays(tmp_path):
    with output_folder(tmp_path, 0, 1):
        pass
    assert tmp_path.is_dir()


def test_half_written_files_are_removed(tmp_path, monkeypatch):
    kept = {"model.4.pt", ".notes.txt", ".photo.jpg.backup_1.jpg", ".my.settings", ".shared.notes"}
    for name in kept:
        (tmp_path / name).touch()
    monkeypatch.setattr(Path, "unlink", lambda *given, **more: None)  # as if killed
    for name in ("model.4.pt", "curves.png", "results"):
        with suppress(KeyboardInterrupt), atomic_write(tmp_path / name):
            raise KeyboardInterrupt
    monkeypatch.undo()
    (tmp_path / ".shared.01234567").touch()
    (tmp_path / ".folder.half").mkdir()
    (tmp_path / ".folder.half" / "file").touch()
    assert len([*tmp_path.iterdir()]) == len(kept) + 5
    with output_folder(tmp_path, 0, 1, [".folder.*"]):
        left = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".lock")}
    assert left == kept


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX's limits")
def test_what_safetensors_has_half_written_is_removed(tmp_path):
    """It writes under a name of its own, which becomes the temporary name that it was given."""
    code = (
        "import resource, signal, sys, numpy, safetensors.numpy\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # a longer file kills the process\n"
        "safetensors.numpy.save_file({'a': numpy.zeros(1000)}, sys.argv[1])"
    )
    path = tmp_path / ".model.safetensors.half-aaaaaaaa.safetensors"
    path.touch()
    killed = subprocess.run([sys.executable, "-c", code, path])
    assert killed.returncode == -signal.SIGXFSZ
    with output_folder(tmp_path, 0, 1):
        left = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".lock")}
    assert left == set()


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX's links")
def test_of_a_link_to_a_folder_only_the_link_is_removed(tmp_path, caplog):
    """A checkpoint may have been moved to a disk with more room."""
    moved, link = tmp_path / "moved", tmp_path / "link"
    moved.mkdir()
    link.symlink_to(moved)
    remove_folder(link)
    assert [*tmp_path.iterdir()] == [moved]
    assert not caplog.messages


def test_a_folder_that_cannot_be_removed_is_a_warning(tmp_path, monkeypatch, caplog):
    """Such as one with another user's files."""

    def rmtree(folder):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "file")

    (tmp_path / ".folder.half").mkdir()
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    with output_folder(tmp_path, 0, 1, [".folder.*"]):
        pass
    assert caplog.messages == [f"{tmp_path}/.folder.half cannot be removed: Permission denied"]


def test_another_run_is_kept_out(tmp_path):
    with (
        output_folder(tmp_path, 0, 1),
        pytest.raises(TrainingError, match="another run is writing there"),
        output_folder(tmp_path, 0, 1),
    ):
        pytest.fail("both runs hold the folder")
    with sole_use(tmp_path):
        pass


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX's links")
@pytest.mark.parametrize("name", ["out", "out/run"])
def test_the_error_names_a_broken_link(tmp_path, name):
    (tmp_path / "out").symlink_to("nowhere")
    is_a_link = pytest.raises(FileNotFoundError, match="out is a link to nowhere, which does not")
    with is_a_link, output_folder(tmp_path / name, 0, 1):
        pytest.fail("there is no folder")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "nowhere").mkdir()
    with output_folder(tmp_path / name, 0, 1):
        assert (tmp_path / "out").is_symlink()


def test_a_file_cannot_be_the_folder(tmp_path):
    (tmp_path / "out").write_text("mine")
    is_a_file = pytest.raises(NotADirectoryError, match="out is a file")
    with is_a_file, output_folder(tmp_path / "out", 0, 1):
        pytest.fail("there is no folder")
    assert (tmp_path / "out").read_text() == "mine"


def test_the_error_names_a_folder_without_write_permission(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    message = f"^{re.escape(str(tmp_path))}: no permission to write there; give another folder$"
    with pytest.raises(PermissionError, match=message), output_folder(tmp_path, 0, 1):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.EROFS, "Read-only file system", "out"), "out: Read-only file system"),
        (TrainingError("out: another run is writing there"),) * 2,
    ],
)
def test_other_processes_get_the_first_one_s_error_in_the_same_words(
    tmp_path, monkeypatch, error, line
):
    def refuse(_):
        raise error

    told = []
    monkeypatch.setattr(output, "sole_use", refuse)
    monkeypatch.setattr(output, "gather_objects", lambda *given: told.append(given[0]) or told)
    with pytest.raises(type(error)), output_folder(tmp_path, 0, 2):
        pass
    assert told == [str(line)]


@pytest.mark.parametrize("problem", [None, "no room"])
def test_other_processes_use_the_folder_that_the_first_one_makes(tmp_path, monkeypatch, problem):
    """They check that they see it, or end with the first one's error."""
    checked, folder = [], tmp_path / "out"
    monkeypatch.setattr(output, "gather_objects", lambda *_: [problem, None])
    monkeypatch.setattr(output, "check_shared", lambda *given: checked.append(given))
    if problem is None:
        with output_folder(folder, 1, 2):
            assert checked == [(folder, 2)]
            assert not folder.exists()
    else:
        with pytest.raises(TrainingError, match=r"^no room$"), output_folder(folder, 1, 2):
            pass
        assert not checked
    assert not folder.exists()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("blind", [[], [1], [2, 0]])
def test_the_error_names_processes_that_do_not_see_the_first_ones_folder(
    tmp_path, monkeypatch, rank, blind
):
    """The first one puts a file there, and removes it afterwards."""
    gathered, files_there = [["token"] * 3], []
    monkeypatch.setattr(output, "gather_objects", lambda *_: gathered.pop(0))
    monkeypatch.setattr(output.dist, "get_rank", lambda: rank)
    monkeypatch.setattr(output, "barrier", lambda _: files_there.append([*tmp_path.iterdir()]))
    monkeypatch.setattr(output, "appears", lambda path: path in files_there[0])
    gathered.append([(number not in blind, f"host {number % 2}") for number in range(3)])
    if blind:
        hosts = ["host 1"] if blind == [1] else ["host 0"]
        named = f"for process {', '.join(map(str, sorted(blind)))} \\(on {', '.join(hosts)}\\)"
        with pytest.raises(TrainingError, match=named):
            check_shared(tmp_path, 3)
    else:
        check_shared(tmp_path, 3)
    assert [len(files) for files in files_there] == [rank == 0]
    assert not [*tmp_path.iterdir()]
    check_shared(tmp_path, 1)


@pytest.mark.parametrize(("late", "seen"), [(0, True), (9, True), (11, False)])
def test_a_file_may_appear_late(tmp_path, monkeypatch, late, seen):
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds
        assert now[0] < 60, "it waits without end"
        if now[0] > late:
            (tmp_path / "file").touch()

    monkeypatch.setattr(output, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    if late == 0:
        (tmp_path / "file").touch()
    assert appears(tmp_path / "file") == seen
    assert min(late, 10) <= now[0] < min(late, 10) + 0.5
