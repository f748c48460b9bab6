"""The steps of batch normalisation with channels last, for layers of flax and Keras.

`ops` is the namespace of a framework's functions. Subclasses are wrong in the step that their name
says.
"""

from __future__ import annotations

import math


class Right:
    epsilon, momentum = 1e-3, 0.8

    def normalized(self, ops, x, state, training):
        """Return y and the new running statistics."""
        gamma, beta, mean, variance = state
        running, axes, weight = (mean, variance), tuple(range(len(x.shape) - 1)), self.weight
        if self.uses_batch(training):
            mean, variance = ops.mean(x, axes), ops.var(x, axes)
        if training:
            new = mean, self.averaged(variance, math.prod(x.shape[:-1]))
            running = [o + weight * (n - o) for o, n in zip(running, new, strict=True)]
        normalized = (x - mean) / ops.sqrt(variance + self.added)
        return self.scaled(normalized, gamma, beta), *running

    @property
    def weight(self):
        return 1 - self.momentum

    @property
    def added(self):
        return self.epsilon

    def uses_batch(self, training):
        return training

    def averaged(self, variance, count):
        return variance

    def scaled(self, normalized, gamma, beta):
        return gamma * normalized + beta


class WithoutGamma(Right):
    def scaled(self, normalized, gamma, beta):
        return normalized + beta


class WithoutBeta(Right):
    def scaled(self, normalized, gamma, beta):
        return gamma * normalized


class SwappedMomentum(Right):
    weight = Right.momentum


class BatchInEvaluation(Right):
    def uses_batch(self, training):
        return True


class UnbiasedRunning(Right):
    def averaged(self, variance, count):
        return variance * (count / (count - 1))


class EpsilonTwice(Right):
    added = 2 * Right.epsilon


#: What the finding says of each wrong class.
WRONG = {
    "WithoutGamma": "y is not multiplied by gamma",
    "WithoutBeta": "y lacks beta",
    "SwappedMomentum": "momentum and 1 - momentum are swapped in the running statistics",
    "BatchInEvaluation": "evaluation has the statistics of the batch",
    "UnbiasedRunning": (
        "the running variance averages variances that are divided by M - 1, not by M"
    ),
    "EpsilonTwice": "epsilon is added twice",
}


def classes(prefix, base):
    """Return a class for each wrong step, and the right one, by their names."""
    steps = [Right, *(globals()[name] for name in WRONG)]
    return {f"{prefix}{each.__name__}": type(each.__name__, (each, base), {}) for each in steps}
