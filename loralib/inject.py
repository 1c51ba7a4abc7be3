"""LoRA in a model that exists: `add_lora` adapts layers in place, `remove_lora` undoes it.

    names = lora.add_lora(model, targets=["q_proj", "v_proj"], r=8, lora_alpha=16)

The modules stay the same objects with the same tensors, which are neither copied nor initialized
again: names in the state dict stay, and `….lora_A`, `….lora_B` come with them. The base is frozen.

    of the model                  becomes                         its update
    nn.Linear                     Linear, MergedLinear by slices
    Conv1D of upstream's GPT-2    the same, with fan_in_fan_out
    nn.Embedding                  Embedding
    nn.Conv1d, 2d, 3d             AdaptedConv1d, 2d, 3d           A a convolution, B one of 1 × 1
    nn.MultiheadAttention         MultiheadAttention              of in_proj; out_proj is a Linear
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from .adapted_layers import (
    AdaptedConv1d,
    AdaptedConv2d,
    AdaptedConv3d,
    AdaptedProjection,
    MultiheadAttention,
)
from .arguments import ABOVE_0, as_dropout, as_flag, as_flags, as_number, as_python, check_model
from .errors import UnsupportedLayerError, listed
from .functional import variant_of
from .in_place import (
    is_in_place,
    leave_fast_path,
    turn_all_back,
    turn_back,
    turn_into,
    turning,
    was_turned,
)
from .layers import Embedding, Linear, MergedLinear
from .lora_layer import LoRALayer
from .targets import (
    ALL_LINEAR,
    Target,
    as_targets,
    by_pattern,
    check_exclusions,
    find,
    first_names,
    guessed_head,
    is_any,
)
from .trained import forget_frozen, note_trained
from .utils import check_bias, check_not_pefts, check_whole, freeze_base, train_biases
from .wrappers import has_own_forward, own_forward_message, quantized

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """What a module is adapted with; the fields are those of `add_lora`.

    Args:
        enable_lora: for each of the equal slices of a linear layer's output whether it has an
            update, as for `MergedLinear`.
    """

    r: int
    lora_alpha: float
    lora_dropout: float = 0.0
    variant: str = "lora"
    initialization: str = "default"
    freeze_A: bool = False
    enable_lora: tuple[bool, ...] = (True,)

    def of_layer(self) -> dict[str, Any]:
        """The arguments of `LoRALayer`."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        del own["enable_lora"]
        return own | {"merge_weights": True}


