"""Checkpoints: what a run writes so that it can be resumed, and how it resumes.

It resumes bit-exact, on a GPU with ``--use_deterministic_algorithms``.

A checkpoint is written into a folder beside its own and renamed when it is whole. It holds the
model (with ``--save_lora_only``, the files of what is trained alone; of a module that is not this
package's, the state dict), tokenizer and settings, the optimizer, the schedule, the scaler, the
Trainer's state, and of every process its place in the data, the gradients not yet applied and the
state of its random generators.
"""

import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from loralib.adapters.adapter import Kind
from loralib.adapters.formats import format_of_name, read_adapter, what_forbids, write_adapter
from loralib.errors import CheckpointError, TrainingError, first_line
from loralib.io.atomic import atomic_write, sync_folder
from loralib.io.likeness import check_like
from loralib.io.tensors import write_torch
from loralib.training.distributed import gather_objects
from loralib.training.precision import Precision
from loralib.training.process import rng_state, set_rng_state

from .adapter_kinds import KINDS
from .file_utils import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from .modeling_utils import PreTrainedModel, read_weights
from .tokenization_utils_base import PreTrainedTokenizerBase
from .trainer_callback import TrainerState
from .trainer_pt_utils import TrainingBatches
from .trainer_utils import (
    PREFIX_CHECKPOINT_DIR,
    list_checkpoints,
)
from .training_args import TrainingArguments
from .utils import logging

logger = logging.get_logger(__name__)

TRAINER_STATE_NAME = "trainer_state.json"
TRAINING_ARGS_NAME = "training_args.bin"
OPTIMIZER_NAME = "optimizer.pt"
SCHEDULER_NAME = "scheduler.pt"
SCALER_NAME = "scaler.pt"

# What every schedule of PyTorch notes.
_OF_A_SCHEDULE = ("base_lrs", "last_epoch", "_last_lr")

# Metrics in bytes, which people read in a larger unit.
_IN_BYTES = ("_mem_cpu_peak", "_mem_gpu_peak")

# Settings that a run keeps when it is resumed. Its length may change, and what runs it.
_SAME_IN_A_RUN = (
    "seed",
    "tf32",
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "adafactor",
    "max_grad_norm",
    "lr_scheduler_type",
    "warmup_steps",
    "warmup_ratio",
    "label_smoothing_factor",
    "group_by_length",
    "fp16",
    "bf16",
)
# Likewise, of the model's settings; what shapes the model is seen from its weights.
_SAME_OF_A_MODEL = ("lora_dropout", "cls_dropout", "reg_loss_wgt", "masking_prob", "apply_bitfit")


