"""Tests of the benchmark of the time before a script's first step."""

import argparse

import pytest

# Prints a line, and sleeps.
PRINTS = "import sys, time; print('{}', file=sys.stderr, flush=True); time.sleep({})"


@pytest.fixture
def script(load_script):
    return load_script("first_step")


def test_a_process_is_ended_at_its_first_step(script, tmp_path):
    start = script.Start("x", ["-c", PRINTS.format("12:00:00 step 1 of 20: loss 0.7", 600)])
    assert 0 < script.seconds_of(start, tmp_path) < 300


@pytest.mark.parametrize("printed", ["error: no such file", "step 11 of 20"])
def test_a_process_without_a_first_step_has_failed(script, tmp_path, printed):
    with pytest.raises(SystemExit, match=f"x failed: {printed}"):
        script.seconds_of(script.Start("x", ["-c", PRINTS.format(printed, 0)]), tmp_path)


@pytest.mark.parametrize("is_new", [True, False])
def test_only_starts_with_new_texts_drop_the_cached_tokens(script, tmp_path, is_new):
    tokens, others = tmp_path / "tokens" / "x", tmp_path / "loralib" / "products.json"
    for path in (tokens, others):
        path.parent.mkdir()
        path.touch()
    start = script.Start("x", ["-c", PRINTS.format("step 1 of 1", 0)], is_new=is_new)
    script.seconds_of(start, tmp_path)
    assert (tokens.exists(), others.exists()) == (not is_new, True)


@pytest.mark.slow
def test_both_scripts_reach_their_first_step(script, tmp_path):
    args = argparse.Namespace(data_dir=None, vocab=None, quick=True)
    starts = script.prepare(tmp_path, args)
    assert len({start.label for start in starts}) == len(starts) == 7
    for start in starts[:4]:
        assert script.seconds_of(start, tmp_path / "cache") > 0


def test_the_first_round_is_not_counted(script, monkeypatch, capsys):
    found = iter([9.0, 9.0, 1.0, 4.0, 3.0, 5.0, 2.0, 6.0])
    starts = [script.Start("a", []), script.Start("b", [])]
    monkeypatch.setattr(script, "prepare", lambda folder, args: starts)
    monkeypatch.setattr(script, "seconds_of", lambda start, cache: next(found))
    assert script.main(["--rounds", "3"]) == 0
    printed = capsys.readouterr().out
    assert "| a | 2.00 | 1.00 | 3.00 |\n| b | 5.00 | 4.00 | 6.00 |" in printed


@pytest.mark.parametrize("flags", [["--vocab", "x"], ["--data_dir", "x", "--vocab", "x"]])
def test_wrong_flags_are_refused(script, capsys, flags):
    with pytest.raises(SystemExit, match="2"):
        script.parse(flags)
    assert "--data_dir" in capsys.readouterr().err
