"""Tests GPT-2: upstream's logits, the loss and its gradients, half precision, and weights."""

import math

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close_to_rounding, assert_same_bits
from half_products import assert_as_exact_as_plain, choose_processor, step_and_evaluate
from multiplied_rows import MultipliedRows
from plain_gpt2 import MASKS, ROWS, draw_batch, plain_gradients, plain_logits, train_only
from product_methods import ChosenMethods
from safetensors.torch import load_file

import loralib as lora
import model as model_module
from loralib.nn import packing, processor, products, row_buckets
from loralib.nn.fast_paths import fast_paths_off
from loralib.nn.linear_methods import METHODS
from loralib.nn.packing import PackedRows
from loralib.training.precision import Precision, cast_frozen
from loralib.training.product_choices import frozen_weights
from model import MODEL_CARDS, GPT2Config, GPT2LMModel, config_of, head_loss
from weights import canonical_names, load_base

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = ("plain", "one-head", "deep")
HALVES = [(torch.bfloat16, 0.08), (torch.float16, 0.01)]
LORA = {"lora_attn_dim": 2, "lora_attn_alpha": 6}
# How many additions follow one another in "deep": in each of 5 blocks, three products over 24 terms
# and one over 96, and attention; in the head, one over 24.
TERMS = 5 * (3 * 24 + 4 * 24 + 12 + 16) + 24


@pytest.fixture(scope="module")
def upstream(gpt2_fixture):
    """Upstream's logits, which make_gpt2_fixture.py has written."""
    return load_file(gpt2_fixture.FIXTURE)


@pytest.fixture
def build(gpt2_fixture):
    """Builds a model with the fixture's weights; LoRA's are random, including B."""

    def build(shape="plain", **lora_fields):
        n, layers, heads, vocabulary, positions, _ = gpt2_fixture.SHAPES[shape]
        config = GPT2Config(n, layers, heads, vocabulary, positions, **lora_fields)
        weights = canonical_names(gpt2_fixture.draw_weights(shape), "the fixture")
        torch.manual_seed(0)
        model = load_base(config, weights, "the fixture")
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        return model

    return build


def close(ours, theirs):
    assert_close_to_rounding(ours, theirs, TERMS)


def close_by_size(ours, theirs, dtype=torch.float32, terms=2 * TERMS):
    """Allows rounding relative to the largest value; by default of a forward and backward pass."""
    assert_close_to_rounding(ours.double(), theirs.double(), terms, dtype, magnitude=0.0)


# ---- logits ----


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_upstreams(upstream, gpt2_fixture, build, shape):
    model, rows = build(shape), gpt2_fixture.draw_rows(shape)
    theirs = upstream[f"{shape}/padded"]
    assert theirs.std() > 0.5
    padded = model(gpt2_fixture.pad(rows))
    assert padded.shape == theirs.shape
    for i, row in enumerate(rows):
        close(padded[i, : len(row)], theirs[i, : len(row)])
        close(model(row[None]), upstream[f"{shape}/row{i}"])


@pytest.mark.parametrize("shape", SHAPES)
def test_the_plain_implementations_logits_are_upstreams(upstream, gpt2_fixture, build, shape):
    model = build(shape)
    weights = {name: p.detach().double() for name, p in model.named_parameters()}
    for i, row in enumerate(gpt2_fixture.draw_rows(shape)):
        logits = plain_logits(weights, model.config, row[None])
        close(logits.float(), upstream[f"{shape}/row{i}"])


def test_a_row_that_is_too_long(build):
    model = build()
    ids = torch.zeros(2, 21).long()
    assert model(ids[:, :20]).shape == (2, 20, 53)
    for arguments in ((ids,), (ids, ids, torch.ones(2, 21))):
        with pytest.raises(
            ValueError, match=r"^a row has 21 tokens, the model has positions for 20$"
        ):
            model(*arguments)


def recorded_by_trace(model, ids):
    return torch.jit.trace(model, ids)


