"""DeBERTa-v2: dropout, gradient checkpointing, configuration, loading and outputs."""

import importlib
import json

import make_deberta_fixture as maker
import pytest
import torch
import torch.nn.functional as F
from deberta_cases import CASES, INPUTS, KINDS, LABELS, LORA, XXLARGE, build, close, literal_logits
from safetensors import safe_open

from loralib.adapters.adapter import Adapter
from loralib.adapters.canonical import canonical_names
from loralib.adapters.loading import load_into
from loralib.errors import CheckpointError
from loralib.training.precision import Precision
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

# ---- dropout ----


def record_masks(monkeypatch):
    """Returns a list to which every later dropout mask is added: p, and each element's factor."""
    module, drawn = importlib.import_module("loralib.nn.dropout"), []
    draw = module.keep_mask

    def record(shape, p):
        mask = draw(shape, p)
        drawn.append((p, module.apply_mask(torch.ones(shape), mask, p)))
        return mask

    monkeypatch.setattr(module, "keep_mask", record)
    return drawn


class Replayed:
    """Applies dropout masks that were recorded."""

    def __init__(self, drawn):
        self.drawn = iter(drawn)

    def mask(self, p):
        drawn_p, keep = next(self.drawn)
        assert drawn_p == p
        return keep

    def __call__(self, x, p):
        keep = self.mask(p)
        if len(keep) != len(x):  # not all distances occur in this batch
            keep = F.pad(keep, (0, 0, (len(x) - len(keep) + 1) // 2, (len(x) - len(keep)) // 2))
        return x * keep


def test_every_dropout_is_where_the_formula_has_it(monkeypatch):
    """Recomputes a forward pass in training by the plain formulas, with the masks that it drew."""
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


def test_dropout_follows_the_seed_and_is_off_in_evaluation():
    model, given = build("classifier", **LORA), CASES["padded"]
    assert torch.equal(model(**given).logits, model(**given).logits)
    model.train()
    runs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        runs.append(model(**given).logits)
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


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
    """A step's loss and gradients, the RNG state after it, and how often layers were computed."""
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
def test_recomputed_steps_are_bit_exact(family, autocast, adapted):
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
    ("given", "expected"),
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
def test_spellings_of_the_position_terms(given, expected, tmp_path):
    config = DebertaV2Config(pos_att_type=given)
    assert config.pos_att_type == expected
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).pos_att_type == expected


def test_settings_of_published_files_are_read(tmp_path):
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
        ({"pooler_hidden_size": 8}, "pooler_hidden_size must equal hidden_size, 1536"),
        ({"embedding_size": 8}, "embedding_size must equal hidden_size, 1536"),
        (
            {"position_buckets": 8, "max_relative_positions": 5},
            "below 8 for 5 relative positions, not 8",
        ),
        ({"position_buckets": 1}, "at least 2 and below 1022 for 512 .*, not 1"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
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
    """Writes a model folder as other programs do."""
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
    # Only an adapted model's config names its base.
    base = {"base_name_or_path": loaded.config.base_name_or_path} if settings else {}
    assert loaded.config.to_dict() == {**model.config.to_dict(), **base}
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
def test_published_files_are_read(tmp_path, kind, caplog):
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
def test_a_missing_tensor_is_refused(tmp_path, gone):
    tensors = build("classifier").state_dict()
    del tensors[gone]
    with pytest.raises(CheckpointError, match=f"lacks 1 tensor: {gone}"):
        DebertaV2ForSequenceClassification.from_pretrained(write(tmp_path, tensors))


@pytest.mark.parametrize(
    ("settings", "unknown"),
    [
        ({"share_att_key": True}, r"pos_key_proj\.bias"),
        ({"conv_kernel_size": 0}, r"encoder\.conv\.LayerNorm\.bias"),
        ({"norm_rel_ebd": "none"}, r"deberta\.encoder\.LayerNorm\.bias"),
    ],
)
def test_tensors_that_the_config_does_not_allow_are_refused(tmp_path, settings, unknown):
    tensors = build("classifier", "own both buckets conv norm").state_dict()
    folder = write(tmp_path, tensors, share_att_key=False, conv_act="tanh")
    assert DebertaV2ForSequenceClassification.from_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    write(folder, tensors, **{**values, **settings})
    with pytest.raises(CheckpointError, match=f"tensors that the model does not have: .*{unknown}"):
        DebertaV2ForSequenceClassification.from_pretrained(folder)


def test_absolute_positions_are_read_if_the_model_has_them(tmp_path):
    tensors = build("classifier", "everything").state_dict()
    settings = {"position_biased_input": True, "type_vocab_size": 2}
    model = DebertaV2ForSequenceClassification.from_pretrained(write(tmp_path, tensors, **settings))
    name = "deberta.embeddings.position_embeddings.weight"
    assert torch.equal(model.state_dict()[name], tensors[name])
    del tensors[name]
    with pytest.raises(CheckpointError, match=f"lacks 1 tensor: {name}"):
        DebertaV2ForSequenceClassification.from_pretrained(write(tmp_path, tensors, **settings))


@pytest.mark.parametrize("names", ["new", "old"])
def test_adapters_are_loaded_with_new_and_old_names(tmp_path, names):
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
