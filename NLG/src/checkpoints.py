"""Reads and writes GPT-2's files: the base, LoRA's tensors, and the whole model."""

import argparse
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from config_json import check_settings_beside
from family import GPT2
from lora_flags import FLAGS, check_patterns, patterns_of, set_lora, targets_of_adapter, trains
from loralib.adapters.adapter import Adapter, lora_modules
from loralib.adapters.checks import check_base, check_family, warn_of_base
from loralib.adapters.fingerprint import fingerprint
from loralib.adapters.formats import read_adapter
from loralib.adapters.loading import load_into
from loralib.adapters.merging import merge_into
from loralib.adapters.metadata import LoraMetadata
from loralib.adapters.model_settings import lora_settings
from loralib.errors import CheckpointError
from loralib.io.tensors import first_not_finite, index_of, read_tensors, write_wrapped_tensors
from loralib.lora_layer import lora_layers
from loralib.text import listed
from model import GPT2Config, GPT2LMModel, config_of
from script import seen_from
from weights import canonical_names, load_base, own_tensors

logger = logging.getLogger(__name__)

# The release's models were wrapped in DDP when they were saved.
_PREFIX = "module."
# Names of files of weights, and files of an upstream Trainer that match them but hold no weights.
_WEIGHTS = ("model*.pt", "*.bin", "*.safetensors")
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "scheduler.bin")


@dataclass(frozen=True)
class Base:
    """The tensors that a model started from, memory-mapped from their file.

    Frozen weights that the model holds in half precision are written to a checkpoint from here.

    Args:
        tensors: the tensors by the model's names; empty for a model that was initialized at random.
        source: the file's name.
        fingerprint: `loralib.adapters.fingerprint` of the tensors.
        metadata: rank, alpha, … of the LoRA that the file holds with the base, if it records them.
    """

    tensors: Mapping[str, Tensor]
    source: str | None = None
    fingerprint: str | None = None
    metadata: LoraMetadata | None = None


def read_base(path: str | None) -> Base:
    """Reads a base's file, under any of the naming schemes that `weights.canonical_names` knows.

    Raises:
        CheckpointError: it cannot be read, or the config.json next to it is another model's.
    """
    if path is None:
        return Base({})
    check_is_one_file(path)
    tensors, metadata = read_tensors(path)
    tensors = canonical_names(tensors, path)
    check_settings_beside(path, tensors)
    own = LoraMetadata.from_metadata(metadata, Path(path))
    return Base(tensors, path, fingerprint(tensors), own)


def check_is_one_file(path: str) -> None:
    """Checks that a base is one file, not a folder, a name on the hub or one of several parts.

    Upstream accepts these as well, so the error says what to give instead.

    Raises:
        CheckpointError: it is not one file.
    """
    if not path:  # for example a shell variable that is not set
        raise CheckpointError("the path of the base is empty: give a file as --init_checkpoint")
    if not Path(path).exists():
        names, _ = _weights_in(Path(path).parent)
        others = f"; its folder holds {names}" if names else ""
        raise CheckpointError(
            f"{path}: no such checkpoint file{seen_from(path)}{others}; "
            "download_pretrained_checkpoints.sh fetches GPT-2's from the hub"
        )
    parts = _is_part(Path(path))
    if Path(path).is_dir():
        names, parts = _weights_in(Path(path))
        if not parts:
            raise CheckpointError(
                f"{path}: no such checkpoint file: it is a folder; give the file of weights in it, "
                f"such as {names or 'model.safetensors or pytorch_model.bin'}"
            )
    if parts:
        raise CheckpointError(
            f"{path}: belongs to a model in several files; save it in one, as upstream's "
            'save_pretrained(FOLDER, max_shard_size="100GB") does, and give that'
        )


def _is_part(path: Path) -> bool:
    """Returns whether a file is one of a model's several files, or their index."""
    return path.name.endswith(".index.json") or index_of(path) is not None


