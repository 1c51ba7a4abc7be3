"""Tests of atomic writes: of files and folders, through links, into pipes, and on full disks."""

import errno
import os
import re
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import zipfile
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch

from loralib.errors import CheckpointError, DiskFullError
from loralib.io import atomic
from loralib.io.atomic import (
    atomic_write,
    atomic_write_folder,
    check_apart,
    naming_file,
    replacing_folder,
)
from loralib.io.tensors import read_tensors, write_tensors, write_torch, write_wrapped_tensors

posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX's links, pipes and devices")


def write(path, text: str = "new") -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(text)


def fail(path, error: Exception) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text("half")
        raise error


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- regular files and links ----


def test_a_file_is_replaced_atomically_and_keeps_its_permissions(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")
    path.chmod(0o640)
    with open(path) as before:
        with atomic_write(path) as temporary:
            # The old file's readers may be few, so the new content has none until it is complete.
            assert os.name != "posix" or stat.S_IMODE(temporary.stat().st_mode) == 0o600
            temporary.write_text("new")
        assert before.read() == "old"  # a reader still has the old content
    assert path.read_text() == "new"
    assert os.name != "posix" or stat.S_IMODE(path.stat().st_mode) == 0o640
    with pytest.raises(KeyError):
        fail(path, KeyError())
    assert path.read_text() == "new"
    assert names(tmp_path) == ["file.txt"]


def test_the_temporary_file_has_the_same_folder_and_suffix(tmp_path):
    path = tmp_path / "file.txt"
    for content in ("first", "second"):
        with atomic_write(path) as temporary:
            assert temporary.parent == path.parent
            assert temporary.suffix == ".txt"
            assert path.exists() == (content == "second")
            temporary.write_text(content)
        assert path.read_text() == content
    assert names(tmp_path) == ["file.txt"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("there", [True, False])
def test_an_interrupted_write_leaves_the_old_file_or_none(tmp_path, error, there):
    path = tmp_path / "file.txt"
    if there:
        path.write_text("old")

    def write():
        with atomic_write(path) as temporary:
            temporary.write_text("half of the n")
            raise error

    with pytest.raises(error):
        write()
    assert names(tmp_path) == (["file.txt"] if there else [])
    assert not there or path.read_text() == "old"


def test_a_folder_is_written_atomically(tmp_path):
    path = tmp_path / "new" / "er" / "a"
    with atomic_write_folder(path) as folder:
        assert not path.exists()
        (folder / "x").write_text("x")
    assert {*tmp_path.rglob("*")} == {path.parents[1], path.parent, path, path / "x"}


def give_default_acl(folder: Path) -> None:
    """Has new files in a folder belong to another group as well, and to nobody else, on Linux."""
    nobody = 2**32 - 1
    entries = [(1, 7, nobody), (4, 5, nobody), (8, 7, 1234), (16, 7, nobody), (32, 0, nobody)]
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    with suppress(OSError, AttributeError):  # on other systems, and some file systems
        os.setxattr(folder, "system.posix_acl_default", acl)


@posix
@pytest.mark.parametrize("shared", [False, True])
def test_new_ones_have_the_permissions_of_any_new_file_or_folder(tmp_path, shared):
    """By the umask, or where a group shares the folder, by its access control list and setgid."""
    if shared:
        tmp_path.chmod(0o2777)
        give_default_acl(tmp_path)
    before = os.umask(0o026)
    try:
        (tmp_path / "file").touch()
        (tmp_path / "folder").mkdir()
        for made, write in (("file", atomic_write), ("folder", atomic_write_folder)):
            with write(tmp_path / "a") as temporary:
                own = temporary.with_name("own")  # as safetensors makes one
                if made == "file":
                    os.close(os.open(own, os.O_CREAT, 0o600))
                    own.replace(temporary)
            assert oct((tmp_path / "a").stat().st_mode) == oct((tmp_path / made).stat().st_mode)
            (tmp_path / "a").rename(tmp_path / f"written {made}")
    finally:
        os.umask(before)


def test_a_folder_is_synced_with_its_files_before_it_gets_its_name(tmp_path, monkeypatch):
    """Otherwise it could be empty after a power cut."""
    path, synced = tmp_path / "a", []
    monkeypatch.setattr(atomic, "sync_file", lambda file: synced.append((file.name, path.exists())))
    monkeypatch.setattr(
        atomic, "sync_folder", lambda folder: synced.append((folder.name, path.exists()))
    )
    with atomic_write_folder(path) as folder:
        (folder / "x").write_text("x")
    assert synced == [("x", False), (folder.name, False), (tmp_path.name, True)]


def test_a_folder_that_cannot_get_its_name_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    def replace(temporary, path):
        raise OSError(errno.EXDEV, "a link between two disks", str(path))

    monkeypatch.setattr(Path, "replace", replace)
    with (
        pytest.raises(OSError, match="two disks"),
        atomic_write_folder(tmp_path / "a"),
    ):
        pass
    assert names(tmp_path) == []


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_need_not_have_permissions(tmp_path, monkeypatch, code):
    """Those of many USB sticks and network folders have none."""

    def chmod(path, mode):
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(Path, "chmod", chmod)
    for _ in range(2):
        write(tmp_path / "file")
    with atomic_write_folder(tmp_path / "folder"):
        pass
    assert names(tmp_path) == ["file", "folder"]


@posix
def test_the_next_call_removes_the_half_folder_of_a_killed_process(tmp_path):
    code = (
        "import os, signal, sys; from loralib.io.atomic import atomic_write_folder as write\n"
        "with write(sys.argv[1]) as path:\n"
        "    (path / 'x').touch(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")])
    assert killed.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".a.half-")
    other = tmp_path / ".b.half-aaaaaaaa"
    other.mkdir()
    new = tmp_path / ".a.half-aaaaaaaa"
    new.mkdir()  # maybe of a process that is about to lock it
    for folder in (left, other):
        os.utime(folder, (0, 0))
    with atomic_write_folder(tmp_path / "a"):
        pass
    assert {*tmp_path.iterdir()} == {tmp_path / "a", other, new}


