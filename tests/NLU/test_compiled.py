"""torch.compile of both encoders: one graph a forward pass with its loss, and one a layer."""

import copy

import pytest
import torch
from compare import assert_close_to_rounding
from compiled import breaks_of, compile_layers, gradients_of
from encoder_options import ENCODER_TERMS

from transformers.data.data_collator import PackedCollator

pytestmark = pytest.mark.slow

FAMILIES = ("roberta", "deberta")
LORA = {"apply_lora": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.1}
STEADY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "lora_dropout": 0.0}


@pytest.fixture
def model_of(make_classifier):
    def make(family, **settings):
        settings = {"num_labels": 3, "pad_token_id": 1, **LORA, **settings}
        model = make_classifier(family, **settings).train()
        model.train_only(("lora",))
        return model

    return make


def batch_of(lengths):
    generator = torch.Generator().manual_seed(sum(lengths))
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    batch = {
        "input_ids": torch.randint(5, 60, mask.shape, generator=generator),
        "attention_mask": mask,
        "labels": torch.randint(3, (len(lengths),), generator=generator),
    }
    return PackedCollator(lambda _: batch)([])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_pass_is_one_graph(model_of, family):
    model = model_of(family)
    assert breaks_of(lambda batch: model(**batch).loss, batch_of([7, 4, 11])) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_is_one_graph_for_any_number_of_tokens(model_of, family):
    """Two: the first layer's, whose input needs no gradient, and the last one's."""
    expected = model_of(family, **STEADY)
    model = copy.deepcopy(expected)
    graphs = compile_layers(model.base_model.encoder.layer)
    for lengths in ([7, 5, 12], [9, 9, 3, 8], [4, 14], [6, 2, 3, 5, 11]):
        ours, theirs = (network(**batch_of(lengths)).loss for network in (model, expected))
        assert_close_to_rounding(ours, theirs, ENCODER_TERMS)
        found, wanted = gradients_of(model, ours), gradients_of(expected, theirs)
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            assert_close_to_rounding(found[name], gradient, ENCODER_TERMS)
        assert len(graphs) == 2
