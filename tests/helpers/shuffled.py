"""A plugin for pytest, `-p shuffled`: files in random order, and the tests of each as well.

SHUFFLED in the environment is the seed. Without it each run has another, shown where a test fails.
"""

import os
import random
from itertools import groupby

import pytest

SEED = os.environ.get("SHUFFLED") or str(random.SystemRandom().randrange(10**6))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.testsfailed:
        print(f"\nthis order again: SHUFFLED={SEED}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    chance = random.Random(SEED)
    files = [list(tests) for _, tests in groupby(items, key=lambda item: item.path)]
    chance.shuffle(files)
    for tests in files:
        chance.shuffle(tests)
    items[:] = [item for tests in files for item in tests]
