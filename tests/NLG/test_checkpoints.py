"""GPT-2's files: every spelling loads, what does not fit is one clear line, every bit is kept."""

import argparse
import json
import os
import re
import stat

import pytest
import torch
from compare import assert_same_bits
from safetensors.torch import save_file
from torch import nn

import checkpoints
import loralib as lora
from checkpoints import (
    add_model_params,
    open_model,
    read_base,
    save_model,
)
from loralib.adapters.formats import read_adapter
from loralib.errors import CheckpointError
from loralib.io.tensors import read_tensors
from loralib.training.precision import hold_frozen_in
from model import GPT2, GPT2Config, canonical_names

WIDTH, BLOCKS, VOCABULARY, POSITIONS = 8, 2, 23, 10
LORA_A = "transformer.h.0.attn.c_attn.lora_A"


@pytest.fixture(autouse=True)
def tiny_card(monkeypatch):
    """Every model card stands for one tiny shape."""

    def tiny(card, **lora_fields):
        return GPT2Config(WIDTH, BLOCKS, 2, VOCABULARY, POSITIONS, **lora_fields)

    monkeypatch.setattr(checkpoints, "config_of", tiny)


def parse(*flags):
    parser = argparse.ArgumentParser()
    add_model_params(parser)
    return parser.parse_args([str(flag) for flag in flags])


def draw_base(width=WIDTH, blocks=BLOCKS, vocabulary=VOCABULARY, seed=0):
    """A base's tensors under the names of GPT-2's published files, ``h.0.…``."""
    torch.manual_seed(seed)
    sizes = {
        "ln_1.weight": (width,),
        "ln_1.bias": (width,),
        "attn.c_attn.weight": (width, 3 * width),
        "attn.c_attn.bias": (3 * width,),
        "attn.c_proj.weight": (width, width),
        "attn.c_proj.bias": (width,),
        "ln_2.weight": (width,),
        "ln_2.bias": (width,),
        "mlp.c_fc.weight": (width, 4 * width),
        "mlp.c_fc.bias": (4 * width,),
        "mlp.c_proj.weight": (4 * width, width),
        "mlp.c_proj.bias": (width,),
    }
    shapes = {"wte.weight": (vocabulary, width), "wpe.weight": (POSITIONS, width)}
    shapes |= {f"h.{i}.{name}": size for i in range(blocks) for name, size in sizes.items()}
    shapes |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def draw_lora(rank=2, width=WIDTH, blocks=BLOCKS):
    """LoRA's tensors under the release's names."""
    torch.manual_seed(5)
    layers = [f"module.transformer.h.{i}.attn.c_attn" for i in range(blocks)]
    return {
        **{f"{layer}.lora_A": torch.randn(2 * rank, width) for layer in layers},
        **{f"{layer}.lora_B": torch.randn(2 * width, rank) for layer in layers},
    }


def prefixed(tensors, prefix):
    return {prefix + name: tensor for name, tensor in tensors.items()}


def parameters(model):
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.fixture
def base_path(tmp_path):
    path = tmp_path / "base.bin"
    torch.save(draw_base(), path)
    return path


@pytest.fixture
def open_lora(base_path):
    """Opens the base with new LoRA, B drawn as well, frozen but for it; gives model and base."""

    def open_lora(*flags):
        flags = flags or ("--lora_dim", 2, "--lora_alpha", 6)
        model, base = open_model(parse("--init_checkpoint", base_path, *flags))
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter)
        lora.mark_only_lora_as_trainable(model)
        return model, base

    return open_lora


@pytest.fixture
def lora_path(tmp_path, open_lora):
    """A LoRA-only file of this project's, rank 2, alpha 6, on `base_path`."""
    save_model(tmp_path / "model.5.pt", *open_lora(), lora_only=True)
    return tmp_path / "model.5.pt"


