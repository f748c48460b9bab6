"""The part of oneDNN's C API, version 3, that batch normalisation needs.

The declarations of functions and the values of constants in this module are those of oneDNN's
headers oneapi/dnnl/dnnl.h, dnnl_types.h and dnnl_common_types.h.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import sys
import weakref
from collections.abc import Mapping
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from backnorm.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64

#: The name of the Python package whose wheel contains oneDNN's library.
DISTRIBUTION = "onednn-cpu-gomp"
_SONAME = "libdnnl.so.3"

#: oneDNN's constants DNNL_ARG_*, the numbers by which a primitive identifies its arrays.
ARGUMENTS = {"src": 1, "dst": 17, "mean": 49, "variance": 50, "scale": 51, "shift": 52,
             "diff_src": 129, "diff_dst": 145, "diff_scale": 255, "diff_shift": 256}  # fmt: skip

# Values of dnnl_normalization_flags_t, dnnl_prop_kind_t, dnnl_engine_kind_t and
# dnnl_stream_flags_t.
_GLOBAL_STATISTICS, _SCALE, _SHIFT = 1, 2, 4
_FORWARD_TRAINING, _FORWARD_INFERENCE, _BACKWARD = 64, 96, 128
_CPU = 1
_IN_ORDER = 1

# dnnl_data_type_t.
_TYPES = {FLOAT16: 1, BFLOAT16: 2, FLOAT32: 3, FLOAT64: 7}

# dnnl_status_t.
_STATUSES = ("success", "out_of_memory", "invalid_arguments", "unimplemented", "last_impl_reached",
             "runtime_error", "not_required")  # fmt: skip

# DNNL_MAX_NDIMS.
_Dims = c_int64 * 12


class StatusError(Exception):
    """The library returned a status other than success."""

    def __init__(self, function: str, status: int) -> None:
        name = _STATUSES[status] if status < len(_STATUSES) else str(status)
        super().__init__(f"{function} returned {name}")


class Handle(c_void_p):
    """Address of one of the library's objects."""


class _ExecutionArgument(ctypes.Structure):
    _fields_ = (("argument", c_int), ("memory", c_void_p))


def find() -> Path | None:
    """Return the path of the library in oneDNN's wheel, or None if the wheel is not installed."""
    try:
        distribution = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None
    files = [file for file in distribution.files or () if file.name == _SONAME]
    paths = [Path(str(distribution.locate_file(file))) for file in files]
    # The library is a data file of the wheel. Some installers do not list data files, so the
    # library is also looked for in the folder where installers put it.
    paths.append(Path(sys.prefix) / "lib" / _SONAME)
    return next((path.resolve() for path in paths if path.exists()), None)


