"""Tests of sharded models: training, gathering, loading, and errors where tensors must be whole."""

import copy
import subprocess
from functools import partial

import pytest
import torch
from launches import preloaded_python
from paths import ROOT
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import loralib as lora
from loralib.adapted_layers import AdaptedProjection as Projection
from loralib.errors import CheckpointError, UnsupportedLayerError
from loralib.nn.products import gradient_of_factor


@pytest.fixture
def mesh(monkeypatch):
    """A mesh of one process, whose shard of each parameter is the whole parameter."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.fixture
def products(mesh):
    """Skips a test where PyTorch cannot add products to sharded tensors in place, as 2.9 cannot."""
    one = distribute_tensor(torch.ones(1, 1), mesh, [Replicate()])
    try:
        one.addmm_(one, one)
    except NotImplementedError:
        pytest.skip("this version of PyTorch has no addmm_ of sharded tensors")


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


METHODS = [fsdp_1, fsdp_2, tensor_parallel]


@pytest.mark.parametrize("shard", METHODS)
def test_what_needs_whole_parameters_is_refused(tmp_path, mesh, shard):
    lora.save_adapter(adapted(net()), tmp_path / "a")
    # Tensor parallelism has to be applied before LoRA.
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
def test_a_model_sharded_on_the_meta_device_starts_as_its_base(mesh, variant):
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


@torch.no_grad()
def test_loading_a_base_into_a_sharded_model_leaves_lora_to_be_initialized(mesh):
    x, base = torch.randn(3, 8), net()
    with torch.device("meta"):
        model = net()
    lora.add_lora(model, ["0", "2"], r=2)
    model = fsdp_2(model, mesh)
    model.to_empty(device="cpu")
    for layer in (model[0], model[2]):
        layer.lora_A.to_local().data.fill_(torch.nan)
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(model, base.state_dict(), options=options)
    lora.start_from_weights(model)
    torch.testing.assert_close(model(x), base(x))


@pytest.mark.parametrize("way", ["state", "whole", "parts"])
@torch.no_grad()
def test_start_from_weights_keeps_values_loaded_into_a_sharded_model(mesh, way):
    x, trained = torch.randn(3, 8), adapted(net())
    with torch.device("meta"):
        model = net()
    lora.add_lora(model, ["0", "2"], r=2)
    model = fsdp_2(model, mesh)
    model.to_empty(device="cpu")
    state = model.state_dict() if way == "state" else dict(model.named_parameters())
    for name, tensor in trained.state_dict().items():
        if way == "whole":
            state[name].copy_(distribute_tensor(tensor, mesh, state[name].placements))
        else:
            state[name].to_local().copy_(tensor)
    if way == "state":  # torch.distributed.checkpoint.load fills it
        model.load_state_dict(state)
    lora.start_from_weights(model)
    torch.testing.assert_close(model(x), trained(x))


@pytest.mark.parametrize("initialization", ["pissa", "olora", "orthogonal"])
def test_initializations_that_need_whole_tensors_are_refused(mesh, initialization):
    with torch.device("meta"):
        model = net()
    lora.add_lora(model, ["0", "2"], r=2, initialization=initialization)
    model = fsdp_2(model, mesh)
    model.to_empty(device="cpu")
    with pytest.raises(
        ValueError, match=f"the initialization {initialization} needs whole tensors"
    ):
        lora.start_from_weights(model)


A_OF_TWO_PROCESSES = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
import loralib as lora
from loralib.training.process import end_at_once

rank, kind = int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
with torch.device("meta" if kind == "sharded" else "cpu"):
    model = nn.Sequential(nn.Linear(4, 4))
if kind == "replicated":
    parallelize_module(model, mesh, {"0": RowwiseParallel()})
torch.manual_seed(rank if kind == "replicated" else 0)
lora.add_lora(model, "0", r=4)
if kind == "sharded":
    fully_shard(model, mesh=mesh).to_empty(device="cpu")
    lora.start_from_weights(model)
print(model[0].lora_A.full_tensor().tolist())
sys.stdout.flush()
dist.barrier()
end_at_once(0)
"""


