"""The variants of LoRA as settings of an encoder, and small models that have them."""

import torch
from conversions import BATCH
from encoder_options import NO_DROPOUT

from transformers import AutoModelForSequenceClassification

FAMILIES = ("roberta", "deberta")
LORA = {"apply_lora": True, "lora_r": 4, "lora_alpha": 6}
# Settings that keep all weights that they do not train, and start with the base's outputs.
VARIANTS = {
    "lora": {},
    "rslora": {"lora_variant": "rslora"},
    "dora": {"lora_variant": "dora"},
    "rslora+dora": {"lora_variant": "rslora+dora", "lora_targets": ["key", "output"]},
    "pissa": {"lora_init": "pissa"},
    "olora": {"lora_init": "olora"},
    "orthogonal": {"lora_init": "orthogonal"},
    "frozen A": {"lora_freeze_A": True},
    "pissa, dora": {"lora_init": "pissa", "lora_variant": "dora"},
    "patterns": {
        "lora_targets": ["all-linear"],
        "lora_rank_pattern": {"layer.0.attention.*": 2, "output.dense": 3},
        "lora_alpha_pattern": {"value": 5, "layer.1.*": 2.5},
    },
    "layers": {"lora_targets": ["attention_output", "value"], "lora_layers": [1]},
}


def settings_of(name: str) -> dict:
    """The settings of a model with this variant."""
    return {**LORA, **VARIANTS[name]}


def build(base, **settings):
    """A classifier of three classes on a base, without dropout, in evaluation mode."""
    torch.manual_seed(7)
    model = AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=3, **NO_DROPOUT, **settings
    )
    if model.adapted_by:
        model.train_only(kind.part for kind in model.adapted_by)
    return model


def train(model, steps: int = 3):
    """Takes some steps of AdamW on one batch; returns the model in evaluation mode."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    model.train()
    for _ in range(steps):
        model(**BATCH, labels=torch.tensor([0, 2, 1])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def logits_of(model):
    """(3, 3), of one batch."""
    return model(**BATCH).logits
