"""Defines the flags of the model and of its LoRA, and fills in what files record of LoRA."""

import argparse
import logging
import math
from collections.abc import Mapping
from typing import Any

from family import DEFAULT_TARGETS, TARGETS, in_order, targets_of
from loralib.adapters.adapter import Adapter
from loralib.adapters.checks import warn_of_alpha
from loralib.adapters.deltas import lora_pairs, slices_in
from loralib.adapters.metadata import LoraMetadata
from loralib.adapters.names import within_layer
from loralib.errors import AlphaError, CheckpointError
from loralib.functional import VARIANTS
from loralib.initialization import INITIALIZATIONS
from loralib.io.command_line import check_bounds, pattern_of_words
from model import MODEL_CARDS, GPT2Config

logger = logging.getLogger(__name__)

# LoRA's flags -> their names in errors and metadata, and their values if neither the command line
# nor a file sets them.
FLAGS: dict[str, tuple[str, Any]] = {
    "lora_dim": ("rank", 0),
    "lora_alpha": ("alpha", 128),
    "lora_targets": ("targets", DEFAULT_TARGETS),
    "lora_variant": ("variant", "lora"),
    "lora_init": ("initialization", "default"),
    "lora_freeze_A": ("freeze_A", False),
}
PATTERNS = {"lora_rank_pattern": "rank", "lora_alpha_pattern": "alpha"}


def add_model_params(parser: argparse.ArgumentParser, default_card: str = "gpt2.md") -> None:
    """Adds the flags that choose the model's shape, its base and its LoRA."""
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
    add("--lora_dim", type=int, help="LoRA's rank; default: that of the weights given, or 0")
    add(
        "--lora_alpha",
        type=float,
        help="LoRA's update is scaled by alpha / rank; default: that of the weights given, or "
        f"{FLAGS['lora_alpha'][1]}",
    )


def check_model_params(args: argparse.Namespace) -> None:
    """Checks the numbers of the flags that `add_model_params` adds.

    Raises:
        ValueError: one is out of its bounds.
    """
    check_bounds("--lora_dim", args.lora_dim, least=0)
    check_bounds("--lora_alpha", args.lora_alpha, above=0, below=math.inf)