def add_lora(
    model: nn.Module,
    targets: Target | Iterable[Target],
    r: int = 8,
    lora_alpha: float = 16,
    lora_dropout: float = 0.0,
    *,
    exclude: Target | Iterable[Target] = (),
    layers: Iterable[int] | None = None,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
    bias: str = "none",
    modules_to_train: Target | Iterable[Target] = (),
    variant: str = "lora",
    initialization: str = "default",
    freeze_A: bool = False,
    enable_lora: Mapping[str, Sequence[bool]] | None = None,
    untie: bool = False,
) -> tuple[str, ...]:
    """Gives modules of a model a low-rank update each, in place, and freezes the rest.

    Args:
        model: any model of PyTorch's layers. In half precision the updates are float32. A module
            that it uses in several places has one update, and goes by the first of its names.
        targets: which modules; see `loralib.targets`, also for what "all-linear" takes for the
            head and leaves out. An `nn.MultiheadAttention` is adapted with
            its out_proj, unless that is excluded.
        r: rank of the updates.
        lora_alpha: the updates are scaled by lora_alpha / r, or as the variant has it.
        lora_dropout: dropout on the updates' input.
        exclude: which modules among these are left out; each exclusion has to leave out one.
        layers: the numbers of the layers to adapt, such as [0, 1] or range(6, 12).
        rank_pattern: another r for some modules, by target; of several patterns that match, the
            first counts.
        alpha_pattern: likewise, another lora_alpha.
        bias: which biases are trained as well, as for `mark_only_lora_as_trainable`.
        modules_to_train: modules that are trained as they are, such as a new head.
        variant: a name in `loralib.functional.VARIANTS`: "lora", "rslora", "dora", "rslora+dora".
        initialization: a name in `loralib.initialization.INITIALIZATIONS`.
        freeze_A: B alone is trained (LoRA-FA).
        enable_lora: by target, which of the equal slices of a linear layer's output are adapted,
            for projections that are several in one.
        untie: adapts a module whose weight another one has as well, such as a language model's
            embedding and its head: the update belongs to that module alone. By default that is
            refused, because merging it unties the two.

    Weights that are loaded into the model later need `start_from_weights` after it, where the
    variant or the initialization is made of weights.

    Returns:
        The names of the adapted modules. A second call adds others, and leaves what is trained.

    Raises:
        ValueError: a target or a pattern matches nothing, or a module that has LoRA already; an
            exclusion leaves out nothing; a setting is of another type than it has to be, or out of
            its range; a rank is larger than a dimension of its weight; DoRA is for a weight with
            rows of zeros; a module is both adapted and in modules_to_train; a weight is tied; the
            model is wrapped (DDP, FSDP, compile), has LoRA of PEFT's, or its tensors are inference
            tensors.
        UnsupportedLayerError: there is no LoRA layer for such a module. Nothing is changed then.
    """
    check_model(model, targets)
    check_not_pefts(model)
    check_bias(bias)
    untie, freeze_A = as_flag("untie", untie), as_flag("freeze_A", freeze_A)
    lora_dropout = as_dropout(lora_dropout)
    exclude = as_targets(exclude, "exclude")
    to_train = as_targets(modules_to_train, "modules_to_train")
    targets = as_targets(targets)
    _check_has_modules(model)
    names = find(model, targets, exclude=exclude, layers=layers, is_linear=is_linear)
    names = _with_output_projections(model, names, exclude)
    if exclude:
        every = find(model, targets, is_linear=is_linear)
        check_exclusions(model, exclude, _with_output_projections(model, every, ()))
    trained = find(model, to_train) if to_train else []
    _check_trained(model, trained, [*names, *names_of_updates(model)])
    ranks = by_pattern(names, rank_pattern or {}, r)
    alphas = by_pattern(names, alpha_pattern or {}, lora_alpha)
    slices = by_pattern(names, _flags_by_pattern(enable_lora), (True,))
    settings = {
        name: LayerSettings(
            r=as_python(ranks[name]),
            lora_alpha=as_python(alphas[name]),
            lora_dropout=lora_dropout,
            variant=variant,
            initialization=initialization,
            freeze_A=freeze_A,
            enable_lora=slices[name],
        )
        for name in names
    }
    is_first = not names_of_updates(model)
    adapted = adapt(model, settings, untie=untie)
    if is_first:
        freeze_base(model)
    train_biases(model, bias)
    for name in trained:
        module = model.get_submodule(name).requires_grad_(True)
        note_trained(model, (f"{name}.{inner}" for inner, _ in module.named_parameters()))
    if ALL_LINEAR in targets:
        _warn_of_guessed_head(model, exclude)
    return adapted


def _flags_by_pattern(
    enable_lora: Mapping[str, Sequence[bool]] | None,
) -> Mapping[str, tuple[bool, ...]]:
    """The values as tuples, each made once: an iterator ends with the first module that reads it.

    What is not a mapping stays as it is, for `by_pattern` to refuse.
    """
    given: Any = {} if enable_lora is None else enable_lora
    if not isinstance(given, Mapping):
        return given
    return {target: as_flags(f"enable_lora of {target}", flags) for target, flags in given.items()}


