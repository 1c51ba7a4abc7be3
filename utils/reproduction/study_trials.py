"""Trials: runs of which a study is made, none of them twice, and how a learning rate is chosen."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from tqdm import tqdm

from reproduction.run_file import RunFile

Key = TypeVar("Key", bound=Hashable)
Trial = TypeVar("Trial", bound=Any)
Results = TypeVar("Results", bound=Any)


class Trials(ABC, Generic[Trial, Results]):
    """The trials of an experiment.

    Args:
        runs: the results of those that are finished.
        jobs: how many run at a time, each on one thread.
    """

    def __init__(self, runs: RunFile[Results], jobs: int):
        self.runs, self.jobs = runs, jobs

    @abstractmethod
    def describe(self, trial: Trial) -> dict[str, Any]:
        """All that decides a trial's results; what it is known by in the file of runs."""

    @abstractmethod
    def carry_out(self, trials: Sequence[Trial]) -> Iterator[tuple[Trial, Results]]:
        """Runs trials side by side; yields each with its results when it is finished."""

    def is_finished(self, trial: Trial) -> bool:
        """Whether there are results of it."""
        return self.describe(trial) in self.runs

    def result(self, trial: Trial) -> Results:
        """A finished trial's.

        Raises:
            KeyError: it is not finished.
        """
        return self.runs[self.describe(trial)]

    def run(self, trials: Sequence[Trial], title: str) -> None:
        """Runs those that are not finished; a result is kept as soon as it is there."""
        missing = [trial for trial in trials if not self.is_finished(trial)]
        if not missing:
            return
        with tqdm(total=len(missing), desc=title, unit="run", disable=None) as progress:
            for trial, results in self.carry_out(missing):
                self.runs[self.describe(trial)] = results
                progress.update()


@dataclass(frozen=True)
class Cell:
    """A method on a task.

    Args:
        method: what is trained.
        tuning: a trial for each learning rate that is tried, of this method or of the one whose
            rate it takes; a single one is not run, as there is nothing to choose.
    """

    method: Any
    tuning: Sequence[Any]

    @property
    def tried(self) -> Sequence[Any]:
        """The trials that are needed to choose."""
        return self.tuning if len(self.tuning) > 1 else ()

    def best(self, trials: Trials) -> Any:
        """The trial with the least loss; those that are tried are finished."""
        if not self.tried:
            return self.tuning[0]
        return min(self.tuning, key=lambda trial: trials.result(trial).loss)

    def final(self, trials: Trials, seeds: Sequence[int]) -> list[Any]:
        """The trials that are measured, with the learning rate chosen."""
        best = self.best(trials)
        return [replace(best, method=self.method, seed=seed, tuning=False) for seed in seeds]

    def is_at_end(self, rate: float) -> bool:
        """Whether a learning rate is the least or the largest of several that were tried."""
        rates = [trial.learning_rate for trial in self.tried]
        return bool(rates) and rate in (min(rates), max(rates))


def run_cells(
    trials: Trials, cells: Mapping[Key, Cell], wanted: Sequence[Key], seeds: Sequence[int]
) -> dict[Key, list[Any]]:
    """Chooses learning rates and trains, where that is not done yet.

    Args:
        trials: runs what is missing, and knows the results.
        cells: all that a report has a place for.
        wanted: those that are to be run.
        seeds: a run each.

    Returns:
        The final trials of the cells that are finished, wanted now or before.
    """
    trials.run([t for key in wanted for t in cells[key].tried], "choosing learning rates")
    trials.run([t for key in wanted for t in cells[key].final(trials, seeds)], "training")
    finished = {}
    for key, cell in cells.items():
        if all(map(trials.is_finished, cell.tried)):
            final = cell.final(trials, seeds)
            if all(map(trials.is_finished, final)):
                finished[key] = final
    return finished
