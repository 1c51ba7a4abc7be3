"""The Trainer's checkpoints: which ones stay, resuming to the same bits, and refusals."""

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from compare import assert_same_bits
from encoder_options import NO_DROPOUT
from product_methods import ChosenMethods
from small_trainers import make_line_trainer, make_points
from trainer_runs import (
    largest_difference,
    make_data,
    sequence,
    trained,
    without_runtimes,
)

from loralib.adapters.formats import read_adapter
from loralib.errors import CheckpointError, DiskFullError
from loralib.io.tensors import read_tensors, write_tensors, write_torch
from loralib.training.determinism import set_dropout_seed
from transformers import (
    EarlyStoppingCallback,
    RobertaForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    TrainingError,
    trainer_agreement,
    trainer_best,
    trainer_checkpoint,
)
from transformers.trainer_agreement import agreed_checkpoint
from transformers.trainer_best import find_best
from transformers.trainer_callback import TrainerState
from transformers.trainer_checkpoint import outdated_checkpoints
from transformers.trainer_progress import Progress
from transformers.trainer_utils import list_checkpoints

pytestmark = pytest.mark.slow

# ---- linear methods ----


def test_a_resumed_run_uses_the_recorded_linear_methods_in_every_step(
    make_trainer, tmp_path, monkeypatch
):
    """Another method may be the fastest when it resumes."""
    ways, in_use = ChosenMethods(monkeypatch, tmp_path), []

    class Recording(TrainerCallback):
        def on_step_begin(self, *given, **more):
            in_use.append(ways.in_use())

    ways.fastest("blocks")
    make_trainer(save_strategy="steps", save_steps=4).train()
    ways.fastest("plain")
    trainer = make_trainer(callbacks=[Recording])
    trainer.train(str(tmp_path / "out" / "checkpoint-4"))
    assert in_use == [{"blocks"}] * 6
    in_use.clear()
    make_trainer(callbacks=[Recording]).train()
    assert in_use == [{"plain"}] * 10


# ---- checkpoints: the best, the newest, and no others ----

BEST = {"load_best_model_at_end": True, "metric_for_best_model": "score"}


def every(steps):
    """The settings of a run that evaluates and saves after each so many steps."""
    strategies = {"evaluation_strategy": "steps", "save_strategy": "steps"}
    return {**strategies, "eval_steps": steps, "save_steps": steps}


@pytest.mark.parametrize("settings", [{}, {"save_lora_only": True}, {"bf16": True}])
@pytest.mark.parametrize("metric", ["score", "eval_score"])
def test_the_best_model_is_loaded_at_the_end(make_trainer, tmp_path, settings, metric):
    settings = {**every(2), **BEST, "metric_for_best_model": metric, **settings}
    trainer = make_trainer(compute_metrics=sequence(1, 5, 3, 5, 2), **settings)
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "out" / "checkpoint-4")
    assert trainer.state.best_metric == 5
    saved, last = (read_adapter(tmp_path / "out" / f"checkpoint-{n}").tensors for n in (4, 10))
    assert_same_bits(trained(trainer.model), saved)
    assert largest_difference(saved, last) > 1e-4


def test_a_run_that_only_compares_its_models_ends_with_the_last_one(make_trainer, tmp_path):
    trainer = make_trainer(
        compute_metrics=sequence(5, 1), metric_for_best_model="score", **every(5)
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "out" / "checkpoint-5")
    last = read_adapter(tmp_path / "out" / "checkpoint-10").tensors
    assert_same_bits(trained(trainer.model), last)


@pytest.mark.parametrize(
    ("settings", "greater"),
    [
        ({}, False),
        ({"metric_for_best_model": "eval_loss"}, False),
        ({"metric_for_best_model": "accuracy"}, True),
        ({"metric_for_best_model": "mse"}, False),
        ({"metric_for_best_model": "eval_german_loss"}, False),
        ({"metric_for_best_model": "logloss"}, False),
        ({"metric_for_best_model": "eval_RMSE"}, False),
        ({"metric_for_best_model": "neg_mean_squared_error"}, True),
        ({"metric_for_best_model": "german_neg_mse"}, True),
        ({"metric_for_best_model": "mse", "greater_is_better": True}, True),
        ({"metric_for_best_model": "mse", "greater_is_better": False}, False),
    ],
)
def test_losses_and_errors_are_better_if_lower_and_other_metrics_if_greater(settings, greater):
    args = TrainingArguments(
        "out",
        load_best_model_at_end=True,
        evaluation_strategy="epoch",
        save_strategy="epoch",
        **settings,
    )
    assert args.metric_for_best_model == settings.get("metric_for_best_model", "loss")
    assert args.greater_is_better is greater


