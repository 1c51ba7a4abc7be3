"""Tests of weights that are not plain parameters: computed, quantized, complex, not loaded yet."""

import copy

import pytest
import torch
from any_models import assert_add_lora_refuses
from small_nets import Net, close, drawn
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import loralib as lora
from loralib.errors import CheckpointError, UnsupportedLayerError


def test_an_eight_bit_weight_is_refused_as_quantized():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = nn.Parameter(model[1].weight.to(torch.float8_e4m3fn), requires_grad=False)
    message = "the weight of module 1 is quantized .torch.float8_e4m3fn.: leave it out"
    assert_add_lora_refuses(model, message, ["0", "1"], r=2, kind=UnsupportedLayerError)


class EightBit(torch.Tensor):
    """A tensor like those of quantizing libraries: its dtype is float32, but its data is not."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs)


class Marked(nn.Parameter):
    """A subclass of parameter to which a framework attaches attributes."""


def test_a_weight_of_an_unknown_tensor_class_is_refused_as_quantized(tmp_path):
    plain, model = (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2))
    lora.add_lora(plain, "0", r=2)
    lora.save_adapter(plain, tmp_path / "a")
    model[1].weight = nn.Parameter(model[1].weight.detach().as_subclass(EightBit), False)
    message = "the weight of module 1 is quantized .a .*EightBit.: leave it out"
    assert_add_lora_refuses(model, message, ["0", "1"], r=2, kind=UnsupportedLayerError)
    lora.add_lora(plain, "1", r=2)
    lora.save_adapter(plain, tmp_path / "both")
    plain[1].weight = model[1].weight
    both = lora.read_adapter(tmp_path / "both")
    for refused, needed in (
        (lambda: lora.merge(plain), "merging"),
        (lambda: lora.save_adapter(plain, tmp_path / "b"), "it is saved"),
        (lambda: lora.load_adapter(model, tmp_path / "both"), "it gets an adapter"),
        (lambda: lora.AdapterBank(model).add("both", both), "it gets an adapter"),
    ):
        with pytest.raises(
            ValueError, match=rf"quantized \(a .*EightBit\): load.* before {needed}"
        ):
            refused()
    assert not (tmp_path / "b").exists()


def holding(weight):
    layer = nn.Linear(8, 8)
    layer.weight = weight
    return layer


UNUSUAL = {
    "quantized": lambda: holding(nn.Parameter(torch.randn(8, 8).as_subclass(EightBit))),
    "marked": lambda: holding(Marked(torch.randn(8, 8))),
    "offloaded": lambda: holding(nn.Parameter(torch.empty(8, 8, device="meta"))),
    "lazy": lambda: nn.LazyLinear(8),
}


@pytest.mark.parametrize("kind", UNUSUAL)
@torch.no_grad()
def test_a_layer_that_lora_leaves_alone_may_have_any_weight(tmp_path, kind):
    trained, x = nn.Sequential(nn.Linear(8, 8), UNUSUAL[kind]()), torch.randn(2, 8)
    lora.add_lora(trained, "0", r=2)
    nn.init.normal_(trained[0].lora_B)
    expected = trained.eval()[0](x)
    lora.save_adapter(trained, tmp_path / "a")
    adapter = lora.read_adapter(tmp_path / "a")
    assert (adapter.metadata.base_fingerprint is None) == (kind != "marked")
    loaded = nn.Sequential(nn.Linear(8, 8), trained[1])
    loaded[0].weight, loaded[0].bias = trained[0].weight, trained[0].bias
    bank = lora.AdapterBank(loaded)
    bank.add("a", adapter)
    with bank.use("a"):
        torch.testing.assert_close(loaded[0](x), expected)
    bank.close()
    lora.load_adapter(loaded, tmp_path / "a")
    torch.testing.assert_close(loaded.eval()[0](x), expected)
    lora.merge(loaded)
    torch.testing.assert_close(loaded[0](x), expected)


@torch.no_grad()
def test_a_subclass_of_parameter_without_operations_of_its_own_is_adapted(tmp_path):
    model, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(2, 8)
    model[0].weight = Marked(model[0].weight.detach())
    lora.add_lora(model, "0", r=2)
    nn.init.normal_(model[0].lora_B)
    expected = model.eval()(x)
    lora.save_adapter(model, tmp_path / "a")
    lora.merge(model)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("kind", ["quantized", "offloaded", "lazy"])
def test_a_trained_head_has_to_be_a_loaded_plain_layer(tmp_path, kind):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    lora.add_lora(model, "0", r=2, modules_to_train=["1"])
    lora.save_adapter(model, tmp_path / "a")
    model[1] = UNUSUAL[kind]()
    with pytest.raises(ValueError, match=r"1\.weight (is|has no shape).* before it is saved"):
        lora.save_adapter(model, tmp_path / "b")
    plain, adapter = nn.Sequential(nn.Linear(8, 8), model[1]), lora.read_adapter(tmp_path / "a")
    bank = lora.AdapterBank(plain)
    for take in (lambda: lora.load_adapter(plain, tmp_path / "a"), lambda: bank.add("a", adapter)):
        with pytest.raises(ValueError, match=r"1\.weight (is|has no shape).* it gets an adapter"):
            take()


def test_a_layer_without_outputs_is_refused():
    assert_add_lora_refuses(
        nn.Sequential(nn.Linear(4, 0)), "for module 0, .* 0; leave it out", "0", r=1
    )


def test_complex_weights_are_refused():
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.complex64))
    message = "0 has complex weights .torch.complex64., which LoRA does not support"
    assert_add_lora_refuses(model, message, "0", r=2, kind=UnsupportedLayerError)


def normed(layer):
    parametrizations.weight_norm(layer)


def pruned(layer):
    prune.l1_unstructured(layer, "weight", 0.3)


@pytest.mark.parametrize("change", [normed, pruned])
def test_weights_that_are_computed_from_others_are_refused(tmp_path, change):
    model = drawn(Net(), ["a"])
    lora.save_adapter(model, tmp_path / "a")
    base = Net()
    change(base.a)
    for attempt in (
        lambda: lora.load_adapter(base, tmp_path / "a"),
        lambda: lora.AdapterBank(base).add("a", lora.read_adapter(tmp_path / "a")),
    ):
        with pytest.raises(CheckpointError, match="weight of a is computed from other tensors"):
            attempt()
    change(model.a)
    for undo in (lora.merge, lora.remove_lora):
        with pytest.raises(ValueError, match="a has been parametrized or pruned since"):
            undo(model)
    model(torch.randn(2, 6))


@pytest.mark.parametrize("name", ["lora_A", "lora_B", "lora_magnitude_vector"])
def test_an_update_computed_from_other_tensors_is_refused(tmp_path, name):
    """PyTorch adds those to the layer, and a hook, which would stay in the plain one."""
    model, x = drawn(Net(), ["a"], variant="dora"), torch.randn(2, 6)
    prune.l1_unstructured(model.a, name, 0.3)
    out = model(x)
    with pytest.raises(CheckpointError, match="update of a has been parametrized or pruned: undo"):
        lora.save_adapter(model, tmp_path / "a")
    for undo in (lora.merge, lora.remove_lora):
        with pytest.raises(ValueError, match="a has been parametrized or pruned since"):
            undo(model)
    prune.remove(model.a, name)
    lora.save_adapter(model, tmp_path / "a")
    close(lora.merge(model)(x), out)


def test_the_bias_of_an_adapted_layer_may_be_parametrized_but_not_its_update():
    model, x = drawn(Net(), ["a"]), torch.randn(2, 6)
    parametrize.register_parametrization(model.a, "bias", nn.Tanh())
    out = model(x)
    merged = lora.merge(copy.deepcopy(model))
    assert type(merged.a).__bases__ == (nn.Linear,)
    close(merged(x), out)
    parametrize.register_parametrization(model.a, "lora_A", nn.Tanh())
    for undo in (lora.merge, lora.remove_lora):
        with pytest.raises(ValueError, match="a has been parametrized or pruned since"):
            undo(model)
    assert lora.add_lora(model, "b", r=2) == ("b",)
    parametrize.remove_parametrizations(model.a, "lora_A", leave_parametrized=False)
    lora.remove_lora(model)
    assert set(model.a.parametrizations) == {"bias"}


class Conv1D(nn.Module):
    """Hugging Face's linear layer that holds its weight as (in, out)."""

    def __init__(self, width):
        super().__init__()
        self.nf = width
        self.weight = nn.Parameter(torch.randn(width, width))
        self.bias = nn.Parameter(torch.randn(width))

    def forward(self, x):
        return x @ self.weight + self.bias


