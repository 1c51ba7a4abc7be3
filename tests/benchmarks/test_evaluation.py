"""Tests of evaluation's benchmark: a quick run of this project alone, table, texts, check."""

import sys

import pytest
import torch

from transformers import PreTrainedTokenizerFast


@pytest.fixture
def script(load_script):
    return load_script("evaluation")


@pytest.mark.slow
def test_quick_run_of_this_project_alone(script, run_quickly):
    rows = run_quickly("evaluation", "--rounds", "1", "--steps", "1", "--texts", "9")
    expected = [one for work in script.WORKS for one in script.ours(work)]
    assert [(row["contestant"], row["precision"]) for row in rows] == [
        (one.name, one.precision) for one in expected
    ]
    for row in rows:
        assert float(row["ms per text"]) > 0
        assert row["times ours"] == "1.00"
        assert row["real tokens"] == row["computed"] == rows[0]["real tokens"]


def test_table_of_known_times(script, fake_worker, read_table, capsys):
    """A set of 100 texts takes this project 1 s, 2 s in float32, and predict.py 1 s more."""

    def seconds_of(plan):
        own = (1 if plan["autocast"] else 2) + (plan["work"] == "predict.py")
        if plan["worker"] == "ours":
            return own
        return 12 if plan["order"] == "as it comes" else 6

    plans = fake_worker(seconds_of)
    flags = ["--rounds", "2", "--texts", "100", "--peers_python", sys.executable]
    assert script.contest.main(script.BENCHMARK, flags) == 0
    rows = {
        (row["contestant"], row["precision"]): row for row in read_table(capsys.readouterr().out)
    }
    times = {name: (row["ms per text"], row["times ours"]) for name, row in rows.items()}
    half = "bfloat16 weights + autocast"
    ours = {
        ("this project, evaluation", "float32"): ("20", "1.00"),
        ("this project, evaluation", half): ("10", "1.00"),
        ("this project, predict.py", "float32"): ("30", "1.00"),
        ("this project, predict.py", half): ("20", "1.00"),
        ("PEFT, evaluation, as it comes", "float32"): ("120", "6.00"),
        ("PEFT, evaluation, as it comes", "bfloat16 weights"): ("120", "12.00"),
    }
    for work, quotients in (("evaluation", ("3.00", "6.00")), ("predict.py", ("2.00", "3.00"))):
        name = f"PEFT, {work}, by length"
        ours[name, "float32"] = ("60", quotients[0])
        for precision in ("bfloat16 weights", half, "bfloat16 autocast"):
            ours[name, precision] = ("60", quotients[1])
    assert times == ours
    of_rounds = [plan["batches"] for plan in plans if plan["name"] == "this project, evaluation"]
    first, second = of_rounds[0], of_rounds[-1]
    assert first != second
    assert all(plan["batches"] in (first, second) for plan in plans)
    assert [len(entry["pairs"]) for entry in first] == [100] * 3
    real = sum(sum(entry["lengths"]) for entry in [*first[1:], *second[1:]])
    assert {row["real tokens"] for row in rows.values()} == {f"{real:,}"}


# ---- what is computed ----


def test_arithmetic_of_a_set(script):
    """64 rows of 5 tokens, except for two of 10; 7.1 M weights in a layer."""
    lengths = [10, *[5] * 62, 10]
    entry = script.make_entry([(["a", "b"], length) for length in lengths])

    def gflop(**fields):
        contestant = script.Contestant("one", **fields)
        return script.gflop(contestant, entry, script.roberta_step.ROBERTA_BASE)

    def padded(short, long):
        tokens, squares = 5 * short + 10 * long, 25 * short + 100 * long
        return 12 * (2 * 12 * 768**2 * tokens + 4 * 768 * squares) / 1e9

    # Both long rows are in the first batch of 32, or one in each of the two.
    assert gflop(worker="peers") == pytest.approx(padded(32, 32))
    assert gflop(worker="peers", order="as it comes") == pytest.approx(padded(0, 64))
    # Four adapters have 16 texts each; the first and the last one have a long row.
    assert gflop(worker="peers", work="predict.py") == pytest.approx(padded(32, 32))
    packed = (11 + 2 / 12) * (2 * 12 * 768**2 * 330 + 4 * 768 * (62 * 25 + 2 * 100))
    assert gflop(worker="ours") == pytest.approx(packed / 1e9)


