"""Runs a script: its logging, its errors as one line, its orderly end.

PyTorch is not imported here: that takes a second, and some scripts need none.
"""

import atexit
import gc
import io
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from ..errors import CheckpointError, TrainingError, UnsupportedLayerError
from ..io.console import ConsoleHandler, say
from ..io.elastic_error import tell_launcher
from .launched import rank

# The levels that `set_up_logging` takes.
LOG_LEVELS = ("debug", "info", "warning", "error")

_console: ConsoleHandler | None = None  # once logging is set up, where nobody else has done so


def set_up_logging(level: str = "info", own: Iterable[str] = ()) -> None:
    """Shows messages on standard error: this project's from a level on, libraries' from warnings.

    Of several processes the main one shows them; the others show errors alone, and note the
    warnings that are logged for `share_warnings`; those of `warnings.warn` are the main process's
    alone. May be called again with another level. Where the root logger has handlers already, they
    show what there is.

    Args:
        level: one of `LOG_LEVELS`.
        own: names of more loggers that are this project's.
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
    # A lower level that somebody has set stays.
    root.setLevel(loudest if loudest > logging.WARNING else min(loudest, root.level))
    for name in ("loralib", "transformers", "__main__", *own):
        logging.getLogger(name).setLevel(number if is_main else loudest)
    # Its warnings are of its fonts and caches.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    if number >= logging.ERROR or not is_main:
        warnings.simplefilter("ignore")  # the main process gives nearly all of them as well


def warnings_so_far() -> list[str]:
    """The warnings that were logged in this process, each once; none without `set_up_logging`."""
    return list(_console.warnings) if _console is not None else []


_is_script = False  # whether this process began without the garbage collector, for `run`


def begin() -> None:
    """Begins a script, before it imports what takes seconds; `run` ends what holds until then.

    The garbage collector is off, see `without_collector`. Ctrl-C ends the process at once, with one
    line: there is nothing to put in order yet, and an exception within an import may be lost.
    """
    _set_up_streams()
    gc.disable()
    # Not where somebody has had it ignored, as nohup's shell does.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_interrupted)


def _set_up_streams() -> None:
    """Has standard error be there, and standard output take all characters and name itself.

    A stream is None where it was closed, as by ``2>&-``, or never there, as for Windows' services.
    Standard output's encoding may lack characters, such as "√" on a pipe of Windows: they become
    escapes, as they do on standard error, and no error.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the end
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    _set_up_output()


_OUTPUT = "standard output"  # what its errors say, as others do a file's name


