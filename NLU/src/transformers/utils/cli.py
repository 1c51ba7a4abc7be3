"""What the scripts share: logging, and errors as one line."""

import atexit
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import datasets
import torch
import torch.distributed as dist
from tqdm.auto import tqdm

from loralib.checkpoint import CheckpointError

from ..trainer_utils import TrainingError, get_last_checkpoint
from ..training_args import TrainingArguments

logger = logging.getLogger(__name__)

# Errors with a message for the user; any other is a bug, and shows where it is.
_EXPECTED = (CheckpointError, TrainingError, OSError, ValueError, torch.OutOfMemoryError)


def set_up_logging() -> None:
    """Logs to the console: everything from the main process, from the others warnings only."""
    main = _rank() == 0
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        level=logging.WARNING,
    )
    for name in ("transformers", "__main__"):
        logging.getLogger(name).setLevel(logging.INFO if main else logging.WARNING)
    if not main:
        datasets.disable_progress_bars()


def find_checkpoint(args: TrainingArguments) -> str | None:
    """The checkpoint to resume from: the last one in the output folder, which must be ours.

    Raises:
        ValueError: training would write into a folder that holds something, but no checkpoint.
        NotADirectoryError: the output folder is a file.
    """
    folder = Path(args.output_dir)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"--output_dir {folder} is a file")
    if not args.do_train or not folder.exists():
        return None
    checkpoint = get_last_checkpoint(folder)
    if args.overwrite_output_dir:
        if checkpoint:
            logger.warning("the checkpoints in %s are replaced at the first save", folder)
        return None
    if checkpoint is None and any(not path.name.startswith(".") for path in folder.iterdir()):
        raise ValueError(
            f"--output_dir {folder} is not empty and holds no checkpoint to resume from: "
            "give another folder, or --overwrite_output_dir"
        )
    return checkpoint


def run(main: Callable[[], None]) -> None:
    """Runs a script's `main`; an error that a user can mend ends it with one line and status 1.

    With ``TRANSFORMERS_VERBOSITY=debug`` the line comes with the traceback.
    """
    try:
        main()
        _leave_group()
    except _EXPECTED as error:
        if os.environ.get("TRANSFORMERS_VERBOSITY") == "debug":
            raise
        where = f" (process {_rank()})" if _rank() else ""
        message = " ".join(str(error).split())
        # On a line of its own, even where a bar is being shown.
        tqdm.write(f"{os.path.basename(sys.argv[0])}: error{where}: {message}", file=sys.stderr)
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


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
