"""What the Trainer's processes compare before they train or evaluate together."""

from types import SimpleNamespace

import pytest
from trainer_runs import make_data

from transformers import trainer_agreement, trainer_evaluation
from transformers.trainer_agreement import check_same_evaluation


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
    check_same_evaluation(two, model, make_data(7))
    assert compared["examples to evaluate on (number)"] == 7
    assert compared.pop("weights") is model
    check_same_evaluation(two, None, make_data(7))
    assert "weights" not in compared
    compared.clear()
    check_same_evaluation(SimpleNamespace(world_size=1), model, make_data(7))
    assert not compared


def test_weights_are_compared_before_a_training_alone(make_trainer, monkeypatch):
    """After it they are the same but for rounding, which may differ between processors."""
    models = []
    monkeypatch.setattr(
        trainer_evaluation, "check_same_evaluation", lambda args, model, data: models.append(model)
    )
    trainer = make_trainer(max_steps=1)
    trainer.evaluate()
    trainer.train()
    trainer.evaluate()
    trainer.predict(trainer.eval_dataset)
    assert models == [trainer.model, None, None]


def test_all_processes_have_the_first_one_s_metrics(make_trainer, monkeypatch):
    def of_process_0(value, world_size):
        is_metrics = isinstance(value, dict) and "eval_runtime" in value
        return [{**value, "eval_runtime": -1.0}] if is_metrics else [value]

    monkeypatch.setattr(trainer_evaluation, "gather_objects", of_process_0)
    assert make_trainer().evaluate()["eval_runtime"] == -1.0
