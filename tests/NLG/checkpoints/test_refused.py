"""Tests that each of GPT-2's files that does not fit is refused with one clear line."""

import json
import os
import re

import pytest
import torch
from compare import assert_same_bits
from gpt2_files import (
    LORA_A,
    VOCABULARY,
    WIDTH,
    draw_base,
    draw_lora,
    not_finite,
    parameters,
    parse,
    prefixed,
    refuses,
    without,
    write_legacy,
    write_plain,
    write_safe,
    write_wrapped,
)
from torch import nn

from checkpoints import open_model, read_base, save_model
from lora_flags import check_model_params
from loralib.adapters.adapter import Adapter
from loralib.adapters.formats import write_adapter
from loralib.adapters.metadata import LoraMetadata
from loralib.errors import CheckpointError

# ---- bases that do not fit ----

BAD_BASES = {
    "lacks one": (
        lambda: without(draw_base(), "h.1.ln_2.bias"),
        ["lacks 1 tensor: transformer.h.1.ln_2.bias"],
    ),
    "lacks many": (
        lambda: draw_base(blocks=1),
        ["lacks 12 tensors: transformer.h.1.attn.c_attn.bias", ", …"],
    ),
    "is empty": (dict, ["lacks 28 tensors"]),
    "has more": (
        lambda: {**draw_base(), "h.1.extra.weight": torch.ones(1)},
        ["has 1 tensor that the model does not have: transformer.h.1.extra.weight"],
    ),
    "has more blocks": (
        lambda: draw_base(blocks=3),
        ["has 12 tensors that the model does not have: transformer.h.2.", ", …"],
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
    "integers": (
        lambda: {**draw_base(), "h.0.ln_1.bias": torch.ones(WIDTH, dtype=torch.int16)},
        [
            "transformer.h.0.ln_1.bias holds int16, which needs a scale to be a weight",
            "in float32, bfloat",
        ],
    ),
    "eight bits": (
        lambda: {**draw_base(), "ln_f.bias": torch.ones(WIDTH).to(torch.float8_e4m3fn)},
        ["transformer.ln_f.bias holds float8_e4m3fn, which needs a scale"],
    ),
    "in another entry": (
        lambda: {"epoch": 3, "state_dict": draw_base()},
        ["other than named tensors: these are in its entry 'state_dict'; save that alone"],
    ),
    "another model's": (
        lambda: {"roberta.embeddings.weight": torch.ones(2, 2)},
        ["holds no GPT-2: its tensors are roberta.embeddings.weight"],
    ),
    "another model's, with LoRA": (
        lambda: {
            "roberta.encoder.layer.0.attention.self.query.lora_A": torch.ones(2, 2),
            "classifier.dense.bias": torch.ones(2),
        },
        ["holds no GPT-2: its tensors are classifier.dense.bias, roberta.encoder.layer.0."],
    ),
    "no tensors": (lambda: {"wte.weight": 3}, ["holds something other than named tensors"]),
    "a list": (lambda: [torch.ones(2)], ["holds something other than named tensors"]),
    "a wrapped number": (
        lambda: {"model_state_dict": {"wte.weight": 3}},
        ["holds something other than named tensors"],
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


def test_a_pickle_that_would_run_code_is_refused(tmp_path, monkeypatch, base_path):
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


def test_missing_files_and_files_of_other_kinds(tmp_path, base_path):
    empty, run = tmp_path / "empty", tmp_path / "run"
    nowhere = empty / "no.bin"
    for folder in (empty, run):
        folder.mkdir()
    for step in (9, 26290):  # the release's last step is one less
        (run / f"model.{step}.pt").touch()
    for path, way_out in (
        (nowhere, "; download_pretrained_checkpoints.sh fetches GPT-2's from the hub"),
        (run / "model.26289.pt", "; its folder holds model.26290.pt; download_pretrained"),
        (
            "gpt2-medium",
            f" (relative to {os.getcwd()}); download_pretrained_checkpoints.sh fetches",
        ),
        (empty, ": it is a folder; give the file of weights in it, such as model.safetensors or "),
    ):
        refuses([f"{path}: no such checkpoint file{way_out}"], ("--init_checkpoint", path))
    refuses([f"{nowhere}: no such checkpoint file"], ("--init_checkpoint", base_path), nowhere)
    refuses(["the path of the base is empty: give a file as --init_ch"], ("--init_checkpoint", ""))
    (tmp_path / "text.bin").write_text("<html>404</html>")
    refuses(["text.bin: damaged"], ("--init_checkpoint", tmp_path / "text.bin"))


PARTS = ["model-00001-of-00002.safetensors", "pytorch_model-00002-of-00002.bin"]


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (["model.7.pt", "resume.pt", "metrics.jsonl"], "model.7.pt"),
        (["model.1000.pt", "model.999.pt", "model.95.pt", "model.1000.pt.half"], "model.1000.pt"),
        (["model.7.pt", "model_best.pt"], "model.7.pt, model_best.pt"),
        (["pytorch_model.bin", "training_args.bin", *PARTS], "pytorch_model.bin"),
        (["model-00001-of-00001.safetensors"], "model-00001-of-00001.safetensors"),
        (
            ["training_args.bin", "optimizer.bin", "scheduler.bin"],
            "model.safetensors or pytorch_model.bin",
        ),
    ],
)
def test_the_error_about_a_folder_names_its_possible_models(tmp_path, files, named):
    for name in files:
        (tmp_path / name).touch()
    message = (
        f"{tmp_path}: no such checkpoint file: it is a folder; give the file of weights in it, "
    )
    with pytest.raises(CheckpointError, match=f"^{re.escape(f'{message}such as {named}')}$"):
        open_model(parse("--init_checkpoint", tmp_path))


def test_a_folder_that_holds_only_parts_of_a_model(tmp_path):
    for name in (*PARTS, "training_args.bin"):
        (tmp_path / name).touch()
    message = [f"{tmp_path}: belongs to a model in several files; save it in one", "max_shard_size"]
    refuses(message, ("--init_checkpoint", tmp_path))


def test_a_model_in_several_files(tmp_path):
    parts = {name: f"model-{n}.safetensors" for n, name in enumerate(draw_base())}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": parts}))
    part = write_safe(draw_base(), tmp_path).rename(tmp_path / "model-0.safetensors")
    for path in (index, part, tmp_path):
        message = [f"{path}: belongs to a model in several files; save it in one", "max_shard_size"]
        refuses(message, ("--init_checkpoint", path))


# ---- LoRA files that do not fit, and files in the wrong place ----


@pytest.mark.parametrize("with_metadata", [True, False])
def test_a_lora_file_as_the_base(tmp_path, lora_path, with_metadata):
    path = lora_path if with_metadata else write_wrapped(draw_lora(), tmp_path)
    message = [f"{path}: holds LoRA weights only", "base as --init_checkpoint", "--lora_path"]
    for flags in ((), ("--lora_dim", 2, "--lora_alpha", 6), ("--lora_dim", 9)):
        refuses(message, ("--init_checkpoint", path, *flags))


def test_a_lora_file_as_the_base_of_a_training(lora_path):
    """gpt2_ft.py has no --lora_path."""
    args = parse("--init_checkpoint", lora_path)
    args.lora_dropout = 0.1
    message = r"--init_checkpoint to train new LoRA on it; to train on .*model.<step>.pt.*--resume"
    with pytest.raises(CheckpointError, match=message) as raised:
        open_model(args)
    assert "--lora_path" not in str(raised.value)


def test_a_lora_file_without_its_base(lora_path):
    refuses([f"{lora_path}: needs the base", "--init_checkpoint"], (), lora_path)


def test_a_base_as_the_lora_file(base_path):
    refuses(
        ["none of its 28 tensors is LoRA's", "has to be given as the base"],
        ("--init_checkpoint", base_path),
        base_path,
    )


def test_a_full_model_as_the_lora_file_or_as_its_base(tmp_path, base_path, lora_path, open_lora):
    whole = tmp_path / "whole.pt"
    save_model(whole, *open_lora(), lora_only=False)
    message = [
        f"{whole}: holds a full model, not LoRA alone",
        "then write the adapter with save_adapter",
    ]
    refuses(message, ("--init_checkpoint", base_path), whole)
    message = [f"{whole}: already holds LoRA weights", "base without LoRA"]
    refuses(message, ("--init_checkpoint", whole), lora_path)


@pytest.mark.parametrize("lora_only", [True, False])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--lora_alpha", 32), "was trained with alpha 6, but --lora_alpha is 32"),
        (("--lora_dim", 4), "was trained with rank 2, but --lora_dim is 4"),
        (("--lora_dim", 0), "was trained with rank 2, but --lora_dim is 0"),
    ],
)
def test_flags_that_contradict_the_file(tmp_path, base_path, open_lora, flags, message, lora_only):
    path = tmp_path / "model.7.pt"
    save_model(path, *open_lora(), lora_only=lora_only)
    if lora_only:
        # The library's errors name no flags.
        message = message.replace("--lora_alpha", "lora_alpha")
        refuses([f"{path}: {message}"], ("--init_checkpoint", base_path, *flags), path)
    else:
        message = [f"{path}: {message}: leave {flags[0]} out"]
        refuses(message, ("--init_checkpoint", path, *flags))


