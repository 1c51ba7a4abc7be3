"""Which upstream packages there are."""

import sys

import peft

import transformers


def versions() -> dict[str, str]:
    """Their versions; ends the process where transformers is the project's own."""
    if "lora" in transformers.__version__:
        sys.exit("this environment has the project's own transformers, not upstream's")
    return {"transformers": transformers.__version__, "peft": peft.__version__}
