"""What is trained in both encoders' layers: projections with LoRA, and bottleneck adapters.

A bottleneck adapter is a small network next to the residual stream. With a sub-layer's output h,
after its dropout, and the sub-layer's residual input x:

    Houlsby   out = LayerNorm( h + up(silu(down(h)))                    + x )
    Pfeiffer  out = LayerNorm( h + up(relu(down(LayerNorm(h + x))))     + x )

Houlsby's adapters follow attention and feed-forward, Pfeiffer's only the feed-forward part. Both
norms of Pfeiffer's are the layer's own. `up` is initialized to zero, so an adapter starts as the
identity. In the release's files, and so here, down is called ``adapter_A`` and up ``adapter_B``.

Source: Houlsby et al., arXiv 1902.00751; Pfeiffer et al., arXiv 2005.00247.
"""

from collections.abc import Callable, Mapping
from importlib import import_module

import torch.nn.functional as F
from torch import Tensor, nn

import loralib as lora
from loralib.initialization import deferring_start
from loralib.nn.products import Linear

from .configuration_utils import PretrainedConfig
from .lora_placement import Placed


def projection(
    config: PretrainedConfig,
    placed: Mapping[str, Placed],
    target: str,
    in_features: int,
    out_features: int,
) -> nn.Linear:
    """Builds a projection of an encoder layer, with LoRA if the settings put it there.

    Args:
        config: the model's settings.
        placed: where they put LoRA in this layer, see `lora_placement.by_layer`.
        target: which projection it is, a name in `LORA_TARGETS`.
        in_features, out_features: its widths.
    """
    if target not in placed:
        return Linear(in_features, out_features)
    with deferring_start():  # A and B may start from weights that exist once the model is complete
        return lora.Linear(
            in_features,
            out_features,
            r=placed[target].rank,
            lora_alpha=placed[target].alpha,
            lora_dropout=config.lora_dropout,
            merge_weights=config.merges_lora,
            variant=config.lora_variant,
            initialization=config.lora_init,
            freeze_A=config.lora_freeze_A,
        )


class UpProjection(Linear):
    """An adapter's last projection, which is initialized to zero."""

    def reset_parameters(self) -> None:
        """Sets weight and bias to zero."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class BottleneckAdapter(nn.Module):
    """A bottleneck adapter of either type; the formulas are in the module's docstring.

    Args:
        config: the model's settings: `adapter_type`, `adapter_size`, `hidden_size`.
    """

    def __init__(self, config: PretrainedConfig):
        super().__init__()
        self.sees_residual = config.adapter_type == "pfeiffer"
        self.activation = F.relu if self.sees_residual else F.silu
        self.adapter_A = Linear(config.hidden_size, config.adapter_size)
        self.adapter_B = UpProjection(config.adapter_size, config.hidden_size)

    def forward(self, h: Tensor, residual: Tensor, norm: Callable[[Tensor], Tensor]) -> Tensor:
        """(tokens, hidden) -> the same.

        Args:
            h: the sub-layer's output.
            residual: its residual input.
            norm: the layer norm that follows.
        """
        seen = norm(h + residual) if self.sees_residual else h
        return h + self.adapter_B(self.activation(self.adapter_A(seen)))


def __getattr__(name: str) -> type[nn.Module]:
    """Returns a part of an encoder layer, for models that an older version pickled.

    Their pickles name this module for classes that are in modeling_encoder.py, which imports it.
    """
    if name in ("Intermediate", "SubLayerOutput"):
        return getattr(import_module(f"{__package__}.modeling_encoder"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
