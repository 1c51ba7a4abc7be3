"""A simulated GPU: its tensors report ``cuda:0`` as their device, and compute on the CPU.

    with SimulatedGpu() as gpu:
        model.to("cuda:0")
        ...
    assert gpu.waits == [] and gpu.launches.total() < 100

It records what would happen on a real GPU:

    waits      what makes the CPU wait for the device: reading a value, a size that depends on
               values, a copy to the CPU, a copy from memory that is not pinned
    launches   the operations of PyTorch that compute something, by name; views compute nothing, and
               an operation on a list of tensors counts once, because it is launched once

An operation on tensors of both devices is an error, as on a GPU. Numbers on the CPU (tensors of
dimension 0) may take part, but may not be stacked or concatenated. PyTorch's attention kernels for
GPUs are computed by their formulas. Autocast is the CPU's, which multiplies the same things in half
precision.

For PyTorch's C++ code these tensors are on the CPU, because autograd does not work on a device that
does not exist. What that code would decide by device is decided here, in `_FUNCTIONS`.
"""

import contextlib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from paths import ROOT
from simulated_kernels import HALF, KERNELS
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from loralib import merged_copy, tensor_kinds
from loralib.training.determinism import set_up_device

GPU = torch.device("cuda", 0)

aten = torch.ops.aten

# Operators that allocate memory or only read, and compute nothing.
_NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_NO_KERNEL |= {"_unsafe_view", "detach", "lift_fresh", "_local_scalar_dense", "item", "set_data"}
# Operators whose result is a value, or has a size that depends on values.
_WAITING = {"_local_scalar_dense", "item", "nonzero", "masked_select", "equal", "is_nonzero"}
_WAITING |= {"unique_dim", "_unique2", "unique_consecutive", "allclose", "bincount"}
_WAITING |= {"_linalg_check_errors"}
# Operators whose kernels take a number in place of a tensor.
_WITH_NUMBERS = {"add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_"}
# Operators that refuse numbers on the CPU as well.
_JOINING = {"cat", "stack"}


class OnGpu(Tensor):
    """A tensor on the simulated device."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            copied = on_gpu(on_cpu(self.detach()).clone()).requires_grad_(self.requires_grad)
            if isinstance(self, nn.Parameter):
                copied._is_param = True
            memo[id(self)] = copied
        return memo[id(self)]


def on_cpu(value: Any) -> Any:
    """A tensor of the device as one of the CPU, in the same memory; other values as they are."""
    if not isinstance(value, OnGpu):
        return value
    with torch._C._DisableTorchDispatch():
        return Tensor._make_subclass(Tensor, value)


def to_cpu(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, from the simulated device or from a real GPU."""
    return on_cpu(tensor) if isinstance(tensor, OnGpu) else tensor.detach().cpu()


def on_gpu(value: Any) -> Any:
    """A tensor of the CPU as one of the device, in the same memory; other values as they are."""
    if not isinstance(value, Tensor) or isinstance(value, OnGpu):
        return value
    return Tensor._make_subclass(OnGpu, value)


