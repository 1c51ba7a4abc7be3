"""Tiny models with each of the heads of heads_fixture.safetensors, and upstream's results."""

import make_heads_fixture as maker
import torch
from compare import assert_close_to_rounding
from encoder_options import ENCODER_TERMS
from safetensors.torch import load_file

import transformers

INPUTS = maker.draw_inputs()
FAMILIES = tuple(maker.FAMILIES)
PAIRS = maker.PAIRS
UPSTREAM = load_file(maker.FIXTURE)
# The heads that are trained. The other one is the causal language model without `is_decoder`.
TRAINED = [pair for pair in PAIRS if pair[1] != "bidirectional_lm"]


def build(family, head, **settings):
    """A model in evaluation mode, with upstream's weights; other weights are random."""
    start, end = maker.FAMILIES[family][0], maker.HEADS[head][0]
    config = getattr(transformers, f"{start}Config")(
        **{**maker.settings_of(family, head), **settings}
    )
    model = getattr(transformers, f"{start}{end}")(config).eval()
    maker.draw_weights(model)
    return model


def given(head, case="padded"):
    """A case's arguments, labels among them."""
    return maker.cases(head, INPUTS)[case]


def upstream(family, head, case, name):
    return UPSTREAM[f"{family}/{head}/{case}/{name}"]


def logits_of(head):
    """The names of a head's logits in its output."""
    return maker.LOGITS.get(head, ("logits",))


def labels_of(head):
    """The names of its labels."""
    return maker.LABELS[head]


def real(tensor, arguments):
    """The values at real tokens of (batch, length, …); all of them of (batch, …)."""
    mask = arguments.get("attention_mask")
    has_tokens = mask is not None and tensor.shape[: mask.dim()] == mask.shape
    return tensor[mask == 1] if has_tokens else tensor


def close(ours, theirs, terms=ENCODER_TERMS):
    assert_close_to_rounding(ours, theirs, terms)


def without_labels(head, arguments):
    return {name: value for name, value in arguments.items() if name not in labels_of(head)}


def wider(arguments):
    """The same batch, padded to five more columns, also in the labels of tokens."""
    width = INPUTS["ids"].shape[1]
    return {
        name: torch.nn.functional.pad(value, (0, 5))
        if value.dim() >= 2 and value.shape[-1] == width
        else value
        for name, value in arguments.items()
    }
