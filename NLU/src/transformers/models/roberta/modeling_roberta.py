"""RoBERTa with LoRA, as published on its attention's query and value projections.

The encoder works on packed tokens, (tokens, hidden); see loralib/nn/packing.py. Where LoRA and
bottleneck adapters go is said in adapters.py. Names are upstream's, so that published weights load.
Source: RoBERTa, arXiv 1907.11692; LoRA, arXiv 2106.09685, section 4.2.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import loralib as lora
from loralib.nn.norm import LayerNorm
from loralib.nn.packing import PackedRows, attend

from ... import consistency
from ...adapters import Intermediate, SubLayerOutput, projection
from ...modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPooling,
    MaskedLMOutput,
    SequenceClassifierOutput,
)
from ...modeling_utils import PreTrainedModel, classification_loss, masked_lm_output, run_layer
from .configuration_roberta import RobertaConfig


class RobertaEmbeddings(nn.Module):
    """Word + position + token-type embeddings, normalised."""

    def __init__(self, config: RobertaConfig):
        super().__init__()
        pad = config.pad_token_id
        self.padding_idx = pad
        width = config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, width, padding_idx=pad)
        self.position_embeddings = nn.Embedding(
            config.max_position_embeddings, width, padding_idx=pad
        )
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width)
        self.LayerNorm = LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = lora.Dropout(config.hidden_dropout_prob)

    def position_ids(self, input_ids: Tensor) -> Tensor:
        """(batch, length): padding_idx + 1, + 2, … on tokens; padding_idx on padding.

        Raises:
            ValueError: a row has more tokens than the model has positions.
        """
        real = input_ids.ne(self.padding_idx).long()
        longest = self.position_embeddings.num_embeddings - self.padding_idx - 1
        if input_ids.shape[1] > longest and int(real.sum(1).max()) > longest:
            raise ValueError(
                f"a text has {int(real.sum(1).max())} tokens, the model has positions for {longest}"
            )
        return real.cumsum(dim=1) * real + self.padding_idx

    def forward(self, input_ids: Tensor, position_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        """Ids of any one shape -> (…, hidden)."""
        embedded = (
            self.word_embeddings(input_ids)
            + self.token_type_embeddings(token_type_ids)
            + self.position_embeddings(position_ids)
        )
        return self.dropout(self.LayerNorm(embedded))


class RobertaSelfAttention(nn.Module):
    """Multi-head attention without its output projection."""

    def __init__(self, config: RobertaConfig):
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.dropout_p = config.attention_probs_dropout_prob
        self.query = projection(config, "query", width, width)
        self.key = projection(config, "key", width, width)
        self.value = projection(config, "value", width, width)

    def forward(self, hidden: Tensor, queries: Tensor, rows: PackedRows) -> Tensor:
        """What `queries` gather from `hidden`; see `attend` for shapes."""
        dropout_p = self.dropout_p if self.training else 0.0
        q, k, v = self.query(queries), self.key(hidden), self.value(hidden)
        return attend(q, k, v, rows, self.heads, dropout_p)


class RobertaAttention(nn.Module):
    """Self-attention and its output."""

    def __init__(self, config: RobertaConfig):
        super().__init__()
        self.self = RobertaSelfAttention(config)
        self.output = SubLayerOutput(config, "attention_output", config.hidden_size)

    def forward(self, hidden: Tensor, queries: Tensor, rows: PackedRows) -> Tensor:
        """The residual stream at `queries`, attention added."""
        return self.output(self.self(hidden, queries, rows), queries)


class RobertaLayer(nn.Module):
    """Attention, then feed-forward, each normalised after its residual sum."""

    def __init__(self, config: RobertaConfig):
        super().__init__()
        self.attention = RobertaAttention(config)
        self.intermediate = Intermediate(config)
        self.output = SubLayerOutput(config, "output", config.intermediate_size)

    def forward(self, hidden: Tensor, rows: PackedRows, first_only: bool = False) -> Tensor:
        """(tokens, hidden) -> the same, or (batch, hidden) with `first_only`."""
        queries = hidden[rows.first] if first_only else hidden
        attended = self.attention(hidden, queries, rows)
        return self.output(self.intermediate(attended), attended)


class RobertaEncoder(nn.Module):
    """The layers one after the other."""

    def __init__(self, config: RobertaConfig):
        super().__init__()
        self.config = config
        self.layer = nn.ModuleList(RobertaLayer(config) for _ in range(config.num_hidden_layers))

    def forward(
        self, hidden: Tensor, rows: PackedRows, first_only: bool = False, all_states: bool = False
    ) -> list[Tensor]:
        """The last layer's output or, with `all_states`, the embeddings and every layer's.

        With `first_only`, the last layer is computed for each row's first token alone: a
        classifier reads nothing else, and five sixths of that layer's work is saved.
        """
        recompute = self.config.gradient_checkpointing and self.training
        states = [hidden]
        for layer in self.layer:
            first = first_only and layer is self.layer[-1]
            hidden = run_layer(layer, hidden, rows, first, recompute=recompute)
            states.append(hidden)
            if not all_states:
                del states[0]
        return states


class RobertaPooler(nn.Module):
    """tanh of a projection of the first token."""

    def __init__(self, config: RobertaConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, first: Tensor) -> Tensor:
        """(batch, hidden) -> (batch, hidden)."""
        return torch.tanh(self.dense(first))


class RobertaPreTrainedModel(PreTrainedModel):
    """How RoBERTa's weights are drawn."""

    config_class = RobertaConfig
    base_model_prefix = "roberta"


