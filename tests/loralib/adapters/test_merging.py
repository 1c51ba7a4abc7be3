"""Tests of merging an adapter into its base, against the dense sum W + alpha / r · B A."""

from dataclasses import replace

import all_families  # noqa: F401
import pytest
import torch
import torch.nn.functional as F
from adapter_files import refused
from compare import assert_close_to_rounding
from torch import Tensor, nn

import loralib as lora
from loralib.adapters.adapted_weights import adapted_modules
from loralib.adapters.adapter import Adapter
from loralib.adapters.deltas import deltas_of
from loralib.adapters.merging import merge_into
from loralib.adapters.metadata import LoraMetadata

RANK, ALPHA = 2, 3
INFO = LoraMetadata(rank=RANK, alpha=ALPHA, targets=("query",))
# Rounded sums: over up to 12 columns of a weight, and those of the update.
TERMS = 12 + 2 * RANK


class Conv1D(nn.Module):
    """A linear layer with its weight as (in, out), as in GPT-2's first implementation."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class OwnLinear(nn.Module):
    """A linear layer that is not an `nn.Linear`, with its weight as (out, in)."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))


def in_out(inputs: int, outputs: int) -> nn.Module:
    return lora.MergedLinear(inputs, outputs, r=0, fan_in_fan_out=True)


LAYERS = {"Linear": nn.Linear, "Conv1D": Conv1D, "MergedLinear": in_out}