def _warn_of_guessed_head(model: nn.Module, exclude: Iterable[Target]) -> None:
    """Says which layer "all-linear" has taken for the head, where that is frozen unasked."""
    head = guessed_head(model, is_linear)
    if head is None or is_any(head, exclude) or head in names_of_updates(model):
        return
    module = model.get_submodule(head)
    weights = set(module.parameters())
    if any(weight.requires_grad for weight in weights):
        return
    is_tied = _sharing(model, weights, {*module.modules()})
    logger.warning(
        "'%s' takes %s, the last linear layer, for the head, which stays frozen: add it to %s"
        "exclude, if it is to stay frozen",
        ALL_LINEAR,
        head,
        "" if is_tied else "targets to adapt it, to modules_to_train to train it, or to ",
    )


def adapt(
    model: nn.Module,
    settings: Mapping[str, LayerSettings],
    untie: bool = False,
    any_rank: bool = False,
) -> tuple[str, ...]:
    """Adapts exactly these modules of a model, and freezes their weights.

    Args:
        model: changed in place.
        settings: by the names of the modules.
        untie: as for `add_lora`.
        any_rank: ranks may be larger than a dimension of their weight, as they are in some files.

    Returns:
        The names of the modules that have an update now. An attention of separate projections has
        its updates in modules `q_proj`, `k_proj`, `v_proj`.

    Raises:
        ValueError, UnsupportedLayerError: as for `add_lora`.
    """
    _check_model(model)
    settings = _by_first_name(model, settings)
    modules = {name: model.get_submodule(name) for name in settings}
    for name, module in modules.items():
        _check_module(name, module, settings[name])
        _check_owner(model, name)
        _check_dropout(model, name, settings[name])
        if not any_rank:
            _check_rank(name, module, settings[name])
            _check_rows(name, module, settings[name])
    if not untie:
        _check_tied(model, modules)
    had_update = set(names_of_updates(model))
    turned: list[nn.Module] = []
    were_trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for name, module in modules.items():
            turned.append(module)
            with turning(module):
                _builder(module)(module, settings[name])
        for name in modules:
            owner = model.get_submodule(name.rpartition(".")[0])
            if isinstance(owner, nn.MultiheadAttention) and not isinstance(owner, LoRALayer):
                turned.append(owner)
                with turning(owner):
                    _turn(owner, MultiheadAttention, LayerSettings(r=0, lora_alpha=1))
    except BaseException as error:  # nothing is changed then
        for module in reversed(turned):
            if was_turned(module):
                turn_back(module)
        for parameter, was_trained in were_trained:
            parameter.requires_grad = was_trained
        if isinstance(error, torch.linalg.LinAlgError):
            raise ValueError(f"{name}: its weight has no decomposition: {error}") from error
        raise
    leave_fast_path(model)
    return tuple(name for name in names_of_updates(model) if name not in had_update)


def remove_lora(model: nn.Module) -> tuple[str, ...]:
    """Makes a model the plain one that it was before `add_lora`; the updates are dropped.

    Weights have the bits that they had, and stay frozen: `model.requires_grad_(True)` has all of
    them trained again. What was set on a module since stays, too.

    Args:
        model: changed in place; also a part of a model, such as one of its blocks.

    Returns:
        The names of the modules that were adapted.

    Raises:
        ValueError: the model has no LoRA; it is itself one adapted layer; it was built with LoRA
            layers, which `merge` can make plain; or its parameters are sharded over several
            processes.
    """
    check_model(model)
    if isinstance(model, LoRALayer) and model.r > 0:
        raise ValueError(
            f"{type(model).__name__} is one adapted layer: give the model that it is part of, or "
            "the block"
        )
    check_whole(model, "LoRA is removed")
    layers = {n: each for n, each in model.named_modules() if isinstance(each, LoRALayer)}
    if not layers:
        raise ValueError("the model has no LoRA to remove")
    for name in layers:
        if not is_in_place(model.get_submodule(name)):
            raise ValueError(f"{name} was built as a LoRA layer, not adapted by add_lora")
    adapted = names_of_updates(model)
    turn_all_back(model)
    forget_frozen(model)
    return adapted


def names_of_updates(model: nn.Module) -> tuple[str, ...]:
    """The names of a model's LoRA layers that have an update, in the model's order."""
    modules = model.named_modules()
    return tuple(name for name, layer in modules if isinstance(layer, LoRALayer) and layer.r > 0)


