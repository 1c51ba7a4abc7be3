"""Errors that a user can act on. Their messages are one line.

The messages name the library's arguments. A script whose flags set these adds the flags to the
messages with `adding_ways_out`.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .text import in_short


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or that does not fit.

    The message is one line, even if it quotes a name with line breaks.
    """

    def __init__(self, message: str):
        super().__init__(" ".join(message.splitlines()))

    def __reduce__(self) -> tuple[Any, ...]:
        # By default, a copy is made from the message, but the classes below take other arguments.
        return _restored, (type(self), self.args), self.__dict__


def _restored(kind: type[CheckpointError], args: tuple[Any, ...]) -> CheckpointError:
    """Returns a pickled error, made without its constructor. Pickle then sets its attributes."""
    # Python creates instances of subclasses of OSError only with OSError.__new__.
    new = OSError.__new__ if issubclass(kind, OSError) else kind.__new__
    error = new(kind)
    error.args = args
    return error


class AlphaError(CheckpointError):
    """LoRA whose alpha is unknown or out of range, or differs from the one that was given.

    Args:
        source: the adapter.
        found: the alpha that it was trained with; None if it does not record that.
        given: the alpha that the caller gave, if any.
    """

    def __init__(self, source: str, found: float | None = None, given: float | None = None):
        self.found, self.given = found, given
        if given is None:
            message = "does not record the alpha it was trained with; give it as lora_alpha"
        elif found is None and given > 0:
            message = f"lora_alpha is too {'large' if given > 1 else 'small'}: {given:g}"
        elif found is None:
            message = f"lora_alpha has to be above 0, not {given:g}"
        else:
            message = (
                f"was trained with alpha {found:g}, but lora_alpha is {given:g}: "
                f"give {found:g}, or leave lora_alpha out"
            )
        super().__init__(f"{source}: {message}")


class WrongBaseError(CheckpointError):
    """An adapter that was trained on another base than the one that was given.

    Args:
        source: the adapter.
        base: the name of the adapter's base, if the adapter records it.
        expected: the fingerprint of the adapter's base.
        found: the fingerprint of the base that was given.
    """

    def __init__(self, source: str, base: str | None, expected: str, found: str):
        self.base, self.expected, self.found = base, expected, found
        theirs, way_out = "one of unknown name", "give the base that it was trained on"
        if base:
            theirs, way_out = f"'{base}'", f"give '{base}'"
        super().__init__(
            f"{source}: was trained on another base than the one given: {theirs} "
            f"(fingerprint {expected}), not one of fingerprint {found}; {way_out} or, if words "
            "were added to it, the model saved with them"
        )


class AdapterAsModelError(CheckpointError, OSError):
    """An adapter that was given as the model.

    Args:
        source: the adapter.
        base: the name of the adapter's base, if the adapter records it.
    """

    def __init__(self, source: str, base: str | None = None):
        self.source, self.base = source, base
        named = f" ('{base}')" if base else ""
        super().__init__(
            f"'{source}' is an adapter, not a model: give its base{named} as the model, and this "
            "as the adapter"
        )


class ModelAsAdapterError(CheckpointError):
    """A model that was given as the adapter.

    Args:
        source: the model.
    """

    def __init__(self, source: str):
        self.source = source
        super().__init__(f"{source}: is a model without LoRA, not an adapter")


# What to do with a file that only its model can tell the settings of.
BY_ITS_MODEL = (
    "load it with load_state_dict into the model with its LoRA layers, then write the adapter with "
    "save_adapter"
)


class FullModelError(CheckpointError):
    """A checkpoint that holds a full model where only an adapter is expected.

    Args:
        source: the checkpoint.
        found: the name of a tensor that belongs to no adapter.
    """

    def __init__(self, source: str, found: str):
        self.source = source
        super().__init__(
            f"{source}: holds a full model, not LoRA alone: {found}, …; {BY_ITS_MODEL}"
        )


