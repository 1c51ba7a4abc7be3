"""Describes an adapter for users."""

from collections.abc import Mapping, Sequence

from conversion.adapters import with_metadata
from conversion.dtypes import dtypes_of
from loralib.adapters.adapter import LORA, Adapter, in_words
from loralib.adapters.deltas import START_A, START_B, lora_pairs
from loralib.adapters.names import within_layer

_REACHED = {
    True: "updated by LoRA, as in PEFT",
    False: "not updated by LoRA, as in the release",
}


def describe(adapter: Adapter) -> dict[str, str]:
    """Returns an adapter's properties by name, as text for users."""
    metadata = with_metadata(adapter).metadata
    pairs = lora_pairs(adapter.tensors, adapter.source)
    stacked = max(len(A) // B.shape[1] for A, B in pairs.values())
    each = f" ({stacked} updates in each module)" if stacked > 1 else ""
    sizes = {n: t.numel() for n, t in adapter.tensors.items() if not n.endswith((START_A, START_B))}
    lora = sum(size for name, size in sizes.items() if LORA.part in name)
    others = sum(sizes.values()) - lora
    said = {
        "format": adapter.format,
        "rank": f"{metadata.rank}{each}{_exceptions(metadata.rank_pattern)}",
        "alpha": "not recorded; give --lora_alpha"
        if adapter.metadata is None
        else f"{metadata.alpha:g}{_exceptions(metadata.alpha_pattern)}",
        "variant": metadata.variant or (adapter.metadata and "lora"),
        "initialization": metadata.initialization,
        "freeze_A": "A was frozen, only B was trained" if metadata.freeze_A else None,
        "targets": f"{in_words(metadata.targets)}, in {len(pairs)} modules",
        "slices": _updated(metadata.slices),
        "dropout": metadata.dropout,
        "biases": metadata.bias,
        "positions": None if metadata.positions is None else _REACHED[metadata.positions],
        "parameters": f"{lora:,} of LoRA, {others:,} others",
        "size": f"{sum(t.nbytes for t in adapter.tensors.values()) / 2**20:.2f} MiB",
        "dtype": ", ".join(dtypes_of(adapter)),
        "base": metadata.base,
        "revision": metadata.base_revision,
        "fingerprint": metadata.base_fingerprint,
        "task": metadata.task,
        "head": adapter.head,
        "labels": in_words(metadata.labels) if metadata.labels else None,
        "texts": in_words(metadata.text_columns) if metadata.text_columns else None,
        "with": in_words(metadata.trained_with) if metadata.trained_with else None,
    }
    return {name: str(value) for name, value in said.items() if value is not None}


def _exceptions(pattern: Mapping[str, float] | None) -> str:
    """Returns text that lists a pattern's values, and the modules that have them."""
    modules: dict[float, list[str]] = {}
    for module, value in sorted((pattern or {}).items()):
        modules.setdefault(value, []).append(module)
    listed = [f"{value:g} in {_listed(names)}" for value, names in sorted(modules.items())]
    return f", but {'; '.join(listed)}" if listed else ""


def _listed(names: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown}, … ({len(names)} modules)"


def _updated(slices: Mapping[str, tuple[bool, ...]] | None) -> str | None:
    """Returns text that says which slices of modules' outputs have an update."""
    listed = {
        f"{within_layer(module)} {', '.join('yes' if on else 'no' for on in enabled)}"
        for module, enabled in (slices or {}).items()
    }
    return "; ".join(sorted(listed)) or None
