"""Checks the flags that were added to a recipe, before the recipe launches anything.

    PYTHONPATH=src python recipes/check_flags.py e2e_gpt2_md.sh [flags of gpt2_ft.py]

If launched processes raised the error, the launcher's own long report would bury it.
"""

import os
import sys
from collections.abc import Sequence

from checkpoints import check_is_one_file
from gpt2_ft_arguments import parse_args
from loralib.training.device import choose_device
from loralib.training.precision import check_precision
from script import run, seen_from

# Flags that gpt2_ft.py requires and the recipe sets itself, with files that always exist.
_RECIPE_FLAGS = ["--train_data", os.devnull, "--valid_data", os.devnull]


def main(argv: Sequence[str] | None = None) -> None:
    """Checks the flags' values, the files that they name, and the precision on this device.

    Raises:
        OSError, ValueError: a value is invalid, a file is missing, or the device does not support
            the precision.
    """
    flags = sys.argv[1:] if argv is None else argv
    args = parse_args([*_RECIPE_FLAGS, *flags])
    if args.estimate:
        return  # an estimate needs none of what is checked below
    check_precision(args.fp16, args.bf16, choose_device(0))
    if args.init_checkpoint is not None:
        check_is_one_file(args.init_checkpoint)
    for flag in ("train_data", "valid_data"):
        path = getattr(args, flag)
        if not os.path.exists(path):
            raise FileNotFoundError(f"--{flag} {path}: no such file{seen_from(path)}")


if __name__ == "__main__":
    del sys.argv[0]  # errors begin with the recipe's name
    run(main)
