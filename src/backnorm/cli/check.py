"""Compare the outputs of a dialect's call with the oracle."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from backnorm import reference
from backnorm.conformance.judge import Verdict, judge
from backnorm.dialects.registry import CanonicalCall

__all__ = ["check"]


def check(
    canonical: CanonicalCall,
    inputs: Mapping[str, np.ndarray],
    outputs: Mapping[str, np.ndarray],
) -> dict[str, Verdict]:
    """Return a verdict for each output that the canonical operation has, by the dialect's names.

    Outputs that only the dialect has, such as running statistics, have no exact counterpart and
    no verdict.

    Parameters
    ----------
    canonical : CanonicalCall
        What the call means.
    inputs, outputs : mapping of str to numpy.ndarray
        By the dialect's names.
    """
    given = canonical.arrays(inputs)
    exact = _exact(canonical, given)
    verdicts = {}
    for role, name in canonical.outputs.items():
        terms = getattr(exact, f"{role}_terms")
        verdicts[name] = judge(
            role,  # type: ignore[arg-type]
            canonical.as_canonical(role, outputs[name]),
            getattr(exact, role),
            terms,
            given["x"].dtype,
            arithmetic=canonical.arithmetic,
        )
    return verdicts


def _exact(
    canonical: CanonicalCall, given: Mapping[str, np.ndarray]
) -> reference.ExactGradients | reference.ExactNormalized | reference.ExactOutput:
    x, gamma, beta = given["x"], given.get("gamma"), given.get("beta")
    epsilon, data_format = canonical.epsilon, canonical.data_format
    if canonical.operation == "forward":
        return reference.forward(x, gamma, beta, epsilon=epsilon, data_format=data_format)
    mean, variance = given["mean"], given["variance"]
    if canonical.operation == "inference":
        return reference.inference(
            x, mean, variance, gamma, beta, epsilon=epsilon, data_format=data_format
        )
    return reference.backward(
        x,
        given["dy"],
        mean,
        variance,
        gamma,
        epsilon=epsilon,
        data_format=data_format,
        training=canonical.training,
    )
