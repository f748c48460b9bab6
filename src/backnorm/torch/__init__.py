"""backnorm for PyTorch: functions, modules, and a whole model converted in one line.

::

    import backnorm.torch

    model = backnorm.torch.convert(model)
"""

from backnorm.torch.checks import TensorTypeError, TensorValueError, UnsupportedTensorError
from backnorm.torch.conversion import ConversionWarning, convert, revert
from backnorm.torch.exchange import SynchronisationError
from backnorm.torch.functional import (
    batch_norm,
    batch_norm_activation,
    batch_norm_add_relu,
    batch_norm_relu,
)
from backnorm.torch.hooks import reproducible_hook
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
)
from backnorm.torch.pieces import ReproducibleGradients
from backnorm.torch.report import LayerReport
from backnorm.torch.tools import UnrecognisedLayerWarning
from backnorm.torch.tuning import Trial, tune

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
    "ReproducibleGradients",
    "SyncBatchNorm",
    "SynchronisationError",
    "TensorTypeError",
    "TensorValueError",
    "Trial",
    "UnrecognisedLayerWarning",
    "UnsupportedTensorError",
    "batch_norm",
    "batch_norm_activation",
    "batch_norm_add_relu",
    "batch_norm_relu",
    "convert",
    "reproducible_hook",
    "revert",
    "tune",
]