def drawn(module: nn.Module, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data.normal_(generator=generator)
    return module.to(dtype)


def pair(rows: int, columns: int, seed: int = 0, rank: int = RANK, stacked: int = 1):
    """lora_A (rank·stacked, columns) and lora_B (rows, rank)."""
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(rank * stacked, columns, generator=generator)
    return A, torch.randn(rows, rank, generator=generator)


C_ATTN = "transformer.h.0.attn.c_attn"


def below_gpt2(module: nn.Module) -> nn.ModuleDict:
    """A model with this module where a GPT-2 has its first c_attn."""
    for name in reversed(C_ATTN.split(".")):
        module = nn.ModuleDict({name: module})
    return module


def adapter_for(module: str, A: Tensor, B: Tensor, **others: Tensor) -> Adapter:
    others = {name.replace("__", "."): tensor for name, tensor in others.items()}
    tensors = {f"{module}.lora_A": A, f"{module}.lora_B": B, **others}
    return Adapter(tensors, INFO, "lora file")


def stacked_reference(A: Tensor, B: Tensor, width: int) -> Tensor:
    """The dense delta, (3·width, in): B A for query and for value, zeros for key."""
    return torch.cat([B[:width] @ A[:RANK], torch.zeros(width, A.shape[1]), B[width:] @ A[RANK:]])


def close(ours: Tensor, theirs: Tensor) -> None:
    assert_close_to_rounding(ours, theirs, TERMS, theirs.dtype)


# ---- sums ----


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(("inputs", "outputs"), [(5, 7), (7, 5), (6, 6)])
def test_merging_is_the_dense_sum(layer, inputs, outputs):
    """In square weights too, whose shape does not show their orientation."""
    model = nn.ModuleDict({"query": drawn(LAYERS[layer](inputs, outputs))})
    A, B = pair(outputs, inputs)
    x = torch.randn(4, inputs)
    expected = model["query"](x) + ALPHA / RANK * x @ (B @ A).t()
    wrong = model["query"](x) + ALPHA / RANK * x @ (B @ A) if inputs == outputs else None
    weight = model["query"].weight
    dense = ALPHA / RANK * (B @ A if layer == "Linear" else (B @ A).t())
    total = weight.detach() + dense
    merge_into(model, adapter_for("query", A, B))
    close(model["query"].weight.detach(), total)
    close(model["query"](x), expected)
    assert wrong is None or not torch.allclose(model["query"](x), wrong, atol=0.1)
    assert model["query"].weight.shape == weight.shape


@pytest.mark.parametrize("layer", LAYERS)
def test_merging_agrees_with_the_trained_layer(layer):
    """In whichever layout the trained layer and the base hold the weight."""
    trained = lora.Linear(6, 6, r=RANK, lora_alpha=ALPHA, fan_in_fan_out=layer != "Linear")
    drawn(trained, seed=3)
    base = LAYERS[layer](6, 6)
    base.load_state_dict({"weight": trained.weight, "bias": trained.bias})
    model = nn.ModuleDict({"query": base})
    merge_into(model, adapter_for("query", trained.lora_A.detach(), trained.lora_B.detach()))
    x = torch.randn(4, 6)
    close(model["query"](x), trained(x))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("inputs", [4, 12, 5])
def test_stacked_updates_reach_gpt2s_query_and_value(layer, inputs):
    """The first and the last third of the output; with 12 inputs, W is square."""
    model = below_gpt2(drawn(LAYERS[layer](inputs, 12)))
    A, B = pair(8, inputs, stacked=2)
    adapter = adapter_for(C_ATTN, A, B)
    update = deltas_of(adapter)[C_ATTN]
    assert update.starts == (0, 8)
    assert [block.columns for block in update.blocks()] == [slice(0, 4), slice(8, 12)]
    assert (update.out_features, update.in_features) == (12, inputs)
    assert update.scaling == ALPHA / RANK
    x = torch.randn(3, inputs)
    before = model.get_submodule(C_ATTN)(x)
    merge_into(model, adapter)
    added = (model.get_submodule(C_ATTN)(x) - before).detach()
    expected = ALPHA / RANK * x @ stacked_reference(A, B, 4).t()
    close(added, expected)
    torch.testing.assert_close(added[:, 4:8], torch.zeros(3, 4), rtol=0, atol=0)


def test_merging_stacked_updates_agrees_with_the_trained_layer():
    trained = lora.MergedLinear(
        6, 12, r=RANK, lora_alpha=ALPHA, enable_lora=[True, False, True], fan_in_fan_out=True
    )
    drawn(trained, seed=3)
    model = below_gpt2(Conv1D(6, 12))
    model.get_submodule(C_ATTN).load_state_dict({"weight": trained.weight, "bias": trained.bias})
    merge_into(model, adapter_for(C_ATTN, trained.lora_A.detach(), trained.lora_B.detach()))
    x = torch.randn(4, 6)
    close(model.get_submodule(C_ATTN)(x), trained(x))


def test_an_update_of_all_of_c_attn_is_not_stacked():
    """A pair with the height of the whole output, as in PEFT, is one update."""
    model = below_gpt2(drawn(Conv1D(5, 12)))
    A, B = pair(12, 5)
    update = deltas_of(adapter_for(C_ATTN, A, B))[C_ATTN]
    assert (update.starts, len(update.B)) == ((0,), 12)
    before = model.get_submodule(C_ATTN).weight.detach()
    merge_into(model, adapter_for(C_ATTN, A, B))
    expected = before + ALPHA / RANK * (B @ A).t()
    weight = model.get_submodule(C_ATTN).weight.detach()
    close(weight, expected)


def test_each_module_gets_its_own_update():
    model = nn.ModuleDict({"a": drawn(nn.Linear(4, 4), 1), "b": drawn(nn.Linear(4, 4), 2)})
    before = {name: model[name].weight.detach() for name in "ab"}
    pairs = {"a": pair(4, 4, seed=1), "b": pair(4, 4, seed=2)}
    adapter = adapter_for("a", *pairs["a"], b__lora_A=pairs["b"][0], b__lora_B=pairs["b"][1])
    assert deltas_of(adapter).keys() == {"a", "b"}
    merge_into(model, adapter)
    for name, (A, B) in pairs.items():
        expected = before[name] + ALPHA / RANK * B @ A
        close(model[name].weight.detach(), expected)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_base_is_rounded_once(layer, dtype):
    """The sum is computed in float32, then rounded."""
    model = nn.ModuleDict({"query": drawn(LAYERS[layer](64, 48), dtype=dtype)})
    A, B = pair(48, 64)
    wide = model["query"].weight.detach().float()
    view = wide if layer == "Linear" else wide.t()
    once = torch.addmm(view, B, A, alpha=ALPHA / RANK)
    twice = view.to(dtype) + (ALPHA / RANK * B @ A).to(dtype)
    assert not torch.equal(once.to(dtype), twice)
    merge_into(model, adapter_for("query", A, B))
    result = model["query"].weight.detach()
    assert result.dtype == dtype
    result = result if layer == "Linear" else result.t()
    exact = view.double() + ALPHA / RANK * B.double() @ A.double()
    # Near the middle of two values of the dtype, float32's error may decide the rounding.
    assert (result != exact.to(dtype)).sum() <= 12
    assert (result != twice).sum() > 100


def test_stacked_updates_of_a_half_precision_base_are_rounded_once():
    model = below_gpt2(drawn(Conv1D(32, 48), dtype=torch.bfloat16))
    A, B = pair(32, 32, stacked=2)
    exact = model.get_submodule(C_ATTN).weight.detach().double().t()
    exact = exact + ALPHA / RANK * stacked_reference(A, B, 16).double()
    merge_into(model, adapter_for(C_ATTN, A, B))
    assert (model.get_submodule(C_ATTN).weight.detach().t() != exact.bfloat16()).sum() <= 2


def test_a_float64_base_is_summed_in_float64():
    model = nn.ModuleDict({"query": drawn(nn.Linear(6, 5), dtype=torch.float64)})
    A, B = pair(5, 6)
    exact = model["query"].weight.detach() + ALPHA / RANK * B.double() @ A.double()
    merge_into(model, adapter_for("query", A, B))
    close(model["query"].weight.detach(), exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_adapter_in_half_precision_is_multiplied_in_float32(dtype):
    model = nn.ModuleDict({"query": drawn(nn.Linear(6, 5))})
    A, B = (tensor.to(dtype) for tensor in pair(5, 6))
    expected = model["query"].weight.detach() + ALPHA / RANK * B.float() @ A.float()
    merge_into(model, adapter_for("query", A, B))
    close(model["query"].weight.detach(), expected)


# ---- what merging does not change ----


@pytest.mark.parametrize("layer", LAYERS)
def test_merging_does_not_write_to_the_old_tensors(layer):
    """They may be memory-mapped from a file that must not change."""
    model = nn.ModuleDict({"query": drawn(LAYERS[layer](6, 6)), "head": drawn(nn.Linear(6, 2))})
    old = dict(model.named_parameters())
    copies = {name: tensor.detach().clone() for name, tensor in old.items()}
    A, B = pair(6, 6)
    head = torch.full((2, 6), 0.5)
    adapter = adapter_for("query", A, B, head__weight=head, query__bias=torch.full((6,), 0.25))
    given = {name: tensor.clone() for name, tensor in adapter.tensors.items()}
    merge_into(model, adapter)
    for name, tensor in old.items():
        assert torch.equal(tensor, copies[name]), name
    for name, tensor in given.items():
        assert torch.equal(adapter.tensors[name], tensor), name
    new = dict(model.named_parameters())
    assert {name for name in old if new[name] is not old[name]} == {
        "query.weight",
        "query.bias",
        "head.weight",
    }
    assert torch.equal(new["head.weight"], head)
    assert new["head.weight"].data_ptr() != head.data_ptr()  # so training does not change it
    assert torch.equal(new["query.bias"], torch.full((6,), 0.25))


@pytest.mark.parametrize("trained", [True, False])
def test_merging_keeps_requires_grad(trained):
    model = nn.ModuleDict({"query": nn.Linear(4, 4).requires_grad_(trained)})
    merge_into(model, adapter_for("query", *pair(4, 4), query__bias=torch.zeros(4)))
    assert [parameter.requires_grad for parameter in model.parameters()] == [trained] * 2
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())


def test_a_head_is_cast_to_the_models_dtype():
    model = nn.ModuleDict({"query": nn.Linear(4, 4), "head": nn.Linear(4, 2)}).bfloat16()
    merge_into(model, adapter_for("query", *pair(4, 4), head__weight=torch.full((2, 4), 1 / 3)))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model["head"].weight, torch.full((2, 4), 1 / 3).bfloat16())


