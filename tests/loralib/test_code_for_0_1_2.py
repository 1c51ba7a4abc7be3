"""Tests that code written for loralib 0.1.2 works: subclasses, state dicts, pickles, scalings."""

import copy
import pickle
import types
from collections import OrderedDict
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close_to_rounding
from layer_cases import CASES, LINEAR, base_of, built, reference, run_plain, update
from torch import nn

import loralib as lora
from loralib.errors import CheckpointError
from loralib.nn.fast_paths import fast_paths_off

# ---- subclasses ----


def forward_of_0_1_2(self, x):
    """The forward that subclasses of 0.1.2's `Linear` typically have."""
    weight = self.weight.t() if self.fan_in_fan_out else self.weight
    out = F.linear(x, weight, self.bias)
    if self.r > 0 and not self.merged:
        out = out + (self.lora_dropout(x) @ self.lora_A.t() @ self.lora_B.t()) * self.scaling
    return out


class OwnForward(lora.Linear):
    forward = forward_of_0_1_2


class OwnMerging(lora.Linear):
    """Merges into its own weight, as 0.1.2 does, and inherits the forward."""

    def train(self, mode=True):
        nn.Linear.train(self, mode)
        if mode == self.merged:
            sign = -1 if mode else 1
            self.weight.data += sign * (self.lora_B @ self.lora_A) * self.scaling
            self.merged = not mode
        return self


class OwnMergingAndForward(OwnMerging):
    def forward(self, x):
        return super().forward(x)


def patched(*args, **kwargs):
    layer = lora.Linear(*args, **kwargs)
    layer.forward = types.MethodType(forward_of_0_1_2, layer)
    return layer


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("build", [OwnForward, OwnMerging, OwnMergingAndForward, patched])
def test_a_forward_written_for_0_1_2_has_the_update_in_both_modes(build, grad):
    torch.manual_seed(0)
    layer, x = build(6, 4, r=2, lora_alpha=6), torch.randn(3, 6)
    nn.init.normal_(layer.lora_B)
    expected = F.linear(x, layer.weight + 3 * layer.lora_B @ layer.lora_A, layer.bias)
    with torch.set_grad_enabled(grad):
        for mode in (True, False, True, False):
            layer.train(mode)
            assert_close_to_rounding(layer(x), expected, 4 * 6)


@pytest.mark.parametrize("build", [OwnMerging, OwnMergingAndForward])
def test_an_update_that_is_in_the_weight_is_not_merged_again(build):
    torch.manual_seed(0)
    layer, x = build(6, 4, r=2), torch.randn(3, 6)
    nn.init.normal_(layer.lora_B)
    expected = layer(x)
    for mode in (True, False):
        assert_close_to_rounding(lora.Linear.merged_layer(layer.train(mode))(x), expected, 4 * 6)


def test_a_merged_layer_has_a_contiguous_weight_which_safetensors_can_save():
    layer = OwnMerging(6, 4, r=2)
    layer.weight = nn.Parameter(torch.randn(6, 4).t(), requires_grad=False)
    for mode in (True, False):
        assert lora.Linear.merged_layer(layer.train(mode)).weight.is_contiguous()


def test_train_unmerges_a_weight_that_was_merged_by_hand():
    torch.manual_seed(0)
    layer, x = OwnForward(6, 4, r=2), torch.randn(3, 6)
    nn.init.normal_(layer.lora_B)
    expected, weight = layer(x), layer.weight.clone()
    layer.eval()
    with torch.no_grad():
        layer.weight += layer.lora_B @ layer.lora_A * layer.scaling
    layer.merged = True
    assert_close_to_rounding(layer(x), expected, 4 * 6)
    out = layer.train()(x)
    assert not layer.merged
    assert_close_to_rounding(out, expected, 4 * 6)
    assert_close_to_rounding(layer.weight, weight, 4)
    out.sum().backward()
    assert layer.lora_A.grad.any()


@pytest.mark.parametrize("settings", [{"r": 0}, {"r": 2, "merge_weights": False}], ids=str)
def test_train_leaves_a_weight_as_it_is_where_0_1_2_does(settings):
    layer = OwnForward(6, 4, **settings)
    if layer.r:
        nn.init.normal_(layer.lora_B)
    weight = layer.weight.clone()
    layer.eval().merged = True
    layer.train()
    assert torch.equal(layer.weight, weight)
    assert layer.merged == (layer.r > 0)


