"""AdamW as used in LoRA's release: that of Transformers 4.4.2, and that of its GPT-2 experiments.

With gradient g, t counted from 1 (Loshchilov & Hutter, "Decoupled Weight Decay Regularization"):

    m  =  β1·m + (1 − β1)·g            v  =  β2·v + (1 − β2)·g²
    p  -=  lr · c · m / (√v + eps)     c  =  √(1 − β2^t) / (1 − β1^t),  or 1 without correct_bias
    p  -=  lr · weight_decay · p

Unlike in `torch.optim.AdamW`, eps is added to √v without bias correction, and decay comes last.
"""

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


def decay_groups(
    model: nn.Module, weight_decay: float, no_decay_bias: bool = True
) -> list[dict[str, Any]]:
    """Returns a model's trained parameters as an optimizer's groups, in the model's order.

    Tied parameters occur once.

    Args:
        model: parameters that need no gradient are left out.
        weight_decay: for the first group.
        no_decay_bias: whether to put biases and layer norms into a second group, without decay.

    Returns:
        One or two groups; none if nothing is trained.
    """
    decayed: list[nn.Parameter] = []
    spared: list[nn.Parameter] = []
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or parameter in seen:
                continue
            seen.add(parameter)
            is_spared = no_decay_bias and (
                isinstance(module, nn.LayerNorm) or name.endswith("bias")
            )
            (spared if is_spared else decayed).append(parameter)
    groups = (
        {"params": decayed, "weight_decay": weight_decay},
        {"params": spared, "weight_decay": 0.0},
    )
    return [group for group in groups if group["params"]]


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay, by the formula at the top of this file.

    A group's tensors are updated together, so that many small ones take few kernel launches.

    Args:
        params: tensors to train, or groups of them as in every PyTorch optimizer.
        lr: learning rate, at least 0.
        betas: (β1, β2), each in [0, 1).
        eps: at least 0, in the unit of a gradient. With 0, a tensor whose gradients were all 0 so
            far (such as LoRA's A while B is 0) becomes NaN.
        weight_decay: at least 0.
        correct_bias: whether m and v are corrected for their start at 0.

    Raises:
        ValueError: a hyperparameter is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
    ):
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} has to be at least 0, but is {value}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas have to be at least 0 and below 1, but are {tuple(betas)}")
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "correct_bias": correct_bias,
        }
        super().__init__(params, defaults)

    # PyTorch decorates these to keep torch.compile out, and the decorator imports the compiler,
    # which takes a second before the first step of a run, or at its first checkpoint. Undecorated,
    # they do the same.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    _load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned: averages, steps, and the groups' settings.

        Raises:
            ValueError: the state is of another kind of optimizer, of other groups or tensors, or
                damaged.
        """
        if not all("correct_bias" in group for group in state_dict["param_groups"]):
            raise ValueError("the state is another optimizer's, not that of loralib's AdamW")
        self._load_state_dict(state_dict)
        for p, state in self.state.items():
            for name in ("exp_avg", "exp_avg_sq"):
                if getattr(state.get(name), "shape", None) != p.shape:
                    raise ValueError(
                        f"the state of a {tuple(p.shape)} parameter has no {name} of that shape"
                    )
            if type(state.get("step")) is not int:
                raise ValueError("the step in a parameter's state is not an integer")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every tensor that has a gradient.

        Args:
            closure: computes the gradients and returns the loss; None if the gradients are there.

        Returns:
            What `closure` returned.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(params, group)
        return loss

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        gradients = [p.grad for p in params if p.grad is not None]
        if any(gradient.is_sparse for gradient in gradients):
            raise RuntimeError("AdamW does not support sparse gradients")
        states = [self._state_of(p) for p in params]
        for state in states:
            state["step"] += 1
        exp_avg = [state["exp_avg"] for state in states]
        exp_avg_sq = [state["exp_avg_sq"] for state in states]
        beta1, beta2 = group["betas"]

        torch._foreach_lerp_(exp_avg, gradients, 1 - beta1)
        torch._foreach_mul_(exp_avg_sq, beta2)
        torch._foreach_addcmul_(exp_avg_sq, gradients, gradients, 1 - beta2)
        denominators = torch._foreach_sqrt(exp_avg_sq)
        torch._foreach_add_(denominators, group["eps"])
        rates = [-group["lr"] * _correction(state["step"], group) for state in states]
        torch._foreach_addcdiv_(params, exp_avg, denominators, rates)
        if group["weight_decay"] > 0:
            torch._foreach_add_(params, params, alpha=-group["lr"] * group["weight_decay"])

    def _state_of(self, p: Tensor) -> dict[str, Any]:
        state = self.state[p]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
        return state


def _correction(step: int, group: dict[str, Any]) -> float:
    """Returns c of the formula."""
    if not group["correct_bias"]:
        return 1.0
    beta1, beta2 = group["betas"]
    return math.sqrt(1 - beta2**step) / (1 - beta1**step)
