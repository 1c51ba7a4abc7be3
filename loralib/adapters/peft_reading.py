"""Reads PEFT's folders. Their contents are described in peft.py."""

import json
import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..functional import variant_of
from ..io.tensors import same_tensor
from ..stacks import layer_of_stack, stack_of_layer
from ..text import first_line, listed, shown
from .adapter import LORA, Adapter, Kind, base_biases, lora_metadata
from .canonical import canonical_names, renamed, uncompiled
from .checksums import read_checked
from .deltas import MAGNITUDE, lora_pairs, ranks_of, slices_in
from .families import enabled_slices, family_of, in_known_backbone
from .metadata import LoraMetadata, is_alpha, is_dropout, is_rank, usual
from .peft import (
    CONFIG_NAME,
    PREFIX,
    TASK_OF_HEAD,
    TIMES_ADDED,
    VARIANT_OF_FLAGS,
    WEIGHTS_NAMES,
    as_int,
    attention_of,
    end_of_name,
    head_of_class,
    is_targeted_parameter,
    stacked_B_of,
)

logger = logging.getLogger(__name__)

# Settings that do not change what a trained adapter computes, or that follow from its tensors.
_WITHOUT_EFFECT = {
    *("auto_mapping", "inference_mode", "peft_version", "task_type", "runtime_config"),
    *("fan_in_fan_out", "ensure_weight_tying", "eva_config", "megatron_core", "qalora_group_size"),
}
# Settings that say which modules are adapted, trained and saved.
_SCOPE_SETTINGS = (
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("target_parameters", "bias", "modules_to_save"),
)
_READ = {
    *("peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora"),
    *("rank_pattern", "alpha_pattern", "init_lora_weights", "base_model_name_or_path", "revision"),
    *_SCOPE_SETTINGS,
}
# The suffix that makes an adapted module's name that of its frozen weight.
_BASE_WEIGHT = ".base_layer.weight"
# Initializations that leave the base's weights as they are; others, such as "pissa", change them.
_HARMLESS_INITIALIZATIONS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")


def read(path: Path, kind: Kind, stacks_of_model: Sequence[str] = ()) -> Adapter:
    """Reads a PEFT folder.

    Args:
        path: its config or its weights.
        kind: LoRA.
        stacks_of_model: if the model is known, the names of its stacks of matrices, in its order.

    Raises:
        CheckpointError: config or weights are missing, are damaged, do not belong together, or are
            not LoRA as in the paper. Or this project wrote the folder, and the config now has
            another rank, alpha, variant or head than it had then.
    """
    # The config tells whether the weights are LoRA's, and PEFT's at all.
    config, weights = _read_config(path), _weights_of(path)
    held, fields = read_checked(weights, kind)
    source = str(weights)
    held = renamed(held, uncompiled, source)
    tensors = canonical_names(_names_in_model(held, source), source)
    known = LoraMetadata.from_metadata(fields, weights)
    tensors, embeddings = _as_ours(tensors, source)
    said = map(stack_of_layer, (known and known.stacks) or ())
    tensors, stacks = _with_stacks(tensors, config, tuple(said) or stacks_of_model, source)
    pairs = lora_pairs(tensors, source)
    if not pairs:
        raise CheckpointError(f"{source}: none of its {len(tensors)} tensors is LoRA's")
    _check_ranks(config, {m: p for m, p in pairs.items() if m not in stacks}, source)
    _check_complete(config, tensors, pairs, source)
    if _adds_twice(config):
        for module in pairs:
            if attention_of(module, pairs):
                tensors[f"{module}.lora_B"] = TIMES_ADDED * tensors[f"{module}.lora_B"]
    use_dora = bool(config.get("use_dora"))
    variant = VARIANT_OF_FLAGS[bool(config.get("use_rslora")), use_dora]
    in_peft = {module: stack_of_layer(module) if module in stacks else module for module in pairs}
    alphas = {m: _by_pattern(config, "lora_alpha", name, pairs) for m, name in in_peft.items()}
    slices = {} if use_dora else {m: own for m in pairs if (own := slices_in(known, m))}
    blocks = _blocks_of_all(pairs, slices)
    for module, B in blocks.items():
        tensors[f"{module}.lora_B"] = B
        alphas[module] = as_int(variant_of(variant).scale(alphas[module], sum(slices[module])))
    metadata = replace(
        _metadata_of(config, tensors, alphas, source),
        variant=variant,
        embeddings=embeddings,
        stacks=stacks,
        slices={m: slices[m] for m in blocks if slices[m] != enabled_slices(m)},
    )
    if known is not None:
        metadata = _with_known(metadata, known, pairs, source)
    # Our own folders have a checksum instead, and PEFT's settings do not say all that they hold.
    written = {} if known else {name: config.get(name) for name in _SCOPE_SETTINGS}
    return Adapter(
        tensors,
        metadata,
        source,
        format="peft",
        base_weights=_base_weights(held),
        peft_config=written,
    )


