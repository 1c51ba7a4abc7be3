"""How a new model's weights are initialized: each kind of layer, and in which order."""

import math

import pytest
import torch
from torch import nn

import loralib as lora
import transformers
from transformers import (
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    DebertaV2ForSequenceClassification,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
)
from transformers.adapters import UpProjection

STD = 0.3
SHAPE = {
    **{"vocab_size": 150, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"intermediate_size": 48, "max_position_embeddings": 40, "initializer_range": STD},
}
ADDED = {
    "plain": {},
    "lora": {"apply_lora": True, "lora_r": 8, "lora_alpha": 4, "lora_targets": ("query", "output")},
    "adapter": {"apply_adapter": True, "adapter_size": 16},
}
RELATIVE = {"relative_attention": True, "pos_att_type": "p2c|c2p", "conv_kernel_size": 3}
FAMILIES = {
    "roberta": (RobertaConfig, {}, (RobertaForMaskedLM, RobertaForSequenceClassification)),
    "deberta": (
        DebertaV2Config,
        {**RELATIVE, "type_vocab_size": 2, "norm_rel_ebd": "layer_norm"},
        (DebertaV2ForMaskedLM, DebertaV2ForSequenceClassification),
    ),
}
CASES = pytest.mark.parametrize(
    ("family", "head", "added"),
    [(family, head, added) for family in FAMILIES for head in (0, 1) for added in ADDED],
)


def new(family, head, added):
    config_class, settings, classes = FAMILIES[family]
    return classes[head](config_class(**SHAPE, **settings, **ADDED[added]))


# The classes that are not among the cases above.
OTHERS = {
    "roberta": ("Model", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice"),
    "deberta": ("Model", "ForTokenClassification", "ForQuestionAnswering"),
}


def with_constant_weights(family, head, added):
    """A model whose weights are all the same number, unlike a new one's."""
    model = new(family, head, added)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 7.0)
    return model


def is_normal(tensor, std):
    """Checks that mean and deviation are within five standard errors of a normal sample's."""
    n = tensor.numel()
    assert abs(tensor.mean()) < 5 * std / math.sqrt(n)
    assert abs(tensor.std() - std) < 5 * std / math.sqrt(2 * n)


@CASES
def test_each_kind_of_layer_is_initialized_as_specified(family, head, added):
    torch.manual_seed(0)
    model = new(family, head, added)
    seen = set()
    for module in model.modules():
        seen.add(type(module))
        match module:
            case nn.LayerNorm():
                assert torch.all(module.weight == 1)
                assert torch.all(module.bias == 0)
            case UpProjection():
                assert not any(torch.any(p) for p in module.parameters())
            case nn.Conv1d():
                bound = 1 / math.sqrt(module.in_channels // module.groups * module.kernel_size[0])
                assert 0.9 * bound < module.weight.abs().max() <= bound
                assert 0 < module.bias.abs().max() <= bound
            case nn.Embedding():
                rows = module.weight.detach().clone()
                if module.padding_idx is not None:
                    assert not torch.any(rows[module.padding_idx])
                    rows = torch.cat([rows[: module.padding_idx], rows[module.padding_idx + 1 :]])
                is_normal(rows, STD)
            case nn.Linear():
                is_normal(module.weight, STD)
                assert module.bias is None or not torch.any(module.bias)
        if isinstance(module, lora.Linear):
            assert not torch.any(module.lora_B)
            if family == "deberta":
                is_normal(module.lora_A, STD)
            else:
                bound = 1 / math.sqrt(module.in_features)
                assert 0.9 * bound < module.lora_A.abs().max() <= bound
    assert any(issubclass(kind, nn.LayerNorm) for kind in seen)
    assert (lora.Linear in seen) == (added == "lora")
    assert (UpProjection in seen) == (added == "adapter")


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family, names in OTHERS.items() for name in names]
)
def test_every_class_initializes_its_weights(family, name):
    config_class, settings, _ = FAMILIES[family]
    prefix = config_class.__name__.removesuffix("Config")
    torch.manual_seed(0)
    model = getattr(transformers, prefix + name)(config_class(**SHAPE, **settings))
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert linears
    for layer in linears:
        is_normal(layer.weight, STD)
        assert not torch.any(layer.bias)


def draw(module, family):
    """Initializes a module plainly, with the random draws that a seed's weights depend on."""
    if isinstance(module, nn.LayerNorm | nn.Conv1d | lora.LoRALayer):
        module.reset_parameters()
    if isinstance(module, lora.LoRALayer) and family == "deberta":
        module.lora_A.normal_(0.0, STD)
    if isinstance(module, nn.Linear | nn.Embedding):
        weight = torch.empty_like(module.weight).normal_(0.0, STD)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            weight[module.padding_idx] = 0
        module.weight.copy_(weight * (not isinstance(module, UpProjection)))
    if isinstance(module, nn.Linear) and module.bias is not None:
        module.bias.zero_()


@CASES
def test_a_seed_s_weights_are_drawn_in_the_order_of_the_modules(family, head, added):
    model, reference = (
        with_constant_weights(family, head, added),
        with_constant_weights(family, head, added),
    )
    torch.manual_seed(3)
    model.init_weights()
    after = torch.rand(1)
    torch.manual_seed(3)
    with torch.no_grad():
        reference.apply(lambda module: draw(module, family))
    reference.tie_weights()
    assert torch.equal(after, torch.rand(1))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, reference.state_dict()[name]), name
