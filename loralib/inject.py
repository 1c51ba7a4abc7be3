"""LoRA in an existing model: `add_lora` adapts layers in place, `remove_lora` undoes it.

    names = lora.add_lora(model, targets=["q_proj", "v_proj"], r=8, lora_alpha=16)

The modules stay the same objects with the same tensors, which are neither copied nor initialized
again. Names in the state dict stay, and `….lora_A` and `….lora_B` are added. The base is frozen.

    in the model                  becomes                         its update
    nn.Linear                     Linear, MergedLinear by slices
    Conv1D of Hugging Face GPT-2  the same, with fan_in_fan_out
    nn.Embedding                  Embedding
    nn.Conv1d, 2d, 3d             AdaptedConv1d, 2d, 3d           A a convolution, B one of 1 × 1
    nn.MultiheadAttention         MultiheadAttention              of in_proj; out_proj is a Linear
    a quantized linear layer      the same, and a Linear or       in float32 beside the layer's own
                                  MergedLinear as well            product, see quantized_layers.py
    a stack of matrices, as of    a frozen parameter beside an    one of each matrix, see experts.py
    the experts of a mixture      AdaptedStack
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .adaptation import (
    LayerSettings,
    adapt_stack,
    builder_of,
    convert_attention,
    drop_stack,
)
from .arguments import (
    as_dropout,
    as_flag,
    as_flags,
    as_python,
    check_model,
    check_not_scripted,
    refusing_keywords,
)
from .in_place import (
    disable_fast_paths,
    is_in_place,
    note_adapted,
    recording_additions,
    restore,
    restore_all,
    was_converted,
)
from .inject_checks import (
    check_adaptable,
    check_has_modules,
    check_module,
    check_rank,
    check_rows,
    check_stack,
    check_tied,
)
from .inject_warnings import (
    warn_of_half_precision,
    warn_of_kinds,
    warn_of_no_initialization,
    warn_of_no_parameters,
    warn_of_reads,
    warn_of_targets,
    warn_of_task_heads,
    warn_of_trained_before,
)
from .lora_layer import LoRALayer, lora_layers
from .model_checks import check_no_peft_layers, check_whole
from .modules_to_train import (
    check_has_parameters,
    check_none_trained,
    check_trained,
    trained_as_wholes,
)
from .stacks import Stack, stack_named, stacked_weights
from .steps import forget_steps, note_name
from .targets import (
    Target,
    as_layers,
    as_targets,
    by_pattern,
    check_exclusions,
    find,
    first_names_of_targets,
    is_any,
)
from .text import module_label
from .trained import forget_frozen, forget_weights, note_trained
from .utils import check_bias, freeze_base, train_biases
from .zero3 import with_shapes

_VARIANT = "variant ('lora', 'rslora', 'dora' or 'rslora+dora')"
# What PEFT and others call the arguments of `add_lora`.
_OTHER_LIBRARIES_NAMES = {
    "target_modules": "targets",
    "target_parameters": "targets",
    "exclude_modules": "exclude",
    "layers_to_transform": "layers",
    "modules_to_save": "modules_to_train",
    "init_lora_weights": "initialization ('default' for True)",
    "use_rslora": _VARIANT,
    "use_dora": _VARIANT,
    "rank": "r",
    "lora_r": "r",
    "lora_rank": "r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
}


@refusing_keywords(_OTHER_LIBRARIES_NAMES)
def add_lora(
    model: nn.Module,
    targets: Target | Iterable[Target],
    r: int = 8,
    lora_alpha: float = 16,
    lora_dropout: float = 0.0,
    *,
    exclude: Target | Iterable[Target] = (),
    layers: Iterable[int] | None = None,
    rank_pattern: Mapping[Target, int] | None = None,
    alpha_pattern: Mapping[Target, float] | None = None,
    bias: str = "none",
    modules_to_train: Target | Iterable[Target] | None = None,
    variant: str = "lora",
    initialization: str = "default",
    freeze_A: bool = False,
    enable_lora: Mapping[Target, Sequence[bool]] | None = None,
    untie: bool = False,
) -> tuple[str, ...]:
    """Gives modules of a model a low-rank update each, in place, and freezes the rest.

    Args:
        model: any model made of PyTorch's layers. In half precision the updates are float32. A
            module that it uses in several places has one update, under the first of its names.
        targets: the modules to adapt, see `loralib.targets`, which also says which layer
            "all-linear" takes for the head and leaves out. An `nn.MultiheadAttention` is adapted
            with its out_proj, unless that is excluded. A target that matches no module with
            parameters of its own can match parameters that are stacks of matrices, such as
            "experts.down_proj". These cannot have dropout or DoRA. Linear layers with quantized
            weights of the known kinds cannot have DoRA or an initialization that is made from the
            weight, and cannot be merged.
        r: rank of the updates.
        lora_alpha: the updates are scaled by lora_alpha / r, or as the variant has it.
        lora_dropout: dropout on the updates' input. Embeddings, whose input is row numbers, have
            none, as in PEFT.
        exclude: which of these modules to leave out. Each exclusion has to match a module, and not
            only a block around these.
        layers: the numbers of the layers to adapt, such as [0, 1] or range(6, 12).
        rank_pattern: another r for some modules, by target. If several patterns match, the first
            one counts.
        alpha_pattern: likewise, another lora_alpha.
        bias: which biases are trained as well, as for `mark_only_lora_as_trainable`.
        modules_to_train: modules that are trained themselves, without LoRA, such as a new head. An
            empty list says that the task head of a Hugging Face model is meant to stay frozen.
        variant: a name in `loralib.functional.VARIANTS`: "lora", "rslora", "dora", "rslora+dora".
        initialization: a name in `loralib.initialization.INITIALIZATIONS`.
        freeze_A: trains only B (LoRA-FA).
        enable_lora: by target, which of the equal slices of a linear layer's output are adapted,
            for layers that combine several projections.
        untie: also adapts a module whose weight is tied to another's (an embedding and its head).
            The update then applies to that module only, and merging unties the two. By default
            this is an error.

    If you load weights afterwards, and the variant (DoRA) or the initialization (pissa, olora)
    depends on them, call `start_from_weights` then.

    Returns:
        The names of the modules that have new updates. The update of a stack,
        ``experts.down_proj``, is in a module beside it, ``experts.down_proj_lora``. A second call
        adds updates, and what is trainable stays so.

    Raises:
        ValueError: a target or a pattern matches nothing; a target matches a module that has LoRA
            already; an exclusion matches nothing, or only a block around targets; a setting has the
            wrong type, or is out of range; a rank is larger than a dimension of its weight; DoRA is
            to adapt a weight with rows of zeros; a module is both adapted and in modules_to_train,
            also of an earlier call; a weight is tied; the model is wrapped (DDP, FSDP, compile),
            has an adapter of PEFT's, or its tensors are inference tensors.
        TypeError: the model is not a module; or an argument is unknown, such as PEFT's
            `target_modules`.
        UnsupportedLayerError: a module cannot have LoRA. Nothing is changed then.
    """
    check_model(model, targets)
    check_not_scripted(model)
    check_no_peft_layers(model)
    check_bias(bias)
    common = LayerSettings(
        r=r,
        lora_alpha=lora_alpha,
        lora_dropout=as_dropout(lora_dropout),
        variant=variant,
        initialization=initialization,
        freeze_A=as_flag("freeze_A", freeze_A),
    )
    untie = as_flag("untie", untie)
    exclude = as_targets(exclude, "exclude")
    to_train = as_targets(() if modules_to_train is None else modules_to_train, "modules_to_train")
    targets = as_targets(targets)
    check_has_modules(model)
    layers = None if layers is None else as_layers(layers)
    with with_shapes(model):
        names = _adapted_names(model, targets, exclude, layers)
        trained = find(model, to_train, with_stacks=False) if to_train else []
        without_parameters = check_has_parameters(model, to_train, trained)
        check_trained(model, trained, [*names, *lora_layers(model)])
        settings = _settings_by_name(
            names, common, rank_pattern, alpha_pattern, enable_lora, stacked_weights(model)
        )
        is_first = not lora_layers(model)
        trained_before = trained_as_wholes(model, names)
        if not is_first:
            check_none_trained(trained_before)
        adapted = adapt(model, settings, untie=untie, rank_pattern=rank_pattern or {})
        if is_first:
            freeze_base(model)
        train_biases(model, bias)
        for name in trained:
            module = model.get_submodule(name).requires_grad_(True)
            note_trained(model, (f"{name}.{inner}" for inner, _ in module.named_parameters()))
        warn_of_trained_before(trained_before)
        warn_of_no_parameters(without_parameters)
        warn_of_half_precision(model, trained)
        warn_of_targets(model, targets, exclude, layers, names)
        if is_first and modules_to_train is None:
            warn_of_task_heads(model)
        warn_of_no_initialization(model, adapted)
        warn_of_reads(model, names)
        if not is_first:
            warn_of_kinds(model)
        return adapted


def _adapted_names(
    model: nn.Module,
    targets: tuple[Target, ...],
    exclude: tuple[Target, ...],
    layers: Iterable[int] | None,
) -> list[str]:
    """Returns the names of the modules to adapt, with the out_proj of each attention."""
    names = find(model, targets, exclude=exclude, layers=layers)
    if exclude:
        every = find(model, targets)
        check_exclusions(model, exclude, _with_output_projections(model, every, ()))
    return _with_output_projections(model, names, exclude)


def _with_output_projections(
    model: nn.Module, names: Iterable[str], exclude: Iterable[Target]
) -> list[str]:
    """Adds the out_proj of each attention, unless excluded, after the attention itself."""
    complete, modules = dict[str, None](), dict(model.named_modules())
    for name in names:
        complete[name] = None
        out_proj = f"{name}.out_proj"
        is_attention = isinstance(modules.get(name), nn.MultiheadAttention)
        if is_attention and not is_any(out_proj, exclude):
            complete[out_proj] = None
    return list(complete)


def _settings_by_name(
    names: Iterable[str],
    common: LayerSettings,
    rank_pattern: Mapping[Target, int] | None,
    alpha_pattern: Mapping[Target, float] | None,
    enable_lora: Mapping[Target, Sequence[bool]] | None,
    stacks: Collection[str],
) -> dict[str, LayerSettings]:
    """Returns the settings of each module and stack: the common ones, unless a pattern matches."""
    ranks = by_pattern(names, rank_pattern or {}, common.r, stacks)
    alphas = by_pattern(names, alpha_pattern or {}, common.lora_alpha, stacks)
    slices = by_pattern(names, _flags_by_pattern(enable_lora), common.enable_lora, stacks)
    return {
        name: replace(
            common,
            r=as_python(ranks[name]),
            lora_alpha=as_python(alphas[name]),
            enable_lora=slices[name],
        )
        for name in names
    }


def _flags_by_pattern(
    enable_lora: Mapping[Target, Sequence[bool]] | None,
) -> Mapping[Target, tuple[bool, ...]]:
    """Returns enable_lora with tuples as values, as the first module would use up an iterator.

    What is not a mapping is returned unchanged, for `by_pattern` to refuse.
    """
    given: Any = {} if enable_lora is None else enable_lora
    if not isinstance(given, Mapping):
        return given
    return {target: as_flags(f"enable_lora of {target}", flags) for target, flags in given.items()}


def adapt(
    model: nn.Module,
    settings: Mapping[str, LayerSettings],
    untie: bool = False,
    from_file: bool = False,
    rank_pattern: Iterable[Target] = (),
) -> tuple[str, ...]:
    """Adapts exactly these modules and stacks of a model, and freezes their weights.

    Args:
        model: the model, which is changed in place.
        settings: the settings of the modules and stacks, by their names.
        untie: as for `add_lora`.
        from_file: allows what adapters in files may have: ranks larger than a dimension of their
            weight, and DoRA on rows of zeros.
        rank_pattern: the targets that gave some of them another rank than the rest, for errors.

    Returns:
        The names of the modules that have new updates. An attention with separate projections has
        its updates in modules `q_proj`, `k_proj`, `v_proj`.

    Raises:
        ValueError, UnsupportedLayerError: as for `add_lora`.
    """
    check_adaptable(model)
    settings = _by_first_name(model, settings)
    stacks = {name: stack for name in settings if (stack := stack_named(model, name)) is not None}
    modules = {name: model.get_submodule(name) for name in settings if name not in stacks}
    for name, stack in stacks.items():
        check_stack(name, stack, settings[name])
    for name, module in modules.items():
        check_module(model, name, settings[name])
        if not from_file:
            check_rows(name, module, settings[name])
    if not from_file:
        check_rank(model, settings, rank_pattern)
    if not untie:
        check_tied(model, settings)
    had_update = set(lora_layers(model))
    if not had_update:
        forget_steps(model)
    _adapt_all(model, modules, stacks, settings)
    disable_fast_paths(model)
    new = {name: layer for name, layer in lora_layers(model).items() if name not in had_update}
    forget_weights(model, (layer.base for layer in new.values()))
    for name, layer in new.items():
        with recording_additions(model.get_submodule(name)):
            note_name(layer, name)
    note_adapted(model, new)
    return tuple(new)


def _adapt_all(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    stacks: Mapping[str, Stack],
    settings: Mapping[str, LayerSettings],
) -> None:
    """Adapts modules, the attentions around them, and stacks: all of them, or none."""
    converted: list[nn.Module] = []
    were_trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for name, module in modules.items():
            converted.append(module)
            with recording_additions(module):
                builder_of(module)(module, settings[name])
        for name, stack in stacks.items():
            with recording_additions(stack.owner):
                adapt_stack(stack, settings[name])
        for name in modules:
            owner = model.get_submodule(name.rpartition(".")[0])
            if isinstance(owner, nn.MultiheadAttention) and not isinstance(owner, LoRALayer):
                converted.append(owner)
                with recording_additions(owner):
                    convert_attention(owner)
    except BaseException as error:  # undo all changes
        for stack in stacks.values():
            drop_stack(stack)
        for module in reversed(converted):
            if was_converted(module):
                restore(module)
        for parameter, was_trained in were_trained:
            parameter.requires_grad = was_trained
        if isinstance(error, torch.linalg.LinAlgError):
            raise ValueError(f"{name}: its weight has no decomposition: {error}") from error
        raise


def _by_first_name(
    model: nn.Module, settings: Mapping[str, LayerSettings]
) -> dict[str, LayerSettings]:
    """Returns the settings by the first name of each module, which may have several names."""
    first, given = first_names_of_targets(model), dict[str, str]()
    for name, of_module in settings.items():
        other = given.setdefault(first.get(name, name), name)
        if settings[other] != of_module:
            raise ValueError(f"{other} and {name} are the same module, but their settings differ")
    return {first_name: settings[name] for first_name, name in given.items()}


def remove_lora(model: nn.Module) -> tuple[str, ...]:
    """Turns a model back into the plain one that it was before `add_lora`, and drops the updates.

    Weights are bit-exact what they were, and stay frozen: `model.requires_grad_(True)` makes all of
    them trainable again. Attributes that were set on a module since then stay, too.

    Args:
        model: the model, or a part of it such as one of its blocks. It is changed in place.

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
            raise ValueError(
                f"{module_label(name)} was built as a LoRA layer, not adapted by add_lora: merge "
                "makes it plain, with its update in its weight; or build the model without LoRA"
            )
    adapted = tuple(lora_layers(model))
    restore_all(model)
    forget_frozen(model)
    forget_steps(model)
    return adapted
