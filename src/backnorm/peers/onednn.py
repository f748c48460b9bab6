"""The parts of oneDNN's C API, version 3, that batch normalisation and layer normalisation need:
their primitives, and the graph API.

The declarations of functions and the values of constants in this module are those of oneDNN's
headers dnnl.h, dnnl_types.h, dnnl_common_types.h, dnnl_graph.h and dnnl_graph_types.h.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from ctypes import addressof, byref, c_float, c_int, c_int64, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from backnorm.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, element_type

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

# Values of dnnl_graph_op_kind_t, dnnl_graph_op_attr_t, dnnl_graph_tensor_property_t and
# dnnl_graph_partition_policy_t.
_KINDS = {
    "BatchNormTrainingBackward": 5,
    "BatchNormForwardTraining": 6,
    "BatchNormInference": 7,
    "LayerNormBackward": 34,
}
_ATTRIBUTES = {"epsilon": 0x3, "momentum": 0x6, "data_format": 0x83}
_VARIABLE = 1
_FUSION = 1

# dnnl_data_type_t.
_TYPES = {FLOAT16: 1, BFLOAT16: 2, FLOAT32: 3, FLOAT64: 7}

# dnnl_status_t.
_STATUSES = ("success", "out_of_memory", "invalid_arguments", "unimplemented", "last_impl_reached",
             "runtime_error", "not_required", "invalid_graph", "invalid_graph_op", "invalid_shape",
             "invalid_data_type")  # fmt: skip

# DNNL_MAX_NDIMS.
_Dims = c_int64 * 12


class MissingError(Exception):
    """The package that contains the library is not installed."""


class StatusError(Exception):
    """The library returned a status other than success."""

    def __init__(self, function: str, status: int) -> None:
        name = _STATUSES[status] if status < len(_STATUSES) else str(status)
        super().__init__(f"{function} returned {name}")


class Handle(c_void_p):
    """Address of one of the library's objects."""


class _ExecutionArgument(ctypes.Structure):
    _fields_ = (("argument", c_int), ("memory", c_void_p))


class _LogicalTensor(ctypes.Structure):
    _fields_ = (
        ("id", c_size_t),
        ("ndims", c_int),
        ("dims", _Dims),
        ("data_type", c_int),
        ("property", c_int),
        ("layout_type", c_int),
        ("strides", _Dims),
    )


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
    threads : int
        The number of OpenMP threads, for calls from the thread that makes this object.

    Raises
    ------
    MissingError
        If the library is not installed.
    """

    def __init__(self, threads: int) -> None:
        path = find()
        if path is None:
            raise MissingError(f"{DISTRIBUTION} is not installed")
        self._library = ctypes.CDLL(str(path))
        # oneDNN has loaded this OpenMP runtime, so `CDLL` returns the loaded one.
        ctypes.CDLL("libgomp.so.1").omp_set_num_threads(c_int(threads))
        self.engine = self.create("engine", "engine_create", c_int(_CPU), c_size_t(0))
        self.stream = self.create("stream", "stream_create", self.engine, c_uint(_IN_ORDER))

    @property
    def version(self) -> str:
        """The version of oneDNN itself; the wheel's version is that of the oneAPI toolkit."""
        function = self._library.dnnl_version
        function.restype = ctypes.POINTER(c_int * 3)
        return ".".join(map(str, function().contents))

    def function(self, name: str) -> Any:
        """Return the library's function dnnl_`name`, whose result is a status."""
        return getattr(self._library, f"dnnl_{name}")

    def call(self, name: str, *arguments: Any) -> None:
        """Call the function dnnl_`name`.

        Raises
        ------
        StatusError
            If the function does not return success.
        """
        status = self.function(name)(*arguments)
        if status:
            raise StatusError(f"dnnl_{name}", status)

    def create(self, kind: str, name: str, *arguments: Any) -> Handle:
        """Call the function dnnl_`name`, and return a handle of the object that it makes.

        The object is destroyed when Python frees the handle.
        """
        handle = Handle()
        self.call(name, byref(handle), *arguments)
        weakref.finalize(handle, self.function(f"{kind}_destroy"), c_void_p(handle.value))
        return handle


