"""Heads for tags, answers, choices and next tokens: upstream's numbers, padding, training."""

import make_plain_fixture as plain_maker
import pytest
import torch
import torch.nn.functional as F
from adapted_encoders import CROSS, settings_of
from compare import assert_same_bits
from encoder_options import NO_DROPOUT
from half_products import HalfProducts, choose_processor
from head_cases import (
    INPUTS,
    PAIRS,
    TRAINED,
    build,
    close,
    given,
    labels_of,
    logits_of,
    maker,
    real,
    upstream,
    wider,
    without_labels,
)

import transformers
from loralib.nn.packing import PackedRows
from loralib.training.precision import Precision
from transformers.data.data_collator import PackedCollator
from transformers.modeling_losses import classification_loss, mean_loss

CASES = [(*pair, case) for pair in PAIRS for case in maker.cases(pair[1], INPUTS)]
# Upstream counts padding among the possible answers, and holes among the tokens that predict.
SAME_LOSS = [
    (family, head, case)
    for family, head, case in CASES
    if head != "question_answering" or case not in ("padded", "holes")
    if head != "causal_lm" or case != "holes"
]


# ---- upstream's numbers ----


@pytest.mark.parametrize(("family", "head", "case"), CASES)
def test_logits_are_upstreams(family, head, case):
    arguments = given(head, case)
    output = build(family, head)(**arguments)
    for name in logits_of(head):
        theirs = upstream(family, head, case, name)
        assert output[name].shape == theirs.shape
        close(real(output[name], arguments), real(theirs, arguments))


@pytest.mark.parametrize(("family", "head", "case"), SAME_LOSS)
@pytest.mark.parametrize("training", [False, True])
def test_losses_are_upstreams(family, head, case, training):
    model = build(family, head, **NO_DROPOUT).train(training)
    close(model(**given(head, case)).loss, upstream(family, head, case, "loss"))


@pytest.mark.parametrize("loss", [classification_loss, mean_loss])
def test_losses_of_logits_in_half_precision_are_computed_in_float32(loss):
    logits, labels = torch.linspace(-1, 1, 12).view(4, 3).bfloat16(), torch.tensor([0, 1, 2, 0])
    assert_same_bits({"loss": loss(logits, labels)}, {"loss": loss(logits.float(), labels)})


@pytest.mark.parametrize(
    ("loss", "classes"), [(classification_loss, 3), (classification_loss, 1), (mean_loss, 3)]
)
def test_losses_of_logits_in_float64_are_computed_in_it(loss, classes):
    logits = torch.linspace(-1, 1, 12, dtype=torch.float64).view(-1, classes).requires_grad_()
    labels = torch.zeros(len(logits), dtype=torch.long)
    assert loss(logits, labels).dtype == torch.float64
    assert torch.autograd.gradcheck(loss, (logits, labels))


@pytest.mark.parametrize("family", maker.FAMILIES)
def test_a_padded_answers_loss_is_the_mean_of_its_rows(family):
    """Upstream computes each row alone, without padding."""
    head = "question_answering"
    rows = [upstream(family, head, f"row{row}", "loss") for row in range(4)]
    close(build(family, head)(**given(head)).loss, torch.stack(rows).mean())


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize(("family", "head"), [*PAIRS, ("roberta", "mlm"), ("deberta", "mlm")])
def test_without_instructions_for_bfloat16_no_head_multiplies_in_it(
    family, head, is_trained, monkeypatch
):
    """Nor in its backward pass."""
    if head == "mlm":
        model = plain_maker.build(family, head)
        arguments = {**plain_maker.draw_inputs(family, "right"), "labels": torch.full((3, 7), 5)}
    else:
        model, arguments = build(family, head), given(head)
    model.train().requires_grad_(is_trained)
    model.base_model.embeddings.word_embeddings.weight.requires_grad = True
    losses = []
    for has_bfloat16 in (True, False):
        choose_processor(monkeypatch, has_bfloat16, large=False)
        precision = Precision(torch.bfloat16, "cpu")
        with HalfProducts() as halves:
            with precision.autocast():
                losses.append(model(**arguments).loss)
            precision.backward(losses[-1])
        assert bool(halves.seen) == has_bfloat16, halves.seen


# ---- padding ----


@pytest.mark.parametrize(("family", "head"), PAIRS)
def test_padding_changes_nothing(family, head):
    """Neither the padded length nor labels at padding matter."""
    model, arguments = build(family, head), given(head)
    expected = model(**arguments)
    output = model(**wider(arguments))
    close(output.loss, expected.loss)
    for name in logits_of(head):
        close(real(output[name], wider(arguments)), real(expected[name], arguments))