def recorded_by_export(model, ids):
    sizes = {
        0: torch.export.Dim("rows"),
        1: torch.export.Dim("length", max=model.config.n_positions),
    }
    return torch.export.export(model, (ids,), dynamic_shapes=(sizes,)).module()


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit")
@pytest.mark.parametrize("record", [recorded_by_trace, recorded_by_export])
@torch.no_grad()
def test_a_recorded_graph_gives_logits_for_batches_of_other_shapes(build, record):
    model = build(**LORA).eval()
    graph = record(model, torch.randint(10, (3, 7)))
    for shape in ((3, 7), (3, 9), (2, 4), (5, 8)):
        ids = torch.randint(10, shape)
        close(graph(ids), model(ids))


def test_a_graph_of_the_loss_is_refused(build):
    with pytest.raises(
        ValueError, match="the loss would hold only for this batch's targets: record"
    ):
        torch.jit.trace(build(), draw_batch("clm"))


# ---- the loss ----


@pytest.mark.parametrize("at_once", [128, 3])
@pytest.mark.parametrize("label_smooth", [0.0, 0.1])
@pytest.mark.parametrize("what", ["lora", "all"])
@pytest.mark.parametrize("kind", MASKS)
def test_loss_and_gradients(monkeypatch, build, kind, what, label_smooth, at_once):
    monkeypatch.setattr(model_module, "_TARGETS_AT_ONCE", at_once)
    model = train_only(build(**LORA), what)
    batch = (*draw_batch(kind), label_smooth)
    loss = model(*batch)
    assert (loss.dtype, loss.shape) == (torch.float32, ())
    loss.backward()
    expected, gradients = plain_gradients(model, *batch)
    close_by_size(loss, expected)
    found = {name for name, p in model.named_parameters() if p.grad is not None}
    assert found == gradients.keys()
    assert sum("lora_" in name for name in found) == 4
    assert len(found) == (4 if what == "lora" else 32)
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 1e-5
        close_by_size(model.get_parameter(name).grad, gradient)


def packed(batch):
    """Returns the packed rows that data_utils.py makes for a batch."""
    mask = batch[2]
    last = [max(row.nonzero().flatten().tolist(), default=0) for row in mask]
    return PackedRows.from_lengths([n + 1 for n in last], mask.shape[1]).with_targets(mask)


@pytest.mark.parametrize("kind", MASKS)
def test_results_with_and_without_packed_rows_are_bit_exact(build, kind):
    model, batch = train_only(build(**LORA), "all"), draw_batch(kind)
    found = []
    for rows in (None, packed(batch)):
        model.zero_grad()
        loss = model(*batch, 0.1, rows)
        loss.backward()
        found.append({"loss": loss, **{n: p.grad for n, p in model.named_parameters()}})
    assert_same_bits(*found)


def test_packed_rows_without_targets(build):
    model, batch = build(**LORA), draw_batch("clm")
    rows = packed(batch)
    rows.targets = None
    assert torch.equal(model(*batch, packed_rows=rows), model(*batch))


@pytest.mark.parametrize("what", ["lora", "all"])
def test_the_blocks_read_no_value_from_the_device(build, what):
    """Tensors on the meta device have no values, so reading one would be an error."""
    model, batch = train_only(build(**LORA), what).to("meta"), draw_batch("clm")
    rows = packed(batch).to("meta")
    ids = rows.pack(batch[0].to("meta"))
    hidden = model.transformer(ids, rows.positions, model._within(rows), rows.targets)
    assert hidden.shape == (batch[2].count_nonzero(), model.config.n_embd)
    hidden.sum().backward()
    trained = (p for p in model.transformer.parameters() if p.requires_grad)
    assert all(p.grad.is_meta for p in trained)


