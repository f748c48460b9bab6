"""Right and wrong forward passes of layer, RMS, group and instance normalisation.

They are independent of the catalogue of mistakes, and have the arrangement of `row_kernels`.
"""

from __future__ import annotations

import numpy as np

from backnorm.dtypes import rounded

from .row_kernels import REDUCED, blocked, in_rows, numpy_sum, serial, wide_sum


def two_pass(x, mean):
    m = mean(x)
    return m, mean((x - m) * (x - m))


def one_pass(x, mean):
    m = mean(x)
    return m, mean(x * x) - m * m


def welford(x, mean):
    """Return statistics by updates, one element after the other (of rows on the last axes)."""
    m, total = np.zeros_like(mean(x)), np.zeros_like(mean(x))
    kept = [k for k in range(4) if m.shape[k] == 1 and x.shape[k] > 1]
    if not kept:
        return mean(x), total
    rows = np.moveaxis(x, kept, range(len(kept))).reshape(-1, *np.squeeze(m, tuple(kept)).shape)
    flat, sums = np.zeros(rows.shape[1:], x.dtype), np.zeros(rows.shape[1:], x.dtype)
    for count, element in enumerate(rows, 1):
        gap = element - flat
        flat = flat + gap / x.dtype.type(count)
        sums = sums + gap * (element - flat)
    shape = m.shape
    return flat.reshape(shape), (sums / x.dtype.type(len(rows))).reshape(shape)


def rms(x, mean):
    return np.zeros_like(mean(x)), mean(x * x)


