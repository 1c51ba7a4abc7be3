"""Tests of PEFT's format for all kinds of layers and variants, by its own names and shapes."""

import copy
import json
import math
import re
import types

import pytest
import torch
from adapted_models import CASES, Words
from adapter_files import peft_folder, refused
from compare import assert_same_bits
from safetensors.torch import load_file
from torch import nn

import loralib as lora
from loralib.adapters.formats import read_adapter, write_adapter
from loralib.adapters.merging import merge_into
from loralib.errors import CheckpointError

PREFIX, WEIGHTS = "base_model.model.", "adapter_model.safetensors"


def saved(tmp_path, name, **settings):
    """Saves a model of `adapted_models`, and returns it with PEFT's config and tensors."""
    model = CASES[name].adapted(**settings)
    lora.save_adapter(model, tmp_path / "a")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    tensors = load_file(tmp_path / "a" / WEIGHTS)
    named = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    assert len(named) == len(tensors)
    return model, config, named


@pytest.mark.parametrize(
    ("variant", "flags"),
    [
        ("lora", (False, False)),
        ("rslora", (True, False)),
        ("dora", (False, True)),
        ("rslora+dora", (True, True)),
    ],
)
def test_variants_are_flags_in_the_config(tmp_path, variant, flags):
    _, config, tensors = saved(tmp_path, "linear", variant=variant)
    settings = ("use_rslora", "use_dora")
    assert tuple(config.get(setting, False) for setting in settings) == flags
    # PEFT versions without the setting refuse it, even if it is False.
    assert all(config[setting] for setting in settings if setting in config)
    assert (config["r"], config["lora_alpha"]) == (2, 3)
    assert config["rank_pattern"] == config["alpha_pattern"] == {}
    assert any(name.endswith(".lora_magnitude_vector") for name in tensors) == flags[1]
    assert read_adapter(tmp_path / "a").lora.variant == (None if variant == "lora" else variant)


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_a_dropout_is_in_the_config_without_a_remark(tmp_path, dropout):
    model = CASES["linear"].adapted(lora_dropout=dropout)
    remarks = lora.save_adapter(model, tmp_path / "a")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["lora_dropout"] == dropout
    assert not any("dropout" in remark for remark in remarks)


@pytest.mark.parametrize("name", ["biases", "own biases"])
def test_peft_versions_that_would_ignore_biases_refuse_the_folder(tmp_path, name):
    """These are versions before 0.7, which do not know DoRA's setting."""
    assert saved(tmp_path, name)[1]["use_dora"] is False


def test_an_embeddings_tensors_have_pefts_names(tmp_path):
    model, config, tensors = saved(tmp_path, "embedding", variant="dora")
    own = {name.removeprefix("words."): t for name, t in tensors.items() if "words" in name}
    assert_same_bits(
        own,
        {
            "lora_embedding_A": model.words.lora_A.detach(),
            "lora_embedding_B": model.words.lora_B.detach(),
            "lora_magnitude_vector": model.words.lora_magnitude_vector.detach(),
        },
    )
    assert set(config["target_modules"]) == {"words", "layers.0.out", "layers.1.out"}


def test_a_linear_layer_may_have_the_name_of_an_embedding(tmp_path):
    """Unlike a file, a model shows which modules are embeddings."""
    model = nn.ModuleDict({"pos_embeddings": nn.Linear(4, 6), "head": nn.Linear(6, 2)})
    again = copy.deepcopy(model)
    lora.add_lora(model, "pos_embeddings", r=2)
    nn.init.normal_(model["pos_embeddings"].lora_B)
    lora.save_adapter(model, tmp_path / "a")
    assert {name.removeprefix(PREFIX) for name in load_file(tmp_path / "a" / WEIGHTS)} == {
        "pos_embeddings.lora_A.weight",
        "pos_embeddings.lora_B.weight",
    }
    lora.load_adapter(again, tmp_path / "a")
    assert_same_bits(again.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    ("stack", "target", "format", "is_warned"),
    [
        ("gate_up_proj", "up_proj", "a", True),
        ("gate_up_proj", "up_proj", "a.safetensors", False),
        ("gate_up_proj", "q_proj", "a", False),
        ("gate", "up_proj", "a", False),
    ],
)
def test_updates_that_peft_may_take_for_those_of_experts_are_a_warning(
    tmp_path, stack, target, format, is_warned
):
    experts, names = nn.Module(), ("q_proj", "up_proj")
    experts.register_parameter(stack, nn.Parameter(torch.ones(2, 4, 4)))
    model = nn.ModuleDict({**{name: nn.Linear(4, 4) for name in names}, "experts": experts})
    lora.add_lora(model, target, r=2)
    nn.init.normal_(model[target].lora_B)
    warnings = [line for line in lora.save_adapter(model, tmp_path / format) if "expert" in line]
    assert warnings == is_warned * [
        "PEFT with Transformers 5 may mistake up_proj for experts, and leave out their updates or "
        "not open the folder: compare its outputs with this model's; or, for PEFT, merge, or adapt "
        "no modules called 'up_proj'"
    ]


