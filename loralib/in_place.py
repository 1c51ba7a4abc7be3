"""Turns modules into LoRA layers in place, and back into plain modules.

A converted module has another class, and has got the attributes of that class. It stays the same
object: it keeps its tensors, hooks and names, and references to it stay valid.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn
from torch.nn.utils import parametrize

from .adapted_layers import AdaptedProjection, owner_of_weight
from .lora_layer import LoRALayer, is_update_computed, lora_layers
from .module_names import joined
from .quantized_layers import keep_unpacked, let_pack
from .wrappers import contains, drop_leftover_forward, has_own_forward, own_forward_message

# The attribute of a module that holds the names of its children that have been adapted.
_CHILDREN = "_adapted_children"


class _Conversion(NamedTuple):
    """A converted module's record: its former class, and the attributes that were added to it."""

    before: type[nn.Module]
    added: frozenset[str]


@contextmanager
def recording_additions(module: nn.Module) -> Iterator[None]:
    """Records which attributes a module gets in this block, so that `restore` can remove them.

    Attributes that a user sets on it later are not recorded, and stay.
    """
    names = own_names(module)
    try:
        yield
    finally:
        if was_converted(module):
            conversion = vars(module)["_converted"]
            added = conversion.added | (own_names(module) - names)
            vars(module)["_converted"] = conversion._replace(added=added)


def convert_in_place(module: nn.Module, kind: type[nn.Module]) -> None:
    """Changes a module's class, in a `recording_additions` block that adds what the class needs."""
    drop_leftover_forward(module)
    before = unparametrized_class(module)
    set_class(module, kind)
    vars(module)["_converted"] = _Conversion(before, frozenset())


def restore(module: nn.Module) -> None:
    """Gives a module its former class again, without what `recording_additions` has recorded."""
    drop_leftover_forward(module)
    conversion = vars(module)["_converted"]
    for attributes in _attributes(module):
        for name in attributes.keys() & conversion.added:
            del attributes[name]
    set_class(module, conversion.before)


def was_converted(module: nn.Module | LoRALayer) -> bool:
    """Returns whether a module was converted: it was plain before it was adapted."""
    return "_converted" in vars(module)


def unparametrized_class(module: nn.Module) -> type[nn.Module]:
    """Returns a module's class, without the subclass that PyTorch's parametrizations give it."""
    return type(module).__bases__[0] if _has_class_over(module) else type(module)


def can_be_converted(kind: type[nn.Module]) -> bool:
    """Returns whether Python lets modules of a class change to a class of this package.

    It does not if the class has `__slots__`, or `abc.ABC` or `Generic` before PyTorch's class.
    """
    empty = nn.Module.__new__(nn.Module)
    try:
        object.__setattr__(empty, "__class__", kind)
    except TypeError:
        return False
    object.__setattr__(empty, "__class__", nn.Module)  # so that the class's `__del__` is not called
    return True


def set_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Replaces a module's class under its parametrizations, if it has any."""
    if _has_class_over(module):
        over = {n: v for n, v in vars(type(module)).items() if n not in ("__dict__", "__weakref__")}
        kind = type(f"Parametrized{kind.__name__}", (kind,), over)
    module.__class__ = kind


def _has_class_over(module: nn.Module) -> bool:
    """Returns whether PyTorch's parametrizations have given a module such a subclass.

    A user's class can look alike: it may have a child called `parametrizations`, and properties.
    """
    theirs = vars(type(module)).get("__getstate__")  # a metaclass may change a class's __module__
    return getattr(theirs, "__module__", None) == parametrize.__name__


def original_class(module: nn.Module) -> type[nn.Module]:
    """Returns a module's class, the former one if the module was converted."""
    return vars(module)["_converted"].before if was_converted(module) else type(module)


def is_in_place(module: nn.Module | LoRALayer) -> bool:
    """Returns whether this LoRA layer was made by adapting a model's module, as by `add_lora`."""
    return was_converted(module) or isinstance(module, AdaptedProjection)


def _attributes(module: nn.Module) -> tuple[dict, ...]:
    return vars(module), module._parameters, module._buffers, module._modules


