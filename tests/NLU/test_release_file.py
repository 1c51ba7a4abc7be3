"""The release's published LoRA weights for MNLI load into a model of roberta-base's shape."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from loralib.adapters.formats import read_adapter
from loralib.adapters.loading import load_into
from loralib.errors import CheckpointError
from transformers import RobertaConfig, RobertaForSequenceClassification

RELEASE = Path(__file__).parents[3] / "shared" / "data" / "release" / "roberta_base_lora_mnli.bin"

pytestmark = pytest.mark.skipif(
    not RELEASE.is_file(), reason="the release's checkpoint is absent from ../shared"
)


@pytest.fixture(scope="module")
def adapter():
    return read_adapter(RELEASE)


def build(**changed):
    """Makes roberta-base, with a smaller vocabulary, which LoRA does not depend on."""
    settings = {"apply_lora": True, "lora_r": 8, "lora_alpha": 16, "num_labels": 3, **changed}
    with torch.device("meta"):
        model = RobertaForSequenceClassification(RobertaConfig(vocab_size=10, **settings))
    model.to_empty(device="cpu")
    return model


def test_every_tensor_is_loaded(adapter):
    assert len(adapter.tensors) == 52
    assert adapter.metadata is None
    assert {tensor.device.type for tensor in adapter.tensors.values()} == {"cpu"}
    model = build()
    assert load_into(model, adapter) == []
    state = model.state_dict()
    for name, tensor in adapter.tensors.items():
        assert torch.equal(state[name], tensor)
    trained = {name for name in state if "lora_" in name or name.startswith("classifier.")}
    assert trained == adapter.tensors.keys()


def test_missing_and_additional_tensors_are_errors(adapter):
    model, name = build(), "roberta.encoder.layer.7.attention.self.value.lora_B"
    less = {key: tensor for key, tensor in adapter.tensors.items() if key != name}
    with pytest.raises(CheckpointError, match=f"lacks 1 tensor: {name}"):
        load_into(model, replace(adapter, tensors=less))
    more = {**adapter.tensors, name.replace("value", "key"): adapter.tensors[name]}
    with pytest.raises(CheckpointError, match=r"trained with targets key, query, value"):
        load_into(model, replace(adapter, tensors=more))
    more = {**adapter.tensors, name.replace("7", "12"): adapter.tensors[name]}
    unknown = (
        r"1 tensor that the model does not have: roberta.encoder.layer.12.attention.self.value"
    )
    with pytest.raises(CheckpointError, match=unknown):
        load_into(model, replace(adapter, tensors=more))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_r": 16}, r"lora_A is \(8, 768\) in the file, \(16, 768\) in the model: rank 8"),
        ({"num_labels": 2}, r"classifier.out_proj.\w+ is \(3.*in the file, \(2.*in the model"),
        (
            {"num_hidden_layers": 6},
            r"24 tensors that the model does not have: \S+, …: its base has at least 12 layers, "
            "this model has 6; give",
        ),
        ({"apply_lora": False}, "no LoRA layers to take it"),
    ],
)
def test_models_that_it_does_not_fit_are_errors(adapter, settings, message):
    with pytest.raises(CheckpointError, match=message):
        load_into(build(**settings), adapter)
