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


def test_digits_example_of_one_epoch_matches_keras_layers(digits, rows, assert_one_epoch):
    digits.main(epochs=1)
    assert_one_epoch(rows())


def test_first_step_in_float64_matches_keras_within_rounding(
    backend, digits, batch, exact, assert_as_exact
):
    if backend == "torch":
        pytest.skip("with PyTorch Keras's own layer is exact to float32 alone")
    loss, gradients = first_step(digits, batch, "float64", backnorm.keras.convert)
    # Keras tells the loss in float32.
    assert loss == pytest.approx(exact[0], rel=1e-7)
    assert_as_exact(digits.farthest(gradients, exact[1]), 0, "float64")


def test_first_step_in_bfloat16_is_as_near_exact_as_keras(digits, batch, exact, assert_as_exact):
    own, ours = (
        digits.farthest(first_step(digits, batch, "mixed_bfloat16", convert)[1], exact[1])
        for convert in (lambda net: net, backnorm.keras.convert)
    )
    # Not all of it can be rounding away.
    assert min(own, ours) > 1e-4
    assert_as_exact(ours, own, "float32")