@pytest.mark.parametrize(
    ("kind", "target", "format", "is_warned"),
    [
        ("mamba", ["in_proj", "out_proj"], "a", True),
        ("mamba", ["in_proj", "out_proj"], "a.safetensors", False),
        ("mamba", ["in_proj"], "a", False),
        ("jamba", ["in_proj", "out_proj"], "a", False),
        (None, ["in_proj", "out_proj"], "a", False),
    ],
)
def test_modules_that_peft_refuses_for_the_models_type_are_a_warning(
    tmp_path, kind, target, format, is_warned
):
    parts = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("in_proj", "out_proj")})
    model = nn.ModuleDict({"0": parts})
    model.config = types.SimpleNamespace(model_type=kind)
    lora.add_lora(model, target, r=2)
    for name in target:
        nn.init.normal_(model["0"][name].lora_B)
    warnings = [line for line in lora.save_adapter(model, tmp_path / format) if "refuses" in line]
    assert warnings == is_warned * [
        "PEFT refuses to adapt 0.out_proj in models of the type mamba, so that load_adapter alone "
        "opens the folder: for PEFT, merge, or adapt no modules called 'out_proj'"
    ]
    lora.remove_lora(model)
    assert len(lora.load_adapter(model, tmp_path / format)) == len(target)


@pytest.mark.parametrize(
    ("trained", "format", "is_warned"),
    [
        (["classifier"], "a", True),
        (["classifier"], "a.safetensors", False),
        (["classifier", "pre_classifier"], "a", False),
        (["pre_classifier"], "a", False),
    ],
)
def test_modules_that_peft_takes_for_one_that_is_saved_are_a_warning(
    tmp_path, trained, format, is_warned
):
    """Such as DistilBERT's pre_classifier."""
    names = ("query", "pre_classifier", "classifier")
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in names})
    lora.add_lora(model, ["query"], r=2, modules_to_train=trained)
    nn.init.normal_(model["query"].lora_B)
    remarks = lora.save_adapter(model, tmp_path / format)
    assert [line for line in remarks if line.startswith("PEFT looks")] == is_warned * [
        "PEFT looks for all of pre_classifier, because it saves whole modules and knows them by "
        "the end of the name, so that load_adapter alone opens the folder: for PEFT, merge, or "
        "name it in modules_to_train, too"
    ]


def test_a_module_that_is_held_in_part_is_a_warning(tmp_path):
    """PEFT would need all of it."""
    model = nn.ModuleDict({"query": nn.Linear(4, 4), "last": nn.MultiheadAttention(4, 1)})
    lora.add_lora(model, ["query"], r=2)
    model["last"].in_proj_weight.requires_grad = True
    remarks = lora.save_adapter(model, tmp_path / "a")
    assert any(line.startswith("PEFT looks for all of last, because") for line in remarks)


@pytest.mark.parametrize(
    ("target", "trained", "middle", "saved"),
    [
        ("features", "classifier", nn.ReLU(), ["classifier"]),
        ("features", "classifier.2", nn.ReLU(), ["classifier.2"]),
        ("0", "classifier.2", nn.ReLU(), ["classifier.2"]),
        ("features", "classifier", nn.BatchNorm1d(4), ["classifier"]),
        (
            "features",
            "classifier",
            nn.BatchNorm1d(4, affine=False),
            ["classifier.0", "classifier.2"],
        ),
        ("features", "classifier.1", nn.MultiheadAttention(4, 1), ["classifier.1"]),
    ],
)
def test_a_classifier_is_saved_as_one_module_if_the_adapter_holds_all_of_it(
    tmp_path, target, trained, middle, saved
):
    """Such as torchvision's. PEFT's class for its usual task saves it as one module, too.

    So is any module with parameters of its own, which PEFT always saves with the modules in it.
    """
    classifier = nn.Sequential(nn.Linear(4, 4), middle, nn.Linear(4, 4))
    model = nn.ModuleDict({"features": nn.Linear(4, 4), "classifier": classifier})
    lora.add_lora(model, [target], r=2, modules_to_train=[trained])
    lora.save_adapter(model, tmp_path / "a")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["modules_to_save"] == saved


