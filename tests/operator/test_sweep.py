"""A long random sweep over shapes, ranks, types, memory orders, ratios and numbers of threads."""

from __future__ import annotations

import numpy as np
import pytest

import backnorm
from backnorm.conformance.data import realistic_data
from backnorm.conformance.judge import check_backward, check_forward
from tests.support.dtypes import ELEMENT_TYPES, is_16_bit, statistics_types

pytestmark = pytest.mark.sweep

CASES = 400
LARGEST = 300_000


@pytest.fixture(autouse=True)
def threads():
    before = backnorm.get_num_threads()
    yield
    backnorm.set_num_threads(before)


def random_shape(rng):
    """Return a shape of 2 to 5 axes whose lengths are spread evenly on a logarithmic scale."""
    while True:
        rank = int(rng.integers(2, 6))
        lengths = np.rint(np.exp(rng.uniform(0, 17 / rank, rank))).astype(int)
        if lengths.prod() <= LARGEST:
            return tuple(map(int, lengths))


def in_some_order(array, rng):
    """Return the same array, half of the time with its axes in another order in memory."""
    if rng.integers(2):
        return array
    order = rng.permutation(array.ndim)
    return np.ascontiguousarray(array.transpose(order)).transpose(np.argsort(order))


@pytest.mark.parametrize("seed", range(8))
def test_backward_and_forward_of_random_problems_are_accurate(seed):
    rng = np.random.default_rng(seed)
    for _ in range(CASES):
        dtype = ELEMENT_TYPES[rng.integers(len(ELEMENT_TYPES))]
        data = realistic_data(
            random_shape(rng),
            dtype,
            data_format=str(rng.choice(["NCX", "NXC"])),
            rng=rng,
            statistics_dtype=statistics_types(dtype)[-int(rng.integers(0, 2))],
            ratio=float(rng.choice([0, 1, 100, 1 if is_16_bit(dtype) else 1e4])),
        )
        training = bool(rng.integers(2))
        backnorm.set_num_threads(int(rng.integers(1, 5)))
        gradients = backnorm.batch_norm_backward(
            in_some_order(data.x, rng),
            in_some_order(data.dy, rng),
            *data.backward_inputs[2:],
            training=training,
            **data.options,
        )
        normalized = backnorm.batch_norm_forward(
            in_some_order(data.x, rng), data.gamma, data.beta, **data.options
        )
        verdicts = [
            *check_backward(
                *data.backward_inputs, gradients, training=training, **data.options
            ).values(),
            *check_forward(data.x, data.gamma, data.beta, normalized, **data.options).values(),
        ]
        failed = [verdict.detail for verdict in verdicts if not verdict.passed]
        assert failed == [], (data.x.shape, data.data_format, str(dtype), training)
