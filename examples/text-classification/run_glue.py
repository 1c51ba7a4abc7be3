"""Fine-tune RoBERTa or DeBERTa-v2, with LoRA or without, on GLUE or on a CSV or JSON file.

    python -m torch.distributed.launch --nproc_per_node=1 \
        examples/text-classification/run_glue.py \
        --model_name_or_path roberta-base --task_name rte --do_train --do_eval \
        --apply_lora --lora_r 8 --lora_alpha 16 --learning_rate 5e-4 --output_dir rte

The paper's baselines are --apply_adapter and --apply_bitfit, which go with --apply_lora and with
each other; with none of the three, all weights are trained. All flags can also come from a JSON
file: run_glue.py settings.json.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    from loralib.training.process import begin

    begin()

import numpy as np
from numpy.typing import ArrayLike

from loralib.adapters.adapter import Adapter
from loralib.io.atomic import atomic_write
from loralib.text import in_short
from loralib.training.watch import beat
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PretrainedConfig,
    PreTrainedModel,
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
from transformers.data.text_columns import (
    LABEL,
    TEXT_KEYS,
    Columns,
    check_not_empty,
    choose_columns,
    take_columns,
)
from transformers.data.text_files import read_table
from transformers.data.text_labels import (
    as_scores,
    check_classes,
    check_varied,
    is_score,
    label_names,
    number_labels,
    whole_scores,
)
from transformers.fine_tuning.adapted_model import (
    Origin,
    build_model,
    keep_to_layers,
    load_config,
    open_tokenizer,
    origin_of,
    untrained_model,
)
from transformers.fine_tuning.arguments import AdaptedModelArguments, DataArguments
from transformers.fine_tuning.data_sets import first_rows, load_data_set
from transformers.fine_tuning.script import (
    begin_estimate,
    check_scores,
    needed_splits,
    open_run,
    print_estimate,
    start,
    train,
)
from transformers.hf_argparser import flag
from transformers.trainer_estimate import EqualRows, EstimateArguments
from transformers.utils.cli import (
    DEFAULT_LENGTH,
    check_length,
    choose_length,
    cut_rows,
    report_cut,
    run_script,
    set_up_datasets,
)

if TYPE_CHECKING:  # else imported where data is read: --help and wrong flags need not wait for it
    from datasets import Dataset

logger = logging.getLogger(__name__)

HUB_GLUE = "nyu-mll/glue"
# The column that says of each row whether its text was cut.
CUT = "cut"


@dataclass
class ModelArguments(AdaptedModelArguments):
    """The model, how it is adapted, and consistency training."""

    apply_rdrop: bool = flag(False, "R-Drop: the same as --reg_loss_wgt 1.0")
    apply_cutoff: bool = flag(False, "Cutoff: the same as --reg_loss_wgt 1.0 --masking_prob 0.1")
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
    """The data."""

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


@dataclass
class TextData:
    """Texts by split, with labels as numbers.

    Args:
        splits: by name; columns are the text columns and, where there are labels, ``label``.
        text_keys: names of the text columns, one or two.
        labels: names of the classes in the order of their numbers; empty for scores.
        columns: what the text columns were called where the data is from.
        task: the GLUE task, None for one's own files.
    """

    splits: dict[str, Dataset]
    text_keys: tuple[str, ...]
    labels: tuple[str, ...]
    columns: tuple[str, ...]
    task: GlueTask | None = None

    @property
    def is_regression(self) -> bool:
        """Whether labels are scores."""
        return not self.labels


def splits_of(task: GlueTask | None, args: TrainingArguments) -> list[str]:
    """Names of the splits that a run uses; MNLI has two to evaluate and two to predict."""
    names = needed_splits(args)
    if task is None or task.name != "mnli":
        return names
    halves = {name: [f"{name}_matched", f"{name}_mismatched"] for name in ("validation", "test")}
    return [split for name in names for split in halves.get(name, [name])]


def load_glue(
    data_args: DataTrainingArguments, splits: list[str], cache_dir: str | None
) -> TextData:
    """A GLUE task, from its TSV files or from the hub."""
    task = glue_task(data_args.task_name)
    keys = tuple(key for key in task.text_keys if key)
    if data_args.data_dir is None:
        if task.name == "mnli-mm":
            raise ValueError("--task_name mnli evaluates on mnli-mm as well: give mnli")
        way_out = f"`{download_command(task, 'glue_data')}` has another source: then give "
        way_out += "--data_dir glue_data, or such a folder of another machine"
        loaded = load_data_set(HUB_GLUE, task.name, cache_dir, way_out)
        sets = {split: loaded[split].select_columns([*keys, "label"]) for split in splits}
    else:
        folder = data_args.data_dir
        sets = {split: glue_table(task.name, folder, split, cache_dir) for split in splits}
    return TextData(sets, keys, task.label_words, keys, task)


def load_own_files(
    data_args: DataTrainingArguments, splits: list[str], origin: Origin, cache_dir: str | None
) -> TextData:
    """One's own CSV or JSON files.

    Args:
        data_args: names the files.
        splits: which of them are needed.
        origin: what the run begins with: where that is trained, its classes keep their order, and
            what its texts were called tells which they are.
        cache_dir: where to keep the tables that are made of them; None for the usual place.
    """
    files = data_args.files
    for split in splits:
        if files[split] is None:
            raise ValueError(f"this run needs --{split}_file")
    given, label = data_args.text_columns, data_args.label_column or LABEL
    first = files[splits[0]]
    # Training may begin with a model and read other texts.
    known = () if "train" in splits else origin.texts
    if label in known:
        raise ValueError(
            f"{origin.source} was trained on the texts of '{label}': give another name for "
            "the labels' column by --label_column, even if the file has no labels"
        )
    table = read_table(first, given or known, cache_dir)
    has_labels = splits[0] != "test"
    columns = choose_columns(table, first, given, label, known, origin.labels, has_labels)

    def read(split: str) -> Dataset:
        table = read_table(files[split], columns.texts, cache_dir)
        # A test set's labels, if it has any, are not used.
        return take_columns(table, files[split], columns, labelled=split != "test")

    sets = {split: read(split) for split in splits}
    labelled = {split: data for split, data in sets.items() if split != "test"}
    if "train" not in sets and not origin.labels and files["train"] is not None:
        # The model does not name its classes: their order is that of its training set.
        labelled["train"] = read("train")
    if "train" in sets:
        check_not_empty(sets["train"], columns, files["train"])
        check_varied(sets["train"], files["train"])
    numbered, labels = own_labels(labelled, files, columns, origin, is_training="train" in sets)
    sets |= {split: data for split, data in numbered.items() if split in sets}
    what = f"classes {in_short(labels)}" if labels else "scores"
    logger.info(
        "%s: texts from %s%s",
        first,
        " and ".join(columns.texts),
        f"; labels from {label}: {what}" if labelled else "",
    )
    return TextData(sets, TEXT_KEYS[: len(columns.texts)], labels, columns.texts)


def own_labels(
    labelled: dict[str, Dataset],
    files: Mapping[str, str],
    columns: Columns,
    origin: Origin,
    is_training: bool,
) -> tuple[dict[str, Dataset], tuple[str, ...]]:
    """The splits that have labels, with numbers for them, and the classes' names: none for scores.

    Args:
        labelled: the splits by name, as they were read.
        files: their names.
        columns: which of theirs they were taken from.
        origin: what the run begins with.
        is_training: whether it gets a new head, else its own has to fit.

    Raises:
        ValueError: labels are of two kinds, or of another than the head's, are not known, or
            texts, see `check_classes`.
    """
    if not is_training and origin.outputs == 1:
        return {split: as_scores(data, files[split]) for split, data in labelled.items()}, ()
    scores = {split: is_score(data) for split, data in labelled.items()}
    whole = whole_numbers(data for data in labelled.values() if is_score(data))
    if len(set(scores.values())) > 1:
        kinds = ("classes", "scores")
        listed = ", ".join(f"{kinds[of_scores]} in {files[s]}" for s, of_scores in scores.items())
        raise ValueError(f"the labels are of two kinds: {listed}{without_points(whole)}")
    if any(scores.values()):
        if not is_training:
            raise ValueError(
                f"{origin.source} has a head of {origin.outputs} classes, but the data's labels "
                f"are scores{without_points(whole)}"
            )
        if origin.outputs != 1:  # else it gives scores already
            tell_whole_scores(whole, files["train"])
        return labelled, ()
    labels = label_names(labelled.get("train"), origin.labels)
    if not labels:
        origin.check_named()
    if is_training and labels != origin.labels:  # else a model was trained for them
        check_classes(labelled["train"], labels, columns, files["train"])
    numbered = {s: number_labels(data, labels, files[s]) for s, data in labelled.items()}
    return numbered, labels


def whole_numbers(scored: Iterable[Dataset]) -> list[float]:
    """The labels of sets that have scores, each once, where all are whole numbers; else none."""
    sets = [whole_scores(data) for data in scored]
    return sorted(set().union(*sets)) if all(sets) else []


def without_points(whole: Sequence[float]) -> str:
    """What to write for classes in place of whole numbers with a decimal point; "" without any."""
    listed = ", ".join(f"{value:.0f}" for value in whole[:3])
    return f"; if they are classes, write them without a point, as in {listed}" if whole else ""


def tell_whole_scores(whole: Sequence[float], path: str) -> None:
    """Says that labels such as 0.0 and 1.0 are taken for scores.

    It is a warning of two values, and of 0.0, 1.0, 2.0: these may be classes of a table that had
    missing values when it was saved, which gives numbers a decimal point.
    """
    if not whole:
        return
    listed = ", ".join(map(str, whole[:3])) + (", …" if len(whole) > 3 else "")
    may_be_classes = len(whole) == 2 or whole == [0, 1, 2]
    logger.log(
        logging.WARNING if may_be_classes else logging.INFO,
        "%s: the labels %s are taken for scores%s",
        *(path, listed, without_points(whole)),
    )


def tokenize(
    data: TextData, tokenizer: PreTrainedTokenizerBase, data_args: DataTrainingArguments
) -> dict[str, Dataset]:
    """The splits with token ids instead of texts, cut to the sizes asked for."""
    # The cache's key is all that the function refers to: only what changes its results.
    keys, length = data.text_keys, data_args.max_seq_length
    padding = "max_length" if data_args.pad_to_max_length else False

    def encode(rows: dict[str, list]) -> dict[str, list]:
        beat()
        texts = [rows[key] for key in keys]
        encoded = tokenizer(*texts, padding=padding, max_length=length, truncation=True)
        return {**encoded, CUT: cut_rows(tokenizer, texts, encoded["attention_mask"], length)}

    tokenized, cut = {}, {}
    for split, texts in data.splits.items():
        encoded = first_rows(texts, split, data_args).map(
            encode,
            batched=True,
            remove_columns=list(data.text_keys),
            load_from_cache_file=not data_args.overwrite_cache,
            desc=f"tokenizing {split}",
        )
        cut[split] = (sum(encoded[CUT][:]), len(encoded))
        tokenized[split] = encoded.remove_columns(CUT)
    report_cut(cut, length)
    return tokenized


# ------------------------------------------------------------------------------------------------
# Run
# ------------------------------------------------------------------------------------------------


def metrics_for(data: TextData) -> Callable[[EvalPrediction], dict[str, float]]:
    """What computes the metrics of an evaluation."""

    def compute(evaluated: EvalPrediction) -> dict[str, float]:
        return score(_predictions(evaluated.predictions, data), evaluated.label_ids, data)

    return compute


def score(predictions: ArrayLike, labels: ArrayLike, data: TextData) -> dict[str, float]:
    """The task's metrics; for one's own data those of classes, or of scores."""
    if data.task is not None:
        return glue_compute_metrics(data.task.name, predictions, labels)
    own_metrics = regression_metrics if data.is_regression else classification_metrics
    return own_metrics(predictions, labels)


def _predictions(logits: np.ndarray, data: TextData) -> np.ndarray:
    return logits[:, 0] if data.is_regression else logits.argmax(axis=1)


def evaluate(trainer: Trainer, splits: dict[str, Dataset]) -> None:
    """Evaluates every validation split; a second one's metrics end in ``_mm``, as MNLI's do."""
    results: dict[str, float] = {}
    for split in (name for name in splits if name.startswith("validation")):
        metrics = trainer.evaluate(splits[split])
        metrics["eval_samples"] = len(splits[split])
        suffix = "_mm" if split.endswith("_mismatched") else ""
        results.update({f"{name}{suffix}": value for name, value in metrics.items()})
    if trainer.state.epoch is not None:
        results["epoch"] = round(trainer.state.epoch, 2)
    trainer.log_metrics("eval", results)
    trainer.save_metrics("eval", results)


def predict(trainer: Trainer, splits: dict[str, Dataset], data: TextData) -> None:
    """Writes ``test_results_<task>.txt`` for every test split."""
    for split in (name for name in splits if name.startswith("test")):
        unlabelled = splits[split].remove_columns({"label"} & set(splits[split].column_names))
        values = _predictions(trainer.predict(unlabelled).predictions, data)
        words = [f"{v:.3f}" if data.is_regression else data.labels[v] for v in values]
        task = data.task.name if data.task else "None"
        task += "-mm" if split.endswith("_mismatched") else ""
        if trainer.is_world_process_zero():
            path = Path(trainer.args.output_dir, f"test_results_{task}.txt")
            with atomic_write(path) as temporary:
                lines = ["index\tprediction", *(f"{i}\t{word}" for i, word in enumerate(words))]
                temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
            logger.info("predictions of %s: %s", split, path)


FLAGS = (ModelArguments, DataTrainingArguments)


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, and does what it asks for."""
    start(argv, __doc__, FLAGS, fine_tune, estimate)


