"""Records how many rows are multiplied with weights."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class MultipliedRows(TorchDispatchMode):
    """Records the number of rows in every product of two matrices."""

    def __init__(self):
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.seen.add(len(args[-2]))
        return function(*args, **(kwargs or {}))
