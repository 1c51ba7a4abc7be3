"""Fine-tune RoBERTa or DeBERTa-v2, with LoRA or without, to tag words: entities, parts of speech.

    python examples/token-classification/run_ner.py --model_name_or_path roberta-base \
        --train_file train.json --validation_file dev.json --do_train --do_eval \
        --apply_lora --lora_r 8 --lora_alpha 16 --learning_rate 5e-4 --output_dir ner

A file has one sentence per line, as words and as many tags:

    {"tokens": ["John", "lives", "here"], "ner_tags": ["B-PER", "O", "O"]}

Or it is a CSV file with JSON in these cells. --dataset_name takes a dataset of the hub instead.
Predictions go to test_predictions.txt, with one line of tags per sentence. The flags for models and
adapters, the training and the other output files are those of run_glue.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    from loralib.training.process import begin

    begin()

from loralib.adapters.adapter import Adapter
from loralib.io.atomic import atomic_write_text
from loralib.training.watch import beat
from transformers import (
    AutoModelForTokenClassification,
    DataCollatorForTokenClassification,
    EvalPrediction,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.data.metrics.entity_metrics import conll_tags, entity_metrics, unread_tags
from transformers.data.word_labels import (
    first_tokens,
    label_tokens,
    labels_of_words,
    tags_of_labels,
    tags_of_words,
)
from transformers.fine_tuning.adapted_model import (
    build_model,
    load_config,
    load_task_config,
    open_tokenizer,
)
from transformers.fine_tuning.arguments import AdaptedModelArguments, HubDataArguments
from transformers.fine_tuning.data_sets import Table, load_tables
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
)
from transformers.fine_tuning.starting_point import starting_point_of
from transformers.fine_tuning.tagged_words import TAGS, WORDS, check_sentences
from transformers.hf_argparser import flag
from transformers.utils.cli import run_script

if TYPE_CHECKING:  # imported where data is read, so that --help and wrong flags answer at once
    from datasets import Dataset

logger = logging.getLogger(__name__)

# The number of tokens to which sentences are truncated by default.
LONGEST = 512
# The column of the words' first tokens.
FIRSTS = "first_tokens"
# The scores of all types of entities together.
OVERALL = ("precision", "recall", "f1", "accuracy")


@dataclass
class DataTrainingArguments(HubDataArguments):
    """The flags for the data."""

    task_name: str = flag("ner", "the tags' column is <task_name>_tags: ner, pos or chunk, say")
    text_column_name: str | None = flag(None, "the words' column (default: tokens, or the first)")
    label_column_name: str | None = flag(
        None, "the tags' column (default: <task_name>_tags, or the second)"
    )
    max_seq_length: int | None = flag(
        None,
        "longer sentences are cut to this number of tokens (default: 512, or as many as the model "
        "takes)",
        least=1,
    )
    label_all_tokens: bool = flag(
        False,
        "in the loss, all tokens of a word have its tag, not only the first; scores and "
        "predictions are per word, by its first token",
    )
    return_entity_level_metrics: bool = flag(False, "scores of each type of entity as well")


# ------------------------------------------------------------------------------------------------
# Data
# ------------------------------------------------------------------------------------------------


@dataclass
class PreparedWords(Prepared):
    """The settings and the data from which a run's model is made and trained.

    Args:
        labels: the tags' names, in the order of their numbers.
        firsts: by split, the position of each word's first token in each row; -1 for a word that
            was cut off.
    """

    labels: tuple[str, ...]
    firsts: dict[str, list[list[int]]]


def prepare(
    model_args: AdaptedModelArguments,
    data_args: DataTrainingArguments,
    args: TrainingArguments,
    adapters: Sequence[Adapter],
    splits: Sequence[str],
) -> PreparedWords:
    """Reads settings, data and tokenizer, and checks that they fit together."""
    config = load_task_config(model_args, args, adapters)
    origin = starting_point_of(model_args, config, adapters)
    read = list(splits)
    if not origin.labels and "train" not in splits and data_args.train_file:
        read.append("train")  # the model's training set defines the order of the tags
    if "train" not in read:
        origin.check_named("tags")
    # The tags are those of the whole training set, even if --max_train_samples limits it.
    tables = load_tables(data_args, read, model_args.cache_dir, whole=["train"])
    words, tags = data_args.text_column_name, data_args.label_column_name
    data = check_sentences(tables, words, tags, data_args.task_name, origin.labels)
    if args.do_train and len(data.labels) < 2:
        raise ValueError(
            f"{tables['train'].source}: all words have the tag '{data.labels[0]}'; training needs "
            "at least two tags"
        )
    origin.check_task(data_args.task_name, args.do_train)
    origin.check_labels(data.labels, args.do_train)
    check_scores(args, names_of_scores(data.labels, data_args.return_entity_level_metrics))

    tokenizer = open_tokenizer(
        model_args, config, aligned=True, of_words=True, padding_side="right"
    )
    data_args.max_seq_length = choose_length(
        data_args.max_seq_length, config, tokenizer, is_pair=False, usual=LONGEST
    )
    tables = {split: data.tables[split].first(split, data_args) for split in splits}
    datasets, firsts = tokenize(tables, tokenizer, data_args)
    names = dict(enumerate(data.labels))
    settings = {"num_labels": len(names), "id2label": names}
    return PreparedWords(
        load_config(model_args, finetuning_task=data_args.task_name, text_columns=None, **settings),
        tokenizer,
        datasets,
        DataCollatorForTokenClassification(tokenizer),
        data.labels,
        firsts,
    )


def tokenize(
    tables: dict[str, Table],
    tokenizer: PreTrainedTokenizerBase,
    data_args: DataTrainingArguments,
) -> tuple[dict[str, Dataset], dict[str, list[list[int]]]]:
    """Returns the tokenized sentences by split, and the position of each word's first token."""
    # `encode` must refer only to what changes its results, as the cache's key covers all of that.
    length, all_tokens = data_args.max_seq_length, data_args.label_all_tokens
    padding = "max_length" if data_args.pad_to_max_length else False

    def encode(rows: dict[str, list]) -> dict[str, list]:
        beat()
        words = rows[WORDS]
        encoded = tokenizer(
            words, is_split_into_words=True, truncation=True, max_length=length, padding=padding
        )
        words_of = [encoded.word_ids(row) for row in range(len(words))]
        columns = {name: encoded[name] for name in tokenizer.model_input_names}
        columns[FIRSTS] = [
            [firsts.get(word, -1) for word in range(len(row))]
            for row, firsts in zip(words, map(first_tokens, words_of), strict=True)
        ]
        masks = encoded["attention_mask"]
        columns[CUT] = truncated_rows(tokenizer, [words], masks, length, is_split_into_words=True)
        if TAGS in rows:
            both = zip(words_of, rows[TAGS], strict=True)
            columns["labels"] = [label_tokens(*row, all_tokens) for row in both]
        return columns

    tokenized = {
        split: table.rows.map(
            encode,
            batched=True,
            remove_columns=table.rows.column_names,
            load_from_cache_file=not data_args.overwrite_cache,
            num_proc=data_args.preprocessing_num_workers,
            desc=f"tokenizing {split}",
        )
        for split, table in tables.items()
    }
    tokenized = drop_cuts(tokenized, length)
    firsts = {split: rows[FIRSTS][:] for split, rows in tokenized.items()}
    return {split: rows.remove_columns(FIRSTS) for split, rows in tokenized.items()}, firsts


