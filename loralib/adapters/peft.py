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

Ranks and alphas that differ between modules are `rank_pattern` and `alpha_pattern` on both sides:
PEFT's keys are regular expressions for the end of a module's name, ours full names. An embedding's
halves are called ``lora_embedding_A`` and ``lora_embedding_B``; the magnitudes of a convolution are
(1, out, 1, …). What belongs to the output projection of an `nn.MultiheadAttention` is under
``base_layer.out_proj``, and has the attention's own rank and alpha; PEFT adds that update twice (up
to 0.21), so that B of the same function is here twice what it is there.

PEFT's settings beyond that which change what is computed are refused by name.
"""

import functools
import json
import logging
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, first_line
from ..functional import Delta, joined_with_start, variant_of
from ..io.atomic import atomic_write_folder
from ..io.tensors import same_tensor, write_tensors
from .adapter import LORA, Adapter, base_biases, lora_metadata
from .deltas import (
    MAGNITUDE,
    START_A,
    START_B,
    deltas_of,
    is_of_slices,
    lora_pairs,
    ranks_of,
    slices_of,
)
from .families import enabled_slices, family_of, in_known_backbone
from .metadata import LoraMetadata, is_alpha, is_dropout, is_rank, usual
from .names import AMBIGUOUS

logger = logging.getLogger(__name__)

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAMES = ("adapter_model.safetensors", "adapter_model.bin")
PREFIX = "base_model.model."

# Settings that do not change what a trained adapter computes, or that its tensors show.
_WITHOUT_EFFECT = {
    *("auto_mapping", "inference_mode", "peft_version", "task_type", "runtime_config"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("fan_in_fan_out", "bias", "modules_to_save", "ensure_weight_tying"),
    *("eva_config", "megatron_core", "qalora_group_size"),
}
_READ = {
    *("peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora"),
    *("rank_pattern", "alpha_pattern"),
    *("init_lora_weights", "base_model_name_or_path", "revision"),
}
# The variants, by whether PEFT is told use_rslora and use_dora.
_VARIANTS = {
    (False, False): "lora",
    (True, False): "rslora",
    (False, True): "dora",
    (True, True): "rslora+dora",
}
# The head that PEFT itself saves as one module, where the task is its SEQ_CLS.
_CLASSIFIER = "classifier"
# What follows the name of an adapted module in that of its frozen weight.
_BASE_WEIGHT = ".base_layer.weight"
# What follows the name of an `nn.MultiheadAttention` in its output projection's.
_OUT_PROJ = ".out_proj"
# How often PEFT adds an update to an attention's output projection; a power of 2 rounds nothing.
_TIMES_ADDED = 2
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


def read(
    config_path: Path, tensors: Mapping[str, Tensor], weights: Path, known: LoraMetadata | None
) -> Adapter:
    """The adapter that PEFT's config and tensors are.

    Args:
        config_path: its config.
        tensors: its weights, under their canonical names.
        weights: the file that they are from.
        known: what this project wrote into the metadata of the weights, where it wrote them.

    Raises:
        CheckpointError: they are damaged, do not belong together, or are not LoRA as the paper
            has it; or the config says another rank, alpha or variant than `known`.
    """
    config, source = _read_config(config_path), str(weights)
    tensors, embeddings = _as_ours(tensors, source)
    pairs = lora_pairs(tensors, source)
    if not pairs:
        raise CheckpointError(f"{source}: none of its {len(tensors)} tensors is LoRA's")
    _check_ranks(config, pairs, source, config_path)
    _check_complete(config, tensors, pairs, source)
    if _adds_twice(config):
        for module in pairs:
            if _attention_of(module, pairs):
                tensors[f"{module}.lora_B"] = _TIMES_ADDED * tensors[f"{module}.lora_B"]
    use_dora = bool(config.get("use_dora"))
    variant = _VARIANTS[bool(config.get("use_rslora")), use_dora]
    alphas = {module: _by_pattern(config, "lora_alpha", module, pairs) for module in pairs}
    slices = {} if use_dora else {m: own for m in pairs if (own := _known_slices(known, m))}
    blocks = _blocks_of_all(pairs, slices)
    for module, B in blocks.items():
        tensors[f"{module}.lora_B"] = B
        alphas[module] = _as_int(variant_of(variant).scale(alphas[module], sum(slices[module])))
    rank, ranks = usual(ranks_of(tensors, source))
    alpha, others = usual(alphas)
    metadata = lora_metadata(tensors, rank, alpha)
    metadata = replace(
        metadata,
        rank_pattern=ranks,
        alpha_pattern=others,
        variant=variant,
        embeddings=embeddings,
        slices={m: slices[m] for m in blocks if slices[m] != enabled_slices(m)},
        initialization="orthogonal" if config.get("init_lora_weights") == "orthogonal" else None,
        # What PEFT adapts is adapted wherever it is used.
        positions=None if metadata.positions is None else True,
        dropout=config.get("lora_dropout") or None,
        base=config.get("base_model_name_or_path"),
        base_revision=config.get("revision"),
    )
    if known is not None:
        metadata = _with_known(metadata, known, pairs, source)
    return Adapter(tensors, metadata, source, format="peft")


def _as_ours(
    tensors: Mapping[str, Tensor], source: str
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The tensors as this project calls and shapes them; the names of adapted embeddings."""
    ours: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        own = re.sub(r"\.lora_embedding_([AB])$", r".lora_\1", name)
        if own in ours:
            raise CheckpointError(f"{source}: holds {own} under two names")
        ours[own] = tensor.flatten() if name.endswith(MAGNITUDE) else tensor
    embeddings = {name.rpartition(".")[0] for name in tensors if ".lora_embedding_" in name}
    return ours, tuple(sorted(embeddings))