@dataclass
class Prepared:
    """What a run's model is made and trained on.

    Args:
        config: the model's settings for this run.
        data: the texts.
        tokenizer: the model's.
        datasets: the texts by split, as token ids.
        order: where the data's classes are among those that the head was trained for.
    """

    config: PretrainedConfig
    data: TextData
    tokenizer: PreTrainedTokenizerBase
    datasets: dict[str, Dataset]
    order: tuple[int, ...]

    def collator(self, data_args: DataTrainingArguments) -> Callable[[list], dict[str, Any]]:
        """What makes batches."""
        padded = data_args.pad_to_max_length
        return default_data_collator if padded else DataCollatorWithPadding(self.tokenizer)


def settings_of(
    model_args: ModelArguments, args: TrainingArguments, **settings: Any
) -> PretrainedConfig:
    """The model's settings, with those of this run."""
    if args.cls_dropout is not None:
        settings["cls_dropout"] = args.cls_dropout
    consistent = {name: getattr(model_args, name) for name in ("reg_loss_wgt", "masking_prob")}
    return load_config(model_args, **consistent, **settings)


def check_task(data: TextData, origin: Origin, training: bool) -> None:
    """Refuses to evaluate a head on a task or on classes that it was not trained for."""
    if data.task and _family(data.task.name) != _family(origin.task):
        origin.check_task(data.task.name, training)
    origin.check_texts(data.columns, training)
    if not origin.order_of(data.labels):
        origin.check_labels(data.labels, training)


