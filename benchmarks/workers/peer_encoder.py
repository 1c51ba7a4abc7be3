"""Builds a LoRA step of PEFT on upstream's encoders.

Runs in the environment of requirements-peers.txt.
"""

from functools import partial

import torch
from peer_training import training_step
from peft import LoraConfig, get_peft_model
from roberta_rows import LEARNING_RATE, MAX_GRAD_NORM, make_batch
from timing import Step, run
from upstream import versions

from transformers import AutoModelForSequenceClassification, PretrainedConfig


def run_steps(config_class: type[PretrainedConfig], targets: list[str], head: list[str]) -> None:
    """Measures the steps of a classifier; see timing.py.

    Args:
        config_class: a class of configurations with the settings of the plan's shape.
        targets: the names of the modules that LoRA adapts.
        head: the names of the modules that are trained as well.
    """
    run(partial(make_step, config_class, targets, head), make_batch, versions())


def make_step(
    config_class: type[PretrainedConfig], targets: list[str], head: list[str], plan: dict
) -> Step:
    """Returns the step that the plan asks for, with default attention and adapters' dtype."""
    model = AutoModelForSequenceClassification.from_config(
        config_class(**plan["shape"]), dtype=getattr(torch, plan["weights"])
    )
    lora = LoraConfig(
        task_type="SEQ_CLS",
        r=plan["rank"],
        lora_alpha=plan["alpha"],
        target_modules=targets,
        modules_to_save=head,
    )
    model = get_peft_model(model, lora)
    return training_step(
        plan, model, lambda batch: model(**batch).loss, LEARNING_RATE, MAX_GRAD_NORM
    )
