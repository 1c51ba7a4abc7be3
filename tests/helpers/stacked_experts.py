"""Models with experts as upstream's Transformers holds them, for tests of LoRA on stacks."""

import torch
import torch.nn.functional as F
from compare import assert_close_to_rounding
from torch import nn

import loralib as lora

EXPERTS, WIDTH, INNER, R, ALPHA = 3, 8, 16, 2, 6


def has_grouped_mm():
    """Whether this version of PyTorch has the grouped product on a CPU, in float32."""
    try:
        torch._grouped_mm(torch.ones(1, 4), torch.ones(1, 4, 4), offs=torch.ones(1).int())
    except (RuntimeError, NotImplementedError):
        return False
    return True


METHODS = ("loop", "bmm", "batched", *(["grouped"] if has_grouped_mm() else []))
STACKS = ("gate_up_proj", "down_proj")
IDS = torch.arange(EXPERTS).repeat_interleave(4)
# The terms of successive sums in each of two layers: WIDTH, WIDTH and INNER, and R for each delta.
# All numbers that are added are smaller than MAGNITUDE.
TERMS, MAGNITUDE = 2 * (2 * WIDTH + INNER + 3 * R), 8.0


class Experts(nn.Module):
    """Experts as upstream's Transformers holds them, and its methods of computing with them."""

    def __init__(self, way="loop", is_transposed=False):
        super().__init__()
        self.way, self.is_transposed = way, is_transposed
        for name, out, width in (("gate_up_proj", 2 * INNER, WIDTH), ("down_proj", WIDTH, INNER)):
            shape = (width, out) if is_transposed else (out, width)
            weight = torch.randn(EXPERTS, *shape) * width**-0.5
            self.register_parameter(name, nn.Parameter(weight))
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(EXPERTS, out)))

    def forward(self, x):
        """(tokens, width), ordered as `IDS`."""
        gate, up = self.products(x, "gate_up_proj").chunk(2, -1)
        return self.products(torch.tanh(gate) * torch.tanh(up), "down_proj")

    def products(self, x, name):
        bias, weight, ids = getattr(self, f"{name}_bias"), getattr(self, name), IDS.to(x.device)
        if self.way == "bmm":
            x = x.view(EXPERTS, -1, x.shape[-1])
            y = torch.bmm(x, weight if self.is_transposed else weight.transpose(1, 2))
            return (y + bias[:, None]).flatten(0, 1)
        if self.way == "grouped":
            weight = weight if self.is_transposed else weight.transpose(-2, -1)
            ends = ids.bincount().cumsum(0, dtype=torch.int32)
            return torch._grouped_mm(x, weight, offs=ends).add_(bias[ids])
        if self.way == "batched":
            of_rows = weight[ids]
            if self.is_transposed:
                return torch.bmm(x[:, None], of_rows)[:, 0].add_(bias[ids])
            return torch.bmm(of_rows, x[..., None])[..., 0].add_(bias[ids])
        y = x.new_zeros(len(x), bias.shape[1])
        for expert in torch.arange(EXPERTS):
            rows, of_expert = (expert == ids).nonzero()[:, 0], getattr(self, name)[expert]
            product = x[rows] @ of_expert if self.is_transposed else F.linear(x[rows], of_expert)
            y = y.index_add(0, rows, product + bias[expert])
        return y


class Model(nn.Module):
    def __init__(self, way="loop", is_transposed=False, layers=2):
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(layers):
            parts = {"q": nn.Linear(WIDTH, WIDTH), "experts": Experts(way, is_transposed)}
            self.layers.append(nn.ModuleDict(parts))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer["experts"](layer["q"](x)))
        return x


class Mixture(nn.Module):
    """Like DeepSeek-V3: in one layer, a linear layer has the name of an experts' stack."""

    def __init__(self):
        super().__init__()
        plain = {"q_proj": nn.Linear(WIDTH, WIDTH), "experts": Experts()}
        shared = nn.ModuleDict({"down_proj": nn.Linear(WIDTH, WIDTH)})
        first = {"q_proj": nn.Linear(WIDTH, WIDTH), "experts": Experts(), "shared": shared}
        self.layers = nn.ModuleList([nn.ModuleDict(first), nn.ModuleDict(plain)])
        for layer in self.layers:
            layer["experts"].act_fn = nn.Tanh()  # as upstream's have; targets match it too


def build(way="loop", is_transposed=False, layers=2):
    torch.manual_seed(0)
    return Model(way, is_transposed, layers)


def randomised(model):
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    return model


def adapted(way="loop", is_transposed=False, targets=("q", *STACKS), layers=2, **settings):
    model = build(way, is_transposed, layers)
    lora.add_lora(model, targets, r=R, lora_alpha=ALPHA, **settings)
    return randomised(model)


def tokens():
    return torch.randn(len(IDS), WIDTH, generator=torch.Generator().manual_seed(2))


def with_sums(layer):
    """Plain experts in float64 with W + s · B A, computed by hand, and A and B of each stack."""
    plain = Experts("loop", layer.is_transposed).double()
    factors = {}
    for name in (*STACKS, *(f"{each}_bias" for each in STACKS)):
        delattr(plain, name)
        weight = getattr(layer, name).detach().double()
        update = layer._modules.get(f"{name}_lora")
        if update is not None:
            A = update.lora_A.detach().double().view(EXPERTS, -1, update.lora_A.shape[1])
            B = update.lora_B.detach().double().view(EXPERTS, -1, update.lora_B.shape[1])
            factors[name] = A.requires_grad_(), B.requires_grad_()
            product = torch.stack([update.scaling * b @ a for a, b in zip(A, B, strict=True)])
            weight = weight + (product.mT if layer.is_transposed else product)
        setattr(plain, name, weight)
    return plain, factors


def close(ours, theirs):
    assert_close_to_rounding(ours, theirs.to(ours.dtype), TERMS, magnitude=MAGNITUDE)


def lora_layers(model):
    return [name for name, m in model.named_modules() if isinstance(m, lora.LoRALayer)]


FORWARD = {"forward": lambda self, x: x @ self.stack}


def owned_by(kind, **attributes):
    """A model with one stack, in a module of a kind with these attributes."""
    owner = type("Owner", (kind,), attributes)()
    owner.stack = nn.Parameter(torch.randn(2, 4, 4))
    return nn.ModuleDict({"q": nn.Linear(4, 4), "owner": owner})
