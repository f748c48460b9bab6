"""The second order against the oracle: types, layouts, values, arguments, bits."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import backnorm
from backnorm.conformance.data import exact_data, realistic_data
from backnorm.conformance.judge import check_double_backward
from tests.support import internals
from tests.support.dtypes import ELEMENT_TYPES, FLOAT32, FLOAT64, is_16_bit, statistics_types

TYPES = [(dtype, other) for dtype in ELEMENT_TYPES for other in statistics_types(dtype)]
LAYOUTS = [
    ("NCX", (2, 3, 1)), ("NCX", (3, 1, 7)), ("NCX", (5, 33, 4)), ("NCX", (3, 17, 7, 7)),
    ("NCX", (9, 5)), ("NCX", (2, 2, 1030)), ("NXC", (2, 1, 3)), ("NXC", (3, 7, 1)),
    ("NXC", (70, 31, 8)), ("NXC", (3, 7, 7, 17)), ("NXC", (2, 3, 2, 3, 2, 3)),
]  # fmt: skip
COTANGENTS = ("ddx", "ddgamma", "ddbeta")
CHANNEL_ARRAYS = ("mean", "variance", "gamma", "ddgamma", "ddbeta")


def layer(rng, dtype=FLOAT64, shape=(3, 4, 5), **options):
    """Return the arguments of a call, by name; no cotangent has a mean of 0."""
    data = realistic_data(shape, dtype, rng=rng, **{"ratio": 10.0} | options)
    names = ("x", "dy", "mean", "variance", "gamma")
    ddgamma, ddbeta = rng.standard_normal((2, data.mean.size)).astype(data.mean.dtype)
    return dict(zip(names, data.backward_inputs, strict=True)) | {
        "ddx": (rng.standard_normal(shape) + 0.7).astype(dtype),
        "ddgamma": ddgamma,
        "ddbeta": ddbeta,
        **data.options,
    }


def double_backward(arguments):
    return backnorm.batch_norm_double_backward(**arguments)


def check(arguments, gradients=None):
    gradients = double_backward(arguments) if gradients is None else gradients
    verdicts = check_double_backward(gradients=gradients, **arguments)
    assert [verdict.detail for verdict in verdicts.values() if not verdict.passed] == []
    return gradients


def as_float(gradients):
    return [values.astype(float) for values in gradients]


@pytest.mark.covering(2)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("dtype", "statistics"), TYPES, ids=str)
@pytest.mark.parametrize(("data_format", "shape"), LAYOUTS)
def test_double_backward_of_each_type_and_layout_is_accurate(
    dtype, statistics, data_format, shape, training, rng, read_only
):
    arguments = layer(rng, dtype, shape, data_format=data_format, statistics_dtype=statistics)
    for name, value in arguments.items():
        if isinstance(value, np.ndarray):
            (arguments[name],) = read_only(value)
    check(arguments | {"training": training})


@pytest.mark.covering(2)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize("absent", [c for n in range(1, 4) for c in itertools.combinations(
    (*COTANGENTS, "gamma"), n)], ids="-".join)  # fmt: skip
def test_double_backward_with_absent_arguments_is_accurate(absent, dtype, training, rng):
    arguments = layer(rng, dtype) | dict.fromkeys(absent) | {"training": training}
    gradients = check(arguments)
    assert gradients.gamma.dtype == arguments["mean"].dtype


def test_double_backward_without_cotangents_returns_zeros_even_for_nan(rng):
    arguments = layer(rng) | dict.fromkeys(COTANGENTS)
    arguments["x"][0] = np.nan
    for values in double_backward(arguments):
        np.testing.assert_array_equal(values, np.zeros_like(values))


@pytest.mark.parametrize("dtype", [FLOAT64, FLOAT32], ids=str)
@pytest.mark.parametrize("ratio", [1e4, 1e6])
def test_double_backward_with_mean_far_above_deviation_is_accurate(dtype, ratio, rng):
    check(layer(rng, dtype, (8, 5, 60), ratio=ratio))


@pytest.mark.parametrize("training", [True, False])
def test_double_backward_with_statistics_not_of_x_is_accurate(training, rng):
    arguments = layer(rng) | {"training": training}
    check(arguments | {"mean": arguments["mean"] + 0.5, "variance": arguments["variance"] * 3})


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
def test_double_backward_of_constant_channels_and_single_elements_is_accurate(dtype, rng):
    arguments = layer(rng, dtype)
    arguments["x"][:, 1], arguments["mean"][1], arguments["variance"][1] = 3.0, 3.0, 0.0
    assert all(np.isfinite(values).all() for values in as_float(check(arguments)))
    check(layer(rng, dtype, (1, 7)))


# A deviation of x, its variance (None: that of x), and epsilon.
TINY = [(0.0, 0.0, 1e-300), (0.0, 0.0, 5e-324), (1e-155, None, 0.0), (1e-155, None, 5e-324),
        (1e-20, None, 0.0), (1e-20, None, 1e-300), (0.0, 1e-40, 0.0)]  # fmt: skip


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [FLOAT64, FLOAT32], ids=str)
@pytest.mark.parametrize(("deviation", "variance", "epsilon"), TINY)
def test_double_backward_with_tiny_variance_is_accurate_and_finite(
    deviation, variance, epsilon, dtype, training, rng
):
    if dtype == FLOAT32 and deviation == 1e-155:
        pytest.skip("no number of float32")
    arguments = layer(rng, dtype)
    x = (deviation * rng.standard_normal(arguments["x"].shape)).astype(dtype)
    wide = x.astype(np.float64)
    arguments |= {"x": x, "mean": wide.mean((0, 2)).astype(dtype), "epsilon": epsilon}
    squares = (wide - arguments["mean"][:, None]) ** 2
    found = squares.mean((0, 2)) if variance is None else np.full(4, variance)
    arguments |= {"variance": found.astype(dtype), "training": training}
    # So small that the results are numbers; in float32 that can be 0.
    small = 1e-60 if dtype == FLOAT64 else 1e-8 if found.all() else 0.0
    for name in ("ddx", "ddgamma"):
        arguments[name] = (arguments[name] * small).astype(dtype)
    gradients = check(arguments)
    assert all(np.isfinite(values).all() for values in gradients)
    assert np.abs(gradients.dy).min() > 0


def test_double_backward_of_float16_sums_above_65504_does_not_overflow(rng):
    arguments = layer(rng, np.dtype(np.float16), (16, 4, 100), gradient_scale=300.0)
    arguments["dy"][...] = np.abs(arguments["dy"])
    assert np.abs(arguments["dy"].astype(float).sum((0, 2))).min() > 65504
    assert all(np.isfinite(values).all() for values in as_float(check(arguments)))


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 3, 0), (2, 0, 4), (0, 0), (0, 3)])
@pytest.mark.parametrize("training", [True, False])
def test_double_backward_of_empty_tensors_returns_zeros(dtype, shape, training):
    other = np.float32 if is_16_bit(dtype) else dtype
    x, ones = np.zeros(shape, dtype), np.ones(shape[1], other)
    gradients = backnorm.batch_norm_double_backward(
        x, x, ones, ones, ones, ddx=x, ddgamma=ones, ddbeta=ones, epsilon=0.0, training=training
    )
    assert gradients.x.shape == gradients.dy.shape == shape
    assert gradients.x.dtype == gradients.dy.dtype == dtype
    np.testing.assert_array_equal(gradients.gamma, np.zeros(shape[1], other), strict=True)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize("name", ["x", "dy", "ddx", *CHANNEL_ARRAYS])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("training", [True, False])
def test_double_backward_confines_nonfinite_elements_to_their_channel(
    dtype, name, value, training, rng
):
    arguments = layer(rng, dtype) | {"training": training}
    arguments[name][(1, 2, 3) if arguments[name].ndim == 3 else 2] = value
    gradients = double_backward(arguments)
    exact = second_order_of(arguments)
    for values, expected in zip(as_float(gradients), exact, strict=True):
        np.testing.assert_array_equal(np.isfinite(values), np.isfinite(expected))
        channel = 1 if values.ndim == 3 else 0
        assert np.isfinite(np.delete(values, 2, axis=channel)).all()


def second_order_of(arguments):
    exact = backnorm.reference.double_backward(**arguments)
    return exact.x.hi, exact.dy.hi, exact.gamma.hi


def test_double_backward_by_x_is_symmetric(rng):
    """A loss that is linear in y has dx as its gradient; x has its own statistics."""
    data = exact_data((6, 5, 8), FLOAT64, rng=rng)
    assert data.true_statistics
    dy, a, b = rng.standard_normal((3, *data.x.shape))

    def hessian_times(vector):
        return backnorm.batch_norm_double_backward(
            data.x, dy, data.mean, data.variance, data.gamma, ddx=vector, epsilon=0.1
        ).x

    left, right = (hessian_times(a) * b).sum(), (hessian_times(b) * a).sum()
    size = np.abs(hessian_times(a) * b).sum()
    assert abs(left - right) <= 1e-14 * size
    assert abs(left) > 1e-6 * size


@pytest.mark.parametrize("training", [True, False])
def test_double_backward_is_adjoint_of_backward_in_dy_and_gamma(training, rng):
    arguments = layer(rng) | {"training": training}
    inputs = {n: v for n, v in arguments.items() if n not in COTANGENTS}
    first = backnorm.batch_norm_backward(**inputs)
    second = double_backward(arguments)
    weighted = [(arguments[n] * g).sum() for n, g in zip(COTANGENTS, first, strict=True)]
    np.testing.assert_allclose((second.dy * arguments["dy"]).sum(), sum(weighted), rtol=1e-12)
    np.testing.assert_allclose((second.gamma * arguments["gamma"]).sum(), weighted[0], rtol=1e-12)


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 2, 1, 0), (2, 0, 3, 1)], ids=str)
def test_double_backward_results_have_memory_order_of_x(dtype, order, rng):
    def lie(array):
        inverse = tuple(np.argsort(order))
        return np.ascontiguousarray(array.transpose(order)).transpose(inverse)

    arguments = layer(rng, dtype, (3, 4, 2, 5))
    expected = double_backward(arguments)
    turned = arguments | {n: lie(arguments[n]) for n in ("x", "dy")}
    gradients = check(turned)
    assert gradients.x.strides == gradients.dy.strides == turned["x"].strides
    for values, other in zip(as_float(gradients), as_float(expected), strict=True):
        np.testing.assert_allclose(values, other, rtol=1e-2 if is_16_bit(dtype) else 1e-5)


ODD_ARRAYS = {
    "strided": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "reversed": lambda a: a[..., ::-1].copy()[..., ::-1],
    "byte-swapped": lambda a: a.astype(a.dtype.newbyteorder()),
    "lists": lambda a: a.tolist(),
}


@pytest.mark.parametrize("kind", ODD_ARRAYS)
@pytest.mark.parametrize("name", ["x", "dy", "ddx", *CHANNEL_ARRAYS])
def test_double_backward_of_strided_swapped_or_list_operand_equals_plain(kind, name, rng):
    arguments = layer(rng)
    expected = double_backward(arguments)
    actual = double_backward(arguments | {name: ODD_ARRAYS[kind](arguments[name])})
    for values, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(values, other, strict=True)


def test_double_backward_with_broadcast_ddx_is_accurate(rng):
    arguments = layer(rng)
    one = np.broadcast_to(arguments["ddx"][:, :, :1], arguments["x"].shape)
    assert one.strides[-1] == 0
    check(arguments | {"ddx": one})


@pytest.mark.parametrize("name", ["x", "dy", "ddx", *CHANNEL_ARRAYS])
def test_double_backward_rejects_wrong_types_and_shapes(name, rng):
    arguments = layer(rng, FLOAT32)
    with pytest.raises(backnorm.ArgumentTypeError, match=f"^{name}: .*int32"):
        double_backward(arguments | {name: arguments[name].astype(np.int32)})
    with pytest.raises(backnorm.ArgumentTypeError, match=f"^{name}: "):
        double_backward(arguments | {name: np.ma.masked_array(arguments[name])})
    if name == "x":
        with pytest.raises(backnorm.ArgumentValueError, match=r"^x: must have rank 2"):
            double_backward(arguments | {"x": np.ones(4, np.float32)})
        return
    with pytest.raises(backnorm.ArgumentTypeError, match=f"^{name}: .*float64"):
        double_backward(arguments | {name: arguments[name].astype(np.float64)})
    wrong = arguments[name][..., :-1]
    with pytest.raises(backnorm.ArgumentValueError, match=f"^{name}: ") as raised:
        double_backward(arguments | {name: wrong})
    assert str(wrong.shape) in str(raised.value)


def test_double_backward_rejects_missing_operands_and_invalid_options(rng):
    arguments = layer(rng)
    for name in ("x", "dy", "mean", "variance"):
        with pytest.raises(backnorm.ArgumentTypeError, match=f"^{name}: is required"):
            double_backward(arguments | {name: None})
    with pytest.raises(backnorm.ArgumentValueError, match=r"^epsilon: .*-1"):
        double_backward(arguments | {"epsilon": -1.0})
    with pytest.raises(backnorm.ArgumentValueError, match=r"^data_format: .*NHWC"):
        double_backward(arguments | {"data_format": "NHWC"})
    with pytest.raises(backnorm.ArgumentTypeError, match=r"^training: "):
        double_backward(arguments | {"training": 1})


@pytest.mark.parametrize("training", [True, False])
def test_double_backward_with_negative_variance_raises_error_with_channel(training, rng):
    arguments = layer(rng) | {"training": training}
    arguments["variance"][2] = -0.5
    with pytest.raises(backnorm.ArgumentValueError, match=r"^variance: .*channel 2.*-0\.5"):
        double_backward(arguments)


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
def test_double_backward_bits_do_not_depend_on_threads_or_blocks(dtype, rng, monkeypatch):
    before = backnorm.get_num_threads()
    arguments = layer(rng, dtype, (20, 6, 40, 10))
    seen = set()
    try:
        for threads, block in ((1, 1 << 15), (2, 700), (4, 37)):
            backnorm.set_num_threads(threads)
            internals.blocks_of_second_order(monkeypatch, block)
            seen.add(b"".join(values.tobytes() for values in double_backward(arguments)))
    finally:
        backnorm.set_num_threads(before)
    assert len(seen) == 1


def test_double_backward_peak_memory_is_below_results_plus_4_mib(rng):
    arguments = layer(rng, FLOAT32, (16, 8, 128, 128))
    double_backward(arguments)
    tracemalloc.start()
    try:
        gradients = double_backward(arguments)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The results themselves may be in memory that is not traced.
    assert peak < gradients.x.nbytes + gradients.dy.nbytes + (4 << 20)


@st.composite
def calls(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=2, max_size=5)))
    dtype, statistics = draw(st.sampled_from(TYPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    arguments = layer(
        rng,
        dtype,
        shape,
        data_format=draw(st.sampled_from(["NCX", "NXC"])),
        statistics_dtype=statistics,
        ratio=draw(st.sampled_from([0.0, 1.0, 100.0])),
        scale=draw(st.sampled_from([0.01, 1.0, 30.0])),
    )
    for name in ("x", "dy", "ddx"):
        order = draw(st.permutations(range(len(shape))))
        turned = np.ascontiguousarray(arguments[name].transpose(order))
        arguments[name] = turned.transpose(np.argsort(order))
    absent = draw(st.sets(st.sampled_from([*COTANGENTS, "gamma"])))
    return arguments | dict.fromkeys(absent) | {"training": draw(st.booleans())}


@settings(max_examples=150)
@given(calls())
def test_double_backward_of_random_calls_is_accurate(arguments):
    check(arguments)
