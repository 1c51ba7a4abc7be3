"""Tests of LoRA on quantized linear layers, compared with dequantized weights in float64."""

import copy
import logging
import pickle
import sys
import types

import pytest
import torch
from any_models import assert_add_lora_refuses
from compare import assert_close_to_rounding
from quantized_linears import LAYERS, Int8Tensor, Linear4bit, Net, Params4bit, plain, with_int8
from torch import nn
from torch.utils.checkpoint import checkpoint

import loralib as lora
from loralib.adapters.merging import merge_into
from loralib.errors import CheckpointError, UnsupportedLayerError
from loralib.in_place import merge_in_place
from loralib.quantized_layers import QuantizedLayer

R, ALPHA = 2, 6
NAMES = tuple(f"layers.{layer}.{part}" for layer in (0, 1) for part in ("up", "down"))
# Consecutive sums of 6 + 8 + 16 + 8 + 16 + 8 + 8 products, and the updates' of R.
TERMS = 100

EACH = pytest.mark.parametrize("package", ["bitsandbytes", "torchao"])


def randomized(model):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("lora_A", "lora_B")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model


def adapted(package, targets="all-linear", **settings):
    model = Net(package)
    lora.add_lora(model, targets, **{"r": R, "lora_alpha": ALPHA, **settings})
    return randomized(model)


def reference(model, **settings):
    """The net with dequantized weights and the same LoRA, in float64."""
    net = plain(model).double()
    lora.add_lora(net, NAMES, **{"r": R, "lora_alpha": ALPHA, **settings})
    own = {name: t for name, t in model.state_dict().items() if "lora_" in name}
    assert net.load_state_dict(own, strict=False).unexpected_keys == []
    return net


def inputs():
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(2))


def step(model, x):
    x = x.clone().requires_grad_()
    out = model(x)
    out.square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if "lora_" in name}
    return {"out": out.detach(), "x": x.grad, **grads}


def assert_close(ours, theirs, dtype=torch.float32):
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        magnitude = float(expected.detach().abs().max())
        assert magnitude > 0, name
        assert_close_to_rounding(
            ours[name].double(), expected.double(), TERMS, dtype, 8 * magnitude
        )


def values(tensor):
    return tensor.integers if isinstance(tensor, Int8Tensor) else tensor


def layer_of(model):
    return model.layers[0]["up"]


@EACH
@pytest.mark.parametrize("variant", ["lora", "rslora"])
def test_outputs_and_gradients_are_those_of_the_formula(package, variant):
    model = adapted(package, variant=variant)
    assert [n for n, m in model.named_modules() if isinstance(m, QuantizedLayer)] == list(NAMES)
    expected = step(reference(model, variant=variant), inputs().double())
    assert_close(step(model, inputs()), expected)
    with torch.no_grad():  # in evaluation mode too, without a merged copy
        assert_close({"out": model.eval()(inputs())}, {"out": expected["out"]})
    assert not layer_of(model).merged


@EACH
def test_an_update_of_zero_is_bit_exact(package):
    model = Net(package)
    expected = model(inputs())
    lora.add_lora(model, "all-linear")
    assert torch.equal(model(inputs()), expected)


@EACH
def test_slices_are_those_of_a_plain_layer(package):
    settings = {"enable_lora": {"up": [True, False, False, True]}}
    model = adapted(package, **settings)
    assert isinstance(layer_of(model), lora.MergedLinear)
    other = reference(model, **settings)
    expected = step(other, inputs().double())
    assert_close(step(model, inputs()), expected)
    product = layer_of(model).merge_AB()
    assert product.shape == (16, 8)
    assert product.dtype == torch.float32
    assert_close({"B A": product}, {"B A": layer_of(other).merge_AB()})


