"""Tests of the parser of all scripts' flags."""

import math
import os
import re
from pathlib import Path

import pytest

from loralib.io.command_line import (
    ArgumentParser,
    check_bounds,
    layers_of_words,
    pattern_of_words,
    summary,
)

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def parser():
    parser = ArgumentParser(prog="train.py")
    parser.add_argument("--data", required=True)
    parser.add_argument("--lora_rank_pattern", nargs="+")
    return parser


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "the following arguments are required: --data"),
        (
            ["--data", "x", "--lora_r", "3"],
            "unrecognized arguments: --lora_r 3; did you mean --lora_rank_pattern?",
        ),
        (["--data", "x", "--dat", "y"], "unrecognized arguments: --dat y; did you mean --data?"),
        (["--data", "x", "--dtaa=y"], "unrecognized arguments: --dtaa=y; did you mean --data?"),
        (["--data", "x", "--other"], "unrecognized arguments: --other"),
        (["--data", "x", "more"], "unrecognized arguments: more"),
    ],
)
def test_a_parsing_error_is_one_line(parser, capsys, flags, message):
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(flags)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"train.py: error: {message} (--help lists the flags)\n"


@pytest.mark.parametrize(
    ("unknown", "meant"),
    [
        ("--lora_rank", "--lora_r"),
        ("--lora-r", "--lora_r"),
        ("--alpha", "--lora_alpha"),
        ("--rank", "--lora_r, --local_rank, --prefix_dim, --lora_rank_pattern"),
        ("--lr", "--lora_r, --local_rank, --learning_rate"),
        ("--learnin_rate", "--learning_rate"),
        ("--lora_rank_ptatern", "--lora_rank_pattern"),
        ("--prefix_dimm", "--prefix_dim"),
        ("--lora_dim", "--lora_r"),
        ("--batch_size", "--eval_batch_size, --train_batch_size"),
        ("--eval_strategy", "--evaluation_strategy"),
        ("--epochs", "--num_train_epochs"),
        ("--target_modules", "--lora_targets"),
        ("--nproc", ""),
        ("--", ""),
        ("-", ""),
    ],
)
def test_similar_flags_are_suggested_for_an_unknown_one(parser, capsys, unknown, meant):
    parser.add_argument("--local_rank", "--local-rank")
    for flag in (
        *("--lora_r", "--lora_alpha", "--lora_targets", "--learning_rate", "--num_train_epochs"),
        *("--train_batch_size", "--eval_batch_size", "--evaluation_strategy"),
        *("--prefix_dim", "--prefix_dir"),
    ):
        parser.add_argument(flag)
    with pytest.raises(SystemExit):
        parser.refuse([unknown])
    hint = f"; did you mean {meant}?" if meant else ""
    assert f"unrecognized arguments: {unknown}{hint} (" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("unknown", "answer"),
    [
        (["--use_cpu"], "; did you mean --no_cuda?"),
        (["--use-cpu=1"], "; did you mean --no_cuda?"),
        (["--optim", "adam"], "; the optimizer is AdamW"),
        (["--optim=adam", "--use_cpu", "--dat"], "; did you mean --no_cuda, --data?; the optim"),
        (["--use_gpu"], " ("),
    ],
)
def test_other_programs_flags_are_answered(capsys, unknown, answer):
    names = {"use_cpu": "--no_cuda", "optim": "the optimizer is AdamW"}
    parser = ArgumentParser(prog="train.py", other_names=names)
    for flag in ("--no_cuda", "--option", "--data"):
        parser.add_argument(flag)
    with pytest.raises(SystemExit):
        parser.parse_args(unknown)
    assert f"unrecognized arguments: {' '.join(unknown)}{answer}" in capsys.readouterr().err


def test_complete_flags_are_parsed(parser):
    assert parser.parse_args(["--data=x", "--lora_rank_pattern", "a=1"]).lora_rank_pattern == [
        "a=1"
    ]


def test_a_leading_tilde_is_the_home_folder(parser, monkeypatch):
    parser.add_argument("--out", type=Path)
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, "home")
    args = parser.parse_args(["--data=~/x", "--lora_rank_pattern", "~", "a~/b", "~x", "--out=~/y"])
    assert args.data == os.path.join("home", "x").replace("\\", "/")
    assert args.lora_rank_pattern == ["home", "a~/b", "~x"]
    assert args.out == Path("home/y")


