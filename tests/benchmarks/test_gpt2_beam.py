"""Tests of beam search's benchmark: a quick run of this project alone, table, work, prompts."""

import subprocess
import sys

import pytest

GROUPS = [([1] * 10, 5), ([2] * 20, 1)]  # prompts of 10 and 20 tokens, on 5 lines and on 1


@pytest.fixture
def script(load_script):
    return load_script("gpt2_beam")


@pytest.fixture
def e2e(load_script):
    return load_script("gpt2_e2e")


@pytest.mark.slow
def test_quick_run_of_this_project_alone(script, read_table):
    """From the command line, with workers that each start Python."""
    flags = ["--quick", "--threads", "1", "--rounds", "1", "--prompts", "2"]
    done = subprocess.run([sys.executable, script.__file__, *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_table(done.stdout)
    assert [(row["contestant"], row["precision"]) for row in rows] == [
        ("this project", "float32"),
        ("this project", "bfloat16 weights"),
    ]
    for row in rows:
        assert row["times ours"] == "1.00"
        assert row["searches"] == "2"
        assert int(row["lines"]) > 2
        assert float(row["s per line"]) > 0


def test_table_of_known_times(script, fake_worker, read_table, monkeypatch, capsys):
    """6 lines with 2 prompts take this project 3 s, one by one they take 4 s each."""

    def seconds_of(plan):
        return {"tree": 3, "generate": 6, "line by line": 4}[plan["way"]]

    plans = fake_worker(seconds_of)
    monkeypatch.setattr(script, "make_groups", lambda seed: GROUPS)
    assert (
        script.contest.main(script.BENCHMARK, ["--rounds", "1", "--peers_python", sys.executable])
        == 0
    )
    rows = {
        (row["contestant"], row["precision"]): row for row in read_table(capsys.readouterr().out)
    }
    assert {
        name: (row["s per line"], row["times ours"], row["lines"]) for name, row in rows.items()
    } == {
        ("this project", "float32"): ("0.5", "1.00", "6"),
        ("this project", "bfloat16 weights"): ("0.5", "1.00", "6"),
        ("generate, every line", "float32"): ("3", "6.00", "2"),
        ("generate, every line", "bfloat16 weights"): ("3", "6.00", "2"),
        ("generate, distinct prompts", "float32"): ("1", "2.00", "6"),
        ("generate, distinct prompts", "bfloat16 weights"): ("1", "2.00", "6"),
        ("line by line, full length", "float32"): ("4", "8.00", "1"),
        ("line by line, full length, no cache", "float32"): ("4", "8.00", "1"),
    }
    searched = {(plan["way"], plan["lines"]): plan["batches"][-1]["prompts"] for plan in plans}
    assert searched == {
        ("tree", "all"): [[1] * 10] * 5 + [[2] * 20],
        ("generate", "some"): [[1] * 10] * 2,
        ("generate", "distinct"): [[1] * 10, [2] * 20],
        ("line by line", "some"): [[1] * 10],
    }


@pytest.mark.parametrize(
    ("fields", "work"),
    [
        # Tokens, pairs and rows of logits: of the prompts, then of 10 beams at the steps 1 and 2.
        ({}, (30 + 40, 100 + 400 + 10 * (11 + 12 + 21 + 22), 2 + 40)),
        (
            {"way": "generate", "lines": "distinct"},
            (400 + 40, 10 * 2 * 400 + 20 * (21 + 22), 20 + 40),
        ),
        (
            {"way": "line by line", "lines": "some", "cache": False},
            (10 + 10 * (11 + 12), 100 + 10 * (11**2 + 12**2), 1 + 20),
        ),
    ],
)
def test_work_of_a_search(script, fields, work):
    contestant = script.Contestant("", "ours", **fields)
    entry = script.make_entry(contestant, GROUPS, eval_len=3, one=1)
    assert tuple(script.work(contestant, entry)) == work


def test_arithmetic_of_a_search(script):
    contestant = script.Contestant("", "ours")
    entry = {"prompts": [[1, 2]], "lines": 1, "eval_len": 1}
    layers = 12 * (2 * 12 * 768**2 * 2 + 4 * 768 * 4)
    expected = (layers + 2 * 768 * 50257) / 1e9
    assert script.gflop(contestant, entry, script.GPT2_SMALL) == pytest.approx(expected)


def test_a_sample_has_the_files_share_of_repeated_prompts(e2e):
    """Of two prompts, one with 1 line and one with 5 have the file's mean, 3 lines a prompt."""
    groups = [([number], lines) for number, lines in enumerate([1, 1, 1, 1, 5, 5, 5, 5, 1, 5])]
    for seed in range(5):
        sample = e2e.draw_run(groups, 2, seed)
        assert [lines for _, lines in sample] in ([1, 5], [5, 1])
        (first,), (second,) = (prompt for prompt, _ in sample)
        assert second == first + 1
    assert e2e.draw_run(groups, 20, seed=0) == groups


def test_built_in_prompts_are_drawn_by_a_seed(e2e):
    groups = e2e.make_groups(seed=1)
    assert sorted((lines, len(prompt)) for prompt, lines in groups) == e2e.PROMPTS
    assert groups == e2e.make_groups(seed=1) != e2e.make_groups(seed=2)
    assert all(prompt[-1] == e2e.END_OF_TEXT for prompt, _ in groups)


def test_missing_file_is_named(script, tmp_path):
    with pytest.raises(SystemExit, match=r"test\.txt is missing"):
        script.read_groups(tmp_path, tmp_path)


def test_built_in_prompts_are_those_of_e2e(e2e, data):
    groups = e2e.read_groups(data / "nlg" / "e2e", data / "gpt2-vocab")
    assert len(groups) == len({tuple(prompt) for prompt, _ in groups}) == 630
    sizes = sorted((lines, len(prompt)) for prompt, lines in groups)
    assert sum(lines for lines, _ in sizes) == 4693
    assert [sizes[int((i + 0.5) * 630 / 40)] for i in range(40)] == e2e.PROMPTS
