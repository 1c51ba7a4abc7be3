"""Tests of wrapped models, and of models with a submodule called `module`, as in a wrapper."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from compare import assert_same_bits
from small_nets import Net, bank_of, close, drawn
from stacked_experts import adapted, randomised, tokens
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.optim.swa_utils import AveragedModel

import loralib as lora
from loralib.adapted_layers import AdaptedProjection
from loralib.errors import CheckpointError, NeedsMergingError
from loralib.training.ddp import AveragedAfterwards
from loralib.wrappers import unwrapped


class NamedModule(nn.Module):
    """A model with a submodule called `module`, as in DDP, and `lin` inside and outside of it."""

    def __init__(self):
        super().__init__()
        self.lin, self.module = nn.Linear(4, 4), nn.ModuleDict({"lin": nn.Linear(4, 4)})

    def forward(self, x):
        return self.module["lin"](torch.tanh(self.lin(x)))


@pytest.mark.parametrize("name", ["a.safetensors", "a"])
@pytest.mark.parametrize("target", ["module.lin", "lin"])
@torch.no_grad()
def test_a_submodule_called_module_is_not_taken_for_a_wrapper(tmp_path, name, target):
    base, x = NamedModule().eval(), torch.randn(2, 4)
    model = drawn(base, [target])
    lora.save_adapter(model, tmp_path / name)
    plain = copy.deepcopy(base)
    assert lora.load_adapter(plain, tmp_path / name) == tuple(
        name for name, _ in base.named_modules() if name.endswith(target)
    )
    close(plain.eval()(x), model(x))
    with bank_of(base, tmp_path / name).use("a0"):
        close(base(x), model(x))


def test_a_submodule_called_module_is_refused_by_formats_that_take_it_for_a_wrapper(tmp_path):
    model = drawn(NamedModule(), ["module.lin"])
    with pytest.raises(NeedsMergingError, match=r"'module.', which readers of this format take"):
        lora.save_adapter(model, tmp_path / "a.bin")


def test_a_file_of_a_wrapped_model_is_read_with_the_model_s_names(tmp_path):
    model = drawn(Net(), ["a"])
    state = {f"module.{n}": tensor for n, tensor in lora.lora_state_dict(model).items()}
    torch.save(state, tmp_path / "a.bin")
    read = lora.read_adapter(tmp_path / "a.bin", lora_alpha=16)
    assert_same_bits(read.tensors, lora.lora_state_dict(model))


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, AveragedAfterwards, AveragedModel, torch.compile]
)
@pytest.mark.parametrize("name", ["a.safetensors", "a"])
@torch.no_grad()
def test_wrapped_models_are_saved_loaded_and_served(tmp_path, wrap, name):
    base, x = Net().eval(), torch.randn(2, 6)
    model = drawn(base, ["a"])
    lora.save_adapter(wrap(model), tmp_path / name)
    again, served = wrap(drawn(base, ["a"])), wrap(copy.deepcopy(base))
    assert lora.load_adapter(again, tmp_path / name) == ("a",)
    close(unwrapped(again).eval()(x), model(x))
    with pytest.raises(ValueError, match="is wrapped or compiled already"):
        lora.load_adapter(served, tmp_path / name)
    if wrap is nn.DataParallel:
        with pytest.raises(ValueError, match="DataParallel computes in its own threads"):
            lora.AdapterBank(served)
        served = unwrapped(served)
    with bank_of(served, tmp_path / name).use("a0"):
        close(unwrapped(served).eval()(x), model(x))


class Hiding(nn.Module):
    """Whose state dict has the names of the model inside, as Lightning Fabric's has."""

    def __init__(self, model):
        super().__init__()
        self._original_module = model

    def state_dict(self, *args, **kwargs):
        return self._original_module.state_dict(*args, **kwargs)


class _FabricModule(Hiding):
    """Lightning Fabric's is known by its name."""


class Copying(Net):
    """Whose state dict holds copies, as one that is moved to another device does."""

    def state_dict(self, *args, **kwargs):
        return {name: t.clone() for name, t in super().state_dict(*args, **kwargs).items()}


