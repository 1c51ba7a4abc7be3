"""The functions of file_utils: which packages are installed, enumerations, tensors as lists."""

import importlib.util

import numpy as np
import pytest
import torch

import transformers
from transformers import file_utils
from transformers.file_utils import PaddingStrategy, TensorType, is_tensor, to_py_obj


@pytest.mark.parametrize("name", ["torch", "tokenizers", "sentencepiece", "sklearn", "datasets"])
def test_required_packages_are_available(name):
    assert getattr(transformers, f"is_{name}_available")() is True
    assert importlib.util.find_spec(name) is not None


@pytest.mark.parametrize("name", ["tf", "flax", "torch_tpu"])
def test_unsupported_packages_are_not_available(name):
    assert getattr(transformers, f"is_{name}_available")() is False


@pytest.mark.parametrize("name", ["apex", "faiss", "psutil", "py3nvml"])
def test_optional_packages_are_available_if_installed(name):
    found = importlib.util.find_spec(name) is not None
    assert getattr(file_utils, f"is_{name}_available")() is found


def test_enumerations_equal_their_texts_and_list_known_values():
    assert PaddingStrategy("longest") is PaddingStrategy.LONGEST == "longest"
    assert [each.value for each in TensorType] == ["pt", "np"]
    with pytest.raises(ValueError, match=r"'far' is not a PaddingStrategy \(known: longest, "):
        PaddingStrategy("far")


def test_to_py_obj_turns_tensors_into_lists():
    given = {"a": torch.tensor([1, 2]), "b": [np.array([0.5]), (3, "text")], "c": None}
    assert to_py_obj(given) == {"a": [1, 2], "b": [[0.5], [3, "text"]], "c": None}
    assert [is_tensor(each) for each in (torch.ones(1), np.ones(1), [1.0])] == [True, True, False]
