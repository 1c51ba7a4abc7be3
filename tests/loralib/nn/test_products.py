"""Tests of products of large matrices: every method is right, and which one is chosen."""

import collections
import gc
import logging
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close_to_rounding, rounding
from half_products import HalfProducts, choose_processor
from simulated_gpu import SimulatedGpu, on_gpu, to_cpu
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import loralib as lora
from loralib.nn import processor, products
from loralib.nn.fast_paths import fast_paths_off
from loralib.nn.linear_methods import METHODS, METHODS_OF_BATCHES, _packed_copies, in_float32

# The first is too small for a choice of methods, the second is large enough.
SIZES = [(5, 16, 24), (320, 1024, 832)]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}


def make(size, dtype, with_bias):
    rows, inputs, outputs = size
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs) * inputs**-0.5
    bias = torch.randn(outputs).to(dtype) if with_bias else None
    return x.to(dtype), weight.to(dtype), bias


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@torch.no_grad()
def test_it_is_the_product_up_to_rounding(size, dtype, with_bias, transposed):
    x, weight, bias = make(size, dtype, with_bias)
    given = weight.t().contiguous().t() if transposed else weight
    out = products.product(x, given, bias)
    assert (out.dtype, out.is_contiguous()) == (dtype, True)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    error = (out.double() - exact).abs().max() / exact.abs().max()
    assert error <= TOLERANCES[dtype]


@torch.no_grad()
def test_inputs_need_not_be_contiguous():
    x, weight, bias = make(SIZES[1], torch.float32, with_bias=True)
    wide = torch.cat([x, x], dim=1)[:, : x.shape[1]]
    torch.testing.assert_close(products.product(wide, weight, bias), F.linear(x, weight, bias))
    row = x[:1].expand(len(x), -1)  # like the gradient of a sum
    torch.testing.assert_close(products.product(row, weight, bias), F.linear(row, weight, bias))


