"""Modules: PyTorch's layers of batch normalisation, computed by backnorm.

A layer can also compute the activation that follows it: that of its argument `activation`, or that
of a module that `convert` has fused with the layer.
"""

from __future__ import annotations

import sys
import warnings
from types import CodeType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.fx import Proxy
from torch.nn.utils.parametrize import type_before_parametrizations

from backnorm.activations import Activation, check_activation
from backnorm.arithmetics import Arithmetic, check_arithmetic
from backnorm.errors import ArgumentValueError, BacknormError
from backnorm.scalars import check_flag
from backnorm.torch import exchange, functional, opacus, synchronised
from backnorm.torch.checks import Operands, check_tensor, not_a_tensor
from backnorm.torch.options import named, options_of

_PHRASES = {"relu": "a ReLU", "silu": "a SiLU", "hardswish": "a Hardswish"}

# The names of functions of PyTorch and timm that replace a layer by one that only normalises.
_REPLACING = ("convert_sync_batchnorm", "freeze_batch_norm_2d")


def described_activation(activation: Activation) -> str:
    """Return an activation as a phrase, such as "a ReLU with the ceiling 6.0"."""
    phrase, ceiling = _PHRASES[activation.name], activation.ceiling
    return phrase if ceiling is None else f"{phrase} with the ceiling {ceiling}"


def alteration_of(module: torch.nn.Module) -> str | None:
    """Return what changes the call of a module, as a phrase such as "has hooks".

    Return None if a call of `module` runs only the `forward` of its class, on its own parameters.
    """
    hooks = (
        module._forward_hooks, module._forward_pre_hooks,
        module._backward_hooks, module._backward_pre_hooks,
    )  # fmt: skip
    if any(hooks) or torch.nn.modules.module._has_any_global_hook():
        return "has hooks"
    if "forward" in module.__dict__ or module._compiled_call_impl is not None:
        return "has a forward of its own"
    return "is parametrized" if "parametrizations" in module._modules else None


class UnrecognisedLayerWarning(UserWarning):
    """A tool that recognises PyTorch's layers by class was used with a layer of backnorm."""


def _warn_of_tracing(tracer: object, training: bool) -> None:
    """Warn if a PyTorch tracer records a layer of backnorm, because no pass over the traced graph
    can fold this layer into a convolution.

    The passes of `torch.fx` fold a normalisation into the preceding convolution only in evaluation
    mode. So if a tracer of `torch.fx` records a layer in training mode, there is no warning.
    Quantisation (`torch.ao`) folds every layer that it traces, so layers in training cause the
    warning there, too. The tracers of other libraries, such as torchvision's feature extraction,
    cause no warning, because no pass folds the layers that they record.
    """
    module = type(tracer).__module__
    if module.startswith("torch.ao.") or (module.startswith("torch.fx.") and not training):
        warnings.warn(
            "torch.fx recorded a layer of backnorm. Passes that match torch.nn.BatchNorm2d by "
            "class (torch.fx.experimental.optimization.fuse, prepare_fx) do not change it; call "
            "backnorm.torch.revert(model) before such a pass",
            UnrecognisedLayerWarning,
            # With `stacklevel=1`, the warning has the same location for every tracer, so that
            # Python's default filter shows it only once.
            stacklevel=1,
        )


class Fused(NamedTuple):
    """A module whose activation a layer computes, and the `Identity` in its place in the model."""

    module: torch.nn.Module
    identity: torch.nn.Identity


