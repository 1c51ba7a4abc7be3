"""Tests measure_scores.py: metrics that need Java, the tables of E2E and WebNLG, and bad files."""

import json
import os
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from scored_rows import PERFECT, REFERENCES, WORSE, WORST, plain_bleu

import measure_scores
import metrics

EVAL = Path(measure_scores.__file__).parent
WITHOUT_JAVA = metrics.missing_java()
needs_java = pytest.mark.skipif(WITHOUT_JAVA is not None, reason=str(WITHOUT_JAVA))

# ---- Java ----


@needs_java
def test_ptb_tokens():
    texts = ['The £20 pub, Loch Fyne — "good" (cheap); isn\'t it?', "a\u2028b\x85c", ""]
    references, predictions = metrics.ptb_tokens([texts[:1], texts[1:]], [texts[0], "...", "B"])
    first = "the # 20 pub loch fyne good -lrb- cheap -rrb- is n't it"
    assert references == [[first], ["a b c", ""]]
    assert predictions == [first, "", "b"]


@needs_java
def test_rouge_and_cider():
    scores = [
        [metric(*metrics.ptb_tokens(REFERENCES, predictions)) for predictions in (PERFECT, WORSE)]
        for metric in (metrics.rouge_l, metrics.cider)
    ]
    assert scores[0][0] == pytest.approx(1)
    assert all(perfect > worse > 0 for perfect, worse in scores)
    # The common subsequence has 3 words, the prediction 4, and the reference 6; β is 1.2.
    by_hand = (1 + 1.44) * 0.75 * 0.5 / (0.5 + 1.44 * 0.75)
    assert metrics.rouge_l([["a b c d e f"]], ["a c x e"]) == pytest.approx(by_hand)


@needs_java
def test_all_metrics_of_e2e(tmp_path, capsys):
    references, predictions = write_e2e(tmp_path, [PERFECT[0], WORSE[1], ""])
    measure_scores.main([references, predictions, "-p", "--json", str(tmp_path / "scores.json")])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == ["BLEU", "NIST", "METEOR", "ROUGE_L", "CIDEr"]
    scores = json.loads((tmp_path / "scores.json").read_text())["all"]
    assert [float(line.split(": ")[1]) for line in lines] == [
        pytest.approx(value, abs=5e-5) for value in scores.values()
    ]
    assert 0 < scores["METEOR"] < 1
    assert 0 < scores["ROUGE_L"] < 1


@pytest.fixture
def pretended_java(tmp_path, monkeypatch):
    """Installs a shell script as the program java, and an empty package pycocoevalcap."""

    def pretend(script):
        program = tmp_path / "bin" / "java"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        (tmp_path / "packages" / "pycocoevalcap").mkdir(parents=True)
        monkeypatch.syspath_prepend(str(tmp_path / "packages"))
        monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")

    return pretend


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands for java")
class TestPretendedJava:
    def test_a_stub_without_a_runtime_counts_as_missing(self, pretended_java):
        pretended_java("echo No Java runtime present. >&2; exit 1")
        assert "there is no Java runtime" in metrics.missing_java()

    def test_a_java_that_fails_is_an_error(self, pretended_java):
        pretended_java('[ "$1" = -version ] || { echo Could not reserve memory >&2; exit 3; }')
        assert metrics.missing_java() is None
        with pytest.raises(ValueError, match="ended with 3: Could not reserve memory"):
            metrics.meteor(REFERENCES, WORSE)

    def test_tokens_that_do_not_fit_the_texts_are_an_error(self, pretended_java):
        pretended_java("head -n 3")
        with pytest.raises(ValueError, match="gave 3 lines for 9 texts"):
            metrics.ptb_tokens(REFERENCES, WORSE)

    def test_meteor_gets_equally_many_references_for_each_prediction(self, pretended_java):
        # The fifth argument is the file of predictions, the sixth that of references.
        pretended_java('echo $(( 100 * $(wc -l < "$5") + $(wc -l < "$6") ))')
        assert metrics.meteor(REFERENCES, WORSE) == 309


@pytest.fixture
def no_java(monkeypatch):
    monkeypatch.setattr(metrics, "missing_java", lambda: "there is no Java; get some")