class MissingLayersError(CheckpointError):
    """A model without the layers that an adapter's weights belong to.

    Args:
        source: the adapter.
        kind: the adapter's kind in words, such as "LoRA".
        switch: the setting that builds a model with such layers.
    """

    def __init__(self, source: str, kind: str, switch: str):
        self.kind, self.switch = kind, switch
        super().__init__(
            f"{source}: the model has no {kind} layers to take it: build it with {switch}"
        )


class SettingsError(CheckpointError):
    """An adapter that was trained with another setting than the model was built with.

    Args:
        source: the adapter.
        what: the setting's name in the metadata.
        theirs: its value in the adapter.
        ours: its value in the model.
        module: the module that has these values, if modules differ.
    """

    def __init__(self, source: str, what: str, theirs: object, ours: object, module: str = ""):
        self.what, self.theirs, self.module = what, theirs, module
        where = f" (in {module})" if module else ""
        super().__init__(f"{source}: {trained_with(what, theirs, ours)}{where}")


class MissingPartError(CheckpointError):
    """An adapter that was trained with another part, which is in a file that was not given.

    Args:
        source: the adapter.
        switch: the setting of the missing part.
    """

    def __init__(self, source: str, switch: str):
        self.switch = switch
        super().__init__(
            f"{source}: was trained with {switch} as well, whose weights are in a separate file: "
            "give that file too"
        )


class NeedsMergingError(CheckpointError):
    """An adapter that a format, a model's layers or a bank cannot express.

    Merged into its base with `loralib.adapters.merging.merge_into`, it computes what was trained.

    Args:
        source: the adapter.
        reason: what cannot be expressed, and by what.
    """

    def __init__(self, source: str, reason: str):
        self.reason = reason
        super().__init__(f"{source}: {reason}; merge it into its base")


class DiskFullError(OSError):
    """A file that does not fit on its disk. The message is one line.

    Args:
        path: the file.
        needed: the number of bytes that it takes at least, 0 if unknown; None if it could not be
            created, which may also mean that the number of files has reached its limit.
        is_quota: whether the user's quota is used up, and not the disk.
    """

    def __init__(self, path: Path, needed: int | None, is_quota: bool = False):
        self.path, self.needed, self.is_quota = path, needed, is_quota
        full = "the user's quota is used up" if is_quota else "the disk is full"
        # Of a new folder's parents, not all may be there.
        there = next(folder for folder in path.absolute().parents if folder.is_dir())
        free = shutil.disk_usage(there).free
        size = f"the file takes at least {needed:,} bytes, " if needed else ""
        super().__init__(
            f"{path}: {full}: no more files can be created, the disk has {free:,} bytes free; "
            "remove some files and start again"
            if needed is None
            else f"{path}: {full}: {size}the disk has {free:,} bytes free; make room and start "
            "again"
        )


class UnsupportedLayerError(TypeError):
    """A module that was to be adapted, but cannot have LoRA."""


class TrainingError(RuntimeError):
    """A run that cannot continue. The message is one line."""


WayOut = str | Callable[[CheckpointError], str]


@contextmanager
def adding_ways_out(ways_out: Mapping[type[CheckpointError], WayOut]) -> Iterator[None]:
    """Appends what the user of a script can do to errors of these classes within this block.

    Args:
        ways_out: the error's class -> the text that is added in parentheses, or a function that
            returns it for an error.
    """
    try:
        yield
    except CheckpointError as error:
        for kind, way_out in ways_out.items():
            if isinstance(error, kind):
                added = way_out if isinstance(way_out, str) else way_out(error)
                error.args = (f"{error} ({added})",) if added else error.args
        raise


def trained_with(what: str, theirs: object, ours: object) -> str:
    """Returns the error message for an adapter and a model whose settings differ."""
    before, now = (
        in_short(value, width=120) if isinstance(value, tuple) else str(value)
        for value in (theirs, ours)
    )
    return f"was trained with {what} {before}, the model was built with {now}"
