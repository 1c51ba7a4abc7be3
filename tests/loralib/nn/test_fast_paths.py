"""Tests of the switch that turns the fast paths off."""

import importlib

import pytest
import torch
from compare import assert_close_to_rounding
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
    """Imports the module again, as in a new process, with LORALIB_PLAIN set to a text."""

    def read(text):
        monkeypatch.setenv("LORALIB_PLAIN", text)
        return importlib.reload(module)

    yield read
    monkeypatch.undo()
    importlib.reload(module)


@pytest.mark.parametrize(
    ("text", "is_off"), [("1", True), ("yes", True), ("0", False), ("", False)]
)
def test_the_environment_turns_fast_paths_off(with_variable, text, is_off):
    assert with_variable(text).are_fast_paths_off() == is_off


def test_a_block_turns_fast_paths_off_or_on_until_it_ends():
    before = module.are_fast_paths_off()
    for is_off in (True, False):
        with module.fast_paths_off(is_off):
            assert module.are_fast_paths_off() == is_off
            with module.fast_paths_off(not is_off):
                assert module.are_fast_paths_off() != is_off
            assert module.are_fast_paths_off() == is_off
        assert module.are_fast_paths_off() == before


def test_an_error_in_a_block_restores_the_switch():
    before = module.are_fast_paths_off()
    with pytest.raises(ZeroDivisionError), module.fast_paths_off(not before):
        raise ZeroDivisionError
    assert module.are_fast_paths_off() == before


class FlopCounterMode(TorchDispatchMode):
    """Recognized by its name as a mode that counts public operations."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_fast_paths_are_off_inside_operation_counters():
    class AnyMode(FlopCounterMode):
        pass

    with FlopCounterMode(), AnyMode():
        assert module.needs_public_operations()
        assert module.are_fast_paths_off()
    with AnyMode():
        assert not module.needs_public_operations()
    assert not module.needs_public_operations()


@pytest.mark.parametrize("rows", [64, 2048])
def test_an_operation_counter_counts_all_of_a_layers_products(rows):
    layer, x = lora.Linear(768, 768, r=8), torch.randn(rows, 768)
    with flop_counter.FlopCounterMode(display=False) as counted:
        layer(x)
    assert counted.get_total_flops() == 2 * rows * 768 * (768 + 8 + 8)


OPERATIONS = torch.ops.aten.mm.default, torch.ops.aten.addmm.default


def save_products(context, operation, *args, **kwargs):
    is_saved = operation in OPERATIONS
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("kind", ["linear", "dora", "slices", "embedding", "attention"])
def test_selective_checkpointing_gives_the_same_gradients(kind):
    """It saves the results of products, so nothing may be added to them in place."""
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
        context_fn=lambda: create_selective_checkpoint_contexts(save_products),
    )
    found = torch.autograd.grad(out.square().sum(), trained.values())
    for ours, theirs in zip(found, expected, strict=True):
        assert_close_to_rounding(ours, theirs, terms=15 * 12)


def test_compiling_needs_no_public_operations_but_exporting_does():
    class Asks(nn.Module):
        def forward(self, x):
            return x + float(module.needs_public_operations(x))

    x = torch.zeros(1)
    assert torch.compile(Asks(), backend="eager")(x) == 0
    for strict in (True, False):
        assert torch.export.export(Asks(), (x,), strict=strict).module()(x) == 1
