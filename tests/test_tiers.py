"""The selection of parameter sets that `make test` runs."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest

from tests.support.battery import facets_of
from tests.support.tiers import combinations_of, covering, values_of


def test_covering_of_pairs_has_every_pair_and_few_sets():
    sizes = {"shape": 12, "dtype": 4, "layout": 2, "relu": 2}
    matrix = [
        combinations_of(dict(zip(sizes, values, strict=True)), 2)
        for values in itertools.product(*map(range, sizes.values()))
    ]
    kept = covering(matrix, random.Random(0))
    assert set().union(*(matrix[number] for number in kept)) == set().union(*matrix)
    assert 48 <= len(kept) <= 60
    assert kept == covering(matrix, random.Random(0))


def test_covering_of_values_keeps_minimum_number_of_sets():
    matrix = [combinations_of({"a": a, "b": b}, 1) for a in range(5) for b in range(3)]
    assert len(covering(matrix, random.Random(0))) == 5


def test_values_of_item_replaces_parameter_by_its_facets():
    gpu, marker = object(), pytest.mark.covering(2, facets={"name": facets_of}).mark
    params = {"name": "no-gamma-float16-float32-NXC-in-float64", "gpu": gpu}
    item = SimpleNamespace(
        callspec=SimpleNamespace(params=params), get_closest_marker=lambda name: marker
    )
    facets = ("no-gamma", "float16-float32", "NXC", "-in-float64")
    expected = {f"name {k}": facet for k, facet in enumerate(facets)} | {"gpu": id(gpu)}
    assert values_of(item) == expected
