"""What the scripts share: logging, and errors as one line."""

import logging
import os
import sys
from collections.abc import Callable

import datasets

from loralib.checkpoint import CheckpointError

from ..trainer import TrainingError

# Errors with a message for the user; any other is a bug, and shows where it is.
_EXPECTED = (CheckpointError, TrainingError, OSError, ValueError)


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


def run(main: Callable[[], None]) -> None:
    """Runs a script's `main`; an error that a user can mend ends it with one line and status 1.

    With ``TRANSFORMERS_VERBOSITY=debug`` the line comes with the traceback.
    """
    try:
        main()
    except _EXPECTED as error:
        if os.environ.get("TRANSFORMERS_VERBOSITY") == "debug":
            raise
        where = f" (process {_rank()})" if _rank() else ""
        message = " ".join(str(error).split())
        print(f"{os.path.basename(sys.argv[0])}: error{where}: {message}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
