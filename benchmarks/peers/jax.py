"""JAX: the plain formula under ``jit``, on the CPU or on a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from benchmarks.cells import Cell, Form
from benchmarks.peers.base import Contestant, Data, Missing, Prepared
from benchmarks.peers.formula import INPUTS, OUTPUTS, Library, formula

__all__ = ["Jax", "JaxOnGpu"]


class Jax(Contestant):
    """JAX, only allocating: a compiled function returns new arrays."""

    name = "jax"
    temporaries = 3.0

    def start(self, threads: int) -> dict[str, str]:
        """Import JAX with a pool of `threads` threads."""
        # XLA's CPU client takes the size of its pool from these variables when it is created.
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
        # With `may_alias`, aligned arrays are not copied.
        call, results = self._compiled(cell, data, partial(self._jax.device_put, may_alias=True))
        wait = self._jax.block_until_ready
        return {"allocate": Prepared(lambda: wait(call()), results)}

    def _compiled(
        self, cell: Cell, data: Data, put: Callable[[np.ndarray], Any]
    ) -> tuple[Callable[[], Any], Callable[[Any], Mapping[str, np.ndarray]]]:
        """Return a call that may return before it is done, and the conversion of its results."""
        library = Library(self._jax.lax.rsqrt, lambda x, dtype: x.astype(dtype), np.float32)
        axis = 1 if cell.layout == "NCX" else len(cell.shape) - 1
        function = formula(library, cell, axis, data.epsilon)
        arguments = [put(getattr(data, name)) for name in INPUTS[cell.op]]
        compiled = self._jax.jit(function).lower(*arguments).compile()

        def results(returned: Any) -> Mapping[str, np.ndarray]:
            return dict(zip(OUTPUTS[cell.op], map(np.asarray, returned), strict=True))

        return partial(compiled, *arguments), results


class JaxOnGpu(Jax):
    """JAX on the first GPU that it finds, with its own arrays and streams."""

    platform = "cuda"
    # The temporaries of `Jax`, and copies of x and dy.
    temporaries = 5.0

    def start(self, threads: int) -> dict[str, str]:
        """Import JAX, which must have a GPU."""
        # By default JAX reserves three quarters of the memory at once.
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
        put = partial(self._jax.device_put, device=self._place)
        call, results = self._compiled(cell, data, put)
        return {"allocate": Prepared(call, results, finish=self._jax.block_until_ready)}
