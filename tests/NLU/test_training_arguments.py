"""`TrainingArguments` has 4.4.2's fields and defaults; what depends on them, and run states."""

import dataclasses
import importlib.util
import json
import sys

import pytest
import torch
from small_trainers import make_line_trainer

from transformers import TrainerState, TrainingArguments
from transformers.training_args import ParallelMode

# 4.4.2's fields with their values after __init__, except those that depend on the machine, the time
# or the installed packages.
DEFAULTS = {
    "overwrite_output_dir": False,
    "do_train": False,
    "do_eval": False,
    "do_predict": False,
    "evaluation_strategy": "no",
    "prediction_loss_only": False,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "per_gpu_train_batch_size": None,
    "per_gpu_eval_batch_size": None,
    "gradient_accumulation_steps": 1,
    "eval_accumulation_steps": None,
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "lr_scheduler_type": "linear",
    "warmup_ratio": 0.0,
    "warmup_steps": 0,
    "logging_strategy": "steps",
    "logging_first_step": False,
    "logging_steps": 500,
    "save_strategy": "steps",
    "save_steps": 500,
    "save_total_limit": None,
    "no_cuda": False,
    "seed": 42,
    "fp16": False,
    "fp16_opt_level": "O1",
    "fp16_backend": "auto",
    "fp16_full_eval": False,
    "local_rank": -1,
    "tpu_num_cores": None,
    "tpu_metrics_debug": False,
    "debug": False,
    "dataloader_drop_last": False,
    "eval_steps": 500,
    "dataloader_num_workers": 0,
    "past_index": -1,
    "run_name": "out",
    "remove_unused_columns": True,
    "label_names": None,
    "load_best_model_at_end": False,
    "metric_for_best_model": None,
    "greater_is_better": None,
    "ignore_data_skip": False,
    "sharded_ddp": "",
    "deepspeed": None,
    "label_smoothing_factor": 0.0,
    "adafactor": False,
    "group_by_length": False,
    "ddp_find_unused_parameters": None,
    "dataloader_pin_memory": True,
    "skip_memory_metrics": False,
}


@pytest.fixture
def args(monkeypatch):
    """Makes TrainingArguments of a run with this process alone."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return lambda **given: TrainingArguments("out", **given)


def test_fields_and_defaults_are_those_of_4_4_2(args):
    made = args()
    assert {name: getattr(made, name) for name in DEFAULTS} == DEFAULTS
    fields = {field.name for field in dataclasses.fields(made) if field.init}
    assert {"output_dir", "logging_dir", "disable_tqdm", "report_to", *DEFAULTS} <= fields


def test_fp16_with_apex_is_an_error(args):
    with pytest.raises(ValueError, match="use --fp16_backend amp"):
        args(fp16=True, fp16_backend="apex")
    args(fp16=True)
    args(fp16_backend="apex")  # it has no effect without fp16


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, 1),
        ({"RANK": "0", "WORLD_SIZE": "1"}, -1),  # may be left from another job
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, 0),
        ({"LOCAL_RANK": "-1"}, -1),
        ({"RANK": "1", "WORLD_SIZE": "2"}, 0),  # one process per machine, which has at most one GPU
        ({"WORLD_SIZE": "2"}, "^RANK is not set in the environment: start"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "first"}, "^LOCAL_RANK is 'first'"),
    ],
)
def test_local_rank_comes_from_the_launcher_s_environment(args, monkeypatch, environment, expected):
    """Without a local rank, each of several processes would be a separate run."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if isinstance(expected, int):
        assert args().local_rank == expected
        assert args(local_rank=3).local_rank == 3
        return
    with pytest.raises(ValueError, match=expected):
        args()


