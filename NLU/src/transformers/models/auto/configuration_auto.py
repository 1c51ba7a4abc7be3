"""`AutoConfig`: the settings class that a ``config.json`` calls for."""

import os
from collections.abc import Mapping
from typing import Any

from ...configuration_utils import PretrainedConfig
from ...file_utils import CONFIG_NAME
from ...loading_arguments import split_arguments
from ..registry import SUPPORTED, SupportedFamily


class AutoConfig:
    """Builds the settings of any model that this package supports."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("AutoConfig cannot be instantiated: use AutoConfig.from_pretrained")

    @classmethod
    def for_model(cls, model_type: str, **settings: Any) -> PretrainedConfig:
        """Returns the settings of a new model of `model_type`."""
        return _supported(model_type, "for_model").load("config")(**settings)

    @classmethod
    def from_pretrained(
        cls, name_or_path: str | os.PathLike, **arguments: Any
    ) -> PretrainedConfig | tuple[PretrainedConfig, dict[str, Any]]:
        """Reads a model's settings; arguments as in `PretrainedConfig.from_pretrained`.

        Raises:
            ValueError: the model is of a type that this package does not support.
        """
        family = supported_family_of(name_or_path, split_arguments(arguments)[0])
        return family.load("config").from_pretrained(name_or_path, **arguments)


def supported_family_of(
    model: str | os.PathLike | PretrainedConfig, where: Mapping[str, Any] | None = None
) -> SupportedFamily:
    """Returns a model's family, given its settings or where to read them.

    Args:
        model: the settings; or a folder or a hub repository.
        where: as in `resolve_file`.

    Raises:
        ValueError: the model is of a type that this package does not support.
    """
    if isinstance(model, PretrainedConfig):
        return _supported(model.model_type, type(model).__name__)
    values = PretrainedConfig.read_values(model, **(where or {}))
    return _supported(values.get("model_type"), str(model))


def _supported(model_type: str | None, source: str) -> SupportedFamily:
    if not isinstance(model_type, str | None):
        raise ValueError(f"{source}/{CONFIG_NAME}: model_type must be a string, not {model_type}")
    if model_type not in SUPPORTED:
        stated = f"model_type '{model_type}'" if model_type else "no model_type"
        raise ValueError(
            f"'{source}' has {stated}; this package has only "
            f"{', '.join(SUPPORTED)}: give one of these, such as roberta-base"
            f"{_elsewhere(model_type)}"
        )
    return SUPPORTED[model_type]


def _elsewhere(model_type: str | None) -> str:
    """Returns what to use for a model that is not supported here; "" if its type is unknown."""
    if model_type is None:
        return ""
    if model_type == "gpt2":
        return ", or train it with NLG/src/gpt2_ft.py --init_checkpoint"
    return ", or adapt it with lora.add_lora and upstream's Transformers (docs/any-model.md)"