def refuses(parts, flags, lora_path=None):
    """`open_model` raises one line that holds all of `parts`."""
    with pytest.raises(CheckpointError) as caught:
        open_model(parse(*flags), None if lora_path is None else str(lora_path))
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 400
    for part in parts:
        assert part in text


# ---- spellings of a base ----


def old_endings(tensors):
    """Norms' ``.g`` and ``.b``, linear layers' ``.w`` and ``.b``, as in GPT-2's first files."""

    def spell(name):
        is_norm = "ln_" in name
        name = re.sub(r"\.bias$", ".b", name)
        return re.sub(r"\.weight$", ".g" if is_norm else ".w", name)

    return {spell(name): tensor for name, tensor in tensors.items()}


def with_buffers(tensors):
    """The causal masks that other implementations save."""
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
    "head beside plain names": lambda t: {"lm_head.weight": t["wte.weight"].clone(), **t},
}


def write_plain(tensors, folder):
    torch.save(tensors, folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


def write_legacy(tensors, folder):
    path = folder / "pytorch_model.bin"
    torch.save(tensors, path, _use_new_zipfile_serialization=False)
    return path


def write_wrapped(tensors, folder):
    torch.save({"model_state_dict": tensors}, folder / "model.9.pt")
    return folder / "model.9.pt"


def write_safe(tensors, folder):
    save_file({n: t.clone() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder / "model.safetensors"


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


def test_without_a_file_the_model_is_drawn():
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


def test_a_file_of_this_project_says_rank_and_alpha(base_path, lora_path, open_lora):
    args = parse("--init_checkpoint", base_path)
    model, _ = open_model(args, str(lora_path), lora_dropout=0.25)
    assert (args.lora_dim, args.lora_alpha) == (2, 6)
    assert model.config.lora_dropout == 0.25
    assert_same_bits(parameters(model), parameters(open_lora()[0]))
    same = ("--lora_dim", 2, "--lora_alpha", 6)
    open_model(parse("--init_checkpoint", base_path, *same), str(lora_path))


# ---- bases that do not fit ----


def without(tensors, *names):
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def renamed(tensors, old, new):
    return {new if name == old else name: tensor for name, tensor in tensors.items()}


def not_finite(tensors, name, value):
    changed = tensors[name].clone()
    changed.view(-1)[3] = value
    return {**tensors, name: changed}


BAD_BASES = {
    "lacks one": (
        lambda: without(draw_base(), "h.1.ln_2.bias"),
        ["lacks 1 tensors: transformer.h.1.ln_2.bias"],
    ),
    "lacks many": (
        lambda: draw_base(blocks=1),
        ["lacks 12 tensors: transformer.h.1.attn.c_attn.bias", ", …"],
    ),
    "is empty": (dict, ["lacks 28 tensors"]),
    "has more": (
        lambda: {**draw_base(), "h.1.extra.weight": torch.ones(1)},
        ["has, unknown to the model, 1 tensors: transformer.h.1.extra.weight"],
    ),
    "has more blocks": (
        lambda: draw_base(blocks=3),
        ["has, unknown to the model, 12 tensors: transformer.h.2.", ", …"],
    ),
    "wider": (
        lambda: draw_base(width=12),
        ["a model of another size: transformer.h.0.attn.c_attn.bias", "(36,)", "(24,)"],
    ),
    "another vocabulary": (
        lambda: draw_base(vocabulary=29),
        ["another size: transformer.wte.weight is (29, 8) in the file, (23, 8) in the model"],
    ),
    "head is another": (
        lambda: {**draw_base(), "lm_head.weight": torch.ones(VOCABULARY, WIDTH)},
        ["its head differs from its token embedding"],
    ),
    "head of another shape": (
        lambda: {**draw_base(), "lm_head.weight": torch.ones(5)},
        ["its head differs from its token embedding"],
    ),
    "two names": (
        lambda: {**draw_base(), "transformer.h.0.ln_1.bias": torch.ones(WIDTH)},
        ["holds h.0.ln_1.bias under two names"],
    ),
    "two endings": (
        lambda: {**draw_base(), "h.0.ln_1.g": torch.ones(WIDTH)},
        ["holds h.0.ln_1.weight under two names"],
    ),
    "nan": (
        lambda: not_finite(draw_base(), "h.1.mlp.c_fc.weight", float("nan")),
        ["transformer.h.1.mlp.c_fc.weight holds values that are not finite"],
    ),
    "infinite": (
        lambda: not_finite(draw_base(), "ln_f.bias", float("-inf")),
        ["transformer.ln_f.bias holds values that are not finite"],
    ),
    "another model's": (
        lambda: {"roberta.embeddings.weight": torch.ones(2, 2)},
        ["lacks 28 tensors"],
    ),
    "no tensors": (lambda: {"wte.weight": 3}, ["holds something else than named tensors"]),
    "a list": (lambda: [torch.ones(2)], ["holds something else than named tensors"]),
    "a wrapped number": (
        lambda: {"model_state_dict": {"wte.weight": 3}},
        ["holds something else than named tensors"],
    ),
    "a module": (lambda: nn.Linear(2, 2), ["holds more than tensors", "not loaded for safety"]),
}


@pytest.mark.parametrize(("make", "parts"), BAD_BASES.values(), ids=BAD_BASES)
def test_bases_that_do_not_fit(tmp_path, make, parts):
    path = tmp_path / "bad.bin"
    torch.save(make(), path)
    refuses([f"{path}: ", *parts], ("--init_checkpoint", path))


def test_large_finite_values_are_finite(tmp_path):
    drawn = draw_base()
    drawn["h.0.ln_1.bias"] = torch.full((WIDTH,), 3e38)
    path = write_plain(drawn, tmp_path)
    assert_same_bits(
        parameters(open_model(parse("--init_checkpoint", path))[0]),
        prefixed(drawn, "transformer."),
    )


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harmed",)


def test_a_pickle_that_wants_to_run_something(tmp_path, monkeypatch, base_path):
    monkeypatch.chdir(tmp_path)
    torch.save({"model_state_dict": draw_lora(), "x": Harmful()}, "bad.pt")
    refuses(["bad.pt: ", "not loaded for safety"], ("--init_checkpoint", "bad.pt"))
    refuses(["bad.pt: ", "for safety"], ("--init_checkpoint", base_path), "bad.pt")
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("write", [write_plain, write_legacy, write_wrapped, write_safe])
@pytest.mark.parametrize("share", [0, 0.3, 0.99])
def test_a_truncated_file(tmp_path, base_path, write, share):
    folder = tmp_path / "cut"
    folder.mkdir()
    for drawn, flags in ((draw_base(), ()), (draw_lora(), ("--init_checkpoint", base_path))):
        path = write(drawn, folder)
        whole = path.read_bytes()
        path.write_bytes(whole[: int(share * len(whole))])
        if flags:
            refuses([f"{path}: damaged"], flags, path)
        else:
            refuses([f"{path}: damaged"], ("--init_checkpoint", path))


def test_files_that_are_not_there(tmp_path, base_path):
    nowhere = tmp_path / "no.bin"
    for path in (nowhere, tmp_path):
        refuses([f"{path}: no such checkpoint file"], ("--init_checkpoint", path))
    refuses([f"{nowhere}: no such checkpoint file"], ("--init_checkpoint", base_path), nowhere)
    (tmp_path / "text.bin").write_text("<html>404</html>")
    refuses(["text.bin: damaged"], ("--init_checkpoint", tmp_path / "text.bin"))


# ---- LoRA files that do not fit, and files in the wrong place ----


@pytest.mark.parametrize("with_metadata", [True, False])
def test_a_lora_file_as_the_base(tmp_path, lora_path, with_metadata):
    path = lora_path if with_metadata else write_wrapped(draw_lora(), tmp_path)
    says = [f"{path}: holds LoRA weights only", "base as --init_checkpoint", "--lora_path"]
    for flags in ((), ("--lora_dim", 2, "--lora_alpha", 6), ("--lora_dim", 9)):
        refuses(says, ("--init_checkpoint", path, *flags))


def test_a_lora_file_without_its_base(lora_path):
    refuses([f"{lora_path}: needs the base", "--init_checkpoint"], (), lora_path)


def test_a_base_as_the_lora_file(tmp_path, base_path):
    refuses(["none of its 28 tensors is LoRA's"], ("--init_checkpoint", base_path), base_path)


def test_a_full_model_in_either_place(tmp_path, base_path, lora_path, open_lora):
    whole = tmp_path / "whole.pt"
    save_model(whole, *open_lora(), lora_only=False)
    says = [f"{whole}: holds a full model, not LoRA alone", "adapter_tensors"]
    refuses(says, ("--init_checkpoint", base_path), whole)
    says = [f"{whole}: holds LoRA weights of its own", "base alone"]
    refuses(says, ("--init_checkpoint", whole), lora_path)


@pytest.mark.parametrize("lora_only", [True, False])
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--lora_alpha", 32), "was trained with alpha 6, but --lora_alpha is 32"),
        (("--lora_dim", 4), "was trained with rank 2, but --lora_dim is 4"),
        (("--lora_dim", 0), "was trained with rank 2, but --lora_dim is 0"),
    ],
)
def test_flags_that_contradict_the_file(tmp_path, base_path, open_lora, flags, says, lora_only):
    path = tmp_path / "model.7.pt"
    save_model(path, *open_lora(), lora_only=lora_only)
    if lora_only:
        says = says.replace("--lora_alpha", "lora_alpha")  # the library's, which knows no flags
        refuses([f"{path}: {says}"], ("--init_checkpoint", base_path, *flags), path)
    else:
        refuses([f"{path}: {says}"], ("--init_checkpoint", path, *flags))


@pytest.mark.parametrize("lora_only", [True, False])
def test_a_file_that_does_not_say_its_alpha(tmp_path, base_path, lora_only):
    tensors = draw_lora() if lora_only else {**draw_lora(), **draw_base()}
    path = write_wrapped(tensors, tmp_path)
    given = ("--init_checkpoint", base_path if lora_only else path)
    file = path if lora_only else None
    says = [f"{path}: does not say with what alpha", "lora_alpha"]
    refuses(says, given, file)
    refuses(says, (*given, "--lora_dim", 2), file)
    contradicts = f"{path}: was trained with rank 2, but --lora_dim is 3"
    refuses([contradicts], (*given, "--lora_dim", 3, "--lora_alpha", 6), file)
    args = parse(*given, "--lora_alpha", 32)
    model, _ = open_model(args, None if file is None else str(file))
    assert (args.lora_dim, model.config.lora_attn_alpha) == (2, 32)


@pytest.mark.parametrize(
    ("flags", "message"),
    [(("--lora_dim", -1), "--lora_dim has to be"), (("--lora_alpha", 0), "--lora_alpha above 0")],
)
def test_flags_out_of_range(base_path, flags, message):
    with pytest.raises(ValueError, match=message):
        open_model(parse("--init_checkpoint", base_path, *flags))


def test_another_base(tmp_path, lora_path):
    other = tmp_path / "other.bin"
    torch.save(draw_base(seed=9), other)
    says = [f"{lora_path}: was trained on another base", "base.bin", read_base(other).fingerprint]
    refuses(says, ("--init_checkpoint", other), lora_path)


BAD_LORA = {
    "lacks one": (
        lambda: without(draw_lora(), "module.transformer.h.1.attn.c_attn.lora_A"),
        ["lacks transformer.h.1.attn.c_attn.lora_A, the other half of a pair"],
    ),
    "of a deeper model": (
        lambda: draw_lora(blocks=3),
        ["has, unknown to the model, 2 tensors: transformer.h.2.attn.c_attn.lora_A"],
    ),
    "of a wider model": (
        lambda: draw_lora(width=12),
        ["c_attn.lora_A is (4, 12) in the file, (4, 8) in the model", "a base of another size"],
    ),
    "of another module": (
        lambda: {n.replace("c_attn", "c_proj"): t for n, t in draw_lora().items()},
        ["attn.c_proj has 2 stacked blocks, and it is unknown which slices"],
    ),
    "nan": (
        lambda: not_finite(draw_lora(), f"module.{LORA_A}", float("nan")),
        [f"{LORA_A} holds values that are not finite"],
    ),
    "twice": (
        lambda: {**draw_lora(), LORA_A: torch.ones(4, WIDTH)},
        ["holds transformer.h.0.attn.c_attn.lora_A under two names"],
    ),
}


@pytest.mark.parametrize(("make", "parts"), BAD_LORA.values(), ids=BAD_LORA)
def test_lora_files_that_do_not_fit(tmp_path, base_path, make, parts):
    path = write_wrapped(make(), tmp_path)
    refuses([f"{path}: ", *parts], ("--init_checkpoint", base_path, "--lora_alpha", 6), path)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"rank": "two"}, "its metadata is damaged"),
        ({"rank": 2}, "its metadata is damaged"),
        ({"alpha": "-6"}, "alpha -6 in its metadata"),
        ({"rank": "3"}, "damaged: it says rank 3, its tensors have 2"),
        ({"targets": '["c_proj"]'}, "damaged: it says targets c_proj, its tensors have c_attn"),
    ],
)
def test_metadata_that_is_wrong(base_path, lora_path, changed, says):
    content = torch.load(lora_path, weights_only=True)
    content["metadata"].update(changed)
    torch.save(content, lora_path)
    refuses([f"{lora_path}: {says}"], ("--init_checkpoint", base_path), lora_path)


