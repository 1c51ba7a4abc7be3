"""Adapters: what they hold, what has to be known of them, and how they are put into a model.

A LoRA adapter holds the tensors whose name contains ``lora_`` and those outside the backbone (the
classification head). The baselines' adapters, bottlenecks and biases, are the same with what they
train in LoRA's place: see `Kind`. A run that trains several of them writes a file of each. Rank,
alpha, base and more are an `AdapterInfo`, against which everything is checked. How adapters lie on
disk is the business of formats.py.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from .files import CheckpointError, first_line
from .layers import LoRALayer
from .positions import lora_reaches_positions, may_be_shared

# The backbones of the release's models; what starts with none of these belongs to a head.
BACKBONE_PREFIXES = ("roberta", "deberta", "transformer.")

# ------------------------------------------------------------------------------------------------
# Adapters
# ------------------------------------------------------------------------------------------------


_Info = TypeVar("_Info", bound="TrainedInfo")


@dataclass(frozen=True, kw_only=True)
class TrainedInfo:
    """What the tensors of a file do not say of themselves, whatever its kind.

    Args:
        base: name or path of the base model.
        base_revision: branch, tag or commit of the base, where it is on the hub.
        base_fingerprint: `fingerprint` of the base's weights.
        task: name of the task that the head was trained for.
        labels: the head's label names, in the order of its outputs.
        beside: the switches (see `Kind`) of what was trained with this and lies in other files.
    """

    base: str | None = None
    base_revision: str | None = None
    base_fingerprint: str | None = None
    task: str | None = None
    labels: tuple[str, ...] | None = None
    beside: tuple[str, ...] | None = None

    # Fields whose presence tells that a file's metadata are of this class.
    own: ClassVar[frozenset[str]] = frozenset()

    def to_metadata(self) -> dict[str, str]:
        """The fields as safetensors' metadata: strings of JSON; unset fields are left out."""
        return {key: json.dumps(value) for key, value in asdict(self).items() if value is not None}

    @classmethod
    def from_metadata(cls: type[_Info], metadata: Mapping[str, str], path: Path) -> _Info | None:
        """The reverse of `to_metadata`; None where the metadata is not of this class.

        Raises:
            CheckpointError: some of the class's own fields are there, but not all are sound.
        """
        known = {field.name for field in fields(cls)} & metadata.keys()
        if not known & cls.own:
            return None
        try:
            values = {key: json.loads(metadata[key]) for key in known}
            for key in ("targets", "labels", "beside"):
                if key in values:
                    values[key] = _strings(values[key])
            info = cls(**values)
        except (TypeError, ValueError, RecursionError) as error:
            message = f"{path}: its metadata is damaged ({first_line(error)})"
            raise CheckpointError(message) from error
        info.check(path)
        return info

    def check(self, path: object) -> None:
        """Sees that each value is one that this class can have; `path` is what errors name.

        Raises:
            CheckpointError: one is not.
        """
        for name in ("base", "base_revision", "base_fingerprint", "task"):
            value = getattr(self, name)
            if not isinstance(value, str | None):
                raise CheckpointError(f"{path}: {name} {value!r} in its metadata")


