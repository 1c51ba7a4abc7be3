"""Tests of what `load_adapter` and `save_adapter` accept, and what they refuse without changes."""

import logging
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from adapted_models import CASES, IDS, Words, tied
from compare import assert_same_bits
from torch import nn

import loralib as lora
from loralib.adapters.adapter import Adapter
from loralib.adapters.metadata import LoraMetadata
from loralib.errors import CheckpointError, NeedsMergingError, WrongBaseError

WORDS = CASES["head"]


@pytest.fixture
def saved(tmp_path):
    """``saved(case, **settings)`` saves the adapter of a model, and returns the file."""

    def save(name="head", **settings):
        path = tmp_path / f"{name}.safetensors"
        path.unlink(missing_ok=True)
        lora.save_adapter(CASES[name].adapted(**settings), path)
        return path

    return save


def refused(model, path, *parts, kind=CheckpointError, **arguments):
    """`load_adapter` raises one line that holds all of `parts`, and the model stays as it was."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    trained = [parameter.requires_grad for parameter in model.parameters()]
    with pytest.raises(kind) as caught:
        lora.load_adapter(model, path, **arguments)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
    assert_same_bits(model.state_dict(), before)
    assert [type(module) for module in model.modules()] == classes
    assert [parameter.requires_grad for parameter in model.parameters()] == trained


def changed(**modules):
    """The plain model with some modules replaced."""
    model = WORDS.build()
    for name, module in modules.items():
        model.set_submodule(name.replace("__", "."), module)
    return model


# ---- another model ----


def test_the_error_names_the_base_to_give(tmp_path):
    lora.save_adapter(WORDS.adapted(), tmp_path / "a.safetensors", base="some/base")
    model = changed(layers=nn.ModuleList())
    refused(model, tmp_path / "a.safetensors", "model that it was trained in, of 'some/base'")


def test_an_adapter_can_be_of_one_of_two_tied_modules(tmp_path):
    """As in other libraries, the other module does not change."""
    path, model, plain = tmp_path / "a.safetensors", tied(), tied()
    tensors = {"last.lora_A": torch.ones(2, 8), "last.lora_B": torch.ones(11, 2)}
    info = LoraMetadata(rank=2, alpha=2, targets=("last",))
    lora.write_adapter(path, Adapter(tensors, info))
    assert lora.load_adapter(model, path) == ("last",)
    assert model.last.weight is model.words.weight
    added = nn.Linear(8, 11, bias=False)
    added.weight = nn.Parameter(torch.full((11, 8), 2.0))
    x = torch.tanh(plain.up(plain.words(IDS)))
    torch.testing.assert_close(model(IDS), plain(IDS) + added(x))


def test_an_adapter_can_be_loaded_into_a_part_of_the_model(tmp_path):
    """The error for the whole model names the part."""
    lora.save_adapter(WORDS.adapted(), tmp_path / "a.safetensors")
    model = nn.ModuleDict({"inner": nn.ModuleDict({"0": WORDS.build()})})
    with pytest.raises(
        CheckpointError, match=r"give that part, model\.get_submodule\('inner\.0'\)$"
    ):
        lora.load_adapter(model, tmp_path / "a.safetensors")
    assert lora.load_adapter(model.get_submodule("inner.0"), tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        (
            changed(layers=nn.ModuleList()),
            ["the model has no layers.0.out to adapt: give the model that it was trained in"],
        ),
        (
            nn.ModuleDict({"inner": nn.ModuleDict({"0": WORDS.build()})}),
            ["it has inner.0.layers.0.out; give that part, model.get_submodule('inner.0')"],
        ),
        (
            changed(layers__0__out=nn.Linear(9, 8)),
            [
                "the delta of layers.0.out is (8, 8)",
                "weight is (8, 9)",
                "base of another size; give the model",
            ],
        ),
        (
            changed(layers__1__out=nn.Embedding(8, 8)),
            ["in the model, layers.1.out is not a linear layer"],
        ),
        (
            changed(layers__1__out=nn.Conv1d(8, 8, 1)),
            ["in the model, layers.1.out is not a linear layer"],
        ),
        (
            changed(score=nn.Linear(8, 4)),
            [
                "score.bias is (3,) in the file, (4,) in the model",
                "score.weight is (3, 8)",
                "(4, 8)",
            ],
        ),
        (
            changed(score=nn.Identity()),
            ["has tensors that the model does not have: score.bias, score.weight"],
        ),
        (changed(layers__0__out=nn.Identity()), ["layers.0.out is not a linear layer"]),
    ],
)
def test_a_model_with_other_modules_is_refused(saved, model, parts):
    refused(model, saved(), *parts)


@pytest.mark.parametrize(
    ("module", "parts"),
    [
        (nn.Embedding(12, 8), ["words is (8, 11)", "(8, 12)"]),
        (nn.Linear(8, 11), ["in the model, words is not an embedding"]),
    ],
)
def test_an_adapter_of_an_embedding_is_refused_by_other_modules(saved, module, parts):
    refused(changed(words=module), saved("embedding"), *parts)


def test_convolutions_of_other_shapes_are_refused(saved):
    model = CASES["kernels"].build()
    model.plane = nn.Conv2d(2, 6, (2, 3), stride=2, bias=False)  # as many elements
    refused(model, saved("kernels"), "plane is (6, 2, 3, 2)", "weight is (6, 2, 2, 3)")
    model.plane = nn.Conv3d(2, 6, 3)
    refused(model, saved("kernels"), "plane is not a convolution in 2-D")
    model.plane = nn.ConvTranspose2d(6, 2, (3, 2))
    refused(model, saved("kernels"), "plane is not a convolution in 2-D")


def test_another_base_is_refused(saved):
    other = WORDS.build(seed=5)
    refused(other, saved(), "another base than the one given", kind=WrongBaseError)
    model = WORDS.build()
    model.layers[0]["qkv"].weight.data[0, 0] += 1
    refused(model, saved(), "another base", kind=WrongBaseError)


def test_words_that_were_added_to_the_base_anew_make_it_another_base(tmp_path):
    def extended(seed):
        model = nn.Sequential(nn.Embedding(3000, 8), nn.Linear(8, 8), nn.Linear(8, 2))
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.5)
        rows = torch.randn(2, 8, generator=torch.Generator().manual_seed(seed))
        model[0].weight.data[-2:] = rows
        return model

    trained = extended(seed=0)
    lora.add_lora(trained, [re.compile("1")], r=2)
    lora.save_adapter(trained, tmp_path / "a.safetensors")
    lora.load_adapter(extended(seed=0), tmp_path / "a.safetensors")
    way_out = "or, if words were added to it, the model saved with them"
    refused(extended(seed=1), tmp_path / "a.safetensors", way_out, kind=WrongBaseError)


def test_the_models_head_is_replaced_by_the_adapters_and_can_be_trained_further(saved):
    """So it may differ from that of the base."""
    model, path = WORDS.build(), saved()
    nn.init.ones_(model.score.weight)
    nn.init.ones_(model.norm.running_mean)
    lora.load_adapter(model, path)
    trained = WORDS.adapted()
    assert_same_bits(model.state_dict(), trained.state_dict())
    assert model.score.weight.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_base_may_be_in_another_precision(saved, caplog, dtype):
    model = WORDS.build().to(dtype)
    lora.load_adapter(model, saved())
    assert not caplog.records
    assert model.layers[0]["out"].lora_A.dtype == torch.promote_types(dtype, torch.float32)


def test_an_unverified_base_is_a_warning(saved, tmp_path, caplog):
    lora.load_adapter(WORDS.build().half(), saved())
    assert (
        "a model in float16, or quantized or offloaded in part, has no fingerprint" in caplog.text
    )
    caplog.clear()
    torch.save(lora.lora_state_dict(WORDS.adapted()), tmp_path / "a.pt")
    with caplog.at_level(logging.WARNING):
        lora.load_adapter(WORDS.build(), tmp_path / "a.pt", lora_alpha=3)
    assert "does not record its base's fingerprint: cannot check" in caplog.text


# ---- a model with LoRA ----


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"r": 3}, ["trained with rank 2, the model was built with 3 (layers.0.out)"]),
        ({"lora_alpha": 4}, ["trained with alpha 3, the model was built with 4 (layers.0.out)"]),
        ({"variant": "dora"}, ["trained with variant lora, the model was built with dora"]),
        ({"initialization": "olora"}, ["trained with initialization default", "with olora"]),
        ({"targets": "qkv"}, ["does not adapt layers.0.qkv", "remove_lora first"]),
        (
            {"enable_lora": {"out": [True, False]}},
            ["trained with enable_lora [True], ", "[True, False]"],
        ),
        (
            {"rank_pattern": {"layers.1.*": 4}},
            ["trained with rank 2, the model was built with 4 (layers.1.out)"],
        ),
    ],
)
def test_lora_layers_with_other_settings_are_refused(saved, settings, parts):
    refused(WORDS.adapted(**settings), saved(), *parts)


def test_what_an_adapter_was_trained_with_has_to_be_in_the_model(saved):
    adapter, model = lora.read_adapter(saved()), WORDS.build()
    both = replace(adapter.metadata, trained_with=("apply_bitfit",))
    path = saved().with_name("both.safetensors")
    lora.write_adapter(path, replace(adapter, metadata=both))
    refused(model, path, "was trained with apply_bitfit as well, which the model lacks")
    model.config = SimpleNamespace(apply_bitfit=True)
    lora.load_adapter(model, path)


def test_lora_layers_with_the_same_settings_are_used(saved):
    model = WORDS.adapted()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    path = saved()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.zero_()
    assert lora.load_adapter(model, path) == ("layers.0.out", "layers.1.out")
    assert_same_bits(model.state_dict(), expected)


def test_lora_is_added_to_layers_that_lack_it(saved):
    """What else is trained in the model stays trained."""
    model, path = WORDS.build(), saved()
    lora.add_lora(model, "layers.1.out", r=2, lora_alpha=3, modules_to_train="words")
    lora.load_adapter(model, path)
    assert_same_bits(model.state_dict(), WORDS.adapted().state_dict())
    assert model.words.weight.requires_grad


@pytest.mark.parametrize("freeze_A", [False, True])
def test_a_is_frozen_only_if_the_adapter_says_so(saved, freeze_A):
    model = WORDS.build()
    lora.load_adapter(model, saved(freeze_A=freeze_A))
    layers = [module for module in model.modules() if isinstance(module, lora.LoRALayer)]
    assert layers
    for layer in layers:
        assert (layer.lora_A.requires_grad, layer.lora_B.requires_grad) == (not freeze_A, True)


def test_a_model_built_with_lora_layers_can_be_saved(tmp_path):
    """Its adapter is the same as that of a plain model with added LoRA."""
    built = nn.Sequential(lora.Linear(4, 5, r=2, lora_alpha=3), nn.Linear(5, 2))
    lora.mark_only_lora_as_trainable(built)
    nn.init.ones_(built[0].lora_B)
    lora.save_adapter(built, tmp_path / "a.safetensors")
    plain = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    plain.load_state_dict(built.state_dict(), strict=False)
    assert lora.load_adapter(plain, tmp_path / "a.safetensors") == ("0",)
    assert_same_bits(plain.state_dict(), built.state_dict())


# ---- files ----


def test_an_unknown_alpha_must_be_given_and_a_known_one_be_equal(saved, tmp_path):
    torch.save(lora.lora_state_dict(WORDS.adapted()), tmp_path / "a.pt")
    refused(WORDS.build(), tmp_path / "a.pt", "give it as lora_alpha")
    refused(WORDS.build(), saved(), "trained with alpha 3, but lora_alpha is 4", lora_alpha=4)


def test_a_linear_layer_with_its_own_forward_is_refused(saved):
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    model = changed(layers__1__out=Own(8, 8))
    model.load_state_dict(WORDS.build().state_dict())
    refused(model, saved(), "layers.1.out", "which has no LoRA layer", kind=TypeError)


class PeftsLinear(nn.Module):
    """Stands for PEFT's LoRA layer, with the parts by which it is recognized."""

    __module__ = "peft.tuners.lora.layer"

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer, self.lora_A = base_layer, nn.ModuleDict({"default": nn.Linear(8, 2)})


