"""Builds the model that a script trains or evaluates, with its adapters.

Flags and adapter files together define it. `check_arguments` fills in missing flags from the files'
metadata, `load_config` turns the flags into the model's settings, and `build_model` makes the
model, in which only the parameters to train are not frozen.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from loralib.adapters.adapter import LORA, Adapter, Kind, base_biases, in_words
from loralib.adapters.checks import check_family, warn_of_base
from loralib.adapters.deltas import lora_pairs
from loralib.adapters.families import Family
from loralib.adapters.formats import read_adapter
from loralib.errors import AlphaError, CheckpointError
from loralib.io.command_line import layers_of_words, pattern_of_words
from loralib.module_names import layer_of

from ..adaptation_settings import ADAPTATIONS, targets_of_modules
from ..adapter_kinds import BOTTLENECK, FROM_METADATA, PATHS, other_kind, without
from ..configuration_utils import PretrainedConfig
from ..modeling_utils import PreTrainedModel
from ..models.auto.configuration_auto import AutoConfig, supported_family_of
from ..models.registry import SUPPORTED
from ..tokenization_utils_base import PreTrainedTokenizerBase
from ..training_args import TrainingArguments
from ..utils.cli import load_tokenizer
from .arguments import AdaptedModelArguments
from .starting_point import WITH_ADAPTER

logger = logging.getLogger(__name__)

# For error messages: the script for each head.
SCRIPTS = {
    "sequence_classification": "run_glue.py",
    "token_classification": "run_ner.py",
    "question_answering": "run_qa.py",
    "multiple_choice": "run_swag.py",
}
# How flags that take a list of words become settings.
FROM_WORDS: dict[str, Callable[[list[str]], Any]] = {
    "lora_layers": partial(layers_of_words, "--lora_layers"),
    "lora_rank_pattern": partial(pattern_of_words, "--lora_rank_pattern", int),
    "lora_alpha_pattern": partial(pattern_of_words, "--lora_alpha_pattern", float),
}


def base_family(model_args: AdaptedModelArguments) -> Family | None:
    """Returns the family of the model that the flags name, or None if they name no LoRA for it."""
    if not model_args.lora_path:
        return None
    name = model_args.config_name or model_args.model_name_or_path
    where = {
        "cache_dir": model_args.cache_dir,
        "revision": model_args.model_revision,
        "token": model_args.use_auth_token,
    }
    return supported_family_of(name, where).family


def read_adapters(model_args: AdaptedModelArguments, family: Family | None = None) -> list[Adapter]:
    """Reads the adapter files that the flags name: LoRA, bottleneck adapters and biases.

    Args:
        model_args: the flags.
        family: the family of the model that they name. LoRA of another one is refused.
    """
    given = ((kind, getattr(model_args, path)) for kind, path in PATHS.items())
    where = {
        "cache_dir": model_args.cache_dir,
        "token": model_args.use_auth_token,
        "lora_alpha": model_args.lora_alpha,
    }
    adapters = [_read_adapter(path, kind, where) for kind, path in given if path]
    for adapter in adapters:
        if family is not None and adapter.kind == LORA:
            check_family(adapter, family)
    return adapters


def _read_adapter(path: str, kind: Kind, where: Mapping[str, Any]) -> Adapter:
    try:
        return read_adapter(path, kind, **where)
    except CheckpointError as error:
        other = other_kind(path, kind)
        if other is None:
            raise
        raise CheckpointError(
            f"{path}: holds what --{other.switch} has trained: give it as --{other.switch} "
            f"--{PATHS[other]}, and {without(kind)}"
        ) from error


def check_heads(adapters: Sequence[Adapter], head: str) -> None:
    """Refuses adapters whose metadata names another kind of head, before any data is read.

    Args:
        adapters: the adapters that the flags name.
        head: the head of this script's task, a key of `SCRIPTS`.

    Raises:
        CheckpointError: an adapter was trained for another head.
    """
    for adapter in adapters:
        theirs = adapter.metadata.head if adapter.metadata else None
        if theirs in (None, head):
            continue
        way_out = f": give it to {SCRIPTS[theirs]}" if theirs in SCRIPTS else ""
        trained, needed = (name.replace("_", " ") for name in (theirs, head))
        raise CheckpointError(
            f"{adapter.source}: was trained for {trained}, and this script is for {needed}{way_out}"
        )


def check_arguments(
    model_args: AdaptedModelArguments, args: TrainingArguments, adapters: Sequence[Adapter]
) -> None:
    """Refuses flags that clash, and fills in missing ones from the adapter files' metadata."""
    if not (args.do_train or args.do_eval or args.do_predict):
        raise ValueError("nothing to do: give --do_train, --do_eval or --do_predict")
    if args.do_predict and args.prediction_loss_only:
        raise ValueError("--prediction_loss_only leaves no predictions for --do_predict")
    paths = {kind.switch: path for kind, path in PATHS.items()}
    for switch, names in ADAPTATIONS.items():
        for name in (paths[switch], *names):
            if getattr(model_args, name) is not None and not getattr(model_args, switch):
                raise ValueError(f"--{name} needs --{switch}")
    for adapter in adapters:
        if adapter.kind == LORA and adapter.metadata is None:
            raise AlphaError(adapter.source)
        if adapter.metadata is None or adapter.metadata.base_fingerprint is None:
            warn_of_base(adapter.source, model_args.model_name_or_path)
        if args.do_train and adapter.kind == LORA and base_biases(adapter.tensors):
            raise ValueError(
                f"{adapter.source}: contains biases of the base, which LoRA training would not "
                "save; merge it with its base to continue from there (utils/convert.py)"
            )
        _fill_in(model_args, adapter)


