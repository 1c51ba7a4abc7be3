"""Tests of checking settings against a function's annotations."""

from collections.abc import Iterable
from typing import Any

import pytest

from loralib.io.settings import Count, Index, NotNegative, Positive, Share, check_settings, checked


@checked
def build(
    heads: Count = 12,
    pad: Index = 0,
    kind: int = -1,
    dropout: Share = 0.1,
    alpha: Positive | None = None,
    epsilon: NotNegative = 0.0,
    scale: float = 1.0,
    bias: bool = True,
    name: str = "a",
    terms: str | Iterable[str] | None = None,
    ids: Iterable[int] = (),
    labels: dict[int, str] | None = None,
    numbers: dict[str, int] | None = None,
    anything: Any = None,
    **others: str,
) -> dict:
    return {"heads": heads, **others}


GOOD = [
    {"heads": 1, "pad": 0, "kind": -5, "dropout": 0, "alpha": 0.5, "epsilon": 0, "scale": -1},
    {"dropout": 1, "alpha": None, "bias": False, "name": "", "terms": None, "ids": [3, 1]},
    {"terms": "p2c", "ids": (), "labels": {"0": "no", 1: "yes"}, "numbers": {"no": 0}},
    {"terms": ["p2c", "c2p"], "ids": {1, 2}, "labels": {}, "anything": object()},
    {"ids": iter([1, 2]), "some": "other setting"},
]


@pytest.mark.parametrize("values", GOOD)
def test_valid_settings_are_accepted(values):
    assert build(**values)["heads"] == values.get("heads", 12)
    check_settings(build, values, "config.json")


BAD = [
    ("heads", "12", 'heads must be a positive integer, not "12"'),
    ("heads", 0, "heads must be a positive integer, not 0"),
    ("heads", 12.0, "heads must be a positive integer, not 12.0"),
    ("heads", True, "heads must be a positive integer, not true"),
    ("heads", None, "heads must be a positive integer, not null"),
    ("heads", [12], "heads must be a positive integer, not [12]"),
    ("pad", -1, "pad must be an integer from 0 on, not -1"),
    ("kind", 0.5, "kind must be an integer, not 0.5"),
    ("dropout", 1.5, "dropout must lie in [0, 1], not 1.5"),
    ("dropout", float("nan"), "dropout must lie in [0, 1], not NaN"),
    ("alpha", 0, "alpha must be a positive number or null, not 0"),
    ("alpha", float("inf"), "alpha must be a positive number or null, not Infinity"),
    ("epsilon", -1e-9, "epsilon must be a number from 0 on, not -1e-09"),
    ("scale", "1", 'scale must be a number, not "1"'),
    ("scale", float("nan"), "scale must be a number, not NaN"),
    ("scale", 10**400, f"scale must be a number, not 1{59 * '0'}…"),
    ("bias", 1, "bias must be true or false, not 1"),
    ("name", {"a": 1}, 'name must be a string, not {"a": 1}'),
    ("terms", 5, "terms must be a string or a list of strings or null, not 5"),
    ("terms", ["a", 5], 'terms must be a string or a list of strings or null, not ["a", 5]'),
    ("ids", "12", 'ids must be a list of integers, not "12"'),
    ("ids", {"1": 2}, 'ids must be a list of integers, not {"1": 2}'),
    ("labels", ["no"], 'labels must be a map of strings by integer or null, not ["no"]'),
    ("labels", {"a": "b"}, "labels must be a map of strings by integer or null"),
    ("labels", {"0": 1}, "labels must be a map of strings by integer or null"),
    ("numbers", {"no": "0"}, "numbers must be a map of integers by string or null"),
    ("name", ["long"] * 99, "…"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_invalid_settings_are_errors_of_one_line(name, value, message):
    with pytest.raises(ValueError, match=f"^{name} must ") as call:
        build(**{name: value})
    with pytest.raises(ValueError, match=f": {name} must ") as read:
        check_settings(build, {name: value}, "base/config.json")
    assert message in str(call.value)
    assert str(read.value) == f"base/config.json: {call.value}"
    assert "\n" not in str(call.value)
    assert len(str(call.value)) < 150


def test_positional_arguments_are_checked_too():
    with pytest.raises(ValueError, match="pad must be"):
        build(1, "0")
    with pytest.raises(TypeError, match="multiple values"):
        build(1, heads=2)
