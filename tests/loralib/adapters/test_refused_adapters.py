"""Tests that invalid or contradictory adapters, and other files, are refused in one line."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import all_families  # noqa: F401
import pytest
import torch
from adapter_files import (
    INFOS,
    MODULES,
    TARGETS,
    adapter_of,
    as_peft,
    drawn,
    peft_folder,
    refused,
    refused_file,
    tensors_of,
    user_model,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from loralib.adapters.checksums import checksum
from loralib.adapters.formats import read_adapter, write_adapter
from loralib.io.tensors import write_wrapped_tensors

# ---- models, and invalid tensors ----


def test_a_full_model_of_a_registered_family_is_refused(tmp_path):
    query = "roberta.encoder.layer.0.attention.self.query"
    for extra in (f"{query}.weight", "roberta.embeddings.word_embeddings.weight"):
        tensors = {**tensors_of("roberta"), extra: drawn(6, 6)}
        refused_file(tmp_path, tensors, "full model", extra, "with save_adapter")
    tensors = {**tensors_of("gpt2"), "transformer.wte.weight": drawn(9, 6)}
    refused_file(tmp_path, {"model_state_dict": tensors}, "full model", "with save_adapter")


def test_a_whole_model_of_no_registered_family_is_refused(tmp_path):
    """Its frozen weights would replace those to which the update belongs."""
    torch.save(user_model().state_dict(), tmp_path / "x.bin")
    path = tmp_path / "x.bin"
    refused(lambda: read_adapter(path, lora_alpha=8), path, "holds a full model, not LoRA alone")


def save_in_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Writes tensors as a large model's: in two shards with an index."""
    weight_map = {}
    for number, name in enumerate(sorted(tensors)):
        file = f"model-0000{number % 2 + 1}-of-00002.safetensors"
        weight_map[name] = file
        of_file = {n: t for n, t in tensors.items() if weight_map.get(n) == file}
        save_file(of_file, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_the_error_says_if_a_folder_holds_a_model_without_lora(tmp_path):
    """This is only known if all its files can be read and none of them holds LoRA."""
    base = {f"roberta.encoder.layer.{n}.output.dense.weight": drawn(6, 6) for n in range(3)}
    (tmp_path / "config.json").write_text("{}")
    refused(lambda: read_adapter(tmp_path), tmp_path, "holds no adapter")
    save_in_shards(tmp_path, base)
    refused(lambda: read_adapter(tmp_path), tmp_path, "is a model without LoRA, not an adapter")
    save_in_shards(tmp_path, {**base, **tensors_of("roberta")})
    refused(lambda: read_adapter(tmp_path), tmp_path, "holds no adapter")
    save_in_shards(tmp_path, base)
    torch.save(base, tmp_path / "pytorch_model.bin")
    for source in (tmp_path, tmp_path / "pytorch_model.bin"):
        refused(partial(read_adapter, source), source, "is a model without LoRA, not an adapter")
    (tmp_path / "pytorch_model.bin").write_bytes(b"damaged")
    refused(lambda: read_adapter(tmp_path), tmp_path, "holds no adapter")


QUERY = MODULES["roberta"][0]
A, B = f"{QUERY}.lora_A", f"{QUERY}.lora_B"
INVALID = {
    "no A": ({A: None}, f"lacks {A}"),
    "no B": ({B: None}, f"lacks {B}"),
    "two ranks": ({A: drawn(3, 6), B: drawn(6, 3)}, "2 ranks: 2 ("),
    "A too short": ({A: drawn(1, 6)}, f"of {QUERY} do not belong together"),
    "A not whole": ({A: drawn(3, 6)}, f"of {QUERY} do not belong together"),
    "A empty": ({A: torch.zeros(0, 6), B: torch.zeros(6, 0)}, "do not belong together"),
    "no columns": ({A: torch.zeros(2, 0)}, "do not belong together"),
    "B of 1-D": ({B: drawn(6)}, "do not belong together"),
    "A of 3-D": ({A: drawn(2, 3, 2)}, "do not belong together"),
    "stacked kernels": ({A: drawn(4, 3, 2), B: drawn(6, 2, 1)}, "do not belong together"),
    "a kernel in B": ({A: drawn(2, 3, 2), B: drawn(6, 2, 2)}, "do not belong together"),
    "integers": ({A: torch.ones(2, 6, dtype=torch.int64)}, f"{A} is of torch.int64"),
    "an integer head": ({"head.x": torch.ones(3, dtype=torch.int8)}, "head.x is of torch.int8"),
    "bytes": ({"head.x": torch.ones(3, dtype=torch.uint8)}, "head.x is of torch.uint8"),
    "complex": ({B: torch.ones(6, 2, dtype=torch.complex64)}, f"{B} is of torch.complex64"),
    "float8": ({A: torch.ones(2, 6).to(torch.float8_e4m3fn)}, f"{A}"),
    "not a number": ({B: drawn(6, 2).fill_(math.nan)}, f"{B} holds values that are not finite"),
    "infinite": (
        {"classifier.dense.bias": torch.tensor([1, -math.inf])},
        "classifier.dense.bias holds values that are not finite",
    ),
    "another name": ({f"{QUERY}.lora_C": drawn(2, 6)}, "lora_C is not the name"),
    "an embedding's": ({f"{QUERY}.lora_embedding_A": drawn(2, 6)}, "lora_embedding_A"),
}


def changed(tensors: Mapping[str, Tensor], changes: Mapping[str, Tensor | None]) -> dict:
    merged = {**tensors, **changes}
    return {name: tensor for name, tensor in merged.items() if tensor is not None}


@pytest.mark.parametrize("format", ["a.bin", "wrapped.pt", "legacy.bin", "a.safetensors", "peft"])
@pytest.mark.parametrize("case", INVALID)
def test_invalid_tensors_are_refused(tmp_path, case, format):
    changes, message = INVALID[case]
    tensors, path = changed(tensors_of("roberta"), changes), tmp_path / format
    if format == "peft":
        peft_folder(path, as_peft(tensors))
        path = path / "adapter_model.safetensors"
        message = {"two ranks": "rank is 3", "an embedding's": "two names"}.get(case, message)
    elif format.endswith("safetensors"):
        save_file(tensors, path)
    else:
        if format == "legacy.bin" and case == "float8":
            message = "legacy.bin"  # torch's older format does not support float8
        content = {"model_state_dict": tensors} if format == "wrapped.pt" else tensors
        torch.save(content, path, _use_new_zipfile_serialization=format != "legacy.bin")
    refused(lambda: read_adapter(path), path, message)


@pytest.mark.parametrize("rows", [4, 6, 12])
def test_pefts_updates_cannot_be_stacked(tmp_path, rows):
    """In our format, a lora_A of a higher rank than lora_B's means several updates."""
    tensors = as_peft(changed(tensors_of("roberta"), {A: drawn(rows, 6)}))
    folder = peft_folder(tmp_path / "a", tensors)
    refused(lambda: read_adapter(folder), folder, QUERY)


NOT_DENSE = {
    "sparse": lambda: torch.eye(6).to_sparse(),
    "compressed": lambda: torch.eye(6).to_sparse_csr(),
    "expanded": lambda: torch.ones(1).expand(2, 6),
    "expanded far": lambda: torch.ones(1).expand(2**40, 2**10),
    "expanded, of more values": lambda: torch.ones(12)[:6].expand(2, 6),
    "overlapping": lambda: torch.ones(12).as_strided((2, 6), (5, 1)),
    "meta": lambda: torch.empty(2, 6, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2, 6), 0.1, 0, torch.qint8),
}


