"""Tests of DoRA against its formula in float64: outputs, gradients, merging, initialization."""

import pytest
import torch
import torch.nn.functional as F
from any_models import Conv1D
from torch._subclasses.fake_tensor import FakeTensorMode

import loralib as lora
from loralib.functional import DoraDelta, merge

INPUTS, WIDTH, RANK, SCALING = 6, 5, 2, 1.5
# The first rows of the adapted slices, and the number of all outputs.
SHAPES = {"the output": ((0,), 5), "first and last of three": ((0, 10), 15), "last": ((5,), 10)}


def make(shape):
    starts, outputs = SHAPES[shape]
    rows = WIDTH * len(starts)
    A, B = torch.randn(RANK * len(starts), INPUTS).double(), torch.randn(rows, RANK).double()
    magnitude = torch.rand(rows).double() + 0.5
    return DoraDelta(A, B, SCALING, starts, outputs, magnitude)


def by_formula(delta, weight):
    """Returns s · B A as (out, in), and g by equation 5, its norm a constant as in section 4.3."""
    blocks = [slice(start, start + WIDTH) for start in delta.starts]
    dense = torch.zeros_like(weight)
    for block, A, B in zip(blocks, delta.A.split(RANK), delta.B.split(WIDTH), strict=True):
        dense = dense.index_put((torch.arange(block.start, block.stop),), SCALING * B @ A)
    norms = (weight + dense).detach().norm(dim=1)
    gain = torch.ones_like(norms)
    for block, own in zip(blocks, delta.magnitude.split(WIDTH), strict=True):
        gain = gain.index_put((torch.arange(block.start, block.stop),), own / norms[block])
    return dense, gain


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_linear_layer_and_its_gradients(shape, with_bias, dropped):
    delta = make(shape)
    outputs = delta.out_features
    x, weight = torch.randn(7, INPUTS).double(), torch.randn(outputs, INPUTS).double()
    bias = torch.randn(outputs).double() if with_bias else None
    mask = (torch.rand(7, INPUTS) < 0.5).double() * 2 if dropped else torch.ones(7, INPUTS).double()
    leaves = [t.requires_grad_() for t in (x, delta.A, delta.B, delta.magnitude)]

    dense, gain = by_formula(delta, weight)
    expected = gain * (F.linear(x, weight) + F.linear(x * mask, dense))
    expected = expected if bias is None else expected + bias
    out = delta.linear(x, x * mask if dropped else None, weight, bias)
    torch.testing.assert_close(out, expected)

    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, grad)
    for ours, theirs in zip(found, torch.autograd.grad(expected, leaves, grad), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("is_gain_known", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_adding_to_an_output_and_merging_into_a_weight(shape, is_gain_known):
    delta = make(shape)
    weight = torch.randn(delta.out_features, INPUTS).double()
    x, bias = torch.randn(7, INPUTS).double(), torch.randn(delta.out_features).double()
    dense, gain = by_formula(delta, weight)
    adapted = gain[:, None] * (weight + dense)
    if is_gain_known:
        delta = delta.with_gain(weight)
        weight_given = torch.full_like(weight, float("nan"))  # not read again
    else:
        weight_given = weight
    out = F.linear(x, weight, bias)
    delta.add_to(out, x, weight_given, bias)
    torch.testing.assert_close(out, F.linear(x, adapted, bias))
    torch.testing.assert_close(merge(weight, delta, lambda matrix: matrix), adapted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_initial_gain_is_exactly_one(dtype):
    """In half precision too, because magnitudes and norms are float32."""
    layer = lora.Linear(64, 32, r=4, lora_alpha=8, variant="dora")
    layer.weight.data = layer.weight.data.to(dtype)
    layer.start_from_weight()
    delta = layer._delta(dtype)
    assert delta.magnitude.dtype is torch.float32
    assert torch.equal(delta.gain(layer.weight), torch.ones(32))
    x = torch.randn(3, 64).to(dtype)
    assert torch.equal(layer(x), F.linear(x, layer.weight) + layer.bias.to(dtype))


def test_autocast_does_not_round_the_norms():
    delta, weight = make("the output").to(torch.float32), torch.randn(5, INPUTS)
    expected = delta.gain(weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(delta.gain(weight), expected)
    assert delta.to("meta").gain(weight.to("meta")).is_meta  # a device without autocast


def test_start_from_weights_fits_the_magnitudes_to_a_weight_loaded_later():
    layer = lora.Linear(8, 6, r=2, variant="dora")
    layer.load_state_dict({"weight": 3 * layer.weight.detach()}, strict=False)
    x = torch.randn(4, 8)
    assert not torch.allclose(layer(x), F.linear(x, layer.weight, layer.bias))
    before = layer.lora_A.clone()
    lora.start_from_weights(torch.nn.Sequential(layer))
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
    assert torch.equal(layer.lora_A, before)


@pytest.mark.parametrize("build", [lora.Conv1d, lora.Conv2d, lora.Conv3d])
def test_convolutions_with_the_factors_of_0_1_2_cannot_have_dora(build):
    with pytest.raises(ValueError, match="no row for each output channel"):
        build(4, 4, 3, r=2, variant="dora")


def test_an_embedding_s_padding_row_gives_magnitudes_no_gradient():
    """The adapted weight's row at padding_idx gets none, as in an `nn.Embedding`."""
    settings = {"padding_idx": 1, "variant": "dora", "dtype": torch.float64}
    layer = lora.Embedding(7, 5, r=2, lora_alpha=3, **settings)
    with torch.no_grad():
        layer.weight[1] = 0.7
        layer.lora_A[:, 2:].normal_()
    rows = torch.tensor([[0, 1, 4], [1, 6, 1]])
    names = ("lora_A", "lora_B", "lora_magnitude_vector")
    leaves = [layer.get_parameter(name) for name in names]
    total = layer.weight.t() + layer.scaling * layer.lora_B @ layer.lora_A
    norms = total.detach().norm(dim=1, keepdim=True)
    adapted = layer.lora_magnitude_vector[:, None] * total / norms
    expected = F.embedding(rows, adapted.t(), padding_idx=1)
    out = layer.train()(rows)
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, grad)
    for ours, theirs in zip(found, torch.autograd.grad(expected, leaves, grad), strict=True):
        assert theirs.any()
        torch.testing.assert_close(ours, theirs)


def test_a_compiled_layer_whose_sizes_or_scaling_change():
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(INPUTS, WIDTH))
    lora.add_lora(model, "0", r=RANK, variant="dora")
    torch.nn.init.normal_(model[0].lora_B)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    for rows in (3, 4):
        x = torch.randn(rows, INPUTS)
        torch.testing.assert_close(compiled(x), model(x))
        model[0].scaling *= 0.5
    torch.testing.assert_close(compiled(x), model(x))


def test_rows_whose_norm_is_zero_in_float32_are_refused():
    model = torch.nn.Sequential(torch.nn.Linear(6, 9))
    with torch.no_grad():
        model[0].weight[3] = 1e-30
    with pytest.raises(ValueError, match="module 0 has rows of zeros in its weight"):
        lora.add_lora(model, "0", r=RANK, variant="dora")


@pytest.mark.parametrize("row", range(9))
def test_rows_of_zeros_are_refused_only_in_slices_that_are_adapted(row):
    model = torch.nn.Sequential(torch.nn.Linear(6, 9))
    settings = {"r": RANK, "variant": "dora", "enable_lora": {"0": [True, False, True]}}
    with torch.no_grad():
        model[0].weight[row] = 0
    if row // 3 != 1:
        with pytest.raises(ValueError, match="module 0 has rows of zeros in its weight"):
            lora.add_lora(model, "0", **settings)
        return
    x = torch.randn(4, 6)
    expected = model(x)
    lora.add_lora(model, "0", **settings)
    torch.testing.assert_close(model(x), expected)


def test_a_row_is_of_an_output_even_if_the_weight_is_held_as_in_by_out():
    model = torch.nn.Sequential(Conv1D(9, 6))
    with torch.no_grad():
        model[0].weight[3] = 0  # an input that is not used
    lora.add_lora(model, "0", r=RANK, variant="dora")
    lora.remove_lora(model)
    with torch.no_grad():
        model[0].weight[:, 3] = 0
    with pytest.raises(ValueError, match="module 0 has rows of zeros in its weight"):
        lora.add_lora(model, "0", r=RANK, variant="dora")


def test_a_model_of_fake_tensors():
    with FakeTensorMode():
        model = torch.nn.Sequential(torch.nn.Linear(6, 6))
        assert lora.add_lora(model, "0", r=RANK, variant="dora") == ("0",)
        assert model(torch.randn(4, 6)).shape == (4, 6)
