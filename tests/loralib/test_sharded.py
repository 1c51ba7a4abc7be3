"""Models whose parameters are sharded: refused where they have to be whole, gathered, started."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import loralib as lora


@pytest.fixture
def mesh(monkeypatch):
    """Of one process: its part of each parameter is all of it."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def adapted(model, **settings):
    lora.add_lora(model, ["0", "2"], r=2, **settings)
    for layer in (model[0], model[2]):
        nn.init.normal_(layer.lora_B)
    return model


def fsdp_1(model, mesh):
    cpu = torch.device("cpu")
    for index in (0, 2):
        model[index] = FullyShardedDataParallel(model[index], use_orig_params=True, device_id=cpu)
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=cpu)


def fsdp_2(model, mesh):
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model, mesh):
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


WAYS = [fsdp_1, fsdp_2, tensor_parallel]


@pytest.mark.parametrize("shard", WAYS)
def test_what_needs_whole_parameters_is_refused(tmp_path, mesh, shard):
    lora.save_adapter(adapted(net()), tmp_path / "a")
    # Tensor parallelism comes before LoRA.
    is_first = shard is tensor_parallel
    model = adapted(shard(net(), mesh)) if is_first else shard(adapted(net()), mesh)
    for refused in (
        lambda: lora.save_adapter(model, tmp_path / "b"),
        lambda: lora.save_adapter(model, tmp_path / "b.safetensors"),
        lambda: lora.load_adapter(model, tmp_path / "a"),
        lambda: lora.load_adapter(shard(net(), mesh), tmp_path / "a"),
        lambda: lora.merge(model),
        lambda: lora.remove_lora(model),
        lambda: lora.AdapterBank(shard(net(), mesh)),
    ):
        with pytest.raises(ValueError, match="is sharded over several processes: gather the model"):
            refused()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("shard", [fsdp_1, fsdp_2])
@torch.no_grad()
def test_a_sharded_model_is_gathered_into_a_plain_one(tmp_path, mesh, shard):
    model, x = adapted(net()), torch.randn(3, 8)
    expected = model(x)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(shard(model, mesh), options=options)
    plain = net()
    lora.add_lora(plain, ["0", "2"], r=2)
    plain.load_state_dict(state)
    lora.save_adapter(plain, tmp_path / "a")
    again = net()
    lora.load_adapter(again, tmp_path / "a")
    torch.testing.assert_close(again(x), expected)


@pytest.mark.parametrize("variant", ["lora", "dora"])
@torch.no_grad()
def test_a_model_that_is_sharded_before_it_has_memory(mesh, variant):
    x = torch.randn(3, 8)
    with torch.device("meta"):
        model = net()
    lora.add_lora(model, ["0", "2"], r=2, variant=variant)
    model = fsdp_2(model, mesh)
    model.to_empty(device="cpu")
    for name, parameter in net().named_parameters():
        model.get_parameter(name).to_local().copy_(parameter)
    for layer in (model[0], model[2]):
        layer.lora_A.fill_(torch.nan)
    lora.start_from_weights(model)
    torch.testing.assert_close(model(x), net()(x))


@pytest.mark.parametrize("initialization", ["pissa", "olora", "orthogonal"])
def test_factors_that_are_made_together_need_whole_tensors(mesh, initialization):
    with torch.device("meta"):
        model = net()
    lora.add_lora(model, ["0", "2"], r=2, initialization=initialization)
    model = fsdp_2(model, mesh)
    model.to_empty(device="cpu")
    with pytest.raises(
        ValueError, match=f"the initialization {initialization} needs whole tensors"
    ):
        lora.start_from_weights(model)
