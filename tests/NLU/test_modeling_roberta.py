"""RoBERTa: upstream's numbers, padding that costs nothing and changes nothing, LoRA, dropout."""

import copy
import importlib
import json
import operator
import pickle

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close_to_rounding
from encoder_options import ENCODER_TERMS
from places import FIXTURES
from safetensors import safe_open

import loralib as lora
from loralib.nn.packing import _attend_padded, _attend_rows
from loralib.training.precision import Precision, all_in_half, hold_frozen_in
from transformers import (
    AutoModelForSequenceClassification,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    RobertaModel,
)
from transformers.modeling_outputs import SequenceClassifierOutput

FIXTURE = FIXTURES / "roberta_fixture.safetensors"
CASES = ("padded", "types", "holes", "row0", "row1", "row2", "row3")
KINDS = {
    "mlm": (RobertaForMaskedLM, {}),
    "classifier": (RobertaForSequenceClassification, {"num_labels": 3}),
    "regressor": (RobertaForSequenceClassification, {"num_labels": 1}),
}
LABELS = {"mlm": "tokens_wanted", "classifier": "classes", "regressor": "scores"}
LORA = {"apply_lora": True, "lora_r": 2, "lora_alpha": 6}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.fixture(scope="module")
def upstream():
    """What make_roberta_fixture.py wrote: tensors by name, and the settings under "config"."""
    with safe_open(FIXTURE, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return {**tensors, "config": json.loads(file.metadata()["config"])}


def part(upstream, start):
    return {name.removeprefix(start): t for name, t in upstream.items() if name.startswith(start)}


@pytest.fixture
def build(upstream):
    """Builds a model with the fixture's weights; LoRA's are drawn, B as well."""

    def build(kind, **settings):
        backbone = part(upstream, "weights/backbone/")
        if kind == "backbone":
            model = RobertaModel(RobertaConfig(**upstream["config"], **settings))
            weights = backbone
        else:
            model_class, labels = KINDS[kind]
            model = model_class(RobertaConfig(**upstream["config"], **labels, **settings))
            weights = {f"roberta.{name}": t for name, t in backbone.items() if "pooler" not in name}
            weights |= part(upstream, f"weights/{kind}/")
        torch.manual_seed(0)
        model.load_checkpoint(weights, "the fixture")
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        return model.eval()

    return build


@pytest.fixture
def arguments(upstream):
    """The model's arguments in one of the fixture's cases."""
    given = part(upstream, "inputs/")

    def arguments(case):
        if case.startswith("row"):
            row = int(case[3:])
            return {"input_ids": given["ids"][row : row + 1, : int(given["mask"][row].sum())]}
        holes = "_with_holes" if case == "holes" else ""
        types = {"token_type_ids": given["types"]} if case == "types" else {}
        return {
            "input_ids": given[f"ids{holes}"],
            "attention_mask": given[f"mask{holes}"],
            **types,
        }

    return arguments


def real(tensor, arguments):
    """The values at real tokens."""
    mask = arguments.get("attention_mask")
    return tensor if mask is None else tensor[mask == 1]


def close(ours, theirs, terms=ENCODER_TERMS):
    assert_close_to_rounding(ours, theirs, terms)


def close_gradients(ours, theirs, magnitude):
    """Forward and back; `magnitude` is the largest gradient's that they are made from."""
    assert_close_to_rounding(ours, theirs, 2 * ENCODER_TERMS, magnitude=magnitude)


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


def test_what_stands_at_padding_does_not_matter(upstream, build, arguments):
    model, given = build("classifier"), arguments("padded")
    expected = model(**given).logits
    # Positions count what is no padding token, so the token has to be one after the last.
    given["input_ids"] = given["input_ids"].masked_fill(given["attention_mask"] == 0, 7)
    assert torch.equal(model(**given).logits, expected)
    wider = {name: F.pad(t, (0, 9), value=int(name == "input_ids")) for name, t in given.items()}
    close(model(**wider).logits, expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_mask_of_any_type(build, arguments, dtype):
    model, given = build("classifier"), arguments("padded")
    expected = model(**given).logits
    given["attention_mask"] = given["attention_mask"].to(dtype)
    assert torch.equal(model(**given).logits, expected)


def test_explicit_positions_and_types(build, arguments):
    model, given = build("classifier"), arguments("padded")
    expected = model(**given).logits
    ids = given["input_ids"]
    positions = model.roberta.embeddings.position_ids(ids)
    assert positions[1].tolist() == [2, 3, 4] + [1] * 15
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
        ({"attention_mask": torch.tensor([[0, 1, 1]])}, "hides the first token"),
        ({"attention_mask": torch.ones(3)}, r"must be \(batch, length\)"),
        (
            {"attention_mask": torch.ones(1, 4)},
            r"attention_mask is \(1, 4\), the batch is \(1, 3\)",
        ),
        ({"attention_mask": torch.ones(3, 1)}, r"attention_mask is \(3, 1\)"),
        ({"token_type_ids": torch.zeros(1, 2).long()}, r"the batch is \(1, 2\)"),
    ],
)
def test_batches_that_do_not_fit(build, changed, message):
    with pytest.raises(ValueError, match=message) as error:
        build("classifier")(input_ids=torch.tensor([[0, 5, 2]]), **changed)
    assert "\n" not in str(error.value)


