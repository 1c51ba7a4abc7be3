"""Tests of fetching files from the hub, with a local server in its place."""

import logging
import os
import re
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import huggingface_hub.constants
import pytest
from hub_process import run_on_hub
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError
from launches import fork_server

import loralib.io.hub as hub_files
from loralib.io.hub import AbsentFileError, fetch_file, is_offline_mode, resolve_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
COPY_IT = "without internet, copy its folder here and give the path instead of the name"
UNCACHED = "'{}' is not a local folder and cannot be fetched: offline mode is on and it is not in "
PRIVATE = "'{}' is neither a local folder nor a model on the hub (a private one needs `hf auth"

# show() prints one line of JSON: a file's content, None, or an error's type and message.
PRELUDE = """
import json, time
time.sleep = lambda seconds: None  # between attempts to reach a hub that is not there
import huggingface_hub
from loralib.io.hub import fetch_file, resolve_file

def show(function, *args, **where):
    try:
        path = function(*args, **where)
        print(json.dumps(path and path.read_text()), flush=True)
    except OSError as error:
        print(json.dumps([type(error).__name__, str(error)]), flush=True)
"""


@pytest.fixture
def hub(hub_server):
    """A hub with a repository that holds only an adapter, and a private one."""
    for name in ("org/adapter", "org/secret"):
        folder = hub_server.root / name
        folder.mkdir(parents=True)
        (folder / CONFIG).write_text("settings")
        (folder / WEIGHTS).write_text("weights")
    hub_server.tokens["org/secret"] = "hf_open"
    return hub_server


def code_to_resolve(*names, repo="org/adapter"):
    return "".join(f"show(resolve_file, {repo!r}, {name!r})\n" for name in names)


def matches(shown, kind, start):
    error, message = shown
    return error == kind and message.startswith(start) and "\n" not in message


@pytest.fixture(autouse=True)
def _reached(monkeypatch):
    """In this process the hub counts as one that has answered, as its library is replaced."""
    monkeypatch.setattr(hub_files, "_reached", {huggingface_hub.constants.ENDPOINT})
    monkeypatch.setattr(hub_files, "_unreached", {})


# ---- without the hub library ----


@pytest.mark.slow
def test_importing_loralib_does_not_import_the_hub_library():
    code = """
import importlib, pkgutil, sys
import loralib
for module in pkgutil.walk_packages(loralib.__path__, "loralib."):
    importlib.import_module(module.name)
assert "loralib.io.hub" in sys.modules
print(sorted(name for name in sys.modules if name.startswith("huggingface_hub")))
"""
    result = fork_server("torch").run(["-c", code], os.environ, 60)
    assert result.stdout == "[]\n", result.stderr


@pytest.mark.parametrize("as_path", [str, lambda path: path], ids=["str", "Path"])
def test_a_folder_needs_no_hub_library(tmp_path, monkeypatch, as_path):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    (tmp_path / "a").write_text("x")
    (tmp_path / "folder").mkdir()
    assert resolve_file(as_path(tmp_path), "a") == tmp_path / "a"
    assert resolve_file(as_path(tmp_path), "b") is None
    assert resolve_file(as_path(tmp_path), "folder") is None


def test_a_missing_hub_library_is_an_error_of_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(OSError, match=r"^'org/tiny' .*: pip install huggingface_hub$") as caught:
        resolve_file("org/tiny", CONFIG)
    assert "\n" not in str(caught.value)


# ---- from the hub, from the cache ----


@pytest.mark.slow
def test_fetched_then_cached_then_offline(hub, tmp_path):
    home, code = tmp_path / "home", code_to_resolve(CONFIG, WEIGHTS, "config.json")
    expected = ["settings", "weights", None]
    assert run_on_hub(hub, home, PRELUDE + code) == expected
    assert len(hub.downloads()) == 2

    hub.requests.clear()
    assert run_on_hub(hub, home, PRELUDE + code) == expected
    assert hub.requests
    assert hub.downloads() == []

    hub.requests.clear()
    assert run_on_hub(hub, home, PRELUDE + code, HF_HUB_OFFLINE="1") == expected
    assert run_on_hub(hub, home, PRELUDE + code, TRANSFORMERS_OFFLINE="1") == expected
    assert hub.requests == []
    # Out of reach without offline mode, the cache's records of absent files are used too.
    code += code_to_resolve("never.asked")
    *shown, never = run_on_hub(hub, home, PRELUDE + code, HF_ENDPOINT="http://127.0.0.1:9")
    assert shown == expected
    refused = "'org/adapter' is not a local folder and cannot be fetched: [Errno 111] Connection"
    assert matches(never, "FileNotFoundError", refused)


