"""What a model says about arguments that are not a batch, or that have no embedding."""

import re

import pytest
import torch
from model_folders import make

from transformers import BatchEncoding, RobertaForSequenceClassification

IDS = torch.tensor([[0, 5, 6, 2]])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"input_ids": IDS[0]}, ValueError, "input_ids is (4,), not (batch, length): for a single"),
        ({"input_ids": IDS[None]}, ValueError, "input_ids is (1, 1, 4), not (batch, length)"),
        ({"input_ids": IDS.tolist()}, TypeError, "input_ids is a list, not a tensor: pass a token"),
        (
            {"input_ids": BatchEncoding({"input_ids": IDS})},
            TypeError,
            "is a BatchEncoding, not a tensor: pass a tokenizer's output as model(**batch)",
        ),
        ({"inputs_embeds": torch.rand(4, 8)}, ValueError, "not (batch, length, hidden)"),
        ({"input_ids": IDS + 20}, IndexError, "input_ids has 20, but the model has embeddings of "),
        ({"input_ids": IDS - 1}, IndexError, "has -1, but the model has embeddings of 0 to 19"),
        (
            {"input_ids": IDS, "token_type_ids": torch.ones_like(IDS)},
            IndexError,
            "token_type_ids has 1, but the model has embeddings of 0 to 0: leave them out",
        ),
        (
            {"input_ids": IDS.expand(2, -1), "labels": torch.tensor([-100, 2])},
            ValueError,
            "a label is 2, but the model takes whole numbers from 0 to 1: leave hidden labels",
        ),
        ({"input_ids": IDS, "labels": torch.tensor([-1])}, ValueError, "a label is -1, but the"),
        ({"input_ids": IDS, "labels": torch.rand(1)}, ValueError, "labels are float32, but the"),
        ({"input_ids": IDS, "labels": torch.ones(1, dtype=torch.int32)}, RuntimeError, "Int"),
        (
            {"input_ids": IDS, "token_type_ids": IDS[:, 1:]},
            ValueError,
            "ids, mask and all else that is given for each token, such as labels, have one shape",
        ),
    ],
    ids=[
        *("row", "3d", "list", "encoding", "row of embeddings", "new", "negative", "types"),
        *("label", "negative label", "score", "int32", "few types"),
    ],
)
def test_a_wrong_batch_is_named(arguments, error, message):
    model = make(RobertaForSequenceClassification)
    with pytest.raises(error, match=re.escape(message)):
        model(**arguments)


@pytest.mark.parametrize("mask", [None, torch.ones_like(IDS)], ids=["no mask", "mask"])
def test_a_batch_without_rows_has_no_logits(mask):
    """As upstream: it may be what a filter left."""
    model = make(RobertaForSequenceClassification)
    assert model(IDS[:0], mask if mask is None else mask[:0]).logits.shape == (0, 2)


def test_a_single_score_is_not_taken_for_all_rows():
    model = make(RobertaForSequenceClassification, num_labels=1)
    with pytest.raises(RuntimeError, match="invalid for input of size 1"):
        model(IDS.expand(3, -1), labels=torch.rand(1))
