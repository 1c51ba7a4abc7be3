"""Arguments of every `from_pretrained`: each has an effect, or is refused."""

import json
import re

import pytest
import torch
from hub_process import run_on_hub

from loralib.errors import CheckpointError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    RobertaModel,
    RobertaTokenizerFast,
)

SHAPE = {
    **{"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"intermediate_size": 12, "max_position_embeddings": 12, "type_vocab_size": 1},
}
CONFIGS = (RobertaConfig, AutoConfig)
MODELS = (RobertaForSequenceClassification, AutoModelForSequenceClassification)
TOKENIZERS = (RobertaTokenizerFast, AutoTokenizer)
EVERY_CLASS = pytest.mark.parametrize("owner", [*CONFIGS, *MODELS, *TOKENIZERS])
LETTERS = ["<s>", "<pad>", "</s>", "<unk>", *"abcdefghijklmno", "<mask>"]


def random_model(model_class=RobertaForSequenceClassification, seed=0, **settings):
    torch.manual_seed(seed)
    model = model_class(RobertaConfig(**SHAPE, **settings))
    for parameter in model.parameters():
        parameter.data.normal_()
    return model.eval()


@pytest.fixture
def folder(tmp_path):
    """A classifier with its tokenizer, and a setting in its file that no class knows."""
    random_model(note="kept").save_pretrained(tmp_path / "m")
    vocabulary = {token: index for index, token in enumerate(LETTERS)}
    (tmp_path / "m" / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "m" / "merges.txt").write_text("#version: 0.2\n")
    return tmp_path / "m"


def same(model, state):
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


# ---- what would have no effect ----

# The arguments, those that they need, and the message without these.
WITHOUT_EFFECT = [
    (
        {"lora_r": 8, "lora_alpha": 16},
        {"apply_lora": True},
        r"^lora_r, lora_alpha without apply_lora=True .*: add that, or leave them out$",
    ),
    (
        {"lora_dropout": 0.1},
        {"apply_lora": True, "lora_r": 2, "lora_alpha": 4},
        r"^lora_dropout without apply_lora=True .*: add that, or leave it out$",
    ),
    (
        {"lora_targets": ["query"], "apply_lora": None, "apply_adapter": True},
        {"apply_lora": True, "apply_adapter": False, "lora_r": 2, "lora_alpha": 4},
        r"^lora_targets without apply_lora=True would have no effect",
    ),
    ({"adapter_size": 4}, {"apply_adapter": True}, r"^adapter_size without apply_adapter=True"),
]


@pytest.mark.parametrize("owner", [*CONFIGS, *MODELS])
@pytest.mark.parametrize(("asked", "lacking", "message"), WITHOUT_EFFECT)
def test_settings_of_lora_without_lora_are_refused(folder, owner, asked, lacking, message):
    """The model would silently be trained in full."""
    with pytest.raises(ValueError, match=message):
        owner.from_pretrained(folder, **asked)
    loaded = owner.from_pretrained(folder, **{**asked, **lacking})
    assert getattr(loaded, "config", loaded).is_adapted


@pytest.mark.parametrize("owner", [*CONFIGS, *MODELS])
@pytest.mark.parametrize("switch", [{"apply_lora": False}, {"apply_lora": None}, {}])
def test_settings_of_lora_in_a_file_or_with_lora_off_are_accepted(folder, caplog, owner, switch):
    """The release's scripts always give all of them, and its files contain them."""
    given = {"lora_r": 8, "lora_alpha": 16, "adapter_type": "houlsby", "adapter_size": 64}
    path = folder / "config.json"
    values = json.loads(path.read_text())
    del values["apply_lora"]
    path.write_text(json.dumps({**values, **given, **switch}))
    off = {"apply_lora": False, "apply_adapter": False}
    for asked in ({}, {**off, **given}, {"lora_r": None, "lora_alpha": None}):
        loaded = owner.from_pretrained(folder, **asked)
        config = getattr(loaded, "config", loaded)
        assert (config.apply_lora, config.lora_r, config.is_adapted) == (False, 8, False)
    assert RobertaConfig.from_json_file(path) == RobertaConfig.from_pretrained(folder)
    with pytest.raises(ValueError, match=r"^lora_r without apply_lora=True would have no effect"):
        owner.from_pretrained(folder, lora_r=8)
    adapted = owner.from_pretrained(folder, apply_lora=True, lora_r=2, lora_alpha=4)
    assert getattr(adapted, "config", adapted).lora_r == 2
    config.save_pretrained(folder)
    assert owner.from_pretrained(folder)
    assert not caplog.records
    assert RobertaConfig.from_dict(json.loads(path.read_text())) == RobertaConfig(
        **config.to_dict()
    )


@pytest.mark.parametrize("owner", [*CONFIGS, *MODELS])
def test_settings_at_their_defaults_are_accepted_without_lora(folder, owner):
    """Some callers give all settings, at their default values."""
    patterns = {"lora_rank_pattern": {}, "lora_alpha_pattern": {}, "lora_layers": None}
    values = {"lora_targets": ["query", "value"], "lora_dropout": 0.0, "lora_freeze_A": False}
    kinds = {"lora_variant": "lora", "lora_init": "default", "adapter_type": "houlsby"}
    loaded = owner.from_pretrained(folder, **patterns, **values, **kinds, adapter_size=64)
    assert not getattr(loaded, "config", loaded).is_adapted


@pytest.mark.parametrize("asked", [{"lora_r": 8, "lora_alpha": 16}, {"lora_alpha": 16}])
def test_a_new_config_with_a_rank_and_without_lora_is_refused(asked):
    with pytest.raises(ValueError, match=r"lora_alpha without apply_lora=True would have no eff"):
        RobertaConfig(**SHAPE, **asked)
    assert not RobertaConfig(**SHAPE, **asked, apply_lora=False).apply_lora
    with pytest.raises(ValueError, match=r"^lora_r without apply_lora=True would have no effect"):
        RobertaConfig.from_dict(SHAPE, lora_r=4)


# ---- unknown arguments ----


@EVERY_CLASS
@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("any_typo", None),
        ("revison", "revision"),
        ("cache_dirs", "cache_dir"),
        ("device_map", None),
    ],
)
def test_an_unknown_argument_is_refused(folder, owner, name, near):
    if owner in TOKENIZERS and near is None:
        pytest.skip("tokenizers take other tokenizers' settings, as in 4.4.2, and say so")
    with pytest.raises(TypeError, match=f"has no setting {name} that") as caught:
        owner.from_pretrained(folder, **{name: "cpu"})
    assert str(caught.value).endswith(f" (did you mean {near}?)" if near else "could set")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("owner", [*CONFIGS, *MODELS])
