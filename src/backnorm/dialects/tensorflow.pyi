# Written by scripts/make_dialects_stubs.py from the operators' schemas.

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from backnorm.arithmetics import Arithmetic
from backnorm.dialects.operator import Operator

class Forward(NamedTuple):
    y: np.ndarray
    batch_mean: np.ndarray
    batch_variance: np.ndarray
    reserve_space_1: np.ndarray
    reserve_space_2: np.ndarray

class ForwardV3(NamedTuple):
    y: np.ndarray
    batch_mean: np.ndarray
    batch_variance: np.ndarray
    reserve_space_1: np.ndarray
    reserve_space_2: np.ndarray
    reserve_space_3: np.ndarray

class _FusedBatchNorm(Operator):
    def __call__(
        self,
        *,
        x: ArrayLike | None = None,
        scale: ArrayLike | None = None,
        offset: ArrayLike | None = None,
        mean: ArrayLike | None = None,
        variance: ArrayLike | None = None,
        epsilon: float = 0.0001,
        exponential_avg_factor: float = 1.0,
        data_format: str = "NHWC",
        is_training: bool = True,
        name: str | None = None,
        arithmetic: Arithmetic | None = None,
    ) -> Forward: ...

class _FusedBatchNormGrad(Operator):
    def __call__(
        self,
        *,
        y_backprop: ArrayLike | None = None,
        x: ArrayLike | None = None,
        scale: ArrayLike | None = None,
        reserve_space_1: ArrayLike | None = None,
        reserve_space_2: ArrayLike | None = None,
        epsilon: float = 0.0001,
        data_format: str = "NHWC",
        is_training: bool = True,
        name: str | None = None,
        reserve_space_2_is: str = "variance",
        arithmetic: Arithmetic | None = None,
    ) -> Gradient: ...

class _FusedBatchNormGradV2(Operator):
    def __call__(
        self,
        *,
        y_backprop: ArrayLike | None = None,
        x: ArrayLike | None = None,
        scale: ArrayLike | None = None,
        reserve_space_1: ArrayLike | None = None,
        reserve_space_2: ArrayLike | None = None,
        epsilon: float = 0.0001,
        data_format: str = "NHWC",
        is_training: bool = True,
        name: str | None = None,
        reserve_space_2_is: str = "variance",
        arithmetic: Arithmetic | None = None,
    ) -> Gradient: ...

class _FusedBatchNormGradV3(Operator):
    def __call__(
        self,
        *,
        y_backprop: ArrayLike | None = None,
        x: ArrayLike | None = None,
        scale: ArrayLike | None = None,
        reserve_space_1: ArrayLike | None = None,
        reserve_space_2: ArrayLike | None = None,
        reserve_space_3: object = None,
        epsilon: float = 0.0001,
        data_format: str = "NHWC",
        is_training: bool = True,
        name: str | None = None,
        reserve_space_2_is: str = "variance",
        arithmetic: Arithmetic | None = None,
    ) -> GradientV3: ...

class _FusedBatchNormV2(Operator):
    def __call__(
        self,
        *,
        x: ArrayLike | None = None,
        scale: ArrayLike | None = None,
        offset: ArrayLike | None = None,
        mean: ArrayLike | None = None,
        variance: ArrayLike | None = None,
        epsilon: float = 0.0001,
        exponential_avg_factor: float = 1.0,
        data_format: str = "NHWC",
        is_training: bool = True,
        name: str | None = None,
        arithmetic: Arithmetic | None = None,
    ) -> Forward: ...

class _FusedBatchNormV3(Operator):
    def __call__(
        self,
        *,
        x: ArrayLike | None = None,
        scale: ArrayLike | None = None,
        offset: ArrayLike | None = None,
        mean: ArrayLike | None = None,
        variance: ArrayLike | None = None,
        epsilon: float = 0.0001,
        exponential_avg_factor: float = 1.0,
        data_format: str = "NHWC",
        is_training: bool = True,
        name: str | None = None,
        arithmetic: Arithmetic | None = None,
    ) -> ForwardV3: ...

class Gradient(NamedTuple):
    x_backprop: np.ndarray
    scale_backprop: np.ndarray
    offset_backprop: np.ndarray
    reserve_space_3: np.ndarray
    reserve_space_4: np.ndarray

class GradientV3(NamedTuple):
    x_backprop: np.ndarray
    scale_backprop: np.ndarray
    offset_backprop: np.ndarray
    reserve_space_4: np.ndarray
    reserve_space_5: np.ndarray

OPERATORS: dict[str, Operator | type[Operator]]
FusedBatchNorm: _FusedBatchNorm
FusedBatchNormGrad: _FusedBatchNormGrad
FusedBatchNormGradV2: _FusedBatchNormGradV2
FusedBatchNormGradV3: _FusedBatchNormGradV3
FusedBatchNormV2: _FusedBatchNormV2
FusedBatchNormV3: _FusedBatchNormV3
