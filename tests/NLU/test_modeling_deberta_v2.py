"""DeBERTa-v2: upstream's numbers, a plain reference with gradients, LoRA, padding, loading."""

import copy
import importlib
import itertools
import json
import math

import make_deberta_fixture as maker
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compare import assert_close_to_rounding
from encoder_options import ENCODER_TERMS
from safetensors import safe_open
from safetensors.torch import load_file

import loralib as lora
from loralib.adapters.adapter import Adapter
from loralib.adapters.canonical import canonical_names
from loralib.adapters.loading import load_into
from loralib.errors import CheckpointError
from loralib.nn.packing import PackedRows
from loralib.training.precision import Precision, all_in_half, hold_frozen_in
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    DebertaV2ForSequenceClassification,
    DebertaV2Model,
    RobertaConfig,
    RobertaForSequenceClassification,
)

MODELING = importlib.import_module("transformers.models.deberta_v2.modeling_deberta_v2")


UPSTREAM = load_file(maker.FIXTURE)
VARIANTS, INPUTS = maker.variants(), maker.draw_inputs()
CASES = maker.cases(INPUTS)
KINDS = {
    "backbone": (DebertaV2Model, {}),
    "mlm": (DebertaV2ForMaskedLM, {}),
    "classifier": (DebertaV2ForSequenceClassification, {}),
    "regressor": (DebertaV2ForSequenceClassification, {"num_labels": 1}),
}
LABELS = {"mlm": "tokens_wanted", "classifier": "classes", "regressor": "scores"}
LORA = {"apply_lora": True, "lora_r": 2, "lora_alpha": 6}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
XXLARGE = {
    "num_hidden_layers": 48,
    "relative_attention": True,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
    "position_buckets": 256,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "conv_kernel_size": 3,
    "conv_act": "gelu",
}


def build(kind, variant="xxlarge", **settings):
    """A model with the fixture's weights; LoRA's are drawn, B as well."""
    model_class, labels = KINDS[kind]
    config = DebertaV2Config(**{**maker.CONFIG, **VARIANTS[variant], **labels, **settings})
    model = model_class(config).eval()
    maker.draw_weights(model)
    return model


def real(tensor, arguments):
    """The values at real tokens."""
    mask = arguments.get("attention_mask")
    return tensor if mask is None else tensor[mask == 1]


def close(ours, theirs, terms=ENCODER_TERMS):
    assert_close_to_rounding(ours, theirs, terms)


@pytest.fixture(params=["rows", "padded"])
def path(request, monkeypatch):
    """Attention by either path."""
    cheap = request.param == "padded"
    monkeypatch.setattr(MODELING.Batch, "_padding_is_cheap", lambda *_: cheap)
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


def test_the_crossed_options_tell():
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


def literal_bucket(distance, buckets, furthest):
    """The published formula, over an array."""
    sign, middle = np.sign(distance), buckets // 2
    near = (distance < middle) & (distance > -middle)
    size = np.where(near, middle - 1, np.abs(distance))
    far = np.ceil(np.log(size / middle) / np.log((furthest - 1) / middle) * (middle - 1)) + middle
    return np.where(size <= middle, distance, far * sign).astype(np.int64)


def literal_rows(length, buckets, furthest):
    """(length, length): which embedding the distance of each query and key has."""
    places = np.arange(length)
    distance = places[:, None] - places[None, :]
    if buckets > 0:
        distance = literal_bucket(distance, buckets, furthest)
    span = buckets if buckets > 0 else furthest
    return torch.from_numpy((distance + span).clip(0, 2 * span - 1))


def project(layer, x, adapted=True):
    """W x + b, with LoRA's update merged into W where x is adapted."""
    weight = layer.weight
    if adapted and isinstance(layer, lora.LoRALayer):
        weight = weight + layer.scaling * layer.lora_B @ layer.lora_A
    return F.linear(x, weight, layer.bias)


def norm(layer, x):
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
    return (x - mean) / (variance + layer.eps).sqrt() * layer.weight + layer.bias


