"""Finds the weights of a plain model that an adapter adapts, and checks that their deltas fit."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from ..errors import CheckpointError
from ..functional import Delta
from ..io.tensors import same_tensor
from ..layer_kinds import is_linear, out_in_sizes
from ..model_checks import check_there
from ..module_names import first_names, other_places
from ..positions import shared_projections
from ..quantized_layers import is_quantized_linear
from ..stacks import matrices, stack_of_layer, stacked_weights, stacks_in
from ..targets import first_names_of_targets
from ..text import module_label
from .adapter import Adapter, lora_modules
from .checks import check_positions
from .deltas import deltas_of
from .names import more_layers
from .peft import is_targeted_parameter, peft_difference
from .peft_completeness import check_complete


@dataclass(frozen=True)
class AdaptedWeight:
    """A weight of a plain model, and the delta that an adapter adds to it.

    Args:
        module: the module that has the weight.
        name: the parameter's name in the module.
        delta: the delta that is added.
    """

    module: nn.Module
    name: str
    delta: Delta

    @property
    def weight(self) -> Tensor:
        """The weight, as the module holds it."""
        return self.module.get_parameter(self.name)

    @property
    def is_stack(self) -> bool:
        """Whether it is a stack of matrices."""
        return self.name in stacks_in(self.module)

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape in the delta's layout: (out, in), a kernel's or a stack's shape."""
        if self.is_stack:
            return tuple(matrices(self.module, self.weight).shape)
        is_kernel = self.weight.dim() > 2
        return tuple(self.weight.shape) if is_kernel else out_in_sizes(self.module, self.weight)

    def shape_of_delta(self, A: Tensor) -> tuple[int, ...]:
        """Returns the delta's shape in the same layout. A is the adapter's, not flattened."""
        if self.is_stack:
            count = len(self.delta.starts)
            return count, self.delta.out_features // count, self.delta.in_features
        return self.delta.out_features, *A.shape[1:]


def adapted_modules(model: nn.Module, adapter: Adapter) -> dict[str, AdaptedWeight]:
    """Returns the weights of a plain model that an adapter adapts, with deltas, by module name.

    Raises:
        CheckpointError: for the reasons of `deltas_of`. Or the model lacks an adapted module, has
            it in another shape, or has two modules where the adapter's model had one. Or the model
            uses it in several places although PEFT has adapted only one of them. Or it is a
            convolution whose update PEFT computes in another way. Or the adapter holds different
            updates for one module, or lacks what its PEFT folder should hold.
        ValueError: the weight of an adapted module has no values, or is quantized in an unknown
            way.
    """
    modules: dict[str, AdaptedWeight] = {}
    first = first_names(model)
    places = other_places(model) if adapter.format == "peft" else {}
    shared = {place for one, others in places.items() for place in (one, *others)}
    _check_places(model, adapter)
    for name, delta in deltas_of(adapter).items():
        module, weight = _adapted_module(model, name, adapter)
        if _is_repeated(adapter, name, first):
            continue
        place = name.rpartition(".")[0] if adapter.lora.is_of_stack(name) else name
        if place in shared:
            raise CheckpointError(
                f"{adapter.source}: adapts {name}, which the model uses in several places, but "
                "PEFT has adapted only one of them: load it with PEFT"
            )
        reason = peft_difference(module) if adapter.format == "peft" else None
        if reason:
            raise CheckpointError(f"{adapter.source}: {name} is {reason}: load it with PEFT")
        adapted = AdaptedWeight(module, weight, delta)
        if not is_quantized_linear(module):
            check_there([(f"the weight of {name}", adapted.weight)], "it gets an adapter")
        theirs, ours = adapted.shape_of_delta(adapter.tensors[f"{name}.lora_A"]), adapted.shape
        if theirs != ours:
            raise CheckpointError(
                f"{adapter.source}: the delta of {module_label(name)} is {theirs}, but the "
                f"model's weight is {ours}: a base of another size; {base_to_give(adapter)}"
            )
        modules[name] = adapted
    if shared_projections(model) & modules.keys():
        check_positions(adapter)
    check_complete(model, adapter, modules)
    return modules