def test_train_leaves_a_weight_as_it_is_if_dora_was_merged_by_hand():
    torch.manual_seed(0)
    layer = OwnForward(6, 4, r=2, variant="dora")
    nn.init.normal_(layer.lora_B)
    layer.eval().merged = True
    weight = layer.weight.clone()
    layer.train()  # the former weight is unknown
    assert torch.equal(layer.weight, weight)
    assert layer.merged


def test_a_weight_stays_merged_when_a_forward_that_was_set_is_deleted():
    torch.manual_seed(0)
    layer, x = patched(6, 4, r=2).eval(), torch.randn(3, 6)
    nn.init.normal_(layer.lora_B)
    expected = layer(x)
    layer.weight.data += layer.lora_B @ layer.lora_A * layer.scaling
    layer.merged = True
    del layer.forward
    assert layer.merged
    for mode in (False, True, False):
        assert_close_to_rounding(layer.train(mode)(x), expected, 4 * 6)


def test_merged_cannot_be_set_to_true_for_a_projection_of_an_attention():
    model = nn.Sequential(nn.MultiheadAttention(8, 2, kdim=6, vdim=6))
    lora.add_lora(model, ["0"], r=2)
    projection = model[0].q_proj
    assert model.eval()[0].q_proj.merged
    assert not model.train()[0].q_proj.merged
    with pytest.raises(ValueError, match="merged cannot be set to True"):
        projection.merged = True


def test_merged_cannot_be_set_to_true_where_the_weight_holds_no_update():
    layer = lora.Linear(6, 4, r=2)
    with pytest.raises(ValueError, match=r"merged cannot be set to True: .* lora\.merge"):
        layer.merged = True
    layer.eval().merged = True  # it is already
    layer.merged = False
    assert not layer.merged
    assert layer.eval().merged
    assert not layer.train().merged


@pytest.mark.parametrize("kind", [OwnMerging, OwnMergingAndForward])
def test_a_weight_that_contains_the_update_is_not_taken_for_the_base_s(tmp_path, kind):
    model = nn.Sequential(kind(6, 4, r=2))
    lora.mark_only_lora_as_trainable(model)
    nn.init.normal_(model[0].lora_B)
    again = copy.deepcopy(model)
    lora.save_adapter(model.eval(), tmp_path / "merged.safetensors")
    assert lora.read_adapter(tmp_path / "merged.safetensors").lora.base_fingerprint is None
    assert lora.load_adapter(again, tmp_path / "merged.safetensors") == ("0",)
    lora.save_adapter(again, tmp_path / "a.safetensors")
    assert lora.read_adapter(tmp_path / "a.safetensors").lora.base_fingerprint is not None
    with pytest.raises(CheckpointError, match=r"0 contains its present update, .*: call"):
        lora.load_adapter(again.eval(), tmp_path / "a.safetensors")


def test_a_subclass_with_its_own_forward_has_to_define_merged_layer():
    class Twice(lora.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(nn.Linear(6, 6), Twice(6, 4, r=2))
    lora.add_lora(model, ["0"], r=2)
    message = r"Twice has a forward of its own and no merged_layer\(\) .*return super\(\)\.merged"
    with pytest.raises(TypeError, match=message):
        lora.merge(model)
    assert isinstance(model[0], lora.LoRALayer)  # unchanged

    def merged_layer(self):
        plain = lora.Linear.merged_layer(self)
        plain.weight.data *= 2
        plain.bias = nn.Parameter(2 * plain.bias)
        return plain

    Twice.merged_layer = merged_layer
    x = torch.randn(3, 6)
    expected = model(x)
    assert_close_to_rounding(lora.merge(model)(x), expected, 4 * 6)


class WrapsAsBase(lora.LoRALayer, nn.Module):
    """A layer of another package that wraps a plain one, as `base`."""

    def __init__(self, plain):
        nn.Module.__init__(self)
        lora.LoRALayer.__init__(self, r=2, lora_alpha=4, lora_dropout=0.0, merge_weights=False)
        self.base = plain
        self.lora_A = nn.Parameter(torch.randn(2, plain.in_features))
        self.lora_B = nn.Parameter(torch.randn(plain.out_features, 2))

    def forward(self, x):
        return self.base(x) + x @ self.lora_A.t() @ self.lora_B.t() * self.scaling


def test_a_layer_that_wraps_a_plain_one_as_base():
    torch.manual_seed(0)
    plain, x = nn.Linear(6, 4), torch.randn(3, 6)
    model = nn.Sequential(WrapsAsBase(plain))
    update = 2 * model[0].lora_B @ model[0].lora_A
    for mode in (True, False):
        expected = F.linear(x, plain.weight + update, plain.bias)
        assert_close_to_rounding(model.train(mode)(x), expected, 4 * 6)
    lora.mark_only_lora_as_trainable(model, bias="lora_only")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"0.lora_A", "0.lora_B", "0.base.bias"}
    assert lora.lora_state_dict(model, bias="lora_only").keys() == trained


