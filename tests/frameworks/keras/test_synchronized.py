"""Layers with ``synchronized=True`` in the replicas of a strategy: as one device with the batch."""

from __future__ import annotations

import functools
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("Keras synchronizes layers with TensorFlow alone", allow_module_level=True)

import tensorflow as tf

import backnorm
from backnorm.conformance.judge import check_backward, check_forward
from backnorm.tensorflow import batch_norm

from . import synchronized_cases as cases
from .synchronized_cases import CASES, CHANNELS, EPSILON, Case, gradients

# Seconds.
_LIMIT = 240
# As a module of the package that pytest imports it from.
_COMMAND = [sys.executable, "-m", cases.__name__]
_ROOT = Path(cases.__file__).parents[cases.__name__.count(".")]


@pytest.fixture(scope="session")
def replicas(tmp_path_factory):
    """Return a function: what some replicas found, in a process of their own."""

    @functools.cache
    def found_by(size, *options):
        out = tmp_path_factory.mktemp("replicas") / "found"
        command = [*_COMMAND, str(size), str(out), *options]
        done = subprocess.run(
            command, cwd=_ROOT, capture_output=True, text=True, timeout=_LIMIT, check=False
        )
        assert done.returncode == 0, done.stderr[-5000:]
        return pickle.loads(out.read_bytes())

    return found_by


@pytest.fixture
def two(replicas):
    """Return what two replicas found."""
    return replicas(2)


@pytest.fixture
def trained(replicas):
    """Return what two replicas found that trained models."""
    return replicas(2, "trains")


def few(names):
    """Return parameters: the cases of three replicas, which are another process, are long."""
    return [
        pytest.param(name, marks=[] if len(CASES[name].parts) == 2 else pytest.mark.long)
        for name in names
    ]


def wrong(case, found):
    """Return what is not that of the whole batch, by the allowance of one device."""
    y, dx, of_parameters, moved = found
    x, dy = case.data()
    (mean, *means), (variance, *variances) = moved
    for one, others in ((mean, means), (variance, variances)):
        for other in others:
            np.testing.assert_array_equal(one, other)
    gamma, beta = (
        (np.linspace(*ends, CHANNELS).astype(mean.dtype) for ends in ((-1.5, 2), (1, -1)))
        if case.affine
        else (None, None)
    )
    settings = {"epsilon": EPSILON, "data_format": case.data_format, "arithmetic": case.arithmetic}
    exact = backnorm.batch_norm_backward(x, dy, mean, variance, gamma, **settings)
    verdicts = check_forward(x, gamma, beta, (y, mean, variance), **settings)
    of_x = check_backward(x, dy, mean, variance, gamma, (dx, *exact[1:]), **settings)
    said = [v.detail for v in (*verdicts.values(), of_x["dx"]) if not v.passed]
    # Of each part rounded once, added up here.
    eps = np.finfo(mean.dtype).eps
    for name, parts, value in zip(("dgamma", "dbeta"), of_parameters, exact[1:], strict=False):
        allowed = 4 * eps * np.abs(parts).sum(0)
        if not (np.abs(np.sum(parts, 0, "d") - value) <= allowed).all():
            said.append(f"{name}: {np.sum(parts, 0)} is not {value}")
    return said


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("name", few(CASES))
def test_synchronized_layer_matches_whole_batch(name, traced, replicas):
    case = CASES[name]
    assert wrong(case, replicas(len(case.parts))[name, traced]) == []


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("name", few(name for name in CASES if CASES[name].reproducible))
def test_reproducible_synchronized_layer_has_the_bits_of_whole_batch(name, traced, replicas):
    case = CASES[name]
    y, dx, of_parameters, moved = replicas(len(case.parts))[name, traced]
    x, dy = map(tf.constant, case.data())
    layer = case.layer(synchronized=False)
    expected = gradients(layer, x, dy)
    # Gradients of parameters are the first replica's, and whatever adds them up has the same bits.
    for each in of_parameters:
        assert not np.any(each[1:])
    found = y, dx, *(each[0] for each in of_parameters)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, np.asarray(other), strict=True)
    for parts, whole in zip(moved, layer.get_weights()[2:], strict=True):
        for part in parts:
            np.testing.assert_array_equal(part, whole, strict=True)


def test_unsynchronized_layer_has_statistics_of_its_part(two):
    y, _, _, ((one, other), _) = two["not synchronized"]
    part = CASES["uneven"].data()[0][:1].astype("d")
    np.testing.assert_allclose(one, part.mean((0, 1, 2)), rtol=1e-5)
    assert np.abs(one - other).min() > 0.1
    assert np.abs(y - two["uneven", True][0]).max() > 0.5


@pytest.mark.parametrize("mutant", cases.MUTANTS)
def test_whole_batch_check_detects_local_or_unweighted_statistics(mutant, two):
    found = two[f"mutant {mutant}"]
    if mutant == "local moments":
        # Each replica has others.
        with pytest.raises(AssertionError):
            wrong(CASES["uneven"], found)
    else:
        assert wrong(CASES["uneven"], found)


