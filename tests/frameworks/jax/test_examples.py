"""The example, with few steps: both layers learn the same."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest
from flax import linen

from backnorm.jax.linen import BatchNorm

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def digits(example):
    # The example asks for float64 in all of its process.
    before = jax.config.jax_enable_x64
    yield example("train_digits_jax")
    jax.config.update("jax_enable_x64", before)


@pytest.fixture(scope="module")
def batch(digits):
    images, labels = digits.digits()[0]
    return images[:64], labels[:64]


@pytest.fixture(scope="module")
def start(digits, batch):
    return digits.Network(linen.BatchNorm).init(jax.random.key(0), batch[0], training=True)


def first_step(digits, start, batch, norm, dtype, param_dtype):
    net = digits.Network(norm, dtype, param_dtype)
    start = jax.tree.map(partial(np.asarray, dtype=param_dtype), start)
    (loss, _), found = digits.first_step(start["params"], net, start["batch_stats"], *batch)
    return float(loss), found


@pytest.fixture(scope="module")
def exact(digits, start, batch):
    return first_step(digits, start, batch, linen.BatchNorm, np.float64, np.float64)


def test_example_trains_one_epoch_like_flax(digits, rows, assert_one_epoch):
    digits.main(epochs=1)
    assert_one_epoch(rows())


def test_first_step_in_float64_matches_flax_within_rounding(
    digits, start, batch, exact, assert_as_exact
):
    loss, found = first_step(digits, start, batch, BatchNorm, np.float64, np.float64)
    assert loss == pytest.approx(exact[0], rel=1e-14)
    assert_as_exact(digits.farthest(found, exact[1]), 0, "float64")


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.sweep)])
def test_gradients_in_16_bits_have_errors_comparable_to_flax(
    dtype, digits, start, batch, exact, assert_as_exact
):
    own, ours = (
        digits.farthest(first_step(digits, start, batch, norm, dtype, np.float32)[1], exact[1])
        for norm in (linen.BatchNorm, BatchNorm)
    )
    # Not all of it can be rounding away.
    assert min(own, ours) > 1e-4
    assert_as_exact(ours, own, "float32")
