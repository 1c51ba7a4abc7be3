"""`AutoTokenizer`: the tokenizer that a checkpoint's settings call for."""

import os
from typing import Any

from ...configuration_utils import PretrainedConfig
from ...loading_arguments import split_arguments
from ...tokenization_utils_base import PreTrainedTokenizerBase
from ..deberta_v2.configuration_deberta_v2 import DebertaV2Config
from ..deberta_v2.tokenization_deberta_v2 import DebertaV2Tokenizer
from ..roberta.configuration_roberta import RobertaConfig
from ..roberta.tokenization_roberta_fast import RobertaTokenizerFast
from .configuration_auto import config_class_of

TOKENIZER_MAPPING: dict[type[PretrainedConfig], type[PreTrainedTokenizerBase]] = {
    RobertaConfig: RobertaTokenizerFast,
    DebertaV2Config: DebertaV2Tokenizer,
}


class AutoTokenizer:
    """Builds the tokenizer of any model this package carries."""

    def __init__(self) -> None:
        raise TypeError("AutoTokenizer is not built itself: use AutoTokenizer.from_pretrained")

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike,
        config: PretrainedConfig | None = None,
        use_fast: bool = True,
        **arguments: Any,
    ) -> PreTrainedTokenizerBase:
        """Reads a tokenizer.

        Args:
            name_or_path: a folder or a hub repository.
            config: its model's settings; read from `name_or_path` where not given.
            use_fast: accepted as upstream has it; each tokenizer has one implementation here, which
                gives the ids of both of upstream's.
            arguments: as in `PreTrainedTokenizerBase.from_pretrained`.
        """
        if config is None:
            config_class = config_class_of(name_or_path, split_arguments(arguments)[0])
        else:
            config_class = type(config)
        return TOKENIZER_MAPPING[config_class].from_pretrained(name_or_path, **arguments)
