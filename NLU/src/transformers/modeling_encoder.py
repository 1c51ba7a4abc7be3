"""What RoBERTa's and DeBERTa-v2's models share; each family's own file has what differs.

In the order in which data flows:

    ids ── embeddings ─> hidden ── Encoder: layer after layer ─> states        EncoderModel
    states ── vocabulary head ─> logits ── labels ─> loss                      EncoderForMaskedLM
    first tokens ── classifier ─> logits ── labels ─> loss       EncoderForSequenceClassification

All of these work on packed tokens, (tokens, hidden): see loralib/nn/packing.py. Batches come in and
go out padded, (batch, length, …). What cannot be computed on packed tokens takes the padded path:
see modeling_padded.py. Projections with LoRA, and bottleneck adapters, are in adapters.py.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import loralib as lora
from loralib.nn.fast_paths import is_recorded
from loralib.nn.norm import LayerNorm
from loralib.nn.packing import PackedRows
from loralib.nn.row_buckets import bucketed, fill, with_filler_rows

from . import consistency
from .activations import ACT2FN
from .adaptation_settings import ADAPTER_TYPES
from .adapters import BottleneckAdapter, projection
from .configuration_utils import PretrainedConfig
from .lora_placement import Placed
from .modeling_losses import IGNORED_LABEL, classification_loss, mean_loss
from .modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPooling,
    MaskedLMOutput,
    SequenceClassifierOutput,
)
from .modeling_padded import PaddedAttention, PaddedRows, needs_padded_batch, visible
from .modeling_utils import PreTrainedModel
from .pruning import keep_columns, keep_rows, places_of_heads

AnyRows = PackedRows | PaddedRows

# ---- embeddings ----


def too_long(tokens: int, positions: int) -> ValueError:
    """Returns the error for a sequence of more tokens than the model has positions for."""
    return ValueError(f"a sequence has {tokens} tokens, the model has positions for {positions}")


# ---- layers ----


class SubLayerOutput(nn.Module):
    """The last projection of a sub-layer, added to the residual stream and normalized.

    Args:
        config: the model's settings.
        placed: where they put LoRA in this layer, see `lora_placement.by_layer`.
        target: which projection it is, a name in `LORA_TARGETS`.
        in_features: width of the projection's input.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        placed: Mapping[str, Placed],
        target: str,
        in_features: int,
    ):
        super().__init__()
        self.dense = projection(config, placed, target, in_features, config.hidden_size)
        self.LayerNorm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = lora.Dropout(config.hidden_dropout_prob)
        self.adapter: BottleneckAdapter | None = None
        if config.apply_adapter and target in ADAPTER_TYPES[config.adapter_type]:
            self.adapter = BottleneckAdapter(config)

    def forward(self, computed: Tensor, residual: Tensor) -> Tensor:
        """(tokens, in_features) and (tokens, hidden) -> (tokens, hidden)."""
        output = self.dropout(self.dense(computed))
        if self.adapter is not None:
            output = self.adapter(output, residual, self.LayerNorm)
        return self.LayerNorm(output + residual)


class EncoderAttention(nn.Module):
    """Self-attention and its output projection.

    Args:
        config: the model's settings.
        placed: as in `SubLayerOutput`.
        self_attention: (hidden, queries, batch, padded) -> attention from `queries` to `hidden`.
    """

    def __init__(
        self, config: PretrainedConfig, placed: Mapping[str, Placed], self_attention: nn.Module
    ):
        super().__init__()
        self.self = self_attention
        # The heads that are left, by their numbers before any was pruned.
        self.heads = list(range(config.num_attention_heads))
        self.output = SubLayerOutput(config, placed, "attention_output", config.hidden_size)

    def forward(
        self, hidden: Tensor, queries: Tensor, batch: Any, padded: PaddedAttention | None = None
    ) -> Tensor:
        """Returns the residual stream at `queries`, with attention added, normalized."""
        return self.output(self.self(hidden, queries, batch, padded), queries)

    def prune_heads(self, heads: Iterable[int]) -> None:
        """Removes heads, by their numbers before any was pruned; see pruning.py."""
        left = [head for head in self.heads if head not in heads]
        if left == self.heads:
            return
        dim = len(self.self.query.weight) // self.self.heads
        kept = places_of_heads((self.heads.index(head) for head in left), dim)
        for layer in (self.self.query, self.self.key, self.self.value):
            keep_rows(layer, kept)
        keep_columns(self.output.dense, kept)
        self.heads, self.self.heads = left, len(left)