@posix
@pytest.mark.parametrize("error", [PermissionError, FileNotFoundError])
def test_a_half_folder_that_cannot_be_opened_is_left_alone(tmp_path, monkeypatch, error):
    """It belongs to another user, or its process has removed it meanwhile."""
    left = tmp_path / ".a.half-aaaaaaaa"
    left.mkdir()
    os.utime(left, (0, 0))
    really_open = os.open

    def refusing(path, *arguments, **settings):
        if path == left:
            raise error(errno.EACCES, "refused")
        return really_open(path, *arguments, **settings)

    monkeypatch.setattr(os, "open", refusing)
    with atomic_write_folder(tmp_path / "a"):
        pass
    assert {*tmp_path.iterdir()} == {tmp_path / "a", left}


@posix
def test_links_in_a_circle_are_not_replaced_by_a_folder(tmp_path):
    path = tmp_path / "a"
    path.symlink_to(path)
    with pytest.raises(NotADirectoryError), atomic_write_folder(path):
        pass
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("as_file", [True, False])
def test_a_folder_that_appears_meanwhile_is_not_replaced(tmp_path, as_file):
    path = tmp_path / "a"

    def write_while_it_appears() -> None:
        with atomic_write_folder(path) as first:
            (first / "x").touch()
            os.utime(first, (0, 0))
            if as_file:
                path.write_text("mine")
                return
            with atomic_write_folder(path) as second:
                assert first.exists()  # although it is old: its process holds the lock
                (second / "y").touch()

    with pytest.raises(CheckpointError, match="a: exists already; give the name of a new folder"):
        write_while_it_appears()
    assert [*tmp_path.iterdir()] == [path]
    assert path.is_file() if as_file else [*path.iterdir()] == [path / "y"]


@pytest.mark.parametrize("there", [True, False])
def test_replacing_folder_replaces_a_folder_at_the_end(tmp_path, there):
    path, temporary = tmp_path / "a", tmp_path / ".a.unfinished"
    for folder in (temporary, *([path] if there else [])):
        folder.mkdir()
        (folder / "old").write_text("old")
    with replacing_folder(path, temporary):
        assert path.exists() == there
        (temporary / "x").write_text("x")
    assert names(tmp_path) == ["a"]
    assert names(path) == ["x"]


