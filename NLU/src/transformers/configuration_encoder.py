"""The settings that RoBERTa and DeBERTa-v2 share."""

from collections.abc import Mapping
from typing import Any, ClassVar

from loralib.io.settings import Count, Index, NotNegative, Share, checked

from .activations import ACT2FN
from .configuration_utils import PretrainedConfig
from .lora_placement import by_module


class EncoderConfig(PretrainedConfig):
    """The shape of an encoder; the families' classes have the defaults.

    Args:
        vocab_size: rows of the word embedding; there may be more than the tokenizer has tokens.
        hidden_size: width of the residual stream.
        num_hidden_layers: number of encoder layers.
        num_attention_heads: heads per layer; divides `hidden_size`.
        intermediate_size: inner width of the feed-forward part.
        hidden_act: activation of the feed-forward part, a name in `ACT2FN`.
        hidden_dropout_prob: dropout on embeddings, outputs of sub-layers and in the head.
        attention_probs_dropout_prob: dropout on attention probabilities.
        max_position_embeddings: rows of the position embedding.
        type_vocab_size: rows of the token-type embedding; 0 for none.
        initializer_range: standard deviation of newly initialized weights.
        layer_norm_eps: epsilon of the layer norms.
        pad_token_id: id of the padding token, a row of the word embedding.
        others: see `PretrainedConfig`.

    Raises:
        ValueError: settings that no model can have.
    """

    lora_modules: ClassVar[Mapping[str, str]] = {
        "query": "attention.self.query",
        "key": "attention.self.key",
        "value": "attention.self.value",
        "attention_output": "attention.output.dense",
        "intermediate": "intermediate.dense",
        "output": "output.dense",
    }
    """The projections of a layer that LoRA can adapt: names in `LORA_TARGETS` -> modules."""

    @checked
    def __init__(
        self,
        vocab_size: Count,
        hidden_size: Count,
        num_hidden_layers: Count,
        num_attention_heads: Count,
        intermediate_size: Count,
        hidden_act: str,
        hidden_dropout_prob: Share,
        attention_probs_dropout_prob: Share,
        max_position_embeddings: Count,
        type_vocab_size: Index,
        initializer_range: NotNegative,
        layer_norm_eps: NotNegative,
        pad_token_id: Index,
        **others: Any,
    ):
        super().__init__(pad_token_id=pad_token_id, **others)
        if hidden_size % num_attention_heads:
            raise ValueError(
                f"hidden_size {hidden_size} is not a multiple of {num_attention_heads} heads"
            )
        if pad_token_id >= vocab_size:
            raise ValueError(
                f"pad_token_id must be below vocab_size, {vocab_size}, not {pad_token_id}"
            )
        check_activation("hidden_act", hidden_act)
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
        if self.apply_lora:
            self._resolve_lora()

    def _resolve_lora(self) -> None:
        """Rewrites LoRA's settings by the modules' names, so that equivalent settings become equal.

        Raises:
            ValueError: they do not fit the model.
        """
        placed = by_module(self).items()
        self.lora_rank_pattern = {n: each.rank for n, each in placed if each.rank != self.lora_r}
        self.lora_alpha_pattern = {
            name: each.alpha for name, each in placed if each.alpha != self.lora_alpha
        }
        if self.lora_layers == list(range(self.num_hidden_layers)):
            self.lora_layers = None


def check_activation(setting: str, name: str) -> None:
    """Checks that a setting names an activation function.

    Raises:
        ValueError: there is no such function.
    """
    if name not in ACT2FN:
        raise ValueError(f"unknown {setting} '{name}' (known: {', '.join(ACT2FN)})")