@pytest.mark.parametrize("family", maker.FAMILIES)
def test_padding_is_no_answer(family):
    arguments = given("question_answering")
    model, mask = build(family, "question_answering"), arguments["attention_mask"]
    output = model(**arguments)
    for logits in (output.start_logits, output.end_logits):
        assert (logits.softmax(1)[mask == 0] == 0).all()
    # A position at padding is ignored, as one beyond the batch is.
    spans = {"start_positions": torch.tensor([2, 5, 7, 16]), "end_positions": INPUTS["ends"]}
    elsewhere = {**spans, "start_positions": torch.tensor([2, 18, 7, 16])}
    at_padding, beyond = (model(**{**arguments, **each}) for each in (spans, elsewhere))
    assert torch.equal(at_padding.loss, beyond.loss)
    at_padding.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_positions_may_be_a_column():
    """As a data set of lists gives them."""
    arguments, spans = given("question_answering"), ("start_positions", "end_positions")
    model = build("roberta", "question_answering")
    loss = model(**{**arguments, **{name: INPUTS["ends"] for name in spans}}).loss
    columns = {name: INPUTS["ends"][:, None] for name in spans}
    assert torch.equal(model(**{**arguments, **columns}).loss, loss)


@pytest.mark.parametrize("family", maker.FAMILIES)
def test_users_own_losses_on_padded_answers_are_finite(family):
    """Distillation sums over all columns: at padding, 0 · -inf would be nan."""
    arguments = given("question_answering")
    assert (arguments["attention_mask"] == 0).any()
    model = build(family, "question_answering")
    logits = model(**arguments).start_logits
    teacher = (2 * logits.detach()).softmax(1)
    F.kl_div(logits.log_softmax(1), teacher, reduction="batchmean").backward()
    smoothed = F.cross_entropy(logits, torch.tensor([1, 2, 3, 4]), label_smoothing=0.1)
    assert smoothed.isfinite()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(("family", "head"), PAIRS)
def test_a_batch_without_a_target_has_a_loss_of_zero(family, head):
    model, arguments = build(family, head), given(head)
    nothing = {name: torch.full_like(arguments[name], -100) for name in labels_of(head)}
    if head == "question_answering":
        nothing = {name: torch.full_like(arguments[name], 99) for name in labels_of(head)}
    loss = model(**{**arguments, **nothing}).loss
    assert loss == 0
    loss.backward()
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(("family", "head"), PAIRS)
def test_a_packed_batch_has_the_same_loss(family, head):
    """By the Trainer's collator, for choices too."""
    model, arguments = build(family, head), given(head)
    batch = PackedCollator(lambda features: features[0])([arguments])
    assert batch["packed_rows"].lengths == INPUTS["mask"].sum(dim=1).tolist()
    output, expected = model(**batch), model(**arguments)
    assert torch.equal(output.loss, expected.loss)


@pytest.mark.parametrize(("family", "head"), [pair for pair in PAIRS if "question" not in pair[1]])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_smoothed_loss_counts_the_same_labels(family, head, side, tmp_path):
    """Not those at padding; of a causal language model, the next tokens'."""
    model, arguments = build(family, head), given(head)
    if side == "left":
        arguments = {
            name: value.flip(-1) if value.dim() > 1 else value for name, value in arguments.items()
        }
    settings = transformers.TrainingArguments(
        str(tmp_path), label_smoothing_factor=1e-12, report_to=[]
    )
    smoothed = transformers.Trainer(model, settings).compute_loss(model, arguments)
    close(smoothed, model(**arguments).loss)


# ---- inputs and outputs ----


@pytest.mark.parametrize(("family", "head"), PAIRS)
def test_outputs_are_named_and_ordered(family, head):
    model, arguments = build(family, head), given(head)
    output = model(**arguments, output_hidden_states=True)
    names = ["loss", *logits_of(head), "hidden_states"]
    assert list(output) == names
    assert [state.shape for state in output.hidden_states] == [(4, 18, 32)] * 3
    as_tuple = model(**arguments, return_dict=False)
    assert len(as_tuple) == len(names) - 1
    close(as_tuple[0], output.loss)
    bare = model(**without_labels(head, arguments))
    assert list(bare) == names[1:-1]
    for name in logits_of(head):
        close(bare[name], output[name])


