"""Reads and checks the state from which a run resumes, bit-exact or with a message why not.

A resumable state consists of the trained weights, the states of optimizer, schedule and gradient
scaler, the place in the data, gradients that no update has used yet, and every process's random
generators. A training loop decides in which files it is stored. Each is written by `write_torch` or
`replacing_folder`, so that a run that is killed leaves either the old state or the new one.
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
from ..io.structure import check_structure
from ..io.tensors import verify_archive
from ..text import first_line
from .determinism import rng_state

logger = logging.getLogger(__name__)


class Stateful(Protocol):
    """Anything with a state: an optimizer, a schedule, a `Precision`."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as plain values and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restores what `state_dict` returned."""


class DamagedStateError(CheckpointError):
    """A file that a run would resume from cannot be used; the message says what to do."""


@contextmanager
def naming_damaged_file(path: str | os.PathLike, way_out: str) -> Iterator[None]:
    """Turns any error in a block that reads a file and uses its content into one that names it.

    Args:
        path: the file.
        way_out: what the user can do.

    Raises:
        DamagedStateError: the block raised an error.
    """
    try:
        yield
    except DamagedStateError:
        raise
    except Exception as error:  # with a damaged pickle, torch may raise any error
        # A KeyError puts quotes around its message, and the system's errors begin with a number.
        reason = str(error.args[0]) if isinstance(error, KeyError) else first_line(error)
        reason = getattr(error, "strerror", None) or reason.removeprefix(f"{path}: ")
        raise DamagedStateError(f"{path}: missing or damaged ({reason}); {way_out}") from error


def read_state(
    path: str | os.PathLike, example: Any = None, device: torch.device | str = "cpu"
) -> Any:
    """Verifies a torch file's checksums and reads it weights-only, so that no code in it runs.

    Args:
        path: the file.
        example: a value of the structure that its content has to have, see `check_structure`.
        device: where tensors are put.

    Raises:
        Exception: of any kind, if the file is missing or damaged; see `naming_damaged_file`.
    """
    verify_archive(path)
    state = torch.load(Path(path), map_location=device, weights_only=True)
    check_structure(state, example)
    return state


def restore(part: Stateful, state: Any, checked: Collection[str] | None = None) -> None:
    """Restores a part of a run from the state that its `state_dict` returned.

    Args:
        part: what is restored.
        state: as read from a file.
        checked: the entries that must have the structure of the part's own; None for all. Entries
            that the part does not have are skipped.

    Raises:
        Exception: of any kind, if the state is not this part's; see `naming_damaged_file`.
    """
    example = part.state_dict()
    if checked is not None:
        example = {name: example[name] for name in checked if name in example}
    check_structure(state, example)
    part.load_state_dict(state)


def like_rng_state() -> dict[str, Any]:
    """Returns an example of a process's `rng_state` for `check_structure`.

    It has no GPU's generator, because `set_rng_state` checks whether a state has one.
    """
    return rng_state(torch.device("cpu"))


def check_same_run(
    where: str | os.PathLike, before: Mapping[str, Any], now: Mapping[str, Any], way_out: str
) -> None:
    """Checks that a run would resume with the settings that it began with.

    Args:
        where: the file or folder from which it would resume.
        before: the settings that it began with, by name. One that is missing was off, as in an
            older version, which did not have it.
        now: this run's settings, which have to be the same.
        way_out: what the user can do.

    Raises:
        CheckpointError: a setting differs; the message names it.
    """
    for name, value in now.items():
        if before.get(name) != value and (name in before or value):
            was, becomes = short_digest(before.get(name)), short_digest(value)
            raise CheckpointError(
                f"{where}: belongs to a run with {name} {was}, but this run has {becomes}: "
                f"{way_out}"
            )


def check_not_beyond(where: str | os.PathLike, done: int, steps: int, way_out: str) -> None:
    """Checks that a run that resumes has not already made more steps than it is to make.

    Args:
        where: the file or folder from which it resumes.
        done: how many steps it has made.
        steps: how many steps it is to make in total.
        way_out: what the user can do besides giving the original length.

    Raises:
        CheckpointError: it has made more.
    """
    if done > steps:
        raise CheckpointError(
            f"{where}: has made {done} steps, but this run ends after {steps}: give the length "
            f"that it began with, or {way_out}"
        )


def warn_of_length(where: str | os.PathLike, before: int, now: int) -> None:
    """Warns if a run resumes with a schedule of another length than it began with.

    Args:
        where: the file or folder from which it resumes.
        before: the number of steps of the original schedule.
        now: the number of steps of this run's schedule.
    """
    if before != now:
        logger.warning(
            "%s belongs to a run of %d steps, but this run has %d: from here on the learning rate "
            "follows the new length; unless it is constant, the result matches neither run",
            *(where, before, now),
        )