def test_an_unknown_metric_for_best_model_is_an_error(make_trainer):
    trainer = make_trainer(
        load_best_model_at_end=True,
        metric_for_best_model="acuracy",
        evaluation_strategy="epoch",
        save_strategy="epoch",
        compute_metrics=lambda p: {"accuracy": 1.0},
    )
    with pytest.raises(TrainingError, match=r"eval_acuracy; known: loss, accuracy"):
        trainer.train()


@pytest.mark.parametrize(
    ("limit", "scores", "steps", "folder"),
    [
        (1, None, [10], "out"),
        (2, None, [8, 10], "./out/"),
        (4, None, [4, 6, 8, 10], "out"),
        (7, None, [2, 4, 6, 8, 10, 99], "out"),
        (1, (1, 9, 2, 3, 4), [4, 10], "out"),
        (1, (1, 9, 2, 3, 4), [4, 10], "./out"),
        (2, (9, 1, 2, 3, 4), [2, 8, 10], "a/../out"),
        (2, (1, 2, 3, 9, 4), [8, 10], "out"),
    ],
)
def test_save_total_limit_keeps_the_newest_and_the_best(
    make_trainer, tmp_path, monkeypatch, limit, scores, steps, folder
):
    """Of this run: those of a run before it are deleted first."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    for step in (4, 99):
        (tmp_path / "out" / f"checkpoint-{step}").mkdir(parents=True)
    settings = {"output_dir": folder, "save_total_limit": limit, **every(2)}
    if scores:
        settings |= {"compute_metrics": sequence(*scores), **BEST}
    trainer = make_trainer(**settings)
    trainer.train()
    names = [Path(path).name for path in list_checkpoints("out")]
    assert names == [f"checkpoint-{step}" for step in steps]


@pytest.mark.parametrize("is_second_run", [False, True])
def test_a_checkpoint_that_cannot_be_deleted_does_not_end_the_run(
    make_trainer, tmp_path, monkeypatch, caplog, is_second_run
):
    """Such as another user's, or one with files that are open on a network file system."""
    if is_second_run:
        left = tmp_path / ".checkpoint-4.deleted"
        left.mkdir()
        (left / "optimizer.pt").touch()

    def rmtree(folder, ignore_errors=False):
        if not ignore_errors:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "optimizer.pt")

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    trainer = make_trainer(
        output_dir=str(tmp_path), save_strategy="steps", save_steps=4, save_total_limit=1
    )
    trainer.train()
    names = [Path(path).name for path in list_checkpoints(tmp_path)]
    assert names == ["checkpoint-4"] * is_second_run + ["checkpoint-8"]
    assert f"{tmp_path}/.checkpoint-4.deleted cannot be removed: Permission denied" in caplog.text
    if is_second_run:
        assert f"{tmp_path}/checkpoint-4 cannot be removed: Directory not empty" in caplog.text


@pytest.mark.parametrize(
    ("folder", "steps"), [("out", 4), ("./out", 4), ("out/", 4), ("a/../out", 4), ("out", 5)]
)
def test_a_new_run_replaces_an_older_one_s_checkpoints(
    make_trainer, tmp_path, monkeypatch, folder, steps
):
    """And keeps its own, even if one has the name of an older one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    settings = {"output_dir": folder, "save_strategy": "steps"}
    make_trainer(num_train_epochs=3, save_steps=5, **settings).train()
    assert [Path(path).name for path in list_checkpoints("out")][-1] == "checkpoint-15"
    make_trainer(overwrite_output_dir=True, save_steps=steps, **settings).train()
    names = [Path(path).name for path in list_checkpoints("out")]
    assert names == [f"checkpoint-{steps}", f"checkpoint-{2 * steps}"]


def test_a_resumed_run_keeps_its_checkpoints(tmp_path):
    """Even if it has the flag that replaces an older run's."""
    settings = {"save_strategy": "steps", "save_steps": 2, "overwrite_output_dir": True}
    make_line_trainer(tmp_path, **settings).train()
    make_line_trainer(tmp_path, **settings).train(str(tmp_path / "checkpoint-4"))
    names = [Path(path).name for path in list_checkpoints(tmp_path)]
    assert names == [f"checkpoint-{step}" for step in (2, 4, 6, 8, 10)]