def test_synchronized_step_sends_one_message_per_pass(two):
    # By each of two: two rows of the numbers of one, and the sums.
    assert sorted(two["messages"]) == sorted([2 * (2 * CHANNELS + 1), 2 * CHANNELS] * 2)


def test_synchronized_layer_matches_keras_layer(two):
    pairs = (tf.nest.flatten(each) for each in (two["uneven", True], two["theirs"]))
    for one, other in zip(*pairs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5 * np.abs(other).max())


def test_synchronized_layer_of_empty_replicas_equals_keras_layer(two):
    pairs = (tf.nest.flatten(two[f"nothing, {whose}"]) for whose in ("ours", "theirs"))
    for one, other in zip(*pairs, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.covering(1)
@pytest.mark.parametrize("settings", ["eager", "graph", "XLA"])
@pytest.mark.parametrize("where", ["alone", "one replica"])
def test_synchronized_layer_in_one_replica_equals_plain_layer(settings, where):
    case = Case((6,))
    x, dy = (tf.constant(each) for each in case.data())
    results = []
    for synchronized in (True, False):
        layer = case.layer(synchronized=synchronized)
        step = functools.partial(gradients, layer)
        if settings != "eager":
            step = tf.function(step, autograph=False, jit_compile=settings == "XLA")
        if where == "one replica":
            found = tf.distribute.OneDeviceStrategy("CPU:0").run(step, args=(x, dy))
        else:
            found = step(x, dy)
        results.append([*found, *layer.get_weights()])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_synchronized_layer_outside_of_run_normalises_whole_batch(two):
    y, means = two["whole at once"]
    layer = CASES["even"].layer(synchronized=False)
    np.testing.assert_array_equal(y, layer(CASES["even"].data()[0], training=True))
    for mean in means:
        np.testing.assert_array_equal(mean, layer.get_weights()[2])


@pytest.mark.parametrize("size", cases.SIZES)
def test_synchronized_layer_with_unknown_batch_size_matches_plain_layer(size, two):
    y, means = two[f"batches {size}"]
    last = CASES["even"].data()[0][4:size]
    layer = CASES["even"].layer(synchronized=False)
    np.testing.assert_allclose(y[4:], layer(last, training=True), rtol=0, atol=1e-6)
    for mean in means:
        np.testing.assert_allclose(mean, layer.get_weights()[2], rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "kind"), [("eager", "BacknormError"), ("graph", "UnknownError")]
)
def test_second_derivative_of_synchronized_layer_raises_error(settings, kind, two):
    kinds, text = two[f"twice, {settings}"]
    assert kind in kinds
    assert "differentiable once, not twice" in text


def test_forward_mode_of_synchronized_batch_norm_raises_backnorm_error(two):
    kinds, text = two["forward mode"]
    assert "BacknormError" in kinds
    assert "no forward mode" in text


@pytest.mark.long
def test_synchronized_batch_norm_in_xla_matches_whole_batch_to_second_order(trained):
    found = trained["XLA"]
    expected = cases.two_orders(batch_norm, *map(tf.constant, CASES["uneven"].data()))
    joined = [*map(np.concatenate, found[:3]), sum(found[3]), *(each[1] for each in found[4:])]
    for one, other in zip(joined, map(np.asarray, expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())


@pytest.mark.long
def test_fit_in_two_replicas_matches_one_device(trained):
    losses, weights, calls = trained["fit"]
    # A model of Keras's layers, converted; traced in each replica.
    assert calls >= 2
    expected, of_one = cases.fitted(tf.distribute.get_strategy(), synchronized=False)
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    for one, other in zip(weights, of_one, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5 * max(1.0, np.abs(other).max()))
    apart, _ = trained["fit, not synchronized"]
    assert np.abs(apart / expected - 1).max() > 1e-2


@pytest.mark.long
@pytest.mark.parametrize("name", cases.FITS)
def test_fit_eagerly_or_in_bfloat16_matches_one_device(name, trained):
    losses, _ = trained[f"fit {name}"]
    options = cases.FITS[name]
    expected, _ = cases.fitted(tf.distribute.get_strategy(), synchronized=False, **options)
    np.testing.assert_allclose(losses, expected, rtol=2e-2 if "policy" in options else 2e-5)


@pytest.mark.long
def test_synchronized_layer_in_two_worker_processes_matches_whole_batch(tmp_path):
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        ports = [str(each.getsockname()[1]) for each in (one, other)]
    outs, running = [tmp_path / str(index) for index in range(2)], []
    try:
        for index, out in enumerate(outs):
            command = [*_COMMAND, "2", str(out), str(index), *ports]
            with out.with_suffix(".txt").open("w") as log:
                running.append(subprocess.Popen(command, cwd=_ROOT, stdout=log, stderr=log))
        codes = [process.wait(_LIMIT) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert codes == [0, 0], outs[0].with_suffix(".txt").read_text()[-5000:]
    each = zip(*(pickle.loads(out.read_bytes()) for out in outs), strict=True)
    y, dx, *channels, mean, variance = each
    found = np.concatenate(y), np.concatenate(dx), channels, (mean, variance)
    assert wrong(CASES["uneven"], found) == []