def _weights_of(path: Path) -> Path:
    """Returns the path of the weights in the folder of `path`, which is the config or the weights.

    Raises:
        CheckpointError: they are missing.
    """
    found = [file for name in WEIGHTS_NAMES if (file := path.with_name(name)).is_file()]
    if not found:
        raise CheckpointError(f"{path}: {' or '.join(WEIGHTS_NAMES)} is missing next to it")
    return found[0]


def _metadata_of(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    alphas: Mapping[str, float],
    source: str,
) -> LoraMetadata:
    """Returns what the settings and our tensors show, given the modules' alphas."""
    rank, ranks = usual(ranks_of(tensors, source))
    alpha, others = usual(alphas)
    metadata = lora_metadata(tensors, rank, alpha)
    return replace(
        metadata,
        rank_pattern=ranks,
        alpha_pattern=others,
        # PEFT's update applies wherever a module is used, which includes positions.
        positions=None if metadata.positions is None else True,
        dropout=config.get("lora_dropout") or None,
        base=config.get("base_model_name_or_path"),
        base_revision=config.get("revision"),
        head=_head_of(config, tensors),
    )


def _head_of(config: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """Returns the head that PEFT's task type is for, or None.

    In a registered family it must be one of the family's heads, and the name of the model's class
    tells it as well.
    """
    family, task = family_of(names), config.get("task_type")
    if family and family.peft_task and task == family.peft_task:
        return None
    heads = family.heads if family and family.heads else TASK_OF_HEAD
    told: list[str | None] = [head for head, its in TASK_OF_HEAD.items() if its == task]
    if family:
        name = str((config.get("auto_mapping") or {}).get("base_model_class"))
        told.append(head_of_class(name))
    return next((head for head in told if head in heads), None)


def _as_ours(
    tensors: Mapping[str, Tensor], source: str
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Returns the tensors with our names and shapes, and the names of the adapted embeddings."""
    ours = renamed(tensors, partial(re.sub, r"\.lora_embedding_([AB])$", r".lora_\1"), source)
    # A convolution's magnitudes have more dimensions in PEFT, see `magnitude_for`.
    ours |= {name: t.flatten() for name, t in ours.items() if name.endswith(MAGNITUDE)}
    embeddings = {name.rpartition(".")[0] for name in tensors if ".lora_embedding_" in name}
    return ours, tuple(sorted(embeddings))


def _with_stacks(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], order: Sequence[str], source: str
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Gives the tensors of stacks of matrices our names and shapes, and returns the stacks, too.

    Returns:
        All tensors, and the names of the stacks' updates.

    Raises:
        CheckpointError: it is unknown which stack an update belongs to, an update is missing, or
            one does not have the rank that the settings say.
    """
    ours, named = dict(tensors), _named_stacks(tensors, config, order, source)
    for module, name in named.items():
        A, B = (ours.pop(f"{module}.lora_{half}", None) for half in "AB")
        if A is None or B is None:
            raise CheckpointError(f"{source}: lacks one half of the update of {name}")
        rank = _by_pattern(config, "r", name, ())
        if len(A) != B.shape[1] or len(A) % rank:
            raise CheckpointError(
                f"{source}: lora_A and lora_B of {name} have {len(A)} and {B.shape[1]} ranks in "
                f"total, which are not the same multiple of the rank {rank} in {CONFIG_NAME}"
            )
        layer = layer_of_stack(name)
        ours[f"{layer}.lora_A"], ours[f"{layer}.lora_B"] = A, stacked_B_of(B, rank)
    stacks = dict.fromkeys(name for name in order if name in named.values())
    stacks |= dict.fromkeys(named.values())  # also those that the model lacks: loading reports them
    return ours, tuple(map(layer_of_stack, stacks))


def _named_stacks(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], order: Sequence[str], source: str
) -> dict[str, str]:
    """Returns the names of the stacks that updates belong to, by PEFT's names for the updates.

    PEFT wraps a module once for each of its adapted parameters. The first one's wrapper is the
    innermost.
    """
    named = dict[str, str]()
    for owner, modules in _around_stacks(tensors, config).items():
        meant = _stacks_of(owner, config)
        in_order = [name for name in order if name in meant]
        names = in_order or meant
        if len(names) > 1 and not in_order:
            raise CheckpointError(
                f"{source}: adapts several parameters of {owner} ({listed(names)}), and only the "
                "order in the model tells which update is whose: in Python, "
                "lora.load_adapter(model, …) with the model that it was trained in; then "
                "lora.save_adapter writes a file that records it, or lora.merge merges the adapter"
            )
        around = [f"{owner}{'.base_layer' * more}" for more in reversed(range(len(names)))]
        lost = [n for n, module in zip(names, around, strict=True) if module not in modules]
        if lost:
            raise CheckpointError(
                f"{source}: lacks the update of {listed(lost)}, which {CONFIG_NAME} says is adapted"
            )
        if len(modules) != len(names):
            raise CheckpointError(
                f"{source}: the number of updates of {owner} is {len(modules)}, but {CONFIG_NAME} "
                f"names {listed(names)}"
            )
        named |= dict(zip(modules, names, strict=True))
    return named


def _around_stacks(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> dict[str, list[str]]:
    """Returns PEFT's names for the updates of stacks, by the module that has the stacks.

    Updates that PEFT added first come first.
    """
    found: dict[str, list[str]] = {}
    for module in (name.rpartition(".")[0] for name in tensors if name.endswith(".lora_A")):
        owner = re.sub(r"(\.base_layer)+$", "", module)
        is_plain = owner == module and _is_of_matrix(owner, tensors, config)
        if not is_plain and _stacks_of(owner, config):
            found.setdefault(owner, []).append(module)
    return {owner: sorted(modules, key=len, reverse=True) for owner, modules in found.items()}


def _is_of_matrix(owner: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> bool:
    """Returns whether an update is of one matrix: it has the rank that the settings say.

    A target parameter that is a bare name would match other modules as well, and one with dots may
    be a linear layer's weight. An update of a stack has that rank for each of its matrices.
    """
    dotted = [name for name in config.get("target_parameters") or () if "." in name]
    named = _stacks_of(owner, {"target_parameters": dotted})
    if len(named) > 1:  # only a module with stacks has several
        return False
    rank = _by_pattern(config, "r", named[0] if named else owner, ())
    return tensors[f"{owner}.lora_A"].shape[:1] == (rank,)


def _stacks_of(owner: str, config: Mapping[str, Any]) -> list[str]:
    """Returns the names of a module's parameters that the settings target."""
    ends = dict.fromkeys(t.rpartition(".")[2] for t in config.get("target_parameters") or ())
    own = (f"{owner}.{end}" for end in ends)
    return [name for name in own if is_targeted_parameter(config, name)]


def _check_ranks(
    config: Mapping[str, Any], pairs: Mapping[str, tuple[Tensor, Tensor]], source: str
) -> None:
    """Checks that updates are not stacked and have the ranks that the settings say."""
    for module, (A, B) in pairs.items():
        if len(A) != B.shape[1]:
            raise CheckpointError(
                f"{source}: {module} has a lora_A of rank {len(A)} and a lora_B of rank "
                f"{B.shape[1]}"
            )
        rank = _by_pattern(config, "r", module, pairs)
        if B.shape[1] != rank:
            raise CheckpointError(
                f"{source}: its rank is {B.shape[1]} ({module}), but {CONFIG_NAME} says {rank}"
            )


def _with_known(
    read: LoraMetadata, known: LoraMetadata, modules: Collection[str], source: str
) -> LoraMetadata:
    """Returns the metadata that this project wrote into PEFT's weights, if the config agrees.

    The base, its revision and the slices are taken from `read`, and so are ranks and alphas if
    stacked updates have become one.

    Raises:
        CheckpointError: the config has another variant, rank, alpha or head.
    """
    own: dict[str, Any] = {n: getattr(read, n) for n in ("base", "base_revision", "slices")}
    own["head"] = known.head or read.head
    pairs: list[tuple[str, object, object]] = [("variant", known.variant, read.variant)]
    if known.head and read.head:
        pairs.append(("head", known.head, read.head))
    for module in modules:
        if _is_joined(module, read, known):
            own |= {name: getattr(read, name) for name in _OF_RANKS}
            continue
        pairs.append(("rank", known.rank_of(module), read.rank_of(module)))
        alphas = known.alpha_of(module), read.alpha_of(module)
        if not math.isclose(*alphas):
            pairs.append(("alpha", *alphas))
    for what, before, now in pairs:
        if before != now:
            raise CheckpointError(
                f"{source}: was written with {what} {before}, but {CONFIG_NAME} now says {now}"
            )
    return replace(known, **own)


def _is_joined(module: str, read: LoraMetadata, known: LoraMetadata) -> bool:
    """Returns whether stacked updates are now one of a higher rank, as their slices are unknown."""
    times, rest = divmod(read.rank_of(module), known.rank_of(module))
    if times < 2 or rest or family_of([module]) is not None:
        return False
    scalings = [
        metadata.delta.scale(metadata.alpha_of(module), metadata.rank_of(module))
        for metadata in (read, known)
    ]
    return math.isclose(*scalings)


_OF_RANKS = ("rank", "alpha", "rank_pattern", "alpha_pattern")


def _read_config(path: Path) -> dict[str, Any]:
    """Reads the config in the folder of `path`, which is the config or the weights."""
    given, path = path, path.with_name(CONFIG_NAME)
    if not path.is_file():
        raise CheckpointError(f"{given}: PEFT's {CONFIG_NAME} is missing next to it")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not PEFT's settings ({first_line(error)})") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: not PEFT's settings (no JSON object)")
    if config.get("peft_type") is None:
        raise CheckpointError(f"{path}: not PEFT's settings (no peft_type)")
    for name, is_sound in _SOUND.items():
        if not is_sound(config.get(name)):
            raise CheckpointError(f"{path}: {name} is {shown(config.get(name))}")
    if config.get("init_lora_weights", True) not in _HARMLESS_INITIALIZATIONS:
        raise CheckpointError(
            f"{path}: init_lora_weights is {shown(config['init_lora_weights'])}, which changes "
            "the base's weights; let PEFT convert the adapter to plain LoRA"
        )
    for name, value in config.items():
        if name not in _READ | _WITHOUT_EFFECT and value:
            raise CheckpointError(
                f"{path}: {name} is {shown(value)}, which plain LoRA does not have; merge it with "
                "PEFT"
            )
    return config


def _is_pattern(value: Any, is_sound: Callable[[Any], bool]) -> bool:
    if value is None:
        return True
    return isinstance(value, dict) and all(
        _is_expression(key) and is_sound(item) for key, item in value.items()
    )


def _is_expression(text: str) -> bool:
    try:
        end_of_name(text)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def _are_names(value: Any) -> bool:
    if isinstance(value, str):
        return _is_expression(value)
    return value is None or (isinstance(value, list) and all(isinstance(x, str) for x in value))


def _are_expressions(value: Any) -> bool:
    several = [value] if isinstance(value, str) else value
    return _are_names(several) and all(map(_is_expression, several or ()))


def _are_integers(value: Any) -> bool:
    several = value if isinstance(value, list) else [] if value is None else [value]
    return all(isinstance(x, int) and not isinstance(x, bool) for x in several)


_SOUND: dict[str, Callable[[Any], bool]] = {
    "peft_type": lambda value: value == "LORA",
    "r": is_rank,
    "lora_alpha": is_alpha,
    "lora_dropout": lambda value: value is None or is_dropout(value),
    "use_rslora": lambda value: isinstance(value, bool | None),
    "use_dora": lambda value: isinstance(value, bool | None),
    "rank_pattern": lambda value: _is_pattern(value, is_rank),
    "alpha_pattern": lambda value: _is_pattern(value, is_alpha),
    "base_model_name_or_path": lambda value: isinstance(value, str | None),
    "revision": lambda value: isinstance(value, str | None),
    "init_lora_weights": lambda value: isinstance(value, bool | str | None),
    "auto_mapping": lambda value: isinstance(value, dict | None),
    "target_modules": _are_names,
    "exclude_modules": _are_names,
    "target_parameters": lambda value: _are_names(value) and not isinstance(value, str),
    "layers_pattern": _are_expressions,
    "modules_to_save": lambda value: _are_expressions(value) and not isinstance(value, str),
    "layers_to_transform": _are_integers,
}


def _check_complete(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    modules: Iterable[str],
    source: str,
) -> None:
    """Checks that a registered family's modules are adapted in the same layers, and its head saved.

    In other models, such as those with an encoder and a decoder, the layers may well differ.

    Raises:
        CheckpointError: some tensors are missing.
    """
    layers: dict[str, set[int]] = {}
    for module in modules:
        number = re.search(r"\.(\d+)\.", module)
        if number and in_known_backbone(module):
            kind = module[: number.start()] + module[number.end() - 1 :]
            layers.setdefault(kind, set()).add(int(number[1]))
    everywhere = set().union(*layers.values())
    for kind, numbers in layers.items():
        # Full names may select different layers for each module.
        if numbers != everywhere and not _names_layers(config):
            missing = min(everywhere - numbers)
            raise CheckpointError(f"{source}: lacks the update of {kind} in layer {missing}")
    # If no registered family has such layers, this is checked later, against the model.
    saved = config.get("modules_to_save") if layers else None
    if saved and not any(LORA.part not in name for name in tensors.keys() - base_biases(tensors)):
        raise CheckpointError(
            f"{source}: lacks the modules that {CONFIG_NAME} says are saved: {shown(saved)}"
        )


def _names_layers(config: Mapping[str, Any]) -> bool:
    """Returns whether the settings name adapted modules one by one, so that layers may differ."""
    targets = config.get("target_modules")
    in_full = isinstance(targets, str) or any(re.search(r"\.\d+\.", str(t)) for t in targets or ())
    return in_full or bool(config.get("exclude_modules"))


_PATTERNS = {"r": "rank_pattern", "lora_alpha": "alpha_pattern"}


def _by_pattern(
    config: Mapping[str, Any], setting: str, module: str, modules: Collection[str]
) -> Any:
    """Returns a module's rank or alpha, as PEFT finds it.

    It is the value of the first pattern that matches. Otherwise it is that of a key equal to the
    module's name, which as an expression may not match itself, or else the general setting. For a
    linear layer whose weight is a target parameter, PEFT takes the weight's name.
    """
    name, patterns = attention_of(module, modules) or module, config.get(_PATTERNS[setting]) or {}
    if is_targeted_parameter(config, f"{name}.weight"):
        name = f"{name}.weight"
    matching = (value for key, value in patterns.items() if end_of_name(key).match(name))
    return next(matching, patterns.get(name, config[setting]))


def _adds_twice(config: Mapping[str, Any]) -> bool:
    """Returns whether the PEFT that wrote this adds the update of an attention's out_proj twice.

    All versions up to 0.21 do, of which those up to 0.17 record no version. A fix has been proposed
    to PEFT. This project's own folders say that they are version 0.21's.
    """
    version = re.match(r"0\.(\d+)", str(config.get("peft_version") or "0.21"))
    return version is not None and int(version[1]) <= 21


def _base_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the base's weights that PEFT wrote (of adapted embeddings), by the base's names."""
    return {
        name.removeprefix(PREFIX).removesuffix(_BASE_WEIGHT) + ".weight": tensor
        for name, tensor in tensors.items()
        if name.endswith(_BASE_WEIGHT)
    }


def _names_in_model(tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Returns PEFT's tensors under the names that the base model has for them.

    Raises:
        CheckpointError: some names are not PEFT's, or two different tensors get the same name.
    """
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.startswith(PREFIX):
            raise CheckpointError(f"{source}: {name} is not a name that PEFT gives")
        # With biases, PEFT also writes those of a head's trained copy and of the original head.
        if ".original_module." in name:
            continue
        # With an adapted embedding, PEFT also writes the frozen weight.
        if name.endswith(_BASE_WEIGHT):
            logger.warning("%s: %s is left out: it is the base's own weight", source, name)
            continue
        new = name.removeprefix(PREFIX)
        new = re.sub(r"\.modules_to_save\.(?:[^.]+\.)?", ".", new)
        new = re.sub(r"\.lora_([AB])\.weight$", r".lora_\1", new)
        new = re.sub(r"\.base_layer\.(?=bias$|out_proj\.)", ".", new)
        if new in named and not same_tensor(named[new], tensor):
            raise CheckpointError(f"{source}: holds {new} under two names")
        named[new] = tensor
    return named


def _blocks_of_all(
    pairs: Mapping[str, tuple[Tensor, Tensor]], slices: Mapping[str, tuple[bool, ...]]
) -> dict[str, Tensor]:
    """Returns B of the modules that stack updates, with its blocks stacked: see peft.py's drawing.

    Empty if any B does not consist of such blocks. Then each update stays one of its module's whole
    output.
    """
    found = {}
    for module, enabled in slices.items():
        blocks = _blocks(pairs[module][1], enabled)
        if blocks is None:
            return {}
        found[module] = blocks
    return found


def _blocks(B: Tensor, enabled: tuple[bool, ...]) -> Tensor | None:
    """Stacks the blocks of B, which is (out, rank). None if B is not zero outside its blocks."""
    count = sum(enabled)
    if B.shape[1] % count or len(B) % len(enabled):
        return None
    grid = B.unflatten(1, (count, -1)).unflatten(0, (len(enabled), -1))
    indices = [index for index, on in enumerate(enabled) if on]
    places = [(index, block) for block, index in enumerate(indices)]
    others = [
        grid[index, :, block]
        for index in range(len(enabled))
        for block in range(count)
        if (index, block) not in places
    ]
    if any(other.any() for other in others):
        return None
    return torch.cat([grid[index, :, block] for index, block in places]).contiguous()
