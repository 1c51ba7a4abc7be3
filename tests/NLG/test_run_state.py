"""Tests resume.pt: it restores every bit, a damaged one is an error, and writing it is atomic."""

import math
import os
from types import SimpleNamespace

import pytest
import torch
from compare import assert_same_bits
from torch import nn

import run_state
from gpt2_ft_arguments import parse_args
from gpu import DistEnv
from loralib.errors import CheckpointError
from loralib.training.optimizer import AdamW
from loralib.training.precision import Precision
from optimizer import Scheduler
from run_state import (
    RESUME_NAME,
    Progress,
    begin_run,
    check_same_start,
    find_run,
    has_begun,
    identity_of,
    read_run,
    restore_run,
    write_finished,
    write_run,
)

ALONE = DistEnv(0, 1, 0, torch.device("cpu"))
IDENTITY = {"--lr": 1e-3, "base": "0123", "last step": 10, "number of steps": 10}
PROGRESS = Progress(7, 12.5)


def make(seed: int) -> tuple[nn.Module, dict]:
    """Returns a model with one trained layer, after an update, and the other parts of its run."""
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


def test_every_bit_is_restored(tmp_path):
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
    assert not torch.equal(again[0].weight, model[0].weight)  # frozen weights are not saved
    moments = [p["optimizer"].state_dict()["state"] for p in (its_parts, parts)]
    assert moments[0].keys() == moments[1].keys()
    for number, of_parameter in moments[1].items():
        assert moments[0][number].pop("step") == of_parameter.pop("step") == 1
        assert_same_bits(moments[0][number], of_parameter)
    assert its_parts["scheduler"].state_dict() == parts["scheduler"].state_dict()


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize("was_on", [True, False])
def test_a_run_does_not_resume_with_another_determinism(tmp_path, was_on, is_on):
    flag = "--use_deterministic_algorithms"
    write_finished(tmp_path, ALONE, {**IDENTITY, flag: was_on}, 7)
    now = (tmp_path, ALONE, {**IDENTITY, flag: is_on}, read_run(tmp_path), *make(1))
    if was_on is is_on:
        assert restore_run(*now).step == 7
        return
    with pytest.raises(CheckpointError, match=f"with {flag} {was_on}, but this run has {is_on}: "):
        restore_run(*now)


def test_a_run_may_have_the_shorter_fingerprint_that_older_versions_wrote(tmp_path):
    write_run(tmp_path, ALONE, {**IDENTITY, "base": 16 * "0"}, PROGRESS, *make(1))
    state = read_run(tmp_path)
    same, other = ({**IDENTITY, "base": 16 * first + 16 * "2"} for first in "01")
    assert restore_run(tmp_path, ALONE, same, state, *make(2)) == PROGRESS
    with pytest.raises(CheckpointError, match="belongs to a run with base 0"):
        restore_run(tmp_path, ALONE, other, state, *make(2))
    for was, now in ((None, same["base"]), (same["base"], None)):  # None: from no base
        identities = ({**IDENTITY, "base": base} for base in (was, now))
        write_finished(tmp_path, ALONE, next(identities), 7)
        with pytest.raises(CheckpointError, match=f"with base {was}, but this run has {now}"):
            restore_run(tmp_path, ALONE, next(identities), read_run(tmp_path), *make(2))


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_may_have_the_state_of_a_version_without_graphs(tmp_path, finished):
    flag = "--cuda_graphs"
    model, parts = make(1)
    write(tmp_path, model, parts)
    if finished:
        write_finished(tmp_path, ALONE, IDENTITY, 7)
    state = read_run(tmp_path)
    assert restore_run(tmp_path, ALONE, {**IDENTITY, flag: False}, state, model, parts).step == 7
    with pytest.raises(CheckpointError, match=f"with {flag} None, but this run has True: "):
        restore_run(tmp_path, ALONE, {**IDENTITY, flag: True}, state, model, parts)


def test_the_state_of_a_finished_run_is_only_a_mark(tmp_path):
    model, parts = make(1)
    write(tmp_path, model, parts)
    write_finished(tmp_path, ALONE, IDENTITY, 9)
    state = read_run(tmp_path)
    assert state == {"run": IDENTITY, "finished": True, "step": 9}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert restore_run(tmp_path, ALONE, IDENTITY, state, model, parts).step == 9
    assert_same_bits(model.state_dict(), before)


# ---- where a run begins ----


def test_which_run_is_resumed(tmp_path, caplog):
    assert find_run(tmp_path, False) is None
    assert not caplog.messages
    assert find_run(tmp_path, True) is None
    assert caplog.messages == [f"{tmp_path} holds no run to resume: starting a new one"]
    begin(tmp_path)
    assert [find_run(tmp_path, resume) for resume in (True, False)] == [
        None
    ] * 2  # killed before its first state
    write(tmp_path, *make(1))
    assert find_run(tmp_path, True)["step"] == PROGRESS.step
    with pytest.raises(CheckpointError, match=r"holds an unfinished run, at step 7: resume"):
        find_run(tmp_path, False)
    write_finished(tmp_path, ALONE, IDENTITY, 9)
    assert find_run(tmp_path, True) == {"run": IDENTITY, "step": 9, "finished": True}
    assert find_run(tmp_path, False) is None
    assert len(caplog.messages) == 1


