"""Names of file_utils: what is installed, values of settings, tensors as lists."""

import importlib.util

import numpy as np
import pytest
import torch

import transformers
from transformers import file_utils
from transformers.file_utils import PaddingStrategy, TensorType, is_tensor, to_py_obj


@pytest.mark.parametrize("name", ["torch", "tokenizers", "sentencepiece", "sklearn", "datasets"])
def test_what_the_package_needs_is_there(name):
    assert getattr(transformers, f"is_{name}_available")() is True
    assert importlib.util.find_spec(name) is not None


@pytest.mark.parametrize("name", ["tf", "flax", "torch_tpu"])
def test_what_the_package_has_nothing_of_is_not(name):
    assert getattr(transformers, f"is_{name}_available")() is False


@pytest.mark.parametrize("name", ["apex", "faiss", "psutil", "py3nvml"])
def test_what_may_be_there(name):
    found = importlib.util.find_spec(name) is not None
    assert getattr(file_utils, f"is_{name}_available")() is found


def test_values_of_settings_are_their_texts():
    assert PaddingStrategy("longest") is PaddingStrategy.LONGEST == "longest"
    assert [each.value for each in TensorType] == ["pt", "np"]
    with pytest.raises(ValueError, match=r"'far' is not a PaddingStrategy \(known: longest, "):
        PaddingStrategy("far")


def test_tensors_as_lists():
    given = {"a": torch.tensor([1, 2]), "b": [np.array([0.5]), (3, "text")], "c": None}
    assert to_py_obj(given) == {"a": [1, 2], "b": [[0.5], [3, "text"]], "c": None}
    assert [is_tensor(each) for each in (torch.ones(1), np.ones(1), [1.0])] == [True, True, False]
