# Written by scripts/make_dialects_stubs.py from the operators' schemas.

import numpy as np
from numpy.typing import ArrayLike

from backnorm.arithmetics import Arithmetic
from backnorm.dialects.operator import Operator
from backnorm.dialects.schema import Required

class _BatchNormGrad(Operator):
    def __call__(
        self,
        operand: ArrayLike | None = None,
        scale: ArrayLike | None = None,
        mean: ArrayLike | None = None,
        variance: ArrayLike | None = None,
        grad_output: ArrayLike | None = None,
        epsilon: float | Required = ...,
        feature_index: int | Required = ...,
        *,
        arithmetic: Arithmetic | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...

class _BatchNormInference(Operator):
    def __call__(
        self,
        operand: ArrayLike | None = None,
        scale: ArrayLike | None = None,
        offset: ArrayLike | None = None,
        mean: ArrayLike | None = None,
        variance: ArrayLike | None = None,
        epsilon: float | Required = ...,
        feature_index: int | Required = ...,
        *,
        arithmetic: Arithmetic | None = None,
    ) -> np.ndarray: ...

class _BatchNormTraining(Operator):
    def __call__(
        self,
        operand: ArrayLike | None = None,
        scale: ArrayLike | None = None,
        offset: ArrayLike | None = None,
        epsilon: float | Required = ...,
        feature_index: int | Required = ...,
        *,
        arithmetic: Arithmetic | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...

OPERATORS: dict[str, Operator | type[Operator]]
batch_norm_grad: _BatchNormGrad
batch_norm_inference: _BatchNormInference
batch_norm_training: _BatchNormTraining
