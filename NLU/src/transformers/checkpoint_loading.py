"""Loads a checkpoint's tensors into a model, after sorting out which are missing or foreign.

names as in the file ── the model's names ── tied ones joined ── missing and foreign ones ── copied
"""

import re
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from loralib.adapters.adapter import LORA, Kind
from loralib.adapters.canonical import names_without_wrappers
from loralib.adapters.families import in_backbone
from loralib.adapters.fingerprint import fingerprint
from loralib.adapters.names import more_layers
from loralib.errors import CheckpointError, MissingLayersError
from loralib.initialization import deferring_start
from loralib.text import counted, listed
from loralib.utils import start_from_weights

from .adapter_kinds import BOTTLENECK
from .utils import logging

logger = logging.get_logger(__name__)

# How other models' heads are named. A checkpoint may hold one; it is left out.
_HEAD = "head."
_HEADS = (_HEAD, "lm_head.", "lm_predictions.", "cls.")
# Upstream's buffer of 0, 1, 2, …, which holds no information.
_POSITION_IDS = "embeddings.position_ids"


# The dtypes whose rounding to another one is the same, directly or by way of float32.
_MAPPED = (torch.float32, torch.float16, torch.bfloat16)
# The kinds that add tensors to a backbone, and the settings for their places and sizes.
ADDED = {
    LORA: "lora_r, lora_alpha and lora_targets",
    BOTTLENECK: "adapter_type and adapter_size",
}


class MisplacedWeightsError(MissingLayersError):
    """Raised for a checkpoint with weights of LoRA or adapters that the model has no place for.

    Args:
        source: the checkpoint.
        kind: the kind of the weights.
        names: the weights' names.
    """

    def __init__(self, source: str, kind: Kind, names: Collection[str]):
        self.kind, self.switch = kind.name, kind.switch
        CheckpointError.__init__(
            self,
            f"{source}: holds {kind.name} weights that the model has no place for, such as "
            f"{listed(names, at_most=2)}: build it with {kind.switch} and their {ADDED[kind]}",
        )


