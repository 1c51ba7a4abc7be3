"""Each test runs for every kind of layer of the table."""

import pytest
import torch
from layer_cases import CASES


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]
