"""What RoBERTa's and DeBERTa-v2's models share; each family's own file has what sets it apart.

In the order in which data flows:

    ids ── embeddings ─> hidden ── Encoder: layer after layer ─> states        EncoderModel
    states ── vocabulary head ─> logits ── labels ─> loss                      EncoderForMaskedLM
    first tokens ── classifier ─> logits ── labels ─> loss       EncoderForSequenceClassification

All work on packed tokens, (tokens, hidden), see loralib/nn/packing.py; batches come in and go out
padded, (batch, length, …). The layers' projections, with LoRA and bottleneck adapters, are in
adapters.py.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from loralib.nn.packing import PackedRows

from . import consistency
from .adapters import Intermediate, SubLayerOutput
from .configuration_utils import PretrainedConfig
from .lora_placement import Placed
from .modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPooling,
    MaskedLMOutput,
    SequenceClassifierOutput,
)
from .modeling_utils import PreTrainedModel, classification_loss

# ---- embeddings ----


def too_long(tokens: int, positions: int) -> ValueError:
    """The error for a sequence of more tokens than the model has positions for."""
    return ValueError(f"a sequence has {tokens} tokens, the model has positions for {positions}")


# ---- layers ----


class EncoderAttention(nn.Module):
    """Self-attention and its output projection.

    Args:
        config: the model's settings.
        placed: where they put LoRA in this layer.
        self_attention: (hidden, queries, batch) -> what `queries` gather from `hidden`.
    """

    def __init__(
        self, config: PretrainedConfig, placed: Mapping[str, Placed], self_attention: nn.Module
    ):
        super().__init__()
        self.self = self_attention
        self.output = SubLayerOutput(config, placed, "attention_output", config.hidden_size)

    def forward(self, hidden: Tensor, queries: Tensor, batch: Any) -> Tensor:
        """The residual stream at `queries`, attention added."""
        return self.output(self.self(hidden, queries, batch), queries)


class EncoderLayer(nn.Module):
    """Attention, then feed-forward, each normalized after its residual sum.

    Args:
        config: the model's settings.
        placed, self_attention: as in `EncoderAttention`.
    """

    def __init__(
        self, config: PretrainedConfig, placed: Mapping[str, Placed], self_attention: nn.Module
    ):
        super().__init__()
        self.attention = EncoderAttention(config, placed, self_attention)
        self.intermediate = Intermediate(config, placed)
        self.output = SubLayerOutput(config, placed, "output", config.intermediate_size)

    def forward(self, hidden: Tensor, batch: Any, first_only: bool = False) -> Tensor:
        """(tokens, hidden) -> the same, or (batch, hidden) with `first_only`.

        Args:
            hidden: the residual stream.
            batch: what `Encoder.describe` gives; ``batch.first`` are the rows' first tokens.
            first_only: compute the output of each row's first token alone.
        """
        # Backwards one addition; hidden[batch.first] is sorted on a GPU, and slower on a CPU.
        queries = hidden.index_select(0, batch.first) if first_only else hidden
        attended = self.attention(hidden, queries, batch)
        return self.output(self.intermediate(attended), attended)


class Encoder(nn.Module):
    """The layers one after the other.

    Args:
        config: the model's settings.
        layers: its `EncoderLayer`s.
    """

    def __init__(self, config: PretrainedConfig, layers: Iterable[EncoderLayer]):
        super().__init__()
        self.config = config
        self.layer = nn.ModuleList(layers)

    def describe(self, rows: PackedRows) -> Any:
        """What every layer is told of a batch; computed once a forward."""
        return rows

    def after_layer(self, index: int, seen: Tensor, output: Tensor, rows: PackedRows) -> Tensor:
        """The next layer's input, where layer `index` has computed `output` of `seen`."""
        return output

    def forward(
        self, hidden: Tensor, rows: PackedRows, first_only: bool = False, all_states: bool = False
    ) -> list[Tensor]:
        """The last layer's output or, with `all_states`, the embeddings and every layer's.

        With `first_only`, the last layer is computed for each row's first token alone: a
        classifier reads nothing else, and five sixths of that layer's work is saved.
        """
        batch = self.describe(rows)
        recompute = self.config.gradient_checkpointing and self.training
        states = [hidden]
        for index, layer in enumerate(self.layer):
            first = first_only and index == len(self.layer) - 1
            output = run_layer(layer, hidden, batch, first, recompute=recompute)
            hidden = self.after_layer(index, hidden, output, rows)
            states.append(hidden)
            if not all_states:
                del states[0]
        return states


def run_layer(layer: nn.Module, *inputs: Any, recompute: bool) -> Any:
    """``layer(*inputs)``; with `recompute`, the backward pass computes its activations again.

    They then need no memory in between. The second time, random numbers are the same, so losses and
    gradients keep their bits. Source: "Training Deep Nets with Sublinear Memory Cost", arXiv
    1604.06174.
    """
    if recompute:
        return checkpoint(layer, *inputs, use_reentrant=False)
    return layer(*inputs)


# ---- models ----


