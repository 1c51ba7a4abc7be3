r"""Handles projections that positions share with contents, as in DeBERTa-v2 with `share_att_key`.

There, one weight W projects both the tokens' contents and their relative positions. If it is
adapted, the update can reach both, or contents alone:

                       of contents x               of positions p
    contents alone     W x + s · B A x             W p                  the release's way
    both               W x + s · B A x             W p + s · B A p      PEFT's; and a merged weight

The two give different logits and gradients, and an adapter's tensors do not show with which of them
it was trained. So its metadata records it (`LoraMetadata.positions`), and whatever loads, merges or
converts the adapter asks here. A module that owns such projections has these members:

    shared_with_positions     names of its children that project positions as well
    lora_positions            whether LoRA in these children reaches positions
    unshare_positions()       gives positions their own projections, with the children's weights

Source: `nn.Linear.forward(self.query_proj, …)` in the release's modeling_deberta_v2.py.
"""

import copy
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from .module_names import joined


def shared_projections(model: nn.Module) -> set[str]:
    """Returns the names of a model's projections that positions share with contents."""
    return {
        joined(owner, child)
        for owner, module in _owners(model)
        for child in module.shared_with_positions
    }


def lora_reaches_positions(model: nn.Module) -> bool | None:
    """Returns whether a model's LoRA reaches positions; None if no shared projection has LoRA."""
    for _, module in _owners(model):
        for child in module.shared_with_positions:
            if hasattr(module.get_submodule(child), "lora_A"):
                return module.lora_positions
    return None


def unshare_positions(model: nn.Module, adapted: Collection[str]) -> None:
    """Gives positions their own projections, if a shared one is among those to be adapted.

    Otherwise an update that is merged into a shared weight would reach positions.

    Args:
        model: changed in place.
        adapted: names of the modules into which an update is about to be merged.
    """
    if shared_projections(model).isdisjoint(adapted):
        return
    # The model's config changes, and another model may have been built from the same object.
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if config is not None:
            module.config = configs.setdefault(id(config), copy.deepcopy(config))
    for _, module in list(_owners(model)):
        module.unshare_positions()


def _owners(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if getattr(module, "shared_with_positions", ()):
            yield name, module
