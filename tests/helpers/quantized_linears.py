"""Linear layers with quantized weights, similar to other packages', for tests of LoRA on them."""

import torch
import torch.nn.functional as F
from torch import nn


def _named(package: str):
    """Makes a class look as if it were defined in another package's module."""

    def rename(kind: type) -> type:
        kind.__module__ = package
        return kind

    return rename


@_named("bitsandbytes.nn.modules")
class Params4bit(nn.Parameter):
    """A parameter of a class of its own, which holds packed numbers of four bits."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class _Product(torch.autograd.Function):
    """x Wᵀ, as a function whose result cannot be changed in place."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return F.linear(x, weight).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.saved_tensors[0], None


@_named("bitsandbytes.nn.modules")
class Linear4bit(nn.Linear):
    """A linear layer with a packed weight, two numbers of four bits in each byte."""

    def __init__(self, in_features, out_features, bias=True):
        super().__init__(in_features, out_features, bias)
        weight = self.weight.detach()
        self.scale = weight.abs().max() / 7
        levels = (weight / self.scale).round().to(torch.int8).view(-1, 2) + 8
        packed = (levels[:, :1] * 16 + levels[:, 1:]).to(torch.uint8)
        self.weight = Params4bit(packed, requires_grad=False)

    def dequantized(self):
        """The weight, (out, in)."""
        packed = self.weight.detach()
        levels = torch.cat([packed // 16, packed % 16], dim=1).to(self.scale.dtype) - 8
        return (levels * self.scale).view(self.out_features, self.in_features)

    def forward(self, x):
        """(…, in) -> (…, out), in x's dtype even under autocast."""
        out = _Product.apply(x, self.dequantized().to(x.dtype)).to(x.dtype)
        return out if self.bias is None else out + self.bias.to(x.dtype)


@_named("torchao.quantization")
class Int8Tensor(torch.Tensor):
    """A tensor with a floating-point dtype that holds integers and a scale.

    Args:
        integers: (out, in).
        scale: one number.
        is_of_inputs: whether inputs are quantized as well, which lets no gradients pass.
    """

    @staticmethod
    def __new__(cls, integers, scale, is_of_inputs=False):
        made = torch.Tensor._make_wrapper_subclass(cls, integers.shape, dtype=scale.dtype)
        made.integers, made.scale, made.is_of_inputs = integers, scale, is_of_inputs
        return made

    def __init__(self, integers, scale, is_of_inputs=False):
        pass

    def dequantized(self):
        """The weight, (out, in)."""
        return self.integers.to(self.scale.dtype) * self.scale

    def __reduce_ex__(self, protocol):
        return _parameter, (self.integers, self.scale, self.is_of_inputs)

    def __deepcopy__(self, memo):
        return _parameter(self.integers.clone(), self.scale.clone(), self.is_of_inputs)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is not F.linear:
            return super().__torch_function__(func, types, args, kwargs or {})
        x, weight, *bias = args
        x = x.detach() if weight.is_of_inputs else x
        return F.linear(x, weight.dequantized().to(x.dtype), *bias)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        own = args[0]
        if func is torch.ops.aten.detach.default:
            return cls(own.integers, own.scale, own.is_of_inputs)
        if func is torch.ops.aten._to_copy.default:
            return cls(own.integers, own.scale.to(kwargs["dtype"]), own.is_of_inputs)
        raise NotImplementedError(func)


def _parameter(integers, scale, is_of_inputs=False):
    return nn.Parameter(Int8Tensor(integers, scale, is_of_inputs), requires_grad=False)


def with_int8(layer, is_of_inputs=False):
    """Makes the layer's weight an `Int8Tensor`; returns the layer."""
    weight = layer.weight.detach()
    scale = weight.abs().max() / 127
    layer.weight = _parameter((weight / scale).round().to(torch.int8), scale, is_of_inputs)
    return layer


# Package -> how its layers are made.
LAYERS = {
    "torch": nn.Linear,
    "bitsandbytes": Linear4bit,
    "torchao": lambda *sizes, **settings: with_int8(nn.Linear(*sizes, **settings)),
}


def dequantized(layer):
    """The weight of one of these layers, (out, in)."""
    return (layer if isinstance(layer, Linear4bit) else layer.weight).dequantized()


class Net(nn.Module):
    """Two layers of three quantized ones and a head. (batch, 6) -> (batch, 3)."""

    def __init__(self, package):
        super().__init__()
        linear = LAYERS[package]
        torch.manual_seed(0)
        self.embed = nn.Linear(6, 8)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": linear(8, 16), "down": linear(16, 8, bias=False)})
            for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        """The outputs."""
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer["down"](torch.tanh(layer["up"](x)))
        return self.head(self.norm(x))


def plain(model):
    """The same net with plain layers, copies of the dequantized weights, and no LoRA."""
    net = Net("torch").to(model.head.weight.dtype)
    state = {name: t for name, t in model.state_dict().items() if name in net.state_dict()}
    for name, module in net.named_modules():
        if name.startswith("layers.") and isinstance(module, nn.Linear):
            state[f"{name}.weight"] = dequantized(model.get_submodule(name))
    net.load_state_dict(state)
    return net
