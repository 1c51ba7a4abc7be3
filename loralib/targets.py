"""Finds the modules that targets mean: by the end of a name, a glob, a regular expression, a layer.

A target can also mean a parameter that is a stack of matrices, such as ``experts.down_proj``, by
its own name or by that of its LoRA layer, ``experts.down_proj_lora``. It means stacks only if it
matches no module with parameters of its own: in a model that also has linear layers called
"down_proj", this target means only those. An exclusion, or a key of a dict such as `rank_pattern`,
applies to all that it matches.

"q_proj"                          every module whose name ends in it, at a dot
"attention.*.dense"               a glob over the end of the name
re.compile(r"layers\\.\\d+\\.mlp")    a regular expression over the complete name
"all-linear"                      every linear layer in numbered layers, such as layers.0.mlp.up; if
                                  only the head has these, or none has, all but the last, the head
"""

import difflib
import fnmatch
import operator
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .experts import AdaptedStack
from .layer_kinds import is_linear
from .module_names import joined, layer_of
from .stacks import is_suggested, layer_of_stack, stacks_in
from .text import in_short, listed, module_label, shown

ALL_LINEAR = "all-linear"

Target = str | re.Pattern[str]
_Value = TypeVar("_Value")


def matches(name: str, target: Target) -> bool:
    """Returns whether a target other than "all-linear" matches a module's name."""
    if isinstance(target, re.Pattern):
        return target.fullmatch(name) is not None
    if _is_glob(target):
        return fnmatch.fnmatchcase(name, target) or fnmatch.fnmatchcase(name, f"*.{target}")
    return name == target or name.endswith(f".{target}")


def _is_glob(target: str) -> bool:
    return any(character in target for character in "*?[")


def means(name: str, target: Target, stacks: Collection[str]) -> bool:
    """Returns whether a target matches a module or a stack (a stack also by its LoRA layer's name).

    Args:
        name: the name of the module or stack.
        target: any other than "all-linear".
        stacks: the names of the model's stacks.
    """
    return any(matches(each, target) for each in _names_of(name, stacks))


def _names_of(name: str, stacks: Collection[str]) -> list[str]:
    """Returns a module's name; of a stack, also that of its LoRA layer."""
    layer = layer_of_stack(name)
    return [name, layer] if name in stacks and layer not in stacks else [name]