@pytest.mark.parametrize("name", ["a.safetensors", "a"])
def test_a_state_dict_of_other_names_or_of_copies_loses_nothing(tmp_path, name):
    base, x = Copying().eval(), torch.randn(2, 6)
    model = drawn(base, ["a"], modules_to_train=["b"])
    nn.init.normal_(model.b.weight)
    message = "of Hiding has other names than its modules: it lacks _original_module.a.lora_A"
    with pytest.raises(CheckpointError, match=message):
        lora.save_adapter(Hiding(model), tmp_path / name)
    lora.save_adapter(_FabricModule(model), tmp_path / name)
    lora.load_adapter(base, tmp_path / name)
    close(base(x), model.eval()(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("r", [2, 0])
def test_a_model_is_scripted_after_it_is_merged(r):
    model, x = nn.Sequential(lora.Linear(6, 4, r=r)), torch.randn(2, 6)
    model[0].lora_B = nn.Parameter(torch.randn(4, r))
    with pytest.raises(ValueError, match=r"give it lora\.merge\(copy\.deepcopy\(model\)\)"):
        torch.jit.script(model)
    close(torch.jit.script(lora.merge(copy.deepcopy(model)))(x), model(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(1, 6))])
def test_a_scripted_model_is_refused_with_one_line(tmp_path, make):
    lora.save_adapter(drawn(Net(), ["a"]), tmp_path / "a")
    model = make(Net())
    for attempt in (
        lambda: lora.add_lora(model, "a"),
        lambda: lora.load_adapter(model, tmp_path / "a"),
        lambda: lora.AdapterBank(model),
    ):
        with pytest.raises(ValueError, match=r"is scripted or traced .*: give the model that it"):
            attempt()


@torch.no_grad()
def test_a_bank_refuses_the_replicas_of_its_model(tmp_path):
    """`nn.DataParallel` makes them, with the model's hooks, and calls them in other threads."""
    base, x = Net().eval(), torch.randn(2, 6)
    lora.save_adapter(drawn(base, ["a"]), tmp_path / "a")
    bank, replica = bank_of(base, tmp_path / "a"), base.a._replicate_for_data_parallel()
    replica.weight, replica.bias = base.a.weight.detach(), base.a.bias.detach()
    with bank.use("a0"), ThreadPoolExecutor() as pool:
        with pytest.raises(ValueError, match="DataParallel computes in its own threads"):
            pool.submit(replica, x).result()
        copied = copy.deepcopy(base)
        replica_of_copy = copied.a._replicate_for_data_parallel()
        replica_of_copy.weight, replica_of_copy.bias = replica.weight, replica.bias
        pool.submit(replica_of_copy, x).result()
    with pytest.raises(KeyError), bank.use("a0"):
        raise KeyError  # it ends the block as well
    close(replica(x), base.a(x))
    lora.AdapterBank(pickle.loads(pickle.dumps(base)))


@pytest.mark.parametrize("way", ["outside", "in place", "another one of its class"])
@torch.no_grad()
def test_a_bank_on_a_model_that_was_compiled_and_run_before(tmp_path, way):
    base, x = Net().eval(), torch.randn(2, 6)
    model, run = drawn(base, ["a"]), base
    plain = model(x), base(x)
    lora.save_adapter(model, tmp_path / "a")
    if way == "in place":
        base.compile(backend="eager")
    else:
        run = torch.compile(base, backend="eager")
    (torch.compile(Net(), backend="eager") if way.startswith("another") else run)(x)
    bank = bank_of(base, tmp_path / "a")
    with bank.use("a0"):
        close(run(x), plain[0])
    close(run(x), plain[1])


class Attends(nn.Module):
    def __init__(self, **sizes):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **sizes)
        self.last = nn.Linear(8, 8)

    def forward(self, x):
        x = x.view(3, -1, 8)
        other = x[..., : self.attention.kdim]
        return self.last(self.attention(x, other, other)[0])


def attends(**sizes):
    torch.manual_seed(0)
    model = Attends(**sizes)
    # A moderate update, because softmax amplifies the rounding of large scores.
    lora.add_lora(model, ["attention", "last"], r=2, lora_alpha=2)
    return randomised(model)


class OwnWrapper(nn.Module):
    """A user's own wrapper."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)

    def __getattr__(self, name):
        own = super().__getattr__
        return own(name) if name in self._modules else getattr(own("module"), name)


def with_wrapped(model, wrap):
    """The model, whose submodules with updates for the module around them are wrapped."""
    for owner in list(model.modules()):
        for name, child in owner._modules.items():
            if isinstance(child, AdaptedProjection) or name == "out_proj":
                owner._modules[name] = wrap(child)
    return model


def compiled_in_place(module):
    module.compile(backend="eager")
    return module


def checkpointed(model, **settings):
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=partial(checkpoint_wrapper, **settings)
    )
    return model


OF_MODELS = {
    "checkpoints": checkpointed,
    "reentrant checkpoints": partial(checkpointed, checkpoint_impl=CheckpointImpl.REENTRANT),
    "compiled": partial(with_wrapped, wrap=partial(torch.compile, backend="eager")),
    "compiled in place": partial(with_wrapped, wrap=compiled_in_place),
    "another": partial(with_wrapped, wrap=OwnWrapper),
}
WITHIN = {
    "experts": adapted,
    "experts in one product": partial(adapted, "bmm", True),
    "attention": attends,
    "attention of several sizes": partial(attends, kdim=4, vdim=4),
}


@pytest.mark.parametrize("wrap", OF_MODELS)
@pytest.mark.parametrize("make", WITHIN)
def test_updates_may_be_wrapped_apart_from_the_module_that_computes_with_them(make, wrap):
    """Otherwise, modules would compute without their updates, which would get no gradients."""
    model, x = WITHIN[make](), tokens().requires_grad_()
    expected = model(x)
    expected.square().sum().backward()
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    wrapped = OF_MODELS[wrap](WITHIN[make]())
    if "attention" in make and wrap == "another":
        with pytest.raises(RuntimeError, match="is wrapped or sharded apart from it, which co"):
            wrapped(x)
        return
    out = wrapped(x)
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    found = [p.grad for p in wrapped.parameters() if p.requires_grad]
    torch.testing.assert_close(found, grads, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(wrapped.eval()(x), expected)
    torch.testing.assert_close(lora.merge(wrapped)(x), expected)


def test_an_attention_s_plain_out_proj_may_be_in_any_wrapper():
    model = nn.ModuleDict({"a": nn.MultiheadAttention(8, 2)})
    lora.add_lora(model, "a", exclude="out_proj", r=2)
    x = torch.randn(3, 8)
    expected, _ = randomised(model)["a"](x, x, x)
    model["a"].out_proj = OwnWrapper(model["a"].out_proj)
    torch.testing.assert_close(model["a"](x, x, x)[0], expected)