# ------------------------------------------------------------------------------------------------
# Run
# ------------------------------------------------------------------------------------------------


def metrics_for(
    prepared: PreparedWords, split: str, each_type: bool
) -> Callable[[EvalPrediction], dict[str, float]]:
    """Returns the function that computes the metrics of an evaluation.

    They are precision, recall and F1 of all entities (with `each_type`, also of each type), and the
    accuracy of words.
    """
    names, firsts = conll_tags(prepared.labels), prepared.firsts.get(split, [])

    def compute(evaluated: EvalPrediction) -> dict[str, float]:
        logits, labels = evaluated
        scores = entity_metrics(*tags_of_labels(logits, labels_of_words(labels, firsts), names))
        if each_type:
            return flat(scores)
        return {name: scores[f"overall_{name}"] for name in OVERALL}

    return compute


def names_of_scores(labels: Sequence[str], each_type: bool) -> Sequence[str]:
    """Returns the names of the scores that `metrics_for` computes for these tags."""
    tags = [conll_tags(labels)]
    return list(flat(entity_metrics(tags, tags))) if each_type else OVERALL


def flat(scores: dict[str, Any]) -> dict[str, float]:
    """Flattens the scores of types into names such as PER_f1."""
    named: dict[str, float] = {}
    for name, value in scores.items():
        each = value.items() if isinstance(value, dict) else ()
        named.update({f"{name}_{score}": number for score, number in each} or {name: value})
    return named