class Names:
    """Names of modules and stacks, among which targets are looked up.

    Args:
        names: the names.
        stacks: which of them are those of stacks.
    """

    def __init__(self, names: Iterable[str], stacks: Collection[str] = ()):
        self._names, self.stacks = list(names), stacks
        # There may be thousands of targets, each a module's name.
        self._by_end: dict[str, list[str]] = {}
        for name in self._names:
            for each in _names_of(name, stacks):
                for end in _all_ends(each):
                    self._by_end.setdefault(end, []).append(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def meant_by(self, target: Target) -> list[str]:
        """Returns those that a target other than "all-linear" means (see `means`), in order."""
        if isinstance(target, str) and not _is_glob(target):
            return self._by_end.get(target, [])
        return [name for name in self if means(name, target, self.stacks)]


def text_of(target: Target) -> str:
    """Returns a target as it was written, for messages."""
    return target.pattern if isinstance(target, re.Pattern) else target


def is_any(name: str, targets: Iterable[Target]) -> bool:
    """Returns whether one of these targets matches a module's name."""
    return any(matches(name, target) for target in targets)


def as_targets(targets: Target | Iterable[Target], what: str = "targets") -> tuple[Target, ...]:
    """Returns one target or several, which may come from an iterator, as a tuple.

    Args:
        targets: what the user gave. A dict whose values are all None, as `dict.fromkeys` makes it,
            stands for its keys.
        what: what errors call them.

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
    """Returns the numbers of layers, which may come from an iterator, as a tuple.

    Raises:
        ValueError: they are something else, or there are none.
    """
    try:
        several = tuple(layers)
        numbers = tuple(map(operator.index, several))
        if any(isinstance(each, bool) for each in several):  # probably a flag for each layer
            raise TypeError
    except TypeError:
        raise ValueError(
            f"layers has to be a list of numbers such as [0, 1] or range(6, 12), got "
            f"{shown(layers)}"
        ) from None
    if not numbers:
        raise ValueError("layers is empty: leave it out to adapt all layers")
    return numbers


def first_names_of_targets(model: nn.Module) -> dict[str, str]:
    """Does what `first_names` does, for all that targets can name: modules and stacks."""
    modules, stacks = _modules_and_stacks(model)
    return modules | stacks


def _modules_and_stacks(model: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """Returns what `first_names` does, and the same for a model's stacks of matrices.

    The stacks' LoRA layers are not among the modules, because their names mean the stacks.
    """
    first: dict[nn.Module, str] = {}
    modules, stacks = dict[str, str](), dict[str, str]()
    for name, module in model.named_modules(remove_duplicate=False):
        first_name = first.setdefault(module, name)
        if name and not isinstance(module, AdaptedStack):
            modules[name] = first_name
        for last in stacks_in(module):
            stacks[joined(name, last)] = joined(first_name, last)
    return modules, stacks


def find(
    model: nn.Module,
    targets: Target | Iterable[Target],
    *,
    exclude: Target | Iterable[Target] = (),
    layers: Iterable[int] | None = None,
    with_stacks: bool = True,
) -> list[str]:
    """Returns the names of the modules that are meant, in the model's order, and then of stacks.

    Args:
        model: any model. A module with several names is found by each of them, and returned under
            the first.
        targets: one or several. Each has to match at least one module, or else a stack.
        exclude: what to leave out, in the same notation.
        layers: the numbers of the layers to keep to, which leaves out modules outside of layers.
        with_stacks: False to find only modules, of any kind.

    Raises:
        ValueError: a target, an exclusion or a layer matches nothing (the message lists similar
            names); all that a target matches is left out; there is no target; or a module is meant
            by one of its names and left out by another.
    """
    modules, stacks = _modules_and_stacks(model)
    if not with_stacks:
        stacks = {}
    first = modules | stacks
    names = Names(first, stacks)
    left_out = _left_out(names, as_targets(exclude, "exclude"), layers)
    meant: set[str] = set()
    for target in as_targets(targets):
        if target == ALL_LINEAR:
            linear = all_linear(model)
            found = set(linear) - left_out
            if not found:
                raise ValueError(_no_linear_layer(model, linear))
        else:
            named = _named(model, names, target)
            found = named - left_out
            if named and not found:
                others = {*names.meant_by(target)} & ({*stacks} - left_out)
                raise ValueError(_all_left_out(target, named, modules, others))
            if not found:
                linear = all_linear(model) if with_stacks else []
                likely = [name for name in stacks if is_suggested(model, name)]
                raise ValueError(_means_nothing(model, target, [*modules, *likely], linear, likely))
        meant |= found
    if not meant:
        raise ValueError("no target is given")
    _check_names_agree(first, meant, left_out)
    firsts = {first[name] for name in meant}
    return [name for name in first if name in firsts]


def _named(model: nn.Module, names: Names, target: Target) -> set[str]:
    """Returns the names that a target means: those of modules, or else of stacks.

    It may mean stacks even if it matches modules without parameters of their own, such as the
    activation next to the experts in Hugging Face's models.
    """
    matched = names.meant_by(target)
    stacks = {name for name in matched if name in names.stacks}
    modules = {*matched} - stacks
    has_own = any(model.get_submodule(name)._parameters for name in modules)
    return modules if has_own else stacks or modules


def matched_stacks(
    model: nn.Module,
    targets: Collection[Target],
    exclude: Iterable[Target],
    layers: Iterable[int] | None,
) -> list[str]:
    """Returns the names of the stacks that targets match, even if they mean modules alone.

    "all-linear" matches all stacks. A target that means modules, such as "down_proj", also matches
    the stacks of this name, such as experts.down_proj. If the targets mean all layers next to one
    of these modules as well, it also matches the other stacks of `experts`, such as
    experts.gate_up_proj. (Models that hold the experts as linear layers have other names for
    these.) Stacks that are excluded or within an excluded module are left out, and so are those
    that are not `is_suggested`.
    """
    modules, stacks = _modules_and_stacks(model)
    if not stacks:
        return []
    names = Names([*modules, *stacks], stacks)
    left_out = _left_out(names, exclude, layers)
    found = {*stacks} if ALL_LINEAR in targets else set[str]()
    if not found:
        by_target = {target: _named(model, names, target) for target in targets}
        meant = set[str]().union(*by_target.values()) - left_out
        for target, named in by_target.items():
            matched = {name for name in names.meant_by(target) if name in stacks}
            if matched and matched != named and _are_among_all_beside(model, named, meant):
                owners = {_owner(name) for name in matched - left_out}
                matched = {name for name in stacks if _owner(name) in owners}
            found |= matched
    firsts = {stacks[name] for name in found - left_out if _owner(name) not in left_out}
    return [name for name in stacks if name in firsts and is_suggested(model, name)]


def _are_among_all_beside(model: nn.Module, named: Iterable[str], meant: Collection[str]) -> bool:
    """Returns whether one of these modules is meant along with all siblings that have matrices.

    For example an MLP's down_proj, if its gate_proj and up_proj are meant as well.
    """
    for owner in {_owner(name) for name in named}:
        beside = [
            joined(owner, name)
            for name, module in model.get_submodule(owner).named_children()
            if any(not is_lazy(own) and own.dim() > 1 for own in module.parameters(recurse=False))
        ]
        if len(beside) > 1 and all(name in meant for name in beside):
            return True
    return False


def _check_names_agree(
    first: Mapping[str, str], meant: Iterable[str], left_out: Iterable[str]
) -> None:
    """Checks that no module is meant by one of its names and left out by another."""
    others = {first[name]: name for name in left_out}
    for name in sorted(meant):
        if first[name] in others:
            raise ValueError(
                f"{name} and {others[first[name]]} are the same module, and the latter is left "
                "out: leave out both or neither"
            )


def check_exclusions(model: nn.Module, exclude: Iterable[Target], meant: Collection[str]) -> None:
    """Checks that no exclusion names only a block around targets, which does not leave them out.

    An exclusion of other modules, such as a head that "all-linear" leaves out anyway, is harmless.

    Args:
        model: the model.
        exclude: what is left out.
        meant: the first names of the modules that the targets mean, including those left out.

    Raises:
        ValueError: an exclusion matches such a block and none of the targets.
    """
    modules, stacks = _modules_and_stacks(model)
    first = modules | stacks
    names, targeted = Names(first, stacks), set(meant)
    inside = {around: name for name in reversed([*meant]) for around in _owners(name)}
    for target in exclude:
        found = names.meant_by(target)
        blocks = [name for name in found if name in inside]
        if blocks and targeted.isdisjoint(first[name] for name in found):
            text = text_of(target)
            raise ValueError(
                f"exclude '{text}' matches none of the targets, only a module around "
                f"{inside[blocks[0]]}: use '{text}.*'"
            )


def _owners(name: str) -> list[str]:
    """Returns the names of the modules around one, the largest first."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def all_linear(model: nn.Module) -> list[str]:
    """Returns the names of a model's linear layers, without the head's.

    These are the ones within a numbered layer, as in ``layers.0.mlp.up``. If there are none, or
    only the head seems to have such layers, these are all but the last, see `guessed_head`. An
    attention is among them if its out_proj is, as it is if it is itself a numbered layer.
    """
    names = _linear_names(model)
    return _within_layers(names) or names[:-1]


def guessed_head(model: nn.Module) -> str | None:
    """Returns the linear layer that "all-linear" takes for the head because it is the last.

    None for a model with numbered layers, where all that lies outside of these is left out, and for
    a model without linear layers.
    """
    names = _linear_names(model)
    return None if not names or _within_layers(names) else names[-1]


def foreign_linear(
    model: nn.Module, exclude: Iterable[Target], layers: Iterable[int] | None
) -> list[str]:
    """Returns the names of modules that seem to be linear layers, but that "all-linear" leaves out.

    Their classes are called "…Linear" and have weights of their own, but `is_linear` does not know
    them; or they are scripted or traced. In a model with numbered layers, these are the ones within
    such a layer. Modules with stacks of matrices, which can have LoRA, are not among them.
    """
    modules, stacks = _modules_and_stacks(model)
    with_stacks = set(map(_owner, stacks.values()))
    left_out = _left_out(Names([*modules, *stacks], stacks), exclude, layers)
    excluded = {modules[name] for name in left_out if name in modules}
    is_layered = bool(_within_layers(_linear_names(model)))
    return [
        name
        for name in dict.fromkeys(modules.values())
        if name not in excluded
        and name not in with_stacks
        and (_is_within_layer(name) or not is_layered)
        and _is_foreign_linear(model.get_submodule(name))
    ]


def _is_foreign_linear(module: nn.Module) -> bool:
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    kind = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        kind = getattr(module, "original_name", kind)
    return bool(own) and kind.endswith("Linear") and not any(map(is_linear, module.modules()))


def _linear_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if name and is_linear(module)]


