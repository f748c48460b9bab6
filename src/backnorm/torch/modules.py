"""Modules: PyTorch's batch normalisation, computed by ours."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.fx import Proxy

from backnorm.activations import Activation, check_activation
from backnorm.arithmetics import Arithmetic, check_arithmetic
from backnorm.errors import BacknormError
from backnorm.scalars import check_flag
from backnorm.torch import exchange, functional, synchronised, tools
from backnorm.torch.checks import check_statistics, not_a_tensor
from backnorm.torch.options import named, traced_options
from backnorm.torch.running_statistics import Running
from backnorm.torch.separable import Separable, as_node, described_activation

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "BatchNormReLU1d",
    "BatchNormReLU2d",
    "BatchNormReLU3d",
    "LazyBatchNorm1d",
    "LazyBatchNorm2d",
    "LazyBatchNorm3d",
    "SyncBatchNorm",
]


_REMEDY = (
    "run backnorm.torch.revert(model) before; for statistics of all processes "
    "backnorm.torch.convert(model, sync=True) is enough"
)


@tools.unscriptable
class _BatchNorm(Separable, torch.nn.modules.batchnorm._BatchNorm):
    """The forward that all layers share; everything else is PyTorch's."""

    #: The type in which elements are computed; None for a layer that leaves it to the caller.
    arithmetic: Arithmetic | None = None

    #: Whether results in training have the same bits however the batch is cut.
    reproducible: bool = False

    #: What is applied to the normalised values; `convert` sets it where it fuses two modules.
    activation: Activation | None = None

    def __init__(
        self,
        *arguments: Any,
        arithmetic: Arithmetic | None = None,
        reproducible: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        tools.register_with_opacus(_BatchNorm)
        if arithmetic is not None:
            self.arithmetic = check_arithmetic(arithmetic)
        if check_flag("reproducible", reproducible):
            self.reproducible = True

    @property
    def num_features(self) -> int:
        """The number of channels; an error for a layer that computes an activation, too.

        Tools read it when they build another layer in the place of this one
        (`torch.nn.SyncBatchNorm.convert_sync_batchnorm`, frozen layers, quantisation). The other
        layer would not compute the activation.
        """
        if self.activation is not None:
            raise BacknormError(
                f"num_features: a {type(self).__name__} computes "
                f"{described_activation(self.activation)}, too; a layer that is built in its place "
                f"would not: {self._remedy()}"
            )
        channels: int = self.__dict__["num_features"]
        return channels

    @num_features.setter
    def num_features(self, channels: int) -> None:
        self.__dict__["num_features"] = channels

    def __dir__(self) -> list[str]:
        """Return the names of attributes, without `num_features` where it is an error."""
        names: list[str] = super().__dir__()
        return names if self.activation is None else [*filter("num_features".__ne__, names)]

    def _remedy(self) -> str:
        return _REMEDY

    def extra_repr(self) -> str:
        """Return PyTorch's, and arithmetic, reproducible and activation if they are set."""
        text = named(super().extra_repr(), self.arithmetic)
        text = f"{text}, reproducible=True" if self.reproducible else text
        if self.activation is None:
            return text
        name, ceiling = self.activation
        bound = "" if ceiling is None else f", ceiling={ceiling}"
        return f"{text}, activation={name!r}{bound}"

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input`, and apply the activation; in training, move the running statistics."""
        if isinstance(input, Proxy):
            self.separate()
            return as_node(self, input)
        self._check_input_dim(input)
        return self._normalised(input, None, self.activation)

    def separate(self) -> None:
        """Compute no activation from now on; the activation's module does."""
        self.__dict__.pop("activation", None)

    def _normalised(
        self, input: Tensor, residual: Tensor | None, activation: Activation | None
    ) -> Tensor:
        """Return activation(normalised input + residual)."""
        mean, variance, training, momentum = self._statistics()
        weight, bias = self._parameters_of_channels()
        return functional.batch_norm(
            input, mean, variance, weight, bias, training, momentum, self.eps,
            activation=activation, residual=residual,
            arithmetic=self.arithmetic, reproducible=self.reproducible,
        )  # fmt: skip

    def _check_input_dim(self, input: Tensor) -> None:
        # PyTorch's looks at the rank before all else.
        if not hasattr(input, "dim"):
            raise not_a_tensor("input", input)
        super()._check_input_dim(input)

    def _statistics(self) -> tuple[Tensor | None, Tensor | None, bool, float]:
        """Count a batch, and return running statistics, training and momentum of the function.

        With momentum None the average is cumulative: the weight of the n-th batch is 1/n.
        """
        running_mean, running_var, counter = self._buffers_of_channels()
        momentum = 0.0 if self.momentum is None else self.momentum
        if not self.training:
            return running_mean, running_var, running_mean is None and running_var is None, momentum
        if not is_compiling() and self._forward_hooks:
            tools.check_validated(self, _BatchNorm)
        if not self.track_running_stats:
            return None, None, True, momentum
        if counter is not None:
            counter.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(counter)
        return running_mean, running_var, True, momentum

    # A module looks an attribute up in 0.9 us (AMD EPYC, Zen 3). A parametrised parameter is not in
    # these dictionaries; compilers know attributes alone.

    def _parameters_of_channels(self) -> tuple[Tensor | None, Tensor | None]:
        parameters = self._parameters
        if is_compiling() or "weight" not in parameters or "bias" not in parameters:
            return self.weight, self.bias
        return parameters["weight"], parameters["bias"]

    def _buffers_of_channels(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        names = "running_mean", "running_var", "num_batches_tracked"
        buffers = self._buffers
        if is_compiling() or not all(map(buffers.__contains__, names)):
            return self.running_mean, self.running_var, self.num_batches_tracked
        return buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"]


class _BatchNormReLU(_BatchNorm):
    """A layer with a ReLU of its own, which cannot be separated from it."""

    def __init__(self, *arguments: Any, ceiling: float | None = None, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.activation = check_activation(Activation("relu", ceiling))

    def separate(self) -> None:
        """Keep the ReLU: no other module computes it."""

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return relu(normalised input + residual), no more than the ceiling."""
        if isinstance(input, Proxy):
            return as_node(self, input, *(() if residual is None else (residual,)))
        self._check_input_dim(input)
        return self._normalised(input, residual, self.activation)

    def _remedy(self) -> str:
        return "use two modules instead, a BatchNorm layer and a ReLU"


class BatchNorm1d(_BatchNorm, torch.nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d`, computed by backnorm: inputs of shape (N, C) or (N, C, L)."""


class BatchNorm2d(_BatchNorm, torch.nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d`, computed by backnorm: inputs of shape (N, C, H, W)."""


class BatchNorm3d(_BatchNorm, torch.nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d`, computed by backnorm: inputs of shape (N, C, D, H, W)."""


class BatchNormReLU1d(_BatchNormReLU, torch.nn.BatchNorm1d):
    """relu(`BatchNorm1d`(input) + residual) in one pass; the residual may be absent.

    With ``ceiling=6.0`` the ReLU is a ReLU6.
    """


class BatchNormReLU2d(_BatchNormReLU, torch.nn.BatchNorm2d):
    """relu(`BatchNorm2d`(input) + residual) in one pass; the residual may be absent.

    With ``ceiling=6.0`` the ReLU is a ReLU6.
    """


class BatchNormReLU3d(_BatchNormReLU, torch.nn.BatchNorm3d):
    """relu(`BatchNorm3d`(input) + residual) in one pass; the residual may be absent.

    With ``ceiling=6.0`` the ReLU is a ReLU6.
    """


class SyncBatchNorm(_BatchNorm):
    """`torch.nn.SyncBatchNorm`, computed by backnorm: statistics of the batch of all processes.

    In training, where `torch.distributed` is initialised and the process group has more than one
    process, mean and variance are those of the elements of all of them, combined without a loss of
    digits (`exchange`), whatever the sizes of their parts: a part may be empty. Gradients are those
    of the whole batch, too; those of weight and bias are this part's, which
    DistributedDataParallel averages. Everywhere else it is a layer like `BatchNorm2d`.

    Any backend will do (gloo, NCCL), on the CPU and on CUDA devices. (So it is no instance of
    `torch.nn.SyncBatchNorm`, which DistributedDataParallel refuses on the CPU.) A process whose
    group cannot exchange raises `SynchronisationError`, with the name of the layer where `convert`
    has told it.

    Parameters
    ----------
    num_features, eps, momentum, affine, track_running_stats, process_group, device, dtype
        As of `torch.nn.SyncBatchNorm`; inputs are of shape (N, C, ...).
    arithmetic : {"float32", "float64"}, optional
        What elements are computed in.
    reproducible : bool
        Whether y, statistics and gradients have the same bits on any number of processes, however
        the batch is cut, in every layout. The gradients of weight and bias are then those of the
        whole batch in the first process, and zero in the others, so that what
        DistributedDataParallel adds up is rounded once.
    """

    #: What an error calls this layer.
    name: str = "a SyncBatchNorm layer"

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        arithmetic: Arithmetic | None = None,
        reproducible: bool = False,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device, dtype,
            arithmetic=arithmetic, reproducible=reproducible,
        )  # fmt: skip
        self.process_group = process_group

    def _check_input_dim(self, input: Tensor) -> None:
        if not hasattr(input, "dim"):
            raise not_a_tensor("input", input)
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    @property
    def qconfig(self) -> NoReturn:
        """An error: the layer has no settings of quantisation.

        `torch.nn.SyncBatchNorm.convert_sync_batchnorm` asks for them when it builds PyTorch's layer
        in the place of this one, which is synchronised already.
        """
        raise BacknormError(
            f"qconfig: a {type(self).__name__} of backnorm normalises the batch of all processes, "
            "and cannot be quantised or replaced by torch.nn.SyncBatchNorm; for those run "
            "backnorm.torch.revert(model) before"
        )

    def __dir__(self) -> list[str]:
        """Return the names of attributes, without the one that is an error."""
        return [*filter("qconfig".__ne__, super().__dir__())]

    def _normalised(
        self, input: Tensor, residual: Tensor | None, activation: Activation | None
    ) -> Tensor:
        group = exchange.group_of(self.process_group) if self.training else None
        if group is None:
            return super()._normalised(input, residual, activation)
        mean, variance, _, momentum = self._statistics()
        running = None
        if mean is not None or variance is not None:
            running = Running(*check_statistics(mean, variance), momentum)
        layer = exchange.name_of(self, group)
        return synchronised.batch_norm(
            input, residual, self.weight, self.bias, running,
            traced_options(True, self.eps, activation, self.arithmetic, input.dtype),
            synchronised.Processes(group, layer, self.reproducible),
        )  # fmt: skip


class LazyBatchNorm1d(_BatchNorm, torch.nn.LazyBatchNorm1d):
    """`torch.nn.LazyBatchNorm1d`, which becomes `BatchNorm1d` with its first batch."""

    cls_to_become = BatchNorm1d


class LazyBatchNorm2d(_BatchNorm, torch.nn.LazyBatchNorm2d):
    """`torch.nn.LazyBatchNorm2d`, which becomes `BatchNorm2d` with its first batch."""

    cls_to_become = BatchNorm2d


class LazyBatchNorm3d(_BatchNorm, torch.nn.LazyBatchNorm3d):
    """`torch.nn.LazyBatchNorm3d`, which becomes `BatchNorm3d` with its first batch."""

    cls_to_become = BatchNorm3d
