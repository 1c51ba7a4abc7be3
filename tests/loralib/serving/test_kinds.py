"""Tests of banks with every kind of layer and variant, and of layers that banks refuse."""

import copy

import pytest
import torch
from adapted_models import CASES
from compare import assert_same_bits
from torch import nn

import loralib as lora
from loralib.adapters.saving import adapter_of
from loralib.errors import CheckpointError, NeedsMergingError

KINDS = ("linear", "patterns", "embedding", "head", "slices", "a slice", "kernels", "groups")


def adapter(tmp_path, name, **settings):
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.safetensors"
    lora.save_adapter(CASES[name].adapted(**settings), path)
    return lora.read_adapter(path)


def outputs(model, case, dtype=None):
    inputs = [x.to(dtype) if x.is_floating_point() else x for x in case.inputs]
    with torch.no_grad():
        return model(*inputs)


@pytest.mark.parametrize("variant", ["lora", "dora"])
@pytest.mark.parametrize("name", KINDS)
def test_outside_of_a_block_the_model_is_the_plain_one(tmp_path, name, variant):
    case = CASES[name]
    plain = case.build()
    before = {n: tensor.clone() for n, tensor in plain.state_dict().items()}
    expected = outputs(plain, case)
    bank = lora.AdapterBank(plain)
    bank.add("a", adapter(tmp_path, name, variant=variant))
    with bank.use("a"):
        adapted = outputs(plain, case)
    assert (adapted - expected).abs().max() > 1e-2
    assert torch.equal(outputs(plain, case), expected)
    assert_same_bits(plain.state_dict(), before)
    bank.close()
    assert torch.equal(outputs(plain, case), expected)


@pytest.mark.parametrize("variant", ["lora", "rslora+dora"])
@pytest.mark.parametrize("name", ["linear", "embedding", "kernels"])
def test_a_mixed_batch_in_bfloat16(tmp_path, name, variant):
    """Each row equals that of its adapter alone, even if variants differ."""
    case = CASES[name]
    plain = case.build().bfloat16()
    bank = lora.AdapterBank(plain)
    bank.add("a", adapter(tmp_path, name, variant=variant))
    bank.add("b", adapter(tmp_path, name, lora_alpha=7))
    alone = {}
    for key in "ab":
        with bank.use(key):
            alone[key] = outputs(plain, case, torch.bfloat16)
    assert alone["a"].dtype == torch.bfloat16
    with bank.use(["b", "a", "b"]):
        mixed = outputs(plain, case, torch.bfloat16)
    for row, key in enumerate("bab"):
        torch.testing.assert_close(mixed[row], alone[key][row], rtol=0.05, atol=0.05)
    assert (alone["a"] - alone["b"]).abs().max() > 0.2


def test_the_gain_of_dora_is_computed_for_the_bank_s_base(tmp_path):
    """It is computed once, and is that of an adapted layer in evaluation mode."""
    case = CASES["linear"]
    model = case.adapted(variant="dora")
    plain = case.build()
    bank = lora.AdapterBank(plain)
    bank.add("a", adapter(tmp_path, "linear", variant="dora"))
    delta = bank._adapters["a"].deltas["layers.0.out"]
    layer = model.layers[0]["out"]
    gain = layer._delta().gain(layer.weight).detach()
    torch.testing.assert_close(delta._delta.known_gain, gain)


