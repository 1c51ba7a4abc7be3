"""A training step of this project, as its Trainer makes it: LoRA, or every weight."""

import torch
from step_loop import LEARNING_RATE, MAX_GRAD_NORM, Step, run
from torch import Tensor

import transformers
from loralib.precision import Precision, hold_frozen_in
from transformers import RobertaConfig, RobertaForSequenceClassification


def make_step(plan: dict) -> Step:
    """The step that `plan` asks for."""
    lora = {} if plan["full"] else {"lora_r": plan["rank"], "lora_alpha": plan["alpha"]}
    config = RobertaConfig(**plan["shape"], apply_lora=not plan["full"], **lora)
    model = RobertaForSequenceClassification(config)
    if not plan["full"]:
        model.train_only(("lora",))
    model.to(plan["device"]).train()
    hold_frozen_in(model, getattr(torch, plan["weights"]))
    precision = Precision(getattr(torch, plan["autocast"] or "float32"), plan["device"])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)

    def step(batch: dict[str, Tensor]) -> Tensor:
        with precision.autocast():
            loss = model(**batch).loss
        precision.backward(loss)
        precision.step(optimizer, trained, MAX_GRAD_NORM)
        optimizer.zero_grad()
        return loss.detach()

    return step


if __name__ == "__main__":
    run(make_step, {"this project": transformers.__version__})