@posix
@pytest.mark.parametrize("kind", ["a file", "a link", "a link into nothing"])
def test_replacing_folder_replaces_what_is_not_a_folder(tmp_path, kind):
    path, other = tmp_path / "a", tmp_path / "other"
    if kind == "a file":
        path.write_text("old")
    else:
        path.symlink_to(other)
    if kind == "a link":  # to a disk with more room
        other.mkdir()
    kept = names(tmp_path)
    with replacing_folder(path, tmp_path / ".a.unfinished"):
        (tmp_path / ".a.unfinished" / "x").write_text("x")
    assert names(tmp_path) == kept
    assert not path.is_symlink()
    assert names(path) == ["x"]


@pytest.mark.parametrize("there", [True, False])
def test_replacing_folder_works_after_a_kill_during_replacement(tmp_path, there):
    """The old folder had been renamed; the new one may have taken its place already."""
    path, temporary = tmp_path / "a", tmp_path / ".a.unfinished"
    for folder in (tmp_path / ".a.replaced", *([path] if there else [])):
        folder.mkdir()
        (folder / "old").write_text("old")
    with replacing_folder(path, temporary):
        (temporary / "x").write_text("x")
    assert names(tmp_path) == ["a"]
    assert names(path) == ["x"]


@pytest.mark.parametrize("there", [True, False])
def test_a_folder_that_does_not_fit_on_the_disk_leaves_nothing(tmp_path, there):
    """The error names the final folder, not the temporary one."""
    path, temporary = tmp_path / "a", tmp_path / ".a.unfinished"
    if there:
        path.mkdir()

    def replace():
        with replacing_folder(path, temporary):
            (temporary / "x").write_text("x")
            fail(temporary / "y", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    with pytest.raises(DiskFullError, match=re.escape(f"{path}: the disk is full")):
        replace()
    assert names(tmp_path) == (["a"] if there else [])


@pytest.mark.parametrize("needed", [5000, None])
def test_a_folder_takes_the_space_of_all_its_files(tmp_path, needed):
    """Those written before are removed, so that the disk has room for each file by itself."""
    temporary = tmp_path / ".unfinished"
    full = OSError(errno.ENOSPC, "") if needed is None else DiskFullError(temporary / "y", needed)

    def replace():
        with replacing_folder(tmp_path / "a", temporary):
            (temporary / "inner").mkdir()
            (temporary / "inner" / "x").write_bytes(b"x" * 70_000)
            raise full

    with pytest.raises(DiskFullError) as caught:
        replace()
    least = 70_000 + (needed or 0)
    assert least <= caught.value.needed < 2 * least  # in blocks of the disk


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("named", [True, False])
def test_errors_of_writing_an_open_file_name_it(tmp_path, code, named):
    path = tmp_path / "log"
    error = OSError(code, os.strerror(code), *(["other"] if named else []))
    with pytest.raises(OSError, match="other" if named else re.escape(str(path))) as caught:  # noqa: SIM117
        with naming_file(path):
            raise error
    assert (caught.value is error) is named
    is_full = code in (errno.ENOSPC, errno.EDQUOT)
    assert isinstance(caught.value, DiskFullError) is (is_full and not named)


@posix
@pytest.mark.parametrize("links", [1, 2])
@pytest.mark.parametrize("exists", [True, False])
def test_links_stay_and_their_targets_are_replaced(tmp_path, links, exists):
    target = tmp_path / "there" / "file.txt"
    target.parent.mkdir()
    if exists:
        target.write_text("old")
    path = tmp_path / "link"
    path.symlink_to("there/file.txt")
    if links == 2:
        path = tmp_path / "second"
        path.symlink_to(tmp_path / "link")
    inode = target.stat().st_ino if exists else None
    write(path)
    assert path.is_symlink()
    assert not target.is_symlink()
    assert target.read_text() == "new"
    assert target.stat().st_ino != inode
    assert names(target.parent) == ["file.txt"]


def unwritable_path(folder: Path, kind: str) -> Path:
    """Makes a path to which no file can be written."""
    path = folder / "path"
    if kind == "folder":
        path.mkdir()
    elif kind == "no folder":
        path = folder / "missing" / "path"
    elif kind == "within a file":
        (folder / "file").write_text("mine")
        path = folder / "file" / "path"
    elif kind == "link to a folder":
        (folder / "there").mkdir()
        path.symlink_to(folder / "there")
    elif kind == "link into nothing":
        path.symlink_to(folder / "missing" / "file")
    else:
        path.symlink_to(folder / "other")
        (folder / "other").symlink_to(path)
    return path


@posix
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("folder", "is a folder, not a file"),
        ("no folder", "there is no folder {}/missing"),
        ("within a file", "there is no folder {}/file"),
        ("link to a folder", "is a link to {}/there, which is a folder"),
        ("link into nothing", "is a link to {0}/missing/file, there is no folder {0}/missing"),
        ("links in a circle", "Too many levels of symbolic links"),
    ],
)
def test_the_error_says_why_a_path_cannot_be_written(tmp_path, kind, reason):
    path = unwritable_path(tmp_path, kind)
    before = names(tmp_path)
    with pytest.raises(OSError, match=re.escape(reason.format(tmp_path))) as caught:
        write(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert names(tmp_path) == before


AS_NOBODY = """
import os, sys
from loralib.io.atomic import atomic_write, atomic_write_folder, check_writable
if os.geteuid() == 0:
    os.setuid(65534)
try:
    if sys.argv[1].endswith("/asked"):
        check_writable(sys.argv[1])
    elif sys.argv[1].endswith("/new_folder"):
        with atomic_write_folder(sys.argv[1]) as path:
            (path / "file").write_text("new")
    else:
        with atomic_write(sys.argv[1]) as path:
            path.write_text("new")
except PermissionError as error:
    print(error)
"""


@pytest.mark.slow
@posix
def test_errors_name_files_and_folders_without_permission():
    """In a process that is not root's, because root may write everywhere."""

    def run_as_nobody(path: Path) -> str:
        command = [sys.executable, "-c", AS_NOBODY, str(path)]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stdout

    with tempfile.TemporaryDirectory() as name:  # pytest's belong to one user
        folder, file = Path(name), Path(name, "file")
        file.write_text("old")
        folder.chmod(0o777)
        file.chmod(0o444)
        assert run_as_nobody(file) == f"{file}: is read-only; give another name\n"
        folder.chmod(0o555)
        for other in (folder / "asked", folder / "other"):
            assert (
                run_as_nobody(other)
                == f"{folder}: no permission to write there; give another folder\n"
            )
        other = folder / "new_folder"
        assert run_as_nobody(other) == f"[Errno 13] Permission denied: '{other}'\n"
        assert file.read_text() == "old"
        folder.chmod(0o777)
        file.chmod(0o666)
        assert run_as_nobody(file) == ""
        assert file.read_text() == "new"


def refusal(outputs, inputs) -> str:
    """Returns why `check_apart` refuses the last output, or "" if it does not."""
    try:
        check_apart(outputs, inputs)
    except ValueError as error:
        return str(error).removeprefix(f"{outputs[-1]}: ")
    return ""


@posix
def test_outputs_must_differ_from_inputs_and_from_each_other(tmp_path):
    file, new, other = tmp_path / "file", tmp_path / "new", tmp_path / "other"
    for path in (file, other):
        path.write_text("read")
    (tmp_path / "link").symlink_to(file)
    (tmp_path / "to_new").symlink_to(new)
    (tmp_path / "hard").hardlink_to(file)
    for name in (file, tmp_path / "link", tmp_path / "hard", f"{tmp_path}/x/../file"):
        assert refusal([name], [other, file]).startswith("is an input as well")
        assert refusal([new, file, name], []).startswith("is another output as well")
    assert refusal([new, tmp_path / "to_new"], []).startswith("is another output as well")
    assert refusal([new, tmp_path / "more"], [file, other]) == ""
    for stream in ("/dev/null", "/dev/stdout"):
        assert refusal([stream, stream], [stream]) == ""


# ---- pipes, devices, open files ----


@posix
def test_a_pipe_gets_the_content_once_it_is_complete(tmp_path):
    path, read = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()))
    reader.start()
    content = b"x" * 200_000  # more than a pipe holds
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)
        assert reader.is_alive()
    reader.join(60)
    assert read == [content]
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert names(tmp_path) == ["pipe"]


