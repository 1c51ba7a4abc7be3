"""Tests convert.py --to merged: the merged model computes what base and adapter compute."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from conversions import (
    BATCH,
    ENCODERS,
    FAMILIES,
    LABELS,
    MODELS,
    SETTINGS_LIKE_PEFT,
    assert_same_tensors,
    close,
    make_base,
    plain_logits,
    train,
    tree,
    write_weights,
)

from conversion import merged
from loralib.adapters.families import registered
from loralib.adapters.formats import write_adapter
from loralib.io.tensors import read_tensors
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.configuration_utils import OWN_SETTINGS

BASES = {
    "plain": {},
    "bin": {"format": "bin"},
    "lm": {"head": "lm"},
    "gamma": {"head": "lm", "format": "bin", "gamma": True},
    "float16": {"dtype": torch.float16},
    "trained head": {"head": "classifier", "num_labels": 3},
}
MERGED = [(family, base) for family in ENCODERS for base in BASES]
MERGED += [("gpt2", base) for base in ("plain", "bin", "float16")]


@pytest.mark.parametrize(("family", "kind"), MERGED)
def test_merged(convert, tmp_path, family, kind):
    base = make_base(tmp_path / "base", family, **BASES[kind])
    given = train(base, family)
    write_adapter(tmp_path / "in.safetensors", given.adapter)
    before = tree(base)
    printed = convert(
        tmp_path / "in.safetensors", tmp_path / "out", "--to", "merged", "--base", base
    )
    assert tree(base) == before
    close(plain_logits(tmp_path / "out", family), given.logits)
    # With another alpha, the logits differ, so the comparison above would find an error.
    halved = replace(given.adapter, metadata=replace(given.adapter.metadata, alpha=3))
    write_adapter(tmp_path / "half.safetensors", halved)
    half = tmp_path / "half"
    convert(tmp_path / "half.safetensors", half, "--to", "merged", "--base", base)
    assert (plain_logits(half, family) - given.logits).abs().max() > 1e-2

    own = [known.tokenizer_files for known in registered() if known.name.startswith(family)]
    tokenizer = {name for name in before if name in (*merged.TOKENIZER_FILES, *own[0])}
    after = tree(tmp_path / "out")
    assert after.keys() == {"config.json", "model.safetensors", *tokenizer}
    assert all(after[name] == before[name] for name in tokenizer)
    settings, stated = json.loads(after["config.json"]), json.loads(before["config.json"])
    assert not OWN_SETTINGS & settings.keys()
    changed = {"architectures", "torch_dtype", "dtype"}
    if family != "gpt2":
        assert settings["id2label"] == {str(i): name for i, name in enumerate(LABELS)}
        assert settings["label2id"] == {name: i for i, name in enumerate(LABELS)}
        assert settings["finetuning_task"] == "mnli"
        assert settings["text_columns"] == ["premise", "claim"]
        changed |= {"id2label", "label2id", "finetuning_task", "text_columns"}
    if family == "deberta":  # LoRA did not reach positions, which now have their own projections
        assert settings["share_att_key"] is False
        changed |= {"share_att_key"}
    architecture = {
        "roberta": "RobertaForSequenceClassification",
        "deberta": "DebertaV2ForSequenceClassification",
        "gpt2": "GPT2LMHeadModel",
    }[family]
    assert settings["architectures"] == [architecture]
    assert settings["torch_dtype"] == "float32"
    assert "dtype" not in settings
    for name in stated.keys() - changed:
        assert settings[name] == stated[name]
    assert (printed["format"], printed["dtype"], printed["base"]) == (
        "merged",
        "float32",
        str(base),
    )
    weights, _ = read_tensors(tmp_path / "out" / "model.safetensors")
    size = sum(tensor.nbytes for tensor in weights.values()) / 2**20
    assert printed["size"] == f"{size:.2f} MiB"
    assert printed["notes"] == []


@pytest.mark.parametrize("family", ENCODERS)
def test_a_base_that_this_project_wrote(convert, tmp_path, family):
    """Its settings include this fork's own, which must not be in the folder for upstream."""
    base = make_base(tmp_path / "upstream", family, head="lm")
    model = MODELS[family]["lm"].from_pretrained(base)
    model.save_pretrained(tmp_path / "base")
    assert OWN_SETTINGS & json.loads((tmp_path / "base" / "config.json").read_text()).keys()
    given = train(tmp_path / "base", family, **SETTINGS_LIKE_PEFT[family])
    write_adapter(tmp_path / "in", given.adapter, "peft")
    convert(tmp_path / "in", tmp_path / "out", "--to", "merged", "--base", tmp_path / "base")
    close(plain_logits(tmp_path / "out", family), given.logits)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not OWN_SETTINGS & settings.keys()
    assert settings["text_columns"] == ["premise", "claim"]
    # If the adapter does not record its columns of texts, the base's own are not kept either.
    own = json.loads((tmp_path / "base" / "config.json").read_text()) | {"text_columns": ["review"]}
    (tmp_path / "base" / "config.json").write_text(json.dumps(own))
    unrecorded = replace(given.adapter.metadata, text_columns=None)
    write_adapter(tmp_path / "silent.safetensors", replace(given.adapter, metadata=unrecorded))
    source = tmp_path / "silent.safetensors"
    convert(source, tmp_path / "next", "--to", "merged", "--base", tmp_path / "base")
    assert "text_columns" not in json.loads((tmp_path / "next" / "config.json").read_text())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_merged_model_is_rounded_once(convert, trained, tmp_path, family, dtype):
    given = trained[family]
    write_adapter(tmp_path / "in.safetensors", given.adapter)
    flags = ("--to", "merged", "--base", given.base)
    convert(tmp_path / "in.safetensors", tmp_path / "wide", *flags)
    printed = convert(tmp_path / "in.safetensors", tmp_path / "out", *flags, "--dtype", dtype)
    wide, out = (read_tensors(tmp_path / name / "model.safetensors")[0] for name in ("wide", "out"))
    assert_same_tensors(out, {name: t.to(getattr(torch, dtype)) for name, t in wide.items()})
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (settings["torch_dtype"], printed["dtype"]) == (dtype, dtype)


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_merge(convert, tmp_path, family, bias):
    base = make_base(tmp_path / "base", family)
    given = train(base, family, bias, **SETTINGS_LIKE_PEFT[family])
    assert (given.logits - train(base, family).logits).abs().max() > 1e-2
    write_adapter(tmp_path / "in", given.adapter, "peft")
    assert convert(tmp_path / "in", "--info")["biases"] == bias
    convert(tmp_path / "in", tmp_path / "out", "--to", "merged", "--base", base)
    close(plain_logits(tmp_path / "out", family), given.logits)


