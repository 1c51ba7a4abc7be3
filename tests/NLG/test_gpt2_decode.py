"""Tests gpt2_decode.py: groups, layouts of references, and predictions that do not fit."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpt2_decode
from encoded import END_OF_TEXT_ID, context_digest
from encoder import get_encoder

SCRIPT = Path(__file__).resolve().parents[2] / "NLG" / "src" / "gpt2_decode.py"

NEEDED = ("vocab", "sample_file", "input_file", "output_ref_file", "output_pred_file")

# Context, reference, whether the category is seen, predicted text.
ROWS = [
    ("A", "First of A.", True, " A is said.<|endoftext|> and more"),
    ("B", "First_of B, it's.", False, " B is\nsaid.\n\nand more"),
    ("A", "Second of A.<|endoftext|>cut", True, " A is said.<|endoftext|> and more"),
    ("C", "First of C.\n\ncut", True, " C"),
    ("A", " Third\nof A. ", True, " A is said.<|endoftext|> and more"),
    ("B", "Second of B.", False, " B is\nsaid.\n\nand more"),
]


@pytest.fixture
def run(tmp_path, vocab_folder):
    """Writes rows and predictions, and decodes them; returns the result of `written`."""
    encoder = get_encoder(vocab_folder)

    def run(*flags, rows=ROWS, predictions=None, cate=True, keys=None):
        with open(tmp_path / "input", "w") as file:
            for context, completion, seen, _ in rows:
                row = {"context": context, "completion": completion}
                file.write(json.dumps(row | ({"cate": seen} if cate else {})) + "\n")
        if predictions is None:
            ids = [encoder.encode(row[3]) for row in rows]
            predictions = [{"id": n, "predict": [*row, 0, 0]} for n, row in enumerate(ids)]
        (tmp_path / "sample").write_text("".join(json.dumps(p) + "\n" for p in predictions))
        if keys is not None:
            (tmp_path / "keys").write_text("".join(f"{key}\n" for key in keys))
            flags = (*flags, "--ref_unique_file", str(tmp_path / "keys"))
        paths = (vocab_folder, *(tmp_path / name for name in ("sample", "input", "ref", "pred")))
        arguments = [f"--{name}={path}" for name, path in zip(NEEDED, paths, strict=True)]
        gpt2_decode.main([*arguments, *flags])
        return written(tmp_path)

    return run


def written(folder):
    """Returns {name: lines} of the files that the script wrote."""
    paths = [folder / "ref", *(folder / "ref").glob("*"), folder / "pred"]
    return {
        str(path.relative_to(folder)): path.read_text("utf-8").split("\n")[:-1]
        for path in paths
        if path.is_file()
    }


def test_e2e(run):
    assert run() == {
        "ref": [
            "First of A.",
            "Second of A.",
            "Third of A.",
            "",
            "First_of B, it's.",
            "Second of B.",
            "",
            "First of C.",
            "",
        ],
        # Without an end token, the zeros of C's prediction are decoded like any token.
        "pred": ["A is said.", "B is said.", "C!!"],
    }


@pytest.mark.parametrize("kind", ["webnlg", "dart"])
def test_a_folder_of_references(kind, run):
    assert run("--ref_type", kind, "--ref_num", "3") == {
        "ref/reference0": ["First of A.", "First_of B, it's.", "First of C."],
        "ref/reference1": ["Second of A.", "Second of B.", "First of C."],
        "ref/reference2": ["Third of A.", "First_of B, it's.", "First of C."],
        "pred": ["A is said.", "B is said.", "C!!"],
    }


def test_references_that_are_cut_are_warned_of(run, caplog):
    """The warning does not count references that lose only end marks and blank lines."""
    run(rows=[*ROWS, ("D", "Whole.\n\n<|endoftext|>\n", True, "")])
    [warning] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "input: references are cut at a blank line or <|endoftext|>, like" in warning
    assert warning.endswith("this shortens 2 of them, the first in line 3")
    caplog.clear()
    run(rows=ROWS[:2])
    assert "cut" not in caplog.text


def test_a_folder_with_more_reference_files_is_refused(run, tmp_path):
    """A scorer would mix them up. They may be the user's own, so they are not removed."""
    run("--ref_type", "dart")  # with the default of four files
    for name in ("reference10", "reference", "reference07", "reference2.bak", "other"):
        (tmp_path / "ref" / name).write_text("mine\n")
    left = [tmp_path / "ref" / f"reference{number}" for number in (2, 3, 10)]
    while left:  # any of them, also if their numbers have gaps
        before = {path: path.read_bytes() for path in (tmp_path / "ref").iterdir()}
        with pytest.raises(ValueError, match="would be taken for references of this") as error:
            run("--ref_type", "dart", "--ref_num", "2")
        more = f" and {len(left) - 1} more" if left[1:] else ""
        assert str(error.value).startswith(f"{left[0]}{more} would be taken")
        assert {path: path.read_bytes() for path in (tmp_path / "ref").iterdir()} == before
        left.pop(0).unlink()
    run("--ref_type", "dart", "--ref_num", "2")
    assert (tmp_path / "ref" / "reference07").read_text() == "mine\n"