def test_a_convolutions_tensors_have_pefts_shapes(tmp_path):
    _, _, tensors = saved(tmp_path, "kernels", variant="dora")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "line.lora_A.weight": (2, 4, 3),
        "line.lora_B.weight": (6, 2, 1),
        "line.lora_magnitude_vector": (1, 6, 1),
        "plane.lora_A.weight": (2, 2, 3, 2),
        "plane.lora_B.weight": (6, 2, 1, 1),
        "plane.lora_magnitude_vector": (1, 6, 1, 1),
        "space.lora_A.weight": (2, 2, 2, 2, 2),
        "space.lora_B.weight": (4, 2, 1, 1, 1),
        "space.lora_magnitude_vector": (1, 4, 1, 1, 1),
    }


@pytest.mark.parametrize(
    "settings", [{"dilation": 2, "padding": "same"}, {"padding": 1, "padding_mode": "reflect"}]
)
def test_pefts_lora_is_refused_on_convolutions_that_peft_computes_differently(tmp_path, settings):
    """PEFT's lora_A pads with zeros and has no dilation, which the folder does not show."""

    def model(**settings):
        torch.manual_seed(0)
        return nn.ModuleDict({"embed": nn.Conv2d(2, 3, 3, **settings)})

    plain, adapted = model(padding=1), model(padding=1)
    lora.add_lora(adapted, "embed", r=2)
    lora.save_adapter(adapted, tmp_path / "a")
    lora.load_adapter(plain, tmp_path / "a")
    other = model(**settings)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    for use in (
        lambda: lora.load_adapter(other, tmp_path / "a"),
        lambda: merge_into(other, lora.read_adapter(tmp_path / "a")),
    ):
        refused(use, tmp_path / "a", "embed is a convolution with groups, dilation or a padding")
    assert_same_bits(other.state_dict(), before)
    lora.save_adapter(adapted, tmp_path / "a.safetensors")
    lora.load_adapter(other, tmp_path / "a.safetensors")  # our LoRA supports these settings
    # A conversion does not know the model, so it can only say what it assumes. But the shapes tell
    # that it is no embedding, as its name suggests.
    for source, written in (("a", "b.safetensors"), ("a.safetensors", "b"), ("a", "c")):
        adapter = lora.read_adapter(tmp_path / source)
        format = None if written.endswith("s") else "peft"
        remark, *_ = lora.write_adapter(tmp_path / written, adapter, format)
        assert ("its convolutions are assumed" in remark) is (written != "c")


@pytest.mark.parametrize("name", ["c++", "a|b", "(", "x[", "^a", "a?b", "b$", "a(b)"])
@pytest.mark.parametrize("pattern", ["rank_pattern", "alpha_pattern"])
def test_a_patterns_key_matches_only_its_module_even_with_special_characters(
    tmp_path, name, pattern
):
    plain = nn.ModuleDict({each: nn.Linear(4, 4) for each in ("a", "b", name)})
    adapted = copy.deepcopy(plain)
    lora.add_lora(adapted, ["a", "b", name], r=2, lora_alpha=4, **{pattern: {name: 3}})
    lora.save_adapter(adapted, tmp_path / "a")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    (key,) = config[pattern]
    meant = [each for each in ("a", "b", name) if re.match(rf"(.*\.)?({key})$", each)]
    assert meant == [name]  # by PEFT's rule
    lora.load_adapter(plain, tmp_path / "a")


@pytest.mark.parametrize("name", ["c+", "a|b"])
def test_a_patterns_key_may_be_the_name_itself(tmp_path, name):
    """PEFT looks for such a key if none matches as a regular expression."""
    tensors = {f"{PREFIX}e.{each}.lora_A.weight": torch.ones(2, 4) for each in (name, "java")}
    tensors |= {n.replace("lora_A", "lora_B"): t.T.contiguous() for n, t in tensors.items()}
    targets = [f"e.{name}", "e.java"]
    alphas = {f"e.{name}": 64}
    peft_folder(tmp_path / "a", tensors, target_modules=targets, alpha_pattern=alphas)
    metadata = read_adapter(tmp_path / "a").lora
    assert (metadata.alpha_of(f"e.{name}"), metadata.alpha_of("e.java")) == (64, 3)


