"""Tests of models partitioned by DeepSpeed's ZeRO 3, and of its engine; both are simulated."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from compare import assert_same_bits
from small_nets import Net, close, drawn
from stacked_experts import adapted, build, tokens
from torch import Tensor, nn

import loralib as lora

NOT_AVAILABLE, AVAILABLE = SimpleNamespace(name="NOT_AVAILABLE"), SimpleNamespace(name="AVAILABLE")
REFUSED = r"^[^\n]+ is partitioned by DeepSpeed's ZeRO 3: before [^\n]+GatheredParameters\(list"


def partitioned(model: nn.Module) -> nn.Module:
    """Partitions parameters as ZeRO 3 does with one process: into one part each."""
    for number, parameter in enumerate(model.parameters()):
        if hasattr(parameter, "ds_id"):
            continue
        parameter.ds_id, parameter.ds_shape = number, parameter.shape
        parameter.ds_tensor, parameter.ds_status = parameter.data, NOT_AVAILABLE
        parameter.data = parameter.data.new_empty(0)
    return model


@contextmanager
def gathered(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Gathers parameters as `deepspeed.zero.GatheredParameters` does."""
    parameters = list(parameters)
    for each in parameters:
        each.data, each.ds_status = each.ds_tensor.clone(), AVAILABLE
    yield
    for each in parameters:
        each.ds_tensor, each.data, each.ds_status = each.data, each.data.new_empty(0), NOT_AVAILABLE


