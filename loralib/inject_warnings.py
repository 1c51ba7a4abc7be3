"""The warnings of `add_lora`, about calls that are valid but probably not what was meant."""

import logging
import re
from collections.abc import Collection, Iterable

import torch
from torch import nn

from .bypassed import bypassed, called_and_read, stacks_read_elsewhere
from .initialization import initializes, starts_from_weight
from .lora_layer import lora_layers
from .model_checks import weights_with_updates
from .modules_to_train import can_be_trained, sharing
from .stacks import stack_named
from .targets import (
    ALL_LINEAR,
    Target,
    all_linear,
    foreign_linear,
    guessed_head,
    is_any,
    matched_stacks,
    matches,
    shortest_targets,
)
from .text import in_short, listed, module_label, quoted

logger = logging.getLogger(__name__)


def warn_of_no_parameters(names: Collection[str]) -> None:
    """Warns of modules in modules_to_train that have no parameters, see `check_has_parameters`."""
    if names:
        logger.warning(
            "modules_to_train names %s, with no parameters to train",
            listed(map(module_label, names)),
        )


def warn_of_trained_before(names: Collection[str]) -> None:
    """Warns of adapted modules that were trained as wholes before `remove_lora`."""
    if names:
        logger.warning(
            "%s: trained before remove_lora as a whole (modules_to_train, or an adapter); these "
            "weights belong to the base now, so save the base as well unless they never changed",
            listed(map(module_label, names)),
        )


def warn_of_half_precision(model: nn.Module, trained: Iterable[str]) -> None:
    """Warns of modules_to_train in half precision, which loses steps that are small to a value.

    A and B are in float32 for this reason. The weights of norms are near 1, where bfloat16 loses
    all steps below 1/512: at usual learning rates they never change.
    """
    half = {torch.bfloat16, torch.float16}
    found = {name: {p.dtype for p in model.get_submodule(name).parameters()} for name in trained}
    names = [name for name, dtypes in found.items() if dtypes & half]
    if names:
        logger.warning(
            "modules_to_train has %s in %s, which loses small steps of an optimizer unless that "
            "keeps copies in float32: call .float() on such modules, and train under "
            "torch.autocast",
            in_short(map(module_label, names), at_most=2),
            listed(str(dtype) for dtype in half & set().union(*found.values())),
        )


def warn_of_targets(
    model: nn.Module,
    targets: Collection[Target],
    exclude: Iterable[Target],
    layers: Iterable[int] | None,
    names: Iterable[str],
) -> None:
    """Warns of targets that match more or fewer modules (`names`) than was probably meant."""
    if ALL_LINEAR in targets:
        _warn_of_guessed_head(model, exclude)
        _warn_of_foreign_linear(model, exclude, layers)
    _warn_of_stacks(model, matched_stacks(model, targets, exclude, layers))
    _warn_of_numbers(model, targets, names)


def _warn_of_guessed_head(model: nn.Module, exclude: Iterable[Target]) -> None:
    """Warns which layer "all-linear" has taken for the head, if it is frozen and not excluded."""
    head = guessed_head(model)
    if head is None or is_any(head, exclude) or head in lora_layers(model):
        return
    module = model.get_submodule(head)
    weights = set(module.parameters())
    if any(weight.requires_grad for weight in weights):
        return
    is_tied = sharing(model, weights, {*module.modules()})
    logger.warning(
        "'%s' treats %s, the last linear layer, as the head, which stays frozen: add it to "
        "%sexclude if it should stay frozen",
        ALL_LINEAR,
        module_label(head),
        "" if is_tied else "targets to adapt it, to modules_to_train to train it, or to ",
    )


