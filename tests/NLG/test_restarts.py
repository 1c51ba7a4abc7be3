"""Tests gpt2_ft.py under a launcher that restarts it: killed runs end bit-exact."""

import json
from pathlib import Path

import pytest
from compare import assert_same_bits
from launches import killed, launch
from paths import HELPERS

from loralib.io.tensors import read_tensors

TINY = HELPERS / "tiny_gpt2_ft.py"
SETTINGS = (
    "--max_epoch 4 --grad_acc 2 --save_interval 2 --eval_interval 3 --lora_dropout 0.3 --lr 0.03 "
    "--train_batch_size 1"
)


@pytest.fixture(scope="module")
def whole(_tiny_trial, tmp_path_factory):
    """``whole(processes)``: the folder of a run that was not interrupted."""
    runs: dict[int, Path] = {}

    def run(processes: int) -> Path:
        if processes not in runs:
            folder = tmp_path_factory.mktemp("whole")
            path = folder / "whole.json"
            argv = _tiny_trial.flags(folder / "whole", *SETTINGS.split())
            path.write_text(json.dumps([{"argv": argv, "kill_in_step": None}]))
            result = launch(processes, TINY, path, tree="NLG")
            assert result.returncode == 0, result.stderr
            runs[processes] = folder / "whole"
        return runs[processes]

    return run


@pytest.fixture
def calls(tiny, tmp_path):
    """``calls(name)``: a file with which tiny_gpt2_ft.py trains into a folder of that name."""

    def write(name: str) -> Path:
        argv = tiny.flags(tmp_path / name, *SETTINGS.split())
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps([{"argv": argv, "kill_in_step": None}]))
        return path

    return write


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("processes", "rank", "at", "count", "forks"),
    [
        (3, 1, "beat", 11, True),  # in a step, or an evaluation
        (3, 0, "sync", 8, True),  # while a checkpoint is written
        (1, 0, "beat", 30, False),
    ],
    ids=["rank 1 in a step", "rank 0 in a write", "alone"],
)
def test_a_run_is_bit_exact_after_a_kill_and_a_restart(
    calls, whole, tmp_path, processes, rank, at, count, forks
):
    mark = tmp_path / "killed"
    command = [*killed(mark, rank, at, count), TINY, calls("out")]
    result = launch(processes, *command, tree="NLG" if forks else None)
    assert result.returncode == 0, result.stderr
    assert mark.exists()
    assert "Traceback" not in result.stderr
    assert "resuming from" in result.stderr
    runs = (tmp_path / "out", whole(processes))
    models, expected = ({path.name for path in run.glob("model.*.pt")} for run in runs)
    assert models == expected
    for name in models:
        ours, theirs = (read_tensors(run / name)[0] for run in runs)
        assert_same_bits(ours, theirs)
    figures = [
        [
            {k: v for k, v in json.loads(line).items() if k != "tokens_per_second"}
            for line in (run / "metrics.jsonl").read_text().splitlines()
        ]
        for run in runs
    ]
    assert figures[0] == figures[1]


@pytest.mark.distributed
def test_a_run_that_was_refused_is_refused_again_after_a_restart(calls, tiny, tmp_path):
    """The restart must not take the folder's finished run for its own."""
    done = launch(1, TINY, calls("out"), tree="NLG")
    assert done.returncode == 0, done.stderr
    argv = tiny.flags(tmp_path / "out", *SETTINGS.split(), "--lr", "0.5")
    path = tmp_path / "other.json"
    path.write_text(json.dumps([{"argv": argv, "kill_in_step": None}]))
    refused = launch(1, TINY, path, restarts=1, tree="NLG")
    assert refused.returncode != 0
    # Once for each start, and once in the launcher's table of failures.
    assert refused.stderr.count("holds models of another run") == 2 + 1


@pytest.mark.distributed
def test_a_process_that_hangs(calls, tmp_path):
    """A process is stopped: the run ends after --ddp_timeout, and names the process."""
    call = json.loads(calls("out").read_text())
    call[0]["argv"] += ["--ddp_timeout", "15"]
    (tmp_path / "out.json").write_text(json.dumps(call))
    mark = tmp_path / "stopped"
    kill = killed(mark, 1, "beat", 9, signal="SIGSTOP")
    result = launch(3, *kill, TINY, tmp_path / "out.json", restarts=0, tree="NLG")
    assert mark.exists()
    assert result.stderr.count("process 1 of 3 hangs: nothing for 15 s") == 1
    assert result.returncode != 0


@pytest.mark.distributed
def test_machines_that_do_not_share_the_folder(calls, tiny, tmp_path):
    """Simulated by two processes with different folders."""
    seen = {}
    for rank in (0, 1):
        argv = tiny.flags(tmp_path / f"out{rank}", *SETTINGS.split())
        (tmp_path / f"out{rank}").mkdir()
        seen[str(rank)] = [{"argv": argv, "kill_in_step": None}]
    script = tmp_path / "each.py"
    script.write_text(
        f"import json, os, runpy, sys\n"
        f"calls = json.loads({json.dumps(seen)!r})[os.environ['RANK']]\n"
        f"path = {str(tmp_path)!r} + '/' + os.environ['RANK'] + '.json'\n"
        f"open(path, 'w').write(json.dumps(calls))\n"
        f"sys.argv = [{str(TINY)!r}, path]\n"
        f"runpy.run_path({str(TINY)!r}, run_name='__main__')\n"
    )
    result = launch(2, script, restarts=0, tree="NLG")
    assert result.returncode != 0
    assert "is not the same folder for process 1 (on " in result.stderr
    assert result.stderr.count("Traceback") == 1  # the launcher's own
    assert not list(tmp_path.glob("out*/.shared.*"))
