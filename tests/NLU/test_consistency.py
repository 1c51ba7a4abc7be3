"""Consistency training: its loss by the plain formula, the tokens it hides, and where it is off."""

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close_to_rounding
from encoder_options import ENCODER_TERMS, NO_DROPOUT

from transformers import Trainer, TrainingArguments, consistency

FAMILIES = ("roberta", "deberta")
SPECIAL = [0, 1, 2, 3, 4]  # 1 is the padding of `batch`, 2 its first token
HIDING = {"masking_prob": 0.5, "unk_token_id": 3, "special_token_ids": SPECIAL}


@pytest.fixture
def build(make_classifier):
    """A classifier of three classes in training mode, without dropout unless it is given."""

    def make(family, **settings):
        settings = {**NO_DROPOUT, "num_labels": 3, "pad_token_id": 1, **settings}
        return make_classifier(family, **settings).train()

    return make


def plain_loss(p1, p2, labels, weight):
    """The formula of the release, term by term."""
    m = (p1 + p2) / 2
    loss = F.cross_entropy(p1, labels) + F.cross_entropy(p2, labels)
    for p in (p1, p2):
        q, log_p = m.softmax(1), p.log_softmax(1)
        kl = (q * (q.log() - log_p)).sum() / q.numel()
        loss = loss + 0.5 * weight * kl
    return loss


def close(ours, theirs, terms=ENCODER_TERMS):
    assert_close_to_rounding(ours, theirs, terms)


# ---- the formula ----


@pytest.mark.parametrize("weight", [0.0, 1.0, 3.0])
def test_loss_and_gradients_are_the_plain_formula_s(weight):
    generator = torch.Generator().manual_seed(1)
    first, second = (
        torch.randn(5, 4, generator=generator, dtype=torch.float64).mul(3).requires_grad_()
        for _ in "12"
    )
    labels = torch.tensor([0, 3, 1, 1, 2])
    ours = consistency.consistency_loss(first, second, labels, weight)
    theirs = plain_loss(first, second, labels, weight)
    close(ours, theirs, 1)
    gradients = [torch.autograd.grad(loss, (first, second)) for loss in (ours, theirs)]
    for mine, expected in zip(*gradients, strict=True):
        close(mine, expected, 1)


