"""PEFT's adapter folders: ``adapter_config.json`` and ``adapter_model.safetensors``.

PEFT calls a LoRA tensor ``base_model.model.<module>.lora_A.weight`` and writes a head, one of the
`modules_to_save`, as ``base_model.model.<module>.weight``. Its LoRA is one update of a module's
whole output. What `MergedLinear` has as two updates of rank r, for GPT-2's query and value, is for
PEFT one of rank 2r in blocks, with the same scaling, alpha / r = 2 alpha / 2r:

    lora_A (2r, in)                 lora_B (3n, 2r)
    .-----------------.             .-----.-----.
    |   A of query    | r           |  B  |  0  | n   query
    |-----------------|             |-----|-----|
    |   A of value    | r           |  0  |  0  | n   key
    '-----------------'             |-----|-----|
                                    |  0  |  B  | n   value
                                    '-----'-----'

PEFT's settings beyond the paper's LoRA that change what is computed are refused by name; those that
say how a rank or an alpha differs between modules are read by normalizing all to one.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import CheckpointError, first_line
from ..functional import Delta
from ..io.atomic import atomic_write_folder
from ..io.tensors import same_tensor, write_tensors
from .adapter import LORA, Adapter, base_biases, lora_metadata
from .deltas import deltas_of, lora_pairs, rank_of
from .families import enabled_slices, family_of, in_known_backbone
from .metadata import LoraMetadata, is_alpha, is_dropout, is_rank
from .names import AMBIGUOUS

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAMES = ("adapter_model.safetensors", "adapter_model.bin")
PREFIX = "base_model.model."

# Settings that do not change what a trained adapter computes, or that its tensors show.
_WITHOUT_EFFECT = {
    *("auto_mapping", "inference_mode", "peft_version", "task_type", "runtime_config"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("fan_in_fan_out", "bias", "modules_to_save", "rank_pattern", "ensure_weight_tying"),
    *("eva_config", "megatron_core", "qalora_group_size"),
}
_READ = {
    *("peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "alpha_pattern"),
    *("init_lora_weights", "base_model_name_or_path", "revision"),
}
# The head that PEFT itself saves as one module, where the task is its SEQ_CLS.
_CLASSIFIER = "classifier"
# Initializations that leave the base's weights as they are; others, such as "pissa", change them.
_HARMLESS_INITIALIZATIONS = (True, False, None, "gaussian", "eva", "orthogonal")


# ------------------------------------------------------------------------------------------------
# Reading
# ------------------------------------------------------------------------------------------------


def weights_of(path: Path) -> Path:
    """The weights of the folder that `path`, its config or its weights, lies in.

    Raises:
        CheckpointError: config or weights are missing.
    """
    if not path.with_name(CONFIG_NAME).is_file():
        raise CheckpointError(f"{path}: PEFT's {CONFIG_NAME} is missing next to it")
    found = [file for name in WEIGHTS_NAMES if (file := path.with_name(name)).is_file()]
    if not found:
        raise CheckpointError(f"{path}: {' or '.join(WEIGHTS_NAMES)} is missing next to it")
    return found[0]


def read(config_path: Path, tensors: Mapping[str, Tensor], weights: Path) -> Adapter:
    """The adapter that PEFT's config and tensors are.

    Args:
        config_path: its config.
        tensors: its weights, under their canonical names.
        weights: the file that they are from.

    Raises:
        CheckpointError: they are damaged, do not belong together, or are not LoRA as the paper
            has it.
    """
    config, source = _read_config(config_path), str(weights)
    pairs = lora_pairs(tensors, source)
    if not pairs:
        raise CheckpointError(f"{source}: none of its {len(tensors)} tensors is LoRA's")
    for module, (A, B) in pairs.items():
        if len(A) != B.shape[1]:
            raise CheckpointError(
                f"{source}: {module} has a lora_A of rank {len(A)} and a lora_B of rank "
                f"{B.shape[1]}"
            )
        if not config.get("rank_pattern") and B.shape[1] != config["r"]:
            raise CheckpointError(
                f"{source}: its rank is {B.shape[1]} ({module}), {config_path.name} says "
                f"{config['r']}"
            )
    _check_complete(config, tensors, pairs, source)
    alphas = {
        module: _alpha(config, module, B.shape[1], config_path) for module, (_, B) in pairs.items()
    }
    blocks = _blocks_of_all(pairs)
    if blocks:
        pairs = {module: (A, blocks.get(module, B)) for module, (A, B) in pairs.items()}
        alphas = {
            module: alpha / sum(enabled_slices(module)) if module in blocks else alpha
            for module, alpha in alphas.items()
        }
    normalized, alpha = _normalized(pairs, alphas)
    tensors = {**tensors, **normalized}
    metadata = lora_metadata(tensors, rank_of(tensors, source), _as_int(alpha))
    metadata = replace(
        metadata,
        # What PEFT adapts is adapted wherever it is used.
        positions=None if metadata.positions is None else True,
        dropout=config.get("lora_dropout") or None,
        base=config.get("base_model_name_or_path"),
        base_revision=config.get("revision"),
    )
    return Adapter(tensors, metadata, source, format="peft")


def with_known(adapter: Adapter, known: LoraMetadata) -> Adapter:
    """The adapter with what this project wrote into the metadata of PEFT's weights.

    Raises:
        CheckpointError: the config says another rank or alpha.
    """
    read = adapter.lora
    own: dict[str, Any] = {"base": read.base, "base_revision": read.base_revision}
    # Updates that were stacked are one of a higher rank, where their family is not registered.
    times, rest = divmod(read.rank, known.rank)
    if family_of(adapter.tensors) is None and not rest and read.alpha == times * known.alpha:
        own |= {"rank": read.rank, "alpha": read.alpha}
    elif (read.rank, read.alpha) != (known.rank, known.alpha):
        what = "rank" if read.rank != known.rank else "alpha"
        raise CheckpointError(
            f"{adapter.source}: was written with {what} {getattr(known, what):g}, {CONFIG_NAME} "
            f"says {getattr(read, what):g} now"
        )
    return replace(adapter, metadata=replace(known, **own))


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not PEFT's settings ({first_line(error)})") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: not PEFT's settings (no JSON object)")
    for name, is_sound in _SOUND.items():
        if not is_sound(config.get(name)):
            raise CheckpointError(f"{path}: {name} is {_shown(config.get(name))}")
    if config.get("init_lora_weights", True) not in _HARMLESS_INITIALIZATIONS:
        raise CheckpointError(
            f"{path}: init_lora_weights is {_shown(config['init_lora_weights'])}, which changes "
            "the base's weights; let PEFT convert the adapter to plain LoRA"
        )
    for name, value in config.items():
        if name not in _READ | _WITHOUT_EFFECT and value:
            raise CheckpointError(
                f"{path}: {name} is {_shown(value)}, which is not LoRA as the paper has it; merge "
                "it with PEFT"
            )
    return config


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


_SOUND = {
    "peft_type": lambda value: value == "LORA",
    "r": is_rank,
    "lora_alpha": is_alpha,
    "lora_dropout": lambda value: value is None or is_dropout(value),
    "use_rslora": lambda value: value is None or isinstance(value, bool),
    "rank_pattern": lambda value: value is None or isinstance(value, dict),
    "alpha_pattern": lambda value: (
        value is None or (isinstance(value, dict) and all(map(is_alpha, value.values())))
    ),
    "base_model_name_or_path": lambda value: value is None or isinstance(value, str),
    "revision": lambda value: value is None or isinstance(value, str),
    "init_lora_weights": lambda value: value is None or isinstance(value, bool | str),
}


def _check_complete(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    modules: Iterable[str],
    source: str,
) -> None:
    """Checks that each module is adapted in the same layers, and that a saved head is there.

    Raises:
        CheckpointError: some tensors are missing.
    """
    layers: dict[str, set[int]] = {}
    for module in modules:
        number = re.search(r"\.(\d+)\.", module)
        if number:
            kind = module[: number.start()] + module[number.end() - 1 :]
            layers.setdefault(kind, set()).add(int(number[1]))
    everywhere = set().union(*layers.values())
    for kind, numbers in layers.items():
        # A pattern of full names may choose layers for each module.
        if numbers != everywhere and not _names_layers(config):
            missing = min(everywhere - numbers)
            raise CheckpointError(f"{source}: lacks the update of {kind} in layer {missing}")
    saved = config.get("modules_to_save")
    if saved and not any(LORA.part not in name for name in tensors.keys() - base_biases(tensors)):
        raise CheckpointError(f"{source}: lacks what {CONFIG_NAME} says is saved: {_shown(saved)}")


def _names_layers(config: Mapping[str, Any]) -> bool:
    """Whether the settings say module by module what is adapted, so that layers may differ."""
    targets = config.get("target_modules")
    in_full = isinstance(targets, str) or any(re.search(r"\.\d+\.", str(t)) for t in targets or ())
    return in_full or bool(config.get("exclude_modules"))


def _alpha(config: Mapping[str, Any], module: str, rank: int, path: Path) -> float:
    """The alpha by which, over its rank, a module's update is scaled.

    With rslora PEFT divides by the rank's square root instead.
    """
    alpha = config["lora_alpha"]
    for pattern, own in (config.get("alpha_pattern") or {}).items():
        name = pattern.removeprefix("^")
        if not re.fullmatch(r"[\w.]+", name):
            raise CheckpointError(
                f"{path}: alpha_pattern has a regular expression, '{pattern}'; only names are known"
            )
        if module == name or (name == pattern and module.endswith(f".{name}")):
            alpha = own
            break
    return alpha * math.sqrt(rank) if config.get("use_rslora") else alpha


def names_in_model(tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """PEFT's tensors under the names that the base model has for them.

    Raises:
        CheckpointError: some are not PEFT's, or two have one name.
    """
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.startswith(PREFIX):
            raise CheckpointError(f"{source}: {name} is not a name that PEFT gives")
        # With biases PEFT also writes a head's own copy of them, and those of the head before.
        if ".original_module." in name:
            continue
        own = name.removeprefix(PREFIX)
        own = re.sub(r"\.modules_to_save\.(?:[^.]+\.)?", ".", own)
        own = re.sub(r"\.lora_([AB])\.weight$", r".lora_\1", own)
        own = re.sub(r"\.base_layer\.bias$", ".bias", own)
        if own in named and not same_tensor(named[own], tensor):
            raise CheckpointError(f"{source}: holds {own} under two names")
        named[own] = tensor
    return named


def _blocks_of_all(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """B of the modules that stack several updates, see the module's head: its blocks, stacked.

    Empty where some B does not consist of such blocks, or where ranks would then differ between
    modules: each update then stays one of its module's full output.
    """
    found = {}
    for module, (_, B) in pairs.items():
        enabled = enabled_slices(module)
        if not enabled:
            continue
        blocks = _blocks(B, enabled)
        if blocks is None:
            return {}
        found[module] = blocks
    ranks = {found.get(module, B).shape[1] for module, (_, B) in pairs.items()}
    return found if len(ranks) == 1 else {}


def _normalized(
    pairs: Mapping[str, tuple[Tensor, Tensor]], alphas: Mapping[str, float]
) -> tuple[dict[str, Tensor], float]:
    """The tensors with one rank and one alpha for all modules, and that alpha.

    Lower ranks are filled up with zeros; B absorbs the ratio of scalings, in float32.
    Where all have one rank and alpha, nothing is changed. Stacked updates have one rank already.
    """
    ranks = {module: B.shape[1] for module, (_, B) in pairs.items()}
    rank, alpha = max(ranks.values()), max(alphas.values())
    is_uniform = set(ranks.values()) == {rank} and set(alphas.values()) == {alpha}
    normalized: dict[str, Tensor] = {}
    for module, (A, B) in pairs.items():
        if not is_uniform:
            missing = rank - ranks[module]
            factor = Delta.scale(alphas[module], ranks[module]) / Delta.scale(alpha, rank)
            # Half precision would round the products.
            A = F.pad(A.float(), (0, 0, 0, missing))
            B = F.pad(B.float() * factor, (0, missing))
        normalized |= {f"{module}.lora_A": A, f"{module}.lora_B": B}
    return normalized, alpha


def _blocks(B: Tensor, enabled: tuple[bool, ...]) -> Tensor | None:
    """(out, rank) in blocks -> the blocks one below the other; None if others are not zero."""
    count = sum(enabled)
    if not count or B.shape[1] % count or len(B) % len(enabled):
        return None
    grid = B.unflatten(1, (count, -1)).unflatten(0, (len(enabled), -1))
    places = [(index, block) for block, index in enumerate(_indices(enabled))]
    others = [
        grid[index, :, block]
        for index in range(len(enabled))
        for block in range(count)
        if (index, block) not in places
    ]
    if any(other.any() for other in others):
        return None
    return torch.cat([grid[index, :, block] for index, block in places]).contiguous()


def _indices(enabled: tuple[bool, ...]) -> list[int]:
    return [index for index, on in enumerate(enabled) if on]


def _as_int(value: float) -> float:
    return int(value) if value == int(value) else value


# ------------------------------------------------------------------------------------------------
# Writing
# ------------------------------------------------------------------------------------------------


def write(
    path: str | os.PathLike,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
) -> None:
    """Writes PEFT's folder, atomically.

    Raises:
        CheckpointError: there is something at `path`.
    """
    with atomic_write_folder(path) as folder:
        write_tensors(folder / WEIGHTS_NAMES[0], tensors, metadata)
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (folder / CONFIG_NAME).write_text(text, encoding="utf-8")


def tensors_of(adapter: Adapter) -> tuple[dict[str, Tensor], list[str]]:
    """An adapter's tensors as PEFT names and holds them; what a user has to know of them.

    Raises:
        CheckpointError: PEFT has no such updates.
    """
    named, deltas = {}, deltas_of(adapter)
    _refuse_embeddings(adapter, deltas)
    for module, delta in deltas.items():
        named[f"{PREFIX}{module}.lora_A.weight"] = delta.A
        named[f"{PREFIX}{module}.lora_B.weight"] = _joined_B(delta)
    for name, tensor in adapter.tensors.items():
        module, _, last = name.rpartition(".")
        if LORA.part not in name:
            own = f"{module}.base_layer.{last}" if module in deltas else name
            named[f"{PREFIX}{own}"] = tensor
    rank, alpha = adapter.lora.rank, adapter.lora.alpha
    stacked = {module.rpartition(".")[2]: len(delta.starts) for module, delta in deltas.items()}
    return named, [
        f"{parts} updates of rank {rank} in one {module} are, for PEFT, one of rank {parts * rank} "
        f"and alpha {parts * alpha:g}: the same sums"
        for module, parts in sorted(stacked.items())
        if parts > 1
    ]


def _refuse_embeddings(adapter: Adapter, modules: Iterable[str]) -> None:
    for module in modules:
        last = module.rpartition(".")[2]
        if "embed" in last or last in ("wte", "wpe"):
            raise CheckpointError(
                f"{adapter.source}: {module} seems to be an embedding, which PEFT adapts in "
                "another way"
            )


def _joined_B(delta: Delta) -> Tensor:
    """B of one update of the whole output: the blocks of stacked ones, and zeros."""
    if len(delta.starts) == 1:
        return delta.B
    joined = delta.B.new_zeros(delta.out_features, len(delta.A))
    for block in delta.blocks():
        joined[block.columns, block.rows] = block.B
    return joined


def config_of(adapter: Adapter) -> dict[str, Any]:
    """PEFT's settings for an adapter."""
    metadata, family = adapter.lora, family_of(adapter.tensors)
    parts = {module: len(delta.starts) for module, delta in deltas_of(adapter).items()}
    usual = min(parts.values())
    others = {module: count for module, count in parts.items() if count != usual}
    as_one = (_CLASSIFIER, *(family.head if family else ()))
    head = {
        first if (first := name.partition(".")[0]) in as_one else name.rpartition(".")[0]
        for name in adapter.tensors.keys() - base_biases(adapter.tensors)
        if LORA.part not in name
    }
    task = family.peft_task if family else None
    return {
        "peft_type": "LORA",
        "task_type": task or ("SEQ_CLS" if _CLASSIFIER in head else None),
        "base_model_name_or_path": metadata.base,
        "revision": metadata.base_revision,
        "inference_mode": True,
        "r": usual * metadata.rank,
        "lora_alpha": _as_int(usual * metadata.alpha),
        **_patterns(metadata, others),
        "lora_dropout": metadata.dropout or 0.0,
        **_targets(parts),
        "modules_to_save": sorted(head) or None,
        "bias": metadata.bias,
        "fan_in_fan_out": family is not None and family.fan_in_fan_out,
        "init_lora_weights": True,
        "use_rslora": False,
    }


def _patterns(metadata: LoraMetadata, counts: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """How PEFT is told the rank and alpha of modules that stack another number of updates."""
    if not counts:
        return {}
    return {
        "rank_pattern": {module: count * metadata.rank for module, count in counts.items()},
        "alpha_pattern": {
            module: _as_int(count * metadata.alpha) for module, count in counts.items()
        },
    }


def _targets(modules: Iterable[str]) -> dict[str, list]:
    """How PEFT is told which modules are adapted.

    By the last part of their names and the layers, where that is enough; by their full names where
    several modules of a layer are called so, or not all are adapted in the same layers.
    """
    layers: dict[str, set[int]] = {}
    for module in modules:
        number = re.search(r"\.(\d+)\.", module)
        last = module.rpartition(".")[2]
        if number is None or not in_known_backbone(module) or last in AMBIGUOUS:
            return {"target_modules": sorted(modules)}
        layers.setdefault(last, set()).add(int(number[1]))
    first, *others = layers.values()
    if any(numbers != first for numbers in others):
        return {"target_modules": sorted(modules)}
    return {"target_modules": sorted(layers), "layers_to_transform": sorted(first)}
