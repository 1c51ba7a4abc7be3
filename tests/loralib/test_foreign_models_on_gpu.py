"""Tests of models with LoRA on a GPU, pretended or real: the CPU's results, and no waits for it."""

import copy

import pytest
import torch
from adapted_models import CASES
from compare import assert_close_to_rounding, assert_same_bits
from simulated_gpu import GPU, GPUS, to_cpu
from stacked_experts import MAGNITUDE, METHODS, TERMS, adapted, tokens
from torch import nn
from torch.optim import SGD

import loralib as lora
from loralib.adapters.merging import merge_into
from loralib.adapters.saving import adapter_of

# A dozen consecutive sums of up to 48 products, in which embeddings of up to 4 are added up.
SUMS, SIZE = 12 * 48, 16.0
IN_BANKS = [name for name, case in CASES.items() if case.in_bank]
VARIANTS = ["lora", "rslora+dora"]


def on(device, tensors):
    return [x.to(device) for x in tensors]


def two_steps(model, inputs):
    """Takes two steps of an optimizer, and returns the outputs before the second.

    Batch norms stay in their mode, because an adapter does not hold their running statistics.
    """
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        out = model(*inputs)
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return out.detach()


def state_on_cpu(model):
    return {name: to_cpu(x).detach() for name, x in model.state_dict().items()}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", GPUS)
def test_training_evaluation_and_saving(kind, name, variant, tmp_path):
    case, path = CASES[name], tmp_path / "adapter.safetensors"
    expected = case.adapted(variant=variant, lora_dropout=0.0)
    model = copy.deepcopy(expected)
    theirs = two_steps(expected, case.inputs)
    with kind() as gpu:
        inputs = on(GPU, case.inputs)
        model.to(GPU)
        gpu.waits.clear()
        ours = two_steps(model, inputs)
        with torch.no_grad():
            evaluated = [model(*inputs) for _ in "ab"]
        assert gpu.waits == []
        assert all(tensor.is_cuda for tensor in (*model.state_dict().values(), ours, *evaluated))
        lora.save_adapter(model, path)
        merged = lora.merge(model)(*inputs).detach()
    assert_close_to_rounding(to_cpu(ours), theirs, SUMS, magnitude=SIZE)
    theirs = expected.eval()(*case.inputs).detach()
    for out in (*evaluated, merged):
        assert_close_to_rounding(to_cpu(out), theirs, SUMS, magnitude=SIZE)
    loaded = case.build()
    lora.load_adapter(loaded, path)
    assert_close_to_rounding(loaded(*case.inputs).detach(), theirs, SUMS, magnitude=SIZE)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", IN_BANKS)
@pytest.mark.parametrize("kind", GPUS)
@torch.no_grad()
def test_each_row_of_a_mixed_batch_has_its_adapter(kind, name, variant, tmp_path):
    case = CASES[name]
    base = case.build()
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path, alpha in zip(paths, (3, 7), strict=True):
        lora.save_adapter(case.adapted(variant=variant, lora_alpha=alpha), path)

    def outputs(model, inputs):
        bank = lora.AdapterBank(model)
        for path in paths:
            bank.add(path.stem, lora.read_adapter(path))
        names = ["b", "a", "b"][: len(inputs[0])]
        with bank.use(names):
            return model(*inputs)

    model = copy.deepcopy(base)
    theirs = outputs(base, case.inputs)
    with kind():
        ours = outputs(model.to(GPU), on(GPU, case.inputs))
        assert ours.is_cuda
    assert_close_to_rounding(to_cpu(ours), theirs, SUMS, magnitude=SIZE)


@pytest.mark.parametrize("kind", GPUS)
def test_an_adapter_with_a_head_is_merged_on_the_gpu(kind):
    base = nn.ModuleDict({"query": nn.Linear(4, 4), "head": nn.Linear(4, 2)})
    model = copy.deepcopy(base)
    lora.add_lora(model, "query", r=2, modules_to_train="head")
    nn.init.ones_(model["query"].lora_B)
    nn.init.ones_(model["head"].weight)
    adapter = adapter_of(model)
    with kind():
        base.to(GPU)
        merge_into(base, adapter)
        assert all(x.is_cuda for x in base.state_dict().values())
    theirs = lora.merge(model).state_dict()
    for name, ours in state_on_cpu(base).items():
        assert_close_to_rounding(ours, theirs[name], 10, magnitude=4)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("way", METHODS)
@pytest.mark.parametrize("kind", GPUS)
def test_experts(kind, way, is_transposed):
    expected = adapted(way, is_transposed)
    model = copy.deepcopy(expected)
    theirs = two_steps(expected, [tokens()])
    with kind():
        ours = two_steps(model.to(GPU), on(GPU, [tokens()]))
        merged = lora.merge(copy.deepcopy(model))(tokens().to(GPU)).detach()
        assert ours.is_cuda
    assert_close_to_rounding(to_cpu(ours), theirs, 2 * TERMS, magnitude=2 * MAGNITUDE)
    theirs = expected.eval()(tokens()).detach()
    assert_close_to_rounding(to_cpu(merged), theirs, 2 * TERMS, magnitude=2 * MAGNITUDE)


@pytest.mark.parametrize("start", ["default", "pissa", "olora", "orthogonal"])
@pytest.mark.parametrize("kind", GPUS)
def test_a_model_that_is_adapted_on_the_gpu_starts_as_its_base(kind, start):
    base = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8))
    x = torch.randn(5, 12)
    expected, state = base(x).detach(), copy.deepcopy(base.state_dict())
    with kind():
        base.to(GPU)
        lora.add_lora(base, "all-linear", r=4, initialization=start)
        assert all(x.is_cuda for x in base.state_dict().values())
        ours = base(x.to(GPU)).detach()
        lora.remove_lora(base)
        assert_same_bits(state_on_cpu(base), state)
    assert_close_to_rounding(to_cpu(ours), expected, 100, magnitude=4)