def own_names(module: nn.Module) -> frozenset[str]:
    """Returns the names of a module's own attributes, parameters, buffers and children."""
    return frozenset().union(*_attributes(module))


def merge_in_place(model: nn.Module) -> None:
    """Restores a model's converted modules, with their updates merged into new weights.

    Raises:
        ValueError: as `restore_all`.
    """
    _check_restorable(model)  # first, as a weight that is read below may be gone
    parts = model.modules()
    layers: list[Any] = [m for m in parts if isinstance(m, LoRALayer) and is_in_place(m)]
    merged = [
        (layer.base, layer.frozen_name, layer._merged_parameter())
        for layer in layers
        if layer.r > 0
    ]
    restore_all(model)
    for base, name, parameter in merged:
        setattr(base, name, parameter)


def restore_all(model: nn.Module) -> None:
    """Restores a model's converted modules, and undoes `disable_fast_paths`.

    Raises:
        ValueError: since a module was adapted, its weight or update has been parametrized or
            pruned, or it has got a forward of its own.
    """
    _check_restorable(model)
    for module in list(model.modules()):
        vars(module).pop(_CHILDREN, None)
        if was_converted(module):
            restore(module)
    restore_fast_paths(model)


def _check_restorable(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if not is_in_place(module) or not isinstance(module, LoRALayer):
            continue
        base = module.base
        is_plain = module.r == 0 or base._parameters.get(module.frozen_name) is not None
        if not is_plain or is_update_computed(module):
            raise ValueError(
                f"{name or 'the layer'} has been parametrized or pruned since it was adapted: "
                "undo that first (parametrize.remove_parametrizations, prune.remove)"
            )
        if has_own_forward(base):
            raise ValueError(
                own_forward_message(
                    owner_of_weight(name, module),
                    base,
                    "as set by hooks that offload weights: remove these first (accelerate's "
                    "remove_hook_from_submodules)",
                    "set since it was adapted, which may still call the LoRA layer after it is "
                    "removed",
                )
            )


def note_adapted(model: nn.Module, names: Iterable[str]) -> None:
    """Notes, in the modules around them, which modules have been adapted."""
    for name in names:
        owner, _, last = name.rpartition(".")
        vars(model.get_submodule(owner)).setdefault(_CHILDREN, set()).add(last)


def replaced(model: nn.Module) -> list[str]:
    """Returns the names of modules that have been put in place of adapted ones, without LoRA.

    Where children have only moved, as in an `nn.Sequential` with a new first module, none is.
    """
    found = []
    for owner, module in model.named_modules():
        noted: set[str] = vars(module).get(_CHILDREN, set())
        children = {name: child for name, child in module._modules.items() if child is not None}
        lost = [n for n in sorted(noted & children.keys()) if not contains(children[n], LoRALayer)]
        moved = [n for n in children.keys() - noted if isinstance(children[n], LoRALayer)]
        if len(lost) > len(moved):
            found += [joined(owner, name) for name in lost]
    return found


# ---- PyTorch's own encoder ----

# In evaluation these compute with their children's weights, and would ignore an update.
# Class -> the attribute that disables this fast path, and the value that does so.
_FAST_PATH: dict[type[nn.Module], tuple[str, object]] = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}


def disable_fast_paths(model: nn.Module) -> None:
    """Disables the fast path of PyTorch's encoders that contain LoRA, so they call their children.

    Also keeps the quantized layers of a model with LoRA off the fast path of bitsandbytes.
    """
    if lora_layers(model):
        keep_unpacked(model)
    for module in model.modules():
        for kind, (name, off) in _FAST_PATH.items():
            if not isinstance(module, kind) or "_fast_path" in vars(module):
                continue
            if contains(module, LoRALayer):
                vars(module)["_fast_path"] = getattr(module, name)
                setattr(module, name, off)


def restore_fast_paths(model: nn.Module) -> None:
    """Undoes `disable_fast_paths`, for PyTorch's encoders and for quantized layers."""
    let_pack(model)
    for module in model.modules():
        for kind, (name, _) in _FAST_PATH.items():
            if isinstance(module, kind) and "_fast_path" in vars(module):
                setattr(module, name, vars(module).pop("_fast_path"))
