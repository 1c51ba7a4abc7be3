"""Evaluation and prediction of masked language models: each row with its labels, in order."""

import importlib.util
import os
import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compare import assert_same_bits, rounding
from launches import preloaded_python
from paths import HELPERS
from tokenizers import Tokenizer, models

from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast
from transformers.trainer_pt_utils import join_rows
from transformers.trainer_results import Collector, gather_in_order

SCRIPT = HELPERS / "two_predictions.py"
FAMILIES = ["roberta", "deberta"]
# In a layer and the head, about a dozen sums over 16 features follow each other.
ADDITIONS = 12 * 16


@pytest.fixture(scope="module")
def mlm():
    """The script two_predictions.py, as a module."""
    return importlib.import_module(SCRIPT.stem)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


def row_by_row(mlm, family: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the model's logits, the labels and the losses, computed row by row."""
    model, rows = mlm.make_mlm(family).eval(), mlm.make_rows()
    longest = max(mlm.LENGTHS)
    logits = torch.full((len(rows), longest, mlm.VOCABULARY), float("nan"))
    labels = torch.full((len(rows), longest), -100)
    losses = []
    for i, row in enumerate(rows):
        length = len(row["input_ids"])
        with torch.no_grad():
            logits[i, :length] = model(row["input_ids"][None]).logits[0]
        labels[i, :length] = row["labels"]
        losses.append(F.cross_entropy(logits[i, :length], row["labels"]).item())
    return logits.numpy(), labels.numpy(), np.array(losses)


def assert_rows_are(found, expected: np.ndarray) -> None:
    """Asserts equal logits of tokens, zeros up to the batch's length, and -100 after it."""
    assert found.shape == expected.shape
    real = ~np.isnan(expected)
    allowed = rounding(expected[real], ADDITIONS)
    np.testing.assert_allclose(found[real], expected[real], rtol=0, atol=allowed)
    assert set(np.unique(found[~real])) <= {0.0, -100.0}
    assert -100 in found[~real]


@pytest.mark.parametrize("steps", [None, 1, 3])
def test_predictions_equal_the_model_s_row_by_row(mlm, family, tmp_path, steps):
    seen = []
    trainer = mlm.make_trainer(
        family,
        tmp_path,
        eval_accumulation_steps=steps,
        compute_metrics=lambda p: seen.append(p) or {"rows": len(p.predictions)},
    )
    logits, labels, losses = row_by_row(mlm, family)
    output = trainer.predict(mlm.make_rows())
    assert_rows_are(output.predictions, logits)
    assert np.array_equal(output.label_ids, labels)
    evaluated = trainer.evaluate()
    assert np.array_equal(seen[0].predictions, seen[1].predictions)
    assert evaluated["eval_rows"] == len(labels)
    # A batch's loss is the mean over its targets; batches are weighted by their rows.
    targets = (labels != -100).sum(1)
    batches = [slice(start, start + 2) for start in range(0, len(labels), 2)]
    of_batches = [np.average(losses[b], weights=targets[b]) for b in batches]
    expected = np.average(of_batches, weights=[len(losses[b]) for b in batches])
    for metrics in (output.metrics, evaluated):
        assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-5)


def record_head_positions(trainer) -> list[int]:
    """Returns a list to which every call of the head appends its number of positions."""
    seen = []
    model = trainer.model
    head = model.lm_head if hasattr(model, "lm_head") else model.cls
    head.register_forward_hook(lambda module, given, output: seen.append(len(given[0])))
    return seen


@pytest.mark.parametrize(
    ("settings", "only_targets"),
    [
        ({}, True),
        ({"prediction_loss_only": True, "compute_metrics": lambda p: 1 / 0}, True),
        ({"compute_metrics": lambda p: {}}, False),
    ],
)
def test_evaluating_the_loss_alone_computes_logits_of_targets_alone(
    mlm, family, tmp_path, settings, only_targets
):
    trainer = mlm.make_trainer(family, tmp_path, **settings)
    positions = record_head_positions(trainer)
    loss = trainer.evaluate()["eval_loss"]
    labels = row_by_row(mlm, family)[1]
    assert sum(positions) == ((labels != -100).sum() if only_targets else sum(mlm.LENGTHS))
    assert loss == pytest.approx(trainer.predict(mlm.make_rows()).metrics["eval_loss"], rel=1e-5)


