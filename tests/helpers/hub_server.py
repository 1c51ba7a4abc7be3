"""A small local server that speaks the part of the Hugging Face hub's protocol that loading needs.

It serves `{root}/{org}/{name}/…` as models and `{root}/datasets/{org}/{name}/…` as datasets, each
with one branch, `main`, whose commit is a hash of the folder's content. Clients reach it through
`HF_ENDPOINT`, which huggingface_hub reads when it is imported: set it for a subprocess.
"""

import hashlib
import json
import os
import re
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

BRANCH = "main"
_REPO = r"(?P<repo>[^/]+(?:/[^/]+)?)"
_RESOLVE = re.compile(rf"/(?:(?P<kind>datasets)/)?{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
_API = re.compile(
    rf"/api/(?P<kind>models|datasets)/{_REPO}"
    r"(?:/(?P<verb>revision|tree|paths-info)/(?P<revision>[^/]+)(?:/(?P<path>.+))?)?"
)
_RTE_CARD = """---
configs:
- config_name: rte
  data_files:{files}
dataset_info:
- config_name: rte
  features:
  - name: sentence1
    dtype: string
  - name: sentence2
    dtype: string
  - name: label
    dtype:
      class_label:
        names:
          '0': entailment
          '1': not_entailment
  - name: idx
    dtype: int32
---
"""


class Request(NamedTuple):
    """One request that arrived: the method in capitals, and the path without its query."""

    method: str
    path: str


@dataclass
class Repo:
    """A folder that is served as a repository."""

    name: str
    folder: Path

    def files(self) -> list[str]:
        """Paths of all files, relative to the repository."""
        paths = (path for path in self.folder.rglob("*") if path.is_file())
        return sorted(path.relative_to(self.folder).as_posix() for path in paths)

    def etag(self, path: str) -> str:
        """Hash of one file's content."""
        return hashlib.sha1((self.folder / path).read_bytes()).hexdigest()

    def commit(self) -> str:
        """Hash of all names and contents, 40 hexadecimal digits like git's."""
        listing = "\n".join(f"{path} {self.etag(path)}" for path in self.files())
        return hashlib.sha1(listing.encode()).hexdigest()

    def entry(self, path: str) -> dict:
        """The entry of a file or folder in the tree listing."""
        if (self.folder / path).is_dir():
            oid = hashlib.sha1(path.encode()).hexdigest()
            return {"type": "directory", "path": path, "oid": oid, "size": 0}
        size = (self.folder / path).stat().st_size
        return {"type": "file", "path": path, "oid": self.etag(path), "size": size}

    def tree(self, path: str, recursive: bool) -> list[dict]:
        """The entries of a folder."""
        folder = self.folder / path
        found = sorted(folder.rglob("*") if recursive else folder.iterdir())
        return [self.entry(item.relative_to(self.folder).as_posix()) for item in found]

    def info(self) -> dict:
        """The API's description of the repository."""
        return {
            "id": self.name,
            "sha": self.commit(),
            "private": False,
            "gated": False,
            "disabled": False,
            "tags": [],
            "downloads": 0,
            "likes": 0,
            "lastModified": "2024-01-01T00:00:00.000Z",
            "siblings": [{"rfilename": path} for path in self.files()],
        }


class HubServer:
    """The server; use it as a context manager.

    Attributes:
        root: folder whose content is served; it is read again at each request.
        url: value for HF_ENDPOINT.
        tokens: {"org/name": bearer token} of the repositories that need one.
        requests: every request so far, in order of arrival.
    """

    def __init__(self, root: Path):
        self.root = Path(root)
        self.tokens: dict[str, str] = {}
        self.requests: list[Request] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._http.daemon_threads = True
        self._http.hub = self
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> "HubServer":
        Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """The environment of a subprocess that uses this hub and a cache of its own.

        Args:
            home: folder for huggingface_hub's cache.
            more: further variables, such as HF_HUB_OFFLINE="1".
        """
        ours = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
        others = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        return others | ours | more

    def add_rte(self, splits: dict[str, dict[str, list]]) -> None:
        """Adds GLUE's RTE as the hub has it, with these columns per split."""
        parquet = pytest.importorskip("pyarrow.parquet")
        table = pytest.importorskip("pyarrow").table
        folder = self.root / "datasets" / "nyu-mll" / "glue"
        (folder / "rte").mkdir(parents=True)
        files = "".join(f"\n  - split: {name}\n    path: rte/{name}-*" for name in splits)
        (folder / "README.md").write_text(_RTE_CARD.format(files=files))
        for name, columns in splits.items():
            parquet.write_table(table(columns), folder / "rte" / f"{name}-00000-of-00001.parquet")

    def downloads(self) -> list[Request]:
        """The requests so far that fetched a file's content."""
        return [r for r in self.requests if r.method == "GET" and "/resolve/" in r.path]

    def find(self, kind: str | None, name: str, token: str | None) -> Repo | None:
        """The repository of that name, if it exists and the token opens it."""
        folder = self.root / ("datasets" if kind == "datasets" else "") / name
        opened = self.tokens.get(name) in (None, token)
        return Repo(name, folder) if opened and folder.is_dir() else None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing: requests are in `HubServer.requests`."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        self.server.hub.requests.append(Request(self.command, url.path))
        route = _API.fullmatch(url.path) or _RESOLVE.fullmatch(url.path)
        if route is None:
            return self._fail(404, None, "no such route")
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        repo = self.server.hub.find(route["kind"], route["repo"], token)
        if repo is None:
            return self._fail(404, "RepoNotFound", "Repository not found")
        if (route["revision"] or BRANCH) not in (BRANCH, repo.commit()):
            return self._fail(404, "RevisionNotFound", "Invalid rev id")
        path = unquote(route["path"] or "")
        if route.re is _RESOLVE:
            return self._send_file(repo, path)
        return self._send_api(repo, route["verb"], path)

    def _send_api(self, repo: Repo, verb: str | None, path: str) -> None:
        if verb == "tree":
            if not (repo.folder / path).is_dir():
                return self._fail(404, "EntryNotFound", f"{path} does not exist")
            return self._send_json(repo.tree(path, self.query.get("recursive") == ["true"]))
        if verb == "paths-info":
            paths = [path.strip("/") for path in self._posted_paths()]
            return self._send_json([repo.entry(p) for p in paths if (repo.folder / p).exists()])
        return self._send_json(repo.info())

    def _posted_paths(self) -> list[str]:
        if "json" in self.headers.get("Content-Type", ""):
            return json.loads(self.body)["paths"]
        return parse_qs(self.body.decode()).get("paths", [])

    def _send_json(self, content: object) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send_file(self, repo: Repo, path: str) -> None:
        commit = {"X-Repo-Commit": repo.commit()}
        if path not in repo.files():
            return self._fail(404, "EntryNotFound", "Entry not found", commit)
        content = (repo.folder / path).read_bytes()
        headers = commit | {"ETag": f'"{repo.etag(path)}"', "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            return self._send(200, content, headers)
        start, end = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
        if start >= len(content):
            return self._fail(416, None, "Range Not Satisfiable", headers)
        headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
        return self._send(206, content[start : end + 1], headers)

    def _fail(
        self, status: int, code: str | None, message: str, headers: dict[str, str] | None = None
    ) -> None:
        headers = (headers or {}) | {"X-Error-Message": message}
        if code is not None:
            headers["X-Error-Code"] = code
        self._send(status, json.dumps({"error": message}).encode(), headers)

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
