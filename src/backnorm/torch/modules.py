"""Modules: PyTorch's batch normalisation, computed by ours."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.fx import Proxy

from backnorm.arithmetics import Arithmetic, check_arithmetic
from backnorm.torch import functional, scripting
from backnorm.torch.arithmetics import named
from backnorm.torch.checks import not_a_tensor

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
]


class _BatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """What all have in common: everything but the forward is PyTorch's."""

    #: What elements are computed in; of the class where a layer says nothing, as one does not that
    #: was PyTorch's, or was pickled when there was no choice.
    arithmetic: Arithmetic | None = None

    def __init__(
        self, *arguments: Any, arithmetic: Arithmetic | None = None, **settings: Any
    ) -> None:
        super().__init__(*arguments, **settings)
        if arithmetic is not None:
            self.arithmetic = check_arithmetic(arithmetic)

    def extra_repr(self) -> str:
        """Return PyTorch's, and what elements are computed in where the layer says it."""
        return named(super().extra_repr(), self.arithmetic)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input`; in training, move the running statistics."""
        if isinstance(input, Proxy):
            return self._as_node(input)
        self._check_input_dim(input)
        return self._normalised(input)

    def _normalised(self, input: Tensor) -> Tensor:
        mean, variance, training, share = self._statistics()
        return functional.batch_norm(
            input, mean, variance, self.weight, self.bias, training, share, self.eps,
            arithmetic=self.arithmetic,
        )  # fmt: skip

    def _check_input_dim(self, input: Tensor) -> None:
        # PyTorch's looks at the rank before all else.
        if not hasattr(input, "dim"):
            raise not_a_tensor("input", input)
        super()._check_input_dim(input)

    def with_relu(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return relu(self(input) + residual) in one pass; hooks of the module are not called."""
        self._check_input_dim(input)
        mean, variance, training, share = self._statistics()
        settings = mean, variance, self.weight, self.bias, training, share, self.eps
        arithmetic = self.arithmetic
        if residual is None:
            return functional.batch_norm_relu(input, *settings, arithmetic=arithmetic)
        return functional.batch_norm_add_relu(input, residual, *settings, arithmetic=arithmetic)

    def _statistics(self) -> tuple[Tensor | None, Tensor | None, bool, float]:
        """Count a batch, and return running statistics, training and momentum of the function.

        With momentum None the average is cumulative: the share of the n-th batch is 1/n.
        """
        running_mean, running_var, momentum = self.running_mean, self.running_var, self.momentum
        share = 0.0 if momentum is None else momentum
        if not self.training:
            return running_mean, running_var, running_mean is None and running_var is None, share
        if not self.track_running_stats:
            return None, None, True, share
        counter = self.num_batches_tracked
        if counter is not None:
            counter.add_(1)
            if momentum is None:
                share = 1.0 / float(counter)
        return running_mean, running_var, True, share

    def _as_node(self, *inputs: Proxy) -> Proxy:
        """Return a call of this module in the graph that `torch.fx` records.

        It looks into modules that are not PyTorch's own; but it is PyTorch's node that tools know.
        """
        tracer = inputs[0].tracer
        return tracer.create_proxy("call_module", tracer.path_of_module(self), inputs, {})

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse `torch.jit.script`, which compiles Python and cannot compile ours."""
        scripting.refuse("modules; script backnorm.torch.revert(model)")


class _BatchNormReLU(_BatchNorm):
    """What the modules with a ReLU have in common."""

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return relu(normalised input + residual)."""
        if isinstance(input, Proxy):
            return self._as_node(input, *(() if residual is None else (residual,)))
        return self.with_relu(input, residual)


class BatchNorm1d(_BatchNorm, torch.nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d`, computed by backnorm: inputs of shape (N, C) or (N, C, L)."""


class BatchNorm2d(_BatchNorm, torch.nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d`, computed by backnorm: inputs of shape (N, C, H, W)."""


class BatchNorm3d(_BatchNorm, torch.nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d`, computed by backnorm: inputs of shape (N, C, D, H, W)."""


class BatchNormReLU1d(_BatchNormReLU, torch.nn.BatchNorm1d):
    """relu(`BatchNorm1d`(input) + residual) in one pass; the residual may be absent."""


class BatchNormReLU2d(_BatchNormReLU, torch.nn.BatchNorm2d):
    """relu(`BatchNorm2d`(input) + residual) in one pass; the residual may be absent."""


class BatchNormReLU3d(_BatchNormReLU, torch.nn.BatchNorm3d):
    """relu(`BatchNorm3d`(input) + residual) in one pass; the residual may be absent."""


class LazyBatchNorm1d(_BatchNorm, torch.nn.LazyBatchNorm1d):
    """`torch.nn.LazyBatchNorm1d`, which becomes `BatchNorm1d` with its first batch."""

    cls_to_become = BatchNorm1d


class LazyBatchNorm2d(_BatchNorm, torch.nn.LazyBatchNorm2d):
    """`torch.nn.LazyBatchNorm2d`, which becomes `BatchNorm2d` with its first batch."""

    cls_to_become = BatchNorm2d


class LazyBatchNorm3d(_BatchNorm, torch.nn.LazyBatchNorm3d):
    """`torch.nn.LazyBatchNorm3d`, which becomes `BatchNorm3d` with its first batch."""

    cls_to_become = BatchNorm3d
