"""GPT-2 with LoRA on projections of its blocks, by default attention's query and value.

In a causal model, no token sees a later one. So nothing is computed after a row's last target, and
the head, which is a third of a small model, runs on targets only:

    context   completion                  wte + wpe -> (tokens, n)           laid end to end
    a b c     D E F . .     pack          n_layer × Block(tokens, n)         attention within rows
    d e f g h I J K L M    ------>        of the last block's tokens: those that have a target
                                          (targets, n) · wteᵀ -> loss

Blocks take tokens, not batches. The `attend` function passed to them decides what a token attends
to: its own row in training (loralib/nn/packing.py), a cache in beam.py.

Tensors have the names of the LoRA release. Sources: GPT-2, Radford et al. 2019; LoRA, arXiv
2106.09685, sections 4.2 and 5.4.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import loralib as lora
from family import DEFAULT_TARGETS, GPT2, TARGETS, enabled_slices, in_order
from loralib.functional import variant_of
from loralib.initialization import check_initialization
from loralib.io.settings import Count, Index, NotNegative, Positive, ShareBelowOne, check_settings
from loralib.nn.fast_paths import is_recorded
from loralib.nn.norm import LayerNorm
from loralib.nn.packing import PackedRows, attend
from loralib.nn.products import linear, product
from loralib.nn.row_buckets import bucketed, fill, with_filler_rows
from loralib.targets import by_pattern
from loralib.utils import start_from_weights

# (layer, query, key, value), each (tokens, n) -> (tokens, n)
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class GPT2Config:
    """The shape of a GPT-2 and of its LoRA.

    Args:
        n_embd: the width.
        n_layer: number of blocks.
        n_head: attention heads per block.
        vocab_size: number of tokens in the vocabulary.
        n_positions: the largest number of tokens in a row.
        layer_norm_epsilon: epsilon of the layer norms.
        initializer_range: standard deviation of newly initialized weights.
        lora_attn_dim: r, the rank of the update; 0 for no LoRA.
        lora_attn_alpha: the update is scaled by alpha / r.
        lora_dropout: dropout on the update's input.
        lora_targets: the projections that LoRA adapts, keys of `TARGETS`; kept in that order.
        lora_variant: a name in `loralib.functional.VARIANTS`.
        lora_init: how A and B are initialized, a name in
            `loralib.initialization.INITIALIZATIONS`.
        lora_freeze_A: whether only B is trained.
        lora_rank_pattern: another r for some linear layers. A key is a target, or a pattern as
            `loralib.targets.matches` takes it; the first match counts. After initialization, keys
            are the full names of the layers whose r differs from `lora_attn_dim`.
        lora_alpha_pattern: the same for alpha.

    Raises:
        ValueError: no model can have these settings.
    """

    n_embd: Count
    n_layer: Count
    n_head: Count
    vocab_size: Count = 50257
    n_positions: Count = 1024
    layer_norm_epsilon: NotNegative = 1e-5
    initializer_range: NotNegative = 0.02
    lora_attn_dim: Index = 0
    lora_attn_alpha: Positive = 128
    lora_dropout: ShareBelowOne = 0.0
    lora_targets: Iterable[str] = DEFAULT_TARGETS
    lora_variant: str = "lora"
    lora_init: str = "default"
    lora_freeze_A: bool = False
    lora_rank_pattern: dict[str, int] | None = None
    lora_alpha_pattern: dict[str, float] | None = None

    def __post_init__(self) -> None:
        check_settings(type(self), vars(self))
        object.__setattr__(self, "lora_targets", in_order(self.lora_targets))
        for name, usual in (
            ("lora_rank_pattern", self.lora_attn_dim),
            ("lora_alpha_pattern", self.lora_attn_alpha),
        ):
            object.__setattr__(self, name, self._resolved(getattr(self, name) or {}, usual))
        variant_of(self.lora_variant)
        for module in self.lora_modules:
            self._check_rank(module)
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} is not a multiple of {self.n_head} heads")

    @property
    def lora_modules(self) -> list[str]:
        """The full names of the linear layers that LoRA adapts."""
        layers = dict.fromkeys(TARGETS[name] for name in self.lora_targets)
        blocks = range(self.n_layer if self.lora_attn_dim > 0 else 0)
        return [f"{GPT2.layers}{block}.{layer}" for block in blocks for layer in layers]

    def rank_of(self, module: str) -> int:
        """Returns the rank of a linear layer's update."""
        return self.lora_rank_pattern.get(module, self.lora_attn_dim)

    def alpha_of(self, module: str) -> float:
        """Returns the alpha of a linear layer's update."""
        return self.lora_alpha_pattern.get(module, self.lora_attn_alpha)

    def with_layers(self, n_layer: int) -> "GPT2Config":
        """Returns a copy with `n_layer` blocks; if the number changes, patterns are dropped."""
        if n_layer == self.n_layer:
            return self
        return replace(self, n_layer=n_layer, lora_rank_pattern=None, lora_alpha_pattern=None)

    def _resolved(self, pattern: Mapping[str, Any], usual: float) -> dict[str, Any]:
        """Returns the values of a pattern that differ from `usual`, by full layer name."""
        if self.lora_attn_dim == 0:
            return {}
        values = by_pattern(self.lora_modules, _by_layer(pattern), usual)
        return {module: value for module, value in values.items() if value != usual}

    def _check_rank(self, module: str) -> None:
        rank, alpha = self.rank_of(module), self.alpha_of(module)
        if rank < 1 or alpha <= 0:
            what = f"rank {rank}" if rank < 1 else f"alpha {alpha}"
            raise ValueError(f"the {what} of {module} has to be above 0")
        # n_embd is the smaller dimension of every linear layer in a block.
        if rank > self.n_embd:
            raise ValueError(f"the rank of {module}, {rank}, is larger than n_embd, {self.n_embd}")
        check_initialization(self.lora_init, rank)


