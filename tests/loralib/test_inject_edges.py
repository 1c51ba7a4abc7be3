"""add_lora where a model, an order of calls or a class is unusual: right, or refused in words."""

import copy
from functools import partial

import numpy
import pytest
import torch
from any_models import AnyModel, ids
from compare import assert_close_to_rounding
from torch import nn

import loralib as lora
from loralib.adaptation import LayerSettings
from loralib.adapters.saving import adapter_of
from loralib.errors import UnsupportedLayerError
from loralib.inject import adapt


class Scaled(nn.Linear):
    """A linear layer with a method that its model calls."""

    def scale_out(self, x):
        return 2 * x


class Built(nn.Linear):
    """A linear layer that is built in another way, and nothing else."""

    def __init__(self, width):
        super().__init__(width, width)

    def extra_repr(self):
        return "built"


class FalconLinear(nn.Linear):
    """A linear layer whose forward is spelled out, as that of upstream's Falcon is."""

    __module__ = "transformers.models.falcon.modeling_falcon"

    def forward(self, input):
        product = input @ self.weight.T
        return product if self.bias is None else product + self.bias


class Halved(FalconLinear):
    def forward(self, input):
        return super().forward(input) / 2


class BartScaledWordEmbedding(nn.Embedding):
    """An embedding that scales what it looks up, as those of upstream's BART and Gemma do."""

    __module__ = "transformers.models.bart.modeling_bart"

    def __init__(self, *sizes, scale=3, **settings):
        super().__init__(*sizes, **settings)
        self.register_buffer("embed_scale", torch.tensor(scale), persistent=False)

    def forward(self, input):
        return super().forward(input) * self.embed_scale.to(self.weight.dtype)


class OneOfAnotherPackage(BartScaledWordEmbedding):
    """Of which nobody knows that it is no more than scaled."""


class UnitRows(nn.Embedding):
    def forward(self, input):
        return nn.functional.normalize(super().forward(input), dim=-1)


class GemmaScaledWordEmbedding(BartScaledWordEmbedding):
    """One with a row of its own for one number, as T5Gemma 2 has it."""

    __module__ = "transformers.models.t5gemma2.modeling_t5gemma2"

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.eoi_embedding = nn.Parameter(torch.zeros(sizes[1]))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).mean((2, 3)))


def names_of(model):
    return [n for n, m in model.named_modules() if isinstance(m, lora.LoRALayer) and m.r > 0]


def test_a_subclass_with_methods_of_its_own_is_refused():
    model = nn.ModuleDict({"a": Scaled(4, 4), "b": Built(4)})
    with pytest.raises(TypeError, match=r"a is a .*Scaled, which has no LoRA layer: leave"):
        lora.add_lora(model, "a", r=2)
    assert lora.add_lora(model, "b", r=2) == ("b",)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_upstream_s_subclass_that_spells_the_product_out_is_adapted(bias, device):
    layer = FalconLinear(4, 6, bias=bias, device=device)
    before, model = {*vars(layer)}, nn.Sequential(layer)
    assert lora.add_lora(model, "0", r=2) == ("0",)
    lora.remove_lora(model)
    assert type(layer) is FalconLinear
    assert {*vars(layer)} == before


def test_upstream_s_subclass_that_spells_the_product_out_computes_with_its_update():
    layer, x = FalconLinear(4, 6), torch.randn(3, 5, 4)
    lora.add_lora(nn.Sequential(layer), "0", r=2)
    nn.init.normal_(layer.lora_B)
    weight = layer.weight + layer.scaling * layer.lora_B @ layer.lora_A
    expected = nn.functional.linear(x, weight, layer.bias)
    torch.testing.assert_close(layer(x), expected)
    merged = lora.merge(nn.Sequential(layer))
    assert type(merged[0]) is FalconLinear
    torch.testing.assert_close(merged(x), expected)


def test_a_subclass_with_a_forward_of_its_own_is_refused():
    """What it computes cannot be told from outside."""
    layer = Halved(4, 6)
    with pytest.raises(UnsupportedLayerError, match=r"0 is a .*Halved, which has no"):
        lora.add_lora(nn.Sequential(layer), "0", r=2)
    assert type(layer) is Halved


