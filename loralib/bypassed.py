"""Finds layers and stacks that a model bypasses: it computes with their weights itself.

An update is part of what its layer computes, and not of its `weight`. So it has no effect where a
model reads the weight: `F.linear(x, self.qkv.weight)` in a module's forward is the plain layer's
product. Such reads are found in the source of that forward, and reported only if nothing in it may
also call the layer. The same goes for a stack of matrices, whose update exists only while the
forward of the module that owns the stack runs.

A layer may be called and read as well, by forward or by a method such as `training_step`. Then part
of what the model computes has the update, and merging changes the outputs.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from types import CodeType, FunctionType
from typing import NamedTuple

from torch import nn

from .in_place import original_class
from .module_names import first_names
from .sources import (
    ANY,
    ASKED,
    Chain,
    Use,
    function_of,
    used_in_forward,
    uses_from,
    uses_of,
    uses_reached,
)
from .stacks import stack_named
from .wrappers import has_own_forward

# The attributes of a variable that a function uses, by its code and the variable's name.
_Known = dict[tuple[CodeType, str], list[Use]]

# Attributes of a weight that are read without computing with it, or written to (`data`).
_ABOUT = {
    *("data", "device", "dim", ASKED, "element_size", "grad", "is_contiguous", "is_cuda"),
    *("is_floating_point", "is_meta", "itemsize", "layout", "ndim", "nelement", "new_empty"),
    *("new_full", "new_ones", "new_tensor", "new_zeros", "numel", "requires_grad"),
    *("requires_grad_", "shape", "size", "stride"),
}

_WITH_A_WEIGHT = "_conv_forward"  # PyTorch's method that computes with a weight that it is given


class _Read(NamedTuple):
    """A module's forward that computes with the weight of a layer, or with a stack, itself.

    Args:
        name: the name of the layer or stack.
        kind: the name of the class of the module, which is around the layer.
        depth: how many modules are around that module.
        may_call: whether that forward, or another module, may also call the layer.
        does_both: whether that forward does both, under no condition.
    """

    name: str
    kind: str
    depth: int
    may_call: bool
    does_both: bool


def bypassed(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Returns the layers and stacks with whose weights a module computes without calling them.

    That module contains the layer, or the module that owns the stack. Weights that a class reads
    in another way than as `self.name.weight` or `self.names[i].weight`, or by a variable that holds
    a part of these, or without its source, are not found.

    Args:
        model: the model.
        names: the names of the layers and stacks to look at.

    Returns:
        The name of each bypassed layer or stack -> the name of that module's class.
    """
    return {read.name: read.kind for read in _reads(model, names) if not read.may_call}