@pytest.mark.parametrize("name", ["./model", "/no/such", "~/model", "../a/b", "runs/a/model"])
def test_a_path_is_not_looked_for_on_the_hub(tmp_path, monkeypatch, name):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"^'{re.escape(name)}': no such folder") as raised:
        fetch_file(name, CONFIG)
    is_seen_from_here = name.startswith((".", "runs"))
    assert str(raised.value).endswith(f" (relative to {tmp_path})") == is_seen_from_here


@pytest.mark.parametrize("existing", ["", "runs"])
def test_the_error_says_where_a_name_was_looked_for_as_a_path(tmp_path, monkeypatch, existing):
    (tmp_path / existing).mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    where = f" (relative to {tmp_path})" if existing else ""
    message = f"'runs/moodel' is not a local folder{where} and cannot be fetched"
    with pytest.raises(FileNotFoundError, match=re.escape(message)):
        fetch_file("runs/moodel", CONFIG, cache_dir=str(tmp_path / "cache"))


@pytest.fixture
def refusing_hub(tmp_path, monkeypatch):
    """The hub is asked, but refuses; the working folder is `tmp_path`."""

    def refuse(*args, **kwargs):
        raise ConnectionError

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    hub_files._say_that_the_hub_is_asked.cache_clear()
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("refusing_hub")
def test_the_log_says_that_the_hub_is_asked_for_what_may_be_a_path(tmp_path, caplog):
    """Once for all of a model's files; not offline, and not for a name without a slash."""
    (tmp_path / "here" / "model").mkdir(parents=True)
    caplog.set_level(logging.INFO, logger="loralib")
    paths = ("./runs/moodel", "/no/such", "~/model", "runs/a/model")  # not looked for on the hub
    for name in ("runs/moodel", "runs/moodel", "roberta-base", *paths):
        with pytest.raises(OSError, match=name):
            resolve_file(name, CONFIG)
    assert resolve_file("here/model", CONFIG) is None
    with pytest.raises(OSError, match="org/cached"):
        resolve_file("org/cached", CONFIG, local_files_only=True)
    assert caplog.messages == ["runs/moodel is not a folder here: asking the hub for it"]
    assert [record.levelname for record in caplog.records] == ["INFO"]


@pytest.mark.usefixtures("refusing_hub")
@pytest.mark.parametrize(
    ("name", "meant"), [("here/moodel", " (did you mean here/model?)"), ("here/another", "")]
)
def test_a_mistyped_path_in_an_existing_folder_is_a_warning(tmp_path, caplog, name, meant):
    (tmp_path / "here" / "model").mkdir(parents=True)
    with pytest.raises(OSError, match=name):
        resolve_file(name, CONFIG)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", f"{name} is not a folder here{meant}: asking the hub for it")
    ]


@pytest.mark.usefixtures("refusing_hub")
def test_the_hub_is_asked_even_if_a_folder_cannot_be_listed(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *args, **kwargs: "fetched")
    monkeypatch.setattr(os, "listdir", lambda folder: (_ for _ in ()).throw(PermissionError))
    (tmp_path / "secret").mkdir()
    assert resolve_file("secret/moodel", CONFIG) == Path("fetched")
    assert caplog.messages == ["secret/moodel is not a folder here: asking the hub for it"]


FETCH_CONFIG = f"huggingface_hub.hf_hub_download('org/adapter', {CONFIG!r})\n"
FETCH_LISTING = f"huggingface_hub.snapshot_download('org/adapter', allow_patterns={CONFIG!r})\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("", "not known"),
        (FETCH_CONFIG, None),
        (FETCH_LISTING, "not known"),
    ],
    ids=["nothing", "one file", "one file and the listing"],
)
def test_a_cache_without_records_of_absent_files(hub, tmp_path, before, expected):
    """A file counts as absent if the cache has another one, unless it is known to exist."""
    home = tmp_path / "home"
    assert run_on_hub(hub, home, PRELUDE + before) == []
    weights, vocabulary = run_on_hub(
        hub, home, PRELUDE + code_to_resolve(WEIGHTS, "vocab.json"), HF_HUB_OFFLINE="1"
    )
    if expected == "not known":
        assert matches(weights, "FileNotFoundError", UNCACHED.format("org/adapter"))
    else:
        assert weights is expected
    if before:
        assert vocabulary is None
    else:
        assert matches(vocabulary, "FileNotFoundError", UNCACHED.format("org/adapter"))


