"""`PreTrainedModel`: how models are initialized, loaded, checked and saved."""

import copy
import inspect
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from loralib.adapters.adapter import LORA, Adapter, Kind, adapter_tensors
from loralib.adapters.checks import check_together
from loralib.adapters.families import in_backbone
from loralib.adapters.loading import load_into
from loralib.adapters.metadata import default_labels
from loralib.adapters.model_settings import lora_settings
from loralib.arguments import as_names
from loralib.errors import CheckpointError, SettingsError
from loralib.initialization import NoInitialization, deferring_start
from loralib.io.atomic import atomic_write
from loralib.io.tensors import write_tensors
from loralib.lora_layer import LoRALayer, lora_layers, warn_of_lora_left_out
from loralib.utils import start_from_weights

from .adaptation_settings import check_same_adaptation
from .adapter_kinds import BITFIT, BOTTLENECK
from .adapters import UpProjection
from .checkpoint_loading import ADDED, CheckpointLoadingMixin
from .configuration_utils import PretrainedConfig
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

# How many numbers are compared at a time.
_AT_ONCE = 2**24


class PreTrainedModel(nn.Module, CheckpointLoadingMixin, ModuleUtilsMixin, TokenEmbeddingsMixin):
    """A model that is loaded from a folder or the hub, and saved to a folder.

    Attributes:
        config_class: the class of the model's settings.
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
        # The fingerprint of the base's weights as read; see loralib.adapters.fingerprint.
        self.base_fingerprint: str | None = None
        # The tensors as read, memory-mapped from their file, by this model's names.
        self.tensors_read: dict[str, Tensor] = {}
        # Names of the tensors that a checkpoint did not have.
        self.newly_initialized: frozenset[str] = frozenset()

    @property
    def base_model(self) -> nn.Module:
        """The backbone, or the model itself if it has no head."""
        return getattr(self, self.base_model_prefix, self)

    def init_weights(self) -> None:
        """Initializes all weights, ties those that are tied, and removes pruned heads."""
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
        bottleneck adapter are initialized by their own classes.
        """
        match module:
            case nn.LayerNorm() | nn.Conv1d():
                module.reset_parameters()
            case nn.Embedding():
                self._initialize_matrix(module.weight)
                if module.padding_idx is not None:
                    nn.init.zeros_(module.weight.detach()[module.padding_idx])
            case nn.Linear():
                # Which weights a seed gives depends on all random numbers drawn and on their order.
                # That includes those for a weight that ends up as zero, so they have to be drawn.
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
        """Initializes a layer's A and B; families override it to do so in their own way."""
        layer.reset_parameters()

    def prune_heads(self, heads_to_prune: Mapping[int, Iterable[int]]) -> None:
        """Removes attention heads and records them in `config.pruned_heads`; see pruning.py.

        Args:
            heads_to_prune: layer -> heads, by their numbers before any was pruned. Heads that are
                already gone may be among them.

        Raises:
            NotImplementedError: the family's heads cannot be pruned.
            ValueError: there is no such layer or head, a layer would have no head left, or DoRA on
                attention's output cannot be pruned with it.
        """
        for name, layer in lora_layers(self).items():
            if hasattr(layer, "lora_magnitude_vector") and name.endswith("attention.output.dense"):
                raise ValueError(
                    f"prune_heads: DoRA scales the rows of {name} by norms over the columns of all "
                    "heads: merge LoRA first (loralib.merge), or prune before adding it"
                )
        self._take_out_heads(heads_to_prune)
        self._forget_base()

    def _take_out_heads(self, heads_to_prune: Mapping[int, Iterable[int]]) -> None:
        """Does what `prune_heads` does, also for a model whose LoRA is not yet initialized."""
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
        """Removes heads from a backbone's layers, counted from the first; families override it."""
        raise NotImplementedError(f"{type(self).__name__}: its attention heads cannot be pruned")

    def _as_asked(self, output: ModelOutput, return_dict: bool | None) -> ModelOutput | tuple:
        """Returns the output, or its tuple: as asked, or else as the settings say."""
        as_dict = self.config.use_return_dict if return_dict is None else return_dict
        return output if as_dict else output.to_tuple()

    def train_only(self, parts: Iterable[str]) -> None:
        """Freezes the backbone, except parameters with one of `parts` in their names.

        The head, which is all that is outside the backbone, is always trained. LoRA's A is not
        trained if the settings freeze it.

        Raises:
            ValueError: `parts` is a single name, or no parameter has one of them in its name, such
                as "lora_" in a model without LoRA.
        """
        prefix = self._prefix(self.state_dict())
        parts = as_names("parts", parts, "a list of parts of names such as ['lora_']")
        for part in parts:
            if not any(part in name for name, _ in self.named_parameters()):
                raise ValueError(
                    f"no parameter of the model has {part!r} in its name: build the model with "
                    "apply_lora=True, or whatever makes such parameters, or leave it out"
                )
        for name, parameter in self.named_parameters():
            is_base = in_backbone(name, (prefix,))
            trained = not is_base or any(part in name for part in parts)
            parameter.requires_grad_(trained)
        for layer in lora_layers(self).values():
            if layer.freeze_A:
                layer.lora_A.requires_grad_(False)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As `nn.Module`'s; also without LoRA, warns of LoRA that strict=False leaves out."""
        keys = super().load_state_dict(*args, **kwargs)
        warn_of_lora_left_out(keys.unexpected_keys)
        return keys

    @property
    def adapted_by(self) -> tuple[Kind, ...]:
        """The kinds that are trained in a frozen backbone; empty if all of it is trained."""
        present = {
            LORA: bool(lora_layers(self)),
            BOTTLENECK: self.config.apply_adapter,
            BITFIT: self.config.apply_bitfit,
        }
        return tuple(kind for kind in present if present[kind])

    def adapter(self, kind: Kind = LORA) -> Adapter:
        """Returns the trained weights of one kind and of the head, with their metadata.

        Raises:
            ValueError: the model has none of this kind.
        """
        if kind not in self.adapted_by:
            raise ValueError(f"the model has no {kind.name} layers: build it with {kind.switch}")
        self.note_untied()
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
        state = self.state_dict()
        tensors = adapter_tensors(state, [self._prefix(state)], kind)
        return Adapter(tensors, metadata, kind=kind)

    def _labels(self) -> tuple[str, ...] | None:
        """Returns the labels of the head's outputs; None if these stand for something else."""
        heads = SUPPORTED[self.config.model_type].family.heads
        if self.head is None or not heads[self.head].labeled:
            return None
        return self.config.label_names

    def _text_columns(self) -> tuple[str, ...] | None:
        """Returns the text columns that a classifier of sequences was trained on, else None."""
        columns = self.config.text_columns
        return tuple(columns) if columns and self.head == "sequence_classification" else None

    def _settings_of(self, kind: Kind) -> dict[str, Any]:
        """Returns the settings that the model was built with, named as in the kind's metadata."""
        if kind == BOTTLENECK:
            return {name: getattr(self.config, name) for name in ("adapter_type", "adapter_size")}
        if kind == BITFIT:
            return {}
        settings = {**lora_settings(self), "dropout": self.config.lora_dropout or None}
        if self.config.apply_lora:
            # The default is the settings' value, even if most modules have another one.
            layers = lora_layers(self).items()
            settings["rank"], settings["alpha"] = self.config.lora_r, self.config.lora_alpha
            settings["rank_pattern"] = {name: layer.r for name, layer in layers}
            settings["alpha_pattern"] = {name: layer.lora_alpha for name, layer in layers}
        return settings

    def load_adapters(self, adapters: Sequence[Adapter], new_head: bool = False) -> list[str]:
        """Loads one run's adapters, each of a different kind; see `adapters.loading.load_into`.

        Returns:
            The names of the head's tensors that were left unchanged.

        Raises:
            CheckpointError: they do not fit the model, or each other.
        """
        check_together(adapters)
        for adapter in adapters:
            self._check_head(adapter)
        state = self.state_dict()
        backbones = [self._prefix(state)]
        # PEFT's adapters for a model whose head was already trained may bring no head.
        known = state.keys() - self.newly_initialized
        skipped: set[str] = set()
        for adapter in adapters:
            settings = None if adapter.kind == LORA else self._settings_of(adapter.kind)
            skipped.update(
                load_into(
                    self, adapter, self.base_fingerprint, backbones, new_head, settings, known
                )
            )
        if not new_head:
            for adapter in adapters:
                self._describe_head(adapter)
        return sorted(skipped)

    def _describe_head(self, adapter: Adapter) -> None:
        """Sets the settings' labels and text columns to those of the head an adapter brings."""
        prefix = self._prefix(self.state_dict())
        if all(name.startswith(prefix) for name in adapter.tensors):
            return  # no head's tensors; also if the model is a backbone alone, as prefix is "" then
        labels = adapter.metadata.labels if adapter.metadata else None
        if labels and labels != default_labels(len(labels)):
            self.config.id2label = dict(enumerate(labels))
            self.config.label2id = {label: index for index, label in enumerate(labels)}
        columns = adapter.metadata.text_columns if adapter.metadata else None
        self.config.text_columns = list(columns) if columns else None

    def _check_head(self, adapter: Adapter) -> None:
        """Checks that an adapter's head, if its metadata names one, is for the model's task."""
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
        """Loads a model from a folder or a hub repository, in evaluation mode.

        Its weights are in float32, except for what `held_in` says.

        A head, LoRA or adapters that the checkpoint does not have are newly initialized, which is
        logged. Anything else that does not fit is an error: no tensor is silently dropped or made
        up.

        Args:
            name_or_path: a folder with ``config.json`` and weights, or a repository's name; None
                if both `config` and `state_dict` are given.
            model_args: the constructor's arguments after the settings. The first may also be the
                settings themselves, as `config`.
            config: settings to use instead of the checkpoint's, or where to read them.
            state_dict: tensors to use instead of the checkpoint's.
            output_loading_info: also return what did not fit: "missing_keys" (newly initialized),
                "unexpected_keys" (left out) and "error_msgs" (empty: errors are raised).
            held_in: the dtype that `loralib.training.precision.cast_frozen` will later give to
                the backbone's weights, which will be frozen; those that adapt it are excepted. If
                it is not float32, the backbone's matrices stay in their file, memory-mapped and not
                copied, and in the file's dtype. The model then computes under autocast only, and
                these weights must not be changed.
            brought: names of tensors that adapters will bring later. It is not logged that they
                are newly initialized.
            arguments: where to look, the constructor's arguments by name, and settings that replace
                the checkpoint's, as in `PretrainedConfig.from_pretrained`.

        Raises:
            OSError: there is no such model, or it has no weights.
            TypeError: an argument is unknown, or settings are given together with a `config`.
            ValueError: the model was adapted with other settings, or as in
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
                    f"{name}: its {CONFIG_NAME} sets {kind.switch}, but it has no {kind.name} "
                    "weights"
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
        # In float32 they are copied, so tensors that a caller gives stay the caller's own.
        info = model.load_checkpoint(
            tensors, name, held_in if state_dict is None else torch.float32, brought
        )
        return (model.eval(), info) if output_loading_info else model.eval()

    @classmethod
    def _own_arguments(cls) -> set[str]:
        """Returns the names of the constructor's arguments, except the settings."""
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
        """Returns a model's settings, and the values in its checkpoint; see `from_pretrained`."""
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
        """Returns the state dict, with frozen weights as they were read.

        A frozen weight that is held in half precision is replaced by the tensor that it was read
        from, if it still is that tensor's rounding: training never changes the base.
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

        Weights of another format in the folder are deleted: they would be read instead.

        Args:
            save_directory: the folder, which is created if it is missing.
            save_config: write ``config.json`` as well.
            state_dict: tensors to write instead of the model's.
            save_function: called with the tensors and the file's path, to write them.
            safe_serialization: write ``model.safetensors``.
        """
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        if self.config.apply_lora and not lora_layers(self):  # it was merged
            self.config = copy.copy(self.config)
            self.config.apply_lora = False
        self.note_untied()
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
    """Returns whether `held` is `read`, rounded to the dtype of `held`.

    They are compared on the device of `held`, which may round faster than a CPU, and in parts,
    because it may have little free memory.
    """
    if held.shape != read.shape:
        return False
    parts = zip(held.flatten().split(_AT_ONCE), read.flatten().split(_AT_ONCE), strict=True)
    return all(torch.equal(own, part.to(own.device).to(own.dtype)) for own, part in parts)
