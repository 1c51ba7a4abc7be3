"""Tests convert.py's --info, --lora_alpha and --base: what is printed, and what does not fit."""

import json
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from bit_flips import flip_bit_in
from conversions import (
    FAMILIES,
    OUT,
    assert_same_tensors,
    for_formats,
    make_base,
    train,
    tree,
    write_weights,
)
from safetensors.torch import save_file
from torch import Tensor, nn

import loralib as lora
from conversion.description import describe
from loralib.adapters.adapter import Adapter
from loralib.adapters.formats import FORMATS, read_adapter, write_adapter
from loralib.adapters.metadata import LoraMetadata
from loralib.io.tensors import read_tensors


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("format", FORMATS)
def test_info(convert, trained, tmp_path, family, format):
    adapter, source = for_formats(trained, family, format).adapter, tmp_path / OUT[format]
    write_adapter(source, adapter, format)
    before, read = tree(tmp_path), read_adapter(source)
    printed = convert(source, "--info")
    assert tree(tmp_path) == before
    lora = sum(t.numel() for name, t in adapter.tensors.items() if "lora_" in name)
    others = sum(t.numel() for t in adapter.tensors.values()) - lora
    assert printed["first"] == f"{read.source}:"
    assert printed["format"] == format
    assert printed["parameters"] == f"{lora:,} of LoRA, {others:,} others"
    assert (
        printed["targets"]
        == {
            "roberta": "query, value, in 4 modules",
            "deberta": "query_proj, value_proj, in 4 modules",
            "gpt2": "c_attn, in 2 modules",
        }[family]
    )
    assert (printed["biases"], printed["dtype"], printed["notes"]) == ("none", "float32", [])
    if read.metadata is None:
        assert printed["alpha"] == "not recorded; give --lora_alpha"
        assert not {"base", "fingerprint", "task", "labels"} & printed.keys()
        assert convert(source, "--info", "--lora_alpha", 6)["alpha"] == "6"
        return
    assert printed["alpha"] == "6"
    assert printed["base"] == str(trained[family].base)
    assert printed["fingerprint"] == adapter.metadata.base_fingerprint
    if family != "gpt2":
        assert (printed["task"], printed["labels"], printed["dropout"]) == (
            "mnli",
            "yes, no, maybe",
            "0.1",
        )


def test_info_of_joint_training_and_of_an_unknown_model(convert, trained, tmp_path):
    adapter = trained["roberta"].adapter
    joint = replace(adapter, metadata=replace(adapter.metadata, trained_with=("apply_adapter",)))
    write_adapter(tmp_path / "a.safetensors", joint)
    assert convert(tmp_path / "a.safetensors", "--info")["with"] == "apply_adapter"
    torch.save(
        {"mine.lora_A": torch.ones(1, 3), "mine.lora_B": torch.ones(2, 1)}, tmp_path / "b.pt"
    )
    printed = convert(tmp_path / "b.pt", "--info")
    assert (printed["format"], printed["targets"]) == ("plain", "mine, in 1 modules")


def test_info_of_how_it_was_trained(convert, trained, tmp_path):
    given = trained["roberta"].adapter
    write_adapter(tmp_path / "a.safetensors", given)
    printed = convert(tmp_path / "a.safetensors", "--info")
    assert printed["variant"] == "lora"
    assert not {"initialization", "freeze_A"} & printed.keys()
    modules = [f"roberta.encoder.layer.{i}.attention.self.query" for i in range(2)]
    metadata = replace(
        given.metadata,
        variant="rslora",
        initialization="orthogonal",
        freeze_A=True,
        alpha_pattern={modules[0]: 8, modules[1]: 2.5},
    )
    write_adapter(tmp_path / "b.safetensors", replace(given, metadata=metadata))
    printed = convert(tmp_path / "b.safetensors", "--info")
    assert (printed["variant"], printed["initialization"]) == ("rslora", "orthogonal")
    assert printed["freeze_A"] == "A was frozen, only B was trained"
    assert printed["alpha"] == f"6, but 2.5 in {modules[1]}; 8 in {modules[0]}"
    assert ", but" not in printed["rank"]


