"""Defines a run of a recipe, and what NLU/ and NLG/ have to implement to be reproduced."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

ROOT = Path(__file__).resolve().parents[2]
"""The project's folder."""

Figures = tuple[float, ...]
"""A cell's figures, in percent: accuracy; or matched and mismatched accuracy; …"""


@dataclass(frozen=True)
class Run:
    """A recipe with a seed.

    Args:
        recipe: the recipe's name.
        seed: the run's seed.
        folder: the folder for everything that the run writes.
    """

    recipe: str
    seed: int
    folder: Path

    @property
    def output(self) -> Path:
        """The folder that the recipe writes to."""
        return self.folder / "output"

    @property
    def log(self) -> Path:
        """The file with everything that the recipe prints."""
        return self.folder / "log.txt"

    @property
    def error(self) -> Path:
        """The file with the last attempt's error, if it failed."""
        return self.folder / "error.txt"

    def __str__(self) -> str:
        return f"{self.recipe}, seed {self.seed}"


def run_of(out: Path, recipe: str, seed: int) -> Run:
    """Returns the run of a recipe with a seed, which has its folder in the output folder."""
    return Run(recipe, seed, out / recipe / f"seed{seed}")


def read_json(path: Path) -> Any:
    """Reads a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def trained_sizes(path: Path) -> dict[str, int]:
    """Returns the number of values in each tensor of a checkpoint's file, by name.

    Left out are LoRA's tensors that are not trained: a frozen A, and the initial values of A and B.
    The file of a full model also holds the base's tensors.
    """
    from loralib.adapters.deltas import START_A, START_B
    from loralib.adapters.metadata import LoraMetadata
    from loralib.io.tensors import read_tensors

    tensors, fields = read_tensors(path)
    metadata = LoraMetadata.from_metadata(fields, path)
    frozen = (START_A, START_B, *(["lora_A"] if metadata and metadata.freeze_A else []))
    return {name: t.numel() for name, t in tensors.items() if not name.endswith(frozen)}


class Tree(ABC):
    """The recipes of NLU/ or NLG/: how they are run, and how their results are read.

    Args:
        out: the folder of all runs, as an absolute path.
        small: whether the runs are trials.

    Attributes:
        title: the title of its tables.
        section: the section of paper_results.json with the paper's figures.
        seeds: the default seeds.
        columns: the columns of its tables: task or corpus -> title.
        small_name: the name of the folder with the small data and the small base of trials.
        small: the path of that folder; None if the runs are not trials.
    """

    title: ClassVar[str]
    section: ClassVar[str]
    seeds: ClassVar[tuple[int, ...]]
    columns: ClassVar[Mapping[str, str]]
    small_name: ClassVar[str]

    def __init__(self, out: Path, small: bool):
        self.out = out
        self.small = out / "small" / self.small_name if small else None

    @abstractmethod
    def rows(self) -> dict[str, dict[str, str]]:
        """Returns recipes by row and column."""

    @abstractmethod
    def measure(self, column: str) -> str:
        """Returns the name of a column's metrics."""

    @abstractmethod
    def obstacle(self, run: Run) -> str | None:
        """Returns why a run cannot begin; None if it can."""

    @abstractmethod
    def command(self, run: Run) -> tuple[list[str], dict[str, str]]:
        """Returns the command that begins or resumes a run, and environment variables for it."""

    @abstractmethod
    def figures(self, run: Run) -> Figures | None:
        """Returns a run's figures, as in the paper's table; None for one that is not finished."""

    @abstractmethod
    def other_scores(self, run: Run) -> dict[str, float]:
        """Returns a finished run's other scores, by name."""

    @abstractmethod
    def curve(self, run: Run) -> tuple[list[float], list[float]]:
        """Returns the learning curve that a run has logged so far: x and y values."""

    @abstractmethod
    def curve_axes(self, run: Run) -> tuple[str, str]:
        """Returns the titles of the curve's axes."""

    @abstractmethod
    def trained(self, run: Run) -> str:
        """Returns how many parameters a finished run has trained; empty without checkpoints."""

    @abstractmethod
    def make_small(self) -> None:
        """Makes the small data and the small base of trials."""


def problem_of(tree: Tree, run: Run) -> str | None:
    """Returns why a run has no figures; None if it has."""
    if tree.figures(run) is not None:
        return None
    if run.error.is_file():
        return f"failed: {run.error.read_text(encoding='utf-8').strip()}"
    if run.log.is_file():
        return "unfinished; the same command resumes it"
    obstacle = tree.obstacle(run)
    return f"not run ({obstacle})" if obstacle else "not run"