class Progress:
    """Where the loop is in the data, and the losses that it has not logged yet.

    Attributes:
        epoch, batches: whole passes done, and batches done in the current one.
        step: updates done; logged_step: at the last log.
        loss_since_log, loss_total: sums, on the device.
        first_bad_step: the first step with a loss that is not finite, or -1; on the device.
    """

    def __init__(self, device: torch.device):
        self.epoch = self.batches = self.step = self.logged_step = 0
        self.loss_since_log = torch.zeros((), dtype=torch.float64, device=device)
        self.loss_total = torch.zeros((), dtype=torch.float64, device=device)
        self.first_bad_step = torch.full((), -1, device=device)

    def add(self, loss: Tensor) -> None:
        """Takes a batch's part of its update's loss."""
        bad = ~loss.isfinite() & (self.first_bad_step < 0)
        self.first_bad_step = torch.where(bad, self.step, self.first_bad_step)
        self.loss_since_log += loss
        self.loss_total += loss

    def state_dict(self) -> dict[str, Any]:
        """All of it, as plain values."""
        return {name: v.item() if isinstance(v, Tensor) else v for name, v in vars(self).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was."""
        for name, value in state.items():
            own = getattr(self, name)
            setattr(self, name, torch.full_like(own, value) if isinstance(own, Tensor) else value)


class TrainerCheckpoints:
    """The half of the Trainer that writes and reads; the attributes are the other half's."""

    args: TrainingArguments
    model: nn.Module
    tokenizer: PreTrainedTokenizerBase | None
    train_dataset: Dataset | None
    optimizer: Optimizer
    lr_scheduler: Any
    precision: Precision
    state: TrainerState
    _progress: Progress
    _outdated: list[str]  # names; see `outdated_checkpoints`

    # ---- writing ----

    def save_model(self, output_dir: str | os.PathLike | None = None) -> None:
        """Writes the model, what was trained of it in files of its own, tokenizer and settings."""
        if not self.args.is_main_process:
            return
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(self.model, PreTrainedModel):
            self._save_pretrained(self.model, folder)
        else:
            state = self.model.state_dict()
            on_cpu = {n: t.cpu() if isinstance(t, Tensor) else t for n, t in state.items()}
            write_torch(folder / WEIGHTS_NAME, on_cpu)
            _remove(folder, SAFE_WEIGHTS_NAME, *(name for kind in KINDS for name in kind.files))
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
        write_torch(folder / TRAINING_ARGS_NAME, self.args.to_dict())

    def _save_pretrained(self, model: PreTrainedModel, folder: Path) -> None:
        """Writes one of this package's models, and removes what an earlier run left beside it."""
        if self.args.save_lora_only:
            _remove(folder, WEIGHTS_NAME, SAFE_WEIGHTS_NAME)
            model.config.save_pretrained(folder)
        else:
            model.save_pretrained(folder)
        for kind in KINDS:
            if kind not in model.adapted_by:
                _remove(folder, *kind.files)
        for kind in model.adapted_by:
            adapter = model.adapter(kind)
            for name in reversed(kind.files):
                if what_forbids(adapter, format_of_name(folder / name)) is None:
                    write_adapter(folder / name, adapter)
                else:
                    _remove(folder, name)

    @property
    def _adapted_by(self) -> tuple[Kind, ...]:
        """As `PreTrainedModel.adapted_by`; nothing for any other module."""
        return self.model.adapted_by if isinstance(self.model, PreTrainedModel) else ()

    def save_state(self) -> None:
        """Writes ``trainer_state.json`` into the output folder."""
        if self.args.is_main_process:
            self.state.save_to_json(Path(self.args.output_dir, TRAINER_STATE_NAME))

    def _save_checkpoint(self, metrics: dict[str, float] | None) -> None:
        """Writes ``checkpoint-<step>``: into a folder beside, which is renamed when it is whole."""
        args = self.args
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        folder = Path(args.output_dir, name)
        # One name for all: what a run that was killed has left is cleared away by the next.
        unfinished = Path(args.output_dir, f".{PREFIX_CHECKPOINT_DIR}.unfinished")
        self._note_best(metrics, folder)
        own_states = gather_objects(self._own_state(), args.world_size)
        if args.is_main_process:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            for index, own_state in enumerate(own_states):
                write_torch(unfinished / _own_state_name(index), own_state)
            self.save_model(unfinished)
            write_torch(unfinished / OPTIMIZER_NAME, self.optimizer.state_dict())
            write_torch(unfinished / SCHEDULER_NAME, self.lr_scheduler.state_dict())
            write_torch(unfinished / SCALER_NAME, self.precision.state_dict())
            self.state.save_to_json(unfinished / TRAINER_STATE_NAME)
            replaced = unfinished.with_suffix(".replaced")
            if folder.exists():
                folder.rename(replaced)
            unfinished.rename(folder)
            sync_folder(folder.parent)
            shutil.rmtree(replaced, ignore_errors=True)
            self._delete_old_checkpoints(folder)
        args.barrier()

    def _note_best(self, metrics: dict[str, float] | None, folder: Path) -> None:
        name = self.args.metric_for_best_model
        if name is None or metrics is None:
            return
        name = f"eval_{name.removeprefix('eval_')}"
        if name not in metrics:
            known = ", ".join(key.removeprefix("eval_") for key in metrics)
            raise TrainingError(
                f"--metric_for_best_model: no evaluation gives {name}; known: {known}"
            )
        value, best = metrics[name], self.state.best_metric
        if math.isnan(value):
            logger.warning("%s is not a number at step %s", name, self.state.global_step)
            return
        if best is None or (value > best if self.args.greater_is_better else value < best):
            self.state.best_metric = value
            self.state.best_model_checkpoint = str(folder)

    def _load_best(self) -> None:
        """Copies the best checkpoint's weights in; says so where there is none."""
        best = self.state.best_model_checkpoint
        if best is None:
            logger.warning(
                "--load_best_model_at_end: no evaluation found a best model in %s updates, so the "
                "run ends with its last weights; see --evaluation_strategy and --eval_steps",
                self.state.global_step,
            )
            return
        logger.info("ending with the best model, %s", best)
        self._load_weights(best)

    def _delete_old_checkpoints(self, newest: Path) -> None:
        """Keeps the newest ``save_total_limit`` checkpoints of this run, and the best one."""
        others = [Path(path) for path in list_checkpoints(self.args.output_dir)]
        others.remove(newest)
        old = [path for path in others if path.name in self._outdated]
        others = [path for path in others if path not in old]
        self._outdated = []
        if self.args.save_total_limit is not None:
            best = Path(self.state.best_model_checkpoint or "").name
            surplus = max(0, len(others) + 1 - self.args.save_total_limit)
            old += [path for path in others[:surplus] if path.name != best]
        for path in old:
            logger.info("deleting %s", path)
            # Out of sight first: what is killed half-way is not to be taken for a checkpoint.
            deleted = path.with_name(f".{path.name}.deleted")
            shutil.rmtree(deleted, ignore_errors=True)
            path.rename(deleted)
        for deleted in newest.parent.glob(f".{PREFIX_CHECKPOINT_DIR}-*.deleted"):
            shutil.rmtree(deleted)

    def _own_state(self) -> dict[str, Any]:
        """What this process alone knows: its place in the data, gradients not applied, chance."""
        pending = {
            name: parameter.grad.cpu()
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }
        return {
            "progress": self._progress.state_dict(),
            "pending_gradients": pending,
            "layout": self._layout,
            "rng": rng_state(self.args.device),
        }

    @property
    def _layout(self) -> dict[str, int]:
        """What the place in the data depends on, and the bits that a run ends with."""
        args = self.args
        return {
            "processes": args.world_size,
            "examples a step": args.train_batch_size * args.world_size,
            "steps an update": args.gradient_accumulation_steps,
            "examples": len(self.train_dataset),
        }

    # ---- resuming ----

    def _resume(self, folder: str, batches: TrainingBatches) -> None:
        """Puts model, optimiser, schedule, data and chance where the checkpoint left them."""
        args, device = self.args, self.args.device
        logger.info("resuming from %s", folder)
        path = Path(folder)
        with _errors_of(path / TRAINER_STATE_NAME):
            self.state = TrainerState.load_from_json(path / TRAINER_STATE_NAME)
        self.state.is_world_process_zero = args.is_main_process
        self._check_same_run(path)
        best = self.state.best_model_checkpoint
        if best and not Path(best).is_dir():
            # The run's folder was moved.
            self.state.best_model_checkpoint = str(path.with_name(Path(best).name))
        self._load_weights(folder)
        with _errors_of(path / OPTIMIZER_NAME):
            self.optimizer.load_state_dict(_load(path / OPTIMIZER_NAME, device))
        with _errors_of(path / SCHEDULER_NAME):
            state, now = _load(path / SCHEDULER_NAME), self.lr_scheduler.state_dict()
            # What else a schedule notes differs between versions of PyTorch.
            check_like(state, {name: now[name] for name in _OF_A_SCHEDULE if name in now})
            self.lr_scheduler.load_state_dict(state)
        with _errors_of(path / SCALER_NAME):
            state = _load(path / SCALER_NAME)
            check_like(state, self.precision.state_dict())
            self.precision.load_state_dict(state)
        self._resume_own_state(path, batches)

    def _check_same_run(self, path: Path) -> None:
        """Refuses to go on with a run of another task or with other settings."""
        with _errors_of(path / TRAINING_ARGS_NAME):
            before, now = _load(path / TRAINING_ARGS_NAME), self.args.to_dict()
            check_like(before, {"seed": now["seed"]})
        pairs = [(f"--{name}", before.get(name), now[name]) for name in _SAME_IN_A_RUN]
        if isinstance(self.model, PreTrainedModel):
            pairs = [*self._model_settings(self.model, path), *pairs]
        for name, was, becomes in pairs:
            if was != becomes:
                raise CheckpointError(
                    f"{path}: is of a run with {name} {was}, not {becomes}: give the same setting "
                    "to go on with it, or begin anew with another --output_dir or "
                    "--overwrite_output_dir"
                )

    @staticmethod
    def _model_settings(model: PreTrainedModel, path: Path) -> list[tuple[str, Any, Any]]:
        """What a run keeps of its model: by name, the checkpoint's value and this model's."""
        config, own = type(model.config).get_config_dict(path), model.config.to_dict()
        # JSON has no integers for keys.
        labels = [{str(k): v for k, v in c["id2label"].items()} for c in (config, own)]
        task = ("task", config.get("finetuning_task"), own["finetuning_task"])
        # Filled in, because a checkpoint may be older than a setting.
        saved = type(model.config).from_dict(config).to_dict()
        settings = [(f"--{n}", saved[n], own[n]) for n in _SAME_OF_A_MODEL if n in own]
        return [task, ("labels", *labels), *settings]

    def _resume_own_state(self, path: Path, batches: TrainingBatches) -> None:
        own = self._load_own_state(path, 0)
        before, now = own["layout"], self._layout
        if before == now:
            own = self._load_own_state(path, self.args.process_index)
        else:
            processes = range(before["processes"])
            own = _mean_state([self._load_own_state(path, index) for index in processes])
        self._progress.load_state_dict(own["progress"])
        if before != now:
            differ = [name for name in now if before[name] != now[name]]
            logger.warning(
                "%s is of a run with %s; with %s it goes on, but not to the same bits",
                path,
                ", ".join(f"{name} = {before[name]}" for name in differ),
                ", ".join(f"{name} = {now[name]}" for name in differ),
            )
            done = self._progress.batches * before["examples a step"] // now["examples a step"]
            self._progress.batches = min(done, len(batches))
        for name, gradient in own["pending_gradients"].items():
            self.model.get_parameter(name).grad = gradient.to(self.args.device)
        set_rng_state(own["rng"], self.args.device)

    def _load_own_state(self, path: Path, process_index: int) -> dict[str, Any]:
        """What a process alone knew, checked; see `_own_state`."""
        path = path / _own_state_name(process_index)
        with _errors_of(path):
            own = _load(path)
            # A GPU's generator is told apart when it is set.
            example = {**self._own_state(), "pending_gradients": {}}
            check_like(own, {**example, "rng": rng_state(torch.device("cpu"))})
            for name, gradient in own["pending_gradients"].items():
                check_like(gradient, self.model.get_parameter(name).detach().cpu(), f"'{name}'")
            return own

    def _load_weights(self, folder: str) -> None:
        """Copies a checkpoint's weights in: the whole model's or, with nothing else, LoRA's.

        Or those of what else was trained.
        """
        path = Path(folder)
        kinds = self._adapted_by
        if kinds:
            # These files say rank, alpha and base as well, which the whole model's does not.
            self.model.load_adapters([read_adapter(path, kind) for kind in kinds])
            if not (path / WEIGHTS_NAME).is_file() and not (path / SAFE_WEIGHTS_NAME).is_file():
                return
        ours = isinstance(self.model, PreTrainedModel)
        weights = read_weights(folder) if ours else _load(path / WEIGHTS_NAME, self.args.device)
        try:
            self.model.load_state_dict(weights)
        except RuntimeError as error:
            lines = " ".join(str(error).split())
            raise CheckpointError(f"{folder}: does not fit the model: {lines}") from error

    # ---- results ----

    def log_metrics(self, split: str, metrics: dict[str, float]) -> None:
        """Logs metrics, one a line."""
        if self.args.is_main_process:
            logger.info("***** %s metrics *****", split)
            for name in sorted(metrics):
                value = metrics[name]
                shown = f"{value / 2**20:,.1f} MiB" if name.endswith(_IN_BYTES) else value
                logger.info("  %s = %s", name, shown)

    def save_metrics(self, split: str, metrics: dict[str, float]) -> None:
        """Writes ``<split>_results.json``, and adds to ``all_results.json``."""
        if not self.args.is_main_process:
            return
        folder = Path(self.args.output_dir)
        everything = folder / "all_results.json"
        # Training comes first in a run: what was there before is of another one.
        begins = split == "train" or not everything.is_file()
        so_far = {} if begins else _results(everything)
        for path, values in (
            (folder / f"{split}_results.json", metrics),
            (everything, {**so_far, **metrics}),
        ):
            with atomic_write(path) as temporary:
                temporary.write_text(json.dumps(values, indent=4, sort_keys=True) + "\n")


def _results(path: Path) -> dict[str, float]:
    """What ``all_results.json`` holds; nothing, and a warning, where it is damaged."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        check_like(results, {})
        return results
    except ValueError as error:
        logger.warning("%s: is damaged (%s), and written anew", path, error)
        return {}


def _remove(folder: Path, *names: str) -> None:
    """Removes files that an earlier run has left: they would be taken for this one's."""
    for name in names:
        (folder / name).unlink(missing_ok=True)


def outdated_checkpoints(args: TrainingArguments, is_new: bool = True) -> list[str]:
    """The names of an earlier run's checkpoints in the output folder, which this run replaces.

    Those that are there when a new run begins with --overwrite_output_dir; and when a launcher
    starts that again, those of them of which the place has not been taken.
    """
    if args.launch is not None and args.launch.is_restart:
        noted, now = args.launch.note.items(), identities(args)
        return [name for name, identity in noted if now.get(name) == identity]
    return [*identities(args)] if args.overwrite_output_dir and is_new else []


def identities(args: TrainingArguments) -> dict[str, list[int]]:
    """What tells each checkpoint in the output folder from another one of its name."""
    found = ((os.path.basename(path), os.stat(path)) for path in list_checkpoints(args.output_dir))
    return {name: [status.st_ino, status.st_mtime_ns] for name, status in found}


def _mean_state(states: list[dict[str, Any]]) -> dict[str, Any]:
    """The processes' own states as one: for a run that goes on with another number of them."""
    progress, pending = dict(states[0]["progress"]), dict(states[0]["pending_gradients"])
    for name in ("loss_since_log", "loss_total"):
        progress[name] = sum(state["progress"][name] for state in states) / len(states)
    for name in pending:
        pending[name] = sum(state["pending_gradients"][name] for state in states) / len(states)
    return {**states[0], "progress": progress, "pending_gradients": pending}


def _own_state_name(process_index: int) -> str:
    return f"rng_state_{process_index}.pth"


class _DamagedError(CheckpointError):
    """A file of a checkpoint cannot be used; the message has the way out."""


def _load(path: Path, device: torch.device | str = "cpu") -> Any:
    with _errors_of(path):
        return torch.load(path, map_location=device, weights_only=True)


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Makes whatever goes wrong in reading a file of a checkpoint name it, and the way out."""
    try:
        yield
    except Exception as error:  # a damaged pickle makes torch raise errors of any kind
        if isinstance(error, _DamagedError):
            raise
        reason = str(error.args[0]) if isinstance(error, KeyError) else first_line(error)
        reason = getattr(error, "strerror", None) or reason.removeprefix(f"{path}: ")
        raise _DamagedError(
            f"{path}: missing or damaged ({reason}); move {path.parent} away to resume from an "
            "earlier checkpoint, or start anew with --overwrite_output_dir"
        ) from error
