"""Tests of models built on the meta device or without initialization, and loaded later."""

import copy
import functools
import pickle
from contextlib import contextmanager

import pytest
import torch
from compare import assert_same_bits
from small_nets import Net, close, drawn
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.overrides import TorchFunctionMode

import loralib as lora

STARTS = [
    {},
    {"variant": "dora"},
    {"initialization": "pissa"},
    {"initialization": "orthogonal"},
    {"freeze_A": True},
]


@pytest.mark.parametrize("settings", STARTS, ids=str)
@torch.no_grad()
def test_a_model_adapted_on_the_meta_device_starts_as_its_base(nan_in_empty_memory, settings):
    base, x = Net().eval(), torch.randn(2, 6)
    with torch.device("meta"):
        model = Net()
    lora.add_lora(model, ["a", "b"], r=2, **settings)
    model.to_empty(device="cpu")
    model.load_state_dict({**model.state_dict(), **base.state_dict()})  # as FSDP's loading does
    lora.start_from_weights(model)
    close(model(x), base(x))
    nn.init.normal_(model.a.lora_B)
    before = model.a.lora_B.clone()
    if not settings.get("initialization"):
        lora.start_from_weights(model)  # changes nothing: there are values now
        assert torch.equal(model.a.lora_B, before)


@pytest.mark.parametrize("way", ["state", "assigned state", "adapter"])
@torch.no_grad()
def test_start_from_weights_keeps_loaded_values(nan_in_empty_memory, tmp_path, way):
    base = Net()
    trained = drawn(base, ["a"])
    lora.save_adapter(trained, tmp_path / "a")
    with torch.device("meta"):
        model = Net()
    lora.add_lora(model, ["a"], r=2)
    if way != "assigned state":
        model.to_empty(device="cpu")
    if way == "adapter":
        model.load_state_dict(base.state_dict(), strict=False)
        lora.load_adapter(model, tmp_path / "a")
    else:
        model.load_state_dict(trained.state_dict(), assign=way == "assigned state")
    lora.start_from_weights(model)
    assert_same_bits(model.state_dict(), trained.state_dict())


def test_start_from_weights_keeps_an_adapter_loaded_in_inference_mode(
    nan_in_empty_memory, tmp_path
):
    """There, no writes are counted."""
    base = Net()
    trained = drawn(base, ["a"])
    lora.save_adapter(trained, tmp_path / "a")
    with torch.device("meta"):
        model = Net()
    lora.add_lora(model, ["a"], r=2)
    with torch.inference_mode():
        model.to_empty(device="cpu").load_state_dict(base.state_dict(), strict=False)
        lora.load_adapter(model, tmp_path / "a")
        lora.start_from_weights(model)
    assert_same_bits(model.state_dict(), trained.state_dict())


def adapted_on_meta(**settings):
    with torch.device("meta"):
        model = Net()
    lora.add_lora(model, ["a"], r=2, **settings)
    return model.to_empty(device="cpu")


def fill_in_place(state, values):
    """As torch.distributed.checkpoint.load does."""
    for name, tensor in state.items():
        tensor.copy_(values[name])


@pytest.mark.parametrize("way", ["state", "own state", "half", "copied", "pickled", "by hand"])
@torch.no_grad()
def test_start_from_weights_keeps_values_written_in_place(nan_in_empty_memory, way):
    trained, model = drawn(Net(), ["a"]), adapted_on_meta()
    state = model.state_dict()
    if way == "state":
        model.load_state_dict(trained.state_dict())
    elif way == "by hand":
        for own, theirs in zip(model.parameters(), trained.parameters(), strict=True):
            own.copy_(theirs)
    else:
        fill_in_place(state, trained.state_dict())
    if way == "own state":
        model.load_state_dict(state)
    elif way == "half":
        model, trained = model.half(), trained.half()
    elif way == "copied":
        model = copy.deepcopy(model)
    elif way == "pickled":
        model = pickle.loads(pickle.dumps(model))
    lora.start_from_weights(model)
    assert_same_bits(model.state_dict(), trained.state_dict())


