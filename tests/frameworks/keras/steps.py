"""A step of training of a layer, by the means of each backend of Keras."""

from __future__ import annotations

import keras


def step_of_tensorflow(layer, x, dy, options):
    import tensorflow as tf

    x = tf.constant(x)
    sources = [x, *(v.value for v in layer.trainable_variables)]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        y = layer(x, **options)
    return [y, *tape.gradient(y, sources, output_gradients=tf.cast(dy, y.dtype))]


def step_of_torch(layer, x, dy, options):
    import torch

    x = keras.ops.convert_to_tensor(x).requires_grad_()
    sources = [x, *(v.value for v in layer.trainable_variables)]
    y = layer(x, **options)
    dy = keras.ops.cast(keras.ops.convert_to_tensor(dy), keras.backend.standardize_dtype(y.dtype))
    gradients = torch.autograd.grad(y, sources, dy)
    return [t.detach() for t in (y, *gradients)]


def step_of_jax(layer, x, dy, options):
    import jax

    def function(x, trainable):
        # As Keras does for a layer that is called in the usual way.
        x = keras.ops.cast(x, layer.compute_dtype)
        y, moved = layer.stateless_call(
            trainable, [v.value for v in layer.non_trainable_variables], x, **options
        )
        return y, moved

    @jax.jit
    def of_all(x, trainable, dy):
        y, pull, moved = jax.vjp(function, x, trainable, has_aux=True)
        return y, moved, pull(dy.astype(y.dtype))

    trainable = [v.value for v in layer.trainable_variables]
    y, moved, (of_x, of_trainable) = of_all(x, trainable, dy)
    for variable, value in zip(layer.non_trainable_variables, moved, strict=True):
        variable.assign(value)
    return [y, of_x, *of_trainable]


STEPS = {"tensorflow": step_of_tensorflow, "torch": step_of_torch, "jax": step_of_jax}
