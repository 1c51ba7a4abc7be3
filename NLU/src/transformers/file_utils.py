"""Names of a model folder's files, and the base class of what models return."""

from collections import OrderedDict
from dataclasses import fields

from loralib.hub import is_offline_mode, resolve_file  # noqa: F401 - importable from here, too

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "pytorch_model.bin"
SAFE_WEIGHTS_NAME = "model.safetensors"
WEIGHTS_INDEX_NAME = "pytorch_model.bin.index.json"
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"


class ModelOutput(OrderedDict):
    """What a model returns: a dataclass whose set fields are also dict entries and a tuple's items.

    ``output.logits``, ``output["logits"]`` and ``output[1]`` name the same tensor; fields that are
    None are skipped in the dict and in the tuple.
    """

    def __getitem__(self, key):
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if value is None:
            self.pop(name, None)
        else:
            super().__setitem__(name, value)

    def __setitem__(self, key, value):
        setattr(self, key, value)

    def to_tuple(self) -> tuple:
        """The set fields, in the order of their declaration."""
        return tuple(self[field.name] for field in fields(self) if field.name in self)
