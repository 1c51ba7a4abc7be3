"""Trials side by side: as many at a time as there are cores, each in a process of its own."""

import multiprocessing
from collections.abc import Sequence

from tqdm import tqdm

from reproduction.run_file import RunFile
from reproduction.study_runs import Experiment, Results, Trial, describe, run_trial


class Trials:
    """The trials of an experiment, of which none is run twice.

    Args:
        experiment: what they train.
        runs: the results of those that are finished.
        jobs: how many run at a time, each on one thread.
    """

    def __init__(self, experiment: Experiment, runs: RunFile[Results], jobs: int):
        self.experiment, self.runs, self.jobs = experiment, runs, jobs
        self.fingerprint = experiment.fingerprint()

    def result(self, trial: Trial) -> Results:
        """A finished trial's.

        Raises:
            KeyError: it is not finished.
        """
        return self.runs[describe(trial, self.fingerprint)]

    def run(self, trials: Sequence[Trial], title: str) -> None:
        """Runs those that are not finished, in this order; a result is kept when it is there."""
        missing = [t for t in trials if describe(t, self.fingerprint) not in self.runs]
        if not missing:
            return
        # Forked from a process that has imported everything and has run nothing.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["reproduction.study_runs"])
        work = [(self.experiment, trial) for trial in missing]
        with (
            context.Pool(self.jobs, initializer=_use_one_thread, maxtasksperchild=1) as pool,
            tqdm(total=len(work), desc=title, unit="run", disable=None) as progress,
        ):
            for trial, results in pool.imap_unordered(_run, work):
                self.runs[describe(trial, self.fingerprint)] = results
                progress.set_postfix_str(f"{trial.task}, {trial.method.name}", refresh=False)
                progress.update()


def _use_one_thread() -> None:
    import torch

    torch.set_num_threads(1)  # a model this small is not faster on several


def _run(work: tuple[Experiment, Trial]) -> tuple[Trial, Results]:
    experiment, trial = work
    return trial, run_trial(experiment, trial)
