"""A net of three layers, copies of it with nonzero LoRA, and banks of their adapters."""

import copy

import torch
from torch import nn

import loralib as lora


class Net(nn.Module):
    """Two layers and a head: (…, 6) -> (…, 3)."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))


def drawn(model, targets, **settings):
    """A copy of the model with nonzero LoRA, in evaluation mode."""
    model = copy.deepcopy(model)
    lora.add_lora(model, targets, r=2, **settings)
    for name, parameter in model.named_parameters():
        if name.endswith(("lora_A", "lora_B")):
            nn.init.normal_(parameter, std=0.3)
    return model.eval()


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def bank_of(model, *paths):
    bank = lora.AdapterBank(model)
    for number, path in enumerate(paths):
        bank.add(f"a{number}", lora.read_adapter(path))
    return bank