def literal_attention(config, attention, x, embeddings, mask, drop):
    """One layer's attention over (length, hidden), head by head and formula by formula."""
    length, width = x.shape
    dim = width // config.num_attention_heads
    q, k, v = (project(getattr(attention, f"{n}_proj"), x) for n in ("query", "key", "value"))
    terms = config.pos_att_type if config.relative_attention else []
    if terms:
        embeddings = drop(embeddings, config.hidden_dropout_prob)
        shared, reached = config.share_att_key, config.lora_positions
        rows = literal_rows(length, config.position_buckets, config.furthest)
    heads = []
    keep = drop.mask(config.attention_probs_dropout_prob)
    for head in range(config.num_attention_heads):
        part = slice(head * dim, (head + 1) * dim)
        scores = q[:, part] @ k[:, part].T
        if "c2p" in terms:
            layer = attention.key_proj if shared else attention.pos_key_proj
            keys = project(layer, embeddings, reached)[:, part][rows]  # (query, key, dim)
            scores = scores + torch.einsum("id,ijd->ij", q[:, part], keys)
        if "p2c" in terms:
            layer = attention.query_proj if shared else attention.pos_query_proj
            queries = project(layer, embeddings, reached)[:, part][rows]
            scores = scores + torch.einsum("ijd,jd->ij", queries, k[:, part])
        scores = scores / math.sqrt(dim * (1 + len(config.pos_att_type)))
        weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=1)
        heads.append((weights if keep is None else weights * keep[0, head]) @ v[:, part])
    return torch.cat(heads, dim=1)


