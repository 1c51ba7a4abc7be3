"""Tests of choosing methods for large products: measured once per machine, kept with a run."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from torch import nn

import loralib as lora
from loralib.nn import processor, products
from loralib.nn.linear_methods import METHODS
from loralib.training import product_choices
from loralib.training.precision import Precision
from loralib.training.product_choices import choose_products, chosen_products, frozen_weights
from loralib.training.resume import restore

KEYS = {"float32 512 -> 1024 + bias", "float32 1024 -> 512 transposed"}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The file in which choices are kept; no method is chosen yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(products, "_chosen", {})
    monkeypatch.setattr(product_choices, "_chosen_before", {})
    return tmp_path / "loralib" / "products.json"


@pytest.fixture
def measured(monkeypatch):
    """The keys of the products that were measured; "plain" is the fastest."""
    keys = []
    monkeypatch.setattr(
        products, "_fastest", lambda *given: keys.append(products._key(*given[:3])) or "plain"
    )
    return keys


@pytest.mark.parametrize(
    ("dtype", "has_bfloat16", "method", "is_logged"),
    [
        (torch.bfloat16, True, "float32", True),
        (torch.bfloat16, True, "plain", False),
        (torch.bfloat16, False, "plain", True),  # nothing is measured then
        (torch.float32, False, "plain", False),
    ],
)
def test_the_log_says_once_where_bfloat16_saves_no_time(
    cache, measured, monkeypatch, caplog, dtype, has_bfloat16, method, is_logged
):
    monkeypatch.setattr(processor, "has_bfloat16", lambda: has_bfloat16)
    monkeypatch.setattr(products, "_fastest", lambda *given: method)
    monkeypatch.setattr(products, "_fastest_of_batches", lambda *given: "plain")
    product_choices._say_that_it_is_slow.cache_clear()
    with caplog.at_level("INFO"):
        choose_products(frozen_weights(model()), dtype, world_size=1)
        choose_products(frozen_weights(model()), dtype, world_size=1)
    assert caplog.text.count("bfloat16 saves memory here, but not time") == is_logged


@pytest.mark.parametrize("is_alike", [True, False])
def test_other_processes_use_the_first_one_s_choices(cache, measured, monkeypatch, is_alike):
    """On another kind of machine, they use the defaults."""
    methods = dict.fromkeys(KEYS, "blocks")
    first = {"machine": products.machine() if is_alike else "another", "methods": methods}
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(product_choices, "gather_objects", lambda own, _: [first, own])
    products.use_choices({"machine": products.machine(), "methods": dict.fromkeys(KEYS, "plain")})
    choose_products(frozen_weights(model()), torch.float32, world_size=2)
    assert products.choices()["methods"] == (methods if is_alike else {})
    assert not measured


def test_an_evaluation_restores_the_choices_of_training(cache, measured):
    """Also if it is of another model, or ends with an error."""
    choose_products(frozen_weights(model()), torch.float32, world_size=1)
    before = products.choices()
    other = [products.FrozenWeight(torch.randn(832, 1024))]
    for expected in (nullcontext(), pytest.raises(ZeroDivisionError)):
        with expected as raised, chosen_products(other, torch.float32, world_size=1):
            assert products.choices()["methods"] == {"float32 1024 -> 832": "plain"}
            assert raised is None or 1 / 0
        assert products.choices() == before


def test_known_choices_for_emulated_bfloat16_are_not_used(cache, monkeypatch):
    """Methods other than float32 may take a hundred times as long there."""
    monkeypatch.setattr(processor, "has_bfloat16", lambda: False)
    weights, keys = frozen_weights(model()), {key.replace("float32", "bfloat16") for key in KEYS}
    keys.add(products._BATCHES)
    methods = products.measure(weights, torch.bfloat16, dict.fromkeys(keys, "plain"))
    assert methods == dict.fromkeys(keys, "float32")


def model():
    """A layer with LoRA, a trained one, a small one, and one that does not use products.py."""
    layers = nn.Sequential(
        lora.Linear(512, 1024, r=4),
        products.Linear(512, 1024),
        products.Linear(8, 8).requires_grad_(False),
        nn.Linear(512, 2048).requires_grad_(False),
    )
    assert layers[1].weight.requires_grad
    return layers


def test_products_are_measured_once_per_machine(cache, measured):
    choose_products(frozen_weights(model()), torch.float32, world_size=1)
    assert set(measured) == KEYS
    assert products.choices()["methods"] == dict.fromkeys(KEYS, "plain")
    assert json.loads(cache.read_text()) == {products.machine(): dict.fromkeys(KEYS, "plain")}
    products._chosen.clear()
    product_choices._chosen_before.clear()
    choose_products(frozen_weights(model()), torch.float32, world_size=1)
    assert len(measured) == len(KEYS)
    assert products.choices()["methods"] == dict.fromkeys(KEYS, "plain")


def test_frozen_weights_are_packed_where_that_is_fastest(cache, monkeypatch):
    if not processor.has_onednn(torch.float32):
        pytest.skip("PyTorch is built without oneDNN here")
    names = {method: name for name, method in METHODS.items()}
    monkeypatch.setattr(products, "_seconds", lambda method, *_: float(names[method] != "packed"))
    choose_products(frozen_weights(model()), torch.float32, world_size=1)
    assert products.choices()["methods"] == dict.fromkeys(KEYS, "packed")


def test_the_cache_keeps_choices_of_other_machines(cache, measured):
    cache.parent.mkdir()
    cache.write_text(json.dumps({"another": {"key": "packed"}}))
    choose_products(frozen_weights(model()), torch.float32, world_size=1)
    written = json.loads(cache.read_text())
    assert written == {
        "another": {"key": "packed"},
        products.machine(): products.choices()["methods"],
    }


def test_a_run_uses_only_choices_for_its_own_products(cache, measured):
    cache.parent.mkdir()
    others = {"float32 512 -> 1024 + bias, few rows": "blocks", "float32 9 -> 9": "packed"}
    cache.write_text(json.dumps({products.machine(): others}))
    choose_products(frozen_weights(model()), torch.float32, world_size=1)
    own = dict.fromkeys(KEYS, "plain")
    assert products.choices()["methods"] == own
    assert json.loads(cache.read_text()) == {products.machine(): {**others, **own}}
    choose_products([], torch.float32, world_size=1)
    assert products.choices()["methods"] == {}, "the earlier run's choices are gone"


def test_the_cache_keeps_choices_that_another_run_adds_meanwhile(cache, measured, monkeypatch):
    def fastest(*_) -> str:
        cache.parent.mkdir(exist_ok=True)
        cache.write_text(json.dumps({products.machine(): {"of another run": "blocks"}}))
        return "plain"

    monkeypatch.setattr(products, "_fastest", fastest)
    choose_products(frozen_weights(model()), torch.float32, world_size=1)
    expected = {"of another run": "blocks", **dict.fromkeys(KEYS, "plain")}
    assert json.loads(cache.read_text()) == {products.machine(): expected}


def test_a_locked_cache_is_waited_for_and_then_not_written(cache, measured, caplog, monkeypatch):
    monkeypatch.setattr(product_choices, "_PATIENCE", 0.1)
    cache.parent.mkdir()
    with FileLock(cache.with_suffix(".lock")):
        choose_products(frozen_weights(model()), torch.float32, world_size=1)
    assert f"{cache} cannot be written" in caplog.text
    assert not cache.exists()
    assert products.choices()["methods"].keys() == KEYS


@pytest.mark.parametrize(
    "content",
    ["{", "[1]", "null", '{"%s": [1]}', '{"%s": {"key": [1], "b": "plain"}}', '{"another": 1}'],
)
def test_a_damaged_cache_is_rewritten(cache, measured, caplog, content):
    cache.parent.mkdir()
    cache.write_text(content.replace("%s", products.machine()))
    choose_products(frozen_weights(model()), torch.float32, world_size=1)
    assert f"{cache} cannot be read" in caplog.text
    assert json.loads(cache.read_text()).keys() == {products.machine()}


def test_a_run_starts_without_a_writable_cache(cache, measured, caplog):
    cache.parent.write_text("a file where a folder should be")
    choose_products(frozen_weights(model()), torch.float32, world_size=1)
    assert f"{cache} cannot be" in caplog.text
    assert products.choices()["methods"].keys() == KEYS
    choose_products(frozen_weights(model()), torch.float32, world_size=1)
    assert len(measured) == len(KEYS), "a process measures once"


def test_a_run_starts_without_a_home_folder(cache, measured, caplog, monkeypatch):
    def expanduser(self):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", expanduser)
    for _ in range(2):
        choose_products(frozen_weights(model()), torch.float32, world_size=1)
        assert products.choices()["methods"].keys() == KEYS
    assert caplog.text.count("no home folder to keep a cache in") == 1
    assert len(measured) == len(KEYS), "a process measures once"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_choices_are_part_of_a_checkpoint(cache, dtype):
    chosen = {"machine": products.machine(), "methods": {"some product": "blocks"}}
    products.use_choices(chosen)
    before = Precision(dtype, "cpu")
    state = before.state_dict()
    products._chosen.clear()
    after = Precision(dtype, "cpu")
    after.load_state_dict(state)
    assert products.choices() == chosen
    assert after.state_dict() == state


def test_a_checkpoint_with_other_choices_is_not_damaged(cache):
    plain_run = Precision(torch.float32, "cpu").state_dict()
    chosen = {"machine": products.machine(), "methods": {"some product": "blocks"}}
    products.use_choices(chosen)
    restore(Precision(torch.float32, "cpu"), plain_run)
    assert products.choices()["methods"] == {}
