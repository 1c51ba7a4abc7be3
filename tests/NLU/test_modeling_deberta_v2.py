"""DeBERTa-v2: upstream's numbers, the literal formulas with gradients, padding, LoRA, precision."""

import copy
import importlib
import itertools

import make_deberta_fixture as maker
import pytest
import torch
import torch.nn.functional as F
from compare import assert_close_to_rounding
from covering import covering
from deberta_cases import (
    CASES,
    INPUTS,
    LABELS,
    LORA,
    VARIANTS,
    XXLARGE,
    build,
    close,
    literal_logits,
    literal_rows,
)
from encoder_options import ENCODER_TERMS, NO_DROPOUT
from safetensors.torch import load_file

import loralib as lora
from loralib.nn.fast_paths import fast_paths_off
from loralib.nn.packing import PackedRows
from loralib.training.precision import Precision, all_in_half, cast_frozen
from transformers import (
    AutoModelForSequenceClassification,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
)

ATTENTION = importlib.import_module("transformers.models.deberta_v2.attention_deberta_v2")
UPSTREAM = load_file(maker.FIXTURE)


def real(tensor, arguments):
    """The values at real tokens."""
    mask = arguments.get("attention_mask")
    return tensor if mask is None else tensor[mask == 1]


@pytest.fixture(params=["rows", "padded"])
def path(request, monkeypatch):
    """Makes attention take either path."""
    cheap = request.param == "padded"
    monkeypatch.setattr(ATTENTION, "padding_is_cheap", lambda *_: cheap)
    return request.param


# ---- upstream's numbers ----


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_upstreams(variant, path):
    model = build("classifier", variant)
    checked = 0
    for case, given in CASES.items():
        theirs = UPSTREAM.get(f"{variant}/classifier/{case}/logits")
        if theirs is None or (case == "holes" and path == "rows"):
            continue
        close(model(**given).logits, theirs)
        checked += 1
    assert checked >= 3
    assert UPSTREAM[f"{variant}/classifier/padded/logits"].std() > 0.1


def test_upstreams_logits_differ_between_options():
    padded = {
        variant: UPSTREAM[f"{variant}/classifier/padded/logits"]
        for variant in VARIANTS
        if variant not in maker.OTHERS
    }
    same = [
        {first, second}
        for first, second in itertools.combinations(padded, 2)
        if torch.allclose(padded[first], padded[second], atol=1e-3)
    ]
    # Without a term that looks at positions, only the convolution makes a difference.
    assert len(padded) == 64
    assert all("none" in " ".join(pair) for pair in same)


@pytest.mark.parametrize("kind", ["classifier", "regressor", "mlm"])
@pytest.mark.parametrize("variant", maker.OTHERS)
def test_losses_and_logits_are_upstreams(variant, kind):
    model = build(kind, variant)
    checked = 0
    for case, given in CASES.items():
        start = f"{variant}/{kind}/{case}"
        if f"{start}/logits" not in UPSTREAM:
            continue
        ours, theirs = model(**given).logits, UPSTREAM[f"{start}/logits"]
        if kind == "mlm":
            ours, theirs = real(ours, given), real(theirs, given)
        assert ours.shape == theirs.shape
        close(ours, theirs)
        if f"{start}/loss" in UPSTREAM:
            loss = model(**given, labels=INPUTS[LABELS[kind]]).loss
            close(loss, UPSTREAM[f"{start}/loss"])
            checked += 1
    assert checked == (1 if kind == "mlm" else 3)


@pytest.mark.parametrize("variant", maker.OTHERS)
def test_hidden_states_are_upstreams(variant):
    given = CASES["holes"]
    output = build("backbone", variant)(**given, output_hidden_states=True)
    assert len(output.hidden_states) == build("backbone", variant).config.num_hidden_layers + 1
    for layer, state in enumerate(output.hidden_states):
        theirs = UPSTREAM[f"{variant}/backbone/holes/{layer}"]
        close(real(state, given), real(theirs, given))
        assert not state[given["attention_mask"] == 0].any()
    assert torch.equal(output.last_hidden_state, output.hidden_states[-1])


