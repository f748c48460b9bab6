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
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from backnorm.arrays import is_plain
from backnorm.dialects._call import Call, CanonicalCall
from backnorm.dialects._check import check_memory
from backnorm.dialects._statistics import native, statistics_of
from backnorm.dtypes import FLOAT32, FLOAT64, is_16_bit, rounded
from backnorm.errors import ArgumentError
from backnorm.executable import executable, run
from backnorm.interfaces import Results
from backnorm.problem import Metadata, Problem
from backnorm.signature import SIGNATURES

Arrays = Mapping[str, np.ndarray]
Convert = Callable[[Any], np.ndarray]
Finish = Callable[[Call, Arrays, dict[str, np.ndarray]], dict[str, np.ndarray]]

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
# The classes of values that a call may return, besides named tuples.
_PLAIN = (tuple, np.ndarray)
# Making a named tuple by `tuple.__new__` takes half as long as by the method `_make` of the tuple's
# class.
_new = tuple.__new__


@dataclass(frozen=True, slots=True, eq=False)
class PlannedCall:
    """A checked call of a dialect's operator, with the executable that computes it. All calls with
    the same shapes, types and options share one `PlannedCall`.

    Attributes
    ----------
    call : Call
        Its inputs are shapes and types.
    names : sequence of str
        The names of the values that are passed to the `PlannedCall`.
    canonical : CanonicalCall
    problem : Problem
    run, execute : callable
        `executable.run` for this problem, and the function for arrays of this layout.
    operands : callable
        Maps the values of a call, followed by None, to the canonical operands.
    converted : tuple of str, or None
        The operands whose element type is not the executable's; None if the executable takes all
        operands as they are.
    memory : int or None
        The position of the value that is memory for the first output.
    running : callable or None
        Maps the values to copies of the running statistics before their update.
    numbers : mapping of str to float
        The weight of the batch, if the executable updates the running statistics.
    results : tuple of (str, callable or None)
        For each canonical result, each running statistic and empty arrays: the role, and the
        function that converts the array to the dialect's type and shape.
    outputs : tuple of str or None
        The names of the outputs to return.
    select : callable
        Maps these results to the outputs.
    finish : callable or None
        `Operator.finish`, if it must complete or write these results.
    outcome : type
        The class of the value that a call returns: a class of tuples, or ``numpy.ndarray`` for a
        single output.
    """

    call: Call
    names: Sequence[str]
    canonical: CanonicalCall
    problem: Problem
    run: Callable[..., Results]
    execute: Callable[..., Results]
    operands: Callable[[Any], tuple[Any, ...]]
    converted: tuple[str, ...] | None
    memory: int | None
    running: Callable[[Sequence[Any]], tuple[np.ndarray, ...]] | None
    numbers: Mapping[str, float | None]
    results: tuple[tuple[str, Convert | None], ...]
    outputs: tuple[str | None, ...]
    select: Callable[[Results], Any]
    finish: Finish | None
    outcome: type

    def __call__(self, values: Sequence[Any], memory: Any = None) -> Any:
        """Return the outputs of the call for other values, in the order of `names`.

        The inputs among the values must have the shapes and types of the arrays in `call.inputs`.
        `memory`, if given, is the array to which the first output is written.
        """
        operands = self.operands((*values, None))
        if self.converted is not None:
            operands = self._prepared(operands, self.converted)
        running = () if self.running is None else self.running(values)
        if self.numbers:
            # The last operands are the running statistics. Copies replace them, because the kernel
            # updates the running statistics in place.
            operands = (*operands[: -len(running)], *running)
        if self.memory is not None and memory is None:
            memory = values[self.memory]
        try:
            if memory is None:
                results = self.execute(operands, None, self.numbers)
            else:
                check_memory(self.call.schema.words["out"], memory)
                results = self.run(operands, memory, self.numbers)
        except ArgumentError as error:
            words = {**self.call.schema.words, **self.canonical.inputs}
            raise error.in_words(words) from None
        results = (*results, *running, _EMPTY, _RESERVE, None)
        found = self.select(results) if self.finish is None else self._finished(values, results)
        return found if self.outcome in _PLAIN else _new(self.outcome, found)

    def _prepared(self, operands: Sequence[Any], converted: Sequence[str]) -> tuple[Any, ...]:
        """Return operands of the executable's element types; compute statistics that are absent."""
        values = dict(zip(self.problem.signature.names, operands, strict=True))
        for name in converted:
            values[name] = values[name].astype(self.problem.statistics_dtype)
        canonical = self.canonical
        if canonical.recomputes:
            statistics = statistics_of(values["x"], canonical.channel_axes, canonical.epsilon)
            values["mean"], values["variance"] = statistics
        return tuple(values.values())

    def _finished(self, values: Sequence[Any], results: Results) -> Any:
        """Return the outputs that `finish` makes of the canonical results."""
        assert self.finish is not None
        schema = self.call.schema
        named = dict(zip(self.names, values, strict=True))
        arrays = {name: named[name] for name in self.call.inputs}
        by_role = {
            role: value if convert is None else convert(value)
            for (role, convert), value in zip(self.results, results, strict=True)
        }
        finished = self.finish(self.call, arrays, by_role)
        roles = {tensor.name: tensor.role for tensor in schema.outputs}
        try:
            outputs = [None if name is None else finished[roles[name]] for name in self.outputs]
        except KeyError as error:
            (role,) = error.args
            name = next(tensor.name for tensor in schema.outputs if tensor.role == role)
            raise ValueError(
                f"{schema.dialect}.{schema.op}: no result has the role {role} of {name}: "
                "`translate` must set `weight` for running statistics, or `finish` must add it"
            ) from None
        return outputs[0] if self.outcome is np.ndarray else tuple(outputs)


