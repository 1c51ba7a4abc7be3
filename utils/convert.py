"""Convert a LoRA adapter between this project's, the release's and PEFT's format, or merge it.

    python utils/convert.py IN --info
    python utils/convert.py output/rte rte_peft --to peft
    python utils/convert.py someone/their-peft-adapter adapter.safetensors --to lora
    python utils/convert.py lora_mnli.bin mnli.safetensors --to lora --lora_alpha 16
    python utils/convert.py model.26290.pt e2e_merged --to merged --base gpt2-medium

IN is an adapter of any format: a file, a folder, or a name on the hub. From a full checkpoint with
LoRA, the adapter is extracted. A checkpoint of GPT-2 that was trained without LoRA is written as it
is, with --to merged and without --base. --to says what OUT is:

    lora      a .safetensors file, which records rank, alpha, targets, base, task, labels, and the
              columns of the texts that it was trained on
    release   a .bin or .pt file as microsoft/LoRA's scripts read it
    peft      a new folder, which PEFT loads onto the base
    merged    a new folder of the base with the adapter merged, which upstream Transformers loads

For lora and release OUT may also be a folder. Without --to, the suffix of OUT chooses one of these
two. `convert.py old.bin new.bin` renames the tensors of the release's first DeBERTa files to their
later names. What the format cannot hold is listed. Existing files are never overwritten.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":
    from loralib.training.process import begin

    begin()

import torch

from conversion.adapters import FULL, in_dtype, unknown_task, with_task
from conversion.bases import IN_PYTHON, Base, family_for, read_base, unverified, with_base
from conversion.description import describe
from conversion.dtypes import DTYPES
from conversion.gpt2_folder import is_whole_gpt2
from conversion.merged import merge, write_full_model
from loralib.adapters.adapter import LORA, Adapter, in_words
from loralib.adapters.families import family_of
from loralib.adapters.formats import (
    FORMATS,
    SUFFIXES,
    check_suffix,
    format_of_name,
    read_adapter,
    write_adapter,
)
from loralib.adapters.peft import CONFIG_NAME
from loralib.adapters.validation import check_lora
from loralib.errors import (
    AdapterAsModelError,
    AlphaError,
    CheckpointError,
    FullModelError,
    NeedsMergingError,
    WayOut,
    WrongBaseError,
    adding_ways_out,
)
from loralib.io.command_line import ArgumentParser
from loralib.io.console import painted, table
from loralib.training import process
from split_lora import extract
from transformers.weight_files import WEIGHTS_NAMES

# The flag or advice that resolves each of the library's errors.
WAYS_OUT: dict[type[CheckpointError], WayOut] = {
    AdapterAsModelError: lambda error: (
        f"give the adapter as IN, and --base {error.base or 'that model'}; if IN was trained on "
        "the two together, merge them first"
    ),
    AlphaError: "--lora_alpha",
    WrongBaseError: "--base",
}
# The formats that are always folders.
_FOLDERS = ("peft", "merged")
# The parts of an adapter's description that still hold after merging.
_OF_MERGED = ("base", "revision", "fingerprint", "task", "head", "labels", "texts")
# The files by which an adapter in a folder is recognized, in any format.
_ADAPTER_FILES = (*LORA.files, CONFIG_NAME)


def read_source(source: str, lora_alpha: float | None) -> Adapter:
    """Reads the adapter IN, or extracts it if IN is the checkpoint of a full model.

    Raises:
        CheckpointError, OSError: as for `read_adapter`.
    """
    try:
        if not _is_full_folder(Path(source)):
            return read_adapter(source, lora_alpha=lora_alpha)
    except FullModelError:
        pass
    return replace(check_lora(extract(Path(source)), lora_alpha), format=FULL)


def _is_full_folder(path: Path) -> bool:
    """Returns whether a folder holds the weights of a full model, and no adapter."""
    has_adapter = any((path / name).exists() for name in _ADAPTER_FILES)
    return not has_adapter and any((path / name).is_file() for name in WEIGHTS_NAMES)


def format_named(path: Path) -> str:
    """Returns the format that OUT's suffix stands for.

    Raises:
        CheckpointError: OUT has no suffix, or one of no format.
    """
    if not path.suffix:
        raise CheckpointError(
            f"{path}: a name without .safetensors (lora), .bin or .pt (release) does not tell the "
            "format to write: give --to, such as --to peft or --to merged for a folder"
        )
    return format_of_name(path)


def check_target(path: Path, format: str, source: str) -> None:
    """Checks that OUT can be written, before anything is read.

    Raises:
        CheckpointError: OUT exists, is not a name of this format's files or folders, or is a folder
            with another adapter than IN, `source`.
    """
    if format in _FOLDERS:
        if path.suffix in SUFFIXES:
            raise CheckpointError(
                f"{path}: the format {format} is a folder; give the name of a folder"
            )
        is_free = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    else:
        check_suffix(path, format)
        written = _written(path, format)
        is_free = not written.exists()
        if is_free and written != path:
            _check_no_other(path, source)
        path = written
    if not is_free:
        raise CheckpointError(f"{path}: exists already; give another name")


def _check_no_other(folder: Path, source: str) -> None:
    """Checks that a folder holds no adapter that would be read instead of the written one."""
    for name in _ADAPTER_FILES:
        file = folder / name
        is_own = name in LORA.files and Path(source).resolve() in (folder.resolve(), file.resolve())
        if file.exists() and not is_own:
            raise CheckpointError(
                f"{file}: belongs to another adapter, which would be read instead of the new one; "
                "give another folder"
            )


def _written(path: Path, format: str) -> Path:
    """Returns the path that is written: OUT, or the adapter's file if OUT is a folder."""
    if format in _FOLDERS or path.suffix:
        return path
    return path / LORA.files[FORMATS.index(format)]


