"""Checks, before training, that the model and the data support the settings."""

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from loralib.adapters.families import backbone_prefixes, in_backbone
from loralib.lora_layer import lora_layers
from loralib.text import quoted
from loralib.training import cuda_graphs
from loralib.wrappers import unwrapped

from . import consistency
from .modeling_encoder import EncoderForSequenceClassification
from .modeling_utils import PreTrainedModel
from .trainer_data import is_iterable_only, length_of, overrides
from .trainer_weights import adapted_by
from .training_args import TrainingArguments

logger = logging.getLogger(__name__)

# Private methods of transformers 4.4.2's Trainer that subclasses override. This one lacks them.
HOOKS_NOT_CALLED = (
    "_gather_and_numpify",
    "_get_learning_rate",
    "_load_optimizer_and_scheduler",
    "_maybe_log_save_evaluate",
    "_nested_gather",
    "_remove_unused_columns",
    "_rotate_checkpoints",
    "_save",
    "_wrap_model",
)

# The heads whose loss leaves out a row of filler tokens.
_HEADS_WITH_GRAPHS = (
    "masked_lm",
    "question_answering",
    "sequence_classification",
    "token_classification",
)


def check_hooks(trainer_class: type) -> None:
    """Warns of overridden methods that this Trainer never calls and would otherwise ignore."""
    unused = [name for name in HOOKS_NOT_CALLED if hasattr(trainer_class, name)]
    if unused:
        logger.warning(
            "%s has %s, which this Trainer does not call: override a public method instead, such "
            "as compute_loss, training_step, save_model or get_train_dataloader",
            *(trainer_class.__name__, ", ".join(unused)),
        )


def check_training_set(dataset: Any, args: TrainingArguments) -> None:
    """Refuses a training set that lacks a length or an index where the settings need one.

    Raises:
        ValueError: it lacks one, or it is a dict of sets.
    """
    _check_one_set("train_dataset", dataset)
    if length_of(dataset) is None and args.max_steps <= 0:
        raise ValueError("the train_dataset has no length: give --max_steps")
    if args.group_by_length and is_iterable_only(dataset):
        raise ValueError("--group_by_length needs a map-style train_dataset, not an iterable one")


def check_same_precision(
    model: nn.Module, before: TrainingArguments, now: TrainingArguments
) -> None:
    """Refuses to train a model in another precision if its weights were rounded for the one before.

    Raises:
        ValueError: its frozen weights have been rounded to half precision.
    """
    dtype = before.compute_dtype
    if dtype in (torch.float32, now.compute_dtype) or not isinstance(model, PreTrainedModel):
        return  # other models' weights are not rounded
    if any(weight.dtype is dtype and not weight.requires_grad for weight in model.parameters()):
        raise ValueError(
            f"the model's frozen weights have been rounded to {str(dtype).removeprefix('torch.')}: "
            "to train in another precision, read the model again and give it to a new Trainer"
        )


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Checks that an optimizer would train the model.

    There is only a warning if it would train something else, or the model and something else, which
    the loss may depend on.

    Raises:
        ValueError: it would train nothing.
    """
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    known = {id(parameter) for parameter in held}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained or any(id(parameter) in known for parameter in trained):
        _warn_of_others(held, model)
        return
    message = (
        "the optimizer has none of the model's trainable parameters: make it of this model's, "
        "and after LoRA is added"
    )
    if not any(parameter.requires_grad for parameter in held):
        raise ValueError(message)
    logger.warning(message)


def _warn_of_others(held: Sequence[nn.Parameter], model: nn.Module) -> None:
    own = {id(parameter) for parameter in model.parameters()}
    if any(parameter.requires_grad and id(parameter) not in own for parameter in held):
        logger.warning(
            "the optimizer also trains parameters outside of the model, which are not saved, also "
            "in checkpoints, nor averaged over several processes: make them a part of the model"
        )


def check_base_frozen(model: nn.Module, args: TrainingArguments) -> None:
    """Checks that the files of LoRA and other adapters will hold all of the base that is trained.

    If the full model is saved next to them, there is only a warning.

    Raises:
        ValueError: they will not, and they are all that is saved.
    """
    kinds, prefixes = adapted_by(model), backbone_prefixes()
    left_out = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and in_backbone(name, prefixes)
        and not any(kind.holds(name, prefixes) for kind in kinds)
    ]
    if not kinds or not left_out:
        return
    message = (
        f"{left_out[0]} of the base is trained, and {kinds[0].files[0]} will not hold it: call "
        f"model.train_only({[kind.part for kind in kinds]}) first, which freezes the base, and not "
        "the head"
    )
    if args.save_lora_only:
        raise ValueError(f"--save_lora_only: {message}")
    logger.warning(message)


def untrained(optimizer: Optimizer, model: nn.Module) -> set[str]:
    """Returns the names of parameters that are trainable, but that the optimizer does not have."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    own = model.named_parameters()
    return {name for name, p in own if p.requires_grad and id(p) not in held}


