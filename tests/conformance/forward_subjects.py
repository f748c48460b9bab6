"""Forward subjects: wrong ones with the id of the finding that names them, and right ones."""

from __future__ import annotations

import ctypes

import numpy as np

from backnorm.dtypes import FLOAT64, rounded
from tests.conformance.right_forward import RIGHT_FORWARD


def _formula(**changed):
    """Return a subject in float64 with some steps of the formula changed."""
    steps = {
        "variance": lambda v, m, n: v,
        "s": lambda v, e: 1 / np.sqrt(v + e),
        "y": lambda c, s, g, b: g * s * c + b,
        "returned": lambda m, v, s, n: (m, v),
        "x": lambda x: x,
    } | changed

    def subject(x, gamma, beta, *, epsilon, data_format):
        axis = 1 if data_format == "NCX" else x.ndim - 1
        others = tuple(k for k in range(x.ndim) if k != axis)
        kept = [size if k == axis else 1 for k, size in enumerate(x.shape)]
        channels, count = x.shape[axis], x.size // x.shape[axis]
        statistics = np.float32 if gamma is None else gamma.dtype
        if gamma is None:
            gamma, beta = np.ones(channels), np.zeros(channels)
            statistics = np.float32 if x.dtype.itemsize == 2 else x.dtype
        g, b = (each.astype(FLOAT64).reshape(kept) for each in (gamma, beta))
        wide = steps["x"](x.astype(FLOAT64))
        mean = wide.mean(others, keepdims=True)
        variance = steps["variance"](wide.var(others, keepdims=True), mean, count)
        s = steps["s"](variance, epsilon)
        y = steps["y"](wide - mean, s, g, b)
        mean, variance = steps["returned"](mean, variance, s, count)
        kept = [rounded(each.reshape(-1), np.dtype(statistics)) for each in (mean, variance)]
        return rounded(y, x.dtype), *kept

    return subject


def _bessel(v, m, n):
    return v * n / max(n - 1, 1)


right = _formula()
bessel = _formula(variance=_bessel)
second_moment = _formula(variance=lambda v, m, n: v + m * m)
unbiased_variance = _formula(returned=lambda m, v, s, n: (m, _bessel(v, m, n)))
epsilon_outside = _formula(s=lambda v, e: 1 / (np.sqrt(v) + e))
epsilon_left_out = _formula(s=lambda v, e: 1 / np.sqrt(np.maximum(v, 1e-30)))
no_root = _formula(s=lambda v, e: 1 / (v + e))
gamma_left_out = _formula(y=lambda c, s, g, b: s * c + b)
beta_left_out = _formula(y=lambda c, s, g, b: g * s * c)
gamma_and_beta_swapped = _formula(y=lambda c, s, g, b: b * s * c + g)
beta_before_gamma = _formula(y=lambda c, s, g, b: g * (s * c + b))
inverse_returned = _formula(returned=lambda m, v, s, n: (m, s))
gamma_left_out_and_epsilon_twice = _formula(
    s=lambda v, e: 1 / np.sqrt(v + 2 * e), y=lambda c, s, g, b: s * c + b
)


def statistics_of_inference(x, gamma, beta, *, epsilon, data_format):
    """Normalise by the statistics 0 and 1, as a layer in inference that was never trained."""
    y, mean, variance = right(x, gamma, beta, epsilon=epsilon, data_format=data_format)
    axis = 1 if data_format == "NCX" else x.ndim - 1
    kept = [size if k == axis else 1 for k, size in enumerate(x.shape)]
    gain = 1 / np.sqrt(1 + epsilon)
    y = x.astype(FLOAT64) * gain
    if gamma is not None:
        y = y * gamma.astype(FLOAT64).reshape(kept) + beta.astype(FLOAT64).reshape(kept)
    return rounded(y, x.dtype), np.zeros_like(mean), np.ones_like(variance)


def running_statistics(src, mean, variance, gamma, beta, *, epsilon, momentum, data_format):
    """Normalise by the running statistics, called as oneDNN Graph's operator."""
    import backnorm

    y = backnorm.batch_norm_inference(
        src, mean, variance, gamma, beta, epsilon=epsilon, data_format=data_format
    )
    return y, mean, variance, mean, variance


def running_returned_as_saved(src, mean, variance, gamma, beta, *, epsilon, momentum, data_format):
    """Return the running statistics twice, called as oneDNN Graph's operator."""
    y, *_ = right(src, gamma, beta, epsilon=epsilon, data_format=data_format)
    return y, mean, variance, mean, variance


def _of_onnxruntime(changed):
    """Return a function that is called as ONNX Runtime's operator, with some results changed.

    `changed` takes the results of the right operator, the old running statistics, and the numbers
    epsilon, momentum and M; it returns results by their places.
    """

    def subject(x, scale, bias, input_mean, input_var, epsilon, momentum, training_mode):
        from backnorm.dialects.onnxruntime import BatchNormInternal

        inputs = x, scale, bias, input_mean, input_var
        results = list(BatchNormInternal(*inputs, epsilon, momentum, training_mode))
        numbers = epsilon, momentum, x.size // max(x.shape[1], 1)
        wide = [each.astype(FLOAT64) for each in (*results[3:], input_mean, input_var)]
        if x.size:
            for place, value in changed(*wide, *numbers).items():
                results[place] = rounded(value, results[place].dtype)
        return tuple(results)

    return subject