def literal_convolution(layer, x, mask):
    """The convolution of (length, hidden), where padding is zero, one offset at a time."""
    kernel, groups = layer.conv.weight, layer.conv.groups
    out_channels, in_channels, width = kernel.shape
    x = x * mask[:, None]
    out = layer.conv.bias.repeat(len(x), 1)
    for group in range(groups):
        inputs = slice(group * in_channels, (group + 1) * in_channels)
        outputs = slice(group * out_channels // groups, (group + 1) * out_channels // groups)
        for offset in range(width):
            shift = offset - width // 2
            for place in range(max(0, -shift), min(len(x), len(x) - shift)):
                add = torch.zeros_like(out)
                add[place, outputs] = kernel[outputs, :, offset] @ x[place + shift, inputs]
                out = out + add
    return out


class NoDropout:
    """Drops nothing."""

    def __call__(self, x, p):
        return x

    def mask(self, p):
        return None


def literal_states(model, ids, mask, types, drop):
    """Every hidden state (length, hidden) of one padded row."""
    config, backbone = model.config, model.base_model
    embeddings, encoder = backbone.embeddings, backbone.encoder
    x = embeddings.word_embeddings.weight[ids]
    if config.position_biased_input:
        x = x + embeddings.position_embeddings.weight[: len(ids)]
    if config.type_vocab_size:
        x = x + embeddings.token_type_embeddings.weight[types]
    x = drop(norm(embeddings.LayerNorm, x), config.hidden_dropout_prob)
    relative = encoder.rel_embeddings.weight if config.relative_attention else None
    if relative is not None and config.norm_rel_ebd == "layer_norm":
        relative = norm(encoder.LayerNorm, relative)
    states = [x]
    for number, layer in enumerate(encoder.layer):
        attention, p = layer.attention, config.hidden_dropout_prob
        mixed = literal_attention(config, attention.self, x, relative, mask, drop)
        attended = drop(project(attention.output.dense, mixed), p) + x
        attended = norm(attention.output.LayerNorm, attended)
        inner = F.gelu(project(layer.intermediate.dense, attended))
        output = drop(project(layer.output.dense, inner), p) + attended
        output = norm(layer.output.LayerNorm, output)
        if number == 0 and config.conv_kernel_size:
            seen = drop(literal_convolution(encoder.conv, x, mask), p)
            act = {"gelu": F.gelu, "tanh": torch.tanh}[config.conv_act]
            output = norm(encoder.conv.LayerNorm, output + act(seen))
        x = output
        states.append(x)
    return states


def literal_logits(model, given, drop=None):
    """A classifier's logits, row by padded row."""
    drop = drop or NoDropout()
    config, rows = model.config, []
    for row, ids in enumerate(given["input_ids"]):
        mask = given.get("attention_mask", torch.ones_like(given["input_ids"]))[row] == 1
        types = given.get("token_type_ids", torch.zeros_like(given["input_ids"]))[row]
        x = literal_states(model, ids, mask, types, drop)[-1][:1]
        act = {"gelu": F.gelu, "tanh": torch.tanh}[config.pooler_hidden_act]
        pooled = act(project(model.pooler.dense, drop(x, config.pooler_dropout)))
        head_dropout = config.cls_dropout
        p = config.hidden_dropout_prob if head_dropout is None else head_dropout
        rows.append(project(model.classifier, drop(pooled, p)))
    return torch.cat(rows)


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
@pytest.mark.parametrize("adapted", ADAPTED.values(), ids=ADAPTED)
@pytest.mark.parametrize("variant", LITERAL)
def test_losses_and_gradients_of_the_literal_formulas(variant, adapted, path):
    settings = {**adapted, **NO_DROPOUT, **LITERAL[variant]}
    model = build("classifier", variant, **settings).double()
    reference = copy.deepcopy(model)
    for each in (model, reference):
        each.train_only(("lora",) if adapted else ("",))
        each.train()
    case = {**CASES["holes" if path == "padded" else "padded"], "token_type_ids": INPUTS["types"]}
    loss = model(**case, labels=INPUTS["classes"]).loss
    # The model takes its loss in float32, so gradients are exact to that.
    expected = F.cross_entropy(literal_logits(reference, case).float(), INPUTS["classes"])
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


@pytest.mark.parametrize(("buckets", "furthest"), [(-1, 6), (8, 24), (6, 12), (256, 512), (7, 40)])
@pytest.mark.parametrize("length", [1, 2, 9, 300])
def test_relative_rows_are_the_literal_ones(length, buckets, furthest):
    rows = MODELING.relative_rows(length, buckets, furthest)
    literal = literal_rows(length, buckets, furthest)
    expected = [*literal[0].flip(0).tolist(), *literal[1:, 0].tolist()]
    assert list(rows) == expected
    assert list(rows) == sorted(rows)


def test_texts_longer_than_the_distances_known(path):
    model = build("classifier", **NO_DROPOUT)
    ids = torch.randint(3, 48, (2, 50), generator=torch.Generator().manual_seed(1))
    close(model(ids).logits, literal_logits(model, {"input_ids": ids}))


def test_skew():
    scores = torch.arange(2 * 3 * 6.0).view(2, 3, 6)
    skewed = MODELING.skew(scores, 4)
    assert skewed[1].tolist() == [[20, 21, 22, 23], [25, 26, 27, 28], [30, 31, 32, 33]]
    assert torch.equal(MODELING.skew(scores.transpose(0, 1)[1:], 5)[1, 1], scores[1, 2, :5])


# ---- dropout ----


def record_masks(monkeypatch):
    """The list that every dropout mask drawn from here on goes to: what elements are scaled by."""
    module, drawn = importlib.import_module("loralib.nn.dropout"), []
    draw = module.keep_mask

    def record(shape, p):
        mask = draw(shape, p)
        drawn.append((p, module.apply_mask(torch.ones(shape), mask, p)))
        return mask

    monkeypatch.setattr(module, "keep_mask", record)
    return drawn


class Replayed:
    """Drops by masks that were drawn."""

    def __init__(self, drawn):
        self.drawn = iter(drawn)

    def mask(self, p):
        drawn_p, keep = next(self.drawn)
        assert drawn_p == p
        return keep

    def __call__(self, x, p):
        keep = self.mask(p)
        if len(keep) != len(x):  # the distances that occur are some of those there are
            keep = F.pad(keep, (0, 0, (len(x) - len(keep) + 1) // 2, (len(x) - len(keep)) // 2))
        return x * keep


def test_every_dropout_is_where_the_formula_has_it(monkeypatch):
    """One training forward, computed again by the plain formulas with the masks that were drawn."""
    settings = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.4}
    model = build("classifier", **settings, pooler_dropout=0.3, cls_dropout=0.5)
    drawn, given = record_masks(monkeypatch), CASES["row2"]
    torch.manual_seed(3)
    ours = model.train()(**given, output_hidden_states=True).logits
    replayed = Replayed(drawn)
    close(ours, literal_logits(model, given, replayed))
    assert next(replayed.drawn, None) is None
    assert not torch.allclose(ours, model.eval()(**given).logits, atol=0.05)


@pytest.mark.parametrize(("cls_dropout", "expected"), [(None, 0.1), (0.0, 0.0), (0.15, 0.15)])
def test_dropout_before_the_classifier(cls_dropout, expected):
    assert build("classifier", cls_dropout=cls_dropout).dropout.p == expected


def test_dropout_follows_the_seed_and_keeps_out_of_evaluation():
    model, given = build("classifier", **LORA), CASES["padded"]
    assert torch.equal(model(**given).logits, model(**given).logits)
    model.train()
    runs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        runs.append(model(**given).logits)
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


# ---- padding ----


@pytest.mark.parametrize("kind", ["classifier", "regressor"])
@pytest.mark.parametrize("variant", ["xxlarge", "one layer", "absolute"])
def test_first_token_alone_gives_the_full_paths_logits(variant, kind):
    model, given = build(kind, variant, **LORA), CASES["holes"]
    output = model(**given, output_hidden_states=True)
    close(model(**given).logits, output.logits)
    assert output.hidden_states[-1].shape == (4, 18, 32)


def test_padded_batch_gives_what_its_rows_give(path):
    model = build("classifier", **LORA)
    batch = model(**CASES["padded"]).logits
    for row in range(4):
        close(batch[row], model(**CASES[f"row{row}"]).logits[0])


def test_what_stands_at_padding_does_not_matter(path):
    model, given = build("classifier", "everything"), dict(CASES["padded"])
    expected = model(**given).logits
    given["input_ids"] = given["input_ids"].masked_fill(given["attention_mask"] == 0, 7)
    assert torch.equal(model(**given).logits, expected)
    wider = {name: F.pad(t, (0, 30)) for name, t in given.items()}
    close(model(**wider).logits, expected)


def test_rows_of_very_different_length_are_taken_one_by_one():
    def by_row(lengths, holes=False):
        mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        mask[0, 2] = 1 - int(holes)
        return MODELING.Batch(PackedRows(mask), None, heads=12).by_row

    assert by_row([9, 200, 3])
    assert not by_row([30] * 16)
    # Their distances are not those of tokens laid end to end.
    assert not by_row([9, 200, 3], holes=True)


def test_rows_of_one_token(path):
    model = build("classifier", **NO_DROPOUT)
    ids = INPUTS["ids"][:, :1]
    close(model(ids).logits, literal_logits(model, {"input_ids": ids}))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"attention_mask": torch.tensor([[0, 1, 1]])}, "hides the first token"),
        (
            {"attention_mask": torch.ones(1, 4)},
            r"attention_mask is \(1, 4\), the batch is \(1, 3\)",
        ),
        ({"token_type_ids": torch.zeros(1, 2).long()}, r"the batch is \(1, 2\)"),
        ({"position_ids": torch.zeros(1, 2).long()}, r"the batch is \(1, 2\)"),
    ],
)
def test_batches_that_do_not_fit(changed, message):
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
def test_lora_where_the_release_has_it_and_as_many():
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