@pytest.mark.parametrize("way", ["function", "own state", "copied", "pickled", "half"])
@torch.no_grad()
def test_start_from_weights_initializes_what_an_incomplete_state_lacked(nan_in_empty_memory, way):
    base, model, x = Net(), adapted_on_meta(), torch.randn(2, 6)
    if way == "function":
        options = StateDictOptions(full_state_dict=True, strict=False)
        set_model_state_dict(model, base.state_dict(), options=options)
    else:
        model.load_state_dict({**model.state_dict(), **base.state_dict()})
    if way == "copied":
        model = copy.deepcopy(model)
    elif way == "pickled":
        model = pickle.loads(pickle.dumps(model))
    elif way == "half":
        model = model.half().float()
        base = base.half().float()
    lora.start_from_weights(model)
    close(model(x), base(x))


@contextmanager
def built_as_in_transformers(version):
    """Versions 5 and late 4 build on the meta device, early 4 without initialization.

    Quantizers only skip the random initializations.
    """
    functions = {
        "4.40": ["constant_", "kaiming_uniform_", "normal_", "uniform_"],
        "quantizer": ["kaiming_uniform_", "normal_", "uniform_"],
    }.get(version, [])
    with pytest.MonkeyPatch.context() as patch, torch.device("cpu" if functions else "meta"):
        for name in functions:
            patch.setattr(nn.init, name, lambda tensor, *args, **kwargs: tensor)
        yield


def load_as_transformers_does(model, state, version, initialize=lambda module: None):
    """Like `from_pretrained`: sets parameters, then marks those and modules that have values."""
    missing = model.state_dict().keys() - state.keys()
    if version in ("4.40", "quantizer"):
        model.load_state_dict(state, strict=False)
        missing = set()  # parameters are not marked
    else:
        for name, old in model.state_dict(keep_vars=True).items():
            owner, _, last = name.rpartition(".")
            module = model.get_submodule(owner)
            value = torch.empty_like(old, device="cpu") if name in missing else state[name].clone()
            if version == "4.57" and name in missing:
                module.load_state_dict({last: value}, strict=False, assign=True)
                continue
            setattr(module, last, nn.Parameter(value) if isinstance(old, nn.Parameter) else value)
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name not in missing:
                tensor._is_hf_initialized = True
    for module in model.modules():
        initialize(module)
        module._is_hf_initialized = True


@pytest.mark.parametrize("version", ["4.40", "4.57", "5.23", "quantizer"])
@torch.no_grad()
def test_start_from_weights_keeps_what_a_class_of_transformers_initializes(
    nan_in_empty_memory, version
):
    def initialize(module):
        if isinstance(module, lora.LoRALayer):
            nn.init.constant_(module.lora_A, 0.125)
            nn.init.zeros_(module.lora_B)

    with built_as_in_transformers(version):
        model = nn.Sequential(lora.Linear(6, 6, r=2))
    state = nn.Sequential(nn.Linear(6, 6)).state_dict()
    load_as_transformers_does(model, state, version, initialize)
    for _ in range(2):
        assert (model[0].lora_A == 0.125).all()
        assert not model[0].lora_B.any()
        lora.start_from_weights(model)


@pytest.mark.parametrize("version", ["4.40", "4.57", "5.23", "quantizer"])
@torch.no_grad()
def test_what_neither_a_file_nor_a_class_of_transformers_has_is_initialized(
    nan_in_empty_memory, version
):
    def initialize(module):
        if isinstance(module, lora.LoRALayer):
            nn.init.zeros_(module.lora_B)

    with built_as_in_transformers(version):
        model = nn.Sequential(lora.Linear(6, 6, r=2))
    load_as_transformers_does(model, nn.Linear(6, 6).state_dict(prefix="0."), version, initialize)
    assert model[0].lora_A.isfinite().all()
    assert model[0].lora_A.any()
    assert not model[0].lora_B.any()


