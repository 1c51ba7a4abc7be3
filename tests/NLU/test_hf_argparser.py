"""HfArgumentParser: flags from dataclasses, JSON files, and the release's TrainingArguments."""

import json
import re
from dataclasses import dataclass, field, fields
from enum import Enum

import pytest

from transformers import HfArgumentParser, TrainingArguments
from transformers.fine_tuning.arguments import AdaptedModelArguments
from transformers.hf_argparser import flag
from transformers.training_args import default_logdir


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Paint:
    """Flags of every kind."""

    name: str = field(metadata={"help": "100% of what it is called"})
    layers: int = 2
    gloss: float | None = None
    color: Color = Color.RED
    finish: str = field(default="matt", metadata={"help": "its shine", "choices": ["matt", "silk"]})
    tags: list[str] | None = None
    sizes: list[int] = field(default_factory=lambda: [1, 2])
    dry: bool = False
    mixed: bool = True
    checked: bool | None = None
    secret: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ValueError(f"--layers must be at least 1, not {self.layers}")


@dataclass
class Brush:
    """A second dataclass."""

    width: float = flag(3.0, "in mm", least=1, below=50)
    share: float | None = flag(None, "of the paint", least=0, most=1)
    speed: float | None = flag(None, "in m/s", above=0, most=1)
    force: float | None = flag(None, "in N", above=0)
    strokes: int | None = flag(None, "how many", least=1)
    local_rank: int = -1


@pytest.fixture
def parser():
    return HfArgumentParser((Paint, Brush), prog="paint")


def parse(parser, *args):
    return parser.parse_args_into_dataclasses(["--name", "x", *args])[0]


def fails(capsys, function, *args):
    """The one line on stderr with which `function` ends the program."""
    with pytest.raises(SystemExit) as caught:
        function(*args)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("paint: error: ")
    return line


# ---- the command line ----


def test_defaults(parser):
    paint, brush = parser.parse_args_into_dataclasses(["--name", "x"])
    assert paint == Paint("x", color="red")
    assert (paint.layers, paint.gloss, paint.tags, paint.sizes) == (2, None, None, [1, 2])
    assert (paint.dry, paint.mixed, paint.checked, paint.secret) == (False, True, None, 0)
    assert brush == Brush()


def test_default_lists_are_not_shared(parser):
    HfArgumentParser(Paint)
    parse(parser).sizes.append(3)
    assert Paint("x").sizes == [1, 2]


def test_values(parser):
    args = "--name=y --layers 3 --gloss 1e-3 --color blue --finish silk --tags a b --sizes 4"
    more = "--width 2 --local_rank 1"
    paint, brush = parser.parse_args_into_dataclasses([*args.split(), *more.split()])
    assert (paint.name, paint.layers, paint.gloss) == ("y", 3, 0.001)
    assert (paint.color, paint.finish, paint.tags, paint.sizes) == ("blue", "silk", ["a", "b"], [4])
    assert (brush.width, brush.local_rank) == (2.0, 1)


@pytest.mark.parametrize("flag", ["dry", "mixed", "checked"])
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([], True),
        *(([text], True) for text in ("True", "true", "yes", "Y", "t", "1")),
        *(([text], False) for text in ("False", "false", "no", "N", "f", "0")),
    ],
)
def test_bools(parser, flag, value, expected):
    assert getattr(parse(parser, f"--{flag}", *value), flag) is expected
    if value:
        assert getattr(parse(parser, f"--{flag}={value[0]}"), flag) is expected


def test_bools_that_are_true_can_be_switched_off(parser, capsys):
    assert parse(parser, "--no_mixed").mixed is False
    assert parse(parser, "--no_mixed", "--mixed").mixed is True
    for name in ("--no_dry", "--no_checked"):
        assert f"unrecognized arguments: {name}" in fails(capsys, parse, parser, name)


@pytest.mark.parametrize("spelling", ["--local_rank=2", "--local-rank=2"])
def test_both_spellings_of_local_rank(parser, spelling):
    assert parser.parse_args_into_dataclasses(["--name", "x", spelling])[1].local_rank == 2
    args = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", "out", spelling]
    )
    assert args[0].local_rank == 2


def test_one_dataclass():
    (brush,) = HfArgumentParser(Brush).parse_args_into_dataclasses(["--width", "1"])
    assert brush == Brush(1.0)


