"""Registers GPT-2 as a model family, and defines what LoRA can adapt in it."""

from collections.abc import Collection, Iterable, Sequence

from loralib.adapters.families import Family, register

# The names of a block's projections in --lora_targets -> the linear layer that computes each. Those
# of one layer are the slices of its output, in this order.
TARGETS = {
    "query": "attn.c_attn",
    "key": "attn.c_attn",
    "value": "attn.c_attn",
    "attention_output": "attn.c_proj",
    "mlp_up": "mlp.c_fc",
    "mlp_down": "mlp.c_proj",
}
# As in the release.
DEFAULT_TARGETS = ("query", "value")


def in_order(targets: Iterable[str]) -> tuple[str, ...]:
    """Returns LoRA's targets in the order of `TARGETS`.

    Raises:
        ValueError: there is no such target, one is named twice, or there are none.
    """
    targets = tuple(targets)
    for name in targets:
        if name not in TARGETS:
            raise ValueError(f"unknown lora_targets '{name}' (known: {', '.join(TARGETS)})")
        if targets.count(name) > 1:
            raise ValueError(f"lora_targets names {name} twice")
    if not targets:
        raise ValueError(f"lora_targets is empty: name some of {', '.join(TARGETS)}")
    return tuple(name for name in TARGETS if name in targets)


def enabled_slices(targets: Collection[str], layer: str) -> tuple[bool, ...]:
    """Returns for each projection that a block's linear layer computes whether it is a target."""
    return tuple(name in targets for name in _computed_by(layer))


def targets_of(layers: Iterable[tuple[str, Sequence[bool]]]) -> tuple[str, ...] | None:
    """Returns the targets that enable these slices; the inverse of `enabled_slices`.

    Args:
        layers: linear layers of a block, each with the slices of its output that LoRA updates.

    Returns:
        The targets; None if no targets enable exactly these slices.
    """
    updated = {(layer, tuple(enabled)) for layer, enabled in layers}
    targets = {
        name
        for layer, enabled in updated
        for name, on in zip(_computed_by(layer), enabled, strict=False)
        if on
    }
    built = {(TARGETS[name], enabled_slices(targets, TARGETS[name])) for name in targets}
    return in_order(targets) if targets and built == updated else None


def _computed_by(layer: str) -> list[str]:
    return [name for name, its_layer in TARGETS.items() if its_layer == layer]


GPT2 = register(
    Family(
        name="gpt2",
        title="GPT-2",
        backbone="transformer.",
        layers="transformer.h.",
        # The layers of GPT-J and BLOOM are in a `transformer.h` as well.
        layer_parts=("attn.c_", "attn.bias", "attn.masked_bias", "mlp.c_", "ln_1", "ln_2"),
        release_modules=("attn.c_attn",),
        stacked={"attn.c_attn": enabled_slices(DEFAULT_TARGETS, "attn.c_attn")},
        tied=dict.fromkeys(("lm_head.weight", "lm_head.decoder.weight"), "transformer.wte.weight"),
        old_names={r"^h\.": "transformer.h."},
        wrapped_in_release=True,
        fan_in_fan_out=True,
        peft_task="CAUSAL_LM",
        tokenizer_files=("vocab.json", "merges.txt"),
    )
)
