"""Tests that with --bf16 the frozen weights of a base in bfloat16 stay mapped from its file."""

import pytest
import torch
from compare import assert_same_bits
from mapped_files import lies_in_file

import gpt2_ft
from loralib.io.tensors import read_tensors, write_tensors


@pytest.fixture
def train(tiny, tmp_path, monkeypatch):
    """Trains on a file of this dtype, whose values are rounded to bfloat16 in any case."""
    create_adam_optimizer = gpt2_ft.create_adam_optimizer

    def run(path, dtype, *flags):
        models = []
        note = lambda model, args: models.append(model) or create_adam_optimizer(model, args)  # noqa: E731
        monkeypatch.setattr(gpt2_ft, "create_adam_optimizer", note)
        read = read_tensors(tiny.base)[0].items()
        write_tensors(path, {name: t.bfloat16().to(dtype) for name, t in read})
        work_dir = tmp_path / str(dtype)
        steps = ("--max_step", 3, "--lora_dropout", 0.1)
        gpt2_ft.main(tiny.flags(work_dir, "--init_checkpoint", path, "--bf16", *steps, *flags))
        return models[0], read_tensors(work_dir / "model.3.pt")[0]

    return run


@pytest.mark.parametrize("name", ["base.safetensors", "base.bin"])
def test_frozen_weights_are_mapped_from_the_file(train, tmp_path, name):
    """DoRA and PiSSA compute initial values from the base, as precisely as from one in float32."""
    path, lora = tmp_path / name, ("--lora_variant", "dora", "--lora_init", "pissa")
    model, written = train(path, torch.bfloat16, *lora)
    frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    assert "transformer.wte.weight" in frozen
    assert [n for n, p in frozen.items() if not lies_in_file(p, path)] == []
    copied = {f"module.{n}": p.detach() for n, p in frozen.items()}
    assert_same_bits({n: written[n] for n in copied}, copied)

    _, expected = train(tmp_path / f"single {name}", torch.float32, *lora)
    assert expected.keys() == written.keys()
    ours, theirs = ({n: t for n, t in each.items() if "lora_" in n} for each in (written, expected))
    assert_same_bits(ours, theirs)


def test_trained_weights_are_in_float32(train, tmp_path):
    path = tmp_path / "base.safetensors"
    model, written = train(path, torch.bfloat16, "--lora_dim", 0)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {tensor.dtype for tensor in written.values()} == {torch.float32}