@pytest.mark.parametrize("label_smooth", [0.0, 0.1])
def test_loss_without_gradients_is_the_same(build, label_smooth):
    model, batch = train_only(build(**LORA), "lora"), draw_batch("clm")
    expected = model(*batch, label_smooth)
    with torch.no_grad():
        close_by_size(model.eval()(*batch, label_smooth), expected)


def test_gradients_scale_with_the_gradient_of_the_loss(build):
    model, batch = train_only(build(**LORA), "all"), draw_batch("jlm")
    model(*batch).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    (model(*batch) * 8).backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        close_by_size(parameter.grad, 8 * gradient)


def test_smoothing_begins_above_a_ten_thousandth(build):
    model, batch = build(**LORA), draw_batch("clm")
    losses = [model(*batch, epsilon).item() for epsilon in (0.0, 0.0001, 0.00011)]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("what", ["lora", "all"])
def test_a_batch_without_a_target(build, what):
    model = train_only(build(**LORA), what)
    ids, labels, mask = draw_batch("clm")
    loss = model(ids, labels, torch.zeros_like(mask), 0.1)
    assert loss.item() == 0
    loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad
        assert parameter.grad is None or not parameter.grad.any(), name


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64])
def test_masks_of_any_type(build, dtype):
    model, (ids, labels, mask) = build(), draw_batch("clm")
    close(model(ids, labels, mask.to(dtype)).float(), model(ids, labels, mask))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("trained", [0, 1], ids=["hidden states", "weight"])
def test_head_loss_with_a_single_trained_factor(trained, dtype):
    torch.manual_seed(0)
    factors, targets = (
        [torch.randn(n, 3, dtype=dtype) for n in (5, 7)],
        torch.tensor([0, 6, 2, 2, 1]),
    )
    exact_loss, *exact = exact_head_loss(*factors, targets)
    factors[trained].requires_grad_()
    loss = head_loss(*factors, targets, torch.ones(5), 0.0)
    close_by_size(loss, exact_loss, dtype, terms=20)
    loss.backward()
    close_by_size(factors[trained].grad, exact[trained], dtype, terms=20)
    assert factors[1 - trained].grad is None


def test_second_derivatives_of_the_head_loss_are_refused():
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(9, 8)
    loss = head_loss(hidden, weight, torch.tensor([0, 1, 2, 3]), torch.ones(4), 0.0)
    message = "^second derivatives cannot be computed through this loss: compute it from the"
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_the_compiled_head_loss_has_its_gradients():
    """PyTorch 2.11 loses those of a function that writes to its own output."""
    torch.manual_seed(0)
    factors = [torch.randn(5, 3, requires_grad=True), torch.randn(7, 3, requires_grad=True)]
    given = torch.tensor([0, 6, 2, 2, 1]), torch.ones(5), 0.0
    head_loss(*factors, *given).backward()
    compiled = torch.compile(head_loss, backend="eager")
    ours = torch.autograd.grad(compiled(*factors, *given), factors)
    for found, factor in zip(ours, factors, strict=True):
        close_by_size(found, factor.grad, terms=20)


def test_targets_whose_probability_rounds_to_1_or_0():
    """Logits are ±1000, so the probabilities are beyond float32's precision."""
    hidden = torch.tensor([[1000.0], [1000.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]])
    loss = head_loss(hidden, weight, torch.tensor([0, 1]), torch.ones(2), 0.0)
    assert loss.item() == 2000
    loss.backward()
    assert hidden.grad.flatten().tolist() == [0, 2]


# ---- what the loss does not depend on ----


@pytest.mark.parametrize("what", ["lora", "all"])
def test_tokens_after_the_last_target_change_nothing(build, what):
    ids, labels, mask = draw_batch("clm")
    after = mask.flip(1).cumsum(1).flip(1) == 0
    after[:, 0] = False
    assert after.any(dim=1).all()
    results = []
    for junk in (0, 52, -7, 10**9):
        model = train_only(build(**LORA), what)
        others = [x.masked_fill(after, junk) for x in (ids, labels)]
        loss = model(*others, mask, 0.1)
        loss.backward()
        trained = [p.grad for p in model.parameters() if p.requires_grad]
        results.append([loss.detach(), *trained])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_masked_labels_may_be_anything(build):
    model, (ids, labels, mask) = build(), draw_batch("scattered")
    assert torch.equal(
        model(ids, labels.masked_fill(mask == 0, -100), mask), model(ids, labels, mask)
    )


