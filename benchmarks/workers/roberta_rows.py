"""Makes batches of roberta_step.py and deberta_step.py. Plans have the fields of timing.py, and

batches    lengths of the rows of each        rank, alpha    LoRA's
pad_to     length of rows, null for that      full           train every weight, without LoRA
           of the batch's longest             graphs         run the step as a CUDA graph
"""

import torch
from torch import Tensor

LEARNING_RATE = 5e-4
MAX_GRAD_NORM = 1.0
PADDING_ID = 1  # RoBERTa's; for other models, only the mask says what is padding


def make_batch(plan: dict, index: int, lengths: list[int]) -> dict[str, Tensor]:
    """Makes a batch of random tokens, padded on the right.

    Returns:
        `input_ids` and `attention_mask`, (rows, width), and `labels`, (rows,).
    """
    generator = torch.Generator().manual_seed(plan["seed"] + index)
    width = plan["pad_to"] or max(lengths)
    shape = (len(lengths), width)
    ids = torch.randint(5, plan["shape"]["vocab_size"], shape, generator=generator)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    return {
        "input_ids": ids.masked_fill(~mask, PADDING_ID),
        "attention_mask": mask.long(),
        "labels": torch.randint(0, 2, (len(lengths),), generator=generator),
    }
