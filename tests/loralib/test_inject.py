"""Tests of add_lora and remove_lora on every kind of layer, variant and initialization."""

import copy
import io
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from any_models import TARGETS, AnyModel, ids
from covering import covering
from torch import nn

import loralib as lora
from loralib.functional import VARIANTS
from loralib.initialization import INITIALIZATIONS
from loralib.lora_layer import LoRALayer


@pytest.fixture
def model():
    torch.manual_seed(0)
    return AnyModel()


@torch.no_grad()
def change(model):
    """Changes all updates, as training would."""
    for name, parameter in model.named_parameters():
        if name.endswith(("lora_A", "lora_B")):
            parameter.add_(0.3 * torch.randn_like(parameter))
        if name.endswith("magnitude_vector"):
            parameter.mul_(1 + 0.2 * torch.rand_like(parameter))


def results(model):
    """The outputs in evaluation, without and with autograd, and those in training."""
    padding = torch.zeros(4, 7, dtype=torch.bool)
    padding[1, 5:] = True
    rows = ids()
    with torch.no_grad():
        found = [model.eval()(rows), model.eval()(rows, padding)]
    found += [model.eval()(rows), model.train()(rows), model.train()(rows, padding)]
    return [out.detach() for out in found]


def assert_same(found, expected, **tolerances):
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **tolerances)


def bits(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "variant", "initialization"), covering(TARGETS, VARIANTS, INITIALIZATIONS)
)
def test_a_model_is_adapted_changed_merged_and_restored(model, kind, variant, initialization):
    # Frozen, as after `remove_lora`: PyTorch chooses other kernels if nothing is trained.
    model.requires_grad_(False)
    expected, base = results(model), bits(model)
    rank = {"r": 1} if kind == "convolutions" and initialization != "orthogonal" else {"r": 2}
    if kind == "convolutions" and initialization == "orthogonal":
        with pytest.raises(ValueError, match=r"r = 2 is too large for conv2, .* 1;"):
            lora.add_lora(model, TARGETS[kind], **rank, initialization=initialization)
        return
    names = lora.add_lora(
        model,
        TARGETS[kind],
        **rank,
        lora_alpha=4,
        variant=variant,
        initialization=initialization,
    )
    assert {n for n, m in model.named_modules() if isinstance(m, LoRALayer) and m.r} == set(names)
    close = {"atol": 1e-5, "rtol": 1e-5}
    assert_same(results(model), expected, **close)

    change(model)
    changed = results(model)
    assert_same(changed, [changed[0], changed[1], changed[0], changed[0], changed[1]], **close)
    assert not torch.allclose(changed[0], expected[0], atol=1e-4)
    merged = lora.merge(copy.deepcopy(model))
    assert_same(results(merged), changed, atol=1e-4, rtol=1e-4)
    assert [(n, type(m)) for n, m in merged.named_modules()] == [
        (n, type(m)) for n, m in AnyModel().named_modules()
    ]

    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in base.items())
    assert lora.remove_lora(model) == names
    state = model.state_dict()
    assert state.keys() == base.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in base.items())
    assert_same(results(model), expected, atol=0, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", TARGETS)
def test_gradients_reach_what_is_trained_and_nothing_else(model, kind, variant):
    names = lora.add_lora(model, TARGETS[kind], r=1, variant=variant)
    change(model)
    model(ids()).square().sum().backward()
    for name, parameter in model.named_parameters():
        is_update = "lora_" in name
        assert parameter.requires_grad == is_update
        assert (parameter.grad is not None and bool(parameter.grad.any())) == is_update, name
    updated = {n.rpartition(".")[0] for n, p in model.named_parameters() if p.requires_grad}
    assert updated == set(names)


def test_modules_tensors_and_hooks_stay_the_same_objects(model):
    module, weight, bias = model.layers[0].q_proj, model.layers[0].q_proj.weight, None
    bias = module.bias
    seen = []
    module.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    lora.add_lora(model, "q_proj")
    assert model.layers[0].q_proj is module
    assert module.weight is weight
    assert module.bias is bias
    model(ids())
    assert seen == [(4, 7, 8)]
    assert isinstance(module, nn.Linear)
    names = {name for name in model.state_dict() if name.startswith("layers.0.q_proj")}
    assert names == {f"layers.0.q_proj.{name}" for name in ("weight", "bias", "lora_A", "lora_B")}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_base_in_half_precision_has_updates_in_float32(model, dtype):
    base = bits(model.to(dtype))
    lora.add_lora(model, ["q_proj", "embed", "conv1", "self_attn"], r=2)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if "lora_" in name else dtype)
    change(model)
    out = model.train()(ids())
    assert out.dtype == dtype
    out.float().sum().backward()
    assert model.layers[0].q_proj.lora_A.grad.dtype == torch.float32
    lora.merge(model)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model.state_dict().keys() == base.keys()


