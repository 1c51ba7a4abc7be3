"""Runs a script: sets up logging, reports errors in one line, and ends the process in order.

PyTorch is not imported here, because that takes a second and some scripts do not need it.
"""

import atexit
import gc
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from ..errors import TrainingError, UnsupportedLayerError
from ..io.atomic import DISK_FULL
from ..io.console import ConsoleHandler, say
from ..io.elastic_error import tell_launcher
from .launcher_env import rank
from .standard_streams import OUTPUT, drop_output, flushing_output, set_up_streams

# The levels that `set_up_logging` accepts.
LOG_LEVELS = ("debug", "info", "warning", "error")

_console: ConsoleHandler | None = None  # set by `set_up_logging`, unless the root has handlers


def set_up_logging(level: str = "info", own: Iterable[str] = ()) -> None:
    """Shows log messages on standard error: this project's from `level` on, libraries' warnings.

    If there are several processes, the main one shows them. The others show only errors, and record
    logged warnings for `share_warnings`. Those of `warnings.warn` are shown by the main process
    only. This may be called again with another level. If the root logger already has handlers, they
    show the messages.

    Args:
        level: one of `LOG_LEVELS`.
        own: names of further loggers that belong to this project.
    """
    global _console
    root, is_main = logging.getLogger(), rank() == 0
    number: int = getattr(logging, level.upper())
    if not root.handlers:
        _console = ConsoleHandler()
        root.addHandler(_console)
    if _console is not None:
        _console.shown_from = number if is_main else logging.ERROR
    loudest = max(number, logging.WARNING)
    # A lower level that was set by other code is kept.
    root.setLevel(loudest if loudest > logging.WARNING else min(loudest, root.level))
    for name in ("loralib", "transformers", "__main__", *own):
        logging.getLogger(name).setLevel(number if is_main else loudest)
    # matplotlib's warnings are about fonts and caches.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    if number >= logging.ERROR or not is_main:
        warnings.simplefilter("ignore")  # the main process has nearly all of them as well


def warnings_so_far() -> list[str]:
    """Returns the warnings logged in this process, each once; none without `set_up_logging`."""
    return list(_console.warnings) if _console is not None else []


_is_script = False  # whether this process began without the garbage collector; set by `run`


def begin() -> None:
    """Begins a script, before it imports what takes seconds; in effect until `run` is called.

    The garbage collector is off, see `without_collector`. Ctrl-C ends the process at once with one
    line, because there is nothing to clean up yet, and an exception within an import may be lost.
    """
    set_up_streams()
    gc.disable()
    # Not if the signal is ignored, as in background jobs of a shell script.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_interrupted)


def _end_interrupted(*_: object) -> None:
    _say_interrupted(say)
    end_at_once(_INTERRUPTED)


_INTERRUPTED = 130  # the status that shells report for a program ended by SIGINT


def _say_interrupted(report: Callable[[str], None]) -> None:
    """Reports the interruption, once if several processes are interrupted together.

    A launcher passes Ctrl-C on to all processes of its machine, and the first of them reports it.
    Without a launcher, the main process does; another one does if it is still running a moment
    later.
    """
    if rank():
        _stop_watching()
        with _ignoring_interrupts():  # the launcher's and the terminal's signals may both arrive
            time.sleep(HEAD_START)
    is_passed_on = "TORCHELASTIC_RUN_ID" in os.environ
    if is_passed_on and os.environ.get("LOCAL_RANK", "0") != "0":
        return
    report(f"{os.path.basename(sys.argv[0])}: interrupted{_which()}")


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def without_collector() -> Iterator[None]:
    """Keeps the garbage collector off within a block of imports, and later off their objects.

    Importing PyTorch makes some 250,000 permanent objects, and the collector goes through them
    several times meanwhile, which takes a fifth of the time or more. The tasks' scripts, GPT-2's,
    and those that convert turn it off by `begin`, and `run` turns it on. This block is for what
    they import later. If another program calls a script's `main`, it changes nothing, because that
    program's objects may become garbage that has to be collected.
    """
    if not _is_script:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        _turn_collector_on()


def _turn_collector_on() -> None:
    """Turns the garbage collector on for objects that are made from here on."""
    gc.freeze()
    gc.enable()


HEAD_START = 1.0
"""Seconds for which the other processes wait before they show an error.

If the main process has the same error, the launcher sees it end and ends the others before they
repeat the message.
"""


