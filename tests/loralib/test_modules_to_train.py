"""Tests of which modules can be trained besides LoRA, and which tensors adapters hold."""

import copy

import pytest
import torch
from any_models import Conv1D, assert_add_lora_refuses
from quantized_linears import Int8Tensor, Linear4bit
from torch import nn

import loralib as lora
from loralib.adapters.saving import adapter_of

R = 2


def with_head(**tables):
    """A quantized layer, and a head with these parameters and buffers. (batch, 8) -> (batch, 3)."""
    torch.manual_seed(0)
    model = nn.Sequential(Linear4bit(8, 8), nn.Linear(8, 3))
    for name, table in tables.items():
        if isinstance(table, nn.Parameter):
            model[1].register_parameter(name, table)
        else:
            model[1].register_buffer(name, table)
    return model


def as_nested(matrix):
    return torch.nested.nested_tensor(list(matrix), layout=torch.jagged)


def frozen(tensor):
    return nn.Parameter(tensor, requires_grad=False)


class OwnWay(nn.Parameter):
    """A parameter that intercepts each operation on it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (
            frozen(torch.ones(3).to(torch.float8_e4m3fn)),
            r"quantized \(torch.float8_e4m3fn\); leave",
        ),
        (torch.ones(3).to(torch.float8_e4m3fn), "a buffer of torch.float8_e4m3fn, which ad"),
        (
            frozen(torch.ones(3).to(torch.complex64)),
            "a parameter of torch.complex64, which adapters",
        ),
        (
            frozen(torch.arange(3)),
            "a parameter of torch.int64, .*, or make the parameter a buffer w",
        ),
        (frozen(torch.ones(3, dtype=torch.uint8)), "a parameter of torch.uint8, which adap"),
        (torch.ones(3, dtype=torch.uint8), "a buffer of torch.uint8, .* with persistent=False$"),
        (torch.eye(3).to_sparse(), "a buffer of torch.sparse_coo, which adapters cannot hold"),
        (
            as_nested(torch.eye(3)),
            "a buffer of nested tensors, which adapters cannot hold",
        ),
        (
            Int8Tensor(torch.ones(3).to(torch.int8), torch.tensor(1.0)),
            r"a buffer of Int8Tensor, which adapters cannot hold",
        ),
        (
            OwnWay(torch.ones(3)),
            r"quantized \(a .*OwnWay\); leave it out of modules_to_train, or l",
        ),
    ],
)
def test_a_module_with_a_tensor_that_no_adapter_can_hold_is_refused(table, reason):
    message = rf"module 1 cannot be trained as it is: its table is {reason}"
    assert_add_lora_refuses(with_head(table=table), message, "0", r=R, modules_to_train="1")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_an_adapter_holds_the_whole_state_of_a_trained_module(tmp_path, dtype):
    def make():
        table = nn.Parameter(torch.zeros(3, dtype=dtype))
        return with_head(
            table=table, again=table, mask=torch.ones(3) > 0, count=torch.zeros(3).long()
        )

    model = make()
    model[1].register_buffer("cache", torch.ones(3, dtype=torch.uint8), persistent=False)
    lora.add_lora(model, "0", r=R, modules_to_train="1")
    assert model[1].table.requires_grad
    with torch.no_grad():
        for name, tensor in model[1].state_dict().items():
            tensor.copy_(torch.arange(3) if tensor.dim() == 1 else 1)
            assert name != "cache"
    lora.save_adapter(model, tmp_path / "a.safetensors")
    loaded = make()
    lora.load_adapter(loaded, tmp_path / "a.safetensors")
    for name, tensor in model[1].state_dict().items():
        assert torch.equal(loaded[1].state_dict()[name], tensor)


class SeenBuffer(torch.Tensor):
    """A tensor that intercepts each operation on it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_head_with_a_scripted_function_and_a_buffer_of_another_class_is_trained(tmp_path):
    def make():
        torch.manual_seed(0)
        head = nn.Sequential(torch.jit.script(nn.GELU()), nn.Linear(8, 3))
        head[1].register_buffer("seen", torch.ones(3).as_subclass(SeenBuffer))
        return nn.ModuleDict({"a": nn.Linear(8, 8), "head": head})

    model = make()
    lora.add_lora(model, "a", r=R, modules_to_train="head")
    with torch.no_grad():
        model["head"][1].weight.add_(1)
    lora.save_adapter(model, tmp_path / "a.safetensors")
    loaded = make()
    lora.load_adapter(loaded, tmp_path / "a.safetensors")
    assert torch.equal(loaded["head"][1].weight, model["head"][1].weight)


