"""A model folder's file names, JSON files, what is installed, and the base class of outputs."""

import copy
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cached_property  # noqa: F401 - importable from here, too
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from torch import Tensor

from loralib.io.hub import is_offline_mode, resolve_file  # noqa: F401 - importable from here, too
from loralib.training.reports import is_installed

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "pytorch_model.bin"
SAFE_WEIGHTS_NAME = "model.safetensors"
WEIGHTS_INDEX_NAME = "pytorch_model.bin.index.json"
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"
MODEL_CARD_NAME = "modelcard.json"
SPIECE_UNDERLINE = SENTENCEPIECE_UNDERLINE = "▁"


# ---- JSON files ----


def read_json_object(path: str | os.PathLike) -> dict[str, Any]:
    """Reads the object in a JSON file.

    Raises:
        OSError: the file is missing or damaged, or holds something else.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also of a number with too many digits
        raise OSError(f"{path}: not a JSON file ({error})") from error
    if not isinstance(values, dict):
        raise OSError(f"{path}: contains a {type(values).__name__}, not a JSON object")
    return values


# ---- what is installed ----


def is_torch_available() -> bool:
    """Returns True: this package needs PyTorch."""
    return True


def is_tokenizers_available() -> bool:
    """Returns True: this package needs tokenizers."""
    return True


def is_sentencepiece_available() -> bool:
    """Returns True: this package needs SentencePiece."""
    return True


def is_sklearn_available() -> bool:
    """Returns True: this package needs scikit-learn."""
    return True


def is_datasets_available() -> bool:
    """Returns True: this package needs datasets."""
    return True


def is_tf_available() -> bool:
    """Returns False, installed or not: this package has no TensorFlow models."""
    return False


def is_flax_available() -> bool:
    """Returns False, installed or not: this package has no Flax models."""
    return False


def is_torch_tpu_available() -> bool:
    """Returns False: this package does not train on TPUs."""
    return False


def is_apex_available() -> bool:
    """Returns whether apex is installed."""
    return is_installed("apex")


def is_faiss_available() -> bool:
    """Returns whether faiss is installed."""
    return is_installed("faiss")


def is_psutil_available() -> bool:
    """Returns whether psutil is installed."""
    return is_installed("psutil")


def is_py3nvml_available() -> bool:
    """Returns whether py3nvml is installed."""
    return is_installed("py3nvml")


# ---- values of settings ----


class ExplicitEnum(str, Enum):
    """The possible values of a setting; each equals its string."""

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        known = ", ".join(item.value for item in cls)
        raise ValueError(f"{value!r} is not a {cls.__name__} (known: {known})")


class PaddingStrategy(ExplicitEnum):
    """The possible values of a tokenizer's `padding`."""

    LONGEST = "longest"
    MAX_LENGTH = "max_length"
    DO_NOT_PAD = "do_not_pad"


class TensorType(ExplicitEnum):
    """The possible values of a tokenizer's `return_tensors`."""

    PYTORCH = "pt"
    NUMPY = "np"


# ---- tensors ----


def is_tensor(x: Any) -> bool:
    """Returns whether x is a tensor or an array."""
    return isinstance(x, Tensor | np.ndarray)


def to_py_obj(obj: Any) -> Any:
    """Converts tensors and arrays to lists of numbers, inside dicts and lists as well."""
    if isinstance(obj, Mapping):
        return {name: to_py_obj(value) for name, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [to_py_obj(value) for value in obj]
    return obj.tolist() if is_tensor(obj) else obj


# ---- outputs ----


def _refused(method: str) -> Callable[..., NoReturn]:
    """Returns a stand-in for a dict's method that would change entries but not attributes."""

    def refuse(self: "ModelOutput", *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} has no {method}: set its fields one by one, or to None to take "
            "one out"
        )

    refuse.__doc__ = (
        "Raises TypeError: only setting fields keeps attributes, keys and items in step."
    )
    return refuse


class ModelOutput(OrderedDict):
    """A model's output: a dataclass whose set fields are also dict entries and a tuple's items.

    ``output.logits``, ``output["logits"]`` and ``output[1]`` are the same tensor. Fields that are
    None are skipped in the dict and in the tuple. A field can be set by attribute or by entry, and
    removed by setting it to None. A name that is not a field comes after the fields. All other ways
    to change a dict raise TypeError.

    A dict, or pairs (name, value), as the only argument gives the fields' values.
    """

    def __post_init__(self) -> None:
        first, *others = self.__dataclass_fields__
        given = getattr(self, first)
        if isinstance(given, Tensor | None) or any(getattr(self, n) is not None for n in others):
            return
        values = _named(given)
        if values:
            setattr(self, first, None)
            for name, value in values.items():
                setattr(self, name, value)

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
        if order != list(self):  # usually they are in order; torch.compile cannot move them
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
        """Returns a shallow copy, with the same tensors."""
        return copy.copy(self)

    def to_tuple(self) -> tuple:
        """Returns the set fields, in the order of their declaration."""
        return tuple(self.values())


def _named(given: Any) -> dict[str, Any]:
    """Returns the values in a dict or in pairs (name, value) as a dict; {} if it is neither."""
    if isinstance(given, Mapping):
        return dict(given)
    pairs = given if isinstance(given, list | tuple) else ()
    if pairs and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        return dict(pairs) if all(isinstance(name, str) for name, _ in pairs) else {}
    return {}
