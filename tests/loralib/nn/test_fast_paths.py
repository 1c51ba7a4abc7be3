"""The switch that turns the fast paths off: by the environment, and within a block."""

import importlib

import pytest
import torch
from torch import nn
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import loralib as lora
from loralib.nn import fast_paths as module


@pytest.fixture
def with_variable(monkeypatch):
    """Reads the module again, as a new process does, with LORALIB_PLAIN set to a text."""

    def read(text):
        monkeypatch.setenv("LORALIB_PLAIN", text)
        return importlib.reload(module)

    yield read
    monkeypatch.undo()
    importlib.reload(module)


@pytest.mark.parametrize(("text", "on"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_the_environment_turns_it_on(with_variable, text, on):
    assert with_variable(text).are_fast_paths_off() == on


def test_a_block_turns_it_on_and_off_again():
    before = module.are_fast_paths_off()
    for on in (True, False):
        with module.fast_paths_off(on):
            assert module.are_fast_paths_off() == on
            with module.fast_paths_off(not on):
                assert module.are_fast_paths_off() != on
            assert module.are_fast_paths_off() == on
        assert module.are_fast_paths_off() == before


def test_an_error_in_a_block_ends_it():
    before = module.are_fast_paths_off()
    with pytest.raises(ZeroDivisionError), module.fast_paths_off(not before):
        raise ZeroDivisionError
    assert module.are_fast_paths_off() == before


class FlopCounterMode(TorchDispatchMode):
    """One of those whose name says that they count public operations."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_it_is_on_within_modes_that_know_public_operations_alone():
    class AnyMode(FlopCounterMode):
        pass

    with FlopCounterMode(), AnyMode():
        assert module.needs_public_operations()
        assert module.are_fast_paths_off()
    with AnyMode():
        assert not module.needs_public_operations()
    assert not module.needs_public_operations()


@pytest.mark.parametrize("rows", [64, 2048])
def test_what_a_layer_computes_is_counted(rows):
    layer, x = lora.Linear(768, 768, r=8), torch.randn(rows, 768)
    with flop_counter.FlopCounterMode(display=False) as counted:
        layer(x)
    assert counted.get_total_flops() == 2 * rows * 768 * (768 + 8 + 8)


OPERATIONS = torch.ops.aten.mm.default, torch.ops.aten.addmm.default


def keep_products(context, operation, *args, **kwargs):
    keep = operation in OPERATIONS
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("kind", ["linear", "dora", "slices", "embedding", "attention"])
def test_selective_checkpointing(kind):
    """It keeps what products return, which nothing may then be added to in place."""
    torch.manual_seed(0)
    x, variant = torch.randn(5, 3, 8, requires_grad=True), "dora" if kind == "dora" else "lora"
    model = nn.Sequential(nn.Linear(8, 12))
    if kind == "embedding":
        model, x = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 3)), torch.randint(9, (5, 3))
    if kind == "attention":
        model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    slices = {"0": [True, False, True]} if kind == "slices" else None
    targets = {"attention": "self_attn"}.get(kind, "0")
    lora.add_lora(model, targets, r=2, variant=variant, enable_lora=slices)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for parameter in trained.values():
        nn.init.normal_(parameter)
    expected = torch.autograd.grad(model(x).square().sum(), trained.values())
    out = checkpoint(
        *(model, x),
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(keep_products),
    )
    found = torch.autograd.grad(out.square().sum(), trained.values())
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
