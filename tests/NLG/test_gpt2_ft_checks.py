"""Tests gpt2_ft.py's flags, and its warnings and errors before the training begins."""

from types import SimpleNamespace

import pytest
import torch

from gpt2_ft import (
    build_run,
    check_updates,
    loss_function,
    read_data,
    warn_of_ends,
    warn_of_rate,
)
from gpt2_ft_arguments import _OTHER_NAMES, check_fits, parse_args
from gpu import DistEnv
from loralib.lora_layer import lora_layers
from loralib.training.precision import Precision

FILES = ("--train_data", "train", "--valid_data", "valid")
IGNORED_FLAGS = ("--roll_interval", "--roll_lr", "--roll_step", "--eval_epoch")


def test_flags_of_the_release_without_effect_are_accepted():
    args = vars(parse_args([*FILES, *(word for flag in IGNORED_FLAGS for word in (flag, "3"))]))
    assert [args[flag[2:]] for flag in IGNORED_FLAGS] == [3] * 4


def test_flags_of_transformers_scripts_are_answered_with_flags_that_exist(capsys):
    for name, answer in _OTHER_NAMES.items():
        with pytest.raises(SystemExit):
            parse_args([*FILES, f"--{name}"])
        assert f"--{name}; " in capsys.readouterr().err
        if answer.startswith("--"):
            parse_args([*FILES, answer, "1" if answer != "--scheduler" else "linear"])


@pytest.mark.parametrize(
    ("flags", "is_warned_of"),
    [
        (["--lora_dim", "1"], True),
        (["--lora_dim", "1", "--lr", "1e-5"], False),
        (["--lora_dim", "0"], False),
        (["--lora_dim", "1", "--scheduler", "cycle"], False),  # cycle has its own rates
    ],
)
def test_the_default_rate_is_warned_of_with_lora(caplog, flags, is_warned_of):
    warn_of_rate(SimpleNamespace(**vars(parse_args([*FILES, "--lora_alpha", "4", *flags]))))
    expected = "--lr is not given: it is 1e-05, the release's default; its recipes have 2e-4"
    assert caplog.messages == [expected] * is_warned_of


def test_steps_that_make_no_update(caplog):
    check_updates(3, 3)
    check_updates(1, 5)
    assert not caplog.messages
    check_updates(3, 5)
    assert caplog.messages == [
        "--grad_acc 3: the last 2 of 5 steps make no update, as in the release"
    ]
    with pytest.raises(ValueError, match=r"--grad_acc 3: the run has 2 steps, so it would make no"):
        check_updates(3, 2)


def test_files_that_do_not_show_where_texts_end_are_warned_of(caplog):
    shows, does_not = (
        SimpleNamespace(shows_ends=lambda answer=answer: answer) for answer in (True, False)
    )
    warn_of_ends({"a": shows, "b": shows})
    assert not caplog.messages
    warn_of_ends({"a": does_not, "b": shows, "c": does_not})
    (text,) = caplog.messages
    assert text.startswith("a, c: completions do not all end in one token")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, None),
        ({"seq_len": 9}, "--seq_len 9: the model has 8 positions"),
        ({"init_checkpoint": None}, "--lora_dim needs a trained base: "),
        ({"lora_dim": 0, "lora_plus_ratio": 1, "save_lora_only": False}, None),
        ({"lora_dim": 0, "init_checkpoint": None, "save_lora_only": False}, "--lora_plus_ratio ne"),
        ({"lora_dim": 0, "lora_plus_ratio": 1}, "--save_lora_only needs LoRA: add --lora_dim"),
    ],
)
def test_flags_that_do_not_fit_the_model(flags, message):
    fitting = {"seq_len": 8, "lora_dim": 1, "init_checkpoint": "base"}
    args = {**fitting, "save_lora_only": True, "lora_plus_ratio": 4, **flags}
    given = (SimpleNamespace(**args), SimpleNamespace(n_positions=8))
    if message is None:
        check_fits(*given)
    else:
        with pytest.raises(ValueError, match=f"^{message}"):
            check_fits(*given)


def test_only_the_training_loss_is_smoothed():
    """Evaluations are not, so that runs with different smoothing can be compared."""
    batch = {name: torch.zeros(1) for name in ("input", "target", "mask", "packed_rows")}
    loss_of = loss_function(Precision(torch.float32, "cpu"), torch.device("cpu"))

    def network(inputs, targets, mask, label_smooth, rows):
        return label_smooth

    assert [loss_of(network, batch, 0.25), loss_of(network, batch)] == [0.25, 0]


@pytest.mark.parametrize(
    ("flags", "last_step", "schedule_end"),
    [
        (["--max_epoch", 3], 12, 12),  # 14 examples, 4 per step
        (["--max_step", 5], 5, 5),
        (["--max_step", 50, "--max_epoch", 2], 8, 50),
    ],
)
def test_a_run_is_built_as_the_flags_say(tiny, tmp_path, flags, last_step, schedule_end):
    args = parse_args(tiny.flags(tmp_path, *map(str, flags), "--lora_dropout", "0.25"))
    alone = DistEnv(0, 1, 0, torch.device("cpu"))
    run = build_run(args, alone, *read_data(args, alone), new_lora=True)
    assert {layer.lora_dropout.p for layer in lora_layers(run.model).values()} == {0.25}
    trained = {name for name, parameter in run.model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in run.model.named_parameters() if "lora_" in name}
    assert (run.epoch_steps, run.last_step) == (4, last_step)
    assert (run.scheduler.max_step, run.identity["last step"]) == (schedule_end,) * 2
    assert run.identity["base"] == run.base.fingerprint


@pytest.mark.parametrize("objective", ["clm", "jlm"])
def test_evaluations_score_completions_only(tiny, tmp_path, objective):
    args = parse_args(tiny.flags(tmp_path, "--obj", objective))
    trained, evaluated = read_data(args, DistEnv(0, 1, 0, torch.device("cpu")))
    assert (trained.joint_lm, evaluated.joint_lm) == (objective == "jlm", False)
    assert (trained.batch_size, evaluated.batch_size) == (4, 3)
    assert {trained.max_seq_length, evaluated.max_seq_length} == {12}


@pytest.mark.parametrize(
    ("objective", "rank", "is_warned_of"), [("clm", 0, True), ("clm", 1, False), ("jlm", 0, False)]
)
def test_ends_of_texts_matter_if_completions_are_learned(
    tiny, tmp_path, caplog, objective, rank, is_warned_of
):
    args = parse_args(tiny.flags(tmp_path, "--obj", objective))
    read_data(args, DistEnv(rank, 2, rank, torch.device("cpu")))
    assert any("where a text ends" in text for text in caplog.messages) == is_warned_of
