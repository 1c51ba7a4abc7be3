"""`ModuleUtilsMixin`: a model's device, dtype and size, and the masks of its attention."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .modeling_padded import HIDDEN, visible


class ModuleUtilsMixin:
    """Upstream's helper methods of models; a mix-in for `nn.Module`s that have a `config`."""

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first parameter."""
        return next(self.parameters()).dtype

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Returns the number of elements of all parameters, tied ones counted once.

        Args:
            only_trainable: do not count frozen parameters.
            exclude_embeddings: do not count embeddings and parameters that are tied to them.
        """
        embeddings = {
            id(module.weight) for module in self.modules() if isinstance(module, nn.Embedding)
        }
        return sum(
            parameter.numel()
            for parameter in self.parameters()
            if (parameter.requires_grad or not only_trainable)
            and not (exclude_embeddings and id(parameter) in embeddings)
        )

    def get_extended_attention_mask(
        self,
        attention_mask: Tensor,
        input_shape: Sequence[int] | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        """Returns what upstream adds to scores: 0 where a token may attend, -10000 elsewhere.

        Args:
            attention_mask: (batch, length) or (batch, queries, keys), zero where no token may
                attend.
            input_shape, device: ignored: those of the mask are used.

        Returns:
            (batch, 1, 1 or queries, keys), in the model's dtype.
        """
        if attention_mask.dim() not in (2, 3):
            raise ValueError(
                "attention_mask has to be (batch, length) or (batch, queries, keys), not "
                f"{tuple(attention_mask.shape)}"
            )
        seen = visible(attention_mask, self.config.is_decoder, like=attention_mask)
        return (~seen).to(self.dtype) * HIDDEN

    def invert_attention_mask(self, encoder_attention_mask: Tensor) -> Tensor:
        """Does the same for cross-attention, with -10⁹ as the value, or -10⁴ in float16."""
        seen = visible(encoder_attention_mask, causal=False, like=encoder_attention_mask)
        return (~seen).to(self.dtype) * (HIDDEN if self.dtype == torch.float16 else -1e9)

    def get_head_mask(
        self,
        head_mask: Tensor | None,
        num_hidden_layers: int,
        is_attention_chunked: bool = False,
    ) -> Tensor | list[None]:
        """Returns each layer's head mask, (layers, 1, heads, 1, 1), or a list of None.

        Args:
            head_mask: (heads,), for all layers alike, or (layers, heads), or the returned shape;
                None for none.
            num_hidden_layers: the number of layers.
            is_attention_chunked: add a dimension, for attention in chunks.

        Raises:
            ValueError: the mask has another shape.
        """
        if head_mask is None:
            return [None] * num_hidden_layers
        masks = head_mask
        if masks.dim() == 1:
            masks = masks.expand(num_hidden_layers, -1)
        if masks.dim() == 2:
            masks = masks[:, None, :, None, None]
        if masks.dim() != 5 or len(masks) != num_hidden_layers:
            raise ValueError(
                f"head_mask is {tuple(head_mask.shape)}; it has to be (heads,) or (layers, heads), "
                f"of {num_hidden_layers} layers"
            )
        masks = masks.to(self.dtype)
        return masks.unsqueeze(-1) if is_attention_chunked else masks