def test_a_misspelled_setting_is_refused_with_a_suggestion(folder, owner):
    with pytest.raises(TypeError, match=r"hiden_dropout_prob, nmu_labels .*did you mean hidden_dr"):
        owner.from_pretrained(folder, hiden_dropout_prob=0.5, nmu_labels=3)


@pytest.mark.parametrize("owner", CONFIGS)
def test_a_setting_of_another_model_may_be_none(folder, owner):
    """As in copies of the release's run_glue.py, which gives RoBERTa DeBERTa's cls_dropout."""
    assert owner.from_pretrained(folder, cls_dropout=None).to_dict() == (
        owner.from_pretrained(folder).to_dict()
    )
    with pytest.raises(TypeError, match="has no setting cls_dropout"):
        owner.from_pretrained(folder, cls_dropout=0.1)


@pytest.mark.parametrize("owner", [*CONFIGS, *MODELS])
def test_fields_that_describe_a_file_are_not_settings(folder, owner):
    with pytest.raises(TypeError, match="has no setting model_type, transformers_version"):
        owner.from_pretrained(folder, transformers_version="5", model_type="roberta")


@pytest.mark.parametrize("owner", MODELS)
def test_settings_next_to_a_config_are_refused(folder, owner):
    config = RobertaConfig(**SHAPE)
    with pytest.raises(TypeError, match="has no setting any_typo"):
        owner.from_pretrained(folder, config=config, any_typo=1)
    with pytest.raises(TypeError, match="num_labels: set it in the config that is given"):
        owner.from_pretrained(folder, config=config, num_labels=1)


@pytest.mark.parametrize("owner", CONFIGS)
def test_a_setting_that_only_the_file_has_is_kept_and_can_be_set(folder, owner):
    assert owner.from_pretrained(folder).note == "kept"
    assert owner.from_pretrained(folder, note="other").note == "other"
    config, unused = owner.from_pretrained(
        folder, return_unused_kwargs=True, any_typo=3, num_labels=1, revision=None
    )
    assert (config.num_labels, unused) == (1, {"any_typo": 3})
    assert not hasattr(config, "any_typo")


# ---- what upstream can do, and this fork cannot ----