def test_a_rows_loss_does_not_depend_on_its_batch(build):
    model, (ids, labels, mask) = build(**LORA), draw_batch("clm")
    total = model(ids, labels, mask, 0.1) * (mask.sum() + 0.0001)
    rows = [
        model(ids[i : i + 1], labels[i : i + 1], mask[i : i + 1], 0.1) * (mask[i].sum() + 0.0001)
        for i in range(4)
    ]
    close(total, sum(rows))
    wider = [F.pad(x, (0, 2)) for x in (ids, labels, mask)]
    assert torch.equal(model(*wider, 0.1), model(ids, labels, mask, 0.1))


def test_padding_is_not_computed_and_the_last_mlp_gets_only_targets(build, monkeypatch):
    monkeypatch.setattr(row_buckets, "_largest_step", lambda x: 0)
    model, batch = build(**LORA), draw_batch("clm")
    sizes = {}
    for name in ("wte", "h.0.mlp", "h.1.attn.c_attn", "h.1.mlp", "ln_f"):
        model.transformer.get_submodule(name).register_forward_pre_hook(
            lambda _, given, name=name: sizes.update({name: len(given[0])})
        )
    model(*batch)
    tokens = sum(context + completion - 1 for context, completion in ROWS)
    targets = sum(completion for _, completion in ROWS)
    assert sizes == {
        "wte": tokens,
        "h.0.mlp": tokens,
        "h.1.attn.c_attn": tokens,
        "h.1.mlp": targets,
        "ln_f": targets,
    }


# ---- LoRA ----


def test_lora_is_only_on_c_attn_and_changes_query_and_value(build):
    model, base = build(**LORA), build()
    names = {name for name, _ in model.named_parameters() if "lora_" in name}
    assert names == {f"transformer.h.{i}.attn.c_attn.lora_{ab}" for i in range(2) for ab in "AB"}
    x = torch.randn(6, 32)
    for i in range(2):
        layer = model.transformer.h[i].attn.c_attn
        assert layer.lora_A.shape == (4, 32)
        assert layer.lora_B.shape == (64, 2)
        query, key, value = (layer(x) - base.transformer.h[i].attn.c_attn(x)).chunk(3, dim=1)
        assert not key.any()
        close(query, 3 * x @ layer.lora_A[:2].T @ layer.lora_B[:32].T)
        close(value, 3 * x @ layer.lora_A[2:].T @ layer.lora_B[32:].T)
        assert min(query.abs().mean(), value.abs().mean()) > 0.1


# The paper's tables round these to 0.35 M and 0.77 M.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("card", "trained", "size"),
    [
        ("gpt2.xs", 8_192, 7_357_312),
        ("gpt2.sm", 147_456, 124_439_808),
        ("gpt2.md", 393_216, 354_823_168),
        ("gpt2.lg", 737_280, 774_030_080),
    ],
)
def test_numbers_of_parameters(card, trained, size):
    with torch.device("meta"):
        model = GPT2LMModel(config_of(card, lora_attn_dim=4))
    lora.mark_only_lora_as_trainable(model)
    n, layers, heads = MODEL_CARDS[card]
    assert card == "gpt2.xs" or n == 64 * heads
    assert trained == layers * 2 * (4 * n + 4 * n)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == trained
    assert sum(p.numel() for p in model.parameters() if not p.requires_grad) == size


