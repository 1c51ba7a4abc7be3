"""Extract LoRA, bottleneck adapters or biases, and the head, from a full checkpoint.

    python utils/split_lora.py output/checkpoint-500/pytorch_model.bin lora.bin

IN is a checkpoint file or a checkpoint's folder, of RoBERTa, DeBERTa-v2 or GPT-2. OUT is written in
the release's format by torch.save or, if its name ends in .safetensors, as safetensors with
metadata: rank, alpha, targets, task, labels, columns of texts and base, taken from IN or, if it
records none, from the config.json next to it. A checkpoint in which several parts were trained,
such as LoRA and biases, has to be split once for each. convert.py converts OUT to other formats,
such as PEFT's.

Existing files are overwritten only with --overwrite. As an exception, the release's own call, as
above, may be repeated: it replaces a .bin or .pt that holds only LoRA and a head.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from loralib.training.process import begin

    begin()

from torch import Tensor

import conversion.gpt2_folder  # noqa: F401 - registers GPT-2
from loralib.adapters.adapter import LORA, Adapter, Kind, adapter_tensors, lora_metadata
from loralib.adapters.canonical import canonical_names, names_without_wrappers
from loralib.adapters.deltas import ranks_of
from loralib.adapters.families import backbone_prefixes, family_of
from loralib.adapters.fingerprint import fingerprint
from loralib.adapters.formats import write_adapter
from loralib.adapters.metadata import AdapterMetadata, are_text_columns
from loralib.errors import CheckpointError
from loralib.io.command_line import ArgumentParser
from loralib.io.tensors import check_is_whole, read_tensors
from loralib.text import counted
from loralib.training import process
from transformers.adapter_kinds import BITFIT, BOTTLENECK, KINDS
from transformers.configuration_utils import PretrainedConfig
from transformers.file_utils import CONFIG_NAME
from transformers.models.registry import head_of_class
from transformers.weight_files import read_weights

# Optional fields of LoRA's metadata -> the settings that they come from.
_OF_LORA = {
    "rank_pattern": "lora_rank_pattern",
    "alpha_pattern": "lora_alpha_pattern",
    "variant": "lora_variant",
    "initialization": "lora_init",
    "freeze_A": "lora_freeze_A",
    "dropout": "lora_dropout",
}
KINDS_BY_NAME = {"lora": LORA, "adapter": BOTTLENECK, "bitfit": BITFIT}


@dataclass(frozen=True)
class Checkpoint:
    """A full checkpoint.

    Args:
        source: its file or folder.
        tensors: its tensors under canonical names.
        metadata: the file's metadata, if it has any.
        config: the settings in the config.json next to it, if there is one.
    """

    source: Path
    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    config: dict[str, Any]


def read_checkpoint(path: Path) -> Checkpoint:
    """Reads a checkpoint's file or folder, and verifies its checksums if it has any."""
    folder = path if path.is_dir() else path.parent
    if path.is_dir():
        tensors, metadata = read_weights(path, verify=True), {}
    else:
        check_is_whole(path)
        tensors, metadata = read_tensors(path, verify=True)
    config = folder / CONFIG_NAME
    settings = PretrainedConfig.read_values(config) if config.is_file() else {}
    return Checkpoint(path, _canonical(tensors, path), metadata, settings)


