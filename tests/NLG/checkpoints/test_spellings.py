"""Tests that GPT-2's files load with every spelling of a base's and of LoRA's names."""

import re

import pytest
import torch
from compare import assert_same_bits
from gpt2_files import (
    BLOCKS,
    POSITIONS,
    draw_base,
    draw_lora,
    parameters,
    parse,
    prefixed,
    write_legacy,
    write_plain,
    write_safe,
    write_wrapped,
)

import checkpoints
from checkpoints import open_model, read_base

# ---- spellings of a base ----


def old_endings(tensors):
    """Returns the tensors under the names of GPT-2's first files: ``.g``, ``.b`` and ``.w``."""

    def spell(name):
        is_norm = "ln_" in name
        name = re.sub(r"\.bias$", ".b", name)
        return re.sub(r"\.weight$", ".g" if is_norm else ".w", name)

    return {spell(name): tensor for name, tensor in tensors.items()}


def with_buffers(tensors):
    """Adds the causal masks that other implementations save."""
    mask = torch.ones(1, 1, POSITIONS, POSITIONS).tril()
    buffers = {f"h.{i}.attn.bias": mask.to(torch.uint8) for i in range(BLOCKS)}
    buffers |= {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(BLOCKS)}
    return {**tensors, **buffers}


SPELLINGS = {
    "plain": lambda t: t,
    "transformer": lambda t: prefixed(t, "transformer."),
    "module.transformer": lambda t: prefixed(t, "module.transformer."),
    "old endings": old_endings,
    "old endings with a prefix": lambda t: prefixed(old_endings(t), "transformer."),
    "buffers": with_buffers,
    "buffers with a prefix": lambda t: prefixed(with_buffers(t), "module.transformer."),
    "head": lambda t: {
        **prefixed(t, "transformer."),
        "lm_head.weight": t["wte.weight"].clone(),
    },
    "the release's head": lambda t: {
        **prefixed(t, "module.transformer."),
        "module.lm_head.decoder.weight": t["wte.weight"],
    },
    "compiled": lambda t: prefixed(t, "_orig_mod.transformer."),
    "compiled blocks, in DDP": lambda t: {
        f"module.transformer.{name.replace('.attn.', '._orig_mod.attn.')}": tensor
        for name, tensor in t.items()
    },
    "head beside plain names": lambda t: {"lm_head.weight": t["wte.weight"].clone(), **t},
    "head in place of the embedding": lambda t: {
        {"wte.weight": "lm_head.weight"}.get(name, name): tensor for name, tensor in t.items()
    },
}


@pytest.mark.parametrize("write", [write_plain, write_legacy, write_wrapped, write_safe])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_a_base(tmp_path, spelling, write):
    drawn = draw_base()
    path = write(SPELLINGS[spelling](drawn), tmp_path)
    model, base = open_model(parse("--init_checkpoint", path))
    assert_same_bits(parameters(model), prefixed(drawn, "transformer."))
    assert model.lm_head.decoder.weight is model.transformer.wte.weight
    assert base.source == str(path)
    assert base.metadata is None
    assert base.fingerprint == read_base(write_plain(drawn, tmp_path)).fingerprint


def test_without_a_file_the_model_is_initialized():
    args = parse()
    model, base = open_model(args)
    assert (args.model_card, args.lora_dim, args.lora_alpha) == ("gpt2.md", 0, 128)
    assert (base.tensors, base.source, base.fingerprint) == ({}, None, None)
    assert 0.01 < model.transformer.wte.weight.std() < 0.03


@pytest.mark.parametrize("card", ["gpt2.sm", "gpt2.md", "gpt2.lg", "gpt2.xs"])
def test_cards(card):
    assert parse("--model_card", card).model_card == card


def test_an_unknown_card(capsys):
    with pytest.raises(SystemExit):
        parse("--model_card", "gpt2.xl")
    assert "invalid choice: 'gpt2.xl'" in capsys.readouterr().err


# ---- LoRA files ----


@pytest.mark.parametrize("prefix", ["module.transformer.", "transformer.", ""])
@pytest.mark.parametrize("write", [write_plain, write_legacy, write_wrapped, write_safe])
def test_every_spelling_of_a_lora_file(tmp_path, base_path, prefix, write):
    drawn = draw_lora()
    tensors = {n.replace("module.transformer.", prefix): t for n, t in drawn.items()}
    path = write(tensors, tmp_path)
    args = parse("--init_checkpoint", base_path, "--lora_alpha", 32)
    model, _ = open_model(args, str(path))
    assert args.lora_dim == 2
    found = parameters(model)
    assert_same_bits({f"module.{n}": t for n, t in found.items() if "lora_" in n}, drawn)
    assert_same_bits(
        {n: t for n, t in found.items() if "lora_" not in n},
        prefixed(draw_base(), "transformer."),
    )
    assert {layer.scaling for layer in checkpoints.lora_layers(model).values()} == {16}


def test_a_file_of_this_project_records_rank_and_alpha(base_path, lora_path, open_lora, caplog):
    args = parse("--init_checkpoint", base_path)
    model, _ = open_model(args, str(lora_path), lora_dropout=0.25)
    assert "cannot check" not in caplog.text
    assert (args.lora_dim, args.lora_alpha) == (2, 6)
    assert model.config.lora_dropout == 0.25
    assert_same_bits(parameters(model), parameters(open_lora()[0]))
    same = ("--lora_dim", 2, "--lora_alpha", 6)
    open_model(parse("--init_checkpoint", base_path, *same), str(lora_path))
