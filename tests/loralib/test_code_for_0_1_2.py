"""What code written for loralib 0.1.2 does with its layers, and gets here."""

import copy
import pickle
import types
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close_to_rounding
from layer_cases import CASES, LINEAR, base_of, built, reference, run_plain, update
from torch import nn

import loralib as lora
from loralib.nn.fast_paths import fast_paths_off

# ---- subclasses ----


def as_of_0_1_2(self, x):
    """What subclasses of its `Linear` have as their forward, one way or another."""
    weight = self.weight.t() if self.fan_in_fan_out else self.weight
    out = F.linear(x, weight, self.bias)
    if self.r > 0 and not self.merged:
        out = out + (self.lora_dropout(x) @ self.lora_A.t() @ self.lora_B.t()) * self.scaling
    return out


class OwnForward(lora.Linear):
    forward = as_of_0_1_2


class OwnMerging(lora.Linear):
    """Merges into its weight, as 0.1.2 does, and computes with that or by the usual forward."""

    def train(self, mode=True):
        nn.Linear.train(self, mode)
        if mode == self.merged:
            sign = -1 if mode else 1
            self.weight.data += sign * (self.lora_B @ self.lora_A) * self.scaling
            self.merged = not mode
        return self

    def forward(self, x):
        return super().forward(x)


def patched(*args, **kwargs):
    layer = lora.Linear(*args, **kwargs)
    layer.forward = types.MethodType(as_of_0_1_2, layer)
    return layer


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("build", [OwnForward, OwnMerging, patched])
def test_a_forward_written_for_0_1_2_has_the_update_in_both_modes(build, grad):
    torch.manual_seed(0)
    layer, x = build(6, 4, r=2, lora_alpha=6), torch.randn(3, 6)
    nn.init.normal_(layer.lora_B)
    expected = F.linear(x, layer.weight + 3 * layer.lora_B @ layer.lora_A, layer.bias)
    with torch.set_grad_enabled(grad):
        for mode in (True, False, True, False):
            layer.train(mode)
            assert_close_to_rounding(layer(x), expected, 4 * 6)


def test_a_layer_that_has_its_update_in_its_weight_is_merged_once():
    torch.manual_seed(0)
    layer, x = OwnMerging(6, 4, r=2), torch.randn(3, 6)
    nn.init.normal_(layer.lora_B)
    expected = layer(x)
    for mode in (True, False):
        assert_close_to_rounding(lora.Linear.merged_layer(layer.train(mode))(x), expected, 4 * 6)


def test_merged_is_not_to_be_set_by_hand_where_weights_hold_no_update():
    layer = lora.Linear(6, 4, r=2)
    with pytest.raises(ValueError, match=r"merged cannot be set to True: .* lora\.merge"):
        layer.merged = True
    layer.eval().merged = True  # it is
    layer.merged = False
    assert not layer.merged
    assert layer.eval().merged
    assert not layer.train().merged


def test_a_subclass_with_a_forward_of_its_own_says_how_it_is_merged():
    class Twice(lora.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(nn.Linear(6, 6), Twice(6, 4, r=2))
    lora.add_lora(model, ["0"], r=2)
    with pytest.raises(TypeError, match="Twice has a forward of its own and no merged_layer"):
        lora.merge(model)
    assert isinstance(model[0], lora.LoRALayer)  # as it was

    def merged_layer(self):
        plain = lora.Linear.merged_layer(self)
        plain.weight.data *= 2
        plain.bias = nn.Parameter(2 * plain.bias)
        return plain

    Twice.merged_layer = merged_layer
    x = torch.randn(3, 6)
    expected = model(x)
    assert_close_to_rounding(lora.merge(model)(x), expected, 4 * 6)


class Around(lora.LoRALayer, nn.Module):
    """A layer of another package around a plain one, which it calls `base`."""

    def __init__(self, plain):
        nn.Module.__init__(self)
        lora.LoRALayer.__init__(self, r=2, lora_alpha=4, lora_dropout=0.0, merge_weights=False)
        self.base = plain
        self.lora_A = nn.Parameter(torch.randn(2, plain.in_features))
        self.lora_B = nn.Parameter(torch.randn(plain.out_features, 2))

    def forward(self, x):
        return self.base(x) + x @ self.lora_A.t() @ self.lora_B.t() * self.scaling


def test_a_layer_around_a_module_that_it_calls_base():
    torch.manual_seed(0)
    plain, x = nn.Linear(6, 4), torch.randn(3, 6)
    model = nn.Sequential(Around(plain))
    update = 2 * model[0].lora_B @ model[0].lora_A
    for mode in (True, False):
        expected = F.linear(x, plain.weight + update, plain.bias)
        assert_close_to_rounding(model.train(mode)(x), expected, 4 * 6)
    lora.mark_only_lora_as_trainable(model, bias="lora_only")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"0.lora_A", "0.lora_B", "0.base.bias"}
    assert lora.lora_state_dict(model, bias="lora_only").keys() == trained


class LinearTwin(lora.Linear):
    def __init__(self):
        super().__init__(6, 4, r=2)
        self.base = nn.Linear(6, 4)


class EmbeddingTwin(lora.Embedding):
    def __init__(self):
        super().__init__(6, 4, r=2)
        self.base = nn.Embedding(6, 4)


def adapted_twin():
    model = nn.Sequential(nn.Linear(6, 4))
    lora.add_lora(model, ["0"], r=2)
    model[0].base = nn.Linear(6, 4)
    return model[0]


