"""Run a checked call: build its Problem in the dialect's words and execute it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from backnorm import execute
from backnorm.dialects._call import Call, CanonicalCall
from backnorm.dialects._statistics import common_type, rounded, variance_of_inverse, widened
from backnorm.dtypes import FLOAT64, element_type
from backnorm.problem import Problem, backward_problem, forward_problem, inference_problem

__all__ = ["run"]

_PARAMETERS = ("mean", "variance", "gamma", "beta")
Arrays = dict[str, np.ndarray]
_Runner = Callable[[Call, CanonicalCall, Arrays, Arrays], Arrays]


def run(call: Call, canonical: CanonicalCall) -> Arrays:
    """Return the results by the dialect's output names (also those that were not requested)."""
    rank = call.inputs[canonical.inputs["x"]].ndim
    data = {
        role: canonical.to_canonical(role, call.inputs[name])
        for role, name in canonical.inputs.items()
    }
    parameters = {role: data.pop(role) for role in _PARAMETERS if role in data}
    out = call.out
    if canonical.channel_axis is not None and out is not None and out.ndim == rank:
        call = replace(call, out=canonical.to_canonical("dx", out))
    results = _RUNNERS[canonical.operation](call, canonical, data, parameters)
    results = {
        role: out
        if array is call.out and out is not None
        else canonical.from_canonical(role, array, rank)
        for role, array in results.items()
    }
    names = {tensor.role: tensor.name for tensor in call.schema.outputs}
    return {names[role]: array for role, array in results.items() if role in names}


def _backward(call: Call, canonical: CanonicalCall, data: Arrays, parameters: Arrays) -> Arrays:
    x, dy, words = data["x"], data["dy"], call.schema.words
    common = common_type(parameters)
    problem = backward_problem(
        x,
        dy,
        common["mean"],
        common["variance"],
        common.get("gamma"),
        epsilon=canonical.epsilon,
        data_format=canonical.data_format,
        training=canonical.training,
        words=words,
    )
    if canonical.inverse_std or common is not parameters:
        problem, common = _wide(problem, parameters)
    if canonical.inverse_std:
        common["variance"] = variance_of_inverse(common["variance"])
    dx, dgamma, dbeta, _ = execute.backward(
        execute.planned(problem, x),
        x,
        dy,
        common["mean"],
        common["variance"],
        common.get("gamma"),
        out=call.out,
        words=words,
    )
    return {
        "dx": dx,
        "dgamma": rounded(dgamma, _result_type(call, "gamma", "mean")),
        "dbeta": rounded(dbeta, _result_type(call, "beta", "gamma", "mean")),
    }


def _forward(call: Call, canonical: CanonicalCall, data: Arrays, parameters: Arrays) -> Arrays:
    x, words = data["x"], call.schema.words
    common = common_type(parameters)
    running = call.by_role("running_mean")
    problem = forward_problem(
        x,
        common.get("gamma"),
        common.get("beta"),
        epsilon=canonical.epsilon,
        data_format=canonical.data_format,
        statistics_dtype=None if running is None else element_type(running.dtype),
        words=words,
    )
    if running is not None and element_type(running.dtype) != problem.statistics_dtype:
        problem, common = _wide(problem, parameters)
    y, mean, variance, _ = execute.forward(
        execute.planned(problem, x),
        x,
        common.get("gamma"),
        common.get("beta"),
        out=call.out,
        words=words,
    )
    mean_type = problem.statistics_dtype if running is None else _result_type(call, "running_mean")
    variance_type = mean_type if running is None else _result_type(call, "running_variance")
    return {
        "y": y,
        "mean": rounded(mean, mean_type),
        "variance": rounded(variance, variance_type),
    }


def _inference(call: Call, canonical: CanonicalCall, data: Arrays, parameters: Arrays) -> Arrays:
    x, words = data["x"], call.schema.words
    common = common_type(parameters)
    problem = inference_problem(
        x,
        common["mean"],
        common["variance"],
        common.get("gamma"),
        common.get("beta"),
        epsilon=canonical.epsilon,
        data_format=canonical.data_format,
        words=words,
    )
    y = execute.inference(
        execute.planned(problem, x),
        x,
        common["mean"],
        common["variance"],
        common.get("gamma"),
        common.get("beta"),
        out=call.out,
        words=words,
    )
    return {"y": y}


_RUNNERS: dict[str, _Runner] = {
    "backward": _backward,
    "forward": _forward,
    "inference": _inference,
}


def _wide(problem: Problem, parameters: Arrays) -> tuple[Problem, Arrays]:
    """Return the validated problem with float64 parameters and parameter gradients.

    Those the caller's types cannot hold on the way; results are then rounded once.
    """
    return replace(problem, statistics_dtype=FLOAT64), widened(parameters)


def _result_type(call: Call, *roles: str) -> np.dtype:
    """Return the element type of the first of the inputs in `roles` that is given."""
    for role in roles:
        array = call.by_role(role)
        if array is not None:
            dtype = element_type(array.dtype)
            assert dtype is not None
            return dtype
    raise AssertionError(roles)
