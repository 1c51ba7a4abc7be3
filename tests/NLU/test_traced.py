"""Graphs of `torch.jit.trace` and `torch.export` work for any batch, length and padding."""

import make_plain_fixture as maker
import pytest
import torch
from compare import assert_close_to_rounding
from covering import covering
from encoder_options import ENCODER_TERMS
from head_cases import PAIRS, build

pytestmark = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit")

FAMILIES = tuple(maker.FAMILIES)
KINDS = ("backbone", "mlm", "classifier")


def batch(family, rows, length):
    """Makes ids and a mask that pads on both sides; the first row has no padding."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(3, 48, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1:, 0] = mask[1:, length - 1] = 0
    return ids.masked_fill(mask == 0, maker.FAMILIES[family][1]["pad_token_id"]), mask


@pytest.mark.parametrize(("family", "kind", "masked"), covering(FAMILIES, KINDS, (True, False)))
def test_a_graph_works_for_batches_of_other_shapes(family, kind, masked, tmp_path):
    model = maker.build(family, kind, torchscript=True, conv_kernel_size=3)
    given = batch(family, 3, 7)[: 1 + masked]
    torch.jit.save(torch.jit.trace(model, given), tmp_path / "graph.pt")
    graph = torch.jit.load(tmp_path / "graph.pt")
    assert graph.state_dict().keys() == model.state_dict().keys()
    for shape in ((3, 7), (1, 4), (5, 12)):
        given = batch(family, *shape)[: 1 + masked]
        for ours, expected in zip(graph(*given), model(*given), strict=True):
            assert_close_to_rounding(ours, expected, ENCODER_TERMS)


@pytest.mark.parametrize("settings", [{"output_attentions": True}, {"output_hidden_states": True}])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_graph_returns_attentions_and_hidden_states(family, settings):
    model = maker.build(family, "backbone", torchscript=True, **settings)
    graph = torch.jit.trace(model, batch(family, 2, 5)[:1])
    ids, _ = batch(family, 3, 6)
    shown, expected = graph(ids)[-1], model(ids)[-1]
    assert len(shown) == len(expected) >= 2
    for ours, theirs in zip(shown, expected, strict=True):
        assert_close_to_rounding(ours, theirs, ENCODER_TERMS)


@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_graph_of_a_model_with_lora(family, with_gradients):
    settings = {"apply_lora": True, "lora_r": 2, "lora_alpha": 6}
    model = maker.build(family, "classifier", torchscript=True, **settings)
    with torch.set_grad_enabled(with_gradients):
        graph = torch.jit.trace(model, batch(family, 2, 5))
        given = batch(family, 4, 9)
        assert_close_to_rounding(graph(*given)[0], model(*given)[0], ENCODER_TERMS)


@pytest.mark.parametrize(
    ("family", "kind"),
    [("roberta", "classifier"), ("roberta", "mlm"), ("deberta", "classifier")],
)
def test_an_exported_model_works_for_batches_of_other_shapes(family, kind):
    settings = {"apply_lora": True, "lora_r": 2, "lora_alpha": 6}
    model = maker.build(family, kind, return_dict=False, **settings)
    sizes = {
        0: torch.export.Dim("rows", min=1, max=64),
        1: torch.export.Dim("length", min=3, max=18),
    }
    given = batch(family, 3, 7)
    program = torch.export.export(
        model, given, dynamic_shapes={"input_ids": sizes, "attention_mask": sizes}
    )
    for shape in ((3, 7), (1, 4), (5, 12)):
        given = batch(family, *shape)
        for ours, expected in zip(program.module()(*given), model(*given), strict=True):
            assert_close_to_rounding(ours, expected, ENCODER_TERMS)


LABELS = {"token_classification": ("labels",), "causal_lm": ("labels",), "mlm": ("labels",)}
LABELS["question_answering"] = ("start_positions", "end_positions")
WITH_LOSS = [pair for pair in PAIRS if pair[1] in LABELS] + [(each, "mlm") for each in FAMILIES]


@pytest.mark.parametrize(("family", "head"), WITH_LOSS)
def test_a_graph_of_losses_ignores_padding(family, head):
    """The graph computes which tokens are padding, so that no loss counts another batch's."""
    names = LABELS[head]
    model = maker.build(family, head) if head == "mlm" else build(family, head)

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids, mask, *labels):
            named = dict(zip(names, labels, strict=True))
            return self.model(ids, attention_mask=mask, return_dict=False, **named)[0]

    def inputs(rows, length):
        ids, mask = batch(family, rows, length)
        size = (rows,) if len(names) > 1 else ids.shape
        return ids, mask, *(torch.full(size, 2) for _ in names)

    graph = torch.jit.trace(Loss(), inputs(3, 7))
    for shape in ((3, 7), (2, 5), (5, 12)):
        given = inputs(*shape)
        assert_close_to_rounding(graph(*given), Loss()(*given), ENCODER_TERMS)
