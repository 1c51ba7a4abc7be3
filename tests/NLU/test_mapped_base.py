"""A base in bfloat16, trained with --bf16: its frozen weights are the file's own memory."""

import shutil

import pytest
import torch
from compare import assert_same_bits
from mapped_files import lies_in_file
from trainer_runs import trained

from loralib.io.tensors import write_tensors
from transformers import RobertaForSequenceClassification
from transformers.modeling_utils import read_weights

LORA = {"apply_lora": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.1}


@pytest.fixture
def make_base(tiny_base, tmp_path):
    """Writes numbers of bfloat16 in a dtype, and gives the file."""

    def make(name, dtype):
        folder = tmp_path / f"{name} {dtype}"
        folder.mkdir()
        shutil.copy(tiny_base / "config.json", folder)
        read = read_weights(tiny_base).items()
        write_tensors(folder / name, {key: t.bfloat16().to(dtype) for key, t in read})
        return folder / name

    return make


@pytest.fixture
def train(make_trainer, tmp_path):
    """Trains LoRA on the base in a file, and gives the Trainer."""

    def run(path):
        torch.manual_seed(0)
        model = RobertaForSequenceClassification.from_pretrained(path.parent, **LORA)
        model.train_only(("lora",))
        steps = {"max_steps": 3, "save_strategy": "steps", "save_steps": 3}
        trainer = make_trainer(model, output_dir=str(path.parent / "out"), bf16=True, **steps)
        trainer.train()
        return trainer

    return run


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_frozen_weights_are_the_mapped_file_s(make_base, train, name):
    path = make_base(name, torch.bfloat16)
    before = path.read_bytes()
    model = train(path).model
    frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    assert "roberta.embeddings.word_embeddings.weight" in frozen
    copied = [n for n, p in frozen.items() if "lora_" not in n and not lies_in_file(p, path)]
    assert copied == []
    assert path.read_bytes() == before

    expected = train(make_base(name, torch.float32)).model
    assert_same_bits(trained(model), trained(expected))
    saved = read_weights(path.parent / "out" / "checkpoint-3")
    assert {saved[n].dtype for n in frozen} == {torch.bfloat16}
    assert_same_bits({n: saved[n] for n in frozen}, {n: p.detach() for n, p in frozen.items()})


def test_a_weight_that_was_changed_is_not_the_file_s(make_base, make_trainer):
    path = make_base("model.safetensors", torch.bfloat16)
    model = RobertaForSequenceClassification.from_pretrained(path.parent, **LORA)
    model.train_only(("lora",))
    name = "roberta.encoder.layer.0.attention.self.query.weight"
    weight = model.get_parameter(name)
    with torch.no_grad():
        weight.add_(1)
    expected = weight.detach().bfloat16()
    make_trainer(model, bf16=True)
    assert torch.equal(model.get_parameter(name), expected)
    assert not lies_in_file(model.get_parameter(name), path)
