"""Trains the study's GPT-2 with the scripts of NLG/: a base on the corpus, then methods on E2E.

Methods are trained on E2E's validation set, which is small enough for a study, and measured on its
test set. Learning rates are chosen by the loss on a fifth of the validation set, which shares no
meaning representation with the rest.
"""

import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from loralib.errors import TrainingError
from loralib.io.atomic import atomic_write_text
from reproduction.programs import environment, last_error
from reproduction.run_file import RunFile, fingerprint
from reproduction.runs import ROOT, read_json, trained_sizes
from reproduction.study_data import TUNING_SHARE
from reproduction.study_rows import Gpt2Method
from reproduction.trials import Trial, Trials

logger = logging.getLogger(__name__)

CARD = "gpt2.xs"
EPOCHS, TUNING_EPOCHS = 3, 1
COMMON = {
    "lora_dropout": 0.1,
    "label_smooth": 0.1,
    "train_batch_size": 8,
    "adam_beta2": 0.999,
    "scheduler": "linear",
    "warmup_step": 100,
    "weight_decay": 0.01,
}
"""The flags that all runs have in common: the release's, with less time to warm up."""
_DIVERGED = re.compile(r"\bloss\b.* is (nan|-?inf)\b")  # matches an error of gpt2_ft.py
SCORES = ("BLEU", "NIST", "METEOR", "ROUGE_L", "CIDEr")


class Used(NamedTuple):
    """The CPU time of a program in seconds, and its peak memory in bytes."""

    seconds: float
    memory: int


@dataclass(frozen=True)
class Gpt2Trial(Trial):
    """A run of a method on E2E."""

    method: Gpt2Method

    @property
    def epochs(self) -> int:
        """The number of passes over the training data."""
        return TUNING_EPOCHS if self.tuning else EPOCHS

    @property
    def name(self) -> str:
        """The name of the trial's folder."""
        kind = "lora" if "lora_dim" in self.method.flags else "full"
        stage = "tuning" if self.tuning else "final"
        return f"{kind}_{self.learning_rate:g}_{stage}_{self.seed}"


@dataclass(frozen=True)
class Gpt2Results:
    """The results of a trial.

    Args:
        loss: the loss on the measured examples, per token, in nats.
        scores: E2E's scores by name; empty for tuning.
        parameters: the number of trained parameters.
        seconds: the CPU time of training.
        memory: the peak memory of the training process in bytes, including libraries.
    """

    loss: float
    scores: Mapping[str, float]
    parameters: int
    seconds: float
    memory: int