def test_a_second_call_adds_other_modules(model):
    lora.add_lora(model, "q_proj", r=2, modules_to_train="head")
    change(model)
    before = bits(model)
    assert lora.add_lora(model, "v_proj", r=3) == tuple(f"layers.{i}.v_proj" for i in range(3))
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
    trained = {n.rpartition(".")[0] for n, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"layers.{i}.{n}_proj" for i in range(3) for n in "qv"} | {"head"}
    with pytest.raises(
        ValueError,
        match=r"layers.0.q_proj has LoRA already: remove_lora\(model\) starts over; to keep it",
    ):
        lora.add_lora(model, "q_proj")


@pytest.mark.parametrize(
    ("bias", "names"),
    [
        ("none", set()),
        ("lora_only", {"layers.0.q_proj.bias", "encoder.layers.0.self_attn.in_proj_bias"}),
    ],
)
def test_bias_lora_only_trains_the_biases_of_adapted_modules(model, bias, names):
    lora.add_lora(model, ["q_proj", "self_attn"], layers=[0], bias=bias)
    trained = {n for n, p in model.named_parameters() if p.requires_grad and "lora_" not in n}
    assert trained - {"encoder.layers.0.self_attn.out_proj.bias"} == names
    state = lora.lora_state_dict(model, bias)
    assert names <= state.keys()


def test_bias_all_trains_every_bias(model):
    lora.add_lora(model, "q_proj", bias="all")
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("bias" in name or "lora_" in name)


def test_slices_of_a_fused_projection(model):
    before = model.layers[1].c_attn(torch.ones(1, 8)).detach()
    lora.add_lora(model, "c_attn", r=2, enable_lora={"c_attn": [True, False, True]})
    layer = model.layers[1].c_attn
    assert isinstance(layer, lora.MergedLinear)
    assert layer.lora_A.shape == (4, 8)
    assert layer.lora_B.shape == (16, 2)
    change(model)
    differs = (layer(torch.ones(1, 8)) - before).abs()[0] > 1e-4
    assert differs[:8].any()
    assert differs[16:].any()
    assert not differs[8:16].any()


def test_ranks_and_alphas_by_pattern(model):
    lora.add_lora(
        model,
        ["q_proj", "up"],
        r=4,
        lora_alpha=8,
        rank_pattern={"layers.0.q_proj": 1, "q_proj": 2},
        alpha_pattern={"layers.*.up": 2},
    )
    found = {n: (m.r, m.scaling) for n, m in model.named_modules() if isinstance(m, LoRALayer)}
    assert found == {
        "layers.0.q_proj": (1, 8.0),
        **{f"layers.{i}.q_proj": (2, 4.0) for i in (1, 2)},
        **{f"layers.{i}.up": (4, 0.5) for i in range(3)},
    }


def test_an_embeddings_update_has_no_dropout(model):
    lora.add_lora(model, ["embed"], r=2, lora_dropout=0.9)
    change(model)
    expected = model.embed.eval()(ids())
    torch.testing.assert_close(model.embed.train()(ids()), expected)


