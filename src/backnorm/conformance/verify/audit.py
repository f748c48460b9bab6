"""What a test's tolerance would let through.

A test compares a kernel's gradients with a reference by a policy: tolerances, a correlation, a
count of ulps. :func:`audit` runs it on every kernel of `backnorm.conformance.mutants`, which are
wrong on purpose, and on right kernels in float32, with the data of the test.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from backnorm.conformance.mutants import MUTANTS, Kernel
from backnorm.dtypes import FLOAT32
from backnorm.errors import ArgumentValueError

__all__ = ["DATA", "LOSSES", "POLICIES", "Audit", "Compare", "audit", "policy_of"]

#: Whether an array is accepted beside the expected one.
Compare = Callable[[np.ndarray, np.ndarray], bool]

#: Policies of projects, as their own tests have them.
POLICIES: Mapping[str, str] = {
    "pytorch": "rtol=1.3e-6,atol=1e-5",
    "numpy": "rtol=1e-7,atol=0",
    "torchcts": "rtol=1e-4,atol=1e-4",
    "kernelbench": "rtol=1e-2,atol=1e-2",
    "robust-kbench": "rtol=1e-5,atol=1e-5",
    "hipdnn": "rtol=2e-3,atol=2e-3",
    "miopen": "rms=4e-3",
    "mxnet": "rtol=0.16,atol=1e-2",
    "tt-metal": "pcc=0.99",
    "paddle-npu": "cosine=0.999",
    "onnxruntime": "rtol=0,atol=0.02",
    "webnn": "ulp=6",
}
DATA = ("randn", "rand", "layer")
LOSSES = ("none", "sum", "mean", "square", "cube")
_SEEDS = 3


@dataclass(frozen=True, slots=True)
class Audit:
    """What a policy does.

    Attributes
    ----------
    policy : str
    caught, missed : tuple of (str, str)
        Wrong kernels and what is wrong with them, that the test rejects, and that pass.
    invisible : tuple of (str, str)
        Wrong kernels whose results are right on such data, whatever the policy.
    false_alarms : dict of str to int
        Right kernels, and in how many runs of `runs` the test rejects them.
    runs : int
    """

    policy: str
    caught: tuple[tuple[str, str], ...]
    missed: tuple[tuple[str, str], ...]
    invisible: tuple[tuple[str, str], ...]
    false_alarms: Mapping[str, int]
    runs: int


def policy_of(text: str) -> Compare:
    """Return the comparison that a policy names.

    Parameters
    ----------
    text : str
        A name of :data:`POLICIES`; ``rtol=..,atol=..``; ``pcc=``, ``cosine=``, ``rms=`` or
        ``ulp=`` with a number; or ``module:function`` of an array and the expected one.
    """
    text = POLICIES.get(text, text)
    if ":" in text:
        module, _, name = text.partition(":")
        found: Compare = getattr(importlib.import_module(module), name)
        return found
    try:
        numbers = {k: float(v) for k, v in (part.split("=") for part in text.split(","))}
    except ValueError as error:
        raise ArgumentValueError(
            "--audit",
            "is no policy",
            came=repr(text),
            accepted="rtol=,atol=; pcc=, cosine=, rms=, ulp=; module:function; "
            + ", ".join(POLICIES),
        ) from error
    match sorted(numbers):
        case ["atol", "rtol"] | ["atol"] | ["rtol"]:
            rtol, atol = numbers.get("rtol", 0.0), numbers.get("atol", 0.0)
            return lambda a, e: bool((np.abs(a - e) <= atol + rtol * np.abs(e)).all())
        case ["pcc"]:
            return lambda a, e: _correlation(a - a.mean(), e - e.mean()) >= numbers["pcc"]
        case ["cosine"]:
            return lambda a, e: _correlation(a, e) >= numbers["cosine"]
        case ["rms"]:
            return lambda a, e: bool(
                np.sqrt(np.square(a - e).mean()) <= numbers["rms"] * max(np.abs(e).max(), 1e-300)
            )
        case ["ulp"]:
            return lambda a, e: bool(
                (np.abs(a - e) <= numbers["ulp"] * np.spacing(np.abs(e).astype(np.float32))).all()
            )
        case names:
            raise ArgumentValueError(
                "--audit", "unknown measure", came=", ".join(names),
                accepted="rtol, atol, pcc, cosine, rms, ulp",
            )  # fmt: skip


def audit(
    policy: str,
    *,
    data: str = "randn",
    shape: tuple[int, ...] = (16, 8, 14, 14),
    loss: str = "none",
    epsilon: float = 1e-5,
) -> Audit:
    """Return which wrong kernels a test would let through, and which right ones it would reject.

    Parameters
    ----------
    policy : str
        See :func:`policy_of`.
    data : {"randn", "rand", "layer"}
        randn: normal x and dy, gamma 1. rand: uniform in (0, 1). layer: gamma and beta random, of
        both signs.
    shape : tuple of int
        Of x, channels on axis 1.
    loss : {"none", "sum", "mean", "square", "cube"}
        What dy is: of `data`; 1; 1 over the number of elements; y; or y**2, whose losses are
        the sum of y, its mean, and the sums of squares over 2 and of cubes over 3.
    """
    compare, runs = policy_of(policy), list(_runs(data, shape, loss, epsilon))
    caught, missed, invisible = [], [], []
    for mutant in MUTANTS:
        entry = mutant.__name__, mutant.wrong
        if all(_same(mutant(), run) for run in runs):
            invisible.append(entry)
        elif any(_rejects(compare, mutant(), run) for run in runs):
            caught.append(entry)
        else:
            missed.append(entry)
    alarms = {
        name: sum(_rejects(compare, kernel, run) for run in runs) for name, kernel in _RIGHT.items()
    }
    return Audit(policy, tuple(caught), tuple(missed), tuple(invisible), alarms, len(runs))


class _Float32(Kernel):
    """The right kernel with elements and sums in float32."""

    def __init__(self, add: Callable[[np.ndarray], np.ndarray]) -> None:
        self._add = add

    def inverse_deviation(self, variance: Any, epsilon: float, elements: int) -> Any:
        return (1 / np.sqrt(variance.astype(np.float32) + np.float32(epsilon))).astype(np.float32)

    def deviation(self, x: Any, mean: Any) -> Any:
        return x.astype(np.float32) - mean.astype(np.float32)

    def sums(self, x: Any, dy: Any, c: Any, mean: Any) -> Any:
        d = dy.astype(np.float32)
        return self._add(d), self._add(d * c)


def _serial(terms: np.ndarray) -> np.ndarray:
    total: np.ndarray = np.add.accumulate(terms, axis=1)[:, -1:]
    return total


def _pairwise(terms: np.ndarray) -> np.ndarray:
    total: np.ndarray = np.ascontiguousarray(terms).sum(1, keepdims=True)
    return total


def _wide(terms: np.ndarray) -> np.ndarray:
    total: np.ndarray = terms.astype(np.float64).sum(1, keepdims=True)
    return total


_RIGHT: Mapping[str, Kernel] = {
    "serial sums": _Float32(_serial),
    "pairwise sums": _Float32(_pairwise),
    "float64 sums": _Float32(_wide),
}

_Run = tuple[tuple[np.ndarray, ...], Mapping[str, Any], list[np.ndarray]]


def _runs(data: str, shape: tuple[int, ...], loss: str, epsilon: float) -> Iterator[_Run]:
    """Yield inputs, options and the right gradients."""
    options = {"epsilon": epsilon, "data_format": "NCX", "training": True}
    for seed in range(_SEEDS):
        rng = np.random.default_rng(seed)
        draw = rng.random if data == "rand" else rng.standard_normal
        x, dy = draw(shape), draw(shape)
        channels = shape[1]
        gamma, beta = np.ones(channels), np.zeros(channels)
        if data == "rand":
            gamma = rng.random(channels)
        elif data == "layer":
            gamma = rng.uniform(0.5, 1.5, channels) * rng.choice([-1.0, 1.0], channels)
            beta = rng.uniform(-1.0, 1.0, channels)
        x = x.astype(FLOAT32)
        axes = (0, *range(2, len(shape)))
        kept = [1] * len(shape)
        kept[1] = channels
        wide = x.astype(np.float64)
        mean, variance = wide.mean(axes), wide.var(axes)
        scale = (gamma / np.sqrt(variance + epsilon)).reshape(kept)
        y = (wide - mean.reshape(kept)) * scale + beta.reshape(kept)
        of_loss = {
            "sum": np.ones(shape),
            "mean": np.full(shape, 1 / x.size),
            "square": y,
            "cube": y * y,
        }
        inputs = tuple(
            each.astype(FLOAT32) for each in (x, of_loss.get(loss, dy), mean, variance, gamma)
        )
        yield inputs, options, list(Kernel()(*inputs, **options))


def _rejects(compare: Compare, kernel: Kernel, run: _Run) -> bool:
    inputs, options, right = run
    outputs = kernel(*inputs, **options)
    return any(
        not np.isfinite(a).all() or not compare(a.astype(np.float64), e.astype(np.float64))
        for a, e in zip(outputs, right, strict=True)
    )


def _same(kernel: Kernel, run: _Run) -> bool:
    """Whether a kernel's results are the right ones to the last bits of float32."""
    inputs, options, right = run
    return all(np.array_equal(a, e) for a, e in zip(kernel(*inputs, **options), right, strict=True))


def _correlation(one: np.ndarray, other: np.ndarray) -> float:
    scale = np.linalg.norm(one) * np.linalg.norm(other)
    return float((one * other).sum() / scale) if scale else 1.0
