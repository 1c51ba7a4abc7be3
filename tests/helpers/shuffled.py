"""A plugin for pytest, `-p shuffled`: runs files, and the tests of each, in random order.

The environment variable SHUFFLED is the seed.
"""

import os
import random
from itertools import groupby

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    chance = random.Random(os.environ["SHUFFLED"])
    files = [list(tests) for _, tests in groupby(items, key=lambda item: item.path)]
    chance.shuffle(files)
    for tests in files:
        chance.shuffle(tests)
    items[:] = [item for tests in files for item in tests]
