"""Tensors of a framework on a device, which a subject gets in the place of NumPy's arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np

from backnorm.conformance.verify.frameworks import Layer
from backnorm.conformance.verify.operations import RefusedError
from backnorm.dtypes import FLOAT64
from backnorm.errors import ArgumentValueError
from backnorm.peers.torch_tensors import to_array, to_tensor

__all__ = ["DeviceError", "Gradients", "Tensors", "as_array", "on_tensors", "tensors_of"]


class DeviceError(Exception):
    """A kernel failed on a device. The process may be unable to use the device any more."""


class Tensors(Protocol):
    """Tensors of a framework on a device."""

    def operands(self, values: Sequence[Any]) -> AbstractContextManager[list[Any]]:
        """Return the values of a call with tensors in the place of arrays.

        The context ends when the device has run all kernels of the call. The values that kernels
        wrote to a tensor are then in the tensor's array, unless this array is read-only.
        """

    def gradients(self, layer: Layer, training: bool, *operands: Any) -> Gradients:
        """Run a layer forwards and backwards. `operands` are parameters and state by name, x, and
        dy, which is converted to the type of y.
        """


class Gradients(NamedTuple):
    """y, the new state by name, the gradients of the parameters by name, and dx."""

    y: Any
    state: Mapping[str, Any]
    of_parameters: Mapping[str, Any]
    dx: Any


class TorchTensors:
    """Tensors of PyTorch. On the CPU, they share the memory of the arrays.

    Raises
    ------
    ArgumentValueError
        If PyTorch has no such device, or the device has no memory.
    """

    def __init__(self, device: str) -> None:
        import torch

        try:
            self._device = torch.device(device)
            torch.zeros(1, device=self._device).cpu()
        except Exception as error:
            accepted = ["cpu"]
            if torch.accelerator.is_available():
                accepted.append(torch.accelerator.current_accelerator().type)
            raise _no_device("torch", device, accepted, error) from error
        self._module = torch.get_device_module(self._device)

    @contextmanager
    def operands(self, values: Sequence[Any]) -> Iterator[list[Any]]:
        """See :class:`Tensors`."""
        # Kernels of Triton run on the current device, which each thread has of its own.
        if self._device.index:
            self._module.set_device(self._device.index)
        tensors = [self._tensor(v) if isinstance(v, np.ndarray) else v for v in values]
        # A subject can change the shape of its tensors. These views keep theirs.
        views = [v.detach() if a is not v else v for a, v in zip(values, tensors, strict=True)]
        try:
            yield tensors
        finally:
            try:
                self._module.synchronize()
            except Exception as error:
                raise DeviceError(f"{type(error).__name__}: {error}") from error
        for array, view in zip(values, views, strict=True):
            if view is not array and array.flags.writeable:
                written = to_array(view)
                if not np.shares_memory(written, array):
                    array[...] = written

    def gradients(self, layer: Layer, training: bool, *operands: Any) -> Gradients:
        """See :class:`Tensors`."""
        import torch

        parameters, state, x, dy = operands
        *leaves, x = (each.detach().requires_grad_() for each in (*parameters.values(), x))
        y, after = layer(dict(zip(parameters, leaves, strict=True)), state, x, training)
        *found, dx = torch.autograd.grad(y, [*leaves, x], dy.to(y.dtype), allow_unused=True)
        return Gradients(y, after, dict(zip(parameters, found, strict=True)), dx)

    def _tensor(self, array: np.ndarray) -> Any:
        """Return a tensor of an array. A tensor of a read-only array is a copy, because PyTorch
        has no read-only tensors.
        """
        shared = to_tensor(array if array.flags.writeable else array.copy())
        try:
            return shared.to(self._device)
        except TypeError as error:
            raise RefusedError(f"{self._device} has no {array.dtype}: {error}") from error


class JaxArrays:
    """Arrays of JAX, which are copies. JAX has float64 in calls with arrays of float64.

    Raises
    ------
    ArgumentValueError
        If JAX has no such device.
    """

    def __init__(self, device: str) -> None:
        import jax

        try:
            self._device = jax.devices(device)[0]
        except RuntimeError as error:
            accepted = sorted({"cpu", jax.default_backend()})
            raise _no_device("jax", device, accepted, error) from error
        self._gradients = jax.jit(_gradients_of_jax, static_argnums=(0, 1))

    def gradients(self, layer: Layer, training: bool, *operands: Any) -> Gradients:
        """See :class:`Tensors`."""
        return Gradients(*self._gradients(layer, training, *operands))

    @contextmanager
    def operands(self, values: Sequence[Any]) -> Iterator[list[Any]]:
        """See :class:`Tensors`. JAX's arrays are read-only."""
        import jax

        arrays = [value for value in values if isinstance(value, np.ndarray)]
        with jax.enable_x64(any(array.dtype == FLOAT64 for array in arrays)):
            # Without the copy, JAX would keep the array itself, whose values `verify` changes.
            yield [
                jax.device_put(v.copy(), self._device) if isinstance(v, np.ndarray) else v
                for v in values
            ]


