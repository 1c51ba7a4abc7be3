"""RoBERTa's settings."""

from typing import Any

from loralib.io.settings import Count, Index, NotNegative, Share, checked

from ...activations import ACT2FN
from ...configuration_utils import PretrainedConfig, check_padding


class RobertaConfig(PretrainedConfig):
    """The shape of a RoBERTa model; the defaults are roberta-base's, with BERT's vocabulary size.

    Args:
        vocab_size: rows of the word embedding.
        hidden_size: width of the residual stream.
        num_hidden_layers: encoder layers.
        num_attention_heads: heads a layer; divides `hidden_size`.
        intermediate_size: width within the feed-forward part.
        hidden_act: activation of the feed-forward part, a name in `ACT2FN`.
        hidden_dropout_prob: dropout on embeddings, outputs of sub-layers and in the head.
        attention_probs_dropout_prob: dropout on attention probabilities.
        max_position_embeddings: rows of the position embedding; the first `pad_token_id` + 1 are
            never used by a token, so texts have at most two positions less.
        type_vocab_size: rows of the token-type embedding.
        initializer_range: standard deviation of new weights.
        layer_norm_eps: epsilon of the layer norms.
        others: see `PretrainedConfig`.
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
        **others: Any,
    ):
        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            **others,
        )
        if hidden_size % num_attention_heads:
            raise ValueError(
                f"hidden_size {hidden_size} is not a multiple of {num_attention_heads} heads"
            )
        if hidden_act not in ACT2FN:
            raise ValueError(f"unknown hidden_act '{hidden_act}' (known: {', '.join(ACT2FN)})")
        check_padding(pad_token_id, vocab_size)
        if max_position_embeddings <= pad_token_id + 1:
            raise ValueError(
                f"max_position_embeddings {max_position_embeddings} has no position for a token: "
                f"the first {pad_token_id + 1}, up to pad_token_id, are none of a token's"
            )
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        self.hidden_act = hidden_act
        self.hidden_dropout_prob = hidden_dropout_prob
        self.attention_probs_dropout_prob = attention_probs_dropout_prob
        self.max_position_embeddings = max_position_embeddings
        self.type_vocab_size = type_vocab_size
        self.initializer_range = initializer_range
        self.layer_norm_eps = layer_norm_eps

    @property
    def longest_text(self) -> int:
        """Tokens that a text can have at most: there are no positions for more."""
        return self.max_position_embeddings - self.pad_token_id - 1