@pytest.mark.parametrize("variant", ["lora", "dora"])
@pytest.mark.parametrize("padding", [None, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_embedding_that_scales_its_rows(tmp_path, variant, padding, dtype):
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
        with pytest.raises(ValueError, match=r"a layer is given \(1, 1\): name one per row"):
            base(numbers[0, 0])


@pytest.mark.parametrize("kind", [OneOfAnotherPackage, UnitRows, GemmaScaledWordEmbedding])
def test_an_embedding_that_computes_something_else_is_refused(kind):
    with pytest.raises(UnsupportedLayerError, match=rf"0 is a .*{kind.__name__}, which has no"):
        lora.add_lora(nn.Sequential(kind(7, 4)), "0", r=2)


def test_an_embedding_that_scales_its_rows_is_adapted_before_it_has_memory():
    model = nn.Sequential(BartScaledWordEmbedding(7, 4).to("meta"))
    assert lora.add_lora(model, "0", r=2) == ("0",)


def test_a_rank_that_is_too_large_in_every_layer_is_lowered_by_one_pattern():
    def blocks(*gates):
        return nn.ModuleDict(
            {
                "layers": nn.ModuleList(
                    nn.ModuleDict({"up": nn.Linear(8, 8), "gate": nn.Linear(8, size)})
                    for size in gates
                )
            }
        )

    with pytest.raises(ValueError, match=r"layers\.0\.gate: 1; .*rank_pattern=\{'gate': 1\}$"):
        lora.add_lora(blocks(1, 1, 1), "all-linear", r=4)
    model = blocks(1, 1, 1)
    lora.add_lora(model, "all-linear", r=4, rank_pattern={"gate": 1})
    assert [model.get_submodule(name).r for name in names_of(model)] == [4, 1] * 3
    with pytest.raises(ValueError, match=r"rank_pattern=\{'0\.gate': 1\}$"):
        lora.add_lora(blocks(1, 2, 1), "all-linear", r=4)
    deep = nn.ModuleDict({"a": blocks(2, 2), "b": blocks(1, 2)})
    with pytest.raises(ValueError, match=r"a\.layers\.0\.gate: 2; .*\{'a\.layers\.0\.gate': 2\}$"):
        lora.add_lora(deep, "all-linear", r=4)
    deep = nn.ModuleDict(
        {"gate": nn.Linear(8, 2), "inner": nn.ModuleDict({"gate": nn.Linear(8, 1)})}
    )
    with pytest.raises(ValueError, match=r"rank_pattern=\{re\.compile\('gate'\): 2\}$"):
        lora.add_lora(deep, "gate", r=4)
    with pytest.raises(ValueError, match=r"lower it in rank_pattern, where 'gate' sets it$"):
        lora.add_lora(blocks(1, 1), "all-linear", r=4, rank_pattern={"gate": 2})


def test_out_proj_can_be_left_out_and_have_a_rank_of_its_own():
    attention = "encoder.layers.0.self_attn"
    model = AnyModel()
    assert lora.add_lora(model, attention, r=2, exclude="out_proj") == (attention,)
    model = AnyModel()
    lora.add_lora(model, attention, r=2, rank_pattern={"out_proj": 1})
    layer = model.get_submodule(attention)
    assert (layer.r, layer.out_proj.r) == (2, 1)


def test_out_proj_first_and_then_its_attention():
    model, attention = AnyModel().eval(), "encoder.layers.0.self_attn"
    expected = model(ids())
    lora.add_lora(model, "encoder.layers.0.self_attn.out_proj", r=1)
    with pytest.raises(ValueError, match="out_proj has LoRA already"):
        lora.add_lora(model, attention, r=2)
    assert lora.add_lora(model, attention, r=2, exclude="out_proj") == (attention,)
    layer = model.get_submodule(attention)
    assert (layer.r, layer.out_proj.r) == (2, 1)
    torch.testing.assert_close(model(ids()), expected)
    lora.remove_lora(model)
    assert not names_of(model)
    assert type(layer) is nn.MultiheadAttention


@pytest.mark.parametrize("layer", [nn.Conv2d(2, 3, 3), nn.Linear(4, 4), nn.Embedding(5, 4)])
def test_one_layer_alone_is_merged(layer):
    model = nn.Sequential(layer)
    lora.add_lora(model, "0", r=2)
    with torch.no_grad():
        layer.lora_A.add_(0.5)
        layer.lora_B.add_(0.5)
    x = torch.ones(2, 2, 4, 4) if isinstance(layer, nn.Conv2d) else torch.ones(3, 4)
    x = torch.tensor([1, 3]) if isinstance(layer, nn.Embedding) else x
    expected = layer(x)
    merged = lora.merge(layer)
    assert names_of(model) == ["0"]
    assert not isinstance(merged, lora.LoRALayer)
    torch.testing.assert_close(merged(x), expected)


def test_gradients_from_before_do_not_move_the_base():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1, 4)).sum().backward()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    lora.add_lora(model, "0", r=2)
    optimizer.step()
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())