@pytest.mark.parametrize("family", ENCODERS)
def test_one_label_and_other_targets(convert, tmp_path, family):
    base = make_base(tmp_path / "base", family)
    targets = ["key", "attention_output", "intermediate"]
    given = train(base, family, id2label=None, num_labels=1, lora_targets=targets)
    torch.save(given.adapter.tensors, tmp_path / "in.bin")
    flags = ("--to", "merged", "--base", base, "--lora_alpha", 6)
    convert(tmp_path / "in.bin", tmp_path / "out", *flags)
    logits = plain_logits(tmp_path / "out", family)
    assert logits.shape == (3, 1)
    close(logits, given.logits)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings["id2label"] == {"0": "LABEL_0"}


def test_a_decoder_stays_one(convert, tmp_path):
    """Its base is an encoder: that tokens attend only to earlier ones is in the adapter alone."""
    base = make_base(tmp_path / "base", "roberta", head="lm")
    torch.manual_seed(8)
    model = AutoModelForCausalLM.from_pretrained(
        base, is_decoder=True, apply_lora=True, lora_r=2, lora_alpha=6
    ).eval()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.add_(torch.randn(parameter.shape), alpha=0.5)
    write_adapter(tmp_path / "in.safetensors", model.adapter())
    convert(tmp_path / "in.safetensors", tmp_path / "out", "--to", "merged", "--base", base)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert merged.config.is_decoder
    with torch.no_grad():
        close(merged(**BATCH).logits, model(**BATCH).logits)


@pytest.mark.parametrize("family", ENCODERS)
def test_an_adapter_without_a_head(convert, failure, tmp_path, family):
    base = make_base(tmp_path / "base", family, head="classifier", num_labels=3)
    given = train(base, family)
    model = AutoModelForSequenceClassification.from_pretrained(
        base, apply_lora=True, lora_r=2, lora_alpha=6
    )
    lora = {name: t for name, t in given.adapter.tensors.items() if "lora_" in name}
    model.load_state_dict(lora, strict=False)
    write_adapter(tmp_path / "in.safetensors", replace(given.adapter, tensors=lora))
    command = (tmp_path / "in.safetensors", tmp_path / "out", "--to", "merged", "--base")
    bare = make_base(tmp_path / "bare", family)  # the same backbone, without the head
    whole = read_tensors(base / "model.safetensors")[0]
    backbone = {name: t for name, t in whole.items() if name.startswith(f"{family}.")}
    write_weights(bare, backbone, "safetensors")
    line = failure(*command, bare)
    assert "the merged model would have an untrained head" in line
    convert(*command, base)
    with torch.no_grad():
        expected = model.eval()(**BATCH).logits
    close(plain_logits(tmp_path / "out", family), expected)


