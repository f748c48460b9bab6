"""How the compiler splits our kernels' calls over devices: x stays where it is.

An array of data may be cut along any of its axes, and what is known of channels is cut as the
channels are. Of a batch that is cut every device sums up its part and tells the others its sums
(`parts`); where only channels, or instances of `jax.vmap`, are cut, each runs the kernel on its
own, and nothing is told. XLA asks for all that when a function is compiled, once it knows where
the arrays are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import Mesh

from backnorm.jax import ffi, tiles
from backnorm.jax.parts import PARTS
from backnorm.jax.problems import OPERANDS, is_known
from backnorm.signature import SIGNATURES, Operation

__all__ = ["devices_of", "splitting"]

# Older ones (0.5.3 was tried) give numbers of a function without 64 bits another type in places.
_OLDEST = (0, 7, 2)
# The one axis of all devices within what a device computes; groups of them are by number.
_DEVICES = "backnorm_devices"
# Names of axes in rules: of instances, of channels, and before the numbers of the others.
_INSTANCE, _CHANNEL, _OTHER = "i", "c", "a"

_Kernel = Callable[..., Sequence[Any]]


def splitting(operation: Operation, kernel: _Kernel, lowered: Any) -> Any:
    """Return the rule that lowers a primitive so that the compiler can split it.

    Parameters
    ----------
    operation : str
    kernel : callable
        The primitive, of operands that lie on one device.
    lowered : callable
        The rule that lowers it for one device, where its arrays cannot be spread.
    """

    def rule(context: Any, *operands: Any, **parameters: Any) -> Any:
        devices = devices_of(context)
        if not devices or not is_known(context.avals_in[0].shape):
            return lowered(context, *operands, **parameters)

        def split(*operands: jax.Array, **parameters: Any) -> Any:
            return _Split(operation, kernel, devices, parameters).bind(*operands)

        # JAX asks for devices, of which only the number matters. That functions depend on them has
        # to be told of a primitive ahead, and would forbid that arrays of one lie on two meshes.
        module = context.module_context
        place = dataclasses.replace(module.axis_context, device_assignment=devices)
        context = context.replace(module_context=module.replace(axis_context=place))
        return mlir.lower_fun(split, multiple_results=True)(context, *operands, **parameters)

    return rule


def devices_of(context: Any) -> tuple[Any, ...]:
    """Return as many devices as arrays of a function may be spread over, if there are any."""
    module = context.module_context
    place, parameters = module.axis_context, getattr(module, "lowering_parameters", None)
    # Within `jax.shard_map` they are split already. What is exported knows none of our Python.
    if getattr(place, "num_devices", 1) == 1 or getattr(parameters, "for_export", False):
        return ()
    if jax.__version_info__ < _OLDEST or tuple(module.platforms) != ("cpu",):
        return ()
    every = tuple(jax.devices("cpu"))
    if len(every) < place.num_devices or ffi.reason_against() is not None:
        return ()
    return every[: place.num_devices]


class _Split:
    """A call of a primitive that the compiler splits.

    Parameters
    ----------
    operation : str
    kernel : callable
    devices : tuple of jax.Device
    parameters : dict
        The primitive's parameters.
    """

    def __init__(
        self,
        operation: Operation,
        kernel: _Kernel,
        devices: tuple[Any, ...],
        parameters: dict[str, Any],
    ) -> None:
        self._operation, self._kernel, self._parameters = operation, kernel, parameters
        self._mesh = Mesh(np.array(devices), (_DEVICES,))

    def bind(self, *operands: jax.Array) -> Any:
        """Return the results of the primitive."""
        signature, spread = SIGNATURES[self._operation], self._parameters["spread"]
        kinds = {operand.name: operand.kind for operand in signature.operands}
        named = zip(OPERANDS[self._operation], spread, operands, strict=True)
        operand_axes = [self._axes(kinds[name], each, x.ndim) for name, each, x in named]
        rank, several = operands[0].ndim - spread[0], self._parameters["instances"] is not None
        results = [r.kind for r in signature.results if r.option is None]
        result_axes = [self._axes(kind, several, rank + several) for kind in results]
        # Axes of the array that is cut: all that any array has.
        self._all = result_axes[0]
        self._operand_axes, self._result_axes = operand_axes, result_axes
        made = custom_partitioning(lambda *each: tuple(self._kernel(*each, **self._parameters)))
        made.def_partition(
            self._partition,
            infer_sharding_from_operands=self._inferred,
            decode_shardings=False,
            sharding_rule=" -> ".join(
                ", ".join(map(" ".join, side)) for side in (operand_axes, result_axes)
            ),
        )
        return made(*operands)

    def _axes(self, kind: str, is_spread: bool, rank: int) -> tuple[str, ...]:
        """Return the names of an array's axes."""
        if kind != "data":
            axes = [_CHANNEL]
        else:
            axes = [f"{_OTHER}{k}" for k in range(rank - is_spread)]
            axes[self._parameters["axis"]] = _CHANNEL
        return (_INSTANCE, *axes) if is_spread else tuple(axes)

    def _partition(self, _: Any, operands: Any, results: Any) -> tuple[Any, ...]:
        """Return what a device computes, and the shardings of results and operands."""
        axes = *self._operand_axes, *self._result_axes
        holders, like = self._holders((*operands, *results), axes)
        inner = [k for k, axis in enumerate(self._all) if axis not in (_INSTANCE, _CHANNEL)]
        groups = tiles.groups_of(holders, inner)
        parameters = dict(self._parameters)
        if parameters["instances"] is not None:
            parameters["instances"] //= holders.shape[0]

        def computed(*operands: jax.Array) -> tuple[Any, ...]:
            part = PARTS.get(self._operation)
            if part is None or len(groups[0]) == 1:
                return tuple(self._kernel(*operands, **parameters))
            exchanged = {"axis_name": _DEVICES, "axis_index_groups": groups}
            return part(*operands, groups=exchanged, **parameters)

        return (
            self._mesh,
            computed,
            self._spread(holders, self._result_axes, like),
            self._spread(holders, self._operand_axes, like),
        )

    def _inferred(self, _: Any, operands: Any, __: Any) -> tuple[Any, ...]:
        """Return the shardings of results, for GSPMD."""
        holders, like = self._holders(operands, self._operand_axes)
        return self._spread(holders, self._result_axes, like)

    def _holders(self, arrays: Sequence[Any], axes: Sequence[Any]) -> tuple[np.ndarray, Any]:
        """Return the holders of what has all axes, and a sharding of the class that JAX wants.

        Arrays of data may come in different parts: those with the most stay where they are.
        """
        shape = self._shape(arrays, axes)
        best, like = None, arrays[0].sharding
        for array, names in zip(arrays, axes, strict=True):
            if array.sharding is None or not set(names) >= set(self._all) - {_INSTANCE}:
                continue
            holders = tiles.holders_of(array.sharding, len(names))
            if len(names) < len(self._all):
                holders = holders[None]
            holders = tiles.cut_evenly(holders, shape)
            if best is None or tiles.parts_of(holders) > tiles.parts_of(best):
                best, like = holders, array.sharding
        assert best is not None
        return best, like

    def _shape(self, arrays: Sequence[Any], axes: Sequence[Any]) -> list[int]:
        sizes: dict[str, int] = {}
        for array, names in zip(arrays, axes, strict=True):
            sizes.update(zip(names, array.shape, strict=True))
        return [sizes[name] for name in self._all]

    def _spread(
        self, holders: np.ndarray, arrays: Sequence[tuple[str, ...]], like: Any
    ) -> tuple[Any, ...]:
        """Return the shardings of arrays, by the names of their axes."""
        places = [[self._all.index(name) for name in names] for names in arrays]
        return tuple(tiles.sharding_of(tiles.reduced(holders, each), like) for each in places)
