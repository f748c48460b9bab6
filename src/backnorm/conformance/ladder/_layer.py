"""The ladder (error bounds of each rung) of a layer: both passes, and the running statistics."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from backnorm import reference
from backnorm.conformance._grade import BoundKind, Rung
from backnorm.conformance.judge import GRADIENTS, LAYER_RESULTS, Quantity
from backnorm.conformance.ladder._forward import ForwardLadder, Running
from backnorm.conformance.ladder._gradients import GradientLadder
from backnorm.conformance.ladder._ladder import Ladder
from backnorm.conformance.ladder._sums import ROUNDOFF
from backnorm.dtypes import FLOAT32, FLOAT64
from backnorm.reference import Exact, FloatArray

# How many roundings an element of y has in evaluation.
_NORMALIZED = 19


@dataclass(frozen=True, slots=True, eq=False)
class LayerLadder(Ladder):
    """The exact results of a layer, and the bounds of their errors.

    In training, the layer computes the statistics of the batch, whose errors also change the
    gradients. In evaluation, the running statistics are constants.

    Attributes
    ----------
    training : Ladder or None
        The ladder of the forward pass in training; None in evaluation.
    gradients : GradientLadder
    terms_of : mapping
        T of each element of the results that `values` has: in evaluation, of y and of the running
        statistics.
    moves : tuple of float64 arrays
        By how much dx and dgamma change for a change of the mean, and for a relative change of
        1/sqrt(variance + epsilon): two arrays for each.
    """

    results: ClassVar[tuple[Quantity, ...]] = LAYER_RESULTS

    training: ForwardLadder | None
    gradients: GradientLadder
    terms_of: dict[str, FloatArray]
    moves: dict[str, tuple[FloatArray, FloatArray]]

    @classmethod
    def of(
        cls,
        x: np.ndarray,
        dy: np.ndarray,
        gamma: np.ndarray | None,
        beta: np.ndarray | None,
        running: tuple[np.ndarray, np.ndarray],
        *,
        epsilon: float,
        training: bool,
        momentum: float,
    ) -> LayerLadder:
        """Return the ladder of a layer, whose channels are on axis 1.

        Parameters
        ----------
        x, dy, gamma, beta, epsilon
            As in :func:`reference.backward` and :func:`reference.forward`.
        running : tuple of numpy.ndarray
            The running mean and variance before the call.
        training : bool
        momentum : float
            The weight of the batch in the running statistics, as in PyTorch. The running variance
            gets the unbiased variance of the batch.
        """
        count = x.size // max(x.shape[1], 1)
        if not training:
            mean, variance = running
            output = reference.inference(x, mean, variance, gamma, beta, epsilon=epsilon)
            values = {"y": output.y, "running_mean": Exact.of(mean)}
            values["running_variance"] = Exact.of(variance)
            # A kernel may compute y as a multiple of x plus a number of the channel.
            shape = (1, -1) + (1,) * (x.ndim - 2)
            s = (1.0 / np.sqrt(variance.astype(FLOAT64) + epsilon)).reshape(shape)
            gain = s if gamma is None else s * np.abs(gamma.astype(FLOAT64)).reshape(shape)
            apart = 2.0 * gain * np.abs(mean.astype(FLOAT64)).reshape(shape)
            terms = {"y": output.y_terms + apart, "running_mean": np.abs(mean).astype(FLOAT64)}
            terms["running_variance"] = np.abs(variance).astype(FLOAT64)
            ladder = None
        else:
            known = Running(*running, momentum, unbiased=True)
            ladder = replace(ForwardLadder.of(x, gamma, beta, epsilon=epsilon), running=known)
            mean, variance = ladder.values.mean.hi, ladder.values.variance.hi
            values, terms = {}, {}
        gradients = GradientLadder.of(
            x, dy, mean, variance, gamma, epsilon=epsilon, training=training
        )
        moves = {} if ladder is None else _moves(x, dy, mean, variance, gamma, epsilon, gradients)
        return cls(values, x.dtype, count, ladder, gradients, terms, moves)

    def value(self, name: Quantity) -> Exact:
        """Return the exact value of a result."""
        value: Exact = self.values[name] if name in self.values else self._pass(name).value(name)
        return value

    def terms(self, name: Quantity) -> FloatArray:
        """Return T of each element of a result."""
        return self.terms_of[name] if name in self.values else self._pass(name).terms(name)

    def _pass(self, name: Quantity) -> Ladder:
        """Return the ladder of the pass that has a result in training."""
        return self.gradients if name in GRADIENTS or self.training is None else self.training

    def element_type(self, name: Quantity) -> np.dtype | None:
        """Return the element type that a result has to have; None: any."""
        return self.data if name in ("y", "dx") else None

    def slack(
        self, name: Quantity, rung: Rung, kind: BoundKind, output: np.dtype, below: np.ndarray
    ) -> FloatArray:
        """Return the bound of each element's error before the last rounding."""
        unit = 2.0**-45 if rung == "float64" else ROUNDOFF[FLOAT64 if self.is_wide else FLOAT32]
        if name in GRADIENTS:
            own = self.gradients.slack(name, rung, kind, output, below)
            if self.training is None or name not in self.moves:
                return own
            by_mean, by_s = self.moves[name]
            error, relative = self.training.errors(rung, kind, output)
            shape = (1, -1) + (1,) * (own.ndim - 2) if own.ndim > 1 else (-1,)
            return own + by_mean * error.reshape(shape) + by_s * relative.reshape(shape)
        if self.training is not None:
            return self.training.slack(name, rung, kind, output, below)
        return (_NORMALIZED if name == "y" else 0.0) * unit * self.terms(name)

    @property
    def is_wide(self) -> bool:
        """Whether elements are computed in float64."""
        return bool(self.data == FLOAT64)


def _moves(
    x: np.ndarray,
    dy: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None,
    epsilon: float,
    gradients: GradientLadder,
) -> dict[str, tuple[FloatArray, FloatArray]]:
    """Return `LayerLadder.moves`, from the derivatives of the gradients' formulas."""
    shape = (1, -1) + (1,) * (x.ndim - 2)
    s = (1.0 / np.sqrt(variance + epsilon)).reshape(shape)
    normalized = np.abs(x - mean.reshape(shape)) * s
    dgamma, dbeta = (
        np.abs(gradients.value(name).hi).reshape(shape) for name in ("dgamma", "dbeta")
    )
    gain = s if gamma is None else s * np.abs(gamma.astype(FLOAT64)).reshape(shape)
    count = gradients.count
    by_mean = gain * s * (dgamma + normalized * dbeta) / count
    by_s = gain * (np.abs(dy.astype(FLOAT64)) + (dbeta + 3.0 * normalized * dgamma) / count)
    return {
        "dx": (by_mean, by_s),
        "dgamma": ((s * dbeta).reshape(-1), dgamma.reshape(-1)),
    }
