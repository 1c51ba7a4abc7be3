"""Fine-tune RoBERTa or DeBERTa-v2, with LoRA or without, on GLUE or on a CSV or JSON file.

    python -m torch.distributed.launch --nproc_per_node=1 \
        examples/text-classification/run_glue.py \
        --model_name_or_path roberta-base --task_name rte --do_train --do_eval \
        --apply_lora --lora_r 8 --lora_alpha 16 --output_dir rte

The paper's baselines are --apply_adapter and --apply_bitfit, which go with --apply_lora and with
each other; with none of the three, all weights are trained. All flags can also come from a JSON
file: run_glue.py settings.json.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from loralib.adapters.adapter import LORA, Adapter, base_biases, plain
from loralib.adapters.deltas import lora_pairs
from loralib.adapters.formats import read_adapter
from loralib.adapters.metadata import AdapterMetadata
from loralib.errors import AlphaError
from loralib.functional import VARIANTS
from loralib.initialization import INITIALIZATIONS
from loralib.io.atomic import atomic_write
from loralib.targets import layer_of, layers_of_words, pattern_of_words
from loralib.training import watch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    HfArgumentParser,
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
from transformers.adapter_kinds import PATHS
from transformers.configuration_utils import ADAPTER_TYPES, LORA_TARGETS, targets_of_modules
from transformers.data.metrics import classification_metrics, regression_metrics
from transformers.data.processors import GlueTask, glue_task, load_glue_split
from transformers.data.text_files import (
    LABEL,
    TEXT_KEYS,
    choose_columns,
    is_score,
    read_table,
    take_columns,
)
from transformers.hf_argparser import flag
from transformers.trainer_estimate import (
    EqualRows,
    EstimateArguments,
    estimate_run,
    published_settings,
)
from transformers.utils.cli import (
    DEFAULT_LENGTH,
    check_length,
    check_vocabulary,
    choose_length,
    cut_rows,
    find_checkpoint,
    hide_data_bars,
    report_cut,
    run,
    set_up_logging,
    sole_use_of_output,
)

if TYPE_CHECKING:  # else imported where data is read: --help and wrong flags need not wait for it
    from datasets import Dataset

logger = logging.getLogger(__name__)

HUB_GLUE = "nyu-mll/glue"
# The column that says of each row whether its text was cut.
CUT = "cut"


@dataclass
class ModelArguments:
    """The model, and how it is adapted."""

    model_name_or_path: str = field(metadata={"help": "a model's folder, or its name on the hub"})
    config_name: str | None = flag(None, "folder or name of the settings, if not the model's")
    tokenizer_name: str | None = flag(None, "folder or name of the tokenizer, if not the model's")
    cache_dir: str | None = flag(None, "where to keep what is downloaded")
    use_fast_tokenizer: bool = flag(True, "both values give the same ids")
    model_revision: str = flag("main", "branch, tag or commit on the hub")
    use_auth_token: bool = flag(False, "use the token of `hf auth login`, for private models")
    apply_lora: bool = flag(False, "train LoRA and the head; the model itself stays as it is")
    lora_alpha: int | None = flag(None, "the LoRA update is scaled by lora_alpha / lora_r")
    lora_r: int | None = flag(None, "rank of the LoRA update")
    lora_path: str | None = flag(
        None,
        "a LoRA adapter to start from or to evaluate: .bin or .safetensors, a folder with one, a "
        "folder of PEFT's, or the name of a repository on the hub",
    )
    lora_targets: list[str] | None = flag(
        None,
        f"the projections that LoRA adapts (default: query value): {', '.join(LORA_TARGETS)}, of "
        "which intermediate and output are the feed-forward part's, up and down; ends of modules' "
        "names; globs; or all-linear",
    )
    lora_layers: list[str] | None = flag(
        None,
        "the layers that LoRA adapts: numbers from 0 on and ranges such as 6-11 (default: all)",
    )
    lora_rank_pattern: list[str] | None = flag(
        None,
        "other ranks than lora_r, as target=rank …, such as value=4 layer.0.*=16; of several that "
        "match a module the first one counts",
    )
    lora_alpha_pattern: list[str] | None = flag(
        None, "other alphas than lora_alpha, as target=alpha …, likewise"
    )
    lora_variant: str | None = flag(
        None,
        "of the update (default: lora): rslora scales it by lora_alpha / √lora_r (arXiv "
        "2312.03732), dora trains magnitude and direction apart (arXiv 2402.09353)",
        choices=list(VARIANTS),
    )
    lora_init: str | None = flag(
        None,
        "where A and B start (default: A at random, B at zero): pissa at the weight's largest "
        "singular values (arXiv 2404.02948), olora at its QR factors (arXiv 2406.01775), "
        "orthogonal at random with B A = 0",
        choices=list(INITIALIZATIONS),
    )
    lora_freeze_A: bool | None = flag(
        None,
        "LoRA-FA (arXiv 2308.03303): A stays as it starts, B alone is trained (default: false)",
    )
    lora_dropout: float | None = flag(None, "dropout on the LoRA update's input (default: 0)")
    lora_positions: bool | None = flag(
        None,
        "for DeBERTa-v2: LoRA also reaches the positions that its projections share with contents, "
        "as PEFT's does (default: false, as in the release)",
    )
    apply_adapter: bool = flag(False, "train bottleneck adapters and the head")
    adapter_type: str | None = flag(
        None,
        "houlsby (the default) after attention and feed-forward, pfeiffer after the latter alone",
        choices=list(ADAPTER_TYPES),
    )
    adapter_size: int | None = flag(None, "width of the bottleneck (default: 64)")
    adapter_path: str | None = flag(
        None,
        "bottleneck adapters to start from or to evaluate: .bin or .safetensors, a folder with one "
        "or with AdapterHub's pytorch_adapter.bin and pytorch_model_head.bin, or a repository",
    )
    apply_bitfit: bool = flag(False, "train the biases and the head")
    bitfit_path: str | None = flag(None, "a file of trained biases, as lora_path is a LoRA file")
    apply_rdrop: bool = flag(False, "R-Drop: the same as --reg_loss_wgt 1.0")
    apply_cutoff: bool = flag(False, "Cutoff: the same as --reg_loss_wgt 1.0 --masking_prob 0.1")
    reg_loss_wgt: float = flag(
        0.0, "consistency training: weight of the difference between two passes over a batch"
    )
    masking_prob: float = flag(
        0.0, "consistency training: share of the tokens that are hidden from the second pass"
    )

    def __post_init__(self) -> None:
        for name, values in (("apply_rdrop", (1.0, 0.0)), ("apply_cutoff", (1.0, 0.1))):
            if not getattr(self, name):
                continue
            if (self.reg_loss_wgt, self.masking_prob) not in ((0.0, 0.0), values):
                raise ValueError(
                    f"--{name} is --reg_loss_wgt {values[0]} --masking_prob {values[1]}, and goes "
                    "with no other values of these"
                )
            self.reg_loss_wgt, self.masking_prob = values


@dataclass
class DataTrainingArguments:
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
    )
    overwrite_cache: bool = flag(False, "tokenize again what an earlier run has cached")
    pad_to_max_length: bool = flag(
        False, "pad every text to max_seq_length, not to the longest of its batch"
    )
    max_train_samples: int | None = flag(None, "train on this many examples at most")
    max_val_samples: int | None = flag(None, "evaluate on this many examples at most")
    max_test_samples: int | None = flag(None, "predict this many examples at most")
    train_file: str | None = flag(
        None, "CSV or JSON lines of your own: one or two text columns, and the column 'label'"
    )
    text_columns: list[str] | None = flag(
        None, "the text columns of your own files, one or two, where it is not clear which they are"
    )
    label_column: str | None = flag(None, "the label's column in your own files (default: label)")
    validation_file: str | None = flag(None, "the same, to evaluate on")
    test_file: str | None = flag(None, "the same, to predict; needs no labels")

    def __post_init__(self) -> None:
        if self.task_name is not None:
            self.task_name = glue_task(self.task_name).name
            for name in ("text_columns", "label_column"):
                if getattr(self, name) is not None:
                    raise ValueError(f"--{name} is for files of your own, not for --task_name")
            return
        files = [file for file in (self.train_file, self.validation_file, self.test_file) if file]
        if not files:
            raise ValueError("give --task_name, or --train_file / --validation_file / --test_file")
        for file in files:
            if Path(file).suffix not in (".csv", ".json", ".jsonl"):
                raise ValueError(f"{file}: its name must end in .csv, .json or .jsonl")


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
        task: the GLUE task, None for one's own files.
    """

    splits: dict[str, Dataset]
    text_keys: tuple[str, ...]
    labels: tuple[str, ...]
    task: GlueTask | None = None

    @property
    def is_regression(self) -> bool:
        """Whether labels are scores."""
        return not self.labels


