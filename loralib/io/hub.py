"""Fetches files from the Hugging Face hub, with errors that a user can act on.

The hub library, huggingface_hub, is imported only when a file must come from the hub, as local
files do not need it. The library obeys ``HF_ENDPOINT`` and ``HF_HOME``, and checks sizes.
"""

import difflib
import errno
import functools
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from ..text import first_line

logger = logging.getLogger(__name__)


UNFETCHED = "cannot be fetched"
"""The words in an error that say that a model or data is neither on this machine nor reachable.

Programs that read a log find such errors by these words.
"""


class AbsentFileError(FileNotFoundError):
    """Raised if a repository has no file of a name. The message is one line."""


def is_offline_mode() -> bool:
    """Returns whether ``HF_HUB_OFFLINE`` or ``TRANSFORMERS_OFFLINE`` asks for cached files only."""
    on = {"1", "true", "yes", "on"}
    switches = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").lower() in on for name in switches)


def why_out_of_reach(offline: bool = False) -> str | None:
    """Returns why nothing can be fetched from the hub, in words, or None if the hub answers.

    Ask this before using libraries that fetch files themselves and would retry for half a minute.

    Args:
        offline: whether such a library's own switch tells it not to fetch.
    """
    if offline or is_offline_mode():
        return "offline mode is on"
    unreached = _why_unreached(_hub_library("the hub"), _PAUSES)
    return None if unreached is None else _reason(unreached)


def resolve_file(
    name_or_path: str | os.PathLike,
    filename: str,
    *,
    cache_dir: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
) -> Path | None:
    """Returns the local path of `filename` in a model folder or in a repository of the hub.

    Args:
        name_or_path: a local folder, or a repository's name such as ``roberta-base``.
        filename: a file's name in it.
        cache_dir: the folder for downloads. By default the hub library's cache.
        revision: branch, tag or commit of the repository.
        token: an access token, or True for the one that the hub library has stored.
        local_files_only: do not ask the hub. If the file is not in the cache, that is an error.
        force_download: fetch the file again, even if the cache has it.

    Returns:
        The path, or None if the folder or the repository has no such file.

    Raises:
        OSError: `name_or_path` is neither a folder nor a repository that can be reached, or the
            file cannot be fetched, see `fetch_file`.
    """
    name = os.fspath(name_or_path)
    if os.path.isdir(name):
        path = Path(name, filename)
        return path if path.is_file() else None
    try:
        return fetch_file(
            name,
            filename,
            cache_dir=cache_dir,
            revision=revision,
            token=token,
            local_files_only=local_files_only,
            force_download=force_download,
        )
    except AbsentFileError:
        return None


def fetch_file(
    name: str,
    filename: str,
    *,
    cache_dir: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
    folder: str | os.PathLike | None = None,
) -> Path:
    """Returns the local path of a file of the hub, and fetches it if necessary.

    Args:
        name: a repository's name, such as ``roberta-base``.
        filename: a file's name in it.
        cache_dir, revision, token, local_files_only, force_download: as in `resolve_file`.
        folder: the folder to put the file into instead of a cache.

    Raises:
        AbsentFileError: the repository has no such file. If the hub is not asked, a file is assumed
            to be absent if the cache holds other files of the repository, unless the cache shows
            that it exists.
        FileNotFoundError: the file is not in the cache, and the hub cannot be asked for it.
        OSError: there is no such repository, or the file cannot be fetched.
    """
    if is_a_path(name):
        raise FileNotFoundError(f"'{name}': no such folder{_seen_from_here(name)}")
    if revision and not (isinstance(revision, str) and _REVISION.fullmatch(revision)):
        raise OSError(f"'{name}': {revision!r} cannot be the name of a branch, tag or commit")
    hub = _hub_library(name)
    where = {"revision": revision, "cache_dir": cache_dir}
    offline = "local_files_only is set" if local_files_only else ""
    if is_offline_mode():
        offline = "offline mode is on"
    wanted = _Wanted(name, filename, where, folder, offline)
    if "/" in name and not offline:
        _say_that_the_hub_is_asked(name)
    try:
        if not offline and (found := _found_without_hub(hub, wanted, force_download)):
            return found
        with _quiet(hub):
            path = hub.hf_hub_download(
                name,
                filename,
                token=token or None,
                local_dir=folder,
                local_files_only=bool(offline),
                force_download=force_download,
                **where,
            )
        return Path(path)
    except Exception as error:
        # Any exception: the hub library lets errors of its HTTP client through, and its client
        # differs between versions.
        raise _as_os_error(hub, error, wanted) from error


# Git has no other names. An adapter or a config.json may name a revision, and the hub library makes
# it part of a path in its cache, even with ".." in it.
_REVISION = re.compile(r"(?!/)(?!.*\.\.)[^\x00-\x20\x7f\\:?*\[~^]*")


