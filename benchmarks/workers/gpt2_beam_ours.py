"""Times this project's beam search, which searches each distinct prompt once, like gpt2_beam.py."""

import torch
from gpt2_prompts import checked, make_batch
from timing import Batch, Step, run
from torch import Tensor

import loralib as lora
from beam import BeamSettings, search
from gpt2_beam import prepare_products
from loralib.training.determinism import set_up_device
from model import GPT2Config, GPT2LMModel


def make_step(plan: dict) -> Step:
    """Returns the search that the plan asks for."""
    set_up_device()
    model = GPT2LMModel(GPT2Config(**plan["shape"])).eval().requires_grad_(False)
    model.to(plan["device"], getattr(torch, plan["weights"]))
    asked = plan["search"]
    if plan["device"] == "cpu":
        prompts = max(len(set(map(tuple, entry["prompts"]))) for entry in plan["batches"])
        prepare_products(model, prompts * asked["beam"], world_size=1)

    def step(batch: Batch) -> Tensor:
        settings = BeamSettings(
            beam=asked["beam"],
            eval_len=batch["eval_len"],
            length_penalty=asked["length_penalty"],
            no_repeat_ngram_size=asked["no_repeat_ngram_size"],
            # With random weights, texts would end anywhere, so every search has to make all steps.
            min_length=batch["eval_len"],
            eos_token_ids=(asked["eos"], plan["shape"]["vocab_size"] - 1),
        )
        prompts = [tuple(prompt) for prompt in batch["prompts"]]
        distinct = list(dict.fromkeys(prompts))
        found = dict(zip(distinct, search(model, distinct, settings), strict=True))
        return checked([found[prompt] for prompt in prompts], batch)

    return step


if __name__ == "__main__":
    run(make_step, make_batch, {"this project": lora.__version__})
