"""Tests PEFT's adapters of GPT-2: logits and files are PEFT's, for updates in blocks and others."""

import argparse
import json
from dataclasses import replace

import make_peft_fixture as maker
import pytest
import torch
from adapter_files import load_copied
from compare import assert_close_to_rounding, assert_equal, rounding
from safetensors.torch import load_file, save_file

import checkpoints
import lora_flags
from loralib.adapters.formats import read_adapter, write_adapter
from loralib.adapters.merging import merge_into
from loralib.adapters.peft import CONFIG_NAME, PREFIX, WEIGHTS_NAMES
from loralib.errors import CheckpointError
from loralib.lora_layer import lora_layers
from model import GPT2Config
from weights import canonical_names, load_base

PEFT = maker.PeftFixture()
CASES = [case for case in maker.CASES if maker.family_of(case) == "gpt2"]
# Updates of one block for the query and one for the value, as the release's layers have.
IN_BLOCKS = ["gpt2_blocks", "gpt2_blocks_rslora", "gpt2_blocks_bias"]
# The scripts' models have LoRA layers only for these. They merge other adapters into the base.
WITH_LAYERS = {
    "gpt2_blocks": "attn.c_attn",
    "gpt2_blocks_rslora": "attn.c_attn",
    "gpt2_attention_output": "attn.c_proj",
}
# The adapters that a format cannot hold, and the reason.
NOT_BLOCKS = "its update of transformer.h.0.attn.c_attn does not have the one block"
NO_LAYERS = {
    **{("gpt2_c_attn", format): NOT_BLOCKS for format in ("lora", "release")},
    **{("gpt2_all_targets", format): NOT_BLOCKS for format in ("lora", "release")},
    ("gpt2_attention_output", "release"): "adapts transformer.h.0.attn.c_proj, where the release",
}
WEIGHTS = WEIGHTS_NAMES[0]
C_ATTN = "transformer.h.{}.attn.c_attn"
N = 32
# How many additions follow one another: in each of 2 blocks, three products over N terms and one
# over 4 N, and attention; in the head, one over N.
TERMS = 2 * (3 * N + 4 * N + 8 + 10) + N


def tiny_config_of(card="gpt2.sm", **lora_fields):
    """The shape of the fixture's base, for any model card."""
    shape = maker.FAMILIES["gpt2"][0]
    names = ("n_embd", "n_layer", "n_head", "vocab_size", "n_positions")
    return GPT2Config(**{name: shape[name] for name in names}, **lora_fields)


def close(ours, theirs):
    assert_close_to_rounding(ours, theirs, TERMS)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The file of the fixture's base."""
    return PEFT.write_base(tmp_path_factory.mktemp("base") / "gpt2", "gpt2") / "model.safetensors"


@pytest.fixture
def folder(tmp_path):
    """``folder(case, **changed)``: a case's folder as PEFT writes it, with changed settings."""

    def write(case="gpt2_blocks", **changed):
        return PEFT.write_adapter(tmp_path / "peft" / case, case, **changed)

    return write


@pytest.fixture
def opened(base, monkeypatch):
    """``opened(path, *flags)``: the model that a script opens with --lora_path."""
    monkeypatch.setattr(checkpoints, "config_of", tiny_config_of)

    def load(path, *flags):
        parser = argparse.ArgumentParser()
        lora_flags.add_model_params(parser)
        args = parser.parse_args(["--init_checkpoint", str(base), *flags])
        return checkpoints.open_model(args, str(path))[0].eval()

    return load


def plain_model():
    """Returns the fixture's base."""
    return load_base(
        tiny_config_of(), canonical_names(PEFT.base("gpt2"), "the fixture"), "the fixture"
    )


def merged_with(adapter):
    """Returns the fixture's base with an adapter merged into it."""
    model = plain_model()
    merge_into(model, adapter)
    return model


@torch.no_grad()
def logits_of(model):
    return model(PEFT.ids) * PEFT.mask[..., None]


# ---- reading: PEFT's logits ----


@pytest.mark.parametrize("case", CASES)
def test_the_scripts_models_give_pefts_logits(folder, opened, case):
    """The adapter is in LoRA layers if the models have them, else it is merged into the base."""
    model = opened(folder(case))
    close(logits_of(model), PEFT.logits(case))
    layers = (f"transformer.h.{number}.{WITH_LAYERS.get(case)}" for number in (0, 1))
    assert lora_layers(model).keys() == (set(layers) if case in WITH_LAYERS else set())


