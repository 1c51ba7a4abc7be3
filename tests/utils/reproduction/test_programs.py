"""Tests how a run is executed: what is kept when its program ends, fails or is interrupted."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launches import fork_server
from paths import ROOT

from reproduction import programs
from reproduction.runs import problem_of

FINISHES = """mkdir -p {output} && echo '{{"all": {{"BLEU": 0.5}}}}' > {output}/scores.json"""


@pytest.fixture
def program(nlg, monkeypatch):
    """Replaces the recipes by a shell script."""

    def set_to(text: str) -> None:
        def command(run):
            script = text.format(output=shlex.quote(str(run.output)))
            return ["bash", "-c", script, "bash"], {"SEED": str(run.seed)}

        monkeypatch.setattr(nlg, "command", command)

    return set_to


def test_a_run(nlg, run, program):
    program(FINISHES + "; echo seed $SEED, port $MASTER_PORT, $(which python), flags $*")
    run.folder.mkdir(parents=True)
    run.error.write_text("of an earlier attempt")
    programs.execute(nlg, run, ["--bf16", "a b"])
    assert nlg.figures(run) == (50.0,)
    assert problem_of(nlg, run) is None
    assert not run.error.exists()
    printed = run.log.read_text()
    assert printed.startswith("seed 110, port ")
    assert printed.endswith(f"{Path(sys.executable).parent / 'python'}, flags --bf16 a b\n")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "echo 'gpt2_ft.py: error: no base'; echo 'a.b.ChildFailedError: '; echo ====; exit 1",
            "gpt2_ft.py: error: no base",
        ),
        ("echo '  some last words'; echo '----'; exit 3", "some last words"),
        ("exit 1", "it printed nothing"),
        ("kill -KILL $$", "killed by SIGKILL"),
        ("echo done", "done"),
    ],
    ids=["error", "words", "silent", "killed", "no results"],
)
def test_a_run_that_fails(nlg, run, program, text, error):
    program("echo 'x.py: error: an earlier one'; exit 1")
    programs.execute(nlg, run, [])
    program(text)
    programs.execute(nlg, run, [])
    assert problem_of(nlg, run) == f"failed: {error}"
    program(FINISHES)
    programs.execute(nlg, run, [])
    assert problem_of(nlg, run) is None


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("Traceback:\n[rank0]: KeyError: 'x'\nW1 elastic: Sending\n", "[rank0]: KeyError: 'x'"),
        (
            "torch.OutOfMemoryError: CUDA\nx.errors.ChildFailedError: \n",
            "torch.OutOfMemoryError: CUDA",
        ),
        ("roberta_base_rte.sh: error: no file\n", "roberta_base_rte.sh: error: no file"),
        (
            "50%|#\r60%|##\rrun_glue.py: error (process 1): two\nend\n",
            "run_glue.py: error (process 1): two",
        ),
        ("Some Errors: none\nlast\n", "last"),
        ("\n====\n", None),
    ],
)
def test_last_error_returns_the_line_with_the_error(log, line):
    assert programs.last_error(log) == line


def test_an_interrupted_run_is_ended_and_unfinished(nlg, run, program, tmp_path):
    program(f"echo $$ > '{tmp_path}/pid'; sleep 0.3; kill -INT $PPID; sleep 60")
    # Programs that a shell starts in the background ignore SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            programs.execute(nlg, run, [])
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert problem_of(nlg, run).startswith("unfinished")


def test_a_process_that_a_run_leaves_behind_keeps_its_folder_locked(nlg, run, program, tmp_path):
    program(f"sleep 60 & echo $! > '{tmp_path}/pid'; exit 1")
    programs.execute(nlg, run, [])
    with pytest.raises(ValueError, match="another program is using it"):
        programs.execute(nlg, run, [])
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    program("echo again; exit 1")
    for _ in range(50):
        try:
            programs.execute(nlg, run, [])
            break
        except ValueError:  # the process is still ending
            time.sleep(0.05)
    assert run.log.read_text() == "again\n"


def test_an_estimate_is_what_the_recipe_prints(nlg, run, program, capfd):
    program("echo seed $SEED, flags $*")
    assert programs.show_estimate(nlg, run, ["--bf16"]) == 0
    assert capfd.readouterr().out == "seed 110, flags --bf16 --estimate\n"
    assert not run.folder.exists()
    program("exit 3")
    assert programs.show_estimate(nlg, run, []) == 3


def test_a_lock_leaves_nothing_if_nothing_is_written(tmp_path):
    with pytest.raises(KeyError), programs.lock_folder(tmp_path / "new" / "run"):
        raise KeyError
    assert not list(tmp_path.iterdir())
    (tmp_path / "there").mkdir()
    with programs.lock_folder(tmp_path / "there"):
        pass
    assert not list((tmp_path / "there").iterdir())
    with programs.lock_folder(tmp_path / "new" / "run"):
        (tmp_path / "new" / "run" / "log.txt").touch()
    assert (tmp_path / "new" / "run" / "log.txt").exists()


# ---- on Windows ----

# The standard library has no fcntl there. loralib decides by the system's name whether to import
# it, so here loralib has to be imported before fcntl is removed.
WITHOUT_FCNTL = """
import runpy, sys
import loralib.io.atomic
sys.modules["fcntl"] = None
sys.path.insert(0, "utils")
sys.argv = ["reproduce.py", *sys.argv[1:]]
runpy.run_path("utils/reproduce.py", run_name="__main__")
"""


@pytest.mark.slow
def test_help_works_where_nothing_can_be_run(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ["-c", WITHOUT_FCNTL]
    helped = subprocess.run([sys.executable, *words, "--help"], capture_output=True, text=True)
    assert (helped.returncode, helped.stderr) == (0, "")
    folder = tmp_path / "new"
    for more in (["--small", "roberta_base_sst2"], ["--study"]):
        flags = [*more, "--output_dir", str(folder)]
        ended = fork_server("others").run([*words, *flags], os.environ, timeout=300)
        assert ended.returncode == 1
        assert ended.stderr.splitlines()[-1].endswith(
            "error: on Windows, run this in WSL: see docs/installing.md"
        )
