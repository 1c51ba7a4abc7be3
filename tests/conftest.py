"""What all tests share: a home of their own for downloads and caches, and one thread each."""

import importlib
import os
import tempfile

import pytest


def pytest_configure(config):
    # Before anything is imported that reads these. Subprocesses inherit them.
    home = tempfile.TemporaryDirectory(prefix="lora-tests-")
    config.add_cleanup(home.cleanup)
    for name in [name for name in os.environ if name.startswith(("HF_", "TRANSFORMERS_"))]:
        del os.environ[name]
    os.environ["HF_HOME"] = home.name
    # Tests are small: more threads only wait for each other, most of all with several processes.
    os.environ["OMP_NUM_THREADS"] = "1"


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
