"""Consistency training, R-Drop and Cutoff: two passes over a batch are trained to agree.

The passes differ in their dropout and, in Cutoff, in their inputs: the second's tokens are hidden
with probability `masking_prob`. With their logits p1 and p2, and m = (p1 + p2) / 2:

    loss = CE(p1) + CE(p2) + reg_loss_wgt / 2 · ( KL(m ‖ p1) + KL(m ‖ p2) )

where KL(m ‖ p), of the softmaxes, is the mean over all rows and classes. Both passes are one batch
of twice the rows. (Dropout on DeBERTa-v2's relative positions, which belong to no row, is the same
in both.) In evaluation there is one pass.

Source: the release; R-Drop, arXiv 2106.14448; Cutoff, arXiv 2009.13818.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from loralib.nn.packing import PackedRows

from .configuration_utils import PretrainedConfig
from .modeling_outputs import SequenceClassifierOutput
from .modeling_utils import PreTrainedModel, classification_loss


def is_on(model: PreTrainedModel) -> bool:
    """Whether a batch with labels gets two passes: in training, where the settings ask for it."""
    return model.training and asks_for(model.config)


def asks_for(config: PretrainedConfig) -> bool:
    """Whether the settings ask for two passes."""
    return config.reg_loss_wgt > 0 or config.masking_prob > 0


def check(config: PretrainedConfig) -> None:
    """Checks that the model has what two passes need.

    Raises:
        ValueError: its labels are scores, or its settings lack the token that hides others.
    """
    if not asks_for(config):
        return
    if config.num_labels == 1:
        raise ValueError(
            "consistency training compares the probabilities of classes, and a score has none: "
            "leave out --reg_loss_wgt, --masking_prob, --apply_rdrop and --apply_cutoff"
        )
    if config.masking_prob > 0 and (config.unk_token_id is None or not config.special_token_ids):
        raise ValueError(
            "masking_prob needs unk_token_id and special_token_ids in the config; the tokenizer "
            "knows them: unk_token_id and all_special_ids"
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
    """A classifier's output: the loss of both passes, and what else the first one gives.

    Args:
        model: a classifier.
        labels: (batch,), classes.
        packed_rows: of one pass; None where not given.
        head_mask, output_attentions, output_hidden_states: of its forward, for both passes.
        given: (batch, …), the other arguments of its forward; None where not given.

    Raises:
        ValueError: tokens are to be hidden, and there are no ids.
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
    """Of (2 · batch, …) the first half."""
    return None if shown is None else tuple(each.chunk(2)[0] for each in shown)


def hide_tokens(input_ids: Tensor, config: PretrainedConfig) -> Tensor:
    """Replaces tokens, at random, by `unk_token_id`, but never a special token.

    Padding is a special token.
    """
    if config.masking_prob == 0:
        return input_ids
    hidden = torch.rand(input_ids.shape, device=input_ids.device) < config.masking_prob
    # One by one: a GPU would be waited for until it has a list of them.
    for special in set(config.special_token_ids):
        hidden &= input_ids != special
    return input_ids.masked_fill(hidden, config.unk_token_id)


def consistency_loss(first: Tensor, second: Tensor, labels: Tensor, reg_loss_wgt: float) -> Tensor:
    """The formula at the module's head.

    Args:
        first, second: (batch, labels), logits of the two passes.
        labels: (batch,), classes.
        reg_loss_wgt: weight of the divergences.
    """
    loss = classification_loss(first, labels) + classification_loss(second, labels)
    both = (first.float(), second.float())
    mean = (sum(both) / 2).softmax(dim=-1)
    # As by reduction="mean", which warns.
    divergences = [
        F.kl_div(logits.log_softmax(dim=-1), mean, reduction="none").mean() for logits in both
    ]
    return loss + 0.5 * reg_loss_wgt * sum(divergences)
