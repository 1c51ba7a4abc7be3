"""This project's side of the comparisons: models with LoRA, and the papers' formulas by hand."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from models import Batch, Case, draw, output_of
from theirs import ALPHA, R, adapter_of
from torch import Tensor, nn

import loralib as lora
import transformers


def with_lora(
    case: Case,
    variant: str = "lora",
    adapter: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> nn.Module:
    """The case's model with LoRA: the tensors of an adapter, or random ones with a visible effect.

    Args:
        dtype: of the base.
    """
    model = case.build().to(dtype)
    lora.add_lora(model, case.targets, r=R, lora_alpha=ALPHA, variant=variant, **settings)
    if adapter is None:
        parameters = (item for item in model.named_parameters() if "lora_" in item[0])
        draw(parameters, f"{case.name} {variant}")
    else:
        copy_adapter(adapter, model)
    return model


@torch.no_grad()
def copy_adapter(adapter: Mapping[str, Tensor], model: nn.Module) -> None:
    """Copies the adapter's tensors into a model, which has to have exactly these."""
    own = adapter_of(model)
    assert own.keys() == adapter.keys()
    for name, tensor in adapter.items():
        if name.endswith("lora_magnitude_vector"):
            tensor = tensor.flatten()
        assert own[name].shape == tensor.shape, name
        own[name].copy_(tensor)


def step(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the adapter's gradients of a loss that depends on all of the output."""
    model.zero_grad()
    output = output_of(model, batch)
    probe = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    (output * probe.to(output.dtype)).sum().backward()
    grads = {
        name: parameter.grad.detach().clone()
        for name, parameter in adapter_of(model).items()
        if parameter.grad is not None
    }
    return output.detach(), grads


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-5, what: str = "") -> None:
    """Asserts that the largest difference is within the tolerance of the largest value."""
    theirs = theirs.reshape(ours.shape)
    largest = theirs.abs().max()
    assert largest > 0, f"{what} is all zeros, which shows nothing"
    difference = ((ours - theirs).abs().max() / largest).item()
    assert difference <= tolerance, f"{what} differs by {difference:.1e} of its largest value"


def bits_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers of the base."""
    state = model.state_dict(keep_vars=False)
    return {name: t.clone() for name, t in state.items() if "lora_" not in name}


def assert_same_bits(model: nn.Module, before: Mapping[str, Tensor]) -> None:
    """Asserts that the base's names, dtypes and values are unchanged."""
    after = bits_of(model)
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        assert torch.equal(after[name], tensor), name


# ------------------------------------------------------------------------------------------------
# The papers' formulas, with whole weights
# ------------------------------------------------------------------------------------------------


def scaling_of(variant: str) -> float:
    """alpha / r; alpha / √r where the variant is rank-stabilized."""
    return ALPHA / (math.sqrt(R) if "rslora" in variant else R)


def adapted_weights(
    base: nn.Module, adapter: Mapping[str, Tensor], variant: str
) -> dict[str, Tensor]:
    """The adapted modules' weights by name, through which gradients flow to the adapter.

    They are W + s B A or, for DoRA, m · (W + s B A) / ||W + s B A||, whose norm has no gradient.
    """
    weights = {}
    for name, A in adapter.items():
        module, _, what = name.rpartition(".")
        if what != "lora_A":
            continue
        weight_name = weight_of(base, module)
        weight = base.get_parameter(weight_name)
        is_transposed = holds_inputs_first(base, module)
        matrix = weight.t() if is_transposed else weight.flatten(1)
        B = adapter[f"{module}.lora_B"]
        matrix = matrix + scaling_of(variant) * B.flatten(1) @ A.flatten(1)
        if "dora" in variant:
            m = adapter[f"{module}.lora_magnitude_vector"]
            matrix = m.view(-1, 1) * matrix / matrix.detach().norm(dim=1, keepdim=True)
        weights[weight_name] = matrix.t() if is_transposed else matrix.view(weight.shape)
    return weights


def weight_of(base: nn.Module, module: str) -> str:
    """The name of the weight that the update of a module is added to."""
    own = {name for name, _ in base.named_parameters()}
    # A module's weight, a packed in_proj's, or that of a projection that is not a module.
    return next(
        n for n in (f"{module}.weight", f"{module}.in_proj_weight", f"{module}_weight") if n in own
    )


def holds_inputs_first(base: nn.Module, module: str) -> bool:
    """Whether the weight is the transpose of (out, in): an embedding's, and Conv1D's of GPT-2."""
    layer = dict(base.named_modules()).get(module)
    return isinstance(layer, nn.Embedding | transformers.pytorch_utils.Conv1D)


def reference_step(
    case: Case, adapter: Mapping[str, Tensor], variant: str, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, dict[str, Tensor]]:
    """Does the same as `step` for the plain model, with `adapted_weights`."""
    base = case.build().to(dtype)
    leaves = {name: t.detach().to(dtype).requires_grad_() for name, t in adapter.items()}
    batch = to(case.batch(), dtype)
    weights = adapted_weights(base, leaves, variant)
    weights = {f"model.{name}": weight for name, weight in weights.items()}
    output = torch.func.functional_call(_Call(base), weights, (batch,))
    probe = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    (output * probe.to(dtype)).sum().backward()
    return output.detach(), {name: leaf.grad for name, leaf in leaves.items()}


class _Call(nn.Module):
    """Makes `output_of` a model's forward method."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Tensor:
        """The output."""
        return output_of(self.model, batch)


def to(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch with its floating-point tensors in another dtype."""
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
    }
