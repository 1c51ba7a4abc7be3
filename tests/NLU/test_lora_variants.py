"""LoRA's variants in the encoders: how a model starts, what training changes, what files record."""

import json

import pytest
import torch
from compare import assert_close_to_rounding, assert_same_bits
from conversions import BATCH, TERMS, make_base
from lora_variants import FAMILIES, LORA, VARIANTS, build, logits_of, settings_of, train

import loralib as lora
from loralib.adapters.adapter import Adapter
from loralib.adapters.formats import read_adapter, write_adapter
from loralib.errors import CheckpointError, NeedsMergingError
from loralib.lora_layer import lora_layers
from transformers import (
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

pytestmark = pytest.mark.slow

KINDS = {
    "roberta": (RobertaConfig, RobertaForSequenceClassification),
    "deberta": (DebertaV2Config, DebertaV2ForSequenceClassification),
}
EACH_FAMILY = pytest.mark.parametrize("family", FAMILIES)
EACH_VARIANT = pytest.mark.parametrize("name", VARIANTS)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    return {family: make_base(folder / family, family) for family in FAMILIES}


@pytest.fixture
def made(bases):
    """``made(family, name)``: a new model with this variant on the family's base."""
    return lambda family, name, **more: build(bases[family], **settings_of(name), **more)


def close(ours, theirs):
    # W's products round, and so do B A's products and DoRA's norms.
    assert_close_to_rounding(ours, theirs, 3 * TERMS)


# ---- the start, training, merging ----


@EACH_FAMILY
@EACH_VARIANT
def test_a_model_starts_as_its_base(made, bases, family, name):
    model, base = made(family, name), build(bases[family])
    base.load_state_dict({n: model.state_dict()[n] for n in base.state_dict()})
    assert_same_bits(build(bases[family]).base_model.state_dict(), base.base_model.state_dict())
    close(logits_of(model), logits_of(base))
    with torch.no_grad():
        close(model.train()(**BATCH).logits, logits_of(base))


@EACH_FAMILY
@EACH_VARIANT
def test_training_changes_the_trained_parameters_and_the_logits(made, family, name):
    model = made(family, name)
    before = {n: tensor.clone() for n, tensor in model.state_dict().items()}
    start = logits_of(model)
    after = train(model).state_dict()
    moved = {n for n, tensor in after.items() if not torch.equal(tensor, before[n])}
    trained = {n for n, parameter in model.named_parameters() if parameter.requires_grad}
    assert moved == trained
    assert any(n.endswith("lora_A") for n in moved) == (name != "frozen A")
    assert any(n.endswith("lora_magnitude_vector") for n in moved) == ("dora" in name)
    assert (logits_of(model) - start).abs().max() > 1e-3


@EACH_FAMILY
@EACH_VARIANT
def test_a_merged_model_gives_the_same_logits(made, family, name):
    model = train(made(family, name))
    expected = logits_of(model)
    merged = lora.merge(model)
    assert not lora_layers(merged)
    close(logits_of(merged), expected)


@EACH_FAMILY
@EACH_VARIANT
def test_gradient_checkpointing_gives_the_same_gradients(made, family, name):
    gradients = []
    for recompute in (False, True):
        model = made(family, name, gradient_checkpointing=recompute).train()
        model(**BATCH, labels=torch.tensor([0, 2, 1])).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert_same_bits(*gradients)


@pytest.mark.parametrize("name", ["dora", "pissa"])
def test_variants_that_reach_positions_or_contents_alone(bases, name):
    """If LoRA reaches contents alone, positions use the frozen weight, else the adapted one."""
    settings = {**settings_of(name), "lora_targets": ["query", "key"]}
    models = [
        build(bases["deberta"], **settings, lora_positions=reached) for reached in (False, True)
    ]
    models[1].load_state_dict(train(models[0]).state_dict())
    logits = [logits_of(model) for model in models]
    assert (logits[0] - logits[1]).abs().max() > 1e-3
    for model, expected in zip(models, logits, strict=True):
        close(logits_of(lora.merge(model)), expected)


# ---- files ----


@EACH_FAMILY
@EACH_VARIANT
@pytest.mark.parametrize("full", [False, True], ids=["adapter", "full"])
def test_files_restore_the_model_bit_exactly(made, bases, tmp_path, family, name, full):
    model = train(made(family, name))
    if full:
        model.save_pretrained(tmp_path / "full", safe_serialization=True)
        again = type(model).from_pretrained(tmp_path / "full")
        assert again.newly_initialized == frozenset()
    else:
        write_adapter(tmp_path / "x.safetensors", model.adapter())
        again = made(family, name)
        assert again.load_adapters([read_adapter(tmp_path / "x.safetensors")]) == []
    assert_same_bits(again.state_dict(), model.state_dict())
    assert torch.equal(logits_of(again), logits_of(model))


@EACH_FAMILY
def test_metadata_of_variants(made, family):
    recorded = {
        name: made(family, name).adapter().metadata
        for name in ("lora", "pissa, dora", "frozen A", "patterns")
    }
    plain = recorded["lora"]
    assert (plain.variant, plain.initialization, plain.freeze_A) == (None, None, None)
    assert (plain.rank_pattern, plain.alpha_pattern) == (None, None)
    assert (recorded["pissa, dora"].variant, recorded["pissa, dora"].initialization) == (
        "dora",
        "pissa",
    )
    assert recorded["frozen A"].freeze_A is True
    layers = lora_layers(made(family, "patterns"))
    metadata = recorded["patterns"]
    assert {n: metadata.rank_of(n) for n in layers} == {n: each.r for n, each in layers.items()}
    assert {n: metadata.alpha_of(n) for n in layers} == {
        n: each.lora_alpha for n, each in layers.items()
    }


@EACH_FAMILY
def test_config_json_records_the_settings_of_variants(made, tmp_path, family):
    model = made(family, "patterns", lora_init="olora", lora_freeze_A=True)
    model.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert (values["lora_init"], values["lora_freeze_A"]) == ("olora", True)
    start = f"{family}.encoder.layer"
    assert values["lora_rank_pattern"][f"{start}.1.output.dense"] == 3
    assert values["lora_alpha_pattern"][f"{start}.1.intermediate.dense"] == 2.5
    again = type(model.config).from_pretrained(tmp_path)
    assert again.to_dict() == model.config.to_dict()


@EACH_FAMILY
@pytest.mark.parametrize(
    ("name", "asked", "message"),
    [
        ("dora", {"lora_variant": "lora"}, "was trained with lora_variant dora, not lora"),
        ("lora", {"lora_variant": "dora"}, "was trained with lora_variant lora, not dora"),
        ("pissa", {"lora_init": "olora"}, "was trained with lora_init pissa, not olora"),
        ("lora", {"lora_rank_pattern": {"value": 2}}, "was trained with lora_rank_pattern none, "),
        ("layers", {"lora_layers": [0, 1]}, "was trained with lora_layers 1, not None"),
        ("layers", {"lora_layers": [0]}, "was trained with lora_layers 1, not 0"),
    ],
)
def test_a_full_checkpoint_refuses_other_settings(made, tmp_path, family, name, asked, message):
    model = made(family, name)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        type(model).from_pretrained(tmp_path, **asked)
    assert "\n" not in str(caught.value)


def test_other_patterns_are_accepted_if_they_mean_the_same(made, tmp_path):
    model = made("roberta", "patterns")
    model.save_pretrained(tmp_path)
    words = {f"attention.self.{name}": 2 for name in ("query", "key", "value")}
    same = {"layer.0.attention.*": 2, "output": 3, **words, "attention.output.dense": 3}
    with pytest.raises(ValueError, match="was trained with lora_rank_pattern"):
        type(model).from_pretrained(tmp_path, lora_rank_pattern=same)
    del same["attention.self.query"], same["attention.self.key"], same["attention.self.value"]
    again = type(model).from_pretrained(tmp_path, lora_rank_pattern=same, lora_layers=[0, 1])
    assert again.config == model.config


@EACH_FAMILY
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("dora", "lora"),
        ("lora", "dora"),
        ("pissa", "olora"),
        ("pissa", "lora"),
        ("rslora", "lora"),
        ("patterns", "lora"),
        ("lora", "layers"),
    ],
)
def test_an_adapter_of_other_settings_is_refused(made, family, theirs, ours):
    adapter, model = made(family, theirs).adapter(), made(family, ours)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        model.load_adapters([Adapter(adapter.tensors, adapter.metadata, "theirs")])
    assert str(caught.value).startswith("theirs: ")
    assert "\n" not in str(caught.value)
    assert_same_bits(model.state_dict(), before)


