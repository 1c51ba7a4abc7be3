"""RoBERTa's settings."""

from typing import Any

from loralib.io.settings import Count, Index, NotNegative, Share, checked

from ...configuration_encoder import EncoderConfig


class RobertaConfig(EncoderConfig):
    """The shape of a RoBERTa model; the defaults are upstream's: BERT's shape, RoBERTa's token ids.

    Tokens never use the first `pad_token_id` + 1 of the `max_position_embeddings`: roberta-base has
    514 and takes sequences of 512 tokens.

    Args:
        others: see `EncoderConfig`.
        type_vocab_size: rows of the token-type embedding, at least 1.
        pad_token_id: id of padding in RoBERTa's vocabulary.
        bos_token_id: id of ``<s>`` there.
        eos_token_id: id of ``</s>`` there.
        is_decoder: tokens attend only to themselves and to those before them.
        classifier_dropout: dropout in the heads that classify texts or tokens, as newer releases of
            upstream have it; None for `hidden_dropout_prob`.

    Raises:
        ValueError: settings that no model can have.
    """

    model_type = "roberta"

    @checked
    def __init__(
        self,
        vocab_size: Count = 30522,
        hidden_size: Count = 768,
        num_hidden_layers: Count = 12,
        num_attention_heads: Count = 12,
        intermediate_size: Count = 3072,
        hidden_act: str = "gelu",
        hidden_dropout_prob: Share = 0.1,
        attention_probs_dropout_prob: Share = 0.1,
        max_position_embeddings: Count = 512,
        type_vocab_size: Count = 2,
        initializer_range: NotNegative = 0.02,
        layer_norm_eps: NotNegative = 1e-12,
        pad_token_id: Index = 1,
        bos_token_id: Index = 0,
        eos_token_id: Index = 2,
        is_decoder: bool = False,
        classifier_dropout: Share | None = None,
        **others: Any,
    ):
        super().__init__(
            vocab_size,
            hidden_size,
            num_hidden_layers,
            num_attention_heads,
            intermediate_size,
            hidden_act,
            hidden_dropout_prob,
            attention_probs_dropout_prob,
            max_position_embeddings,
            type_vocab_size,
            initializer_range,
            layer_norm_eps,
            pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            **others,
        )
        self.is_decoder = is_decoder
        self.classifier_dropout = classifier_dropout
        if self.max_position_embeddings <= pad_token_id + 1:
            raise ValueError(
                f"max_position_embeddings {self.max_position_embeddings} leaves no position for "
                f"tokens: the first {pad_token_id + 1}, up to pad_token_id, are reserved"
            )

    @property
    def head_dropout(self) -> float:
        """The dropout in the heads that classify texts or tokens."""
        own = self.classifier_dropout
        return self.hidden_dropout_prob if own is None else own

    @property
    def longest_sequence(self) -> int:
        """The most tokens that a sequence can have: there are no positions for more."""
        return self.max_position_embeddings - self.pad_token_id - 1
