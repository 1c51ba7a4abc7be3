"""GPT-2 from its formulas, without LoRA layers: logits, loss, gradients; and batches."""

import math

import torch
import torch.nn.functional as F

import loralib as lora


def plain_logits(weights, config, ids):
    """GPT-2 on a padded batch, in the weights' precision, every position computed."""
    n, heads = config.n_embd, config.n_head
    batch, length = ids.shape
    future = torch.ones(length, length, dtype=torch.bool).triu(1)

    def norm(x, name):
        return F.layer_norm(x, (n,), weights[f"{name}.weight"], weights[f"{name}.bias"], eps=1e-5)

    def linear(x, name):
        return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def qkv(x, name):
        parts = list(linear(x, name).split(n, dim=2))
        if f"{name}.lora_A" in weights:
            A, B = weights[f"{name}.lora_A"], weights[f"{name}.lora_B"]
            r = config.lora_attn_dim
            scaling = config.lora_attn_alpha / r
            parts[0] = parts[0] + scaling * x @ A[:r].T @ B[:n].T
            parts[2] = parts[2] + scaling * x @ A[r:].T @ B[n:].T
        return [part.view(batch, length, heads, -1).transpose(1, 2) for part in parts]

    x = weights["transformer.wte.weight"][ids] + weights["transformer.wpe.weight"][:length]
    for i in range(config.n_layer):
        block = f"transformer.h.{i}"
        q, k, v = qkv(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn")
        scores = q @ k.transpose(2, 3) / math.sqrt(n / heads)
        mixed = scores.masked_fill(future, float("-inf")).softmax(dim=3) @ v
        x = x + linear(mixed.transpose(1, 2).flatten(2), f"{block}.attn.c_proj")
        inner = linear(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc")
        gelu = inner / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
        x = x + linear(gelu, f"{block}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ weights["transformer.wte.weight"].T


def plain_loss(weights, config, ids, labels, mask, label_smooth):
    """Σ mask · token_loss / (Σ mask + 0.0001), from the logits of every position."""
    logits = plain_logits(weights, config, ids)
    smoothing = label_smooth if label_smooth > 0.0001 else 0.0
    token_loss = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=smoothing
    )
    return (token_loss * mask.flatten()).sum() / (mask.sum() + 0.0001)


def plain_gradients(model, *batch):
    """The plain loss, and its gradients by name, computed in float64."""
    weights = {name: p.detach().double() for name, p in model.named_parameters()}
    trained = {
        n: weights[n].requires_grad_() for n, p in model.named_parameters() if p.requires_grad
    }
    loss = plain_loss(weights, model.config, *batch)
    gradients = torch.autograd.grad(loss, trained.values())
    return loss.detach(), dict(zip(trained, gradients, strict=True))


# Tokens of context and of completion, in each row, whose inputs are padded to 18.
ROWS = ((5, 9), (2, 3), (1, 15), (11, 1))


def draw_batch(kind):
    """Inputs, labels and mask, as data_utils makes them, for the "plain" shape."""
    torch.manual_seed(1)
    ids, mask = torch.zeros(len(ROWS), 19).long(), torch.zeros(len(ROWS), 18)
    for row, (context, completion) in enumerate(ROWS):
        length = context + completion
        ids[row, :length] = torch.randint(0, 53, (length,))
        mask[row, (0 if kind == "jlm" else context - 1) : length - 1] = 1
    if kind == "a row without a target":
        mask[1] = 0
    elif kind == "scattered":
        mask *= torch.rand(mask.shape) < 0.4
    elif kind == "one target":
        mask = torch.zeros_like(mask)
        mask[2, 7] = 1
    elif kind == "weighted":
        mask *= torch.rand(mask.shape)
    elif kind == "whole rows":
        ids, mask = torch.randint(0, 53, ids.shape), torch.ones_like(mask)
    return ids[:, :-1], ids[:, 1:].clone(), mask


MASKS = (
    *("clm", "jlm", "a row without a target", "scattered", "one target", "weighted"),
    "whole rows",
)


def train_only(model, what):
    """Makes only LoRA trainable, or everything; returns the model in training mode."""
    if what == "lora":
        lora.mark_only_lora_as_trainable(model)
    else:
        for parameter in model.parameters():
            parameter.requires_grad = True
    return model.train()
