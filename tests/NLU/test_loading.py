"""Reading and writing model folders: each format of a checkpoint, and what can be wrong with it."""

import json
import pickle
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from loralib.adapters.fingerprint import fingerprint
from loralib.errors import CheckpointError
from loralib.io import hub
from loralib.io.tensors import read_tensors
from loralib.training.precision import hold_frozen_in
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    RobertaModel,
    file_utils,
)
from transformers.modeling_utils import read_weights

SHAPE = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 12,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}
LORA = {"apply_lora": True, "lora_r": 2, "lora_alpha": 4}
QUERY = "roberta.encoder.layer.0.attention.self.query"
CLASSES = (RobertaModel, RobertaForMaskedLM, RobertaForSequenceClassification)


def make(model_class, **settings):
    """A model of which every tensor is random, B included."""
    torch.manual_seed(0)
    model = model_class(RobertaConfig(**SHAPE, **settings))
    for parameter in model.parameters():
        parameter.data.normal_()
    return model.eval()


def write(folder, tensors, format="bin", config=None, **settings):
    """A model folder as others make it."""
    folder.mkdir(exist_ok=True)
    values = {**SHAPE, "model_type": "roberta", **settings} if config is None else config
    (folder / "config.json").write_text(json.dumps(values))
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    if format == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    elif format == "legacy":
        path = folder / "pytorch_model.bin"
        torch.save(tensors, path, _use_new_zipfile_serialization=False)
    elif format == "safetensors":
        save_file(tensors, folder / "model.safetensors")
    else:
        _write_shards(folder, tensors, format)
    return folder


def _write_shards(folder, tensors, format):
    stem, suffix = {
        "sharded bin": ("pytorch_model", "bin"),
        "sharded safetensors": ("model", "safetensors"),
    }[format]
    names, weight_map = sorted(tensors), {}
    for number in range(3):
        shard = f"{stem}-{number + 1:05}-of-00003.{suffix}"
        some = {name: tensors[name] for name in names[number::3]}
        save = save_file if suffix == "safetensors" else torch.save
        save(some, folder / shard)
        weight_map.update(dict.fromkeys(some, shard))
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))


def same(model, tensors):
    state = model.state_dict()
    assert state.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert state[name].dtype == torch.float32
        assert torch.equal(state[name], tensor), name


def fails(error, *parts):
    """Expects an error of one line that holds all of `parts`."""
    pattern = "(?s)^" + "".join(f"(?=.*{re.escape(part)})" for part in parts)
    return pytest.raises(error, match=pattern)


def is_one_line(caught):
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 400


# ---- formats ----

FORMATS = ("bin", "legacy", "safetensors", "sharded bin", "sharded safetensors")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("model_class", CLASSES)
def test_every_form(tmp_path, format, model_class):
    model = make(model_class)
    folder = write(tmp_path / "m", model.state_dict(), format)
    loaded = model_class.from_pretrained(folder)
    same(loaded, model.state_dict())
    assert not loaded.training
    assert loaded.config.name_or_path == str(folder)
    same(model_class.from_pretrained(str(folder)), model.state_dict())
    assert read_weights(folder).keys() == model.state_dict().keys()