class RobertaModel(RobertaPreTrainedModel):
    """The backbone.

    Args:
        config: its settings.
        add_pooling_layer: with the pooler of BERT, which no head of this package uses.
    """

    def __init__(self, config: RobertaConfig, add_pooling_layer: bool = True):
        super().__init__(config)
        self.embeddings = RobertaEmbeddings(config)
        self.encoder = RobertaEncoder(config)
        self.pooler = RobertaPooler(config) if add_pooling_layer else None
        self.init_weights()

    def encode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        first_only: bool = False,
        all_states: bool = False,
    ) -> tuple[list[Tensor], PackedRows]:
        """Hidden states on packed tokens (see `RobertaEncoder`), and where those are in the batch.

        Args:
            input_ids: (batch, length).
            attention_mask: (batch, length), zero on padding; all ones where not given.
            token_type_ids: (batch, length); zeros where not given.
            position_ids: (batch, length); `RobertaEmbeddings.position_ids` where not given.
            first_only: the last state is (batch, hidden), each row's first token.
            all_states: every layer's state, not the last one's alone.
        """
        rows = PackedRows(torch.ones_like(input_ids) if attention_mask is None else attention_mask)
        if position_ids is None:
            position_ids = self.embeddings.position_ids(input_ids)
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        ids = (rows.pack(part) for part in (input_ids, position_ids, token_type_ids))
        return self.encoder(self.embeddings(*ids), rows, first_only, all_states), rows

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutputWithPooling | BaseModelOutput | tuple:
        """Hidden states of every token; arguments as in `encode`."""
        show = self._wants_states(output_hidden_states)
        states, rows = self.encode(
            input_ids, attention_mask, token_type_ids, position_ids, all_states=show
        )
        parts: dict[str, Any] = {
            "last_hidden_state": rows.pad(states[-1]),
            "hidden_states": tuple(map(rows.pad, states)) if show else None,
        }
        if self.pooler is None:
            return self._as_asked(BaseModelOutput(**parts), return_dict)
        parts["pooler_output"] = self.pooler(states[-1][rows.first])
        return self._as_asked(BaseModelOutputWithPooling(**parts), return_dict)


class RobertaLMHead(nn.Module):
    """Vocabulary logits; the projection is the word embedding itself."""

    def __init__(self, config: RobertaConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.layer_norm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.bias = self.decoder.bias

    def forward(self, hidden: Tensor) -> Tensor:
        """(…, hidden) -> (…, vocabulary)."""
        return self.decoder(self.layer_norm(F.gelu(self.dense(hidden))))


class RobertaForMaskedLM(RobertaPreTrainedModel):
    """RoBERTa with the head that it is pretrained with."""

    tied_weights: ClassVar[dict[str, str]] = {
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    }

    def __init__(self, config: RobertaConfig):
        super().__init__(config)
        self.roberta = RobertaModel(config, add_pooling_layer=False)
        self.lm_head = RobertaLMHead(config)
        self.init_weights()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        targets_only: bool | None = None,
    ) -> MaskedLMOutput | tuple:
        """Logits (batch, length, vocabulary) and, with `labels`, the loss over the targets.

        In training, with `labels`, logits are those of the targets alone, (targets, vocabulary),
        row by row: the head costs nothing elsewhere.

        Args:
            labels: (batch, length), token ids; -100 where there is no target.
            targets_only: whether that is so with `labels`; by default in training, and only there.
            others: as in `RobertaModel.encode`.
        """
        show = self._wants_states(output_hidden_states)
        states, rows = self.roberta.encode(
            input_ids, attention_mask, token_type_ids, position_ids, all_states=show
        )
        targets_only = self.training if targets_only is None else targets_only
        loss, logits = masked_lm_output(self.lm_head, states[-1], rows, labels, targets_only)
        shown = tuple(map(rows.pad, states)) if show else None
        return self._as_asked(MaskedLMOutput(loss, logits, shown), return_dict)


class RobertaClassificationHead(nn.Module):
    """dropout → dense → tanh → dropout → out_proj, in the precision of its own weights."""

    def __init__(self, config: RobertaConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = lora.Dropout(config.hidden_dropout_prob)
        self.out_proj = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, first: Tensor) -> Tensor:
        """(batch, hidden) -> (batch, labels).

        It sees one token a row, so float32 costs nothing and spares the logits half precision.
        """
        with torch.autocast(first.device.type, enabled=False):
            first = self.dropout(first.to(self.dense.weight.dtype))
            return self.out_proj(self.dropout(torch.tanh(self.dense(first))))


class RobertaForSequenceClassification(RobertaPreTrainedModel):
    """RoBERTa with a classifier, or with one label a regressor, on the first token."""

    def __init__(self, config: RobertaConfig):
        super().__init__(config)
        self.roberta = RobertaModel(config, add_pooling_layer=False)
        self.classifier = RobertaClassificationHead(config)
        self.init_weights()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> SequenceClassifierOutput | tuple:
        """Logits (batch, labels) and, with `labels` (batch,), the mean loss.

        Cross-entropy, or with one label the squared error; in consistency training, that of
        consistency.py. Other arguments as in `RobertaModel.encode`.
        """
        show = self._wants_states(output_hidden_states)
        if labels is not None and consistency.is_on(self):
            given = (input_ids, attention_mask, token_type_ids, position_ids)
            output = consistency.two_passes(self, labels, *given, show=show)
            return self._as_asked(output, return_dict)
        states, rows = self.roberta.encode(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            first_only=not show,
            all_states=show,
        )
        logits = self.classifier(states[-1][rows.first] if show else states[-1])
        loss = None if labels is None else classification_loss(logits, labels)
        shown = tuple(map(rows.pad, states)) if show else None
        return self._as_asked(SequenceClassifierOutput(loss, logits, shown), return_dict)