class WrapsUnderOtherName(WrapsAsBase):
    """A layer that wraps a plain one under another name than `base`."""

    def __init__(self, plain):
        super().__init__(plain)
        del self.base
        self.wrapped = plain

    def forward(self, x):
        return self.wrapped(x) + x @ self.lora_A.t() @ self.lora_B.t() * self.scaling


def test_a_layer_whose_weight_the_library_cannot_find_is_saved(tmp_path):
    model = nn.Sequential(WrapsUnderOtherName(nn.Linear(6, 4).requires_grad_(False)))
    lora.save_adapter(model, tmp_path / "a.safetensors")
    tensors = lora.read_adapter(tmp_path / "a.safetensors").tensors
    assert tensors.keys() == {"0.lora_A", "0.lora_B"}
    assert torch.equal(tensors["0.lora_B"], model[0].lora_B)


class LinearWithBase(lora.Linear):
    def __init__(self):
        super().__init__(6, 4, r=2)
        self.base = nn.Linear(6, 4)


class EmbeddingWithBase(lora.Embedding):
    def __init__(self):
        super().__init__(6, 4, r=2)
        self.base = nn.Embedding(6, 4)


def adapted_with_base():
    model = nn.Sequential(nn.Linear(6, 4))
    lora.add_lora(model, ["0"], r=2)
    model[0].base = nn.Linear(6, 4)
    return model[0]


@pytest.mark.parametrize("build", [LinearWithBase, EmbeddingWithBase, adapted_with_base])
def test_a_submodule_called_base_is_ignored_if_the_layer_has_a_weight(build):
    torch.manual_seed(0)
    layer, x = build(), torch.arange(6) if build is EmbeddingWithBase else torch.randn(3, 6)
    nn.init.normal_(layer.lora_A)
    nn.init.normal_(layer.lora_B)
    with torch.no_grad():
        expected = layer.train()(x)
        assert_close_to_rounding(layer.eval()(x), expected, 4 * 6)
    assert_close_to_rounding(lora.merge(layer)(x), expected, 4 * 6)
    lora.mark_only_lora_as_trainable(layer, bias="lora_only")
    trained = {name for name, p in layer.named_parameters() if p.requires_grad}
    assert trained == {"lora_A", "lora_B"} | ({"bias"} if hasattr(layer, "bias") else set())
    assert lora.lora_state_dict(layer, bias="lora_only").keys() == trained


class EmbeddingWithOwnMerging(lora.Embedding):
    def train(self, mode=True):
        nn.Embedding.train(self, mode)
        if mode == self.merged:
            sign = -1 if mode else 1
            self.weight.data += sign * (self.lora_B @ self.lora_A).t() * self.scaling
            self.merged = not mode
        return self


@torch.no_grad()
def test_an_embedding_merges_and_unmerges_by_itself():
    torch.manual_seed(0)
    layer, ids = EmbeddingWithOwnMerging(6, 4, r=2), torch.arange(6)
    nn.init.normal_(layer.lora_A)
    before, expected = layer.weight.clone(), layer.weight + (layer.lora_B @ layer.lora_A).t() / 2
    for mode in (True, False, True, False, True):
        assert_close_to_rounding(layer.train(mode)(ids), expected, 4)
        assert layer.merged != mode
    assert_close_to_rounding(layer.weight, before, 4)