def run(
    main: Callable[[], None],
    report: Callable[[str], None] = say,
    timeout: str = "the timeout",
) -> None:
    """Runs a script's `main`; an error that a user can fix ends it with one line and status 1.

    With ``LORA_DEBUG=1`` the error is raised with its traceback instead. If the reader of standard
    output is gone, as after ``| head``, the script ends silently with the status that shells have
    for that. If the garbage collector is off, as during the script's imports, it is turned on; see
    `without_collector`.

    Args:
        main: the script.
        report: shows the line.
        timeout: the script's name for the time for which processes wait for each other.
    """
    global _is_script
    set_up_streams()
    if not gc.isenabled():
        _is_script = True
        _turn_collector_on()
    if signal.getsignal(signal.SIGINT) is _end_interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with flushing_output():
            main()
        _leave_group()
    except _expected_errors() as error:
        if isinstance(error, BrokenPipeError) and error.filename == OUTPUT:
            _end(_UNREAD)
        _end_with(error, report)
    except RuntimeError as error:
        if _NO_MEMORY in str(error):
            _end_with(error, report)
        if not is_lost_peer(error) or os.environ.get("LORA_DEBUG") == "1":
            raise
        _stop_watching()
        gone = "another process of the run is gone; if it ended with an error, see its message"
        if any(mark in str(error).lower() for mark in _TOO_LATE):
            gone = f"other processes of the run did not answer in time; see {timeout}"
        report(_line(TrainingError(gone)))
        _end(1)
    except KeyboardInterrupt:
        _say_interrupted(report)
        drop_output()
        sys.exit(_INTERRUPTED)


_UNREAD = 141  # the status that shells report for a program ended by SIGPIPE
# A part of PyTorch's error if there is too little memory on the CPU, which has no class of its own.
_NO_MEMORY = "DefaultCPUAllocator: "


def _end_with(error: Exception, report: Callable[[str], None]) -> NoReturn:
    """Ends the process with an error that a user can fix, or raises it if that is asked for."""
    if os.environ.get("LORA_DEBUG") == "1":
        raise error
    _stop_watching()  # so that this error ends the process, and not that others are gone
    line = _line(error)
    # Before the wait: a launcher takes the first of several processes' errors for the cause, and
    # those of processes that only miss this one come later.
    tell_launcher(line)
    if rank():
        time.sleep(HEAD_START)
    report(line)
    _end(1)


def _expected_errors() -> tuple[type[Exception], ...]:
    """Returns the errors that a user can fix, including PyTorch's own if that is imported."""
    torch = sys.modules.get("torch")
    of_torch = (torch.OutOfMemoryError,) if torch else ()
    return (TrainingError, UnsupportedLayerError, OSError, ValueError, MemoryError, *of_torch)


def _is_in_group() -> bool:
    """Returns whether this process belongs to PyTorch's process group."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_initialized()


def _stop_watching() -> None:
    """Stops watching the other processes, if there are any; see watch.py."""
    if _is_in_group():
        from .watch import stop_watching  # here, because it imports this module

        stop_watching()


def _line(error: Exception) -> str:
    message = " ".join(error_in_words(error).split())
    return f"{os.path.basename(sys.argv[0])}: error{_which()}: {message}"


def _which() -> str:
    return f" (process {rank()})" if rank() else ""


def error_in_words(error: Exception) -> str:
    """Returns an error's message; for the system's errors, the file followed by the reason."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        in_the_way = isinstance(error, FileExistsError) and os.path.isfile(error.filename)
        reason = "is a file, where a folder is needed" if in_the_way else error.strerror
        return f"{error.filename}: {reason}"
    if isinstance(error, OSError) and error.errno in DISK_FULL:  # a library's, which names no file
        return (
            f"{error.strerror}: df shows which disk is full, that of the output, of a cache (such "
            "as HF_HOME) or of temporary files (TMPDIR); make room and start again"
        )
    return str(error) or type(error).__name__  # Python's own MemoryError has no message


# Parts of the errors of gloo's and NCCL's collectives: another process has not answered in time, or
# it has died.
_TOO_LATE = ("timed out", "before timing out")
_LOST = (
    *_TOO_LATE,
    *("connection closed by peer", "connection reset by peer", "broken pipe"),
    *("connection closed by remote peer", "remote process exited or there was a network error"),
    "nccl communicator was aborted",
)


def is_lost_peer(error: RuntimeError) -> bool:
    """Returns whether a collective raised this error because another process is gone.

    It has died, or was out of reach for as long as the group waits.
    """
    text = str(error).lower()
    return _is_in_group() and any(mark in text for mark in _LOST)


def _end(status: int) -> NoReturn:
    """Ends the process; at once if it belongs to a group, where others wait for it."""
    if _is_in_group():
        end_at_once(status)
    drop_output()
    sys.exit(status)


def end_at_once(status: int) -> NoReturn:
    """Ends the process from any thread, even if its output can no longer be written."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):  # a broken pipe, a closed file
            stream.flush()
    os._exit(status)


def _leave_group() -> None:
    """Ends a process of a group once all of them have finished.

    Gloo's threads race with the interpreter's exit, and sometimes the process aborts although
    nothing is left to do. So this runs the exit functions, and skips the rest of the exit.
    """
    if not _is_in_group():
        return
    import torch.distributed as dist

    _stop_watching()
    dist.barrier()
    if dist.get_backend() == "nccl":
        dist.destroy_process_group()
    atexit._run_exitfuncs()
    end_at_once(0)
