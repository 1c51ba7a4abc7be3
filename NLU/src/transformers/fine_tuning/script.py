"""From the command line to results: what a task's script does around its own data and metrics.

start ─> fine_tune: open_run ─ data, model ─> train ─> report of every stage
      └> estimate:  begin_estimate ─ data or rows of one length ─> print_estimate
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from loralib.adapters.adapter import Adapter
from loralib.io.console import devices_in_words

from ..configuration_utils import PretrainedConfig
from ..data.data_collator import default_data_collator
from ..hf_argparser import HfArgumentParser
from ..modeling_utils import PreTrainedModel
from ..tokenization_utils_base import PreTrainedTokenizerBase
from ..trainer import Trainer
from ..trainer_agreement import check_same_flags
from ..trainer_checkpoint import check_best_metric
from ..trainer_estimate import EstimateArguments, estimate_run, published_settings
from ..trainer_utils import EvalPrediction
from ..training_args import TrainingArguments
from ..utils.cli import (
    check_length,
    check_sources_kept,
    find_checkpoint,
    set_up_datasets,
    set_up_logging,
    sole_use_of_output,
)
from .adapted_model import (
    check_arguments,
    check_heads,
    keep_to_layers,
    leave_out_missing,
    load_config,
    read_adapters,
    untrained_model,
)
from .arguments import AdaptedModelArguments, HubDataArguments

if TYPE_CHECKING:  # else imported where data is read: --help and wrong flags need not wait for it
    from datasets import Dataset

logger = logging.getLogger(__name__)


def parser_of(types: Sequence[type], description: str) -> HfArgumentParser:
    """What reads a script's command line: the flags of these dataclasses, and those of training.

    Args:
        types: the dataclasses of the flags for model and data.
        description: what the script does; its first line is for --help.
    """
    return HfArgumentParser(
        (*types, TrainingArguments, EstimateArguments),
        description=description.split("\n")[0],
        takes_empty=False,
    )


def start(
    argv: Sequence[str] | None,
    description: str,
    types: Sequence[type],
    fine_tune: Callable[..., None],
    estimate: Callable[..., None],
) -> None:
    """Parses the command line, and does what it asks for with the output folder to itself.

    Args:
        argv: the command line; this process's where None.
        description, types: as in `parser_of`.
        fine_tune: called with these and the `TrainingArguments`.
        estimate: called with the `EstimateArguments` as well, where --estimate asks for it.
    """
    set_up_logging()
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = parser_of(types, description)
    # What a launcher adds is in the environment, too.
    given = [arg for arg in argv if not arg.startswith(("--local_rank=", "--local-rank="))]
    if len(given) == 1 and given[0].endswith(".json"):
        *of_task, args, estimate_args = parser.parse_json_file(given[0])
    else:
        *of_task, args, estimate_args = parser.parse_args_into_dataclasses(argv)
    args.rate_is_given = "learning_rate" in parser.given
    set_up_logging(args.log_level)
    check_same_flags(args, *of_task, estimate_args)
    if estimate_args.estimate:
        estimate(*of_task, args, estimate_args)
        return
    with sole_use_of_output(args):
        fine_tune(*of_task, args)


@dataclass
class Prepared:
    """What a run's model is made and trained on.

    Args:
        config: the model's settings for this run.
        tokenizer: the model's.
        datasets: the examples by split, as the model takes them.
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
        """What trains a model on them."""
        return Trainer(
            model,
            args,
            self.collator,
            train_dataset=self.datasets.get("train"),
            eval_dataset=self.datasets.get("validation"),
            tokenizer=self.tokenizer,
            compute_metrics=compute_metrics,
        )


def open_run(
    model_args: AdaptedModelArguments, args: TrainingArguments, head: str
) -> tuple[str | None, list[Adapter]]:
    """The checkpoint to resume from, if there is one, and the adapters that the flags name.

    Args:
        model_args, args: the flags.
        head: the task's, such as "token_classification".
    """
    set_up_datasets(model_args.cache_dir)
    check_sources_kept(args, model_args.sources)
    checkpoint = find_checkpoint(args)
    if not args.do_train:  # else the summary before the training says it
        logger.info("computing on %s", devices_in_words(args.device, args.world_size))
    adapters = read_adapters(model_args)
    check_heads(adapters, head)
    check_arguments(model_args, args, adapters)
    return checkpoint, adapters