class _Wanted(NamedTuple):
    """A file that `fetch_file` is asked for.

    Args:
        name: the repository's name.
        filename: the file's name in it.
        where: revision and cache_dir, as the hub library takes them.
        folder: the folder to put the file into instead of a cache.
        offline: why the hub is not asked, or "" if it is.
    """

    name: str
    filename: str
    where: dict[str, str | None]
    folder: str | os.PathLike | None = None
    offline: str = ""


def is_a_path(name: str) -> bool:
    """Returns whether a name cannot be a repository's, so that the hub is not asked for it."""
    return name.startswith((".", "/", os.sep, "~")) or name.count("/") > 1


@functools.cache  # a model has several files
def _say_that_the_hub_is_asked(name: str) -> None:
    """Logs that the hub is about to be asked: without internet, it takes seconds until an error.

    It is a warning if the first part of the name is a local folder, as the name may be a path then.
    """
    first, _, last = name.partition("/")
    is_path, near = os.path.isdir(first), []
    with suppress(OSError):  # the folder does not exist, or its files may not be listed
        near = difflib.get_close_matches(last, os.listdir(first), 1)
    meant = "".join(f" (did you mean {first}/{found}?)" for found in near)
    level = logging.WARNING if is_path else logging.INFO
    logger.log(level, "%s is not a folder here%s: asking the hub for it", name, meant)


def _found_without_hub(hub: ModuleType, wanted: _Wanted, force_download: bool) -> Path | None:
    """Returns the file of an earlier download if the hub is out of reach, or None if it answers.

    A file of a fixed commit is returned without asking the hub.

    Raises:
        Exception: the hub is out of reach, and there is no such file or it must be fetched again.
    """
    found, revision = None if force_download else _left_here(hub, wanted), wanted.where["revision"]
    if found is not None and wanted.folder is None and _COMMIT.fullmatch(revision or ""):
        return found  # a commit's files do not change: there is nothing to ask
    unreached = _why_unreached(hub, _PAUSES if found is None else _PAUSES[:1])
    if unreached is None or found is not None:
        return found if unreached else None
    if force_download:
        raise unreached
    raise hub.errors.LocalEntryNotFoundError(wanted.filename) from unreached


def _left_here(hub: ModuleType, wanted: _Wanted) -> Path | None:
    """Returns the path of a file that was downloaded earlier, or None."""
    if wanted.folder is not None:
        path = Path(wanted.folder, wanted.filename)
        return path if path.is_file() else None
    found = hub.try_to_load_from_cache(wanted.name, wanted.filename, **wanted.where)
    return Path(found) if isinstance(found, str) else None


_COMMIT = re.compile(r"[0-9a-f]{40}")


def commit_of(path: Path) -> str | None:
    """Returns the commit of a file in the hub library's cache; None for any other file."""
    is_cached = path.parent.parent.name == "snapshots" and _COMMIT.fullmatch(path.parent.name)
    return path.parent.name if is_cached else None


_PAUSES = (0, 1, 2)  # seconds before each attempt to reach the hub
_reached: set[str] = set()  # the hubs that have answered
_FORGOTTEN_AFTER = 60  # seconds
# When and why a hub did not answer, so that a model's other files need not wait for it again.
_unreached: dict[str, tuple[float, Exception]] = {}


def _why_unreached(hub: ModuleType, pauses: Sequence[float]) -> Exception | None:
    """Returns why the hub does not answer, or None if it answers now or has done so before.

    The library itself would retry for half a minute, or for minutes if connections time out,
    because it waits for each of the hub's addresses in turn. Here all attempts together may take as
    long as the library waits for one answer: 10 seconds, or ``HF_HUB_ETAG_TIMEOUT``.
    """
    endpoint, seconds = hub.constants.ENDPOINT, hub.constants.HF_HUB_ETAG_TIMEOUT
    if endpoint in _reached:
        return None
    when, before = _unreached.get(endpoint, (0.0, None))
    if before is not None and time.monotonic() - when < _FORGOTTEN_AFTER:
        return before
    errors: list[Exception] = []
    given = (hub, endpoint, seconds, pauses, errors)
    asking = threading.Thread(target=_ask, args=given, daemon=True)
    asking.start()
    asking.join(seconds)
    if asking.is_alive():
        why: Exception = TimeoutError(f"{endpoint} did not answer within {seconds} seconds")
    elif errors:
        why = errors[-1]
    else:
        _reached.add(endpoint)
        return None
    # A single attempt that failed at once is not remembered.
    if asking.is_alive() or len(pauses) == len(_PAUSES):
        _unreached[endpoint] = time.monotonic(), why
    return why