@pytest.mark.parametrize(("family", "head"), PAIRS)
def test_attentions(family, head):
    """They need the padded path, which gives the same numbers."""
    model, arguments = build(family, head), given(head)
    expected = model(**arguments)
    output = model(**arguments, output_attentions=True)
    assert list(output) == [*expected, "attentions"]
    assert [each.shape for each in output.attentions] == [(4, 4, 18, 18)] * 2
    for name in ("loss", *logits_of(head)):
        close(real(output[name], arguments), real(expected[name], arguments))
    if model.config.model_type == "roberta" and head == "causal_lm":
        assert all(not each.triu(1).any() for each in output.attentions)


@pytest.mark.parametrize(("family", "head"), PAIRS)
def test_embeddings_as_inputs_give_the_same_loss(family, head):
    model, arguments = build(family, head), given(head)
    words = model.base_model.embeddings.word_embeddings
    embedded = {**arguments, "inputs_embeds": words(arguments["input_ids"])}
    if family == "roberta":  # derives positions from ids
        first = model.config.pad_token_id + 1
        columns = torch.arange(first, first + arguments["input_ids"].shape[-1])
        embedded["position_ids"] = columns.expand_as(arguments["input_ids"])
    del embedded["input_ids"]
    close(model(**embedded).loss, model(**arguments).loss)


@pytest.mark.parametrize(("family", "head"), TRAINED)
def test_auto_classes_build_each_head(family, head):
    model = build(family, head)
    end = maker.HEADS[head][0]
    auto = getattr(transformers, f"AutoModel{end}")
    assert type(auto.from_config(model.config)) is type(model)
    mapping = getattr(transformers, f"MODEL_FOR_{head.upper()}_MAPPING")
    assert mapping[type(model.config)] is type(model)
    assert len(mapping) == sum(other == head for _, other in TRAINED)


@pytest.mark.parametrize("family", maker.FAMILIES)
def test_question_answering_has_two_labels_whatever_the_config(family, tmp_path):
    """Upstream builds as many outputs as there are labels, so the saved config has two."""
    classifier = build(family, "token_classification", num_labels=5)
    classifier.save_pretrained(tmp_path / "base")
    auto = transformers.AutoModelForQuestionAnswering
    model = auto.from_pretrained(tmp_path / "base", config=classifier.config)
    assert model.config.num_labels == model.base_model.config.num_labels == 2
    assert classifier.config.num_labels == 5
    model.save_pretrained(tmp_path / "own")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "own").num_labels == 2
    arguments = given("question_answering")
    again = auto.from_pretrained(tmp_path / "own")
    assert torch.equal(again(**arguments).loss, model(**arguments).loss)


@pytest.mark.parametrize(("own", "expected"), [(None, 0.2), (0.0, 0.0), (0.3, 0.3)])
def test_robertas_classifiers_may_have_a_dropout_of_their_own(own, expected):
    """As in the config.json of newer releases of upstream."""
    settings = {**plain_maker.SHAPE, "hidden_dropout_prob": 0.2, "classifier_dropout": own}
    config = transformers.RobertaConfig(**settings)
    of_texts = transformers.RobertaForSequenceClassification(config).classifier.dropout
    of_tokens = transformers.RobertaForTokenClassification(config).dropout
    assert (of_texts.p, of_tokens.p) == (expected, expected)


@pytest.mark.parametrize("end", ["ForMultipleChoice", "ForCausalLM"])
def test_a_head_that_a_family_does_not_have_is_refused(end):
    config = build("deberta", "token_classification").config
    with pytest.raises(
        ValueError, match=r"^DeBERTa-v2 has no model for (multiple_choice|causal_lm)"
    ):
        getattr(transformers, f"AutoModel{end}").from_config(config)


def test_choices_need_a_dimension():
    model = build("roberta", "multiple_choice")
    with pytest.raises(ValueError, match=r"takes \(batch, choices, length, …\), not \(4, 18\)"):
        model(INPUTS["ids"], attention_mask=INPUTS["mask"])


@pytest.mark.parametrize(("family", "head"), PAIRS)
def test_a_saved_model_gives_the_same_loss(family, head, tmp_path):
    model, arguments = build(family, head), given(head)
    model.save_pretrained(tmp_path)
    again, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert info == {"missing_keys": [], "unexpected_keys": [], "error_msgs": []}
    assert torch.equal(again(**arguments).loss, model(**arguments).loss)


@pytest.mark.parametrize(("family", "head"), TRAINED)
def test_a_head_on_another_models_backbone(family, head, tmp_path):
    """As on a pretrained model, the head is new, and so is the pooler for choices."""
    other = build(family, "token_classification")
    other.base_model.save_pretrained(tmp_path)
    model = type(build(family, head)).from_pretrained(tmp_path)
    prefix = f"{family}."
    outside = {name for name in model.state_dict() if not name.startswith(prefix)}
    pooler = {name for name in model.state_dict() if ".pooler." in name}
    assert len(pooler) == (2 if head == "multiple_choice" else 0)
    assert model.newly_initialized == (outside | pooler) - model.tied_weights.keys()