def printed_by_two(code, folder, argument):
    """The last line that each of two processes prints, which run code that meets in a folder."""
    command = [preloaded_python(), "-c", code, f"file://{folder}/store"]
    processes = [
        subprocess.Popen([*command, rank, argument], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for rank in ("0", "1")
    ]
    return [process.communicate(timeout=120)[0].splitlines()[-1] for process in processes]


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["sharded", "replicated"])
def test_a_sharded_a_starts_as_in_the_first_process_alone(tmp_path, kind):
    """PyTorch would draw equal rows of a sharded A, and different copies of a replicated one."""
    printed = printed_by_two(A_OF_TWO_PROCESSES, tmp_path, kind)
    alone = nn.Sequential(nn.Linear(4, 4))
    torch.manual_seed(0)
    lora.add_lora(alone, "0", r=4)
    assert printed == [str(alone[0].lora_A.tolist())] * 2


@pytest.mark.usefixtures("products")
def test_an_embedding_with_sharded_rows_is_trained(mesh):
    torch.manual_seed(0)
    model, ids = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 2)), torch.tensor([[5, 0], [2, 5]])
    plain = copy.deepcopy(model)
    parallelize_module(model, mesh, {"0": RowwiseParallel(input_layouts=Replicate())})
    for each in (plain, model):
        lora.add_lora(each, "0", r=2)
    for name in ("lora_A", "lora_B"):
        values = nn.init.normal_(getattr(plain[0], name))
        whole = getattr(model[0], name)
        with torch.no_grad():
            whole.copy_(distribute_tensor(values, mesh, whole.placements))
    out, expected = model(ids), plain(ids)
    out.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(out, expected)
    for name in ("lora_A", "lora_B"):
        found = getattr(model[0], name).grad.full_tensor()
        torch.testing.assert_close(found, getattr(plain[0], name).grad)


SLICES_ON_TWO_PROCESSES = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
import loralib as lora
from loralib.training.process import end_at_once

dist.init_process_group("gloo", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2)
mesh, found = init_device_mesh("cpu", (2,)), []
for is_sharded in (False, True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 12))
    if is_sharded:
        parallelize_module(model, mesh, {"0": ColwiseParallel(output_layouts=Replicate())})
    lora.add_lora(model, "0", r=2, enable_lora={"0": [True, False, True]}, variant=sys.argv[3])
    nn.init.ones_(model[0].lora_B)
    out = model(torch.arange(8.0).view(2, 4))
    out.square().sum().backward()
    found.append([out, *(p.grad for p in model.parameters() if p.requires_grad)])
for plain, sharded in zip(*found, strict=True):
    torch.testing.assert_close(getattr(sharded, "full_tensor", lambda: sharded)(), plain)
print("same")
sys.stdout.flush()
dist.barrier()
end_at_once(0)
"""


@pytest.mark.distributed
@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_slices_of_a_sharded_output_get_their_update(tmp_path, variant):
    """Each process has half of the output, and the slices are thirds of it."""
    assert printed_by_two(SLICES_ON_TWO_PROCESSES, tmp_path, variant) == ["same", "same"]


@pytest.mark.usefixtures("products")
def test_dropout_of_a_sharded_input_is_refused_on_cpus(mesh):
    """PyTorch has no random numbers there that agree in all processes."""
    model = tensor_parallel(net(), mesh)
    lora.add_lora(model, ["0", "2"], r=2, lora_dropout=0.5)
    with pytest.raises(RuntimeError, match=r"not possible on CPUs.*: use lora_dropout=0$"):
        model(torch.randn(3, 8))
    model.eval()(torch.randn(3, 8))


def test_a_layer_sharded_by_transformers_is_refused(mesh):
    """Its forward is replaced by one that gives the plain one's result to the other processes."""
    model = tensor_parallel(net(), mesh)
    plain = model[0].forward
    model[0].forward = lambda x: plain(x)
    message = "0 has a forward of its own for its sharded parameters.*without tp_plan"
    with pytest.raises(UnsupportedLayerError, match=message):
        lora.add_lora(model, "0")


def test_a_file_of_sharded_tensors_is_refused(tmp_path, mesh):
    """It may lack what other processes have."""
    model = fsdp_2(adapted(net()), mesh)
    torch.save(lora.lora_state_dict(model), tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="holds something other than named tensors"):
        lora.load_adapter(net(), tmp_path / "a.pt", lora_alpha=16)