class Intermediate(nn.Module):
    """The feed-forward part's first half.

    Args:
        config: the model's settings.
        placed: as in `SubLayerOutput`.
    """

    def __init__(self, config: PretrainedConfig, placed: Mapping[str, Placed]):
        super().__init__()
        self.dense = projection(
            config, placed, "intermediate", config.hidden_size, config.intermediate_size
        )
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, hidden: Tensor) -> Tensor:
        """(tokens, hidden) -> (tokens, intermediate)."""
        return self.activation(self.dense(hidden))


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

    def forward(
        self,
        hidden: Tensor,
        batch: Any,
        first_only: bool = False,
        padded: PaddedAttention | None = None,
    ) -> Tensor:
        """(tokens, hidden) -> the same, or (batch, hidden) with `first_only`.

        Args:
            hidden: the residual stream.
            batch: what `Encoder.describe` returns; ``batch.first`` are the rows' first tokens.
            first_only: compute the output of each row's first token alone.
            padded: on the padded path, attention's inputs, and where it stores its probabilities.
        """
        # Its backward pass is one addition. That of hidden[batch.first] sorts the indices on a GPU,
        # and is slower on a CPU.
        queries = hidden.index_select(0, batch.first) if first_only else hidden
        attended = self.attention(hidden, queries, batch, padded)
        return self.output(self.intermediate(attended), attended)


class Encoder(nn.Module):
    """The layers in sequence.

    Args:
        config: the model's settings.
        layers: the `EncoderLayer`s.
    """

    def __init__(self, config: PretrainedConfig, layers: Iterable[EncoderLayer]):
        super().__init__()
        self.config = config
        self.layer = nn.ModuleList(layers)

    def describe(self, rows: AnyRows) -> Any:
        """Returns what every layer needs to know about a batch; called once per forward pass."""
        return rows

    def after_layer(self, index: int, seen: Tensor, output: Tensor, rows: AnyRows) -> Tensor:
        """Returns the next layer's input, after layer `index` has computed `output` from `seen`."""
        return output

    def forward(
        self,
        hidden: Tensor,
        rows: AnyRows,
        first_only: bool = False,
        shown: list[Tensor] | None = None,
        padded: list[PaddedAttention] | None = None,
    ) -> Tensor:
        """Returns the last layer's output, (tokens, hidden), or (batch, hidden) with `first_only`.

        Args:
            hidden: (tokens, hidden), the embeddings.
            rows: where its tokens are.
            first_only: compute the last layer for each row's first token alone. A classifier reads
                nothing else, and five sixths of that layer's work is saved.
            shown: a list, to which the embeddings and every layer's output are appended, each
                (batch, length, hidden); not together with `first_only`.
            padded: on the padded path, each layer's `PaddedAttention`.
        """
        given = rows
        if padded is None and shown is None:
            rows = with_filler_rows(rows, like=hidden)
            hidden = fill(hidden, len(rows.index))
        batch = self.describe(rows)
        recompute = self.config.gradient_checkpointing and self.training
        if shown is not None:
            hidden = _show(hidden, rows, shown)
        for index, layer in enumerate(self.layer):
            first = first_only and index == len(self.layer) - 1
            inputs = (hidden, batch, first, None if padded is None else padded[index])
            if recompute:
                # Random numbers are the same the second time, so gradients are bit-exact.
                # Source: "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
                output = checkpoint(layer, *inputs, use_reentrant=False)
            else:
                output = layer(*inputs)
            hidden = self.after_layer(index, hidden, output, rows)
            if shown is not None:
                hidden = _show(hidden, rows, shown)
        if rows is given:
            return hidden
        return hidden[: len(given.first if first_only else given.index)]


def _show(hidden: Tensor, rows: AnyRows, shown: list[Tensor]) -> Tensor:
    """Appends a state to `shown` as a padded batch; returns it as computed from that batch."""
    padded, hidden = rows.show(hidden)
    shown.append(padded)
    return hidden


# ---- models ----


