"""tests/loralib/make_peft_fixture.py, as a module: it knows its file, and reads it."""

import importlib.util
from pathlib import Path

_PATH = Path(__file__).parents[1] / "loralib" / "make_peft_fixture.py"
_SPEC = importlib.util.spec_from_file_location(_PATH.stem, _PATH)
MAKER = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(MAKER)