def test_training_computes_logits_of_targets_alone(mlm, family, tmp_path):
    trainer = mlm.make_trainer(family, tmp_path, num_train_epochs=1)
    positions = record_head_positions(trainer)
    trainer.train()
    assert sum(positions) == (row_by_row(mlm, family)[1] != -100).sum()


@pytest.mark.parametrize("own", [None, torch.Generator()], ids=["torchs", "own"])
def test_each_evaluation_masks_the_same_tokens(mlm, tmp_path, own):
    """And draws nothing that training would draw."""
    words = models.WordLevel({str(n): n for n in range(mlm.VOCABULARY)}, unk_token="3")
    special = {"pad_token": "1", "unk_token": "3", "mask_token": "4"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **special)
    ends = []
    for strategy in ("no", "epoch"):
        trainer = mlm.make_trainer("roberta", tmp_path, evaluation_strategy=strategy)
        generator = own and own.manual_seed(1)
        trainer.data_collator = DataCollatorForLanguageModeling(
            tokenizer, mlm_probability=0.5, generator=generator
        )
        trainer.train_dataset = trainer.eval_dataset = [
            {"input_ids": row["input_ids"].tolist()} for row in mlm.make_rows()
        ]
        trainer.train()
        ends.append(trainer.model.state_dict())
    assert_same_bits(*ends)
    assert trainer.evaluate()["eval_loss"] == trainer.evaluate()["eval_loss"]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def predicted(tmp_path_factory) -> Path:
    """The folder with the predictions of two processes."""
    folder = tmp_path_factory.mktemp("predicted")
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [preloaded_python(), SCRIPT, folder],
            env={**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank}
            | {"CUDA_VISIBLE_DEVICES": ""},
        )
        for rank in ("0", "1")
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    return folder


@pytest.mark.distributed
@pytest.mark.parametrize("steps", [None, 1], ids=["at once", "accumulated"])
def test_two_processes_gather_the_predictions_of_one(mlm, family, predicted, steps):
    found = np.load(predicted / f"{family}-{steps}.npz")
    logits, labels, _ = row_by_row(mlm, family)
    assert_rows_are(found["predictions"], logits)
    assert np.array_equal(found["label_ids"], labels)


# ---- gathering ----


def test_rows_of_different_lengths_are_joined_with_padding():
    parts = [torch.ones(2, 3, 2), torch.full((1, 1, 4), 2.0), torch.zeros(0, 2, 1)]
    joined = join_rows(parts)
    assert joined.shape == (3, 3, 4)
    assert (joined[:2, :, :2] == 1).all()
    assert (joined[2, :1] == 2).all()
    assert (joined == -100).sum() == 36 - 12 - 4
    assert torch.equal(join_rows(parts[:1]), parts[0])


@pytest.mark.parametrize("steps", [None, 1, 2, 9])
def test_a_collector_keeps_the_order_of_batches(steps):
    collector, rows = Collector(steps), 0
    for batch, size in enumerate((2, 2, 2, 1)):
        numbers = torch.arange(rows, rows + size)
        collector.add((numbers, numbers[:, None].expand(size, 1 + batch % 3)))
        rows += size
    first, second = collector.arrays()
    assert first.tolist() == list(range(7))
    assert second.shape == (7, 3)
    assert second[:, 0].tolist() == list(range(7))
    assert (second[4:6] != -100).all()
    assert Collector(steps).arrays() == ()


def test_gathered_rows_are_sorted_by_their_indices():
    values, other = np.array([[5.0], [3.0], [4.0]]), np.array([50, 30, 40])
    first, second = gather_in_order([5, 3, 4], (values, other), world_size=1)
    assert first[:, 0].tolist() == [3, 4, 5]
    assert second.tolist() == [30, 40, 50]
    assert gather_in_order([0], (), world_size=1) == ()
