"""A battery of cases that distinguishes correct operators with a ReLU from wrong ones.

As in :mod:`backnorm.conformance.battery`, each case detects a plausible mistake that the other
cases may miss. Forward and backward are judged separately: the backward pass gets a random mask
instead of the mask that the operator's forward pass returned.

The operators have three methods, with the arguments of `backnorm.batch_norm_forward`,
`batch_norm_inference` and `batch_norm_backward`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from backnorm import reference
from backnorm.activations import RELU, Activation
from backnorm.arithmetics import Arithmetic
from backnorm.conformance._ulps import ulp_at
from backnorm.conformance.battery import Case, Variant, computed_in, variants
from backnorm.conformance.data import LayerData, read_only, realistic_data
from backnorm.conformance.judge import check_backward, check_forward, check_inference
from backnorm.conformance.ladder import Grade
from backnorm.dtypes import FLOAT64
from backnorm.reference import Exact

# Odd sizes, so that the last byte of a mask is not full.
_SHAPES = {"NCX": (3, 5, 7, 3), "NXC": (3, 7, 3, 5)}


@dataclass(frozen=True, slots=True, eq=False)
class ReluCase(Case):
    """The arguments of one call of each operator.

    `scaled` says whether gamma and beta are passed.

    Attributes
    ----------
    residual : numpy.ndarray or None
    mask : numpy.ndarray
        The mask of the backward pass. `backnorm.reference.unpack_mask` makes booleans of it,
        `pack_mask` a mask of booleans.
    activation : Activation
        A ReLU, whose ceiling is a number of x's type.
    """

    residual: np.ndarray | None = field(kw_only=True)
    mask: np.ndarray = field(kw_only=True)
    activation: Activation = RELU


def random_mask(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return a mask of random bits, with all bits of the padding set."""
    mask = reference.pack_mask(rng.random(x.shape) < 0.6, x)
    first = -(-x.size // 8)
    mask[first : first + 8] = 0xFF
    if x.size % 8:
        mask[x.size // 8] |= np.uint8(0xFF << x.size % 8 & 0xFF)
    return mask


def relu_case(
    name: str,
    data: LayerData,
    rng: np.random.Generator,
    *,
    with_residual: bool = True,
    **settings: Any,
) -> ReluCase:
    """Return a case on `data` with a random mask and residual; `settings` are other fields."""
    residual = (rng.standard_normal(data.x.shape) - 0.3).astype(data.x.dtype)
    mask = random_mask(data.x, rng)
    return ReluCase(name, data, residual=residual if with_residual else None, mask=mask, **settings)


def relu_cases(
    seed: int = 0, arithmetic: Arithmetic | None = None, activation: Activation = RELU
) -> Iterator[ReluCase]:
    """Yield the battery: small cases for every type and layout; `seed` determines their values.

    `arithmetic` is as in :func:`backnorm.conformance.battery.cases`. `activation` must be a ReLU.
    If this ReLU has a ceiling, every element type must represent the ceiling exactly.
    """
    return computed_in(_all_cases(seed, activation), arithmetic)


def _all_cases(seed: int, activation: Activation) -> Iterator[ReluCase]:
    rng = np.random.default_rng(seed)
    for variant in variants(_SHAPES):
        for case in _of_variant(variant, rng):
            yield replace(case, activation=activation)
        if activation.ceiling is not None:
            yield _about(activation.ceiling, variant, rng)


def examine_relu(operators: Any, case: ReluCase) -> dict[str, Grade]:
    """Run the operators on `case` and judge all results."""
    data = case.data
    judged: Any = {"arithmetic": case.arithmetic}
    x, dy, mean, variance, *affine = map(read_only, (*data.backward_inputs, data.beta))
    gamma, beta = affine if case.scaled else (None, None)
    residual = None if case.residual is None else read_only(case.residual)
    options: Any = {**data.options, "activation": case.activation, "residual": residual}
    y = operators.forward(x, gamma, beta, **options)
    forward = check_forward(x, gamma, beta, y, **options, **judged)
    y = operators.inference(x, mean, variance, gamma, beta, **options)
    inference = check_inference(x, mean, variance, gamma, beta, y, **options, **judged)
    masked: Any = {"mask": read_only(case.mask), "residual": residual is not None}
    options = {**data.options, **masked, "training": case.training}
    gradients = operators.backward(x, dy, mean, variance, gamma, **options)
    backward = check_backward(x, dy, mean, variance, gamma, gradients, **options, **judged)
    passes = {"forward": forward, "inference": inference, "backward": backward}
    return {
        f"{name} {quantity}": grade
        for name, grades in passes.items()
        for quantity, grade in grades.items()
    }


def _of_variant(variant: Variant, rng: np.random.Generator) -> Iterator[ReluCase]:
    dtype, _, data_format = variant
    types = variant.name
    real: Callable[..., LayerData] = partial(realistic_data, **variant.options, rng=rng)
    plain = real(_SHAPES[data_format])
    yield relu_case(f"residual-{types}", plain, rng)
    yield relu_case(f"no-residual-{types}", plain, rng, with_residual=False)
    yield relu_case(f"frozen-{types}", plain, rng, training=False)
    yield relu_case(f"no-affine-{types}", plain, rng, scaled=False)
    yield relu_case(f"axes-in-another-order-{types}", _turned(plain), rng)
    yield relu_case(f"mean-over-deviation-{types}", real(_SHAPES[data_format], ratio=10.0), rng)
    yield relu_case(f"many-{types}", real((6, 16, 9, 16)), rng)
    if dtype != FLOAT64:
        # In this case, many positive values of y are so small that they are rounded to 0. The
        # mask's bits of these elements must be 0. The case does not exist in float64, because the
        # oracle would round these values to 0, too.
        least = np.full_like(plain.gamma, ulp_at(Exact.of(0.0), dtype))
        vanishing = replace(plain, gamma=least, beta=np.zeros_like(plain.beta))
        yield relu_case(f"vanishing-{types}", vanishing, rng, with_residual=False)
    yield _with_nan(f"nan-{types}", plain, rng)


def _about(ceiling: float, variant: Variant, rng: np.random.Generator) -> ReluCase:
    """Return a case whose y are within a few ulps of the ceiling."""
    data = realistic_data(_SHAPES[variant.data_format], **variant.options, rng=rng)
    near = ceiling * ulp_at(Exact.of(0.5), variant.dtype)
    data = replace(
        data, gamma=np.full_like(data.gamma, near), beta=np.full_like(data.beta, ceiling)
    )
    name = f"about-the-ceiling-{variant.name}"
    return relu_case(name, data, rng, with_residual=False, activation=Activation("relu", ceiling))


def _turned(data: LayerData) -> LayerData:
    """Return the same data with the axes of x and dy in another order in memory."""

    def turn(array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array.transpose(2, 0, 3, 1)).transpose(1, 3, 0, 2)

    return replace(data, x=turn(data.x), dy=turn(data.dy))


def _with_nan(name: str, data: LayerData, rng: np.random.Generator) -> ReluCase:
    """Return a case with NaN in x, in the residual, and in an element of dy whose mask bit is 0."""
    axis = 1 if data.data_format == "NCX" else -1
    x, dy = (np.moveaxis(array.copy(), axis, 0) for array in (data.x, data.dy))
    case = relu_case(name, data, rng)
    assert case.residual is not None
    residual = np.moveaxis(case.residual, axis, 0)
    positive = np.moveaxis(reference.unpack_mask(case.mask, data.x), axis, 0)
    x[0, 1, 2, 0] = residual[1, 0, 3, 1] = dy[2, 2, 1, 1] = np.nan
    positive[2, 2, 1, 1] = False
    x, dy, positive = (np.moveaxis(array, 0, axis) for array in (x, dy, positive))
    return replace(case, data=replace(data, x=x, dy=dy), mask=reference.pack_mask(positive, x))
