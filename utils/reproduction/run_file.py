"""Keeps the descriptions and results of finished runs in a file."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

from loralib.io.atomic import atomic_write_text

Results = TypeVar("Results")


def fingerprint(files: Iterable[Path]) -> str:
    """Returns a short digest of files' contents."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


class RunFile(Generic[Results]):
    """The results of finished runs, by the runs' descriptions.

    Args:
        path: the file, with one JSON object per line: a run's description, and its results.
        kind: the dataclass of the results.

    Raises:
        ValueError: a line is not such an object.
    """

    def __init__(self, path: Path, kind: type[Results]):
        self.path = path
        self._results: dict[str, Results] = {}
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for number, line in enumerate(lines, start=1):
            try:
                entry = json.loads(line)
                self._results[self._key(entry["run"])] = kind(**entry["results"])
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number}: not a run; delete this line") from error

    @staticmethod
    def _key(run: dict[str, Any]) -> str:
        return json.dumps(run, sort_keys=True)

    def __contains__(self, run: dict[str, Any]) -> bool:
        """Returns whether a run is finished."""
        return self._key(run) in self._results

    def __getitem__(self, run: dict[str, Any]) -> Results:
        """Returns a finished run's results."""
        return self._results[self._key(run)]

    def __setitem__(self, run: dict[str, Any], results: Results) -> None:
        """Adds a run's results, and writes the file."""
        self._results[self._key(run)] = results
        lines = [
            json.dumps({"run": json.loads(key), "results": asdict(found)}) + "\n"
            for key, found in self._results.items()
        ]
        atomic_write_text(self.path, "".join(lines))