def _by_layer(pattern: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a pattern with targets replaced by their linear layers."""
    layers = {}
    for target, value in pattern.items():
        layer = TARGETS.get(target, target)
        if len(enabled_slices((), layer)) > 1 and target != layer:
            raise ValueError(
                f"{target} shares its rank and alpha with all of {layer}: name {layer} in the "
                "pattern"
            )
        layers.setdefault(layer, value)
    return layers


# Width, blocks, heads. The first is for trials. The others are GPT-2 small, medium and large.
MODEL_CARDS = {
    "gpt2.xs": (128, 4, 4),
    "gpt2.sm": (768, 12, 12),
    "gpt2.md": (1024, 24, 16),
    "gpt2.lg": (1280, 36, 20),
}


def config_of(card: str, **lora_fields) -> GPT2Config:
    """Returns the configuration of a model card, such as ``gpt2.md``."""
    width, layers, heads = MODEL_CARDS[card]
    return GPT2Config(width, layers, heads, **lora_fields)


class Conv1D(nn.Module):
    """x W + b, with the weight as (in, out), as in GPT-2's checkpoints."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.empty(out_features))

    @property
    def matrix(self) -> Tensor:
        """The weight as (out, in)."""
        return self.weight.t()

    def forward(self, x: Tensor) -> Tensor:
        """(…, in_features) -> (…, out_features)."""
        return linear(x, self.matrix, self.bias)


def projection(
    config: GPT2Config, block: int, layer: str, in_features: int, out_features: int
) -> Conv1D | lora.Linear | lora.MergedLinear:
    """Builds a linear layer of a block, with LoRA if the configuration has it there.

    Args:
        config: the model's configuration.
        block: the block's number.
        layer: the layer's name in its block, such as ``mlp.c_fc``.
        in_features, out_features: the layer's widths.
    """
    enabled = enabled_slices(config.lora_targets, layer)
    module = f"{GPT2.layers}{block}.{layer}"
    rank = config.rank_of(module) if any(enabled) else 0
    settings = {
        "lora_alpha": config.alpha_of(module),
        "lora_dropout": config.lora_dropout,
        "fan_in_fan_out": True,
        # Merging for an evaluation costs more than it saves; gpt2_beam.py merges permanently.
        "merge_weights": False,
        "variant": config.lora_variant,
        "initialization": config.lora_init,
        "freeze_A": config.lora_freeze_A,
    }
    if len(enabled) > 1:
        return lora.MergedLinear(in_features, out_features, rank, enable_lora=enabled, **settings)
    if rank > 0:
        return lora.Linear(in_features, out_features, rank, **settings)
    return Conv1D(in_features, out_features)


class Attention(nn.Module):
    """Multi-head attention in two steps, so that a block can drop tokens in between."""

    def __init__(self, config: GPT2Config, block: int):
        super().__init__()
        n = config.n_embd
        self.c_attn = projection(config, block, "attn.c_attn", n, 3 * n)
        self.c_proj = projection(config, block, "attn.c_proj", n, n)

    def forward(self, x: Tensor, layer: int, attend: Attend) -> Tensor:
        """(tokens, n) -> (tokens, n), the output of attention before its last projection."""
        return attend(layer, *self.c_attn(x).chunk(3, dim=-1))


class MLP(nn.Module):
    """n -> 4 n -> n, with GELU's tanh approximation."""

    def __init__(self, config: GPT2Config, block: int):
        super().__init__()
        n = config.n_embd
        self.c_fc = projection(config, block, "mlp.c_fc", n, 4 * n)
        self.c_proj = projection(config, block, "mlp.c_proj", 4 * n, n)

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, n) -> (tokens, n)."""
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """x + attention(norm x), then x + MLP(norm x)."""

    def __init__(self, config: GPT2Config, block: int):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = Attention(config, block)
        self.ln_2 = LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config, block)

    def forward(self, x: Tensor, layer: int, attend: Attend, keep: Tensor | None = None) -> Tensor:
        """(tokens, n) -> (tokens, n), or (k, n) for the tokens at positions `keep`, (k,)."""
        collected = self.attn(self.ln_1(x), layer, attend)
        if keep is not None:
            # The backward pass of index_select is one addition. That of x[keep] sorts on a GPU, and
            # is slower on a CPU.
            x, collected = x.index_select(0, keep), collected.index_select(0, keep)
        x = x + self.attn.c_proj(collected)
        return x + self.mlp(self.ln_2(x))


class GPT2Model(nn.Module):
    """Embeddings, blocks and the last norm."""

    def __init__(self, config: GPT2Config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.h = nn.ModuleList(Block(config, number) for number in range(config.n_layer))
        self.ln_f = LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)

    def forward(
        self, ids: Tensor, positions: Tensor, attend: Attend, keep: Tensor | None = None
    ) -> Tensor:
        """Returns the last hidden states of tokens laid end to end.

        Args:
            ids: (tokens,), the token ids.
            positions: (tokens,), each token's position in its row.
            attend: computes the attention of one layer, for all these tokens at once.
            keep: (k,), the tokens whose states are returned; all by default.

        Returns:
            (tokens, n), or (k, n).
        """
        x = self.wte(ids) + self.wpe(positions)
        last = len(self.h) - 1
        for layer, block in enumerate(self.h):
            x = block(x, layer, attend, keep if layer == last else None)
        return self.ln_f(x)


# Logits are as wide as the vocabulary, so a loss computes them for a limited number of targets at a
# time: for this many in float32, and in other dtypes for as many as take the same memory. With
# GPT-2's vocabulary this is 25 MB, which the C library still reuses instead of returning it to the
# system.
_TARGETS_AT_ONCE = 128
# This many keep a GPU busy. With GPT-2's vocabulary they take 0.62 GB in half precision (each logit
# is held in half precision and in float32, 6 bytes together), and 0.41 GB in float32.
_TARGETS_AT_ONCE_ON_GPU = 2048
# On a CPU, a cross-entropy passes over its logits a dozen times. With this many targets per thread,
# they are 1.6 MB in float32 with GPT-2's vocabulary, which fits in a core's L2 cache.
_TARGETS_IN_CACHE = 8


def _targets_at_once(dtype: torch.dtype) -> int:
    """Returns the number of targets whose logits a loss computes at a time on a CPU."""
    return _TARGETS_AT_ONCE * torch.float32.itemsize // dtype.itemsize


class GPT2LMHead(nn.Module):
    """Hidden states -> logits, with the token embedding's weight."""

    # For loralib.nn.products, which chooses how `head_loss` multiplies.
    bias = None
    rows_at_once = staticmethod(_targets_at_once)

    def __init__(self, wte: nn.Embedding):
        super().__init__()
        self.decoder = nn.Linear(wte.embedding_dim, wte.num_embeddings, bias=False, device="meta")
        self.decoder.weight = wte.weight

    @property
    def matrix(self) -> Tensor:
        """The weight as (vocabulary, n)."""
        return self.decoder.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """(…, n) -> (…, vocabulary)."""
        return self.decoder(hidden)