class OwnMode(lora.Linear):
    """Has a train() of its own that leaves merging to the inherited one."""

    def train(self, mode=True):
        self.times = getattr(self, "times", 0) + 1
        return super().train(mode)


def test_a_train_that_calls_the_inherited_one_does_not_merge_into_the_weight():
    torch.manual_seed(0)
    layer, x = OwnMode(6, 4, r=2), torch.randn(3, 6)
    nn.init.normal_(layer.lora_B)
    expected, weight = layer(x), layer.weight.clone()
    with torch.no_grad():
        for mode in (False, True, False):
            assert_close_to_rounding(layer.train(mode)(x), expected, 4 * 6)
            assert layer.merged != mode
            layer.merged = not mode  # it is already
    assert torch.equal(layer.weight, weight)


class OwnTrain(lora.LoRALayer, nn.Linear):
    """A layer that merges into its own weight, after the inherited train()."""

    def __init__(self):
        nn.Linear.__init__(self, 6, 4)
        lora.LoRALayer.__init__(self, r=2, lora_alpha=4, lora_dropout=0.0, merge_weights=True)
        self.lora_A, self.lora_B = (nn.Parameter(torch.ones(x)) for x in ((2, 6), (4, 2)))

    def train(self, mode=True):
        super().train(mode)
        if self.merged == mode:
            sign = -1 if mode else 1
            self.weight.data += sign * self.scaling * self.lora_B @ self.lora_A
            self.merged = not mode
        return self

    def forward(self, x):
        weight = (
            self.weight if self.merged else self.weight + self.scaling * self.lora_B @ self.lora_A
        )
        return F.linear(x, weight, self.bias)


@torch.no_grad()
def test_a_class_of_another_package_merges_and_unmerges_by_itself():
    layer, x = OwnTrain(), torch.ones(3, 6)
    before, expected = layer.weight.clone(), layer(x)
    for mode in (False, True, False, True):
        assert_close_to_rounding(layer.train(mode)(x), expected, 4 * 6, magnitude=24.0)
        assert layer.merged != mode
    assert_close_to_rounding(layer.weight, before, 4, magnitude=4.0)


# ---- initial values ----


class OwnStart:
    """Gives A and B initial values of its own, as subclasses of 0.1.2's layers do."""

    def reset_parameters(self):
        super().reset_parameters()
        if hasattr(self, "lora_A"):
            nn.init.constant_(self.lora_A, 2.0)
            nn.init.constant_(self.lora_B, 3.0)


@pytest.mark.parametrize("name", CASES)
def test_a_subclass_initializes_its_factors_by_reset_parameters(name, monkeypatch):
    plain = type(CASES[name].make(r=2))
    monkeypatch.setattr(lora, plain.__name__, type("Own", (OwnStart, plain), {}))
    layer = CASES[name].make(r=2)
    assert isinstance(layer, OwnStart)
    assert (layer.lora_A == 2).all()
    assert (layer.lora_B == 3).all()


class SeveralFactors(lora.Linear):
    """Has factors for each kind of input, under other names than 0.1.2's."""

    def __init__(self, in_features, out_features, r):
        nn.Linear.__init__(self, in_features, out_features)
        lora.LoRALayer.__init__(self, r=r, lora_alpha=2 * r, lora_dropout=0.0, merge_weights=True)
        for kind in ("image", "text"):
            setattr(self, f"lora_A_{kind}", nn.Parameter(torch.randn(r, in_features)))
            setattr(self, f"lora_B_{kind}", nn.Parameter(torch.randn(out_features, r)))
        self.reset_parameters()

    def forward(self, x, kind):
        A, B = getattr(self, f"lora_A_{kind}"), getattr(self, f"lora_B_{kind}")
        return F.linear(x, self.weight, self.bias) + x @ A.t() @ B.t() * self.scaling