def test_merging_needs_a_base(failure, trained, tmp_path):
    write_adapter(tmp_path / "in.safetensors", trained["roberta"].adapter)
    line = failure(tmp_path / "in.safetensors", tmp_path / "out", "--to", "merged")
    assert f"give its base as --base (it names '{trained['roberta'].base}')" in line


@pytest.mark.parametrize("family", ["roberta", "gpt2"])
def test_a_merge_that_fails_leaves_nothing(failure, trained, monkeypatch, tmp_path, family):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    given = trained[family]
    write_adapter(tmp_path / "in.safetensors", given.adapter)
    flags = ("--to", "merged", "--base", given.base)
    monkeypatch.setattr(merged, "copy_tokenizer", fail)
    assert "the disk is full" in failure(tmp_path / "in.safetensors", tmp_path / "out", *flags)


def test_out_may_follow_flags(convert, trained, tmp_path):
    given = trained["roberta"]
    write_adapter(tmp_path / "in.safetensors", given.adapter)
    out = tmp_path / "out"
    printed = convert(tmp_path / "in.safetensors", "--to", "merged", out, "--base", given.base)
    assert printed["first"].startswith(f"{out}: written")


def test_an_empty_folder_is_filled(convert, trained, tmp_path):
    """Its name may have a dot in it."""
    given = trained["roberta"]
    write_adapter(tmp_path / "in.safetensors", given.adapter)
    for format in ("peft", "merged"):
        folder = tmp_path / f"{format}.v1"
        folder.mkdir()
        convert(tmp_path / "in.safetensors", folder, "--to", format, "--base", given.base)
        assert any(folder.iterdir())


def test_settings_of_the_bases_own_head_are_dropped(convert, tmp_path):
    base = make_base(tmp_path / "base", "roberta")
    config = json.loads((base / "config.json").read_text())
    own = {"num_labels": 2, "_num_labels": 2, "problem_type": "regression"}
    (base / "config.json").write_text(json.dumps(config | own))
    write_adapter(tmp_path / "in.safetensors", train(base, "roberta").adapter)
    convert(tmp_path / "in.safetensors", tmp_path / "out", "--to", "merged", "--base", base)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not own.keys() & settings.keys()
    assert list(settings["id2label"].values()) == list(LABELS)


def test_settings_of_a_head_that_is_kept_are_kept(convert, tmp_path):
    base = make_base(tmp_path / "base", "roberta", head="classifier", num_labels=3)
    config = json.loads((base / "config.json").read_text())
    own = {"problem_type": "single_label_classification", "text_columns": ["review"]}
    (base / "config.json").write_text(json.dumps(config | own))
    adapter = train(base, "roberta").adapter
    lora = {name: tensor for name, tensor in adapter.tensors.items() if "lora_" in name}
    metadata = replace(adapter.metadata, text_columns=None, labels=None)
    write_adapter(tmp_path / "in.safetensors", replace(adapter, tensors=lora, metadata=metadata))
    convert(tmp_path / "in.safetensors", tmp_path / "out", "--to", "merged", "--base", base)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert own.items() <= settings.items()


@pytest.mark.parametrize("family", FAMILIES)
def test_files_next_to_the_bases_weights_are_copied(convert, trained, tmp_path, family):
    given = trained[family]
    base = shutil.copytree(given.base, tmp_path / "base")
    for name in ("generation_config.json", "chat_template.jinja"):
        (base / name).write_text(name)
    write_adapter(tmp_path / "in.safetensors", given.adapter)
    convert(tmp_path / "in.safetensors", tmp_path / "out", "--to", "merged", "--base", base)
    for name in ("generation_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_text() == name


def test_half_a_head_is_not_completed_from_the_base(tmp_path, failure):
    base = make_base(tmp_path / "base", "roberta", head="classifier", num_labels=3)
    adapter = train(base, "roberta").adapter
    incomplete = {
        n: t for n, t in adapter.tensors.items() if not n.startswith("classifier.out_proj")
    }
    write_adapter(tmp_path / "in.safetensors", replace(adapter, tensors=incomplete))
    line = failure(
        *(tmp_path / "in.safetensors", tmp_path / "out", "--to", "merged", "--base", base)
    )
    assert "its head lacks classifier.out_proj.bias" in line