def needed_splits(args: TrainingArguments) -> list[str]:
    """Names of the splits that a run uses."""
    stages = {"train": args.do_train, "validation": args.do_eval, "test": args.do_predict}
    return [name for name, wanted in stages.items() if wanted]


def check_scores(args: TrainingArguments, scores: Iterable[str]) -> None:
    """Refuses to look for the best model by what is neither a score of the task nor the loss.

    Else a run would find out at its first evaluation.

    Args:
        args: the settings.
        scores: the names of the task's scores.

    Raises:
        TrainingError: it is none.
    """
    if args.do_train and args.load_best_model_at_end:
        check_best_metric(args, ["loss", *([] if args.prediction_loss_only else scores)])


def train(trainer: Trainer, checkpoint: str | None) -> None:
    """Trains, from a checkpoint on where there is one; writes the model, the state, the metrics."""
    args = trainer.args
    if trainer.model.config.apply_lora and not args.rate_is_given:
        logger.warning(
            "--learning_rate is not given: it is %g, for training all weights; LoRA needs a higher "
            "one, such as 5e-4, which recipes for RoBERTa-base have",
            args.learning_rate,
        )
    metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
    trainer.save_model()
    trainer.save_state()
    report(trainer, "train", metrics, trainer.train_dataset)


def report(trainer: Trainer, stage: str, metrics: dict[str, float], examples: Sized) -> None:
    """Logs and writes a stage's metrics, with how many examples they are of, and the epoch."""
    metrics[f"{stage}_samples"] = len(examples)
    if trainer.state.epoch is not None:
        metrics["epoch"] = round(trainer.state.epoch, 2)
    trainer.log_metrics(stage, metrics)
    trainer.save_metrics(stage, metrics)


def begin_estimate(
    model_args: AdaptedModelArguments, args: TrainingArguments, head: str
) -> list[Adapter]:
    """The adapters whose shapes an estimate takes over; the arguments are those of `open_run`.

    Raises:
        ValueError: nothing is to be trained, an adapter is another task's, or flags clash.
    """
    if not args.do_train:
        raise ValueError("--estimate says what training takes: add --do_train")
    if model_args.config_name is None:
        model_args.config_name = published_settings(model_args.model_name_or_path)
    leave_out_missing(model_args)
    adapters = read_adapters(model_args)
    check_heads(adapters, head)
    check_arguments(model_args, args, adapters)
    return adapters


def estimate_task(
    auto_class: Any,
    model_args: AdaptedModelArguments,
    data_args: HubDataArguments,
    args: TrainingArguments,
    estimate_args: EstimateArguments,
    prepare: Callable[..., Prepared],
    example: Callable[[int], dict[str, Any]],
) -> None:
    """Prints what training would take; reads data in files, and neither weights nor the hub's data.

    Args:
        auto_class: of the task's head.
        model_args, data_args, args, estimate_args: the flags.
        prepare: called with the first three, the adapters and the splits that are needed.
        example: makes one of a length, for where no data is read.

    Raises:
        ValueError: there is no file to read, and no length given.
    """
    adapters = begin_estimate(model_args, args, auto_class.role)
    new_model = partial(untrained_model, auto_class)
    if estimate_args.estimate_length is not None:
        keep_to_layers(model_args, load_config(model_args), adapters)
        config = load_config(model_args)
        check_length(config, estimate_args.estimate_length)
        rows = [example(estimate_args.estimate_length)] * args.train_batch_size
        print_estimate(new_model, config, args, estimate_args, rows, default_data_collator, False)
        return
    if data_args.train_file is None:
        raise ValueError(
            "--estimate reads no data set of the hub: give --estimate_length, or --train_file"
        )
    set_up_datasets(model_args.cache_dir)
    prepared = prepare(model_args, data_args, args, adapters, ["train"])
    rows = prepared.datasets["train"]
    print_estimate(new_model, prepared.config, args, estimate_args, rows, prepared.collator)


def print_estimate(
    new_model: Callable[[PretrainedConfig], PreTrainedModel],
    config: PretrainedConfig,
    args: TrainingArguments,
    *about: Any,
) -> None:
    """Prints what training would take; the other arguments are those of `estimate_run`."""
    taken = estimate_run(new_model, config, args, *about)
    if args.is_main_process:
        print(taken)