def test_merging_gives_the_same_logits(gpt2_fixture, build):
    model = build(**LORA).eval()
    ids = gpt2_fixture.pad(gpt2_fixture.draw_rows("plain"))
    expected, base = model(ids), build()(ids)
    assert (expected - base).abs().max() > 0.5
    merged = lora.merge(model)
    assert not any("lora_" in name for name, _ in merged.named_parameters())
    assert merged.lm_head.decoder.weight is merged.transformer.wte.weight
    close(merged(ids), expected)


def test_training_differs_from_evaluation_only_by_loras_dropout(build):
    ids, labels, mask = draw_batch("clm")
    model = build(**LORA, lora_dropout=0.5)
    evaluated = model.eval()(ids, labels, mask)
    assert torch.equal(model(ids, labels, mask), evaluated)
    model.train()
    assert (model(ids, labels, mask) - evaluated).abs() > 1e-3
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            parameter.data.zero_()
    close(model(ids, labels, mask), build()(ids, labels, mask))
    model = build(**LORA)
    assert torch.equal(model.train()(ids, labels, mask), model.eval()(ids, labels, mask))


# ---- half precision ----


@pytest.mark.parametrize("label_smooth", [0.0, 0.1])
@pytest.mark.parametrize(("dtype", "tolerance"), HALVES)
@pytest.mark.parametrize("device", DEVICES)
def test_frozen_weights_in_half(build, device, dtype, tolerance, label_smooth):
    model = train_only(build(**LORA), "lora")
    cast_frozen(model, dtype)
    batch = (*draw_batch("clm"), label_smooth)
    expected, gradients = plain_gradients(model, *batch)
    model.to(device)
    with Precision(dtype, device).autocast():
        loss = model(*(x.to(device) for x in batch[:3]), label_smooth)
    assert loss.dtype == torch.float32
    loss.backward()
    assert abs(loss.item() / expected.item() - 1) < tolerance / 8
    for name, gradient in gradients.items():
        ours = model.get_parameter(name).grad
        assert ours.dtype == torch.float32
        assert (ours.cpu() - gradient).norm() < tolerance * gradient.norm()


@pytest.mark.parametrize(("dtype", "tolerance"), HALVES)
@pytest.mark.parametrize("device", DEVICES)
def test_training_everything_in_half(build, device, dtype, tolerance):
    model, batch = train_only(build(), "all"), (*draw_batch("jlm"), 0.1)
    expected, gradients = plain_gradients(model, *batch)
    model.to(device)
    with Precision(dtype, device).autocast():
        loss = model(*(x.to(device) for x in batch[:3]), 0.1)
    loss.backward()
    assert abs(loss.item() / expected.item() - 1) < tolerance / 8
    for name, gradient in gradients.items():
        ours = model.get_parameter(name).grad
        assert ours.dtype == torch.float32
        assert (ours.cpu() - gradient).norm() < tolerance * gradient.norm()


def exact_head_loss(hidden, weight, targets):
    """The loss and its gradients by both, in float64."""
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    loss = F.cross_entropy(exact[0] @ exact[1].T, targets, reduction="sum")
    return loss, *torch.autograd.grad(loss, exact)


