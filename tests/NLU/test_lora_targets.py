"""Which projections LoRA adapts, what it computes there, and what its files record."""

import json

import pytest
import torch
from compare import assert_close_to_rounding
from encoder_options import ENCODER_TERMS, NO_DROPOUT
from torch import nn

import loralib as lora
from loralib.adapters.formats import read_adapter, write_adapter
from loralib.adapters.metadata import LoraMetadata
from loralib.adapters.names import lora_targets
from loralib.errors import CheckpointError
from loralib.io.tensors import read_tensors
from loralib.lora_layer import lora_layers
from transformers import AutoConfig, RobertaConfig, RobertaForSequenceClassification
from transformers.adaptation_settings import LORA_TARGETS, in_order, targets_of_modules

FAMILIES = ("roberta", "deberta")
LORA = {"apply_lora": True, "lora_r": 3, "lora_alpha": 12}
ALL = list(LORA_TARGETS)
CHOICES = [[name] for name in ALL] + [["query", "value"], ["key", "output"], ALL]
# The module of each choice within a layer.
MODULES = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_output": "attention.output.dense",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
}


@pytest.fixture
def build(make_classifier):
    def make(family, **settings):
        given = {**NO_DROPOUT, "num_labels": 3, "pad_token_id": 1, **settings}
        return make_classifier(family, **given)

    return make


def close(ours, theirs):
    assert_close_to_rounding(ours, theirs, ENCODER_TERMS)


def module_of(family, target):
    suffix = "_proj" if family == "deberta" and target in ("query", "key", "value") else ""
    return MODULES[target] + suffix


# ---- where LoRA is, and what it computes ----


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("targets", CHOICES, ids="+".join)
def test_lora_is_where_it_is_asked_for(build, family, targets):
    model = build(family, **LORA, lora_targets=targets)
    expected = {
        f"{family}.encoder.layer.{n}.{module_of(family, target)}"
        for n in (0, 1)
        for target in targets
    }
    assert lora_layers(model).keys() == expected
    model.train_only(("lora",))
    inside = {n for n, p in model.base_model.named_parameters() if p.requires_grad}
    assert {f"{family}.{n.rpartition('.lora_')[0]}" for n in inside} == expected


