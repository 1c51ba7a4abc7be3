"""Scripts and PyTorch's launcher in processes that are forks: what they import is imported once.

    forked_processes.py --serve MODULE,…

imports the modules, and forks a process for each line of standard input, see `serve`. In a line is
a script with its arguments, which the fork runs; or

    LAUNCHER FLAGS… forked_processes.py SCRIPT ARGUMENTS…

LAUNCHER is torch.distributed.run or torch.distributed.launch. Its agent, its store and its restarts
are as ever, and so is what a process finds in its environment. It starts this file once more in
each process, for the one thing that differs there: a process that is done has to return.
"""

import importlib
import json
import logging
import os
import runpy
import signal
import sys
import threading
from pathlib import Path


def serve() -> list[str]:
    """Forks a process a line, waits for it, and answers with its number and then its status.

    A line is JSON: the arguments, the environment, the folder, and the paths of the files for what
    is written to standard output and standard error. Ends with its input.

    Returns:
        In each fork, the arguments.
    """
    answers = os.dup(1)
    for line in sys.stdin:
        call = json.loads(line)
        number = os.fork()
        if number == 0:
            os.close(answers)
            for stream, path in enumerate([os.devnull, *call["paths"]]):
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
                os.dup2(file, stream)
                os.close(file)
            os.environ.clear()
            os.environ.update(call["environment"])
            os.chdir(call["folder"])
            return call["arguments"]
        os.write(answers, f"{number}\n".encode())
        status = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
        os.write(answers, f"{status}\n".encode())
    sys.exit()


def launch(launcher: str, arguments: list[str]) -> None:
    # It logs the end of a process that was forked with a traceback of its own.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    sys.argv[0] = launcher
    importlib.import_module(launcher).main(["--run_path", "--start_method=fork", *arguments])


def run_script(script: str, arguments: list[str]) -> None:
    """Runs a script as the command line does, where Python is new."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [str(Path(script).parent), *filter(None, paths)]
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def run_launched(arguments: list[str]) -> None:
    """Runs a script as the command line does, in a launcher's process."""
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


def main() -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        run_launched(sys.argv[1:])
        return
    for name in sys.argv[2].split(","):
        importlib.import_module(name)
    first, *arguments = serve()
    run = run_script if first.endswith(".py") else launch
    run(first, arguments)


if __name__ == "__main__":
    main()