def test_too_long_a_text(build):
    model = build("classifier")
    ids = torch.full((2, 30), 1)
    ids[:, :18] = 5
    assert model(ids, (ids != 1).long()).logits.shape == (2, 3)
    ids[1, 18] = 5
    with pytest.raises(ValueError, match="has 19 tokens, the model has positions for 18"):
        model(ids, (ids != 1).long())


# ---- LoRA ----


def merged(model, build, kind):
    """A model without LoRA whose weights have the update folded in."""
    plain = build(kind, **NO_DROPOUT)
    state = {name: t for name, t in model.state_dict().items() if "lora_" not in name}
    plain.load_state_dict(state)
    for name, layer in model.named_modules():
        if isinstance(layer, lora.Linear):
            weight = plain.get_submodule(name).weight
            weight.data += layer.scaling * layer.lora_B.data @ layer.lora_A.data
    return plain


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_of_lora(upstream, build, arguments, kind, mode):
    model = build(kind, **LORA, **NO_DROPOUT)
    plain = merged(model, build, kind).train(mode)
    model.train_only(("lora",))
    model.train(mode)
    bare = arguments("holes")
    assert not torch.allclose(build(kind)(**bare).logits, model(**bare).logits, atol=0.01)

    given = {**bare, "labels": upstream[f"inputs/{LABELS[kind]}"]}
    loss, reference = model(**given).loss, plain(**given).loss
    close(loss, reference)
    loss.backward()
    reference.backward()
    largest = max(float(p.grad.abs().max()) for p in plain.parameters())
    checked = 0
    for name, layer in model.named_modules():
        if isinstance(layer, lora.Linear):
            of_weight = plain.get_submodule(name).weight.grad * layer.scaling
            close_gradients(layer.lora_A.grad, layer.lora_B.data.t() @ of_weight, largest)
            close_gradients(layer.lora_B.grad, of_weight @ layer.lora_A.data.t(), largest)
            assert layer.lora_A.grad.abs().max() > 1e-4
            checked += 1
    assert checked == 4
    for name, parameter in model.named_parameters():
        if not name.startswith("roberta."):
            close_gradients(parameter.grad, plain.get_parameter(name).grad, largest)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_lora_and_head_alone(upstream, build, arguments, kind):
    model = build(kind, **LORA)
    model.train_only(("lora",))
    model.train()
    before = copy.deepcopy(model.state_dict())
    model(**arguments("padded"), labels=upstream[f"inputs/{LABELS[kind]}"]).loss.backward()
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    expected = {
        name
        for name, _ in model.named_parameters()
        if "lora_" in name or not name.startswith("roberta.")
    }
    assert with_gradient == expected
    assert sum("lora_" in name for name in expected) == 8
    assert model.num_parameters(only_trainable=True) == sum(
        model.get_parameter(name).numel() for name in expected
    )
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_train_only_knows_a_bare_backbone(build):
    model = build("backbone", **LORA)
    model.train_only(("lora",))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if "lora_" in name}
    model.train_only(("bias",))
    assert model.get_parameter("embeddings.LayerNorm.bias").requires_grad
    assert not model.get_parameter("encoder.layer.0.attention.self.query.lora_A").requires_grad


def test_key_has_no_lora_and_sizes_are_the_releases():
    config = RobertaConfig(vocab_size=10, max_position_embeddings=4, **{**LORA, "lora_r": 8})
    with torch.device("meta"):
        model = RobertaForSequenceClassification(config)
    model.train_only(("lora",))
    names = {name.rsplit(".", 2)[1] for name, _ in model.named_parameters() if "lora_" in name}
    assert names == {"query", "value"}
    lora_size = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    assert lora_size == 294_912
    assert model.num_parameters(only_trainable=True) == 294_912 + 590_592 + 1_538


