"""Metadata of an adapter: what its tensors do not say of themselves, such as its alpha and base."""

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


@dataclass(frozen=True, kw_only=True)
class AdapterMetadata:
    """What the tensors of a file do not say of themselves, whatever its kind.

    Args:
        base: name or path of the base model.
        base_revision: branch, tag or commit of the base, where it is on the hub.
        base_fingerprint: `fingerprint` of the base's weights.
        task: name of the task that the head was trained for.
        head: what the head does, such as "token_classification": a key of `Family.heads`.
        is_decoder: True where tokens saw those before them alone.
        labels: the head's label names, in the order of its outputs.
        text_columns: where the head classifies texts, the columns of its training data that were
            one row's texts, in the order in which the model reads them.
        trained_with: the switches (see `Kind`) of what was trained with this, in other files.
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
        known = {field.name for field in fields(cls)} & metadata.keys()
        if not known & cls.own:
            return None
        try:
            values = {key: json.loads(metadata[key]) for key in known}
            names = ("targets", "labels", "text_columns", "trained_with", "embeddings", "stacks")
            for key in names:
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
        for name in ("base", "base_revision", "base_fingerprint", "task", "head"):
            value = getattr(self, name)
            if not isinstance(value, str | None):
                raise CheckpointError(f"{path}: {name} {value!r} in its metadata")
        if not isinstance(self.is_decoder, bool | None):
            raise CheckpointError(f"{path}: is_decoder {self.is_decoder!r} in its metadata")
        if self.text_columns is not None and not are_text_columns(self.text_columns):
            raise CheckpointError(f"{path}: text_columns {self.text_columns!r} in its metadata")


def are_text_columns(names: object) -> bool:
    """Whether this names the columns of a row's texts: one, or two different ones."""
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return False
    return 1 <= len({*names}) == len(names) <= 2


def _strings(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{value!r} is not a list of names")
    return tuple(value)


@dataclass(frozen=True, kw_only=True)
class LoraMetadata(AdapterMetadata):
    """Metadata of LoRA weights.

    Of two spellings of one thing the shorter is kept: "lora", "default", False and empty mappings
    become None, and patterns hold what differs from `rank` and `alpha` alone.

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
        rank_pattern: the ranks of the modules that have another than `rank`, by the modules' full
            names.
        alpha_pattern: likewise, the alphas of those that have another than `alpha`.
        initialization: how A and B were initialized, as for `loralib`'s layers; None for the
            default. "pissa" and "olora" have their start among the tensors.
        freeze_A: True where B alone was trained.
        embeddings: the full names of the adapted modules that are embeddings.
        slices: which of the equal slices of its output an update reaches, by the module's full
            name: of stacked updates in models of no registered family.
        stacks: the full names of the updates of stacks of matrices, see loralib/experts.py, in the
            model's order of those stacks.
        separate: True where what is held besides LoRA is each module's own, whatever shares it with
            others in the base, as PEFT has it: in models of no registered family, and where a
            family ties it.
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
    separate: bool | None = None

    own: ClassVar[frozenset[str]] = frozenset({"rank", "alpha", "targets"})

    def __post_init__(self) -> None:
        for name, shorter in {
            "variant": None if self.variant == "lora" else self.variant,
            "initialization": None if self.initialization == "default" else self.initialization,
            "freeze_A": None if self.freeze_A is False else self.freeze_A,
            "separate": self.separate or None,
            "rank_pattern": _others(self.rank_pattern, self.rank),
            "alpha_pattern": _others(self.alpha_pattern, self.alpha),
            "embeddings": self.embeddings or None,
            "slices": _of_tuples(self.slices),
            "stacks": self.stacks or None,
        }.items():
            object.__setattr__(self, name, shorter)

    @property
    def delta(self) -> type[Delta]:
        """What computes the update."""
        return VARIANTS[self.variant or "lora"]

    @property
    def has_magnitude(self) -> bool:
        """Whether the tensors hold magnitudes, as those of DoRA do."""
        return self.delta.has_magnitude

    @property
    def has_start(self) -> bool:
        """Whether the tensors hold the start of A and B, which the update is counted from."""
        return starts_from_weight(self.initialization or "default")

    def rank_of(self, module: str) -> int:
        """The rank of a module's update."""
        return (self.rank_pattern or {}).get(module, self.rank)

    def alpha_of(self, module: str) -> float:
        """The alpha of a module's update."""
        return (self.alpha_pattern or {}).get(module, self.alpha)

    def check(self, path: object) -> None:
        """As in `AdapterMetadata`."""
        super().check(path)
        for name, is_sound in (
            ("rank", is_rank(self.rank)),
            ("alpha", is_alpha(self.alpha)),
            ("dropout", self.dropout is None or is_dropout(self.dropout)),
            ("positions", isinstance(self.positions, bool | None)),
            ("variant", self.variant is None or self.variant in tuple(VARIANTS)),
            ("rank_pattern", _is_mapping(self.rank_pattern, is_rank)),
            ("alpha_pattern", _is_mapping(self.alpha_pattern, is_alpha)),
            ("initialization", self.initialization in (None, *INITIALIZATIONS)),
            ("freeze_A", isinstance(self.freeze_A, bool | None)),
            ("separate", isinstance(self.separate, bool | None)),
            ("slices", _is_mapping(self.slices, _is_slices)),
        ):
            if not is_sound:
                raise CheckpointError(f"{path}: {name} {getattr(self, name)!r} in its metadata")


def usual(values: Mapping[str, _Value]) -> tuple[_Value, dict[str, _Value]]:
    """The value that most names have, the first among equals; and those of the other names."""
    ((most, _),) = Counter(values.values()).most_common(1)
    return most, {name: value for name, value in values.items() if value != most}


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


def _is_mapping(value: object, is_sound: Callable[[object], bool]) -> bool:
    if value is None:
        return True
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and is_sound(item) for name, item in value.items()
    )


def _is_slices(value: object) -> bool:
    return isinstance(value, tuple) and any(value) and all(isinstance(on, bool) for on in value)


def _others(pattern: Any, usual: object) -> Any:
    """What of a pattern is not the usual; what is not a pattern stays for `check`."""
    if not isinstance(pattern, Mapping):
        return pattern
    return {name: pattern[name] for name in sorted(pattern) if pattern[name] != usual} or None


def _of_tuples(slices: Any) -> Any:
    """Lists, as JSON has them, as tuples; what is not of lists stays for `check`."""
    if not isinstance(slices, Mapping):
        return slices
    return {
        name: tuple(on) if isinstance(on, list) else on for name, on in sorted(slices.items())
    } or None