def warn_of_tags(labels: Sequence[str]) -> None:
    """Warns of tags that do not follow an entity scheme, so that their scores would mislead."""
    unread = unread_tags(labels)
    if unread:
        logger.warning(
            "tag '%s' is taken for a type of entity, and consecutive words with it are scored as "
            "one entity: to mark entities, write B-PER, I-PER and O (or BILOU, BMES, BMEWO)",
            unread[0],
        )
    elif all(label.isdecimal() for label in labels):
        logger.warning(
            "the tags are numbers, and each is scored as a type of entity, even the one that means "
            "O: to score entities, write names such as O and B-PER in the files"
        )


def predict(trainer: Trainer, prepared: PreparedWords, each_type: bool) -> None:
    """Writes test_predictions.txt and, if the test set has tags, the scores."""
    trainer.compute_metrics = metrics_for(prepared, "test", each_type)
    rows = prepared.datasets["test"]
    output = trainer.predict(rows, metric_key_prefix="test")
    report(trainer, "test", output.metrics, rows)
    tags = tags_of_words(output.predictions, prepared.firsts["test"], prepared.labels)
    if trainer.is_world_process_zero():
        lines = "".join(" ".join(row) + "\n" for row in tags)
        atomic_write_text(Path(trainer.args.output_dir, "test_predictions.txt"), lines)


def fine_tune(
    model_args: AdaptedModelArguments, data_args: DataTrainingArguments, args: TrainingArguments
) -> None:
    """Loads the model and the data, then trains, evaluates and predicts as the flags ask for."""
    checkpoint, adapters = open_run(model_args, args, AutoModelForTokenClassification.role)
    prepared = prepare(model_args, data_args, args, adapters, needed_splits(args))
    set_seed(args.seed)
    model = build_model(
        AutoModelForTokenClassification, model_args, prepared.config, adapters, args
    )
    each_type = data_args.return_entity_level_metrics
    trainer = prepared.trainer(model, args, metrics_for(prepared, "validation", each_type))
    if args.do_eval or args.do_predict:
        warn_of_tags(prepared.labels)
    if args.do_train:
        train(trainer, checkpoint)
    if args.do_eval:
        report(trainer, "eval", trainer.evaluate(), trainer.eval_dataset)
    if args.do_predict:
        predict(trainer, prepared, each_type)
    trainer.log_end()


def estimate(*flags: Any) -> None:
    """Prints an estimate of what training takes."""

    def example(length: int) -> dict[str, Any]:
        ones = [1] * length
        return {"input_ids": ones, "attention_mask": ones, "labels": ones}

    estimate_task(AutoModelForTokenClassification, *flags, prepare, example)


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, and runs what it asks for."""
    start(argv, __doc__, (AdaptedModelArguments, DataTrainingArguments), fine_tune, estimate)


if __name__ == "__main__":
    run_script(main)