# ---- what is written ----


def test_a_lora_file_is_the_release_s_form(lora_path, open_lora, base_path):
    model, base = open_lora()
    content = torch.load(lora_path, weights_only=True)
    assert content.keys() == {"model_state_dict", "metadata"}
    tensors = content["model_state_dict"]
    assert set(tensors) == {
        f"module.transformer.h.{i}.attn.c_attn.lora_{ab}" for i in range(BLOCKS) for ab in "AB"
    }
    assert_same_bits(tensors, prefixed(lora.lora_state_dict(model), "module."))
    metadata = {name: json.loads(text) for name, text in content["metadata"].items()}
    assert metadata == {
        "rank": 2,
        "alpha": 6,
        "targets": ["c_attn"],
        "bias": "none",
        "base": str(base_path),
        "base_fingerprint": base.fingerprint,
    }
    assert read_adapter(lora_path).metadata.rank == 2
    assert lora_path.stat().st_size < 8_000


def test_a_whole_file_is_the_release_s_form(tmp_path, open_lora):
    model, base = open_lora()
    save_model(tmp_path / "model.9.pt", model, base, lora_only=False)
    content = torch.load(tmp_path / "model.9.pt", weights_only=True)
    assert_same_bits(content["model_state_dict"], prefixed(parameters(model), "module."))
    assert json.loads(content["metadata"]["rank"]) == 2


