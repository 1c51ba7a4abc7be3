"""The Trainer's evaluations and predictions, whose results trainer_results.py gathers."""

import inspect
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from loralib.nn.routing import is_by_row
from loralib.training import watch
from loralib.training.ddp import share_buffers
from loralib.training.distributed import gather_objects
from loralib.training.precision import Precision, all_in_half
from loralib.training.product_choices import chosen_products, frozen_weights

from .data.data_collator import (
    DataCollator,
    DataCollatorForLanguageModeling,
    PackedCollator,
    SameMasks,
    only_pads,
)
from .data.table_digest import LastDigest
from .trainer_agreement import about_examples, check_same_evaluation
from .trainer_callback import CallbackHandler, TrainerControl
from .trainer_data import ExampleSampler, length_of, lengths_at_hand, overrides, takes_packed_rows
from .trainer_loaders import TrainerLoaders
from .trainer_pt_utils import LabelSmoother, predictions_of
from .trainer_results import Evaluation, one_or_all, plain_metrics
from .trainer_utils import EvalPrediction, PredictionOutput, memory_metrics, speed_metrics
from .utils import logging

logger = logging.get_logger(__name__)


class TrainerEvaluation(TrainerLoaders):
    """The part of `Trainer` that evaluates and predicts."""

    model_wrapped: nn.Module
    control: TrainerControl
    callback_handler: CallbackHandler
    compute_metrics: Callable[[EvalPrediction], dict[str, float]] | None
    label_smoother: LabelSmoother | None = None
    precision: Precision
    _has_warned = False  # of an evaluation without labels
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

        Raises:
            ValueError: there is no set, or it has no length.
            TrainingError: the outputs, the labels or the metrics are not as they have to be.
        """
        self._check_same_evaluation(eval_dataset if eval_dataset is not None else self.eval_dataset)
        loader = self._evaluation_loader("get_eval_dataloader", eval_dataset)
        loss_only = True if self.compute_metrics is None else None
        output = self.prediction_loop(
            loader, "evaluating", loss_only, ignore_keys, metric_key_prefix
        )
        metrics = output.metrics
        if f"{metric_key_prefix}_loss" not in metrics:
            self._warn_of_no_labels()
        self.log(metrics)
        metrics.update(self._memory_metrics(metric_key_prefix))
        self._call("on_evaluate", metrics)
        self.callback_handler.eval_dataloader = None
        return metrics

    def predict(
        self,
        test_dataset: Dataset,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> PredictionOutput:
        """Returns the model's predictions on a set and, if that has labels, the metrics.

        Predictions are the model's outputs without the loss; see `EvalPrediction`. The arguments
        are those of `evaluate`, and so are the errors.
        """
        self._check_same_evaluation(test_dataset)
        loader = self._evaluation_loader("get_test_dataloader", test_dataset)
        output = self.prediction_loop(loader, "predicting", None, ignore_keys, metric_key_prefix)
        output.metrics.update(self._memory_metrics(metric_key_prefix))
        self._call("on_predict", output.metrics)
        self.callback_handler.eval_dataloader = None
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
        share_buffers(self.model_wrapped)
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
        loss, predictions, labels, count = found.results()
        metrics = {} if loss is None else {f"{metric_key_prefix}_loss": loss}
        if self.compute_metrics and predictions is not None and labels is not None:
            given = self.compute_metrics(EvalPrediction(predictions, labels))
            for name, value in plain_metrics(given).items():
                name = f"{metric_key_prefix}_{name.removeprefix(f'{metric_key_prefix}_')}"
                metrics[name] = value
        metrics.update(speed_metrics(metric_key_prefix, start, count))
        # All processes use the first one's, so that they agree on, say, the best checkpoint.
        metrics = gather_objects(metrics, args.world_size)[0]
        return PredictionOutput(predictions, labels, metrics)

    def _warn_of_no_labels(self) -> None:
        """Warns once that an evaluation had neither a loss nor metrics, which need labels."""
        if self._has_warned or not self.args.is_main_process or not self._has_own_step():
            return
        self._has_warned = True
        names = " and ".join(self.label_names)
        metrics = " or metrics" if self.compute_metrics else ""
        logger.warning(
            "the batches to evaluate have no %s, so there is no loss%s: if their labels have "
            "another name, set label_names in TrainingArguments",
            *(names, metrics),
        )

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
        collator = self.data_collator
        if isinstance(collator, DataCollatorForLanguageModeling):
            # Losses can be compared only if they have the same targets.
            collator = SameMasks(collator, self.args.seed)
        loader.collate_fn = self._packing(collator)
        return loader

    def _lengths_to_sort_by(self, dataset: Dataset) -> list[int] | None:
        """Returns the examples' lengths if an evaluation may sort by them, else None.

        It may if the results change by no more than rounding: each example has its own loss, and
        the collator only pads. A bank with an adapter for each row needs the set's order.
        """
        if is_by_row() or not (only_pads(self.data_collator) and self._has_own_step()):
            return None
        return lengths_at_hand(dataset, {"label", "label_ids", *self.label_names})

    def _packing(self, collator: DataCollator) -> DataCollator:
        """Returns a collator that adds `packed_rows` if only this package's code sees them."""
        if takes_packed_rows(self.model) and self._has_own_step():
            return PackedCollator(collator)
        return collator

    def _memory_metrics(self, split: str) -> dict[str, int]:
        """Returns the peak memory if asked for. It is not logged, as it differs between runs."""
        return {} if self.args.skip_memory_metrics else memory_metrics(split, self.args.device)