@pytest.mark.parametrize("case", CASES)
def test_merging_gives_pefts_logits(folder, case):
    close(logits_of(merged_with(read_adapter(folder(case)))), PEFT.logits(case))


def test_an_adapter_of_some_blocks_is_merged(folder, opened):
    """If its settings or its checksum say that it is whole."""
    path = folder("gpt2_attention_output")
    first = {name: t for name, t in load_copied(path / WEIGHTS).items() if ".h.0." in name}
    save_file(first, path / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"lacks the update of transformer\.h\.1\.attn"):
        opened(path)
    config = json.loads((path / CONFIG_NAME).read_text())
    (path / CONFIG_NAME).write_text(json.dumps(config | {"layers_to_transform": [0]}))
    adapter = read_adapter(path)
    expected = merged_with(adapter)
    assert (logits_of(expected) - logits_of(plain_model())).abs().max() > 0.1
    files = {kind: path.parent / kind for kind in ("lora", "peft")}
    for kind, file in files.items():
        write_adapter(file, adapter, kind)
    for file in (path, *files.values()):
        model = opened(file)
        assert not lora_layers(model)
        assert_equal(model.state_dict(), expected.state_dict())
    torch.save(adapter.tensors, path.parent / "a.pt")
    with pytest.raises(CheckpointError, match=r"a\.pt: lacks 2 tensors: transformer\.h\.1"):
        opened(path.parent / "a.pt", "--lora_alpha", "12")


@pytest.mark.parametrize("case", CASES)
def test_logits_differ_from_the_bases_and_with_another_alpha(folder, opened, case):
    """So the tests above would fail if an adapter were ignored or scaled wrongly."""
    theirs = PEFT.logits(case)
    assert (logits_of(plain_model()) - theirs).abs().max() > 0.1
    alpha = PEFT.config(case)["lora_alpha"]
    path = PEFT.write_adapter(folder(case).parent / "doubled", case, lora_alpha=2 * alpha)
    assert (logits_of(opened(path)) - theirs).abs().max() > 0.1
    assert (logits_of(merged_with(read_adapter(path))) - theirs).abs().max() > 0.1


def test_rank_and_alpha_are_those_of_a_block(folder):
    adapter = read_adapter(folder())
    assert (adapter.metadata.rank, adapter.metadata.alpha) == (2, 6)
    assert adapter.metadata.targets == ("c_attn",)
    theirs = PEFT.tensors("gpt2_blocks")
    for layer in (0, 1):
        name = C_ATTN.format(layer)
        A, B = (theirs[f"{PREFIX}{name}.lora_{ab}.weight"] for ab in "AB")
        assert torch.equal(adapter.tensors[f"{name}.lora_A"], A)
        assert torch.equal(adapter.tensors[f"{name}.lora_B"], torch.cat([B[:N, :2], B[-N:, 2:]]))


def test_a_given_alpha_is_that_of_a_block(folder, opened):
    """That is the meaning of --lora_alpha in the release's scripts."""
    path = folder()
    close(logits_of(opened(path, "--lora_alpha", "6")), PEFT.logits("gpt2_blocks"))
    with pytest.raises(CheckpointError, match="trained with alpha 6, but lora_alpha is 12"):
        opened(path, "--lora_alpha", "12")
    with pytest.raises(CheckpointError, match="trained with rank 2, but --lora_dim is 4"):
        opened(path, "--lora_dim", "4")


# ---- updates that are not made of blocks ----


def rolled(B):
    """Moves the value's block to the key's rows."""
    return torch.cat([B[:N], B[-N:], B[N:-N]])


def exchanged(B):
    """Exchanges the columns of the query's block and the value's."""
    return B.roll(2, dims=1).contiguous()


def touched(B):
    """Sets one value outside of the blocks."""
    B = B.clone()
    B[N - 1, 3] = 1e-30
    return B


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("change", [rolled, exchanged, touched])
def test_an_update_that_is_not_made_of_two_blocks_is_read_as_one(folder, opened, layer, change):
    path = folder()
    theirs = load_copied(path / WEIGHTS)
    name = f"{PREFIX}{C_ATTN.format(layer)}.lora_B.weight"
    theirs[name] = change(theirs[name])
    save_file(theirs, path / WEIGHTS)
    adapter = read_adapter(path)
    assert (adapter.metadata.rank, adapter.metadata.alpha) == (4, 12)
    for own, tensor in adapter.tensors.items():
        assert torch.equal(tensor, theirs[f"{PREFIX}{own}.weight"]), own

    expected, model = plain_model(), opened(path)
    assert not lora_layers(model)
    for index in (0, 1):
        A, B = (theirs[f"{PREFIX}{C_ATTN.format(index)}.lora_{ab}.weight"] for ab in "AB")
        expected.get_submodule(C_ATTN.format(index)).weight.data += 12 / 4 * (B @ A).T
    close(logits_of(model), logits_of(expected))
    theirs = PEFT.logits("gpt2_blocks")
    difference = (logits_of(model) - theirs).abs().max()
    assert difference < rounding(theirs, TERMS) if change is touched else difference > 0.1