def _canonical(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    return canonical_names(names_without_wrappers(tensors, str(path)), str(path))


def describe(
    checkpoint: Checkpoint, part: Mapping[str, Tensor], kind: Kind
) -> AdapterMetadata | None:
    """Returns the metadata of a checkpoint's trained weights; None if nothing is recorded.

    It is the file's own, such as GPT-2's or an adapter's; otherwise it is made from the settings.

    Raises:
        CheckpointError: the settings are damaged, or do not fit the weights.
    """
    recorded = kind.metadata.from_metadata(checkpoint.metadata, checkpoint.source)
    config = checkpoint.config
    _check_settings(checkpoint)
    if recorded or not config.get(kind.switch):
        return recorded
    own = _own_settings(checkpoint, part, kind)
    if own is None:
        return None
    head = next(map(head_of_class, config.get("architectures") or ()), None)
    has_base = len(part) < len(checkpoint.tensors)
    others = (other.switch for other in KINDS if other != kind)
    return kind.metadata(
        **own,
        base=config.get("base_name_or_path"),
        base_revision=config.get("base_revision"),
        base_fingerprint=fingerprint(checkpoint.tensors) if has_base else None,
        task=config.get("finetuning_task"),
        head=head,
        is_decoder=config.get("is_decoder") or None,
        labels=_labels(checkpoint, part, head),
        text_columns=_text_columns(checkpoint, head),
        trained_with=tuple(switch for switch in others if config.get(switch)) or None,
    )


def _check_settings(checkpoint: Checkpoint) -> None:
    for name, is_sound in _SOUND.items():
        value = checkpoint.config.get(name)
        if value is not None and not is_sound(value):
            raise _invalid(checkpoint, name)


def _invalid(checkpoint: Checkpoint, name: str) -> CheckpointError:
    """Returns the error for a setting whose value cannot be right."""
    return CheckpointError(
        f"{checkpoint.source}: its {CONFIG_NAME} has an invalid value for {name}: "
        f"{checkpoint.config[name]!r}"
    )


def _are_labels(value: object) -> bool:
    return isinstance(value, dict) and all(
        str(number).isdecimal() and isinstance(label, str) for number, label in value.items()
    )


# Checks of settings that are not checked elsewhere.
_SOUND: dict[str, Callable[[Any], bool]] = {
    "architectures": lambda value: isinstance(value, list),
    "id2label": _are_labels,
    "lora_rank_pattern": lambda value: isinstance(value, dict),
    "lora_alpha_pattern": lambda value: isinstance(value, dict),
}


def _labels(
    checkpoint: Checkpoint, part: Mapping[str, Tensor], head: str | None
) -> tuple[str, ...] | None:
    """Returns the labels of a checkpoint's head; None if its outputs are not labels.

    Raises:
        CheckpointError: the settings name another number of labels, or another family's model.
    """
    family = family_of(checkpoint.tensors)
    if family and head and head not in family.heads:
        raise _invalid(checkpoint, "architectures")
    if family and head and not family.heads[head].labeled:
        return None
    names = checkpoint.config.get("id2label") or {}
    outputs = Adapter(dict(part), None).outputs
    if names and outputs not in (None, len(names)):
        raise CheckpointError(
            f"{checkpoint.source}: its head has {counted(outputs, 'output')}, but its "
            f"{CONFIG_NAME} names {counted(len(names), 'label')} (id2label)"
        )
    return tuple(names[number] for number in sorted(names, key=int))


def _text_columns(checkpoint: Checkpoint, head: str | None) -> tuple[str, ...] | None:
    """Returns the columns of texts that a checkpoint was trained on; None if not recorded."""
    if head not in (None, "sequence_classification"):
        return None
    names = checkpoint.config.get("text_columns")
    if names is not None and not are_text_columns(names):
        raise _invalid(checkpoint, "text_columns")
    return None if names is None else tuple(names)


def _own_settings(
    checkpoint: Checkpoint, part: Mapping[str, Tensor], kind: Kind
) -> dict[str, Any] | None:
    """Returns the metadata's fields that only this kind has; None if the settings lack one."""
    config = checkpoint.config
    names = {
        LORA: {"rank": "lora_r", "alpha": "lora_alpha"},
        BOTTLENECK: {"adapter_type": "adapter_type", "adapter_size": "adapter_size"},
    }.get(kind, {})
    own = {field: config.get(name) for field, name in names.items()}
    if None in own.values():
        return None
    if kind == LORA:
        own |= {field: config.get(name) or None for field, name in _OF_LORA.items()}
        for module, rank in ranks_of(part, str(checkpoint.source)).items():
            expected = (own["rank_pattern"] or {}).get(module, own["rank"])
            if rank != expected:
                raise CheckpointError(
                    f"{checkpoint.source}: its LoRA weights have rank {rank}, but its "
                    f"{CONFIG_NAME} says {expected} ({module})"
                )
        said = lora_metadata(part, own["rank"], own["alpha"])
        own["targets"] = said.targets
        if said.positions is not None and config.get("share_att_key"):
            own["positions"] = bool(config.get("lora_positions"))
    return own


def check_free(target: Path, kind: Kind) -> None:
    """Checks that `target` may be overwritten without --overwrite.

    Raises:
        CheckpointError: it is a file that the release's own call would not have written.
    """
    if not target.is_file():
        return
    try:
        tensors = _canonical(read_tensors(target)[0], target)
        is_part = adapter_tensors(tensors, kind=LORA).keys() == tensors.keys()
        is_lora = is_part and any(LORA.holds(name, backbone_prefixes()) for name in tensors)
    except CheckpointError:
        is_lora = False
    if not is_lora or kind != LORA or target.suffix == ".safetensors":
        raise CheckpointError(f"{target}: exists already; give another name, or --overwrite")


def split(source: Path, target: Path, name: str = "lora", overwrite: bool = False) -> Adapter:
    """Writes a part of the checkpoint `source` to `target`, and returns it.

    Args:
        source: checkpoint file or folder.
        target: the file to write.
        name: the part, a key of `KINDS_BY_NAME`.
        overwrite: whether `target` is replaced if it exists.

    Raises:
        CheckpointError: `source` cannot be read, holds no such weights, or lacks settings that
            `target` has to record; or `target` is a file of the checkpoint other than one for this
            part, or exists, see `check_free`.
    """
    kind = KINDS_BY_NAME[name]
    is_own = _is_in_checkpoint(target, source)
    if is_own and (target.samefile(source) or name not in target.name):
        raise CheckpointError(f"{target}: would replace a file of the checkpoint it is taken from")
    adapter = extract(source, kind)
    if adapter.metadata is None and target.suffix == ".safetensors":
        needed = {LORA: "rank and alpha", BOTTLENECK: "type and size"}.get(kind, kind.switch)
        raise CheckpointError(
            f"{source}: has no {CONFIG_NAME} next to it that states {needed}, which "
            f"{target.name} has to record; write a .bin instead"
        )
    if not overwrite:
        check_free(target, kind)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_adapter(target, adapter)
    return adapter


def _is_in_checkpoint(target: Path, source: Path) -> bool:
    """Returns whether `target` is a file of the checkpoint `source`, directly or through links."""
    linked = Path(os.path.realpath(source))
    folders = {source} if source.is_dir() else {source.parent, linked.parent}
    files = [file for folder in folders if folder.is_dir() for file in folder.iterdir()]
    return target.exists() and any(file.exists() and target.samefile(file) for file in files)


def extract(source: Path, kind: Kind = LORA) -> Adapter:
    """Returns the trained weights of a kind in the checkpoint `source`, and its head.

    The metadata is None if neither the checkpoint nor the settings next to it record enough.

    Raises:
        CheckpointError: `source` cannot be read, or holds no such weights.
    """
    checkpoint = read_checkpoint(source)
    if kind == BITFIT and checkpoint.config and not checkpoint.config.get(kind.switch):
        raise CheckpointError(f"{source}: its {CONFIG_NAME} does not say that biases were trained")
    part = adapter_tensors(checkpoint.tensors, kind=kind)
    if family := family_of(part):
        for name in family.unused_by_head(part):
            del part[name]
    if not any(kind.holds(tensor, backbone_prefixes()) for tensor in part):
        raise CheckpointError(
            f"{source}: holds no {kind.name} weights; give a checkpoint that was trained with them"
        )
    return Adapter(part, describe(checkpoint, part, kind), str(source), kind)


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, splits the checkpoint, and prints what was written."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("source", metavar="IN", type=Path, help="checkpoint file or folder")
    parser.add_argument("target", metavar="OUT", type=Path, help="file, .bin or .safetensors")
    parser.add_argument(
        "--part",
        choices=KINDS_BY_NAME,
        default="lora",
        help="what to extract with the head: LoRA (the default), bottleneck adapters, or biases",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    args = parser.parse_args(argv)
    adapter = split(args.source, args.target, args.part, args.overwrite)
    values = sum(tensor.numel() for tensor in adapter.tensors.values())
    size = args.target.stat().st_size / 2**20
    print(f"{args.target}: {len(adapter.tensors)} tensors, {values:,} values, {size:.2f} MiB")


if __name__ == "__main__":
    process.run(main)
