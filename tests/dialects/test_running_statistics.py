"""Running statistics of the dialects' forward operators: moved by the kernel, rounded once."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from backnorm.dialects import onednn_graph, onednn_spec, onnxruntime, tensorflow
from tests.support.dtypes import BFLOAT16, rounded

# Weights of the batch that float32 has exactly.
WEIGHTS = [0.0, 0.25, 0.625, 1.0]
CHANNELS = 9


def graph(x, mean, variance, weight):
    found = onednn_graph.BatchNormForwardTraining(
        x, mean, variance, epsilon=1e-5, momentum=1.0 - weight or 2.0**-100, data_format="NCX"
    )
    return found[1:3]


def specification(x, mean, variance, weight):
    ones = np.ones_like(mean)
    found = onednn_spec.BatchNormForwardTraining(
        x,
        mean,
        variance,
        ones,
        ones,
        epsilon=1e-5,
        momentum=1.0 - weight or 2.0**-100,
        data_format="NCX",
    )
    return found[1:3]


def of_tensorflow(x, mean, variance, weight):
    ones = np.ones_like(mean)
    found = tensorflow.FusedBatchNormV3(
        x=x, scale=ones, offset=ones, mean=mean, variance=variance, data_format="NCHW",
        exponential_avg_factor=weight,
    )  # fmt: skip
    return found.batch_mean, found.batch_variance


def of_onnxruntime(x, mean, variance, weight):
    ones = np.ones_like(mean)
    found = onnxruntime.BatchNormInternal(x, ones, ones, mean, variance, momentum=1.0 - weight)
    return found[1:3]


DIALECTS = [graph, specification, of_tensorflow, of_onnxruntime]


@pytest.fixture
def x(rng):
    """Whole numbers, of which means and variances are exact in float64."""
    return rng.integers(-100, 100, (4, CHANNELS, 4, 4)).astype("f")


@pytest.fixture
def old(rng):
    return rng.normal(size=CHANNELS).astype("f"), rng.uniform(1, 5, CHANNELS).astype("f")


def expected(x, old, weight, *, unbiased):
    """Return (1 - weight) * old + weight * batch, exact but for the last bit of a float64."""
    wide = x.astype("d")
    count = x.size // CHANNELS
    batch = wide.mean((0, 2, 3)), wide.var((0, 2, 3))
    factors = 1, Fraction(count, count - 1) if unbiased else 1
    return [
        np.array(
            [
                float(
                    (1 - Fraction(weight)) * Fraction(float(o)) + Fraction(weight) * f * Fraction(b)
                )
                for o, b in zip(before, now, strict=True)
            ]
        )
        for before, now, f in zip(old, batch, factors, strict=True)
    ]


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_running_statistics_are_rounded_once(dialect, weight, x, old):
    kept = [each.copy() for each in old]
    found = dialect(x, *old, weight)
    for got, want in zip(
        found, expected(x, old, weight, unbiased=dialect is of_tensorflow), strict=True
    ):
        np.testing.assert_array_equal(got, want.astype("f"), strict=True)
    for each, before in zip(old, kept, strict=True):
        np.testing.assert_array_equal(each, before)
        assert not any(np.may_share_memory(each, got) for got in found)


@pytest.mark.parametrize("dialect", [of_tensorflow, of_onnxruntime])
def test_running_statistics_do_not_depend_on_terms_of_weight_zero(dialect, x, old):
    nothing = np.full(CHANNELS, np.nan, "f")
    for got in dialect(x, nothing, nothing, 1.0):
        assert np.isfinite(got).all()
    for got, before in zip(dialect(np.full_like(x, np.nan), *old, 0.0), old, strict=True):
        np.testing.assert_array_equal(got, before)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.astype(">f4"),
        lambda a: np.repeat(a, 2)[::2],
        lambda a: a[::-1].copy()[::-1],
        lambda a: a.view(np.memmap),
        lambda a: np.frombuffer(b"0" + a.tobytes(), np.uint8)[1:].view("f"),
    ],
    ids=["byte-swapped", "strided", "reversed", "subclass", "not aligned"],
)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_running_statistics_do_not_depend_on_memory_layout(dialect, change, x, old):
    plain = dialect(x, *old, 0.25)
    for _ in range(2):
        for got, want in zip(dialect(x, *map(change, old), 0.25), plain, strict=True):
            np.testing.assert_array_equal(got, want, strict=True)


def test_running_statistics_of_16_bits_are_rounded_once(x, old):
    small = x.astype(BFLOAT16)
    operands = [each.astype(BFLOAT16) for each in old]
    found = graph(small, *operands, 0.25)
    for got, want in zip(found, expected(x, operands, 0.25, unbiased=False), strict=True):
        assert got.dtype == BFLOAT16
        np.testing.assert_array_equal(got, rounded(want, BFLOAT16))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_running_variance_that_overflows_is_infinite(dialect, x):
    large = np.full(CHANNELS, 3e38, "f")
    with np.errstate(all="raise"):
        mean, variance = dialect(x * np.float32(1e19), large, large, 0.25)
    assert np.isfinite(mean).all()
    assert np.isposinf(variance).all()


def test_saved_inverse_deviation_is_rounded_once(x):
    ones = np.ones(CHANNELS, "f")
    found = onnxruntime.BatchNormInternal(x, ones, ones, ones, ones, epsilon=2.0**-10)
    want = 1.0 / np.sqrt(x.astype("d").var((0, 2, 3)) + 2.0**-10)
    np.testing.assert_array_equal(found[4], want.astype("f"))


def test_batch_norm_internal_of_zero_variance_and_epsilon_raises_value_error(x):
    ones = np.ones(CHANNELS, "f")
    with pytest.raises(ValueError, match=r"channel 0.*variance 0.0 with epsilon 0.0"):
        onnxruntime.BatchNormInternal(np.ones_like(x), ones, ones, ones, ones, epsilon=0.0)