def called_and_read(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Returns the layers that may be called, but with whose weights a module computes as well.

    An example is an output layer that multiplies by the embedding's weight. Layers other than
    embeddings count only if the module's forward does both under no condition: many models do one
    or the other, depending on their settings.

    Args:
        model: the model.
        names: the names of layers and stacks, of which the layers are looked at.

    Returns:
        The name of each such layer -> the name of that module's class, or of an attribute's class
        or function, see `_read_by_attributes`.
    """
    names = [name for name in names if stack_named(model, name) is None]
    reads = [*_reads(model, names)]
    never_called = {read.name for read in reads if not read.may_call}
    embeddings = {
        name
        for name in names
        if isinstance(model.get_submodule(name), nn.Embedding) and name not in never_called
    }
    by_forward = {
        read.name: read.kind for read in reads if read.does_both or read.name in embeddings
    }
    by_methods = _read_by_methods(model, embeddings)
    return by_forward | by_methods | _read_by_attributes(model, embeddings)


def _read_by_methods(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Returns the layers with whose weights a method of a module computes.

    The method may be another than forward, such as a `training_step`, if it, or a method that it
    calls, calls forward or a module. It may find the layer by any path: the layer may have a second
    name in the model, or be in a list that the model does not know.

    Returns:
        The name of each such layer -> the name of the module's class.
    """
    layers = {id(model.get_submodule(name)): name for name in names}
    found, of_kind = dict[str, str](), dict[int, list[_Method]]()
    for module in model.modules() if layers else ():
        kind = original_class(module)
        if id(kind) not in of_kind:
            of_kind[id(kind)] = _methods_that_use(kind, "weight")
        for method in of_kind[id(kind)]:
            read = {id(each) for chain in method.used for each in _owners_of_weight(module, chain)}
            if read & layers.keys() and _calls_a_module(module, method):
                found |= {layers[each]: kind.__qualname__ for each in read & layers.keys()}
    return found


def stacks_read_elsewhere(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Returns the stacks with which their module computes in a method that its forward never calls.

    The method, such as a `loss`, or one that it calls, calls a module. Of a module whose forward
    may call methods that are not seen in its source, no stacks are returned.

    Returns:
        The name of each such stack -> the name of its module's class.
    """
    found = dict[str, str]()
    for name in names:
        stack = stack_named(model, name)
        if stack is None:
            continue
        kind = original_class(stack.owner)
        reached = uses_reached(kind, "forward")
        if not all(uses.are_all for uses in reached.values()):
            continue
        for method in _methods_that_use(kind, stack.parameter, reached):
            reads = [chain for chain in method.used if chain[0] == stack.parameter]
            computes = any(not _is_only_asked(chain, 0) for chain in reads)
            if computes and _calls_a_module(stack.owner, method):
                found[name] = kind.__qualname__
    return found


class _Method(NamedTuple):
    """What a method of a class, and those that it calls, do with `self`; without forward.

    Args:
        used: the attributes that they use.
        called: those that they call, and the method itself.
    """

    used: list[Chain]
    called: list[Chain]


def _methods_that_use(kind: type, attribute: str, but_for: Collection[str] = ()) -> list[_Method]:
    """Returns the methods of a class that use an attribute of this name, of any object.

    A method that calls such a method counts as well.

    Args:
        kind: the class.
        attribute: the attribute's name.
        but_for: the names of methods to leave out.
    """
    own = {name for each in kind.__mro__ for name in vars(each)}
    functions = {name: function_of(inspect.getattr_static(kind, name, None)) for name in own}
    used = {name: _names_in(each.__code__) for name, each in functions.items() if each is not None}
    names = [name for name in used if attribute in used[name]]
    for name in names:
        names += [each for each in used if name in used[each] and each not in names]
    found = []
    for name in sorted(names):
        if name in but_for or (name.startswith("__") and name != "__call__"):
            continue
        reached = uses_reached(kind, name, without=["forward"]).values()
        uses = [use for each in reached for use in each.found]
        called = [(name,), *(use.chain for use in uses if use.is_called)]
        found.append(_Method([use.chain for use in uses], called))
    return found


def _names_in(code: CodeType) -> set[str]:
    """Returns the names of attributes and globals in code, and in the functions within it."""
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return {*code.co_names}.union(*map(_names_in, inner))


def _calls_a_module(module: nn.Module, method: _Method) -> bool:
    called = (each for chain in method.called for each in _values(module, chain))
    return ("forward",) in method.called or any(isinstance(each, nn.Module) for each in called)


def _read_by_attributes(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Returns the layers with whose weights an attribute of a module computes.

    Such an attribute is a function, as in ``self.head = lambda x: x @ self.words.weight.t()``, or
    an object that is no module, has the layer as an attribute, and can be called.

    Returns:
        The name of each such layer -> the name of the function, or of the object's class.
    """
    layers = {id(model.get_submodule(name)): name for name in names}
    values = (value for module in model.modules() for value in vars(module).values())
    found, known = dict[str, str](), _Known()
    for value in filter(callable, values) if layers else ():
        for begin, chain in _used_in_call(value, known):
            kind = value if type(value) is FunctionType else type(value)
            owners = {id(owner) for owner in _owners_of_weight(begin, chain)}
            found |= {layers[owner]: kind.__qualname__ for owner in owners & layers.keys()}
    return found


def _used_in_call(value: object, known: _Known) -> Iterator[tuple[object, Chain]]:
    """Yields the attributes that a call of a function or an object uses, with what has them.

    Args:
        value: the function or object. Nothing of it is run.
        known: what is known from earlier calls. A cache that outlives the model would keep the
            model alive, which the variables of a function may refer to.
    """
    if type(value) is FunctionType:
        code = value.__code__
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            if (code, name) not in known:
                known[code, name] = uses_from(value, (name,)).found
            with suppress(ValueError):  # nothing is assigned to this variable yet
                yield from ((cell.cell_contents, use.chain) for use in known[code, name])
    else:
        call = inspect.getattr_static(type(value), "__call__", None)
        if type(call) is FunctionType:
            yield from ((value, use.chain) for use in uses_of(call).found)


def _owners_of_weight(begin: object, chain: Chain) -> list[object]:
    """Returns the objects with whose `weight` code computes that uses this chain.

    There are several if the chain has a computed index, and none if it has no `weight`.
    """
    if "weight" not in chain:
        return []
    at = chain.index("weight")
    return [] if _is_only_asked(chain, at) else _values(begin, chain[:at])


def _is_only_asked(chain: Chain, at: int) -> bool:
    """Returns whether code with this chain does not compute with the weight at this place in it."""
    return not _ABOUT.isdisjoint(chain[at + 1 : at + 2])


def _values(begin: object, chain: Chain) -> list[object]:
    """Returns what a chain of attributes may lead to, without running code."""
    values = [begin]
    for name in chain:
        values = [each for value in values for each in _attributes(value, name)]
    return values


def _attributes(owner: object, name: str) -> list[object]:
    """Returns an attribute that an object has itself, or a module's child, or items of a list."""
    if isinstance(owner, list | tuple):
        if name == ANY:
            return [*owner]
        return [owner[int(name)]] if name.isdigit() and int(name) < len(owner) else []
    try:
        own = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return []
    children = own.get("_modules")
    held = {**own, **children} if isinstance(children, dict) else own
    if name == ANY:
        return [*children.values()] if isinstance(children, dict) else []
    return [held[name]] if name in held else []


def read_from_outside(model: nn.Module, part: str) -> dict[str, str]:
    """Returns the modules in a part of a model whose parameters a module around that part reads.

    Args:
        model: the model.
        part: the part's name.

    Returns:
        The name of each such module -> the name of the other module's class.
    """
    names = [name for name, _ in model.named_modules() if f"{name}.".startswith(f"{part}.")]
    depth = len(part.split("."))
    reads = _reads(
        model, names, lambda each: (*each._parameters, *getattr(each, "parametrizations", ()))
    )
    return {read.name: read.kind for read in reads if read.depth < depth}


def weight_names(module: nn.Module) -> tuple[str, ...]:
    """Returns how a layer that has an update may call the parameters that are its weights."""
    if isinstance(module, nn.MultiheadAttention):
        return "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"
    return ("weight",)


def _reads(
    model: nn.Module,
    names: Iterable[str],
    weights_of: Callable[[nn.Module], tuple[str, ...]] = weight_names,
) -> Iterator[_Read]:
    """Yields which of these layers and stacks are read by which modules around them.

    Args:
        model: the model.
        names: the names of the layers and stacks.
        weights_of: returns the names of the parameters of a layer that count.
    """
    places = Counter(first_names(model).values())
    modules = dict(model.named_modules())
    used: dict[int, list[Use]] = {}  # by the id of the class, which may be unhashable
    for name in names:
        parts = name.split(".")
        is_layer = stack_named(model, name) is None
        weights = weights_of(modules[name]) if is_layer else (parts.pop(),)
        kinds = [original_class(modules[".".join(parts[:at])]) for at in range(len(parts) + 1)]
        is_elsewhere = places[".".join(parts)] != 1
        for at, kind in enumerate(kinds[:-1]):
            if id(kind) not in used:
                used[id(kind)] = used_in_forward(kind)
            if has_own_forward(modules[".".join(parts[:at])]):
                continue
            part = tuple(parts[at:])
            near = [use for use in used[id(kind)] if use.chain[0] == part[0]]
            reads = [use for use in near if _reads_one(use.chain, part, weights)]
            computing = [use for use in reads if not _is_only_asked(use.chain, len(part))]
            if computing:
                others = [use for use in near if use not in reads]
                calls = {use.is_certain for use in others if use.is_called and _is_part(use, part)}
                may_call = any(_may_call(use.chain, part, kinds[at + 1 :]) for use in others)
                exact = [use for use in computing if use.chain[: len(part)] == part]
                does_both = True in calls and any(use.is_certain for use in exact)
                yield _Read(name, kind.__qualname__, at, may_call or is_elsewhere, does_both)


def _reads_one(chain: Chain, part: Chain, weights: Iterable[str]) -> bool:
    """Returns whether a chain begins with one of a submodule's weights."""
    return any(_begins_with(chain, (*part, weight)) for weight in weights)


def _is_part(use: Use, part: Chain) -> bool:
    """Returns whether a submodule itself, or its forward, is used, and not one of several."""
    chain = use.chain[:-1] if use.chain[-1] == "forward" else use.chain
    return chain == part


def _may_call(chain: Chain, part: Chain, kinds: list[type]) -> bool:
    """Returns whether a chain is the submodule, a module on its path, or a method of these.

    Args:
        chain: attributes that a forward uses.
        part: the submodule's path: the names of the modules on the way to it, and its own.
        kinds: the classes of these modules.
    """
    # A number is the place of a module, whose name may be another.
    chain = tuple(ANY if name.isdigit() else name for name in chain)
    for length, kind in enumerate(kinds, 1):
        if not _begins_with(chain, part[:length]):
            return False
        if length == len(chain):
            return True
        is_method = hasattr(inspect.getattr_static(kind, chain[length], None), "__get__")
        if is_method and chain[length] != _WITH_A_WEIGHT:
            return True
    return False


def _begins_with(chain: Chain, path: Chain) -> bool:
    """Returns whether a chain begins with the names of this path, of which ANY may be each."""
    pairs = zip(chain, path, strict=False)
    return len(chain) >= len(path) and all(used in (name, ANY) for used, name in pairs)
