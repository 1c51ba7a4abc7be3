"""Tests that the documentation's pictures match the repository's scripts and tables."""

import json
import re
from xml.etree import ElementTree

import pytest
from paths import ROOT
from PIL import Image

import draw_pictures
from pictures import low_rank_update, speed

PAGE = speed.README.read_text(encoding="utf-8")
FOLDER = ROOT / "docs" / "pictures"


def test_the_drawing_in_the_documentation_is_current():
    assert (FOLDER / "lora.svg").read_text(encoding="utf-8") == low_rank_update.draw()


def test_the_drawing_has_all_labels_within_its_frame():
    svg = "{http://www.w3.org/2000/svg}"
    root = ElementTree.fromstring(low_rank_update.draw())
    lines = ["".join(text.itertext()) for text in root.iter(f"{svg}text")]
    for word in ("x", "W0", "A", "B", "h", "r × in", "out × r", "out × in", "× α / r"):  # noqa: RUF001
        assert word in lines
    assert " ".join(lines[-1].split()) == "h = W0 x + α / r · B A x"  # noqa: RUF001
    _, _, width, height = map(float, root.get("viewBox").split())
    for text in root.iter(f"{svg}text"):
        assert 0 < float(text.get("x")) < width
        assert 0 < float(text.get("y")) < height


def test_the_speeds_in_the_documentation_are_current():
    with Image.open(FOLDER / "speed.png") as image:
        shown = json.loads(image.text["Description"])
    assert shown == json.loads(speed.read_speeds(PAGE).as_text()), (
        "the tables have changed: python utils/draw_pictures.py speed"
    )


def test_speeds_are_read_from_their_sections():
    speeds = speed.read_speeds(PAGE)
    assert [set(of_work) for of_work in speeds.ratios.values()] == [{"float32", "bfloat16"}] * 4
    # The tables have three ways to train RoBERTa with PEFT in bfloat16; the fastest one counts.
    section = PAGE.split("\n## A LoRA step of RoBERTa-base\n")[1]
    figures = section.split("\n### Figures\n")[1].split("\n##")[0]
    rows = re.findall(r"^\| PEFT \| bfloat16.*? \| [\d.]+ \| ([\d.]+) \|", figures, re.M)
    assert len(rows) == 3
    assert speeds.ratios[speed.WORKS[0].name]["bfloat16"] == min(map(float, rows))
    assert re.fullmatch(r"\d+ cores of .+", speeds.machine)


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ("## Beam search of GPT-2 small\n", "the section 'Beam search of GPT-2 small'"),
        (r"\| PEFT \| float32", "A LoRA step of RoBERTa-base: no row of 'PEFT' in float32"),
        (r"On \d+ cores of", "A LoRA step of RoBERTa-base: the machine"),
        (r"\d{1,2} [A-Z][a-z]+ \d{4}", "A LoRA step of RoBERTa-base: a day"),
    ],
)
def test_missing_parts_of_the_tables_are_named(removed, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        speed.read_speeds(re.sub(removed, "", PAGE))


def test_a_bar_is_as_long_as_its_ratio():
    speeds = speed.Speeds(
        {"one": {"float32": 2.0, "bfloat16": 3.0}, "two": {"float32": 0.5, "bfloat16": 1.5}},
        "a machine",
        ["1 May 2026"],
    )
    (panel,) = speed.draw(speeds).axes
    floats, halves = panel.containers
    assert [bar.get_width() for bar in floats] == [2.0, 0.5]
    assert [bar.get_width() for bar in halves] == [3.0, 1.5]
    for one, two in zip(floats, halves, strict=True):
        assert one.get_y() + one.get_height() <= two.get_y()


def test_the_command_draws_what_is_asked_for(tmp_path, capsys):
    draw_pictures.main(["speed", "lora", "speed", "--output_dir", str(tmp_path)])
    paths = [tmp_path / "speed.png", tmp_path / "lora.svg"]
    assert capsys.readouterr().out.splitlines() == [str(path) for path in paths]
    assert all(path.stat().st_size > 1000 for path in paths)
