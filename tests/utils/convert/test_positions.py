"""Tests convert.py on DeBERTa's adapters: LoRA on contents only, or on positions as well."""

import json

import pytest
import torch
from compare import assert_close_to_rounding
from conversions import OUT, SHAPE
from encoder_options import ENCODER_TERMS, RELATIVE

from loralib.adapters.formats import read_adapter, write_adapter
from loralib.training import process
from transformers import DebertaV2Config, DebertaV2ForSequenceClassification, DebertaV2Model

IDS = torch.randint(5, 40, (3, 9), generator=torch.Generator().manual_seed(1))


def make_base(folder, **settings):
    torch.manual_seed(0)
    DebertaV2Model(DebertaV2Config(**{**SHAPE, **RELATIVE, **settings})).save_pretrained(folder)
    return folder


@torch.no_grad()
def make_adapter(base, path, **settings):
    """Writes an adapter of a base; returns the logits of both."""
    torch.manual_seed(8)
    model = DebertaV2ForSequenceClassification.from_pretrained(
        base, apply_lora=True, lora_r=2, lora_alpha=6, num_labels=3, **settings
    )
    for name, parameter in model.named_parameters():
        if "lora_" in name or not name.startswith("deberta."):
            parameter.add_(torch.randn(parameter.shape), alpha=0.5)
    write_adapter(path, model.adapter())
    return model(IDS).logits


@pytest.fixture
def base(tmp_path):
    return make_base(tmp_path / "base")


@pytest.fixture
def convert(script, tmp_path):
    """``convert(format, *flags)``: converts in.safetensors, and returns the written path."""

    def run(format, *flags, source="in.safetensors"):
        target = tmp_path / OUT[format]
        script.main([str(tmp_path / source), str(target), "--to", format, *map(str, flags)])
        return target

    return run


@pytest.fixture
def refusal(convert, tmp_path):
    """``refusal(format, *flags)``: the one line with which a conversion is refused."""

    def run(format, *flags, **source):
        lines = []
        with pytest.raises(SystemExit):
            process.run(lambda: convert(format, *flags, **source), lines.append)
        (line,) = lines
        assert "\n" not in line
        assert not (tmp_path / OUT[format]).exists()
        return line

    return run


@pytest.mark.parametrize("reached", [False, True], ids=["contents", "positions"])
@pytest.mark.parametrize("targets", [["query", "value"], ["query", "key"]], ids="+".join)
def test_a_merged_model_computes_the_same(convert, base, tmp_path, reached, targets):
    settings = {"lora_positions": reached, "lora_targets": targets}
    expected = make_adapter(base, tmp_path / "in.safetensors", **settings)
    merged = convert("merged", "--base", base)
    model = DebertaV2ForSequenceClassification.from_pretrained(merged)
    assert not model.adapted_by
    with torch.no_grad():
        assert_close_to_rounding(model(IDS).logits, expected, ENCODER_TERMS)
    settings = json.loads((merged / "config.json").read_text())
    assert settings["share_att_key"] is reached
    assert "lora_positions" not in settings


@pytest.mark.parametrize("base_is_given", [True, False])
def test_pefts_format_cannot_hold_lora_on_contents_only(
    refusal, convert, base, tmp_path, base_is_given
):
    make_adapter(base, tmp_path / "in.safetensors")
    flags = ["--base", base] if base_is_given else []
    line = refusal("peft", *flags)
    assert "does not reach positions, as in the release" in line
    assert "--to merged" in line
    assert read_adapter(convert("release", *flags), lora_alpha=6).metadata.positions is False
    assert "does not reach positions" in refusal("peft", "--lora_alpha", 6, source="out.bin")


@pytest.mark.parametrize("base_is_given", [True, False])
def test_the_releases_format_cannot_hold_lora_on_positions(
    refusal, convert, base, tmp_path, base_is_given
):
    make_adapter(base, tmp_path / "in.safetensors", lora_positions=True)
    flags = ["--base", base] if base_is_given else []
    line = refusal("release", *flags)
    assert "reaches positions" in line
    assert "--to merged" in line
    assert read_adapter(convert("peft", *flags)).metadata.positions is True


@pytest.mark.parametrize("settings", [{"share_att_key": False}, {"pos_att_type": None}], ids=str)
def test_without_shared_projections_all_formats_fit(convert, tmp_path, settings):
    base = make_base(tmp_path / "base", **settings)
    make_adapter(base, tmp_path / "in.safetensors")
    release = convert("release")
    peft = convert("peft", "--lora_alpha", 6, "--base", base, source=release.name)
    again = convert("lora", "--base", base, source=peft.name)
    assert read_adapter(again).metadata.positions is None


def test_info_says_whether_lora_reaches_positions(script, base, tmp_path, capsys):
    for reached, expected in ((False, "not updated by LoRA"), (True, "updated by LoRA")):
        make_adapter(base, tmp_path / "in.safetensors", lora_positions=reached)
        script.main([str(tmp_path / "in.safetensors"), "--info"])
        (line,) = (n for n in capsys.readouterr().out.splitlines() if "positions" in n)
        assert line.split(maxsplit=1)[1].startswith(expected)
