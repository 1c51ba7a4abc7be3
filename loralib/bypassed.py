"""Layers and stacks that a model passes by: it computes with their weights itself.

An update is in what its layer computes and not in its `weight`, so that it has no effect there:
`F.linear(x, self.qkv.weight)` in a module's forward is the plain layer's product. The source of
that forward tells, as far as it is seen that the layer is not called elsewhere in it. So it is with
a stack of matrices, whose update is there while the forward of the module runs that has the stack.
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

from .in_place import own_class
from .stacks import stack_named
from .targets import first_names
from .wrappers import has_own_forward

_Chain = tuple[str, ...]

# What is asked of a weight without computing with it, or written to (`data`).
_ABOUT = {"data", "device", "dim", "dtype", "is_cuda", "ndim", "numel", "requires_grad", "shape"}


def bypassed(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Those of a model's layers and stacks that a module computes with and never calls.

    That module is around the layer, or around the module that has the stack. Unknown is what a
    class does by another way than `self.name.weight`, or without its source.

    Args:
        names: of the layers and stacks.

    Returns:
        By name, what that module's class is called.
    """
    places = Counter(first_names(model).values())
    modules, found = dict(model.named_modules()), dict[str, str]()
    used: dict[int, list[_Chain]] = {}  # by classes, which may have no hash
    for name in names:
        *parts, parameter = name.split(".")
        if stack_named(model, name) is None:
            parts, parameter = [*parts, parameter], "weight"
        kinds = [own_class(modules[".".join(parts[:at])]) for at in range(len(parts) + 1)]
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
    """Whether a forward reads a parameter of a part of its module, and is not seen to call that.

    Args:
        chains: what the forward uses.
        part: the names of the modules on the way to the part, and its own.
        kinds: their classes.
        parameter: its name.
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
    """Whether this is the part, or a module that it is part of; or one of their methods."""
    for length, kind in enumerate(kinds, 1):
        if chain[:length] != tuple(part[:length]):
            return False
        if length == len(chain):
            return True
        if hasattr(inspect.getattr_static(kind, chain[length], None), "__get__"):
            return True
    return False


def _used_in_forward(kind: type) -> list[_Chain]:
    """The attributes of `self` that a class's forward uses, and the methods that it calls.

    None at all where they may not be complete.
    """
    found: dict[str, list[_Chain]] = {}
    names = ["forward"]
    for name in names:
        method: Any = inspect.getattr_static(kind, name, None)
        if name in found or not hasattr(method, "__get__"):
            continue
        chains = _chains(inspect.unwrap(method)) if isinstance(method, FunctionType) else None
        if chains is None:  # as of a property
            return []
        found[name] = chains
        names += [chain[0] for chain in chains]
    return [chain for chains in found.values() for chain in chains]


@functools.lru_cache(maxsize=1024)
def _chains(method: FunctionType) -> list[_Chain] | None:
    """The attributes of `self` that a method uses: ("qkv", "weight") for `self.qkv.weight`.

    None where they may not be all: without source; where the method gives `self` to another
    function; of PyTorch's and this package's, which know of updates.
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
    chains, inner = list[_Chain](), set[ast.AST]()
    for node in ast.walk(tree):  # the whole of a chain comes before its beginnings
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "isinstance":
            inner.update(node.args)
        if isinstance(node, ast.Attribute):
            begin, chain = _chain(node)
            begins.discard(begin)
            if node not in inner and isinstance(begin, ast.Name) and begin.id in own:
                chains.append(chain)
            inner.add(node.value)
    return None if begins else chains


def _chain(node: ast.expr) -> tuple[ast.expr, _Chain]:
    """What a chain of attributes begins at, and the names of these."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return node, tuple(names[::-1])