@EACH
def test_dropout_changes_only_the_update(package):
    model = adapted(package, lora_dropout=0.5).train()
    layer, x = layer_of(model), torch.randn(4000, 8)
    with torch.no_grad():
        own = layer._kind.forward(layer, x)
        updates = torch.stack([layer(x) - own for _ in range(20)])
        exact = layer.eval()(x) - own
    assert not torch.equal(updates[0], updates[1])
    error = (updates.mean(dim=(0, 1)) - exact.mean(0)).abs().max()
    assert error < 6 * updates.std() / len(updates) ** 0.5 / len(x) ** 0.5


@EACH
def test_a_base_in_bfloat16(package):
    model = Net(package).bfloat16()
    lora.add_lora(model, "all-linear", r=R, lora_alpha=ALPHA)
    randomized(model)
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    assert trained == {torch.float32}
    ours = step(model, inputs().bfloat16())
    assert ours["out"].dtype == torch.bfloat16
    assert_close(ours, step(reference(model), inputs().double()), torch.bfloat16)


@EACH
def test_the_output_is_rounded_once(package):
    model = Net(package).bfloat16()
    lora.add_lora(model, "all-linear", r=R, lora_alpha=ALPHA)
    layer, x = layer_of(randomized(model)), torch.randn(50, 8).bfloat16()
    with torch.no_grad():
        own = layer._kind.forward(layer, x)
        update = layer.scaling * (x.double() @ (layer.lora_B @ layer.lora_A).double().T)
        out, total = layer(x), own.double() + update
    assert out.dtype == torch.bfloat16
    # Half of bfloat16's last place; float32's own rounding decides a few that are in the middle.
    assert ((out - total).abs() <= 1.001 * total.abs() * 2**-8).all()


@EACH
def test_autocast_casts_the_input_of_the_update(package):
    model = adapted(package)
    layer, x = layer_of(model), torch.randn(3, 8)
    seen = []
    layer.lora_dropout = lambda rows: seen.append(rows.dtype) or rows
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert seen == [torch.bfloat16]
    wide = layer.double()(x.double())
    assert_close({"out": out}, {"out": wide}, torch.bfloat16)


@EACH
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpointing_is_bit_exact(package, is_reentrant):
    model = adapted(package)
    expected = step(model, inputs())
    model.zero_grad()
    own = model.forward
    checkpointed = copy.copy(model)
    checkpointed.forward = lambda x: checkpoint(own, x, use_reentrant=is_reentrant)
    found = step(checkpointed, inputs())
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@EACH
def test_training_changes_only_lora_and_the_head(package):
    model = adapted(package, modules_to_train="head")
    state = copy.deepcopy(model).state_dict()
    before = {name: tensor for name, tensor in state.items() if "lora_" not in name}
    optimizer = torch.optim.AdamW(lora.parameter_groups(model, lr=1e-2, lora_plus_ratio=4))
    for _ in range(2):
        optimizer.zero_grad()
        model(inputs()).square().sum().backward()
        optimizer.step()
    lora.mark_only_lora_as_trainable(model, bias="lora_only")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    biases = {f"layers.{each}.up.bias" for each in (0, 1)}
    assert trained == biases | {f"{name}.lora_{part}" for name in NAMES for part in "AB"}
    for name, tensor in model.state_dict().items():
        if name in before and not name.startswith("head."):
            assert torch.equal(values(tensor), values(before[name])), name


@EACH
def test_biases_that_were_trained_are_saved(tmp_path, package):
    model = adapted(package, bias="lora_only")
    with torch.no_grad():
        for layer in model.layers:
            layer["up"].bias.add_(1)
    lora.save_adapter(model, tmp_path / "a")
    loaded = Net(package)
    lora.load_adapter(loaded, tmp_path / "a")
    assert torch.equal(loaded(inputs()), model(inputs()))


@EACH
def test_a_quantized_head_cannot_be_replaced_by_an_adapter_s(tmp_path, package):
    trained = plain(Net(package))
    lora.add_lora(trained, "layers.0.up", r=R, modules_to_train="head")
    lora.save_adapter(trained, tmp_path / "a")
    model = Net(package)
    model.head = LAYERS[package](8, 3)
    bank, adapter = lora.AdapterBank(model), lora.read_adapter(tmp_path / "a")
    message = r"head.weight is quantized \(.*\): load plain weights before it gets an adapter"
    for load in (lambda: lora.load_adapter(model, tmp_path / "a"), lambda: bank.add("a", adapter)):
        with pytest.raises(ValueError, match=message):
            load()


