"""What the tests of examples/ share: its scripts as modules."""

from collections.abc import Callable
from types import ModuleType

import pytest
from paths import load_script


@pytest.fixture(scope="session")
def load_example() -> Callable[[str], ModuleType]:
    """Imports examples/<name>, a script's path, as a module."""
    return lambda name: load_script(f"examples/{name}")
