"""Finds out which of a run's processes this is, and chooses its device.

Launchers set environment variables that say how many processes there are, and which one this is.
All but OpenMPI and horovod use PyTorch's names (RANK, WORLD_SIZE, LOCAL_RANK). For those two, they
are set here.
"""

import argparse
import math
import os
import socket
from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.distributed as dist

from loralib.io.command_line import check_bounds
from loralib.training.agreement import check_alike, check_same_code
from loralib.training.device import choose_device
from loralib.training.distributed import TIMEOUT, join
from loralib.training.launcher_env import Place, is_launched, process_place

_OPENMPI_NAMES = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")

PLATFORMS = ("k8s", "local", "philly", "azure")


def add_gpu_params(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say how a script was launched."""
    add = parser.add_argument_group("processes").add_argument
    add(
        "--platform",
        default="k8s",
        choices=PLATFORMS,
        help="what started the processes. local, philly: torch.distributed.launch, torchrun, or "
        "plain python for one process; k8s: OpenMPI's mpirun, otherwise as local; "
        "azure: horovodrun",
    )
    add(
        "--local_rank",
        "--local-rank",
        type=int,
        help="the number of this process on its machine, and of its GPU; LOCAL_RANK in the "
        "environment takes precedence; default, for one process: 0",
    )
    add(
        "--rank",
        default=0,
        type=int,
        help="this process's number, not LoRA's rank (--lora_dim); the launcher decides, and a "
        "different number here is an error",
    )
    add("--device", default=0, type=int, help="accepted as in the release; see --local_rank")
    add(
        "--world_size",
        default=0,
        type=int,
        help="number of processes; the launcher decides, and a different number here is an error",
    )
    add(
        "--ddp_timeout",
        default=TIMEOUT,
        type=float,
        metavar="SECONDS",
        help="the run ends if a process hangs, or does not join the others, for this long",
    )


@dataclass(frozen=True)
class DistEnv(Place):
    """This process's ranks, the number of processes, and the `device` on which it computes."""

    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files and logs."""
        return self.rank == 0


# Flags that may differ between processes: paths of files, and what is logged. The contents of the
# files are compared elsewhere.
_OWN = {"platform", "local_rank", "rank", "device", "world_size", "ddp_timeout"}
_OWN |= {"work_dir", "output_file", "data", "train_data", "valid_data", "init_checkpoint"}
_OWN |= {"lora_path", "log_level", "report_to", "lr_is_given"}


def check_same_flags(
    args: argparse.Namespace, dist_env: DistEnv, but: Collection[str] = ()
) -> None:
    """Checks that all processes run the same code with the same flags.

    Otherwise they might wait for each other forever later on.

    Args:
        args: all flags, as they were given.
        dist_env: this process.
        but: more flags that may differ.

    Raises:
        TrainingError: a flag or the project's code differs.
    """
    check_same_code(dist_env.rank, dist_env.world_size)
    own = {*_OWN, *but}
    flags = {f"--{name}": value for name, value in vars(args).items() if name not in own}
    check_alike(flags, dist_env.world_size)


def start(args: argparse.Namespace) -> DistEnv:
    """Finds out which process this is, chooses its device, and joins the others.

    Sets RANK, WORLD_SIZE and LOCAL_RANK in the environment. With more than one process, starts
    PyTorch's process group: NCCL on GPUs, gloo without.

    Args:
        args: the flags of `add_gpu_params`.

    Raises:
        ValueError: the environment is incomplete, contradicts the flags, or asks for a GPU that
            is not there; or the platform is azure and horovod is not installed.
        TrainingError: not all processes have joined within --ddp_timeout.
    """
    check_bounds("--ddp_timeout", args.ddp_timeout, above=0, below=math.inf)
    place = _place(args)
    rank, world_size, local_rank = place.rank, place.world_size, place.local_rank
    if args.world_size not in (0, world_size):
        raise ValueError(
            f"--world_size is {args.world_size}, but the launcher started {world_size} "
            "processes: leave the flag out"
        )
    if args.rank not in (0, rank):
        raise ValueError(
            f"--rank is {args.rank}, but this is process {rank} of {world_size}: leave the flag "
            "out; LoRA's rank is --lora_dim"
        )
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(local_rank))
    device = choose_device(local_rank)
    if world_size > 1 and not dist.is_initialized():
        join(device, args.ddp_timeout)
    return DistEnv(rank, world_size, local_rank, device)


def _place(args: argparse.Namespace) -> Place:
    """Reads from the environment of the platform which process this is."""
    if args.platform == "azure":
        return _place_from_horovod()
    if args.platform == "k8s" and "OMPI_COMM_WORLD_SIZE" in os.environ:
        return process_place(names=_OPENMPI_NAMES)
    if not is_launched():
        return Place(0, 1, args.local_rank or 0)
    return process_place(None if "LOCAL_RANK" in os.environ else args.local_rank)


def _place_from_horovod() -> Place:
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise ValueError(
            f"--platform azure needs horovod, which cannot be imported ({error}): install it, or "
            "launch with torchrun and --platform local"
        ) from error
    hvd.init()
    address = None
    if hvd.rank() == 0:
        host = os.environ.get("MASTER_ADDR") or socket.gethostname()
        address = host, os.environ.get("MASTER_PORT") or str(_free_port())
    host, port = hvd.broadcast_object(address, root_rank=0)
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=port)
    return Place(hvd.rank(), hvd.size(), hvd.local_rank())


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]
