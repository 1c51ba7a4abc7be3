"""Defines an adapter's metadata: what its tensors do not show, such as its alpha and base."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from ..errors import CheckpointError
from ..functional import VARIANTS, Delta
from ..initialization import INITIALIZATIONS, starts_from_weight
from ..text import first_line

_Own = TypeVar("_Own", bound="AdapterMetadata")
_Value = TypeVar("_Value")

# The fields that are tuples of strings.
_OF_STRINGS = ("targets", "labels", "text_columns", "trained_with", "embeddings", "stacks")


@dataclass(frozen=True, kw_only=True)
class AdapterMetadata:
    """The metadata that adapters of all kinds have: what the tensors of a file do not show.

    Args:
        base: name or path of the base model.
        base_revision: branch, tag or commit of the base, if it is on the hub.
        base_fingerprint: `fingerprint` of the base's weights.
        task: name of the task that the head was trained for.
        head: the head's task, such as "token_classification": a key of `Family.heads`.
        is_decoder: True if tokens attended only to themselves and earlier ones.
        labels: the head's label names, in the order of its outputs.
        text_columns: if the head classifies sequences, the columns of its training data that held a
            row's one or two sequences, in the order in which the model reads them.
        trained_with: the switches (see `Kind`) of the adapters that were trained together with this
            one and are in other files.
    """

    base: str | None = None
    base_revision: str | None = None
    base_fingerprint: str | None = None
    task: str | None = None
    head: str | None = None
    is_decoder: bool | None = None
    labels: tuple[str, ...] | None = None
    text_columns: tuple[str, ...] | None = None
    trained_with: tuple[str, ...] | None = None

    # If a file's metadata have any of these fields, they are of this class.
    own: ClassVar[frozenset[str]] = frozenset()

    def to_metadata(self) -> dict[str, str]:
        """Returns safetensors metadata: JSON strings of all fields that are not None."""
        return {key: json.dumps(value) for key, value in asdict(self).items() if value is not None}

    @classmethod
    def from_metadata(cls: type[_Own], metadata: Mapping[str, str], path: Path) -> _Own | None:
        """Reads what `to_metadata` returned. None if the metadata is not of this class.

        Raises:
            CheckpointError: some of the class's own fields are there, but not all are valid.
        """
        known = {field.name for field in fields(cls)} & metadata.keys()
        if not known & cls.own:
            return None
        try:
            values = {key: json.loads(metadata[key]) for key in known}
            values |= {key: _strings(values[key]) for key in _OF_STRINGS if key in known}
            own = cls(**values)
        except (TypeError, ValueError, RecursionError) as error:
            message = f"{path}: its metadata is damaged ({first_line(error)})"
            raise CheckpointError(message) from error
        own.check(path)
        return own

    def check(self, path: object) -> None:
        """Checks that each field has a valid value. Errors name `path`.

        Raises:
            CheckpointError: a value is invalid.
        """
        for name, is_sound in self._are_sound().items():
            if not is_sound:
                value = getattr(self, name)
                raise CheckpointError(f"{path}: invalid {name} {value!r} in its metadata")

    def _are_sound(self) -> dict[str, bool]:
        """Returns whether fields have valid values, by name."""
        texts = ("base", "base_revision", "base_fingerprint", "task", "head")
        return {
            **{name: isinstance(getattr(self, name), str | None) for name in texts},
            "is_decoder": isinstance(self.is_decoder, bool | None),
            "text_columns": self.text_columns is None or are_text_columns(self.text_columns),
        }


def are_text_columns(names: object) -> bool:
    """Returns whether this is a list of one or two different column names."""
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return False
    return 1 <= len({*names}) == len(names) <= 2


def default_labels(count: int) -> tuple[str, ...]:
    """Returns the names of a head's labels if nobody has named them: ``LABEL_0``, …"""
    return tuple(f"LABEL_{index}" for index in range(count))


