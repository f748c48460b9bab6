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
        revision: str = "latest",
    ) -> None: ...
    def __call__(
        self,
        *inputs: ArrayLike | None,
        output: np.ndarray | None = None,
        arithmetic: Arithmetic | None = None,
        **named: ArrayLike | None,
    ) -> tuple[np.ndarray, ...]: ...

class BatchNormInference(Operator):
    def __init__(
        self,
        epsilon: float | Required = ...,
        data_format: str = "NXC",
        revision: str = "latest",
    ) -> None: ...
    def __call__(
        self,
        *inputs: ArrayLike | None,
        output: np.ndarray | None = None,
        arithmetic: Arithmetic | None = None,
        **named: ArrayLike | None,
    ) -> tuple[np.ndarray, ...]: ...

class BatchNormTrainingBackprop(Operator):
    def __init__(
        self,
        epsilon: float | Required = ...,
        data_format: str = "NXC",
        revision: str = "latest",
        *,
        is_training: bool | None = None,
    ) -> None: ...
    def __call__(
        self,
        *inputs: ArrayLike | None,
        outputs: int | Collection[str] = 3,
        input_delta: np.ndarray | None = None,
        arithmetic: Arithmetic | None = None,
        **named: ArrayLike | None,
    ) -> tuple[np.ndarray, ...]: ...

OPERATORS: dict[str, Operator | type[Operator]]
REVISIONS: tuple[str, ...]
