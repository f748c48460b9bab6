"""Other packages' gradients, as functions with the arguments of `backnorm.batch_norm_backward`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import numpy as np

import backnorm
from backnorm.conformance.verify import _onednn as library
from backnorm.dtypes import BFLOAT16, element_type, is_16_bit

_Gradients = tuple[Any, Any, Any]


class RefusedError(Exception):
    """A subject does not support a case."""


def textbook(
    x: np.ndarray,
    dy: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None,
    *,
    epsilon: float,
    data_format: str,
    training: bool,
) -> _Gradients:
    """Compute the gradients with NumPy: in float64 if x is float64, otherwise in float32."""
    dtype = element_type(x.dtype)
    wide: Any = np.float64 if dtype == np.float64 else np.float32
    axis = 1 if data_format == "NCX" else x.ndim - 1
    others = tuple(k for k in range(x.ndim) if k != axis)
    kept = [size if k == axis else 1 for k, size in enumerate(x.shape)]
    m, v = (each.astype(wide).reshape(kept) for each in (mean, variance))
    g = np.ones_like(m) if gamma is None else gamma.astype(wide).reshape(kept)
    d, count = dy.astype(wide), wide(max(x.size // max(x.shape[axis], 1), 1))
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


def torch_tensor(array: np.ndarray) -> Any:
    """Return a copy of an array as PyTorch's tensor."""
    import torch as framework

    if element_type(array.dtype) == BFLOAT16:
        # PyTorch does not read NumPy's bfloat16.
        return framework.from_numpy(np.array(array).view(np.int16)).view(framework.bfloat16)
    return framework.from_numpy(np.array(array))


def torch(
    x: np.ndarray,
    dy: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None,
    *,
    epsilon: float,
    data_format: str,
    training: bool,
    compiled: bool = False,
) -> _Gradients:
    """Return the gradients of PyTorch's native_batch_norm_backward on the CPU.

    Arrays in NXC are passed without a copy, as views with permuted axes. If such a view has four
    axes, its memory format is the one that PyTorch calls channels_last.
    """
    import torch as framework

    inputs = [torch_tensor(each) for each in (dy, x)]
    if data_format == "NXC":
        inputs = [each.movedim(-1, 1) for each in inputs]
    statistics = [
        None,
        None,
        torch_tensor(mean),
        torch_tensor(_inverse_deviation(variance, epsilon)),
    ]
    if not training:
        statistics = [torch_tensor(mean), torch_tensor(variance), None, None]
    weight = None if gamma is None else torch_tensor(gamma)
    if weight is None and is_16_bit(x.dtype):
        # If the weight is None, PyTorch expects statistics in x's 16-bit type, but these statistics
        # are float32. So a weight of ones is passed instead.
        weight = torch_tensor(np.ones_like(mean))

    def backward(*operands: Any) -> Any:
        mask = [True, True, True]
        return framework.ops.aten.native_batch_norm_backward(*operands, training, epsilon, mask)

    if compiled:
        # PyTorch compiles the function again for each shape and type. If the number of compilations
        # exceeds a limit, PyTorch raises an error, so the limits are set high.
        framework._dynamo.config.recompile_limit = 1 << 16
        framework._dynamo.config.accumulated_recompile_limit = 1 << 16
        backward = framework.compile(backward, fullgraph=True, dynamic=False)
    dx, dgamma, dbeta = backward(*inputs, weight, *statistics)
    return (dx.movedim(1, -1) if data_format == "NXC" else dx), dgamma, dbeta


def jax(x: Any, dy: Any, mean: Any, variance: Any, gamma: Any, **options: Any) -> _Gradients:
    """Return the gradients that JAX derives from flax's formula, compiled by `jax.jit`."""
    import jax as framework

    channel = 1 if options["data_format"] == "NCX" else x.ndim - 1
    others = tuple(axis for axis in range(x.ndim) if axis != channel)
    backward = _derived_by_jax(others, options["epsilon"], options["training"])
    scale = np.ones_like(mean) if gamma is None else gamma
    with framework.enable_x64(x.dtype == np.float64):
        gradients: _Gradients = backward(dy, x, scale, np.zeros_like(mean), mean, variance)
    return gradients


@cache
def _derived_by_jax(others: tuple[int, ...], epsilon: float, training: bool) -> Any:
    """Return the compiled gradient of a batch normalisation with flax's formula.

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
            mean = valued(wide.mean(others), mean.astype(wide.dtype))
            own = (wide * wide).mean(others) - mean * mean
            variance = valued(own, variance.astype(wide.dtype))
        mean, variance, gamma, beta = (
            jnp.expand_dims(each, others) for each in (mean, variance, gamma, beta)
        )
        y = (x - mean) * (framework.lax.rsqrt(variance + epsilon) * gamma) + beta
        return y.astype(x.dtype)

    def backward(dy: Any, x: Any, gamma: Any, beta: Any, *statistics: Any) -> Any:
        operands = x, gamma, beta
        return framework.vjp(lambda *each: forward(*each, *statistics), *operands)[1](dy)

    return framework.jit(backward)


def onednn(x: Any, dy: Any, mean: Any, variance: Any, gamma: Any, **options: Any) -> _Gradients:
    """Return the gradients of oneDNN's primitive, on dense arrays in NCX or NXC."""
    if mean.dtype != np.float32:
        raise RefusedError(f"oneDNN's statistics are float32, not {mean.dtype}")
    path = library.find()
    assert path is not None
    results = np.empty_like(x), np.empty_like(mean), np.empty_like(mean)
    arrays = {"src": x, "diff_dst": dy, "mean": mean, "variance": variance}
    arrays["scale"] = np.ones_like(mean) if gamma is None else gamma
    arrays |= zip(("diff_src", "diff_scale", "diff_shift"), results, strict=True)
    axes = tuple(range(x.ndim))
    sizes, order = x.shape, axes
    if options["data_format"] == "NXC":
        sizes, order = (x.shape[0], x.shape[-1], *x.shape[1:-1]), (0, *axes[2:], 1)
    try:
        engine = library.Library(path, os.cpu_count() or 1)
        memory = engine.memory(sizes, x.dtype, order)
        descriptor = engine.backward(memory, options["epsilon"], training=options["training"])
        library.Primitive(engine, descriptor, memory, arrays)()
    except library.StatusError as error:
        raise RefusedError(f"{error} for {x.dtype}") from None
    return results