def test_the_command_line_is_the_default(parser, monkeypatch):
    monkeypatch.setattr("sys.argv", ["paint", "--name", "from argv"])
    assert parser.parse_args_into_dataclasses()[0].name == "from argv"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("", "the following arguments are required: --name"),
        ("--name x --layers two", "argument --layers: invalid int value: 'two'"),
        ("--name x --layers 1.5", "argument --layers: invalid int value: '1.5'"),
        ("--name x --gloss much", "argument --gloss: invalid float value: 'much'"),
        ("--name x --sizes 1 b", "argument --sizes: invalid int value: 'b'"),
        ("--name x --tags", "argument --tags: expected at least one argument"),
        ("--name", "argument --name: expected one argument"),
        ("--name x --dry maybe", "argument --dry: 'maybe' is neither true nor false"),
        ("--name x --color green", "argument --color: invalid choice: 'green'"),
        ("--name x --finish rough", "argument --finish: invalid choice: 'rough'"),
        ("--name x --layer 3", "unrecognized arguments: --layer 3"),
        ("--name x --secret 3", "unrecognized arguments: --secret 3"),
        ("--name x --layers 0", "--layers must be at least 1, not 0"),
        ("--name x --width 50", "--width must lie in [1, 50), not 50.0"),
        ("--name x --width 0.5", "--width must lie in [1, 50), not 0.5"),
        ("--name x --share 1.5", "--share must lie in [0, 1], not 1.5"),
        ("--name x --share nan", "--share must lie in [0, 1], not nan"),
        ("--name x --strokes 0", "--strokes must be at least 1, not 0"),
        ("--name x --speed 0", "--speed must lie in (0, 1], not 0.0"),
        ("--name x --speed 1.5", "--speed must lie in (0, 1], not 1.5"),
        ("--name x --force 0", "--force must be above 0, not 0.0"),
    ],
)
def test_bad_command_lines_are_refused(parser, capsys, args, message):
    line = fails(capsys, parser.parse_args_into_dataclasses, args.split())
    assert message in line
    assert line.endswith("(--help lists the flags)")


def test_included_bounds_are_accepted(parser):
    words = "--name x --width 1 --share 1 --strokes 1 --speed 1 --force 1e-9"
    brush = parser.parse_args_into_dataclasses(words.split())[1]
    assert (brush.width, brush.share, brush.strokes, brush.speed, brush.force) == (1, 1, 1, 1, 1e-9)


class Size(Enum):
    SMALL = 1
    LARGE = 2


@dataclass
class Box:
    closed: bool
    size: Size = Size.SMALL


@pytest.mark.parametrize(
    ("args", "closed"), [("", True), ("--closed", True), ("--closed no", False)]
)
def test_a_bool_without_a_default_is_true(args, closed):
    """As in 4.4."""
    (box,) = HfArgumentParser(Box).parse_args_into_dataclasses(args.split())
    assert box.closed is closed


def test_values_of_an_enum_have_their_type():
    assert HfArgumentParser(Box).parse_args_into_dataclasses(["--size", "2"])[0].size == 2


def test_remaining_strings(parser):
    *_, remaining = parser.parse_args_into_dataclasses(
        ["--name", "x", "--other", "3", "rest"], return_remaining_strings=True
    )
    assert remaining == ["--other", "3", "rest"]
    *_, remaining = parser.parse_args_into_dataclasses(
        ["--name", "x"], return_remaining_strings=True
    )
    assert remaining == []


def test_added_flags_are_in_a_namespace(parser):
    parser.add_argument("--extra", default="e")
    paint, brush, others = parser.parse_args_into_dataclasses(["--name", "x", "--extra", "f"])
    assert (paint.name, brush, vars(others)) == ("x", Brush(), {"extra": "f"})
    assert parser.parse_dict({"name": "x"}) == (paint, brush)


def test_flags_of_a_file(parser, tmp_path, monkeypatch):
    """The file is next to the script, or given by `args_filename`; the command line wins."""
    (tmp_path / "paint.args").write_text("--name file\n--layers 3\n")
    (tmp_path / "other.args").write_text("--name other")
    monkeypatch.setattr("sys.argv", [str(tmp_path / "paint.py"), "--layers", "4"])
    parse_args = parser.parse_args_into_dataclasses
    assert (parse_args()[0].name, parse_args()[0].layers) == ("file", 4)
    assert parse_args([])[0].layers == 3
    assert parse_args([], args_filename=str(tmp_path / "other.args"))[0].name == "other"
    assert parse_args(["--name", "x"], look_for_args_file=False)[0].layers == 2


