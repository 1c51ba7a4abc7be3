"""Reads in the source of functions and methods what they do with a variable, such as `self`.

No code is run. What a function does is described by chains: the names of attributes, one after the
other.
"""

import ast
import functools
import inspect
import tokenize
from collections import Counter
from collections.abc import Collection, Mapping
from types import FunctionType
from typing import Any, NamedTuple

Chain = tuple[str, ...]

ANY = "*"  # in a chain: an index, which may be of any of a container's items

# In a chain after a tensor: only its dtype, device or shape is read.
ASKED = "dtype"

# Functions that read only their argument's dtype, device or shape, as `x.to(self.qkv.weight)` does,
# or an attribute.
_AS = {"to", "type_as", "len", "empty_like", "full_like", "ones_like", "zeros_like"}
_AS |= {"rand_like", "randn_like", "type", "id", "hasattr", "getattr"}

_IS = (ast.Is, ast.IsNot)  # `self.words.weight is None` computes nothing either

_CALL: Chain = ("forward",)  # what `self(x)` calls


class Use(NamedTuple):
    """An attribute of a variable that code uses.

    Args:
        chain: ("qkv", "weight") for `self.qkv.weight`. An index is part of it: ("layers", "0") for
            `self.layers[0]`, and ANY in place of "0" if it is computed.
        is_called: whether it is called.
        is_certain: whether it is used each time that the code runs to its end, under no condition.
    """

    chain: Chain
    is_called: bool
    is_certain: bool


class Uses(NamedTuple):
    """What code does with a variable.

    Args:
        found: the attributes that it uses.
        are_all: False if some may be missing: the code has no source, uses `super`, or uses the
            variable as a whole, as when it passes it to a function.
    """

    found: list[Use]
    are_all: bool


_UNKNOWN = Uses([], are_all=False)


def used_in_forward(kind: type) -> list[Use]:
    """Returns the attributes of `self` that a class's forward and the methods it calls use.

    Returns none at all if some may be missing.
    """
    reached = uses_reached(kind, "forward")
    if not all(uses.are_all for uses in reached.values()):
        return []
    certain = ["forward"]
    for name in certain:
        uses = reached[name].found if name in reached else []
        called = [use.chain[0] for use in uses if use.is_certain and use.is_called]
        certain += [each for each in called if each in reached and each not in certain]
    return [
        use._replace(is_certain=use.is_certain and name in certain)
        for name, uses in reached.items()
        for use in uses.found
    ]


def uses_reached(kind: type, method: str, without: Collection[str] = ()) -> dict[str, Uses]:
    """Returns what a method of a class, and those of its methods that it calls, do with `self`.

    Args:
        kind: the class.
        method: the method's name.
        without: the names of methods to leave out, if they are called.

    Returns:
        The name of each of them -> what it does. A property counts as a method, of which not all
        is known: what it returns may be anything.
    """
    found: dict[str, Uses] = {}
    names = [method]
    for name in names:
        value: Any = inspect.getattr_static(kind, name, None)
        if name in found or not hasattr(value, "__get__"):
            continue
        function = function_of(value)
        uses = _UNKNOWN if function is None else uses_of(function)
        found[name] = uses._replace(are_all=uses.are_all and isinstance(value, FunctionType))
        names += [use.chain[0] for use in uses.found if use.chain[0] not in without]
    return found


def function_of(value: Any) -> FunctionType | None:
    """Returns the function of a class's method or property, without its decorators."""
    if isinstance(value, property | functools.cached_property):
        value = value.fget if isinstance(value, property) else value.func
    value = inspect.unwrap(value) if isinstance(value, FunctionType) else None
    return value if isinstance(value, FunctionType) else None


@functools.lru_cache(maxsize=1024)
def uses_of(method: FunctionType) -> Uses:
    """Returns what a method does with `self`, see `uses_from`."""
    return uses_from(method, method.__code__.co_varnames[:1])


def uses_from(function: FunctionType, own: tuple[str, ...]) -> Uses:
    """Returns what code does with a variable, also by others that hold one of its attributes.

    Nothing is known of functions of PyTorch and of this package, which handle updates themselves.

    Args:
        function: the method, or another function.
        own: the variable's name; empty if there is none.
    """
    if (function.__module__ or "").partition(".")[0] in ("torch", __package__):
        return _UNKNOWN
    try:
        source = inspect.getsource(function)
        is_indented = source[:1].isspace()
        tree = ast.parse(f"if True:\n{source}" if is_indented else source)
    except (OSError, SyntaxError, tokenize.TokenError):
        return _UNKNOWN
    reader = _Reader(own, tree)
    body = tree.body[0].body if is_indented and isinstance(tree.body[0], ast.If) else tree.body
    for statement in body:
        reader.visit(statement)
    return Uses(reader.uses, reader.is_complete)


