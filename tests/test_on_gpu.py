"""GPUs are hidden from all tests except those marked `gpu`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from paths import HELPERS


def run(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=Path(__file__).parents[1],
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_gpus_are_hidden_from_tests_and_their_subprocesses():
    assert not torch.cuda.is_available()
    code = "import torch; print(torch.cuda.device_count())"
    assert run("-c", code, environment=dict(os.environ)).stdout.strip() == "0"


SEEN = """
import os, pytest
from pathlib import Path

@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_seen(kind, environment_with_gpus):
    name = "CUDA_VISIBLE_DEVICES"
    with Path(__file__).with_name("seen.txt").open("a") as file:
        print(kind, os.environ.get(name), environment_with_gpus.get(name), file=file)
"""
# Stands in for torch: any visible device counts as a GPU; has the settings that conftest.py resets.
TORCH = """
import os
from types import SimpleNamespace

utils = SimpleNamespace(deterministic=SimpleNamespace())

def use_deterministic_algorithms(mode):
    pass

class cuda:
    is_available = staticmethod(lambda: os.environ.get("CUDA_VISIBLE_DEVICES") != "")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "given"),
    [
        *(((), given) for given in (None, "", "3,5")),
        *((("-m", "gpu"), given) for given in (None, "", "3,5")),
        (("-m", "not gpu"), "3,5"),
        (("-n", "1"), None),
        (("-n", "1"), "3,5"),
    ],
)
def test_gpus_are_visible_to_gpu_tests_and_to_subprocesses_that_ask(tmp_path, given, flags):
    (tmp_path / "test_seen.py").write_text(SEEN)
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "conftest.py").write_text(Path(__file__).with_name("conftest.py").read_text())
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    environment |= {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
    settings = ("-c", str(Path(__file__).parents[1] / "pyproject.toml"), "--rootdir", str(tmp_path))
    settings += ("-o", f"pythonpath={tmp_path} {HELPERS}")
    result = run("-m", "pytest", *settings, *flags, str(tmp_path), environment=environment)
    assert result.returncode == 0, result.stdout
    seen = tmp_path / "seen.txt"
    found = seen.read_text().splitlines() if seen.exists() else []
    if flags == ("-m", "gpu"):
        assert found == ([] if given == "" else [f"cuda {given} {given}"])
    else:
        assert found == [f"cpu  {given}"]


@pytest.mark.slow
def test_all_gpu_tests_pass(environment_with_gpus):
    """Runs the tests marked `gpu`, in a process of their own, if there is a GPU."""
    found = run(
        "-c", "import torch; print(torch.cuda.device_count())", environment=environment_with_gpus
    )
    if int(found.stdout) == 0:
        pytest.skip("there is no GPU")
    result = run("-m", "pytest", "-rs", "-m", "gpu", environment=environment_with_gpus)
    assert result.returncode == 0, result.stdout
    skipped = [line for line in result.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all(int(found.stdout) < 2 and "needs two GPUs" in line for line in skipped)