def test_help(parser, capsys):
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for part in (
        "100% of what it is called",
        "(default: matt)",
        "{red,blue}",
        "Paint",
        "--no_mixed",
        "the same as --mixed False",
    ):
        assert part in text
    HfArgumentParser(TrainingArguments).format_help()


# ---- JSON files ----


def parse_json(parser, tmp_path, content):
    path = tmp_path / "settings.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return parser.parse_json_file(str(path))


def test_values_of_a_json_file(parser, tmp_path):
    values = {
        "name": "-- x = y",
        "layers": 3,
        "gloss": 1e-05,
        "color": "blue",
        "tags": ["a", "b c"],
        "sizes": [7],
        "dry": True,
        "mixed": False,
        "checked": None,
        "width": 2,
    }
    paint, brush = parse_json(parser, tmp_path, values)
    assert (paint.name, paint.layers, paint.gloss, paint.color) == ("-- x = y", 3, 1e-05, "blue")
    assert (paint.tags, paint.sizes) == (["a", "b c"], [7])
    assert (paint.dry, paint.mixed, paint.checked) == (True, False, None)
    assert brush == Brush(2.0)


def test_json_gives_the_same_as_the_command_line(parser, tmp_path):
    assert parse_json(parser, tmp_path, {"name": "x"}) == parser.parse_args_into_dataclasses(
        ["--name", "x"]
    )
    assert parser.parse_dict({"name": "x", "color": Color.BLUE})[0].color == "blue"


@dataclass
class Canvas:
    tags: list[str] = field(default_factory=lambda: ["plain"])
    sizes: list[int] | None = None
    names: dict[str, int] | None = None
    options: dict = field(default_factory=dict)


@pytest.mark.parametrize(
    "values",
    [
        {"tags": []},
        {"tags": ["-a", "--sizes", "--"], "sizes": [-1, 2]},
        {"names": {"-a": 1}, "options": {}},
        {"options": {"a": [1, {"b": None}]}},
    ],
)
def test_json_values_that_no_command_line_could_give(tmp_path, values):
    parser = HfArgumentParser(Canvas, prog="paint")
    assert parse_json(parser, tmp_path, values) == (Canvas(**values),)


def test_json_may_give_one_value_for_a_list(parser):
    assert parser.parse_dict({"name": "x", "tags": "-a"})[0].tags == ["-a"]


def test_an_empty_text_is_a_value_except_in_the_project_s_scripts(parser, tmp_path, capsys):
    assert parse(parser, "--tags", "", "a").tags == ["", "a"]
    assert parser.parse_dict({"name": "", "tags": []})[0].name == ""
    script = HfArgumentParser((Paint, Brush), prog="paint", takes_empty=False)
    for refused in (
        lambda: parse(script, "--tags", "", "a"),
        lambda: parse_json(script, tmp_path, {"name": ""}),
    ):
        with pytest.raises(SystemExit):
            refused()
        assert "the value is empty" in capsys.readouterr().err


def test_json_may_give_a_list_for_one_value(parser):
    paint, _ = parser.parse_dict({"name": ["x"], "layers": [3], "dry": [True]})
    assert (paint.name, paint.layers, paint.dry) == ("x", 3, True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "settings.json: not a JSON file"),
        (b"\xff\xfe\x00", "settings.json: not a JSON file"),
        (b'{"name": ' + b"1" * 5000 + b"}", "settings.json: not a JSON file (Exceeds the limit"),
        ([1], "settings.json: contains a list, not a JSON object"),
        ({}, "the following arguments are required: --name"),
        ({"name": None}, "the following arguments are required: --name"),
        ({"name": "x", "size": 1, "Dry": 2}, "unknown settings: Dry, size"),
        ({"name": "x", "no_mixed": True}, "unknown settings: no_mixed"),
        ({"name": "x", "secret": 1}, "unknown settings: secret"),
        ({"name": "x", "layers": "two"}, "argument --layers: invalid int value: 'two'"),
        ({"name": "x", "layers": 1.5}, "argument --layers: invalid int value: '1.5'"),
        ({"name": "x", "dry": "maybe"}, "argument --dry: 'maybe' is neither true nor false"),
        ({"name": "x", "color": "green"}, "argument --color: invalid choice: 'green'"),
        ({"name": "x", "sizes": [1, "-b"]}, "argument --sizes: invalid int value: '-b'"),
        ({"name": "x", "layers": [1, 2]}, "argument --layers: does not accept a list"),
        ({"name": "x", "mixed": []}, "argument --mixed: does not accept a list"),
        ({"name": "x", "finish": {"a": 1}}, "argument --finish: does not accept a dict"),
        ({"name": "x", "tags": {"a": 1}}, "argument --tags: does not accept a dict"),
        ({"name": "x", "layers": 0}, "--layers must be at least 1, not 0"),
    ],
)
def test_bad_json_is_refused(parser, tmp_path, capsys, content, message):
    assert message in fails(capsys, parse_json, parser, tmp_path, content)


