"""Folders and settings that do not fit a model are refused with a line that says what is wrong."""

import json
import pickle
import re

import pytest
import torch
from compare import assert_same_bits
from model_folders import LORA, QUERY, SHAPE, bare, fails, is_one_line, make, same, write
from safetensors.torch import load_file, save_file

from loralib.errors import CheckpointError
from loralib.io import hub
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaModel,
    file_utils,
    weight_files,
)
from transformers.weight_files import read_weights

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


def added(name, *shape):
    return lambda tensors: {**tensors, name: torch.zeros(shape)}


def cut(tensors):
    return {n: t[:1] if n.endswith("lora_A") else t for n, t in tensors.items()}


MISFITS = [
    ("backbone tensor", lacking("0.output.dense.weight"), LORA,
     ["lacks 1 tensor: roberta.encoder.layer.0.output.dense.weight"]),
    ("whole layer", lambda t: {n: x for n, x in t.items() if "layer.1." not in n}, LORA,
     ["lacks 20 tensors: roberta.encoder.layer.1.",
      ", …: the file has 1 layers, num_hidden_layers is 2: use the config.json"]),
    ("more layers asked for", without_lora, {**LORA, "num_hidden_layers": 3},
     ["lacks 16 tensors: roberta.encoder.layer.2.",
      ", …: the file has 2 layers, num_hidden_layers is 3: use the config.json"]),
    ("part of the head", lacking("out_proj.bias"), LORA,
     ["lacks 1 tensor: classifier.out_proj.bias"]),
    ("some of LoRA", lacking("0.attention.self.value.lora_B"), LORA,
     ["lacks 1 tensor", "layer.0.attention.self.value.lora_B"]),
    ("more layers", lambda t: t, {**LORA, "num_hidden_layers": 1},
     ["20 tensors that the model does not have: roberta.encoder.layer.1.",
      ", …: the file has 2 layers, num_hidden_layers is 1: use the config.json"]),
    ("unknown", added("roberta.encoder.layer.2.output.dense.weight", 2), LORA,
     ["1 tensor that the model does not have: roberta.encoder.layer.2.output.dense.weight"]),
    ("unknown, bare", lambda t: added("encoder.layer.2.output.dense.weight", 2)(bare(t)), LORA,
     ["1 tensor that the model does not have: roberta.encoder.layer.2.output.dense.weight"]),
    ("LoRA, but not asked for", lambda t: t, {},
     ["holds LoRA weights that the model has no place for", "query.lora_A",
     ": build it with apply_lora and their lora_r, lora_alpha and lora_targets"]),
    ("LoRA elsewhere", added(f"{QUERY[:-5]}key.lora_A", 2, 8), LORA,
     ["no place for", "key.lora_A"]),
    ("other rank", cut, LORA,
     ["query.lora_A is (1, 8) in the file, (2, 8) in the model: rank 1, not 2"]),
    ("other number of labels", lambda t: t, {**LORA, "num_labels": 3},
     ["classifier.out_proj.", "(2", "(3", "for another number of labels? To train a new one"]),
    ("other width", lambda t: t, {**LORA, "intermediate_size": 16},
     ["roberta.encoder.layer.0.intermediate.dense.", "(12", "(16"]),
]  # fmt: skip


@pytest.mark.parametrize("format", ["bin", "safetensors"])
@pytest.mark.parametrize(("change", "settings", "parts"), [m[1:] for m in MISFITS],
                         ids=[m[0] for m in MISFITS])  # fmt: skip
def test_checkpoints_that_do_not_fit_are_refused(tmp_path, tuned, format, change, settings, parts):
    folder = write(tmp_path / "m", change(tuned), format)
    with fails(CheckpointError, str(folder), *parts) as caught:
        AutoModelForSequenceClassification.from_pretrained(folder, **settings)
    is_one_line(caught)


