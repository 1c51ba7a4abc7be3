"""What the Trainer's processes compare before they train or evaluate together."""

from types import SimpleNamespace

import pytest
from trainer_runs import make_data

from transformers import trainer_agreement, trainer_evaluation
from transformers.trainer_agreement import check_same_evaluation
from transformers.trainer_evaluation import TrainerEvaluation


@pytest.fixture
def compared(monkeypatch):
    """What was compared, by name; and the models, by "weights"."""
    found = {}
    monkeypatch.setattr(trainer_agreement, "check_alike", lambda given, _: found.update(given))
    monkeypatch.setattr(
        trainer_agreement, "check_same_weights", lambda model, _: found.update(weights=model)
    )
    return found


def test_a_training_s_settings_and_data(make_trainer, compared):
    make_trainer(train=make_data(20), max_steps=2, seed=5).train()
    expected = {
        "--seed": 5,
        "lora_r (config.json)": 4,
        "examples to train on (number)": 20,
        "updates to make": 2,
    }
    assert expected.items() <= compared.items()
    own = {"--output_dir", "--local_rank", "--dataloader_num_workers"}
    assert not (own | {"base_name_or_path (config.json)"}) & compared.keys()


def test_an_evaluation_s_data_and_weights(compared):
    model, two = object(), SimpleNamespace(world_size=2)
    check_same_evaluation(two, model, 7, "0123456789abcdef0123")
    assert compared["examples to evaluate on (number)"] == 7
    assert compared["examples to evaluate on (digest)"] == "0123456789abcdef"
    assert compared.pop("weights") is model
    check_same_evaluation(two, None, None, None)
    assert "weights" not in compared


@pytest.fixture
def of_two(monkeypatch):
    """What each evaluation compares, in a run that seems to have two processes in this alone."""
    found = []
    compare = TrainerEvaluation._check_same_evaluation

    def check(trainer, dataset):
        args = trainer.args
        trainer.args = SimpleNamespace(world_size=2)
        compare(trainer, dataset)
        trainer.args = args

    monkeypatch.setattr(TrainerEvaluation, "_check_same_evaluation", check)
    monkeypatch.setattr(
        trainer_evaluation, "check_same_evaluation", lambda args, *given: found.append(given)
    )
    return found


def test_a_set_is_digested_once(make_trainer, of_two, monkeypatch):
    digested = []
    monkeypatch.setattr(trainer_evaluation, "table_digest", lambda data: digested.append(data))
    trainer = make_trainer()
    for data in (None, None, make_data(3)):
        trainer.evaluate(data)
    assert [len(data) for data in digested] == [len(trainer.eval_dataset), 3]
    assert [given[1] for given in of_two] == [*[len(trainer.eval_dataset)] * 2, 3]


def test_weights_are_compared_before_a_training_alone(make_trainer, of_two):
    """After it they are the same but for rounding, which may differ between processors."""
    trainer = make_trainer(max_steps=1)
    trainer.evaluate()
    trainer.train()
    trainer.evaluate()
    trainer.predict(trainer.eval_dataset)
    assert [given[0] for given in of_two] == [trainer.model, None, None]


def test_all_processes_have_the_first_one_s_metrics(make_trainer, monkeypatch):
    def of_process_0(value, world_size):
        is_metrics = isinstance(value, dict) and "eval_runtime" in value
        return [{**value, "eval_runtime": -1.0}] if is_metrics else [value]

    monkeypatch.setattr(trainer_evaluation, "gather_objects", of_process_0)
    assert make_trainer().evaluate()["eval_runtime"] == -1.0
