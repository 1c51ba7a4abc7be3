"""Puts the NLG tree's folders on the path, as running its scripts does."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

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


@pytest.fixture
def hub_server(tmp_path):
    """A started local hub: `.environment(home)` for a subprocess, `.root` for repositories."""
    root = tmp_path / "hub"
    root.mkdir()
    with _load(Path(__file__).parents[1] / "NLU" / "hub_server.py").HubServer(root) as server:
        yield server
