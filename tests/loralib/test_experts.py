"""LoRA on stacks of matrices, against whole weights in float64, however a forward computes."""

import copy
import io
import json
import logging
import pickle
import re
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close_to_rounding, assert_same_bits
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrize

import loralib as lora
from loralib.adapters.deltas import merge_into
from loralib.errors import CheckpointError, UnsupportedLayerError
from loralib.experts import AdaptedStack, LowRankSum
from loralib.functional import variant_of

EXPERTS, WIDTH, INNER, R, ALPHA = 3, 8, 16, 2, 6


def has_grouped_mm():
    """Whether this version of PyTorch has the grouped product on a CPU, in float32."""
    try:
        torch._grouped_mm(torch.ones(1, 4), torch.ones(1, 4, 4), offs=torch.ones(1).int())
    except (RuntimeError, NotImplementedError):
        return False
    return True


WAYS = ("loop", "bmm", "batched", *(["grouped"] if has_grouped_mm() else []))
STACKS = ("gate_up_proj", "down_proj")
IDS = torch.arange(EXPERTS).repeat_interleave(4)
# In each of two layers, sums of WIDTH, WIDTH and INNER products follow each other, with updates' of
# R; what is added up is smaller than this.
TERMS, MAGNITUDE = 2 * (2 * WIDTH + INNER + 3 * R), 8.0


class Experts(nn.Module):
    """Experts as upstream's Transformers holds them, and its ways of computing with them."""

    def __init__(self, way="loop", is_transposed=False):
        super().__init__()
        self.way, self.is_transposed = way, is_transposed
        for name, out, width in (("gate_up_proj", 2 * INNER, WIDTH), ("down_proj", WIDTH, INNER)):
            shape = (width, out) if is_transposed else (out, width)
            weight = torch.randn(EXPERTS, *shape) * width**-0.5
            self.register_parameter(name, nn.Parameter(weight))
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(EXPERTS, out)))

    def forward(self, x):
        """(tokens, width), ordered as `IDS`."""
        gate, up = self.products(x, "gate_up_proj").chunk(2, -1)
        return self.products(torch.tanh(gate) * torch.tanh(up), "down_proj")

    def products(self, x, name):
        bias, weight = getattr(self, f"{name}_bias"), getattr(self, name)
        if self.way == "bmm":
            x = x.view(EXPERTS, -1, x.shape[-1])
            y = torch.bmm(x, weight if self.is_transposed else weight.transpose(1, 2))
            return (y + bias[:, None]).flatten(0, 1)
        if self.way == "grouped":
            weight = weight if self.is_transposed else weight.transpose(-2, -1)
            ends = IDS.bincount().cumsum(0, dtype=torch.int32)
            return torch._grouped_mm(x, weight, offs=ends).add_(bias[IDS])
        if self.way == "batched":
            of_rows = weight[IDS]
            if self.is_transposed:
                return torch.bmm(x[:, None], of_rows)[:, 0].add_(bias[IDS])
            return torch.bmm(of_rows, x[..., None])[..., 0].add_(bias[IDS])
        y = x.new_zeros(len(x), bias.shape[1])
        for expert in torch.arange(EXPERTS):
            rows, of_expert = (expert == IDS).nonzero()[:, 0], getattr(self, name)[expert]
            product = x[rows] @ of_expert if self.is_transposed else F.linear(x[rows], of_expert)
            y = y.index_add(0, rows, product + bias[expert])
        return y


class Model(nn.Module):
    def __init__(self, way="loop", is_transposed=False, layers=2):
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(layers):
            parts = {"q": nn.Linear(WIDTH, WIDTH), "experts": Experts(way, is_transposed)}
            self.layers.append(nn.ModuleDict(parts))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer["experts"](layer["q"](x)))
        return x


def build(way="loop", is_transposed=False, layers=2):
    torch.manual_seed(0)
    return Model(way, is_transposed, layers)


def randomised(model):
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    return model


def adapted(way="loop", is_transposed=False, targets=("q", *STACKS), layers=2, **settings):
    model = build(way, is_transposed, layers)
    lora.add_lora(model, targets, r=R, lora_alpha=ALPHA, **settings)
    return randomised(model)


def tokens():
    return torch.randn(len(IDS), WIDTH, generator=torch.Generator().manual_seed(2))


def with_sums(layer):
    """Plain experts in float64 that hold W + s · B A, by hand; and A and B of each stack."""
    plain = Experts("loop", layer.is_transposed).double()
    factors = {}
    for name in (*STACKS, *(f"{each}_bias" for each in STACKS)):
        delattr(plain, name)
        weight = getattr(layer, name).detach().double()
        update = layer._modules.get(f"{name}_lora")
        if update is not None:
            A = update.lora_A.detach().double().view(EXPERTS, -1, update.lora_A.shape[1])
            B = update.lora_B.detach().double().view(EXPERTS, -1, update.lora_B.shape[1])
            factors[name] = A.requires_grad_(), B.requires_grad_()
            product = torch.stack([update.scaling * b @ a for a, b in zip(A, B, strict=True)])
            weight = weight + (product.mT if layer.is_transposed else product)
        setattr(plain, name, weight)
    return plain, factors


