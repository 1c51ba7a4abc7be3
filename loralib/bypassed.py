"""Finds layers and stacks that a model bypasses: it computes with their weights itself.

An update is part of what its layer computes, and not of its `weight`. So it has no effect where a
model reads the weight: `F.linear(x, self.qkv.weight)` in a module's forward is the plain layer's
product. Such reads are found in the source of that forward, and reported only if nothing in it may
also call the layer. The same goes for a stack of matrices, whose update exists only while the
forward of the module that owns the stack runs.
"""

import ast
import functools
import inspect
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn

from .in_place import original_class
from .stacks import stack_named
from .targets import first_names
from .wrappers import has_own_forward

_Chain = tuple[str, ...]
# The attributes of a variable that a function uses, by its code and the variable's name.
_Known = dict[tuple[CodeType, str], list[_Chain]]

# Attributes of a weight that are read without computing with it, or written to (`data`).
_ABOUT = {
    *("data", "device", "dim", "dtype", "element_size", "grad", "is_contiguous", "is_cuda"),
    *("is_floating_point", "is_meta", "itemsize", "layout", "ndim", "nelement", "new_empty"),
    *("new_full", "new_ones", "new_tensor", "new_zeros", "numel", "requires_grad"),
    *("requires_grad_", "shape", "size", "stride"),
}

# Functions that read only their argument's dtype, device or shape, as `x.to(self.qkv.weight)` does.
_AS = {"to", "type_as", "len", "empty_like", "full_like", "ones_like", "zeros_like"}
_AS |= {"rand_like", "randn_like"}

_ANY = "*"  # in a chain: an index, which may be of any of a container's modules

_IS = (ast.Is, ast.IsNot)  # `self.words.weight is None` computes nothing either


class _Read(NamedTuple):
    """A module's forward that computes with the weight of a layer, or with a stack, itself.

    Args:
        name: the name of the layer or stack.
        kind: the name of the class of the module, which is around the layer.
        depth: how many modules are around that module.
        may_call: whether that forward, or another module, may also call the layer.
    """

    name: str
    kind: str
    depth: int
    may_call: bool