# ------------------------------------------------------------------------------------------------
# One module
# ------------------------------------------------------------------------------------------------


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer, whoever's: what "all-linear" means."""
    return isinstance(module, nn.Linear | nn.MultiheadAttention) or _is_conv1d(module)


def _is_conv1d(module: nn.Module) -> bool:
    """Whether this is upstream's Conv1D: a linear layer that holds its weight as (in, out)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _builder(module: nn.Module) -> Callable[[Any, LayerSettings], None]:
    """What adapts a module of this kind.

    Raises:
        UnsupportedLayerError: nothing does.
    """
    kind = type(module)
    if kind is nn.MultiheadAttention or _is_without_update(module):
        return _adapt_attention
    if _is_conv1d(module):
        return _adapt_linear
    for plain, build in _BUILDERS.items():
        # A subclass is as good, unless it computes in its own way, as quantized layers do, or the
        # model uses what it has besides.
        if issubclass(kind, plain) and computes_as(kind, plain) and not _of_its_own(kind, plain):
            return build
    raise UnsupportedLayerError(f"{kind.__module__}.{kind.__qualname__}, which has no LoRA layer")


def _is_without_update(module: nn.Module) -> bool:
    """Whether this is an attention of which out_proj alone has an update so far."""
    is_adapted = isinstance(module, MultiheadAttention) and module.r == 0
    return is_adapted and "q_proj" not in module._modules


# What a subclass of a plain layer may define without being missed in a LoRA layer; and of Python's
# own methods, those that decide what it computes.
_HARMLESS = {"reset_parameters", "extra_repr", "_abc_impl"}
_CALLED = {"__call__", "__getattr__", "__getattribute__", "__setattr__", "__delattr__"}


# The attributes of a LoRA layer that a model may not have for something else.
_OF_LORA_LAYERS = {
    *("base", "enable_lora", "freeze_A", "initialization", "lora_alpha", "lora_dropout"),
    *("merge_weights", "merged", "r", "scaling", "variant"),
}


def _of_its_own(kind: type[nn.Module], plain: type[nn.Module]) -> set[str]:
    """The attributes and methods that a subclass of a plain layer adds to it."""
    between = kind.__mro__[: kind.__mro__.index(plain)]
    names = {name for each in between for name in vars(each)}
    own = {name for name in names if not name.startswith("__") or name in _CALLED}
    return own - _HARMLESS - vars(plain).keys()


def computes_as(kind: type[nn.Module], plain: type[nn.Module]) -> bool:
    """Whether a subclass of one of PyTorch's layers leaves it how it computes."""
    methods = ("forward", "_conv_forward")
    return all(getattr(kind, each, None) is getattr(plain, each, None) for each in methods)


def _adapt_linear(module: Any, settings: LayerSettings) -> None:
    fan_in_fan_out = _is_conv1d(module)
    sliced = len(settings.enable_lora) > 1
    if fan_in_fan_out:
        in_features, out_features = module.weight.shape
    _turn(module, MergedLinear if sliced else Linear, settings)
    module.fan_in_fan_out = fan_in_fan_out
    if fan_in_fan_out:
        module.in_features, module.out_features = in_features, out_features
    if sliced:
        module.enable_lora = list(settings.enable_lora)
    module._add_slices(settings.enable_lora, _update_dtype(module))
    module.reset_lora_parameters()


def _adapt_with(kind: type[LoRALayer]) -> Callable[[Any, LayerSettings], None]:
    def adapt_module(module: Any, settings: LayerSettings) -> None:
        _turn(module, kind, settings)
        module._add_update(_update_dtype(module))
        module.reset_lora_parameters()

    return adapt_module