@EACH
def test_remove_lora_restores_the_model(package):
    model, plain = Net(package), Net(package)
    parts, weights = list(model.modules()), list(model.parameters())
    lora.add_lora(model, "all-linear")
    assert list(model.modules()) == parts
    lora.remove_lora(model)
    assert [type(each) for each in model.modules()] == [type(each) for each in plain.modules()]
    assert [vars(m).keys() for m in model.modules()] == [vars(m).keys() for m in plain.modules()]
    assert all(one is other for one, other in zip(model.parameters(), weights, strict=True))
    assert torch.equal(model(inputs()), plain(inputs()))


@EACH
def test_copies_and_pickles(package, monkeypatch):
    for name, kinds in (
        ("bitsandbytes", ()),
        ("bitsandbytes.nn", ()),
        ("bitsandbytes.nn.modules", (Linear4bit, Params4bit)),
        ("torchao", ()),
        ("torchao.quantization", (Int8Tensor,)),
    ):
        module = types.ModuleType(name)
        vars(module).update({kind.__name__: kind for kind in kinds})
        monkeypatch.setitem(sys.modules, name, module)
    model = adapted(package)
    expected = model(inputs())
    read = pickle.loads(pickle.dumps(model)), pickle.loads(pickle.dumps(model, protocol=0))
    for each in (copy.deepcopy(model), *read):
        assert type(layer_of(each)) is type(layer_of(model))
        assert torch.equal(each(inputs()), expected)
        nn.init.zeros_(layer_of(each).lora_B)
        assert not torch.equal(each(inputs()), expected)
        lora.remove_lora(each)
        assert type(layer_of(each)) is type(layer_of(Net(package)))
    assert torch.equal(model(inputs()), expected)


@EACH
@pytest.mark.parametrize("name", ["a", "a.safetensors"])
def test_adapters_and_banks(tmp_path, package, name, caplog):
    slices = {"up": [True, False]} if "." in name else None  # which PEFT lacks
    model = adapted(package, modules_to_train="head", enable_lora=slices)
    nn.init.normal_(model.head.weight)
    expected = model.eval()(inputs())
    lora.save_adapter(model, tmp_path / name)
    adapter = lora.read_adapter(tmp_path / name)
    assert adapter.lora.base_fingerprint is None
    loaded = Net(package)
    assert lora.load_adapter(loaded, tmp_path / name) == NAMES
    assert "cannot check that its base is this model" in caplog.text
    assert torch.equal(loaded.eval()(inputs()), expected)
    base, x = Net(package), torch.randn(5, 8)
    before = base(inputs())
    bank = lora.AdapterBank(base)
    bank.add("a", adapter)
    for names in ("a", ["a"] * 5):
        with bank.use(names):
            out = base(inputs())
            with torch.autocast("cpu", torch.bfloat16):
                half = layer_of(base)(x)
        assert_close({"out": out}, {"out": expected})
        assert_close({"out": half}, {"out": layer_of(model)(x)}, torch.bfloat16)
    assert torch.equal(base(inputs()), before)
    layer_of(base).weight = layer_of(plain(base)).weight
    with pytest.raises(ValueError, match=r"the weight of layers.0.up has changed"):
        bank.use("a").__enter__()


