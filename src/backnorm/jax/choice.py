"""Kernels or formulas: what runs on a CUDA device, decided when a function is lowered for one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from backnorm import config
from backnorm.errors import ArgumentValueError
from backnorm.gpu.device import Gpu
from backnorm.jax import launches
from backnorm.jax.fallback import warn_of_formulas
from backnorm.jax.problems import is_known

__all__ = ["by_kernels", "device"]


def by_kernels(shape: Sequence[Any], context: Any) -> bool:
    """Whether Triton kernels are to compute a function.

    Parameters
    ----------
    shape : sequence
        Of x; sizes may be symbolic.
    context
        JAX's "axis context": the devices that the function is compiled for.

    Raises
    ------
    ArgumentValueError
        If they were asked for (``BACKNORM_JAX_CUDA=triton``) and cannot be launched.
    """
    setting = config.jax_on_cuda()
    if setting == "formulas" or 0 in shape:
        return False
    reason = _reason_against(shape)
    if reason is None:
        # XLA splits formulas over devices, but no call of a kernel: it would gather the arrays.
        return setting == "triton" or not _is_split(context)
    if setting == "triton":
        raise ArgumentValueError(
            "BACKNORM_JAX_CUDA",
            "asks for Triton kernels, and there is an obstacle",
            came=reason,
            accepted="triton where jax-triton and a CUDA device are at hand, or formulas",
            hint="pip install jax-triton",
        )
    return False


def device() -> Gpu | None:
    """Return what a plan must know of the CUDA devices of this process, or None without any."""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return None
    first = devices[0]
    if any(each.compute_capability != first.compute_capability for each in devices):
        return None
    major, minor = map(int, first.compute_capability.split("."))
    # JAX does not say how large the cache is, and no plan looks at it.
    return Gpu(first.device_kind, (major, minor), first.core_count, cache=0)


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
    """Whether the compiler is to spread the arrays of a function over devices."""
    mesh = getattr(context, "mesh", None)
    if mesh is None:
        # Under `jax.pmap` there is neither.
        return getattr(context, "num_devices", 1) > 1
    manual = context.manual_axes
    return any(size > 1 for name, size in mesh.shape.items() if name not in manual)