def close(ours, theirs):
    assert_close_to_rounding(ours, theirs.to(ours.dtype), TERMS, magnitude=MAGNITUDE)


@pytest.mark.parametrize("is_transposed", [False, True], ids=["out-in", "in-out"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stacks", [STACKS, STACKS[:1], STACKS[1:]], ids=["both", "up", "down"])
def test_outputs_and_gradients_are_those_of_the_sum(monkeypatch, way, is_transposed, stacks):
    layer = adapted(way, is_transposed, stacks, layers=1).layers[0]["experts"]
    monkeypatch.setattr(LowRankSum, "tensor", property(lambda self: pytest.fail("the sum is made")))
    plain, factors = with_sums(layer)
    x, probe = tokens().requires_grad_(), torch.linspace(-1, 1, len(IDS) * WIDTH).view(-1, WIDTH)
    wide = x.detach().double().requires_grad_()
    out, expected = layer(x), plain(wide)
    close(out, expected)
    out.backward(probe)
    expected.backward(probe.double())
    close(x.grad, wide.grad)
    assert factors.keys() == set(stacks)
    for name, (A, B) in factors.items():
        update = layer._modules[f"{name}_lora"]
        close(update.lora_A.grad, A.grad.flatten(0, 1))
        close(update.lora_B.grad, B.grad.flatten(0, 1))
        assert getattr(layer, name).grad is None


@pytest.mark.parametrize("is_transposed", [False, True], ids=["out-in", "in-out"])
@pytest.mark.parametrize("way", WAYS)
def test_evaluation_and_merging(way, is_transposed):
    model, x = adapted(way, is_transposed), tokens()
    with torch.no_grad():
        expected = model(x)
        close(model.eval()(x), expected)
        nn.init.normal_(model.layers[0]["experts"].down_proj_lora.lora_B)  # no stale copy
        changed = model(x)
        close(model.train()(x), changed)
        assert (changed - expected).abs().max() > 0.01
    merged = lora.merge(copy.deepcopy(model))
    close(merged(x), changed)
    assert {type(m) for m in merged.modules()} == {type(m) for m in build().modules()}
    assert merged.state_dict().keys() == build().state_dict().keys()


OTHERS = {
    "einsum": lambda w, x: torch.einsum("ti,eoi->teo", x, w),
    "a vector": lambda w, x: w @ x[0],
    "columns": lambda w, x: w[1, :, :3],
    "a row": lambda w, x: w[0][2],
    "a mask": lambda w, x: w[torch.tensor([True, False, True])],
    "times a number": lambda w, x: 2 * w,
    "plus one": lambda w, x: w + x.new_ones(WIDTH),
    "less a number": lambda w, x: 1 - w,
    "permuted": lambda w, x: w.permute(2, 0, 1),
    "transposed otherwise": lambda w, x: w.transpose(0, 1),
    "of another dtype": lambda w, x: x.double() @ w.to(torch.float64)[0].mT,
    "concatenated": lambda w, x: torch.cat([w, w]),
    "chunks": lambda w, x: w[2].chunk(2)[1],
    "a baddbmm": lambda w, x: torch.baddbmm(x.new_zeros(1), x.expand(EXPERTS, -1, -1), w.mT),
    "some of the matrices": lambda w, x: x @ w[1:].mT,
    "each": lambda w, x: torch.stack([F.linear(x, each) for each in w]),
    "its own matrices": lambda w, x: w.mT @ w,
    "from the left": lambda w, x: w @ x[:WIDTH],
    "its sum": lambda w, x: w.sum(-1) + w.mean() + torch.sum(w),
    "an index": lambda w, x: 1 - w[0].sum(),
    "divided": lambda w, x: 1 / (w.square() + 1) + w / 2,
    "powers": lambda w, x: 2**w + w**2,
    "from the right": lambda w, x: x @ w.mT,
    "its absolute values": lambda w, x: abs(w) + +w - -w,
    "compared": lambda w, x: torch.where((w > 0) & (w <= 1) & (w != 0.5), w * 2, 0),
    "compared from the left": lambda w, x: (x.new_zeros(()) < w) * w,
    "sizes": lambda w, x: torch.tensor([*w.shape, w.size(1), w.dim(), len(w), w.ndim]).to(w.dtype),
}


def test_what_is_read_without_gradients_takes_none_from_what_follows():
    class Other(Experts):
        def forward(self, x):
            with torch.no_grad():
                self.largest = max(self.gate_up_proj.abs().max(), self.gate_up_proj[0].abs().max())
            return x @ self.gate_up_proj[0].mT + torch.einsum("ti,oi->to", x, self.gate_up_proj[1])

    layer = Other()
    lora.add_lora(layer, "gate_up_proj", r=R)
    randomised(layer)(tokens()).square().sum().backward()
    update = layer.gate_up_proj_lora
    assert layer.largest == lora.merge(copy.deepcopy(layer)).gate_up_proj.abs().max()
    assert all(part.any() for part in update.lora_A.grad.split(R)[:2])


@pytest.mark.parametrize("what", OTHERS)
def test_whatever_else_a_forward_does_is_done_with_the_sum(what):
    class Other(Experts):
        def forward(self, x):
            return OTHERS[what](self.gate_up_proj, x)

    layer = Other()
    lora.add_lora(nn.ModuleDict({"experts": layer}), "gate_up_proj", r=R, lora_alpha=ALPHA)
    plain, factors = with_sums(randomised(layer))
    out, expected = layer(tokens()), OTHERS[what](plain.gate_up_proj, tokens().double())
    close(out, expected)
    if expected.requires_grad:
        out.square().sum().backward()
        expected.square().sum().backward()
        close(layer.gate_up_proj_lora.lora_A.grad, factors["gate_up_proj"][0].grad.flatten(0, 1))


def test_operators_are_those_of_the_tensor():
    """Those whose results are not close where their operands are, and those that are refused."""
    parts = torch.randn(2, 4, 4), torch.randn(2, 4, 1), torch.randn(2, 1, 4)
    ours: Any = LowRankSum(*parts)
    whole, other = ours.tensor, torch.full((2, 4, 4), 0.7)
    for of in (
        lambda w: w // other,
        lambda w: other // w,
        lambda w: 3 // w,
        lambda w: w % 0.7,
        lambda w: 3 % w,
        lambda w: w == whole,
        lambda w: whole == w,
        lambda w: w != whole,
        lambda w: w == w,
        lambda w: w < other,
        lambda w: other > w,
        lambda w: w >= w,
    ):
        assert torch.equal(of(ours), of(whole))
    assert ours in {ours: 1}
    assert whole[0, 0, 0] in ours
    assert 99.0 not in ours
    assert (ours == None, ours != None) == (False, True)  # noqa: E711
    with pytest.raises(RuntimeError, match="Boolean value of Tensor"):
        bool(ours)


def test_the_base_stays_in_half_precision_and_its_updates_count():
    model, x = adapted("bmm", layers=1).bfloat16(), tokens().bfloat16()
    model.layers[0]["experts"].down_proj_lora.float()
    out = model(x)
    assert out.dtype == torch.bfloat16
    wide = adapted("bmm", layers=1)(tokens())
    torch.testing.assert_close(out.float(), wide, rtol=0, atol=0.05)
    with torch.autocast("cpu", torch.bfloat16):
        half = adapted("bmm", layers=1)(tokens())
    torch.testing.assert_close(half.float(), wide, rtol=0, atol=0.05)


def test_names_and_what_is_trained():
    model = build()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    names = lora.add_lora(model, ["experts.down_proj"], r=R, layers=[1])
    assert names == ("layers.1.experts.down_proj_lora",)
    names = lora.add_lora(
        model, ["*proj", "q"], r=R, exclude="layers.1.experts.down_proj", rank_pattern={"q": 3}
    )
    assert names == (
        *("layers.0.q", "layers.0.experts.gate_up_proj_lora", "layers.0.experts.down_proj_lora"),
        *("layers.1.q", "layers.1.experts.gate_up_proj_lora"),
    )
    experts = model.layers[1]["experts"]
    assert isinstance(experts, Experts)
    assert experts.down_proj is model.get_parameter("layers.1.experts.down_proj")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"{name}.lora_{half}" for name in lora_layers(model) for half in "AB"}
    assert lora.lora_state_dict(model).keys() == trained
    assert experts.down_proj_lora.lora_A.shape == (EXPERTS * R, INNER)
    assert experts.down_proj_lora.lora_B.shape == (EXPERTS * WIDTH, R)
    groups = lora.parameter_groups(model, lr=1e-3, lora_plus_ratio=4)
    assert [len(group["params"]) for group in groups] == [6, 6]
    assert torch.equal(model(tokens()), restored(before)(tokens()))  # B is zero
    lora.remove_lora(randomised(model))
    assert_same_bits(model.state_dict(), before)
    assert type(experts) is Experts
    assert not experts._modules


class Mixture(nn.Module):
    """As DeepSeek-V3, in which linear layers are called as the experts' stacks; in one layer."""

    def __init__(self):
        super().__init__()
        plain = {"q_proj": nn.Linear(WIDTH, WIDTH), "experts": Experts()}
        shared = nn.ModuleDict({"down_proj": nn.Linear(WIDTH, WIDTH)})
        first = {"q_proj": nn.Linear(WIDTH, WIDTH), "experts": Experts(), "shared": shared}
        self.layers = nn.ModuleList([nn.ModuleDict(first), nn.ModuleDict(plain)])


LINEAR = ("layers.0.shared.down_proj",)
DOWN = tuple(f"layers.{layer}.experts.down_proj_lora" for layer in range(2))
BOTH = tuple(f"layers.{layer}.experts.{name}_lora" for layer in range(2) for name in STACKS)
QUERIES = ("layers.0.q_proj", "layers.1.q_proj")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"targets": "down_proj", "lora_dropout": 0.1}, LINEAR),
        ({"targets": "*_proj", "variant": "dora"}, (*QUERIES, *LINEAR)),
        ({"targets": re.compile(r".*_proj"), "lora_dropout": 0.1}, (*QUERIES, *LINEAR)),
        ({"targets": "experts.down_proj"}, DOWN),
        ({"targets": re.compile(r".*experts\..*")}, BOTH),
        ({"targets": "gate_up_proj"}, BOTH[::2]),
        ({"targets": ["down_proj", "experts.down_proj"]}, (*LINEAR, *DOWN)),
        ({"targets": "experts.*_proj", "exclude": "gate_up_proj"}, DOWN),
        ({"targets": "experts.*_proj", "exclude": "down_proj"}, BOTH[::2]),
        ({"targets": "experts.*_proj", "exclude": [*BOTH[::2]]}, DOWN),
        ({"targets": ["q_proj", "down_proj"], "exclude": ["experts.down_proj"]}, QUERIES + LINEAR),
        ({"targets": "experts.down_proj", "layers": [1]}, DOWN[1:]),
        ({"targets": DOWN}, DOWN),
        ({"targets": "down_proj_lora", "exclude": DOWN[0]}, DOWN[1:]),
    ],
)
def test_a_target_means_stacks_only_where_it_means_no_module(settings, expected):
    names = lora.add_lora(Mixture(), **{"r": R, **settings})
    assert sorted(names) == sorted(expected)


