"""The padded path: attention probabilities, padding anywhere, head masks, embeddings for ids.

Numbers are those of upstream 4.4.2. Where the packed path applies as well, it gives the same.
"""

import make_plain_fixture as maker
import pytest
import torch
from compare import assert_close_to_rounding, assert_same_bits
from encoder_options import ENCODER_TERMS, NO_DROPOUT
from safetensors.torch import load_file

from loralib.nn.packing import PackedRows
from transformers import AutoModelForSequenceClassification

FAMILIES = tuple(maker.FAMILIES)
CASES = [(family, case) for family, cases in maker.CASES.items() for case in cases]
LABELS = {"mlm": torch.tensor([[-100, 5, 6, -100, 7, 8, 9]] * 3), "classifier": torch.arange(3)}
ALL_OUTPUTS = {"output_attentions": True, "output_hidden_states": True}


@pytest.fixture(scope="module")
def upstream():
    return load_file(maker.FIXTURE)


def close(ours, theirs):
    assert_close_to_rounding(ours, theirs, ENCODER_TERMS)


def is_real(given):
    """(batch, length), where tokens are not padding."""
    mask = given["attention_mask"]
    return torch.ones(3, 7, dtype=torch.bool) if mask.dim() == 3 else mask == 1


def model_and_batch(family, kind="classifier", case="right", **settings):
    return maker.build(family, kind, **settings), maker.draw_inputs(family, case)


# ---- upstream's numbers ----


@pytest.mark.parametrize(("family", "case"), CASES)
def test_backbones_give_upstreams_numbers(upstream, family, case):
    given = maker.draw_inputs(family, case)
    theirs = {
        name.removeprefix(f"{family}/{case}/backbone/"): tensor
        for name, tensor in upstream.items()
        if name.startswith(f"{family}/{case}/backbone/")
    }
    model, real = maker.build(family, "backbone"), is_real(given)
    output = model(**given, **ALL_OUTPUTS)
    assert len(output.attentions) == 2
    for layer, probabilities in enumerate(output.attentions):
        close(probabilities, theirs[f"attentions.{layer}"])
    for layer, state in enumerate(output.hidden_states):
        if f"hidden_states.{layer}" in theirs:
            close(state[real], theirs[f"hidden_states.{layer}"][real])
        assert not state[~real].any()
    assert output.last_hidden_state is output.hidden_states[-1]
    for bare in (output, model(**given)):
        close(bare.last_hidden_state[real], theirs["last_hidden_state"][real])
        assert not bare.last_hidden_state[~real].any()
        if family == "roberta":
            close(bare.pooler_output, theirs["pooler_output"])


@pytest.mark.parametrize(("family", "case"), CASES)
@pytest.mark.parametrize("asked", [{}, ALL_OUTPUTS])
def test_heads_give_upstreams_logits(upstream, family, case, asked):
    given = maker.draw_inputs(family, case)
    logits = maker.build(family, "classifier")(**given, **asked).logits
    close(logits, upstream[f"{family}/{case}/classifier/logits"])
    logits, real = maker.build(family, "mlm")(**given, **asked).logits, is_real(given)
    close(logits[:, :, ::12][real], upstream[f"{family}/{case}/mlm/logits"][real])
    assert not logits[~real].any()


# ---- the two paths ----


