"""`Trainer`: the training loop, evaluation, checkpoints and resuming.

A step is: batch → loss → gradients → (at the end of an accumulation) clip, update, schedule.
Logging, progress bars and the decision when to evaluate are in trainer_callback.py. What is checked
before training is in trainer_checks.py and, among processes, trainer_agreement.py. Checkpoints and
resuming are in trainer_checkpoint.py, their weights in trainer_weights.py, the choice of the best
one in trainer_best.py, the loop's position and losses in trainer_progress.py, the order of the data
in trainer_data.py, and what this project's two training loops share is in loralib.training. The
Trainer inherits its other methods from trainer_evaluation.py (results: trainer_results.py),
trainer_loaders.py, trainer_search.py (hyperparameter search) and trainer_records.py (logs and
metrics).
"""

import inspect
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from loralib.errors import CheckpointError, TrainingError
from loralib.io.tensors import first_not_finite
from loralib.text import in_short
from loralib.training import watch
from loralib.training.compiled import compile_layers
from loralib.training.cuda_graphs import FillingCollator, GraphedStep, are_default, uses_graphs
from loralib.training.ddp import share_buffers, sync_gradients, warm_up_ddp, wrap_ddp
from loralib.training.determinism import set_dropout_seed, set_seed, set_up_device
from loralib.training.optimizer import decay_groups
from loralib.training.precision import Precision, cast_frozen, check_precision
from loralib.training.product_choices import choose_products, frozen_weights
from loralib.training.resume import check_not_beyond, warn_of_length
from loralib.utils import with_lora_plus

from .data.data_collator import DataCollatorWithPadding, PackedCollator, default_data_collator
from .data.table_digest import LastDigest
from .integrations import reporting_callbacks
from .modeling_heads import next_labels
from .modeling_losses import IGNORED_LABEL, IGNORED_POSITION
from .modeling_utils import PreTrainedModel
from .optimization import Adafactor, AdamW, get_scheduler
from .tokenization_utils_base import PreTrainedTokenizerBase
from .trainer_agreement import about_examples, agreed_checkpoint, check_same_settings
from .trainer_best import note_best
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
    NEW_RUN,
    OPTIMIZER_NAME,
    Checkpoints,
    RunState,
    checkpoint_identities,
    lora_settings_of,
    outdated_checkpoints,
)
from .trainer_checks import (
    check_base_frozen,
    check_evaluation_set,
    check_hooks,
    check_model,
    check_optimizer,
    check_same_precision,
    check_training_set,
    untrained,
    why_no_graphs,
)
from .trainer_data import (
    EpochBatches,
    collator_settings,
    generators_of,
    label_names_of,
    length_of,
    overrides,
)
from .trainer_evaluation import TrainerEvaluation
from .trainer_progress import Progress
from .trainer_pt_utils import LabelSmoother, has_targets, loss_of
from .trainer_records import TrainerRecords
from .trainer_search import TrainerSearch
from .trainer_utils import (
    DivergedError,
    EvalPrediction,
    IntervalStrategy,
    TrainOutput,
    get_last_checkpoint,
    speed_metrics,
)
from .training_args import TrainingArguments
from .utils import logging

DEFAULT_CALLBACKS = [DefaultFlowCallback]
DEFAULT_PROGRESS_CALLBACK = ProgressCallback

# What the labels of a row of filler tokens are. Scores have no such value; see classification_loss.
_IGNORED = {
    "labels": IGNORED_LABEL,
    "start_positions": IGNORED_POSITION,
    "end_positions": IGNORED_POSITION,
}

logger = logging.get_logger(__name__)


