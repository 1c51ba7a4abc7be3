"""gpt2_ft.py's command line, and the checks of its values."""

import argparse
import math
import os

from checkpoints import add_lora_params, add_model_params
from gpu import add_gpu_params
from loralib.io.command_line import ArgumentParser
from loralib.training.estimate import rate_of
from metrics_log import REPORTERS, check_report_to
from model import GPT2Config
from optimizer import add_optimizer_params
from script import add_log_level

_MANY = 2**62
_RANGES = {
    **dict.fromkeys(("grad_acc", "log_interval", "eval_interval", "save_interval"), (1, _MANY)),
    **dict.fromkeys(("max_step", "max_epoch"), (1, _MANY)),
    **dict.fromkeys(("train_batch_size", "valid_batch_size", "seq_len"), (1, _MANY)),
    **dict.fromkeys(("estimate_devices", "estimate_length"), (1, _MANY)),
    **dict.fromkeys(("lora_dropout", "label_smooth"), (0, 1)),
    **dict.fromkeys(("clip", "lora_alpha"), (0, 1e30)),
    **dict.fromkeys(("lr", "weight_decay", "adam_epislon"), (0, 1e30)),
    **dict.fromkeys(("random_seed", "lora_dim", "warmup_step"), (0, _MANY)),
}


def parse_args(argv: list[str] | None = None, description: str | None = None) -> argparse.Namespace:
    """Reads the command line.

    Args:
        argv: the process's by default.
        description: the head of ``--help``.

    Raises:
        ValueError: a number is out of its range, or --report_to asks for what cannot be had.
    """
    parser = ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    for flag, (least, most) in _RANGES.items():
        value = getattr(args, flag)
        if value is not None and not least <= value <= most:
            bound = f"at most {most:g}" if value > most else f"at least {least:g}"
            raise ValueError(f"--{flag} has to be {bound}, but is {value}")
        if flag in ("lora_dropout", "label_smooth") and value == 1:
            raise ValueError(f"--{flag} 1 leaves nothing to learn from: give less")
    for flag in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(args, flag) < 1:
            value = getattr(args, flag)
            raise ValueError(f"--{flag} has to be at least 0 and below 1, but is {value}")
    check_report_to(args.report_to)
    _check_estimate(args)
    if not 0 < args.lora_plus_ratio < math.inf:
        raise ValueError(f"--lora_plus_ratio has to be above 0, but is {args.lora_plus_ratio}")
    return args


def _add_training_params(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("data and training").add_argument
    add("--train_data", required=True, help="examples as gpt2_encode.py writes them")
    add("--valid_data", required=True, help="the same, to evaluate on")
    add("--train_batch_size", type=int, default=8, help="examples a step, in each process")
    add("--valid_batch_size", type=int, default=4, help="examples evaluated at a time")
    add("--grad_acc", type=int, default=1, help="steps whose gradients make one update")
    add("--clip", type=float, default=0.0, help="largest norm of an update's gradient; 0: no limit")
    add("--seq_len", type=int, default=512, help="longer examples are cut to this many tokens")
    add("--obj", default="clm", choices=["jlm", "clm"], help="learn completions, or contexts too")
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
        help="compute each block as one graph, by torch.compile: for GPUs; on CPUs it was slower; "
        "a resumed run then ends with the same numbers to rounding, not to the bit",
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
    add("--save_lora_only", action="store_true", help="write LoRA's part alone at the end, too")
    add(
        "--report_to",
        nargs="+",
        default=["all"],
        choices=[*REPORTERS, "all", "none"],
        help="where figures go besides metrics.jsonl: tensorboard, to runs/ in --work_dir; plot, "
        "to learning_curves.png there at the end of the run; default: all that are installed "
        "(plot needs matplotlib)",
    )
    add("--resume", action="store_true", help="resume the run in --work_dir that was killed")


def _add_estimate_params(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("before a run").add_argument
    add(
        "--estimate",
        action="store_true",
        help="print how many parameters are trained, the memory of a device, arithmetic and time, "
        "and exit without training; needs no weights",
    )
    add(
        "--estimate_devices",
        type=int,
        help="devices that the run is to have; default: those that it has here",
    )
    add(
        "--estimate_rate",
        metavar="GFLOPS",
        help="operations a second of a device, in GFLOP/s; default: measured, in steps of two "
        "blocks here",
    )
    add(
        "--estimate_length",
        type=int,
        help="tokens of each example, instead of those of the data; default, where the data is not "
        "there: --seq_len",
    )


def _add_params_without_effect(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("accepted as in the release, where they have no effect")
    group.add_argument("--roll_interval", type=int, default=-1)
    group.add_argument("--roll_lr", type=float, default=0.00001)
    group.add_argument("--roll_step", type=int, default=100)
    group.add_argument("--eval_epoch", type=int, default=1)


def _check_estimate(args: argparse.Namespace) -> None:
    """Checks the flags of --estimate; a rate becomes a number."""
    for flag in ("estimate_devices", "estimate_rate", "estimate_length"):
        if getattr(args, flag) is not None and not args.estimate:
            raise ValueError(f"--{flag} needs --estimate")
    if args.estimate_rate is not None:
        try:
            args.estimate_rate = rate_of(args.estimate_rate)
        except ValueError as error:
            raise ValueError(f"--estimate_rate {error}") from error


def check_fits(args: argparse.Namespace, config: GPT2Config) -> None:
    """Checks the flags that depend on the model.

    Args:
        args: the flags, with the rank that the model has.
        config: the model's.

    Raises:
        ValueError: one does not fit.
    """
    if args.seq_len > config.n_positions:
        raise ValueError(f"--seq_len {args.seq_len}: the model has {config.n_positions} positions")
    if args.lora_dim > 0 and args.init_checkpoint is None:
        raise ValueError("--lora_dim needs a trained base: give it as --init_checkpoint")
    if args.lora_dim == 0 and args.save_lora_only:
        raise ValueError("--save_lora_only needs LoRA: add --lora_dim")
    if args.lora_dim == 0 and args.lora_plus_ratio != 1:
        raise ValueError("--lora_plus_ratio needs LoRA: add --lora_dim")