def _strings(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{value!r} is not a list of names")
    return tuple(value)


@dataclass(frozen=True, kw_only=True)
class LoraMetadata(AdapterMetadata):
    """Metadata of LoRA weights.

    Equivalent values are stored in the shortest form: "lora", "default", False and empty mappings
    become None, and patterns hold only the values that differ from `rank` and `alpha`.

    Fields that a later version adds are ignored by earlier ones. If one changes what is computed,
    that version has to write a new value of `variant` as well, which earlier ones refuse.

    Args:
        rank: r, the rank of the low-rank update.
        alpha: the update is scaled by alpha / r.
        targets: the adapted modules, as `lora_targets` names them: ``("query", "value")``.
        dropout: dropout on the update's input in training, if there was any.
        bias: which of the base's biases were trained and are held as well, as a value of `bias` in
            `loralib`'s `mark_only_lora_as_trainable`.
        positions: whether the update reaches the positions that share an adapted projection, see
            loralib/positions.py. None if no projection is shared.
        variant: the update's variant, a name in `loralib.functional.VARIANTS`. None for the
            paper's.
        rank_pattern: the ranks that differ from `rank`, by the modules' full names.
        alpha_pattern: the alphas that differ from `alpha`, by the modules' full names.
        initialization: how A and B were initialized, as for `loralib`'s layers. None for the
            default. For "pissa" and "olora", the start of A and B is among the tensors.
        freeze_A: True if only B was trained.
        embeddings: the full names of the adapted modules that are embeddings.
        slices: which of the equal slices of its output an update reaches, by the module's full
            name. Only for stacked updates in models of no registered family.
        stacks: the full names of the updates of stacks of matrices, see loralib/experts.py, in the
            order in which the model has those stacks.
        places: the other names of the modules that the model used in several places, by the first
            name. Only of those that have tensors of the adapter, or contain modules that do.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    dropout: float | None = None
    bias: str = "none"
    positions: bool | None = None
    variant: str | None = None
    rank_pattern: Mapping[str, int] | None = None
    alpha_pattern: Mapping[str, float] | None = None
    initialization: str | None = None
    freeze_A: bool | None = None
    embeddings: tuple[str, ...] | None = None
    slices: Mapping[str, tuple[bool, ...]] | None = None
    stacks: tuple[str, ...] | None = None
    places: Mapping[str, tuple[str, ...]] | None = None

    own: ClassVar[frozenset[str]] = frozenset({"rank", "alpha", "targets"})

    def __post_init__(self) -> None:
        for name, shorter in {
            "variant": None if self.variant == "lora" else self.variant,
            "initialization": None if self.initialization == "default" else self.initialization,
            "freeze_A": None if self.freeze_A is False else self.freeze_A,
            "rank_pattern": _others(self.rank_pattern, self.rank),
            "alpha_pattern": _others(self.alpha_pattern, self.alpha),
            "embeddings": self.embeddings or None,
            "slices": _of_tuples(self.slices),
            "stacks": self.stacks or None,
            "places": _of_tuples(self.places),
        }.items():
            object.__setattr__(self, name, shorter)

    @property
    def delta(self) -> type[Delta]:
        """The class that computes the update."""
        return VARIANTS[self.variant or "lora"]

    @property
    def has_magnitude(self) -> bool:
        """Whether the tensors include magnitudes, as DoRA's do."""
        return self.delta.has_magnitude

    @property
    def has_start(self) -> bool:
        """Whether the tensors include the start of A and B, from which the update is measured."""
        return starts_from_weight(self.initialization or "default")

    def rank_of(self, module: str) -> int:
        """Returns the rank of a module's update."""
        return (self.rank_pattern or {}).get(module, self.rank)

    def alpha_of(self, module: str) -> float:
        """Returns the alpha of a module's update."""
        return (self.alpha_pattern or {}).get(module, self.alpha)

    def is_of_stack(self, update: str) -> bool:
        """Returns whether the update of this name is that of a stack of matrices."""
        return update in (self.stacks or ())

    def _are_sound(self) -> dict[str, bool]:
        return {
            **super()._are_sound(),
            "rank": is_rank(self.rank),
            "alpha": is_alpha(self.alpha),
            "dropout": self.dropout is None or is_dropout(self.dropout),
            "positions": isinstance(self.positions, bool | None),
            "variant": self.variant in (None, *VARIANTS),
            "rank_pattern": _is_mapping(self.rank_pattern, is_rank),
            "alpha_pattern": _is_mapping(self.alpha_pattern, is_alpha),
            "initialization": self.initialization in (None, *INITIALIZATIONS),
            "freeze_A": isinstance(self.freeze_A, bool | None),
            "slices": _is_mapping(self.slices, _is_slices),
            "places": _is_mapping(self.places, _are_names),
        }


def usual(values: Mapping[str, _Value]) -> tuple[_Value, dict[str, _Value]]:
    """Returns the most common value (the first of several), and the names with other values."""
    ((most, _),) = Counter(values.values()).most_common(1)
    return most, {name: value for name, value in values.items() if value != most}


def is_rank(value: object) -> bool:
    """Returns whether this can be a rank."""
    return isinstance(value, int) and _is_number(value, 1, 1e9)


def is_alpha(value: object) -> bool:
    """Returns whether this can be an alpha: a number that stays finite if scaled by any rank."""
    return _is_number(value, 1e-30, 1e30)


def is_dropout(value: object) -> bool:
    """Returns whether this can be a probability of dropout."""
    return _is_number(value, 0, 1)


def _is_number(value: object, low: float, high: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return low <= value <= high


def _is_mapping(value: object, is_sound: Callable[[object], bool]) -> bool:
    if value is None:
        return True
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and is_sound(item) for name, item in value.items()
    )


def _is_slices(value: object) -> bool:
    return isinstance(value, tuple) and any(value) and all(isinstance(on, bool) for on in value)


def _are_names(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(name, str) for name in value)


def _others(pattern: Any, usual: object) -> Any:
    """Returns the entries of a pattern that are not `usual`. `check` refuses what is no pattern."""
    if not isinstance(pattern, Mapping):
        return pattern
    return {name: pattern[name] for name in sorted(pattern) if pattern[name] != usual} or None


def _of_tuples(lists: Any) -> Any:
    """Converts JSON's lists to tuples. Anything else is left as it is, for `check` to refuse."""
    if not isinstance(lists, Mapping):
        return lists
    return {
        name: tuple(each) if isinstance(each, list) else each
        for name, each in sorted(lists.items())
    } or None
