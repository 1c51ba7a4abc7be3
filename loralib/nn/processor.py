"""What is known of the processor: its name, its maker, and what it has instructions for."""

import functools
import platform
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

# Instructions that multiply in bfloat16, or convert it, by Linux's names: x86's, and ARM's.
_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"}
# Instructions that oneDNN's kernels differ by, and PyTorch's name of the processor's kind does not.
_INSTRUCTIONS = ("avx512_bf16", "amx_bf16")


def name() -> str:
    """Its name, and what it can: one name may stand for several, as in virtual machines."""
    known = _cpuinfo()
    flags = known.get("flags", "").split()
    instructions = [instruction for instruction in _INSTRUCTIONS if instruction in flags]
    named = known.get("model name") or _arm_name(known) or platform.processor()
    return " ".join([named, torch.backends.cpu.get_cpu_capability(), *instructions])


@functools.cache
def is_intel() -> bool:
    """Whether it is known to be Intel's, as is MKL."""
    return "Intel" in (_cpuinfo().get("vendor_id") or platform.processor())


def has_avx512() -> bool:
    """Whether PyTorch's kernels use AVX-512."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def has_onednn(dtype: torch.dtype) -> bool:
    """Whether PyTorch has oneDNN's linear layer for this dtype on this processor."""
    has_it = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has_it and (dtype is torch.float32 or has_avx512())


@functools.cache
def has_bfloat16() -> bool:
    """Whether it has instructions for bfloat16 that PyTorch uses, as far as is known."""
    is_supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    if is_supported is not None and not is_supported():
        return False
    known = _cpuinfo()
    flags = (known.get("flags") or known.get("Features") or "").split()
    return not flags or not _BFLOAT16_FLAGS.isdisjoint(flags)


def is_emulated(x: Tensor) -> bool:
    """Whether x is on a CPU that is known to have no instructions for products of its dtype."""
    return x.dtype is torch.bfloat16 and x.device.type == "cpu" and not has_bfloat16()


def _arm_name(known: Mapping[str, str]) -> str:
    """What Linux says of ARM's processors, which it does not name: numbers of maker and kind."""
    return " ".join(filter(None, (known.get("CPU implementer"), known.get("CPU part"))))


def _cpuinfo() -> dict[str, str]:
    """What Linux says of the first core; elsewhere nothing."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    fields = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {field.strip(): value.strip() for field, _, value in fields}
