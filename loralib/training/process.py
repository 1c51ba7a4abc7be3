"""A script's process: PyTorch's settings, its seeds, its errors as one line, its orderly end."""

import atexit
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from ..errors import CheckpointError, TrainingError, UnsupportedLayerError

logger = logging.getLogger(__name__)

EXPECTED_ERRORS = (
    *(CheckpointError, TrainingError, UnsupportedLayerError),
    *(OSError, ValueError, torch.OutOfMemoryError),
)


def set_up_device(*, tf32: bool = False, deterministic: bool = False) -> None:
    """Sets what PyTorch would otherwise decide by itself on a GPU; called before computing there.

    cuDNN's attention is switched off: it makes a plan for every new shape, which takes longer than
    the attention itself where batches are as long as their longest row.

    Args:
        tf32: let float32 products and convolutions run in TensorFloat-32, with 10 bits of mantissa
            for 23; by default neither does. PyTorch's own default is convolutions alone.
        deterministic: PyTorch's deterministic mode: the same bits from the same run on the same
            GPU. It stays on where it is on already.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    # These names are known to all versions from 2.6 on, and set those of the later fp32_precision
    # as well; after the reverse, reading these raises an error, which torch.compile runs into.
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    if deterministic:
        # cuBLAS needs a workspace of its own for it, known before its first use. The other size
        # that NVIDIA names, :16:8, is too small for the fast kernels of large products.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def set_seed(seed: int) -> None:
    """Seeds Python, NumPy and PyTorch on all devices; for weights, which all processes share."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def set_dropout_seed(seed: int, process: int) -> None:
    """Seeds PyTorch for training: dropout differs between processes."""
    torch.manual_seed(seed + process)


def _uses_gpu(device: torch.device | None) -> bool:
    return torch.cuda.is_available() if device is None else device.type == "cuda"


def rng_state(device: torch.device | None = None) -> dict[str, Any]:
    """The state of all generators that `set_seed` seeds, in a format that loads weights-only.

    Args:
        device: where the run computes, by default on a GPU where there is one; a run on the CPU
            has no state of a GPU's generator.
    """
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    version, internal, gauss_next = random.getstate()
    state: dict[str, Any] = {
        "python": (version, list(internal), gauss_next),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    if _uses_gpu(device):
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any], device: torch.device | None = None) -> None:
    """Puts the generators where `rng_state` found them.

    A state of a run on the CPU has nothing for a GPU's generator, and the reverse. Such a run
    resumes with that generator as it is, and the main process warns.

    Args:
        state: what `rng_state` returned.
        device: where the run computes now; as for `rng_state`.
    """
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    on_gpu = _uses_gpu(device)
    if on_gpu and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    elif on_gpu != ("cuda" in state) and rank() == 0:
        places = ("a CPU", "a GPU")
        logger.warning(
            "resumes, but not bit-exact: the checkpoint was written on %s, and this run computes "
            "on %s, which has other random numbers",
            *(places if on_gpu else reversed(places)),
        )


def started(pid: int) -> str:
    """When a process was started, in the kernel's ticks; empty where that cannot be known.

    It tells a process from a later one of the same number.
    """
    try:
        # The command's name, in parentheses, may hold anything; this is the 20th field after it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def rank() -> int:
    """This process's number among those of the run, as launchers set it; 0 without one."""
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else 0


def set_up_logging(level: int = logging.INFO, *, with_names: bool = False) -> None:
    """Logs to the console: from the main process `level` and above, from the others errors only.

    Args:
        level: the main process's.
        with_names: whether a line says which logger it comes from.
    """
    name = " %(name)s:" if with_names else ""
    logging.basicConfig(format=f"%(asctime)s %(levelname)s{name} %(message)s", datefmt="%H:%M:%S")
    is_main = rank() == 0
    root = logging.getLogger()
    # A lower level that somebody has set stays.
    root.setLevel(min(level, root.level) if is_main else logging.ERROR)
    if not is_main:
        warnings.simplefilter("ignore")  # the main process gives them as well


def run(
    main: Callable[[], None], report: Callable[[str], None], timeout: str = "the timeout"
) -> None:
    """Runs a script's `main`; an error that a user can mend ends it with one line and status 1.

    With ``LORA_DEBUG=1`` the error comes with the traceback instead.

    Args:
        main: the script.
        report: shows a line on the console.
        timeout: what the script calls the time for which processes wait for each other.
    """
    try:
        main()
        _leave_group()
    except EXPECTED_ERRORS as error:
        if os.environ.get("LORA_DEBUG") == "1":
            raise
        _report(error, report)
        _end(1)
    except RuntimeError as error:
        if not is_lost_peer(error) or os.environ.get("LORA_DEBUG") == "1":
            raise
        gone = "another process of the run is gone; if it ended by an error, it has said which"
        if "timed out" in str(error).lower():
            gone = f"other processes of the run did not answer in time; see {timeout}"
        _report(TrainingError(gone), report)
        _end(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _report(error: Exception, report: Callable[[str], None]) -> None:
    where = f" (process {rank()})" if rank() else ""
    message = " ".join(_in_words(error).split())
    report(f"{os.path.basename(sys.argv[0])}: error{where}: {message}")


def _in_words(error: Exception) -> str:
    """What an error says; the system's own, the file and then the reason."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def is_lost_peer(error: RuntimeError) -> bool:
    """Whether this is what a collective raises in the processes that are left when one has died.

    Or has been out of reach for as long as the group waits.
    """
    text = str(error).lower()
    marks = ("connection closed by peer", "connection reset by peer", "broken pipe", "timed out")
    return dist.is_initialized() and any(mark in text for mark in marks)


def _end(status: int) -> None:
    """Ends the process; at once where it is one of a group, whose others wait for it."""
    if dist.is_initialized():
        end_at_once(status)
    sys.exit(status)


def end_at_once(status: int) -> NoReturn:
    """Ends the process from any thread, even if its output can no longer be written."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a pipe that is broken, a file that is closed
            stream.flush()
    os._exit(status)


def _leave_group() -> None:
    """Ends one process of a group, all of which have done their work.

    Gloo's threads and the interpreter's end race each other, and now and then the process aborts
    although nothing is left to do. So what is to run at exit is run, and the end is left out.
    """
    if not dist.is_initialized():
        return
    from .watch import stop_watching  # which needs this module

    stop_watching()
    dist.barrier()
    if dist.get_backend() == "nccl":
        dist.destroy_process_group()
    atexit._run_exitfuncs()
    end_at_once(0)