def test_the_names_that_are_returned_are_those_of_another_model():
    names = lora.add_lora(build(), ["q", *STACKS], r=R)
    model = build()
    assert lora.add_lora(model, names, r=R) == names
    with pytest.raises(ValueError, match="has LoRA already"):
        lora.add_lora(model, names[1:2], r=R)


def lora_layers(model):
    return [name for name, m in model.named_modules() if isinstance(m, lora.LoRALayer)]


def restored(state):
    model = build()
    model.load_state_dict(state)
    return model


def test_a_model_that_is_nothing_but_experts():
    experts = Experts()
    assert lora.add_lora(experts, "down_proj", r=R) == ("down_proj_lora",)
    out = randomised(experts)(tokens())
    close(lora.merge(experts)(tokens()), out)
    assert type(experts) is Experts


def test_copies_and_pickles():
    model, x = adapted(), tokens()
    expected, file = model(x), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = copy.deepcopy(model), torch.load(file, weights_only=False)
    for one in (*copies, pickle.loads(pickle.dumps(model))):
        assert torch.equal(one(x), expected)
        nn.init.zeros_(one.layers[0]["experts"].down_proj_lora.lora_B)
        assert not torch.equal(one(x), expected)
        lora.remove_lora(one)
    assert torch.equal(model(x), expected)
    state = model.state_dict()
    again = adapted()
    again.load_state_dict(state)
    assert torch.equal(again(x), expected)