def needed_splits(task: GlueTask | None, args: TrainingArguments) -> list[str]:
    """Names of the splits that a run uses; MNLI has two to evaluate and two to predict."""
    stages = {"train": args.do_train, "validation": args.do_eval, "test": args.do_predict}
    names = [name for name, wanted in stages.items() if wanted]
    if task is None or task.name != "mnli":
        return names
    halves = {name: [f"{name}_matched", f"{name}_mismatched"] for name in ("validation", "test")}
    return [split for name in names for split in halves.get(name, [name])]


def load_glue(
    data_args: DataTrainingArguments, splits: list[str], cache_dir: str | None
) -> TextData:
    """A GLUE task, from its TSV files or from the hub."""
    from datasets import load_dataset

    task = glue_task(data_args.task_name)
    keys = tuple(key for key in task.text_keys if key)
    if data_args.data_dir is None:
        if task.name == "mnli-mm":
            raise ValueError("--task_name mnli evaluates on mnli-mm as well; give that")
        loaded = load_dataset(HUB_GLUE, task.name, cache_dir=cache_dir)
        sets = {split: loaded[split].select_columns([*keys, "label"]) for split in splits}
    else:
        sets = {split: _from_tsv(task, data_args.data_dir, split) for split in splits}
    return TextData(sets, keys, task.label_words, task)


