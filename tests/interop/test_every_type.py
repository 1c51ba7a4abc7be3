"""Compares "all-linear" with PEFT's in every model type of upstream's Transformers.

It takes some minutes, so run it by hand, for instance when Transformers has a new version:

    bash tests/interop/run.sh tests/interop/test_every_type.py -m every_type

Models have the default size of their type's config, and are on the meta device: without memory.
"""

import re
import warnings

import peft
import pytest
import torch
from torch import nn

import loralib as lora
import transformers

TYPES = sorted(transformers.CONFIG_MAPPING)


def build(model_type: str) -> nn.Module:
    """The type's language model or, if it has none, its plain model; on the meta device."""
    config = transformers.CONFIG_MAPPING[model_type]()
    has_language_model = type(config) in transformers.AutoModelForCausalLM._model_mapping
    auto = transformers.AutoModelForCausalLM if has_language_model else transformers.AutoModel
    with torch.device("meta"):
        return auto.from_config(config)


def with_lora(model: nn.Module) -> tuple[set[str], set[str]]:
    """The modules that get LoRA, and those that errors name as unsupported."""
    refused: set[str] = set()
    while True:
        exclude = [re.compile(re.escape(name)) for name in refused]
        try:
            return {*lora.add_lora(model, "all-linear", r=1, untie=True, exclude=exclude)}, refused
        except (lora.UnsupportedLayerError, ValueError) as error:
            message = str(error)
        if re.search("finds no linear layer|the model's only linear layer", message):
            return set(), refused
        found = re.match(r"(r = 1 is too large for )?([\w.]+)", message)
        assert found[2] in dict(model.named_modules()), message
        assert found[2] not in refused
        refused.add(found[2])


def with_peft(model: nn.Module) -> tuple[set[str], bool] | None:
    """The modules that get PEFT's LoRA, and whether parameters do; None if PEFT refuses."""
    config = peft.LoraConfig(r=1, target_modules="all-linear")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            adapted = peft.get_peft_model(model, config)
        except (ValueError, NotImplementedError):  # Mamba, models without embeddings, …
            return None
    layers = {
        name.removeprefix("base_model.model."): type(module)
        for name, module in adapted.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    }
    of_parameters = {n for n, kind in layers.items() if kind is peft.tuners.lora.layer.ParamWrapper}
    return layers.keys() - of_parameters, bool(of_parameters)


@pytest.mark.every_type
@pytest.mark.parametrize("model_type", TYPES)
def test_all_linear_matches_pefts_in_numbered_layers(model_type: str):
    try:
        model, other = build(model_type), build(model_type)
    except Exception as error:
        pytest.skip(f"upstream does not build it from its default config: {error}")
    kinds = {name: type(module) for name, module in model.named_modules()}
    names = list(model.state_dict())
    theirs = with_peft(other)
    ours, refused = with_lora(model)
    if not ours:
        assert theirs is None or len(theirs[0]) == 1
        return
    if theirs is not None:
        in_layers = {name for name in theirs[0] if re.search(r"(^|\.)\d+\.", name)} or theirs[0]
        attentions = {n for n, kind in kinds.items() if issubclass(kind, nn.MultiheadAttention)}
        # Where PEFT takes linear layers for experts', it adapts the experts' stacks instead.
        assert in_layers - refused <= ours
        assert theirs[1] or ours <= in_layers | attentions
    lora.remove_lora(model)
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    assert list(model.state_dict()) == names
