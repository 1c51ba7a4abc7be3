"""The Trainer's messages about mistakes in data, metrics and checkpoints, and what it repairs."""

import json
import re

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from small_trainers import Line, make_line_trainer, make_points
from torch import nn
from torch.utils.data import TensorDataset

from transformers import EarlyStoppingCallback, TrainingError


def in_best_epoch(folder, **settings):
    return make_line_trainer(
        folder, evaluation_strategy="epoch", load_best_model_at_end=True, **settings
    )


def test_arrays_and_tensors_in_metrics_are_saved_with_a_checkpoint(tmp_path):
    metrics = {"each": np.array([0.5, 1]), "one": torch.tensor([2]), "by": {"name": np.float32(3)}}
    trainer = in_best_epoch(
        tmp_path, compute_metrics=lambda _: metrics, metric_for_best_model="one"
    )
    trainer.train()
    state = json.loads((tmp_path / "checkpoint-5" / "trainer_state.json").read_text())
    record = next(record for record in state["log_history"] if "eval_one" in record)
    found = [record[f"eval_{name}"] for name in ("each", "one", "by")]
    assert found == [[0.5, 1.0], 2, {"name": 3.0}]


def test_metrics_may_be_a_series_and_have_rows_of_several_lengths(tmp_path):
    metrics = pd.Series({"rows": np.array([[1], [1, 2]], dtype=object), "one": np.eye(1)})
    found = make_line_trainer(tmp_path, compute_metrics=lambda _: metrics).evaluate()
    assert (found["eval_rows"], found["eval_one"]) == ([[1], [1, 2]], 1.0)


def test_metrics_that_are_not_a_dict_are_an_error(tmp_path):
    trainer = make_line_trainer(tmp_path, compute_metrics=lambda _: None)
    with pytest.raises(TrainingError, match=r"compute_metrics has to return a dict .* None"):
        trainer.evaluate()


@pytest.mark.parametrize("stops_early", [False, True])
@pytest.mark.parametrize(("value", "kind"), [([0.5, 1.0], "a list"), (None, "None")])
def test_a_metric_to_compare_that_is_not_a_number_is_an_error(tmp_path, value, kind, stops_early):
    trainer = in_best_epoch(
        tmp_path, compute_metrics=lambda _: {"f1": value}, metric_for_best_model="f1"
    )
    if stops_early:
        trainer.add_callback(EarlyStoppingCallback)
    with pytest.raises(TrainingError, match=f"eval_f1 is {kind}, not a number"):
        trainer.train()


def test_an_evaluation_without_labels_warns_once(tmp_path, caplog):
    points = [{"x": point["x"]} for point in make_points(4)]
    trainer = make_line_trainer(tmp_path, eval_dataset=points, compute_metrics=lambda _: {})
    for _ in range(2):
        assert "eval_loss" not in trainer.evaluate()
    trainer.predict(points)
    assert caplog.text.count("have no labels, so there is no loss or metrics") == 1


class AnyArguments(nn.Module):
    """A line whose forward does not say what it takes."""

    def __init__(self):
        super().__init__()
        self.line = Line()

    def forward(self, **inputs):
        """The line's outputs."""
        return self.line(**inputs)


@pytest.mark.parametrize(
    ("model", "column"), [(AnyArguments, "x"), (Line, "text")], ids=["any", "other"]
)
def test_a_set_of_which_only_labels_would_be_left_is_an_error(tmp_path, model, column):
    rows = datasets.Dataset.from_dict({column: [1.0] * 4, "labels": [1.0] * 4})
    trainer = make_line_trainer(tmp_path, model=model(), train_dataset=rows)
    with pytest.raises(ValueError, match=f"takes none of the columns '{column}'"):
        trainer.train()


class Itself(AnyArguments):
    """Learns its inputs, which are its labels as well."""

    def forward(self, x):
        """The line's loss and outputs."""
        return self.line(x, x)


class Labels(Itself):
    """The same for inputs of another name."""

    def forward(self, labels):
        """The line's loss and outputs."""
        return super().forward(labels)


@pytest.mark.parametrize(("model", "name"), [(Itself, "x"), (Labels, "labels")])
def test_labels_may_be_the_only_column_that_is_used(tmp_path, model, name):
    rows = datasets.Dataset.from_dict({name: [1.0] * 4, "id": [1] * 4})
    trainer = make_line_trainer(
        tmp_path, model=model(), train_dataset=rows, eval_dataset=rows, label_names=[name]
    )
    assert trainer.train().global_step == 2
    assert "eval_loss" in trainer.evaluate()


def test_all_columns_are_kept_on_request(tmp_path):
    rows = datasets.Dataset.from_list(make_points(4))
    settings = {"model": AnyArguments(), "remove_unused_columns": False}
    trainer = make_line_trainer(tmp_path, train_dataset=rows, **settings)
    assert trainer.train().global_step == 2


@pytest.mark.parametrize("data", [make_points(8), datasets.Dataset.from_list(make_points(8))])
def test_lengths_of_examples_without_ids_are_an_error(tmp_path, data):
    trainer = make_line_trainer(tmp_path, train_dataset=data, group_by_length=True)
    with pytest.raises(ValueError, match="--group_by_length needs examples with 'input_ids'"):
        trainer.train()


def test_a_dict_of_sets_is_an_error(tmp_path):
    splits = datasets.DatasetDict(train=datasets.Dataset.from_list(make_points(4)))
    for name, shown in (("train_dataset", "train_dataset"), ("eval_dataset", "the set to evalua")):
        with pytest.raises(ValueError, match=f"{shown}.* is a dict of sets, 'train'"):
            make_line_trainer(tmp_path, **{name: splits})


def test_examples_may_be_in_a_dict_by_their_number_and_be_a_series(tmp_path):
    points = dict(enumerate(map(pd.Series, make_points(4))))
    trainer = make_line_trainer(tmp_path, train_dataset=points, eval_dataset=points)
    assert trainer.train().global_step == 2
    assert "eval_loss" in trainer.evaluate()


def test_examples_that_are_tuples_are_an_error(tmp_path):
    rows = TensorDataset(torch.rand(4), torch.rand(4))
    trainer = make_line_trainer(tmp_path, train_dataset=rows)
    with pytest.raises(TypeError, match="an example is a tuple, not a dict"):
        trainer.train()


def test_a_checkpoint_to_resume_from_that_does_not_exist_is_an_error(tmp_path):
    path = str(tmp_path / "checkpoint-5")
    with pytest.raises(ValueError, match=f"{re.escape(path)} is not a folder"):
        make_line_trainer(tmp_path).train(resume_from_checkpoint=path)


def test_a_run_s_folder_is_not_resumed_as_a_checkpoint(tmp_path):
    trainer = make_line_trainer(tmp_path, save_strategy="epoch")
    trainer.train()
    trainer.save_model()
    with pytest.raises(ValueError, match=r"is a run's folder, .*, such as .*checkpoint-10$"):
        trainer.train(resume_from_checkpoint=str(tmp_path))