def bypassed(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Returns the layers and stacks with whose weights a module computes without calling them.

    That module contains the layer, or the module that owns the stack. Weights that a class reads
    in another way than as `self.name.weight` or `self.names[i].weight`, or without its source, are
    not found.

    Args:
        model: the model.
        names: the names of the layers and stacks to look at.

    Returns:
        The name of each bypassed layer or stack -> the name of that module's class.
    """
    return {read.name: read.kind for read in _reads(model, names) if not read.may_call}


def embeddings_read(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Returns the embeddings that may be called, but with whose weights a module computes as well.

    An example is an output layer that multiplies by the embedding's weight. Of other layers, many
    models do one or the other, depending on their settings.

    Args:
        model: the model.
        names: the names of layers and stacks, of which the embeddings are looked at.

    Returns:
        The name of each such embedding -> the name of that module's class, or of an attribute's
        class or function, see `_read_by_attributes`.
    """
    modules = dict(model.named_modules())
    names = [name for name in names if isinstance(modules.get(name), nn.Embedding)]
    by_forward = {read.name: read.kind for read in _reads(model, names) if read.may_call}
    return by_forward | _read_by_attributes(model, names)


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
            if (owner := id(_owner_of_weight(begin, chain))) in layers:
                kind = value if type(value) is FunctionType else type(value)
                found[layers[owner]] = kind.__qualname__
    return found


def _used_in_call(value: object, known: _Known) -> Iterator[tuple[object, _Chain]]:
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
                known[code, name] = _chains_from(value, (name,)) or []
            with suppress(ValueError):  # nothing is assigned to this variable yet
                yield from ((cell.cell_contents, chain) for chain in known[code, name])
    else:
        call = inspect.getattr_static(type(value), "__call__", None)
        if type(call) is FunctionType:
            yield from ((value, chain) for chain in _chains(call) or ())


def _owner_of_weight(begin: object, chain: _Chain) -> object:
    """Returns the object with whose `weight` code computes that uses this chain, or None."""
    for name, following in pairwise((*chain, "")):
        if name == "weight":
            return None if following in _ABOUT else begin
        begin = _attribute(begin, name)
    return None


def _attribute(owner: object, name: str) -> object:
    """Returns an attribute that an object has itself, or a module's child, without running code."""
    try:
        own = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return None
    children = own.get("_modules")
    return children[name] if isinstance(children, dict) and name in children else own.get(name)


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
    used: dict[int, list[_Chain]] = {}  # by the id of the class, which may be unhashable
    for name in names:
        parts = name.split(".")
        is_layer = stack_named(model, name) is None
        weights = weights_of(modules[name]) if is_layer else (parts.pop(),)
        kinds = [original_class(modules[".".join(parts[:at])]) for at in range(len(parts) + 1)]
        is_elsewhere = places[".".join(parts)] != 1
        for at, kind in enumerate(kinds[:-1]):
            if id(kind) not in used:
                used[id(kind)] = _used_in_forward(kind)
            if has_own_forward(modules[".".join(parts[:at])]):
                continue
            chains, part = used[id(kind)], tuple(parts[at:])
            of_weight = [(*part, weight) for weight in weights]
            near = [chain for chain in chains if chain[0] == part[0]]
            reads = [c for c in near if any(_begins_with(c, each) for each in of_weight)]
            if any(not {*chain[len(part) + 1 :][:1]} & _ABOUT for chain in reads):
                others = (chain for chain in near if chain not in reads)
                may_call = any(_may_call(chain, part, kinds[at + 1 :]) for chain in others)
                yield _Read(name, kind.__qualname__, at, may_call or is_elsewhere)


def _may_call(chain: _Chain, part: _Chain, kinds: list[type]) -> bool:
    """Returns whether a chain is the submodule, a module on its path, or a method of these.

    Args:
        chain: attributes that a forward uses.
        part: the submodule's path: the names of the modules on the way to it, and its own.
        kinds: the classes of these modules.
    """
    # A number is the place of a module, whose name may be another.
    chain = tuple(_ANY if name.isdigit() else name for name in chain)
    for length, kind in enumerate(kinds, 1):
        if not _begins_with(chain, part[:length]):
            return False
        if length == len(chain):
            return True
        if hasattr(inspect.getattr_static(kind, chain[length], None), "__get__"):
            return True
    return False


def _used_in_forward(kind: type) -> list[_Chain]:
    """Returns the attributes of `self` that a class's forward and the methods it calls use.

    Returns none at all if some may be missing.
    """
    found: dict[str, list[_Chain]] = {}
    names = ["forward"]
    for name in names:
        method: Any = inspect.getattr_static(kind, name, None)
        if name in found or not hasattr(method, "__get__"):
            continue
        chains = _chains(inspect.unwrap(method)) if isinstance(method, FunctionType) else None
        if chains is None:  # unknown, as for a property
            return []
        found[name] = chains
        names += [chain[0] for chain in chains]
    return [chain for chains in found.values() for chain in chains]


@functools.lru_cache(maxsize=1024)
def _chains(method: FunctionType) -> list[_Chain] | None:
    """Returns the attributes of `self` that a method uses, see `_chains_from`."""
    return _chains_from(method, method.__code__.co_varnames[:1])


def _chains_from(function: FunctionType, own: tuple[str, ...]) -> list[_Chain] | None:
    """Returns the attributes of `self` that code uses: ("qkv", "weight") for `self.qkv.weight`.

    Returns None if some may be missing: the method has no source, uses `super`, or uses `self` as a
    whole, as when it passes it to a function. Also for methods of PyTorch and of this package,
    which handle updates themselves.

    Args:
        function: the method, or another function.
        own: the name of the variable that stands for `self`; empty if there is none.
    """
    if (function.__module__ or "").partition(".")[0] in ("torch", __package__):
        return None
    try:
        source = inspect.getsource(function)
        tree = ast.parse(f"if True:\n{source}" if source[:1].isspace() else source)
    except (OSError, SyntaxError, tokenize.TokenError):
        return None
    begins = {n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id in (*own, "super")}
    chains, inner, asked = list[_Chain](), set[ast.AST](), set[ast.AST]()
    for node in ast.walk(tree):  # a complete chain comes before the shorter ones in it
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "isinstance":
            inner.update(node.args)
        if isinstance(node, ast.Call) and _called(node) in _AS:
            asked.update(node.args)
        if isinstance(node, ast.Compare) and all(isinstance(op, _IS) for op in node.ops):
            asked.update((node.left, *node.comparators))
        if isinstance(node, ast.Attribute | ast.Subscript):
            begin, chain = _chain(node)
            if not chain:  # `self[0]` may be anything
                continue
            begins.discard(begin)
            if node not in inner and isinstance(begin, ast.Name) and begin.id in own:
                chains.append((*chain, "dtype") if node in asked else chain)
            inner.add(node.value)
    return None if begins else chains


def _called(call: ast.Call) -> str | None:
    """Returns the name of the function or method that is called."""
    return getattr(call.func, "attr", None) or getattr(call.func, "id", None)


def _chain(node: ast.expr) -> tuple[ast.expr, _Chain]:
    """Returns the expression that a chain of attributes starts from, and the attributes' names.

    An index is part of the chain: ("layers", "0", "weight") for `self.layers[0].weight`, and _ANY
    in place of "0" if it is computed. A slice ends the chain, as it has several modules.
    """
    names: list[str] = []
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Attribute):
            names.append(node.attr)
        elif isinstance(node.value, ast.Name):
            break
        elif isinstance(node.slice, ast.Slice):
            names.clear()
        else:
            index = node.slice
            names.append(str(index.value) if isinstance(index, ast.Constant) else _ANY)
        node = node.value
    return node, tuple(names[::-1])


def _begins_with(chain: _Chain, path: _Chain) -> bool:
    """Returns whether a chain begins with the names of this path, of which _ANY may be each."""
    begin = chain[: len(path)]
    return len(begin) == len(path) and all(map(_is_name, begin, path))


def _is_name(used: str, name: str) -> bool:
    return used in (name, _ANY)
