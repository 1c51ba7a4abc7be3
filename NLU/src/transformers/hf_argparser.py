"""`HfArgumentParser`: command-line flags and JSON files from dataclasses."""

import dataclasses
import os
import sys
import types
import typing
from argparse import Action, ArgumentError, ArgumentTypeError
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from loralib.io.command_line import ArgumentParser, check_bounds

from .file_utils import read_json_object


def flag(default: Any, text: str, **metadata: Any) -> Any:
    """Returns a dataclass field with a default, a help text and further metadata, such as choices.

    A number may have bounds: ``least`` or ``above``, and ``most`` or ``below``. The parser checks
    them, and `check_ranges` checks values that no parser has read.
    """
    return dataclasses.field(default=default, metadata={"help": text, **metadata})


# The values that a boolean flag accepts, in upper or lower case.
_BOOLEANS = {
    **dict.fromkeys(("1", "t", "true", "y", "yes"), True),
    **dict.fromkeys(("0", "f", "false", "n", "no"), False),
}


def string_to_bool(text: str | bool) -> bool:
    """Converts yes, true, t, y, 1 or no, false, f, n, 0, in upper or lower case, to a bool.

    Raises:
        ArgumentTypeError: the text is none of these.
    """
    value = _BOOLEANS.get(str(text).lower())
    if value is None:
        raise ArgumentTypeError(f"'{text}' is neither true nor false")
    return value


class HfArgumentParser(ArgumentParser):
    """A parser whose flags are the fields of dataclasses.

    A field's type, default, ``metadata["help"]`` and ``metadata["choices"]`` define its flag. A
    bool can be given bare (``--do_train``) or with a value (``--do_train False``). One that is True
    by default also has ``--no_<flag>``, and so has one with ``metadata["has_no"]``. One without a
    default is True, as in transformers 4.4. `add_argument` adds more flags. The dataclasses'
    ``_other_names`` are those of `ArgumentParser`.

    Args:
        dataclass_types: one dataclass, or several whose fields do not clash.
        arguments: arguments of `ArgumentParser`. By default, empty strings are accepted as values,
            as in transformers 4.4.
    """

    def __init__(self, dataclass_types: type | Iterable[type], **arguments: Any):
        types_ = [dataclass_types] if dataclasses.is_dataclass(dataclass_types) else dataclass_types
        self.dataclass_types = list(types_)
        named = {
            name: answer
            for type_ in self.dataclass_types
            for name, answer in getattr(type_, "_other_names", {}).items()
        }
        super().__init__(**{"takes_empty": True, "other_names": named, **arguments})
        for type_ in self.dataclass_types:
            group = self.add_argument_group(type_.__name__)
            hints = typing.get_type_hints(type_)
            for field in dataclasses.fields(type_):
                if field.init:
                    _add_flag(group, field, hints[field.name])

    def parse_args_into_dataclasses(
        self,
        args: list[str] | None = None,
        return_remaining_strings: bool = False,
        look_for_args_file: bool = True,
        args_filename: str | None = None,
    ) -> tuple[Any, ...]:
        """Parses arguments into one instance of each dataclass.

        Args:
            args: the arguments; by default those of the command line.
            return_remaining_strings: return unknown arguments instead of ending the program.
            look_for_args_file: read arguments first from a file next to the script, with the suffix
                ``.args`` instead of the script's, if there is one.
            args_filename: the path of that file, if it is another one.

        Returns:
            The instances. If `add_argument` has added flags, a `Namespace` with these follows. With
            `return_remaining_strings`, the list of the remaining strings comes last.
        """
        args = sys.argv[1:] if args is None else list(args)
        if args_filename is None and look_for_args_file and any(sys.argv[:1]):
            args_filename = str(Path(sys.argv[0]).with_suffix(".args"))
        if args_filename is not None and os.path.isfile(args_filename):
            args = Path(args_filename).read_text(encoding="utf-8").split() + args
        found, remaining = self.parse_known_args(args)
        if remaining and not return_remaining_strings:
            self.refuse(remaining)
        values = vars(found)  # a view: `_instances` removes its fields from `found`
        results = self._instances(values)
        results += [found] if values else []
        return (*results, remaining) if return_remaining_strings else tuple(results)

    def _instances(self, values: dict[str, Any]) -> list[Any]:
        """Makes one instance of each dataclass, and removes its fields from `values`."""
        try:
            for type_ in self.dataclass_types:
                check_ranges(type_, values)
            return [
                type_(**{name: values.pop(name) for name in _flag_names(type_)})
                for type_ in self.dataclass_types
            ]
        except ValueError as error:
            self.error(str(error))

    def parse_json_file(self, json_file: str) -> tuple[Any, ...]:
        """Reads one instance of each dataclass from a JSON file of values by field name."""
        try:
            values = read_json_object(json_file)
        except OSError as error:
            self.error(f"{json_file}: {error.strerror}" if error.strerror else str(error))
        return self.parse_dict(values)

    def parse_dict(self, values: dict[str, Any]) -> tuple[Any, ...]:
        """Makes one instance of each dataclass from a dict, checked as on the command line.

        None means that a flag is not given, and a list of one value stands for that value. Unlike
        on the command line, lists may be empty, and dict fields can be given as dicts.
        """
        names = {name for type_ in self.dataclass_types for name in _flag_names(type_)}
        unknown = values.keys() - names
        if unknown:
            self.error(f"unknown settings: {', '.join(sorted(unknown))}")
        actions = {action.dest: action for action in self._actions if action.dest in names}
        given = {name: value for name, value in values.items() if value is not None}
        missing = [n for n, action in actions.items() if action.required and n not in given]
        if missing:
            flags = ", ".join(f"--{name}" for name in missing)
            self.error(f"the following arguments are required: {flags}")
        try:
            read = {
                name: self._read(action, given[name])
                for name, action in actions.items()
                if name in given
            }
        except ArgumentError as error:
            self.error(str(error))
        return tuple(self._instances({name: self.get_default(name) for name in names} | read))

    def _read(self, action: Action, value: Any) -> Any:
        """Converts a value of a dict to a flag's value.

        Raises:
            ArgumentError: the flag does not accept it.
        """
        is_dict, is_list = isinstance(value, dict), isinstance(value, list | tuple)
        if is_dict and (typing.get_origin(action.type) or action.type) is dict:
            return value
        if is_dict or (is_list and action.nargs != "+" and len(value) != 1):
            raise ArgumentError(action, f"does not accept a {type(value).__name__}")
        # Converted to strings, so that argparse parses and checks them.
        items = [
            self._get_value(action, _as_text(item)) for item in (value if is_list else [value])
        ]
        for item in items:
            self._check_value(action, item)
        return items if action.nargs == "+" else items[0]


