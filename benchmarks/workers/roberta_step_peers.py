"""A LoRA step of PEFT on upstream Transformers. Runs in the environment of requirements-peers.txt.

Only the workers whose names end in _peers, and upstream.py, import upstream packages.
"""

import torch
from peer_training import training_step
from peft import LoraConfig, get_peft_model
from roberta_rows import LEARNING_RATE, MAX_GRAD_NORM, make_batch
from timing import Step, run
from upstream import versions

from transformers import AutoModelForSequenceClassification, RobertaConfig


def make_step(plan: dict) -> Step:
    """The step that `plan` asks for; attention, adapters' dtype and head are PEFT's defaults."""
    model = AutoModelForSequenceClassification.from_config(
        RobertaConfig(**plan["shape"]), dtype=getattr(torch, plan["weights"])
    )
    lora = LoraConfig(
        task_type="SEQ_CLS",
        r=plan["rank"],
        lora_alpha=plan["alpha"],
        target_modules=["query", "value"],
    )
    model = get_peft_model(model, lora)
    return training_step(
        plan, model, lambda batch: model(**batch).loss, LEARNING_RATE, MAX_GRAD_NORM
    )


if __name__ == "__main__":
    run(make_step, make_batch, versions())
