"""Tests convert.py on GPT-2: files of weights, full models, and PEFT on other modules."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from conversions import OUT, close, make_base, plain_logits, seed, train, tree
from safetensors.torch import save_file

from conversion.gpt2_folder import read_gpt2
from loralib.adapters.deltas import deltas_of
from loralib.adapters.formats import read_adapter, write_adapter
from loralib.io.tensors import read_tensors, write_wrapped_tensors


@pytest.mark.slow
@pytest.mark.parametrize("names", ["published", "release"])
def test_a_file_of_gpt2_weights(convert, script, tmp_path, names):
    """A file does not record its shape, so it has to be that of a known card."""
    folder = make_base(tmp_path / "base", "gpt2", **CARD)
    tensors = read_tensors(folder / "model.safetensors")[0]
    if names == "release":
        tensors = {f"module.transformer.{name}": t for name, t in tensors.items()}
        tensors = {"model_state_dict": tensors}
    torch.save(tensors, tmp_path / "base.bin")
    given = train(folder, "gpt2")
    write_adapter(tmp_path / "in.safetensors", given.adapter)
    flags = ("--to", "merged", "--base", tmp_path / "base.bin")
    convert(tmp_path / "in.safetensors", tmp_path / "out", *flags)
    close(plain_logits(tmp_path / "out", "gpt2"), given.logits, CARD_TERMS)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings.pop("tie_word_embeddings") is True
    assert settings == {
        **CARD,
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "bos_token_id": 50256,
        "eos_token_id": 50256,
        "layer_norm_epsilon": 1e-5,
        "model_type": "gpt2",
        "torch_dtype": "float32",
    }
    assert tree(tmp_path / "out").keys() == {"config.json", "model.safetensors"}


CARD_TERMS = 4 * (3 * 128 + 4 * 128 + 32 + 12) + 128
CARD = {"n_embd": 128, "n_layer": 4, "n_head": 4, "vocab_size": 50257, "n_positions": 1024}


@pytest.mark.parametrize("lacking", ["all cards", "positions"])
def test_a_file_of_no_known_card(failure, trained, tmp_path, lacking):
    shape = {"vocab_size": 9, "n_positions": 5}
    base = make_base(tmp_path / "base", "gpt2", **({} if lacking == "all cards" else CARD | shape))
    tensors = read_tensors(base / "model.safetensors")[0]
    tensors = {
        name: t for name, t in tensors.items() if lacking == "all cards" or name != "wpe.weight"
    }
    torch.save(tensors, tmp_path / "base.bin")
    write_adapter(tmp_path / "in.safetensors", trained["gpt2"].adapter)
    line = failure(
        *(tmp_path / "in.safetensors", tmp_path / "out", "--to", "merged"),
        *("--base", tmp_path / "base.bin"),
    )
    assert ("give the model's folder" if lacking == "all cards" else "wte.weight is") in line


@pytest.mark.slow
def test_a_gpt2_that_was_trained_as_a_whole(convert, failure, tmp_path):
    """gpt2_ft.py writes such a file without --lora_dim; it has no base."""
    folder, source = make_base(tmp_path / "base", "gpt2", **CARD), tmp_path / "model.9.pt"
    tensors = read_tensors(folder / "model.safetensors")[0]
    tensors = {f"module.transformer.{name}": tensor for name, tensor in tensors.items()}
    write_wrapped_tensors(source, tensors, {})
    line = failure(source, tmp_path / "out", "--to", "merged", "--base", folder, "--task", "rte")
    assert line.endswith(f"{source}: is a whole GPT-2 without LoRA: leave out --base and --task")
    printed = convert(source, tmp_path / "out", "--to", "merged", "--dtype", "bfloat16")
    assert printed["first"] == f"{tmp_path / 'out'}: written, from {source}:"
    assert (printed["format"], printed["dtype"], printed["notes"]) == ("merged", "bfloat16", [])
    written = read_tensors(tmp_path / "out" / "model.safetensors")[0]
    for name, tensor in tensors.items():
        assert torch.equal(written[name.removeprefix("module.")], tensor.bfloat16())
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {**settings, **CARD, "torch_dtype": "bfloat16"} == settings
    assert "none of its" in failure(source, tmp_path / "out.bin")


def test_settings_of_a_folder(failure, trained, tmp_path):
    base = make_base(tmp_path / "base", "gpt2", layer_norm_epsilon=0.25)
    assert read_gpt2(str(base))[0].config.layer_norm_epsilon == 0.25
    write_adapter(tmp_path / "in.safetensors", trained["gpt2"].adapter)
    config = base / "config.json"
    settings = json.loads(config.read_text())
    for changed, message in (
        ({"n_head": 3}, f"{config}: "),
        ({"n_layer": None, "n_positions": None}, f"{base}: its settings lack n_layer, n_positions"),
    ):
        kept = {key: value for key, value in (settings | changed).items() if value is not None}
        config.write_text(json.dumps(kept))
        line = failure(tmp_path / "in.safetensors", tmp_path / "out.bin", "--base", base)
        assert message in line


@pytest.mark.slow
@pytest.mark.parametrize("given", ["folder", "file"])
@pytest.mark.parametrize("whole", [False, True])
def test_a_base_with_other_heads_than_its_card(convert, failure, tmp_path, given, whole):
    """Neither tensors nor fingerprint show heads, but gpt2_ft.py trains only with the card's."""
    bases = {n: make_base(tmp_path / f"base{n}", "gpt2", **CARD | {"n_head": n}) for n in (4, 8)}
    trained, adapter = train(bases[4], "gpt2"), tmp_path / "model.9.pt"
    tensors = trained.adapter.tensors
    if whole:
        base = read_tensors(bases[4] / "model.safetensors")[0]
        tensors = tensors | {f"transformer.{name}": tensor for name, tensor in base.items()}
    tensors = {f"module.{name}": tensor for name, tensor in tensors.items()}
    write_wrapped_tensors(adapter, tensors, trained.adapter.metadata.to_metadata())

    def command(heads):
        base = bases[heads] if given == "folder" else bases[heads] / "model.safetensors"
        return adapter, tmp_path / "out", "--to", "merged", "--base", base

    line = failure(*command(8))
    assert f"{adapter}: was trained as gpt2.xs, whose n_head is 4, but " in line
    assert line.endswith("has 8: give the base that it was trained on")
    convert(*command(4))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["n_head"] == 4


