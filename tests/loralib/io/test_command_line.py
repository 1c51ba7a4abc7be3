"""The parser of all scripts' flags."""

import pytest

from loralib.io.command_line import ArgumentParser


@pytest.fixture
def parser():
    parser = ArgumentParser(prog="train.py")
    parser.add_argument("--data", required=True)
    parser.add_argument("--lora_rank_pattern", nargs="+")
    return parser


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "the following arguments are required: --data"),
        (["--data", "x", "--lora_r", "3"], "unrecognized arguments: --lora_r 3"),
        (["--data", "x", "--dat", "y"], "unrecognized arguments: --dat y; did you mean --data?"),
        (["--data", "x", "--dtaa=y"], "unrecognized arguments: --dtaa=y; did you mean --data?"),
        (["--data", "x", "--other"], "unrecognized arguments: --other"),
        (["--data", "x", "more"], "unrecognized arguments: more"),
    ],
)
def test_an_error_is_one_line(parser, capsys, flags, says):
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(flags)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"train.py: error: {says} (--help lists the flags)\n"


def test_whole_flags_are_taken(parser):
    assert parser.parse_args(["--data=x", "--lora_rank_pattern", "a=1"]).lora_rank_pattern == [
        "a=1"
    ]


def test_a_script_may_take_abbreviations():
    parser = ArgumentParser(allow_abbrev=True)
    parser.add_argument("--data")
    assert parser.parse_args(["--dat", "x"]).data == "x"