@EACH_FAMILY
def test_ranks_of_another_pattern_are_refused_by_module(made, bases, family):
    adapter = made(family, "patterns").adapter()
    other = {**settings_of("patterns"), "lora_rank_pattern": {"layer.0.attention.*": 2}}
    with pytest.raises(CheckpointError, match=r"output\.dense"):
        build(bases[family], **other).load_adapters([adapter])


@EACH_FAMILY
@pytest.mark.parametrize("name", ["dora", "rslora", "pissa", "patterns"])
def test_the_release_s_format_cannot_hold_variants(made, tmp_path, family, name):
    with pytest.raises(NeedsMergingError) as caught:
        write_adapter(tmp_path / "x.bin", made(family, name).adapter())
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


# ---- new models ----


@EACH_FAMILY
@pytest.mark.parametrize("name", ["dora", "pissa", "olora"])
def test_a_new_model_s_lora_starts_from_the_model_s_own_weights(family, name):
    """The model is initialized, not read: magnitudes and factors follow from its new weights."""
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    kind, of_model = KINDS[family]
    model = of_model(kind(**shape, vocab_size=40, intermediate_size=24, **settings_of(name)))
    for layer in lora_layers(model).values():
        if name == "dora":
            norms = layer.weight.detach().norm(dim=1)
            assert_close_to_rounding(layer.lora_magnitude_vector.detach(), norms, 16)
        else:
            assert torch.equal(layer.lora_A.detach(), layer.lora_A_start)
            assert torch.equal(layer.lora_B.detach(), layer.lora_B_start)
            product = layer.scaling * layer.lora_B_start @ layer.lora_A_start
            # The best approximation of rank 4, or a part of W's: subtracting it makes W smaller.
            assert 0 < (layer.weight - product).norm() < layer.weight.norm()


