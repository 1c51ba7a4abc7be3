"""Tests of what is known about the processor, from Linux and PyTorch."""

from types import SimpleNamespace

import pytest
import torch

from loralib.nn import processor, products


@pytest.mark.parametrize(
    ("supported", "flags", "expected"),
    [
        (True, "flags: avx512f avx512_bf16", True),
        (True, "flags: avx512f avx512_vnni", False),  # emulated by oneDNN
        (False, "flags: avx2 avx512_bf16", False),  # switched off in PyTorch
        (True, "flags: avx2 avx_ne_convert", True),
        (True, "Features: asimd bf16", True),
        (False, "Features: asimd", False),
        (True, "", True),  # not on Linux
        (None, "flags: avx2", False),  # a PyTorch without oneDNN
        (None, "flags: avx512_bf16", True),
    ],
)
def test_bfloat16_needs_instructions_that_pytorch_uses(monkeypatch, supported, flags, expected):
    core = "\t: ".join(flags.split(": ")) + "\n\n"
    monkeypatch.setattr(processor.Path, "read_text", lambda *_, **__: core)
    operators = {} if supported is None else {"_is_mkldnn_bf16_supported": lambda: supported}
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace(**operators))
    assert processor.has_bfloat16.__wrapped__() == expected


@pytest.mark.parametrize("name", ["amx_bf16", "avx512_bf16"])
def test_a_machines_name_depends_on_instructions_that_matter(monkeypatch, name):
    flags = ["fpu", "avx512f", "amx_bf16", "avx512_bf16"]

    def machine_with(flags: list[str]) -> str:
        core = f"model name\t: Some Processor\nflags\t\t: {' '.join(flags)}\n\n"
        monkeypatch.setattr(processor.Path, "read_text", lambda *_, **__: core * 2)
        return products.machine()

    with_it = machine_with(flags)
    assert with_it.startswith("Some Processor ")
    assert machine_with([flag for flag in flags if flag != name]) != with_it
    assert machine_with([*flags, "unrelated"]) == with_it