def check_evaluation_set(dataset: Any) -> None:
    """Refuses a set to evaluate that has no length.

    Raises:
        ValueError: it has none, or it is a dict of sets.
    """
    _check_one_set("the set to evaluate", dataset)
    if length_of(dataset) is None:
        raise ValueError("the set to evaluate has no length: give one that has, such as a list")


def _check_one_set(name: str, dataset: Any) -> None:
    """Refuses a dict of sets, such as a `DatasetDict`, but not one of examples by their number."""
    if isinstance(dataset, Mapping) and any(not isinstance(key, int) for key in dataset):
        raise ValueError(
            f"{name} is a dict of sets, {quoted(map(str, dataset))}: give one of them (evaluate "
            "takes others, one at a call)"
        )


def check_model(model: nn.Module, args: TrainingArguments, label_names: Sequence[str]) -> None:
    """Refuses settings that the model does not support.

    Args:
        model: the model to train.
        args: the settings.
        label_names: the arguments of its forward that are labels.

    Raises:
        ValueError: the model does not support a setting.
    """
    ours = isinstance(model, PreTrainedModel)
    if not ours and isinstance(unwrapped(model), PreTrainedModel):
        raise ValueError(
            f"Trainer: {type(model).__name__} wraps the model, whose files would lack its "
            "config.json: give the model itself (--torch_compile compiles it, and with several "
            "processes the Trainer adds DDP)"
        )
    for name in ("gradient_checkpointing", "torch_compile", "save_lora_only"):
        if getattr(args, name) and not ours:
            raise ValueError(f"--{name} needs a model of this package: leave it out")
    if args.save_lora_only and not adapted_by(model):
        raise ValueError(
            "--save_lora_only needs a model with LoRA, adapters or BitFit: add --apply_lora, "
            "--apply_adapter or --apply_bitfit"
        )
    if args.lora_plus_ratio != 1 and not lora_layers(model):
        raise ValueError("--lora_plus_ratio needs a model with LoRA: add --apply_lora")
    if ours:
        consistency.check(model.config)
        known = inspect.signature(model.forward).parameters
        unknown = [name for name in label_names if name not in known]
        if unknown:
            raise ValueError(
                f"--label_names: {type(model).__name__} takes no {', '.join(unknown)}: leave the "
                "flag out, or name the arguments of forward that are labels"
            )
    if args.label_smoothing_factor > 0:
        _check_smoothing(model, label_names)


def why_no_graphs(model: nn.Module, args: TrainingArguments) -> str | None:
    """Returns why a model cannot be trained with CUDA graphs, or None if it can."""
    of_run = cuda_graphs.why_no_graphs(args.device, args.torch_compile)
    if of_run is not None:
        return of_run
    if not isinstance(model, PreTrainedModel):
        return "--cuda_graphs needs a model of this package: leave it out"
    if model.config.gradient_checkpointing:  # by the flag, or as the model was read
        return "--cuda_graphs and --gradient_checkpointing do not go together: leave one out"
    if args.world_size > 1 and args.ddp_find_unused_parameters:
        return "--cuda_graphs and --ddp_find_unused_parameters do not go together: leave one out"
    if model.head not in _HEADS_WITH_GRAPHS:
        return (
            "--cuda_graphs does not support multiple choice and causal language models: leave it "
            "out"
        )
    if _has_own_loss_of_scores(model):
        return (
            "--cuda_graphs does not support a forward of your own that learns scores: leave it out"
        )
    if model.config.output_attentions or getattr(model.config, "is_decoder", False):
        return "--cuda_graphs does not support output_attentions and is_decoder: leave it out"
    if consistency.asks_for(model.config):
        return (
            "--cuda_graphs and consistency training (--reg_loss_wgt, --masking_prob) do not go "
            "together: leave one out"
        )
    return None


def _has_own_loss_of_scores(model: PreTrainedModel) -> bool:
    """Returns whether a loss that is not this package's may count the score of a filler row."""
    own = EncoderForSequenceClassification
    return (
        isinstance(model, own)
        and model.config.num_labels == 1
        and overrides(model, own, ["forward"])
    )


def _check_smoothing(model: nn.Module, label_names: Sequence[str]) -> None:
    if isinstance(model, PreTrainedModel) and consistency.asks_for(model.config):
        raise ValueError(
            "--label_smoothing_factor and consistency training (--reg_loss_wgt, "
            "--masking_prob) do not go together: leave one out"
        )
    if len(label_names) != 1:
        raise ValueError("--label_smoothing_factor needs exactly one name in --label_names")
    labels = inspect.signature(model.forward).parameters.get(label_names[0])
    if labels is not None and labels.default is inspect.Parameter.empty:
        raise ValueError(
            "--label_smoothing_factor needs a model that can be called without "
            f"{label_names[0]}, for its logits"
        )
