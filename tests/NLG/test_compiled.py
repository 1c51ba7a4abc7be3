"""Tests torch.compile of GPT-2: a forward pass with its loss is one graph, and so is a block.

--torch_compile compiles blocks. The backends used here need no compiler.
"""

import copy

import pytest
import torch
from compare import assert_close_to_rounding, assert_same_bits
from compiled import compile_layers, flash_on_cpu, gradients_of, graph_breaks

import gpt2_ft
import loralib as lora
from data_utils import Row, collate, short_batch
from loralib.io.tensors import read_tensors
from loralib.training import compiled
from model import GPT2Config, GPT2LMModel

pytestmark = pytest.mark.slow

# How many additions follow one another in the small model, for `assert_close_to_rounding`.
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
    """Returns the loss of random rows whose last two thirds are targets."""
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

    assert graph_breaks(step, batch) == []


def test_a_block_is_one_graph_for_any_number_of_tokens(model):
    """There are two: the first block's graph, whose input needs no gradient, and the last one's.

    The short batch makes the graphs that all batches use.
    """
    compiled = copy.deepcopy(model)
    graphs, batch = compile_layers(compiled.transformer.h), short_batch()
    tensors = (batch[name] for name in ("input", "target", "mask"))
    gradients_of(compiled, compiled(*tensors, packed_rows=batch["packed_rows"]))
    assert len(graphs) == 2
    for lengths in ([7, 5, 12], [9, 9, 3, 8], [4, 14], [6, 2, 3, 5, 11]):
        ours, theirs = loss_of(compiled, lengths), loss_of(model, lengths)
        assert_close_to_rounding(ours, theirs, TERMS)
        found, wanted = gradients_of(compiled, ours), gradients_of(model, theirs)
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            assert_close_to_rounding(found[name], gradient, TERMS)
        assert len(graphs) == 2


def test_a_block_with_a_gpus_attention_is_one_graph():
    """In bfloat16, with packed rows whose lengths change from batch to batch, the longest too."""
    torch.manual_seed(3)
    config = GPT2Config(32, 2, 2, vocab_size=60, n_positions=32, lora_attn_dim=2)
    eager = GPT2LMModel(config)
    lora.mark_only_lora_as_trainable(eager)
    eager.bfloat16()
    model = copy.deepcopy(eager)
    with flash_on_cpu() as longest:
        graphs = compile_layers(model.transformer.h)
        for lengths in ([7, 5, 12], [9, 9, 3, 8], [4, 14], [6, 2, 3, 5, 11]):
            longest.clear()
            ours, theirs = (loss_of(network, lengths) for network in (model, eager))
            assert longest == [max(lengths)] * 4  # two blocks in each of two models
            assert torch.equal(ours, theirs)
            assert_same_bits(gradients_of(model, ours), gradients_of(eager, theirs))
            assert len(graphs) == 2


class Killed(BaseException):
    """Stands in for a signal that kills the run."""


def test_a_compiled_run_trains_like_a_plain_one_and_resumes_bit_exact(
    tiny, tmp_path, monkeypatch, read_metrics, error_of
):
    """Evaluations, with batches of other sizes, come between the steps."""
    torch.compiler.reset()
    monkeypatch.setattr(compiled, "_BACKEND", "eager")
    more = ["--max_step", "5", "--save_interval", "3", "--eval_interval", "2"]
    plain, whole, killed = (tiny.flags(tmp_path / n, *more) for n in ("plain", "whole", "killed"))
    gpt2_ft.main(plain)
    gpt2_ft.main([*whole, "--torch_compile"])
    ours, theirs = (read_metrics(tmp_path / name) for name in ("whole", "plain"))
    for name, own, other in zip(("loss", "valid_loss"), ours, theirs, strict=True):
        expected = [row[name] for row in other]
        assert [row[name] for row in own] == pytest.approx(expected, rel=1e-4)

    def die(bar, step, *figures):
        if step == 4:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(gpt2_ft, "show_step", die)
        with pytest.raises(Killed):
            gpt2_ft.main([*killed, "--torch_compile"])
    message = "with --torch_compile True, but this run has False"
    assert message in error_of([*killed, "--resume"])
    gpt2_ft.main([*killed, "--torch_compile", "--resume"])
    ends = {n: read_tensors(tmp_path / n / "model.5.pt")[0] for n in ("plain", "whole", "killed")}
    assert ends["plain"].keys() == ends["whole"].keys()
    assert_same_bits(ends["killed"], ends["whole"])
