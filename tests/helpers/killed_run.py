"""Runs a script as the command line does, and kills its process at a chosen moment, once.

    killed_run.py --moment MOMENT SCRIPT ARGUMENTS…

MOMENT is JSON: {"rank": 0, "at": "beat" or "sync", "count": 5, "mark": FILE}.
The process of that rank is killed (by SIGKILL, or "signal") at its fifth batch, of training or
evaluation, or in its fifth write of a file. It creates FILE before that, and is not killed if FILE
exists.
"""

import importlib.util
import json
import os
import signal
import sys
from pathlib import Path

from loralib.io import atomic
from loralib.training import process, watch


def load(path: Path):
    sys.path.insert(0, str(path.parent))  # as running it does
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def arm(moment: dict) -> None:
    """Makes this process kill itself at that moment."""
    if int(os.environ.get("RANK", 0)) != moment["rank"] or Path(moment["mark"]).exists():
        return
    owner, name = {"beat": (watch, "beat"), "sync": (atomic, "sync_file")}[moment["at"]]
    plain, calls = getattr(owner, name), []

    def act(*arguments):
        plain(*arguments)
        calls.append(1)
        if len(calls) == moment["count"]:
            Path(moment["mark"]).touch()
            os.kill(os.getpid(), getattr(signal, moment.get("signal", "SIGKILL")))

    setattr(owner, name, act)


def main() -> None:
    # The launcher inserts a flag of its own before ours.
    start = sys.argv.index("--moment")
    moment, script, *arguments = sys.argv[start + 1 :]
    arguments = [*sys.argv[1:start], *arguments]
    arm(json.loads(moment))
    module = load(Path(script))
    sys.argv = [script, *arguments]
    process.run(lambda: module.main(arguments), lambda line: print(line, file=sys.stderr))


if __name__ == "__main__":
    main()
