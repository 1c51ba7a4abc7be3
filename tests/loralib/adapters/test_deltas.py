"""Tests of how an adapter's tensors become pairs and deltas."""

from dataclasses import replace

import pytest
import torch
from adapter_files import refused

from loralib.adapters.adapter import Adapter
from loralib.adapters.deltas import deltas_of, lora_pairs, rank_of
from loralib.adapters.metadata import LoraMetadata

RANK = 2
INFO = LoraMetadata(rank=RANK, alpha=3, targets=("query",))


def test_lora_pairs_are_sorted_by_module_and_have_one_rank():
    A, B = torch.randn(RANK, 5), torch.randn(4, RANK)
    tensors = {"b.lora_B": B, "a.b.lora_A": A, "b.lora_A": A, "a.b.lora_B": B, "head.weight": A}
    pairs = lora_pairs(tensors, "lora file")
    assert list(pairs) == ["a.b", "b"]
    assert pairs["b"][0] is A
    assert pairs["b"][1] is B
    assert lora_pairs({"head.weight": A}, "lora file") == {}
    assert rank_of(tensors, "lora file") == RANK


@pytest.mark.parametrize(
    ("A", "B"),
    [
        ((2, 4), (4,)),
        ((2,), (4, 2)),
        ((), (4, 2)),
        ((2, 4, 1), (4, 2)),
        ((3, 4), (4, 2)),
        ((2, 4), (4, 3)),
        ((1, 4), (4, 2)),
        ((0, 4), (4, 0)),
        ((0, 4), (4, 2)),
        ((2, 0), (4, 2)),
        ((2, 4), (0, 2)),
    ],
)
def test_pairs_that_cannot_be_multiplied_are_refused(A, B):
    tensors = {"m.lora_A": torch.ones(A), "m.lora_B": torch.ones(B)}
    for call in (lora_pairs, rank_of):
        refused(lambda call=call: call(tensors, "a file"), "a file", str(A), str(B), "of m do not")
    adapter = Adapter(tensors, INFO, "a file")
    refused(lambda: deltas_of(adapter), "a file", "of m do not")


@pytest.mark.parametrize(("alpha", "scaling"), [(1, 0.5), (16, 8), (0.5, 0.25), (3, 1.5)])
def test_the_scaling_is_alpha_over_the_rank_of_the_tensors(alpha, scaling):
    tensors = {"m.lora_A": torch.ones(RANK, 4), "m.lora_B": torch.ones(4, RANK)}
    assert deltas_of(Adapter(tensors, replace(INFO, alpha=alpha)))["m"].scaling == scaling
