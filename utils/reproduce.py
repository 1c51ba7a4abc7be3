"""Runs the paper's GLUE and NLG tables over several seeds, and sets what comes of it beside them.

    python utils/reproduce.py "roberta-base LoRA"             a row of a table: all its recipes
    python utils/reproduce.py roberta_base_rte --seeds 0 1    a recipe of NLU/ or NLG/
    python utils/reproduce.py e2e_gpt2_md -- --bf16           flags for the recipe, behind its own

Each run is the recipe itself, a program of its own that writes into a folder of its own:

    OUTPUT_DIR/results.md             the table, written anew after every run
    OUTPUT_DIR/learning_curves.png    a panel a recipe, a line a seed
    OUTPUT_DIR/RECIPE/seedN/          log.txt; the recipe's output/; error.txt where it failed

The same command goes on where an earlier one was stopped: what is finished is not run again, and
a run that was cut off goes on from its last checkpoint.

GLUE's recipes get flags more: to end with the evaluation that was best on the development set
(after an epoch for RoBERTa, after some steps for DeBERTa, as the recipe has it), and to keep no
other checkpoints. MRPC, RTE and STS-B start from the LoRA weights of MNLI's run with the same seed,
from MNLI_CHECKPOINT, where that is set, or, with neither, from the file that the recipe names. On
fewer GPUs than a recipe has, its batches are made by gradient accumulation; NPROC, where it is set,
is obeyed instead.
"""

import argparse
import fcntl
import functools
import importlib.util
import json
import logging
import math
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from matplotlib.figure import Figure
from scipy import stats

from loralib.adapters.adapter import BACKBONE_PREFIXES
from loralib.io.atomic import atomic_write
from loralib.io.tensors import read_tensors
from loralib.training import process
from transformers.trainer_utils import get_last_checkpoint

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[1]
PAPER = Path(__file__).with_name("paper_results.json")
RESULTS_NAME, PICTURE_NAME, SETTINGS_NAME = "results.md", "learning_curves.png", "settings.json"
SMALL_SEEDS = 2
# So small a model is no faster on several threads.
SMALL_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
CONFIDENCE = 0.95
# Flags that are given to each run here, and variables that change what a run computes.
OWN_FLAGS = (
    *("--seed", "--output_dir", "--overwrite_output_dir", "--logging_dir", "--save_total_limit"),
    *("--load_best_model_at_end", "--metric_for_best_model", "--greater_is_better"),
    *("--random_seed", "--work_dir", "--resume"),
)
DECISIVE = ("NPROC", "MNLI_CHECKPOINT")

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


# ------------------------------------------------------------------------------------------------
# The two trees: which recipes there are, how they are run, what they leave
# ------------------------------------------------------------------------------------------------