class OwnLinear(nn.Module):
    """A linear layer that is not an `nn.Linear`, with its weight as (out, in)."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        return x @ self.weight.t()


def test_dora_on_a_square_weight_of_an_unknown_class_is_refused():
    """Its norms are those of outputs, and the weight may be (out, in) or (in, out)."""
    plain = nn.Sequential(nn.Linear(4, 4, bias=False))
    bank = lora.AdapterBank(nn.Sequential(OwnLinear(plain[0].weight.detach().clone())))
    lora.add_lora(plain, "0", r=2, variant="dora")
    with pytest.raises(CheckpointError, match="has DoRA on 0, a OwnLinear, whose square weight"):
        bank.add("a", adapter_of(plain))


def test_lora_on_a_square_weight_of_an_unknown_class_is_computed():
    plain = nn.Sequential(nn.Linear(4, 4, bias=False))
    model = nn.Sequential(OwnLinear(plain[0].weight.detach().clone()))
    bank = lora.AdapterBank(model)
    lora.add_lora(plain, "0", r=2)
    nn.init.normal_(plain[0].lora_B)
    bank.add("a", adapter_of(plain))
    x = torch.randn(3, 4)
    with bank.use("a"), torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))


def offload(model):
    """Keeps weights out of the model except in calls of its layers, as accelerate does."""

    def set_parameters(module, values):
        for name, value in values.items():
            setattr(module, name, nn.Parameter(value, requires_grad=False))

    for module in model.modules():
        loaded = {name: p.detach() for name, p in module.named_parameters(recurse=False)}
        offloaded = {name: tensor.to("meta") for name, tensor in loaded.items()}

        def forward(*inputs, own=module.forward, module=module, loaded=loaded, offloaded=offloaded):
            set_parameters(module, loaded)
            try:
                return own(*inputs)
            finally:
                set_parameters(module, offloaded)

        if loaded:
            module.forward = forward
            set_parameters(module, offloaded)


@pytest.mark.parametrize("variant", ["lora", "dora"])
@pytest.mark.parametrize("name", KINDS)
def test_a_model_that_is_offloaded_after_adapters_were_added(tmp_path, name, variant):
    """DoRA's gain must not multiply the bias, which a bank's hooks do not find then."""
    case = CASES[name]
    plain = case.build()
    bank, own = lora.AdapterBank(plain), adapter(tmp_path, name, variant=variant)
    bank.add("a", own)
    with bank.use("a"):
        expected = outputs(plain, case)
    adapted = {bank._adapters["a"].deltas[module].module for module in bank._adapters["a"].deltas}
    has_bias = any(getattr(module, "bias", None) is not None for module in adapted)
    offload(plain)
    with bank.use("a"):
        if variant == "dora" and has_bias:
            message = r"^the bias of \S+ is on the meta device: .* remove the hooks that offload"
            with pytest.raises(ValueError, match=message):
                outputs(plain, case)
        else:
            torch.testing.assert_close(outputs(plain, case), expected)


@pytest.mark.parametrize("name", ["attention", "own out_proj"])
def test_an_attention_is_refused(tmp_path, name):
    bank = lora.AdapterBank(CASES[name].build())
    with pytest.raises(NeedsMergingError, match=r"attention.*; merge it into its base$"):
        bank.add("a", adapter(tmp_path, name))
    assert bank.names == ()


def test_an_embedding_with_a_forward_of_its_own_is_refused(tmp_path):
    """An update cannot be added to rows that are normalized."""

    class Normed(nn.Embedding):
        def forward(self, ids):
            return nn.functional.normalize(super().forward(ids), dim=-1)

    plain = CASES["embedding"].build()
    normed = Normed(11, 8)
    normed.load_state_dict(plain.words.state_dict())
    plain.words = normed
    bank = lora.AdapterBank(plain)
    with pytest.raises(NeedsMergingError, match="words, a Normed, which computes in its own"):
        bank.add("a", adapter(tmp_path, "embedding"))
    assert bank.names == ()


def test_a_convolution_that_computes_with_another_weight_is_refused(tmp_path):
    class Centered(nn.Conv1d):
        def _conv_forward(self, x, weight, bias):
            return super()._conv_forward(x, weight - weight.mean(), bias)

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv1d(2, 4, 3))
    model = copy.deepcopy(plain)
    lora.add_lora(model, "0", r=2)
    lora.save_adapter(model, tmp_path / "a.safetensors")
    plain[0] = Centered(2, 4, 3)
    plain[0].load_state_dict(model[0].state_dict(), strict=False)
    bank = lora.AdapterBank(plain)
    with pytest.raises(NeedsMergingError, match="0, a Centered, which computes in its own way"):
        bank.add("a", lora.read_adapter(tmp_path / "a.safetensors"))


def test_outputs_in_channels_last_stay_so():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, 4, 3)).to(memory_format=torch.channels_last)
    model = copy.deepcopy(plain)
    lora.add_lora(model, "0", r=2)
    nn.init.normal_(model[0].lora_B)
    x = torch.rand(3, 2, 5, 6).to(memory_format=torch.channels_last)
    strides, expected = plain(x).stride(), model(x)
    bank = lora.AdapterBank(plain)
    for name in "ab":
        bank.add(name, adapter_of(model))
    for names in ("a", ["a", "b", "a"]):
        with bank.use(names):
            out = plain(x)
        assert out.stride() == strides
        torch.testing.assert_close(out, expected)


def test_a_mixed_batch_of_one_token_id_per_row():
    """The input of an embedding, without a second dimension."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 3))
    ids, expected = torch.tensor([3, 0, 10]), {}
    bank = lora.AdapterBank(plain)
    for name in "ab":
        model = copy.deepcopy(plain)
        lora.add_lora(model, ["0", "1"], r=2)
        for layer in model:
            nn.init.normal_(layer.lora_A)
            nn.init.normal_(layer.lora_B)
        expected[name] = model(ids)
        bank.add(name, adapter_of(model))
    with bank.use(["a", "b", "a"]):
        mixed = plain(ids)
    rows = [expected[name][row] for row, name in enumerate("aba")]
    torch.testing.assert_close(mixed, torch.stack(rows), rtol=1e-4, atol=1e-4)


def test_a_bank_s_copy_of_a_head_requires_no_gradients():
    """The model's own parameters still do, including one that the head shares with it."""
    plain = nn.ModuleDict({"words": nn.Embedding(11, 8), "up": nn.Linear(8, 8)})
    plain["head"] = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 11, bias=False))
    plain["head"][1].weight = plain["words"].weight
    model = copy.deepcopy(plain)
    lora.add_lora(model, "up", r=2, modules_to_train="head.0")
    bank = lora.AdapterBank(plain)
    bank.add("a", adapter_of(model))
    copied = dict(bank._adapters["a"].heads["head"].named_parameters())
    assert [name for name, own in copied.items() if own.requires_grad] == ["1.weight"]
    assert copied["1.weight"] is plain["words"].weight
    assert all(parameter.requires_grad for parameter in plain.parameters())


def test_another_number_of_rows_is_refused(tmp_path):
    case = CASES["embedding"]
    plain = case.build()
    bank = lora.AdapterBank(plain)
    bank.add("a", adapter(tmp_path, "embedding"))
    with bank.use(["a", "a"]), pytest.raises(ValueError, match="adapters are given for 2 rows"):
        outputs(plain, case)