def _family(task: str | None) -> str | None:
    """Tasks that share a head: MNLI's two halves, and the diagnostic set."""
    return "mnli" if task in ("mnli", "mnli-mm", "ax") else task


def prepare(
    model_args: ModelArguments,
    data_args: DataTrainingArguments,
    args: TrainingArguments,
    adapters: Sequence[Adapter],
    splits: list[str],
) -> Prepared:
    """Reads settings, data and tokenizer, and checks that they belong together."""
    config = load_config(model_args)
    keep_to_layers(model_args, config, adapters)
    if args.cls_dropout is not None and not hasattr(config, "cls_dropout"):
        raise ValueError(f"--cls_dropout: a {config.model_type} model has no such dropout")
    origin = origin_of(model_args, config, adapters)
    if data_args.task_name:
        data = load_glue(data_args, splits, model_args.cache_dir)
    else:
        data = load_own_files(data_args, splits, origin, model_args.cache_dir)
    check_task(data, origin, args.do_train)
    if args.metric_for_best_model not in (None, "loss"):  # else sklearn need not be imported yet
        check_scores(args, score([0, 1], [0, 1], data))

    tokenizer = open_tokenizer(model_args, config)
    is_pair = len(data.text_keys) == 2
    data_args.max_seq_length = choose_length(data_args.max_seq_length, config, tokenizer, is_pair)
    names = dict(enumerate(data.labels)) or {0: "LABEL_0"}
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
    datasets = tokenize(data, tokenizer, data_args)
    return Prepared(config, data, tokenizer, datasets, origin.order_of(data.labels))


