"""Reading and writing model folders: each format of a checkpoint, tied weights, fingerprints."""

import re
from pathlib import Path

import pytest
import torch
from model_folders import LORA, QUERY, SHAPE, fails, is_one_line, make, same, write

import loralib as lora
from loralib.adapters.fingerprint import fingerprint
from loralib.errors import CheckpointError
from loralib.io.tensors import read_tensors
from loralib.training.precision import cast_frozen
from transformers import (
    AutoModelForSequenceClassification,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    RobertaModel,
    modeling_utils,
    weight_files,
)
from transformers.weight_files import read_weights

CLASSES = (RobertaModel, RobertaForMaskedLM, RobertaForSequenceClassification)


# ---- formats ----

FORMATS = ("bin", "legacy", "safetensors", "sharded bin", "sharded safetensors")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("model_class", CLASSES)
def test_every_format_is_read(tmp_path, format, model_class):
    model = make(model_class)
    folder = write(tmp_path / "m", model.state_dict(), format)
    loaded = model_class.from_pretrained(folder)
    same(loaded, model.state_dict())
    assert not loaded.training
    assert loaded.config.name_or_path == loaded.name_or_path == str(folder)
    same(model_class.from_pretrained(str(folder)), model.state_dict())
    assert read_weights(folder).keys() == model.state_dict().keys()


def test_all_shards_are_of_the_index_s_commit(tmp_path, monkeypatch):
    """On the hub, a branch may move between two of a model's files."""
    commits = [tmp_path / "snapshots" / (letter * 40) for letter in "ab"]
    for number, folder in enumerate(commits):
        folder.mkdir(parents=True)
        write(folder, {"x": torch.full((2,), number), "y": torch.ones(1)}, "sharded safetensors")
    found = []

    def resolve(name, filename, revision=None):
        """Finds files of a branch that moves after the first one."""
        path = Path(tmp_path, "snapshots", revision or "ab"[len(found) > 0] * 40, filename)
        found.extend([path] if path.is_file() else [])
        return path if path.is_file() else None

    monkeypatch.setattr(weight_files, "resolve_file", resolve)
    assert read_weights("org/model")["x"].tolist() == [0, 0]
    assert {path.parent for path in found} == {commits[0]}


