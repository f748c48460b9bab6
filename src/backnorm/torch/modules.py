"""Modules: PyTorch's batch normalisation, computed by ours."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.fx import Proxy

from backnorm.activations import check_ceiling
from backnorm.arithmetics import Arithmetic, check_arithmetic
from backnorm.errors import BacknormError
from backnorm.scalars import check_flag
from backnorm.torch import exchange, functional, synchronised, tools
from backnorm.torch.activations import RELU, Activation, activated
from backnorm.torch.arithmetics import named
from backnorm.torch.checks import not_a_tensor
from backnorm.torch.rectifiers import settled
from backnorm.torch.separable import Separable, as_node

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
    """What all have in common: everything but the forward is PyTorch's."""

    #: What elements are computed in; of the class where a layer says nothing, as one does not that
    #: was PyTorch's, or was pickled when there was no choice.
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
        """The number of channels, of a layer that another class of layers could stand for.

        It is what tools read that build another layer in the place of this one
        (`torch.nn.SyncBatchNorm.convert_sync_batchnorm`, frozen layers, quantisation). The other
        layer would not compute what this one does besides, so here such a tool gets an error.
        """
        besides = self._besides()
        if besides is not None:
            raise BacknormError(
                f"num_features: a {type(self).__name__} {besides[0]}; a layer that is built in its "
                f"place would not: {besides[1]}"
            )
        channels: int = self.__dict__["num_features"]
        return channels

    @num_features.setter
    def num_features(self, channels: int) -> None:
        self.__dict__["num_features"] = channels

    def __dir__(self) -> list[str]:
        """Return the names of attributes, without `num_features` where it is an error."""
        names: list[str] = super().__dir__()
        return names if self._besides() is None else [*filter("num_features".__ne__, names)]

    def _besides(self) -> tuple[str, str] | None:
        """Return what the layer does that PyTorch's of one process does not, and a remedy."""
        if self.activation is None:
            return None
        return f"computes {self.activation}, too", _REMEDY

    def extra_repr(self) -> str:
        """Return PyTorch's, and what else the layer says: arithmetic, reproducible, activation."""
        shown = named(super().extra_repr(), self.arithmetic)
        shown = f"{shown}, reproducible=True" if self.reproducible else shown
        if self.activation is None:
            return shown
        name, ceiling = self.activation
        bound = "" if ceiling is None else f", ceiling={ceiling}"
        return f"{shown}, activation={name!r}{bound}"

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input`, and apply the activation; in training, move the running statistics."""
        if isinstance(input, Proxy):
            self.separate()
            return as_node(self, input)
        self._check_input_dim(input)
        return self._normalised(input, self.activation)

    def with_relu(
        self, input: Tensor, residual: Tensor | None = None, ceiling: float | None = None
    ) -> Tensor:
        """Return relu(normalised input + residual) in one pass; hooks of the module are not called.

        It is no more than the ceiling, if there is one.
        """
        self._check_input_dim(input)
        activation = RELU if ceiling is None else Activation("relu", ceiling)
        return self._normalised(input, activation, residual)

    def separate(self) -> None:
        """Compute no activation from now on; the activation's module does."""
        self.__dict__.pop("activation", None)

    def _normalised(
        self,
        input: Tensor,
        activation: Activation | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return activation(normalised input + residual); only a ReLU has a residual before it."""
        mean, variance, training, share = self._statistics()
        settings = mean, variance, *self._parameters_of_channels(), training, share, self.eps
        options: Any = {"arithmetic": self.arithmetic, "reproducible": self.reproducible}
        if activation is None:
            return functional.batch_norm(input, *settings, **options)
        name, ceiling = activation
        if name != "relu":
            return functional.batch_norm_activation(input, *settings, activation=name, **options)
        if ceiling is not None:
            options["ceiling"] = ceiling
        if residual is None:
            return functional.batch_norm_relu(input, *settings, **options)
        return functional.batch_norm_add_relu(input, residual, *settings, **options)

    def _check_input_dim(self, input: Tensor) -> None:
        # PyTorch's looks at the rank before all else.
        if not hasattr(input, "dim"):
            raise not_a_tensor("input", input)
        super()._check_input_dim(input)

    def _statistics(self) -> tuple[Tensor | None, Tensor | None, bool, float]:
        """Count a batch, and return running statistics, training and momentum of the function.

        With momentum None the average is cumulative: the share of the n-th batch is 1/n.
        """
        running_mean, running_var, counter = self._buffers_of_channels()
        momentum = self.momentum
        share = 0.0 if momentum is None else momentum
        if not self.training:
            return running_mean, running_var, running_mean is None and running_var is None, share
        if not is_compiling() and self._forward_hooks:
            tools.check_validated(self, _BatchNorm)
        if not self.track_running_stats:
            return None, None, True, share
        if counter is not None:
            counter.add_(1)
            if momentum is None:
                share = 1.0 / float(counter)
        return running_mean, running_var, True, share

    # A module looks an attribute up in 0.9 us (AMD EPYC, Zen 3). Where one is another thing, as
    # with a parametrisation, it is not in these dictionaries; compilers know attributes alone.

    def _parameters_of_channels(self) -> tuple[Tensor | None, Tensor | None]:
        held = self._parameters
        try:
            if not is_compiling():
                return held["weight"], held["bias"]
        except KeyError:
            pass
        return self.weight, self.bias

    def _buffers_of_channels(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        held = self._buffers
        try:
            if not is_compiling():
                return held["running_mean"], held["running_var"], held["num_batches_tracked"]
        except KeyError:
            pass
        return self.running_mean, self.running_var, self.num_batches_tracked


class _BatchNormReLU(_BatchNorm):
    """What the modules with a ReLU have in common."""

    #: What they return at most: 6.0 makes the ReLU a ReLU6.
    ceiling: float | None = None

    def __init__(self, *arguments: Any, ceiling: float | None = None, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        if ceiling is not None:
            self.ceiling = check_ceiling(ceiling)

    def extra_repr(self) -> str:
        """Return what that of `BatchNorm2d` does, and the ceiling, if there is one."""
        shown = super().extra_repr()
        return shown if self.ceiling is None else f"{shown}, ceiling={self.ceiling}"

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return relu(normalised input + residual), no more than the ceiling."""
        if isinstance(input, Proxy):
            return as_node(self, input, *(() if residual is None else (residual,)))
        return self.with_relu(input, residual, self.ceiling)

    def _besides(self) -> tuple[str, str]:
        return "computes a ReLU, too", "use two modules instead, a BatchNorm layer and a ReLU"


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
        settings = eps, momentum, affine, track_running_stats, device, dtype
        how: Any = {"arithmetic": arithmetic, "reproducible": reproducible}
        super().__init__(num_features, *settings, **how)
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
        self,
        input: Tensor,
        activation: Activation | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        group = exchange.group_of(self.process_group) if self.training else None
        if group is None:
            return super()._normalised(input, activation, residual)
        mean, variance, _, share = self._statistics()
        operands = input, residual, mean, variance, self.weight, self.bias, share, self.eps
        name, ceiling = activation or (None, None)
        y = synchronised.batch_norm(
            *operands,
            relu=name == "relu",
            ceiling=settled(ceiling, input.dtype),
            arithmetic=self.arithmetic,
            reproducible=self.reproducible,
            group=group,
            layer=exchange.name_of(self, group),
        )
        return y if name in (None, "relu") else activated(y, name)


class LazyBatchNorm1d(_BatchNorm, torch.nn.LazyBatchNorm1d):
    """`torch.nn.LazyBatchNorm1d`, which becomes `BatchNorm1d` with its first batch."""

    cls_to_become = BatchNorm1d


class LazyBatchNorm2d(_BatchNorm, torch.nn.LazyBatchNorm2d):
    """`torch.nn.LazyBatchNorm2d`, which becomes `BatchNorm2d` with its first batch."""

    cls_to_become = BatchNorm2d


class LazyBatchNorm3d(_BatchNorm, torch.nn.LazyBatchNorm3d):
    """`torch.nn.LazyBatchNorm3d`, which becomes `BatchNorm3d` with its first batch."""

    cls_to_become = BatchNorm3d