def test_bars_are_off_if_standard_error_is_closed(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stderr", None)
    assert TrainingArguments(str(tmp_path)).disable_tqdm is True


def test_batch_sizes_and_devices(args):
    made = args(per_device_train_batch_size=3, per_device_eval_batch_size=5, no_cuda=True)
    assert (made.train_batch_size, made.eval_batch_size) == (3, 5)
    assert made.n_gpu == 0
    assert made.place_model_on_device
    made.__dict__["device"] = torch.device("cuda", 0)
    assert made.n_gpu == 1
    assert (made.train_batch_size, made.eval_batch_size) == (3, 5)


def test_parallel_mode(args):
    assert args().parallel_mode is ParallelMode.NOT_PARALLEL
    assert args(local_rank=0).parallel_mode is ParallelMode.DISTRIBUTED


def test_settings_as_dicts_and_json(args):
    made = args(evaluation_strategy="epoch", report_to="none", per_device_train_batch_size=3)
    plain = made.to_dict()
    assert plain["evaluation_strategy"] == "epoch"
    assert json.loads(made.to_json_string()) == plain
    table = made.to_sanitized_dict()
    assert {type(value) for value in table.values()} <= {bool, int, float, str}
    assert (table["train_batch_size"], table["eval_batch_size"]) == (3, 8)
    assert table["label_names"] == "None"
    assert table["report_to"] == "['none']"
    assert table["learning_rate"] == 5e-5


@pytest.mark.parametrize(
    ("asked", "expected"),
    [("none", ["none"]), ("all", ["all"]), (None, ["all"]), ([], []), (["wandb"], ["wandb"])],
)
def test_report_to_may_be_a_string(args, asked, expected):
    assert args(report_to=asked).report_to == expected


@pytest.mark.parametrize("name", ["comet_ml", "mlflow", "azure_ml"])
def test_unsupported_values_of_report_to_are_errors(args, name):
    with pytest.raises(ValueError, match=f"not {name}: add a TrainerCallback for it"):
        args(report_to=name)


@pytest.mark.parametrize(
    ("given", "steps", "is_logged"),
    [
        ({"evaluation_strategy": "steps", "eval_steps": 3, "save_steps": 5}, 3, True),
        ({"evaluation_strategy": "epoch", "save_steps": 5}, 5, True),
        ({"evaluation_strategy": "epoch", "save_strategy": "epoch", "save_steps": 5}, 5, False),
    ],
)
def test_load_best_model_at_end_saves_at_every_evaluation(args, caplog, given, steps, is_logged):
    caplog.set_level("INFO")
    made = args(load_best_model_at_end=True, **given)
    assert (made.save_strategy, made.save_steps) == (given["evaluation_strategy"], steps)
    assert ("a checkpoint is saved at every evaluation" in caplog.text) == is_logged


def test_report_to_none_with_others_is_an_error(args):
    with pytest.raises(ValueError, match=r"report_to none: leave it out, or plot, tensorboard$"):
        args(report_to=["tensorboard", "none", "plot"])


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_report_to_a_package_that_is_not_installed_is_an_error(tmp_path, monkeypatch, name):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == name else find(n))
    with pytest.raises(ValueError, match=f"report_to {name}: it is not installed"):
        make_line_trainer(tmp_path, report_to=name)


# ---- the state of a run ----


def test_a_state_is_saved_and_loaded(tmp_path):
    state = TrainerState(
        epoch=1.5,
        global_step=3,
        total_flos=7.0,
        log_history=[{"loss": 0.5, "step": 3}],
        is_hyper_param_search=True,
        trial_name="run-1",
        trial_params={"seed": 3},
    )
    state.save_to_json(tmp_path / "state.json")
    assert TrainerState.load_from_json(tmp_path / "state.json") == state


def test_a_state_written_by_4_4_2_is_loaded(tmp_path):
    """The file is what 4.4.2 writes after three updates."""
    written = {
        "best_metric": None,
        "best_model_checkpoint": None,
        "epoch": 0.375,
        "global_step": 3,
        "is_hyper_param_search": False,
        "is_local_process_zero": True,
        "is_world_process_zero": True,
        "log_history": [{"epoch": 0.38, "loss": 0.5, "learning_rate": 1e-5, "step": 3}],
        "max_steps": 24,
        "num_train_epochs": 3,
        "total_flos": 123456,
        "trial_name": None,
        "trial_params": None,
    }
    (tmp_path / "state.json").write_text(json.dumps(written))
    state = TrainerState.load_from_json(tmp_path / "state.json")
    assert dataclasses.asdict(state) == written


def test_operations_are_six_per_token_and_weight(make_trainer, monkeypatch):
    """All weights count but the embeddings'; a resumed run has the same total.

    Its speed is that of its own examples, of which an epoch's last batch has fewer.
    """
    monkeypatch.setattr("transformers.trainer.speed_metrics", lambda *given: {"rows": given[-1]})
    settings = {"save_strategy": "steps", "per_device_train_batch_size": 8}
    trainer = make_trainer(**settings, save_steps=4)
    assert trainer.train().metrics["rows"] == 2 * 20
    batches = []
    for epoch in range(2):
        loader = trainer.get_train_dataloader()
        loader.sampler.batches.epoch = epoch
        batches += [batch["input_ids"].numel() for batch in loader]
    modules = trainer.model.modules()
    embeddings = sum(m.weight.numel() for m in modules if isinstance(m, torch.nn.Embedding))
    weights = sum(p.numel() for p in trainer.model.parameters()) - embeddings
    assert trainer.state.total_flos == 6 * sum(batches) * weights
    metrics = make_trainer(**settings).train(str(trainer.checkpoints.folder(4))).metrics
    assert metrics["rows"] == 8 + 4
    assert metrics["total_flos"] == trainer.state.total_flos
