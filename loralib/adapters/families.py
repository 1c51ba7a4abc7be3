"""Families of models: what of an adapter depends on the model that it was trained in.

A package with a model of its own registers the model's family, in one place next to it:

    ROBERTA = register(
        Family(
            name="roberta",
            title="RoBERTa",
            backbone="roberta.",
            layers="roberta.encoder.layer.",
            heads={
                "sequence_classification": Head(
                    ("classifier",), "classifier.out_proj", labelled=True
                ),
            },
        )
    )

This library names no model. An adapter of a family that is not registered is handled as one of any
model: its modules are taken for linear layers with one low-rank update each, but for what its
metadata (embeddings, slices) and its shapes (convolutions) say, and what belongs to the base is
told from the adapter itself. Where that is not enough, as for stacked updates of unknown slices, it
is refused.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from .names import within_layer


@dataclass(frozen=True)
class Head:
    """A head of a family's models: what a task trains in full.

    Args:
        modules: its modules, by full name. They are outside the backbone, but for such as a pooler
            that no other head uses.
        logits: the module that makes the logits; None where it is tied to the backbone's.
        labelled: the task names its labels, and there is a logit for each.
    """

    modules: tuple[str, ...]
    logits: str | None = None
    labelled: bool = False

    def holds(self, name: str) -> bool:
        """Whether a tensor of this name belongs to it."""
        return any(name.startswith(f"{module}.") for module in self.modules)

    def is_of(self, names: Collection[str]) -> bool:
        """Whether these tensors, of a head, are one of this kind."""
        has_all = all(any(name.startswith(f"{m}.") for name in names) for m in self.modules)
        has_logits = self.logits is None or f"{self.logits}.weight" in names
        return has_all and has_logits and all(map(self.holds, names))


@dataclass(frozen=True, kw_only=True)
class Family:
    """What the library needs to know of a family's models to handle their adapters.

    Modules of a layer are named as `within_layer` does it: by what follows the layer's number.

    Args:
        name: its model type in ``config.json``.
        title: what messages call it.
        backbone: what the names of the backbone's tensors start with; what starts otherwise belongs
            to a head.
        layers: what the names of its layers start with, up to the number.
        layer_parts: what the names of all tensors in a layer start with, after its number, where
            other models have layers of that name; empty for any.
        heads: its models' heads, by what they do, such as "token_classification".
        release_modules: the modules of a layer in which the release's models can have LoRA; None
            where its format is written for any.
        stacked: modules of a layer that compute several projections in one, as `MergedLinear` does
            -> which of these have LoRA in the release, and where an adapter does not say it.
        shared_with_positions: projections of a layer that positions may share with contents, see
            `loralib.nn.positions`.
        tied: tensors that are another one, and no file needs to hold -> the other's name.
        may_untie: a model can also have some of these as tensors of their own.
        old_names: regular expressions of names in earlier files -> what takes their place.
        wrapped_in_release: the release's scripts wrote such models as they were wrapped in DDP, and
            in a larger dict: names begin with ``module.``, under ``model_state_dict``.
        fan_in_fan_out: weights are held as (in, out), so that PEFT has to be told.
        peft_task: PEFT's task type, where it does not depend on the head.
        tokenizer_files: the files of its tokenizer that are not named alike for all models.
    """

    name: str
    title: str
    backbone: str
    layers: str
    layer_parts: tuple[str, ...] = ()
    heads: Mapping[str, Head] = field(default_factory=dict)
    release_modules: tuple[str, ...] | None = None
    stacked: Mapping[str, tuple[bool, ...]] = field(default_factory=dict)
    shared_with_positions: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    may_untie: bool = False
    old_names: Mapping[str, str] = field(default_factory=dict)
    wrapped_in_release: bool = False
    fan_in_fan_out: bool = False
    peft_task: str | None = None
    tokenizer_files: tuple[str, ...] = ()

    @property
    def of_base(self) -> tuple[str, ...]:
        """What the names of all tensors of a base start with, those that are tied included."""
        return self.backbone, *self.tied

    def has_layers_of(self, names: Iterable[str]) -> bool:
        """Whether some of these modules or tensors are in its layers, none in another model's."""
        inside = [within_layer(name) for name in names if name.startswith(self.layers)]
        return bool(inside) and all(name.startswith(self.layer_parts or "") for name in inside)

    def head_of(self, names: Iterable[str]) -> str | None:
        """Which head these tensors are, those of the backbone left out; None if it is not clear.

        Of heads that are alike it is the first.
        """
        of_head = {name for name in names if not in_backbone(name, (self.backbone,))}
        return next((kind for kind, head in self.heads.items() if head.is_of(of_head)), None)

    def untied_in(self, names: Collection[str]) -> set[str]:
        """Those of these tensors that are one with the backbone's, unless a file brings them."""
        return {n for n, kept in self.tied.items() if n in names and kept.startswith(self.backbone)}

    def unused_by_head(self, names: Collection[str]) -> set[str]:
        """Those of these tensors that are a head's within the backbone, but no part of this one.

        An early checkpoint of a classifier holds such a pooler.
        """
        return set() if self.head_of(names) else {name for name in names if head_within(name)}


_REGISTERED: dict[str, Family] = {}


def register(family: Family) -> Family:
    """Makes a family known, and returns it; a second time changes nothing.

    Raises:
        ValueError: another family has its name.
    """
    if _REGISTERED.setdefault(family.name, family) != family:
        raise ValueError(f"there is another family '{family.name}' already")
    return family


def registered() -> tuple[Family, ...]:
    """The families that are known, in the order in which they were registered."""
    return tuple(_REGISTERED.values())


def backbone_prefixes() -> tuple[str, ...]:
    """What the names of tensors of known backbones start with."""
    return tuple(family.backbone for family in registered())


def in_backbone(name: str, backbones: tuple[str, ...]) -> bool:
    """Whether a tensor's name starts as those of these backbones do, and it is not a head's."""
    return name.startswith(backbones) and head_within(name) is None


def in_known_backbone(name: str) -> bool:
    """Whether this is the name of a tensor in the backbone of a registered family."""
    return in_backbone(name, backbone_prefixes())


def head_within(name: str) -> str | None:
    """The module within a registered family's backbone that belongs to a head and has this tensor.

    None for all other tensors.
    """
    for family in registered():
        for head in family.heads.values():
            for module in head.modules:
                if module.startswith(family.backbone) and name.startswith(f"{module}."):
                    return module
    return None


def top_module(name: str) -> str:
    """A model's top module that a tensor is in; of a head within a backbone, its module."""
    return head_within(name) or name.partition(".")[0]


def family_of(names: Iterable[str]) -> Family | None:
    """The registered family whose layers some of these modules or tensors are in, if any."""
    names = tuple(names)
    return next((family for family in registered() if family.has_layers_of(names)), None)


def enabled_slices(module: str) -> tuple[bool, ...]:
    """Which slices of a module's output its stacked updates belong to; () where that is unknown."""
    family = family_of([module])
    return family.stacked.get(within_layer(module), ()) if family else ()


def may_share_positions(modules: Iterable[str]) -> bool:
    """Whether modules of these names can be projections that positions share with contents."""
    found = ((family_of([module]), within_layer(module)) for module in modules)
    return any(family and name in family.shared_with_positions for family, name in found)
