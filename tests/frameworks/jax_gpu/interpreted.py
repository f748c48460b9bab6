"""`jax_triton.triton_call` as Triton's interpreter does it, on arrays in the host's memory.

It takes the place of jax-triton, and the CPU that of a CUDA device.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
from jax.interpreters import mlir

from backnorm.jax import cuda, primitives
from backnorm.jax.batching import lowering

_NAMES = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}

# Bytes behind every array that no kernel may write to.
_GUARD = 256


class Pointer:
    """What the interpreter asks of a tensor of PyTorch's."""

    def __init__(self, array):
        # Its own copy, 16 bytes aligned, with a guard behind it.
        self.bytes = array.nbytes
        self._bytes = np.full(array.nbytes + _GUARD + 16, 0xFF, np.uint8)
        start = -self._bytes.ctypes.data % 16
        self._bytes = self._bytes[start : start + array.nbytes + _GUARD]
        self._bytes[: self.bytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.shape, self.kind, self.dtype = array.shape, array.dtype, _NAMES[array.dtype.name]

    def data_ptr(self):
        return self._bytes.ctypes.data

    def array(self):
        assert (self._bytes[self.bytes :] == 0xFF).all(), "written behind the end"
        return self._bytes[: self.bytes].view(self.kind).reshape(self.shape).copy()

    # There is one memory: what is copied to the host, and back, is itself.
    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, *_, **__):
        return self

    def set_(self, *_):
        pass

    def copy_(self, _):
        pass

    def stride(self):
        return ()

    size = storage_offset = stride


class Library:
    """What `launches` finds in the place of jax-triton; `calls` are the kernels that ran."""

    __version__ = "0.3.1"

    def __init__(self):
        self.calls = []

    def triton_call(
        self, *operands, kernel, out_shape, grid, name, num_warps, compute_capability,
        enable_fp_fusion, **constants,
    ):  # fmt: skip
        assert name == f"backnorm_{kernel.__name__}"
        assert not enable_fp_fusion
        # jax-triton makes a constant of what equals 1.
        assert not any(isinstance(each, int) and each == 1 for each in operands)
        is_array = [isinstance(each, jax.Array) for each in operands]

        def run(*arrays):
            self.calls.append(kernel.__name__)
            values = iter(arrays)
            arguments = [
                Pointer(np.asarray(next(values))) if is_one else each
                for each, is_one in zip(operands, is_array, strict=True)
            ]
            results = [Pointer(np.full(each.shape, np.nan, each.dtype)) for each in out_shape]
            numbers = [each if isinstance(each, Pointer) else plain(each) for each in arguments]
            kernel[grid](*numbers, *results, **constants, num_warps=num_warps)
            pointers = (each for each in arguments if isinstance(each, Pointer))
            for pointer, array in zip(pointers, arrays, strict=True):
                assert pointer.array().tobytes() == np.asarray(array).tobytes(), "input changed"
            return [each.array() for each in results]

        arrays = [each for each, is_one in zip(operands, is_array, strict=True) if is_one]
        return jax.pure_callback(run, list(out_shape), *arrays)


def plain(number):
    return int(number) if isinstance(number, int) else float(number)


def take_the_place_of_the_cpu():
    """Let everything that is lowered for a CPU be what a CUDA device would run."""
    for primitive, operation, like in (
        (primitives.FORWARD, "forward", (0, 1, 1)),
        (primitives.NORMALIZE, "inference", (0,)),
        (primitives.BACKWARD, "backward", (1, 4, 4)),
    ):
        rule = lowering(functools.partial(cuda.computed, operation, like))
        mlir.register_lowering(primitive, rule, platform="cpu")
