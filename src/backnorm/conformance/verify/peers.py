"""Other packages' batch normalisations, which ``backnorm verify`` knows by name.

The function of a :class:`Pass` has one of two calling conventions. If a dialect describes the
package's operator, the function takes the rules of the operator, and inputs and attributes by the
operator's names; so one function calls all operators of a package. Other functions are called like
`backnorm.batch_norm_backward` or `backnorm.batch_norm_forward`. To add a package or one of its
operators, add a function, and a line to `PEERS`.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Any, cast

import numpy as np

import backnorm
from backnorm.conformance.axes import BATCH_NORM, NORMALIZATIONS, Normalization
from backnorm.conformance.verify import row_peers
from backnorm.conformance.verify.names import OperationName
from backnorm.conformance.verify.operations import RefusedError
from backnorm.dialects.schema import OperatorSchema
from backnorm.dtypes import FLOAT32, FLOAT64, element_type, is_16_bit
from backnorm.peers import onednn
from backnorm.peers.torch_tensors import to_tensor

__all__ = ["PEERS", "Pass", "missing_package"]

_Inputs = Mapping[str, np.ndarray | None]
_Attributes = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Pass:
    """A backward or forward pass of a package.

    Attributes
    ----------
    function : callable
        Without a dialect, called like `backnorm.batch_norm_backward` or
        `backnorm.batch_norm_forward`. With a dialect, takes the schema of the operator, and its
        inputs and attributes by name, and returns the operator's results.
    dialect : str or None
        The dialect whose first operator of this operation the function calls.
    is_strided : bool
        Whether the function takes arrays in NCX with any strides. It then gets the arrays of a case
        in NXC as views with permuted axes.
    omitted : tuple of str
        The results that the function does not return.
    """

    function: Callable[..., Any]
    dialect: str | None = None
    is_strided: bool = False
    omitted: tuple[str, ...] = ()


def _textbook_backward(
    x: Any, dy: Any, mean: Any, variance: Any, gamma: Any, *, epsilon: float, training: bool
) -> tuple[np.ndarray, ...]:
    """Compute the gradients with NumPy: in float64 if x is float64, otherwise in float32."""
    wide, others, kept = _sizes(x)
    m, v = (each.astype(wide).reshape(kept) for each in (mean, variance))
    g = np.ones_like(m) if gamma is None else gamma.astype(wide).reshape(kept)
    d, count = dy.astype(wide), wide(max(x.size // max(x.shape[1], 1), 1))
    with np.errstate(all="ignore"):
        s = 1 / np.sqrt(v + wide(epsilon))
        normalized = (x.astype(wide) - m) * s
        dbeta = d.sum(others, keepdims=True)
        dgamma = (d * normalized).sum(others, keepdims=True)
        centred = d - dbeta / count - normalized * dgamma / count if training else d
        dx = g * s * centred
        return (
            dx.astype(x.dtype),
            dgamma.reshape(-1).astype(mean.dtype),
            dbeta.reshape(-1).astype(mean.dtype),
        )


def _textbook_forward(x: Any, gamma: Any, beta: Any, *, epsilon: float) -> tuple[np.ndarray, ...]:
    """Return y, mean and variance, computed by NumPy in float32 (in float64 if x is float64)."""
    wide, others, kept = _sizes(x)
    v = x.astype(wide)
    mean = v.mean(others, keepdims=True)
    variance = v.var(others, keepdims=True)
    y = (v - mean) / np.sqrt(variance + wide(epsilon))
    if gamma is not None and beta is not None:
        y = y * gamma.astype(wide).reshape(kept) + beta.astype(wide).reshape(kept)
    statistics = wide if gamma is None else gamma.dtype
    return y.astype(x.dtype), *(each.reshape(-1).astype(statistics) for each in (mean, variance))


def _sizes(x: np.ndarray) -> tuple[Any, tuple[int, ...], tuple[int, ...]]:
    """Return the type of the arithmetic, the reduced axes, and the shape of statistics."""
    wide = np.float64 if element_type(x.dtype) == FLOAT64 else np.float32
    return wide, (0, *range(2, x.ndim)), (1, -1, *(1 for _ in x.shape[2:]))


def aten(
    schema: OperatorSchema, inputs: _Inputs, attributes: _Attributes, *, compiled: bool = False
) -> Any:
    """Call an operator of ATen (PyTorch) on the CPU."""
    import torch

    x: Any = inputs["input"]
    tensors: dict[str, Any] = {
        name: None if a is None else to_tensor(a) for name, a in inputs.items()
    }
    if tensors["weight"] is None and is_16_bit(x.dtype):
        # If the weight is None, PyTorch expects statistics in x's 16-bit type, but these statistics
        # may be float32. So a weight of ones is passed instead.
        tensors["weight"] = torch.ones(x.shape[1], dtype=tensors["save_mean"].dtype)

    def operator(**operands: Any) -> Any:
        function = getattr(torch.ops.aten, schema.op)
        return function(**operands, **attributes, output_mask=[True] * len(schema.outputs))

    if compiled:
        # PyTorch compiles the function again for each shape and type. If the number of compilations
        # exceeds a limit, PyTorch raises an error, so the limits are set high.
        torch._dynamo.config.recompile_limit = 1 << 16
        torch._dynamo.config.accumulated_recompile_limit = 1 << 16
        operator = torch.compile(operator, fullgraph=True, dynamic=False)
    return operator(**tensors)


def _native_batch_norm(x: Any, gamma: Any, beta: Any, *, epsilon: float) -> Any:
    """Return y and the mean of PyTorch's native_batch_norm on the CPU.

    PyTorch returns the inverse standard deviation instead of the variance, so only y and the mean
    are judged.
    """
    import torch

    weight, bias = (None if a is None else to_tensor(a) for a in (gamma, beta))
    if weight is None and is_16_bit(x.dtype):
        # If the weight is None, PyTorch returns the mean in x's 16-bit type. With these float32
        # parameters it returns the mean in float32.
        weight, bias = torch.ones(x.shape[1]), torch.zeros(x.shape[1])
    function = torch.ops.aten.native_batch_norm
    return function(to_tensor(x), weight, bias, None, None, True, 0.0, epsilon)[:2]


def raw_op(
    schema: OperatorSchema, inputs: _Inputs, attributes: _Attributes, *, compiled: bool = False
) -> Any:
    """Call an operator of tf.raw_ops on the CPU: TensorFlow's kernel or, if `compiled`, XLA's."""
    import tensorflow

    def operator(**operands: Any) -> Any:
        return getattr(tensorflow.raw_ops, schema.op)(**operands, **attributes)

    if compiled:
        operator = tensorflow.function(operator, jit_compile=True)
    try:
        return operator(**{name: tensorflow.constant(array) for name, array in inputs.items()})
    except tensorflow.errors.InvalidArgumentError as error:
        # This error can mean that the kernel has no implementation for the layout.
        if "only support" not in error.message:
            raise
        raise RefusedError(error.message.partition("}} ")[2].partition(" [Op:")[0]) from None


def microsoft(schema: OperatorSchema, inputs: _Inputs, attributes: _Attributes) -> Any:
    """Call an operator of the domain com.microsoft in ONNX Runtime, on the CPU."""
    import onnx
    import onnxruntime

    make = onnx.helper
    outputs = [tensor.name for tensor in schema.outputs]
    node = make.make_node(schema.op, list(inputs), outputs, domain="com.microsoft", **attributes)
    operands = [
        make.make_tensor_value_info(name, make.np_dtype_to_tensor_dtype(array.dtype), None)
        for name, array in inputs.items()
        if array is not None
    ]
    results = [make.make_empty_tensor_value_info(name) for name in outputs]
    domains = [make.make_opsetid("", 14), make.make_opsetid("com.microsoft", 1)]
    model = make.make_model(
        make.make_graph([node], schema.op, operands, results), opset_imports=domains, ir_version=8
    )
    try:
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), providers=["CPUExecutionProvider"]
        )
    except Exception as error:
        # If ONNX Runtime does not support an element type, its error says that the graph is
        # invalid.
        if type(error).__name__ not in ("InvalidArgument", "InvalidGraph"):
            raise
        raise RefusedError(str(error)) from None
    return session.run(None, inputs)


def onednn_graph(schema: OperatorSchema, inputs: _Inputs, attributes: _Attributes) -> Any:
    """Call an operator of oneDNN Graph on the CPU."""
    x: Any = inputs["src"]
    mean: Any = inputs["mean"]
    if x.dtype == np.float16 or (attributes["data_format"] == "NXC" and x.ndim < 4):
        # A C++ exception (dnnl::error, std::bad_alloc) escapes from dnnl_graph_partition_compile.
        raise RefusedError("version 3.2.0 ends the process for float16, and in NXC of rank 2 and 3")
    # Without gamma and beta, version 3.2.0 ends the process, too.
    usual = {"gamma": np.ones_like(mean), "beta": np.zeros_like(mean)}
    operands = [usual[name] if array is None else array for name, array in inputs.items()]
    results = [np.empty_like(x if t.kind == "data" else mean) for t in schema.outputs]
    known = {name: value for name, value in attributes.items() if value is not None}
    try:
        onednn.run_operator(onednn.Library(1), schema.op, known, operands, results)
    except onednn.StatusError as error:
        raise RefusedError(f"{error} for {x.dtype}") from None
    return results


def _onednn_backward(
    x: Any, dy: Any, mean: Any, variance: Any, gamma: Any, *,
    epsilon: float, training: bool = True, kind: str = "batch",
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """Return the gradients of oneDNN's primitive for batch or layer normalisation."""
    if mean.dtype != FLOAT32:
        raise RefusedError(f"oneDNN's statistics are float32, not {mean.dtype}")
    scale = np.ones(x.shape[-1 if kind == "layer" else 1], FLOAT32) if gamma is None else gamma
    results = np.empty_like(x), np.empty_like(scale), np.empty_like(scale)
    if not x.strides == dy.strides == results[0].strides:
        raise RefusedError("oneDNN's primitive has the same strides for x and dy, without gaps")
    arrays = {"src": x, "diff_dst": dy, "mean": mean, "variance": variance}
    arrays["scale"] = scale
    if kind == "layer":
        # Version 3.2.0 requires beta for the gradients of a layer normalisation, too.
        arrays["shift"] = np.zeros_like(scale)
    arrays |= zip(("diff_src", "diff_scale", "diff_shift"), results, strict=True)
    try:
        library = onednn.Library(os.cpu_count() or 1)
        onednn.Primitive(library, arrays, epsilon, training=training, kind=kind)()
    except onednn.StatusError as error:
        raise RefusedError(f"{error} for {x.dtype}") from None
    return results


