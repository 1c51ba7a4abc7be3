"""Runs scripts and PyTorch's launcher in forks of a process that has done their imports once.

    forked_processes.py MODULE,… SOCKET

imports the modules, and forks a process for each call at the socket, see `serve`. A call has the
arguments of Python's command line, which are a script, -m or -c with arguments, or

    LAUNCHER FLAGS… forked_processes.py SCRIPT ARGUMENTS…

LAUNCHER is torch.distributed.run or torch.distributed.launch. Its agent, its store, its restarts
and the environment of its processes are the usual ones. It runs this file again in each process,
for the one difference: a process that is done has to return instead of ending itself.
"""

import atexit
import contextlib
import gc
import importlib
import json
import logging
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import NoReturn


def serve(path: str) -> list[str]:
    """Forks a process for each call; answers with its process id and, once it ended, its status.

    A call is a byte with three file descriptors, which are its standard streams, and a line of
    JSON: its arguments, environment and folder, and its ``sys.executable`` if that differs. The
    server ends when its own standard input is closed.

    Returns:
        In each fork, the arguments.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    # The end of a fork only wakes `select`. A handler that asked for the status itself could be
    # interrupted by the end of another fork, and both would ask for the same status.
    woken, wakes = socket.socketpair()
    for side in (woken, wakes):
        side.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([listener, sys.stdin, woken], [], [])
        if sys.stdin in ready:
            os._exit(0)
        if woken in ready:
            woken.recv(4096)
            _answer_for_ended(running)
        if listener not in ready:
            continue
        caller, _ = listener.accept()
        call, streams = _receive(caller)
        if call is None:
            caller.close()
            continue
        number = os.fork()
        if number == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for connection in (listener, woken, wakes, caller, *running.values()):
                connection.close()
            _take(call, streams)
            return call["arguments"]
        for stream in streams:
            os.close(stream)
        _answer(caller, number)
        running[number] = caller


def _receive(caller: socket.socket) -> tuple[dict | None, list[int]]:
    """A call and its streams; None if the caller only checked that the server is running, or was
    killed before its call was complete."""
    streams: list[int] = []
    try:
        said, streams, _, _ = socket.recv_fds(caller, 1, 3)
        with caller.makefile("rb") as lines:
            line = lines.readline() if said else b""
    except ConnectionResetError:
        line = b""
    if line.endswith(b"\n"):
        return json.loads(line), streams
    for stream in streams:
        os.close(stream)
    return None, []


def _answer_for_ended(running: dict[int, socket.socket]) -> None:
    for number in list(running):
        ended, status = os.waitpid(number, os.WNOHANG)
        if ended:
            _answer(running[number], os.waitstatus_to_exitcode(status))
            running.pop(number).close()


def _answer(caller: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the caller was killed
        caller.sendall(f"{number}\n".encode())


def _take(call: dict, streams: list[int]) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for stream in streams:
        os.close(stream)
    os.environ.clear()
    os.environ.update(call["environment"])
    os.chdir(call["folder"])
    sys.executable = call.get("executable", sys.executable)


def launch(launcher: str, arguments: list[str]) -> None:
    # If a forked process fails, this logs a traceback of its own.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    sys.argv[0] = launcher
    importlib.import_module(launcher).main(["--run_path", "--start_method=fork", *arguments])


def run_as_python(words: list[str]) -> None:
    """Does what ``python WORDS…`` does."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = ["", *filter(None, paths)]
    if words[0] == "-u":  # with which PyTorch's launcher starts scripts
        words = words[1:]
    kind, *rest = words
    if kind.endswith(".py"):
        sys.argv, sys.path[0] = words, os.path.dirname(os.path.abspath(kind))
        runpy.run_path(kind, run_name="__main__")
    elif kind == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        real = Path(sys.prefix, "bin", "python")
        os.execv(real, [str(real), *words])


def run_launched(arguments: list[str]) -> None:
    """Runs a script as the command line does, in a launcher's process."""
    # torch.distributed.launch inserts a flag of its own before the script.
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
    modules, path = sys.argv[1:]
    for name in modules.split(","):
        importlib.import_module(name)
    gc.freeze()  # the forks' garbage collector must not touch, and so copy, what is imported
    words = serve(path)
    try:
        if words[0].startswith("torch.distributed."):
            launch(words[0], words[1:])
        else:
            run_as_python(words)
        end(0)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        end(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
    except BaseException:
        traceback.print_exc()
        end(1)


def end(status: int) -> NoReturn:
    """Ends as Python does, but without freeing all modules, which takes a second."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