def texts_for_each_metric(monkeypatch, task):
    """Returns the references and predictions that each of a task's metrics gets, by label."""
    monkeypatch.setattr(metrics, "missing_java", lambda: None)
    monkeypatch.setattr(metrics, "ptb_tokens", lambda *texts: ("tokens of", texts))
    task = [replace(metric, score=lambda *texts: texts) for metric in task.values()]
    return metrics.score(task, [["a", ""], ["b", "c"]], ["d", ""])


def test_metrics_get_empty_references_or_tokens_if_they_take_them(monkeypatch):
    given, filled = ([["a", ""], ["b", "c"]], ["d", ""]), ([["a"], ["b", "c"]], ["d", ""])
    tokens = ("tokens of", filled)
    assert texts_for_each_metric(monkeypatch, metrics.E2E) == {
        "BLEU": filled,
        "NIST": filled,
        "METEOR": tokens,
        "ROUGE_L": tokens,
        "CIDEr": tokens,
    }
    assert texts_for_each_metric(monkeypatch, metrics.WEBNLG_AND_DART) == {
        "BLEU": given,
        "METEOR": filled,
        "TER": given,
        "chrF++": filled,
    }


# ---- The program ----


def write_e2e(folder, predictions, references=REFERENCES):
    (folder / "ref.txt").write_text("".join("\n".join(row) + "\n\n" for row in references))
    (folder / "pred.txt").write_text("".join(f"{text}\n" for text in predictions))
    return str(folder / "ref.txt"), str(folder / "pred.txt")


def write_columns(folder, predictions, missing="", references=REFERENCES):
    """Writes reference0 to reference2. Rows with fewer get `missing` or, if None, their first."""
    for n in range(3):
        column = [row[n] if n < len(row) else missing or "" for row in references]
        if missing is None:
            column = [text or row[0] for text, row in zip(column, references, strict=True)]
        (folder / f"reference{n}").write_text("".join(f"{text}\n" for text in column))
    (folder / "hypothesis").write_text("".join(f"{text}\n" for text in predictions))
    return ["-R", str(folder / "reference"), "-H", str(folder / "hypothesis"), "-nr", "3"]


def fails(argv, monkeypatch, capsys):
    """Runs the program, which must fail with one line, and returns that line."""
    monkeypatch.setattr(sys, "argv", ["measure_scores.py", *argv])
    with pytest.raises(SystemExit) as end:
        measure_scores.start()
    captured = capsys.readouterr()
    assert end.value.code == 1
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.usefixtures("no_java")
def test_e2e_without_java(tmp_path, capsys, caplog):
    paths = write_e2e(tmp_path, PERFECT)
    measure_scores.main([*paths, "-p", "--json", str(tmp_path / "new" / "scores.json")])
    nist = metrics.nist(REFERENCES, PERFECT)
    assert capsys.readouterr().out.splitlines() == [
        "BLEU: 1.0000",
        f"NIST: {nist:.4f}",
        "METEOR: skipped",
        "ROUGE_L: skipped",
        "CIDEr: skipped",
    ]
    assert caplog.messages == ["skipped: METEOR, ROUGE_L, CIDEr: there is no Java; get some"]
    assert json.loads((tmp_path / "new" / "scores.json").read_text()) == {
        "all": {
            "BLEU": pytest.approx(1),
            "NIST": nist,
            "METEOR": None,
            "ROUGE_L": None,
            "CIDEr": None,
        }
    }


@pytest.mark.usefixtures("no_java")
def test_without_a_metric_that_needs_java_there_is_no_warning(tmp_path, capsys, caplog):
    measure_scores.main([*write_e2e(tmp_path, PERFECT), "-m", "bleu,NIST"])
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert not caplog.messages


@pytest.mark.usefixtures("no_java")
def test_table_of_webnlg(tmp_path, capsys):
    arguments = write_columns(tmp_path, WORSE)
    measure_scores.main([*arguments, "-m", "ter,bleu,meteor,chrf++", "--label", "seen"])
    names, numbers, scales = capsys.readouterr().out.splitlines()
    assert names.split() == ["TER", "BLEU", "METEOR", "chrF++"]
    assert numbers.split() == [
        "seen",
        f"{metrics.ter(REFERENCES, WORSE):.4f}",
        f"{metrics.bleu(REFERENCES, WORSE):.2f}",
        "skipped",
        f"{metrics.chrf(REFERENCES, WORSE):.4f}",
    ]
    assert "BLEU 0-100" in scales
    assert "less is better" in scales