def test_the_config_has_a_task_or_the_models_class(tmp_path):
    """PEFT's auto classes need one of the two."""
    _, config, _ = saved(tmp_path, "linear")
    assert config["task_type"] is None
    assert config["auto_mapping"] == {
        "base_model_class": "Words",
        "parent_library": "adapted_models",
    }
    for task in ("CAUSAL_LM", "TOKEN_CLS"):
        folder = tmp_path / task
        tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
        peft_folder(folder, tensors, task_type=task, target_modules=["qkv", "out"])
        write_adapter(tmp_path / f"{task}_again", read_adapter(folder), "peft")
        again = json.loads((tmp_path / f"{task}_again" / "adapter_config.json").read_text())
        assert again["task_type"] == task
        assert "auto_mapping" not in again


@pytest.mark.parametrize(
    ("ending", "trained", "task"),
    [
        ("ForCausalLM", [], "CAUSAL_LM"),
        ("ForSequenceClassification", ["score"], "SEQ_CLS"),
        ("ForTokenClassification", ["score"], "TOKEN_CLS"),
        ("ForSequenceClassification", [], None),
        ("ForSequenceClassification", ["score.bias"], None),
        ("ForMaskedLM", ["score"], None),
        ("Reranker", ["score"], None),
    ],
)
def test_an_adapter_knows_the_head_of_an_upstream_model(tmp_path, ending, trained, task):
    """PEFT's auto classes open the folder also if it is written later, without the model."""
    for model_type in (None, "xy"):
        model = type(f"Xy{ending}", (Words,), {})()
        model.config = types.SimpleNamespace(model_type=model_type)
        lora.add_lora(model, "qkv", r=2)
        for name, parameter in model.score.named_parameters(prefix="score"):
            parameter.requires_grad_(name.startswith(tuple(trained)))
        file, folder = tmp_path / f"{model_type}.safetensors", tmp_path / f"{model_type}"
        lora.save_adapter(model, file)
        write_adapter(folder, read_adapter(file), "peft")
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["task_type"] == (task if model_type else None)


def test_an_attentions_tensors_have_pefts_names(tmp_path):
    """PEFT adds out_proj's update twice, so its B is halved."""
    model, config, tensors = saved(tmp_path, "attention")
    out_proj = "attention.base_layer.out_proj"
    assert_same_bits(
        tensors,
        {
            "attention.lora_A.weight": model.attention.lora_A.detach(),
            "attention.lora_B.weight": model.attention.lora_B.detach(),
            f"{out_proj}.lora_A.weight": model.attention.out_proj.lora_A.detach(),
            f"{out_proj}.lora_B.weight": model.attention.out_proj.lora_B.detach() / 2,
            "last.lora_A.weight": model.last.lora_A.detach(),
            "last.lora_B.weight": model.last.lora_B.detach(),
        },
    )
    assert config["target_modules"] == ["attention", "last"]


@pytest.mark.parametrize(("version", "times"), [("0.18.1", 2), ("0.21.2", 2), ("0.22.0", 1)])
def test_how_often_out_proj_counts_depends_on_the_version_that_wrote_it(tmp_path, version, times):
    _, config, tensors = saved(tmp_path, "attention")
    folder = peft_folder(
        tmp_path / "b",
        {PREFIX + name: tensor for name, tensor in tensors.items()},
        **config | {"peft_version": version},
    )
    B = tensors["attention.base_layer.out_proj.lora_B.weight"]
    assert torch.equal(read_adapter(folder).tensors["attention.out_proj.lora_B"], times * B)