class GPT2LMModel(nn.Module):
    """GPT-2 with its head: computes logits, or the loss of a batch.

    Weights are newly initialized: normal with `initializer_range`, biases zero, norms one, LoRA's
    as in loralib. `weights.load_base` and `loralib.adapters.loading.load_into` load trained ones.
    """

    def __init__(self, config: GPT2Config):
        super().__init__()
        self.config = config
        # An attribute of the module, because torch.compile takes it as a constant.
        self.heads = config.n_head
        self.transformer = GPT2Model(config)
        self.lm_head = GPT2LMHead(self.transformer.wte)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes all weights except LoRA's.

        LoRA layers initialize their own, again here if they depend on the weights (DoRA, PiSSA,
        OLoRA).
        """
        for name, parameter in self.named_parameters():
            if "lora_" in name:
                continue
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 1:
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=self.config.initializer_range)
        start_from_weights(self)

    def forward(
        self,
        input_ids: Tensor,
        lm_labels: Tensor | None = None,
        lm_mask: Tensor | None = None,
        label_smooth: float = 0.0,
        packed_rows: PackedRows | None = None,
    ) -> Tensor:
        """Returns the logits of a batch or, with labels, its loss.

            loss = Σ mask · token_loss / (Σ mask + 0.0001)
            token_loss = (1 - ε) · nll + ε · mean over the vocabulary of -log p,  ε = label_smooth

        Args:
            input_ids: (batch, length), padded on the right with any token.
            lm_labels: (batch, length), for each token the one that follows it.
            lm_mask: (batch, length), 1 where the label counts, 0 elsewhere.
            label_smooth: ε; values up to 0.0001 count as 0.
            packed_rows: which tokens are needed, and which of them have targets, as data_utils.py
                computes it on the CPU. If it is missing, it is computed from the mask, for which
                the CPU waits for the mask's device.

        Returns:
            Logits, (batch, length, vocabulary), or the loss, a scalar in float32 or wider.

        Raises:
            ValueError: a row is longer than the model has positions; or the loss is to be recorded
                by `torch.jit.trace` or `torch.export`.
        """
        batch, length = input_ids.shape
        if length > self.config.n_positions:
            raise ValueError(
                f"a row has {length} tokens, the model has positions for {self.config.n_positions}"
            )
        if is_recorded() and packed_rows is None:
            if lm_labels is not None:
                raise ValueError(
                    "a graph of the loss would hold only for this batch's targets: record one that "
                    "computes logits"
                )
            return self._logits_for_any_shape(input_ids)
        if packed_rows is not None:
            rows = packed_rows.routed()
        elif lm_labels is None:
            rows = PackedRows.from_lengths([length] * batch).to(input_ids.device).routed()
        else:
            rows = _needed_rows(lm_mask).routed()
        if lm_labels is None:
            return rows.pad(self.lm_head(self._hidden(input_ids, rows)))
        if rows.targets is None:
            rows = rows.with_targets(lm_mask)
        mask, targets = rows.pack(lm_mask), rows.targets
        labels, weights = rows.pack(lm_labels)[targets], mask[targets]
        matrix = self.transformer.wte.weight
        count = bucketed(len(targets), like=matrix)
        if added := count - len(targets):
            labels, weights = F.pad(labels, (0, added)), F.pad(weights, (0, added))
        hidden = self._hidden(input_ids, rows, keep=fill(targets, count))
        epsilon = label_smooth if label_smooth > 0.0001 else 0.0
        return head_loss(hidden, matrix, labels, weights, epsilon) / (mask.sum() + 0.0001)

    def _logits_for_any_shape(self, input_ids: Tensor) -> Tensor:
        """Returns a batch's logits, computed by operations that a graph records for all shapes."""

        def attend_in_all_rows(layer: int, *query_key_value: Tensor) -> Tensor:
            by_row = (x.view(*input_ids.shape, self.heads, -1) for x in query_key_value)
            parts = (x.transpose(1, 2) for x in by_row)
            out = F.scaled_dot_product_attention(*parts, is_causal=True)
            return out.transpose(1, 2).flatten(2).flatten(0, 1)

        columns = torch.arange(input_ids.shape[1], device=input_ids.device)
        positions = columns.expand(input_ids.shape).flatten()
        hidden = self.transformer(input_ids.flatten(), positions, attend_in_all_rows)
        return self.lm_head(hidden).view(*input_ids.shape, -1)

    def _hidden(self, input_ids: Tensor, rows: PackedRows, keep: Tensor | None = None) -> Tensor:
        """Returns a batch's last hidden states, (tokens, n), or with `keep`, (k,), only (k, n)."""
        ids, positions = rows.pack(input_ids), rows.positions
        if keep is not None:
            rows = with_filler_rows(rows, like=self.transformer.wte.weight)
            ids, positions = (fill(x, len(rows.index)) for x in (ids, positions))
        return self.transformer(ids, positions, self._within(rows), keep)

    def _within(self, rows: PackedRows) -> Attend:
        def within(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attend(query, key, value, rows, self.heads, causal=True)

        return within


def _needed_rows(lm_mask: Tensor) -> PackedRows:
    """Returns the tokens up to each row's last target; later ones cannot change the loss."""
    # Integers, because a GPU has no deterministic kernel for the cumsum of floats.
    needed = (lm_mask != 0).long().flip(1).cumsum(1).flip(1)
    needed[:, 0] = 1
    return PackedRows(needed)


# ------------------------------------------------------------------------------------------------
# The head's loss
# ------------------------------------------------------------------------------------------------


def head_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor, label_smooth: float
) -> Tensor:
    """Computes Σ mask · token_loss, with token_loss as defined in `GPT2LMModel.forward`.

    Args:
        hidden: (targets, n), the hidden states of the tokens that have a target.
        weight: (vocabulary, n), the head's weight.
        targets: (targets,), token ids.
        mask: (targets,), the weight of each target's loss.
        label_smooth: ε.

    Returns:
        A scalar, in float32 or wider.
    """
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    return _HeadLoss.apply(
        hidden.to(dtype), weight.to(dtype), targets, mask, label_smooth, torch.is_grad_enabled()
    )