@pytest.mark.parametrize("way", WAYS)
def test_compiled_models_compute_the_same(way):
    model, x = adapted(way), tokens()
    expected = model(x)
    compiled = torch.compile(model, backend="eager")
    close(compiled(x), expected)
    compiled(x).square().sum().backward()
    assert model.layers[0]["experts"].down_proj_lora.lora_A.grad.any()
    close(compiled.eval()(x), expected)


def test_gradient_checkpointing_and_transforms():
    model, x = adapted("bmm"), tokens()
    expected = model(x)
    out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    close(out, expected)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(out.square().sum(), trained.values())

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    for name, grad in zip(trained, grads, strict=True):
        close(torch.func.grad(loss)(trained)[name], grad)
    two = {name: torch.stack([p.detach(), 2 * p.detach()]) for name, p in trained.items()}
    both = torch.func.vmap(loss)(two)
    close(both[0], expected.square().sum())


def test_outside_of_its_forward_the_parameter_is_read():
    """Also by another thread, while the forward runs in this one."""
    seen = []

    class Read(Experts):
        def forward(self, x):
            thread = threading.Thread(target=lambda: seen.append(self.down_proj))
            thread.start()
            thread.join()
            seen.append(self.down_proj)
            seen.append(self.down_proj_lora.frozen_weight)
            return super().forward(x)

    experts = Read()
    parameter = experts.down_proj
    lora.add_lora(experts, "down_proj", r=R)
    experts(tokens())
    assert seen[0] is parameter
    assert isinstance(seen[1], LowRankSum)
    assert seen[2] is experts.down_proj is parameter