momentum_swapped = _of_onnxruntime(
    lambda mean, s, old, old_variance, e, m, n: {
        1: m * mean + (1 - m) * old,
        2: m * (s**-2 - e) + (1 - m) * old_variance,
    }
)
running_not_updated = _of_onnxruntime(
    lambda mean, s, old, old_variance, e, m, n: {1: old, 2: old_variance}
)
running_replaced = _of_onnxruntime(
    lambda mean, s, old, old_variance, e, m, n: {1: mean, 2: s**-2 - e}
)
running_unbiased = _of_onnxruntime(
    lambda mean, s, old, old_variance, e, m, n: {
        2: (1 - m) * _bessel(s**-2 - e, mean, n) + m * old_variance
    }
)
variance_for_inverse = _of_onnxruntime(lambda mean, s, *others: {4: s**-2 - others[2]})
deviation_for_inverse = _of_onnxruntime(lambda mean, s, *others: {4: 1 / s})
inverse_without_epsilon = _of_onnxruntime(
    lambda mean, s, *others: {4: np.maximum(s**-2 - others[2], 1e-30) ** -0.5}
)


def running_biased(*, scale, mean, variance, exponential_avg_factor, **others):
    """Average biased variances, called as TensorFlow's operator."""
    from backnorm.dialects.tensorflow import FusedBatchNormV3

    f = exponential_avg_factor
    y, running, _, *saved = FusedBatchNormV3(
        scale=scale, mean=mean, variance=variance, exponential_avg_factor=f, **others
    )
    return y, running, (1 - f) * variance + f * saved[1], *saved


#: Name of a function here -> its dialect, and the id of the finding.
WRONG_OPERATORS = {
    "momentum_swapped": ("onnxruntime", "momentum-swapped"),
    "running_not_updated": ("onnxruntime", "running-not-updated"),
    "running_replaced": ("onnxruntime", "running-replaced"),
    "running_unbiased": ("onnxruntime", "running-variance-unbiased"),
    "variance_for_inverse": ("onnxruntime", "inverse-variance"),
    "deviation_for_inverse": ("onnxruntime", "inverse-deviation"),
    "inverse_without_epsilon": ("onnxruntime", "inverse-epsilon"),
    "running_biased": ("tensorflow", "running-variance-biased"),
}


def rolled(x, gamma, beta, **options):
    y, mean, variance = right(x, gamma, beta, **options)
    return np.roll(y, 1, axis=1 if options["data_format"] == "NCX" else -1), mean, variance


def reversed_elements(x, gamma, beta, **options):
    y, mean, variance = right(x, gamma, beta, **options)
    return np.flip(y, axis=0), mean, variance


def last_not_written(x, gamma, beta, **options):
    y, mean, variance = right(x, gamma, beta, **options)
    y = y.copy()
    y.reshape(-1)[-1] = np.nan
    return y, mean, variance


_results: dict = {}


def cached(x, gamma, beta, **options):
    key = x.ctypes.data, x.shape, str(x.dtype)
    if key not in _results:
        _results[key] = right(x, gamma, beta, **options)
    return _results[key]


def writes_input(x, gamma, beta, **options):
    ctypes.memset(x.ctypes.data, 0, x.nbytes)
    return right(x, gamma, beta, **options)


def one_pass(x, gamma, beta, *, epsilon, data_format):
    """Compute the variance as mean(x**2) - mean(x)**2 in float32."""
    axis = 1 if data_format == "NCX" else x.ndim - 1
    others = tuple(k for k in range(x.ndim) if k != axis)
    kept = [size if k == axis else 1 for k, size in enumerate(x.shape)]
    v = x.astype(np.float32)
    mean = v.mean(others, keepdims=True)
    variance = np.maximum((v * v).mean(others, keepdims=True) - mean * mean, 0)
    y = (v - mean) / np.sqrt(variance + np.float32(epsilon))
    if gamma is not None:
        y = y * gamma.astype(np.float32).reshape(kept) + beta.astype(np.float32).reshape(kept)
    return y.astype(x.dtype), mean.reshape(-1), variance.reshape(-1)


#: Name of a function here -> the id of the finding.
WRONG = {
    "bessel": "bessel",
    "second_moment": "second-moment",
    "unbiased_variance": "variance-unbiased",
    "epsilon_outside": "epsilon-outside",
    "epsilon_left_out": "epsilon-left-out",
    "no_root": "no-root",
    "gamma_left_out": "gamma-left-out",
    "beta_left_out": "beta-left-out",
    "gamma_and_beta_swapped": "gamma-beta-swapped",
    "beta_before_gamma": "beta-gamma",
    "inverse_returned": "variance-inverse",
    "gamma_left_out_and_epsilon_twice": "epsilon-twice-gamma-left-out",
    "statistics_of_inference": "initial-statistics",
    "rolled": "channels-shifted",
    "reversed_elements": "elements-permuted",
    "last_not_written": "partly-written",
    "cached": "stale",
    "writes_input": "changed_input",
    "one_pass": "condition",
}


