# Written by scripts/make_dialects_stubs.py from the operators' schemas.

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from backnorm.arithmetics import Arithmetic
from backnorm.dialects._aten_phases import (
    batch_norm_backward_elemt as batch_norm_backward_elemt,
)
from backnorm.dialects._aten_phases import (
    batch_norm_backward_reduce as batch_norm_backward_reduce,
)
from backnorm.dialects.operator import Operator
from backnorm.dialects.schema import Required

class _NativeBatchNormBackward(Operator):
    def __call__(
        self,
        grad_out: ArrayLike | None = None,
        input: ArrayLike | None = None,
        weight: ArrayLike | None = None,
        running_mean: object = None,
        running_var: object = None,
        save_mean: ArrayLike | None = None,
        save_invstd: ArrayLike | None = None,
        train: bool | Required = ...,
        eps: float | Required = ...,
        output_mask: Sequence[bool] | np.ndarray | Required = ...,
        *,
        arithmetic: Arithmetic | None = None,
    ) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]: ...

OPERATORS: dict[str, Operator | type[Operator]]
native_batch_norm_backward: _NativeBatchNormBackward