def _strings(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{value!r} is no list of names")
    return tuple(value)


@dataclass(frozen=True, kw_only=True)
class AdapterInfo(TrainedInfo):
    """What has to be known of LoRA weights.

    Args:
        rank: r, the rank of the update.
        alpha: the update is scaled by alpha / r.
        targets: the adapted modules, as `lora_targets` names them: ``("query", "value")``.
        dropout: dropout on the update's input in training, where there was any.
        bias: which of the base's biases were trained, and are held as well: those of `loralib`'s
            `mark_only_lora_as_trainable`.
        positions: whether the update reaches the positions that an adapted projection is shared
            with, see positions.py; None where none is shared.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    dropout: float | None = None
    bias: str = "none"
    positions: bool | None = None

    own: ClassVar[frozenset[str]] = frozenset({"rank", "alpha", "targets"})

    def check(self, path: object) -> None:
        """As in `TrainedInfo`."""
        super().check(path)
        for name, is_sound in (
            ("rank", is_rank(self.rank)),
            ("alpha", is_alpha(self.alpha)),
            ("dropout", self.dropout is None or is_dropout(self.dropout)),
            ("positions", isinstance(self.positions, bool | None)),
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
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and low <= value <= high


@dataclass(frozen=True, kw_only=True)
class BottleneckInfo(TrainedInfo):
    """What has to be known of bottleneck adapters.

    Args:
        adapter_type: where they sit and how they compute, such as "houlsby".
        adapter_size: width of the bottleneck.
    """

    adapter_type: str
    adapter_size: int

    own: ClassVar[frozenset[str]] = frozenset({"adapter_type", "adapter_size"})

    def check(self, path: object) -> None:
        """As in `TrainedInfo`."""
        super().check(path)
        kind, size = self.adapter_type, self.adapter_size
        if not (isinstance(kind, str) and isinstance(size, int) and size >= 1):
            message = f"adapter_type {kind!r}, adapter_size {size!r} in its metadata"
            raise CheckpointError(f"{path}: {message}")


@dataclass(frozen=True, kw_only=True)
class BiasInfo(TrainedInfo):
    """What has to be known of biases that were trained in place.

    Args:
        biases: which ones; "all" the backbone has.
    """

    biases: str = "all"

    own: ClassVar[frozenset[str]] = frozenset({"biases"})


@dataclass(frozen=True)
class Kind:
    """A part of the backbone that can be trained while the rest is frozen.

    Args:
        name: what messages call it.
        part: what the names of its tensors contain.
        file: its files' name in a checkpoint's folder, without the suffix.
        info: the class of its files' metadata.
        switch: the setting that puts it into a model.
        flag: the scripts' flag that names its file.
    """

    name: str
    part: str
    file: str
    info: type[TrainedInfo]
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
    info=AdapterInfo,
    switch="apply_lora",
    flag="--lora_path",
)
BOTTLENECK = Kind(
    name="adapter",
    part="adapter",
    file="pytorch_model_adapter",
    info=BottleneckInfo,
    switch="apply_adapter",
    flag="--adapter_path",
)
BITFIT = Kind(
    name="BitFit",
    part="bias",
    file="pytorch_model_bitfit",
    info=BiasInfo,
    switch="apply_bitfit",
    flag="--bitfit_path",
)
KINDS = (LORA, BOTTLENECK, BITFIT)


@dataclass(frozen=True)
class Adapter:
    """An adapter in memory.

    Args:
        tensors: by the names that they have in this project's models.
        info: what has to be known of them; None where nobody said it.
        source: the file or folder that it was read from; what errors call it.
        kind: what it is.
        form: the form that it had on disk, see `loralib.formats`.
    """

    tensors: dict[str, Tensor]
    info: TrainedInfo | None
    source: str = "adapter"
    kind: Kind = LORA
    form: str | None = None


def check_together(adapters: Sequence[Adapter]) -> None:
    """Sees that files of several kinds are those of one model.

    Raises:
        CheckpointError: one was trained beside another that is not here, or their heads differ.
    """
    here = {adapter.kind for adapter in adapters}
    for adapter in adapters:
        beside = (adapter.info and adapter.info.beside) or ()
        for kind in KINDS:
            if kind.switch in beside and kind not in here:
                raise CheckpointError(
                    f"{adapter.source}: was trained with --{kind.switch} as well, which has a file "
                    f"of its own: give that as {kind.flag}"
                )
    for first, second in itertools.combinations(adapters, 2):
        for name in sorted(first.tensors.keys() & second.tensors.keys()):
            if not torch.equal(first.tensors[name], second.tensors[name]):
                raise CheckpointError(
                    f"{second.source}: is not of the same run as {first.source}: their {name} "
                    "differ"
                )


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


def lora_info(tensors: Iterable[str], rank: int, alpha: float) -> AdapterInfo:
    """What the names of a LoRA adapter's tensors say of it, beside its rank and alpha.

    Names do not say whether the update reaches positions: it is taken for the release's.
    """
    modules = {name.rpartition(".")[0] for name in tensors if LORA.part in name}
    trained = {name.rpartition(".")[0].removesuffix(".conv") for name in base_biases(tensors)}
    bias = "none" if not trained else "lora_only" if trained <= modules else "all"
    positions = False if may_be_shared(modules) else None
    return AdapterInfo(
        rank=rank, alpha=alpha, targets=lora_targets(modules), bias=bias, positions=positions
    )


def lora_layers(model: nn.Module) -> dict[str, LoRALayer]:
    """The layers of `model` that have a low-rank update, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, LoRALayer) and module.r > 0
    }


def lora_targets(names: Iterable[str]) -> tuple[str, ...]:
    """Which modules of a layer these are, each once, sorted: ``a.0.query, a.1.query`` -> ``query``.

    The last part of a module's name says it, but for ``dense``: there are several of them in a
    layer, and all that follows the layer's number is needed, as in ``attention.output.dense``.
    """
    return tuple(sorted({_within_layer(name) for name in names}))


def _within_layer(name: str) -> str:
    last = name.rsplit(".", 1)[-1]
    return re.split(r"\.\d+\.", name)[-1] if last == "dense" else last


