# Written by scripts/make_dialects_stubs.py from the operators' schemas.

from collections.abc import Collection

import numpy as np
from numpy.typing import ArrayLike

from backnorm.arithmetics import Arithmetic
from backnorm.dialects.operator import Operator
from backnorm.dialects.schema import Required

class BatchNormForwardTraining(Operator):
    def __init__(
        self,
        epsilon: float | Required = ...,
        momentum: float | None = None,
        data_format: str = "NXC",
    ) -> None: ...
    def __call__(
        self,
        src: ArrayLike | None = None,
        mean: ArrayLike | None = None,
        variance: ArrayLike | None = None,
        gamma: ArrayLike | None = None,
        beta: ArrayLike | None = None,
        *,
        dst: np.ndarray | None = None,
        arithmetic: Arithmetic | None = None,
    ) -> tuple[np.ndarray, ...]: ...

class BatchNormInference(Operator):
    def __init__(
        self,
        epsilon: float | Required = ...,
        data_format: str = "NXC",
    ) -> None: ...
    def __call__(
        self,
        src: ArrayLike | None = None,
        gamma: ArrayLike | None = None,
        beta: ArrayLike | None = None,
        mean: ArrayLike | None = None,
        variance: ArrayLike | None = None,
        *,
        dst: np.ndarray | None = None,
        arithmetic: Arithmetic | None = None,
    ) -> tuple[np.ndarray, ...]: ...

class BatchNormTrainingBackward(Operator):
    def __init__(
        self,
        epsilon: float | Required = ...,
        data_format: str = "NXC",
        *,
        single_output: str = "specification",
    ) -> None: ...
    def __call__(
        self,
        src: ArrayLike | None = None,
        diff_dst: ArrayLike | None = None,
        mean: ArrayLike | None = None,
        variance: ArrayLike | None = None,
        gamma: ArrayLike | None = None,
        outputs: int | Collection[str] = 3,
        *,
        diff_src: np.ndarray | None = None,
        arithmetic: Arithmetic | None = None,
    ) -> tuple[np.ndarray, ...]: ...

OPERATORS: dict[str, Operator | type[Operator]]
