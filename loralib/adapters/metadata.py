"""Metadata of an adapter: what its tensors do not say of themselves, such as its alpha and base."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import ClassVar, TypeVar

from ..errors import CheckpointError, first_line
from ..functional import VARIANTS, Delta

# Keys of files that older versions wrote.
_OLD_KEYS = {"beside": "trained_with"}

_Own = TypeVar("_Own", bound="AdapterMetadata")


@dataclass(frozen=True, kw_only=True)
class AdapterMetadata:
    """What the tensors of a file do not say of themselves, whatever its kind.

    Args:
        base: name or path of the base model.
        base_revision: branch, tag or commit of the base, where it is on the hub.
        base_fingerprint: `fingerprint` of the base's weights.
        task: name of the task that the head was trained for.
        labels: the head's label names, in the order of its outputs.
        trained_with: the switches (see `Kind`) of what was trained with this, in other files.
    """

    base: str | None = None
    base_revision: str | None = None
    base_fingerprint: str | None = None
    task: str | None = None
    labels: tuple[str, ...] | None = None
    trained_with: tuple[str, ...] | None = None

    # Fields whose presence tells that a file's metadata are of this class.
    own: ClassVar[frozenset[str]] = frozenset()

    def to_metadata(self) -> dict[str, str]:
        """The fields as safetensors' metadata: strings of JSON; unset fields are left out."""
        return {key: json.dumps(value) for key, value in asdict(self).items() if value is not None}

    @classmethod
    def from_metadata(cls: type[_Own], metadata: Mapping[str, str], path: Path) -> _Own | None:
        """The reverse of `to_metadata`; None where the metadata is not of this class.

        Raises:
            CheckpointError: some of the class's own fields are there, but not all are sound.
        """
        metadata = {_OLD_KEYS.get(key, key): value for key, value in metadata.items()}
        known = {field.name for field in fields(cls)} & metadata.keys()
        if not known & cls.own:
            return None
        try:
            values = {key: json.loads(metadata[key]) for key in known}
            for key in ("targets", "labels", "trained_with"):
                if key in values:
                    values[key] = _strings(values[key])
            own = cls(**values)
        except (TypeError, ValueError, RecursionError) as error:
            message = f"{path}: its metadata is damaged ({first_line(error)})"
            raise CheckpointError(message) from error
        own.check(path)
        return own

    def check(self, path: object) -> None:
        """Checks that each value is one that this class can have; `path` is what errors name.

        Raises:
            CheckpointError: one is not.
        """
        for name in ("base", "base_revision", "base_fingerprint", "task"):
            value = getattr(self, name)
            if not isinstance(value, str | None):
                raise CheckpointError(f"{path}: {name} {value!r} in its metadata")


def _strings(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{value!r} is not a list of names")
    return tuple(value)


@dataclass(frozen=True, kw_only=True)
class LoraMetadata(AdapterMetadata):
    """Metadata of LoRA weights.

    Args:
        rank: r, the rank of the low-rank update.
        alpha: the update is scaled by alpha / r.
        targets: the adapted modules, as `lora_targets` names them: ``("query", "value")``.
        dropout: dropout on the update's input in training, where there was any.
        bias: which of the base's biases were trained, and are held as well: those of `loralib`'s
            `mark_only_lora_as_trainable`.
        positions: whether the update reaches the positions that an adapted projection is shared
            with, see loralib/nn/positions.py; None where none is shared.
        variant: of the update, a name in `loralib.functional.VARIANTS`; None for the paper's.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    dropout: float | None = None
    bias: str = "none"
    positions: bool | None = None
    variant: str | None = None

    own: ClassVar[frozenset[str]] = frozenset({"rank", "alpha", "targets"})

    def __post_init__(self) -> None:
        if self.variant == "lora":
            object.__setattr__(self, "variant", None)

    @property
    def delta(self) -> type[Delta]:
        """What computes the update."""
        return VARIANTS[self.variant or "lora"]

    def check(self, path: object) -> None:
        """As in `AdapterMetadata`."""
        super().check(path)
        for name, is_sound in (
            ("rank", is_rank(self.rank)),
            ("alpha", is_alpha(self.alpha)),
            ("dropout", self.dropout is None or is_dropout(self.dropout)),
            ("positions", isinstance(self.positions, bool | None)),
            ("variant", self.variant is None or self.variant in tuple(VARIANTS)),
        ):
            if not is_sound:
                raise CheckpointError(f"{path}: {name} {getattr(self, name)!r} in its metadata")


def is_rank(value: object) -> bool:
    """Whether this can be a rank."""
    return isinstance(value, int) and _is_number(value, 1, 1e9)


def is_alpha(value: object) -> bool:
    """Whether this can be an alpha; scaled by any rank it is a number still."""
    return _is_number(value, 1e-30, 1e30)


def is_dropout(value: object) -> bool:
    """Whether this can be a probability of dropout."""
    return _is_number(value, 0, 1)


def _is_number(value: object, low: float, high: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return low <= value <= high
