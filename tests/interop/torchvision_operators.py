"""Makes torchvision importable without its compiled operators; has to be imported before it.

PyPI's wheel is linked to CUDA. With a CPU build of torch, importing it, timm or Transformers fails
with "operator torchvision::nms does not exist". No model here calls these operators, so it is
enough to declare them.
"""

import torch

try:
    import torchvision  # noqa: F401
except RuntimeError:
    for name in ("nms", "qnms"):
        boxes = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(f"torchvision::{name}", boxes)
