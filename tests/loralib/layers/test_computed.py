"""Tests of what LoRA layers compute, for every kind of layer."""

import pytest
import torch
from covering import covering
from layer_cases import (
    ALPHA,
    CASES,
    LINEAR,
    TERMS,
    WITH_DROPOUT,
    R,
    base_of,
    built,
    close,
    gradients,
    randomised,
    reference,
    run_plain,
    same_as_plain,
    trainable,
)

import loralib as lora

# ---- What is computed ----


def test_a_new_layer_computes_what_the_plain_layer_does(case):
    layer, x = case.make(r=R, lora_alpha=ALPHA), case.x()
    expected = run_plain(layer, x, base_of(layer).weight)
    assert torch.equal(layer(x), expected)
    assert layer.lora_A.any() != layer.lora_B.any()


@pytest.mark.parametrize("grad", [True, False])
def test_both_modes_compute_the_update(case, grad):
    layer, x = built(case), case.x()
    with torch.set_grad_enabled(grad):
        assert not layer.merged
        close(layer(x), reference(layer, x))
        assert layer.eval() is layer
        assert layer.merged
        close(layer(x), reference(layer, x))
        layer.train()
        assert not layer.merged
        close(layer(x), reference(layer, x))


def test_without_merge_weights_evaluation_does_not_merge(case):
    layer, x = built(case, merge_weights=False).eval(), case.x()
    assert not layer.merged
    with torch.no_grad():
        close(layer(x), reference(layer, x))
    assert layer._merged_copy is None


@pytest.mark.parametrize("mode", [True, False])
def test_gradients_reach_the_update_and_not_the_frozen_weight(case, mode):
    layer, x = built(case).train(mode), case.x()
    if x.is_floating_point():
        x.requires_grad = True
    with torch.no_grad():
        layer(x)  # makes a merged copy, which has no gradient
    actual = gradients(layer, layer(x))
    expected = gradients(layer, reference(layer, x))
    if isinstance(layer, lora.Embedding):
        expected["lora_A"][:, layer.padding_idx] = 0  # the padding row is not trained
    assert {"lora_A", "lora_B"} <= actual.keys()
    assert not any(name.endswith("weight") for name in actual)
    close(actual, expected)


@pytest.mark.parametrize("mode", [True, False])
def test_a_weight_that_is_trained_too_gets_its_gradient(case, mode):
    layer, x = built(case).train(mode), case.x()
    base_of(layer).weight.requires_grad = True
    actual = gradients(layer, layer(x))
    expected = gradients(layer, reference(layer, x))
    if isinstance(layer, lora.Embedding):
        expected["lora_A"][:, layer.padding_idx] = 0
        expected["weight"][layer.padding_idx] = 0
    close(actual, expected)


def test_a_frozen_layer_passes_gradients_on(case):
    layer, x = built(case).requires_grad_(False), case.x()
    if not x.is_floating_point():
        pytest.skip("row numbers have no gradient")
    x.requires_grad = True
    (expected,) = torch.autograd.grad(reference(layer, x).pow(2).sum(), x)
    for mode in (True, False):
        (actual,) = torch.autograd.grad(layer.train(mode)(x).pow(2).sum(), x)
        close(actual, expected, 2 * TERMS)


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("name", ["linear-fan-in-fan-out", "merged-qv"])
def test_handwritten_gradients_are_right_to_second_order(name, p):
    layer = built(CASES[name], lora_dropout=p, dtype=torch.float64).requires_grad_(True)
    x = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def function(x, *parameters):
        torch.manual_seed(0)
        named = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(layer, named, x)

    assert torch.autograd.gradcheck(function, (x, *parameters))
    assert torch.autograd.gradgradcheck(function, (x, *parameters), fast_mode=True)


@pytest.mark.parametrize("rank", [0, R])
@pytest.mark.parametrize("name", ["linear", "merged-fan-in-fan-out"])
def test_gradients_of_complex_numbers_are_right(name, rank):
    layer = randomised(CASES[name].make(r=rank, dtype=torch.complex128))
    layer.weight.requires_grad = False
    names, parameters = zip(*trainable(layer).items(), strict=True)
    x = torch.randn(2, 6, dtype=torch.complex128, requires_grad=True)

    def function(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), x)

    assert torch.autograd.gradcheck(function, (x, *parameters))


