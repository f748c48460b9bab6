"""Calls of kernels on tensors: made at once, or while tracing as nodes of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from backnorm.tensorflow.calls import Options
from backnorm.tensorflow.checks import resolve_axis
from backnorm.tensorflow.memory import as_array, as_tensor

__all__ = ["compute", "here", "pick", "place"]


def compute(
    name: str,
    call: Callable[..., tuple[np.ndarray, ...]],
    tensors: Sequence[Any],
    options: Options,
    like: Sequence[Any],
    per_channel: Sequence[Any],
    rows: Sequence[int] = (),
) -> list[Any]:
    """Return what `call` makes of the tensors: at once, or while tracing as a node of the graph.

    The node calls Python. It is stateless: TensorFlow may merge equal nodes, and leaves out those
    whose results are not used.

    Parameters
    ----------
    tensors : sequence of tensors or None
        The first is x.
    like : sequence of tensors
        The first results have their shapes and types.
    per_channel : sequence of tf.DType
        The types of the other results, of shape (*rows, C).
    rows : sequence of int
    """
    given = [tensor is not None for tensor in tensors]
    present = pick(tensors, given)
    x = tensors[0]
    rank = x.shape.rank

    def on_arrays(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        if rank is not None:
            return call(*place(arrays, given), options)
        axis = resolve_axis(options.axis, arrays[0].ndim, arrays[0].shape)
        return call(*place(arrays, given), options._replace(axis=axis))

    if tf.executing_eagerly():
        return [as_tensor(array) for array in on_arrays(*map(as_array, present))]
    results = tf.numpy_function(
        on_arrays,
        present,
        [*(tensor.dtype for tensor in like), *per_channel],
        stateful=False,
        name=f"backnorm_{name}_not_for_XLA",
    )
    channels = None if rank is None else x.shape[options.axis]
    shapes = [*(tensor.shape for tensor in like), *[[*rows, channels]] * len(per_channel)]
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape(shape)
    return list(results)


def pick(values: Sequence[Any], given: Sequence[bool]) -> list[Any]:
    """Return the values that are given."""
    return [value for value, there in zip(values, given, strict=True) if there]


def place(values: Sequence[Any], given: Sequence[bool]) -> list[Any]:
    """Undo `pick`: None where there was none."""
    remaining = iter(values)
    return [next(remaining) if there else None for there in given]


def here(tensors: Sequence[Any]) -> list[Any]:
    """Return the tensors as those of the graph that is being traced.

    A gradient function keeps them, and may be called while another graph is traced, which can
    reach into this one but not through it.
    """
    if tf.executing_eagerly():
        return list(tensors)
    return [None if tensor is None else tf.identity(tensor) for tensor in tensors]
