"""Fine-tune RoBERTa or DeBERTa-v2, with LoRA or without, to tag words: entities, parts of speech.

    python examples/token-classification/run_ner.py --model_name_or_path roberta-base \
        --train_file train.json --validation_file dev.json --do_train --do_eval \
        --apply_lora --lora_r 8 --lora_alpha 16 --learning_rate 5e-4 --output_dir ner

A file has one sentence a line, as words and as many tags:

    {"tokens": ["John", "lives", "here"], "ner_tags": ["B-PER", "O", "O"]}

or is CSV, with JSON in these cells. --dataset_name takes a data set of the hub instead. Predictions
go to test_predictions.txt, a line of tags a sentence. What is trained and what is written is as in
run_glue.py, whose flags for models and adapters this script has.
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
from loralib.io.atomic import atomic_write
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
    origin_of,
)
from transformers.fine_tuning.arguments import AdaptedModelArguments, HubDataArguments
from transformers.fine_tuning.data_sets import Table, load_tables
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
from transformers.fine_tuning.tagged_words import TAGS, WORDS, check_sentences
from transformers.hf_argparser import flag
from transformers.utils.cli import choose_length, cut_rows, report_cut, run_script

if TYPE_CHECKING:  # else imported where data is read: --help and wrong flags need not wait for it
    from datasets import Dataset

logger = logging.getLogger(__name__)

# Tokens that sentences are cut to by default.
LONGEST = 512
# Columns beside what the model takes: whether a row was cut, and its words' first tokens.
CUT, FIRSTS = "cut", "first_tokens"
# What is scored of all types together.
OVERALL = ("precision", "recall", "f1", "accuracy")


@dataclass
class DataTrainingArguments(HubDataArguments):
    """The data."""

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
    """What a run's model is made and trained on.

    Args:
        labels: names of the tags in the order of their numbers.
        firsts: by split, the first token of each row's words; -1 for a word without one.
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
    """Reads settings, data and tokenizer, and checks that they belong together."""
    config = load_task_config(model_args, args, adapters)
    origin = origin_of(model_args, config, adapters)
    read = list(splits)
    if not origin.labels and "train" not in splits and data_args.train_file:
        read.append("train")  # the order of the tags is that of its training set
    if "train" not in read:
        origin.check_named("tags")
    # Tags are those of the whole training set, however much of it is trained on.
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
    """The sentences by split as the model takes them, and the first token of each word."""
    # The cache's key is all that the function refers to: only what changes its results.
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
        columns[CUT] = cut_rows(tokenizer, [words], masks, length, is_split_into_words=True)
        if TAGS in rows:
            both = zip(words_of, rows[TAGS], strict=True)
            columns["labels"] = [label_tokens(*row, all_tokens) for row in both]
        return columns

    datasets, firsts, cut = {}, {}, {}
    for split, table in tables.items():
        encoded = table.rows.map(
            encode,
            batched=True,
            remove_columns=table.rows.column_names,
            load_from_cache_file=not data_args.overwrite_cache,
            num_proc=data_args.preprocessing_num_workers,
            desc=f"tokenizing {split}",
        )
        cut[split] = (sum(encoded[CUT][:]), len(encoded))
        firsts[split] = encoded[FIRSTS][:]
        datasets[split] = encoded.remove_columns([CUT, FIRSTS])
    report_cut(cut, length)
    return datasets, firsts


# ------------------------------------------------------------------------------------------------
# Run
# ------------------------------------------------------------------------------------------------


def metrics_for(
    prepared: PreparedWords, split: str, each_type: bool
) -> Callable[[EvalPrediction], dict[str, float]]:
    """Precision, recall and F1 of entities, and the words' accuracy; of each type if asked for."""
    names, firsts = conll_tags(prepared.labels), prepared.firsts.get(split, [])

    def compute(evaluated: EvalPrediction) -> dict[str, float]:
        logits, labels = evaluated
        scores = entity_metrics(*tags_of_labels(logits, labels_of_words(labels, firsts), names))
        if each_type:
            return flat(scores)
        return {name: scores[f"overall_{name}"] for name in OVERALL}

    return compute


def names_of_scores(labels: Sequence[str], each_type: bool) -> Sequence[str]:
    """What `metrics_for` gives, of all types that the tags are of."""
    tags = [conll_tags(labels)]
    return list(flat(entity_metrics(tags, tags))) if each_type else OVERALL


def flat(scores: dict[str, Any]) -> dict[str, float]:
    """The scores of types under their names: PER_f1."""
    named: dict[str, float] = {}
    for name, value in scores.items():
        each = value.items() if isinstance(value, dict) else ()
        named.update({f"{name}_{score}": number for score, number in each} or {name: value})
    return named


def warn_of_tags(labels: Sequence[str]) -> None:
    """Says of which tags the scores are not those of entities, if there are any."""
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
    """Writes test_predictions.txt, and the scores where the test set has tags."""
    trainer.compute_metrics = metrics_for(prepared, "test", each_type)
    rows = prepared.datasets["test"]
    output = trainer.predict(rows, metric_key_prefix="test")
    report(trainer, "test", output.metrics, rows)
    tags = tags_of_words(output.predictions, prepared.firsts["test"], prepared.labels)
    if trainer.is_world_process_zero():
        with atomic_write(Path(trainer.args.output_dir, "test_predictions.txt")) as temporary:
            lines = "".join(" ".join(row) + "\n" for row in tags)
            temporary.write_text(lines, encoding="utf-8")


def fine_tune(
    model_args: AdaptedModelArguments, data_args: DataTrainingArguments, args: TrainingArguments
) -> None:
    """Loads, trains, evaluates, predicts; as far as the flags ask for it."""
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
    """Prints what training would take."""

    def example(length: int) -> dict[str, Any]:
        ones = [1] * length
        return {"input_ids": ones, "attention_mask": ones, "labels": ones}

    estimate_task(AutoModelForTokenClassification, *flags, prepare, example)


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, and does what it asks for."""
    start(argv, __doc__, (AdaptedModelArguments, DataTrainingArguments), fine_tune, estimate)


if __name__ == "__main__":
    run_script(main)