@pytest.mark.slow
def test_after_an_interrupted_download_no_file_counts_as_absent(hub, tmp_path):
    """The download leaves the folder of a snapshot, without files."""
    home = tmp_path / "home"
    run_on_hub(hub, home, PRELUDE + FETCH_CONFIG)
    (file,) = home.rglob(CONFIG)
    file.unlink()
    (shown,) = run_on_hub(hub, home, PRELUDE + code_to_resolve(WEIGHTS), HF_HUB_OFFLINE="1")
    assert file.parent.is_dir()
    assert matches(shown, "FileNotFoundError", UNCACHED.format("org/adapter"))


@pytest.mark.slow
def test_files_of_another_revision_make_no_file_count_as_absent(hub, tmp_path):
    home = tmp_path / "home"
    run_on_hub(hub, home, PRELUDE + FETCH_CONFIG)
    code = f"show(resolve_file, 'org/adapter', {WEIGHTS!r}, revision='v2')"
    (shown,) = run_on_hub(hub, home, PRELUDE + code, HF_HUB_OFFLINE="1")
    assert matches(shown, "FileNotFoundError", UNCACHED.format("org/adapter"))


@pytest.mark.slow
def test_revisions_tokens_and_folders_are_honored(hub, tmp_path):
    own, cache = str(tmp_path / "own folder"), str(tmp_path / "own cache")
    code = f"""
sha = huggingface_hub.HfApi().model_info("org/adapter").sha
show(resolve_file, "org/adapter", {CONFIG!r}, revision=sha, cache_dir={cache!r})
show(resolve_file, "org/secret", {CONFIG!r}, token="hf_open", cache_dir={cache!r})
show(fetch_file, "org/adapter", {WEIGHTS!r}, folder={own!r})
show(resolve_file, "org/adapter", {CONFIG!r}, revision="v2")
show(resolve_file, "org/secret", {CONFIG!r})
show(resolve_file, "org/secret", {CONFIG!r}, token="hf_wrong")
show(resolve_file, "org/none", {CONFIG!r})
show(resolve_file, "no/such/folder", {CONFIG!r})
show(fetch_file, "org/adapter", "config.json")
"""
    home = tmp_path / "home"
    shown = run_on_hub(hub, home, PRELUDE + code)
    assert shown[:3] == ["settings", "settings", "weights"]
    assert os.path.isfile(os.path.join(own, WEIGHTS))
    assert not list(home.rglob(CONFIG))
    messages = [
        ("OSError", "'org/adapter' has no revision 'v2' on the hub"),
        ("OSError", PRIVATE.format("org/secret")),
        ("OSError", PRIVATE.format("org/secret")),
        ("OSError", PRIVATE.format("org/none")),
        ("FileNotFoundError", "'no/such/folder': no such folder"),
        ("AbsentFileError", "'org/adapter' has no config.json on the hub"),
    ]
    for line, (kind, start) in zip(shown[3:], messages, strict=True):
        assert matches(line, kind, start), line
    (found,) = run_on_hub(
        hub, home, PRELUDE + f"show(resolve_file, 'org/secret', {CONFIG!r})", HF_TOKEN="hf_open"
    )
    assert found == "settings"


# ---- a hub that does not answer ----


