"""Which parameter sets of a test `make test` runs, where its whole matrix would add little.

`@pytest.mark.covering(strength)` keeps a selection in which every `strength` values of different
parameters meet in some parameter set (a covering array); the other sets become `long`. Strength 0
keeps one set. `covering(strength, facets={"name": function})` takes the tuple that the function
returns of a value for as many parameters.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict

import pytest


def pytest_collection_modifyitems(items):
    """Mark as `long` what the markers `covering` leave out.

    After folders have added their own markers (`tryfirst`), before pytest selects by markers.
    """
    tests = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("covering")
        rare = any(item.get_closest_marker(tier) for tier in ("long", "sweep"))
        if marker is not None and not rare and hasattr(item, "callspec"):
            tests[item.nodeid.partition("[")[0], *marker.args].append(item)
    for (name, strength), matrix in tests.items():
        combinations = [combinations_of(values_of(item), strength) for item in matrix]
        kept = covering(combinations, random.Random(name))
        for number, item in enumerate(matrix):
            if number not in kept:
                item.add_marker(pytest.mark.long)


def values_of(item):
    """Return what stands for the value of each parameter, and of each facet of one."""
    facets, values = item.get_closest_marker("covering").kwargs.get("facets", {}), {}
    for name, value in item.callspec.params.items():
        if name in facets:
            values |= {f"{name} {k}": facet for k, facet in enumerate(facets[name](value))}
        else:
            # Values need not be comparable; the sets of a matrix share the objects.
            values[name] = id(value)
    return values


def covering(combinations, rng):
    """Return the numbers of sets that have every element of the sets, chosen greedily."""
    order = list(range(len(combinations)))
    rng.shuffle(order)
    missing, kept = set().union(*combinations), set()
    while missing:
        best = max(order, key=lambda number: len(combinations[number] & missing))
        missing -= combinations[best]
        kept.add(best)
    return kept


def combinations_of(values, strength):
    """Return the combinations of `strength` parameters with their values."""
    strength = min(strength, len(values))
    return frozenset(itertools.combinations(sorted(values.items()), strength))
