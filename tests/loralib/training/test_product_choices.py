"""Which way large products are computed in: measured once a machine, and kept with a run."""

import json

import pytest
import torch
from torch import nn

import loralib as lora
from loralib.nn import products
from loralib.training.precision import Precision
from loralib.training.product_choices import choose_products, frozen_weights
from loralib.training.resume import restore

KEYS = {"float32 512 -> 1024 + bias", "float32 1024 -> 512 transposed"}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The file that choices are kept in; nothing is chosen yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(products, "_chosen", {})
    return tmp_path / "loralib" / "products.json"


@pytest.fixture
def measured(monkeypatch):
    """The products that are measured, by key; "plain" is the fastest."""
    asked = []
    monkeypatch.setattr(
        products, "_fastest", lambda *given: asked.append(products._key(*given)) or "plain"
    )
    return asked


def model():
    """A layer with LoRA, one that is trained, one that is small, and one that is no such layer."""
    layers = nn.Sequential(
        lora.Linear(512, 1024, r=4),
        products.Linear(512, 1024),
        products.Linear(8, 8).requires_grad_(False),
        nn.Linear(512, 2048).requires_grad_(False),
    )
    assert layers[1].weight.requires_grad
    return layers


def test_a_machine_is_measured_once(cache, measured):
    choose_products(frozen_weights(model()), torch.float32, world_size=1)
    assert set(measured) == KEYS
    assert products.choices()["ways"] == dict.fromkeys(KEYS, "plain")
    assert json.loads(cache.read_text()) == {products.machine(): dict.fromkeys(KEYS, "plain")}
    products._chosen.clear()
    choose_products(frozen_weights(model()), torch.float32, world_size=1)
    assert len(measured) == len(KEYS)
    assert products.choices()["ways"] == dict.fromkeys(KEYS, "plain")


def test_a_frozen_weight_may_be_packed(cache, monkeypatch):
    if not products._has_onednn(torch.float32):
        pytest.skip("PyTorch is built without oneDNN here")
    ways = {way: name for name, way in products._WAYS.items()}
    monkeypatch.setattr(products, "_seconds", lambda way, *_: float(ways[way] != "packed"))
    choose_products(frozen_weights(model()), torch.float32, world_size=1)
    assert products.choices()["ways"] == dict.fromkeys(KEYS, "packed")


def test_what_other_machines_chose_is_kept(cache, measured):
    cache.parent.mkdir()
    cache.write_text(json.dumps({"another": {"key": "packed"}}))
    choose_products(frozen_weights(model()), torch.float32, world_size=1)
    written = json.loads(cache.read_text())
    assert written == {"another": {"key": "packed"}, products.machine(): products.choices()["ways"]}


def test_a_damaged_cache_is_written_anew(cache, measured, caplog):
    cache.parent.mkdir()
    cache.write_text("{")
    choose_products(frozen_weights(model()), torch.float32, world_size=1)
    assert f"{cache} cannot be read" in caplog.text
    assert json.loads(cache.read_text()).keys() == {products.machine()}


def test_without_a_place_to_write_the_run_goes_ahead(cache, measured, caplog):
    cache.parent.write_text("a file where a folder should be")
    choose_products(frozen_weights(model()), torch.float32, world_size=1)
    assert f"{cache} cannot be" in caplog.text
    assert products.choices()["ways"].keys() == KEYS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_choices_are_part_of_a_checkpoint(cache, dtype):
    chosen = {"machine": products.machine(), "ways": {"some product": "blocks"}}
    products.use_choices(chosen)
    before = Precision(dtype, "cpu")
    state = before.state_dict()
    products._chosen.clear()
    after = Precision(dtype, "cpu")
    after.load_state_dict(state)
    assert products.choices() == chosen
    assert after.state_dict() == state


def test_a_checkpoint_with_other_choices_is_no_damage(cache):
    plain_run = Precision(torch.float32, "cpu").state_dict()
    chosen = {"machine": products.machine(), "ways": {"some product": "blocks"}}
    products.use_choices(chosen)
    restore(Precision(torch.float32, "cpu"), plain_run)
    assert products.choices()["ways"] == {}