def planned_call(
    call: Call,
    canonical: CanonicalCall,
    finish: Finish,
    names: Sequence[str],
    outputs: Sequence[str | None],
    outcome: type = tuple,
) -> PlannedCall:
    """Return the `PlannedCall` of a checked call. Later calls with equal shapes, types and options
    reuse it.

    Parameters
    ----------
    call : Call
    canonical : CanonicalCall
    finish : callable
    names : sequence of str
        The names of the values that will be passed to the result.
    outputs : sequence of str or None
        The names of the outputs that it returns; it returns None for None.
    outcome : type
        As the field of `PlannedCall`.
    """
    schema, problem = call.schema, _problem(call, canonical)
    planned = executable(problem, call.inputs[canonical.inputs["x"]])
    in_place = planned.order == tuple(range(len(problem.shape))) and all(
        map(is_plain, call.inputs.values())
    )
    by_any_layout = partial(run, problem)
    # `PlannedCall.__call__` makes the tuple `(*values, None)`. `places` has the position of each
    # operand in this tuple. For an operand that the call does not pass, it is the position of the
    # final None.
    places = [
        [*names].index(canonical.inputs[role]) if role in canonical.inputs else len(names)
        for role in problem.signature.names
    ]
    converted = tuple(
        role
        for role, name in canonical.inputs.items()
        if role not in ("x", "dy") and native(call.inputs[name]) != problem.statistics_dtype
    )
    memory = schema.words["out"] if schema.takes_memory else schema.words.get("memory_dx", "")
    results = [
        _result(call, canonical, problem, result.name) for result in problem.signature.results
    ]
    running = _running(call, names, problem, canonical.weight)
    if running is not None:
        results += [(f"running_{role}", _typed(call, problem, role)) for role in _STATISTICS]
    results += [("empty", None), ("reserve", None), ("absent", None)]
    finishes = (
        not {tensor.role for tensor in schema.outputs} <= {role for role, _ in results}
        or canonical.blended
        or any(call.by_role(role) is not None for role in ("memory_dgamma", "memory_dbeta"))
    )
    metadata = {name: Metadata(a.shape, a.dtype) for name, a in call.inputs.items()}
    return PlannedCall(
        replace(call, inputs=metadata),
        names,
        canonical,
        problem,
        by_any_layout,
        planned.plain if in_place else by_any_layout,
        operator.itemgetter(*places),
        converted if converted or canonical.recomputes else None,
        [*names].index(memory) if memory in names and not canonical.blended else None,
        running,
        {"momentum": canonical.weight} if problem.running else {},
        tuple(results),
        tuple(outputs),
        _selection(call, outputs, results, outcome),
        finish if finishes else None,
        outcome,
    )


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
    outputs: Sequence[str | None],
    results: Sequence[tuple[str, Convert | None]],
    outcome: type,
) -> Callable[[Results], Any]:
    """Return a function that takes the kernel's results and returns the call's outputs. `results`
    has, for each result of the kernel, its role and the function that converts it.
    """
    roles = {tensor.name: tensor.role for tensor in call.schema.outputs}
    places = {role: (place, convert) for place, (role, convert) in enumerate(results)}
    wanted = ["absent" if name is None else roles[name] for name in outputs]
    recipes = [places[role] for role in wanted if role in places]
    are_plain = all(convert is None for _, convert in recipes)
    if are_plain and (len(recipes) > 1 or outcome is np.ndarray):
        return operator.itemgetter(*(place for place, _ in recipes))

    def select(found: Results) -> Any:
        outputs = tuple(
            [
                found[place] if convert is None else convert(found[place])
                for place, convert in recipes
            ]
        )
        return outputs[0] if outcome is np.ndarray else outputs

    return select


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
    if canonical.recomputes or len(results) > 1:
        return FLOAT64
    if canonical.operation == "backward" and len(inputs) > 1:
        return FLOAT64
    # If the per-channel inputs have several types, these are float32 and one 16-bit type, and
    # float32 can represent the values of both.
    common = FLOAT32
    if len(inputs) <= 1:
        (common,) = inputs or results or {FLOAT32 if is_16_bit(dtype) else dtype}
    return common if results <= {common} else FLOAT64


def _type_of_result(call: Call, role: str) -> np.dtype | None:
    """Return the element type of a per-channel result, or None if no input determines this type."""
    for name in _TYPED_LIKE.get(role, ()):
        array = call.by_role(name)
        if array is not None:
            return native(array)
    return None
