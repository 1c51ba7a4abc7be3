"""Reports the versions of the upstream packages."""

import sys

import peft

import transformers


def versions() -> dict[str, str]:
    """Returns the packages' versions; ends the process if transformers is this project's own."""
    if "lora" in transformers.__version__:
        sys.exit("this environment has the project's own transformers, not upstream's")
    return {"transformers": transformers.__version__, "peft": peft.__version__}