def test_a_checkpoint_that_does_not_fit_on_the_disk_leaves_nothing(
    make_trainer, tmp_path, monkeypatch
):
    def fail(state, path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(TrainerState, "save_to_json", fail)
    with pytest.raises(DiskFullError, match="/checkpoint-3: the disk is full"):
        make_trainer(save_strategy="steps", save_steps=3).train()
    assert list((tmp_path / "out").iterdir()) == []


def test_early_stopping_counts_on_in_a_resumed_run(make_trainer, tmp_path):
    def make(*scores):
        callback = EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.5)
        settings = {**every(1), **BEST, "logging_strategy": "epoch"}
        return make_trainer(callbacks=[callback], compute_metrics=sequence(*scores), **settings)

    trainer = make(1, 3, 3.2, 2, 9, 9)
    assert trainer.train().global_step == 4
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-3")

    # Resumed from its last checkpoint, the run ends at once; from an earlier one, it continues.
    out = tmp_path / "out"
    ended = make(9)
    assert ended.train(str(out / "checkpoint-4")).global_step == 4
    histories = [without_runtimes(each.state.log_history) for each in (ended, trainer)]
    assert histories[0] == histories[1]
    assert make(2, 9).train(str(out / "checkpoint-3")).global_step == 4
    with pytest.raises(ValueError, match="needs --load_best_model_at_end"):
        make_trainer(callbacks=[EarlyStoppingCallback]).train()


# ---- resuming ----

RESUMES = {
    "in the middle of an epoch": ({}, 3),
    "at the end of an epoch": ({}, 5),
    "after an epoch": ({"save_strategy": "epoch"}, 5),
    "in the second epoch": ({"max_grad_norm": 0.1}, 7),
    "with gradients left over": ({"gradient_accumulation_steps": 2, "save_strategy": "epoch"}, 2),
    "between two evaluations": ({"evaluation_strategy": "steps", "eval_steps": 2}, 5),
    "before an epoch's evaluation": ({"evaluation_strategy": "epoch"}, 5),
    "before the last epoch's evaluation": ({"evaluation_strategy": "epoch"}, 10),
    "before the evaluation of a part of an epoch": (
        {"evaluation_strategy": "epoch", "max_steps": 7},
        7,
    ),
    "after the evaluation of a part of an epoch": (
        {"evaluation_strategy": "epoch", "save_strategy": "epoch", "max_steps": 7},
        7,
    ),
    "before the last epoch's log": ({"logging_strategy": "epoch"}, 10),
    "between two logs": ({"logging_steps": 4}, 6),
    "with LoRA alone": ({"save_lora_only": True}, 3),
    "in bfloat16": ({"bf16": True}, 3),
    "in bfloat16 with LoRA alone": ({"bf16": True, "save_lora_only": True}, 3),
    "grouped by length": ({"group_by_length": True}, 3),
    "with a cosine": ({"lr_scheduler_type": "cosine", "warmup_steps": 2}, 3),
    "at its very end": ({}, 10),
    "with Adafactor": ({"adafactor": True}, 3),
}


@pytest.mark.parametrize(("settings", "step"), RESUMES.values(), ids=RESUMES)
def test_a_resumed_run_ends_with_the_same_bits(make_trainer, tmp_path, settings, step):
    settings = {"save_strategy": "steps", "save_steps": step, "logging_steps": 1, **settings}
    whole = make_trainer(dropout=0.1, **settings)
    whole.train()
    checkpoint = tmp_path / "out" / f"checkpoint-{step}"
    assert checkpoint.is_dir()
    resumed = make_trainer(dropout=0.1, output_dir=str(tmp_path / "second"), **settings)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert_same_bits(resumed.model.state_dict(), whole.model.state_dict())
    histories = [without_runtimes(trainer.state.log_history) for trainer in (resumed, whole)]
    assert histories[0] == histories[1]


def test_a_resumed_run_without_lora_ends_with_the_same_bits(make_trainer, make_model, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 3, "learning_rate": 1e-3}
    whole = make_trainer(make_model(0.1, lora=False), **settings)
    whole.train()
    resumed = make_trainer(make_model(0.1, lora=False), **settings)
    resumed.train(str(tmp_path / "out" / "checkpoint-3"))
    assert_same_bits(resumed.model.state_dict(), whole.model.state_dict())