class Primitive:
    """A normalisation and its arrays. A call executes it and waits for the results.

    Parameters
    ----------
    library : Library
    arrays : mapping of str to numpy.ndarray
        The inputs and results by the names of `ARGUMENTS`. Arrays of x's shape may have any
        strides, which are those of "src" for all of them; others are float32. With "diff_dst",
        the primitive is a backward pass, which gives all gradients; without it, a forward pass.
    epsilon : float
    training : bool
        Whether the statistics are those of x; a forward pass then returns them.
    kind : {"batch", "layer"}
        The normalisation. The channels of x are on its axis 1, of a layer normalisation on the last
        one, which the statistics lack.
    """

    def __init__(
        self,
        library: Library,
        arrays: Mapping[str, np.ndarray],
        epsilon: float,
        *,
        training: bool,
        kind: str = "batch",
    ) -> None:
        data = _memory(library, arrays["src"])
        arguments = (_ExecutionArgument * len(arrays))()
        views = []
        for place, (name, array) in zip(arguments, arrays.items(), strict=True):
            is_data = array.ndim == arrays["src"].ndim
            layout = data if is_data else _memory(library, array)
            address = c_void_p(array.ctypes.data)
            views.append(library.create("memory", "memory_create", layout, library.engine, address))
            place.argument, place.memory = ARGUMENTS[name], views[-1].value
        direction = c_int(_FORWARD_TRAINING if training else _FORWARD_INFERENCE)
        flags = c_uint(_SCALE | _SHIFT | (0 if training else _GLOBAL_STATISTICS))
        name = kind + "_normalization_{}_primitive_desc_create"
        statistics = [_memory(library, arrays["mean"])] if kind == "layer" else []
        options = *statistics, c_float(epsilon), flags
        descriptor = library.create(
            "primitive_desc", name.format("forward"), library.engine, direction, data, data,
            *options, None,
        )  # fmt: skip
        if "diff_dst" in arrays:
            # The descriptor of the forward pass is a hint for that of the backward pass.
            descriptor = library.create(
                "primitive_desc", name.format("backward"), library.engine, c_int(_BACKWARD), data,
                data, data, *options, descriptor, None,
            )  # fmt: skip
        primitive = library.create("primitive", "primitive_create", descriptor)
        self._execute = library.function("primitive_execute")
        self._wait = library.function("stream_wait")
        self._stream = library.stream
        self._operands = (primitive, library.stream, c_int(len(arrays)), arguments)
        # The library stores the addresses of these objects, but does not keep them alive.
        self._alive = (arrays, views)

    def __call__(self) -> None:
        """Execute the primitive. When this method returns, the arrays have the results."""
        status = self._execute(*self._operands) or self._wait(self._stream)
        if status:
            raise StatusError("dnnl_primitive_execute", status)


def _memory(library: Library, array: np.ndarray) -> Handle:
    """Return the descriptor of an array."""
    return library.create("memory_desc", "memory_desc_create_with_strides", *_layout(array))


def _layout(array: np.ndarray) -> tuple[c_int, Any, c_int, Any]:
    """Return an array's rank, sizes, element type and strides as the library takes them."""
    strides = (stride // array.itemsize for stride in array.strides)
    dtype = element_type(array.dtype)
    return c_int(array.ndim), _Dims(*array.shape), c_int(_TYPES[dtype]), _Dims(*strides)


def run_operator(
    library: Library,
    kind: str,
    attributes: Mapping[str, float | str],
    inputs: Sequence[np.ndarray],
    outputs: Sequence[np.ndarray],
) -> None:
    """Run an operator of oneDNN Graph, as a graph of its own, and write its outputs.

    Parameters
    ----------
    library : Library
    kind : str
        A key of `_KINDS`.
    attributes : mapping of str to float or str
    inputs, outputs : sequence of numpy.ndarray
        In the operator's order; with any strides.

    Raises
    ------
    StatusError
        If the library refuses the operator.
    """
    create, call = library.create, library.call
    operator = create("graph_op", "graph_op_create", c_size_t(0), c_int(_KINDS[kind]), b"operator")
    for name, value in attributes.items():
        attribute = c_int(_ATTRIBUTES[name])
        if isinstance(value, str):
            text = value.encode()
            call("graph_op_set_attr_str", operator, attribute, text, c_size_t(len(text)))
        else:
            call("graph_op_set_attr_f32", operator, attribute, byref(c_float(value)), c_size_t(0))
    tensors: list[_LogicalTensor] = []
    memory: list[Handle] = []
    for array in (*inputs, *outputs):
        tensor, address = _LogicalTensor(), c_void_p(array.ctypes.data)
        rank, sizes, dtype, strides = _layout(array)
        call("graph_logical_tensor_init_with_strides", byref(tensor), c_size_t(len(tensors)), dtype,
             rank, sizes, strides, c_int(_VARIABLE))  # fmt: skip
        end = "input" if len(tensors) < len(inputs) else "output"
        call(f"graph_op_add_{end}", operator, byref(tensor))
        tensors.append(tensor)
        memory.append(
            create("graph_tensor", "graph_tensor_create", byref(tensor), library.engine, address)
        )
    partition = create("graph_partition", "graph_partition_create_with_op", operator, c_int(_CPU))
    compiled = create("graph_compiled_partition", "graph_compiled_partition_create", partition)
    described = _lists(map(addressof, tensors), len(inputs))
    call("graph_partition_compile", partition, compiled, *described, library.engine)
    passed = _lists((each.value for each in memory), len(inputs))
    call("graph_compiled_partition_execute", compiled, library.stream, *passed)
    call("stream_wait", library.stream)


def _lists(addresses: Iterable[int | None], inputs: int) -> tuple[Any, ...]:
    """Return the number and the addresses of the inputs, and then those of the outputs."""
    every = [*addresses]
    parts = every[:inputs], every[inputs:]
    return tuple(
        each for part in parts for each in (c_size_t(len(part)), (c_void_p * len(part))(*part))
    )
