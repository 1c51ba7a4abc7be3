"""`PreTrainedModel`: how models are initialized, loaded, checked and saved."""

import copy
import inspect
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loralib.adapters.adapter import LORA, Adapter, Kind, adapter_tensors
from loralib.adapters.checks import check_together
from loralib.adapters.families import in_backbone
from loralib.adapters.loading import load_into, lora_settings
from loralib.errors import CheckpointError, SettingsError
from loralib.initialization import NoInitialization, deferring_start
from loralib.io.atomic import atomic_write
from loralib.io.tensors import write_tensors
from loralib.lora_layer import LoRALayer, lora_layers
from loralib.utils import start_from_weights

from .adapter_kinds import BITFIT, BOTTLENECK
from .adapters import UpProjection
from .checkpoint_loading import ADDED, CheckpointLoadingMixin
from .configuration_utils import PretrainedConfig, check_same_adaptation
from .file_utils import (
    CONFIG_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_NAME,
    ModelOutput,
)
from .loading_arguments import refuse_unknown, split_arguments
from .models.registry import SUPPORTED
from .module_utils import ModuleUtilsMixin
from .pruning import heads_by_layer
from .token_embeddings import TokenEmbeddingsMixin
from .weight_files import WEIGHTS_NAMES, read_weights

logger = logging.getLogger(__name__)

# Numbers that are compared at a time.
_AT_ONCE = 2**24