def _adapt_attention(module: Any, settings: LayerSettings) -> None:
    if module._qkv_same_embed_dim:
        _adapt_with(MultiheadAttention)(module, settings)
        return
    _turn(module, MultiheadAttention, LayerSettings(r=0, lora_alpha=1))
    for name in ("q_proj", "k_proj", "v_proj"):
        projection = AdaptedProjection(module, f"{name}_weight", **settings.of_layer())
        projection._add_update(_update_dtype(projection))
        projection.reset_lora_parameters()
        module.add_module(name, projection.train(module.training))


_BUILDERS: dict[type[nn.Module], Callable[[Any, LayerSettings], None]] = {
    nn.Linear: _adapt_linear,
    nn.Embedding: _adapt_with(Embedding),
    nn.Conv1d: _adapt_with(AdaptedConv1d),
    nn.Conv2d: _adapt_with(AdaptedConv2d),
    nn.Conv3d: _adapt_with(AdaptedConv3d),
}


def _turn(module: nn.Module, kind: type[Any], settings: LayerSettings) -> None:
    if not was_turned(module):
        turn_into(module, kind)
    LoRALayer.__init__(module, **settings.of_layer())  # type: ignore[arg-type]
    module.train(module.training)


def _update_dtype(layer: LoRALayer) -> torch.dtype:
    """Updates are trained in float32 or wider."""
    return torch.promote_types(layer.frozen_weight.dtype, torch.float32)


# ------------------------------------------------------------------------------------------------
# Checks
# ------------------------------------------------------------------------------------------------


def _check_model(model: nn.Module) -> None:
    """Checks that the model is neither wrapped nor compiled, and that it can be trained."""
    if torch.is_inference_mode_enabled():
        raise ValueError("in inference mode no update can be trained: call it outside")
    for name, module in model.named_modules():
        kind = type(module).__name__
        wrapped = kind in ("DistributedDataParallel", "DataParallel", "OptimizedModule")
        compiled = vars(module).get("_compiled_call_impl") is not None
        if wrapped or compiled or kind.startswith(("FSDP", "FullyShardedDataParallel")):
            raise ValueError(
                f"{name or 'the model'} is wrapped or compiled already ({kind}): adapt the model "
                "before that"
            )
    own = names_of_updates(model)
    for name, parameter in model.named_parameters():
        owner = name.partition(".parametrizations.")[0]
        owner = owner if owner != name else name.rpartition(".")[0]
        if "lora_" in name and owner not in own:
            raise ValueError(
                f"{name} has 'lora_' in its name, by which LoRA's own parameters are known: rename "
                "that module first"
            )
        is_lazy = isinstance(parameter, nn.parameter.UninitializedParameter)
        if not is_lazy and parameter.is_inference():
            raise ValueError(f"{name} is an inference tensor, which cannot be trained: copy it")


def _check_has_modules(model: nn.Module) -> None:
    """Checks that a model has modules that targets can name.

    Raises:
        ValueError: it has none; a layer alone has to be put into a model.
    """
    if first_names(model):
        return
    kind = type(model).__name__
    try:
        _builder(model)
    except UnsupportedLayerError:
        raise ValueError(f"{kind} has no layers within that LoRA could adapt") from None
    raise ValueError(
        f"{kind} is itself a layer, and has none within that a target could name: put it into a "
        "model, such as nn.Sequential, and name it there, as '0'"
    )


def _by_first_name(
    model: nn.Module, settings: Mapping[str, LayerSettings]
) -> dict[str, LayerSettings]:
    """The settings by the first names of the modules, which may have several."""
    first, own = first_names(model), dict[str, LayerSettings]()
    for name, of_module in settings.items():
        if own.setdefault(first.get(name, name), of_module) != of_module:
            raise ValueError(
                f"{name} is one module with {first[name]}, which is to be adapted in another way"
            )
    return own


def _with_output_projections(
    model: nn.Module, names: Iterable[str], exclude: Iterable[Target]
) -> list[str]:
    """The names with those of attentions' out_proj after their own, where not left out."""
    complete: dict[str, None] = {}
    for name in names:
        complete[name] = None
        out_proj = f"{name}.out_proj"
        is_attention = isinstance(model.get_submodule(name), nn.MultiheadAttention)
        if is_attention and not is_any(out_proj, exclude):
            complete[out_proj] = None
    return list(complete)


