"""GPT-2's files: the base, LoRA's part, and the whole model."""

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from family import DEFAULT_TARGETS, GPT2, TARGETS, in_order, targets_of
from loralib.adapters.adapter import Adapter
from loralib.adapters.checks import check_base
from loralib.adapters.deltas import lora_pairs, merge_into, slices_of
from loralib.adapters.fingerprint import fingerprint
from loralib.adapters.formats import read_adapter
from loralib.adapters.loading import load_into, lora_layers, lora_settings
from loralib.adapters.metadata import LoraMetadata
from loralib.adapters.names import within_layer
from loralib.errors import AlphaError, CheckpointError
from loralib.io.tensors import read_tensors, write_wrapped_tensors
from loralib.training.resume import first_not_finite
from model import MODEL_CARDS, GPT2LMModel, canonical_names, config_of, load_base

# The release's models were wrapped in DDP when they were saved.
_PREFIX = "module."
# The flags of LoRA -> what errors call them, and what they are where neither the command line nor
# a file says it.
_FLAGS = {
    "lora_dim": ("rank", 0),
    "lora_alpha": ("alpha", 128),
    "lora_targets": ("targets", DEFAULT_TARGETS),
}


def add_model_params(parser: argparse.ArgumentParser, default_card: str = "gpt2.md") -> None:
    """Adds the flags that say which model, which base and which LoRA."""
    add = parser.add_argument_group("model").add_argument
    add(
        "--model_card",
        default=default_card,
        choices=list(MODEL_CARDS),
        help="the shape: small, medium, large; xs is for trials",
    )
    add(
        "--init_checkpoint",
        help="the base's weights: a published GPT-2 (pytorch_model.bin, model.safetensors), or a "
        "whole model.<step>.pt",
    )
    add("--lora_dim", type=int, help="LoRA's rank; default: the LoRA file's, or 0 for none")
    add(
        "--lora_alpha",
        type=float,
        help="LoRA's update is scaled by alpha / rank; default: the file's, or "
        f"{_FLAGS['lora_alpha'][1]}",
    )


