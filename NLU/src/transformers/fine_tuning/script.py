"""Runs a task's script from the command line to the results, around its own data and metrics.

start ─> fine_tune: open_run ─ data, model ─> train ─> report of every stage
      └> estimate:  begin_estimate ─ data or rows of one length ─> print_estimate
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loralib.adapters.adapter import Adapter
from loralib.io.atomic import atomic_write_text
from loralib.io.command_line import summary
from loralib.io.console import devices_in_words
from loralib.training.cuda_graphs import why_no_graphs

from ..configuration_utils import PretrainedConfig
from ..data.data_collator import default_data_collator
from ..hf_argparser import HfArgumentParser
from ..modeling_utils import PreTrainedModel
from ..tokenization_utils_base import PreTrainedTokenizerBase
from ..trainer import Trainer
from ..trainer_agreement import check_same_flags
from ..trainer_best import check_best_metric
from ..trainer_estimate import EstimateArguments, estimate_run, published_settings
from ..trainer_utils import EvalPrediction
from ..training_args import TrainingArguments
from ..utils.cli import set_up_datasets, set_up_logging
from .adapted_model import (
    base_family,
    check_arguments,
    check_heads,
    keep_to_layers,
    leave_out_missing,
    load_config,
    read_adapters,
    untrained_model,
)
from .arguments import AdaptedModelArguments, HubDataArguments
from .folders import check_sources_kept, find_checkpoint, sole_use_of_output
from .lengths import check_length

if TYPE_CHECKING:  # imported where data is read, so that --help and wrong flags answer at once
    from datasets import Dataset

logger = logging.getLogger(__name__)


def parser_of(types: Sequence[type], description: str | None) -> HfArgumentParser:
    """Returns a script's argument parser, with the flags of `types` and those of training.

    Args:
        types: the dataclasses with the flags for model and data.
        description: what the script does; --help prints its first line.
    """
    return HfArgumentParser(
        (*types, TrainingArguments, EstimateArguments),
        description=summary(description),
        takes_empty=False,
    )


def start(
    argv: Sequence[str] | None,
    description: str | None,
    types: Sequence[type],
    fine_tune: Callable[..., None],
    estimate: Callable[..., None],
) -> None:
    """Parses the command line, and runs `fine_tune` or, with --estimate, `estimate`.

    While `fine_tune` runs, no other run can use the output folder.

    Args:
        argv: the command line's arguments; those of this process if None.
        description, types: as in `parser_of`.
        fine_tune: called with the parsed dataclasses of `types` and the `TrainingArguments`.
        estimate: called with the same and the `EstimateArguments`.
    """
    set_up_logging()
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = parser_of(types, description)
    # Ignores the rank that a launcher adds; the environment has it, too.
    given = [arg for arg in argv if not arg.startswith(("--local_rank=", "--local-rank="))]
    if len(given) == 1 and given[0].endswith(".json"):
        *of_task, args, estimate_args = parser.parse_json_file(given[0])
    else:
        *of_task, args, estimate_args = parser.parse_args_into_dataclasses(argv)
    args.rate_is_given = "learning_rate" in parser.given
    args.graphs_by_default = True
    set_up_logging(args.log_level)
    check_same_flags(args, *of_task, estimate_args)
    if estimate_args.estimate:
        estimate(*of_task, args, estimate_args)
        return
    with sole_use_of_output(args):
        fine_tune(*of_task, args)


@dataclass
class Prepared:
    """The settings and the data from which a run's model is made and trained.

    Args:
        config: the model's settings for this run.
        tokenizer: the model's tokenizer.
        datasets: the tokenized examples by split.
        collator: makes batches of them.
    """

    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    datasets: dict[str, Dataset]
    collator: Callable[[list[Any]], dict[str, Any]]

    def trainer(
        self,
        model: PreTrainedModel,
        args: TrainingArguments,
        compute_metrics: Callable[[EvalPrediction], dict[str, float]],
    ) -> Trainer:
        """Returns a `Trainer` for a model and this data."""
        evaluated = [name for name in self.datasets if name.startswith("validation")]
        return Trainer(
            model,
            args,
            self.collator,
            train_dataset=self.datasets.get("train"),
            eval_dataset=self.datasets[evaluated[0]] if evaluated else None,
            tokenizer=self.tokenizer,
            compute_metrics=compute_metrics,
        )


def open_run(
    model_args: AdaptedModelArguments, args: TrainingArguments, head: str
) -> tuple[str | None, list[Adapter]]:
    """Returns the checkpoint to resume from, or None, and the adapters that the flags name.

    Args:
        model_args, args: the flags.
        head: the head of the task, such as "token_classification".
    """
    set_up_datasets(model_args.cache_dir)
    check_sources_kept(args, model_args.sources)
    checkpoint = find_checkpoint(args)
    if args.do_train and args.cuda_graphs:  # before the model is read
        reason = why_no_graphs(args.device, args.torch_compile)
        if reason is not None:
            raise ValueError(reason)
    if not args.do_train:  # training logs it in its own summary
        logger.info("computing on %s", devices_in_words(args.device, args.world_size))
    return checkpoint, _checked_adapters(model_args, args, head)


def _checked_adapters(
    model_args: AdaptedModelArguments, args: TrainingArguments, head: str
) -> list[Adapter]:
    """Reads the adapters that the flags name, and checks that they fit the head and the flags."""
    adapters = read_adapters(model_args, base_family(model_args))
    check_heads(adapters, head)
    check_arguments(model_args, args, adapters)
    return adapters


def needed_splits(args: TrainingArguments) -> list[str]:
    """Returns the names of the splits that a run uses."""
    stages = {"train": args.do_train, "validation": args.do_eval, "test": args.do_predict}
    return [name for name, wanted in stages.items() if wanted]


def check_scores(args: TrainingArguments, scores: Iterable[str]) -> None:
    """Refuses a --metric_for_best_model that is neither one of the task's scores nor the loss.

    Otherwise a run would fail only at its first evaluation.

    Args:
        args: the settings.
        scores: the names of the task's scores.

    Raises:
        TrainingError: there is no such metric.
    """
    if args.do_train and args.load_best_model_at_end:
        check_best_metric(args, ["loss", *([] if args.prediction_loss_only else scores)])


def train(trainer: Trainer, checkpoint: str | None) -> None:
    """Trains (or resumes from `checkpoint`), and writes the model, the state and the metrics."""
    args = trainer.args
    if trainer.model.config.apply_lora and not args.rate_is_given:
        logger.warning(
            "--learning_rate is not given: the default, %g, is for training all weights; LoRA "
            "needs a higher one, such as the 5e-4 of RoBERTa-base's recipes",
            args.learning_rate,
        )
    metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
    trainer.save_model()
    trainer.save_state()
    report(trainer, "train", metrics, trainer.train_dataset)


def report(trainer: Trainer, stage: str, metrics: dict[str, float], examples: Sized) -> None:
    """Logs and writes a stage's metrics, with the number of examples and the epoch."""
    metrics[f"{stage}_samples"] = len(examples)
    if trainer.state.epoch is not None:
        metrics["epoch"] = round(trainer.state.epoch, 2)
    trainer.log_metrics(stage, metrics)
    trainer.save_metrics(stage, metrics)


