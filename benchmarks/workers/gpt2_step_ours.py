"""Times a training step of this project's GPT-2 as in gpt2_ft.py, of LoRA or of every weight."""

from functools import partial

from gpt2_rows import (
    ALPHA,
    DROPOUT,
    LABEL_SMOOTH,
    LEARNING_RATE,
    NO_CLIPPING,
    RANK,
    draw_rows,
)
from our_training import training_step
from timing import Batch, Step, run
from torch import Tensor

import loralib as lora
from data_utils import Row, collate
from loralib.training.cuda_graphs import fill_up
from loralib.training.optimizer import AdamW
from model import GPT2Config, GPT2LMModel


def make_batch(plan: dict, index: int, lengths: list[list[int]]) -> Batch:
    """Makes a batch as for gpt2_ft.py: input, target, mask, each (rows, width), and packed_rows."""
    rows = draw_rows(plan, index, lengths)
    batch = collate([Row(tokens, len(tokens), context - 1) for tokens, context in rows])
    return fill_up(batch, {}) if plan["graphs"] else batch


def make_step(plan: dict) -> Step:
    """Returns the step that the plan asks for."""
    settings = {"lora_attn_dim": RANK, "lora_attn_alpha": ALPHA, "lora_dropout": DROPOUT}
    model = GPT2LMModel(GPT2Config(**plan["shape"], **({} if plan["full"] else settings)))
    if not plan["full"]:
        lora.mark_only_lora_as_trainable(model)
    make_optimizer = partial(AdamW, lr=LEARNING_RATE, weight_decay=0.01)

    def loss_of(batch: Batch) -> Tensor:
        tensors = (batch["input"], batch["target"], batch["mask"])
        return model(*tensors, LABEL_SMOOTH, batch["packed_rows"])

    return training_step(plan, model, make_optimizer, loss_of, NO_CLIPPING)


if __name__ == "__main__":
    run(make_step, make_batch, {"this project": lora.__version__})
