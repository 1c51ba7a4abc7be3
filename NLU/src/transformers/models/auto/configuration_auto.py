"""`AutoConfig`: the settings class that a ``config.json`` calls for."""

import os
from collections.abc import Mapping
from typing import Any

from ...configuration_utils import PretrainedConfig
from ...file_utils import CONFIG_NAME
from ...loading_arguments import split_arguments
from ..deberta_v2.configuration_deberta_v2 import DebertaV2Config
from ..roberta.configuration_roberta import RobertaConfig

CONFIG_MAPPING: dict[str, type[PretrainedConfig]] = {
    "roberta": RobertaConfig,
    "deberta-v2": DebertaV2Config,
}


class AutoConfig:
    """Builds the settings of any model this package carries."""

    def __init__(self) -> None:
        raise TypeError("AutoConfig is not built itself: use AutoConfig.from_pretrained")

    @classmethod
    def for_model(cls, model_type: str, **settings: Any) -> PretrainedConfig:
        """The settings of a new model of `model_type`."""
        return _config_class(model_type, "for_model")(**settings)

    @classmethod
    def from_pretrained(
        cls, name_or_path: str | os.PathLike, **arguments: Any
    ) -> PretrainedConfig | tuple[PretrainedConfig, dict[str, Any]]:
        """Reads a model's settings; arguments as in `PretrainedConfig.from_pretrained`.

        Raises:
            ValueError: the model is of a type that this package does not carry.
        """
        config_class = config_class_of(name_or_path, split_arguments(arguments)[0])
        return config_class.from_pretrained(name_or_path, **arguments)


def config_class_of(
    name_or_path: str | os.PathLike, where: Mapping[str, Any]
) -> type[PretrainedConfig]:
    """The settings class of a model; `where` as in `resolve_file`.

    Raises:
        ValueError: the model is of a type that this package does not carry.
    """
    values = PretrainedConfig.get_config_dict(name_or_path, **where)
    return _config_class(values.get("model_type"), str(name_or_path))


def _config_class(model_type: str | None, source: str) -> type[PretrainedConfig]:
    if not isinstance(model_type, str | None):
        raise ValueError(f"{source}/{CONFIG_NAME}: model_type must be a string, not {model_type}")
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"'{source}' is a {model_type or 'model of no stated type'}; "
            f"this package carries {', '.join(CONFIG_MAPPING)}"
        )
    return CONFIG_MAPPING[model_type]
