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
from collections.abc import Iterable
from types import FunctionType
from typing import Any

from torch import nn

from .in_place import original_class
from .stacks import stack_named
from .targets import first_names
from .wrappers import has_own_forward

_Chain = tuple[str, ...]

# Attributes of a weight that are read without computing with it, or written to (`data`).
_ABOUT = {
    *("data", "device", "dim", "dtype", "grad", "is_contiguous", "is_cuda", "is_floating_point"),
    *("layout", "ndim", "numel", "requires_grad", "shape", "size"),
}

# Methods that read only their argument's dtype and device, as `x.to(self.qkv.weight)` does.
_AS = {"to", "type_as"}


def bypassed(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Returns the layers and stacks with whose weights a module computes without calling them.

    That module contains the layer, or the module that owns the stack. Weights that a class reads
    in another way than as `self.name.weight`, or without its source, are not found.

    Args:
        model: the model.
        names: the names of the layers and stacks to look at.

    Returns:
        The name of each bypassed layer or stack -> the name of that module's class.
    """
    places = Counter(first_names(model).values())
    modules, found = dict(model.named_modules()), dict[str, str]()
    used: dict[int, list[_Chain]] = {}  # by the id of the class, which may be unhashable
    for name in names:
        *parts, parameter = name.split(".")
        if stack_named(model, name) is None:
            parts, parameter = [*parts, parameter], "weight"
        kinds = [original_class(modules[".".join(parts[:at])]) for at in range(len(parts) + 1)]
        is_in_one_place = places[".".join(parts)] == 1
        for at, kind in enumerate(kinds[:-1]):
            if id(kind) not in used:
                used[id(kind)] = _used_in_forward(kind)
            passes_by = _passes_by(used[id(kind)], parts[at:], kinds[at + 1 :], parameter)
            has_own = has_own_forward(modules[".".join(parts[:at])])
            if passes_by and is_in_one_place and not has_own:
                found[name] = kind.__qualname__
    return found


def _passes_by(
    chains: Iterable[_Chain], part: list[str], kinds: list[type], parameter: str
) -> bool:
    """Returns whether a forward reads a submodule's parameter, and uses nothing that may call it.

    Args:
        chains: the attributes that the forward uses.
        part: the submodule's path: the names of the modules on the way to it, and its own.
        kinds: the classes of these modules.
        parameter: the parameter's name.
    """
    is_read = False
    for chain in chains:
        if chain[: len(part) + 1] == (*part, parameter):
            asked = chain[len(part) + 1 : len(part) + 2]
            is_read = is_read or not {*asked} & _ABOUT
        elif _may_call(chain, part, kinds):
            return False
    return is_read


def _may_call(chain: _Chain, part: list[str], kinds: list[type]) -> bool:
    """Returns whether a chain is the submodule, a module on its path, or a method of these."""
    for length, kind in enumerate(kinds, 1):
        if chain[:length] != tuple(part[:length]):
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
    """Returns the attributes of `self` that a method uses: ("qkv", "weight") for `self.qkv.weight`.

    Returns None if some may be missing: the method has no source, uses `super`, or uses `self` as a
    whole, as when it passes it to a function. Also for methods of PyTorch and of this package,
    which handle updates themselves.
    """
    if (method.__module__ or "").partition(".")[0] in ("torch", __package__):
        return None
    try:
        source = inspect.getsource(method)
        tree = ast.parse(f"if True:\n{source}" if source[:1].isspace() else source)
    except (OSError, SyntaxError, tokenize.TokenError):
        return None
    own = method.__code__.co_varnames[:1]
    begins = {n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id in (*own, "super")}
    chains, inner, asked = list[_Chain](), set[ast.AST](), set[ast.AST]()
    for node in ast.walk(tree):  # a complete chain comes before the shorter ones in it
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "isinstance":
            inner.update(node.args)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) in _AS:
            asked.update(node.args)
        if isinstance(node, ast.Attribute):
            begin, chain = _chain(node)
            begins.discard(begin)
            if node not in inner and isinstance(begin, ast.Name) and begin.id in own:
                chains.append((*chain, "dtype") if node in asked else chain)
            inner.add(node.value)
    return None if begins else chains


def _chain(node: ast.expr) -> tuple[ast.expr, _Chain]:
    """Returns the expression that a chain of attributes starts from, and the attributes' names."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return node, tuple(names[::-1])