@EACH
def test_a_quantized_base_is_unverified_and_refuses_merging(tmp_path, package, caplog):
    """The same adapter can be merged into the plain base, as the error suggests."""
    base = plain(Net(package))
    trained = copy.deepcopy(base)
    lora.add_lora(trained, "all-linear", r=R, lora_alpha=ALPHA)
    lora.save_adapter(randomized(trained), tmp_path / "a")
    assert lora.read_adapter(tmp_path / "a").lora.base_fingerprint is not None
    model = Net(package)
    lora.load_adapter(model, tmp_path / "a")
    assert "a model in float16, or quantized or offloaded in part, has no finger" in caplog.text
    with torch.no_grad():
        assert_close({"out": model(inputs())}, {"out": trained(inputs())})
    message = (
        "the weight of {} is quantized, so nothing can be merged into it: save the adapter, load"
    )
    with pytest.raises(ValueError, match=message.format("layers.0.up")):
        lora.merge(model)
    with pytest.raises(ValueError, match=message.format("the layer")):
        lora.merge(layer_of(model))
    layer = layer_of(model)
    for merge in (layer.merged_layer, layer._merge, lambda: merge_in_place(layer)):
        with pytest.raises(ValueError, match=message.format("the layer")):
            merge()
    with pytest.raises(CheckpointError, match=message.format("layers.0.down")):
        merge_into(Net(package), lora.read_adapter(tmp_path / "a"))
    lora.save_adapter(model, tmp_path / "b")
    lora.load_adapter(base, tmp_path / "b")
    lora.merge(base)
    with torch.no_grad():
        assert_close({"out": base(inputs())}, {"out": model(inputs())})


@EACH
@pytest.mark.parametrize(
    ("settings", "reader"),
    [
        ({"variant": "dora"}, "variant 'dora'"),
        ({"variant": "rslora+dora"}, r"variant 'rslora\+dora'"),
        ({"initialization": "pissa"}, "initialization 'pissa'"),
        ({"initialization": "olora"}, "initialization 'olora'"),
    ],
)
def test_variants_and_initializations_that_need_the_weight_are_refused(
    tmp_path, package, settings, reader
):
    message = rf"the weight of layers.0.\w+ is quantized, but the {reader} needs its values: choose"
    assert_add_lora_refuses(Net(package), message, "all-linear", r=R, **settings)
    trained = plain(Net(package))
    lora.add_lora(trained, "all-linear", r=R, **settings)
    lora.save_adapter(trained, tmp_path / "a.safetensors")
    message = rf"a.safetensors: has the {reader}, which needs the weight of layers.0.*, but that is"
    with pytest.raises(CheckpointError, match=message) as refused:
        lora.load_adapter(Net(package), tmp_path / "a.safetensors")
    assert ("as a PEFT folder" in str(refused.value)) == ("initialization" in settings)
    assert len(str(refused.value).partition("a.safetensors")[2]) < 250
    if "variant" in settings:
        bank = lora.AdapterBank(Net(package))
        with pytest.raises(CheckpointError, match=r"has DoRA on layers.0.*, which needs the wei"):
            bank.add("a", lora.read_adapter(tmp_path / "a.safetensors"))


@EACH
@pytest.mark.parametrize("initialization", ["pissa", "olora"])
def test_adapters_that_started_from_weights_can_be_loaded_as_a_peft_folder(
    tmp_path, package, initialization
):
    """As the error suggests."""
    base = plain(Net(package))
    lora.add_lora(base, "all-linear", r=R, initialization=initialization)
    with torch.no_grad():
        for name in NAMES:
            base.get_submodule(name).lora_B.mul_(1.5)
    lora.save_adapter(base, tmp_path / "a.safetensors")
    lora.write_adapter(tmp_path / "a", lora.read_adapter(tmp_path / "a.safetensors"), "peft")
    model = Net(package)
    untrained = model(inputs())
    lora.load_adapter(model, tmp_path / "a")
    assert_close({"out": model(inputs())}, {"out": base(inputs())})
    assert not torch.allclose(model(inputs()), untrained, atol=1e-2)


@EACH
def test_an_initialization_that_does_not_need_the_weight_is_allowed(package):
    model = adapted(package, initialization="orthogonal", freeze_A=True)
    assert not layer_of(model).lora_A.requires_grad


@EACH
def test_a_quantized_layer_is_refused_in_modules_to_train(package):
    message = r"layers.1 cannot be trained as it is: its up.weight is quantized \(.*\); leave"
    assert_add_lora_refuses(Net(package), message, "layers.0.up", modules_to_train=["layers.1"])