def test_masked_lm_logits_are_those_of_the_targets_alone_in_training():
    model, labels = build("mlm", **NO_DROPOUT), INPUTS["tokens_wanted"]
    given = CASES["holes"]
    bare = model(**given).logits
    evaluated = model(**given, labels=labels)
    assert torch.equal(evaluated.logits, bare)
    is_target = (labels != -100) & (given["attention_mask"] == 1)
    for trains, asked, targets_only in (
        (True, None, True),
        (False, True, True),
        (True, False, False),
    ):
        output = model.train(trains)(**given, labels=labels, targets_only=asked)
        close(output.loss, evaluated.loss)
        close(output.logits, bare[is_target] if targets_only else bare)
    none = model.train()(**given, labels=torch.full_like(labels, -100))
    assert none.logits.shape == (0, 48)
    assert none.loss == 0


# ---- a plain reference ----

LITERAL = {
    "xxlarge": {},
    "wide convolution": {},
    "everything": {},
    "own both buckets conv norm": {},
    "own c2p distances plain raw": {},
    "shared p2c buckets plain norm": {},
    "clamped buckets": {"num_hidden_layers": 1},
}
# Ways to train: LoRA on contents alone, as the release has it; on positions too; all weights.
ADAPTED = {
    "lora": LORA,
    "lora on key, too": {**LORA, "lora_targets": ["query", "key", "value"]},
    "lora on positions": {**LORA, "lora_targets": ["query", "key"], "lora_positions": True},
    "full": {},
}


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "kind", "is_off"), covering(LITERAL, ADAPTED, (True, False)))
def test_losses_and_gradients_are_the_literal_formulas(variant, kind, is_off, path):
    adapted = ADAPTED[kind]
    settings = {**adapted, **NO_DROPOUT, **LITERAL[variant]}
    model = build("classifier", variant, **settings).double()
    reference = copy.deepcopy(model)
    for each in (model, reference):
        each.train_only(("lora",) if adapted else ("",))
        each.train()
    case = {**CASES["holes" if path == "padded" else "padded"], "token_type_ids": INPUTS["types"]}
    with fast_paths_off(is_off):
        loss = model(**case, labels=INPUTS["classes"]).loss
    expected = F.cross_entropy(literal_logits(reference, case), INPUTS["classes"])
    # In float64, compared as if in float32: a mistake in a formula would change far more.
    close(loss, expected, 1)
    loss.backward()
    expected.backward()
    names = {name for name, p in model.named_parameters() if p.grad is not None}
    for name in names:
        theirs = reference.get_parameter(name).grad
        assert_close_to_rounding(model.get_parameter(name).grad, theirs, 1, torch.float32)
    assert names == {name for name, p in model.named_parameters() if p.requires_grad}
    query = "deberta.encoder.layer.0.attention.self.query_proj."
    assert (query + ("lora_A" if adapted else "weight")) in names
    assert model.get_parameter(query + "lora_B" if adapted else query + "weight").grad.norm() > 1e-4