def load_recipe_module() -> ModuleType:
    """NLU/recipe.py, which knows the recipes of GLUE."""
    spec = importlib.util.spec_from_file_location("nlu_recipe", ROOT / "NLU" / "recipe.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks it up
    spec.loader.exec_module(module)
    return module


class Glue:
    """The recipes of NLU/.

    Args:
        out: folder of all runs; absolute.
        small: whether the runs are trials.
    """

    title = "GLUE, development sets"
    section = "glue_dev"
    seeds = (0, 1, 2, 3, 4)
    columns: Mapping[str, str] = {
        "mnli": "MNLI",
        "sst2": "SST-2",
        "mrpc": "MRPC",
        "cola": "CoLA",
        "qnli": "QNLI",
        "qqp": "QQP",
        "rte": "RTE",
        "stsb": "STS-B",
    }
    # A task's first metric says which epoch was best.
    metrics: Mapping[str, tuple[str, ...]] = {
        "cola": ("matthews_correlation",),
        "stsb": ("pearson", "spearmanr"),
    }
    words: Mapping[str, str] = {
        "mnli": "matched/mismatched accuracy",
        "cola": "Matthews correlation",
        "stsb": "Pearson/Spearman correlation",
    }
    small_flags = ("--max_steps", "16", "--learning_rate", "0.01")

    def __init__(self, out: Path, small: bool):
        self.out = out
        self.small = out / "small" / "glue" if small else None
        self.module = load_recipe_module()
        self.recipes = self.module.read_recipes()

    def rows(self) -> dict[str, dict[str, str]]:
        """Recipes by row and task; one that is in no row of a table is a row of its own."""
        rows: dict[str, dict[str, str]] = {}
        for name, recipe in self.recipes.items():
            task = self._task(name)
            model = recipe.flags["model_name_or_path"].rpartition("/")[2]
            in_table = name == f"{model.replace('-', '_')}_{task}"
            rows.setdefault(f"{model} LoRA" if in_table else name, {})[task] = name
        return rows

    def measure(self, task: str) -> str:
        """What a task's figures are."""
        return self.words.get(task, "accuracy")

    def obstacle(self, run: Run) -> str | None:
        """Why a run cannot begin; None where it can."""
        recipe = self.recipes[run.recipe]
        if self.small:
            if self._task(run.recipe) != "sst2":
                return "the small data has SST-2 only"
            if not recipe.flags["model_name_or_path"].startswith("roberta"):
                return "the small base is a RoBERTa"
            return None
        if recipe.after is None or os.environ.get("MNLI_CHECKPOINT") or self._start(run):
            return None
        if os.path.exists(recipe.flags["lora_path"]):
            return None
        return f"it starts from what {recipe.after} learns: run that too, or set MNLI_CHECKPOINT"

    def command(self, run: Run) -> tuple[list[str], dict[str, str]]:
        """What begins a run or goes on with it: the command, and environment variables for it."""
        recipe = self.recipes[run.recipe]
        flags, variables = [], {}
        if self.small:
            flags += ["--small", self.small / "base", self.small / "data", *self.small_flags]
        elif "NPROC" not in os.environ:
            nproc, flags = self.module.fitted(recipe, self.module.gpu_count())
            variables["NPROC"] = str(nproc)
        if recipe.after and not os.environ.get("MNLI_CHECKPOINT") and (start := self._start(run)):
            variables["MNLI_CHECKPOINT"] = str(start)
        goes_on = run.output.is_dir() and get_last_checkpoint(run.output) is not None
        flags += ["--seed", run.seed, "--output_dir", run.output, "--overwrite_output_dir"]
        flags += [not goes_on, "--logging_dir", run.folder / "runs"]
        flags += ["--load_best_model_at_end", "--save_total_limit", 1]
        flags += ["--metric_for_best_model", self._metrics(run)[0]]
        if "apply_lora" in recipe.flags:
            flags.append("--save_lora_only")
        return ["bash", str(recipe.script), *map(str, flags)], variables

    def figures(self, run: Run) -> Figures | None:
        """Those of the best evaluation; None for a run that is not finished."""
        best = self._best(run)
        if best is None:
            return None
        names = [f"eval_{metric}" for metric in self._metrics(run)]
        if self._task(run.recipe) == "mnli":
            names.append("eval_accuracy_mm")
        return tuple(100 * best[name] for name in names)

    def other_scores(self, run: Run) -> dict[str, float]:
        """Of a finished run: F1, where the task has it."""
        best = self._best(run)
        return {"F1": 100 * best["eval_f1"]} if "eval_f1" in best else {}

    def curve(self, run: Run) -> tuple[list[float], list[float]]:
        """What a run has logged: epochs, and the task's first metric in percent."""
        name = f"eval_{self._metrics(run)[0]}"
        records = self._evaluations(run)
        return [record["epoch"] for record in records], [100 * record[name] for record in records]

    def curve_axes(self, run: Run) -> tuple[str, str]:
        """What `curve` returns."""
        return "epoch", f"{self._metrics(run)[0].replace('_', ' ')}, %"

    def trained(self, run: Run) -> str:
        """How many parameters a finished run has trained; empty where its checkpoints are gone."""
        sizes: dict[str, int] = {}
        for path in run.output.glob("pytorch_model_*.safetensors"):
            sizes |= {name: tensor.numel() for name, tensor in read_tensors(path)[0].items()}
        if not sizes:
            return ""
        adapted = sum(size for name, size in sizes.items() if name.startswith(BACKBONE_PREFIXES))
        return f"{adapted:,} + {sum(sizes.values()) - adapted:,} in the head"

    def make_small(self) -> None:
        """Makes a small task and a small base, where they are not there yet."""
        with made_whole(self.small) as folder:
            make("examples/make_small_data.py", "--output_dir", folder / "data")
            make(
                *("examples/language-modeling/run_mlm.py", "--do_train", "--seed", 0),
                *("--train_file", folder / "data" / "corpus.txt", "--output_dir", folder / "base"),
                *("--hidden_size", 32, "--num_hidden_layers", 2, "--num_attention_heads", 2),
                *("--intermediate_size", 64, "--vocab_size", 600, "--max_seq_length", 62),
                *("--max_steps", 60, "--per_device_train_batch_size", 32, "--save_strategy", "no"),
                *("--learning_rate", 3e-3, "--warmup_ratio", 0.2, "--report_to", "none"),
            )

    def _task(self, recipe: str) -> str:
        return self.recipes[recipe].flags["task_name"]

    def _metrics(self, run: Run) -> tuple[str, ...]:
        return self.metrics.get(self._task(run.recipe), ("accuracy",))

    def _start(self, run: Run) -> Path | None:
        """The LoRA weights to start from: of the finished run of the same seed before this one."""
        before = run_of(self.out, self.recipes[run.recipe].after, run.seed)
        return before.output / "pytorch_model_lora.bin" if self._best(before) else None

    def _best(self, run: Run) -> dict[str, float] | None:
        """The best evaluation's record, and what was measured at the end, with its weights.

        MNLI's epochs are evaluated on the matched half only; the other half's turn is at the end.
        """
        path = run.output / "eval_results.json"
        if not path.is_file():
            return None
        at_end = read_json(path)
        name = f"eval_{self._metrics(run)[0]}"
        best = max([*self._evaluations(run), at_end], key=lambda record: record[name])
        return {**at_end, **best}

    def _evaluations(self, run: Run) -> list[dict[str, float]]:
        """The evaluations that a run has logged, finished or not."""
        path = run.output / "trainer_state.json"
        if not path.is_file() and run.output.is_dir():
            path = Path(get_last_checkpoint(run.output) or run.output) / path.name
        if not path.is_file():
            return []
        return [record for record in read_json(path)["log_history"] if "eval_loss" in record]


class Nlg:
    """The recipes of NLG/.

    Args:
        out: folder of all runs; absolute.
        small: whether the runs are trials.
    """

    title = "GPT-2, test sets"
    section = "nlg_test"
    seeds = (110, 111, 112, 113, 114)
    columns: Mapping[str, str] = {"e2e": "E2E", "dart": "DART", "webnlg": "WebNLG"}
    # The tables of scores.json that a recipe leaves.
    labels: Mapping[str, tuple[str, ...]] = {"webnlg": ("unseen", "seen", "all")}
    small_flags = (
        *("--max_step", "9", "--warmup_step", "2"),
        *("--lr", "0.005", "--eval_interval", "3"),
    )
    # Lines of the small corpus, which has two to four texts on each of a split's subjects.
    small_lines: Mapping[str, int] = {"train": 200, "valid": 12, "test": 18}

    def __init__(self, out: Path, small: bool):
        self.small = out / "small" / "e2e" if small else None

    def rows(self) -> dict[str, dict[str, str]]:
        """Recipes by row and corpus."""
        rows: dict[str, dict[str, str]] = {}
        for script in sorted((ROOT / "NLG").glob("*_gpt2_*.sh"), reverse=True):
            corpus, _, size = script.stem.split("_")
            rows.setdefault(f"gpt2-{size} LoRA", {})[corpus] = script.stem
        return rows

    def measure(self, corpus: str) -> str:
        """What a corpus's figures are."""
        return f"BLEU {'/'.join(self.labels[corpus])}" if corpus in self.labels else "BLEU"

    def obstacle(self, run: Run) -> str | None:
        """Why a run cannot begin; None where it can."""
        if self.small and self._corpus(run) != "e2e":
            return "the small data is in E2E's format only"
        return None

    def command(self, run: Run) -> tuple[list[str], dict[str, str]]:
        """What begins a run or goes on with it: the command, and environment variables for it."""
        variables = {"SEED": str(run.seed), "RUN_DIR": str(run.output)}
        flags = ["--resume"]
        if self.small:
            variables["TRIAL_DIR"] = str(self.small)
            flags += self.small_flags
        return ["bash", str(ROOT / "NLG" / f"{run.recipe}.sh"), *flags], variables

    def figures(self, run: Run) -> Figures | None:
        """BLEU of the last epoch's texts; None for a run that is not finished."""
        scores = self._scores(run)
        if scores is None:
            return None
        # E2E's program counts to 1, the others' to 100.
        scale = 100 if self._corpus(run) == "e2e" else 1
        return tuple(scale * row["BLEU"] for row in scores.values())

    def other_scores(self, run: Run) -> dict[str, float]:
        """Of a finished run, on all of the test set; without those that need a missing Java."""
        scores = self._scores(run)["all"].items()
        return {name: score for name, score in scores if name != "BLEU" and score is not None}

    def curve(self, run: Run) -> tuple[list[float], list[float]]:
        """What a run has logged: steps, and the loss on the validation data."""
        path = run.output / "metrics.jsonl"
        # A line that was cut off has no end.
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
        records = [record for line in lines if "valid_loss" in (record := json.loads(line))]
        return [r["step"] for r in records], [r["valid_loss"] for r in records]

    def curve_axes(self, run: Run) -> tuple[str, str]:
        """What `curve` returns."""
        return "step", "validation loss"

    def trained(self, run: Run) -> str:
        """How many parameters a finished run has trained; empty where its checkpoints are gone."""
        # All of its checkpoints hold LoRA's part; the last one, the whole model with it.
        paths = sorted(run.output.glob("model.*.pt"), key=lambda path: path.stat().st_size)
        if not paths:
            return ""
        tensors = read_tensors(paths[0])[0]
        return f"{sum(t.numel() for name, t in tensors.items() if 'lora_' in name):,}"

    def make_small(self) -> None:
        """Makes a small corpus, encoded, and a small base, where they are not there yet."""
        with made_whole(self.small) as folder:
            data = folder / "data" / "e2e"
            data.mkdir(parents=True)
            make("examples/make_small_e2e.py", "--output_dir", folder / "corpus")
            (folder / "corpus" / "vocab").rename(folder / "vocab")
            for split, count in self.small_lines.items():
                lines = (folder / "corpus" / f"{split}.txt").read_text(encoding="utf-8").split("\n")
                source, texts = data / f"{split}.txt", data / f"{split}_formatted.jsonl"
                source.write_text("\n".join(lines[:count]) + "\n", encoding="utf-8")
                make("NLG/src/format_converting_e2e.py", source, texts)
                make(
                    *("NLG/src/gpt2_encode.py", "--vocab", folder / "vocab", "--input", texts),
                    *("--output", data / f"{split}.jsonl", "--add_bos", "--add_eos"),
                )
            make(
                *("NLG/src/gpt2_ft.py", "--platform", "local", "--model_card", "gpt2.xs"),
                *("--train_data", data / "train.jsonl", "--valid_data", data / "valid.jsonl"),
                *("--train_batch_size", 8, "--max_step", 15, "--warmup_step", 3, "--lr", 5e-3),
                *("--correct_bias", "--random_seed", 1, "--work_dir", folder / "base"),
            )
            (folder / "base" / "model.15.pt").rename(folder / "base.pt")

    def _corpus(self, run: Run) -> str:
        return run.recipe.partition("_")[0]

    def _scores(self, run: Run) -> dict[str, dict[str, float | None]] | None:
        """The scores by label, where all of them are there."""
        path = run.output / "scores.json"
        scores = read_json(path) if path.is_file() else {}
        labels = self.labels.get(self._corpus(run), ("all",))
        return {name: scores[name] for name in labels} if set(labels) <= set(scores) else None


Tree = Glue | Nlg


@contextmanager
def made_whole(folder: Path) -> Iterator[Path]:
    """Yields a folder to fill, which gets its name when the block ends well."""
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    yield part
    part.rename(folder)


def make(script: str, *arguments: object) -> None:
    """Runs a script of the project.

    Raises:
        TrainingError: it failed; the message is its error.
    """
    done = subprocess.run(
        [sys.executable, ROOT / script, *map(str, arguments)],
        env=environment(SMALL_ENVIRONMENT),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise process.TrainingError(last_error(done.stderr) or f"{script} failed")


# ------------------------------------------------------------------------------------------------
# What there is to run
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A row of one of the paper's tables, or a recipe that is in none.

    Args:
        name: the paper's.
        tree: where its recipes are.
        recipes: by column, in the paper's order.
        paper: the paper's figures by column; empty where it has none.
    """

    name: str
    tree: Tree
    recipes: Mapping[str, str]
    paper: Mapping[str, Any]


def read_rows(trees: Sequence[Tree]) -> dict[str, Row]:
    """All rows that there are recipes for."""
    paper = read_json(PAPER)
    return {
        name: Row(
            name,
            tree,
            {column: recipes[column] for column in tree.columns if column in recipes},
            paper[tree.section].get(name, {}),
        )
        for tree in trees
        for name, recipes in tree.rows().items()
    }


def choose(names: Sequence[str], rows: Mapping[str, Row]) -> dict[str, list[str]]:
    """The recipes asked for by row, those that others start from first.

    Raises:
        ValueError: there is no row or recipe of a name.
    """
    homes = {recipe: row.name for row in rows.values() for recipe in row.recipes.values()}
    wanted: dict[str, set[str]] = {}
    for name in names:
        if name not in rows and name not in homes:
            raise ValueError(
                f"there is no recipe or row {name!r}; rows: {', '.join(rows)}; "
                f"recipes: {', '.join(recipe for recipe in homes if recipe not in rows)}"
            )
        home = name if name in rows else homes[name]
        recipes = rows[name].recipes.values() if name in rows else [name]
        wanted.setdefault(home, set()).update(recipes)
    # MNLI, from which others start, is the first column.
    return {
        name: [recipe for recipe in rows[name].recipes.values() if recipe in recipes]
        for name, recipes in wanted.items()
    }


def plan(
    chosen: Mapping[str, list[str]], rows: Mapping[str, Row], seeds: Sequence[int] | None, out: Path
) -> list[tuple[Tree, Run]]:
    """The runs asked for, in their order: whole rows, a seed after the other."""
    runs = []
    for name, recipes in chosen.items():
        tree = rows[name].tree
        default = tree.seeds[:SMALL_SEEDS] if tree.small else tree.seeds
        for seed in dict.fromkeys(seeds or default):
            runs += [(tree, run_of(out, recipe, seed)) for recipe in recipes]
    return runs


# ------------------------------------------------------------------------------------------------
# Running
# ------------------------------------------------------------------------------------------------

# What the scripts end with, and, with torch's mark or without, what Python does.
_ERROR = re.compile(r"\S+\.(?:py|sh): error|(?:\[rank\d+\]: ?)?[\w.]+(?:Error|Exception): ")


def last_error(text: str) -> str | None:
    """The last line of a log that says what went wrong; where there is none, the last line."""
    lines = [line.strip() for line in re.split(r"[\r\n]+", text) if re.search(r"\w", line)]
    errors = [line for line in lines if _ERROR.match(line) and "ChildFailedError" not in line]
    return next(reversed(errors or lines), None)


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """This program's environment for another: the same Python, and few progress bars."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "PATH": path, "TQDM_MININTERVAL": "30", **variables}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def held(run: Run) -> Iterator[int]:
    """Holds a run's folder for this program and those that it starts; yields the descriptor.

    What it starts may outlive it: nobody is to begin the same run then.

    Raises:
        ValueError: another program is at work there.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    with open(run.folder / "lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{run.folder}: another program is at work there") from error
        yield file.fileno()


def carry_out(tree: Tree, run: Run, flags: Sequence[str]) -> None:
    """Begins a run or goes on with it; leaves ``error.txt`` where it fails.

    Raises:
        ValueError: another program is at work in the run's folder.
    """
    with held(run) as lock:
        run.error.unlink(missing_ok=True)
        command, variables = tree.command(run)
        variables.setdefault("MASTER_PORT", os.environ.get("MASTER_PORT", str(_free_port())))
        if tree.small:
            variables |= SMALL_ENVIRONMENT
        with open(run.log, "a", encoding="utf-8") as log:
            begin = log.tell()
            status = _run_program([*command, *flags], environment(variables), log, lock)
        if status or tree.figures(run) is None:
            said = run.log.read_bytes()[begin:].decode("utf-8", "replace")
            error = last_error(said) or "it printed nothing"
            if status < 0:
                error = f"killed by {signal.Signals(-status).name}"
            run.error.write_text(f"{error}\n", encoding="utf-8")


def _run_program(command: list[str], variables: dict[str, str], log: TextIO, lock: int) -> int:
    """Its exit status; when this program is stopped, so is that one."""
    program = subprocess.Popen(
        command,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        pass_fds=(lock,),
        start_new_session=True,
    )
    try:
        return program.wait()
    except BaseException:
        os.killpg(program.pid, signal.SIGTERM)
        program.wait()
        raise


def check_settings(out: Path, settings: dict[str, Any]) -> None:
    """Sees that all runs of an output folder are made in one way.

    Raises:
        ValueError: those that are there were made with other flags.
    """
    path = out / SETTINGS_NAME
    if path.is_file() and (before := read_json(path)) != settings:
        raise ValueError(
            f"{out}: holds runs made with {_in_words(before)}, not with {_in_words(settings)}: "
            "ask for the same, or give another --output_dir"
        )
    out.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(settings) + "\n", encoding="utf-8")


def _in_words(settings: Mapping[str, Any]) -> str:
    flags = " ".join(settings["flags"]) or "no flags"
    words = ["--small"] if settings["small"] else []
    words += [f"{name}={value}" for name, value in settings.get("environment", {}).items()]
    return " and ".join([*words, flags])


# ------------------------------------------------------------------------------------------------
# Reporting
# ------------------------------------------------------------------------------------------------


def with_interval(values: Sequence[float]) -> str:
    """The median and, of two or more values, half of their mean's confidence interval."""
    text = f"{statistics.median(values):.1f}"
    if len(values) == 1:
        return text
    deviation = statistics.stdev(values) / math.sqrt(len(values))
    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * deviation
    return f"{text}±{half:.1f}"


def problem_of(tree: Tree, run: Run) -> str | None:
    """Why there are no figures of a run; None where there are."""
    if tree.figures(run) is not None:
        return None
    if run.error.is_file():
        return f"failed: {run.error.read_text(encoding='utf-8').strip()}"
    if run.log.is_file():
        return "unfinished, the same command goes on with it"
    obstacle = tree.obstacle(run)
    return f"not run ({obstacle})" if obstacle else "not run"


class Cell:
    """A recipe with all its runs.

    Args:
        tree: where the recipe is.
        runs: those that are asked for or there; at least one.
    """

    def __init__(self, tree: Tree, runs: Sequence[Run]):
        self.runs = runs
        self.done = [run for run in runs if tree.figures(run) is not None]
        self.figures = [tree.figures(run) for run in self.done]
        self.problems = {run: problem_of(tree, run) for run in runs if run not in self.done}

    @property
    def result(self) -> str:
        """The medians with their intervals, or what there is in their place."""
        if self.figures:
            return "/".join(with_interval(values) for values in zip(*self.figures, strict=True))
        words = ("failed", "unfinished", "not run")
        return next(w for w in words if any(p.startswith(w) for p in self.problems.values()))

    @property
    def median(self) -> float | None:
        """Of the first figure; None without a finished run."""
        return statistics.median(first for first, *_ in self.figures) if self.figures else None

    @property
    def each(self) -> str:
        """The figures of each finished run."""
        return ", ".join(
            f"{run.seed}: {'/'.join(f'{value:.1f}' for value in figures)}"
            for run, figures in zip(self.done, self.figures, strict=True)
        )

    def notes(self) -> list[str]:
        """Lines on the runs without figures; one line where all have the same problem."""
        problems = set(self.problems.values())
        if len(problems) == 1 and not self.done:
            return [problems.pop()]
        return [f"seed {run.seed}: {problem}" for run, problem in self.problems.items()]


def cells_of(row: Row, out: Path, asked: Sequence[Run]) -> dict[str, Cell]:
    """The row's cells by column."""
    cells = {}
    for column, recipe in row.recipes.items():
        there = [path.name.removeprefix("seed") for path in (out / recipe).glob("seed*")]
        seeds = {int(seed) for seed in there if seed.isdecimal()}
        seeds |= {run.seed for run in asked if run.recipe == recipe}
        runs = [run_of(out, recipe, seed) for seed in sorted(seeds or row.tree.seeds[:1])]
        cells[column] = Cell(row.tree, runs)
    return cells


def report_row(row: Row, cells: Mapping[str, Cell]) -> list[str]:
    """The lines of a row: its table, and what is to be said of it."""
    tree = row.tree
    lines = [
        f"## {row.name}: {tree.title}\n",
        "| | measure | paper | here | runs | each seed | parameters trained |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    notes: dict[str, list[str]] = {}
    scores = []
    for column, cell in cells.items():
        trained = tree.trained(cell.done[0]) if cell.done else ""
        paper = row.paper.get(column, "")
        counts = f"{len(cell.done)} of {len(cell.runs)}" if cell.done else ""
        columns = (tree.columns[column], tree.measure(column), paper, cell.result)
        lines.append(f"| {' | '.join(map(str, (*columns, counts, cell.each, trained)))} |")
        for note in cell.notes():
            notes.setdefault(note, []).append(tree.columns[column])
        scores += _other_scores(tree, tree.columns[column], cell)
    if "avg" in row.paper:
        medians = [cell.median for cell in cells.values()]
        here = "not all run" if None in medians else f"{statistics.mean(medians):.1f}"
        lines.append(f"| average | of the first figures | {row.paper['avg']} | {here} | | | |")
    lines.append("")
    if "params" in row.paper:
        lines.append(f"- parameters trained, in the paper: {row.paper['params']}")
    lines += [f"- {', '.join(names)}: {note}" for note, names in notes.items()]
    return [*lines, *scores, ""]


def _other_scores(tree: Tree, name: str, cell: Cell) -> list[str]:
    runs = [tree.other_scores(run) for run in cell.done]
    in_all = [key for key in runs[0] if all(key in scores for scores in runs)] if runs else []
    if not in_all:
        return []
    medians = {key: statistics.median(scores[key] for scores in runs) for key in in_all}
    listed = ", ".join(f"{key} {median:.4g}" for key, median in medians.items())
    return [f"- {name}, medians of the other scores: {listed}"]


def report(
    rows: Sequence[Row], cells: Mapping[str, Mapping[str, Cell]], settings: Mapping[str, Any]
) -> str:
    """The whole table as Markdown, with what its figures mean."""
    lines = ["# Reproduction\n"]
    if settings["small"]:
        lines.append(
            "**A trial**: a small base, a sample of small data and a few steps. It shows that "
            "everything runs, and its figures mean nothing.\n"
        )
    lines.append(
        "Here: the median over the finished runs; on GLUE, each at its evaluation that was best on "
        "the development set (by the first of two figures), on the other corpora after the last "
        "epoch. "
        f"± is half the width of the {CONFIDENCE:.0%} confidence interval of the runs' mean "
        "(Student's t). Paper: as printed there.\n"
    )
    if settings.get("environment"):
        given = " ".join(f"{name}={value}" for name, value in settings["environment"].items())
        lines.append(f"In the environment: `{given}`.\n")
    if settings["flags"]:
        lines.append(f"Flags behind the recipes' own: `{' '.join(settings['flags'])}`.\n")
    for row in rows:
        lines += report_row(row, cells[row.name])
    lines.append(f"![learning curves]({PICTURE_NAME})")
    return "\n".join(lines) + "\n"


def draw(tree_runs: Mapping[str, tuple[Tree, list[Run]]]) -> Figure:
    """The learning curves: a panel a recipe, a line a seed.

    Args:
        tree_runs: by recipe, its tree and its runs.
    """
    across = min(3, max(len(tree_runs), 1))
    down = max(math.ceil(len(tree_runs) / across), 1)
    figure = Figure(figsize=(4.5 * across, 3.5 * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for panel in panels[len(tree_runs) :]:
        panel.set_axis_off()
    for panel, (recipe, (tree, runs)) in zip(panels, tree_runs.items(), strict=False):
        panel.set_title(recipe)
        across_label, up_label = tree.curve_axes(runs[0])
        panel.set_xlabel(across_label)
        panel.set_ylabel(up_label)
        for run in runs:
            panel.plot(*tree.curve(run), marker=".", label=f"seed {run.seed}")
        panel.legend(fontsize="small")
    return figure


def write_report(
    out: Path, rows: Sequence[Row], asked: Sequence[Run], settings: Mapping[str, Any]
) -> str:
    """Writes table and picture; returns the table.

    Args:
        out: the output folder.
        rows: all; those appear of which a run is asked for or there.
        asked: the runs that are.
        settings: what all runs have in common.
    """
    names = {run.recipe for run in asked}
    rows = [
        row
        for row in rows
        if any(recipe in names or (out / recipe).is_dir() for recipe in row.recipes.values())
    ]
    cells = {row.name: cells_of(row, out, asked) for row in rows}
    text = report(rows, cells, settings)
    with atomic_write(out / RESULTS_NAME) as temporary:
        temporary.write_text(text, encoding="utf-8")
    begun = {}
    for row in rows:
        for column, cell in cells[row.name].items():
            if runs := [run for run in cell.runs if run.log.is_file()]:
                begun[row.recipes[column]] = (row.tree, runs)
    with atomic_write(out / PICTURE_NAME) as temporary:
        draw(begun).savefig(temporary, format="png", dpi=150)
    return text


# ------------------------------------------------------------------------------------------------
# The program
# ------------------------------------------------------------------------------------------------


def parse_args(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """This program's arguments, and the flags for the recipes.

    Raises:
        ValueError: a flag is one that the figures depend on, and that is set here.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "names",
        nargs="+",
        metavar="NAME",
        help="recipes, by the names of their scripts, and rows: those of the paper's tables",
    )
    add(
        "--seeds",
        nargs="+",
        type=int,
        help="one run each (default: 0 to 4 for GLUE, 110 to 114 for GPT-2; with --small, the "
        f"first {SMALL_SEEDS} of them)",
    )
    add(
        "--output_dir",
        type=Path,
        help="folder for the runs and the table (default: output/reproduce, or "
        "output/reproduce_small)",
    )
    add(
        "--small",
        action="store_true",
        help="a trial, in minutes on a CPU and offline: a few steps of the same recipes on a small "
        "base and small data that it makes; SST-2 on RoBERTa, and E2E",
    )
    argv = list(argv)
    cut = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:cut])
    if args.output_dir is None:
        args.output_dir = Path("output", "reproduce_small" if args.small else "reproduce")
    flags = argv[cut + 1 :]
    for flag in flags:
        name = flag.split("=")[0]
        if len(name) > 2 and any(own.startswith(name) for own in OWN_FLAGS):
            raise ValueError(f"{name} behind --: this program gives each run its own")
    return args, flags


def carry_out_all(
    runs: Sequence[tuple[Tree, Run]], flags: Sequence[str], after_each: Callable[[], object]
) -> None:
    """Every run that is not finished and can begin."""
    for number, (tree, run) in enumerate(runs, start=1):
        where = f"[{number}/{len(runs)}] {run}"
        if tree.figures(run) is not None:
            logger.info("%s: is finished", where)
            continue
        if obstacle := tree.obstacle(run):
            logger.info("%s: not run (%s)", where, obstacle)
            continue
        logger.info("%s: %s", where, run.log)
        begun = time.monotonic()
        carry_out(tree, run, flags)
        minutes = (time.monotonic() - begun) / 60
        logger.info("%s: %s, %.1f min", where, problem_of(tree, run) or "finished", minutes)
        after_each()


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what is asked for and not done yet, and reports.

    Raises:
        ValueError: an argument does not fit, or another program is at work on a run.
        TrainingError: not all runs are finished.
    """
    args, flags = parse_args(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.INFO)
    out = args.output_dir.absolute()
    rows = read_rows([Glue(out, args.small), Nlg(out, args.small)])
    runs = plan(choose(args.names, rows), rows, args.seeds, out)
    variables = {name: os.environ[name] for name in DECISIVE if os.environ.get(name)}
    settings = {"small": args.small, "flags": flags, "environment": variables}
    check_settings(out, settings)
    report_now = functools.partial(
        write_report, out, list(rows.values()), [run for _, run in runs], settings
    )
    if args.small:
        # Which have no small data is no failure; the table says it.
        runs = [(tree, run) for tree, run in runs if not tree.obstacle(run)]
    try:
        for tree in dict.fromkeys(tree for tree, _ in runs):
            if tree.small and not tree.small.is_dir():
                logger.info("making %s", tree.small)
                tree.make_small()
        carry_out_all(runs, flags, report_now)
    finally:
        print(report_now())
    missing = [run for tree, run in runs if tree.figures(run) is None]
    if missing:
        raise process.TrainingError(
            f"{len(missing)} of {len(runs)} runs are not finished: see {out / RESULTS_NAME}"
        )


def start() -> None:
    """Runs `main` as a program."""
    # When it is told to end, it ends the run that it has started, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    process.run(main, report=lambda line: print(line, file=sys.stderr))


if __name__ == "__main__":
    start()