def test_info_lists_all_that_metadata_hold():
    layers = [f"transformer.h.{i}.attn.c_attn" for i in range(5)]
    tensors = {f"{name}.lora_A": torch.ones(4, 8) for name in layers}
    tensors |= {f"{name}.lora_B": torch.ones(24, 2) for name in layers}
    # The initial values are no parameters.
    tensors |= {f"{name}_start": torch.ones_like(t) for name, t in tensors.items()}
    tensors["lm_head.decoder.weight"] = torch.ones(400, 1024)
    metadata = LoraMetadata(
        base="gpt2",
        base_revision="v2",
        base_fingerprint="feed",
        task="e2e",
        head="causal_lm",
        text_columns=("mr", "ref"),
        labels=("no", "yes"),
        trained_with=("apply_bitfit",),
        rank=2,
        alpha=6,
        targets=("c_attn",),
        dropout=0.1,
        bias="all",
        positions=True,
        variant="dora",
        rank_pattern=dict.fromkeys(reversed(layers), 4),
        initialization="pissa",
        slices={name: (i < 2, True, False) for i, name in enumerate(layers)},
    )
    described = describe(Adapter(tensors, metadata, format="lora"))
    assert described == {
        "format": "lora",
        "rank": f"2 (2 updates in each module), but 4 in {', '.join(layers[:4])}, … (5 modules)",
        "alpha": "6",
        "variant": "dora",
        "initialization": "pissa",
        "targets": "c_attn, in 5 modules",
        "slices": "attn.c_attn no, yes, no; attn.c_attn yes, yes, no",
        "dropout": "0.1",
        "biases": "all",
        "positions": "updated by LoRA, as in PEFT",
        "parameters": "400 of LoRA, 409,600 others",
        "size": "1.57 MiB",
        "dtype": "float32",
        "base": "gpt2",
        "revision": "v2",
        "fingerprint": "feed",
        "task": "e2e",
        "head": "causal_lm",
        "labels": "no, yes",
        "texts": "mr, ref",
        "with": "apply_bitfit",
    }
    plain = LoraMetadata(rank=4, alpha=2.5, targets=("c_attn",), positions=False)
    described = describe(Adapter({n: t for n, t in tensors.items() if "lora_" in n}, plain))
    assert described.keys() == {
        *("rank", "alpha", "variant", "targets", "biases", "positions", "parameters", "size"),
        "dtype",
    }
    assert described["alpha"] == "2.5"
    assert described["positions"] == "not updated by LoRA, as in the release"


@pytest.mark.parametrize("format", ["lora", "peft", "merged"])
@pytest.mark.parametrize("folder", [True, False])
def test_alpha_is_asked_for(failure, trained, tmp_path, format, folder):
    given = trained["roberta"]
    torch.save(given.adapter.tensors, tmp_path / "in.bin")
    target = tmp_path / ("out" if folder else OUT[format])
    line = failure(tmp_path / "in.bin", target, "--to", format, "--base", given.base)
    assert "does not record the alpha it was trained with" in line
    assert "--lora_alpha" in line


def test_release_needs_no_alpha(convert, failure, trained, tmp_path):
    given = trained["roberta"]
    torch.save(given.adapter.tensors, tmp_path / "in.bin")
    other = make_base(tmp_path / "narrow", "roberta", hidden_size=8)
    assert "(16, 16)" in failure(tmp_path / "in.bin", tmp_path / "b.bin", "--base", other)
    convert(tmp_path / "in.bin", tmp_path / "out.bin", "--base", given.base)
    assert_same_tensors(read_adapter(tmp_path / "out.bin").tensors, given.adapter.tensors)


@pytest.mark.parametrize("start", FORMATS)
@pytest.mark.parametrize("format", [*FORMATS, "merged"])
def test_another_alpha_is_refused(failure, trained, tmp_path, start, format):
    given, source = trained["gpt2"], tmp_path / f"in{OUT[start]}"
    write_adapter(source, given.adapter, start)
    flags = ("--to", format, "--base", given.base, "--lora_alpha", 8)
    line = failure(source, tmp_path / OUT[format], *flags)
    assert line.endswith(
        "was trained with alpha 6, but lora_alpha is 8: "
        "give 6, or leave lora_alpha out (--lora_alpha)"
    )