@pytest.mark.parametrize("settings", STARTS, ids=str)
@pytest.mark.parametrize("kind", ["linear", "embedding", "convolution", "in place"])
@pytest.mark.parametrize("version", ["4.40", "4.57", "5.23", "quantizer"])
@torch.no_grad()
def test_a_model_loaded_by_transformers_starts_as_its_base(
    nan_in_empty_memory, settings, kind, version
):
    if kind == "embedding" and "freeze_A" in settings:
        pytest.skip("its A would stay zero")
    if kind == "convolution" and "variant" in settings:
        pytest.skip("has no such variant")
    layer = {
        "linear": lora.Linear,
        "embedding": lora.Embedding,
        "convolution": functools.partial(lora.Conv1d, kernel_size=1),
        "in place": nn.Linear,
    }[kind]

    def adapted():
        if kind != "in place":
            return nn.Sequential(layer(6, 6, r=2, **settings))
        model = nn.Sequential(layer(6, 6))
        lora.add_lora(model, ["0"], r=2, **settings)
        return model

    base = nn.Sequential(layer(6, 6)).eval()
    x = torch.arange(6) if kind == "embedding" else torch.randn(1, 6, 6)
    with built_as_in_transformers(version):
        models = [adapted(), adapted()]
    load_as_transformers_does(models[0], base.state_dict(), version)
    for model in (models[0], copy.deepcopy(models[0]), pickle.loads(pickle.dumps(models[0]))):
        close(model.eval()(x), base(x))
    nn.init.normal_(models[0][0].lora_B)
    load_as_transformers_does(models[1], models[0].state_dict(), version)
    if not {"pissa", "dora"} & set(settings.values()):
        lora.start_from_weights(models[1])  # changes nothing: there are values
    assert_same_bits(models[1].state_dict(), models[0].state_dict())
    close(models[1].eval()(x), models[0](x))


@pytest.mark.parametrize("settings", STARTS, ids=str)
def test_add_lora_warns_where_random_initializations_do_nothing(settings, caplog):
    model, x = nn.Sequential(nn.Linear(6, 6)), torch.randn(3, 6)
    expected = model(x)
    with built_as_in_transformers("quantizer"):
        lora.add_lora(model, ["0"], r=2, **settings)
    assert "torch.nn.init does nothing here, so A and B of module 0 are zero" in caplog.text
    close(model(x), expected)
    lora.start_from_weights(model)
    close(model(x), expected)
    assert model[0].lora_A.any()


def test_no_warning_about_initializations_that_cannot_be_done_yet(caplog):
    """A and B get their values with their memory."""
    with built_as_in_transformers("quantizer"), torch.device("meta"):
        lora.add_lora(nn.Sequential(nn.Linear(6, 6)), ["0"], r=2)
    assert not caplog.records


@pytest.mark.parametrize("version", ["4.40", "quantizer", "mode"])
@torch.no_grad()
def test_dora_in_uninitialized_memory_that_happens_to_be_zero(version):
    base, x = nn.Sequential(nn.Linear(6, 6)), torch.randn(3, 6)
    way = WithoutInitialization() if version == "mode" else built_as_in_transformers(version)
    with way:
        model = nn.Sequential(nn.Linear(6, 6))
        model[0].weight.zero_()
        lora.add_lora(model, ["0"], r=2, variant="dora")
    load_as_transformers_does(model, base.state_dict(), "4.40")
    close(model(x), base(x))
    lora.start_from_weights(model)
    close(model(x), base(x))
    zeros = nn.Sequential(nn.Linear(6, 6))
    zeros[0].weight.zero_()
    with pytest.raises(ValueError, match="module 0 has rows of zeros in its weight"):
        lora.add_lora(zeros, ["0"], r=2, variant="dora")


