"""JAX: the formula as one writes it, under ``jit``, on the CPU or on a GPU.

Elements of 16 bits are widened to float32 first, as the layers of JAX's libraries do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from benchmarks.model import Cell, Form
from benchmarks.peers.base import Data, Missing, Prepared
from benchmarks.peers.formula import INPUTS, OUTPUTS

__all__ = ["Jax", "JaxOnGpu"]


class Jax:
    """Allocating: a compiled function returns new arrays."""

    name = "jax"
    temporaries = 3.0

    def start(self, threads: int) -> dict[str, str]:
        """Import JAX with a pool of `threads` threads."""
        # XLA's CPU client sizes its pool by this variable, when it is made.
        os.environ["NPROC"] = os.environ["PJRT_NPROC"] = str(threads)
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        return self._import()

    def _import(self) -> dict[str, str]:
        try:
            import jax
        except ModuleNotFoundError as error:
            raise Missing("jax is not installed") from error
        jax.config.update("jax_enable_x64", True)
        self._jax = jax
        return {"jax": jax.__version__}

    def prepare(self, cell: Cell, data: Data) -> dict[Form, Prepared]:
        """Return the allocating form, compiled."""
        # Aligned arrays are taken as they are.
        call, results = self._compiled(cell, data, partial(self._jax.device_put, may_alias=True))
        wait = self._jax.block_until_ready
        return {"allocate": Prepared(lambda: wait(call()), results)}

    def _compiled(
        self, cell: Cell, data: Data, put: Callable[[np.ndarray], Any]
    ) -> tuple[Callable[[], Any], Callable[[Any], Mapping[str, np.ndarray]]]:
        """Return a call that need not be done when it returns, and what its results are."""
        axis = 1 if cell.layout == "NCX" else len(cell.shape) - 1
        function = self._jax.jit(self._formula(cell, axis, data.epsilon))
        arguments = [put(getattr(data, name)) for name in INPUTS[cell.op]]
        compiled = function.lower(*arguments).compile()

        def results(returned: Any) -> Mapping[str, np.ndarray]:
            return dict(zip(OUTPUTS[cell.op], map(np.asarray, returned), strict=True))

        return partial(compiled, *arguments), results

    def _formula(self, cell: Cell, axis: int, epsilon: float) -> Any:
        jnp, rsqrt = self._jax.numpy, self._jax.lax.rsqrt
        axes = tuple(i for i in range(len(cell.shape)) if i != axis)
        column = tuple(-1 if i == axis else 1 for i in range(len(cell.shape)))
        count = cell.size // cell.shape[1]

        def wide(x: Any) -> Any:
            return x.astype(jnp.float32) if x.dtype.itemsize == 2 else x

        def backward(x: Any, dy: Any, mean: Any, variance: Any, gamma: Any) -> Any:
            centred, gradient = wide(x) - mean.reshape(column), wide(dy)
            s = rsqrt(variance + epsilon)
            sum_dy = gradient.sum(axes)
            sum_dy_xmu = (gradient * centred).sum(axes)
            slope = s * s * sum_dy_xmu / count
            dx = (gamma * s).reshape(column) * (
                gradient - (sum_dy / count).reshape(column) - centred * slope.reshape(column)
            )
            return dx.astype(x.dtype), s * sum_dy_xmu, sum_dy

        def inference(x: Any, mean: Any, variance: Any, gamma: Any, beta: Any) -> Any:
            gain = gamma * rsqrt(variance + epsilon)
            y = gain.reshape(column) * (wide(x) - mean.reshape(column)) + beta.reshape(column)
            return (y.astype(x.dtype),)

        def forward(x: Any, gamma: Any, beta: Any) -> Any:
            mean = wide(x).mean(axes)
            variance = jnp.square(wide(x) - mean.reshape(column)).mean(axes)
            return (*inference(x, mean, variance, gamma, beta), mean, variance)

        return {"backward": backward, "forward": forward, "inference": inference}[cell.op]


class JaxOnGpu(Jax):
    """On the first GPU that JAX sees, from arrays of its own, in streams of its own."""

    platform = "cuda"
    # Its inputs, beside what `Jax` allocates.
    temporaries = 5.0

    def __init__(self, device: object) -> None:
        pass

    def start(self, threads: int) -> dict[str, str]:
        """Import JAX, which must have a GPU."""
        # By default it takes three quarters of the memory at once.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        versions = self._import()
        try:
            self._place = self._jax.devices(self.platform)[0]
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:120]
            raise Missing(f"jax has no {self.platform} device: {reason}") from error
        return versions

    def prepare(self, cell: Cell, data: Data) -> dict[Form, Prepared]:
        """Return the allocating form, compiled."""
        call, results = self._compiled(
            cell, data, partial(self._jax.device_put, device=self._place)
        )
        return {"allocate": Prepared(call, results, finish=self._jax.block_until_ready)}