def _from_tsv(task: GlueTask, data_dir: str, split: str) -> Dataset:
    from datasets import Dataset

    examples = load_glue_split(task.name, data_dir, split)
    texts = zip(task.text_keys, ("text_a", "text_b"), strict=True)
    columns = {key: [getattr(e, part) for e in examples] for key, part in texts if key}
    if examples[0].label is not None:
        number = task.label_words.index if task.label_words else float
        columns["label"] = [number(example.label) for example in examples]
    return Dataset.from_dict(columns)


def load_own_files(
    data_args: DataTrainingArguments, splits: list[str], known_labels: Sequence[str]
) -> TextData:
    """One's own CSV or JSON files.

    Args:
        data_args: names the files.
        splits: which of them are needed.
        known_labels: the classes of a model that is already trained; they keep their order.
    """
    files = {
        "train": data_args.train_file,
        "validation": data_args.validation_file,
        "test": data_args.test_file,
    }
    for split in splits:
        if files[split] is None:
            raise ValueError(f"this run needs --{split}_file")
    asked, label = data_args.text_columns, data_args.label_column or LABEL
    first = files[splits[0]]
    columns = choose_columns(read_table(first, asked or ()), first, asked, label)

    def read(split: str) -> Dataset:
        table = read_table(files[split], columns.texts)
        # A test set's labels, if it has any, are not used.
        return take_columns(table, files[split], columns, labelled=split != "test")

    sets = {split: read(split) for split in splits}
    labelled = {split: data for split, data in sets.items() if split != "test"}
    if "train" not in sets and not known_labels and files["train"] is not None:
        # The model does not name its classes: their order is that of its training set.
        labelled["train"] = read("train")
    labels: tuple[str, ...] = ()
    scores = {split: is_score(data) for split, data in labelled.items()}
    if len(set(scores.values())) > 1:
        kinds = ("classes", "scores")
        listed = ", ".join(f"{kinds[of_scores]} in {files[s]}" for s, of_scores in scores.items())
        raise ValueError(f"the labels are of two kinds: {listed}")
    if not any(scores.values()):
        labels = _label_names(labelled.get("train"), known_labels)
        for split in labelled.keys() & sets.keys():
            sets[split] = _number_labels(sets[split], labels, files[split])
    if "train" in sets:
        _check_varied(sets["train"], files["train"])
    what = f"classes {', '.join(labels)}" if labels else "scores"
    logger.info(
        "%s: texts from %s%s",
        first,
        " and ".join(columns.texts),
        f"; labels from {label}: {what}" if labelled else "",
    )
    return TextData(sets, TEXT_KEYS[: len(columns.texts)], labels)


