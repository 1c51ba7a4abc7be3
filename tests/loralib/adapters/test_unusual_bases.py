"""Tests of which tensors a base's fingerprint is computed from, and which bases have none."""

import copy
import types

import pytest
import torch
from torch import Tensor, nn

import loralib as lora
from loralib.errors import WrongBaseError

R = 2


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint8, torch.complex64])
def test_parameters_of_other_dtypes_do_not_prevent_a_fingerprint(tmp_path, dtype):
    plain_one, other = nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8))
    other.load_state_dict(plain_one.state_dict())
    other[0].table = nn.Parameter(torch.ones(8, 8, dtype=dtype), requires_grad=False)
    found = []
    for name, model in (("a", plain_one), ("b", other)):
        lora.add_lora(model, "0", r=R)
        lora.save_adapter(model, tmp_path / f"{name}.safetensors")
        adapter = lora.read_adapter(tmp_path / f"{name}.safetensors")
        found.append(adapter.lora.base_fingerprint)
    assert found[0] == found[1] is not None


def with_packed_experts(is_packed, config=None):
    """A layer, and experts whose weights another package has packed into integers, or not."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "experts": nn.Module(), "head": nn.Linear(8, 3)})
    experts = model["experts"]
    experts.bias = nn.Parameter(torch.zeros(8))
    experts.act = nn.Sequential(nn.PReLU())
    if is_packed == "buffer":
        experts.register_buffer("packed", torch.ones(2, 8, 4, dtype=torch.int32))
    elif is_packed:
        dtype = torch.uint8 if is_packed is True else is_packed
        experts.packed = nn.Parameter(torch.ones(2, 8, 4).to(dtype), requires_grad=False)
        experts.scales = nn.Parameter(torch.ones(2, 8, dtype=torch.uint8), requires_grad=False)
    else:
        experts.weight = nn.Parameter(torch.ones(2, 8, 8))
    model.config = types.SimpleNamespace(**config or {})
    return model


@pytest.mark.parametrize(
    "packed",
    [
        {"is_packed": True},
        {"is_packed": torch.uint32},
        {"is_packed": "buffer", "config": {"quantization_config": object()}},
    ],
)
def test_a_base_whose_weights_another_package_has_packed_has_no_fingerprint(
    tmp_path, packed, caplog
):
    """Unpacked weights have other names, but LoRA of other layers fits both bases."""
    plain = {"is_packed": False, "config": {"quantization_config": None}}
    for trained, base in ((plain, packed), (packed, plain)):
        model = with_packed_experts(**trained)
        lora.add_lora(model, "a", r=R)
        lora.save_adapter(model, tmp_path / "a.safetensors")
        adapter = lora.read_adapter(tmp_path / "a.safetensors")
        assert (adapter.lora.base_fingerprint is None) == (trained is packed)
        for load in (
            lambda model: lora.load_adapter(model, tmp_path / "a.safetensors"),
            lambda model, adapter=adapter: lora.AdapterBank(model).add("a", adapter),
        ):
            caplog.clear()
            load(with_packed_experts(**base))
            assert len(caplog.records) == 1
            assert "cannot check that" in caplog.text
            caplog.clear()
            load(with_packed_experts(**trained))
            assert bool(caplog.records) == (trained is packed)


def test_a_base_with_sparse_weights_has_no_fingerprint(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8))
    model.edges = nn.Parameter(torch.eye(8).to_sparse(), requires_grad=False)
    lora.add_lora(model, "0", r=R)
    lora.save_adapter(model, tmp_path / "a.safetensors")
    assert lora.read_adapter(tmp_path / "a.safetensors").lora.base_fingerprint is None


class Settings(dict):
    """A custom config, whose items are attributes."""

    __getattr__ = dict.__getitem__


class OtherSettings:
    """A config whose settings are properties."""

    quantization_config = property(lambda self: None)
    _name_or_path = property(lambda self: "the base")


@pytest.mark.parametrize("kind", [Settings, OtherSettings, type(None)])
def test_a_config_may_be_of_any_class(tmp_path, kind):
    model = nn.Sequential(nn.Linear(8, 8))
    model.config = kind()
    model.register_buffer("mask", torch.ones(4, 4, dtype=torch.uint8))
    lora.add_lora(model, "0", r=R)
    lora.save_adapter(model, tmp_path / "a")  # PEFT's folder needs the config too
    lora.save_adapter(model, tmp_path / "a.safetensors")
    metadata = lora.read_adapter(tmp_path / "a.safetensors").lora
    assert metadata.base == ("the base" if kind is OtherSettings else None)
    assert metadata.base_fingerprint is not None


@pytest.mark.parametrize("convert", [Tensor.to_sparse, Tensor.to_sparse_csr, Tensor.to_mkldnn])
@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta:UserWarning")
def test_buffers_that_are_not_dense_are_left_out_of_the_fingerprint(tmp_path, convert, caplog):
    plain_one = nn.Sequential(nn.Linear(8, 8))
    model = copy.deepcopy(plain_one)
    model.register_buffer("adjacency", convert(torch.eye(8)))
    lora.add_lora(model, "0", r=R)
    lora.save_adapter(model, tmp_path / "a.safetensors")
    lora.remove_lora(model)
    caplog.clear()
    for base in (model, plain_one):
        lora.AdapterBank(base).add("a", lora.read_adapter(tmp_path / "a.safetensors"))
        lora.load_adapter(base, tmp_path / "a.safetensors")
        assert not caplog.records
    with pytest.raises(WrongBaseError):
        lora.load_adapter(nn.Sequential(nn.Linear(8, 8)), tmp_path / "a.safetensors")


@pytest.mark.parametrize("has_tables", [True, False])
def test_integers_that_are_not_weights_do_not_prevent_a_fingerprint(tmp_path, has_tables):
    model = nn.Sequential(nn.Linear(8, 8))
    model.config = Settings() if has_tables else types.SimpleNamespace(quantization_config={})
    if has_tables:
        model.register_buffer("mask", torch.ones(4, 4, dtype=torch.uint8))
        model.table = nn.Parameter(torch.ones(4, 4, dtype=torch.int32), requires_grad=False)
        model.append(nn.ParameterList([model.table]))
    model.places = nn.Parameter(torch.arange(4), requires_grad=False)
    lora.add_lora(model, "0", r=R)
    lora.save_adapter(model, tmp_path / "a.safetensors")
    assert lora.read_adapter(tmp_path / "a.safetensors").lora.base_fingerprint is not None