@pytest.mark.parametrize(("case", "format"), NO_LAYERS)
def test_formats_refuse_updates_that_they_cannot_hold(folder, tmp_path, case, format):
    adapter, path = read_adapter(folder(case)), tmp_path / "out"
    path.mkdir()
    for target in (path, path / f"x.{'safetensors' if format == 'lora' else 'pt'}"):
        with pytest.raises(CheckpointError) as caught:
            write_adapter(target, adapter, format)
        message = str(caught.value)
        assert "\n" not in message
        assert NO_LAYERS[case, format] in message
        assert message.endswith("; merge it into its base")
        assert not list(path.iterdir())


# ---- writing: PEFT's files ----


def targeted_modules(config, names):
    """Returns the modules that PEFT adapts: target_modules are their names, or ends of these."""
    wanted = config["target_modules"]
    return {n for n in names if n in wanted or n.endswith(tuple(f".{name}" for name in wanted))}


@pytest.mark.parametrize("case", CASES)
def test_pefts_adapters_are_written_as_they_were_read(folder, tmp_path, case):
    theirs, path = PEFT.config(case), tmp_path / "out"
    adapter = read_adapter(folder(case))
    write_adapter(path, adapter, "peft")
    assert_equal(load_file(path / WEIGHTS), PEFT.tensors(case))

    ours = json.loads((path / CONFIG_NAME).read_text())
    equal = ["peft_type", "task_type", "r", "lora_dropout", "bias", "fan_in_fan_out"]
    equal += ["modules_to_save", "base_model_name_or_path", "revision"]
    equal += ["lora_alpha"]
    for name in equal:
        assert ours[name] == theirs[name], name
    for name in ("use_rslora", "use_dora"):
        assert ours.get(name, False) == theirs[name], name
    names = [name for name, _ in plain_model().named_modules()]
    adapted = {n.removeprefix(PREFIX).partition(".lora_")[0] for n in PEFT.tensors(case)}
    adapted = {name for name in adapted if not name.endswith(".bias")}
    assert targeted_modules(theirs, names) == adapted
    assert targeted_modules(ours, names) == adapted
    # Two modules of a block end in c_proj.
    if "c_proj" not in " ".join(theirs["target_modules"]):
        assert set(ours["target_modules"]) == set(theirs["target_modules"])

    again = read_adapter(path)
    assert again.metadata == adapter.metadata
    close(logits_of(merged_with(again)), PEFT.logits(case))


def test_the_user_is_told_that_two_blocks_become_one_update(folder, tmp_path):
    assert write_adapter(tmp_path / "out", read_adapter(folder()), "peft") == [
        "for PEFT, the 2 updates of rank 2 in one c_attn become one of rank 4 and alpha 12, "
        "which computes the same"
    ]
    assert write_adapter(tmp_path / "2", read_adapter(folder("gpt2_c_attn")), "peft") == []


@pytest.mark.parametrize("case", IN_BLOCKS)
def test_conversion_through_all_formats_is_bit_exact(folder, opened, tmp_path, case):
    first = read_adapter(folder(case, base_model_name_or_path="a/gpt2", revision="v1"))
    write_adapter(tmp_path / "1.safetensors", first)
    lora = read_adapter(tmp_path / "1.safetensors")
    keeps_variant = first.metadata.variant is None
    release = lora
    if keeps_variant:
        write_adapter(tmp_path / "2.pt", lora)
        release = read_adapter(tmp_path / "2.pt")
    write_adapter(tmp_path / "3", release, "peft")
    peft = read_adapter(tmp_path / "3")
    write_adapter(tmp_path / "4.safetensors", peft)
    last = read_adapter(tmp_path / "4.safetensors")
    formats = []
    for adapter in (lora, release, peft, last):
        assert_equal(adapter.tensors, first.tensors)
        assert adapter.metadata == first.metadata
        formats.append(adapter.format)
    assert formats == ["lora", "release" if keeps_variant else "lora", "peft", "lora"]
    assert_equal(load_file(tmp_path / "3" / WEIGHTS), PEFT.tensors(case))
    for path in ("1.safetensors", *(["2.pt"] if keeps_variant else []), "3", "4.safetensors"):
        close(logits_of(opened(tmp_path / path)), PEFT.logits(case))


