"""Consistency training (R-Drop and Cutoff), which trains two passes over a batch to agree.

The passes differ in their dropout masks. In Cutoff, their inputs differ, too: in the second pass,
tokens are hidden with probability `masking_prob`. With the logits p1 and p2, and
m = (p1 + p2) / 2:

    loss = CE(p1) + CE(p2) + reg_loss_wgt / 2 · ( KL(m ‖ p1) + KL(m ‖ p2) )

where KL(m ‖ p) is that of the softmaxes, as a mean over all rows and classes. Both passes are
computed as one batch of twice the rows. (Dropout on DeBERTa-v2's relative positions, which belong
to no row, is the same in both.) Evaluations have a single pass.

Source: the release; R-Drop, arXiv 2106.14448; Cutoff, arXiv 2009.13818.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from loralib.nn.packing import PackedRows

from .configuration_utils import PretrainedConfig
from .modeling_losses import at_least_float32, classification_loss
from .modeling_outputs import SequenceClassifierOutput
from .modeling_utils import PreTrainedModel


def is_on(model: PreTrainedModel) -> bool:
    """Returns whether batches with labels get two passes: in training, if the settings say so."""
    return model.training and asks_for(model.config)


def asks_for(config: PretrainedConfig) -> bool:
    """Returns whether the settings ask for two passes."""
    return config.reg_loss_wgt > 0 or config.masking_prob > 0


def check(config: PretrainedConfig) -> None:
    """Checks that the model's settings allow two passes, if they ask for them.

    Raises:
        ValueError: the labels are scores, or the settings lack the token ids that Cutoff needs.
    """
    if not asks_for(config):
        return
    if config.num_labels == 1:
        raise ValueError(
            "consistency training compares the probabilities of classes, but a score has none: "
            "leave out --reg_loss_wgt, --masking_prob, --apply_rdrop and --apply_cutoff"
        )
    if config.masking_prob > 0 and (config.unk_token_id is None or not config.special_token_ids):
        raise ValueError(
            "masking_prob needs unk_token_id and special_token_ids in the config: take them from "
            "the tokenizer's unk_token_id and all_special_ids"
        )


def two_passes(
    model: PreTrainedModel,
    labels: Tensor,
    *,
    packed_rows: PackedRows | None,
    head_mask: Tensor | None,
    output_attentions: bool | None,
    output_hidden_states: bool | None,
    **given: Tensor | None,
) -> SequenceClassifierOutput:
    """Returns a classifier's output with the loss of both passes, otherwise that of the first pass.

    Args:
        model: a classifier.
        labels: (batch,), classes.
        packed_rows: the `PackedRows` of one pass, or None.
        head_mask, output_attentions, output_hidden_states: arguments of its forward, for both
            passes.
        given: (batch, …), the other arguments of its forward, or None.

    Raises:
        ValueError: tokens are to be hidden, but `input_ids` are not given.
    """
    check(model.config)
    twice = {name: None if x is None else torch.cat([x, x]) for name, x in given.items()}
    ids = given["input_ids"]
    if ids is not None:
        twice["input_ids"] = torch.cat([ids, hide_tokens(ids, model.config)])
    elif model.config.masking_prob > 0:
        raise ValueError(
            "masking_prob hides tokens by their ids: give input_ids, not inputs_embeds"
        )
    output = model(
        **twice,
        head_mask=head_mask,
        output_attentions=output_attentions,
        output_hidden_states=output_hidden_states,
        return_dict=True,
        packed_rows=None if packed_rows is None else packed_rows.twice(),
    )
    logits = output.logits.chunk(2)
    return SequenceClassifierOutput(
        consistency_loss(*logits, labels, model.config.reg_loss_wgt),
        logits[0],
        _first_pass(output.hidden_states),
        _first_pass(output.attentions),
    )


def _first_pass(shown: tuple[Tensor, ...] | None) -> tuple[Tensor, ...] | None:
    """Returns the first half of tensors (2 · batch, …)."""
    return None if shown is None else tuple(each.chunk(2)[0] for each in shown)


def hide_tokens(input_ids: Tensor, config: PretrainedConfig) -> Tensor:
    """Replaces random tokens with `unk_token_id`, but no special tokens (such as padding)."""
    if config.masking_prob == 0:
        return input_ids
    hidden = torch.rand(input_ids.shape, device=input_ids.device) < config.masking_prob
    # Compared one by one, because copying a list of them to a GPU would wait for the GPU.
    for special in set(config.special_token_ids):
        hidden &= input_ids != special
    return input_ids.masked_fill(hidden, config.unk_token_id)


def consistency_loss(first: Tensor, second: Tensor, labels: Tensor, reg_loss_wgt: float) -> Tensor:
    """Computes the loss in this module's docstring.

    Args:
        first, second: (batch, labels), logits of the two passes.
        labels: (batch,), classes.
        reg_loss_wgt: the weight of the divergences.
    """
    loss = classification_loss(first, labels) + classification_loss(second, labels)
    both = (at_least_float32(first), at_least_float32(second))
    mean = (sum(both) / 2).softmax(dim=-1)
    # The same as reduction="mean", which prints a warning.
    divergences = [
        F.kl_div(logits.log_softmax(dim=-1), mean, reduction="none").mean() for logits in both
    ]
    return loss + 0.5 * reg_loss_wgt * sum(divergences)