def test_lora_is_not_merged_and_can_be(path):
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
    plain = lora.merge(copy.deepcopy(model))
    assert not any(isinstance(module, lora.LoRALayer) for module in plain.modules())
    close(plain(**given).logits, evaluated)


def test_seed_gives_the_weights_and_lora_those_of_the_release():
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
    hold_frozen_in(model, torch.bfloat16)
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
def test_biases_can_be_trained_beside_half_precision(dropout):
    model = build("classifier", **LORA, **dropout)
    model.train_only(("lora", "bias"))
    model.train()
    hold_frozen_in(model, torch.bfloat16)
    with Precision(torch.bfloat16, "cpu").autocast():
        loss = model(**CASES["padded"], labels=INPUTS["classes"]).loss
    loss.backward()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert parameter.grad.dtype == torch.float32


def test_all_in_half():
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


# ---- gradient checkpointing, of both families ----


def roberta(**settings):
    torch.manual_seed(0)
    shape = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = RobertaConfig(**shape, intermediate_size=64, num_labels=3, **settings)
    return RobertaForSequenceClassification(config)


FAMILIES = {
    "deberta": lambda **settings: build("classifier", num_hidden_layers=3, **settings),
    "deberta rows": lambda **settings: build(
        "classifier", "own both buckets conv norm", **settings
    ),
    "mlm": lambda **settings: build("mlm", **settings),
    "roberta": roberta,
}


