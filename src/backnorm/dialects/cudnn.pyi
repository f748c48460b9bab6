# Written by scripts/make_dialects_stubs.py from the operators' schemas.

import numpy as np
from numpy.typing import ArrayLike

from backnorm.arithmetics import Arithmetic
from backnorm.dialects.operator import Operator
from backnorm.dialects.schema import Required

class _BatchNormalizationBackward(Operator):
    def __call__(
        self,
        mode: str | Required = ...,
        alphaDataDiff: float | Required = ...,
        betaDataDiff: float | Required = ...,
        alphaParamDiff: float | Required = ...,
        betaParamDiff: float | Required = ...,
        x: ArrayLike | None = None,
        dy: ArrayLike | None = None,
        dx: np.ndarray | None = None,
        bnScale: ArrayLike | None = None,
        dBnScale: np.ndarray | None = None,
        dBnBias: np.ndarray | None = None,
        epsilon: float | Required = ...,
        savedMean: ArrayLike | None = None,
        savedInvVariance: ArrayLike | None = None,
        *,
        arithmetic: Arithmetic | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...

OPERATORS: dict[str, Operator | type[Operator]]
BatchNormalizationBackward: _BatchNormalizationBackward
