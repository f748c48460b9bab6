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

__all__ = ["has_tangent", "is_for_xla", "wants_formulas"]


def wants_formulas(*tensors: Any) -> bool:
    """Whether XLA is to compile a call with these tensors, or one has a tangent.

    XLA cannot call Python. Forward mode (`tf.autodiff.ForwardAccumulator`) takes a function that
    calls Python for a constant while a graph is traced, and of an eager one it transposes the
    gradient, which leaves out the order above.
    """
    return has_tangent(*tensors) or is_for_xla()


def is_for_xla() -> bool:
    """Whether XLA is to compile the graph that is being traced."""
    if tf.executing_eagerly():
        return False
    try:
        return bool(control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))
    except AttributeError:
        return False


def has_tangent(*tensors: Any) -> bool:
    """Whether one of these tensors, or None, has a tangent: forward mode is on its way."""
    present = [tensor for tensor in tensors if tensor is not None]
    try:
        return bool(forwardprop_util.pack_tangents(present).tangents)
    except AttributeError:
        return False
