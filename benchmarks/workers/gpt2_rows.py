"""Batches of gpt2_step.py. Its plan has, besides timing.py's,

batches    [context, completion] tokens of the rows of each
pad_to     tokens a row, null for the longest of its batch
full       train every weight, no LoRA
"""

import torch
from torch import Tensor

RANK, ALPHA, DROPOUT = 4, 32, 0.1
LABEL_SMOOTH = 0.1
LEARNING_RATE = 2e-4
NO_CLIPPING = 0.0


def draw_rows(plan: dict, index: int, lengths: list[list[int]]) -> list[tuple[Tensor, int]]:
    """Random tokens of each row of a batch, context and completion, and the context's length."""
    generator = torch.Generator().manual_seed(plan["seed"] + index)
    vocabulary = plan["shape"]["vocab_size"]
    return [
        (torch.randint(0, vocabulary, (context + completion,), generator=generator), context)
        for context, completion in lengths
    ]
