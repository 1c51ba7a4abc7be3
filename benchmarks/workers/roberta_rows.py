"""Batches of roberta_step.py and deberta_step.py. Their plan has, besides timing.py's,

batches    lengths of the rows of each        rank, alpha    LoRA's
pad_to     tokens a row, null for the         full           train every weight, no LoRA
           longest of its batch
"""

import torch
from torch import Tensor

LEARNING_RATE = 5e-4
MAX_GRAD_NORM = 1.0
PADDING_ID = 1  # RoBERTa's; elsewhere the mask alone says what is padding


def make_batch(plan: dict, index: int, lengths: list[int]) -> dict[str, Tensor]:
    """A batch of random tokens, padded on the right: (rows, width) ids and mask, (rows,) labels."""
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
