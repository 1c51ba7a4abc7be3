"""Controls what decides a run's bits: PyTorch's GPU settings, seeds, and random generators."""

import logging
import os
import random
from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from .launcher_env import rank

logger = logging.getLogger(__name__)


def set_up_device(*, tf32: bool = False, deterministic: bool = False) -> None:
    """Sets what PyTorch would otherwise decide by itself; to be called before computing.

    Float32 is computed as float32, whatever was set before by any of PyTorch's settings for it.

    cuDNN's attention is switched off: it makes a plan for every new shape, which takes longer than
    the attention itself, and batches that are as long as their longest row have many shapes.

    Args:
        tf32: lets float32 products and convolutions run in TensorFloat-32 on a GPU, with 10 bits
            of mantissa instead of 23. By default neither does; PyTorch's own default is TF32 for
            convolutions only.
        deterministic: turns on PyTorch's deterministic mode: the same run on the same GPU gives the
            same bits. If the mode was off before, PyTorch's filling of new memory in it is turned
            off, because nothing here reads memory before writing it. False leaves the mode as is.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    _forget_fp32_precision()
    # These also set the newer fp32_precision. If that were set directly, reading these would raise
    # an error, and torch.compile reads them.
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    if deterministic:
        # cuBLAS needs this workspace for it, set before its first use. NVIDIA's other setting,
        # :16:8, is too small for the fast kernels of large products.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if not torch.are_deterministic_algorithms_enabled():
            # A property of the module, which mypy cannot see.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True)


def _forget_fp32_precision() -> None:
    """Resets each kind of operation to float32, unless something is set for it later.

    On a GPU, the general fp32_precision or cuDNN's would otherwise apply even where the older
    settings disallow TF32.
    """
    backends: Any = torch.backends  # mypy does not know what these modules turn themselves into
    for kind in (backends, backends.cudnn, backends.mkldnn.conv, backends.mkldnn.rnn):
        kind.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


# PyTorch takes seeds of 64 bits, and epochs, steps and processes are added to a run's seed.
LARGEST_SEED = 2**62


def set_seed(seed: int) -> None:
    """Seeds Python, NumPy and PyTorch on all devices; for weights, the same in all processes."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def set_dropout_seed(seed: int, process: int) -> None:
    """Seeds PyTorch for training, so that dropout differs between processes."""
    torch.manual_seed(seed + process)


def rng_state(device: torch.device, others: Collection[torch.Generator] = ()) -> dict[str, Any]:
    """Returns the state of all generators that `set_seed` seeds, in a form for weights-only loads.

    Args:
        device: where the run computes. A run on the CPU includes no state of a GPU's generator.
        others: further generators to include.
    """
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    version, internal, gauss_next = random.getstate()
    state: dict[str, Any] = {
        "python": (version, list(internal), gauss_next),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state()
    if others:
        state["others"] = [generator.get_state() for generator in others]
    return state


def set_rng_state(
    state: dict[str, Any], device: torch.device, others: Collection[torch.Generator] = ()
) -> None:
    """Restores the generators to a state that `rng_state` returned.

    A run on a CPU has no state of a GPU's generator. If a run resumes on the other kind of device
    than it was saved on, a GPU's generator is left as it is, and the main process warns.

    Args:
        state: what `rng_state` returned.
        device: where the run computes now, as for `rng_state`.
        others: the further generators. If the state has none, as in an older version, they stay.
    """
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    for generator, other in zip(others, state.get("others", ()), strict=False):
        generator.set_state(other)
    on_gpu = device.type == "cuda"
    if on_gpu and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    elif on_gpu != ("cuda" in state) and rank() == 0:
        places = ("a CPU", "a GPU")
        logger.warning(
            "resumes, but not bit-exactly: the checkpoint was written on %s, and this run computes "
            "on %s, which has other random numbers",
            *(places if on_gpu else reversed(places)),
        )


def warn_of_other_threads(before: int, device: torch.device) -> None:
    """Warns, on the main process, if a run resumes on a CPU with another number of threads.

    Args:
        before: `torch.get_num_threads()` when the state was written.
        device: where the run computes.
    """
    now = torch.get_num_threads()
    if before != now and device.type == "cpu" and rank() == 0:
        logger.warning(
            "resumes, perhaps not bit-exactly: the checkpoint was written with OMP_NUM_THREADS=%s, "
            "this run has %d, so sums may differ in their last bits",
            *(before, now),
        )
