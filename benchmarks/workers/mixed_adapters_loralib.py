"""Times predictions of upstream's RoBERTa with this project's bank, in the peers' environment."""

import torch
from adapter_rows import inputs_of
from our_bank import banked, make_batch
from timing import Batch, Step, run
from torch import Tensor
from upstream import versions

import loralib as lora
from transformers import AutoModelForSequenceClassification, RobertaConfig


def make_step(plan: dict) -> Step:
    """Returns the work that the plan asks for, with upstream's default attention."""
    model = AutoModelForSequenceClassification.from_config(
        RobertaConfig(**plan["shape"]), dtype=getattr(torch, plan["weights"])
    )
    model.to(plan["device"]).eval()

    @torch.inference_mode()
    def plain(batch: Batch) -> Tensor:
        return model(**inputs_of(batch)).logits.float()

    return banked(plan, model, plain)


if __name__ == "__main__":
    run(make_step, make_batch, {"loralib": lora.__version__, **versions()})
