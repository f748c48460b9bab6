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
from backnorm.conformance.data import LayerData, in_layout, realistic_data, rows_of
from backnorm.conformance.formula import (
    BACKWARD,
    FEW_BITS,
    FORWARD,
    Channels,
    Formula,
    Mistake,
    Values,
    of_images,
    other_inputs,
)
from backnorm.conformance.judge import FORWARD_RESULTS, GRADIENTS, MORE_FORWARD_RESULTS
from backnorm.conformance.ladder import ForwardLadder, GradientLadder

__all__ = [
    "DIAGNOSTIC",
    "FORWARD_DIAGNOSTIC",
    "Diagnosis",
    "diagnose",
    "diagnose_forward",
    "diagnostic_data",
    "forward_diagnostic_data",
]

Array = np.ndarray
Arrays = tuple[Array | None, Array | None, Array | None]

#: The shapes of diagnostic data, in each layout.
DIAGNOSTIC = (7, 13, 3, 13)
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
    )
    mean, variance = data.mean.astype(float), data.variance.astype(float)
    return replace(
        data,
        mean=(mean + rng.uniform(0.2, 0.6, mean.size)).astype(data.mean.dtype),
        variance=(variance * rng.uniform(1.3, 2.5, mean.size)).astype(data.variance.dtype),
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
    x, dy, mean, variance, gamma = data.backward_inputs
    operands = x, dy, mean, variance, gamma if scaled else None
    ladder = GradientLadder.of(*operands, training=training, **data.options)
    results = results_of(dict(zip(GRADIENTS, outputs, strict=True)), ladder, data.channel_axis)
    dx = results.get("dx")
    if dx is not None and dx.is_wrong and not dx.own.any():
        names = [each.name for each in results.values() if each.is_wrong and not each.own.any()]
        return Diagnosis("formula", tuple(f"{n}-zero" for n in names), sentence(names, "is 0"))
    channels = Channels.of(data, training=training, scaled=scaled)
    special = partial(_of_other_inputs, data, results, channels)
    return _explained(BACKWARD, channels, results, special)


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
    ladder = ForwardLadder.of_layer(data, scaled=scaled)
    known = {name: outputs.get(name) for name in (*FORWARD_RESULTS, *MORE_FORWARD_RESULTS)}
    results = results_of(known, ladder, data.channel_axis)
    return _explained(FORWARD, Channels.of(data, scaled=scaled), results, lambda: None)


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
        if fit is not None and name == fit.result.name:
            return fit.predicted(coefficients(values))
        return values[name][None]

    def agrees(values: Values) -> bool:
        return fit is None or fit.agrees(coefficients(values))

    def wrong(mistakes: tuple[Mistake, ...]) -> Values:
        return formula.wrong(*mistakes).numbers(channels)

    evidence = ratios(terms) | ({} if fit is None else {"residual": fit.residual})
    # The end of a tensor is tested first, because wrong elements at the end of memory also change
    # the fitted coefficients of a few channels.
    if tensor is None or not wrong_end(tensor):
        mistakes = formula.known_mistakes(channels)
        own = {name: term.own for name, term in terms.items()}
        # No formula explains a tensor that is not a sum of multiples of the functions.
        is_sum = fit is None or bool(fit.is_sum.all())
        off = {name for name, term in terms.items() if term.off.mean() > 0.5} if is_sum else None
        found = named(numbers, wrong, predicted, agrees, mistakes, special=special, wrong=off)
        if found is None:
            partial_mistakes = formula.partial_mistakes(channels)
            found = named(numbers, wrong, predicted, agrees, partial_mistakes)
        for mistake in formula.fitted_mistakes(channels, own):
            found = found or named(numbers, wrong, predicted, agrees, [mistake])
    described: Mapping[str, Term] = terms
    if found is None:
        found = truncated(tensor) if tensor is not None and tensor.is_wrong else None
        found = found or partly_wrong(tensor, others)
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
    return replace(found or unexplained(results), evidence=evidence, wrong=off_terms)


def _of_other_inputs(
    data: LayerData, results: Mapping[str, Result], channels: Channels
) -> Diagnosis | None:
    """Return the diagnosis if gradients are right for inputs that differ from `data`, as if x and
    dy were swapped, or if the sums in dx are those of other elements.
    """
    own = {name: each.own if name == "dx" else each.own[:, 0] for name, each in results.items()}
    # The results are far from the right ones.
    of_right = max(relative_error(each.own, each.right) for each in results.values())
    errors: list[tuple[float, str, str]] = []

    def compare(
        name: str, says: str, found: Mapping[str, Array], rows: Mapping[str, Array]
    ) -> None:
        error = max(relative_error(found[each], rows[each]) for each in results)
        errors.append((error, name, says))

    for name, says, other in other_inputs(channels):
        compare(name, says, own, dict(BACKWARD.rows(other)))
    rows = dict(BACKWARD.rows(channels))
    if channels.training:
        of_image = dict(BACKWARD.rows(of_images(channels)))["dx"].reshape(rows["dx"].shape)
        says = "the sums in dx are those of each image alone, as in instance normalisation"
        compare("sums-of-each-image", says, own, rows | {"dx": of_image})
    layout = "NCX" if data.data_format == "NXC" else "NXC"
    other_data = _in_layout(data, layout)
    x, dy = (rows_of(tensor, other_data.channel_axis) for tensor in (other_data.x, other_data.dy))
    if "dx" in results:
        dx = results["dx"].tensor.reshape(other_data.x.shape)
        own = own | {"dx": rows_of(dx, other_data.channel_axis)}
    says = f"x and dy are read as {layout}, not as {data.data_format}"
    compare("layout-ignored", says, own, dict(BACKWARD.rows(replace(channels, x=x, dy=dy))))
    error, name, says = min(errors)
    rounding = max(float(each.rounding.max() / each.terms.max()) for each in results.values())
    is_near = error <= min(FEW_BITS, _ROUNDINGS * rounding) and error * MARGIN <= of_right
    return Diagnosis("formula", (name,), says) if is_near else None


def _in_layout(data: LayerData, layout: str) -> LayerData:
    """Return the data, with the memory of x and dy read as if these arrays were in `layout`."""
    shape = in_layout(np.moveaxis(data.x, data.channel_axis, 1).shape, layout)
    x, dy = data.x.reshape(shape), data.dy.reshape(shape)
    return replace(data, x=x, dy=dy, data_format=layout)