def _flax_backward(
    x: Any, dy: Any, mean: Any, variance: Any, gamma: Any, **options: Any
) -> tuple[Any, ...]:
    """Return the gradients that JAX derives from flax's formula, compiled by `jax.jit`."""
    channel = 1 if options["data_format"] == "NCX" else x.ndim - 1
    others = tuple(axis for axis in range(x.ndim) if axis != channel)
    backward = _derived_by_jax(others, others, options["epsilon"], options["training"])
    return _called_by_jax(backward, x, dy, mean, variance, gamma)


def _flax_of_rows(normalization: Normalization) -> Callable[..., Any]:
    """Return a function like :func:`_flax_backward` of another normalisation."""

    def backward(
        x: Any, dy: Any, *statistics: Any, epsilon: float, data_format: str = "NXC", groups: int = 1
    ) -> tuple[Any, ...]:
        *known, gamma = statistics
        mean, variance = known if normalization.is_centred else (0.0 * known[0], known[0])
        axis = 1 if data_format == "NCX" else x.ndim - 1
        first = [np.moveaxis(each, axis, 1) for each in (x, dy)]
        images, channels, *space = first[0].shape
        view = images, groups, channels // groups, math.prod(space)
        others = tuple(k for k in range(4) if k not in normalization.kept)
        sizes = [size for k, size in enumerate(view) if k not in others]
        parameter = None if gamma is None else gamma.reshape(view[1:3])
        derived = _derived_by_jax(others, (0, 3), epsilon, True, normalization.is_centred)
        dx, *parameters = _called_by_jax(
            derived, first[0].reshape(view), first[1].reshape(view), mean.reshape(sizes),
            variance.reshape(sizes), parameter, view[1:3],
        )  # fmt: skip
        dx = np.moveaxis(np.asarray(dx).reshape(first[0].shape), 1, axis)
        found = dx, *(np.asarray(each).reshape(-1) for each in parameters)
        return found if normalization.is_centred else found[:2]

    return backward