class _Rows:
    """A kernel of rows, called as an operator."""

    def __init__(self, kernel):
        self._kernel = kernel

    def __call__(self, x, gamma, beta, *, epsilon, data_format):
        axis = 1 if data_format == "NCX" else x.ndim - 1
        first = np.moveaxis(x, axis, 0)
        kept = np.float32 if gamma is None else gamma.dtype
        if gamma is None:
            gamma, beta = np.ones(len(first), kept), np.zeros(len(first), kept)
        operands = first.reshape(len(first), -1), gamma[:, None], beta[:, None]
        y, mean, variance = self._kernel(*operands, epsilon)
        return np.moveaxis(y.reshape(first.shape), 0, axis), mean, variance


#: Name of a function here -> its kernel.
RIGHT = {
    "_".join(kernel.name.replace(",", "").replace("'", "").split()): kernel
    for kernel in RIGHT_FORWARD
    if kernel.most == np.inf and kernel.name != "atomics"
}
for _name, _kernel in RIGHT.items():
    globals()[_name] = _Rows(_kernel)


# --- right except for some values, shapes, options or calls ---------------------------------------


def _only(condition, wrong):
    """Return a subject that is wrong if the condition is true of x, with channels first, and gamma.

    In the data of the condition, x has the axes C, N and space.
    """

    def subject(x, gamma, beta, **options):
        first = np.moveaxis(x, 1 if options["data_format"] == "NCX" else -1, 0)
        kernel = wrong if x.size and condition(first, gamma) else right
        return kernel(x, gamma, beta, **options)

    return subject


def _without_last_row(x, gamma, beta, *, epsilon, data_format):
    """Compute statistics without the last row of each image."""
    y, mean, variance = right(x, gamma, beta, epsilon=epsilon, data_format=data_format)
    axis = 1 if data_format == "NCX" else x.ndim - 1
    first = np.moveaxis(x, axis, 0)
    part = np.moveaxis(first[..., :-1, :] if first.ndim > 3 else first, 0, axis)
    _, mean, variance = right(part, gamma, beta, epsilon=epsilon, data_format=data_format)
    kept = [-1 if k == axis else 1 for k in range(x.ndim)]
    m, v = (each.astype(FLOAT64).reshape(kept) for each in (mean, variance))
    y = (x.astype(FLOAT64) - m) / np.sqrt(v + epsilon)
    if gamma is not None:
        y = y * gamma.astype(FLOAT64).reshape(kept) + beta.astype(FLOAT64).reshape(kept)
    return rounded(y, x.dtype), mean, variance


unbiased_of_many = _only(lambda x, g: x[0].size > 1024, unbiased_variance)
epsilon_at_least = _formula(s=lambda v, e: 1 / np.sqrt(v + max(e, 1e-5)))
odd_rows = _only(lambda x, g: x.ndim > 3 and x.shape[-2] % 2 and x.shape[-2] > 1, _without_last_row)
nan_as_zero = _formula(x=np.nan_to_num)
of_one_channel = _only(lambda x, g: len(x) == 1, bessel)
of_one_pixel = _only(lambda x, g: x.ndim > 2 and x[0, 0].size == 1, bessel)
of_rank_5 = _only(lambda x, g: x.ndim == 5, unbiased_variance)
of_many_images = _only(lambda x, g: x.shape[1] > 256, bessel)
without_gamma = _only(lambda x, g: g is None, epsilon_left_out)
gamma_of_zero = _formula(y=lambda c, s, g, b: np.where(g == 0, 1.0, g) * s * c + b)
few_channels = _only(lambda x, g: len(x) % 8, unbiased_variance)
squares_in_float16 = _formula(
    variance=lambda v, m, n: np.where(v + m * m > 65504, np.inf, v),
)
_arrays: dict = {}


def same_arrays(x, gamma, beta, **options):
    """Return the same arrays in every call of a shape."""
    results = right(x, gamma, beta, **options)
    kept = _arrays.setdefault((x.shape, *(str(array.dtype) for array in results)), results)
    for array, new in zip(kept, results, strict=True):
        array[...] = new
    return kept


#: The functions that are right except for some values, shapes, options or calls.
SPECIAL = (
    "one_pass",
    "unbiased_of_many",
    "epsilon_at_least",
    "odd_rows",
    "nan_as_zero",
    "of_one_channel",
    "of_one_pixel",
    "of_rank_5",
    "of_many_images",
    "without_gamma",
    "gamma_of_zero",
    "few_channels",
    "squares_in_float16",
    "same_arrays",
)
