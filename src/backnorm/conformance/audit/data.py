"""The inputs on which `audit` runs a test of a kernel, to examine the test's tolerance."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from backnorm.conformance.data import LayerData
from backnorm.conformance.formula import BACKWARD, FORWARD, Channels, Formula
from backnorm.conformance.judge import GRADIENTS, LAYER_RESULTS, Quantity
from backnorm.dtypes import element_type, statistics_types
from backnorm.errors import ArgumentValueError
from backnorm.tensor_files import read_tensors

__all__ = ["DATA", "LOSSES", "Run", "read", "runs"]

#: Names of losses. dy is the gradient of the chosen loss with respect to y. If the name is "none",
#: there is no loss, and dy is random like x.
LOSSES = ("none", "sum", "mean", "square", "cube")
SEEDS = 3
# By operation: the formula, and the results that a kernel returns or writes.
_OPERATIONS: Mapping[str, tuple[Formula, tuple[Quantity, ...]]] = {
    "backward": (BACKWARD, GRADIENTS),
    "layer": (FORWARD, LAYER_RESULTS[:3]),
}


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """The inputs of a call, the right formula, and the right results by name."""

    data: LayerData
    formula: Formula
    right: Mapping[str, np.ndarray]

    def results(self, formula: Formula) -> dict[str, np.ndarray]:
        """Return the results of a formula, evaluated in extended precision."""
        return _results(self.data, formula, self.right)


_Arrays = tuple[np.ndarray, ...]
_Draw = Callable[[np.random.Generator, tuple[int, ...]], _Arrays]


def _randn(rng: np.random.Generator, shape: tuple[int, ...]) -> _Arrays:
    x, dy = rng.standard_normal(shape), rng.standard_normal(shape)
    return x, dy, np.ones(shape[1]), np.zeros(shape[1])


def _scaled(rng: np.random.Generator, shape: tuple[int, ...]) -> _Arrays:
    x, *others = _randn(rng, shape)
    return (3 * x, *others)


def _fresh(rng: np.random.Generator, shape: tuple[int, ...]) -> _Arrays:
    _, *others = _randn(rng, shape)
    return (rng.random(shape), *others)


def _traced(rng: np.random.Generator, shape: tuple[int, ...]) -> _Arrays:
    mean, inverse_deviation = rng.random((2, shape[1]))
    return (*_rand(rng, shape), mean, 1 / np.square(inverse_deviation))


def _rand(rng: np.random.Generator, shape: tuple[int, ...]) -> _Arrays:
    return rng.random(shape), rng.random(shape), rng.random(shape[1]), np.zeros(shape[1])


def _layer(rng: np.random.Generator, shape: tuple[int, ...]) -> _Arrays:
    x, dy = rng.standard_normal(shape), rng.standard_normal(shape)
    gamma = rng.uniform(0.5, 1.5, shape[1]) * rng.choice([-1.0, 1.0], shape[1])
    return x, dy, gamma, rng.uniform(-1.0, 1.0, shape[1])


def _uniform(rng: np.random.Generator, shape: tuple[int, ...]) -> _Arrays:
    x, dy = rng.uniform(-1, 1, shape), rng.uniform(-1, 1, shape)
    return x, dy, rng.uniform(-1, 1, shape[1]), np.zeros(shape[1])


def _small(rng: np.random.Generator, shape: tuple[int, ...]) -> _Arrays:
    x, dy, gamma, beta = _uniform(rng, shape)
    return x, dy / 10, gamma / 10, beta


def _sparse(rng: np.random.Generator, shape: tuple[int, ...]) -> _Arrays:
    power = 2.0 ** (np.arange(shape[1]) % 7)
    mean = (power / 4).reshape(1, -1, *(1,) * (len(shape) - 2))
    x = mean * (1 + rng.integers(-64, 65, shape) / 64)
    dy = rng.integers(-2, 3, shape) * (rng.random(shape) < max(0.05, min(1.0, 20 / x.size)))
    return x, dy.astype(np.float64), power / 8, np.zeros(shape[1])


#: Functions that draw x, dy, gamma and beta, by the name of the kind of data. beta is 0 except in
#: the kind "layer". Mean and variance are those of x except in the kind "traced".
#:
#: - randn: x and dy are normally distributed, and gamma is 1.
#: - scaled: as in "randn", but x is then multiplied by 3.
#: - fresh: as in "randn", but x is uniform in (0, 1).
#: - rand: x, dy and gamma are uniform in (0, 1).
#: - traced: as in "rand", and so are the mean and the inverse deviation.
#: - layer: x and dy are normally distributed. gamma is random, with both signs; beta is random.
#: - uniform: x, dy and gamma are uniform in (-1, 1).
#: - small: as in "uniform", but dy and gamma are then divided by 10.
#: - sparse: elements of x have few binary digits, gammas are powers of 2, and elements of dy are
#:   integers. If x has many elements, most elements of dy are 0.
DATA: Mapping[str, _Draw] = {
    "randn": _randn, "scaled": _scaled, "fresh": _fresh, "rand": _rand, "traced": _traced,
    "layer": _layer, "uniform": _uniform, "small": _small, "sparse": _sparse,
}  # fmt: skip


def runs(
    data: str,
    shape: tuple[int, ...],
    loss: str,
    epsilon: float,
    dtype: np.dtype,
    operation: str = "backward",
) -> Iterator[Run]:
    """Yield inputs of the kind `data` with their right results, one `Run` for each seed.

    The operation is "backward", or "layer": the forward pass of a layer in training, whose running
    statistics were 0 and 1 and whose momentum is 0.1.

    Raises
    ------
    ArgumentValueError
        For unknown data, and for an unknown loss.
    """
    for option, value, known in (("--data", data, tuple(DATA)), ("--loss", loss, LOSSES)):
        if value not in known:
            raise ArgumentValueError(option, "unknown", came=repr(value), accepted=", ".join(known))
    for seed in range(SEEDS):
        x, dy, gamma, beta, *statistics = DATA[data](np.random.default_rng(seed), shape)
        x = x.astype(dtype)
        mean, variance = statistics or _statistics(x)
        if loss != "none":
            dy = _of_loss(loss, x, mean, variance, gamma, beta, epsilon)
        if operation == "layer":
            mean, variance = np.zeros_like(mean), np.ones_like(variance)
        yield _run((x, dy, mean, variance, gamma, beta), dtype, epsilon, operation)


def read(path: Path, epsilon: float) -> Run:
    """Return the inputs that a file has, with their right gradients, as a `Run`.

    Parameters
    ----------
    path : Path
        An ``.npz`` file with x and dy, channels on axis 1, of one element type. gamma, mean and
        variance are optional; their defaults are 1 and the statistics of x.

    Raises
    ------
    ArgumentValueError
        If the file is damaged, if an array is missing or has a wrong type or shape, or if an array
        or a gradient is not finite.
    OSError
        If the file cannot be read.
    """
    arrays = read_tensors(path)
    missing = [name for name in ("x", "dy") if name not in arrays]
    if missing:
        raise ArgumentValueError(
            "--data", f"must have {' and '.join(missing)}", came=", ".join(arrays),
            accepted="x, dy, and gamma, mean, variance",
        )  # fmt: skip
    x = arrays["x"]
    dtype = element_type(x.dtype)
    if dtype is None or x.ndim < 2 or not x.size:
        accepted = "a float array with channels on axis 1"
        raise ArgumentValueError(
            "--data",
            "must have a float array x with channels on axis 1",
            came=f"{x.dtype} {x.shape}",
            accepted=accepted,
        )
    mean, variance = _statistics(x)
    of_channels = {"mean": mean, "variance": variance, "gamma": np.ones(x.shape[1])}
    known = {"x": x, "dy": arrays["dy"], **(of_channels | arrays)}
    for name, shape in {"dy": x.shape, **dict.fromkeys(of_channels, x.shape[1:2])}.items():
        array = known[name]
        if array.shape != shape or element_type(array.dtype) is None:
            raise ArgumentValueError(
                "--data", f"must have a float array {name} of the right shape",
                came=f"{array.dtype} {array.shape}", accepted=str(shape),
            )  # fmt: skip
    inputs = tuple(known[name] for name in ("x", "dy", "mean", "variance", "gamma"))
    with np.errstate(all="ignore"):
        run = _run((*inputs, np.zeros(x.shape[1])), dtype, epsilon)
    arrays_of_run = *run.data.backward_inputs, *run.right.values()
    if not all(np.isfinite(a.astype(np.float64)).all() for a in arrays_of_run):
        raise ArgumentValueError(
            "--data", "must have finite arrays and gradients", came="NaN or an infinity"
        )
    return run


def _statistics(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    wide, axes = x.astype(np.float64), (0, *range(2, x.ndim))
    return wide.mean(axes), wide.var(axes)


def _of_loss(
    loss: str,
    x: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray,
    beta: np.ndarray,
    epsilon: float,
) -> np.ndarray:
    """Return dy, the gradient of a loss with respect to y.

    For "sum", every element of dy is 1; for "mean", 1 divided by the number of elements. The losses
    "square" and "cube" are sum(y**2)/2 and sum(y**3)/3, so dy is y and y**2.
    """
    if loss in ("sum", "mean"):
        return np.full(x.shape, 1.0 if loss == "sum" else 1 / x.size)
    kept = (1, -1, *(1,) * (x.ndim - 2))
    m, s, b = (v.reshape(kept) for v in (mean, gamma / np.sqrt(variance + epsilon), beta))
    y: np.ndarray = (x.astype(np.float64) - m) * s + b
    return y if loss == "square" else y * y


def _run(
    inputs: tuple[np.ndarray, ...], dtype: np.dtype, epsilon: float, operation: str = "backward"
) -> Run:
    x, dy, *channels = inputs
    statistics = statistics_types(dtype)[-1]
    mean, variance, gamma, beta = (a.astype(statistics) for a in channels)
    averages: dict[str, Any] = {"momentum": 0.1, "unbiased": True} if operation == "layer" else {}
    data = LayerData(
        x.astype(dtype), dy.astype(dtype), mean, variance, gamma, beta, epsilon, "NCX", **averages
    )
    formula, names = _OPERATIONS[operation]
    return Run(data, formula, _results(data, formula, names))


def _results(data: LayerData, formula: Formula, names: Collection[str]) -> dict[str, np.ndarray]:
    outputs = formula.outputs(data, Channels.of(data, wide=True))
    return {name: array for name, array in outputs if name in names}
