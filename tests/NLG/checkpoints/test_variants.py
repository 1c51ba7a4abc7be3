"""Tests LoRA's variants, initializations, and ranks and alphas by layer, in GPT-2 and its files."""

import json
import math
import re

import pytest
import torch
from compare import assert_close_to_rounding, assert_same_bits
from gpt2_files import BLOCKS, POSITIONS, VOCABULARY, WIDTH, parameters, parse, refuses

import checkpoints
import lora_flags
import loralib as lora
from checkpoints import open_model, save_model
from family import TARGETS, enabled_slices
from loralib.adapters.formats import read_adapter, write_adapter
from loralib.adapters.merging import merge_into
from loralib.errors import NeedsMergingError
from loralib.lora_layer import lora_layers
from model import GPT2LMModel
from weights import own_tensors

pytestmark = pytest.mark.slow

DEFAULT, ALL = ("query", "value"), tuple(TARGETS)
SETTINGS = {
    "lora": "",
    "rslora": "--lora_variant rslora",
    "dora": "--lora_variant dora",
    "rslora+dora": "--lora_variant rslora+dora",
    "pissa": "--lora_init pissa",
    "olora": "--lora_init olora",
    "orthogonal": "--lora_init orthogonal",
    "frozen A": "--lora_freeze_A",
    "patterns": "--lora_rank_pattern h.1.attn.c_attn=4 --lora_alpha_pattern h.0.*=9",
    "several": (
        "--lora_variant rslora+dora --lora_init pissa --lora_freeze_A"
        " --lora_rank_pattern h.0.*=1 --lora_alpha_pattern c_attn=0.5"
    ),
}
# A block's linear layers -> the size of a slice of the output.
LAYERS = {"attn.c_attn": WIDTH, "attn.c_proj": WIDTH, "mlp.c_fc": 4 * WIDTH, "mlp.c_proj": WIDTH}
# How many additions follow one another: in each block, three products over WIDTH terms and one over
# 4 WIDTH, and attention; in the head, one over WIDTH.
TERMS = BLOCKS * (3 * WIDTH + 4 * WIDTH + 4 + POSITIONS) + WIDTH
RANK, ALPHA = 2, 6
IDS = torch.arange(3 * POSITIONS).view(3, POSITIONS) % VOCABULARY

by_setting = pytest.mark.parametrize("setting", SETTINGS)
by_targets = pytest.mark.parametrize("targets", [DEFAULT, ALL], ids=["default", "all"])


@pytest.fixture
def open_with(base_path):
    """``open_with(setting, targets)``: a model with new LoRA, its base, and the flags."""

    def opened(setting, targets=DEFAULT, *more):
        flags = ("--lora_dim", RANK, "--lora_alpha", ALPHA, "--lora_targets", *targets)
        args = parse("--init_checkpoint", base_path, *flags, *SETTINGS[setting].split(), *more)
        torch.manual_seed(6)
        return *open_model(args, lora_dropout=0.0), args

    return opened


@pytest.fixture
def trained_with(open_with):
    """``trained_with(setting, targets)``: the same after steps that change all that is trained."""

    def trained(setting, targets=DEFAULT):
        model, base, _ = open_with(setting, targets)
        lora.mark_only_lora_as_trainable(model.train())
        for _ in range(3):
            model(IDS, IDS.roll(-1, 1), torch.ones(IDS.shape)).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad.clamp(-0.1, 0.1))
                        parameter.grad = None
        return model.eval(), base

    return trained


@torch.no_grad()
def logits_of(model):
    return model.eval()(IDS)


def plain_of(model, setting, targets):
    """Returns the base in float64, with each slice adapted by the papers' formulas."""
    weights = {name: tensor.double() for name, tensor in own_tensors(model).items()}
    for block in range(BLOCKS):
        for layer, width in LAYERS.items():
            name = f"transformer.h.{block}.{layer}"
            enabled = [index for index, on in enumerate(enabled_slices(targets, layer)) if on]
            for place, index in enumerate(enabled):
                columns = slice(index * width, (index + 1) * width)
                part = weights[f"{name}.weight"][:, columns].T
                adapted = _adapted(part, weights, name, place, width, SETTINGS[setting])
                weights[f"{name}.weight"][:, columns] = adapted.T
    plain = GPT2LMModel(checkpoints.config_of("gpt2.md")).double()
    plain.load_state_dict(
        {n: t for n, t in weights.items() if "lora_" not in n}
        | {"lm_head.decoder.weight": weights["transformer.wte.weight"]}
    )
    return plain