def test_a_subclass_with_factors_of_other_names():
    torch.manual_seed(0)
    model, x = nn.ModuleList([SeveralFactors(6, 4, r=2)]), torch.randn(3, 6)
    layer = model[0]
    lora.mark_only_lora_as_trainable(model, bias="lora_only")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == lora.lora_state_dict(model, bias="lora_only").keys()
    assert trained == {name for name, _ in model.named_parameters()} - {"0.weight"}
    (group,) = lora.parameter_groups(model, lr=1e-3)
    assert len(group["params"]) == len(trained)
    lora.start_from_weights(model)  # changes nothing
    for mode in (True, False):
        for kind in ("image", "text"):
            update = getattr(layer, f"lora_B_{kind}") @ getattr(layer, f"lora_A_{kind}")
            expected = F.linear(x, layer.weight + 2 * update, layer.bias)
            assert_close_to_rounding(layer.train(mode)(x, kind), expected, 4 * 6)


# ---- children and dropout ----


@pytest.mark.parametrize("name", CASES)
def test_a_layer_without_dropout_has_the_children_of_0_1_2(name):
    layer, x = built(CASES[name]), CASES[name].x()
    convolution = [layer.conv] if isinstance(layer, lora.ConvLoRA) else []
    assert list(layer.children()) == convolution
    for again in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        torch.testing.assert_close(again(x), layer(x), atol=0, rtol=0)
    message = r"p cannot be set, .* set layer.lora_dropout = torch.nn.Dropout\(p\)"
    with pytest.raises(AttributeError, match=message):
        layer.lora_dropout.p = 0.5  # would have no effect
    layer.lora_dropout.p = 0.0  # it is already
    out = layer(x)
    layer.lora_dropout = lambda x: x
    torch.testing.assert_close(layer(x), out, atol=0, rtol=0)
    layer.lora_dropout = nn.Dropout(0.0)
    assert list(layer.children()) == [*convolution, layer.lora_dropout]
    torch.testing.assert_close(layer(x), out)


# ---- ConvLoRA ----


