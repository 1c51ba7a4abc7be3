"""Trains LoRA in mixed precision: frozen weights in half precision, trained ones in float32.

A frozen weight is only used in products, so it is held once, in the precision of the product. What
is trained, and the optimizer's state, stay in float32, because updates are too small for half.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..nn import products

_PRODUCTS = "products"  # a key of the state, next to the scaler's entries


def compute_dtype(fp16: bool, bf16: bool) -> torch.dtype:
    """Returns the precision in which matrices are multiplied."""
    return torch.float16 if fp16 else torch.bfloat16 if bf16 else torch.float32


def check_precision(fp16: bool, bf16: bool, device: torch.device) -> None:
    """Checks that a device supports the half precision that the flags ask for.

    Args:
        fp16, bf16: the flags.
        device: where the run computes; a GPU has to be the current one.

    Raises:
        ValueError: it does not.
    """
    if fp16 and device.type != "cuda":
        raise ValueError("fp16 needs a GPU: use bf16, which works on a CPU as well")
    if not bf16 or device.type != "cuda":
        return
    # PyTorch would emulate bfloat16, which is slower than float32, and lacks some operations.
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ValueError(
            f"bf16 needs a GPU with bfloat16, and {torch.cuda.get_device_name()} has none: "
            "leave it out, or train with fp16"
        )


def estimate_precision(fp16: bool, bf16: bool, device: torch.device) -> tuple[bool, bool]:
    """Returns the flags fp16 and bf16 with which an estimate counts and times steps.

    On a CPU, bfloat16, which takes the same memory, stands for float16. See estimate.py.

    Raises:
        ValueError: the run asks for bfloat16, and the device has none.
    """
    check_precision(False, bf16, device)
    is_gpu = device.type == "cuda"
    return fp16 and is_gpu, bf16 or (fp16 and not is_gpu)


def cast_frozen(
    model: nn.Module, dtype: torch.dtype, read: Mapping[str, Tensor] | None = None
) -> None:
    """Casts the parameters of `model` that need no gradient to `dtype`, in place.

    LoRA's parameters stay as they are, even if A is frozen: they are small, and belong to the
    adapter.

    Args:
        model: on the device that `read` is on, if that is given.
        dtype: what the frozen parameters are held in.
        read: tensors as read from a file, by the parameters' names. One that equals the cast
            parameter is used in its place, so that a memory-mapped file in `dtype` is not copied.
    """
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and parameter.is_floating_point() and "lora_" not in name:
            parameter.data = _read_or_cast((read or {}).get(name), parameter.data.to(dtype))


def _read_or_cast(read: Tensor | None, cast: Tensor) -> Tensor:
    """Returns what was read if it equals the cast, else the cast."""
    if read is None or read.device != cast.device or read.dtype != cast.dtype:
        return cast
    if read.data_ptr() == cast.data_ptr():  # the same memory needs no comparison
        return cast
    return read if torch.equal(read, cast) else cast


class Precision:
    """Autocast, backward pass and update in float32, bfloat16 or float16.

    float16 uses a gradient scaler. Half precision only saves memory and casts if the model's frozen
    weights are held in it by `cast_frozen`, which this class does not check.

    Args:
        dtype: what matrices are multiplied in.
        device_type: "cpu" or "cuda".
        scaled: whether gradients are scaled in float16. False where steps are only counted, because
            the scaler decides by the gradients' values.
    """

    def __init__(self, dtype: torch.dtype, device_type: str, scaled: bool = True):
        self.dtype = dtype
        self.device_type = device_type
        needs_scaler = scaled and dtype is torch.float16
        self.scaler = torch.amp.GradScaler(device_type, enabled=needs_scaler)

    def autocast(self) -> AbstractContextManager:
        """Returns the context for a forward pass."""
        if self.dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype)

    def backward(self, loss: Tensor) -> None:
        """Adds the loss's gradients to those of the parameters."""
        self.scaler.scale(loss).backward()

    def step(self, optimizer: Optimizer, max_norm: float) -> bool:
        """Clips the gradients' norm to `max_norm`, if that is positive, and updates the parameters.

        Returns:
            Whether there was an update: the scaler skips it if gradients have overflowed.
        """
        if max_norm > 0:
            self.scaler.unscale_(optimizer)
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(trained, max_norm)
        updates: list[bool] = []

        def note(optimizer: Optimizer, *_: Any) -> None:
            # A fused optimizer is called in any case, and skips the update by its found_inf.
            found_inf = getattr(optimizer, "found_inf", None)
            updates.append(found_inf is None or not found_inf.item())

        # The scaler has to wait for the device. Asking it for its scale would be a second wait.
        with optimizer.register_step_post_hook(note):
            self.scaler.step(optimizer)
        self.scaler.update()
        return any(updates)

    def state_dict(self) -> dict:
        """Returns the scaler's state, empty except in float16, and how products are computed."""
        # The choices are text, because `check_structure` compares states' structures, and runs of
        # one model may have choices for more or fewer kinds of products.
        return {**self.scaler.state_dict(), _PRODUCTS: json.dumps(products.choices())}

    def load_state_dict(self, state: dict) -> None:
        """Restores the scaler and the choices of products from what `state_dict` returned."""
        scaler = {name: value for name, value in state.items() if name != _PRODUCTS}
        if scaler:
            self.scaler.load_state_dict(scaler)
        products.use_choices(json.loads(state[_PRODUCTS]))


@contextmanager
def all_in_half(model: nn.Module) -> Iterator[None]:
    """Holds all of `model` in float16 within the block, and restores every tensor afterwards."""
    held = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())]
    try:
        for tensor, data in held:
            if data.is_floating_point():
                tensor.data = data.half()
        yield
    finally:
        for tensor, data in held:
            tensor.data = data
