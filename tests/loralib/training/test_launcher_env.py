"""Which process of a run this is, as the environment says it."""

import pytest
import torch

from loralib.training.launcher_env import Place, is_launched, process_place


@pytest.fixture
def environment(monkeypatch):
    """Sets variables, and no others of a launcher's."""

    def set_variables(variables):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


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
def test_a_process_of_a_launcher(environment, variables, expected):
    environment(variables)
    assert is_launched() == expected


@pytest.mark.parametrize(
    ("local_rank", "world_size", "gpus", "expected"),
    [
        ("2", "4", 4, 2),
        ("2", "1", 4, 2),
        ("", "1", 4, 0),
        ("-1", "4", 1, 0),
        ("", "4", 0, 0),
        ("", "4", 2, None),  # which of them? Each process there has one of its own
    ],
)
def test_a_process_s_number_on_its_machine(
    environment, monkeypatch, local_rank, world_size, gpus, expected
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    environment({"RANK": "0", "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank})
    if expected is None:
        with pytest.raises(ValueError, match=r"^LOCAL_RANK is '' in the environment: start"):
            process_place()
    else:
        assert process_place() == Place(0, int(world_size), expected)
    assert process_place(3).local_rank == 3
