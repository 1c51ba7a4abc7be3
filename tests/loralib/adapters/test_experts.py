"""Tests of adapters with LoRA on stacks of matrices: files of all formats, and PEFT's folders."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from stacked_experts import (
    ALPHA,
    EXPERTS,
    INNER,
    STACKS,
    WIDTH,
    R,
    adapted,
    build,
    close,
    lora_layers,
    randomised,
    tokens,
)
from torch import nn

import loralib as lora
from loralib.adapters.merging import merge_into
from loralib.errors import CheckpointError

KINDS = [
    {},
    {"variant": "rslora", "rank_pattern": {"layers.1.experts.gate_up_proj": 4}},
    {"initialization": "pissa", "alpha_pattern": {"down_proj": 3}},
    {"initialization": "olora"},
    {"initialization": "orthogonal", "freeze_A": True},
]


@pytest.mark.parametrize("is_transposed", [False, True], ids=["out-in", "in-out"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("file", ["adapter.safetensors", "adapter"])
def test_saved_adapters_can_be_loaded_merged_and_written_again(tmp_path, is_transposed, kind, file):
    base, x = build("bmm", is_transposed), tokens()
    plain = base(x)
    lora.add_lora(base, ["down_proj"], r=R, lora_alpha=ALPHA, **settings_for(kind, "down"))
    lora.add_lora(base, ["q", "gate_up_proj"], r=R, lora_alpha=ALPHA, **settings_for(kind, "gate"))
    close(base(x), plain)
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn(parameter.shape), alpha=0.3)
    expected = base(x)
    assert not torch.allclose(expected, plain, atol=0.01)
    lora.save_adapter(base, tmp_path / file)
    model = build("bmm", is_transposed)
    names = lora.load_adapter(model, tmp_path / file)
    assert set(names) == set(lora_layers(base))
    close(model(x), expected)
    close(model.eval()(x), expected)
    adapter, other = lora.read_adapter(tmp_path / file), build("bmm", is_transposed)
    merge_into(other, adapter)
    close(other(x), expected)
    lora.write_adapter(tmp_path / "again.safetensors", adapter)
    third = build("bmm", is_transposed)
    lora.load_adapter(third, tmp_path / "again.safetensors")
    close(third(x), expected)
    lora.load_adapter(third, tmp_path / "again.safetensors")  # into its existing LoRA layers


def settings_for(kind, part):
    """The settings without patterns for other parts."""
    return {
        name: value
        for name, value in kind.items()
        if not isinstance(value, dict) or any(part in key for key in value)
    }


def test_tensors_in_pefts_folder_have_its_names_and_layout(tmp_path):
    """PEFT wraps the first parameter first. B's columns are ordered by rank, then by expert."""
    model = adapted(targets=STACKS, layers=1)
    lora.save_adapter(model, tmp_path / "a")
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    experts, start = model.layers[0]["experts"], "base_model.model.layers.0.experts"
    for place, update in (
        (f"{start}.base_layer", experts.gate_up_proj_lora),
        (start, experts.down_proj_lora),
    ):
        assert torch.equal(tensors.pop(f"{place}.lora_A.weight"), update.lora_A)
        B = tensors.pop(f"{place}.lora_B.weight").view(-1, R, EXPERTS)
        assert torch.equal(B.permute(2, 0, 1).flatten(0, 1), update.lora_B)
    assert not tensors


def as_peft_writes(folder, change=lambda tensors, config: None):
    """Removes this project's metadata from a folder, and applies a change."""
    weights, settings = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors, config = load_file(weights), json.loads(settings.read_text(encoding="utf-8"))
    change(tensors, config)
    save_file(tensors, weights)
    settings.write_text(json.dumps(config), encoding="utf-8")
    return folder


def with_short_names(tensors, config):
    config["target_parameters"] = ["down_proj", "experts.gate_up_proj"]


def of_another_rank(tensors, config):
    config["r"] = 5


def without_outer(tensors, config):
    for name in [name for name in tensors if "layers.1.experts.lora_" in name]:
        del tensors[name]


def without_inner(tensors, config):
    for name in [name for name in tensors if "layers.1.experts.base_layer.lora_" in name]:
        del tensors[name]