def _weights_in(folder: Path) -> tuple[str, bool]:
    """Finds the files in a folder that may be a whole model; of a run's checkpoints, the last.

    Returns:
        Their names, for an error, and whether the folder holds only a model in several files.
    """
    names, steps, has_parts = [], {}, False
    for file in (file for pattern in _WEIGHTS for file in folder.glob(pattern)):
        part = re.search(r"-\d+-of-(\d+)\.\w+$", file.name)
        step = re.fullmatch(r"model\.(\d+)\.pt", file.name)
        if _is_part(file) or (part and int(part[1]) > 1):
            has_parts = True
        elif step:
            steps[int(step[1])] = file.name
        elif file.name not in _NOT_WEIGHTS:
            names.append(file.name)
    names += [steps[step] for step in sorted(steps)[-1:]]
    return listed(names), has_parts and not names


def open_model(
    args: argparse.Namespace,
    lora_path: str | None = None,
    lora_dropout: float = 0.0,
    new_lora: bool = True,
    held_in: torch.dtype = torch.float32,
) -> tuple[GPT2LMModel, Base]:
    """Returns the model that the flags of `add_model_params` ask for, and its base.

    Args:
        args: the flags; LoRA's flags that are not given are set to what the files record.
        lora_path: an adapter of any format, see loralib.adapters.formats.
        lora_dropout: dropout on the update's input.
        new_lora: whether LoRA that is in no file is initialized, see `load_base`.
        held_in: the dtype in which frozen weights will be held, see `load_base`.

    Raises:
        CheckpointError: a file cannot be read, or does not fit the other file or the flags.
    """
    if lora_path is not None and args.init_checkpoint is None:
        raise CheckpointError(
            f"{lora_path}: needs the base that it was trained on; give it as --init_checkpoint"
        )
    base = read_base(args.init_checkpoint)
    _check_not_lora_alone(base, trains(args))
    _check_is_gpt2(base)
    adapter = None
    if lora_path is not None:
        adapter = read_adapter(lora_path, lora_alpha=args.lora_alpha)
        check_family(adapter, GPT2)
        _check_base_alone(base)
    file = adapter or Adapter(base.tensors, base.metadata, str(base.source))
    set_lora(args, file, lora_path or args.init_checkpoint)
    if adapter is not None and adapter.lora.base_fingerprint is None:
        warn_of_base(lora_path, args.init_checkpoint)
    has_layers = adapter is None or _has_layers(adapter, args.model_card)
    config = _config(args, file.metadata, lora_dropout, args.lora_dim if has_layers else 0)
    if args.init_checkpoint is None:
        model = GPT2LMModel(config)
    else:
        if base.metadata is not None and any("lora_" in name for name in base.tensors):
            check_patterns(args, config, base.metadata)
        new_lora = new_lora and adapter is None
        model = load_base(config, base.tensors, args.init_checkpoint, new_lora, held_in)
    if adapter is not None and has_layers:
        load_into(model, adapter, base.fingerprint)
    elif adapter is not None:
        check_base(adapter, base.fingerprint)
        merge_into(model, adapter)
    return model, base


def config_of_flags(args: argparse.Namespace, lora_dropout: float) -> GPT2Config:
    """Returns the configuration that `open_model` uses if no file records settings of LoRA."""
    set_lora(args, Adapter({}, None), None)
    return _config(args, None, lora_dropout, args.lora_dim)


def _config(
    args: argparse.Namespace, metadata: LoraMetadata | None, lora_dropout: float, rank: int
) -> GPT2Config:
    return config_of(
        args.model_card,
        lora_attn_dim=rank,
        lora_attn_alpha=args.lora_alpha,
        lora_dropout=lora_dropout,
        **{name: getattr(args, name) for name in FLAGS if name not in ("lora_dim", "lora_alpha")},
        **patterns_of(args, metadata),
    )