@pytest.mark.parametrize("adapted", ADAPTED.values(), ids=ADAPTED)
@pytest.mark.parametrize("variant", ["xxlarge", "own both buckets conv norm"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_training_gives_the_plain_path_s_logits_and_gradients(monkeypatch, dtype, variant, adapted):
    """In the last layer, each row has one query."""
    calls, attend = [], ATTENTION.attend_rows
    monkeypatch.setattr(
        ATTENTION, "attend_rows", lambda *a, **b: calls.append(a) or attend(*a, **b)
    )
    found = []
    for is_off in (True, False):
        model = build("classifier", variant, **adapted, **NO_DROPOUT).train()
        model.train_only(("lora",) if adapted else ("",))
        in_half = dtype == torch.bfloat16
        model.to(torch.float32 if in_half else dtype)
        with fast_paths_off(is_off), torch.autocast("cpu", dtype, enabled=in_half):
            logits = model(**CASES["padded"]).logits
        F.cross_entropy(logits, INPUTS["classes"]).backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append({"logits": logits, **grads})
        assert len(calls) == (0 if is_off else model.config.num_hidden_layers)
    theirs, ours = found
    assert ours.keys() == theirs.keys()
    # Rounding forward and backward; small gradients are sums of terms as large as large gradients.
    terms, largest = 2 * ENCODER_TERMS, max(tensor.abs().max().item() for tensor in theirs.values())
    for name, tensor in theirs.items():
        assert_close_to_rounding(ours[name], tensor, terms, dtype, largest)


@pytest.mark.parametrize("is_off", [True, False], ids=["plain", "fast"])
def test_attention_drops_probabilities_in_training_on_every_path(path, is_off):
    """The rest is scaled by 1 / (1 - p), so that the mean is the result in evaluation."""
    model = build("backbone", attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.0)
    attention = model.encoder.layer[0].attention.self
    rows = PackedRows(INPUTS["mask"])
    torch.manual_seed(0)
    batch, hidden = model.encoder.describe(rows), torch.randn(len(rows.index), 32)
    with torch.no_grad():
        expected = attention(hidden, hidden, batch)
    hidden.requires_grad_()
    attention.train()
    with fast_paths_off(is_off):
        given = torch.stack([attention(hidden, hidden, batch).detach() for _ in range(100)])
    assert not torch.equal(given[0], given[1])
    deviation = given.std(dim=0) / 10
    assert ((given.mean(dim=0) - expected).abs() < 6 * deviation + 1e-6).all()


@pytest.mark.parametrize(
    ("buckets", "furthest"), [(-1, 6), (0, 6), (8, 24), (6, 12), (256, 512), (7, 40)]
)
@pytest.mark.parametrize("length", [1, 2, 9, 300])
def test_relative_rows_are_the_literal_ones(length, buckets, furthest):
    rows = ATTENTION.relative_rows(length, buckets, furthest)
    literal = literal_rows(length, buckets, furthest)
    expected = [*literal[0].flip(0).tolist(), *literal[1:, 0].tolist()]
    assert list(rows) == expected
    assert list(rows) == sorted(rows)


@pytest.mark.parametrize("terms", ["c2p", "p2c", "p2c|c2p", None])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("relative", [True, False])
def test_distances_have_the_projections_of_their_terms(terms, shared, relative):
    settings = {"share_att_key": shared, "pos_att_type": terms, "relative_attention": relative}
    model = build("backbone", **settings)
    attention = model.encoder.layer[0].attention.self
    of_terms = {"key_proj": "c2p", "query_proj": "p2c"}
    active = (terms or "").split("|") if relative else ()
    used = {name for name, term in of_terms.items() if term in active}
    own = {name for name in of_terms if hasattr(attention, f"pos_{name}")}
    assert (set(attention.shared_with_positions), own) == (
        (used, set()) if shared else (set(), used)
    )


def test_unshared_projections_are_copies():
    model = build("classifier", share_att_key=True)
    expected = model(**CASES["padded"]).logits
    for layer in model.deberta.encoder.layer:
        attention = layer.attention.self
        attention.unshare_positions()
        assert attention.shared_with_positions == ()
        for name in ("query_proj", "key_proj"):
            shared, own = (attention.get_submodule(n) for n in (name, f"pos_{name}"))
            for tensor in ("weight", "bias"):
                assert torch.equal(getattr(shared, tensor), getattr(own, tensor))
                assert getattr(shared, tensor).data_ptr() != getattr(own, tensor).data_ptr()
    assert torch.equal(model(**CASES["padded"]).logits, expected)


def test_texts_longer_than_the_known_distances(path):
    model = build("classifier", **NO_DROPOUT)
    ids = torch.randint(3, 48, (2, 50), generator=torch.Generator().manual_seed(1))
    close(model(ids).logits, literal_logits(model, {"input_ids": ids}))


def test_each_size_s_table_of_distances_is_kept():
    """CUDA graphs may read it."""
    encoder = build("classifier").base_model.encoder
    known = encoder.config.max_position_embeddings
    tables = encoder._rows_of_distances
    encoder.relative_positions(4)
    (first,) = tables
    encoder.relative_positions(known + 1)
    encoder.relative_positions(4)
    assert tables[0] is first
    encoder.to("meta").relative_positions(4)
    encoder.to_empty(device="cpu").relative_positions(4)  # not one more
    assert [table.device.type for table in tables] == ["cpu", "cpu", "meta"]


# ---- padding ----


@pytest.mark.parametrize("kind", ["classifier", "regressor"])
@pytest.mark.parametrize("variant", ["xxlarge", "one layer", "absolute"])
def test_first_token_alone_gives_the_full_paths_logits(variant, kind):
    model, given = build(kind, variant, **LORA), CASES["holes"]
    output = model(**given, output_hidden_states=True)
    close(model(**given).logits, output.logits)
    assert output.hidden_states[-1].shape == (4, 18, 32)


def test_a_padded_batch_gives_each_row_its_logits(path):
    model = build("classifier", **LORA)
    batch = model(**CASES["padded"]).logits
    for row in range(4):
        close(batch[row], model(**CASES[f"row{row}"]).logits[0])


def test_padding_does_not_matter(path):
    model, given = build("classifier", "everything"), dict(CASES["padded"])
    expected = model(**given).logits
    given["input_ids"] = given["input_ids"].masked_fill(given["attention_mask"] == 0, 7)
    assert torch.equal(model(**given).logits, expected)
    wider = {name: F.pad(t, (0, 30)) for name, t in given.items()}
    close(model(**wider).logits, expected)


def test_rows_with_much_padding_are_computed_one_by_one():
    def by_row(lengths, columns=None, holes=False):
        columns = torch.arange(columns or max(lengths))
        mask = (columns < torch.tensor(lengths)[:, None]).long()
        mask[0, 2] = 1 - int(holes)
        return ATTENTION.Batch(PackedRows(mask), None, heads=12).by_row

    assert by_row([9, 200, 3])
    assert by_row([40] * 8, columns=512)
    assert not by_row([30] * 16)
    # With holes, distances are not those of packed tokens.
    assert not by_row([9, 200, 3], holes=True)


def test_rows_of_one_token(path):
    model = build("classifier", **NO_DROPOUT)
    ids = INPUTS["ids"][:, :1]
    close(model(ids).logits, literal_logits(model, {"input_ids": ids}))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"attention_mask": torch.ones(1, 4)},
            r"attention_mask is \(1, 4\), the batch is \(1, 3\)",
        ),
        ({"token_type_ids": torch.zeros(1, 2).long()}, r"the batch is \(1, 2\)"),
        ({"position_ids": torch.zeros(1, 2).long()}, r"the batch is \(1, 2\)"),
    ],
)
def test_inputs_of_mismatched_shapes_are_refused(changed, message):
    with pytest.raises(ValueError, match=message) as error:
        build("classifier", "everything")(input_ids=torch.tensor([[1, 5, 2]]), **changed)
    assert "\n" not in str(error.value)


