"""Adapters: what they hold, and what the names of their tensors say.

A LoRA adapter holds the tensors whose name contains ``lora_`` and those outside the backbone (the
classification head). An adapter of another kind is the same with what it trains in LoRA's place:
see `Kind`. A run that trains several of them writes a file of each. Rank, alpha, base and more are
its metadata, against which everything is checked. Their formats on disk are in
formats.py.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import AlphaError, trained_with
from .families import (
    backbone_prefixes,
    family_of,
    in_backbone,
    in_known_backbone,
    may_share_positions,
)
from .metadata import AdapterMetadata, LoraMetadata
from .names import lora_targets


@dataclass(frozen=True)
class Foreign:
    """The format in which another library writes adapters of a kind: a folder of files.

    Args:
        owner: what messages call the library.
        names: the files by which the format is known, and which can be named in the folder's place.
        others: its other files; of these the first that exists is fetched from a repository.
        read: reads the adapter of this kind of which this is one of the files.
    """

    owner: str
    names: tuple[str, ...]
    others: tuple[str, ...]
    read: Callable[[Path, "Kind"], "Adapter"]


@dataclass(frozen=True)
class Kind:
    """A part of the backbone that can be trained while the rest is frozen.

    Kinds are compared by ``==``: that of an adapter from another process is another object.

    Args:
        name: what messages call it.
        part: what the names of its tensors contain.
        file: its files' name in a checkpoint's folder, without the suffix.
        metadata: the class of its files' metadata.
        switch: the setting that puts it into a model.
        sized_by: how the names of tensors end whose rows are a setting of its metadata, and that
            setting; empty where there is none.
        foreign: the format that another library has for it, other than PEFT's for LoRA.
    """

    name: str
    part: str
    file: str
    metadata: type[AdapterMetadata]
    switch: str
    sized_by: tuple[str, str] = ("", "")
    foreign: Foreign | None = None

    @property
    def files(self) -> tuple[str, str]:
        """Its two files, the one with metadata first."""
        return f"{self.file}.safetensors", f"{self.file}.bin"

    def holds(self, name: str, backbones: tuple[str, ...]) -> bool:
        """Whether a tensor of this name, in a model with these backbones, belongs to this kind."""
        return self.part in name

    def mismatch(self, theirs: Iterable[str], ours: Iterable[str]) -> str | None:
        """Why an adapter does not fit a model, by the names of their tensors.

        Returns:
            The text for an error; None where the kind finds no reason.
        """
        return None


@dataclass(frozen=True)
class _Lora(Kind):
    def mismatch(self, theirs: Iterable[str], ours: Iterable[str]) -> str | None:
        """LoRA on other modules."""
        modules = [{name.rpartition(".")[0] for name in names} for names in (theirs, ours)]
        trained, built = (lora_targets(names) for names in modules)
        return None if trained == built else trained_with("targets", trained, built)


LORA = _Lora(
    name="LoRA",
    part="lora_",
    file="pytorch_model_lora",
    metadata=LoraMetadata,
    switch="apply_lora",
    sized_by=("lora_A", "rank"),
)


@dataclass(frozen=True)
class Adapter:
    """An adapter in memory.

    Args:
        tensors: by their canonical names.
        metadata: what the tensors do not say; None where it is unknown.
        source: the file or folder that it was read from; what errors call it.
        kind: what it is.
        format: the format that it had on disk, see `loralib.adapters.formats`.
        base_weights: what its file also holds of the base, by the base's names: not the adapter's,
            but what it was trained with.
        peft_config: of a folder that PEFT wrote, the settings that say what of a model it holds.
    """

    tensors: dict[str, Tensor]
    metadata: AdapterMetadata | None
    source: str = "adapter"
    kind: Kind = LORA
    format: str | None = None
    base_weights: Mapping[str, Tensor] = field(default_factory=dict)
    peft_config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def lora(self) -> LoraMetadata:
        """The metadata of LoRA.

        Raises:
            AlphaError: they are unknown.
        """
        if not isinstance(self.metadata, LoraMetadata):
            raise AlphaError(self.source)
        return self.metadata

    @property
    def head(self) -> str | None:
        """What its head does, a key of `Family.heads`: as its metadata says, or its names.

        None where it is unknown, or there is no head.
        """
        if self.metadata is not None and self.metadata.head is not None:
            return self.metadata.head
        family = family_of(self.tensors)
        return family.head_of(self.tensors) if family else None

    @property
    def outputs(self) -> int | None:
        """How many labels the head that it brings has; None where it brings none."""
        family = family_of(self.tensors)
        head = family.heads.get(self.head or "") if family else None
        logits = self.tensors.get(f"{head.logits}.weight") if head and head.labelled else None
        return None if logits is None else len(logits)


def adapter_tensors(
    state_dict: Mapping[str, Tensor],
    backbones: Iterable[str] | None = None,
    kind: Kind = LORA,
) -> dict[str, Tensor]:
    """The part of a full state dict that an adapter file holds: LoRA, and all outside the backbone.

    What a registered family ties to another tensor is left out.

    Args:
        state_dict: the full one.
        backbones: names that start so belong to the base; None for those of registered families.
        kind: whose tensors to take in the place of LoRA's.
    """
    starts = backbone_prefixes() if backbones is None else tuple(backbones)
    tied = _tied(state_dict)
    return {
        name: tensor
        for name, tensor in state_dict.items()
        if kind.holds(name, starts) or not (in_backbone(name, starts) or name in tied)
    }


def _tied(state_dict: Mapping[str, Tensor]) -> set[str]:
    """Of a model's state the names of tensors that its family has under another one."""
    family = family_of(state_dict)
    pairs = family.tied.items() if family else ()
    return {
        name
        for name, kept in pairs
        if name in state_dict
        and kept in state_dict
        and state_dict[name].data_ptr() == state_dict[kept].data_ptr()
    }