def test_the_loss_is_the_release_s_by_kl_div():
    """Each KL is `F.kl_div` of logarithms and the mean's softmax, averaged over all entries."""
    first, second = torch.tensor([[1.0, -2.0, 0.5]]), torch.tensor([[0.0, 1.0, 3.0]])
    labels, mean = torch.tensor([2]), torch.tensor([[0.5, -0.5, 1.75]]).softmax(1)
    with pytest.warns(UserWarning, match="batchmean"):
        parts = [F.kl_div(p.log_softmax(1), mean, reduction="mean") for p in (first, second)]
    expected = F.cross_entropy(first, labels) + F.cross_entropy(second, labels)
    close(
        consistency.consistency_loss(first, second, labels, 0.8),
        expected + 0.5 * 0.8 * sum(parts),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_without_dropout_and_masking_it_is_twice_the_plain_loss(build, batch, family):
    plain, twice = build(family), build(family, reg_loss_wgt=1.0)
    losses = []
    for model in (plain, twice):
        output = model(**batch)
        output.loss.backward()
        losses.append(output.loss)
        close(output.logits, plain(**batch).logits)
    close(losses[1], 2 * losses[0])
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            close(twice.get_parameter(name).grad, 2 * parameter.grad, 2 * ENCODER_TERMS)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_second_pass_sees_hidden_tokens(build, batch, family, monkeypatch):
    """Computes both passes one after the other, and their loss by the formula."""
    seen = []
    hide = consistency.hide_tokens
    monkeypatch.setattr(
        consistency, "hide_tokens", lambda *given: seen.append(hide(*given)) or seen[-1]
    )
    model = build(family, reg_loss_wgt=2.0, **HIDING)
    loss = model(**batch).loss
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    first = model(**given).logits
    second = model(**{**given, "input_ids": seen[0]}).logits
    assert (first - second).abs().max() > 0.1
    close(loss, plain_loss(first, second, batch["labels"], 2.0))


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_makes_two_passes_differ(build, batch, family, monkeypatch):
    passes = []
    loss_of = consistency.consistency_loss
    monkeypatch.setattr(
        consistency, "consistency_loss", lambda *given: passes.append(given) or loss_of(*given)
    )
    model = build(family, reg_loss_wgt=1.0, hidden_dropout_prob=0.1)
    torch.manual_seed(1)
    output = model(**batch)
    first, second, labels, weight = passes[0]
    assert not torch.allclose(first, second, atol=1e-3)
    close(output.loss, plain_loss(first, second, labels, weight))
    assert torch.equal(output.logits, first)


@pytest.mark.parametrize("family", FAMILIES)
def test_both_passes_are_one_forward_of_twice_the_rows(build, batch, family):
    model, rows = build(family, reg_loss_wgt=1.0), []
    model.base_model.embeddings.register_forward_hook(lambda *_: rows.append(_[2].shape[0]))
    model(**batch)
    assert rows == [2 * int(batch["attention_mask"].sum())]


# ---- hidden tokens ----


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_tokens_are_hidden_as_often_as_asked_and_special_ones_never(build, share):
    config = build("roberta", **{**HIDING, "masking_prob": share}).config
    ids = torch.arange(60).repeat(400, 1)
    torch.manual_seed(0)
    hidden = consistency.hide_tokens(ids, config)
    changed = hidden != ids
    assert (hidden[changed] == 3).all()
    assert not changed[:, SPECIAL].any()
    assert changed[:, 5:].double().mean() == pytest.approx(share, abs=0.02)
    assert torch.equal(ids, torch.arange(60).repeat(400, 1))
    assert not torch.equal(hidden, consistency.hide_tokens(ids, config)) or share == 1


def test_no_random_numbers_are_drawn_without_masking(build, batch):
    model = build("roberta", reg_loss_wgt=1.0)
    state = torch.get_rng_state()
    model(**batch)
    assert torch.equal(state, torch.get_rng_state())


# ---- where it is off ----


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("settings", [{"reg_loss_wgt": 1.0}, HIDING, {**HIDING, "reg_loss_wgt": 1}])
def test_evaluation_is_the_plain_loss(build, batch, family, settings):
    model, plain = build(family, **settings).eval(), build(family).eval()
    ours, theirs = model(**batch), plain(**batch)
    assert torch.equal(ours.loss, theirs.loss)
    assert torch.equal(ours.logits, theirs.logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_labels_there_is_one_pass(build, batch, family):
    model = build(family, reg_loss_wgt=1.0)
    del batch["labels"]
    assert torch.equal(model(**batch).logits, build(family)(**batch).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_other_than_the_loss_are_the_first_pass_s(build, batch, family):
    model, plain = build(family, reg_loss_wgt=1.0), build(family)
    output = model(**batch, output_hidden_states=True)
    expected = plain(**batch, output_hidden_states=True)
    assert len(output.hidden_states) == 3
    for ours, theirs in zip(output.hidden_states, expected.hidden_states, strict=True):
        close(ours, theirs)
    loss, logits = model(**batch, return_dict=False)
    close(loss, output.loss)
    close(logits, expected.logits)


def test_states_and_attentions_are_of_the_pass_that_gives_the_logits(build, batch):
    settings = {"reg_loss_wgt": 1.0, "hidden_dropout_prob": 0.0}
    model = build("roberta", **settings, attention_probs_dropout_prob=0.5)
    output = model(**batch, output_hidden_states=True, output_attentions=True)
    rows = len(batch["labels"])
    assert all(len(each) == rows for each in (*output.hidden_states, *output.attentions))
    close(model.classifier(output.hidden_states[-1][:, 0]), output.logits)


# ---- what is refused ----


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_have_no_probabilities(build, batch, family):
    model = build(family, num_labels=1, reg_loss_wgt=1.0)
    with pytest.raises(ValueError, match="probabilities of classes, but a score has none"):
        model(**batch)
    assert model.eval()(**batch).loss > 0


@pytest.mark.parametrize("lacking", ["unk_token_id", "special_token_ids"])
def test_masking_needs_to_know_the_tokens(build, batch, lacking):
    settings = {name: value for name, value in HIDING.items() if name != lacking}
    with pytest.raises(ValueError, match="masking_prob needs unk_token_id and special_token_ids"):
        build("deberta", **settings)(**batch)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reg_loss_wgt": -1.0}, "reg_loss_wgt must be a number from 0 on, not -1.0"),
        ({"reg_loss_wgt": float("nan")}, "reg_loss_wgt must be"),
        ({"masking_prob": 1.5}, r"masking_prob must lie in \[0, 1\], not 1.5"),
    ],
)
def test_invalid_settings_are_refused(build, settings, message):
    with pytest.raises(ValueError, match=message):
        build("roberta", **settings)


@pytest.mark.parametrize(
    ("settings", "arguments", "message"),
    [
        ({"reg_loss_wgt": 1.0}, {"label_smoothing_factor": 0.1}, "do not go together"),
        ({"reg_loss_wgt": 1.0, "num_labels": 1}, {}, "a score has none"),
        ({"masking_prob": 0.1}, {}, "masking_prob needs unk_token_id"),
    ],
)
def test_the_trainer_refuses_bad_settings_at_once(build, tmp_path, settings, arguments, message):
    args = TrainingArguments(str(tmp_path / "out"), report_to=["none"], **arguments)
    with pytest.raises(ValueError, match=message):
        Trainer(build("roberta", **settings), args)


def test_settings_are_saved_in_the_config(build, tmp_path):
    model = build("roberta", reg_loss_wgt=1.0, **HIDING)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    for name in ("reg_loss_wgt", "masking_prob", "unk_token_id", "special_token_ids"):
        assert getattr(again.config, name) == getattr(model.config, name)
    off = type(model).from_pretrained(tmp_path, reg_loss_wgt=0.0, masking_prob=0.0)
    assert not consistency.asks_for(off.config)