def _check_varied(train: Dataset, path: str) -> None:
    """Refuses a training set with one label: there is nothing in it to tell apart."""
    from datasets import ClassLabel

    labels = train.unique("label")
    if len(labels) < 2:
        feature = train.features["label"]
        only = feature.int2str(labels[0]) if isinstance(feature, ClassLabel) else labels[0]
        raise ValueError(
            f"{path}: all {len(train)} rows have the label '{only}'; training needs at least two "
            "labels"
        )


def _label_names(train: Dataset | None, known: Sequence[str]) -> tuple[str, ...]:
    """The classes in the model's order, or, where the training set has others, sorted."""
    if train is None:
        return tuple(known)
    values = train.unique("label")
    if {str(value) for value in values} <= set(known):
        return tuple(known)
    return tuple(str(value) for value in sorted(values))


def _number_labels(data: Dataset, labels: tuple[str, ...], path: str) -> Dataset:
    from datasets import ClassLabel

    if not labels:
        raise ValueError(
            f"{path}: the model does not name its labels; give the --train_file that it was "
            "trained on as well"
        )
    numbers = {label: number for number, label in enumerate(labels)}
    words = [str(label) for label in data["label"]]
    for row, word in enumerate(words):
        if word not in numbers:
            raise ValueError(
                f"{path}: row {row + 1}: unknown label '{word}' (expected {', '.join(labels)})"
            )
    numbered = data.remove_columns("label").add_column("label", [numbers[word] for word in words])
    return numbered.cast_column("label", ClassLabel(names=list(labels)))


def tokenize(
    data: TextData, tokenizer: PreTrainedTokenizerBase, data_args: DataTrainingArguments
) -> dict[str, Dataset]:
    """The splits with token ids instead of texts, cut to the sizes asked for."""
    limits = {
        "train": data_args.max_train_samples,
        "validation": data_args.max_val_samples,
        "test": data_args.max_test_samples,
    }

    # The cache's key is all that the function refers to: only what changes its results.
    keys, length = data.text_keys, data_args.max_seq_length
    padding = "max_length" if data_args.pad_to_max_length else False

    def encode(rows: dict[str, list]) -> dict[str, list]:
        watch.beat()
        texts = [rows[key] for key in keys]
        encoded = tokenizer(*texts, padding=padding, max_length=length, truncation=True)
        return {**encoded, CUT: cut_rows(tokenizer, texts, encoded["attention_mask"], length)}

    tokenized, cut = {}, {}
    for split, texts in data.splits.items():
        limit = limits[split.split("_")[0]]
        if limit is not None:
            texts = texts.select(range(min(limit, len(texts))))
        if len(texts) == 0:
            raise ValueError(f"the {split} set holds no examples")
        encoded = texts.map(
            encode,
            batched=True,
            remove_columns=list(data.text_keys),
            load_from_cache_file=not data_args.overwrite_cache,
            desc=f"tokenizing {split}",
        )
        cut[split] = (sum(encoded[CUT]), len(encoded))
        tokenized[split] = encoded.remove_columns(CUT)
    report_cut(cut, length)
    return tokenized


# ------------------------------------------------------------------------------------------------
# Model
# ------------------------------------------------------------------------------------------------


