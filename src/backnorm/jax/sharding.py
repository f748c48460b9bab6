"""Split calls of kernels over devices when a function is compiled; x stays where it is.

A data array may be split along any of its axes. If the channel axis of the data arrays is split,
the per-channel arrays are split into the same parts. If a batch is split, every device sums up its
part, and the devices exchange the sums (`parts`). If only channels, or the batch axis of
`jax.vmap`, are split, each device runs the kernel without an exchange. XLA calls this code while it
compiles a function, when the placement of the arrays is known. This works only with XLA's
partitioner Shardy. With its older partitioner, GSPMD, the arrays are gathered, not split.

The *holders* of an array A say which devices have which part of A. They are an array of device
numbers. If A has r axes, its holders have r + 1. The first r sizes are the numbers of parts along
the axes of A. Devices that differ only in their index on the last axis have the same part of A. The
number of a device is its index in the device assignment of the compiled function.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import Mesh

from backnorm.jax.batching import batch_size, lowering, with_batch_axes
from backnorm.jax.parts import PARTS
from backnorm.jax.problems import OPERANDS, Options
from backnorm.signature import SIGNATURES, Operation

# The name of the only axis of the mesh, JAX's array of the devices. When devices exchange sums, a
# group of devices is given as a list of their positions on this axis.
_DEVICES = "backnorm_devices"
# Names of axes in sharding rules, in this order: the batch axis of `jax.vmap`; the batch axis of an
# array that all problems share, which has size 1; the axis of channels; other axes.
_BATCH, _SHARED, _CHANNEL, _OTHER = "b", "s", "c", "a"

_Kernel = Callable[..., Sequence[Any]]


def split_lowering(operation: Operation, kernel: _Kernel, devices: tuple[Any, ...]) -> Any:
    """Return the lowering rule of a primitive whose arrays the compiler may split over devices.

    Parameters
    ----------
    operation : str
    kernel : callable
        Computes the primitive for a batch of operands on one device.
    devices : tuple of jax.Device
        From `devices_of`. If it is empty, the arrays are not split over devices.
    """
    if not devices:
        return lowering(kernel)

    def split(*operands: jax.Array, options: Options, batched: bool) -> Any:
        mesh = Mesh(np.array(devices), (_DEVICES,))
        return _Split(operation, kernel, mesh, options, batched)(*operands)

    rule = mlir.lower_fun(split, multiple_results=True)

    def lowered(context: Any, *operands: Any, **parameters: Any) -> Any:
        # JAX requires a list of devices here, but only their number matters. The list would be
        # unnecessary if the primitive declared to JAX that functions which call it depend on their
        # devices. But JAX rejects functions with such a primitive if they have arrays on two
        # meshes, so backnorm's primitives do not declare this.
        module = context.module_context
        axis_context = dataclasses.replace(module.axis_context, device_assignment=devices)
        context = context.replace(module_context=module.replace(axis_context=axis_context))
        return rule(context, *operands, **parameters)

    return lowered


def devices_of(context: Any) -> tuple[Any, ...]:
    """Return the devices over which the compiler may split a function's arrays, else ()."""
    module = context.module_context
    axis_context = module.axis_context
    # There are no such devices in `jax.shard_map`, where the arrays are already split, and in an
    # exported function, which cannot call the Python code that splits arrays.
    if getattr(axis_context, "num_devices", 1) == 1 or module.lowering_parameters.for_export:
        return ()
    if tuple(module.platforms) != ("cpu",) or not jax.config.jax_use_shardy_partitioner:
        return ()
    every = tuple(jax.devices("cpu"))
    count = axis_context.num_devices
    return every[:count] if len(every) >= count else ()