@pytest.fixture
def mute_hub():
    """The address of a hub that accepts connections but does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def timed(function, *args, **environment):
    """Returns the function's result, and the seconds that it took."""
    begin = time.monotonic()
    return function(*args, **environment), time.monotonic() - begin


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_an_error_soon(hub, tmp_path, mute_hub):
    """The library alone would take minutes, because it waits in each of many attempts."""
    home, cache = tmp_path / "home", str(tmp_path / "cache")
    run_on_hub(hub, home, PRELUDE + code_to_resolve(CONFIG))
    again = f"show(fetch_file, 'org/adapter', {CONFIG!r}, force_download=True)\n"
    code = (
        code_to_resolve(CONFIG, WEIGHTS)
        + f"show(fetch_file, 'a', 'b', cache_dir={cache!r})\n"
        + again
    )
    limits = {"HF_ENDPOINT": mute_hub, "HF_HUB_ETAG_TIMEOUT": "1"}
    shown, seconds = timed(run_on_hub, hub, home, PRELUDE + code, **limits)
    cached, weights, other, forced = shown
    reason = f"{mute_hub} did not answer within 1 seconds"
    assert cached == "settings"
    start = "'org/adapter' is not a local folder and cannot be fetched"
    assert matches(weights, "FileNotFoundError", f"{start}: {reason}")
    assert matches(
        other, "FileNotFoundError", f"'a' is not a local folder and cannot be fetched: {reason}"
    )
    assert matches(forced, "OSError", f"'org/adapter' cannot be fetched from the hub: {reason}")
    assert seconds < 30  # four waits of one second, with room for a busy machine


@pytest.mark.slow
def test_a_file_downloaded_to_a_folder_is_found_without_the_hub(hub, tmp_path):
    code = f"show(fetch_file, 'org/adapter', {CONFIG!r}, folder={str(tmp_path / 'own')!r})\n"
    for endpoint in (hub.url, "http://127.0.0.1:9"):
        shown = run_on_hub(hub, tmp_path / "home", PRELUDE + code, HF_ENDPOINT=endpoint)
        assert shown == ["settings"]


class ConnectError(Exception):
    """Recognized by its name as an error of the HTTP client, like the next two."""


class TimeoutException(Exception):
    pass


class ReadTimeout(TimeoutException):
    pass


@pytest.mark.parametrize(
    ("answers", "unreached"),
    [
        ([None], None),
        ([ConnectError("refused"), None], None),
        ([ReadTimeout("late"), ConnectError("refused"), None], None),
        ([ConnectError("first"), ConnectError("second"), ReadTimeout("last")], "last"),
        ([ConnectError("refused"), ValueError("the library's to tell")], None),
    ],
)
def test_a_hub_that_cannot_be_reached_is_tried_again(monkeypatch, answers, unreached):
    left, waited = list(answers), []
    clock = SimpleNamespace(sleep=waited.append, monotonic=time.monotonic)
    monkeypatch.setattr(hub_files, "time", clock)

    def head(address, timeout):
        assert (address, timeout) == ("https://hub", 5)
        answer = left.pop(0)
        if answer is not None:
            raise answer

    constants = SimpleNamespace(ENDPOINT="https://hub", HF_HUB_ETAG_TIMEOUT=5)
    library = SimpleNamespace(constants=constants, get_session=lambda: SimpleNamespace(head=head))
    for _ in range(2):
        found = hub_files._why_unreached(library, (0, 1, 2))
        assert left == []
        assert waited == [0, 1, 2][: len(answers)]
        assert (found if found is None else str(found)) == unreached
        if unreached:  # a hub that has answered is not asked again
            left += answers
            waited.clear()
        hub_files._unreached.clear()


class Silent:
    """The hub library with a hub that does not answer; counts how often the hub is asked.

    Only requests from daemon threads count, because a process that ends does not wait for those.
    """

    def __init__(self):
        self.constants = SimpleNamespace(ENDPOINT="https://hub", HF_HUB_ETAG_TIMEOUT=0.05)
        self._asked, self._answer = 0, threading.Event()

    def get_session(self):
        self._asked += threading.current_thread().daemon
        return SimpleNamespace(head=lambda address, timeout: self._answer.wait())

    def is_asked(self, times: int) -> bool:
        """Whether the hub has been asked this often; waits for a thread that has just started."""
        patience = time.monotonic() + 60
        while self._asked < times and time.monotonic() < patience:
            time.sleep(0.01)
        return self._asked == times

    def try_to_load_from_cache(self, name, filename, **where):
        return f"/cache/{where['revision']}/{filename}"


