"""`PretrainedConfig`: the settings that a model is built from, stored as ``config.json``."""

import copy
import inspect
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from loralib.adapters import peft
from loralib.adapters.adapter import LORA
from loralib.adapters.metadata import are_text_columns, default_labels
from loralib.errors import AdapterAsModelError
from loralib.functional import VARIANTS
from loralib.initialization import INITIALIZATIONS
from loralib.io.atomic import atomic_write_text
from loralib.io.hub import resolve_file
from loralib.io.settings import (
    Count,
    Index,
    NotNegative,
    Positive,
    Share,
    ShareBelowOne,
    check_settings,
    checked,
)

from .adaptation_settings import (
    ADAPTATION_SETTINGS,
    ADAPTATIONS,
    ADAPTER_TYPES,
    LORA_TARGETS,
    MissingLoraError,
    check_same_adaptation,
    check_same_setting,
    in_order,
)
from .file_utils import CONFIG_NAME, read_json_object
from .loading_arguments import refuse_unknown, split_arguments

# Settings that are rewritten for the model's modules and layers, so that equivalent values become
# equal; see `EncoderConfig._resolve_lora`.
_RESOLVED = frozenset({"lora_layers", "lora_rank_pattern", "lora_alpha_pattern"})

_WEIGHTS = (".safetensors", ".bin", ".pt")
# Entries of config.json that describe the file and are not settings.
_NOT_OURS_TO_SET = {"model_type", "transformers_version"}
# Upstream's settings, with its defaults, for decoders, for text generation and for describing a
# file. Models here read only `is_decoder`. The others exist so that code that reads them works, and
# files keep those that differ from the defaults.
_UPSTREAM_SETTINGS = {
    "architectures": None,
    "tokenizer_class": None,
    "prefix": None,
    "task_specific_params": None,
    "sep_token_id": None,
    "decoder_start_token_id": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "use_bfloat16": False,
    "chunk_size_feed_forward": 0,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "max_length": 20,
    "min_length": 0,
    "do_sample": False,
    "early_stopping": False,
    "num_beams": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "num_return_sequences": 1,
    "output_scores": False,
    "return_dict_in_generate": False,
}
# Settings that are left out of a file unless the model is adapted.
_BASE_SETTINGS = ("base_name_or_path", "base_revision")
# Settings that are this fork's own: upstream knows none of them.
OWN_SETTINGS = frozenset(
    {
        *ADAPTATION_SETTINGS,
        *("reg_loss_wgt", "masking_prob", "unk_token_id", "special_token_ids"),
        *_BASE_SETTINGS,
    }
)