def test_a_frozen_A_stays_so():
    layer = lora.Linear(4, 4, r=2, freeze_A=True)
    layer.requires_grad_(True)
    lora.mark_only_lora_as_trainable(layer)
    assert [n for n, p in layer.named_parameters() if p.requires_grad] == ["lora_B"]


def test_running_statistics_that_are_not_saved_are_named(tmp_path, caplog):
    model = Normed()
    lora.add_lora(model, "conv", r=1, modules_to_train="head")
    (remark,) = [r for r in lora.save_adapter(model, tmp_path / "a.v1") if "statistics" in r]
    assert "running statistics of 1 modules (norm, …)" in remark
    assert remark in caplog.text
    assert (tmp_path / "a.v1" / "adapter_config.json").is_file()
    model = Normed()
    lora.add_lora(model, "conv", r=1, modules_to_train=["head", "norm"])
    assert "norm.running_mean" in adapter_of(model).tensors
    remarks = lora.save_adapter(model, tmp_path / "b.safetensors")
    assert not [remark for remark in remarks if "statistics" in remark]


def test_a_bank_notices_lora_that_came_after_it():
    model = AnyModel()
    lora.add_lora(model, "q_proj", r=2)
    adapter = adapter_of(model)
    lora.remove_lora(model)
    bank = lora.AdapterBank(model)
    bank.add("one", adapter)
    lora.add_lora(model, "q_proj", r=2)
    model(ids())
    with bank.use("one"), pytest.raises(ValueError, match="q_proj has been given LoRA since"):
        model(ids())


# ---- modules under two names ----