def _check_module(name: str, module: nn.Module, settings: LayerSettings) -> None:
    """Checks that a module can be adapted, and with these settings.

    Raises:
        ValueError, UnsupportedLayerError: it cannot; the message names it.
    """
    if isinstance(module, LoRALayer) and module.r > 0:
        raise ValueError(f"{name} has LoRA already: remove_lora first, or exclude it")
    try:
        _builder(module)
    except UnsupportedLayerError as error:
        inner = _layers_within(name, module)
        instead = f"name those within, such as {inner}, or exclude it" if inner else "exclude it"
        raise UnsupportedLayerError(f"{name} is a {error}: {instead}") from None
    own = sorted(vars(module).keys() & _OF_LORA_LAYERS)
    if own and not isinstance(module, LoRALayer):
        raise UnsupportedLayerError(
            f"{name} has an attribute '{own[0]}', as LoRA's layers have it for theirs: exclude it"
        )
    if has_own_forward(module):
        raise UnsupportedLayerError(
            own_forward_message(
                name,
                module,
                "as a device map's hooks give it: adapt the model before it is dispatched",
                "set on it, which would compute without LoRA",
            )
        )
    found = (module._parameters.get(part) for part in _weight_names(module))
    weights = [weight for weight in found if weight is not None]
    if not weights or any(isinstance(w, nn.parameter.UninitializedParameter) for w in weights):
        raise UnsupportedLayerError(f"{name} has no weight that is a plain parameter: exclude it")
    for weight in weights:
        if weight.is_complex():
            raise UnsupportedLayerError(
                f"{name} has complex weights ({weight.dtype}), which have no LoRA: exclude it"
            )
        if reason := quantized(weight):
            raise UnsupportedLayerError(f"the weight of {name} is {reason}: exclude {name}")
        _check_settings(name, module, weight, settings)


def _layers_within(name: str, block: nn.Module) -> str:
    """The linear layers within a block, as targets; empty where there are none."""
    last = name.rpartition(".")[2]
    within = [each for each, module in block.named_modules() if each and is_linear(module)]
    return listed(f"{last}.{each}" for each in within)


def _weight_names(module: nn.Module) -> tuple[str, ...]:
    if isinstance(module, nn.MultiheadAttention):
        return "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"
    return ("weight",)


def _out_in(module: nn.Module, weight: Tensor) -> tuple[int, int]:
    """The sizes of a weight as a matrix (out, in)."""
    out, inner = weight.shape[0], math.prod(weight.shape[1:])
    return (inner, out) if _is_conv1d(module) else (out, inner)


def _check_trained(model: nn.Module, trained: Iterable[str], adapted: Iterable[str]) -> None:
    """Checks that no module that is trained as it is shares a weight with one that is not.

    Nor with one that is adapted.
    """
    frozen = {name: set(model.get_submodule(name).parameters(recurse=False)) for name in adapted}
    whole_parts: set[nn.Module] = set()
    for whole in trained:
        whole_parts.update(model.get_submodule(whole).modules())
    for whole in trained:
        parts = set(model.get_submodule(whole).parameters())
        others = _sharing(model, parts, whole_parts)
        if others:
            raise ValueError(
                f"{whole} shares a weight with {', '.join(others)}, which would be trained as "
                "well: name all of them in modules_to_train, or none"
            )
        for name, own in frozen.items():
            if own & parts:
                raise ValueError(
                    f"{whole} cannot be trained as it is while {name} is adapted, whose weight is "
                    "frozen: leave one of them out"
                )


def _sharing(
    model: nn.Module, parameters: set[nn.Parameter], but_for: Collection[nn.Module]
) -> list[str]:
    """The names of the modules, but for some, that have one of these parameters."""
    return [
        name
        for name, module in model.named_modules()
        if module not in but_for and parameters & {*module._parameters.values()}
    ]


