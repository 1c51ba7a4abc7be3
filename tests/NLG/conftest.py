"""Puts the NLG tree's folders on the path, as running its scripts does."""

import functools
import importlib
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from gpt2_trial import Trial
from launches import run_launcher
from paths import HELPERS, ROOT

NLG = ROOT / "NLG"


# At import: the helpers of the folders' own conftest.py files import the scripts.
for folder in ("src", "eval"):
    if str(NLG / folder) not in sys.path:
        sys.path.insert(0, str(NLG / folder))


@pytest.fixture(scope="session")
def encoder_fixture():
    """The module that makes encoder_fixture.json."""
    return importlib.import_module("make_encoder_fixture")


@pytest.fixture(scope="session")
def gpt2_fixture():
    """The module that makes gpt2_fixture.safetensors."""
    return importlib.import_module("make_gpt2_fixture")


@pytest.fixture(scope="session")
def vocab_folder(encoder_fixture, tmp_path_factory):
    """A folder with a tiny vocabulary: ids 0 to 379, and 50256."""
    folder = tmp_path_factory.mktemp("vocab")
    names = ("encoder.json", "vocab.bpe")
    return encoder_fixture.write_vocabulary(folder, *encoder_fixture.tiny_vocabulary(), names)


# ------------------------------------------------------------------------------------------------
# Small GPT-2s to train
# ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def trial(tmp_path_factory):
    """Files and data of the smallest model card, for subprocesses."""
    from model import config_of

    config = config_of("gpt2.xs", lora_attn_dim=2, lora_attn_alpha=8)
    return Trial(tmp_path_factory.mktemp("trial"), config, 20)


@pytest.fixture(scope="session")
def _tiny_script():
    return importlib.import_module("tiny_gpt2_ft")


@pytest.fixture(scope="session")
def _tiny_trial(_tiny_script, tmp_path_factory):
    config = _tiny_script.tiny_config_of("gpt2.xs", lora_attn_dim=2, lora_attn_alpha=8)
    return Trial(tmp_path_factory.mktemp("tiny"), config, 14)


@pytest.fixture
def tiny(monkeypatch, _tiny_script, _tiny_trial, one_process):
    """A model that trains in milliseconds and replaces the smallest card within this process."""
    import checkpoints

    monkeypatch.setattr(checkpoints, "config_of", _tiny_script.tiny_config_of)
    return _tiny_trial


def _no_bar(tqdm, *values, **settings):
    return tqdm(*values, **{**settings, "disable": True})


@pytest.fixture
def one_process(monkeypatch):
    """Lets gpt2_ft.py run in this process: restores its environment variables, shows no bars.

    TensorBoard and matplotlib, which take seconds to import, count as missing.
    """
    import gpt2_ft
    import metrics_log

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setattr(metrics_log, "is_matplotlib_available", lambda: False)
    monkeypatch.setattr(gpt2_ft, "tqdm", functools.partial(_no_bar, gpt2_ft.tqdm))


@pytest.fixture(scope="session")
def launch():
    """``launch(module, script, *arguments)``: runs a script on several processes by a launcher.

    With `forks`, they and the launcher are forks; see `run_launcher`.
    """

    def run(
        module: str, *command: object, processes: int = 2, forks: bool = False
    ) -> subprocess.CompletedProcess:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        flags = [f"--nproc_per_node={processes}", f"--master_port={port}"]
        return run_launcher(module, *flags, *command, tree="NLG" if forks else None, timeout=120)

    return run


@pytest.fixture
def launch_tiny(launch, tmp_path):
    """``launch_tiny(module, argv, …)``: gpt2_ft.py on several processes, once for each `argv`.

    With `kill_in_step`, process 1 is killed in that step of the last run. `other` are further
    differences of process 1 in the last run, see tiny_gpt2_ft.py.
    """

    def run(
        module: str,
        *runs: list[str],
        kill_in_step: int | None = None,
        processes: int = 2,
        **other: object,
    ):
        calls = [{"argv": argv, "kill_in_step": None} for argv in runs]
        calls[-1] |= {"kill_in_step": kill_in_step, **other}
        (tmp_path / "calls.json").write_text(json.dumps(calls))
        script = HELPERS / "tiny_gpt2_ft.py"
        return launch(module, script, tmp_path / "calls.json", processes=processes, forks=True)

    return run


@pytest.fixture(scope="session")
def read_metrics():
    """``read_metrics(work_dir)``: the lines of metrics.jsonl for steps, and for evaluations."""

    def read(work_dir: Path) -> tuple[list[dict], list[dict]]:
        rows = [json.loads(line) for line in (work_dir / "metrics.jsonl").read_text().splitlines()]
        return [r for r in rows if "loss" in r], [r for r in rows if "valid_loss" in r]

    return read


@pytest.fixture(scope="session")
def plain_trainer():
    """The class `PlainTrainer`."""
    return importlib.import_module("plain_trainer").PlainTrainer


@pytest.fixture
def error_of(capsys):
    """``error_of(argv)``: the error line of gpt2_ft.py, which must end with status 1."""
    import gpt2_ft
    import script

    def run(argv: list[str]) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            script.run(lambda: gpt2_ft.main(argv))
        assert end.value.code == 1
        line, end = capsys.readouterr().err.split("\n")
        assert end == ""
        return line

    return run


@pytest.fixture(scope="session")
def files_of():
    """``files_of(folder)``: each file's bytes and time of writing, except for the lock's."""

    def read(folder: Path) -> dict[str, tuple[bytes, int]]:
        files = [path for path in folder.rglob("*") if path.is_file()]
        return {
            str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
            for path in files
            if not path.name.startswith(".lock")
        }

    return read
