"""The forms of an adapter: each is recognised, none loses a bit; what is no adapter is refused."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import loralib as lora
from loralib import files, peft
from loralib.checkpoint import BITFIT, BOTTLENECK, Adapter, AdapterInfo, BiasInfo, BottleneckInfo
from loralib.files import CheckpointError, read_tensors, write_whole_folder, write_wrapped_tensors
from loralib.formats import FORMS, checksum, own_names, read_adapter, write_adapter
from loralib.updates import updates

RELEASE = Path(__file__).parents[3] / "shared" / "data" / "release" / "roberta_base_lora_mnli.bin"
TARGETS = {"lora": "out.safetensors", "release": "out.bin", "peft": "out"}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PLAIN, GPT2_LAYER = "encoder.0.up", "transformer.h.{}.attn.c_attn"
HEADS = {
    "roberta": ("classifier.dense", "classifier.out_proj"),
    "deberta": ("pooler.dense", "classifier"),
    "gpt2": (),
    "plain": (),
}
MODULES = {
    "roberta": [
        f"roberta.encoder.layer.{number}.attention.self.{name}"
        for number in range(2)
        for name in ("query", "value")
    ],
    "deberta": [
        f"deberta.encoder.layer.{number}.attention.self.{name}"
        for number in range(2)
        for name in ("query_proj", "value_proj")
    ],
    "gpt2": [GPT2_LAYER.format(number) for number in range(2)],
    "plain": [PLAIN, "encoder.1.up", "last"],
}
INFOS = {
    family: AdapterInfo(
        rank=2,
        alpha=3,
        targets=targets,
        dropout=0.1,
        base=f"some/{family}",
        base_revision="main",
        base_fingerprint="0123456789abcdef",
        task="mnli" if HEADS[family] else None,
        labels=("no", "yes") if HEADS[family] else None,
    )
    for family, targets in {
        "roberta": ("query", "value"),
        "deberta": ("query_proj", "value_proj"),
        "gpt2": ("c_attn",),
        "plain": ("last", "up"),
    }.items()
}
FAMILIES = tuple(MODULES)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal values; among them a negative zero, the largest number and one that is subnormal."""
    generator = torch.Generator().manual_seed(seed + math.prod(shape))
    tensor = torch.randn(shape, generator=generator).to(dtype)
    if tensor.numel() > 3:
        limits = torch.finfo(dtype)
        tensor.view(-1)[:3] = torch.tensor([-0.0, limits.max, limits.tiny / 4], dtype=dtype)
    return tensor


def tensors_of(family: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """An adapter of rank 2 for layers of width 6: GPT-2's has two updates in each."""
    stacked = 2 if family == "gpt2" else 1
    tensors = {}
    for seed, module in enumerate(MODULES[family]):
        tensors[f"{module}.lora_A"] = drawn(2 * stacked, 6, dtype=dtype, seed=seed)
        tensors[f"{module}.lora_B"] = drawn(6 * stacked, 2, dtype=dtype, seed=seed)
    for seed, head in enumerate(HEADS[family]):
        tensors[f"{head}.weight"] = drawn(2, 6, dtype=dtype, seed=seed)
        tensors[f"{head}.bias"] = drawn(2, dtype=dtype, seed=seed)
    return tensors


def adapter_of(family: str, dtype: torch.dtype = torch.float32) -> Adapter:
    return Adapter(tensors_of(family, dtype), INFOS[family], "this adapter")


def as_peft(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """PEFT's names, for adapters without stacked updates."""
    ends = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight"}
    named = {}
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        named[f"base_model.model.{module}.{ends.get(last, last)}"] = tensor
    return named


def peft_folder(
    path: Path, tensors: Mapping[str, Tensor] | None = None, torch_file: bool = False, **config
) -> Path:
    """A folder as PEFT writes it, without this project's metadata; `config` replaces settings."""
    tensors = as_peft(tensors_of("roberta")) if tensors is None else tensors
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": ["query", "value"]}
    path.mkdir()
    if torch_file:
        torch.save(tensors, path / "adapter_model.bin")
    else:
        save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})
    (path / "adapter_config.json").write_text(json.dumps(settings | config))
    return path