def test_buffers_of_a_head_stay_buffers():
    model = nn.ModuleDict({"query": nn.Linear(4, 4), "head": nn.BatchNorm1d(4)})
    before = [name for name, _ in model.named_buffers()]
    counted = {"head__running_mean": torch.ones(4), "head__num_batches_tracked": torch.tensor(7)}
    merge_into(model, adapter_for("query", *pair(4, 4), **counted))
    assert [name for name, _ in model.named_buffers()] == before
    assert model["head"].running_mean.tolist() == [1] * 4
    assert model["head"].num_batches_tracked == 7


class TwoNames(nn.Module):
    """A head whose bias has two names, as that of RoBERTa's language model."""

    def __init__(self):
        super().__init__()
        self.decoder = nn.Linear(4, 2)
        self.bias = self.decoder.bias


@pytest.mark.parametrize("second", [None, 2.0])
def test_a_second_name_gets_the_first_one_s_value_unless_the_adapter_has_another(second):
    model = nn.ModuleDict({"query": nn.Linear(4, 4), "head": TwoNames()})
    brought = {} if second is None else {"head__decoder__bias": torch.full((2,), second)}
    adapter = adapter_for("query", *pair(4, 4), **brought, head__bias=torch.ones(2))
    merge_into(model, adapter)
    assert model["head"].bias.tolist() == [1, 1]
    assert model["head"].decoder.bias.tolist() == [second or 1] * 2