@EACH
def test_a_quantized_embedding_is_refused_in_modules_to_train(package):
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "embed": nn.Embedding(8, 8)})
    weight = layer_of(Net(package)).weight
    model["embed"].weight = weight if package == "torchao" else Params4bit(torch.ones(8, 8))
    message = r"embed cannot be trained as it is: its weight is quantized \(a .*\); leave it out of"
    assert_add_lora_refuses(model, message, "a", r=R, modules_to_train="embed")


@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(1, 8))])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_layer_is_not_reported_as_quantized(tmp_path, make):
    model = nn.ModuleDict({"a": make(nn.Linear(8, 8)), "b": nn.Linear(8, 8)})
    with pytest.raises(UnsupportedLayerError, match=r"^a is a torch.jit.*, which has no LoRA lay"):
        lora.add_lora(model, "a", r=R)
    lora.add_lora(model, "b", r=R)
    lora.save_adapter(model, tmp_path / "a.safetensors")
    assert lora.read_adapter(tmp_path / "a.safetensors").lora.base_fingerprint is not None


@EACH
def test_ranks_and_slices_are_checked_against_the_unpacked_shape(package):
    assert_add_lora_refuses(
        Net(package),
        "r = 9 is too large for layers.0.up, whose largest possible rank is 8",
        "up",
        r=9,
    )
    message = r"enable_lora \[True, False, False\] does not fit layers.0.up: .* divide 16, the"
    assert_add_lora_refuses(Net(package), message, "up", enable_lora={"up": [True, False, False]})


@EACH
def test_an_adapter_of_a_base_of_another_size_is_refused(tmp_path, package):
    model = nn.Sequential(nn.Linear(8, 8))
    lora.add_lora(model, "0", r=R)
    lora.save_adapter(model, tmp_path / "a")
    kind = type(layer_of(Net(package)))
    other = with_int8(nn.Linear(8, 16)) if kind is nn.Linear else kind(8, 16)
    with pytest.raises(CheckpointError, match=r"is \(8, 8\), but the model's weight is \(16, 8\)"):
        lora.load_adapter(nn.Sequential(other), tmp_path / "a")


def test_a_weight_for_quantized_inputs_is_refused():
    model = nn.Sequential(with_int8(nn.Linear(8, 8), is_of_inputs=True))
    message = "gradients do not pass through module 0, because its inputs are quant"
    assert_add_lora_refuses(model, message, "0", r=R, kind=UnsupportedLayerError)


def test_a_layer_that_passes_no_gradients_is_an_error():
    model = nn.Sequential(with_int8(nn.Linear(8, 8)))
    lora.add_lora(model, "0", r=R)
    model[0].weight = with_int8(nn.Linear(8, 8), is_of_inputs=True).weight
    model[0].bias = None
    model(torch.ones(1, 8))  # nothing before it needs gradients
    with torch.no_grad():
        model(torch.ones(1, 8).requires_grad_())
    with pytest.raises(RuntimeError, match=r"gradients do not pass through this Linear, so LoRA"):
        model(torch.ones(1, 8).requires_grad_())


class Unknown(Linear4bit):
    """A class of the same package that the library does not know."""


Unknown.__module__ = "bitsandbytes.nn.modules"


def test_unknown_classes_of_layers_and_weights_are_refused():
    message = r"module 0 is a bitsandbytes.nn.modules.Unknown, which has no LoRA layer"
    assert_add_lora_refuses(nn.Sequential(Unknown(8, 8)), message, "0", kind=UnsupportedLayerError)
    other = type("Int1Tensor", (Int8Tensor,), {"__module__": "torchao.quantization"})
    layer = with_int8(nn.Linear(8, 8))
    layer.weight = nn.Parameter(other(layer.weight.integers, layer.weight.scale), False)
    message = r"the weight of module 0 is quantized \(a torchao.quantization.Int1Tensor\)"
    assert_add_lora_refuses(nn.Sequential(layer), message, "0", kind=UnsupportedLayerError)


