"""Layers that a model does not call where it computes with them: it reads their weights itself.

An update is in what its layer computes and not in its `weight`, so that it has no effect there:
`F.linear(x, self.qkv.weight)` in a module's forward is the plain layer's product.
"""

import ast
import functools
import inspect
import textwrap
import tokenize
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn

# What is asked of a weight without computing with it; `data` is written to.
_ABOUT = ("data", "device", "dim", "dtype", "is_cuda", "ndim", "numel", "requires_grad", "shape")


class Bypass(NamedTuple):
    """Who computes with a layer's weight.

    Args:
        kind: the name of the class of a module around it.
        is_always: whether that never calls the layer.
    """

    kind: str
    is_always: bool


def bypassed(model: nn.Module, name: str) -> Bypass | None:
    """Whether a module around a layer computes with its weight, without calling the layer.

    Unknown is what a class does in another way than by `self.name.weight`, and without its source.

    Args:
        name: the layer's, in the model.
    """
    parts = name.split(".")
    for length in reversed(range(len(parts))):
        kind: Any = type(model.get_submodule(".".join(parts[:length])))
        is_always = _read_weights(kind).get(".".join(parts[length:]))
        if is_always is not None:
            return Bypass(kind.__qualname__, is_always)
    return None


@functools.lru_cache(maxsize=512)
def _read_weights(kind: type) -> dict[str, bool]:
    """The parts of a class whose weights its forward reads -> whether that never calls them."""
    methods = _methods_of_forward(kind)
    if not any("weight" in _names(method.__code__) for method in methods):
        return {}
    read, called = set[str](), set[str]()
    for chain in (chain for method in methods for chain in _chains(method)):
        if "weight" not in chain[1:]:
            called.add(".".join(chain).removesuffix(".forward"))
            continue
        part, after = chain[: chain.index("weight", 1)], chain[chain.index("weight", 1) + 1 :]
        if not after or after[0] not in _ABOUT:
            read.add(".".join(part))
    # One is called as well where a module is that it is part of.
    return {part: not any(f"{part}.".startswith(f"{each}.") for each in called) for part in read}


def _methods_of_forward(kind: type) -> list[FunctionType]:
    """The forward of a class, and the methods of the class that it may call, by their names."""
    found: dict[str, FunctionType] = {}
    names = ["forward"]
    for name in names:
        named: Any = getattr(kind, name, None)
        method = inspect.unwrap(named)
        if name not in found and isinstance(method, FunctionType) and not _is_known(method):
            found[name] = method
            names += _names(method.__code__)
    return list(found.values())


def _is_known(method: FunctionType) -> bool:
    """Whether a method is PyTorch's or this package's, which take an update into account."""
    return (method.__module__ or "").partition(".")[0] in ("torch", __package__)


def _names(code: CodeType) -> Iterator[str]:
    """The names of the attributes that a function uses, with those of functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _chains(method: FunctionType) -> Iterator[list[str]]:
    """The attributes of `self` that a method reads: ["qkv", "weight"] for `self.qkv.weight`."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, SyntaxError, tokenize.TokenError):  # made at run time, or a part of a line
        return
    left_out: set[ast.AST] = set()
    for node in ast.walk(tree):  # the whole of a chain comes before its beginnings
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "isinstance":
            left_out.update(node.args)
        if isinstance(node, ast.Attribute):
            left_out.add(node.value)
            if node not in left_out and (chain := _chain(node)):
                yield chain


def _chain(node: ast.expr) -> list[str]:
    """The names of a chain of attributes that begins at `self`; empty for another one."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    begins = isinstance(node, ast.Name) and node.id == "self"
    return names[::-1] if begins else []
