"""The network in JAX: plain functions, a step compiled as one, channels last.

JAX has no layers of its own. Its normalisation is the formula as JAX's libraries write it: mean and
mean square in float32, differentiated by JAX and fused by XLA with what is around it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from backnorm.training.frameworks import LOSS_SCALE, DType, Layer
from backnorm.training.network import (
    BLOCKS,
    EPSILON,
    MOMENTUM,
    STEM,
    Convolution,
    Site,
    convolutions,
)
from benchmarks.peers.jax import Jax as Peer

__all__ = ["Jax"]

# Passes of a layer in one call when it is timed alone: the call itself then hardly counts.
_LOOP = 10

_Tree = dict[str, Any]


class _Norm(NamedTuple):
    """A normalisation: of (x, gamma, beta) to y, mean, variance; of (x, mean, ..., beta) to y."""

    learn: Callable[[Any, Any, Any], tuple[Any, Any, Any]]
    infer: Callable[[Any, Any, Any, Any, Any], Any]


class Jax:
    """JAX on the CPU."""

    def __init__(self) -> None:
        self._compiled: dict[tuple[Layer, DType], _Functions] = {}

    def start(self, threads: int) -> dict[str, str]:
        """Set the threads of XLA's pool, as for the benchmark."""
        return Peer().start(threads)

    def build(self, layer: Layer, weights: Mapping[str, np.ndarray], dtype: DType) -> _Trainer:
        """Return a network; its functions are compiled when one like it is first called."""
        if (layer, dtype) not in self._compiled:
            self._compiled[layer, dtype] = _Functions(_normalisation(layer), dtype)
        return _Trainer(self._compiled[layer, dtype], weights, _wide(dtype))

    def normalise(
        self, layer: Layer, sites: Sequence[Site], dtype: DType
    ) -> Callable[[], list[float]]:
        """Return the layers alone, each in a compiled loop."""
        norm, wide = _normalisation(layer).learn, _wide(dtype)

        def passes(_: Any, carried: Any) -> Any:
            x, dy, gamma, beta, _, _ = carried
            y, pull = jax.vjp(lambda *a: norm(*a)[0], x, gamma, beta)
            # Forward and backward pass are apart in a step, and not to be fused here.
            y, pull, dy = lax.optimization_barrier((y, pull, dy))
            dx, dgamma, dbeta = pull(dy)
            # Each iteration needs all results of the last; both stay within their magnitude.
            return y, dx, gamma, beta, dgamma, dbeta

        loop = jax.jit(lambda carried: lax.fori_loop(0, _LOOP, passes, carried))
        rng = np.random.default_rng(0)
        arguments = []
        for site in sites:
            n, c, h, w = site.shape
            x, dy = (jnp.asarray(rng.normal(size=(n, h, w, c)), dtype) for _ in range(2))
            one, zero = jnp.ones(c, wide), jnp.zeros(c, wide)
            arguments.append((x, dy, one, zero, zero, zero))
        return lambda: [_seconds(loop, carried) / _LOOP for carried in arguments]


def _seconds(call: Callable[[Any], Any], argument: Any) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(call(argument))
    return time.perf_counter() - begin


class _Functions:
    """What all networks of one layer and type share.

    Attributes
    ----------
    step : callable
        State, images, labels, rate -> state, loss, images that were right; the state is
        parameters, momenta, and (mean, variance) by convolution.
    gradient : callable
        Parameters, images, labels -> loss, what is of no interest, gradients.
    evaluate : callable
        Parameters, running statistics, images, labels -> images that are right.
    """

    def __init__(self, norm: _Norm, dtype: DType) -> None:
        wide = _wide(dtype)
        scale = LOSS_SCALE.get(dtype, 1.0)

        def loss(weights: _Tree, images: Any, labels: Any) -> Any:
            found: _Tree = {}

            def normalise(c: Convolution, x: Any) -> Any:
                gamma, beta = weights[f"{c.name}.gamma"], weights[f"{c.name}.beta"]
                y, *found[c.name] = norm.learn(x, gamma, beta)
                return y

            logits = _logits(weights, images.astype(dtype), normalise).astype(wide)
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
            return -chosen.mean() * scale, (logits, found)

        def gradient(weights: _Tree, images: Any, labels: Any) -> Any:
            (value, extra), slopes = jax.value_and_grad(loss, has_aux=True)(weights, images, labels)
            return value / scale, extra, jax.tree.map(lambda slope: slope / scale, slopes)

        def step(state: Any, images: Any, labels: Any, rate: Any) -> Any:
            weights, momentum, running = state
            value, (logits, found), slopes = gradient(weights, images, labels)
            momentum = jax.tree.map(lambda v, slope: MOMENTUM * v + slope, momentum, slopes)
            weights = jax.tree.map(lambda w, v: w - rate.astype(wide) * v, weights, momentum)
            running = {
                name: tuple(
                    MOMENTUM * old + (1 - MOMENTUM) * lax.stop_gradient(new)
                    for old, new in zip(running[name], found[name], strict=True)
                )
                for name in running
            }
            return (weights, momentum, running), value, _right(logits, labels)

        def evaluate(weights: _Tree, running: _Tree, images: Any, labels: Any) -> Any:
            def normalise(c: Convolution, x: Any) -> Any:
                mean, variance = running[c.name]
                gamma, beta = weights[f"{c.name}.gamma"], weights[f"{c.name}.beta"]
                return norm.infer(x, mean, variance, gamma, beta)

            return _right(_logits(weights, images.astype(dtype), normalise), labels)

        # What a step replaces it may write over.
        self.step = jax.jit(step, donate_argnums=0)
        self.gradient = jax.jit(gradient)
        self.evaluate = jax.jit(evaluate)


