"""Makes batches of gpt2_beam.py, and checks texts. Its plan has the fields of timing.py, and

batches    each {"prompts": [[ids]], "eval_len": tokens to generate, …}
search     {"beam", "length_penalty", "no_repeat_ngram_size", "eos"}
way        upstream's search: "generate", or "line by line"
cache      whether "line by line" keeps the keys and values of previous tokens
"""

import torch
from timing import Batch
from torch import Tensor


def make_batch(plan: dict, index: int, entry: dict) -> Batch:
    """Returns the entry as it is, because the search moves prompts to the device."""
    return entry


def checked(texts: list[list[int]], batch: Batch) -> Tensor:
    """Returns the generated tokens, (prompts, eval_len).

    Raises:
        ValueError: a prompt has no text, or its text does not have the length that was asked for.
    """
    found = torch.tensor([len(text) for text in texts])
    if len(texts) != len(batch["prompts"]) or bool((found != batch["eval_len"]).any()):
        raise ValueError(f"texts of {found.tolist()} tokens, not {batch['eval_len']} each")
    return torch.tensor(texts)
