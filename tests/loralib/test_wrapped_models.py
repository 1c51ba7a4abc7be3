"""Models in wrappers, and modules that are called as a wrapper calls its own."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from compare import assert_same_bits
from small_nets import Net, bank_of, close, drawn
from torch import nn
from torch.optim.swa_utils import AveragedModel

import loralib as lora
from loralib.errors import NeedsMergingError
from loralib.wrappers import unwrapped


class NamedModule(nn.Module):
    """A model with a part called `module`, as DDP calls a whole model, beside one of its names."""

    def __init__(self):
        super().__init__()
        self.lin, self.module = nn.Linear(4, 4), nn.ModuleDict({"lin": nn.Linear(4, 4)})

    def forward(self, x):
        return self.module["lin"](torch.tanh(self.lin(x)))


@pytest.mark.parametrize("name", ["a.safetensors", "a"])
@pytest.mark.parametrize("target", ["module.lin", "lin"])
@torch.no_grad()
def test_a_part_called_module_is_no_wrapper(tmp_path, name, target):
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


def test_where_a_part_called_module_cannot_be_told_from_a_wrapper(tmp_path):
    model = drawn(NamedModule(), ["module.lin"])
    with pytest.raises(NeedsMergingError, match=r"'module.', which readers of this format take"):
        lora.save_adapter(model, tmp_path / "a.bin")


def test_a_file_of_a_wrapped_model_is_of_the_model(tmp_path):
    model = drawn(Net(), ["a"])
    state = {f"module.{n}": tensor for n, tensor in lora.lora_state_dict(model).items()}
    torch.save(state, tmp_path / "a.bin")
    read = lora.read_adapter(tmp_path / "a.bin", lora_alpha=16)
    assert_same_bits(read.tensors, lora.lora_state_dict(model))


@pytest.mark.parametrize("wrap", [nn.DataParallel, AveragedModel, torch.compile])
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
    close(replica(x), base.a(x))
    lora.AdapterBank(pickle.loads(pickle.dumps(base)))


@pytest.mark.parametrize("way", ["outside", "in place", "another one of its class"])
@torch.no_grad()
def test_a_bank_for_a_model_that_was_compiled_and_run(tmp_path, way):
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
