"""DeBERTa-v2's settings."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from loralib.io.settings import Count, Index, NotNegative, Share, checked

from ...configuration_encoder import EncoderConfig, check_activation

POSITION_TERMS = ("c2p", "p2c")
_ABSENT = ("", "none")


class DebertaV2Config(EncoderConfig):
    """The shape of a DeBERTa-v2 model; the defaults are upstream's.

    Arguments that are not described here are those of `EncoderConfig`. `hidden_dropout_prob` is
    also the dropout on relative positions.

    Args:
        relative_attention: let attention depend on the distance between two tokens.
        max_relative_positions: distances at or beyond this one are treated as the same. Below 1,
            `max_position_embeddings` takes its place.
        position_buckets: distances above half of this share embeddings, in buckets that grow with
            the distance. With 0 or less, each distance has its own.
        pos_att_type: the terms that relative positions add to attention: "c2p" (the query's content
            with the key's position) and "p2c" (the reverse), as "p2c|c2p" or a list.
        share_att_key: project positions by the contents' `query_proj` and `key_proj`, not by
            projections of their own.
        norm_rel_ebd: "layer_norm" to normalize the relative positions' embeddings, or "none".
        position_biased_input: add absolute positions to the embeddings.
        conv_kernel_size: width of the convolution parallel to the first layer, odd; 0 for none.
        conv_groups: the convolution's groups.
        conv_act: the convolution's activation.
        pooler_hidden_act: activation of the classifier's pooler.
        pooler_dropout: dropout on the pooler's input.
        cls_dropout: dropout between pooler and classifier; None for `hidden_dropout_prob`.
        lora_positions: with `share_att_key`, apply the LoRA of the query and the key to positions
            as well, as PEFT does. The release applies it to contents alone.

    Raises:
        ValueError: settings that no model can have.
    """

    model_type = "deberta-v2"
    merges_lora = False  # the release does not merge here
    lora_modules: ClassVar[Mapping[str, str]] = {
        **EncoderConfig.lora_modules,
        "query": "attention.self.query_proj",
        "key": "attention.self.key_proj",
        "value": "attention.self.value_proj",
    }

    @checked
    def __init__(
        self,
        vocab_size: Count = 128100,
        hidden_size: Count = 1536,
        num_hidden_layers: Count = 24,
        num_attention_heads: Count = 24,
        intermediate_size: Count = 6144,
        hidden_act: str = "gelu",
        hidden_dropout_prob: Share = 0.1,
        attention_probs_dropout_prob: Share = 0.1,
        max_position_embeddings: Count = 512,
        type_vocab_size: Index = 0,
        initializer_range: NotNegative = 0.02,
        layer_norm_eps: NotNegative = 1e-7,
        relative_attention: bool = False,
        max_relative_positions: int = -1,
        position_buckets: int = -1,
        pos_att_type: str | Iterable[str] | None = None,
        share_att_key: bool = False,
        norm_rel_ebd: str = "none",
        position_biased_input: bool = True,
        conv_kernel_size: Index = 0,
        conv_groups: Count = 1,
        conv_act: str = "tanh",
        pooler_hidden_act: str = "gelu",
        pooler_dropout: Share = 0.0,
        cls_dropout: Share | None = None,
        lora_positions: bool = False,
        pad_token_id: Index = 0,
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
            **others,
        )
        self.relative_attention = relative_attention
        self.max_relative_positions = max_relative_positions
        self.position_buckets = position_buckets
        self.pos_att_type = _names(pos_att_type)
        self.share_att_key = share_att_key
        self.norm_rel_ebd = "|".join(_names(norm_rel_ebd)) or "none"
        self.position_biased_input = position_biased_input
        self.conv_kernel_size = conv_kernel_size
        self.conv_groups = conv_groups
        self.conv_act = conv_act
        self.pooler_hidden_act = pooler_hidden_act
        self.pooler_dropout = pooler_dropout
        self.cls_dropout = cls_dropout
        self.lora_positions = lora_positions
        self._check()

    def _check(self) -> None:
        if self.conv_kernel_size and self.hidden_size % self.conv_groups:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of {self.conv_groups} "
                "conv_groups"
            )
        for name in ("conv_act", "pooler_hidden_act"):
            check_activation(name, getattr(self, name))
        for name, known in (("pos_att_type", POSITION_TERMS), ("norm_rel_ebd", ("layer_norm",))):
            unknown = [part for part in _names(getattr(self, name)) if part not in known]
            if unknown:
                raise ValueError(f"unknown {name} '{unknown[0]}' (known: {', '.join(known)})")
        for name in ("embedding_size", "pooler_hidden_size"):
            if getattr(self, name, self.hidden_size) != self.hidden_size:
                raise ValueError(f"{name} must equal hidden_size, {self.hidden_size}")
        if self.conv_kernel_size > 0 and self.conv_kernel_size % 2 == 0:
            raise ValueError(f"conv_kernel_size has to be odd, not {self.conv_kernel_size}")
        if self.position_buckets > 0 and not 1 < self.position_buckets < 2 * (self.furthest - 1):
            raise ValueError(
                f"position_buckets must be at least 2 and below {2 * (self.furthest - 1)} for "
                f"{self.furthest} relative positions, not {self.position_buckets}"
            )

    @property
    def longest_sequence(self) -> int | None:
        """The most tokens that a sequence can have; None without absolute positions."""
        return self.max_position_embeddings if self.position_biased_input else None

    @property
    def furthest(self) -> int:
        """Distances at or beyond this one are treated as the same."""
        known = self.max_relative_positions >= 1
        return self.max_relative_positions if known else self.max_position_embeddings

    @property
    def attention_span(self) -> int:
        """Number of embeddings of relative positions per direction."""
        return self.position_buckets if self.position_buckets > 0 else self.furthest


def _names(value: str | Iterable[str] | None) -> list[str]:
    """Returns the names in "a|b" or ["a", "b"], in lower case, each once."""
    if value is None:
        return []
    parts = value.split("|") if isinstance(value, str) else value
    names = dict.fromkeys(part.strip().lower() for part in parts)
    return [name for name in names if name not in _ABSENT]