# The flags that a resumed run may change, because they cannot change its bits, and those that the
# identity has in another form: what they mean, or the content of their files.
FREE_FLAGS = {
    *("train_data", "init_checkpoint", "max_step", "max_epoch", "lr_is_given"),
    *("valid_data", "valid_batch_size", "eval_interval", "save_interval", "log_interval"),
    *("work_dir", "save_lora_only", "report_to", "resume", "log_level", "ddp_timeout"),
    *("platform", "local_rank", "rank", "device", "world_size"),
    *("estimate", "estimate_devices", "estimate_rate", "estimate_length"),
    *("roll_interval", "roll_lr", "roll_step", "eval_epoch"),
}


def test_the_identity_has_all_that_affects_the_bits(tmp_path):
    (tmp_path / "train").write_text("{}")
    files = ["--train_data", str(tmp_path / "train"), "--valid_data", "valid"]
    args = parse_args([*files, "--lora_targets", "query", "mlp_up", "--lora_dim", "4"])
    patterns = {"lora_rank_pattern": {"c_attn": 2, "c_fc": 8}, "lora_alpha_pattern": {}}
    identity = identity_of(args, SimpleNamespace(**patterns), ALONE, 10, 6, "base")
    assert identity["--lora_rank_pattern"] == "c_attn=2 c_fc=8"
    assert identity["--lora_alpha_pattern"] is None
    assert (identity["--lora_dim"], identity["--lora_targets"]) == (4, "query mlp_up")
    last = [identity[name] for name in ("number of processes", "last step", "number of steps")]
    assert (last, identity["base"]) == ([1, 10, 6], "base")
    assert {name for name in vars(args) if f"--{name}" not in identity} == FREE_FLAGS
    (tmp_path / "train").write_text("{} ")
    changed = identity_of(args, SimpleNamespace(**patterns), ALONE, 10, 6, "base")
    assert [name for name in identity if identity[name] != changed[name]] == ["training data"]


def begin(folder, identity=IDENTITY, resume=True, env=ALONE):
    begin_run(SimpleNamespace(work_dir=str(folder), resume=resume), env, identity)


def test_a_run_marks_its_folder_when_it_begins(tmp_path):
    begin(tmp_path, env=DistEnv(1, 1, 0, torch.device("cpu")))  # not the main process
    assert not [*tmp_path.iterdir()]
    begin(tmp_path)
    state = read_run(tmp_path)
    assert state == {"run": IDENTITY, "step": 0, "finished": False}
    assert not has_begun(state)


def test_only_a_runs_own_models_may_be_there_when_it_begins(tmp_path):
    """A run may have been killed between its first model and its first state."""
    (tmp_path / "model.5.pt").touch()
    refused = pytest.raises(CheckpointError, match="holds models of another run")
    with refused:
        begin(tmp_path)
    (tmp_path / "model.5.pt").unlink()
    begin(tmp_path)
    (tmp_path / "model.5.pt").touch()
    begin(tmp_path)
    with refused:
        begin(tmp_path, resume=False)
    with refused:
        begin(tmp_path, identity={**IDENTITY, "--lr": 1})
    write(tmp_path, *make(1))
    with refused:
        begin(tmp_path)


@pytest.mark.parametrize(
    ("resumed", "step", "finished"),
    [
        (None, None, False),
        ({"step": 7, "finished": False}, 7, False),
        ({"step": 9, "finished": True}, 9, True),
    ],
)
def test_processes_compare_what_they_start_from(tmp_path, monkeypatch, resumed, step, finished):
    compared = []
    monkeypatch.setattr(run_state, "check_alike", lambda *given: compared.append(given))
    (tmp_path / "valid").write_text("{}")
    args = SimpleNamespace(valid_data=tmp_path / "valid")
    check_same_start(args, ALONE, IDENTITY, resumed)
    assert not compared
    check_same_start(args, DistEnv(1, 2, 0, torch.device("cpu")), IDENTITY, resumed)
    ((settings, world_size),) = compared
    own = {"step to resume from": step, "a resumed run with finished =": finished}
    assert {**settings, **IDENTITY, **own} == settings
    assert settings["validation data"]
    assert world_size == 2


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harmed",)


def test_a_pickle_that_would_run_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"step": 3, "x": Harmful()}, RESUME_NAME)
    with pytest.raises(CheckpointError, match=r"resume\.pt: missing or damaged \("):
        read_run(tmp_path)
    assert not (tmp_path / "harmed").exists()


SOUND = {"run": {}, "step": 3, "finished": False}


@pytest.mark.parametrize(
    "content",
    [b"", b"half a file", b"PK\x03\x04", *({**SOUND, name: None} for name in SOUND)],
)
def test_a_damaged_file(tmp_path, content):
    if isinstance(content, bytes):
        (tmp_path / RESUME_NAME).write_bytes(content)
    else:
        torch.save(content, tmp_path / RESUME_NAME)
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