class Shared(nn.Module):
    """A linear layer that is used in two places."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(4, 4)}) for _ in range(2))
        self.layers[1]["down"] = self.layers[0]["up"]

    def forward(self, x):
        return self.layers[1]["down"](torch.tanh(self.layers[1]["up"](self.layers[0]["up"](x))))


def test_a_module_under_two_names_is_adapted_once():
    model = Shared()
    assert lora.add_lora(model, "down", r=2) == ("layers.0.up",)
    assert model.layers[1]["down"] is model.layers[0]["up"]
    assert names_of(model) == ["layers.0.up"]
    trained = [p for p in model.parameters() if p.requires_grad]
    assert [p.shape for p in trained] == [(2, 4), (4, 2)]
    assert lora.remove_lora(model) == ("layers.0.up",)
    assert lora.add_lora(model, ["up", "down"], r=2) == ("layers.0.up", "layers.1.up")
    x = torch.ones(1, 4)
    with torch.no_grad():
        for layer in (model.layers[0]["up"], model.layers[1]["up"]):
            layer.lora_B.add_(0.5)
    expected = model(x)
    torch.testing.assert_close(lora.merge(model)(x), expected)


@pytest.mark.parametrize("settings", [{"layers": [1]}, {"exclude": "layers.0.up"}])
def test_a_module_that_is_meant_under_one_name_and_left_out_under_another(settings):
    message = "layers.1.down is one module with layers.0.up, which is left out"
    with pytest.raises(ValueError, match=message):
        lora.add_lora(Shared(), ["down"], r=2, **settings)


def test_two_settings_for_one_module():
    ranks = {"layers.0.up": 1, "layers.1.down": 2}
    settings = {name: LayerSettings(r=rank, lora_alpha=1) for name, rank in ranks.items()}
    with pytest.raises(ValueError, match=r"layers.1.down is one module with layers.0.up"):
        adapt(Shared(), settings)
    same = dict.fromkeys(settings, LayerSettings(r=1, lora_alpha=1))
    assert adapt(Shared(), same) == ("layers.0.up",)


def test_what_is_trained_as_it_is_cannot_hold_an_adapted_module_under_another_name():
    model = Shared()
    with pytest.raises(ValueError, match=r"layers.1 cannot be trained .* while layers.0.up is ad"):
        lora.add_lora(model, "0.up", r=2, modules_to_train="layers.1")


# ---- what is given ----


def test_iterators_are_lists():
    model = AnyModel()
    names = lora.add_lora(
        model,
        (name for name in ("q_proj", "v_proj", "self_attn")),
        r=2,
        exclude=(name for name in ("layers.0.q_proj", "out_proj")),
        layers=(number for number in (0, 1)),
        modules_to_train=(name for name in ("head",)),
        rank_pattern={"q_proj": 1},
    )
    attentions = tuple(f"encoder.layers.{i}.self_attn" for i in range(2))
    assert names == ("layers.0.v_proj", "layers.1.q_proj", "layers.1.v_proj", *attentions)
    assert model.head.weight.requires_grad
    assert lora.add_lora(AnyModel(), "q_proj", modules_to_train=iter(()))


WRONG_TYPES = {
    "targets": (
        {"targets": None},
        "targets has to be a module's name, a pattern or a list of these, got None",
    ),
    "a target": ({"targets": ["q_proj", 3]}, "targets has to be .* or a list of these, got 3"),
    "a module": ({"targets": nn.Linear(2, 2)}, r"targets has to be .* got Linear\(in_features=2"),
    "modules": ({"targets": nn.ModuleList([nn.Linear(2, 2)])}, r"targets has to be .* got Linear"),
    "exclude": ({"exclude": 1}, "exclude has to be .* got 1"),
    "layers": ({"layers": 0}, r"layers has to be a list of numbers such as \[0, 1\] .* got 0"),
    "a layer": ({"layers": ["0"]}, r"layers has to be a list of numbers .* got \['0'\]"),
    "to train": ({"modules_to_train": 1}, "modules_to_train has to be .* got 1"),
    "ranks": ({"rank_pattern": 4}, "have to be a dict of targets and values, such as .* got 4"),
    "slices": ({"enable_lora": [True, False]}, r"have to be a dict .* got \[True, False\]"),
    "an array": ({"enable_lora": numpy.ones(2)}, "have to be a dict .* got array"),
    "a slice": (
        {"enable_lora": {"q_proj": 2}},
        "enable_lora of q_proj .* list .* got 2",
    ),
    "no slice": ({"enable_lora": {"q_proj": []}}, r"enable_lora \[\] does not fit layers\.0"),
    "a matrix": ({"enable_lora": {"q_proj": numpy.ones((1, 2))}}, "each of .* got array"),
    "ranks as one": ({"r": torch.tensor([1, 2])}, "an integer of at least 1, got tensor"),
    "alphas as one": ({"lora_alpha": torch.ones(2)}, "lora_alpha has to be a number above 0, got"),
    "dropouts as one": ({"lora_dropout": torch.ones(2)}, "lora_dropout has to be a prob.* got t"),
    "a flag": ({"enable_lora": {"q_proj": ["no"]}}, "each of enable_lora of .* True or False, got"),
    "alpha": ({"lora_alpha": "16"}, "lora_alpha has to be a number above 0, got '16'"),
    "dropout": ({"lora_dropout": "0.1"}, "lora_dropout has to be a probability .* got '0.1'"),
    "too much dropout": ({"lora_dropout": 2}, "lora_dropout has to be a probability .* got 2"),
    "a frozen half": ({"freeze_A": "no"}, "freeze_A has to be True or False, got 'no'"),
    "tied": ({"untie": "no"}, "untie has to be True or False, got 'no'"),
    "a variant": ({"variant": ["dora"]}, "unknown variant"),
    "all dropped": ({"lora_dropout": 1.0}, "lora_dropout 1 drops all of an update's input"),
}


@pytest.mark.parametrize("case", WRONG_TYPES)
def test_what_is_of_another_type_is_said_in_one_line(case):
    settings, message = WRONG_TYPES[case]
    model = AnyModel()
    with pytest.raises(ValueError, match=message) as error:
        lora.add_lora(model, **{"targets": "q_proj", **settings})
    assert "\n" not in str(error.value)
    assert not names_of(model)


def test_an_iterator_of_slices_is_read_once_for_all_modules():
    model = AnyModel()
    adapted = lora.add_lora(model, "q_proj", r=2, enable_lora={"q_proj": iter([True, False])})
    assert len(adapted) > 1
    assert [model.get_submodule(name).enable_lora for name in adapted] == [[True, False]] * len(
        adapted
    )


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({}, True),
        ({"modules_to_train": "first"}, True),
        ({"modules_to_train": "last"}, False),
        ({"exclude": "last"}, False),
        ({"bias": "all"}, False),
        ({"bias": "lora_only"}, True),
        ({"targets": ["all-linear", "last"]}, False),
        ({"targets": ["first", "second"]}, False),
    ],
)
def test_a_layer_that_is_taken_for_the_head_is_named(caplog, settings, warns):
    names = ("first", "second", "last")
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in names})
    first = {"exclude": "first"} if settings.get("modules_to_train") == "first" else {}
    lora.add_lora(model, **{"targets": "all-linear", "r": 2, **settings, **first})
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == warns
    assert all("'all-linear' takes last, the last linear layer, for the head" in s for s in said)
    assert all(s.endswith("or to exclude, if it is to stay frozen") for s in said)


@pytest.mark.parametrize("head", ["adapted before", "built with LoRA", "frozen with its LoRA"])
def test_a_head_that_has_lora_is_not_taken_for_a_frozen_one(caplog, head):
    model = nn.ModuleDict({"first": nn.Linear(4, 4), "last": nn.Linear(4, 4)})
    if head == "built with LoRA":
        model["last"] = lora.Linear(4, 4, r=2)
    else:
        lora.add_lora(model, "last", r=2)
        model.requires_grad_(head == "adapted before")
    assert lora.add_lora(model, "all-linear", r=2) == ("first",)
    assert not caplog.records


def test_a_head_with_the_embeddings_weight_can_only_be_excluded(caplog):
    model = nn.ModuleDict({"words": nn.Embedding(9, 4), "first": nn.Linear(4, 4)})
    model["last"] = nn.Linear(4, 9, bias=False)
    model["last"].weight = model["words"].weight
    plain = copy.deepcopy(model)
    lora.add_lora(model, "all-linear", r=2)
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.endswith("which stays frozen: add it to exclude, if it is to stay frozen")
    caplog.clear()
    lora.add_lora(plain, "all-linear", r=2, exclude="last")
    assert not caplog.records


class Experts(nn.Module):
    """The weights of all experts of a layer, as upstream's Transformers holds them."""

    def __init__(self, count):
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, 8, 8))


