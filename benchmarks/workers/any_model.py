"""Builds upstream's models of any_model_step.py, and their batches.

Runs in the environment of requirements-peers.txt. Its plan has the fields of timing.py, and

batches    lengths of the rows of each        model      a name in `MODELS`
targets    ends of the names to adapt         variant    "lora" or "dora"
rank, alpha, lora_dropout   LoRA's            modules_to_train   names of the new head, if any
"""

from collections.abc import Callable

import roberta_rows
import torch
from peer_training import training_step
from timing import Batch, Step
from torch import Tensor, nn

from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    RobertaConfig,
)

# The label of positions without a target.
NO_TARGET = -100


def roberta(shape: dict, dtype: torch.dtype) -> PreTrainedModel:
    """Builds a RoBERTa with a classification head."""
    return AutoModelForSequenceClassification.from_config(RobertaConfig(**shape), dtype=dtype)


def llama(shape: dict, dtype: torch.dtype) -> PreTrainedModel:
    """Builds a decoder like Llama, with its language-model head."""
    config = LlamaConfig(**shape, use_cache=False)
    return LlamaForCausalLM._from_config(config, dtype=dtype)


MODELS: dict[str, Callable[[dict, torch.dtype], PreTrainedModel]] = {
    "RoBERTa-base": roberta,
    "Llama, 12 layers": llama,
}


def build(plan: dict) -> PreTrainedModel:
    """Builds the model that the plan asks for, with random weights and the default attention."""
    return MODELS[plan["model"]](plan["shape"], getattr(torch, plan["weights"]))


def make_batch(plan: dict, index: int, lengths: list[int]) -> dict[str, Tensor]:
    """Makes a batch of random tokens, padded on the right, with labels for rows or for tokens."""
    batch = roberta_rows.make_batch({**plan, "pad_to": None}, index, lengths)
    if MODELS[plan["model"]] is llama:
        padding = batch["attention_mask"] == 0
        batch["labels"] = batch["input_ids"].masked_fill(padding, NO_TARGET)
    return batch


def make_step(plan: dict, model: nn.Module) -> Step:
    """Returns a training step of the adapted model, the same for all contestants."""

    def loss_of(batch: Batch) -> Tensor:
        return model(**batch).loss

    return training_step(
        plan, model, loss_of, roberta_rows.LEARNING_RATE, roberta_rows.MAX_GRAD_NORM
    )
