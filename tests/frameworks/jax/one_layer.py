"""One layer, ours and the textbook's, of a shape that several tests share."""

from __future__ import annotations

import backnorm.jax

from .conftest import EPSILON, textbook

SHAPE, AXIS = (6, 5, 4), 1


def ours(x, gamma, beta, axis_name=None):
    return backnorm.jax.batch_norm(x, gamma, beta, epsilon=EPSILON, axis=AXIS, axis_name=axis_name)


def theirs(x, gamma, beta, axis_name=None):
    return textbook(x, gamma, beta, axis=AXIS, axis_name=axis_name)
