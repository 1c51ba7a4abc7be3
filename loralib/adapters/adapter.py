"""Adapters: what they hold, what has to be known of them, and how they are put into a model.

A LoRA adapter holds the tensors whose name contains ``lora_`` and those outside the backbone (the
classification head). The baselines' adapters, bottlenecks and biases, are the same with what they
train in LoRA's place: see `Kind`. A run that trains several of them writes a file of each. Rank,
alpha, base and more are an `LoraMetadata`, against which everything is checked. How adapters lie on
disk is the business of formats.py.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from ..nn.positions import may_be_shared
from .metadata import AdapterMetadata, BiasMetadata, BottleneckMetadata, LoraMetadata

# The backbones of the release's models; what starts with none of these belongs to a head.
BACKBONE_PREFIXES = ("roberta", "deberta", "transformer.")


@dataclass(frozen=True)
class Kind:
    """A part of the backbone that can be trained while the rest is frozen.

    Args:
        name: what messages call it.
        part: what the names of its tensors contain.
        file: its files' name in a checkpoint's folder, without the suffix.
        metadata: the class of its files' metadata.
        switch: the setting that puts it into a model.
        flag: the scripts' flag that names its file.
    """

    name: str
    part: str
    file: str
    metadata: type[AdapterMetadata]
    switch: str
    flag: str

    @property
    def files(self) -> tuple[str, str]:
        """Its two files, the one with metadata first."""
        return f"{self.file}.safetensors", f"{self.file}.bin"

    def holds(self, name: str, backbones: tuple[str, ...]) -> bool:
        """Whether a tensor of this name, in a model with these backbones, belongs to this kind."""
        if self is not BITFIT:
            return self.part in name
        # A head has biases of its own, and so have adapters.
        return self.part in name and BOTTLENECK.part not in name and name.startswith(backbones)


LORA = Kind(
    name="LoRA",
    part="lora_",
    file="pytorch_model_lora",
    metadata=LoraMetadata,
    switch="apply_lora",
    flag="--lora_path",
)


BOTTLENECK = Kind(
    name="adapter",
    part="adapter",
    file="pytorch_model_adapter",
    metadata=BottleneckMetadata,
    switch="apply_adapter",
    flag="--adapter_path",
)


BITFIT = Kind(
    name="BitFit",
    part="bias",
    file="pytorch_model_bitfit",
    metadata=BiasMetadata,
    switch="apply_bitfit",
    flag="--bitfit_path",
)


KINDS = (LORA, BOTTLENECK, BITFIT)


@dataclass(frozen=True)
class Adapter:
    """An adapter in memory.

    Args:
        tensors: by the names that they have in this project's models.
        metadata: what has to be known of them; None where nobody said it.
        source: the file or folder that it was read from; what errors call it.
        kind: what it is.
        format: the format that it had on disk, see `loralib.adapters.formats`.
    """

    tensors: dict[str, Tensor]
    metadata: AdapterMetadata | None
    source: str = "adapter"
    kind: Kind = LORA
    format: str | None = None


def adapter_tensors(
    state_dict: Mapping[str, Tensor],
    backbones: Iterable[str] = BACKBONE_PREFIXES,
    kind: Kind = LORA,
) -> dict[str, Tensor]:
    """The part of a full state dict that an adapter file holds: LoRA, and what is no backbone's.

    For another kind, its tensors are in the place of LoRA's.
    """
    starts = tuple(backbones)
    return {
        name: tensor
        for name, tensor in state_dict.items()
        if kind.holds(name, starts) or not name.startswith(starts)
    }


def base_biases(tensors: Iterable[str]) -> set[str]:
    """The biases of a base among the names of a LoRA adapter's tensors.

    In a model whose backbone is not known, the bias of a head is one whose weight is there as well.
    """
    names = set(tensors)
    biases = {name for name in names if name.endswith("bias") and LORA.part not in name}
    if any(name.startswith(BACKBONE_PREFIXES) for name in names):
        return {name for name in biases if name.startswith(BACKBONE_PREFIXES)}
    return {name for name in biases if f"{name.removesuffix('bias')}weight" not in names}


def lora_metadata(tensors: Iterable[str], rank: int, alpha: float) -> LoraMetadata:
    """What the names of a LoRA adapter's tensors say of it, beside its rank and alpha.

    Names do not say whether the update reaches positions: it is taken for the release's.
    """
    modules = {name.rpartition(".")[0] for name in tensors if LORA.part in name}
    trained = {name.rpartition(".")[0].removesuffix(".conv") for name in base_biases(tensors)}
    bias = "none" if not trained else "lora_only" if trained <= modules else "all"
    positions = False if may_be_shared(modules) else None
    return LoraMetadata(
        rank=rank, alpha=alpha, targets=lora_targets(modules), bias=bias, positions=positions
    )


def lora_targets(names: Iterable[str]) -> tuple[str, ...]:
    """Which modules of a layer these are, each once, sorted: ``a.0.query, a.1.query`` -> ``query``.

    The last part of a module's name says it, but for ``dense``: there are several of them in a
    layer, and all that follows the layer's number is needed, as in ``attention.output.dense``.
    """
    return tuple(sorted({_within_layer(name) for name in names}))


def _within_layer(name: str) -> str:
    last = name.rsplit(".", 1)[-1]
    return re.split(r"\.\d+\.", name)[-1] if last == "dense" else last


def plain(value: object) -> str:
    """A field's value as messages show it."""
    return ", ".join(value) if isinstance(value, tuple) else str(value)
