"""The network in TensorFlow: Keras layers, a step as one graph (not XLA's), channels last."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from backnorm.training.frameworks import LOSS_SCALE, DType, Layer
from backnorm.training.network import (
    BLOCKS,
    CLASSES,
    EPSILON,
    MOMENTUM,
    SIDE,
    STEM,
    Convolution,
    Site,
    convolutions,
)
from benchmarks.peers.tensorflow import TensorFlow as Peer

# Keras reads it when it is imported.
os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

keras = tf.keras

__all__ = ["TensorFlow"]

# Passes of a layer in one call when it is timed alone: the call itself then hardly counts.
_LOOP = 10


class TensorFlow:
    """TensorFlow on the CPU, through Keras 3."""

    def __init__(self) -> None:
        self._built: dict[tuple[Layer, DType], _Trainer] = {}

    def start(self, threads: int) -> dict[str, str]:
        """Set TensorFlow's threads, as for the benchmark."""
        return Peer().start(threads) | {"keras": keras.__version__}

    def build(self, layer: Layer, weights: Mapping[str, np.ndarray], dtype: DType) -> _Trainer:
        """Return the Keras model of this layer and type, as new; traced at its first call."""
        if (layer, dtype) not in self._built:
            net, layers = _network(layer, dtype)
            self._built[layer, dtype] = _Trainer(net, _variables(layers), dtype)
        trainer = self._built[layer, dtype]
        trainer.begin(weights)
        return trainer

    def normalise(
        self, layer: Layer, sites: Sequence[Site], dtype: DType
    ) -> Callable[[], list[float]]:
        """Return the layers alone, each in a loop of a graph."""
        rng = np.random.default_rng(0)
        calls = []
        for site in sites:
            n, c, h, w = site.shape
            x, dy = (tf.constant(rng.normal(size=(n, h, w, c)), dtype) for _ in range(2))
            norm = _norm(layer, dtype)
            norm.build(x.shape)
            calls.append((_loop(norm), x, dy))
        return lambda: [_seconds(*call) / _LOOP for call in calls]


