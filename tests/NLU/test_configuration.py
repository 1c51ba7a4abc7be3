"""Configs have 4.4.2's fields, go through dicts and JSON files unchanged, and refuse bad values."""

import json

import pytest
from model_folders import LORA, SHAPE, fails

from transformers import AutoConfig, DebertaV2Config, PretrainedConfig, RobertaConfig

CONFIGS = [RobertaConfig, DebertaV2Config]
# Fields of 4.4.2's PretrainedConfig, with their defaults.
FIELDS = {
    "return_dict": True,
    "output_hidden_states": False,
    "output_attentions": False,
    "torchscript": False,
    "use_bfloat16": False,
    "pruned_heads": {},
    "tie_word_embeddings": True,
    "is_encoder_decoder": False,
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "max_length": 20,
    "min_length": 0,
    "do_sample": False,
    "early_stopping": False,
    "num_beams": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "num_return_sequences": 1,
    "chunk_size_feed_forward": 0,
    "output_scores": False,
    "return_dict_in_generate": False,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "architectures": None,
    "finetuning_task": None,
    "id2label": {0: "LABEL_0", 1: "LABEL_1"},
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "tokenizer_class": None,
    "prefix": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": None,
    "sep_token_id": None,
    "decoder_start_token_id": None,
    "task_specific_params": None,
    "name_or_path": "",
}


def test_fields_and_their_defaults():
    config = PretrainedConfig()
    assert {name: getattr(config, name) for name in FIELDS} == FIELDS
    assert config.num_labels == 2
    assert config.use_return_dict is True
    assert PretrainedConfig(torchscript=True).use_return_dict is False
    assert PretrainedConfig(return_dict=False).use_return_dict is False


@pytest.mark.parametrize("kind", CONFIGS)
def test_settings_survive_saving_and_loading(kind, tmp_path):
    """Through a dict, JSON files, and a folder."""
    config = kind(**{**SHAPE, "num_labels": 3, "temperature": 0.5, "pruned_heads": {1: [0]}})
    config.to_json_file(tmp_path / "own.json")
    config.to_json_file(tmp_path / "all.json", use_diff=False)
    config.save_pretrained(tmp_path)
    for back in (
        kind.from_dict(config.to_dict()),
        kind.from_json_file(tmp_path / "own.json"),
        kind.from_json_file(tmp_path / "all.json"),
        kind.from_pretrained(tmp_path),
        AutoConfig.from_pretrained(tmp_path),
    ):
        assert back == config
        assert back.to_dict() == config.to_dict()
        assert (back.temperature, back.pruned_heads, back.num_labels) == (0.5, {1: [0]}, 3)


def test_a_file_leaves_out_unused_fields_at_their_defaults(tmp_path):
    config = RobertaConfig(**SHAPE, min_length=3)
    left_out = config.to_dict().keys() - config.to_diff_dict().keys()
    assert {"max_length", "num_beams", "is_encoder_decoder"} <= left_out
    assert all(getattr(config, name) == FIELDS[name] for name in left_out)
    assert "min_length" not in left_out
    assert json.loads(config.to_json_string()) == json.loads(json.dumps(config.to_diff_dict()))
    assert json.loads(config.to_json_string(use_diff=False)).keys() == config.to_dict().keys()
    config.save_pretrained(tmp_path)
    assert (tmp_path / "config.json").read_text() == config.to_json_string()


def test_arguments_replace_a_dicts_settings():
    values = {**SHAPE, "own": 1, "id2label": {"0": "a", "1": "b", "2": "c"}}
    config, unused = RobertaConfig.from_dict(
        values, return_unused_kwargs=True, own=2, num_hidden_layers=1, other=3
    )
    assert (config.own, config.num_hidden_layers, unused) == (2, 1, {"other": 3})
    assert RobertaConfig.from_dict(values, num_labels=5).id2label[4] == "LABEL_4"
    for not_given in ({}, {"num_labels": None}):
        assert RobertaConfig.from_dict(values, **not_given).label2id == {"a": 0, "b": 1, "c": 2}
    with fails(TypeError, "RobertaConfig has no setting other"):
        RobertaConfig.from_dict(values, other=3)