def training_step(model, seed=4):
    """Loss and gradients of a step with dropout, and how often layers were computed."""
    calls = []
    for module in model.modules():
        if type(module).__name__ == "Intermediate":
            module.register_forward_hook(lambda *_: calls.append(1))
    kind = "mlm" if isinstance(model, DebertaV2ForMaskedLM) else "classifier"
    torch.manual_seed(seed)
    loss = model(**CASES["padded"], labels=INPUTS[LABELS[kind]]).loss
    loss.backward()
    state = torch.get_rng_state()
    return loss, {n: p.grad for n, p in model.named_parameters()}, state, len(calls)


@pytest.mark.parametrize("adapted", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_steps_keep_every_bit(family, autocast, adapted):
    steps = []
    for recompute in (False, True):
        model = FAMILIES[family](**LORA, gradient_checkpointing=recompute)
        model.train_only(("lora",) if adapted else ("",))
        model.train()
        with Precision(torch.bfloat16 if autocast else torch.float32, "cpu").autocast():
            steps.append(training_step(model))
    (loss, gradients, state, calls), (again, others, other_state, more) = steps
    assert torch.equal(loss, again)
    assert torch.equal(state, other_state)
    for name, gradient in gradients.items():
        assert (gradient is None) == (others[name] is None)
        assert gradient is None or torch.equal(gradient, others[name]), name
    assert more == 2 * calls


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputing_holds_less_between_forward_and_backward(family):
    held = []
    for recompute in (False, True):
        model = FAMILIES[family](**LORA, gradient_checkpointing=recompute)
        model.train_only(("lora",))
        model.train()
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=sizes: (sizes.append(t.numel()), t)[1], lambda t: t
        ):
            model(**CASES["padded"])
        held.append(sum(sizes))
    assert held[1] < held[0] / 2


def test_evaluation_is_not_recomputed():
    model = build("classifier", **LORA, gradient_checkpointing=True)
    assert training_step(model)[3] == 2
    model.train()
    with torch.no_grad():
        assert torch.isfinite(model(**CASES["padded"]).logits).all()


# ---- configuration ----


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("p2c|c2p", ["p2c", "c2p"]),
        (" C2P | p2c", ["c2p", "p2c"]),
        (["c2p", "c2p"], ["c2p"]),
        (("p2c", "c2p"), ["p2c", "c2p"]),
        ("none", []),
        ("", []),
        (None, []),
    ],
)
def test_spellings_of_the_position_terms(given, kept, tmp_path):
    config = DebertaV2Config(pos_att_type=given)
    assert config.pos_att_type == kept
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).pos_att_type == kept


