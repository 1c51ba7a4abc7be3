"""Times predictions of PEFT on upstream's RoBERTa, in the environment of requirements-peers.txt."""

from itertools import cycle, islice

import torch
from adapter_rows import (
    TARGETS,
    adapter_names,
    check_mixing,
    draw_weights,
    inputs_of,
    make_batch,
)
from peft import LoraConfig, PeftModel, get_peft_model
from timing import Batch, Step, run
from torch import Tensor
from upstream import versions

from transformers import AutoModelForSequenceClassification, PreTrainedModel, RobertaConfig

# By default, PEFT would copy the head as a whole, but it can mix only linear layers.
HEAD = ("classifier.dense", "classifier.out_proj")


def make_step(plan: dict) -> Step:
    """Returns the work that the plan asks for.

    Attention and the dtypes of adapters and heads are PEFT's defaults.
    """
    base = AutoModelForSequenceClassification.from_config(
        RobertaConfig(**plan["shape"]), dtype=getattr(torch, plan["weights"])
    )
    names = adapter_names(plan)
    model = with_adapters(base, plan, names) if names else base
    model.to(plan["device"]).eval()

    @torch.inference_mode()
    def logits(batch: Batch, **routing: list[str]) -> Tensor:
        return model(**inputs_of(batch), **routing).logits.float()

    if not names:
        return logits

    def logits_of(inputs: dict[str, Tensor], names: str | list[str]) -> Tensor:
        if not isinstance(names, str):
            return logits(inputs, adapter_names=names)
        model.set_adapter(names)
        return logits(inputs)

    def switch(batch: Batch) -> Tensor:
        for name in islice(cycle(names), batch["repeats"]):
            model.set_adapter(name)
        return torch.tensor(batch["repeats"])

    check_mixing(plan, make_batch, logits_of)
    if plan["way"] == "switch":
        return switch
    return lambda batch: logits_of(batch, batch["names"])


def with_adapters(base: PreTrainedModel, plan: dict, names: list[str]) -> PeftModel:
    """Returns the base with random adapters, each with a head of its own."""
    configs = [
        LoraConfig(
            r=plan["rank"],
            lora_alpha=plan["alpha"],
            target_modules=list(TARGETS),
            modules_to_save=list(HEAD),
        )
        for _ in names
    ]
    model = get_peft_model(base, configs[0], adapter_name=names[0])
    for name, config in zip(names[1:], configs[1:], strict=True):
        model.add_adapter(name, config)
    draw_weights(
        parameter
        for name, parameter in model.named_parameters()
        if "lora_" in name or "modules_to_save" in name
    )
    return model


if __name__ == "__main__":
    run(make_step, make_batch, versions())