def _adapted(W, weights, name, place, width, flags):
    """Returns a slice's W, (width, in), with its update."""
    rank = weights[f"{name}.lora_B"].shape[1]
    rows, outputs = (slice(place * n, (place + 1) * n) for n in (rank, width))
    product = weights[f"{name}.lora_B"][outputs] @ weights[f"{name}.lora_A"][rows]
    if f"{name}.lora_A_start" in weights:
        A, B = (weights[f"{name}.lora_{half}_start"] for half in "AB")
        product = product - B[outputs] @ A[rows]
    alpha = _alpha(name, flags)
    total = W + alpha / (math.sqrt(rank) if "rslora" in flags else rank) * product
    if "dora" in flags:
        m = weights[f"{name}.lora_magnitude_vector"][outputs]
        total = m[:, None] * total / total.norm(dim=1, keepdim=True)
    return total


def _alpha(name, flags):
    if "--lora_alpha_pattern h.0.*=9" in flags and ".h.0." in name:
        return 9
    if "--lora_alpha_pattern c_attn=0.5" in flags and name.endswith("c_attn"):
        return 0.5
    return ALPHA


def close(ours, theirs):
    assert_close_to_rounding(ours, theirs.float(), TERMS)


# ---- what is computed ----


@by_setting
@by_targets
def test_new_lora_computes_the_bases_logits(open_with, base_path, setting, targets):
    model, _, _ = open_with(setting, targets)
    plain, _ = open_model(parse("--init_checkpoint", base_path))
    base = {name: t for name, t in parameters(model).items() if "lora_" not in name}
    assert_same_bits(base, parameters(plain))
    close(logits_of(model), logits_of(plain))


@by_setting
@by_targets
def test_trained_lora_follows_the_formulas(trained_with, base_path, setting, targets):
    model, _ = trained_with(setting, targets)
    expected = plain_of(model, setting, targets)
    close(logits_of(model), expected(IDS))
    plain, _ = open_model(parse("--init_checkpoint", base_path))
    assert (logits_of(plain) - logits_of(model)).abs().max() > 0.1
    merged = lora.merge(model)
    close(logits_of(merged), expected(IDS))
    for name, weight in expected.named_parameters():
        module = merged.get_submodule(name.rpartition(".")[0])
        is_transposed = isinstance(module, torch.nn.Linear) and weight.dim() == 2
        ours = merged.get_parameter(name).T if is_transposed else merged.get_parameter(name)
        # A row's norm is a sum over all inputs, and of the product's terms.
        assert_close_to_rounding(ours, weight.float(), 4 * WIDTH + 4 * RANK)


def test_settings_reach_the_layers(open_with):
    model, _, _ = open_with("several", ALL)
    for name, layer in lora_layers(model).items():
        assert (layer.variant, layer.initialization) == ("rslora+dora", "pissa")
        assert layer.r == (1 if ".h.0." in name else RANK)
        assert layer.lora_alpha == (0.5 if name.endswith("c_attn") else ALPHA)
        assert not layer.lora_A.requires_grad


def test_patterns_may_name_targets(open_with):
    more = ("--lora_rank_pattern", "mlp_down=1", "h.1.mlp.*=3", "mlp.c_fc=4")
    model, _, _ = open_with("lora", ALL, *more)
    layers = lora_layers(model).items()
    ranks = {name.removeprefix("transformer.h."): layer.r for name, layer in layers}
    assert ranks == {
        **{f"{block}.{layer}": 2 for block in (0, 1) for layer in ("attn.c_attn", "attn.c_proj")},
        **{"0.mlp.c_fc": 4, "1.mlp.c_fc": 3, "0.mlp.c_proj": 1, "1.mlp.c_proj": 1},
    }


@by_setting
def test_which_tensors_are_trained(open_with, trained_with, setting):
    before, _, _ = open_with(setting, ALL)
    after, _ = trained_with(setting, ALL)
    old, new = own_tensors(before), own_tensors(after)
    changed = {name.rpartition(".")[2] for name in old if not torch.equal(old[name], new[name])}
    expected = {"lora_A", "lora_B"}
    if "freeze_A" in SETTINGS[setting]:
        expected -= {"lora_A"}
    if "dora" in SETTINGS[setting]:
        expected |= {"lora_magnitude_vector"}
    assert changed == expected


# ---- files ----