@functional.unscriptable
class _BatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """The mixin of all layers. It has `forward` and the options; all else is PyTorch's."""

    # The numbers of axes that an input may have, and their texts in errors.
    _ranks: ClassVar[dict[int, str]]

    #: The type in which elements are computed. None stands for the default, which the documentation
    #: of `backnorm.arithmetic` describes.
    arithmetic: Arithmetic | None = None

    #: Whether results in training have the same bits for every order of a channel's elements.
    reproducible: bool = False

    #: The activation that is applied to the normalised values.
    activation: Activation | None = None

    #: The module that `activation` was taken from; None: it was an argument of the layer. (A tuple
    #: of modules is not a child of the layer, so parameters and names of a model stay the same.)
    fused: Fused | None = None

    def __init__(
        self,
        *arguments: Any,
        activation: str | Activation | None = None,
        arithmetic: Arithmetic | None = None,
        reproducible: bool = False,
        **settings: Any,
    ) -> None:
        """Create the layer with the arguments of PyTorch's layer and three more.

        Parameters
        ----------
        *arguments, **settings
            The arguments of PyTorch's layer: num_features, eps, momentum, affine,
            track_running_stats, device and dtype.
        activation : {"relu", "relu6", "silu", "hardswish"} or Activation, optional
            Applied to the normalised values.
        arithmetic : {"float32", "float64"}, optional
            The type in which elements are computed; None: the default that `backnorm.arithmetic`
            describes.
        reproducible : bool
            Whether results in training have the same bits for every order of a channel's elements.
        """
        super().__init__(*arguments, **settings)
        opacus.register(_BatchNorm)
        if activation is not None:
            self.activation = check_activation(activation)
        if arithmetic is not None:
            self.arithmetic = check_arithmetic(arithmetic)
        if check_flag("reproducible", reproducible):
            self.reproducible = True

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        opacus.register(_BatchNorm)

    @property
    def num_features(self) -> int:
        """The number of channels.

        A function that would replace the layer by one without its activation gets an error, such as
        `torch.nn.SyncBatchNorm.convert_sync_batchnorm`.
        """
        caller = sys._getframe(1).f_code
        lost = self.lost_by(caller)
        if lost is not None:
            raise BacknormError(
                f"num_features: {caller.co_name} would replace this {type(self).__name__} by a "
                f"layer without {lost}; call backnorm.torch.revert(model) first, or to synchronise "
                "statistics backnorm.torch.convert(model, sync=True) or, for timm's layers, "
                "timm.layers.convert_sync_batchnorm"
            )
        return self.__dict__["num_features"]

    @num_features.setter
    def num_features(self, channels: int) -> None:
        self.__dict__["num_features"] = channels

    def following(self) -> str | None:
        """Return what the layer computes after the normalisation, as a phrase, or None."""
        return None if self.activation is None else described_activation(self.activation)

    def lost_by(self, caller: CodeType) -> str | None:
        """Return what would be lost if a function replaces the layer, as a phrase, or None."""
        return self.following() if caller.co_name in _REPLACING else None

    def _get_name(self) -> str:
        name: str = super()._get_name()
        is_ours = type_before_parametrizations(self).__module__.startswith("backnorm.torch.")
        return f"backnorm.torch.{name}" if is_ours else name

    def extra_repr(self) -> str:
        """Return PyTorch's text, with arithmetic, reproducible and activation if they are set."""
        text = named(super().extra_repr(), self.arithmetic)
        if self.reproducible:
            text += ", reproducible=True"
        if self.activation is None:
            return text
        name, ceiling = self.activation
        return f"{text}, activation={(name if ceiling is None else self.activation)!r}"

    def as_node(self, input: Proxy, residual: Proxy | None = None, **counted: Any) -> Proxy:
        """Return a new call of this layer in the graph of `torch.fx`.

        By default `torch.fx` traces into the forward of modules that PyTorch does not define. Tools
        for such graphs expect one node for the layer, as for PyTorch's own layer.
        """
        _warn_of_tracing(input.tracer, self.training)
        inputs = (input,) if residual is None else (input, residual)
        path = input.tracer.path_of_module(self)
        named = {name: value for name, value in counted.items() if value is not None}
        return input.tracer.create_proxy("call_module", path, inputs, named)

    def forward(
        self,
        input: Tensor,
        residual: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Return activation(normalised input + residual).

        In training, also update the running statistics. If there is a residual, the activation must
        be a ReLU. `mask` and `lengths` say which elements count in the statistics of the batch: see
        `backnorm.torch.batch_norm`.
        """
        if isinstance(input, Proxy):
            return self.as_node(input, residual, mask=mask, lengths=lengths)
        # Without this check, `_check_input_dim` would raise AttributeError when it reads the rank.
        if not hasattr(input, "dim"):
            raise not_a_tensor("input", input)
        self._check_input_dim(input)
        return self._normalised(input, residual, self.activation, mask=mask, lengths=lengths)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() in self._ranks:
            return
        # If `input` is a nested tensor, `check_tensor` raises an error for it. Otherwise, reading
        # the shape of `input` below would raise a different error.
        check_tensor("input", input)
        raise ArgumentValueError(
            "input",
            "must have as many axes as the layer accepts",
            came=f"shape {tuple(input.shape)}",
            accepted=" or ".join(self._ranks.values()),
        )

    def _normalised(
        self, input: Tensor, residual: Tensor | None, activation: Activation | None, **counted: Any
    ) -> Tensor:
        weight, bias, mean, variance, training, momentum = self._operands()
        return functional.batch_norm(
            input, mean, variance, weight, bias, training, momentum, self.eps,
            activation=activation, residual=residual,
            arithmetic=self.arithmetic, reproducible=self.reproducible, **counted,
        )  # fmt: skip

    def _operands(self) -> tuple[Any, Any, Tensor | None, Tensor | None, bool, float]:
        """Return weight, bias, running statistics, training and momentum; in training, count the
        batch.

        With momentum None, the average is cumulative: the weight of the n-th batch is 1/n.
        """
        weight, bias, mean, variance, counter = self._tensors()
        momentum = 0.0 if self.momentum is None else self.momentum
        if not self.training:
            return weight, bias, mean, variance, mean is None and variance is None, momentum
        if not self.track_running_stats:
            return weight, bias, None, None, True, momentum
        if counter is not None:
            counter.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(counter)
        return weight, bias, mean, variance, True, momentum

    def _tensors(self) -> tuple[Any, ...]:
        # Reading an attribute of a module takes 0.9 us (AMD EPYC, Zen 3), so parameters and buffers
        # are read from the module's dictionaries. The attributes are read in two cases only: if a
        # compiler traces the call, or if a key is missing. (The parameters of a parametrised module
        # are not in these dictionaries.)
        if not is_compiling():
            parameters, buffers = self._parameters, self._buffers
            try:
                return (
                    parameters["weight"], parameters["bias"], buffers["running_mean"],
                    buffers["running_var"], buffers["num_batches_tracked"],
                )  # fmt: skip
            except KeyError:
                pass
        mean, variance = self.running_mean, self.running_var
        return self.weight, self.bias, mean, variance, self.num_batches_tracked


def applies_activation(cls: type[torch.nn.Module]) -> bool:
    """Whether the forward of a class applies the layer's `activation`."""
    return cls.forward is _BatchNorm.forward and cls.__call__ is torch.nn.Module.__call__


def has_another_forward(cls: type[torch.nn.Module]) -> bool:
    """Whether the forward of a class was replaced by a function of another Python module."""
    return cls.forward.__module__ != cls.__module__


class BatchNorm1d(_BatchNorm, torch.nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` for inputs of shape (N, C) or (N, C, L), computed by backnorm.

    The layer has three more arguments: `activation`, `arithmetic` and `reproducible`. Parameters,
    buffers and state_dicts are those of PyTorch's layer.
    """

    _ranks: ClassVar = {2: "2 axes (N, C)", 3: "3 axes (N, C, L)"}


class BatchNorm2d(_BatchNorm, torch.nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` for inputs of shape (N, C, H, W), computed by backnorm.

    The layer has three more arguments: `activation`, `arithmetic` and `reproducible`. Parameters,
    buffers and state_dicts are those of PyTorch's layer.
    """

    _ranks: ClassVar = {4: "4 axes (N, C, H, W)"}


class BatchNorm3d(_BatchNorm, torch.nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d` for inputs of shape (N, C, D, H, W), computed by backnorm.

    The layer has three more arguments: `activation`, `arithmetic` and `reproducible`. Parameters,
    buffers and state_dicts are those of PyTorch's layer.
    """

    _ranks: ClassVar = {5: "5 axes (N, C, D, H, W)"}


class _BatchNormReLU(_BatchNorm):
    def __init__(self, *arguments: Any, ceiling: float | None = None, **settings: Any) -> None:
        super().__init__(*arguments, activation=Activation("relu", ceiling), **settings)


class BatchNormReLU1d(_BatchNormReLU, BatchNorm1d):
    """`BatchNorm1d` with ``activation="relu"``; with ``ceiling=6.0`` the ReLU is a ReLU6."""


class BatchNormReLU2d(_BatchNormReLU, BatchNorm2d):
    """`BatchNorm2d` with ``activation="relu"``; with ``ceiling=6.0`` the ReLU is a ReLU6."""


class BatchNormReLU3d(_BatchNormReLU, BatchNorm3d):
    """`BatchNorm3d` with ``activation="relu"``; with ``ceiling=6.0`` the ReLU is a ReLU6."""


class SyncBatchNorm(_BatchNorm):
    """`torch.nn.SyncBatchNorm`, computed by backnorm: one mean and variance for all processes.

    If `torch.distributed` is initialised and the process group has more than one process, a layer
    in training uses the mean and variance of the elements of all processes. Each process computes
    the mean and variance of its own elements, and the module `exchange` combines these statistics
    of the processes without loss of digits. The batches of the processes may differ in size, and
    may be empty; masks may count any number of their elements. The gradient of the input is
    computed with sums over the elements of all processes. In each process, the gradients of weight
    and bias are those of the process's own batch; DistributedDataParallel averages them over the
    processes. In evaluation, or in a single process, the layer computes what `BatchNorm2d`
    computes. It accepts inputs with two or more axes.

    The layer runs with any backend (gloo, NCCL), on the CPU and on CUDA devices. It is not an
    instance of `torch.nn.SyncBatchNorm`, because DistributedDataParallel rejects such layers on the
    CPU. If the processes cannot exchange their statistics, the layer raises `SynchronisationError`.
    If the model was passed to `convert`, the message of this error contains the layer's name in the
    model.

    Parameters
    ----------
    num_features, eps, momentum, affine, track_running_stats, process_group, device, dtype
        As in `torch.nn.SyncBatchNorm`; inputs are of shape (N, C, ...).
    activation : {"relu", "relu6", "silu", "hardswish"} or Activation, optional
        Applied to the normalised values.
    arithmetic : {"float32", "float64"}, optional
        The type in which elements are computed.
    reproducible : bool
        Whether y, statistics and gradients have the same bits for any number of processes, for
        every division of the batch, and in every layout. The gradients of weight and bias are then
        those of the whole batch in the first process, and zero in the others, so that the sum that
        DistributedDataParallel makes is rounded once.
    """

    _ranks: ClassVar = {2: "2 axes or more (N, C, ...)"}

    #: Error messages use these words for the layer, unless `convert` has set another name.
    name: str = "a SyncBatchNorm layer"

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        *arguments: Any,
        **settings: Any,
    ) -> None:
        own = num_features, eps, momentum, affine, track_running_stats
        super().__init__(*own, *arguments, **settings)
        self.process_group = process_group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            super()._check_input_dim(input)

    def _normalised(
        self, input: Tensor, residual: Tensor | None, activation: Activation | None, **counted: Any
    ) -> Tensor:
        group = exchange.group_of(self.process_group) if self.training else None
        if group is None:
            return super()._normalised(input, residual, activation, **counted)
        weight, bias, mean, variance, _, momentum = self._operands()
        operands = Operands(input, residual, weight, bias, mean, variance)
        options = options_of(True, self.eps, activation, self.arithmetic, input.dtype)
        layer = exchange.name_of(self, group)
        processes = synchronised.Processes(group, layer, self.reproducible)
        return functional.with_mask(operands, momentum, options, processes, **counted)


class LazyBatchNorm1d(_BatchNorm, torch.nn.LazyBatchNorm1d):
    """`torch.nn.LazyBatchNorm1d`, which becomes `BatchNorm1d` when it gets its first batch."""

    cls_to_become = BatchNorm1d


class LazyBatchNorm2d(_BatchNorm, torch.nn.LazyBatchNorm2d):
    """`torch.nn.LazyBatchNorm2d`, which becomes `BatchNorm2d` when it gets its first batch."""

    cls_to_become = BatchNorm2d


class LazyBatchNorm3d(_BatchNorm, torch.nn.LazyBatchNorm3d):
    """`torch.nn.LazyBatchNorm3d`, which becomes `BatchNorm3d` when it gets its first batch."""

    cls_to_become = BatchNorm3d


@functional.unscriptable
class FrozenLayer(torch.nn.Module):
    """Mixin for a layer whose statistics and parameters are constants."""

    arithmetic: Arithmetic | None = None

    def __repr__(self) -> str:
        """Return the original layer's text with the prefix "backnorm.torch.", and with the
        arithmetic if this layer has one of its own.
        """
        text = named(super().__repr__().removesuffix(")"), self.arithmetic)
        return f"backnorm.torch.{text})"

    def _is_ordinary(self, x: Tensor) -> bool:
        """Whether backnorm can compute what the original layer's formula returns for x.

        backnorm cannot compute the formula's result if the formula broadcasts x, if the result has
        another type than x, or if the statistics require gradients.
        """
        mean, variance = self.running_mean, self.running_var
        return (
            not isinstance(x, Proxy)
            and x.dim() == 4
            and x.dtype.is_floating_point
            and x.dtype == mean.dtype == variance.dtype == self.weight.dtype == self.bias.dtype
            and x.shape[1] == mean.shape[0]
            and not (mean.requires_grad or variance.requires_grad)
        )

    def _normalised(self, x: Tensor) -> Tensor:
        return functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps,
            arithmetic=self.arithmetic,
        )  # fmt: skip
