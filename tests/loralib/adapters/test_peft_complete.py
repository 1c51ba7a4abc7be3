"""Tests that incomplete PEFT folders are refused, and that ours mean the same to PEFT."""

import json
import re

import pytest
import torch
from adapted_models import CASES, IDS, tied
from compare import assert_same_bits
from safetensors.torch import load_file, save_file
from torch import nn

import loralib as lora
from loralib.adapters.formats import read_adapter
from loralib.adapters.merging import merge_into
from loralib.adapters.peft import is_targeted
from loralib.errors import CheckpointError, NeedsMergingError
from loralib.trained import is_untied

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def as_pefts(folder, *, without="nothing", **settings):
    """Turns our folder into one that PEFT could have written, without some tensors."""
    tensors = load_file(folder / WEIGHTS)
    tensors = {name: t for name, t in tensors.items() if not re.search(without, name)}
    save_file(tensors, folder / WEIGHTS)  # without our metadata
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, **settings}))
    return folder


def saved(tmp_path, name):
    lora.save_adapter(CASES[name].adapted(), tmp_path / "a")
    return tmp_path / "a"


INCOMPLETE = {
    "a layer": ("linear", r"layers\.1\.", {}, "the update of layers.1.qkv, which"),
    "a kind of module": (
        "linear",
        "qkv",
        {"target_modules": ["qkv", "out"]},
        "the update of layers.0.qkv, which",
    ),
    "an expression's": (
        "linear",
        "qkv",
        {"target_modules": r"layers\.\d\.(qkv|out)"},
        "the update of layers.0.qkv, which",
    ),
    "one of two heads": ("head", r"score", {}, "lacks score.bias, which"),
    "half of a head": ("head", r"score\.bias", {}, "lacks score.bias, which"),
    "all biases": ("biases", r"bias$", {}, "lacks layers.0.qkv.bias, which"),
    "one bias": ("own biases", r"layers\.1.*bias$", {}, "lacks layers.1.out.bias, which"),
}


@pytest.mark.parametrize("case", INCOMPLETE)
def test_an_incomplete_folder_is_refused(tmp_path, case):
    name, without, settings, lacking = INCOMPLETE[case]
    folder = as_pefts(saved(tmp_path, name), without=without, **settings)
    model = CASES[name].build()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=re.escape(lacking)) as caught:
        lora.load_adapter(model, folder)
    assert "adapter_config.json says is" in str(caught.value)
    assert_same_bits(model.state_dict(), before)


@pytest.mark.parametrize(
    "name", ["linear", "patterns", "embedding", "head", "biases", "own biases"]
)
def test_a_complete_folder_can_be_loaded(tmp_path, name):
    folder = as_pefts(saved(tmp_path, name))
    model, adapted = CASES[name].build(), CASES[name].adapted().eval()
    lora.load_adapter(model, folder)
    inputs = CASES[name].inputs
    torch.testing.assert_close(model.eval()(*inputs), adapted(*inputs))


def with_experts() -> nn.ModuleDict:
    """Names have a layer's number, m.layers.1.q, and some an expert's too, m.layers.1.of.0.up."""
    torch.manual_seed(0)
    layers = nn.ModuleList()
    for _ in "ab":
        of = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(4, 4)}) for _ in "ab")
        layers.append(nn.ModuleDict({"q": nn.Linear(4, 4), "of": of}))
    return nn.ModuleDict({"m": nn.ModuleDict({"layers": layers})})


LAYER_1 = {"target_modules": ["q", "up"], "layers_to_transform": [1]}


