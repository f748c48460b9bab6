"""Calls of kernels on tensors: immediate calls, and, while tracing, nodes of a graph.

TensorFlow has no gradient for a node that calls Python, and treats a missing gradient as zero.
`tf.custom_gradient` wraps the node in another operator, which has a gradient. This gradient is lost
in functions that copy nodes one by one: `tf.vectorized_map`, `GradientTape.jacobian` and
`batch_jacobian`. Therefore a node has two safeguards, which its copies keep:

- An attribute of the node has the name under which the node's gradient is registered. When
  TensorFlow differentiates a graph (also the loops and functions in it), it finds the gradient by
  this name.
- The node's results pass through ``PreventGradient``, an operator whose gradient raises an error.
  In graphs, an attribute of this operator names another gradient, the identity. If a tape is
  recording while a node is copied, the tape ignores both attributes for the copy. It then calls the
  gradient of ``PreventGradient``, which raises the error, so the tape does not treat the missing
  gradient as zero.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from backnorm.allocation import aligned, is_aligned
from backnorm.dtypes import BFLOAT16
from backnorm.options import Options
from backnorm.tensorflow import calls
from backnorm.tensorflow.calls import Arrays
from backnorm.tensorflow.checks import check_axis

# These modules of TensorFlow are not documented. If a version of TensorFlow does not have them,
# `wants_formulas` returns False, and TensorFlow itself raises an error. Under XLA, the message of
# this error has the name of the node that calls Python.
try:
    from tensorflow.python.eager import forwardprop_util
    from tensorflow.python.ops import control_flow_util
except ImportError:
    control_flow_util = forwardprop_util = None

_LOST = (
    "backnorm: tf.vectorized_map, or a Jacobian, copied this operation without its gradient; use "
    "tf.map_fn, or GradientTape.jacobian(..., experimental_use_pfor=False)"
)

_Gradient = Callable[[list[Any], list[Any], list[Any], Options], Sequence[Any]]


def wants_formulas(*tensors: Any) -> bool:
    """Whether XLA compiles a call with these tensors, or one of the tensors has a tangent; tensors
    may be None.

    In both cases, formulas made of TensorFlow's operations replace the kernels. The reason is that
    TensorFlow runs a kernel by calling a Python function. XLA cannot call Python. If one of the
    tensors has a tangent while a graph is traced, forward mode (`tf.autodiff.ForwardAccumulator`)
    treats the result of a call of Python as a constant. In an eager call, forward mode computes the
    tangent by transposing the gradient function that reverse mode would call. This tangent cannot
    be differentiated again.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    try:
        if forwardprop_util.pack_tangents(present).tangents:
            return True
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        return graph is not None and control_flow_util.GraphOrParentsInXlaContext(graph)
    except AttributeError:
        return False


class Node(NamedTuple):
    """A call of a kernel: its function, its results and their gradient.

    Attributes
    ----------
    name : str
    call : callable
        A function of `backnorm.tensorflow.calls`.
    gradient : callable
        ``gradient(operands, statistics, cotangents, options)`` returns the gradient of each operand
        (any value for an operand that is None). `statistics` are the per-channel results,
        `cotangents` are those of all results. The function is called with the tensors of the node
        or of a copy, so it must be a module-level function that uses only its arguments.
    like : sequence of tensors
        Tensors with the shapes and types of the first results.
    per_channel : sequence of tf.DType
        The types of the other results, of shape (C,).
    """

    name: str
    call: Callable[[Arrays, Options], Arrays]
    gradient: _Gradient
    like: Sequence[Any]
    per_channel: Sequence[Any] = ()


def differentiable(node: Node, operands: Sequence[Any], options: Options) -> tuple[Any, ...]:
    """Return the results of a call, which TensorFlow differentiates by `node.gradient`."""
    presence = tuple(operand is not None for operand in operands)
    statistics: list[Any] = []

    def operation(*present: Any) -> Any:
        tensors = _here(_place(present, presence))
        results = _compute(node, tensors, options)

        def of_operands(*cotangents: Any) -> Any:
            # A cotangent may be a tf.IndexedSlices, for example from the gradient of tf.gather, so
            # every cotangent is converted to a dense tensor.
            dense = list(map(tf.convert_to_tensor, cotangents))
            return _pick(node.gradient(tensors, statistics, dense, options), presence)

        return tuple(results), of_operands

    results = tuple(tf.custom_gradient(operation)(*_pick(operands, presence)))
    # `of_operands` reads the list `statistics`. Its tensors, mean and variance, must be results of
    # `tf.custom_gradient`, because these have a gradient, so that the backward pass is
    # differentiable. The results of `_compute` have no gradient.
    statistics += results[len(node.like) :]
    return results


def refused(
    operands: Sequence[Any],
    cotangents: Sequence[Any],
    options: Options,
    message: str,
    gradient: _Gradient,
) -> list[Any]:
    """Return the gradient of each operand of a node that is not differentiable: None or zeros.

    When a call computes the gradient, it raises BacknormError with the message, unless all
    cotangents are zero. This function itself does not raise an error, because TensorFlow calls it
    before a gradient is requested: while a tape records a call of a `tf.function`, TensorFlow
    traces the gradients of everything in this function.

    Parameters
    ----------
    gradient : callable
        The node's gradient, which calls this function; also the gradient of the gradient.
    """
    presence = tuple(operand is not None for operand in operands)
    call = functools.partial(calls.refuse, message, len(operands))
    node = Node("batch_norm_refused", call, gradient, _pick(operands, presence))
    return _place(differentiable(node, [*operands, *cotangents], options), presence)


