# Written by scripts/make_dialects_stubs.py from the operators' schemas.

import numpy as np
from numpy.typing import ArrayLike

from backnorm.arithmetics import Arithmetic
from backnorm.dialects.operator import Operator
from backnorm.dialects.schema import Required

class _BatchNormalizationTrainingGrad(Operator):
    def __call__(
        self,
        Input: ArrayLike | None = None,
        InputGradient: ArrayLike | None = None,
        Mean: ArrayLike | None = None,
        Variance: ArrayLike | None = None,
        Scale: ArrayLike | None = None,
        Epsilon: float | Required = ...,
        *,
        arithmetic: Arithmetic | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...

BATCH_NORMALIZATION_TRAINING_GRAD: _BatchNormalizationTrainingGrad
OPERATORS: dict[str, Operator | type[Operator]]
