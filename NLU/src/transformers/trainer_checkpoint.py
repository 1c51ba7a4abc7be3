"""Writes checkpoints and resumes runs from them.

A resumed run is bit-exact (on a GPU, only with ``--use_deterministic_algorithms``).

A checkpoint is written into a temporary folder next to its own, which is renamed when complete. It
holds the model, the tokenizer and the settings, the states of the optimizer, the schedule, the
gradient scaler and the Trainer. For every process, it holds the position in the data, the gradients
not yet applied and the states of the random generators. With ``--save_lora_only``, the model is
saved as its trained parts alone. A module that is not from this package is saved as a state dict.
"""

import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from loralib.adapters.model_settings import dropout_of
from loralib.errors import CheckpointError
from loralib.io.atomic import replacing_folder
from loralib.io.structure import check_structure
from loralib.io.tensors import write_torch
from loralib.lora_layer import lora_layers
from loralib.training.agreement import check_same_weights
from loralib.training.cuda_graphs import goes_on_without
from loralib.training.determinism import rng_state, set_rng_state, warn_of_other_threads
from loralib.training.distributed import gather_objects, gather_on_first
from loralib.training.output import remove_folder
from loralib.training.precision import Precision
from loralib.training.resume import (
    check_same_run,
    like_rng_state,
    naming_damaged_file,
    read_state,
    restore,
)

from .adaptation_settings import ADAPTATION_SETTINGS, as_words
from .file_utils import CONFIG_NAME
from .modeling_utils import PreTrainedModel
from .tokenization_utils_base import PreTrainedTokenizerBase
from .trainer_best import find_best
from .trainer_callback import TrainerState
from .trainer_progress import Progress
from .trainer_utils import PREFIX_CHECKPOINT_DIR, list_checkpoints
from .trainer_weights import load_weights, save_weights
from .training_args import TrainingArguments
from .utils import logging

logger = logging.get_logger(__name__)

TRAINER_STATE_NAME = "trainer_state.json"
TRAINING_ARGS_NAME = "training_args.bin"
OPTIMIZER_NAME = "optimizer.pt"
SCHEDULER_NAME = "scheduler.pt"
SCALER_NAME = "scaler.pt"

# The temporary folder into which every checkpoint is written before it is renamed.
_UNFINISHED = f".{PREFIX_CHECKPOINT_DIR}.unfinished"
# Temporary folders that a killed run may leave behind; see `output_folder`.
LEFT_FOLDERS = tuple(
    f".{PREFIX_CHECKPOINT_DIR}{rest}" for rest in (".unfinished", ".replaced", "-*.deleted")
)

# The keys in the state of every PyTorch schedule. Others differ between versions of PyTorch.
_SCHEDULE_KEYS = ("base_lrs", "last_epoch", "_last_lr")