def test_settings_of_published_files(tmp_path):
    published = {
        "model_type": "deberta-v2",
        "attention_head_size": 64,
        "attention_probs_dropout_prob": 0.1,
        "max_relative_positions": -1,
        "pooler_hidden_size": 1536,
        "type_vocab_size": 0,
        **XXLARGE,
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    config = AutoConfig.from_pretrained(tmp_path, cls_dropout=0.15, num_labels=3)
    assert isinstance(config, DebertaV2Config)
    assert (config.furthest, config.attention_span, config.cls_dropout) == (512, 256, 0.15)
    assert config.pos_att_type == ["p2c", "c2p"]
    assert not config.gradient_checkpointing


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 10, "num_attention_heads": 4}, "10 is not a multiple of 4 heads"),
        ({"pos_att_type": "p2p|c2p"}, "unknown pos_att_type 'p2p'"),
        ({"norm_rel_ebd": "batch"}, "unknown norm_rel_ebd 'batch'"),
        ({"conv_act": "sine"}, "unknown conv_act 'sine'"),
        ({"pooler_hidden_act": "sine"}, "unknown pooler_hidden_act 'sine'"),
        ({"conv_kernel_size": 4}, "conv_kernel_size has to be odd, not 4"),
        ({"pooler_hidden_size": 8}, "pooler_hidden_size has to be the hidden_size, 1536"),
        ({"embedding_size": 8}, "embedding_size has to be the hidden_size, 1536"),
        ({"position_buckets": 8, "max_relative_positions": 5}, "buckets 8 do not fit 5"),
        ({"position_buckets": 1}, "buckets 1 do not fit 512"),
    ],
)
def test_settings_that_no_model_can_have(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        DebertaV2Config(**settings)
    assert "\n" not in str(error.value)


def test_auto_classes():
    config = DebertaV2Config(**maker.CONFIG)
    for auto, kind in (
        (AutoModel, DebertaV2Model),
        (AutoModelForMaskedLM, DebertaV2ForMaskedLM),
        (AutoModelForSequenceClassification, DebertaV2ForSequenceClassification),
    ):
        assert type(auto.from_config(config)) is kind


# ---- loading ----


def write(folder, tensors, **settings):
    """A model folder as others make it."""
    folder.mkdir(exist_ok=True)
    values = {**maker.CONFIG, **maker.XXLARGE, "model_type": "deberta-v2", **settings}
    (folder / "config.json").write_text(json.dumps(values))
    own = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    torch.save(own, folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("settings", [{}, LORA], ids=["plain", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_save_and_load(tmp_path, kind, settings, safe):
    model = build(kind, **settings)
    model.save_pretrained(tmp_path, safe_serialization=safe)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.config.to_dict() == {
        **model.config.to_dict(),
        "base_name_or_path": loaded.config.base_name_or_path,
    }
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    if safe:
        with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
            assert "encoder.conv.conv.weight" in " ".join(file.keys())


def test_names_are_upstreams():
    names = set(build("classifier", "own both buckets conv norm").state_dict())
    layer = "deberta.encoder.layer.1."
    expected = {
        "deberta.embeddings.word_embeddings.weight",
        "deberta.embeddings.LayerNorm.weight",
        "deberta.encoder.rel_embeddings.weight",
        "deberta.encoder.LayerNorm.bias",
        "deberta.encoder.conv.conv.weight",
        "deberta.encoder.conv.LayerNorm.weight",
        f"{layer}attention.self.query_proj.weight",
        f"{layer}attention.self.pos_key_proj.bias",
        f"{layer}attention.self.pos_query_proj.weight",
        f"{layer}attention.output.dense.weight",
        f"{layer}attention.output.LayerNorm.weight",
        f"{layer}intermediate.dense.weight",
        f"{layer}output.dense.bias",
        f"{layer}output.LayerNorm.weight",
        "pooler.dense.weight",
        "classifier.bias",
    }
    assert expected <= names
    assert "deberta.embeddings.position_embeddings.weight" not in names
    assert {name for name in build("mlm").state_dict() if name.startswith("cls.")} == {
        "cls.predictions.bias",
        "cls.predictions.decoder.bias",
        "cls.predictions.decoder.weight",
        "cls.predictions.transform.dense.weight",
        "cls.predictions.transform.dense.bias",
        "cls.predictions.transform.LayerNorm.weight",
        "cls.predictions.transform.LayerNorm.bias",
    }


def published(model):
    """A masked language model's tensors as the first published files name them."""
    tensors = {"deberta.embeddings.position_embeddings.weight": torch.ones(24, 32)}
    for name, tensor in model.state_dict().items():
        name = name.replace("cls.predictions.transform.", "lm_predictions.lm_head.")
        name = name.replace("cls.predictions.bias", "lm_predictions.lm_head.bias")
        if "decoder" not in name:
            tensors[name.replace("embeddings.LayerNorm.weight", "embeddings.LayerNorm.gamma")] = (
                tensor
            )
    mask = {"mask_predictions.dense.weight": torch.ones(2, 2), "deberta.embeddings.position_ids": 0}
    return {**tensors, **{name: torch.as_tensor(value) for name, value in mask.items()}}


@pytest.mark.parametrize("kind", ["backbone", "mlm", "classifier"])
def test_published_files(tmp_path, kind, caplog):
    source = build("mlm")
    folder = write(tmp_path, published(source))
    assert "lm_predictions.lm_head.dense.weight" in torch.load(folder / "pytorch_model.bin")
    model = KINDS[kind][0].from_pretrained(folder)
    given = CASES["padded"]
    if kind == "mlm":
        assert torch.equal(model(**given).logits, source(**given).logits)
        assert "newly initialized" not in caplog.text
    else:
        ours = model.base_model(**given).last_hidden_state
        assert torch.equal(ours, source.deberta(**given).last_hidden_state)
        assert ("no head weights: they are newly initialized" in caplog.text) == (
            kind == "classifier"
        )


@pytest.mark.parametrize(
    "gone",
    [
        "deberta.encoder.rel_embeddings.weight",
        "deberta.encoder.conv.conv.bias",
        "deberta.encoder.LayerNorm.weight",
        "deberta.encoder.layer.1.attention.self.key_proj.weight",
        "classifier.weight",
    ],
)
def test_a_tensor_that_is_missing(tmp_path, gone):
    tensors = build("classifier").state_dict()
    del tensors[gone]
    with pytest.raises(CheckpointError, match=f"lacks 1 tensors: {gone}"):
        DebertaV2ForSequenceClassification.from_pretrained(write(tmp_path, tensors))


@pytest.mark.parametrize(
    ("settings", "unknown"),
    [
        ({"share_att_key": True}, r"pos_key_proj\.bias"),
        ({"conv_kernel_size": 0}, r"encoder\.conv\.LayerNorm\.bias"),
        ({"norm_rel_ebd": "none"}, r"deberta\.encoder\.LayerNorm\.bias"),
    ],
)
def test_tensors_that_the_settings_know_nothing_of(tmp_path, settings, unknown):
    tensors = build("classifier", "own both buckets conv norm").state_dict()
    folder = write(tmp_path, tensors, share_att_key=False, conv_act="tanh")
    assert DebertaV2ForSequenceClassification.from_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    write(folder, tensors, **{**values, **settings})
    with pytest.raises(CheckpointError, match=f"tensors unknown to the model: .*{unknown}"):
        DebertaV2ForSequenceClassification.from_pretrained(folder)


def test_absolute_positions_are_no_mere_leftover_where_the_model_has_them(tmp_path):
    tensors = build("classifier", "everything").state_dict()
    settings = {"position_biased_input": True, "type_vocab_size": 2}
    model = DebertaV2ForSequenceClassification.from_pretrained(write(tmp_path, tensors, **settings))
    name = "deberta.embeddings.position_embeddings.weight"
    assert torch.equal(model.state_dict()[name], tensors[name])
    del tensors[name]
    with pytest.raises(CheckpointError, match=f"lacks 1 tensors: {name}"):
        DebertaV2ForSequenceClassification.from_pretrained(write(tmp_path, tensors, **settings))


@pytest.mark.parametrize("names", ["new", "old"])
def test_adapters(tmp_path, names):
    model = build("classifier", **LORA)
    adapter = model.adapter()
    assert (adapter.metadata.rank, adapter.metadata.alpha) == (2, 6)
    assert adapter.metadata.targets == ("query_proj", "value_proj")
    assert len(adapter.tensors) == 2 * 4 + 4
    tensors = adapter.tensors
    if names == "old":
        changes = (("query_proj.lora_", "query_lora_"), ("value_proj.lora_", "value_lora_"))
        for new, old in changes:
            tensors = {
                name.replace(f"{new}A", f"{old}a.weight").replace(f"{new}B", f"{old}b.weight"): t
                for name, t in tensors.items()
            }
        assert "deberta.encoder.layer.0.attention.self.query_lora_a.weight" in tensors
        tensors = canonical_names(tensors, "release.bin")
    base = {name: t for name, t in model.state_dict().items() if name.startswith("deberta.")}
    base = {name: t for name, t in base.items() if "lora_" not in name}
    other = DebertaV2ForSequenceClassification.from_pretrained(write(tmp_path, base), **LORA)
    load_into(other, Adapter(tensors, adapter.metadata))
    assert torch.equal(other(**CASES["padded"]).logits, model(**CASES["padded"]).logits)


# ---- outputs ----


def test_tuples_and_states():
    given = CASES["padded"]
    model = build("classifier")
    named = model(**given, labels=INPUTS["classes"])
    loss, logits = model(**given, labels=INPUTS["classes"], return_dict=False)
    assert torch.equal(loss, named.loss)
    assert torch.equal(logits, named.logits)
    last, states = build("backbone")(**given, return_dict=False, output_hidden_states=True)
    assert (last.shape, len(states)) == ((4, 18, 32), 3)
    by_config = build("mlm", output_hidden_states=True)
    assert len(by_config(**given).hidden_states) == 3
    assert by_config(**given, output_hidden_states=False).hidden_states is None


def test_language_model_head_is_tied():
    model = build("mlm")
    assert model.cls.predictions.decoder.weight is model.deberta.embeddings.word_embeddings.weight
    assert model.cls.predictions.decoder.bias is model.cls.predictions.bias
