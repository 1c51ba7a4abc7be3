"""Which process of a run this is, as the environment says it."""

import pytest

from loralib.training.launched import is_launched


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({"RANK": "0", "WORLD_SIZE": "1"}, True),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, True),
        # Left over, of a single process:
        ({"RANK": "0"}, False),
        ({"WORLD_SIZE": "1", "LOCAL_RANK": "0"}, False),
        ({"RANK": "0", "LOCAL_RANK": "-1"}, False),
        ({"RANK": " ", "WORLD_SIZE": "", "LOCAL_RANK": "\n"}, False),
        # One of several, of which the others' variables are missing:
        ({"RANK": "1"}, True),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, True),
        ({"RANK": "0", "LOCAL_RANK": "1"}, True),
    ],
)
def test_a_process_of_a_launcher(monkeypatch, variables, expected):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_launched() == expected
