"""Paths of the project's folders, and its scripts as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

HELPERS = Path(__file__).resolve().parent
FIXTURES = HELPERS.with_name("fixtures")
ROOT = HELPERS.parents[1]
# Corpora and recorded results, if they are next to the project.
SHARED = ROOT.parent / "shared"


def load_script(path: str | Path) -> ModuleType:
    """Imports a script of the project as a module, without running its `main`.

    Args:
        path: from the project's root, or absolute.
    """
    path = ROOT / path
    name = f"script_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