class PreTrainedModel(nn.Module, CheckpointLoadingMixin, ModuleUtilsMixin, TokenEmbeddingsMixin):
    """A model that is read from and written to a folder or the hub.

    Attributes:
        config_class: the model's `PretrainedConfig`.
        base_model_prefix: name of the backbone within a model with a head.
        head: what its head does, a key of `Family.heads`; None for a backbone.
    """

    config_class: ClassVar[type[PretrainedConfig]] = PretrainedConfig
    base_model_prefix: ClassVar[str] = ""
    head: ClassVar[str | None] = None

    def __init__(self, config: PretrainedConfig):
        super().__init__()
        self.config = config
        self.name_or_path = config.name_or_path
        # Of the base's weights as they were read; see loralib.adapters.fingerprint.
        self.base_fingerprint: str | None = None
        # By this model's names; mapped from their file.
        self.tensors_read: dict[str, Tensor] = {}
        # Names of the tensors that a checkpoint did not have.
        self.newly_initialized: frozenset[str] = frozenset()

    @property
    def base_model(self) -> nn.Module:
        """The backbone; the model itself where it has no head."""
        return getattr(self, self.base_model_prefix, self)

    def init_weights(self) -> None:
        """Initializes all weights, ties those that are tied, and takes pruned heads out."""
        with deferring_start():
            self.apply(self._init_weights)
        self.tie_weights()
        if self.config.pruned_heads:
            self._take_out_heads(self.config.pruned_heads)
        start_from_weights(self)

    def _init_weights(self, module: nn.Module) -> None:
        """Initializes one module's own weights, as BERT does.

        Matrices are normal with the settings' `initializer_range` as standard deviation; biases and
        the embedding of padding are zero. Norms, convolutions, LoRA and the last projection of a
        bottleneck are initialized by their own classes.
        """
        match module:
            case nn.LayerNorm() | nn.Conv1d():
                module.reset_parameters()
            case nn.Embedding():
                self._initialize_matrix(module.weight)
                if module.padding_idx is not None:
                    nn.init.zeros_(module.weight.detach()[module.padding_idx])
            case nn.Linear():
                # A seed's weights depend on the order of all random numbers, including those for
                # a weight that is zero in the end.
                if isinstance(module, LoRALayer):
                    self._initialize_lora(module)
                self._initialize_matrix(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
                if isinstance(module, UpProjection):
                    module.reset_parameters()

    def _initialize_matrix(self, weight: Tensor) -> None:
        nn.init.normal_(weight, std=self.config.initializer_range)

    def _initialize_lora(self, layer: LoRALayer) -> None:
        """A hook for families that initialize A or B in another way than the layer does."""
        layer.reset_parameters()

    def prune_heads(self, heads_to_prune: Mapping[int, Iterable[int]]) -> None:
        """Takes attention heads out for good; see pruning.py. `config.pruned_heads` notes them.

        Args:
            heads_to_prune: by layer, the numbers that heads had in the whole model; those that are
                gone already may be among them.

        Raises:
            NotImplementedError: the family's heads cannot be pruned.
            ValueError: there is no such layer or head, a layer would have none left, or its LoRA
                cannot follow.
        """
        for name, layer in lora_layers(self).items():
            if hasattr(layer, "lora_magnitude_vector") and name.endswith("attention.output.dense"):
                raise ValueError(
                    f"prune_heads: DoRA on {name} scales rows by all heads' columns: merge it "
                    "first (loralib.merge), or prune before it is added"
                )
        self._take_out_heads(heads_to_prune)
        self._forget_base()

    def _take_out_heads(self, heads_to_prune: Mapping[int, Iterable[int]]) -> None:
        """As `prune_heads`, of a model whose LoRA has yet to start, too."""
        config = self.config
        numbers = (config.num_hidden_layers, config.num_attention_heads)
        new = heads_by_layer(heads_to_prune, *numbers)
        pruned = heads_by_layer(config.pruned_heads, *numbers)
        for layer, heads in new.items():
            pruned[layer] = sorted({*pruned.get(layer, ()), *heads})
            if len(pruned[layer]) == config.num_attention_heads:
                raise ValueError(f"prune_heads: layer {layer} would have no head left")
        self.base_model._prune_heads(new)
        config.pruned_heads = pruned

    def _prune_heads(self, heads_to_prune: Mapping[int, Iterable[int]]) -> None:
        """A family's way to take heads out of a backbone's layers, counted from the first."""
        raise NotImplementedError(f"{type(self).__name__}: its attention heads cannot be pruned")

    def _wants_states(self, given: bool | None) -> bool:
        """Whether a forward returns every layer's output: as asked, or else as the settings say."""
        return self.config.output_hidden_states if given is None else given

    def _wants_attentions(self, given: bool | None) -> bool:
        """Whether a forward returns attention's probabilities: likewise."""
        return self.config.output_attentions if given is None else given

    def _as_asked(self, output: ModelOutput, return_dict: bool | None) -> ModelOutput | tuple:
        """The output or its tuple: as asked, or else as the settings say."""
        as_dict = self.config.use_return_dict if return_dict is None else return_dict
        return output if as_dict else output.to_tuple()

    def train_only(self, parts: Iterable[str]) -> None:
        """Freezes the backbone except parameters with one of `parts` in their name.

        What is outside the backbone, the head, is trained in any case; LoRA's A is not where the
        settings freeze it.
        """
        prefix, parts = self._prefix(self.state_dict()), tuple(parts)
        for name, parameter in self.named_parameters():
            is_base = in_backbone(name, (prefix,))
            trained = not is_base or any(part in name for part in parts)
            parameter.requires_grad_(trained)
        for layer in lora_layers(self).values():
            if layer.freeze_A:
                layer.lora_A.requires_grad_(False)

    @property
    def adapted_by(self) -> tuple[Kind, ...]:
        """What is trained in the backbone while the rest of it is frozen; nothing if it all is."""
        present = {
            LORA: bool(lora_layers(self)),
            BOTTLENECK: self.config.apply_adapter,
            BITFIT: self.config.apply_bitfit,
        }
        return tuple(kind for kind in present if present[kind])

    def adapter(self, kind: Kind = LORA) -> Adapter:
        """The trained weights of one kind and the head, with their metadata.

        Raises:
            ValueError: the model has none of this kind.
        """
        if kind not in self.adapted_by:
            raise ValueError(f"the model has no {kind.name} layers: build it with {kind.switch}")
        config = self.config
        metadata = kind.metadata(
            **self._settings_of(kind),
            base=config.base_name_or_path,
            base_revision=config.base_revision,
            base_fingerprint=self.base_fingerprint,
            task=config.finetuning_task,
            head=self.head,
            is_decoder=config.is_decoder or None,
            labels=self._labels(),
            text_columns=self._text_columns(),
            trained_with=tuple(o.switch for o in self.adapted_by if o != kind) or None,
        )
        state = {name: t for name, t in self.state_dict().items() if name not in self.tied}
        tensors = adapter_tensors(state, [self._prefix(state)], kind)
        return Adapter(tensors, metadata, kind=kind)

    def _labels(self) -> tuple[str, ...] | None:
        """What the head's outputs stand for; None where that is not labels."""
        heads = SUPPORTED[self.config.model_type].family.heads
        if self.head is None or not heads[self.head].labelled:
            return None
        names = self.config.id2label
        return tuple(names[index] for index in sorted(names))

    def _text_columns(self) -> tuple[str, ...] | None:
        """The columns that the head was trained on; None where it reads no texts as a whole."""
        columns = self.config.text_columns
        return tuple(columns) if columns and self.head == "sequence_classification" else None

    def _settings_of(self, kind: Kind) -> dict[str, Any]:
        """What the model was built with, by the names that the kind's metadata has for it."""
        if kind == BOTTLENECK:
            return {name: getattr(self.config, name) for name in ("adapter_type", "adapter_size")}
        if kind == BITFIT:
            return {}
        settings = {**lora_settings(self), "dropout": self.config.lora_dropout or None}
        if self.config.apply_lora:
            # What is usual is what the settings say, also where most modules have another value.
            layers = lora_layers(self).items()
            settings["rank"], settings["alpha"] = self.config.lora_r, self.config.lora_alpha
            settings["rank_pattern"] = {name: layer.r for name, layer in layers}
            settings["alpha_pattern"] = {name: layer.lora_alpha for name, layer in layers}
        return settings

    def load_adapters(self, adapters: Sequence[Adapter], new_head: bool = False) -> list[str]:
        """Copies in one run's adapters, each of another kind; see `adapters.loading.load_into`.

        Returns:
            The names of the head's tensors that were left as they are.

        Raises:
            CheckpointError: they do not fit the model, or each other.
        """
        check_together(adapters)
        for adapter in adapters:
            self._check_head(adapter)
        state = self.state_dict()
        backbones = [self._prefix(state)]
        # PEFT's adapters of a model whose head is trained already may bring none.
        known = state.keys() - self.newly_initialized
        skipped: set[str] = set()
        for adapter in adapters:
            settings = None if adapter.kind == LORA else self._settings_of(adapter.kind)
            skipped |= {
                *load_into(
                    self, adapter, self.base_fingerprint, backbones, new_head, settings, known
                )
            }
        if not new_head:
            for adapter in adapters:
                self._describe_head(adapter)
        return sorted(skipped)

    def _describe_head(self, adapter: Adapter) -> None:
        """Sets what the settings say of the head to what an adapter says of the one it brings."""
        prefix = self._prefix(self.state_dict())
        if not prefix or all(name.startswith(prefix) for name in adapter.tensors):
            return
        labels = adapter.metadata.labels if adapter.metadata else None
        if labels and not labels[0].startswith("LABEL_"):
            self.config.id2label = dict(enumerate(labels))
            self.config.label2id = {label: index for index, label in enumerate(labels)}
        columns = adapter.metadata.text_columns if adapter.metadata else None
        self.config.text_columns = list(columns) if columns else None

    def _check_head(self, adapter: Adapter) -> None:
        """Checks that an adapter's head, where its metadata says it, does what the model's does."""
        metadata = adapter.metadata
        if metadata is None or metadata.head is None or self.head is None:
            return
        for what, theirs, ours in (
            ("head", metadata.head, self.head),
            ("is_decoder", bool(metadata.is_decoder), self.config.is_decoder),
        ):
            if theirs != ours:
                raise SettingsError(adapter.source, what, theirs, ours)

    # ---- loading ----

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike | None,
        *model_args: Any,
        config: PretrainedConfig | str | os.PathLike | None = None,
        state_dict: Mapping[str, Tensor] | None = None,
        output_loading_info: bool = False,
        held_in: torch.dtype = torch.float32,
        brought: Collection[str] = (),
        **arguments: Any,
    ) -> "PreTrainedModel | tuple[PreTrainedModel, dict[str, list[str]]]":
        """Builds the model of a folder or a hub repository, in evaluation mode.

        In float32, except for what `held_in` says.

        A head, LoRA or adapters that the checkpoint does not have are newly initialized, which is
        logged. Anything else that does not fit is an error: no tensor is silently dropped or made
        up.

        Args:
            name_or_path: a folder with ``config.json`` and weights, or a repository's name; None
                where both `config` and `state_dict` are given.
            model_args: the constructor's arguments after the settings; or those settings, `config`.
            config: settings to use instead of the checkpoint's, or where to read them.
            state_dict: tensors to use instead of the checkpoint's.
            output_loading_info: return what did not fit as well: "missing_keys" (newly
                initialized), "unexpected_keys" (left out) and "error_msgs" (none: they are raised).
            held_in: what the backbone's weights, except those that adapt it, are going to be held
                in by `loralib.training.precision.cast_frozen`, because they are going to be
                frozen. Those that the file has in it are in it already, mapped and not copied: the
                model computes under autocast alone, and they are not to be trained.
            brought: names of tensors that adapters are going to bring: of these it is not logged
                that they are newly initialized.
            arguments: where to look, the constructor's arguments by name, and settings that replace
                the checkpoint's, as in `PretrainedConfig.from_pretrained`.

        Raises:
            OSError: there is no such model, or it has no weights.
            TypeError: an unknown argument; or settings together with a `config`.
            ValueError: it was adapted with other settings, or as in
                `PretrainedConfig.from_pretrained`.
            CheckpointError: its weights are damaged or do not fit.
        """
        if config is None and model_args and isinstance(model_args[0], PretrainedConfig):
            config, *model_args = model_args
        where, arguments = split_arguments(arguments)
        own = {name: arguments.pop(name) for name in cls._own_arguments() & arguments.keys()}
        config, stated = cls._settings_for(name_or_path, config, where, arguments, state_dict)
        name = "state_dict" if name_or_path is None else os.fspath(name_or_path)
        tensors = read_weights(name, **where) if state_dict is None else state_dict
        for kind in ADDED:
            if stated.get(kind.switch) and not any(kind.part in tensor for tensor in tensors):
                raise CheckpointError(
                    f"{name}: its {CONFIG_NAME} says {kind.switch}, its weights hold none"
                )
        if state_dict is None and stated.get(LORA.switch) and "lora_targets" not in stated:
            logger.warning(
                "%s: a full model of the release's, with LoRA: if it was saved after an evaluation "
                "with loralib 0.1.2, its weights contain the update already, which would count "
                "twice. Then give its base as the model, and as --lora_path the file that "
                "utils/split_lora.py makes of it",
                name,
            )
        with torch.device("cpu"), NoInitialization(), deferring_start():
            model = cls(config, *model_args, **own)
        # Tensors that a caller gives stay the caller's own.
        info = model.load_checkpoint(
            tensors, name, held_in if state_dict is None else torch.float32, brought
        )
        return (model.eval(), info) if output_loading_info else model.eval()

    @classmethod
    def _own_arguments(cls) -> set[str]:
        """The constructor's arguments, except the settings."""
        return {
            name
            for name, parameter in inspect.signature(cls).parameters.items()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and name != "config"
        }

    @classmethod
    def _settings_for(
        cls,
        name_or_path: str | os.PathLike | None,
        config: PretrainedConfig | str | os.PathLike | None,
        where: Mapping[str, Any],
        overrides: Mapping[str, Any],
        state_dict: Mapping[str, Tensor] | None,
    ) -> tuple[PretrainedConfig, dict[str, Any]]:
        """A model's settings, and what its checkpoint states of itself; see `from_pretrained`."""
        given = isinstance(config, PretrainedConfig)
        known = cls._own_arguments() | cls.config_class.setting_names()
        if given:
            refuse_unknown(cls, overrides.keys() - known, known)
            if overrides:
                raise TypeError(f"{', '.join(overrides)}: set it in the config that is given")
        if name_or_path is None:
            if not given or state_dict is None:
                raise ValueError("from_pretrained(None) needs a config and a state_dict")
            return config, {}
        name = os.fspath(name_or_path)
        stated = cls.config_class.read_values(name, **where)
        elsewhere = config is not None
        if not given:
            source = config if elsewhere else name
            config, unused = cls.config_class.read(source, where, overrides, name)
            refuse_unknown(cls, unused, known)
        if elsewhere:
            check_same_adaptation(name, stated, vars(config))
        return config, stated

    # ---- saving ----

    def full_state_dict(self) -> dict[str, Tensor]:
        """The state dict with frozen weights as they were read.

        A frozen weight that is held in half precision is written with the bits of the file that it
        was read from, provided that it is their rounding: training never changes the base.
        """
        state = self.state_dict()
        frozen = {name for name, p in self.named_parameters() if not p.requires_grad}
        for name in frozen & self.tensors_read.keys():
            held, read = state[name], self.tensors_read[name]
            if held.dtype != read.dtype and _is_rounding(held, read):
                state[name] = read
        return {name: state[self.tied.get(name, name)] for name in state}

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        save_config: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        save_function: Callable[[dict[str, Tensor], Path], None] | None = None,
        *,
        safe_serialization: bool = False,
    ) -> None:
        """Writes ``config.json`` and the weights, as ``pytorch_model.bin`` or as safetensors.

        Weights of another format that the folder held are removed: they would be read instead.

        Args:
            save_directory: the folder; it is made where there is none.
            save_config: write ``config.json`` as well.
            state_dict: tensors to write instead of the model's.
            save_function: called with the tensors and the file's path, in the place of writing.
            safe_serialization: write ``model.safetensors``.
        """
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        if self.config.apply_lora and not lora_layers(self):  # it was merged
            self.config = copy.copy(self.config)
            self.config.apply_lora = False
        self.config.architectures = [type(self).__name__]
        if save_config:
            self.config.save_pretrained(folder)
        name = SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME
        tensors = self.full_state_dict() if state_dict is None else dict(state_dict)
        if save_function is None:
            write_tensors(folder / name, tensors)
        else:
            with atomic_write(folder / name) as path:
                save_function(tensors, path)
        for other in set(WEIGHTS_NAMES) - {name}:
            (folder / other).unlink(missing_ok=True)


def _is_rounding(held: Tensor, read: Tensor) -> bool:
    """Whether one tensor is the other in its own dtype.

    Compared on the device that it is held on, which rounds faster than a CPU, and in parts, because
    the device may have little room.
    """
    if held.shape != read.shape:
        return False
    parts = zip(held.flatten().split(_AT_ONCE), read.flatten().split(_AT_ONCE), strict=True)
    return all(torch.equal(own, part.to(own.device).to(own.dtype)) for own, part in parts)


def classification_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy or, with one label, mean squared error.

    Args:
        logits: (batch, labels).
        labels: (batch,), classes or scores.
    """
    labels = labels.flatten()
    if logits.shape[-1] == 1:
        return F.mse_loss(logits.squeeze(-1).float(), labels.float())
    return F.cross_entropy(logits.float(), labels)
