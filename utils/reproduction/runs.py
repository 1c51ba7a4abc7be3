"""A run of a recipe, and what a tree of recipes says of it."""

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
        seed: the run's.
        folder: where all of it goes.
    """

    recipe: str
    seed: int
    folder: Path

    @property
    def output(self) -> Path:
        """What the recipe writes."""
        return self.folder / "output"

    @property
    def log(self) -> Path:
        """What it prints."""
        return self.folder / "log.txt"

    @property
    def error(self) -> Path:
        """Why its last attempt failed, if it did."""
        return self.folder / "error.txt"

    def __str__(self) -> str:
        return f"{self.recipe}, seed {self.seed}"


def run_of(out: Path, recipe: str, seed: int) -> Run:
    """The run and its place in the output folder."""
    return Run(recipe, seed, out / recipe / f"seed{seed}")


def read_json(path: Path) -> Any:
    """A JSON file's content."""
    return json.loads(path.read_text(encoding="utf-8"))


def trained_sizes(path: Path) -> dict[str, int]:
    """How many values the trained tensors of a checkpoint's file have, by name.

    Of LoRA, a frozen A is not trained, nor is what A and B started as; a full model's file also
    holds the base.
    """
    from loralib.adapters.deltas import START_A, START_B
    from loralib.adapters.metadata import LoraMetadata
    from loralib.io.tensors import read_tensors

    tensors, fields = read_tensors(path)
    metadata = LoraMetadata.from_metadata(fields, path)
    frozen = (START_A, START_B, *(["lora_A"] if metadata and metadata.freeze_A else []))
    return {name: t.numel() for name, t in tensors.items() if not name.endswith(frozen)}


class Tree(ABC):
    """The recipes of NLU/ or NLG/: how they are run, and what they leave.

    Args:
        out: folder of all runs; absolute.
        small: whether the runs are trials.

    Attributes:
        title: what the tables of its rows are called.
        section: the paper's, in paper_results.json.
        seeds: of the runs, unless others are asked for.
        columns: of its tables: task or corpus -> title.
        small_name: what the folder with the small data and base of trials is called.
        small: that folder; None where the runs are not trials.
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
        """Recipes by row and column."""

    @abstractmethod
    def measure(self, column: str) -> str:
        """What a column's figures are."""

    @abstractmethod
    def obstacle(self, run: Run) -> str | None:
        """Why a run cannot begin; None where it can."""

    @abstractmethod
    def command(self, run: Run) -> tuple[list[str], dict[str, str]]:
        """What begins or resumes a run: the command, and environment variables for it."""

    @abstractmethod
    def figures(self, run: Run) -> Figures | None:
        """What the paper's table has of a run; None for one that is not finished."""

    @abstractmethod
    def other_scores(self, run: Run) -> dict[str, float]:
        """A finished run's further scores, by name."""

    @abstractmethod
    def curve(self, run: Run) -> tuple[list[float], list[float]]:
        """The learning curve that a run has logged so far."""

    @abstractmethod
    def curve_axes(self, run: Run) -> tuple[str, str]:
        """The titles of the curve's axes."""

    @abstractmethod
    def trained(self, run: Run) -> str:
        """How many parameters a finished run has trained; empty where its checkpoints are gone."""

    @abstractmethod
    def make_small(self) -> None:
        """Makes the small data and the small base of trials."""


def problem_of(tree: Tree, run: Run) -> str | None:
    """Why there are no figures of a run; None where there are."""
    if tree.figures(run) is not None:
        return None
    if run.error.is_file():
        return f"failed: {run.error.read_text(encoding='utf-8').strip()}"
    if run.log.is_file():
        return "unfinished, the same command resumes it"
    obstacle = tree.obstacle(run)
    return f"not run ({obstacle})" if obstacle else "not run"