class EncoderModel(PreTrainedModel):
    """A backbone.

    Attributes:
        embeddings: (rows, input_ids, token_type_ids, position_ids) -> (tokens, hidden).
        encoder: an `Encoder`.
        pooler: (batch, hidden), of the first tokens -> the same; None where the model has none.
    """

    embeddings: nn.Module
    encoder: Encoder
    pooler: nn.Module | None

    def encode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_rows: PackedRows | None = None,
        first_only: bool = False,
        all_states: bool = False,
    ) -> tuple[list[Tensor], PackedRows]:
        """Hidden states on packed tokens (see `Encoder`), and where those are in the batch.

        Args:
            input_ids: (batch, length).
            attention_mask: (batch, length), zero on padding; all ones where not given.
            token_type_ids: (batch, length); zeros where not given. Without effect in a model that
                has no token types.
            position_ids: (batch, length), absolute positions; the embeddings' `position_ids` where
                not given. Without effect in a model that has none.
            packed_rows: where the mask's tokens are, made on the CPU when the batch was collated;
                the mask is then not read, and no device waited for.
            first_only: the last state is (batch, hidden), each row's first token.
            all_states: every layer's state, not the last one's alone.
        """
        rows = _rows_of(input_ids, attention_mask, packed_rows).routed()
        embedded = self.embeddings(rows, input_ids, token_type_ids, position_ids)
        return self.encoder(embedded, rows, first_only, all_states), rows

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        packed_rows: PackedRows | None = None,
    ) -> BaseModelOutputWithPooling | BaseModelOutput | tuple:
        """Hidden states of every token; arguments as in `encode`."""
        show = self._wants_states(output_hidden_states)
        states, rows = self.encode(
            input_ids, attention_mask, token_type_ids, position_ids, packed_rows, all_states=show
        )
        last, shown = rows.pad(states[-1]), _padded(states, rows, show)
        if self.pooler is None:
            return self._as_asked(BaseModelOutput(last, shown), return_dict)
        pooled = self.pooler(states[-1][rows.first])
        return self._as_asked(BaseModelOutputWithPooling(last, pooled, shown), return_dict)


class EncoderForMaskedLM(PreTrainedModel):
    """A backbone with the language-model head that it is pretrained with."""

    head: ClassVar[str | None] = "masked_lm"

    def logits_of(self, hidden: Tensor) -> Tensor:
        """The head: (…, hidden) -> (…, vocabulary)."""
        raise NotImplementedError

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
        packed_rows: PackedRows | None = None,
    ) -> MaskedLMOutput | tuple:
        """Logits (batch, length, vocabulary) and, with `labels`, the mean loss over the targets.

        In training, with `labels`, logits are those of the targets alone, (targets, vocabulary),
        row by row: the head costs nothing elsewhere. Where there is padding, logits are zero.

        Args:
            labels: (batch, length), token ids; -100 where there is no target.
            targets_only: whether logits are of the targets alone; by default in training only.
            packed_rows: as in `EncoderModel.encode`; its targets, where known, are the labels'.
            others: as in `EncoderModel.encode`.
        """
        show = self._wants_states(output_hidden_states)
        states, rows = self.base_model.encode(
            input_ids, attention_mask, token_type_ids, position_ids, packed_rows, all_states=show
        )
        hidden, shown = states[-1], _padded(states, rows, show)
        if labels is None:
            return self._as_asked(
                MaskedLMOutput(None, rows.pad(self.logits_of(hidden)), shown), return_dict
            )
        labels, targets = rows.pack(labels), rows.targets
        if targets is None:
            targets = (labels != -100).nonzero().squeeze(1)
        if self.training if targets_only is None else targets_only:
            logits = of_targets = self.logits_of(hidden.index_select(0, targets))
        else:
            of_all = self.logits_of(hidden)
            logits, of_targets = rows.pad(of_all), of_all[targets]
        loss = F.cross_entropy(of_targets.float(), labels[targets], reduction="sum")
        loss = loss / max(len(targets), 1)  # a batch may have no target
        return self._as_asked(MaskedLMOutput(loss, logits, shown), return_dict)


class EncoderForSequenceClassification(PreTrainedModel):
    """A backbone with a classifier, or with one label a regressor, on the first token."""

    head: ClassVar[str | None] = "sequence_classification"

    def logits_of(self, first: Tensor) -> Tensor:
        """The head: (batch, hidden), of the first tokens -> (batch, labels)."""
        raise NotImplementedError

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        packed_rows: PackedRows | None = None,
    ) -> SequenceClassifierOutput | tuple:
        """Logits (batch, labels) and, with `labels` (batch,), the mean loss.

        Cross-entropy, or with one label the squared error; in consistency training, that of
        consistency.py. Other arguments as in `EncoderModel.encode`.
        """
        show = self._wants_states(output_hidden_states)
        given = (input_ids, attention_mask, token_type_ids, position_ids)
        if labels is not None and consistency.is_on(self):
            twice = None if packed_rows is None else packed_rows.twice()
            output = consistency.two_passes(self, labels, *given, packed_rows=twice, show=show)
            return self._as_asked(output, return_dict)
        states, rows = self.base_model.encode(
            *given, packed_rows, first_only=not show, all_states=show
        )
        logits = self.logits_of(states[-1][rows.first] if show else states[-1])
        loss = None if labels is None else classification_loss(logits, labels)
        output = SequenceClassifierOutput(loss, logits, _padded(states, rows, show))
        return self._as_asked(output, return_dict)


def _rows_of(
    input_ids: Tensor, attention_mask: Tensor | None, packed_rows: PackedRows | None
) -> PackedRows:
    """Where the tokens of a batch are; as it says itself, as its mask says, or everywhere."""
    if packed_rows is not None:
        return packed_rows
    if attention_mask is not None:
        return PackedRows(attention_mask)
    batch, length = input_ids.shape
    return PackedRows.from_lengths([length] * batch, length).to(input_ids.device)


def _padded(states: list[Tensor], rows: PackedRows, show: bool) -> tuple[Tensor, ...] | None:
    """All hidden states, each (batch, length, hidden); None where they are not to be shown."""
    return tuple(map(rows.pad, states)) if show else None