@pytest.mark.parametrize("plain", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_convlora_equals_the_layer_of_the_convolution_that_it_is_given(plain):
    layers = []
    for build in (lora.ConvLoRA, getattr(lora, plain.__name__)):
        torch.manual_seed(0)
        given = {"conv_module": plain} if build is lora.ConvLoRA else {}
        layers.append(
            build(
                in_channels=4, out_channels=6, kernel_size=3, r=2, lora_alpha=6, stride=2, **given
            )
        )
        assert isinstance(layers[-1], lora.ConvLoRA)
        nn.init.normal_(layers[-1].lora_B)
    direct, derived = layers
    torch.testing.assert_close(direct.state_dict(), derived.state_dict(), atol=0, rtol=0)
    x = torch.randn(2, 4, *[5] * (direct.conv.weight.dim() - 2))
    torch.testing.assert_close(direct(x), derived(x), atol=0, rtol=0)
    merged = lora.merge(direct)
    assert type(merged) is plain
    assert_close_to_rounding(merged(x), derived(x), 4 * 3**3)


def test_a_convolution_with_a_weight_of_its_own_loads_that():
    class Gated(lora.Conv2d):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            self.weight = nn.Parameter(torch.zeros(()))

    layer = Gated(3, 4, kernel_size=3, r=2)
    kernel = layer.conv.weight.clone()
    layer.load_state_dict({"weight": torch.ones(())}, strict=False)
    assert layer.weight == 1
    assert torch.equal(layer.conv.weight, kernel)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_parameter_that_a_convolution_would_not_compute_with_is_refused(name):
    plain, layer = nn.Conv2d(3, 4, 3), lora.Conv2d(3, 4, 3, r=2)
    with pytest.raises(ValueError, match=rf"a Conv2d computes with its conv\.{name}: assign that"):
        setattr(layer, name, getattr(plain, name))
    layer.bias = None  # as in a plain convolution without a bias
    setattr(layer.conv, name, getattr(plain, name))
    assert getattr(layer.conv, name) is getattr(plain, name)


class Transposed(lora.ConvLoRA):
    def __init__(self, *args, **kwargs):
        super().__init__(nn.ConvTranspose2d, *args, **kwargs)

    def forward(self, x):
        kernel, conv = self.conv.weight, self.conv
        if self.r > 0 and not self.merged:
            kernel = kernel + (self.lora_B @ self.lora_A).view(kernel.shape) * self.scaling
        return F.conv_transpose2d(x, kernel, conv.bias, conv.stride, 0, conv.output_padding)

    def merged_layer(self):
        return super().merged_layer()


def test_a_subclass_of_convlora_with_another_convolution():
    torch.manual_seed(0)
    layer, x = Transposed(4, 6, 3, r=2, stride=2, output_padding=1), torch.randn(2, 4, 5, 5)
    nn.init.normal_(layer.lora_B)
    assert not torch.allclose(layer(x), layer.conv(x))
    merged, terms = lora.merge(layer), 4 * 3 * 3
    for mode in (True, False):
        assert_close_to_rounding(layer.train(mode)(x), merged(x), terms)


class SamePadding(nn.Conv2d):
    def forward(self, x):
        return super().forward(F.pad(x, (1, 1, 1, 1)))


class OtherName(nn.Conv2d):
    pass


@pytest.mark.parametrize("kind", [nn.ConvTranspose2d, SamePadding])
def test_convlora_refuses_convolutions_that_need_another_forward(kind):
    message = rf"conv_module must be nn.Conv1d, .* got {kind.__name__}"
    with pytest.raises(ValueError, match=message):
        lora.ConvLoRA(kind, 4, 6, 3, r=2)
    x = torch.randn(2, 4, 5, 5)
    for layer in (lora.ConvLoRA(kind, 4, 6, 3), lora.ConvLoRA(OtherName, 4, 6, 3, r=2)):
        torch.testing.assert_close(layer(x), layer.conv(x))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("is_root", [True, False])
def test_weights_of_a_plain_convolution_are_loaded(is_root, bias):
    plain, layer = (build(4, 6, 3, bias=bias) for build in (nn.Conv2d, lora.Conv2d))
    for model in (layer, lora.Conv2d(4, 6, 3, bias=bias, r=2)):
        given, taking = (part if is_root else nn.Sequential(part) for part in (plain, model))
        state = given.state_dict()
        names = set(state)
        keys = taking.load_state_dict(state, strict=model is layer)
        assert set(state) == names  # unchanged
        assert not keys.unexpected_keys
        assert {key.rpartition(".")[2] for key in keys.missing_keys} <= {"lora_A", "lora_B"}
        torch.testing.assert_close(model.conv.state_dict(), plain.state_dict(), atol=0, rtol=0)
        keys = taking.load_state_dict({**state, "odd": torch.ones(1)}, strict=False)
        assert keys.unexpected_keys == ["odd"]


def test_a_convolutions_own_names_come_first():
    layer = lora.Conv2d(4, 6, 3)
    state = layer.state_dict()
    keys = layer.load_state_dict({**state, "weight": torch.ones(1)}, strict=False)
    assert keys.unexpected_keys == ["weight"]


class OwnBias(lora.Conv2d):
    def __init__(self):
        super().__init__(4, 6, 3, r=2, bias=False)
        self.bias = nn.Parameter(torch.randn(6))


def test_a_parameter_of_a_convolutions_subclass_keeps_its_name():
    given, taking = OwnBias(), OwnBias()
    taking.load_state_dict(given.state_dict())
    assert torch.equal(taking.bias, given.bias)


def test_an_unexpected_bias_is_reported_by_its_name_in_the_state_dict():
    state = nn.Conv2d(4, 6, 3).state_dict()
    keys = lora.Conv2d(4, 6, 3, bias=False).load_state_dict(state, strict=False)
    assert keys.unexpected_keys == ["bias"]
    assert not keys.missing_keys


RENAMED = {  # -> names of a model's LoRA in a file, and whether the model lacks some of them
    "plain": (lambda name: name, False),
    "of DDP": (lambda name: f"module.{name}", True),
    "of PEFT": (lambda name: f"base_model.model.{name}.weight", True),
    "of another layer": (lambda name: name.replace("1.", "0."), True),
}


@pytest.mark.parametrize("r", [2, 0])
@pytest.mark.parametrize("names", RENAMED)
def test_lora_that_load_state_dict_leaves_out_is_warned_of_once(names, r, caplog):
    def model(r):
        return nn.Sequential(nn.Linear(3, 3), *(lora.Linear(3, 3, r=r) for _ in range(2)))

    renamed, is_left_out = RENAMED[names]
    file = {renamed(name): tensor for name, tensor in lora.lora_state_dict(model(2)).items()}
    taking = model(r)
    for _ in range(2):  # each call is warned of
        taking.load_state_dict(file, strict=False)
        warnings = [record.getMessage() for record in caplog.records]
        assert len(warnings) == (is_left_out or r == 0)
        assert all(f"lacks ({next(iter(file))}, …)" in warning for warning in warnings)
        caplog.clear()
    taking.load_state_dict({"0.bias": torch.ones(3), "other": torch.ones(3)}, strict=False)
    assert not caplog.records


@pytest.mark.parametrize("name", LINEAR)
@torch.no_grad()
def test_a_seed_gives_the_dropout_of_0_1_2_without_fast_paths(name):
    layer, x = built(CASES[name], lora_dropout=0.5), CASES[name].x()
    torch.manual_seed(0)
    with fast_paths_off():
        out = layer(x)
    torch.manual_seed(0)
    dropped = F.dropout(x, 0.5)
    added = run_plain(layer, dropped, update(layer)) - run_plain(layer, 0 * x, update(layer))
    assert_close_to_rounding(out, run_plain(layer, x, layer.weight) + added, 6 * 9)


# ---- MergedLinear ----


class OwnMergedForward(lora.MergedLinear):
    def forward(self, x):
        weight = self.weight
        if self.r > 0 and not self.merged:
            weight = weight + self.merge_AB() * self.scaling
        return F.linear(x, weight.t() if self.fan_in_fan_out else weight, self.bias)


@pytest.mark.parametrize("fan_in_fan_out", [True, False])
@pytest.mark.parametrize("enable_lora", [[True, False, True], [False, True], [True]])
def test_merge_ab_has_the_product_and_its_gradients(enable_lora, fan_in_fan_out):
    outs, gradients = [], []
    for build in (OwnMergedForward, lora.MergedLinear):
        torch.manual_seed(0)
        layer = build(6, 12, 2, 6, 0.0, enable_lora, fan_in_fan_out)
        nn.init.normal_(layer.lora_B)
        out = layer(torch.randn(3, 6))
        out.square().sum().backward()
        outs.append(out)
        gradients.append((layer.lora_A.grad, layer.lora_B.grad))
    assert_close_to_rounding(*outs, 6 * 9)
    for pair in zip(*gradients, strict=True):
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-4)
    assert_close_to_rounding(layer.merge_AB() * layer.scaling, update(layer), 6)


