"""Makes torchvision importable where its compiled operators cannot be loaded; imported first.

PyPI's wheel is linked to CUDA. Beside a CPU build of torch its import, and with it timm's and
Transformers', ends with "operator torchvision::nms does not exist". No model here calls one of
these operators: that they are declared is enough.
"""

import torch

try:
    import torchvision  # noqa: F401
except RuntimeError:
    for name in ("nms", "qnms"):
        boxes = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(f"torchvision::{name}", boxes)