def test_attention_with_separate_projections():
    attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=True)
    model = nn.ModuleDict({"attention": attention}).requires_grad_(False)
    q, k, v = torch.randn(2, 3, 8), torch.randn(2, 5, 6), torch.randn(2, 5, 4)
    base, (expected, weights) = bits(model), attention(q, k, v)
    names = lora.add_lora(model, "attention", r=2, variant="dora")
    assert set(names) == {f"attention.{name}_proj" for name in ("q", "k", "v", "out")}
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert {f"attention.{x}_proj.lora_A" for x in "qkv"} <= trained
    found = attention(q, k, v)
    torch.testing.assert_close(found, (expected, weights))
    change(model)
    changed, _ = copy.deepcopy(model)["attention"](q, k, v)
    assert not torch.allclose(changed, expected, atol=1e-3)
    torch.testing.assert_close(model.eval()["attention"](q, k, v)[0], changed)
    torch.testing.assert_close(lora.merge(copy.deepcopy(model))["attention"](q, k, v)[0], changed)
    lora.remove_lora(model.train())
    assert model.state_dict().keys() == base.keys()
    assert torch.equal(attention(q, k, v)[0], expected)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("mask", [None, "bool", "float", "padding", "causal", "unbatched"])
def test_an_adapted_attention_takes_the_arguments_of_pytorch_s(mask, need_weights, batch_first):
    attention = nn.MultiheadAttention(8, 2, batch_first=batch_first, add_bias_kv=True)
    x = torch.randn(5, 5, 8) if mask != "unbatched" else torch.randn(5, 8)
    upper = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
    arguments = {
        "bool": {"attn_mask": upper},
        "float": {"attn_mask": torch.zeros(5, 5).masked_fill(upper, float("-inf"))},
        "padding": {"key_padding_mask": torch.arange(5).expand(5, 5) >= 4},
        "causal": {"attn_mask": upper, "is_causal": not need_weights},
    }.get(mask, {})
    call = {"need_weights": need_weights, "average_attn_weights": False, **arguments}
    expected = attention(x, x, x, **call)
    model = nn.ModuleDict({"attention": attention})
    lora.add_lora(model, "attention", r=2)
    for mode in (True, False):
        found = model.train(mode)["attention"](x, x, x, **call)
        torch.testing.assert_close(found, expected)


def test_attention_drops_weights_only_in_training():
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, dropout=0.5)
    x = torch.randn(5, 3, 8)
    expected, _ = copy.deepcopy(attention).eval()(x, x, x)
    model = nn.ModuleDict({"attention": attention})
    lora.add_lora(model, "attention", r=2)
    assert not torch.allclose(model.train()["attention"](x, x, x)[0], expected)
    torch.testing.assert_close(model.eval()["attention"](x, x, x)[0], expected)


@pytest.mark.parametrize("variant", ["lora", "dora"])
@pytest.mark.parametrize(
    "kind",
    [nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d],
    ids=lambda kind: kind.__name__,
)
def test_reset_parameters_initializes_the_update_as_well(kind, variant):
    kernel = {"kernel_size": 3} if hasattr(kind, "_conv_forward") else {}
    model = nn.Sequential(kind(6, 5, **kernel))
    lora.add_lora(model, ["0"], r=2, variant=variant)
    change(model)
    model[0].reset_parameters()
    torch.testing.assert_close(lora.merge(copy.deepcopy(model))[0].weight, model[0].weight)


# ---- copies and files ----


@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_copies_and_pickles(model, variant):
    lora.add_lora(model, ["all-linear", "embed", "conv1"], r=2, variant=variant)
    change(model)
    expected = model.eval()(ids())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ):
        assert torch.equal(other(ids()), expected)
        assert lora.remove_lora(other)
    assert torch.equal(model(ids()), expected)


def test_a_state_dict_is_loaded_into_another_model(model):
    settings = {"targets": ["q_proj", "conv1", "self_attn"], "r": 2, "initialization": "pissa"}
    lora.add_lora(model, **settings)
    change(model)
    other = AnyModel()
    lora.add_lora(other, **settings)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.eval()(ids()), model.eval()(ids()))


def test_casting_a_model_casts_its_updates_too(model):
    lora.add_lora(model, ["q_proj", "embed", "conv1"], r=2)
    change(model)
    expected = model.eval()(ids())
    found = model.bfloat16()(ids())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(found.float(), expected, atol=0.3, rtol=0.1)


# ---- parameter groups ----


