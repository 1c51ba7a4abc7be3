"""Tests of console output: tables, colors, words, and messages."""

import io
import logging
import subprocess
import sys

import pytest
from paths import ROOT
from tqdm.auto import tqdm

from loralib.io import console
from loralib.io.console import (
    ConsoleHandler,
    Pace,
    devices_in_words,
    has_colors,
    in_words,
    painted,
    say,
    share_in_words,
    steps_in_words,
    table,
    training_in_words,
)
from loralib.text import counted


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


# ---- tables ----


def test_values_of_a_table_are_aligned():
    assert table([("a", "1"), ("long name", "2 3")], indent="  ").splitlines() == [
        "  a          1",
        "  long name  2 3",
    ]


def test_groups_are_aligned_together():
    lines = table([("a", "1")], [("title", ""), ("longer", "2")], width=4).splitlines()
    assert lines == ["a       1", "", "title", "longer  2"]
    assert table([("a", "1")], width=4) == "a     1"


def test_a_table_can_be_empty():
    assert table() == table([]) == ""


# ---- colors ----


def test_a_closed_stream_has_no_colors(terminal):
    assert not has_colors(None)
    assert painted("text", "bold", None) == "text"


def test_only_terminals_have_colors_unless_no_color_is_set(terminal, monkeypatch):
    assert has_colors(terminal)
    assert painted("x", "red", terminal) == "\033[31mx\033[0m"
    assert not has_colors(io.StringIO())
    assert painted("x", "red", io.StringIO()) == "x"
    monkeypatch.setenv("NO_COLOR", "")  # counts as not set
    assert has_colors(terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_colors(terminal)


@pytest.mark.parametrize("kind", ["dumb", None])
def test_a_dumb_terminal_has_no_colors(terminal, monkeypatch, kind):
    if kind is None:
        monkeypatch.delenv("TERM")
    else:
        monkeypatch.setenv("TERM", kind)
    assert not has_colors(terminal)


def test_a_table_in_colors_is_aligned_like_a_plain_one(terminal):
    rows = [("a", "1"), ("long", "2")]
    colored = table(rows, stream=terminal)
    assert "\033[36m" in colored
    plain = colored.replace("\033[36m", "").replace("\033[0m", "")
    assert plain == table(rows) == table(rows, stream=io.StringIO())


# ---- words ----


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0123, "0.0123 s"),
        (59, "59 s"),
        (60, "1 min 0 s"),
        (200.7, "3 min 20 s"),
        (3600 * 5 + 61, "5 h 1 min"),
        (86400 * 12 + 3600 * 3.9, "12 d 3 h"),
        (86400 * 4000, "4,000 d 0 h"),
    ],
)
def test_in_words_formats_a_time(seconds, words):
    assert in_words(seconds) == words


def test_shares_counts_and_devices_are_formatted():
    assert share_in_words(1000, 4000) == "1,000 of 4,000 (25.00 %)"
    assert share_in_words(0, 0) == "0 of 0 (0.00 %)"
    assert [counted(n, "step") for n in (0, 1, 2000)] == ["0 steps", "1 step", "2,000 steps"]
    assert [counted(n, "epoch") for n in (1.0, 2.5)] == ["1 epoch", "2.5 epochs"]
    assert steps_in_words(2000, 4) == "2,000 of 4 examples each"
    assert steps_in_words(1, 1) == "1 of 1 example"
    assert training_in_words(1, 0, 4) == "1 step in 4 s"
    assert training_in_words(1000, 997, 4) == "1,000 steps, the last 3 in 4 s"
    assert training_in_words(10, 10, 4) == "10 steps, all before this start"
    assert devices_in_words("cuda:0", 1) == "cuda:0"
    assert devices_in_words("cuda:0", 4) == "cuda, 4 processes"


def test_pace_gives_the_speed_and_the_time_left(monkeypatch):
    now = 100.0
    monkeypatch.setattr(console.time, "perf_counter", lambda: now)
    pace = Pace(10, 60)
    now = 104.0
    assert pace.at(20) == "2.5 steps/s, 16 s left"
    now = 300.0
    assert pace.at(35) == "8 s a step, 3 min 20 s left"
    assert pace.at(60) == "4 s a step"
    assert pace.at(10) == Pace(0, 10).at(0) == ""  # no step has been made


# ---- messages ----


@pytest.fixture
def logger():
    """A logger with only a console handler."""
    logger = logging.getLogger("tests.console")
    logger.propagate, logger.level = False, logging.DEBUG
    logger.addHandler(ConsoleHandler(logging.INFO))
    yield logger
    logger.handlers.clear()


def untimed(text: str) -> list[str]:
    """The lines, without the times at the beginnings of messages."""
    return [line[9:] if line[2:3] == line[5:6] == ":" else line for line in text.splitlines()]


