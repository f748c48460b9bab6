"""Checks of the arguments of the TensorFlow functions, by the rules of `problem.py`.

An eager call runs backnorm's operation on NumPy arrays, which checks its operands itself. While a
function is traced, its tensors have no values yet, so that operation is not called. Instead, this
module checks the sizes that are already known. If a known size is wrong, an error is raised while
the function is traced, so the error's traceback shows the line of the wrong call.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import numpy as np
import tensorflow as tf

from backnorm import problem, scalars
from backnorm.dtypes import ELEMENT_TYPES, element_type
from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.problem import Metadata

# Arguments of the shape (N, ..., C); other arguments have one value per channel.
_LARGE = ("x", "dy")
_OPTIONAL = ("gamma", "beta")
_TYPES = frozenset(tf.as_dtype(dtype) for dtype in ELEMENT_TYPES)
# Values of these types are passed to TensorFlow, which converts them to tensors or raises its own
# error.
_OWN = (tf.Tensor, tf.Variable, tf.IndexedSlices, tf.RaggedTensor, tf.SparseTensor)


def as_tensors(**arguments: Any) -> dict[str, Any]:
    """Return the arguments as tensors; gamma and beta may be None.

    Raises
    ------
    ArgumentTypeError
        If an argument cannot be converted to a tensor, has an unsupported element type, or is a
        tensor of a graph in an eager call.
    """
    tensors: dict[str, Any] = {}
    eager = tf.executing_eagerly()
    for name, value in arguments.items():
        if value is None and name in _OPTIONAL:
            tensors[name] = None
            continue
        tensor = tensors[name] = _as_tensor(name, value)
        if tensor.dtype not in _TYPES:
            raise _unsupported(name, tensor.dtype)
        if eager and tf.is_symbolic_tensor(tensor):
            raise ArgumentTypeError(
                name,
                "must be an eager tensor; a tf.function's tensors have no elements outside it",
                came=type(tensor).__name__,
                accepted="an eager tensor, or a call within its tf.function",
            )
    return tensors


def check_axis(axis: Any, x: Any) -> int:
    """Return the channel axis as a number from 0 to rank - 1, or raise.

    If x is traced and its rank is unknown, return `axis` unchanged. When the function runs, it is
    called again, with an array.
    """
    shape = tf.TensorShape(x.shape)
    if shape.rank is None:
        return scalars.check_integer("axis", axis, accepted="an integer, an axis of x's rank")
    if shape.rank < 2:
        raise ArgumentValueError(
            "x",
            "must have rank 2 or more: a batch axis and a channel axis",
            came=f"rank {shape.rank}, shape {x.shape}",
            accepted="rank >= 2",
        )
    return scalars.check_axis(axis, shape.rank)


def metadata(tensors: Mapping[str, Any], axis: int) -> dict[str, Any]:
    """Return the shapes and types of the tensors of a traced call. In the returned shapes, the
    channel axis is moved to the end.

    If a tensor does not have a known size for an axis, the size of the same axis of another tensor
    is returned. If no tensor has a known size for the axis, 1 is returned. If the rank of no tensor
    is known, the returned shapes have rank 2.
    """
    shapes = [tensors[name].shape for name in _LARGE if name in tensors]
    shape = next((own for own in shapes if own.rank is not None), tf.TensorShape([None] * 2))
    if all(own.rank is None for own in shapes):
        axis = -1
    axis = axis % shape.rank if shape.rank else axis
    sizes = {
        name: _sizes(name, tensor.shape, axis, shape)
        for name, tensor in tensors.items()
        if tensor is not None
    }
    channels = _known(own[-1] for own in sizes.values() if own)
    large = [sizes[name] for name in _LARGE if name in sizes]
    space = [_known(places) for places in zip(*(own[:-1] for own in large), strict=False)]
    result: dict[str, Any] = dict.fromkeys(tensors)
    for name, own in sizes.items():
        guesses = [*space, channels] if name in _LARGE and len(own) == len(space) + 1 else []
        pairs = zip_longest(own, guesses, fillvalue=channels)
        shape = tuple(guess if size is None else size for size, guess in pairs)
        result[name] = Metadata(shape, np.dtype(tensors[name].dtype.as_numpy_dtype))
    return result


def _sizes(name: str, shape: Any, axis: int, of_large: Any) -> list[int | None]:
    """Return the sizes of a tensor's axes, the channel axis last. An unknown size is None."""
    if name not in _LARGE:
        return [None] if shape.rank is None else list(shape)
    sizes = list(of_large if shape.rank is None else shape)
    return sizes if axis >= len(sizes) else [*sizes[:axis], *sizes[axis + 1 :], sizes[axis]]


def _known(sizes: Any) -> int:
    return next((size for size in sizes if size is not None), 1)


def _as_tensor(name: str, value: Any) -> Any:
    if value is None:
        raise ArgumentTypeError(name, "is required", came="None", accepted="a tensor")
    kind = type(value)
    if not _is_readable(value):
        value = _read(name, value)
    try:
        return tf.convert_to_tensor(value)
    except Exception as error:
        raise _unreadable(name, kind) from error


def _is_readable(value: object) -> bool:
    """Whether a value is a number, a tensor of TensorFlow, or a list of these.

    A value of another kind is not passed to TensorFlow, because TensorFlow would call the value's
    comparison operators. An exception that such an operator raises can end the process.
    """
    kind = type(value)
    if kind is list or kind is tuple:
        # A list that contains itself causes a RecursionError.
        try:
            return all(map(_is_readable, value))  # type: ignore[call-overload]
        except RecursionError:
            return False
    return kind in (int, float, bool) or issubclass(kind, _OWN) or hasattr(kind, "__tf_tensor__")


def _read(name: str, value: Any) -> np.ndarray:
    """Return a value as a NumPy array of a supported element type, or raise."""
    array = scalars.as_array(name, value)
    kind = element_type(array.dtype)
    if kind is not None:
        # TensorFlow ignores the byte order of a constant in a graph, so the array is converted to
        # the native byte order.
        return array if array.dtype.isnative else array.astype(kind)
    if issubclass(type(value), np.ndarray):
        raise _unsupported(name, array.dtype)
    raise _unreadable(name, type(value))


def _unreadable(name: str, kind: type) -> ArgumentTypeError:
    return ArgumentTypeError(
        name, "cannot be read as a tensor", came=kind.__name__, accepted="a tensor"
    )


def _unsupported(name: str, dtype: Any) -> ArgumentTypeError:
    hint = f"convert it first, e.g. tf.cast({name}, tf.float32)"
    return problem.unsupported_type(name, getattr(dtype, "name", dtype), hint)
