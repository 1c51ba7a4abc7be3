"""LoRA that reaches DeBERTa-v2's positions, as PEFT's does, or contents alone, as the release's.

These tests check that neither kind is mistaken for the other, and how both are merged. For what
they compute, see test_modeling_deberta_v2.py; for banks, test_bank.py.
"""

import copy
import json
from dataclasses import replace

import pytest
import torch
from compare import assert_close_to_rounding
from encoder_options import ENCODER_TERMS, NO_DROPOUT
from glue_runs import LORA as LORA_FLAGS
from glue_runs import common, failure, on_rte, results

import loralib as lora
from loralib.adapters.adapter import lora_metadata
from loralib.adapters.formats import read_adapter, write_adapter
from loralib.adapters.merging import merge_into
from loralib.errors import CheckpointError
from loralib.io.tensors import read_tensors
from loralib.lora_layer import lora_layers
from loralib.positions import lora_reaches_positions, shared_projections, unshare_positions

pytestmark = pytest.mark.slow

LORA = {"apply_lora": True, "lora_r": 3, "lora_alpha": 12}
KINDS = pytest.mark.parametrize("reached", [False, True], ids=["contents", "positions"])


@pytest.fixture
def build(make_classifier):
    def make(**settings):
        return make_classifier("deberta", **{**NO_DROPOUT, "num_labels": 3, **settings})

    return make


@pytest.fixture
def adapter_file(build, tmp_path):
    """``adapter_file(reached)`` writes an adapter that reaches positions, or does not."""

    def write(reached, name="a.safetensors", **settings):
        model = build(**LORA, lora_positions=reached, **settings)
        write_adapter(tmp_path / name, model.adapter())
        return tmp_path / name

    return write


def logits(model, batch):
    with torch.no_grad():
        return model(**batch).logits


def close(ours, theirs):
    assert_close_to_rounding(ours, theirs, ENCODER_TERMS)


def base_of(model, build):
    """A plain model of the same base weights and head."""
    plain = build()
    own = model.state_dict()
    plain.load_state_dict({name: own[name] for name in plain.state_dict()})
    return plain


# ---- whether positions are reached ----


@KINDS
def test_an_adapter_records_whether_it_reaches_positions(adapter_file, reached):
    assert read_adapter(adapter_file(reached)).metadata.positions is reached


@pytest.mark.parametrize(
    "settings",
    [
        {"share_att_key": False},
        {"pos_att_type": None},
        {"relative_attention": False, "position_biased_input": True},
        {"lora_targets": ["value"]},
        {"lora_targets": ["query"], "pos_att_type": "c2p"},
        {"lora_targets": ["key"], "pos_att_type": "p2c"},
    ],
    ids=str,
)
def test_nothing_is_recorded_if_it_makes_no_difference(build, batch, adapter_file, settings):
    assert read_adapter(adapter_file(False, **settings)).metadata.positions is None
    one, other = (build(**LORA, **settings, lora_positions=way) for way in (False, True))
    assert torch.equal(logits(one, batch), logits(other, batch))


def test_the_two_kinds_differ(build, batch):
    one, other = (build(**LORA, lora_positions=way) for way in (False, True))
    assert (logits(one, batch) - logits(other, batch)).abs().max() > 1e-2
    name = "deberta.encoder.layer.0.attention.self.query_proj.lora_B"
    for model in (one, other):
        model.train_only(("lora",))
        model(**batch).loss.backward()
    mine, theirs = (model.get_parameter(name).grad for model in (one, other))
    assert (mine - theirs).abs().max() > 1e-2 * theirs.abs().max()


