"""Pruned heads: a layer computes what it did with these heads masked by zero."""

import copy

import make_plain_fixture as maker
import pytest
import torch
from compare import assert_close_to_rounding
from encoder_options import ENCODER_TERMS, NO_DROPOUT

from transformers import AutoModelForSequenceClassification

GIVEN = maker.draw_inputs("roberta", "right")
PRUNED = {0: [0, 2], -1: [1]}
MASK = torch.tensor([[0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 1.0]])
LORA = {"apply_lora": True, "lora_r": 2, "lora_alpha": 6}


def close(ours, theirs):
    assert_close_to_rounding(ours, theirs, ENCODER_TERMS)


def shapes(model):
    """Each layer's sizes: outputs of query, key and value, and inputs of the output projection."""
    layers = model.base_model.encoder.layer
    return [
        [len(getattr(each.attention.self, name).weight) for name in ("query", "key", "value")]
        + [each.attention.output.dense.weight.shape[1]]
        for each in layers
    ]


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        LORA,
        {**LORA, "lora_targets": ["query", "key", "value", "attention_output"]},
        {**LORA, "lora_variant": "dora"},
    ],
)
def test_pruned_heads_give_the_logits_of_masked_heads(settings, trains, tmp_path):
    model = maker.build("roberta", "classifier", **settings, **NO_DROPOUT).train(trains)
    expected = model(**GIVEN, head_mask=MASK).logits
    model.prune_heads(PRUNED)
    assert model.config.pruned_heads == {0: [0, 2], 1: [1]}
    assert shapes(model) == [[16] * 4, [24] * 4]
    close(model(**GIVEN).logits, expected)
    attentions = model(**GIVEN, output_attentions=True).attentions
    assert [each.shape[1] for each in attentions] == [2, 3]
    model(**GIVEN, labels=torch.arange(3)).loss.backward()
    model.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert again.config.pruned_heads == {0: [0, 2], 1: [1]}
    close(again(**GIVEN).logits, expected)


def test_pruning_again_counts_heads_of_the_whole_layer():
    model = maker.build("roberta", "classifier")
    mask = MASK.clone()
    mask[0, 3] = 0
    expected = model(**GIVEN, head_mask=mask).logits
    model.prune_heads(PRUNED)
    query = model.roberta.encoder.layer[1].attention.self.query
    weight = query.weight
    model.prune_heads({0: [0, 3], 1: [1]})
    assert query.weight is weight  # its heads had all been pruned before
    assert model.config.pruned_heads == {0: [0, 2, 3], 1: [1]}
    close(model(**GIVEN).logits, expected)


def test_pruning_forgets_the_fingerprint_of_the_base(tmp_path):
    """An adapter that is trained on the pruned model does not fit the full base."""
    maker.build("roberta", "classifier").save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, **LORA)
    assert model.adapter().metadata.base_fingerprint
    model.prune_heads(PRUNED)
    assert model.adapter().metadata.base_fingerprint is None


def test_a_model_can_be_built_pruned():
    whole = maker.build("roberta", "classifier")
    settings = {"pruned_heads": {"0": [0, 2], -1: [1]}}
    model = maker.build("roberta", "classifier", **settings)
    assert shapes(model) == [[16] * 4, [24] * 4]
    assert model.config.pruned_heads == {0: [0, 2], 1: [1]}
    whole.prune_heads(PRUNED)
    model.load_state_dict(whole.state_dict())
    assert torch.equal(model(**GIVEN).logits, whole(**GIVEN).logits)
    # LoRA that is added later starts without effect, even if initialized from the weight.
    folder_state = whole.state_dict()
    for variant in ({}, {"lora_variant": "dora"}, {"lora_init": "pissa"}):
        lora = {**LORA, **variant, "lora_targets": ["query", "attention_output"]}
        adapted = AutoModelForSequenceClassification.from_pretrained(
            None, config=_config(model, **lora), state_dict=folder_state
        )
        close(adapted(**GIVEN).logits, whole(**GIVEN).logits)


def _config(model, **settings):
    return type(model.config)(**{**model.config.to_dict(), **settings})


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ({2: [0]}, "the model has layers 0 to 1, not 2"),
        ({-3: [0]}, "the model has layers 0 to 1, not -3"),
        ({0: [4]}, "layers have heads 0 to 3, not 4"),
        ({1: [0], 0: [0, 1, 2, 3]}, "layer 0 would have no head left"),
    ],
)
def test_heads_that_cannot_be_pruned_are_refused(heads, message):
    model = maker.build("roberta", "classifier")
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=f"^prune_heads: {message}$"):
        model.prune_heads(heads)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert model.config.pruned_heads == {}


def test_pruning_inputs_of_dora_is_refused():
    settings = {**LORA, "lora_variant": "rslora+dora", "lora_targets": ["attention_output"]}
    with pytest.raises(ValueError, match=r"merge LoRA first \(loralib.merge\)"):
        maker.build("roberta", "classifier", **settings).prune_heads(PRUNED)


def test_pruning_deberta_is_refused_as_upstream():
    with pytest.raises(NotImplementedError, match="DeBERTa-v2's heads cannot be pruned"):
        maker.build("deberta", "classifier").prune_heads(PRUNED)
    with pytest.raises(NotImplementedError, match="DeBERTa-v2's heads cannot be pruned"):
        maker.build("deberta", "classifier", pruned_heads={0: [1]})