def fine_tune(
    model_args: ModelArguments, data_args: DataTrainingArguments, args: TrainingArguments
) -> None:
    """Loads, trains, evaluates, predicts; as far as the flags ask for it."""
    checkpoint, adapters = open_run(model_args, args, AutoModelForSequenceClassification.role)
    splits = splits_of(glue_task(data_args.task_name) if data_args.task_name else None, args)
    prepared = prepare(model_args, data_args, args, adapters, splits)
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
    evaluated = [name for name in datasets if name.startswith("validation")]
    trainer = Trainer(
        model,
        args,
        prepared.collator(data_args),
        train_dataset=datasets.get("train"),
        eval_dataset=datasets[evaluated[0]] if evaluated else None,
        tokenizer=prepared.tokenizer,
        compute_metrics=metrics_for(prepared.data),
    )
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
    """Prints what training would take.

    Data in files is read, for the lengths of its texts. Weights are not, nor data on the hub.
    """
    adapters = begin_estimate(model_args, args, AutoModelForSequenceClassification.role)
    if estimate_args.estimate_length is None and (data_args.data_dir or data_args.train_file):
        set_up_datasets(model_args.cache_dir)
        prepared = prepare(model_args, data_args, args, adapters, ["train"])
        config, dataset = prepared.config, prepared.datasets["train"]
        collator, counted = prepared.collator(data_args), True
    else:
        keep_to_layers(model_args, load_config(model_args), adapters)
        config, dataset, counted = _without_data(model_args, data_args, args, estimate_args)
        collator = default_data_collator
    print_estimate(new_model, config, args, estimate_args, dataset, collator, counted)