@pytest.mark.parametrize("name", ["1", "fd/1"])
def test_a_file_whose_name_is_a_number_is_no_open_file(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    write(path)
    assert path.read_text() == "new"


@posix
def test_devices_stay_devices(tmp_path):
    before = os.stat("/dev/null")
    write("/dev/null")
    (tmp_path / "link").symlink_to("/dev/null")
    write(tmp_path / "link")
    after = os.stat("/dev/null")
    assert (after.st_mode, after.st_rdev, after.st_ino) == (
        before.st_mode,
        before.st_rdev,
        before.st_ino,
    )
    assert stat.S_ISCHR(after.st_mode)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_device_is_an_error_that_names_it():
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write("/dev/full")


TO_STDOUT = """
import sys
from loralib.io.atomic import atomic_write
print("before")
with atomic_write(sys.argv[1]) as path:
    path.write_text("content\\n")
print("after")
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/stdout"), reason="needs /dev/stdout")
@pytest.mark.parametrize("path", ["/dev/stdout", "/dev/fd/1"])
@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_standard_output_gets_the_content_in_order(tmp_path, path, kind):
    """If it is a file, the content is written at the current position, and replaces nothing."""
    command = [sys.executable, "-c", TO_STDOUT, path]
    if kind == "pipe":
        assert subprocess.run(command, stdout=subprocess.PIPE).stdout == b"before\ncontent\nafter\n"
        return
    (tmp_path / "log").write_text("mine\n")
    with open(tmp_path / "log", "ab") as log:
        subprocess.run(command, stdout=log, check=True)
    assert (tmp_path / "log").read_text() == "mine\nbefore\ncontent\nafter\n"
    assert names(tmp_path) == ["log"]


# ---- full disks ----

TENSORS = {"b": torch.arange(300_000.0), "a": torch.ones(7, dtype=torch.bfloat16)}
SIZE = sum(tensor.nbytes for tensor in TENSORS.values())


def write_text(path) -> None:
    write(path, "x" * SIZE)


def write_safetensors(path) -> None:
    write_tensors(path.with_suffix(".safetensors"), TENSORS, {"rank": "8"})


def write_bin(path) -> None:
    write_tensors(path.with_suffix(".bin"), TENSORS)


def write_pt(path) -> None:
    write_wrapped_tensors(path.with_suffix(".pt"), TENSORS, {})


def write_folder(path) -> None:
    with atomic_write_folder(path) as folder:
        write_tensors(folder / "x.safetensors", TENSORS)


def write_text_in_folder(path) -> None:
    with atomic_write_folder(path) as folder:
        (folder / "x.json").write_text("x" * SIZE)


WRITERS = [
    write_text,
    write_safetensors,
    write_bin,
    write_pt,
    write_folder,
    write_text_in_folder,
]

ON_A_SMALL_DISK = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
import test_atomic
for writer in test_atomic.WRITERS:
    folder = Path(sys.argv[1], writer.__name__)
    folder.mkdir()
    for name in ("x.txt", "x.safetensors", "x.bin", "x.pt"):
        (folder / name).write_text("old")
    try:
        writer(folder / ("y" if "folder" in writer.__name__ else "x.txt"))
    except test_atomic.DiskFullError as error:
        print(writer.__name__, error)
    rest = {{path.name: path.read_text() for path in folder.iterdir()}}
    assert rest == dict.fromkeys(("x.txt", "x.safetensors", "x.bin", "x.pt"), "old"), rest
"""


@pytest.fixture
def small_disk(tmp_path):
    """A function that runs a script with a folder on a disk of one MiB, in its own namespace."""
    mount = 'mount -t tmpfs -o size=1m none "$1" && shift && exec "$@"'
    disk = tmp_path / "disk"
    disk.mkdir()
    prefix = ["unshare", "-m", "sh", "-c", mount, "-", str(disk)]
    if not shutil.which("unshare") or subprocess.run([*prefix, "true"]).returncode != 0:
        pytest.skip("needs root, and unshare, to mount a small disk")

    def run(script: str) -> list[str]:
        command = [*prefix, sys.executable, "-c", script, str(disk)]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    return run


@pytest.mark.slow
def test_on_a_full_disk_nothing_is_replaced_and_the_error_says_how_much_is_needed(
    small_disk, tmp_path
):
    script = ON_A_SMALL_DISK.format(path=[str(Path(__file__).parent)])
    lines = dict(line.split(" ", 1) for line in small_disk(script))
    assert lines.keys() == {writer.__name__ for writer in WRITERS}
    for writer, line in lines.items():
        assert line.startswith(f"{tmp_path}/disk/{writer}/")
        path, _, rest = line.partition(": the disk is full: ")
        assert Path(path).stem in ("x", "y")
        needed, _, free = rest.rpartition("the disk has ")
        free = int(free.partition(" bytes free; make room")[0].replace(",", ""))
        assert 0 < free <= 2**20
        if "text" in writer and not needed:
            continue  # it was full before the first byte
        number = int(needed.split()[5].replace(",", ""))
        if "text" in writer:
            assert number <= SIZE
        elif "safetensors" in writer or "folder" in writer:
            assert number == SIZE
        else:
            # The size of the whole file, as torch writes it.
            write_torch(tmp_path / "x.bin", TENSORS)
            assert SIZE < number < SIZE + 10_000
            assert "bin" not in writer or number == (tmp_path / "x.bin").stat().st_size


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_errors_of_the_disk_name_the_file(tmp_path, code):
    path = tmp_path / "file.txt"
    path.write_text("old")
    full = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the user's quota is used up"}
    with pytest.raises(OSError, match=full.get(code, os.strerror(code))) as caught:
        fail(path, OSError(code, os.strerror(code)))
    message = str(caught.value)
    assert str(path) in message
    assert isinstance(caught.value, DiskFullError) is (code in full)
    assert code not in full or "takes at least 4 bytes" in message
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file.txt"]


def test_the_error_of_another_full_disk_is_not_changed(tmp_path):
    """Such as the error of another file, written within the block."""
    other = DiskFullError(tmp_path / "other", 10)
    for written in (atomic_write, atomic_write_folder):
        with pytest.raises(DiskFullError) as caught, written(tmp_path / "mine"):
            raise other
        assert caught.value is other
    assert names(tmp_path) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("what", ["file", "folder", "replaced"])
def test_a_disk_may_take_no_more_files(tmp_path, monkeypatch, what, code):
    """As one whose inodes are used up: it has bytes free, and refuses to create a file."""
    path = tmp_path / what
    writers = {
        "file": (lambda: atomic_write(path), "touch"),
        "folder": (lambda: atomic_write_folder(path), "mkdir"),
        "replaced": (lambda: replacing_folder(path, tmp_path / ".unfinished"), "mkdir"),
    }

    def refuse(made: Path, *_, **__):
        if made != tmp_path:
            raise OSError(code, os.strerror(code), "temporary")

    writer, creates = writers[what]
    monkeypatch.setattr(Path, creates, refuse)
    with pytest.raises(OSError, match=re.escape(str(path))) as caught, writer():
        pass
    assert "temporary" not in str(caught.value)
    assert isinstance(caught.value, DiskFullError) is (code != errno.EROFS)
    assert code == errno.EROFS or "no more files can be created, the disk has" in str(caught.value)


def test_a_disk_may_take_no_more_folders(tmp_path, monkeypatch):
    """The error is one of the new folder, although its parent could not be created."""
    path = tmp_path / "new" / "folder"

    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "temporary")

    monkeypatch.setattr(Path, "mkdir", refuse)
    message = re.escape(f"{path}: the disk is full: no more files can be created")
    with pytest.raises(DiskFullError, match=message):  # noqa: SIM117
        with replacing_folder(path, path.with_name(".unfinished")):
            pass


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("what", ["file", "folder", "replaced"])
def test_a_rename_that_fails_leaves_the_old_content(tmp_path, monkeypatch, what, there):
    """As on network file systems; the error names the final file or folder."""
    path, temporary = tmp_path / what, tmp_path / ".unfinished"
    if there and what == "file":
        path.write_text("old")
    if there and what != "file":
        path.mkdir()
        if what == "replaced":
            (path / "old").touch()
    before = {file: file.is_dir() for file in tmp_path.rglob("*")}
    writers = {
        "file": lambda: atomic_write(path),
        "folder": lambda: atomic_write_folder(path),
        "replaced": lambda: replacing_folder(path, temporary),
    }
    name = "rename" if what == "replaced" else "replace"
    plain = getattr(Path, name)

    def refuse(file, target):
        if target == path and file.suffix != ".replaced":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(file))
        return plain(file, target)

    monkeypatch.setattr(Path, name, refuse)
    with pytest.raises(OSError, match=os.strerror(errno.EBUSY)) as caught, writers[what]():
        pass
    assert caught.value.filename == str(path)
    assert {file: file.is_dir() for file in tmp_path.rglob("*")} == before
    assert not (there and what == "file") or path.read_text() == "old"