@pytest.mark.parametrize("device", DEVICES)
def test_probabilities_too_small_for_float16_count_together(device):
    """Each of 60,000 tokens has probability 2.5e-8, which float16 rounds to 0; all have 0.0015."""
    weight = torch.ones(60_000, 2, dtype=torch.float16, device=device)
    # The target comes last: a float32 sum that begins with its 1 would not grow by 2.5e-8.
    weight[-1, 1] = 18.5
    hidden = torch.tensor([[0.25, 1.0]], dtype=torch.float16, device=device, requires_grad=True)
    targets = torch.tensor([59_999], device=device)
    head_loss(hidden, weight, targets, torch.ones(1, device=device), 0.0).backward()
    _, expected, _ = exact_head_loss(hidden, weight, targets)
    share = torch.softmax(hidden.double() @ weight.double().T, dim=1)[0, :-1]
    assert share.max().half() == 0
    # The target's part of the gradient, -share · 1, and the others', share · 1, cancel.
    assert expected[0, 0].abs() < 1e-9
    assert hidden.grad[0, 0].abs() < 0.2 * share.sum()
    # With the scale of 1024, each probability becomes 2.6e-5, which float16 holds to 6e-8.
    close_by_size(hidden.grad, expected, torch.float16, terms=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_heads_gradients_of_very_many_targets(monkeypatch, dtype):
    """A sum of so many terms in half precision would lose small ones, or exceed float16's range."""
    monkeypatch.setattr(model_module, "_TARGETS_AT_ONCE", 4)
    torch.manual_seed(0)
    hidden = (4 * torch.rand(4000, 3)).to(dtype).requires_grad_()
    weight = (torch.randn(7, 3) / 8).to(dtype).requires_grad_()
    targets = torch.zeros(4000).long()
    loss = head_loss(hidden, weight, targets, torch.ones(4000), 0.0)
    loss.backward()
    assert loss.dtype == torch.float32
    # Half-precision results are float32 sums that are rounded once.
    terms = 4000 if dtype is torch.float32 else 1
    logits = hidden.detach().double() @ weight.detach().double().T
    close_by_size(loss, F.cross_entropy(logits, targets, reduction="sum"), dtype, terms)
    _, *exact = exact_head_loss(hidden, weight, targets)
    for ours, expected in zip((hidden.grad, weight.grad), exact, strict=True):
        assert ours.dtype == dtype
        close_by_size(ours, expected, dtype, terms)


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize("what", ["lora", "all"])
def test_a_processor_without_bfloat16_multiplies_in_float32(build, monkeypatch, what, large):
    """In training and evaluation; results are rounded to bfloat16, as on other processors."""
    model, found = train_only(build(**LORA), what), []
    cast_frozen(model, torch.bfloat16)
    for is_emulated in (False, True):
        choose_processor(monkeypatch, has_bfloat16=not is_emulated, large=large)
        halves, results = step_and_evaluate(
            model, lambda: model(*draw_batch("clm"), 0.1), lambda: model(*draw_batch("clm"))
        )
        assert bool(halves.seen) != is_emulated, halves.seen
        assert halves.others or not is_emulated
        found.append(results)
    theirs, ours = found
    for name, expected in theirs.items():
        # Some 50 products follow one another, each with a rounding error of up to 2^-9, so errors
        # add up to about 2 %.
        error = (ours[name] - expected).norm() / expected.norm()
        assert error < 0.1, name


@pytest.mark.parametrize("what", ["lora", "all"])
@pytest.mark.parametrize("method", METHODS)
def test_fast_paths_have_the_loss_and_gradients_of_the_plain_path(
    build, tmp_path, monkeypatch, method, what
):
    """Compares a CPU's fast paths with PyTorch's own operations."""
    if method in ("onednn", "packed") and not processor.has_onednn(torch.float32):
        pytest.skip("PyTorch is built without oneDNN here")
    ChosenMethods(monkeypatch, tmp_path).fastest(method)
    monkeypatch.setattr(products, "_usual", lambda *_: method)
    steps, attended, attend_rows = [], [], packing.attend_rows
    multiplied, multiply = [], METHODS[method]
    monkeypatch.setitem(METHODS, method, lambda *a: multiplied.append(a) or multiply(*a))
    monkeypatch.setattr(packing, "attend_rows", lambda *a: attended.append(a) or attend_rows(*a))
    for is_off in (True, False):
        model = train_only(build(**LORA), what)
        with fast_paths_off(is_off):
            loss = model(*draw_batch("clm"), 0.1)
            loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        steps.append({"loss": loss, **grads})
        assert bool(attended) == bool(multiplied) == (not is_off)
    theirs, ours = steps
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        close_by_size(ours[name], tensor)


def test_in_bfloat16_a_step_is_as_exact_as_on_the_plain_path():
    torch.manual_seed(0)
    model = GPT2LMModel(GPT2Config(64, 3, 4, 500, 128, lora_attn_dim=4, lora_attn_alpha=8))
    lora.mark_only_lora_as_trainable(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Probabilities that are neither nearly equal nor saturated, because rounding would
            # dominate those.
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.1)
            elif parameter.dim() == 2:
                parameter.mul_(5)
    ids, every = torch.randint(500, (6, 64)), torch.ones(6, 64)
    assert_as_exact_as_plain(
        model, lambda own: own(ids, ids.roll(-1, 1), every, 0.1), ratio=1.5, off=0.01
    )


def test_measure_knows_every_product_of_the_loss(monkeypatch):
    """Products of layers and head, forward and backward, are compared by kind (`products._key`)."""
    monkeypatch.setattr(products, "_LARGE", 0)
    monkeypatch.setattr(products, "_LARGE_OF_FEW", 0)
    monkeypatch.setattr(products, "_fastest", lambda *_: "plain")
    model, used = GPT2LMModel(GPT2Config(32, 2, 4, 500, 512, **LORA)), set()
    lora.mark_only_lora_as_trainable(model)
    usual = products._usual
    monkeypatch.setattr(products, "_chosen", {})
    monkeypatch.setattr(
        products, "_usual", lambda *given: used.add(products._key(*given)) or usual(*given)
    )
    ids = torch.randint(500, (1, 400))
    model(ids, ids, torch.ones(1, 400)).backward()
    assert {"float32 32 -> 500, few rows", "float32 500 -> 32 transposed, few rows"} <= used
    assert used == products.measure(frozen_weights(model), torch.float32, {}).keys()


# ---- weights ----


def test_initial_weights():
    config = GPT2Config(32, 2, 4, 500, 64, **LORA)
    torch.manual_seed(0)
    model = GPT2LMModel(config)
    assert model.lm_head.decoder.weight is model.transformer.wte.weight
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            assert parameter.requires_grad
            assert 0.08 < parameter.std() < 0.12
        elif "bias" in name or "lora_B" in name:
            assert not parameter.any()
        elif "ln_" in name:
            assert (parameter == 1).all()
        else:
            assert 0.018 < parameter.std() < 0.022
    torch.manual_seed(0)
    again = GPT2LMModel(config).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())


