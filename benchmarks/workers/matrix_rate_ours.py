"""Measures how fast this machine multiplies matrices, by the fastest method that loralib has.

The plan has `dtype`, `device`, `threads`, `seed`, and `products`, each (rows, in, out, times),
where `times` is how often a layer has that product. The result is in billions of multiplications
and additions per second.
"""

import time
from statistics import median

import torch
from timing import read_plan, write_result
from torch import nn

from loralib.nn import products

REPEATS = 7
# On a GPU, launching a product and waiting for it takes about as long as computing it.
AT_ONCE_ON_GPU = 50


def seconds_of(x: torch.Tensor, weight: torch.Tensor) -> float:
    """Times a product: returns the median of some times, after one that is not counted."""
    found, count = [], AT_ONCE_ON_GPU if x.is_cuda else 1
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        for _ in range(count):
            products.product(x, weight)
        if x.is_cuda:
            torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / count)
    return median(found[1:])


def take_fastest(weight: products.FrozenWeight, dtype: torch.dtype, rows: int) -> None:
    """Measures the methods to multiply `rows` rows with a weight, and has the fastest used."""
    methods = products.measure([weight], dtype, {}, rows, backward=False)
    products.use_choices({"machine": products.machine(), "methods": methods})


@torch.no_grad()
def gflops(plan: dict) -> float:
    """Measures the plan's products one after the other, and returns their GFLOP/s."""
    dtype, device = getattr(torch, plan["dtype"]), torch.device(plan["device"])
    work = seconds = 0.0
    for rows, inputs, outputs, times in plan["products"]:
        weight = nn.Parameter(torch.rand(outputs, inputs, dtype=dtype, device=device))
        weight.requires_grad_(False)
        x = torch.rand(rows, inputs, dtype=dtype, device=device)
        if device.type == "cpu":
            take_fastest(products.FrozenWeight(weight), dtype, rows)
        work += times * 2 * rows * inputs * outputs
        seconds += times * seconds_of(x, weight)
    return work / seconds / 1e9


if __name__ == "__main__":
    write_result({"gflops": gflops(read_plan())})
