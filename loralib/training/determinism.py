"""What decides a run's bits: PyTorch's settings of a GPU, seeds, and generators' states."""

import logging
import os
import random
from typing import Any

import numpy as np
import torch

from .launched import rank

logger = logging.getLogger(__name__)


def set_up_device(*, tf32: bool = False, deterministic: bool = False) -> None:
    """Sets what PyTorch would otherwise decide by itself; called before computing.

    Float32 is computed as float32, whatever was set before by any of PyTorch's names for it.

    cuDNN's attention is switched off: it makes a plan for every new shape, which takes longer than
    the attention itself where batches are as long as their longest row.

    Args:
        tf32: let float32 products and convolutions run in TensorFloat-32, with 10 bits of mantissa
            for 23, on a GPU; by default neither does. PyTorch's own default is convolutions alone.
        deterministic: PyTorch's deterministic mode: the same bits from the same run on the same
            GPU. It stays on where it is on already; where it was off, PyTorch does not fill new
            memory in it, because what is computed here is never read before it is written.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    _forget_fp32_precision()
    # These names set those of the later fp32_precision as well; after the reverse, reading these
    # raises an error, which torch.compile runs into.
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    if deterministic:
        # cuBLAS needs a workspace of its own for it, known before its first use. The other size
        # that NVIDIA names, :16:8, is too small for the fast kernels of large products.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if not torch.are_deterministic_algorithms_enabled():
            # A property of the module, which mypy cannot see.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True)


def _forget_fp32_precision() -> None:
    """Has each kind of operation computed in float32, unless something is set for it from here on.

    Those of a GPU take what is set for all, or for cuDNN, where the older names say no.
    """
    backends: Any = torch.backends  # mypy does not see what these modules make of themselves
    for kind in (backends, backends.cudnn, backends.mkldnn.conv, backends.mkldnn.rnn):
        kind.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


# PyTorch takes seeds of 64 bits; epochs, steps and processes are added to a run's.
LARGEST_SEED = 2**62


def set_seed(seed: int) -> None:
    """Seeds Python, NumPy and PyTorch on all devices; for weights, which all processes share."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def set_dropout_seed(seed: int, process: int) -> None:
    """Seeds PyTorch for training: dropout differs between processes."""
    torch.manual_seed(seed + process)


def _uses_gpu(device: torch.device | None) -> bool:
    return torch.cuda.is_available() if device is None else device.type == "cuda"


def rng_state(device: torch.device | None = None) -> dict[str, Any]:
    """The state of all generators that `set_seed` seeds, in a format that loads weights-only.

    Args:
        device: where the run computes, by default on a GPU where there is one; a run on the CPU
            has no state of a GPU's generator.
    """
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    version, internal, gauss_next = random.getstate()
    state: dict[str, Any] = {
        "python": (version, list(internal), gauss_next),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    if _uses_gpu(device):
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any], device: torch.device | None = None) -> None:
    """Puts the generators where `rng_state` found them.

    A state of a run on the CPU has nothing for a GPU's generator, and the reverse. Such a run
    resumes with that generator as it is, and the main process warns.

    Args:
        state: what `rng_state` returned.
        device: where the run computes now; as for `rng_state`.
    """
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    on_gpu = _uses_gpu(device)
    if on_gpu and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    elif on_gpu != ("cuda" in state) and rank() == 0:
        places = ("a CPU", "a GPU")
        logger.warning(
            "resumes, but not bit-exact: the checkpoint was written on %s, and this run computes "
            "on %s, which has other random numbers",
            *(places if on_gpu else reversed(places)),
        )


def warn_of_other_threads(before: int, device: torch.device) -> None:
    """Warns, on the main process, where a run resumes on a CPU with another number of threads.

    Args:
        before: `torch.get_num_threads()` when the state was written.
        device: where the run computes.
    """
    now = torch.get_num_threads()
    if before != now and device.type == "cpu" and rank() == 0:
        logger.warning(
            "resumes, perhaps not bit-exact: the checkpoint was written with OMP_NUM_THREADS=%s, "
            "this run has %d, so sums may differ in their last bits",
            *(before, now),
        )
