"""Paddle: batch_norm_grad.

Source: PaddlePaddle 3.3.1 (commit 7688495): phi/ops/yaml/inconsistent/dygraph_backward.yaml for the
names and the order, phi/kernels/cpu/batch_norm_grad_kernel.cc for the formulas, and
phi/kernels/gpu/batch_norm_grad_kernel.cu for elements of 16 bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from numpy.typing import ArrayLike

from backnorm.arithmetics import Arithmetic
from backnorm.dialects._call import Call, CanonicalCall
from backnorm.dialects._run import Arrays
from backnorm.dialects._statistics import native
from backnorm.dialects.operator import operator
from backnorm.dialects.roles import attribute, channel, data, opaque
from backnorm.dialects.schema import FormatSpec, Rules, type_rules

__all__ = ["batch_norm_grad"]

RULES = Rules(
    dialect="paddle",
    source="PaddlePaddle 3.3, {op}",
    type_rules=type_rules(f32="f32", f64="f64", f16="f32", bf16="f32"),
    formats=(FormatSpec("NCHW", "NCX"), FormatSpec("NHWC", "NXC")),
    ranks=(2, 5),
)

IsConstant = Annotated[bool, attribute("bool", "frozen")]


def _translate(call: Call, canonical: CanonicalCall) -> CanonicalCall:
    """Return the canonical call. If each channel has only one element, Paddle's forward pass
    copies x to y. For the gradients of such a copy, the canonical call has no outputs. Instead,
    `finish` returns the gradients.
    """
    is_copied = canonical.training and call.count == 1
    return replace(canonical, blended=True, outputs={}) if is_copied else canonical


def _finish(call: Call, arrays: Arrays, results: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the gradients of a forward pass that copied x to y.

    dx is then out_grad; dgamma and dbeta are 0.
    """
    zeros = {role: np.zeros_like(results[role]) for role in ("dgamma", "dbeta")}
    return {**results, **zeros, "dx": arrays["out_grad"].astype(native(arrays["out_grad"]))}


@operator(
    RULES,
    "backward",
    translate=_translate,
    finish=_finish,
    x_grad=data("dx", "T"),
    scale_grad=channel("dgamma", "U"),
    bias_grad=channel("dbeta", "U"),
)
def batch_norm_grad(
    x: Annotated[ArrayLike, data("x", "T")],
    scale: Annotated[ArrayLike, channel("gamma", "U")] | None,
    bias: Annotated[ArrayLike, channel("beta", "U")] | None,
    mean_out: Annotated[object, opaque("ignored", "U"), channel("mean", "U")] | None,
    variance_out: Annotated[object, opaque("ignored", "U"), channel("variance", "U")] | None,
    saved_mean: Annotated[object, channel("mean", "U"), opaque("ignored", "U")],
    saved_variance: Annotated[object, channel("inverse_deviation", "U"), opaque("ignored", "U")],
    reserve_space: Annotated[object, opaque("ignored", "U")] | None,
    out_grad: Annotated[ArrayLike, data("dy", "T")],
    momentum: Annotated[float, attribute("f32", example=0.9)],
    epsilon: Annotated[float, attribute("f32", "epsilon", range="not negative")],
    data_format: Annotated[Literal["NCHW", "NHWC"], attribute("string", "data_format")],
    is_test: IsConstant,
    use_global_stats: IsConstant,
    trainable_statistics: Annotated[bool, attribute("bool", example=False)],
    *,
    arithmetic: Arithmetic | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of batch normalisation.

    With M elements per channel, s = saved_variance (the inverse standard deviation, despite its
    name) and c = x - saved_mean::

        bias_grad  = sum out_grad
        scale_grad = s * sum out_grad*c
        x_grad     = scale*s * (out_grad - bias_grad/M - c*s * scale_grad/M)

    If is_test or use_global_stats is true, c is x - mean_out, s is 1 / sqrt(variance_out +
    epsilon), and x_grad is scale*s * out_grad.

    Parameters
    ----------
    x : array of T, rank 2 to 5
        input of the forward
    scale : array of U, shape (C,), optional
        scale; None: 1
    bias : array of U, shape (C,), optional
        offset; not used, but checked
    mean_out : object, optional
        running mean, read with is_test or use_global_stats
    variance_out : object, optional
        running variance, read with is_test or use_global_stats
    saved_mean : object
        batch mean, read in training
    saved_variance : object
        1 / sqrt(batch variance + epsilon), read in training
    reserve_space : object, optional
        memory of cuDNN; ignored
    out_grad : array of T, the shape of x
        gradient of the output
    momentum : float, finite, rounded to float32
        weight of the running statistics; not used, but checked
    epsilon : float, finite and not negative, rounded to float32
        added to variance_out; not used in training, but checked
    data_format : {"NCHW", "NHWC"}
        the channel axis: 1 or last, for every rank
    is_test : bool
        True: statistics are constants
    use_global_stats : bool
        True: statistics are constants
    trainable_statistics : bool
        not used, but checked
    arithmetic : {"float32", "float64"}, optional
        an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

    Returns
    -------
    x_grad : array of T
        gradient of x
    scale_grad : array of U, shape (C,)
        gradient of scale
    bias_grad : array of U, shape (C,)
        gradient of bias

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        if an argument does not match its description; the error names the argument

    Notes
    -----
    Element types of data and of per-channel tensors: f32 with f32, f64 with f64, f16 with
    f32, bf16 with f32. Paddle's CPU kernel does not take 16-bit elements.

    - Despite its name, saved_variance is the inverse standard deviation. variance_out is the
      variance.
    - saved_mean and saved_variance must always be passed. A call does not check the statistics
      that it does not use, so an empty array will do for them.
    - In training, a batch of one element per channel gives x_grad = out_grad and zeros for
      scale_grad and bias_grad: Paddle's forward copies such a batch to its output.
    - If scale or bias is absent, Paddle returns neither scale_grad nor bias_grad; this operator
      returns both.
    """
