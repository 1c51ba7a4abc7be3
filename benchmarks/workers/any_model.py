"""Upstream's models of any_model_step.py, and their batches. Runs in the environment of
requirements-peers.txt. Its plan has, besides timing.py's,

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

# Of labels: positions without a target.
NO_TARGET = -100


def roberta(shape: dict, dtype: torch.dtype) -> PreTrainedModel:
    """RoBERTa with a classification head."""
    return AutoModelForSequenceClassification.from_config(RobertaConfig(**shape), dtype=dtype)


def llama(shape: dict, dtype: torch.dtype) -> PreTrainedModel:
    """A decoder of Llama's kind with its language-model head."""
    config = LlamaConfig(**shape, use_cache=False)
    return LlamaForCausalLM._from_config(config, dtype=dtype)


MODELS: dict[str, Callable[[dict, torch.dtype], PreTrainedModel]] = {
    "RoBERTa-base": roberta,
    "Llama, 12 layers": llama,
}


def build(plan: dict) -> PreTrainedModel:
    """The model that the plan asks for: random weights, the default attention."""
    return MODELS[plan["model"]](plan["shape"], getattr(torch, plan["weights"]))


def make_batch(plan: dict, index: int, lengths: list[int]) -> dict[str, Tensor]:
    """Random tokens, padded on the right to the longest row; each row's label, or each token's."""
    batch = roberta_rows.make_batch({**plan, "pad_to": None}, index, lengths)
    if MODELS[plan["model"]] is llama:
        padding = batch["attention_mask"] == 0
        batch["labels"] = batch["input_ids"].masked_fill(padding, NO_TARGET)
    return batch


def make_step(plan: dict, model: nn.Module) -> Step:
    """A training step of the adapted model, the same for all contestants."""

    def loss_of(batch: Batch) -> Tensor:
        return model(**batch).loss

    return training_step(
        plan, model, loss_of, roberta_rows.LEARNING_RATE, roberta_rows.MAX_GRAD_NORM
    )
