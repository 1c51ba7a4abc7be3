"""Defines adapters in memory, and what can be derived from the names of their tensors.

A LoRA adapter holds the tensors whose name contains ``lora_`` and those outside the backbone (the
classification head). An adapter of another `Kind` holds what that kind trains in place of LoRA. A
run that trains several kinds writes one file for each. An adapter's metadata records its rank,
alpha, base and more, and everything is checked against it. The formats on disk are described in
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
        owner: the library's name in messages.
        names: the files that identify the format. A user can name one of them instead of the
            folder.
        others: its other files. The first of these that exists is fetched from a repository.
        read: reads an adapter of the given kind, given the path of one of the folder's files.
    """

    owner: str
    names: tuple[str, ...]
    others: tuple[str, ...]
    read: Callable[[Path, "Kind"], "Adapter"]


@dataclass(frozen=True)
class Kind:
    """A part of the backbone that can be trained while the rest is frozen.

    Compare kinds with ``==``, not ``is``: an adapter from another process has a copy of its kind.

    Args:
        name: its name in messages.
        part: a string that the names of its tensors contain.
        file: the name of its files in a checkpoint's folder, without the suffix.
        metadata: the class of its files' metadata.
        switch: the setting that adds it to a model.
        sized_by: a suffix of tensor names, and the metadata setting that is the number of rows of
            these tensors. Both are empty if there is none.
        foreign: another library's format for it. PEFT's format for LoRA is not declared here.
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
        """Returns whether a tensor belongs to this kind, in a model with these backbones."""
        return self.part in name

    def mismatch(self, theirs: Iterable[str], ours: Iterable[str]) -> str | None:
        """Compares the tensor names of an adapter and a model, and returns why they do not fit.

        Returns:
            The text for an error, or None if the kind finds no reason.
        """
        return None


@dataclass(frozen=True)
class _Lora(Kind):
    def mismatch(self, theirs: Iterable[str], ours: Iterable[str]) -> str | None:
        """Returns an error text if LoRA is on other modules in the adapter than in the model."""
        trained, built = (lora_targets(lora_modules(names)) for names in (theirs, ours))
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
        tensors: its tensors by their canonical names.
        metadata: what cannot be derived from the tensors. None if it is unknown.
        source: the file or folder that it was read from, which is its name in errors.
        kind: its kind.
        format: the format that it had on disk, see `loralib.adapters.formats`.
        base_weights: weights of the base that its file also holds, by the base's names. They are
            not part of the adapter, but are the weights that it was trained with.
        peft_config: for a folder that PEFT wrote, the settings that say which modules and
            parameters of the model it holds.
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
        """The metadata, if they are LoRA's.

        Raises:
            AlphaError: the metadata are unknown, or another kind's.
        """
        if not isinstance(self.metadata, LoraMetadata):
            raise AlphaError(self.source)
        return self.metadata

    @property
    def besides(self) -> dict[str, Tensor]:
        """Its tensors that are not LoRA's, such as those of a head."""
        return {name: tensor for name, tensor in self.tensors.items() if LORA.part not in name}

    @property
    def tied(self) -> dict[str, Tensor]:
        """Those of its tensors to which its family ties another name, by that name."""
        family = family_of(self.tensors)
        pairs = family.tied.items() if family else ()
        return {name: self.tensors[kept] for name, kept in pairs if kept in self.tensors}

    @property
    def head(self) -> str | None:
        """The task of its head, a key of `Family.heads`, from its metadata or its tensors' names.

        None if it is unknown or there is no head.
        """
        if self.metadata is not None and self.metadata.head is not None:
            return self.metadata.head
        family = family_of(self.tensors)
        return family.head_of(self.tensors) if family else None

    @property
    def outputs(self) -> int | None:
        """The number of labels of its head. None if it has no head with labels."""
        family = family_of(self.tensors)
        head = family.heads.get(self.head or "") if family else None
        logits = self.tensors.get(f"{head.logits}.weight") if head and head.labeled else None
        return None if logits is None else len(logits)