# The flags that say how a model is adapted, by the switch that they need.
ADAPTATIONS = {
    "apply_lora": (
        *("lora_r", "lora_alpha", "lora_rank_pattern", "lora_alpha_pattern"),
        *("lora_targets", "lora_layers", "lora_positions"),
        *("lora_variant", "lora_init", "lora_freeze_A", "lora_dropout"),
    ),
    "apply_adapter": ("adapter_type", "adapter_size"),
    "apply_bitfit": (),
}
# What words of the command line are as settings.
FROM_WORDS: dict[str, Callable[[list[str]], Any]] = {
    "lora_layers": partial(layers_of_words, "--lora_layers"),
    "lora_rank_pattern": partial(pattern_of_words, "--lora_rank_pattern", int),
    "lora_alpha_pattern": partial(pattern_of_words, "--lora_alpha_pattern", float),
}
# Those that a file of trained weights answers: its metadata's field -> flag.
FROM_METADATA = {
    "rank": "lora_r",
    "alpha": "lora_alpha",
    "targets": "lora_targets",
    "positions": "lora_positions",
    "variant": "lora_variant",
    "initialization": "lora_init",
    "freeze_A": "lora_freeze_A",
    "rank_pattern": "lora_rank_pattern",
    "alpha_pattern": "lora_alpha_pattern",
    "adapter_type": "adapter_type",
    "adapter_size": "adapter_size",
}


def read_adapters(model_args: ModelArguments) -> list[Adapter]:
    """The files that the flags name: of LoRA, of adapters, of biases."""
    given = ((kind, getattr(model_args, path)) for kind, path in PATHS.items())
    where = {"cache_dir": model_args.cache_dir, "token": model_args.use_auth_token}
    where["lora_alpha"] = model_args.lora_alpha
    return [read_adapter(path, kind, **where) for kind, path in given if path]


def check_arguments(
    model_args: ModelArguments, args: TrainingArguments, adapters: Sequence[Adapter]
) -> None:
    """Fills in what LoRA and adapter files say of themselves, and refuses flags that clash."""
    if not (args.do_train or args.do_eval or args.do_predict):
        raise ValueError("nothing to do: give --do_train, --do_eval or --do_predict")
    paths = {kind.switch: path for kind, path in PATHS.items()}
    for switch, names in ADAPTATIONS.items():
        for name in (paths[switch], *names):
            if getattr(model_args, name) is not None and not getattr(model_args, switch):
                raise ValueError(f"--{name} needs --{switch}")
    for adapter in adapters:
        if adapter.kind is LORA and adapter.metadata is None:
            raise AlphaError(adapter.source)
        if adapter.metadata is None or adapter.metadata.base_fingerprint is None:
            base = model_args.model_name_or_path
            logger.warning("%s does not say its base: unverified: %s", adapter.source, base)
        if args.do_train and adapter.kind is LORA and base_biases(adapter.tensors):
            raise ValueError(
                f"{adapter.source}: brings biases of the base, which LoRA training would leave out "
                "of its files; merge it with its base to continue from there (utils/convert.py)"
            )
        _fill_in(model_args, adapter)


def _fill_in(model_args: ModelArguments, adapter: Adapter) -> None:
    """Sets the flags that were not given to what an adapter says of itself."""
    for field_name, flag_name in FROM_METADATA.items():
        value = getattr(adapter.metadata, field_name, None)
        if value is None or getattr(model_args, flag_name) is not None:
            continue
        if field_name == "targets":
            value = _targets_of(adapter)
        elif isinstance(value, Mapping):
            value = [f"{module}={number}" for module, number in value.items()]
        setattr(model_args, flag_name, value)


def _targets_of(adapter: Adapter) -> list[str]:
    """What --lora_targets would be for an adapter."""
    try:
        targets = targets_of_modules(adapter.lora.targets)
    except ValueError as error:
        raise ValueError(
            f"{adapter.source}: adapts {plain(adapter.lora.targets)}, which this script has no "
            "LoRA layers for; utils/convert.py can merge it with its base"
        ) from error
    modules = list(lora_pairs(adapter.tensors, adapter.source))
    # Where a target is not adapted in all layers that are, the modules have to be named.
    return targets if len(modules) == len(targets) * len(_layers_of(adapter)) else modules


def _layers_of(adapter: Adapter) -> set[int | None]:
    return {layer_of(module) for module in lora_pairs(adapter.tensors, adapter.source)}


