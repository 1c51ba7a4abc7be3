"""Makes products of any size choose a linear method, as if it had been measured."""

import pytest

from loralib.nn import products
from loralib.training import product_choices


class ChosenMethods:
    """Sets the method that a measurement finds to be the fastest, which may differ between runs.

    Args:
        patch: pytest's monkeypatch, which undoes it.
        folder: the folder of the user's cache.
    """

    def __init__(self, patch: pytest.MonkeyPatch, folder):
        self._patch = patch
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setattr(products, "_LARGE", 1)
        patch.setattr(products, "_LARGE_OF_FEW", 1)

    def fastest(self, method: str) -> None:
        """Makes `method` the fastest from here on, and forgets earlier measurements."""
        self._patch.setattr(products, "_chosen", {})
        self._patch.setattr(product_choices, "_chosen_before", {})
        self._patch.setattr(product_choices, "_read", lambda path: {})
        self._patch.setattr(products, "_fastest", lambda *given: method)

    @staticmethod
    def in_use() -> set[str]:
        """The methods that products use now."""
        return set(products.choices()["methods"].values())
