"""Tests of which device a process chooses."""

import pytest
import torch

from loralib.training.device import choose_device

WHEELS = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


@pytest.mark.parametrize(
    ("built", "own", "needs"),
    [
        (WHEELS, (9, 0), None),
        (WHEELS, (8, 9), None),  # sm_86's kernels work
        (WHEELS, (7, 0), "an older CUDA, such as 12.6 for V100"),
        (["sm_70", *WHEELS], (7, 0), None),
        (WHEELS, (13, 0), "a newer CUDA"),
        (WHEELS, (11, 0), "another CUDA; this one has sm_75, sm_80, sm_86, sm_90, sm_100, sm_120"),
        ([*WHEELS, "compute_120"], (13, 0), None),
        ([*WHEELS, "compute_120a"], (13, 0), "a newer CUDA"),
        ([*WHEELS, "compute_120"], (7, 0), "an older CUDA"),
        (["sm_90a"], (9, 0), None),
        (["sm_80", "compute_90a"], (10, 0), "a newer CUDA"),
        (["gfx90a"], (9, 0), None),  # another vendor's
        ([], (7, 0), None),  # unknown to PyTorch
    ],
)
def test_a_gpu_without_kernels_in_pytorch_is_refused(monkeypatch, built, own, needs):
    chosen = []
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_arch_list": lambda: built,
        "get_device_capability": lambda device: own,
        "get_device_name": lambda device: "Tesla",
        "set_device": chosen.append,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    device = torch.device("cuda", 1)
    if needs is None:
        assert choose_device(1) == device
        assert chosen == [device]
        return
    message = rf"no kernels for Tesla \(sm_{own[0]}{own[1]}\): install its build for {needs}"
    with pytest.raises(ValueError, match=message):
        choose_device(1)
    assert chosen == []