# ---- precision ----


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_frozen_weights_in_bfloat16(upstream, build, arguments, mode, autocast):
    model = build("classifier", **LORA, **NO_DROPOUT)
    model.train_only(("lora",))
    model.train(mode)
    given = {**arguments("padded"), "labels": upstream["inputs/classes"]}
    expected = model(**given)
    hold_frozen_in(model, torch.bfloat16)
    for parameter in model.parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16)
    precision = Precision(torch.bfloat16 if autocast else torch.float32, "cpu")
    with precision.autocast():
        output = model(**given)
    assert output.logits.dtype == output.loss.dtype == torch.float32
    error = (output.logits - expected.logits).abs().max()
    assert 0 < error < 0.1
    precision.backward(output.loss)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        assert parameter.grad is None or parameter.grad.dtype == torch.float32


def test_biases_can_be_trained_beside_half_precision(upstream, build, arguments):
    model = build("classifier", **LORA)
    model.train_only(("lora", "bias"))
    model.train()
    hold_frozen_in(model, torch.bfloat16)
    with Precision(torch.bfloat16, "cpu").autocast():
        loss = model(**arguments("padded"), labels=upstream["inputs/classes"]).loss
    loss.backward()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert parameter.grad.dtype == torch.float32


def test_all_in_half_gives_back_every_bit(build, arguments):
    model = build("classifier", **LORA)
    given = arguments("padded")
    before, logits = copy.deepcopy(model.state_dict()), model(**given).logits
    with all_in_half(model):
        assert {p.dtype for p in model.parameters()} == {torch.float16}
        assert model(**given).logits.dtype == torch.float16
    assert torch.equal(model(**given).logits, logits)
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, before[name])


def test_a_step_clips_and_leaves_the_base_alone(upstream, build, arguments):
    model = build("classifier", **LORA)
    model.train_only(("lora",))
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.SGD(trained, lr=1.0)
    precision = Precision(torch.float32, "cpu")
    loss = model(**arguments("padded"), labels=upstream["inputs/classes"]).loss
    precision.backward(loss * 1000)
    before = [p.detach().clone() for p in trained]
    assert precision.step(optimizer, trained, max_norm=0.5)
    moved = torch.cat([(p - b).flatten() for p, b in zip(trained, before, strict=True)])
    assert moved.norm().item() == pytest.approx(0.5, rel=1e-3)
    assert precision.state_dict() == {}
    for name, tensor in frozen.items():
        assert torch.equal(model.get_parameter(name), tensor)


# ---- attention ----


def test_whole_model_by_either_path(monkeypatch, upstream, build, arguments):
    model, given = build("classifier"), arguments("holes")
    roberta = importlib.import_module("transformers.models.roberta.modeling_roberta")
    for path in (_attend_rows, _attend_padded):
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
    """One training forward, computed again by the plain formula with the masks that were drawn."""
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
        assert keep.shape == (1, 4, len(ids), len(ids))
        assert keep.max() == pytest.approx(1 / 0.6, abs=1e-4)
        mixed = plain_attention(q, k, v, 4, keep[0])
        x = attention.output.LayerNorm(drop(attention.output.dense(mixed)) + x)
        inner = F.gelu(layer.intermediate.dense(x))
        x = layer.output.LayerNorm(drop(layer.output.dense(inner)) + x)
    head = model.classifier
    x = drop(torch.tanh(head.dense(drop(x[:1]))))
    assert next(masks, None) is None
    close(ours, head.out_proj(x))
    assert not torch.allclose(ours, model.eval()(**given).logits, atol=0.05)


def test_dropout_follows_the_seed_and_keeps_out_of_evaluation(build, arguments):
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


def test_tuples(upstream, build, arguments):
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


def test_hidden_states_by_the_config(build, arguments):
    model = build("classifier", output_hidden_states=True)
    assert len(model(**arguments("padded")).hidden_states) == 3
    assert model(**arguments("padded"), output_hidden_states=False).hidden_states is None


def test_backbone_without_pooler(upstream):
    model = RobertaModel(RobertaConfig(**upstream["config"]), add_pooling_layer=False)
    output = model(torch.tensor([[0, 5, 2]]))
    assert list(output) == ["last_hidden_state"]
    assert model.base_model is model