def attention(layer, x):
    return layer(x, x, x)[0]


@pytest.mark.parametrize(
    ("make", "call", "bias"),
    [
        (lambda: nn.Linear(4, 4), None, "bias"),
        (lambda: Conv1D(4), None, "bias"),
        (lambda: nn.Conv1d(3, 3, 3), None, "bias"),
        (lambda: nn.MultiheadAttention(4, 2, batch_first=True), attention, "in_proj_bias"),
    ],
)
def test_a_layer_with_a_parametrized_bias_is_adapted(tmp_path, make, call, bias):
    def built():
        torch.manual_seed(0)
        layer = make()
        nn.init.normal_(getattr(layer, bias))
        parametrize.register_parametrization(layer, bias, nn.Tanh())
        return nn.ModuleDict({"a": layer})

    def output_of(model):
        return call(model["a"], x) if call else model["a"](x)

    model, loaded, x = built(), built(), torch.randn(2, 3, 4)
    before = output_of(model)
    for _ in range(2):  # again after `remove_lora`
        lora.add_lora(model, "a", r=2)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter)
        out = output_of(model)
        assert (out - before).abs().max() > 0.01
        close(output_of(lora.merge(copy.deepcopy(model))), out)
        lora.save_adapter(model, tmp_path / "a.safetensors")
        lora.remove_lora(model)
        close(output_of(model), before)
    lora.load_adapter(loaded, tmp_path / "a.safetensors")
    close(output_of(loaded), out)


