"""Tests of DDP: warming up has no effect, and gradients are summed only before an update."""

import subprocess

import pytest
import torch
import torch.distributed as dist
from launches import preloaded_python
from paths import ROOT
from torch import nn
from torch.distributed import HashStore
from torch.nn.parallel import DistributedDataParallel

from loralib.errors import TrainingError
from loralib.training.ddp import sync_gradients, warm_up_ddp, wrap_ddp

CPU = torch.device("cpu")


@pytest.fixture
def group():
    """A process group with only this process."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_warming_up_restores_buffers_gradients_and_rng_state(group):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    x = torch.randn(5, 3)
    model(x).sum().backward()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    wrapped = DistributedDataParallel(model)
    expected = torch.get_rng_state()
    seen = []

    def backward():
        wrapped(2 * x).square().sum().backward()
        seen.append([parameter.grad.clone() for parameter in model.parameters()])

    warm_up_ddp(wrapped, backward)
    assert not torch.equal(seen[0][0], gradients[0])
    assert torch.equal(torch.get_rng_state(), expected)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_a_run_on_the_cpu_does_not_touch_a_gpu(group, monkeypatch, caplog):
    """Every process would take memory of the first GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("a GPU was used"))
    wrapped = DistributedDataParallel(nn.Linear(3, 3))
    warm_up_ddp(wrapped, lambda: wrapped(torch.ones(1, 3)).sum().backward())
    assert not caplog.messages


def test_a_single_process_needs_no_ddp():
    model = nn.Linear(3, 3)
    assert wrap_ddp(model, CPU, 1) is model
    warm_up_ddp(model, lambda: pytest.fail("there is nothing to warm up"))
    with sync_gradients(model, due=False):
        model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is not None


def printed_by_two(code, folder, *more):
    """Returns the last lines that two processes print, which get a store, their rank and `more`."""
    command = [preloaded_python(), "-c", code, f"file://{folder}/store"]
    processes = [
        subprocess.Popen([*command, str(n), *more], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for n in range(2)
    ]
    return [process.communicate(timeout=120)[0].splitlines()[-1] for process in processes]


BUFFERS = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from loralib.training.ddp import wrap_ddp
from loralib.training.process import end_at_once

rank, kind = int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=2)
model = nn.Sequential(nn.Linear(3, 3), *([nn.BatchNorm1d(3)] if kind == "batch norm" else []))
model.register_buffer("lora_A_start", torch.tensor([10.0 + rank]))
wrapped = wrap_ddp(model, torch.device("cpu"), 2)
seen = [model.lora_A_start.item()]
model.lora_A_start += rank
wrapped(torch.ones(2, 3)).sum().backward()
print(seen + [model.lora_A_start.item()])
sys.stdout.flush()
dist.barrier()
end_at_once(0)
"""


@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "last"), [("constant", 11.0), ("batch norm", 10.0)])
def test_buffers_are_sent_in_every_pass_only_if_some_can_change(tmp_path, kind, last):
    """LoRA's own buffers are constant, and sent once, at the beginning."""
    printed = printed_by_two(BUFFERS, tmp_path, kind)
    assert printed == ["[10.0, 10.0]", f"[10.0, {last}]"]


AFTERWARDS = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from loralib.errors import TrainingError
from loralib.training import ddp
from loralib.training.process import end_at_once

rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=2)
ddp._BUCKET = 200  # bytes: less than the second weight has

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(rank)  # the first process's weights are for all
        self.first, self.second, self.last = nn.Linear(3, 4), nn.Linear(4, 20), nn.Linear(20, 3)
        self.last.double()
        self.last.bias.requires_grad_(False)
        self.register_buffer("count", torch.tensor(10.0 + rank))

    def forward(self, x):
        return self.last(self.second(self.first(x)).double())

def differs(own):
    both = [torch.zeros_like(own) for _ in range(2)]
    dist.all_gather(both, own)
    return not torch.equal(*both)

def gradients(graphs):
    model = Model()
    wrapped = ddp.wrap_ddp(model, torch.device("cpu"), 2, graphs)
    assert isinstance(wrapped, ddp.AveragedAfterwards) == graphs
    assert model.count == 10
    for number, due in enumerate([False, True]):
        with ddp.sync_gradients(wrapped, due):
            x = torch.full((2, 3), 1.0 + rank + 2 * number)
            wrapped(x).square().sum().backward()
        if not due:
            assert differs(model.first.weight.grad)
    return model, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}

_, expected = gradients(False)
model, found = gradients(True)
assert len(found) == 5 and found.keys() == expected.keys()
for name, gradient in expected.items():
    torch.testing.assert_close(found[name], gradient)  # sums of at most 80 terms
sizes = [len(bucket) for bucket in ddp._buckets(list(found.values()))]
shared = [torch.zeros_like(gradient) for gradient in found.values()]
for zeros, gradient in zip(shared, found.values()):
    if rank == 0:
        zeros.copy_(gradient)
    dist.broadcast(zeros, 0)
    assert torch.equal(zeros, gradient)  # both processes have the same bits

model.zero_grad()
for due in (False, True):
    with ddp.sync_gradients(ddp.AveragedAfterwards(model), due):
        model(torch.full((2, 3), 1.0 + rank)).sum().backward()
    assert differs(model.first.weight.grad) == (not due)
    model.first.weight.requires_grad_(False)  # what it has is averaged with the others

model.unused = nn.Parameter(torch.ones(1))
try:
    with ddp.sync_gradients(ddp.AveragedAfterwards(model), True):
        model(torch.ones(2, 3)).sum().backward()
except TrainingError as error:
    print(sizes, error)
sys.stdout.flush()
dist.barrier()
end_at_once(0)
"""


@pytest.mark.distributed
def test_gradients_averaged_afterwards_are_those_of_ddp(tmp_path):
    """In buckets: a weight with its bias, one that is too large, its bias, and one of float64."""
    assert printed_by_two(AFTERWARDS, tmp_path) == 2 * [
        "[2, 1, 1, 1] unused is trained, but the loss does not depend on it: freeze it, or train "
        "with --no_cuda_graphs"
    ]


@pytest.mark.parametrize("due", [True, False])
def test_gradients_are_summed_only_if_an_update_follows(group, due):
    wrapped, summed = DistributedDataParallel(nn.Linear(3, 3)), []

    def hook(_, bucket):
        summed.append(bucket.index())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped.register_comm_hook(None, hook)
    with sync_gradients(wrapped, due):
        wrapped(torch.ones(1, 3)).sum().backward()
    assert summed == ([0] if due else [])


def test_a_loss_computed_without_ddp_is_an_error(group):
    wrapped = DistributedDataParallel(nn.Linear(3, 3))
    with (
        pytest.raises(TrainingError, match=r"without DDP, .* not its module or self\.model"),
        sync_gradients(wrapped, due=True),
    ):
        wrapped.module(torch.ones(1, 3)).sum().backward()
    with sync_gradients(wrapped, due=False):
        wrapped.module(torch.ones(1, 3)).sum().backward()
    assert not wrapped._forward_pre_hooks