class PeftsScaling(nn.Module):
    """Stands for PEFT's IA³ layer, with the parts by which it is recognized."""

    __module__ = "peft.tuners.ia3.layer"

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer, self.ia3_l = base_layer, nn.ParameterDict({"default": torch.ones(8, 1)})


def test_a_model_with_pefts_lora_is_refused(saved):
    model = WORDS.build()
    model.layers[1]["out"] = PeftsLinear(model.layers[1]["out"])
    refused(
        model,
        saved(),
        "layers.1.out already has an adapter of PEFT's (lora)",
        "unload()",
        kind=ValueError,
    )


# ---- saving ----


@pytest.mark.parametrize(("kind", "called"), [(PeftsLinear, "lora"), (PeftsScaling, "ia3")])
def test_saving_refuses_a_model_that_peft_has_adapted_since(tmp_path, kind, called):
    model = WORDS.build()
    lora.add_lora(model, "out", r=2)
    model.layers[1]["out"] = kind(model.layers[1]["out"])
    message = rf"layers\.1\.out already has an adapter of PEFT's \({called}\): .*unload\(\)"
    with pytest.raises(ValueError, match=message):
        lora.save_adapter(model, tmp_path / "a")


def test_saving_refuses_a_model_without_lora(tmp_path):
    with pytest.raises(ValueError, match="Words has no LoRA to save"):
        lora.save_adapter(Words(), tmp_path / "a")


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lora.Conv2d(2, 3, 3, r=2), "0 is a loralib Conv2d, whose factors are in the release's"),
        (lora.Linear(4, 4, r=2, variant="dora"), "of several kinds"),
        (lora.Linear(4, 4, r=2, initialization="pissa"), "of several kinds"),
    ],
)
def test_saving_refuses_layers_that_no_format_can_describe(tmp_path, layer, message):
    model = nn.Sequential(layer, lora.Linear(4, 4, r=2))
    with pytest.raises(CheckpointError, match=message):
        lora.save_adapter(model, tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"variant": "dora"}, "of the variant dora"),
        ({"variant": "rslora"}, "of the variant rslora"),
        ({"initialization": "pissa"}, "of the initialization pissa"),
        ({"rank_pattern": {"layers.0.out": 4}}, "has rank_pattern, which"),
        ({"alpha_pattern": {"layers.0.out": 4}}, "has alpha_pattern, which"),
        ({"targets": "words"}, "of the embeddings words"),
        ({"targets": "qkv", "enable_lora": {"qkv": [True, False, True]}}, "has slices, which"),
    ],
)
def test_saving_refuses_settings_that_the_releases_format_cannot_record(
    tmp_path, settings, message
):
    model = WORDS.adapted(**settings)
    with pytest.raises(NeedsMergingError, match=re.escape(message)):
        lora.save_adapter(model, tmp_path / "a.bin")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("groups", {}, "conv is a convolution with groups, dilation or a padding_mode"),
        ("separate", {}, "is part of an nn.MultiheadAttention with inputs of different sizes"),
        ("attention", {"targets": "out_proj"}, "is adapted without its nn.MultiheadAttention"),
        ("attention", {"variant": "dora"}, "an nn.MultiheadAttention, for which PEFT has no DoRA"),
        ("own out_proj", {}, "attention.out_proj and attention differ in rank or alpha"),
        ("attention", {"bias": "lora_only"}, "attention.in_proj_bias, a bias that PEFT does not"),
        ("slices", {"variant": "dora"}, "layers.0.qkv has DoRA's magnitudes for slices"),
    ],
)
def test_saving_refuses_what_pefts_folder_cannot_hold(tmp_path, name, settings, message):
    model = CASES[name].adapted(**settings)
    with pytest.raises(NeedsMergingError, match=re.escape(message)):
        lora.save_adapter(model, tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_a_parameter_of_the_top_module_is_saved_but_not_in_pefts_folder(tmp_path):
    model = WORDS.adapted()
    model.scale = nn.Parameter(torch.ones(2))
    lora.save_adapter(model, tmp_path / "a.safetensors")
    assert "scale" in lora.read_adapter(tmp_path / "a.safetensors").tensors
    with pytest.raises(NeedsMergingError, match="scale, a parameter of the model itself"):
        lora.save_adapter(model, tmp_path / "a")


def test_saving_refuses_a_weight_that_is_trained_and_adapted(tmp_path):
    """LoRA alone would not hold all that is trained."""
    model = WORDS.adapted()
    model.layers[0]["out"].weight.requires_grad = True
    with pytest.raises(CheckpointError, match=r"weight of layers\.0\.out is trained as well"):
        lora.save_adapter(model, tmp_path / "a.safetensors")


def test_saving_refuses_values_that_cannot_be_halved_for_peft(tmp_path):
    """PEFT's folder has half of out_proj's B; half of float16's smallest number is 0."""
    model = CASES["attention"].adapted()
    lora.save_adapter(model, tmp_path / "a.safetensors")
    adapter = lora.read_adapter(tmp_path / "a.safetensors")
    tensors = {name: tensor.half() for name, tensor in adapter.tensors.items()}
    tensors["attention.out_proj.lora_B"][0, 0] = 2.0**-24
    with pytest.raises(CheckpointError, match=r"too small to be halved in torch\.float16"):
        lora.write_adapter(tmp_path / "b", Adapter(tensors, adapter.metadata), "peft")
    assert not (tmp_path / "b").exists()


def test_the_error_says_if_the_models_experts_are_one_parameter(tmp_path):
    """Transformers holds them in this way since version 5; older adapters have one per expert."""

    def model(experts):
        block = {"q": nn.Linear(4, 4), "experts": experts}
        return nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict(block)])})

    older, stacked = model(nn.ModuleList([nn.Linear(4, 4)])), nn.Module()
    stacked.gate_up_proj = nn.Parameter(torch.ones(2, 4, 4))
    lora.add_lora(older, "experts.0", r=2)
    lora.save_adapter(older, tmp_path / "a")
    expected = (
        "this model holds all experts of a layer in one parameter, such as "
        "layers.0.experts.gate_up_proj: load the adapter with PEFT"
    )
    with pytest.raises(
        CheckpointError, match=r"has no layers\.0\.experts\.0 to .*: give the model"
    ):
        lora.load_adapter(model(nn.Module()), tmp_path / "a")
    with pytest.raises(CheckpointError, match=re.escape(expected)):
        lora.load_adapter(model(stacked), tmp_path / "a")


@torch.no_grad()
def test_a_file_that_only_its_model_explains_is_loaded_by_load_state_dict(tmp_path):
    def build(r):
        slices = lora.MergedLinear(4, 6, r=2, enable_lora=[True, False, True])
        return nn.Sequential(slices, lora.Linear(6, 3, r=r)).requires_grad_(False)

    for r, reason in ((2, "0 has 2 stacked blocks"), (3, "has 2 ranks: 2 (0), 3 (1)")):
        trained = build(r)
        for layer in trained:
            nn.init.normal_(layer.lora_B)
        torch.save(lora.lora_state_dict(trained), tmp_path / "a.pt")
        with pytest.raises(CheckpointError, match=re.escape(reason)) as caught:
            lora.load_adapter(trained, tmp_path / "a.pt", lora_alpha=1)
        assert "load it with load_state_dict into the model with its LoRA" in str(caught.value)
        model = build(r)
        base = {name: t for name, t in trained.state_dict().items() if "lora_" not in name}
        model.load_state_dict(base | torch.load(tmp_path / "a.pt"))
        lora.save_adapter(model, tmp_path / "a.safetensors")
        assert_same_bits(model.state_dict(), trained.state_dict())
