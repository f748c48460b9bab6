"""Types, shapes and empty batches beside Keras's layer, over a product of inputs and policies."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest

from backnorm.keras import BatchNormalization as Ours
from tests.support.dtypes import BFLOAT16

pytestmark = pytest.mark.long

Theirs = keras.layers.BatchNormalization
KINDS = ("float32", "float16", BFLOAT16, "float64", "int32", "uint8", "bool")
POLICIES = ("float32", "mixed_float16", "mixed_bfloat16", "float16", "bfloat16", "float64")
SHAPES = ((6, 4), (0, 3, 4), (2, 0, 4))
OPTIONS = ({}, {"scale": False, "center": False})


def described(tensors):
    """Return type, shape and values of tensors; None is no gradient."""
    found = []
    for tensor in tensors:
        dtype = None if tensor is None else keras.backend.standardize_dtype(tensor.dtype)
        values = None if tensor is None else keras.ops.cast(tensor, "float64")
        found.append((dtype, None if tensor is None else keras.ops.convert_to_numpy(values)))
    return found


def of_tensorflow(layer, x, training):
    import tensorflow as tf

    x = tf.constant(x)
    sources = [*([x] if x.dtype.is_floating else []), *(v.value for v in layer.trainable_variables)]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        y = layer(x, training=training)
    return [y, *tape.gradient(y, sources, output_gradients=tf.sin(y))]


def of_torch(layer, x, training):
    import torch

    x = keras.ops.convert_to_tensor(x)
    sources = [
        *([x] if x.is_floating_point() else []),
        *(v.value for v in layer.trainable_variables),
    ]
    y = layer(x.requires_grad_(x.is_floating_point()), training=training)
    if not y.requires_grad:
        return [y]
    dy = torch.sin(y.detach())
    return [y.detach(), *torch.autograd.grad(y, sources, dy, allow_unused=True)]


def of_jax(layer, x, training):
    import jax

    constant = [v.value for v in layer.non_trainable_variables]
    x = keras.ops.convert_to_tensor(x)

    def function(x, trainable):
        return layer.stateless_call(trainable, constant, x, training=training)

    y, pull, moved = jax.vjp(
        function, x, [v.value for v in layer.trainable_variables], has_aux=True
    )
    for variable, value in zip(layer.non_trainable_variables, moved, strict=True):
        variable.assign(value)
    of_x, of_trainable = pull(jax.numpy.sin(y))
    return [
        y,
        *([of_x] if jax.numpy.issubdtype(x.dtype, jax.numpy.floating) else []),
        *of_trainable,
    ]


STEPS = {"tensorflow": of_tensorflow, "torch": of_torch, "jax": of_jax}


# JAX says so of every float64 that it makes a float32, without its setting for the whole process.
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")
@pytest.mark.parametrize("policy", POLICIES)
def test_layer_types_and_values_match_keras(policy, backend, rng):
    wrong, count = [], 0
    for shape, kind, options, training in itertools.product(SHAPES, KINDS, OPTIONS, (True, False)):
        x = (rng.normal(0.5, 2, shape) * (3 if np.dtype(kind).kind in "iu" else 1)).astype(kind)
        found, values = [], None
        for cls in (Ours, Theirs):
            layer = cls(dtype=policy, **options)
            layer.build(shape)
            values = values or [rng.uniform(0.5, 2, v.shape) for v in layer.variables]
            for variable, value in zip(layer.variables, values, strict=True):
                variable.assign(value)
            results = STEPS[backend](layer, x, training)
            found.append(described([*results, *(v.value for v in layer.variables)]))
        count += 1
        # That of the narrowest type that a result was rounded to on the way.
        narrow = [np.dtype(kind).name, policy.removeprefix("mixed_")]
        digits = 2.0**-7 if "bfloat16" in narrow else 2.0**-10 if "float16" in narrow else 2.0**-18
        for i, ((own, y), (theirs, expected)) in enumerate(zip(*found, strict=True)):
            label = f"{shape} {kind} {options} {training} result {i}"
            if own != theirs or (y is None) != (expected is None):
                wrong.append(f"{label}: {own} instead of {theirs}")
            elif y is not None and not (
                y.shape == expected.shape
                and np.allclose(
                    y, expected, rtol=0, equal_nan=True,
                    atol=4 * digits * np.nanmax(np.abs(expected), initial=1.0),
                )
            ):  # fmt: skip
                wrong.append(f"{label}: {y} instead of {expected}")
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong[:20])
    assert count == 84