def forward(
    kind,
    *,
    wide=np.float64,
    sums=numpy_sum,
    statistics=None,
    inverse=lambda v, e: 1 / np.sqrt(v + e),
    element=lambda h, g, b: h * g + b,
    returned=lambda m, v: (m, v),
):
    """Return a forward pass; without other keywords, a right one in float64."""
    reduced = REDUCED[kind]
    statistics = statistics or (rms if kind == "rms" else two_pass)

    def of_inputs(x, gamma, beta, *, epsilon, data_format="NXC", groups=1):
        axis = x.ndim - 1 if data_format == "NXC" else 1
        number = np.float64 if x.dtype == np.float64 else wide
        first = np.moveaxis(x, axis, 1)
        channels = first.shape[1]
        groups = channels if kind == "instance" else groups
        view = (first.shape[0], groups, channels // groups, int(np.prod(first.shape[2:])))
        v = first.reshape(view).astype(number)
        g = (np.ones(channels) if gamma is None else gamma).astype(number).reshape(1, groups, -1, 1)
        b = (np.zeros(channels) if beta is None else beta).astype(number).reshape(1, groups, -1, 1)
        size = number(max(int(np.prod([view[k] for k in reduced])), 1))
        with np.errstate(all="ignore"):
            m, w = statistics(v, lambda terms: sums(terms, reduced) / size)
            y = element((v - m) * inverse(w, number(epsilon)).astype(number), g, b)
        y = np.moveaxis(np.broadcast_to(y, view).reshape(first.shape), 1, axis)
        space = () if kind in ("group", "instance") else x.shape[1:-1]
        shape = (x.shape[0], *space) if kind in ("layer", "rms") else (x.shape[0], groups)
        types = x.dtype if gamma is None and x.dtype.itemsize > 2 else np.float32
        kind_of_result = types if gamma is None else gamma.dtype
        results = [rounded(each.astype(np.float64), kind_of_result).reshape(shape)
                   for each in returned(m, w)]  # fmt: skip
        return rounded(y.astype(np.float64), x.dtype), *results

    if kind == "rms":
        return lambda x, gamma, *, epsilon: of_inputs(x, gamma, None, epsilon=epsilon)[::2]
    if kind == "layer":
        return lambda x, gamma, beta, *, epsilon: of_inputs(x, gamma, beta, epsilon=epsilon)
    if kind == "instance":
        return lambda x, gamma, beta, *, epsilon, data_format: of_inputs(
            x, gamma, beta, epsilon=epsilon, data_format=data_format
        )
    return lambda x, gamma, beta, *, epsilon, data_format, groups: of_inputs(
        x, gamma, beta, epsilon=epsilon, data_format=data_format, groups=groups
    )


FLOAT32 = {"wide": np.float32}
IN_ROWS = {**FLOAT32, "sums": in_rows(serial)}
RIGHT = {
    "layer_right": forward("layer"),
    "layer_serial": forward("layer", **IN_ROWS),
    "layer_pairwise": forward("layer", **FLOAT32),
    "layer_wide_sums": forward("layer", **FLOAT32, sums=wide_sum),
    "layer_one_pass": forward("layer", **FLOAT32, statistics=one_pass),
    "layer_welford": forward("layer", **FLOAT32, statistics=welford),
    "rms_right": forward("rms"),
    "rms_serial": forward("rms", **IN_ROWS),
    "rms_blocked": forward("rms", **FLOAT32, sums=in_rows(blocked)),
    "group_serial": forward("group", **IN_ROWS),
    "group_welford": forward("group", **FLOAT32, statistics=welford),
    "group_one_pass": forward("group", **IN_ROWS, statistics=one_pass),
    "instance_blocked": forward("instance", **FLOAT32, sums=in_rows(blocked)),
}


def _bessel(x, mean):
    m, v = two_pass(x, mean)
    size = x.size / m.size
    return m, v * size / max(size - 1, 1)


#: Wrong forward passes, and the id of the finding.
WRONG = {
    "layer_bessel": (forward("layer", statistics=_bessel), "bessel"),
    "layer_epsilon_outside": (forward("layer", inverse=lambda v, e: 1 / (np.sqrt(v) + e)),
                              "epsilon-outside"),
    "layer_no_gamma": (forward("layer", element=lambda h, g, b: h + b), "gamma-left-out"),
    "layer_no_beta": (forward("layer", element=lambda h, g, b: h * g), "beta-left-out"),
    "rms_centred": (forward("rms", statistics=two_pass), "statistics-of-layer-norm"),
    "rms_gamma_plus_one": (forward("rms", element=lambda h, g, b: h * (1 + g)), "gamma-plus-one"),
    "rms_no_epsilon": (forward("rms", inverse=lambda v, e: 1 / np.sqrt(v)), "epsilon-left-out"),
    "group_beta_gamma": (forward("group", element=lambda h, g, b: g * (h + b)), "beta-gamma"),
    "group_mean_returned_0": (forward("group", returned=lambda m, v: (0 * m, v)), "mean-zero"),
    "instance_no_root": (forward("instance", inverse=lambda v, e: 1 / (v + e)), "no-root"),
}  # fmt: skip

_LAYER, _RMS, _GROUP = (forward(kind) for kind in ("layer", "rms", "group"))


def native_layer_norm(input, normalized_shape, weight, bias, eps):
    """ATen's operator; its statistics have the rank of x."""
    assert normalized_shape == [input.shape[-1]]
    y, mean, variance = _LAYER(input, weight, bias, epsilon=eps)
    return y, mean[..., None], _inverse(variance, eps)[..., None]


def variance_as_rstd(input, normalized_shape, weight, bias, eps):
    """ATen's operator, wrong: it returns the variance."""
    y, mean, variance = _LAYER(input, weight, bias, epsilon=eps)
    return y, mean[..., None], variance[..., None]


def fused_rms_norm(input, normalized_shape, weight, eps):
    y, variance = _RMS(input, weight, epsilon=eps)
    return y, _inverse(variance, eps)[..., None]


def native_group_norm(input, weight, bias, *sizes):
    images, channels, space, groups, eps = sizes
    assert (images, channels) == input.shape[:2]
    assert images * channels * space == input.size
    options = {"epsilon": eps, "data_format": "NCX", "groups": groups}
    y, mean, variance = _GROUP(input, weight, bias, **options)
    return y, mean, _inverse(variance, eps)


def _inverse(variance, eps):
    with np.errstate(all="ignore"):
        wide = 1.0 / np.sqrt(variance.astype(np.float64) + eps)
    return rounded(wide, variance.dtype)


#: Functions with the arguments of operators: as in `row_kernels`.
OPERATORS = {
    "native_layer_norm": ("aten", "native_layer_norm", "layer-norm-forward", None),
    "variance_as_rstd": ("aten", None, "layer-norm-forward", "inverse-variance"),
    "fused_rms_norm": ("aten", "_fused_rms_norm", "rms-norm-forward", None),
    "native_group_norm": ("aten", "native_group_norm", "group-norm-forward", None),
}

globals().update(RIGHT, **{name: each for name, (each, _) in WRONG.items()})