def onnxruntime(x: Any, dy: Any, mean: Any, variance: Any, gamma: Any, **options: Any) -> Any:
    """Return the gradients of ONNX Runtime's training operator BatchNormalizationGrad."""
    import onnx
    import onnxruntime as framework

    if options["data_format"] != "NCX" or not options["training"]:
        raise RefusedError("ONNX Runtime's operator takes NCX, and statistics of training")
    arrays = {
        "dY": dy,
        "X": x,
        "scale": np.ones_like(mean) if gamma is None else gamma,
        "saved_mean": mean,
        "saved_inv_std": _inverse_deviation(variance, options["epsilon"]),
    }
    make = onnx.helper
    node = make.make_node(
        "BatchNormalizationGrad", list(arrays), ["dX", "dscale", "dB"],
        domain="com.microsoft", epsilon=options["epsilon"],
    )  # fmt: skip
    inputs = [
        make.make_tensor_value_info(name, make.np_dtype_to_tensor_dtype(array.dtype), None)
        for name, array in arrays.items()
    ]
    outputs = [make.make_empty_tensor_value_info(name) for name in node.output]
    domains = [make.make_opsetid("", 14), make.make_opsetid("com.microsoft", 1)]
    model = make.make_model(
        make.make_graph([node], "gradient", inputs, outputs), opset_imports=domains, ir_version=8
    )
    try:
        session = framework.InferenceSession(
            model.SerializeToString(), providers=["CPUExecutionProvider"]
        )
    except Exception as error:
        # If ONNX Runtime does not support an element type, its error says that the graph is
        # invalid.
        if type(error).__name__ not in ("InvalidArgument", "InvalidGraph"):
            raise
        raise RefusedError(str(error)) from None
    return session.run(None, arrays)


def tensorflow(
    x: np.ndarray,
    dy: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None,
    *,
    epsilon: float,
    data_format: str,
    training: bool,
    compiled: bool = False,
) -> _Gradients:
    """Return the gradients of FusedBatchNormGradV3 on the CPU, by TensorFlow's kernel or, if
    `compiled`, by XLA.
    """
    import tensorflow as framework

    narrow_images = x.ndim == 4 and mean.dtype == np.float32
    if compiled and not narrow_images:
        raise RefusedError("TensorFlow's operator takes rank 4, of at most 32 bits")
    if not compiled and not (narrow_images and data_format == "NXC"):
        raise RefusedError("TensorFlow's kernel takes NHWC of rank 4, of at most 32 bits")

    def backward(dy: Any, x: Any, scale: Any, mean: Any, variance: Any) -> Any:
        return framework.raw_ops.FusedBatchNormGradV3(
            y_backprop=dy,
            x=x,
            scale=scale,
            reserve_space_1=mean,
            reserve_space_2=variance,
            reserve_space_3=np.zeros(0, np.float32),
            epsilon=epsilon,
            data_format={"NCX": "NCHW", "NXC": "NHWC"}[data_format],
            is_training=training,
        )[:3]

    scale = np.ones_like(mean) if gamma is None else gamma
    operands = map(framework.constant, (dy, x, scale, mean, variance))
    if compiled:
        backward = framework.function(backward, jit_compile=True)
    dx, dgamma, dbeta = backward(*operands)
    return dx.numpy(), dgamma.numpy(), dbeta.numpy()


def own(
    x: np.ndarray,
    dy: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None,
    *,
    epsilon: float,
    data_format: Any,
    training: bool,
) -> _Gradients:
    """Return backnorm's gradients, in the arithmetic that `backnorm.arithmetic` has set."""
    return backnorm.batch_norm_backward(
        x, dy, mean, variance, gamma, epsilon=epsilon, data_format=data_format, training=training
    )


def missing_package(name: str) -> str | None:
    """Return the missing package that a peer needs, or None."""
    if name == "onednn":
        return None if library.find() else library.DISTRIBUTION
    # The packages onnxruntime and onnxruntime-training both provide a module named onnxruntime.
    # Only the module of onnxruntime-training computes gradients.
    module, package = {
        "onnxruntime": ("onnxruntime.training", "onnxruntime-training"),
        "torch-compiled": ("torch", "torch"),
    }.get(name, (name, name))
    try:
        return None if importlib.util.find_spec(module) else package
    except ModuleNotFoundError:
        return package


def _inverse_deviation(variance: np.ndarray, epsilon: float) -> np.ndarray:
    wide = 1.0 / np.sqrt(variance.astype(np.float64) + epsilon)
    return wide.astype(variance.dtype)


#: Peers are known functions that ``backnorm verify`` can judge by name. This table maps the name of
#: each peer of the backward pass to its function.
PEERS: Mapping[str, Callable[..., _Gradients]] = MappingProxyType(
    {
        "numpy": textbook,
        "torch": torch,
        "torch-compiled": partial(torch, compiled=True),
        "jax": jax,
        "tensorflow": tensorflow,
        "onednn": onednn,
        "onnxruntime": onnxruntime,
        "backnorm": own,
    }
)
