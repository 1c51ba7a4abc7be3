"""Makes rows for the batches of gpt2_step.py. Its plan has the fields of timing.py, and

batches    for each row [tokens of the context, tokens of the completion]
pad_to     the length that rows are padded to, null for that of the batch's longest row
full       whether every weight is trained, without LoRA
graphs     whether the step is run as a CUDA graph
"""

import torch
from torch import Tensor

RANK, ALPHA, DROPOUT = 4, 32, 0.1
LABEL_SMOOTH = 0.1
LEARNING_RATE = 2e-4
NO_CLIPPING = 0.0


def draw_rows(plan: dict, index: int, lengths: list[list[int]]) -> list[tuple[Tensor, int]]:
    """Returns for each row of a batch random tokens, and how many of them are context."""
    generator = torch.Generator().manual_seed(plan["seed"] + index)
    vocabulary = plan["shape"]["vocab_size"]
    return [
        (torch.randint(0, vocabulary, (context + completion,), generator=generator), context)
        for context, completion in lengths
    ]
