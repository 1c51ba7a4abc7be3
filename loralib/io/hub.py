"""Files of the Hugging Face hub, with errors that a user can act on.

The hub library, huggingface_hub, is imported when a file is to come from there, not before:
local files do not need it. It obeys ``HF_ENDPOINT`` and ``HF_HOME``, and checks sizes.
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

from ..text import first_line

logger = logging.getLogger(__name__)


UNFETCHED = "cannot be fetched"
"""What errors say of a model, or of data, that is neither here nor fetched, for who reads a log."""


class AbsentFileError(FileNotFoundError):
    """A repository that has no file of that name. The message is one line."""


def is_offline_mode() -> bool:
    """Returns whether ``HF_HUB_OFFLINE`` or ``TRANSFORMERS_OFFLINE`` asks for cached files only."""
    on = {"1", "true", "yes", "on"}
    switches = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").lower() in on for name in switches)


def why_out_of_reach(offline: bool = False) -> str | None:
    """Why nothing can be fetched from the hub, in words; None where it answers.

    For libraries that fetch by themselves, and would try for half a minute.

    Args:
        offline: such a library has a switch of its own, by which it is not to.
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
        filename: a file's name within it.
        cache_dir: where downloads are kept; the hub library's cache by default.
        revision: branch, tag or commit of the repository.
        token: True for the token that the hub library has stored, or a token.
        local_files_only: ask no hub; a download is found in the cache, or is an error.
        force_download: fetch it again, even if the cache has it.

    Returns:
        The path, or None where the folder or the repository has no such file.

    Raises:
        OSError: `name_or_path` is neither a folder nor a repository that can be reached; as in
            `fetch_file`.
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
    """Returns the local path of a file of the hub, fetched unless it is there.

    Args:
        name: a repository's name, such as ``roberta-base``.
        filename: a file's name within it.
        cache_dir, revision, token, local_files_only, force_download: as in `resolve_file`.
        folder: where to put the file instead of into a cache.

    Raises:
        AbsentFileError: the repository has no such file. Where the hub is not asked, a repository
            of which the cache holds other files counts as such, unless this one is known to exist.
        FileNotFoundError: the file is not in the cache, and the hub cannot be asked for it.
        OSError: there is no such repository, or the file cannot be fetched.
    """
    if is_a_path(name):
        raise FileNotFoundError(f"'{name}': no such folder{_seen_from_here(name)}")
    hub = _hub_library(name)
    where = {"revision": revision, "cache_dir": cache_dir}
    # Why the hub is not asked; "" where it is.
    offline = "local_files_only is set" if local_files_only else ""
    if is_offline_mode():
        offline = "offline mode is on"
    if "/" in name and not offline:
        _say_that_the_hub_is_asked(name)
    try:
        if not offline and (
            found := _out_of_reach(hub, name, filename, where, folder, force_download)
        ):
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
        # Its HTTP client's own errors come through, and which client it has changes.
        raise _as_os_error(hub, error, name, filename, where, offline, folder) from error


def is_a_path(name: str) -> bool:
    """Returns whether a name cannot be a repository's, and the hub is not asked for it."""
    return name.startswith((".", "/", os.sep, "~")) or name.count("/") > 1


@functools.cache  # a model has several files
def _say_that_the_hub_is_asked(name: str) -> None:
    """Said before: where there is no internet, seconds go by until that is an error.

    A warning where the first part of the name is a folder here, so that it may well be a path.
    """
    first, _, last = name.partition("/")
    is_path, near = os.path.isdir(first), []
    with suppress(OSError):  # there is none, or its files may not be listed
        near = difflib.get_close_matches(last, os.listdir(first), 1)
    meant = "".join(f" (did you mean {first}/{found}?)" for found in near)
    level = logging.WARNING if is_path else logging.INFO
    logger.log(level, "%s is not a folder here%s: asking the hub for it", name, meant)


def _out_of_reach(
    hub: ModuleType,
    name: str,
    filename: str,
    where: dict[str, str | None],
    folder: str | os.PathLike | None,
    force_download: bool,
) -> Path | None:
    """The file as an earlier download left it, where the hub does not answer; None where it does.

    Raises:
        Exception: there is none, or it is to be fetched again.
    """
    found = None if force_download else _left_here(hub, name, filename, where, folder)
    if found is not None and folder is None and _COMMIT.fullmatch(where["revision"] or ""):
        return found  # a commit's files do not change: there is nothing to ask
    unreached = _why_unreached(hub, _PAUSES if found is None else _PAUSES[:1])
    if unreached is None or found is not None:
        return found if unreached else None
    if force_download:
        raise unreached
    raise hub.errors.LocalEntryNotFoundError(filename) from unreached


def _left_here(
    hub: ModuleType,
    name: str,
    filename: str,
    where: dict[str, str | None],
    folder: str | os.PathLike | None,
) -> Path | None:
    """Where an earlier download has put a file."""
    if folder is not None:
        path = Path(folder, filename)
        return path if path.is_file() else None
    found = hub.try_to_load_from_cache(name, filename, **where)
    return Path(found) if isinstance(found, str) else None


_COMMIT = re.compile(r"[0-9a-f]{40}")
_PAUSES = (0, 1, 2)  # seconds before each attempt to reach the hub
_reached: set[str] = set()  # the hubs that have answered
_FORGOTTEN_AFTER = 60  # seconds
# Why a hub did not answer, and when: a model's other files need not wait for it again.
_unreached: dict[str, tuple[float, Exception]] = {}


