"""Fixtures that the tests of the benchmarks share."""

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from launches import fork_server

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def load_script(monkeypatch):
    """Name of a benchmark -> the script as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load(name):
        spec = importlib.util.spec_from_file_location(
            f"benchmarks_{name}", BENCHMARKS / f"{name}.py"
        )
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def contest(monkeypatch):
    """The module contest.py, which the benchmarks share."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("contest")


@pytest.fixture
def load_worker(monkeypatch):
    """Name of a worker's module -> the module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS / "workers"))
    return importlib.import_module


@pytest.fixture
def fake_worker(monkeypatch, contest):
    """Replaces the workers: each timed batch takes ``seconds_of(plan)``; returns the list of plans.

    The machine has 24 GFLOP/s.
    """

    def install(seconds_of):
        plans = []

        def run_worker(python, name, plan):
            plans.append({"worker_name": name, **plan})
            times = [seconds_of(plan)] * (len(plan["batches"]) - plan["warmup"])
            about = {"versions": {"torch": "2"}, "threads": 2, "gpu": None}
            return {"seconds": times, "peak_bytes": 3 * 2**30, **about}

        monkeypatch.setattr(contest, "run_worker", run_worker)
        monkeypatch.setattr(contest, "matrix_rate", lambda *asked: 24.0)
        return plans

    return install


@pytest.fixture
def read_table():
    """What a script printed -> the rows of its Markdown table, by column title."""

    def read(printed):
        lines = [line.strip("| ") for line in printed.splitlines() if line.startswith("|")]
        titles, _, *rows = ([cell.strip() for cell in line.split("|")] for line in lines)
        return [dict(zip(titles, row, strict=True)) for row in rows]

    return read


@pytest.fixture
def forked_workers(monkeypatch, contest):
    """Makes the workers forks of a process that has done their imports, to save time.

    The machine's rate, which takes seconds, is measured once for each plan.
    """
    run_worker, rates = contest.run_worker, {}

    def run(command, env, **_settings):
        python, *words = map(str, command)
        assert python == sys.executable
        return fork_server("NLU").run(words, env, timeout=300)

    def run_once(python, name, plan):
        if name != "matrix_rate_ours":
            return run_worker(python, name, plan)
        key = json.dumps(plan)
        if key not in rates:
            rates[key] = run_worker(python, name, plan)
        return rates[key]

    monkeypatch.setattr(contest, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(contest, "run_worker", run_once)


@pytest.fixture
def run_quickly(load_script, forked_workers, read_table, capsys):
    """Name of a benchmark, flags -> the table's rows, of a tiny shape and this project alone.

    test_gpt2_beam.py has a run from the command line.
    """

    def run(name, *flags):
        script = load_script(name)
        status = script.contest.main(script.BENCHMARK, ["--quick", "--threads", "1", *flags])
        printed = capsys.readouterr()
        assert status == 0, printed
        return read_table(printed.out)

    return run


@pytest.fixture
def data():
    """The folder of corpora next to the project; skips the test if there is none."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the corpora are not here")
    return folder