def add_lora_params(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say how LoRA is trained. A file that holds LoRA records them itself."""
    add = parser.add_argument_group("LoRA").add_argument
    add(
        "--lora_targets",
        nargs="+",
        choices=list(TARGETS),
        help="the projections of each block that LoRA adapts; default: the file's, or "
        f"{' '.join(DEFAULT_TARGETS)}. mlp_up and mlp_down are the feed-forward part's",
    )
    for flag, what in PATTERNS.items():
        add(
            f"--{flag}",
            nargs="+",
            metavar="TARGET=NUMBER",
            help=f"another {what} for some linear layers, such as mlp_up=8 'h.0.*=16': by target, "
            "end of a layer's name, or a glob over that; the first match counts. "
            "query, key and value are one layer, attn.c_attn",
        )
    add(
        "--lora_variant",
        choices=list(VARIANTS),
        help="rslora scales the update by alpha / √rank (arXiv 2312.03732), dora trains the "
        "weights' magnitude and direction separately (arXiv 2402.09353); default: the file's, or "
        "lora",
    )
    add(
        "--lora_init",
        choices=list(INITIALIZATIONS),
        help="initial values of A and B: pissa, from the weight's largest singular values (arXiv "
        "2404.02948); olora, from its QR factors (arXiv 2406.01775); orthogonal, random with B A "
        "= 0; default: the file's, or A at random and B at zero",
    )
    add(
        "--lora_freeze_A",
        action="store_true",
        default=None,
        help="LoRA-FA (arXiv 2308.03303): A keeps its initial values, and only B is trained",
    )


def trains(args: argparse.Namespace) -> bool:
    """Returns whether these are the flags of a script that trains, not of one that decodes."""
    return "lora_dropout" in vars(args)


def set_lora(args: argparse.Namespace, file: Adapter, path: str | None) -> None:
    """Fills in LoRA's flags that are not given, from a file or with their defaults.

    Args:
        args: the flags.
        file: the adapter, or a base that may hold LoRA itself.
        path: the file's name, for errors.

    Raises:
        AlphaError: neither the file nor a flag says alpha.
        CheckpointError: a flag contradicts the file.
        ValueError: a flag of LoRA is given, but there is no LoRA.
    """
    recorded = _recorded(file)
    if recorded and recorded["lora_alpha"] is None:
        if args.lora_alpha is None:
            raise AlphaError(path)
        warn_of_alpha(path, args.lora_alpha)
    given = {flag: vars(args).get(flag) for flag in FLAGS}
    if given["lora_targets"] is not None:
        given["lora_targets"] = in_order(given["lora_targets"])
    for flag, (name, default) in FLAGS.items():
        ours, theirs = given[flag], recorded.get(flag)
        if None not in (ours, theirs) and ours != theirs:
            raise CheckpointError(
                f"{path}: was trained with {name} {_shown(theirs)}, but --{flag} is "
                f"{_shown(ours)}: leave --{flag} out"
            )
        setattr(args, flag, next(v for v in (ours, theirs, default) if v is not None))
    # Decoding without LoRA needs no alpha, and an estimate does not read what files record.
    is_training = trains(args) and not args.estimate
    if args.lora_dim == 0:
        _check_unused(args, given, is_training)
    elif is_training and given["lora_alpha"] is None and not recorded:
        logger.warning(
            "--lora_alpha is not given: it is %g, the release's default; its recipes use 32",
            args.lora_alpha,
        )


def _check_unused(args: argparse.Namespace, given: Mapping[str, Any], is_training: bool) -> None:
    """Checks that no flag of LoRA is given where there is none.

    Alpha and dropout may stay where a rank of 0 is given as well, and in decoding.
    """
    values = {**given, **{flag: vars(args).get(flag) for flag in PATTERNS}}
    values["lora_dropout"] = vars(args).get("lora_dropout") or None
    if values.pop("lora_dim") is not None or not is_training:
        del values["lora_alpha"], values["lora_dropout"]
    for flag, value in values.items():
        if value is not None:
            raise ValueError(f"--{flag} needs LoRA: add --lora_dim")


def _recorded(file: Adapter) -> dict[str, Any]:
    """Returns what a file records of its LoRA, by flag; empty if it has no LoRA."""
    tensors = {name: tensor for name, tensor in file.tensors.items() if "lora_" in name}
    parts = (t for name, t in tensors.items() if name.endswith("lora_B") and t.dim() == 2)
    rank = next((B.shape[1] for B in parts), None)
    if rank is None:
        return {}
    targets = targets_of_adapter(Adapter(tensors, file.metadata, file.source))
    if file.metadata is None:
        # A file of the release, which has only the paper's LoRA.
        of_release = {flag: default for flag, (_, default) in FLAGS.items()}
        return {**of_release, "lora_dim": rank, "lora_alpha": None, "lora_targets": targets}
    said = {flag: getattr(file.metadata, name) for flag, (name, _) in FLAGS.items()}
    # Metadata leaves out settings that have their default.
    said |= {flag: FLAGS[flag][1] for flag, value in said.items() if value is None}
    return {**said, "lora_targets": targets}


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(value)
    return str(value) if isinstance(value, str | bool) else f"{value:g}"


def patterns_of(
    args: argparse.Namespace, metadata: LoraMetadata | None
) -> dict[str, dict[str, Any]]:
    """Returns the patterns given as flags or, if there are none, those of a file's metadata."""
    patterns = {}
    for flag, what in PATTERNS.items():
        words = vars(args).get(flag)
        if words is not None:
            kind = int if what == "rank" else float
            patterns[flag] = pattern_of_words(f"--{flag}", kind, words)
        else:
            patterns[flag] = getattr(metadata, f"{what}_pattern", None) or {}
    return patterns


def check_patterns(args: argparse.Namespace, config: GPT2Config, metadata: LoraMetadata) -> None:
    """Checks the flags' patterns against those that the base's own LoRA was trained with."""
    for module in config.lora_modules:
        for what, theirs, ours in (
            ("rank", metadata.rank_of(module), config.rank_of(module)),
            ("alpha", metadata.alpha_of(module), config.alpha_of(module)),
        ):
            if theirs != ours:
                raise CheckpointError(
                    f"{args.init_checkpoint}: was trained with {what} {theirs:g} in {module}, but "
                    f"--lora_{what}_pattern says {ours:g}: leave --lora_{what}_pattern out"
                )


def targets_of_adapter(adapter: Adapter) -> tuple[str, ...] | None:
    """Returns the targets that an adapter was trained on; None if its updates fit no targets."""
    layers = []
    for module, (A, B) in lora_pairs(adapter.tensors, adapter.source).items():
        slices = slices_in(adapter.metadata, module) or (True,)
        if len(A) != sum(slices) * B.shape[1]:
            return None
        layers.append((within_layer(module), slices))
    return targets_of(layers)