def base_biases(tensors: Iterable[str]) -> set[str]:
    """The biases of a base among the names of a LoRA adapter's tensors.

    In a model of no registered family, the bias of a head is one whose weight is there as well: its
    own, or one within the module that has the bias, as in a masked-language model's lm_head. A
    module with LoRA in it is no head.
    """
    names = set(tensors)
    ends = ("bias", "bias_k", "bias_v")  # the latter two of an `nn.MultiheadAttention`
    biases = {name for name in names if name.endswith(ends) and LORA.part not in name}
    if any(in_known_backbone(name) for name in names):
        return {name for name in biases if in_known_backbone(name)}
    weights = {name for name in names if name.endswith("weight") and LORA.part not in name}
    return {name for name in biases if not _is_of_head(name, weights, names)}


def _is_of_head(bias: str, weights: Collection[str], names: Collection[str]) -> bool:
    """Whether a bias belongs to one of these weights, by the names of an adapter's tensors."""
    start = bias.rpartition("bias")[0]
    if f"{start}weight" in weights:
        return True
    # A container with LoRA in it is the base's, even where a trained head is in it as well.
    if not bias.endswith(".bias") or any(n.startswith(start) and LORA.part in n for n in names):
        return False
    return any(weight.startswith(start) for weight in weights)


def lora_metadata(tensors: Iterable[str], rank: int, alpha: float) -> LoraMetadata:
    """What the names of a LoRA adapter's tensors say of it, with its rank and alpha.

    Names do not say whether the update reaches positions: where it might, the adapter is taken for
    one of the release's, whose do not.
    """
    modules = {name.rpartition(".")[0] for name in tensors if LORA.part in name}
    trained = {name.rpartition(".")[0].removesuffix(".conv") for name in base_biases(tensors)}
    bias = "none" if not trained else "lora_only" if trained <= modules else "all"
    positions = False if may_share_positions(modules) else None
    return LoraMetadata(
        rank=rank, alpha=alpha, targets=lora_targets(modules), bias=bias, positions=positions
    )


def in_words(value: object) -> str:
    """A field's value as messages show it."""
    return ", ".join(value) if isinstance(value, tuple) else str(value)