@pytest.mark.parametrize("format", ["bin", "legacy", "safetensors"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_read_into_float32(tmp_path, format, dtype):
    tensors = {n: t.to(dtype) for n, t in make(RobertaForMaskedLM).state_dict().items()}
    folder = write(tmp_path / "m", tensors, format)
    expected = {name: tensor.float() for name, tensor in tensors.items()}
    same(RobertaForMaskedLM.from_pretrained(folder), expected)


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


def test_old_names_of_norms(tmp_path):
    tensors = make(RobertaForSequenceClassification).state_dict()
    old = rename(tensors, *OLD_NAMES)
    assert len(old.keys() - tensors.keys()) == 10
    loaded = RobertaForSequenceClassification.from_pretrained(write(tmp_path / "m", old))
    same(loaded, tensors)


@pytest.mark.parametrize("format", ["bin", "safetensors"])
@pytest.mark.parametrize("prefix", ["", "roberta."])
@pytest.mark.parametrize("model_class", CLASSES)
def test_positions_and_other_heads_are_left_out(tmp_path, format, prefix, model_class):
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
def test_from_any_model_into_any(tmp_path, caplog, source, target):
    model = make(source)
    folder = write(tmp_path / "m", model.state_dict())
    loaded = target.from_pretrained(folder, initializer_range=0.5)
    theirs = {n.removeprefix("roberta."): t for n, t in model.state_dict().items()}
    ours = {n.removeprefix("roberta."): t for n, t in loaded.state_dict().items()}
    for name in (name for name in ours if name.startswith(("embeddings", "encoder"))):
        assert torch.equal(ours[name], theirs[name])
    anew = {"pooler.", "lm_head.", "classifier."} - {
        "pooler." if "pooler.dense.bias" in theirs else ""
    }
    warned = "newly initialized" in caplog.text
    if source is target:
        same(loaded, model.state_dict())
        assert not warned
        return
    assert warned
    for name, tensor in ours.items():
        if name.startswith(tuple(anew)) and not name.endswith("decoder.weight"):
            # norms start at 1, biases at 0, matrices are drawn
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
def test_tied_weights_that_differ(tmp_path, name):
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


def test_saving_replaces_the_weights_of_another_form(tmp_path):
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


@pytest.mark.parametrize("file_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("format", ["bin", "safetensors", "sharded bin"])
def test_base_keeps_its_bits_through_half_precision(tmp_path, format, file_dtype):
    base = {n: t.to(file_dtype) for n, t in make(RobertaModel).state_dict().items()}
    folder = write(tmp_path / "base", base, format)
    model = AutoModelForSequenceClassification.from_pretrained(folder, **LORA)
    model.train_only(("lora",))
    hold_frozen_in(model, torch.bfloat16)
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


def test_a_frozen_weight_that_was_changed_is_saved_as_it_is(tmp_path):
    folder = write(tmp_path / "base", make(RobertaModel).state_dict())
    model = AutoModelForSequenceClassification.from_pretrained(folder, **LORA)
    model.train_only(("lora",))
    hold_frozen_in(model, torch.bfloat16)
    model.get_parameter(f"{QUERY}.weight").data += 1
    saved = model.full_state_dict()[f"{QUERY}.weight"]
    assert saved.dtype == torch.bfloat16
    assert torch.equal(saved, model.get_parameter(f"{QUERY}.weight"))


def test_tied_base_weights_keep_their_bits_under_both_names(tmp_path):
    base = make(RobertaForMaskedLM).state_dict()
    model = RobertaForMaskedLM.from_pretrained(write(tmp_path / "base", base), **LORA)
    model.train_only(("lora",))
    hold_frozen_in(model, torch.bfloat16)
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
    assert re.fullmatch("[0-9a-f]{16}", expected)
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


def test_adapter_of_a_model(tmp_path):
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


def test_an_adapted_checkpoint_remembers_its_base(tmp_path):
    folder = write(tmp_path / "base", make(RobertaModel).state_dict())
    model = AutoModelForSequenceClassification.from_pretrained(folder, **LORA)
    model.save_pretrained(tmp_path / "tuned")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "tuned")
    assert again.adapter().metadata.base == str(folder)
    assert again.config.name_or_path == str(tmp_path / "tuned")


# ---- what does not fit ----


@pytest.fixture
def tuned():
    return {
        n: t.clone() for n, t in make(RobertaForSequenceClassification, **LORA).state_dict().items()
    }


def lacking(*names):
    return lambda t: {name: tensor for name, tensor in t.items() if not name.endswith(names)}


def without_lora(tensors):
    return {name: tensor for name, tensor in tensors.items() if "lora_" not in name}


def bare(tensors):
    return {
        name.removeprefix("roberta."): tensor
        for name, tensor in tensors.items()
        if name.startswith("roberta.")
    }


def added(name, *shape):
    return lambda tensors: {**tensors, name: torch.zeros(shape)}


def cut(tensors):
    return {n: t[:1] if n.endswith("lora_A") else t for n, t in tensors.items()}


MISFITS = [
    ("backbone tensor", lacking("0.output.dense.weight"), LORA,
     ["lacks 1 tensors: roberta.encoder.layer.0.output.dense.weight"]),
    ("whole layer", lambda t: {n: x for n, x in t.items() if "layer.1." not in n}, LORA,
     ["lacks 20 tensors: roberta.encoder.layer.1.", ", …"]),
    ("part of the head", lacking("out_proj.bias"), LORA,
     ["lacks 1 tensors: classifier.out_proj.bias"]),
    ("some of LoRA", lacking("0.attention.self.value.lora_B"), LORA,
     ["lacks 1 tensors", "layer.0.attention.self.value.lora_B"]),
    ("unknown", added("roberta.encoder.layer.2.output.dense.weight", 2), LORA,
     ["1 tensors unknown to the model: roberta.encoder.layer.2.output.dense.weight"]),
    ("unknown, bare", lambda t: added("encoder.layer.2.output.dense.weight", 2)(bare(t)), LORA,
     ["1 tensors unknown to the model: roberta.encoder.layer.2.output.dense.weight"]),
    ("LoRA, but not asked for", lambda t: t, {},
     ["holds LoRA weights that the model has no place for", "query.lora_A", "--apply_lora"]),
    ("LoRA elsewhere", added(f"{QUERY[:-5]}key.lora_A", 2, 8), LORA,
     ["no place for", "key.lora_A"]),
    ("other rank", cut, LORA,
     ["query.lora_A is (1, 8) in the file, (2, 8) in the model: rank 1, not 2"]),
    ("other number of labels", lambda t: t, {**LORA, "num_labels": 3},
     ["classifier.out_proj.", "(2", "(3", "a head for another number of labels?"]),
    ("other width", lambda t: t, {**LORA, "intermediate_size": 16},
     ["roberta.encoder.layer.0.intermediate.dense.", "(12", "(16"]),
]  # fmt: skip


@pytest.mark.parametrize("format", ["bin", "safetensors"])
@pytest.mark.parametrize(("change", "settings", "parts"), [m[1:] for m in MISFITS],
                         ids=[m[0] for m in MISFITS])  # fmt: skip
def test_misfits(tmp_path, tuned, format, change, settings, parts):
    folder = write(tmp_path / "m", change(tuned), format)
    with fails(CheckpointError, str(folder), *parts) as caught:
        AutoModelForSequenceClassification.from_pretrained(folder, **settings)
    is_one_line(caught)


def test_a_model_that_refuses_a_checkpoint_is_untouched(tuned):
    model = make(RobertaForSequenceClassification, **LORA)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tuned["classifier.out_proj.bias"] = torch.zeros(5)
    with fails(CheckpointError, "classifier.out_proj.bias is (5,) in the file, (2,) in the model"):
        model.load_checkpoint({name: tensor + 1 for name, tensor in tuned.items()}, "here")
    same(model, before)


@pytest.mark.parametrize("auto", [True, False])
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"lora_alpha": 8}, "was trained with lora_alpha 4, not 8"),
        ({"lora_r": 4}, "was trained with lora_r 2, not 4"),
        ({"apply_lora": False}, "was trained with apply_lora True, not False"),
    ],
)
def test_other_lora_settings_than_the_checkpoints(tmp_path, auto, asked, message):
    make(RobertaForSequenceClassification, **LORA).save_pretrained(tmp_path / "m")
    model_class = AutoModelForSequenceClassification if auto else RobertaForSequenceClassification
    with fails(ValueError, message, str(tmp_path)) as caught:
        model_class.from_pretrained(tmp_path / "m", **{**LORA, **asked})
    is_one_line(caught)
    config = RobertaConfig(**{**SHAPE, **LORA, **asked})
    with fails(ValueError, message):
        model_class.from_pretrained(tmp_path / "m", config)


