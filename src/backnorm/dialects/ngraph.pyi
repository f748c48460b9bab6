# Written by scripts/make_dialects_stubs.py from the operators' schemas.

import numpy as np
from numpy.typing import ArrayLike

from backnorm.arithmetics import Arithmetic
from backnorm.dialects.operator import Operator
from backnorm.dialects.schema import Required

class _BatchNormInference(Operator):
    def __call__(
        self,
        input: ArrayLike | None = None,
        gamma: ArrayLike | None = None,
        beta: ArrayLike | None = None,
        mean: ArrayLike | None = None,
        variance: ArrayLike | None = None,
        epsilon: float | Required = ...,
        *,
        normalized: np.ndarray | None = None,
        arithmetic: Arithmetic | None = None,
    ) -> np.ndarray: ...
    def from_node_order(
        self,
        gamma: ArrayLike | None = None,
        beta: ArrayLike | None = None,
        input: ArrayLike | None = None,
        mean: ArrayLike | None = None,
        variance: ArrayLike | None = None,
        epsilon: float | Required = ...,
        *,
        normalized: np.ndarray | None = None,
        arithmetic: Arithmetic | None = None,
    ) -> np.ndarray: ...

class _BatchNormTraining(Operator):
    def __call__(
        self,
        input: ArrayLike | None = None,
        gamma: ArrayLike | None = None,
        beta: ArrayLike | None = None,
        epsilon: float | Required = ...,
        *,
        normalized: np.ndarray | None = None,
        arithmetic: Arithmetic | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...
    def from_node_order(
        self,
        gamma: ArrayLike | None = None,
        beta: ArrayLike | None = None,
        input: ArrayLike | None = None,
        epsilon: float | Required = ...,
        *,
        normalized: np.ndarray | None = None,
        arithmetic: Arithmetic | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...

class _BatchNormTrainingBackprop(Operator):
    def __call__(
        self,
        input: ArrayLike | None = None,
        gamma: ArrayLike | None = None,
        beta: ArrayLike | None = None,
        mean: ArrayLike | None = None,
        variance: ArrayLike | None = None,
        delta: ArrayLike | None = None,
        epsilon: float | Required = ...,
        *,
        input_delta: np.ndarray | None = None,
        arithmetic: Arithmetic | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...
    def from_node_order(
        self,
        gamma: ArrayLike | None = None,
        beta: ArrayLike | None = None,
        input: ArrayLike | None = None,
        mean: ArrayLike | None = None,
        variance: ArrayLike | None = None,
        delta: ArrayLike | None = None,
        epsilon: float | Required = ...,
        *,
        input_delta: np.ndarray | None = None,
        arithmetic: Arithmetic | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...

OPERATORS: dict[str, Operator | type[Operator]]
BatchNormInference: _BatchNormInference
BatchNormTraining: _BatchNormTraining
BatchNormTrainingBackprop: _BatchNormTrainingBackprop