def test_parameter_groups_of_lora_plus(model):
    lora.add_lora(model, ["q_proj", "embed"], modules_to_train="head")
    slow, fast = lora.parameter_groups(model, 1e-3, lora_plus_ratio=16, weight_decay=0.1)
    assert fast["lr"] == 16 * slow["lr"] == 16e-3
    assert slow["weight_decay"] == fast["weight_decay"] == 0.1
    assert set(fast["params"]) == {layer.q_proj.lora_B for layer in model.layers}
    everything = {p for p in model.parameters() if p.requires_grad}
    assert set(slow["params"]) == everything - set(fast["params"])
    (one,) = lora.parameter_groups(model, 1e-3)
    assert set(one["params"]) == everything
    (of_optimizer,) = torch.optim.AdamW([one], weight_decay=0.2).param_groups
    assert of_optimizer["weight_decay"] == 0.2


@pytest.mark.parametrize("ratio", [0, -1, float("inf"), float("nan")])
def test_a_ratio_that_is_not_positive_is_refused(model, ratio):
    lora.add_lora(model, "q_proj")
    with pytest.raises(ValueError, match="lora_plus_ratio has to be a number above 0"):
        lora.parameter_groups(model, 1e-3, lora_plus_ratio=ratio)


def test_a_model_without_lora_has_no_groups(model):
    message = f"{type(model).__name__} has no LoRA layers: call add_lora first"
    with pytest.raises(ValueError, match=message):
        lora.parameter_groups(model, 1e-3)


def test_a_model_without_trained_parameters_has_no_groups(model):
    lora.add_lora(model, "q_proj")
    with pytest.raises(ValueError, match="no parameter of the model is trained"):
        lora.parameter_groups(model.requires_grad_(False), 1e-3)


# ---- what is refused ----


class Quantized(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x):
        return F.linear(x, self.weight.round(), self.bias)


class Centered(nn.Conv1d):
    """A convolution that computes with another weight than the one it holds."""

    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight - weight.mean(), bias)


def with_query(layer):
    model = AnyModel()
    model.layers[1].q_proj = layer
    return model


def with_a_zero_row():
    layer = nn.Linear(8, 8)
    nn.init.zeros_(layer.weight[3])
    return with_query(layer)


def without_weight():
    layer = nn.Linear(8, 8)
    layer.weight = None
    return with_query(layer)


def with_own_forward():
    model = AnyModel()
    module = model.layers[1].q_proj
    module.forward = lambda x: F.linear(x, module.weight)
    return model


def with_hooks():
    """A model with hooks that offload weights, as accelerate's do."""
    model = with_own_forward()
    model.layers[1].q_proj._hf_hook = object()
    return model


def with_pefts_lora():
    """A model with a linear layer that PEFT has adapted."""
    model = AnyModel()
    layer = PeftsLinear()
    layer.base_layer = model.layers[1].q_proj
    for name, made in (("lora_A", nn.Linear(8, 2)), ("lora_B", nn.Linear(2, 8))):
        setattr(layer, name, nn.ModuleDict({"default": made}))
    model.layers[1].q_proj = layer
    return model


class PeftsLinear(nn.Module):
    __module__ = "peft.tuners.lora.layer"


def tied():
    model = AnyModel()
    model.head = nn.Linear(8, 11, bias=False)
    model.head.weight = model.embed.weight
    return model


def tied_to_the_model():
    model = AnyModel()
    model.query = model.layers[1].q_proj.weight
    return model


def with_copied_parameters():
    """As in a copy of a scripted module, or a module that learn2learn has cloned."""
    model = AnyModel()
    layer = model.layers[0].q_proj
    layer._parameters["weight"] = layer.weight.clone()
    return model


def built_in_inference_mode():
    with torch.inference_mode():
        return AnyModel()


def compiled_in_place():
    model = AnyModel()
    model.layers[0].compile()
    return model


