"""Bind a checked call to an executable.

Later calls with equal shapes, types and options reuse this executable.

A dialect's own checks of shapes, types and options include those that backnorm's operation would
make. So this module makes the `Problem` without further checks. In each call, the executable checks
that variance + epsilon is positive, and that an array passed for an output can hold it. If the
executable raises an error, the error is raised again with the dialect's names of the arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from backnorm.arrays import is_plain
from backnorm.dialects._call import Call, CanonicalCall
from backnorm.dialects._check import check_memory
from backnorm.dialects._statistics import given_statistics, native, statistics_of
from backnorm.dtypes import FLOAT32, FLOAT64, is_16_bit, rounded
from backnorm.errors import ArgumentError
from backnorm.executable import executable, run
from backnorm.interfaces import Results
from backnorm.problem import Metadata, Problem
from backnorm.signature import SIGNATURES

Arrays = Mapping[str, np.ndarray]
Convert = Callable[[Any], np.ndarray]
Finish = Callable[[Call, Arrays, dict[str, np.ndarray]], dict[str, np.ndarray]]
#: ``planned(values, memory)`` runs a planned call: see `planned_call`.
PlannedCall = Callable[..., Any]

# Maps a result to the inputs that may determine its element type. The first of these inputs that is
# present determines the type.
_TYPED_LIKE = {
    "dgamma": ("gamma", "mean"),
    "dbeta": ("beta", "gamma", "mean"),
    "mean": ("running_mean",),
    "variance": ("running_variance",),
}
_STATISTICS = ("mean", "variance")
# All calls can share these arrays, because they have no elements to write to.
_EMPTY = np.empty(0, FLOAT32)
_RESERVE = np.empty(0, np.uint8)
# How a call returns its outputs, by the class of what it returns; another class is one of named
# tuples. Making a named tuple by `tuple.__new__` takes half as long as by the method `_make` of the
# tuple's class.
_WRAPPED: Mapping[type, Callable[[Sequence[Any]], Any]] = {
    tuple: tuple,
    np.ndarray: operator.itemgetter(0),
}
_new = tuple.__new__


def planned_call(
    call: Call,
    canonical: CanonicalCall,
    finish: Finish,
    names: Sequence[str],
    outputs: Sequence[str | None],
    outcome: type = tuple,
) -> PlannedCall:
    """Return the function that runs a checked call, and later calls with equal shapes, types and
    options.

    Parameters
    ----------
    call : Call
    canonical : CanonicalCall
    finish : callable
        As the argument of `operator`.
    names : sequence of str
        The names of the values that will be passed to the function.
    outputs : sequence of str or None
        The names of the outputs that it returns; it returns None for None.
    outcome : type
        The class of the value that it returns: a class of tuples, or ``numpy.ndarray`` for a single
        output.
    """
    schema, problem = call.schema, _problem(call, canonical)
    planned = executable(problem, call.inputs[canonical.inputs["x"]])
    execute: Callable[..., Results] = partial(run, problem)
    into = execute
    if planned.order == tuple(range(len(problem.shape))) and all(
        map(is_plain, call.inputs.values())
    ):
        execute, into = planned.plain, planned.into
    # `places` has the position of each operand in the tuple `(*values, None)`. For an operand that
    # the call does not pass, it is the position of the final None.
    places = [
        [*names].index(canonical.inputs[role]) if role in canonical.inputs else len(names)
        for role in problem.signature.names
    ]
    pick = operator.itemgetter(*places)
    prepared = _preparation(call, canonical, problem)
    running = _running(call, names, problem, canonical.weight)
    numbers = {"momentum": canonical.weight} if problem.running else {}
    out = schema.words["out"]
    memory_name = out if schema.takes_memory else schema.words.get("memory_dx", "")
    # The position of the value that is memory for the first output.
    memory_place = None
    if memory_name in names and not canonical.blended:
        memory_place = [*names].index(memory_name)
    words = {**schema.words, **canonical.inputs}
    # From here on, `call` has no arrays, because functions that are kept refer to it.
    metadata = {name: Metadata(a.shape, a.dtype) for name, a in call.inputs.items()}
    call = replace(call, inputs=metadata)
    of_outputs = {tensor.name: tensor.role for tensor in schema.outputs}
    roles = ["absent" if name is None else of_outputs[name] for name in outputs]
    known, select = _selection(call, canonical, problem, roles)
    finished = _finishing(call, canonical, finish, names, roles, known)
    wrapped = _WRAPPED.get(outcome) or partial(_new, outcome)

    def repeated(values: Sequence[Any], memory: Any = None) -> Any:
        """Return the outputs of the call for other values, in the order of `names`.

        The inputs among the values must have the shapes and types of the arrays in `call.inputs`.
        `memory`, if given, is the array to which the first output is written.
        """
        operands = pick((*values, None))
        if prepared is not None:
            operands = prepared(operands)
        copies = () if running is None else running(values)
        if numbers:
            # The last operands are the running statistics. Copies replace them, because the kernel
            # updates the running statistics in place.
            operands = (*operands[: -len(copies)], *copies)
        if memory_place is not None and memory is None:
            memory = values[memory_place]
        try:
            if memory is None:
                results = execute(operands, None, numbers)
            else:
                check_memory(out, memory)
                results = into(operands, memory, numbers)
        except ArgumentError as error:
            raise error.in_words(words) from None
        found = select((*results, *copies, _EMPTY, _RESERVE, None))
        return wrapped(found if finished is None else finished(values, found))

    return repeated


def _preparation(
    call: Call, canonical: CanonicalCall, problem: Problem
) -> Callable[[Sequence[Any]], tuple[Any, ...]] | None:
    """Return the function that converts operands to the executable's element types, and computes
    statistics that are absent; None if the executable takes all operands as they are.
    """
    dtype = problem.statistics_dtype
    converted = [
        role
        for role, name in canonical.inputs.items()
        if role not in ("x", "dy") and native(call.inputs[name]) != dtype
    ]
    if not (converted or canonical.recomputes):
        return None

    def prepared(operands: Sequence[Any]) -> tuple[Any, ...]:
        values = dict(zip(problem.signature.names, operands, strict=True))
        for role in converted:
            values[role] = values[role].astype(dtype)
        if canonical.recomputes:
            statistics = statistics_of(values["x"], canonical.channel_axes, canonical.epsilon)
            values["mean"], values["variance"] = statistics
        return tuple(values.values())

    return prepared


def _running(
    call: Call, names: Sequence[str], problem: Problem, weight: float | None
) -> Callable[[Sequence[Any]], tuple[np.ndarray, ...]] | None:
    """Return the function that copies the running statistics from the values to new memory.

    If `weight`, the weight of the batch, is 1, the old running statistics have no effect, and may
    be NaN or absent. The function then returns zeros.
    """
    dtype, channels = problem.statistics_dtype, problem.channels
    if weight is None:
        return None
    if weight == 1.0:
        return lambda _: (np.zeros(channels, dtype), np.zeros(channels, dtype))
    places = [[*names].index(call.schema.words[f"running_{role}"]) for role in _STATISTICS]
    return lambda values: tuple([values[place].astype(dtype) for place in places])


def _result(
    call: Call, canonical: CanonicalCall, problem: Problem, name: str
) -> tuple[str, Convert | None]:
    """Return the role of a result, and the function that converts it (None: no conversion)."""
    role = "inverse_deviation" if name == "variance" and canonical.inverse_std else name
    typed = _typed(call, problem, name)
    if not any(t.role == role and t.kind == "kept" for t in call.schema.outputs):
        return role, typed
    shape = call.kept_shape
    if typed is None:
        return role, operator.methodcaller("reshape", shape)
    return role, lambda value: typed(value).reshape(shape)


def _typed(call: Call, problem: Problem, name: str) -> Convert | None:
    """Return the function that rounds a per-channel result to its type in the dialect. Return None
    if the kernel's result already has this type, or if no input determines the type.
    """
    dtype = _type_of_result(call, name)
    if dtype is None or dtype == problem.statistics_dtype:
        return None
    return lambda value: rounded(value, dtype)


def _selection(
    call: Call,
    canonical: CanonicalCall,
    problem: Problem,
    roles: Sequence[str],
) -> tuple[list[str], Callable[[Results], tuple[Any, ...]]]:
    """Return those of the outputs' `roles` that the canonical results have, and the function that
    takes the canonical results and returns these outputs.

    The canonical results are the kernel's, the running statistics if there are some, and what
    `planned_call` adds.
    """
    made = [_result(call, canonical, problem, result.name) for result in problem.signature.results]
    if canonical.weight is not None:
        made += [(f"running_{role}", _typed(call, problem, role)) for role in _STATISTICS]
    made += [("empty", None), ("reserve", None), ("absent", None)]
    places = {role: (place, convert) for place, (role, convert) in enumerate(made)}
    known = [role for role in roles if role in places]
    recipes = [places[role] for role in known]
    if len(recipes) > 1 and all(convert is None for _, convert in recipes):
        return known, operator.itemgetter(*(place for place, _ in recipes))
    return known, lambda results: tuple(
        [
            results[place] if convert is None else convert(results[place])
            for place, convert in recipes
        ]
    )


def _finishing(
    call: Call,
    canonical: CanonicalCall,
    finish: Finish,
    names: Sequence[str],
    roles: Sequence[str],
    known: Sequence[str],
) -> Callable[[Sequence[Any], Sequence[Any]], list[Any]] | None:
    """Return the function that makes all outputs of a call, in the order of `roles`, of its values
    and of the outputs whose roles are `known`; None if these outputs are all, and no memory has to
    be written.
    """
    has_memory = any(call.by_role(role) is not None for role in ("memory_dgamma", "memory_dbeta"))
    missing = {*roles} - {*known}
    if not (missing or canonical.blended or has_memory):
        return None

    def finished(values: Sequence[Any], found: Sequence[Any]) -> list[Any]:
        named = dict(zip(names, values, strict=True))
        arrays = {name: named[name] for name in call.inputs}
        results = dict(zip(known, found, strict=True))
        if canonical.operation == "inference":
            of_roles = {role: arrays[canonical.inputs[role]] for role in _STATISTICS}
            results |= given_statistics(missing, **of_roles, epsilon=canonical.epsilon)
        results = finish(call, arrays, results)
        try:
            return [results[role] for role in roles]
        except KeyError as error:
            (role,) = error.args
            schema = call.schema
            name = next(tensor.name for tensor in schema.outputs if tensor.role == role)
            raise ValueError(
                f"{schema.dialect}.{schema.op}: no result has the role {role} of {name}: an "
                "attribute must have the role of a weight, or `finish` must add the result"
            ) from None

    return finished


def _problem(call: Call, canonical: CanonicalCall) -> Problem:
    """Return the problem of a checked call."""
    x = call.inputs[canonical.inputs["x"]]
    return Problem(
        canonical.operation,
        x.shape,
        canonical.channel_axes,
        native(x),
        _statistics_type(call, canonical, native(x)),
        has_gamma="gamma" in canonical.inputs,
        has_beta="beta" in canonical.inputs,
        epsilon=canonical.epsilon,
        training=canonical.training or canonical.operation == "forward",
        inverse=canonical.inverse_std,
        running=bool(canonical.weight),
        biased=bool(canonical.weight) and not call.schema.unbiased,
        arithmetic=canonical.arithmetic,
    )


def _statistics_type(call: Call, canonical: CanonicalCall, dtype: np.dtype) -> np.dtype:
    """Return the element type in which kernels read and write statistics and parameters.

    The per-channel inputs of a call all have the same type, or they have float32 and one 16-bit
    type. If the results have several types, kernels write float64, and each result is then rounded
    to its type.
    """
    inputs = {
        native(call.inputs[name])
        for role, name in canonical.inputs.items()
        if role not in ("x", "dy")
    }
    determined = (_type_of_result(call, r.name) for r in SIGNATURES[canonical.operation].results)
    results = {dtype for dtype in determined if dtype is not None}
    types = inputs | results or {FLOAT32 if is_16_bit(dtype) else dtype}
    if len(types) == 1 and not canonical.recomputes:
        (common,) = types
        return common
    # If the per-channel inputs have several types, these are float32 and one 16-bit type, and
    # float32 can represent the values of both.
    is_narrow = canonical.operation != "backward" and len(inputs) > 1 and results <= {FLOAT32}
    return FLOAT32 if is_narrow else FLOAT64


def _type_of_result(call: Call, role: str) -> np.dtype | None:
    """Return the element type of a per-channel result, or None if no input determines this type."""
    for name in _TYPED_LIKE.get(role, ()):
        array = call.by_role(name)
        if array is not None:
            return native(array)
    return None