def test_a_hub_that_does_not_answer_is_waited_for_once_a_minute(monkeypatch):
    library = Silent()
    for pauses in ((0,), (0, 0, 0), (0,)):
        assert "did not answer" in str(hub_files._why_unreached(library, pauses))
    assert library.is_asked(1)
    monkeypatch.setattr(hub_files, "_FORGOTTEN_AFTER", 0)
    hub_files._why_unreached(library, (0,))
    assert library.is_asked(2)


@pytest.mark.parametrize(("revision", "times"), [("a0" * 20, 0), ("main", 1), (None, 1)])
def test_a_commit_in_the_cache_is_used_without_asking_the_hub(revision, times):
    library, where = Silent(), {"revision": revision, "cache_dir": None}
    wanted = hub_files._Wanted("org/tiny", CONFIG, where)
    found = hub_files._found_without_hub(library, wanted, False)
    assert found == Path(f"/cache/{revision}/{CONFIG}")
    assert library.is_asked(times)


@pytest.mark.parametrize(
    "revision", ["../../x", "/etc/x", "v1/../../x", "a\\b", "C:x", "v 1", "a\n", 3]
)
def test_what_cannot_be_a_revision_is_refused_before_the_hub_library_writes_it(revision):
    with pytest.raises(OSError, match=r"cannot be the name of a branch, tag or commit$"):
        resolve_file("org/tiny", CONFIG, revision=revision)


@pytest.mark.parametrize("revision", ["", "main", "v1.0-rc_2", "refs/pr/3", "a0" * 20, "größer"])
def test_what_can_be_a_revision_is_asked_for(revision):
    assert hub_files._REVISION.fullmatch(revision)


def test_for_a_commit_in_a_folder_the_hub_is_asked(tmp_path):
    """Unlike in the cache, nothing there says which commit a file belongs to."""
    (tmp_path / CONFIG).touch()
    library, where = Silent(), {"revision": "a0" * 20, "cache_dir": None}
    wanted = hub_files._Wanted("org/tiny", CONFIG, where, tmp_path)
    found = hub_files._found_without_hub(library, wanted, False)
    assert found == tmp_path / CONFIG
    assert library.is_asked(1)


@pytest.mark.parametrize(("copy", "attempts"), [("/cache/config.json", 1), (None, 3)])
def test_the_hub_is_tried_only_once_if_there_is_a_copy(monkeypatch, copy, attempts):
    tried = []
    monkeypatch.setattr(hub_files, "_why_unreached", lambda _, pauses: tried.append(pauses))
    library = SimpleNamespace(try_to_load_from_cache=lambda *_, **__: copy)
    wanted = hub_files._Wanted("org/tiny", CONFIG, {"revision": "a"})
    assert hub_files._found_without_hub(library, wanted, False) is None
    assert [len(pauses) for pauses in tried] == [attempts]


def test_why_out_of_reach_returns_the_reason_or_none(monkeypatch):
    unreached, ours = [None, ConnectError("refused")], [False, False, True]
    monkeypatch.setattr(hub_files, "is_offline_mode", lambda: ours.pop(0))
    monkeypatch.setattr(hub_files, "_why_unreached", lambda *given: unreached.pop(0))
    found = [hub_files.why_out_of_reach() for _ in range(3)]
    assert found == [None, "refused", "offline mode is on"]
    assert hub_files.why_out_of_reach(offline=True) == "offline mode is on"


@pytest.mark.parametrize("existing", ["", "runs"])
def test_if_no_hub_answers_the_error_says_where_a_path_was_looked_for(
    tmp_path, monkeypatch, existing
):
    """If the path's first folder exists, the beginning of the message says it instead."""
    (tmp_path / existing).mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub_files, "_why_unreached", lambda *given: ConnectError("refused"))
    for name in ("runs/model", "roberta-base"):
        with pytest.raises(FileNotFoundError) as raised:
            fetch_file(name, CONFIG, cache_dir=str(tmp_path / "cache"))
        has_path = f"refused; as a path it was looked for in {tmp_path}; " in str(raised.value)
        assert has_path == (name == "runs/model" and not existing)
        assert str(raised.value).endswith(f"; {COPY_IT}")


def test_a_download_to_a_folder_has_no_advice_to_copy_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(hub_files, "_why_unreached", lambda *given: ConnectError("refused"))
    with pytest.raises(FileNotFoundError, match=r"cannot be fetched: refused$"):
        fetch_file("gpt2", CONFIG, folder=tmp_path)


