"""Chooses the device on which a process computes."""

import re

import torch

_ARCHITECTURE = re.compile(r"(?P<kind>sm|compute)_(?P<major>\d+)(?P<minor>\d)(?P<alone>[a-z]?)")


def choose_device(local_rank: int, no_cuda: bool = False) -> torch.device:
    """Chooses a process's device: the GPU of its number, or the CPU if there is no GPU.

    Args:
        local_rank: the process's number on its machine.
        no_cuda: whether to stay on the CPU.

    Raises:
        ValueError: there are fewer GPUs than processes, or PyTorch has no kernels for this one.
    """
    if no_cuda or not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not 0 <= local_rank < count:
        raise ValueError(
            f"process {local_rank} of this machine has no GPU, there are {count}: "
            "start fewer processes or, if each sees only its own GPU, set LOCAL_RANK=0 in all"
        )
    device = torch.device("cuda", local_rank)
    _check_kernels(device)
    torch.cuda.set_device(device)
    return device


def _check_kernels(device: torch.device) -> None:
    """Checks that PyTorch was built for a GPU; otherwise it would only fail when it computes.

    A build has kernels for some architectures (``sm_75``), which also run on later ones of the same
    major version, and code for others (``compute_90``), which is compiled for any later one. Those
    whose names end in a letter are for that architecture only.

    Raises:
        ValueError: it was not.
    """
    names = torch.cuda.get_arch_list()
    built = [match for match in map(_ARCHITECTURE.fullmatch, names) if match]
    if len(built) < max(len(names), 1):
        return  # a name of unknown form, or no names
    own = torch.cuda.get_device_capability(device)
    known = [(int(match["major"]), int(match["minor"])) for match in built]
    for architecture, match in zip(known, built, strict=True):
        is_later = own >= architecture and (match["kind"] == "compute" or own[0] == architecture[0])
        if own == architecture or (is_later and not match["alone"]):
            return
    if own < min(known):
        way_out = "an older CUDA, such as 12.6 for V100"
    elif own > max(known):
        way_out = "a newer CUDA"
    else:
        way_out = f"another CUDA; this one has {', '.join(names)}"
    raise ValueError(
        f"PyTorch {torch.__version__} has no kernels for {torch.cuda.get_device_name(device)} "
        f"(sm_{own[0]}{own[1]}): install its build for {way_out}"
    )
