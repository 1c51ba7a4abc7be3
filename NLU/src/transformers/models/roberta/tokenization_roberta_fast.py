"""RoBERTa's fast tokenizer, which aligns tokens with words and characters."""

from typing import Any

from ...batch_encoding import Encoding
from ...tokenization_inputs import RowSettings
from ...tokenization_utils_fast import TOKENIZER_FILE, PreTrainedTokenizerFast
from .tokenization_roberta import VOCAB_FILES_NAMES, RobertaBackend


class RobertaTokenizerFast(RobertaBackend, PreTrainedTokenizerFast):
    """RoBERTa's fast tokenizer: the ids, and their alignment with words and characters.

    Args:
        settings: as in `RobertaBackend`; words (``is_split_into_words``) need
            ``add_prefix_space=True``.
    """

    vocab_files = ({"tokenizer_file": TOKENIZER_FILE}, VOCAB_FILES_NAMES)

    def _encode_batch(
        self, firsts: list[Any], seconds: list[Any] | None, settings: RowSettings
    ) -> tuple[dict[str, list[Any]], list[Encoding]]:
        if settings.words and not self.add_prefix_space:
            raise ValueError(
                "is_split_into_words=True: each word needs the space before it; open the "
                "tokenizer with add_prefix_space=True"
            )
        return super()._encode_batch(firsts, seconds, settings)
