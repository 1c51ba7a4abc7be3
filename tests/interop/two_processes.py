"""Training on two processes with gloo, in a loop like a user's: DDP, and FSDP2."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchvision_operators  # noqa: F401
from models import BY_NAME, Batch, Case, output_of, train
from ours import bits_of, with_lora
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import loralib as lora
from loralib.training.process import end_at_once

STEPS, WORLD = 2, 2

# Model -> the ends of the names of the modules that are sharded one by one.
UNITS = {
    "qwen2": ("layers.0", "layers.1"),
    "gpt2": ("h.0", "h.1"),
    "attention": ("attention",),
    "timm_resnet": ("layer1", "layer2", "layer3", "layer4"),
}


def take_steps(model: nn.Module, batches: list[Batch]) -> None:
    """Takes `STEPS` steps with the mean of the batches' losses."""
    optimizer = torch.optim.SGD(lora.parameter_groups(train(model), lr=0.05, lora_plus_ratio=2))
    for _ in range(STEPS):
        for batch in batches:
            (output_of(model, batch).square().mean() / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()


def batches_of(case: Case) -> list[Batch]:
    """The case's batch, split into one of one row for each process."""
    batch = case.batch()
    return [{name: _row(value, rank) for name, value in batch.items()} for rank in range(WORLD)]


def _row(value: Any, rank: int) -> Any:
    # A mask of (length, length) belongs to all rows.
    is_square = isinstance(value, Tensor) and value.dim() == 2 and value.shape[0] == value.shape[1]
    return value if is_square else value[rank : rank + 1]


def wrap_in_ddp(model: nn.Module, name: str) -> nn.Module:
    """DDP; its module keeps the model's names."""
    return DistributedDataParallel(model)


def shard_fully(model: nn.Module, name: str) -> nn.Module:
    """FSDP2, in place."""
    mesh = init_device_mesh("cpu", (WORLD,))
    for module_name, module in model.named_modules():
        if module_name.endswith(UNITS[name]):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPPERS = {"ddp": wrap_in_ddp, "fsdp2": shard_fully}


def train_all_on_two(wrapper: str, variants: Sequence[str], folder: Path) -> dict[str, Any]:
    """Trains each model of `UNITS` on two processes, which are started once.

    Returns:
        "model variant" -> the trained adapter, and the model's output in evaluation mode.
    """
    torch.multiprocessing.spawn(_train_all, (wrapper, variants, str(folder)), nprocs=WORLD)
    return torch.load(folder / "results.pt")


def _train_all(rank: int, wrapper: str, variants: Sequence[str], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD
    )
    results = {
        f"{name} {variant}": _train_one(WRAPPERS[wrapper], name, variant, rank)
        for name in UNITS
        for variant in variants
    }
    if rank == 0:
        torch.save(results, f"{folder}/results.pt")
    dist.barrier()
    end_at_once(0)  # Gloo's threads race with the interpreter's exit, and sometimes abort it


def _train_one(
    wrap: Callable[[nn.Module, str], nn.Module], name: str, variant: str, rank: int
) -> tuple[dict[str, Tensor], Tensor]:
    case = BY_NAME[name]
    model = with_lora(case, variant)
    before = bits_of(model)
    wrapped = wrap(model, name)
    take_steps(wrapped, [batches_of(case)[rank]])
    with torch.no_grad():
        output = output_of(wrapped.eval(), case.batch())
    if isinstance(model, FSDPModule):
        check_refusals(case, model)
    state = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    for name, tensor in before.items():
        assert torch.equal(state[name], tensor), name
    return {name: tensor for name, tensor in state.items() if "lora_" in name}, output


def check_refusals(case: Case, model: nn.Module) -> None:
    """Asserts that changes that FSDP2 would not notice, or would undo, are refused in one line."""
    for change in (
        lora.merge,
        lora.remove_lora,
        lambda model: lora.add_lora(model, case.targets),
        lambda model: lora.save_adapter(model, "never_written"),
    ):
        with pytest.raises(ValueError, match=r"^[^\n]* (sharded|wrapped) [^\n]*$"):
            change(model)


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered from all processes if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