@pytest.mark.parametrize(
    ("change", "settings"),
    [(parametrizations.weight_norm, {}), (prune.random_unstructured, {"amount": 0.5})],
)
def test_one_weight_of_an_attention_that_is_computed_from_others_is_an_error(change, settings):
    attention = nn.MultiheadAttention(4, 2, kdim=3, vdim=5)
    change(attention, "q_proj_weight", **settings)
    model = nn.ModuleDict({"a": attention})
    message = "a has no weight that is a plain parameter"
    assert_add_lora_refuses(model, message, "a", r=2, kind=UnsupportedLayerError)


@pytest.mark.parametrize("training", [True, False])
def test_an_embedding_that_was_resized_is_an_error(training):
    """Upstream's `resize_token_embeddings` gives the same module another weight."""
    model = nn.Sequential(nn.Embedding(5, 4)).train(training)
    lora.add_lora(model, "0", r=2)
    model[0].weight.data = torch.randn(7, 4)
    message = "the embedding has 7 rows now, and its LoRA 5: resize it before add_lora"
    with pytest.raises(RuntimeError, match=message):
        model(torch.tensor([6]))
    with pytest.raises(RuntimeError, match=message):
        lora.merge(model)


def test_a_kernel_in_channels_last_starts_from_its_weight():
    layer = lora.Conv2d(4, 4, 3, r=2, initialization="pissa")
    expected = copy.deepcopy(layer)
    layer.conv.to(memory_format=torch.channels_last)
    for each in (layer, expected):
        each.start_from_weight()
    close(layer._delta().product(), expected._delta().product())


def test_a_lazy_layer_that_lora_leaves_alone_does_not_matter(tmp_path):
    model = nn.Sequential(nn.Linear(6, 6), nn.LazyLinear(3))
    lora.AdapterBank(model)
    lora.add_lora(model, "0", r=2)
    lora.save_adapter(model, tmp_path / "a")
    model(torch.ones(2, 6))
    lora.save_adapter(model, tmp_path / "b")


@pytest.mark.parametrize("adapted", ["a", "in_place"])
def test_a_merged_weight_that_float16_cannot_hold_is_warned_of(adapted, caplog):
    model = Net().half() if adapted == "a" else nn.Sequential(lora.Linear(6, 6, r=2)).half()
    layer = model.a if adapted == "a" else model[0]
    if adapted == "a":
        lora.add_lora(model, "a", r=2)
    nn.init.constant_(layer.lora_A, 300)
    nn.init.constant_(layer.lora_B, 300)
    lora.merge(model)
    assert "weight: the merged weight is too large for float16" in caplog.text


def test_values_that_were_not_finite_before_merging_are_not_warned_of(caplog):
    layers = {"layer1": nn.Linear(6, 6), "layer10": nn.Linear(6, 6), "layer2": nn.Linear(6, 6)}
    model = nn.ModuleDict(layers).half()
    lora.add_lora(model, ["layer1", "layer2"], r=2)
    nn.init.constant_(model["layer10"].weight, torch.inf)
    nn.init.constant_(model["layer1"].bias, torch.inf)
    with torch.no_grad():
        model["layer2"].weight[0, 0] = torch.nan
    lora.merge(model)
    assert "too large for float16" not in caplog.text
