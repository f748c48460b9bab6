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
# All calls can share this array, because it has no elements to write to.
_EMPTY = np.empty(0, FLOAT32)


@dataclass(frozen=True, slots=True, eq=False)
class BoundCall:
    """A checked call of a dialect's operator, with the executable that computes it. All calls with
    the same shapes, types and options share one `BoundCall`.

    Attributes
    ----------
    call : Call
        Its inputs are shapes and types.
    canonical : CanonicalCall
    problem : Problem
    run, execute : callable
        `executable.run` for this problem, and the function for arrays of this layout.
    operands : callable
        Maps the inputs in order, followed by None, to the canonical operands.
    converted : tuple of str, or None
        The operands whose element type is not the executable's; None if the executable takes all
        operands as they are.
    memory : int or None
        The position of the input that is memory for the first output.
    running : callable or None
        Maps the inputs to copies of the running statistics before their update.
    numbers : mapping of str to float
        The weight of the batch, if the executable updates the running statistics.
    results : tuple of (str, callable or None)
        For each canonical result, each running statistic and an empty array: the role, and the
        function that converts the array to the dialect's type and shape.
    select : callable
        Maps these results to the outputs.
    finish : callable or None
        `Operator.finish`, if it must complete or write these results.
    """

    call: Call
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
    select: Callable[[Results], tuple[np.ndarray, ...]]
    finish: Finish | None

    def __call__(self, inputs: Sequence[Any], memory: Any = None) -> tuple[np.ndarray, ...]:
        """Return the outputs of the call for the values of `inputs`.

        The inputs must have the shapes and types of the arrays in `call.inputs`. `memory`, if
        given, is the array to which the first output is written.
        """
        operands = self.operands((*inputs, None))
        if self.converted is not None:
            operands = self._prepared(operands, self.converted)
        running = () if self.running is None else self.running(inputs)
        if self.numbers:
            # The last operands are the running statistics. Copies replace them, because the kernel
            # updates the running statistics in place.
            operands = (*operands[: -len(running)], *running)
        if self.memory is not None and memory is None:
            memory = inputs[self.memory]
        try:
            if memory is None:
                results = self.execute(operands, None, self.numbers)
            else:
                check_memory(self.call.schema.words["out"], memory)
                results = self.run(operands, memory, self.numbers)
        except ArgumentError as error:
            words = {**self.call.schema.words, **self.canonical.inputs}
            raise error.in_words(words) from None
        results = (*results, *running, _EMPTY)
        return self.select(results) if self.finish is None else self._finished(inputs, results)

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

    def _finished(self, inputs: Sequence[Any], values: Results) -> tuple[np.ndarray, ...]:
        """Return the outputs that `finish` makes of the canonical results."""
        assert self.finish is not None
        schema = self.call.schema
        arrays = {
            tensor.name: array
            for tensor, array in zip(schema.inputs, inputs, strict=True)
            if tensor.name in self.call.inputs
        }
        results = {
            role: value if convert is None else convert(value)
            for (role, convert), value in zip(self.results, values, strict=True)
        }
        results = self.finish(self.call, arrays, results)
        roles = {tensor.name: tensor.role for tensor in schema.outputs}
        try:
            return tuple([results[roles[name]] for name in self.call.outputs])
        except KeyError as error:
            (role,) = error.args
            name = next(tensor.name for tensor in schema.outputs if tensor.role == role)
            raise ValueError(
                f"{schema.dialect}.{schema.op}: no result has the role {role} of {name}: "
                "`translate` must set `weight` for running statistics, or `finish` must add it"
            ) from None


def bound(call: Call, canonical: CanonicalCall, finish: Finish) -> BoundCall:
    """Return the `BoundCall` of a checked call. Later calls with equal shapes, types and options
    reuse it.
    """
    schema, problem = call.schema, _problem(call, canonical)
    planned = executable(problem, call.inputs[canonical.inputs["x"]])
    in_place = planned.order == tuple(range(len(problem.shape))) and all(
        map(is_plain, call.inputs.values())
    )
    by_any_layout = partial(run, problem)
    names = [tensor.name for tensor in schema.inputs]
    # `BoundCall.__call__` makes the tuple `(*inputs, None)`. `places` has the position of each
    # operand in this tuple. For an operand that the call does not pass, it is the position of the
    # final None.
    places = [
        names.index(canonical.inputs[role]) if role in canonical.inputs else len(names)
        for role in problem.signature.names
    ]
    converted = tuple(
        role
        for role, name in canonical.inputs.items()
        if role not in ("x", "dy") and native(call.inputs[name]) != problem.statistics_dtype
    )
    memory = {tensor.role: names.index(tensor.name) for tensor in schema.inputs}
    results = [
        _result(call, canonical, problem, result.name) for result in problem.signature.results
    ]
    running = _running(call, problem, canonical.weight)
    if running is not None:
        results += [(f"running_{role}", _typed(call, problem, role)) for role in _STATISTICS]
    results.append(("empty", None))
    finishes = (
        not {tensor.role for tensor in schema.outputs} <= {role for role, _ in results}
        or canonical.blended
        or any(call.by_role(role) is not None for role in ("memory_dgamma", "memory_dbeta"))
    )
    metadata = {name: Metadata(a.shape, a.dtype) for name, a in call.inputs.items()}
    return BoundCall(
        replace(call, inputs=metadata),
        canonical,
        problem,
        by_any_layout,
        planned.plain if in_place else by_any_layout,
        operator.itemgetter(*places),
        converted if converted or canonical.recomputes else None,
        None if canonical.blended else memory.get("memory_dx"),
        running,
        {"momentum": canonical.weight} if problem.running else {},
        tuple(results),
        _selection(call, results),
        finish if finishes else None,
    )


def _running(
    call: Call, problem: Problem, weight: float | None
) -> Callable[[Sequence[Any]], tuple[np.ndarray, ...]] | None:
    """Return the function that copies the running statistics from the inputs to new memory.

    If `weight`, the weight of the batch, is 1, the old running statistics have no effect, and may
    be NaN or absent. The function then returns zeros.
    """
    dtype, channels = problem.statistics_dtype, problem.channels
    if weight is None:
        return None
    if weight == 1.0:
        return lambda _: (np.zeros(channels, dtype), np.zeros(channels, dtype))
    roles: list[str] = [tensor.role for tensor in call.schema.inputs]
    places = [roles.index(f"running_{role}") for role in _STATISTICS]
    return lambda inputs: tuple([inputs[place].astype(dtype) for place in places])


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
    call: Call, results: Sequence[tuple[str, Convert | None]]
) -> Callable[[Results], tuple[np.ndarray, ...]]:
    """Return a function that takes the kernel's results and returns the call's outputs. `results`
    has, for each result of the kernel, its role and the function that converts it.
    """
    roles = {tensor.name: tensor.role for tensor in call.schema.outputs}
    places = {role: (place, convert) for place, (role, convert) in enumerate(results)}
    recipes = [places[roles[name]] for name in call.outputs if roles[name] in places]
    if len(recipes) > 1 and all(convert is None for _, convert in recipes):
        return operator.itemgetter(*(place for place, _ in recipes))
    return lambda found: tuple(
        [found[place] if convert is None else convert(found[place]) for place, convert in recipes]
    )


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