@pytest.mark.parametrize("case", ["right", "left"])
@pytest.mark.parametrize("kind", ["mlm", "classifier"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_do_not_depend_on_the_outputs_asked_for(family, kind, case):
    """With padding on the right, only attentions need the padded path."""
    model, given = model_and_batch(family, kind, case, **NO_DROPOUT)
    steps = []
    for asked in ({}, {"output_hidden_states": True}, {"output_attentions": True}, ALL_OUTPUTS):
        model.train().zero_grad()
        output = model(**given, labels=LABELS[kind], **asked)
        output.loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        steps.append({"loss": output.loss, "logits": output.logits, **gradients})
    expected, *others = steps
    for step in others:
        assert step.keys() == expected.keys()
        for name, tensor in expected.items():
            assert_close_to_rounding(step[name], tensor, 4 * ENCODER_TERMS)


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_drops_probabilities_in_training(family):
    """The rest is scaled by 1 / (1 - p), so that the mean is the result in evaluation."""
    settings = {"attention_probs_dropout_prob": 0.5, "hidden_dropout_prob": 0.0}
    model, given = model_and_batch(family, case="left", num_hidden_layers=1, **settings)
    gathered = []
    model.base_model.encoder.layer[0].attention.self.register_forward_hook(
        lambda _, __, output: gathered.append(output.detach())
    )
    model(**given)
    model.train()
    torch.manual_seed(0)
    for _ in range(100):
        model(**given)
    expected, found = gathered[0], torch.stack(gathered[1:])
    assert not torch.equal(found[0], found[1])
    assert ((found.mean(dim=0) - expected).abs() < 6 * found.std(dim=0) / 10 + 1e-6).all()


def test_a_mask_of_pairs_is_used_next_to_packed_rows():
    model, given = model_and_batch("roberta")
    given["attention_mask"] = torch.ones(3, 7, 7).tril()
    rows = PackedRows(torch.ones(3, 7))
    assert torch.equal(model(**given, packed_rows=rows).logits, model(**given).logits)


@pytest.mark.parametrize("case", ["left", "holes"])
@pytest.mark.parametrize("kind", ["mlm", "classifier"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_do_not_change_a_bit(family, kind, case):
    model, given = model_and_batch(family, kind, case)
    labels, mask = LABELS[kind], given["attention_mask"]
    rows = PackedRows(mask)
    if kind == "mlm":
        rows = rows.with_targets(labels != -100)
    expected = model(**given, labels=labels)
    for passed in ({"attention_mask": mask}, {}):
        output = model(given["input_ids"], **passed, labels=labels, packed_rows=rows)
        assert_same_bits(dict(output), dict(expected))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_masked_lm_gives_the_same_with_padding_on_either_side(family):
    """RoBERTa counts tokens, not columns; DeBERTa-v2 here has no absolute positions."""
    model, right = model_and_batch(family, "mlm", position_biased_input=False)
    shifts = (right["attention_mask"] == 0).sum(1).tolist()
    left = {
        name: torch.stack([row.roll(by) for row, by in zip(x, shifts, strict=True)])
        for name, x in right.items()
    }
    ours, expected = model(**left).logits, model(**right).logits
    close(ours[left["attention_mask"] == 1], expected[right["attention_mask"] == 1])


@pytest.mark.parametrize("of", [torch.bool, torch.float32, lambda mask: 3 * mask])
@pytest.mark.parametrize("family", FAMILIES)
def test_masks_may_have_any_dtype_and_nonzero_value(family, of):
    model, given = model_and_batch(family, "backbone", "left")
    expected = dict(enumerate(model(**given, **ALL_OUTPUTS).hidden_states))
    mask = given["attention_mask"]
    given["attention_mask"] = mask.to(of) if isinstance(of, torch.dtype) else of(mask)
    assert_same_bits(dict(enumerate(model(**given, **ALL_OUTPUTS).hidden_states)), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_of_padding_alone_changes_no_other_row(family):
    model, given = model_and_batch(family)
    expected = model(**given).logits
    given["attention_mask"][2] = 0
    logits = model(**given, labels=LABELS["classifier"]).logits
    close(logits[:2], expected[:2])
    assert logits.isfinite().all()
    assert maker.build(family, "mlm")(**given, labels=LABELS["mlm"]).loss.isfinite()


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_layers_give_the_same_outputs_and_gradients(family):
    outputs = []
    for recompute in (False, True):
        settings = {"gradient_checkpointing": recompute, **NO_DROPOUT}
        model, given = model_and_batch(family, **settings)
        output = model.train()(**given, labels=LABELS["classifier"], **ALL_OUTPUTS)
        # This loss depends on a layer's attention probabilities, too.
        (output.loss + output.attentions[1].square().sum()).backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        shown = {str(i): x for i, x in enumerate((*output.attentions, *output.hidden_states))}
        outputs.append({**gradients, **shown})
    assert_same_bits(*outputs)


@pytest.mark.parametrize("case", ["right", "holes"])
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_and_attentions_get_gradients(family, case):
    model, given = model_and_batch(family, "backbone", case)
    output = model(**given, **ALL_OUTPUTS)
    shown = (output.hidden_states[0], output.attentions[0])
    for tensor in shown:
        tensor.retain_grad()
    output.last_hidden_state[0, 1].sum().backward()
    for tensor in shown:
        assert tensor.grad[0].any()


# ---- outputs and arguments ----


@pytest.mark.parametrize("kind", ["backbone", "mlm", "classifier"])
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_and_attentions_are_last_in_the_tuple(family, kind):
    model, given = model_and_batch(family, kind, "left")
    output = model(**given, **ALL_OUTPUTS)
    as_tuple = model(**given, **ALL_OUTPUTS, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert len(as_tuple) == len(output) == (4 if hasattr(output, "pooler_output") else 3)
    assert [len(each) for each in as_tuple[-2:]] == [3, 2]
    assert torch.equal(as_tuple[-1][1], output.attentions[1])
    assert model(**given).attentions is None
    assert len(model(**given, output_attentions=True)) == len(output) - 1


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_can_ask_for_attentions_and_tuples(family, tmp_path):
    model, given = model_and_batch(family, output_attentions=True)
    assert len(model(**given).attentions) == 2
    assert model(**given, output_attentions=False).attentions is None
    model.save_pretrained(tmp_path)
    for again in ({}, {"output_attentions": False}):
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path, **again)
        assert (model(**given).attentions is None) == bool(again)
    model, _ = model_and_batch(family, torchscript=True)
    assert isinstance(model(**given), tuple)
    assert model(**given, return_dict=True).logits.shape == (3, 3)


def test_one_head_mask_for_all_layers():
    model, given = model_and_batch("roberta", case="holes")
    mask = torch.tensor([0.0, 1.0, 1.0, 0.5])
    shown = model(**given, head_mask=mask, output_attentions=True)
    for probabilities in shown.attentions:
        sums = probabilities.sum(-1).mean((0, 2))
        close(sums, mask)
    assert torch.equal(model(**given, head_mask=mask.repeat(2, 1)).logits, shown.logits)
    mask.requires_grad_()
    model(**given, head_mask=mask).logits.sum().backward()
    assert mask.grad.all()


@pytest.mark.parametrize("family", FAMILIES)
def test_one_row_of_positions_and_types_for_all(family):
    model, given = model_and_batch(family, type_vocab_size=2, position_biased_input=True)
    row = {"position_ids": torch.arange(2, 9)[None], "token_type_ids": torch.ones(1, 7).long()}
    every = {name: x.repeat(3, 1) for name, x in row.items()}
    assert torch.equal(model(**given, **row).logits, model(**given, **every).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_of_the_ids_give_the_same_logits(family):
    """Without padding, since RoBERTa's positions skip it only if there are ids."""
    model = maker.build(family, "classifier")
    ids = maker.draw_inputs(family, "right")["input_ids"][:1]
    embeds = model.base_model.embeddings.word_embeddings(ids)
    assert torch.equal(model(inputs_embeds=embeds).logits, model(ids).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_consistency_training_on_embeddings(family):
    """R-Drop gives twice the batch's loss; Cutoff is refused, as there are no ids to hide."""
    model, given = model_and_batch(family, case="embeds", reg_loss_wgt=1.0, **NO_DROPOUT)
    output = model.train()(**given, labels=LABELS["classifier"], **ALL_OUTPUTS)
    once = model.eval()(**given, labels=LABELS["classifier"])
    close(output.loss, 2 * once.loss)
    assert [len(x) for x in (output.logits, *output.attentions, *output.hidden_states)] == [3] * 6
    settings = {"masking_prob": 0.5, "unk_token_id": 3, "special_token_ids": [0]}
    model, given = model_and_batch(family, case="embeds", **settings)
    with pytest.raises(ValueError, match="masking_prob hides tokens by their ids: give input_ids"):
        model.train()(**given, labels=LABELS["classifier"])


def test_a_backbone_without_a_pooler_has_none_in_its_place():
    model, given = model_and_batch("roberta", "mlm", "left")
    output = model.roberta(**given, **ALL_OUTPUTS)
    assert output.pooler_output is None
    last, pooled, states, attentions = model.roberta(**given, **ALL_OUTPUTS, return_dict=False)
    assert pooled is None
    assert torch.equal(last, output.last_hidden_state)
    assert (len(states), len(attentions)) == (3, 2)


# ---- what is refused ----


def test_relative_positions_of_roberta_are_refused():
    with pytest.raises(ValueError, match="position_embedding_type is 'relative_key'"):
        maker.build("roberta", "backbone", position_embedding_type="relative_key")


@pytest.mark.parametrize("family", FAMILIES)
def test_several_labels_per_text_are_refused(family):
    """Upstream's pipelines apply a sigmoid to each label of such a model."""
    with pytest.raises(ValueError, match="problem_type is 'multi_label_classification'"):
        maker.build(family, "classifier", problem_type="multi_label_classification")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"input_ids": None}, "either input_ids or inputs_embeds: neither were given"),
        ({"inputs_embeds": torch.ones(3, 7, 32)}, "both were given"),
        ({"attention_mask": torch.ones(3, 7, 6)}, r"attention_mask is \(3, 7, 6\)"),
        ({"attention_mask": torch.ones(3, 1, 7, 7)}, r"is \(3, 1, 7, 7\)"),
        ({"attention_mask": torch.zeros(3, 6)}, r"is \(3, 6\), the batch is \(3, 7\)"),
    ],
)
def test_wrong_arguments_are_refused(family, changed, message):
    model, given = model_and_batch(family)
    with pytest.raises(ValueError, match=message) as raised:
        model(**{**given, **changed})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["token_type_ids", "position_ids"])
@pytest.mark.parametrize("family", FAMILIES)
def test_another_shape_than_the_batch_s_is_refused(family, name):
    model, given = model_and_batch(family, type_vocab_size=2, position_biased_input=True)
    with pytest.raises(ValueError, match=r"batch is \(3, 7\), but a tensor is for \(3, 6\)"):
        model(**{**given, name: torch.ones(3, 6, dtype=torch.long)}, output_attentions=True)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(3, 4), r"head_mask is \(3, 4\); it has to be \(heads,\) or \(layers, heads\)"),
        (torch.ones(2, 3), "head_mask is for 3 heads, a layer has 4"),
    ],
)
def test_wrong_masks_of_heads_are_refused(mask, message):
    model, given = model_and_batch("roberta")
    with pytest.raises(ValueError, match=message):
        model(**given, head_mask=mask)


def test_deberta_refuses_head_masks_and_masks_of_pairs():
    model, given = model_and_batch("deberta")
    with pytest.raises(TypeError, match="DeBERTa-v2 has no head_mask"):
        model(**given, head_mask=torch.ones(2, 4))
    pairs = maker.draw_inputs("roberta", "pairs")
    with pytest.raises(ValueError, match=r"\(3, 7, 7\): DeBERTa-v2 takes \(batch, length\)"):
        model(**pairs)
