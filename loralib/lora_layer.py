"""Base class of all LoRA layers: the update's settings and parameters."""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .arguments import FINITE, as_dropout, as_flag, as_number, as_python
from .errors import CheckpointError
from .functional import Delta, joined_with_start, merge, variant_of
from .initialization import (
    check_initialization,
    from_weight,
    initializes,
    orthogonal,
    start_is_deferred,
    starts_from_weight,
)
from .merged_copy import MergedCopy, up_to_date
from .nn.dropout import Dropout
from .steps import mark_layer, mark_update
from .tensor_kinds import is_sharded
from .wrappers import has_own_forward
from .zero3 import check_gathered

logger = logging.getLogger(__name__)


class LoRALayer:
    """Base class of all LoRA layers: a mixin that comes before the plain layer among the bases.

    The plain layer's constructor has to run first.

    Args:
        r: rank of the update; 0 for none, which makes the layer its plain counterpart.
        lora_alpha: the update is scaled by lora_alpha / r.
        lora_dropout: probability that an element of the update's input is dropped in training.
        merge_weights: whether evaluation mode computes with the merged weight.
        variant: variant of the update, a name in `loralib.functional.VARIANTS`; "lora" is the
            paper's.
        initialization: initialization of A and B, a name in
            `loralib.initialization.INITIALIZATIONS`.
        freeze_A: A keeps its initial values, and only B is trained (LoRA-FA, Zhang et al., 2023,
            arXiv:2308.03303): the layer's input need not be kept for the backward pass.

    Attributes:
        scaling: what B A is multiplied by: lora_alpha / r, or what the variant defines.
        merged: whether the mode with the merged weight is in effect. In a subclass with its own
            forward, which computes with `weight`, or with its own train: whether `weight` contains
            the update, as in 0.1.2. Such a class adds the update to `weight` and then sets this to
            True.
        lora_magnitude_vector: with DoRA only, m, one number for each updated row of the weight.
        lora_A_start: A's initial value, with an initialization that computes it from the weight.
            The update is then s · (B A − B_start A_start), so that it starts as zero.
        lora_B_start: likewise, B's initial value.

    Raises:
        ValueError: r is not an integer or is negative; lora_alpha is not a finite number, and
            r > 0; lora_dropout lies outside [0, 1]; a flag is neither True nor False; the variant
            or the initialization is unknown, or the latter does not fit r; or merged is set to
            True, except by a class with its own forward or train.
    """

    r: int = 0
    variant: str = "lora"
    initialization: str = "default"
    freeze_A: bool = False
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_magnitude_vector: nn.Parameter
    lora_A_start: Tensor
    lora_B_start: Tensor
    lora_dropout: Callable[[Tensor], Tensor]  # a child module only if p > 0, as in 0.1.2

    # Provided by the plain layer.
    _parameters: dict[str, Tensor]
    _buffers: dict[str, Tensor]
    _modules: dict[str, nn.Module | None]
    register_buffer: Callable[[str, Tensor], None]
    forward: Callable[..., Any]
    training: bool

    # Those of A and B that were created without values (on the meta device, or while torch.nn.init
    # does nothing) and may have none yet: their names, and how often each had been written to when
    # it got memory. And whether A and B were created so.
    _empty: tuple[tuple[str, int], ...] = ()
    _was_empty: bool = False

    # Whether forward computes with the merged copy in the current mode; and whether the weight
    # itself contains the update, as a class with its own forward or train says by setting `merged`.
    _in_effect: bool = False
    _set_merged: bool = False

    # The first output row of each updated slice.
    _starts: tuple[int, ...] = (0,)

    def __init__(
        self,
        r: int,
        lora_alpha: float,
        lora_dropout: float,
        merge_weights: bool,
        variant: str = "lora",
        initialization: str = "default",
        freeze_A: bool = False,
    ):
        r = as_python(r)
        if not isinstance(r, int) or isinstance(r, bool) or r < 0:
            raise ValueError(f"r, the rank, must be an integer of at least 0, got {r!r}")
        self.r = r
        check_initialization(initialization, r)
        alpha = as_python(lora_alpha)
        self.lora_alpha = as_number("lora_alpha", alpha, *FINITE) if r > 0 else alpha
        self.variant = variant
        self.initialization = initialization
        self.freeze_A = as_flag("freeze_A", freeze_A)
        self.scaling = variant_of(variant).scale(self.lora_alpha, r)
        p = as_dropout(lora_dropout)
        self.lora_dropout = _unchanged if p == 0 else Dropout(p)
        self.merge_weights = as_flag("merge_weights", merge_weights)
        self._in_effect = False
        self._merged_copy: MergedCopy | None = None

    # ---- the frozen weight ----

    @property
    def base(self) -> Any:
        """The module that holds the frozen `weight` and the bias: the layer itself, or a child.

        A class of another package may have no `weight` itself, but a child called `base` that has.
        """
        inner = self._modules.get("base")
        return self if inner is None or hasattr(self, "weight") else inner

    # The frozen weight's name in `base`.
    frozen_name: str = "weight"

    @property
    def frozen_weight(self) -> nn.Parameter:
        """The weight that the update is added to."""
        return getattr(self.base, self.frozen_name)

    @property
    def base_bias(self) -> nn.Parameter | None:
        """The frozen layer's bias, if it has one."""
        return getattr(self.base, "bias", None)

    # ---- the update ----

    def _delta(self, dtype: torch.dtype | None = None) -> Delta:
        """Returns the low-rank update (see functional.py), with A and B cast to `dtype`."""
        A, B = self._factors()
        A, B, kind = A.to(dtype=dtype), B.to(dtype=dtype), variant_of(self.variant)
        scaling: Any = self.scaling
        if isinstance(scaling, Tensor):  # set by code outside of this package, which may train it
            if scaling.numel() != 1:
                raise ValueError(f"scaling has to be one number, got {tuple(scaling.shape)}")
            if dtype is None:
                B = B.to(torch.promote_types(B.dtype, scaling.dtype))
            B, scaling = B * scaling.to(B.dtype).reshape(()), 1.0
        magnitude: Any = {"magnitude": self.lora_magnitude_vector} if kind.has_magnitude else {}
        return kind(A, B, scaling, self._starts, **magnitude)

    def _factors(self) -> tuple[Tensor, Tensor]:
        """Returns A and B as matrices, joined with their starts if they started from the weight."""
        if not starts_from_weight(self.initialization):
            return self.lora_A, self.lora_B
        return joined_with_start(
            self.lora_A, self.lora_B, self.lora_A_start, self.lora_B_start, len(self._starts)
        )

    def _as_matrix(self, weight: Tensor) -> Tensor:
        """Returns a view of the weight as the (out, in) matrix that the update is added to."""
        raise NotImplementedError

    def _add_update(self, dtype: torch.dtype | None = None) -> None:
        """Creates the parameters of one update of the whole weight, as `_add_lora_parameters`."""
        out, width = self._as_matrix(self.frozen_weight).shape
        self._add_lora_parameters((self.r, width), (out, self.r), dtype)

    def _add_lora_parameters(
        self, shape_A: tuple[int, ...], shape_B: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> None:
        """Creates the update's parameters as zeros, and freezes the weight.

        Args:
            shape_A: A's shape.
            shape_B: B's shape.
            dtype: the parameters' dtype; by default the weight's.
        """
        self.lora_A = nn.Parameter(self._zeros(shape_A, dtype))
        self.lora_B = nn.Parameter(self._zeros(shape_B, dtype))
        self.lora_A.requires_grad = not self.freeze_A
        if variant_of(self.variant).has_magnitude:
            self.lora_magnitude_vector = nn.Parameter(self._zeros(shape_B[:1], dtype))
        if starts_from_weight(self.initialization):
            for name, shape in (("lora_A_start", shape_A), ("lora_B_start", shape_B)):
                self.register_buffer(name, self._zeros(shape, dtype))
        self.frozen_weight.requires_grad = False
        mark_layer(self)

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
        """Returns zeros of the frozen weight's class, on its device, by default in its dtype."""
        return self.frozen_weight.new_zeros(shape, dtype=dtype)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Registers a parameter, and marks it for steps.py if it is LoRA's, whoever sets it."""
        super().register_parameter(name, param)
        if name.startswith("lora_") and param is not None:
            mark_update(param)

    def __repr__(self) -> str:
        """Returns what `print` shows: the settings of the plain layer and of the update.

        The class does not override `extra_repr`, because other packages, such as torchao, set their
        own on the instance. That one may call the one it replaced, even when the layer has become
        a plain one again.
        """
        layer: Any = self
        own = vars(self).get("extra_repr")
        shown = ", ".join(text for text in (layer.extra_repr(), *self._shown_of_update()) if text)
        vars(self)["extra_repr"] = lambda: shown
        try:
            return super().__repr__()
        finally:
            if own is None:
                del vars(self)["extra_repr"]
            else:
                vars(self)["extra_repr"] = own

    def _shown_of_update(self) -> list[str]:
        """Returns the update's settings as `print` shows them; empty without an update."""
        if self.r == 0:
            return []
        shown = [f"r={self.r}", f"lora_alpha={self.lora_alpha}"]
        return shown if self.variant == "lora" else [*shown, self.variant]

    # ---- initial values ----

    def reset_lora_parameters(self) -> None:
        """Initializes A and B; by default, A as a linear layer's weight, and B with zeros."""
        if self.r == 0 or not hasattr(self, "lora_A"):  # a subclass may have other factors
            return
        self._check_startable()
        is_meta = self.lora_A.is_meta
        self._was_empty = (is_meta or not initializes()) and not start_is_deferred()
        if self._was_empty and not is_meta:
            self._note_empty(_FACTORS)
            self._start_magnitudes()
            return
        self._empty = tuple((name, 0) for name in _FACTORS if self._was_empty)
        if self.initialization == "orthogonal":
            orthogonal(self.lora_A, self.lora_B)
        else:
            self._reset_factors()
        self.start_from_weight()

    def _reset_factors(self) -> None:
        with drawn_as_a_whole(self.lora_A) as A:
            nn.init.kaiming_uniform_(A, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B)

    @torch.no_grad()
    def start_from_weight(self) -> None:
        """Initializes what is computed from the weight: DoRA's magnitudes, PiSSA's or OLoRA's A, B.

        Call it again after the weight has been loaded; see `loralib.utils.start_from_weights`.
        In a layer with nothing to compute from the weight, it changes nothing, with one exception:
        if A or B was created without values and has got memory since, but no values, then both are
        initialized. If values have been loaded into both, or written by hand, these stay.
        """
        if self.r == 0 or start_is_deferred() or not hasattr(self, "lora_A"):
            return
        if self._still_empty() and not self.lora_A.is_meta:
            self.reset_lora_parameters()
            return
        self._check_startable()
        if starts_from_weight(self.initialization):
            rank = self.lora_B.shape[1]
            pairs = [
                from_weight(self.initialization, W, rank, self.scaling)
                for W in self._updated_weights()
            ]
            for lora, start, made in (
                (self.lora_A, self.lora_A_start, torch.cat([A for A, _ in pairs])),
                (self.lora_B, self.lora_B_start, torch.cat([B for _, B in pairs])),
            ):
                lora.copy_(start.copy_(made.view(start.shape)))
        self._start_magnitudes()

    @torch.no_grad()
    def _start_magnitudes(self) -> None:
        """Sets DoRA's magnitudes to the norms of the weight's rows: the update starts as zero."""
        if variant_of(self.variant).has_magnitude:
            parts = self._updated_weights()
            wide = torch.promote_types(self.frozen_weight.dtype, torch.float32)
            norms = [torch.linalg.vector_norm(W, dim=1, dtype=wide) for W in parts]
            self.lora_magnitude_vector.copy_(torch.cat(norms))

    def _updated_weights(self) -> list[Tensor]:
        """Returns the updated slices of the weight, each (out, in)."""
        weight = self._as_matrix(self.frozen_weight)
        width = len(self.lora_B) // len(self._starts)
        return [weight[start : start + width] for start in self._starts]

    def _check_startable(self) -> None:
        """Checks that no tensor is sharded that the initialization, or DoRA, needs as a whole."""
        if starts_from_weight(self.initialization) or variant_of(self.variant).has_magnitude:
            what = f"the {type(self).__name__}'s LoRA, which is made of it, is initialized"
            check_gathered([(f"a {self.frozen_name}", self.frozen_weight)], what)
        is_start_whole = not is_sharded(getattr(self, "lora_A_start", None))
        if is_sharded(self.lora_A) and self.initialization != "default" and is_start_whole:
            raise ValueError(
                f"the initialization {self.initialization} needs whole tensors, and those of a "
                f"{type(self).__name__} are sharded: load the weights and call start_from_weights "
                "before that"
            )

    @property
    def _is_hf_initialized(self) -> bool:
        """Whether Transformers has noted that this module has its values.

        Transformers builds models on the meta device. It then loads the parameters that a file has,
        and sets this attribute on them as well, and initializes the others. Its initialization does
        not know A and B, so without this property they would stay uninitialized memory.
        """
        return vars(self).get("_is_hf_initialized", False)

    @_is_hf_initialized.setter
    def _is_hf_initialized(self, value: bool) -> None:
        vars(self)["_is_hf_initialized"] = value
        if value and self._was_empty and not self.lora_A.is_meta:
            # Transformers 4 also "loads" what a file lacks, from empty memory. What the model's
            # class has initialized since then stays.
            factors = [getattr(self, name) for name in _FACTORS]
            are_filled = all(_is_loaded(each) or _writes(each) for each in factors)
            if self._still_empty() or (_is_loaded(self.frozen_weight) and not are_filled):
                self.reset_lora_parameters()
            self._was_empty = False
            self.note_filled()
            mark_layer(self)

    def note_filled(self) -> None:
        """Notes that A and B have values now, even if no write to them was counted."""
        self._empty = ()

    def _still_empty(self) -> tuple[str, ...]:
        """Returns the names of those of A and B that were created without values and have none yet.

        One has values if something has been loaded into it or written to it since.
        """
        tensors = [(name, getattr(self, name), writes) for name, writes in self._empty]
        return tuple(
            name
            for name, t, writes in tensors
            if t.is_meta or (_writes(t) <= writes and not _is_loaded(t))
        )

    def _note_empty(self, names: tuple[str, ...]) -> None:
        """Notes that the parameters of these names have no values: past writes do not count."""
        self._empty = tuple((name, _writes(getattr(self, name))) for name in names)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        given = {name: state_dict.get(f"{prefix}{name}") for name in self._still_empty()}
        # A partial state dict may have been completed with the model's own tensors, which bring no
        # values: `set_model_state_dict` does so.
        is_given = {
            name: value is not None and not _is_alias(value, getattr(self, name))
            for name, value in given.items()
        }
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )
        warn_of_lora_left_out(unexpected_keys)
        mark_layer(self)
        self._note_empty(
            tuple(name for name in given if not is_given[name] or getattr(self, name).is_meta)
        )

    # ---- evaluation with the merged weight ----

    @property
    def merged(self) -> bool:
        """Whether the mode with the merged weight is in effect; see `LoRALayer`."""
        return self._set_merged or (not self._computes_elsewhere() and self._in_effect)

    @merged.setter
    def merged(self, value: bool) -> None:
        if self._set_merged or self._computes_elsewhere():
            self._set_merged = bool(value)
        elif value and not self._in_effect:
            if _is_from_here(self.train):
                raise ValueError(
                    "merged cannot be set to True: a layer's weight never holds its update here. "
                    "eval() computes with a merged copy, lora.merge(model) makes plain layers"
                )
            self._set_merged = True  # by a train() that has added the update to the weight
        else:
            self._in_effect = bool(value)

    @property
    def is_update_in_weight(self) -> bool:
        """Whether a class that merges by itself, as 0.1.2 does, has changed `weight`."""
        return self._set_merged

    def _computes_elsewhere(self) -> bool:
        """Returns whether forward is not this package's, but a subclass's or set on the instance.

        A forward written for 0.1.2 computes with `weight` alone if `merged` is true.
        """
        return not _is_from_here(type(self).forward) or has_own_forward(self)

    def train(self, mode: bool = True) -> "LoRALayer":
        """Sets the mode: in evaluation mode, `merge_weights` puts the merged weight into effect."""
        super().train(mode)
        if mode and self._set_merged and self.merge_weights:
            self._unmerge()
        self._in_effect = self.merge_weights and not mode
        self._merged_copy = None
        return self

    @torch.no_grad()
    def _unmerge(self) -> None:
        """Subtracts the update from the weight, to which the class has added it, as in 0.1.2."""
        is_known = type(self)._as_matrix is not LoRALayer._as_matrix
        if variant_of(self.variant).has_magnitude or not is_known:
            return  # unknown: the original weight (DoRA), or how a subclass has added the update
        if self.r > 0:
            added = self._delta()
            negative = replace(added, scaling=-added.scaling)
            self.frozen_weight.copy_(merge(self.frozen_weight, negative, self._as_matrix))
        self._set_merged = False

    def merged_layer(self) -> nn.Module:
        """Returns a plain layer with the update merged into its weight; see `loralib.merge`."""
        raise TypeError(f"{type(self).__name__} has no merged_layer() that merges its update")

    def check_merged_layer(self) -> None:
        """Checks that the class has its own `merged_layer` if it has its own forward.

        Raises:
            TypeError: it does not.
        """
        kind = type(self)
        if kind.merged_layer is LoRALayer.merged_layer or (
            not _is_from_here(kind.forward) and _is_from_here(kind.merged_layer)
        ):
            raise TypeError(
                f"{kind.__name__} has a forward of its own and no merged_layer() that says which "
                "plain layer computes the same: give it one (`return super().merged_layer()`, if "
                "it computes what its base class does)"
            )

    def _merge(self) -> Tensor:
        """Returns the weight with the update merged into it."""
        if self._set_merged:
            return self.frozen_weight.detach().clone()
        return merge(self.frozen_weight, self._delta(), self._as_matrix)

    def _merged_parameter(self) -> nn.Parameter:
        """Returns the result of `_merge` as a parameter; without an update, the weight itself."""
        weight = self.frozen_weight
        return nn.Parameter(self._merge(), weight.requires_grad) if self.r > 0 else weight

    def _merged_weight(self) -> Tensor | None:
        """Returns the merged weight, or None if the low-rank branch has to be computed."""
        if self._set_merged:
            return self.frozen_weight
        if not self._in_effect or torch.compiler.is_compiling() or torch.jit.is_tracing():
            return None
        if getattr(self.lora_dropout, "training", False):  # on its own, for Monte Carlo dropout
            return None
        kept = self._merged_copy
        valid = up_to_date(kept, self, self.frozen_weight, self._merge)
        if valid is not kept:  # setting a module's attribute takes time
            self._merged_copy = valid
        # Another thread may have replaced the attribute by now.
        return None if valid is None else valid.weight

    # ---- moving, copying and pickling ----

    def __prepare_scriptable__(self) -> nn.Module:
        """Refuses `torch.jit.script`, which calls this first: its own error gives no advice."""
        raise ValueError(
            "torch.jit.script cannot compile LoRA layers: give it lora.merge(copy.deepcopy(model))"
        )

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Moves and casts (`to`, `half`, `cuda`, …) the layer, and drops the merged copy."""
        self._merged_copy = None
        empty = self._still_empty()
        moved = super()._apply(*args, **kwargs)
        mark_layer(self)
        self._note_empty(empty)
        return moved

    def __getstate__(self) -> dict:
        empty = tuple((name, 0) for name in self._still_empty())
        return {**self.__dict__, "_merged_copy": None, "_empty": empty}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        if "_in_effect" not in state:  # pickled by an older version: `merged` was an attribute
            self._complete_old_state(vars(self).pop("merged", False))
        mark_layer(self)
        self._note_empty(tuple(name for name, _ in self._empty))  # a copy has its own counts

    def _complete_old_state(self, was_merged: bool) -> None:
        """Adds what a layer lacks that was pickled by an older version, from 0.1.2 on.

        Raises:
            CheckpointError: 0.1.2 had merged it. The weight cannot be unmerged here: in PyTorch's
                old file format it gets its values only later.
        """
        is_from_0_1_2 = "_merged_copy" not in vars(self)
        if is_from_0_1_2 and was_merged and self.r > 0:
            raise CheckpointError(
                f"loralib 0.1.2 pickled this {type(self).__name__} in evaluation mode, with the "
                "update in its weight: load it with loralib 0.1.2, call train(), and save its "
                "state_dict()"
            )
        self._merged_copy = None
        self._in_effect = self.merge_weights and not self.training


class _NoDropout:
    """The identity. (A lambda could not be pickled, and a module would become a child.)"""

    __slots__ = ()

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def __setattr__(self, name: str, value: object) -> None:
        if name != "p" or value != 0:
            raise AttributeError(
                f"{name} cannot be set, because the layer has no dropout: set "
                "layer.lora_dropout = torch.nn.Dropout(p)"
            )


_unchanged = _NoDropout()


def is_update_computed(layer: LoRALayer) -> bool:
    """Returns whether a tensor of an update is computed from others: parametrized or pruned."""
    own = layer._parameters.keys() | layer._buffers.keys()
    names = [name for name in _UPDATE if layer.r > 0 and name not in own]
    return any(isinstance(getattr(layer, name, None), Tensor) for name in names)


def _is_from_here(function: Callable[..., Any]) -> bool:
    """Returns whether a function or a class belongs to this package."""
    module = getattr(function, "__module__", None) or ""
    return module.startswith(f"{__package__}.")


_FACTORS = ("lora_A", "lora_B")
_UPDATE = (*_FACTORS, "lora_magnitude_vector")


@contextmanager
def drawn_as_a_whole(tensor: Any) -> Iterator[Tensor]:
    """Yields a tensor to fill with random numbers: the given one, or a whole one if it is sharded.

    The whole one of the first process is then distributed. On CPUs, PyTorch lets each process draw
    the numbers of its part by itself: with one seed the parts are equal, so that A has half the
    rank or less, and with several seeds the copies of a replicated A differ. On GPUs, it draws the
    numbers of a whole tensor.
    """
    if not (is_sharded(tensor) and tensor.is_cpu):
        yield tensor
        return
    from torch.distributed.tensor import distribute_tensor

    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    yield whole
    with torch.no_grad():
        tensor.copy_(distribute_tensor(whole, tensor.device_mesh, tensor.placements))


@torch.no_grad()
def _writes(tensor: Any) -> int:
    """Returns how often a tensor was written to in place, by PyTorch's count; 0 if it has none.

    A sharded tensor counts writes to the whole and to this process's shard.
    """
    counted = [tensor, tensor.to_local()] if is_sharded(tensor) else [tensor]
    return sum(0 if each.is_inference() else each._version for each in counted)


def _is_loaded(tensor: Tensor) -> bool:
    """Returns whether Transformers has noted on a tensor that it was in the file."""
    return getattr(tensor, "_is_hf_initialized", False)


def _is_alias(given: object, tensor: Tensor) -> bool:
    """Returns whether a state dict's entry is a layer's own tensor, or shares its memory.

    False for an alias of a sharded tensor: it does not share the tensor's count of writes, so it
    may have been filled without notice.
    """
    if given is tensor:
        return True
    if not (isinstance(given, Tensor) and {type(given), type(tensor)} <= {Tensor, nn.Parameter}):
        return False
    is_dense = given.layout == tensor.layout == torch.strided
    return is_dense and given.data_ptr() == tensor.data_ptr()


# The list of unexpected names of the latest `load_state_dict` that was warned of.
_warned_of: list[str] | None = None


def warn_of_lora_left_out(unexpected: list[str]) -> None:
    """Warns of LoRA in a state dict under names that the model lacks, once a `load_state_dict`.

    With strict=False, as in the release's instructions, PyTorch leaves it out without a message.

    Args:
        unexpected: the list to which PyTorch adds such names while it loads a model.
    """
    global _warned_of
    first = next((name for name in unexpected if "lora_" in name), None)
    if first is None or unexpected is _warned_of:
        return
    _warned_of = unexpected
    logger.warning(
        "the state dict has LoRA under names that the model lacks (%s, …), which is not loaded: "
        "build the model with that LoRA, or rename the tensors, as load_adapter does for DDP's and "
        "PEFT's files",
        first,
    )


def cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Returns the tensor in a dtype, or None if there is no tensor."""
    return None if tensor is None else tensor.to(dtype)


def lora_layers(model: nn.Module) -> dict[str, LoRALayer]:
    """Returns a model's LoRA layers that have an update (r > 0), by name, in the model's order."""
    modules = model.named_modules()
    return {name: m for name, m in modules if isinstance(m, LoRALayer) and m.r > 0}