def test_tensors_that_stand_in_for_the_parameters():
    """FSDP1 and nn.DataParallel set such ones on modules, or on replicas of them."""
    experts = adapted(layers=1).layers[0]["experts"]
    expected = experts(tokens())
    replica = experts._replicate_for_data_parallel()
    for name, parameter in experts.named_parameters(recurse=False):
        setattr(replica, name, parameter.detach().clone())
    assert torch.equal(replica(tokens()), expected)
    del replica.down_proj
    with pytest.raises(AttributeError, match="no longer has its parameter down_proj"):
        replica(tokens())


def test_a_kernel_is_not_given_a_sum():
    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight[0].mT

    class Fused(Experts):
        def forward(self, x):
            return Kernel.apply(x, self.gate_up_proj)

    experts = Fused()
    lora.add_lora(experts, "gate_up_proj", r=R)
    with pytest.raises(TypeError, match="LowRankSum"):
        experts(tokens().requires_grad_())


def test_no_kernel_gets_the_address_of_the_weight_alone():
    weight, left, right = torch.ones(2, 4, 4), torch.ones(2, 4, 1), torch.ones(2, 1, 4)
    assert LowRankSum(weight, left, right).data_ptr() % 16 == weight.data_ptr() % 16
    elsewhere = LowRankSum(*(each.to("meta") for each in (weight, left, right)))
    with pytest.raises(RuntimeError, match="a kernel asks for the memory of experts"):
        elsewhere.data_ptr()


class Loading:
    """Loads A and B of a layer for its forward alone, and sends what it gives, as hooks do."""

    def __init__(self, layer):
        self.kept = dict(layer._parameters)
        self.empty = {n: nn.Parameter(p.detach().to("meta")) for n, p in self.kept.items()}
        layer._parameters.update(self.empty)
        layer.register_forward_pre_hook(self.load)
        layer.register_forward_hook(self.drop)

    def load(self, layer, args):
        layer._parameters.update(self.kept)

    def drop(self, layer, args, out):
        layer._parameters.update(self.empty)
        return out.to("cpu", non_blocking=False)