@pytest.mark.parametrize("held", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("file_dtype", [torch.float32, torch.float16])
def test_round_trip_of_a_whole_model(tmp_path, base_path, open_lora, held, file_dtype):
    torch.save({n: t.to(file_dtype) for n, t in draw_base().items()}, base_path)
    model, base = open_lora()
    trained = {n: p for n, p in parameters(model).items() if "lora_" in n}
    if held is not None:
        hold_frozen_in(model, held)
    path = tmp_path / "model.9.pt"
    save_model(path, model, base, lora_only=False)
    drawn = {n: t.to(file_dtype) for n, t in draw_base().items()}
    written = canonical_names(read_tensors(path)[0], "file")
    assert_same_bits(written, {**prefixed(drawn, "transformer."), **trained})

    args = parse("--init_checkpoint", path)
    again, again_base = open_model(args)
    assert (args.lora_dim, args.lora_alpha) == (2, 6)
    floats = {n: t.float() for n, t in drawn.items()}
    assert_same_bits(parameters(again), {**prefixed(floats, "transformer."), **trained})
    assert again_base.fingerprint == base.fingerprint
    # LoRA trained further from there still belongs to the first base.
    save_model(tmp_path / "lora.pt", again, again_base, lora_only=True)
    open_model(parse("--init_checkpoint", base_path), str(tmp_path / "lora.pt"))


@pytest.mark.parametrize("held", [None, torch.bfloat16])
def test_round_trip_of_lora_alone(tmp_path, base_path, open_lora, held):
    model, base = open_lora()
    expected = {n: p.clone() for n, p in parameters(model).items()}
    if held is not None:
        hold_frozen_in(model, held)
    path = tmp_path / "model.9.pt"
    save_model(path, model, base, lora_only=True)
    again, _ = open_model(parse("--init_checkpoint", base_path), str(path))
    assert_same_bits(parameters(again), expected)


def test_round_trip_of_a_model_without_lora(tmp_path, base_path):
    model, base = open_model(parse("--init_checkpoint", base_path))
    trained = {}
    for name, parameter in model.named_parameters():
        parameter.data = trained[name] = parameter.data + 1
    path = tmp_path / "model.9.pt"
    save_model(path, model, base, lora_only=False)
    assert torch.load(path, weights_only=True)["metadata"] == {}
    args = parse("--init_checkpoint", path)
    assert_same_bits(parameters(open_model(args)[0]), trained)
    assert args.lora_dim == 0
    # It is a base as any other: LoRA can be added to it.
    model, _ = open_model(parse("--init_checkpoint", path, "--lora_dim", 3))
    assert model.get_parameter(LORA_A).shape == (6, WIDTH)


def test_training_what_a_file_brought_leaves_the_file_alone(tmp_path, open_lora):
    path = tmp_path / "model.9.pt"
    save_model(path, *open_lora(), lora_only=False)
    before = path.read_bytes()
    model, base = open_model(parse("--init_checkpoint", path))
    with torch.no_grad():
        model.get_parameter(LORA_A).add_(1)
    assert path.read_bytes() == before
    save_model(path, model, base, lora_only=False)
    model_again, _ = open_model(parse("--init_checkpoint", path))
    assert_same_bits(parameters(model_again), parameters(model))


@pytest.mark.parametrize("lora_only", [True, False])
def test_values_that_are_not_finite_are_not_written(tmp_path, open_lora, lora_only):
    model, base = open_lora()
    path = tmp_path / "model.9.pt"
    save_model(path, model, base, lora_only)
    before = path.read_bytes()
    with torch.no_grad():
        model.get_parameter(LORA_A)[1, 2] = float("inf")
    with pytest.raises(CheckpointError, match=f"model.9.pt: not written: {LORA_A} holds values"):
        save_model(path, model, base, lora_only)
    assert path.read_bytes() == before


def test_a_model_is_written_completely_or_not_at_all(tmp_path, monkeypatch, open_lora):
    folder = tmp_path / "work"
    folder.mkdir()
    model, base = open_lora()

    def write():
        save_model(folder / "model.9.pt", model, base, lora_only=True)

    write()
    (path,) = folder.iterdir()
    before = path.read_bytes()
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask

    def fail(content, file):
        file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="No space left"):
        write()
    assert list(folder.iterdir()) == [path]
    assert path.read_bytes() == before


def test_backbone_covers_every_name(open_lora):
    assert all(name.startswith(GPT2.backbone) for name, _ in open_lora()[0].named_parameters())
