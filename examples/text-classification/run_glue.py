"""Fine-tune RoBERTa or DeBERTa-v2, with LoRA or without, on GLUE or on a CSV or JSON file.

    python -m torch.distributed.launch --nproc_per_node=1 \
        examples/text-classification/run_glue.py \
        --model_name_or_path roberta-base --task_name rte --do_train --do_eval \
        --apply_lora --lora_r 8 --lora_alpha 16 --learning_rate 5e-4 --output_dir rte

The paper's baselines are --apply_adapter and --apply_bitfit. They can be combined with --apply_lora
and with each other. Without any of the three, all weights are trained. The flags can also come from
a JSON file: run_glue.py settings.json.
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

import numpy as np
from numpy.typing import ArrayLike

from loralib.adapters.adapter import Adapter
from loralib.adapters.metadata import default_labels
from loralib.training.watch import beat
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    consistency,
    default_data_collator,
    glue_compute_metrics,
    set_seed,
)
from transformers.data.metrics import classification_metrics, regression_metrics
from transformers.data.processors import GlueTask, download_command, glue_table, glue_task
from transformers.fine_tuning.adapted_model import (
    build_model,
    keep_to_layers,
    load_config,
    open_tokenizer,
)
from transformers.fine_tuning.arguments import AdaptedModelArguments, DataArguments
from transformers.fine_tuning.data_sets import first_rows, load_data_set
from transformers.fine_tuning.labeled_texts import TextData, load_own_files
from transformers.fine_tuning.lengths import (
    CUT,
    DEFAULT_LENGTH,
    check_length,
    choose_length,
    drop_cuts,
    truncated_rows,
)
from transformers.fine_tuning.script import (
    Prepared,
    begin_estimate,
    check_scores,
    needed_splits,
    open_run,
    print_estimate,
    report,
    start,
    train,
    write_predictions,
)
from transformers.fine_tuning.starting_point import StartingPoint, starting_point_of
from transformers.hf_argparser import flag
from transformers.trainer_estimate import EstimateArguments
from transformers.utils.cli import run_script, set_up_datasets

if TYPE_CHECKING:  # imported where data is read, so that --help and wrong flags answer at once
    from datasets import Dataset

logger = logging.getLogger(__name__)

HUB_GLUE = "nyu-mll/glue"


@dataclass
class ModelArguments(AdaptedModelArguments):
    """The model, how it is adapted, and consistency training."""

    apply_rdrop: bool = flag(
        False,
        "R-Drop: every batch passes through the model twice, with different dropout, and both "
        "predictions are trained to agree; the same as --reg_loss_wgt 1.0",
    )
    apply_cutoff: bool = flag(
        False,
        "Cutoff: like R-Drop, but a tenth of the tokens are hidden from the second pass; the same "
        "as --reg_loss_wgt 1.0 --masking_prob 0.1",
    )
    reg_loss_wgt: float = flag(
        0.0,
        "consistency training: weight of the difference between two passes over a batch",
        least=0,
    )
    masking_prob: float = flag(
        0.0,
        "consistency training: share of the tokens that are hidden from the second pass",
        least=0,
        most=1,
    )

    def __post_init__(self) -> None:
        for name, values in (("apply_rdrop", (1.0, 0.0)), ("apply_cutoff", (1.0, 0.1))):
            if not getattr(self, name):
                continue
            if (self.reg_loss_wgt, self.masking_prob) not in ((0.0, 0.0), values):
                raise ValueError(
                    f"--{name} sets --reg_loss_wgt {values[0]} --masking_prob {values[1]}: leave "
                    f"out those flags, or --{name}"
                )
            self.reg_loss_wgt, self.masking_prob = values


@dataclass
class DataTrainingArguments(DataArguments):
    """The flags for the data."""

    task_name: str | None = flag(
        None, "a GLUE task: cola, mnli, mrpc, qnli, qqp, rte, sst2, stsb or wnli"
    )
    data_dir: str | None = flag(
        None, "folder of GLUE's TSV files (see utils/download_glue_data.py); the hub if not given"
    )
    max_seq_length: int | None = flag(
        None,
        "longer texts are cut to this number of tokens (default: 128, or as many as the model "
        "takes)",
        least=1,
    )
    pad_to_max_length: bool = flag(
        False, "pad every text to max_seq_length, not to the longest of its batch"
    )
    train_file: str | None = flag(
        None, "CSV or JSON lines of your own: one or two text columns, and the column 'label'"
    )
    text_columns: list[str] | None = flag(
        None, "the text columns of your own files, one or two, if it is not clear which they are"
    )
    label_column: str | None = flag(None, "the label's column in your own files (default: label)")

    @property
    def task(self) -> GlueTask | None:
        """The GLUE task, or None for the user's own files."""
        return glue_task(self.task_name) if self.task_name else None

    def __post_init__(self) -> None:
        if self.task_name is not None:
            self.task_name = glue_task(self.task_name).name
            for name in ("text_columns", "label_column"):
                if getattr(self, name) is not None:
                    raise ValueError(f"--{name} is for files of your own, not for --task_name")
            for split, path in self.files.items():
                if path is not None:
                    raise ValueError(
                        f"--{split}_file {path} would not be read: leave --task_name out, or the "
                        "file (GLUE's own are in --data_dir)"
                    )
            return
        if not any(self.files.values()):
            raise ValueError("give --task_name, or --train_file / --validation_file / --test_file")
        self.check_files()