# ---- pickled layers, and scalings ----

PICKLED = [name for name in CASES if name not in ("embedding", "conv1d", "conv3d")]


def state_of_0_1_2(layer):
    """The state that 0.1.2 pickles of a layer. It can pickle only layers with dropout."""
    state = dict(vars(layer)) | {"merged": layer.merge_weights and not layer.training}
    for name in ("_merged_copy", "_in_effect", "_starts", "_empty", "variant", "initialization"):
        state.pop(name, None)
    return state | {"_forward_pre_hooks": OrderedDict()}


FORMATS = [{"zip": True}, {"zip": True, "mmap": True}, {"zip": False}]


def pickled(layer, path, get_state, zip, mmap=False):
    """Saves the layer to a file in one of PyTorch's formats, and loads it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lora.LoRALayer, "__getstate__", get_state)
        torch.save(layer, path, _use_new_zipfile_serialization=zip)
    return torch.load(path, weights_only=False, mmap=mmap)


@pytest.mark.filterwarnings("ignore:source code of class")
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("name", PICKLED)
@torch.no_grad()
def test_a_layer_that_0_1_2_has_pickled_is_loaded(name, mode, format, tmp_path):
    torch.manual_seed(0)
    layer, x = built(CASES[name], lora_dropout=0.5, merge_weights=mode), CASES[name].x()
    expected, weight = reference(layer, x), base_of(layer).weight.clone()
    again = pickled(layer.train(mode), tmp_path / "layer", state_of_0_1_2, **format)
    assert not again.merged
    for _ in range(2):
        assert_close_to_rounding(again.eval()(x), expected, 6 * 9)
        again.train()
    assert torch.equal(base_of(again).weight, weight)
    assert_close_to_rounding(lora.merge(again)(x), expected, 6 * 9)


@pytest.mark.filterwarnings("ignore:source code of class")
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize(
    "build", [lora.Linear, partial(lora.MergedLinear, enable_lora=[True]), OwnForward]
)
def test_a_merged_layer_that_0_1_2_has_pickled_is_refused(build, format, tmp_path):
    layer = build(6, 4, r=2, lora_dropout=0.5).eval()
    kind = type(layer).__name__
    message = rf"pickled this {kind} in evaluation mode, .* call train\(\), and save"
    with pytest.raises(CheckpointError, match=message):
        pickled(layer, tmp_path / "layer", state_of_0_1_2, **format)
    without = build(6, 4, r=0, lora_dropout=0.5).eval()
    again, x = pickled(without, tmp_path / "layer", state_of_0_1_2, **format), torch.randn(3, 6)
    torch.testing.assert_close(again(x), without(x))


@pytest.mark.parametrize("mode", [True, False])
def test_a_pickled_layer_keeps_its_mode(mode, tmp_path):
    def earlier_state(layer):  # of this package while `merged` was an attribute
        state = {**vars(layer), "_merged_copy": None, "merged": layer.merged}
        del state["_in_effect"]
        return state

    layer = lora.Linear(6, 4, r=2).train(mode)
    for get_state in (lora.LoRALayer.__getstate__, earlier_state):
        again = pickled(layer, tmp_path / "layer", get_state, zip=True)
        assert again.merged == layer.merged == (not mode)
        assert not again.train().merged


def test_a_scaling_of_several_numbers_is_refused():
    layer = lora.Linear(6, 4, r=2)
    layer.scaling = torch.ones(4, 1)
    x, message = torch.randn(3, 6), r"scaling has to be one number, got \(4, 1\)"
    with pytest.raises(ValueError, match=message):
        layer(x)
    layer.eval()
    with torch.no_grad():
        layer.scaling = torch.ones(1)
        layer(x)
        layer.scaling = torch.ones(4, 1)
        with pytest.raises(ValueError, match=message):
            layer(x)


def test_a_changed_scaling_is_only_saved_with_the_alpha_that_gives_it(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 4)), torch.randn(3, 6)
    base = copy.deepcopy(model)
    lora.add_lora(model, ["0"], r=3, lora_alpha=6)
    nn.init.normal_(model[0].lora_B)
    del model[0].scaling
    model[0].scaling = nn.Parameter(torch.tensor(0.5))
    with pytest.raises(CheckpointError, match=r"0 has a scaling that is a parameter, .* delete it"):
        lora.save_adapter(model, tmp_path / "adapter.safetensors")
    del model[0].scaling
    model[0].scaling = torch.tensor(1 / 3)  # in float32
    with pytest.raises(CheckpointError, match=r"0 has the scaling 0\.333333, but lora_alpha 6"):
        lora.save_adapter(model, tmp_path / "adapter.safetensors")
    model[0].lora_alpha = 1
    lora.save_adapter(model, tmp_path / "adapter.safetensors")
    lora.load_adapter(base, tmp_path / "adapter.safetensors")
    assert_close_to_rounding(base(x), model(x), 5 * 6)


@pytest.mark.parametrize("name", CASES)
def test_a_scaling_can_be_trained(name):
    torch.manual_seed(0)
    layer, x = built(CASES[name]), CASES[name].x()
    ratio = layer.scaling
    del layer.scaling
    layer.scaling = nn.Parameter(torch.tensor([0.5]))
    out = layer(x)
    out.square().sum().backward()
    with torch.no_grad():
        plain, full = run_plain(layer, x, base_of(layer).weight), reference(layer, x)
    added = (full - plain) / ratio
    assert_close_to_rounding(out, plain + 0.5 * added, 6 * 9)
    expected = (2 * out.detach() * added).sum().view(1)
    torch.testing.assert_close(layer.scaling.grad, expected, rtol=1e-4, atol=1e-3)
    layer.eval()
    for write in (layer.scaling.mul_, layer.scaling.data.mul_):
        with torch.no_grad():
            layer(x)
            write(2)
            assert_close_to_rounding(layer(x), plain + layer.scaling * added, 6 * 9)