@KINDS
def test_an_adapter_of_the_other_kind_is_refused(build, adapter_file, reached):
    model, adapter = build(**LORA, lora_positions=not reached), read_adapter(adapter_file(reached))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError) as caught:
        model.load_adapters([adapter])
    expected = f"was trained with lora_positions {reached}, the model was built with {not reached}"
    assert str(caught.value).endswith(expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_an_adapter_that_does_not_record_it_is_refused(build, adapter_file):
    adapter = read_adapter(adapter_file(True))
    unrecorded = replace(adapter, metadata=replace(adapter.metadata, positions=None))
    for refuse in (
        lambda: build(**LORA).load_adapters([unrecorded]),
        lambda: build(**LORA, lora_positions=True).load_adapters([unrecorded]),
        lambda: merge_into(build(), unrecorded),
    ):
        with pytest.raises(CheckpointError, match=r"does not record .*lora_positions"):
            refuse()


def test_a_file_in_the_releases_format_does_not_reach_positions(build, adapter_file, tmp_path):
    write_adapter(tmp_path / "lora.bin", read_adapter(adapter_file(False)))
    for alpha in (12, None):
        adapter = read_adapter(tmp_path / "lora.bin", lora_alpha=alpha)
        assert build(**LORA).load_adapters([adapter]) == []
        with pytest.raises(CheckpointError, match="trained with lora_positions False"):
            build(**LORA, lora_positions=True).load_adapters([adapter])


# ---- merged ----


@KINDS
def test_a_merged_model_computes_the_same(build, batch, reached):
    model = build(**LORA, lora_positions=reached, lora_targets=["query", "key", "value"])
    expected, frozen = logits(model, batch), copy.deepcopy(model.state_dict())
    unshared = set() if reached else shared_projections(model)
    merged = lora.merge(model)
    assert not lora_layers(merged)
    close(logits(merged, batch), expected)
    assert merged.config.share_att_key is reached
    for name in unshared:
        own = merged.get_submodule(name.replace("self.", "self.pos_"))
        assert torch.equal(own.weight, frozen[f"{name}.weight"])


@KINDS
@pytest.mark.parametrize("family", ["roberta", "deberta"])
def test_a_merged_model_is_saved_and_read(make_classifier, batch, tmp_path, family, reached):
    own = {"lora_positions": reached} if family == "deberta" else {}
    model = make_classifier(family, **NO_DROPOUT, **LORA, **own, num_labels=3)
    expected, config = logits(model, batch), model.config
    other = type(model)(config)
    lora.merge(model).save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert not again.adapted_by
    close(logits(again, batch), expected)
    # Another model with the same config object has not changed.
    assert other.config.apply_lora
    assert getattr(other.config, "share_att_key", True)


def test_attentions_can_be_merged_one_by_one(build, batch):
    model = build(**LORA)
    expected = logits(model, batch)
    for layer in model.deberta.encoder.layer:
        lora.merge(layer.attention.self)
    assert not lora_layers(model)
    close(logits(model, batch), expected)


@KINDS
def test_merging_into_a_plain_model(build, batch, adapter_file, reached):
    adapted = build(**LORA, lora_positions=reached)
    plain = base_of(adapted, build)
    before = logits(plain, batch)
    merge_into(plain, read_adapter(adapter_file(reached)))
    close(logits(plain, batch), logits(adapted, batch))
    assert (logits(plain, batch) - before).abs().max() > 1e-2
    assert plain.config.share_att_key is reached


def test_positions_get_projections_of_their_own_once(build, batch, tmp_path):
    model = build()
    expected = logits(model, batch)
    unshare_positions(model, ["deberta.encoder.layer.0.attention.self.value_proj"])
    assert shared_projections(model)
    unshare_positions(model, shared_projections(model))
    unshare_positions(model, shared_projections(model))
    assert not shared_projections(model)
    assert torch.equal(logits(model, batch), expected)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(logits(again, batch), expected)


def test_adapters_of_other_families_do_not_record_it(make_classifier):
    model = make_classifier("roberta", **LORA)
    assert lora_reaches_positions(model) is None
    assert model.adapter().metadata.positions is None
    assert lora_metadata(model.adapter().tensors, 3, 12).positions is None


# ---- run_glue.py ----


@pytest.fixture
def deberta_run(glue, tiny_deberta_base, tiny_glue, tmp_path):
    """``deberta_run(out, *flags)``: a run on RTE."""

    def run(out, *flags):
        glue(*on_rte(tiny_glue, tmp_path / out), *flags, base=tiny_deberta_base)
        return tmp_path / out

    return run


@KINDS
def test_a_run_saves_and_evaluates_either_kind(
    deberta_run, glue, tiny_deberta_base, tiny_glue, tmp_path, reached
):
    out = deberta_run("out", *(["--lora_positions"] if reached else []))
    assert read_adapter(out).metadata.positions is reached
    assert json.loads((out / "config.json").read_text())["lora_positions"] is reached
    # In the release's format, the adapter would be read as one that does not reach positions.
    assert (out / "pytorch_model_lora.bin").exists() is not reached
    assert (out / "checkpoint-4" / "pytorch_model_lora.bin").exists() is not reached
    evaluate = ["--task_name", "rte", "--data_dir", tiny_glue, "--do_eval", "--apply_lora"]
    path = out / "pytorch_model_lora.safetensors"
    again = [*evaluate, "--lora_path", path, "--output_dir", tmp_path / "again"]
    glue(*again, base=tiny_deberta_base)
    assert results(tmp_path / "again") == results(out)


def test_the_flag_has_to_fit_the_file(
    deberta_run, run_glue, tiny_deberta_base, tiny_glue, tmp_path, monkeypatch, capsys
):
    path = deberta_run("out") / "pytorch_model_lora.safetensors"
    flags = ["--task_name", "rte", "--data_dir", tiny_glue, "--do_eval", *LORA_FLAGS]
    flags += ["--lora_path", path, "--output_dir", tmp_path / "again", "--lora_positions"]
    line = failure(run_glue, [*common(tiny_deberta_base), *flags], monkeypatch, capsys)
    assert "was trained with lora_positions False, the model was built with True" in line


def test_the_flag_is_refused_for_models_without_the_setting(
    run_glue, tiny_base, tiny_glue, tmp_path, monkeypatch, capsys
):
    flags = [*on_rte(tiny_glue, tmp_path / "out"), *LORA_FLAGS, "--lora_positions"]
    line = failure(run_glue, [*common(tiny_base), *flags], monkeypatch, capsys)
    assert "a roberta model has no setting lora_positions" in line


@KINDS
def test_resuming_with_the_other_kind_is_refused(
    deberta_run, run_glue, tiny_deberta_base, tiny_glue, monkeypatch, capsys, reached
):
    ways = {True: ["--lora_positions"], False: []}
    out = deberta_run("out", *ways[reached])
    flags = [*on_rte(tiny_glue, out), "--max_steps", 14, *ways[not reached]]
    line = failure(run_glue, [*common(tiny_deberta_base), *flags], monkeypatch, capsys)
    assert f"trained with lora_positions {reached}" in line


@KINDS
def test_split_lora_records_it(deberta_run, split_lora, tmp_path, reached):
    out = deberta_run("out", *(["--lora_positions"] if reached else []))
    split_lora.main([str(out / "checkpoint-4"), str(tmp_path / "lora.safetensors")])
    assert read_adapter(tmp_path / "lora.safetensors").metadata.positions is reached
    if reached:
        with pytest.raises(ValueError, match="would compute something else"):
            split_lora.main([str(out / "checkpoint-4"), str(tmp_path / "lora.bin")])
    else:
        split_lora.main([str(out / "checkpoint-4"), str(tmp_path / "lora.bin")])
        assert read_tensors(tmp_path / "lora.bin")[0]
