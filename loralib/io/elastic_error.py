"""Reports an error to PyTorch's launcher, which shows it at the end of its own output.

When a process fails, the launcher prints its own traceback and then a table of the failures. If the
process reported no error, the table says how to enable a traceback. With the report, the table's
last line is the error.
"""

import json
import os
import time
from contextlib import suppress
from pathlib import Path

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # set by the launcher for each of its processes


def tell_launcher(line: str) -> None:
    """Makes the launcher's table of failed processes show an error, if there is a launcher.

    The file has the format of ``torch.distributed.elastic``, which is not imported for it. If
    several processes fail, the launcher shows the first error. An error that this process has
    reported before is kept.

    Args:
        line: the error, as shown on the console.
    """
    path = os.environ.get(_ERROR_FILE)
    if not path or os.path.exists(path):
        return
    error = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
    with suppress(OSError):  # such as a full disk. The line is on the console anyway.
        Path(path).write_text(json.dumps({"message": error}), encoding="utf-8")