def _within_layers(names: list[str]) -> list[str]:
    """Returns which linear layers are within numbered layers; none if only the head has these.

    So it seems if the last linear layer is within one, and most are not.
    """
    within = {name for name in names if _is_within_layer(name)}
    found = [name for name in names if {name, f"{name}.out_proj"} & within]
    return found if names[-1:] != found[-1:] or 2 * len(found) >= len(names) else []


def _is_within_layer(name: str) -> bool:
    """Returns whether a module lies within a numbered layer, as in ``layers.0.mlp.up``."""
    return re.search(r"(?:^|\.)\d+\.", name) is not None


def by_pattern(
    names: Iterable[str],
    patterns: Mapping[Target, _Value] | Mapping[str, _Value],
    default: _Value,
    stacks: Collection[str] = (),
) -> dict[str, _Value]:
    """Returns for each name the value of the first pattern that means it, as for `rank_pattern`.

    Args:
        names: the names of modules and stacks.
        patterns: values by target.
        default: the value if no pattern means a name.
        stacks: which of the names are those of stacks.

    Raises:
        ValueError: a pattern matches none of the names, or patterns is not a dict by target.
    """
    every = Names(names, stacks)
    if not isinstance(patterns, Mapping):
        raise ValueError(
            "values by pattern have to be a dict of targets and values, such as {'q_proj': …}, got "
            f"{shown(patterns)}"
        )
    values: dict[str, _Value] = {}
    keys = as_targets(tuple(patterns), "each key of values by pattern")
    for pattern, value in zip(keys, patterns.values(), strict=True):
        found = every.meant_by(pattern)
        if not found:
            raise ValueError(
                f"the pattern '{text_of(pattern)}' matches none of the adapted modules: "
                f"{listed(every, at_most=8)}"
            )
        for name in found:
            values.setdefault(name, value)
    return {name: values.get(name, default) for name in every}