class _HeadLoss(torch.autograd.Function):
    """The head's product and its cross-entropy in one, which overwrites logits by their gradient.

    Autograd would hold the logits, their log-softmax and the gradients of both for all targets at
    once. Here the forward pass computes the loss and the gradient of `hidden`, and keeps no logits.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, mask, label_smooth, recorded):
        need_hidden, need_weight = (recorded and needed for needed in ctx.needs_input_grad[:2])
        # Most values of a softmax are below 6e-8, float16's smallest positive number.
        ctx.scale = 1024.0 if hidden.dtype is torch.float16 else 1.0
        scale = ctx.scale if need_hidden or need_weight else None
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        # A sum over all targets needs more range and precision than half precision has.
        wide = torch.promote_types(hidden.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=wide) if need_weight else None
        total = hidden.new_zeros((), dtype=wide)
        on_cpu = hidden.device.type == "cpu"
        # The weight's gradient is computed from the logits' gradient in the wider dtype.
        widest = wide if need_weight else hidden.dtype
        at_once = _targets_at_once(widest) if on_cpu else _TARGETS_AT_ONCE_ON_GPU
        for part in _parts(len(hidden), at_once):
            logits = product(hidden[part], weight)
            given = logits, targets[part, None], mask[part, None].to(wide)
            for few in _parts(len(logits), _few_targets(logits)):
                # What PyTorch 2.11 compiles has no gradients if this writes to its own output.
                total = total + _cross_entropy(*(x[few] for x in given), label_smooth, scale)
            # From here on, `logits` holds their gradient.
            if need_hidden:
                grad_hidden[part] = product(logits, weight.t())
            if need_weight:
                grad_weight.addmm_(logits.to(wide).t(), hidden[part].to(wide))
        ctx.dtype = hidden.dtype
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # They would be zero: the gradients that are kept are constants to autograd.
            raise RuntimeError(
                "second derivatives cannot be computed through this loss: compute it from the "
                "model's logits"
            )
        # In the loss's dtype: a GPU would first round the factor to a half-precision tensor's.
        factor = grad / ctx.scale
        grads = (
            None if g is None else (g.to(grad.dtype) * factor).to(ctx.dtype)
            for g in ctx.saved_tensors
        )
        return *grads, None, None, None, None


def _parts(count: int, size: int) -> Iterator[slice]:
    """Yields slices that split 0 … count into parts of `size`; the last may be smaller."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _few_targets(logits: Tensor) -> int:
    """Returns how many targets one cross-entropy takes: all, or on a CPU what its cache holds."""
    if logits.device.type != "cpu" or torch.compiler.is_compiling():
        return len(logits)
    return _TARGETS_IN_CACHE * torch.get_num_threads()


