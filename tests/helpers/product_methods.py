"""Ways to multiply that are chosen for products of any size, as if they had been measured."""

import pytest

from loralib.nn import products
from loralib.training import product_choices


class Ways:
    """What a machine finds the fastest, which may be another on another day.

    Args:
        patch: undoes it.
        folder: the user's cache.
    """

    def __init__(self, patch: pytest.MonkeyPatch, folder):
        self._patch = patch
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setattr(products, "_LARGE", 1)
        patch.setattr(products, "_LARGE_OF_FEW", 1)

    def fastest(self, method: str) -> None:
        """From here on, `method` is; nothing that was measured before is known."""
        self._patch.setattr(products, "_chosen", {})
        self._patch.setattr(product_choices, "_chosen_before", {})
        self._patch.setattr(product_choices, "_read", lambda path: {})
        self._patch.setattr(products, "_fastest", lambda *given: method)

    @staticmethod
    def in_use() -> set[str]:
        """Those of all products for which there is a choice."""
        return set(products.choices()["methods"].values())
