"""Small DeBERTa-v2s with upstream's weights, and the formulas written out."""

import math

import make_deberta_fixture as maker
import numpy as np
import torch
import torch.nn.functional as F
from compare import assert_close_to_rounding
from encoder_options import ENCODER_TERMS

import loralib as lora
from transformers import (
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    DebertaV2ForSequenceClassification,
    DebertaV2Model,
)

VARIANTS, INPUTS = maker.variants(), maker.draw_inputs()
CASES = maker.cases(INPUTS)
KINDS = {
    "backbone": (DebertaV2Model, {}),
    "mlm": (DebertaV2ForMaskedLM, {}),
    "classifier": (DebertaV2ForSequenceClassification, {}),
    "regressor": (DebertaV2ForSequenceClassification, {"num_labels": 1}),
}
LABELS = {"mlm": "tokens_wanted", "classifier": "classes", "regressor": "scores"}
LORA = {"apply_lora": True, "lora_r": 2, "lora_alpha": 6}
XXLARGE = {
    "num_hidden_layers": 48,
    "relative_attention": True,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
    "position_buckets": 256,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "conv_kernel_size": 3,
    "conv_act": "gelu",
}


def build(kind, variant="xxlarge", **settings):
    """A model with the fixture's weights; LoRA's are random, including B."""
    model_class, labels = KINDS[kind]
    config = DebertaV2Config(**{**maker.CONFIG, **VARIANTS[variant], **labels, **settings})
    model = model_class(config).eval()
    maker.draw_weights(model)
    return model


def close(ours, theirs, terms=ENCODER_TERMS):
    assert_close_to_rounding(ours, theirs, terms)


def literal_bucket(distance, buckets, furthest):
    """The published formula for an array of distances."""
    sign, middle = np.sign(distance), buckets // 2
    near = (distance < middle) & (distance > -middle)
    size = np.where(near, middle - 1, np.abs(distance))
    far = np.ceil(np.log(size / middle) / np.log((furthest - 1) / middle) * (middle - 1)) + middle
    return np.where(size <= middle, distance, far * sign).astype(np.int64)


def literal_rows(length, buckets, furthest):
    """(length, length): the row of the embeddings for the distance of each query and key."""
    positions = np.arange(length)
    distance = positions[:, None] - positions[None, :]
    if buckets > 0:
        distance = literal_bucket(distance, buckets, furthest)
    span = buckets if buckets > 0 else furthest
    return torch.from_numpy((distance + span).clip(0, 2 * span - 1))


def project(layer, x, adapted=True):
    """W x + b, with LoRA's delta merged into W if `adapted`."""
    weight = layer.weight
    if adapted and isinstance(layer, lora.LoRALayer):
        weight = weight + layer.scaling * layer.lora_B @ layer.lora_A
    return F.linear(x, weight, layer.bias)


def norm(layer, x):
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
    return (x - mean) / (variance + layer.eps).sqrt() * layer.weight + layer.bias


def literal_attention(config, attention, x, embeddings, mask, drop):
    """One layer's attention over (length, hidden), head by head and formula by formula."""
    length, width = x.shape
    dim = width // config.num_attention_heads
    q, k, v = (project(getattr(attention, f"{n}_proj"), x) for n in ("query", "key", "value"))
    terms = config.pos_att_type if config.relative_attention else []
    if terms:
        embeddings = drop(embeddings, config.hidden_dropout_prob)
        shared, reached = config.share_att_key, config.lora_positions
        rows = literal_rows(length, config.position_buckets, config.furthest)
    heads = []
    keep = drop.mask(config.attention_probs_dropout_prob)
    if keep is not None:
        keep = keep.view(config.num_attention_heads, length, length)
    for head in range(config.num_attention_heads):
        part = slice(head * dim, (head + 1) * dim)
        scores = q[:, part] @ k[:, part].T
        if "c2p" in terms:
            layer = attention.key_proj if shared else attention.pos_key_proj
            keys = project(layer, embeddings, reached)[:, part][rows]  # (query, key, dim)
            scores = scores + torch.einsum("id,ijd->ij", q[:, part], keys)
        if "p2c" in terms:
            layer = attention.query_proj if shared else attention.pos_query_proj
            queries = project(layer, embeddings, reached)[:, part][rows]
            scores = scores + torch.einsum("ijd,jd->ij", queries, k[:, part])
        scores = scores / math.sqrt(dim * (1 + len(config.pos_att_type)))
        weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=1)
        heads.append((weights if keep is None else weights * keep[head]) @ v[:, part])
    return torch.cat(heads, dim=1)