class _Split:
    """One call of a primitive, which the compiler splits over devices.

    Parameters
    ----------
    operation : str
    kernel : callable
    mesh : jax.sharding.Mesh
        All devices, on one axis.
    options : Options
    batched : bool
        Whether operands have a batch axis.
    """

    def __init__(
        self, operation: Operation, kernel: _Kernel, mesh: Mesh, options: Options, batched: bool
    ) -> None:
        self._operation, self._mesh, self._options = operation, mesh, options
        self._batched = batched
        self._kernel = with_batch_axes(partial(kernel, options=options), batched)

    def __call__(self, *operands: jax.Array) -> Any:
        """Return the results of the primitive."""
        signature, rank = SIGNATURES[self._operation], operands[0].ndim - self._batched
        kinds = {operand.name: operand.kind for operand in signature.operands}
        named = zip(OPERANDS[self._operation], operands, strict=True)
        self._operand_axes = [self._axes(kinds[name], rank) for name, _ in named]
        results = [result.kind for result in signature.results if result.option is None]
        self._result_axes = [self._axes(kind, rank) for kind in results]
        if self._batched:
            batch = batch_size(operands)
            for k, x in enumerate(operands):
                if x.shape[0] != batch:
                    self._operand_axes[k] = (f"{_SHARED}{k}", *self._operand_axes[k][1:])
        # `_all` has the axes of data arrays. Every other array has only axes that are in `_all`, or
        # a batch axis of size 1 (`_SHARED`).
        self._all = self._result_axes[0]
        rule = " -> ".join(
            ", ".join(map(" ".join, side)) for side in (self._operand_axes, self._result_axes)
        )
        function = custom_partitioning(lambda *each: tuple(self._kernel(*each)))
        function.def_partition(self._partition, decode_shardings=False, sharding_rule=rule)
        return function(*operands)

    def _axes(self, kind: str, rank: int) -> tuple[str, ...]:
        """Return the names of an array's axes; `rank` is the rank of x without the batch axis."""
        axes = [_CHANNEL]
        if kind == "data":
            axes = [f"{_OTHER}{k}" for k in range(rank)]
            axes[self._options.axis] = _CHANNEL
        return (_BATCH, *axes) if self._batched else tuple(axes)

    def _partition(self, _: Any, operands: Any, results: Any) -> tuple[Any, ...]:
        """Return the mesh, the function of a device, and the shardings of results and operands."""
        axes = *self._operand_axes, *self._result_axes
        holders, like = self._holders((*operands, *results), axes)
        inner = [k for k, axis in enumerate(self._all) if axis not in (_BATCH, _CHANNEL)]
        groups = _groups_of(holders, inner)
        exchanged = {"axis_name": _DEVICES, "axis_index_groups": groups}
        function = self._kernel
        if self._operation in PARTS and len(groups[0]) > 1:
            part = partial(PARTS[self._operation], options=self._options, groups=exchanged)
            function = with_batch_axes(part, self._batched)

        return (
            self._mesh,
            lambda *operands: tuple(function(*operands)),
            self._shardings(holders, self._result_axes, like),
            self._shardings(holders, self._operand_axes, like),
        )

    def _holders(self, arrays: Sequence[Any], axes: Sequence[Any]) -> tuple[np.ndarray, Any]:
        """Return the holders that the data arrays are to have (which device has which part), and
        the sharding of one of these arrays. `_sharding_of` needs both to make the sharding of each
        array.

        The data arrays of a call may be split in different ways over devices. The split with the
        most parts is chosen for all of them. Arrays that already have this split need not be moved.
        """
        sizes: dict[str, int] = {}
        for array, names in zip(arrays, axes, strict=True):
            sizes.update(zip(names, array.shape, strict=True))
        shape = [sizes[name] for name in self._all]
        best, like = None, arrays[0].sharding
        for array, names in zip(arrays, axes, strict=True):
            if array.sharding is None or len(names) < len(self._all):
                continue
            holders = _holders_of(array.sharding, len(names))
            if names != self._all:
                # This array is the same for all problems that `jax.vmap` maps over, so its axis for
                # these problems has size 1.
                holders = _reduced(holders, range(1, len(names)))[None]
            holders = _evenly_cut(holders, shape)
            if best is None or _parts_of(holders) > _parts_of(best):
                best, like = holders, array.sharding
        assert best is not None
        return best, like

    def _shardings(
        self, holders: np.ndarray, arrays: Sequence[tuple[str, ...]], like: Any
    ) -> tuple[Any, ...]:
        """Return the sharding of each array, given the names of its axes."""
        shardings = []
        for names in arrays:
            own = _reduced(holders, [self._all.index(name) for name in names if name in self._all])
            shardings.append(_sharding_of(own if names[0] in self._all else own[None], like))
        return tuple(shardings)


def _holders_of(sharding: Any, rank: int) -> np.ndarray:
    """Return the holders (which device has which part) of an array that `sharding` splits.

    The array has `rank` axes. `sharding` is a ``GSPMDSharding`` of JAX.
    """
    described = sharding._to_xla_hlo_sharding(rank)
    if not described.is_tiled():
        return np.arange(sharding.num_devices).reshape((1,) * rank + (-1,))
    cut = tuple(described.tile_assignment_dimensions())[:rank]
    return np.asarray(described.tile_assignment_devices()).reshape((*cut, -1))


def _sharding_of(holders: np.ndarray, like: Any) -> Any:
    """Return the sharding of an array that is divided among devices as `holders` says.

    The returned sharding has the class and the devices of `like`, which is another sharding.
    """
    from jaxlib.xla_client import HloSharding, OpSharding

    devices = tuple(like._device_assignment)
    if _parts_of(holders) == 1:
        return type(like)(devices, HloSharding.replicate())
    numbers = np.ascontiguousarray(holders, np.int64)
    same = [OpSharding.Type.REPLICATED]
    return type(like)(
        devices, HloSharding.subgroup_with_device_ordering(numbers, subgroup_types=same)
    )


def _parts_of(holders: np.ndarray) -> int:
    """Return the number of parts of an array."""
    return math.prod(holders.shape[:-1])


def _evenly_cut(holders: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Return the holders of the same array if it is split only along axes with equal parts.

    If an axis is split into unequal parts, XLA pads the last part with arbitrary elements.
    """
    uneven = [axis for axis, size in enumerate(shape) if size % holders.shape[axis]]
    kept = [axis for axis in range(len(shape)) if axis not in uneven]
    return np.expand_dims(_reduced(holders, kept), uneven)


def _reduced(holders: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """Given the holders of an array A, return the holders of an array that has only the `axes` of
    A, in this order.
    """
    rest = [axis for axis in range(holders.ndim) if axis not in axes]
    moved = holders.transpose(*axes, *rest)
    return moved.reshape((*moved.shape[: len(axes)], -1))


def _groups_of(holders: np.ndarray, axes: Sequence[int]) -> list[list[int]]:
    """Return groups of devices. A group has one device for each part of an array along `axes`."""
    others = [axis for axis in range(holders.ndim) if axis not in axes]
    count = math.prod(holders.shape[axis] for axis in axes)
    groups: list[list[int]] = holders.transpose(*others, *axes).reshape(-1, count).tolist()
    return groups