def test_a_product_has_gradients():
    x, weight, bias = (tensor.requires_grad_() for tensor in make(SIZES[1], torch.float32, True))
    leaves, grad = (x, weight, bias), torch.randn(len(x), len(weight))
    found = torch.autograd.grad(products.product(x, weight, bias), leaves, grad)
    for ours, theirs in zip(
        found, torch.autograd.grad(F.linear(x, weight, bias), leaves, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


# ---- bfloat16 in float32 ----

SETTINGS = [(with_bias, transposed) for with_bias in (False, True) for transposed in (False, True)]


@pytest.fixture(params=["in batches", "no instructions"])
def batches_in_float32(request, monkeypatch):
    """Batches in bfloat16 are multiplied in float32: it was faster, or is the only method."""
    if request.param == "in batches":
        monkeypatch.setattr(products, "_chosen", {products._BATCHES: "float32"})
    else:
        choose_processor(monkeypatch, has_bfloat16=False, large=True)


def assert_rounded_once(found, exact, terms):
    """Checks that results are what float32 computes, rounded to bfloat16 once."""
    assert found.dtype is torch.bfloat16
    half_an_ulp = torch.finfo(torch.bfloat16).eps / 2 * exact.abs()
    assert ((found.double() - exact).abs() <= half_an_ulp + rounding(exact, terms)).all()


@pytest.mark.parametrize("converted", [1, 1024 * 100, 2**22])
@pytest.mark.parametrize(("with_bias", "transposed"), SETTINGS)
@torch.no_grad()
def test_a_product_in_float32_is_rounded_once(with_bias, transposed, converted, monkeypatch):
    """In however many parts the weight is converted, and under autocast too."""
    monkeypatch.setattr("loralib.nn.linear_methods._CONVERTED", converted)
    x, weight, bias = make(SIZES[1], torch.bfloat16, with_bias)
    given = weight.t().contiguous().t() if transposed else weight
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert_rounded_once(in_float32(x, given, bias), exact, 1024)


@pytest.mark.parametrize(("with_bias", "transposed"), SETTINGS)
def test_without_instructions_for_it_no_product_is_in_bfloat16(with_bias, transposed, monkeypatch):
    """Neither large nor small products, with frozen or trained weights."""
    for large in (True, False):
        choose_processor(monkeypatch, has_bfloat16=False, large=large)
        for is_frozen in (True, False):
            x, weight, bias = make(SIZES[1], torch.float32, with_bias)
            given = weight.t().contiguous().t() if transposed else weight
            x.requires_grad_(), given.requires_grad_(not is_frozen)
            with HalfProducts() as halves:
                with torch.autocast("cpu", torch.bfloat16):
                    out = products.linear(x, given, bias)
                out.sum().backward()
            assert (halves.seen, out.dtype) == ([], torch.bfloat16)
            assert halves.others == (2 if is_frozen else 3)
            assert (given.grad is None) == is_frozen
            assert_close_to_rounding(
                x.grad, weight.bfloat16().float().sum(0).expand_as(x), 832, torch.bfloat16
            )


@pytest.mark.parametrize("autocast", [False, True])
def test_batches_are_multiplied_in_float32_and_rounded_once(batches_in_float32, autocast):
    a, b = torch.randn(6, 20, 30).bfloat16(), torch.randn(6, 30, 10).bfloat16()
    exact = 0.3 * (a.double() @ b.double())
    leaves = a.clone().requires_grad_(), b.clone().requires_grad_()
    with HalfProducts() as halves:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = torch.full((6, 20, 10), float("nan"), dtype=torch.bfloat16)
            assert products.batched_product(a, b, 0.3, out) is out
            assert torch.equal(products.batched_product(a, b, 0.3), out)
            recorded = products.matmul(*leaves)
        grad_a, grad_b = torch.autograd.grad(recorded.sum(), leaves)
    assert not halves.seen
    assert_rounded_once(out, exact, 30)
    assert_rounded_once(recorded.detach(), exact / 0.3, 30)
    of_a, of_b = b.double().sum(2)[:, None].expand_as(a), a.double().sum(1)[:, :, None].expand_as(b)
    for grad, expected in ((grad_a, of_a), (grad_b, of_b)):
        assert_close_to_rounding(grad.double(), expected, 30, torch.bfloat16)


def test_add_product_computes_in_float32(monkeypatch):
    choose_processor(monkeypatch, has_bfloat16=False, large=False)
    out, a, b = (torch.randn(size).bfloat16() for size in ((20, 10), (20, 4), (4, 10)))
    exact = out.double() + 0.3 * (a.double() @ b.double())
    a.requires_grad_()
    with HalfProducts() as halves:
        added = out.clone()
        products.add_product(added, a, b, 0.3)
        (grad,) = torch.autograd.grad(added.sum(), [a])
    assert not halves.seen
    assert_rounded_once(added.detach(), exact, 6)
    assert_close_to_rounding(grad.float(), 0.3 * b.float().sum(1).expand_as(a), 10, torch.bfloat16)


@pytest.mark.parametrize(
    ("vendor", "dtype", "with_bias", "expected"),
    [
        ("GenuineIntel", torch.float32, True, "plain"),
        ("AuthenticAMD", torch.float32, False, "onednn"),
        ("GenuineIntel", torch.bfloat16, True, "onednn"),
        ("AuthenticAMD", torch.bfloat16, False, "plain"),
    ],
)
def test_the_usual_method_depends_on_vendor_dtype_and_instructions(
    monkeypatch, vendor, dtype, with_bias, expected
):
    monkeypatch.setattr(processor, "_cpuinfo", lambda: {"vendor_id": vendor})
    monkeypatch.setattr(processor, "is_intel", processor.is_intel.__wrapped__)
    for name in ("has_avx512", "has_bfloat16"):
        monkeypatch.setattr(processor, name, lambda: True)
    monkeypatch.setattr(processor, "has_onednn", lambda dtype: True)
    x, weight, bias = make(SIZES[1], dtype, with_bias)
    assert products._usual(x, weight, bias) == expected
    assert products._usual(x[:5], weight, bias) == "plain", "too few rows"
    monkeypatch.setattr(processor, "has_avx512", lambda: False)
    assert products._usual(x, weight, bias) == "plain"


def test_bfloat16_is_multiplied_in_float32_where_that_is_faster(monkeypatch, no_choices):
    times = {"plain": 3.0, "onednn": 3.0, "blocks": 3.0, "packed": 3.0, "float32": 2.0}
    names = {method: name for name, method in METHODS.items()}
    names |= {method: name for name, method in METHODS_OF_BATCHES.items()}
    monkeypatch.setattr(products, "_seconds", lambda method, *_: times[names[method]])
    monkeypatch.setattr(processor, "has_bfloat16", lambda: True)
    weight = products.FrozenWeight(torch.randn(832, 1024))
    keys = ["bfloat16 1024 -> 832", products._BATCHES]
    for expected in ("float32", "plain"):
        assert products.measure([weight], torch.bfloat16, {}, backward=False) == dict.fromkeys(
            keys, expected
        )
        times["float32"] = 2.9
    assert products.measure([weight], torch.float32, {}, backward=False) == {
        "float32 1024 -> 832": "plain"
    }


def test_without_instructions_float32_is_chosen_without_measuring(monkeypatch, no_choices):
    """Measuring the other methods could take a hundred times as long."""
    choose_processor(monkeypatch, has_bfloat16=False, large=True)
    monkeypatch.setattr(products, "_seconds", None)
    methods = products.measure([products.FrozenWeight(torch.randn(832, 1024))], torch.bfloat16, {})
    assert set(methods.values()) == {"float32"}
    assert len(methods) == 3


# ---- methods ----

LAYERS = {
    "linear": lambda: products.Linear(1024, 832),
    "lora": lambda: lora.Linear(1024, 832, r=4),
    "transposed": lambda: lora.Linear(1024, 832, r=4, fan_in_fan_out=True),
}


@pytest.fixture
def no_choices(monkeypatch):
    """No method is chosen yet."""
    monkeypatch.setattr(products, "_chosen", {})


@pytest.fixture(params=list(METHODS))
def one_method(request, monkeypatch, no_choices):
    """Every large product is computed by this method."""
    if request.param in ("onednn", "packed") and not processor.has_onednn(torch.float32):
        pytest.skip("PyTorch is built without oneDNN here")
    monkeypatch.setattr(products, "_usual", lambda *_: request.param)
    return request.param


@pytest.mark.parametrize("layer", LAYERS)
def test_every_method_has_the_plain_results_and_gradients(one_method, layer):
    layer, found = LAYERS[layer](), []
    layer.weight.requires_grad = False
    x, weights = torch.randn(320, 1024), torch.randn(320, 832)
    if hasattr(layer, "lora_B"):
        torch.nn.init.normal_(layer.lora_B)
    for is_off in (False, True):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        with fast_paths_off(is_off):
            out = layer(leaf)
            (out * weights).sum().backward()
        grads = [p.grad for p in layer.parameters() if p.requires_grad]
        found.append([out.detach(), leaf.grad, *grads])
    assert len(found[0]) == (5 if hasattr(layer, "lora_B") else 3)
    for ours, theirs in zip(*found, strict=True):
        assert_close_to_rounding(ours, theirs, 1024 + 832)


@pytest.mark.parametrize("bias", [True, False])
def test_only_a_trained_weight_saves_the_input_for_the_backward_pass(bias):
    """A trained bias does not need it."""
    saved = []
    for is_frozen in (True, False):
        layer = products.Linear(1024, 832, bias=bias)
        layer.weight.requires_grad = not is_frozen
        x = torch.randn(320, 1024, requires_grad=True)
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            out = layer(x)
        assert (x.data_ptr() in [t.data_ptr() for t in saved]) == (not is_frozen)
        out.sum().backward()
        assert x.grad.any()


def test_a_trained_weight_gets_its_gradient():
    layer, x = products.Linear(1024, 832), torch.randn(320, 1024)
    layer(x).sum().backward()
    assert_close_to_rounding(layer.weight.grad, x.sum(0).expand(832, -1), 320)


@pytest.fixture
def onednn_is_faster(monkeypatch, no_choices):
    """As on AMD's processors: oneDNN multiplies in float32 with trained weights too."""
    if not processor.has_onednn(torch.float32):
        pytest.skip("PyTorch is built without oneDNN here")
    monkeypatch.setattr(products, "_is_onednn_faster", lambda: True)


class Calls(TorchDispatchMode):
    """Counts the operators that are called, by name."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("with_bias", "transposed"), SETTINGS)
def test_onednn_multiplies_with_trained_weights_where_it_is_faster(
    onednn_is_faster, with_bias, transposed
):
    x, weight, bias = make(SIZES[1], torch.float32, with_bias)
    leaves = [x, weight.t().contiguous() if transposed else weight, *([bias] if with_bias else [])]
    grad = torch.randn(len(x), len(weight))

    def out_and_gradients(dtype, multiply):
        given = [leaf.to(dtype).requires_grad_() for leaf in leaves]
        matrix = given[1].t() if transposed else given[1]
        out = multiply(given[0], matrix, given[2] if with_bias else None)
        return [out, *torch.autograd.grad(out, given, grad.to(dtype))]

    with Calls() as calls:
        found = out_and_gradients(torch.float32, products.linear)
    assert calls.counts["_linear_pointwise"] == 3
    assert not calls.counts.keys() & {"mm", "addmm", "clone", "copy_"}
    exact = out_and_gradients(torch.float64, F.linear)
    for ours, theirs, terms in zip(found, exact, (1024, 832, 320, 320), strict=False):
        assert ours.is_contiguous(), "the weight's gradient lies in memory as the weight does"
        assert_close_to_rounding(ours.double(), theirs, terms)


def test_arguments_that_onednn_cannot_take_give_f_linears_results(onednn_is_faster):
    """No rows or no inputs, biases of other shapes, one output, sparse inputs, tangents."""
    x, weight, bias = (t.requires_grad_() for t in make(SIZES[1], torch.float32, True))
    given = [
        (x[:0], weight, bias),
        (x[:, :0], weight[:, :0], bias),
        (x, weight, bias[:1]),
        (x, weight, bias.expand(len(x), -1)),
        (x, weight[0], None),
        (x.detach().to_sparse(), weight, None),
    ]
    for case in given:
        torch.testing.assert_close(products.linear(*case), F.linear(*case))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(bias.detach(), torch.ones_like(bias))
        tangent = forward_ad.unpack_dual(products.linear(x, weight, dual)).tangent
    assert torch.equal(tangent, torch.ones(len(x), len(weight)))
    with pytest.raises(RuntimeError, match="dtype"):
        products.linear(x, weight, bias.double())


@pytest.mark.parametrize("recorded", [True, False])
def test_no_method_loses_the_forward_derivative_of_a_bias(one_method, recorded):
    x, weight, bias = make(SIZES[1], torch.float32, True)
    direction = torch.randn_like(bias)
    with torch.set_grad_enabled(recorded), forward_ad.dual_level():
        dual = forward_ad.make_dual(bias, direction)
        for multiply in (products.linear, products.product):
            tangent = forward_ad.unpack_dual(multiply(x, weight, dual)).tangent
            assert torch.equal(tangent, direction.expand(len(x), -1))


def test_unusual_gradients_are_right(onednn_is_faster):
    """Of few rows, of a sum (one row, repeated), and of gradients."""
    layer = products.Linear(1024, 832)
    for rows in (5, 320):
        x = torch.randn(rows, 1024)
        layer.zero_grad()
        layer(x).sum().backward()
        assert_close_to_rounding(layer.weight.grad, x.sum(0).expand(832, -1), rows)
    x.requires_grad_()
    out = layer(x)
    (first,) = torch.autograd.grad(out, layer.weight, torch.ones_like(out), create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert_close_to_rounding(second, torch.full_like(x, 832), 832)


def packed_where_possible(x, weight, bias):
    """Chooses the method; some processors have oneDNN's linear layer in float32 only."""
    return "packed" if processor.has_onednn(x.dtype) else "plain"


@pytest.fixture
def packing(monkeypatch, no_choices):
    """Every large product is computed with a packed copy."""
    if not processor.has_onednn(torch.float32):
        pytest.skip("PyTorch is built without oneDNN here")
    monkeypatch.setattr(products, "_usual", packed_where_possible)


def test_a_packed_copy_follows_its_weight(packing):
    layer, x = products.Linear(1024, 832).requires_grad_(False), torch.randn(320, 1024)
    layer(x)
    for change in (
        lambda: layer.weight.mul_(2),
        lambda: layer.load_state_dict({"weight": torch.randn(832, 1024), "bias": torch.ones(832)}),
        lambda: setattr(layer.weight, "data", torch.randn(832, 1024)),
    ):
        change()
        expected = F.linear(x, layer.weight, layer.bias)
        assert_close_to_rounding(layer(x), expected, 1024)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("make_layer", [LAYERS["linear"], LAYERS["lora"]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_copy_follows_an_optimizer(packing, make_layer, dtype, fused):
    layer, x = make_layer(), torch.randn(320, 1024)
    layer.weight.requires_grad_(False)
    layer(x)
    layer.weight.requires_grad_(True)
    optimizer = torch.optim.AdamW([layer.weight], lr=0.1, fused=fused)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
        layer(x).square().mean().backward()
    layer.weight.requires_grad_(False)
    optimizer.step()
    assert_close_to_rounding(layer(x), F.linear(x, layer.weight, layer.bias), 1024)


@torch.no_grad()
def test_every_slice_of_a_weight_has_its_own_packed_copy(packing):
    weight, x = (
        nn.Parameter(torch.randn(3 * 832, 1024), requires_grad=False),
        torch.randn(320, 1024),
    )
    for part in weight.split(832):
        assert_close_to_rounding(products.product(x, part), F.linear(x, part), 1024)


@torch.no_grad()
def test_a_packed_copy_is_not_used_for_another_dtype(packing):
    if not processor.has_onednn(torch.bfloat16):
        pytest.skip("PyTorch has no oneDNN for bfloat16 on this processor")
    layer, x = products.Linear(1024, 832, bias=False).requires_grad_(False), torch.randn(320, 1024)
    memory = layer.weight.data.flatten()
    layer(x)
    # Numbers of another dtype at the same address, as the allocator may put them.
    memory = memory.view(torch.bfloat16)[: memory.numel()]
    layer.weight.data = memory.copy_(torch.randn(832 * 1024)).view(832, 1024)
    x = x.bfloat16()
    assert_close_to_rounding(layer(x), F.linear(x, layer.weight), 1024, torch.bfloat16)


@torch.no_grad()
def test_memory_of_a_packed_weight_is_not_reused_while_its_copy_exists(packing):
    layer, x = products.Linear(1024, 832).requires_grad_(False), torch.randn(320, 1024)
    layer(x)
    storage = weakref.ref(layer.weight.untyped_storage())
    layer.weight.data = torch.randn(832, 1024)
    gc.collect()
    assert storage() is not None
    layer(x)  # makes a new copy
    gc.collect()
    assert storage() is None


@torch.no_grad()
def test_copies_of_replaced_weights_are_dropped_when_others_are_made(packing):
    x = torch.randn(320, 1024)
    first, second = (products.Linear(1024, 832).requires_grad_(False) for _ in range(2))
    first(x)
    first.weight.data = torch.randn(832, 1024)
    second(x)
    assert first.weight not in _packed_copies
    assert second.weight in _packed_copies


def test_a_packed_copy_is_dropped_with_its_weight(packing):
    layer = products.Linear(1024, 832).requires_grad_(False)
    layer(torch.randn(320, 1024))
    before = len(_packed_copies)
    del layer
    gc.collect()
    assert len(_packed_copies) == before - 1


# ---- the choice ----


def test_the_fastest_is_chosen(monkeypatch, no_choices, caplog):
    times = {"plain": 3.0, "onednn": 2.0, "blocks": 1.0, "packed": 0.9}
    methods = {method: name for name, method in METHODS.items()}
    monkeypatch.setattr(products, "_seconds", lambda method, *_: times[methods[method]])
    layer = products.Linear(1024, 832).requires_grad_(False)
    weights = [products.FrozenWeight(layer.weight, layer.bias)]
    with caplog.at_level(logging.INFO):
        methods = products.measure(weights, torch.float32, {})
    assert caplog.messages == ["measuring the fastest way to multiply, once for these sizes"]
    # Not "packed": it is not faster by enough for its memory.
    expected = {
        "float32 1024 -> 832 + bias": "blocks",
        "float32 832 -> 1024 transposed": "blocks",
    }
    assert methods == expected
    times["packed"] = 0.1
    with caplog.at_level(logging.INFO):
        assert products.measure(weights, torch.float32, methods) == expected, "choices are kept"
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(("share", "expected"), [(0.8, "onednn"), (0.6, "packed")])
def test_a_packed_copy_for_few_rows_has_to_save_more_time(monkeypatch, no_choices, share, expected):
    # Nothing is multiplied here, so PyTorch need not be built with oneDNN.
    monkeypatch.setattr(processor, "has_onednn", lambda dtype: True)
    shares = {"plain": 1.0, "onednn": 0.67, "blocks": 1.0, "packed": 0.67 * share}
    monkeypatch.setattr(
        products, "_shares", lambda methods, *_: {method: shares[method] for method in methods}
    )
    weight = products.Linear(1024, 832).requires_grad_(False).weight
    for_some = products.FrozenWeight(weight, rows_at_once=lambda dtype: 256)
    found = products.measure([for_some], torch.float32, {}, backward=False)
    assert found == {"float32 1024 -> 832, few rows": expected}
    # Independent of the other weights' rows, so that beam search and training share measurements.
    assert products.measure([for_some], torch.float32, {}, rows=256, backward=False) == found


def test_products_of_few_rows_have_their_own_choice(monkeypatch, no_choices):
    measured = []
    monkeypatch.setattr(products, "_fastest", lambda x, *_: measured.append(len(x)) or "blocks")
    weight = products.FrozenWeight(torch.randn(832, 1024))
    weights = [weight, weight._replace(rows_at_once=lambda dtype: 400 // dtype.itemsize)]
    methods = products.measure(weights, torch.float32, {}, backward=False)
    assert measured == [products.MANY_ROWS, 100]
    few, many = "float32 1024 -> 832, few rows", "float32 1024 -> 832"
    assert methods == {few: "blocks", many: "blocks"}
    assert products.measure([weight], torch.float32, {}, 100, backward=False) == {few: "blocks"}
    products.use_choices({"machine": products.machine(), "methods": methods})
    used = []
    monkeypatch.setitem(METHODS, "blocks", lambda *given: used.append(given[0].shape[0]))
    with torch.no_grad():
        for rows in (100, 320):
            products.product(torch.randn(rows, 1024), weight.matrix)
    assert used == [100, 320]


def test_use_products_replaces_linear_layers_and_keeps_their_parameters():
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 5),
        torch.nn.Sequential(torch.nn.Linear(5, 3, bias=False), torch.nn.ReLU()),
    ).eval()
    parameters, x = list(model.parameters()), torch.randn(2, 4)
    expected = model(x)
    products.use_products(model)
    assert [type(layer) for layer in (model[0], model[1][0])] == [products.Linear] * 2
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert not model[0].training
    assert torch.equal(model(x), expected)


def test_trained_weights_use_the_methods_where_gradients_are_off(one_method):
    layer, x = products.Linear(1024, 832), torch.randn(320, 1024)
    with torch.inference_mode():
        assert_close_to_rounding(layer(x), F.linear(x, layer.weight, layer.bias), 1024)


def test_small_products_are_not_measured_nor_any_with_fast_paths_off():
    small, large = (products.FrozenWeight(torch.randn(n, n)) for n in (16, 1024))
    assert not products.measure([small], torch.float32, {})
    with fast_paths_off():
        assert not products.measure([large], torch.float32, {})


def test_known_choices_need_no_random_inputs_and_no_casts(monkeypatch):
    weight = products.FrozenWeight(torch.randn(832, 1024), torch.randn(832))
    choose_processor(monkeypatch, has_bfloat16=True, large=True)
    monkeypatch.setattr(products, "_fastest", lambda *_: "plain")
    monkeypatch.setattr(products, "_fastest_of_batches", lambda *_: "plain")
    known = products.measure([weight], torch.bfloat16, {})
    monkeypatch.setattr(torch, "rand", None)
    monkeypatch.setattr(torch.Tensor, "to", None)
    assert products.measure([weight, weight], torch.bfloat16, known) == known
    kinds = {"bfloat16 1024 -> 832 + bias", "bfloat16 832 -> 1024 transposed"}
    assert known.keys() == {*kinds, products._BATCHES}


def test_choices_of_another_machine_and_unknown_methods_are_ignored(no_choices):
    batches = {products._BATCHES: "blocks"}  # not a method of batches
    own = {
        "machine": products.machine(),
        "methods": {"a": "plain", "b": "of a later version", **batches},
    }
    products.use_choices(own)
    assert products.choices()["methods"] == {"a": "plain"}
    products.use_choices({"machine": "another", "methods": {"a": "blocks", "c": "plain"}})
    assert products.choices()["methods"] == {"a": "plain"}


def test_measuring_leaves_the_random_generator_as_it_was():
    weight = products.FrozenWeight(torch.randn(832, 1024))
    before = torch.get_rng_state()
    assert products.measure([weight], torch.float32, {})
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def other_gpu():
    """Lets a test choose what GPUs can do."""
    products._has_wide_bfloat16.cache_clear()
    settings = torch.backends.cuda.matmul
    before = settings.allow_fp16_accumulation
    yield
    settings.allow_fp16_accumulation = before
    products._has_wide_bfloat16.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "major", "in_half", "is_wide"),
    [
        (torch.bfloat16, 9, False, True),
        (torch.bfloat16, 8, True, True),
        (torch.bfloat16, 7, False, False),
        (torch.float16, 7, False, True),
        (torch.float16, 9, True, False),
    ],
)
@pytest.mark.usefixtures("other_gpu")
@torch.no_grad()
def test_gradients_of_factors_are_wide_where_a_gpu_can(monkeypatch, dtype, major, in_half, is_wide):
    """Where PyTorch would raise an error, they are rounded: 2049 has more digits than halves."""
    torch.backends.cuda.matmul.allow_fp16_accumulation = in_half
    grad, x = on_gpu(torch.ones(2049, 1, dtype=dtype)), on_gpu(torch.ones(2049, 3, dtype=dtype))
    with SimulatedGpu(), monkeypatch.context() as patch:
        patch.setattr(
            torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(major=major, minor=0)
        )
        found = products.gradient_of_factor(grad, x, torch.float32)
    assert found.dtype is torch.float32
    assert torch.equal(to_cpu(found), torch.full((1, 3), 2049.0 if is_wide else 2048.0))
