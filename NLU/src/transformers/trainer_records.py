"""The Trainer's records: logs, metrics on the screen and on disk, what a run has computed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from loralib.training.distributed import sum_over_processes

from .modeling_utils import PreTrainedModel
from .trainer_callback import TrainerState
from .trainer_checkpoint import TRAINER_STATE_NAME, Progress
from .trainer_pt_utils import metrics_format
from .trainer_utils import save_metrics
from .training_args import TrainingArguments
from .utils import logging

logger = logging.get_logger(__name__)


class TrainerRecords:
    """The part of `Trainer` that logs, and writes metrics."""

    args: TrainingArguments
    state: TrainerState
    model: nn.Module
    _progress: Progress
    _counted: tuple[nn.Module, int] | None = None  # a model, and its weights beside embeddings

    def log(self, logs: dict[str, float]) -> None:
        """Records `logs`, with the epoch and the step, and shows them."""
        epoch, step = self.state.epoch, self.state.global_step
        shown = dict(logs) if epoch is None else {**logs, "epoch": round(epoch, 2)}
        self.state.log_history.append(shown | {"step": step})
        self._call("on_log", shown)

    def _log_run_size(self, examples: int, max_steps: int) -> None:
        args = self.args
        update = args.train_batch_size * args.world_size * args.gradient_accumulation_steps
        known = f"{examples:,} examples" if examples else "a set of unknown length"
        parameters = list(self.model.parameters())
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        logger.info(
            f"training {trained:,} of {sum(p.numel() for p in parameters):,} parameters on "
            f"{known}: {max_steps:,} updates of {update} examples, from update "
            f"{self.state.global_step:,} on"
        )

    def _mean_loss(self, total: float, steps: int) -> float:
        own = torch.tensor(total, dtype=torch.float64, device=self.args.device)
        summed = sum_over_processes(own, self.args.world_size)
        return summed.item() / self.args.world_size / steps

    def save_state(self) -> None:
        """Writes ``trainer_state.json`` into the output folder."""
        if self.args.is_main_process:
            self.state.save_to_json(Path(self.args.output_dir, TRAINER_STATE_NAME))

    def metrics_format(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Metrics as `log_metrics` shows them."""
        return metrics_format(metrics)

    def log_metrics(self, split: str, metrics: dict[str, float]) -> None:
        """Logs metrics, one a line."""
        if self.args.is_main_process:
            logger.info("***** %s metrics *****", split)
            for name, value in sorted(metrics_format(metrics).items()):
                logger.info("  %s = %s", name, value)

    def save_metrics(self, split: str, metrics: dict[str, float], combined: bool = True) -> None:
        """Writes ``<split>_results.json`` and, with `combined`, adds to ``all_results.json``."""
        if self.args.is_main_process:
            save_metrics(self.args.output_dir, split, metrics, combined)

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
        """The operations of a batch's step on a model of this package: 6 · tokens · weights.

        Padding counts, embeddings do not; 0 for other modules. What LoRA saves by not computing
        frozen weights' gradients is not taken off: runs stay comparable with upstream's.
        """
        ids = inputs.get("input_ids")
        if not isinstance(ids, Tensor) or not isinstance(self.model, PreTrainedModel):
            return 0
        return 6 * ids.numel() * self._weights_beside_embeddings()

    def _weights_beside_embeddings(self) -> int:
        """How many there are; counted once for a model."""
        if self._counted is None or self._counted[0] is not self.model:
            embedded = {m.weight for m in self.model.modules() if isinstance(m, nn.Embedding)}
            count = sum(p.numel() for p in self.model.parameters() if p not in embedded)
            self._counted = self.model, count
        return self._counted[1]

    def store_flos(self) -> None:
        """Adds what all processes have computed since the last time to the state."""
        own = torch.tensor(self._progress.flos, dtype=torch.float64, device=self.args.device)
        self.state.total_flos += sum_over_processes(own, self.args.world_size).item()
        self._progress.flos = 0