@EVERY_CLASS
@pytest.mark.parametrize(
    ("name", "harmless", "asks", "advice"),
    [
        ("from_tf", False, True, "convert it with upstream's transformers"),
        ("proxies", {}, {"https": "http://proxy:1"}, "HTTPS_PROXY"),
        ("mirror", None, "tuna", "HF_ENDPOINT"),
        ("torch_dtype", None, torch.float16, "call .to(dtype)"),
        ("torch_dtype", None, "auto", "call .to(dtype)"),
        ("resume_download", True, None, None),
        ("force_download", True, None, None),
        ("local_files_only", True, None, None),
    ],
)
def test_unsupported_arguments_are_refused_unless_they_ask_for_nothing(
    folder, owner, name, harmless, asks, advice
):
    plain, told = owner.from_pretrained(folder), owner.from_pretrained(folder, **{name: harmless})
    if isinstance(plain, torch.nn.Module):
        same(told, plain.state_dict())
        plain, told = plain.config, told.config
    assert not hasattr(told, name)
    assert repr(told) == repr(plain)
    if asks is not None:
        with pytest.raises(ValueError, match=re.escape(advice)) as caught:
            owner.from_pretrained(folder, **{name: asks})
        assert f"{name}={asks!r}" in str(caught.value)


# ---- weights ----


@pytest.mark.parametrize("owner", MODELS)
class TestStateDict:
    def test_it_takes_the_place_of_the_files(self, folder, owner):
        state = random_model(seed=1).state_dict()
        same(owner.from_pretrained(folder, state_dict=state), state)
        (folder / "pytorch_model.bin").unlink()
        same(owner.from_pretrained(folder, state_dict=state), state)
        with pytest.raises(OSError, match="has no weights"):
            owner.from_pretrained(folder)

    def test_it_is_checked_as_a_file_is(self, folder, owner):
        state = random_model(seed=1).state_dict()
        name = "roberta.encoder.layer.0.output.dense.weight"
        with pytest.raises(CheckpointError, match=rf"lacks 1 tensor: {name}"):
            owner.from_pretrained(
                folder, state_dict={key: state[key] for key in state if key != name}
            )
        with pytest.raises(CheckpointError, match=rf"{name} is \(2, 2\) in the file"):
            owner.from_pretrained(folder, state_dict={**state, name: torch.ones(2, 2)})

    def test_it_may_stand_alone_with_a_config(self, owner):
        model = random_model(seed=1)
        same(
            owner.from_pretrained(None, config=model.config, state_dict=model.state_dict()),
            model.state_dict(),
        )
        for lacking in ({"config": model.config}, {"state_dict": model.state_dict()}, {}):
            with pytest.raises(ValueError, match="needs a config and a state_dict"):
                owner.from_pretrained(None, **lacking)

    def test_its_tensors_stay_the_callers(self, folder, owner):
        state = random_model(seed=1).state_dict()
        before = {name: tensor.clone() for name, tensor in state.items()}
        model = owner.from_pretrained(folder, state_dict=state)
        for parameter in model.parameters():
            parameter.data.zero_()
        assert all(torch.equal(tensor, before[name]) for name, tensor in state.items())


HEAD = [f"classifier.{part}.{end}" for part in ("dense", "out_proj") for end in ("bias", "weight")]
LM_HEAD = [f"lm_head.{name}" for name in ("bias", "dense.bias", "dense.weight")]
LM_HEAD += [f"lm_head.layer_norm.{name}" for name in ("bias", "weight")]
POOLER = ["pooler.dense.bias", "pooler.dense.weight"]


@pytest.mark.parametrize(
    ("saved", "read", "missing", "unexpected"),
    [
        (RobertaForSequenceClassification, RobertaForSequenceClassification, [], []),
        (RobertaModel, RobertaForSequenceClassification, HEAD, [f"roberta.{n}" for n in POOLER]),
        (RobertaForSequenceClassification, RobertaModel, POOLER, HEAD),
        (RobertaForSequenceClassification, RobertaForMaskedLM, LM_HEAD, HEAD),
        (RobertaForMaskedLM, RobertaForSequenceClassification, HEAD, LM_HEAD),
    ],
)
def test_loading_info(tmp_path, saved, read, missing, unexpected):
    random_model(saved).save_pretrained(tmp_path)
    model, info = read.from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(model, read)
    assert not model.training
    extra = {"lm_head.decoder.weight", "lm_head.decoder.bias"}  # tied: a file has one of two names
    info["unexpected_keys"] = [name for name in info["unexpected_keys"] if name not in extra]
    assert info == {"missing_keys": missing, "unexpected_keys": unexpected, "error_msgs": []}


def test_loading_info_through_an_auto_class_and_with_upstream_s_position_ids(folder):
    state = random_model().state_dict()
    state["roberta.embeddings.position_ids"] = torch.arange(12)[None]
    model, info = AutoModelForSequenceClassification.from_pretrained(
        folder, state_dict=state, output_loading_info=True
    )
    assert info == {"missing_keys": [], "unexpected_keys": [], "error_msgs": []}
    assert "roberta.embeddings.position_ids" not in model.state_dict()


