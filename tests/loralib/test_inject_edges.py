"""Tests of add_lora and remove_lora on unusual models, and in unusual orders of calls."""

import copy
import pickle

import pytest
import torch
from any_models import AnyModel, assert_add_lora_refuses, ids, names_of
from stacked_experts import Experts
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.fusion import fuse_conv_bn_eval

import loralib as lora
from loralib.adapters.saving import adapter_of


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).mean((2, 3)))


def test_out_proj_can_be_excluded_or_have_a_rank_of_its_own():
    attention = "encoder.layers.0.self_attn"
    model = AnyModel()
    assert lora.add_lora(model, attention, r=2, exclude="out_proj") == (attention,)
    assert lora.add_lora(model, f"{attention}.out_proj", r=1) == (f"{attention}.out_proj",)
    model = AnyModel()
    lora.add_lora(model, attention, r=2, rank_pattern={"out_proj": 1})
    layer = model.get_submodule(attention)
    assert (layer.r, layer.out_proj.r) == (2, 1)


def test_an_attention_with_separate_projections_is_not_adapted_twice():
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2, kdim=3)})
    lora.add_lora(model, "attention", r=2)
    with pytest.raises(ValueError, match="attention has LoRA already: remove_lora"):
        lora.add_lora(model, "attention", r=2, exclude="out_proj")


def test_out_proj_can_be_adapted_before_its_attention():
    model, attention = AnyModel().eval(), "encoder.layers.0.self_attn"
    expected = model(ids())
    lora.add_lora(model, "encoder.layers.0.self_attn.out_proj", r=1)
    with pytest.raises(ValueError, match="out_proj has LoRA already"):
        lora.add_lora(model, attention, r=2)
    assert lora.add_lora(model, attention, r=2, exclude="out_proj") == (attention,)
    layer = model.get_submodule(attention)
    assert (layer.r, layer.out_proj.r) == (2, 1)
    torch.testing.assert_close(model(ids()), expected)
    lora.remove_lora(model)
    assert not names_of(model)
    assert type(layer) is nn.MultiheadAttention


class OwnLinear(nn.Linear):
    """A user's class, which computes what its base does."""


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(2, 3, 3), nn.Linear(4, 4), OwnLinear(4, 4), nn.Embedding(5, 4)]
)
def test_merging_one_layer_returns_a_plain_layer_and_leaves_the_model(layer):
    model, kind = nn.Sequential(layer), type(layer)
    lora.add_lora(model, "0", r=2)
    with torch.no_grad():
        layer.lora_A.add_(0.5)
        layer.lora_B.add_(0.5)
    x = torch.ones(2, 2, 4, 4) if isinstance(layer, nn.Conv2d) else torch.ones(3, 4)
    x = torch.tensor([1, 3]) if isinstance(layer, nn.Embedding) else x
    expected = layer(x)
    merged = lora.merge(layer)
    assert names_of(model) == ["0"]
    assert type(merged) is kind
    torch.testing.assert_close(merged(x), expected)


def test_gradients_from_before_add_lora_do_not_change_the_base():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1, 4)).sum().backward()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    lora.add_lora(model, "0", r=2)
    optimizer.step()
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())


def test_a_frozen_A_stays_frozen():
    layer = lora.Linear(4, 4, r=2, freeze_A=True)
    layer.requires_grad_(True)
    lora.mark_only_lora_as_trainable(layer)
    assert [n for n, p in layer.named_parameters() if p.requires_grad] == ["lora_B"]


def test_running_statistics_that_are_not_saved_are_named(tmp_path, caplog):
    model = Normed()
    lora.add_lora(model, "conv", r=1, modules_to_train="head")
    model.norm(torch.zeros(1, 3, 4, 4))  # changes the variance, and leaves the mean at 0
    (remark,) = [r for r in lora.save_adapter(model, tmp_path / "a.v1") if "statistics" in r]
    assert "running statistics of 1 module (norm), " in remark
    assert remark in caplog.text
    assert (tmp_path / "a.v1" / "adapter_config.json").is_file()
    model = Normed()
    lora.add_lora(model, "conv", r=1, modules_to_train=["head", "norm"])
    assert "norm.running_mean" in adapter_of(model).tensors
    remarks = lora.save_adapter(model, tmp_path / "b.safetensors")
    assert not [remark for remark in remarks if "statistics" in remark]


@pytest.mark.parametrize("is_cast", [False, True])
def test_running_statistics_that_have_not_changed_are_the_base_s(tmp_path, is_cast):
    """As of norms that are kept in eval(), or of frozen ones, whose statistics are constants."""
    model = Normed()
    lora.add_lora(model, "conv", r=1)
    model.norm.eval()
    model(torch.ones(1, 2, 4, 4))
    if is_cast:  # what they were cannot be told any more
        model.norm.double()
    remarks = lora.save_adapter(model, tmp_path / "a.safetensors")
    assert any("statistics" in remark for remark in remarks) is is_cast


