"""Downloads files over HTTP: continues broken downloads, and checks what arrives.

A partial download of FILE is FILE.part, and what identifies its file (the server's ETag or date) is
in FILE.part.etag.
"""

import json
import logging
import os
import ssl
import time
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from tqdm.auto import tqdm

from .atomic import check_writable, errors_of, sync_file, sync_folder

logger = logging.getLogger(__name__)

ATTEMPTS = 5
FIRST_WAIT = 1.0  # seconds before the second attempt; doubled before each further one
TIMEOUT = 30.0  # seconds without a byte
CHUNK = 1 << 16  # bytes
# A ValueError is raised for what is no address, and for a length that is no number.
NETWORK_ERRORS = (URLError, ConnectionError, TimeoutError, ssl.SSLError, HTTPException, ValueError)


def download(url: str, target: Path, way_out: str, size: int | None = None) -> None:
    """Downloads a file atomically, continuing an earlier partial download of it.

    Args:
        url: the file's address.
        target: the path to write; its folder must exist.
        way_out: what the user can do if the file cannot be had from there; ends the error.
        size: the size in bytes, if known; the server's Content-Length is checked as well.

    Raises:
        ConnectionError: the network failed `ATTEMPTS` times.
        DiskFullError: the disk is full.
        OSError: the server does not give the file, the file has another size, its name ends in
            ``.json`` and it is not JSON, or `target` cannot be written.
    """
    check_writable(target)
    part = target.with_name(f"{target.name}.part")
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with errors_of(target, part):
                _fetch_rest(url, part)
            break
        except NETWORK_ERRORS as error:
            reason = _reason(error)
            if attempt == ATTEMPTS or not _may_pass(error):
                kind = OSError if isinstance(error, HTTPError) else ConnectionError
                raise kind(f"{url}: {reason}; {way_out}") from error
            wait = FIRST_WAIT * 2 ** (attempt - 1)
            logger.warning("%s: %s; trying again in %g s", url, reason, wait)
            time.sleep(wait)
    _etag_file(part).unlink(missing_ok=True)
    try:
        _check_content(part, target.suffix, size)
    except (ValueError, RecursionError) as error:
        part.unlink()
        raise OSError(f"{url}: {error}; {way_out}") from error
    sync_file(part)
    os.replace(part, target)
    sync_folder(target.parent)


def _fetch_rest(url: str, part: Path) -> None:
    """Requests the bytes that `part` still lacks, and appends them.

    If the file has changed since `part` was begun, If-Range makes the server send all of it.
    """
    etag = _etag_file(part).read_text("utf-8") if _etag_file(part).exists() else ""
    start = part.stat().st_size if etag and part.exists() else 0
    headers = {"Range": f"bytes={start}-", "If-Range": etag} if start else {}
    try:
        with urlopen(Request(url, headers=headers), timeout=TIMEOUT) as response:
            _append(response, part, start, etag)
    except HTTPError as error:
        if error.code == 416:  # the file is not longer than `part`, so start over
            part.unlink(missing_ok=True)
        raise


def _append(response: HTTPResponse, part: Path, start: int, etag: str) -> None:
    if response.status == 206:
        sent, found = response.headers.get("Content-Range", ""), _identity(response) or etag
        if not sent.startswith(f"bytes {start}-") or found != etag:
            _etag_file(part).unlink(missing_ok=True)  # the next attempt starts over
            raise ConnectionError(
                f"asked for the bytes from {start:,} on of {etag!r}, but was sent {sent!r} of "
                f"{found!r}"
            )
    else:
        start = 0
    length = response.headers.get("Content-Length")
    total = None if length is None else start + int(length)
    with (
        open(part, "ab" if start else "wb") as file,
        tqdm(
            desc=part.stem,
            initial=start,
            total=total,
            unit="B",
            unit_scale=True,
            leave=False,
            disable=None,  # disabled if there is no terminal
        ) as bar,
    ):
        # Only after `part` is opened, which truncates it if start is 0: an ETag next to the bytes
        # of an older file would claim that they are the new file's.
        _etag_file(part).write_text(_identity(response), "utf-8")
        while chunk := response.read(CHUNK):
            file.write(chunk)
            bar.update(len(chunk))
        size = file.tell()
    if total not in (None, size):
        raise ConnectionError(f"the connection closed after {size:,} of {total:,} bytes")


def _check_content(path: Path, suffix: str, size: int | None) -> None:
    received = path.stat().st_size
    if size not in (None, received):
        raise ValueError(f"got {received:,} bytes, not {size:,}")
    # If no size is known, this detects an HTML page sent instead of the file.
    if suffix == ".json":
        json.loads(path.read_bytes())


def _etag_file(part: Path) -> Path:
    return part.with_name(f"{part.name}.etag")


def _identity(response: HTTPResponse) -> str:
    """Returns a value for If-Range: a strong ETag, else the date of change, else nothing."""
    etag = response.headers.get("ETag", "")
    return etag if etag.startswith('"') else response.headers.get("Last-Modified", "")


def _may_pass(error: Exception) -> bool:
    if isinstance(error, HTTPError):
        return error.code in (408, 416, 429) or error.code >= 500
    return not isinstance(error, ValueError)


def _reason(error: Exception) -> str:
    if isinstance(error, HTTPError):
        return f"HTTP {error.code} {error.reason}"
    return str(getattr(error, "reason", "") or error) or type(error).__name__
