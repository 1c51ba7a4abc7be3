"""What PyTorch's launcher is told of an error, to show it at the end of its own lines.

Where a process ends by an error, the launcher prints a traceback of itself and then a table of what
has failed. Without a word of the process, the table says how a traceback could be enabled; with
this, its last line is the error.
"""

import json
import os
import time
from contextlib import suppress
from pathlib import Path

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # where a launcher looks, of each of its processes


def tell_launcher(line: str) -> None:
    """Has the launcher's table of failed processes show an error, where there is a launcher.

    In the format of ``torch.distributed.elastic``, without its import. Of several processes the
    first error counts, and an earlier one of this process stays.

    Args:
        line: the error, as it is shown on the console.
    """
    path = os.environ.get(_ERROR_FILE)
    if not path or os.path.exists(path):
        return
    error = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
    with suppress(OSError):  # a disk that is full; the line is on the console, too
        Path(path).write_text(json.dumps({"message": error}), encoding="utf-8")