class _Output(io.FileIO):
    """Standard output's file, whose errors say that they are of this, and of no other pipe."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, _OUTPUT) from error


def _set_up_output() -> None:
    """Has the errors of Python's own standard output be known as its, by `_Output`."""
    stream = sys.stdout
    if stream is not sys.__stdout__ or not isinstance(stream, io.TextIOWrapper):
        return  # a test's, or a notebook's
    file = getattr(stream.buffer, "raw", stream.buffer)  # which is the file, with python -u
    if type(file) is not io.FileIO:
        return  # a console of Windows
    stream.flush()
    own = _Output(stream.fileno(), "w", closefd=False)
    own.name = file.name  # Python's own are called <stdout>, not by their number
    new: Any = io.TextIOWrapper(
        own if file is stream.buffer else io.BufferedWriter(own),
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    new.mode = stream.mode
    sys.stdout = new


def _end_interrupted(*_: object) -> None:
    _say_interrupted(say)
    end_at_once(_INTERRUPTED)


_INTERRUPTED = 130  # what shells call a program's status that SIGINT has ended


def _say_interrupted(report: Callable[[str], None]) -> None:
    """Says it, once where several processes are interrupted together.

    A launcher passes Ctrl-C on to all processes of its machine, of which the first one says it.
    Without a launcher, another process than the main one says it where that is still there.
    """
    if rank():
        _stop_watching()
        with _ignoring_interrupts():  # the launcher's and the terminal's may both arrive
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
    """Keeps Python's garbage collector off in this block, which imports much, and off its objects.

    Importing PyTorch makes some 250,000 objects that stay, and the collector goes through them
    several times meanwhile, which is a fifth of the time or more. The tasks' scripts, GPT-2's, and
    those that convert turn it off by `begin`; `run` turns it on. This block is for what they import
    later; where a script's `main` is called by another process, it changes nothing: what that holds
    may become garbage that has to be collected.
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
    """Turns the garbage collector on, for objects that are made from here on."""
    gc.freeze()
    gc.enable()


HEAD_START = 1.0
"""Seconds by which the main process shows an error first.

Where it has the same one, the launcher sees it end and ends the others, which then say nothing.
"""


def run(
    main: Callable[[], None],
    report: Callable[[str], None] = say,
    timeout: str = "the timeout",
) -> None:
    """Runs a script's `main`; an error that a user can mend ends it with one line and status 1.

    With ``LORA_DEBUG=1`` the error comes with the traceback instead. Where nobody reads standard
    output any more, as after ``| head``, it ends without a word, and with the status that shells
    have for that. Where the garbage collector is off, the script has imported without it: it is
    turned on, see `without_collector`.

    Args:
        main: the script.
        report: shows the line.
        timeout: what the script calls the time for which processes wait for each other.
    """
    global _is_script
    _set_up_streams()
    if not gc.isenabled():
        _is_script = True
        _turn_collector_on()
    if signal.getsignal(signal.SIGINT) is _end_interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with _flushing_output():
            main()
        _leave_group()
    except _expected_errors() as error:
        if isinstance(error, BrokenPipeError) and error.filename == _OUTPUT:
            _end(_UNREAD)
        if os.environ.get("LORA_DEBUG") == "1":
            raise
        _stop_watching()  # this process's own error is what ends it, not that others are gone
        line = _line(error)
        # Before the wait: to a launcher the first error of several processes is their cause, and
        # those that this process's end will leave without it come later.
        tell_launcher(line)
        if rank():
            time.sleep(HEAD_START)
        report(line)
        _end(1)
    except RuntimeError as error:
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
        _drop_output()
        sys.exit(_INTERRUPTED)


@contextmanager
def _flushing_output() -> Iterator[None]:
    """Writes out at the block's end what was printed, so that an error of this can be handled.

    At the interpreter's end it could not. Where the block ends with an error, that is the one.
    """
    try:
        yield
    except SystemExit as ended:
        if ended.code:
            _drop_output()
        else:  # such as that of --help
            _flush_output()
        raise
    except BaseException:
        _drop_output()
        raise
    _flush_output()


def _flush_output() -> None:
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()


def _drop_output() -> None:
    """Drops what is left of the output and cannot be written.

    It would be an error at the interpreter's end, after that which ends the process.
    """
    try:
        _flush_output()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


_UNREAD = 141  # what shells call a program's status that SIGPIPE has ended


def _expected_errors() -> tuple[type[Exception], ...]:
    """Errors that a user can mend; one of them is PyTorch's, if that has been imported."""
    ours = (CheckpointError, TrainingError, UnsupportedLayerError)
    torch = sys.modules.get("torch")
    return (*ours, OSError, ValueError, *((torch.OutOfMemoryError,) if torch else ()))


def _is_in_group() -> bool:
    """Whether this is one of several processes that PyTorch has joined."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_initialized()


def _stop_watching() -> None:
    """Has this process be watched no longer, if it is one of several; see watch.py."""
    if _is_in_group():
        from .watch import stop_watching  # which needs this module

        stop_watching()


def _line(error: Exception) -> str:
    message = " ".join(error_in_words(error).split())
    return f"{os.path.basename(sys.argv[0])}: error{_which()}: {message}"


def _which() -> str:
    return f" (process {rank()})" if rank() else ""


def error_in_words(error: Exception) -> str:
    """What an error says; the system's own, the file and then the reason."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        in_the_way = isinstance(error, FileExistsError) and os.path.isfile(error.filename)
        reason = "is a file, where a folder is needed" if in_the_way else error.strerror
        return f"{error.filename}: {reason}"
    return str(error)


# What collectives say, of gloo and of NCCL, where another process has not answered in time, and
# where it has died.
_TOO_LATE = ("timed out", "before timing out")
_LOST = (
    *_TOO_LATE,
    *("connection closed by peer", "connection reset by peer", "broken pipe"),
    *("connection closed by remote peer", "remote process exited or there was a network error"),
    "nccl communicator was aborted",
)


def is_lost_peer(error: RuntimeError) -> bool:
    """Whether this is what a collective raises in the processes that are left when one has died.

    Or has been out of reach for as long as the group waits.
    """
    text = str(error).lower()
    return _is_in_group() and any(mark in text for mark in _LOST)


def _end(status: int) -> NoReturn:
    """Ends the process; at once where it is one of a group, whose others wait for it."""
    if _is_in_group():
        end_at_once(status)
    _drop_output()
    sys.exit(status)


def end_at_once(status: int) -> NoReturn:
    """Ends the process from any thread, even if its output can no longer be written."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):  # a pipe that is broken, a file that is closed
            stream.flush()
    os._exit(status)


def _leave_group() -> None:
    """Ends one process of a group, all of which have done their work.

    Gloo's threads and the interpreter's end race each other, and now and then the process aborts
    although nothing is left to do. So what is to run at exit is run, and the end is left out.
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