def same_bits(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert ours[name].shape == tensor.shape, name
        flat, expected = (t.flatten().view(torch.uint8) for t in (ours[name], tensor))
        assert torch.equal(flat, expected), name


def refused(call, path: str | Path, *parts: str) -> str:
    """`call` raises a CheckpointError of one line that names `path` and holds all of `parts`."""
    with pytest.raises(CheckpointError) as caught:
        call()
    text = str(caught.value)
    assert len(text.splitlines()) == 1, text
    assert str(path) in text
    for part in parts:
        assert part in text
    return text


def refused_file(tmp_path: Path, content: object, *parts: str, name: str = "x.bin") -> None:
    torch.save(content, tmp_path / name)
    refused(lambda: read_adapter(tmp_path / name), tmp_path / name, *parts)


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# ---- recognition ----


@pytest.mark.parametrize("family", FAMILIES)
def test_this_projects_form(tmp_path, family):
    path = tmp_path / "pytorch_model_lora.safetensors"
    assert write_adapter(path, adapter_of(family)) == []
    for source in (path, tmp_path, str(tmp_path)):
        adapter = read_adapter(source)
        same_bits(adapter.tensors, tensors_of(family))
        assert adapter.info == INFOS[family]
        assert adapter.form == "lora"
        assert adapter.source == str(path)


@pytest.mark.parametrize("zipped", [True, False])
def test_the_releases_form_for_roberta(tmp_path, zipped):
    path = tmp_path / "roberta_base_lora_mnli.bin"
    torch.save(tensors_of("roberta"), path, _use_new_zipfile_serialization=zipped)
    adapter = read_adapter(path)
    same_bits(adapter.tensors, tensors_of("roberta"))
    assert (adapter.info, adapter.form) == (None, "release")


@pytest.mark.parametrize("generation", ["today's", "first"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_the_releases_form_for_deberta(tmp_path, generation, prefix):
    tensors, path = tensors_of("deberta"), tmp_path / "deberta.bin"
    if generation == "first":
        first = {f"_proj.lora_{ab}": f"_lora_{ab.lower()}.weight" for ab in "AB"}
        renamed = {}
        for name, tensor in tensors.items():
            for new, old in first.items():
                name = name.replace(new, old)
            renamed[name] = tensor
        assert not any("_proj" in name for name in renamed)
    else:
        renamed = tensors
    torch.save({prefix + name: tensor for name, tensor in renamed.items()}, path)
    adapter = read_adapter(path, lora_alpha=3)
    same_bits(adapter.tensors, tensors)
    assert adapter.form == "release"
    assert adapter.info == AdapterInfo(rank=2, alpha=3, targets=("query_proj", "value_proj"))


@pytest.mark.parametrize("prefix", ["module.", "", "module.transformer."])
@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_the_releases_form_for_gpt2(tmp_path, prefix, wrapped, tied):
    tensors, path = tensors_of("gpt2"), tmp_path / "GPT2_M.lora.pt"
    held = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    start = prefix if prefix.endswith("transformer.") else f"{prefix}transformer."
    if prefix == "":
        start = ""  # names that begin with the layers, "h."
    held = {f"{start}{name}": tensor for name, tensor in held.items()}
    if tied:
        held["module.lm_head.weight" if prefix else "lm_head.decoder.weight"] = drawn(9, 6)
    torch.save({"model_state_dict": held} if wrapped else held, path)
    adapter = read_adapter(path, lora_alpha=3)
    same_bits(adapter.tensors, tensors)
    assert adapter.form == "release"
    assert adapter.info == AdapterInfo(rank=2, alpha=3, targets=("c_attn",))
    assert {len(update.parts) for update in updates(adapter).values()} == {2}


@pytest.mark.parametrize("given", ["folder", "config", "weights"])
@pytest.mark.parametrize("torch_file", [True, False])
def test_pefts_form(tmp_path, given, torch_file):
    folder = peft_folder(
        tmp_path / "adapter",
        torch_file=torch_file,
        base_model_name_or_path="some/base",
        revision="v2",
        lora_dropout=0.25,
    )
    weights = folder / ("adapter_model.bin" if torch_file else "adapter_model.safetensors")
    source = {"folder": folder, "config": folder / "adapter_config.json", "weights": weights}[given]
    adapter = read_adapter(source)
    same_bits(adapter.tensors, tensors_of("roberta"))
    assert adapter.form == "peft"
    assert adapter.source == str(weights)
    assert adapter.info == AdapterInfo(
        rank=2,
        alpha=3,
        targets=("query", "value"),
        dropout=0.25,
        base="some/base",
        base_revision="v2",
    )


def user_model(bias_of_layer: bool = True) -> nn.Module:
    """A user's own model: two adapted layers, one with a bias; a plain one; a convolution."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "up": lora.Linear(4, 6, r=2, bias=bias_of_layer),
            "down": lora.Linear(6, 4, r=2, bias=False),
            "norm": nn.LayerNorm(4),
        }
    )
    for parameter in model.parameters():
        parameter.data.normal_()
    return model


@pytest.mark.parametrize("bias", ["none", "all", "lora_only"])
@pytest.mark.parametrize("form", FORMS)
def test_a_users_own_model(tmp_path, bias, form):
    state, path = lora.lora_state_dict(user_model(), bias), tmp_path / "lora.pt"
    torch.save(state, path)
    adapter = read_adapter(path)
    same_bits(adapter.tensors, state)
    assert (adapter.info, adapter.form) == (None, "plain")
    adapter = read_adapter(path, lora_alpha=8)
    assert adapter.info == AdapterInfo(rank=2, alpha=8, targets=("down", "up"), bias=bias)
    write_adapter(tmp_path / TARGETS[form], adapter, form)
    again = read_adapter(tmp_path / TARGETS[form], lora_alpha=8)
    same_bits(again.tensors, state)
    assert again.info == adapter.info


@pytest.mark.parametrize("form", FORMS)
def test_a_users_own_head_is_no_bias_of_the_base(tmp_path, form):
    """A bias whose weight is there as well was not trained in the base, but with the head."""
    head = {"head.weight": drawn(3, 4), "head.bias": drawn(3)}
    tensors = {**lora.lora_state_dict(user_model()), **head}
    torch.save(tensors, tmp_path / "lora.pt")
    adapter = read_adapter(tmp_path / "lora.pt", lora_alpha=8)
    assert adapter.info.bias == "none"
    write_adapter(tmp_path / TARGETS[form], adapter, form)
    same_bits(read_adapter(tmp_path / TARGETS[form]).tensors, tensors)
    if form == "peft":
        config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
        assert (config["bias"], config["modules_to_save"]) == ("none", ["head"])


@pytest.mark.parametrize("bias", ["none", "all", "lora_only"])
def test_a_users_convolution(tmp_path, bias):
    model = nn.ModuleDict({"conv": lora.Conv2d(3, 4, 3, r=2), "norm": nn.BatchNorm2d(4)})
    torch.save(lora.lora_state_dict(model, bias), tmp_path / "lora.pt")
    adapter = read_adapter(tmp_path / "lora.pt", lora_alpha=8)
    # The convolution's rank is r times its kernel's width.
    assert (adapter.info.rank, adapter.info.bias, adapter.form) == (6, bias, "plain")


def test_a_users_stacked_updates_stay_as_they_are(tmp_path):
    """Which slices they belong to is not known, so that only files are read and written."""
    layer = lora.MergedLinear(4, 6, r=2, enable_lora=[True, True, False])
    torch.save(lora.lora_state_dict(nn.ModuleDict({"qkv": layer})), tmp_path / "lora.pt")
    adapter = read_adapter(tmp_path / "lora.pt", lora_alpha=8)
    assert adapter.info.rank == 2
    write_adapter(tmp_path / "lora.safetensors", adapter)
    same_bits(read_adapter(tmp_path / "lora.safetensors").tensors, adapter.tensors)
    refused(
        lambda: write_adapter(tmp_path / "out", adapter, "peft"),
        adapter.source,
        "qkv has 2 stacked updates",
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "tensors", "info"),
    [
        (
            BOTTLENECK,
            {"roberta.layer.0.adapter.down.weight": drawn(2, 6), "classifier.bias": drawn(3)},
            BottleneckInfo(adapter_type="houlsby", adapter_size=2),
        ),
        (
            BITFIT,
            {"roberta.layer.0.query.bias": drawn(6), "classifier.bias": drawn(3)},
            BiasInfo(biases="all"),
        ),
    ],
)
def test_the_baselines_files(tmp_path, kind, tensors, info):
    adapter = Adapter(tensors, info, "theirs", kind)
    write_adapter(tmp_path / "a.safetensors", adapter)
    assert read_adapter(tmp_path / "a.safetensors", kind).info == info
    write_adapter(tmp_path, adapter, "release")
    same_bits(read_adapter(tmp_path, kind).tensors, tensors)
    refused(lambda: read_adapter(tmp_path / "a.safetensors"), tmp_path / "a.safetensors", "LoRA")
    refused(lambda: write_adapter(tmp_path / "out", adapter, "peft"), "theirs")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", FORMS)
def test_parameters_are_as_good_as_tensors(tmp_path, form):
    """A user may have saved `named_parameters()`."""
    tensors = {name: nn.Parameter(tensor) for name, tensor in tensors_of("gpt2").items()}
    torch.save(tensors, tmp_path / "x.pt")
    write_adapter(tmp_path / TARGETS[form], read_adapter(tmp_path / "x.pt", lora_alpha=3), form)
    same_bits(read_adapter(tmp_path / TARGETS[form]).tensors, tensors_of("gpt2"))


# ---- names ----


def test_two_tensors_of_one_name(tmp_path):
    name = f"{MODULES['roberta'][0]}.lora_A"
    tensors = {**tensors_of("roberta"), f"module.{name}": drawn(2, 6)}
    refused(lambda: own_names(tensors, "a.bin"), "a.bin", f"holds {name} under two names")
    refused_file(tmp_path, tensors, f"holds {name} under two names")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(2, 6), (3, 6)])
def test_two_tensors_of_one_name_in_pefts_form(tmp_path, dtype, shape):
    tensors = as_peft(tensors_of("roberta"))
    name = "base_model.model.classifier.dense.modules_to_save.default.weight"
    tensors[name] = torch.ones(shape).to(dtype)
    folder = peft_folder(tmp_path / "adapter", tensors)
    refused(
        lambda: read_adapter(folder),
        folder / "adapter_model.safetensors",
        "holds classifier.dense.weight under two names",
    )


def test_the_heads_copies_that_peft_keeps_are_no_part_of_the_adapter(tmp_path):
    tensors = as_peft(tensors_of("roberta"))
    tensors["base_model.model.classifier.original_module.dense.bias"] = torch.ones(2)
    tensors["base_model.model.classifier.modules_to_save.default.dense.bias"] = tensors[
        "base_model.model.classifier.dense.bias"
    ].clone()
    adapter = read_adapter(peft_folder(tmp_path / "adapter", tensors))
    same_bits(adapter.tensors, tensors_of("roberta"))


# ---- writing ----


LOST = {
    "alpha": "3",
    "dropout": "0.1",
    "base": "some/{}",
    "base_revision": "main",
    "base_fingerprint": "0123456789abcdef",
    "task": "mnli",
    "labels": "no, yes",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_each_form_cannot_hold(tmp_path, family):
    adapter = adapter_of(family)
    assert write_adapter(tmp_path / "a.safetensors", adapter) == []
    said = write_adapter(tmp_path / "a.bin", adapter)
    lost = LOST if HEADS[family] else {k: v for k, v in LOST.items() if k not in ("task", "labels")}
    expected = {f"not in this form: {key} {value.format(family)}" for key, value in lost.items()}
    assert set(said) == (set() if family == "gpt2" else expected)
    assert len(said) == len(set(said))
    remarks = write_adapter(tmp_path / "a", adapter, "peft")
    unseen = "base_fingerprint, task, labels" if HEADS[family] else "base_fingerprint"
    assert remarks[-1] == f"in the metadata, where PEFT does not look: {unseen}"
    assert len(remarks) == (2 if family == "gpt2" else 1)
    if family == "gpt2":
        for part in ("2 updates of rank 2", "c_attn", "one of rank 4 and alpha 6"):
            assert part in remarks[0]
    assert all(len(line.splitlines()) == 1 for line in [*said, *remarks])


def test_nothing_is_said_where_nothing_is_lost(tmp_path):
    bare = replace(adapter_of("roberta"), info=None)
    assert write_adapter(tmp_path / "a.bin", bare) == []
    info = AdapterInfo(rank=2, alpha=3, targets=("query", "value"))
    said = write_adapter(tmp_path / "a.bin", replace(bare, info=info))
    assert said == ["not in this form: alpha 3"]
    assert write_adapter(tmp_path / "a", replace(bare, info=info), "peft") == []


def test_the_releases_form_is_plain_tensors(tmp_path):
    """What the release's own scripts load: for GPT-2 wrapped, with DDP's names."""
    write_adapter(tmp_path / "a.bin", adapter_of("roberta"))
    same_bits(torch.load(tmp_path / "a.bin", weights_only=True), tensors_of("roberta"))
    write_adapter(tmp_path / "a.pt", adapter_of("gpt2"))
    held = torch.load(tmp_path / "a.pt", weights_only=True)
    expected = {f"module.{name}": tensor for name, tensor in tensors_of("gpt2").items()}
    same_bits(held["model_state_dict"], expected)
    assert read_adapter(tmp_path / "a.pt").info == INFOS["gpt2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_pefts_folder(tmp_path, family):
    write_adapter(tmp_path / "a", adapter_of(family), "peft")
    assert listing(tmp_path / "a") == {"adapter_config.json", "adapter_model.safetensors"}
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    parts = 2 if family == "gpt2" else 1
    assert (config["r"], config["lora_alpha"]) == (2 * parts, 3 * parts)
    assert config["peft_type"] == "LORA"
    assert config["base_model_name_or_path"] == f"some/{family}"
    assert config["lora_dropout"] == 0.1
    assert config["fan_in_fan_out"] == (family == "gpt2")
    held = load_file(tmp_path / "a" / "adapter_model.safetensors")
    if family != "gpt2":
        assert held.keys() == as_peft(tensors_of(family)).keys()
        same_bits(held, as_peft(tensors_of(family)))
    assert {tensor.shape[0] for n, tensor in held.items() if "lora_A" in n} == {2 * parts}


def test_gpt2s_pair_is_pefts_blocks(tmp_path):
    """The blocks are where peft's head draws them, and the rest of B is zero."""
    adapter = adapter_of("gpt2")
    write_adapter(tmp_path / "a", adapter, "peft")
    held = load_file(tmp_path / "a" / "adapter_model.safetensors")
    for module in MODULES["gpt2"]:
        A, B = (adapter.tensors[f"{module}.lora_{ab}"] for ab in "AB")
        whole = torch.zeros(18, 4)
        whole[:6, :2], whole[12:, 2:] = B[:6], B[6:]
        assert torch.equal(held[f"base_model.model.{module}.lora_A.weight"], A)
        assert torch.equal(held[f"base_model.model.{module}.lora_B.weight"], whole)


@pytest.mark.parametrize("stray", [(7, 0), (7, 3), (0, 2), (17, 1)])
def test_an_update_of_all_of_c_attn_stays_whole(tmp_path, stray):
    """One value outside the blocks is enough; this project's layers cannot hold such an update."""
    write_adapter(tmp_path / "a", adapter_of("gpt2"), "peft")
    held = load_file(tmp_path / "a" / "adapter_model.safetensors")
    held[f"base_model.model.{MODULES['gpt2'][1]}.lora_B.weight"][stray] = 0.5
    folder = peft_folder(tmp_path / "b", held, r=4, lora_alpha=6)
    adapter = read_adapter(folder)
    assert (adapter.info.rank, adapter.info.alpha) == (4, 6)
    assert {name: t.shape for name, t in adapter.tensors.items()} == {
        f"{module}.lora_{ab}": shape
        for module in MODULES["gpt2"]
        for ab, shape in (("A", (4, 6)), ("B", (18, 4)))
    }
    for name in ("out.safetensors", "out.bin"):
        refused(lambda name=name: write_adapter(tmp_path / name, adapter), adapter.source, "merged")
    assert listing(tmp_path).isdisjoint({"out.safetensors", "out.bin"})
    write_adapter(tmp_path / "c", adapter, "peft")
    same_bits(read_adapter(tmp_path / "c").tensors, adapter.tensors)


@pytest.mark.parametrize("name", ["pytorch_model_lora.safetensors", "pytorch_model_lora.bin"])
def test_a_folder_gets_the_file_of_a_run(tmp_path, name):
    form = "lora" if name.endswith("safetensors") else "release"
    write_adapter(tmp_path / "new" / "folder", adapter_of("roberta"), form)
    assert listing(tmp_path / "new" / "folder") == {name}
    same_bits(read_adapter(tmp_path / "new" / "folder").tensors, tensors_of("roberta"))


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("a.bin", "lora"),
        ("a.pt", "lora"),
        ("a.json", "lora"),
        ("a.safetensors", "release"),
        ("a.txt", "release"),
        ("a.txt", None),
        ("a", None),
    ],
)
def test_a_name_that_does_not_fit_the_form(tmp_path, name, form):
    refused(lambda: write_adapter(tmp_path / name, adapter_of("roberta"), form), tmp_path / name)
    assert listing(tmp_path) == set()


# ---- round trips ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_through_all_forms_no_bit_changes(tmp_path, family, dtype):
    adapter, number = adapter_of(family, dtype), 0
    for way in permutations(FORMS):
        current = adapter
        for form in (*way, way[0]):
            number += 1
            path = tmp_path / f"{number}" / TARGETS[form]
            path.parent.mkdir()
            write_adapter(path, current, form)
            current = read_adapter(path, lora_alpha=3)
            assert (current.info.rank, current.info.alpha) == (2, 3)
            assert current.info.targets == INFOS[family].targets
            plain = form == "release" and family == "plain"
            assert current.form == ("plain" if plain else form)
        same_bits(current.tensors, adapter.tensors)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_info_comes_through_the_forms_that_hold_it(tmp_path, family):
    kept = ("lora", "release", "peft") if family == "gpt2" else ("lora", "peft")
    for way in permutations(kept):
        current = adapter_of(family)
        for form in way:
            folder = tmp_path / "-".join(way) / form
            folder.mkdir(parents=True)
            write_adapter(folder / TARGETS[form], current, form)
            current = read_adapter(folder / TARGETS[form])
        assert current.info == INFOS[family]


@pytest.mark.skipif(not RELEASE.is_file(), reason="the release's file is absent from ../shared")
def test_the_releases_published_file_through_all_forms(tmp_path):
    first = read_adapter(RELEASE, lora_alpha=16)
    assert first.info == AdapterInfo(rank=8, alpha=16, targets=("query", "value"))
    assert first.form == "release"
    current = first
    for number, form in enumerate(("lora", "peft", "release", "peft", "lora")):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_adapter(folder / TARGETS[form], current, form)
        current = read_adapter(folder / TARGETS[form], lora_alpha=16)
        assert current.info == first.info
        same_bits(current.tensors, first.tensors)
    refused(lambda: read_adapter(folder, lora_alpha=8), folder, "no adapter")
    refused(lambda: read_adapter(folder / TARGETS[form], lora_alpha=8), folder, "alpha 16")


# ---- alpha ----


def test_alpha_has_to_be_known_where_it_is_written(tmp_path):
    adapter = replace(adapter_of("roberta"), info=None)
    for name, form in (("a.safetensors", "lora"), ("a", "lora"), ("b/c", "lora"), ("a", "peft")):
        refused(
            lambda name=name, form=form: write_adapter(tmp_path / name, adapter, form),
            adapter.source,
            "--lora_alpha",
        )
    assert listing(tmp_path) == set()
    refused(lambda: updates(adapter), adapter.source, "--lora_alpha")


@pytest.mark.parametrize("name", ["out.safetensors", "out.bin", "out"])
def test_an_alpha_that_is_given(tmp_path, name):
    form = {name: form for form, name in TARGETS.items()}[name]
    write_adapter(tmp_path / name, adapter_of("roberta"), form)
    assert read_adapter(tmp_path / name, lora_alpha=3.0).info.alpha == 3
    if form == "release":
        assert read_adapter(tmp_path / name, lora_alpha=4).info.alpha == 4
    else:
        parts = ("trained with alpha 3", "--lora_alpha is 4")
        refused(lambda: read_adapter(tmp_path / name, lora_alpha=4), tmp_path / name, *parts)
    for alpha in (0, -1, math.inf, math.nan):
        call = lambda alpha=alpha: read_adapter(tmp_path / name, lora_alpha=alpha)  # noqa: E731
        refused(call, tmp_path / name, "--lora_alpha")


# ---- one file beside another ----


@pytest.mark.parametrize("family", ["roberta", "deberta"])
def test_the_twin_says_what_the_releases_form_cannot(tmp_path, family):
    adapter = adapter_of(family)
    write_adapter(tmp_path, adapter, "release")
    path = tmp_path / "pytorch_model_lora.bin"
    assert read_adapter(path).info is None
    write_adapter(tmp_path, adapter, "lora")
    assert read_adapter(path).info == INFOS[family]
    assert read_adapter(path).form == "release"
    assert read_adapter(tmp_path).form == "lora"
    refused(lambda: read_adapter(path, lora_alpha=4), path, "alpha 3")
    path.rename(tmp_path / "other.bin")
    assert read_adapter(tmp_path / "other.bin").info is None


@pytest.mark.parametrize("other", ["value", "shape", "dtype", "less", "more"])
def test_a_twin_with_other_tensors_says_nothing(tmp_path, other):
    adapter = adapter_of("roberta")
    write_adapter(tmp_path, adapter, "release")
    tensors = dict(adapter.tensors)
    last = "classifier.out_proj.weight"
    if other == "less":
        del tensors[last]
    elif other == "more":
        tensors["classifier.more.weight"] = torch.ones(1)
    else:
        tensors[last] = {
            "value": tensors[last] + 1,
            "shape": tensors[last].reshape(4, 3),
            "dtype": tensors[last].bfloat16(),
        }[other]
    write_adapter(tmp_path, replace(adapter, tensors=tensors), "lora")
    assert read_adapter(tmp_path / "pytorch_model_lora.bin").info is None


def test_a_damaged_twin_is_not_passed_over(tmp_path):
    write_adapter(tmp_path, adapter_of("roberta"), "release")
    write_adapter(tmp_path, adapter_of("roberta"), "lora")
    twin = tmp_path / "pytorch_model_lora.safetensors"
    content = bytearray(twin.read_bytes())
    content[-1] ^= 1
    twin.write_bytes(content)
    refused(lambda: read_adapter(tmp_path / "pytorch_model_lora.bin"), twin, "damaged")


@pytest.mark.parametrize("form", ["lora", "release"])
def test_two_adapters_in_one_folder(tmp_path, form):
    folder = peft_folder(tmp_path / "both", base_model_name_or_path="theirs")
    write_adapter(folder, adapter_of("roberta"), form)
    (own,) = (path for path in folder.iterdir() if path.name.startswith("pytorch_model_lora"))
    refused(lambda: read_adapter(folder), folder, own.name, "adapter_config.json", "name one")
    assert read_adapter(own).form == form
    assert read_adapter(folder / "adapter_config.json").info.base == "theirs"


def test_folders_that_hold_no_adapter(tmp_path):
    refused(lambda: read_adapter(tmp_path), tmp_path, "holds no adapter")
    folder = peft_folder(tmp_path / "a")
    (folder / "adapter_model.safetensors").unlink()
    for source in (folder, folder / "adapter_config.json"):
        refused(lambda source=source: read_adapter(source), folder, "adapter_model", "missing")
    folder = peft_folder(tmp_path / "b")
    (folder / "adapter_config.json").unlink()
    refused(lambda: read_adapter(folder), folder, "holds no adapter")
    weights = folder / "adapter_model.safetensors"
    refused(lambda: read_adapter(weights), weights, "adapter_config.json is missing")
    weights.rename(folder / "other.safetensors")
    refused(lambda: read_adapter(folder / "other.safetensors"), folder, "weights of PEFT")


# ---- what is no adapter ----


def test_a_whole_model_given_as_an_adapter(tmp_path):
    query = "roberta.encoder.layer.0.attention.self.query"
    for extra in (f"{query}.weight", "roberta.embeddings.word_embeddings.weight"):
        tensors = {**tensors_of("roberta"), extra: drawn(6, 6)}
        refused_file(tmp_path, tensors, "whole model", extra, "split_lora.py")
    tensors = {**tensors_of("gpt2"), "transformer.wte.weight": drawn(9, 6)}
    refused_file(tmp_path, {"model_state_dict": tensors}, "whole model", "split_lora.py")


def test_a_users_whole_model_given_as_an_adapter(tmp_path):
    """Its frozen weights would take the place of those that the update was just added to."""
    torch.save(user_model().state_dict(), tmp_path / "x.bin")
    refused(lambda: read_adapter(tmp_path / "x.bin", lora_alpha=8), tmp_path / "x.bin", "whole")


QUERY = MODULES["roberta"][0]
A, B = f"{QUERY}.lora_A", f"{QUERY}.lora_B"
UNSOUND = {
    "no A": ({A: None}, f"lacks {A}"),
    "no B": ({B: None}, f"lacks {B}"),
    "two ranks": ({A: drawn(3, 6), B: drawn(6, 3)}, "2 ranks: 2 ("),
    "A too short": ({A: drawn(1, 6)}, f"of {QUERY} do not belong together"),
    "A not whole": ({A: drawn(3, 6)}, f"of {QUERY} do not belong together"),
    "A empty": ({A: torch.zeros(0, 6), B: torch.zeros(6, 0)}, "do not belong together"),
    "no columns": ({A: torch.zeros(2, 0)}, "do not belong together"),
    "B of 1-D": ({B: drawn(6)}, "do not belong together"),
    "A of 3-D": ({A: drawn(2, 3, 2)}, "do not belong together"),
    "integers": ({A: torch.ones(2, 6, dtype=torch.int64)}, f"{A} is of torch.int64"),
    "an integer head": ({"head.x": torch.ones(3, dtype=torch.int8)}, "head.x is of torch.int8"),
    "booleans": ({"head.x": torch.ones(3, dtype=torch.bool)}, "head.x is of torch.bool"),
    "complex": ({B: torch.ones(6, 2, dtype=torch.complex64)}, f"{B} is of torch.complex64"),
    "float8": ({A: torch.ones(2, 6).to(torch.float8_e4m3fn)}, f"{A}"),
    "not a number": ({B: drawn(6, 2).fill_(math.nan)}, f"{B} holds values that are not finite"),
    "infinite": (
        {"classifier.dense.bias": torch.tensor([1, -math.inf])},
        "classifier.dense.bias holds values that are not finite",
    ),
    "another name": ({f"{QUERY}.lora_C": drawn(2, 6)}, "lora_C is not the name"),
    "an embedding's": ({f"{QUERY}.lora_embedding_A": drawn(2, 6)}, "is not the name"),
}


def changed(tensors: Mapping[str, Tensor], changes: Mapping[str, Tensor | None]) -> dict:
    merged = {**tensors, **changes}
    return {name: tensor for name, tensor in merged.items() if tensor is not None}


@pytest.mark.parametrize("form", ["a.bin", "wrapped.pt", "legacy.bin", "a.safetensors", "peft"])
@pytest.mark.parametrize("case", UNSOUND)
def test_unsound_tensors(tmp_path, case, form):
    changes, message = UNSOUND[case]
    tensors, path = changed(tensors_of("roberta"), changes), tmp_path / form
    if form == "peft":
        peft_folder(path, as_peft(tensors))
        path = path / "adapter_model.safetensors"
        message = "rank is 3" if case == "two ranks" else message
    elif form.endswith("safetensors"):
        save_file(tensors, path)
    else:
        if form == "legacy.bin" and case == "float8":
            message = "legacy.bin"  # torch's older form has no such tensors: it cannot be read
        content = {"model_state_dict": tensors} if form == "wrapped.pt" else tensors
        torch.save(content, path, _use_new_zipfile_serialization=form != "legacy.bin")
    refused(lambda: read_adapter(path), path, message)


@pytest.mark.parametrize("rows", [4, 6, 12])
def test_pefts_updates_are_never_stacked(tmp_path, rows):
    """lora_A of another rank than lora_B's: in this project's form it would be several updates."""
    tensors = as_peft(changed(tensors_of("roberta"), {A: drawn(rows, 6)}))
    folder = peft_folder(tmp_path / "a", tensors)
    refused(lambda: read_adapter(folder), folder, QUERY)


NOT_HELD = {
    "sparse": lambda: torch.eye(6).to_sparse(),
    "compressed": lambda: torch.eye(6).to_sparse_csr(),
    "expanded": lambda: torch.ones(1).expand(2, 6),
    "expanded far": lambda: torch.ones(1).expand(2**40, 2**10),
    "meta": lambda: torch.empty(2, 6, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2, 6), 0.1, 0, torch.qint8),
}