# ---- what is trained ----


@pytest.mark.parametrize(("family", "head"), TRAINED)
@pytest.mark.parametrize("names", CROSS, ids="+".join)
def test_the_head_and_the_adapted_parts_are_trained(family, head, names):
    """The head includes the pooler for choices; in the backbone, only LoRA, adapters or biases."""
    model = build(family, head, **settings_of(names)).train()
    model.train_only(kind.part for kind in model.adapted_by)
    parts = {"lora": "lora", "bitfit": "bias", "houlsby": "adapter", "pfeiffer": "adapter"}
    wanted = [parts[name] for name in names]
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    for name, _ in model.named_parameters():
        is_head = not name.startswith(f"{family}.") or ".pooler." in name
        assert (name in trained) == (is_head or any(part in name for part in wanted)), name
    model(**given(head)).loss.backward()
    # DDP needs a gradient for each of them.
    assert trained == {name for name, p in model.named_parameters() if p.grad is not None}


# ---- decoders ----


def test_a_token_of_a_decoder_sees_none_after_it():
    model, arguments = build("roberta", "causal_lm", **NO_DROPOUT), given("causal_lm")
    changed = {**arguments, "input_ids": arguments["input_ids"].clone()}
    changed["input_ids"][:, 2] = 7
    for training in (False, True):  # by two paths of attention
        model.train(training)
        logits, others = (model(**each).logits for each in (arguments, changed))
        close(logits[:, :2], others[:, :2])
        assert (logits[:, 2] - others[:, 2]).abs().max() > 0.1
        assert (logits[0, 6] - others[0, 6]).abs().max() > 1e-3


def test_a_decoders_attentions_end_at_the_token_without_a_mask_too():
    model, ids = build("roberta", "causal_lm"), INPUTS["ids"]
    output = model(ids, output_attentions=True)
    assert not any(probabilities.triu(1).any() for probabilities in output.attentions)
    close(output.logits, model(ids).logits)


def test_a_decoder_gives_the_same_logits_in_training_and_evaluation():
    model, arguments = build("roberta", "causal_lm", **NO_DROPOUT), given("causal_lm", "holes")
    with torch.no_grad():
        evaluated = model(**arguments).logits
    close(model.train()(**arguments).logits, evaluated)


@pytest.mark.parametrize("case", ["padded", "holes"])
def test_a_decoders_first_token_alone_gives_the_full_paths_logits(case):
    """A classifier needs no other token's output."""
    config = build("roberta", "causal_lm").config
    model = transformers.RobertaForSequenceClassification(config).eval()
    maker.draw_weights(model)
    arguments = without_labels("causal_lm", given("causal_lm", case))
    close(model(**arguments).logits, model(**arguments, output_hidden_states=True).logits)


@pytest.mark.parametrize(
    "asked",
    [
        {"encoder_hidden_states": torch.ones(4, 2, 32)},
        {"past_key_values": ((),)},
        {"use_cache": True},
    ],
)
def test_a_decoder_refuses_cross_attention_caches_and_generation(asked):
    model, arguments = build("roberta", "causal_lm"), given("causal_lm")
    (name,) = asked
    with pytest.raises(ValueError, match=rf"^{name}: [^\n]*no cross-attention, no cache"):
        model(**arguments, **asked)
    assert model(**arguments, use_cache=False).loss > 0
    with pytest.raises(ValueError, match=r"^generate: "):
        model.generate(arguments["input_ids"])


def test_a_decoder_that_asks_for_an_encoder_is_refused():
    with pytest.raises(ValueError, match=r"^add_cross_attention"):
        build("roberta", "causal_lm", add_cross_attention=True)


def test_a_decoders_loss_is_the_mean_over_all_tokens_but_the_first():
    """The labels are the ids."""
    model, rows = build("roberta", "causal_lm"), PackedRows(INPUTS["mask"])
    arguments = without_labels("causal_lm", given("causal_lm"))
    logits = model(**arguments).logits.log_softmax(-1)
    losses = [
        -logits[row, column, INPUTS["ids"][row, column + 1]]
        for row, length in enumerate(rows.lengths)
        for column in range(length - 1)
    ]
    close(model(**arguments, labels=INPUTS["ids"]).loss, torch.stack(losses).mean())