def _loop(norm: Any) -> Callable[[Any, Any], Any]:
    """Return a graph of some forward and backward passes of a layer."""
    trained = [norm.gamma.value, norm.beta.value]

    def passes(i: Any, x: Any, dy: Any, *_: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = norm(x, training=True)
        dx, dgamma, dbeta = tape.gradient(y, [x, *trained], dy)
        # Each iteration needs all results of the last; both stay within their magnitude.
        return i + 1, y, dx, dgamma, dbeta

    def loop(x: Any, dy: Any) -> Any:
        return tf.while_loop(
            lambda i, *_: i < _LOOP, passes, (0, x, dy, *trained), parallel_iterations=1
        )

    compiled: Callable[[Any, Any], Any] = tf.function(loop, jit_compile=False)
    return compiled


def _seconds(call: Callable[[Any, Any], Any], x: Any, dy: Any) -> float:
    begin = time.perf_counter()
    # The last result is there when all are.
    call(x, dy)[-1].numpy()
    return time.perf_counter() - begin


class _Trainer:
    def __init__(self, net: Any, variables: Mapping[str, Any], dtype: DType) -> None:
        scale = LOSS_SCALE.get(dtype, 1.0)
        trained = list(variables.values())
        optimiser = keras.optimizers.SGD(0.0, momentum=MOMENTUM)
        optimiser.build(trained)

        def gradient(images: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                logits = tf.cast(net(images, training=True), trained[0].dtype)
                loss = tf.reduce_mean(
                    tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
                )
                scaled = loss * scale
            slopes = tape.gradient(scaled, [variable.value for variable in trained])
            return loss, logits, [slope / scale for slope in slopes]

        def step(images: Any, labels: Any, rate: Any) -> Any:
            loss, logits, slopes = gradient(images, labels)
            optimiser.learning_rate.assign(rate)
            optimiser.apply(slopes, trained)
            return loss, _right(logits, labels)

        def evaluate(images: Any, labels: Any) -> Any:
            return _right(net(images, training=False), labels)

        self._variables, self._optimiser = variables, optimiser
        # Running statistics, by the name of each: mean 0, variance 1.
        self._running = net.non_trainable_variables
        self._type = trained[0].dtype
        self._step, self._gradient, self._evaluate = (
            tf.function(function, jit_compile=False) for function in (step, gradient, evaluate)
        )

    def begin(self, weights: Mapping[str, np.ndarray]) -> None:
        """Forget what was learnt."""
        for name, weight in weights.items():
            self._variables[name].assign(weight)
        for variable in self._running:
            variable.assign(np.full(variable.shape, float(variable.name == "moving_variance")))
        for variable in self._optimiser.momentums:
            variable.assign(np.zeros(variable.shape))

    def step(self, images: np.ndarray, labels: np.ndarray, rate: float) -> tuple[float, int]:
        rated = tf.constant(rate, tf.float32)
        loss, right = self._step(self._images(images), tf.constant(labels), rated)
        return float(loss), int(right)

    def gradients(
        self, images: np.ndarray, labels: np.ndarray
    ) -> tuple[float, dict[str, np.ndarray]]:
        loss, _, slopes = self._gradient(self._images(images), tf.constant(labels))
        return float(loss), {
            name: slope.numpy().astype(np.float64)
            for name, slope in zip(self._variables, slopes, strict=True)
        }

    def evaluate(self, images: np.ndarray, labels: np.ndarray) -> int:
        return int(self._evaluate(self._images(images), tf.constant(labels)))

    def _images(self, images: np.ndarray) -> Any:
        return tf.constant(images[..., None], self._type)


def _network(layer: Layer, dtype: DType) -> tuple[Any, dict[str, Any]]:
    """Return the model, and its layers with parameters by name."""
    layers: dict[str, Any] = {}
    options = {"dtype": _policy(dtype)}

    def unit(c: Convolution, x: Any) -> Any:
        if c.size > 1:
            x = keras.layers.ZeroPadding2D(c.size // 2, **options)(x)
        convolution = keras.layers.Conv2D(c.outputs, c.size, c.stride, use_bias=False, **options)
        layers[c.name] = convolution, _norm(layer, dtype)
        return layers[c.name][1](convolution(x))

    def relu(x: Any) -> Any:
        return keras.layers.ReLU(**options)(x)

    images = keras.Input((SIDE, SIDE, 1), dtype="float64" if dtype == "float64" else "float32")
    x = relu(unit(STEM, images))
    for block in BLOCKS:
        y = unit(block.second, relu(unit(block.first, x)))
        x = unit(block.shortcut, x) if block.shortcut else x
        x = relu(keras.layers.Add(**options)([y, x]))
    x = keras.layers.GlobalAveragePooling2D(**options)(x)
    layers["head"] = keras.layers.Dense(CLASSES, **options)
    return keras.Model(images, layers["head"](x)), layers


def _variables(layers: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for c in convolutions():
        convolution, norm = layers[c.name]
        found[f"{c.name}.weight"] = convolution.kernel
        found[f"{c.name}.gamma"], found[f"{c.name}.beta"] = norm.gamma, norm.beta
    head = layers["head"]
    return found | {"head.weight": head.kernel, "head.bias": head.bias}


def _norm(layer: Layer, dtype: DType) -> Any:
    options = {"momentum": MOMENTUM, "epsilon": EPSILON, "dtype": _policy(dtype)}
    if layer == "own":
        return keras.layers.BatchNormalization(**options)
    from backnorm.tensorflow import BatchNormalization

    return BatchNormalization(**options)


def _policy(dtype: DType) -> str:
    return f"mixed_{dtype}" if dtype in ("bfloat16", "float16") else dtype


def _right(logits: Any, labels: Any) -> Any:
    return tf.reduce_sum(tf.cast(tf.argmax(logits, 1) == labels, tf.int64))
