"""The computations on a CUDA device: Triton kernels, launched by jax-triton.

When a primitive is lowered for a CUDA device, `by_kernels` decides whether kernels compute the
primitive. If so, JAX traces the function `computed`, which launches the kernels. Under `jax.vmap`,
all problems of the mapped axis are computed together, as one large problem. The channels of this
large problem are the channels of all the mapped problems.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from backnorm import config
from backnorm.errors import ArgumentValueError
from backnorm.executable import executable
from backnorm.gpu.device import Gpu
from backnorm.gpu.plan import GpuPlan, plan_gpu
from backnorm.interfaces import Arrays, Code, Launch
from backnorm.jax import launches
from backnorm.jax.batching import batch_size
from backnorm.jax.launches import Call, Memory
from backnorm.jax.problems import OPERANDS, Options, is_known, problem_of, warn_of_formulas
from backnorm.layout import Extents, Order
from backnorm.problem import Problem
from backnorm.signature import SIGNATURES, Operation


def by_kernels(shape: Sequence[Any], context: Any) -> bool:
    """Whether Triton kernels compute a function; otherwise formulas do.

    Parameters
    ----------
    shape : sequence
        The shape of x; sizes may be symbolic.
    context
        JAX's "axis context": the devices that the function is compiled for.

    Raises
    ------
    ArgumentValueError
        If kernels are required (``BACKNORM_JAX_CUDA=triton``) and cannot be launched.
    """
    setting = config.jax_on_cuda()
    if setting == "formulas" or 0 in shape:
        return False
    reason = _reason_against(shape)
    if reason is None:
        # If the arrays are split over several devices, XLA can split formulas in the same way, but
        # it would gather the arrays for a call of a kernel. So kernels then run only if the setting
        # "triton" requires them.
        return setting == "triton" or not _is_split(context)
    if setting == "triton":
        raise ArgumentValueError(
            "BACKNORM_JAX_CUDA",
            "must not be 'triton' if Triton kernels cannot run",
            came=reason,
            accepted="'formulas', or 'triton' with jax-triton and a CUDA device",
            hint="pip install jax-triton",
        )
    return False


def device() -> Gpu | None:
    """Return the name of the first CUDA device, and the compute capability of all CUDA devices. If
    their compute capabilities differ, or if there is no CUDA device, return None.
    """
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return None
    first = devices[0]
    if any(each.compute_capability != first.compute_capability for each in devices):
        return None
    major, minor = map(int, first.compute_capability.split("."))
    return Gpu(first.device_kind, (major, minor))


def _reason_against(shape: Sequence[Any]) -> str | None:
    if not launches.is_installed():
        return "jax-triton is not installed"
    reason = launches.reason_against()
    if reason is not None:
        warn_of_formulas("launch its kernels on CUDA devices", reason)
        return reason
    if device() is None:
        return "this process has no CUDA device, or several of different compute capabilities"
    return None if is_known(shape) else f"the shape {shape} has symbolic sizes"


def _is_split(context: Any) -> bool:
    """Whether the compiler may split the arrays of a function over devices."""
    mesh = getattr(context, "mesh", None)
    if mesh is None:
        # Under `jax.pmap`, a context has neither `mesh` nor `num_devices`. The compiler then does
        # not split arrays, so the result is False.
        return getattr(context, "num_devices", 1) > 1
    manual = context.manual_axes
    return any(size > 1 for name, size in mesh.shape.items() if name not in manual)


def computed(
    operation: Operation, like: Sequence[int], *operands: jax.Array, options: Options
) -> Sequence[jax.Array]:
    """Return the results of an operation on operands with a batch axis (see `batching`).

    `like` has, for each result, the index of an operand with the same shape and type.
    """
    batch, names = batch_size(operands), OPERANDS[operation]
    single = problem_of(operation, operands, options)
    outer, channels, inner = single.shape
    problem = dataclasses.replace(single, shape=(outer, batch * channels, inner))
    signature = SIGNATURES[operation]
    kinds = {operand.name: operand.kind for operand in signature.operands}

    def memory(name: str, array: jax.Array) -> Memory:
        # `moveaxis` moves the batch axis next to the channels. If both outer and batch are more
        # than 1, XLA must transpose the array for this.
        shape = single.shape if kinds[name] == "data" else (channels,)
        apart = jnp.broadcast_to(array.reshape(-1, *shape), (batch, *shape))
        if kinds[name] == "data":
            array = jnp.moveaxis(apart, 0, 1).reshape(problem.shape)
        else:
            array = apart.reshape(-1)
        return Memory(array, array)

    memories = {name: memory(name, array) for name, array in zip(names, operands, strict=True)}
    results = executable(problem, arrays=_MEMORIES).plain(*signature.arranged(memories))
    data, *per_channel = (result.value for result in results if result is not None)
    data = jnp.moveaxis(data.reshape(outer, batch, channels, inner), 1, 0)
    shape = operands[like[0]].shape
    return [data.reshape(shape), *(each.reshape(batch, channels) for each in per_channel)]


class _Memories(Arrays[Memory, Gpu]):
    """The arrays of kernels that XLA launches; data arrays are (outer, channels, inner)."""

    code = Code(
        arrays="jax, cuda",
        facts="",
        address="{}",
        absent="None",
        constants=(),
        new={"data": "Memory(x.kind)", "channel": "Memory(gamma.kind)"},
    )
    names: ClassVar[dict[str, Any]] = {"Memory": Memory}

    def place(self, x: Memory | None) -> Gpu:
        gpu = device()
        assert gpu is not None
        return gpu

    def planned(
        self, problem: Problem, extents: Extents, place: Gpu, exchanged: bool
    ) -> tuple[GpuPlan, Launch]:
        from backnorm.gpu.launch import Launches

        plan = plan_gpu(problem, extents, place)
        major, minor = place.capability
        return plan, Launches(problem, plan, _new, partial(Call, 10 * major + minor))

    def values(self, problem: Problem, order: Order) -> tuple[object, ...]:
        return ()

    def order_of(self, x: Memory) -> Order:
        return (0, 1, 2)


_MEMORIES = _Memories()


def _new(count: int) -> Memory:
    return Memory(jax.ShapeDtypeStruct((count,), np.float64))