def test_folders_record_pefts_version_if_it_matters(tmp_path):
    """A later PEFT would assume its own version if none were recorded."""
    model, config, tensors = saved(tmp_path, "attention")
    assert config["peft_version"] == "0.21.0"
    folder = peft_folder(
        tmp_path / "b",
        {PREFIX + name: tensor for name, tensor in tensors.items()},
        **{"peft_version": "0.22.0", **config},
    )
    own = {name: t.detach() for name, t in model.state_dict().items() if "lora_" in name}
    for path in (tmp_path / "a", folder):
        assert_same_bits(read_adapter(path).tensors, own)
        again = CASES["attention"].build()
        lora.load_adapter(again, path)
        state = again.state_dict()
        assert_same_bits({name: t for name, t in state.items() if "lora_" in name}, own)
    # PEFT versions that are older than this setting would refuse the folder.
    lora.save_adapter(CASES["linear"].adapted(), tmp_path / "c")
    assert "peft_version" not in json.loads((tmp_path / "c" / "adapter_config.json").read_text())


@pytest.mark.parametrize("initialization", ["pissa", "olora"])
@pytest.mark.parametrize(("variant", "alpha"), [("lora", 6), ("rslora", 3 * math.sqrt(2))])
def test_a_start_is_joined_to_the_trained_update(tmp_path, initialization, variant, alpha):
    """As PEFT converts it: (A, A0) and (B, -B0), with twice the rank and the same scaling."""
    model, config, tensors = saved(
        tmp_path, "linear", initialization=initialization, variant=variant
    )
    assert config["r"] == 4
    assert math.isclose(config["lora_alpha"], alpha)
    assert config["init_lora_weights"] is True
    layer = model.layers[0]["out"]
    A, B = (tensors[f"layers.0.out.lora_{half}.weight"] for half in "AB")
    assert torch.equal(A, torch.cat([layer.lora_A, layer.lora_A_start]))
    assert torch.equal(B, torch.cat([layer.lora_B, -layer.lora_B_start], dim=1))


def test_remarks_say_what_the_folder_holds_differently(tmp_path):
    model = CASES["attention"].adapted(initialization="pissa", freeze_A=True)
    remarks = lora.save_adapter(model, tmp_path / "a")
    for part in ("out_proj twice", "the pissa initialization", "freeze_A"):
        assert any(part in remark for remark in remarks)


def test_patterns_give_every_module_its_rank_and_alpha(tmp_path):
    _, config, _ = saved(tmp_path, "patterns")
    ranks = {"layers.0.out": 4, "layers.1.out": 2, "words": 2}
    alphas = {"layers.0.out": 3, "layers.1.out": 7, "words": 1}
    for expected, usual, pattern in (
        (ranks, "r", "rank_pattern"),
        (alphas, "lora_alpha", "alpha_pattern"),
    ):
        found = {
            module: next(
                (v for key, v in config[pattern].items() if re.match(rf"(.*\.)?({key})$", module)),
                config[usual],
            )
            for module in expected
        }
        assert found == expected


def test_a_pattern_for_a_name_does_not_match_longer_names_with_that_end(tmp_path):
    """As PEFT's key, ``out`` would match ``layers.0.out`` too."""
    tensors = {
        f"{PREFIX}{module}.lora_{half}.weight": torch.ones(shape)
        for module, rank in (("out", 1), ("layers.0.out", 2), ("layers.1.out", 2))
        for half, shape in (("A", (rank, 4)), ("B", (5, rank)))
    }
    folder = peft_folder(tmp_path / "a", tensors, rank_pattern={"^out": 1}, target_modules=["out"])
    adapter = read_adapter(folder)
    assert adapter.lora.rank_pattern == {"out": 1}
    write_adapter(tmp_path / "b", adapter, "peft")
    again = read_adapter(tmp_path / "b")
    assert again.metadata == adapter.metadata
    assert_same_bits(again.tensors, adapter.tensors)
    config = json.loads((tmp_path / "b" / "adapter_config.json").read_text())
    assert config["rank_pattern"] == {"^out": 1}


def test_slices_become_blocks_with_zeros_between(tmp_path):
    model, config, tensors = saved(tmp_path, "slices")
    layer = model.layers[1]["qkv"]
    B = torch.zeros(24, 4)
    B[:8, :2], B[16:, 2:] = layer.lora_B[:8], layer.lora_B[8:]
    assert torch.equal(tensors["layers.1.qkv.lora_A.weight"], layer.lora_A)
    assert torch.equal(tensors["layers.1.qkv.lora_B.weight"], B)
    ranks = {"r": config["r"], **config["rank_pattern"]}
    assert sorted(ranks.values()) == [2, 2, 4] or sorted(ranks.values()) == [2, 4, 4]


# ---- PEFT's own files ----