def test_lora_settings_that_are_not_given_are_the_checkpoints(tmp_path):
    make(RobertaForSequenceClassification, **LORA).save_pretrained(tmp_path / "m")
    given = {"apply_lora": True, "lora_r": None, "lora_alpha": None}
    config = AutoConfig.from_pretrained(tmp_path / "m", **given)
    assert (config.lora_r, config.lora_alpha) == (2, 4)
    write(tmp_path / "base", {})
    with pytest.raises(ValueError, match="apply_lora needs lora_r: give --lora_r"):
        AutoConfig.from_pretrained(tmp_path / "base", **given)


def test_an_adapted_checkpoint_that_lost_its_lora(tmp_path, tuned):
    folder = write(tmp_path / "m", without_lora(tuned), **LORA)
    with fails(CheckpointError, str(folder), "says apply_lora, its weights hold none") as caught:
        AutoModelForSequenceClassification.from_pretrained(folder)
    is_one_line(caught)


def test_settings_beside_a_config(tmp_path):
    folder = write(tmp_path / "m", make(RobertaModel).state_dict())
    for model_class in (AutoModel, RobertaModel):
        with pytest.raises(TypeError, match="lora_r: set it in the config"):
            model_class.from_pretrained(folder, RobertaConfig(**SHAPE), lora_r=4)


