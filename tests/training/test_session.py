"""The order of a training, with a framework that is made up and learns nothing."""

from __future__ import annotations

import numpy as np
import pytest

from backnorm.training.frameworks import LAYERS
from backnorm.training.model import Epoch, FirstStep, Normalised, Settings
from backnorm.training.session import train

pytest.importorskip("sklearn")


class FakeTrainer:
    def __init__(self, layer, weights, dtype, log, wrong):
        self.layer, self.weights, self.dtype = layer, weights, dtype
        self.log, self.wrong = log, wrong

    def step(self, images, labels, rate):
        self.log.append((self.layer, rate, images.tobytes()))
        return 1.0, len(labels)

    def gradients(self, images, labels):
        factor = 1 + self.wrong * (self.layer == "backnorm")
        factor += 1e-6 * (self.dtype == "float32")
        return factor, {name: factor * weight for name, weight in self.weights.items()}

    def evaluate(self, images, labels):
        return len(labels) // 2


class FakeFramework:
    def __init__(self, wrong=0.0):
        self.log, self.built, self.alone, self.wrong = [], [], [], wrong

    def build(self, layer, weights, dtype):
        self.built.append((layer, weights["stem.weight"].tobytes()))
        return FakeTrainer(layer, weights, dtype, self.log, self.wrong)

    def normalise(self, layer, sites, dtype):
        def call():
            self.alone.append(layer)
            return [0.1] * len(sites)

        return call


@pytest.fixture(scope="module")
def digits():
    from backnorm.training.digits import load_digits

    return load_digits()


@pytest.fixture
def told(digits):
    framework, found = FakeFramework(), []
    train(framework, Settings("fake", "float32", 2, 2, 450, 1), digits, found.append)
    return framework, found


def test_everything_is_told_in_order(told):
    _, found = told
    assert isinstance(found[0], FirstStep)
    epochs = [value for value in found if isinstance(value, Epoch)]
    assert [(e.seed, e.number, e.layer) for e in epochs] == [
        (seed, number, layer) for seed in (0, 1) for number in (0, 1) for layer in LAYERS
    ]
    assert all(len(e.losses) == len(e.seconds) == 2 for e in epochs)
    assert {(e.accuracy, e.test_accuracy) for e in epochs} == {(1.0, 0.5)}
    runs = [value for value in found if isinstance(value, Normalised)]
    assert {run.layer for run in runs} == set(LAYERS)
    assert len(runs) >= 48
    assert all(len(run.seconds) == 9 for run in runs)


def test_networks_begin_alike_and_take_steps_in_turns_on_the_same_batches(told):
    framework, _ = told
    # Three of the first step, two that warm up, then two a seed.
    pairs = [framework.built[5:7], framework.built[7:9]]
    for (own, own_weight), (ours, our_weight) in pairs:
        assert (own, ours) == LAYERS
        assert own_weight == our_weight
    assert pairs[0][0][1] != pairs[1][0][1]
    steps = framework.log[4:]
    for number, (one, other) in enumerate(zip(steps[::2], steps[1::2], strict=True)):
        assert {one[0], other[0]} == set(LAYERS)
        assert one[1:] == other[1:]
        # The order changes with every step of an epoch.
        assert one[0] == LAYERS[number % 2]


def test_the_learning_rate_falls_to_nothing(told):
    framework, _ = told
    rates = [rate for _, rate, _ in framework.log[4:12:2]]
    assert rates[0] == 0.1
    assert rates == sorted(rates, reverse=True)
    assert 0 < rates[-1] < 0.05


def test_layers_alone_are_timed_in_turns_after_a_run_that_does_not_count(told):
    framework, _ = told
    calls = framework.alone
    assert all(one == other for one, other in zip(calls[::2], calls[1::2], strict=True))
    assert calls[::2][:4] == ["own", "backnorm", "backnorm", "own"]


@pytest.mark.parametrize(("wrong", "passes"), [(0.0, True), (1e-6, True), (1e-3, False)])
def test_wrong_gradients_of_ours_show(digits, wrong, passes):
    found = []
    train(FakeFramework(wrong), Settings("fake", "float32", 1, 1, 450, 1), digits, found.append)
    first = found[0]
    assert first.losses == pytest.approx({"own": 1, "backnorm": 1 + wrong, "exact": 1}, abs=2e-6)
    assert len(first.gradients) == 29
    assert first.worst().between == pytest.approx(wrong, abs=1e-12)
    assert {round(g.own, 12) for g in first.gradients if g.name != "head.bias"} == {1e-6}
    assert (first.failures("float32") == []) is passes
    assert np.isfinite(first.loss_difference())
