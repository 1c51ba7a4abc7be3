"""Damaged files of a checkpoint: a one-line error names the file and what to do about it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from bit_flips import flip_bit_in

from loralib.errors import CheckpointError
from loralib.io.tensors import read_tensors

STATE, OPTIMIZER, SCHEDULER = "trainer_state.json", "optimizer.pt", "scheduler.pt"
RNG, SETTINGS, CONFIG = "rng_state_0.pth", "training_args.bin", "config.json"
ADVICE = "; move {} away to resume from an earlier checkpoint, or start over with "
ADVICE += "--overwrite_output_dir"


@pytest.fixture(scope="module")
def saved() -> dict[str, Path]:
    return {}


@pytest.fixture
def checkpoint(make_trainer, saved, tmp_path, tmp_path_factory) -> Path:
    """A copy of the checkpoint of the third update, with gradients of a started accumulation."""
    if not saved:
        settings = {"gradient_accumulation_steps": 2, "max_steps": 3, "save_steps": 3}
        make_trainer(save_strategy="steps", **settings).train()
        saved["folder"] = tmp_path_factory.mktemp("saved") / "checkpoint-3"
        shutil.move(tmp_path / "out" / "checkpoint-3", saved["folder"])
    return Path(shutil.copytree(saved["folder"], tmp_path / "checkpoint-3"))


def refused(make_trainer, checkpoint: Path, name: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        make_trainer(gradient_accumulation_steps=2).train(str(checkpoint))
    message = str(caught.value)
    assert message.startswith(f"{checkpoint / name}: missing or damaged (")
    assert message.endswith(ADVICE.format(checkpoint))
    assert "\n" not in message
    # The error is not wrapped in another that repeats it.
    assert message.count("missing or damaged") == message.count(str(checkpoint / name)) == 1
    return message


def write(path: Path, value) -> None:
    if path.suffix == ".json":
        path.write_text(json.dumps(value))
    else:
        torch.save(value, path)


def read(path: Path):
    is_json = path.suffix == ".json"
    return json.loads(path.read_text()) if is_json else torch.load(path, weights_only=True)


DAMAGES = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "not text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "a list": lambda path: write(path, [1, 2]),
    "a string": lambda path: write(path, "state"),
    "a number": lambda path: write(path, 3),
    "null": lambda path: write(path, None),
    "no keys": lambda path: write(path, {}),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.fuzz
@pytest.mark.parametrize("name", [STATE, OPTIMIZER, SCHEDULER, RNG, SETTINGS, "scaler.pt", CONFIG])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_named(make_trainer, checkpoint, name, damage):
    DAMAGES[damage](checkpoint / name)
    refused(make_trainer, checkpoint, name)


@pytest.mark.parametrize("name", [OPTIMIZER, RNG])
def test_a_flipped_bit_in_the_state_is_found(make_trainer, checkpoint, name):
    """Without a checksum, the state would load, and the run would end with other bits."""
    value = read(checkpoint / name)
    state = first(value["state"])["exp_avg"] if name == OPTIMIZER else value["rng"]["torch"]
    flip_bit_in(checkpoint / name, state)
    assert "the checksum of" in refused(make_trainer, checkpoint, name)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model_lora.safetensors"])
def test_a_flipped_bit_in_the_weights_is_found(make_trainer, checkpoint, name):
    path = checkpoint / name
    tensors = read_tensors(path)[0]
    flip_bit_in(path, next(tensor for key, tensor in tensors.items() if key.endswith("lora_A")))
    with pytest.raises(CheckpointError, match="checksum") as caught:
        make_trainer(gradient_accumulation_steps=2).train(str(checkpoint))
    message = str(caught.value)
    assert message.startswith(f"{path}: damaged")
    assert message.endswith(ADVICE.format(checkpoint))


def first(mapping):
    return next(iter(mapping.values()))


def cut(tensors, name) -> None:
    tensors[name] = tensors[name][:1].clone()


FIELDS = {
    **{
        f"no {field}": (STATE, lambda s, field=field: s.pop(field), f"has no '{field}'")
        for field in ("epoch", "global_step", "log_history", "best_model_checkpoint")
    },
    "epoch as text": (STATE, lambda s: s.update(epoch="1"), "'epoch' is of the type str"),
    "step as text": (
        STATE,
        lambda s: s.update(global_step="3"),
        "'global_step' is of the type str",
    ),
    "half a step": (STATE, lambda s: s.update(global_step=1.5), "type float, not int"),
    "a boolean step": (STATE, lambda s: s.update(global_step=True), "type bool, not int"),
    "a null step": (STATE, lambda s: s.update(global_step=None), "type NoneType, not int"),
    "a metric as text": (STATE, lambda s: s.update(best_metric="0.9"), "'best_metric' is of"),
    "a number as the best checkpoint": (
        STATE,
        lambda s: s.update(best_model_checkpoint=3),
        "type int, not",
    ),
    "history as text": (STATE, lambda s: s.update(log_history="x"), "'log_history' is of"),
    "history of texts": (STATE, lambda s: s.update(log_history=["x"]), "an entry of"),
    "history without steps": (STATE, lambda s: s.update(log_history=[{}]), "has no 'step'"),
    "an unknown field": (STATE, lambda s: s.update(other=3), "other"),
    "no groups": (OPTIMIZER, lambda s: s.pop("param_groups"), "param_groups"),
    "an empty list of groups": (OPTIMIZER, lambda s: s.update(param_groups=[]), "group"),
    "a group as text": (OPTIMIZER, lambda s: s.update(param_groups=["x"]), ""),
    "no average": (
        OPTIMIZER,
        lambda s: first(s["state"]).pop("exp_avg"),
        "has no exp_avg of that shape",
    ),
    "an average of another shape": (
        OPTIMIZER,
        lambda s: cut(first(s["state"]), "exp_avg_sq"),
        "exp_avg_sq",
    ),
    "no step of the optimizer": (
        OPTIMIZER,
        lambda s: first(s["state"]).pop("step"),
        "not an integer",
    ),
    "no epoch of the schedule": (SCHEDULER, lambda s: s.pop("last_epoch"), "no 'last_epoch'"),
    "epoch of the schedule as text": (
        SCHEDULER,
        lambda s: s.update(last_epoch="3"),
        "'last_epoch' is of",
    ),
    "no rates": (SCHEDULER, lambda s: s.update(_last_lr=[]), "'_last_lr' has 0 entries"),
    "a rate as text": (SCHEDULER, lambda s: s["base_lrs"].__setitem__(0, "x"), "'base_lrs'"),
    "no layout": (RNG, lambda s: s.pop("layout"), "no 'layout'"),
    "half a layout": (RNG, lambda s: s["layout"].pop("processes"), "no 'processes'"),
    "no progress": (RNG, lambda s: s.pop("progress"), "no 'progress'"),
    "progress as text": (RNG, lambda s: s["progress"].update(batches="x"), "'batches' is of"),
    "half a generator": (RNG, lambda s: cut(s["rng"], "torch"), "'torch' is a tensor of"),
    "half of Python's generator": (
        RNG,
        lambda s: s["rng"].update(python=(3, [1], None)),
        "has 1 entries",
    ),
    "a gradient of an unknown parameter": (
        RNG,
        lambda s: s["pending_gradients"].update(other=torch.ones(2)),
        "other",
    ),
    "a gradient of another shape": (
        RNG,
        lambda s: s["pending_gradients"].update({"classifier.out_proj.bias": torch.ones(7)}),
        "is a tensor of",
    ),
}


@pytest.mark.parametrize("case", FIELDS)
def test_damaged_fields_are_named(make_trainer, checkpoint, case):
    name, damage, reason = FIELDS[case]
    value = read(checkpoint / name)
    damage(value)
    write(checkpoint / name, value)
    assert reason in refused(make_trainer, checkpoint, name)


@pytest.mark.parametrize("content", ["", "{", "[1]", "3"])
def test_damaged_results_are_replaced(make_trainer, tmp_path, caplog, content):
    trainer = make_trainer()
    path = tmp_path / "out" / "all_results.json"
    trainer.save_metrics("train", {"train_loss": 0.5})
    trainer.save_metrics("eval", {"eval_loss": 0.4})
    assert json.loads(path.read_text()) == {"train_loss": 0.5, "eval_loss": 0.4}
    path.write_text(content)
    trainer.save_metrics("eval", {"eval_loss": 0.3})
    assert json.loads(path.read_text()) == {"eval_loss": 0.3}
    assert f"{path}: is damaged (" in caplog.text