class PretrainedConfig:
    """The settings common to all models. Unknown settings are kept, and written again.

    Args:
        num_labels: outputs of a classification head; `id2label` and `label2id` override it.
        return_dict: models return a `ModelOutput` rather than a tuple.
        output_hidden_states: models also return every layer's output.
        output_attentions: models also return every layer's attention probabilities.
        torchscript: models return tuples, and tie no weights, for `torch.jit.trace`.
        tie_word_embeddings: the language-model head's projection is the word embedding itself.
        pruned_heads: layer -> the numbers of its heads that were pruned.
        gradient_checkpointing: in training, recompute layers' activations in the backward pass
            instead of keeping them: less memory, more time, the same numbers.
        finetuning_task: name of the task that the head is for.
        text_columns: the columns of a data set that the head was trained to read as a row's texts.
        apply_lora: put LoRA into every encoder layer; required with a rank or an alpha.
        lora_r: LoRA's rank.
        lora_alpha: LoRA's scale; the update is multiplied by lora_alpha / lora_r.
        lora_targets: the projections that LoRA adapts: names of `LORA_TARGETS`, which are put first
            and in that order; ends of modules' names, globs over them, or "all-linear".
        lora_layers: numbers of the layers that LoRA adapts; None for all.
        lora_dropout: dropout on the update's input, in training.
        lora_variant: the variant of the update, a name in `loralib.functional.VARIANTS`.
        lora_init: how A and B are initialized, a name in
            `loralib.initialization.INITIALIZATIONS`.
        lora_freeze_A: train only B.
        lora_rank_pattern: target, as in `lora_targets` -> rank, for projections whose rank is not
            `lora_r`. The first target that matches a module counts. Stored by modules' names.
        lora_alpha_pattern: the same for alphas that are not `lora_alpha`.
        apply_adapter: put bottleneck adapters into every encoder layer.
        adapter_type: where they are and what they compute, a name in `ADAPTER_TYPES`.
        adapter_size: width of the bottleneck.
        apply_bitfit: train the backbone's biases, and save them in a file of their own.
        reg_loss_wgt: weight of the consistency of two passes, in training (see consistency.py).
        masking_prob: share of the tokens that are hidden from the second pass.
        unk_token_id: the token that replaces a hidden one.
        special_token_ids: tokens that are never hidden.
        name_or_path: where the settings were read.
        base_name_or_path: the model that LoRA was put into, if that is another one.
        base_revision: the base's branch, tag or commit, if it is on the hub.
    """

    model_type: str = ""
    merges_lora = True
    """Whether evaluation computes with LoRA merged into its weights."""

    @checked
    def __init__(
        self,
        num_labels: Count | None = None,
        id2label: dict[int, str | int] | None = None,
        label2id: dict[str, int] | None = None,
        return_dict: bool = True,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
        torchscript: bool = False,
        tie_word_embeddings: bool = True,
        pruned_heads: dict[int, list[int]] | None = None,
        gradient_checkpointing: bool = False,
        finetuning_task: str | None = None,
        text_columns: Iterable[str] | None = None,
        pad_token_id: Index | None = None,
        bos_token_id: Index | None = None,
        eos_token_id: Index | None = None,
        apply_lora: bool | None = None,
        lora_r: Count | None = None,
        lora_alpha: Positive | None = None,
        lora_targets: Iterable[str] = ("query", "value"),
        lora_layers: Iterable[int] | None = None,
        lora_dropout: ShareBelowOne = 0.0,
        lora_variant: str = "lora",
        lora_init: str = "default",
        lora_freeze_A: bool = False,
        lora_rank_pattern: dict[str, int] | None = None,
        lora_alpha_pattern: dict[str, float] | None = None,
        apply_adapter: bool = False,
        adapter_type: str = "houlsby",
        adapter_size: Count = 64,
        apply_bitfit: bool = False,
        reg_loss_wgt: NotNegative = 0.0,
        masking_prob: Share = 0.0,
        unk_token_id: Index | None = None,
        special_token_ids: Iterable[int] = (),
        name_or_path: str = "",
        base_name_or_path: str | None = None,
        base_revision: str | None = None,
        **others: Any,
    ):
        self.return_dict = return_dict
        self.output_hidden_states = output_hidden_states
        self.output_attentions = output_attentions
        self.torchscript = torchscript
        self.tie_word_embeddings = tie_word_embeddings
        # In JSON, the keys are strings.
        self.pruned_heads = {int(n): list(heads) for n, heads in (pruned_heads or {}).items()}
        self.gradient_checkpointing = gradient_checkpointing
        self.finetuning_task = finetuning_task
        self.text_columns = None if text_columns is None else list(text_columns)
        self.pad_token_id = pad_token_id
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        given = {"apply_lora": apply_lora, "lora_r": lora_r, "lora_alpha": lora_alpha}
        _check_not_idle({}, given)
        self.apply_lora = bool(apply_lora)
        self.lora_r = lora_r
        self.lora_alpha = lora_alpha
        self.lora_targets = in_order(lora_targets)
        self.lora_layers = None if lora_layers is None else sorted({*lora_layers})
        self.lora_dropout = lora_dropout
        self.lora_variant = lora_variant
        self.lora_init = lora_init
        self.lora_freeze_A = lora_freeze_A
        self.lora_rank_pattern = dict(lora_rank_pattern or {})
        self.lora_alpha_pattern = dict(lora_alpha_pattern or {})
        self.apply_adapter = apply_adapter
        self.adapter_type = adapter_type
        self.adapter_size = adapter_size
        self.apply_bitfit = apply_bitfit
        self.reg_loss_wgt = reg_loss_wgt
        self.masking_prob = masking_prob
        self.unk_token_id = unk_token_id
        self.special_token_ids = list(special_token_ids)
        self.name_or_path = name_or_path
        self.base_name_or_path = base_name_or_path
        self.base_revision = base_revision
        if id2label is not None:
            # Transformers writes numbers here if the data's labels were numbers.
            self.id2label = {int(index): str(label) for index, label in id2label.items()}
            self.label2id = label2id or {label: index for index, label in self.id2label.items()}
        else:
            self.num_labels = 2 if num_labels is None else num_labels
        for key, value in {**_UPSTREAM_SETTINGS, **others}.items():
            if key in _NOT_OURS_TO_SET:
                continue
            if hasattr(type(self), key):
                raise ValueError(f"there is no setting '{key}': it is the name of a method")
            setattr(self, key, value)
        if sorted(self.id2label) != list(range(len(self.id2label))) or not self.id2label:
            numbers = ", ".join(map(str, sorted(self.id2label))) or "none"
            raise ValueError(f"id2label must number its classes 0, 1, …; it has {numbers}")
        if self.text_columns is not None and not are_text_columns(self.text_columns):
            raise ValueError(f"text_columns has to name one or two columns, not {text_columns}")
        if apply_lora:
            self._check_lora()
        if apply_adapter and adapter_type not in ADAPTER_TYPES:
            known = ", ".join(ADAPTER_TYPES)
            raise ValueError(f"unknown adapter_type '{adapter_type}' (known: {known})")

    def _check_lora(self) -> None:
        missing = [name for name in ("lora_r", "lora_alpha") if getattr(self, name) is None]
        if missing:
            raise MissingLoraError(
                missing, "chosen for training, or as the adapter to be loaded was trained"
            )
        if not self.lora_targets:
            raise MissingLoraError(["lora_targets"], f"some of {', '.join(LORA_TARGETS)}")
        for name, known in (("lora_variant", VARIANTS), ("lora_init", INITIALIZATIONS)):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"unknown {name} '{value}' (known: {', '.join(known)})")

    @property
    def longest_sequence(self) -> int | None:
        """The most tokens that a sequence can have; None if there is no limit."""
        return None

    @property
    def use_return_dict(self) -> bool:
        """Whether models return a `ModelOutput`: `return_dict`, but never with `torchscript`."""
        return self.return_dict and not self.torchscript

    @property
    def num_labels(self) -> int:
        """Outputs of a classification head."""
        return len(self.id2label)

    @num_labels.setter
    def num_labels(self, count: int) -> None:
        self.id2label = dict(enumerate(default_labels(count)))
        self.label2id = {label: index for index, label in self.id2label.items()}

    @property
    def label_names(self) -> tuple[str, ...]:
        """The labels of a classification head, in the order of its outputs."""
        return tuple(name for _, name in sorted(self.id2label.items()))

    @classmethod
    def get_config_dict(
        cls, name_or_path: str | os.PathLike, **arguments: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reads a model's ``config.json``; also returns the arguments that do not say where it is.

        Raises:
            OSError: as `read_values`.
        """
        where, others = split_arguments(arguments)
        return cls.read_values(name_or_path, **where), others

    @classmethod
    def read_values(cls, name_or_path: str | os.PathLike, **where: Any) -> dict[str, Any]:
        """Reads a model's ``config.json``; `where` as in `resolve_file`.

        Raises:
            AdapterAsModelError: it is an adapter, not a model.
            OSError: there is no such model, it has no ``config.json``, or that is damaged.
        """
        name = os.fspath(name_or_path)
        if os.path.isfile(name) and name.endswith(_WEIGHTS):
            raise OSError(
                f"'{name}' is a file of weights; a model is a folder with {CONFIG_NAME}: for an "
                "adapter, give the base here and the file as the adapter"
            )
        path = Path(name) if os.path.isfile(name) else resolve_file(name, CONFIG_NAME, **where)
        if path is None:
            _refuse_adapter(name, where)
            raise OSError(f"'{name}' has no {CONFIG_NAME}, so it is not a model folder")
        return read_json_object(path)

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike) -> "PretrainedConfig":
        """Builds the settings from a JSON file that `to_json_file` wrote.

        Raises:
            OSError: it is missing or damaged.
            ValueError: settings that no model can have.
        """
        values = read_json_object(json_file)
        for constructor in cls._constructors():
            check_settings(constructor, values, json_file)
        return cls.from_dict(values)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike,
        *,
        return_unused_kwargs: bool = False,
        **arguments: Any,
    ) -> "PretrainedConfig | tuple[PretrainedConfig, dict[str, Any]]":
        """Reads a model's settings.

        Args:
            name_or_path: a folder, its ``config.json``, or a repository's name.
            return_unused_kwargs: also return the arguments that are not settings, instead of
                raising an error.
            arguments: where to look, see `loading_arguments.split_arguments`; and settings, which
                replace the file's. For those of LoRA, adapters or BitFit, None means not given, so
                the file's value stays.

        Raises:
            OSError: as `read_values`.
            TypeError: an argument other than None is unknown: it says nothing of where to look, and
                is a setting neither of this class nor in the file.
            ValueError: the model is of another type, or was adapted with other settings; or an
                argument asks for something impossible, such as a rank without `apply_lora`.
        """
        where, overrides = split_arguments(arguments)
        config, unused = cls.read(name_or_path, where, overrides)
        if return_unused_kwargs:
            return config, unused
        # None asks for nothing: the release's run_glue.py gives RoBERTa, too, a cls_dropout.
        asked = [name for name, value in unused.items() if value is not None]
        refuse_unknown(cls, asked, cls.setting_names())
        return config

    @classmethod
    def setting_names(cls) -> set[str]:
        """Returns the names of the settings that this class knows."""
        return _UPSTREAM_SETTINGS.keys() | {
            name
            for constructor in cls._constructors()
            for name, parameter in inspect.signature(constructor).parameters.items()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and name != "self"
        }

    @classmethod
    def _constructors(cls) -> list[Callable]:
        return [base.__init__ for base in cls.__mro__ if issubclass(base, PretrainedConfig)]

    @classmethod
    def read(
        cls,
        name_or_path: str | os.PathLike,
        where: Mapping[str, Any],
        overrides: Mapping[str, Any],
        model: str | None = None,
    ) -> tuple["PretrainedConfig", dict[str, Any]]:
        """Reads settings; also returns the entries of `overrides` that are not settings.

        Args:
            name_or_path: as in `from_pretrained`.
            where: as in `resolve_file`.
            overrides: settings that replace the file's.
            model: name of the model that the settings are for, if not `name_or_path`.

        Raises:
            OSError, ValueError: as in `from_pretrained`.
        """
        place = os.fspath(name_or_path)
        values = cls.read_values(place, **where)
        model_type = values.get("model_type")
        if cls.model_type and model_type and model_type != cls.model_type:
            raise ValueError(f"'{place}' is a {model_type} model, not {cls.model_type}")
        source = place if os.path.isfile(place) else f"{place}/{CONFIG_NAME}"
        for constructor in cls._constructors():
            check_settings(constructor, values, source)
        known = (cls.setting_names() | values.keys()) - _NOT_OURS_TO_SET
        unused = {key: value for key, value in overrides.items() if key not in known}
        overrides = {
            key: value
            for key, value in overrides.items()
            if key in known and (key not in ADAPTATION_SETTINGS or value is not None)
        }
        spelt = {key: value for key, value in overrides.items() if key not in _RESOLVED}
        check_same_adaptation(place, values, spelt)
        name = place if model is None else model
        # A model that stays adapted as in its training keeps its base.
        if not any(values.get(switch) and overrides.get(switch, True) for switch in ADAPTATIONS):
            values["base_name_or_path"] = name
            values["base_revision"] = None if os.path.exists(name) else where.get("revision")
        values["name_or_path"] = name
        try:
            config = cls.from_dict(values, **overrides)
        except ValueError:
            cls._check_alone(values, source)
            raise  # the file's settings are sound: the fault is in the overrides
        if values.get("apply_lora"):
            for setting in _RESOLVED & overrides.keys():
                check_same_setting(place, setting, values, getattr(config, setting))
        return config, unused

    @classmethod
    def _check_alone(cls, values: dict[str, Any], source: str | os.PathLike) -> None:
        """Checks the settings of a file, without overrides.

        Raises:
            ValueError: no model can have them; the message names the file.
        """
        try:
            cls.from_dict(values)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error

    @classmethod
    def from_dict(
        cls, config_dict: dict[str, Any], *, return_unused_kwargs: bool = False, **arguments: Any
    ) -> "PretrainedConfig | tuple[PretrainedConfig, dict[str, Any]]":
        """Builds the settings from a dict as `to_dict` returns it.

        Args:
            config_dict: settings by name.
            return_unused_kwargs: also return the arguments that are not settings, instead of
                raising an error.
            arguments: settings, which replace the dict's.

        Raises:
            TypeError: an argument is a setting neither of this class nor in the dict.
            ValueError: settings that no model can have.
        """
        values, known = dict(config_dict), cls.setting_names() | config_dict.keys()
        unused = {name: value for name, value in arguments.items() if name not in known}
        if not return_unused_kwargs:
            refuse_unknown(cls, unused, known)
        overrides = {name: value for name, value in arguments.items() if name in known}
        _check_not_idle(values, overrides)
        if values.get("apply_lora") is None:
            values["apply_lora"] = False  # even if the file has a rank, which had no effect
        count, asked_for = len(values.get("id2label") or ()), overrides.get("num_labels")
        if "id2label" in overrides or asked_for not in (None, count):
            values.pop("id2label", None)
            values.pop("label2id", None)
        config = cls(**{**values, **overrides})
        return (config, unused) if return_unused_kwargs else config

    def update(self, config_dict: Mapping[str, Any]) -> None:
        """Sets settings by name."""
        for name, value in config_dict.items():
            setattr(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        """Returns all settings, with the model type."""
        left_out = {"name_or_path", *(() if self.is_adapted else _BASE_SETTINGS)}
        values = {
            name: copy.deepcopy(value)
            for name, value in vars(self).items()
            if not name.startswith("_") and name not in left_out
        }
        return {**values, "model_type": self.model_type}

    @property
    def is_adapted(self) -> bool:
        """Whether only LoRA, bottleneck adapters or biases of the backbone are trained."""
        return any(getattr(self, switch) for switch in ADAPTATIONS)

    def to_diff_dict(self) -> dict[str, Any]:
        """Returns `to_dict` without the `_UPSTREAM_SETTINGS` that have their defaults."""
        return {
            name: value
            for name, value in self.to_dict().items()
            if name not in _UPSTREAM_SETTINGS or value != _UPSTREAM_SETTINGS[name]
        }

    def to_json_string(self, use_diff: bool = True) -> str:
        """Returns the settings as JSON: `to_diff_dict`, or all of them if not `use_diff`."""
        return _as_json(self.to_diff_dict() if use_diff else self.to_dict())

    def to_json_file(self, json_file_path: str | os.PathLike, use_diff: bool = True) -> None:
        """Writes `to_json_string` to a file."""
        atomic_write_text(json_file_path, self.to_json_string(use_diff))

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        """Writes ``config.json`` into `folder`."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.to_json_file(Path(folder, CONFIG_NAME))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PretrainedConfig) and self.to_dict() == other.to_dict()

    __hash__ = None

    def __repr__(self) -> str:
        return f"{type(self).__name__} {self.to_json_string()}"


def _refuse_adapter(name: str, where: Mapping[str, Any]) -> None:
    """Raises an error if a folder, or a repository on the hub, holds an adapter and no model."""
    settings = resolve_file(name, peft.CONFIG_NAME, **where)
    if settings is not None:
        raise AdapterAsModelError(name, read_json_object(settings).get("base_model_name_or_path"))
    if any(os.path.isfile(os.path.join(name, file)) for file in LORA.files):
        raise AdapterAsModelError(name)


def write_settings(folder: str | os.PathLike, settings: Mapping[str, Any]) -> None:
    """Writes settings as a folder's ``config.json``."""
    atomic_write_text(Path(folder, CONFIG_NAME), _as_json(settings))


def _as_json(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, indent=2, sort_keys=True) + "\n"


def _check_not_idle(values: Mapping[str, Any], asked_for: Mapping[str, Any]) -> None:
    """Checks that no settings of LoRA or adapters are asked for that would be silently ignored.

    A file may hold such settings: it may be of a run that gave them without effect.

    Args:
        values: the content of a ``config.json``.
        asked_for: settings by name, which replace the file's.

    Raises:
        ValueError: settings are asked for, and their switch is neither on nor set to False.
    """
    for switch, names in ADAPTATIONS.items():
        idle = [name for name in names if _asks_for_something(name, asked_for.get(name))]
        if idle and asked_for.get(switch) is None and not values.get(switch):
            raise ValueError(
                f"{', '.join(idle)} without {switch}=True would have no effect: add that, or leave "
                f"{'it' if len(idle) == 1 else 'them'} out"
            )


def _asks_for_something(name: str, value: Any) -> bool:
    """Returns whether a value is not a setting's default, which some callers pass for all."""
    by_default = inspect.signature(PretrainedConfig).parameters.get(name)
    value = tuple(value) if isinstance(value, list) else value
    return bool(value) and (by_default is None or value != by_default.default)
