"""Every script ends with one line of error that says what is wrong with its input.

Each row of a table is a wrong input: a command line, and a part of the message. Scripts in `CALLS`
run in this process, as `python script.py` runs them; those in `PROCESSES` and `SHELLS` run in a
process of their own. {bad} is a folder of files that are wrong in one way each, {good} a folder of
valid files. Messages are compared without the paths of these two.
"""

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import wrong_calls_examples
import wrong_calls_nlg
import wrong_calls_utils
from launches import preloaded_python
from paths import ROOT
from wrong_files import write_bad, write_good

pytestmark = pytest.mark.slow

TABLES = (wrong_calls_examples, wrong_calls_nlg, wrong_calls_utils)
CALLS = {script: rows for table in TABLES for script, rows in table.CALLS.items()}
COMMON = wrong_calls_examples.COMMON | wrong_calls_nlg.COMMON
# A script with its arguments, and a part of its message.
PROCESSES = [
    (
        "utils/download_glue_data.py --tasks MRPC --path_to_mrpc nowhere --data_dir out",
        "ERROR: MRPC: nowhere/msr_paraphrase_train.txt: no such file (from --path_to_mrpc)",
    ),
    (
        "utils/download_glue_data.py --tasks SST-2 --data_dir {bad}/empty",
        "download_glue_data.py: error: {bad}/empty: is a file, where a folder is needed",
    ),
    (
        "NLU/recipe.py roberta_base_rte --small nowhere nowhere",
        "roberta_base_rte.sh: error: --small nowhere: no such folder",
    ),
    (
        "NLU/recipe.py roberta_base_rte --small nowhere",
        "roberta_base_rte.sh: error: argument --small: expected 2 arguments",
    ),
    ("NLU/recipe.py nothing", "invalid choice: 'nothing'"),
    (
        "NLG/eval/GenerationEval/eval.py -R nowhere -H nowhere -nr 1",
        "eval.py: error: no such file: nowhere0 (with -nr 1)",
    ),
    (
        "NLG/eval/e2e/measure_scores.py {good}/references {bad}/three_lines",
        "measure_scores.py: error: {bad}/three_lines: 3 predictions for 1 rows of references",
    ),
    (
        "NLG/src/gpt2_encode.py --input {bad}/list.jsonl --vocab {good}/base --output out",
        "gpt2_encode.py: error: {bad}/list.jsonl:1: not a JSON object: [1]",
    ),
    (
        "examples/make_small_data.py --output_dir {bad}/empty",
        "make_small_data.py: error: {bad}/empty/SST-2: Not a directory",
    ),
    (
        "examples/text-classification/run_glue.py --model_name_or_path {bad}/zero_heads "
        "--task_name rte --data_dir {good}/glue --do_train --output_dir out",
        "zero_heads/config.json: num_attention_heads must be a positive integer, not 0",
    ),
]
# The same for shell scripts, with variables of their environment.
SHELLS = [
    ("NLU/roberta_base_sst2.sh", {"NPROC": "none"}, "NPROC=none: must be a number of processes"),
    (
        "NLG/e2e_gpt2_md.sh",
        {},
        "e2e_gpt2_md.sh: error: pretrained_checkpoints/gpt2-medium-pytorch_model.bin does not exist"
        "; make it with: ",
    ),
]


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A folder of valid files."""
    return write_good(tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="module")
def bad(good, tmp_path_factory) -> Path:
    """A folder of files that are wrong in one way each."""
    return write_bad(tmp_path_factory.mktemp("bad"), good)


def error_lines(text: str) -> list[str]:
    """The lines with an error, without the usage that argparse prints before its errors."""
    assert "Traceback" not in text
    without_usage = re.sub(r"^usage: .*\n(?:\s.*\n)*", "", text, flags=re.MULTILINE)
    return [line for line in without_usage.splitlines() if "error" in line.lower()]


@pytest.fixture
def call(monkeypatch, tmp_path, capsys):
    """Runs a script as `python script.py` does; returns its stderr and its exit status."""

    def run(script: str, arguments: list[str]) -> tuple[str, int]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str((ROOT / script).parent))
        monkeypatch.setattr(sys, "argv", [str(ROOT / script), *arguments])
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        handler = signal.getsignal(signal.SIGTERM)
        capsys.readouterr()
        try:
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(str(ROOT / script), run_name="__main__")
        finally:
            signal.signal(signal.SIGTERM, handler)
        if isinstance(ended.value.code, str):  # Python prints it and exits with 1
            return capsys.readouterr().err + ended.value.code, 1
        return capsys.readouterr().err, ended.value.code

    return run


ROWS = [(script, *row) for script, rows in CALLS.items() for row in rows]


@pytest.mark.parametrize(("script", "arguments", "message"), ROWS)
def test_wrong_input_gives_one_line_of_error(call, good, bad, tmp_path, script, arguments, message):
    given = f"{COMMON.get(script, '')} {arguments}".replace("{rte}", wrong_calls_examples.RTE)
    given = given.replace("{own}", wrong_calls_examples.OWN)
    given = given.format(good=good, bad=bad)
    before = sorted([*good.rglob("*"), *bad.rglob("*")])
    stderr, status = call(script, given.split())
    assert status in (1, 2)
    (line,) = error_lines(stderr)
    assert line.startswith(f"{Path(script).name}: error: ")
    assert message in line.replace(f"{bad}/", "").replace(f"{good}/", "")
    # Nothing was written, except perhaps an empty folder for the output.
    assert sorted([*good.rglob("*"), *bad.rglob("*")]) == before
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.name[0] != "."] == []


def failing_line(command: list, folder: Path, **environment: str) -> str:
    """Runs a command that must fail, and returns its one line with an error."""
    home = {name: os.environ[name] for name in ("PATH", "HF_HOME", "HOME") if name in os.environ}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**home, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stdout
    (line,) = error_lines(done.stderr)
    return line


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "message"), PROCESSES)
def test_a_process_prints_one_line_of_error(good, bad, tmp_path, arguments, message):
    script, *flags = (word.format(good=good, bad=bad) for word in arguments.split())
    line = failing_line([preloaded_python(), ROOT / script, *flags], tmp_path)
    assert message.format(good=good, bad=bad) in line


@pytest.mark.slow
@pytest.mark.parametrize(("script", "environment", "message"), SHELLS)
def test_a_recipe_prints_one_line_of_error(tmp_path, script, environment, message):
    copy = tmp_path / script.partition("/")[0]
    # Files downloaded next to the recipe are not part of the test.
    ignored = shutil.ignore_patterns("pretrained_checkpoints", "data", "vocab", "trained_models")
    shutil.copytree(ROOT / copy.name, copy, ignore=ignored)
    # The recipe has to find this Python: another one may lack the project and fail for that.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**environment, "PATH": path, "PYTHONPATH": str(ROOT)}
    assert message in failing_line(["bash", tmp_path / script], copy, **environment)


@pytest.mark.parametrize("shell", ["bash", "sh"])
@pytest.mark.parametrize("script", ["quickstart.sh", "NLG/quickstart_e2e.sh"])
def test_quickstarts_with_arguments_do_not_run(tmp_path, script, shell):
    (tmp_path / "script.sh").write_bytes((ROOT / script).read_bytes())
    for flag, status, says in (("--help", 0, "From nothing to a"), ("--bf16", 2, "no arguments")):
        done = subprocess.run(
            [shell, tmp_path / "script.sh", flag], capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == status
        assert says in done.stdout + done.stderr
        assert "#" not in done.stdout


@pytest.mark.parametrize("named", ["E2E", "VOCAB"])
def test_a_quickstart_given_one_folder_needs_the_other_too(tmp_path, named):
    """It fails before it moves or replaces the output of an earlier run.

    Nor does it follow an exported CDPATH to another project's folder of the same name.
    """
    script = tmp_path / "NLG" / "quickstart_e2e.sh"
    elsewhere = tmp_path / "another project"
    earlier = script.parent / "quickstart_output"
    folders = {"E2E": tmp_path / "corpus", "VOCAB": tmp_path / "words"}
    files = {"E2E": ("valid.txt", "test.txt"), "VOCAB": ("encoder.json", "vocab.bpe")}
    environment = tmp_path / "utils" / "make_environment.sh"
    activate = tmp_path / ".venv" / "bin" / "activate"
    made = (earlier, *folders.values(), environment.parent, activate.parent, elsewhere / "NLG")
    for folder in made:
        folder.mkdir(parents=True)
    for path in (environment, activate, *(folders[named] / name for name in files[named])):
        path.touch()
    script.write_bytes((ROOT / "NLG/quickstart_e2e.sh").read_bytes())
    others = {name: value for name, value in os.environ.items() if name not in folders}
    done = subprocess.run(
        ["bash", "NLG/quickstart_e2e.sh"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**others, named: str(folders[named]), "CDPATH": str(elsewhere)},
    )
    assert (done.returncode, done.stdout) == (1, "")
    # Only files of the other folder are missing, which has its default path.
    other = "vocab/encoder.json vocab/vocab.bpe" if named == "E2E" else "data/e2e/valid.txt"
    assert f"error: no such files: {other} " in done.stderr
    assert str(folders[named]) not in done.stderr
    assert done.stderr.endswith("where E2E or VOCAB is set, both are needed\n")
    assert earlier.is_dir()


def test_every_shell_script_can_be_run_and_follows_no_exported_cdpath():
    """With a CDPATH, `cd NLG` goes to another folder of that name, and prints its path."""
    patterns = ("*.sh", "utils/*.sh", "NLU/*.sh", "NLG/*.sh", "NLG/*/*.sh")
    scripts = {path: path.read_text("utf-8") for pattern in patterns for path in ROOT.glob(pattern)}
    assert len(scripts) > 30
    assert [path for path, text in scripts.items() if re.search(r"^ *cd ", text, re.M)] == []
    to_run = [path for path, text in scripts.items() if text.startswith("#!")]
    assert [path for path in to_run if not os.access(path, os.X_OK)] == []


@pytest.mark.parametrize(
    ("script", "says", "refuses"),
    [
        ("utils/make_environment.sh", "[--with-tests]", True),
        ("NLG/eval/download_evalscript.sh", "what METEOR, ROUGE-L and CIDEr need", True),
        ("NLG/create_datasets.sh", "e2e [webnlg] [dart]", False),
        ("NLG/download_data.sh", "E2E, WebNLG 2017 and DART into data; or only what", False),
        ("NLG/download_pretrained_checkpoints.sh", "small, medium and large into pre", False),
        ("run_tests.sh", "arguments go to pytest", False),
    ],
)
def test_scripts_given_help_or_unknown_flags_do_not_run(tmp_path, script, says, refuses):
    path = tmp_path / script
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((ROOT / script).read_bytes())

    def call(flag: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "PYTHON": "none",
        }  # installs nothing if it runs
        return subprocess.run(
            ["bash", path, flag], capture_output=True, text=True, cwd=tmp_path, env=environment
        )

    for flag in ("--help", "-h"):
        done = call(flag)
        assert (done.returncode, done.stderr) == (0, "")
        assert says in done.stdout
        assert "#" not in done.stdout
    if refuses:
        done = call("--with-test")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert f"{path.name}: error: takes " in done.stderr
        assert "--with-test\n" in done.stderr


def test_the_tables_have_every_script_and_at_least_40_messages():
    scripts = {*CALLS, *(row[0].split()[0] for row in PROCESSES)}
    assert len({message for _, _, message in ROWS}) >= 40
    entries = [
        path.relative_to(ROOT)
        for folder in ("examples", "utils", "NLG/src", "NLG/eval", "NLU")
        for path in (ROOT / folder).rglob("*.py")
        if "transformers" not in path.parts and '__name__ == "__main__"' in path.read_text("utf-8")
    ]
    others = {"examples/quickstart_summary.py", "NLG/src/download.py"}
    assert {entry.as_posix() for entry in entries} - others == scripts