# ------------------------------------------------------------------------------------------------
# Data
# ------------------------------------------------------------------------------------------------


def splits_of(task: GlueTask | None, args: TrainingArguments) -> list[str]:
    """Returns the names of the splits that a run uses.

    MNLI has two splits to evaluate and two to predict.
    """
    names = needed_splits(args)
    if task is None or task.name != "mnli":
        return names
    halves = {name: [f"{name}_matched", f"{name}_mismatched"] for name in ("validation", "test")}
    return [split for name in names for split in halves.get(name, [name])]


def load_glue(
    task: GlueTask, data_dir: str | None, splits: list[str], cache_dir: str | None
) -> TextData:
    """Loads a GLUE task, from its TSV files or from the hub."""
    for split in splits:
        task.check_split(split)
    keys = tuple(key for key in task.text_keys if key)
    if data_dir is None:
        if task.name == "mnli-mm":
            raise ValueError("--task_name mnli evaluates on mnli-mm as well: give mnli")
        way_out = f"`{download_command(task, 'glue_data')}` has another source: then give "
        way_out += "--data_dir glue_data, or copy such a folder from another machine"
        loaded = load_data_set(HUB_GLUE, task.name, cache_dir, way_out)
        sets = {split: loaded[split].select_columns([*keys, "label"]) for split in splits}
    else:
        sets = {split: glue_table(task.name, data_dir, split, cache_dir) for split in splits}
    return TextData(sets, keys, task.label_words, keys, task)


@dataclass
class PreparedTexts(Prepared):
    """The settings and the data from which a run's model is made and trained.

    Args:
        data: the texts.
        order: for each of the data's classes, its output in the trained head.
    """

    data: TextData
    order: tuple[int, ...]


def prepare(
    model_args: ModelArguments,
    data_args: DataTrainingArguments,
    args: TrainingArguments,
    adapters: Sequence[Adapter],
    splits: list[str],
) -> PreparedTexts:
    """Reads settings, data and tokenizer, and checks that they fit together."""
    config = load_config(model_args)
    keep_to_layers(model_args, config, adapters)
    if args.cls_dropout is not None and not hasattr(config, "cls_dropout"):
        raise ValueError(f"--cls_dropout: a {config.model_type} model has no such dropout")
    origin = starting_point_of(model_args, config, adapters)
    if data_args.task:
        data = load_glue(data_args.task, data_args.data_dir, splits, model_args.cache_dir)
    else:
        data = load_own_files(
            data_args.files,
            splits,
            data_args.text_columns,
            data_args.label_column,
            origin,
            model_args.cache_dir,
        )
    check_task(data, origin, args.do_train)
    if args.metric_for_best_model not in (None, "loss"):  # the check has to import sklearn
        check_scores(args, score([0, 1], [0, 1], data))

    tokenizer = open_tokenizer(model_args, config)
    is_pair = len(data.text_keys) == 2
    data_args.max_seq_length = choose_length(data_args.max_seq_length, config, tokenizer, is_pair)
    names = dict(enumerate(data.labels or default_labels(1)))
    settings: dict[str, Any] = {
        "id2label": names,
        "finetuning_task": data_args.task_name,
        "text_columns": data.columns,
    }
    if model_args.masking_prob > 0:
        settings["unk_token_id"] = tokenizer.unk_token_id
        settings["special_token_ids"] = tokenizer.all_special_ids
    config = settings_of(model_args, args, num_labels=len(names), **settings)
    consistency.check(config)
    padded = data_args.pad_to_max_length
    return PreparedTexts(
        config,
        tokenizer,
        tokenize(data, tokenizer, data_args),
        default_data_collator if padded else DataCollatorWithPadding(tokenizer),
        data,
        origin.order_of(data.labels),
    )