def test_a_home_folder_that_is_unknown_is_no_folder_named_by_a_tilde(capsys, monkeypatch):
    """As without HOME for a user without an entry in the password file."""
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    parser = ArgumentParser()
    parser.add_argument("--out")
    with pytest.raises(SystemExit):
        parser.parse_args(["--out", "~/y"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "argument --out: ~: the user's home folder is unknown: set HOME" in line


@pytest.mark.parametrize("flags", [["--lora_path", ""], ["--lora_path="], ["--ranks", "1", ""]])
def test_an_empty_value_is_refused(parser, capsys, flags):
    """Such as in ``--lora_path "$LORA"`` if LORA is not set."""
    parser.add_argument("--lora_path")
    parser.add_argument("--ranks", nargs="+")
    with pytest.raises(SystemExit):
        parser.parse_args(["--data", "x", *flags])
    (line,) = capsys.readouterr().err.splitlines()
    reason = "the value is empty (an unset shell variable?): give one, or leave it out"
    assert f"argument {flags[0].rstrip('=')}: {reason}" in line


def test_an_empty_value_is_accepted_if_it_is_the_default(parser):
    parser.add_argument("--only", default="")
    assert parser.parse_args(["--data", "x"]).only == ""
    assert parser.parse_args(["--data", "x", "--only", ""]).only == ""


def test_takes_empty_accepts_empty_values():
    parser = ArgumentParser(takes_empty=True)
    parser.add_argument("--prefix")
    assert parser.parse_args(["--prefix", ""]).prefix == ""


def test_given_holds_the_flags_on_the_command_line(parser):
    """Also flags with their default value, but not defaults that argparse parses as text."""
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default="3")
    assert parser.parse_args(["--data", "x", "--rate=0.5"]).steps == 3
    assert parser.given == {"data", "rate"}


def test_scripts_read_their_flags_by_this_parser():
    """With argparse's own, ``--output_dir=~/run`` would make a folder named ~."""
    folders = ("loralib", "NLU", "NLG", "examples", "utils", "benchmarks")
    found = [path for name in folders for path in (ROOT / name).rglob("*.py")]
    others = [path.name for path in found if "argparse.ArgumentParser(" in path.read_text("utf-8")]
    assert others == ["recipe.py"]  # which reports it if loralib is not installed


def test_allow_abbrev_accepts_abbreviations():
    parser = ArgumentParser(allow_abbrev=True)
    parser.add_argument("--data")
    assert parser.parse_args(["--dat", "x"]).data == "x"


@pytest.mark.parametrize(
    "text", ["-1e-5", "-1E+5", "-1.5e3", "-.5e-3", "-3.", "-2", "-0.5", "-inf"]
)
def test_negative_numbers_are_values(parser, text):
    parser.add_argument("--threshold", type=float)
    parser.add_argument_group("more").add_argument("--pair", type=float, nargs="+")
    args = parser.parse_args(["--data", "x", "--threshold", text, "--pair", "1", text])
    assert (args.threshold, args.pair) == (float(text), [1, float(text)])


@pytest.mark.parametrize("text", ["-e5", "-1x", "-info", "--1e-5", "-1e", "-"])
def test_only_numbers_may_be_values_with_a_leading_minus(parser, capsys, text):
    parser.add_argument("--threshold", type=float)
    with pytest.raises(SystemExit):
        parser.parse_args(["--data", "x", "--threshold", text])
    assert "argument --threshold: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bounds", "within", "outside", "rule"),
    [
        ({"least": 1}, [1, 2, math.inf, None], [0, -1, math.nan], "be at least 1"),
        ({"above": 0}, [1e-9, None], [0, -1, math.nan], "be above 0"),
        ({"least": 0, "below": math.inf}, [0, 1e30], [-1, math.nan], "be at least 0"),
        ({"least": 0, "below": math.inf}, [], [math.inf], "be finite"),
        ({"least": 1}, [2**62], [2**62 + 1, 10**400], f"be at most {2**62}"),
        ({"least": 0, "below": 1}, [0, 0.9], [-0.1, 1, math.nan], "lie in [0, 1)"),
        ({"above": 0, "most": 1}, [0.1, 1], [0, 1.1, math.inf, math.nan], "lie in (0, 1]"),
    ],
)
def test_numbers_out_of_bounds_are_refused(bounds, within, outside, rule):
    for value in within:
        check_bounds("--number", value, **bounds)
    for value in outside:
        message = re.escape(f"--number must {rule}, not {value}")
        with pytest.raises(ValueError, match=f"^{message}$"):
            check_bounds("--number", value, **bounds)


def test_help_states_each_default_once(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    parser = ArgumentParser(prog="run.py", usage="run.py")
    parser.add_argument("path", help="the data")
    for flag, options in {
        "--steps": {"type": int, "default": 7, "help": "how many"},
        "--seed": {"type": int, "default": 0, "help": "the seed"},
        "--folder": {"default": "here", "help": "where; default: the data's"},
        "--name": {"default": "", "help": "a name"},
        "--base": {"help": "a model"},
        "--half": {"action": "store_true", "help": "half precision"},
    }.items():
        parser.add_argument(flag, **options)
    lines = [re.split(r"\s{2,}", line)[-1] for line in parser.format_help().splitlines()]
    texts = ["how many (default: 7)", "the seed (default: 0)", "where; default: the data's"]
    assert lines[-6:] == [*texts, "a name", "a model", "half precision"]


@pytest.mark.parametrize(
    ("description", "lines"),
    [
        ("Many words. " * 20, None),
        (
            "A line.\n\n    a long command" + " x" * 99,
            ["A line.", "", "    a long command" + " x" * 99],
        ),
    ],
)
def test_help_keeps_the_lines_of_a_description_that_has_several(monkeypatch, description, lines):
    monkeypatch.setenv("COLUMNS", "80")
    said = ArgumentParser(prog="run.py", usage="run.py", description=description).format_help()
    if lines is None:
        assert max(map(len, said.splitlines())) <= 80
    else:
        assert said.splitlines()[2:5] == lines


def test_the_summary_is_a_docstrings_first_line():
    assert summary("Does it.\n\n    At length.") == "Does it."
    assert summary(None) is None


def test_patterns_of_words():
    words = ["query=4", "layer.*.value=2", "a=b=3"]
    assert pattern_of_words("--rank", int, words) == {"query": 4, "layer.*.value": 2, "a=b": 3}
    assert pattern_of_words("--alpha", float, ["q=0.5"]) == {"q": 0.5}


@pytest.mark.parametrize(
    "words", [["query"], ["=4"], ["query=four"], ["query=1.5"], ["q=1", "q=1"]]
)
def test_words_that_are_not_a_pattern_are_refused(words):
    with pytest.raises(ValueError, match=r"^--rank"):
        pattern_of_words("--rank", int, words)


def test_layers_of_words():
    assert layers_of_words("--layers", ["6-8", "0", "7"]) == [0, 6, 7, 8]
    for word in ("8-6", "a", "-1", "1.5", ""):
        with pytest.raises(ValueError, match=r"^--layers"):
            layers_of_words("--layers", [word])
