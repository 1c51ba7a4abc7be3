"""Runs the trials of an experiment, each only once, and chooses learning rates."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from tqdm import tqdm

from reproduction.run_file import RunFile


@dataclass(frozen=True)
class Trial:
    """A run of a method.

    Args:
        method: the method.
        learning_rate: the peak learning rate.
        seed: the seed of new weights, the order of the data, and dropout.
        tuning: whether the run is for choosing the learning rate, on the training set only.
    """

    method: Any
    learning_rate: float
    seed: int
    tuning: bool


Key = TypeVar("Key", bound=Hashable)
OfTrial = TypeVar("OfTrial", bound=Trial)
Results = TypeVar("Results", bound=Any)


class Trials(ABC, Generic[OfTrial, Results]):
    """The trials of an experiment.

    Args:
        runs: the results of finished trials.
    """

    def __init__(self, runs: RunFile[Results]):
        self.runs = runs

    @abstractmethod
    def describe(self, trial: OfTrial) -> dict[str, Any]:
        """Returns all that determines a trial's results, which identifies it in the run file."""

    @abstractmethod
    def carry_out(self, trials: Sequence[OfTrial]) -> Iterator[tuple[OfTrial, Results]]:
        """Runs trials; yields each with its results when it is finished."""

    def is_finished(self, trial: OfTrial) -> bool:
        """Returns whether there are results of a trial."""
        return self.describe(trial) in self.runs

    def result(self, trial: OfTrial) -> Results:
        """Returns a finished trial's results.

        Raises:
            KeyError: the trial is not finished.
        """
        return self.runs[self.describe(trial)]

    def run(self, trials: Sequence[OfTrial], title: str) -> None:
        """Runs the trials that are not finished; saves each result as soon as it is there."""
        missing: list[OfTrial] = []
        for trial in trials:  # cells that are tuned as another one share its trials
            if trial not in missing and not self.is_finished(trial):
                missing.append(trial)
        if not missing:
            return
        with tqdm(total=len(missing), desc=title, unit="run", disable=None) as progress:
            for trial, results in self.carry_out(missing):
                self.runs[self.describe(trial)] = results
                progress.update()


@dataclass(frozen=True)
class Cell:
    """A method on a task, which is a cell of a study's table.

    Args:
        method: the method.
        tuning: a trial for each learning rate to choose from, of this method or of the one whose
            rate it uses. A single one is not run, as there is nothing to choose.
    """

    method: Any
    tuning: Sequence[Trial]

    @property
    def tried(self) -> Sequence[Trial]:
        """The trials that are needed to choose a learning rate."""
        return self.tuning if len(self.tuning) > 1 else ()

    def best(self, trials: Trials) -> Trial:
        """Returns the trial with the lowest loss; those in `tried` have to be finished."""
        if not self.tried:
            return self.tuning[0]
        return min(self.tuning, key=lambda trial: trials.result(trial).loss)

    def final(self, trials: Trials, seeds: Sequence[int]) -> list[Trial]:
        """Returns the trials that are measured, one per seed, with the chosen learning rate."""
        best = self.best(trials)
        return [replace(best, method=self.method, seed=seed, tuning=False) for seed in seeds]

    def is_at_end(self, rate: float) -> bool:
        """Returns whether a learning rate is the smallest or the largest of several tried."""
        rates = [trial.learning_rate for trial in self.tried]
        return bool(rates) and rate in (min(rates), max(rates))


def run_cells(
    trials: Trials, cells: Mapping[Key, Cell], wanted: Sequence[Key], seeds: Sequence[int]
) -> dict[Key, list[Trial]]:
    """Chooses learning rates and trains, as far as that has not been done yet.

    Args:
        trials: the experiment's trials.
        cells: all cells of the report.
        wanted: the keys of the cells to run.
        seeds: the seeds, with one run each.

    Returns:
        The final trials of the cells that are finished, wanted now or before.
    """
    trials.run([t for key in wanted for t in cells[key].tried], "choosing learning rates")
    finals = [cells[key].final(trials, seeds) for key in wanted]
    # Seed by seed, so that after an interruption all cells have the first seeds.
    trials.run([t for of_seed in zip(*finals, strict=True) for t in of_seed], "training")
    finished = {}
    for key, cell in cells.items():
        if all(map(trials.is_finished, cell.tried)):
            final = cell.final(trials, seeds)
            if all(map(trials.is_finished, final)):
                finished[key] = final
    return finished
