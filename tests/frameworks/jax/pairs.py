"""Our functions beside the textbook's."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

import backnorm.jax

from .conftest import EPSILON, textbook

SHAPE, AXIS = (3, 2, 4), 1
HOW = {"epsilon": EPSILON, "axis": AXIS}
COLUMN = (1, -1, 1)


def textbook_inference(x, mean, variance, gamma, beta):
    s = 1 / jnp.sqrt(variance + EPSILON)
    scaled = (x - mean.reshape(COLUMN)) * (gamma * s).reshape(COLUMN)
    return scaled + beta.reshape(COLUMN)


def textbook_backward(x, dy, mean, variance, gamma, training):
    s, centred = 1 / jnp.sqrt(variance + EPSILON), x - mean.reshape(COLUMN)
    sum_dy, sum_dy_xmu = jnp.sum(dy, (0, 2)), jnp.sum(dy * centred, (0, 2))
    dx = dy
    if training:
        count = x.size // x.shape[AXIS]
        dx = dy - (sum_dy / count).reshape(COLUMN)
        dx = dx - centred * (s * s * sum_dy_xmu / count).reshape(COLUMN)
    return dx * (gamma * s).reshape(COLUMN), s * sum_dy_xmu, sum_dy


def with_relu(layer):
    def function(x, gamma, beta):
        y, mean, variance = layer(x, gamma, beta)
        return jax.nn.relu(y + jnp.tanh(x)), mean, variance

    return function


def pairs():
    """Our functions beside the textbook's, with the number of dimensions of their arguments."""
    ours, theirs = partial(backnorm.jax.batch_norm, **HOW), partial(textbook, axis=AXIS)
    found = {"training": (ours, theirs, (3, 1, 1))}
    found["residual and relu"] = (with_relu(ours), with_relu(theirs), (3, 1, 1))
    inference = partial(backnorm.jax.batch_norm_inference, **HOW)
    found["inference"] = (inference, textbook_inference, (3, 1, 1, 1, 1))
    for training in (True, False):
        found[f"backward, training={training}"] = (
            partial(backnorm.jax.batch_norm_backward, **HOW, training=training),
            partial(textbook_backward, training=training),
            (3, 3, 1, 1, 1),
        )
    return found


PAIRS = pairs()
