"""Names of a model folder's files, and the base class of what models return."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn

from loralib.io.hub import is_offline_mode, resolve_file  # noqa: F401 - importable from here, too

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "pytorch_model.bin"
SAFE_WEIGHTS_NAME = "model.safetensors"
WEIGHTS_INDEX_NAME = "pytorch_model.bin.index.json"
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"


def _refused(method: str) -> Callable[..., NoReturn]:
    """A method of dicts that would change the entries behind the attributes' back."""

    def refuse(self: "ModelOutput", *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} has no {method}: set its fields one by one, or to None to take "
            "one out"
        )

    refuse.__doc__ = "Refused: only setting a field keeps attributes, entries and items in step."
    return refuse


class ModelOutput(OrderedDict):
    """What a model returns: a dataclass whose set fields are also dict entries and a tuple's items.

    ``output.logits``, ``output["logits"]`` and ``output[1]`` name the same tensor; fields that are
    None are skipped in the dict and in the tuple. A field can be set by attribute or by entry, and
    with None be taken out again; a name that is not a field comes after the fields. All other ways
    to change a dict are refused with a TypeError.
    """

    def __getitem__(self, key: str | int | slice) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if value is not None:
            is_new = name not in self
            super().__setitem__(name, value)
            if is_new:
                self._put_in_order()
        elif name in self:
            super().__delitem__(name)

    def _put_in_order(self) -> None:
        declared = list(getattr(self, "__dataclass_fields__", ()))
        places = {name: place for place, name in enumerate(declared)}
        order = sorted(self, key=lambda name: places.get(name, len(declared)))
        if order != list(self):  # as a rule they come in order; torch.compile cannot move them
            for name in order:
                super().move_to_end(name)

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self, key, value)

    __delitem__ = _refused("del")
    __delattr__ = _refused("del")
    __ior__ = _refused("|=")
    clear = _refused("clear")
    move_to_end = _refused("move_to_end")
    pop = _refused("pop")
    popitem = _refused("popitem")
    setdefault = _refused("setdefault")
    update = _refused("update")

    def __or__(self, other: dict) -> dict:
        return {**self, **other}

    def __ror__(self, other: dict) -> dict:
        return {**other, **self}

    def copy(self) -> "ModelOutput":
        """Another of the same tensors."""
        return copy.copy(self)

    def to_tuple(self) -> tuple:
        """The set fields, in the order of their declaration."""
        return tuple(self.values())
