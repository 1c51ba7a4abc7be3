"""Checks that a model and its modules can be adapted. Errors are one line; most name the module."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .adaptation import LayerSettings, builder_of
from .adapted_layers import MultiheadAttention
from .arguments import ABOVE_0, as_number
from .bypassed import bypassed, weight_names
from .errors import UnsupportedLayerError
from .functional import variant_of
from .in_place import can_be_converted, is_in_place, own_names, unparametrized_class
from .initialization import initializes, start_is_deferred
from .layer_kinds import added_attributes, is_conv1d, is_linear, out_in, out_in_sizes
from .layers import Embedding
from .lora_layer import LoRALayer, lora_layers
from .nn.products import Linear
from .quantized_layers import (
    check_unpacked,
    is_quantized_linear,
    needs_weight,
    passes_gradients,
)
from .stacks import (
    Stack,
    is_suggested,
    layer_of_stack,
    matrices,
    stack_named,
    stacked_weights,
    stacks_in,
)
from .targets import Target, means, shortest_target, text_of
from .tensor_kinds import is_fake, is_sharded, quantized
from .text import listed, module_label
from .wrappers import has_own_forward, is_distributed_or_compiled, own_forward_message
from .zero3 import check_not_copied, is_partitioned

# The attributes of a LoRA layer, which a module may not already have for something else.
_LORA_ATTRIBUTES = {
    *("base", "enable_lora", "freeze_A", "initialization", "lora_alpha", "lora_dropout"),
    *("merge_weights", "merged", "r", "scaling", "variant"),
    *("lora_A", "lora_B", "lora_magnitude_vector", "lora_A_start", "lora_B_start"),
}

WITHOUT_SHAPE = "has no shape yet: call the model once before add_lora"

# Advice that fits every target: drop it if it matches this module alone, exclude the module if it
# matches others too.
_LEAVE_OUT = "leave it out of targets, or exclude it if its target matches more modules"
_HAS_LORA = f"has LoRA already: remove_lora(model) starts over; to keep it, {_LEAVE_OUT}"


def check_adaptable(model: nn.Module) -> None:
    """Checks that the model is neither wrapped nor compiled, and that it can be trained."""
    check_unpacked(model)
    check_not_copied(
        model,
        "and would not train parameters that are added now: adapt the model before "
        "deepspeed.initialize",
    )
    if torch.is_inference_mode_enabled():
        raise ValueError("LoRA cannot be trained in inference mode: call it outside")
    for name, module in model.named_modules():
        if is_distributed_or_compiled(module):
            raise ValueError(
                f"{name or 'the model'} is wrapped or compiled already "
                f"({type(module).__name__}): adapt the model before that"
            )
    layers = lora_layers(model)
    for name, parameter in model.named_parameters():
        owners = {name.rpartition(".")[0], name.partition(".parametrizations.")[0]}
        if "lora_" in name and not owners & layers.keys():
            raise ValueError(
                f"{name} has 'lora_' in its name, by which LoRA's parameters are recognized: "
                "rename that module first"
            )
        if not is_lazy(parameter) and parameter.is_inference():
            raise ValueError(
                f"{name} is an inference tensor, which cannot be trained: adapt a copy of the "
                "model, copy.deepcopy(model)"
            )
        if not parameter.is_leaf:
            raise ValueError(
                f"{name} was computed from other tensors, so it cannot be frozen: adapt the model "
                "before it is copied by torch.jit (a scripted part) or by meta-learning's libraries"
            )


def check_has_modules(model: nn.Module) -> None:
    """Checks that a model has modules that targets can name.

    Raises:
        ValueError: it has none. A single layer has to be put into a model first.
    """
    if next(model.children(), None) is not None or stacks_in(model):
        return
    kind = type(model).__name__
    try:
        builder_of(model)
    except UnsupportedLayerError:
        raise ValueError(f"{kind} contains no layers that LoRA could adapt") from None
    raise ValueError(
        f"{kind} is itself a layer, and contains none that a target could name: put it into a "
        "model, such as nn.Sequential, and name it there, as '0'"
    )


def check_module(model: nn.Module, name: str, settings: LayerSettings) -> None:
    """Checks that a module can be adapted with these settings.

    Raises:
        ValueError, UnsupportedLayerError: it cannot; the message names it.
    """
    module, what = model.get_submodule(name), module_label(name)
    if isinstance(module, LoRALayer) and (module.r > 0 or "q_proj" in module._modules):
        if not is_in_place(module):
            raise ValueError(f"{what} was built as a LoRA layer: {_LEAVE_OUT}")
        raise ValueError(f"{what} {_HAS_LORA}")
    if isinstance(module, Linear):
        raise UnsupportedLayerError(
            f"{what} belongs to an encoder of this project, which has to be built with LoRA, also "
            "for load_adapter: from_pretrained(…, apply_lora=True, lora_r=8, lora_alpha=16)"
        )
    if any(map(is_lazy, module.parameters(recurse=False))):
        raise UnsupportedLayerError(f"{what} {WITHOUT_SHAPE}")
    try:
        builder_of(module)
    except UnsupportedLayerError as error:
        inner = _targets_within(name, module)
        instead = f"name layers inside it, such as {inner}, or " if inner else ""
        raise UnsupportedLayerError(f"{what} is a {error}: {instead}{_LEAVE_OUT}") from None
    _check_class(what, module)
    taken = sorted(own_names(module) & _LORA_ATTRIBUTES)
    if taken and not isinstance(module, LoRALayer):
        raise UnsupportedLayerError(
            f"{what} has an attribute '{taken[0]}', which LoRA layers use themselves: {_LEAVE_OUT}"
        )
    _check_no_own_forward(name, module)
    weights = _weights(module)
    if not weights or not module._parameters.keys() >= {*weight_names(module)}:
        raise UnsupportedLayerError(
            f"{what} has no weight that is a plain parameter: undo weight norm or pruning "
            f"first (parametrize.remove_parametrizations, prune.remove), or {_LEAVE_OUT}"
        )
    for weight in weights.values():
        if is_quantized_linear(module):
            _check_quantized(what, module, settings)
        else:
            _check_dtype(what, weight)
        _check_settings(name, module, out_in_sizes(module, weight)[0], settings)
    owner = model.get_submodule(name.rpartition(".")[0])
    if isinstance(owner, nn.MultiheadAttention):
        _check_attention(name, owner, module)
    for attention, relation in ((module, "is"), (owner, "belongs to")):
        if isinstance(attention, nn.MultiheadAttention) and settings.lora_dropout:
            raise ValueError(
                f"{what} {relation} an nn.MultiheadAttention, whose update cannot have dropout: "
                f"set lora_dropout to 0, or {_LEAVE_OUT}"
            )


def _targets_within(name: str, block: nn.Module) -> str:
    """Returns the linear layers and stacks within a block, as targets; empty if there are none."""
    last = name.rpartition(".")[2]
    within = [each for each, module in block.named_modules() if each and is_linear(module)]
    within += [each for each in stacked_weights(block) if is_suggested(block, each)]
    return listed(f"{last}.{each}" for each in within)


def _check_class(what: str, module: nn.Module) -> None:
    kind = unparametrized_class(module)
    if not can_be_converted(kind):
        raise UnsupportedLayerError(
            f"{what} is a {kind.__module__}.{kind.__qualname__}, which cannot become a LoRA layer "
            "in place, as Python does not let its class change: define the class without "
            f"__slots__, and with PyTorch's class as its first base, or {_LEAVE_OUT}"
        )


def _check_no_own_forward(name: str, module: nn.Module) -> None:
    if not has_own_forward(module):
        return
    if any(map(is_sharded, module.parameters(recurse=False))):  # by Transformers
        raise UnsupportedLayerError(
            f"{module_label(name)} has a forward of its own for its sharded parameters, which "
            "would compute without LoRA: load the model without tp_plan, and call PyTorch's "
            f"parallelize_module before add_lora; or {_LEAVE_OUT}"
        )
    raise UnsupportedLayerError(
        own_forward_message(
            name,
            module,
            "set by a device map's hooks: adapt the model before it is dispatched; or remove "
            "them (accelerate's remove_hook_from_submodules), adapt it, and dispatch it again",
            "set on the instance, which would compute without LoRA",
        )
    )


def _check_dtype(what: str, weight: Tensor) -> None:
    if weight.is_complex():
        raise UnsupportedLayerError(
            f"{what} has complex weights ({weight.dtype}), which LoRA does not support: "
            f"{_LEAVE_OUT}"
        )
    if reason := quantized(weight):
        raise UnsupportedLayerError(f"the weight of {what} is {reason}: {_LEAVE_OUT}")


def _check_quantized(what: str, layer: nn.Module, settings: LayerSettings) -> None:
    """Checks that a linear layer with a quantized weight can be adapted with these settings."""
    reader = needs_weight(settings.variant, settings.initialization)
    if reader is not None:
        raise ValueError(
            f"the weight of {what} is quantized, but {reader} needs its values: choose another, "
            f"load the base in float16 or bfloat16, or {_LEAVE_OUT}"
        )
    if not passes_gradients(layer):
        raise UnsupportedLayerError(
            f"gradients do not pass through {what}, because its inputs are quantized as well: "
            f"quantize only the weights, or {_LEAVE_OUT}"
        )


def _check_settings(name: str, module: nn.Module, out: int, settings: LayerSettings) -> None:
    """Checks that a module with this number of outputs can be adapted with these settings."""
    slices = len(settings.enable_lora)
    if slices > 1 and not (isinstance(module, nn.Linear) or is_conv1d(module)):
        raise ValueError(
            f"{module_label(name)} is not a linear layer, so enable_lora cannot select slices of "
            "it: remove it from enable_lora, or use a longer name that matches only the linear "
            "layers"
        )
    if not any(settings.enable_lora) or out % slices:
        raise ValueError(
            f"enable_lora {list(settings.enable_lora)} does not fit {module_label(name)}: its "
            f"length has to divide {out}, the number of outputs, and at least one entry has to be "
            "True"
        )
    if not isinstance(settings.r, int) or settings.r < 1:
        raise ValueError(
            f"r, the rank, has to be an integer of at least 1, got {settings.r!r} "
            f"({module_label(name)})"
        )
    as_number(f"{module_label(name)}: lora_alpha", settings.lora_alpha, *ABOVE_0)
    if settings.lora_dropout == 1:
        raise ValueError("lora_dropout 1 drops all of an update's input: nothing would be trained")
    if isinstance(module, nn.Embedding):
        freeze_A = settings.freeze_A and not start_is_deferred()  # a file brings A
        Embedding.check_update(module.max_norm, freeze_A, settings.initialization)
    LoRALayer(**settings.of_layer())  # runs its checks of the settings


def _check_attention(name: str, owner: nn.MultiheadAttention, module: nn.Module) -> None:
    """Checks that the attention that a module belongs to can use its update.

    It computes with the weight of its out_proj itself, so it changes its class when out_proj is
    adapted. It cannot if its class overrides forward or adds methods or attributes of its own, or
    if that weight is quantized.
    """
    if is_quantized_linear(module):
        raise UnsupportedLayerError(
            f"the weight of {name} is quantized, and belongs to an nn.MultiheadAttention, which "
            f"reads it itself: {_LEAVE_OUT}"
        )
    if isinstance(owner, MultiheadAttention):
        return
    overrides = type(owner).forward is not nn.MultiheadAttention.forward
    if overrides or added_attributes(unparametrized_class(owner), nn.MultiheadAttention):
        raise UnsupportedLayerError(
            f"{name} belongs to a {type(owner).__qualname__}, which computes with its weight in "
            f"its own way: {_LEAVE_OUT}"
        )
    _check_class(f"the module around {name}", owner)


def check_stack(name: str, stack: Stack, settings: LayerSettings) -> None:
    """Checks that a stack of matrices can be adapted with these settings.

    Raises:
        ValueError, UnsupportedLayerError: it cannot; the message names it.
    """
    owner, last = stack
    kind = type(owner)
    if layer_of_stack(last) in owner._modules:
        raise ValueError(f"{name} {_HAS_LORA}")
    if kind.forward is nn.Module.forward or isinstance(owner, LoRALayer):
        raise UnsupportedLayerError(
            f"{name} belongs to a {kind.__qualname__}, where LoRA for a parameter has no effect: "
            f"{_LEAVE_OUT}"
        )
    if hasattr(owner, layer_of_stack(last)):
        raise UnsupportedLayerError(
            f"{name} belongs to a module with an attribute '{layer_of_stack(last)}', which LoRA "
            f"uses itself: {_LEAVE_OUT}"
        )
    _check_no_own_forward(name.rpartition(".")[0], owner)
    _check_dtype(name, stack.weight)
    for is_given, what, way_out in (
        (settings.lora_dropout, "dropout", "set lora_dropout to 0"),
        (variant_of(settings.variant).has_magnitude, "DoRA", "choose another variant"),
    ):
        if is_given:
            raise ValueError(
                f"{name} is a stack of matrices, whose update cannot have {what}: {way_out}, or "
                f"{_LEAVE_OUT}"
            )
    _check_settings(name, owner, matrices(owner, stack.weight).shape[1], settings)


def check_rows(name: str, module: nn.Module, settings: LayerSettings) -> None:
    """Checks that a weight to adapt with DoRA has no rows of zeros, which have no direction.

    Slices that `enable_lora` leaves out are not checked.
    Memory that a loader has yet to fill is not checked, nor is a weight partitioned by ZeRO 3.
    """
    if not variant_of(settings.variant).has_magnitude:
        return
    for part, weight in _weights(module).items():
        if weight.is_meta or is_fake(weight) or is_partitioned(weight):
            continue
        rows = out_in(module, weight.detach())
        wide = torch.promote_types(weight.dtype, torch.float32)
        norms = torch.linalg.vector_norm(rows, dim=1, dtype=wide)
        slices = norms.chunk(len(settings.enable_lora))
        adapted = zip(slices, settings.enable_lora, strict=True)
        if not all(norms.all() for norms, enabled in adapted if enabled) and initializes():
            raise ValueError(
                f"{module_label(name)} has rows of zeros in its {part}, which have no direction "
                f"for {settings.variant}: {_LEAVE_OUT}, or choose another variant"
            )


def check_rank(
    model: nn.Module, settings: Mapping[str, LayerSettings], patterns: Iterable[Target]
) -> None:
    """Checks that no rank exceeds the smaller dimension of its weight, or of one slice of it.

    Args:
        model: the model.
        settings: the settings of its modules and stacks, by their names.
        patterns: the targets that gave some of these another rank than the rest.
    """
    largest = {name: _largest_rank(model, name, own) for name, own in settings.items()}
    stacks = stacked_weights(model)
    for name, most in largest.items():
        rank = settings[name].r
        if rank <= most:
            continue
        pattern = next((each for each in patterns if means(name, each, stacks)), None)
        owner = bypassed(model, [name]).get(name)
        if owner is not None:
            never = f"the source of {owner} never calls it, so no rank has an effect"
            way_out = f"{never}: {_LEAVE_OUT}"
        elif most == 0:
            way_out = _LEAVE_OUT
        elif pattern is not None:
            way_out = f"lower it in rank_pattern, where '{text_of(pattern)}' sets it"
        else:
            alike = [n for n, other in largest.items() if other == most]
            target = shortest_target(name, alike, largest)
            way_out = f"lower it, or give rank_pattern={{{target}: {most}}}"
        raise ValueError(
            f"r = {rank} is too large for {module_label(name)}, whose largest possible rank is "
            f"{most}; {way_out}"
        )


def _largest_rank(model: nn.Module, name: str, settings: LayerSettings) -> int:
    """Returns the largest possible rank of a module's or stack's update.

    This is the smallest dimension of its weights as matrices, or of their slices with
    `enable_lora`.
    """
    module, stack = _holder(model, name)
    if stack is not None:
        return min(stack.shape[1:])
    sizes = [out_in_sizes(module, weight) for weight in _weights(module).values()]
    slices = len(settings.enable_lora)
    return min(min(out // slices, inner) for out, inner in sizes)


def check_tied(model: nn.Module, names: Iterable[str]) -> None:
    """Checks that no module to be adapted shares its weight with another module."""
    owners: dict[Tensor, dict[int, str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(parameter, {})[id(module)] = name
    for name in names:
        module, stack = _holder(model, name)
        for weight in _weights(module).values() if stack is None else (stack,):
            others = [other for key, other in owners[weight].items() if key != id(module)]
            if others:
                raise ValueError(
                    f"{module_label(name)} shares its weight with "
                    f"{module_label(others[0]) or 'the model itself'}; an update of one does not "
                    f"change the other, and merging unties them: give untie=True, or {_LEAVE_OUT}"
                )


def own_parameters(model: nn.Module, name: str) -> set[Tensor]:
    """Returns a module's own parameters, or only the stack if this is a stack's name."""
    module, stack = _holder(model, name)
    own = module._parameters.values() if stack is None else (stack,)
    return {parameter for parameter in own if parameter is not None}


def _holder(model: nn.Module, name: str) -> tuple[nn.Module, Tensor | None]:
    """Returns the module of this name and None, or a stack's owner and the stack itself."""
    stack = stack_named(model, name)
    return (model.get_submodule(name), None) if stack is None else (stack.owner, stack.weight)


def _weights(module: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters that are a module's weights, by name."""
    own = module._parameters
    return {n: weight for n in weight_names(module) if (weight := own.get(n)) is not None}