def _fill_in(model_args: AdaptedModelArguments, adapter: Adapter) -> None:
    """Sets the flags that were not given from an adapter's metadata."""
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
    """Returns the value of --lora_targets that matches an adapter."""
    try:
        targets = targets_of_modules(adapter.lora.targets)
    except ValueError as error:
        raise ValueError(
            f"{adapter.source}: adapts {in_words(adapter.lora.targets)}, which this script has no "
            "LoRA layers for; utils/convert.py can merge it with its base"
        ) from error
    modules = list(lora_pairs(adapter.tensors, adapter.source))
    # If a target is adapted in some of the adapted layers only, every module has to be named.
    return targets if len(modules) == len(targets) * len(_layers_of(adapter)) else modules


def _layers_of(adapter: Adapter) -> set[int | None]:
    return {layer_of(module) for module in lora_pairs(adapter.tensors, adapter.source)}


def leave_out_missing(model_args: AdaptedModelArguments) -> None:
    """Clears the flags of adapter files that do not exist yet, and warns.

    An estimate takes their shapes from the other flags.
    """
    for path in PATHS.values():
        name = getattr(model_args, path)
        if name is not None and not os.path.exists(name):
            logger.warning(
                "--%s %s does not exist: rank and targets are taken from the flags", path, name
            )
            setattr(model_args, path, None)


def keep_to_layers(
    model_args: AdaptedModelArguments, config: PretrainedConfig, adapters: Sequence[Adapter]
) -> None:
    """Sets --lora_layers, if not given, to the layers that an adapter adapts (unless all)."""
    for adapter in adapters:
        if adapter.kind == LORA and model_args.lora_layers is None:
            layers = _layers_of(adapter)
            if layers < {*range(config.num_hidden_layers)}:
                model_args.lora_layers = [str(layer) for layer in sorted(layers)]


def load_config(model_args: AdaptedModelArguments, **settings: Any) -> PretrainedConfig:
    """Returns the model's settings, with those of its adapters and this run's `settings`."""
    # These belong to a run. The model's file may have those of the run that trained it.
    of_a_run = {"reg_loss_wgt": 0.0, "masking_prob": 0.0, "gradient_checkpointing": False}
    settings = {**of_a_run, **settings}
    for switch, names in ADAPTATIONS.items():
        if not getattr(model_args, switch):
            continue
        settings[switch] = True
        for name in names:
            value = getattr(model_args, name)
            if value is not None:
                settings[name] = FROM_WORDS[name](value) if name in FROM_WORDS else value
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
    return config


def _where(model_args: AdaptedModelArguments) -> dict[str, Any]:
    return {
        "cache_dir": model_args.cache_dir,
        "revision": model_args.model_revision,
        "use_auth_token": model_args.use_auth_token,
    }


def load_task_config(
    model_args: AdaptedModelArguments, args: TrainingArguments, adapters: Sequence[Adapter]
) -> PretrainedConfig:
    """Returns the settings of a run's model, for heads other than the sequence classifier.

    Raises:
        ValueError: --cls_dropout is given, which these heads do not have.
    """
    if args.cls_dropout is not None:
        raise ValueError("--cls_dropout is for text classifiers: leave it out")
    config = load_config(model_args)
    keep_to_layers(model_args, config, adapters)
    return config