@torch.no_grad()
def test_a_norm_is_folded_into_a_convolution_only_after_merging():
    """Folded before, the weight would be scaled, and its update would not."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3)).double().eval()
    model[1].running_var.fill_(4.0)
    lora.add_lora(model, "0", r=1)
    nn.init.ones_(model[0].lora_B)
    x = torch.randn(1, 2, 4, 4, dtype=torch.float64)
    expected = model(x)
    with pytest.raises(ValueError, match=r"a Conv2d with LoRA, .*, and call lora\.merge before"):
        fuse_conv_bn_eval(*model)
    lora.merge(model)
    torch.testing.assert_close(fuse_conv_bn_eval(*model)(x), expected)


class Quantizer(nn.Module):
    """Moves its codes in training mode, as vector quantizers do, and counts."""

    def __init__(self, has_parameters=False):
        super().__init__()
        self.register_buffer("codes", torch.eye(4))
        self.register_buffer("used", torch.zeros(4), persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        if has_parameters:
            self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        if self.training:
            self.codes.data += 1
            self.used += 1
            self.steps += 1
        return x @ self.codes


def remarks_on_buffers(model, path):
    return [remark for remark in lora.save_adapter(model, path) if "buffer" in remark]


@pytest.mark.parametrize("has_parameters", [False, True])
def test_buffers_that_change_in_training_are_named(tmp_path, has_parameters):
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "vq": Quantizer(has_parameters)})
    lora.add_lora(model, "a", r=1)
    assert not remarks_on_buffers(model, tmp_path / "a.safetensors")
    model["vq"](torch.ones(1, 4))
    (remark,) = remarks_on_buffers(model, tmp_path / "a.safetensors")
    names = ", or name it in modules_to_train" if has_parameters else ""
    assert remark.startswith("1 buffer of the base (vq.codes) changed since add_lora, as some do ")
    assert f": keep its module in eval(){names}; now, torch.save(" in remark
    assert remark.endswith("; if the base was loaded after add_lora, there is nothing to do")
    copied = pickle.loads(pickle.dumps(model))
    assert remarks_on_buffers(copied, tmp_path / "a.safetensors") == [remark]
    lora.start_from_weights(copied)
    assert not remarks_on_buffers(copied, tmp_path / "a.safetensors")
    model["vq"].bfloat16()
    assert not remarks_on_buffers(model, tmp_path / "a.safetensors")
    plain = [*vars(Quantizer())]
    lora.remove_lora(model)
    assert [*vars(model["vq"])] == plain


def test_to_train_is_no_advice_for_a_module_around_adapted_layers(tmp_path):
    model = nn.ModuleDict({"vq": Quantizer(has_parameters=True)})
    model["vq"].inner = nn.Linear(4, 4)
    lora.add_lora(model, "vq.inner", r=1)
    model["vq"](torch.ones(1, 4))
    (remark,) = remarks_on_buffers(model, tmp_path / "a.safetensors")
    assert "keep its module in eval(); now" in remark


def test_a_buffer_that_grows_is_a_table_of_its_module(tmp_path):
    """As of positions up to the longest input so far, which the base makes as well."""
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "vq": Quantizer()})
    lora.add_lora(model, "a", r=1)
    model["vq"].codes = torch.eye(5)
    assert not remarks_on_buffers(model, tmp_path / "a.safetensors")


def test_buffers_may_be_lazily_negated_and_modes_fake(tmp_path):
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "vq": Quantizer()})
    model["vq"].codes = torch.view_as_complex(torch.randn(4, 4, 2)).conj().imag
    assert model["vq"].codes.is_neg()
    copied = copy.deepcopy(model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        lora.add_lora(copied, "a", r=1)
    lora.add_lora(model, "a", r=1)
    assert not remarks_on_buffers(model, tmp_path / "a.safetensors")


def test_buffers_of_modules_that_are_trained_are_saved(tmp_path):
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "vq": Quantizer(has_parameters=True)})
    lora.add_lora(model, "a", r=1, modules_to_train="vq")
    model["vq"](torch.ones(1, 4))
    assert not remarks_on_buffers(model, tmp_path / "a.safetensors")


def test_for_running_statistics_without_parameters_no_training_is_suggested(tmp_path):
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4, affine=False)})
    lora.add_lora(model, "a", r=1)
    model["norm"](torch.eye(4))
    (remark,) = [r for r in lora.save_adapter(model, tmp_path / "a.v1") if "statistics" in r]
    assert remark.endswith("keep this module in eval()")
    with pytest.raises(ValueError, match="norm has no parameters to train"):
        lora.add_lora(model, "a", r=1, modules_to_train="norm")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_for_running_statistics_of_a_scripted_module_no_training_is_suggested(tmp_path):
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "norm": torch.jit.script(nn.BatchNorm1d(4))})
    lora.add_lora(model, "a", r=1)
    model["norm"](torch.eye(4))
    (remark,) = [r for r in lora.save_adapter(model, tmp_path / "a.v1") if "statistics" in r]
    assert remark.endswith("keep this module in eval()")
    with pytest.raises(ValueError, match="norm cannot be trained as it is: it is scripted"):
        lora.add_lora(model, "a", r=1, modules_to_train="norm")


def test_modules_to_train_may_name_a_module_twice_within_another():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "head": nn.Sequential(nn.Linear(4, 2))})
    model["again"] = model["head"][0]
    lora.add_lora(model, "a", r=1, modules_to_train=["again", "head"])
    assert {"head.0.weight", "head.0.bias"} <= adapter_of(model).tensors.keys()


def test_a_bank_refuses_a_layer_that_has_been_given_lora_since():
    model = AnyModel()
    lora.add_lora(model, "q_proj", r=2)
    adapter = adapter_of(model)
    lora.remove_lora(model)
    bank = lora.AdapterBank(model)
    bank.add("one", adapter)
    lora.add_lora(model, "q_proj", r=2)
    model(ids())
    with bank.use("one"), pytest.raises(ValueError, match="q_proj has been given LoRA since"):
        model(ids())


def test_attributes_that_were_set_after_add_lora_stay():
    model, x = AnyModel(), torch.ones(2, 8)
    layer, attention = model.layers[0].q_proj, model.encoder.layers[0].self_attn
    before = [{*vars(module)} for module in (layer, attention)]
    lora.add_lora(model, ["encoder.layers.0.self_attn.out_proj", "q_proj"], r=2)
    attention.note = "first"
    lora.add_lora(model, "encoder.layers.0.self_attn", r=2, exclude="out_proj")
    layer.note, layer.scale = "mine", nn.Parameter(torch.ones(1))
    layer.register_buffer("seen", torch.zeros(1))
    for mode in (True, False):
        model.train(mode)(ids()).sum().backward()
        with torch.no_grad():
            model(ids())
    lora.remove_lora(model)
    assert [{*vars(module)} for module in (layer, attention)] == [
        each | {"note"} for each in before
    ]
    assert (layer.note, attention.note) == ("mine", "first")
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias", "scale"]
    assert "seen" in layer.state_dict()
    assert layer(x).shape == (2, 8)
    lora.add_lora(model, "q_proj", r=2)
    assert "note" in vars(lora.merge(model).layers[0].q_proj)


def test_remove_lora_refuses_one_adapted_layer_and_accepts_a_block():
    model = AnyModel()
    lora.add_lora(model, ["q_proj", "self_attn"], r=2)
    for layer in (model.layers[0].q_proj, model.encoder.layers[0].self_attn.out_proj):
        with pytest.raises(ValueError, match="Linear is one adapted layer: give the model that it"):
            lora.remove_lora(layer)
    assert lora.remove_lora(model.layers[0]) == ("q_proj",)
    assert "layers.0.q_proj" not in names_of(model)
    assert "layers.1.q_proj" in names_of(model)


def test_remove_lora_accepts_an_attention_with_only_out_proj_adapted():
    attention = nn.MultiheadAttention(8, 2)
    lora.add_lora(attention, "out_proj", r=2)
    assert lora.remove_lora(attention) == ("out_proj",)
    assert type(attention) is nn.MultiheadAttention


def test_saving_to_a_safetensors_file_gives_no_remarks(tmp_path):
    model = AnyModel()
    lora.add_lora(model, "q_proj", r=2)
    for layer in model.layers:
        torch.nn.init.normal_(layer.q_proj.lora_B)
    assert lora.save_adapter(model, tmp_path / "a.safetensors") == []


def test_a_decomposition_that_fails_leaves_everything_as_it_was():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight.data[0, 0] = float("nan")
    message = "1: its weight has no decomposition"
    assert_add_lora_refuses(model, message, ["0", "1"], r=2, initialization="pissa")
    model = nn.Sequential(model, Experts())  # which is adapted after the layers
    assert_add_lora_refuses(
        model, rf"0\.{message}", ["0.1", "down_proj"], r=2, initialization="pissa"
    )
    assert type(model[1]) is Experts


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_stack_s_update_is_in_the_mode_of_its_module(is_trained):
    model = nn.Sequential(Experts()).train(is_trained)
    (name,) = lora.add_lora(model, "down_proj", r=2)
    assert model.get_submodule(name).training is is_trained


def test_a_model_with_lora_in_a_parameter_s_name_is_refused():
    model = nn.ModuleDict({"flora_x": nn.Linear(8, 8), "a": nn.Linear(8, 8)})
    assert_add_lora_refuses(model, "flora_x.weight has 'lora_' in its name", "a", r=2)
    model["built"] = lora.Linear(8, 8, r=2)
    with pytest.raises(ValueError, match=r"flora_x\.weight has 'lora_' in its name"):
        lora.add_lora(model, "a", r=2)


def test_lora_layers_of_rank_zero_are_frozen_like_the_rest():
    model = nn.Sequential(lora.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    lora.add_lora(model, "1", r=2)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {"1.lora_A", "1.lora_B"}
