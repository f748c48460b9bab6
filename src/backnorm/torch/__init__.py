"""backnorm for PyTorch: functions, modules, and a whole model converted in one line.

::

    import backnorm.torch

    model = backnorm.torch.convert(model)
"""

from typing import TYPE_CHECKING, Any

from backnorm.errors import not_installed

try:
    import torch  # noqa: F401 (to raise an error that says what to install)
except ModuleNotFoundError as error:
    raise not_installed(error, "torch", __name__) from error

from backnorm.torch.checks import TensorTypeError, TensorValueError, UnsupportedTensorError
from backnorm.torch.comparison import MeasuredStep, ModelComparison, compare
from backnorm.torch.conversion import ConversionWarning, LayerReport, convert, revert
from backnorm.torch.exchange import SynchronisationError
from backnorm.torch.functional import batch_norm
from backnorm.torch.modules import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    BatchNormReLU1d,
    BatchNormReLU2d,
    BatchNormReLU3d,
    LazyBatchNorm1d,
    LazyBatchNorm2d,
    LazyBatchNorm3d,
    SyncBatchNorm,
    UnrecognisedLayerWarning,
)
from backnorm.torch.recomputation import recompute_statistics

if TYPE_CHECKING:
    from backnorm.torch.reproducible_gradients import ReproducibleGradients, reproducible_hook

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "BatchNormReLU1d",
    "BatchNormReLU2d",
    "BatchNormReLU3d",
    "ConversionWarning",
    "LayerReport",
    "LazyBatchNorm1d",
    "LazyBatchNorm2d",
    "LazyBatchNorm3d",
    "MeasuredStep",
    "ModelComparison",
    "ReproducibleGradients",
    "SyncBatchNorm",
    "SynchronisationError",
    "TensorTypeError",
    "TensorValueError",
    "UnrecognisedLayerWarning",
    "UnsupportedTensorError",
    "batch_norm",
    "compare",
    "convert",
    "recompute_statistics",
    "reproducible_hook",
    "revert",
]


def __getattr__(name: str) -> Any:
    # The package `reproducible_gradients` is imported when it is first used, because it imports
    # PyTorch's compiler, which takes more than a second.
    if name in ("ReproducibleGradients", "reproducible_hook"):
        from backnorm.torch import reproducible_gradients

        return getattr(reproducible_gradients, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
