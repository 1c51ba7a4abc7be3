"""resume.pt: every bit comes back, a damaged one is named, and it is written atomically."""

import math
import os

import pytest
import torch
from compare import assert_same_bits
from torch import nn

from gpu import DistEnv
from loralib.errors import CheckpointError
from loralib.training.optimizer import AdamW
from loralib.training.precision import Precision
from optimizer import Scheduler
from run_state import RESUME_NAME, Progress, read_run, restore_run, write_finished, write_run

ALONE = DistEnv(0, 1, 0, torch.device("cpu"))
IDENTITY = {"--lr": 1e-3, "base": "0123", "last step": 10, "number of steps": 10}
PROGRESS = Progress(7, 12.5)


def make(seed: int) -> tuple[nn.Module, dict]:
    """A model of which one layer is trained, after an update, and the other parts of its run."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    optimizer = AdamW(model[1].parameters(), lr=0.1)
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    scheduler = Scheduler(optimizer, lambda step: 0.1 / (step + 1), 10)
    scheduler.step()
    precision = Precision(torch.float32, "cpu")
    return model, {"optimizer": optimizer, "scheduler": scheduler, "precision": precision}


def write(folder, model, parts) -> None:
    write_run(folder, ALONE, IDENTITY, PROGRESS, model, parts)


def test_every_bit_comes_back(tmp_path):
    assert read_run(tmp_path) is None
    model, parts = make(1)
    write(tmp_path, model, parts)
    expected = torch.rand(3)
    assert [file.name for file in tmp_path.iterdir()] == [RESUME_NAME]

    again, its_parts = make(2)
    state = read_run(tmp_path)
    assert restore_run(tmp_path, ALONE, IDENTITY, state, again, its_parts) == PROGRESS
    assert torch.equal(torch.rand(3), expected)
    assert_same_bits(again[1].state_dict(), model[1].state_dict())
    assert not torch.equal(again[0].weight, model[0].weight)  # frozen: the base's own
    moments = [p["optimizer"].state_dict()["state"] for p in (its_parts, parts)]
    assert moments[0].keys() == moments[1].keys()
    for number, of_parameter in moments[1].items():
        assert moments[0][number].pop("step") == of_parameter.pop("step") == 1
        assert_same_bits(moments[0][number], of_parameter)
    assert its_parts["scheduler"].state_dict() == parts["scheduler"].state_dict()


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize("was_on", [True, False])
def test_determinism_is_kept_where_it_was_written(tmp_path, was_on, is_on):
    flag = "--use_deterministic_algorithms"
    write_finished(tmp_path, ALONE, {**IDENTITY, flag: was_on}, 7)
    now = (tmp_path, ALONE, {**IDENTITY, flag: is_on}, read_run(tmp_path), *make(1))
    if was_on is is_on:
        assert restore_run(*now).step == 7
        return
    with pytest.raises(CheckpointError, match=f"is of a run with {flag} {was_on}, not {is_on}: "):
        restore_run(*now)


def test_a_finished_run_keeps_its_mark_only(tmp_path):
    model, parts = make(1)
    write(tmp_path, model, parts)
    write_finished(tmp_path, ALONE, IDENTITY, 9)
    state = read_run(tmp_path)
    assert state == {"run": IDENTITY, "finished": True, "step": 9}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert restore_run(tmp_path, ALONE, IDENTITY, state, model, parts).step == 9
    assert_same_bits(model.state_dict(), before)


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harmed",)


def test_a_pickle_that_wants_to_run_something(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"step": 3, "x": Harmful()}, RESUME_NAME)
    with pytest.raises(CheckpointError, match=r"resume\.pt: missing or damaged \("):
        read_run(tmp_path)
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("content", [b"", b"half a file", b"PK\x03\x04"])
def test_a_damaged_file(tmp_path, content):
    (tmp_path / RESUME_NAME).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"resume\.pt: missing or damaged \(") as caught:
        read_run(tmp_path)
    assert str(caught.value).endswith(
        "); remove it and the model.*.pt next to it to start the run over"
    )
    assert "\n" not in str(caught.value)


def test_it_is_written_completely_or_not_at_all(tmp_path, monkeypatch):
    model, parts = make(1)
    write(tmp_path, model, parts)
    before = (tmp_path / RESUME_NAME).read_bytes()

    def fail(content, file):
        file.write(b"half")
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail)
        with pytest.raises(OSError, match="No space left"):
            write(tmp_path, model, parts)
    with torch.no_grad():
        model[1].bias[0] = math.nan
    with pytest.raises(CheckpointError, match=r"resume\.pt: not written: 1\.bias holds values"):
        write(tmp_path, model, parts)
    assert [file.name for file in tmp_path.iterdir()] == [RESUME_NAME]
    assert (tmp_path / RESUME_NAME).read_bytes() == before