class Library:
    """oneDNN's library, with a CPU engine and a stream.

    Parameters
    ----------
    path : Path
        The path of libdnnl.so.3.
    threads : int
        The number of OpenMP threads, for calls from the thread that makes this object.
    """

    def __init__(self, path: Path, threads: int) -> None:
        self._library = ctypes.CDLL(str(path))
        # oneDNN has loaded this OpenMP runtime, so `CDLL` returns the loaded one.
        ctypes.CDLL("libgomp.so.1").omp_set_num_threads(c_int(threads))
        self._engine = self._create("engine", "engine_create", c_int(_CPU), c_size_t(0))
        self.stream = self._create("stream", "stream_create", self._engine, c_uint(_IN_ORDER))

    @property
    def version(self) -> str:
        """The version of oneDNN itself; the wheel's version is that of the oneAPI toolkit."""
        function = self._library.dnnl_version
        function.restype = ctypes.POINTER(c_int * 3)
        return ".".join(map(str, function().contents))

    def function(self, name: str) -> Any:
        """Return the library's function dnnl_`name`, whose result is a status."""
        return getattr(self._library, f"dnnl_{name}")

    def memory(self, dims: tuple[int, ...], dtype: np.dtype, order: tuple[int, ...]) -> Handle:
        """Return the descriptor of a dense array.

        `order` has the array's axes in the order of memory, the slowest axis first.
        """
        strides, step = [0] * len(dims), 1
        for axis in reversed(order):
            strides[axis] = step
            step *= max(1, dims[axis])
        sizes = c_int(len(dims)), _Dims(*dims), c_int(_TYPES[dtype]), _Dims(*strides)
        return self._create("memory_desc", "memory_desc_create_with_strides", *sizes)

    def forward(self, memory: Handle, epsilon: float, *, training: bool) -> Handle:
        """Return the descriptor of a forward pass or inference; `memory` describes both x and y."""
        kind = c_int(_FORWARD_TRAINING if training else _FORWARD_INFERENCE)
        flags = c_uint(_SCALE | _SHIFT | (0 if training else _GLOBAL_STATISTICS))
        name = "batch_normalization_forward_primitive_desc_create"
        rest = kind, memory, memory, c_float(epsilon), flags, None
        return self._create("primitive_desc", name, self._engine, *rest)

    def backward(self, memory: Handle, epsilon: float, *, training: bool = True) -> Handle:
        """Return the descriptor of a backward pass that gives all gradients."""
        hint = self.forward(memory, epsilon, training=training)
        flags = c_uint(_SCALE | _SHIFT | (0 if training else _GLOBAL_STATISTICS))
        name = "batch_normalization_backward_primitive_desc_create"
        rest = c_int(_BACKWARD), memory, memory, memory, c_float(epsilon), flags, hint, None
        return self._create("primitive_desc", name, self._engine, *rest)

    def primitive(self, descriptor: Handle) -> Handle:
        """Return the operation of a descriptor, ready to run; oneDNN calls it a primitive."""
        return self._create("primitive", "primitive_create", descriptor)

    def view(self, memory: Handle, array: np.ndarray) -> Handle:
        """Return the library's memory object for the memory of an array."""
        address = c_void_p(array.ctypes.data)
        return self._create("memory", "memory_create", memory, self._engine, address)

    def _create(self, kind: str, name: str, *arguments: Any) -> Handle:
        """Call the function dnnl_`name`, and return a handle of the object that it makes.

        The object is destroyed when Python frees the handle.
        """
        handle = Handle()
        status = self.function(name)(byref(handle), *arguments)
        if status:
            raise StatusError(f"dnnl_{name}", status)
        weakref.finalize(handle, self.function(f"{kind}_destroy"), c_void_p(handle.value))
        return handle


class Primitive:
    """A primitive and its arrays. A call executes the primitive and waits for it.

    Parameters
    ----------
    library : Library
    descriptor : Handle
        From `Library.forward` or `Library.backward`.
    memory : Handle
        The descriptor of the arrays of x's shape.
    arrays : mapping of str to numpy.ndarray
        The arrays by the names of `ARGUMENTS`; arrays of one axis are float32.
    """

    def __init__(
        self,
        library: Library,
        descriptor: Handle,
        memory: Handle,
        arrays: Mapping[str, np.ndarray],
    ) -> None:
        arguments = (_ExecutionArgument * len(arrays))()
        views = []
        for place, (name, array) in zip(arguments, arrays.items(), strict=True):
            kind = memory if array.ndim > 1 else library.memory(array.shape, FLOAT32, (0,))
            views.append(library.view(kind, array))
            place.argument, place.memory = ARGUMENTS[name], views[-1].value
        self._execute = library.function("primitive_execute")
        self._wait = library.function("stream_wait")
        self._stream = library.stream
        primitive = library.primitive(descriptor)
        self._operands = (primitive, library.stream, c_int(len(arrays)), arguments)
        # The library stores the addresses of these objects, but does not keep them alive.
        self._alive = (arrays, views)

    def __call__(self) -> None:
        """Execute the primitive. When this method returns, the arrays have the results."""
        status = self._execute(*self._operands) or self._wait(self._stream)
        if status:
            raise StatusError("dnnl_primitive_execute", status)
