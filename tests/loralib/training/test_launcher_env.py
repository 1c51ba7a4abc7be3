"""Tests of reading from the environment which process of a run this is."""

import pytest
import torch

from loralib.training.launcher_env import Place, is_launched, process_place


@pytest.fixture
def environment(monkeypatch):
    """A function that sets these variables and removes a launcher's others."""

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
        # Left over, and describing a single process:
        ({"RANK": "0"}, False),
        ({"WORLD_SIZE": "1", "LOCAL_RANK": "0"}, False),
        ({"RANK": "0", "LOCAL_RANK": "-1"}, False),
        ({"RANK": " ", "WORLD_SIZE": "", "LOCAL_RANK": "\n"}, False),
        # One of several processes, with some variables missing:
        ({"RANK": "1"}, True),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, True),
        ({"RANK": "0", "LOCAL_RANK": "1"}, True),
    ],
)
def test_variables_show_whether_a_launcher_started_the_process(environment, variables, expected):
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
        ("", "4", 2, None),  # unknown which GPU is this process's
    ],
)
def test_the_local_rank_may_be_missing_unless_it_chooses_a_gpu(
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
