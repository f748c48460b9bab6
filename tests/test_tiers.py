"""The selection of parameter sets that `make test` runs."""

from __future__ import annotations

import itertools
import random

from tests.support.tiers import combinations_of, covering


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


def test_covering_of_values_has_every_value_once():
    matrix = [combinations_of({"a": a, "b": b}, 1) for a in range(5) for b in range(3)]
    assert len(covering(matrix, random.Random(0))) == 5
