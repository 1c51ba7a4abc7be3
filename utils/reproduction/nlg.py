"""Knows the recipes of NLG/, which are measured on the test sets of E2E, DART and WebNLG."""

import json
from collections.abc import Mapping

from reproduction.programs import atomic_folder, make
from reproduction.runs import ROOT, Figures, Run, Tree, read_json, trained_sizes


class Nlg(Tree):
    """The recipes of NLG/."""

    title = "GPT-2, test sets"
    section = "nlg_test"
    seeds = (110, 111, 112, 113, 114)
    columns: Mapping[str, str] = {"e2e": "E2E", "dart": "DART", "webnlg": "WebNLG"}
    # The labels in the scores.json that a recipe writes; only "all" for other corpora.
    labels: Mapping[str, tuple[str, ...]] = {"webnlg": ("unseen", "seen", "all")}
    small_name = "e2e"
    small_flags = (
        *("--max_step", "9", "--warmup_step", "2"),
        *("--lr", "0.005", "--eval_interval", "3"),
    )
    # Lines in each split of the small corpus, which has two to four texts per subject.
    small_lines: Mapping[str, int] = {"train": 200, "valid": 12, "test": 18}

    def rows(self) -> dict[str, dict[str, str]]:
        """Returns recipes by row and corpus."""
        rows: dict[str, dict[str, str]] = {}
        for script in sorted((ROOT / "NLG").glob("*_gpt2_*.sh"), reverse=True):
            corpus, _, size = script.stem.split("_")
            rows.setdefault(f"gpt2-{size} LoRA", {})[corpus] = script.stem
        return rows

    def measure(self, column: str) -> str:
        """Returns the name of a corpus's metrics."""
        return f"BLEU {'/'.join(self.labels[column])}" if column in self.labels else "BLEU"

    def obstacle(self, run: Run) -> str | None:
        """Returns why a run cannot begin; None if it can."""
        if self.small and self._corpus(run) != "e2e":
            return "the small data is in E2E's format only"
        return None

    def command(self, run: Run) -> tuple[list[str], dict[str, str]]:
        """Returns the command that begins or resumes a run, and environment variables for it."""
        variables = {"SEED": str(run.seed), "RUN_DIR": str(run.output)}
        flags = ["--resume"]
        if self.small:
            variables["TRIAL_DIR"] = str(self.small)
            flags += self.small_flags
        return ["bash", str(ROOT / "NLG" / f"{run.recipe}.sh"), *flags], variables

    def figures(self, run: Run) -> Figures | None:
        """Returns BLEU of the last epoch's texts; None for a run that is not finished."""
        scores = self._scores(run)
        if scores is None:
            return None
        # E2E's scores go from 0 to 1, the others' to 100.
        scale = 100 if self._corpus(run) == "e2e" else 1
        return tuple(scale * row["BLEU"] for row in scores.values())

    def other_scores(self, run: Run) -> dict[str, float]:
        """Returns a finished run's other scores on the whole test set, without skipped ones."""
        scores = self._scores(run)["all"].items()
        return {name: score for name, score in scores if name != "BLEU" and score is not None}

    def curve(self, run: Run) -> tuple[list[float], list[float]]:
        """Returns what a run has logged: steps, and the loss on the validation data."""
        path = run.output / "metrics.jsonl"
        # A line that was cut off has no line feed, and is dropped here.
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
        records = [record for line in lines if "valid_loss" in (record := json.loads(line))]
        return [r["step"] for r in records], [r["valid_loss"] for r in records]

    def curve_axes(self, run: Run) -> tuple[str, str]:
        """Returns the axes' titles for `curve`."""
        return "step", "validation loss"

    def trained(self, run: Run) -> str:
        """Returns how many parameters a finished run has trained; empty without checkpoints."""
        # Every checkpoint holds the LoRA weights, and the last one the full model as well.
        paths = sorted(run.output.glob("model.*.pt"), key=lambda path: path.stat().st_size)
        if not paths:
            return ""
        sizes = trained_sizes(paths[0])
        return f"{sum(size for name, size in sizes.items() if 'lora_' in name):,}"

    def make_small(self) -> None:
        """Makes a small encoded corpus and a small base."""
        with atomic_folder(self.small) as folder:
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
        """Returns the scores by label; None if some are missing."""
        path = run.output / "scores.json"
        scores = read_json(path) if path.is_file() else {}
        labels = self.labels.get(self._corpus(run), ("all",))
        return {name: scores[name] for name in labels} if set(labels) <= set(scores) else None