@pytest.mark.parametrize("names", ["head", "other", "head other"])
def test_a_weight_that_modules_share_is_for_those_that_the_adapter_names(names):
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("query", "head", "other")})
    model["other"].weight = model["head"].weight
    before, named, ones = model["other"].weight.clone(), names.split(), torch.ones(4, 4)
    brought = {f"{name}__weight": ones for name in named}
    merge_into(model, adapter_for("query", *pair(4, 4), **brought))
    for name in ("head", "other"):
        assert torch.equal(model[name].weight, ones if name in named else before)
    assert (model["other"].weight is model["head"].weight) == (len(named) == 2)


def test_a_head_without_values_is_refused():
    model = nn.ModuleDict({"query": nn.Linear(4, 4), "head": nn.Linear(4, 2, device="meta")})
    before = model["query"].weight
    with pytest.raises(ValueError, match=r"^head\.weight is on the meta device: load the model's"):
        merge_into(model, adapter_for("query", *pair(4, 4), head__weight=torch.ones(2, 4)))
    assert model["query"].weight is before


def test_a_merged_model_is_a_plain_model():
    model = nn.ModuleDict({"query": nn.Linear(4, 4)})
    names = list(model.state_dict())
    merge_into(model, adapter_for("query", *pair(4, 4)))
    assert list(model.state_dict()) == names
    assert type(model["query"]) is nn.Linear
    assert model["query"].weight.is_leaf


# ---- all or nothing ----

GOOD = pair(4, 4)


def with_query(**tensors: Tensor) -> Adapter:
    """A valid update of ``query``, and other tensors."""
    return adapter_for("query", *GOOD, **tensors)


def named(module: str, rows: int = 4, columns: int = 4, **arguments) -> dict[str, Tensor]:
    A, B = pair(rows, columns, **arguments)
    return {f"{module}__lora_A": A, f"{module}__lora_B": B}