def open_tokenizer(
    model_args: AdaptedModelArguments,
    config: PretrainedConfig,
    aligned: bool = False,
    **settings: Any,
) -> PreTrainedTokenizerBase:
    """Returns the model's tokenizer, or the one that --tokenizer_name names.

    Args:
        model_args: the flags that name it.
        config: the model's settings.
        aligned: whether it must map its tokens to words and characters.
        settings: as in `load_tokenizer`.

    Raises:
        ValueError: it has tokens that the model does not have, or cannot map tokens as `aligned`
            requires.
    """
    if aligned and not model_args.use_fast_tokenizer:
        raise ValueError(
            "--use_fast_tokenizer False: only a fast tokenizer knows which words and characters "
            "its tokens come from; leave it out"
        )
    return load_tokenizer(
        model_args.tokenizer_name or model_args.model_name_or_path,
        config,
        use_fast=model_args.use_fast_tokenizer,
        **settings,
        **_where(model_args),
    )


def build_model(
    auto_class: Any,
    model_args: AdaptedModelArguments,
    config: PretrainedConfig,
    adapters: Sequence[Adapter],
    args: TrainingArguments,
    order: Sequence[int] = (),
    way_out: str = f"{WITH_ADAPTER}, or a model that is trained for the task, or --do_train",
) -> PreTrainedModel:
    """Returns the model with its adapters, frozen except for the parameters to train.

    Args:
        auto_class: the class for the task's head, such as `AutoModelForSequenceClassification`.
        model_args: the flags that name the model.
        config: its settings.
        adapters: the adapters to load; may be empty.
        args: the run's settings: whether it trains (then the head may be a new one), and the
            precision.
        order: the head's output for each of the run's classes, see `StartingPoint.order_of`.
        way_out: for the error message, the flags to give if the head is untrained.

    Raises:
        ValueError: the head is not trained, and this run does not train it.
    """
    for switch in ADAPTATIONS if args.do_train else ():
        if getattr(config, switch) and not getattr(model_args, switch):
            logger.warning(
                "%s was trained with --%s, which stays on; to change that, start from its base",
                *(model_args.model_name_or_path, switch),
            )
    model = auto_class.from_pretrained(
        model_args.model_name_or_path,
        config=config,
        held_in=args.compute_dtype if config.is_adapted else torch.float32,
        brought={name for adapter in adapters for name in adapter.tensors},
        **_where(model_args),
    )
    new = model.load_adapters(adapters, new_head=args.do_train)
    for adapter in adapters:
        own = adapter.tensors.keys() - set(new)
        logger.info("loaded %s tensors from %s", len(own), adapter.source)
    if new:
        source = adapters[0].source
        logger.warning(
            "%s is for another task, so these are newly initialized: %s", source, ", ".join(new)
        )
    untrained = model.newly_initialized.difference(*(adapter.tensors for adapter in adapters))
    if untrained and not args.do_train:
        if all(BOTTLENECK.part in name for name in untrained):  # only their file is missing
            way_out = f"--{PATHS[BOTTLENECK]}, or {without(BOTTLENECK)}"
        raise ValueError(
            f"{model_args.model_name_or_path} has no trained {min(untrained)}, …: there is nothing "
            f"to evaluate; give {way_out}"
        )
    if list(order) != sorted(order):
        _reorder_outputs(model, order)
    train_adapted(model)
    return model


@torch.no_grad()
def _reorder_outputs(model: PreTrainedModel, order: Sequence[int]) -> None:
    """Puts a model's outputs into the order of the run's classes, which the metrics rely on."""
    head = SUPPORTED[model.config.model_type].family.heads[model.head]
    for parameter in model.get_submodule(head.logits).parameters():
        parameter.copy_(parameter[list(order)])
    logger.info("the outputs of %s are reordered to match the data's classes", head.logits)


def train_adapted(model: PreTrainedModel) -> None:
    """Freezes a model except for its adapters and head; without adapters, freezes nothing."""
    kinds = model.adapted_by
    if kinds:
        model.train_only(kind.part for kind in kinds)


def untrained_model(auto_class: Any, config: PretrainedConfig) -> PreTrainedModel:
    """Returns a model with untrained weights, frozen except for the parameters to train."""
    model = auto_class.from_config(config)
    train_adapted(model)
    return model