def without_outermost(tensors, config):
    """As if another parameter had been adapted after these, and its update were missing."""
    inner_first = sorted((n for n in tensors if "layers.1.experts." in n), key=len, reverse=True)
    for name in inner_first:
        tensors[name.replace(".lora_", ".base_layer.lora_")] = tensors.pop(name)


def without_any(tensors, config):
    for name in [name for name in tensors if "layers.1.experts." in name]:
        del tensors[name]


def without_half(tensors, config):
    del tensors["base_model.model.layers.1.experts.lora_B.weight"]


def with_too_few_names(tensors, config):
    config["target_parameters"] = ["experts.gate_up_proj"]


def with_invalid_names(tensors, config):
    config["target_parameters"] = "experts.*"


@pytest.mark.parametrize("change", [lambda tensors, config: None, with_short_names])
def test_pefts_folders_of_several_stacks_need_the_model(tmp_path, change):
    """The order of its parameters decides to which of them each update belongs."""
    model = adapted(targets=("q", *STACKS))
    lora.save_adapter(model, tmp_path / "a")
    folder = as_peft_writes(tmp_path / "a", change)
    with pytest.raises(
        CheckpointError, match=r"adapts several param.*: in Python, lora\.load_adapter\(model, "
    ):
        lora.read_adapter(folder)
    with pytest.raises(CheckpointError, match=r"of layers\.1\.exp.* the model that it was tr"):
        lora.load_adapter(build(layers=1), folder)
    again = build()
    lora.load_adapter(again, folder)
    close(again(tokens()), model(tokens()))
    lora.save_adapter(again, tmp_path / "recorded.safetensors")
    assert lora.read_adapter(tmp_path / "recorded.safetensors").lora.stacks
    close(lora.merge(again)(tokens()), model(tokens()))


@pytest.mark.parametrize("size", [WIDTH, 4], ids=["square", "wide"])
def test_pefts_lora_on_parameters_of_unknown_modules_is_refused(tmp_path, size):
    """PEFT adapts any parameter, but what such a module computes with it is unknown here."""

    class Router(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(size, width))

    layers = nn.ModuleDict({"router": nn.Linear(WIDTH, size), "q": nn.Linear(WIDTH, size)})
    linear, router = copy.deepcopy(layers), copy.deepcopy(layers)
    patterns = {"rank_pattern": {"router": 1}, "alpha_pattern": {"router": 5}}
    lora.add_lora(layers, ["q", "router"], r=R, lora_alpha=ALPHA, **patterns)
    lora.save_adapter(randomised(layers), tmp_path / "a")

    def of_parameters(tensors, config):
        config |= {"target_modules": ["q"], "target_parameters": ["router.weight"]}
        config |= {"r": R, "rank_pattern": {"router.weight": 1, "router": 3}}
        config |= {"lora_alpha": ALPHA, "alpha_pattern": {"router.weight": 5, "router": 7}}

    folder = as_peft_writes(tmp_path / "a", of_parameters)
    router["router"] = Router(WIDTH)
    assert lora.load_adapter(linear, folder) == ("router", "q")
    x = torch.randn(4, WIDTH)
    close(linear["router"](x), layers["router"](x))
    for load in (lora.load_adapter, lambda *given: merge_into(given[0], lora.read_adapter(folder))):
        with pytest.raises(
            CheckpointError, match=r"adapts router\.weight, .* Router is not supported here: me"
        ):
            load(router, folder)


