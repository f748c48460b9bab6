"""Paddle: batch_norm_grad.

Source: PaddlePaddle 3.3.1 (commit 7688495): phi/ops/yaml/inconsistent/dygraph_backward.yaml for the
names and the order, phi/kernels/cpu/batch_norm_grad_kernel.cc for the formulas, and
phi/kernels/gpu/batch_norm_grad_kernel.cu for elements of 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from backnorm.arithmetics import Arithmetic
from backnorm.dialects._call import Call, CanonicalCall
from backnorm.dialects._run import Arrays
from backnorm.dialects._statistics import native
from backnorm.dialects.operator import Operator, by_name
from backnorm.dialects.schema import (
    REQUIRED,
    AttributeSpec,
    FormatSpec,
    OperatorSchema,
    Required,
    TensorSpec,
    channel,
    data,
    type_rules,
)

__all__ = ["OPERATORS", "batch_norm_grad"]


def _unread(name: str, *, required: bool) -> TensorSpec:
    """Return the rule of a statistic that the operator does not read, and that may be empty."""
    return TensorSpec(name, "ignored", "U", "opaque", required)


_FIRST = (
    data("x", "x", "T"),
    channel("scale", "gamma", "U", required=False),
    channel("bias", "beta", "U", required=False),
)
_LAST = (
    TensorSpec("reserve_space", "ignored", "U", "opaque", required=False),
    data("out_grad", "dy", "T"),
)
_TRAINING = (
    _unread("mean_out", required=False),
    _unread("variance_out", required=False),
    channel("saved_mean", "mean", "U"),
    channel("saved_variance", "inverse_deviation", "U"),
)
_FROZEN = (
    channel("mean_out", "mean", "U"),
    channel("variance_out", "variance", "U"),
    _unread("saved_mean", required=True),
    _unread("saved_variance", required=True),
)


class _BatchNormGrad(Operator):
    """batch_norm_grad of Paddle: gradients of batch normalisation."""

    rules = (
        OperatorSchema(
            dialect="paddle",
            op="batch_norm_grad",
            operation="backward",
            source="PaddlePaddle 3.3, {op}",
            inputs=(*_FIRST, *_TRAINING, *_LAST),
            outputs=(
                data("x_grad", "dx", "T"),
                channel("scale_grad", "dgamma", "U"),
                channel("bias_grad", "dbeta", "U"),
            ),
            attributes=(
                AttributeSpec("momentum", "f32", usual=0.9),
                AttributeSpec("epsilon", "f32", role="epsilon", range="not negative"),
                AttributeSpec("data_format", "string", "data_format", ("NCHW", "NHWC")),
                AttributeSpec("is_test", "bool", usual=False),
                AttributeSpec("use_global_stats", "bool", role="frozen"),
                AttributeSpec("trainable_statistics", "bool", usual=False),
            ),
            type_rules=type_rules(f32="f32", f64="f64", f16="f32", bf16="f32"),
            formats=(FormatSpec("NCHW", "NCX"), FormatSpec("NHWC", "NXC")),
            ranks=(2, 5),
            copies_one=True,
        ),
    )

    def __call__(
        self,
        x: ArrayLike | None = None,
        scale: ArrayLike | None = None,
        bias: ArrayLike | None = None,
        mean_out: object = None,
        variance_out: object = None,
        saved_mean: object = None,
        saved_variance: object = None,
        reserve_space: object = None,
        out_grad: ArrayLike | None = None,
        momentum: float | Required = REQUIRED,
        epsilon: float | Required = REQUIRED,
        data_format: Literal["NCHW", "NHWC"] | Required = REQUIRED,
        is_test: bool | Required = REQUIRED,
        use_global_stats: bool | Required = REQUIRED,
        trainable_statistics: bool | Required = REQUIRED,
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
        statistics = mean_out, variance_out, saved_mean, saved_variance
        x_grad, scale_grad, bias_grad = self._run(
            (x, scale, bias, *statistics, reserve_space, out_grad),
            (momentum, epsilon, data_format, is_test, use_global_stats, trainable_statistics),
            arithmetic=arithmetic,
        )
        return x_grad, scale_grad, bias_grad

    @classmethod
    def schema_for(cls, attributes: Mapping[str, object]) -> OperatorSchema:
        """Return the schema; is_test and use_global_stats determine which statistics are inputs."""
        flags = [attributes.get(name, False) for name in ("is_test", "use_global_stats")]
        if not any(type(flag) in (bool, np.bool_) and flag for flag in flags):
            return cls.schema
        return replace(cls.schema, inputs=(*_FIRST, *_FROZEN, *_LAST), frozen=True)

    @classmethod
    def translate(cls, call: Call) -> CanonicalCall:
        """Return the canonical call. If each channel has only one element, Paddle's forward pass
        copies x to y. For the gradients of such a copy, the canonical call has no outputs. Instead,
        `finish` returns the gradients.
        """
        canonical = super().translate(call)
        is_copied = call.schema.copies_one and canonical.training and call.count == 1
        return replace(canonical, blended=True, outputs={}) if is_copied else canonical

    @classmethod
    def finish(
        cls, call: Call, arrays: Arrays, results: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return the gradients of a forward pass that copied x to y.

        dx is then out_grad; dgamma and dbeta are 0.
        """
        zeros = {role: np.zeros_like(results[role]) for role in ("dgamma", "dbeta")}
        return {**results, **zeros, "dx": arrays["out_grad"].astype(native(arrays["out_grad"]))}


batch_norm_grad = _BatchNormGrad()

OPERATORS = by_name(batch_norm_grad)