def compute(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Runs an operation of PyTorch on tensors of the device."""
    own: dict[int, Tensor] = {}

    def bare(value: Any) -> Any:
        if not isinstance(value, OnGpu):
            return value
        plain = on_cpu(value)
        own[id(plain)] = value
        return plain

    # These are kept to the end, so that no result can have the id of one of them.
    args, kwargs = tree_map(bare, (args, kwargs))
    given = _rounded_numbers(args, own) if func.overloadpacket.__name__ in _WITH_NUMBERS else args
    kernel = KERNELS.get(func, func)
    # A tensor that was changed in place is returned as the object that was given.
    return tree_map(lambda value: own.get(id(value), on_gpu(value)), kernel(*given, **kwargs))


def _rounded_numbers(args: tuple, own: dict[int, Tensor]) -> tuple:
    """The arguments as a GPU's kernel reads them: a number on the device in the tensor's dtype.

    A number of the CPU, which the kernel gets by value, keeps its precision.
    """
    tensors = [x for x in args if isinstance(x, Tensor) and x.dim() > 0]
    if not tensors or tensors[0].dtype not in HALF:
        return args
    half = tensors[0].dtype
    return tuple(
        x.to(half) if isinstance(x, Tensor) and x.dim() == 0 and id(x) in own else x for x in args
    )


class SimulatedGpu:
    """The device, within a ``with`` block.

    Attributes:
        waits: what the CPU waited for, each with the project's line that made it wait.
        launches: how often each operation was launched.
    """

    def __init__(self) -> None:
        self.waits: list[str] = []
        self.launches: Counter[str] = Counter()
        self._pinned: dict[int, Any] = {}

    def __enter__(self) -> "SimulatedGpu":
        self._stack = contextlib.ExitStack()
        for owner, name, value in _settings(self):
            self._stack.enter_context(mock.patch.object(owner, name, value))
        swap = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        self._stack.callback(torch.__future__.set_swap_module_params_on_conversion, swap)
        self._stack.enter_context(_Functions(self))
        self._stack.enter_context(_Operations(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def wait(self, what: str) -> None:
        """Records that the CPU waits for the device, and where in the project."""
        ours = (str(ROOT / "loralib"), str(ROOT / "NLU"), str(ROOT / "NLG"))
        frames = [f for f in traceback.extract_stack() if f.filename.startswith(ours)]
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "a test"
        self.waits.append(f"{what} in {where}")

    # ---- copies from device to device ----

    def pin(self, x: Tensor) -> Tensor:
        """A copy in pinned memory, from which the device copies without the CPU."""
        pinned = x.clone()
        storage = pinned.untyped_storage()
        self._pinned[storage.data_ptr()] = storage  # kept, so that no other tensor gets its address
        return pinned

    def is_pinned(self, x: Tensor) -> bool:
        """Whether a tensor of the CPU is in pinned memory."""
        return x.numel() == 0 or x.untyped_storage().data_ptr() in self._pinned

    def move(self, x: Tensor, device: torch.device, non_blocking: bool) -> Tensor:
        """A copy on the other device."""
        if x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError("gradients do not pass from device to device here")
        if isinstance(x, OnGpu):
            if not non_blocking:
                self.wait("a copy to the CPU")
            return on_cpu(x.detach()).clone()
        if not (non_blocking and self.is_pinned(x)):
            self.wait("a copy to the device, not from pinned memory")
        return on_gpu(x.detach().clone())


class RealGpu:
    """A real GPU in place of the simulated one; nothing is recorded.

    Attributes:
        waits, launches: as of `SimulatedGpu`.
    """

    def __init__(self) -> None:
        self.waits: list[str] = []
        self.launches: Counter[str] = Counter()

    def __enter__(self) -> "RealGpu":
        set_up_device()
        return self

    def __exit__(self, *error: Any) -> None:
        pass


GPUS = [SimulatedGpu, pytest.param(RealGpu, marks=pytest.mark.gpu)]


class _Operations(TorchDispatchMode):
    """Records operations, and computes those of the device."""

    def __init__(self, gpu: SimulatedGpu):
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        ours = [x for x in tensors if isinstance(x, OnGpu)]
        target = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        wanted = target is not None and target.type == "cuda"
        if not ours and not wanted:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name == "copy_":
            return self._copy(*args, **kwargs)
        others = [x for x in tensors if not isinstance(x, OnGpu)]
        theirs = [x for x in others if x.dim() > 0 or name in _JOINING]
        if theirs:
            raise RuntimeError(f"{func}: tensors of {GPU} and of the CPU together")
        self._note(func, name, args)
        if wanted:
            kwargs["device"] = torch.device("cpu")
            kwargs.pop("pin_memory", None)
        return tree_map(on_gpu, compute(func, args, kwargs))

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        # A number that is copied to the device may be Python's; `_copied` handles the CPU's.
        is_number = isinstance(target, OnGpu) and source.dim() == 0
        if isinstance(target, OnGpu) != isinstance(source, OnGpu) and not is_number:
            source = self.gpu.move(source.detach(), target.device, non_blocking)
        self.gpu.launches["copy_"] += 1
        on_cpu(target).copy_(on_cpu(source))
        return target

    def _note(self, func: Any, name: str, args: tuple) -> None:
        masks = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in _WAITING or masks or (func is aten.repeat_interleave.Tensor):
            self.gpu.wait(name)
        if not func.is_view and name not in _NO_KERNEL:
            self.gpu.launches[name] += 1


class _Functions(TorchFunctionMode):
    """Handles functions in which PyTorch decides by device before it dispatches operators."""

    def __init__(self, gpu: SimulatedGpu):
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func, types, args=(), kwargs=None):
        special = _FUNCTIONS.get(func)
        if special is None:
            return func(*args, **(kwargs or {}))
        return special(self.gpu, func, *args, **(kwargs or {}))


# ---- functions ----


def _to(gpu: SimulatedGpu, func: Callable, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    copy = kwargs.pop("copy", False)
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
    if device is not None and (device.type == "cuda") != isinstance(x, OnGpu):
        x, copy = gpu.move(x, device, non_blocking), False
    settings = {} if layout is None else {"memory_format": layout}
    if dtype in (None, x.dtype) and not copy and not settings:
        return x
    return func(x, x.dtype if dtype is None else dtype, copy=copy, **settings)


def _cpu(gpu: SimulatedGpu, func: Callable, x: Tensor) -> Tensor:
    return gpu.move(x, torch.device("cpu"), False) if isinstance(x, OnGpu) else x


def _read(gpu: SimulatedGpu, func: Callable, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    if isinstance(x, OnGpu):
        gpu.wait(func.__name__)
    return func(on_cpu(x), *args, **kwargs)


def _pin(gpu: SimulatedGpu, func: Callable, x: Tensor, *args: Any) -> Tensor:
    if isinstance(x, OnGpu):
        raise RuntimeError("only tensors of the CPU can be pinned")
    return gpu.pin(x)


def _show(gpu: SimulatedGpu, func: Callable, x: Tensor, **settings: Any) -> str:
    if isinstance(x, OnGpu):
        gpu.wait("showing a tensor")
    return func(on_cpu(x), **settings)


def _new(gpu: SimulatedGpu, func: Callable, *args: Any, device: Any = None, **more: Any) -> Tensor:
    device = None if device is None else torch.device(device)
    if device is not None and device.type not in ("cpu", "cuda"):
        return func(*args, device=device, **more)
    made = func(*args, **more)
    if device is None or (device.type == "cuda") == isinstance(made, OnGpu):
        return made
    return gpu.move(made.detach(), device, False).requires_grad_(made.requires_grad)


def _new_beside(gpu: SimulatedGpu, func: Callable, x: Tensor, *args: Any, **more: Any) -> Tensor:
    return _new(gpu, torch.tensor, *args, **{"device": x.device, "dtype": x.dtype, **more})


def _typed(gpu: SimulatedGpu, func: Callable, x: Tensor, *args: Any, **more: Any) -> Any:
    if not isinstance(x, OnGpu) or not args or isinstance(args[0], torch.dtype):
        return func(x, *args, **more)
    # Tensor types have a device too: that of torch.FloatTensor is the CPU.
    kind = args[0] if isinstance(args[0], str) else f"{args[0].__module__}.{args[0].__name__}"
    if "cuda" in kind:
        return x.to(getattr(torch, kind.rpartition(".")[2]).dtype)
    return func(gpu.move(x, torch.device("cpu"), False), *args, **more)


def _copied(
    gpu: SimulatedGpu, func: Callable, target: Tensor, source: Tensor, non_blocking: bool = False
) -> Tensor:
    if isinstance(target, OnGpu) and not isinstance(source, OnGpu) and source.dim() == 0:
        source = gpu.move(source, GPU, non_blocking)
    return func(target, source, non_blocking)


def _assigned(gpu: SimulatedGpu, func: Callable, target: Tensor, place: Any, value: Any) -> None:
    is_tensor = isinstance(value, Tensor) and not isinstance(value, OnGpu)
    if isinstance(target, OnGpu) and is_tensor and value.dim() == 0:
        value = gpu.move(value, GPU, False)
    func(target, place, value)


def _pickled(gpu: SimulatedGpu, func: Callable, x: Tensor, *args: Any) -> Any:
    if isinstance(x, OnGpu):
        gpu.wait("pickling a tensor")
    return func(x, *args)


def _dropout(gpu: SimulatedGpu, func: Callable, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if not isinstance(x, OnGpu):
        return func(x, *args, **kwargs)
    p, training, *_ = (*args, *kwargs.values(), True)  # F.dropout(x, p, training), as all call it
    return torch.native_dropout(x, p, training)[0] if training and p > 0 else x


def _attention(
    gpu: SimulatedGpu,
    func: Callable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """The kernel that PyTorch takes on a GPU: without a mask in half precision, flash attention."""
    settings = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    if not isinstance(query, OnGpu):
        return func(query, key, value, attn_mask, **settings)
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = (x.to(dtype) for x in (query, key, value))
    width = query.shape[-1]
    if attn_mask is None and query.dtype in HALF and width % 8 == 0 and width <= 256:
        return aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
    bias = attn_mask
    if bias is not None and bias.dtype is torch.bool:
        bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill(~bias, float("-inf"))
    if bias is not None:
        if any(stride % 8 for stride in bias.stride()[:-1]) or bias.stride(-1) != 1:
            columns = bias.shape[-1]  # as PyTorch does, whose kernel needs this alignment
            bias = F.pad(bias, (0, 8 - columns % 8))[..., :columns]
        bias = bias.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )[0]


_FUNCTIONS: dict[Any, Callable] = {
    Tensor.to: _to,
    Tensor.cpu: _cpu,
    Tensor.cuda: lambda gpu, func, x: _to(gpu, Tensor.to, x, GPU),
    Tensor.tolist: _read,
    Tensor.numpy: _read,
    Tensor.__array__: _read,
    Tensor.__repr__: _show,
    Tensor.__format__: lambda gpu, func, x, spec: _show(gpu, lambda bare: func(bare, spec), x),
    Tensor.__setitem__: _assigned,
    Tensor.__reduce_ex__: _pickled,
    Tensor.copy_: _copied,
    Tensor.new_tensor: _new_beside,
    Tensor.type: _typed,
    Tensor.pin_memory: _pin,
    Tensor.is_pinned: lambda gpu, func, x, *_: not isinstance(x, OnGpu) and gpu.is_pinned(x),
    torch.tensor: _new,
    torch.as_tensor: _new,
    F.dropout: _dropout,
    torch.dropout: _dropout,
    F.scaled_dot_product_attention: _attention,
}

# ---- what PyTorch reports about devices ----


def _by_device(lists: list[list[Tensor]]) -> dict[Any, Any]:
    found = _foreach_utils._group_tensors_by_device_and_dtype(lists)
    if not any(isinstance(x, OnGpu) for x in lists[0]):
        return found
    return {(GPU, dtype): group for (_, dtype), group in found.items()}


class _Autocast:
    """`torch.autocast`, in which a GPU's turns on the CPU's as well."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any):
        names = ("cuda", "cpu") if device_type == "cuda" else (device_type,)
        self._parts = [_autocast(name, *args, **kwargs) for name in names]

    def __enter__(self) -> None:
        for part in self._parts:
            part.__enter__()

    def __exit__(self, *error: Any) -> None:
        for part in reversed(self._parts):
            part.__exit__(*error)


_autocast, _is_ordinary = torch.autocast, tensor_kinds._is_ordinary


def _settings(gpu: SimulatedGpu) -> Iterator[tuple[Any, str, Any]]:
    """Yields what is patched while the device exists: owner, name, value."""
    yield torch, "autocast", _Autocast
    yield torch.accelerator, "is_available", lambda: True
    yield torch.backends.cuda, "is_flash_attention_available", lambda: True
    yield clip_grad, "_group_tensors_by_device_and_dtype", _by_device
    yield _foreach_utils, "_foreach_supported_types", [Tensor, OnGpu]
    # A real GPU has neither this class of tensors nor the two modes, so the project ignores them.
    yield tensor_kinds, "_is_ordinary", lambda kind: kind is OnGpu or _is_ordinary(kind)
    yield merged_copy, "_PLAIN", {*merged_copy._PLAIN, OnGpu}
    yield merged_copy, "has_mode", lambda: False
    for name, value in {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "is_bf16_supported": lambda *_, **__: True,
        "get_arch_list": list,  # empty: it is unknown what PyTorch was built for
        "get_device_properties": lambda *_: SimpleNamespace(major=9, minor=0),
        "max_memory_allocated": lambda *_: 0,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
        "synchronize": lambda *_: gpu.wait("synchronize"),
    }.items():
        yield torch.cuda, name, value
