"""Describes families of models: how an adapter depends on the model that it was trained in.

A package with a model of its own registers the model's family, in one place next to it:

    ROBERTA = register(
        Family(
            name="roberta",
            title="RoBERTa",
            backbone="roberta.",
            layers="roberta.encoder.layer.",
            heads={
                "sequence_classification": Head(
                    ("classifier",), "classifier.out_proj", labeled=True
                ),
            },
        )
    )

This library names no model. An adapter of an unregistered family is handled without knowledge of
its model: its modules are assumed to be linear layers with one low-rank update each, unless its
metadata (embeddings, slices) or its shapes (convolutions) say otherwise, and which tensors belong
to the base is derived from the adapter itself. An adapter for which that is not enough is refused,
such as one with stacked updates of unknown slices.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from .names import within_layer


@dataclass(frozen=True)
class Head:
    """A head of a family's models: the modules that a task trains in full.

    Args:
        modules: its modules, by full name. They are outside the backbone, except modules such as a
            pooler that no other head uses.
        logits: the module that computes the logits. None if its weight is tied to the backbone's.
        labeled: whether the task names its labels, with one logit for each.
    """

    modules: tuple[str, ...]
    logits: str | None = None
    labeled: bool = False

    def holds(self, name: str) -> bool:
        """Returns whether a tensor of this name belongs to it."""
        return any(name.startswith(f"{module}.") for module in self.modules)

    def is_of(self, names: Collection[str]) -> bool:
        """Returns whether these tensors, which are those of one head, form this head."""
        has_all = all(any(name.startswith(f"{m}.") for name in names) for m in self.modules)
        has_logits = self.logits is None or f"{self.logits}.weight" in names
        return has_all and has_logits and all(map(self.holds, names))


@dataclass(frozen=True, kw_only=True)
class Family:
    """What the library needs to know about a family's models to handle their adapters.

    Modules of a layer are named by what follows the layer's number, as `within_layer` returns it.

    Args:
        name: its model type in ``config.json``.
        title: its name in messages.
        backbone: the prefix of the names of the backbone's tensors. All others belong to a head.
        layers: the prefix of the names of its layers, up to the number.
        layer_parts: the prefixes, after a layer's number, of the names of all tensors in a layer.
            They tell the family from other models whose layers have the same prefix. Empty if any
            name will do.
        heads: its models' heads, by their tasks, such as "token_classification".
        release_modules: the modules of a layer that can have LoRA in the release's models. None if
            the release's format can hold any module.
        stacked: modules of a layer that compute several projections in one, as `MergedLinear` does
            -> which of these projections have LoRA in the release, and in an adapter that does not
            record it.
        shared_with_positions: projections of a layer that positions may share with contents, see
            `loralib.positions`.
        tied: names of tensors that are tied to another one, so that files need not hold them -> the
            other tensor's name.
        may_untie: whether some models have separate tensors in place of those tied to the backbone.
        old_names: regular expressions for names in earlier files -> their replacements.
        wrapped_in_release: whether the release's scripts saved such models from a DDP wrapper and
            inside a larger dict: names begin with ``module.``, under ``model_state_dict``.
        fan_in_fan_out: whether weights are held as (in, out), which PEFT's settings must say.
        peft_task: PEFT's task type, if it does not depend on the head.
        tokenizer_files: those of its tokenizer's files that other models do not have by that name.
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
    def top_modules(self) -> set[str]:
        """The top-level modules of its models, with the backbone's own if it is used alone."""
        in_backbone = self.layers.removeprefix(self.backbone)
        of_heads = [module for head in self.heads.values() for module in head.modules]
        names = (self.backbone, in_backbone, *self.tied, *of_heads)
        return {name.partition(".")[0] for name in names}

    def has_layers_of(self, names: Iterable[str]) -> bool:
        """Returns whether some names are in this family's layers, and none in another model's."""
        inside = [within_layer(name) for name in names if name.startswith(self.layers)]
        return bool(inside) and all(name.startswith(self.layer_parts or "") for name in inside)

    def head_of(self, names: Iterable[str]) -> str | None:
        """Returns which head these tensors form, ignoring the backbone's, or None if it is unclear.

        If several heads have the same tensors, it is the first one.
        """
        of_head = {name for name in names if not in_backbone(name, (self.backbone,))}
        return next((kind for kind, head in self.heads.items() if head.is_of(of_head)), None)

    def unused_by_head(self, names: Collection[str]) -> set[str]:
        """Returns the names in a head's module within the backbone, if the names form no head.

        An early checkpoint of a classifier holds such a module, a pooler.
        """
        return set() if self.head_of(names) else {name for name in names if head_within(name)}


_REGISTERED: dict[str, Family] = {}


def register(family: Family) -> Family:
    """Registers a family and returns it. Registering it again changes nothing.

    Raises:
        ValueError: another family has its name.
    """
    if _REGISTERED.setdefault(family.name, family) != family:
        raise ValueError(f"another family is already called '{family.name}'")
    return family


def registered() -> tuple[Family, ...]:
    """Returns the registered families, in the order of their registration."""
    return tuple(_REGISTERED.values())


def backbone_prefixes() -> tuple[str, ...]:
    """Returns the prefixes of the names of tensors in the registered families' backbones."""
    return tuple(family.backbone for family in registered())


def in_backbone(name: str, backbones: tuple[str, ...]) -> bool:
    """Returns whether a tensor's name has one of these prefixes, and the tensor is not a head's."""
    return name.startswith(backbones) and head_within(name) is None


def in_known_backbone(name: str) -> bool:
    """Returns whether this is the name of a tensor in the backbone of a registered family."""
    return in_backbone(name, backbone_prefixes())


def head_within(name: str) -> str | None:
    """Returns the module of a head within a registered family's backbone that has this tensor.

    None if the tensor is in no such module.
    """
    found = (
        module
        for family in registered()
        for head in family.heads.values()
        for module in head.modules
        if module.startswith(family.backbone) and name.startswith(f"{module}.")
    )
    return next(found, None)


def top_module(name: str) -> str:
    """Returns a tensor's top-level module, or the head's module if it is within a backbone."""
    return head_within(name) or name.partition(".")[0]


def family_of(names: Iterable[str]) -> Family | None:
    """Returns the registered family whose layers have some of these modules or tensors, if any."""
    names = tuple(names)
    return next((family for family in registered() if family.has_layers_of(names)), None)


def enabled_slices(module: str) -> tuple[bool, ...]:
    """Returns which slices of a module's output its stacked updates reach, or () if unknown."""
    family = family_of([module])
    return family.stacked.get(within_layer(module), ()) if family else ()


def may_share_positions(modules: Iterable[str]) -> bool:
    """Returns whether any of these modules may be a projection shared with positions."""
    found = ((family_of([module]), within_layer(module)) for module in modules)
    return any(family and name in family.shared_with_positions for family, name in found)
