"""A LoRA step of PEFT on upstream Transformers. Runs in the environment of requirements-peers.txt.

The one file of the project that imports upstream packages.
"""

import sys

import peft
import torch
from peft import LoraConfig, get_peft_model
from step_loop import LEARNING_RATE, MAX_GRAD_NORM, Step, run
from torch import Tensor

import transformers
from transformers import AutoModelForSequenceClassification, RobertaConfig


def make_step(plan: dict) -> Step:
    """The step that `plan` asks for; attention, adapters' dtype and head are PEFT's defaults."""
    model = AutoModelForSequenceClassification.from_config(
        RobertaConfig(**plan["shape"]), dtype=getattr(torch, plan["weights"])
    )
    lora = LoraConfig(
        task_type="SEQ_CLS",
        r=plan["rank"],
        lora_alpha=plan["alpha"],
        target_modules=["query", "value"],
    )
    model = get_peft_model(model, lora).to(plan["device"]).train()
    device, autocast = plan["device"], plan["autocast"]
    dtype = getattr(torch, autocast) if autocast else None
    scaler = torch.amp.GradScaler(device, enabled=dtype is torch.float16)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)

    def step(batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(trained, MAX_GRAD_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return step


if __name__ == "__main__":
    if "lora" in transformers.__version__:
        sys.exit("peers.py: this environment has the project's own transformers, not upstream's")
    run(make_step, {"transformers": transformers.__version__, "peft": peft.__version__})