@pytest.mark.parametrize("number", [1, 2, 7])
def test_an_input_among_the_references_is_reported_as_an_input(run, tmp_path, number):
    (tmp_path / "ref").mkdir()
    keys = tmp_path / "ref" / f"reference{number}"
    keys.write_text("1\n" * len(ROWS))
    with pytest.raises(ValueError, match=rf"{keys.name}: is an input as well; give another name"):
        run("--ref_type=dart", "--ref_num=2", f"--ref_unique_file={keys}")
    assert keys.read_text() == "1\n" * len(ROWS)
    assert os.listdir(tmp_path / "ref") == [keys.name]


def test_the_recorded_length_ends_a_prediction(run, vocab_folder):
    """A text may end in any token, so it has a length. Older files do not record it."""
    text = get_encoder(vocab_folder).encode(" A.")
    row = {"predict": [*text, 0, 0], "length": len(text)}
    made = run(predictions=[{"id": n, **row} for n in range(len(ROWS))])
    assert made["pred"] == ["A."] * 3
    del row["length"]
    made = run(predictions=[{"id": n, **row} for n in range(len(ROWS))])
    assert made["pred"] == ["A.!!"] * 3
    row["length"] = 0
    made = run(predictions=[{"id": n, **row} for n in range(len(ROWS))])
    assert made["pred"] == [""] * 3


@pytest.mark.parametrize(
    ("count", "left_out"), [(1, "3 references"), (2, "1 reference"), (3, None), (4, None)]
)
def test_references_beyond_ref_num_are_counted(run, caplog, count, left_out):
    made = run("--ref_type", "dart", "--ref_num", str(count))
    assert sorted(made) == ["pred", *(f"ref/reference{n}" for n in range(count))]
    warnings = [text for text in caplog.messages if "leaves out" in text]
    assert warnings == ([f"--ref_num {count} leaves out {left_out}"] if left_out else [])


@pytest.mark.parametrize("missing", NEEDED)
def test_a_missing_path_is_refused(missing, capsys):
    with pytest.raises(SystemExit):
        gpt2_decode.main([f"--{name}=x" for name in NEEDED if name != missing])
    assert f"the following arguments are required: --{missing}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--lower"], ["first of a.", "first_of b, it's.", "first of c."]),
        (["--tokenize"], ["First of A .", "First_of B , it ' s .", "First of C ."]),
        (["--tokenize", "--lower"], ["first of a .", "first_of b , it ' s .", "first of c ."]),
    ],
)
def test_tokenize_and_lower(flags, expected, run):
    made = run("--ref_type", "webnlg", *flags)
    assert made["ref/reference0"] == expected
    predicted = ["A is said.", "B is said.", "C!!"]
    predicted = [text.lower() for text in predicted] if "--lower" in flags else predicted
    if "--tokenize" in flags:
        predicted = [text.replace(".", " .").replace("!", " !") for text in predicted]
    assert made["pred"] == predicted


