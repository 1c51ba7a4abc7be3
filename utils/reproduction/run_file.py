"""A file of finished runs: what each of them was, and what it came to."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

from loralib.io.atomic import atomic_write

Results = TypeVar("Results")


def fingerprint(files: Iterable[Path]) -> str:
    """A short digest of files' contents."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


class RunFile(Generic[Results]):
    """The results of the runs that are finished, by what decides them.

    Args:
        path: a JSON object a line: the run's description, and its results.
        kind: the results' dataclass.

    Raises:
        ValueError: a line is something else.
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
        """Whether a run is finished."""
        return self._key(run) in self._results

    def __getitem__(self, run: dict[str, Any]) -> Results:
        """A finished run's results."""
        return self._results[self._key(run)]

    def __setitem__(self, run: dict[str, Any], results: Results) -> None:
        """Keeps a run's results, on disk as well."""
        self._results[self._key(run)] = results
        lines = [
            json.dumps({"run": json.loads(key), "results": asdict(found)}) + "\n"
            for key, found in self._results.items()
        ]
        with atomic_write(self.path) as temporary:
            temporary.write_text("".join(lines), encoding="utf-8")