def test_resuming_a_gpu_s_checkpoint_on_a_cpu_warns(make_trainer, tmp_path, caplog):
    """The bits are the same after all, since a CPU draws nothing from a GPU's generator."""
    settings = {"dropout": 0.2, "save_strategy": "steps", "save_steps": 4, "no_cuda": True}
    trainer = make_trainer(**settings)
    trainer.train()
    path = tmp_path / "out" / "checkpoint-4" / "rng_state_0.pth"
    own = torch.load(path, weights_only=True)
    assert "cuda" not in own["rng"]
    own["rng"]["cuda"] = torch.zeros(16, dtype=torch.uint8)
    torch.save(own, path)
    caplog.clear()
    again = make_trainer(**settings, output_dir=str(tmp_path / "again"))
    again.train(str(path.parent))
    (line,) = [message for message in caplog.messages if "bit-exact" in message]
    assert "was written on a GPU, and this run computes on a CPU" in line
    assert_same_bits(again.model.state_dict(), trainer.model.state_dict())


def test_a_process_s_state_of_another_step_is_refused(make_trainer, checkpoint):
    """It can happen if another process of that run had resumed from an older checkpoint."""
    path = checkpoint / "rng_state_0.pth"
    own = torch.load(path, weights_only=True)
    own["progress"]["step"] -= 1
    torch.save(own, path)
    step = own["progress"]["step"]
    with pytest.raises(CheckpointError, match=rf"rng_state_0.pth: .*from step {step}, the other"):
        make_trainer().train(str(checkpoint))


def test_random_states_differ_after_the_number_of_processes_changes(
    make_trainer, checkpoint, monkeypatch, tmp_path
):
    """A checkpoint of two processes resumes in three: two have their generators' states, and the
    third has that of a new run's third process.
    """
    other = torch.load(checkpoint / "rng_state_0.pth", weights_only=True)
    other["rng"]["torch"] = torch.Generator().manual_seed(99).get_state()
    drawn = []
    for index in range(3):
        folder = shutil.copytree(checkpoint, tmp_path / str(index) / checkpoint.name)
        own = torch.load(folder / "rng_state_0.pth", weights_only=True)
        for state in (own, other):
            state["layout"]["processes"] = 2
        torch.save(own, folder / "rng_state_0.pth")
        torch.save(other, folder / "rng_state_1.pth")
        trainer = make_trainer(max_steps=12)
        monkeypatch.setattr(type(trainer.args), "process_index", property(lambda self, i=index: i))
        passes = trainer._training_passes()
        trainer._prepare_optimizer(12)
        trainer._progress = Progress()
        set_dropout_seed(trainer.args.seed, index)
        trainer.checkpoints.resume(str(folder), trainer._run_state(), passes.length)
        drawn.append(torch.rand(4))
    assert torch.equal(drawn[1], torch.rand(4, generator=torch.Generator().manual_seed(99)))
    fresh = torch.Generator().manual_seed(trainer.args.seed + 2)
    assert torch.equal(drawn[2], torch.rand(4, generator=fresh))
    assert not torch.equal(drawn[0], drawn[1])


def test_gradients_left_over_are_averaged_over_the_processes_that_saved_them(tmp_path):
    """A checkpoint of two processes resumes in one, after an epoch's last batch had no update."""
    settings = {"gradient_accumulation_steps": 4, "save_strategy": "epoch"}
    make_line_trainer(tmp_path, **settings).train()
    folder = tmp_path / "checkpoint-1"
    own = torch.load(folder / "rng_state_0.pth", weights_only=True)
    own["layout"]["processes"] = 2
    torch.save(own, folder / "rng_state_0.pth")
    pending = own["pending_gradients"]
    other = {name: 3 * gradient for name, gradient in pending.items()}
    torch.save({**own, "pending_gradients": other}, folder / "rng_state_1.pth")
    trainer = make_line_trainer(tmp_path, **settings)
    trainer._prepare_optimizer(2)
    trainer._progress = Progress()
    trainer.checkpoints.resume(str(folder), trainer._run_state(), 5)
    assert {name: p.grad for name, p in trainer.model.named_parameters()} == {
        name: 2 * gradient for name, gradient in pending.items()
    }
    assert set(pending) == {"a", "b"}