def _warn_of_foreign_linear(
    model: nn.Module, exclude: Iterable[Target], layers: Iterable[int] | None
) -> None:
    """Warns that "all-linear" leaves out layers of classes that only seem to be linear layers."""
    found = {n: model.get_submodule(n) for n in foreign_linear(model, exclude, layers)}
    frozen = {
        name: module
        for name, module in found.items()
        if not any(own.requires_grad for own in module.parameters())
    }
    if frozen:
        kinds = {type(module) for module in frozen.values()}
        is_trainable = any(map(can_be_trained, frozen.values()))
        logger.warning(
            "'%s' leaves out %s, of classes without a LoRA layer (%s): name them %sin exclude to "
            "keep them frozen",
            ALL_LINEAR,
            in_short(frozen, at_most=2),
            listed(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds),
            "in modules_to_train to train them, or " if is_trainable else "",
        )


def _warn_of_stacks(model: nn.Module, matched: Iterable[str]) -> None:
    """Warns that targets leave out stacks of matrices with more weights than all that is adapted.

    Recent versions of Hugging Face Transformers hold the experts of a layer as stacks. Earlier ones
    held them as linear layers, for which such targets were written.

    Args:
        model: the adapted model.
        matched: the stacks that the targets match, see `matched_stacks`.
    """
    adapted = {id(weight): weight.numel() for _, weight in weights_with_updates(model)}
    weights = {name: model.get_parameter(name) for name in matched}
    left = {
        name: weight.numel()
        for name, weight in weights.items()
        if not weight.requires_grad and id(weight) not in adapted
    }
    if sum(left.values()) <= sum(adapted.values()):
        return
    modules = [name for name, _ in model.named_modules()]
    targets = dict.fromkeys(shortest_targets(left, modules, least=2).values())
    logger.warning(
        "the targets leave out the stacks of matrices %s, which hold more than all that is "
        "adapted: add %s to targets, or to exclude to keep them frozen",
        in_short(left, at_most=2),
        in_short(targets),
    )


def _warn_of_numbers(model: nn.Module, targets: Collection[Target], names: Iterable[str]) -> None:
    """Warns that a number as a target, as for nn.Sequential, also matches other modules.

    The names of these end in it by chance. Modules that another target matches too are intended, so
    there is no warning about them.
    """
    linear = all_linear(model) if ALL_LINEAR in targets else []
    for target in targets:
        if not isinstance(target, str) or target not in names or not target.isdigit():
            continue
        rest = [each for each in targets if each not in (target, ALL_LINEAR)]
        meant = {target, *linear}
        others = [n for n in names if matches(n, target) and n not in meant and not is_any(n, rest)]
        if others:
            logger.warning(
                "'%s' means every module whose name ends in it, here %s as well: re.compile('%s') "
                "means that one alone",
                target,
                listed(others),
                target,
            )


def warn_of_reads(model: nn.Module, names: Iterable[str], are_loaded: bool = False) -> None:
    """Warns of layers and stacks with whose weights the model computes itself, without updates.

    Args:
        model: the adapted model.
        names: the names of the adapted layers and stacks.
        are_loaded: whether a file says what is adapted, so that nothing can be left out.
    """
    _warn_of_bypassed(model, names, are_loaded)
    _warn_of_called_and_read(model, names, are_loaded)
    _warn_of_stacks_read_elsewhere(model, names, are_loaded)


def _warn_of_bypassed(model: nn.Module, names: Iterable[str], are_loaded: bool) -> None:
    found = bypassed(model, names)
    stacks = [name for name in found if stack_named(model, name) is not None]
    layers = [name for name in found if name not in stacks]
    for of_kind, what, called_instead in (
        (layers, "the weight of ", "it" if len(layers) == 1 else "them"),
        (stacks, "", f"the module that has {'it' if len(stacks) == 1 else 'them'}"),
    ):
        if of_kind:
            logger.warning(
                "the source of %s reads %s%s directly, and never calls %s: an update has no "
                "effect there%s",
                listed({found[name] for name in of_kind}),
                what,
                in_short(of_kind, at_most=2),
                called_instead,
                "" if are_loaded else f"; leave out {quoted(_ends(of_kind))}",
            )