class Encoded(NamedTuple):
    """A backbone's output for a batch.

    Args:
        last: (tokens, hidden), the last layer's output; (batch, hidden) with `first_only`.
        rows: where the tokens are in the batch; ``rows.pad`` pads their logits.
        hidden_states: the embeddings and every layer's output, each (batch, length, hidden), zeros
            at padding; None unless asked for.
        attentions: every layer's probabilities, each (batch, heads, length, length); None unless
            asked for.
        starts: (batch, hidden), the last layer's output at each row's first position. Only the
            padded path sets it, where that position may be padding; otherwise it is the row's first
            token.
    """

    last: Tensor
    rows: AnyRows
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    starts: Tensor | None = None

    @property
    def first(self) -> Tensor:
        """(batch, hidden), what a pooler reads: the output at each row's first position."""
        return self.last[self.rows.first] if self.starts is None else self.starts

    @property
    def shown(self) -> tuple[tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:
        """The last two fields of every model's output."""
        return self.hidden_states, self.attentions

    def pack_labels(self, labels: Tensor) -> Tensor:
        """(batch, length) -> (tokens,); -100 at padding, which traced graphs keep."""
        return self.rows.hide_padding(self.rows.pack(labels), fill=IGNORED_LABEL)


class EncoderModel(PreTrainedModel):
    """A backbone.

    Attributes:
        embeddings: (rows, input_ids, token_type_ids, position_ids, inputs_embeds) -> (tokens,
            hidden).
        encoder: an `Encoder`.
        pooler: (batch, hidden), the first tokens -> (batch, hidden); None if the model has none.

    Class attributes:
        may_pool: whether the family's backbones can have a pooler, and their output a field for it.
    """

    may_pool: ClassVar[bool] = False
    embeddings: nn.Module
    encoder: Encoder
    pooler: nn.Module | None

    def encode(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        head_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        packed_rows: PackedRows | None = None,
        *,
        first_only: bool = False,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> Encoded:
        """Computes the hidden states of packed tokens, and where those are in the batch.

        Args:
            input_ids: (batch, length).
            attention_mask: (batch, length), zero at padding; all ones by default. RoBERTa takes
                (batch, queries, keys) as well.
            token_type_ids: (batch, length), or (1, length) for all rows; zeros by default. Without
                effect in a model that has no token types.
            position_ids: (batch, length), or (1, length), absolute positions; by default those that
                upstream computes for such a batch. Without effect in a model that has none.
            head_mask: (heads,) or (layers, heads), factors of attention's probabilities; RoBERTa
                only.
            inputs_embeds: (batch, length, hidden), instead of the word embeddings of `input_ids`.
            packed_rows: where the mask's tokens are, computed on the CPU when the batch was
                collated. The mask is then not read, and nothing waits for the device.
            first_only: the caller needs each row's first position alone, so `Encoded.last` is
                (batch, hidden).
            output_attentions, output_hidden_states: whether to fill in these fields of `Encoded`;
                None for what the settings say.

        Raises:
            ValueError: not exactly one of `input_ids` and `inputs_embeds` is given, or a mask has
                the wrong shape.
        """
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        given = _one_of(input_ids, inputs_embeds)
        rows = _place(given, attention_mask, head_mask, packed_rows, output_attentions)
        padded = None
        if isinstance(rows, PaddedRows):
            padded = self._padded_attention(rows, given, head_mask, is_shown=output_attentions)
        try:
            embedded = self.embeddings(
                rows,
                input_ids,
                _for_every_row(token_type_ids, given),
                _for_every_row(position_ids, given),
                inputs_embeds,
            )
        except IndexError as error:
            _explain(error, self.config, input_ids, token_type_ids, position_ids)
            raise
        shown: list[Tensor] | None = [] if output_hidden_states else None
        all_tokens = output_hidden_states or padded is not None
        last = self.encoder(embedded, rows, first_only and not all_tokens, shown, padded)
        starts = None
        if padded is not None:
            last, rows, starts = _without_padding(last, rows)
        if first_only and all_tokens:
            last = last.index_select(0, rows.first) if starts is None else starts
        states = None if shown is None else tuple(shown)
        attentions = tuple(each.probabilities for each in padded) if output_attentions else None
        return Encoded(last, rows, states, attentions, starts)

    def _prune_heads(self, heads_to_prune: Mapping[int, Iterable[int]]) -> None:
        for layer, heads in heads_to_prune.items():
            self.encoder.layer[layer].attention.prune_heads(heads)

    def _padded_attention(
        self, rows: PaddedRows, given: Tensor, head_mask: Tensor | None, is_shown: bool
    ) -> list[PaddedAttention]:
        """Returns each layer's `PaddedAttention`, for the padded path."""
        masks = self.get_head_mask(head_mask, self.config.num_hidden_layers)
        seen = visible(rows.mask, self.config.is_decoder, given)
        return [PaddedAttention(rows, seen, head_mask=mask, is_shown=is_shown) for mask in masks]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        head_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        packed_rows: PackedRows | None = None,
    ) -> BaseModelOutputWithPooling | BaseModelOutput | tuple:
        """Returns the hidden states of all tokens; arguments as in `encode`."""
        encoded = self.encode(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            head_mask,
            inputs_embeds,
            packed_rows,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        states = encoded.hidden_states
        last = encoded.rows.pad(encoded.last) if states is None else states[-1]
        if not self.may_pool:
            return self._as_asked(BaseModelOutput(last, *encoded.shown), return_dict)
        pooled = None if self.pooler is None else self.pooler(encoded.first)
        output = BaseModelOutputWithPooling(last, pooled, *encoded.shown)
        result = self._as_asked(output, return_dict)
        if isinstance(result, tuple) and pooled is None:  # upstream keeps its place in the tuple
            return (last, None, *result[1:])
        return result


def _one_of(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """Returns the one of the two that is given.

    Raises:
        TypeError: it is not a tensor.
        ValueError: both or neither are given, or it is not a batch.
    """
    if (input_ids is None) == (inputs_embeds is None):
        number = "both" if inputs_embeds is not None else "neither"
        raise ValueError(f"give either input_ids or inputs_embeds: {number} were given")
    if input_ids is None:
        _check_batch("inputs_embeds", inputs_embeds, ("batch", "length", "hidden"))
        return inputs_embeds
    _check_batch("input_ids", input_ids, ("batch", "length"))
    return input_ids


def _check_batch(name: str, given: Any, axes: tuple[str, ...]) -> None:
    """Checks that the model got a batch, not a row of it, a list, or a tokenizer's whole output."""
    if not isinstance(given, Tensor):
        raise TypeError(
            f"{name} is a {type(given).__name__}, not a tensor: pass a tokenizer's output as "
            'model(**batch), made with return_tensors="pt"'
        )
    if given.dim() != len(axes):
        hint = ": for a single row, pass row.unsqueeze(0)" if given.dim() < len(axes) else ""
        raise ValueError(f"{name} is {tuple(given.shape)}, not ({', '.join(axes)}){hint}")


def _explain(
    error: IndexError,
    config: PretrainedConfig,
    input_ids: Tensor | None,
    token_type_ids: Tensor | None,
    position_ids: Tensor | None,
) -> None:
    """Raises an error that names the ids without an embedding, which PyTorch's does not."""
    sizes = {
        "input_ids": (input_ids, config.vocab_size, "encode with the model's own tokenizer"),
        "token_type_ids": (token_type_ids, config.type_vocab_size, "leave them out"),
        "position_ids": (position_ids, config.max_position_embeddings, "leave them out"),
    }
    for name, (ids, size, advice) in sizes.items():
        wrong = [] if ids is None else ids[(ids < 0) | (ids >= size)].tolist()
        if wrong:
            raise IndexError(
                f"{name} has {wrong[0]}, but the model has embeddings of 0 to {size - 1}: {advice}"
            ) from error


def _place(
    given: Tensor,
    attention_mask: Tensor | None,
    head_mask: Tensor | None,
    packed_rows: PackedRows | None,
    output_attentions: bool,
) -> AnyRows:
    """Returns where a batch's tokens are: packed or, for the padded path, at their positions.

    Args:
        given: (batch, length, …).
        others: as in `EncoderModel.encode`.
    """
    if not needs_padded_batch(attention_mask, head_mask, output_attentions):
        rows = _rows_of(given, attention_mask, packed_rows)
        if not rows.starts_padded:
            return rows.routed()
    if packed_rows is not None and (attention_mask is None or attention_mask.dim() == 2):
        attention_mask = packed_rows.is_token
    return PaddedRows(given, attention_mask)


def _rows_of(
    given: Tensor, attention_mask: Tensor | None, packed_rows: PackedRows | None
) -> PackedRows:
    """Returns the batch's `packed_rows`, else the tokens of its mask, else all positions."""
    if packed_rows is not None:
        return packed_rows
    if attention_mask is not None:
        return PackedRows(attention_mask)
    batch, length = given.shape[:2]
    return PackedRows.from_lengths([length] * batch, length).to(given.device)


def _for_every_row(x: Tensor | None, given: Tensor) -> Tensor | None:
    """(1, length) -> (batch, length); other shapes stay as they are."""
    return x if x is None or len(x) != 1 else x.expand(given.shape[0], -1)


def _without_padding(last: Tensor, rows: PaddedRows) -> tuple[Tensor, AnyRows, Tensor]:
    """Returns the padded path's packed tokens, where they are, and the rows' first positions.

    While a graph is traced, padding stays: the graph is for batches with other padding, too.
    """
    starts = last.index_select(0, rows.first)
    if is_recorded():
        return last, rows, starts
    packed = rows.without_padding()
    return packed.pack(rows.as_batch(last)), packed, starts


class EncoderForMaskedLM(PreTrainedModel):
    """A backbone with its pretraining head, a masked language model's."""

    head: ClassVar[str | None] = "masked_lm"

    def logits_of(self, hidden: Tensor) -> Tensor:
        """The head: (…, hidden) -> (…, vocabulary)."""
        raise NotImplementedError

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        head_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        targets_only: bool | None = None,
        packed_rows: PackedRows | None = None,
    ) -> MaskedLMOutput | tuple:
        """Returns logits, (batch, length, vocabulary), and with `labels` the targets' mean loss.

        In training with `labels`, logits are computed for the targets alone, which saves time: they
        are (targets, vocabulary), row by row. At padding, logits are zero.

        Args:
            labels: (batch, length), token ids; -100 where there is no target.
            targets_only: whether to compute logits of the targets alone; by default in training.
            packed_rows: as in `EncoderModel.encode`. If its `targets` are known, `labels` are not
                searched for them.
            others: as in `EncoderModel.encode`.
        """
        encoded = self.base_model.encode(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            head_mask,
            inputs_embeds,
            packed_rows,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        hidden, rows = encoded.last, encoded.rows
        if labels is None:
            logits = rows.pad(self._logits(hidden))
            return self._as_asked(MaskedLMOutput(None, logits, *encoded.shown), return_dict)
        labels = encoded.pack_labels(labels)
        targets = None if packed_rows is None else packed_rows.targets
        if targets is None:
            targets = (labels != IGNORED_LABEL).nonzero().squeeze(1)
        if self.training if targets_only is None else targets_only:
            of_targets = self._filled_logits(hidden.index_select(0, targets))
            logits = of_targets[: len(targets)]
        else:
            of_all = self._logits(hidden)
            logits, of_targets = rows.pad(of_all), of_all[targets]
        labels = labels[targets]
        if added := len(of_targets) - len(targets):
            labels = F.pad(labels, (0, added), value=IGNORED_LABEL)
        loss = mean_loss(of_targets, labels)
        return self._as_asked(MaskedLMOutput(loss, logits, *encoded.shown), return_dict)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Computes `logits_of` for a number of rows that recurs; see loralib/nn/row_buckets.py."""
        logits = self._filled_logits(hidden)
        # A slice, or `len`, would fix this number of tokens in a graph that is being recorded.
        tokens = hidden.shape[0]
        return logits if logits.shape[0] == tokens else logits[:tokens]

    def _filled_logits(self, hidden: Tensor) -> Tensor:
        """Returns the same logits, and below them those of the rows that were added."""
        return self.logits_of(fill(hidden, bucketed(hidden.shape[0], like=hidden)))


class EncoderForSequenceClassification(PreTrainedModel):
    """A backbone with a classifier on the first token, or a regressor if there is one label."""

    head: ClassVar[str | None] = "sequence_classification"

    def __init__(self, config: PretrainedConfig):
        if getattr(config, "problem_type", None) == "multi_label_classification":
            raise ValueError(
                "problem_type is 'multi_label_classification': this package's classifiers give "
                "each text one label; for several, use upstream's transformers in a separate "
                "environment"
            )
        super().__init__(config)

    def logits_of(self, first: Tensor) -> Tensor:
        """The head: (batch, hidden), the first tokens -> (batch, labels)."""
        raise NotImplementedError

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        head_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        packed_rows: PackedRows | None = None,
    ) -> SequenceClassifierOutput | tuple:
        """Returns logits, (batch, labels), and with `labels`, (batch,), the mean loss.

        The loss is the cross-entropy, or the squared error if there is one label. In consistency
        training, it is the one in consistency.py. Other arguments are those of
        `EncoderModel.encode`.
        """
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
            "head_mask": head_mask,
            "packed_rows": packed_rows,
            "output_attentions": output_attentions,
            "output_hidden_states": output_hidden_states,
        }
        if labels is not None and consistency.is_on(self):
            return self._as_asked(consistency.two_passes(self, labels, **given), return_dict)
        encoded = self.base_model.encode(**given, first_only=True)
        logits = self.logits_of(encoded.last)
        loss = None if labels is None else classification_loss(logits, labels, packed_rows)
        output = SequenceClassifierOutput(loss, logits, *encoded.shown)
        return self._as_asked(output, return_dict)