def test_a_new_head_is_trained_on_what_auto_model_saves_of_a_model_with_another_one(
    tmp_path, tuned
):
    old, new = write(tmp_path / "old", tuned, "safetensors"), tmp_path / "new"
    AutoModel.from_pretrained(old, **LORA).save_pretrained(new)
    model = AutoModelForSequenceClassification.from_pretrained(new, num_labels=3)
    assert len(model.classifier.out_proj.weight) == 3
    kept = {name: tensor for name, tensor in tuned.items() if not name.startswith("classifier.")}
    assert_same_bits({name: model.state_dict()[name] for name in kept}, kept)


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
def test_other_lora_settings_than_the_checkpoints_are_refused(tmp_path, auto, asked, message):
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
    with pytest.raises(ValueError, match=r"^apply_lora needs lora_r and lora_alpha: [^-]*$"):
        AutoConfig.from_pretrained(tmp_path / "base", **given)


def test_an_adapted_checkpoint_that_lost_its_lora_is_refused(tmp_path, tuned):
    folder = write(tmp_path / "m", without_lora(tuned), **LORA)
    with fails(
        CheckpointError, str(folder), "sets apply_lora, but it has no LoRA weights"
    ) as caught:
        AutoModelForSequenceClassification.from_pretrained(folder)
    is_one_line(caught)


# ---- damaged folders ----


@pytest.mark.parametrize("format", ["bin", "legacy", "safetensors"])
@pytest.mark.parametrize("left", [0, 5, 300, -1])
def test_truncated_weights_are_refused(tmp_path, format, left):
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
def test_files_without_named_tensors_are_refused(tmp_path, content):
    folder = write(tmp_path / "m", {})
    torch.save(content, folder / "pytorch_model.bin")
    with fails(CheckpointError, "holds something other than named tensors"):
        AutoModel.from_pretrained(folder)


@pytest.mark.parametrize("format", ["sharded bin", "sharded safetensors"])
def test_broken_and_missing_shards_are_refused(tmp_path, format):
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


@pytest.mark.parametrize("shards", [True, False])
def test_weights_that_are_not_in_the_cache_are_named_so_in_offline_mode(
    tmp_path, monkeypatch, shards
):
    """As after a download that was interrupted: the repository may well have them."""
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "first.safetensors"}}))
    monkeypatch.setattr(
        weight_files,
        "resolve_file",
        lambda name, file, **where: index if shards and file == index.name else None,
    )
    what = "names the shard first.safetensors, which is missing" if shards else "has no weights"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with fails((CheckpointError, OSError), f"{what} in the cache, and offline mode is on"):
        read_weights("org/model")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    with fails((CheckpointError, OSError), what) as caught:
        read_weights("org/model")
    assert "offline" not in str(caught.value)


@pytest.mark.parametrize("shard", ["../model.safetensors", "{}/model.safetensors", "a/b.bin"])
def test_shards_elsewhere_are_not_read(tmp_path, shard):
    """A downloaded index must not have other files read."""
    for folder in (tmp_path, tmp_path / "m" / "a"):
        folder.mkdir(parents=True, exist_ok=True)
        save_file({"x": torch.ones(1)}, folder / "model.safetensors")
        torch.save({"x": torch.ones(1)}, folder / "b.bin")
    shard = shard.format(tmp_path)
    shard = shard.format(tmp_path)
    index = tmp_path / "m" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": shard}}))
    with fails(CheckpointError, f"{index}: '{shard}' is not the name of a file next to it"):
        read_weights(str(tmp_path / "m"))


def test_shards_that_lack_tensors_of_the_index_are_refused(tmp_path):
    folder = write(tmp_path / "m", make(RobertaModel).state_dict(), "sharded safetensors")
    shard = next(folder.glob("*-00002-of-00003.*"))
    tensors = load_file(shard)
    gone = sorted(tensors)[0]
    save_file({name: t for name, t in tensors.items() if name != gone}, shard)
    with fails(CheckpointError, "model.safetensors.index.json", f"lack 1 tensor: {gone}"):
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
    pytest.param("[" * 100_000, id="deep"),
)


@pytest.mark.parametrize("index", BROKEN_INDEXES)
def test_a_broken_index_is_refused(tmp_path, index):
    folder = write(tmp_path / "m", {})
    (folder / "pytorch_model.bin").unlink()
    (folder / "model.safetensors.index.json").write_bytes(index.encode("latin-1"))
    with fails(CheckpointError, "model.safetensors.index.json: not an index of shards"):
        AutoModel.from_pretrained(folder)