# ---- targets, layers, patterns ----


def modules_of(family, **settings):
    kind, of_model = KINDS[family]
    config = kind(
        **{**LORA, "num_hidden_layers": 3, "hidden_size": 16, "num_attention_heads": 2},
        intermediate_size=24,
        vocab_size=40,
        **settings,
    )
    return {
        name.removeprefix(f"{family}.encoder.layer."): (layer.r, layer.lora_alpha)
        for name, layer in lora_layers(of_model(config)).items()
    }


@EACH_FAMILY
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lora_targets": ["query"], "lora_layers": [2, 0]}, ["0.attention.self.query",
                                                             "2.attention.self.query"]),
        ({"lora_targets": ["layer.1.*.dense"]}, ["1.attention.output.dense",
                                                 "1.intermediate.dense", "1.output.dense"]),
        ({"lora_targets": ["output"], "lora_layers": [1]}, ["1.output.dense"]),
        ({"lora_targets": ["output.dense"], "lora_layers": [1]},
         ["1.attention.output.dense", "1.output.dense"]),
        ({"lora_targets": ["0.intermediate.dense", "value"], "lora_layers": [0]},
         ["0.attention.self.value", "0.intermediate.dense"]),
        ({"lora_targets": ["all-linear"], "lora_layers": [2]},
         ["2.attention.self.query", "2.attention.self.key", "2.attention.self.value",
          "2.attention.output.dense", "2.intermediate.dense", "2.output.dense"]),
    ],
)  # fmt: skip
def test_lora_is_in_the_targets_of_the_given_layers(family, settings, expected):
    found = modules_of(family, **settings)
    assert [name.removesuffix("_proj") for name in found] == expected
    assert set(found.values()) == {(4, 6)}


@EACH_FAMILY
def test_the_first_pattern_that_matches_counts(family):
    settings = {"lora_targets": ["value", "output"], "lora_layers": [0, 1]}
    pattern = {"layer.0.*": 2, "value": 3}
    found = modules_of(family, **settings, lora_rank_pattern=pattern, lora_alpha_pattern={"*": 1})
    ranks = [rank for rank, _ in found.values()]
    assert ranks == [2, 2, 3, 4]
    assert {alpha for _, alpha in found.values()} == {1}


BAD = [
    ({"lora_targets": ["querry"]}, "lora_targets: 'querry' matches no .*similar.*query"),
    ({"lora_targets": ["word_embeddings"]}, "lora_targets: 'word_embeddings' matches no "),
    ({"lora_layers": [2]}, "lora_layers: the model has layers 0 to 1, not 2"),
    ({"lora_layers": []}, "lora_layers names no layer"),
    ({"lora_layers": [-1]}, "lora_layers: the model has layers 0 to 1, not -1"),
    ({"lora_variant": "dorra"}, "unknown lora_variant 'dorra' .known: lora, rslora, dora"),
    ({"lora_variant": ""}, "unknown lora_variant ''"),
    ({"lora_init": "pisa"}, "unknown lora_init 'pisa' .known: default, orthogonal, pissa"),
    ({"lora_init": 1}, "lora_init must be a string, not 1"),
    ({"lora_freeze_A": "yes"}, "lora_freeze_A must be true or false"),
    ({"lora_freeze_A": 1}, "lora_freeze_A must be true or false"),
    ({"lora_rank_pattern": {"key": 2}}, "lora_rank_pattern: 'key' matches no .*LoRA adapts"),
    ({"lora_rank_pattern": {"value": 0}}, "lora_rank_pattern: 'value' has to be a positive int"),
    ({"lora_rank_pattern": {"value": 2.5}}, "lora_rank_pattern must be a map of integers"),
    ({"lora_alpha_pattern": {"outptu": 2}}, "lora_alpha_pattern: 'outptu' matches no"),
    ({"lora_alpha_pattern": {"value": 0}}, "lora_alpha_pattern: 'value' has to be a positive num"),
    ({"lora_r": 17}, "lora_r: rank 17 is larger than the smaller dimension of .*, 16"),
    ({"lora_rank_pattern": {"value": 17}}, "lora_rank_pattern: rank 17 is larger than .*value.*16"),
]  # fmt: skip


@EACH_FAMILY
@pytest.mark.parametrize(("settings", "message"), BAD)
def test_invalid_settings_are_refused(family, bases, settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        build(bases[family], **{**LORA, **settings})
    assert "\n" not in str(caught.value)
