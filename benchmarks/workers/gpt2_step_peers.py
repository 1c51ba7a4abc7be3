"""Times a LoRA step of PEFT on upstream's GPT-2, in the environment of requirements-peers.txt."""

import torch
import torch.nn.functional as F
from gpt2_rows import (
    ALPHA,
    DROPOUT,
    LABEL_SMOOTH,
    LEARNING_RATE,
    NO_CLIPPING,
    RANK,
    draw_rows,
)
from peer_training import training_step
from peft import LoraConfig, get_peft_model
from timing import Batch, Step, run
from torch import Tensor
from upstream import versions

from transformers import GPT2Config, GPT2LMHeadModel
from transformers.trainer_pt_utils import LabelSmoother

NO_TARGET = -100
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def make_batch(plan: dict, index: int, lengths: list[list[int]]) -> dict[str, Tensor]:
    """Makes a padded batch: input_ids, attention_mask and labels, each (rows, width)."""
    rows = draw_rows(plan, index, lengths)
    shape = len(rows), plan["pad_to"] or max(len(tokens) for tokens, _ in rows)
    input_ids, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, NO_TARGET)
    for row, (tokens, context) in enumerate(rows):
        input_ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = 1
        labels[row, context : len(tokens)] = tokens[context:]
    return {"input_ids": input_ids, "attention_mask": mask, "labels": labels}


def make_step(plan: dict) -> Step:
    """Returns the step that the plan asks for, with default attention and adapters' dtype."""
    config = GPT2Config(**plan["shape"], **NO_DROPOUT)
    model = GPT2LMHeadModel(config).to(getattr(torch, plan["weights"]))
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=RANK,
        lora_alpha=ALPHA,
        lora_dropout=DROPOUT,
        target_modules=["c_attn"],
        fan_in_fan_out=True,
    )
    model = get_peft_model(model, lora)
    smoother = LabelSmoother(LABEL_SMOOTH)

    def as_trainer(batch: Batch) -> Tensor:
        """Computes the loss of upstream's Trainer with a label_smoothing_factor."""
        outputs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        return smoother(outputs, batch["labels"], shift_labels=True)

    def as_release(batch: Batch) -> Tensor:
        """Computes the release's loss: token losses of all positions, padding too, times a mask."""
        logits = model(input_ids=batch["input_ids"]).logits
        log_probs = F.log_softmax(logits[:, :-1].float(), dim=-1)
        labels = batch["labels"][:, 1:]
        nll = -log_probs.gather(2, labels.clamp(min=0)[..., None])[..., 0]
        losses = (1 - LABEL_SMOOTH) * nll - LABEL_SMOOTH * log_probs.mean(dim=-1)
        mask = (labels != NO_TARGET).float()
        return (losses * mask).sum() / (mask.sum() + 0.0001)

    loss_of = as_release if plan["pad_to"] else as_trainer
    return training_step(plan, model, loss_of, LEARNING_RATE, NO_CLIPPING)


if __name__ == "__main__":
    run(make_step, make_batch, versions())