def test_a_file_of_a_folder_may_not_be_created(tmp_path):
    """The error names the folder that is to be, not the temporary one."""
    path = tmp_path / "folder"
    message = re.escape(f"{path}: the disk is full: no more files can be created")
    with pytest.raises(DiskFullError, match=message):  # noqa: SIM117
        with replacing_folder(path, tmp_path / ".unfinished"):
            raise DiskFullError(tmp_path / ".unfinished" / "file", None)
    assert names(tmp_path) == []


def test_a_disk_can_be_full_before_anything_is_written(tmp_path):
    message = (
        "file.txt: the disk is full: the disk has [0-9,]+ bytes free; make room and start again"
    )
    with pytest.raises(DiskFullError, match=message), atomic_write(tmp_path / "file.txt"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@posix
@pytest.mark.parametrize("code", [errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOTTY])
def test_a_folder_need_not_support_syncing(tmp_path, monkeypatch, code):
    """Some network file systems do not."""
    fail_for_folders(monkeypatch, "fsync", code)
    write(tmp_path / "file")
    with atomic_write_folder(tmp_path / "folder"):
        pass
    assert names(tmp_path) == ["file", "folder"]


@posix
def test_a_folder_that_cannot_be_listed_can_be_written_to(tmp_path, monkeypatch):
    fail_for_folders(monkeypatch, "open", errno.EACCES)
    write(tmp_path / "file")
    assert names(tmp_path) == ["file"]


@posix
def test_a_disk_error_on_syncing_names_the_folder(tmp_path, monkeypatch):
    fail_for_folders(monkeypatch, "fsync", errno.EIO)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)) as caught:
        write(tmp_path / "file")
    assert caught.value.filename == str(tmp_path)


