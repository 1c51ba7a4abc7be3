"""Reads what the config of a model says, such as the `config` of Hugging Face Transformers."""

from typing import Any


def setting_of(config: Any, name: str) -> Any:
    """Returns a setting of a config, or None if it has none of this name.

    A config may be of any class. One whose attributes are its items raises KeyError for others.
    """
    try:
        return getattr(config, name, None)
    except LookupError:
        return None