class DeepSpeedEngine(nn.Module):
    """Holds the model as `module`, as DeepSpeed's engine does."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.module = model


@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_what_needs_values_is_refused_for_a_partitioned_model(tmp_path, variant):
    base = Net()
    model = drawn(copy.deepcopy(base), ["a"], variant=variant)
    lora.save_adapter(model, tmp_path / "there.safetensors")
    partitioned(model)
    for name in ("a.safetensors", "a", "a.bin"):
        with pytest.raises(ValueError, match=REFUSED):
            lora.save_adapter(model, tmp_path / name)
    for refused in (
        lora.merge,
        lora.remove_lora,
        lora.lora_state_dict,
        lora.AdapterBank,
        lambda model: lora.load_adapter(model, tmp_path / "there.safetensors"),
    ):
        with pytest.raises(ValueError, match=REFUSED):
            refused(model)
    assert [each.name for each in tmp_path.iterdir()] == ["there.safetensors"]
    with gathered(model.parameters()):
        lora.merge(model)


@pytest.mark.parametrize("name", ["a.safetensors", "a"])
@pytest.mark.parametrize("variant", ["lora", "dora"])
@torch.no_grad()
def test_gathering_what_is_trained_is_enough_to_save(tmp_path, caplog, name, variant):
    base, x = Net().eval(), torch.randn(2, 6)
    model = drawn(copy.deepcopy(base), ["a"], variant=variant)
    expected = model(x)
    partitioned(model)
    with gathered(each for each in model.parameters() if each.requires_grad):
        lora.save_adapter(DeepSpeedEngine(model), tmp_path / name)
    assert lora.read_adapter(tmp_path / name).lora.base_fingerprint is None
    lora.load_adapter(base, tmp_path / name)
    assert "cannot check that its base is this model" in caplog.text
    close(base(x), expected)


@torch.no_grad()
def test_with_all_parameters_gathered_the_base_has_a_fingerprint(tmp_path):
    model = drawn(Net(), ["a"])
    lora.save_adapter(model, tmp_path / "before.safetensors")
    partitioned(model)
    with gathered(model.parameters()):
        lora.save_adapter(model, tmp_path / "after.safetensors")
    before, after = (lora.read_adapter(each) for each in sorted(tmp_path.iterdir(), reverse=True))
    assert before.lora == after.lora
    assert before.lora.base_fingerprint is not None
    assert_same_bits(before.tensors, after.tensors)


@torch.no_grad()
def test_stacks_keep_their_layout_in_files(tmp_path):
    model, base, x = adapted().eval(), build().eval(), tokens()
    expected = model(x)
    partitioned(model)
    with gathered(each for each in model.parameters() if each.requires_grad):
        lora.save_adapter(model, tmp_path / "a.safetensors")
    lora.load_adapter(base, tmp_path / "a.safetensors")
    close(base(x), expected)


@pytest.mark.parametrize("make", [Net, build])
def test_a_partitioned_model_is_adapted_by_its_shapes(make):
    targets = ["a", "b"] if make is Net else ["q", "experts.down_proj"]
    whole, model = make(), partitioned(make())
    for each in (whole, model):
        torch.manual_seed(0)
        lora.add_lora(each, targets, r=2)
    parts = [each for each in model.parameters() if hasattr(each, "ds_id")]
    assert parts
    assert all(each.shape == (0,) and not each.requires_grad for each in parts)
    assert_same_bits(lora.lora_state_dict(model), lora.lora_state_dict(whole))


@pytest.mark.parametrize("settings", [{"variant": "dora"}, {"initialization": "pissa"}])
def test_dora_and_pissa_need_gathered_weights(settings):
    model = partitioned(Net())
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=REFUSED):
        lora.add_lora(model, ["a"], r=2, **settings)
    assert {name: type(module) for name, module in model.named_modules()} == before
    with gathered(model.parameters()):
        lora.add_lora(model, ["a"], r=2, **settings)


@torch.no_grad()
def test_evaluation_keeps_no_merged_copy_of_partitioned_weights():
    model, x = drawn(Net(), ["a"]).eval(), torch.randn(2, 6)
    expected = model(x)
    assert model.a._merged_copy is not None
    partitioned(model.train()).eval()
    with gathered(model.parameters()):
        close(model(x), expected)
    assert model.a._merged_copy is None


def trained_by_an_engine(model: nn.Module, stage: int) -> nn.Module:
    """Marks parameters as `deepspeed.initialize` does; ZeRO 3 marks frozen ones too."""
    for parameter in model.parameters():
        if stage == 3:
            parameter._z3_optimizer = object()
        elif parameter.requires_grad:
            parameter._hp_mapping = object()
    return model


def destroyed(model: nn.Module) -> nn.Module:
    """Removes marks as `engine.destroy()` does, which leaves those of ZeRO 3."""
    for parameter in model.parameters():
        if hasattr(parameter, "_hp_mapping"):
            parameter._hp_mapping = None  # as if another process holds the copy
    return model


ADVICE = {
    2: r"; to do so now, call engine.destroy\(\) first$",
    3: r"; to do so now, build the model again$",
}


@pytest.mark.parametrize("stage", ADVICE)
def test_loading_and_adapting_are_refused_once_an_engine_holds_copies(tmp_path, stage):
    base = Net()
    model = drawn(base, ["a"])
    lora.save_adapter(model, tmp_path / "a.safetensors")
    trained_by_an_engine(model, stage)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    refused = r"of a.lora_A, .*load it before deepspeed.initialize" + ADVICE[stage]
    for wrapped in (model, DeepSpeedEngine(model)):
        with pytest.raises(ValueError, match=refused):
            lora.load_adapter(wrapped, tmp_path / "a.safetensors")
    refused = r"of a.lora_A, .*added now: adapt the model before deepspeed.init.*" + ADVICE[stage]
    with pytest.raises(ValueError, match=refused):
        lora.add_lora(model, ["b"], r=2)
    assert_same_bits(model.state_dict(), before)
    model = destroyed(model) if stage == 2 else drawn(base, ["a"])  # as the errors suggest
    assert lora.load_adapter(model, tmp_path / "a.safetensors") == ("a",)
    assert_same_bits(model.state_dict(), before)
    lora.add_lora(model, ["b"], r=2)


@pytest.mark.parametrize("stage", ADVICE)
def test_a_frozen_adapter_under_a_trained_head_can_be_replaced(tmp_path, stage):
    base = Net()
    lora.save_adapter(drawn(base, ["a"]), tmp_path / "a.safetensors")
    with_head = drawn(base, ["a"], modules_to_train=["head"])
    lora.save_adapter(with_head, tmp_path / "head.safetensors")
    model = drawn(base, ["a"]).requires_grad_(False)
    model.head.requires_grad_(True)
    trained_by_an_engine(model, stage)
    lora.load_adapter(model, tmp_path / "a.safetensors")
    loaded = lora.read_adapter(tmp_path / "a.safetensors").tensors
    assert_same_bits({name: model.state_dict()[name] for name in loaded}, loaded)
    with pytest.raises(ValueError, match=r"holds a copy of head\.\w+, which would overwrite"):
        lora.load_adapter(model, tmp_path / "head.safetensors")
    with pytest.raises(
        ValueError, match=r"holds a copy of head\.\w+, and would not train parameters"
    ):
        lora.add_lora(model, ["b"], r=2)
    assert_same_bits({name: model.state_dict()[name] for name in loaded}, loaded)


def test_an_engine_is_treated_as_a_wrapper(tmp_path):
    base = Net()
    engine = DeepSpeedEngine(drawn(base, ["a"]))
    lora.save_adapter(engine, tmp_path / "a.safetensors")
    assert lora.load_adapter(base, tmp_path / "a.safetensors") == ("a",)
    with pytest.raises(ValueError, match=r"\(DeepSpeedEngine\): adapt the model before that"):
        lora.add_lora(engine, ["b"], r=2)