def literal_convolution(layer, x, mask):
    """The convolution of (length, hidden), where padding is zero, one offset at a time."""
    kernel, groups = layer.conv.weight, layer.conv.groups
    out_channels, in_channels, width = kernel.shape
    x = x * mask[:, None]
    out = layer.conv.bias.repeat(len(x), 1)
    for group in range(groups):
        inputs = slice(group * in_channels, (group + 1) * in_channels)
        outputs = slice(group * out_channels // groups, (group + 1) * out_channels // groups)
        for offset in range(width):
            shift = offset - width // 2
            for place in range(max(0, -shift), min(len(x), len(x) - shift)):
                add = torch.zeros_like(out)
                add[place, outputs] = kernel[outputs, :, offset] @ x[place + shift, inputs]
                out = out + add
    return out


class NoDropout:
    """Drops nothing."""

    def __call__(self, x, p):
        return x

    def mask(self, p):
        return None


def literal_states(model, ids, mask, types, drop):
    """Every hidden state (length, hidden) of one padded row."""
    config, backbone = model.config, model.base_model
    embeddings, encoder = backbone.embeddings, backbone.encoder
    x = embeddings.word_embeddings.weight[ids]
    if config.position_biased_input:
        x = x + embeddings.position_embeddings.weight[: len(ids)]
    if config.type_vocab_size:
        x = x + embeddings.token_type_embeddings.weight[types]
    x = drop(norm(embeddings.LayerNorm, x), config.hidden_dropout_prob)
    relative = encoder.rel_embeddings.weight if config.relative_attention else None
    if relative is not None and config.norm_rel_ebd == "layer_norm":
        relative = norm(encoder.LayerNorm, relative)
    states = [x]
    for number, layer in enumerate(encoder.layer):
        attention, p = layer.attention, config.hidden_dropout_prob
        mixed = literal_attention(config, attention.self, x, relative, mask, drop)
        attended = drop(project(attention.output.dense, mixed), p) + x
        attended = norm(attention.output.LayerNorm, attended)
        inner = F.gelu(project(layer.intermediate.dense, attended))
        output = drop(project(layer.output.dense, inner), p) + attended
        output = norm(layer.output.LayerNorm, output)
        if number == 0 and config.conv_kernel_size:
            seen = drop(literal_convolution(encoder.conv, x, mask), p)
            act = {"gelu": F.gelu, "tanh": torch.tanh}[config.conv_act]
            output = norm(encoder.conv.LayerNorm, output + act(seen))
        x = output
        states.append(x)
    return states


def literal_logits(model, given, drop=None):
    """A classifier's logits, row by padded row."""
    drop = drop or NoDropout()
    config, rows = model.config, []
    for row, ids in enumerate(given["input_ids"]):
        mask = given.get("attention_mask", torch.ones_like(given["input_ids"]))[row] == 1
        types = given.get("token_type_ids", torch.zeros_like(given["input_ids"]))[row]
        x = literal_states(model, ids, mask, types, drop)[-1][:1]
        act = {"gelu": F.gelu, "tanh": torch.tanh}[config.pooler_hidden_act]
        pooled = act(project(model.pooler.dense, drop(x, config.pooler_dropout)))
        head_dropout = config.cls_dropout
        p = config.hidden_dropout_prob if head_dropout is None else head_dropout
        rows.append(project(model.classifier, drop(pooled, p)))
    return torch.cat(rows)
