"""Right and wrong gradients of layer, RMS, group and instance normalisation.

They are independent of the catalogue of mistakes, which has its own formula: `backward` views x as
(N, G, K, S), and the keywords of a kernel replace its steps.
"""

from __future__ import annotations

import numpy as np

from backnorm.dtypes import rounded

# The axes of (N, G, K, S) along which a row of statistics has its elements.
REDUCED = {"layer": (1, 2), "rms": (1, 2), "group": (2, 3), "instance": (3,)}


def numpy_sum(terms, axes):
    return terms.sum(axes, keepdims=True)


def in_rows(total):
    """Return a sum over axes of the sum `total` of a row."""

    def sums(terms, axes):
        kept = [axis for axis in range(4) if axis not in axes]
        sizes = [terms.shape[k] for k in kept], [terms.shape[k] for k in axes]
        rows = terms.transpose(*kept, *axes).reshape(*sizes[0], np.prod(sizes[1]))
        return np.expand_dims(total(rows), axes)

    return sums


def serial(rows):
    return np.add.accumulate(rows, axis=-1)[..., -1] if rows.shape[-1] else rows.sum(-1)


def blocked(rows, size=128):
    blocks = -(-rows.shape[-1] // size)
    padded = np.zeros((*rows.shape[:-1], blocks * size), rows.dtype)
    padded[..., : rows.shape[-1]] = rows
    return serial(serial(padded.reshape(*rows.shape[:-1], blocks, size)))


def wide_sum(terms, axes):
    return terms.sum(axes, keepdims=True, dtype=np.float64).astype(terms.dtype)


def gradient(d, h, g, s, mean, count):
    """Return dx of one row; `mean` takes terms and returns their mean."""
    weighted = d * g
    return s * (weighted - mean(weighted) - h * mean(weighted * h))


def rms_gradient(d, h, g, s, mean, count):
    weighted = d * g
    return s * (weighted - h * mean(weighted * h))


def kernel(
    kind,
    *,
    element=None,
    wide=np.float64,
    sums=numpy_sum,
    inverse=lambda v, e: 1 / np.sqrt(v + e),
    dgamma=lambda d, h, g, s: d * h,
    dbeta=lambda d, g: d,
    statistics=lambda m, v, x, reduced: (m, v),
    parameter_sums=None,
    regroup=lambda groups, channels: groups,
    gammas=lambda g: g,
    count=lambda size, view: size,
):
    """Return a kernel of a normalisation; without other keywords, a right one in float64."""
    reduced = REDUCED[kind]
    element = element or (rms_gradient if kind == "rms" else gradient)
    parameter_sums = parameter_sums or sums

    def of_inputs(x, dy, mean, variance, gamma, *, epsilon, data_format="NXC", groups=1):
        last = data_format == "NXC"
        axis = x.ndim - 1 if last else 1
        kind_of_sum = np.float64 if x.dtype == np.float64 else wide
        first = np.moveaxis(x, axis, 1)
        channels = first.shape[1]
        groups = channels if kind == "instance" else regroup(groups, channels)
        view = (first.shape[0], groups, channels // groups, int(np.prod(first.shape[2:])))
        shape = [1 if k in reduced else size for k, size in enumerate(view)]
        v, d = (np.moveaxis(a, axis, 1).reshape(view).astype(kind_of_sum) for a in (x, dy))
        weights = np.ones(channels) if gamma is None else gamma
        g = gammas(weights.astype(kind_of_sum)).reshape(1, groups, -1, 1)
        m = np.zeros_like(variance) if mean is None else mean
        with np.errstate(all="ignore"):
            # Statistics of other groups are not used.
            m, w = (
                a.astype(kind_of_sum).reshape(shape) if a.size == np.prod(shape) else a.ravel()[:1]
                for a in (m, variance)
            )
            m, w = statistics(m, w, v, reduced)
            s = inverse(w, kind_of_sum(epsilon)).astype(kind_of_sum)
            h = (v - m) * s
            size = max(int(np.prod([view[k] for k in reduced])), 1)
            divisor = kind_of_sum(count(size, view))
            dx = element(d, h, g, s, lambda terms: sums(terms, reduced) / divisor, divisor)
            terms = dgamma(d, h, g, s), dbeta(d, g)
            found = [parameter_sums(np.broadcast_to(t, view), (0, 3)).reshape(-1) for t in terms]
        dx = np.moveaxis(np.broadcast_to(dx, view).reshape(first.shape), 1, axis)
        return (
            rounded(dx.astype(np.float64), x.dtype),
            *(rounded(each.astype(np.float64), variance.dtype) for each in found),
        )

    if kind == "rms":
        return lambda x, dy, variance, gamma, *, epsilon: of_inputs(
            x, dy, None, variance, gamma, epsilon=epsilon
        )[:2]
    if kind == "layer":
        return lambda x, dy, mean, variance, gamma, *, epsilon: of_inputs(
            x, dy, mean, variance, gamma, epsilon=epsilon
        )
    if kind == "instance":
        return lambda x, dy, mean, variance, gamma, *, epsilon, data_format: of_inputs(
            x, dy, mean, variance, gamma, epsilon=epsilon, data_format=data_format
        )
    return lambda x, dy, mean, variance, gamma, *, epsilon, data_format, groups: of_inputs(
        x, dy, mean, variance, gamma, epsilon=epsilon, data_format=data_format, groups=groups
    )


def _of_terms(first=lambda t, g: t, second=lambda t, g: t, third=lambda t, g: t, centred=True):
    """Return a wrong dx whose three terms are changed."""

    def element(d, h, g, s, mean, count):
        w = d * g
        middle = second(mean(w), g) if centred else 0.0
        return s * (first(w, g) - middle - third(h * mean(w * h), g))

    return element


def _multiplied_first(d, h, g, s, mean, count):
    """A right dx that is multiplied by M first, and divided by it last."""
    weighted = d * g
    return (
        s / count * (count * weighted - mean(weighted) * count - h * (mean(weighted * h) * count))
    )


def _normalized_first(d, h, g, s, mean, count):
    scaled = s * g * d
    return scaled - mean(scaled) - h * mean(scaled * h)


FLOAT32 = {"wide": np.float32}
IN_ROWS = {**FLOAT32, "sums": in_rows(serial)}
#: Right kernels, in float64 and in float32.
RIGHT = {
    "layer_right": kernel("layer"),
    "layer_pairwise": kernel("layer", **FLOAT32),
    "layer_serial": kernel("layer", **IN_ROWS),
    "layer_blocked": kernel("layer", **FLOAT32, sums=in_rows(blocked)),
    "layer_wide_sums": kernel("layer", **FLOAT32, sums=wide_sum),
    "layer_multiplied_first": kernel("layer", element=_multiplied_first, **IN_ROWS),
    "layer_normalized_first": kernel("layer", element=_normalized_first, **FLOAT32),
    "layer_power": kernel("layer", inverse=lambda v, e: (v + e) ** -0.5, **IN_ROWS),
    "rms_serial": kernel("rms", **IN_ROWS),
    "rms_wide_sums": kernel("rms", **FLOAT32, sums=wide_sum),
    "group_serial": kernel("group", **IN_ROWS),
    "group_pairwise": kernel("group", **FLOAT32),
    "instance_serial": kernel("instance", **IN_ROWS),
    "instance_blocked": kernel("instance", **FLOAT32, sums=in_rows(blocked)),
}


def _first_image(terms, axes):
    return terms[:1].sum(axes, keepdims=True)


def _without_last_row(terms, axes):
    rows = terms.sum(axes, keepdims=True)
    return rows - terms[-1:, :, :, -1:]


def _over_channels(terms, axes):
    size = terms.shape[1] * terms.shape[2]
    if terms.shape[3] % size:
        return terms.sum(axes, keepdims=True)
    return terms.reshape(-1, size).sum(0)


def _in_float16(terms, axes):
    with np.errstate(all="ignore"):
        return in_rows(serial)(terms.astype(np.float16), axes).astype(terms.dtype)


def _of_x(m, v, x, reduced):
    return x.mean(reduced, keepdims=True), x.var(reduced, keepdims=True)


def _unweighted(d, h, g, s, mean, count):
    return s * (d * g - mean(d) - h * mean(d * h))


def _outside(d, h, g, s, mean, count):
    return g * s * (d - mean(d) - h * mean(d * h))


#: Wrong kernels, and the id of the finding; None: none has its name.
WRONG = {
    # NVIDIA/Megatron-LM, batch-invariant RMSNorm: the weight is in its second term twice.
    "rms_megatron": (kernel("rms", element=_of_terms(third=lambda t, g: g * t, centred=False)),
                     "projection-gamma-again"),
    # tenstorrent/tt-metal#53204: the mean of dy*gamma is subtracted twice.
    "layer_tt_metal": (kernel("layer", element=_of_terms(second=lambda t, g: 2 * t)),
                       "mean-dy-twice"),
    # flagos-ai/FlagGems#5222: the inverse deviation is taken for the variance.
    "layer_flaggems": (kernel("layer", inverse=lambda v, e: 1 / np.sqrt(1 / np.sqrt(v + e) + e)),
                       "inverse-as-variance"),
    "rms_inverse_as_variance": (
        kernel("rms", inverse=lambda v, e: 1 / np.sqrt(1 / np.sqrt(v + e) + e)),
        "inverse-as-variance",
    ),
    "layer_projection_again": (kernel("layer", element=_of_terms(third=lambda t, g: g * t)),
                               "projection-gamma-again"),
    "layer_mean_again": (kernel("layer", element=_of_terms(second=lambda t, g: g * t)),
                         "mean-dy-gamma-again"),
    "layer_epsilon_outside": (kernel("layer", inverse=lambda v, e: 1 / (np.sqrt(v) + e)),
                              "epsilon-outside"),
    "rms_epsilon_outside": (kernel("rms", inverse=lambda v, e: 1 / (np.sqrt(v) + e)),
                            "epsilon-outside"),
    "layer_sums_no_gamma": (kernel("layer", element=_unweighted), "sums-no-gamma"),
    "layer_gamma_outside": (kernel("layer", element=_outside), "gamma-outside"),
    "layer_no_gamma": (kernel("layer", gammas=np.ones_like), "no-gamma"),
    "rms_gamma_twice": (
        kernel("rms", element=lambda d, h, g, s, mean, count: g * rms_gradient(
            d, h, g, s, mean, count)),
        "gamma-twice",
    ),
    # Gemma's RMSNorm multiplies by 1 + weight.
    "rms_gamma_plus_one": (kernel("rms", gammas=lambda g: 1 + g), "gamma-plus-one"),
    "rms_of_layer_norm": (kernel("rms", element=gradient), "mean-dy"),
    "rms_no_projection": (kernel("rms", element=_of_terms(third=lambda t, g: 0 * t, centred=False)),
                          "no-projection"),
    "layer_m_less_one": (kernel("layer", count=lambda size, view: max(size - 1, 1)),
                         "count-less-one"),
    "layer_dgamma_gamma": (kernel("layer", dgamma=lambda d, h, g, s: d * h * g), "dgamma-gamma"),
    "layer_dgamma_no_s": (kernel("layer", dgamma=lambda d, h, g, s: d * h / s), "dgamma-no-s"),
    "layer_dbeta_gamma": (kernel("layer", dbeta=lambda d, g: d * g), "dbeta-gamma"),
    "layer_first_image": (kernel("layer", parameter_sums=_first_image),
                          "parameters-first-image-alone"),
    "layer_without_last_row": (kernel("layer", parameter_sums=_without_last_row),
                               "parameters-last-left-out"),
    "layer_wrong_axis": (kernel("layer", parameter_sums=_over_channels), "parameters-wrong-axis"),
    "layer_float16_sums": (kernel("layer", parameter_sums=_in_float16), "few-bits"),
    "layer_of_x": (kernel("layer", statistics=_of_x), "statistics-of-x"),
    "layer_mean_sign_dbeta_zero": (
        kernel("layer", element=_of_terms(second=lambda t, g: -t), dbeta=lambda d, g: 0 * d),
        "mean-dy-sign-dbeta-zero",
    ),
    "group_count_of_channel": (kernel("group", count=lambda size, view: max(view[3], 1)),
                               "count-of-image"),
    "group_wrong_size": (
        kernel("group", statistics=_of_x, regroup=lambda groups, channels: channels // groups),
        "groups-swapped",
    ),
    "group_mean_sign": (kernel("group", element=_of_terms(second=lambda t, g: -t)),
                        "mean-dy-sign"),
    "group_gamma_of_first": (kernel("group", gammas=lambda g: 0 * g + g[0]), "gamma-of-channel-0"),
    "group_gamma_reversed": (kernel("group", gammas=lambda g: g[::-1]), None),
    "group_no_division": (
        kernel("group", element=lambda d, h, g, s, mean, count: s * (
            d * g - mean(d * g) - h * mean(d * g * h) * count)),
        "no-division-of-projection",
    ),
    "instance_first_image": (kernel("instance", parameter_sums=_first_image),
                             "parameters-first-image-alone"),
    "instance_gamma_of_neighbour": (kernel("instance", gammas=lambda g: np.roll(g, -1)),
                                    "gamma-of-neighbour"),
    "instance_projection_s": (
        kernel("instance", element=lambda d, h, g, s, mean, count: s * (
            d * g - mean(d * g) - h / s * mean(d * g * h))),
        "projection-s",
    ),
}  # fmt: skip

_LAYER, _RMS, _GROUP = (kernel(kind) for kind in ("layer", "rms", "group"))


def native_layer_norm_backward(
    grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask
):
    """ATen's operator, by the kernel of an epsilon of 0."""
    variance = (1.0 / np.square(rstd[..., 0].astype(np.longdouble))).astype(np.float64)
    found = _LAYER(input, grad_out, mean[..., 0], variance, weight, epsilon=0.0)
    return _in_type_of(rstd, found)


def rstd_as_variance(grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask):
    """ATen's operator, wrong: its inverse deviation is taken for a variance."""
    found = _LAYER(input, grad_out, mean[..., 0], rstd[..., 0], weight, epsilon=0.25)
    return _in_type_of(rstd, found)


def fused_rms_norm_backward(grad_out, input, normalized_shape, rstd, weight, output_mask):
    variance = (1.0 / np.square(rstd[..., 0].astype(np.longdouble))).astype(np.float64)
    return _in_type_of(rstd, _RMS(input, grad_out, variance, weight, epsilon=0.0))


def native_group_norm_backward(grad_out, input, mean, rstd, weight, *sizes):
    images, channels, space, group, _ = sizes
    assert (images, channels) == input.shape[:2]
    assert images * channels * space == input.size
    variance = (1.0 / np.square(rstd.astype(np.longdouble))).astype(np.float64)
    found = _GROUP(
        input, grad_out, mean, variance, weight, epsilon=0.0, data_format="NCX", groups=group
    )
    return _in_type_of(rstd, found)


def layer_norm_backward(
    src, diff_dst, mean, variance, gamma, beta, *, begin_norm_axis, use_affine, epsilon
):
    assert begin_norm_axis == -1
    assert use_affine == (gamma is not None)
    return _LAYER(src, diff_dst, mean, variance, gamma, epsilon=epsilon)


def _in_type_of(rstd, found):
    return found[0], *(each.astype(rstd.dtype) for each in found[1:])


#: Functions with the arguments of operators: dialect, operator, id of the finding.
OPERATORS = {
    "native_layer_norm_backward": ("aten", "native_layer_norm_backward", "layer-norm", None),
    "rstd_as_variance": ("aten", None, "layer-norm", "inverse-as-variance"),
    "fused_rms_norm_backward": ("aten", "_fused_rms_norm_backward", "rms-norm", None),
    "native_group_norm_backward": ("aten", "native_group_norm_backward", "group-norm", None),
    "layer_norm_backward": ("onednn_graph", "LayerNormBackward", "layer-norm", None),
}

globals().update(RIGHT, **{name: each for name, (each, _) in WRONG.items()})
