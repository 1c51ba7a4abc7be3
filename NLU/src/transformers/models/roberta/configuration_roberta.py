"""RoBERTa's settings."""

from typing import Any

from loralib.io.settings import Count, Index, checked

from ...configuration_encoder import EncoderConfig


class RobertaConfig(EncoderConfig):
    """The shape of a RoBERTa model; the defaults are roberta-base's, with BERT's vocabulary size.

    Of `max_position_embeddings`, tokens never use the first `pad_token_id` + 1: roberta-base has
    514 and takes sequences of 512 tokens.

    Args:
        shape, others: see `EncoderConfig`; the defaults are its own.
        type_vocab_size: rows of the token-type embedding, at least 1.
        pad_token_id, bos_token_id, eos_token_id: ids of RoBERTa's vocabulary.

    Raises:
        ValueError: settings that no model can have.
    """

    model_type = "roberta"

    @checked
    def __init__(
        self,
        *shape: Any,
        type_vocab_size: Count = 2,
        pad_token_id: Index = 1,
        bos_token_id: Index = 0,
        eos_token_id: Index = 2,
        **others: Any,
    ):
        super().__init__(
            *shape,
            type_vocab_size=type_vocab_size,
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            **others,
        )
        if self.max_position_embeddings <= pad_token_id + 1:
            raise ValueError(
                f"max_position_embeddings {self.max_position_embeddings} has no position for a "
                f"token: the first {pad_token_id + 1}, up to pad_token_id, are not for tokens"
            )

    @property
    def longest_sequence(self) -> int:
        """Tokens that a sequence can have at most: there are no positions for more."""
        return self.max_position_embeddings - self.pad_token_id - 1