def _left_out(names: Names, exclude: Iterable[Target], layers: Iterable[int] | None) -> set[str]:
    """Returns the names that exclusions match, and those outside of the layers to keep to."""
    left_out: set[str] = set()
    for target in exclude:
        found = names.meant_by(target)
        if not found:
            raise ValueError(_nothing_matches(target, [*names]) + _way_out(target, names))
        left_out.update(found)
    if layers is not None:
        layers = as_layers(layers)
        numbers = {number for name in names if (number := layer_of(name)) is not None}
        for layer in layers:
            if layer not in numbers:
                others = f"0 to {max(numbers)}" if numbers else "none"
                raise ValueError(f"the model has no layer {layer}; its layers are {others}")
        left_out |= {name for name in names if layer_of(name) not in layers}
    return left_out


def _all_left_out(
    target: Target, left_out: Collection[str], modules: Iterable[str], stacks: Collection[str]
) -> str:
    """Returns an error's message: all modules that a target matches are left out.

    Args:
        target: the target.
        left_out: the names of the modules that it matches.
        modules: the names of all modules.
        stacks: the names of the stacks that it would mean if it matched no module.
    """
    instead = ""
    if stacks:
        stack = min(stacks)
        target_of_it = shortest_target(stack, stacks, modules, least=2)
        instead = f"; to mean the stack {stack}, give {target_of_it}"
    return (
        f"'{text_of(target)}' matches only modules that are left out, such as {min(left_out)}: "
        f"leave it out of targets as well{instead}"
    )


def shortest_target(
    name: str, alike: Collection[str], others: Iterable[str], least: int = 1
) -> str:
    """Returns what `shortest_targets` does, for one name; the target may also match `alike`."""
    return shortest_targets([name], set(others) - set(alike), least)[name]