def test_a_missing_json_file_is_refused(parser, capsys):
    line = fails(capsys, parser.parse_json_file, "/no/such/file.json")
    assert "/no/such/file.json: No such file or directory" in line


def test_false_as_a_word_is_false(parser, tmp_path):
    assert parse_json(parser, tmp_path, {"name": "x", "mixed": "false"})[0].mixed is False


# ---- the release's flags ----

ANY = re.compile(".")
INTERVALS = ("no", "steps", "epoch")
# Flag, a text for it, the value that it becomes, the release's default, and its choices if any.
RELEASE_FLAGS = [
    ("overwrite_output_dir", "true", True, False),
    ("do_train", "true", True, False),
    ("do_eval", "true", True, None),
    ("do_predict", "true", True, False),
    ("evaluation_strategy", "epoch", "epoch", "no", INTERVALS),
    ("prediction_loss_only", "true", True, False),
    ("per_device_train_batch_size", "16", 16, 8),
    ("per_device_eval_batch_size", "16", 16, 8),
    ("per_gpu_train_batch_size", "16", 16, None),
    ("per_gpu_eval_batch_size", "16", 16, None),
    ("gradient_accumulation_steps", "2", 2, 1),
    ("eval_accumulation_steps", "2", 2, None),
    ("learning_rate", "5e-4", 5e-4, 5e-05),
    ("weight_decay", "0.1", 0.1, 0.0),
    ("adam_beta1", "0.8", 0.8, 0.9),
    ("adam_beta2", "0.98", 0.98, 0.999),
    ("adam_epsilon", "1e-6", 1e-6, 1e-08),
    ("max_grad_norm", "0.5", 0.5, 1.0),
    ("num_train_epochs", "30", 30.0, 3.0),
    ("max_steps", "100", 100, -1),
    (
        "lr_scheduler_type",
        "cosine",
        "cosine",
        "linear",
        (
            "linear",
            "cosine",
            "cosine_with_restarts",
            "polynomial",
            "constant",
            "constant_with_warmup",
        ),
    ),
    ("warmup_ratio", "0.06", 0.06, 0.0),
    ("warmup_steps", "100", 100, 0),
    ("logging_dir", "log", "log", None),
    ("logging_strategy", "epoch", "epoch", "steps", INTERVALS),
    ("logging_first_step", "true", True, False),
    ("logging_steps", "10", 10, 500),
    ("save_strategy", "epoch", "epoch", "steps", INTERVALS),
    ("save_steps", "10", 10, 500),
    ("save_total_limit", "2", 2, None),
    ("no_cuda", "true", True, False),
    ("seed", "0", 0, 42),
    ("fp16", "true", True, False),
    ("fp16_opt_level", "O2", "O2", "O1"),
    ("fp16_backend", "amp", "amp", "auto", ("auto", "amp", "apex")),
    ("fp16_full_eval", "true", True, False),
    ("local_rank", "0", 0, -1),
    ("dataloader_drop_last", "true", True, False),
    ("eval_steps", "10", 10, None),
    ("dataloader_num_workers", "2", 2, 0),
    ("past_index", "-1", -1, -1),
    ("run_name", "mine", "mine", None),
    ("disable_tqdm", "true", True, None),
    ("remove_unused_columns", "false", False, True),
    ("label_names", "labels", ["labels"], None),
    ("load_best_model_at_end", "false", False, False),
    ("metric_for_best_model", "accuracy", "accuracy", None),
    ("greater_is_better", "true", True, None),
    ("ignore_data_skip", "true", True, False),
    ("label_smoothing_factor", "0.1", 0.1, 0.0),
    ("adafactor", "true", True, False),
    ("group_by_length", "true", True, False),
    ("report_to", "tensorboard", ["tensorboard"], None),
    ("ddp_find_unused_parameters", "true", True, None),
    ("dataloader_pin_memory", "false", False, True),
    ("skip_memory_metrics", "true", True, False),
    ("cls_dropout", "0.15", 0.15, None),
    ("use_deterministic_algorithms", "true", True, False),
]
# Flags for features that this package does not have: a value, and the release's default.
REFUSED_FLAGS = [
    ("tpu_num_cores", "8", None),
    ("tpu_metrics_debug", "true", False),
    ("debug", "true", False),
    ("sharded_ddp", "simple", ""),
    ("deepspeed", "ds_config.json", None),
    ("past_index", "0", -1),
]
# Defaults that TrainingArguments fills in after parsing.
FILLED_IN = {"do_eval": False, "eval_steps": 500, "logging_dir": ANY, "run_name": "out"}
FILLED_IN["report_to"] = ["all"]
FILLED_IN["disable_tqdm"] = True  # captured output is not a terminal


