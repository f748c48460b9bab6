"""What TensorFlow is doing with a call that cannot be a call of Python.

The answers are in modules that TensorFlow does not document. Where those have gone, errors are
TensorFlow's own; that of XLA names the node.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

try:
    from tensorflow.python.eager import forwardprop_util
    from tensorflow.python.ops import control_flow_util
except ImportError:
    control_flow_util = forwardprop_util = None

__all__ = ["wants_formulas"]


def wants_formulas(*tensors: Any) -> bool:
    """Whether XLA is to compile a call with these tensors, or one has a tangent.

    XLA cannot call Python. Forward mode (`tf.autodiff.ForwardAccumulator`) takes a function that
    calls Python for a constant while a graph is traced, and of an eager one it transposes the
    gradient, which leaves out the order above.
    """
    if _has_tangent([tensor for tensor in tensors if tensor is not None]):
        return True
    return not tf.executing_eagerly() and _is_for_xla()


def _is_for_xla() -> bool:
    try:
        return bool(control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))
    except AttributeError:
        return False


def _has_tangent(tensors: list[Any]) -> bool:
    try:
        return bool(forwardprop_util.pack_tangents(tensors).tangents)
    except AttributeError:
        return False