@pytest.mark.parametrize(
    ("without", "settings", "lacks"),
    [
        ("m.layers.1.of.0.up", {}, True),
        ("m.layers.1.q", LAYER_1, True),
        ("m.layers.1.of.1.up", LAYER_1, False),
        ("m.layers.1.of.1.up", {**LAYER_1, "layers_to_transform": []}, True),
    ],
)
def test_modules_are_missing_only_if_every_version_of_peft_would_adapt_them(
    tmp_path, without, settings, lacks
):
    model = with_experts()
    lora.add_lora(model, ["q", "up"], r=2)
    lora.save_adapter(model, tmp_path / "a")
    as_pefts(tmp_path / "a", without=re.escape(without), **settings)
    if lacks:
        with pytest.raises(CheckpointError, match=rf"lacks the update of {re.escape(without)},"):
            lora.load_adapter(with_experts(), tmp_path / "a")
    else:
        assert len(lora.load_adapter(with_experts(), tmp_path / "a")) == 5


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": "("},
        {"target_modules": 5},
        {"target_modules": ["out", 5]},
        {"exclude_modules": "("},
        {"modules_to_save": "score"},
        {"modules_to_save": ["("]},
        {"layers_pattern": ["("], "layers_to_transform": [0]},
        {"layers_to_transform": "x"},
        {"layers_to_transform": [True]},
    ],
)
def test_settings_that_peft_could_not_have_written_are_refused(tmp_path, settings):
    folder = as_pefts(saved(tmp_path, "head"), **settings)
    with pytest.raises(CheckpointError, match=f"adapter_config.json: {min(settings)[:7]}"):
        lora.load_adapter(CASES["head"].build(), folder)


@pytest.mark.parametrize(
    "use", [merge_into, lambda model, adapter: lora.AdapterBank(model).add("a", adapter)]
)
def test_merging_and_banks_refuse_an_incomplete_folder(tmp_path, use):
    folder = as_pefts(saved(tmp_path, "linear"), without=r"layers\.1\.")
    model, adapter = CASES["linear"].build(), read_adapter(folder)
    with pytest.raises(CheckpointError, match=r"the update of layers\.1\.qkv, which"):
        use(model, adapter)


def test_heads_that_peft_only_guesses_may_be_missing(tmp_path):
    """If the task is SEQ_CLS, PEFT adds usual names of classifiers to the settings."""
    adapted = CASES["linear"].adapted()
    lora.save_adapter(adapted, tmp_path / "a")
    as_pefts(tmp_path / "a", task_type="SEQ_CLS", modules_to_save=["classifier", "logits"])
    lora.load_adapter(CASES["linear"].build(), tmp_path / "a")


def test_settings_may_name_modules_that_the_model_does_not_have(tmp_path):
    """PEFT accepts lists that are for several architectures."""
    named = {"target_modules": ["out", "q_proj"], "modules_to_save": ["norm", "score", "lm_head"]}
    folder = as_pefts(saved(tmp_path, "head"), **named)
    lora.load_adapter(CASES["head"].build(), folder)


def test_our_own_folders_may_have_fewer_biases_than_peft_would_save(tmp_path):
    model = CASES["head"].build()
    lora.add_lora(model, "out", r=2)
    model.layers[0]["qkv"].bias.requires_grad = True
    lora.save_adapter(model, tmp_path / "a")
    lora.load_adapter(CASES["head"].build(), tmp_path / "a")


# ---- which modules the settings target ----

TARGETED = [
    ({"target_modules": ["q"]}, "a.q", True),
    ({"target_modules": ["q"]}, "a.aq", False),
    ({"target_modules": "a.q"}, "a.q", True),
    ({"target_modules": "q"}, "a.q", False),
    ({"target_modules": ["q"], "exclude_modules": ["a.q"]}, "a.q", False),
    ({"target_modules": ["q"], "exclude_modules": r".*\.1\.q"}, "a.0.q", True),
    ({"target_modules": ["q"], "modules_to_save": ["a"]}, "m.a.q", False),
    ({"target_modules": ["q"], "layers_to_transform": [1]}, "m.a.1.q", True),
    ({"target_modules": ["q"], "layers_to_transform": 1}, "m.a.0.q", False),
    ({"target_modules": ["q"], "layers_to_transform": [1]}, "a.q", False),
    ({"target_modules": ["m.a.0.q"], "layers_to_transform": [1]}, "m.a.0.q", True),
    (
        {"target_modules": ["q"], "layers_to_transform": [1], "layers_pattern": "h"},
        "m.a.1.q",
        False,
    ),
    ({"target_modules": ["q"], "layers_to_transform": [1], "layers_pattern": ["h"]}, "h.1.q", True),
    # Without a pattern, the first number counts whose list is itself within a module.
    ({"target_modules": ["q"], "layers_to_transform": [0]}, "layers.0.q", False),
    ({"target_modules": ["q"], "layers_to_transform": [0]}, "layers.1.experts.0.q", True),
    ({"target_modules": None}, "a.q", False),
]