@pytest.fixture
def found_by_process_0(monkeypatch):
    """``found_by_process_0(name)``: what process 0 of two finds; this process is the other one."""

    def pretend(name):
        monkeypatch.setattr(trainer_agreement, "gather_objects", lambda value, _: [name, value])

    return pretend


def test_all_processes_resume_the_first_one_s_checkpoint(checkpoint, found_by_process_0):
    args = TrainingArguments(str(checkpoint.parent))
    found_by_process_0(checkpoint.name)
    assert agreed_checkpoint(args, str(checkpoint)) == str(checkpoint)
    for seen in (None, str(checkpoint.with_name("checkpoint-1"))):
        assert agreed_checkpoint(args, seen) == str(checkpoint)


@pytest.mark.parametrize("first", [None, "checkpoint-99"])
def test_a_checkpoint_that_not_all_processes_see_is_refused(
    checkpoint, found_by_process_0, monkeypatch, first
):
    monkeypatch.setattr(trainer_agreement, "appears", lambda path: path.exists())
    found_by_process_0(first)
    args = TrainingArguments(str(checkpoint.parent))
    with pytest.raises(TrainingError, match=f"{first or 'none'}.*machines have to share"):
        agreed_checkpoint(args, str(checkpoint))


@pytest.mark.parametrize("before", [0, 3])
def test_resuming_with_another_number_of_threads_warns(make_trainer, checkpoint, caplog, before):
    path, now = checkpoint / "rng_state_0.pth", torch.get_num_threads()
    own = torch.load(path, weights_only=True)
    assert own["threads"] == now
    own["threads"] = now + before
    torch.save(own, path)
    make_trainer(no_cuda=True).train(str(checkpoint))
    warnings = [message for message in caplog.messages if "OMP_NUM_THREADS" in message]
    assert len(warnings) == bool(before)
    assert not warnings or f"with OMP_NUM_THREADS={now + 3}, this run has {now}," in warnings[0]


def test_runs_with_other_random_states_differ(make_trainer, tmp_path):
    """So the equal bits in the tests above do not come from a lack of randomness."""
    finals = []
    for seed in (1, 2):
        trainer = make_trainer(dropout=0.1, seed=seed, output_dir=str(tmp_path / str(seed)))
        trainer.train()
        finals.append(trained(trainer.model))
    assert largest_difference(*finals) > 1e-4


def test_lora_only_checkpoints_have_no_full_model(make_trainer, tmp_path):
    make_trainer(save_lora_only=True, save_strategy="epoch").train()
    names = {path.name for path in (tmp_path / "out" / "checkpoint-5").iterdir()}
    assert "pytorch_model_lora.bin" in names
    assert not names & {"pytorch_model.bin", "model.safetensors"}


@pytest.mark.parametrize("lora_only", [True, False])
def test_a_base_that_is_trained_as_well_is_not_left_out_silently(
    make_trainer, make_model, caplog, lora_only
):
    model = make_model()
    model.requires_grad_(True)
    trainer = make_trainer(model, save_lora_only=lora_only, max_steps=1)
    message = "of the base is trained, and pytorch_model_lora.safetensors will not hold it: call "
    if lora_only:
        with pytest.raises(ValueError, match=message):
            trainer.train()
    else:
        trainer.train()
        assert caplog.text.count(message) == 1
    caplog.clear()
    model.train_only(["lora_"])
    trainer.train()
    assert message not in caplog.text


def test_lora_only_needs_lora(make_trainer, make_model):
    with pytest.raises(ValueError, match="save_lora_only needs a model with LoRA"):
        make_trainer(make_model(lora=False), save_lora_only=True)


@pytest.fixture
def checkpoint(make_trainer, tmp_path) -> Path:
    """The checkpoint of the fifth of ten steps."""
    make_trainer(save_strategy="steps", save_steps=5).train()
    folder = tmp_path / "kept"
    shutil.move(tmp_path / "out" / "checkpoint-5", folder)
    return folder