def test_messages_show_their_level_from_warnings_on(logger, capsys):
    logger.debug("hidden")
    logger.info("first\n  second")
    logger.warning("of %s", "something")
    logger.error("gone")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert untimed(captured.err) == ["first", "  second", "WARNING: of something", "ERROR: gone"]


def test_debug_messages_name_their_logger(logger, capsys):
    logger.handlers[0].shown_from = logging.DEBUG
    logger.handlers[0].setLevel(logging.DEBUG)
    logger.debug("x")
    assert untimed(capsys.readouterr().err) == ["DEBUG tests.console: x"]


def test_warnings_are_recorded_even_if_they_are_not_shown(logger, capsys):
    logger.handlers[0].shown_from = logging.ERROR
    for text in ("b", "a", "b"):
        logger.warning(text)
    logger.error("c")
    assert list(logger.handlers[0].warnings) == ["b", "a"]
    assert untimed(capsys.readouterr().err) == ["ERROR: c"]


def test_messages_are_colored_only_on_a_terminal(logger, terminal, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal)
    logger.warning("x")
    assert terminal.getvalue().count("\033[33mWARNING\033[0m: x\n") == 1
    monkeypatch.setattr(sys, "stderr", pipe := io.StringIO())
    logger.warning("y")
    assert untimed(pipe.getvalue()) == ["WARNING: y"]


def test_messages_appear_above_progress_bars(logger, capsys):
    with tqdm(total=3, position=0) as bar:  # at the top, even if another test left bars
        logger.info("a message")
        bar.update(3)
    lines = capsys.readouterr().err.replace("\r", "\n").split("\n")
    assert [untimed(line) for line in lines].count(["a message"]) == 1


SCRIPT = """
import logging, sys, warnings
from loralib.training.process import set_up_logging, warnings_so_far
set_up_logging()
set_up_logging(sys.argv[1], own=["mine"])
for name in ("loralib.x", "mine", "library"):
    for level in ("debug", "info", "warning", "error"):
        getattr(logging.getLogger(name), level)("%s %s", name, level)
warnings.warn("from Python")
print(warnings_so_far())
print("torch" in sys.modules)
"""
WARNINGS = ["loralib.x warning", "mine warning", "library warning"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "rank", "ours", "theirs"),
    [
        ("debug", 0, ["debug", "info", "warning", "error"], ["warning", "error"]),
        ("info", 0, ["info", "warning", "error"], ["warning", "error"]),
        ("warning", 0, ["warning", "error"], ["warning", "error"]),
        ("error", 0, ["error"], ["error"]),
        ("info", 1, ["error"], ["error"]),
        ("error", 1, ["error"], ["error"]),
    ],
)
def test_the_levels_shown_depend_on_logger_and_process(level, rank, ours, theirs, monkeypatch):
    """Libraries show warnings and errors; processes other than the main one only errors."""
    monkeypatch.setenv("RANK", str(rank))
    command = [sys.executable, "-W", "default", "-c", SCRIPT, level]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    shown = [line for line in untimed(done.stderr) if line.split(" ")[-2:-1] != []]
    levels = {name: [] for name in ("loralib.x", "mine", "library")}
    for line in shown:
        *_, name, shown_level = line.split(" ")
        if name in levels:
            levels[name].append(shown_level)
    assert levels == {"loralib.x": ours, "mine": ours, "library": theirs}
    assert ("from Python" in done.stderr) == (rank == 0 and level != "error")
    recorded, has_torch = done.stdout.splitlines()
    assert recorded == str(WARNINGS if level != "error" else [])
    assert has_torch == "False"
    assert "\033" not in done.stderr


@pytest.mark.parametrize("bars", [False, True])
def test_without_standard_error_messages_are_dropped(monkeypatch, capsys, bars):
    """sys.stderr is None if it was closed when Python started."""
    with tqdm(total=2, disable=not bars, file=io.StringIO()):
        monkeypatch.setattr(sys, "stderr", None)
        say("a message")
    assert capsys.readouterr().out == ""


class Writes(io.StringIO):
    """Records each write; another process may write between two of them."""

    def __init__(self):
        super().__init__()
        self.parts = []

    def write(self, text):
        self.parts.append(text)
        return super().write(text)


@pytest.mark.parametrize("bars", [False, True])
def test_a_line_and_its_end_are_one_write(monkeypatch, bars):
    """In two writes, they could be mixed with another process's lines."""
    stream = Writes()
    monkeypatch.setattr(sys, "stderr", stream)
    with tqdm(total=2, disable=not bars, file=stream):
        say("a message")
    assert "a message\n" in stream.parts
