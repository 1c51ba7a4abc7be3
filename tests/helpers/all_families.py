"""Registers the families of both trees, for tests of the library that are about them."""

import importlib
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "NLG" / "src"))

importlib.import_module("transformers.models")
importlib.import_module("family")
