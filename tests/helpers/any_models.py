"""A small model of PyTorch's own layers, of every kind that can be adapted, for `add_lora`."""

import pytest
import torch
from torch import Tensor, nn

import loralib as lora


class Conv1D(nn.Module):
    """A linear layer that holds its weight as (in, out), as upstream's GPT-2 has them."""

    def __init__(self, nf: int, nx: int):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(0.2 * torch.randn(nx, nf))
        self.bias = nn.Parameter(0.1 * torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        """(…, nx) -> (…, nf)."""
        return x @ self.weight + self.bias


class Block(nn.Module):
    """A mixture of projections, as in attention, and a feed-forward part."""

    def __init__(self, width: int):
        super().__init__()
        self.q_proj, self.v_proj = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.c_attn = Conv1D(3 * width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(…, width) -> (…, width)."""
        first, second, third = self.c_attn(x).chunk(3, dim=-1)
        mixed = self.q_proj(x) * torch.sigmoid(self.v_proj(x)) + first * torch.tanh(second) + third
        return x + self.down(torch.relu(self.up(mixed)))


class AnyModel(nn.Module):
    """Token ids (batch, length) -> (batch, length, 5)."""

    def __init__(self):
        super().__init__()
        width = 8
        self.embed = nn.Embedding(11, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(3))
        layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.conv1 = nn.Conv1d(width, width, 3, padding=1, groups=2)
        self.conv2 = nn.Conv2d(1, 1, (3, 3), padding=1, padding_mode="circular")
        self.conv3 = nn.Conv3d(1, 1, 1, bias=False)
        self.head = nn.Linear(width, 5)

    def forward(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        """The outputs; `padding` is True at positions that attention leaves out."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        x = self.encoder(x, src_key_padding_mask=padding)
        if padding is not None:
            x = x.masked_fill(padding[..., None], 0)
        x = x + self.conv1(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.conv2(x[:, None])[:, 0]
        x = x + self.conv3(x[:, None, None])[:, 0, 0]
        return self.head(x)


LINEAR = ("q_proj", "v_proj", "c_attn", "up", "down")
TARGETS = {
    "linear": ["q_proj", "down"],
    "without bias": ["v_proj"],
    "Conv1D": ["c_attn"],
    "embedding": ["embed"],
    "convolutions": ["conv1", "conv2", "conv3"],
    "attention": ["self_attn"],
    "out_proj": ["encoder.layers.0.self_attn.out_proj"],
    "within PyTorch's encoder": ["linear1"],
    "all-linear": ["all-linear"],
}


def ids(rows: int = 4) -> Tensor:
    """Token ids for an `AnyModel`: (rows, 7)."""
    return torch.arange(rows * 7).view(rows, 7) * 5 % 11


def names_of(model):
    return [n for n, m in model.named_modules() if isinstance(m, lora.LoRALayer) and m.r > 0]


def assert_add_lora_refuses(model, message, *args, kind=ValueError, **settings):
    """Asserts that `add_lora` raises, and changes neither classes nor what is trained."""
    classes = [type(module) for module in model.modules()]
    trained = [parameter.requires_grad for parameter in model.parameters()]
    with pytest.raises(kind, match=message):
        lora.add_lora(model, *args, **settings)
    assert [type(module) for module in model.modules()] == classes
    assert [parameter.requires_grad for parameter in model.parameters()] == trained
    assert ".lora_" not in " ".join(model.state_dict())