def _why_unreached(hub: ModuleType, pauses: Sequence[float]) -> Exception | None:
    """Why the hub does not answer; None where it does, or did before.

    The library itself tries again for half a minute, and for minutes where nothing is heard of a
    connection, as it waits for each of the hub's addresses in turn. Here all attempts together have
    as long as the library waits for one answer: 10 seconds, or ``HF_HUB_ETAG_TIMEOUT``.
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
    if asking.is_alive() or len(pauses) == len(_PAUSES):  # else it was refused once, at once
        _unreached[endpoint] = time.monotonic(), why
    return why


def _ask(
    hub: ModuleType,
    endpoint: str,
    seconds: float,
    pauses: Sequence[float],
    errors: list[Exception],
) -> None:
    """Tries to get any answer; `errors` then has the last attempt's error, if it failed."""
    for pause in pauses:
        time.sleep(pause)
        errors.clear()
        try:
            hub.get_session().head(endpoint, timeout=seconds)
        except Exception as error:
            # By name, as which HTTP client the library has changes. Any other error is the
            # library's to tell, which asks once more.
            if {"ConnectError", "TimeoutException"} & {t.__name__ for t in type(error).__mro__}:
                errors.append(error)
                continue
        return


def _seen_from_here(name: str) -> str:
    """Where a name that may be a path was looked for; empty where it cannot be one."""
    first = name.partition("/")[0]
    is_here = first in (".", "..") or ("/" in name and bool(first) and os.path.isdir(first))
    return f" (seen from {os.getcwd()})" if is_here else ""


@contextmanager
def _quiet(hub: ModuleType) -> Iterator[None]:
    """Keeps the hub library's notes on each attempt off the screen: the error says what failed."""
    before = hub.logging.get_verbosity()
    hub.logging.set_verbosity_error()
    try:
        yield
    finally:
        hub.logging.set_verbosity(before)


def _hub_library(name: str) -> ModuleType:
    """huggingface_hub, which is to fetch from the repository `name`."""
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


def _as_os_error(
    hub: ModuleType,
    error: Exception,
    name: str,
    filename: str,
    where: dict[str, str | None],
    offline: str,
    folder: str | os.PathLike | None,
) -> OSError:
    """What is raised for an error of the hub library; `offline` says why the hub is not asked."""
    match error:
        case hub.errors.GatedRepoError():
            return OSError(f"'{name}' needs access rights: log in with `hf auth login`")
        case hub.errors.HFValidationError() | hub.errors.RepositoryNotFoundError():
            return OSError(
                f"'{name}' is neither a local folder nor a model on the hub "
                "(a private one needs `hf auth login`)"
            )
        case hub.errors.RevisionNotFoundError():
            return OSError(f"'{name}' has no revision '{where['revision'] or 'main'}' on the hub")
        case hub.errors.LocalEntryNotFoundError():
            return _not_cached(hub, error, name, filename, where, offline, folder)
        case hub.errors.EntryNotFoundError():
            return AbsentFileError(f"'{name}' has no {filename} on the hub")
        case OSError(errno=errno.EACCES | errno.EPERM | errno.EROFS, filename=str(place)):
            return OSError(
                f"'{name}' is to be kept in {place}, which cannot be written to: set HF_HOME to a "
                "folder of your own"
            )
        case _:
            return OSError(f"'{name}' cannot be fetched from the hub: {_reason(error)}")


def _not_cached(
    hub: ModuleType,
    error: Exception,
    name: str,
    filename: str,
    where: dict[str, str | None],
    offline: str,
    folder: str | os.PathLike | None,
) -> FileNotFoundError:
    """Returns the same, where the hub was not reached and the cache holds no such file."""
    if hub.try_to_load_from_cache(name, filename, **where) is hub._CACHED_NO_EXIST:
        return AbsentFileError(f"'{name}' has no {filename} on the hub")
    if not offline:
        why = _reason(error)
        if "/" in name and not _seen_from_here(name):
            why += f"; as a path it was looked for in {os.getcwd()}"
    elif _seems_absent(hub, name, filename, where):
        return AbsentFileError(f"'{name}': {offline} and {filename} cannot be fetched")
    else:
        why = f"{offline} and it is not in the cache"
    if folder is None:  # else it is a copy that is asked for
        why += "; without internet, copy its folder here and give the path instead of the name"
    return FileNotFoundError(
        f"'{name}' is not a local folder{_seen_from_here(name)} and cannot be fetched: {why}"
    )


def _seems_absent(hub: ModuleType, name: str, filename: str, where: dict[str, str | None]) -> bool:
    """Whether the cache holds files of a repository, and no record of a file called `filename`.

    A cache that was filled by other means than ours holds no notes of absent files.
    """
    try:
        # Raises, too, where the repository's listing is in the cache and has the file.
        snapshot = hub.snapshot_download(
            name, allow_patterns=filename, local_files_only=True, **where
        )
    except hub.errors.LocalEntryNotFoundError:
        return False
    return any(path.is_file() for path in Path(snapshot).rglob("*"))


def _reason(error: BaseException) -> str:
    """Returns the first line of the innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)