def _called_by_jax(
    backward: Any, x: Any, dy: Any, mean: Any, variance: Any, gamma: Any, shape: Any = None
) -> tuple[Any, ...]:
    import jax as framework

    scale = np.ones(mean.shape if shape is None else shape, mean.dtype) if gamma is None else gamma
    with framework.enable_x64(x.dtype == np.float64):
        gradients: tuple[Any, ...] = backward(dy, x, scale, np.zeros_like(scale), mean, variance)
    return gradients


@cache
def _derived_by_jax(
    others: tuple[int, ...],
    of_parameters: tuple[int, ...],
    epsilon: float,
    training: bool,
    is_centred: bool = True,
) -> Any:
    """Return the compiled gradient of a normalisation with flax's formula.

    The statistics are those along the axes `others`; the parameters lack the axes `of_parameters`.
    In training, JAX differentiates flax's formula for the statistics, which uses the means of x and
    of x**2. But the values of the statistics are not computed by this formula: the caller supplies
    them.
    """
    import jax as framework
    from jax import numpy as jnp

    valued = framework.custom_jvp(lambda own, supplied: supplied)
    valued.defjvp(lambda operands, tangents: (operands[1], tangents[0]))

    def forward(x: Any, gamma: Any, beta: Any, mean: Any, variance: Any) -> Any:
        if training:
            wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
            own_mean = wide.mean(others) if is_centred else 0.0 * mean.astype(wide.dtype)
            mean = valued(own_mean, mean.astype(wide.dtype))
            own = (wide * wide).mean(others) - mean * mean
            variance = valued(own, variance.astype(wide.dtype))
        mean, variance = (jnp.expand_dims(each, others) for each in (mean, variance))
        gamma, beta = (jnp.expand_dims(each, of_parameters) for each in (gamma, beta))
        y = (x - mean) * (framework.lax.rsqrt(variance + epsilon) * gamma) + beta
        return y.astype(x.dtype)

    def backward(dy: Any, x: Any, gamma: Any, beta: Any, *statistics: Any) -> Any:
        operands = x, gamma, beta
        return framework.vjp(lambda *each: forward(*each, *statistics), *operands)[1](dy)

    return framework.jit(backward)


