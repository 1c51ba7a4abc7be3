"""Tests of a base's fingerprint."""

import re

import pytest
import torch
from adapted_models import tied
from tiny_adapters import Tiny

from loralib.adapters.fingerprint import (
    are_of_one_base,
    fingerprint,
    fingerprint_without,
    possible_fingerprints,
)


def test_a_fingerprint_depends_on_names_shapes_and_rounded_values_of_matrices():
    base = Tiny().state_dict()
    expected = fingerprint(base)
    assert re.fullmatch("[0-9a-f]{32}", expected)
    backbone = {n: t for n, t in base.items() if n.startswith("roberta.")}
    for same in (
        dict(reversed(base.items())),
        {name: tensor.bfloat16() for name, tensor in base.items()},
        {name: tensor.bfloat16().float() for name, tensor in base.items()},
        {name: tensor.t().contiguous().t() for name, tensor in base.items()},
        {name: tensor for name, tensor in backbone.items() if "lora_" not in name},
        {name: t + 1 if t.dim() == 1 or "lora_" in name else t for name, t in base.items()},
        {**base, "classifier.weight": torch.zeros(9, 9)},
    ):
        assert fingerprint(same) == expected
    weight = "roberta.layer.1.key.weight"
    other = base[weight].clone()
    other[3, 4] *= 1.1
    for different in (
        {**base, weight: other},
        {**base, weight: base[weight].reshape(4, 16)},
        {**base, "roberta.layer.0.key.weight": base[weight]},
        {name: tensor for name, tensor in base.items() if name != weight},
        {name.replace("roberta", "deberta"): tensor for name, tensor in base.items()},
    ):
        assert fingerprint(different) != expected
    assert fingerprint(base, ["roberta.layer.0"]) != expected


def test_a_fingerprint_samples_all_parts_of_a_large_matrix():
    base = {"roberta.weight": torch.randn(256, 512)}
    expected = fingerprint(base)
    for rows in (slice(0, 4), slice(100, 104), slice(252, 256)):
        changed = {"roberta.weight": base["roberta.weight"].clone()}
        changed["roberta.weight"][rows] += 1
        assert fingerprint(changed) != expected


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fingerprint_shows_other_rows_at_the_end_of_a_vocabulary(rows, dtype):
    words = torch.randn(50_257 + rows, 8, dtype=dtype)
    base, again = {"up.weight": words[:64]}, {"up.weight": words[:64]}
    base["words.weight"], again["words.weight"] = words, words.clone()
    assert are_of_one_base(fingerprint(base), fingerprint(again))
    again["words.weight"][-rows:] += 1
    assert not are_of_one_base(fingerprint(base), fingerprint(again))


def test_a_file_with_only_the_first_part_of_a_fingerprint_is_compared_by_that():
    base = {"words.weight": torch.randn(50_257, 8)}
    other = {"words.weight": torch.randn(50_257, 8)}
    first_part = fingerprint(base)[:16]
    for both in (first_part, fingerprint(base)), (fingerprint(base), first_part):
        assert are_of_one_base(*both)
    assert not are_of_one_base(first_part, fingerprint(other))


def test_a_fingerprint_that_is_cut_off_elsewhere_is_of_no_base():
    whole = fingerprint({"words.weight": torch.randn(50_257, 8)})
    for length in (0, 1, 15, 17, 31):
        assert not are_of_one_base(whole[:length], whole)


def test_position_ids_and_poolers_do_not_change_a_fingerprint():
    """Some files of a base have them and others do not."""
    base = {
        "roberta.layer.query.weight": torch.randn(4, 4),
        "roberta.layer.query.bias": torch.ones(4),
    }
    extra = {
        "roberta.embeddings.position_ids": torch.arange(6)[None],
        "roberta.pooler.dense.weight": torch.randn(4, 4),
    }
    assert fingerprint(base) == fingerprint({**base, **extra})
    assert fingerprint(base) != fingerprint({"roberta.layer.query.weight": torch.zeros(4, 4)})


def test_a_weight_tied_to_a_trained_one_is_not_in_the_fingerprint():
    model = tied()
    expected = fingerprint({"up.weight": model.up.weight})
    for trained in ("last.weight", "words.weight"):
        assert fingerprint_without(model, {trained}) == expected
        assert expected in possible_fingerprints(model, {"up"}, {trained})


def test_the_fingerprint_of_a_base_without_matrices_is_not_used():
    assert fingerprint({}) not in possible_fingerprints(tied(), (), {"up.weight", "last.weight"})