class Gpt2Trials(Trials[Gpt2Trial, Gpt2Results]):
    """The base, the data, and the trials on them.

    Args:
        folder: the folder for all files.
        vocab: the folder with GPT-2's vocabulary.
        runs: the results of finished trials.
        jobs: the number of trials that run at a time, each on one thread.
    """

    def __init__(self, folder: Path, vocab: Path, runs: RunFile[Gpt2Results], jobs: int):
        super().__init__(runs)
        self.folder, self.vocab, self.jobs = folder, vocab, jobs

    @property
    def base(self) -> Path:
        """The file of the base's weights."""
        return self.folder / "base.pt"

    def prepare(self, sentences: Sequence[str], e2e: Path) -> None:
        """Encodes the texts that have not been encoded yet.

        Args:
            sentences: the corpus.
            e2e: the folder with E2E's ``valid.txt`` and ``test.txt``.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        # The first word is the context, which may not be empty; --obj jlm learns it as well.
        parts = [sentence.partition(" ") for sentence in sentences]
        rows = [{"context": first, "completion": rest} for first, _, rest in parts if rest]
        self._encode("corpus", rows)
        train, test = (self._formatted(e2e, split) for split in ("valid", "test"))
        # Rows with the same meaning representation follow each other. The cut is moved so that both
        # parts have different ones.
        cut = round(len(train) * (1 - TUNING_SHARE))
        while train[cut]["context"] == train[cut - 1]["context"]:
            cut += 1
        for name, rows in (
            ("train", train),
            ("tuning_train", train[:cut]),
            ("tuning", train[cut:]),
            ("test", test),
        ):
            self._encode(name, rows)

    def train_base(self) -> None:
        """Trains the base on the corpus, in one pass, unless that has been done."""
        if self.base.is_file():
            return
        work = self.folder / "base"
        self._run(
            *("src/gpt2_ft.py", "--platform", "local", "--model_card", CARD, "--obj", "jlm"),
            "--bf16",
            *("--train_data", self._file("corpus"), "--valid_data", self._file("test")),
            *("--train_batch_size", 32, "--max_epoch", 1, "--lr", 2e-3, "--correct_bias"),
            *("--warmup_step", 100, "--weight_decay", 0.01, "--log_interval", 50),
            *("--eval_interval", 10_000, "--save_interval", 10_000),
            *("--work_dir", work, "--random_seed", 1, "--resume"),
            threads=self.jobs,
        )
        last = max(work.glob("model.*.pt"), key=lambda path: int(path.suffixes[0][1:]))
        os.replace(last, self.base)

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of the base and the examples."""
        return fingerprint(
            [self.base, *map(self._file, ("train", "tuning_train", "tuning", "test"))]
        )

    def describe(self, trial: Gpt2Trial) -> dict[str, Any]:
        """As in `Trials`."""
        return {
            "task": "e2e",
            "flags": {**COMMON, **trial.method.flags},
            "max_epoch": trial.epochs,
            "learning_rate": trial.learning_rate,
            "seed": trial.seed,
            "tuning": trial.tuning,
            "base_and_data": self.fingerprint,
        }

    def carry_out(self, trials: Sequence[Gpt2Trial]) -> Iterator[tuple[Gpt2Trial, Gpt2Results]]:
        """As in `Trials`."""
        failed = None
        with ThreadPoolExecutor(self.jobs) as pool:
            futures = {pool.submit(self._carry_out, trial): trial for trial in trials}
            try:
                for future in as_completed(futures):
                    if future.cancelled():
                        continue
                    if error := future.exception():
                        # Trials that have begun are finished and kept, the others are not begun.
                        logger.error("%s: %s", futures[future].name, error)
                        failed = failed or error
                        _cancel(futures)
                        continue
                    yield futures[future], future.result()
            finally:
                _cancel(futures)  # also after an interruption
        if failed:
            raise failed

    def _carry_out(self, trial: Gpt2Trial) -> Gpt2Results:
        work = self.folder / trial.name
        shutil.rmtree(work, ignore_errors=True)  # left by an attempt that was interrupted
        try:
            used, model = self._train(trial, work)
        except TrainingError as error:
            if trial.tuning and _DIVERGED.search(str(error)):
                # The learning rate is too large: an infinite loss is never chosen.
                return Gpt2Results(math.inf, {}, 0, 0.0, 0)
            raise
        losses = [
            record["valid_loss"]
            for line in (work / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            if "valid_loss" in (record := json.loads(line))
        ]
        sizes = trained_sizes(model)
        trained = {n: s for n, s in sizes.items() if "lora_" in n} or sizes
        scores = {} if trial.tuning else self._scores(trial, model)
        for path in work.glob("*.pt"):
            path.unlink()  # to save disk space, since each holds the full model
        return Gpt2Results(losses[-1], scores, sum(trained.values()), used.seconds, used.memory)

    def _train(self, trial: Gpt2Trial, work: Path) -> tuple[Used, Path]:
        """Trains a method; returns the time and memory used, and the path of the model."""
        train, measured = ("tuning_train", "tuning") if trial.tuning else ("train", "test")
        with open(self._file(train), encoding="utf-8") as file:
            steps = trial.epochs * math.ceil(sum(1 for _ in file) / COMMON["train_batch_size"])
        used = self._run(
            *("src/gpt2_ft.py", "--platform", "local", "--model_card", CARD, "--bf16"),
            *("--train_data", self._file(train), "--valid_data", self._file(measured)),
            *("--init_checkpoint", self.base, "--correct_bias"),
            *_flags({"lora_dim": 0, **COMMON, **trial.method.flags}),
            *("--max_epoch", trial.epochs, "--lr", trial.learning_rate),
            *("--random_seed", trial.seed),
            *("--eval_interval", steps, "--save_interval", 10 * steps, "--work_dir", work),
        )
        return used, work / f"model.{steps}.pt"

    def _scores(self, trial: Gpt2Trial, model: Path) -> dict[str, float]:
        work = self.folder / trial.name
        self._run(
            *("src/gpt2_beam.py", "--platform", "local", "--data", self._file("test")),
            *("--batch_size", 16, "--seq_len", 512, "--eval_len", 64, "--model_card", CARD),
            *("--init_checkpoint", model, *_flags(trial.method.flags)),
            *("--beam", 10, "--length_penalty", 0.8, "--no_repeat_ngram_size", 4),
            *("--eos_token_id", 628, "--work_dir", work, "--output_file", "predict.jsonl"),
        )
        self._run(
            *("src/gpt2_decode.py", "--vocab", self.vocab),
            *("--sample_file", work / "predict.jsonl"),
            *("--input_file", self.folder / "test_formatted.jsonl"),
            *("--output_ref_file", work / "references.txt"),
            *("--output_pred_file", work / "texts.txt"),
        )
        self._run(
            *("eval/e2e/measure_scores.py", work / "references.txt", work / "texts.txt"),
            *("-p", "--json", work / "scores.json"),
        )
        found = read_json(work / "scores.json")["all"]
        return {name: found[name] for name in SCORES if found.get(name) is not None}

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def _formatted(self, e2e: Path, split: str) -> list[dict[str, str]]:
        path = self.folder / f"{split}_formatted.jsonl"
        self._run("src/format_converting_e2e.py", e2e / f"{split}.txt", path)
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def _encode(self, name: str, rows: Sequence[Mapping[str, str]]) -> None:
        if self._file(name).is_file():
            return
        path = self.folder / f"{name}_formatted.jsonl"
        atomic_write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
        self._run(
            *("src/gpt2_encode.py", "--vocab", self.vocab, "--input", path),
            *("--output", self._file(name), "--add_bos", "--add_eos"),
        )

    def _run(self, script: str, *arguments: object, threads: int = 1) -> Used:
        """Runs a script of NLG/.

        Raises:
            TrainingError: the script failed; the message is its error.
        """
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
            program = subprocess.Popen(
                [sys.executable, ROOT / "NLG" / script, *map(str, arguments)],
                env=environment({"OMP_NUM_THREADS": str(threads)}),
                stdout=subprocess.DEVNULL,
                stderr=said,
            )
            # Waits like Popen.wait, but also returns the program's CPU time and peak memory.
            _, status, usage = os.wait4(program.pid, 0)
            program.returncode = os.waitstatus_to_exitcode(status)
            if program.returncode:
                said.seek(0)
                raise TrainingError(f"{script}: {last_error(said.read()) or 'failed'}")
        unit = 1 if sys.platform == "darwin" else 1024
        return Used(usage.ru_utime + usage.ru_stime, usage.ru_maxrss * unit)


def _cancel(futures: Iterable[Future]) -> None:
    """Cancels the futures that have not begun."""
    for future in futures:
        future.cancel()


def _flags(values: Mapping[str, Any]) -> list[str]:
    return [str(text) for name, value in values.items() for text in (f"--{name}", value)]