_BOUNDS = ("least", "above", "most", "below")


def check_ranges(type_: type, values: Mapping[str, Any]) -> None:
    """Refuses numbers outside their flags' bounds.

    Args:
        type_: a dataclass, whose fields are the flags.
        values: the fields' values by name.

    Raises:
        ValueError: a number is out of bounds.
    """
    for field in dataclasses.fields(type_):
        bounds = {name: field.metadata[name] for name in _BOUNDS if name in field.metadata}
        if bounds:
            check_bounds(f"--{field.name}", values.get(field.name), **bounds)


def _flag_names(type_: type) -> list[str]:
    return [field.name for field in dataclasses.fields(type_) if field.init]


def _as_text(value: Any) -> str:
    return str(value.value if isinstance(value, Enum) else value)


def _add_flag(group: Any, field: dataclasses.Field, hint: Any) -> None:
    hint, many = _plain_type(hint)
    names = [f"--{field.name}"]
    if field.name == "local_rank":
        names.append("--local-rank")  # current versions of torch.distributed.launch write this
    options = _options(field, hint, many)
    if hint is bool and (field.default is True or field.metadata.get("has_no")):
        off = {"action": "store_false", "default": field.default}
        off["help"] = f"the same as --{field.name} False"
        group.add_argument(f"--no_{field.name}", dest=field.name, **off)
    group.add_argument(*names, **options)


def _options(field: dataclasses.Field, hint: Any, many: bool) -> dict[str, Any]:
    """Returns the arguments of `add_argument` for a field of type `hint` (a list if `many`)."""
    options: dict[str, Any] = {"type": hint}
    if field.metadata.get("help"):
        options["help"] = field.metadata["help"].replace("%", "%%")
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    if hint is bool:
        default = True if default is dataclasses.MISSING else default
        return {**options, "type": string_to_bool, "nargs": "?", "const": True, "default": default}
    if default is dataclasses.MISSING:
        options["required"] = True
    else:
        options["default"] = default.value if isinstance(default, Enum) else default
    if many:
        options["nargs"] = "+"
    if field.metadata.get("choices"):
        options["choices"] = field.metadata["choices"]
    if isinstance(hint, type) and issubclass(hint, Enum):
        options["choices"] = [item.value for item in hint]
        options["type"] = type(options["choices"][0])
    return options


def _plain_type(hint: Any) -> tuple[Any, bool]:
    """Unwraps a type hint: ``X | None`` -> (X, False), ``list[X]`` -> (X, True)."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is list:
        return typing.get_args(hint)[0], True
    return hint, False