@by_setting
@by_targets
@pytest.mark.parametrize("lora_only", [True, False])
def test_a_saved_model_is_opened_bit_exact(
    trained_with, open_with, base_path, tmp_path, setting, targets, lora_only
):
    model, base = trained_with(setting, targets)
    path = tmp_path / "model.9.pt"
    save_model(path, model, base, lora_only)
    args = parse("--init_checkpoint", base_path if lora_only else path)
    again, _ = open_model(args, str(path) if lora_only else None)
    assert_same_bits(own_tensors(again), own_tensors(model))
    assert_same_bits({"logits": logits_of(again)}, {"logits": logits_of(model)})
    # The flags are what they were in training.
    asked = open_with(setting, targets)[2]
    for flag in lora_flags.FLAGS:
        assert getattr(args, flag) == getattr(asked, flag)
    assert again.config == model.config


@by_setting
@by_targets
def test_the_lora_format_is_bit_exact(trained_with, base_path, tmp_path, setting, targets):
    model, base = trained_with(setting, targets)
    save_model(tmp_path / "model.9.pt", model, base, lora_only=True)
    adapter = read_adapter(tmp_path / "model.9.pt")
    write_adapter(tmp_path / "out.safetensors", adapter)
    again = read_adapter(tmp_path / "out.safetensors")
    assert_same_bits(again.tensors, adapter.tensors)
    assert again.metadata == adapter.metadata
    opened, _ = open_model(parse("--init_checkpoint", base_path), str(tmp_path / "out.safetensors"))
    assert_same_bits(own_tensors(opened), own_tensors(model))


@by_setting
@by_targets
def test_merging_a_file_into_the_base_follows_the_formulas(
    trained_with, base_path, tmp_path, setting, targets
):
    model, base = trained_with(setting, targets)
    save_model(tmp_path / "model.9.pt", model, base, lora_only=True)
    plain, _ = open_model(parse("--init_checkpoint", base_path))
    merge_into(plain, read_adapter(tmp_path / "model.9.pt"))
    close(logits_of(plain), plain_of(model, setting, targets)(IDS))


@by_setting
@by_targets
def test_pefts_format_computes_the_same(trained_with, base_path, tmp_path, setting, targets):
    model, base = trained_with(setting, targets)
    save_model(tmp_path / "model.9.pt", model, base, lora_only=True)
    adapter = read_adapter(tmp_path / "model.9.pt")
    if "dora" in SETTINGS[setting]:
        # There are magnitudes for rows of the slices only, and PEFT needs one for each row.
        message = r"transformer\.h\.0\.attn\.c_attn has DoRA's magnitudes for slices"
        with pytest.raises(NeedsMergingError, match=message):
            write_adapter(tmp_path / "out", adapter, "peft")
        return
    write_adapter(tmp_path / "out", adapter, "peft")
    again, _ = open_model(parse("--init_checkpoint", base_path), str(tmp_path / "out"))
    close(logits_of(again), logits_of(model))


def test_pefts_format_holds_dora_on_whole_layers(trained_with, base_path, tmp_path):
    model, base = trained_with("dora", ("attention_output", "mlp_up", "mlp_down"))
    save_model(tmp_path / "model.9.pt", model, base, lora_only=True)
    write_adapter(tmp_path / "out", read_adapter(tmp_path / "model.9.pt"), "peft")
    again, _ = open_model(parse("--init_checkpoint", base_path), str(tmp_path / "out"))
    assert_same_bits(own_tensors(again), own_tensors(model))


@pytest.mark.parametrize(
    ("setting", "message"),
    {
        "rslora": "variant rslora",
        "dora": "variant dora",
        "pissa": "initialization pissa",
        "olora": "initialization olora",
        "patterns": "rank_pattern",
        "several": "variant rslora",
    }.items(),
)
def test_settings_that_the_releases_format_cannot_hold(trained_with, tmp_path, setting, message):
    save_model(tmp_path / "model.9.pt", *trained_with(setting), lora_only=True)
    adapter = read_adapter(tmp_path / "model.9.pt")
    with pytest.raises(NeedsMergingError) as caught:
        write_adapter(tmp_path / "release.pt", adapter, "release")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "release.pt").exists()


@pytest.mark.parametrize("setting", ["lora", "orthogonal", "frozen A"])
def test_settings_that_the_releases_format_can_hold(trained_with, tmp_path, setting):
    save_model(tmp_path / "model.9.pt", *trained_with(setting), lora_only=True)
    adapter = read_adapter(tmp_path / "model.9.pt")
    write_adapter(tmp_path / "release.pt", adapter, "release")
    assert_same_bits(read_adapter(tmp_path / "release.pt").tensors, adapter.tensors)


