"""Tests of creating LoRA layers: arguments, initial values, and the memory of a step."""

import inspect

import numpy
import pytest
import torch
from half_products import choose_processor
from layer_cases import (
    ALPHA,
    CASES,
    WITH_DROPOUT,
    R,
    base_of,
    built,
    close,
    gradients,
    randomised,
    reference,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import loralib as lora

# ---- Construction ----


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_all_parameters_have_the_given_device_and_dtype(case, device):
    layer = case.make(r=R, device=device, dtype=torch.float64)
    found = {(p.device.type, p.dtype) for p in layer.parameters()}
    assert found == {(device, torch.float64)}


@pytest.mark.parametrize(
    ("layer", "shown"),
    [
        (lora.Linear(4, 5, r=2, lora_alpha=3), "out_features=5, bias=True, r=2, lora_alpha=3"),
        (lora.Linear(4, 5, r=2, variant="dora"), "bias=True, r=2, lora_alpha=1, dora"),
        (lora.Linear(4, 5), "in_features=4, out_features=5, bias=True"),
        (lora.Embedding(4, 5, r=1, lora_alpha=0.5), "4, 5, r=1, lora_alpha=0.5"),
        (lora.Conv2d(3, 4, 3, r=2), "r=2, lora_alpha=1"),
        (
            lora.MergedLinear(4, 6, r=2, enable_lora=[True, False, True]),
            "bias=True, r=2, lora_alpha=1, enable_lora=[True, False, True]",
        ),
        (lora.MergedLinear(4, 6), "in_features=4, out_features=6, bias=True"),
    ],
)
def test_repr_shows_the_settings_of_lora(layer, shown):
    lines = repr(layer).removesuffix(")").splitlines()  # one line, or several with children
    assert lines[len(lines) > 1].endswith(shown)


@pytest.mark.parametrize("name", ["Conv1d", "Conv2d", "Conv3d"])
def test_convolutions_have_the_signature_of_their_base_class(name):
    kind = getattr(lora, name)
    base = inspect.signature(lora.ConvLoRA).parameters.values()
    # Positional parameters are repeated for editors and the reference, keyword-only ones are not.
    expected = [p for p in base if p.kind is not p.KEYWORD_ONLY and p.name != "conv_module"]
    assert list(inspect.signature(kind).parameters.values()) == expected
    layer = kind(4, 6, 3, 2, 5, 0.25, False, initialization="orthogonal", stride=2)
    assert type(layer.conv) is getattr(nn, name)
    assert (layer.r, layer.lora_alpha, layer.lora_dropout.p) == (2, 5, 0.25)
    assert (layer.merge_weights, layer.initialization) == (False, "orthogonal")
    assert set(layer.conv.stride) == {2}


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_other_keywords_are_those_of_the_plain_layer(name):
    layer = built(CASES[name], bias=False)
    assert base_of(layer).bias is None
    x = CASES[name].x()
    close(layer(x), reference(layer, x))
    close(lora.merge(layer)(x), reference(layer, x))


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize(
    ("make", "fan_in"),
    [
        (lambda: lora.Linear(100, 300, r=50), 100),
        (lambda: lora.Linear(100, 300, r=50, fan_in_fan_out=True), 100),
        (lambda: lora.MergedLinear(100, 300, r=30, enable_lora=[True, False, True]), 100),
        (lambda: lora.Conv2d(20, 40, 3, r=20), 180),
    ],
)
def test_initial_values_have_the_right_distributions(make, fan_in, reset):
    layer = make()
    shape = base_of(layer).weight.shape
    if reset:
        randomised(layer).reset_parameters()
        assert base_of(layer).weight.shape == shape
    # Kaiming uniform with a = √5 is U(-1/√fan_in, 1/√fan_in).
    for tensor, fan in ((base_of(layer).weight, fan_in), (layer.lora_A, layer.lora_A.shape[1])):
        bound = fan**-0.5
        assert 0.99 * bound < tensor.abs().max() <= bound
        assert tensor.std().item() == pytest.approx(bound / 3**0.5, rel=0.03)
        assert abs(tensor.mean()) < 0.05 * bound
    assert not layer.lora_B.any()


@pytest.mark.parametrize("reset", [False, True])
def test_initial_values_of_an_embedding_have_the_right_distributions(reset):
    layer = lora.Embedding(200, 100, r=50, padding_idx=3)
    if reset:
        randomised(layer).reset_parameters()
    for tensor in (layer.weight[4:], layer.lora_B):
        assert tensor.std().item() == pytest.approx(1.0, rel=0.03)
        assert abs(tensor.mean()) < 0.05
    assert not layer.lora_A.any()
    assert not layer.weight[3].any()


def test_an_embedding_keeps_a_given_weight():
    weight = torch.randn(9, 4)
    assert torch.equal(lora.Embedding(9, 4, r=R, _weight=weight).weight, weight)
    assert torch.equal(lora.Embedding.from_pretrained(weight).weight, weight)


def test_gradients_of_an_embedding_may_be_sparse_or_scaled():
    ids = torch.tensor([[2, 2, 5]])
    layer = randomised(lora.Embedding(9, 4, r=R, lora_alpha=ALPHA, scale_grad_by_freq=True))
    scaled = gradients(layer, layer(ids))["lora_A"]
    layer.scale_grad_by_freq, layer.sparse = False, True
    close(gradients(layer, layer(ids))["lora_A"][:, 2], 2 * scaled[:, 2])
    layer.weight.requires_grad = True
    assert gradients(layer, layer(ids))["weight"].is_sparse


@pytest.mark.parametrize(
    ("kind", "args", "kwargs", "message"),
    [
        ("Linear", (4, 6), {"r": -1}, "got -1"),
        ("Linear", (4, 6), {"r": 1.5}, "got 1.5"),
        ("Linear", (4, 6), {"r": "8"}, "got '8'"),
        ("Linear", (4, 6), {"r": True}, "got True"),
        (
            "Linear",
            (4, 6),
            {"r": 1, "lora_dropout": 1.5},
            "lora_dropout .* 0 and 1, got 1.5",
        ),
        (
            "Linear",
            (4, 6),
            {"r": 1, "lora_dropout": -0.1},
            "lora_dropout .* 0 and 1, got -0.1",
        ),
        ("Linear", (4, 6), {"r": 1, "lora_dropout": "0.1"}, "lora_dropout .* got '0.1'"),
        ("Linear", (4, 6), {"r": 1, "lora_alpha": "16"}, "lora_alpha .* a finite number, got '16'"),
        ("Linear", (4, 6), {"r": 1, "lora_alpha": float("nan")}, "lora_alpha .* number, got nan"),
        ("Linear", (4, 6), {"r": 1, "lora_alpha": None}, "lora_alpha .* finite number, got None"),
        ("Linear", (4, 6), {"r": 1, "lora_alpha": torch.ones(2)}, "lora_alpha .* got tensor"),
        ("Linear", (4, 6), {"lora_alpha": torch.ones((), device="meta"), "r": 1}, "got tensor"),
        ("Linear", (4, 6), {"r": 1, "lora_dropout": True}, "lora_dropout .* 0 and 1, got True"),
        ("Linear", (4, 6), {"r": 1, "lora_dropout": numpy.ones(2)}, "lora_dropout .* got array"),
        (
            "Linear",
            (4, 6),
            {"r": 1, "freeze_A": "no"},
            "freeze_A .* True or False, got 'no'",
        ),
        ("Linear", (4, 6), {"merge_weights": torch.ones(2)}, "merge_weights .* False, got tensor"),
        ("Linear", (4, 6), {"merge_weights": ""}, "merge_weights has to be True or False, got ''"),
        ("Linear", (4, 6), {"fan_in_fan_out": "no"}, "fan_in_fan_out has to be True or False"),
        ("Linear", (4, 6), {"variant": ["dora"]}, "unknown variant"),
        ("Embedding", (4, 6), {"r": -2}, "got -2"),
        ("Embedding", (4, 6), {"r": 1, "max_norm": 2.0}, "max_norm=2.0"),
        ("MergedLinear", (4, 6), {"r": -3, "enable_lora": [True]}, "got -3"),
        ("MergedLinear", (4, 6), {"r": 1}, r"no slice for r=1, got \(False,\)"),
        ("MergedLinear", (4, 6), {"r": 1, "enable_lora": [False, False]}, "no slice for r=1"),
        ("MergedLinear", (4, 6), {"enable_lora": [True] * 4}, "out_features=6 .* got 4"),
        ("MergedLinear", (4, 6), {"enable_lora": []}, "out_features=6 .* got 0"),
        ("MergedLinear", (4, 6), {"enable_lora": True}, "enable_lora has to be a list .* got True"),
        ("MergedLinear", (4, 6), {"enable_lora": "ab"}, "enable_lora has to be a list .* got 'ab'"),
        ("MergedLinear", (4, 6), {"enable_lora": [2, "no"]}, "each of enable_lora .* False, got 2"),
        ("MergedLinear", (4, 6), {"enable_lora": {0, 1}}, r"enable_lora .* a list .* got \{0, 1\}"),
        ("MergedLinear", (4, 6), {"enable_lora": torch.tensor(True)}, "a list .* got tensor"),
        (
            "MergedLinear",
            (4, 6),
            {"enable_lora": numpy.ones((1, 2))},
            "each of .* False, got array",
        ),
        ("Conv1d", (4, 6, 3), {"r": -1}, "got -1"),
        ("Conv2d", (4, 6, (3, 3)), {"r": 1}, r"kernel_size must be an integer, got \(3, 3\)"),
        ("Conv3d", (4, 6, 3), {"r": 1, "lora_dropout": 2}, "got 2"),
    ],
)
def test_invalid_arguments_are_errors_of_one_line(kind, args, kwargs, message):
    with pytest.raises(ValueError, match=message) as error:
        getattr(lora, kind)(*args, **kwargs)
    assert "\n" not in str(error.value)


def test_numpys_numbers_and_integers_as_flags_are_accepted(tmp_path):
    flags = {"fan_in_fan_out": 1, "merge_weights": numpy.bool_(False), "freeze_A": 0}
    numbers = {"r": numpy.int64(2), "lora_alpha": numpy.float32(0.5), "lora_dropout": numpy.int8(0)}
    layer = lora.Linear(4, 6, **numbers, **flags)
    given = layer.r, layer.lora_alpha, layer.scaling, layer.fan_in_fan_out, layer.merge_weights
    assert given == (2, 0.5, 0.25, True, False)
    assert {type(each) for each in given} == {int, float, bool}
    model = torch.nn.Sequential(layer)
    layer.lora_alpha = numpy.float32(0.5)  # after construction, unconverted
    lora.save_adapter(model, tmp_path / "a.safetensors")
    lora.save_adapter(model, tmp_path / "folder")
    for name in ("a.safetensors", "folder"):
        assert lora.read_adapter(tmp_path / name).lora.alpha == 0.5
    path = tmp_path / "a.safetensors"
    assert lora.read_adapter(path, lora_alpha=numpy.float32(0.5)).lora.alpha == 0.5
    with pytest.raises(ValueError, match=r"lora_alpha has to be a number above 0, got '0\.5'"):
        lora.read_adapter(path, lora_alpha="0.5")


def test_arrays_and_tensors_of_one_number_are_accepted():
    for one in (numpy.array, torch.tensor):
        layer = lora.Linear(4, 6, r=one(2), lora_alpha=one(3.0), lora_dropout=one(0.5))
        assert (layer.r, layer.lora_alpha, layer.scaling) == (2, 3.0, 1.5)
        assert {type(layer.r), type(layer.lora_alpha), type(layer.lora_dropout.p)} == {int, float}
        assert lora.Linear(4, 6, r=2, merge_weights=one(False)).merge_weights is False
        model = torch.nn.Sequential(torch.nn.Linear(4, 6))
        lora.add_lora(model, "0", one(2), one(3.0), one(0.5), freeze_A=one(True))
        assert (model[0].scaling, model[0].lora_dropout.p, model[0].freeze_A) == (1.5, 0.5, True)


def test_a_layer_of_rank_0_has_nothing_to_start_from_its_weight(case):
    layer = case.make(r=0)
    expected = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    layer.start_from_weight()
    assert layer.state_dict().keys() == expected.keys()
    assert all(torch.equal(layer.state_dict()[name], expected[name]) for name in expected)


@pytest.mark.parametrize("freeze_A", [False, True])
@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_a_new_layer_trains_A_unless_it_is_frozen(name, freeze_A):
    layer = CASES[name].make(r=R, freeze_A=freeze_A)
    assert layer.lora_A.requires_grad == (not freeze_A)
    assert layer.lora_B.requires_grad
    assert not base_of(layer).weight.requires_grad


def test_none_counts_as_false_for_flags():
    layer = lora.Linear(4, 6, r=2, merge_weights=None, fan_in_fan_out=None, freeze_A=None)
    assert (layer.merge_weights, layer.fan_in_fan_out, layer.freeze_A) == (False, False, False)
    assert lora.MergedLinear(4, 6, r=2, enable_lora=[1, None]).enable_lora == [True, False]
    model = torch.nn.Sequential(torch.nn.Linear(4, 6))
    assert lora.add_lora(model, "0", r=2, freeze_A=None, untie=None) == ("0",)


@pytest.mark.parametrize("alpha", [None, float("inf"), torch.tensor(4.0)])
def test_without_lora_alpha_and_dropout_are_not_checked(alpha):
    layer = lora.Linear(4, 6, r=0, lora_alpha=alpha, lora_dropout=False)
    assert layer.scaling == 0
    x = torch.randn(3, 4)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


# ---- Memory ----


class NewTensors(TorchDispatchMode):
    """Records the sizes of new tensors, whose memory operations allocate."""

    def __init__(self):
        super().__init__()
        self.seen, self.kept, self.sizes = set(), [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen |= {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.seen:
                    self.sizes.append(storage.nbytes() // tensor.element_size())
                    self.kept.append(tensor)  # so that its address is not reused
                self.seen.add(storage.data_ptr())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make",
    [
        lambda: lora.Linear(60, 210, r=R),
        lambda: lora.Linear(60, 210, r=R, fan_in_fan_out=True),
        lambda: lora.MergedLinear(60, 210, r=R, enable_lora=[True, False, True]),
    ],
)
def test_a_step_allocates_only_its_output_its_gradient_and_small_tensors(monkeypatch, make, dtype):
    # Without these instructions, products would need copies in float32.
    choose_processor(monkeypatch, has_bfloat16=True, large=False)
    layer, rows = randomised(make()), 300
    layer.weight.data = layer.weight.data.to(dtype)
    x = torch.randn(rows, 60, dtype=dtype, requires_grad=True)
    with NewTensors() as forward:
        out = layer(x)
    weights = torch.randn_like(out)
    with NewTensors() as backward:
        torch.autograd.grad(out, [x, layer.lora_A, layer.lora_B], weights)
    small = rows * 2 * R  # A x
    assert [size for size in forward.sizes if size > small] == [rows * 210]
    assert [size for size in backward.sizes if size > small] == [rows * 60]