FAILING = {
    "alpha": (replace(with_query(), metadata=None), ["give it as lora_alpha"]),
    "unknown module": (with_query(**named("zz")), ["no zz to adapt"]),
    "deep unknown module": (with_query(**named("query__weight__zz")), ["query.weight.zz"]),
    "a parameter": (with_query(**named("query__weight")), ["query.weight"]),
    "no linear": (with_query(**named("norm")), ["norm is not a linear layer"]),
    "an embedding": (with_query(**named("words", 4, 9)), ["words is not a linear layer"]),
    "a container": (with_query(**named("transformer")), ["transformer is not a linear layer"]),
    "a convolution": (with_query(**named("conv")), ["conv is not a linear layer"]),
    "another width": (with_query(**named("value", 4, 5)), ["value is (4, 5)", "(4, 4)", "base"]),
    "another height": (with_query(**named("value", 5, 4)), ["value is (5, 4)", "(4, 4)", "base"]),
    "turned": (with_query(**named("wide", 6, 4)), ["wide is (6, 4)", "(4, 6)"]),
    "turned Conv1D": (with_query(**named("conv1d", 4, 6)), ["conv1d is (4, 6)", "(6, 4)"]),
    "an unknown class": (
        with_query(**named("own")),
        ["own is a OwnLinear, whose square weight may be (out, in) or (in, out)"],
    ),
    "another rank": (
        with_query(**named("value", rank=1)),
        ["value has rank 1, but its metadata says 2"],
    ),
    "stacked": (with_query(**named("value", stacked=2)), ["value has 2 stacked blocks"]),
    "stacked thrice": (
        with_query(**named("transformer__h__0__attn__c_attn", 9, stacked=3)),
        ["transformer.h.0.attn.c_attn has 3 stacked blocks"],
    ),
    "no halves": (
        with_query(**named("transformer__h__0__attn__c_attn", 7, stacked=2)),
        ["transformer.h.0.attn.c_attn has 2 stacked blocks"],
    ),
    "no A": (with_query(value__lora_B=GOOD[1]), ["lacks value.lora_A"]),
    "no B": (with_query(value__lora_A=GOOD[0]), ["lacks value.lora_B"]),
    "unknown head": (
        with_query(other__weight=torch.ones(1)),
        ["has other.weight, which the model"],
    ),
    "a buffer's shape": (
        with_query(batch__running_mean=torch.ones(3)),
        ["running_mean is (3,)", "(4,)"],
    ),
    "head's shape": (
        with_query(head__weight=torch.ones(3, 4)),
        ["head.weight is (3, 4)", "(2, 4)"],
    ),
    "bias's shape": (with_query(query__bias=torch.ones(3)), ["query.bias is (3,)", "(4,)"]),
    "the weight itself": (with_query(query__weight=torch.ones(4, 4)), ["query.weight"]),
    "no update": (
        Adapter({"head.bias": torch.ones(2)}, INFO, "lora file"),
        ["holds no LoRA", "lora_A"],
    ),
}


def model_of_all() -> nn.Module:
    model = nn.ModuleDict(
        {
            "query": nn.Linear(4, 4),
            "value": nn.Linear(4, 4),
            "wide": nn.Linear(6, 4),
            "conv1d": Conv1D(4, 6),
            "own": OwnLinear(4, 4),
            "norm": nn.LayerNorm(4),
            "batch": nn.BatchNorm1d(4),
            "words": nn.Embedding(9, 4),
            "conv": nn.Conv1d(4, 4, 1),
            "transformer": below_gpt2(Conv1D(4, 12))["transformer"],
            "head": nn.Linear(4, 2),
        }
    )
    return drawn(model)


@pytest.mark.parametrize("case", FAILING)
def test_a_refused_adapter_changes_nothing(case):
    adapter, parts = FAILING[case]
    model = model_of_all()
    before = {name: (tensor, tensor.clone()) for name, tensor in model.named_parameters()}
    refused(lambda: merge_into(model, adapter), adapter.source, *parts)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    for name, (tensor, copy) in before.items():
        assert after[name] is tensor
        assert torch.equal(tensor, copy)


def test_the_valid_part_of_refused_adapters_is_merged_by_itself():
    """It shows that the cases above are refused for what they add to it."""
    model = model_of_all()
    before = model["query"].weight.detach()
    merge_into(model, with_query())
    assert not torch.equal(model["query"].weight, before)


def test_adapted_modules_are_found_with_their_deltas():
    model = model_of_all()
    found = adapted_modules(
        model, with_query(**named("transformer__h__0__attn__c_attn", 8, stacked=2))
    )
    assert {name: adapted.module for name, adapted in found.items()} == {
        "query": model["query"],
        "transformer.h.0.attn.c_attn": model.get_submodule(C_ATTN),
    }
    starts = {name: len(adapted.delta.starts) for name, adapted in found.items()}
    assert starts == {"query": 1, "transformer.h.0.attn.c_attn": 2}


def test_a_zero_update_changes_nothing():
    model = nn.ModuleDict({"query": drawn(nn.Linear(4, 4))})
    before = model["query"].weight.detach()
    merge_into(model, adapter_for("query", GOOD[0], torch.zeros(4, RANK)))
    assert torch.equal(model["query"].weight, before)
    x = torch.randn(2, 4)
    assert torch.equal(model["query"](x), F.linear(x, before, model["query"].bias))