def test_buffers_that_no_adapter_can_hold_are_left_out_of_parts_without_parameters(tmp_path):
    """For example rotary positions, complex in some models, and masks with infinities."""
    block = nn.Sequential(nn.Linear(8, 3), nn.Identity())
    block[1].register_buffer("rotation", torch.ones(3, dtype=torch.complex64))
    block[1].register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "block": block})
    lora.add_lora(model, "a", r=R, modules_to_train="block")
    lora.save_adapter(model, tmp_path / "a.safetensors")
    tensors = lora.read_adapter(tmp_path / "a.safetensors").tensors
    assert tensors.keys() == {"a.lora_A", "a.lora_B", "block.0.weight", "block.0.bias"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_module_with_a_scripted_part_is_refused():
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(torch.jit.script(nn.Linear(8, 3))))
    message = "module 1 cannot be trained as it is: it is scripted or traced; leave it out of"
    assert_add_lora_refuses(model, message, "0", r=R, modules_to_train="1")


class WithState(nn.Linear):
    def get_extra_state(self):
        return {"scale": 1.0}

    def set_extra_state(self, state):
        assert state == {"scale": 1.0}


def test_a_module_with_an_extra_state_is_refused():
    model = nn.Sequential(nn.Linear(8, 8), WithState(8, 3))
    message = r"its _extra_state is not a tensor \(its get_extra_state gives a dict\); leave"
    assert_add_lora_refuses(model, message, "0", r=R, modules_to_train="1")


def test_all_linear_means_the_same_layers_as_in_targets():
    """Also those that are not an `nn.Linear`."""
    layers = nn.ModuleList([nn.ModuleDict({"up": Conv1D(8, 8)})])
    model = nn.ModuleDict({"words": nn.Embedding(4, 8), "layers": layers})
    lora.add_lora(model, "words", R, modules_to_train="all-linear")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {"layers.0.up.weight", "layers.0.up.bias"} < trained


def steps(model):
    """Ten steps of training at a usual rate."""
    optimizer = torch.optim.AdamW(lora.parameter_groups(model, lr=2e-4))
    for _ in range(10):
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_only_modules_in_half_precision_are_warned_of(caplog):
    parts = [nn.Linear(8, 8), nn.LayerNorm(8).half(), nn.Linear(8, 8).bfloat16(), nn.LayerNorm(8)]
    lora.add_lora(nn.Sequential(*parts), "0", r=R, modules_to_train=["1", "2", "3"])
    said = "has module 1, module 2 in torch.bfloat16, torch.float16, which loses small steps"
    assert said in caplog.text


def test_modules_in_half_precision_are_warned_of_as_small_steps_are_lost(caplog):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)).bfloat16()
    lora.add_lora(model, "0", r=R, modules_to_train=["1"])
    assert "modules_to_train has module 1 in torch.bfloat16, which loses small " in caplog.text
    steps(model)
    assert (model[1].weight == 1).all()  # no step has changed it
    lora.remove_lora(model)
    caplog.clear()
    model[1].float()  # as the warning says
    lora.add_lora(model, "0", r=R, modules_to_train=["1"])
    assert not caplog.records
    steps(model)
    assert (model[1].weight != 1).all()


def test_a_module_that_was_trained_as_a_whole_is_adapted_as_a_part_of_the_base(tmp_path, caplog):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    lora.add_lora(model, "0", r=R, modules_to_train="1")
    with pytest.raises(ValueError, match=r"module 1 is trained as a whole already, .* remove_lora"):
        lora.add_lora(model, "1", r=R)
    assert not hasattr(model[1], "lora_A")
    assert model[1].weight.requires_grad
    with torch.no_grad():
        model[1].weight.add_(1)
    lora.remove_lora(model)
    base = copy.deepcopy(model)
    lora.add_lora(model, "1", r=R)
    assert "module 1: trained before remove_lora as a whole" in caplog.text
    nn.init.normal_(model[1].lora_B)
    lora.save_adapter(model, tmp_path / "a.safetensors")
    lora.load_adapter(base, tmp_path / "a.safetensors")
    x = torch.ones(2, 4)
    assert torch.equal(base(x), model(x))


def test_a_tied_weight_that_was_trained_is_the_base_s_again_in_both_places():
    model = nn.ModuleList([nn.Linear(4, 4), nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)])
    model[2].weight = model[1].weight
    lora.add_lora(model, "0", r=R, modules_to_train=["1", "2"])
    lora.remove_lora(model)
    lora.add_lora(model, "1", r=R, untie=True)
    assert adapter_of(model).tensors.keys() == {"1.lora_A", "1.lora_B"}
