"""Tests of subclasses of plain layers: they are adapted correctly, or refused."""

import abc
import copy
from functools import partial
from typing import Generic, TypeVar

import pytest
import torch
from any_models import assert_add_lora_refuses
from compare import assert_close_to_rounding
from torch import nn

import loralib as lora
from loralib.adapters.saving import adapter_of
from loralib.errors import UnsupportedLayerError

T = TypeVar("T")


class Scaled(nn.Linear):
    """A linear layer with a method that its model calls."""

    def scale_out(self, x):
        return 2 * x


class Doubles:
    """A class with a method that models call."""

    def scale_out(self, x):
        return 2 * x


class Sampling(nn.Module):
    """A module that looks some of its parameters up itself, as Pyro's do."""

    def __getattr__(self, name):
        return 2 * super().__getattr__(name)


class WithMethod(nn.Linear, Doubles):
    pass


class WithLookup(nn.Linear, Sampling):
    pass


class Typed(nn.Linear, Generic[T]):
    """A linear layer whose second base only serves a type checker."""


class Built(nn.Linear):
    """A linear layer that only differs in how it is built and shown."""

    def __init__(self, width):
        super().__init__(width, width)

    def extra_repr(self):
        return "built"


class FalconLinear(nn.Linear):
    """A linear layer whose own forward computes x Wᵀ + b, as in Hugging Face's Falcon."""

    __module__ = "transformers.models.falcon.modeling_falcon"

    def forward(self, input):
        product = input @ self.weight.T
        return product if self.bias is None else product + self.bias


class Halved(FalconLinear):
    def forward(self, input):
        return super().forward(input) / 2


class Linear(nn.Linear):
    """As in OpenAI's whisper, a linear layer that converts its weight to its input's dtype."""

    __module__ = "whisper.model"

    def forward(self, x):
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.weight.to(x.dtype), bias)


class Conv1d(nn.Conv1d):
    """The same, a convolution."""

    __module__ = "whisper.model"

    def _conv_forward(self, x, weight, bias):
        bias = None if bias is None else bias.to(x.dtype)
        return super()._conv_forward(x, weight.to(x.dtype), bias)


class BartScaledWordEmbedding(nn.Embedding):
    """An embedding that scales the rows it looks up, as in Hugging Face's BART and Gemma."""

    __module__ = "transformers.models.bart.modeling_bart"

    def __init__(self, *sizes, scale=3, **settings):
        super().__init__(*sizes, **settings)
        self.register_buffer("embed_scale", torch.tensor(scale), persistent=False)

    def forward(self, input):
        return super().forward(input) * self.embed_scale.to(self.weight.dtype)


class OneOfAnotherPackage(BartScaledWordEmbedding):
    """A subclass that the library does not know, and that may do more than scale."""


class UnitRows(nn.Embedding):
    def forward(self, input):
        return nn.functional.normalize(super().forward(input), dim=-1)


class GemmaScaledWordEmbedding(BartScaledWordEmbedding):
    """One with a separate parameter for one token's row, as in T5Gemma 2."""

    __module__ = "transformers.models.t5gemma2.modeling_t5gemma2"

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.eoi_embedding = nn.Parameter(torch.zeros(sizes[1]))


def test_a_subclass_with_methods_of_its_own_is_refused():
    model = nn.ModuleDict({"a": Scaled(4, 4), "b": Built(4)})
    with pytest.raises(TypeError, match=r"a is a .*Scaled, which has no LoRA layer: leave"):
        lora.add_lora(model, "a", r=2)
    assert lora.add_lora(model, "b", r=2) == ("b",)


