"""Puts the NLG tree's folders on the path, as running its scripts does."""

import dataclasses
import functools
import importlib.util
import json
import random
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

NLG = Path(__file__).resolve().parents[2] / "NLG"


def pytest_configure(config):
    for folder in ("src", "eval"):
        if str(NLG / folder) not in sys.path:
            sys.path.insert(0, str(NLG / folder))


def _load(path: Path) -> ModuleType:
    name = f"nlg_tests_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def encoder_fixture():
    """The module that makes encoder_fixture.json."""
    return _load(Path(__file__).with_name("make_encoder_fixture.py"))


@pytest.fixture(scope="session")
def gpt2_fixture():
    """The module that makes gpt2_fixture.safetensors."""
    return _load(Path(__file__).with_name("make_gpt2_fixture.py"))


@pytest.fixture(scope="session")
def vocab_folder(encoder_fixture, tmp_path_factory):
    """A folder with a tiny vocabulary: ids 0 to 379, and 50256."""
    folder = tmp_path_factory.mktemp("vocab")
    names = ("encoder.json", "vocab.bpe")
    return encoder_fixture.write_vocabulary(folder, *encoder_fixture.tiny_vocabulary(), names)


# ------------------------------------------------------------------------------------------------
# Small GPT-2s to train
# ------------------------------------------------------------------------------------------------


class Trial:
    """A small GPT-2's files and data, and the command line that trains it.

    Args:
        folder: for the files.
        config: a `GPT2Config` with LoRA.
        count: training examples.
    """

    def __init__(self, folder: Path, config: Any, count: int):
        self.folder, self.config = folder, config
        # Some examples are cut by --seq_len, in their completion or even before it.
        self.examples = self._write_examples("train.jsonl", count)
        self.valid_examples = self._write_examples("valid.jsonl", 7)
        self.base = self._write_model("base.pt", 0)
        self.base_with_lora = self._write_model("base_with_lora.pt", config.lora_attn_dim)

    def _write_examples(self, name: str, count: int) -> list[dict[str, list[int]]]:
        draw = random.Random(name)

        def tokens(low: int, high: int) -> list[int]:
            return draw.choices(range(self.config.vocab_size), k=draw.randint(low, high))

        rows = [{"context": tokens(0, 14), "completion": tokens(1, 9)} for _ in range(count)]
        (self.folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return rows

    def _write_model(self, name: str, rank: int) -> Path:
        """With weights far from their start, LoRA's too, so that all of them matter."""
        import torch

        from checkpoints import Base, save_model
        from model import GPT2LMModel

        torch.manual_seed(4)
        model = GPT2LMModel(dataclasses.replace(self.config, lora_attn_dim=rank))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=1.2 * self.config.n_embd**-0.5)
        save_model(self.folder / name, model, Base({}), lora_only=False)
        return self.folder / name

    def flags(self, work_dir: Path, *more: object, lora: bool = True) -> list[str]:
        """What trains: LoRA's part from weights that are no zeros, or all of the model."""
        named = {
            "platform": "local",
            "model_card": "gpt2.xs",
            "train_data": self.folder / "train.jsonl",
            "valid_data": self.folder / "valid.jsonl",
            "train_batch_size": 4,
            "valid_batch_size": 3,
            "seq_len": 12,
            "log_interval": 1,
            "init_checkpoint": self.base_with_lora if lora else self.base,
            "work_dir": work_dir,
        }
        if lora:
            named |= {"lora_dim": self.config.lora_attn_dim}
            named |= {"lora_alpha": self.config.lora_attn_alpha}
        given = [word for name, value in named.items() for word in (f"--{name}", value)]
        return [str(word) for word in (*given, *more)]


@pytest.fixture(scope="session")
def trial(tmp_path_factory):
    """The smallest model card, for subprocesses."""
    from model import config_of

    config = config_of("gpt2.xs", lora_attn_dim=2, lora_attn_alpha=8)
    return Trial(tmp_path_factory.mktemp("trial"), config, 20)


@pytest.fixture(scope="session")
def _tiny_script():
    return _load(Path(__file__).with_name("tiny_gpt2_ft.py"))


@pytest.fixture(scope="session")
def _tiny_trial(_tiny_script, tmp_path_factory):
    config = _tiny_script.tiny_config_of("gpt2.xs", lora_attn_dim=2, lora_attn_alpha=8)
    return Trial(tmp_path_factory.mktemp("tiny"), config, 14)


@pytest.fixture
def tiny(monkeypatch, _tiny_script, _tiny_trial, one_process):
    """A model of milliseconds, which within this process takes the place of the smallest card."""
    import checkpoints

    monkeypatch.setattr(checkpoints, "config_of", _tiny_script.tiny_config_of)
    return _tiny_trial


def _no_bar(tqdm, **settings):
    return tqdm(**{**settings, "disable": True})


@pytest.fixture
def one_process(monkeypatch):
    """gpt2_ft.py runs here: the variables that it sets are put back, the terminal is left alone.

    TensorBoard, which takes seconds to start, is not there.
    """
    import gpt2_ft

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setattr(gpt2_ft, "tqdm", functools.partial(_no_bar, gpt2_ft.tqdm))


@pytest.fixture(scope="session")
def launch():
    """Runs a script on several processes: ``launch(module, script, *arguments)``."""

    def run(module: str, *command: object, processes: int = 2) -> subprocess.CompletedProcess:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        flags = [f"--nproc_per_node={processes}", f"--master_port={port}"]
        return subprocess.run(
            [sys.executable, "-m", module, *flags, *map(str, command)],
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


@pytest.fixture
def launch_tiny(launch, tmp_path):
    """``launch_tiny(module, argv, …)``: gpt2_ft.py on several processes, once for each `argv`.

    With `kill_in_step`, process 1 is killed in that step of the last one.
    """

    def run(module: str, *runs: list[str], kill_in_step: int | None = None, processes: int = 2):
        calls = [{"argv": argv, "kill_in_step": None} for argv in runs]
        calls[-1]["kill_in_step"] = kill_in_step
        (tmp_path / "calls.json").write_text(json.dumps(calls))
        script = Path(__file__).with_name("tiny_gpt2_ft.py")
        return launch(module, script, tmp_path / "calls.json", processes=processes)

    return run


@pytest.fixture(scope="session")
def read_metrics():
    """``read_metrics(work_dir)``: the lines of steps, and those of evaluations."""

    def read(work_dir: Path) -> tuple[list[dict], list[dict]]:
        rows = [json.loads(line) for line in (work_dir / "metrics.jsonl").read_text().splitlines()]
        return [r for r in rows if "loss" in r], [r for r in rows if "valid_loss" in r]

    return read


@pytest.fixture(scope="session")
def plain_trainer():
    """The class `PlainTrainer`."""
    return _load(Path(__file__).with_name("plain_trainer.py")).PlainTrainer


@pytest.fixture
def error_of(capsys):
    """``error_of(argv)``: the one line with which gpt2_ft.py ends, with status 1."""
    import exp_utils
    import gpt2_ft

    def run(argv: list[str]) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            exp_utils.run(lambda: gpt2_ft.main(argv))
        assert end.value.code == 1
        line, end = capsys.readouterr().err.split("\n")
        assert end == ""
        return line

    return run


@pytest.fixture(scope="session")
def files_of():
    """``files_of(folder)``: every file's bytes, and when it was written; but for the lock's."""

    def read(folder: Path) -> dict[str, tuple[bytes, int]]:
        files = [path for path in folder.rglob("*") if path.is_file()]
        return {
            str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
            for path in files
            if not path.name.startswith(".lock")
        }

    return read
