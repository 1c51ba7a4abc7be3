"""Knows the recipes of NLU/, which are measured on GLUE's development sets.

PyTorch, and modules that need it, are imported only by functions that read runs, so that names of
recipes are checked first.
"""

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from reproduction.programs import atomic_folder, make
from reproduction.runs import ROOT, Figures, Run, Tree, read_json, run_of, trained_sizes


def last_checkpoint(folder: Path) -> str | None:
    """Returns the last checkpoint in a run's output; None if there is none."""
    from transformers.trainer_utils import get_last_checkpoint

    return get_last_checkpoint(folder)


def load_recipe_module() -> ModuleType:
    """Imports NLU/recipe.py, which reads the recipes of GLUE."""
    spec = importlib.util.spec_from_file_location("nlu_recipe", ROOT / "NLU" / "recipe.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # because dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


class Glue(Tree):
    """The recipes of NLU/."""

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
    # A task's first metric determines which epoch was best.
    metrics: Mapping[str, tuple[str, ...]] = {
        "cola": ("matthews_correlation",),
        "stsb": ("pearson", "spearmanr"),
    }
    words: Mapping[str, str] = {
        "mnli": "matched/mismatched accuracy",
        "cola": "Matthews correlation",
        "stsb": "Pearson/Spearman correlation",
    }
    small_name = "glue"
    small_flags = ("--max_steps", "16", "--learning_rate", "0.01")

    def __init__(self, out: Path, small: bool):
        super().__init__(out, small)
        self.module = load_recipe_module()
        self.recipes = self.module.read_recipes()

    def rows(self) -> dict[str, dict[str, str]]:
        """Returns recipes by row and task; one that is in no table is a row of its own."""
        rows: dict[str, dict[str, str]] = {}
        for name, recipe in self.recipes.items():
            task = self._task(name)
            model = recipe.flags["model_name_or_path"].rpartition("/")[2]
            in_table = name == f"{model.replace('-', '_')}_{task}"
            rows.setdefault(f"{model} LoRA" if in_table else name, {})[task] = name
        return rows

    def measure(self, column: str) -> str:
        """Returns the name of a task's metrics."""
        return self.words.get(column, "accuracy")

    def obstacle(self, run: Run) -> str | None:
        """Returns why a run cannot begin; None if it can."""
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
        return (
            f"it starts from the LoRA weights of {recipe.after}: run that too, or set "
            "MNLI_CHECKPOINT"
        )

    def command(self, run: Run) -> tuple[list[str], dict[str, str]]:
        """Returns the command that begins or resumes a run, and environment variables for it."""
        recipe = self.recipes[run.recipe]
        flags, variables = [], {}
        if self.small:
            flags += ["--small", self.small / "base", self.small / "data", *self.small_flags]
        elif "NPROC" not in os.environ:
            nproc, flags = self.module.fitted(recipe, self.module.gpu_count())
            variables["NPROC"] = str(nproc)
        if recipe.after and not os.environ.get("MNLI_CHECKPOINT") and (start := self._start(run)):
            variables["MNLI_CHECKPOINT"] = str(start)
        resumes = run.output.is_dir() and last_checkpoint(run.output) is not None
        flags += ["--seed", run.seed, "--output_dir", run.output, "--overwrite_output_dir"]
        flags += [not resumes, "--logging_dir", run.folder / "runs"]
        flags += ["--load_best_model_at_end", "--save_total_limit", 1]
        flags += ["--metric_for_best_model", self._metrics(run)[0]]
        if "apply_lora" in recipe.flags:
            flags.append("--save_lora_only")
        return ["bash", str(recipe.script), *map(str, flags)], variables

    def figures(self, run: Run) -> Figures | None:
        """Returns the figures of the best evaluation; None for a run that is not finished."""
        best = self._best(run)
        if best is None:
            return None
        names = [f"eval_{metric}" for metric in self._metrics(run)]
        if self._task(run.recipe) == "mnli":
            names.append("eval_accuracy_mm")
        return tuple(100 * best[name] for name in names)

    def other_scores(self, run: Run) -> dict[str, float]:
        """Returns a finished run's F1, if the task has it."""
        best = self._best(run)
        return {"F1": 100 * best["eval_f1"]} if "eval_f1" in best else {}

    def curve(self, run: Run) -> tuple[list[float], list[float]]:
        """Returns what a run has logged: epochs, and the task's first metric in percent."""
        name = f"eval_{self._metrics(run)[0]}"
        records = self._evaluations(run)
        return [record["epoch"] for record in records], [100 * record[name] for record in records]

    def curve_axes(self, run: Run) -> tuple[str, str]:
        """Returns the axes' titles for `curve`."""
        return "epoch", f"{self._metrics(run)[0].replace('_', ' ')}, %"

    def trained(self, run: Run) -> str:
        """Returns how many parameters a finished run has trained; empty without checkpoints."""
        from loralib.adapters.families import in_known_backbone
        from transformers.models import registry  # noqa: F401 - registers checkpoints' families

        sizes: dict[str, int] = {}
        for path in run.output.glob("pytorch_model_*.safetensors"):
            sizes |= trained_sizes(path)
        if not sizes:
            return ""
        adapted = sum(size for name, size in sizes.items() if in_known_backbone(name))
        return f"{adapted:,} + {sum(sizes.values()) - adapted:,} in the head"

    def make_small(self) -> None:
        """Makes a small task and a small base."""
        with atomic_folder(self.small) as folder:
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
        """Returns the LoRA weights of the run to start from (MNLI's); None if it has not ended."""
        before = run_of(self.out, self.recipes[run.recipe].after, run.seed)
        return before.output / "pytorch_model_lora.bin" if self._best(before) else None

    def _best(self, run: Run) -> dict[str, float] | None:
        """Returns the record of the best evaluation; None for a run that is not finished.

        At its end, a run evaluates the best evaluation's weights again. Fields that only this last
        evaluation has are added: MNLI's mismatched half is evaluated only then.
        """
        path = run.output / "eval_results.json"
        if not path.is_file():
            return None
        at_end = read_json(path)
        name = f"eval_{self._metrics(run)[0]}"
        best = max([*self._evaluations(run), at_end], key=lambda record: record[name])
        return {**at_end, **best}

    def _evaluations(self, run: Run) -> list[dict[str, float]]:
        """Returns the evaluations that a run has logged, finished or not."""
        path = run.output / "trainer_state.json"
        if not path.is_file() and run.output.is_dir():
            path = Path(last_checkpoint(run.output) or run.output) / path.name
        if not path.is_file():
            return []
        return [record for record in read_json(path)["log_history"] if "eval_loss" in record]
