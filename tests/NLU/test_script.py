"""The stages that the tasks' scripts share: what each writes, and in which order."""

from types import SimpleNamespace

import pytest

from loralib.errors import TrainingError
from transformers import TrainingArguments
from transformers.fine_tuning.script import check_scores, needed_splits, report, train


class Recorder:
    """A Trainer that records the calls of its methods.

    Args:
        args: its settings.
        apply_lora: whether its model has LoRA.
    """

    def __init__(self, args, apply_lora=True):
        self.args, self.calls = args, []
        self.model = SimpleNamespace(config=SimpleNamespace(apply_lora=apply_lora))
        self.state = SimpleNamespace(epoch=1.23456)
        self.train_dataset = range(7)

    def train(self, resume_from_checkpoint):
        self.calls.append(("train", resume_from_checkpoint))
        return SimpleNamespace(metrics={"train_loss": 0.5})

    def __getattr__(self, name):
        return lambda *given: self.calls.append((name, *given))


@pytest.fixture
def args(tmp_path):
    return lambda **given: TrainingArguments(str(tmp_path / "out"), **given)


def test_training_writes_model_state_and_metrics(args):
    trainer = Recorder(args(do_train=True))
    train(trainer, "checkpoint-3")
    metrics = {"train_loss": 0.5, "train_samples": 7, "epoch": 1.23}
    assert trainer.calls == [
        ("train", "checkpoint-3"),
        ("save_model",),
        ("save_state",),
        ("log_metrics", "train", metrics),
        ("save_metrics", "train", metrics),
    ]


def test_evaluation_without_training_has_no_epoch(args):
    trainer = Recorder(args(do_eval=True))
    trainer.state.epoch = None
    report(trainer, "eval", {"eval_loss": 0.5}, range(3))
    metrics = {"eval_loss": 0.5, "eval_samples": 3}
    assert trainer.calls == [("log_metrics", "eval", metrics), ("save_metrics", "eval", metrics)]


@pytest.mark.parametrize("apply_lora", [True, False])
@pytest.mark.parametrize("is_given", [True, False])
def test_lora_with_the_default_learning_rate_warns(args, caplog, apply_lora, is_given):
    trainer = Recorder(args(do_train=True), apply_lora)
    trainer.args.rate_is_given = is_given
    train(trainer, None)
    warned = "--learning_rate is not given: the default, 5e-05" in caplog.text
    assert warned == (apply_lora and not is_given)


@pytest.mark.parametrize(
    ("given", "splits"),
    [
        ({"do_train": True}, ["train"]),
        ({"do_train": True, "do_eval": True}, ["train", "validation"]),
        ({"do_predict": True}, ["test"]),
    ],
)
def test_stages_decide_which_splits_are_needed(args, given, splits):
    assert needed_splits(args(**given)) == splits


def test_metric_for_best_model_has_to_be_a_score_of_the_task(args):
    """A run without training does not check the name."""
    given = {"load_best_model_at_end": True, "evaluation_strategy": "epoch"}
    asked = args(do_train=True, metric_for_best_model="f1", **given)
    check_scores(asked, ["accuracy", "f1"])
    refused = pytest.raises(TrainingError, match="no evaluation gives eval_f1; known: loss, acc")
    with refused:
        check_scores(asked, ["accuracy"])
    asked.do_train = False
    check_scores(asked, ["accuracy"])
    asked = args(do_train=True, metric_for_best_model="f1", prediction_loss_only=True, **given)
    with pytest.raises(TrainingError, match=r"known: loss$"):
        check_scores(asked, ["f1"])
    check_scores(args(do_train=True, metric_for_best_model="loss", **given), ["accuracy"])