@pytest.mark.parametrize(
    ("alpha", "reason"),
    [
        *((alpha, "lora_alpha has to be above 0, not") for alpha in ("0", "-1", "nan")),
        ("inf", "lora_alpha is too large: inf"),
        ("1e40", "lora_alpha is too large: 1e+40"),
        ("1e-35", "lora_alpha is too small: 1e-35"),
    ],
)
def test_invalid_alphas_are_refused(failure, trained, tmp_path, alpha, reason):
    torch.save(trained["roberta"].adapter.tensors, tmp_path / "in.bin")
    line = failure(tmp_path / "in.bin", tmp_path / "out.safetensors", f"--lora_alpha={alpha}")
    assert reason in line
    assert line.endswith("(--lora_alpha)")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("format", FORMATS)
def test_base_is_recorded_in_the_metadata(convert, trained, tmp_path, caplog, family, format):
    given = for_formats(trained, family, format)
    metadata = replace(given.adapter.metadata, base=None, base_fingerprint=None)
    write_adapter(tmp_path / "in.safetensors", replace(given.adapter, metadata=metadata))
    printed = convert(
        *(tmp_path / "in.safetensors", tmp_path / OUT[format]), "--to", format, "--base", given.base
    )
    if format == "release" and family != "gpt2":
        assert f"not in this format: base {given.base}" in printed["notes"]
        return
    assert printed["base"] == str(given.base)
    assert printed["fingerprint"] == given.adapter.metadata.base_fingerprint
    assert read_adapter(tmp_path / OUT[format]).metadata == given.adapter.metadata
    assert f"{tmp_path / 'in.safetensors'} does not record its base's fingerprint" in caplog.text


@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_of_another_name_is_unverified(convert, trained, tmp_path, caplog, family):
    given, source = trained[family], tmp_path / "in.safetensors"
    metadata = replace(
        given.adapter.metadata, base="elsewhere", base_revision="v2", base_fingerprint=None
    )
    write_adapter(source, replace(given.adapter, metadata=metadata))
    printed = convert(source, tmp_path / "out.safetensors", "--base", given.base)
    assert printed["base"] == str(given.base)
    assert not {"fingerprint", "revision"} & printed.keys()
    assert printed["notes"] == [
        f"{source} names its base 'elsewhere', --base is '{given.base}', and no fingerprint "
        "confirms that they are the same"
    ]
    assert f"{source} does not record its base's fingerprint: cannot check" in caplog.text
    write_adapter(tmp_path / "known.safetensors", given.adapter)
    moved = shutil.copytree(given.base, tmp_path / "moved")
    known = (tmp_path / "known.safetensors", tmp_path / "b.safetensors", "--base", moved)
    assert convert(*known)["notes"] == []  # its fingerprint confirms it


@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_in_float16_is_recognized_by_an_adapter_that_was_trained_on_it(
    convert, tmp_path, caplog, family
):
    """DeBERTa-v2-xxlarge, for example, was published in float16."""
    base = make_base(tmp_path / "half", family, dtype=torch.float16)
    source, own = tmp_path / "in.safetensors", train(base, family).adapter
    write_adapter(source, replace(own, metadata=replace(own.metadata, base="elsewhere")))
    caplog.clear()
    assert convert(source, tmp_path / "a.safetensors", "--base", base)["notes"] == []
    assert caplog.messages == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_in_float16_has_no_fingerprint(convert, trained, tmp_path, caplog, family):
    """Its values are rounded, so it might be another base."""
    given, source = trained[family], tmp_path / "in.safetensors"
    base = make_base(tmp_path / "half", family, dtype=torch.float16)
    write_adapter(source, given.adapter)
    printed = convert(source, tmp_path / "a.safetensors", "--base", base)
    assert printed["fingerprint"] == given.adapter.metadata.base_fingerprint
    assert (
        f"{source}: a model in float16, or quantized or offloaded in part, has no fingerprint"
        in caplog.text
    )
    without_base = replace(given.adapter.metadata, base=None, base_fingerprint=None)
    write_adapter(source, replace(given.adapter, metadata=without_base))
    assert "fingerprint" not in convert(source, tmp_path / "b.safetensors", "--base", base)