def write_predictions(path: Path, predictions: Iterable[Any]) -> None:
    """Writes a line for each row, with its index and its prediction."""
    lines = ["index\tprediction", *(f"{row}\t{each}" for row, each in enumerate(predictions))]
    atomic_write_text(path, "\n".join(lines) + "\n")


def begin_estimate(
    model_args: AdaptedModelArguments, args: TrainingArguments, head: str
) -> list[Adapter]:
    """Reads the adapters whose shapes an estimate uses; the arguments are those of `open_run`.

    Raises:
        ValueError: nothing is to be trained, an adapter is for another head, or flags clash.
    """
    if not args.do_train:
        raise ValueError("--estimate says what training takes: add --do_train")
    if model_args.config_name is None:
        model_args.config_name = published_settings(model_args.model_name_or_path)
    leave_out_missing(model_args)
    return _checked_adapters(model_args, args, head)


def estimate_task(
    auto_class: Any,
    model_args: AdaptedModelArguments,
    data_args: HubDataArguments,
    args: TrainingArguments,
    estimate_args: EstimateArguments,
    prepare: Callable[..., Prepared],
    example: Callable[[int], dict[str, Any]],
) -> None:
    """Prints an estimate of what training takes, without reading weights or the hub's data.

    Args:
        auto_class: the class for the task's head.
        model_args, data_args, args, estimate_args: the flags.
        prepare: prepares the data of --train_file. Called with `model_args`, `data_args`, `args`,
            the adapters and the names of the splits.
        example: makes an example of the given length. Used with --estimate_length, which reads no
            data.

    Raises:
        ValueError: neither --train_file nor --estimate_length is given.
    """
    adapters = begin_estimate(model_args, args, auto_class.role)
    if estimate_args.estimate_length is not None:
        keep_to_layers(model_args, load_config(model_args), adapters)
        config = load_config(model_args)
        check_length(config, estimate_args.estimate_length)
        rows = [example(estimate_args.estimate_length)] * args.train_batch_size
        print_estimate(auto_class, config, args, estimate_args, rows, default_data_collator, False)
        return
    if data_args.train_file is None:
        raise ValueError(
            "--estimate reads no data set of the hub: give --estimate_length, or --train_file"
        )
    set_up_datasets(model_args.cache_dir)
    prepared = prepare(model_args, data_args, args, adapters, ["train"])
    rows = prepared.datasets["train"]
    print_estimate(auto_class, prepared.config, args, estimate_args, rows, prepared.collator)


def print_estimate(
    auto_class: Any, config: PretrainedConfig, args: TrainingArguments, *about: Any
) -> None:
    """Prints an estimate of what training takes.

    `auto_class` is the class for the task's head. The other arguments are those of `estimate_run`.
    """
    taken = estimate_run(partial(untrained_model, auto_class), config, args, *about)
    if args.is_main_process:
        print(taken)