def test_absolute_positions():
    model, given = build("classifier", "everything"), CASES["padded"]
    positions = torch.arange(18).expand(4, 18)
    expected = model(**given).logits
    assert torch.equal(model(**given, position_ids=positions).logits, expected)
    assert not torch.allclose(model(**given, position_ids=positions.flip(1)).logits, expected)
    ids = torch.full((2, 30), 5)
    mask = (torch.arange(30) < torch.tensor([[24], [3]])).long()
    assert model(ids, mask).logits.shape == (2, 3)
    mask[1, 24] = 1
    with pytest.raises(ValueError, match="has 25 tokens, the model has positions for 24"):
        model(ids, mask)


def test_types_and_positions_that_a_model_does_not_have_change_nothing():
    model, given = build("classifier"), CASES["padded"]
    expected = model(**given).logits
    positions = torch.zeros_like(INPUTS["ids"])
    given = {**given, "token_type_ids": INPUTS["types"], "position_ids": positions}
    assert torch.equal(model(**given).logits, expected)


# ---- LoRA ----


@pytest.mark.slow
def test_lora_is_where_the_release_has_it_with_as_many_parameters():
    config = DebertaV2Config(**XXLARGE, apply_lora=True, lora_r=16, lora_alpha=32)
    with torch.device("meta"):
        model = DebertaV2ForSequenceClassification(config)
    model.train_only(("lora",))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    inside = {name: p for name, p in trained.items() if name.startswith("deberta.")}
    assert sum(p.numel() for p in inside.values()) == 4_718_592
    assert len(inside) == 48 * 4
    assert {name.rsplit(".", 2)[1] for name in inside} == {"query_proj", "value_proj"}
    assert trained.keys() - inside.keys() == {
        f"{part}.{kind}" for part in ("pooler.dense", "classifier") for kind in ("weight", "bias")
    }