FILES = ["optimizer.pt", "scheduler.pt", "rng_state_0.pth", "scaler.pt", "trainer_state.json"]
FILES += ["pytorch_model.bin", "pytorch_model_lora.safetensors"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_checkpoint_is_named(make_trainer, checkpoint, name, damage):
    path = checkpoint / name
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        path.unlink()
    trainer = make_trainer()
    if damage == "missing" and name.startswith("pytorch_model"):
        # LoRA's file in either format has all that was trained.
        trainer.train(str(checkpoint))
        return
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")) as caught:
        trainer.train(str(checkpoint))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"lora_r": 2, "lora_alpha": 4},
            "belongs to a run with --lora_r 4, but this run has 2: give the same setting",
        ),
        ({"lora_alpha": 16}, "a run with --lora_alpha 8, but this run has 16: give the same"),
        ({"num_labels": 3}, "belongs to a run with labels"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    make_trainer, make_model, checkpoint, settings, reason
):
    with pytest.raises(CheckpointError, match=reason):
        make_trainer(make_model(**settings)).train(str(checkpoint))


def test_a_checkpoint_on_another_base_is_refused(make_trainer, checkpoint, tiny_base, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(tiny_base, other)
    tensors, _ = read_tensors(other / "pytorch_model.bin")
    name = "encoder.layer.0.output.dense.weight"
    write_tensors(other / "pytorch_model.bin", {**tensors, name: tensors[name] * 2})
    model = RobertaForSequenceClassification.from_pretrained(
        other, apply_lora=True, lora_r=4, lora_alpha=8, **NO_DROPOUT
    )
    with pytest.raises(CheckpointError, match="was trained on another base"):
        make_trainer(model).train(str(checkpoint))


@pytest.mark.parametrize(
    ("settings", "was", "becomes"),
    [
        ({"per_device_train_batch_size": 10}, "examples a step = 4", "examples a step = 10"),
        ({"per_device_train_batch_size": 2}, "examples a step = 4", "examples a step = 2"),
        ({"train": make_data(12)}, "examples = 20", "examples = 12"),
        ({"gradient_accumulation_steps": 2}, "steps an update = 1", "steps an update = 2"),
    ],
)
def test_resuming_with_other_batches_warns(
    make_trainer, checkpoint, settings, was, becomes, caplog
):
    trainer = make_trainer(max_steps=12, **settings)
    assert trainer.train(str(checkpoint)).global_step == 12
    assert (
        f"belongs to a run with {was}; with {becomes} it resumes, but not bit-exactly"
        in caplog.text
    )


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (
            {"per_device_train_batch_size": 2},
            "examples a step = 4, but this run has .* = 2, so an epoch",
        ),
        ({"train": make_data(12)}, "examples = 20, but this run has examples = 12, so an epoch"),
        (
            {"gradient_accumulation_steps": 2},
            "steps an update = 1, but this run has .* = 2, so an epoch",
        ),
    ],
)
def test_resuming_with_other_batches_needs_max_steps(make_trainer, checkpoint, settings, names):
    """An epoch would have another number of steps, and so the run would have another length."""
    with pytest.raises(CheckpointError, match=f"belongs to a run with {names} would"):
        make_trainer(**settings).train(str(checkpoint))


def test_losses_after_a_change_of_accumulation_are_of_whole_updates(make_trainer, checkpoint):
    trainer = make_trainer(max_steps=8, gradient_accumulation_steps=4, logging_steps=1)
    trainer.train(str(checkpoint))
    losses = {r["step"]: r["loss"] for r in trainer.state.log_history if "loss" in r}
    assert all(0.4 < losses[step] < 1.5 for step in (6, 7, 8)), losses


def test_a_change_of_accumulation_resumes_at_an_update_s_first_batch(tmp_path):
    class Recording(Trainer):
        def training_step(self, model, inputs):
            self.seen.append(inputs["x"].tolist())
            return super().training_step(model, inputs)

    def seen(resumed=None, **settings):
        trainer = make_line_trainer(tmp_path, Recording, train_dataset=make_points(24), **settings)
        trainer.seen = []
        trainer.train(resumed)
        return trainer.seen

    first = seen(max_steps=3, save_strategy="steps", save_steps=3)
    checkpoint = str(tmp_path / "checkpoint-3")
    after = seen(checkpoint, max_steps=5, gradient_accumulation_steps=2)
    # The third batch is the first one of an update of two, so it is used again.
    assert after[0] == first[2]
    assert len(after) == 4
    assert seen(checkpoint, max_steps=5)[0] not in first