@pytest.mark.parametrize(("rank", "alpha"), [(3, 0.1), (6, 0.7), (2, 0.3), (4, 32), (5, 1 / 3)])
def test_alpha_is_bit_exact_after_a_round_trip(folder, tmp_path, rank, alpha):
    adapter = read_adapter(folder())
    tensors = {
        name: torch.ones((2 * rank, N) if name.endswith("lora_A") else (2 * N, rank))
        for name in adapter.tensors
    }
    info = replace(adapter.metadata, rank=rank, alpha=alpha)
    write_adapter(tmp_path / "out", replace(adapter, tensors=tensors, metadata=info), "peft")
    again = read_adapter(tmp_path / "out")
    assert again.metadata == info
    assert_equal(again.tensors, tensors)


def test_blocks_next_to_other_updates(folder, tmp_path):
    """A block of c_attn has half of the rank that PEFT records, an update of c_proj all of it."""
    path = folder()
    theirs = load_copied(path / WEIGHTS) | PEFT.tensors("gpt2_attention_output")
    save_file(theirs, path / WEIGHTS)
    metadata = read_adapter(path).metadata
    for layer in (0, 1):
        for name, strength in ((C_ATTN, (2, 6)), ("transformer.h.{}.attn.c_proj", (4, 12))):
            module = name.format(layer)
            assert (metadata.rank_of(module), metadata.alpha_of(module)) == strength
    adapter = read_adapter(path)
    write_adapter(tmp_path / "out", adapter, "peft")
    assert_equal(load_file(tmp_path / "out" / WEIGHTS), theirs)
    assert read_adapter(tmp_path / "out").metadata == metadata
    both = merged_with(adapter)
    one = merged_with(read_adapter(PEFT.write_adapter(tmp_path / "one", "gpt2_blocks")))
    for layer in (0, 1):
        name = C_ATTN.format(layer)
        assert torch.equal(both.get_submodule(name).weight, one.get_submodule(name).weight)


# ---- other adapters ----


def test_an_embeddings_update(folder, tmp_path):
    path = folder()
    tensors = load_copied(path / WEIGHTS)
    A, B = torch.arange(4.0 * 48).view(4, 48) / 100, torch.arange(4.0 * N).view(N, 4) / 100
    tensors[f"{PREFIX}transformer.wte.lora_embedding_A"] = A
    tensors[f"{PREFIX}transformer.wte.lora_embedding_B"] = B
    save_file(tensors, path / WEIGHTS)
    adapter = read_adapter(path)
    assert adapter.metadata.embeddings == ("transformer.wte",)
    merged = merged_with(adapter).get_submodule("transformer.wte").weight
    close(merged, plain_model().get_submodule("transformer.wte").weight + 3 * (B @ A).t())
    write_adapter(tmp_path / "out", adapter, "peft")
    assert_equal(load_file(tmp_path / "out" / WEIGHTS), tensors)


def test_an_adapter_for_another_size_is_refused(folder, opened):
    path = folder()
    tensors = {name: tensor[:, :16] for name, tensor in load_copied(path / WEIGHTS).items()}
    wide = {
        n: t.contiguous() if "lora_A" in n else PEFT.tensors("gpt2_blocks")[n]
        for n, t in tensors.items()
    }
    save_file(wide, path / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"lora_A is \(4, 16\) in the file, \(4, 32\) in the"):
        opened(path)


def test_an_odd_rank_is_not_read_as_two_blocks(folder):
    """Blocks have half of the rank each, so rank 3 cannot be two of them, whatever B holds."""
    path = folder(r=3)
    tensors = load_copied(path / WEIGHTS)
    for name, tensor in tensors.items():
        part = tensor[:3] if "lora_A" in name else tensor[:, :3]
        tensors[name] = part.contiguous()
    save_file(tensors, path / WEIGHTS)
    adapter = read_adapter(path)
    assert adapter.metadata.rank == 3
    for own, tensor in adapter.tensors.items():
        assert torch.equal(tensor, tensors[f"{PREFIX}{own}.weight"])
