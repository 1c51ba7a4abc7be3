"""Fixtures: a model without adapters, and a bank of several adapters on it."""

import pytest
from bank_models import MODELS, TRAINED, base_of, make_adapter

import loralib as lora


@pytest.fixture(params=MODELS, ids=lambda model_class: model_class.__name__.lower())
def model_class(request):
    return request.param


@pytest.fixture
def model(model_class):
    return base_of(model_class)


@pytest.fixture
def bank(model, model_class):
    bank = lora.AdapterBank(model)
    for name in TRAINED:
        bank.add(name, make_adapter(model_class, name))
    yield bank
    bank.close()
