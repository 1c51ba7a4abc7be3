"""Tests of LoRA on stacks of matrices, compared with whole weights in float64."""

import abc
import copy
import inspect
import io
import logging
import pickle
import re
import threading
from typing import Any, Generic, TypeVar

import pytest
import torch
import torch.nn.functional as F
from compare import assert_same_bits
from stacked_experts import (
    ALPHA,
    EXPERTS,
    FORWARD,
    IDS,
    INNER,
    METHODS,
    STACKS,
    WIDTH,
    Experts,
    Mixture,
    Model,
    R,
    adapted,
    build,
    close,
    lora_layers,
    owned_by,
    randomised,
    tokens,
    with_sums,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.utils.checkpoint import checkpoint

import loralib as lora
from loralib.errors import UnsupportedLayerError
from loralib.experts import AdaptedStack
from loralib.functional import variant_of
from loralib.nn.low_rank_sum import LowRankSum

T = TypeVar("T")


@pytest.mark.parametrize("is_transposed", [False, True], ids=["out-in", "in-out"])
@pytest.mark.parametrize("way", METHODS)
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
@pytest.mark.parametrize("way", METHODS)
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


OPERATIONS = {
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
    "of another dtype by keyword": lambda w, x: x.double() @ w.to(dtype=torch.float64)[0].mT,
    "concatenated": lambda w, x: torch.cat([w, w]),
    "chunks": lambda w, x: w[2].chunk(2)[1],
    "a baddbmm": lambda w, x: torch.baddbmm(x.new_zeros(1), x.expand(EXPERTS, -1, -1), w.mT),
    "some of the matrices": lambda w, x: x @ w[1:].mT,
    "each": lambda w, x: torch.stack([F.linear(x, each) for each in w]),
    "its own matrices": lambda w, x: w.mT @ w,
    "from the left": lambda w, x: w @ x[:WIDTH],
    "its sum": lambda w, x: w.sum(-1) + w.mean() + torch.sum(w),
    "its sum by keywords": lambda w, x: torch.sum(input=w, dim=-1, keepdim=True),
    "an index": lambda w, x: 1 - w[0].sum(),
    "divided": lambda w, x: 1 / (w.square() + 1) + w / 2,
    "powers": lambda w, x: 2**w + w**2,
    "from the right": lambda w, x: x @ w.mT,
    "its absolute values": lambda w, x: abs(w) + +w - -w,
    "compared": lambda w, x: torch.where((w > 0) & (w <= 1) & (w != 0.5), w * 2, 0),
    "compared from the left": lambda w, x: (x.new_zeros(()) < w) * w,
    "sizes": lambda w, x: torch.tensor([*w.shape, w.size(1), w.dim(), len(w), w.ndim]).to(w.dtype),
}


def test_autocast_does_not_change_the_precision_of_the_sum():
    parts = torch.randn(2, 4, 4), torch.randn(2, 4, 1), torch.randn(2, 1, 4)
    whole = LowRankSum(*parts).tensor
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(LowRankSum(*parts).tensor, whole)


def test_experts_may_be_called_by_keywords():
    layer = adapted(layers=1).layers[0]["experts"]
    assert torch.equal(layer(x=tokens()), layer(tokens()))


def test_experts_called_within_another_s_forward_read_their_own_updates():
    class Inner(Experts):
        def forward(self, x, outer):
            return x @ self.gate_up_proj[0].mT @ outer()

    class Outer(Experts):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner(x, lambda: self.gate_up_proj[1])

    outer = Outer()
    lora.add_lora(outer, "gate_up_proj", r=R)
    out = randomised(outer)(tokens())
    out.sum().backward()
    assert all(each.gate_up_proj_lora.lora_A.grad.any() for each in (outer, outer.inner))
    close(lora.merge(copy.deepcopy(outer))(tokens()), out)


def test_reading_under_no_grad_does_not_stop_later_gradients():
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


@pytest.mark.parametrize("what", OPERATIONS)
def test_other_operations_of_a_forward_compute_with_the_sum(what):
    class Other(Experts):
        def forward(self, x):
            return OPERATIONS[what](self.gate_up_proj, x)

    layer = Other()
    lora.add_lora(nn.ModuleDict({"experts": layer}), "gate_up_proj", r=R, lora_alpha=ALPHA)
    plain, factors = with_sums(randomised(layer))
    out, expected = layer(tokens()), OPERATIONS[what](plain.gate_up_proj, tokens().double())
    close(out, expected)
    if expected.requires_grad:
        out.square().sum().backward()
        expected.square().sum().backward()
        close(layer.gate_up_proj_lora.lora_A.grad, factors["gate_up_proj"][0].grad.flatten(0, 1))


def test_operators_work_as_on_a_tensor():
    """Including those whose results can jump between close operands, and `bool`, which fails."""
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


def test_a_base_in_half_precision_computes_with_its_updates():
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


class Abstract(abc.ABC, nn.Module):
    """Has another base before PyTorch's, as attentions of TransformerLens have."""


class Typed(Generic[T], nn.Module):
    pass


class OfAbstract(Experts, Abstract):
    pass


class AbstractFirst(Abstract, Experts):
    pass


class TypedFirst(Typed[int], Experts):
    pass


@pytest.mark.parametrize("kind", [OfAbstract, AbstractFirst, TypedFirst])
def test_a_module_of_a_class_with_other_bases(kind):
    """Python lets a module's class change only to one with the same memory layout."""
    layer, x = kind(), tokens()
    lora.add_lora(layer, STACKS, r=R, lora_alpha=ALPHA)
    randomised(layer)
    expected = layer(x)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(copied) is type(layer)
        assert torch.equal(copied(x), expected)
    close(lora.merge(copy.deepcopy(layer))(x), expected)
    lora.remove_lora(layer)
    assert type(layer) is kind


def test_copies_and_pickles():
    model, x = adapted(), tokens()
    expected, file = model(x), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = copy.deepcopy(model), torch.load(file, weights_only=False)
    pickled = (pickle.dumps(model, protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1))
    for one in (*copies, *map(pickle.loads, pickled)):
        assert torch.equal(one(x), expected)
        nn.init.zeros_(one.layers[0]["experts"].down_proj_lora.lora_B)
        assert not torch.equal(one(x), expected)
        lora.remove_lora(one)
    assert torch.equal(model(x), expected)
    state = model.state_dict()
    again = adapted()
    again.load_state_dict(state)
    assert torch.equal(again(x), expected)


@pytest.mark.parametrize("way", METHODS)
def test_compiled_models_compute_the_same(way):
    model, x = adapted(way), tokens()
    expected = model(x)
    compiled = torch.compile(model, backend="eager")
    close(compiled(x), expected)
    compiled(x).square().sum().backward()
    assert model.layers[0]["experts"].down_proj_lora.lora_A.grad.any()
    close(compiled.eval()(x), expected)


def test_a_full_graph_is_refused_with_what_to_do_instead():
    torch.compiler.reset()  # code compiled before, with graph breaks, would be used
    model, x = adapted("bmm"), tokens()
    expected = model(x)
    message = r"experts have LoRA: compile without fullgraph=True, or call lora\.merge first"
    with pytest.raises(RuntimeError, match=message):
        torch.compile(model, backend="eager", fullgraph=True)(x)
    close(torch.compile(model, backend="eager")(x), expected)
    close(torch.compile(lora.merge(model), backend="eager", fullgraph=True)(x), expected)


def test_gradient_checkpointing_and_transforms():
    model, x = adapted("bmm"), tokens()
    expected = model(x)
    out = checkpoint(model, x, use_reentrant=False)
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


def test_outside_of_the_forward_reading_gives_the_frozen_parameter():
    """In another thread too, while the forward runs in this one."""
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


def test_a_forward_uses_tensors_that_are_set_in_place_of_its_parameters():
    """FSDP1 sets such tensors on modules, nn.DataParallel on replicas of them."""
    experts = adapted(layers=1).layers[0]["experts"]
    expected = experts(tokens())
    replica = experts._replicate_for_data_parallel()
    for name, parameter in experts.named_parameters(recurse=False):
        setattr(replica, name, parameter.detach().clone())
    assert torch.equal(replica(tokens()), expected)
    del replica.down_proj
    with pytest.raises(AttributeError, match="no longer has its parameter down_proj"):
        replica(tokens())


class Saves(torch.autograd.Function):
    """Saves the weight for backward, as functions with their own kernels do."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x.clone()


class Keeps(torch.autograd.Function):
    """x Wᵀ, with a gradient of the weight where one is needed."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x @ weight.mT

    @staticmethod
    def backward(ctx, grad):
        of_weight = grad.mT @ ctx.saved_tensors[0] if ctx.needs_input_grad[1] else None
        return grad @ ctx.weight, of_weight


def checkpointed(x, weight):
    return checkpoint(lambda x: x @ weight.mT, x, use_reentrant=True)


def fused(compute):
    class Fused(Experts):
        def forward(self, x):
            with torch.inference_mode():
                self.largest = self.gate_up_proj[0].abs().max()
            return compute(x, self.gate_up_proj[0])

    experts = Fused()
    lora.add_lora(experts, "gate_up_proj", r=R)
    return randomised(experts)


@pytest.mark.parametrize(
    ("compute", "kind", "message"),
    [
        (Saves.apply, TypeError, "LowRankSum"),
        (Keeps.apply, RuntimeError, "an autograd.Function computes with experts that have LoRA, "),
        (lambda x, w: Keeps.apply(x, w.mT.mT), RuntimeError, "would get no gradients: choose"),
        (
            checkpointed,
            RuntimeError,
            "checkpoint the module as a whole, if this is a checkpoint within",
        ),
    ],
    ids=["saves", "keeps", "keeps the transposed", "checkpoint"],
)
def test_a_function_that_would_give_the_update_no_gradients_is_an_error(compute, kind, message):
    experts, x = fused(compute), tokens().requires_grad_()
    with pytest.raises(kind, match=message):
        experts(x)


class Records(torch.autograd.Function):
    """x Wᵀ, whose gradient of the weight comes from autograd within the function."""

    @staticmethod
    def forward(ctx, x, weight):
        with torch.enable_grad():
            ctx.out = x.detach() @ weight.mT
        return ctx.out.detach()

    @staticmethod
    def backward(ctx, grad):
        ctx.out.backward(grad)
        return grad.new_zeros(len(grad), WIDTH), None


def test_a_function_that_records_with_autograd_inside_gives_gradients():
    one, other = fused(Records.apply), fused(F.linear)
    for experts in (one, other):
        experts(tokens().requires_grad_()).sum().backward()
    close(one.gate_up_proj_lora.lora_A.grad, other.gate_up_proj_lora.lora_A.grad)
    assert other.gate_up_proj_lora.lora_A.grad.any()


@pytest.mark.parametrize("compute", [Keeps.apply, checkpointed], ids=["function", "checkpoint"])
def test_a_function_may_compute_with_updates_that_are_not_trained(compute):
    experts, x = fused(compute), tokens().requires_grad_()
    expected = tokens() @ lora.merge(copy.deepcopy(experts)).gate_up_proj[0].mT
    with torch.no_grad():
        close(experts(x), expected)
    with torch.inference_mode():
        close(experts(x), expected)
    frozen = experts.requires_grad_(False)(x)
    close(frozen, expected)
    frozen.sum().backward()
    assert x.grad.any()


def test_a_reentrant_checkpoint_of_the_module():
    model, x = adapted("bmm"), tokens().requires_grad_()
    model(x).square().sum().backward()
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    checkpoint(model, x, use_reentrant=True).square().sum().backward()
    for p, grad in zip((p for p in model.parameters() if p.requires_grad), grads, strict=True):
        close(p.grad, grad)


def test_data_ptr_shows_the_alignment_on_a_cpu_and_is_an_error_elsewhere():
    weight, left, right = torch.ones(2, 4, 4), torch.ones(2, 4, 1), torch.ones(2, 1, 4)
    assert LowRankSum(weight, left, right).data_ptr() % 16 == weight.data_ptr() % 16
    elsewhere = LowRankSum(*(each.to("meta") for each in (weight, left, right)))
    with pytest.raises(RuntimeError, match="a kernel asks for the memory of experts"):
        elsewhere.data_ptr()


class Loading:
    """Loads A and B of a layer only during its forward, and moves its outputs, as hooks do."""

    def __init__(self, layer):
        self.loaded = dict(layer._parameters)
        self.empty = {n: nn.Parameter(p.detach().to("meta")) for n, p in self.loaded.items()}
        layer._parameters.update(self.empty)
        layer.register_forward_pre_hook(self.load)
        layer.register_forward_hook(self.drop)

    def load(self, layer, args):
        layer._parameters.update(self.loaded)

    def drop(self, layer, args, out):
        layer._parameters.update(self.empty)
        return tuple(each.to("cpu", non_blocking=False) for each in out)


@pytest.mark.parametrize("way", METHODS)
def test_updates_may_be_loaded_by_hooks_for_each_forward(way):
    model, x = adapted(way), tokens()
    expected = model(x)
    updates = [module for module in model.modules() if isinstance(module, AdaptedStack)]
    hooks = [Loading(update) for update in updates]
    assert torch.equal(model(x), expected)
    assert all(update.lora_A.is_meta for update in updates)
    model(x).square().sum().backward()
    assert all(hook.loaded["lora_A"].grad.any() for hook in hooks)
    close(model.eval()(x), expected)


@pytest.mark.parametrize("way", METHODS)
@pytest.mark.parametrize("half", ["lora_A", "lora_B"])
def test_updates_on_another_device_are_an_error(way, half):
    """PyTorch raises no error for the meta device, where results would be meaningless."""
    model = adapted(way)
    update = model.layers[1]["experts"].down_proj_lora
    setattr(update, half, nn.Parameter(getattr(update, half).to("meta")))
    with pytest.raises(RuntimeError, match="the update of down_proj is on meta, and the weight on"):
        model(tokens())


# ---- what is refused ----


def with_forward(model):
    model["owner"].forward = lambda x: x
    return model


def with_complex_stack():
    model = owned_by(nn.Module, **FORWARD)
    model["owner"].stack = nn.Parameter(torch.ones(2, 4, 4, dtype=torch.complex64))
    return model


REFUSED = {
    "dropout": (
        Model,
        {"lora_dropout": 0.1},
        "update cannot have dropout: set lora_dropout to 0, or",
    ),
    "dora": (Model, {"variant": "dora"}, "cannot have DoRA: choose another variant, or"),
    "slices": (
        Model,
        {"enable_lora": {"down_proj": [True, False]}},
        "is not a linear layer, so",
    ),
    "rank": (
        Model,
        {"r": 9},
        r"r = 9 is too large for layers.0.experts.down_proj, .* 8; lower it, or "
        r"give rank_pattern={'down_proj': 8}",
    ),
    "rank of the inputs": (
        Model,
        {"targets": "gate_up_proj", "r": 9},
        r"r = 9 is too large for layers.0.experts.gate_up_proj, .* 8; lower it",
    ),
    "complex": (with_complex_stack, {"targets": "stack"}, "owner.stack has complex weights"),
    "twice": (adapted, {}, "down_proj has LoRA already"),
    "trained": (Model, {"modules_to_train": "experts"}, "cannot be trained as a whole: "),
    "no forward": (
        lambda: owned_by(nn.Module),
        {"targets": "stack"},
        "where LoRA for a parameter has no effect",
    ),
    "a kernel": (
        lambda: nn.ModuleDict({"q": nn.Linear(4, 4), "conv": nn.Conv1d(4, 4, 3)}),
        {"targets": "conv.weight"},
        r"'conv\.weight' matches no module",
    ),
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
        r"has no LoRA layer: name layers inside it, such as experts\.down_proj, experts\.gate_up",
    ),
    "linear layers that are left out": (
        Mixture,
        {"layers": [1]},
        r"left out, such as layers\.0\.shared\.down_proj: leave it out of targets as well; to "
        r"mean the stack layers\.1\.experts\.down_proj, give 'experts\.down_proj'$",
    ),
    "a layer": (Model, {"exclude": "experts"}, r"exclude 'experts' matches none of the targets"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_adapted_is_refused_and_the_model_is_unchanged(what):
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


@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize("before", [(), ("gate_up_proj",)], ids=["plain", "adapted"])
def test_a_failure_halfway_leaves_the_model_as_it_was(monkeypatch, before, call):
    model, x = adapted(targets=["q", *before], layers=3), tokens()
    if before:
        apply_activation_checkpointing(model)
    state, classes = model.state_dict(), [type(module) for module in model.modules()]
    expected, add, calls = model(x), AdaptedStack._add_update, []

    def fail(self, dtype=None):
        calls.append(self)
        if len(calls) == call:
            raise MemoryError
        add(self, dtype)

    monkeypatch.setattr(AdaptedStack, "_add_update", fail)
    with pytest.raises(MemoryError):
        lora.add_lora(model, "down_proj", r=R)
    assert model.state_dict().keys() == state.keys()
    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(model(x), expected)
    monkeypatch.undo()
    lora.remove_lora(model)
    assert {type(m) for m in build().modules()} <= {type(m) for m in model.modules()}
    assert not any("Adapted" in type(m).__name__ for m in model.modules())


def test_a_stack_that_is_registered_after_others_were_adapted_can_be_adapted():
    class Growing(Experts):
        def forward(self, x):
            return super().forward(x) + x @ self.late[1]

    experts = Growing()
    lora.add_lora(experts, "down_proj", r=R)
    experts.late = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
    assert lora.add_lora(experts, "late", r=R) == ("late_lora",)
    out = randomised(experts)(tokens())
    out.sum().backward()
    assert all(getattr(experts, f"{n}_lora").lora_A.grad.any() for n in ("down_proj", "late"))
    close(lora.merge(copy.deepcopy(experts))(tokens()), out)
    lora.remove_lora(experts)
    assert type(experts) is Growing


def test_the_forward_keeps_its_signature_source_and_docstring():
    """Hugging Face's Trainer drops dataset columns that the signature does not name."""
    experts = Experts()
    signature, source = inspect.signature(experts.forward), inspect.getsource(experts.forward)
    lora.add_lora(experts, "down_proj", r=R)
    assert inspect.signature(experts.forward) == signature
    assert inspect.getsource(experts.forward) == source
    assert experts.forward.__doc__ == Experts.forward.__doc__


def test_experts_in_evaluation_mode_get_updates_in_evaluation_mode():
    model = build().eval()
    lora.add_lora(model, STACKS, r=R)
    assert not any(module.training for module in model.modules())
    assert lora_layers(model)


def test_repr_shows_an_extra_repr_that_was_set_on_experts():
    experts = Experts()
    experts.extra_repr = lambda: "set"
    lora.add_lora(experts, "gate_up_proj", r=R)
    assert "(set" in repr(experts).replace("\n  ", "")
    lora.remove_lora(experts)
    assert repr(experts) == "Experts(set)"


def test_a_forward_that_was_set_has_to_be_deleted_before_merging():
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


def test_models_on_the_meta_device_can_be_adapted_and_loaded_later():
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