# Settings that a resumed run must keep. Its length and hardware may change.
_FIXED_FLAGS = (
    *("seed", "tf32", "use_deterministic_algorithms", "learning_rate", "lora_plus_ratio"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "adafactor", "max_grad_norm"),
    *("lr_scheduler_type", "warmup_steps", "warmup_ratio", "label_smoothing_factor"),
    *("group_by_length", "dataloader_drop_last", "fp16", "bf16", "torch_compile", "cuda_graphs"),
)
# Likewise, settings of the model. LoRA's targets are missing here: the same targets can be written
# in several ways, and different ones are noticed when the weights are loaded.
_OF_TARGETS = ("lora_targets", "lora_layers", "lora_positions")
_SAME_OF_A_MODEL = (
    *(name for name in ADAPTATION_SETTINGS if name not in _OF_TARGETS),
    *("cls_dropout", "reg_loss_wgt", "masking_prob"),
)
# Likewise, settings in the base's config.json that neither weights nor their shapes would show.
_SAME_OF_A_BASE = (
    *("hidden_act", "pooler_hidden_act", "conv_act", "conv_groups", "layer_norm_eps"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"),
    *("pooler_dropout", "num_attention_heads", "pad_token_id", "tie_word_embeddings"),
    *("position_biased_input", "relative_attention", "max_relative_positions"),
    *("position_buckets", "pos_att_type", "share_att_key", "norm_rel_ebd"),
)

NEW_RUN = "begin a new run with another --output_dir or --overwrite_output_dir"
_SAME_SETTING = f"give the same setting to resume it, or {NEW_RUN}"


@dataclass(frozen=True)
class RunState:
    """The parts of a run that a checkpoint saves and resuming restores.

    Args:
        model: the model that is trained.
        optimizer, lr_scheduler, precision: as the loop uses them.
        progress: this process's progress.
        trainer: the Trainer's state.
        examples: the number of examples in the training set.
        data: their `table_digest`.
        collator: the data collator's settings.
        lora: the `lora_settings_of` the model as the run began; callbacks may change them.
        generators: those of the loader, see `generators_of`.
    """

    model: nn.Module
    optimizer: Optimizer
    lr_scheduler: Any
    precision: Precision
    progress: Progress
    trainer: TrainerState
    examples: int
    data: str | None
    collator: Mapping[str, Any]
    lora: Mapping[str, float]
    generators: Collection[torch.Generator]


class Checkpoints:
    """Writes a run's checkpoints into its output folder, and resumes from them.

    Args:
        args: the run's settings.

    Attributes:
        outdated: names of checkpoints to delete with the next save; see `outdated_checkpoints`.
        earlier: a run's before this one, by `checkpoint_identities`, which ``save_total_limit``
            deletes first.
    """

    def __init__(self, args: TrainingArguments):
        self.args = args
        self.outdated: list[str] = []
        self.earlier: dict[str, int] = {}

    # ---- writing ----

    def save_model(
        self, folder: Path, model: nn.Module, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        """Writes the model, its trained parts as separate files, the tokenizer and the settings."""
        folder.mkdir(parents=True, exist_ok=True)
        save_weights(model, folder, self.args.save_lora_only)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        write_torch(folder / TRAINING_ARGS_NAME, self.args.to_dict())

    def folder(self, step: int) -> Path:
        """Returns the folder of a step's checkpoint."""
        return Path(self.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}")

    def write(self, run: RunState, save_model: Callable[[Path], None]) -> None:
        """Writes ``checkpoint-<step>`` atomically: a reader finds the complete folder or none.

        All processes have to call this.

        Args:
            run: the run's state.
            save_model: writes the model into a folder; `Trainer.save_model`.
        """
        folder = self.folder(run.trainer.global_step)
        own = self._process_state(run)
        process_states = gather_on_first(own, self.args.process_index, self.args.world_size)
        if self.args.is_main_process:
            unfinished = Path(self.args.output_dir, _UNFINISHED)
            with replacing_folder(folder, unfinished):
                for index, process_state in enumerate(process_states):
                    write_torch(unfinished / _process_state_name(index), process_state)
                save_model(unfinished)
                write_torch(unfinished / OPTIMIZER_NAME, run.optimizer.state_dict())
                write_torch(unfinished / SCHEDULER_NAME, run.lr_scheduler.state_dict())
                write_torch(unfinished / SCALER_NAME, run.precision.state_dict())
                run.trainer.save_to_json(unfinished / TRAINER_STATE_NAME)
            self._delete_old(folder, run.trainer.best_model_checkpoint)
        self.args.barrier()

    def _delete_old(self, newest: Path, best: str | None) -> None:
        """Deletes outdated checkpoints, and all but the best and newest ``save_total_limit``."""
        others = [Path(path) for path in list_checkpoints(self.args.output_dir)]
        others.remove(newest)
        old = [path for path in others if path.name in self.outdated]
        others = [path for path in others if path not in old]
        self.outdated = []
        if self.args.save_total_limit is not None:
            now = checkpoint_identities(self.args)
            others.sort(key=lambda path: now.get(path.name) != self.earlier.get(path.name))
            surplus = max(0, len(others) + 1 - self.args.save_total_limit)
            old += [path for path in others[:surplus] if path.name != Path(best or "").name]
        for path in old:
            logger.debug("deleting %s", path)
            # Renamed first: if the run is killed here, half a folder is not taken for a checkpoint.
            deleted = path.with_name(f".{path.name}.deleted")
            shutil.rmtree(deleted, ignore_errors=True)
            try:
                path.rename(deleted)
            except OSError as error:  # such as an earlier run's, which could not be removed either
                logger.warning("%s cannot be removed: %s", path, error.strerror)
        for deleted in newest.parent.glob(f".{PREFIX_CHECKPOINT_DIR}-*.deleted"):
            remove_folder(deleted)

    def _process_state(self, run: RunState) -> dict[str, Any]:
        """Returns this process's own state: place in the data, pending gradients, generators."""
        pending = {
            name: parameter.grad.cpu()
            for name, parameter in run.model.named_parameters()
            if parameter.grad is not None
        }
        begun = run.progress.epoch_rng
        return {
            "progress": run.progress.state_dict(),
            "pending_gradients": pending,
            "layout": self._layout(run),
            "rng": rng_state(self.args.device, run.generators),
            "threads": torch.get_num_threads(),
            **({} if begun is None else {"epoch_rng": begun}),
            **({} if run.data is None else {"rows": run.data}),
            "collator": dict(run.collator),
            **({"lora": dict(run.lora)} if run.lora else {}),
        }

    def _layout(self, run: RunState) -> dict[str, int]:
        """Returns the numbers on which the place in the data and the run's exact bits depend."""
        args = self.args
        return {
            "processes": args.world_size,
            "examples a step": args.train_batch_size * args.world_size,
            "steps an update": args.gradient_accumulation_steps,
            "examples": run.examples,
        }

    # ---- resuming ----

    def resume(self, folder: str, run: RunState, steps_per_epoch: int) -> TrainerState:
        """Restores the model and all parts of a run from a checkpoint.

        Args:
            folder: the checkpoint.
            run: the parts to restore. Its Trainer's state is not used.
            steps_per_epoch: the number of batches that each process gets per epoch.

        Returns:
            The Trainer's state.

        Raises:
            CheckpointError: a file is damaged, or the run has other settings.
        """
        path = Path(folder)
        with _naming_damaged_file(path / TRAINER_STATE_NAME):
            state = TrainerState.load_from_json(path / TRAINER_STATE_NAME)
        state.is_local_process_zero = self.args.is_local_main_process
        state.is_world_process_zero = self.args.is_main_process
        self._check_same_run(path, run.model)
        find_best(state, self.args, path.parent)
        self.load_weights(folder, run.model)
        for name, part, checked in (
            (OPTIMIZER_NAME, run.optimizer, ()),  # optimizers check their state themselves
            (SCHEDULER_NAME, run.lr_scheduler, _SCHEDULE_KEYS),
            (SCALER_NAME, run.precision, None),
        ):
            with _naming_damaged_file(path / name):
                device = self.args.device if part is run.optimizer else "cpu"
                restore(part, read_state(path / name, device=device), checked)
        self._resume_process(path, run, steps_per_epoch, state.global_step)
        return state

    def load_weights(self, folder: str, model: nn.Module) -> None:
        """Copies a checkpoint's weights into a model. All processes have to call this.

        Raises:
            CheckpointError: a file is damaged, or does not fit the model.
            TrainingError: the processes have read different weights.
        """
        path = Path(folder)
        load_weights(model, path, self.args.device, _way_out(path))
        check_same_weights(model, self.args.world_size)

    def had_graphs(self, folder: str) -> bool:
        """Returns whether the run that wrote a checkpoint has used CUDA graphs."""
        return bool(self._saved_arguments(Path(folder)).get("cuda_graphs"))

    def _saved_arguments(self, path: Path) -> dict[str, Any]:
        """Returns the arguments with which a checkpoint's run was trained."""
        with _naming_damaged_file(path / TRAINING_ARGS_NAME):
            return read_state(path / TRAINING_ARGS_NAME, {"seed": self.args.seed})

    def _check_same_run(self, path: Path, model: nn.Module) -> None:
        """Refuses to resume with another task or other settings."""
        before, now = self._saved_arguments(path), self.args.to_dict()
        if isinstance(model, PreTrainedModel):
            check_same_run(path, *_model_settings(model, path), _SAME_SETTING)
        graphs = [bool(each.get("cuda_graphs")) for each in (before, now)]
        if goes_on_without(path, *graphs, self.args.is_main_process):
            graphs[0] = False
        all_settings = [
            {**each, "cuda_graphs": used} for each, used in zip((before, now), graphs, strict=True)
        ]
        flags = (
            {f"--{name}": each[name] for name in _FIXED_FLAGS if name in each}
            for each in all_settings
        )
        check_same_run(path, *flags, _SAME_SETTING)

    def _resume_process(self, path: Path, run: RunState, steps_per_epoch: int, step: int) -> None:
        """Restores this process's place in the data, pending gradients and random generators.

        Args:
            path, run, steps_per_epoch: as in `resume`.
            step: the checkpoint's step.
        """
        first = self._read_process_state(path, 0, run, step)
        saved, layout = first["layout"], self._layout(run)
        self._check_data(path, run, first)
        self._check_layout(path, saved, layout)
        index = self.args.process_index
        if saved == layout:
            own = self._read_process_state(path, index, run, step)
        else:
            processes = range(saved["processes"])
            states = [self._read_process_state(path, n, run, step) for n in processes]
            own = _mean_state(states)
            # A process that the saved run did not have keeps the generators of a new run, so that
            # no two processes draw the same dropout masks.
            if index < len(states):
                own["rng"] = states[index]["rng"]
            batches = _rescaled(own["progress"]["batches"], saved, layout)
            own["progress"]["batches"] = min(batches, steps_per_epoch)
            if _changed_beside_processes(saved, layout):
                own["pending_gradients"] = {}  # of a partial update, which is dropped
        run.progress.load_state_dict(own["progress"])
        run.progress.epoch_rng = own.get("epoch_rng")
        for name, gradient in own["pending_gradients"].items():
            run.model.get_parameter(name).grad = gradient.to(self.args.device)
        if "rng" in own:
            set_rng_state(own["rng"], self.args.device, run.generators)
        warn_of_other_threads(own["threads"], self.args.device)

    def _check_data(self, path: Path, run: RunState, saved: dict[str, Any]) -> None:
        """Refuses to resume on other data, or with another data collator or LoRA.

        Args:
            path, run: as in `resume`.
            saved: a process's state in the checkpoint.
        """
        data = saved.get("rows"), run.data
        is_as_long = saved["layout"]["examples"] == run.examples
        if is_as_long and None not in data and data[0] != data[1]:
            raise CheckpointError(
                f"{path}: belongs to a run on other data with the same number of examples: to "
                f"resume it, give the same data and --max_seq_length, or {NEW_RUN}"
            )
        pairs = (saved["collator"], run.collator), (saved.get("lora", {}), run.lora)
        for before, now in pairs:
            check_same_run(path, before, {n: now.get(n) for n in before}, _SAME_SETTING)

    def _check_layout(self, path: Path, saved: dict[str, int], layout: dict[str, int]) -> None:
        """Refuses to resume if an epoch's steps have changed, and warns of other changes.

        With ``args.max_steps``, changed steps are a warning, too.

        Args:
            path: the checkpoint.
            saved, layout: its `_layout` and this run's.
        """
        changed = _changed_beside_processes(saved, layout)
        if changed and self.args.max_steps <= 0:
            raise CheckpointError(
                f"{path}: belongs to a run with {_listed(saved, changed)}, but this run has "
                f"{_listed(layout, changed)}, so an epoch would have different steps: give the "
                "same processes, batches and data, or give --max_steps"
            )
        if saved != layout:
            names = [name for name in layout if saved[name] != layout[name]]
            logger.warning(
                "%s belongs to a run with %s; with %s it resumes, but not bit-exactly",
                *(path, _listed(saved, names), _listed(layout, names)),
            )

    def _read_process_state(
        self, path: Path, index: int, run: RunState, step: int
    ) -> dict[str, Any]:
        """Reads and checks a process's own state at a step; see `_process_state`."""
        path = path / _process_state_name(index)
        with _naming_damaged_file(path):
            example = self._process_state(run)
            for name in ("rows", "lora"):  # a run on a stream saves no digest
                example.pop(name, None)
            own = read_state(path, {**example, "pending_gradients": {}, "rng": like_rng_state()})
            if own["progress"]["step"] != step:
                raise ValueError(
                    f"it is from step {own['progress']['step']}, the other files from step {step}"
                )
            if "epoch_rng" in own:
                check_structure(own["epoch_rng"], like_rng_state(), "'epoch_rng'")
            for name, gradient in own["pending_gradients"].items():
                check_structure(gradient, run.model.get_parameter(name).detach().cpu(), f"'{name}'")
            return own


def _model_settings(model: PreTrainedModel, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the settings that a resumed model must keep: the checkpoint's and this model's."""
    own = model.config.to_dict()
    with _naming_damaged_file(path / CONFIG_NAME):
        config = type(model.config).read_values(path)
        check_structure(config, {"id2label": {}})
        # Fills in the defaults of settings that are newer than the checkpoint.
        saved = type(model.config).from_dict(config).to_dict()
    columns = ["text_columns"] if saved["text_columns"] is not None else []
    return tuple(
        {
            f"model_type ({CONFIG_NAME})": source.get("model_type"),
            "task": source.get("finetuning_task"),
            **{name.replace("_", " "): filled[name] for name in columns},
            # JSON's keys are strings.
            "labels": {str(k): v for k, v in source["id2label"].items()},
            **{f"--{name}": as_words(filled[name]) for name in _SAME_OF_A_MODEL if name in own},
            **{f"{name} ({CONFIG_NAME})": filled[name] for name in _SAME_OF_A_BASE if name in own},
        }
        for source, filled in ((config, saved), (own, own))
    )


def lora_settings_of(model: nn.Module) -> dict[str, float]:
    """Returns the settings of LoRA's layers that their tensors do not show, by what they are.

    A model of this package has them in its configuration, see `_model_settings`.
    """
    settings: dict[str, float] = {}
    for name, layer in {} if isinstance(model, PreTrainedModel) else lora_layers(model).items():
        settings[f"the LoRA dropout of {name}"] = dropout_of(layer)
        if not isinstance(layer.scaling, nn.Parameter):
            settings[f"the LoRA scaling of {name}"] = float(layer.scaling)
    return settings


def _changed_beside_processes(saved: dict[str, int], layout: dict[str, int]) -> list[str]:
    """Returns what differs between two layouts, except for the number of processes.

    If a step has as many examples as before, an epoch has the same steps for any number of
    processes.
    """
    return [name for name in layout if saved[name] != layout[name] and name != "processes"]


def _rescaled(batches: int, saved: dict[str, int], layout: dict[str, int]) -> int:
    """Converts a number of batches in the saved layout to batches of the new one.

    If more than the number of processes has changed, the result is rounded down to whole updates.
    """
    done = batches * saved["examples a step"] // layout["examples a step"]
    if _changed_beside_processes(saved, layout):
        done -= done % layout["steps an update"]
    return done


def _listed(layout: dict[str, int], names: Iterable[str]) -> str:
    return ", ".join(f"{name} = {layout[name]}" for name in names)


def _mean_state(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the mean of the processes' states, for resuming with another number of processes."""
    progress = dict(states[0]["progress"])
    for counted in ("loss", "weight"):
        for name in (f"{counted}_since_log", f"{counted}_total"):
            progress[name] = sum(state["progress"][name] for state in states) / len(states)
    # A process has none for a parameter that its own batches did not use.
    each = [state["pending_gradients"] for state in states]
    pending = {n: sum(own.get(n, 0) for own in each) / len(each) for n in set().union(*each)}
    shared = {name: value for name, value in states[0].items() if name != "rng"}
    return {**shared, "progress": progress, "pending_gradients": pending}


def _process_state_name(index: int) -> str:
    return f"rng_state_{index}.pth"


def _way_out(folder: Path) -> str:
    return (
        f"move {folder} away to resume from an earlier checkpoint, or start over with "
        "--overwrite_output_dir"
    )


def _naming_damaged_file(path: Path) -> AbstractContextManager[None]:
    """Makes errors in reading a checkpoint's file name that file and what the user can do."""
    return naming_damaged_file(path, _way_out(path.parent))


# ---- checkpoints of an earlier run ----


def outdated_checkpoints(args: TrainingArguments, is_new: bool = True) -> list[str]:
    """Returns the names of an earlier run's checkpoints in the output folder, to be deleted.

    When a new run begins with --overwrite_output_dir, these are all checkpoints that exist. When a
    launcher restarts such a run, they are those among them that the run has not replaced yet. All
    processes have to call this, and use what the first one finds, because another machine may see
    a change later.
    """
    found, now = [], checkpoint_identities(args)
    if args.launch is not None and args.launch.is_restart:
        noted = args.launch.note.items()
        found = [name for name, identity in noted if now.get(name) == identity]
    elif args.overwrite_output_dir and is_new:
        found = [*now]
    return gather_objects(found, args.world_size)[0]


def checkpoint_identities(args: TrainingArguments) -> dict[str, int]:
    """Returns, for each checkpoint in the output folder, its modification time in nanoseconds.

    It tells a checkpoint from another one of the same name. Unlike inode numbers, it is the same on
    all machines that share the folder.
    """
    folders = list_checkpoints(args.output_dir)
    return {os.path.basename(path): os.stat(path).st_mtime_ns for path in folders}