def with_experts(count):
    blocks = [{"q": nn.Linear(8, 8), "experts": Experts(count)} for _ in range(3)]
    return nn.ModuleDict({"layers": nn.ModuleList(map(nn.ModuleDict, blocks))})


@pytest.mark.parametrize(
    ("count", "settings", "warns"),
    [
        (4, {}, True),
        (4, {"modules_to_train": "experts"}, False),
        (4, {"targets": "q"}, False),
        (1, {}, False),
    ],
)
def test_most_of_the_weights_that_all_linear_leaves_out_are_named(caplog, count, settings, warns):
    model = with_experts(count)
    assert len(lora.add_lora(model, **{"targets": "all-linear", "r": 2, **settings})) == 3
    said = [record.getMessage() for record in caplog.records]
    assert said == warns * [
        "'all-linear' leaves out layers.0.experts.up, layers.1.experts.up … and 1 more, which hold "
        "more than all that it adapts, but as stacks of matrices: to adapt these as well, add "
        "'experts.up' to targets"
    ]


def test_kernels_of_convolutions_and_small_tables_are_no_stacks(caplog):
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"q": nn.Linear(8, 8)})])})
    model["conv"], model["experts"] = nn.Conv1d(8, 64, 9), Experts(1)
    lora.add_lora(model, "all-linear", r=2)
    assert not caplog.records