def check_task(data: TextData, origin: StartingPoint, training: bool) -> None:
    """Refuses to evaluate a head on a task or on classes that it was not trained for."""
    if data.task and _family(data.task.name) != _family(origin.task):
        origin.check_task(data.task.name, training)
    origin.check_texts(data.columns, training)
    if not origin.order_of(data.labels):
        origin.check_labels(data.labels, training)


def _family(task: str | None) -> str | None:
    """Returns one name for the tasks that share MNLI's head: its two halves and the diagnostics."""
    return "mnli" if task in ("mnli", "mnli-mm", "ax") else task


def settings_of(
    model_args: ModelArguments, args: TrainingArguments, **settings: Any
) -> PretrainedConfig:
    """Returns the model's settings, with those of this run."""
    if args.cls_dropout is not None:
        settings["cls_dropout"] = args.cls_dropout
    consistent = {name: getattr(model_args, name) for name in ("reg_loss_wgt", "masking_prob")}
    return load_config(model_args, **consistent, **settings)


def tokenize(
    data: TextData, tokenizer: PreTrainedTokenizerBase, data_args: DataTrainingArguments
) -> dict[str, Dataset]:
    """Returns the splits with token ids instead of texts, limited to --max_…_samples."""
    # `encode` must refer only to what changes its results, as the cache's key covers all of that.
    keys, length = data.text_keys, data_args.max_seq_length
    padding = "max_length" if data_args.pad_to_max_length else False

    def encode(rows: dict[str, list]) -> dict[str, list]:
        beat()
        texts = [rows[key] for key in keys]
        encoded = tokenizer(*texts, padding=padding, max_length=length, truncation=True)
        return {**encoded, CUT: truncated_rows(tokenizer, texts, encoded["attention_mask"], length)}

    tokenized = {
        split: first_rows(texts, split, data_args).map(
            encode,
            batched=True,
            remove_columns=list(data.text_keys),
            load_from_cache_file=not data_args.overwrite_cache,
            desc=f"tokenizing {split}",
        )
        for split, texts in data.splits.items()
    }
    return drop_cuts(tokenized, length)


# ------------------------------------------------------------------------------------------------
# Run
# ------------------------------------------------------------------------------------------------


def metrics_for(data: TextData) -> Callable[[EvalPrediction], dict[str, float]]:
    """Returns the function that computes an evaluation's metrics."""

    def compute(evaluated: EvalPrediction) -> dict[str, float]:
        return score(_predictions(evaluated.predictions, data), evaluated.label_ids, data)

    return compute


def score(predictions: ArrayLike, labels: ArrayLike, data: TextData) -> dict[str, float]:
    """Returns the task's metrics; for the user's own data, those for classes or for scores."""
    if data.task is not None:
        return glue_compute_metrics(data.task.name, predictions, labels)
    own_metrics = regression_metrics if data.is_regression else classification_metrics
    return own_metrics(predictions, labels)


def _predictions(logits: np.ndarray, data: TextData) -> np.ndarray:
    return logits[:, 0] if data.is_regression else logits.argmax(axis=1)


def evaluate(trainer: Trainer, splits: dict[str, Dataset]) -> None:
    """Evaluates every validation split; the names of MNLI's mismatched metrics end in ``_mm``."""
    results: dict[str, float] = {}
    for split in (name for name in splits if name.startswith("validation")):
        # In the log, each has names of its own, or TensorBoard would show one as the other.
        suffix = "_mm" if split.endswith("_mismatched") else ""
        metrics = trainer.evaluate(splits[split], metric_key_prefix=f"eval{suffix}")
        metrics[f"eval{suffix}_samples"] = len(splits[split])
        for name, value in metrics.items():
            results[f"eval{name.removeprefix(f'eval{suffix}')}{suffix}"] = value
    report(trainer, "eval", results, trainer.eval_dataset)


