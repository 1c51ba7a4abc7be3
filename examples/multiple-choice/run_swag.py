"""Fine-tune RoBERTa, with LoRA or without, to choose among endings.

    python examples/multiple-choice/run_swag.py --model_name_or_path roberta-base \
        --dataset_name swag --dataset_config_name regular --do_train --do_eval \
        --apply_lora --lora_r 8 --lora_alpha 16 --learning_rate 5e-4 --output_dir swag

Files have SWAG's columns, with two or more endings:

    {"sent1": "She opens the door.", "sent2": "Then she", "ending0": "leaves.", "ending1": "sky.",
     "label": 0}

Predictions go to test_results_swag.txt. The flags for models and adapters, the training and the
other output files are those of run_glue.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    from loralib.training.process import begin

    begin()

from loralib.adapters.adapter import Adapter
from loralib.training.watch import beat
from transformers import (
    AutoModelForMultipleChoice,
    DataCollatorForMultipleChoice,
    EvalPrediction,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.data.metrics import simple_accuracy
from transformers.fine_tuning.adapted_model import (
    build_model,
    load_config,
    load_task_config,
    open_tokenizer,
)
from transformers.fine_tuning.arguments import AdaptedModelArguments, HubDataArguments
from transformers.fine_tuning.choices import (
    BEGINNING,
    CONTEXT,
    LABEL,
    Choices,
    check_choices,
    read_choices,
)
from transformers.fine_tuning.data_sets import load_tables
from transformers.fine_tuning.lengths import CUT, choose_length, drop_cuts, truncated_rows
from transformers.fine_tuning.script import (
    Prepared,
    check_scores,
    estimate_task,
    needed_splits,
    open_run,
    report,
    start,
    train,
    write_predictions,
)
from transformers.hf_argparser import flag
from transformers.utils.cli import run_script

if TYPE_CHECKING:  # imported where data is read, so that --help and wrong flags answer at once
    from datasets import Dataset

# The number of tokens to which a choice (context and ending) is truncated by default.
LONGEST = 512
SCORE = "accuracy"


@dataclass
class DataTrainingArguments(HubDataArguments):
    """The flags for the data."""

    max_seq_length: int | None = flag(
        None,
        "longer rows are cut to this number of tokens (default: 512, or as many as the model "
        "takes)",
        least=1,
    )


# ------------------------------------------------------------------------------------------------
# Data
# ------------------------------------------------------------------------------------------------


def prepare(
    model_args: AdaptedModelArguments,
    data_args: DataTrainingArguments,
    args: TrainingArguments,
    adapters: Sequence[Adapter],
    splits: Sequence[str],
) -> Prepared:
    """Reads settings, data and tokenizer, and checks that they fit together."""
    check_scores(args, [SCORE])
    config = load_task_config(model_args, args, adapters)
    choices = check_choices(load_tables(data_args, splits, model_args.cache_dir, read_choices))
    tokenizer = open_tokenizer(model_args, config)
    data_args.max_seq_length = length = choose_length(
        data_args.max_seq_length, config, tokenizer, is_pair=True, usual=LONGEST
    )
    datasets = tokenize(choices, tokenizer, data_args)
    padding = "max_length" if data_args.pad_to_max_length else True
    return Prepared(
        load_config(model_args, finetuning_task=None, text_columns=None),
        tokenizer,
        datasets,
        DataCollatorForMultipleChoice(tokenizer, padding, length),
    )


def tokenize(
    choices: Choices, tokenizer: PreTrainedTokenizerBase, data_args: DataTrainingArguments
) -> dict[str, Dataset]:
    """Returns the tokenized rows by split; each of their entries has one list per choice."""
    # `encode` must refer only to what changes its results, as the cache's key covers all of that.
    length, endings = data_args.max_seq_length, choices.endings

    def encode(rows: dict[str, list]) -> dict[str, list]:
        beat()
        count = len(endings)
        contexts = [text for text in rows[CONTEXT] for _ in endings]
        continued = [
            f"{beginning} {ending}"
            for beginning, *texts in zip(rows[BEGINNING], *map(rows.get, endings), strict=True)
            for ending in texts
        ]
        encoded = tokenizer(contexts, continued, truncation=True, max_length=length)
        columns: dict[str, list] = {
            name: grouped(encoded[name], count) for name in tokenizer.model_input_names
        }
        cut = truncated_rows(tokenizer, [contexts, continued], encoded["attention_mask"], length)
        columns[CUT] = [sum(row) for row in grouped(cut, count)]
        return columns

    tokenized = {
        split: table.rows.map(
            encode,
            batched=True,
            remove_columns=[CONTEXT, BEGINNING, *endings],
            load_from_cache_file=not data_args.overwrite_cache,
            num_proc=data_args.preprocessing_num_workers,
            desc=f"tokenizing {split}",
        )
        for split, table in choices.tables.items()
    }
    return drop_cuts(tokenized, length, texts_per_row=len(endings))


def grouped(rows: Sequence[Any], count: int) -> list[list[Any]]:
    """Returns lists of `count` consecutive rows."""
    return [list(rows[start : start + count]) for start in range(0, len(rows), count)]


# ------------------------------------------------------------------------------------------------
# Run
# ------------------------------------------------------------------------------------------------


def compute_metrics(evaluated: EvalPrediction) -> dict[str, float]:
    """Returns the accuracy of the choices."""
    return {SCORE: simple_accuracy(evaluated.predictions.argmax(axis=1), evaluated.label_ids)}


def predict(trainer: Trainer, rows: Dataset) -> None:
    """Writes test_results_swag.txt and, if the test set has labels, the accuracy."""
    output = trainer.predict(rows, metric_key_prefix="test")
    report(trainer, "test", output.metrics, rows)
    if trainer.is_world_process_zero():
        chosen = output.predictions.argmax(axis=1)
        write_predictions(Path(trainer.args.output_dir, "test_results_swag.txt"), chosen)


def fine_tune(
    model_args: AdaptedModelArguments, data_args: DataTrainingArguments, args: TrainingArguments
) -> None:
    """Loads the model and the data, then trains, evaluates and predicts as the flags ask for."""
    checkpoint, adapters = open_run(model_args, args, AutoModelForMultipleChoice.role)
    prepared = prepare(model_args, data_args, args, adapters, needed_splits(args))
    set_seed(args.seed)
    model = build_model(AutoModelForMultipleChoice, model_args, prepared.config, adapters, args)
    trainer = prepared.trainer(model, args, compute_metrics)
    if args.do_train:
        train(trainer, checkpoint)
    if args.do_eval:
        report(trainer, "eval", trainer.evaluate(), trainer.eval_dataset)
    if args.do_predict:
        predict(trainer, prepared.datasets["test"])
    trainer.log_end()


def estimate(*flags: Any) -> None:
    """Prints an estimate of what training takes; if no data is read, with four endings per row."""

    def example(length: int) -> dict[str, Any]:
        ones = [[1] * length] * 4
        return {"input_ids": ones, "attention_mask": ones, LABEL: 0}

    estimate_task(AutoModelForMultipleChoice, *flags, prepare, example)


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, and runs what it asks for."""
    start(argv, __doc__, (AdaptedModelArguments, DataTrainingArguments), fine_tune, estimate)


if __name__ == "__main__":
    run_script(main)
