"""With --bf16, the frozen weights of a base are mapped from its file until they are rounded.

If the file is in bfloat16, they stay mapped: no copy is ever made.
"""

import shutil

import pytest
import torch
from compare import assert_same_bits
from glue_runs import common
from mapped_files import lies_in_file
from trainer_runs import trained

from loralib.io.tensors import write_tensors
from loralib.training.precision import cast_frozen
from transformers import RobertaForSequenceClassification
from transformers.weight_files import read_weights

LORA = {"apply_lora": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.1}


@pytest.fixture
def make_base(tiny_base, tmp_path):
    """Writes weights, rounded to a dtype, in that or another one, and returns the file."""

    def make(name, dtype, rounded_to=torch.bfloat16):
        folder = tmp_path / f"{name} {dtype}"
        folder.mkdir()
        shutil.copy(tiny_base / "config.json", folder)
        read = read_weights(tiny_base).items()
        write_tensors(folder / name, {key: t.to(rounded_to).to(dtype) for key, t in read})
        return folder / name

    return make


ADAPTED = {
    "LoRA": LORA,
    "DoRA": {**LORA, "lora_variant": "dora"},
    "PiSSA": {**LORA, "lora_init": "pissa"},
    "bottlenecks": {"apply_adapter": True, "adapter_type": "houlsby", "adapter_size": 4},
    "biases": {"apply_bitfit": True},
    "nothing": {},
}


@pytest.mark.parametrize(
    ("dtype", "adapted"),
    [
        *((torch.bfloat16, adapted) for adapted in ADAPTED),
        (torch.float16, "LoRA"),
        (torch.float32, "LoRA"),
        (torch.float32, "PiSSA"),
    ],
)
def test_matrices_that_will_be_frozen_are_not_copied(make_base, dtype, adapted):
    """The values are the same as those of a copy in float32."""
    path, models = make_base("model.safetensors", dtype, rounded_to=dtype), []
    for held_in in (torch.bfloat16, torch.float32):
        torch.manual_seed(0)
        models.append(
            RobertaForSequenceClassification.from_pretrained(
                path.parent, held_in=held_in, **ADAPTED[adapted]
            )
        )
    model, copied = models
    parts = tuple(kind.part for kind in model.adapted_by)
    for name, tensor in model.named_parameters():
        is_adapting = any(part in name for part in parts)
        stays = name.startswith("roberta.") and tensor.dim() > 1 and not is_adapting
        assert lies_in_file(tensor, path) == stays, name
        assert tensor.dtype == (dtype if stays else torch.float32), name
    assert_same_bits(
        {name: tensor.float() for name, tensor in model.state_dict().items()},
        {name: tensor.float() for name, tensor in copied.state_dict().items()},
    )
    assert not any(lies_in_file(tensor, path) for tensor in copied.parameters())


def test_matrices_that_lie_transposed_in_the_file_are_held_as_any_other(make_base):
    """Weights that were converted from TensorFlow do: sums in another order would differ."""
    path = make_base("pytorch_model.bin", torch.float32)
    read = read_weights(path.parent).items()
    turned = {n: t.mT.contiguous().mT if t.dim() == 2 else t.clone() for n, t in read}
    torch.save(turned, path)
    model = RobertaForSequenceClassification.from_pretrained(
        path.parent, held_in=torch.bfloat16, **LORA
    )
    assert all(parameter.is_contiguous() for parameter in model.parameters())


def test_a_head_in_the_file_is_copied_as_it_will_be_trained(tiny_base, tmp_path):
    base = RobertaForSequenceClassification.from_pretrained(tiny_base)
    base.bfloat16().save_pretrained(tmp_path)
    model = RobertaForSequenceClassification.from_pretrained(
        tmp_path, held_in=torch.bfloat16, **LORA
    )
    model.train_only(("lora",))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.dtype == torch.float32, name
            assert not lies_in_file(parameter, tmp_path / "pytorch_model.bin"), name
    assert_same_bits(
        {name: tensor.bfloat16() for name, tensor in model.classifier.state_dict().items()},
        base.classifier.state_dict(),
    )