def adapter_tensors(
    state_dict: Mapping[str, Tensor],
    backbones: Iterable[str] | None = None,
    kind: Kind = LORA,
) -> dict[str, Tensor]:
    """Returns the part of a full state dict that an adapter holds: LoRA, and all but the backbone.

    A tensor that a registered family ties to another one is left out.

    Args:
        state_dict: the full state dict.
        backbones: prefixes of the names that belong to the base. None means the backbones of the
            registered families.
        kind: the kind whose tensors are taken, LoRA by default.
    """
    starts = backbone_prefixes() if backbones is None else tuple(backbones)
    tied = _tied(state_dict)
    return {
        name: tensor
        for name, tensor in state_dict.items()
        if kind.holds(name, starts) or not (in_backbone(name, starts) or name in tied)
    }


def _tied(state_dict: Mapping[str, Tensor]) -> set[str]:
    """Returns the names of tensors that the family ties to another, and that share its memory."""
    family = family_of(state_dict)
    pairs = family.tied.items() if family else ()
    return {
        name
        for name, kept in pairs
        if name in state_dict
        and kept in state_dict
        and state_dict[name].data_ptr() == state_dict[kept].data_ptr()
    }


def lora_modules(tensors: Iterable[str]) -> set[str]:
    """Returns the names of the modules that have LoRA among these tensors."""
    return {name.rpartition(".")[0] for name in tensors if LORA.part in name}


def base_biases(tensors: Iterable[str]) -> set[str]:
    """Returns those names of a LoRA adapter's tensors that are biases of the base.

    If the model belongs to no registered family, a bias is the head's if other tensors come with
    it: those of the same module, or of a submodule, as in a masked-language model's lm_head. A
    module with LoRA in it is no head. All other biases are the base's.
    """
    names = set(tensors)
    ends = ("bias", "bias_k", "bias_v")  # the latter two of an `nn.MultiheadAttention`
    biases = {name for name in names if name.endswith(ends) and LORA.part not in name}
    if any(in_known_backbone(name) for name in names):
        return {name for name in biases if in_known_backbone(name)}
    rest = {name for name in names - biases if LORA.part not in name}
    return {name for name in biases if not _is_of_head(name, rest, names)}


def _is_of_head(bias: str, rest: Collection[str], names: Collection[str]) -> bool:
    """Returns whether a bias belongs to a head, given all of an adapter's names.

    `rest` are the names of tensors that are neither LoRA's nor biases.
    """
    if f"{bias.rpartition('bias')[0]}weight" in rest:
        return True
    # A container with LoRA in it is the base's, even if it also has a trained head in it.
    owner, _, last = bias.rpartition(".")
    if any(name.startswith(f"{owner}.") and LORA.part in name for name in names):
        return False
    # In an attention of the base, out_proj alone may be trained as a whole.
    return any(
        name.startswith(f"{owner}.") if last == "bias" else name.rpartition(".")[0] == owner
        for name in rest
    )


def lora_metadata(tensors: Collection[str], rank: int, alpha: float) -> LoraMetadata:
    """Derives metadata from the names of a LoRA adapter's tensors, its rank and its alpha.

    Names do not tell whether the update reaches positions. If it could, the adapter is assumed to
    be the release's, whose updates do not reach them.
    """
    modules = lora_modules(tensors)
    return LoraMetadata(
        rank=rank,
        alpha=alpha,
        targets=lora_targets(modules),
        bias=bias_of(tensors),
        positions=False if may_share_positions(modules) else None,
    )


def bias_of(tensors: Collection[str]) -> str:
    """Returns which of the base's biases an adapter holds, as `LoraMetadata.bias` records it."""
    trained = {name.rpartition(".")[0].removesuffix(".conv") for name in base_biases(tensors)}
    return "none" if not trained else "lora_only" if trained <= lora_modules(tensors) else "all"


def in_words(value: object) -> str:
    """Formats a field's value for messages."""
    return ", ".join(value) if isinstance(value, tuple) else str(value)
