"""The precision that LoRA is trained in: frozen weights in half, trained ones in float32.

A frozen weight is only ever multiplied with, so it is held once, in the precision of the product.
What is trained, and the optimizer's state, stay in float32: the updates are too small for half.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..nn import products

_PRODUCTS = "products"  # in a state, beside the scaler's entries


def compute_dtype(fp16: bool, bf16: bool) -> torch.dtype:
    """The precision that matrices are multiplied in."""
    return torch.float16 if fp16 else torch.bfloat16 if bf16 else torch.float32


def check_precision(fp16: bool, bf16: bool, device: torch.device) -> None:
    """Checks that a device has the half precision that the flags ask for.

    Args:
        fp16, bf16: the flags.
        device: where the run computes; of GPUs the current one.

    Raises:
        ValueError: it has not.
    """
    if fp16 and device.type != "cuda":
        raise ValueError("fp16 needs a GPU: use bf16, which works on a CPU as well")
    if not bf16 or device.type != "cuda":
        return
    # PyTorch would emulate it, which is slower than float32, and not for all operations.
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ValueError(
            f"bf16 needs a GPU with bfloat16, and {torch.cuda.get_device_name()} has none: "
            "leave it out, or train with fp16"
        )


def counted_half(fp16: bool, bf16: bool, device: torch.device) -> tuple[bool, bool]:
    """The flags fp16 and bf16 that a run's steps are counted and timed with; see estimate.py.

    A CPU's stand for a GPU's: float16 is bfloat16 there, which takes the same memory.

    Raises:
        ValueError: the device has no bfloat16, and the run asks for it.
    """
    check_precision(False, bf16, device)
    is_gpu = device.type == "cuda"
    return fp16 and is_gpu, bf16 or (fp16 and not is_gpu)


def hold_frozen_in(
    model: nn.Module, dtype: torch.dtype, read: Mapping[str, Tensor] | None = None
) -> None:
    """Casts the parameters of `model` that need no gradient to `dtype`, in place.

    LoRA's stay as they are, also where A is frozen: they are small, and belong to the adapter.

    Args:
        model: on the device that `read` is on, if that is given.
        dtype: what they are held in.
        read: tensors that a file brought, by the parameters' names. Where one is what a cast gives,
            it takes the cast's place: a file in `dtype` that is mapped is not copied.
    """
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and parameter.is_floating_point() and "lora_" not in name:
            parameter.data = _read_or_cast((read or {}).get(name), parameter.data.to(dtype))


def _read_or_cast(read: Tensor | None, cast: Tensor) -> Tensor:
    """What was read, where it is the same; else the cast."""
    if read is None or read.device != cast.device or read.dtype != cast.dtype:
        return cast
    if read.data_ptr() == cast.data_ptr():  # which need not be read
        return cast
    return read if torch.equal(read, cast) else cast


class Precision:
    """How losses are computed and their gradients applied, in float32, bfloat16 or float16.

    float16 goes with a gradient scaler. A model's frozen weights have to be held in half precision
    by `hold_frozen_in` for half precision to save memory and casts; nothing here asks for it.

    Args:
        dtype: what matrices are multiplied in.
        device_type: "cpu" or "cuda".
        scaled: whether float16's gradients are; not where steps are counted, since the scaler
            decides by the gradients' values.
    """

    def __init__(self, dtype: torch.dtype, device_type: str, scaled: bool = True):
        self.dtype = dtype
        self.device_type = device_type
        needs_scaler = scaled and dtype is torch.float16
        self.scaler = torch.amp.GradScaler(device_type, enabled=needs_scaler)

    def autocast(self) -> AbstractContextManager:
        """The context for a forward pass."""
        if self.dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype)

    def backward(self, loss: Tensor) -> None:
        """Adds the loss's gradients to the parameters'."""
        self.scaler.scale(loss).backward()

    def step(
        self, optimizer: Optimizer, parameters: Iterable[nn.Parameter], max_norm: float
    ) -> bool:
        """Clips the gradients' norm to `max_norm`, where positive, and updates the parameters.

        Returns:
            Whether there was an update: the scaler skips one whose gradients have overflowed.
        """
        if max_norm > 0:
            self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, max_norm)
        updates: list[bool] = []

        def note(optimizer: Optimizer, *_: Any) -> None:
            # A fused optimizer is called in any case, with what the scaler found: it then skips.
            found_inf = getattr(optimizer, "found_inf", None)
            updates.append(found_inf is None or not found_inf.item())

        # The scaler has to wait for the device; to ask it for its scale would be another wait.
        with optimizer.register_step_post_hook(note):
            self.scaler.step(optimizer)
        self.scaler.update()
        return any(updates)

    def state_dict(self) -> dict:
        """The scaler's state, empty but in float16, and how products are computed."""
        # As text, because runs of one model may have chosen for more or fewer kinds of products.
        return {**self.scaler.state_dict(), _PRODUCTS: json.dumps(products.choices())}

    def load_state_dict(self, state: dict) -> None:
        """Puts the scaler and the products where `state_dict` found them."""
        scaler = {name: value for name, value in state.items() if name != _PRODUCTS}
        if scaler:
            self.scaler.load_state_dict(scaler)
        products.use_choices(json.loads(state[_PRODUCTS]))


@contextmanager
def all_in_half(model: nn.Module) -> Iterator[None]:
    """Holds all of `model` in float16 within the block, and gives every tensor back its bits."""
    held = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())]
    try:
        for tensor, data in held:
            if data.is_floating_point():
                tensor.data = data.half()
        yield
    finally:
        for tensor, data in held:
            tensor.data = data
