"""Reads the processor's name, its vendor, and what it has instructions for."""

import functools
import platform
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

# Linux's names, on x86 and on ARM, of instructions that multiply in bfloat16 or convert it.
_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"}
# Instructions that select other kernels in oneDNN, but do not show in PyTorch's CPU capability.
_INSTRUCTIONS = ("avx512_bf16", "amx_bf16")


def name() -> str:
    """Returns the processor's name, PyTorch's CPU capability, and instructions that matter.

    The name alone may stand for several processors, as in virtual machines.
    """
    known = _cpuinfo()
    flags = known.get("flags", "").split()
    instructions = [instruction for instruction in _INSTRUCTIONS if instruction in flags]
    named = known.get("model name") or _arm_name(known) or platform.processor()
    return " ".join([named, torch.backends.cpu.get_cpu_capability(), *instructions])


@functools.cache
def is_intel() -> bool:
    """Returns whether the processor is known to be made by Intel, as MKL is."""
    return "Intel" in (_cpuinfo().get("vendor_id") or platform.processor())


def has_avx512() -> bool:
    """Returns whether PyTorch's kernels use AVX-512."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def has_onednn(dtype: torch.dtype) -> bool:
    """Returns whether PyTorch has oneDNN's linear layer for this dtype on this processor."""
    has_it = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has_it and (dtype is torch.float32 or has_avx512())


@functools.cache
def has_bfloat16() -> bool:
    """Returns whether, as far as is known, it has bfloat16 instructions that PyTorch uses."""
    is_supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    if is_supported is not None and not is_supported():
        return False
    known = _cpuinfo()
    flags = (known.get("flags") or known.get("Features") or "").split()
    return not flags or not _BFLOAT16_FLAGS.isdisjoint(flags)


def is_emulated(x: Tensor) -> bool:
    """Returns whether x is on a CPU known to lack instructions for products of its dtype."""
    return x.dtype is torch.bfloat16 and x.device.type == "cpu" and not has_bfloat16()


def _arm_name(known: Mapping[str, str]) -> str:
    """Returns the numbers of implementer and part, since Linux has no names of ARM processors."""
    return " ".join(filter(None, (known.get("CPU implementer"), known.get("CPU part"))))


def _cpuinfo() -> dict[str, str]:
    """Returns the fields of /proc/cpuinfo for the first core; empty on systems without it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    fields = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {field.strip(): value.strip() for field, _, value in fields}
