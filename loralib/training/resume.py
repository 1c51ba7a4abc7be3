"""What a run resumes from, checked when it is read: a run resumes bit-exact, or says why not.

A resumable state is: the weights that are trained, the states of optimizer, schedule and gradient
scaler, the place in the data, gradients that no update has used yet, and every process's random
generators. A training loop decides into which files it goes, each written by `write_torch` or
`replacing_folder`, so that a kill leaves the old state or the new one.
"""

import logging
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from ..errors import CheckpointError
from ..io.digests import short_digest
from ..io.likeness import check_like
from ..io.tensors import verify_archive
from ..text import first_line
from .determinism import rng_state

logger = logging.getLogger(__name__)


class Stateful(Protocol):
    """An optimizer, a schedule, a precision: what has a state of its own."""

    def state_dict(self) -> dict[str, Any]:
        """The state, as plain values and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Takes over what `state_dict` returned."""


class DamagedStateError(CheckpointError):
    """A file that a run would resume from cannot be used; the message says what to do."""


@contextmanager
def damage_named(path: str | os.PathLike, way_out: str) -> Iterator[None]:
    """Whatever goes wrong in the block, which reads a file and uses what it holds, names the file.

    Args:
        path: the file.
        way_out: what a user can do.

    Raises:
        DamagedStateError: something went wrong.
    """
    try:
        yield
    except DamagedStateError:
        raise
    except Exception as error:  # a damaged pickle makes torch raise errors of any kind
        # A KeyError puts quotes around its message, and the system's own errors have a number.
        reason = str(error.args[0]) if isinstance(error, KeyError) else first_line(error)
        reason = getattr(error, "strerror", None) or reason.removeprefix(f"{path}: ")
        raise DamagedStateError(f"{path}: missing or damaged ({reason}); {way_out}") from error


def read_state(
    path: str | os.PathLike, example: Any = None, device: torch.device | str = "cpu"
) -> Any:
    """Reads a torch file, weights-only, after its checksums: nothing in it is run.

    Args:
        path: the file.
        example: what its content has to be built like, see `check_like`.
        device: where tensors go.

    Raises:
        Exception: of any kind, where the file is missing or damaged; see `damage_named`.
    """
    verify_archive(path)
    state = torch.load(Path(path), map_location=device, weights_only=True)
    check_like(state, example)
    return state


def restore(part: Stateful, state: Any, checked: Collection[str] | None = None) -> None:
    """Puts a part of a run where its `state_dict` found it.

    Args:
        part: what is restored.
        state: from a file.
        checked: the entries that have to be built as the part's own are; None for all. Those that
            the part does not have are passed over.

    Raises:
        Exception: of any kind, where the state is not this part's; see `damage_named`.
    """
    example = part.state_dict()
    if checked is not None:
        example = {name: example[name] for name in checked if name in example}
    check_like(state, example)
    part.load_state_dict(state)


def like_rng_state() -> dict[str, Any]:
    """An example of a process's `rng_state`, for `check_like`.

    It has no GPU's generator: whether there is one is found out when a state is set.
    """
    return rng_state(torch.device("cpu"))


def check_same_run(
    where: str | os.PathLike, before: Mapping[str, Any], now: Mapping[str, Any], way_out: str
) -> None:
    """Checks that a run would resume with the settings that it began with.

    Args:
        where: the file or folder that it would resume from.
        before: its settings, by name.
        now: those that it has to have.
        way_out: what a user can do.

    Raises:
        CheckpointError: one differs; the message names it.
    """
    for name, value in now.items():
        if before.get(name) != value:
            was, becomes = short_digest(before.get(name)), short_digest(value)
            raise CheckpointError(
                f"{where}: is of a run with {name} {was}, not {becomes}: {way_out}"
            )


def check_not_beyond(where: str | os.PathLike, done: int, steps: int, way_out: str) -> None:
    """Checks that a run which resumes has not made more steps than it is to have.

    Args:
        where: the file or folder that it resumes from.
        done: the steps that it has made.
        steps: those that it is to have.
        way_out: what a user can do besides giving it its length.

    Raises:
        CheckpointError: it has.
    """
    if done > steps:
        raise CheckpointError(
            f"{where}: has made {done} steps, and this run ends after {steps}: give the length "
            f"that it began with, or {way_out}"
        )


def warn_of_length(where: str | os.PathLike, before: int, now: int) -> None:
    """Warns where a run resumes with another schedule than it began with.

    Args:
        where: the file or folder that it resumes from.
        before: the steps of its schedule.
        now: those that it has by now.
    """
    if before != now:
        logger.warning(
            "%s is of a run of %d steps, this one has %d: from here on the learning rate follows "
            "the new length; unless it is constant, the result matches neither run",
            *(where, before, now),
        )