def _cross_entropy(
    logits: Tensor, targets: Tensor, factors: Tensor, label_smooth: float, scale: float | None
) -> Tensor:
    """Returns the sum of the tokens' losses, and overwrites the logits by its gradient.

    Args:
        logits: (k, vocabulary); afterwards their gradient times `scale`.
        targets: (k, 1), token ids.
        factors: (k, 1), the weight of each token's loss, in the dtype to compute in.
        label_smooth: ε.
        scale: what the gradient is multiplied by. None if no gradient is wanted; the contents of
            `logits` are then undefined afterwards.

    Returns:
        A scalar, in the dtype of `factors`.
    """
    x = logits.to(factors.dtype)
    largest, chosen = x.amax(dim=1, keepdim=True), x.gather(1, targets)
    losses = largest - (1 - label_smooth) * chosen
    if label_smooth:
        losses -= label_smooth * x.mean(dim=1, keepdim=True)
    x.sub_(largest).exp_()
    total = x.sum(dim=1, keepdim=True)
    losses += total.log()
    if scale is not None:
        scales = factors * scale
        x *= scales / total
        if label_smooth:
            x -= scales * (label_smooth / logits.shape[1])
        x.scatter_add_(1, targets, scales * (label_smooth - 1))
        logits.copy_(x)
    return (losses * factors).sum()