@pytest.mark.parametrize("name", ["x.bin", "x.pt", "peft"])
@pytest.mark.parametrize("what", NOT_DENSE)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_whose_values_are_not_all_in_the_file_are_refused(tmp_path, what, name):
    tensor = NOT_DENSE[what]()
    if name == "peft":
        key = "base_model.model.classifier.dense.weight"
        tensors = {**as_peft(tensors_of("roberta")), key: tensor}
        path = peft_folder(tmp_path / name, tensors, torch_file=True) / "adapter_model.bin"
        refused(lambda: read_adapter(path), path)
        return
    tensors = {**tensors_of("roberta"), "classifier.dense.weight": tensor}
    content = {"model_state_dict": tensors} if name.endswith("pt") else tensors
    refused_file(tmp_path, content, name=name)


class MakesFolder:
    """Unpickling this makes a folder, unless only tensors are allowed."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("where", ["flat", "wrapped", "metadata", "peft", "sidecar"])
def test_a_pickle_that_calls_functions_is_refused(tmp_path, where, zipped):
    marker, tensors = tmp_path / "marker", tensors_of("roberta")
    evil = {**tensors, "classifier.more": MakesFolder(marker)}
    content = {
        "wrapped": {"model_state_dict": evil},
        "metadata": {"model_state_dict": tensors, "metadata": MakesFolder(marker)},
        "peft": {**as_peft(tensors), "base_model.model.x": MakesFolder(marker)},
    }.get(where, evil)
    path = tmp_path / "x.bin"
    if where == "peft":
        path = peft_folder(tmp_path / "a") / "adapter_model.bin"
        path.with_name("adapter_model.safetensors").unlink()
    elif where == "sidecar":
        path = tmp_path / "pytorch_model_lora.safetensors"
        write_adapter(tmp_path, adapter_of("roberta"), "release")
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    source = path.with_name("pytorch_model_lora.bin") if where == "sidecar" else path
    refused(lambda: read_adapter(source), path)
    assert not marker.exists()
    trap = path.rename(tmp_path / "trap.pt")
    torch.load(trap, weights_only=False)  # the trap works
    assert marker.exists()


# ---- metadata ----


def metadata_of(**changes: object) -> dict:
    """Valid metadata with changes; None leaves a field out."""
    metadata = INFOS["gpt2"].to_metadata() | changes
    return {key: value for key, value in metadata.items() if value is not None}


DEEP = "[" * 100_000 + "]" * 100_000
WRONG_FIELDS = {
    "rank": ("0", "-1", "2.5", '"2"', "null", "[2]", "true", "1e999", "x", "", DEEP, "9" * 400),
    "alpha": ("0", "-1", '"3"', "null", "[]", "NaN", "Infinity", "true", "", DEEP, "9" * 400),
    "targets": ("3", "null", '"query"', "[1]", '["query"', "{}", '["key"]'),
    "labels": ("3", '"no"', "[1, 2]", '{"a": "b"}', DEEP),
    "trained_with": ("3", "null", '"x"', "[null]"),
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
@pytest.mark.parametrize("format", ["lora", "release", "peft"])
def test_metadata_with_invalid_fields_are_refused(tmp_path, format, field, value):
    """They are refused although the checksum is right."""
    tensors, metadata = tensors_of("gpt2"), metadata_of(**{field: value})
    path = tmp_path / TARGETS[format]
    if format == "release":
        write_wrapped_tensors(path, tensors, metadata)
    elif format == "lora":
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
def test_invalid_metadata_of_a_wrapped_file_is_refused(tmp_path, metadata):
    content = {"model_state_dict": tensors_of("gpt2"), "metadata": metadata}
    refused_file(tmp_path, content, name="x.pt")


def test_metadata_of_other_programs_is_ignored(tmp_path):
    content = {"model_state_dict": tensors_of("gpt2"), "metadata": {"who": "knows", "epoch": 3}}
    torch.save(content, tmp_path / "x.pt")
    assert read_adapter(tmp_path / "x.pt").metadata is None
    save_file(tensors_of("gpt2"), tmp_path / "x.safetensors", {"format": "pt", "who": "knows"})
    assert read_adapter(tmp_path / "x.safetensors").metadata is None


@pytest.mark.parametrize("field", ["rank", "targets", "bias"])
def test_metadata_that_contradict_the_tensors_are_refused(tmp_path, field):
    """A checksum only shows that a file is as it was written."""
    value = {"rank": 1, "targets": ("key",), "bias": "all"}[field]
    info = replace(INFOS["roberta"], **{field: value})
    path, adapter = tmp_path / "a.safetensors", replace(adapter_of("roberta"), metadata=info)
    refused(lambda: write_adapter(path, adapter), adapter.source, f"says {field}")
    metadata = info.to_metadata()
    save_file(adapter.tensors, path, {**metadata, "digest": checksum(adapter.tensors, metadata)})
    refused(lambda: read_adapter(path), path, f"says {field}")


def test_an_adapter_that_could_not_be_read_again_is_not_written(tmp_path):
    adapter = adapter_of("roberta")
    inf = {**adapter.tensors, A: torch.full((2, 6), math.inf)}
    invalid = {
        "alpha nan": replace(adapter, metadata=replace(adapter.metadata, alpha=math.nan)),
        "dropout 2": replace(adapter, metadata=replace(adapter.metadata, dropout=2)),
        "not finite": replace(adapter, tensors=inf),
    }
    for message, one in invalid.items():
        refused(partial(write_adapter, tmp_path / "a.safetensors", one), adapter.source, message)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("missing", ["a module of a layer", "the head"])
def test_a_peft_folder_without_some_tensors_is_refused(tmp_path, missing):
    tensors = as_peft(tensors_of("roberta"))
    start = (
        f"base_model.model.{QUERY}." if missing == "a module of a layer" else "base_model.model.cl"
    )
    remaining = {name: tensor for name, tensor in tensors.items() if not name.startswith(start)}
    assert len(remaining) < len(tensors)
    folder = peft_folder(tmp_path / "a", remaining, modules_to_save=["classifier", "score"])
    refused(lambda: read_adapter(folder), folder, "lacks")


@pytest.mark.parametrize("change", ["rank", "alpha", "task", "digest", "name", "value"])
@pytest.mark.parametrize("format", ["lora", "peft"])
def test_changed_names_values_or_metadata_are_detected(tmp_path, format, change):
    write_adapter(tmp_path / TARGETS[format], adapter_of("roberta"), format)
    path = tmp_path / TARGETS[format]
    path = path if format == "lora" else path / "adapter_model.safetensors"
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


INVALID_SETTINGS = {
    "peft_type": ["LOHA"],
    "r": [0, 2.0, True, None, 10**400],
    "lora_alpha": [0, -1, "3", None, True, math.nan, math.inf, 10**400],
    "lora_dropout": [2, "x", 10**400],
    "use_rslora": [1, "yes"],
    "use_dora": [1, "yes"],
    "rank_pattern": [[3], {"query": 0}, {"query": 2.0}, {"*": 2}],
    "alpha_pattern": [[3], {"query": "3"}, {"query": -1}, {"query": 10**400}, {"(query": 3}],
    "base_model_name_or_path": [3],
    "revision": [["main"]],
    "init_lora_weights": ["pissa", "pissa_niter_4", 1.5, []],
    "lora_bias": [True],
    "layer_replication": [[[0, 2], [1, 2]]],
    "trainable_token_indices": [[5]],
}


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        *(
            (name, value, f"adapter_config.json: {name} is ")
            for name, values in INVALID_SETTINGS.items()
            for value in values
        ),
        ("peft_type", None, "no peft_type"),
        ("r", 4, f"its rank is 2 ({QUERY}), but"),
        ("rank_pattern", {"query": 4}, f"its rank is 2 ({QUERY}), but"),
        ("alpha_pattern", {"a\n[b": 3}, "alpha_pattern is "),
        ("init_lora_weights", "olora", "is 'olora', which changes the base's weights"),
        ("use_dora", True, f"{QUERY}.lora_magnitude_vector, which LoRA of the variant dora"),
        ("of_the_future", {"a": 1}, "of_the_future is {'a': 1}, which plain LoRA does not have"),
        ("a setting\nof tomorrow", 1, "of tomorrow is 1, which plain LoRA does not have"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_invalid_or_unsupported_peft_settings_are_refused(tmp_path, setting, value, message):
    folder = peft_folder(tmp_path / "a", **{setting: value})
    refused(lambda: read_adapter(folder), folder, message)


@pytest.mark.parametrize(
    ("alpha", "is_refused"),
    [(5e-324, True), (1e-30, False), (1e30, False), (1.7e308, True), (10**300, True)],
    ids=lambda value: f"{value:.2g}",
)
@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"alpha_pattern": {"query": 1}}])
def test_an_alpha_is_refused_if_its_scaling_could_be_infinite_or_zero(
    tmp_path, alpha, is_refused, settings
):
    folder = peft_folder(tmp_path / "a", lora_alpha=alpha, **settings)
    if is_refused:
        refused(lambda: read_adapter(folder), folder, "lora_alpha is ")
        return
    adapter = read_adapter(folder)
    assert 0 < adapter.metadata.alpha / adapter.metadata.rank < math.inf
    assert all(torch.isfinite(tensor).all() for tensor in adapter.tensors.values())


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", "null", '"x"', DEEP, '{"x":' * 5000, "\ufeff{}", "{}", "\x00"],
    ids=lambda text: ascii(text[:6]),
)
def test_a_config_without_settings_is_refused(tmp_path, text):
    folder = peft_folder(tmp_path / "a")
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")
    refused(lambda: read_adapter(folder), folder / "adapter_config.json", "not PEFT's settings")


def test_a_config_that_is_not_utf_8_is_refused(tmp_path):
    folder = peft_folder(tmp_path / "a")
    (folder / "adapter_config.json").write_bytes(b"\xff\xfe{}")
    refused(lambda: read_adapter(folder), folder / "adapter_config.json")


# ---- messages ----


@pytest.mark.parametrize("name", ["a\nb.lora_A", "roberta.a\nb", "a.lora_\nC", "head\rx"])
def test_names_with_line_breaks_stay_on_one_line(tmp_path, name):
    dtype = torch.int8 if name == "head\rx" else torch.float32
    refused_file(tmp_path, {**tensors_of("roberta"), name: torch.ones(1, dtype=dtype)})


def test_metadata_with_line_breaks_stays_on_one_line(tmp_path):
    info = replace(INFOS["roberta"], base="some\nbase", task="a\r\nb")
    remarks = write_adapter(tmp_path / "a.bin", replace(adapter_of("roberta"), metadata=info))
    assert all(len(line.splitlines()) == 1 for line in remarks)
