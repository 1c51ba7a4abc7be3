"""`TrainingArguments`: all settings of a training run, its device and its processes."""

import json
import math
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from datetime import datetime
from enum import Enum, EnumMeta
from functools import cached_property
from typing import Any, ClassVar, get_type_hints

import torch
import torch.distributed as dist

from loralib.io.command_line import check_bounds
from loralib.io.console import is_terminal
from loralib.training.determinism import LARGEST_SEED
from loralib.training.device import choose_device
from loralib.training.distributed import TIMEOUT, barrier, join
from loralib.training.launcher_env import is_launched, process_place, rank
from loralib.training.precision import check_precision, compute_dtype
from loralib.training.process import LOG_LEVELS
from loralib.training.reports import check_none_is_alone
from loralib.training.restarts import Launch

from .hf_argparser import check_ranges, flag
from .trainer_utils import IntervalStrategy, SchedulerType, is_less_better, is_main_process
from .utils import logging

logger = logging.get_logger(__name__)

# Flags of the release that are refused here, and what to do instead.
_NO_MEANING_HERE = {
    "tpu_num_cores": "there is no TPU support: leave it out",
    "tpu_metrics_debug": "there is no TPU support: leave it out",
    "debug": "it printed TPU metrics, and there is no TPU support: leave it out",
    "sharded_ddp": "LoRA's optimizer state is too small to shard: leave it out",
    "deepspeed": "LoRA's optimizer state is too small to shard: leave it out",
}


# Where logs can go, and what only transformers 4.4.2 supports.
_REPORTERS = ("tensorboard", "wandb", "plot")
_NOT_SUPPORTED = ("azure_ml", "comet_ml", "mlflow")

# Bounds of flags. Both refuse numbers that are not finite.
_NOT_NEGATIVE = {"least": 0, "below": math.inf}
_POSITIVE = {"above": 0, "below": math.inf}


class ParallelMode(Enum):
    """Whether a run uses one device, or several processes with a device each."""

    NOT_PARALLEL = "not_parallel"
    NOT_DISTRIBUTED = "not_distributed"  # several GPUs in one process, which is unsupported here
    DISTRIBUTED = "distributed"


def default_logdir() -> str:
    """Returns a folder for TensorBoard, named after the time and the machine."""
    return f"runs/{datetime.now():%b%d_%H-%M-%S}_{platform.node()}"


# The defaults of settings that are None. The order matters: greater_is_better depends on
# metric_for_best_model.
_DEFAULTS: dict[str, Callable[["TrainingArguments"], Any]] = {
    "do_eval": lambda args: args.evaluation_strategy is not IntervalStrategy.NO,
    "eval_steps": lambda args: args.logging_steps,
    "logging_dir": lambda args: default_logdir(),
    "disable_tqdm": lambda args: not is_terminal(sys.stderr),
    "run_name": lambda args: args.output_dir,
    "max_grad_norm": lambda args: 0.0,  # in Python, None does not clip either
    "metric_for_best_model": lambda args: "loss" if args.load_best_model_at_end else None,
    "greater_is_better": lambda args: (
        args.eval_metric_name and not is_less_better(args.eval_metric_name)
    ),
    "report_to": lambda args: ["all"],
}


_NO_UPLOADS = "nothing is uploaded: `hf upload REPOSITORY FOLDER` does that after the run"
_PRECISION = "the precision is set by --bf16 or --fp16"