@pytest.mark.parametrize("what", ["an embedding", "a kernel", "one expert"])
def test_pefts_lora_on_a_parameter_is_not_taken_for_lora_on_its_module(tmp_path, what):
    """Embeddings and kernels have LoRA in other layouts, and a single matrix has none."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.down_proj = nn.Parameter(torch.randn(1, WIDTH, WIDTH))

    layers = nn.ModuleDict({"part": nn.Linear(WIDTH, WIDTH), "q": nn.Linear(WIDTH, WIDTH)})
    lora.add_lora(layers, ["q", "part"], r=R)
    lora.save_adapter(randomised(layers), tmp_path / "a")
    model = lora.merge(copy.deepcopy(layers))
    others = {
        "an embedding": lambda: nn.Embedding(WIDTH, WIDTH),
        "a kernel": lambda: nn.Conv1d(WIDTH, WIDTH, 3, bias=False),
        "one expert": Experts,
    }
    model["part"] = others[what]()
    (parameter,) = (name for name, _ in model["part"].named_parameters())

    def of_parameters(tensors, config):
        config |= {"target_modules": ["q"], "target_parameters": [f"part.{parameter}"]}

    folder = as_peft_writes(tmp_path / "a", of_parameters)
    kind = type(model["part"]).__name__
    message = rf"adapts part\.{parameter}, but .* {kind} is not supported here: merge it with"
    with pytest.raises(CheckpointError, match=message):
        lora.load_adapter(model, folder)

    def of_modules(tensors, config):
        config |= {"target_modules": ["q", "part"], "target_parameters": ["q.weight"]}

    folder = as_peft_writes(tmp_path / "a", of_modules)
    with pytest.raises(CheckpointError, match=r"in the model, part is not a linear layer"):
        lora.load_adapter(model, folder)


def test_a_stack_whose_ranks_add_up_to_that_of_linear_layers_is_not_taken_for_one(tmp_path):
    base, x = build("bmm"), tokens()
    ranks = {"layers.1.experts.down_proj": 1}
    lora.add_lora(base, ["q", "down_proj", "gate_up_proj"], r=EXPERTS, rank_pattern=ranks)
    for name in lora_layers(base):
        nn.init.normal_(base.get_submodule(name).lora_B, std=0.3)
    lora.save_adapter(base, tmp_path / "a")
    model = build("bmm")
    lora.load_adapter(model, tmp_path / "a")
    close(model(x), base(x))


@pytest.mark.parametrize("stacks", [["conv.weight"], ["conv.weight", "experts.weight"]])
def test_pefts_lora_on_a_kernel_is_not_taken_for_lora_on_a_stack(tmp_path, stacks):
    class Stacked(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, WIDTH, 3))

        def forward(self, x):
            return x @ self.weight

    model = nn.ModuleDict({"conv": Stacked(), "experts": Stacked()})
    other = nn.ModuleDict({"conv": nn.Conv1d(WIDTH, 2, 3), "experts": Stacked()})
    lora.add_lora(model, stacks, r=R)
    lora.save_adapter(randomised(model), tmp_path / "a")
    lora.save_adapter(model, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"adapts conv\.weight, but LoRA .* Conv1d is not"):
        lora.load_adapter(other, as_peft_writes(tmp_path / "a"))
    without = nn.ModuleDict({"conv": nn.ReLU(), "experts": Stacked()})
    for each, file in ((other, "a.safetensors"), (without, "a")):
        with pytest.raises(CheckpointError, match=r"has no conv\.weight, a stack .* that it was"):
            lora.load_adapter(each, tmp_path / file)


@pytest.mark.parametrize("stack", STACKS)
def test_pefts_folders_of_one_stack_can_be_read_without_a_model(tmp_path, stack):
    model, merged = adapted(targets=("q", stack)), build()
    lora.save_adapter(model, tmp_path / "a")
    merge_into(merged, lora.read_adapter(as_peft_writes(tmp_path / "a")))
    close(merged(tokens()), model(tokens()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (of_another_rank, "which are not the same multiple of the rank 5"),
        (without_outer, r"lacks the update of layers\.1\.experts\.down_proj, which adapter_config"),
        (without_inner, r"lacks the update of layers\.1\.experts\.gate_up_proj, which adapter_c"),
        (without_outermost, r"lacks the update of layers\.1\.experts\.down_proj, which adapter_"),
        (without_any, r"lacks the update of layers\.1\.experts\.gate_up_proj, which"),
        (without_half, r"lacks layers\.1\.experts\.\w+, the other half|lacks one half of"),
        (with_too_few_names, r"number of updates of layers\.0\.experts is 2, but adapter_config"),
        (with_invalid_names, "target_parameters is 'experts"),
    ],
)
def test_damaged_peft_folders_are_refused(tmp_path, change, message):
    lora.save_adapter(adapted(targets=STACKS), tmp_path / "a")
    model = build()
    with pytest.raises(CheckpointError, match=message):
        lora.load_adapter(model, as_peft_writes(tmp_path / "a", change))
    assert not lora_layers(model)


def test_shared_experts_have_one_update_which_peft_cannot_hold(tmp_path):
    """The update has the first name. PEFT would wrap the experts in only one of their places."""
    model, other = build(), build()
    for each in (model, other):
        each.layers[1]["experts"] = each.layers[0]["experts"]
    assert lora.add_lora(model, "down_proj", r=R) == ("layers.0.experts.down_proj_lora",)
    lora.save_adapter(randomised(model), tmp_path / "a.safetensors")
    lora.load_adapter(other, tmp_path / "a.safetensors")
    close(other(tokens()), model(tokens()))
    with pytest.raises(CheckpointError, match=r"is the same module as layers\.1\.experts, and"):
        lora.save_adapter(model, tmp_path / "a")


def test_in_pefts_folder_dropout_of_other_modules_is_only_in_our_metadata(tmp_path):
    model = adapted(targets=STACKS)
    lora.add_lora(model, "q", r=R, lora_alpha=ALPHA, lora_dropout=0.1)
    for file in ("a", "a.safetensors"):
        remarks = lora.save_adapter(randomised(model), tmp_path / file)
        assert any("PEFT takes no dropout" in line for line in remarks) is (file == "a")
        again = build()
        lora.load_adapter(again, tmp_path / file)  # the folder has our own metadata too
        assert again.layers[0]["q"].lora_dropout.p == 0.1
        close(again.eval()(tokens()), model.eval()(tokens()))
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["lora_dropout"] == 0


class WithLinearNamedLikeLora(nn.Module):
    """Has a linear layer with the name that the LoRA layer of its stack would have."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.w_lora = nn.Linear(WIDTH, WIDTH)
        self.v = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x):
        return self.w_lora(x) + x @ self.w[0] + x @ self.v[1]


