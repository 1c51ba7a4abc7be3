"""Public names of a package's modules as attributes of the package, as in Transformers 4.4.

They are imported on first use, like those of the whole library.
"""

import importlib
from typing import Any


def public_name(package: str, name: str) -> Any:
    """Imports a public name of the library that is defined in a module of `package`.

    Args:
        package: the full name of a package below this library, such as
            ``transformers.models.roberta``.
        name: the name, such as ``RobertaModel``.

    Raises:
        AttributeError: no module of the package defines such a public name.
    """
    library = importlib.import_module(__name__.partition(".")[0])
    home = library.module_of(name)
    if home is None or not f"{library.__name__}{home}".startswith(f"{package}."):
        raise AttributeError(f"module '{package}' has no attribute '{name}'")
    return getattr(library, name)
