"""Operators of the dispatcher (``torch.ops.backnorm.*``): each is a row, registered in one way."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.library import (
    infer_schema,
    register_autograd,
    register_fake,
    register_kernel,
    register_vmap,
)

from backnorm.errors import ArgumentError
from backnorm.torch import transforms
from backnorm.torch.checks import check_device, not_a_tensor, renamed
from backnorm.torch.tensors import in_memory

__all__ = ["Operation", "register", "with_checks"]

_LIBRARY = torch.library.Library("backnorm", "FRAGMENT")

#: The operations' names for tensors, and the operators'.
_NAMES = {"gamma": "weight", "beta": "bias", "ddgamma": "ddweight", "ddbeta": "ddbias"}


@dataclass(frozen=True)
class Operation:
    """An operator of the dispatcher.

    Attributes
    ----------
    name : str
    kernel : callable
        Computes the results, on any device; its annotations are the operator's types.
    fake : callable
        Returns new tensors like the kernel's.
    function : type of Function, optional
        Has `setup_context`, `backward` and `jvp`. It becomes what autograd, forward mode and
        `torch.func` differentiate; the operator computes it.
    backward, setup_context : callable, optional
        Without `function`: the backward pass of the operator, and what saves tensors for it.
    batched : bool
        Whether a batch of problems is one problem with more channels (`transforms.batching_rule`).
    results_of_x : tuple of int
        The positions of the results that depend on x alone.
    schema : str, optional
        Without it the schema follows from the kernel's annotations.
    tags : tuple of torch.Tag
        For Inductor: the layouts of operands that the operator takes.
    reference : str
        The tensor on whose device all others must be.
    """

    name: str
    kernel: Callable[..., Any]
    fake: Callable[..., Any]
    function: type[Any] | None = None
    backward: Callable[..., Any] | None = None
    setup_context: Callable[..., None] | None = None
    batched: bool = False
    results_of_x: tuple[int, ...] = ()
    schema: str | None = None
    tags: tuple[torch.Tag, ...] = ()
    reference: str = "x"


def register(operation: Operation) -> Any:
    """Register an operation with the dispatcher, autograd and vmap; return the operator."""
    name, function = operation.name, operation.function
    schema = operation.schema or infer_schema(operation.kernel, mutates_args=())
    # `torch.library.custom_op` does the same, and takes 3 us more in every call (AMD EPYC, Zen 3).
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, *operation.tags))
    # For all devices. Dynamo does not trace the Python code of a kernel that is registered so.
    register_kernel(f"backnorm::{name}", None, with_checks(operation.kernel), lib=_LIBRARY)
    # Kernels read tensors that are lazily negated or zero themselves. PyTorch would copy them
    # before, and read beyond the end of a storage that was shortened.
    for key in ("Negative", "ZeroTensor"):
        _LIBRARY.impl(name, torch.library.fallthrough_kernel, key)
    operator = getattr(torch.ops.backnorm, name).default
    register_fake(operator, _with_device_check(operation))
    if function is not None:
        _register_function(function, operator, operation.results_of_x)
        register_autograd(operator, function.backward, setup_context=function.setup_context)
    elif operation.backward is not None:
        register_autograd(operator, operation.backward, setup_context=operation.setup_context)
    if operation.batched:
        register_vmap(operator, transforms.batching_rule(operator, operation.results_of_x))
    return operator


def _register_function(function: type[Any], operator: Any, results_of_x: tuple[int, ...]) -> None:
    """Let an operator compute the forward pass of a class of functions."""
    assert issubclass(function, Function)
    function.forward = operator
    function.jvp = staticmethod(transforms.differentiable(function.jvp))
    function.vmap = staticmethod(transforms.batching_rule(function.apply, results_of_x))


def with_checks(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that takes subclasses of tensors; its errors have its own argument names."""
    parameters = list(inspect.signature(kernel).parameters.values())
    required = [(k, each.name) for k, each in enumerate(parameters) if each.annotation == "Tensor"]

    @functools.wraps(kernel)
    def call(*arguments: Any) -> Any:
        for k, name in required:
            # The dispatcher accepts None for a tensor.
            if arguments[k] is None:
                raise not_a_tensor(name, None)
        try:
            plain = [
                in_memory(value, parameter.name) if isinstance(value, Tensor) else value
                # The dispatcher leaves out defaults.
                for value, parameter in zip(arguments, parameters, strict=False)
            ]
            return kernel(*plain)
        except ArgumentError as error:
            raise renamed(error, _NAMES) from None

    return call


def _with_device_check(operation: Operation) -> Callable[..., Any]:
    """Return a fake kernel that raises unless all tensors are on the device of the reference.

    The dispatcher calls it if any tensor is on the meta device.
    """
    names = list(inspect.signature(operation.kernel).parameters)
    position = names.index(operation.reference)

    def call(*arguments: Any) -> Any:
        for name, value in zip(names, arguments, strict=False):
            if isinstance(value, Tensor):
                check_device(name, value, operation.reference, arguments[position])
        return operation.fake(*arguments)

    return call
