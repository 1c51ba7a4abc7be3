"""DeBERTa-v2."""

from typing import Any

from ..public_names import public_name


def __getattr__(name: str) -> Any:
    return public_name(__name__, name)