@posix
@pytest.mark.parametrize("code", [None, errno.ENOTSUP, errno.EIO])
def test_on_a_mac_files_are_synced_to_the_disk(tmp_path, monkeypatch, code):
    """fsync does not wait for the disk there; F_FULLFSYNC does, if the file system supports it."""
    called = []

    def fcntl(handle: int, command: int) -> None:
        called.append(command)
        if code is not None:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(atomic.fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(atomic.fcntl, "fcntl", fcntl)
    monkeypatch.setattr(os, "fsync", lambda handle: called.append("fsync"))
    with pytest.raises(OSError, match="file") if code == errno.EIO else nullcontext():
        write(tmp_path / "file")
    # Once for the file, once for its folder.
    assert called == {None: [51, 51], errno.ENOTSUP: [51, "fsync"] * 2, errno.EIO: [51]}[code]


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs Linux's list of open files")
def test_no_file_stays_open(tmp_path):
    """A run that writes thousands of files must not reach the system's limit."""

    def left_open():
        paths = []
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the list's own file, and those of other threads
                paths.append(os.readlink(f"/proc/self/fd/{number}"))
        return [path for path in paths if path.startswith(str(tmp_path))]

    with open(tmp_path / "seen", "w"):
        assert left_open() == [str(tmp_path / "seen")]
    write(tmp_path / "file")
    left = tmp_path / ".folder.half-aaaaaaaa"
    left.mkdir()
    os.utime(left, (0, 0))
    with atomic_write_folder(tmp_path / "folder"), pytest.raises(RuntimeError):
        fail(tmp_path / "file", RuntimeError())
    with replacing_folder(tmp_path / "a", tmp_path / ".a.unfinished"):
        pass
    assert left_open() == []


def fail_for_folders(monkeypatch, name: str, code: int) -> None:
    """Makes a function of `os` fail for folders."""
    function = getattr(os, name)

    def fails(file, *more, **options):
        if os.path.isdir(file):
            raise OSError(code, os.strerror(code), *(() if isinstance(file, int) else (file,)))
        return function(file, *more, **options)

    monkeypatch.setattr(os, name, fails)


def test_on_windows_a_file_in_use_is_not_replaced(tmp_path, monkeypatch):
    """Such as one whose tensors are memory-mapped."""
    path = tmp_path / "file.txt"
    path.write_text("old")

    def replace(self, target):
        windows.setattr(os, "name", "nt")
        raise PermissionError(errno.EACCES, "Access is denied", str(self), 5, str(target))

    with monkeypatch.context() as windows:
        windows.setattr(Path, "replace", replace)
        with pytest.raises(PermissionError) as caught:
            write(path)
    assert str(caught.value).startswith(f"{path}: is in use, maybe by this process")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file.txt"]


def test_errors_of_other_files_are_not_changed(tmp_path):
    others = (FileNotFoundError(errno.ENOENT, "missing", "another"), ConnectionResetError(104, "x"))
    for error in others:
        with pytest.raises(type(error)) as caught:
            fail(tmp_path / "file", error)
        assert caught.value is error
    assert names(tmp_path) == []


# ---- deterministic bytes ----

METADATA = {
    **{name: name * 2 for name in ("rank", "alpha", "targets", "base", "task", "labels", "form")},
    "odd": '"quoted" \\ é 🙂 \x00\x01\b\f\n\r\t\x1f\x7f\u2028',
}


def test_metadata_of_safetensors_is_sorted_by_name(tmp_path):
    """safetensors itself writes it in an order that differs between processes."""
    reversed_ = dict(reversed(METADATA.items()))
    write_tensors(tmp_path / "a.safetensors", TENSORS, METADATA)
    write_tensors(tmp_path / "b.safetensors", TENSORS, reversed_)
    content = (tmp_path / "a.safetensors").read_bytes()
    assert content == (tmp_path / "b.safetensors").read_bytes()
    places = [content.index(f'"{name}":'.encode()) for name in sorted(METADATA)]
    assert places == sorted(places)
    tensors, metadata = read_tensors(tmp_path / "a.safetensors")
    assert metadata == {**METADATA, "format": "pt"}
    assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())


