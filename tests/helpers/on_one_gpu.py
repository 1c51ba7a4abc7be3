"""Runs ``on_one_gpu.py SCRIPT ARGUMENTS…`` with all processes on one GPU.

They communicate by gloo, because NCCL refuses to.
"""

import os
import sys
from pathlib import Path

import torch.distributed as dist
from killed_run import load

from loralib.training import process


def share_the_gpu() -> None:
    """Has this process use the first GPU, and gloo."""
    os.environ["LOCAL_RANK"] = "0"
    join = dist.init_process_group
    dist.init_process_group = lambda _, **how: join("gloo", **{**how, "device_id": None})


def main() -> None:
    # The launcher may insert --local_rank before the script. It is left out: all use the first GPU.
    start = next(i for i, word in enumerate(sys.argv) if i and word.endswith(".py"))
    script, arguments = sys.argv[start], sys.argv[start + 1 :]
    share_the_gpu()
    module = load(Path(script))
    sys.argv = [script, *arguments]
    module.main(arguments)


if __name__ == "__main__":
    process.run(main, lambda line: print(line, file=sys.stderr))