class TestModelOutput:
    logits = torch.ones(2)
    loss = torch.tensor(3.0)

    def test_names_entries_and_items_are_one(self):
        output = SequenceClassifierOutput(logits=self.logits)
        assert list(output) == ["logits"]
        assert output.loss is None
        assert output["logits"] is output.logits is output[0] is output[-1]
        assert output[:1] == (self.logits,)
        with pytest.raises(KeyError):
            output["loss"]
        with pytest.raises(IndexError):
            output[1]

    @pytest.mark.parametrize("by_item", [True, False])
    def test_what_is_set_later_takes_its_declared_place(self, by_item):
        output = SequenceClassifierOutput(logits=self.logits)
        if by_item:
            output["loss"] = self.loss
        else:
            output.loss = self.loss
        assert output["loss"] is output.loss is output[0] is self.loss
        assert output.to_tuple() == (self.loss, self.logits)
        output.loss = None
        assert "loss" not in output
        assert output.to_tuple() == (self.logits,)

    @pytest.mark.parametrize(
        "clone", [copy.copy, copy.deepcopy, lambda output: pickle.loads(pickle.dumps(output))]
    )
    def test_copies(self, clone):
        copied = clone(SequenceClassifierOutput(self.loss, self.logits))
        assert type(copied) is SequenceClassifierOutput
        assert list(copied) == ["loss", "logits"]
        assert torch.equal(copied.logits, self.logits)
        assert copied["logits"] is copied.logits
        assert copied.hidden_states is None

    @staticmethod
    def in_step(output):
        """The names that are set, after a check that all ways to ask agree."""
        assert output.to_tuple() == tuple(output.values()) == output[:]
        assert all(output[name] is getattr(output, name) for name in output)
        declared = [name for name in output.__dataclass_fields__ if name in output]
        assert list(output)[: len(declared)] == declared
        unset = output.__dataclass_fields__.keys() - output.keys()
        assert all(getattr(output, name) is None for name in unset)
        return list(output)

    @pytest.mark.parametrize("by_item", [True, False])
    def test_all_views_follow_what_is_set(self, by_item):
        def put(output, name, value):
            if by_item:
                output[name] = value
            else:
                setattr(output, name, value)

        output = SequenceClassifierOutput()
        assert self.in_step(output) == []
        for name, value, names in (
            ("hidden_states", (self.logits,), ["hidden_states"]),
            ("own", self.loss, ["hidden_states", "own"]),
            ("loss", self.loss, ["loss", "hidden_states", "own"]),
            ("logits", self.logits, ["loss", "logits", "hidden_states", "own"]),
            ("loss", self.logits, ["loss", "logits", "hidden_states", "own"]),
            ("logits", None, ["loss", "hidden_states", "own"]),
            ("logits", None, ["loss", "hidden_states", "own"]),
            ("own", None, ["loss", "hidden_states"]),
        ):
            put(output, name, value)
            assert self.in_step(output) == names
            assert getattr(output, name) is value

    @pytest.mark.parametrize(
        "change",
        [
            lambda output: output.pop("loss"),
            lambda output: output.pop("none", None),
            lambda output: output.popitem(),
            lambda output: output.clear(),
            lambda output: output.update(loss=1),
            lambda output: output.update({"loss": 1}),
            lambda output: output.setdefault("hidden_states", 1),
            lambda output: output.move_to_end("loss"),
            lambda output: output.__delitem__("loss"),
            lambda output: delattr(output, "loss"),
            lambda output: operator.ior(output, {"loss": 1}),
        ],
    )
    def test_other_changes_are_refused(self, change):
        output = SequenceClassifierOutput(self.loss, self.logits)
        with pytest.raises(TypeError, match=r"SequenceClassifierOutput has no .*: set its fields"):
            change(output)
        assert self.in_step(output) == ["loss", "logits"]
        assert output[0] is self.loss

    def test_what_makes_another_dict(self):
        output = SequenceClassifierOutput(self.loss, self.logits)
        assert output | {"loss": 1} == {"loss": 1, "logits": self.logits}
        assert {"loss": 1, "x": 2} | output == {"loss": self.loss, "x": 2, "logits": self.logits}
        again = output.copy()
        again.loss = None
        assert self.in_step(output) == ["loss", "logits"]
        assert self.in_step(again) == ["logits"]


# ---- building ----


def test_seed_gives_the_weights(upstream):
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
