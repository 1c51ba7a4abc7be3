"""The Trainer on two processes: streams, several outputs, and a user's own loaders."""

import json
from pathlib import Path

import pytest
from launches import launch
from small_trainers import (
    Line,
    Stream,
    make_line_trainer,
    make_points,
    make_span_trainer,
    make_spans,
)

pytestmark = pytest.mark.distributed
SCRIPT = Path(__file__).parents[1] / "helpers" / "two_trainings.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """The results that two processes wrote."""
    folder = tmp_path_factory.mktemp("two")
    settings = {"launcher": "torch.distributed.run", "restarts": 0, "tree": "NLU"}
    ended = launch(2, SCRIPT, folder, **settings, CUDA_VISIBLE_DEVICES="")
    assert ended.returncode == 0, ended.stderr
    return json.loads((folder / "found.json").read_text())


def test_a_stream_is_split_between_processes(found):
    """Eight points per step, four for each; the last step is filled from the beginning."""
    stream = Stream(11)
    stream.set_epoch(0)
    xs = [point["x"] for point in stream]
    steps = [xs[:8], xs[8:] + xs[:5]]
    for rank, batches in enumerate(found["batches"]):
        for batch, step in zip(batches, steps, strict=True):
            assert batch == pytest.approx(step[4 * rank : 4 * rank + 4])


def test_several_outputs_are_gathered_in_the_set_s_order(found, tmp_path):
    alone = make_span_trainer(tmp_path).predict(make_spans(7))
    expected = [part.tolist() for part in (*alone.predictions, *alone.label_ids)]
    assert found["spans"] == expected
    assert found["spans_loss"] == pytest.approx(alone.metrics["eval_loss"], rel=1e-6)


def test_a_user_s_loader_predicts_each_example_once(found, tmp_path):
    points = make_points(9, seed=5)
    predictions = make_line_trainer(tmp_path, model=Line(1.0, 2.0)).predict(points).predictions
    assert found["own"] == [predictions.tolist()]
    squares = [(p - point["labels"]) ** 2 for p, point in zip(predictions, points, strict=True)]
    # The last batch is one example and three repeated ones, and counts as one example.
    first, second, last = squares[:4], squares[4:8], [squares[8], *squares[:3]]
    expected = (sum(first) + sum(second) + sum(last) / 4) / 9
    assert found["own_loss"] == pytest.approx(expected, rel=1e-5)


def test_resumed_runs_end_with_the_same_bits(found):
    whole, resumed = found["line"]
    assert whole == resumed
    whole, resumed = found["resumed"]
    assert whole == resumed


def test_all_processes_evaluate_with_the_buffers_that_are_saved(found):
    measured, of_saved = found["normed"]
    assert measured == of_saved
    assert len(measured) == 2


def test_helpers_for_several_processes(found):
    assert found["turns"] == [0, 1]
    assert found["rows"] == [[0, 1], [2, 3], [10, 11]]
    assert found["scalars"] == [0, 0.5, 1, 0.5]


def test_searches_are_refused(found):
    refusal = "hyperparameter_search runs on one process: start it without others"
    assert found["refused"] == refusal