@pytest.mark.parametrize("missing", ["", None])
def test_missing_references_are_empty_or_repeat_the_first(tmp_path, missing):
    write_columns(tmp_path, WORSE, missing=missing)
    rows = measure_scores.read_reference_files(str(tmp_path / "reference"), 3)
    empty = [] if missing is None else [""]
    assert rows == [REFERENCES[0] + empty, REFERENCES[1], REFERENCES[2] + empty]


SHORT = ["The Punter.", "Loch Fyne serves French food.", "Aromi is cheap ."]


LONG = ["The Punter.", "x " * 24, "x " * 24]


@pytest.mark.usefixtures("no_java")
@pytest.mark.parametrize("predictions", [SHORT, WORSE, LONG])
def test_only_bleu_and_ter_count_empty_references(tmp_path, predictions):
    """BLEU differs if predictions are short, TER if a row's rate is above 1; others are equal."""
    scores = []
    for missing in ("", None):
        path = tmp_path / f"{missing}.json"
        arguments = write_columns(tmp_path, predictions, missing=missing)
        measure_scores.main([*arguments, "--json", str(path)])
        scores.append(json.loads(path.read_text())["all"])
    empty, repeated = (score.pop("BLEU") for score in scores)
    with_blank, without = (score.pop("TER") for score in scores)
    assert scores[0] == scores[1]
    assert (with_blank < without) if predictions is LONG else (with_blank == without)
    assert repeated == pytest.approx(plain_bleu(REFERENCES, predictions), rel=1e-12)
    with_empty = [[*row, "", ""][:3] for row in REFERENCES]
    assert empty == pytest.approx(plain_bleu(with_empty, predictions), rel=1e-12)
    assert (empty > repeated) if predictions is SHORT else (empty == repeated)


def test_single_reference_file_with_and_without_its_number(tmp_path, caplog):
    write_columns(tmp_path, WORSE)
    by_number = measure_scores.read_reference_files(str(tmp_path / "reference"), 1)
    assert by_number == [row[:1] for row in REFERENCES]
    prefix = tmp_path / "reference"
    assert caplog.messages == [f"{prefix}1 and later files do not count with -nr 1"]
    by_name = measure_scores.read_reference_files(str(tmp_path / "reference0"), 1)
    assert by_name == by_number
    several = measure_scores.read_reference_files(str(tmp_path / "reference"), 3)
    prefix.write_text("not one of the three\n")
    assert measure_scores.read_reference_files(str(prefix), 3) == several
    assert len(caplog.messages) == 1


@pytest.mark.usefixtures("no_java")
def test_a_byte_order_mark_is_ignored(tmp_path, capsys):
    outputs = []
    for mark in (b"", b"\xef\xbb\xbf"):
        for path in write_e2e(tmp_path, PERFECT):
            Path(path).write_bytes(mark + Path(path).read_bytes())
        measure_scores.main([str(tmp_path / "ref.txt"), str(tmp_path / "pred.txt")])
        arguments = write_columns(tmp_path, PERFECT)
        first = tmp_path / "reference0"
        first.write_bytes(mark + first.read_bytes())
        measure_scores.main(arguments)
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]


def test_a_pipe_is_an_error(tmp_path, monkeypatch, capsys):
    """The files are read twice."""
    os.mkfifo(tmp_path / "pipe")
    arguments = [str(tmp_path / "pipe"), write_e2e(tmp_path, PERFECT)[1]]
    assert "pipe: is a pipe, not a file" in fails(arguments, monkeypatch, capsys)


@pytest.mark.parametrize("end", ["", "\n", "\n\n", "\n\n\n"])
@pytest.mark.parametrize("line", ["\n", "\r\n"])
def test_groups(tmp_path, end, line):
    text = "a b\nc\u2028d\n\ne" + end
    (tmp_path / "ref.txt").write_bytes(text.replace("\n", line).encode())
    assert measure_scores.read_groups(str(tmp_path / "ref.txt")) == [["a b", "c\u2028d"], ["e"]]


