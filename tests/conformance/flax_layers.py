"""Modules of flax, of linen and of nnx, right ones and wrong ones, of :mod:`.layer_steps`."""

from __future__ import annotations

import jax.numpy as jnp
from flax import linen, nnx

from tests.conformance import layer_steps


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x, train):
        ones, zeros = linen.initializers.ones, linen.initializers.zeros
        shape = x.shape[-1:]
        gamma, beta = self.param("gamma", ones, shape), self.param("beta", zeros, shape)
        mean = self.variable("batch_stats", "mean", jnp.zeros, shape)
        variance = self.variable("batch_stats", "var", jnp.ones, shape)
        state = gamma, beta, mean.value, variance.value
        y, mean.value, variance.value = self.normalized(jnp, x, state, train)
        return y


class OfPart(linen.Module):
    """A right module, whose options are those of its part."""

    training: bool = True

    @linen.compact
    def __call__(self, x):
        return linen.BatchNorm(not self.training, momentum=0.5, epsilon=1e-3)(x)


class InTraining(linen.Module):
    """A right module that has no evaluation."""

    @linen.compact
    def __call__(self, x):
        return linen.BatchNorm(use_running_average=False)(x)


class Nnx(nnx.Module):
    def __init__(self, channels, *, rngs):
        self.scale, self.bias = nnx.Param(jnp.ones(channels)), nnx.Param(jnp.zeros(channels))
        self.mean = nnx.BatchStat(jnp.zeros(channels))
        self.variance = nnx.BatchStat(jnp.ones(channels))
        self.deterministic = False

    def __call__(self, x):
        own = self.scale, self.bias, self.mean, self.variance
        state = [each[...] for each in own]
        y, mean, variance = self.normalized(jnp, x, state, not self.deterministic)
        self.mean[...], self.variance[...] = mean, variance
        return y


# Of 4 channels, without beta.
instance = nnx.BatchNorm(4, use_bias=False, rngs=nnx.Rngs(0))

globals().update(layer_steps.classes("Linen", Linen), **layer_steps.classes("Nnx", Nnx))
