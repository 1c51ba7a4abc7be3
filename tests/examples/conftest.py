"""What the tests of examples/ share: its scripts as modules."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="session")
def load_example() -> Callable[[str], ModuleType]:
    """Imports examples/<name>, a script's path, as a module."""

    def load(name: str) -> ModuleType:
        path = EXAMPLES / name
        module_name = f"examples_{path.stem}"
        spec = importlib.util.spec_from_file_location(module_name, path)
        module = importlib.util.module_from_spec(spec)
        # Dataclasses look their module up.
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
        return module

    return load
