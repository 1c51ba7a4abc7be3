"""`AutoModel…`: the model class that a checkpoint's settings call for.

``MODEL_MAPPING``, ``MODEL_FOR_MASKED_LM_MAPPING`` and so on map the class of the settings to that
of the model, for all families. They are built on first access, since that imports all models.
"""

import os
from typing import Any, ClassVar

from ...configuration_utils import PretrainedConfig
from ...loading_arguments import split_arguments
from ...modeling_utils import PreTrainedModel
from ..registry import SUPPORTED
from .configuration_auto import supported_family_of


class _AutoModel:
    role: ClassVar[str] = ""
    """Which of a family's classes it stands for, see `SupportedFamily`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        name = type(self).__name__
        raise TypeError(
            f"{name} cannot be instantiated: use {name}.from_pretrained or .from_config"
        )

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> PreTrainedModel:
        """Returns a new model, randomly initialized."""
        return supported_family_of(config).load(cls.role)(config)

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
        if config is None and name_or_path is None:
            raise ValueError("from_pretrained(None) needs a config and a state_dict")
        source = name_or_path if config is None else config
        model_class = supported_family_of(source, split_arguments(arguments)[0]).load(cls.role)
        return model_class.from_pretrained(name_or_path, *model_args, config=config, **arguments)


class AutoModel(_AutoModel):
    """A backbone."""

    role = "backbone"


class AutoModelForMaskedLM(_AutoModel):
    """A backbone with its language-model head."""

    role = "masked_lm"


class AutoModelForPreTraining(AutoModelForMaskedLM):
    """A backbone with the head that it is pretrained with: `AutoModelForMaskedLM`."""


class AutoModelWithLMHead(AutoModelForMaskedLM):
    """`AutoModelForMaskedLM`, by 4.4's deprecated name."""


class AutoModelForCausalLM(_AutoModel):
    """A backbone with a language-model head for the next token."""

    role = "causal_lm"


class AutoModelForSequenceClassification(_AutoModel):
    """A backbone with a classification or regression head."""

    role = "sequence_classification"


class AutoModelForTokenClassification(_AutoModel):
    """A backbone with a classifier on every token."""

    role = "token_classification"


class AutoModelForQuestionAnswering(_AutoModel):
    """A backbone with a head for the start and the end of an answer."""

    role = "question_answering"


class AutoModelForMultipleChoice(_AutoModel):
    """A backbone with a head that scores choices."""

    role = "multiple_choice"


def auto_model_for(head: str) -> type[_AutoModel]:
    """Returns the Auto class of a head, such as "token_classification".

    Raises:
        ValueError: there is none.
    """
    known = {each.role: each for each in _AutoModel.__subclasses__()}
    if head not in known:
        raise ValueError(f"unknown head '{head}' (known: {', '.join(known)})")
    return known[head]


_MAPPINGS = {
    "MODEL_MAPPING": AutoModel,
    "MODEL_FOR_MASKED_LM_MAPPING": AutoModelForMaskedLM,
    "MODEL_FOR_PRETRAINING_MAPPING": AutoModelForPreTraining,
    "MODEL_WITH_LM_HEAD_MAPPING": AutoModelWithLMHead,
    "MODEL_FOR_CAUSAL_LM_MAPPING": AutoModelForCausalLM,
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING": AutoModelForSequenceClassification,
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING": AutoModelForTokenClassification,
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING": AutoModelForQuestionAnswering,
    "MODEL_FOR_MULTIPLE_CHOICE_MAPPING": AutoModelForMultipleChoice,
}


def __getattr__(name: str) -> dict[type[PretrainedConfig], type[PreTrainedModel]]:
    if name not in _MAPPINGS:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    role = _MAPPINGS[name].role
    families = [family for family in SUPPORTED.values() if role in family.classes]
    mapping = {family.load("config"): family.load(role) for family in families}
    globals()[name] = mapping
    return mapping