def check_complete(adapter: Adapter, format: str, base: str | None) -> None:
    """Checks that everything is known that the format needs.

    Raises:
        CheckpointError: something is missing; or merging needs a base of a family that is unknown
            here.
    """
    metadata = adapter.metadata
    if metadata is None and format != "release":
        raise AlphaError(adapter.source)
    if metadata and metadata.trained_with:
        raise CheckpointError(
            f"{adapter.source}: was trained with {in_words(metadata.trained_with)} as well, whose "
            "weights are in another file; without them, its results would differ"
        )
    if format == "merged" and base is None:
        family_for(adapter)
        known = f" (it names '{metadata.base}')" if metadata.base else ""
        raise CheckpointError(f"{adapter.source}: give its base as --base{known}")


def convert(
    adapter: Adapter, path: Path, format: str, base: Base | None, dtype: torch.dtype | None
) -> tuple[dict[str, str], list[str]]:
    """Writes an adapter to `path` in a format, or merged.

    Returns:
        A description of what was written, as by `describe`; and remarks for the user.
    """
    if base is not None:
        adapter = with_base(adapter, base)
    if format == "merged":
        own = merge(path, adapter, base, dtype or torch.float32)
        kept = {name: value for name, value in describe(adapter).items() if name in _OF_MERGED}
        return {**own, **kept}, []
    adapter = in_dtype(adapter, dtype)
    to_merge = "--to merged" if family_of(adapter.tensors) else IN_PYTHON
    with adding_ways_out({NeedsMergingError: to_merge}):
        remarks = write_adapter(path, adapter, format)
    # Describes what the written file records, not the adapter it was made from.
    return describe(read_adapter(_written(path, format))), remarks


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("source", metavar="IN", help="an adapter: file, folder, or name on the hub")
    add("target", metavar="OUT", nargs="?", type=Path, help="what to write")
    add("--to", choices=[*FORMATS, "merged"], help="the format to write")
    add("--info", action="store_true", help="print what IN is, and write nothing")
    add(
        "--base",
        metavar="FOLDER_OR_NAME",
        help="the model that IN was trained on; merged needs it, other formats are checked "
        "against it and record its name. For GPT-2, a file of weights will do",
    )
    add("--lora_alpha", type=float, help="the alpha that IN was trained with, if IN does not say")
    add("--task", help="the task that IN was trained for, such as rte, if IN does not say")
    add(
        "--labels",
        nargs="+",
        metavar="LABEL",
        help="the names of its head's outputs, in their order, if IN does not say",
    )
    add(
        "--dtype",
        choices=DTYPES,
        help="of the written tensors; default: IN's own, or float32 for merged",
    )
    args, unknown = parser.parse_known_intermixed_args(argv)  # OUT may follow flags
    if unknown:
        parser.refuse(unknown)
    if args.target is None and not args.info:
        parser.error("give OUT, or --info")
    if args.info and any((args.target, args.to, args.base, args.dtype, args.task, args.labels)):
        parser.error("--info writes nothing: give it only IN and, if needed, --lora_alpha")
    for label, times in Counter(args.labels or ()).items():
        if times > 1:
            parser.error(f"--labels names '{label}' twice, but outputs have names of their own")
    return args


