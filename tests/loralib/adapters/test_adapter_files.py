"""Tests of an adapter's files and folders: sidecars, refused folders, and failed writes."""

import json
from dataclasses import replace
from pathlib import Path

import all_families  # noqa: F401
import pytest
import torch
from adapter_files import INFOS, adapter_of, listing, peft_folder, refused, tensors_of
from compare import assert_same_bits

import loralib as lora
from loralib.adapters.formats import read_adapter, write_adapter
from loralib.errors import CheckpointError
from loralib.io import tensors as tensor_files
from loralib.io.tensors import read_tensors


@pytest.mark.parametrize("name", ["pytorch_model_lora.safetensors", "pytorch_model_lora.bin"])
def test_in_a_folder_an_adapters_file_has_the_name_of_a_runs_file(tmp_path, name):
    format = "lora" if name.endswith("safetensors") else "release"
    write_adapter(tmp_path / "new" / "folder", adapter_of("roberta"), format)
    assert listing(tmp_path / "new" / "folder") == {name}
    assert_same_bits(read_adapter(tmp_path / "new" / "folder").tensors, tensors_of("roberta"))


@pytest.mark.parametrize(
    ("name", "format"),
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
def test_a_name_that_does_not_fit_the_format_is_refused(tmp_path, name, format):
    refused(lambda: write_adapter(tmp_path / name, adapter_of("roberta"), format), tmp_path / name)
    assert listing(tmp_path) == set()


@pytest.mark.parametrize("family", ["roberta", "deberta"])
def test_the_sidecar_holds_what_the_releases_format_cannot(tmp_path, family):
    adapter = adapter_of(family)
    write_adapter(tmp_path, adapter, "release")
    path = tmp_path / "pytorch_model_lora.bin"
    assert read_adapter(path).metadata is None
    write_adapter(tmp_path, adapter, "lora")
    assert read_adapter(path).metadata == INFOS[family]
    assert read_adapter(path).format == "release"
    assert read_adapter(tmp_path).format == "lora"
    refused(lambda: read_adapter(path, lora_alpha=4), path, "alpha 3")
    path.rename(tmp_path / "other.bin")
    assert read_adapter(tmp_path / "other.bin").metadata is None


@pytest.mark.parametrize("other", ["value", "shape", "dtype", "less", "more"])
def test_a_sidecar_with_other_tensors_is_not_used(tmp_path, other):
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
            "dtype": tensors[last].double(),
        }[other]
    write_adapter(tmp_path, replace(adapter, tensors=tensors), "lora")
    assert read_adapter(tmp_path / "pytorch_model_lora.bin").metadata is None


def test_a_sidecar_with_a_wrong_checksum_is_an_error(tmp_path):
    write_adapter(tmp_path, adapter_of("roberta"), "release")
    write_adapter(tmp_path, adapter_of("roberta"), "lora")
    sidecar = tmp_path / "pytorch_model_lora.safetensors"
    content = bytearray(sidecar.read_bytes())
    content[-1] ^= 1
    sidecar.write_bytes(content)
    refused(lambda: read_adapter(tmp_path / "pytorch_model_lora.bin"), sidecar, "damaged")


@pytest.mark.parametrize("format", ["lora", "release"])
def test_in_a_folder_with_two_adapters_one_must_be_named(tmp_path, format):
    folder = peft_folder(tmp_path / "both", base_model_name_or_path="theirs")
    write_adapter(folder, adapter_of("roberta"), format)
    (own,) = (path for path in folder.iterdir() if path.name.startswith("pytorch_model_lora"))
    refused(lambda: read_adapter(folder), folder, own.name, "adapter_config.json", "name one")
    assert read_adapter(own).format == format
    assert read_adapter(folder / "adapter_config.json").metadata.base == "theirs"