def _compute(node: Node, tensors: Sequence[Any], options: Options) -> list[Any]:
    """Return the results of a call: eager tensors, or, while tracing, the outputs of a new node.

    The first tensor is x; each other tensor may be None. The node calls a Python function, which
    runs the kernel. It is stateless, so TensorFlow may merge it with an equal node, and may omit it
    if its results are not used. A tape finds no gradient of the node, so the caller of this
    function defines the gradient, by `tf.custom_gradient`.
    """
    presence = tuple(tensor is not None for tensor in tensors)
    present = _pick(tensors, presence)
    x = tensors[0]
    rank = x.shape.rank

    def on_arrays(*arrays: np.ndarray) -> Arrays:
        if rank is not None:
            return node.call(_place(arrays, presence), options)
        axis = check_axis(options.axis, arrays[0])
        return node.call(_place(arrays, presence), options._replace(data_format=(axis,)))

    if tf.executing_eagerly():
        return [as_tensor(array) for array in on_arrays(*map(np.asarray, present))]
    key = node.name, node.gradient, options, presence, len(node.like)
    override = {"PyFuncStateless": _registered(*key)}
    with tf.compat.v1.get_default_graph().gradient_override_map(override):
        results = tf.numpy_function(
            on_arrays,
            present,
            [*(tensor.dtype for tensor in node.like), *node.per_channel],
            stateful=False,
            name=f"backnorm_{node.name}_not_for_XLA",
        )
    channels = None if rank is None else x.shape[options.axis]
    per_channel = [[channels]] * len(node.per_channel)
    shapes = [*(tensor.shape for tensor in node.like), *per_channel]
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape(shape)
    return _guarded(results)


@functools.cache
def _registered(
    name: str, gradient: _Gradient, options: Options, presence: tuple[bool, ...], elements: int
) -> str:
    """Register a gradient for nodes with these properties; return the gradient's name.

    Parameters
    ----------
    elements : int
        The number of results that are not per channel.
    """

    def of_inputs(node: Any, *cotangents: Any) -> Any:
        if node is None:
            return _unavailable(cotangents)
        dense = list(map(tf.convert_to_tensor, cotangents))
        statistics = _guarded(node.outputs[elements:])
        operands = _place(node.inputs, presence)
        return _pick(gradient(operands, statistics, dense, options), presence)

    return _register(name, of_inputs)


def _guarded(results: Sequence[Any]) -> list[Any]:
    """Wrap a node's results, so that a tape raises an error if the node's gradient was lost."""
    override = {"PreventGradient": _PASSED_ON}
    with tf.compat.v1.get_default_graph().gradient_override_map(override):
        return [tf.raw_ops.PreventGradient(input=result, message=_LOST) for result in results]


def _register(name: str, gradient: Callable[..., Any]) -> str:
    """Register a gradient with TensorFlow under a new name, and return the name."""
    unique = f"backnorm_{name}_{uuid.uuid4().hex}"
    tf.RegisterGradient(unique)(gradient)
    return unique


_PASSED_ON = _register("identity", lambda _, *cotangents: cotangents)


def _unavailable(cotangents: Sequence[Any]) -> list[Any]:
    """Return gradients that raise an error when they are computed.

    This function itself must not raise an error, because `tf.saved_model.save` calls the function
    for each type of node. The gradients that the function returns are never computed in this case.
    """
    message = "backnorm: an operation of a SavedModel has no gradient where it was mapped"
    with tf.control_dependencies([tf.debugging.Assert(False, [message])]):
        return [tf.identity(cotangent) for cotangent in cotangents]


def _pick(values: Sequence[Any], presence: Sequence[bool]) -> list[Any]:
    """Return the values that are present."""
    return [value for value, there in zip(values, presence, strict=True) if there]


def _place(values: Sequence[Any], presence: Sequence[bool]) -> list[Any]:
    """Undo `_pick`: return None for each value that was left out."""
    remaining = iter(values)
    return [next(remaining) if there else None for there in presence]


def _here(tensors: Sequence[Any]) -> list[Any]:
    """Return the tensors as tensors of the graph that is being traced.

    A gradient function stores tensors of the graph in which it was made, and may be called while
    another graph is traced. A graph can use tensors of the graph that directly encloses it, but not
    tensors of graphs further out.
    """
    if tf.executing_eagerly():
        return list(tensors)
    return [None if tensor is None else tf.identity(tensor) for tensor in tensors]


def as_tensor(array: np.ndarray) -> Any:
    """Return an eager tensor with the elements of an array.

    If the array is contiguous and aligned, the tensor shares the array's memory. The array must not
    be written to afterwards. (With TensorFlow 2.21 on a CPU, ``numpy.asarray(tensor)`` returns a
    view for every element type; ``tf.constant(array)`` copies.)
    """
    # TensorFlow's operators end the process ("Check failed: IsAligned()") if the address of a
    # tensor is not a multiple of 64 bytes, and `from_dlpack` does not check the address.
    if not (array.flags.c_contiguous and is_aligned(array)):
        source, array = array, aligned(array.shape, array.dtype)
        array[...] = source
    if array.dtype == BFLOAT16:  # NumPy's DLPack does not support bfloat16
        return tf.bitcast(_shared(array.view(np.uint16)), tf.bfloat16)
    return _shared(array)


def _shared(array: np.ndarray) -> Any:
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