def test_get_config_dict_returns_a_files_content_and_other_arguments(tmp_path):
    RobertaConfig(**SHAPE).save_pretrained(tmp_path)
    content, others = RobertaConfig.get_config_dict(tmp_path, cache_dir="x", num_labels=3)
    assert content == json.loads((tmp_path / "config.json").read_text())
    assert others == {"num_labels": 3}


def test_update_changes_settings():
    config = RobertaConfig(**SHAPE)
    config.update({"hidden_size": 16, "own": 5, "num_labels": 3})
    assert (config.hidden_size, config.own, len(config.id2label)) == (16, 5, 3)


def test_a_plain_models_file_does_not_name_its_base(tmp_path):
    """A plain model is its own base; an adapted model's file names another one."""
    RobertaConfig(**SHAPE).save_pretrained(tmp_path / "base")
    plain = RobertaConfig.from_pretrained(tmp_path / "base")
    assert plain.base_name_or_path == plain.name_or_path == str(tmp_path / "base")
    assert "base_name_or_path" not in plain.to_dict()
    adapted = RobertaConfig.from_pretrained(tmp_path / "base", **LORA)
    assert adapted.to_dict()["base_name_or_path"] == str(tmp_path / "base")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("{", OSError, "not a JSON file"),
        ("[]", OSError, "contains a list, not a JSON object"),
        ('{"num_hidden_layers": "2"}', ValueError, "num_hidden_layers must be a positive integer"),
        ('{"text_columns": "review"}', ValueError, "text_columns must be a list of strings"),
        ('{"pruned_heads": {"0": 1}}', ValueError, "pruned_heads must be a map of lists of"),
    ],
)
def test_invalid_json_files_are_refused(tmp_path, text, error, message):
    (tmp_path / "own.json").write_text(text)
    with fails(error, "own.json", message):
        RobertaConfig.from_json_file(tmp_path / "own.json")


@pytest.mark.parametrize("overrides", [{}, {"vocab_size": 9}, {"hidden_size": 4}])
def test_an_error_in_a_file_names_it_whatever_the_arguments(tmp_path, overrides):
    settings = {**SHAPE, "max_position_embeddings": 30, "pad_token_id": 20}
    (tmp_path / "config.json").write_text(json.dumps({**settings, "model_type": "roberta"}))
    with fails(ValueError, f"{tmp_path}/config.json: pad_token_id must be below vocab_size, 20"):
        RobertaConfig.from_pretrained(tmp_path, **overrides)
    # An argument that corrects the file is accepted.
    assert RobertaConfig.from_pretrained(tmp_path, vocab_size=21).vocab_size == 21


def test_an_error_in_an_argument_does_not_name_the_file(tmp_path):
    RobertaConfig(**SHAPE).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^hidden_size 9 is not a multiple of 2 heads$"):
        RobertaConfig.from_pretrained(tmp_path, hidden_size=9)


@pytest.mark.parametrize("columns", [[], ["a", "a"], ["a", "b", "c"]])
def test_columns_of_texts_are_one_or_two(columns):
    with fails(ValueError, "text_columns has to name one or two columns, not "):
        RobertaConfig(text_columns=columns)
    assert RobertaConfig(text_columns=("a", "b")).text_columns == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adapter.safetensors", "is a file of weights; a model is a folder with config.json"),
        ("pytorch_model_lora.bin", "is a file of weights; a model is a folder with config.json"),
        (
            "peft",
            "is an adapter, not a model: give its base ('org/base') as the model, and this as",
        ),
        ("ours", "is an adapter, not a model: give its base as the model, and this as the adapter"),
        ("empty", "has no config.json, so it is not a model folder"),
    ],
)
def test_an_adapter_given_as_a_model_is_refused(tmp_path, name, message):
    for folder in ("peft", "ours", "empty"):
        (tmp_path / folder).mkdir()
    settings = '{"base_model_name_or_path": "org/base"}'
    (tmp_path / "peft" / "adapter_config.json").write_text(settings)
    (tmp_path / "ours" / "pytorch_model_lora.safetensors").touch()
    for file in ("adapter.safetensors", "pytorch_model_lora.bin"):
        (tmp_path / file).write_bytes(b"\xbd")
    with fails(OSError, f"'{tmp_path / name}' {message}"):
        AutoConfig.from_pretrained(tmp_path / name)