def _has_layers(adapter: Adapter, card: str) -> bool:
    """Returns whether the model here can have the LoRA layers that an adapter was trained in.

    If not, the adapter is merged into the base. An example is PEFT's usual adapter for GPT-2, which
    has one A and B for all of c_attn.
    """
    targets = targets_of_adapter(adapter)
    if targets is None or adapter.lora.bias != "none":
        return False
    # A file in the release's format that lacks blocks is damaged: nothing says that it is whole.
    in_all_blocks = config_of(card, lora_attn_dim=1, lora_targets=targets).lora_modules
    return adapter.format == "release" or lora_modules(adapter.tensors) == set(in_all_blocks)


def _check_not_lora_alone(base: Base, trains: bool) -> None:
    if not base.tensors or not all("lora_" in name for name in base.tensors):
        return
    instead = "and this file as --lora_path"
    if trains:
        instead = (
            "to train new LoRA on it; to train on from this one, give the whole model that a run "
            "writes at its end (model.<step>.pt), or --resume for a run that was killed"
        )
    raise CheckpointError(
        f"{base.source}: holds LoRA weights only, without the base that they belong to; "
        f"give the base as --init_checkpoint {instead}"
    )


def _check_is_gpt2(base: Base) -> None:
    if base.tensors and not any(name.startswith(GPT2.layers) for name in base.tensors):
        names = [name.removeprefix(GPT2.backbone) for name in base.tensors]
        raise CheckpointError(f"{base.source}: holds no GPT-2: its tensors are {listed(names)}")


def _check_base_alone(base: Base) -> None:
    if any("lora_" in name for name in base.tensors):
        raise CheckpointError(
            f"{base.source}: already holds LoRA weights; with --lora_path, --init_checkpoint has "
            "to be the base without LoRA"
        )


def save_model(path: str | os.PathLike, model: GPT2LMModel, base: Base, lora_only: bool) -> None:
    """Writes ``model.<step>.pt`` as the release does, with rank, alpha and base as metadata.

    Args:
        path: the file to write.
        model: the model; its trained tensors are written in float32.
        base: the base; frozen weights are copied from it, whatever precision the model holds.
        lora_only: whether only LoRA's tensors are written.

    Raises:
        CheckpointError: a trained tensor is not finite; nothing is written.
    """
    check_finite(path, {n: p for n, p in model.named_parameters() if p.requires_grad})
    named = {}
    for name, tensor in own_tensors(model).items():
        if "lora_" in name or not lora_only:
            frozen = not tensor.requires_grad and name in base.tensors
            named[_PREFIX + name] = base.tensors[name] if frozen else tensor
    metadata = _metadata(model, base)
    # `write_adapter` does not fit here, because the release's format has only query and value.
    write_wrapped_tensors(path, named, metadata.to_metadata() if metadata else {})


def check_finite(path: str | os.PathLike, tensors: Mapping[str, Tensor]) -> None:
    """Checks that tensors to be written are finite.

    Raises:
        CheckpointError: one is not; the message says that the file is not written.
    """
    name = first_not_finite(tensors.items())
    if name is not None:
        raise CheckpointError(f"{path}: not written: {name} holds values that are not finite")


def _metadata(model: GPT2LMModel, base: Base) -> LoraMetadata | None:
    layers = lora_layers(model)
    if not layers:
        return None
    # The defaults are the flags' values, even if most layers have another one.
    settings = lora_settings(model) | {
        "rank": model.config.lora_attn_dim,
        "alpha": model.config.lora_attn_alpha,
        "rank_pattern": {name: layer.r for name, layer in layers.items()},
        "alpha_pattern": {name: layer.lora_alpha for name, layer in layers.items()},
    }
    return LoraMetadata(
        **settings,
        dropout=model.config.lora_dropout or None,
        base=base.source,
        base_fingerprint=base.fingerprint,
    )
