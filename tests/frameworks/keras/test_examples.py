"""The example, with few steps: both layers learn the same."""

from __future__ import annotations

import pytest

import backnorm.keras

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def digits(example):
    return example("train_digits_keras")


@pytest.fixture(scope="module")
def batch(digits):
    images, labels = digits.digits()[0]
    return images[:64], labels[:64]


def first_step(digits, batch, policy, convert):
    net = digits.network(0, policy)
    net.set_weights(digits.network(0).get_weights())
    return digits.first_step(convert(net), *batch)


@pytest.fixture(scope="module")
def exact(digits, batch):
    return first_step(digits, batch, "float64", lambda net: net)


def test_an_epoch_of_digits(digits, rows, assert_one_epoch):
    digits.main(epochs=1)
    assert_one_epoch(rows())


def test_in_float64_it_is_the_same_to_rounding(backend, digits, batch, exact, assert_as_exact):
    if backend == "torch":
        pytest.skip("with PyTorch Keras's own layer is exact to float32 alone")
    loss, gradients = first_step(digits, batch, "float64", backnorm.keras.convert)
    # Keras tells the loss in float32.
    assert loss == pytest.approx(exact[0], rel=1e-7)
    assert_as_exact(digits.farthest(gradients, exact[1]), 0, "float64")


def test_in_16_bits_gradients_are_as_near_the_exact_ones(digits, batch, exact, assert_as_exact):
    own, ours = (
        digits.farthest(first_step(digits, batch, "mixed_bfloat16", convert)[1], exact[1])
        for convert in (lambda net: net, backnorm.keras.convert)
    )
    # Not all of it can be rounding away.
    assert min(own, ours) > 1e-4
    assert_as_exact(ours, own, "float32")
