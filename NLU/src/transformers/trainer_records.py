"""The Trainer's logs, its metrics on screen and on disk, and its count of operations."""

import math
import os
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from loralib.adapters.summary import lora_in_words, trained_in_words
from loralib.io.console import devices_in_words, steps_in_words, table, training_in_words
from loralib.text import counted, in_short
from loralib.training.cuda_graphs import HINT, IN_USE
from loralib.training.distributed import share_warnings, sum_over_processes

from .adapter_kinds import BITFIT, BOTTLENECK
from .integrations import CurvesCallback
from .modeling_utils import PreTrainedModel
from .trainer_callback import CallbackHandler, TrainerState
from .trainer_checkpoint import TRAINER_STATE_NAME
from .trainer_checks import why_no_graphs
from .trainer_data import EpochBatches, length_of
from .trainer_progress import Progress
from .trainer_pt_utils import metrics_format
from .trainer_utils import is_score, save_metrics
from .trainer_weights import adapted_by
from .training_args import TrainingArguments
from .utils import logging

logger = logging.get_logger(__name__)


_BASELINES = {BOTTLENECK: "bottleneck adapters", BITFIT: "BitFit, its biases"}


class TrainerRecords:
    """The part of `Trainer` that logs, and writes metrics."""

    args: TrainingArguments
    state: TrainerState
    model: nn.Module
    eval_dataset: Any
    optimizer: Any
    callback_handler: CallbackHandler
    _progress: Progress
    _counted: tuple[nn.Module, int] | None = None  # a model, and its weights without embeddings

    def log(self, logs: dict[str, float]) -> None:
        """Records `logs`, with the epoch and the step, and shows them."""
        epoch, step = self.state.epoch, self.state.global_step
        shown = dict(logs) if epoch is None else {**logs, "epoch": round(epoch, 2)}
        self.state.log_history.append(shown | {"step": step})
        self._call("on_log", shown)

    def _log_beginning(self, passes: EpochBatches, max_steps: int, checkpoint: str | None) -> None:
        """Logs, in the main process, what is trained, on which data and where.

        All processes have to call it, because `share_warnings` gathers from all.
        """
        args = self.args
        if self._peak_rates() == [0]:
            logger.warning(
                "the learning rate is 0, so nothing is trained and the initial weights are saved: "
                "give a --learning_rate"
            )
        share_warnings(args.process_index, args.world_size)
        if args.is_main_process and logger.isEnabledFor(logging.INFO):
            rows = [*self._about_model(), *self._about_data(passes, max_steps)]
            is_own = self._has_own_step()
            if args.cuda_graphs and is_own:  # else a warning follows
                rows.append(IN_USE)
            if checkpoint:
                left = "" if self.state.global_step < max_steps else ": nothing is left to train"
                step = f"step {self.state.global_step:,}{left}"
                rows.append(("resuming from", f"{checkpoint}, {step}"))
            elif not args.cuda_graphs and is_own and why_no_graphs(self.model, args) is None:
                rows.append(HINT)
            logger.info("training\n%s", table(rows, indent="  "))

    def _about_model(self) -> list[tuple[str, str]]:
        model, args = self.model, self.args
        name = type(model).__name__
        if isinstance(model, PreTrainedModel) and model.config.name_or_path:
            name += f", {model.config.name_or_path}"
        adapted = lora_in_words(model)
        kinds = [f"LoRA of {adapted}"] if adapted else []
        kinds += [_BASELINES[kind] for kind in adapted_by(model) if kind in _BASELINES]
        return [
            ("model", name),
            ("adapted by", "; ".join(kinds) or "nothing"),
            ("trained", trained_in_words(model)),
            ("precision", str(args.compute_dtype).removeprefix("torch.")),
            ("devices", devices_in_words(args.device, args.world_size)),
        ]

    def _about_data(self, passes: EpochBatches, max_steps: int) -> list[tuple[str, str]]:
        args = self.args
        batches = args.gradient_accumulation_steps
        batches = min(batches, passes.length or batches)  # a short epoch makes one update
        an_update = sum(map(passes.size, range(batches)))
        known = counted(passes.examples, "example") if passes.examples else "of unknown length"
        epochs = f", {counted(args.num_train_epochs, 'epoch')}" if args.max_steps <= 0 else ""
        evaluated = length_of(self.eval_dataset)
        return [
            ("training set", known),
            *([("evaluated on", counted(evaluated, "example"))] if evaluated else []),
            ("steps", f"{steps_in_words(max_steps, an_update)}{epochs}"),
            ("learning rate", in_short((f"{rate:g}" for rate in self._peak_rates()), at_most=4)),
            ("output", os.path.abspath(args.output_dir)),
        ]

    def _peak_rates(self) -> list[float]:
        """Returns the optimizer's learning rates, each once: those of `args` or the user's own."""
        groups = self.optimizer.param_groups
        # Schedulers keep the peak rate as "initial_lr"; the current rate may begin at 0.
        rates = (group.get("initial_lr", group.get("lr")) for group in groups)
        return list(dict.fromkeys(float(rate) for rate in rates if rate is not None))

    def log_end(self) -> None:
        """Logs, in the main process, a run's results and where its files are.

        All processes have to call it, after training, because `share_warnings` gathers from all and
        would wait for a missing one.
        """
        args = self.args
        share_warnings(args.process_index, args.world_size)
        if not args.is_main_process or not logger.isEnabledFor(logging.INFO):
            return
        folder = os.path.abspath(args.output_dir)
        rows = [*self._about_run(), ("files", folder)]
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, CurvesCallback) and callback.path is not None:
                rows.append(("curves", os.path.abspath(callback.path)))
        logger.info("finished\n%s", table(rows, indent="  "))

    def _about_run(self) -> list[tuple[str, str]]:
        history = self.state.log_history
        runs = [record for record in history if "train_runtime" in record]
        if not runs:
            return []
        seconds = runs[-1]["train_runtime"]
        steps = training_in_words(self.state.global_step, self._resumed_from, seconds)
        best = self._about_best(history[: history.index(runs[-1])])
        return [("trained", f"{trained_in_words(self.model)}; {steps}"), *best]

    def _about_best(self, records: list[dict[str, Any]]) -> list[tuple[str, str]]:
        """Returns a row about the best evaluation in a run's records, or none without any."""
        metric = self.args.eval_metric_name or "eval_loss"
        evaluations = [r for r in records if not math.isnan(r.get(metric, math.nan))]
        if not evaluations:
            return []
        choose = max if self.args.greater_is_better else min
        best = choose(evaluations, key=lambda record: record[metric])
        scores = {name.removeprefix("eval_"): v for name, v in best.items() if is_score(name)}
        own = metric.removeprefix("eval_")
        figures = {own: best[metric], **scores}
        shown = {n: v for n, v in figures.items() if n != "step" and isinstance(v, Real)}
        listed = ", ".join(f"{name} {value:.4g}" for name, value in shown.items())
        last, is_kept = self.state.global_step, self.args.load_best_model_at_end
        kept = "" if is_kept or best["step"] == last else f"; the model is from step {last:,}"
        epoch = best.get("epoch", 0)  # missing before the first step
        when = f"step {best['step']:,}, epoch {epoch:g}"
        return [("best", f"{when}: {listed} (by {own}){kept}")]

    def _mean_loss(self, total: float, weight: float, steps: int) -> float:
        """Returns the mean loss of the batches of updates, over all processes.

        Batches without a target are left out, as in evaluations. If all lack one, returns nan.

        Args:
            total: the sum of this process's weighted losses, without those batches.
            weight: the sum of their weights.
            steps: the number of updates.
        """
        own = torch.tensor([total, weight], dtype=torch.float64, device=self.args.device)
        total, weight = sum_over_processes(own, self.args.world_size).tolist()
        if weight or not steps:
            return total / (weight or 1)
        # Without the warning, nan would look like a diverged training. Warns at the first log with
        # nan, and if the loss of the whole run is nan.
        logged = [record.get("loss") for record in self.state.log_history]
        is_said = any(isinstance(loss, float) and math.isnan(loss) for loss in logged)
        if steps == self.state.global_step or not is_said:
            logger.warning(
                "no batch of %s had a target, such as a label or a masked token: the loss is "
                "undefined (nan)",
                counted(steps, "step"),
            )
        return math.nan

    def save_state(self) -> None:
        """Writes ``trainer_state.json`` into the output folder."""
        if self.args.is_main_process:
            self.state.save_to_json(Path(self.args.output_dir, TRAINER_STATE_NAME))

    def metrics_format(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Formats metrics as `log_metrics` shows them."""
        return metrics_format(metrics)

    def log_metrics(self, split: str, metrics: dict[str, float]) -> None:
        """Logs metrics as a table."""
        if self.args.is_main_process:
            rows = [(name, f"= {v}") for name, v in sorted(metrics_format(metrics).items())]
            logger.info("***** %s metrics *****\n%s", split, table(rows, indent="  "))

    def save_metrics(self, split: str, metrics: dict[str, float], combined: bool = True) -> None:
        """Writes ``<split>_results.json`` and, with `combined`, adds to ``all_results.json``."""
        if self.args.is_main_process:
            save_metrics(self.args.output_dir, split, metrics, combined)

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
        """Returns the operations of a training step on a batch: 6 · tokens · weights.

        Padding tokens count, embedding weights do not. For modules not of this package, returns 0.
        The savings from not computing frozen weights' gradients are not subtracted, so that numbers
        are comparable with transformers'. Source: "Scaling Laws for Neural Language Models", arXiv
        2001.08361, section 2.1.
        """
        ids = inputs.get("input_ids")
        if not isinstance(ids, Tensor) or not isinstance(self.model, PreTrainedModel):
            return 0
        return 6 * ids.numel() * self._weights_beside_embeddings()

    def _weights_beside_embeddings(self) -> int:
        """Returns the number of weights without embeddings, counted once per model."""
        if self._counted is None or self._counted[0] is not self.model:
            self._counted = self.model, self.model.num_parameters(exclude_embeddings=True)
        return self._counted[1]

    def store_flos(self) -> None:
        """Adds to the state the operations of all processes since the last call."""
        own = torch.tensor(self._progress.flos, dtype=torch.float64, device=self.args.device)
        self.state.total_flos += sum_over_processes(own, self.args.world_size).item()
        self._progress.flos = 0