@pytest.mark.slow
def test_settings_next_to_a_file_of_weights_are_used(convert, tmp_path):
    """An adapter of another program may be for another number of heads than the card's."""
    base = make_base(tmp_path / "base", "gpt2", **CARD | {"n_head": 8})
    given = train(base, "gpt2")
    write_adapter(tmp_path / "in.safetensors", given.adapter)
    flags = ("--to", "merged", "--base", base / "model.safetensors")
    convert(tmp_path / "in.safetensors", tmp_path / "out", *flags)
    close(plain_logits(tmp_path / "out", "gpt2"), given.logits, CARD_TERMS)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["n_head"] == 8


# PEFT's adapters of GPT-2 that the release's layers cannot hold. A single update of all of c_attn
# cannot be held by the layers here either.
FOREIGN = {
    "all of c_attn": {"attn.c_attn": (16, 48)},
    "the attention's c_proj": {"attn.c_proj": (16, 16)},
    "both": {"attn.c_attn": (16, 48), "attn.c_proj": (16, 16)},
    "the MLP": {"mlp.c_fc": (16, 64), "mlp.c_proj": (64, 16)},
}


def foreign_adapter(folder: Path, modules: dict[str, tuple[int, int]]) -> dict[str, torch.Tensor]:
    """Writes an adapter as PEFT does; returns what it adds to weights, which are (in, out)."""
    folder.mkdir()
    generator, tensors, sums = seed(3), {}, {}
    for block, (module, (width, out)) in itertools.product(range(2), modules.items()):
        A, B = torch.randn(4, width, generator=generator), torch.randn(out, 4, generator=generator)
        name = f"transformer.h.{block}.{module}"
        tensors[f"base_model.model.{name}.lora_A.weight"] = A
        tensors[f"base_model.model.{name}.lora_B.weight"] = B
        sums[f"{name}.weight"] = (10 / 4 * B.double() @ A.double()).t()
    save_file(tensors, folder / "adapter_model.safetensors")
    # Their last parts alone would be ambiguous: attention and MLP both have a c_proj.
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 10, "target_modules": list(modules)}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "fan_in_fan_out": True}))
    return sums


@pytest.mark.parametrize("modules", FOREIGN)
@pytest.mark.parametrize("file", ["", "adapter_config.json"])
def test_foreign_adapters_merge(convert, trained, tmp_path, modules, file):
    sums, base = foreign_adapter(tmp_path / "in", FOREIGN[modules]), trained["gpt2"].base
    convert(tmp_path / "in" / file, tmp_path / "out", "--to", "merged", "--base", base)
    merged = read_tensors(tmp_path / "out" / "model.safetensors")[0]
    for name, tensor in read_tensors(base / "model.safetensors")[0].items():
        name = f"transformer.{name}"
        expected = (tensor.double() + sums.get(name, 0)).float()
        close(merged[name], expected, terms=5)
    assert plain_logits(tmp_path / "out", "gpt2").isfinite().all()


@pytest.mark.parametrize(
    ("modules", "format"),
    [*((modules, "release") for modules in FOREIGN), ("all of c_attn", "lora"), ("both", "lora")],
)
def test_foreign_adapters_that_a_format_cannot_hold_are_refused(failure, tmp_path, modules, format):
    foreign_adapter(tmp_path / "in", FOREIGN[modules])
    for target in (OUT[format], "folder"):
        line = failure(tmp_path / "in", tmp_path / target, "--to", format)
        assert line.endswith("merge it into its base (--to merged)")


@pytest.mark.parametrize("modules", ["the attention's c_proj", "the MLP"])
def test_foreign_adapters_that_the_lora_format_can_hold(convert, tmp_path, modules):
    sums = foreign_adapter(tmp_path / "in", FOREIGN[modules])
    convert(tmp_path / "in", tmp_path / "out.safetensors", "--to", "lora")
    deltas = deltas_of(read_adapter(tmp_path / "out.safetensors"))
    assert {f"{name}.weight" for name in deltas} == sums.keys()
    for name, delta in deltas.items():
        close(delta.product().t(), sums[f"{name}.weight"].float(), terms=5)


def test_a_merged_gpt2s_settings_tie_its_head_to_its_embedding(convert, tmp_path):
    base = make_base(tmp_path / "base", "gpt2")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    write_adapter(tmp_path / "in.safetensors", train(base, "gpt2").adapter)
    convert(tmp_path / "in.safetensors", tmp_path / "out", "--to", "merged", "--base", base)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings["tie_word_embeddings"] is True
