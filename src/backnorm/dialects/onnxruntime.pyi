# Written by scripts/make_dialects_stubs.py from the operators' schemas.

import numpy as np
from numpy.typing import ArrayLike

from backnorm.arithmetics import Arithmetic
from backnorm.dialects.operator import Operator

class _BatchNormInternal(Operator):
    def __call__(
        self,
        X: ArrayLike | None = None,
        scale: ArrayLike | None = None,
        B: ArrayLike | None = None,
        input_mean: ArrayLike | None = None,
        input_var: ArrayLike | None = None,
        epsilon: float = 1e-05,
        momentum: float = 0.9,
        training_mode: int = 1,
        *,
        arithmetic: Arithmetic | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]: ...

class _BatchNormalizationGrad(Operator):
    def __call__(
        self,
        dY: ArrayLike | None = None,
        X: ArrayLike | None = None,
        scale: ArrayLike | None = None,
        saved_mean: ArrayLike | None = None,
        saved_inv_std: ArrayLike | None = None,
        epsilon: float = 1e-05,
        *,
        arithmetic: Arithmetic | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...

OPERATORS: dict[str, Operator | type[Operator]]
BatchNormInternal: _BatchNormInternal
BatchNormalizationGrad: _BatchNormalizationGrad