@pytest.mark.parametrize("kind", [WithMethod, WithLookup])
def test_what_a_subclass_has_from_a_later_base_is_not_lost(kind):
    model = nn.ModuleDict({"a": kind(4, 4), "b": Typed(4, 4)})
    with pytest.raises(TypeError, match=rf"a is a .*{kind.__name__}, which has no LoRA layer: "):
        lora.add_lora(model, "a", r=2)
    assert type(model["a"]) is kind
    assert lora.add_lora(model, "b", r=2) == ("b",)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_falcon_s_linear_layer_is_adapted_and_restored(bias, device):
    layer = FalconLinear(4, 6, bias=bias, device=device)
    before, model = {*vars(layer)}, nn.Sequential(layer)
    assert lora.add_lora(model, "0", r=2) == ("0",)
    lora.remove_lora(model)
    assert type(layer) is FalconLinear
    assert {*vars(layer)} == before


def test_falcon_s_linear_layer_computes_with_its_update():
    layer, x = FalconLinear(4, 6), torch.randn(3, 5, 4)
    lora.add_lora(nn.Sequential(layer), "0", r=2)
    nn.init.normal_(layer.lora_B)
    weight = layer.weight + layer.scaling * layer.lora_B @ layer.lora_A
    expected = nn.functional.linear(x, weight, layer.bias)
    torch.testing.assert_close(layer(x), expected)
    merged = lora.merge(nn.Sequential(layer))
    assert type(merged[0]) is FalconLinear
    torch.testing.assert_close(merged(x), expected)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16,) * 2])
@pytest.mark.parametrize("layer", [partial(Linear, 4, 6), partial(Conv1d, 4, 6, 3, padding=1)])
def test_whisper_s_layers_that_convert_their_weights(tmp_path, layer, dtypes, bias):
    weights, inputs = dtypes
    model = nn.Sequential(layer(bias=bias)).to(weights)
    plain, x = copy.deepcopy(model), torch.randn(3, 4, 4, dtype=inputs)
    kind, expected = type(model[0]), model(x)
    close = partial(assert_close_to_rounding, terms=16, dtype=inputs, magnitude=4.0)
    lora.add_lora(model, "0", r=2)
    close(model(x).float(), expected.float())
    nn.init.normal_(model[0].lora_B)
    output = model(x)
    merged = lora.merge(copy.deepcopy(model))
    assert type(merged[0]) is kind
    close(output.float(), merged(x).float())
    lora.save_adapter(model, tmp_path / "a.safetensors")
    bank = lora.AdapterBank(plain)
    bank.add("a", lora.read_adapter(tmp_path / "a.safetensors"))
    with torch.no_grad(), bank.use("a"):
        close(plain(x).float(), output.detach().float())
    lora.remove_lora(model)
    assert type(model[0]) is kind
    assert torch.equal(model(x), expected)


def test_a_subclass_with_a_forward_of_its_own_is_refused():
    """What its forward computes is unknown."""
    layer = Halved(4, 6)
    with pytest.raises(UnsupportedLayerError, match=r"0 is a .*Halved, which has no"):
        lora.add_lora(nn.Sequential(layer), "0", r=2)
    assert type(layer) is Halved


class AbstractFirst(abc.ABC, nn.Linear):
    pass


class AbstractLast(nn.Linear, abc.ABC):
    pass


class AbstractAttention(abc.ABC, nn.MultiheadAttention):
    pass


@pytest.mark.parametrize(
    ("layer", "target", "refused"),
    [
        (AbstractFirst(4, 4), "a", "^a is a .*AbstractFirst, which cannot become"),
        (AbstractAttention(4, 1), "out_proj", "^the module around a.out_proj is a .*, which can"),
    ],
)
def test_a_class_that_python_does_not_let_change_is_refused(layer, target, refused):
    model = nn.ModuleDict({"b": AbstractLast(4, 4), "a": layer})
    before = [{*vars(module)} for module in model.modules()]
    with pytest.raises(UnsupportedLayerError, match=rf"{refused}.*: define the class without "):
        lora.add_lora(model, ["b", target], r=2)
    assert [{*vars(module)} for module in model.modules()] == before
    assert lora.add_lora(model, "b", r=2) == ("b",)


closed: list[nn.Module] = []


class Closing(nn.Linear):
    """Releases something when it is freed."""

    def __del__(self):
        closed.append(self)