@pytest.mark.parametrize("variant", ["dora", "rslora+dora"])
@torch.no_grad()
def test_rows_of_zeros_are_warned_of_when_dora_starts(variant, caplog):
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(3)))
    lora.add_lora(model, ["0", "1", "2"], r=2, variant=variant)
    model.to_empty(device="cpu")
    for layer in model:
        nn.init.normal_(layer.weight)
    model[1].weight[4] = 0
    lora.start_from_weights(model)
    message = f"rows of zeros in the weight of module 1, which have no direction for {variant}: "
    assert message in caplog.text
    caplog.clear()
    with WithoutInitialization():  # weights are still to be loaded
        lora.start_from_weights(model)
    assert not caplog.records
    lora.remove_lora(model)  # as the warning says
    lora.add_lora(model, ["0", "2"], r=2, variant=variant)
    lora.start_from_weights(model)
    assert not caplog.records
    assert model(torch.randn(3, 6)).isfinite().all()


@pytest.mark.parametrize("loaded", ["all", "the base alone"])
@torch.no_grad()
def test_dora_started_in_memory_of_zeros_can_be_loaded_later(loaded, caplog):
    whole, x = drawn(Net(), ["a"], variant="dora"), torch.randn(2, 6)
    with torch.device("meta"):
        model = Net()
    lora.add_lora(model, ["a"], r=2, variant="dora")
    model.to_empty(device="cpu")
    model.a.weight.zero_()
    lora.start_from_weights(model)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "if weights are loaded later" in warning
    caplog.clear()
    if loaded == "all":
        model.load_state_dict(whole.state_dict())
        close(model(x), whole(x))
        return
    base = Net()
    model.load_state_dict(base.state_dict(), strict=False)
    lora.start_from_weights(model)  # as the warning says
    assert not caplog.records
    close(model(x), base(x))


class WithoutInitialization(TorchFunctionMode):
    """Skips initializations, as Lightning's `init_module(empty_init=True)` does."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__module__", None) == "torch.nn.init":
            return (kwargs or {}).get("tensor", args[0] if args else None)
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_a_model_built_without_initialization_starts_as_its_base(nan_in_empty_memory):
    base, x = nn.Sequential(nn.Linear(6, 4)), torch.randn(3, 6)
    with WithoutInitialization():
        model = nn.Sequential(lora.Linear(6, 4, r=2))
    model.load_state_dict(base.state_dict(), strict=False)
    close(model(x), base(x))  # A and B are zero, as in 0.1.2
    lora.start_from_weights(model)
    assert model[0].lora_A.any()
    close(model(x), base(x))
    trained = lora.Linear(6, 4, r=2)
    nn.init.normal_(trained.lora_B)
    with WithoutInitialization():
        model = nn.Sequential(lora.Linear(6, 4, r=2))
    model[0].load_state_dict(trained.state_dict())
    lora.start_from_weights(model)
    assert_same_bits(model[0].state_dict(), trained.state_dict())


@torch.no_grad()
def test_what_is_loaded_on_the_meta_device_is_initialized_later(nan_in_empty_memory):
    base, x = Net(), torch.randn(2, 6)
    with torch.device("meta"):
        model = Net()
    lora.add_lora(model, ["a"], r=2)
    with pytest.warns(UserWarning, match="which is a no-op"):
        model.load_state_dict(drawn(base, ["a"]).state_dict())
    model.to_empty(device="cpu").load_state_dict(base.state_dict(), strict=False)
    lora.start_from_weights(model)
    close(model(x), base(x))


@torch.no_grad()
def test_loading_anything_but_dense_tensors_is_left_to_pytorch():
    model = adapted_on_meta()
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"expected .* or Tensor-like object"):
        model.load_state_dict(state)
    model, state = adapted_on_meta(), drawn(Net(), ["a"]).state_dict()
    model.load_state_dict({**state, "a.lora_A": state["a.lora_A"].to_sparse()}, assign=True)
    assert model.a.lora_A.is_sparse


def test_start_from_weights_leaves_a_model_without_memory_as_it_is():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8))
    lora.add_lora(model, "0", r=2, variant="dora")
    lora.start_from_weights(model)
    assert all(parameter.is_meta for parameter in model.parameters())
