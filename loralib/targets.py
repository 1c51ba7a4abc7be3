"""Which modules of a model are meant: by the end of a name, a glob, a regular expression, by layer.

A parameter that is a stack of matrices, such as ``experts.down_proj``, is named as a module is, or
as its LoRA layer is, ``experts.down_proj_lora``. A target means stacks only where it matches no
module with parameters of its own: where linear layers are called "down_proj" as well, that means
these alone. An exclusion, and a key of values by pattern, is of all that it matches.

"q_proj"                          every module whose name ends in it, at a dot
"attention.*.dense"               a glob over the end of the name
re.compile(r"layers\\.\\d+\\.mlp")    a regular expression over the complete name
"all-linear"                      every linear layer in numbered layers, such as layers.0.mlp.up; in
                                  a model without these every one but the last, its head
"""

import difflib
import fnmatch
import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

from torch import nn
from torch.nn.parameter import is_lazy

from .experts import AdaptedStack
from .stacks import is_suggested, layer_of_stack, stacks_in
from .text import called, in_short, listed, shown

ALL_LINEAR = "all-linear"

Target = str | re.Pattern[str]
_Value = TypeVar("_Value")


def matches(name: str, target: Target) -> bool:
    """Whether a module's name is meant by a target other than "all-linear"."""
    if isinstance(target, re.Pattern):
        return target.fullmatch(name) is not None
    if any(character in target for character in "*?["):
        return fnmatch.fnmatchcase(name, target) or fnmatch.fnmatchcase(name, f"*.{target}")
    return name == target or name.endswith(f".{target}")


def means(name: str, target: Target, stacks: Collection[str]) -> bool:
    """Whether a target matches a module or a stack; a stack also by the name of its LoRA layer.

    Args:
        name: its name.
        target: other than "all-linear".
        stacks: the names that are those of stacks.
    """
    if matches(name, target) or name not in stacks:
        return matches(name, target)
    layer = layer_of_stack(name)
    return layer not in stacks and matches(layer, target)


def text_of(target: Target) -> str:
    """A target as it was written, for messages."""
    return target.pattern if isinstance(target, re.Pattern) else target


def is_any(name: str, targets: Target | Iterable[Target]) -> bool:
    """Whether a module's name is meant by one of these targets."""
    return any(matches(name, target) for target in as_targets(targets))


def as_targets(targets: Target | Iterable[Target], what: str = "targets") -> tuple[Target, ...]:
    """One target or several, which may come from an iterator, as a tuple.

    Args:
        targets: what somebody gave. A dict of None alone, as `dict.fromkeys` makes it, is its keys.
        what: they are called in errors.

    Raises:
        ValueError: they are something else.
    """
    if isinstance(targets, Mapping) and any(value is not None for value in targets.values()):
        reason = "its values have no meaning"
        if what == "targets":
            reason = "ranks by module are rank_pattern"
        raise ValueError(f"{what} has to be a list, not a dict: {reason}")
    if isinstance(targets, str | re.Pattern) or not isinstance(targets, Iterable):
        several: tuple[Target, ...] = (targets,)
    else:
        several = tuple(targets)
    for target in several:
        if not isinstance(text_of(target), str):
            raise ValueError(
                f"{what} has to be a module's name, a pattern or a list of these, got "
                f"{shown(target)}"
            )
    return several


def as_layers(layers: Iterable[int]) -> tuple[int, ...]:
    """The numbers of layers, which may come from an iterator, as a tuple.

    Raises:
        ValueError: they are something else.
    """
    try:
        several = tuple(layers)
        numbers = tuple(map(operator.index, several))
        if any(isinstance(each, bool) for each in several):  # flags, one for each layer
            raise TypeError
    except TypeError:
        raise ValueError(
            f"layers has to be a list of numbers such as [0, 1] or range(6, 12), got "
            f"{shown(layers)}"
        ) from None
    if not numbers:
        raise ValueError("layers names none: leave it out to adapt them all")
    return numbers


def first_names(model: nn.Module) -> dict[str, str]:
    """Every name of a model's modules -> the first name of that module, in the model's order.

    A module that is used in several places has several names; state dicts list its tensors under
    each, and the parameters of a model are called by the first.
    """
    first: dict[nn.Module, str] = {}
    modules = model.named_modules(remove_duplicate=False)
    return {name: first.setdefault(module, name) for name, module in modules if name}