def test_metadata_records_the_settings(trained_with, tmp_path):
    save_model(tmp_path / "model.9.pt", *trained_with("several"), lora_only=True)
    content = torch.load(tmp_path / "model.9.pt", weights_only=True)["metadata"]
    recorded = {name: json.loads(text) for name, text in content.items()}
    c_attn = "transformer.h.{}.attn.c_attn"
    assert recorded["variant"] == "rslora+dora"
    assert (recorded["initialization"], recorded["freeze_A"]) == ("pissa", True)
    assert (recorded["rank"], recorded["rank_pattern"]) == (RANK, {c_attn.format(0): 1})
    assert recorded["alpha_pattern"] == {c_attn.format(0): 0.5, c_attn.format(1): 0.5}


# ---- refused ----


@pytest.mark.parametrize(
    ("setting", "flags", "message"),
    [
        ("dora", "--lora_variant lora", "trained with variant dora, but --lora_variant is lora"),
        ("lora", "--lora_variant dora", "trained with variant lora, but --lora_variant is dora"),
        ("pissa", "--lora_init olora", "initialization pissa, but --lora_init is olora"),
        ("lora", "--lora_freeze_A", "with freeze_A False, but --lora_freeze_A is True"),
        (
            "patterns",
            "--lora_rank_pattern h.0.*=4",
            "c_attn, but --lora_rank_pattern says 4: leave --lora_rank_pattern out",
        ),
        (
            "lora",
            "--lora_alpha_pattern c_attn=1",
            "with alpha 6 in transformer.h.0.attn.c_attn, but --lora_alpha_pattern says 1",
        ),
    ],
)
def test_flags_that_contradict_the_file(trained_with, tmp_path, setting, flags, message):
    path = tmp_path / "model.9.pt"
    save_model(path, *trained_with(setting), lora_only=False)
    refuses([f"{path}: was ", message], ("--init_checkpoint", path, *flags.split()))
    open_model(parse("--init_checkpoint", path, *SETTINGS[setting].split()))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lora_dim 9", "the rank of transformer.h.0.attn.c_attn, 9, is larger than n_embd, 8"),
        ("--lora_rank_pattern h.1.*=9", "the rank of transformer.h.1.attn.c_attn, 9, is larger"),
        ("--lora_rank_pattern c_attn=0", "the rank 0 of transformer.h.0.attn.c_attn has to be ab"),
        ("--lora_alpha_pattern c_attn=-1", "the alpha -1.0 of transformer.h.0.attn.c_attn has to"),
        ("--lora_alpha_pattern c_attn=nan", "lora_alpha_pattern must be a map of numbers by str"),
        ("--lora_rank_pattern mlp_up=4", "the pattern 'mlp.c_fc' matches none of the adapted mod"),
        ("--lora_rank_pattern query=4", "query shares its rank and alpha with all of attn.c_attn"),
        ("--lora_rank_pattern c_attn", "--lora_rank_pattern: 'c_attn' is not a target, '=' and an"),
        ("--lora_rank_pattern c_attn=x", "--lora_rank_pattern: 'c_attn=x' is not a target, '=' a"),
        ("--lora_rank_pattern c_attn=2.5", "'c_attn=2.5' is not a target, '=' and an integer"),
        ("--lora_rank_pattern c_attn=1 c_attn=2", "--lora_rank_pattern: names 'c_attn' twice"),
        ("--lora_dim 3 --lora_init orthogonal", "r has to be even for the orthogonal"),
    ],
)
def test_invalid_flags_are_refused(base_path, flags, message):
    usual = ("--init_checkpoint", base_path, "--lora_dim", RANK)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        open_model(parse(*usual, *flags.split()))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        "--lora_variant dora",
        "--lora_init pissa",
        "--lora_freeze_A",
        "--lora_rank_pattern mlp_up=4",
        "--lora_alpha_pattern mlp_up=4",
    ],
)
def test_flags_that_need_lora(base_path, flags):
    with pytest.raises(ValueError, match=f"^{flags.split()[0]} needs LoRA: add --lora_dim$"):
        open_model(parse("--init_checkpoint", base_path, *flags.split()))


@pytest.mark.parametrize("flag", ["--lora_variant", "--lora_init"])
def test_unknown_names_are_refused(capsys, flag):
    with pytest.raises(SystemExit):
        parse(flag, "other")
    assert "invalid choice: 'other'" in capsys.readouterr().err


def test_a_file_without_its_magnitudes(trained_with, base_path, tmp_path):
    path = tmp_path / "model.9.pt"
    save_model(path, *trained_with("dora"), lora_only=True)
    content = torch.load(path, weights_only=True)
    del content["model_state_dict"]["module.transformer.h.1.attn.c_attn.lora_magnitude_vector"]
    torch.save(content, path)
    message = "lacks transformer.h.1.attn.c_attn.lora_magnitude_vector"
    refuses([f"{path}: ", message], ("--init_checkpoint", base_path), path)