# By what is wrong with the base: the adapter's family, the base's family, arguments of make_base,
# and parts of the error.
WRONG_BASES = {
    "roberta of another size": ("roberta", "roberta", {"hidden_size": 8}, ["(16, 16)", "(8, 8)"]),
    "deberta of another size": ("deberta", "deberta", {"hidden_size": 8}, ["(16, 16)", "(8, 8)"]),
    "gpt2 of another size": ("gpt2", "gpt2", {"n_embd": 8}, ["(48, 16)", "(24, 8)"]),
    "fewer layers": ("roberta", "roberta", {"num_hidden_layers": 1}, ["layer.1.", "has no"]),
    "fewer blocks": ("gpt2", "gpt2", {"n_layer": 1}, ["transformer.h.1.", "has no"]),
    "deberta for roberta": ("roberta", "deberta", {}, ["has no roberta."]),
    "roberta for deberta": ("deberta", "roberta", {}, ["has no deberta."]),
    "gpt2 for roberta": ("roberta", "gpt2", {}, ["gpt2"]),
    "roberta for gpt2": ("gpt2", "roberta", {}, ["its model_type is roberta, not gpt2"]),
    "another roberta": ("roberta", "roberta", {"number": 3}, ["another base", "fingerprint"]),
    "another deberta": ("deberta", "deberta", {"number": 3}, ["another base", "fingerprint"]),
    "another gpt2": ("gpt2", "gpt2", {"number": 3}, ["another base", "fingerprint", "--base"]),
    "another head": (
        *("roberta", "roberta", {"head": "classifier", "num_labels": 2}),
        ["(2,)", "(3,)", "number of labels"],
    ),
    "another activation": ("gpt2", "gpt2", {"activation_function": "relu"}, ["relu, not gelu_new"]),
}


@pytest.mark.parametrize("format", ["lora", "merged"])
@pytest.mark.parametrize("wrong", WRONG_BASES)
def test_wrong_bases(failure, trained, tmp_path, format, wrong):
    family, other, arguments, reasons = WRONG_BASES[wrong]
    arguments = dict(arguments)
    activation = arguments.pop("activation_function", None)
    base = make_base(tmp_path / "base", other, **arguments)
    if activation:
        settings = json.loads((base / "config.json").read_text())
        settings["activation_function"] = activation
        (base / "config.json").write_text(json.dumps(settings))
    write_adapter(tmp_path / "in.safetensors", trained[family].adapter)
    line = failure(
        tmp_path / "in.safetensors", tmp_path / OUT[format], "--to", format, "--base", base
    )
    for reason in reasons:
        assert reason in line


def test_labels_that_are_not_the_heads_outputs(failure, trained, tmp_path):
    given, source = trained["roberta"], tmp_path / "in.safetensors"
    metadata = replace(given.adapter.metadata, labels=("yes", "no"))
    write_adapter(source, replace(given.adapter, metadata=metadata))
    line = failure(source, tmp_path / "out", "--to", "merged", "--base", given.base)
    assert f"{source}: names 2 labels, but its head has 3 outputs" in line


@pytest.mark.parametrize("format", ["lora", "merged"])
def test_a_peft_folder_without_all_updates(failure, trained, tmp_path, format):
    given = trained["deberta as PEFT's"]
    write_adapter(tmp_path / "in", given.adapter, "peft")
    weights = tmp_path / "in" / "adapter_model.safetensors"
    tensors = read_tensors(weights)[0]
    # Without our metadata, the folder is as PEFT writes it: only the base shows what is missing.
    save_file({name: t for name, t in tensors.items() if "value_proj" not in name}, weights)
    line = failure(tmp_path / "in", tmp_path / OUT[format], "--to", format, "--base", given.base)
    assert "lacks the update of deberta.encoder.layer.0.attention.self.value_proj" in line


@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_that_was_adapted(failure, trained, tmp_path, family):
    write_adapter(tmp_path / "in.safetensors", trained[family].adapter)
    base = make_base(tmp_path / "base", family, head="lm")
    tensors = read_tensors(base / "model.safetensors")[0]
    tensors |= trained[family].adapter.tensors
    command = (tmp_path / "in.safetensors", tmp_path / "out.bin", "--base", base)
    write_weights(base, tensors, "safetensors")
    assert "LoRA weights" in failure(*command)


@pytest.mark.parametrize("switch", ["apply_lora", "apply_adapter", "apply_bitfit"])
def test_a_base_whose_settings_say_that_it_was_adapted(failure, trained, tmp_path, switch):
    write_adapter(tmp_path / "in.safetensors", trained["roberta"].adapter)
    base = make_base(tmp_path / "base", "roberta")
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**settings, switch: True}))
    line = failure(tmp_path / "in.safetensors", tmp_path / "out.bin", "--base", base)
    assert f"was itself trained with --{switch}: it is not a plain base" in line


