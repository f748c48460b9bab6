"""oneDNN Graph's BatchNormTrainingBackward, through its C API; argv[3] is the library.

The declarations are those of oneapi/dnnl/dnnl_graph.h and dnnl_graph_types.h, oneDNN 3.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p

import numpy as np
from protocol import serve

CPU, IN_ORDER, FLOAT32, STRIDED, FUSION = 1, 1, 3, 2, 1
BATCH_NORM_BACKWARD = 5
ATTRIBUTE_EPSILON, ATTRIBUTE_DATA_FORMAT = 0x3, 0x83
MAX_RANK = 12


class LogicalTensor(ctypes.Structure):
    _fields_ = (
        ("id", c_size_t),
        ("ndims", c_int),
        ("dims", c_int64 * MAX_RANK),
        ("data_type", c_int),
        ("property", c_int),
        ("layout_type", c_int),
        ("strides", c_int64 * MAX_RANK),
    )

    def __init__(self, identity, array):
        assert array.dtype == np.float32
        super().__init__(id=identity, ndims=array.ndim, data_type=FLOAT32, layout_type=STRIDED)
        self.dims[: array.ndim] = array.shape
        self.strides[: array.ndim] = [stride // array.itemsize for stride in array.strides]


class Graph:
    """The library's calls, each of which must return success."""

    def __init__(self, path):
        self.library = ctypes.CDLL(path)
        self.engine, self.stream, allocator = c_void_p(), c_void_p(), c_void_p()
        self.call("dnnl_graph_allocator_create", byref(allocator), None, None)
        self.call(
            "dnnl_graph_make_engine_with_allocator",
            byref(self.engine),
            c_int(CPU),
            c_size_t(0),
            allocator,
        )
        self.call("dnnl_stream_create", byref(self.stream), self.engine, c_int(IN_ORDER))

    def call(self, name, *arguments):
        status = getattr(self.library, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} returned status {status}")

    def run(self, kind, attributes, inputs, outputs):
        """Run one operator as a graph of its own, in the place of `outputs`."""
        tensors = [LogicalTensor(i, array) for i, array in enumerate([*inputs, *outputs])]
        ins, outs = tensors[: len(inputs)], tensors[len(inputs) :]
        graph, operator = c_void_p(), c_void_p()
        self.call("dnnl_graph_graph_create", byref(graph), c_int(CPU))
        self.call("dnnl_graph_op_create", byref(operator), c_size_t(0), c_int(kind), b"op")
        for attribute, value in attributes.items():
            if isinstance(value, float):
                number = c_float(value)
                self.call(
                    "dnnl_graph_op_set_attr_f32",
                    operator,
                    c_int(attribute),
                    byref(number),
                    c_size_t(0),
                )
            else:
                text = c_char_p(value.encode())
                self.call(
                    "dnnl_graph_op_set_attr_str",
                    operator,
                    c_int(attribute),
                    text,
                    c_size_t(len(value)),
                )
        for tensor in ins:
            self.call("dnnl_graph_op_add_input", operator, byref(tensor))
        for tensor in outs:
            self.call("dnnl_graph_op_add_output", operator, byref(tensor))
        self.call("dnnl_graph_add_op", graph, operator)
        self.call("dnnl_graph_graph_finalize", graph)
        self.call("dnnl_graph_graph_filter", graph, c_int(FUSION))
        partition, compiled = c_void_p(), c_void_p()
        self.call("dnnl_graph_graph_get_partitions", graph, c_size_t(1), byref(partition))
        supported = ctypes.c_uint8()
        self.call("dnnl_graph_partition_is_supported", partition, byref(supported))
        assert supported.value, "oneDNN Graph does not support the partition"

        self.call("dnnl_graph_compiled_partition_create", byref(compiled), partition)
        self.call(
            "dnnl_graph_partition_compile",
            partition,
            compiled,
            c_size_t(len(ins)),
            _pointers(ins),
            c_size_t(len(outs)),
            _pointers(outs),
            self.engine,
        )
        self.call(
            "dnnl_graph_compiled_partition_execute",
            compiled,
            self.stream,
            c_size_t(len(ins)),
            self._tensors(ins, inputs),
            c_size_t(len(outs)),
            self._tensors(outs, outputs),
        )
        self.call("dnnl_stream_wait", self.stream)

    def _tensors(self, logical, arrays):
        handles = (c_void_p * len(arrays))()
        for i, (tensor, array) in enumerate(zip(logical, arrays, strict=True)):
            handle = c_void_p()
            self.call(
                "dnnl_graph_tensor_create",
                byref(handle),
                byref(tensor),
                self.engine,
                c_void_p(array.ctypes.data),
            )
            handles[i] = handle
        return handles


def _pointers(tensors):
    return (POINTER(LogicalTensor) * len(tensors))(*[ctypes.pointer(t) for t in tensors])


def backward(case, x, dy, mean, variance, gamma):
    assert case["training"], "the operator has no frozen mode"
    outputs = [np.full_like(array, np.nan) for array in (x, gamma, gamma)]
    GRAPH.run(
        BATCH_NORM_BACKWARD,
        {ATTRIBUTE_EPSILON: case["epsilon"], ATTRIBUTE_DATA_FORMAT: case["data_format"]},
        [x, dy, mean, variance, gamma],
        outputs,
    )
    return outputs


GRAPH = Graph(sys.argv.pop(3))
serve(backward)
