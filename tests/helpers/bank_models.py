"""Two small models for banks, and adapters of each.

One has plain layers and padded batches. The other is like GPT-2, with merged projections and packed
rows.
"""

from dataclasses import dataclass, replace

import all_families  # noqa: F401
import pytest
import torch
from compare import assert_close_to_rounding
from torch import nn

import loralib as lora
from loralib.adapters.adapter import Adapter, adapter_tensors
from loralib.adapters.loading import load_into
from loralib.adapters.metadata import LoraMetadata
from loralib.nn.packing import PackedRows, attend

WIDTH = 8
# The terms of successive sums: in each of two layers four products, one of them with a delta, and
# a head.
TERMS = 2 * 6 * WIDTH + 2 * WIDTH


@dataclass(frozen=True)
class Trained:
    """How an adapter was trained; without labels it has no head."""

    seed: int
    rank: int
    alpha: float
    labels: int | None
    targets: tuple[str, ...] = ("query", "value")


TRAINED = {
    "a": Trained(1, rank=2, alpha=8, labels=2),
    "b": Trained(2, rank=5, alpha=3, labels=5, targets=("query",)),
    "c": Trained(3, rank=1, alpha=2, labels=3, targets=("query", "key", "value")),
    "d": Trained(4, rank=3, alpha=6, labels=1, targets=("key", "value")),
    "e": Trained(5, rank=4, alpha=4, labels=None),
}
NO_LORA = Trained(0, rank=0, alpha=1, labels=3, targets=())


class Head(nn.Module):
    def __init__(self, labels):
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.out_proj = nn.Linear(WIDTH, labels)

    def forward(self, x):
        return self.out_proj(torch.tanh(self.dense(x)))


class PlainLayer(nn.Module):
    def __init__(self, trained):
        super().__init__()
        for name in ("query", "key", "value"):
            rank = trained.rank if name in trained.targets else 0
            layer = lora.Linear(WIDTH, WIDTH, r=rank, lora_alpha=trained.alpha)
            setattr(self, name, layer if rank else nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return x + torch.tanh(self.query(x)) * torch.sigmoid(self.key(x)) + self.value(x)


class Plain(nn.Module):
    """A model without packed rows: token ids and mask (batch, length) -> (batch, labels)."""

    def __init__(self, trained):
        super().__init__()
        layers = nn.ModuleList(PlainLayer(trained) for _ in range(2))
        self.roberta = nn.ModuleDict({"embed": nn.Embedding(20, WIDTH), "layer": layers})
        self.classifier = Head(trained.labels or 3)

    def forward(self, ids, mask):
        x = self.roberta["embed"](ids)
        for layer in self.roberta["layer"]:
            x = layer(x)
        return self.classifier((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


class Block(nn.Module):
    def __init__(self, trained):
        super().__init__()
        c_attn = lora.MergedLinear(
            WIDTH,
            3 * WIDTH,
            r=trained.rank,
            lora_alpha=trained.alpha,
            enable_lora=[True, False, True],
            fan_in_fan_out=True,
        )
        self.attn = nn.ModuleDict({"c_attn": c_attn})

    def forward(self, x, rows):
        q, k, v = self.attn["c_attn"](x).chunk(3, dim=-1)
        return x + attend(q, k, v, rows, heads=2, causal=True)


class Packed(nn.Module):
    """Like GPT-2, with a head on each row's last token."""

    def __init__(self, trained):
        super().__init__()
        blocks = nn.ModuleList(Block(trained) for _ in range(2))
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(20, WIDTH), "h": blocks})
        self.classifier = Head(trained.labels or 3)

    def forward(self, ids, mask):
        rows = PackedRows(mask).routed()
        x = self.transformer["wte"](rows.pack(ids))
        for block in self.transformer["h"]:
            x = block(x, rows)
        return self.classifier(x[rows.first + torch.tensor(rows.lengths) - 1])


MODELS = (Plain, Packed)
LAYER = {Plain: "roberta.layer.0.query", Packed: "transformer.h.0.attn.c_attn"}


def draw(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.5, generator=generator)
    return model.eval()


def base_of(model_class):
    return draw(model_class(NO_LORA), 0)


def on_base(model_class, trained):
    """A model with the base's weights, in which LoRA and head are still to be loaded."""
    model = model_class(trained).eval()
    own, base = model.state_dict(), base_of(model_class).state_dict()
    model.load_state_dict({**own, **{n: t for n, t in base.items() if t.shape == own[n].shape}})
    return model


def make_adapter(model_class, name, **info):
    trained = TRAINED[name]
    tensors = adapter_tensors(draw(model_class(trained), trained.seed).state_dict())
    if trained.labels is None:
        tensors = {n: t for n, t in tensors.items() if "lora_" in n}
    about = LoraMetadata(rank=trained.rank, alpha=trained.alpha, targets=("some",), **info)
    return Adapter(tensors, about, f"{name}.safetensors")


def model_of(model_class, name):
    """A model built for one adapter, with the adapter loaded."""
    model = on_base(model_class, TRAINED[name])
    adapter = make_adapter(model_class, name)
    head = {n: t for n, t in adapter_tensors(model.state_dict()).items() if "lora_" not in n}
    targets = tuple(sorted({n.split(".")[-2] for n in adapter.tensors if "lora_" in n}))
    info = replace(adapter.metadata, targets=targets)
    load_into(model, Adapter({**head, **adapter.tensors}, info, "here"))
    return model


def make_batch(lengths, seed=0):
    """Rows of these lengths, padded with random tokens."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {"ids": torch.randint(20, mask.shape, generator=generator), "mask": mask}


def batch_for(names):
    return make_batch([(3, 6, 1, 5, 2, 4, 6)[row] for row in range(len(names))])


def close(ours, theirs):
    assert_close_to_rounding(ours, theirs, TERMS, theirs.dtype)


def close_in_half(ours, theirs, tolerance):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


def refuses(error, *parts):
    """Expects an error of one line that contains all of `parts`."""
    lookaheads = "".join(f"(?=.*{part})" for part in parts)
    return pytest.raises(error, match=rf"^{lookaheads}[^\n]{{1,300}}$")


def hooks_of(model):
    return [hook for module in model.modules() for hook in module._forward_hooks.values()]


@torch.no_grad()
def row_by_row(bank, model, names, batch):
    """Each row's logits, from a forward pass of the whole batch with this row's adapter."""
    rows = []
    for row, name in enumerate(names):
        with bank.use(name):
            rows.append(model(**batch)[row])
    return rows


def close_to_rows(mixed, rows, close=close):
    widest = max(len(row) for row in rows)
    assert mixed.shape == (len(rows), widest)
    for ours, theirs in zip(mixed, rows, strict=True):
        close(ours[: len(theirs)], theirs)
        assert (ours[len(theirs) :] == float("-inf")).all()
