"""What all tests share: a home of their own for downloads and caches, one thread each, no GPU.

A test that is about a GPU is marked `gpu`; `pytest -m gpu` runs those alone, and hides none.
"""

import importlib
import importlib.util
import os
import tempfile
from pathlib import Path

import pytest

SEEN_GPUS = pytest.StashKey[dict[str, str]]()


def pytest_configure(config):
    # Before anything is imported that reads these. Subprocesses inherit them.
    home = tempfile.TemporaryDirectory(prefix="lora-tests-")
    config.add_cleanup(home.cleanup)
    for name in [name for name in os.environ if name.startswith(("HF_", "TRANSFORMERS_"))]:
        del os.environ[name]
    os.environ["HF_HOME"] = home.name
    # Tests are small: more threads only wait for each other, most of all with several processes.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # What the tests of a CPU expect does not depend on what else the machine has.
    name = "CUDA_VISIBLE_DEVICES"
    config.stash[SEEN_GPUS] = {name: os.environ[name]} if name in os.environ else {}
    if config.option.markexpr != "gpu":
        os.environ[name] = ""


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU that is not hidden: pytest -m gpu")


@pytest.fixture
def seeing_gpus(pytestconfig):
    """The environment for a subprocess that sees the GPUs which the tests were started with."""
    kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return kept | pytestconfig.stash[SEEN_GPUS]


@pytest.fixture
def hub_server(tmp_path):
    """A started local hub: `.root` for repositories, `.environment(home)` for a subprocess."""
    path = Path(__file__).with_name("hub_server.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    root = tmp_path / "hub"
    root.mkdir()
    with module.HubServer(root) as server:
        yield server


@pytest.fixture
def drawn_masks(monkeypatch):
    """The list that every dropout mask drawn from here on goes to: what elements are scaled by."""
    import torch

    module, drawn = importlib.import_module("loralib.dropout"), []
    draw = module.keep_mask

    def record(shape, p):
        mask = draw(shape, p)
        drawn.append(module.apply_mask(torch.ones(shape), mask, p))
        return mask

    monkeypatch.setattr(module, "keep_mask", record)
    return drawn
