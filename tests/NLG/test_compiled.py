"""torch.compile of GPT-2: one graph a forward pass with its loss, and one a block."""

import copy

import pytest
import torch
from compare import assert_close_to_rounding
from compiled import breaks_of, compile_layers, gradients_of

import loralib as lora
from data_utils import Row, collate
from model import GPT2Config, GPT2LMModel

pytestmark = pytest.mark.slow

# Additions that follow one another in a small model.
TERMS = 400


@pytest.fixture
def model():
    torch.manual_seed(3)
    config = GPT2Config(22, 2, 2, vocab_size=60, n_positions=32, lora_attn_dim=2)
    model = GPT2LMModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    lora.mark_only_lora_as_trainable(model)
    return model


def loss_of(model, lengths):
    """Of rows whose last two thirds are targets."""
    generator = torch.Generator().manual_seed(sum(lengths))
    rows = [torch.randint(60, (n + 1,), generator=generator).int() for n in lengths]
    batch = collate([Row(row, len(row) - 1, len(row) // 3) for row in rows])
    tensors = (batch[name] for name in ("input", "target", "mask"))
    return model(*tensors, packed_rows=batch["packed_rows"])


def test_a_forward_pass_is_one_graph(model):
    batch = collate([Row(torch.arange(9).int(), 8, 3), Row(torch.arange(13).int(), 12, 5)])
    names = ("input", "target", "mask")

    def step(batch):
        return model(*(batch[name] for name in names), packed_rows=batch["packed_rows"])

    assert breaks_of(step, batch) == []


def test_a_block_is_one_graph_for_any_number_of_tokens(model):
    """Two: the first block's, whose input needs no gradient, and the last one's."""
    compiled = copy.deepcopy(model)
    graphs = compile_layers(compiled.transformer.h)
    for lengths in ([7, 5, 12], [9, 9, 3, 8], [4, 14], [6, 2, 3, 5, 11]):
        ours, theirs = loss_of(compiled, lengths), loss_of(model, lengths)
        assert_close_to_rounding(ours, theirs, TERMS)
        found, wanted = gradients_of(compiled, ours), gradients_of(model, theirs)
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            assert_close_to_rounding(found[name], gradient, TERMS)
        assert len(graphs) == 2
