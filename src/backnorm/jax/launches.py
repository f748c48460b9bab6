"""Launch Triton kernels by XLA calls, through jax-triton.

A launch (`backnorm.gpu.launch`) writes to memory that it receives, but a call of XLA returns new
arrays. Therefore this module passes instances of `Memory` to a launch, where PyTorch's adapter
passes tensors. If a kernel writes to an instance, the kernel's `Call` stores in it the array that
XLA returned.
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

# The first version of jax-triton that works with Triton 3.9; 0.3.0 uses names that Triton 3.9 does
# not have.
_OLDEST = (0, 3, 1)

_compiling = threading.RLock()


class Memory:
    """An array that kernels read or write.

    Parameters
    ----------
    kind : array or jax.ShapeDtypeStruct
        The shape and type of the array.
    value : jax.Array, optional
        The array, if a kernel reads it.
    """

    __slots__ = ("kind", "value")

    def __init__(self, kind: Any, value: jax.Array | None = None) -> None:
        self.kind, self.value = jax.ShapeDtypeStruct(kind.shape, kind.dtype), value


class Call:
    """A kernel for arrays of given sizes. It is called like a `launch.Kernel`, but with `Memory`
    objects instead of pointers.

    Parameters
    ----------
    capability : int
        Compute capability of the devices, such as 90.
    function, programs, sizes, constants, warps
        As in `launch.Kernel`.
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
        """Run the kernel on the values of `inputs`, and store its results in `outputs`."""
        # An input without a value, or an output that repeats an earlier output, stands for an
        # absent array, which the kernel does not use. The first input takes the place of such an
        # input, and an array of one element takes the place of such an output.
        unused = inputs[0].value
        arrays = [unused if memory.value is None else memory.value for memory in inputs]
        again = [memory in outputs[:k] for k, memory in enumerate(outputs)]
        kinds = [
            jax.ShapeDtypeStruct((1,), memory.kind.dtype) if is_again else memory.kind
            for memory, is_again in zip(outputs, again, strict=True)
        ]
        results = _library().triton_call(
            *arrays,
            *self._sizes,
            *map(np.float32, numbers),
            kernel=self._function,
            out_shape=kinds,
            **self._options,
        )
        for memory, is_again, array in zip(outputs, again, results, strict=True):
            # While 64-bit types are disabled (`jax_enable_x64` is False), some functions of JAX
            # replace float64 by float32. Sums would lose digits in float32, so a replaced type
            # raises an error here.
            if array.dtype != memory.kind.dtype:
                raise TypeError(
                    f"jax_triton.triton_call returned {array.dtype} instead of {memory.kind.dtype}"
                )
            if not is_again:
                memory.value = array


class _Size(int):
    """A size that jax-triton does not turn into a constant.

    jax-triton turns numbers that equal 1 into constants, even if a kernel has `do_not_specialize`.
    The package's kernels take sizes as runtime values, so that no kernel is compiled again for
    another size.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Size) and int(self) == int(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(int(self))


@contextmanager
def compiling() -> Iterator[None]:
    """While a function is lowered, make Triton compile kernels to PTX that JAX can assemble.

    For Hopper and newer devices, Triton 3.9 writes PTX of version 9.4. This version of PTX belongs
    to CUDA 13.4. Triton contains two `ptxas` programs, those of CUDA 13.4 and of CUDA 12.9. JAX
    assembles the PTX with the `ptxas` of its own CUDA. If JAX uses CUDA 12, that `ptxas` raises
    "Unsupported .version 9.4". For older devices, Triton calls the `ptxas` of CUDA 12.9, and writes
    PTX 8.8. Within this context, Triton uses the `ptxas` of CUDA 12.9 for all devices, and so
    writes PTX 8.8.
    """
    from triton import knobs

    # Triton's knobs are global to the process, so a lock is held while they are changed.
    with _compiling, knobs.nvidia.scope():
        if "ptxas_blackwell" in vars(type(knobs.nvidia)):
            knobs.nvidia.ptxas_blackwell = knobs.nvidia.ptxas.path
        yield


def is_installed() -> bool:
    """Whether jax-triton is installed."""
    return importlib.util.find_spec("jax_triton") is not None


@functools.cache
def reason_against() -> str | None:
    """Return the reason why the installed jax-triton cannot be used, or None if it can."""
    try:
        version = str(_library().__version__)
    except Exception as error:  # jax-triton uses internals of JAX and Triton: any error can occur.
        return f"jax-triton cannot be imported: {type(error).__name__}: {error}"
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if numbers < _OLDEST:
        return f"jax-triton {version} is older than {'.'.join(map(str, _OLDEST))}"
    return None


@functools.cache
def _library() -> Any:
    # Importing jax-triton changes Triton's cache directory for the whole process. The code below
    # restores the directory.
    name = "TRITON_CACHE_DIR"
    before = os.environ.get(name)
    try:
        return importlib.import_module("jax_triton")
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
