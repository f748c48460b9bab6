"""Errors of one implementation for docs/conformance.md, as JSON.

Usage: python scripts/conformance_errors.py points|second NAME
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

import backnorm
from backnorm import reference
from backnorm.conformance.battery import Case
from backnorm.conformance.data import realistic_data
from backnorm.conformance.ladder import GradientLadder
from backnorm.conformance.verify.cases import DTYPES
from backnorm.conformance.verify.subjects import subject_of

# The problem of the picture: M = 25,088 elements a channel.
_SHAPE = (32, 28, 28, 16)
_SEED = 0
_BINS, _POINTS = 36, 6


def _points(name: str) -> list[list[float]]:
    """Return [condition, relative error] of the worst element of dx and of random ones, by bin."""
    rng = np.random.default_rng(_SEED)
    data = realistic_data(_SHAPE, DTYPES["float32"], data_format="NXC", rng=rng)
    case = Case("points", replace(data, dy=data.dy + np.float32(0.5)))
    ladder = GradientLadder.of(*case.operands, **case.options)
    exact, terms = ladder.value("dx"), ladder.terms("dx")
    dx = subject_of(name)(case.inputs, case)["dx"]
    error = np.abs((dx.astype(np.float64) - exact.hi) - exact.lo) / np.abs(exact.hi)
    condition = terms / np.abs(exact.hi)
    order = np.argsort(condition, axis=None)
    edges = np.searchsorted(condition.flat[order], np.logspace(0, 6, _BINS + 1))
    found: list[list[float]] = []
    for low, high in itertools.pairwise(edges):
        if high > low:
            own = order[low:high]
            worst = own[np.argmax(error.flat[own])]
            chosen = {int(worst), *map(int, rng.choice(own, min(_POINTS, len(own)), replace=False))}
            found += [
                [float(f"{v.flat[k]:.3g}") for v in (condition, error)] for k in sorted(chosen)
            ]
    return found


def _second(name: str) -> dict[str, list[float]]:
    """Return the largest errors of the gradients of the backward pass, in multiples of u T.

    The keys are types; the values are errors with respect to x, dy and gamma. u is the unit
    roundoff of the type.
    """
    found = {}
    for dtype in ("float32", "float64"):
        rng = np.random.default_rng(_SEED)
        data = realistic_data((32, 16, 14, 14), DTYPES[dtype], rng=rng)
        by = {
            "ddx": rng.standard_normal(data.x.shape),
            "ddgamma": rng.standard_normal(16),
            "ddbeta": rng.standard_normal(16),
        }
        by = {each: value.astype(data.x.dtype) for each, value in by.items()}
        exact = reference.double_backward(*data.backward_inputs, **by, **data.options)
        gradients = _SECOND_OF[name](data.backward_inputs, by, data.epsilon)
        unit = float(np.finfo(data.x.dtype).eps) / 2
        errors = []
        for field_name, actual in zip(("x", "dy", "gamma"), gradients, strict=True):
            value, terms = getattr(exact, field_name), getattr(exact, f"{field_name}_terms")
            error = np.abs((actual.astype(np.float64) - value.hi) - value.lo)
            errors.append(float(f"{(error / (unit * terms)).max():.2g}"))
        found[dtype] = errors
    return found


def _second_of_torch(
    inputs: tuple[np.ndarray, ...], by: Mapping[str, np.ndarray], epsilon: float
) -> tuple[np.ndarray, ...]:
    import torch

    x, dy, mean, variance, gamma = map(torch.tensor, inputs)
    inverse = (1 / torch.sqrt(variance.double() + epsilon)).to(variance.dtype)
    leaves = [each.requires_grad_() for each in (x, dy, gamma)]
    gradients = torch.ops.aten.native_batch_norm_backward(
        dy, x, gamma, None, None, mean, inverse, True, epsilon, [True, True, True]
    )
    by_gradients = [torch.tensor(by[each]) for each in ("ddx", "ddgamma", "ddbeta")]
    return tuple(g.numpy() for g in torch.autograd.grad(gradients, leaves, by_gradients))


def _second_of_own(
    inputs: tuple[np.ndarray, ...], by: Mapping[str, np.ndarray], epsilon: float
) -> tuple[np.ndarray, ...]:
    return tuple(backnorm.batch_norm_double_backward(*inputs, **by, epsilon=epsilon))


_SECOND_OF = {"torch": _second_of_torch, "backnorm": _second_of_own}


if __name__ == "__main__":
    print(json.dumps({"points": _points, "second": _second}[sys.argv[1]](sys.argv[2])))
