"""Reads gpt2_ft.py's command line, and checks its values."""

import argparse
import math
import os

from gpu import add_gpu_params
from lora_flags import add_lora_params, add_model_params, check_model_params
from loralib.io.command_line import ArgumentParser, check_bounds
from loralib.training.determinism import LARGEST_SEED
from loralib.training.estimate import SETTINGS, check_settings
from metrics_log import REPORTERS, check_report_to
from model import GPT2Config
from optimizer import add_optimizer_params
from script import add_log_level

# The bounds of flags that are numbers, as `check_bounds` takes them.
_BOUNDS: list[tuple[dict[str, float], tuple[str, ...]]] = [
    ({"least": 1}, ("train_batch_size", "valid_batch_size", "grad_acc", "seq_len")),
    ({"least": 1}, ("max_step", "max_epoch", "log_interval", "eval_interval", "save_interval")),
    ({"least": 0}, ("warmup_step",)),
    ({"least": 0, "most": LARGEST_SEED}, ("random_seed",)),
    ({"least": 0, "below": 1}, ("lora_dropout", "label_smooth", "adam_beta1", "adam_beta2")),
    ({"least": 0, "below": math.inf}, ("clip", "lr", "weight_decay", "adam_epislon")),
    ({"above": 0, "below": math.inf}, ("lora_plus_ratio",)),
]

# Flags of Transformers' scripts, and what is meant by them here; see `ArgumentParser`.
_OTHER_NAMES = {
    "apply_lora": "--lora_dim",
    "eval_strategy": "--eval_interval",
    "learning_rate": "--lr",
    "lr_scheduler_type": "--scheduler",
    "max_grad_norm": "--clip",
    "max_seq_length": "--seq_len",
    "model_name_or_path": "--init_checkpoint",
    "num_train_epochs": "--max_epoch",
    "optim": "the optimizer is AdamW",
    "output_dir": "--work_dir",
    "per_device_eval_batch_size": "--valid_batch_size",
    "per_device_train_batch_size": "--train_batch_size",
    "use_cpu": "an empty CUDA_VISIBLE_DEVICES in the environment hides the GPUs",
    "use_lora": "--lora_dim",
}


def parse_args(argv: list[str] | None = None, description: str | None = None) -> argparse.Namespace:
    """Reads the command line.

    Args:
        argv: the command line; that of the process if None.
        description: the description at the head of ``--help``.

    Raises:
        ValueError: a number is out of its range, or --report_to names what is not installed.
    """
    parser = ArgumentParser(description=description, other_names=_OTHER_NAMES)
    _add_training_params(parser)
    _add_output_params(parser)
    _add_estimate_params(parser)
    add_model_params(parser)
    add_lora_params(parser)
    add_optimizer_params(parser)
    add_gpu_params(parser)
    add_log_level(parser)
    _add_params_without_effect(parser)
    args = parser.parse_args(argv)
    args.lr_is_given = "lr" in parser.given
    for bounds, flags in _BOUNDS:
        for flag in flags:
            check_bounds(f"--{flag}", getattr(args, flag), **bounds)
    check_model_params(args)
    check_report_to(args.report_to)
    check_settings(args)
    return args


