"""TensorFlow: FusedBatchNormGradV3, its older versions, and their forward operators.

Source: TensorFlow's operator registry and the argument names of ``tf.raw_ops``. Importing this
module imports no TensorFlow.

====================================  ==================================================
here                                  canonical
====================================  ==================================================
x, y_backprop, x_backprop, y          x, dy, dx, y
scale, offset                         gamma, beta
reserve_space_1, reserve_space_2      mean, variance (biased)
scale_backprop, offset_backprop       dgamma, dbeta
data_format NHWC, NDHWC / NC(D)HW     NXC / NCX
is_training                           training
====================================  ==================================================

In the forward, batch_mean and batch_variance are the new running statistics, the latter with
Bessel's correction; reserve_space_1 and reserve_space_2 are the batch's own.
"""

from __future__ import annotations

from backnorm.dialects._operator import DialectOperator
from backnorm.dialects.tensorflow.forward import (
    FusedBatchNorm,
    FusedBatchNormV2,
    FusedBatchNormV3,
)
from backnorm.dialects.tensorflow.gradient import (
    FusedBatchNormGrad,
    FusedBatchNormGradV2,
    FusedBatchNormGradV3,
)

__all__ = [
    "OPERATORS",
    "FusedBatchNorm",
    "FusedBatchNormGrad",
    "FusedBatchNormGradV2",
    "FusedBatchNormGradV3",
    "FusedBatchNormV2",
    "FusedBatchNormV3",
]

OPERATORS: dict[str, DialectOperator] = {
    op.schema.op: op
    for op in (
        FusedBatchNormGradV3,
        FusedBatchNormGradV2,
        FusedBatchNormGrad,
        FusedBatchNormV3,
        FusedBatchNormV2,
        FusedBatchNorm,
    )
}