@pytest.mark.parametrize(("epochs", "warns"), [(2, False), (3, True)])
def test_resuming_a_run_with_another_length_warns(make_trainer, checkpoint, epochs, warns, caplog):
    trainer = make_trainer(num_train_epochs=epochs)
    assert trainer.train(str(checkpoint)).global_step == 5 * epochs
    warning = (
        f"{checkpoint} belongs to a run of 10 steps, but this run has {5 * epochs}: from here on"
    )
    assert (warning in caplog.text) is warns


def test_a_run_made_longer_evaluates_each_epoch_once(tmp_path):
    settings = {"evaluation_strategy": "epoch", "save_strategy": "epoch"}
    make_line_trainer(tmp_path, num_train_epochs=2, **settings).train()
    longer = make_line_trainer(tmp_path, num_train_epochs=3, **settings)
    longer.train(str(tmp_path / "checkpoint-10"))
    assert [r["epoch"] for r in longer.state.log_history if "eval_loss" in r] == [1, 2, 3]


@pytest.mark.parametrize("length", [{"num_train_epochs": 0.8}, {"max_steps": 4}])
def test_a_checkpoint_beyond_the_run_s_end_is_refused(make_trainer, checkpoint, length):
    with pytest.raises(CheckpointError) as caught:
        make_trainer(**length).train(str(checkpoint))
    assert f"{checkpoint}: has made 5 steps, but this run ends after 4: " in str(caught.value)


def test_a_run_whose_folder_was_moved_finds_its_best_model(make_trainer, tmp_path):
    settings = {**every(5), **BEST}
    make_trainer(compute_metrics=sequence(9, 1), **settings).train()
    (tmp_path / "out").rename(tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved" / "checkpoint-10")
    trainer = make_trainer(
        compute_metrics=sequence(1), output_dir=str(tmp_path / "moved"), **settings
    )
    trainer.train(str(tmp_path / "moved" / "checkpoint-5"))
    best = read_adapter(tmp_path / "moved" / "checkpoint-5").tensors
    assert_same_bits(trained(trainer.model), best)


# ---- other runs ----

OTHER_RUNS = {
    "learning rate": ({"learning_rate": 2e-2}, "--learning_rate 0.01, but this run has 0.02"),
    "seed": ({"seed": 7}, "--seed 42, but this run has 7"),
    "left-out examples": (
        {"dataloader_drop_last": True},
        "--dataloader_drop_last False, but this run has True",
    ),
    "schedule": (
        {"lr_scheduler_type": "cosine"},
        "--lr_scheduler_type linear, but this run has cosine",
    ),
}


@pytest.mark.parametrize(("settings", "message"), OTHER_RUNS.values(), ids=OTHER_RUNS)
def test_another_run_s_checkpoint_is_not_resumed(make_trainer, tmp_path, settings, message):
    make_trainer(save_strategy="steps", save_steps=3).train()
    checkpoint = str(tmp_path / "out" / "checkpoint-3")
    with pytest.raises(CheckpointError, match=f"belongs to a run with {message}"):
        make_trainer(**settings).train(resume_from_checkpoint=checkpoint)
    make_trainer(num_train_epochs=3).train(resume_from_checkpoint=checkpoint)


def test_another_setting_of_determinism_is_refused(make_trainer, checkpoint, device_settings):
    message = "a run with --use_deterministic_algorithms False, but this run has True"
    with pytest.raises(CheckpointError, match=message):
        make_trainer(use_deterministic_algorithms=True).train(str(checkpoint))


def test_a_checkpoint_may_lack_a_flag_that_its_version_did_not_have(make_trainer, checkpoint):
    path = checkpoint / "training_args.bin"
    written = torch.load(path)
    assert written.pop("torch_compile") is False
    write_torch(path, written)
    make_trainer().train(str(checkpoint))


def test_another_task_s_checkpoint_is_not_resumed(make_trainer, make_model, tmp_path):
    make_trainer(save_strategy="steps", save_steps=3).train()
    model = make_model()
    model.config.finetuning_task = "rte"
    with pytest.raises(
        CheckpointError, match="belongs to a run with task None, but this run has rte"
    ):
        make_trainer(model).train(str(tmp_path / "out" / "checkpoint-3"))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model_type", "deberta-v2", "roberta, but this run has deberta-v2"),
        ("hidden_act", "relu", "gelu, but this run has relu"),
        ("layer_norm_eps", 0.01, "1e-05, but this run has 0.01"),
        ("hidden_dropout_prob", 0.5, "0.0, but this run has 0.5"),
        ("classifier_dropout", 0.5, "None, but this run has 0.5"),
        ("attention_probs_dropout_prob", 0.5, "0.0, but this run has 0.5"),
        ("num_attention_heads", 2, "4, but this run has 2"),
    ],
)
def test_another_configuration_of_the_base_is_refused(
    make_trainer, make_model, tmp_path, name, value, message
):
    make_trainer(save_strategy="steps", save_steps=3).train()
    model = make_model()
    setattr(model.config, name, value)
    with pytest.raises(CheckpointError) as caught:
        make_trainer(model).train(str(tmp_path / "out" / "checkpoint-3"))
    assert f"a run with {name} (config.json) {message}: give the same" in str(caught.value)