# ---- damaged folders ----


@pytest.mark.parametrize("format", ["bin", "legacy", "safetensors"])
@pytest.mark.parametrize("left", [0, 5, 300, -1])
def test_truncated_weights(tmp_path, format, left):
    folder = write(tmp_path / "m", make(RobertaModel).state_dict(), format)
    path = next(path for path in folder.iterdir() if path.name != "config.json")
    path.write_bytes(path.read_bytes()[:left])
    with fails(CheckpointError, str(path)) as caught:
        AutoModel.from_pretrained(folder)
    is_one_line(caught)


class Intruder:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (open, (str(self.mark), "w"))


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("beside_tensors", [True, False])
def test_code_in_a_pickle_is_not_run(tmp_path, zipped, beside_tensors):
    folder = write(tmp_path / "m", {})
    path, mark = folder / "pytorch_model.bin", tmp_path / "intruded"
    content = {"a": torch.zeros(1), "b": Intruder(mark)} if beside_tensors else Intruder(mark)
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    with fails(CheckpointError, str(path), "not loaded for safety") as caught:
        AutoModel.from_pretrained(folder)
    is_one_line(caught)
    assert not mark.exists()
    path.write_bytes(pickle.dumps(Intruder(mark), protocol=2))
    with fails(CheckpointError, str(path)):
        AutoModel.from_pretrained(folder)
    assert not mark.exists()


@pytest.mark.parametrize("content", [[1, 2], {"step": 3}, {1: torch.zeros(1)}, torch.zeros(2)])
def test_files_without_named_tensors(tmp_path, content):
    folder = write(tmp_path / "m", {})
    torch.save(content, folder / "pytorch_model.bin")
    with fails(CheckpointError, "holds something else than named tensors"):
        AutoModel.from_pretrained(folder)