def new_model(config: PretrainedConfig) -> PreTrainedModel:
    """A model without trained weights, frozen except what is to be trained."""
    return untrained_model(AutoModelForSequenceClassification, config)


def _without_data(
    model_args: ModelArguments,
    data_args: DataTrainingArguments,
    args: TrainingArguments,
    estimate_args: EstimateArguments,
) -> tuple[PretrainedConfig, EqualRows, bool]:
    """What an estimate takes for a run whose data is not read: texts of one length.

    Returns:
        The model's settings, the texts, and whether there are as many as in the training set.
    """
    task = glue_task(data_args.task_name) if data_args.task_name else None
    settings: dict[str, Any] = {"num_labels": task.num_labels if task else 2}
    if model_args.masking_prob > 0:  # which tokens are hidden changes nothing
        settings |= {"unk_token_id": 0, "special_token_ids": [1]}
    config = settings_of(model_args, args, **settings)
    length = estimate_args.estimate_length or data_args.max_seq_length
    length = length or min(DEFAULT_LENGTH, config.longest_sequence or DEFAULT_LENGTH)
    check_length(config, length)
    count = task.train_examples if task else None
    if count is not None and data_args.max_train_samples is not None:
        count = min(count, data_args.max_train_samples)
    label = 0.0 if config.num_labels == 1 else 0
    rows = EqualRows(count or args.train_batch_size, length, label)
    return config, rows, count is not None


if __name__ == "__main__":
    run_script(main)
