"""ATen: PyTorch's native_batch_norm_backward, and the two halves that SyncBatchNorm calls.

Source: PyTorch's operator declarations (native_functions.yaml) and its CPU and CUDA kernels.
Argument lists, defaults and results are PyTorch's, on NumPy arrays. Importing this module imports
no PyTorch.

===============================  ===========================================================
here                             canonical
===============================  ===========================================================
input, grad_out, grad_input      x, dy, dx
weight                           gamma (absent: 1)
save_mean, mean                  mean
save_invstd, invstd              1 / sqrt(variance + epsilon); epsilon is inside
running_mean, running_var        mean, variance, where train is False
grad_weight, grad_bias           dgamma, dbeta
train, eps                       training, epsilon
===============================  ===========================================================

The channel axis is 1. An inverse deviation w becomes the float64 variance 1/w**2, which restores w
to within 2**-52: for float32 and 16-bit data no result shows it, and for float64 data it adds a
part of the budget of a result (:mod:`backnorm.conformance.judge`).
"""

from __future__ import annotations

from backnorm.dialects._operator import DialectOperator
from backnorm.dialects.aten.backward import native_batch_norm_backward
from backnorm.dialects.aten.parts import batch_norm_backward_elemt, batch_norm_backward_reduce

__all__ = [
    "OPERATORS",
    "batch_norm_backward_elemt",
    "batch_norm_backward_reduce",
    "native_batch_norm_backward",
]

OPERATORS: dict[str, DialectOperator] = {
    native_batch_norm_backward.schema.op: native_batch_norm_backward
}
