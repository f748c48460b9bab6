r"""Diagnose wrong results: describe the mistake in one sentence.

A diagnosis first grades the results (:mod:`backnorm.conformance.ladder`). Results that are on a
rung of the ladder are right for any data, and have no mistake.

For every formula of the backward pass, right or wrong, dx is linear in three functions of an
element: dy, 1 and x - mean. For each channel, a least-squares fit gives the coefficients of these
three functions. The fit, dgamma and dbeta are compared with the right formula and with formulas
that have one or two mistakes (:mod:`backnorm.conformance.formula`). A mistake is named if rounding
explains the rest of the errors, and if the data distinguish the mistake from others. If no formula
explains dx, elements may be at wrong places, or dx may not be linear in dy. The forward pass is
diagnosed in the same way: y is linear in 1 and x - mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from backnorm.conformance._fit import Fit, Numbers, Result, relative_error, results_of
from backnorm.conformance._naming import (
    MARGIN,
    Diagnosis,
    Term,
    named,
    not_finite,
    of_terms,
    ratios,
    sentence,
    unexplained,
)
from backnorm.conformance._places import misplaced, partly_wrong, truncated, wrong_end
from backnorm.conformance.axes import BATCH_NORM, Normalization
from backnorm.conformance.data import LayerData, in_layout, realistic_data
from backnorm.conformance.formula import (
    FEW_BITS,
    Channels,
    Formula,
    Mistake,
    Values,
    backward_formula,
    forward_formula,
    of_images,
    other_inputs,
)
from backnorm.conformance.judge import FORWARD_RESULTS, GRADIENTS, MORE_FORWARD_RESULTS
from backnorm.conformance.ladder import forward_ladder, gradient_ladder
from backnorm.dtypes import FLOAT64

__all__ = [
    "DIAGNOSTIC",
    "FORWARD_DIAGNOSTIC",
    "ROW_DIAGNOSTIC",
    "Diagnosis",
    "diagnose",
    "diagnose_forward",
    "diagnostic_data",
    "forward_diagnostic_data",
]

Array = np.ndarray
Arrays = tuple[Array | None, Array | None, Array | None]

#: The shape (N, C, space) of diagnostic data.
DIAGNOSTIC = (7, 13, 3, 13)
#: The same for other normalisations, of which a row has enough elements for a fit.
ROW_DIAGNOSTIC = {
    "layer-norm": (3, 29, 29),
    "rms-norm": (3, 29, 29),
    "group-norm": (3, 12, 3, 12),
    "instance-norm": (4, 13, 3, 13),
}
#: The same for the forward pass.
FORWARD_DIAGNOSTIC = (3, 11, 1, 11)

# Results are those of other inputs if they differ by at most this many roundings.
_ROUNDINGS = 128.0

_NO_ELEMENTS = Diagnosis("right", (), "there are no elements")
_RIGHT = Diagnosis("right", (), "the errors are within the bounds of rounding")


def diagnostic_data(
    dtype: np.dtype,
    *,
    data_format: str = "NCX",
    statistics_dtype: np.dtype | None = None,
    seed: int | np.random.Generator = 0,
    shape: tuple[int, ...] = DIAGNOSTIC,
    normalization: Normalization = BATCH_NORM,
) -> LayerData:
    """Return inputs for which different mistakes in a formula give different numbers.

    There are 13 channels of 7 x 39 = 273 elements, in all 3549 elements. None of these three
    numbers is a multiple of a vector length. Axes 1 and -1 have equal sizes, so a channel axis that
    is guessed from sizes is wrong in one layout. epsilon is about as large as the smallest
    variances. mean and variance differ from the mean and variance of x, and gamma has both signs.
    The mean of dy is not 0, and dy is correlated with x.
    """
    rng = np.random.default_rng(seed)
    data = realistic_data(
        shape,
        dtype,
        data_format=data_format,
        rng=rng,
        statistics_dtype=statistics_dtype,
        epsilon=0.25,
        scale=0.5,
        normalization=normalization,
    )
    mean, variance = data.mean.astype(float), data.variance.astype(float)
    moved = rng.uniform(0.2, 0.6, mean.shape) * normalization.is_centred
    return replace(
        data,
        mean=(mean + moved).astype(data.mean.dtype),
        variance=(variance * rng.uniform(1.3, 2.5, mean.shape)).astype(data.variance.dtype),
    )


def forward_diagnostic_data(
    dtype: np.dtype,
    *,
    data_format: str = "NCX",
    statistics_dtype: np.dtype | None = None,
    seed: int = 0,
) -> LayerData:
    """Return inputs as :func:`diagnostic_data` does, for a forward pass in training.

    There are 11 channels of only M = 3 x 11 elements, so that a division by M - 1 instead of M
    changes the variance noticeably. The fields `mean` and `variance` of the result are running
    statistics, which differ from the statistics of x.
    """
    return diagnostic_data(
        dtype,
        data_format=data_format,
        statistics_dtype=statistics_dtype,
        seed=seed,
        shape=FORWARD_DIAGNOSTIC,
    )


def diagnose(
    data: LayerData, outputs: Arrays, *, training: bool = True, scaled: bool = True
) -> Diagnosis:
    """Return the diagnosis of the outputs of a backward pass.

    Parameters
    ----------
    data : LayerData
        The inputs. Only inputs like those of :func:`diagnostic_data` distinguish all mistakes.
        If the inputs do not distinguish a mistake from others, the diagnosis names them all, or
        none.
    outputs : tuple of numpy.ndarray or None
        dx, dgamma and dbeta; None for an output that is not judged.
    training : bool
        Whether the statistics depend on x.
    scaled : bool
        Whether gamma was passed.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If an output has an element type without bounds, or a wrong shape.

    Examples
    --------
    >>> import numpy as np
    >>> from backnorm import batch_norm_backward
    >>> from backnorm.conformance.data import LayerData
    >>> x, dy = np.random.default_rng(0).standard_normal((2, 8, 4, 6, 6), dtype=np.float32)
    >>> mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3))
    >>> gamma, beta = np.array([2, -1, 3, 0.5], np.float32), np.zeros(4, np.float32)
    >>> dx, dgamma, dbeta = batch_norm_backward(x, dy, mean, variance, gamma, epsilon=1e-5)
    >>> data = LayerData(x, dy, mean, variance, gamma, beta, 1e-5, "NCX")
    >>> diagnose(data, (dx, dgamma, -dbeta)).says
    'dbeta has the wrong sign'
    """
    if not data.x.size:
        return _NO_ELEMENTS
    formula = backward_formula(data.normalization)
    ladder = gradient_ladder(data, training=training, scaled=scaled)
    results = results_of(dict(zip(GRADIENTS, outputs, strict=True)), ladder, data.axes)
    dx = results.get("dx")
    if dx is not None and dx.is_wrong and not dx.own.any():
        names = [each.name for each in results.values() if each.is_wrong and not each.own.any()]
        return Diagnosis("formula", tuple(f"{n}-zero" for n in names), sentence(names, "is 0"))
    channels = formula.inputs(data, training=training, scaled=scaled)

    def special() -> Diagnosis | None:
        options: dict[str, Any] = {"training": training, "scaled": scaled}
        return _of_other_inputs(data, results, partial(formula.inputs, **options), formula)

    found = _explained(formula, channels, results, special)
    if found.kind != "formula" and "dgamma" not in found.says and "dbeta" not in found.says:
        found = replace(found, says=found.says.replace("channel", data.normalization.row))
    return found


def diagnose_forward(
    data: LayerData, outputs: Mapping[str, Array | None], *, scaled: bool = True
) -> Diagnosis:
    """Return the diagnosis of the outputs of a forward pass in training.

    Parameters
    ----------
    data : LayerData
        The inputs. Only inputs like those of :func:`forward_diagnostic_data` distinguish all
        mistakes. If the inputs do not distinguish a mistake from others, the diagnosis names them
        all, or none.
    outputs : mapping
        y, mean and variance by name, and the inverse deviation and the running statistics of an
        operator; None or absent for an output that is not judged.
    scaled : bool
        Whether gamma and beta were passed.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If an output has an element type without bounds, or a wrong shape.
    """
    if not data.x.size:
        return _NO_ELEMENTS
    ladder, formula = forward_ladder(data, scaled=scaled), forward_formula(data.normalization)
    known = {name: outputs.get(name) for name in (*FORWARD_RESULTS, *MORE_FORWARD_RESULTS)}
    results = results_of(known, ladder, data.axes)
    return _explained(formula, formula.inputs(data, scaled=scaled), results, lambda: None)


@np.errstate(all="ignore")
def _explained(
    formula: Formula,
    channels: Channels,
    results: Mapping[str, Result],
    special: Callable[[], Diagnosis | None],
) -> Diagnosis:
    """Return the diagnosis of results.

    Parameters
    ----------
    formula : Formula
        The right formula.
    channels : Channels
        The inputs.
    results : mapping
        The results by name. One of them may be a tensor, the others have a number in each channel.
    special : callable
        Returns a diagnosis, or None, if no formula explains the results.
    """
    if not any(each.is_wrong for each in results.values()):
        return _RIGHT
    functions, words = formula.functions(channels), formula.words
    found = not_finite(results)
    known = [*functions.values()]
    known += [array for each in results.values() for array in (each.own, each.right)]
    if found is not None or not all(np.isfinite(each).all() for each in known):
        return found or unexplained(results)
    # Only the tensor has no words: its coefficients have them.
    tensor = next((each for each in results.values() if each.name not in words), None)
    others = [each for each in results.values() if each is not tensor]
    numbers = {each.name: Numbers.of(each) for each in others}
    right = formula.numbers(channels)
    terms = {}
    fit = None
    if tensor is not None:
        fit = Fit.of(tensor, list(functions.values()))
        numbers[tensor.name] = fit.numbers
        for name, own, unsure in zip(functions, fit.coefficients, fit.unsure, strict=True):
            terms[name] = Term(own, right[name], unsure)
    for each in others:
        terms[each.name] = Term(each.own[:, 0], each.right[:, 0], each.allowed[:, 0])

    def coefficients(values: Values) -> Array:
        return np.stack([values[name] for name in functions])

    def predicted(name: str, values: Values) -> Array:
        if fit is None or name != fit.result.name:
            return values[name][None]
        # A formula whose tensor is not a sum of the functions for each mistake has the tensor.
        is_known = name in values
        return fit.projected(values[name]) if is_known else fit.predicted(coefficients(values))

    def agrees(values: Values) -> bool:
        if fit is None:
            return True
        tensor = values.get(fit.result.name)
        return fit.agrees(coefficients(values)) if tensor is None else fit.is_near(tensor)

    def wrong(mistakes: tuple[Mistake, ...]) -> Values:
        return formula.wrong(*mistakes).numbers(channels)

    evidence = ratios(terms) | ({} if fit is None else {"residual": fit.residual})
    # The end of a tensor is tested first, because wrong elements at the end of memory also change
    # the fitted coefficients of a few channels.
    if tensor is None or not wrong_end(tensor):
        mistakes = formula.known_mistakes(channels)
        own = {name: term.own for name, term in terms.items()}
        # The coefficients, unless the formula has the tensor itself.
        changed: dict[str, Term] | None = terms
        if tensor is not None and tensor.name in right:
            changed = {each.name: terms[each.name] for each in others}
        elif fit is not None and not fit.is_sum.all():
            # No formula explains a tensor that is not a sum of multiples of the functions.
            changed = None
        found = named(numbers, wrong, predicted, agrees, mistakes, special=special, terms=changed)
        if found is None:
            partial_mistakes = formula.partial_mistakes(channels)
            found = named(numbers, wrong, predicted, agrees, partial_mistakes)
        for mistake in formula.fitted_mistakes(channels, own):
            found = found or named(numbers, wrong, predicted, agrees, [mistake])
    described: Mapping[str, Term] = terms
    part = partly_wrong(tensor, others)
    if found is None:
        found = truncated(tensor) if tensor is not None and tensor.is_wrong else None
        found = found or part
        if found is not None or (fit is not None and np.median(fit.is_sum) < 1):
            # The coefficients are not those of a formula.
            described = {n: each for n, each in terms.items() if n not in functions}
            if tensor is not None:
                whole = Term(tensor.own, tensor.right, tensor.allowed)
                described = {tensor.name: whole} | described
    if found is None and tensor is not None and described is not terms:
        largest = np.abs(tensor.right).max(1, keepdims=True)
        if (np.abs(tensor.own - tensor.right) > FEW_BITS * largest).any():
            found = misplaced(tensor, words[""])
    found = found or of_terms({words.get(n, n): each for n, each in described.items()})
    off_terms = frozenset(name for name, term in described.items() if term.off.any())
    found, places = found or unexplained(results), "" if part is None else part.says
    return replace(found, evidence=evidence, wrong=off_terms, places=places)


def _of_other_inputs(
    data: LayerData,
    results: Mapping[str, Result],
    inputs: Callable[[LayerData], Channels],
    formula: Formula,
) -> Diagnosis | None:
    """Return the diagnosis if gradients are right for inputs that differ from `data`.

    The differing inputs are those of known mistakes: x and dy are swapped, they are read in the
    other layout, groups have other channels, or the sums in dx are those of other elements.
    """
    mistakes = {"x-dy-swapped": ("x and dy are swapped", replace(data, x=data.dy, dy=data.x))}
    if len(data.normalization.layouts) > 1:
        layout = "NCX" if data.data_format == "NXC" else "NXC"
        says = f"x and dy are read as {layout}, not as {data.data_format}"
        mistakes["layout-ignored"] = says, _in_layout(data, layout)
    mistakes |= _of_other_groups(data)
    own = {name: each.own if name == "dx" else each.own[:, 0] for name, each in results.items()}
    errors: list[tuple[float, str, str]] = []

    def compare(name: str, says: str, rows: Mapping[str, Array], **changed: Array) -> None:
        found = own | changed
        error = max(relative_error(found[each], rows[each]) for each in results)
        errors.append((error, name, says))

    for name, (says, other) in mistakes.items():
        changed = {}
        if "dx" in results:
            dx = results["dx"].tensor.reshape(other.x.shape)
            changed["dx"] = other.axes.rows(dx, FLOAT64)
        compare(name, says, dict(formula.rows(inputs(other))), **changed)
    if data.normalization == BATCH_NORM:
        channels = inputs(data)
        for name, says, others in other_inputs(channels):
            compare(name, says, dict(formula.rows(others)))
        rows = dict(formula.rows(channels))
        if channels.training:
            of_image = dict(formula.rows(of_images(channels)))["dx"].reshape(rows["dx"].shape)
            says = "the sums in dx are those of each image alone, as in instance normalisation"
            compare("sums-of-each-image", says, rows | {"dx": of_image})
    error, name, says = min(errors)
    # The results are far from the right ones.
    of_right = max(relative_error(each.own, each.right) for each in results.values())
    rounding = max(float(each.rounding.max() / each.terms.max()) for each in results.values())
    is_near = error <= min(FEW_BITS, _ROUNDINGS * rounding) and error * MARGIN <= of_right
    return Diagnosis("formula", (name,), says) if is_near else None


def _of_other_groups(data: LayerData) -> dict[str, tuple[str, LayerData]]:
    """Return the mistakes in which groups have other channels, with the data of each."""
    groups, channels = data.normalization.groups, data.gamma.size
    if groups in (1, channels):
        return {}
    kind = replace(data.normalization, groups=channels // groups)
    other = replace(data, normalization=kind)
    mean, variance = other.axes.statistics_of(other.axes.rows(data.x))
    says = f"groups have {groups} channels, not {channels // groups}"
    return {"groups-swapped": (says, replace(other, mean=mean, variance=variance))}


def _in_layout(data: LayerData, layout: str) -> LayerData:
    """Return the data, with the memory of x and dy read as if these arrays were in `layout`."""
    shape = in_layout(np.moveaxis(data.x, data.channel_axis, 1).shape, layout)
    x, dy = data.x.reshape(shape), data.dy.reshape(shape)
    return replace(data, x=x, dy=dy, data_format=layout)