def _check_ranks(
    config: Mapping[str, Any],
    pairs: Mapping[str, tuple[Tensor, Tensor]],
    source: str,
    config_path: Path,
) -> None:
    """Checks that updates are not stacked, and have the ranks that the settings say."""
    for module, (A, B) in pairs.items():
        if len(A) != B.shape[1]:
            raise CheckpointError(
                f"{source}: {module} has a lora_A of rank {len(A)} and a lora_B of rank "
                f"{B.shape[1]}"
            )
        said = _by_pattern(config, "r", module, pairs)
        if B.shape[1] != said:
            raise CheckpointError(
                f"{source}: its rank is {B.shape[1]} ({module}), {config_path.name} says {said}"
            )


def _with_known(
    read: LoraMetadata, known: LoraMetadata, modules: Iterable[str], source: str
) -> LoraMetadata:
    """What this project wrote into the metadata of PEFT's weights, if the config says the same.

    Raises:
        CheckpointError: the config says another variant, rank or alpha.
    """
    own: dict[str, Any] = {n: getattr(read, n) for n in ("base", "base_revision", "slices")}
    pairs: list[tuple[str, object, object]] = [("variant", known.variant, read.variant)]
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
                f"{source}: was written with {what} {before}, {CONFIG_NAME} says {now} now"
            )
    return replace(known, **own)


def _is_joined(module: str, read: LoraMetadata, known: LoraMetadata) -> bool:
    """Whether updates that were stacked are one of a higher rank, as nothing says their slices."""
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


def _is_pattern(value: Any, is_sound: Callable[[Any], bool]) -> bool:
    if value is None:
        return True
    return isinstance(value, dict) and all(
        _is_expression(key) and is_sound(item) for key, item in value.items()
    )


def _is_expression(text: str) -> bool:
    try:
        _end_of_name(text)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