@pytest.mark.parametrize("build", [LinearTwin, EmbeddingTwin, adapted_twin])
def test_a_module_that_a_layer_with_a_weight_calls_base_is_none_of_its(build):
    torch.manual_seed(0)
    layer, x = build(), torch.arange(6) if build is EmbeddingTwin else torch.randn(3, 6)
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


# ---- children and dropout ----


@pytest.mark.parametrize("name", CASES)
def test_a_layer_without_dropout_has_the_children_of_0_1_2(name):
    layer, x = built(CASES[name]), CASES[name].x()
    convolution = [layer.conv] if isinstance(layer, lora.ConvLoRA) else []
    assert list(layer.children()) == convolution
    for again in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        torch.testing.assert_close(again(x), layer(x), atol=0, rtol=0)
    out = layer(x)
    layer.lora_dropout = lambda x: x
    torch.testing.assert_close(layer(x), out, atol=0, rtol=0)
    layer.lora_dropout = nn.Dropout(0.0)
    assert list(layer.children()) == [*convolution, layer.lora_dropout]
    torch.testing.assert_close(layer(x), out)


# ---- ConvLoRA ----


@pytest.mark.parametrize("plain", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_convlora_is_the_layer_of_the_class_that_it_is_given(plain):
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


def test_convlora_says_what_else_needs_a_forward():
    with pytest.raises(ValueError, match=r"conv_module must be nn.Conv1d, .* got ConvTranspose2d"):
        lora.ConvLoRA(nn.ConvTranspose2d, 4, 6, 3, r=2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("is_root", [True, False])
def test_weights_of_a_plain_convolution_are_loaded(is_root, bias):
    plain, layer = (build(4, 6, 3, bias=bias) for build in (nn.Conv2d, lora.Conv2d))
    for model in (layer, lora.Conv2d(4, 6, 3, bias=bias, r=2)):
        given, taking = (part if is_root else nn.Sequential(part) for part in (plain, model))
        state = given.state_dict()
        names = set(state)
        keys = taking.load_state_dict(state, strict=model is layer)
        assert set(state) == names  # as it was
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


def as_pickled_by_0_1_2(layer, mode):
    """The state that 0.1.2 would have of a layer, which it can pickle if it has dropout."""
    state = layer.train(mode).__getstate__()
    is_merged = layer.merged
    for name in ("_merged_copy", "_in_effect", "_starts", "_empty", "variant", "initialization"):
        state.pop(name, None)
    state |= {"merged": is_merged, "_forward_pre_hooks": OrderedDict()}
    if is_merged:
        base_of(layer).weight.data += update(layer)
    return state


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("merge_weights", [True, False])
@pytest.mark.parametrize("name", PICKLED)
@torch.no_grad()
def test_a_layer_that_0_1_2_has_pickled(name, merge_weights, mode):
    torch.manual_seed(0)
    layer, x = built(CASES[name], lora_dropout=0.5, merge_weights=merge_weights), CASES[name].x()
    expected, weight = reference(layer, x), base_of(layer).weight.clone()
    again = type(layer).__new__(type(layer))
    again.__setstate__(as_pickled_by_0_1_2(layer, mode))
    assert again.merged == (merge_weights and not mode)
    for _ in range(2):
        assert_close_to_rounding(again.eval()(x), expected, 6 * 9)
        again.train()
    assert_close_to_rounding(base_of(again).weight, weight, 4)
    assert_close_to_rounding(lora.merge(again)(x), expected, 6 * 9)


@pytest.mark.parametrize("name", CASES)
def test_a_scaling_that_is_trained(name):
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


# ---- state dicts ----


def state_of_0_1_2(model):
    """The model's state dict as 0.1.2 has it, of any mode."""
    state = model.state_dict()
    for metadata in state._metadata.values():
        metadata["version"] = 1
    return state


@pytest.fixture
def warnings(caplog, monkeypatch):
    monkeypatch.setattr("loralib.lora_layer._has_warned", False)
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("name", CASES)
def test_a_state_dict_of_0_1_2_may_hold_the_update_in_its_weights(name, warnings):
    model = nn.Sequential(built(CASES[name]), built(CASES[name]))
    for _ in range(2):
        model.load_state_dict(state_of_0_1_2(model))
    (warning,) = warnings()  # once, not for each layer and file
    assert warning.startswith("0: from a state dict of loralib 0.1.2: if that was in evaluation")


def test_a_state_dict_that_holds_no_update_in_its_weights_is_loaded_silently(warnings):
    model = nn.Sequential(lora.Linear(6, 4, r=2))
    model.load_state_dict(state_of_0_1_2(model))  # B is zero
    nn.init.normal_(model[0].lora_B)
    old = state_of_0_1_2(model)
    model.load_state_dict(model.eval().state_dict())
    model.load_state_dict(dict(old))  # whose is not known
    del old["0.weight"]
    model.load_state_dict(old, strict=False)
    never_merged = nn.Sequential(lora.Linear(6, 4, r=2, merge_weights=False))
    never_merged.load_state_dict(state_of_0_1_2(model))
    with torch.device("meta"):
        empty = nn.Sequential(lora.Linear(6, 4, r=2))
    empty.load_state_dict(state_of_0_1_2(empty))
    assert not warnings()
    model.load_state_dict(state_of_0_1_2(model))
    assert len(warnings()) == 1
