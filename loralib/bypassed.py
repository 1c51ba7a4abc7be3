"""Layers that a model never calls: it computes with their weights itself.

An update is in what its layer computes and not in its `weight`, so that it has no effect there:
`F.linear(x, self.qkv.weight)` in a module's forward is the plain layer's product. The source of
that forward tells, as far as it is seen that the layer is not called elsewhere in it.
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

from .targets import first_names
from .wrappers import has_own_forward

_Chain = tuple[str, ...]

# What is asked of a weight without computing with it, or written to (`data`).
_ABOUT = {"data", "device", "dim", "dtype", "is_cuda", "ndim", "numel", "requires_grad", "shape"}


def bypassed(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Those of a model's layers that a module around them computes with and never calls.

    Unknown is what a class does by another way than `self.name.weight`, or without its source.

    Args:
        names: of the layers.

    Returns:
        By name, what that module's class is called.
    """
    places = Counter(first_names(model).values())
    modules, found = dict(model.named_modules()), dict[str, str]()
    read: dict[int, set[str]] = {}  # by classes, which may have no hash
    for name in names:
        parts = name.split(".")
        for length in range(len(parts)):
            owner = modules[".".join(parts[:length])]
            if id(type(owner)) not in read:
                read[id(type(owner))] = _never_called(type(owner))
            is_read = ".".join(parts[length:]) in read[id(type(owner))]
            if is_read and places[name] == 1 and not has_own_forward(owner):
                found[name] = type(owner).__qualname__
    return found


def _never_called(kind: type) -> set[str]:
    """The parts of a class whose weights its forward reads, and which it is seen not to call."""
    read, called = set[str](), set[str]()
    for chain in _used_in_forward(kind):
        if "weight" not in chain[1:]:
            called.add(".".join(chain).removesuffix(".forward"))
            continue
        at = chain.index("weight", 1)
        if not {*chain[at + 1 : at + 2]} & _ABOUT:
            read.add(".".join(chain[:at]))
    # One may be called where a module is that it is part of.
    return {part for part in read if not any(f"{part}.".startswith(f"{c}.") for c in called)}


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