def test_saving_lora_only_removes_an_earlier_run_s_full_model(make_trainer, tmp_path):
    out = tmp_path / "out"
    make_trainer().save_model()
    assert (out / "pytorch_model.bin").is_file()
    make_trainer(save_lora_only=True).save_model()
    assert not (out / "pytorch_model.bin").exists()
    assert (out / "pytorch_model_lora.bin").is_file()


def test_a_model_set_on_the_trainer_later_is_the_one_saved(make_trainer, make_model, tmp_path):
    trainer = make_trainer()
    trainer.model = other = make_model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    trainer.save_model(tmp_path / "other")
    saved = torch.load(tmp_path / "other" / "pytorch_model.bin", weights_only=True)
    assert_same_bits(saved, other.state_dict())


@dataclass
class Collator:
    """A padding collator with a setting, `share`."""

    share: float
    pad: Callable

    def __call__(self, rows):
        return self.pad(rows)


def test_another_setting_of_the_collator_is_refused(make_trainer, tmp_path):
    def make(share):
        trainer = make_trainer(save_strategy="steps", save_steps=4, max_steps=4)
        trainer.data_collator = Collator(share, trainer.data_collator)
        return trainer

    make(0.15).train()
    checkpoint = tmp_path / "out" / "checkpoint-4"
    make(0.15).train(str(checkpoint))
    with pytest.raises(
        CheckpointError, match=r"share \(data collator\) 0.15, but this run has 0.2"
    ):
        make(0.2).train(str(checkpoint))


# ---- several processes ----

NAME = "roberta.encoder.layer.0.attention.self.query.lora_A"


def test_weights_are_compared_after_a_checkpoint_is_read(make_trainer, tmp_path, monkeypatch):
    """Machines may have read different files."""
    make_trainer(save_strategy="steps", save_steps=4).train()
    compared = []
    monkeypatch.setattr(
        trainer_checkpoint,
        "check_same_weights",
        lambda model, _: compared.append(model.get_parameter(NAME).detach().clone()),
    )
    trainer = make_trainer(max_steps=4)
    trainer.train(str(tmp_path / "out" / "checkpoint-4"))
    (weight,) = compared
    assert torch.equal(weight, trainer.model.get_parameter(NAME))


@pytest.fixture
def from_the_first_process(monkeypatch):
    """Sets the value that is gathered from the first process."""

    def set_value(value):
        for module in (trainer_best, trainer_checkpoint):
            monkeypatch.setattr(module, "gather_objects", lambda own, _: [value, own])

    return set_value


def test_the_first_process_decides_which_checkpoints_are_replaced(tmp_path, from_the_first_process):
    (tmp_path / "checkpoint-3").mkdir()
    args = TrainingArguments(str(tmp_path), overwrite_output_dir=True)
    from_the_first_process(["checkpoint-7"])
    assert outdated_checkpoints(args) == ["checkpoint-7"]


def test_the_first_process_decides_which_model_is_the_best(tmp_path, from_the_first_process):
    args = TrainingArguments(str(tmp_path), metric_for_best_model="score")
    state = TrainerState()
    state.log_history = [{"eval_score": 0.5, "step": step} for step in (2, 4)]
    (tmp_path / "checkpoint-4").mkdir()  # this machine does not see checkpoint-2 yet
    from_the_first_process(("checkpoint-2", 0.5))
    find_best(state, args, tmp_path)
    assert state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    from_the_first_process((None, None))
    find_best(state, args, tmp_path)
    assert (state.best_model_checkpoint, state.best_metric) == (None, None)