def _check_rank(name: str, module: nn.Module, own: LayerSettings) -> None:
    for part in _weight_names(module):
        weight = module._parameters.get(part)
        if weight is not None:
            out, inner = _out_in(module, weight)
            smallest = min(out // len(own.enable_lora), inner)
            if own.r > smallest:
                raise ValueError(f"r = {own.r} is larger than a dimension of {name}: {smallest}")


def _check_rows(name: str, module: nn.Module, own: LayerSettings) -> None:
    """Checks that the weight's rows have a direction, if DoRA is to adapt it."""
    if not variant_of(own.variant).has_magnitude:
        return
    is_in_out = isinstance(module, nn.Embedding) or _is_conv1d(module)
    for part in _weight_names(module):
        weight = module._parameters.get(part)
        if weight is None or weight.is_meta:
            continue
        rows = weight.detach().t() if is_in_out else weight.detach().flatten(1)
        if not rows.any(dim=1).all():
            raise ValueError(
                f"{name} has rows of zeros in its {part}, which have no direction for "
                f"{own.variant}: exclude it, or choose another variant"
            )


def _check_settings(name: str, module: nn.Module, weight: Tensor, own: LayerSettings) -> None:
    out, _ = _out_in(module, weight)
    slices = len(own.enable_lora)
    if slices > 1 and not (isinstance(module, nn.Linear) or _is_conv1d(module)):
        raise ValueError(f"{name} is not a linear layer, whose slices enable_lora could mean")
    if not any(own.enable_lora) or out % slices:
        raise ValueError(
            f"enable_lora {list(own.enable_lora)} does not fit {name}: it has to enable some of "
            f"the equal slices of {out} outputs"
        )
    if not isinstance(own.r, int) or own.r < 1:
        raise ValueError(f"r, the rank, has to be an integer of at least 1, got {own.r!r} ({name})")
    as_number(f"{name}: lora_alpha", own.lora_alpha, *ABOVE_0)
    if own.lora_dropout == 1:
        raise ValueError("lora_dropout 1 drops all of an update's input: nothing would be trained")
    if isinstance(module, nn.Embedding):
        Embedding.check_update(module.max_norm, own.freeze_A, own.initialization)
    LoRALayer(**{**own.of_layer(), "merge_weights": False})  # its own checks of the settings


def _check_owner(model: nn.Module, name: str) -> None:
    """Checks that a module does not belong to an attention with a forward of its own.

    An `nn.MultiheadAttention` computes with the weights of its out_proj, so that it becomes another
    class where that is adapted.
    """
    owner = model.get_submodule(name.rpartition(".")[0])
    if not isinstance(owner, nn.MultiheadAttention) or isinstance(owner, MultiheadAttention):
        return
    has_own_forward = type(owner).forward is not nn.MultiheadAttention.forward
    if has_own_forward or _of_its_own(type(owner), nn.MultiheadAttention):
        raise UnsupportedLayerError(
            f"{name} belongs to a {type(owner).__qualname__}, which computes with its weight in a "
            "way of its own: exclude it"
        )


def _check_dropout(model: nn.Module, name: str, own: LayerSettings) -> None:
    """Checks that the projections of an attention, which takes their weights, have no dropout."""
    owner = model.get_submodule(name.rpartition(".")[0])
    for module, what in ((model.get_submodule(name), "is"), (owner, "belongs to")):
        if isinstance(module, nn.MultiheadAttention) and own.lora_dropout:
            raise ValueError(
                f"{name} {what} an nn.MultiheadAttention, whose update takes no dropout: set "
                "lora_dropout to 0, or exclude it"
            )


def _check_tied(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Checks that no other module has the weight of one that is to be adapted."""
    owners: dict[Tensor, dict[int, str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(parameter, {})[id(module)] = name
    for name, module in modules.items():
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            others = [other for key, other in owners[parameter].items() if key != id(module)]
            if others:
                raise ValueError(
                    f"{name} shares its weight with {others[0]}; an update of one of them is not "
                    "the other's, and merging it unties them: exclude it, or say untie=True"
                )