def test_matrices_in_their_final_dtype_are_not_compared_with_the_file(make_base, monkeypatch):
    path, compared = make_base("model.safetensors", torch.bfloat16), []
    model = RobertaForSequenceClassification.from_pretrained(
        path.parent, held_in=torch.bfloat16, **LORA
    )
    model.train_only(("lora",))
    monkeypatch.setattr(torch, "equal", lambda *given: compared.append(given) or True)
    cast_frozen(model, torch.bfloat16, model.tensors_read)
    assert {held.dim() for held, read in compared} == {1}


def test_a_given_state_dict_is_loaded_into_float32(make_base):
    path = make_base("model.safetensors", torch.bfloat16)
    given = read_weights(path.parent)
    config = RobertaForSequenceClassification.from_pretrained(path.parent, **LORA).config
    model = RobertaForSequenceClassification.from_pretrained(
        None, config=config, state_dict=given, held_in=torch.bfloat16
    )
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_weights_are_float32_by_default(make_base):
    path = make_base("model.safetensors", torch.bfloat16)
    model = RobertaForSequenceClassification.from_pretrained(path.parent, **LORA)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.fixture
def train(make_trainer):
    """Trains LoRA on the base in a file, and returns the Trainer."""

    def run(path, **settings):
        torch.manual_seed(0)
        model = RobertaForSequenceClassification.from_pretrained(path.parent, **LORA, **settings)
        model.train_only(("lora",))
        steps = {"max_steps": 3, "save_strategy": "steps", "save_steps": 3}
        trainer = make_trainer(model, output_dir=str(path.parent / "out"), bf16=True, **steps)
        trainer.train()
        return trainer

    return run


@pytest.mark.parametrize("settings", [{}, {"held_in": torch.bfloat16}])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_frozen_weights_are_the_mapped_file_s(make_base, train, name, settings):
    path = make_base(name, torch.bfloat16)
    before = path.read_bytes()
    model = train(path, **settings).model
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_training_on_weights_that_were_mapped_until_rounded_gives_the_same_bits(
    make_base, train, dtype
):
    path = make_base("model.safetensors", dtype, rounded_to=dtype)
    saved = []
    for settings in ({}, {"held_in": torch.bfloat16}):
        train(path, **settings)
        saved.append(read_weights(path.parent / "out" / "checkpoint-3"))
    assert_same_bits(*saved)
    assert saved[0]["roberta.embeddings.word_embeddings.weight"].dtype == dtype


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


@pytest.mark.parametrize("adapted", [True, False])
def test_run_glue_does_not_copy_frozen_weights(
    tiny_base, tiny_glue, run_glue, tmp_path, monkeypatch, adapted
):
    """Without LoRA, all weights are trained, in float32."""
    base = shutil.copytree(tiny_base, tmp_path / "base")
    halves = {name: t.bfloat16() for name, t in read_weights(base).items()}
    (path,) = base.glob("pytorch_model.bin")
    write_tensors(path, halves)
    copied = []

    def hold(model, dtype, read):
        base = [(n, p) for n, p in model.base_model.named_parameters() if p.dim() > 1]
        copied.extend(n for n, p in base if "lora_" not in n and not lies_in_file(p, path))
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
        cast_frozen(model, dtype, read)

    monkeypatch.setattr("transformers.trainer.cast_frozen", hold)
    data = ["--task_name", "rte", "--data_dir", str(tiny_glue), "--output_dir", str(tmp_path / "o")]
    lora = ["--apply_lora", "--lora_r", "4", "--lora_alpha", "8"] if adapted else []
    run_glue.main([*common(base), *data, *lora, "--do_train", "--max_steps", "2", "--bf16"])
    assert bool(copied) != adapted
