"""PyTorch's launcher, with processes that are forks of it: what they import is imported once.

    forked_processes.py [--imports MODULE,…] LAUNCHER FLAGS… forked_processes.py SCRIPT ARGUMENTS…

LAUNCHER is torch.distributed.run or torch.distributed.launch. Its agent, its store and its restarts
are as ever, and so is what a process finds in its environment. It starts this file once more in
each process, for the one thing that differs there: a process that is done has to return.
"""

import importlib
import logging
import os
import runpy
import signal
import sys
import threading
from pathlib import Path


def launch(arguments: list[str]) -> None:
    if arguments[0] == "--imports":
        for name in arguments[1].split(","):
            importlib.import_module(name)
        arguments = arguments[2:]
    # It logs the end of a process that was forked with a traceback of its own.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    launcher, *arguments = arguments
    sys.argv[0] = launcher
    importlib.import_module(launcher).main(["--run_path", "--start_method=fork", *arguments])


def run(arguments: list[str]) -> None:
    """Runs a script as the command line does."""
    # torch.distributed.launch puts a flag of its own before the script.
    at = next(at for at, word in enumerate(arguments) if not word.startswith("--local"))
    script = arguments.pop(at)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher's own handler raises an error
    leave = os._exit

    def return_or_leave(status: int) -> None:
        if status == 0 and threading.current_thread() is threading.main_thread():
            sys.exit(0)
        leave(status)

    os._exit = return_or_leave
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        os._exit = leave


if __name__ == "__main__":
    (run if "TORCHELASTIC_RUN_ID" in os.environ else launch)(sys.argv[1:])