def test_the_base_weight_of_an_embedding_is_left_out(tmp_path, caplog):
    """PEFT saves it with the embedding's update for models of Transformers."""
    _, config, tensors = saved(tmp_path, "embedding")
    named = {PREFIX + name: tensor for name, tensor in tensors.items()}
    named[f"{PREFIX}words.base_layer.weight"] = torch.ones(11, 8)
    adapter = read_adapter(peft_folder(tmp_path / "b", named, **config))
    assert "words.base_layer.weight is left out: it is the base's own weight" in caplog.text
    assert adapter.tensors.keys() == read_adapter(tmp_path / "a").tensors.keys()
    assert adapter.lora.embeddings == ("words",)


def test_the_base_weight_of_an_embedding_is_compared_with_the_model_s(tmp_path):
    """In the precision of either, as the base may be held in another one than in training."""
    model, config, tensors = saved(tmp_path, "embedding")

    def load(name, weight, dtype=torch.float32):
        named = {PREFIX + name: tensor for name, tensor in tensors.items()}
        named[f"{PREFIX}words.base_layer.weight"] = weight
        folder = peft_folder(tmp_path / name, named, **config)
        return lora.load_adapter(CASES["embedding"].build().to(dtype), folder)

    weight = model.words.weight.detach()
    assert "words" in load("narrow", weight.bfloat16())
    assert "words" in load("wide", weight, torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"holds the words\.weight that it was trained with"):
        load("other", 2 * weight)


@pytest.mark.parametrize(
    ("name", "changed", "parts"),
    [
        ("lora_magnitude_vector", None, ["lacks layers.0.out.lora_magnitude_vector"]),
        ("lora_magnitude_vector", torch.ones(9), ["is (9,), but its module needs (8,)"]),
        ("lora_magnitude_vector", torch.full((8,), torch.nan), ["are not finite"]),
        ("lora_B.weight", torch.ones(8, 3), ["do not belong together"]),
        ("lora_A.weight", torch.ones(2, 8, 1), ["do not belong together"]),
        ("lora_A.weight", torch.tensor(1.0), ["do not belong together"]),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused(tmp_path, name, changed, parts):
    _, config, tensors = saved(tmp_path, "linear", variant="dora")
    named = {PREFIX + key: tensor for key, tensor in tensors.items()}
    named[f"{PREFIX}layers.0.out.{name}"] = changed
    named = {key: tensor for key, tensor in named.items() if tensor is not None}
    folder = peft_folder(tmp_path / "b", named, **config)
    refused(lambda: read_adapter(folder), folder, *parts)


def test_magnitudes_without_the_dora_setting_are_refused(tmp_path):
    _, config, tensors = saved(tmp_path, "linear", variant="dora")
    named = {PREFIX + name: tensor for name, tensor in tensors.items()}
    folder = peft_folder(tmp_path / "b", named, **config | {"use_dora": False})
    refused(lambda: read_adapter(folder), folder, "holds", "lora_magnitude_vector")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"use_rslora": True},
            "was written with variant dora, but adapter_config.json now says rslora+d",
        ),
        ({"lora_alpha": 5}, "was written with alpha 3, but adapter_config.json now says 5"),
        ({"r": 3}, "its rank is 2"),
        (
            {"rank_pattern": {"out": 3}},
            "its rank is 2 (layers.0.out), but adapter_config.json says 3",
        ),
        ({"alpha_pattern": {"layers.1.out": 5}}, "was written with alpha 3"),
    ],
)
def test_settings_that_were_changed_after_writing_are_refused(tmp_path, changed, message):
    _, config, _ = saved(tmp_path, "linear", variant="dora")
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config | changed))
    refused(lambda: read_adapter(tmp_path / "a"), tmp_path / "a", message)


def test_an_embedding_s_frozen_A_that_was_made_from_the_weight_is_loaded(tmp_path):
    """In PEFT's format its initialization is the default one, which would freeze A at zero."""
    base = nn.ModuleList([nn.Embedding(6, 4)])
    model = copy.deepcopy(base)
    lora.add_lora(model, "0", r=2, initialization="pissa", freeze_A=True)
    nn.init.normal_(model[0].lora_B)
    lora.save_adapter(model, tmp_path / "a")
    lora.load_adapter(base, tmp_path / "a")
    assert not base[0].lora_A.requires_grad
    ids = torch.arange(6)
    torch.testing.assert_close(base[0](ids), model[0](ids))