@pytest.mark.parametrize("way", WAYS)
def test_updates_that_are_loaded_when_they_are_needed(way):
    model, x = adapted(way), tokens()
    expected = model(x)
    updates = [module for module in model.modules() if isinstance(module, AdaptedStack)]
    hooks = [Loading(update) for update in updates]
    assert torch.equal(model(x), expected)
    assert all(update.lora_A.is_meta for update in updates)
    model(x).square().sum().backward()
    assert all(hook.kept["lora_A"].grad.any() for hook in hooks)
    close(model.eval()(x), expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("half", ["lora_A", "lora_B"])
def test_updates_on_another_device_are_an_error(way, half):
    """Of the meta device PyTorch says nothing: what is computed then has no meaning."""
    model = adapted(way)
    update = model.layers[1]["experts"].down_proj_lora
    setattr(update, half, nn.Parameter(getattr(update, half).to("meta")))
    with pytest.raises(RuntimeError, match="the update of down_proj is on meta, and the weight on"):
        model(tokens())


# ---- adapters ----


KINDS = [
    {},
    {"variant": "rslora", "rank_pattern": {"layers.1.experts.gate_up_proj": 4}},
    {"initialization": "pissa", "alpha_pattern": {"down_proj": 3}},
    {"initialization": "olora"},
    {"initialization": "orthogonal", "freeze_A": True},
]


@pytest.mark.parametrize("is_transposed", [False, True], ids=["out-in", "in-out"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("file", ["adapter.safetensors", "adapter"])
def test_adapters_are_saved_and_loaded(tmp_path, is_transposed, kind, file):
    base, x = build("bmm", is_transposed), tokens()
    plain = base(x)
    lora.add_lora(base, ["down_proj"], r=R, lora_alpha=ALPHA, **pattern(kind, "down"))
    lora.add_lora(base, ["q", "gate_up_proj"], r=R, lora_alpha=ALPHA, **pattern(kind, "gate"))
    close(base(x), plain)
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn(parameter.shape), alpha=0.3)
    expected = base(x)
    assert not torch.allclose(expected, plain, atol=0.01)
    lora.save_adapter(base, tmp_path / file)
    model = build("bmm", is_transposed)
    names = lora.load_adapter(model, tmp_path / file)
    assert set(names) == set(lora_layers(base))
    close(model(x), expected)
    close(model.eval()(x), expected)
    adapter, other = lora.read_adapter(tmp_path / file), build("bmm", is_transposed)
    merge_into(other, adapter)
    close(other(x), expected)
    lora.write_adapter(tmp_path / "again.safetensors", adapter)
    third = build("bmm", is_transposed)
    lora.load_adapter(third, tmp_path / "again.safetensors")
    close(third(x), expected)
    lora.load_adapter(third, tmp_path / "again.safetensors")  # into the layers that it has


def pattern(kind, part):
    """The settings without the patterns that are of other parts."""
    return {
        name: value
        for name, value in kind.items()
        if not isinstance(value, dict) or any(part in key for key in value)
    }


def test_pefts_tensors(tmp_path):
    """The first parameter is wrapped first; of B the columns are the ranks', then the experts'."""
    model = adapted(targets=STACKS, layers=1)
    lora.save_adapter(model, tmp_path / "a")
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    experts, start = model.layers[0]["experts"], "base_model.model.layers.0.experts"
    for place, update in (
        (f"{start}.base_layer", experts.gate_up_proj_lora),
        (start, experts.down_proj_lora),
    ):
        assert torch.equal(tensors.pop(f"{place}.lora_A.weight"), update.lora_A)
        B = tensors.pop(f"{place}.lora_B.weight").view(-1, R, EXPERTS)
        assert torch.equal(B.permute(2, 0, 1).flatten(0, 1), update.lora_B)
    assert not tensors


def as_peft_writes(folder, change=lambda tensors, config: None):
    """A folder without what this project says of itself, and with what a test changes."""
    weights, settings = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors, config = load_file(weights), json.loads(settings.read_text(encoding="utf-8"))
    change(tensors, config)
    save_file(tensors, weights)
    settings.write_text(json.dumps(config), encoding="utf-8")
    return folder


def with_short_names(tensors, config):
    config["target_parameters"] = ["down_proj", "experts.gate_up_proj"]


def of_another_rank(tensors, config):
    config["r"] = 5


def without_outer(tensors, config):
    for name in [name for name in tensors if "layers.1.experts.lora_" in name]:
        del tensors[name]


def without_inner(tensors, config):
    for name in [name for name in tensors if "layers.1.experts.base_layer.lora_" in name]:
        del tensors[name]


def without_any(tensors, config):
    for name in [name for name in tensors if "layers.1.experts." in name]:
        del tensors[name]


def without_half(tensors, config):
    del tensors["base_model.model.layers.1.experts.lora_B.weight"]


def with_names_that_are_none(tensors, config):
    config["target_parameters"] = "experts.*"


@pytest.mark.parametrize("change", [lambda tensors, config: None, with_short_names])
def test_pefts_folders_are_for_a_model(tmp_path, change):
    """Which update is whose depends on the order of a model's parameters."""
    model = adapted(targets=("q", *STACKS))
    lora.save_adapter(model, tmp_path / "a")
    folder = as_peft_writes(tmp_path / "a", change)
    with pytest.raises(
        CheckpointError, match=r"adapts several param.*give it to load_adapter\(model"
    ):
        lora.read_adapter(folder)
    with pytest.raises(CheckpointError, match=r"of layers\.1\.exp.* the model that it was tr"):
        lora.load_adapter(build(layers=1), folder)
    again = build()
    lora.load_adapter(again, folder)
    close(again(tokens()), model(tokens()))


@pytest.mark.parametrize("size", [WIDTH, 4], ids=["square", "wide"])
def test_pefts_lora_on_parameters_of_other_modules_is_not_read(tmp_path, size):
    """PEFT adapts any parameter; what such a module computes with it is unknown here."""

    class Router(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(size, width))

    layers = nn.ModuleDict({"router": nn.Linear(WIDTH, size), "q": nn.Linear(WIDTH, size)})
    lora.add_lora(layers, ["q", "router"], r=R)
    lora.save_adapter(randomised(layers), tmp_path / "a")

    def of_parameters(tensors, config):
        config |= {"target_modules": ["q"], "target_parameters": ["router.weight"]}

    folder = as_peft_writes(tmp_path / "a", of_parameters)
    linear, router = copy.deepcopy(lora.merge(layers)), copy.deepcopy(layers)
    router["router"] = Router(WIDTH)
    assert lora.load_adapter(linear, folder) == ("router", "q")
    for load in (lora.load_adapter, lambda *given: merge_into(given[0], lora.read_adapter(folder))):
        with pytest.raises(
            CheckpointError, match=r"adapts router\.weight, .* Router, which has no LoRA here: "
        ):
            load(router, folder)


@pytest.mark.parametrize("stack", STACKS)
def test_pefts_folders_of_one_stack_are_read_without_a_model(tmp_path, stack):
    model, merged = adapted(targets=("q", stack)), build()
    lora.save_adapter(model, tmp_path / "a")
    merge_into(merged, lora.read_adapter(as_peft_writes(tmp_path / "a")))
    close(merged(tokens()), model(tokens()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (of_another_rank, "which are not several of the rank 5"),
        (without_outer, r"lacks the update of layers\.1\.experts\.down_proj, which adapter_config"),
        (without_inner, r"lacks the update of layers\.1\.experts\.gate_up_proj, which adapter_c"),
        (without_any, r"lacks the update of layers\.1\.experts\.gate_up_proj, which"),
        (without_half, r"lacks layers\.1\.experts\.\w+, the other half|lacks one half of"),
        (with_names_that_are_none, "target_parameters is 'experts"),
    ],
)
def test_damaged_folders_of_pefts_are_refused(tmp_path, change, message):
    lora.save_adapter(adapted(targets=STACKS), tmp_path / "a")
    model = build()
    with pytest.raises(CheckpointError, match=message):
        lora.load_adapter(model, as_peft_writes(tmp_path / "a", change))
    assert not lora_layers(model)


def test_experts_that_are_in_several_places(tmp_path):
    """They have one update, under the first name; PEFT would wrap one place alone."""
    model, other = build(), build()
    for each in (model, other):
        each.layers[1]["experts"] = each.layers[0]["experts"]
    assert lora.add_lora(model, "down_proj", r=R) == ("layers.0.experts.down_proj_lora",)
    lora.save_adapter(randomised(model), tmp_path / "a.safetensors")
    lora.load_adapter(other, tmp_path / "a.safetensors")
    close(other(tokens()), model(tokens()))
    with pytest.raises(CheckpointError, match=r"is layers\.1\.experts as well, of which PEFT"):
        lora.save_adapter(model, tmp_path / "a")


def test_dropout_of_other_modules_is_not_pefts(tmp_path):
    model = adapted(targets=STACKS)
    lora.add_lora(model, "q", r=R, lora_alpha=ALPHA, lora_dropout=0.1)
    for file in ("a", "a.safetensors"):
        said = lora.save_adapter(randomised(model), tmp_path / file)
        assert any("PEFT takes no dropout" in line for line in said) is (file == "a")
        again = build()
        lora.load_adapter(again, tmp_path / file)  # which has our own metadata
        assert again.layers[0]["q"].lora_dropout.p == 0.1
        close(again.eval()(tokens()), model.eval()(tokens()))
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["lora_dropout"] == 0


def test_a_bank_refuses_what_it_cannot_see(tmp_path):
    lora.save_adapter(adapted(), tmp_path / "a.safetensors")
    bank = lora.AdapterBank(build())
    with pytest.raises(CheckpointError, match=r"adapts layers\.0\.experts\.\w+, a stack of matr"):
        bank.add("a", lora.read_adapter(tmp_path / "a.safetensors"))


def other_model(**attributes):
    model = build()
    for layer in model.layers:
        for name, value in attributes.items():
            setattr(layer["experts"], name, value)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (other_model(down_proj=None), r"has no layers\.0\.experts\.down_proj, a stack of matrices"),
        (
            other_model(down_proj=nn.Parameter(torch.zeros(EXPERTS * 2, WIDTH // 2, INNER))),
            r"the delta of layers\.0\.experts\.down_proj_lora is \(3, 8, 16\), the model's weight "
            r"is \(6, 4, 16\)",
        ),
        (build(layers=1), "its base has at least 2 layers, this model 1"),
    ],
    ids=["none", "other shape", "fewer layers"],
)
def test_adapters_of_other_models_are_refused(tmp_path, model, message):
    lora.save_adapter(adapted(), tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=message):
        lora.load_adapter(model, tmp_path / "a.safetensors")
    assert not lora_layers(model)


def test_the_release_has_no_place_for_them(tmp_path):
    with pytest.raises(CheckpointError, match=r"of the stacks .*, which this format cannot record"):
        lora.save_adapter(adapted(), tmp_path / "a.bin")
    torch.save(lora.lora_state_dict(adapted()), tmp_path / "b.bin")
    with pytest.raises(CheckpointError, match="has 3 stacked blocks, and it is unknown which"):
        lora.load_adapter(build(), tmp_path / "b.bin", lora_alpha=ALPHA)


# ---- what is refused ----


def owned_by(kind, **attributes):
    owner = type("Owner", (kind,), attributes)()
    owner.stack = nn.Parameter(torch.randn(2, 4, 4))
    return nn.ModuleDict({"q": nn.Linear(4, 4), "owner": owner})


def with_forward(model):
    model["owner"].forward = lambda x: x
    return model


FORWARD = {"forward": lambda self, x: x @ self.stack}
REFUSED = {
    "dropout": (Model, {"lora_dropout": 0.1}, "update takes no dropout: set lora_dropout to 0, or"),
    "dora": (Model, {"variant": "dora"}, "takes no DoRA: choose another variant, or"),
    "slices": (
        Model,
        {"enable_lora": {"down_proj": [True, False]}},
        "is not a linear layer, whose",
    ),
    "rank": (
        Model,
        {"r": 9},
        r"r = 9 is larger than a dimension of layers.0.experts.down_proj: 8; lower it, or there "
        r"alone: rank_pattern={'down_proj': 8}",
    ),
    "twice": (adapted, {}, "down_proj has LoRA already"),
    "trained": (Model, {"modules_to_train": "experts"}, "cannot be trained as it is while"),
    "no forward": (lambda: owned_by(nn.Module), {"targets": "stack"}, "computes nothing with it"),
    "its own attribute": (
        lambda: owned_by(nn.Module, **FORWARD, stack_lora=1),
        {"targets": "stack"},
        "with an attribute 'stack_lora'",
    ),
    "a forward that was set": (
        lambda: with_forward(owned_by(nn.Module, **FORWARD)),
        {"targets": "stack"},
        "owner has a forward of its own",
    ),
    "the module": (
        Model,
        {"targets": "experts"},
        r"has no LoRA layer: name those within, such as experts\.down_proj, experts\.gate_up_proj",
    ),
    "linear layers that are left out": (
        Mixture,
        {"layers": [1]},
        r"left out, such as layers\.0\.shared\.down_proj: leave it out of targets as well; to "
        r"adapt the stack layers\.1\.experts\.down_proj, give more of its name",
    ),
    "a layer": (Model, {"exclude": "experts"}, r"exclude 'experts' leaves out none of the targets"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_done_is_said(what):
    make, settings, message = REFUSED[what]
    model = make()
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises((ValueError, UnsupportedLayerError), match=message):
        lora.add_lora(model, **{"targets": "down_proj", "r": R, **settings})
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_a_tied_stack_is_adapted_if_it_may_be_untied():
    model = build()
    one, other = (layer["experts"] for layer in model.layers)
    other.down_proj = one.down_proj
    with pytest.raises(ValueError, match=r"shares its weight with layers\.1\.experts"):
        lora.add_lora(model, "layers.0.experts.down_proj", r=R)
    lora.add_lora(model, "layers.0.experts.down_proj", r=R, untie=True)
    lora.merge(randomised(model))
    assert one.down_proj is not other.down_proj


def test_a_failure_half_way_leaves_the_model_as_it_was(monkeypatch):
    model = adapted(targets="gate_up_proj")
    state, classes = model.state_dict(), [type(module) for module in model.modules()]
    add, calls = AdaptedStack._add_update, []

    def fail(self, dtype=None):
        calls.append(self)
        if len(calls) == 2:
            raise MemoryError
        add(self, dtype)

    monkeypatch.setattr(AdaptedStack, "_add_update", fail)
    with pytest.raises(MemoryError):
        lora.add_lora(model, ["q", "down_proj"], r=R)
    assert model.state_dict().keys() == state.keys()
    assert [type(module) for module in model.modules()] == classes
    monkeypatch.undo()
    lora.remove_lora(model)
    assert {type(m) for m in model.modules()} == {type(m) for m in build().modules()}


def test_a_parametrized_stack_is_an_error():
    experts = adapted(layers=1).layers[0]["experts"]
    parametrize.register_parametrization(experts, "down_proj", nn.Identity())
    with pytest.raises(AttributeError, match="no longer has its parameter down_proj"):
        experts(tokens())
    with pytest.raises(ValueError, match="has been parametrized or pruned since it was adapted"):
        lora.remove_lora(experts)


def test_a_forward_that_was_set_is_the_owner_s():
    model = adapted(layers=1)
    experts = model.layers[0]["experts"]
    experts.forward = lambda x: x
    for undo in (lora.merge, lora.remove_lora):
        with pytest.raises(ValueError, match=r"layers\.0\.experts has a forward") as error:
            undo(model)
    expression = re.search(r"\((del .*)\)$", str(error.value))[1]
    exec(expression, {"model": model})
    lora.remove_lora(model)
    assert type(experts) is Experts


def test_models_on_the_meta_device():
    with torch.device("meta"):
        model = Model()
    lora.add_lora(model, STACKS, r=R, initialization="olora")
    model.to_empty(device="cpu")
    model.load_state_dict(build().state_dict(), strict=False)
    lora.start_from_weights(model)
    update = model.layers[0]["experts"].down_proj_lora
    scaling = variant_of("lora").scale(16, R)
    assert update.scaling == scaling
    Q, rows = torch.linalg.qr(model.layers[0]["experts"].down_proj[1])
    close(update.lora_A[R : 2 * R], rows[:R])
    close(update.lora_B[WIDTH : 2 * WIDTH], Q[:, :R])
    close(model(tokens()), build()(tokens()))


def test_sums_that_float16_cannot_hold_are_named(caplog):
    model = adapted(layers=1, targets="down_proj").half()
    nn.init.constant_(model.layers[0]["experts"].down_proj_lora.lora_B, 6e4)
    with caplog.at_level(logging.WARNING):
        lora.merge(model)
    assert "layers.0.experts.down_proj: the merged weight is too large" in caplog.text