def _ask(
    hub: ModuleType,
    endpoint: str,
    seconds: float,
    pauses: Sequence[float],
    errors: list[Exception],
) -> None:
    """Tries to get any answer from the hub. If the last attempt failed, `errors` has its error."""
    for pause in pauses:
        time.sleep(pause)
        errors.clear()
        try:
            hub.get_session().head(endpoint, timeout=seconds)
        except Exception as error:
            # Compared by name, because the library's HTTP client differs between versions. Any
            # other error is left to the library, which asks once more and reports it.
            if {"ConnectError", "TimeoutException"} & {t.__name__ for t in type(error).__mro__}:
                errors.append(error)
                continue
        return


def _seen_from_here(name: str) -> str:
    """Returns text that says where a name was looked for as a path, or "" if it cannot be one."""
    first = name.partition("/")[0]
    is_here = first in (".", "..") or ("/" in name and os.path.isdir(first))
    return f" (relative to {os.getcwd()})" if is_here else ""


@contextmanager
def _quiet(hub: ModuleType) -> Iterator[None]:
    """Hides the hub library's messages on each attempt. The error says what failed."""
    before = hub.logging.get_verbosity()
    hub.logging.set_verbosity_error()
    try:
        yield
    finally:
        hub.logging.set_verbosity(before)


def _hub_library(name: str) -> ModuleType:
    """Imports huggingface_hub. The error, if it is missing, names the repository `name`."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError as error:
        raise OSError(
            f"'{name}' is not a local folder, and fetching it from the hub needs a library: "
            "pip install huggingface_hub"
        ) from error
    return huggingface_hub


def _as_os_error(hub: ModuleType, error: Exception, wanted: _Wanted) -> OSError:
    """Converts an error of the hub library."""
    name = wanted.name
    match error:
        case hub.errors.GatedRepoError():
            return OSError(f"'{name}' needs access rights: log in with `hf auth login`")
        case hub.errors.HFValidationError() | hub.errors.RepositoryNotFoundError():
            return OSError(
                f"'{name}' is neither a local folder nor a model on the hub "
                "(a private one needs `hf auth login`)"
            )
        case hub.errors.RevisionNotFoundError():
            revision = wanted.where["revision"] or "main"
            return OSError(f"'{name}' has no revision '{revision}' on the hub")
        case hub.errors.LocalEntryNotFoundError():
            return _not_cached(hub, error, wanted)
        case hub.errors.EntryNotFoundError():
            return AbsentFileError(f"'{name}' has no {wanted.filename} on the hub")
        case hub.errors.HfHubHTTPError(response=answer) if answer.status_code == 401:
            return OSError(
                f"'{name}' cannot be fetched: the hub does not accept the access token, which may "
                "have expired: log in with `hf auth login`, or correct or unset HF_TOKEN"
            )
        case OSError(errno=errno.EACCES | errno.EPERM | errno.EROFS, filename=str(place)):
            # It takes precedence over HF_HOME, and clusters set it.
            own = "HF_HUB_CACHE" if os.environ.get("HF_HUB_CACHE") else "HF_HOME"
            return OSError(f"cannot write '{name}' to {place}: set {own} to a folder of your own")
        case _:
            return OSError(f"'{name}' cannot be fetched from the hub: {_reason(error)}")


def _not_cached(hub: ModuleType, error: Exception, wanted: _Wanted) -> FileNotFoundError:
    """Returns the error if the hub was not reached and the cache holds no such file."""
    name, filename, where, folder, offline = wanted
    if hub.try_to_load_from_cache(name, filename, **where) is hub._CACHED_NO_EXIST:
        return AbsentFileError(f"'{name}' has no {filename} on the hub")
    if not offline:
        why = _reason(error)
        if "/" in name and not _seen_from_here(name):
            why += f"; as a path it was looked for in {os.getcwd()}"
    elif _seems_absent(hub, wanted):
        return AbsentFileError(f"'{name}': {offline} and {filename} cannot be fetched")
    else:
        why = f"{offline} and it is not in the cache"
    if folder is None:  # otherwise the call itself was for a copy in a folder
        why += "; without internet, copy its folder here and give the path instead of the name"
    return FileNotFoundError(
        f"'{name}' is not a local folder{_seen_from_here(name)} and cannot be fetched: {why}"
    )


def _seems_absent(hub: ModuleType, wanted: _Wanted) -> bool:
    """Returns whether the cache has files of a repository, but no record of this one.

    A cache that was filled by other programs does not record absent files.
    """
    try:
        # It also raises if the repository's listing is in the cache and has the file.
        snapshot = hub.snapshot_download(
            wanted.name, allow_patterns=wanted.filename, local_files_only=True, **wanted.where
        )
    except hub.errors.LocalEntryNotFoundError:
        return False
    return any(path.is_file() for path in Path(snapshot).rglob("*"))


def _reason(error: BaseException) -> str:
    """Returns the first line of an error's innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)