def test_a_single_row_is_not_taken_for_swapped_files(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("a\n")
    measure_scores.check_order(str(path), str(path))


def test_labels_share_a_file(tmp_path):
    table = str(tmp_path / "new" / "scores.json")
    for label, predictions, asked in (
        ("all", WORST, "bleu,chrf++"),
        ("seen", WORSE, "bleu"),
        ("all", PERFECT, "bleu"),  # beside it, the first call's chrF++ would be of WORST
    ):
        arguments = write_columns(tmp_path, predictions)
        measure_scores.main([*arguments, "-m", asked, "--json", table, "--label", label])
    assert json.loads(Path(table).read_text()) == {
        "all": {"BLEU": pytest.approx(100)},
        "seen": {"BLEU": metrics.bleu(REFERENCES, WORSE)},
    }


def test_scores_that_another_process_adds_meanwhile_are_kept(tmp_path, monkeypatch):
    table = tmp_path / "scores.json"

    def score(*_):
        table.write_text('{"seen": {"BLEU": 1.0}}')
        return {"BLEU": 2.0}

    monkeypatch.setattr(measure_scores, "score", score)
    measure_scores.main([*write_columns(tmp_path, WORSE), "-m", "bleu", "--json", str(table)])
    assert json.loads(table.read_text()) == {"seen": {"BLEU": 1.0}, "all": {"BLEU": 2.0}}
    assert not list(tmp_path.glob("*.lock"))


@pytest.mark.parametrize(
    "content",
    ["", "{", "[1]", '{"seen": {}, "all": 1}', "\udcff"],
    ids=["empty", "cut", "list", "flat", "bytes"],
)
def test_foreign_json_file_is_left_alone(tmp_path, monkeypatch, capsys, content):
    monkeypatch.setattr(measure_scores, "score", None)  # which may take minutes, is not reached
    table = tmp_path / "scores.json"
    table.write_bytes(content.encode(errors="surrogateescape"))
    arguments = [*write_columns(tmp_path, WORSE), "-m", "bleu", "--json", str(table)]
    assert f"{table}: exists" in fails(arguments, monkeypatch, capsys)
    assert table.read_bytes() == content.encode(errors="surrogateescape")


@pytest.mark.usefixtures("no_java")
def test_empty_predictions_are_warned_of(tmp_path, caplog):
    measure_scores.main([*write_e2e(tmp_path, [PERFECT[0], " ", ""]), "-m", "bleu"])
    assert caplog.messages == [f"{tmp_path / 'pred.txt'}: 2 of 3 predictions are empty"]


@pytest.mark.parametrize(
    ("references", "predictions", "message"),
    [
        ("a\n\nb\n\n", "a\n", "pred.txt: 1 predictions for 2 rows of references"),
        ("a\nb\n", "a\n\nb\nc\n\n", "give the references first, then the predictions"),
        ("a\n\nb\n", "a\nb\n\nc\n\nd\n\n", "give the references first, then the pred"),
        ("a\n\n\nb\n", "a\n\nb\n\nc\n\nd\n", "give the references first, then the pred"),
        ("a\nb\n", "a\nb\n", "2 predictions for 1 rows of references; "),
        ("a\nb\nc\n", "a\n\nc\n", "3 predictions for 1 rows of references; "),
        ("a\nb\nc\n", "a\nb\nc\n", "/ref.txt needs a blank line after each group\n"),
        ("a\n\nb\n\n", "a\nb\nc\n", "pred.txt: 3 predictions for 2 rows of references\n"),
        ("a\n", "", "pred.txt: 0 predictions for 1 rows of references\n"),
        ("", "a\n", "ref.txt: holds no references"),
        ("\n \n", "a\n", "ref.txt: holds no references"),
        ("a\n\n\nb\n", "a\nb\n", "ref.txt:3: a blank line, but no references before it"),
        ("\na\n", "a\n", "ref.txt:1: a blank line, but no references before it"),
        ("\udcff\n", "a\n", "ref.txt: not text in UTF-8"),
        ("\udcff\udcfea\0", "a\n", "ref.txt: is UTF-16 text; save it as UTF-8"),
        (None, "a\n", "ref.txt"),
        ("a\n", None, "pred.txt"),
    ],
)
def test_bad_e2e_files(tmp_path, monkeypatch, capsys, references, predictions, message):
    paths = tmp_path / "ref.txt", tmp_path / "pred.txt"
    for path, text in zip(paths, (references, predictions), strict=True):
        if text is not None:
            path.write_bytes(text.encode(errors="surrogateescape"))
    table = tmp_path / "scores.json"
    assert message in fails([*map(str, paths), "--json", str(table)], monkeypatch, capsys)
    assert not table.exists()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"reference1": None}, "reference1 (with -nr 3)"),
        ({"reference2": "a\nb\n"}, "reference0 has 3 lines, but "),
        ({"reference2": "a\nb\n"}, "reference2 has 2"),
        ({f"reference{n}": "" for n in range(3)}, "no references"),
        ({f"reference{n}": "a\n\nc\n" for n in range(3)}, "reference0:2: empty, in the other"),
        ({"hypothesis": "a\nb\n"}, "hypothesis: 2 predictions for 3 rows of references"),
        ({f"reference{n}": "a\n" for n in range(3)}, "3 predictions for 1 rows of references\n"),
        ({"hypothesis": None}, "hypothesis"),
    ],
)
def test_bad_files_of_webnlg(tmp_path, monkeypatch, capsys, files, message):
    arguments = write_columns(tmp_path, WORSE)
    for name, text in files.items():
        if text is None:
            (tmp_path / name).unlink()
        else:
            (tmp_path / name).write_text(text)
    table = tmp_path / "scores.json"
    assert message in fails([*arguments, "--json", str(table)], monkeypatch, capsys)
    assert not table.exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["r", "p", "-m", "bleu,bert"], "'bert' for these arguments; known: bleu, nist, meteor"),
        (["-R", "r", "-H", "p", "-m", "nist"], "known: bleu, meteor, ter, chrf++"),
        (["-R", "r", "-H", "p", "-m", ","], "no metric ''"),
        (["-R", "r", "-H", "p", "-nr", "0"], "-nr is 0"),
        (["-R", "r", "-H", "p", "--language", "de"], "-lng: can only be en"),
        (["-R", "r", "-H", "p", "--ncorder", "4"], "-nc: can only be 6"),
        (["-R", "r", "-H", "p", "--nworder", "1"], "-nw: can only be 2"),
        (["-R", "r", "-H", "p", "--beta", "1"], "-b: can only be 2"),
        ([], "give either"),
        (["r"], "give either"),
        (["-R", "r"], "give either"),
        (["r", "p", "-R", "r", "-H", "p"], "give either"),
        (["r", "p", "-H", "p"], "give either"),
        (["r", "-H", "p"], "give either"),
        (["r", "-R", "r"], "give either"),
    ],
)
def test_bad_arguments(monkeypatch, capsys, argv, message):
    assert message in fails(argv, monkeypatch, capsys)


