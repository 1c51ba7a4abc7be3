"""Small models of PyTorch's own layers, of no registered family, and how `add_lora` adapts them."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import loralib as lora


class Words(nn.Module):
    """An embedding, two pairs of linear layers, and a head."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"qkv": nn.Linear(8, 24), "out": nn.Linear(8, 8)}) for _ in "ab"
        )
        self.norm = nn.BatchNorm1d(8)
        self.score = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            q, k, v = layer["qkv"](x).chunk(3, dim=-1)
            x = x + layer["out"](torch.tanh(q * k) + v)
        return self.score(self.norm(x.mean(1)))


class Kernels(nn.Module):
    """Convolutions in one, two and three dimensions."""

    def __init__(self):
        super().__init__()
        self.line = nn.Conv1d(4, 6, 3, padding=1)
        self.plane = nn.Conv2d(2, 6, (3, 2), stride=2, bias=False)
        self.space = nn.Conv3d(2, 4, 2)

    def forward(self, line: Tensor, plane: Tensor, space: Tensor) -> Tensor:
        parts = self.line(line), self.plane(plane), self.space(space)
        return torch.cat([part.flatten(2).mean(2) for part in parts], dim=1)


class Grouped(nn.Module):
    """A convolution with groups and a dilation."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3, groups=2, dilation=2, padding=2, padding_mode="circular")

    def forward(self, plane: Tensor) -> Tensor:
        return self.conv(plane).flatten(2).mean(2)


class Attending(nn.Module):
    """PyTorch's attention, whose keys and values may have another size, and a linear layer."""

    def __init__(self, size: int | None = None):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, kdim=size, vdim=size)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor, others: Tensor) -> Tensor:
        return self.last(self.attention(x, others, others, need_weights=False)[0])


class Tied(nn.Module):
    """A language model whose head has the weight of its embedding."""

    def __init__(self):
        super().__init__()
        self.words, self.up = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 11, bias=False)
        self.last.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(torch.tanh(self.up(self.words(ids))))


def tied() -> nn.Module:
    """A `Tied`, in evaluation mode."""
    torch.manual_seed(0)
    return Tied().eval()


def _draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@dataclass(frozen=True)
class Case:
    """A model and its LoRA.

    Args:
        model: builds the model.
        inputs: those of one forward pass.
        settings: arguments of `add_lora`.
        of_peft: whether PEFT has the same layers.
        of_peft_with_dora: whether PEFT has them with DoRA too.
        in_bank: whether a bank's hooks can compute them.
    """

    model: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    of_peft: bool = True
    of_peft_with_dora: bool = True
    in_bank: bool = True

    def build(self, seed: int = 0) -> nn.Module:
        """The plain model, in evaluation mode."""
        torch.manual_seed(seed)
        return self.model().eval()

    def adapted(self, **settings: Any) -> nn.Module:
        """The model with LoRA, after random changes to everything that is trained."""
        model = self.build()
        lora.add_lora(model, **{"r": 2, "lora_alpha": 3, **self.settings, **settings})
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                is_factor = "magnitude" in name
                change = 0.3 * torch.rand_like(parameter)
                parameter.data = parameter * (1 + change) if is_factor else parameter + change
        return model


IDS = torch.tensor([[1, 5, 2], [7, 0, 10], [3, 3, 4]])
_KERNELS = (_draw(3, 4, 7), _draw(3, 2, 9, 8), _draw(3, 2, 4, 5, 4))
_PATTERNS = {"rank_pattern": {"layers.0.out": 4}, "alpha_pattern": {"layers.1.*": 7, "words": 1}}
CASES = {
    "linear": Case(Words, (IDS,), {"targets": ["qkv", "out"], "lora_dropout": 0.25}),
    "patterns": Case(Words, (IDS,), {"targets": ["out", "words"], **_PATTERNS}),
    "embedding": Case(Words, (IDS,), {"targets": ["words", "out"]}),
    "head": Case(Words, (IDS,), {"targets": "out", "modules_to_train": ["norm", "score"]}),
    "biases": Case(Words, (IDS,), {"targets": "out", "bias": "all"}, in_bank=False),
    "own biases": Case(Words, (IDS,), {"targets": "out", "bias": "lora_only"}, in_bank=False),
    "slices": Case(
        Words,
        (IDS,),
        {"targets": ["qkv", "out"], "enable_lora": {"qkv": [True, False, True]}},
        of_peft_with_dora=False,
    ),
    "every slice": Case(
        Words,
        (IDS,),
        {"targets": "qkv", "enable_lora": {"qkv": [True, True, True]}},
        of_peft_with_dora=False,
    ),
    "a slice": Case(
        Words,
        (IDS,),
        {"targets": "qkv", "enable_lora": {"qkv": [False, True, False]}},
        of_peft_with_dora=False,
    ),
    "kernels": Case(Kernels, _KERNELS, {"targets": ["line", "plane", "space"]}),
    "groups": Case(Grouped, (_draw(3, 4, 6, 5),), {"targets": "conv"}, of_peft=False),
    "attention": Case(
        Attending,
        (_draw(3, 4, 8), _draw(3, 5, 8)),
        {"targets": ["attention", "last"]},
        of_peft_with_dora=False,
        in_bank=False,
    ),
    "own out_proj": Case(
        Attending,
        (_draw(3, 4, 8), _draw(3, 5, 8)),
        {"targets": ["attention", "out_proj"], "alpha_pattern": {"out_proj": 5}},
        of_peft=False,
        in_bank=False,
    ),
    "separate": Case(
        lambda: Attending(6),
        (_draw(3, 4, 8), _draw(3, 5, 6)),
        {"targets": "attention"},
        of_peft=False,
        in_bank=False,
    ),
}


def run_suggested_save(message: str, model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """Runs a message's line of code, which saves the model; returns what PyTorch then loads."""
    (line,) = re.findall(r"torch\.save\(.*?, …\)", message)
    path = folder / "whole.pt"
    eval(line.replace("…", "path"), {"torch": torch, "model": model, "path": path})
    return torch.load(path, weights_only=True)