@pytest.mark.parametrize(("config", "name", "expected"), TARGETED)
def test_settings_target_the_modules_that_they_do_in_peft(config, name, expected):
    assert is_targeted(config, name) is expected


class Nested(nn.Module):
    """Has a module whose name is the end of another module's."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.block = nn.ModuleDict({"proj": nn.Linear(4, 4)})

    def forward(self, x):
        return self.proj(torch.tanh(self.block["proj"](x)))


def test_written_settings_target_no_other_module(tmp_path):
    model = Nested()
    lora.add_lora(model, re.compile("proj"), r=2)
    lora.save_adapter(model, tmp_path / "a")
    config = json.loads((tmp_path / "a" / CONFIG).read_text())
    targeted = [name for name, _ in Nested().named_modules() if is_targeted(config, name)]
    assert targeted == ["proj"]
    assert lora.load_adapter(Nested(), as_pefts(tmp_path / "a")) == ("proj",)


class Scaled(nn.Module):
    """A block with its own parameter and an adapted layer."""

    def __init__(self):
        super().__init__()
        self.fc, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.scale * self.fc(x)


def test_a_trained_parameter_next_to_an_adapted_layer_is_refused(tmp_path):
    model = nn.Sequential(Scaled())
    lora.add_lora(model, "fc", r=2)
    model[0].scale.requires_grad = True
    with pytest.raises(NeedsMergingError, match=r"parameters of 0: PEFT would save .* 0\.fc"):
        lora.save_adapter(model, tmp_path / "a")


# ---- tied weights: PEFT gives each module that it saves its own weight ----


@pytest.mark.parametrize(("brought", "other"), [("last", "words"), ("words", "last")])
def test_an_untied_weight_stays_untied(tmp_path, brought, other):
    """If saved again from the model, or converted from the folder without a model."""
    model = tied()
    lora.add_lora(model, "up", r=2, modules_to_train=["last", "words"])
    torch.nn.init.normal_(model.up.lora_B)
    lora.save_adapter(model, tmp_path / "a")
    as_pefts(tmp_path / "a", without=other, modules_to_save=[brought])
    tensors = load_file(tmp_path / "a" / WEIGHTS)
    tensors[f"base_model.model.{brought}.weight"] += 1
    save_file(tensors, tmp_path / "a" / WEIGHTS)
    loaded = tied()
    lora.load_adapter(loaded, tmp_path / "a")
    lora.save_adapter(loaded, tmp_path / "b.safetensors")
    lora.save_adapter(loaded, tmp_path / "b")
    lora.write_adapter(tmp_path / "c.safetensors", lora.read_adapter(tmp_path / "a"))
    for name in ("b.safetensors", "b", "c.safetensors"):
        again = tied()
        lora.load_adapter(again, tmp_path / name)
        assert again.last.weight is not again.words.weight
        torch.testing.assert_close(again(IDS), loaded(IDS))


@pytest.mark.parametrize("brought", [("last",), ("words",), ("last", "words")])
@pytest.mark.parametrize("way", ["load", "merge"])
def test_a_tied_weight_is_untied_if_peft_has_trained_it_in_one_module(
    tmp_path, brought, way, caplog
):
    model = tied()
    lora.add_lora(model, "up", r=2, modules_to_train=["last", "words"])
    lora.save_adapter(model, tmp_path / "a")
    tensors = load_file(tmp_path / "a" / WEIGHTS)
    torch.manual_seed(1)
    tensors = {n: torch.rand_like(t) for n, t in tensors.items()}
    others = {"last", "words"} - {*brought}
    for name in others:
        del tensors[f"base_model.model.{name}.weight"]
    save_file(tensors, tmp_path / "a" / WEIGHTS)
    as_pefts(tmp_path / "a", modules_to_save=list(brought))
    loaded, base = tied(), tied()
    if way == "load":
        lora.load_adapter(loaded, tmp_path / "a")
        assert "no longer shares its weight with" in caplog.text
        assert all(is_untied(loaded.get_submodule(name)) for name in brought)  # for merging
    else:
        merge_into(loaded, read_adapter(tmp_path / "a"))
    for name in ("last", "words"):
        theirs = tensors.get(f"base_model.model.{name}.weight", base.last.weight)
        assert torch.equal(loaded.get_submodule(name).weight, theirs)
    assert loaded(IDS).isfinite().all()