IN_A_PROCESS = """
import sys
sys.path[:0] = {path!r}
import test_atomic
for writer in (test_atomic.write_safetensors, test_atomic.write_bin, test_atomic.write_pt):
    writer(test_atomic.Path(sys.argv[1], "x"))
"""


@pytest.mark.slow
def test_every_process_writes_the_same_bytes(tmp_path):
    script = IN_A_PROCESS.format(path=[str(Path(__file__).parent)])
    contents = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        subprocess.run([sys.executable, "-c", script, str(folder)], check=True)
        contents.append([(folder / f).read_bytes() for f in ("x.safetensors", "x.bin", "x.pt")])
    assert contents[0] == contents[1]


def test_a_torch_files_content_does_not_depend_on_its_name(tmp_path):
    for name in ("one.bin", "two.pt"):
        write_torch(tmp_path / name, {"value": torch.ones(3), "name": "x"})
    assert (tmp_path / "one.bin").read_bytes() == (tmp_path / "two.pt").read_bytes()
    with zipfile.ZipFile(tmp_path / "one.bin") as archive:
        assert archive.testzip() is None
        assert {name.split("/")[0] for name in archive.namelist()} == {"archive"}
    loaded = torch.load(tmp_path / "one.bin", weights_only=True)
    assert torch.equal(loaded["value"], torch.ones(3))
    assert loaded["name"] == "x"