def test_the_quantized_out_proj_of_an_attention_is_refused():
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2)})
    with_int8(model["attention"].out_proj)
    message = "attention.out_proj is quantized, and belongs to an nn.MultiheadAttention"
    assert_add_lora_refuses(model, message, "attention", r=R, kind=UnsupportedLayerError)
    assert_add_lora_refuses(model, message, "out_proj", r=R, kind=UnsupportedLayerError)
    lora.add_lora(model, "attention", exclude="out_proj", r=R)
    with pytest.raises(UnsupportedLayerError, match=message):
        lora.add_lora(model, "out_proj", r=R)


def test_all_linear_treats_the_last_layer_as_the_head(caplog):
    caplog.set_level(logging.WARNING)
    model = nn.ModuleDict({name: Linear4bit(8, 8) for name in ("a", "b", "c")})
    assert lora.add_lora(model, "all-linear", r=R) == ("a", "b")
    assert "'all-linear' treats c, the last linear layer, as the head" in caplog.text


@EACH
def test_a_sparse_input_is_refused(package):
    with pytest.raises(TypeError, match=r"a layer with LoRA received a nested or sparse tensor"):
        layer_of(adapted(package))(torch.eye(8).to_sparse())


@EACH
def test_a_model_is_adapted_under_no_grad_too(package):
    with torch.no_grad():
        assert lora.add_lora(Net(package), "all-linear") == NAMES


def test_a_layer_on_the_meta_device_gets_its_update_there():
    model = nn.Sequential(Linear4bit(8, 8).to("meta"))
    lora.add_lora(model, "0", r=R)
    assert model[0].lora_A.is_meta
    assert model[0].lora_B.is_meta


def test_a_quantized_embedding_is_refused():
    model = nn.Sequential(with_int8(nn.Embedding(8, 8)))
    message = r"the weight of module 0 is quantized \(a .*Int8Tensor\): leave it out"
    assert_add_lora_refuses(model, message, "0", r=R, kind=UnsupportedLayerError)


def test_a_lazy_head_is_not_reported_as_quantized():
    model = nn.ModuleDict({"a": Linear4bit(8, 8), "head": nn.LazyLinear(3)})
    message = "head has no shape yet: call the model once before add_lora"
    assert_add_lora_refuses(model, message, "a", r=R, modules_to_train="head")


@EACH
def test_repr_shows_the_update_s_settings(package):
    assert "r=2, lora_alpha=6" in repr(layer_of(adapted(package)))


def test_an_extra_repr_of_torchao_is_extended_and_later_restored():
    model = Net("torchao")
    layer = layer_of(model)
    layer.extra_repr = types.MethodType(lambda self: f"{self.in_features} in int8", layer)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    lora.add_lora(model, "all-linear", r=R, lora_alpha=ALPHA)
    for each in (layer, layer_of(copy.deepcopy(model))):
        assert repr(each).startswith("AdaptedLinear(8 in int8, r=2, lora_alpha=6")
    lora.remove_lora(model)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


@pytest.mark.parametrize("is_before", [True, False])
def test_an_extra_repr_may_be_wrapped_before_and_after_add_lora(is_before):
    def wrap_extra_repr(layer):
        earlier = layer.extra_repr
        layer.extra_repr = lambda: f"{earlier()}, set"

    model = nn.ModuleDict({"a": nn.Linear(2, 2)})
    shown, settings = "in_features=2, out_features=2, bias=True", f", r={R}, lora_alpha={ALPHA}"
    if is_before:
        wrap_extra_repr(model["a"])
        shown += ", set"
    for _ in range(2):
        lora.add_lora(model, "a", r=R, lora_alpha=ALPHA)
        wrap_extra_repr(model["a"])
        shown += ", set"
        assert repr(model["a"]) == f"Linear({shown}{settings})"
        lora.remove_lora(model)
        assert repr(model["a"]) == f"Linear({shown})"
