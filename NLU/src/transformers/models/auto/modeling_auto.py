"""`AutoModel…`: the model class that a checkpoint's settings call for."""

import os
from typing import Any, ClassVar

from ...configuration_utils import PretrainedConfig
from ...loading_arguments import split_arguments
from ...modeling_utils import PreTrainedModel
from ..deberta_v2.configuration_deberta_v2 import DebertaV2Config
from ..deberta_v2.modeling_deberta_v2 import (
    DebertaV2ForMaskedLM,
    DebertaV2ForSequenceClassification,
    DebertaV2Model,
)
from ..roberta.configuration_roberta import RobertaConfig
from ..roberta.modeling_roberta import (
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    RobertaModel,
)
from .configuration_auto import config_class_of

_Classes = dict[type[PretrainedConfig], type[PreTrainedModel]]


class _AutoModel:
    model_classes: ClassVar[_Classes] = {}

    def __init__(self) -> None:
        name = type(self).__name__
        raise TypeError(f"{name} is not built itself: use {name}.from_pretrained or .from_config")

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> PreTrainedModel:
        """A new model, its weights drawn at random."""
        return cls.model_classes[type(config)](config)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike | None,
        *model_args: Any,
        config: PretrainedConfig | str | os.PathLike | None = None,
        **arguments: Any,
    ) -> PreTrainedModel | tuple[PreTrainedModel, dict[str, list[str]]]:
        """Reads a model; arguments as in `PreTrainedModel.from_pretrained`."""
        if config is None and model_args and isinstance(model_args[0], PretrainedConfig):
            config, *model_args = model_args
        if isinstance(config, PretrainedConfig):
            config_class = type(config)
        elif config is None and name_or_path is None:
            raise ValueError("from_pretrained(None) needs a config and a state_dict")
        else:
            source = name_or_path if config is None else config
            config_class = config_class_of(source, split_arguments(arguments)[0])
        model_class = cls.model_classes[config_class]
        return model_class.from_pretrained(name_or_path, *model_args, config=config, **arguments)


class AutoModel(_AutoModel):
    """A backbone."""

    model_classes: ClassVar[_Classes] = {
        RobertaConfig: RobertaModel,
        DebertaV2Config: DebertaV2Model,
    }


class AutoModelForMaskedLM(_AutoModel):
    """A backbone with its language-model head."""

    model_classes: ClassVar[_Classes] = {
        RobertaConfig: RobertaForMaskedLM,
        DebertaV2Config: DebertaV2ForMaskedLM,
    }


class AutoModelForSequenceClassification(_AutoModel):
    """A backbone with a classification or regression head."""

    model_classes: ClassVar[_Classes] = {
        RobertaConfig: RobertaForSequenceClassification,
        DebertaV2Config: DebertaV2ForSequenceClassification,
    }