def _warn_of_called_and_read(model: nn.Module, names: Iterable[str], are_loaded: bool) -> None:
    found = called_and_read(model, names)
    if found:
        is_one = len(found) == 1
        them = "it" if is_one else "them"
        way_out = f"leave out {quoted(_ends(found))}, or name {them} in modules_to_train instead"
        logger.warning(
            "the source of %s also reads the weight%s of %s directly, which lack%s the update "
            "unless merged: %s",
            listed(set(found.values())),
            "" if is_one else "s",
            in_short(found, at_most=2),
            "s" if is_one else "",
            "merging changes the outputs" if are_loaded else way_out,
        )


def _warn_of_stacks_read_elsewhere(
    model: nn.Module, names: Iterable[str], are_loaded: bool
) -> None:
    found = stacks_read_elsewhere(model, names)
    if found:
        them = "it" if len(found) == 1 else "them"
        logger.warning(
            "the source of %s also reads %s in methods other than forward, where an update has no "
            "effect unless merged: %scompute with %s in forward alone",
            listed(set(found.values())),
            in_short(found, at_most=2),
            "" if are_loaded else f"leave out {quoted(_ends(found))}, or ",
            them,
        )


def _ends(names: Iterable[str]) -> list[str]:
    """Returns the last two parts of names, each once, as layers usually share them."""
    return list(dict.fromkeys(".".join(name.split(".")[-2:]) for name in names))


def warn_of_kinds(model: nn.Module) -> None:
    """Warns that a model has LoRA of several kinds, which `save_adapter` would refuse."""
    layers = lora_layers(model).values()
    for setting in ("variant", "initialization"):
        kinds = {getattr(layer, setting) for layer in layers}
        is_recorded = setting == "initialization" and not any(map(starts_from_weight, kinds))
        if len(kinds) > 1 and not is_recorded:
            logger.warning(
                "the model's LoRA has several values of %s now, %s: save_adapter refuses that, so "
                "give all calls of add_lora the same, or save the merged model",
                setting,
                listed(kinds),
            )


def warn_of_task_heads(model: nn.Module) -> None:
    """Warns that the heads of models for a task stay frozen: they are random unless trained before.

    Such a model may be a part of `model`, as in another library's wrapper. Hugging Face's models
    are recognized by the names of their classes and of their base models.
    """
    adapted = lora_layers(model)
    for place, part in model.named_modules():
        base, kind = getattr(part, "base_model_prefix", None), type(part).__name__
        if not isinstance(base, str) or base not in part._modules or not _FOR_A_TASK.search(kind):
            continue
        start = f"{place}." if place else ""
        if not any(name.startswith(start) for name in adapted):
            continue
        tops = [f"{start}{name}" for name, _ in part.named_children() if name != base]
        head = [each for top in tops for each in _frozen_parts(model, top, adapted)]
        if head:
            logger.warning(
                "the head of the %s stays frozen: if it is new, modules_to_train=%s trains and "
                "saves it; to keep it as it is, give modules_to_train=[]",
                kind,
                head,
            )


# Hugging Face's classes of models with a head that pretrained checkpoints lack.
_FOR_A_TASK = re.compile(r"For\w*(Classification|MultipleChoice|QuestionAnswering)$")


def _frozen_parts(model: nn.Module, name: str, adapted: Collection[str]) -> list[str]:
    """Returns the largest parts of a module that have frozen parameters and no LoRA."""
    module = model.get_submodule(name)
    if name in adapted or all(parameter.requires_grad for parameter in module.parameters()):
        return []
    if not any(each.startswith(f"{name}.") for each in adapted):
        return [name]
    inner = (f"{name}.{each}" for each, _ in module.named_children())
    return [part for each in inner for part in _frozen_parts(model, each, adapted)]


def warn_of_no_initialization(model: nn.Module, names: Iterable[str]) -> None:
    """Warns that A and B are zero, if `torch.nn.init` has no effect, see `initializes`.

    Both would stay zero in training: each has a gradient only if the other is not zero.
    """
    layers = lora_layers(model)
    zero = [name for name in names if not layers[name].lora_A.is_meta]
    if zero and not initializes():
        logger.warning(
            "torch.nn.init does nothing here, so A and B of %s are zero, and training would not "
            "change them: call lora.start_from_weights(model) once it works again",
            in_short(map(module_label, zero), at_most=2),
        )