@pytest.mark.parametrize("name", ["a", "a.safetensors"])
def test_a_linear_layer_may_have_the_name_of_a_stacks_lora_layer(tmp_path, name):
    torch.manual_seed(0)
    model = nn.ModuleDict({"beside": WithLinearNamedLikeLora()})
    plain = copy.deepcopy(model)
    names = lora.add_lora(model, "beside.w_lora", r=R, lora_dropout=0.1)
    lora.save_adapter(randomised(model), tmp_path / name)
    again = copy.deepcopy(plain)
    assert lora.load_adapter(again, tmp_path / name) == names
    assert again["beside"].w_lora.lora_dropout.p == 0.1
    merge_into(plain, lora.read_adapter(tmp_path / name))
    for other in (again.eval(), plain):
        close(other["beside"](tokens()), model.eval()["beside"](tokens()))
    if name == "a":
        return
    lora.add_lora(model, "beside.v", r=R)
    remarks = lora.save_adapter(randomised(model), tmp_path / name)
    assert not any("dropouts from" in line for line in remarks)
    assert lora.read_adapter(tmp_path / name).lora.stacks == ("beside.v_lora",)


def test_a_bank_refuses_stacks(tmp_path):
    lora.save_adapter(adapted(), tmp_path / "a.safetensors")
    bank = lora.AdapterBank(build())
    with pytest.raises(CheckpointError, match=r"adapts layers\.0\.experts\.\w+, a stack of matr"):
        bank.add("a", lora.read_adapter(tmp_path / "a.safetensors"))


def other_model(**attributes):
    model = build()
    for layer in model.layers:
        for name, value in attributes.items():
            setattr(layer["experts"], name, value)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (other_model(down_proj=None), r"has no layers\.0\.experts\.down_proj, a stack of matrices"),
        (
            other_model(down_proj=nn.Parameter(torch.zeros(EXPERTS * 2, WIDTH // 2, INNER))),
            r"the delta of layers\.0\.experts\.down_proj_lora is \(3, 8, 16\), but the model's "
            r"weight is \(6, 4, 16\)",
        ),
        (build(layers=1), "its base has at least 2 layers, this model has 1"),
    ],
    ids=["none", "other shape", "fewer layers"],
)
def test_adapters_of_other_models_are_refused(tmp_path, model, message):
    lora.save_adapter(adapted(), tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=message):
        lora.load_adapter(model, tmp_path / "a.safetensors")
    assert not lora_layers(model)


def test_the_releases_format_cannot_record_stacks(tmp_path):
    with pytest.raises(CheckpointError, match=r"of the stacks .*, which this format cannot record"):
        lora.save_adapter(adapted(), tmp_path / "a.bin")
    torch.save(lora.lora_state_dict(adapted()), tmp_path / "b.bin")
    with pytest.raises(CheckpointError, match="has 3 stacked blocks, and it is unknown which"):
        lora.load_adapter(build(), tmp_path / "b.bin", lora_alpha=ALPHA)
