"""Finds out whether a launcher has restarted a run, by a file that earlier attempts left."""

import json
import logging
import multiprocessing
import os
import socket
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..io.atomic import atomic_write_text
from .distributed import gather_objects
from .locks import parent_of, started

logger = logging.getLogger(__name__)

_LAUNCH_NAME = ".launch.json"


@dataclass(frozen=True)
class Launch:
    """A run as its launcher sees it: one attempt, or several.

    Args:
        path: the file by which a later attempt recognizes earlier ones.
        agents: the launcher's agents, one per host, of this attempt and those before; empty without
            a launcher.
        is_restart: whether there was an earlier attempt.
        note: what the first attempt recorded for later ones.
    """

    path: Path
    agents: tuple[str, ...]
    is_restart: bool
    note: Any

    def begin(self, note: Any = None) -> None:
        """Writes the file for later attempts; for the main process, once everything is checked.

        Args:
            note: anything that JSON can hold. After a restart, the first attempt's is kept instead.
        """
        if self.agents:
            note = self.note if self.is_restart else note
            atomic_write_text(self.path, json.dumps({"agents": self.agents, "note": note}))


def find_launch(folder: str | os.PathLike, world_size: int) -> Launch:
    """Finds out whether a launcher has started this run before, in an earlier attempt.

    All processes have to call it, with the folder that the run writes to. An attempt belongs to the
    same run as the file there if they have an agent in common: at least one of the hosts was not
    lost.
    """
    path = Path(folder, _LAUNCH_NAME)
    agents = tuple(agent for agent in gather_objects(_agent(), world_size) if agent)
    # All processes use what the first one reads.
    earlier = gather_objects(_read_launch(path, agents), world_size)[0]
    if earlier is None:
        return Launch(path, agents, False, None)
    all_agents = tuple(dict.fromkeys([*earlier["agents"], *agents]))
    return Launch(path, all_agents, True, earlier["note"])


def _agent() -> str | None:
    """Returns a unique name of the agent that started this process; None without a launcher."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    agent = _agent_number()
    return f"{socket.gethostname()} {agent} {started(agent)}"


def _agent_number() -> int:
    """Returns the agent's process id.

    The agent makes this process by `multiprocessing`, or starts a program that leads a session of
    its own: Python, or a shell that starts Python.
    """
    maker = multiprocessing.parent_process()
    if maker is not None and maker.pid is not None:
        return maker.pid
    if sys.platform == "win32":  # which has no sessions
        return os.getppid()
    # A leader outside this container has the number 0, and no known parent.
    return parent_of(os.getsid(0)) or os.getppid()


def _read_launch(path: Path, agents: Collection[str]) -> dict[str, Any] | None:
    """Reads what an earlier attempt with one of these agents wrote; None if there was none."""
    try:
        launch = json.loads(path.read_text(encoding="utf-8"))
        found = {"agents": launch["agents"], "note": launch["note"]}
        return found if {*found["agents"]} & {*agents} else None
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError):
        logger.warning("%s is damaged: this counts as a new run", path)
        return None