def test_paths_may_begin_with_the_home_folder(tmp_path, monkeypatch, capsys):
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    write_e2e(tmp_path, PERFECT)
    write_columns(tmp_path, PERFECT)
    measure_scores.main(["~/ref.txt", "~/pred.txt", "-m", "bleu", "--json=~/scores.json"])
    flags = ["--reference=~/reference", "--num_refs=3", "--hypothesis=~/pred.txt"]
    measure_scores.main([*flags, "-m", "bleu"])
    out = capsys.readouterr().out
    assert "BLEU: 1.0000" in out
    assert "100.00" in out
    assert (tmp_path / "scores.json").is_file()
    assert str(tmp_path) in fails(["~/none.txt", "~/pred.txt"], monkeypatch, capsys)


@pytest.mark.parametrize("script", ["e2e/measure_scores.py", "GenerationEval/eval.py"])
def test_scripts_under_the_releases_names(tmp_path, monkeypatch, capsys, script):
    arguments = (
        [*write_columns(tmp_path, PERFECT), *["-lng", "en", "-nc", "6", "-nw", "2", "-b", "2"]]
        if script.startswith("Generation")
        else [*write_e2e(tmp_path, PERFECT), "-p"]
    )
    # As when Python starts a script: its folder is first on the path, and nothing is imported.
    others = [entry for entry in sys.path if Path(entry) != EVAL]
    monkeypatch.setattr(sys, "path", [str((EVAL / script).parent), *others])
    monkeypatch.delitem(sys.modules, "measure_scores")
    monkeypatch.setattr(sys, "argv", [script, *arguments, "-m", "bleu"])
    runpy.run_path(str(EVAL / script), run_name="__main__")
    out = capsys.readouterr().out
    assert "100.00" in out if script.startswith("Generation") else out == "BLEU: 1.0000\n"