@pytest.mark.parametrize("format", ["bin", "legacy", "safetensors"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_read_into_float32(tmp_path, format, dtype):
    tensors = {n: t.to(dtype) for n, t in make(RobertaForMaskedLM).state_dict().items()}
    folder = write(tmp_path / "m", tensors, format)
    expected = {name: tensor.float() for name, tensor in tensors.items()}
    same(RobertaForMaskedLM.from_pretrained(folder), expected)


@pytest.mark.parametrize("format", ["bin", "safetensors"])
def test_a_model_is_loaded_on_the_cpu_whatever_the_default_device_is(tmp_path, format):
    tensors = make(RobertaModel).state_dict()
    folder = write(tmp_path / "m", tensors, format)
    with torch.device("meta"):
        loaded = RobertaModel.from_pretrained(folder)
    same(loaded, tensors)


def test_settings_are_read_from_the_revision_of_the_weights(tmp_path, monkeypatch):
    folder = write(tmp_path / "m", make(RobertaModel).state_dict())
    read, asked = RobertaConfig.read_values, []

    def recorded(name, **where):
        asked.append(where["revision"])
        return read(name, **where)

    monkeypatch.setattr(RobertaConfig, "read_values", recorded)
    RobertaModel.from_pretrained(folder, revision="v2")
    assert {*asked} == {"v2"}


def test_safetensors_come_first(tmp_path):
    tensors = make(RobertaModel).state_dict()
    folder = write(tmp_path / "m", {name: t + 1 for name, t in tensors.items()}, "bin")
    write(folder, tensors, "safetensors")
    same(RobertaModel.from_pretrained(folder), tensors)


def rename(tensors, *pairs):
    renamed = {}
    for name, tensor in tensors.items():
        for pattern, new in pairs:
            name = re.sub(pattern, new, name)
        renamed[name] = tensor
    return renamed


OLD_NAMES = ((r"LayerNorm\.weight$", "LayerNorm.gamma"), (r"LayerNorm\.bias$", "LayerNorm.beta"))


def test_old_names_of_norms_are_read(tmp_path):
    tensors = make(RobertaForSequenceClassification).state_dict()
    old = rename(tensors, *OLD_NAMES)
    assert len(old.keys() - tensors.keys()) == 10
    loaded = RobertaForSequenceClassification.from_pretrained(write(tmp_path / "m", old))
    same(loaded, tensors)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_what_wrappers_add_to_names_is_removed(tmp_path, prefix):
    """As in the state dict of a model within DDP, or of a compiled one."""
    tensors = make(RobertaForSequenceClassification).state_dict()
    folder = write(tmp_path / "m", {f"{prefix}{n}": t for n, t in tensors.items()}, "bin")
    same(RobertaForSequenceClassification.from_pretrained(folder), tensors)


@pytest.mark.parametrize("format", ["bin", "safetensors"])
@pytest.mark.parametrize("prefix", ["", "roberta."])
@pytest.mark.parametrize("model_class", CLASSES)
def test_positions_and_other_heads_in_a_file_are_ignored(tmp_path, format, prefix, model_class):
    tensors = make(RobertaModel).state_dict()
    others = {"embeddings.position_ids": torch.arange(12)[None]}
    file = {f"{prefix}{name}": tensor for name, tensor in {**tensors, **others}.items()}
    if prefix:
        file["lm_predictions.lm_head.dense.weight"] = torch.zeros(3, 3)
        file["qa_outputs.weight"] = torch.zeros(2, 8)
    else:
        file["lm_head.bias"] = torch.zeros(20)
        if model_class is RobertaForMaskedLM:
            file.pop("lm_head.bias")
    loaded = model_class.from_pretrained(write(tmp_path / "m", file, format))
    backbone = {n.removeprefix("roberta."): t for n, t in loaded.state_dict().items()}
    compared = [name for name in tensors if name in backbone]
    assert len(compared) >= len(tensors) - 2
    for name in compared:
        assert torch.equal(backbone[name], tensors[name])


def heads(model):
    return {n: t for n, t in model.state_dict().items() if not n.startswith("roberta.")}


@pytest.mark.parametrize("source", CLASSES)
@pytest.mark.parametrize("target", CLASSES)
def test_a_backbone_is_read_from_any_model_into_any(tmp_path, caplog, source, target):
    model = make(source)
    folder = write(tmp_path / "m", model.state_dict())
    loaded = target.from_pretrained(folder, initializer_range=0.5)
    theirs = {n.removeprefix("roberta."): t for n, t in model.state_dict().items()}
    ours = {n.removeprefix("roberta."): t for n, t in loaded.state_dict().items()}
    for name in (name for name in ours if name.startswith(("embeddings", "encoder"))):
        assert torch.equal(ours[name], theirs[name])
    new_parts = {"pooler.", "lm_head.", "classifier."} - {
        "pooler." if "pooler.dense.bias" in theirs else ""
    }
    warned = "newly initialized" in caplog.text
    if source is target:
        same(loaded, model.state_dict())
        assert not warned
        return
    assert warned
    for name, tensor in ours.items():
        if name.startswith(tuple(new_parts)) and not name.endswith("decoder.weight"):
            # norms are 1, biases are 0, and matrices are random
            if name.endswith("bias"):
                assert not tensor.any(), name
            elif "norm" in name:
                assert torch.equal(tensor, torch.ones_like(tensor))
            else:
                assert 0.2 < tensor.std() < 1, name


def test_new_heads_follow_the_seed(tmp_path):
    folder = write(tmp_path / "m", make(RobertaModel).state_dict())
    states = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        states.append(
            AutoModelForSequenceClassification.from_pretrained(folder, **LORA).state_dict()
        )
    for name in ("classifier.dense.weight", "classifier.out_proj.weight", f"{QUERY}.lora_A"):
        assert torch.equal(states[0][name], states[1][name])
        assert not torch.equal(states[0][name], states[2][name])
    assert not states[0][f"{QUERY}.lora_B"].any()


def test_new_parts_are_initialized_in_the_order_of_their_names(monkeypatch):
    """Otherwise, a seed would give each process other weights: hashes order a set of names."""
    model, initialized = make(RobertaForSequenceClassification, **LORA), []
    monkeypatch.setattr(model, "_init_weights", initialized.append)
    missing = model.load_checkpoint(make(RobertaModel).state_dict(), "m")["missing_keys"]
    names = sorted({name.rpartition(".")[0] for name in missing})
    assert len(names) == 6
    assert initialized == [model.get_submodule(name) for name in names]


# ---- tied weights ----

TIED = {
    "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
    "lm_head.decoder.bias": "lm_head.bias",
}


@pytest.mark.parametrize("left_out", [(), tuple(TIED), tuple(TIED.values())])
def test_tied_weights_are_read_by_either_name(tmp_path, left_out):
    model = make(RobertaForMaskedLM)
    file = {n: t for n, t in model.state_dict().items() if n not in left_out}
    loaded = RobertaForMaskedLM.from_pretrained(write(tmp_path / "m", file))
    same(loaded, model.state_dict())
    assert loaded.lm_head.decoder.weight is loaded.roberta.embeddings.word_embeddings.weight
    assert loaded.lm_head.decoder.bias is loaded.lm_head.bias


@pytest.mark.parametrize("name", TIED)
def test_tied_weights_that_differ_are_refused(tmp_path, name):
    file = {n: t.clone() for n, t in make(RobertaForMaskedLM).state_dict().items()}
    file[name][0] += 1
    with fails(CheckpointError, f"{name} differs from {TIED[name]}") as caught:
        RobertaForMaskedLM.from_pretrained(write(tmp_path / "m", file))
    is_one_line(caught)


# ---- saving ----


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("model_class", CLASSES)
@pytest.mark.parametrize("settings", [{}, LORA], ids=["plain", "lora"])
def test_save_and_load(tmp_path, safe, model_class, settings):
    model = make(model_class, **settings, cls_dropout=0.3)
    model.save_pretrained(tmp_path / "a" / "b", safe_serialization=safe)
    names = sorted(path.name for path in (tmp_path / "a" / "b").iterdir())
    assert names == sorted(["config.json", "model.safetensors" if safe else "pytorch_model.bin"])
    loaded = model_class.from_pretrained(tmp_path / "a" / "b")
    same(loaded, model.state_dict())
    assert loaded.config.architectures == [model_class.__name__]
    assert loaded.config.cls_dropout == 0.3
    assert loaded.config.apply_lora == bool(settings)


def test_a_merged_model_is_saved_as_a_plain_one(tmp_path):
    model = make(RobertaForSequenceClassification, **LORA)
    model.get_parameter(f"{QUERY}.lora_B").data += 1
    config = model.config  # may be another model's as well
    lora.merge(model).save_pretrained(tmp_path)
    again = RobertaForSequenceClassification.from_pretrained(tmp_path)
    same(again, model.state_dict())
    assert (config.apply_lora, again.config.apply_lora) == (True, False)


def test_saving_replaces_the_weights_of_another_format(tmp_path):
    old, new = make(RobertaModel), make(RobertaModel)
    new.pooler.dense.bias.data += 1
    for format in FORMATS:
        write(tmp_path, old.state_dict(), format)
    (tmp_path / "notes.txt").write_text("stay")
    new.save_pretrained(tmp_path)
    same(RobertaModel.from_pretrained(tmp_path), new.state_dict())
    old.save_pretrained(tmp_path, safe_serialization=True)
    same(RobertaModel.from_pretrained(tmp_path), old.state_dict())
    assert (tmp_path / "notes.txt").read_text() == "stay"


def test_saving_without_a_config_and_with_another_function(tmp_path):
    model, written = make(RobertaModel), []
    model.save_pretrained(tmp_path, save_config=False)
    assert [path.name for path in tmp_path.iterdir()] == ["pytorch_model.bin"]

    def save(tensors, path):
        written.append(sorted(tensors))
        torch.save(tensors, path)

    state = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=state, save_function=save)
    assert written == [sorted(state)]
    same(RobertaModel.from_pretrained(tmp_path), state)

    def fail(tensors, path):
        path.write_bytes(b"half")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        model.save_pretrained(tmp_path, save_function=fail)
    same(RobertaModel.from_pretrained(tmp_path), state)


@pytest.mark.parametrize("file_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("format", ["bin", "safetensors", "sharded bin"])
def test_base_keeps_its_bits_through_half_precision(tmp_path, format, file_dtype):
    base = {n: t.to(file_dtype) for n, t in make(RobertaModel).state_dict().items()}
    folder = write(tmp_path / "base", base, format)
    model = AutoModelForSequenceClassification.from_pretrained(folder, **LORA)
    model.train_only(("lora",))
    cast_frozen(model, torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_()
    model.save_pretrained(tmp_path / "out")
    saved = read_tensors(tmp_path / "out" / "pytorch_model.bin")[0]
    assert saved.keys() == model.state_dict().keys()
    for name, tensor in saved.items():
        if name in dict(model.named_parameters()) and model.get_parameter(name).requires_grad:
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, model.get_parameter(name))
        else:
            expected = base[name.removeprefix("roberta.")]
            assert tensor.dtype == expected.dtype
            assert torch.equal(tensor, expected)


@pytest.mark.parametrize("at_once", [1, 2**24])
def test_a_frozen_weight_that_was_changed_is_saved_as_it_is(tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(modeling_utils, "_AT_ONCE", at_once)
    folder = write(tmp_path / "base", make(RobertaModel).state_dict())
    model = AutoModelForSequenceClassification.from_pretrained(folder, **LORA)
    model.train_only(("lora",))
    cast_frozen(model, torch.bfloat16)
    model.get_parameter(f"{QUERY}.weight").data[0, 0] += 1
    saved = model.full_state_dict()[f"{QUERY}.weight"]
    assert saved.dtype == torch.bfloat16
    assert torch.equal(saved, model.get_parameter(f"{QUERY}.weight"))


def test_tied_base_weights_keep_their_bits_under_both_names(tmp_path):
    base = make(RobertaForMaskedLM).state_dict()
    model = RobertaForMaskedLM.from_pretrained(write(tmp_path / "base", base), **LORA)
    model.train_only(("lora",))
    cast_frozen(model, torch.bfloat16)
    model.save_pretrained(tmp_path / "out")
    loaded = RobertaForMaskedLM.from_pretrained(tmp_path / "out")
    name = "roberta.embeddings.word_embeddings.weight"
    assert torch.equal(loaded.state_dict()[name], base[name])


# ---- fingerprint ----


def test_fingerprint_is_the_bases(tmp_path):
    base = make(RobertaForMaskedLM).state_dict()
    model_class = RobertaForSequenceClassification

    def of(tensors, name, format="bin", **settings):
        folder = write(tmp_path / name, tensors, format)
        return model_class.from_pretrained(folder, **settings).base_fingerprint

    expected = of(base, "base")
    assert re.fullmatch("[0-9a-f]{32}", expected)
    assert of(base, "safe", "safetensors") == expected
    assert of(base, "lora", **LORA) == expected
    assert of({n: t.bfloat16() for n, t in base.items()}, "bf16") == expected
    assert of(rename(base, *OLD_NAMES), "old") == expected
    bare = {n.removeprefix("roberta."): t for n, t in base.items() if n.startswith("roberta.")}
    assert of(bare, "bare") == expected
    assert fingerprint(base) == expected

    model = model_class.from_pretrained(tmp_path / "base", **LORA)
    model.train_only(("lora", "bias"))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_()
    model.save_pretrained(tmp_path / "trained")
    assert model_class.from_pretrained(tmp_path / "trained").base_fingerprint == expected
    assert model.adapter().metadata.base_fingerprint == expected

    for name in ("embeddings.word_embeddings", "encoder.layer.1.output.dense"):
        changed = {n: t.clone() for n, t in base.items()}
        changed[f"roberta.{name}.weight"][0, 0] += 1
        if "word" in name:
            changed["lm_head.decoder.weight"] = changed[f"roberta.{name}.weight"]
        assert of(changed, "changed") != expected


def test_a_models_adapter_has_its_tensors_and_metadata(tmp_path):
    folder = write(tmp_path / "base", make(RobertaModel).state_dict())
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, **LORA, id2label={0: "no", 1: "yes"}, finetuning_task="rte"
    )
    adapter = model.adapter()
    info = adapter.metadata
    assert (info.rank, info.alpha, info.targets) == (2, 4, ("query", "value"))
    assert (info.base, info.task, info.labels) == (str(folder), "rte", ("no", "yes"))
    assert len(adapter.tensors) == 8 + 4
    assert RobertaModel(RobertaConfig(**SHAPE, **LORA)).adapter().tensors.keys() == {
        name.removeprefix("roberta.") for name in adapter.tensors if "lora_" in name
    }
    with pytest.raises(ValueError, match="no LoRA layers"):
        make(RobertaModel).adapter()


def test_an_adapter_names_the_base_s_revision_and_leaves_out_tied_weights():
    adapter = make(RobertaForMaskedLM, **LORA, base_revision="v2").adapter()
    assert adapter.metadata.base_revision == "v2"
    assert "lm_head.dense.weight" in adapter.tensors
    assert not TIED.keys() & adapter.tensors.keys()


def test_an_adapted_checkpoint_remembers_its_base(tmp_path):
    folder = write(tmp_path / "base", make(RobertaModel).state_dict())
    model = AutoModelForSequenceClassification.from_pretrained(folder, **LORA)
    model.save_pretrained(tmp_path / "tuned")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "tuned")
    assert again.adapter().metadata.base == str(folder)
    assert again.config.name_or_path == str(tmp_path / "tuned")


def test_a_full_model_of_the_release_gives_a_warning(tmp_path, caplog):
    model = make(RobertaForSequenceClassification, **LORA)
    for name, settings in {"theirs": LORA, "plain": {}}.items():
        tensors = {n: t for n, t in model.state_dict().items() if settings or "lora_" not in n}
        write(tmp_path / name, tensors, **settings)
    model.save_pretrained(tmp_path / "ours")
    for name in ("ours", "plain", "theirs"):
        caplog.clear()
        RobertaForSequenceClassification.from_pretrained(tmp_path / name)
        warned = [r.getMessage() for r in caplog.records if "count twice" in r.getMessage()]
        assert len(warned) == (name == "theirs")
    assert "\n" not in warned[0]
    caplog.clear()
    RobertaForSequenceClassification.from_pretrained(
        tmp_path / "theirs", state_dict=model.state_dict()
    )
    assert "count twice" not in caplog.text