@pytest.mark.parametrize("format", ["sharded bin", "sharded safetensors"])
def test_broken_shards(tmp_path, format):
    folder = write(tmp_path / "m", make(RobertaModel).state_dict(), format)
    second = next(folder.glob("*-00002-of-00003.*"))
    content = second.read_bytes()
    second.write_bytes(content[: len(content) // 2])
    with fails(CheckpointError, str(second)):
        AutoModel.from_pretrained(folder)
    second.unlink()
    with fails(CheckpointError, f"names the shard {second.name}, which is missing") as caught:
        AutoModel.from_pretrained(folder)
    is_one_line(caught)


def test_shards_that_lack_what_the_index_promises(tmp_path):
    folder = write(tmp_path / "m", make(RobertaModel).state_dict(), "sharded safetensors")
    shard = next(folder.glob("*-00002-of-00003.*"))
    tensors = load_file(shard)
    gone = sorted(tensors)[0]
    save_file({name: t for name, t in tensors.items() if name != gone}, shard)
    with fails(CheckpointError, "model.safetensors.index.json", f"lack 1 tensors: {gone}"):
        AutoModel.from_pretrained(folder)


BROKEN_INDEXES = (
    "{",
    "[]",
    "{}",
    "\xff",
    '{"weight_map": []}',
    '{"weight_map": "x"}',
    '{"weight_map": {"a": 1}}',
    '{"weight_map": {"a": ["b"]}}',
    '{"weight_map": null}',
)


@pytest.mark.parametrize("index", BROKEN_INDEXES)
def test_broken_index(tmp_path, index):
    folder = write(tmp_path / "m", {})
    (folder / "pytorch_model.bin").unlink()
    (folder / "model.safetensors.index.json").write_bytes(index.encode("latin-1"))
    with fails(CheckpointError, "model.safetensors.index.json: not an index of shards"):
        AutoModel.from_pretrained(folder)


def test_folders_that_are_no_models(tmp_path):
    folder = write(tmp_path / "m", make(RobertaModel).state_dict())
    (folder / "pytorch_model.bin").unlink()
    with fails(OSError, f"'{folder}' has no weights", "model.safetensors", "pytorch_model.bin"):
        AutoModel.from_pretrained(folder)
    (folder / "config.json").unlink()
    for auto in (AutoModel, AutoConfig):
        with fails(OSError, f"'{folder}' has no config.json") as caught:
            auto.from_pretrained(folder)
        is_one_line(caught)


@pytest.mark.parametrize(
    ("content", "error", "parts"),
    [
        ("{", OSError, ["config.json: not a JSON file"]),
        (b"\xff\xfe", OSError, ["config.json: not a JSON file"]),
        ("[]", OSError, ["config.json: holds a list, not settings by name"]),
        ("{}", ValueError, ["is a model of no stated type; this package carries roberta"]),
        ('{"model_type": "bert"}', ValueError, ["is a bert; this package carries roberta"]),
    ],
)
def test_broken_config(tmp_path, content, error, parts):
    folder = write(tmp_path / "m", make(RobertaModel).state_dict())
    (folder / "config.json").write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )
    for auto in (AutoModel, AutoModelForMaskedLM, AutoConfig):
        with fails(error, *parts) as caught:
            auto.from_pretrained(folder)
        is_one_line(caught)


def test_a_model_of_another_type(tmp_path):
    folder = write(tmp_path / "m", {}, config={"model_type": "bert"})
    with fails(ValueError, f"'{folder}' is a bert model, not roberta"):
        RobertaModel.from_pretrained(folder)


@pytest.mark.parametrize("name", ["/no/such/folder", "./relative/folder", "a/b/c", "", "two words"])
def test_names_that_cannot_be_on_the_hub(name):
    with fails(OSError, f"'{name}' is neither a local folder nor a model on the hub") as caught:
        AutoModel.from_pretrained(name)
    is_one_line(caught)


@pytest.mark.parametrize("switch", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
@pytest.mark.parametrize("value", ["1", "true", "ON"])
def test_offline_without_a_cached_copy(monkeypatch, tmp_path, switch, value):
    monkeypatch.setenv(switch, value)
    with fails(OSError, "'org/tiny'", "offline mode is on and it is not in the cache") as caught:
        AutoModel.from_pretrained("org/tiny", cache_dir=str(tmp_path))
    is_one_line(caught)


@pytest.mark.parametrize("name", ["is_offline_mode", "resolve_file"])
def test_file_utils_has_the_names_of_the_hub(name):
    assert getattr(file_utils, name) is getattr(hub, name)


# ---- settings ----


class TestConfig:
    def test_round_trip(self, tmp_path):
        config = RobertaConfig(
            **SHAPE,
            **LORA,
            id2label={0: "a", 1: "b", 2: "c"},
            finetuning_task="mnli",
            own=[1, {"x": 2}],
        )
        config.save_pretrained(tmp_path / "c")
        read = AutoConfig.from_pretrained(tmp_path / "c")
        assert read == config
        assert read.id2label == {0: "a", 1: "b", 2: "c"}
        assert read.label2id == {"a": 0, "b": 1, "c": 2}
        assert read.own == [1, {"x": 2}]
        assert list(tmp_path.joinpath("c").iterdir()) == [tmp_path / "c" / "config.json"]
        assert read != RobertaConfig(**SHAPE)
        assert AutoConfig.from_pretrained(tmp_path / "c" / "config.json") == config

    def test_overrides(self, tmp_path):
        RobertaConfig(**SHAPE, id2label={0: "a", 1: "b"}).save_pretrained(tmp_path)

        def labels(**overrides):
            config = AutoConfig.from_pretrained(tmp_path, **overrides)
            return config.num_labels, config.id2label, config.label2id

        named = (2, {0: "a", 1: "b"}, {"a": 0, "b": 1})
        assert labels() == labels(num_labels=2) == named
        assert labels(num_labels=1) == (1, {0: "LABEL_0"}, {"LABEL_0": 0})
        assert labels(id2label={0: "x", 1: "y"})[2] == {"x": 0, "y": 1}
        assert labels(id2label={0: "x", 1: "y"}, num_labels=2)[1:] == (
            {0: "x", 1: "y"},
            {"x": 0, "y": 1},
        )
        assert (
            AutoConfig.from_pretrained(tmp_path, hidden_dropout_prob=0.4).hidden_dropout_prob == 0.4
        )

    def test_labels(self):
        assert RobertaConfig().num_labels == 2
        config = RobertaConfig(num_labels=3)
        assert config.id2label == {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}
        config.num_labels = 1
        assert config.label2id == {"LABEL_0": 0}
        assert RobertaConfig(num_labels=5, id2label={0: "a"}).num_labels == 1

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({}, "apply_lora needs lora_r: give --lora_r"),
            ({"lora_r": 8}, "apply_lora needs lora_alpha: give --lora_alpha"),
            ({"lora_r": 0, "lora_alpha": 1}, "lora_r must be a positive integer or null"),
            ({"lora_r": 8, "lora_alpha": -1}, "lora_alpha must be a positive number or null"),
            ({"lora_r": True, "lora_alpha": 1}, "lora_r must be a positive integer or null"),
            ({"lora_r": "8", "lora_alpha": 1}, "lora_r must be a positive integer or null"),
        ],
    )
    def test_lora_settings(self, settings, message):
        with pytest.raises(ValueError, match=re.escape(message)):
            RobertaConfig(**SHAPE, apply_lora=True, **settings)

    def test_a_name_that_is_no_class(self):
        for auto in (AutoConfig, AutoModel):
            with pytest.raises(TypeError, match="from_pretrained"):
                auto()
        assert AutoConfig.for_model("roberta", vocab_size=7).vocab_size == 7
        with pytest.raises(ValueError, match="is a gpt2; this package carries roberta"):
            AutoConfig.for_model("gpt2")


def test_labels_that_are_numbers(tmp_path):
    """As Transformers writes them of a model of data whose labels are numbers."""
    names = {"id2label": {"0": 0, "1": 1, "2": 2}, "label2id": {"0": 0, "1": 1, "2": 2}}
    text = json.dumps({"model_type": "roberta", **SHAPE, **names})
    (tmp_path / "config.json").write_text(text)
    config = AutoConfig.from_pretrained(str(tmp_path))
    assert config.num_labels == 3
    assert config.id2label == {0: "0", 1: "1", 2: "2"}
    (tmp_path / "config.json").write_text(text.replace('"0": 0', '"0": [0]', 1))
    with pytest.raises(ValueError, match="id2label must be a map of strings or integers"):
        AutoConfig.from_pretrained(str(tmp_path))
