"""Extract the LoRA weights and the head from a full checkpoint.

    python utils/split_lora.py output/checkpoint-500/pytorch_model.bin lora.bin

IN is a checkpoint file or a checkpoint's folder. OUT is written in the release's form, a flat dict
of tensors saved by torch, or, where its name ends in .safetensors, with rank, alpha, targets, task,
labels and base in its metadata, which are taken from the config.json beside IN.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from loralib.checkpoint import (
    Adapter,
    AdapterInfo,
    CheckpointError,
    adapter_tensors,
    fingerprint,
    lora_targets,
    read_tensors,
    rename_old_tensors,
    save_adapter,
)
from transformers.configuration_utils import LORA_SETTINGS
from transformers.file_utils import CONFIG_NAME
from transformers.modeling_utils import read_weights_folder


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A full checkpoint's tensors, and its settings where there is a config.json beside them."""
    folder = path if path.is_dir() else path.parent
    tensors = read_weights_folder(path) if path.is_dir() else read_tensors(path)[0]
    config = folder / CONFIG_NAME
    return tensors, json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}


def describe(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> AdapterInfo | None:
    """What the settings say of a checkpoint's LoRA weights; None where they say nothing."""
    if not all(config.get(name) for name in LORA_SETTINGS):
        return None
    labels = config.get("id2label") or {}
    names = rename_old_tensors(tensors)
    has_base = len(adapter_tensors(names)) < len(names)
    return AdapterInfo(
        rank=config["lora_r"],
        alpha=config["lora_alpha"],
        targets=lora_targets(name.rsplit(".", 1)[0] for name in names if "lora_" in name),
        base=config.get("base_name_or_path"),
        base_fingerprint=fingerprint(tensors) if has_base else None,
        task=config.get("finetuning_task"),
        labels=tuple(labels[number] for number in sorted(labels, key=int)),
    )


def split(source: Path, target: Path) -> Adapter:
    """Writes the LoRA part of the checkpoint `source` to `target`, and returns it.

    Raises:
        CheckpointError: `source` cannot be read, holds no LoRA weights, or does not say what
            `target` has to; or `target` is a file of the checkpoint other than a LoRA file.
    """
    folder = source if source.is_dir() else source.parent
    inside = target.exists() and target.resolve().parent == folder.resolve()
    if inside and (target.samefile(source) or "lora" not in target.name):
        raise CheckpointError(f"{target}: would replace a file of the checkpoint it is taken from")
    tensors, config = read_checkpoint(source)
    part = adapter_tensors(tensors)
    if not any("lora_" in name for name in part):
        raise CheckpointError(f"{source}: holds no LoRA weights")
    info = describe(tensors, config)
    if info is None and target.suffix == ".safetensors":
        raise CheckpointError(
            f"{source}: has no {CONFIG_NAME} beside it that states rank and alpha, which "
            f"{target.name} has to hold; write a .bin instead"
        )
    adapter = Adapter(part, info, str(source))
    save_adapter(target, adapter)
    return adapter


def main(argv: Sequence[str] | None = None) -> None:
    """Parses, splits, and says what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="IN", type=Path, help="checkpoint file or folder")
    parser.add_argument("target", metavar="OUT", type=Path, help="LoRA file, .bin or .safetensors")
    args = parser.parse_args(argv)
    try:
        adapter = split(args.source, args.target)
    except (CheckpointError, OSError, ValueError) as error:
        sys.exit(f"split_lora.py: error: {error}")
    values = sum(tensor.numel() for tensor in adapter.tensors.values())
    size = args.target.stat().st_size / 2**20
    print(f"{args.target}: {len(adapter.tensors)} tensors, {values:,} values, {size:.2f} MiB")


if __name__ == "__main__":
    main()