@dataclass
class TrainingArguments:
    """The settings of a run, with the names of the release's flags.

    Raises:
        ValueError: a setting has the wrong type, is out of range, or has no meaning here; or two do
            not go together.
    """

    # Flags of today's Transformers, and what is meant by them here; see `ArgumentParser`.
    _other_names: ClassVar[dict[str, str]] = {
        "bf16_full_eval": "--bf16",
        "data_seed": "--seed",
        "dtype": _PRECISION,
        "eval_on_start": "nothing is evaluated before the first step; see --evaluation_strategy",
        "full_determinism": "--use_deterministic_algorithms",
        "hub_model_id": _NO_UPLOADS,
        "optim": "the optimizer is AdamW, or with --adafactor Adafactor",
        "push_to_hub": _NO_UPLOADS,
        "resume_from_checkpoint": "a stopped run resumes if you repeat its command without "
        "--overwrite_output_dir",
        "save_safetensors": "adapters are saved as .safetensors, full models as pytorch_model.bin",
        "torch_dtype": _PRECISION,
        "use_cpu": "--no_cuda",
    }

    output_dir: str = field(metadata={"help": "folder for checkpoints and results"})
    overwrite_output_dir: bool = flag(
        False, "start over in an output folder that is not empty, and do not resume from it"
    )
    do_train: bool = flag(False, "train")
    do_eval: bool | None = flag(None, "evaluate on the validation set")
    do_predict: bool = flag(False, "write predictions for the test set")
    evaluation_strategy: IntervalStrategy = flag("no", "when to evaluate during training")
    prediction_loss_only: bool = flag(False, "evaluations compute only the loss")
    per_device_train_batch_size: int = flag(8, "examples per step on each process", least=1)
    per_device_eval_batch_size: int = flag(
        8, "examples per batch on each process in evaluations", least=1
    )
    per_gpu_train_batch_size: int | None = flag(None, "old name: per_device_train_batch_size")
    per_gpu_eval_batch_size: int | None = flag(None, "old name: per_device_eval_batch_size")
    gradient_accumulation_steps: int = flag(1, "batches whose gradients make one step", least=1)
    eval_accumulation_steps: int | None = flag(
        None, "evaluation batches after which predictions move from the device to the CPU"
    )
    learning_rate: float = flag(5e-5, "peak learning rate of AdamW", **_NOT_NEGATIVE)
    lora_plus_ratio: float = flag(
        1.0,
        "LoRA+ (arXiv 2402.12354): LoRA's B is trained at this many times the learning rate; above "
        "1, such as 16, B learns faster than A",
        **_POSITIVE,
    )
    weight_decay: float = flag(0.0, "decay of all but biases and layer norms", **_NOT_NEGATIVE)
    adam_beta1: float = flag(0.9, "AdamW's beta1")
    adam_beta2: float = flag(0.999, "AdamW's beta2")
    adam_epsilon: float = flag(1e-8, "AdamW's epsilon")
    max_grad_norm: float = flag(
        1.0, "the gradient's norm is clipped to this; 0 does not clip", **_NOT_NEGATIVE
    )
    num_train_epochs: float = flag(3.0, "passes over the training set; may be a fraction")
    max_steps: int = flag(-1, "optimizer steps to make; if positive, it overrides num_train_epochs")
    lr_scheduler_type: SchedulerType = flag("linear", "shape of the learning rate over time")
    warmup_ratio: float = flag(
        0.0, "share of all steps in which the rate rises from 0", least=0, most=1
    )
    warmup_steps: int = flag(
        0, "the same in steps; if positive, it overrides warmup_ratio", least=0
    )
    logging_dir: str | None = flag(None, "TensorBoard's folder (default: runs/<time>_<host>)")
    logging_strategy: IntervalStrategy = flag("steps", "when to log")
    logging_first_step: bool = flag(False, "log the first step too")
    logging_steps: int = flag(500, "steps between two logs", least=1)
    save_strategy: IntervalStrategy = flag("steps", "when to save checkpoints")
    save_steps: int = flag(500, "steps between two checkpoints", least=1)
    save_total_limit: int | None = flag(None, "keep this many checkpoints, and the best", least=1)
    save_lora_only: bool = flag(
        False,
        "checkpoints hold what is trained (LoRA, adapters, biases) and the head instead of the "
        "whole model",
    )
    no_cuda: bool = flag(False, "stay on the CPU even where there is a GPU")
    seed: int = flag(
        42,
        "seed of new weights, of the data's order and of dropout",
        least=0,
        most=LARGEST_SEED,
    )
    fp16: bool = flag(False, "float16 on a GPU: frozen weights held in it, trained ones in float32")
    bf16: bool = flag(False, "the same in bfloat16, on a GPU or a CPU")
    fp16_opt_level: str = flag("O1", "for apex; ignored", choices=["O0", "O1", "O2", "O3"])
    fp16_backend: str = flag(
        "auto",
        "backend of fp16; apex, which no longer has amp, is refused",
        choices=["auto", "amp", "apex"],
    )
    fp16_full_eval: bool = flag(False, "evaluate with all weights in float16")
    local_rank: int = flag(-1, "this process's number on its machine; a launcher gives it")
    tpu_num_cores: int | None = flag(None, "refused: no TPU support")
    tpu_metrics_debug: bool = flag(False, "refused: no TPU support")
    debug: bool = flag(False, "refused: no TPU support")
    dataloader_drop_last: bool = flag(False, "leave out a last batch that is not full")
    eval_steps: int | None = flag(
        None, "steps between evaluations (default: logging_steps)", least=1
    )
    dataloader_num_workers: int = flag(
        0,
        "processes that prepare batches; where batches are random, as in masking, a run that is "
        "resumed within an epoch has other random numbers",
        least=0,
    )
    past_index: int = flag(-1, "refused unless negative: no model here returns past states")
    run_name: str | None = flag(None, "the run's name in Weights & Biases (default: output_dir)")
    disable_tqdm: bool | None = flag(
        None, "no progress bars (default: where standard error is not a terminal)"
    )
    remove_unused_columns: bool = flag(True, "drop the columns that the model does not take")
    label_names: list[str] | None = flag(
        None, "names of the forward arguments that are labels (default: labels)"
    )
    load_best_model_at_end: bool = flag(
        False, "end with the checkpoint that evaluated best; one is saved at every evaluation"
    )
    metric_for_best_model: str | None = flag(
        None, "the metric that decides which model is best (default: loss)"
    )
    greater_is_better: bool | None = flag(
        None,
        "whether a greater value is better (default: true, unless the metric's name ends in loss, "
        "error, mse, rmse, mae or perplexity, and has no neg_ in it)",
    )
    ignore_data_skip: bool = flag(
        False, "after a resume, start the epoch's data over: faster, but not the same run"
    )
    sharded_ddp: str = flag("", "refused: nothing to shard")
    deepspeed: str | None = flag(None, "refused: nothing to shard")
    label_smoothing_factor: float = flag(
        0.0, "share of each label spread over all labels", least=0, most=1
    )
    adafactor: bool = flag(False, "Adafactor instead of AdamW")
    group_by_length: bool = flag(False, "train on batches of texts of about the same length")
    report_to: list[str] | None = flag(
        None,
        "where to log: any of tensorboard, wandb and plot, or all, or none; plot writes "
        "learning_curves.png into output_dir at the end of a run (default: all that are "
        "installed; plot needs matplotlib)",
    )
    log_level: str | None = flag(
        None,
        "lowest level of messages to show; of several processes, only one shows those below "
        "warning (default: in scripts info, for a Trainer alone as set by transformers.logging)",
        choices=list(LOG_LEVELS),
    )
    ddp_find_unused_parameters: bool | None = flag(
        None, "let DDP look for parameters without a gradient (default: false)"
    )
    ddp_timeout: float = flag(
        TIMEOUT,
        "seconds after which a process that hangs, or does not join the others, ends the run",
        **_POSITIVE,
    )
    dataloader_pin_memory: bool = flag(True, "page-locked memory for batches on their way to a GPU")
    skip_memory_metrics: bool = flag(False, "leave the peak memory out of the results")
    cls_dropout: float | None = flag(
        None, "dropout before the classifier; for DeBERTa-v2 (default: the model's)"
    )
    gradient_checkpointing: bool = flag(
        False, "compute activations again in the backward pass: less memory, more time"
    )
    use_deterministic_algorithms: bool = flag(
        False, "PyTorch's deterministic mode: the same bits on the same machine, on a GPU as well"
    )
    tf32: bool = flag(
        False, "on a GPU, compute float32's products and convolutions in TensorFloat-32"
    )
    torch_compile: bool = flag(
        False,
        "compile each layer with torch.compile: for GPUs; on CPUs it was slower; a resumed run "
        "then has the same results to rounding, not bit for bit",
    )
    cuda_graphs: bool | None = flag(
        None,
        "record a step's work on a GPU once, and start it as a whole: 3 to 12 times as fast on "
        "an H100 (default: in scripts, on an NVIDIA GPU with one process, if the model and the "
        "other flags allow it; a resumed run goes on as it began)",
        has_no=True,
    )

    # The launcher's record of restarts. Set by scripts, which resume on their own.
    launch: Launch | None = field(default=None, init=False)
    # Whether the user has chosen the learning rate. Set by scripts, which know the flags given.
    rate_is_given: bool = field(default=True, init=False)
    # Whether a run uses CUDA graphs without being asked. Set by scripts, whose steps are known;
    # a program of one's own may have hooks, which graphs do not run.
    graphs_by_default: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.log_level is not None:
            if self.log_level not in LOG_LEVELS:
                known = ", ".join(LOG_LEVELS)
                raise ValueError(f"--log_level must be one of {known}, not {self.log_level}")
            level = logging.log_levels[self.log_level]
            # Set first, so that it also applies to the messages below.
            logging.set_verbosity(level if rank() == 0 else max(level, logging.WARNING))
        for name, advice in _NO_MEANING_HERE.items():
            if getattr(self, name):
                raise ValueError(f"--{name} has no meaning here: {advice}")
        if self.past_index >= 0:
            raise ValueError(
                "--past_index has no meaning here: no model of this package returns past states"
            )
        self.output_dir = os.path.expanduser(self.output_dir)
        self._read_texts()
        if isinstance(self.report_to, str):
            self.report_to = [self.report_to]
        self._fill_defaults()
        self.check()

    def _read_texts(self) -> None:
        """Replaces choices that are given by name; refuses other texts, and fractions of counts."""
        for name, hint in get_type_hints(type(self)).items():
            value = getattr(self, name)
            if isinstance(hint, EnumMeta):
                known = [choice.value for choice in hint]
                if value not in known:
                    listed = ", ".join(known)
                    raise ValueError(f"--{name} must be one of {listed}, not {value!r}")
                setattr(self, name, hint(value))
            elif hint in (bool, bool | None) and isinstance(value, str):
                raise ValueError(f"--{name} must be True or False, not the text '{value}'")
            elif hint in (int, float, int | None, float | None) and isinstance(value, str):
                raise ValueError(f"--{name} must be a number, not the text '{value}'")
            elif hint in (int, int | None) and isinstance(value, float) and value % 1:
                raise ValueError(f"--{name} must be a whole number, not {value}")

    def _fill_defaults(self) -> None:
        for split in ("train", "eval"):
            old = getattr(self, f"per_gpu_{split}_batch_size")
            if old is not None:
                logger.warning(
                    "--per_gpu_%s_batch_size is now --per_device_%s_batch_size", split, split
                )
                setattr(self, f"per_device_{split}_batch_size", old)
        for name, default in _DEFAULTS.items():
            if getattr(self, name) is None:
                setattr(self, name, default(self))
        # torchrun and torch.distributed.launch set it in the environment.
        if self.local_rank == -1 and is_launched():
            place = process_place()
            if place.world_size > 1 or "LOCAL_RANK" in os.environ:
                self.local_rank = place.local_rank

    def check(self) -> None:
        """Checks the settings; called again after a setting was changed.

        Raises:
            ValueError: a setting is out of range, or two do not go together.
        """
        # The seed's bounds apply to the command line only.
        check_ranges(type(self), {**vars(self), "seed": None})
        if self.max_steps == 0 and self.do_train:
            raise ValueError(
                "--max_steps must be at least 1, not 0: leave it out to train for "
                "--num_train_epochs; to train nothing, leave out --do_train"
            )
        if self.max_steps <= 0:
            check_bounds("--num_train_epochs", self.num_train_epochs, above=0, below=math.inf)
        if self.do_train and not self.adafactor:  # otherwise, Adam's settings have no effect
            self._check_adam()
        if self.fp16 and self.bf16:
            raise ValueError("--fp16 and --bf16 are two precisions: give one")
        if self.fp16 and self.fp16_backend == "apex":
            raise ValueError(
                "--fp16_backend apex needs apex's amp, which current releases no longer have: use "
                "--fp16_backend amp"
            )
        if self.load_best_model_at_end:
            self._save_at_evaluations()
        check_none_is_alone(self.report_to or ())
        unknown = set(self.report_to or ()) - {"all", "none", *_REPORTERS}
        if unknown:
            name = min(unknown)
            add = ": add a TrainerCallback for it" if name in _NOT_SUPPORTED else ""
            known = ", ".join(_REPORTERS)
            raise ValueError(f"--report_to accepts {known}, all, none; not {name}{add}")

    def _check_adam(self) -> None:
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"--{name} must lie in [0, 1), not {getattr(self, name)}")
        if not 0 <= self.adam_epsilon < math.inf:
            raise ValueError(f"--adam_epsilon must be a number from 0 on, not {self.adam_epsilon}")

    def _save_at_evaluations(self) -> None:
        """Makes every evaluation save a checkpoint, as in 4.4.2."""
        if self.evaluation_strategy is IntervalStrategy.NO:
            raise ValueError(
                "--load_best_model_at_end needs evaluations to compare: give --evaluation_strategy"
            )
        given = (self.save_strategy, self.save_steps)
        self.save_strategy = self.evaluation_strategy
        if self.save_strategy is IntervalStrategy.STEPS:
            self.save_steps = self.eval_steps
        if given != (self.save_strategy, self.save_steps):
            logger.info(
                "--load_best_model_at_end: a checkpoint is saved at every evaluation; "
                "--save_strategy and --save_steps are ignored"
            )

    # ---- device and processes ----

    @cached_property
    def device(self) -> torch.device:
        """This process's device. The first access joins the other processes of a launcher.

        Raises:
            ValueError: the device does not support the half precision that is asked for, or
                --local_rank is given without a launcher.
        """
        device = choose_device(max(self.local_rank, 0), self.no_cuda)
        check_precision(self.fp16, self.bf16, device)
        if self.local_rank != -1 and not dist.is_initialized():
            if "RANK" not in os.environ:
                raise ValueError(
                    f"--local_rank is {self.local_rank}, but no launcher has set RANK in the "
                    "environment: start several processes with torchrun or "
                    "torch.distributed.launch; for a single one leave --local_rank out"
                )
            join(device, self.ddp_timeout)
        return device

    @property
    def world_size(self) -> int:
        """The number of processes that train together."""
        return dist.get_world_size() if self.local_rank != -1 and self.device else 1

    @property
    def process_index(self) -> int:
        """This process's rank among all processes."""
        return dist.get_rank() if self.local_rank != -1 and self.device else 0

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first process, which writes the files and shows the messages."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is its machine's first process."""
        return is_main_process(self.local_rank)

    def barrier(self) -> None:
        """Waits until every process has called this."""
        barrier(self.world_size)

    @property
    def parallel_mode(self) -> ParallelMode:
        """DISTRIBUTED if a launcher has started the run (with any number of processes)."""
        one = self.local_rank == -1
        return ParallelMode.NOT_PARALLEL if one else ParallelMode.DISTRIBUTED

    @property
    def n_gpu(self) -> int:
        """The number of GPUs that this process uses: 0 or 1, as every GPU has its own process."""
        return int(self.device.type == "cuda")

    @property
    def place_model_on_device(self) -> bool:
        """Whether the Trainer moves the model to its device, which is always true."""
        return True

    @property
    def train_batch_size(self) -> int:
        """The number of examples per step on this process."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """The number of examples per batch on this process in evaluations."""
        return self.per_device_eval_batch_size

    def updates_per_epoch(self, batches: int) -> int:
        """Returns the number of updates in an epoch of `batches` batches on each process."""
        return max(batches // self.gradient_accumulation_steps, 1)

    def updates_of(self, batches: int) -> int:
        """Returns the updates of a run whose epochs have `batches` batches on each process."""
        if self.max_steps > 0:
            return self.max_steps
        return math.ceil(self.num_train_epochs * self.updates_per_epoch(batches))

    def batches_of(self, updates: int, batches: int) -> int:
        """Returns the batches of a run of `updates`, whose epochs have `batches` on each process.

        Those left over at the end of an epoch count, too, but not those after the last update.
        """
        epochs, more = divmod(updates - 1, self.updates_per_epoch(batches))
        return epochs * batches + (more + 1) * min(self.gradient_accumulation_steps, batches)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The precision in which matrices are multiplied."""
        return compute_dtype(self.fp16, self.bf16)

    @property
    def eval_metric_name(self) -> str | None:
        """`metric_for_best_model` with the prefix "eval_" of an evaluation's results, or None."""
        metric = self.metric_for_best_model
        return None if metric is None else f"eval_{metric.removeprefix('eval_')}"

    # ---- as plain values ----

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings as plain values, for JSON and weights-only torch files."""
        settings = {each.name for each in fields(self) if each.init}
        return {
            name: value.value if isinstance(value, Enum) else value
            for name, value in vars(self).items()
            if name in settings
        }

    def to_json_string(self) -> str:
        """Returns the settings as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_sanitized_dict(self) -> dict[str, bool | int | float | str]:
        """Returns the settings for a table of hyperparameters; other types become strings."""
        sizes = {"train_batch_size": self.train_batch_size, "eval_batch_size": self.eval_batch_size}
        settings = {**self.to_dict(), **sizes}
        plain = (bool, int, float, str)
        return {n: v if isinstance(v, plain) else str(v) for n, v in settings.items()}
