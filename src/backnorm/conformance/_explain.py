"""Find the diagnosis of wrong results: the steps that both operations share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from backnorm.conformance._fit import Fit, Numbers, Result
from backnorm.conformance._naming import (
    FEW_BITS,
    Diagnosis,
    Term,
    Values,
    described,
    named,
    not_finite,
    ratios,
    unexplained,
)
from backnorm.conformance._places import misplaced, partly_wrong, truncated, wrong_end
from backnorm.conformance.formula import Mistake


@np.errstate(all="ignore")
def explained(
    results: Mapping[str, Result],
    functions: Mapping[str, np.ndarray],
    formula: Callable[[tuple[Mistake, ...]], Values],
    mistakes: Sequence[Mistake],
    words: Mapping[str, str],
    special: Callable[[], Diagnosis | None] = lambda: None,
) -> Diagnosis:
    """Return the diagnosis of results, of which at least one is wrong.

    Parameters
    ----------
    results : mapping
        The results by name. One of them may be a tensor, the others have a number in each channel.
    functions : mapping
        By the name of the coefficient, a function of an element, of shape (C, M). The tensor is a
        sum of multiples of the functions.
    formula : callable
        Takes mistakes; returns the coefficients and the numbers of the other results, by name.
    mistakes : sequence of Mistake
        Those that are looked for.
    words : mapping
        By name, the words for a coefficient or a result. The key "" has the words for all
        functions.
    special : callable
        Returns a diagnosis, or None, if no formula explains the results.
    """
    found = not_finite(results)
    known = [*functions.values()]
    known += [array for each in results.values() for array in (each.own, each.right)]
    if found is not None or not all(np.isfinite(each).all() for each in known):
        return found or unexplained(results)
    # Only the tensor has no words: its coefficients have them.
    tensor = next((each for each in results.values() if each.name not in words), None)
    others = [each for each in results.values() if each is not tensor]
    numbers = {each.name: Numbers.of(each) for each in others}
    right = formula(())
    terms = {}
    fit = None
    if tensor is not None:
        fit = Fit.of(tensor, list(functions.values()))
        numbers[tensor.name] = fit.numbers
        for name, own, unsure in zip(functions, fit.coefficients, fit.unsure, strict=True):
            terms[name] = Term(own, right[name], unsure)
    for each in others:
        terms[each.name] = Term(each.own[:, 0], each.right[:, 0], each.allowed[:, 0])

    def coefficients(values: Values) -> np.ndarray:
        return np.stack([values[name] for name in functions])

    def predicted(values: Values) -> Values:
        found = {each.name: values[each.name][None] for each in others}
        if tensor is not None and fit is not None:
            found[tensor.name] = fit.predicted(coefficients(values))
        return found

    def agrees(values: Values) -> bool:
        return fit is None or fit.agrees(coefficients(values))

    evidence = ratios(terms) | ({} if fit is None else {"residual": fit.residual})
    # The end of a tensor is tested first, because wrong elements at the end of memory also change
    # the fitted coefficients of a few channels.
    if tensor is None or not wrong_end(tensor):
        found = named(numbers, formula, predicted, agrees, mistakes) or special()
    if found is None and tensor is not None and tensor.is_wrong:
        found = truncated(tensor)
    found = found or partly_wrong(tensor, others)
    if found is None and tensor is not None and fit is not None and np.median(fit.is_sum) < 1:
        largest = np.abs(tensor.right).max(1, keepdims=True)
        if (np.abs(tensor.own - tensor.right) > FEW_BITS * largest).any():
            found = misplaced(tensor, words[""])
        # The coefficients of a tensor with few bits are not exact enough to be described.
        terms = {n: each for n, each in terms.items() if n not in functions}
        terms = {tensor.name: Term(tensor.own, tensor.right, tensor.allowed)} | terms
    found = found or described({words.get(n, n): each for n, each in terms.items()})
    return replace(found or unexplained(results), evidence=evidence)