@adding_ways_out(WAYS_OUT)
def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, then describes or converts."""
    args = parse_args(argv)
    if args.info:
        adapter = read_source(args.source, args.lora_alpha)
        show(f"{adapter.source}:", describe(adapter))
    else:
        run(args)


def run(args: argparse.Namespace) -> None:
    """Reads, checks and converts IN, and prints what was written."""
    format = args.to or format_named(args.target)
    check_target(args.target, format, args.source)
    if format == "merged" and is_whole_gpt2(args.source):
        run_on_whole(args)
        return
    adapter = read_source(args.source, args.lora_alpha)
    check_complete(adapter, format, args.base)
    read, adapter = adapter, with_task(adapter, args.task, args.labels)
    base = None if args.base is None else read_base(args.base, adapter)
    dtype = getattr(torch, args.dtype) if args.dtype else None
    args.target.parent.mkdir(parents=True, exist_ok=True)
    said, remarks = convert(adapter, args.target, format, base, dtype)
    of_task = unknown_task(read, adapter)
    remarks = [*unverified(adapter, base), *of_task, *_unsaid(adapter, args), *remarks]
    if adapter.format == FULL:
        remarks = [
            f"{adapter.source} is a full model: only its LoRA and head are taken",
            *remarks,
        ]
    show(f"{args.target}: written, from {adapter.source}:", said, remarks)


def run_on_whole(args: argparse.Namespace) -> None:
    """Converts IN if it is a GPT-2 that was trained without LoRA, and prints what was written."""
    flags = ("base", "lora_alpha", "task", "labels")
    given = [f"--{flag}" for flag in flags if getattr(args, flag) is not None]
    if given:
        raise CheckpointError(
            f"{args.source}: is a whole GPT-2 without LoRA: leave out {' and '.join(given)}"
        )
    args.target.parent.mkdir(parents=True, exist_ok=True)
    said = write_full_model(args.source, args.target, getattr(torch, args.dtype or "float32"))
    show(f"{args.target}: written, from {args.source}:", said)


def _unsaid(adapter: Adapter, args: argparse.Namespace) -> list[str]:
    """Returns remarks on the user's task and labels if they are not written.

    They are not if the adapter has no metadata, because its alpha is unknown.
    """
    if adapter.metadata is not None:
        return []
    named = {"task": args.task, "labels": tuple(args.labels or ())}
    return [
        f"not in this format: {name} {in_words(value)}" for name, value in named.items() if value
    ]


def show(first: str, said: Mapping[str, str], remarks: Sequence[str] = ()) -> None:
    """Prints a title, a description, and remarks."""
    print(painted(first, "bold", sys.stdout))
    print(table(said.items(), indent="  ", stream=sys.stdout))
    for remark in remarks:
        print(f"  {painted('note:', 'yellow', sys.stdout)} {remark}")


if __name__ == "__main__":
    process.run(main)