@pytest.mark.parametrize("name", ["a.pth", "a.ckpt", "a.safetensor", "a.SAFETENSORS", "a.json"])
def test_a_folder_with_a_files_suffix_is_refused(tmp_path, name):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    lora.add_lora(model, "0", r=2)
    refused(lambda: lora.save_adapter(model, tmp_path / name), tmp_path / name, "has to end in")
    assert listing(tmp_path) == set()
    refused(lambda: read_adapter(name), name, "no such checkpoint file")  # without asking the hub
    for folder in ("v1.5", "run.final"):
        lora.save_adapter(model, tmp_path / folder)
        assert (tmp_path / folder / "adapter_config.json").is_file()


def test_folders_without_an_adapter_are_refused(tmp_path):
    refused(lambda: read_adapter(tmp_path), tmp_path, "holds no adapter")
    others = {
        "optimizer.pt": {"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": []},
        "resume.pt": {"step": 3, "model": {"a.lora_A": torch.zeros(2, 3)}},
        "training_args.bin": {"lora_r": 8},
        "model.pt": {"a.weight": torch.zeros(2)},
    }
    for name, value in others.items():
        torch.save(value, tmp_path / name)
    (tmp_path / "rng.pt").write_text("lora_A")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json$"):
        read_adapter(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    torch.save({"a.lora_A": torch.zeros(2, 3), "a.lora_B": torch.zeros(3, 2)}, tmp_path / "5.pt")
    write_adapter(tmp_path / "model.10.safetensors", adapter_of("roberta"))
    hint = "; if you mean 5.pt, model.10.safetensors, give that file"
    refused(lambda: read_adapter(tmp_path), tmp_path, "holds no adapter", hint)
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


def test_a_shard_of_a_model_is_not_an_adapter(tmp_path):
    write_adapter(tmp_path / "model-1.bin", adapter_of("roberta"))
    index = {"weight_map": {"roberta.x": "model-1.bin", "roberta.y": "model-2.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    shard = tmp_path / "model-1.bin"
    refused(lambda: read_adapter(shard), shard, "is one shard of a model", "give the folder")
    with pytest.raises(CheckpointError) as raised:
        read_adapter(tmp_path)
    assert "model-1" not in str(raised.value)
    for content in (
        "{",
        json.dumps({"weight_map": {"roberta.x": "model-1.bin"}}),
    ):  # not one of several
        (tmp_path / "pytorch_model.bin.index.json").write_text(content)
        read_adapter(shard)


@pytest.mark.parametrize("name", ["a.safetensors", "a.bin", "a.pt", "peft", "new/folder"])
@pytest.mark.parametrize("there", [True, False])
def test_a_failed_write_leaves_nothing_behind(tmp_path, monkeypatch, name, there):
    format = {"peft": "peft", "new/folder": "lora"}.get(name)
    path, adapter = tmp_path / name, adapter_of("gpt2")
    if there and format is None:
        write_adapter(path, adapter)
    elif there:
        path.mkdir(parents=True)  # an empty folder may be written into
    before = {entry: (tmp_path / entry).is_file() for entry in listing(tmp_path)}
    content = path.read_bytes() if path.is_file() else None

    def fail(tensors, target, **_):
        if hasattr(target, "write"):
            target.write(b"half of the n")
        else:
            Path(target).write_bytes(b"half of the n")
        raise OSError("no space left on device")

    monkeypatch.setattr(tensor_files, "save_file", fail)
    monkeypatch.setattr(tensor_files.torch, "save", fail)
    with pytest.raises(OSError, match="no space left"):
        write_adapter(path, adapter, format)
    after = {entry: (tmp_path / entry).is_file() for entry in listing(tmp_path)}
    assert [entry for entry, is_file in after.items() if is_file] == [
        entry for entry, is_file in before.items() if is_file
    ]
    assert not any(Path(entry).name.startswith(".") for entry in after)
    if name == "peft":
        assert after == before
    if content is not None:
        assert path.read_bytes() == content


@pytest.mark.parametrize("there", ["peft", "file", "other"])
def test_an_existing_folder_is_not_overwritten(tmp_path, there):
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