def _check_places(model: nn.Module, adapter: Adapter) -> None:
    """Checks that no two modules of a model were one module in the adapter's model."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for first, others in (adapter.lora.places or {}).items():
        for other in modules.keys() & others:
            if modules[other] is not modules.get(first, modules[other]):
                raise CheckpointError(
                    f"{adapter.source}: {first} and {other} are two modules here, but were one in "
                    f"the model that it was trained in: make them one, or {base_to_give(adapter)}"
                )


def _is_repeated(adapter: Adapter, name: str, first: Mapping[str, str]) -> bool:
    """Returns whether an adapter has this module's update under the module's first name as well."""
    original = first.get(name, name)
    if original == name or f"{original}.lora_A" not in adapter.tensors:
        return False
    for full, tensor in adapter.tensors.items():
        module, _, part = full.rpartition(".")
        if module == name and not same_tensor(tensor, adapter.tensors[f"{original}.{part}"]):
            raise CheckpointError(
                f"{adapter.source}: {name} and {original} are the same module in the model, but "
                "their updates differ"
            )
    return True


def _adapted_module(model: nn.Module, name: str, adapter: Adapter) -> tuple[nn.Module, str]:
    """Returns the module whose weight an adapter adapts under a name, and the weight's name in it.

    It is usually the module of this name. For the q_proj, k_proj and v_proj of an
    `nn.MultiheadAttention` whose inputs have different sizes, it is the attention.

    Raises:
        CheckpointError: the model has no such module, or the module is of another kind than the one
            that the adapter was trained in.
    """
    source, embeddings = adapter.source, adapter.lora.embeddings or ()
    if adapter.lora.is_of_stack(name):
        return _owner_of_stack(model, stack_of_layer(name), adapter)
    module, weight_name = _module_and_weight(model, name)
    if module is None:
        instead = _fitting(model, name, adapter)
        raise CheckpointError(
            f"{source}: the model has no {module_label(name)} to adapt: {instead}"
        )
    weight = getattr(module, weight_name, None)
    if weight is not None and module._parameters.get(weight_name) is None:
        raise CheckpointError(
            f"{source}: the {weight_name} of {name} is computed from other tensors, as by "
            "weight_norm or pruning: make it a plain parameter first"
        )
    own = (f"{name}.{each}" for each in module._parameters)
    targeted = [each for each in own if is_targeted_parameter(adapter.peft_config, each)]
    if targeted and not is_linear(module):
        raise CheckpointError(f"{source}: {_no_such_lora(targeted[0], module)}")
    dimensions = adapter.tensors[f"{name}.lora_A"].dim()
    what = "a linear layer" if dimensions == 2 else f"a convolution in {dimensions - 2}-D"
    what = "an embedding" if name in embeddings else what
    is_of_kind = isinstance(module, nn.Embedding) == (name in embeddings)
    if dimensions > 2:
        is_of_kind = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    if not is_of_kind or not isinstance(weight, Tensor) or weight.dim() != dimensions:
        raise CheckpointError(f"{source}: in the model, {name} is not {what}")
    return module, weight_name


def _module_and_weight(model: nn.Module, name: str) -> tuple[nn.Module | None, str]:
    owner, _, last = name.rpartition(".")
    for path, weight in ((owner, f"{last}_weight"), (name, "")):
        try:
            module = model.get_submodule(path)
        except AttributeError:
            continue
        is_attention = isinstance(module, nn.MultiheadAttention)
        if weight and (not is_attention or getattr(module, weight, None) is None):
            continue
        return module, weight or ("in_proj_weight" if is_attention else "weight")
    return None, ""


def _owner_of_stack(model: nn.Module, name: str, adapter: Adapter) -> tuple[nn.Module, str]:
    """Returns the module that has the stack of this name, and the stack's name in it."""
    at, _, last = name.rpartition(".")
    owner = dict(model.named_modules(remove_duplicate=False)).get(at)
    if owner is None or last not in stacks_in(owner):
        is_targeted = is_targeted_parameter(adapter.peft_config, name)
        if is_targeted and owner is not None and last in owner._parameters:
            raise CheckpointError(f"{adapter.source}: {_no_such_lora(name, owner)}")
        raise CheckpointError(
            f"{adapter.source}: the model has no {name}, a stack of matrices, to adapt: "
            f"{_fitting(model, name, adapter)}"
        )
    return owner, last


def _no_such_lora(parameter: str, module: nn.Module) -> str:
    """Returns the error text for a parameter that PEFT has adapted and this library cannot."""
    return (
        f"adapts {parameter}, but LoRA for the parameters of a {type(module).__name__} is not "
        "supported here: merge it with PEFT's merge_and_unload()"
    )


def _fitting(model: nn.Module, name: str, adapter: Adapter) -> str:
    """Returns advice for a model that lacks a module: to give a part of it, or another model."""
    stacks = stacked_weights(model)
    if stacks and re.search(r"\.experts\.\d+(?:\.|$)", name):  # a name from Transformers before 5
        return (
            f"this model holds all experts of a layer in one parameter, such as {min(stacks)}: "
            "load the adapter with PEFT, which converts it for some models, and save it there; or "
            "merge it with the version of Transformers that it was trained with"
        )
    within = [each for each in first_names_of_targets(model) if each.endswith(f".{name}")]
    if len(within) != 1:
        adapted = {
            stack_of_layer(each) if adapter.lora.is_of_stack(each) else each
            for each in lora_modules(adapter.tensors)
        }
        return base_to_give(adapter, more_layers(adapted, first_names_of_targets(model)))
    part = within[0].removesuffix(f".{name}")
    return f"it has {within[0]}; give that part, model.get_submodule('{part}')"


def base_to_give(adapter: Adapter, layers: tuple[int, int] | None = None) -> str:
    """Returns advice for an adapter that was trained in another model, with its base's name if any.

    Args:
        adapter: the adapter.
        layers: the number of layers of its base, as far as its updates show it, and that of the
            model, see `more_layers`.
    """
    base = adapter.metadata.base if adapter.metadata else None
    advice = f"give the model that it was trained in{f', of {base!r}' if base else ''}"
    if layers is None:
        return advice
    return f"its base has at least {layers[0]} layers, this model has {layers[1]}; {advice}"