def test_folders_without_weights_or_a_config_are_refused(tmp_path):
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
        ("[]", OSError, ["config.json: contains a list, not a JSON object"]),
        (
            "{}",
            ValueError,
            ["has no model_type; this package has only roberta", "give one of these"],
        ),
        (
            '{"model_type": "bert"}',
            ValueError,
            [
                "has model_type 'bert'; this package has only rob",
                "with lora.add_lora and upstream's T",
            ],
        ),
        (
            '{"model_type": "gpt2"}',
            ValueError,
            [
                "has model_type 'gpt2'",
                "such as roberta-base, or train it with NLG/src/gpt2_ft.py --init_checkp",
            ],
        ),
    ],
)
def test_a_broken_or_unsupported_config_is_refused(tmp_path, content, error, parts):
    folder = write(tmp_path / "m", make(RobertaModel).state_dict())
    (folder / "config.json").write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )
    for auto in (AutoModel, AutoModelForMaskedLM, AutoConfig):
        with fails(error, *parts) as caught:
            auto.from_pretrained(folder)
        is_one_line(caught)


def test_a_model_of_another_type_is_refused(tmp_path):
    folder = write(tmp_path / "m", {}, config={"model_type": "bert"})
    with fails(ValueError, f"'{folder}' is a bert model, not roberta"):
        RobertaModel.from_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((path, ": no such folder") for path in ("/no/such/folder", "./relative/folder", "a/b/c")),
        *(
            (name, " is neither a local folder nor a model on the hub")
            for name in ("", "two words")
        ),
    ],
)
def test_names_that_cannot_be_on_the_hub_are_refused(name, reason):
    with fails(OSError, f"'{name}'{reason}") as caught:
        AutoModel.from_pretrained(name)
    is_one_line(caught)


@pytest.mark.parametrize("switch", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
@pytest.mark.parametrize("value", ["1", "true", "ON"])
def test_offline_mode_needs_a_cached_copy(monkeypatch, tmp_path, switch, value):
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
            ({}, "apply_lora needs lora_r and lora_alpha: chosen for training, or"),
            ({"lora_r": 8}, "apply_lora needs lora_alpha: "),
            ({"lora_r": 0, "lora_alpha": 1}, "lora_r must be a positive integer or null"),
            ({"lora_r": 8, "lora_alpha": -1}, "lora_alpha must be a positive number or null"),
            ({"lora_r": True, "lora_alpha": 1}, "lora_r must be a positive integer or null"),
            ({"lora_r": "8", "lora_alpha": 1}, "lora_r must be a positive integer or null"),
        ],
    )
    def test_bad_lora_settings_are_refused(self, settings, message):
        with pytest.raises(ValueError, match=re.escape(message)):
            RobertaConfig(**SHAPE, apply_lora=True, **settings)

    def test_auto_classes_cannot_be_instantiated(self):
        for auto in (AutoConfig, AutoModel):
            with pytest.raises(TypeError, match="from_pretrained"):
                auto()
        assert AutoConfig.for_model("roberta", vocab_size=7).vocab_size == 7
        with pytest.raises(
            ValueError, match="has model_type 'gpt2'; this package has only roberta"
        ):
            AutoConfig.for_model("gpt2")


def test_labels_that_are_numbers_become_strings(tmp_path):
    """Transformers writes such a config if the labels of the data are numbers."""
    names = {"id2label": {"0": 0, "1": 1, "2": 2}, "label2id": {"0": 0, "1": 1, "2": 2}}
    text = json.dumps({"model_type": "roberta", **SHAPE, **names})
    (tmp_path / "config.json").write_text(text)
    config = AutoConfig.from_pretrained(str(tmp_path))
    assert config.num_labels == 3
    assert config.id2label == {0: "0", 1: "1", 2: "2"}
    (tmp_path / "config.json").write_text(text.replace('"0": 0', '"0": [0]', 1))
    with pytest.raises(ValueError, match="id2label must be a map of strings or integers"):
        AutoConfig.from_pretrained(str(tmp_path))


@pytest.mark.parametrize("kind", [AutoConfig, AutoModelForSequenceClassification, AutoTokenizer])
def test_an_auto_class_that_is_called_names_its_method(kind):
    instead = f"{kind.__name__} cannot be instantiated: use {kind.__name__}.from_pretrained"
    with pytest.raises(TypeError, match=instead):
        kind("roberta-base")
