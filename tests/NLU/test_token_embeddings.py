"""Word embeddings: reading and replacing them, tied weights, and other numbers of rows."""

import copy

import make_plain_fixture as maker
import pytest
import torch
from torch import nn

from transformers import AutoModel, AutoModelForMaskedLM

FAMILIES = tuple(maker.FAMILIES)
KINDS = ("backbone", "mlm", "classifier")
TIES = ({}, {"tie_word_embeddings": False}, {"torchscript": True})
ROWS = maker.SHAPE["vocab_size"]
IDS = maker.draw_inputs("roberta", "right")["input_ids"].clamp(max=ROWS - 3)


def hidden_and_logits(family, **settings):
    model = maker.build(family, "mlm", **settings)
    model.tie_weights()
    return model, model(IDS, return_dict=True).logits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_getters_return_the_embeddings(family, kind):
    model = maker.build(family, kind)
    words = model.get_input_embeddings()
    assert words is model.base_model.embeddings.word_embeddings
    output = model.get_output_embeddings()
    assert (output is None) == (kind != "mlm")
    if output is not None:
        assert isinstance(output, nn.Linear)
        assert output.weight is words.weight
    else:
        with pytest.raises(ValueError, match="has no output embeddings"):
            model.set_output_embeddings(nn.Linear(32, ROWS))


@pytest.mark.parametrize("family", FAMILIES)
def test_replacing_the_embeddings_ties_the_head_to_them(family):
    model, _ = hidden_and_logits(family)
    new = nn.Embedding(ROWS + 4, 32)
    model.set_input_embeddings(new)
    assert model.get_input_embeddings() is new
    output = model.get_output_embeddings()
    assert output.weight is new.weight
    assert (len(output.bias), output.out_features) == (ROWS + 4, ROWS + 4)
    assert model(torch.full((1, 3), ROWS + 3)).logits.shape == (1, 3, ROWS + 4)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_output_projection_can_be_replaced(family):
    model, logits = hidden_and_logits(family, tie_word_embeddings=False)
    output = copy.deepcopy(model.get_output_embeddings())
    with torch.no_grad():
        output.bias.add_(1.0)
    model.set_output_embeddings(output)
    torch.testing.assert_close(model(IDS).logits, logits + 1)
    model.tie_weights()  # the bias is still that of the new projection
    torch.testing.assert_close(model(IDS).logits, logits + 1)


# ---- tied weights ----


@pytest.mark.parametrize("settings", TIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_tied_untied_and_cloned_weights_are_saved_and_loaded(family, settings, tmp_path):
    model = maker.build(family, "mlm", **settings)
    model.tie_weights()
    words, output = model.get_input_embeddings(), model.get_output_embeddings()
    assert (output.weight is words.weight) == (settings == {})
    assert torch.equal(output.weight, words.weight) == ("tie_word_embeddings" not in settings)
    output.weight.data[0] += 1  # as by training, which may let a clone differ from its source
    logits = model(IDS, return_dict=True).logits
    model.save_pretrained(tmp_path)
    again, info = AutoModelForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info == {"missing_keys": [], "unexpected_keys": [], "error_msgs": []}
    assert torch.equal(again(IDS, return_dict=True).logits, logits)
    names = [name for name, _ in again.named_parameters()]
    assert len(names) == len(list(model.parameters()))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_projection_with_values_of_its_own_is_saved(family, tmp_path):
    """As an adapter may bring it. Settings that several models share stay as they are."""
    model, before = hidden_and_logits(family)
    shared = model.config
    output = copy.deepcopy(model.get_output_embeddings())
    with torch.no_grad():
        output.weight.add_(torch.randn_like(output.weight))
    model.set_output_embeddings(output)
    logits = model(IDS, return_dict=True).logits
    assert not torch.allclose(logits, before, atol=1e-2)
    model.save_pretrained(tmp_path)
    again = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(again(IDS, return_dict=True).logits, logits)
    assert (shared.tie_word_embeddings, again.config.tie_word_embeddings) == (True, False)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_cloned_from_a_file_with_one_tensor(family, tmp_path):
    model, logits = hidden_and_logits(family)
    state = {n: t for n, t in model.state_dict().items() if not n.endswith("decoder.weight")}
    model.save_pretrained(tmp_path, state_dict=state)
    cloned = AutoModelForMaskedLM.from_pretrained(tmp_path, torchscript=True)
    assert torch.equal(cloned(IDS)[0], logits)
    assert cloned.get_output_embeddings().weight is not cloned.get_input_embeddings().weight


# ---- more or fewer rows ----


@pytest.mark.parametrize("settings", TIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_resizing_keeps_the_common_rows(family, settings, tmp_path):
    model, logits = hidden_and_logits(family, **settings)
    count = len(list(model.parameters()))
    old = model.get_input_embeddings().weight.detach().clone()
    for rows in (ROWS + 10, ROWS - 2):
        words, output = model.resize_token_embeddings(rows), model.get_output_embeddings()
        common = min(rows, ROWS)
        assert words is model.get_input_embeddings()
        assert model.config.vocab_size == rows
        assert words.weight.shape == output.weight.shape == (rows, 32)
        assert len(output.bias) == words.num_embeddings == output.out_features == rows
        assert torch.equal(words.weight[:common], old[:common])
        assert not output.bias[ROWS:].any()
        resized = model(IDS, return_dict=True).logits
        torch.testing.assert_close(resized[:, :, :common], logits[:, :, :common])
        assert resized.shape == (3, 7, rows)
        assert len(list(model.parameters())) == count
        model.save_pretrained(tmp_path)
        again = AutoModelForMaskedLM.from_pretrained(tmp_path)
        assert torch.equal(again(IDS, return_dict=True).logits, resized)
        assert AutoModel.from_pretrained(tmp_path).get_input_embeddings().num_embeddings == rows


@pytest.mark.parametrize("family", FAMILIES)
def test_new_rows_are_random_with_the_dtype_and_settings_of_the_others(family):
    model = maker.build(family, "classifier").half()
    model.get_input_embeddings().weight.requires_grad_(False)
    words = model.resize_token_embeddings(ROWS + 1000)
    assert words.weight.dtype == torch.float16
    assert not words.weight.requires_grad
    assert words.padding_idx == model.config.pad_token_id
    # The standard deviation of 32,000 values varies by less than 2 %.
    assert words.weight[ROWS:].float().std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("family", FAMILIES)
def test_resizing_to_the_same_number_changes_nothing(family):
    model = maker.build(family, "mlm")
    words = model.get_input_embeddings()
    assert model.resize_token_embeddings() is words
    assert model.resize_token_embeddings(ROWS) is words
    pad = model.config.pad_token_id
    with pytest.raises(
        ValueError, match=rf"\({pad}\): the padding token, {pad}, would have no row"
    ):
        model.resize_token_embeddings(pad)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_of_a_resized_base_records_no_fingerprint(family, tmp_path):
    maker.build(family, "backbone").save_pretrained(tmp_path)
    model = AutoModelForMaskedLM.from_pretrained(tmp_path, apply_lora=True, lora_r=2, lora_alpha=4)
    assert model.adapter().metadata.base_fingerprint == model.base_fingerprint is not None
    model.resize_token_embeddings(ROWS + 1)
    assert model.adapter().metadata.base_fingerprint is None
    decoder = {"roberta": "lm_head.decoder", "deberta": "cls.predictions.decoder"}[family]
    assert not any(name.startswith(decoder) for name in model.adapter().tensors)
