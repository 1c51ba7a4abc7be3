"""Translates the names of GPT-2's tensors in files, and builds a model from such tensors.

Files have the release's names, upstream's, or those of GPT-2's first files. `canonical_names` turns
all of them into the release's. `load_base` checks the tensors against a configuration before it
builds a model from them.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from family import GPT2
from loralib.adapters.canonical import uncompiled
from loralib.errors import CheckpointError
from loralib.initialization import NoInitialization, deferring_start
from loralib.lora_layer import lora_layers
from loralib.text import counted, listed
from model import MODEL_CARDS, GPT2Config, GPT2LMModel

_HALVES = (torch.float16, torch.bfloat16)
_OLD_ENDINGS = {".g": ".weight", ".b": ".bias", ".w": ".weight"}
# Buffers of other implementations: the causal mask, and the value that it masks with.
_NO_WEIGHTS = (".attn.bias", ".attn.masked_bias")


def canonical_names(tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Returns the tensors of a GPT-2 file under this model's names.

    Names may have the prefix ``transformer.`` or ``module.transformer.``, may be those of a
    compiled model, and may end in ``.g``, ``.b`` and ``.w`` as in GPT-2's first files. The head,
    which is tied to the embedding, is left out; if a file has only the head, it is the embedding.

    Raises:
        CheckpointError: a tensor has two names in the file, or the head differs from the embedding.
    """
    named, head = {}, None
    for name, tensor in tensors.items():
        short = uncompiled(name).removeprefix("module.")
        if short in GPT2.tied:
            head = tensor
            continue
        short = short.removeprefix(GPT2.backbone)
        if short.endswith(_NO_WEIGHTS):
            continue
        for old, new in _OLD_ENDINGS.items():
            if short.endswith(old):
                short = short.removesuffix(old) + new
        if f"{GPT2.backbone}{short}" in named:
            raise CheckpointError(f"{source}: holds {short} under two names")
        named[f"{GPT2.backbone}{short}"] = tensor
    has_base = any(name.startswith(GPT2.layers) and "lora_" not in name for name in named)
    if head is not None and has_base:
        # Of tied tensors, safetensors' save_model writes only the one whose name comes first.
        embedding = named.setdefault(f"{GPT2.backbone}wte.weight", head)
        if not torch.equal(head, embedding):
            raise CheckpointError(
                f"{source}: its head differs from its token embedding, but GPT-2's are one tensor"
            )
    return named


def load_base(
    config: GPT2Config,
    tensors: Mapping[str, Tensor],
    source: str,
    new_lora: bool = True,
    held_in: torch.dtype = torch.float32,
) -> GPT2LMModel:
    """Builds a model with trained weights.

    Parameters share their memory with `tensors` where no conversion is needed, so those of a mapped
    file are read when they are used. This holds for trainable parameters too: copy them before
    training.

    Args:
        config: the model's shape and its LoRA.
        tensors: a complete base under canonical names, with all LoRA tensors or none.
        source: the file's name, for errors.
        new_lora: whether LoRA tensors that the file lacks are initialized. False if an adapter or a
            run's state is loaded next, because decomposing weights may take minutes.
        held_in: the dtype in which frozen weights will be held if the model has LoRA. If that is a
            half precision, frozen tensors in one keep the file's. All others become float32.

    Raises:
        CheckpointError: tensors are missing, unknown, of another shape or dtype, or not finite.
    """
    with torch.device("meta"), NoInitialization(), deferring_start():
        model = GPT2LMModel(config)
    expected = own_tensors(model)
    _check_base(expected, tensors, source)
    will_be_half = config.lora_attn_dim > 0 and held_in in _HALVES
    for name, tensor in tensors.items():
        is_kept = will_be_half and "lora_" not in name and tensor.dtype in _HALVES
        _set_tensor(model, name, tensor if is_kept else tensor.float())
    for name, tensor in expected.items():
        if name not in tensors:  # a LoRA tensor, because no other can be missing
            _set_tensor(model, name, torch.empty(tensor.shape))
    if new_lora and not any("lora_" in name for name in tensors):
        for layer in lora_layers(model).values():
            layer.reset_lora_parameters()
    model.lm_head.decoder.weight = model.transformer.wte.weight
    return model


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns a model's parameters and LoRA's buffers by name; tied tensors come once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _set_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Replaces a parameter or a buffer; frozen parameters stay frozen."""
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    old = getattr(module, last)
    if isinstance(old, nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=old.requires_grad)
    setattr(module, last, tensor)


def _check_base(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor], source: str) -> None:
    lora_given = any("lora_" in name for name in tensors)
    wanted = {name for name in expected if lora_given or "lora_" not in name}
    missing, unknown = sorted(wanted - tensors.keys()), sorted(tensors.keys() - expected.keys())
    card = card_of(tensors)
    if card not in (None, card_of(expected)):
        raise CheckpointError(f"{source}: holds a {card}; give --model_card {card}")
    if card is None and card_of(expected) is not None:
        _check_shape(expected, tensors, source)
    for name in sorted(wanted & tensors.keys()):
        theirs, ours = tuple(tensors[name].shape), tuple(expected[name].shape)
        if theirs != ours:
            what = "LoRA of another rank" if "lora_" in name else "a model of another size"
            raise CheckpointError(
                f"{source}: is {what}: {name} is {theirs} in the file, {ours} in the model"
            )
    if missing:
        raise CheckpointError(
            f"{source}: lacks {counted(len(missing), 'tensor')}: {listed(missing)}"
        )
    if unknown:
        raise CheckpointError(
            f"{source}: has {counted(len(unknown), 'tensor')} that the model does not have: "
            f"{listed(unknown)}"
        )
    _check_values(tensors, source)


def _check_values(tensors: Mapping[str, Tensor], source: str) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"{source}: {name} holds {kind}, which needs a scale to be a weight: give "
                "the model in float32, bfloat16 or float16"
            )
        # The sum is 40 times as fast. It is not finite if any value is not, and rarely otherwise.
        if not tensor.sum(dtype=torch.float32).isfinite() and not tensor.isfinite().all():
            raise CheckpointError(f"{source}: {name} holds values that are not finite")


def _check_shape(
    expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor], source: str
) -> None:
    """Checks width and number of blocks of tensors that match no model card."""
    theirs = shape_of(tensors)
    if theirs is not None and theirs != shape_of(expected):
        cards = ", ".join(f"{card} {its[0]} and {its[1]}" for card, its in MODEL_CARDS.items())
        raise CheckpointError(
            f"{source}: holds a GPT-2 of width {theirs[0]} with {theirs[1]} blocks, which matches "
            f"none of the model cards ({cards}): give a base of one of these shapes"
        )


def shape_of(tensors: Mapping[str, Tensor]) -> tuple[int, int] | None:
    """Returns the width and number of blocks of tensors under canonical names.

    None if they have no token embedding, or lack a block.
    """
    within = (name.removeprefix(GPT2.layers) for name in tensors if name.startswith(GPT2.layers))
    blocks = {name.partition(".")[0] for name in within}
    embedding = tensors.get(f"{GPT2.backbone}wte.weight")
    if embedding is None or embedding.dim() != 2 or blocks != {*map(str, range(len(blocks)))}:
        return None
    return embedding.shape[1], len(blocks)


def card_of(tensors: Mapping[str, Tensor]) -> str | None:
    """Returns the model card of tensors under canonical names; None if there is none."""
    shape = shape_of(tensors)
    return next((card for card, (*its, _) in MODEL_CARDS.items() if (*its,) == shape), None)