def merged_by_hand(model, plain, scaling):
    """`plain` with the model's weights, W + scaling · B A where there is LoRA."""
    state = model.state_dict()
    for name in plain.state_dict():
        tensor = state[name].clone()
        start = name.removesuffix("weight")
        if f"{start}lora_A" in state and name.endswith("weight"):
            tensor += scaling * state[f"{start}lora_B"] @ state[f"{start}lora_A"]
        plain.state_dict()[name].copy_(tensor)
    return plain


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("targets", CHOICES, ids="+".join)
def test_the_model_computes_with_w_plus_the_delta(build, batch, family, targets):
    # So that DeBERTa's positions use the adapted weight too; see test_lora_positions.py.
    everywhere = {"lora_positions": True} if family == "deberta" else {}
    model = build(family, **LORA, lora_targets=targets, **everywhere)
    plain = merged_by_hand(model, build(family), 12 / 3)
    expected = plain(**batch).logits
    without = build(family)
    without.load_state_dict({n: model.state_dict()[n] for n in without.state_dict()})
    assert (without(**batch).logits - expected).abs().max() > 1e-2
    close(model(**batch).logits, expected)
    with torch.no_grad():  # merged, where the family merges
        close(model(**batch).logits, expected)
    close(model.train()(**batch).logits, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_reach_every_target(build, batch, family):
    model = build(family, **LORA, lora_targets=ALL, gradient_checkpointing=True).train()
    model.train_only(("lora",))
    model(**batch).loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        if "lora_" in name and ".key" not in name:
            assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_default_is_the_release_s(build, family):
    model = build(family, **LORA)
    assert model.config.lora_targets == ["query", "value"]
    ends = {name.rsplit(".", 2)[1] for name in model.state_dict() if "lora_" in name}
    suffix = "_proj" if family == "deberta" else ""
    assert ends == {f"query{suffix}", f"value{suffix}"}


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_dropout_acts_in_training_alone(build, batch, family):
    model = build(family, **LORA, lora_dropout=0.5, lora_targets=ALL)
    assert {layer.lora_dropout.p for layer in lora_layers(model).values()} == {0.5}
    evaluated = model(**batch).logits
    close(evaluated, build(family, **LORA, lora_targets=ALL)(**batch).logits)
    model.train()
    torch.manual_seed(0)
    first = model(**batch).logits
    torch.manual_seed(0)
    close(model(**batch).logits, first)
    assert (model(**batch).logits - first).abs().max() > 1e-2


# ---- the names ----


@pytest.mark.parametrize("family", FAMILIES)
def test_metadata_names_the_modules_of_all_targets(build, family):
    model = build(family, **LORA, lora_targets=ALL)
    suffix = "_proj" if family == "deberta" else ""
    self_attention = {f"{name}{suffix}" for name in ("query", "key", "value")}
    outputs = {"attention.output.dense", "intermediate.dense", "output.dense"}
    info = model.adapter().metadata
    assert info.targets == tuple(sorted(self_attention | outputs))
    assert targets_of_modules(info.targets) == ALL


def test_short_names_of_modules():
    names = ["h.0.attn.c_attn", "e.layer.3.output.dense", "e.layer.11.attention.output.dense"]
    assert lora_targets(names) == ("attention.output.dense", "c_attn", "output.dense")
    assert lora_targets(["dense", "a.dense"]) == ("a.dense", "dense")
    assert targets_of_modules(("value_proj", "query_proj")) == ["query", "value"]
    with pytest.raises(ValueError, match="unknown lora_targets 'c_attn'"):
        targets_of_modules(("c_attn",))


def test_targets_are_stored_in_one_order(tmp_path):
    config = RobertaConfig(**LORA, lora_targets=("output", "key", "output"))
    assert config.lora_targets == ["key", "output"]
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["lora_targets"] == ["key", "output"]
    assert AutoConfig.from_pretrained(tmp_path).lora_targets == ["key", "output"]
    assert in_order(reversed(ALL)) == ALL


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"lora_targets": ["query", "danse"]},
            "lora_targets: 'danse' matches no projection; similar",
        ),
        ({"lora_targets": []}, "apply_lora needs lora_targets: some of"),
        ({"lora_dropout": 1.5}, r"lora_dropout must lie in \[0, 1\), not 1.5"),
        ({"lora_dropout": 1.0}, r"lora_dropout must lie in \[0, 1\), not 1.0"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        RobertaConfig(**LORA, **settings)


# ---- files ----


@pytest.mark.parametrize("format", [".bin", ".safetensors"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("targets", CHOICES, ids="+".join)
def test_a_file_restores_the_model(build, batch, tmp_path, family, targets, format):
    settings = {**LORA, "lora_targets": targets}
    model, fresh = build(family, **settings), build(family, **settings)
    for name, parameter in model.named_parameters():
        if "lora_" in name or not name.startswith(f"{family}."):
            parameter.data.normal_(std=0.3)
    write_adapter(tmp_path / f"x{format}", model.adapter())
    assert fresh.load_adapters([read_adapter(tmp_path / f"x{format}")]) == []
    close(fresh(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_library_s_functions_on_models_built_with_lora(build, batch, tmp_path, family):
    model, again, path = build(family, **LORA), build(family, **LORA), tmp_path / "a.safetensors"
    with pytest.raises(CheckpointError, match=r"of the base is trained, and no adapter holds it"):
        lora.save_adapter(model, path)
    assert not path.exists()
    lora.mark_only_lora_as_trainable(model)
    lora.save_adapter(model, path)
    plain = build(family)
    plain.load_state_dict({n: t for n, t in model.state_dict().items() if "lora_" not in n})
    for refused in (
        lambda: lora.add_lora(plain, "all-linear", r=3),
        lambda: lora.load_adapter(plain, path),
    ):
        with pytest.raises(lora.UnsupportedLayerError, match=r"encoder of this project, which has"):
            refused()
    with pytest.raises(ValueError, match=r"query(_proj)? was built as a LoRA layer: leave it out"):
        lora.add_lora(again, ["*query*"], r=3)
    other = build(family, **{**LORA, "lora_r": 2})
    other.load_state_dict(plain.state_dict(), strict=False)
    with pytest.raises(CheckpointError, match=r"rank 3.* with 2 .*: build the model with the ad"):
        lora.load_adapter(other, path)
    for layer in lora_layers(again).values():
        nn.init.zeros_(layer.lora_B)
    assert not torch.equal(again(**batch).logits, model(**batch).logits)
    lora.load_adapter(again, path)
    assert torch.equal(again(**batch).logits, model(**batch).logits)


def test_lora_that_a_model_without_lora_leaves_out_is_warned_of(build, caplog):
    file = lora.lora_state_dict(build("roberta", **LORA))
    caplog.clear()
    build("roberta").load_state_dict(file, strict=False)
    (record,) = caplog.records
    assert f"names that the model lacks ({next(iter(file))}, …)" in record.getMessage()


def test_a_file_records_targets_and_dropout(build, tmp_path):
    model = build("roberta", **LORA, lora_targets=["key", "output"], lora_dropout=0.1)
    write_adapter(tmp_path / "x.safetensors", model.adapter())
    metadata = read_tensors(tmp_path / "x.safetensors")[1]
    assert json.loads(metadata["targets"]) == ["key", "output.dense"]
    assert json.loads(metadata["dropout"]) == 0.1
    assert "dropout" not in build("roberta", **LORA).adapter().metadata.to_metadata()


@pytest.mark.parametrize("has_metadata", [True, False], ids=["metadata", "no metadata"])
@pytest.mark.parametrize(
    ("theirs", "ours", "message"),
    [
        (["query", "value"], ["query"], "targets query, value, the model was built with query"),
        (["query"], ["key"], "query"),
        (["output"], ["attention_output"], "output.dense"),
        (["attention_output", "output"], ["output"], "attention.output.dense, output.dense, the "),
        (["intermediate"], ["output"], "intermediate.dense"),
    ],
)
def test_other_targets_are_refused(build, tmp_path, has_metadata, theirs, ours, message):
    name = tmp_path / ("x.safetensors" if has_metadata else "x.bin")
    write_adapter(name, build("roberta", **LORA, lora_targets=theirs).adapter())
    model = build("roberta", **LORA, lora_targets=ours)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=message) as caught:
        model.load_adapters([read_adapter(name)])
    assert "\n" not in str(caught.value)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


def test_an_adapter_records_each_module_s_rank_and_alpha(build):
    """The common rank and alpha are the config's, even if most modules have others."""
    most = {
        "lora_rank_pattern": {"value": 2, "key": 2},
        "lora_alpha_pattern": {"value": 5, "key": 5},
    }
    model = build("roberta", **LORA, lora_targets=["query", "key", "value"], **most)
    metadata = model.adapter().metadata
    assert (metadata.rank, metadata.alpha) == (3, 12)
    for name, layer in lora_layers(model).items():
        assert (metadata.rank_of(name), metadata.alpha_of(name)) == (layer.r, layer.lora_alpha)


def test_files_from_before_targets_could_be_chosen(build, tmp_path):
    """Their metadata and config.json have no dropout, and their targets are query and value."""
    model = build("deberta", **LORA)
    old = LoraMetadata(rank=3, alpha=12, targets=("query_proj", "value_proj"))
    metadata = {name: old.to_metadata()[name] for name in ("rank", "alpha", "targets")}
    write_adapter(tmp_path / "x.safetensors", model.adapter())
    read = LoraMetadata.from_metadata(metadata, tmp_path)
    assert read == old
    adapter = read_adapter(tmp_path / "x.safetensors")
    assert adapter.metadata.targets == read.targets

    model.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    for name in ("lora_targets", "lora_dropout", "apply_adapter", "reg_loss_wgt"):
        del values[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    again = type(model).from_pretrained(tmp_path, lora_targets=["value", "query"])
    assert again.config.lora_targets == ["query", "value"]
    with pytest.raises(ValueError, match="was trained with lora_targets query value, not key"):
        type(model).from_pretrained(tmp_path, lora_targets=["key"])


def test_a_whole_checkpoint_keeps_its_targets_and_dropout(build, batch, tmp_path):
    model = build("roberta", **LORA, lora_targets=["intermediate", "output"], lora_dropout=0.2)
    model.save_pretrained(tmp_path)
    again = RobertaForSequenceClassification.from_pretrained(tmp_path, lora_dropout=None)
    assert again.config.lora_targets == ["intermediate", "output"]
    assert again.config.lora_dropout == 0.2
    close(again(**batch).logits, model(**batch).logits)
    # Dropout concerns training alone, so it may differ from the checkpoint's.
    assert RobertaConfig.from_pretrained(tmp_path, lora_dropout=0.0).lora_dropout == 0.0
