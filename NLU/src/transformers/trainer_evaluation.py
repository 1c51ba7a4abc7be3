"""The Trainer's evaluations, which gather the losses, predictions and labels of all processes."""

import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from loralib.errors import TrainingError
from loralib.nn.routing import is_by_row
from loralib.training import watch
from loralib.training.distributed import gather_objects, sum_over_processes
from loralib.training.precision import Precision, all_in_half
from loralib.training.product_choices import chosen_products, frozen_weights

from .data.data_collator import IGNORED_LABEL, PackedCollator, only_pads
from .data.table_digest import LastDigest
from .trainer_agreement import about_examples, check_same_evaluation
from .trainer_callback import CallbackHandler, TrainerControl
from .trainer_data import ExampleSampler, length_of, lengths_at_hand, overrides, takes_packed_rows
from .trainer_loaders import TrainerLoaders
from .trainer_pt_utils import LabelSmoother, join_rows, predictions_of
from .trainer_utils import EvalPrediction, PredictionOutput, memory_metrics, speed_metrics


def loss_of(outputs: Any) -> Tensor:
    """Returns the loss among a model's outputs: a dict's "loss" or a tuple's first item.

    Raises:
        TrainingError: there is no loss, or it is not one number.
    """
    loss = None
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    elif isinstance(outputs, tuple | list) and outputs:
        loss = outputs[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TrainingError(
            "the model returned no loss: with labels, its forward has to give one number, as "
            "'loss' in a dict or as a tuple's first item"
        )
    return loss.reshape(())


def one_or_all(parts: Sequence[Any]) -> Any:
    """Returns a single tensor or array by itself, several as a tuple, and None for none."""
    return parts[0] if len(parts) == 1 else tuple(parts) or None


def as_tensors(parts: Any) -> tuple[Tensor, ...]:
    """Returns tensors as a tuple; the reverse of `one_or_all`.

    Raises:
        TrainingError: `parts` holds anything else, such as nested lists.
    """
    parts = () if parts is None else (parts,) if isinstance(parts, Tensor) else parts
    if not isinstance(parts, tuple | list) or not all(isinstance(part, Tensor) for part in parts):
        raise TrainingError(
            "prediction_step has to return the loss, predictions and labels, the latter two as a "
            "tensor or a tuple of tensors each"
        )
    return tuple(parts)


def rows_of(inputs: Any) -> int:
    """Returns the number of examples in a batch, which is the number of its first tensor's rows.

    Raises:
        TrainingError: the batch has no tensor with rows.
    """
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    for value in values:
        if isinstance(value, Tensor) and value.dim() > 0:
            return len(value)
    raise TrainingError("a batch has no tensor with a row for each example")


def check_rows(batch: tuple[Tensor, ...], count: int) -> None:
    """Checks that a batch's tensors have one row for each of its examples.

    Raises:
        TrainingError: a tensor does not have `count` rows.
    """
    for part in batch:
        if len(part) != count:
            raise TrainingError(
                f"the model returned {len(part)} rows for {count} examples, in a tensor of the "
                f"shape {tuple(part.shape)}: predictions need a row for each example"
            )


class Collector:
    """Collects one process's tensors of an evaluation, batch by batch.

    Args:
        steps: the number of batches after which the tensors are moved to the CPU. If None, they are
            moved only at the end.
    """

    def __init__(self, steps: int | None = None):
        self.steps = steps
        self._on_device: list[tuple[Tensor, ...]] = []
        self._on_cpu: list[tuple[Tensor, ...]] = []

    def add(self, batch: tuple[Tensor, ...]) -> None:
        """Adds a batch's tensors, (rows, …) each. All batches must have the same number of them."""
        self._on_device.append(batch)
        if self.steps is not None and len(self._on_device) >= self.steps:
            self._move()

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Returns each tensor with the rows of all batches, concatenated by `join_rows`."""
        self._move()
        return tuple(join_rows(parts).numpy() for parts in zip(*self._on_cpu, strict=True))

    def _move(self) -> None:
        if self._on_device:
            joined = (join_rows(parts) for parts in zip(*self._on_device, strict=True))
            self._on_cpu.append(tuple(part.cpu() for part in joined))
            self._on_device = []


def gather_in_order(
    indices: Sequence[int], arrays: tuple[np.ndarray, ...], world_size: int
) -> tuple[np.ndarray, ...]:
    """Returns each array with the rows of all processes, sorted by their indices.

    The result is the same on every process. Shorter rows are padded as in `join_rows`.
    """
    shares = [share for share in gather_objects((indices, arrays), world_size) if share[1]]
    order = np.argsort([index for share in shares for index in share[0]], kind="stable")
    whole = zip(*(share[1] for share in shares), strict=True)
    return tuple(
        join_rows([torch.from_numpy(part) for part in parts]).numpy()[order] for parts in whole
    )


class Evaluation:
    """The results of one evaluation: this process's batches, and at the end those of all processes.

    Args:
        loader: makes the batches. If its sampler has `EvaluationBatches`, the results are in the
            set's order. Otherwise they are in the loader's order, process by process, and are cut
            to the set's length, because samplers fill up the last process's share.
        device: the device of the losses.
        world_size, rank: the number of processes, and this one's rank.
        accumulation_steps: see `Collector`.
    """

    def __init__(
        self,
        loader: Any,
        device: torch.device,
        world_size: int,
        rank: int,
        accumulation_steps: int | None = None,
    ):
        sampler = getattr(loader, "sampler", None)
        self._share = sampler.batches if isinstance(sampler, ExampleSampler) else None
        self._set_length = length_of(getattr(loader, "dataset", None))
        self._device, self._world_size, self._rank = device, world_size, rank
        self._collectors = [Collector(accumulation_steps), Collector(accumulation_steps)]
        self._rows: list[int] = []
        self._losses: list[Tensor | None] = []
        self._have_targets: list[bool | Tensor] = []

    def add(
        self,
        inputs: Any,
        loss: Tensor | None,
        predictions: Tensor | Sequence[Tensor] | None,
        labels: Tensor | Sequence[Tensor] | None,
    ) -> None:
        """Adds a batch and what `Trainer.prediction_step` returned for it.

        Raises:
            TrainingError: predictions or labels do not have one row for each example.
        """
        rows = rows_of(inputs) if self._share is None else self._rows_in_share()
        self._rows.append(rows)
        self._losses.append(None if loss is None else loss.detach().mean())
        self._have_targets.append(has_targets(inputs))
        for collector, parts in zip(self._collectors, (predictions, labels), strict=True):
            batch = as_tensors(parts)
            check_rows(batch, rows)
            collector.add(batch)

    def _rows_in_share(self) -> int:
        size, done = self._share.batch_size, len(self._rows) * self._share.batch_size
        return min(size, self._share.examples - done)

    def results(self) -> tuple[float | None, Any, Any, int]:
        """Returns the mean loss, the predictions, the labels and the number of examples.

        They are the same on every process. Results that no batch had are None.
        """
        counts = gather_objects(sum(self._rows), self._world_size)
        own, total = counts[self._rank], sum(counts)
        limit = total if self._set_length is None else self._set_length
        if self._share is not None:
            indices = self._share.indices[:own]  # a loader may leave out a last batch
        else:
            start = sum(counts[: self._rank])
            indices = range(start, start + own)
        gathered = [
            gather_in_order(indices, collector.arrays(), self._world_size)
            for collector in self._collectors
        ]
        predictions, labels = (one_or_all([part[:limit] for part in parts]) for parts in gathered)
        return self._mean_loss(indices, limit), predictions, labels, min(total, limit)

    def _mean_loss(self, indices: Sequence[int], limit: int) -> float | None:
        """Returns the mean over the examples with an index below `limit` in batches with targets.

        If all labels of a batch are ignored, its loss of 0 has no meaning and does not count.
        Returns nan if no batch has targets, and None if no batch has a loss.
        """
        counts, losses, done = [], [], 0
        batches = zip(self._rows, self._losses, self._have_targets, strict=True)
        for rows, loss, has_target in batches:
            if loss is not None:
                counted = indices[done : done + rows] if has_target else ()
                counts.append(sum(index < limit for index in counted))
                losses.append(loss.double())
            done += rows
        values = torch.stack(losses).tolist() if losses else []
        own = math.fsum(count * value for count, value in zip(counts, values, strict=True))
        sums = [own, sum(counts), len(losses)]
        sums = torch.tensor(sums, dtype=torch.float64, device=self._device)
        total, count, had_loss = sum_over_processes(sums, self._world_size).tolist()
        if not had_loss:
            return None
        return total / count if count else math.nan


def has_targets(inputs: Any) -> bool | Tensor:
    """Returns whether a batch has a label that is not ignored; True unless labels are per token.

    For labels per token, the result is a tensor on their device, and reading it waits for the
    device.
    """
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    if not isinstance(labels, Tensor) or labels.dim() < 2:
        return True
    return (labels != IGNORED_LABEL).any()


class TrainerEvaluation(TrainerLoaders):
    """The part of `Trainer` that evaluates and predicts."""

    control: TrainerControl
    callback_handler: CallbackHandler
    compute_metrics: Callable[[EvalPrediction], dict[str, float]] | None
    label_smoother: LabelSmoother | None
    precision: Precision
    _eval_digest: LastDigest  # of the last set only, as a training evaluates one set repeatedly

    def evaluate(
        self,
        eval_dataset: Dataset | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Computes, logs and returns the loss and the metrics on a set.

        Without `compute_metrics`, predictions are not gathered.

        Args:
            eval_dataset: the set; by default the Trainer's.
            ignore_keys: the model's outputs that are not predictions; by default its
                configuration's ``keys_to_ignore_at_inference``.
            metric_key_prefix: the prefix of every metric's name.
        """
        self._check_same_evaluation(eval_dataset if eval_dataset is not None else self.eval_dataset)
        loader = self._evaluation_loader("get_eval_dataloader", eval_dataset)
        loss_only = True if self.compute_metrics is None else None
        output = self.prediction_loop(
            loader, "evaluating", loss_only, ignore_keys, metric_key_prefix
        )
        metrics = output.metrics
        self.log(dict(metrics))
        metrics.update(self._memory_metrics(metric_key_prefix))
        self._call("on_evaluate", metrics)
        return metrics

    def predict(
        self,
        test_dataset: Dataset,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> PredictionOutput:
        """Returns the model's predictions on a set and, if that has labels, the metrics.

        Predictions are the model's outputs without the loss; see `EvalPrediction`. The arguments
        are those of `evaluate`.
        """
        self._check_same_evaluation(test_dataset)
        loader = self._evaluation_loader("get_test_dataloader", test_dataset)
        output = self.prediction_loop(loader, "predicting", None, ignore_keys, metric_key_prefix)
        output.metrics.update(self._memory_metrics(metric_key_prefix))
        self._call("on_predict", output.metrics)
        return output

    def prediction_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> PredictionOutput:
        """Computes all batches of a loader, and the metrics.

        Args:
            dataloader: this process's batches; see `Evaluation`.
            description: the label of the progress bar.
            prediction_loss_only: leave out predictions and labels; by default as ``args`` say.
            ignore_keys: see `evaluate`.
            metric_key_prefix: see `evaluate`.
        """
        args, start = self.args, time.time()
        if prediction_loss_only is None:
            prediction_loss_only = args.prediction_loss_only
        handler = self.callback_handler
        handler.eval_dataloader = dataloader
        found = Evaluation(
            dataloader,
            args.device,
            args.world_size,
            args.process_index,
            args.eval_accumulation_steps,
        )
        self.model.eval()
        in_half = all_in_half(self.model) if args.fp16_full_eval else nullcontext()
        with torch.no_grad(), in_half, self.precision.autocast(), self._products():
            for inputs in dataloader:
                step = self.prediction_step(self.model, inputs, prediction_loss_only, ignore_keys)
                found.add(inputs, *step)
                watch.beat()
                self.control = handler.on_prediction_step(
                    args, self.state, self.control, description=description
                )
        handler.eval_dataloader = None
        loss, predictions, labels, count = found.results()
        metrics = {} if loss is None else {f"{metric_key_prefix}_loss": loss}
        if self.compute_metrics and predictions is not None and labels is not None:
            given = self.compute_metrics(EvalPrediction(predictions, labels))
            for name, value in given.items():
                is_numpy_scalar = isinstance(value, np.generic)  # JSON cannot hold those
                name = f"{metric_key_prefix}_{name.removeprefix(f'{metric_key_prefix}_')}"
                metrics[name] = value.item() if is_numpy_scalar else value
        metrics.update(speed_metrics(metric_key_prefix, start, count))
        # All processes use the first one's, so that they agree on, say, the best checkpoint.
        metrics = gather_objects(metrics, args.world_size)[0]
        return PredictionOutput(predictions, labels, metrics)

    def _check_same_evaluation(self, dataset: Any) -> None:
        if self.args.world_size > 1:
            model = None if self.state.global_step > 0 else self.model
            check_same_evaluation(self.args, model, self._about_evaluation(dataset))

    def _about_evaluation(self, dataset: Any) -> dict[str, Any]:
        digest = self._eval_digest.of(dataset)
        return about_examples("to evaluate on", length_of(dataset), digest)

    def _products(self) -> AbstractContextManager:
        """Returns a context in which matrix products are computed as in this Trainer's training.

        So an evaluation during training does not change the training's bits.
        """
        args = self.args
        if args.device.type != "cpu" or self._has_products:
            return nullcontext()
        return chosen_products(frozen_weights(self.model), args.compute_dtype, args.world_size)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Computes a batch's loss (if it has all labels), predictions and labels.

        With `prediction_loss_only`, predictions and labels are left out, and a masked language
        model computes only the logits of its targets.

        Returns:
            Loss, predictions and labels; each is None if there are none. Several predictions or
            several kinds of labels are a tuple of tensors.
        """
        inputs = self._prepare_inputs(inputs)
        if ignore_keys is None:
            config = getattr(self.model, "config", None)
            ignore_keys = getattr(config, "keys_to_ignore_at_inference", [])
        if any(inputs.get(name) is None for name in self.label_names):
            if prediction_loss_only:
                return None, None, None
            outputs = model(**inputs)
            return None, one_or_all(predictions_of(outputs, False, ignore_keys)), None
        if prediction_loss_only:
            if "targets_only" in inspect.signature(self.model.forward).parameters:
                inputs = {**inputs, "targets_only": True}
            return self.compute_loss(model, inputs).detach(), None, None
        # Read before the loss, as a subclass may remove the labels to compute it.
        labels = [inputs[name] for name in self.label_names]
        smooths = self._smooths(inputs)
        loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        saw_labels = not smooths and all(name in inputs for name in self.label_names)
        predictions = predictions_of(outputs, saw_labels, ignore_keys)
        return loss.detach(), one_or_all(predictions), one_or_all(labels)

    def _evaluation_loader(self, method: str, dataset: Dataset | None) -> Any:
        """Returns a subclass's own loader, else one with batches of about one length if allowed."""
        if overrides(self, TrainerEvaluation, (method, "_get_eval_sampler", "prediction_loop")):
            return getattr(self, method)(dataset)
        dataset = self._evaluated(self.eval_dataset if dataset is None else dataset)
        share = self._evaluation_batches(dataset, self._lengths_to_sort_by(dataset))
        loader = self._loader(dataset, share.batch_size, sampler=ExampleSampler(share))
        loader.collate_fn = self._collator()
        return loader

    def _lengths_to_sort_by(self, dataset: Dataset) -> list[int] | None:
        """Returns the examples' lengths if an evaluation may sort by them, else None.

        It may if the results change by no more than rounding: each example has its own loss, and
        the collator only pads. A bank with an adapter for each row needs the set's order.
        """
        if is_by_row() or not (only_pads(self.data_collator) and self._has_own_step()):
            return None
        return lengths_at_hand(dataset, {"label", "label_ids", *self.label_names})

    def _collator(self) -> Callable[[list[Any]], Mapping[str, Any]]:
        """Returns the collator, which adds `packed_rows` if only this package's code sees them."""
        if takes_packed_rows(self.model) and self._has_own_step():
            return PackedCollator(self.data_collator)
        return self.data_collator

    def _memory_metrics(self, split: str) -> dict[str, int]:
        """Returns the peak memory if asked for. It is not logged, as it differs between runs."""
        return {} if self.args.skip_memory_metrics else memory_metrics(split, self.args.device)
