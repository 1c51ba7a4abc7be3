"""RoBERTa: upstream's numbers, padding without effect, dropout, losses, outputs, initialization."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close_to_rounding
from encoder_options import ENCODER_TERMS, NO_DROPOUT
from half_products import assert_as_exact_as_plain
from roberta_cases import CASES, KINDS, LABELS, LORA, close, real

from loralib.nn.fast_paths import fast_paths_off
from loralib.nn.packing import _attend_one_by_one, _attend_padded
from transformers import (
    AutoModelForSequenceClassification,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaModel,
)
from transformers.models.roberta.modeling_roberta import create_position_ids_from_input_ids

# ---- upstream's numbers ----


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_upstreams(upstream, build, arguments, kind, case):
    given = arguments(case)
    ours = build(kind)(**given).logits
    theirs = upstream[f"outputs/{kind}/{case}/logits"]
    assert ours.shape == theirs.shape
    if kind == "mlm":
        ours, theirs = real(ours, given), real(theirs, given)
    assert theirs.numel() == 1 or theirs.std() > 0.1
    close(ours, theirs)


@pytest.mark.parametrize("case", ["padded", "types", "holes"])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_upstreams(upstream, build, arguments, kind, case):
    labels = upstream[f"inputs/{LABELS[kind]}"]
    output = build(kind)(**arguments(case), labels=labels)
    close(output.loss, upstream[f"outputs/{kind}/{case}/loss"])


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_and_pooler_are_upstreams(upstream, build, arguments, case):
    given = arguments(case)
    output = build("backbone")(**given, output_hidden_states=True)
    close(output.pooler_output, upstream[f"outputs/backbone/{case}/pooler_output"])
    assert len(output.hidden_states) == 3
    for layer, state in enumerate(output.hidden_states):
        theirs = upstream[f"outputs/backbone/{case}/hidden_states.{layer}"]
        close(real(state, given), real(theirs, given))
    assert torch.equal(output.last_hidden_state, output.hidden_states[-1])
    if "attention_mask" in given:
        assert not output.last_hidden_state[given["attention_mask"] == 0].any()


@pytest.mark.parametrize("case", ["padded", "holes"])
def test_masked_lm_logits_are_those_of_the_targets_alone_in_training(
    upstream, build, arguments, case
):
    labels = upstream["inputs/tokens_wanted"]
    model, given = build("mlm", **NO_DROPOUT), arguments(case)
    is_target = (labels != -100) & (given["attention_mask"] == 1)
    bare = model(**given).logits
    evaluated = model(**given, labels=labels)
    assert torch.equal(evaluated.logits, bare)
    for trains, asked, targets_only in (
        (True, None, True),
        (False, True, True),
        (True, False, False),
    ):
        output = model.train(trains)(**given, labels=labels, targets_only=asked)
        close(output.loss, evaluated.loss)
        close(output.logits, bare[is_target] if targets_only else bare)
    # Without labels there are no targets.
    close(model.train()(**given).logits, bare)
    close(model.eval()(**given, targets_only=True).logits, bare)


# ---- padding ----


def test_padding_does_not_matter(upstream, build, arguments):
    model, given = build("classifier"), arguments("padded")
    expected = model(**given).logits
    # A position is the number of real ids before it, so only ids after the last token may change.
    given["input_ids"] = given["input_ids"].masked_fill(given["attention_mask"] == 0, 7)
    assert torch.equal(model(**given).logits, expected)
    wider = {name: F.pad(t, (0, 9), value=int(name == "input_ids")) for name, t in given.items()}
    close(model(**wider).logits, expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_the_mask_may_have_any_dtype(build, arguments, dtype):
    model, given = build("classifier"), arguments("padded")
    expected = model(**given).logits
    given["attention_mask"] = given["attention_mask"].to(dtype)
    assert torch.equal(model(**given).logits, expected)


def test_explicit_positions_and_types(build, arguments):
    model, given = build("classifier"), arguments("padded")
    expected = model(**given).logits
    ids = given["input_ids"]
    positions = create_position_ids_from_input_ids(ids, 1)
    assert positions[1].tolist() == [2, 3, 4] + [1] * 15
    after = create_position_ids_from_input_ids(ids, 1, past_key_values_length=5)
    assert after[1].tolist() == [7, 8, 9] + [1] * 15
    same = model(**given, position_ids=positions, token_type_ids=torch.zeros_like(ids)).logits
    assert torch.equal(same, expected)
    other = model(**given, position_ids=positions.flip(0)).logits
    assert not torch.allclose(other, expected)


@pytest.mark.parametrize("kind", ["classifier", "regressor"])
def test_first_token_alone_gives_the_full_paths_logits(build, arguments, kind):
    model, given = build(kind, **LORA), arguments("holes")
    output = model(**given, output_hidden_states=True)
    close(model(**given).logits, output.logits)
    assert len(output.hidden_states) == 3
    assert output.hidden_states[-1].shape == (4, 18, 32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"attention_mask": torch.ones(3)}, r"must be \(batch, length\)"),
        (
            {"attention_mask": torch.ones(1, 4)},
            r"attention_mask is \(1, 4\), the batch is \(1, 3\)",
        ),
        ({"attention_mask": torch.ones(3, 1)}, r"attention_mask is \(3, 1\)"),
        ({"token_type_ids": torch.zeros(1, 2).long()}, r"the batch is \(1, 2\)"),
    ],
)
def test_inputs_of_mismatched_shapes_are_refused(build, changed, message):
    with pytest.raises(ValueError, match=message) as error:
        build("classifier")(input_ids=torch.tensor([[0, 5, 2]]), **changed)
    assert "\n" not in str(error.value)


def test_a_text_that_is_too_long_is_refused(build):
    model = build("classifier")
    ids = torch.full((2, 30), 1)
    ids[:, :18] = 5
    assert model(ids, (ids != 1).long()).logits.shape == (2, 3)
    ids[1, 18] = 5
    with pytest.raises(ValueError, match="has 19 tokens, the model has positions for 18"):
        model(ids, (ids != 1).long())


# ---- attention ----


def test_either_path_of_attention_gives_upstreams_logits(monkeypatch, upstream, build, arguments):
    model, given = build("classifier"), arguments("holes")
    roberta = importlib.import_module("transformers.models.roberta.modeling_roberta")
    for path in (_attend_one_by_one, _attend_padded):
        monkeypatch.setattr(roberta, "attend", path)
        close(model(**given).logits, upstream["outputs/classifier/holes/logits"])


# ---- dropout ----


def plain_attention(q, k, v, heads, keep):
    """softmax(q kᵀ / √d) v of one row, head by head; `keep` scales the probabilities."""
    width = q.shape[1] // heads
    out = []
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        weights = (q[:, part] @ k[:, part].T / width**0.5).softmax(dim=1)
        out.append(weights * keep[head] @ v[:, part])
    return torch.cat(out, dim=1)


def test_every_dropout_is_where_the_formula_has_it(drawn_masks, build, arguments):
    """Recomputes a forward pass in training by the plain formula, with the masks that it drew."""
    model = build("classifier", hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.4)
    given = {"input_ids": arguments("row2")["input_ids"]}
    torch.manual_seed(3)
    ours = model.train()(**given, output_hidden_states=True).logits
    masks = iter(drawn_masks)

    def drop(x):
        keep = next(masks)
        assert keep.max() == pytest.approx(1 / 0.8, abs=1e-4)
        return x * keep

    embeddings = model.roberta.embeddings
    ids = given["input_ids"][0]
    x = embeddings.word_embeddings.weight[ids] + embeddings.token_type_embeddings.weight[0]
    x = x + embeddings.position_embeddings.weight[2 : 2 + len(ids)]
    x = drop(embeddings.LayerNorm(x))
    for layer in model.roberta.encoder.layer:
        attention = layer.attention
        q, k, v = (getattr(attention.self, name)(x) for name in ("query", "key", "value"))
        keep = next(masks)
        assert keep.max() == pytest.approx(1 / 0.6, abs=1e-4)
        mixed = plain_attention(q, k, v, 4, keep.view(4, len(ids), len(ids)))
        x = attention.output.LayerNorm(drop(attention.output.dense(mixed)) + x)
        inner = F.gelu(layer.intermediate.dense(x))
        x = layer.output.LayerNorm(drop(layer.output.dense(inner)) + x)
    head = model.classifier
    x = drop(torch.tanh(head.dense(drop(x[:1]))))
    assert next(masks, None) is None
    close(ours, head.out_proj(x))
    assert not torch.allclose(ours, model.eval()(**given).logits, atol=0.05)


def test_training_gives_the_plain_path_s_loss_and_gradients(
    drawn_masks, monkeypatch, build, arguments
):
    """With dropout, the plain path draws its masks with PyTorch alone."""
    packing, found = importlib.import_module("loralib.nn.packing"), []
    calls, attend_rows = [], packing.attend_rows
    monkeypatch.setattr(packing, "attend_rows", lambda *a: calls.append(a) or attend_rows(*a))
    given = arguments("padded")
    given["labels"] = torch.arange(len(given["input_ids"])) % 3
    for is_off in (True, False):
        model = build("classifier", **LORA, **NO_DROPOUT).train()
        model.train_only(["lora"])
        with fast_paths_off(is_off):
            loss = model(**given).loss
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append({"loss": loss, **grads})
        assert bool(calls) == (not is_off)
    theirs, ours = found
    assert ours.keys() == theirs.keys()
    largest = max(tensor.abs().max().item() for tensor in theirs.values())
    for name, tensor in theirs.items():
        assert_close_to_rounding(ours[name], tensor, 2 * ENCODER_TERMS, torch.float32, largest)
    with fast_paths_off():
        build("classifier", **LORA).train()(**given)
    assert drawn_masks == []


def test_in_bfloat16_training_is_as_exact_as_the_plain_path(build, arguments):
    given = arguments("padded")
    given["labels"] = torch.arange(len(given["input_ids"])) % 3
    model = build("classifier", **LORA, **NO_DROPOUT).train()
    model.train_only(["lora"])
    # Attention in one operation rounds scores and probabilities, which PyTorch keeps in float32.
    assert_as_exact_as_plain(model, lambda own: own(**given).loss, ratio=2, off=0.02)


def test_dropout_follows_the_seed_and_is_off_in_evaluation(build, arguments):
    model, given = build("classifier", **LORA), arguments("padded")
    evaluated = model(**given).logits
    assert torch.equal(model(**given).logits, evaluated)
    model.train()
    runs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        runs.append(model(**given).logits)
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


# ---- losses ----


def test_labels_may_be_a_column(upstream, build, arguments):
    for kind in ("classifier", "regressor"):
        model, labels = build(kind), upstream[f"inputs/{LABELS[kind]}"]
        as_row = model(**arguments("padded"), labels=labels).loss
        as_column = model(**arguments("padded"), labels=labels[:, None]).loss
        assert torch.equal(as_row, as_column)


def test_regression_takes_integer_scores(upstream, build, arguments):
    output = build("regressor")(**arguments("padded"), labels=torch.tensor([1, 2, 3, 4]))
    expected = (output.logits[:, 0] - torch.tensor([1.0, 2, 3, 4])).square().mean()
    close(output.loss, expected)


# ---- outputs ----


def test_outputs_are_tuples_without_return_dict(upstream, build, arguments):
    given = arguments("padded")
    labels = upstream["inputs/classes"]
    model = build("classifier")
    named = model(**given, labels=labels)
    loss, logits = model(**given, labels=labels, return_dict=False)
    assert torch.equal(loss, named.loss)
    assert torch.equal(logits, named.logits)
    assert len(model(**given, return_dict=False)) == 1
    model.config.return_dict = False
    assert isinstance(model(**given), tuple)

    last, pooled, states = build("backbone")(**given, return_dict=False, output_hidden_states=True)
    assert (last.shape, pooled.shape, len(states)) == ((4, 18, 32), (4, 32), 3)
    (logits,) = build("mlm")(**given, return_dict=False)
    assert logits.shape == (4, 18, 48)


def test_the_config_can_ask_for_hidden_states(build, arguments):
    model = build("classifier", output_hidden_states=True)
    assert len(model(**arguments("padded")).hidden_states) == 3
    assert model(**arguments("padded"), output_hidden_states=False).hidden_states is None


def test_backbone_without_pooler(upstream):
    model = RobertaModel(RobertaConfig(**upstream["config"]), add_pooling_layer=False)
    output = model(torch.tensor([[0, 5, 2]]))
    assert list(output) == ["last_hidden_state"]
    assert model.base_model is model


# ---- building ----


def test_the_seed_determines_the_weights(upstream):
    states = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        config = RobertaConfig(**upstream["config"], **LORA)
        states.append(AutoModelForSequenceClassification.from_config(config).state_dict())
    name = "roberta.encoder.layer.0.attention.self.query."
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert not torch.equal(states[0][f"{name}weight"], states[2][f"{name}weight"])
    assert not torch.equal(states[0][f"{name}lora_A"], states[2][f"{name}lora_A"])
    assert not states[0][f"{name}lora_B"].any()
    assert not states[0]["roberta.embeddings.word_embeddings.weight"][1].any()
    assert 0.015 < states[0][f"{name}weight"].std() < 0.025


def test_language_model_head_is_tied(upstream):
    model = RobertaForMaskedLM(RobertaConfig(**upstream["config"]))
    assert model.lm_head.decoder.weight is model.roberta.embeddings.word_embeddings.weight
    assert model.lm_head.decoder.bias is model.lm_head.bias
    assert model.num_parameters() == sum(p.numel() for p in set(model.parameters()))


def test_heads_have_to_divide_the_width():
    with pytest.raises(ValueError, match="hidden_size 10 is not a multiple of 4 heads"):
        RobertaConfig(hidden_size=10, num_attention_heads=4)