# ---- the constructor's arguments, and the settings ----


@pytest.mark.parametrize("owner", [RobertaModel, AutoModel])
def test_the_constructor_s_arguments_are_accepted(folder, owner):
    assert owner.from_pretrained(folder).pooler is not None
    assert owner.from_pretrained(folder, add_pooling_layer=False).pooler is None
    assert owner.from_pretrained(folder, False).pooler is None
    config = RobertaConfig(**SHAPE)
    for given in ({"config": config, "add_pooling_layer": False}, {"config": config}):
        model = owner.from_pretrained(folder, **given)
        assert model.config is config
        assert (model.pooler is None) == ("add_pooling_layer" in given)
    assert owner.from_pretrained(folder, config, False).pooler is None


@pytest.mark.parametrize("owner", MODELS)
@pytest.mark.parametrize("as_file", [True, False])
def test_settings_from_another_config(folder, tmp_path, owner, as_file):
    RobertaConfig(**SHAPE, hidden_act="relu").save_pretrained(tmp_path / "c")
    path = tmp_path / "c" / "config.json" if as_file else str(tmp_path / "c")
    model = owner.from_pretrained(folder, config=path, hidden_dropout_prob=0.25)
    assert (model.config.hidden_act, model.config.hidden_dropout_prob) == ("relu", 0.25)
    assert model.config.name_or_path == model.config.base_name_or_path == str(folder)
    with pytest.raises(TypeError, match="has no setting any_typo"):
        owner.from_pretrained(folder, config=path, any_typo=1)


def test_another_config_has_to_match_an_adapted_checkpoint(tmp_path):
    lora = {"apply_lora": True, "lora_r": 2, "lora_alpha": 4}
    random_model(**lora).save_pretrained(tmp_path / "m")
    for name, settings in (("plain", {}), ("other", {**lora, "lora_alpha": 8})):
        RobertaConfig(**SHAPE, **settings).save_pretrained(tmp_path / name)
        for owner in MODELS:
            with pytest.raises(ValueError, match="was trained with"):
                owner.from_pretrained(tmp_path / "m", config=tmp_path / name)


# ---- the hub ----

PRELUDE = """
import json, os, urllib.request
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

def show(owner, *args, **arguments):
    try:
        print(json.dumps(type(owner.from_pretrained(*args, **arguments)).__name__), flush=True)
    except OSError as error:
        print(json.dumps([type(error).__name__, str(error)]), flush=True)

def mark():
    try:
        urllib.request.urlopen(os.environ["HF_ENDPOINT"] + "/mark")
    except OSError:
        pass  # the hub has no such page, but notes the request
"""
CLASSES = ("AutoConfig", "AutoModelForSequenceClassification", "AutoTokenizer")
NAMES = ["RobertaConfig", "RobertaForSequenceClassification", "RobertaTokenizerFast"]


@pytest.mark.slow
def test_local_files_only_and_force_download(hub_server, folder, tmp_path):
    (hub_server.root / "org").mkdir()
    folder.rename(hub_server.root / "org" / "tiny")

    local, either, forced = "local_files_only=True", "", "force_download=True"
    asked = (local, either, local, either, forced)
    code = "mark()\n".join(
        "".join(f"show({owner}, 'org/tiny', {arguments})\n" for owner in CLASSES)
        for arguments in asked
    )
    shown = run_on_hub(hub_server, tmp_path / "home", PRELUDE + code)
    # What each of the five rounds requested from the hub, and what it downloaded.
    paths, fetched = [[]], [set()]
    for request in hub_server.requests:
        if request.path == "/mark":
            paths.append([])
            fetched.append(set())
        elif "org/tiny" in request.path:
            paths[-1].append(request.path)
            if request in hub_server.downloads():
                fetched[-1].add(request.path)
    answers = [shown[start : start + len(CLASSES)] for start in range(0, len(shown), len(CLASSES))]

    for error, message in answers[0]:
        assert error == "FileNotFoundError"
        assert "'org/tiny'" in message
        assert "local_files_only is set and it is not in the cache" in message
    assert answers[1:] == [NAMES] * 4
    assert [bool(some) for some in paths] == [False, True, False, True, True]
    assert fetched[0] == fetched[2] == fetched[3] == set()
    assert fetched[1] == fetched[4] != set()


@EVERY_CLASS
def test_a_token_is_taken_by_its_name_of_today(folder, owner):
    loaded = owner.from_pretrained(folder, token="hf_secret")
    assert not hasattr(getattr(loaded, "config", loaded), "token")
