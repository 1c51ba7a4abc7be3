"""Tests how a GPT-2 is saved: in the release's formats, and bit-exact."""

import json
import os
import stat

import pytest
import torch
from compare import assert_same_bits
from gpt2_files import BLOCKS, LORA_A, WIDTH, draw_base, parameters, parse, prefixed

import loralib as lora
from checkpoints import open_model, save_model
from family import GPT2
from loralib.adapters.formats import read_adapter
from loralib.errors import CheckpointError
from loralib.io.tensors import read_tensors
from loralib.training.precision import cast_frozen
from weights import canonical_names


def test_a_file_of_lora_has_the_releases_format(lora_path, open_lora, base_path):
    model, base = open_lora()
    content = torch.load(lora_path, weights_only=True)
    assert content.keys() == {"model_state_dict", "metadata"}
    tensors = content["model_state_dict"]
    assert set(tensors) == {
        f"module.transformer.h.{i}.attn.c_attn.lora_{ab}" for i in range(BLOCKS) for ab in "AB"
    }
    assert_same_bits(tensors, prefixed(lora.lora_state_dict(model), "module."))
    metadata = {name: json.loads(text) for name, text in content["metadata"].items()}
    assert metadata == {
        "rank": 2,
        "alpha": 6,
        "targets": ["c_attn"],
        "bias": "none",
        "base": str(base_path),
        "base_fingerprint": base.fingerprint,
    }
    assert read_adapter(lora_path).metadata.rank == 2
    assert lora_path.stat().st_size < 8_000


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_a_file_records_the_dropout_of_its_training(tmp_path, base_path, dropout):
    args = parse("--init_checkpoint", base_path, "--lora_dim", 2, "--lora_alpha", 6)
    path = tmp_path / "model.5.pt"
    save_model(path, *open_model(args, lora_dropout=dropout), lora_only=True)
    assert read_adapter(path).metadata.dropout == (dropout or None)


def test_a_file_of_the_full_model_has_the_releases_format(tmp_path, open_lora):
    model, base = open_lora()
    save_model(tmp_path / "model.9.pt", model, base, lora_only=False)
    content = torch.load(tmp_path / "model.9.pt", weights_only=True)
    assert_same_bits(content["model_state_dict"], prefixed(parameters(model), "module."))
    assert json.loads(content["metadata"]["rank"]) == 2


@pytest.mark.parametrize("held", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("file_dtype", [torch.float32, torch.float16])
def test_round_trip_of_a_whole_model(tmp_path, base_path, open_lora, held, file_dtype):
    torch.save({n: t.to(file_dtype) for n, t in draw_base().items()}, base_path)
    model, base = open_lora()
    trained = {n: p for n, p in parameters(model).items() if "lora_" in n}
    if held is not None:
        cast_frozen(model, held)
    path = tmp_path / "model.9.pt"
    save_model(path, model, base, lora_only=False)
    drawn = {n: t.to(file_dtype) for n, t in draw_base().items()}
    written = canonical_names(read_tensors(path)[0], "file")
    assert_same_bits(written, {**prefixed(drawn, "transformer."), **trained})

    args = parse("--init_checkpoint", path)
    again, again_base = open_model(args)
    assert (args.lora_dim, args.lora_alpha) == (2, 6)
    floats = {n: t.float() for n, t in drawn.items()}
    assert_same_bits(parameters(again), {**prefixed(floats, "transformer."), **trained})
    assert again_base.fingerprint == base.fingerprint
    # LoRA trained further from there still belongs to the first base.
    save_model(tmp_path / "lora.pt", again, again_base, lora_only=True)
    open_model(parse("--init_checkpoint", base_path), str(tmp_path / "lora.pt"))


@pytest.mark.parametrize("held", [None, torch.bfloat16])
def test_round_trip_of_lora_alone(tmp_path, base_path, open_lora, held):
    model, base = open_lora()
    expected = {n: p.clone() for n, p in parameters(model).items()}
    if held is not None:
        cast_frozen(model, held)
    path = tmp_path / "model.9.pt"
    save_model(path, model, base, lora_only=True)
    again, _ = open_model(parse("--init_checkpoint", base_path), str(path))
    assert_same_bits(parameters(again), expected)


def test_round_trip_of_a_model_without_lora(tmp_path, base_path):
    model, base = open_model(parse("--init_checkpoint", base_path))
    trained = {}
    for name, parameter in model.named_parameters():
        parameter.data = trained[name] = parameter.data + 1
    path = tmp_path / "model.9.pt"
    save_model(path, model, base, lora_only=False)
    assert torch.load(path, weights_only=True)["metadata"] == {}
    args = parse("--init_checkpoint", path)
    assert_same_bits(parameters(open_model(args)[0]), trained)
    assert args.lora_dim == 0
    # It is a base like any other, to which LoRA can be added.
    model, _ = open_model(parse("--init_checkpoint", path, "--lora_dim", 3))
    assert model.get_parameter(LORA_A).shape == (6, WIDTH)


def test_training_loaded_weights_does_not_change_their_file(tmp_path, open_lora):
    path = tmp_path / "model.9.pt"
    save_model(path, *open_lora(), lora_only=False)
    before = path.read_bytes()
    model, base = open_model(parse("--init_checkpoint", path))
    with torch.no_grad():
        model.get_parameter(LORA_A).add_(1)
    assert path.read_bytes() == before
    save_model(path, model, base, lora_only=False)
    model_again, _ = open_model(parse("--init_checkpoint", path))
    assert_same_bits(parameters(model_again), parameters(model))


@pytest.mark.parametrize("lora_only", [True, False])
def test_values_that_are_not_finite_are_not_written(tmp_path, open_lora, lora_only):
    model, base = open_lora()
    path = tmp_path / "model.9.pt"
    save_model(path, model, base, lora_only)
    before = path.read_bytes()
    with torch.no_grad():
        model.get_parameter(LORA_A)[1, 2] = float("inf")
    with pytest.raises(CheckpointError, match=f"model.9.pt: not written: {LORA_A} holds values"):
        save_model(path, model, base, lora_only)
    assert path.read_bytes() == before


def test_a_model_is_written_completely_or_not_at_all(tmp_path, monkeypatch, open_lora):
    folder = tmp_path / "work"
    folder.mkdir()
    model, base = open_lora()

    def write():
        save_model(folder / "model.9.pt", model, base, lora_only=True)

    write()
    (path,) = folder.iterdir()
    before = path.read_bytes()
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask

    def fail(content, file):
        file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="No space left"):
        write()
    assert list(folder.iterdir()) == [path]
    assert path.read_bytes() == before


def test_backbone_covers_every_name(open_lora):
    assert all(name.startswith(GPT2.backbone) for name, _ in open_lora()[0].named_parameters())