def keep_to_layers(
    model_args: ModelArguments, config: PretrainedConfig, adapters: Sequence[Adapter]
) -> None:
    """Sets --lora_layers, if it was not given, to the layers of a model that an adapter adapts."""
    for adapter in adapters:
        if adapter.kind is LORA and model_args.lora_layers is None:
            layers = _layers_of(adapter)
            if layers < {*range(config.num_hidden_layers)}:
                model_args.lora_layers = [str(layer) for layer in sorted(layers)]


def load_config(model_args: ModelArguments, **settings: Any) -> PretrainedConfig:
    """The model's settings, with how it is adapted and trained."""
    for switch, names in ADAPTATIONS.items():
        if getattr(model_args, switch):
            given = {name: getattr(model_args, name) for name in names}
            settings.update(
                {
                    name: FROM_WORDS.get(name, lambda value: value)(value)
                    for name, value in given.items()
                    if value is not None
                }
            )
            settings[switch] = True
    # These are settings of this run, not of the model that it starts from.
    settings.update(reg_loss_wgt=model_args.reg_loss_wgt, masking_prob=model_args.masking_prob)
    config, unknown = AutoConfig.from_pretrained(
        model_args.config_name or model_args.model_name_or_path,
        return_unused_kwargs=True,
        **_where(model_args),
        **settings,
    )
    for name in unknown:
        raise ValueError(
            f"a {config.model_type} model has no setting {name}, which a flag or an adapter's file "
            "asks for"
        )
    for switch in ADAPTATIONS:
        if getattr(config, switch) and not getattr(model_args, switch):
            logger.warning(
                "%s was made with --%s, and stays so; begin with its base to train it otherwise",
                *(model_args.model_name_or_path, switch),
            )
    return config


def _where(model_args: ModelArguments) -> dict[str, Any]:
    return {
        "cache_dir": model_args.cache_dir,
        "revision": model_args.model_revision,
        "use_auth_token": model_args.use_auth_token,
    }


def known_labels(config: PretrainedConfig, info: AdapterMetadata | None) -> tuple[str, ...]:
    """Names of the classes that the adapter or the model was trained for, if it was."""
    names = tuple(config.id2label[number] for number in sorted(config.id2label))
    if info is not None and info.labels:
        names = info.labels
    return () if names[0].startswith("LABEL_") else names


def check_task(
    data: TextData, known: tuple[str, ...], trained_for: str | None, source: str, training: bool
) -> None:
    """Refuses to evaluate a head on a task or on classes that it was not trained for.

    Training may begin with the head of another task, as the release's recipes do with MNLI's.
    """
    task = data.task.name if data.task else None
    if task and trained_for and _family(task) != _family(trained_for):
        if not training:
            raise ValueError(f"{source} was trained for {trained_for}, not for {task}")
        logger.warning(
            "%s was trained for %s: training on %s begins there", source, trained_for, task
        )
    if known and data.labels and known != data.labels and not training:
        raise ValueError(
            f"{source} was trained for the labels {', '.join(known)}; "
            f"the data has {', '.join(data.labels)}"
        )


def _family(task: str) -> str:
    """Tasks that share a head: MNLI's two halves, and the diagnostic set."""
    return "mnli" if task in ("mnli", "mnli-mm", "ax") else task


def build_model(
    model_args: ModelArguments,
    config: PretrainedConfig,
    adapters: Sequence[Adapter],
    training: bool,
) -> PreTrainedModel:
    """The model, with the adapters in it, and frozen except what is to be trained."""
    model = AutoModelForSequenceClassification.from_pretrained(
        model_args.model_name_or_path, config=config, **_where(model_args)
    )
    new = model.load_adapters(adapters, new_head=training)
    for adapter in adapters:
        own = adapter.tensors.keys() - set(new)
        logger.info("loaded %s tensors from %s", len(own), adapter.source)
    if new:
        source = adapters[0].source
        logger.warning("%s is for another task: newly initialized are %s", source, ", ".join(new))
    untrained = model.newly_initialized.difference(*(adapter.tensors for adapter in adapters))
    if untrained and not training:
        raise ValueError(
            f"{model_args.model_name_or_path} has no trained {min(untrained)}, …: there is nothing "
            "to evaluate; give --lora_path, or a model that is trained for the task"
        )
    train_adapted(model)
    return model


