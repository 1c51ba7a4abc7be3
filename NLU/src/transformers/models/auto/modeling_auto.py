"""`AutoModel…`: the model class that a checkpoint's settings call for."""

import os
from typing import Any, ClassVar

from ...configuration_utils import PretrainedConfig
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
from .configuration_auto import AutoConfig

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
        name_or_path: str | os.PathLike,
        config: PretrainedConfig | None = None,
        **arguments: Any,
    ) -> PreTrainedModel:
        """Reads a model; arguments as in `PreTrainedModel.from_pretrained`."""
        if config is None:
            config = AutoConfig.from_pretrained(name_or_path, **arguments)
            where = ("cache_dir", "revision", "use_auth_token")
            arguments = {key: arguments[key] for key in where if key in arguments}
        return cls.model_classes[type(config)].from_pretrained(name_or_path, config, **arguments)


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
