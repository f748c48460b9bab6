"""The modes of TensorFlow in which a function cannot call Python.

The modes are read from undocumented modules of TensorFlow. If a version of TensorFlow does not have
these modules, the modes are not recognised. If a mode is not recognised, TensorFlow itself raises
an error. Under XLA, the message of this error has the name of the node that calls Python.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

try:
    from tensorflow.python.eager import forwardprop_util
    from tensorflow.python.ops import control_flow_util
except ImportError:
    control_flow_util = forwardprop_util = None


def wants_formulas(*tensors: Any) -> bool:
    """Whether XLA compiles a call with these tensors, or one of the tensors has a tangent.

    In both cases, formulas made of TensorFlow's operations replace the kernels. The reason is that
    TensorFlow runs a kernel by calling a Python function. XLA cannot call Python. If one of the
    tensors has a tangent while a graph is traced, forward mode (`tf.autodiff.ForwardAccumulator`)
    treats the result of a call of Python as a constant. In an eager call, forward mode computes the
    tangent by transposing the gradient function that reverse mode would call. This tangent cannot
    be differentiated again.
    """
    return has_tangent(*tensors) or is_for_xla()


def is_for_xla() -> bool:
    """Whether XLA compiles the graph that is being traced."""
    if tf.executing_eagerly():
        return False
    try:
        return bool(control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))
    except AttributeError:
        return False


def has_tangent(*tensors: Any) -> bool:
    """Whether one of these tensors has a tangent (forward mode); tensors may be None."""
    present = [tensor for tensor in tensors if tensor is not None]
    try:
        return bool(forwardprop_util.pack_tangents(present).tangents)
    except AttributeError:
        return False