def shortest_targets(
    names: Collection[str], others: Iterable[str], least: int = 1
) -> dict[str, str]:
    """Returns for each name the shortest target, as Python code, that matches none of `others`.

    Args:
        names: any names. The target of one may match other ones of them.
        others: the names that a target must not match, except for those in `names`.
        least: how many parts a target has at least. Two show the owner of a stack, as in
            "experts.down_proj".
    """
    taken = {end for other in set(others) - set(names) for end in _all_ends(other)}
    targets: dict[str, str] = {}
    for name in names:
        ends = _all_ends(name)
        fitting = (f"'{end}'" for end in ends[min(least, len(ends)) - 1 :] if end not in taken)
        targets[name] = next(fitting, f"re.compile(r'{re.escape(name)}')")
    return targets


def _all_ends(name: str) -> list[str]:
    """Returns the ends of a name at dots, the shortest first; as targets, all match it."""
    parts = name.split(".")
    return [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]


def _means_nothing(
    model: nn.Module,
    target: Target,
    names: Collection[str],
    linear: Collection[str],
    stacks: Collection[str],
) -> str:
    """Returns an error's message: a target matches nothing, and what was probably meant.

    Args:
        model: the model.
        target: the target.
        names: the names of the model's modules and stacks.
        linear: the names of its linear layers.
        stacks: the names of its stacks.
    """
    parameters = [name for name, _ in model.named_parameters() if matches(name, target)]
    only = f", only parameters such as {min(parameters)}" if parameters else ""
    what = _nothing_matches(target, names, _largest_first(model, linear, stacks), only)
    return what + _way_out(target, names, linear)


def _nothing_matches(
    target: Target, names: Collection[str], likely: Collection[str] = (), only: str = ""
) -> str:
    """Returns an error's message: a target or an exclusion matches no name, and similar names.

    Args:
        target: the target or exclusion.
        names: the names of the model's modules and stacks.
        likely: ends of names to suggest besides similar ones, see `_largest_first`.
        only: words about what it matches instead, if anything.
    """
    text, ends = text_of(target), sorted({end for end in map(_last, names) if not end.isdigit()})
    offered: dict[str, None] = {}
    near = difflib.get_close_matches(_last(text), ends, n=6, cutoff=0.5)
    for end in near:
        offered |= dict.fromkeys([each for each in likely if _last(each) == end] or [end])
    rest = [] if near else [end for end in ends if end not in map(_last, likely)]
    offered |= dict.fromkeys([*likely, *rest])
    has = in_short(offered or names, at_most=8) or "none"
    return f"'{text}' matches no module of the model{only}; it has {has}"


def _largest_first(model: nn.Module, linear: Iterable[str], stacks: Iterable[str]) -> list[str]:
    """Returns the ends of the names of linear layers and stacks, those with most weights first.

    A stack's end includes its owner's name, as in "experts.down_proj", because linear layers may be
    called "down_proj" as well.
    """
    sizes = Counter[str]()
    for name in linear:
        own = model.get_submodule(name).parameters(recurse=False)
        sizes[_last(name)] += sum(each.numel() for each in own if not is_lazy(each))
    for name in stacks:
        at, _, last = name.rpartition(".")
        owner = _last(at)
        end = last if owner.isdigit() else joined(owner, last)
        sizes[end] += model.get_parameter(name).numel()
    return [end for end, _ in sizes.most_common() if not end.isdigit()]


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _way_out(target: Target, names: Iterable[str], linear: Collection[str] = ()) -> str:
    """Returns advice on how to write a target that matches nothing; empty if there is none."""
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


def _no_linear_layer(model: nn.Module, linear: Collection[str]) -> str:
    """Returns an error's message: "all-linear" means nothing.

    Args:
        model: the model.
        linear: the layers that it would mean, if they were not left out.
    """
    if linear:
        return f"'{ALL_LINEAR}' means only modules that are left out, such as {min(linear)}"
    if (head := guessed_head(model)) is not None:
        return (
            f"'{ALL_LINEAR}' treats {module_label(head)}, the model's only linear layer, as the "
            "head and leaves it out: to adapt it, name it"
        )
    if foreign := foreign_linear(model, (), None):
        kind = type(model.get_submodule(foreign[0]))
        return (
            f"'{ALL_LINEAR}' finds only linear layers of classes without a LoRA layer, such as "
            f"{module_label(foreign[0])} ({kind.__module__}.{kind.__qualname__}): name other "
            "layers, or make these of nn.Linear"
        )
    return f"'{ALL_LINEAR}' finds no linear layer in the model: name the layers to adapt"