@pytest.fixture(scope="module")
def release_parser():
    return HfArgumentParser(TrainingArguments, prog="paint")


def parse_release(parser, *args):
    return parser.parse_args_into_dataclasses(["--output_dir", "out", *args])[0]


@pytest.mark.parametrize("row", RELEASE_FLAGS, ids=[row[0] for row in RELEASE_FLAGS])
def test_flags_of_the_release(release_parser, capsys, monkeypatch, row):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    name, text, value, default, *choices = row
    assert release_parser.get_default(name) == default
    filled_in = FILLED_IN.get(name, default)
    read = getattr(parse_release(release_parser), name)
    assert filled_in.match(read) if filled_in is ANY else read == filled_in
    assert getattr(parse_release(release_parser, f"--{name}={text}"), name) == value
    for allowed in choices:
        for choice in allowed:
            assert getattr(parse_release(release_parser, f"--{name}", choice), name) == choice
        line = fails(capsys, parse_release, release_parser, f"--{name}", "other")
        assert f"argument --{name}: invalid choice: 'other'" in line


@pytest.mark.parametrize(("name", "text", "default"), REFUSED_FLAGS)
def test_flags_that_have_no_meaning_here_are_refused(release_parser, capsys, name, text, default):
    assert getattr(parse_release(release_parser), name) == default
    line = fails(capsys, parse_release, release_parser, f"--{name}", text)
    assert f"--{name} has no meaning here: " in line


def test_all_flags_of_the_release_are_tested(release_parser, capsys):
    line = fails(capsys, release_parser.parse_args_into_dataclasses, [])
    assert "the following arguments are required: --output_dir" in line
    assert len({row[0] for row in (*RELEASE_FLAGS, *REFUSED_FLAGS)}) == 63
    assert re.fullmatch(r"runs/\w{3}\d\d_\d\d-\d\d-\d\d_.+", default_logdir())


# ---- flags of other programs ----


@pytest.mark.parametrize("group", [AdaptedModelArguments, TrainingArguments])
def test_flags_of_other_programs_are_none_of_ours_and_their_answers_are(group):
    flags = {item.name for item in fields(group)}
    assert not flags & group._other_names.keys()
    named = [answer.split()[0] for answer in group._other_names.values() if answer[:2] == "--"]
    assert {name.removeprefix("--") for name in named} < flags


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ("--use_cpu", "did you mean --no_cuda?"),
        ("--use_lora True", "did you mean --apply_lora?"),
        ("--use_dora", "did you mean --lora_variant dora?"),
        ("--optim adamw_torch", "the optimizer is AdamW, or with --adafactor Adafactor"),
        ("--eval_strategy epoch", "did you mean --evaluation_strategy?"),
    ],
)
def test_flags_of_today_s_transformers_are_answered(capsys, given, answer):
    parser = HfArgumentParser((AdaptedModelArguments, TrainingArguments), prog="paint")
    required = ["--model_name_or_path", "m", "--output_dir", "o"]
    line = fails(capsys, parser.parse_args_into_dataclasses, [*required, *given.split()])
    assert f"unrecognized arguments: {given}; {answer} (" in line