def _gradients_of_jax(
    layer: Layer, training: bool, parameters: Any, state: Any, x: Any, dy: Any
) -> tuple[Any, ...]:
    import jax

    y, pullback, after = jax.vjp(
        lambda parameters, x: layer(parameters, state, x, training), parameters, x, has_aux=True
    )
    return y, after, *pullback(dy.astype(y.dtype))


class TensorFlowTensors:
    """Tensors of TensorFlow, which are copies, for layers of Keras."""

    def __init__(self, device: str) -> None:
        import tensorflow

        self._tensorflow, self._device = tensorflow, device

    @contextmanager
    def operands(self, values: Sequence[Any]) -> Iterator[list[Any]]:
        """See :class:`Tensors`. Tensors of TensorFlow are read-only."""
        constant = self._tensorflow.constant
        with self._tensorflow.device(self._device):
            yield [constant(v) if isinstance(v, np.ndarray) else v for v in values]

    def gradients(self, layer: Layer, training: bool, *operands: Any) -> Gradients:
        """See :class:`Tensors`."""
        parameters, state, x, dy = operands
        leaves = [*parameters.values(), x]
        with self._tensorflow.GradientTape() as tape:
            tape.watch(leaves)
            y, after = layer(parameters, state, x, training)
        *found, dx = tape.gradient(y, leaves, self._tensorflow.cast(dy, y.dtype))
        return Gradients(y, after, dict(zip(parameters, found, strict=True)), dx)


_FRAMEWORKS: dict[str, Callable[[str], Tensors]] = {
    "torch": TorchTensors,
    "jax": JaxArrays,
    "tensorflow": TensorFlowTensors,
}


def tensors_of(framework: str, device: str) -> Tensors:
    """Return the tensors of a framework, torch or jax, on a device.

    Raises
    ------
    ArgumentValueError
        If the framework is not installed, or has no such device.
    """
    try:
        return _FRAMEWORKS[framework](device)
    except ModuleNotFoundError as error:
        problem = f"needs {framework}, which is not installed"
        raise ArgumentValueError("--tensors", problem, came=framework) from error


def as_array(tensor: Any) -> np.ndarray:
    """Return a tensor of any framework as an array, in the tensor's memory if that is possible."""
    return to_array(tensor) if hasattr(tensor, "detach") else np.asarray(tensor)


def _no_device(
    framework: str, device: str, accepted: Sequence[str], error: Exception
) -> ArgumentValueError:
    text = f"{error}".strip().partition("\n")[0]
    return ArgumentValueError(
        "--device", f"{framework} cannot use it", came=device, accepted=", ".join(accepted),
        hint=f"{framework} says: {text}",
    )  # fmt: skip


def on_tensors(function: Callable[..., Any], tensors: Tensors) -> Callable[..., Any]:
    """Return a function of arrays that calls `function` with tensors in their place."""

    @functools.wraps(function)
    def of_arrays(*operands: Any, **named: Any) -> Any:
        with tensors.operands([*operands, *named.values()]) as values:
            by_name = zip(named, values[len(operands) :], strict=True)
            return function(*values[: len(operands)], **dict(by_name))

    return of_arrays
