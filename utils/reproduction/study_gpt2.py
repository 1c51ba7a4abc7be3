"""The study's GPT-2: a base trained on the corpus, then E2E, by the scripts of NLG/.

E2E's validation set, which is small enough for a study, is what is trained on; its test set is
what is measured on. Learning rates are chosen by the loss on a fifth of the meanings.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from loralib.io.atomic import atomic_write
from loralib.training.process import TrainingError
from reproduction.programs import environment, last_error
from reproduction.run_file import RunFile
from reproduction.runs import ROOT, read_json, trained_sizes
from reproduction.study_rows import Gpt2Method

CARD = "gpt2.xs"
EPOCHS, TUNING_EPOCHS = 3, 1
TUNING_SHARE = 0.2
SCORES = ("BLEU", "NIST", "METEOR", "ROUGE_L", "CIDEr")


@dataclass(frozen=True)
class Gpt2Trial:
    """A run of a method on E2E.

    Args:
        method: what is trained.
        learning_rate: its peak.
        seed: of the new weights, the order of the data, and dropout.
        tuning: whether it is there to choose the learning rate.
    """

    method: Gpt2Method
    learning_rate: float
    seed: int
    tuning: bool

    @property
    def name(self) -> str:
        """Of its folder."""
        kind = "lora" if "lora_dim" in self.method.flags else "full"
        stage = "tuning" if self.tuning else "final"
        return f"{kind}_{self.learning_rate:g}_{stage}_{self.seed}"


@dataclass(frozen=True)
class Gpt2Results:
    """What a trial has come to.

    Args:
        loss: on the measured examples, a token, in nats.
        scores: E2E's, by name; none of a trial for tuning.
        parameters: those that were trained.
    """

    loss: float
    scores: Mapping[str, float]
    parameters: int


class Gpt2Trials:
    """The base, the data, and the trials on them.

    Args:
        folder: where all of it goes.
        vocab: folder with GPT-2's vocabulary.
        runs: the results of the trials that are finished.
        jobs: how many run at a time, each on one thread.
    """

    def __init__(self, folder: Path, vocab: Path, runs: RunFile[Gpt2Results], jobs: int):
        self.folder, self.vocab, self.runs, self.jobs = folder, vocab, runs, jobs

    @property
    def base(self) -> Path:
        """The base's weights."""
        return self.folder / "base.pt"

    def prepare(self, sentences: Sequence[str], e2e: Path) -> None:
        """Encodes the texts, where that is not done yet.

        Args:
            sentences: the corpus.
            e2e: folder with E2E's ``valid.txt`` and ``test.txt``.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        # The first word is the context, which may not be empty; --obj jlm learns it as well.
        parts = [sentence.partition(" ") for sentence in sentences]
        rows = [{"context": first, "completion": rest} for first, _, rest in parts if rest]
        self._encode("corpus", rows)
        train, test = (self._formatted(e2e, split) for split in ("valid", "test"))
        # Meanings are sorted, each with all its texts: a fifth of the rows has meanings of its own.
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

    def train_base(self, epochs: int) -> None:
        """Trains the base on the corpus, where that is not done yet."""
        if self.base.is_file():
            return
        work = self.folder / "base"
        self._run(
            *("src/gpt2_ft.py", "--platform", "local", "--model_card", CARD, "--obj", "jlm"),
            "--bf16",
            *("--train_data", self._file("corpus"), "--valid_data", self._file("test")),
            *("--train_batch_size", 32, "--max_epoch", epochs, "--lr", 2e-3, "--correct_bias"),
            *("--warmup_step", 100, "--weight_decay", 0.01, "--log_interval", 50),
            *("--eval_interval", 10_000, "--save_interval", 10_000),
            *("--work_dir", work, "--random_seed", 1, "--resume"),
            threads=self.jobs,
        )
        last = max(work.glob("model.*.pt"), key=lambda path: int(path.suffixes[0][1:]))
        os.replace(last, self.base)

    def result(self, trial: Gpt2Trial) -> Gpt2Results:
        """A finished trial's.

        Raises:
            KeyError: it is not finished.
        """
        return self.runs[self._describe(trial)]

    def run(self, trials: Sequence[Gpt2Trial], title: str) -> None:
        """Runs those that are not finished."""
        missing = [trial for trial in trials if self._describe(trial) not in self.runs]
        if not missing:
            return
        with (
            ThreadPoolExecutor(self.jobs) as pool,
            tqdm(total=len(missing), desc=title, unit="run", disable=None) as progress,
        ):
            for trial, results in zip(missing, pool.map(self._result, missing), strict=True):
                self.runs[self._describe(trial)] = results
                progress.update()

    def _describe(self, trial: Gpt2Trial) -> dict[str, Any]:
        return {
            "task": "e2e",
            "flags": dict(trial.method.flags),
            "learning_rate": trial.learning_rate,
            "seed": trial.seed,
            "tuning": trial.tuning,
            "epochs": TUNING_EPOCHS if trial.tuning else EPOCHS,
        }

    def _result(self, trial: Gpt2Trial) -> Gpt2Results:
        work = self.folder / trial.name
        train, measured = ("tuning_train", "tuning") if trial.tuning else ("train", "test")
        flags = [text for name, v in trial.method.flags.items() for text in (f"--{name}", v)]
        epochs = TUNING_EPOCHS if trial.tuning else EPOCHS
        self._run(
            *("src/gpt2_ft.py", "--platform", "local", "--model_card", CARD, "--bf16"),
            *("--train_data", self._file(train), "--valid_data", self._file(measured)),
            *("--init_checkpoint", self.base, *flags, "--lora_dropout", 0.1),
            *("--label_smooth", 0.1, "--train_batch_size", 8, "--max_epoch", epochs),
            *("--lr", trial.learning_rate, "--correct_bias", "--adam_beta2", 0.999),
            *("--scheduler", "linear", "--warmup_step", 100, "--weight_decay", 0.01),
            *("--save_interval", 10_000, "--work_dir", work),
            *("--random_seed", trial.seed, "--resume"),
        )
        losses = [
            record["valid_loss"]
            for line in (work / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            if "valid_loss" in (record := json.loads(line))
        ]
        model = max(work.glob("model.*.pt"), key=lambda path: int(path.suffixes[0][1:]))
        sizes = trained_sizes(model)
        trained = {n: s for n, s in sizes.items() if "lora_" in n} or sizes
        scores = {} if trial.tuning else self._scores(trial, model)
        for path in work.glob("model.*.pt"):
            path.unlink()  # each has the full model
        return Gpt2Results(losses[-1], scores, sum(trained.values()))

    def _scores(self, trial: Gpt2Trial, model: Path) -> dict[str, float]:
        work = self.folder / trial.name
        flags = [text for name, v in trial.method.flags.items() for text in (f"--{name}", v)]
        self._run(
            *("src/gpt2_beam.py", "--platform", "local", "--data", self._file("test")),
            *("--batch_size", 16, "--seq_len", 512, "--eval_len", 64, "--model_card", CARD),
            *("--init_checkpoint", model, *flags, "--beam", 10, "--length_penalty", 0.8),
            *("--no_repeat_ngram_size", 4, "--eos_token_id", 628, "--work_dir", work),
            *("--output_file", "predict.jsonl"),
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
        with atomic_write(path) as temporary:
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            temporary.write_text(lines, encoding="utf-8")
        self._run(
            *("src/gpt2_encode.py", "--vocab", self.vocab, "--input", path),
            *("--output", self._file(name), "--add_bos", "--add_eos"),
        )

    def _run(self, script: str, *arguments: object, threads: int = 1) -> None:
        """Runs a script of NLG/.

        Raises:
            TrainingError: it failed; the message is its error.
        """
        done = subprocess.run(
            [sys.executable, ROOT / "NLG" / script, *map(str, arguments)],
            env=environment({"OMP_NUM_THREADS": str(threads)}),
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise TrainingError(f"{script}: {last_error(done.stderr) or 'failed'}")