def first_names_of_targets(model: nn.Module) -> dict[str, str]:
    """As `first_names`, of all that targets can name: modules, and stacks of matrices in them."""
    modules, stacks = _modules_and_stacks(model)
    return modules | stacks


def _modules_and_stacks(model: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """As `first_names`, and the same of a model's stacks of matrices.

    Their LoRA layers are not among the modules: by these names the stacks are meant.
    """
    first: dict[nn.Module, str] = {}
    modules, stacks = dict[str, str](), dict[str, str]()
    for name, module in model.named_modules(remove_duplicate=False):
        first_name = first.setdefault(module, name)
        if name and not isinstance(module, AdaptedStack):
            modules[name] = first_name
        for last in stacks_in(module):
            stacks[_joined(name, last)] = _joined(first_name, last)
    return modules, stacks


def _joined(owner: str, last: str) -> str:
    return f"{owner}.{last}" if owner else last


def other_places(model: nn.Module) -> dict[str, str]:
    """The first names of modules that a model uses in several places -> the name in another one.

    A second name by which only a block around the module is called is no other place.
    """
    found: dict[str, str] = {}
    for name, first in first_names(model).items():
        if name == first:
            continue
        (owner, _, last), (first_owner, _, first_last) = name.rpartition("."), first.rpartition(".")
        is_same = model.get_submodule(owner) is model.get_submodule(first_owner)
        if last != first_last or not is_same:
            found.setdefault(first, name)
    return found


def layer_of(name: str) -> int | None:
    """The number of the layer that a module belongs to: the first number in its name."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(found[1]) if found else None


def find(
    model: nn.Module,
    targets: Target | Iterable[Target],
    *,
    exclude: Target | Iterable[Target] = (),
    layers: Iterable[int] | None = None,
    is_linear: Callable[[nn.Module], bool] = lambda module: isinstance(module, nn.Linear),
    with_stacks: bool = True,
) -> list[str]:
    """The names of the modules that are meant, in the model's order, and then those of stacks.

    Args:
        model: any model. A module that it has under several names is meant by each of them, and
            returned by the first.
        targets: one or several; each of them has to match at least one module, or else a stack.
        exclude: what is left out, in the same notation.
        layers: numbers of the layers to keep to; modules outside of layers are not meant then.
        is_linear: what counts as a linear layer for "all-linear".
        with_stacks: False where whole modules are meant, of any kind, and nothing else.

    Raises:
        ValueError: a target, an exclusion or a layer matches no module; the message lists near
            names. Or a module is meant by one of its names and left out by another.
    """
    modules, stacks = _modules_and_stacks(model)
    if not with_stacks:
        stacks = {}
    first = modules | stacks
    names = list(first)
    left_out = _left_out(names, stacks, as_targets(exclude, "exclude"), layers)
    meant: set[str] = set()
    for target in as_targets(targets):
        if target == ALL_LINEAR:
            linear = all_linear(model, is_linear)
            found = set(linear) - left_out
            if not found:
                raise ValueError(_no_linear_layer(linear, guessed_head(model, is_linear)))
        else:
            named = _named(model, modules, stacks, target)
            found = named - left_out
            if named and not found:
                others = _matched(stacks, target, stacks) - left_out
                raise ValueError(_all_left_out(target, named, modules, others))
            if not found:
                linear = all_linear(model, is_linear) if with_stacks else []
                likely = [name for name in stacks if is_suggested(model, name)]
                names = [*modules, *likely]
                raise ValueError(_means_nothing(model, target, names, linear, likely))
        meant |= found
    if not meant:
        raise ValueError("no target is given")
    _check_names_agree(first, meant, left_out)
    firsts = {first[name] for name in meant}
    return [name for name in names if name in firsts]


def _named(
    model: nn.Module, modules: Iterable[str], stacks: Collection[str], target: Target
) -> set[str]:
    """The names that a target means: those of modules, or else of stacks.

    Modules without parameters of their own, such as the activation beside upstream's experts, are
    no reason to mean no stack.
    """
    named = _matched(modules, target)
    if any(model.get_submodule(name)._parameters for name in named):
        return named
    return _matched(stacks, target, stacks) or named


def matched_stacks(
    model: nn.Module,
    targets: Iterable[Target],
    exclude: Iterable[Target] = (),
    layers: Iterable[int] | None = None,
) -> list[str]:
    """The names of the stacks that targets match, also where they mean modules alone.

    "all-linear" matches all of them. One that means modules, such as "down_proj", matches with
    experts.down_proj the other stacks of that module, such as experts.gate_up_proj, if the targets
    mean the layers beside a down_proj as well: as linear layers these stacks had other names. Those
    that are excluded, or within an excluded module, are not among these, nor those that are not
    `is_suggested`.
    """
    modules, stacks = _modules_and_stacks(model)
    if not stacks:
        return []
    left_out = _left_out([*modules, *stacks], stacks, exclude, layers)
    targets = tuple(targets)
    named = {t: _named(model, modules, stacks, t) for t in targets if t != ALL_LINEAR}
    meant = set[str]().union(*named.values()) - left_out
    found = set[str]()
    for target in targets:
        matched = {*stacks} if target == ALL_LINEAR else _matched(stacks, target, stacks)
        is_of_modules = target != ALL_LINEAR and matched != named[target]
        if matched and is_of_modules and _are_among_all_beside(model, named[target], meant):
            owners = {_owner(name) for name in matched - left_out}
            matched = {name for name in stacks if _owner(name) in owners}
        found |= matched
    found -= left_out
    firsts = {stacks[name] for name in found if _owner(name) not in left_out}
    return [name for name in stacks if name in firsts and is_suggested(model, name)]


def _are_among_all_beside(model: nn.Module, named: Iterable[str], meant: Collection[str]) -> bool:
    """Whether one of these modules is meant with all others that have matrices and its owner.

    As an MLP's down_proj is where its gate_proj and up_proj are meant as well.
    """
    for owner in {_owner(name) for name in named}:
        beside = [
            _joined(owner, name)
            for name, module in model.get_submodule(owner).named_children()
            if any(not is_lazy(own) and own.dim() > 1 for own in module.parameters(recurse=False))
        ]
        if len(beside) > 1 and all(name in meant for name in beside):
            return True
    return False


def _matched(
    names: Iterable[str], target: Target, stacks: Collection[str] = frozenset()
) -> set[str]:
    """Those of some names that a target matches; some may be those of stacks, see `means`."""
    return {name for name in names if means(name, target, stacks)}


def _check_names_agree(
    first: Mapping[str, str], meant: Iterable[str], left_out: Iterable[str]
) -> None:
    """Checks that no module is meant by one of its names and left out by another."""
    others = {first[name]: name for name in left_out}
    for name in sorted(meant):
        if first[name] in others:
            raise ValueError(
                f"{name} is one module with {others[first[name]]}, which is left out: leave out "
                "both or neither"
            )


def check_exclusions(model: nn.Module, exclude: Iterable[Target], meant: Collection[str]) -> None:
    """Checks that no exclusion names a block around targets, which it would not leave out.

    One that names other modules, such as a head that "all-linear" leaves out by itself, does no
    harm.

    Args:
        model: the model.
        exclude: what is left out.
        meant: the first names of the modules that the targets mean, those left out as well.

    Raises:
        ValueError: one names only such blocks.
    """
    modules, stacks = _modules_and_stacks(model)
    first = modules | stacks
    for target in exclude:
        found = _matched(first, target, stacks)
        if {first[name] for name in found} & set(meant):
            continue
        for inner in meant:
            if any(inner.startswith(f"{name}.") for name in found):
                text = text_of(target)
                raise ValueError(
                    f"exclude '{text}' leaves out none of the targets; {inner} is inside of such a "
                    f"module, use '{text}.*'"
                )


def all_linear(model: nn.Module, is_linear: Callable[[nn.Module], bool]) -> list[str]:
    """The names of a model's linear layers but for the head's.

    Those are meant that lie within a numbered layer, as in ``layers.0.mlp.up``. A model without
    such layers has all of them but the last, see `guessed_head`.
    """
    names = _linear_names(model, is_linear)
    return [name for name in names if _is_within_layer(name)] or names[:-1]


def guessed_head(model: nn.Module, is_linear: Callable[[nn.Module], bool]) -> str | None:
    """The linear layer that "all-linear" takes for the head because it is the last.

    None for a model with numbered layers, of which it is known what lies outside, and for one
    without linear layers.
    """
    names = _linear_names(model, is_linear)
    return None if not names or any(map(_is_within_layer, names)) else names[-1]


def _linear_names(model: nn.Module, is_linear: Callable[[nn.Module], bool]) -> list[str]:
    return [name for name, module in model.named_modules() if name and is_linear(module)]


def _is_within_layer(name: str) -> bool:
    """Whether a module lies within a numbered layer, as in ``layers.0.mlp.up``."""
    return re.search(r"(?:^|\.)\d+\.", name) is not None


def by_pattern(
    names: Iterable[str],
    patterns: Mapping[str, _Value],
    default: _Value,
    stacks: Collection[str] = (),
) -> dict[str, _Value]:
    """For each name the value of the first pattern that means it, as for ranks by module.

    Args:
        names: of modules and stacks.
        patterns: values by target.
        default: the value where no pattern does.
        stacks: the names that are those of stacks.

    Raises:
        ValueError: a pattern matches none of the names; or these are not targets with values.
    """
    names = list(names)
    if not isinstance(patterns, Mapping):
        raise ValueError(
            "values by pattern have to be a dict of targets and values, such as {'q_proj': …}, got "
            f"{shown(patterns)}"
        )
    for pattern in as_targets(tuple(patterns), "each key of values by pattern"):
        if not any(means(name, pattern, stacks) for name in names):
            raise ValueError(
                f"the pattern '{text_of(pattern)}' matches none of the adapted modules: "
                f"{listed(names, at_most=8)}"
            )
    return {
        name: next((v for each, v in patterns.items() if means(name, each, stacks)), default)
        for name in names
    }


def _left_out(
    names: Collection[str],
    stacks: Collection[str],
    exclude: Iterable[Target],
    layers: Iterable[int] | None,
) -> set[str]:
    """The names of what exclusions match, and of what is outside of the layers to keep to."""
    left_out: set[str] = set()
    for target in exclude:
        found = _matched(names, target, stacks)
        if not found:
            raise ValueError(_nothing_matches(target, names) + _way_out(target, names))
        left_out |= found
    if layers is not None:
        layers = as_layers(layers)
        numbers = {number for name in names if (number := layer_of(name)) is not None}
        for layer in layers:
            if layer not in numbers:
                others = f"0 to {max(numbers)}" if numbers else "none"
                raise ValueError(f"the model has no layer {layer}; its numbers are {others}")
        left_out |= {name for name in names if layer_of(name) not in layers}
    return left_out


def _all_left_out(
    target: Target, left_out: Collection[str], modules: Iterable[str], stacks: Collection[str]
) -> str:
    """Why a target means nothing that matches some modules.

    Args:
        target: it.
        left_out: the names of these, which are all left out.
        modules: the names of all modules.
        stacks: those of stacks that it would mean if it meant no module.
    """
    instead = ""
    if stacks:
        stack = min(stacks)
        target_of_it = shortest_target(stack, stacks, modules, least=2)
        instead = f"; the stack {stack} is meant by {target_of_it}"
    return (
        f"'{text_of(target)}' matches only modules that are left out, such as {min(left_out)}: "
        f"leave it out of targets as well{instead}"
    )


def shortest_target(
    name: str, alike: Collection[str], others: Iterable[str], least: int = 1
) -> str:
    """As `shortest_targets`, of one name; `alike` are the names that it may match as well."""
    return shortest_targets([name], set(others) - set(alike), least)[name]


def shortest_targets(
    names: Collection[str], others: Iterable[str], least: int = 1
) -> dict[str, str]:
    """For each name the shortest target, as it is written, that matches it and none of others.

    Args:
        names: any; a target of one may match more of them.
        others: the names that it must not match, but for those.
        least: of how many parts; two say whose a stack is, as "experts.down_proj".
    """
    taken = {end for other in set(others) - set(names) for end in _all_ends(other)}
    targets: dict[str, str] = {}
    for name in names:
        ends = _all_ends(name)
        fitting = (f"'{end}'" for end in ends[min(least, len(ends)) - 1 :] if end not in taken)
        targets[name] = next(fitting, f"re.compile(r'{re.escape(name)}')")
    return targets


def _all_ends(name: str) -> list[str]:
    """The ends of a name at dots, which as targets match it; the shortest comes first."""
    parts = name.split(".")
    return [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]


def _means_nothing(
    model: nn.Module,
    target: Target,
    names: Collection[str],
    linear: Collection[str],
    stacks: Collection[str],
) -> str:
    """Why a target means nothing; it names what is likely to be meant.

    Args:
        model: the model.
        target: it.
        names: of the model's modules and stacks.
        linear: those of linear layers.
        stacks: those of stacks.
    """
    parameters = [name for name, _ in model.named_parameters() if matches(name, target)]
    only = f", only parameters such as {min(parameters)}" if parameters else ""
    what = _nothing_matches(target, names, _largest_first(model, linear, stacks), only)
    return what + _way_out(target, names, linear)


def _nothing_matches(
    target: Target, names: Collection[str], likely: Collection[str] = (), only: str = ""
) -> str:
    """That a target or an exclusion matches no name; and names like it.

    Args:
        target: it.
        names: of the model's modules and stacks.
        likely: what else may be meant than names like it, see `_largest_first`.
        only: what it matches instead.
    """
    text, ends = text_of(target), sorted(_ends(names))
    offered: dict[str, None] = {}
    near = difflib.get_close_matches(text.rpartition(".")[2], ends, n=6, cutoff=0.5)
    for end in near:
        offered |= dict.fromkeys([each for each in likely if _last(each) == end] or [end])
    rest = [] if near else [end for end in ends if end not in map(_last, likely)]
    offered |= dict.fromkeys([*likely, *rest])
    has = in_short(offered or names, at_most=8) or "none"
    return f"'{text}' matches no module of the model{only}; it has {has}"


def _largest_first(model: nn.Module, linear: Iterable[str], stacks: Iterable[str]) -> list[str]:
    """The ends of the names of linear layers and stacks; those that hold most weights come first.

    A stack's is such as "experts.down_proj", as linear layers may be called "down_proj" as well.
    """
    sizes = Counter[str]()
    for name in linear:
        own = model.get_submodule(name).parameters(recurse=False)
        sizes[_last(name)] += sum(each.numel() for each in own if not is_lazy(each))
    for name in stacks:
        at, _, last = name.rpartition(".")
        owner = _last(at)
        end = last if owner.isdigit() else _joined(owner, last)
        sizes[end] += model.get_parameter(name).numel()
    return [end for end, _ in sizes.most_common() if not end.isdigit()]


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _ends(names: Iterable[str]) -> dict[str, None]:
    """The ends of modules' names, each once and in their order; not the numbers."""
    ends = map(_last, names)
    return dict.fromkeys(end for end in ends if not end.isdigit())


def _way_out(target: Target, names: Iterable[str], linear: Collection[str] = ()) -> str:
    """How a target that matches nothing is written where it is of another kind; or nothing."""
    if isinstance(target, str) and _is_expression(target, names):
        return f"; a regular expression is re.compile(r'{target}')"
    if linear:
        return f"; '{ALL_LINEAR}' takes all linear layers, model.named_modules() lists all names"
    return ""


def _is_expression(target: str, names: Iterable[str]) -> bool:
    try:
        return any(re.fullmatch(target, name) for name in names)
    except re.error:
        return False


def _no_linear_layer(linear: Collection[str], head: str | None) -> str:
    """Why "all-linear" means nothing, of these layers that it would mean."""
    if linear:
        return f"'{ALL_LINEAR}' means only modules that are left out, such as {min(linear)}"
    if head is None:
        return f"'{ALL_LINEAR}' finds no linear layer in the model: name the layers to adapt"
    return (
        f"'{ALL_LINEAR}' takes {called(head)}, the model's only linear layer, for its head, and "
        "leaves it out: name it, to adapt it"
    )


# ---- on a command line ----


def pattern_of_words(
    flag: str, number: Callable[[str], _Value], words: Iterable[str]
) -> dict[str, _Value]:
    """A pattern from words such as ``value=4``, in their order.

    Args:
        flag: what errors call it.
        number: makes a value of what follows the "=", such as `int`.
        words: ``target=number``, each target once.

    Raises:
        ValueError: a word is not of this format, or repeats a target.
    """
    pattern: dict[str, _Value] = {}
    for word in words:
        target, _, text = word.rpartition("=")
        try:
            value = number(text)
        except ValueError:
            target = ""
        if not target:
            what = "an integer" if number is int else "a number"
            raise ValueError(f"{flag}: '{word}' is not a target, '=' and {what}, such as value=4")
        if target in pattern:
            raise ValueError(f"{flag}: names '{target}' twice")
        pattern[target] = value
    return pattern


def layers_of_words(flag: str, words: Iterable[str]) -> list[int]:
    """The numbers of layers from words such as ``0`` and ``6-11``, which is a range with both ends.

    Raises:
        ValueError: a word is neither; the message begins with `flag`.
    """
    layers: set[int] = set()
    for word in words:
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", word)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise ValueError(f"{flag}: '{word}' is not a layer's number, nor a range such as 6-11")
        layers.update(range(first, last + 1))
    return sorted(layers)
