"""Tests of writing pictures: Matplotlib is optional, and the same figure gives the same bytes."""

import sys

import pytest
from PIL import Image

from loralib.io.pictures import check_can_save, import_figure, save_figure


def figure():
    drawn = import_figure()(figsize=(2, 1))
    drawn.subplots().plot([1, 2], [3, 4], label="a line")
    return drawn


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for ask in (import_figure, lambda: check_can_save(tmp_path / "a.png")):
        with pytest.raises(ValueError, match=r"^the picture needs matplotlib: pip install matpl"):
            ask()


def test_a_picture_that_could_not_be_written_is_refused_beforehand(tmp_path):
    with pytest.raises(ValueError, match=r"a\.jpeg: unknown format of a picture; .* \.png, "):
        check_can_save(tmp_path / "a.jpeg")
    with pytest.raises(FileNotFoundError, match=r"nowhere/a\.png: there is no folder"):
        check_can_save(tmp_path / "nowhere" / "a.png")
    check_can_save(tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_the_same_figure_makes_the_same_bytes(tmp_path, suffix):
    first, second = (tmp_path / f"{name}{suffix}" for name in ("first", "second"))
    save_figure(figure(), first)
    save_figure(figure(), second)
    assert first.read_bytes() == second.read_bytes()
    assert (
        b"matplotlib" not in first.read_bytes().lower() or suffix == ".svg"
    )  # which names it in a comment


def test_a_png_keeps_its_description(tmp_path):
    path = tmp_path / "a.png"
    save_figure(figure(), path, dpi=50, description="two points")
    with Image.open(path) as image:
        assert image.size == (100, 50)
        assert image.text == {"Description": "two points"}