_SOUND: dict[str, Callable[[Any], bool]] = {
    "peft_type": lambda value: value == "LORA",
    "r": is_rank,
    "lora_alpha": is_alpha,
    "lora_dropout": lambda value: value is None or is_dropout(value),
    "use_rslora": lambda value: value is None or isinstance(value, bool),
    "use_dora": lambda value: value is None or isinstance(value, bool),
    "rank_pattern": lambda value: _is_pattern(value, is_rank),
    "alpha_pattern": lambda value: _is_pattern(value, is_alpha),
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
    """Checks that a registered family's modules are adapted in the same layers, and the head.

    In other models, such as those of an encoder and a decoder, numbers may well differ.

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


_PATTERNS = {"r": "rank_pattern", "lora_alpha": "alpha_pattern"}


def _by_pattern(
    config: Mapping[str, Any], setting: str, module: str, modules: Collection[str]
) -> Any:
    """A module's rank or alpha: that of the first pattern which matches, as in PEFT."""
    name = _attention_of(module, modules) or module
    for pattern, value in (config.get(_PATTERNS[setting]) or {}).items():
        if _end_of_name(pattern).match(name):
            return value
    return config[setting]


@functools.lru_cache(maxsize=4096)
def _end_of_name(pattern: str) -> re.Pattern[str]:
    """The expression that PEFT makes of a pattern's key: for a name, or its end after a dot."""
    return re.compile(rf"(.*\.)?({pattern})$")


def _attention_of(module: str, modules: Collection[str]) -> str | None:
    """The `nn.MultiheadAttention` whose output projection this is.

    No other kind of module is adapted together with a child of its own.
    """
    owner = module.removesuffix(_OUT_PROJ)
    return owner if owner != module and owner in modules else None


def _adds_twice(config: Mapping[str, Any]) -> bool:
    """Whether the PEFT that wrote this adds the update of an attention's out_proj twice.

    0.21 does, as do those before; a correction is proposed there. This project's own folders, which
    say no version, are written for it.
    """
    version = re.match(r"0\.(\d+)", str(config.get("peft_version") or "0.21"))
    return version is not None and int(version[1]) <= 21


def base_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What PEFT has written of the base, an adapted embedding's weight, by the base's names."""
    return {
        name.removeprefix(PREFIX).removesuffix(_BASE_WEIGHT) + ".weight": tensor
        for name, tensor in tensors.items()
        if name.endswith(_BASE_WEIGHT)
    }


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
        # With an adapted embedding PEFT also writes the frozen weight.
        if name.endswith(_BASE_WEIGHT):
            logger.warning("%s: %s is left out: it is the base's own weight", source, name)
            continue
        own = name.removeprefix(PREFIX)
        own = re.sub(r"\.modules_to_save\.(?:[^.]+\.)?", ".", own)
        own = re.sub(r"\.lora_([AB])\.weight$", r".lora_\1", own)
        own = re.sub(r"\.base_layer\.(?=bias$|out_proj\.)", ".", own)
        if own in named and not same_tensor(named[own], tensor):
            raise CheckpointError(f"{source}: holds {own} under two names")
        named[own] = tensor
    return named


def _known_slices(known: LoraMetadata | None, module: str) -> tuple[bool, ...]:
    own = (known.slices if known else None) or {}
    return own.get(module) or enabled_slices(module)


def _blocks_of_all(
    pairs: Mapping[str, tuple[Tensor, Tensor]], slices: Mapping[str, tuple[bool, ...]]
) -> dict[str, Tensor]:
    """B of the modules that stack several updates, see the module's head: its blocks, stacked.

    Empty where some B does not consist of such blocks: each update then stays one of its module's
    full output.
    """
    found = {}
    for module, enabled in slices.items():
        blocks = _blocks(pairs[module][1], enabled)
        if blocks is None:
            return {}
        found[module] = blocks
    return found


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


def what_forbids(adapter: Adapter) -> str | None:
    """Why PEFT cannot hold an adapter; None where it can."""
    metadata, modules = adapter.lora, ranks_of(adapter.tensors, adapter.source)
    pairs = lora_pairs(adapter.tensors, adapter.source)
    for module, (A, B) in pairs.items():
        attention = _attention_of(module, modules)
        is_of_slices = len(A) > B.shape[1] or module in (metadata.slices or {})
        if metadata.has_magnitude and is_of_slices:
            return f"the magnitudes of {module} are those of slices, PEFT's of the complete output"
        if metadata.has_magnitude and attention:
            return f"adapts {attention}, an nn.MultiheadAttention, for which PEFT has no DoRA"
        if attention and _strength(metadata, module) != _strength(metadata, attention):
            return f"{module} has another rank or alpha than {attention}, which PEFT adapts as one"
    for name in adapter.tensors:
        module, _, last = name.rpartition(".")
        if module in modules and last == "in_proj_bias":
            return f"brings {name}, a bias that PEFT does not save"
        if not module:
            return f"brings {name}, a parameter of the model itself: PEFT saves modules"
    return None


def _strength(metadata: LoraMetadata, module: str) -> tuple[int, float]:
    return metadata.rank_of(module), metadata.alpha_of(module)


def as_peft_computes(adapter: Adapter) -> tuple[Adapter, list[str]]:
    """The adapter in the terms that PEFT has for it; what a user has to know of that, a line each.

    An update that is counted from a start is a plain one of twice the rank, as in PEFT's own
    conversion. What slices stacked updates reach is in the metadata, so that they can be told again
    from what PEFT holds.
    """
    remarks = []
    if adapter.lora.has_start:
        remarks.append(
            f"the update from the start of {adapter.lora.initialization} is, for PEFT, plain LoRA "
            "of twice the rank: the same sums"
        )
        adapter = _without_start(adapter)
    metadata, slices, deltas = adapter.lora, {}, deltas_of(adapter)
    if any(_attention_of(module, deltas) for module in deltas):
        remarks.append(
            "PEFT up to 0.21 adds the update of an nn.MultiheadAttention's out_proj twice: its "
            "lora_B is halved in the file, so that the sums are the same there"
        )
    for module, delta in deltas.items():
        if not is_of_slices(delta):
            continue
        slices[module] = slices_of(adapter, module)
        parts, rank, alpha = len(delta.starts), *_strength(metadata, module)
        if parts == 1:
            continue
        remarks.append(
            f"{parts} updates of rank {rank} in one {module.rpartition('.')[2]} are, for PEFT, one "
            f"of rank {parts * rank} and alpha {_joined_alpha(metadata, alpha, parts):g}: the same "
            "sums"
        )
    return replace(adapter, metadata=replace(metadata, slices=slices)), sorted(set(remarks))


def _without_start(adapter: Adapter) -> Adapter:
    """The adapter with plain LoRA of twice the rank in place of what is counted from a start."""
    metadata, tensors = adapter.lora, dict(adapter.tensors)
    for module, rank in ranks_of(tensors, adapter.source).items():
        names = [f"{module}.{half}" for half in ("lora_A", "lora_B", START_A, START_B)]
        A, B, A0, B0 = (tensors.pop(name) for name in names)
        joined = joined_with_start(A, B, A0, B0, len(A) // rank)
        tensors[names[0]], tensors[names[1]] = joined
    ranks, alphas = metadata.rank_pattern or {}, metadata.alpha_pattern or {}
    plain = replace(
        metadata,
        rank=2 * metadata.rank,
        alpha=_joined_alpha(metadata, metadata.alpha, 2),
        rank_pattern={module: 2 * rank for module, rank in ranks.items()},
        alpha_pattern={m: _joined_alpha(metadata, alpha, 2) for m, alpha in alphas.items()},
        initialization=None,
    )
    return replace(adapter, tensors=tensors, metadata=plain)


def _joined_alpha(metadata: LoraMetadata, alpha: float, parts: int) -> float:
    """The alpha by which an update of `parts` times the rank is scaled as its parts are."""
    return _as_int(alpha / metadata.delta.scale(1.0, parts))


def tensors_of(adapter: Adapter) -> dict[str, Tensor]:
    """The tensors of an adapter, as `as_peft_computes` gives it, as PEFT names and holds them.

    Raises:
        CheckpointError: PEFT has no such updates.
    """
    named, deltas = {}, deltas_of(adapter)
    embeddings = adapter.lora.embeddings or ()
    _refuse_embeddings(adapter, deltas.keys() - set(embeddings))
    for name, tensor in adapter.tensors.items():
        module, _, last = name.rpartition(".")
        if LORA.part not in name:
            named[f"{_place(module, deltas)}.{last}" if module else name] = tensor
    for module, delta in deltas.items():
        A, B = (adapter.tensors[f"{module}.lora_{ab}"] for ab in "AB")
        B = _joined_B(delta) if is_of_slices(delta) else B
        B = _divided(B, module, adapter.source) if _attention_of(module, deltas) else B
        half = "lora_embedding_{}" if module in embeddings else "lora_{}.weight"
        place = _place(module, deltas, of_lora=True)
        named[f"{place}.{half.format('A')}"], named[f"{place}.{half.format('B')}"] = A, B
        magnitude = adapter.tensors.get(f"{module}.{MAGNITUDE}")
        if magnitude is not None:
            is_kernel = A.dim() > 2
            shape = (1, len(magnitude), *[1] * (A.dim() - 2)) if is_kernel else magnitude.shape
            named[f"{place}.{MAGNITUDE}"] = magnitude.view(shape)
    return named


def _divided(B: Tensor, module: str, source: str) -> Tensor:
    """B as PEFT holds it, which adds it several times.

    Raises:
        CheckpointError: values are too small to be divided in their dtype.
    """
    divided = B / _TIMES_ADDED
    if not torch.equal(divided * _TIMES_ADDED, B):
        raise CheckpointError(
            f"{source}: lora_B of {module} has values that cannot be halved in {B.dtype}, as PEFT "
            "needs it: write it in float32"
        )
    return divided


def _place(module: str, adapted: Collection[str], of_lora: bool = False) -> str:
    """What PEFT's names of a module's tensors begin with: of LoRA's, or of the module's own."""
    attention = _attention_of(module, adapted)
    inner = f"{attention}.base_layer{_OUT_PROJ}" if attention else module
    of_base = module in adapted and not of_lora
    return f"{PREFIX}{inner}.base_layer" if of_base else f"{PREFIX}{inner}"


def _refuse_embeddings(adapter: Adapter, modules: Iterable[str]) -> None:
    """Refuses what older files do not say: that a module is an embedding."""
    for module in sorted(modules):
        last = module.rpartition(".")[2]
        is_kernel = adapter.tensors[f"{module}.lora_A"].dim() > 2
        if not is_kernel and re.search(r"(?:^|_)(?:embed(?:ding)?s?|embed_tokens|wte|wpe)$", last):
            raise CheckpointError(
                f"{adapter.source}: {module} seems to be an embedding, which PEFT adapts in "
                "another way: say so in its metadata (embeddings)"
            )


def _joined_B(delta: Delta) -> Tensor:
    """B of one update of the whole output: the blocks of stacked ones, and zeros."""
    joined = delta.B.new_zeros(delta.out_features, len(delta.A))
    for block in delta.blocks():
        joined[block.columns, block.rows] = block.B
    return joined


def config_of(adapter: Adapter) -> dict[str, Any]:
    """PEFT's settings for an adapter, as `as_peft_computes` gives it."""
    metadata, family = adapter.lora, family_of(adapter.tensors)
    parts = {module: len(delta.starts) for module, delta in deltas_of(adapter).items()}
    targets = {module for module in parts if _attention_of(module, parts) is None}
    rank, ranks = usual({m: parts[m] * metadata.rank_of(m) for m in parts if m in targets})
    alpha, alphas = usual(
        {m: _joined_alpha(metadata, metadata.alpha_of(m), parts[m]) for m in parts if m in targets}
    )
    as_one = (_CLASSIFIER, *(family.head if family else ()))
    head = {
        first if (first := name.partition(".")[0]) in as_one else name.rpartition(".")[0]
        for name in adapter.tensors.keys() - base_biases(adapter.tensors)
        if LORA.part not in name
    }
    task = family.peft_task if family else None
    told = {name: flags for flags, name in _VARIANTS.items()}
    use_rslora, use_dora = told[metadata.variant or "lora"]
    return {
        "peft_type": "LORA",
        "task_type": task or ("SEQ_CLS" if _CLASSIFIER in head else None),
        "base_model_name_or_path": metadata.base,
        "revision": metadata.base_revision,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _as_int(alpha),
        "rank_pattern": _pattern(ranks, targets),
        "alpha_pattern": _pattern(alphas, targets),
        "lora_dropout": metadata.dropout or 0.0,
        **_targets(targets),
        "modules_to_save": sorted(head) or None,
        "bias": metadata.bias,
        "fan_in_fan_out": family is not None and family.fan_in_fan_out,
        "init_lora_weights": True,
        "use_rslora": use_rslora,
        "use_dora": use_dora,
    }


def _pattern(values: Mapping[str, float], modules: Collection[str]) -> dict[str, float]:
    """How PEFT is told the rank or alpha of some of the adapted modules: by names, where none of
    them is the end of another's.
    """
    return {
        f"^{re.escape(module)}"
        if any(other != module and _end_of_name(module).match(other) for other in modules)
        else module: _as_int(value)
        for module, value in values.items()
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
