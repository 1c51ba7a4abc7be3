"""Adapter files: what goes in comes out to the bit, what does not fit is refused, whole files."""

import json
import os
import random
import re
import stat
from dataclasses import replace

import all_families  # noqa: F401
import pytest
import torch
from compare import assert_close_to_rounding, assert_same_bits
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import loralib as lora
from loralib.adapters.adapter import Adapter, adapter_tensors
from loralib.adapters.canonical import canonical_names
from loralib.adapters.checksums import checksum
from loralib.adapters.fingerprint import fingerprint
from loralib.adapters.formats import read_adapter, write_adapter
from loralib.adapters.loading import load_into, lora_layers
from loralib.adapters.metadata import LoraMetadata
from loralib.adapters.names import lora_targets
from loralib.errors import CheckpointError, WrongBaseError
from loralib.io.atomic import atomic_write
from loralib.io.tensors import read_tensors, write_tensors

FORMATS = ("lora.bin", "lora.pt", "lora.safetensors")


class Layer(nn.Module):
    def __init__(self, targets, rank, alpha):
        super().__init__()
        for name in ("query", "key", "value"):
            linear = lora.Linear(8, 8, r=rank if name in targets else 0, lora_alpha=alpha)
            setattr(self, name, linear)


class Tiny(nn.Module):
    """A backbone of two layers under `roberta.`, and a head outside."""

    def __init__(self, targets=("query", "value"), rank=2, alpha=4, labels=3, seed=0):
        super().__init__()
        self.roberta = nn.ModuleDict(
            {"layer": nn.ModuleList(Layer(targets, rank, alpha) for _ in "ab")}
        )
        self.classifier = nn.Linear(8, labels)
        torch.manual_seed(seed)
        for parameter in self.parameters():
            parameter.data.normal_()


INFO = LoraMetadata(
    rank=2,
    alpha=4.0,
    targets=("query", "value"),
    base="some/base",
    base_fingerprint="0123456789abcdef",
    task="mnli",
    labels=("entailment", "neutral", "contradiction"),
)
A = "roberta.layer.0.query.lora_A"


def tiny_adapter(metadata=INFO, **settings):
    return Adapter(adapter_tensors(Tiny(**settings).state_dict()), metadata, "lora file")


