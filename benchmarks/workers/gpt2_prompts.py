"""Batches of gpt2_beam.py. Its plan has, besides timing.py's,

batches    each {"prompts": [[ids]], "eval_len": tokens to generate, …}
search     {"beam", "length_penalty", "no_repeat_ngram_size", "eos"}
way        of upstream's: "generate", or "line by line"
cache      "line by line" keeps keys and values of the tokens that it has seen
"""

import torch
from timing import Batch
from torch import Tensor


def make_batch(plan: dict, index: int, entry: dict) -> Batch:
    """The entry as it is: prompts are brought to the device by the search."""
    return entry


def checked(texts: list[list[int]], batch: Batch) -> Tensor:
    """The generated tokens, (prompts, eval_len).

    Raises:
        ValueError: a prompt has no text, or one that is shorter than asked for.
    """
    found = torch.tensor([len(text) for text in texts])
    if len(texts) != len(batch["prompts"]) or bool((found != batch["eval_len"]).any()):
        raise ValueError(f"texts of {found.tolist()} tokens, not {batch['eval_len']} each")
    return torch.tensor(texts)