@pytest.mark.parametrize("lora_only", [True, False])
def test_a_file_that_does_not_record_its_alpha(tmp_path, base_path, caplog, lora_only):
    """It is refused without --lora_alpha. With it, warnings say what is unverified."""
    tensors = draw_lora() if lora_only else {**draw_lora(), **draw_base()}
    path = write_wrapped(tensors, tmp_path)
    given = ("--init_checkpoint", base_path if lora_only else path)
    file = path if lora_only else None
    message = [f"{path}: does not record the alpha", "lora_alpha"]
    refuses(message, given, file)
    refuses(message, (*given, "--lora_dim", 2), file)
    contradicts = f"{path}: was trained with rank 2, but --lora_dim is 3"
    refuses([contradicts], (*given, "--lora_dim", 3, "--lora_alpha", 6), file)
    contradicts = f"{path}: was trained with variant lora, but --lora_variant is rslora"
    refuses([contradicts], (*given, "--lora_variant", "rslora", "--lora_alpha", 6), file)
    args = parse(*given, "--lora_alpha", 32)
    caplog.clear()
    model, _ = open_model(args, None if file is None else str(file))
    assert (args.lora_dim, model.config.lora_attn_alpha) == (2, 32)
    assert caplog.text.count(f"{path} does not record its alpha: cannot check that it is 32") == 1
    base_warning = (
        f"{path} does not record its base's fingerprint: cannot check that its base is {base_path}"
    )
    assert caplog.text.count(base_warning) == lora_only


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--lora_dim", -1), "--lora_dim must be at least 0, not -1"),
        (("--lora_alpha", 0), "--lora_alpha must be above 0, not 0"),
        (("--lora_alpha", "nan"), "--lora_alpha must be above 0, not nan"),
        (("--lora_alpha", "inf"), "--lora_alpha must be finite, not inf"),
    ],
)
def test_flags_out_of_range(flags, message):
    with pytest.raises(ValueError, match=message):
        check_model_params(parse(*flags))


