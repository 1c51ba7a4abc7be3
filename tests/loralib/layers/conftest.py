"""Runs each test for every kind of layer in the table of layer_cases.py."""

import pytest
import torch
from layer_cases import CASES


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]