def predict(trainer: Trainer, splits: dict[str, Dataset], data: TextData) -> None:
    """Writes ``test_results_<task>.txt`` for every test split."""
    for split in (name for name in splits if name.startswith("test")):
        unlabeled = splits[split].remove_columns({"label"} & set(splits[split].column_names))
        values = _predictions(trainer.predict(unlabeled).predictions, data)
        words = [f"{v:.3f}" if data.is_regression else data.labels[v] for v in values]
        task = data.task.name if data.task else "None"
        task += "-mm" if split.endswith("_mismatched") else ""
        if trainer.is_world_process_zero():
            path = Path(trainer.args.output_dir, f"test_results_{task}.txt")
            write_predictions(path, words)
            logger.info("predictions of %s: %s", split, path)


def fine_tune(
    model_args: ModelArguments, data_args: DataTrainingArguments, args: TrainingArguments
) -> None:
    """Loads the model and the data, then trains, evaluates and predicts as the flags ask for."""
    checkpoint, adapters = open_run(model_args, args, AutoModelForSequenceClassification.role)
    prepared = prepare(model_args, data_args, args, adapters, splits_of(data_args.task, args))
    datasets = prepared.datasets
    set_seed(args.seed)
    model = build_model(
        AutoModelForSequenceClassification,
        model_args,
        prepared.config,
        adapters,
        args,
        prepared.order,
    )
    trainer = prepared.trainer(model, args, metrics_for(prepared.data))
    if args.do_train:
        train(trainer, checkpoint)
    if args.do_eval:
        evaluate(trainer, datasets)
    if args.do_predict:
        predict(trainer, datasets, prepared.data)
    trainer.log_end()


# ------------------------------------------------------------------------------------------------
# Before a run
# ------------------------------------------------------------------------------------------------


def estimate(
    model_args: ModelArguments,
    data_args: DataTrainingArguments,
    args: TrainingArguments,
    estimate_args: EstimateArguments,
) -> None:
    """Prints an estimate of what training takes.

    It reads data in files, for the lengths of its texts, but neither weights nor data on the hub.
    """
    adapters = begin_estimate(model_args, args, AutoModelForSequenceClassification.role)
    if estimate_args.estimate_length is None and (data_args.data_dir or data_args.train_file):
        set_up_datasets(model_args.cache_dir)
        prepared = prepare(model_args, data_args, args, adapters, ["train"])
        config, dataset, counted = prepared.config, prepared.datasets["train"], True
        collator = prepared.collator
    else:
        keep_to_layers(model_args, load_config(model_args), adapters)
        config, dataset, counted = _without_data(model_args, data_args, args, estimate_args)
        collator = default_data_collator
    auto_class = AutoModelForSequenceClassification
    print_estimate(auto_class, config, args, estimate_args, dataset, collator, counted)


def _without_data(
    model_args: ModelArguments,
    data_args: DataTrainingArguments,
    args: TrainingArguments,
    estimate_args: EstimateArguments,
) -> tuple[PretrainedConfig, list[dict[str, Any]], bool]:
    """Makes texts of equal length, for the estimate of a run whose data is not read.

    Returns:
        The model's settings, the texts, and whether there are as many as in the training set.
    """
    task = data_args.task
    settings: dict[str, Any] = {"num_labels": task.num_labels if task else 2}
    if model_args.masking_prob > 0:  # any ids will do for an estimate
        settings |= {"unk_token_id": 0, "special_token_ids": [1]}
    config = settings_of(model_args, args, **settings)
    length = estimate_args.estimate_length or data_args.max_seq_length
    length = length or min(DEFAULT_LENGTH, config.longest_sequence or DEFAULT_LENGTH)
    check_length(config, length)
    count = task.train_examples if task else None
    if count is not None and data_args.max_train_samples is not None:
        count = min(count, data_args.max_train_samples)
    label = 0.0 if config.num_labels == 1 else 0
    row = {"input_ids": [0] * length, "attention_mask": [1] * length, "label": label}
    return config, [row] * (count or args.train_batch_size), count is not None


FLAGS = (ModelArguments, DataTrainingArguments)


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, and runs what it asks for."""
    start(argv, __doc__, FLAGS, fine_tune, estimate)


if __name__ == "__main__":
    run_script(main)