@pytest.mark.parametrize(
    ("which", "references", "predicted"),
    [
        ("all", ["First of A.", "First_of B, it's.", "First of C."], ["A is", "B is", "C!!"]),
        ("seen", ["First of A.", "First of C."], ["A is", "C!!"]),
        ("unseen", ["First_of B, it's."], ["B is"]),
    ],
)
def test_filter(which, references, predicted, run):
    made = run("--ref_type", "webnlg", "--filter", which)
    assert made["ref/reference0"] == references
    assert [text.removesuffix(" said.") for text in made["pred"]] == predicted


def test_grouped_by_keys(run):
    made = run("--ref_type", "dart", "--ref_num", "2", keys=["1", "2", "3", " 3", "1 ", "2"])
    assert made == {
        "ref/reference0": ["First of A.", "First_of B, it's.", "Second of A."],
        "ref/reference1": ["Third of A.", "Second of B.", "First of C."],
        "pred": ["A is said.", "B is said.", "A is said."],
    }


def test_predictions_come_in_any_order_and_a_groups_first_counts(run, vocab_folder, caplog):
    encoder = get_encoder(vocab_folder)
    texts = ["zero", "one", "two", "three", "zero", "one"]
    predictions = [{"id": n, "predict": encoder.encode(text)} for n, text in enumerate(texts)]
    with caplog.at_level(logging.WARNING):
        assert run(predictions=predictions[::-1])["pred"] == ["zero", "one", "three"]
    assert "1 of 3 inputs have several predictions that differ; the first counts" in caplog.text


def test_an_empty_prediction_keeps_its_line(run):
    predictions = [{"id": n, "predict": [50256, 0]} for n in range(len(ROWS))]
    assert run(predictions=predictions)["pred"] == ["", "", ""]


def ids(*numbers):
    return [{"id": number, "predict": [1]} for number in numbers]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"predictions": ids(0, 1, 2, 3, 4)}, "{0}/sample: has no prediction of id 5"),
        (
            {"predictions": ids(0, 2)},
            "{0}/sample: has no prediction of id 1 and 3 others; the input's rows are 0 to 5",
        ),
        ({"predictions": ids(0, 2, 3, 5)}, "{0}/sample: has no prediction of id 1 and 1 other"),
        ({"predictions": ids(0, 1, 0)}, "{0}/sample:3: a second prediction of id 0"),
        ({"predictions": ids(0, 6)}, "{0}/sample:2: id 6, but the input's rows are 0 to 5"),
        ({"predictions": ids(-1)}, "{0}/sample:1: id -1, but the input's rows are 0 to 5"),
        ({"predictions": ids("0")}, '{0}/sample:1: not a line {{"id": number, "predict": [ids]}}'),
        ({"predictions": ids(True)}, '{0}/sample:1: not a line {{"id": number, "predict": [ids]}}'),
        ({"predictions": [{"id": 0}]}, '{0}/sample:1: has no "predict"'),
        (
            {"predictions": [{"id": 0, "predict": [1.5]}]},
            '{0}/sample:1: "predict" has to be a list of token ids',
        ),
        *(
            (
                {"predictions": [{"id": 0, "predict": [1], "length": length}]},
                '{0}/sample:1: "length" must be from 0 to the number of ids in "predict"',
            )
            for length in (2, -1, True, None)
        ),
        (
            {"predictions": [*ids(0, 2, 3, 4, 5), {"id": 1, "predict": [1, 50257]}]},
            "{0}/sample: id 1: the vocabulary has no token of id 50257",
        ),
        ({"predictions": []}, "{0}/sample: is empty"),
        ({"keys": "12345"}, "{0}/keys: has 5 lines, but the input has 6 rows"),
        ({"keys": "1234567"}, "{0}/keys: has 7 lines, but the input has 6 rows"),
        ({"rows": [("A", "", True, "")]}, "{0}/input:1: the completion is empty"),
        (
            {"rows": [*ROWS, ("A", "<|endoftext|>", True, "")]},
            "{0}/input:7: the completion is empty",
        ),
        ({"cate": False, "flags": ["--filter=seen"]}, '{0}/input:1: --filter seen needs "cate"'),
        (
            {"rows": [*ROWS, ("D", "D.", "false", "")], "flags": ["--filter=unseen"]},
            '{0}/input:7: --filter unseen needs "cate", true or false',
        ),
        (
            {"rows": ROWS[1:2], "flags": ["--filter=seen"]},
            "{0}/input: has no row of seen category",
        ),
    ],
)
def test_input_that_does_not_fit_is_refused(given, message, run, tmp_path):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        run(*given.pop("flags", ()), **given)
    assert str(error.value).startswith(message.format(tmp_path))
    assert written(tmp_path) == {}


