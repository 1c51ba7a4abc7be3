"""Builds a training step of this project's encoders as in its Trainer, of LoRA or every weight."""

from functools import partial

import roberta_rows
from our_training import training_step
from roberta_rows import LEARNING_RATE, MAX_GRAD_NORM
from timing import Batch, Step
from torch.optim import AdamW

import transformers
from loralib.nn.packing import PackedRows
from loralib.training.cuda_graphs import fill_up
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_losses import IGNORED_LABEL

VERSIONS = {"this project": transformers.__version__}


def make_batch(plan: dict, index: int, lengths: list[int]) -> Batch:
    """Makes a batch as the Trainer's loader does, with packed_rows."""
    batch = roberta_rows.make_batch(plan, index, lengths)
    batch = {**batch, "packed_rows": PackedRows(batch["attention_mask"])}
    return fill_up(batch, {"labels": IGNORED_LABEL}) if plan["graphs"] else batch


def make_step(
    config_class: type[PretrainedConfig], model_class: type[PreTrainedModel], plan: dict
) -> Step:
    """Returns the step of a classifier that the plan asks for.

    Args:
        config_class: a class of configurations with the settings of the plan's shape.
        model_class: a class of classifiers with such configurations.
        plan: the worker's plan.
    """
    lora = {} if plan["full"] else {"lora_r": plan["rank"], "lora_alpha": plan["alpha"]}
    model = model_class(config_class(**plan["shape"], apply_lora=not plan["full"], **lora))
    if not plan["full"]:
        model.train_only(("lora",))
    make_optimizer = partial(AdamW, lr=LEARNING_RATE, fused=True)
    return training_step(
        plan, model, make_optimizer, lambda batch: model(**batch).loss, MAX_GRAD_NORM
    )