def _both(*fields: Any) -> dict[OperationName, Pass]:
    """Return the passes of a package whose function calls the operators of both."""
    return {"backward": Pass(*fields), "forward": Pass(*fields)}


#: The passes of each package, by the name that ``backnorm verify`` has for it, and by operation.
PEERS: Mapping[str, Mapping[OperationName, Pass]] = MappingProxyType(
    {
        "numpy": {
            "backward": Pass(_textbook_backward, is_strided=True),
            "forward": Pass(_textbook_forward, is_strided=True),
        },
        "torch": {
            "backward": Pass(aten, "aten", is_strided=True),
            "forward": Pass(_native_batch_norm, is_strided=True, omitted=("variance",)),
            "layer-norm": Pass(row_peers.aten_of_rows("native_layer_norm_backward"), "aten"),
            "group-norm": Pass(row_peers.aten_of_rows("native_group_norm_backward"), "aten"),
            "instance-norm": Pass(row_peers.aten_of_instances),
            "layer-norm-forward": Pass(row_peers.aten_of_rows("native_layer_norm"), "aten"),
            "rms-norm-forward": Pass(row_peers.aten_of_rows("_fused_rms_norm"), "aten"),
            "group-norm-forward": Pass(row_peers.aten_of_rows("native_group_norm"), "aten"),
        },
        "torch-compiled": {"backward": Pass(partial(aten, compiled=True), "aten", is_strided=True)},
        "jax": {
            "backward": Pass(_flax_backward),
            **{
                cast("OperationName", name): Pass(_flax_of_rows(kind))
                for name, kind in NORMALIZATIONS.items()
                if kind != BATCH_NORM
            },
        },
        "tensorflow": _both(raw_op, "tensorflow"),
        "tensorflow-xla": _both(partial(raw_op, compiled=True), "tensorflow"),
        "onednn": {
            "backward": Pass(_onednn_backward, is_strided=True),
            "layer-norm": Pass(partial(_onednn_backward, kind="layer")),
            "layer-norm-forward": Pass(row_peers.onednn_forward),
        },
        "onednn-graph": {
            **_both(onednn_graph, "onednn_graph"),
            "layer-norm": Pass(row_peers.onednn_graph_backward, "onednn_graph"),
        },
        "onnxruntime": _both(microsoft, "onnxruntime"),
        "backnorm": {
            "backward": Pass(backnorm.batch_norm_backward),
            "forward": Pass(backnorm.batch_norm_forward),
        },
    }
)


def missing_package(name: str) -> str | None:
    """Return the missing package that a peer needs, or None."""
    family = name.partition("-")[0]
    if family == "onednn":
        return None if onednn.find() else onednn.DISTRIBUTION
    # The packages onnxruntime and onnxruntime-training both provide a module named onnxruntime.
    # Only the module of onnxruntime-training computes gradients.
    is_training = family == "onnxruntime"
    module, package = (f"{family}.training", f"{family}-training") if is_training else (family,) * 2
    try:
        return None if importlib.util.find_spec(module) else package
    except ModuleNotFoundError:
        return package