def test_a_parameter_that_is_named_is_no_module():
    expected = (
        r"^'up' matches no module of the model, only parameters such as layers\.0\.experts\.up"
    )
    with pytest.raises(ValueError, match=expected + "; it has "):
        lora.add_lora(with_experts(1), ["q", "up"], r=2)  # one matrix is no stack
    with pytest.raises(ValueError, match=r"^'up' matches no module .*, only parameters"):
        lora.add_lora(with_experts(2), "q", r=2, modules_to_train="up")


def test_a_head_outside_of_numbered_layers_is_left_out_in_silence(caplog):
    lora.add_lora(AnyModel(), "all-linear", r=2)
    assert not caplog.records


# ---- remove_lora ----


def test_what_was_set_since_stays():
    model, x = AnyModel(), torch.ones(2, 8)
    layer, attention = model.layers[0].q_proj, model.encoder.layers[0].self_attn
    before = [{*vars(module)} for module in (layer, attention)]
    lora.add_lora(model, ["encoder.layers.0.self_attn.out_proj", "q_proj"], r=2)
    attention.note = "first"
    lora.add_lora(model, "encoder.layers.0.self_attn", r=2, exclude="out_proj")
    layer.note, layer.scale = "mine", nn.Parameter(torch.ones(1))
    layer.register_buffer("seen", torch.zeros(1))
    for mode in (True, False):
        model.train(mode)(ids()).sum().backward()
        with torch.no_grad():
            model(ids())
    lora.remove_lora(model)
    assert [{*vars(module)} for module in (layer, attention)] == [
        each | {"note"} for each in before
    ]
    assert (layer.note, attention.note) == ("mine", "first")
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias", "scale"]
    assert "seen" in layer.state_dict()
    assert layer(x).shape == (2, 8)
    lora.add_lora(model, "q_proj", r=2)
    assert "note" in vars(lora.merge(model).layers[0].q_proj)


def test_one_adapted_layer_is_no_model():
    model = AnyModel()
    lora.add_lora(model, ["q_proj", "self_attn"], r=2)
    for layer in (model.layers[0].q_proj, model.encoder.layers[0].self_attn.out_proj):
        with pytest.raises(ValueError, match="Linear is one adapted layer: give the model that it"):
            lora.remove_lora(layer)
    assert lora.remove_lora(model.layers[0]) == ("q_proj",)
    assert "layers.0.q_proj" not in names_of(model)
    assert "layers.1.q_proj" in names_of(model)


def test_an_attention_of_which_a_part_is_adapted_is_a_model():
    attention = nn.MultiheadAttention(8, 2)
    lora.add_lora(attention, "out_proj", r=2)
    assert lora.remove_lora(attention) == ("out_proj",)
    assert type(attention) is nn.MultiheadAttention


def test_a_file_of_this_project_says_nothing_of_peft(tmp_path):
    model = AnyModel()
    lora.add_lora(model, "q_proj", r=2)
    for layer in model.layers:
        torch.nn.init.normal_(layer.q_proj.lora_B)
    assert lora.save_adapter(model, tmp_path / "a.safetensors") == []


# ---- what a model may have of its own ----


class Tripled(nn.MultiheadAttention):
    """An attention with a forward of its own."""

    def forward(self, *args, **kwargs):
        out, weights = super().forward(*args, **kwargs)
        return 3 * out, weights


def unchanged_by(model, message, *args, kind=ValueError, **settings):
    """`add_lora` raises, and leaves classes and what is trained as they were."""
    classes = [type(module) for module in model.modules()]
    trained = [parameter.requires_grad for parameter in model.parameters()]
    with pytest.raises(kind, match=message):
        lora.add_lora(model, *args, **settings)
    assert [type(module) for module in model.modules()] == classes
    assert [parameter.requires_grad for parameter in model.parameters()] == trained
    assert ".lora_" not in " ".join(model.state_dict())