def test_reset_parameters_leaves_lora_to_its_layers():
    model = GPT2LMModel(GPT2Config(32, 2, 4, 500, 64, **LORA))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 7.0)
    model.reset_parameters()
    for name, parameter in model.named_parameters():
        if "lora_" in name:  # the LoRA layers initialize these
            assert (parameter == 7).all()
        elif "bias" in name:
            assert not parameter.any()
        elif "ln_" in name:
            assert (parameter == 1).all()
        else:
            assert 0.018 < parameter.std() < 0.022


def test_every_norm_has_the_configurations_epsilon():
    model = GPT2LMModel(GPT2Config(32, 2, 4, 500, 64, layer_norm_epsilon=0.25))
    norms = [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
    assert [norm.eps for norm in norms] == [0.25] * 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_rank_pattern": {"key": 1}}, "key shares its rank and alpha with all of attn.c_at"),
        ({"lora_init": "orthogonal", "lora_attn_dim": 3}, "r has to be even for the orthogonal"),
        ({"n_head": 3}, "n_embd 32 is not a multiple of 3 heads"),
        ({"lora_attn_dim": 33}, "the rank of .*, 33, is larger than n_embd, 32"),
        ({"lora_rank_pattern": {"h.1.*": 0}}, r"the rank 0 of transformer\.h\.1\..* above 0"),
        ({"lora_alpha_pattern": {"h.1.*": 0}}, r"the alpha 0 of transformer\.h\.1\..* above 0"),
        ({"lora_alpha_pattern": {"h.0.*": -1}}, r"the alpha -1 of transformer\.h\.0\..* above 0"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    assert GPT2Config(32, 2, 4, lora_attn_dim=32).rank_of("any") == 32
    with pytest.raises(ValueError, match=message):
        GPT2Config(**{"n_embd": 32, "n_layer": 2, "n_head": 4, **LORA, **settings})


def test_patterns_keep_only_the_layers_that_differ():
    patterns = {
        "lora_rank_pattern": {"h.0.*": 2, "h.1.*": 1},
        "lora_alpha_pattern": {"attn.c_attn": 6},
    }
    config = GPT2Config(32, 2, 4, **LORA, **patterns)
    assert config.lora_rank_pattern == {"transformer.h.1.attn.c_attn": 1}
    assert config.lora_alpha_pattern == {}
    assert GPT2Config(32, 2, 4, **patterns) == GPT2Config(32, 2, 4)  # no LoRA


# ---- batches that are filled up ----


@pytest.mark.parametrize("kind", ["jlm", "clm", "a row without a target", "weighted"])
@pytest.mark.parametrize("lora_fields", [{}, LORA])
def test_filling_a_batch_up_changes_neither_loss_nor_gradients(
    build, monkeypatch, lora_fields, kind
):
    """Nothing reads the added rows, so results differ only by rounding in float64."""
    found, seen = [], []
    head_loss = model_module.head_loss
    monkeypatch.setattr(
        model_module, "head_loss", lambda *given: seen.append(len(given[0])) or head_loss(*given)
    )
    for is_filled in (False, True):
        monkeypatch.setattr(row_buckets, "_largest_step", lambda x, step=64 * is_filled: step)
        model = build(**lora_fields).double()
        within = model._within
        monkeypatch.setattr(
            model,
            "_within",
            lambda rows, within=within: seen.append(len(rows.index)) or within(rows),
        )
        loss = model(*draw_batch(kind), label_smooth=0.1)
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append({"loss": loss, **grads})
    given, filled = seen[:2], seen[2:]  # numbers of tokens and targets
    assert filled == [row_buckets.bucketed(count, loss) for count in given]
    assert filled != given
    theirs, ours = found
    largest = max(tensor.abs().max().item() for tensor in theirs.values())
    for name, tensor in theirs.items():
        assert_close_to_rounding(ours[name], tensor, 3 * TERMS, torch.float64, largest)


def test_added_targets_are_copies_of_a_target(build, monkeypatch):
    """They are not copies of a token that no loss reads, whose values may be anything, even NaN."""
    monkeypatch.setattr(row_buckets, "_largest_step", lambda x: 64)
    model = build(**LORA)
    ids = torch.full((2, 20), 7)
    ids[0] = 3
    mask = torch.ones(2, 20)
    mask[0] = 0  # the first row's first token is computed, but not read
    mask[1, 17:] = 0  # 17 targets, to which one is added
    model.transformer.wte.weight.data[3] = math.nan
    hidden = []
    model.transformer.ln_f.register_forward_hook(lambda *given: hidden.append(given[-1]))
    model(ids, ids.masked_fill(ids == 3, 0), mask)
    assert hidden[0].shape[0] == 18
    assert hidden[0].isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, {288, 208}), (torch.float32, {272, 208, 128})],  # 128 targets at a time
)
def test_batches_of_similar_size_multiply_equally_many_rows(build, monkeypatch, dtype, expected):
    choose_processor(monkeypatch, has_bfloat16=True, large=False)
    model, seen = train_only(build(**LORA), "lora"), []
    for last in ([18], [12, 10]):  # 258 and 262 tokens, 206 of them targets
        columns, lengths = torch.arange(20), torch.tensor([*[20] * 12, *last])
        mask = ((columns >= 4) & (columns < lengths[:, None])).float()
        ids = torch.randint(0, 53, mask.shape)
        with MultipliedRows() as rows, torch.autocast("cpu", dtype, dtype != torch.float32):
            model(ids, ids, mask, label_smooth=0.1).backward()
        seen.append({count for count in rows.seen if count > 100})
    assert seen == [expected] * 2
