"""Fewer cases than all combinations of values."""

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any


def covering(*lists: Iterable[Any]) -> list[tuple]:
    """Combinations of one value of each list, in which any two values of two lists meet.

    They show what one value breaks, or two together, as all combinations would.
    """
    values = [list(each) for each in lists]
    pairs = {
        places: frozenset(combinations(enumerate(places), 2))
        for places in product(*(range(len(each)) for each in values))
    }
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        best = max(pairs, key=lambda places: len(missing & pairs[places]))
        missing -= pairs[best]
        chosen.append(tuple(each[place] for each, place in zip(values, best, strict=True)))
    return chosen
