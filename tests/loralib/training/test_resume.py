"""Tests of resuming: damaged files are named, parts restored, and other runs refused."""

import pytest
import torch
from bit_flips import flip_bit_in
from torch import nn

from loralib.errors import CheckpointError
from loralib.io.tensors import write_torch
from loralib.training.determinism import rng_state
from loralib.training.optimizer import AdamW
from loralib.training.resume import (
    DamagedStateError,
    check_same_run,
    like_rng_state,
    naming_damaged_file,
    read_state,
    restore,
    warn_of_length,
)


def missing(path):
    path.unlink()


def cut(path):
    path.write_bytes(path.read_bytes()[:-50])


def with_a_bit_flipped(path):
    flip_bit_in(path, torch.tensor([3.0, 5.0]))


def of_another_kind(path):
    write_torch(path, [1, 2])


def without_an_entry(path):
    write_torch(path, {"step": 3})


@pytest.mark.parametrize(
    "damage", [missing, cut, with_a_bit_flipped, of_another_kind, without_an_entry]
)
def test_the_error_names_a_damaged_file_and_what_to_do(tmp_path, damage):
    path, example = tmp_path / "state.pt", {"step": 0, "rate": 0.0}
    write_torch(path, {"step": 3, "rate": 0.5, "averages": torch.tensor([3.0, 5.0])})
    assert read_state(path, example)["rate"] == 0.5
    damage(path)
    with pytest.raises(DamagedStateError) as caught, naming_damaged_file(path, "remove it"):
        read_state(path, example)
    message = str(caught.value)
    assert message.startswith(f"{path}: missing or damaged (")
    assert message.endswith("); remove it")
    assert message.count(str(path)) == 1


def test_a_file_in_torchs_older_format_can_be_read(tmp_path):
    torch.save({"step": 3}, tmp_path / "state.pt", _use_new_zipfile_serialization=False)
    assert read_state(tmp_path / "state.pt", {"step": 0}) == {"step": 3}


def test_of_nested_blocks_the_innermost_names_its_file(tmp_path):
    with (
        pytest.raises(DamagedStateError, match=r"inner: missing or damaged \(bad\); first"),
        naming_damaged_file(tmp_path / "outer", "second"),
        naming_damaged_file(tmp_path / "inner", "first"),
    ):
        raise KeyError("bad")


def test_a_file_with_code_is_refused(tmp_path):
    torch.save(nn.Linear(1, 1), tmp_path / "state.pt")
    with (
        pytest.raises(DamagedStateError, match=r"(?i)weights"),
        naming_damaged_file(tmp_path / "state.pt", "remove it"),
    ):
        read_state(tmp_path / "state.pt")


def stepped(weight: nn.Parameter) -> AdamW:
    optimizer = AdamW([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    return optimizer


def test_restore_loads_an_optimizers_state():
    optimizer = stepped(nn.Parameter(torch.zeros(3)))
    again = AdamW([nn.Parameter(torch.zeros(3))], lr=0.5)
    restore(again, optimizer.state_dict(), checked=())
    assert again.param_groups[0]["lr"] == 0.1
    average = again.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(average, optimizer.state_dict()["state"][0]["exp_avg"])


@pytest.mark.parametrize("checked", [None, ("base_lrs", "last_epoch", "of another version")])
def test_restore_refuses_states_with_invalid_entries(checked):
    optimizer = AdamW([nn.Parameter(torch.zeros(3))])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    state = schedule.state_dict()
    restore(schedule, state, checked)
    for entry, value in (("last_epoch", "3"), ("base_lrs", [])):
        with pytest.raises(ValueError, match=f"'{entry}'"):
            restore(schedule, {**state, entry: value}, checked)


def test_restore_does_not_check_entries_that_need_no_check():
    optimizer = AdamW([nn.Parameter(torch.zeros(3))])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    state = {**schedule.state_dict(), "_step_count": "3"}
    with pytest.raises(ValueError, match="'_step_count'"):
        restore(schedule, state)
    restore(schedule, state, ("base_lrs", "last_epoch"))
    assert schedule.state_dict()["_step_count"] == "3"


@pytest.mark.parametrize("now", [10, 12, 8])
def test_only_a_schedule_of_another_length_is_warned_of(now, caplog):
    warn_of_length("run", 10, now)
    expected = f"run belongs to a run of 10 steps, but this run has {now}: from here on"
    assert [text.startswith(expected) for text in caplog.messages] == [True] * (now != 10)


def test_a_run_with_other_settings_is_refused(tmp_path):
    before = {"--lr": 0.1, "--clip": None, "of an older version": 1}
    check_same_run(tmp_path, before, {"--lr": 0.1, "--clip": None}, "give the same")
    with pytest.raises(CheckpointError) as caught:
        check_same_run(tmp_path, before, {"--lr": 0.1, "--clip": 1.0}, "give the same")
    assert (
        str(caught.value)
        == f"{tmp_path}: belongs to a run with --clip None, but this run has 1.0: give the same"
    )
    with pytest.raises(CheckpointError, match="with --seed None, but this run has 3"):
        check_same_run(tmp_path, before, {"--seed": 3}, "give the same")


def test_a_setting_that_an_older_version_did_not_have_was_off(tmp_path):
    check_same_run(tmp_path, {}, {"--graphs": False, "--pattern": None}, "give the same")
    with pytest.raises(CheckpointError, match="with --graphs None, but this run has False"):
        check_same_run(tmp_path, {"--graphs": None}, {"--graphs": False}, "give the same")


def test_the_example_of_an_rng_state_has_no_gpu_generator(fake_gpu_rng):
    on_gpu = rng_state(torch.device("cuda", 0))
    assert "cuda" in on_gpu
    assert like_rng_state().keys() == on_gpu.keys() - {"cuda"}
