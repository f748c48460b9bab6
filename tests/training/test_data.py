"""What is learnt, by which network: the same for every framework."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from backnorm.errors import BacknormError
from backnorm.training.digits import batches, load_digits, steps
from backnorm.training.network import BLOCKS, SIDE, convolutions, initial_weights, sites

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def digits():
    return load_digits()


def test_images_are_real_and_divided_once(digits):
    assert digits.images.shape == (1347, SIDE, SIDE)
    assert digits.test_images.shape == (450, SIDE, SIDE)
    assert digits.images.dtype == np.float32
    assert set(digits.labels) == set(digits.test_labels) == set(range(10))
    assert abs(digits.images.mean()) < 1e-5
    assert abs(digits.images.std() - 1) < 1e-5
    again = load_digits()
    assert again.images.tobytes() == digits.images.tobytes()
    learnt = {image.tobytes() for image in digits.images}
    # Two of the images come twice in the data.
    assert sum(image.tobytes() in learnt for image in digits.test_images) <= 2


def test_batches_are_the_seed_s_and_whole(digits):
    def epoch(seed, number):
        return list(batches(digits, 64, seed, number))

    first = epoch(0, 0)
    assert len(first) == steps(digits, 64) == 21
    assert {len(labels) for _, labels in first} == {64}
    for (images, labels), (same_images, same_labels) in zip(first, epoch(0, 0), strict=True):
        assert images.tobytes() == same_images.tobytes()
        assert labels.tobytes() == same_labels.tobytes()
    orders = {
        np.concatenate([labels for _, labels in epoch(*key)]).tobytes()
        for key in ((0, 0), (0, 1), (1, 0))
    }
    assert len(orders) == 3


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(BacknormError, match=r"sklearn.*pip install 'backnorm\[train\]'"):
        load_digits()


def test_weights_are_the_seed_s_and_fit_the_network():
    weights = initial_weights(3)
    again, other = initial_weights(3), initial_weights(4)
    for c in convolutions():
        assert weights[f"{c.name}.weight"].shape == (c.size, c.size, c.inputs, c.outputs)
        assert weights[f"{c.name}.gamma"].shape == weights[f"{c.name}.beta"].shape == (c.outputs,)
    assert len(weights) == 3 * len(convolutions()) + 2
    for name, weight in weights.items():
        assert weight.dtype == np.float64
        assert weight.tobytes() == weight.astype(np.float32).astype(np.float64).tobytes()
        assert weight.tobytes() == again[name].tobytes()
    assert weights["stem.weight"].tobytes() != other["stem.weight"].tobytes()


def test_every_convolution_is_followed_by_a_normalisation():
    places = sites(7)
    assert [site.name for site in places] == [c.name for c in convolutions()]
    assert places[0].shape == (7, 16, SIDE, SIDE)
    assert places[-1].shape == (7, 64, SIDE // 4, SIDE // 4)
    assert [block.shortcut is None for block in BLOCKS] == [True, False, False]