@pytest.fixture
def verbosity():
    """Restores the hub library's log level after a test."""
    before = huggingface_hub.logging.get_verbosity()
    yield
    huggingface_hub.logging.set_verbosity(before)


def test_settings_are_passed_to_the_hub_library(monkeypatch, verbosity):
    """Its messages are hidden meanwhile, and the user's log level is restored."""
    downloads, levels = [], []

    def download(*names, **settings):
        downloads.append((*names, settings))
        levels.append(huggingface_hub.logging.get_verbosity())
        return "/there"

    huggingface_hub.logging.set_verbosity_info()
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(hub_files, "_found_without_hub", lambda *given: None)
    monkeypatch.setattr(hub_files, "is_offline_mode", lambda: False)
    given = {"cache_dir": "c", "revision": "old", "token": "secret", "force_download": True}
    assert resolve_file("org/tiny", CONFIG, **given) == Path("/there")
    fetch_file("org/tiny", CONFIG, token=False, local_files_only=True, folder="here")
    usual = {"cache_dir": None, "revision": None, "token": None, "force_download": False}
    assert downloads == [
        ("org/tiny", CONFIG, {**given, "local_dir": None, "local_files_only": False}),
        ("org/tiny", CONFIG, {**usual, "local_dir": "here", "local_files_only": True}),
    ]
    assert levels == [logging.ERROR] * 2
    assert huggingface_hub.logging.get_verbosity() == logging.INFO


# ---- errors ----


class ProtocolError(Exception):
    """Stands for the errors of the hub library's HTTP client, which differ between versions."""


ANSWER = {"headers": {}, "request": None}
GATED = GatedRepoError("Access restricted\nask", response=SimpleNamespace(**ANSWER))
EXPIRED, REFUSED = (
    HfHubHTTPError("Client Error\nbad", response=SimpleNamespace(**ANSWER, status_code=status))
    for status in (401, 403)
)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ProtocolError("cut off\nafter 10 bytes"),
            "'org/tiny' cannot be fetched from the hub: cut off",
        ),
        (
            OSError(28, "No space left on device"),
            "'org/tiny' cannot be fetched from the hub: [Errno 28]",
        ),
        (
            PermissionError(13, "Permission denied", "/.cache"),
            "cannot write 'org/tiny' to /.cache: set HF_HOME",
        ),
        (
            OSError(30, "Read-only file system", "/data/hub"),
            "cannot write 'org/tiny' to /data/hub: set HF_HOME",
        ),
        (ProtocolError(), "'org/tiny' cannot be fetched from the hub: ProtocolError"),
        (GATED, "'org/tiny' needs access rights: log in with `hf auth login`"),
        (EXPIRED, "'org/tiny' cannot be fetched: the hub does not accept the access token, which"),
        (REFUSED, "'org/tiny' cannot be fetched from the hub: Client Error"),
    ],
)
def test_a_failed_download_is_an_error_of_one_line(monkeypatch, error, message):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    for function in (resolve_file, fetch_file):
        with pytest.raises(OSError, match="org/tiny") as caught:
            function("org/tiny", "config.json")
        assert str(caught.value).startswith(message)
        assert "\n" not in str(caught.value)
        assert not isinstance(caught.value, AbsentFileError)


def test_the_variable_that_is_set_is_the_one_to_set(monkeypatch):
    """HF_HOME would have no effect."""

    def fail(*args, **kwargs):
        raise OSError(30, "Read-only file system", "/data/hub")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    monkeypatch.setenv("HF_HUB_CACHE", "/data/hub")
    with pytest.raises(OSError, match="set HF_HUB_CACHE to a folder of your own"):
        resolve_file("org/tiny", "config.json")


def test_an_interrupt_is_not_converted(monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", interrupt)
    with pytest.raises(KeyboardInterrupt):
        resolve_file("org/tiny", "config.json")


@pytest.mark.parametrize("switch", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
@pytest.mark.parametrize(
    ("value", "offline"),
    [("1", True), ("true", True), ("ON", True), ("yes", True), ("0", False), ("", False)],
)
def test_either_variable_turns_offline_mode_on(monkeypatch, switch, value, offline):
    assert not is_offline_mode()
    monkeypatch.setenv(switch, value)
    assert is_offline_mode() == offline
