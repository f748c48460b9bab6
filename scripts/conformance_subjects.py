"""Implementations in the table of docs/conformance.md that `backnorm verify` has no name for.

Usage: backnorm verify scripts/conformance_subjects.py:tensorflow_xla
"""

from __future__ import annotations

from ctypes import Structure, addressof, byref, c_float, c_int, c_int64, c_size_t, c_void_p
from functools import partial
from typing import Any

import numpy as np

from backnorm.conformance.verify import _onednn as onednn
from backnorm.conformance.verify._peers import RefusedError, tensorflow

#: The gradients of FusedBatchNormGradV3 as XLA compiles it.
tensorflow_xla = partial(tensorflow, compiled=True)


def onednn_graph(
    x: np.ndarray,
    dy: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None,
    *,
    epsilon: float,
    data_format: str,
    training: bool,
) -> tuple[np.ndarray, ...]:
    """Return the gradients of oneDNN Graph's BatchNormTrainingBackward."""
    if not training or mean.dtype != np.float32 or x.dtype == np.float64:
        raise RefusedError("the operator takes only float32 statistics, those of x, and no float64")
    if x.dtype == np.float16 or (data_format == "NXC" and x.ndim < 4):
        # A C++ exception (dnnl::error, std::bad_alloc) escapes from dnnl_graph_partition_compile.
        raise RefusedError("version 3.2.0 ends the process for float16, and in NXC of rank 2 and 3")
    scale = np.ones_like(mean) if gamma is None else gamma
    inputs = tuple(map(np.ascontiguousarray, (x, dy, mean, variance, scale)))
    outputs = np.empty_like(inputs[0]), np.empty_like(mean), np.empty_like(mean)
    path = onednn.find()
    assert path is not None
    library = onednn.Library(path, 1)

    def call(name: str, *arguments: Any) -> None:
        status = library.function(f"graph_{name}")(*arguments)
        if status:
            raise RefusedError(str(onednn.StatusError(name, status)))

    tensors = [_LogicalTensor() for _ in (*inputs, *outputs)]
    for number, (tensor, array) in enumerate(zip(tensors, (*inputs, *outputs), strict=True)):
        strides = (step // array.itemsize for step in array.strides)
        sizes, steps = _Dims(*array.shape), _Dims(*strides)
        kind, rank = _TYPES[str(array.dtype)], array.ndim
        name = "logical_tensor_init_with_strides"
        call(name, byref(tensor), c_size_t(number), kind, rank, sizes, steps, _VARIABLE)
    operator, graph, partition, compiled = (c_void_p() for _ in range(4))
    call("op_create", byref(operator), c_size_t(0), _BATCH_NORM_BACKWARD, b"backward")
    for tensor in tensors[:5]:
        call("op_add_input", operator, byref(tensor))
    for tensor in tensors[5:]:
        call("op_add_output", operator, byref(tensor))
    call("op_set_attr_f32", operator, _EPSILON, byref(c_float(epsilon)), c_size_t(1))
    call("op_set_attr_str", operator, _DATA_FORMAT, data_format.encode(), c_size_t(3))
    call("graph_create", byref(graph), _CPU)
    call("add_op", graph, operator)
    call("graph_finalize", graph)
    call("graph_filter", graph, _FUSION)
    call("graph_get_partitions", graph, c_size_t(1), byref(partition))
    call("compiled_partition_create", byref(compiled), partition)
    pointers = [
        (c_void_p * len(part))(*map(addressof, part)) for part in (tensors[:5], tensors[5:])
    ]
    engine = library._engine
    call("partition_compile", partition, compiled, c_size_t(5), pointers[0], c_size_t(3),
         pointers[1], engine)  # fmt: skip
    memory = []
    for tensor, array in zip(tensors, (*inputs, *outputs), strict=True):
        view, address = c_void_p(), c_void_p(array.ctypes.data)
        call("tensor_create", byref(view), byref(tensor), engine, address)
        memory.append(view.value)
    arrays = (c_void_p * 5)(*memory[:5]), (c_void_p * 3)(*memory[5:])
    call("compiled_partition_execute", compiled, library.stream, c_size_t(5), arrays[0],
         c_size_t(3), arrays[1])  # fmt: skip
    status = library.function("stream_wait")(library.stream)
    assert not status
    return outputs


_Dims = c_int64 * 12


class _LogicalTensor(Structure):
    """dnnl_graph_logical_tensor_t."""

    _fields_ = (
        ("id", c_size_t),
        ("ndims", c_int),
        ("dims", _Dims),
        ("data_type", c_int),
        ("property", c_int),
        ("layout_type", c_int),
        ("strides", _Dims),
    )


# Numbers of dnnl_common_types.h and dnnl_graph_types.h.
_TYPES = {"float16": 1, "bfloat16": 2, "float32": 3}
_BATCH_NORM_BACKWARD, _EPSILON, _DATA_FORMAT = 5, 0x3, 0x83
_VARIABLE, _FUSION, _CPU = 1, 1, 1