class CheckpointLoadingMixin:
    """Loads a checkpoint's tensors into a built model; a mix-in for `PreTrainedModel`."""

    adapted_by: tuple[Kind, ...]
    base_fingerprint: str | None
    newly_initialized: frozenset[str]
    tensors_read: dict[str, Tensor]

    def load_checkpoint(
        self,
        tensors: Mapping[str, Tensor],
        source: str,
        held_in: torch.dtype = torch.float32,
        brought: Collection[str] = (),
    ) -> dict[str, list[str]]:
        """Loads a checkpoint's tensors, and initializes those that it may lack.

        Args:
            tensors: the checkpoint's tensors.
            source: the checkpoint's name, for errors.
            held_in, brought: as in `from_pretrained`.

        Returns:
            What did not fit, as in `from_pretrained`.

        Raises:
            CheckpointError: as in `from_pretrained`.
        """
        own, tensors = self.state_dict(), names_without_wrappers(tensors, source)
        matched = self._join_tied(self._match_names(tensors, own), source)
        missing = own.keys() - matched.keys() - self.tied.keys() - self.cloned.keys()
        self._check_missing(missing, source, {*brought})
        fitting = self._drop_foreign(matched, own, source)
        for name, tensor in fitting.items():
            if tensor.shape != own[name].shape:
                raise CheckpointError(_shape_message(source, name, tensor, own[name]))
        with deferring_start():
            self._initialize(missing)
        self.newly_initialized = frozenset(missing)
        stays = self._backbone_matrices(own) if held_in is not torch.float32 else {}
        with torch.no_grad():
            for name, tensor in fitting.items():
                if name in stays and tensor.dtype in _MAPPED:
                    stays[name].data = tensor.contiguous()
                else:
                    own[name].copy_(tensor)
        self._copy_clones(matched)
        if any(LORA.part in name for name in missing):
            # LoRA that is newly initialized may start from the weights, which are here only now.
            start_from_weights(self)
        self.tensors_read = fitting
        self.base_fingerprint = fingerprint(fitting, [self._prefix(own)])
        left_out = matched.keys() - fitting.keys()
        if self._prefix(tensors) and not self._prefix(own):
            left_out = {name.removeprefix(_HEAD) for name in left_out}
        return {
            "missing_keys": sorted(missing),
            "unexpected_keys": sorted(n for n in left_out if not n.endswith(_POSITION_IDS)),
            "error_msgs": [],
        }

    def _backbone_matrices(self, own: Iterable[str]) -> dict[str, nn.Parameter]:
        """Returns the backbone's weights by name, except vectors and what adapts it."""
        prefix, adapting = self._prefix(own), [kind.part for kind in self.adapted_by]
        return {
            name: parameter
            for name, parameter in self.named_parameters()
            if in_backbone(name, (prefix,))
            and parameter.dim() > 1
            and not any(part in name for part in adapting)
        }

    def _copy_clones(self, read: Mapping[str, Tensor]) -> None:
        """Fills clones that a checkpoint did not have from the tensors that they are clones of."""
        with torch.no_grad():
            for name, source in self.cloned.items():
                if name not in read:
                    self.get_parameter(name).copy_(self.get_parameter(source))

    def _prefix(self, names: Iterable[str]) -> str:
        """Returns the prefix of the backbone's tensors; "" if there is no head."""
        start = f"{self.base_model_prefix}."
        return start if any(name.startswith(start) for name in names) else ""

    def _match_names(
        self, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Renames a checkpoint's tensors to this model's names: old endings, another prefix."""
        ours, theirs = self._prefix(own), self._prefix(tensors)
        matched = {}
        for name, tensor in tensors.items():
            name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
            name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
            if theirs and not ours:
                # A head of the checkpoint keeps a name that no backbone has.
                name = name.removeprefix(theirs) if name.startswith(theirs) else f"{_HEAD}{name}"
            elif ours and not theirs and not name.startswith(_HEADS):
                name = f"{ours}{name}"
            matched[name] = tensor
        return matched

    def _join_tied(self, tensors: dict[str, Tensor], source: str) -> dict[str, Tensor]:
        """Keeps one of each group of tied tensors, under the name that the others are tied to."""
        tensors = dict(tensors)
        for name, kept in self.tied.items():
            if name in tensors:
                tied = tensors.pop(name)
                if not torch.equal(tied, tensors.setdefault(kept, tied)):
                    raise CheckpointError(
                        f"{source}: {name} differs from {kept}; the model has one tensor for both"
                    )
        return tensors

    def _check_missing(self, missing: set[str], source: str, brought: set[str]) -> None:
        own = self.state_dict().keys()
        held, prefix = own - missing, self._prefix(own)
        groups = {kind.name: {name for name in own if kind.part in name} for kind in ADDED}
        head = {name for name in own if prefix and not name.startswith(prefix)}
        groups["head"] = head.difference(self.tied, self.cloned, *groups.values())
        groups["pooler"] = {name for name in own if name.startswith(f"{prefix}pooler.")}
        for what, names in groups.items():
            if not names <= missing:
                continue
            missing = missing - names
            if not names <= brought:
                # In an adapted model, an adapter's file brings them, or they are to be trained.
                level = logging.INFO if self.adapted_by else logging.WARNING
                is_open = self.adapted_by and not brought
                but = ", unless an adapter brings them" if is_open else ""
                said = "%s has no %s weights: they are newly initialized%s"
                logger.log(level, said, source, what, but)
        if missing:
            layers = more_layers(missing, held)
            raise CheckpointError(
                f"{source}: lacks {counted(len(missing), 'tensor')}: "
                f"{_told(missing, layers and layers[::-1])}"
            )

    def _drop_foreign(
        self, tensors: dict[str, Tensor], own: Mapping[str, Tensor], source: str
    ) -> dict[str, Tensor]:
        """Drops tensors of other heads; raises an error for others that the model does not have."""
        prefix = self._prefix(own)
        unknown = tensors.keys() - own.keys()
        foreign = {
            name
            for name in unknown
            if name.endswith(_POSITION_IDS)
            or name.startswith((f"{prefix}pooler.", *_HEADS))
            or (prefix and not name.startswith(prefix))
        }
        misplaced = unknown - foreign
        layers = more_layers(misplaced, own.keys())
        for kind in ADDED:
            added = {name for name in unknown if kind.part in name}
            if added and not layers:
                raise MisplacedWeightsError(source, kind, added)
        if misplaced:
            raise CheckpointError(
                f"{source}: has {counted(len(misplaced), 'tensor')} that the model does not have: "
                f"{_told(misplaced, layers)}"
            )
        return {name: tensor for name, tensor in tensors.items() if name not in foreign}

    def _initialize(self, missing: set[str]) -> None:
        """Initializes the modules that own a missing tensor; loading overwrites the others."""
        missing = missing | {tied for tied, kept in self.tied.items() if kept in missing}
        for name in sorted({name.rpartition(".")[0] for name in missing}):
            self._init_weights(self.get_submodule(name))


def _told(names: Collection[str], layers: tuple[int, int] | None) -> str:
    """Lists names for an error; only one, and the reason, if the numbers of layers differ."""
    if layers is None:
        return listed(names)
    return (
        f"{listed(names, at_most=1)}: the file has {layers[0]} layers, num_hidden_layers is "
        f"{layers[1]}: use the config.json that belongs to the file"
    )


def _shape_message(source: str, name: str, read: Tensor, own: Tensor) -> str:
    shapes = f"{tuple(read.shape)} in the file, {tuple(own.shape)} in the model"
    message = f"{source}: {name} is {shapes}"
    if name.endswith("lora_A"):
        message += f": rank {read.shape[0]}, not {own.shape[0]}"
    elif not re.search(r"embeddings|encoder|layer", name):
        message += (
            ": a head for another number of labels? To train a new one, start from the model "
            "without it, as AutoModel.from_pretrained(…).save_pretrained(…) saves it"
        )
    return message