def test_adapting_a_layer_runs_no_destructor_of_its_class():
    model = nn.Sequential(Closing(4, 4))
    lora.add_lora(model, "0", r=2)
    assert not closed


@pytest.mark.parametrize("variant", ["lora", "dora"])
@pytest.mark.parametrize("padding", [None, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_embedding_that_scales_its_rows_is_adapted(tmp_path, variant, padding, dtype):
    embedding, numbers = (
        BartScaledWordEmbedding(7, 4, padding_idx=padding),
        torch.tensor([[1, 6, 1], [0, 2, 5]]),
    )
    nn.init.normal_(embedding.weight)
    model = nn.Sequential(embedding.to(dtype))
    plain, expected = copy.deepcopy(model), model(numbers)
    lora.add_lora(model, "0", r=2, variant=variant)
    assert torch.equal(model(numbers), expected) or variant == "dora"
    nn.init.normal_(embedding.lora_A)
    rows = lora.merge(copy.deepcopy(model))(numbers)
    output = model(numbers)
    output.sum().backward()
    assert embedding.lora_A.grad.any(dim=0).tolist() == [
        number in numbers and number != padding for number in range(7)
    ]
    close = partial(assert_close_to_rounding, terms=8, dtype=dtype, magnitude=20.0)
    close(output.float(), rows.float())
    with torch.no_grad():
        close(model.eval()(numbers).float(), rows.float())
    for name in ("a", "a.safetensors"):
        lora.save_adapter(model, tmp_path / name)
        again = copy.deepcopy(plain)
        lora.load_adapter(again, tmp_path / name)
        assert torch.equal(again(numbers), output)
        assert torch.equal(copy.deepcopy(again)(numbers), output)
    lora.remove_lora(model)
    assert type(embedding) is BartScaledWordEmbedding
    assert torch.equal(model(numbers), expected)


def test_an_embedding_that_scales_its_rows_is_compiled():
    model, numbers = nn.Sequential(BartScaledWordEmbedding(7, 4)), torch.tensor([[1, 6, 1]])
    lora.add_lora(model, "0", r=2)
    nn.init.normal_(model[0].lora_A)
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(numbers), model(numbers))


@pytest.mark.parametrize("variant", ["lora", "dora"])
@torch.no_grad()
def test_an_embedding_that_scales_its_rows_is_served(variant):
    base = nn.Sequential(BartScaledWordEmbedding(7, 4), nn.Linear(4, 2)).eval()
    bank, models, numbers = lora.AdapterBank(base), [], torch.tensor([[1, 6, 1], [0, 2, 5]])
    for name in "ab":
        models.append(copy.deepcopy(base))
        lora.add_lora(models[-1], ["0", "1"], r=2, variant=variant)
        for layer in models[-1]:
            nn.init.normal_(layer.lora_A)
            nn.init.normal_(layer.lora_B)
        bank.add(name, adapter_of(models[-1]))
    expected = [model.eval()(numbers) for model in models]
    close = partial(assert_close_to_rounding, terms=16, magnitude=100.0)
    with bank.use("a"):
        close(base(numbers), expected[0])
        close(base(numbers[0, 0]), expected[0][0, 0])
    with bank.use(["a", "b"]):
        close(base(numbers), torch.stack([expected[0][0], expected[1][1]]))
        with pytest.raises(
            ValueError, match=r"a layer received \(1, 1\): give one adapter per row"
        ):
            base(numbers[0, 0])


@pytest.mark.parametrize("kind", [OneOfAnotherPackage, UnitRows, GemmaScaledWordEmbedding])
def test_an_embedding_that_computes_something_else_is_refused(kind):
    with pytest.raises(UnsupportedLayerError, match=rf"0 is a .*{kind.__name__}, which has no"):
        lora.add_lora(nn.Sequential(kind(7, 4)), "0", r=2)


def test_an_embedding_that_scales_its_rows_is_adapted_on_the_meta_device():
    model = nn.Sequential(BartScaledWordEmbedding(7, 4).to("meta"))
    assert lora.add_lora(model, "0", r=2) == ("0",)


class Called(nn.Linear):
    def __call__(self, input):
        return 2 * super().__call__(input)


class Computed(nn.Linear):
    def __getattr__(self, name):
        return super().__getattr__("weight") * 2 if name == "doubled" else super().__getattr__(name)


class Shown(nn.Linear):
    """A linear layer that computes nothing else, and only differs in how it is shown."""

    __slots__ = ()
    note: int

    def __init__(self, *args):
        super().__init__(*args)

    def __repr__(self):
        return "Shown()"


@pytest.mark.parametrize("kind", [Called, Computed])
def test_a_subclass_with_its_own_call_or_getattr_is_refused(kind):
    with pytest.raises(UnsupportedLayerError, match=f"0 is a .*{kind.__name__}, which has no LoRA"):
        lora.add_lora(nn.Sequential(kind(6, 4)), "0", r=2)


def test_a_subclass_with_only_its_own_repr_is_adapted():
    assert lora.add_lora(nn.Sequential(Shown(6, 4)), "0", r=2) == ("0",)


class Tripled(nn.MultiheadAttention):
    """An attention with a forward of its own."""

    def forward(self, *args, **kwargs):
        out, weights = super().forward(*args, **kwargs)
        return 3 * out, weights


class Norming(nn.MultiheadAttention):
    """An attention with a method of its own, which the model may call."""

    def norm(self):
        return self.out_proj.weight.norm()


@pytest.mark.parametrize("kind", [Tripled, Norming])
def test_out_proj_of_an_attention_with_methods_of_its_own_is_refused(kind):
    model = nn.Sequential(kind(8, 2))
    message = rf"0\.out_proj belongs to a {kind.__name__}, which computes with its weight"
    assert_add_lora_refuses(model, message, "out_proj", r=2, kind=UnsupportedLayerError)


class BatchFirst(nn.MultiheadAttention):
    """An attention that only differs in how it is built."""

    def __init__(self, size):
        super().__init__(size, 2, batch_first=True)


def test_an_attention_with_only_its_own_constructor_is_adapted():
    model = nn.Sequential(BatchFirst(8))
    x = torch.rand(2, 3, 8)
    before = model[0](x, x, x)[0]
    lora.add_lora(model, "out_proj", r=2)
    torch.testing.assert_close(model[0](x, x, x)[0], before)
    lora.remove_lora(model)
    assert type(model[0]) is BatchFirst


class Raw(nn.Module):
    """A module with a parameter of its own, but without layers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))


@pytest.mark.parametrize("target", ["all-linear", "weight"])
@pytest.mark.parametrize(
    ("layer", "is_supported"),
    [
        (nn.Linear(4, 4), True),
        (nn.Embedding(4, 4), True),
        (nn.Conv2d(4, 4, 3), True),
        (Scaled(4, 4), False),
        (Raw(), False),
        (nn.LSTM(4, 4), False),
        (nn.Sequential(), False),
    ],
)
def test_the_error_for_a_layer_alone_suggests_a_model_if_that_helps(layer, target, is_supported):
    layer, kind = copy.deepcopy(layer), type(layer).__name__
    alone = f"^{kind} is itself a layer, .* name it there, as '0'$"
    message = alone if is_supported else f"^{kind} contains no layers that LoRA could adapt$"
    with pytest.raises(ValueError, match=message):
        lora.add_lora(layer, target, r=2)
    if is_supported:
        assert lora.add_lora(nn.Sequential(layer), "0", r=2) == ("0",)


class LooksParametrized(nn.Linear):
    """It has a child of the name that PyTorch's parametrizations have."""

    def __init__(self):
        super().__init__(4, 4)
        self.parametrizations = nn.ModuleDict({"weight": nn.Identity()})


def test_a_class_may_have_a_child_that_is_called_parametrizations():
    model = nn.Sequential(LooksParametrized())
    lora.add_lora(model, "0", r=2)
    assert isinstance(model[0], lora.Linear)
    lora.remove_lora(model)
    assert type(model[0]) is LooksParametrized