class _Trainer:
    def __init__(self, functions: _Functions, weights: Mapping[str, np.ndarray], wide: Any) -> None:
        self._functions = functions
        self._weights: _Tree = {name: jnp.asarray(w, wide) for name, w in weights.items()}
        self._momentum = jax.tree.map(jnp.zeros_like, self._weights)
        self._running: _Tree = {
            c.name: (jnp.zeros(c.outputs, wide), jnp.ones(c.outputs, wide)) for c in convolutions()
        }

    def step(self, images: np.ndarray, labels: np.ndarray, rate: float) -> tuple[float, int]:
        state = (self._weights, self._momentum, self._running)
        state, loss, right = self._functions.step(state, images, labels, np.float64(rate))
        self._weights, self._momentum, self._running = jax.block_until_ready(state)
        return float(loss), int(right)

    def gradients(
        self, images: np.ndarray, labels: np.ndarray
    ) -> tuple[float, dict[str, np.ndarray]]:
        loss, _, slopes = self._functions.gradient(self._weights, images, labels)
        return float(loss), {name: np.asarray(s, np.float64) for name, s in slopes.items()}

    def evaluate(self, images: np.ndarray, labels: np.ndarray) -> int:
        return int(self._functions.evaluate(self._weights, self._running, images, labels))


def _logits(weights: _Tree, images: Any, normalise: Callable[[Convolution, Any], Any]) -> Any:
    def unit(c: Convolution, x: Any) -> Any:
        pad, kernel = (c.size // 2, c.size // 2), weights[f"{c.name}.weight"].astype(x.dtype)
        x = lax.conv_general_dilated(
            x, kernel, (c.stride,) * 2, (pad, pad), dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return normalise(c, x)

    x = jax.nn.relu(unit(STEM, images[..., None]))
    for block in BLOCKS:
        y = unit(block.second, jax.nn.relu(unit(block.first, x)))
        x = jax.nn.relu(y + (unit(block.shortcut, x) if block.shortcut else x))
    head, bias = weights["head.weight"].astype(x.dtype), weights["head.bias"].astype(x.dtype)
    return x.mean((1, 2)) @ head + bias


def _normalisation(layer: Layer) -> _Norm:
    if layer == "own":
        return _Norm(_own, _scaled)
    from backnorm.jax import batch_norm, batch_norm_inference

    return _Norm(
        partial(batch_norm, epsilon=EPSILON, axis=-1),
        partial(batch_norm_inference, epsilon=EPSILON, axis=-1),
    )


def _own(x: Any, gamma: Any, beta: Any) -> tuple[Any, Any, Any]:
    wide = x.astype(gamma.dtype)
    mean, square = wide.mean((0, 1, 2)), jnp.square(wide).mean((0, 1, 2))
    variance = jnp.maximum(square - jnp.square(mean), 0)
    return _scaled(x, mean, variance, gamma, beta), mean, variance


def _scaled(x: Any, mean: Any, variance: Any, gamma: Any, beta: Any) -> Any:
    y = (x.astype(gamma.dtype) - mean) * (gamma * lax.rsqrt(variance + EPSILON)) + beta
    return y.astype(x.dtype)


def _right(logits: Any, labels: Any) -> Any:
    return (logits.argmax(1) == labels).sum()


def _wide(dtype: DType) -> Any:
    return jnp.float64 if dtype == "float64" else jnp.float32