WRONG = {
    "no match": (AnyModel, {"targets": "q_prj"}, "'q_prj' matches no module .* q_proj"),
    "no target": (AnyModel, {"targets": []}, "no target is given"),
    "no layer": (AnyModel, {"layers": [3]}, "no layer 3; its layers are 0 to 2"),
    "excluded": (AnyModel, {"exclude": "q_proj"}, "matches only modules that are left out"),
    "excluded none": (AnyModel, {"exclude": "x_proj"}, "'x_proj' matches no module"),
    "excluded a block": (
        AnyModel,
        {"exclude": "layers.1"},
        "none of the targets, only a module around layers.1.q_proj: use 'layers.1.*'",
    ),
    "a block": (
        AnyModel,
        {"targets": "layers.1"},
        r"layers.1 is a .*Block, which has no LoRA layer: name layers inside it, such as "
        r"1\.c_attn, 1\.down, 1\.q_proj, 1\.up, …, or leave it out of targets, or exclude it if ",
    ),
    "blocks": (AnyModel, {"targets": "encoder"}, r"such as encoder\.layers\.0\.linear1, "),
    "norm": (AnyModel, {"targets": "norm1"}, "LayerNorm, which has no LoRA layer: leave it out of"),
    "rank": (
        AnyModel,
        {"r": 9},
        "r = 9 is too large for layers.0.q_proj, whose largest possible rank is 8",
    ),
    "rank of a slice": (
        AnyModel,
        {"r": 5, "enable_lora": {"q_proj": [True, False]}},
        "r = 5 is too large for layers.0.q_proj, whose largest possible rank is 4",
    ),
    "rank of an attention": (
        lambda: nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2, kdim=4)}),
        {"r": 5, "targets": "attention"},
        "r = 5 is too large for attention, whose largest possible rank is 4",
    ),
    "no rank": (AnyModel, {"r": 0}, "an integer of at least 1, got 0"),
    "half a rank": (AnyModel, {"r": 1.5}, "an integer of at least 1, got 1.5"),
    "alpha": (AnyModel, {"lora_alpha": -1}, "lora_alpha has to be a number above 0"),
    "infinite alpha": (
        AnyModel,
        {"lora_alpha": float("inf")},
        "lora_alpha has to be a number above 0",
    ),
    "dropout": (AnyModel, {"lora_dropout": 1.5}, "lora_dropout .* between 0 and 1"),
    "variant": (AnyModel, {"variant": "qlora"}, "unknown variant 'qlora'"),
    "initialization": (AnyModel, {"initialization": "eva"}, "unknown initialization 'eva'"),
    "bias": (AnyModel, {"bias": "some"}, "bias must be one of none, all, lora_only"),
    "pattern": (AnyModel, {"rank_pattern": {"up": 2}}, "'up' matches none of the adapted"),
    "a pattern's key": (AnyModel, {"rank_pattern": {0: 2}}, "a module's name, .* got 0"),
    "a slice's key": (AnyModel, {"enable_lora": {0: [True]}}, "a module's name, .* got 0"),
    "nothing to train": (
        AnyModel,
        {"modules_to_train": ["dropout2", "dropout1"]},
        r"^modules_to_train: encoder\.layers\.0\.dropout2 has no parameters to train: leave it out",
    ),
    "values to train": (
        AnyModel,
        {"modules_to_train": {"head": True}},
        "^modules_to_train has to be a list, not a dict: its values have no meaning$",
    ),
    "head": (AnyModel, {"modules_to_train": "haed"}, "'haed' matches no module .* head"),
    "slices": (AnyModel, {"enable_lora": {"q_proj": [True] * 3}}, "does not fit layers.0.q_proj"),
    "no slice": (
        AnyModel,
        {"enable_lora": {"q_proj": [False] * 2}},
        "at least one entry has to be True",
    ),
    "slices of what": (
        AnyModel,
        {"targets": "embed", "enable_lora": {"embed": [True, False]}},
        "embed is not a linear layer",
    ),
    "dropout of attention": (
        AnyModel,
        {"targets": "self_attn", "lora_dropout": 0.1},
        "self_attn is an .* cannot have dropout",
    ),
    "dropout of out_proj": (
        AnyModel,
        {"targets": "out_proj", "lora_dropout": 0.1},
        "out_proj belongs to an .* cannot have dropout",
    ),
    "trained and adapted": (
        AnyModel,
        {"modules_to_train": "layers.1"},
        "layers.1 cannot be trained as a whole: layers.1.q_proj is adapted",
    ),
    "frozen zeros": (AnyModel, {"targets": "embed", "freeze_A": True}, "A at zero"),
    "quantized": (
        lambda: with_query(Quantized(8, 8)),
        {},
        r"layers.1.q_proj is a .*Quantized, which has",
    ),
    "own convolution": (
        lambda: with_query(Centered(8, 8, 1)),
        {"targets": "layers.1.q_proj"},
        r"layers.1.q_proj is a .*Centered, which has no LoRA layer",
    ),
    "lazy": (
        lambda: with_query(nn.LazyLinear(8)),
        {},
        "layers.1.q_proj has no shape yet: call the model once",
    ),
    "weight norm": (
        lambda: with_query(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))),
        {},
        r"has no weight that is a plain parameter: undo weight norm or pruning first .*, or le",
    ),
    "no weight": (without_weight, {}, "layers.1.q_proj has no weight that is a plain parameter"),
    "no direction": (
        with_a_zero_row,
        {"variant": "dora"},
        "layers.1.q_proj has rows of zeros in its weight, which have no direction for dora",
    ),
    "own forward": (
        with_own_forward,
        {},
        r"layers.1.q_proj has a forward of its own, set on the instance, .*: delete it first "
        r"\(del model\.get_submodule\('layers\.1\.q_proj'\)\.forward\)$",
    ),
    "hooks": (
        with_hooks,
        {},
        "layers.1.q_proj has a forward of its own, set by a device map's hooks",
    ),
    "PEFT's": (
        with_pefts_lora,
        {},
        r"layers\.1\.q_proj already has an adapter of PEFT's \(lora\): give the model that",
    ),
    "tied": (tied, {"targets": "embed"}, "embed shares its weight with head; .* untie=True"),
    "tied to the model": (tied_to_the_model, {}, "q_proj shares its weight with the model itself"),
    "trained, tied to the model": (
        tied_to_the_model,
        {"targets": "embed", "modules_to_train": "layers.1.q_proj"},
        "q_proj shares a weight with the model itself, which would be trained as well",
    ),
    "inference": (built_in_inference_mode, {}, "is an inference tensor"),
    "no leaves": (with_copied_parameters, {}, r"layers\.0\.q_proj\.weight was computed from other"),
    "compiled": (lambda: torch.compile(AnyModel()), {}, "the model is wrapped or compiled"),
    "compiled in place": (compiled_in_place, {}, "layers.0 is wrapped or compiled already"),
    "DataParallel": (lambda: nn.DataParallel(AnyModel()), {}, "wrapped .* [(]DataParallel[)]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_calls_are_refused_in_one_line_and_change_nothing(case):
    make, settings, message = WRONG[case]
    model = make()
    kinds = [type(module) for module in model.modules()]
    trained = [parameter.requires_grad for parameter in model.parameters()]
    with pytest.raises((ValueError, TypeError), match=message) as error:
        lora.add_lora(model, **{"targets": "q_proj", "r": 2, **settings})
    assert "\n" not in str(error.value)
    assert [type(module) for module in model.modules()] == kinds
    assert [parameter.requires_grad for parameter in model.parameters()] == trained


def test_add_lora_is_refused_in_inference_mode(model):
    with (
        torch.inference_mode(),
        pytest.raises(ValueError, match="LoRA cannot be trained in inference mode"),
    ):
        lora.add_lora(model, "q_proj")


def test_a_tied_embedding_is_adapted_if_untie_is_set():
    model = tied()
    before = model.eval()(ids())
    lora.add_lora(model, "embed", r=2, untie=True)
    change(model)
    assert model.embed.weight is model.head.weight
    changed = model.eval()(ids())
    lora.merge(model)
    assert model.embed.weight is not model.head.weight
    torch.testing.assert_close(model(ids()), changed)
    assert not torch.allclose(changed, before, atol=1e-3)


def test_a_layer_that_shares_only_its_bias_is_adapted():
    """In masked language models of Transformers 4, the head and its output layer have one bias."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].bias = model[0].bias
    lora.add_lora(model, "0", r=2)
    lora.merge(model)
    assert model[1].bias is model[0].bias


class TiedLM(AnyModel):
    """A language model like upstream's, whose settings say that its head is tied."""

    def __init__(self, config):
        super().__init__()
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.config = config

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.head


TIES = SimpleNamespace(tie_word_embeddings=True)


@pytest.mark.parametrize("target", ["embed", "head"])
@pytest.mark.parametrize("config", [TIES, SimpleNamespace(text_config=TIES)])
def test_merging_warns_of_settings_that_would_tie_weights_again(target, config, caplog):
    """Transformers 4 reads a head's weight from a file only if the settings say that it has one."""
    model = nn.Sequential(TiedLM(config))
    lora.add_lora(model, target, r=2, untie=True)
    change(model)
    assert caplog.text == ""
    lora.merge(model)
    assert [record.getMessage() for record in caplog.records] == [
        "0.embed and 0.head have a weight each now, but the config of the TiedLM has "
        "tie_word_embeddings=True, by which loading may tie them again: set it to False before "
        "you save the model"
    ]


@pytest.mark.parametrize(("target", "ties"), [("q_proj", True), ("head", False), ("head", None)])
def test_merging_does_not_warn_if_settings_and_weights_agree(target, ties, caplog):
    model = TiedLM(SimpleNamespace() if ties is None else SimpleNamespace(tie_word_embeddings=ties))
    lora.add_lora(model, target, r=2, untie=True)
    lora.merge(model)
    assert caplog.text == ""


class WithOtherMethod(TiedLM):
    """Its method of upstream's name computes the embeddings, as in some models of images."""

    def get_input_embeddings(self, ids, images):
        raise AssertionError("is not called with these arguments")


class WithoutHead(TiedLM):
    def get_output_embeddings(self):
        raise ValueError("a model without a head")


@pytest.mark.parametrize("kind", [WithOtherMethod, WithoutHead])
def test_a_model_is_merged_whatever_its_methods_of_words_do(kind, caplog):
    model = kind(TIES)
    lora.add_lora(model, "q_proj", r=2)
    lora.merge(model)
    assert caplog.text == ""


def test_remove_lora_refuses_what_add_lora_has_not_adapted(model):
    with pytest.raises(ValueError, match="has no LoRA to remove"):
        lora.remove_lora(model)
    with pytest.raises(ValueError, match="0 was built as a LoRA layer"):
        lora.remove_lora(nn.Sequential(lora.Linear(4, 4, r=2)))


# ---- PyTorch's encoder in evaluation mode ----


@pytest.mark.parametrize("norm_first", [False, True])
def test_pytorch_s_encoder_calls_layers_set_by_hand_without_marking_them(norm_first):
    """A script that does not train need not have called `mark_only_lora_as_trainable`."""
    settings = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first}
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, **settings).eval()
    layer.linear1 = lora.Linear(8, 16, r=2).eval()
    nn.init.normal_(layer.linear1.lora_B)
    x = torch.rand(2, 3, 8)
    with_gradients = layer(x)  # gradients rule out the fast path
    with torch.no_grad():
        assert_same([layer(x)], [with_gradients], atol=1e-5, rtol=1e-5)
        assert_same([copy.deepcopy(layer)(x)], [with_gradients], atol=1e-5, rtol=1e-5)
    plain = lora.merge(layer).eval()
    with torch.no_grad():
        assert_same([plain(x)], [with_gradients], atol=1e-5, rtol=1e-5)


def test_pytorch_s_encoder_calls_layers_set_by_hand():
    """Its fast path would compute with its children's weights, without updates."""
    model = AnyModel()
    plain = model.encoder.layers[0].linear1
    model.encoder.layers[0].linear1 = lora.Linear(8, 16, r=2)
    model.encoder.layers[0].linear1.load_state_dict(plain.state_dict(), strict=False)
    lora.mark_only_lora_as_trainable(model)
    change(model)
    found = results(model)
    assert_same(found, [found[2], found[4], found[2], found[2], found[4]], atol=1e-5, rtol=1e-5)
    merged = results(lora.merge(model))
    assert_same(merged, found, atol=1e-5, rtol=1e-5)
