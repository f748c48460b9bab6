"""The ladder (error bounds of each rung) of a layer: both passes, and the running statistics."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from backnorm import reference
from backnorm.conformance._grade import BoundKind, Rung
from backnorm.conformance.data import LayerData
from backnorm.conformance.judge import GRADIENTS, LAYER_RESULTS, Quantity
from backnorm.conformance.ladder._forward import ForwardLadder
from backnorm.conformance.ladder._gradients import GradientLadder
from backnorm.conformance.ladder._ladder import Ladder
from backnorm.conformance.ladder._sums import ROUNDOFF
from backnorm.dtypes import FLOAT32, FLOAT64, is_16_bit
from backnorm.reference import Exact, FloatArray

# How many roundings an element of y has in evaluation.
_NORMALIZED = 19
# How many roundings to 16 bits a term may have on the rung `serial`. Layers differ in what they
# round: autograd adds the terms of dx in the type of x, and layers with 16-bit parameters compute
# statistics, products and sums in this type.
_NARROW = 4


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
    parameters : numpy.dtype
        The element type of the parameters and of the running statistics.
    """

    results: ClassVar[tuple[Quantity, ...]] = LAYER_RESULTS

    training: ForwardLadder | None
    gradients: GradientLadder
    terms_of: dict[str, FloatArray]
    moves: dict[str, tuple[FloatArray, FloatArray]]
    parameters: np.dtype

    @classmethod
    def of(
        cls, data: LayerData, running: tuple[np.ndarray, np.ndarray], *, training: bool
    ) -> LayerLadder:
        """Return the ladder of a layer, whose channels are on axis 1.

        Parameters
        ----------
        data : LayerData
            `mean` and `variance` are not used.
        running : tuple of numpy.ndarray
            The running mean and variance before the call.
        training : bool
        """
        x, epsilon = data.x, data.epsilon
        count = x.size // max(x.shape[1], 1)
        if not training:
            mean, variance = running
            output = reference.inference(x, mean, variance, data.gamma, data.beta, epsilon=epsilon)
            values = {"y": output.y, "running_mean": Exact.of(mean)}
            values["running_variance"] = Exact.of(variance)
            # A kernel may compute y as a multiple of x plus a number of the channel.
            shape = (1, -1) + (1,) * (x.ndim - 2)
            s = (1.0 / np.sqrt(variance.astype(FLOAT64) + epsilon)).reshape(shape)
            gain = s * np.abs(data.gamma.astype(FLOAT64)).reshape(shape)
            apart = 2.0 * gain * np.abs(mean.astype(FLOAT64)).reshape(shape)
            terms = {"y": output.y_terms + apart, "running_mean": np.abs(mean).astype(FLOAT64)}
            terms["running_variance"] = np.abs(variance).astype(FLOAT64)
            ladder = None
        else:
            ladder = ForwardLadder.of_layer(replace(data, mean=running[0], variance=running[1]))
            mean, variance = ladder.values.mean.hi, ladder.values.variance.hi
            values, terms = {}, {}
        gradients = GradientLadder.of(
            x, data.dy, mean, variance, data.gamma, epsilon=epsilon, training=training
        )
        moves = {} if ladder is None else _moves(data, mean, variance, gradients)
        kind = running[0].dtype
        return cls(values, x.dtype, count, ladder, gradients, terms, moves, kind)

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
        own = self._of_pass(name, rung, kind, output, below)
        if rung != "serial" or not is_16_bit(self.data):
            return own
        type_of_terms = self.data if name == "dx" else self.parameters
        if name.startswith("running") and self.training is None:
            return own
        terms = self.terms(name)
        if name == "y" and self.training is not None:
            terms = self.training.direct
        rounded: FloatArray = own + _NARROW * ROUNDOFF[type_of_terms] * terms
        return rounded

    def _of_pass(
        self, name: Quantity, rung: Rung, kind: BoundKind, output: np.dtype, below: np.ndarray
    ) -> FloatArray:
        """Return the bound without roundings to 16 bits."""
        if name in GRADIENTS:
            own = self.gradients.slack(name, rung, kind, output, below)
            if self.training is None or name not in self.moves:
                return own
            by_mean, by_s = self.moves[name]
            error, relative = self.training.errors(rung, kind, output)
            if rung == "serial" and is_16_bit(self.parameters):
                error = error + ROUNDOFF[self.parameters] * self.training.channels.mean
            shape = (1, -1) + (1,) * (own.ndim - 2) if own.ndim > 1 else (-1,)
            return own + by_mean * error.reshape(shape) + by_s * relative.reshape(shape)
        if self.training is not None:
            return self.training.slack(name, rung, kind, output, below)
        unit = 2.0**-45 if rung == "float64" else ROUNDOFF[FLOAT64 if self.is_wide else FLOAT32]
        return (_NORMALIZED if name == "y" else 0.0) * unit * self.terms(name)

    @property
    def is_wide(self) -> bool:
        """Whether elements are computed in float64."""
        return bool(self.data == FLOAT64)


def _moves(
    data: LayerData, mean: np.ndarray, variance: np.ndarray, gradients: GradientLadder
) -> dict[str, tuple[FloatArray, FloatArray]]:
    """Return `LayerLadder.moves`, from the derivatives of the gradients' formulas."""
    shape = (1, -1) + (1,) * (data.x.ndim - 2)
    s = (1.0 / np.sqrt(variance + data.epsilon)).reshape(shape)
    normalized = np.abs(data.x - mean.reshape(shape)) * s
    dgamma, dbeta = (
        np.abs(gradients.value(name).hi).reshape(shape) for name in ("dgamma", "dbeta")
    )
    gain = s * np.abs(data.gamma.astype(FLOAT64)).reshape(shape)
    count = gradients.count
    by_mean = gain * s * (dgamma + normalized * dbeta) / count
    by_s = gain * (np.abs(data.dy.astype(FLOAT64)) + (dbeta + 3.0 * normalized * dgamma) / count)
    return {
        "dx": (by_mean, by_s),
        "dgamma": ((s * dbeta).reshape(-1), dgamma.reshape(-1)),
    }
