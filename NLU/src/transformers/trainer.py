"""`Trainer`: the training loop, evaluation, checkpoints and resuming.

A step is: batch → loss → gradients → (at the end of an accumulation) clip, update, schedule. What
happens around it, logs and bars and the decision when to evaluate, is in trainer_callback.py;
checkpoints and resuming are in trainer_checkpoint.py, the order of the data in trainer_pt_utils.py,
and what both training loops of this project stand on, in loralib.training.
"""

import inspect
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from loralib.errors import TrainingError
from loralib.nn.packing import PackedRows
from loralib.nn.routing import is_by_row
from loralib.training import watch
from loralib.training.ddp import sync_gradients, warm_up_ddp, wrap_ddp
from loralib.training.determinism import set_dropout_seed, set_seed, set_up_device
from loralib.training.distributed import gather_objects, sum_over_processes
from loralib.training.optimizer import decay_groups
from loralib.training.precision import ApexPrecision, Precision, all_in_half, hold_frozen_in
from loralib.training.product_choices import choose_products
from loralib.training.resume import first_not_finite
from loralib.utils import with_lora_plus

from .data.data_collator import (
    DataCollatorWithPadding,
    PackedCollator,
    default_data_collator,
    only_pads,
)
from .integrations import reporting_callbacks
from .modeling_utils import PreTrainedModel
from .optimization import Adafactor, AdamW, get_scheduler
from .tokenization_utils_base import PreTrainedTokenizerBase
from .trainer_callback import (
    CallbackHandler,
    DefaultFlowCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from .trainer_checkpoint import (
    TRAINER_STATE_NAME,
    Checkpoints,
    Progress,
    RunState,
    identities,
    note_best,
    outdated_checkpoints,
)
from .trainer_checks import check_model
from .trainer_pt_utils import (
    Collector,
    EvaluationBatches,
    TrainingBatches,
    check_rows,
    gather_in_order,
    lengths_at_hand,
    lengths_of,
    loss_of,
    memory_metrics,
    one_or_all,
    overrides,
    predictions_of,
    smoothed_loss,
    takes_packed_rows,
)
from .trainer_utils import (
    EvalPrediction,
    IntervalStrategy,
    PredictionOutput,
    TrainOutput,
    get_last_checkpoint,
    log_metrics,
    save_metrics,
    speed_metrics,
)
from .training_args import TrainingArguments
from .utils import logging

logger = logging.get_logger(__name__)


class Trainer:
    """Trains and evaluates a model.

    Args:
        model: what to train; parameters with ``requires_grad`` off stay as they are. Any module
            will do whose forward takes a batch by name, labels included, and returns a dict with
            "loss" or a tuple that begins with the loss.
        args: the settings.
        data_collator: makes a batch of a list of examples; pads to the longest where not given.
        train_dataset, eval_dataset: sized, indexable sets of dicts.
        tokenizer: pads, and is saved with the model.
        compute_metrics: `EvalPrediction` -> metrics by name.
        callbacks: added to the default ones.
        optimizers: an optimizer and a schedule to use instead of those that `args` ask for.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        data_collator: Callable[[list[Any]], dict[str, Tensor]] | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, float]] | None = None,
        callbacks: list[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[Optimizer | None, Any] = (None, None),
    ):
        set_seed(args.seed)
        self.args = args
        set_up_device(tf32=args.tf32, deterministic=args.use_deterministic_algorithms)
        held = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
        # Tensors without memory, see trainer_estimate.py, cannot be moved to where they are.
        self.model = model if held == {args.device} else model.to(args.device)
        self.tokenizer = tokenizer
        default_collator = (
            DataCollatorWithPadding(tokenizer) if tokenizer else default_data_collator
        )
        self.data_collator = data_collator or default_collator
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.compute_metrics = compute_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self.label_names = ["labels"] if args.label_names is None else args.label_names
        self.state = TrainerState(is_world_process_zero=args.is_main_process)
        self.control = TrainerControl()
        self.checkpoints = Checkpoints(args)
        self._wrapped: nn.Module = self.model
        check_model(self.model, args, self.label_names)
        if args.gradient_checkpointing:
            model.config.gradient_checkpointing = True
        if args.is_main_process:
            # Now, so that a folder that cannot be written to is found before the training.
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        self.precision = Precision(args.compute_dtype, args.device.type)
        self.uses_apex = args.use_apex
        in_half = args.compute_dtype is not torch.float32 and not self.uses_apex
        if in_half and isinstance(model, PreTrainedModel):
            # Other models' layers may not support it, and are left to autocast.
            hold_frozen_in(model, args.compute_dtype)
        shown = PrinterCallback if args.disable_tqdm else ProgressCallback
        self.callbacks = CallbackHandler(
            [DefaultFlowCallback, *reporting_callbacks(args), *(callbacks or []), shown],
            model=self.model,
            tokenizer=tokenizer,
        )

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Adds a callback, or one of a class."""
        self.callbacks.add(callback)

    def is_world_process_zero(self) -> bool:
        """Whether this is the process that writes."""
        return self.args.is_main_process

    # ---- data ----

    def _loader(self, dataset: Dataset, batches: Any) -> DataLoader:
        return DataLoader(
            self._used_columns(dataset),
            batch_sampler=batches,
            collate_fn=self._collator(),
            # By default the loader uses dropout's generator, once an epoch and at every resume.
            generator=torch.Generator().manual_seed(self.args.seed + self.state.global_step),
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
        )

    def _collator(self) -> Callable[[list[Any]], Mapping[str, Any]]:
        """What makes a batch; with `packed_rows`, where nobody else's code gets to see it."""
        if takes_packed_rows(self.model) and self._has_own_step():
            return PackedCollator(self.data_collator)
        return self.data_collator

    def _has_own_step(self) -> bool:
        """Whether no subclass does something of its own with a batch."""
        return not overrides(self, Trainer, ("training_step", "compute_loss", "prediction_step"))

    def _used_columns(self, dataset: Dataset) -> Dataset:
        """The set without the columns that the model's forward does not take."""
        if not (self.args.remove_unused_columns and hasattr(dataset, "remove_columns")):
            return dataset
        taken = {*inspect.signature(self.model.forward).parameters, "label", "label_ids"}
        taken.update(self.label_names)
        unused = [name for name in dataset.column_names if name not in taken]
        return dataset.remove_columns(unused)

    def _training_batches(self) -> TrainingBatches:
        if self.train_dataset is None:
            raise ValueError("Trainer: training needs a train_dataset")
        lengths = None
        if self.args.group_by_length:
            lengths = lengths_of(self.train_dataset)
        return TrainingBatches(
            len(self.train_dataset),
            self.args.train_batch_size,
            self.args.seed,
            self.args.world_size,
            self.args.process_index,
            self.args.dataloader_drop_last,
            lengths,
        )

    def _to_device(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        def moved(value: Any) -> Any:
            if isinstance(value, Tensor | PackedRows):
                return value.to(self.args.device, non_blocking=True)
            return value

        return {name: moved(value) for name, value in inputs.items()}

    # ---- optimizer ----

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Makes the optimizer and the schedule, where they were not given."""
        args = self.args
        if self.optimizer is None:
            groups = decay_groups(self.model, args.weight_decay)
            if not groups:
                raise ValueError("the model has no trainable parameters")
            groups = with_lora_plus(self.model, groups, args.learning_rate, args.lora_plus_ratio)
            if args.adafactor:
                self.optimizer = Adafactor(
                    groups, lr=args.learning_rate, scale_parameter=False, relative_step=False
                )
            else:
                self.optimizer = AdamW(
                    groups,
                    lr=args.learning_rate,
                    betas=(args.adam_beta1, args.adam_beta2),
                    eps=args.adam_epsilon,
                )
        if self.lr_scheduler is None:
            warmup = args.warmup_steps
            if warmup <= 0:
                warmup = math.ceil(num_training_steps * args.warmup_ratio)
            self.lr_scheduler = get_scheduler(
                args.lr_scheduler_type, self.optimizer, warmup, num_training_steps
            )

    def _wrap(self) -> None:
        """The model as the loop calls it: through DDP where there are several processes."""
        args = self.args
        if self.uses_apex:
            self.precision = ApexPrecision(self.model, self.optimizer, args.fp16_opt_level)
        self._wrapped = wrap_ddp(
            self.model,
            args.device,
            args.world_size,
            find_unused_parameters=bool(args.ddp_find_unused_parameters),
        )

    def _warm_up(self) -> None:
        """Lets DDP lay out the gradients; see `warm_up_ddp`."""

        def backward() -> None:
            self._wrapped.train()
            example = self._used_columns(self.train_dataset)[0]
            with self.precision.autocast():
                inputs = self._to_device(self._collator()([example]))
                self.compute_loss(self._wrapped, inputs).backward()

        warm_up_ddp(self._wrapped, backward)

    # ---- training ----

    def train(self, resume_from_checkpoint: str | None = None) -> TrainOutput:
        """Trains the model; from a checkpoint's folder on, where one is given.

        Returns:
            The updates made, the mean loss over them, and the run's metrics.

        Raises:
            TrainingError: the loss is not finite.
            CheckpointError: the checkpoint to resume from is damaged or does not fit.
        """
        args = self.args
        start = time.time()
        if args.evaluation_strategy is not IntervalStrategy.NO and self.eval_dataset is None:
            raise ValueError("--evaluation_strategy needs a set to evaluate on: add --do_eval")
        batches = self._training_batches()
        max_steps = args.updates_of(len(batches))
        epochs = math.ceil(max_steps / args.updates_an_epoch(len(batches)))
        self.control = TrainerControl()
        self._progress = Progress()
        self.create_optimizer_and_scheduler(max_steps)
        self._wrap()
        if args.device.type == "cpu":
            choose_products(self.model, args.compute_dtype, args.world_size)
        set_dropout_seed(args.seed, args.process_index)
        self._warm_up()
        self._begin(resume_from_checkpoint, batches)
        self.state.max_steps, self.state.num_train_epochs = max_steps, epochs
        steps_before = self.state.global_step
        self._log_run_size(len(self.train_dataset), max_steps)

        self._call("on_train_begin")
        self.control.should_training_stop |= steps_before >= max_steps
        for epoch in range(self._progress.epoch, epochs):
            if self.control.should_training_stop:
                break
            self._train_epoch(epoch, batches)
        # DDP keeps a reference to the process group.
        self._wrapped = self.model
        self._check_finite()
        self._check_weights()
        if args.load_best_model_at_end:
            self._load_best()

        steps = self.state.global_step
        loss = self._mean_loss(self._progress.loss_total, max(steps, 1))
        samples = (steps - steps_before) * batches.step_size * args.gradient_accumulation_steps
        metrics = speed_metrics("train", start, samples)
        metrics["train_loss"] = loss
        self.log(dict(metrics))
        self._call("on_train_end")
        metrics.update(self._memory_metrics("train"))
        metrics["epoch"] = round(self.state.epoch or 0.0, 2)
        return TrainOutput(steps, loss, metrics)

    def _begin(self, checkpoint: str | None, batches: TrainingBatches) -> None:
        """Resumes from a checkpoint, or begins a new run; the launcher is told that it has begun.

        Raises:
            TrainingError: some processes have a checkpoint, and others have none.
            CheckpointError: it is damaged, or does not fit.
        """
        args = self.args
        if len({*gather_objects(bool(checkpoint), args.world_size)}) > 1:
            raise TrainingError(
                f"not every process sees a checkpoint in {args.output_dir} to resume from: "
                "machines have to share that folder"
            )
        self.checkpoints.outdated = outdated_checkpoints(args, is_new=checkpoint is None)
        if args.launch is not None and args.is_main_process:
            now = identities(args)
            args.launch.begin({name: now[name] for name in self.checkpoints.outdated})
        if checkpoint:
            self.state = self.checkpoints.resume(checkpoint, self._run_state(), len(batches))

    def _train_epoch(self, epoch: int, batches: TrainingBatches) -> None:
        args = self.args
        batches.epoch = epoch
        # Where a run resumes in the middle of its epoch: the batches that it has seen.
        batches.skip = 0 if args.ignore_data_skip else self._progress.batches
        loader = self._loader(self.train_dataset, batches)
        self._call("on_epoch_begin")
        for index, inputs in enumerate(loader, start=batches.skip):
            # A set shorter than an accumulation makes its one update at its end. Else, what is left
            # over at the end of an epoch goes into the next one's first update, as in the release.
            update = (index + 1) % args.gradient_accumulation_steps == 0 or (
                index + 1 == len(batches) <= args.gradient_accumulation_steps
            )
            self._progress.add(self.training_step(inputs, batches.weight(index), update))
            self._progress.batches = index + 1
            if update:
                self._update()
                self.state.epoch = epoch + (index + 1) / len(batches)
                self._call("on_step_end")
                self._log_evaluate_save()
            if self.control.should_training_stop:
                break
        if self._progress.batches == len(batches):
            self._progress.epoch, self._progress.batches = epoch + 1, 0
        self._call("on_epoch_end")
        self._log_evaluate_save()

    def training_step(self, inputs: dict[str, Any], weight: float, update: bool) -> Tensor:
        """Adds one batch's gradients; returns its part of the update's loss, detached.

        Args:
            inputs: the batch.
            weight: of this process's loss among the processes'; see `TrainingBatches.weight`.
            update: whether an update follows, for which gradients are summed over processes.
        """
        if not self.model.training:
            # After an evaluation. Not at every step: it walks over all modules.
            self._wrapped.train()
        with sync_gradients(self._wrapped, due=update):
            with self.precision.autocast():
                loss = self.compute_loss(self._wrapped, self._to_device(inputs))
            loss = loss * (weight / self.args.gradient_accumulation_steps)
            self.precision.backward(loss)
        watch.beat()
        return loss.detach()

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False
    ) -> Any:
        """The batch's mean loss; with `return_outputs`, also what the model returned.

        Raises:
            TrainingError: the model returned none, or nothing to smooth labels with.
        """
        if self._smooths(inputs):
            smoothing = self.args.label_smoothing_factor
            loss, outputs = smoothed_loss(model, inputs, self.label_names[0], smoothing)
        else:
            outputs = model(**inputs)
            loss = loss_of(outputs)
        return (loss, outputs) if return_outputs else loss

    def _smooths(self, inputs: dict[str, Any]) -> bool:
        return self.args.label_smoothing_factor > 0 and self.label_names[0] in inputs

    def _update(self) -> None:
        """Applies the gradients that have been added up."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self._progress.pending.are_due:
            self._check_finite()
        if self.precision.step(self.optimizer, parameters, self.args.max_grad_norm):
            self.lr_scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.state.global_step += 1
        self._progress.step = self.state.global_step

    def _check_finite(self) -> None:
        self._progress.read_losses()
        step = self._progress.first_bad_step
        if step >= 0:
            self._give_up(f"the loss is not finite at step {step + 1}")

    def _check_weights(self) -> None:
        """Checks weights before they are written: the next loss would show the damage too late."""
        trained = ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)
        if first_not_finite(trained) is not None:
            self._give_up(f"the weights are not finite after step {self.state.global_step}")

    def _give_up(self, why: str) -> NoReturn:
        kept = get_last_checkpoint(self.args.output_dir)
        last = f"the last checkpoint is {kept}" if kept else "no checkpoint was saved before"
        raise TrainingError(f"{why}; {last}; try a lower --learning_rate")

    def _mean_loss(self, total: float, steps: int) -> float:
        own = torch.tensor(total, dtype=torch.float64, device=self.args.device)
        summed = sum_over_processes(own, self.args.world_size)
        return summed.item() / self.args.world_size / steps

    def _log_evaluate_save(self) -> None:
        """Does what callbacks have asked for."""
        control = self.control
        if control.should_evaluate and self.args.load_best_model_at_end:
            # Whatever asked for the evaluation: the best model has to have a checkpoint.
            control.should_save = True
        if control.should_log and self.state.global_step > self._progress.logged_step:
            self._check_finite()
            steps = self.state.global_step - self._progress.logged_step
            logs = {
                "loss": round(self._mean_loss(self._progress.loss_since_log, steps), 4),
                "learning_rate": self.lr_scheduler.get_last_lr()[0],
            }
            self._progress.loss_since_log = 0.0
            self._progress.logged_step = self.state.global_step
            self.log(logs)
        metrics = None
        if control.should_evaluate or control.should_save:
            self._check_finite()
        if control.should_evaluate:
            metrics = self.evaluate()
        if control.should_save:
            self._check_weights()
            self._save_checkpoint(metrics)
            self._call("on_save")
        control.should_log = control.should_evaluate = control.should_save = False

    def log(self, logs: dict[str, float]) -> None:
        """Records `logs`, with the epoch and the step, and shows them."""
        epoch, step = self.state.epoch, self.state.global_step
        shown = dict(logs) if epoch is None else {**logs, "epoch": round(epoch, 2)}
        self.state.log_history.append(shown | {"step": step})
        self._call("on_log", logs=shown)

    def _call(self, event: str, **about: Any) -> None:
        self.callbacks.call(
            event,
            self.args,
            self.state,
            self.control,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            **about,
        )

    def _log_run_size(self, examples: int, max_steps: int) -> None:
        args = self.args
        update = args.train_batch_size * args.world_size * args.gradient_accumulation_steps
        parameters = list(self.model.parameters())
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        logger.info(
            f"training {trained:,} of {sum(p.numel() for p in parameters):,} parameters on "
            f"{examples:,} examples: {max_steps:,} updates of {update} examples, from update "
            f"{self.state.global_step:,} on"
        )

    # ---- checkpoints and results ----

    def save_model(self, output_dir: str | os.PathLike | None = None) -> None:
        """Writes the model, what was trained of it in files of its own, tokenizer and settings."""
        if self.args.is_main_process:
            folder = Path(output_dir or self.args.output_dir)
            self.checkpoints.save_model(folder, self.model, self.tokenizer)

    def save_state(self) -> None:
        """Writes ``trainer_state.json`` into the output folder."""
        if self.args.is_main_process:
            self.state.save_to_json(Path(self.args.output_dir, TRAINER_STATE_NAME))

    def log_metrics(self, split: str, metrics: dict[str, float]) -> None:
        """Logs metrics, one a line."""
        if self.args.is_main_process:
            log_metrics(split, metrics)

    def save_metrics(self, split: str, metrics: dict[str, float]) -> None:
        """Writes ``<split>_results.json``, and adds to ``all_results.json``."""
        if self.args.is_main_process:
            save_metrics(self.args.output_dir, split, metrics)

    def _save_checkpoint(self, metrics: dict[str, float] | None) -> None:
        """Writes ``checkpoint-<step>``, with the evaluation's metrics if there was one."""
        if metrics is not None:
            folder = self.checkpoints.folder(self.state.global_step)
            note_best(self.state, self.args, metrics, folder)
        self.checkpoints.write(self._run_state(), self.save_model)

    def _run_state(self) -> RunState:
        """What the run is resumed from."""
        return RunState(
            self.model,
            self.optimizer,
            self.lr_scheduler,
            self.precision,
            self._progress,
            self.state,
            len(self.train_dataset),
        )

    def _load_best(self) -> None:
        """Copies the best checkpoint's weights in; warns where there is none."""
        best = self.state.best_model_checkpoint
        if best is None:
            logger.warning(
                "--load_best_model_at_end: no evaluation found a best model in %s updates, so the "
                "run ends with its last weights; see --evaluation_strategy and --eval_steps",
                self.state.global_step,
            )
            return
        logger.info("ending with the best model, %s", best)
        self.checkpoints.load_weights(best, self.model)

    # ---- evaluation ----

    def evaluate(
        self, eval_dataset: Dataset | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The loss and the metrics on a set, each name with the prefix; logged.

        Without `compute_metrics`, predictions are not gathered.
        """
        dataset = eval_dataset if eval_dataset is not None else self.eval_dataset
        if dataset is None:
            raise ValueError("Trainer: evaluating needs an eval_dataset")
        loss_only = self.args.prediction_loss_only or self.compute_metrics is None
        metrics = self._evaluation_loop(dataset, metric_key_prefix, loss_only).metrics
        self.log(dict(metrics))
        metrics.update(self._memory_metrics(metric_key_prefix))
        self._call("on_evaluate", metrics=metrics)
        return metrics

    def predict(self, test_dataset: Dataset, metric_key_prefix: str = "eval") -> PredictionOutput:
        """The model's predictions on a set and, where it has labels, its metrics.

        Predictions are what the model returns besides the loss; see `EvalPrediction`.
        """
        loss_only = self.args.prediction_loss_only
        output = self._evaluation_loop(test_dataset, metric_key_prefix, loss_only, "predicting")
        output.metrics.update(self._memory_metrics(metric_key_prefix))
        self._call("on_predict", metrics=output.metrics)
        return output

    def _evaluation_loop(
        self, dataset: Dataset, prefix: str, loss_only: bool, what: str = "evaluating"
    ) -> PredictionOutput:
        args = self.args
        if len(dataset) == 0:
            raise ValueError("the set to evaluate is empty")
        start = time.time()
        share = EvaluationBatches(
            len(dataset),
            args.per_device_eval_batch_size,
            args.world_size,
            args.process_index,
            self._lengths_to_sort_by(dataset),
        )
        self.model.eval()
        in_half = all_in_half(self.model) if args.fp16_full_eval else nullcontext()
        predictions = Collector(args.eval_accumulation_steps)
        labels = Collector(args.eval_accumulation_steps)
        # The sum of the losses and how many examples they are of.
        losses = torch.zeros(2, dtype=torch.float64, device=args.device)
        with torch.no_grad(), in_half, self.precision.autocast():
            for indices, inputs in zip(share, self._loader(dataset, share), strict=True):
                loss, *rows = self.prediction_step(self._to_device(inputs), loss_only)
                if loss is not None:
                    one = torch.ones_like(loss, dtype=torch.float64)
                    losses += len(indices) * torch.stack([loss.double(), one])
                for collector, batch in zip((predictions, labels), rows, strict=True):
                    check_rows(batch, len(indices))
                    collector.add(batch)
                watch.beat()
                self._call("on_prediction_step", num_batches=len(share), what=what)
        total, count = sum_over_processes(losses, args.world_size).tolist()
        metrics = {} if count == 0 else {f"{prefix}_loss": total / count}
        gathered = [
            one_or_all(gather_in_order(share.indices, collector.arrays(), args.world_size))
            for collector in (predictions, labels)
        ]
        if self.compute_metrics and gathered[0] is not None and gathered[1] is not None:
            for name, value in self.compute_metrics(EvalPrediction(*gathered)).items():
                metrics[f"{prefix}_{name.removeprefix(f'{prefix}_')}"] = value
        metrics.update(speed_metrics(prefix, start, len(dataset)))
        return PredictionOutput(*gathered, metrics)

    def _lengths_to_sort_by(self, dataset: Dataset) -> list[int] | None:
        """The examples' lengths, where an evaluation makes batches of about one length; else None.

        That is where no number changes by more than rounding: each example has a loss of its own,
        and the collator does nothing but pad. A bank that has an adapter for each row needs the
        set's order.
        """
        if is_by_row() or not (only_pads(self.data_collator) and self._has_own_step()):
            return None
        return lengths_at_hand(dataset, {"label", "label_ids", *self.label_names})

    def prediction_step(
        self, inputs: dict[str, Any], prediction_loss_only: bool = False
    ) -> tuple[Tensor | None, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """A batch's loss (where it has all labels), predictions and labels.

        With `prediction_loss_only` there are no predictions and no labels, and a masked-language
        model computes the logits of its targets alone.
        """
        if any(inputs.get(name) is None for name in self.label_names):
            outputs = self.model(**inputs)
            predictions = () if prediction_loss_only else predictions_of(outputs, with_loss=False)
            return None, predictions, ()
        if prediction_loss_only:
            if "targets_only" in inspect.signature(self.model.forward).parameters:
                inputs = {**inputs, "targets_only": True}
            return self.compute_loss(self.model, inputs).detach(), (), ()
        loss, outputs = self.compute_loss(self.model, inputs, return_outputs=True)
        predictions = predictions_of(outputs, with_loss=not self._smooths(inputs))
        return loss.detach(), predictions, tuple(inputs[name] for name in self.label_names)

    def _memory_metrics(self, split: str) -> dict[str, int]:
        """Peak memory, where it is asked for. Not for the log: it differs from run to run."""
        return {} if self.args.skip_memory_metrics else memory_metrics(split, self.args.device)