def add_lora_params(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say how LoRA is trained; files that it is in say it themselves."""
    add = parser.add_argument_group("LoRA").add_argument
    add(
        "--lora_targets",
        nargs="+",
        choices=list(TARGETS),
        help="the projections of each block that LoRA adapts; default: the file's, or "
        f"{' '.join(DEFAULT_TARGETS)}. mlp_up and mlp_down are the feed-forward part's",
    )


@dataclass(frozen=True)
class Base:
    """The tensors that a model started from, mapped from their file, under the model's names.

    A frozen weight that is held in half precision is written to a checkpoint as it is here.

    Args:
        tensors: empty for a model that was initialized at random.
        source: the file's name.
        fingerprint: `loralib.adapters.fingerprint` of the tensors.
        metadata: rank, alpha, … of the LoRA that the file holds with the base, where it says so.
    """

    tensors: Mapping[str, Tensor]
    source: str | None = None
    fingerprint: str | None = None
    metadata: LoraMetadata | None = None


def read_base(path: str | None) -> Base:
    """Reads a base's file, under any of the naming schemes that `model.canonical_names` knows."""
    if path is None:
        return Base({})
    tensors, metadata = read_tensors(path)
    tensors = canonical_names(tensors, path)
    own = LoraMetadata.from_metadata(metadata, Path(path))
    return Base(tensors, path, fingerprint(tensors, GPT2.of_base), own)


def open_model(
    args: argparse.Namespace, lora_path: str | None = None, lora_dropout: float = 0.0
) -> tuple[GPT2LMModel, Base]:
    """The model that the flags of `add_model_params` ask for, and the base it stands on.

    Args:
        args: LoRA's flags, where not given, are set to what the files say.
        lora_path: an adapter of any format, see loralib.adapters.formats.
        lora_dropout: dropout on the update's input.

    Raises:
        CheckpointError: a file cannot be read, does not fit the other or the flags.
    """
    if lora_path is not None and args.init_checkpoint is None:
        raise CheckpointError(
            f"{lora_path}: needs the base that it was trained on; give it as --init_checkpoint"
        )
    base = read_base(args.init_checkpoint)
    _check_not_lora_alone(base)
    adapter = None
    if lora_path is not None:
        adapter = read_adapter(lora_path, lora_alpha=args.lora_alpha)
        _check_base_alone(base)
    _set_lora(args, adapter or base, lora_path or args.init_checkpoint)
    has_layers = adapter is None or _has_layers(adapter)
    config = config_of(
        args.model_card,
        lora_attn_dim=args.lora_dim if has_layers else 0,
        lora_attn_alpha=args.lora_alpha,
        lora_dropout=lora_dropout,
        lora_targets=args.lora_targets,
    )
    if args.init_checkpoint is None:
        model = GPT2LMModel(config)
    else:
        model = load_base(config, base.tensors, args.init_checkpoint)
    if adapter is not None and has_layers:
        load_into(model, adapter, base.fingerprint, GPT2.of_base)
    elif adapter is not None:
        check_base(adapter, base.fingerprint)
        merge_into(model, adapter)
    return model, base


def _has_layers(adapter: Adapter) -> bool:
    """Whether a model can have the layers that an adapter was trained in.

    One of other layers is merged into the base, such as PEFT's usual one of all of c_attn.
    """
    return adapter.lora.bias == "none" and _targets_of(adapter) is not None


def _targets_of(adapter: Adapter) -> tuple[str, ...] | None:
    """The targets that an adapter was trained on; None where it has updates of another kind."""
    layers = []
    for module, (A, B) in lora_pairs(adapter.tensors, adapter.source).items():
        slices = slices_of(adapter, module) or (True,)
        if len(A) != sum(slices) * B.shape[1]:
            return None
        layers.append((within_layer(module), slices))
    return targets_of(layers)


def _check_not_lora_alone(base: Base) -> None:
    if base.tensors and all("lora_" in name for name in base.tensors):
        raise CheckpointError(
            f"{base.source}: holds LoRA weights only, without the base that they belong to; "
            "give the base as --init_checkpoint and, to decode, this file as --lora_path"
        )


def _check_base_alone(base: Base) -> None:
    if any("lora_" in name for name in base.tensors):
        raise CheckpointError(
            f"{base.source}: holds LoRA weights of its own; with --lora_path, --init_checkpoint "
            "has to be the base alone"
        )


def _set_lora(args: argparse.Namespace, file: Adapter | Base, path: str | None) -> None:
    """Fills in LoRA's flags from the file; one that contradicts it is refused."""
    recorded = _recorded(file)
    if recorded and recorded["lora_alpha"] is None and args.lora_alpha is None:
        raise AlphaError(path)
    given = {flag: vars(args).get(flag) for flag in _FLAGS}
    if given["lora_targets"] is not None:
        given["lora_targets"] = in_order(given["lora_targets"])
    for flag, (name, default) in _FLAGS.items():
        ours, theirs = given[flag], recorded.get(flag)
        if None not in (ours, theirs) and ours != theirs:
            raise CheckpointError(
                f"{path}: was trained with {name} {_shown(theirs)}, but --{flag} is {_shown(ours)}"
            )
        setattr(args, flag, next(v for v in (ours, theirs, default) if v is not None))
    if getattr(file.metadata, "variant", None):
        raise CheckpointError(
            f"{path}: its LoRA is of the variant {file.metadata.variant}, which these scripts do "
            "not train or decode with"
        )
    if args.lora_dim < 0 or args.lora_alpha <= 0:
        raise ValueError("--lora_dim has to be at least 0, and --lora_alpha above 0")
    if args.lora_dim == 0 and given["lora_targets"] is not None:
        raise ValueError("--lora_targets needs LoRA: add --lora_dim")


def _recorded(file: Adapter | Base) -> dict[str, Any]:
    """What a file says of its LoRA, by the flags; empty where it has none."""
    tensors = {name: tensor for name, tensor in file.tensors.items() if "lora_" in name}
    parts = (t for name, t in tensors.items() if name.endswith("lora_B") and t.dim() == 2)
    rank = next((B.shape[1] for B in parts), None)
    if rank is None:
        return {}
    adapter = Adapter(tensors, file.metadata, str(file.source))
    return {
        "lora_dim": rank,
        "lora_alpha": getattr(file.metadata, "alpha", None),
        "lora_targets": _targets_of(adapter),
    }


def _shown(value: float | tuple[str, ...]) -> str:
    return " ".join(value) if isinstance(value, tuple) else f"{value:g}"


def save_model(path: str | os.PathLike, model: GPT2LMModel, base: Base, lora_only: bool) -> None:
    """Writes ``model.<step>.pt`` as the release does, with rank, alpha and base as metadata.

    Args:
        path: the file.
        model: of which LoRA's part, or all, is written in float32.
        base: whose bits frozen weights are written with, whatever precision they are held in.
        lora_only: write LoRA's tensors alone.

    Raises:
        CheckpointError: a trained tensor is not finite; nothing is written.
    """
    check_finite(path, {n: p for n, p in model.named_parameters() if p.requires_grad})
    tensors = {}
    for name, parameter in model.named_parameters():
        frozen = not parameter.requires_grad and name in base.tensors
        tensors[name] = base.tensors[name] if frozen else parameter
    metadata = _metadata(model, base)
    # Not by `write_adapter`: the release's format has query and value alone.
    named = {
        _PREFIX + name: tensor
        for name, tensor in tensors.items()
        if "lora_" in name or not lora_only
    }
    write_wrapped_tensors(path, named, metadata.to_metadata() if metadata else {})


def check_finite(path: str | os.PathLike, tensors: Mapping[str, Tensor]) -> None:
    """Checks tensors that are to be written.

    Raises:
        CheckpointError: one is not finite; the message says that the file is not written.
    """
    name = first_not_finite(tensors.items())
    if name is not None:
        raise CheckpointError(f"{path}: not written: {name} holds values that are not finite")


def _metadata(model: GPT2LMModel, base: Base) -> LoraMetadata | None:
    if not lora_layers(model):
        return None
    return LoraMetadata(
        **lora_settings(model),
        dropout=model.config.lora_dropout or None,
        base=base.source,
        base_fingerprint=base.fingerprint,
    )