def _add_training_params(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("data and training").add_argument
    add("--train_data", required=True, help="examples as gpt2_encode.py writes them")
    add("--valid_data", required=True, help="the same, to evaluate on")
    add("--train_batch_size", type=int, default=8, help="examples per step, in each process")
    add("--valid_batch_size", type=int, default=4, help="examples evaluated at a time")
    add(
        "--grad_acc",
        type=int,
        default=1,
        help="steps whose gradients are accumulated into one update",
    )
    add("--clip", type=float, default=0.0, help="largest norm of an update's gradient; 0: no limit")
    add("--seq_len", type=int, default=512, help="longer examples are cut to this many tokens")
    add(
        "--obj",
        default="clm",
        choices=["jlm", "clm"],
        help="the loss: completions, or contexts too",
    )
    add("--lora_dropout", type=float, default=0.0, help="dropout on the input of LoRA's update")
    add("--label_smooth", type=float, default=0.0, help="probability spread over the vocabulary")
    add("--random_seed", type=int, default=10, help="seed of weights, data order and dropout")
    half = parser.add_mutually_exclusive_group().add_argument
    half("--fp16", action="store_true", help="half precision (GPU)")
    half("--bf16", action="store_true", help="bfloat16; frozen weights are held in it")
    add("--tf32", action="store_true", help="compute float32 in TensorFloat-32 (GPU)")
    add(
        "--torch_compile",
        action="store_true",
        help="compile each block with torch.compile: for GPUs; on CPUs it was slower; a resumed "
        "run then has the same results to rounding, not bit for bit",
    )
    add(
        "--cuda_graphs",
        action="store_true",
        default=None,
        help="record a step's work on a GPU once, and start it as a whole: 3 to 12 times as fast "
        "on an H100 (default: on an NVIDIA GPU with one process and without --torch_compile; a "
        "resumed run goes on as it began)",
    )
    add(
        "--no_cuda_graphs",
        dest="cuda_graphs",
        action="store_false",
        default=None,
        help="start each operation by itself: slower, with up to about a fifth less memory",
    )
    add(
        "--use_deterministic_algorithms",
        action="store_true",
        help="PyTorch's deterministic mode: the same bits on a GPU as well",
    )


def _add_output_params(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("output").add_argument
    add(
        "--work_dir",
        default=os.environ.get("PT_OUTPUT_DIR", "gpt2_model"),
        help="folder for all that is written; default: $PT_OUTPUT_DIR, or gpt2_model",
    )
    add("--log_interval", type=int, default=100, help="steps between logged losses")
    add("--eval_interval", type=int, default=2000, help="steps between evaluations")
    add("--save_interval", type=int, default=500, help="steps between checkpoints")
    add("--save_lora_only", action="store_true", help="write only the LoRA part at the end as well")
    add(
        "--report_to",
        nargs="+",
        default=["all"],
        choices=[*REPORTERS, "all", "none"],
        help="where figures go besides metrics.jsonl: tensorboard, to runs/ in --work_dir; plot, "
        "to learning_curves.png there at the end of the run; default: all that are installed "
        "(plot needs matplotlib)",
    )
    add(
        "--resume",
        action="store_true",
        help="resume the killed run in --work_dir; its length may change",
    )


def _add_estimate_params(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("before a run").add_argument
    add("--estimate", action="store_true", help=SETTINGS["estimate"])
    add("--estimate_devices", type=int, help=SETTINGS["estimate_devices"])
    add("--estimate_rate", metavar="GFLOPS", help=SETTINGS["estimate_rate"])
    add("--estimate_length", type=int, help=SETTINGS["estimate_length"])


def _add_params_without_effect(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("accepted as in the release, where they have no effect")
    group.add_argument("--roll_interval", type=int, default=-1)
    group.add_argument("--roll_lr", type=float, default=0.00001)
    group.add_argument("--roll_step", type=int, default=100)
    group.add_argument("--eval_epoch", type=int, default=1)


def check_fits(args: argparse.Namespace, config: GPT2Config) -> None:
    """Checks the flags that depend on the model.

    Args:
        args: the flags, with the model's rank filled in.
        config: the model's configuration.

    Raises:
        ValueError: a flag does not fit the model.
    """
    if args.seq_len > config.n_positions:
        raise ValueError(
            f"--seq_len {args.seq_len}: the model has {config.n_positions} positions; give at most "
            "that"
        )
    if args.lora_dim > 0 and args.init_checkpoint is None:
        raise ValueError("--lora_dim needs a trained base: give it as --init_checkpoint")
    if args.lora_dim == 0 and args.save_lora_only:
        raise ValueError("--save_lora_only needs LoRA: add --lora_dim")
    if args.lora_dim == 0 and args.lora_plus_ratio != 1:
        raise ValueError("--lora_plus_ratio needs LoRA: add --lora_dim")