def test_made_up_texts_have_the_quantiles_lengths(script, load_worker):
    shared = load_worker("evaluation_texts")
    rows = [(script.made_up(length), length) for length in script.QUANTILES]
    entry = script.make_entry(rows)
    assert entry["adapters"][:5] == ["task0", "task1", "task2", "task3", "task0"]
    plan = {"work": "evaluation", "vocab": None}
    made = shared.make_batch(PreTrainedTokenizerFast, plan, 0, entry)["rows"]
    assert [len(row["input_ids"]) for row in made] == script.QUANTILES
    for row, (texts, _) in zip(made, rows, strict=True):
        ids = row["input_ids"]
        assert (ids[0], ids[-1], ids.count(2), ids.count(1)) == (0, 2, 3, 0)
        assert ids.index(2) == 1 + len(texts[0])
    entry["lengths"][3] += 1
    with pytest.raises(ValueError, match=r"^texts have \[23, .*\] tokens, not \[23, "):
        shared.make_batch(PreTrainedTokenizerFast, plan, 0, entry)
    assert shared.make_batch(PreTrainedTokenizerFast, {"work": "predict.py"}, 0, entry) is entry


@pytest.mark.slow
def test_texts_of_rte_have_the_lengths_that_are_counted(script, load_worker, data):
    args = ["--data_dir", str(data / "glue"), "--vocab", str(data / "gpt2-vocab")]
    parsed = script.contest.parse(script.BENCHMARK, args)
    entry = script.make_entry(script.read_rows(parsed))
    assert len(entry["pairs"]) == 2490
    vocab = list(map(str, script.vocab_files(parsed.vocab)))
    plan = {"work": "evaluation", "vocab": vocab}
    made = load_worker("evaluation_texts").make_batch(PreTrainedTokenizerFast, plan, 0, entry)
    assert max(max(row["input_ids"]) for row in made["rows"]) < 50265


def test_rows_of_a_peer_are_sorted_and_put_back(load_worker):
    shared = load_worker("evaluation_texts")
    lengths = [3, 9, 5, 9, 1]
    assert shared.order_of({"order": "as it comes"}, lengths) == [0, 1, 2, 3, 4]
    order = shared.order_of({"order": "by length"}, lengths)
    assert order == [1, 3, 2, 0, 4]
    computed = torch.tensor([[float(lengths[row])] for row in order])
    assert shared.in_place(order, computed).flatten().tolist() == lengths


# ---- the check ----


def distinct_logits(batch):
    """Logits that differ from text to text."""
    return torch.tensor([[float(len(a) + ord(b[0]))] for a, b in batch["pairs"]])


@pytest.mark.parametrize(
    ("function", "precision", "message"),
    [
        (distinct_logits, "float32", None),
        (lambda batch: distinct_logits(batch) + 0.01 * len(batch["pairs"]), "bfloat16", None),
        (
            lambda batch: distinct_logits(batch) + 0.01 * len(batch["pairs"]),
            "float32",
            "logits of a batch differ by 0.08 from those of each text alone",
        ),
        (
            lambda batch: distinct_logits(batch).flip(0),
            "bfloat16",
            r"logits of a batch differ by \d+ from those of each text alone",
        ),
        (
            lambda batch: distinct_logits(batch) * float("nan"),
            "float32",
            "logits of a batch differ by nan from those of each text alone",
        ),
        (lambda batch: torch.ones(len(batch["pairs"]), 2), "float32", "all texts have the same l"),
    ],
)
def test_wrong_answers_of_a_worker_are_detected(script, load_worker, function, precision, message):
    shared = load_worker("evaluation_texts")
    rows = [(script.made_up(length), length) for length in script.QUANTILES[::-1]]
    plan = {"batches": [script.make_entry(rows)], "weights": precision, "autocast": None}

    def make_batch(plan, index, entry):
        return entry

    if message is None:
        shared.check_answers(plan, make_batch, function)
    else:
        with pytest.raises(ValueError, match=f"^{message}"):
            shared.check_answers(plan, make_batch, function)
