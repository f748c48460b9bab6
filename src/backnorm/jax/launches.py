"""Launches of Triton kernels as calls of XLA, by jax-triton.

A launch (`backnorm.gpu.launch`) writes into memory that it is given; a call of XLA returns
new arrays. `Memory` is both: it is given to the launch, and a kernel that writes to it leaves there
the array that its call returned.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

__all__ = ["Call", "Memory", "compiling", "is_installed", "reason_against"]

# The first that compiles with Triton 3.9; 0.3.0 looks for what that has not any more.
_OLDEST = (0, 3, 1)

_compiling = threading.RLock()


class Memory:
    """An array for kernels.

    Parameters
    ----------
    kind : array or jax.ShapeDtypeStruct
        Its shape and type.
    value : jax.Array, optional
        What it holds, if a kernel is to read it.
    """

    __slots__ = ("kind", "value")

    def __init__(self, kind: Any, value: jax.Array | None = None) -> None:
        self.kind, self.value = jax.ShapeDtypeStruct(kind.shape, kind.dtype), value


class Call:
    """A kernel with its sizes, called with `Memory` as `launch.Kernel` is with pointers.

    Parameters
    ----------
    capability : int
        Compute capability of the devices, as in 90.
    function, programs, sizes, constants, warps
        As of `launch.Kernel`.
    """

    __slots__ = ("_function", "_options", "_sizes")

    def __init__(
        self,
        capability: int,
        function: Any,
        programs: int,
        sizes: tuple[int, ...],
        constants: dict[str, Any],
        warps: int,
    ) -> None:
        from backnorm.gpu.launch import OPTIONS

        self._function, self._sizes = function, tuple(map(_Size, sizes))
        self._options = {
            "grid": (programs,),
            "name": f"backnorm_{function.__name__}",
            "num_warps": warps,
            "compute_capability": capability,
            **OPTIONS,
            **constants,
        }

    def __call__(
        self,
        inputs: tuple[Memory, ...],
        outputs: tuple[Memory, ...],
        numbers: tuple[float, ...] = (),
    ) -> None:
        """Let the outputs hold what the kernel makes of the inputs."""
        # Memory that holds nothing, and memory that comes twice, stand for what is not used.
        some = inputs[0].value
        arrays = [some if memory.value is None else memory.value for memory in inputs]
        again = [memory in outputs[:k] for k, memory in enumerate(outputs)]
        kinds = [
            jax.ShapeDtypeStruct((1,), memory.kind.dtype) if is_again else memory.kind
            for memory, is_again in zip(outputs, again, strict=True)
        ]
        found = _library().triton_call(
            *arrays,
            *self._sizes,
            *map(np.float32, numbers),
            kernel=self._function,
            out_shape=kinds,
            **self._options,
        )
        for memory, is_again, array in zip(outputs, again, found, strict=True):
            # JAX without 64 bits narrows types in places. Not here; sums would lose their digits.
            if array.dtype != memory.kind.dtype:
                raise TypeError(f"jax_triton.triton_call made {array.dtype} of {memory.kind.dtype}")
            if not is_again:
                memory.value = array


class _Size(int):
    """A size of which jax-triton makes no constant.

    It does so with numbers that equal 1, even where a kernel says `do_not_specialize`; within our
    kernels sizes are values, and none is compiled anew for another size.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Size) and int(self) == int(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(int(self))


@contextmanager
def compiling() -> Iterator[None]:
    """Let kernels be compiled, while a function is lowered, to what JAX can assemble.

    Triton 3.9 writes PTX of version 9.4 for Hopper and newer, that of a CUDA 13.4 of its own. JAX
    assembles it with the `ptxas` of its CUDA, which may be a 12: "Unsupported .version 9.4". With
    Triton's other `ptxas`, which it uses for older devices, the version is 8.8, that of CUDA 12.9.
    """
    from triton import knobs

    # Knobs are the process's.
    with _compiling, knobs.nvidia.scope():
        if "ptxas_blackwell" in vars(type(knobs.nvidia)):
            knobs.nvidia.ptxas_blackwell = knobs.nvidia.ptxas.path
        yield


def is_installed() -> bool:
    """Whether there is a jax-triton."""
    return importlib.util.find_spec("jax_triton") is not None


@functools.cache
def reason_against() -> str | None:
    """Return why the jax-triton that is installed cannot be used, or None if it can."""
    try:
        version = str(_library().__version__)
    except Exception as error:  # Whatever else it needs of JAX and Triton, and finds changed.
        return f"jax-triton cannot be imported: {type(error).__name__}: {error}"
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if numbers < _OLDEST:
        return f"jax-triton {version} is older than {'.'.join(map(str, _OLDEST))}"
    return None


@functools.cache
def _library() -> Any:
    # It takes Triton's cache of compiled kernels away from everything else in the process.
    name = "TRITON_CACHE_DIR"
    before = os.environ.get(name)
    try:
        return importlib.import_module("jax_triton")
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