def refuses(model, adapter, *parts, **arguments):
    """`load_into` raises one line that holds all of `parts`, and the model stays as it was."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_into(model, adapter, **arguments)
    text = str(caught.value)
    assert "\n" not in text
    assert adapter.source in text
    for part in parts:
        assert part in text
    assert_same_bits(model.state_dict(), before)


# ---- files ----


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_round_trip_keeps_every_bit(tmp_path, name, dtype):
    tensors = {key: tensor.to(dtype) for key, tensor in tiny_adapter().tensors.items()}
    special = torch.tensor(
        [[-0.0, torch.finfo(dtype).max, torch.finfo(dtype).tiny / 4]], dtype=dtype
    )
    tensors["head.special"] = special
    write_adapter(tmp_path / name, Adapter(tensors, INFO))
    loaded = read_adapter(tmp_path / name)
    bits = loaded.tensors.pop("head.special").view(torch.uint8)
    assert torch.equal(bits, tensors.pop("head.special").view(torch.uint8))
    assert_same_bits(loaded.tensors, tensors)
    assert loaded.metadata == (INFO if name.endswith("safetensors") else None)
    assert loaded.source == str(tmp_path / name)


@pytest.mark.parametrize("name", FORMATS)
def test_views_are_saved_without_the_tensor_they_look_into(tmp_path, name):
    large = torch.randn(1000, 64)
    tensors = {"a.lora_A": large[:2], "a.lora_B": large[5:9].t(), "b.lora_A": large[:2]}
    write_tensors(tmp_path / name, tensors)
    assert_same_bits(read_tensors(tmp_path / name)[0], tensors)
    assert (tmp_path / name).stat().st_size < 10_000


def test_form_is_told_by_content(tmp_path):
    adapter = tiny_adapter()
    write_adapter(tmp_path / "a.safetensors", adapter)
    (tmp_path / "a.safetensors").rename(tmp_path / "a.bin")
    assert_same_bits(read_adapter(tmp_path / "a.bin").tensors, adapter.tensors)
    assert read_adapter(tmp_path / "a.bin").metadata == INFO


@pytest.mark.parametrize("zipped", [True, False])
def test_the_releases_form(tmp_path, zipped):
    tensors = tiny_adapter().tensors
    torch.save(tensors, tmp_path / "release.bin", _use_new_zipfile_serialization=zipped)
    loaded = read_adapter(tmp_path / "release.bin")
    assert_same_bits(loaded.tensors, tensors)
    assert loaded.metadata is None
    write_adapter(tmp_path / "ours.bin", Adapter(tensors, INFO))
    assert_same_bits(torch.load(tmp_path / "ours.bin", weights_only=True), tensors)


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_saved_on_a_gpu_come_to_the_cpu(monkeypatch, tmp_path, zipped):
    tensors, path = tiny_adapter().tensors, tmp_path / "gpu.bin"
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        torch.save(tensors, path, _use_new_zipfile_serialization=zipped)
    assert b"cuda:0" in path.read_bytes()
    assert_same_bits(read_adapter(path).tensors, tensors)


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_may_be_written_over_while_it_is_in_use(tmp_path, name):
    first, second = tiny_adapter(seed=1), tiny_adapter(seed=2)
    write_adapter(tmp_path / name, first)
    loaded = read_adapter(tmp_path / name)
    write_adapter(tmp_path / name, second)
    assert_same_bits(loaded.tensors, first.tensors)
    write_adapter(tmp_path / name, loaded)
    assert_same_bits(read_adapter(tmp_path / name).tensors, first.tensors)


def test_wrapped_tensors(tmp_path):
    tensors = tiny_adapter().tensors
    torch.save({"model_state_dict": tensors}, tmp_path / "wrapped.pt")
    assert_same_bits(read_adapter(tmp_path / "wrapped.pt").tensors, tensors)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.zeros(1)], "holds something else than named tensors"),
        ({"a": 1}, "holds something else than named tensors"),
        ({1: torch.zeros(1)}, "holds something else than named tensors"),
        ({"model_state_dict": {"a": "b"}}, "holds something else than named tensors"),
        ({"a": torch.zeros(1)}, "none of its 1 tensors is LoRA's"),
        ({}, "none of its 0 tensors is LoRA's"),
        (nn.Linear(2, 2), "not loaded for safety"),
    ],
)
def test_files_that_hold_no_adapter(tmp_path, content, message):
    torch.save(content, tmp_path / "x.bin")
    with pytest.raises(CheckpointError, match=f"x.bin: .*{message}"):
        read_adapter(tmp_path / "x.bin")


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"none.bin: no such checkpoint file"):
        read_adapter(tmp_path / "none.bin")
    with pytest.raises(
        CheckpointError,
        match=r"holds no adapter: none of pytorch_model_lora.safetensors, pytorch_model_lora.bin",
    ):
        read_adapter(tmp_path)
    with pytest.raises(CheckpointError, match="no such checkpoint file"):
        read_tensors(tmp_path)


def test_a_checkpoints_folder(tmp_path):
    write_adapter(tmp_path / "pytorch_model_lora.bin", tiny_adapter(seed=1))
    assert read_adapter(tmp_path).metadata is None
    write_adapter(tmp_path / "pytorch_model_lora.safetensors", tiny_adapter(seed=2))
    loaded = read_adapter(str(tmp_path))
    assert loaded.metadata == INFO
    assert loaded.source == str(tmp_path / "pytorch_model_lora.safetensors")
    assert_same_bits(loaded.tensors, tiny_adapter(seed=2).tensors)


# ---- metadata ----


def test_metadata_is_json_by_field(tmp_path):
    write_adapter(tmp_path / "a.safetensors", tiny_adapter())
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        metadata = file.metadata()
    assert metadata.pop("format") == "pt"
    assert len(metadata.pop("digest")) == 64
    assert {key: json.loads(value) for key, value in metadata.items()} == {
        "rank": 2,
        "alpha": 4.0,
        "targets": ["query", "value"],
        "bias": "none",
        "base": "some/base",
        "base_fingerprint": "0123456789abcdef",
        "task": "mnli",
        "labels": ["entailment", "neutral", "contradiction"],
    }


def test_what_is_not_known_is_not_said(tmp_path):
    info = LoraMetadata(rank=2, alpha=16, targets=("query", "value"))
    assert info.to_metadata().keys() == {"rank", "alpha", "targets", "bias"}
    write_adapter(tmp_path / "a.safetensors", tiny_adapter(info))
    assert read_adapter(tmp_path / "a.safetensors").metadata == info


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt", "task": '"rte"', "who": "knows"}])
def test_files_without_an_info(tmp_path, metadata):
    save_file(tiny_adapter().tensors, tmp_path / "a.safetensors", metadata)
    assert read_adapter(tmp_path / "a.safetensors").metadata is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rank": "two"}, "its metadata is damaged"),
        ({"rank": None}, "its metadata is damaged"),
        ({"alpha": None}, "its metadata is damaged"),
        ({"targets": "3"}, "its metadata is damaged"),
        ({"labels": "true"}, "its metadata is damaged"),
        ({"rank": "0"}, "rank 0 in its metadata"),
        ({"rank": "2.5"}, "rank 2.5 in its metadata"),
        ({"alpha": '"4"'}, "alpha '4' in its metadata"),
    ],
)
def test_damaged_metadata(tmp_path, changed, message):
    metadata = {**INFO.to_metadata(), **changed}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    path, tensors = tmp_path / "a.safetensors", tiny_adapter().tensors
    right = {"digest": checksum(tensors, metadata)}
    wrong = {"digest": checksum(tensors, INFO.to_metadata())}
    for digest, expected in ((right, message), (wrong, "damaged"), ({}, "damaged: the checksum")):
        save_file(tensors, path, metadata | digest)
        with pytest.raises(
            CheckpointError, match=f"a.safetensors: {re.escape(expected)}"
        ) as caught:
            read_adapter(path)
        assert "\n" not in str(caught.value)


# ---- names ----


def test_old_deberta_names():
    layer = "deberta.encoder.layer.3.attention.self"
    old = {
        f"{layer}.query_lora_a.weight": torch.tensor(1.0),
        f"{layer}.query_lora_b.weight": torch.tensor(2.0),
        f"{layer}.value_lora_a.weight": torch.tensor(3.0),
        f"{layer}.value_lora_b.weight": torch.tensor(4.0),
        f"{layer}.query_proj.weight": torch.tensor(5.0),
        "classifier.weight": torch.tensor(6.0),
    }
    new = {
        f"{layer}.query_proj.lora_A": 1.0,
        f"{layer}.query_proj.lora_B": 2.0,
        f"{layer}.value_proj.lora_A": 3.0,
        f"{layer}.value_proj.lora_B": 4.0,
        f"{layer}.query_proj.weight": 5.0,
        "classifier.weight": 6.0,
    }
    assert {name: t.item() for name, t in canonical_names(old, "old.bin").items()} == new
    del new[f"{layer}.query_proj.weight"]
    assert adapter_tensors(canonical_names(old, "old.bin")).keys() == new.keys()


def test_old_names_are_renamed_when_a_file_is_read(tmp_path):
    old = {f"deberta.a.query_lora_{ab}.weight": torch.zeros(2, 2) for ab in "ab"}
    torch.save(old, tmp_path / "old.bin")
    new = {f"deberta.a.query_proj.lora_{ab}" for ab in "AB"}
    assert read_adapter(tmp_path / "old.bin").tensors.keys() == new


def test_what_an_adapter_holds():
    state = Tiny().state_dict()
    names = set(adapter_tensors(state))
    assert names == {name for name in state if "lora_" in name} | {
        "classifier.weight",
        "classifier.bias",
    }
    assert len(names) == 10
    assert "roberta.layer.0.query.weight" in adapter_tensors(state, ["bert"])


def test_layers_and_targets():
    layers = lora_layers(Tiny(targets=("key",)))
    assert sorted(layers) == ["roberta.layer.0.key", "roberta.layer.1.key"]
    assert lora_targets(layers) == ("key",)
    assert lora_targets(["b.value", "a.query", "c.value", "top"]) == ("query", "top", "value")
    assert lora_layers(Tiny(targets=())) == {}


# ---- fingerprint ----


def test_fingerprint():
    base = Tiny().state_dict()
    expected = fingerprint(base)
    assert re.fullmatch("[0-9a-f]{16}", expected)
    backbone = {n: t for n, t in base.items() if n.startswith("roberta.")}
    for same in (
        dict(reversed(base.items())),
        {name: tensor.bfloat16() for name, tensor in base.items()},
        {name: tensor.bfloat16().float() for name, tensor in base.items()},
        {name: tensor.t().contiguous().t() for name, tensor in base.items()},
        {name: tensor for name, tensor in backbone.items() if "lora_" not in name},
        {name: t + 1 if t.dim() == 1 or "lora_" in name else t for name, t in base.items()},
        {**base, "classifier.weight": torch.zeros(9, 9)},
    ):
        assert fingerprint(same) == expected
    weight = "roberta.layer.1.key.weight"
    other = base[weight].clone()
    other[3, 4] *= 1.1
    for different in (
        {**base, weight: other},
        {**base, weight: base[weight].reshape(4, 16)},
        {**base, "roberta.layer.0.key.weight": base[weight]},
        {name: tensor for name, tensor in base.items() if name != weight},
        {name.replace("roberta", "deberta"): tensor for name, tensor in base.items()},
    ):
        assert fingerprint(different) != expected
    assert fingerprint(base, ["roberta.layer.0"]) != expected


def test_fingerprint_sees_all_over_a_large_matrix():
    base = {"roberta.weight": torch.randn(256, 512)}
    expected = fingerprint(base)
    for rows in (slice(0, 4), slice(100, 104), slice(252, 256)):
        changed = {"roberta.weight": base["roberta.weight"].clone()}
        changed["roberta.weight"][rows] += 1
        assert fingerprint(changed) != expected


# ---- loading into a model ----


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", FORMATS)
def test_load_into(tmp_path, name, mode):
    adapter = tiny_adapter(seed=1)
    write_adapter(tmp_path / name, adapter)
    model, x = Tiny(seed=2).train(mode), torch.randn(2, 8)
    frozen = {n: t.clone() for n, t in model.state_dict().items() if n not in adapter.tensors}
    layer = model.roberta["layer"][0].query
    before = layer(x)
    assert load_into(model, read_adapter(tmp_path / name), INFO.base_fingerprint) == []
    state = model.state_dict()
    assert_same_bits({n: state[n] for n in adapter.tensors}, adapter.tensors)
    assert_same_bits({n: state[n] for n in frozen}, frozen)
    update = adapter.tensors[A.replace("_A", "_B")] @ adapter.tensors[A]
    expected = nn.functional.linear(x, layer.weight + 2 * update, layer.bias)
    assert_close_to_rounding(layer(x), expected, terms=8 + 2 * INFO.rank)
    assert not torch.allclose(layer(x), before)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"rank": 4}, ["trained with rank 2, the model was built with 4"]),
        ({"alpha": 8}, ["trained with alpha 4.0, the model was built with 8"]),
        (
            {"targets": ("key", "value")},
            ["trained with targets query, value, the model was built with key, value"],
        ),
        (
            {"targets": ("query",)},
            ["trained with targets query, value, the model was built with query"],
        ),
        ({"labels": 2}, ["classifier.", "(3", "in the file, (2", "in the model"]),
        ({"targets": ()}, ["no LoRA layers to take it", "apply_lora"]),
    ],
)
def test_a_model_of_other_settings(settings, parts):
    refuses(Tiny(**settings), tiny_adapter(), *parts)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"rank": 4}, [A, "(2, 8) in the file, (4, 8) in the model: rank 2, not 4"]),
        (
            {"targets": ("query", "key")},
            ["trained with targets query, value, the model was built with key, query"],
        ),
        ({"targets": ()}, ["no LoRA layers to take it"]),
    ],
)
def test_a_file_without_info_is_checked_by_its_tensors(settings, parts):
    refuses(Tiny(**settings), tiny_adapter(metadata=None), *parts)


def test_alpha_is_an_equal_number():
    assert load_into(Tiny(), tiny_adapter(replace(INFO, alpha=4))) == []


@pytest.mark.parametrize(
    ("theirs", "ours", "fits"),
    [("a", "a", True), ("a", None, True), (None, "a", True), (None, None, True), ("a", "b", False)],
)
def test_another_base(theirs, ours, fits):
    model, adapter = Tiny(), tiny_adapter(replace(INFO, base_fingerprint=theirs))
    if fits:
        assert load_into(model, adapter, base_fingerprint=ours) == []
    else:
        parts = ("'some/base' (fingerprint a)", "not one of fingerprint b", "give that one")
        refuses(model, adapter, *parts, base_fingerprint=ours)
        with pytest.raises(WrongBaseError) as caught:
            load_into(model, adapter, base_fingerprint=ours)
        assert (caught.value.expected, caught.value.found) == (theirs, ours)


def change(**tensors):
    def changed(info):
        adapter = tiny_adapter(info)
        kept = {**adapter.tensors, **{n.replace("__", "."): t for n, t in tensors.items()}}
        kept = {name: tensor for name, tensor in kept.items() if tensor is not None}
        return replace(adapter, tensors=kept)

    return changed


def many_extra(info):
    adapter = tiny_adapter(info)
    extra = {f"extra.{number}": torch.zeros(1) for number in range(6)}
    return replace(adapter, tensors={**adapter.tensors, **extra})


def elsewhere(info):
    adapter = tiny_adapter(info)
    moved = {n.replace("layer.", "block."): t for n, t in adapter.tensors.items()}
    return replace(adapter, tensors=moved)


def wider(info):
    adapter = tiny_adapter(info)
    wide = {
        n: torch.zeros(2, 16) if n.endswith("lora_A") else t for n, t in adapter.tensors.items()
    }
    return replace(adapter, tensors=wide)


@pytest.mark.parametrize("info", [INFO, None], ids=["info", "no info"])
@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (change(roberta__layer__1__value__lora_B=None),
         ["lacks 1 tensors: roberta.layer.1.value.lora_B"]),
        (change(classifier__weight=None, classifier__bias=None),
         ["lacks 2 tensors: classifier.bias, classifier.weight"]),
        (change(roberta__layer__2__value__lora_B=torch.zeros(8, 2)),
         ["has, unknown to the model, 1 tensors: roberta.layer.2.value.lora_B"]),
        (change(pooler__bias=torch.zeros(1)), ["unknown to the model, 1 tensors: pooler.bias"]),
        (many_extra, ["unknown to the model, 6 tensors: extra.0, extra.1, extra.2, extra.3, …"]),
        (elsewhere, ["matches no layer of the model", "roberta.block.0.query.lora_A",
                     "roberta.layer.0.query.lora_A"]),
        (wider, ["lora_A is (2, 16) in the file, (2, 8) in the model: a base of another size"]),
        (change(roberta__layer__0__query__lora_B=torch.zeros(9, 2)),
         ["roberta.layer.0.query.lora_B is (9, 2) in the file, (8, 2) in the model"]),
        (change(roberta__layer__1__query__lora_B=torch.full((8, 2), torch.nan)),
         ["roberta.layer.1.query.lora_B holds values that are not finite"]),
        (change(classifier__bias=torch.tensor([0, 1, torch.inf])),
         ["classifier.bias holds values that are not finite"]),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(info, make, parts):
    refuses(Tiny(seed=3), make(info), *parts)


def test_new_head_keeps_the_models_own():
    model, adapter = Tiny(labels=2, seed=5), tiny_adapter()
    head = model.classifier.weight.clone()
    refuses(model, adapter, "classifier.weight is (3, 8) in the file, (2, 8) in the model")
    skipped = load_into(model, adapter, new_head=True)
    assert sorted(skipped) == ["classifier.bias", "classifier.weight"]
    assert torch.equal(model.classifier.weight, head)
    assert torch.equal(model.state_dict()[A], adapter.tensors[A])

    same_shape = Tiny(seed=5)
    assert load_into(same_shape, adapter, new_head=True) == []
    assert torch.equal(same_shape.classifier.bias, adapter.tensors["classifier.bias"])
    refuses(Tiny(rank=4), replace(adapter, metadata=None), "rank 2, not 4", new_head=True)


# ---- writing ----


def test_write_whole(tmp_path):
    path = tmp_path / "file.txt"
    for content in ("first", "second"):
        with atomic_write(path) as temporary:
            assert temporary.parent == path.parent
            assert temporary.suffix == ".txt"
            assert path.exists() == (content == "second")
            temporary.write_text(content)
        assert path.read_text() == content
    assert os.listdir(tmp_path) == ["file.txt"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("there", [True, False])
def test_write_whole_broken_off(tmp_path, error, there):
    path = tmp_path / "file.txt"
    if there:
        path.write_text("old")

    def write():
        with atomic_write(path) as temporary:
            temporary.write_text("half of the n")
            raise error

    with pytest.raises(error):
        write()
    assert os.listdir(tmp_path) == (["file.txt"] if there else [])
    assert not there or path.read_text() == "old"


def test_a_file_that_cannot_be_made_leaves_the_old_one(tmp_path):
    path = tmp_path / "a.safetensors"
    write_adapter(path, tiny_adapter())
    content = path.read_bytes()
    with pytest.raises(TypeError):
        write_tensors(path, tiny_adapter().tensors, {"rank": 3})
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["a.safetensors"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
@pytest.mark.parametrize("name", ["a.bin", "a.safetensors"])
def test_files_have_the_mode_of_new_files(tmp_path, umask, mode, name):
    old = os.umask(umask)
    try:
        write_adapter(tmp_path / name, tiny_adapter())
        assert os.umask(umask) == umask
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "none")):
        write_adapter(tmp_path / "none" / "a.bin", tiny_adapter())


# ---- damaged files ----


def damage(content, rng, header):
    """`content` cut short, or with bits of its first `header` bytes flipped, or a part lost."""
    content = bytearray(content)
    kind = rng.choice(("cut", "flip", "flips", "hole"))
    if kind == "cut":
        return content[: rng.randrange(len(content))]
    if kind == "hole":
        start = rng.randrange(len(content))
        del content[start : start + rng.randrange(1, 64)]
        return content
    for _ in range(1 if kind == "flip" else 6):
        content[rng.randrange(header)] ^= 1 << rng.randrange(8)
    return content


@pytest.mark.fuzz
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("format", ["a.safetensors", "a.bin", "legacy.bin"])
def test_damaged_files(tmp_path, format):
    """Each is refused, by the reader or by the model, or gives exactly what was saved."""
    adapter, path = tiny_adapter(), tmp_path / format
    if format == "legacy.bin":
        torch.save(adapter.tensors, path, _use_new_zipfile_serialization=False)
        header = path.read_bytes().index(b"cpu") + 200
    else:
        write_adapter(path, adapter)
        content = path.read_bytes()
        safe = format.endswith("safetensors")
        header = 8 + int.from_bytes(content[:8], "little") if safe else content.index(b"FB")
    content, rng = path.read_bytes(), random.Random(0)
    messages = []
    for _ in range(400):
        path.write_bytes(damage(content, rng, header))
        model = Tiny(seed=9)
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        try:
            load_into(model, read_adapter(path))
            expected |= adapter.tensors
        except CheckpointError as error:
            messages.append(str(error))
        assert_same_bits(model.state_dict(), expected)
    assert len(messages) > 250
    assert all("\n" not in message and str(path) in message for message in messages)


def test_a_fingerprint_is_of_weight_matrices_alone():
    """Not of position ids and poolers, which some files of a base hold and others do not."""
    base = {
        "roberta.layer.query.weight": torch.randn(4, 4),
        "roberta.layer.query.bias": torch.ones(4),
    }
    extra = {
        "roberta.embeddings.position_ids": torch.arange(6)[None],
        "roberta.pooler.dense.weight": torch.randn(4, 4),
    }
    assert fingerprint(base) == fingerprint({**base, **extra})
    assert fingerprint(base) != fingerprint({"roberta.layer.query.weight": torch.zeros(4, 4)})


def test_the_release_s_form_takes_its_info_from_the_twin_beside_it(tmp_path):
    tensors = {"roberta.query.lora_A": torch.ones(2, 4), "roberta.query.lora_B": torch.ones(4, 2)}
    info = LoraMetadata(rank=2, alpha=8, targets=("query",))
    write_adapter(tmp_path / "pytorch_model_lora.bin", Adapter(tensors, info))
    assert read_adapter(tmp_path / "pytorch_model_lora.bin").metadata is None
    write_adapter(tmp_path / "pytorch_model_lora.safetensors", Adapter(tensors, info))
    assert read_adapter(tmp_path / "pytorch_model_lora.bin").metadata == info
    other = {name: tensor + 1 for name, tensor in tensors.items()}
    write_adapter(tmp_path / "pytorch_model_lora.safetensors", Adapter(other, info))
    assert read_adapter(tmp_path / "pytorch_model_lora.bin").metadata is None


@pytest.mark.parametrize("alpha", [0, -1, float("inf"), float("nan"), "8"])
def test_an_alpha_that_is_none(tmp_path, alpha):
    tensors = {"roberta.query.lora_A": torch.ones(2, 4), "roberta.query.lora_B": torch.ones(4, 2)}
    path = tmp_path / "lora.safetensors"
    info = LoraMetadata(rank=2, alpha=alpha, targets=("query",))
    with pytest.raises(CheckpointError, match="alpha"):
        write_adapter(path, Adapter(tensors, info))
    metadata = info.to_metadata()
    write_tensors(path, tensors, {**metadata, "digest": checksum(tensors, metadata)})
    with pytest.raises(CheckpointError, match="alpha"):
        read_adapter(path)
