"""Layers as subjects: parameters and running statistics of a case are written into them."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from backnorm.conformance.battery import Case
from backnorm.conformance.verify.dialect_calls import Inputs
from backnorm.conformance.verify.frameworks import Layer, role_of
from backnorm.conformance.verify.operations import RefusedError
from backnorm.conformance.verify.tensors import Tensors, as_array
from backnorm.dtypes import FLOAT32
from backnorm.errors import ArgumentValueError

__all__ = ["OfModule"]

# The ranks of x that are tried if the file of a layer has no `get_inputs`.
_RANKS = 4, 3, 2, 5
# A layer of a fixed number of channels gets at most this many groups of them.
_GROUPS = 32
_PARAMETERS, _RUNNING = ("gamma", "beta"), ("running_mean", "running_variance")
_ROLES = *_PARAMETERS, *_RUNNING


class OfModule:
    """A layer of a framework, or a class of layers.

    A class is called with `get_init_inputs()` of its file, or else as its framework's classes are.
    A layer of C channels gets the channels of a case in groups of C, because no channel depends on
    another. Its x has the rank of `get_inputs()[0]`, or else a rank that it takes.

    Parameters
    ----------
    found : object
        A layer, or a class of layers.
    kind : type of Layer
    tensors : Tensors
        The tensors of the layer's framework.

    Attributes
    ----------
    options : dict
        The last layer's own options, see :meth:`LayerCase.with_options`.
    """

    def __init__(self, found: Any, kind: type[Layer], tensors: Tensors) -> None:
        self._found, self._kind, self._tensors = found, kind, tensors
        own = found if isinstance(found, type) else type(found)
        file: Any = sys.modules.get(own.__module__)
        is_class = isinstance(found, type) and hasattr(file, "get_init_inputs")
        self._arguments = file.get_init_inputs() if is_class else None
        self._rank = file.get_inputs()[0].ndim if hasattr(file, "get_inputs") else 0
        self._layers: dict[Any, Layer] = {}
        self.options: dict[str, Any] = {}
        with contextlib.suppress(RefusedError):
            self._layer(3, (FLOAT32, FLOAT32))

    def _layer(self, channels: int, types: tuple[np.dtype, np.dtype]) -> Layer:
        """Return the layer for cases with these channels and types; find out the rank of its x."""
        key = channels, *types
        if key not in self._layers:
            layer = self._kind(self._found, self._arguments, channels, types)
            self._layers = {key: layer}
            taken = (rank for rank in _RANKS if self._takes(rank, layer, channels, types))
            self._rank = self._rank or next(taken, _RANKS[0])
        return self._layers[key]

    def _takes(self, rank: int, layer: Layer, channels: int, types: tuple[Any, Any]) -> bool:
        """Whether a layer takes x of this rank."""
        width = layer.width or channels
        ones = np.ones((2, width, 2, 2, 2)[:rank], types[0])
        inputs = dict.fromkeys(_ROLES, np.ones(width, types[1])) | {"x": ones, "dy": ones}
        try:
            self._results(layer, rank, inputs, training=True)
        except ArgumentValueError:
            raise
        except Exception:
            return False
        return True

    def __call__(self, inputs: Inputs, case: Case) -> dict[str, np.ndarray | None]:
        """Run the layer forwards and backwards; return y, its gradients, and its statistics."""
        x, gamma = inputs["x"], inputs["gamma"]
        assert x is not None
        assert gamma is not None
        channels = x.shape[1]
        layer = self._layer(channels, (x.dtype, gamma.dtype))
        width = layer.width or channels
        if channels > _GROUPS * width:
            raise RefusedError(f"more than {_GROUPS} times the {width} channels of the layer")
        found = []
        for group in np.resize(np.arange(channels), (-(-channels // width), width)):
            parts = inputs
            if width != channels:
                # Axis 1 of x and dy, axis 0 of the others.
                parts = {
                    name: None if a is None else np.take(a, group, int(a.ndim > 1))
                    for name, a in inputs.items()
                }
            found.append(self._results(layer, self._rank, parts, training=case.training))
        self.options = layer.options
        return {
            name: None
            if array is None
            else np.concatenate([each[name] for each in found], axis=int(array.ndim > 1))[
                (slice(None),) * (array.ndim > 1) + (slice(channels),)
            ]
            for name, array in found[0].items()
        }

    def _results(
        self, layer: Layer, rank: int, inputs: Mapping[str, Any], *, training: bool
    ) -> dict[str, Any]:
        """Run a layer on x and dy, with the parameters and the running statistics of the inputs."""
        data = [_with_rank(inputs[name], rank, layer.axis) for name in ("x", "dy")]
        values = [np.ascontiguousarray(inputs[name]) for name in _PARAMETERS]
        # A layer may update its running statistics in place.
        values += [inputs[name].copy() for name in _RUNNING]
        with self._tensors.operands([*data, *values]) as (x, dy, *tensors):
            known = dict(zip(_ROLES, tensors, strict=True))
            names = layer.names(x)
            roles = _roles(names)
            if not training and "running_variance" not in roles:
                raise RefusedError("the layer has no running statistics")
            of_parameters, of_state = (
                {name: known[role] for role, name in roles.items() if names[name] == is_parameter}
                for is_parameter in (True, False)
            )
            ran = self._tensors.gradients(layer, training, of_parameters, of_state, x, dy)
            found = {role: ran.state.get(roles[role]) for role in _RUNNING if role in roles}
            found |= {f"d{n}": ran.of_parameters.get(roles.get(n, "")) for n in _PARAMETERS}
            found |= {"y": ran.y, "dx": ran.dx}
        arrays = {n: None if each is None else as_array(each).copy() for n, each in found.items()}
        for name in ("y", "dx"):
            arrays[name] = _with_shape(arrays[name], inputs["x"].shape, layer.axis)
        return arrays


def _roles(names: Iterable[str]) -> dict[str, str]:
    """Return the names of gamma, beta and the running statistics, of those that a layer has."""
    found: dict[str, str] = {}
    for name in names:
        role = role_of(name)
        if role in found:
            raise ArgumentValueError(
                "SUBJECT", f"must have only one {role}", came=f"{found[role]} and {name}",
                accepted="a layer with one batch normalisation and nothing else",
            )  # fmt: skip
        if role is not None:
            found[role] = name
    return found


def _with_rank(array: Any, rank: int, axis: int) -> np.ndarray:
    """Return x or dy with as many axes as a layer takes, and the same channels."""
    images, channels, *space = array.shape
    if rank == 2:
        return np.ascontiguousarray(np.moveaxis(array, 1, -1)).reshape(-1, channels)
    ones = [1] * max(rank - 2 - len(space), 0)
    sizes = [*space, *ones][: rank - 3]
    found: np.ndarray = array.reshape(images, channels, *sizes, -1)
    return found if axis == 1 else np.ascontiguousarray(np.moveaxis(found, 1, -1))


def _with_shape(array: Any, shape: tuple[int, ...], axis: int) -> Any:
    """Return y or dx with the shape of the case's x; `array` itself if it has not its elements."""
    if array is None or array.size != math.prod(shape):
        return array
    if array.ndim == 2 or axis == -1:
        images, channels, *space = shape
        return np.moveaxis(array.reshape(images, *space, channels), -1, 1)
    return array.reshape(shape)
