"""Registers the model families of NLU and NLG, for tests of loralib that need them."""

import importlib
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "NLG" / "src"))

importlib.import_module("transformers.models")
importlib.import_module("family")
