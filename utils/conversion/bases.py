"""The base of an adapter: read, held against the adapter, and recorded in it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from conversion.adapters import DEFAULT_HEAD, FULL, with_metadata
from conversion.gpt2_folder import GPT2, check_trained_on_card, read_gpt2
from loralib.adapters.adapter import Adapter
from loralib.adapters.checks import check_possible_base
from loralib.adapters.deltas import adapted_modules, lora_pairs
from loralib.adapters.families import Family, family_of, registered
from loralib.adapters.fingerprint import has_float16
from loralib.errors import CheckpointError
from loralib.nn.positions import shared_projections
from transformers import PretrainedConfig
from transformers.adapter_kinds import KINDS
from transformers.models.auto.modeling_auto import auto_model_for
from transformers.models.registry import head_of_class
from transformers.utils.logging import errors_only
from transformers.weight_files import read_weights

# What to do where the base is a model of another library's.
IN_PYTHON = (
    "in Python, lora.load_adapter(model, …), then lora.merge(model).save_pretrained(…), merges the "
    "two"
)


@dataclass(frozen=True)
class Base:
    """A base model, to check an adapter against or to merge it into.

    Args:
        family: the family that it is of.
        name: its folder, file or name on the hub.
        revision: of the hub's repository; None for its main branch.
        model: a plain model, float32, with a head of the adapter's shape.
        fingerprint: of its weights, see `loralib.adapters.fingerprint`; None in float16.
        settings: the content of its config.json, for upstream.
    """

    family: Family
    name: str
    revision: str | None
    model: nn.Module
    fingerprint: str | None
    settings: dict[str, Any]


def read_base(name: str, adapter: Adapter) -> Base:
    """The base of this name, for an adapter, which has to fit it.

    Raises:
        CheckpointError: it is damaged, or the adapter is one of another base.
        OSError: there is no such model.
        ValueError: it is a model that was adapted itself, or of no family that is known here.
    """
    revision = None
    if adapter.metadata and adapter.metadata.base == name:
        revision = adapter.metadata.base_revision
    family = family_for(adapter)
    if family == GPT2:
        base = Base(family, name, revision, *read_gpt2(name, revision))
        if adapter.format in ("release", FULL):
            check_trained_on_card(adapter, name, base.settings)
    else:
        base = _read_encoder(family, name, revision, adapter)
    adapted_modules(base.model, with_metadata(adapter))
    known = [] if base.fingerprint is None else [base.fingerprint]
    check_possible_base(with_metadata(adapter), known)
    return base


def family_for(adapter: Adapter) -> Family:
    """The family of the models that an adapter is for.

    Raises:
        CheckpointError: models of that family are not read here.
    """
    modules = lora_pairs(adapter.tensors, adapter.source)
    family = family_of(modules)
    if family is None:
        *known, last = sorted(known.title for known in registered())
        raise CheckpointError(
            f"{adapter.source}: adapts neither {', '.join(known)} nor {last} ({min(modules)}), so "
            f"that its base is not read here: {IN_PYTHON}; other formats need no --base"
        )
    return family


def _read_encoder(family: Family, name: str, revision: str | None, adapter: Adapter) -> Base:
    if Path(name).is_file():
        raise CheckpointError(
            f"{name}: is a file; give a folder of {family.title}'s, with its config.json"
        )
    settings = PretrainedConfig.read_values(name, revision=revision)
    for kind in KINDS:
        if settings.get(kind.switch):
            raise ValueError(
                f"{name} was itself trained with --{kind.switch}: it is not a plain base"
            )
    _check_head(family, name, settings, adapter)
    auto_model = auto_model_for(adapter.head or DEFAULT_HEAD)
    weights = read_weights(name, verify=True, revision=revision)
    # No warning of a newly initialized head: the adapter brings one, or merging reports it.
    with errors_only():
        model = auto_model.from_pretrained(
            name,
            # What is written from it should not pass for sound where it is damaged.
            state_dict=weights,
            revision=revision,
            **_settings_of(adapter),
        )
    fingerprint = None if has_float16(weights) else model.base_fingerprint
    return Base(family, name, revision, model, fingerprint, settings)


def _check_head(family: Family, name: str, settings: Mapping[str, Any], adapter: Adapter) -> None:
    """Checks what an adapter's names alone say of its head against the base's own model.

    Raises:
        CheckpointError: that has another head of the same name.
    """
    said, own = adapter.metadata and adapter.metadata.head, adapter.head
    if said or own is None:
        return
    for theirs in map(head_of_class, settings.get("architectures") or ()):
        head = family.heads.get(theirs or own)
        if theirs not in (None, own) and head and head.logits == family.heads[own].logits:
            raise CheckpointError(
                f"{adapter.source}: does not record what its head is for: its names are those "
                f"of {own}, but {name} is a model for {theirs}; give a base without a head, or "
                "PEFT's folder with its task_type"
            )


def _settings_of(adapter: Adapter) -> dict[str, object]:
    """The settings of a model with the head that the adapter brings, where they are its own."""
    said = adapter.metadata is not None and adapter.metadata.is_decoder
    return {**({"is_decoder": True} if said else {}), **_labels(adapter)}


def _labels(adapter: Adapter) -> dict[str, object]:
    """The labels of the head that the adapter brings; none where it has none."""
    count = adapter.outputs
    if count is None:
        return {}
    known = adapter.metadata.labels if adapter.metadata else None
    if known and len(known) != count:
        raise CheckpointError(
            f"{adapter.source}: names {len(known)} labels, its head has {count} outputs"
        )
    return {"id2label": dict(enumerate(known))} if known else {"num_labels": count}


def with_base(adapter: Adapter, base: Base) -> Adapter:
    """The adapter with what its base says of it, where it has metadata to hold that.

    This is the base's name, and whether any adapted projection is shared at all. Its fingerprint is
    taken on a user's word, as an alpha is, unless the adapter names another base.
    """
    if adapter.metadata is None:
        return adapter
    own: dict[str, Any] = {"base": base.name, "base_revision": base.revision}
    if adapter.metadata.base_fingerprint is None and not names_another(adapter, base):
        own["base_fingerprint"] = base.fingerprint
    if shared_projections(base.model).isdisjoint(lora_pairs(adapter.tensors, adapter.source)):
        own["positions"] = None
    return replace(adapter, metadata=replace(adapter.metadata, **own))


def names_another(adapter: Adapter, base: Base) -> bool:
    """Whether an adapter says a base of another name."""
    said = adapter.metadata.base if adapter.metadata else None
    return said is not None and Path(said) != Path(base.name)


def unverified(adapter: Adapter, base: Base | None) -> list[str]:
    """What a user has to know of a base that nothing but its name can confirm, a line each."""
    if base is None or adapter.metadata is None or not names_another(adapter, base):
        return []
    if adapter.metadata.base_fingerprint and base.fingerprint:
        return []
    return [
        f"{adapter.source} names its base '{adapter.metadata.base}', which --base is not called"
    ]
