"""Which way large products are computed in: measured once a machine, and kept with a run."""

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
    """The file that choices are kept in; nothing is chosen yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(products, "_chosen", {})
    monkeypatch.setattr(product_choices, "_chosen_before", {})
    return tmp_path / "loralib" / "products.json"


@pytest.fixture
def measured(monkeypatch):
    """The products that are measured, by key; "plain" is the fastest."""
    asked = []
    monkeypatch.setattr(
        products, "_fastest", lambda *given: asked.append(products._key(*given[:3])) or "plain"
    )
    return asked


@pytest.mark.parametrize(
    ("dtype", "has_bfloat16", "way", "is_said"),
    [
        (torch.bfloat16, True, "float32", True),
        (torch.bfloat16, True, "plain", False),
        (torch.bfloat16, False, "plain", True),  # which is not measured then
        (torch.float32, False, "plain", False),
    ],
)
def test_it_is_said_where_bfloat16_saves_no_time(
    cache, measured, monkeypatch, caplog, dtype, has_bfloat16, way, is_said
):
    monkeypatch.setattr(processor, "has_bfloat16", lambda: has_bfloat16)
    monkeypatch.setattr(products, "_fastest", lambda *given: way)
    monkeypatch.setattr(products, "_fastest_of_batches", lambda *given: "plain")
    product_choices._say_that_it_is_slow.cache_clear()
    with caplog.at_level("INFO"):
        choose_products(frozen_weights(model()), dtype, world_size=1)
        choose_products(frozen_weights(model()), dtype, world_size=1)
    assert caplog.text.count("bfloat16 saves memory here, but not time") == is_said


def test_an_evaluation_puts_back_what_was_chosen(cache, measured):
    """Another model's, in the middle of a training, changes none of its products."""
    choose_products(frozen_weights(model()), torch.float32, world_size=1)
    before = products.choices()
    other = [products.FrozenWeight(torch.randn(832, 1024))]
    for expected in (nullcontext(), pytest.raises(ZeroDivisionError)):
        with expected as raised, chosen_products(other, torch.float32, world_size=1):
            assert products.choices()["methods"] == {"float32 1024 -> 832": "plain"}
            assert raised is None or 1 / 0
        assert products.choices() == before


def test_what_was_known_of_emulated_bfloat16_is_not_taken(cache, monkeypatch):
    """Other ways may take a hundred times as long there."""
    monkeypatch.setattr(processor, "has_bfloat16", lambda: False)
    weights, keys = frozen_weights(model()), {key.replace("float32", "bfloat16") for key in KEYS}
    keys.add(products._BATCHES)
    ways = products.measure(weights, torch.bfloat16, dict.fromkeys(keys, "plain"))
    assert ways == dict.fromkeys(keys, "float32")


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
    assert products.choices()["methods"] == dict.fromkeys(KEYS, "plain")
    assert json.loads(cache.read_text()) == {products.machine(): dict.fromkeys(KEYS, "plain")}
    products._chosen.clear()
    product_choices._chosen_before.clear()
    choose_products(frozen_weights(model()), torch.float32, world_size=1)
    assert len(measured) == len(KEYS)
    assert products.choices()["methods"] == dict.fromkeys(KEYS, "plain")


def test_a_frozen_weight_may_be_packed(cache, monkeypatch):
    if not processor.has_onednn(torch.float32):
        pytest.skip("PyTorch is built without oneDNN here")
    ways = {way: name for name, way in METHODS.items()}
    monkeypatch.setattr(products, "_seconds", lambda way, *_: float(ways[way] != "packed"))
    choose_products(frozen_weights(model()), torch.float32, world_size=1)
    assert products.choices()["methods"] == dict.fromkeys(KEYS, "packed")


def test_what_other_machines_chose_is_kept(cache, measured):
    cache.parent.mkdir()
    cache.write_text(json.dumps({"another": {"key": "packed"}}))
    choose_products(frozen_weights(model()), torch.float32, world_size=1)
    written = json.loads(cache.read_text())
    assert written == {
        "another": {"key": "packed"},
        products.machine(): products.choices()["methods"],
    }


def test_a_run_takes_what_is_of_its_own_products(cache, measured):
    cache.parent.mkdir()
    others = {"float32 512 -> 1024 + bias, few rows": "blocks", "float32 9 -> 9": "packed"}
    cache.write_text(json.dumps({products.machine(): others}))
    choose_products(frozen_weights(model()), torch.float32, world_size=1)
    own = dict.fromkeys(KEYS, "plain")
    assert products.choices()["methods"] == own
    assert json.loads(cache.read_text()) == {products.machine(): {**others, **own}}
    choose_products([], torch.float32, world_size=1)
    assert products.choices()["methods"] == {}, "of the run before"


def test_what_is_measured_meanwhile_is_kept(cache, measured, monkeypatch):
    def fastest(*_) -> str:
        cache.parent.mkdir(exist_ok=True)
        cache.write_text(json.dumps({products.machine(): {"of another run": "blocks"}}))
        return "plain"

    monkeypatch.setattr(products, "_fastest", fastest)
    choose_products(frozen_weights(model()), torch.float32, world_size=1)
    expected = {"of another run": "blocks", **dict.fromkeys(KEYS, "plain")}
    assert json.loads(cache.read_text()) == {products.machine(): expected}


def test_a_cache_that_another_process_writes_is_waited_for(cache, measured, caplog, monkeypatch):
    monkeypatch.setattr(product_choices, "_PATIENCE", 0.1)
    cache.parent.mkdir()
    with FileLock(cache.with_suffix(".lock")):
        choose_products(frozen_weights(model()), torch.float32, world_size=1)
    assert f"{cache} cannot be written" in caplog.text
    assert not cache.exists()
    assert products.choices()["methods"].keys() == KEYS


@pytest.mark.parametrize(
    "content", ["{", "[1]", "null", '{"%s": [1]}', '{"%s": {"key": [1]}}', '{"another": 1}']
)
def test_a_damaged_cache_is_written_anew(cache, measured, caplog, content):
    cache.parent.mkdir()
    cache.write_text(content.replace("%s", products.machine()))
    choose_products(frozen_weights(model()), torch.float32, world_size=1)
    assert f"{cache} cannot be read" in caplog.text
    assert json.loads(cache.read_text()).keys() == {products.machine()}


def test_without_a_place_to_write_the_run_goes_ahead(cache, measured, caplog):
    cache.parent.write_text("a file where a folder should be")
    choose_products(frozen_weights(model()), torch.float32, world_size=1)
    assert f"{cache} cannot be" in caplog.text
    assert products.choices()["methods"].keys() == KEYS
    choose_products(frozen_weights(model()), torch.float32, world_size=1)
    assert len(measured) == len(KEYS), "a process measures once"


def test_without_a_home_folder_the_run_goes_ahead(cache, measured, caplog, monkeypatch):
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


def test_a_checkpoint_with_other_choices_is_no_damage(cache):
    plain_run = Precision(torch.float32, "cpu").state_dict()
    chosen = {"machine": products.machine(), "methods": {"some product": "blocks"}}
    products.use_choices(chosen)
    restore(Precision(torch.float32, "cpu"), plain_run)
    assert products.choices()["methods"] == {}
