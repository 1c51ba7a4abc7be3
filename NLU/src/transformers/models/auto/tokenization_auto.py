"""`AutoTokenizer`: the tokenizer that a checkpoint's settings call for.

``TOKENIZER_MAPPING`` maps the class of the settings to (tokenizer that gives ids alone, fast
tokenizer), for all families. It is built on first access, since that imports all tokenizers.
"""

import os
from typing import Any

from ...configuration_utils import PretrainedConfig
from ...loading_arguments import split_arguments
from ...tokenization_utils_base import PreTrainedTokenizerBase
from ..registry import SUPPORTED
from .configuration_auto import supported_family_of


class AutoTokenizer:
    """Builds the tokenizer of any model that this package supports."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("AutoTokenizer cannot be instantiated: use AutoTokenizer.from_pretrained")

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
            config: its model's settings; by default read from `name_or_path`.
            use_fast: the tokenizer that also aligns tokens with words and characters; False for
                the one that gives the same ids and nothing else.
            arguments: as in `PreTrainedTokenizerBase.from_pretrained`.
        """
        source = name_or_path if config is None else config
        role = "tokenizer_fast" if use_fast else "tokenizer"
        tokenizer_class = supported_family_of(source, split_arguments(arguments)[0]).load(role)
        return tokenizer_class.from_pretrained(name_or_path, **arguments)


def __getattr__(name: str) -> dict[type[PretrainedConfig], tuple[type, type]]:
    if name != "TOKENIZER_MAPPING":
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    mapping = {
        carried.load("config"): (carried.load("tokenizer"), carried.load("tokenizer_fast"))
        for carried in SUPPORTED.values()
    }
    globals()[name] = mapping
    return mapping