@pytest.mark.parametrize("ids", [[], [5], [5, END_OF_TEXT_ID, 7]])
def test_a_contexts_digest_ignores_the_end_tokens_after_it(ids):
    ends = [END_OF_TEXT_ID] * 2
    assert context_digest(ids) == context_digest(ids + ends)
    assert context_digest(ids) != context_digest([6, *ids])


def predictions_for(vocab_folder, contexts, add_bos=True):
    """Returns predictions with the digests of their contexts, as gpt2_beam.py writes them."""
    ids = get_encoder(vocab_folder).encode_batch(contexts)
    ends = [END_OF_TEXT_ID] * add_bos
    digests = [context_digest(row + ends) for row in ids]
    return [{"id": n, "predict": [32], "context_digest": x} for n, x in enumerate(digests)]


@pytest.mark.parametrize("add_bos", [True, False])
def test_predictions_for_this_input_are_decoded(run, vocab_folder, add_bos):
    predictions = predictions_for(vocab_folder, [row[0] for row in ROWS], add_bos)
    assert run(predictions=predictions)["pred"] == ["A", "A", "A"]
    del predictions[3]["context_digest"]  # as in older files
    assert run(predictions=predictions)["pred"] == ["A", "A", "A"]


def test_predictions_for_another_input_are_refused(run, vocab_folder, tmp_path):
    predictions = predictions_for(vocab_folder, ["A", "B", "A", "D", "A", "A"])
    with pytest.raises(ValueError, match="gpt2_beam") as error:
        run(predictions=predictions)
    assert str(error.value) == (
        f"{tmp_path}/sample: 2 of 6 predictions, that of id 3 first, are for contexts other than "
        f"those of {tmp_path}/input: give the --input_file and --vocab that gpt2_beam.py's --data "
        "was encoded from"
    )
    assert written(tmp_path) == {}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--output_pred_file={0}/input", "{0}/input: is an input as well"),
        ("--output_ref_file={0}/sample", "{0}/sample: is an input as well"),
        ("--output_ref_file={0}/pred", "{0}/pred: is another output as well"),
        (
            "--ref_type=dart --ref_num=3 --output_pred_file={0}/ref/reference2",
            "{0}/ref/reference2: is another output as well",
        ),
    ],
)
def test_no_file_overwrites_another(flags, message, run, tmp_path):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        run(*(flag.format(tmp_path) for flag in flags.split()))
    assert str(error.value).startswith(message.format(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["input", "sample"]


def test_keys_are_not_overwritten(run, tmp_path):
    with pytest.raises(ValueError, match="keys: is an input as well"):
        run(f"--output_ref_file={tmp_path}/keys", keys="112131")
    assert (tmp_path / "keys").read_text() == "1\n1\n2\n1\n3\n1\n"


@pytest.mark.parametrize("number", ["0", "-1"])
def test_ref_num_below_one(number, run, capsys):
    with pytest.raises(SystemExit, match="2"):
        run("--ref_type", "dart", f"--ref_num={number}")
    assert f"--ref_num {number}: must be 1 or more" in capsys.readouterr().err


@pytest.mark.slow
def test_an_error_is_one_line(tmp_path, vocab_folder):
    (tmp_path / "input").write_text('{"context": "a", "completion": "b"}\n')
    (tmp_path / "sample").write_text('{"id": 7, "predict": [1]}\n')
    flags = "--sample_file=sample --input_file=input --output_ref_file=ref --output_pred_file=pred"
    result = subprocess.run(
        [sys.executable, str(SCRIPT), f"--vocab={vocab_folder}", *flags.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "gpt2_decode.py: error: sample:1: id 7, but the input's rows are 0 to 0"
    ]
    assert sorted(os.listdir(tmp_path)) == ["input", "sample"]