class Experts(nn.Module):
    """A stack of three matrices, each of which multiplies a third of the rows."""

    def __init__(self):
        super().__init__()
        self.stack = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x):
        return torch.bmm(x.unflatten(0, (3, -1)), self.stack.mT).flatten(0, 1)


def fsdp_1_of_updates(model, mesh):
    policy = partial(lambda_auto_wrap_policy, lambda_fn=lambda part: isinstance(part, Projection))
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=True, device_id=cpu
    )


def fsdp_2_of_updates(model, mesh):
    for part in list(model.modules()):
        if isinstance(part, Projection):
            fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


OF_UPDATES = [fsdp_1_of_updates, fsdp_2_of_updates]


@pytest.mark.parametrize("shard", [fsdp_1, fsdp_2, *OF_UPDATES])
def test_sharded_experts_are_trained_and_cannot_be_merged(mesh, shard):
    torch.manual_seed(0)
    model, x = nn.Sequential(Experts(), nn.ReLU(), nn.Linear(8, 4)), torch.randn(6, 8)
    lora.add_lora(model, "stack", r=2)
    update = model[0].stack_lora
    nn.init.normal_(update.lora_B)
    expected = model(x)
    (grad,) = torch.autograd.grad(expected.square().sum(), update.lora_A)
    model = shard(model, mesh)
    out = model(x)
    out.square().sum().backward()
    torch.testing.assert_close(out, expected)
    (found,) = (p.grad for name, p in model.named_parameters() if name.endswith("lora_A"))
    found = found.full_tensor() if hasattr(found, "full_tensor") else found
    torch.testing.assert_close(found.view_as(grad), grad)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), expected)
    with pytest.raises(ValueError, match="is sharded over several processes: gather the model"):
        lora.merge(model)


@pytest.mark.parametrize("shard", OF_UPDATES)
def test_projections_sharded_apart_from_their_attention_are_trained(mesh, shard):
    torch.manual_seed(0)
    model, x = nn.ModuleDict({"a": nn.MultiheadAttention(8, 2, kdim=8, vdim=4)}), torch.randn(6, 8)
    lora.add_lora(model, "a", r=2)
    attention, call = model["a"], (x, x, x[:, :4])
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        nn.init.normal_(attention.get_submodule(name).lora_B, std=0.1)
    expected, _ = attention(*call)
    (grad,) = torch.autograd.grad(expected.square().sum(), attention.v_proj.lora_A)
    attention = shard(attention, mesh)
    out, _ = attention(*call)
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    (found,) = (
        p.grad for name, p in attention.named_parameters() if "v_proj" in name and "A" in name
    )
    found = found.full_tensor() if hasattr(found, "full_tensor") else found
    torch.testing.assert_close(found.view_as(grad), grad)


def test_an_out_proj_sharded_apart_from_its_attention_is_an_error(mesh):
    """PyTorch raises an error too without LoRA."""
    model, x = nn.ModuleDict({"a": nn.MultiheadAttention(8, 2)}), torch.randn(6, 8)
    lora.add_lora(model, "a", r=2)
    apart = copy.deepcopy(model)["a"]
    apart.out_proj = FullyShardedDataParallel(
        apart.out_proj, use_orig_params=True, device_id=torch.device("cpu")
    )
    fully_shard(model["a"].out_proj, mesh=mesh)
    for attention in (apart, model["a"]):
        with pytest.raises(RuntimeError, match="is wrapped or sharded apart from it, which comp"):
            attention(x, x, x)


@torch.no_grad()
def test_the_gradient_of_a_sharded_factor_on_a_gpu(mesh, monkeypatch):
    """PyTorch cannot compute products of sharded half-precision tensors in float32."""
    monkeypatch.setattr(DTensor, "device", torch.device("cuda", 0), raising=False)
    monkeypatch.setattr(DTensor, "is_cuda", True, raising=False)
    grad, x = (
        distribute_tensor(torch.ones(3, size).bfloat16(), mesh, [Replicate()]) for size in (2, 4)
    )
    found = gradient_of_factor(grad, x, torch.float32)
    assert torch.equal(found.to_local(), torch.full((2, 4), 3.0))