def test_rank_0_is_the_plain_layer(case):
    layer, plain, x = case.make(r=0), case.plain(), case.x()
    names = [name.removeprefix("conv.") for name in layer.state_dict()]
    assert names == list(plain.state_dict())
    assert trainable(layer).keys() == dict(layer.named_parameters()).keys()
    weight = base_of(layer).weight.detach()
    state = base_of(layer).state_dict()
    state["weight"] = weight.t() if getattr(layer, "fan_in_fan_out", False) else weight
    plain.load_state_dict(state)
    for mode in (True, False):
        same_as_plain(layer, layer.train(mode)(x), plain(x))


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_dropout_acts_on_the_updates_input_only(name):
    layer, x = built(CASES[name], lora_dropout=1.0), CASES[name].x()
    close(layer(x), run_plain(layer, x, base_of(layer).weight))  # the update's input is all zero
    layer.eval()
    close(layer(x), reference(layer, x))


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_dropout_keeps_the_mean(name):
    layer, x = built(CASES[name], lora_dropout=0.5), CASES[name].x()[:1]
    with torch.no_grad():
        outs = torch.stack([layer(x) for _ in range(500)])
        error = outs.std(dim=0) / len(outs) ** 0.5
        assert ((outs.mean(dim=0) - reference(layer, x)).abs() < 5 * error + 1e-4).all()


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_dropout_may_stay_on_in_evaluation_mode(name):
    layer, x = built(CASES[name], lora_dropout=1.0).eval(), CASES[name].x()
    with torch.no_grad():
        close(layer(x), reference(layer, x))
        layer.lora_dropout.train()  # as Monte Carlo dropout does
        close(layer(x), run_plain(layer, x, base_of(layer).weight))
        close(layer.eval()(x), reference(layer, x))


# ---- torch.compile ----


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "grad"), [(True, True), (False, False)])
@pytest.mark.parametrize("name", ["linear", "merged-qv", "embedding", "conv2d", "conv3d"])
def test_a_layer_compiles_to_one_graph(name, mode, grad):
    torch.compiler.reset()
    layer, x = built(CASES[name]).train(mode), CASES[name].x()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.set_grad_enabled(grad):
        out = compiled(x)
        close(out, reference(layer, x))
    if grad:
        close(gradients(layer, out), gradients(layer, layer(x)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "merged-qv", "conv2d"])
def test_a_layer_with_dropout_compiles_under_autocast(name):
    torch.compiler.reset()
    layer, x = built(CASES[name], lora_dropout=0.5), CASES[name].x()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = compiled(x)
        assert not torch.equal(out, compiled(x))
    assert {grad.dtype for grad in gradients(layer, out).values()} == {torch.float32}


# ---- torch.export ----


@pytest.mark.parametrize(
    ("name", "variant", "strict"),
    covering(["linear", "merged-qv"], ["lora", "dora"], [True, False]),
)
def test_an_exported_layer_trains(name, variant, strict):
    if strict and torch.__version__ < (2, 10):
        pytest.skip("PyTorch 2.9 refuses it, with an error of its own")
    layer, x = built(CASES[name], variant=variant), CASES[name].x()
    exported = torch.export.export(layer, (x,), strict=strict).module()
    out = exported(x)
    close(out, layer(x))
    found = gradients(exported, out)
    close({each: found[each] for each in trainable(layer)}, gradients(layer, layer(x)))


# ---- Shapes ----


@pytest.mark.parametrize("shape", [(6,), (1, 6), (0, 6), (2, 3, 4, 6)])
@pytest.mark.parametrize("name", LINEAR)
def test_linear_layers_take_inputs_of_any_shape(name, shape):
    layer, x = built(CASES[name]), torch.randn(shape)
    assert layer(x).shape == (*shape[:-1], 12)
    close(layer(x), reference(layer, x))
    x = torch.randn(6, 4, 3).permute(2, 1, 0)
    close(layer(x), reference(layer, x))


@pytest.mark.parametrize("name", CASES)
def test_no_output_is_a_view_so_that_it_can_be_changed_under_fsdp2(name):
    """PyTorch's are none, except those of linear layers that have a bias and get no matrix."""
    assert not built(CASES[name])(CASES[name].x())._is_view()


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("name", LINEAR)
def test_an_input_of_another_size_is_refused(name, mode):
    layer = built(CASES[name]).train(mode)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(torch.randn(6, 2))  # a wrong size, although the number of values would fit


# ---- What is refused ----


@pytest.mark.parametrize("rank", [0, R])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_integers_are_refused_as_by_the_plain_layer(name, training, rank):
    layer, x = CASES[name].make(r=rank).train(training).requires_grad_(False), CASES[name].x()
    for dtype in (torch.int64, torch.uint8, torch.bool):
        with pytest.raises((TypeError, RuntimeError)):
            CASES[name].plain()(x.to(dtype))
        if rank or "conv" not in name:  # with rank 0, a convolution is PyTorch's own
            with pytest.raises(TypeError, match=r"received torch[.].* input: convert it"):
                layer(x.to(dtype))


@pytest.mark.parametrize("training", [True, False])
def test_an_adapted_convolution_refuses_integers(training):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3))
    lora.add_lora(model, "0", r=2)
    model.train(training)
    with torch.no_grad(), pytest.raises(TypeError, match=r"received torch[.]uint8 input: convert"):
        model(torch.ones(1, 3, 5, 5, dtype=torch.uint8))
