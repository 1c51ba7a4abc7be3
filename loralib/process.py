"""A training script's process: its seeds, its errors as one line, its orderly end."""

import atexit
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .files import CheckpointError


class TrainingError(RuntimeError):
    """A run that cannot go on. The message is one line."""


# Errors with a message for the user; any other is a bug, and shows where it is.
EXPECTED_ERRORS = (CheckpointError, TrainingError, OSError, ValueError, torch.OutOfMemoryError)


def set_seed(seed: int) -> None:
    """Seeds Python, NumPy and PyTorch on all devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """The state of all generators that `set_seed` seeds, in a form that loads weights-only."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    version, internal, gauss_next = random.getstate()
    state: dict[str, Any] = {
        "python": (version, list(internal), gauss_next),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Puts the generators where `rng_state` found them."""
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def rank() -> int:
    """This process's number among those of the run, as launchers set it; 0 without one."""
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else 0


def run(main: Callable[[], None], report: Callable[[str], None]) -> None:
    """Runs a script's `main`; an error that a user can mend ends it with one line and status 1.

    With ``LORA_DEBUG=1`` the error comes with the traceback instead.

    Args:
        main: the script.
        report: shows a line on the console.
    """
    try:
        main()
        _leave_group()
    except EXPECTED_ERRORS as error:
        if os.environ.get("LORA_DEBUG") == "1":
            raise
        where = f" (process {rank()})" if rank() else ""
        message = " ".join(str(error).split())
        report(f"{os.path.basename(sys.argv[0])}: error{where}: {message}")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _leave_group() -> None:
    """Ends one process of a group, all of which have done their work.

    Gloo's threads and the interpreter's end race each other, and now and then the process aborts
    although nothing is left to do. So what is to run at exit is run, and the end is left out.
    """
    if not dist.is_initialized():
        return
    dist.barrier()
    if dist.get_backend() == "nccl":
        dist.destroy_process_group()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