@pytest.mark.parametrize("name", ["x.bin", "x.pt", "peft"])
@pytest.mark.parametrize("what", NOT_HELD)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_that_are_not_in_the_file(tmp_path, what, name):
    tensor = NOT_HELD[what]()
    if name == "peft":
        key = "base_model.model.classifier.dense.weight"
        tensors = {**as_peft(tensors_of("roberta")), key: tensor}
        path = peft_folder(tmp_path / name, tensors, torch_file=True) / "adapter_model.bin"
        refused(lambda: read_adapter(path), path)
        return
    tensors = {**tensors_of("roberta"), "classifier.dense.weight": tensor}
    content = {"model_state_dict": tensors} if name.endswith("pt") else tensors
    refused_file(tmp_path, content, name=name)


class AsksForMore:
    """Unpickled without care, it writes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("where", ["flat", "wrapped", "metadata", "peft", "twin"])
def test_a_pickle_that_asks_for_more_than_tensors(tmp_path, where, zipped):
    marker, tensors = tmp_path / "marker", tensors_of("roberta")
    evil = {**tensors, "classifier.more": AsksForMore(marker)}
    content = {
        "wrapped": {"model_state_dict": evil},
        "metadata": {"model_state_dict": tensors, "metadata": AsksForMore(marker)},
        "peft": {**as_peft(tensors), "base_model.model.x": AsksForMore(marker)},
    }.get(where, evil)
    path = tmp_path / "x.bin"
    if where == "peft":
        path = peft_folder(tmp_path / "a") / "adapter_model.bin"
        path.with_name("adapter_model.safetensors").unlink()
    elif where == "twin":
        path = tmp_path / "pytorch_model_lora.safetensors"
        write_adapter(tmp_path, adapter_of("roberta"), "release")
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    source = path.with_name("pytorch_model_lora.bin") if where == "twin" else path
    refused(lambda: read_adapter(source), path)
    assert not marker.exists()
    trap = path.rename(tmp_path / "trap.pt")
    torch.load(trap, weights_only=False)  # it works
    assert marker.exists()


# ---- metadata ----


def metadata_of(**changes: object) -> dict:
    """Sound metadata with changes; None leaves a field out."""
    metadata = INFOS["gpt2"].to_metadata() | changes
    return {key: value for key, value in metadata.items() if value is not None}


DEEP = "[" * 100_000 + "]" * 100_000
WRONG_FIELDS = {
    "rank": ("0", "-1", "2.5", '"2"', "null", "[2]", "true", "1e999", "x", "", DEEP, "9" * 400),
    "alpha": ("0", "-1", '"3"', "null", "[]", "NaN", "Infinity", "true", "", DEEP, "9" * 400),
    "targets": ("3", "null", '"query"', "[1]", '["query"', "{}", '["key"]'),
    "labels": ("3", '"no"', "[1, 2]", '{"a": "b"}', DEEP),
    "beside": ("3", "null", '"x"', "[null]"),
    "dropout": ('"x"', "[]", "-1", "2", "NaN", "true"),
    "bias": ("3", "[]", '"all"', '"some"', "null"),
    "base": ("3", "[]", '{"a": 1}', "true", "some/gpt2"),
    "base_revision": ("3", "[]"),
    "base_fingerprint": ("3", "[1]"),
    "task": ("3", "false", DEEP),
}


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field in WRONG_FIELDS for value in WRONG_FIELDS[field]],
    ids=lambda value: value[:20],
)
@pytest.mark.parametrize("form", ["lora", "release", "peft"])
def test_metadata_of_a_wrong_type(tmp_path, form, field, value):
    """It is refused by itself, although the checksum that was written with it is right."""
    tensors, metadata = tensors_of("gpt2"), metadata_of(**{field: value})
    path = tmp_path / TARGETS[form]
    if form == "release":
        write_wrapped_tensors(path, tensors, metadata)
    elif form == "lora":
        save_file(tensors, path, {**metadata, "digest": checksum(tensors, metadata)})
    else:
        write_adapter(path, adapter_of("gpt2"), "peft")
        path = path / "adapter_model.safetensors"
        tensors = load_file(path)
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        save_file(tensors, path, {**metadata, "digest": checksum(tensors, metadata)})
    refused(lambda: read_adapter(path), path)


@pytest.mark.parametrize(
    "metadata",
    [
        3,
        None,
        "rank",
        [("rank", "2")],
        metadata_of(rank=2),
        metadata_of(alpha=torch.ones(1)),
        metadata_of(targets=None),
        metadata_of(rank=None),
        metadata_of(digest="0" * 64),
        metadata_of(digest=3),
        {**metadata_of(digest="0"), 3: "x"},
        {**metadata_of(digest="0"), "who": torch.ones(1)},
        {**metadata_of(digest="0"), "who": {"knows": {1, 2}}},
    ],
)
def test_wrapped_metadata_that_is_none(tmp_path, metadata):
    content = {"model_state_dict": tensors_of("gpt2"), "metadata": metadata}
    refused_file(tmp_path, content, name="x.pt")


def test_metadata_of_others_is_let_be(tmp_path):
    content = {"model_state_dict": tensors_of("gpt2"), "metadata": {"who": "knows", "epoch": 3}}
    torch.save(content, tmp_path / "x.pt")
    assert read_adapter(tmp_path / "x.pt").info is None
    save_file(tensors_of("gpt2"), tmp_path / "x.safetensors", {"format": "pt", "who": "knows"})
    assert read_adapter(tmp_path / "x.safetensors").info is None


@pytest.mark.parametrize("field", ["rank", "targets", "bias"])
def test_metadata_that_the_tensors_contradict(tmp_path, field):
    """A checksum says that a file is as it was written, not that it is right."""
    value = {"rank": 1, "targets": ("key",), "bias": "all"}[field]
    info = replace(INFOS["roberta"], **{field: value})
    write_adapter(tmp_path / "a.safetensors", replace(adapter_of("roberta"), info=info))
    refused(
        lambda: read_adapter(tmp_path / "a.safetensors"),
        tmp_path / "a.safetensors",
        f"says {field}",
    )


@pytest.mark.parametrize("change", ["rank", "alpha", "task", "digest", "name", "value"])
@pytest.mark.parametrize("form", ["lora", "peft"])
def test_the_checksum_covers_all(tmp_path, form, change):
    write_adapter(tmp_path / TARGETS[form], adapter_of("roberta"), form)
    path = tmp_path / TARGETS[form]
    path = path if form == "lora" else path / "adapter_model.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    if change == "name":
        name = next(name for name in tensors if "classifier.dense.weight" in name)
        tensors[name.replace("dense", "dents")] = tensors.pop(name)
    elif change == "value":
        next(iter(tensors.values())).view(-1)[0] += 1
    elif change == "digest":
        del metadata["digest"]
    else:
        metadata[change] = {"rank": "4", "alpha": "4", "task": '"rte"'}[change]
    save_file(tensors, path, metadata)
    refused(lambda: read_adapter(path), path, "damaged", "checksum")


# ---- PEFT's settings ----


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("peft_type", "LOHA"),
        ("peft_type", None),
        ("r", 0),
        ("r", 2.0),
        ("r", True),
        ("r", 10**400),
        ("r", 4),
        ("lora_alpha", 0),
        ("lora_alpha", -1),
        ("lora_alpha", "3"),
        ("lora_alpha", None),
        ("lora_alpha", True),
        ("lora_alpha", math.nan),
        ("lora_alpha", math.inf),
        ("lora_alpha", 10**400),
        ("lora_dropout", 2),
        ("lora_dropout", "x"),
        ("lora_dropout", 10**400),
        ("use_rslora", 1),
        ("rank_pattern", [3]),
        ("alpha_pattern", [3]),
        ("alpha_pattern", {"query": "3"}),
        ("alpha_pattern", {"query": 10**400}),
        ("alpha_pattern", {".*query": 3}),
        ("alpha_pattern", {"a\nb": 3}),
        ("base_model_name_or_path", 3),
        ("revision", []),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", []),
        ("use_dora", True),
        ("a setting\nof tomorrow", 1),
    ],
    ids=lambda value: str(value)[:20],
)
def test_pefts_settings_that_are_not_loras(tmp_path, setting, value):
    folder = peft_folder(tmp_path / "a", **{setting: value})
    refused(lambda: read_adapter(folder), folder)


@pytest.mark.parametrize("alpha", [5e-324, 1e308, 1.7e308, 10**300], ids=lambda a: f"{a:.2g}")
@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"alpha_pattern": {"query": 1}}])
def test_an_alpha_at_the_end_of_the_numbers(tmp_path, alpha, settings):
    """Refused, or kept, but no error of arithmetic."""
    folder = peft_folder(tmp_path / "a", lora_alpha=alpha, **settings)
    try:
        adapter = read_adapter(folder)
    except CheckpointError:
        return
    assert 0 < adapter.info.alpha / adapter.info.rank < math.inf
    assert all(torch.isfinite(tensor).all() for tensor in adapter.tensors.values())


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", "null", '"x"', DEEP, '{"x":' * 5000, "\ufeff{}", "{}", "\x00"],
    ids=lambda text: ascii(text[:6]),
)
def test_settings_that_are_no_settings(tmp_path, text):
    folder = peft_folder(tmp_path / "a")
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")
    refused(lambda: read_adapter(folder), folder / "adapter_config.json")


def test_settings_in_bytes_that_are_no_text(tmp_path):
    folder = peft_folder(tmp_path / "a")
    (folder / "adapter_config.json").write_bytes(b"\xff\xfe{}")
    refused(lambda: read_adapter(folder), folder / "adapter_config.json")


@pytest.mark.parametrize("what", ["rank", "alpha"])
def test_settings_that_were_changed_after_writing(tmp_path, what):
    write_adapter(tmp_path / "a", adapter_of("roberta"), "peft")
    path = tmp_path / "a" / "adapter_config.json"
    config = json.loads(path.read_text())
    config["r" if what == "rank" else "lora_alpha"] += 1
    path.write_text(json.dumps(config))
    refused(lambda: read_adapter(tmp_path / "a"), tmp_path / "a", what)


# ---- messages ----


@pytest.mark.parametrize("name", ["a\nb.lora_A", "roberta.a\nb", "a.lora_\nC", "head\rx"])
def test_names_with_line_breaks_stay_on_one_line(tmp_path, name):
    dtype = torch.int64 if name == "head\rx" else torch.float32
    refused_file(tmp_path, {**tensors_of("roberta"), name: torch.ones(1, dtype=dtype)})


def test_metadata_with_line_breaks_stays_on_one_line(tmp_path):
    info = replace(INFOS["roberta"], base="some\nbase", task="a\r\nb")
    said = write_adapter(tmp_path / "a.bin", replace(adapter_of("roberta"), info=info))
    assert all(len(line.splitlines()) == 1 for line in said)


# ---- writing that fails ----


@pytest.mark.parametrize("name", ["a.safetensors", "a.bin", "a.pt", "peft", "new/folder"])
@pytest.mark.parametrize("there", [True, False])
def test_a_failed_write_leaves_nothing_behind(tmp_path, monkeypatch, name, there):
    form = {"peft": "peft", "new/folder": "lora"}.get(name)
    path, adapter = tmp_path / name, adapter_of("gpt2")
    if there and form is None:
        write_adapter(path, adapter)
    elif there:
        path.mkdir(parents=True)  # an empty folder may be written into
    before = {entry: (tmp_path / entry).is_file() for entry in listing(tmp_path)}
    content = path.read_bytes() if path.is_file() else None

    def fail(tensors, target, **_):
        Path(target).write_bytes(b"half of the n")
        raise OSError("no space left on device")

    monkeypatch.setattr(files, "save_file", fail)
    monkeypatch.setattr(files.torch, "save", fail)
    with pytest.raises(OSError, match="no space left"):
        write_adapter(path, adapter, form)
    after = {entry: (tmp_path / entry).is_file() for entry in listing(tmp_path)}
    assert [entry for entry, is_file in after.items() if is_file] == [
        entry for entry, is_file in before.items() if is_file
    ]
    assert not any(Path(entry).name.startswith(".") for entry in after)
    if name == "peft":
        assert after == before
    if content is not None:
        assert path.read_bytes() == content


def test_a_failed_write_of_pefts_settings_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(peft.json, "dumps", fail)
    info = AdapterInfo(rank=2, alpha=3, targets=("query", "value"))
    with pytest.raises(KeyboardInterrupt):
        write_adapter(tmp_path / "a", replace(adapter_of("roberta"), info=info), "peft")
    assert listing(tmp_path) == set()


@pytest.mark.parametrize("there", ["peft", "file", "other"])
def test_an_existing_folder_is_not_written_over(tmp_path, there):
    path = tmp_path / "a"
    if there == "peft":
        write_adapter(path, adapter_of("deberta"), "peft")
    elif there == "file":
        path.write_text("something")
    else:
        path.mkdir()
        (path / "notes.txt").write_text("something")
    before = {entry: entry.read_bytes() for entry in tmp_path.rglob("*") if entry.is_file()}
    refused(lambda: write_adapter(path, adapter_of("roberta"), "peft"), path, "exists already")
    assert {e: e.read_bytes() for e in tmp_path.rglob("*") if e.is_file()} == before
    assert listing(tmp_path) == {str(entry.relative_to(tmp_path)) for entry in before} | {"a"}


def test_write_whole_folder(tmp_path):
    with write_whole_folder(tmp_path / "new" / "a") as folder:
        assert not (tmp_path / "new" / "a").exists()
        (folder / "x").write_text("x")
    assert listing(tmp_path) == {"new", "new/a", "new/a/x"}
    assert oct((tmp_path / "new" / "a").stat().st_mode & 0o777) == oct(0o777 & ~umask())


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"embed.lora_A": drawn(2, 6), "embed.lora_B": drawn(6, 2)}, "embedding"),
        ({"transformer.wte.lora_A": drawn(2, 6), "transformer.wte.lora_B": drawn(6, 2)}, "embed"),
        (
            {
                **tensors_of("gpt2"),
                "transformer.h.0.mlp.c_fc.lora_A": drawn(2, 6),
                "transformer.h.0.mlp.c_fc.lora_B": drawn(24, 2),
            },
            "stacked updates and others",
        ),
    ],
)
def test_what_peft_cannot_hold(tmp_path, tensors, message):
    adapter = Adapter(tensors, AdapterInfo(rank=2, alpha=3, targets=("x",)), "this adapter")
    refused(lambda: write_adapter(tmp_path / "a", adapter, "peft"), "this adapter", message)
    assert listing(tmp_path) == set()


# ---- checksums of torch's files ----


@pytest.mark.parametrize("wrapped", [True, False])
def test_verify_reads_a_torch_archives_checksums(tmp_path, wrapped):
    path = tmp_path / "x.bin"
    tensors = {"a.lora_A": torch.full((2, 6), 1.5), "a.lora_B": torch.ones(6, 2)}
    torch.save({"model_state_dict": tensors} if wrapped else tensors, path)
    content = bytearray(path.read_bytes())
    content[content.index(b"\x00\x00\xc0\x3f" * 12) + 1] ^= 1
    path.write_bytes(content)
    assert read_tensors(path)[0]["a.lora_A"][0, 0] != 1.5
    refused(lambda: read_tensors(path, verify=True), path, "the checksum of x/data/")
    refused(lambda: read_adapter(path), path, "damaged")