def train_adapted(model: PreTrainedModel) -> None:
    """Freezes a model except what it is adapted by and the head; all of it is trained else."""
    kinds = model.adapted_by
    if kinds:
        model.train_only(kind.part for kind in kinds)


def new_model(config: PretrainedConfig) -> PreTrainedModel:
    """A model without trained weights, frozen except what is to be trained."""
    model = AutoModelForSequenceClassification.from_config(config)
    train_adapted(model)
    return model


# ------------------------------------------------------------------------------------------------
# Run
# ------------------------------------------------------------------------------------------------


def metrics_for(data: TextData) -> Callable[[EvalPrediction], dict[str, float]]:
    """The task's metrics; for one's own data those of classes, or of scores."""

    def compute(evaluated: EvalPrediction) -> dict[str, float]:
        predictions = _predictions(evaluated.predictions, data)
        if data.task is not None:
            return glue_compute_metrics(data.task.name, predictions, evaluated.label_ids)
        own_metrics = regression_metrics if data.is_regression else classification_metrics
        return own_metrics(predictions, evaluated.label_ids)

    return compute


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


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, and does what it asks for with the output folder to itself."""
    set_up_logging()
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = HfArgumentParser(
        (ModelArguments, DataTrainingArguments, TrainingArguments, EstimateArguments),
        description=__doc__.split("\n")[0],
    )
    # What a launcher adds is in the environment, too.
    given = [arg for arg in argv if not arg.startswith(("--local_rank=", "--local-rank="))]
    if len(given) == 1 and given[0].endswith(".json"):
        model_args, data_args, args, asked = parser.parse_json_file(given[0])
    else:
        model_args, data_args, args, asked = parser.parse_args_into_dataclasses(argv)
    if asked.estimate:
        estimate(model_args, data_args, args, asked)
        return
    with sole_use_of_output(args):
        fine_tune(model_args, data_args, args)


@dataclass
class Prepared:
    """What a run's model is made and trained on.

    Args:
        config: the model's settings for this run.
        data: the texts.
        tokenizer: the model's.
        datasets: the texts by split, as token ids.
    """

    config: PretrainedConfig
    data: TextData
    tokenizer: PreTrainedTokenizerBase
    datasets: dict[str, Dataset]

    def collator(self, data_args: DataTrainingArguments) -> Callable[[list], dict[str, Any]]:
        """What makes batches."""
        padded = data_args.pad_to_max_length
        return default_data_collator if padded else DataCollatorWithPadding(self.tokenizer)


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
    info = next((adapter.metadata for adapter in adapters if adapter.metadata), None)
    known = known_labels(config, info)
    if data_args.task_name:
        data = load_glue(data_args, splits, model_args.cache_dir)
    else:
        data = load_own_files(data_args, splits, known)
    source = adapters[0].source if adapters else model_args.model_name_or_path
    check_task(data, known, info.task if info else config.finetuning_task, source, args.do_train)

    tokenizer = AutoTokenizer.from_pretrained(
        model_args.tokenizer_name or model_args.model_name_or_path,
        config=config,
        use_fast=model_args.use_fast_tokenizer,
        **_where(model_args),
    )
    check_vocabulary(tokenizer, config)
    is_pair = len(data.text_keys) == 2
    data_args.max_seq_length = choose_length(data_args.max_seq_length, config, tokenizer, is_pair)
    names = dict(enumerate(data.labels)) or {0: "LABEL_0"}
    settings: dict[str, Any] = {"id2label": names, "finetuning_task": data_args.task_name}
    if args.cls_dropout is not None:
        settings["cls_dropout"] = args.cls_dropout
    if model_args.masking_prob > 0:
        settings["unk_token_id"] = tokenizer.unk_token_id
        settings["special_token_ids"] = tokenizer.all_special_ids
    config = load_config(model_args, num_labels=len(names), **settings)
    consistency.check(config)
    return Prepared(config, data, tokenizer, tokenize(data, tokenizer, data_args))


def fine_tune(
    model_args: ModelArguments, data_args: DataTrainingArguments, args: TrainingArguments
) -> None:
    """Loads, trains, evaluates, predicts; as far as the flags ask for it."""
    hide_data_bars()
    checkpoint = find_checkpoint(args)
    logger.info("computing on %s, %s process(es)", args.device, args.world_size)
    adapters = read_adapters(model_args)
    check_arguments(model_args, args, adapters)
    splits = needed_splits(glue_task(data_args.task_name) if data_args.task_name else None, args)
    prepared = prepare(model_args, data_args, args, adapters, splits)
    datasets = prepared.datasets
    set_seed(args.seed)
    model = build_model(model_args, prepared.config, adapters, args.do_train)
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
        metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
        metrics["train_samples"] = len(datasets["train"])
        trainer.save_model()
        trainer.save_state()
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
    if args.do_eval:
        evaluate(trainer, datasets)
    if args.do_predict:
        predict(trainer, datasets, prepared.data)


# ------------------------------------------------------------------------------------------------
# Before a run
# ------------------------------------------------------------------------------------------------


def estimate(
    model_args: ModelArguments,
    data_args: DataTrainingArguments,
    args: TrainingArguments,
    asked: EstimateArguments,
) -> None:
    """Prints what training would take.

    Data in files is read, for the lengths of its texts. Weights are not, nor data on the hub.
    """
    if not args.do_train:
        raise ValueError("--estimate says what training takes: add --do_train")
    if model_args.config_name is None:
        model_args.config_name = published_settings(model_args.model_name_or_path)
    _leave_out_missing(model_args)
    adapters = read_adapters(model_args)
    check_arguments(model_args, args, adapters)
    if asked.estimate_length is None and (data_args.data_dir or data_args.train_file):
        hide_data_bars()
        prepared = prepare(model_args, data_args, args, adapters, ["train"])
        config, dataset = prepared.config, prepared.datasets["train"]
        collator, counted = prepared.collator(data_args), True
    else:
        keep_to_layers(model_args, load_config(model_args), adapters)
        config, dataset, counted = _without_data(model_args, data_args, args, asked)
        collator = default_data_collator
    taken = estimate_run(new_model, config, args, asked, dataset, collator, counted)
    if args.is_main_process:
        print(taken)


def _leave_out_missing(model_args: ModelArguments) -> None:
    """Takes back the flags of trained weights that are not there yet: others say their shape."""
    for path in PATHS.values():
        name = getattr(model_args, path)
        if name is not None and not os.path.exists(name):
            logger.warning("--%s %s is not there: its rank and targets are the flags'", path, name)
            setattr(model_args, path, None)


def _without_data(
    model_args: ModelArguments,
    data_args: DataTrainingArguments,
    args: TrainingArguments,
    asked: EstimateArguments,
) -> tuple[PretrainedConfig, EqualRows, bool]:
    """What an estimate takes for a run whose data is not read: texts of one length.

    Returns:
        The model's settings, the texts, and whether there are as many as in the training set.
    """
    task = glue_task(data_args.task_name) if data_args.task_name else None
    settings: dict[str, Any] = {"num_labels": task.num_labels if task else 2}
    if args.cls_dropout is not None:
        settings["cls_dropout"] = args.cls_dropout
    if model_args.masking_prob > 0:  # which tokens are hidden changes nothing
        settings |= {"unk_token_id": 0, "special_token_ids": [1]}
    config = load_config(model_args, **settings)
    length = asked.estimate_length or data_args.max_seq_length
    length = length or min(DEFAULT_LENGTH, config.longest_sequence or DEFAULT_LENGTH)
    check_length(config, length)
    count = task.train_examples if task else None
    if count is not None and data_args.max_train_samples is not None:
        count = min(count, data_args.max_train_samples)
    label = 0.0 if config.num_labels == 1 else 0
    rows = EqualRows(count or args.train_batch_size, length, label)
    return config, rows, count is not None


if __name__ == "__main__":
    run(main)