class Trainer(TrainerEvaluation, TrainerSearch, TrainerRecords):
    """Trains and evaluates a model.

    Args:
        model: the model to train. Parameters with ``requires_grad=False`` stay as they are. Any
            module works whose forward takes the batch as keyword arguments, labels included, and
            returns a dict or a dataclass with "loss", or a tuple that begins with the loss.
        args: the settings; by default those of ``TrainingArguments("tmp_trainer")``.
        data_collator: makes a batch from a list of examples. By default it pads to the longest with
            `tokenizer`; without a tokenizer it does not pad.
        train_dataset: a dataset of dicts. One that can only be iterated over and has no length
            needs ``args.max_steps``.
        eval_dataset: a dataset with a length.
        tokenizer: pads batches, and is saved with the model.
        model_init: makes a new model for each call of `train`, in place of `model`. It is called
            without arguments, or with the trial of a search (None outside a search).
        compute_metrics: takes an `EvalPrediction` and returns the metrics by name.
        callbacks: added to the default ones.
        optimizers: an optimizer and a schedule to use instead of those that `args` ask for.

    Attributes:
        model_wrapped: the model as the loop calls it, wrapped in DDP if there are several
            processes.
        state: see `TrainerState`.
        control: see `TrainerControl`.
        callback_handler: calls the callbacks.
        label_smoother: smooths labels, if `args` ask for it.

    Raises:
        RuntimeError: there is neither a model nor a `model_init`, or `optimizers` are given
            together with a `model_init`.
        ValueError: a setting does not fit the model or the data.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], dict[str, Tensor]] | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, float]] | None = None,
        callbacks: list[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[Optimizer | None, Any] = (None, None),
    ):
        if args is None:
            args = TrainingArguments("tmp_trainer")
            logger.info("no TrainingArguments were given: writing into %s", args.output_dir)
        set_seed(args.seed)
        self.args = args
        self._follow_settings()
        self.tokenizer = tokenizer
        default_collator = (
            DataCollatorWithPadding(tokenizer) if tokenizer else default_data_collator
        )
        self.data_collator = data_collator or default_collator
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.compute_metrics = compute_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self._made: dict[str, Any] = {}  # the optimizer and schedule made by `train`
        self._train_digest, self._eval_digest = LastDigest(), LastDigest()
        self._lora: Mapping[str, float] = {}  # LoRA's settings as training began
        self._weight = 1.0  # weight of this process's loss in the mean over all processes
        self.state = self._new_state()
        self.control = TrainerControl()
        self.checkpoints = Checkpoints(args)
        check_hooks(type(self))
        if train_dataset is not None:
            check_training_set(train_dataset, args)
        if eval_dataset is not None:
            check_evaluation_set(eval_dataset)
        self.model_init = model_init
        self.callback_handler = CallbackHandler(
            [*DEFAULT_CALLBACKS, *reporting_callbacks(args), *(callbacks or [])],
            tokenizer=tokenizer,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
        )
        self.add_callback(PrinterCallback if args.disable_tqdm else DEFAULT_PROGRESS_CALLBACK)
        self._use_model(self._first_model(model))
        if args.is_main_process:
            # Created here, so that a folder without write access fails before the training.
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        self._call("on_init_end")

    def _follow_settings(self) -> None:
        """Makes what depends on the settings: PyTorch's state, label smoothing and precision.

        Raises:
            ValueError: the device does not support the precision.
        """
        args = self.args
        set_up_device(tf32=args.tf32, deterministic=args.use_deterministic_algorithms)
        smoothing = args.label_smoothing_factor
        if smoothing != self._smoothing:  # else it stays, as a subclass may have set its own
            self.label_smoother = LabelSmoother(smoothing) if smoothing else None
            self._smoothing = smoothing
        check_precision(args.fp16, args.bf16, args.device)
        self.precision = Precision(args.compute_dtype, args.device.type)

    def _new_state(self) -> TrainerState:
        return TrainerState(
            is_local_process_zero=self.is_local_process_zero(),
            is_world_process_zero=self.is_world_process_zero(),
        )

    # ---- the model ----

    def _first_model(self, model: nn.Module | None) -> nn.Module:
        if self.model_init is None:
            if model is None:
                raise RuntimeError("Trainer: needs a model or a model_init")
            return model
        if self.optimizer is not None or self.lr_scheduler is not None:
            raise RuntimeError(
                "Trainer: optimizers belong to one model, but model_init makes several: leave one "
                "of them out, or override create_optimizer_and_scheduler"
            )
        if model is not None:
            warnings.warn(
                "Trainer: got both model and model_init; train uses model_init's",
                FutureWarning,
                stacklevel=3,
            )
            return model
        return self.call_model_init()

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Returns a new model from `model_init`.

        Args:
            trial: passed to `model_init` if that takes exactly one argument or requires one.

        Raises:
            RuntimeError: `model_init` needs more than one argument, or returns None.
        """
        arguments = inspect.signature(self.model_init).parameters.values()
        needed = sum(argument.default is argument.empty for argument in arguments)
        if needed > 1:
            raise RuntimeError("model_init must take no argument, or only the trial")
        takes_trial = needed == 1 or len(arguments) == 1
        model = self.model_init(trial) if takes_trial else self.model_init()
        if model is None:
            raise RuntimeError("model_init returned None, not a model")
        return model

    def _use_model(self, model: nn.Module) -> None:
        """Makes `model` the one to train: checks it, casts frozen weights, moves it to the device.

        Raises:
            ValueError: the model does not support a setting.
        """
        args = self.args
        self.label_names = args.label_names
        if self.label_names is None:
            self.label_names = label_names_of(model)
        check_model(model, args, self.label_names)
        if args.gradient_checkpointing:
            model.config.gradient_checkpointing = True
        if args.compute_dtype is not torch.float32 and isinstance(model, PreTrainedModel):
            # Layers of other models may not support low-precision weights, so autocast casts those.
            # Done before the model is moved, so that the device never holds its frozen weights in
            # float32.
            cast_frozen(model, args.compute_dtype, model.tensors_read)
        held = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
        # Tensors without memory (see trainer_estimate.py) fail in `to`, even to their own device.
        self.model = model if held == {args.device} else model.to(args.device)
        if args.torch_compile:
            compile_layers(self.model.base_model.encoder.layer, args.device)
        self.model_wrapped: nn.Module = self.model
        self._has_products = False
        self._resumed_from = 0  # the step that the last training resumed from, or 0
        self._examples = 0  # how many it has trained on since then, over all processes

    _smoothing = 0.0  # the setting that `label_smoother` follows
    _graphs: GraphedStep | None = None  # while the model is trained with CUDA graphs
    use_apex, deepspeed = False, None  # training steps written for transformers 4.4.2 read them

    @property
    def use_amp(self) -> bool:
        """Whether the run trains in float16, with PyTorch's autocast and `scaler`."""
        return self.precision.dtype is torch.float16

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """The gradient scaler, which scales losses in float16 and does nothing otherwise."""
        return self.precision.scaler

    # ---- callbacks ----

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Adds a callback, given as an object or a class."""
        self.callback_handler.add_callback(callback)

    def pop_callback(
        self, callback: TrainerCallback | type[TrainerCallback]
    ) -> TrainerCallback | None:
        """Removes and returns a callback, or the first one of a class; None if there is none."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Removes a callback, or the first one of a class."""
        self.callback_handler.remove_callback(callback)

    def _call(self, event: str, *about: Any) -> None:
        """Calls the callbacks' method for an event, and stores the control that they return."""
        handler = self.callback_handler
        handler.model = self.model  # which may have been replaced
        handler.optimizer, handler.lr_scheduler = self.optimizer, self.lr_scheduler
        self.control = getattr(handler, event)(self.args, self.state, self.control, *about)

    # ---- processes ----

    def is_local_process_zero(self) -> bool:
        """Returns whether this is its machine's first process."""
        return self.args.is_local_main_process

    def is_world_process_zero(self) -> bool:
        """Returns whether this is the first process of all, which writes the files."""
        return self.args.is_main_process

    # ---- optimizer ----

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Makes the optimizer and the schedule, unless they were given."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps)

    def create_optimizer(self) -> None:
        """Makes the optimizer, unless it was given.

        Raises:
            ValueError: the model has no trainable parameters.
        """
        if self.optimizer is not None:
            return
        args = self.args
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

    def create_scheduler(self, num_training_steps: int) -> None:
        """Makes the schedule over `num_training_steps` updates, unless it was given."""
        if self.lr_scheduler is not None:
            return
        warmup = self.args.warmup_steps
        if warmup <= 0:
            warmup = math.ceil(num_training_steps * self.args.warmup_ratio)
        self.lr_scheduler = get_scheduler(
            self.args.lr_scheduler_type, self.optimizer, warmup, num_training_steps
        )

    def _prepare_optimizer(self, max_steps: int) -> None:
        """Makes an optimizer and a schedule for this run, unless the user gave them.

        Raises:
            ValueError: the user's optimizer would train nothing.
        """
        for name, made in self._made.items():
            if getattr(self, name) is made:  # from an earlier run, whose schedule has ended
                setattr(self, name, None)
        own = [n for n in ("optimizer", "lr_scheduler") if getattr(self, n) is None]
        self.create_optimizer_and_scheduler(max_steps)
        check_optimizer(self.optimizer, self.model)
        check_base_frozen(self.model, self.args)
        self._untrained = untrained(self.optimizer, self.model)  # on purpose
        self._made = {name: getattr(self, name) for name in own}

    def _wrap(self) -> None:
        """Sets `model_wrapped`: the model, wrapped in DDP if there are several processes."""
        args = self.args
        self.model_wrapped = wrap_ddp(
            self.model,
            args.device,
            args.world_size,
            args.cuda_graphs,
            find_unused_parameters=bool(args.ddp_find_unused_parameters),
        )

    def _warm_up(self, passes: EpochBatches) -> None:
        """Runs one batch so that DDP lays out its gradient buckets (see `warm_up_ddp`)."""

        def backward() -> None:
            inputs = self._prepare_inputs(passes.example())
            with self.precision.autocast():
                self.compute_loss(self.model_wrapped, inputs).backward()

        warm_up_ddp(self.model_wrapped, backward)

    # ---- training ----

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        **kwargs: Any,
    ) -> TrainOutput:
        """Trains the model, or resumes its training from a checkpoint.

        Args:
            resume_from_checkpoint: the checkpoint's folder, or True for the last one in
                ``args.output_dir``.
            trial: the trial of a search, see `hyperparameter_search`.
            kwargs: "model_path", the old name of `resume_from_checkpoint`.

        Returns:
            The number of updates, the mean loss of their batches, and the run's metrics.

        Raises:
            ValueError: there is no training set, no set for the evaluations that are asked for, no
                such checkpoint, or nothing to train; or a setting does not fit.
            TrainingError: the loss is not finite; the metric of the best model is missing; or the
                processes of a run differ.
            CheckpointError: the checkpoint to resume from is damaged or does not fit.
        """
        args = self.args
        start = time.time()
        checkpoint = self._checkpoint_to_resume(kwargs.pop("model_path", resume_from_checkpoint))
        if kwargs:
            raise TypeError(f"train() got an unexpected argument: {', '.join(kwargs)}")
        self._forget_last_run(trial)
        if args.evaluation_strategy is not IntervalStrategy.NO and self._cannot_evaluate():
            raise ValueError(
                "--evaluation_strategy needs a set to evaluate on: add --do_eval, or give the "
                "Trainer an eval_dataset"
            )
        asked, args.cuda_graphs = args.cuda_graphs, self._uses_graphs(checkpoint)
        try:
            return self._train(checkpoint, start)
        finally:
            args.cuda_graphs = asked

    def _train(self, checkpoint: str | None, start: float) -> TrainOutput:
        """Trains after the checks of `train`, from a time on that `time.time` has returned."""
        args = self.args
        passes = self._training_passes()
        max_steps, epochs = self._updates_and_epochs(passes.length)
        if args.world_size > 1:
            self._check_same_training(passes.examples, max_steps)
        self._prepare_optimizer(max_steps)
        self._wrap()
        # A part may be in another mode than the whole, such as an encoder from `from_pretrained`.
        self.model_wrapped.train()
        if args.device.type == "cpu":
            choose_products(frozen_weights(self.model), args.compute_dtype, args.world_size)
            self._has_products = True
        set_dropout_seed(args.seed, args.process_index)
        self._warm_up(passes)
        self._lora = lora_settings_of(self.model)
        checkpoint = self._begin(checkpoint, passes)
        if checkpoint:
            check_not_beyond(checkpoint, self.state.global_step, max_steps, NEW_RUN)
            warn_of_length(checkpoint, self.state.max_steps, max_steps)
        self.state.max_steps, self.state.num_train_epochs = max_steps, epochs
        self.state.epoch = self.state.epoch or 0.0
        self._resumed_from, self._examples = self.state.global_step, 0
        self._log_beginning(passes, max_steps, checkpoint)

        self._call("on_train_begin")
        if self._resumed_from >= max_steps:
            self.control.should_training_stop = True
        # The last step's checkpoint was written before the end of its epoch was processed.
        if self.control.should_training_stop and not self._progress.has_ended:
            self._end_epoch(self._progress.epoch, passes)
        self._graphs = self._new_graphs()
        try:
            for epoch in range(self._progress.epoch, epochs):
                if self.control.should_training_stop:
                    break
                self._train_epoch(epoch, passes)
        finally:
            self._graphs = None
        self._end_training()
        return self._summary(start)

    def _forget_last_run(self, trial: Any) -> None:
        """Resets the state for a new run and, with a `model_init`, makes a new model."""
        self.state, self.control = self._new_state(), TrainerControl()
        self._progress = Progress()
        self._set_up_trial(trial)
        is_replaced = self.checkpoints.args is not self.args
        if is_replaced and self.model_init is None:
            check_same_precision(self.model, self.checkpoints.args, self.args)
        self.checkpoints.args = self.args
        if is_replaced or self.model_init is not None:  # a trial may have changed them as well
            self._follow_settings()
        if self.model_init is not None:
            set_seed(self.args.seed)
            self._use_model(self.call_model_init(trial))
            self.optimizer = self.lr_scheduler = None
        elif is_replaced:
            self._use_model(self.model)
        # Those left over from a run that was interrupted, or whose last batches made no update.
        self.model.zero_grad(set_to_none=True)
        self._name_trial()

    def _uses_graphs(self, checkpoint: str | None) -> bool:
        """Returns whether the run uses CUDA graphs; see `uses_graphs`."""
        args = self.args
        before = self.checkpoints.had_graphs(checkpoint) if checkpoint else None
        reason = why_no_graphs(self.model, args)
        is_script = args.graphs_by_default and self._has_own_step()
        by_default = is_script and are_default(args.world_size)
        return uses_graphs(args.cuda_graphs, before, reason, by_default)

    def _new_graphs(self) -> GraphedStep | None:
        """Returns the CUDA graphs of a run; None if it has none."""
        if not self.args.cuda_graphs:
            return None
        if not self._has_own_step():
            logger.warning(
                "%s has its own training step or loss, which is run without CUDA graphs",
                type(self).__name__,
            )
            return None
        return GraphedStep(self._loss_and_gradients, self.model)

    def _end_training(self) -> None:
        """Checks the loss and the weights, and loads the best model if `args` ask for it."""
        share_buffers(self.model_wrapped)
        # The DDP wrapper is dropped, because it keeps a reference to the process group.
        self.model_wrapped = self.model
        self._check_finite()
        self._check_weights()
        if self.args.load_best_model_at_end:
            self._load_best()

    def _summary(self, start: float) -> TrainOutput:
        """Logs and returns the run's result; its speed counts only what follows its resuming."""
        progress, steps = self._progress, self.state.global_step
        loss = self._mean_loss(progress.loss_total, progress.weight_total, steps)
        metrics = speed_metrics("train", start, self._examples)
        self.store_flos()
        metrics["total_flos"] = self.state.total_flos
        metrics["train_loss"] = loss
        self.log(metrics)
        self._call("on_train_end")
        metrics.update(self._memory_metrics("train"))
        metrics["epoch"] = round(self.state.epoch, 2)
        return TrainOutput(steps, loss, metrics)

    def _checkpoint_to_resume(self, given: str | bool | None) -> str | None:
        """Returns the folder to resume from, or None.

        Raises:
            ValueError: the last checkpoint is asked for, and there is none; there is no such
                folder; or it is a run's, which holds checkpoints.
        """
        if not given:
            return None
        if given is True:
            found = get_last_checkpoint(self.args.output_dir)
            if found is None:
                raise ValueError(f"{self.args.output_dir} has no checkpoint to resume from")
            return found
        if not os.path.isdir(given):
            raise ValueError(
                f"{given} is not a folder, so there is nothing to resume from: give a "
                "checkpoint's path, or True for the last one in output_dir"
            )
        last = get_last_checkpoint(given)
        if last and not Path(given, OPTIMIZER_NAME).is_file():
            raise ValueError(
                f"{given} is a run's folder, not a checkpoint: give one of those in it, such as "
                f"{last}"
            )
        return given

    def _check_same_training(self, examples: int, updates: int) -> None:
        """Checks that all processes train alike (see `check_same_settings`)."""
        digest = self._train_digest.of(self.train_dataset)
        compared = about_examples("to train on", examples, digest)
        if self.args.evaluation_strategy is not IntervalStrategy.NO:
            compared |= self._about_evaluation(self.eval_dataset)
        compared |= {"updates to make": updates, **collator_settings(self.data_collator)}
        check_same_settings(self.args, self.model, compared)

    def _updates_and_epochs(self, length: int | None) -> tuple[int, int]:
        """Returns how many updates and epochs a run makes whose epochs have `length` batches.

        Raises:
            ValueError: the length is unknown, and ``args.max_steps`` is not set.
        """
        args = self.args
        if length is not None:
            updates = args.updates_of(length)
            return updates, math.ceil(updates / args.updates_per_epoch(length))
        if args.max_steps <= 0:
            raise ValueError("the training set has no length: give --max_steps")
        return args.max_steps, sys.maxsize

    def _cannot_evaluate(self) -> bool:
        return self.eval_dataset is None and not overrides(
            self, Trainer, ("evaluate", "get_eval_dataloader")
        )

    def _training_passes(self) -> EpochBatches:
        """Returns the run's batches.

        The Trainer's own loader also marks where their tokens are and, for CUDA graphs, brings them
        to sizes that recur.
        """
        loader = self.callback_handler.train_dataloader = self.get_train_dataloader()
        if not overrides(self, Trainer, ("get_train_dataloader",)):
            collator = self._packing(self.data_collator)
            if self.args.cuda_graphs and isinstance(collator, PackedCollator):
                longest = self.model.config.longest_sequence
                collator = FillingCollator(collator, _IGNORED, longest)
            loader.collate_fn = collator
        args = self.args
        return EpochBatches(loader, args.seed, args.device, args.train_batch_size * args.world_size)

    def _begin(self, checkpoint: str | None, passes: EpochBatches) -> str | None:
        """Resumes from a checkpoint or begins a new run, and tells the launcher that it has begun.

        Returns:
            The checkpoint that all processes have resumed from, or None.

        Raises:
            TrainingError: the processes have different checkpoints, or some have none.
            CheckpointError: the checkpoint is damaged or does not fit.
        """
        args = self.args
        checkpoint = agreed_checkpoint(args, checkpoint)
        self.checkpoints.outdated = outdated_checkpoints(args, is_new=checkpoint is None)
        self.checkpoints.earlier = {} if checkpoint else checkpoint_identities(args)
        if args.launch is not None and args.is_main_process:
            now = checkpoint_identities(args)
            args.launch.begin({name: now[name] for name in self.checkpoints.outdated})
        if checkpoint:
            steps = passes.length or sys.maxsize
            self.state = self.checkpoints.resume(checkpoint, self._run_state(), steps)
        return checkpoint

    def _train_epoch(self, epoch: int, passes: EpochBatches) -> None:
        args, progress = self.args, self._progress
        # The batches that a run resumed in the middle of an epoch has already seen.
        skip, to_update = progress.batches, args.gradient_accumulation_steps
        # An epoch that has made its last update is not begun again.
        if args.ignore_data_skip and skip + to_update <= (passes.length or math.inf):
            skip = 0
        before = self.state.global_step
        # The batches of an epoch. If unknown, the whole run counts as one epoch.
        length = passes.length or self.state.max_steps * args.gradient_accumulation_steps
        self._call("on_epoch_begin")
        progress.has_ended = False
        batches, progress.epoch_rng = passes.begin(epoch, skip, before, progress.epoch_rng)
        if progress.is_stopped:  # by the step of the checkpoint that the run has resumed from
            batches = iter(())
        for index, inputs in enumerate(batches, start=skip):
            # An epoch no longer than one accumulation makes one update, at its end. In longer ones,
            # the gradients left over at the end are added to the next epoch's first update, as in
            # the release.
            update = (index + 1) % args.gradient_accumulation_steps == 0 or (
                index + 1 == passes.length and passes.length <= args.gradient_accumulation_steps
            )
            if index % args.gradient_accumulation_steps == 0:
                self._call("on_step_begin")
            self._add_gradients(inputs, passes.weight(index), update)
            self._examples += passes.size(index)
            progress.batches = index + 1
            if update:
                self._update()
                self.state.epoch = epoch + (index + 1) / length
                self._call("on_step_end")
                self._log_evaluate_save()
            else:
                self._call("on_substep_end")
            if self.control.should_training_stop or self.control.should_epoch_stop:
                break
        else:
            if skip == 0 and self.state.global_step == before and not progress.is_stopped:
                passes.check_one_update(progress.batches)
            progress.epoch, progress.batches = epoch + 1, 0
        self._end_epoch(epoch, passes)

    def _end_epoch(self, epoch: int, passes: EpochBatches) -> None:
        """Does the work due at the end of an epoch, complete or not."""
        progress = self._progress
        is_stopped = self.control.should_epoch_stop or progress.is_stopped
        if is_stopped or progress.batches == passes.length:
            progress.epoch, progress.batches = epoch + 1, 0
        progress.has_ended, progress.is_stopped = True, False
        self._call("on_epoch_end")
        self._warn_of_untrained()
        self._log_evaluate_save()

    def _warn_of_untrained(self) -> None:
        """Warns of parameters that a callback has unfrozen, replaced or added: nothing trains them.

        4.4.2's optimizer also has what is frozen when a run begins.
        """
        names = untrained(self.optimizer, self.model) - self._untrained
        if names:
            self._untrained |= names
            logger.warning(
                "the optimizer lacks %s, which became trainable after it was made: make them "
                "trainable before train(), and freeze them in a callback's on_train_begin",
                in_short(sorted(names), at_most=4),
            )

    def _add_gradients(self, inputs: dict[str, Any], weight: float, update: bool) -> None:
        """Adds a batch's gradients, and averages them over the processes if an update follows."""
        self._weight = weight
        has_target = has_targets(inputs)  # checked here, as a subclass may remove the labels
        with sync_gradients(self.model_wrapped, due=update):
            loss = self.training_step(self.model_wrapped, inputs)
        watch.beat()
        part = weight / self.args.gradient_accumulation_steps
        self._progress.add(loss, part, has_target)
        self._progress.flos += self.floating_point_ops(inputs)

    def training_step(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Adds one batch's gradients, and returns its share of the update's loss, detached.

        Args:
            model: `model_wrapped`.
            inputs: the batch.
        """
        if not self.model.training:
            # Needed after an evaluation only. Not called at every step, as it visits all modules.
            model.train()
        weight = self._weight / self.args.gradient_accumulation_steps
        if self._graphs is not None:
            return self._graphs(inputs, weight, model)
        return self._loss_and_gradients(inputs, weight, model)

    def _loss_and_gradients(
        self, inputs: Mapping[str, Any], weight: float, model: nn.Module
    ) -> Tensor:
        """Adds the gradients of `weight` times a batch's loss, and returns that, detached."""
        inputs = self._prepare_inputs(inputs)  # a graph's are copied to the device before
        with self.precision.autocast():
            loss = self.compute_loss(model, inputs)
        loss = loss * weight
        self.precision.backward(loss)
        return loss.detach()

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False
    ) -> Any:
        """Returns the batch's mean loss and, with `return_outputs`, also the model's outputs.

        Raises:
            TrainingError: the model returned no loss, or label smoothing lacks labels or logits.
        """
        if self._smooths(inputs):
            name = self.label_names[0]
            outputs = model(**{key: value for key, value in inputs.items() if key != name})
            loss = self.label_smoother(outputs, self._targets(inputs[name], inputs))
        else:
            outputs = model(**inputs)
            loss = loss_of(outputs, inputs)
        return (loss, outputs) if return_outputs else loss

    def _smooths(self, inputs: dict[str, Any]) -> bool:
        if self.label_smoother is None:
            return False
        name = self.label_names[0]
        if name not in inputs and self.model.training:
            raise TrainingError(f"a batch has no {name} for --label_smoothing_factor")
        return name in inputs

    def _targets(self, labels: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """Returns a batch's labels as its logits are compared with them.

        This package's heads do not count padding, and a causal language model's labels are shifted.
        """
        if not isinstance(self.model, PreTrainedModel):
            return labels
        mask = inputs.get("attention_mask")
        has_mask = mask is not None and mask.shape == labels.shape
        real = mask != 0 if has_mask else torch.ones_like(labels, dtype=torch.bool)
        if self.model.head == "causal_lm":
            labels = next_labels(labels, real)
        return labels.masked_fill(~real, IGNORED_LABEL)

    def _has_own_step(self) -> bool:
        """Returns whether batches are processed by this class's own methods, none overridden."""
        steps = ("training_step", "compute_loss", "prediction_step", "_prepare_inputs")
        return not overrides(self, Trainer, steps)

    def _update(self) -> None:
        """Applies the accumulated gradients."""
        if self._progress.pending.are_due:
            self._check_finite()
        if self.precision.step(self.optimizer, self.args.max_grad_norm):
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
        """Checks the weights before they are written; the next loss would show damage too late."""
        trained = ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)
        if first_not_finite(trained) is not None:
            self._give_up(f"the weights are not finite after step {self.state.global_step}")

    def _give_up(self, why: str) -> NoReturn:
        kept = get_last_checkpoint(self.args.output_dir)
        last = f"the last checkpoint is {kept}" if kept else "no checkpoint was saved before"
        raise DivergedError(f"{why}; {last}; try a lower --learning_rate")

    def _log_evaluate_save(self) -> None:
        """Logs, evaluates and saves if the callbacks have asked for it."""
        if self.control.should_evaluate and self.args.load_best_model_at_end:
            # Every evaluation may find the best model, which needs a checkpoint.
            self.control.should_save = True
        progress, step = self._progress, self.state.global_step
        if self.control.should_log and step > progress.logged_step:
            self._check_finite()
            steps = step - progress.logged_step
            loss = self._mean_loss(progress.loss_since_log, progress.weight_since_log, steps)
            progress.note_log(step)
            self.log({"loss": round(loss, 4), "learning_rate": self.lr_scheduler.get_last_lr()[0]})
        metrics = None
        if self.control.should_evaluate or self.control.should_save:
            self._check_finite()
        if self.control.should_evaluate:
            metrics = self.evaluate()
            self._report_to_hp_search(metrics)
        if self.control.should_save:
            progress.is_stopped = self.control.should_epoch_stop and not progress.has_ended
            self._check_weights()
            self._save_checkpoint(self.model_wrapped, self._trial, metrics=metrics)
            self._call("on_save")

    # ---- checkpoints and results ----

    def save_model(self, output_dir: str | os.PathLike | None = None) -> None:
        """Writes the model, its trained parts as separate files, the tokenizer and the settings."""
        if self.args.is_main_process:
            folder = Path(output_dir or self.args.output_dir)
            self.checkpoints.save_model(folder, self.model, self.tokenizer)

    def _save_checkpoint(
        self, model: nn.Module, trial: Any, metrics: dict[str, float] | None = None
    ) -> None:
        """Writes ``checkpoint-<step>``, with the evaluation's metrics if there was one.

        Subclasses override this with 4.4.2's arguments; `model` and `trial` are not needed here.
        """
        if metrics is not None:
            folder = self.checkpoints.folder(self.state.global_step)
            note_best(self.state, self.args, metrics, folder)
        self.store_flos()
        self.checkpoints.write(self._run_state(), self.save_model)

    def _run_state(self) -> RunState:
        """Returns the state that a checkpoint saves and resuming restores."""
        return RunState(
            self.model,
            self.optimizer,
            self.lr_scheduler,
            self.precision,
            self._progress,
            self.state,
            length_of(self.train_dataset) or 0,
            self._train_digest.of(self.train_dataset),
            collator_settings(self.data_collator),
            self._lora,
            generators_of(self.callback_handler.train_dataloader),
        )

    def _load_best(self) -> None:
        """Loads the best checkpoint's weights into the model, or warns if there is none."""
        best = self.state.best_model_checkpoint
        if best is None:
            logger.warning(
                "--load_best_model_at_end: no evaluation found a best model in %s steps, so the "
                "run ends with its last weights; see --evaluation_strategy and --eval_steps",
                self.state.global_step,
            )
            return
        if not os.path.isdir(best):
            raise CheckpointError(
                f"--load_best_model_at_end: the best model, {best}, is gone: repeat the command, "
                "which takes the best of those that remain"
            )
        logger.info("ending with the best model, %s", best)
        self.checkpoints.load_weights(best, self.model)