def test_lora_on_another_base_is_refused(tmp_path, base_path, lora_path):
    """Also if it would be merged, as the model has no layers for an update of all of c_attn."""
    other, merged = tmp_path / "other.bin", tmp_path / "merged"
    torch.save(draw_base(seed=9), other)
    lora = {LORA_A: torch.ones(2, WIDTH), LORA_A[:-1] + "B": torch.ones(3 * WIDTH, 2)}
    trained_on = {"base": str(base_path), "base_fingerprint": read_base(base_path).fingerprint}
    metadata = LoraMetadata(rank=2, alpha=2, targets=("c_attn",), **trained_on)
    write_adapter(merged, Adapter(lora, metadata), "peft")
    for path, file in ((lora_path, lora_path), (merged, merged / "adapter_model.safetensors")):
        message = [f"{file}: was trained on another base", "base.bin", read_base(other).fingerprint]
        refuses(message, ("--init_checkpoint", other), path)


BAD_LORA = {
    "lacks one": (
        lambda: without(draw_lora(), "module.transformer.h.1.attn.c_attn.lora_A"),
        ["lacks transformer.h.1.attn.c_attn.lora_A, the other half of a pair"],
    ),
    "of a deeper model": (
        lambda: draw_lora(blocks=3),
        ["has 2 tensors that the model does not have: transformer.h.2.attn.c_attn.lora_A"],
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


def test_lora_of_another_model_is_refused(tmp_path, base_path):
    """The error is about the model, not about the base, which does not fit either."""
    module = "bert.encoder.layer.0.attention.self.query"
    tensors = {f"{module}.lora_A": torch.ones(2, WIDTH), f"{module}.lora_B": torch.ones(WIDTH, 2)}
    path = write_wrapped({**tensors, "classifier.dense.bias": torch.ones(2)}, tmp_path)
    message = [
        f"{path}: holds an adapter of {module}, but the layers of GPT-2 are called "
        "transformer.h.0, …: give an adapter that was trained on a GPT-2"
    ]
    refuses(message, ("--init_checkpoint", base_path, "--lora_alpha", 6), path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rank": "two"}, "its metadata is damaged"),
        ({"rank": 2}, "its metadata is damaged"),
        ({"alpha": "-6"}, "invalid alpha -6 in its metadata"),
        ({"rank": "3"}, "damaged: it says rank 3, its tensors have 2"),
        ({"targets": '["c_proj"]'}, "damaged: it says targets c_proj, its tensors have c_attn"),
    ],
)
def test_wrong_metadata_is_refused(base_path, lora_path, changed, message):
    content = torch.load(lora_path, weights_only=True)
    content["metadata"].update(changed)
    torch.save(content, lora_path)
    refuses([f"{lora_path}: {message}"], ("--init_checkpoint", base_path), lora_path)
