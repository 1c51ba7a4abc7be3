"""Reads an adapter's base, checks that the adapter fits it, and records it in the adapter."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from conversion.adapters import DEFAULT_HEAD, FULL, with_metadata
from conversion.gpt2_folder import check_trained_on_card, read_gpt2
from family import GPT2
from loralib.adapters.adapted_weights import adapted_modules
from loralib.adapters.adapter import Adapter
from loralib.adapters.checks import check_possible_base
from loralib.adapters.deltas import lora_pairs
from loralib.adapters.families import Family, family_of, registered
from loralib.adapters.fingerprint import are_of_one_base, has_float16
from loralib.errors import CheckpointError
from loralib.positions import shared_projections
from loralib.text import counted
from transformers import PretrainedConfig
from transformers.adapter_kinds import KINDS
from transformers.models.auto.modeling_auto import auto_model_for
from transformers.models.registry import head_of_class
from transformers.utils.logging import errors_only
from transformers.weight_files import read_weights

# The advice for a base that is another library's model.
IN_PYTHON = (
    "in Python, lora.load_adapter(model, …), then lora.merge(model).save_pretrained(…), merges the "
    "two"
)


@dataclass(frozen=True)
class Base:
    """A base model, to check an adapter against or to merge it into.

    Args:
        family: the model's family.
        name: the model's folder, file or name on the hub.
        revision: the revision of the hub's repository; None for its main branch.
        model: a plain model in float32, with a head of the adapter's shape.
        fingerprint: the fingerprint of its weights, see `loralib.adapters.fingerprint`.
        is_half: whether these are in float16, and perhaps the rounding of another base.
        settings: the content of its config.json, as upstream has it.
    """

    family: Family
    name: str
    revision: str | None
    model: nn.Module
    fingerprint: str
    is_half: bool
    settings: dict[str, Any]

    def fingerprint_for(self, adapter: Adapter) -> str | None:
        """Returns the fingerprint to compare with an adapter's, or to record in it.

        None if it would tell nothing: a base in float16 differs from the one it was rounded from.
        """
        theirs = adapter.metadata and adapter.metadata.base_fingerprint
        is_equal = bool(theirs) and are_of_one_base(theirs, self.fingerprint)
        return self.fingerprint if is_equal or not self.is_half else None


def read_base(name: str, adapter: Adapter) -> Base:
    """Reads the base with this name, and checks that an adapter fits it.

    Raises:
        CheckpointError: the base is damaged, its family is unknown here, or the adapter is for
            another base.
        OSError: there is no such model.
        ValueError: the model was itself adapted, or has settings that are not supported.
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
    known = base.fingerprint_for(adapter)
    check_possible_base(with_metadata(adapter), [] if known is None else [known])
    return base


def family_for(adapter: Adapter) -> Family:
    """Returns the family of the models that an adapter is for.

    Raises:
        CheckpointError: the family is unknown here.
    """
    modules = lora_pairs(adapter.tensors, adapter.source)
    family = family_of(modules)
    if family is None:
        *known, last = sorted(known.title for known in registered())
        raise CheckpointError(
            f"{adapter.source}: adapts neither {', '.join(known)} nor {last} ({min(modules)}), so "
            f"its base cannot be read here: {IN_PYTHON}; other formats need no --base"
        )
    return family


def _read_encoder(family: Family, name: str, revision: str | None, adapter: Adapter) -> Base:
    if Path(name).is_file():
        raise CheckpointError(
            f"{name}: is a file; give the folder of a {family.title} model, with its config.json"
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
    # Without the warning of a newly initialized head: the adapter has one, or merging reports it.
    with errors_only():
        model = auto_model.from_pretrained(
            name,
            # The weights whose checksums were verified: a damaged base must not be merged and
            # written as if it were intact.
            state_dict=weights,
            revision=revision,
            **_settings_of(adapter),
        )
    is_half = has_float16(weights)
    return Base(family, name, revision, model, model.base_fingerprint, is_half, settings)


def _check_head(family: Family, name: str, settings: Mapping[str, Any], adapter: Adapter) -> None:
    """Checks a head that is known only from an adapter's tensor names against the base's model.

    Raises:
        CheckpointError: the base's model has another kind of head with the same names.
    """
    said, own = adapter.metadata and adapter.metadata.head, adapter.head
    if said or own is None:
        return
    logits = family.heads[own].logits
    for theirs in map(head_of_class, settings.get("architectures") or ()):
        if theirs != own and theirs in family.heads and family.heads[theirs].logits == logits:
            raise CheckpointError(
                f"{adapter.source}: does not record what its head is for: its tensors are named as "
                f"for {own}, but {name} is a model for {theirs}; give a base without a head, or "
                "PEFT's folder with its task_type"
            )


def _settings_of(adapter: Adapter) -> dict[str, object]:
    """Returns the settings that the model's head takes from the adapter: its labels."""
    count, known = adapter.outputs, adapter.metadata.labels if adapter.metadata else None
    if count is None:  # it has no head
        return {}
    if known and len(known) != count:
        raise CheckpointError(
            f"{adapter.source}: names {counted(len(known), 'label')}, but its head has "
            f"{counted(count, 'output')}"
        )
    return {"id2label": dict(enumerate(known))} if known else {"num_labels": count}


def with_base(adapter: Adapter, base: Base) -> Adapter:
    """Returns the adapter with its base recorded, if it has metadata.

    Recorded are the base's name and revision. The base's fingerprint is recorded too, because the
    user says that this is the base, unless the adapter already has one or names another base. If no
    adapted projection is shared in the base, `positions` is removed.
    """
    if adapter.metadata is None:
        return adapter
    own: dict[str, Any] = {"base": base.name, "base_revision": base.revision}
    if adapter.metadata.base_fingerprint is None and not names_another(adapter, base):
        own["base_fingerprint"] = base.fingerprint_for(adapter)
    if shared_projections(base.model).isdisjoint(lora_pairs(adapter.tensors, adapter.source)):
        own["positions"] = None
    return replace(adapter, metadata=replace(adapter.metadata, **own))


def names_another(adapter: Adapter, base: Base) -> bool:
    """Returns whether an adapter with metadata records a base of another name."""
    said = adapter.metadata.base
    return said is not None and Path(said) != Path(base.name)


def unverified(adapter: Adapter, base: Base | None) -> list[str]:
    """Returns a remark for the user if a base's name differs and no fingerprint can confirm it."""
    if base is None or adapter.metadata is None or not names_another(adapter, base):
        return []
    if adapter.metadata.base_fingerprint and base.fingerprint_for(adapter):
        return []
    return [
        f"{adapter.source} names its base '{adapter.metadata.base}', --base is '{base.name}', and "
        "no fingerprint confirms that they are the same"
    ]