def fingerprint(tensors: Mapping[str, Tensor], backbones: Iterable[str] = BACKBONE_PREFIXES) -> str:
    """A short name for a base's weight matrices.

    SHA-256 over up to 1,024 evenly spaced values of every weight matrix of the backbone, rounded to
    bfloat16, so that a copy of the base in bfloat16 has the fingerprint of the base (one in float16
    has not: it is rounded twice). What may have been trained is left out: LoRA, adapters, biases
    and norms; so is the pooler, which is no part of every model.

    Args:
        tensors: a state dict. Where no name starts as `backbones` do, the family is not known, and
            all of its matrices count: leave a head out that is to be trained.
        backbones: names that start so belong to the base.
    """
    starts = tuple(backbones)
    if not any(name.startswith(starts) for name in tensors):
        starts = ("",)
    added = (LORA.part, BOTTLENECK.part)
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        is_weight = tensor.dim() >= 2 and tensor.is_floating_point()
        if not is_weight or not name.startswith(starts):
            continue
        if "pooler." in name or any(part in name for part in added):
            continue
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 1024)][:1024].cpu().bfloat16()
        digest.update(f"{name} {tuple(tensor.shape)} ".encode())
        digest.update(sample.contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def load_into(
    model: nn.Module,
    adapter: Adapter,
    base_fingerprint: str | None = None,
    backbones: Iterable[str] = BACKBONE_PREFIXES,
    new_head: bool = False,
    settings: Mapping[str, object] | None = None,
    known: Collection[str] = (),
) -> list[str]:
    """Copies an adapter's tensors into `model`, after checking all that can be checked.

    Args:
        model: a model with the LoRA layers, or what else the adapter is of, in place.
        adapter: what `read_adapter` read.
        base_fingerprint: `fingerprint` of the model's base, compared with the adapter's.
        backbones: names that start so belong to the base.
        new_head: a head of another shape is left as it is instead of refused: the adapter then is
            the start for another task.
        settings: what the model was built with, by names of the info's fields; compared with the
            adapter's. LoRA's are seen from its layers.
        known: the model's tensors that its base has brought: of these, a head's module may stay as
            it is where the adapter has nothing of it.

    Returns:
        The names of the head's tensors that were left as they are.

    Raises:
        CheckpointError: rank, alpha, targets, base, names or shapes do not fit; nothing is copied.
    """
    starts = tuple(backbones)
    state = model.state_dict()
    own = adapter_tensors(state, starts, adapter.kind)
    if adapter.kind is LORA:
        # Biases that were trained with it take the place of the base's.
        own |= {name: state[name] for name in base_biases(adapter.tensors) & state.keys()}
        settings = _lora_settings(model, adapter.source)
    _check_info(adapter, settings or {}, base_fingerprint)
    brought = {name.partition(".")[0] for name in adapter.tensors}
    own = {
        name: tensor
        for name, tensor in own.items()
        if adapter.kind.holds(name, starts)
        or name not in known
        or name.partition(".")[0] in brought
    }
    _check_names(adapter, own, starts)
    skipped = _check_shapes(adapter, own, starts, new_head)
    check_finite(adapter)
    with torch.no_grad():
        for name, tensor in adapter.tensors.items():
            if name not in skipped:
                own[name].copy_(tensor)
    return skipped


def _lora_settings(model: nn.Module, source: str) -> dict[str, object]:
    layers = lora_layers(model)
    if not layers:
        raise CheckpointError(
            f"{source}: the model has no LoRA layers to take it "
            "(--apply_lora makes them, or --lora_dim for GPT-2)"
        )
    layer = next(iter(layers.values()))
    settings = {"targets": lora_targets(layers), "rank": layer.r, "alpha": layer.lora_alpha}
    reached = lora_reaches_positions(model)
    return settings if reached is None else {**settings, "positions": reached}


def _check_info(
    adapter: Adapter, settings: Mapping[str, object], base_fingerprint: str | None
) -> None:
    info = adapter.info
    if settings.get("positions") is not None:
        check_positions(adapter, settings["positions"])
    if info is None:
        return
    for what, ours in settings.items():
        theirs = getattr(info, what)
        if theirs != ours:
            raise CheckpointError(_trained_with(adapter, what, theirs, ours))
    check_base(adapter, base_fingerprint)


def check_positions(adapter: Adapter, reached: bool | None = None) -> None:
    """Checks that an adapter of shared projections says whether it reaches positions.

    Args:
        adapter: LoRA, for a model with shared projections.
        reached: whether that model's LoRA reaches positions, where it has LoRA; an adapter that
            says nothing of itself is the release's, which does not.

    Raises:
        CheckpointError: it does not say it, or it says the opposite.
    """
    theirs = adapter.info.positions if adapter.info else False
    if theirs is None:
        raise CheckpointError(
            f"{adapter.source}: adapts projections that positions share, and does not say whether "
            "its update reaches positions (lora_positions); train it again, or set it in its info"
        )
    if reached is not None and theirs != reached:
        raise CheckpointError(_trained_with(adapter, "lora_positions", theirs, reached))


def check_finite(adapter: Adapter) -> None:
    """Sees that all of an adapter's values are numbers.

    Raises:
        CheckpointError: some are not.
    """
    for name, tensor in adapter.tensors.items():
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{adapter.source}: {name} holds values that are not finite")


def alpha_is_missing(source: str) -> CheckpointError:
    """The error of LoRA whose alpha nobody has said."""
    return CheckpointError(
        f"{source}: does not say with what alpha it was trained; give it as lora_alpha "
        "(--lora_alpha)"
    )


def check_base(adapter: Adapter, base_fingerprint: str | None) -> None:
    """Sees that an adapter was trained on the base of this fingerprint, as far as both are known.

    Raises:
        CheckpointError: it was trained on another.
    """
    theirs = adapter.info.base_fingerprint if adapter.info else None
    if theirs and base_fingerprint and theirs != base_fingerprint:
        raise CheckpointError(
            f"{adapter.source}: was trained on another base than the one given: "
            f"'{adapter.info.base}' (fingerprint {theirs}), not one of fingerprint "
            f"{base_fingerprint}; give that one (--model_name_or_path, --init_checkpoint, --base)"
        )


def _trained_with(adapter: Adapter, what: str, theirs: object, ours: object) -> str:
    return (
        f"{adapter.source}: was trained with {what} {plain(theirs)}, "
        f"the model was built with {plain(ours)}"
    )


def plain(value: object) -> str:
    """A field's value as messages show it."""
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _check_names(adapter: Adapter, own: Mapping[str, Tensor], starts: tuple[str, ...]) -> None:
    kind = adapter.kind
    theirs = {name for name in adapter.tensors if kind.holds(name, starts)}
    ours = {name for name in own if kind.holds(name, starts)}
    if not ours:
        raise CheckpointError(f"{adapter.source}: the model was built without --{kind.switch}")
    if not theirs & ours:
        raise CheckpointError(
            f"{adapter.source}: matches no layer of the model: it has '{min(theirs, default='')}', "
            f"…, the model has '{min(ours)}', …"
        )
    if kind is LORA:
        modules = [lora_targets(n.rsplit(".", 1)[0] for n in names) for names in (theirs, ours)]
        if modules[0] != modules[1]:
            raise CheckpointError(_trained_with(adapter, "targets", *modules))
    if kind is BOTTLENECK:
        places = [_places_of_adapters(names) for names in (theirs, ours)]
        if places[0] != places[1]:
            raise CheckpointError(
                f"{adapter.source}: has adapters behind {plain(places[0])} of a layer, the model "
                f"behind {plain(places[1])}: another --adapter_type"
            )
    lacking, unknown = own.keys() - adapter.tensors.keys(), adapter.tensors.keys() - own.keys()
    for what, some in (("lacks", lacking), ("has, unknown to the model,", unknown)):
        if some:
            listed = ", ".join(sorted(some)[:4]) + (", …" if len(some) > 4 else "")
            raise CheckpointError(f"{adapter.source}: {what} {len(some)} tensors: {listed}")


def _places_of_adapters(names: Iterable[str]) -> tuple[str, ...]:
    """The modules of a layer that bottleneck adapters belong to, each once, sorted."""
    modules = {name.partition(f".{BOTTLENECK.part}")[0] for name in names}
    return tuple(sorted({re.split(r"\.\d+\.", module)[-1] for module in modules}))


def _check_shapes(
    adapter: Adapter, own: Mapping[str, Tensor], starts: tuple[str, ...], new_head: bool
) -> list[str]:
    skipped = []
    for name, tensor in adapter.tensors.items():
        if tensor.shape == own[name].shape:
            continue
        if new_head and not adapter.kind.holds(name, starts):
            skipped.append(name)
            continue
        shapes = f"{tuple(tensor.shape)} in the file, {tuple(own[name].shape)} in the model"
        hint = ""
        if name.endswith(("lora_A", "adapter_A.weight")):
            size = "rank" if name.endswith("lora_A") else "adapter_size"
            hint = f": {size} {tensor.shape[0]}, not {own[name].shape[0]}"
            if tensor.shape[1:] != own[name].shape[1:]:
                hint = ": a base of another size"
        raise CheckpointError(f"{adapter.source}: {name} is {shapes}{hint}")
    return skipped
