"""ATen: native_batch_norm_backward and its two halves; PyTorch itself is not imported."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from mpmath import mpf

from backnorm import BacknormError, batch_norm_backward, reference
from backnorm.conformance.judge import judge
from backnorm.dialects import aten

EPS = 1e-3
TYPES = [("f64", "f64"), ("f32", "f32"), ("f16", "f16"), ("f16", "f32"), ("bf16", "f32")]
TYPES += [("bf16", "bf16")]
ALL = [True, True, True]
NAMES = ("grad_out", "input", "weight", "running_mean", "running_var", "save_mean", "save_invstd")


def inverse_of(b):
    return (1 / np.sqrt(b["variance"].astype(float) + EPS)).astype(b["variance"].dtype)


def arguments(b, *, train=True, **changes):
    """Return the arguments by name; those that are not used are None."""
    operands = {"grad_out": b["dy"], "input": b["x"], "weight": b["gamma"]}
    if train:
        operands |= {"save_mean": b["mean"], "save_invstd": inverse_of(b)}
    else:
        operands |= {"running_mean": b["mean"], "running_var": b["variance"]}
    options = {"train": train, "eps": EPS, "output_mask": ALL}
    return dict.fromkeys(NAMES) | operands | options | changes


def call(b, **options):
    return aten.native_batch_norm_backward(*arguments(b, **options).values())


def rejects(error_type, match, b, **changes):
    with pytest.raises(error_type, match=match) as error:
        call(b, **changes)
    assert isinstance(error.value, BacknormError)


@pytest.fixture
def b(batch):
    return batch((4, 3, 5), "NCX")


def exact(b, inverse):
    """Return dx, dgamma, dbeta as double-doubles, from the inverse deviation as it is."""
    x, dy = (np.moveaxis(b[name], 1, 0).reshape(b["x"].shape[1], -1) for name in ("x", "dy"))
    rows = ([], [], [])
    with mpmath.workdps(50):
        for c, s in enumerate(mpf(float(value)) for value in inverse):
            mean, gamma = mpf(float(b["mean"][c])), mpf(float(b["gamma"][c]))
            d = [mpf(float(value)) for value in dy[c]]
            h = [(mpf(float(value)) - mean) * s for value in x[c]]
            total, along = mpmath.fsum(d), mpmath.fsum(p * q for p, q in zip(d, h, strict=True))
            m = len(d)
            rows[0].append(
                [gamma * s * (p - total / m - q * along / m) for p, q in zip(d, h, strict=True)]
            )
            rows[1].append(along)
            rows[2].append(total)

        def split(values):
            hi = np.vectorize(float, otypes=[float])(np.array(values, object))
            rest = np.array(values, object) - np.vectorize(mpf, otypes=[object])(hi)
            return reference.Exact(hi, np.vectorize(float, otypes=[float])(rest))

        dx, dgamma, dbeta = map(split, rows)

    def tensor(values):
        others = np.delete(b["x"].shape, 1)
        return np.moveaxis(values.reshape(b["x"].shape[1], *others), 0, 1)

    return reference.Exact(tensor(dx.hi), tensor(dx.lo)), dgamma, dbeta


@pytest.mark.parametrize("types", TYPES)
def test_backward_with_save_invstd_is_within_budget(batch, types):
    """Results are those of the inverse deviation that was given, not of a rounded variance."""
    b = batch((6, 3, 8), "NCX", *types)
    inverse = inverse_of(b)
    terms = reference.backward(
        b["x"], b["dy"], b["mean"], 1 / inverse.astype(float) ** 2, b["gamma"], epsilon=0.0
    )
    for name, actual, known in zip(
        ("dx", "dgamma", "dbeta"), call(b), exact(b, inverse), strict=True
    ):
        verdict = judge(name, actual, known, getattr(terms, f"{name}_terms"), b["x"].dtype)
        assert verdict.passed, verdict.detail


def test_backward_with_invstd_as_float32_variance_exceeds_budget(batch):
    """The previous test would detect a variance that is rounded to float32."""
    b = batch((6, 3, 8), "NCX", "f32")
    inverse = inverse_of(b)
    rounded = (1 / inverse.astype(float) ** 2).astype(np.float32)
    dx, *_ = batch_norm_backward(b["x"], b["dy"], b["mean"], rounded, b["gamma"], epsilon=0.0)
    known, *_ = exact(b, inverse)
    assert not judge("dx", dx, known, np.zeros(dx.shape), b["x"].dtype).passed


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("weighted", [True, False])
def test_backward_with_train_false_has_the_bits_of_canonical(batch, same, types, weighted):
    b = batch((4, 3, 5), "NCX", *types)
    weight = b["gamma"] if weighted else None
    expected = batch_norm_backward(
        b["x"], b["dy"], b["mean"], b["variance"], weight, epsilon=EPS, training=False
    )
    same(call(b, train=False, weight=weight), expected)
    assert expected.dgamma.dtype == b["mean"].dtype


@pytest.mark.parametrize("types", TYPES)
def test_backward_without_weight_returns_dtype_of_statistics(batch, types, dtypes):
    b = batch((4, 3, 5), "NCX", *types)
    grad_input, *others = call(b, weight=None)
    ones = call(b, weight=np.ones_like(b["gamma"]))
    np.testing.assert_array_equal(grad_input, ones[0])
    assert [o.dtype for o in others] == [dtypes[types[1]]] * 2


@pytest.mark.parametrize("mask", [[a, b, c] for a in (0, 1) for b in (0, 1) for c in (0, 1)])
@pytest.mark.parametrize("train", [True, False])
def test_output_mask_selects_returned_gradients(b, mask, train):
    mask = [bool(flag) for flag in mask]
    everything = call(b, train=train)
    for flags in (mask, tuple(mask), np.array(mask)):
        some = call(b, train=train, output_mask=flags)
        assert [value is not None for value in some] == mask
        for value, known in zip(some, everything, strict=True):
            if value is not None:
                np.testing.assert_array_equal(value, known)


def test_eps_changes_results_only_with_train_false(b, same):
    same(call(b, eps=0.5), call(b))
    assert (call(b, train=False, eps=0.5)[0] != call(b, train=False)[0]).all()


@pytest.mark.parametrize("train", [True, False])
def test_backward_ignores_unused_statistics(b, same, train):
    expected = call(b, train=train)
    unused = ("running_mean", "running_var") if train else ("save_mean", "save_invstd")
    for junk in (np.empty(0, "f"), np.full(3, np.nan, "f"), np.ones((7, 7))):
        same(call(b, train=train, **dict.fromkeys(unused, junk)), expected)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("which", [0, 1])
def test_backward_with_missing_or_empty_statistics_raises(b, train, which):
    used = ("save_mean", "save_invstd") if train else ("running_mean", "running_var")
    rejects(TypeError, f"{used[which]}: is a required input", b, train=train, **{used[which]: None})
    # PyTorch's own forward returns empty ones when the statistics were frozen.
    empty = {used[which]: np.empty(0, "f")}
    rejects(ValueError, f"{used[which]}: .*one value per channel", b, train=train, **empty)


def test_backward_with_invalid_argument_raises_error_with_aten_names(b):
    rejects(ValueError, r"grad_out: must have the shape of input.*\(3, 3, 5\)", b,
            grad_out=b["dy"][:3])  # fmt: skip
    rejects(TypeError, "grad_out: must have the element type of input", b,
            grad_out=b["dy"].astype("f8"))  # fmt: skip
    rejects(TypeError, "weight: element types do not match", b, weight=b["gamma"].astype("f8"))
    rejects(ValueError, "weight: must hold one value per channel of input", b,
            weight=b["gamma"][:2])  # fmt: skip
    rejects(ValueError, "input: must have rank 2 or more", b, input=b["gamma"], grad_out=b["gamma"])
    rejects(TypeError, "input: unsupported element type", b, input=b["x"].astype("i4"))
    rejects(TypeError, "train: must be a boolean", b, train=1)
    rejects(TypeError, "eps: must be a real number", b, eps="x")
    rejects(ValueError, "eps: must be finite and not negative", b, eps=-1.0)
    negative = np.where(np.arange(3) == 1, -1, inverse_of(b)).astype("f")
    rejects(ValueError, "save_invstd: .*cannot be negative.*channel 1", b, save_invstd=negative)
    variance = np.array([1, -1, 1], "f")
    rejects(ValueError, r"running_var: .*channel 1", b, train=False, running_var=variance)


@pytest.mark.parametrize(
    ("mask", "error"),
    [
        ([True, True], ValueError),
        ([True] * 4, ValueError),
        ([], ValueError),
        ([1, 1, 1], TypeError),
        ("TTT", TypeError),
        (True, TypeError),
        (None, TypeError),
    ],
)
def test_output_mask_that_is_not_three_booleans_is_rejected(b, mask, error):
    rejects(error, "output_mask: ", b, output_mask=mask)


def test_backward_without_required_argument_raises_type_error(b):
    for name in ("train", "eps", "output_mask"):
        operands = arguments(b)
        del operands[name]
        with pytest.raises(TypeError, match=f"^{name}: "):
            aten.native_batch_norm_backward(**operands)
    for name in ("grad_out", "input"):
        rejects(TypeError, f"{name}: is a required input", b, **{name: None})


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 3, 0), (2, 0, 4), (0, 3)])
@pytest.mark.parametrize("train", [True, False])
def test_backward_of_empty_batch_returns_zeros(batch, shape, train):
    grad_input, grad_weight, grad_bias = call(batch(shape, "NCX"), train=train)
    assert grad_input.shape == shape
    np.testing.assert_array_equal(grad_weight, np.zeros(shape[1], "f"))
    np.testing.assert_array_equal(grad_bias, np.zeros(shape[1], "f"))


def test_backward_of_channels_last_input_keeps_its_strides(batch):
    b = batch((4, 3, 5, 6), "NCX")
    last = np.moveaxis(np.ascontiguousarray(np.moveaxis(b["x"], 1, -1)), -1, 1)
    grad_input, *_ = call(b, input=last)
    assert grad_input.strides == last.strides
    np.testing.assert_allclose(grad_input, call(b)[0], rtol=1e-6, atol=1e-7)


def test_save_invstd_that_is_zero_or_non_finite_affects_only_its_channel(b):
    for value, finite in ((0.0, True), (np.inf, False), (np.nan, False)):
        inverse = inverse_of(b)
        inverse[1] = value
        grad_input, grad_weight, _ = call(b, save_invstd=inverse)
        assert np.isfinite(grad_input[:, 1]).all() == finite
        assert np.isfinite(np.delete(grad_input, 1, 1)).all()
        assert np.isfinite(np.delete(grad_weight, 1)).all()


# The two phases


def parts(b, **changes):
    operands = {
        "grad_out": b["dy"],
        "input": b["x"],
        "mean": b["mean"],
        "invstd": inverse_of(b),
        "weight": b["gamma"],
    }
    return operands | changes


def wanted(**changes):
    return {"input_g": True, "weight_g": True, "bias_g": True} | changes


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("weighted", [True, False])
def test_reduce_and_elemt_match_native_batch_norm_backward(batch, types, weighted):
    b = batch((6, 3, 8), "NCX", *types)
    b["gamma"] = b["gamma"] if weighted else None
    whole = call(b)
    sums = aten.batch_norm_backward_reduce(**parts(b), **wanted())
    assert [s.dtype for s in sums] == [b["mean"].dtype] * 4
    count = np.array([b["x"].size // 3])
    part = aten.batch_norm_backward_elemt(**parts(b), sum_dy=sums[0], sum_dy_xmu=sums[1],
                                          count=count)  # fmt: skip
    # The sums are rounded between the phases: to 8 bits, if the statistics have no more.
    digits = {"f64": 1e-13, "f32": 2e-6, "f16": 4e-3, "bf16": 3e-2}
    loss = digits[types[1]] + (digits[types[0]] if types[1] != types[0] else 0)
    near = {"rtol": loss, "atol": loss}
    np.testing.assert_allclose(part.astype(float), whole[0].astype(float), **near)
    assert part.dtype == b["x"].dtype
    np.testing.assert_allclose(sums[2].astype(float), whole[1].astype(float), **near)
    np.testing.assert_array_equal(sums[3], whole[2])


def test_elemt_with_added_float64_sums_has_the_bits_of_native_backward(batch):
    """Sums of parts, added in float64, give the bits of the whole gradient."""
    b = batch((6, 3, 8), "NCX")
    wide = {name: array.astype(np.float64) for name, array in b.items()}
    total_dy, total_xmu = np.zeros((2, 3))
    for rows in (slice(0, 1), slice(1, 1), slice(1, 6)):
        piece = wide | {"x": wide["x"][rows], "dy": wide["dy"][rows]}
        sum_dy, sum_dy_xmu, *_ = aten.batch_norm_backward_reduce(**parts(piece), **wanted())
        total_dy, total_xmu = total_dy + sum_dy, total_xmu + sum_dy_xmu
    count = np.array([[8], [0], [40]], np.int32)
    part = aten.batch_norm_backward_elemt(
        **parts(b), sum_dy=total_dy, sum_dy_xmu=total_xmu, count=count
    )
    np.testing.assert_array_equal(part, call(b)[0])


def test_reduce_and_elemt_of_bfloat16_weight_accept_float32_statistics(batch, dtypes):
    b = batch((6, 3, 8), "NCX", "bf16", "f32")
    b["gamma"] = b["gamma"].astype(dtypes["bf16"])
    sums = aten.batch_norm_backward_reduce(**parts(b), **wanted())
    assert [str(s.dtype) for s in sums] == ["float32", "float32", "bfloat16", "bfloat16"]
    count = np.array([48])
    part = aten.batch_norm_backward_elemt(
        **parts(b), sum_dy=sums[0], sum_dy_xmu=sums[1], count=count
    )
    b["gamma"] = b["gamma"].astype(np.float32)
    np.testing.assert_allclose(part.astype(float), call(b)[0].astype(float), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["input_g", "weight_g", "bias_g"])
def test_reduce_returns_none_for_unrequested_sums(b, name):
    places = {"input_g": (0, 1), "weight_g": (2,), "bias_g": (3,)}[name]
    results = aten.batch_norm_backward_reduce(**parts(b), **wanted(**{name: False}))
    assert [value is None for value in results] == [k in places for k in range(4)]


def test_reduce_results_share_no_memory(b):
    results = aten.batch_norm_backward_reduce(**parts(b), **wanted())
    for k, array in enumerate(results):
        assert not any(np.may_share_memory(array, other) for other in results[:k])


def elemt(b, **changes):
    zeros = np.zeros(3, b["mean"].dtype)
    operands = {"sum_dy": zeros, "sum_dy_xmu": zeros, "count": np.array([20])}
    return aten.batch_norm_backward_elemt(**parts(b) | operands | changes)


@pytest.mark.parametrize(
    ("match", "error", "changes"),
    [
        ("sum_dy: is required", TypeError, {"sum_dy": None}),
        ("sum_dy: must hold one value per channel", ValueError, {"sum_dy": np.zeros(2, "f")}),
        ("sum_dy_xmu: .*shape \\(1, 3\\)", ValueError, {"sum_dy_xmu": np.zeros((1, 3), "f")}),
        ("sum_dy_xmu: unsupported element type", TypeError, {"sum_dy_xmu": np.zeros(3, "i4")}),
        ("sum_dy: unsupported element type", TypeError, {"sum_dy": np.zeros(3, "f2")}),
        ("count: is required", TypeError, {"count": None}),
        ("count: must hold integers", TypeError, {"count": np.array([20.0])}),
        ("count: must be the number of elements", ValueError, {"count": np.array([19])}),
        ("count: must be the number of elements", ValueError, {"count": np.array([], np.int32)}),
        ("count: must be the number of elements", ValueError, {"count": np.array([21, -1])}),
        ("invstd: .*cannot be negative.*channel 2", ValueError,
         {"invstd": np.array([1, 1, -2], "f")}),
        ("mean: must hold one value", ValueError, {"mean": np.zeros(4, "f")}),
        ("weight: element types do not match", TypeError, {"weight": np.zeros(3, "f8")}),
        ("grad_out: must have the shape of input", ValueError, {"grad_out": np.zeros((4, 3), "f")}),
    ],
)  # fmt: skip
def test_elemt_with_invalid_argument_raises_error_naming_it(b, match, error, changes):
    with pytest.raises(error, match=match) as raised:
        elemt(b, **changes)
    assert isinstance(raised.value, BacknormError)


def test_reduce_with_invalid_argument_raises_type_error_naming_it(b):
    for name in ("input_g", "weight_g", "bias_g"):
        for value in (1, None, "yes"):
            with pytest.raises(TypeError, match=f"^{name}: must be a boolean"):
                aten.batch_norm_backward_reduce(**parts(b), **wanted(**{name: value}))
    with pytest.raises(TypeError, match=r"^input_g: "):
        aten.batch_norm_backward_reduce(**parts(b))
    for name in ("grad_out", "input", "mean", "invstd"):
        with pytest.raises(TypeError, match=f"^{name}: is a required input"):
            aten.batch_norm_backward_reduce(**parts(b, **{name: None}), **wanted())


def test_reduce_and_elemt_of_empty_part_return_zeros_and_empty_array(b):
    empty = b | {"x": b["x"][:0], "dy": b["dy"][:0]}
    results = aten.batch_norm_backward_reduce(**parts(empty), **wanted())
    for values in results:
        np.testing.assert_array_equal(values, np.zeros(3, "f"))
    assert elemt(empty, count=np.array([0])).shape == (0, 3, 5)
    assert elemt(empty).shape == (0, 3, 5)