def test_an_attention_with_a_forward_of_its_own_keeps_it():
    model = nn.Sequential(Tripled(8, 2))
    message = r"0\.out_proj belongs to a Tripled, which computes with its weight"
    unchanged_by(model, message, "out_proj", r=2, kind=UnsupportedLayerError)


class BatchFirst(nn.MultiheadAttention):
    """An attention that is built in another way, and nothing else."""

    def __init__(self, size):
        super().__init__(size, 2, batch_first=True)


def test_an_attention_that_is_built_in_another_way_is_one():
    model = nn.Sequential(BatchFirst(8))
    x = torch.rand(2, 3, 8)
    before = model[0](x, x, x)[0]
    lora.add_lora(model, "out_proj", r=2)
    torch.testing.assert_close(model[0](x, x, x)[0], before)
    lora.remove_lora(model)
    assert type(model[0]) is BatchFirst


def test_an_eight_bit_weight_is_quantized():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = nn.Parameter(model[1].weight.to(torch.float8_e4m3fn), requires_grad=False)
    message = "the weight of module 1 is quantized .torch.float8_e4m3fn.: leave it out"
    unchanged_by(model, message, ["0", "1"], r=2, kind=UnsupportedLayerError)


class EightBit(torch.Tensor):
    """A tensor as quantizing libraries have them: it says float32, and holds something else."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs)


class Marked(nn.Parameter):
    """A parameter as frameworks have them, to hang something on."""


def test_a_weight_of_another_kind_is_quantized(tmp_path):
    plain, model = (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2))
    lora.add_lora(plain, "0", r=2)
    lora.save_adapter(plain, tmp_path / "a")
    model[1].weight = nn.Parameter(model[1].weight.detach().as_subclass(EightBit), False)
    message = "the weight of module 1 is quantized .a .*EightBit.: leave it out"
    unchanged_by(model, message, ["0", "1"], r=2, kind=UnsupportedLayerError)
    lora.add_lora(plain, "1", r=2)
    lora.save_adapter(plain, tmp_path / "both")
    plain[1].weight = model[1].weight
    both = lora.read_adapter(tmp_path / "both")
    for refused, needed in (
        (lambda: lora.merge(plain), "merging"),
        (lambda: lora.save_adapter(plain, tmp_path / "b"), "it is saved"),
        (lambda: lora.load_adapter(model, tmp_path / "both"), "it gets an adapter"),
        (lambda: lora.AdapterBank(model).add("both", both), "it gets an adapter"),
    ):
        with pytest.raises(
            ValueError, match=rf"quantized \(a .*EightBit\): load.* before {needed}"
        ):
            refused()
    assert not (tmp_path / "b").exists()


def holding(weight):
    layer = nn.Linear(8, 8)
    layer.weight = weight
    return layer


ELSEWHERE = {
    "quantized": lambda: holding(nn.Parameter(torch.randn(8, 8).as_subclass(EightBit))),
    "marked": lambda: holding(Marked(torch.randn(8, 8))),
    "offloaded": lambda: holding(nn.Parameter(torch.empty(8, 8, device="meta"))),
    "lazy": lambda: nn.LazyLinear(8),
}


@pytest.mark.parametrize("kind", ELSEWHERE)
@torch.no_grad()
def test_what_a_weight_is_that_lora_leaves_alone_does_not_matter(tmp_path, kind):
    trained, x = nn.Sequential(nn.Linear(8, 8), ELSEWHERE[kind]()), torch.randn(2, 8)
    lora.add_lora(trained, "0", r=2)
    nn.init.normal_(trained[0].lora_B)
    expected = trained.eval()[0](x)
    lora.save_adapter(trained, tmp_path / "a")
    adapter = lora.read_adapter(tmp_path / "a")
    assert (adapter.metadata.base_fingerprint is None) == (kind != "marked")
    loaded = nn.Sequential(nn.Linear(8, 8), trained[1])
    loaded[0].weight, loaded[0].bias = trained[0].weight, trained[0].bias
    bank = lora.AdapterBank(loaded)
    bank.add("a", adapter)
    with bank.use("a"):
        torch.testing.assert_close(loaded[0](x), expected)
    bank.close()
    lora.load_adapter(loaded, tmp_path / "a")
    torch.testing.assert_close(loaded.eval()[0](x), expected)
    lora.merge(loaded)
    torch.testing.assert_close(loaded[0](x), expected)


@torch.no_grad()
def test_a_parameter_that_computes_as_any_other_is_adapted(tmp_path):
    model, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(2, 8)
    model[0].weight = Marked(model[0].weight.detach())
    lora.add_lora(model, "0", r=2)
    nn.init.normal_(model[0].lora_B)
    expected = model.eval()(x)
    lora.save_adapter(model, tmp_path / "a")
    lora.merge(model)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("kind", ["quantized", "offloaded", "lazy"])
def test_a_head_that_is_read_or_written_has_to_be_there(tmp_path, kind):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    lora.add_lora(model, "0", r=2, modules_to_train=["1"])
    lora.save_adapter(model, tmp_path / "a")
    model[1] = ELSEWHERE[kind]()
    with pytest.raises(ValueError, match=r"1\.weight (is|has no shape).* before it is saved"):
        lora.save_adapter(model, tmp_path / "b")
    plain, adapter = nn.Sequential(nn.Linear(8, 8), model[1]), lora.read_adapter(tmp_path / "a")
    bank = lora.AdapterBank(plain)
    for take in (lambda: lora.load_adapter(plain, tmp_path / "a"), lambda: bank.add("a", adapter)):
        with pytest.raises(ValueError, match=r"1\.weight (is|has no shape).* it gets an adapter"):
            take()


def test_a_decomposition_that_fails_leaves_everything_as_it_was():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight.data[0, 0] = float("nan")
    message = "1: its weight has no decomposition"
    unchanged_by(model, message, ["0", "1"], r=2, initialization="pissa")


def test_names_by_which_lora_is_known_belong_to_lora():
    model = nn.ModuleDict({"flora_x": nn.Linear(8, 8), "a": nn.Linear(8, 8)})
    unchanged_by(model, "flora_x.weight has 'lora_' in its name", "a", r=2)


def test_layers_without_an_update_leave_the_rest_to_be_frozen():
    model = nn.Sequential(lora.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    lora.add_lora(model, "1", r=2)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {"1.lora_A", "1.lora_B"}


def test_numbers_of_numpys(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    alphas = {"1": numpy.float32(4)}
    lora.add_lora(
        model, ["0", "1"], r=numpy.int64(2), lora_alpha=numpy.int64(8), alpha_pattern=alphas
    )
    assert (model[0].r, model[0].lora_alpha, model[1].lora_alpha) == (2, 8, 4.0)
    lora.save_adapter(model, tmp_path / "a.safetensors")
    assert lora.read_adapter(tmp_path / "a.safetensors").lora.alpha_of("1") == 4


def test_a_layer_without_outputs():
    unchanged_by(nn.Sequential(nn.Linear(4, 0)), "of module 0: 0; leave it out", "0", r=1)


def test_complex_weights_are_called_so():
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.complex64))
    message = "0 has complex weights .torch.complex64., which have no LoRA"
    unchanged_by(model, message, "0", r=2, kind=UnsupportedLayerError)


class Raw(nn.Module):
    """Multiplies by a parameter of its own."""

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
def test_a_layer_alone_is_to_be_put_into_a_model_if_that_helps(layer, target, is_supported):
    layer, kind = copy.deepcopy(layer), type(layer).__name__
    alone = f"^{kind} is itself a layer, .* name it there, as '0'$"
    message = alone if is_supported else f"^{kind} contains no layers that LoRA could adapt$"
    with pytest.raises(ValueError, match=message):
        lora.add_lora(layer, target, r=2)
    if is_supported:
        assert lora.add_lora(nn.Sequential(layer), "0", r=2) == ("0",)