class _Reader(ast.NodeVisitor):
    """Collects what code does with a variable.

    Args:
        own: the variable's name; empty if there is none.
        tree: the code.

    Attributes:
        uses: what the code does with it.
        is_complete: whether this is all, because the variable is never used as a whole.
    """

    def __init__(self, own: tuple[str, ...], tree: ast.AST):
        self.uses: list[Use] = []
        self.is_complete = True
        # Each variable that holds an attribute of the variable -> the attribute; () for itself.
        self._held: dict[str, Chain] = dict.fromkeys(own, ())
        self._assigned = _add_aliases(tree, self._held)
        self._conditions = -1  # how many there are around what is visited, within the function

    def _noted(self, node: ast.expr, is_called: bool = False, asked: Chain = ()) -> bool:
        """Notes the use of an expression; returns False if that is none of the attributes."""
        chain = _chain_from(node, self._held)
        if chain is None or not (chain or is_called):
            return False
        self.uses.append(Use((*(chain or _CALL), *asked), is_called, self._conditions < 1))
        self._visit_indices(node)
        return True

    def _visit_indices(self, node: ast.expr) -> None:
        while isinstance(node, ast.Attribute | ast.Subscript):
            if isinstance(node, ast.Subscript):
                self.visit(node.slice)
            node = node.value

    def _visit_attribute(self, node: Any) -> None:
        is_used = isinstance(node.ctx, ast.Load) and node not in self._assigned
        if not is_used and _chain_from(node, self._held):
            self._visit_indices(node)
        elif not self._noted(node):
            self.generic_visit(node)

    visit_Attribute = visit_Subscript = _visit_attribute

    def visit_Name(self, node: ast.Name) -> None:
        if node.id == "super" or self._held.get(node.id) == ():
            self.is_complete = False
        elif isinstance(node.ctx, ast.Load) and node not in self._assigned:
            self._noted(node)

    def visit_Call(self, node: ast.Call) -> None:
        if not self._noted(node.func, is_called=True):
            self.visit(node.func)
        name = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
        for argument in node.args:
            is_asked = name in _AS and self._noted(argument, asked=(ASKED,))
            is_asked |= name == "isinstance" and bool(_chain_from(argument, self._held))
            if not is_asked:
                self.visit(argument)
        for keyword in node.keywords:
            self.visit(keyword)

    def visit_Compare(self, node: ast.Compare) -> None:
        asked = (ASKED,) if all(isinstance(each, _IS) for each in node.ops) else ()
        for operand in (node.left, *node.comparators):
            if not asked or not self._noted(operand, asked=asked):
                self.visit(operand)

    def _visit_first_always(self, node: Any) -> None:
        """Visits a statement or expression, of which only the first part is always computed."""
        parts = node.values if isinstance(node, ast.BoolOp) else ast.iter_child_nodes(node)
        first, *rest = parts
        self.visit(first)
        self._visit_sometimes(*rest)

    visit_If = visit_While = visit_Match = visit_BoolOp = _visit_first_always

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        self._visit_sometimes(node.body, node.orelse)

    def _visit_inner(self, node: ast.AST) -> None:
        self._visit_sometimes(*ast.iter_child_nodes(node))

    visit_Assert = visit_Try = visit_TryStar = visit_comprehension = _visit_inner
    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _visit_inner

    def _visit_sometimes(self, *nodes: ast.AST) -> None:
        self._conditions += 1
        for node in nodes:
            self.visit(node)
        self._conditions -= 1


def _add_aliases(tree: ast.AST, held: dict[str, Chain]) -> set[ast.expr]:
    """Adds the variables to which code assigns an attribute of a variable, and nothing else.

    Args:
        tree: the code.
        held: the variables -> the attributes that they hold, at first only () for the variable.

    Returns:
        The expressions that are assigned.
    """
    bound, pairs = Counter[str](), list[tuple[ast.expr, ast.expr, Chain]]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound[node.id] += 1
        elif isinstance(node, ast.arg):
            bound[node.arg] += 1
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            pairs.append((node.targets[0], node.value, ()))
        elif isinstance(node, ast.For | ast.comprehension):
            pairs.append((node.target, node.iter, (ANY,)))
    assigned = set[ast.expr]()
    for target, value, item in sorted(pairs, key=lambda pair: pair[1].lineno):
        chain = _chain_from(value, held)
        if chain and isinstance(target, ast.Name) and bound[target.id] == 1:
            held[target.id] = (*chain, *item)
            assigned.add(value)
    return assigned


def _chain_from(node: ast.expr, held: Mapping[str, Chain]) -> Chain | None:
    """Returns which attribute of the variable an expression is; None if it is something else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Attribute):
            names.append(node.attr)
        elif isinstance(node.value, ast.Name) and not held.get(node.value.id):
            return None  # `self[0]` may be anything
        elif isinstance(node.slice, ast.Slice):
            names.clear()  # the chain ends before a slice, as that has several items
        else:
            index = node.slice
            names.append(str(index.value) if isinstance(index, ast.Constant) else ANY)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in held:
        return None
    return (*held[node.id], *names[::-1])