@pytest.mark.parametrize(
    ("family", "kind"),
    [("roberta", "one"), ("roberta", "shards"), ("gpt2", "one"), ("gpt2", "file")],
)
def test_a_base_with_a_changed_value_is_not_merged_into(failure, trained, tmp_path, family, kind):
    """The base is written by torch.save, because safetensors have no checksums."""
    write_adapter(tmp_path / "in.safetensors", trained[family].adapter)
    base = make_base(tmp_path / "base", family)
    tensors = read_tensors(base / "model.safetensors")[0]
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    torch.save(tensors, base / "pytorch_model.bin")
    (base / "model.safetensors").unlink()
    flip_bit_in(base / "pytorch_model.bin", max(tensors.values(), key=Tensor.numel))
    if kind == "shards":
        index = {"weight_map": dict.fromkeys(tensors, "part.bin")}
        (base / "pytorch_model.bin").rename(base / "part.bin")
        (base / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    given = base / "pytorch_model.bin" if kind == "file" else base
    flags = ("--to", "merged", "--base", given)
    line = failure(tmp_path / "in.safetensors", tmp_path / "out", *flags)
    assert "damaged or not a checkpoint (the checksum of" in line


@pytest.mark.parametrize(
    ("base", "reason"),
    [
        ("absent/x/y", "'absent/x/y': no such folder"),
        ("empty", "has no config.json"),
        ("bare", "has no weights"),
        ("base/model.safetensors", "is a file; give the folder of a RoBERTa model"),
        ("damaged", "damaged"),
    ],
)
def test_bases_that_cannot_be_read(failure, trained, tmp_path, base, reason):
    write_adapter(tmp_path / "in.safetensors", trained["roberta"].adapter)
    folder = make_base(tmp_path / "base", "roberta")
    for name in ("empty", "bare", "damaged"):
        (tmp_path / name).mkdir()
    for name in ("bare", "damaged"):
        (tmp_path / name / "config.json").write_bytes((folder / "config.json").read_bytes())
    weights = (folder / "model.safetensors").read_bytes()
    (tmp_path / "damaged" / "model.safetensors").write_bytes(weights[:900])
    name = tmp_path / base if not base.startswith("absent") else base
    assert reason in failure(
        tmp_path / "in.safetensors", tmp_path / "out", "--to", "merged", "--base", name
    )


@pytest.mark.parametrize(
    ("format", "with_base"), [("merged", True), ("merged", False), ("lora", True)]
)
def test_a_model_of_no_known_family(convert, failure, tmp_path, format, with_base):
    """The error says at once what to do instead, and does not ask for a base."""

    def build() -> Any:
        torch.manual_seed(0)
        return nn.ModuleDict({"bert": nn.Sequential(nn.ModuleDict({"query": nn.Linear(3, 2)}))})

    adapted = build()
    lora.add_lora(adapted, "query", r=1)
    nn.init.normal_(adapted["bert"][0]["query"].lora_B)
    lora.save_adapter(adapted, tmp_path / "in")
    flags = ("--to", format, *(("--base", tmp_path) if with_base else ()))
    line = failure(tmp_path / "in", tmp_path / OUT[format], *flags)
    assert "adapts neither DeBERTa-v2, GPT-2 nor RoBERTa (bert.0.query), so its base cannot" in line
    assert ": in Python, lora.load_adapter(model, …), then lora.merge(model).save_pret" in line
    assert line.endswith("; other formats need no --base")
    model, x = build(), torch.ones(1, 3)
    lora.load_adapter(model, tmp_path / "in")
    merged = lora.merge(model)["bert"][0]["query"]
    torch.testing.assert_close(merged(x), adapted["bert"][0]["query"](x))
    assert convert(tmp_path / "in", tmp_path / OUT["lora"], "--to", "lora")["format"] == "lora"


def test_an_unknown_models_adapter_that_a_format_cannot_hold_is_merged_in_python(failure, tmp_path):
    model = nn.ModuleDict({"words": nn.Embedding(3, 2)})
    lora.add_lora(model, "words", r=1)
    nn.init.normal_(model["words"].lora_A)
    lora.save_adapter(model, tmp_path / "in.safetensors")
    line = failure(tmp_path / "in.safetensors", tmp_path / "out.bin")
    assert "; merge it into its base (in Python, lora.load_adapter(model, …), then lora.mer" in line
