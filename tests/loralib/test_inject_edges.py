"""add_lora where a model, an order of calls or a class is unusual: right, or refused in words."""

import pytest
import torch
from any_models import AnyModel, ids
from torch import nn

import loralib as lora
from loralib.adapters.saving import adapter_of


class Scaled(nn.Linear):
    """A linear layer with a method that its model calls."""

    def scale_out(self, x):
        return 2 * x


class Built(nn.Linear):
    """A linear layer that is built in another way, and nothing else."""

    def __init__(self, width):
        super().__init__(width, width)

    def extra_repr(self):
        return "built"


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).mean((2, 3)))


def names_of(model):
    return [n for n, m in model.named_modules() if isinstance(m, lora.LoRALayer) and m.r > 0]


def test_a_subclass_with_methods_of_its_own_is_refused():
    model = nn.ModuleDict({"a": Scaled(4, 4), "b": Built(4)})
    with pytest.raises(TypeError, match=r"a is a .*Scaled, which has no LoRA layer: exclude it"):
        lora.add_lora(model, "a", r=2)
    assert lora.add_lora(model, "b", r=2) == ("b",)


def test_out_proj_can_be_left_out_and_have_a_rank_of_its_own():
    attention = "encoder.layers.0.self_attn"
    model = AnyModel()
    assert lora.add_lora(model, attention, r=2, exclude="out_proj") == (attention,)
    model = AnyModel()
    lora.add_lora(model, attention, r=2, rank_pattern={"out_proj": 1})
    layer = model.get_submodule(attention)
    assert (layer.r, layer.out_proj.r) == (2, 1)


def test_out_proj_first_and_then_its_attention():
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


@pytest.mark.parametrize("layer", [nn.Conv2d(2, 3, 3), nn.Linear(4, 4), nn.Embedding(5, 4)])
def test_one_layer_alone_is_merged(layer):
    model = nn.Sequential(layer)
    lora.add_lora(model, "0", r=2)
    with torch.no_grad():
        layer.lora_A.add_(0.5)
        layer.lora_B.add_(0.5)
    x = torch.ones(2, 2, 4, 4) if isinstance(layer, nn.Conv2d) else torch.ones(3, 4)
    x = torch.tensor([1, 3]) if isinstance(layer, nn.Embedding) else x
    expected = layer(x)
    merged = lora.merge(layer)
    assert names_of(model) == ["0"]
    assert not isinstance(merged, lora.LoRALayer)
    torch.testing.assert_close(merged(x), expected)


def test_gradients_from_before_do_not_move_the_base():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1, 4)).sum().backward()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    lora.add_lora(model, "0", r=2)
    optimizer.step()
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())


def test_a_frozen_A_stays_so():
    layer = lora.Linear(4, 4, r=2, freeze_A=True)
    layer.requires_grad_(True)
    lora.mark_only_lora_as_trainable(layer)
    assert [n for n, p in layer.named_parameters() if p.requires_grad] == ["lora_B"]


def test_running_statistics_that_are_not_saved_are_named(tmp_path, caplog):
    model = Normed()
    lora.add_lora(model, "conv", r=1, modules_to_train="head")
    (remark,) = [r for r in lora.save_adapter(model, tmp_path / "a.v1") if "statistics" in r]
    assert "running statistics of 1 modules (norm, …)" in remark
    assert remark in caplog.text
    assert (tmp_path / "a.v1" / "adapter_config.json").is_file()
    model = Normed()
    lora.add_lora(model, "conv", r=1, modules_to_train=["head", "norm"])
    assert "norm.running_mean" in adapter_of(model).tensors
    remarks = lora.save_adapter(model, tmp_path / "b.safetensors")
    assert not [remark for remark in remarks if "statistics" in remark]


def test_a_bank_notices_lora_that_came_after_it():
    model = AnyModel()
    lora.add_lora(model, "q_proj", r=2)
    adapter = adapter_of(model)
    lora.remove_lora(model)
    bank = lora.AdapterBank(model)
    bank.add("one", adapter)
    lora.add_lora(model, "q_proj", r=2)
    model(ids())
    with bank.use("one"), pytest.raises(ValueError, match="q_proj has got LoRA of its own since"):
        model(ids())
