"""Times beam search on upstream's GPT-2, in the environment of requirements-peers.txt."""

from functools import partial

import torch
from gpt2_prompts import checked, make_batch
from timing import Batch, Step, run
from torch import Tensor
from upstream import versions

from transformers import GPT2Config, GPT2LMHeadModel


def make_step(plan: dict) -> Step:
    """Returns the search that the plan asks for."""
    model = GPT2LMHeadModel(GPT2Config(**plan["shape"])).eval()
    model.to(plan["device"], getattr(torch, plan["weights"]))
    texts_of = generate if plan["way"] == "generate" else line_by_line

    @torch.inference_mode()
    def step(batch: Batch) -> Tensor:
        return checked(texts_of(model, plan, batch), batch)

    return step


def generate(model: GPT2LMHeadModel, plan: dict, batch: Batch) -> list[list[int]]:
    """Searches all prompts at once by upstream's own search, padded on the left."""
    asked, prompts = plan["search"], batch["prompts"]
    width = max(map(len, prompts))
    padding = plan["shape"]["vocab_size"] - 1
    ids = torch.tensor([[padding] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    found = model.generate(
        ids.to(plan["device"]),
        attention_mask=mask.to(plan["device"]),
        num_beams=asked["beam"],
        do_sample=False,
        max_new_tokens=batch["eval_len"],
        min_new_tokens=batch["eval_len"],
        length_penalty=asked["length_penalty"],
        no_repeat_ngram_size=asked["no_repeat_ngram_size"],
        eos_token_id=[asked["eos"], padding],
        pad_token_id=padding,
    )
    return found[:, width:].tolist()


def line_by_line(model: GPT2LMHeadModel, plan: dict, batch: Batch) -> list[list[int]]:
    """Searches one prompt after the other, always to the last step."""
    search = partial(_search_one, model, plan, eval_len=batch["eval_len"])
    return [search(prompt) for prompt in batch["prompts"]]


def _search_one(model: GPT2LMHeadModel, plan: dict, prompt: list[int], eval_len: int) -> list[int]:
    """Returns the best text of `eval_len` tokens; without a cache, a step computes all tokens."""
    asked, device = plan["search"], plan["device"]
    ends = torch.tensor([asked["eos"], plan["shape"]["vocab_size"] - 1], device=device)
    tokens = torch.tensor([prompt], device=device)  # (beams, length)
    sums = torch.zeros(1, device=device)
    past = None
    for _ in range(eval_len):
        new = tokens if past is None else tokens[:, -1:]
        output = model(new, past_key_values=past, use_cache=plan["cache"], logits_to_keep=1)
        logits = output.logits[:, -1].float()
        logits[:, ends] = float("-inf")
        _suppress_repeats(logits, tokens[:, len(prompt) :], asked["no_repeat_ngram_size"])
        candidates = sums[:, None] + logits.log_softmax(dim=-1)
        sums, best = candidates.flatten().topk(asked["beam"])
        beams, chosen = best // logits.shape[1], best % logits.shape[1]
        tokens = torch.cat([tokens[beams], chosen[:, None]], dim=1)
        if plan["cache"]:
            past = output.past_key_values
            past.reorder_cache(beams)
    # All beams have the same length, so length_penalty does not change their order.
    return tokens[sums.argmax(), len(prompt) :].tolist()


def _suppress_repeats(logits: Tensor, texts: Tensor, size: int) -> None:
    """Masks tokens that would repeat `size` tokens of a text, in place."""
    for row, text in enumerate(texts.tolist()):
        begun = text[len(text) - size + 1 :]
        for start in range(len(text) - size + 1):
            if text[start : start + size - 1] == begun:
                logits[row, text[start + size - 1]] = float("-inf")


if __name__ == "__main__":
    run(make_step, make_batch, versions())
