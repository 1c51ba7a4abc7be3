"""Tests of drawing a run's learning curves."""

import subprocess
import sys

import pytest
from paths import ROOT

from loralib.training import curves
from loralib.training.curves import CURVES_NAME, Place, collect, write_curves

PLACES = {
    "loss": Place("loss", "training"),
    "eval_loss": Place("loss", "evaluation"),
    "score": Place("score", "score"),
}
RECORDS = [
    {"step": 2, "loss": 3.0, "epoch": 0.5},
    {"step": 4, "loss": 2.0},
    {"step": 4, "eval_loss": 2.5, "score": 0.5},
    {"step": 4, "eval_loss": 9.0, "score": 0.1},
    {"step": 6, "score": "none"},
]


def test_lines_are_collected_by_panel():
    """If a step has several values, the first counts."""
    assert collect(RECORDS, PLACES.get) == {
        "loss": {"training": {2: 3.0, 4: 2.0}, "evaluation": {4: 2.5}},
        "score": {"score": {4: 0.5}},
    }


def test_a_picture_is_written_and_replaced(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / CURVES_NAME).write_text("an old one")
    path = write_curves(tmp_path, RECORDS, PLACES.get)
    assert path == tmp_path / CURVES_NAME
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert [file.name for file in tmp_path.iterdir()] == [CURVES_NAME]


def test_each_panel_has_its_lines_and_a_legend_for_several():
    pytest.importorskip("matplotlib")
    figure = curves._draw(collect(RECORDS, PLACES.get))
    first, second = figure.axes
    assert (first.get_title(), second.get_title()) == ("loss", "score")
    assert {line.get_label(): list(line.get_xdata()) for line in first.lines} == {
        "training": [2, 4],
        "evaluation": [4],
    }
    assert [text.get_text() for text in first.get_legend().get_texts()] == [
        "training",
        "evaluation",
    ]
    assert second.get_legend() is None  # the title names its line
    assert first.get_xlim() == second.get_xlim() == (0, 1.03 * 4)


@pytest.mark.parametrize("names", ["a", "abcd"], ids=["one panel", "two rows"])
def test_every_panel_is_drawn(names):
    pytest.importorskip("matplotlib")
    figure = curves._draw({name: {name: {1: 0.5}} for name in names})
    assert [panel.get_title() for panel in figure.axes if panel.axison] == list(names)


def test_without_values_no_picture_is_written(tmp_path):
    assert write_curves(tmp_path, [{"step": 1, "epoch": 1.0}], PLACES.get) is None
    assert not any(tmp_path.iterdir())


def test_a_picture_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    pytest.importorskip("matplotlib")
    (tmp_path / CURVES_NAME).mkdir()
    assert write_curves(tmp_path, RECORDS, PLACES.get) is None
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path / CURVES_NAME} is not written: ")


@pytest.mark.slow
def test_matplotlib_is_imported_only_to_draw():
    code = "import sys; import loralib.training.curves as c; c.is_matplotlib_available(); "
    code += "c.write_curves('.', [], dict().get); sys.exit('matplotlib.figure' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