def test_lora_is_merged_on_request_alone(path):
    model, given = build("classifier", **LORA, **NO_DROPOUT), CASES["padded"]
    assert not torch.allclose(build("classifier")(**given).logits, model(**given).logits, atol=0.1)
    query = model.deberta.encoder.layer[0].attention.self.query_proj
    assert not query.merge_weights
    before = copy.deepcopy(model.state_dict())
    evaluated = model(**given).logits
    assert torch.equal(model.train()(**given).logits, evaluated)
    assert torch.equal(model.eval()(**given).logits, evaluated)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    merged = lora.merge(copy.deepcopy(model))
    assert not any(isinstance(module, lora.LoRALayer) for module in merged.modules())
    close(merged(**given).logits, evaluated)


def test_the_seed_determines_weights_of_the_release_s_distribution():
    states = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        config = DebertaV2Config(**{**maker.CONFIG, **maker.XXLARGE, **LORA, "lora_r": 32})
        states.append(AutoModelForSequenceClassification.from_config(config).state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    name = "deberta.encoder.layer.0.attention.self.value_proj."
    assert not torch.equal(states[0][f"{name}lora_A"], states[2][f"{name}lora_A"])
    assert not states[0][f"{name}lora_B"].any()
    assert not states[0][f"{name}bias"].any()
    assert not states[0]["deberta.embeddings.word_embeddings.weight"][0].any()
    for drawn in (f"{name}lora_A", f"{name}weight", "deberta.encoder.rel_embeddings.weight"):
        assert 0.017 < states[0][drawn].std() < 0.023
        assert abs(states[0][drawn].mean()) < 0.004


# ---- precision ----


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("variant", ["xxlarge", "own both buckets plain raw", "absolute"])
def test_frozen_weights_in_bfloat16(variant, mode, autocast, path):
    model = build("classifier", variant, **LORA, **NO_DROPOUT)
    model.train_only(("lora",))
    model.train(mode)
    given = {**CASES["padded"], "labels": INPUTS["classes"]}
    expected = model(**given)
    cast_frozen(model, torch.bfloat16)
    precision = Precision(torch.bfloat16 if autocast else torch.float32, "cpu")
    with precision.autocast():
        output = model(**given)
    assert output.logits.dtype == output.loss.dtype == torch.float32
    assert 0 < (output.logits - expected.logits).abs().max() < 0.25
    precision.backward(output.loss)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        assert parameter.grad is None or parameter.grad.dtype == torch.float32


@pytest.mark.parametrize("dropout", [{}, NO_DROPOUT], ids=["dropout", "none"])
def test_biases_can_be_trained_with_frozen_weights_in_half_precision(dropout):
    model = build("classifier", **LORA, **dropout)
    model.train_only(("lora", "bias"))
    model.train()
    cast_frozen(model, torch.bfloat16)
    with Precision(torch.bfloat16, "cpu").autocast():
        loss = model(**CASES["padded"], labels=INPUTS["classes"]).loss
    loss.backward()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert parameter.grad.dtype == torch.float32


def test_all_in_half_restores_the_logits():
    model, given = build("classifier", **LORA), CASES["padded"]
    logits = model(**given).logits
    with all_in_half(model):
        half = model(**given).logits
    assert half.dtype == torch.float16
    assert (half.float() - logits).abs().max() < 0.1
    assert torch.equal(model(**given).logits, logits)


def test_training_after_inference_mode():
    model, given = build("classifier", **LORA), CASES["padded"]
    with torch.inference_mode():
        expected = model(**given).logits
    logits = model(**given).logits
    close(logits, expected)
    logits.sum().backward()
