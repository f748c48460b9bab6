"""From a checked call to its results: the Problem, and the code that every call like it runs.

The checks of a dialect imply those of the canonical operator, so the Problem is made directly.
What only values or the memory for an output can show, the executable refuses; it is said in the
dialect's words here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from backnorm.arrays import NUMPY
from backnorm.binding import written
from backnorm.dialects._call import Call, CanonicalCall, canonical_call
from backnorm.dialects._check import check_memory
from backnorm.dialects._statistics import statistics_of
from backnorm.dtypes import FLOAT32, FLOAT64, element_type, is_16_bit, rounded
from backnorm.errors import ArgumentError
from backnorm.executable import Executable, executable
from backnorm.problem import Metadata, Problem
from backnorm.signature import SIGNATURES

__all__ = ["Bound"]

# Which input says the element type of a result: the first that is given.
_TYPED_LIKE = {
    "dgamma": ("gamma", "mean"),
    "dbeta": ("beta", "gamma", "mean"),
    "mean": ("running_mean",),
    "variance": ("running_variance",),
}
_STATISTICS = ("mean", "variance")
# What the code of a call uses beside what is its own.
_NAMES = {
    "ArgumentError": ArgumentError,
    "check_memory": check_memory,
    "empty": np.empty,
    "rounded": rounded,
    "single": FLOAT32,
    "statistics_of": statistics_of,
    "zeros": np.zeros,
}


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """A checked call, and the executable that computes it and all calls of the same metadata."""

    call: Call
    canonical: CanonicalCall
    executable: Executable

    @classmethod
    def of(cls, call: Call) -> Bound:
        """Return what computes a checked call."""
        canonical = canonical_call(call)
        found = executable(_problem(call, canonical), call.inputs[canonical.inputs["x"]])
        return cls(call, canonical, found)

    @property
    def is_repeatable(self) -> bool:
        """Whether kernels take all arrays of the call as they are."""
        return NUMPY.are_plain(tuple(self.call.inputs.values()), self.executable.order)

    def code(
        self,
        returned: Sequence[str | None],
        pack: Callable[[Any], Any] | None,
        *,
        plain: bool = False,
    ) -> Callable[..., Any]:
        """Return a function of the inputs in their order and of the memory for the first output.

        It looks at values alone: the metadata is this call's.

        Parameters
        ----------
        returned : sequence of str or None
            Outputs by name, and None where that is returned.
        pack : callable or None
            From a tuple of these to what is returned; None: the only one.
        plain : bool
            Whether kernels will take all arrays as they are.
        """
        call, canonical, problem = self.call, self.canonical, self.executable.problem
        schema = call.schema
        inputs = [tensor.name for tensor in schema.inputs]
        lines = [
            f"def repeat({', '.join(inputs)}, memory):",
            "    try:",
            *(f"        {line}" for line in self._execution()),
            "    except ArgumentError as error:",
            "        raise error.in_words(words) from None",
        ]
        if "memory_dx" in schema.words and not canonical.blended:
            lines.insert(
                1, f"    memory = {schema.words['memory_dx']} if memory is None else memory"
            )
        if canonical.recomputes:
            x = canonical.inputs["x"]
            lines.insert(1, f"    new_mean, new_variance = statistics_of({x}, axes, epsilon)")
        if canonical.weight is not None:
            lines[1:1] = [f"    moved_{role} = {self._before(role)}" for role in _STATISTICS]
        results = self._results()
        memory = {t.name for t in schema.inputs if t.role in ("memory_dgamma", "memory_dbeta")}
        missing = {tensor.role for tensor in schema.outputs} - {*results, "empty"}
        writes = canonical.blended or not memory.isdisjoint(call.inputs)
        if schema.hooks.finish is not None and (missing or writes):
            arrays = ", ".join(f"{name!r}: {name}" for name in call.inputs)
            by_role = ", ".join(f"{role!r}: {code}" for role, code in results.items())
            lines.append(f"    results = finish(call, {{{arrays}}}, {{{by_role}}})")
            results = {tensor.role: f"results[{tensor.role!r}]" for tensor in schema.outputs}
        results["empty"] = "empty(0, single)"
        roles = {tensor.name: tensor.role for tensor in schema.outputs}
        values = [results[roles[name]] if name else "None" for name in returned]
        listed = f"({', '.join(values)}{',' * (len(values) == 1)})"
        value = values[0] if pack is None else listed if pack is tuple else f"pack({listed})"
        lines.append(f"    return {value}")
        # Of the arrays of the first call only the metadata is kept.
        metadata = {name: Metadata(a.shape, a.dtype) for name, a in call.inputs.items()}
        bound: Callable[..., Any] = _compiled(tuple(lines))(
            execute=self.executable.plain if plain else self.executable.run,
            run=self.executable.run,
            words={**schema.words, **canonical.inputs},
            pack=pack,
            finish=schema.hooks.finish,
            call=replace(call, inputs=metadata),
            types={role: _type_of_result(call, role) for role in _TYPED_LIKE},
            statistics=problem.statistics_dtype,
            kept=call.kept_shape,
            axes=canonical.channel_axes,
            epsilon=canonical.epsilon,
            moved_by=canonical.weight,
            channels=problem.channels,
        )
        return bound

    def _execution(self) -> list[str]:
        """Return the lines that compute the results of the canonical operation."""
        words, names = self.call.schema.words, SIGNATURES[self.canonical.operation].names
        operands = ", ".join(map(self._operand, names))
        if self.executable.problem.running:
            operands += ", momentum=moved_by"
        return [
            "if memory is None:",
            f"    found = execute({operands})",
            "else:",
            f"    check_memory({words['out']!r}, memory)",
            f"    found = run({operands}, out=memory)",
        ]

    def _operand(self, role: str) -> str:
        """Return the code of an operand: statistics and parameters of one type.

        Kernels take addresses, whatever the shape.
        """
        if self.canonical.recomputes and role in _STATISTICS:
            return f"new_{role}"
        if self.executable.problem.running and role.startswith("running_"):
            return role.replace("running", "moved")
        name = self.canonical.inputs.get(role)
        if name is None or role in ("x", "dy"):
            return str(name)
        array = self.call.inputs[name]
        same = element_type(array.dtype) == self.executable.problem.statistics_dtype
        return name if same else f"{name}.astype(statistics)"

    def _before(self, role: str) -> str:
        """Return the code of new memory with running statistics before they move.

        What has no weight is not looked at: it may be NaN, or there may be none.
        """
        if self.canonical.weight == 1.0:
            return "zeros(channels, statistics)"
        return f"{self.call.schema.words[f'running_{role}']}.astype(statistics)"

    def _results(self) -> dict[str, str]:
        """Return the code of each result of the canonical operation by role."""
        results = {}
        kept = {tensor.role for tensor in self.call.schema.outputs if tensor.kind == "kept"}
        for k, result in enumerate(SIGNATURES[self.canonical.operation].results):
            if result.option is not None:
                continue
            code, role = self._typed(f"found[{k}]", result.name), result.name
            if role == "variance" and self.canonical.inverse_std:
                role = "inverse_deviation"
            results[role] = f"{code}.reshape(kept)" if role in kept else code
        if self.canonical.weight is not None:
            results |= {
                f"running_{role}": self._typed(f"moved_{role}", role) for role in _STATISTICS
            }
        return results

    def _typed(self, code: str, role: str) -> str:
        """Return the code of a result in the type of the input that says it."""
        like = _type_of_result(self.call, role)
        same = like in (None, self.executable.problem.statistics_dtype)
        return code if same else f"rounded({code}, types[{role!r}])"


@functools.lru_cache(maxsize=512)
def _compiled(lines: tuple[str, ...]) -> Callable[..., Any]:
    """Return a function that makes the function in `lines` from what it uses."""
    given = (
        "execute, run, words, pack, finish, call, types, statistics, kept, axes, epsilon, "
        "moved_by, channels"
    )
    code = [f"def make({given}):", *(f"    {line}" for line in lines), "    return repeat"]
    make: Callable[..., Any] = written("call of a dialect", code, _NAMES)["make"]
    return make


def _problem(call: Call, canonical: CanonicalCall) -> Problem:
    """Return the problem of a checked call."""
    arrays = {role: call.inputs[name] for role, name in canonical.inputs.items()}
    x = arrays["x"]
    dtype = element_type(x.dtype)
    assert dtype is not None
    return Problem(
        canonical.operation,
        x.shape,
        canonical.channel_axes,
        dtype,
        _statistics_type(call, canonical, dtype),
        has_gamma="gamma" in arrays,
        has_beta="beta" in arrays,
        epsilon=canonical.epsilon,
        training=canonical.training or canonical.operation == "forward",
        inverse=canonical.inverse_std,
        running=bool(canonical.weight),
        biased=bool(canonical.weight) and not call.schema.unbiased,
        arithmetic=canonical.arithmetic,
    )


def _statistics_type(call: Call, canonical: CanonicalCall, dtype: np.dtype) -> np.dtype:
    """Return the element type of statistics and parameters, of operands and results.

    Those of a call are of one type, or else float32 and 16 bits. Where results are of several types
    they are computed in float64 and rounded once.
    """
    given = {
        element_type(call.inputs[name].dtype)
        for role, name in canonical.inputs.items()
        if role not in ("x", "dy")
    }
    asked = {_type_of_result(call, each.name) for each in SIGNATURES[canonical.operation].results}
    asked.discard(None)
    if canonical.recomputes or len(asked) > 1:
        return FLOAT64
    if canonical.operation == "backward" and len(given) > 1:
        return FLOAT64
    common: np.dtype | None = FLOAT32
    if len(given) == 1:
        (common,) = given
    elif not given:
        (common,) = asked or {FLOAT32 if is_16_bit(dtype) else dtype}
    assert common is not None
    return common if asked <= {common} else FLOAT64


def _type_of_result(call: Call, role: str) -> np.dtype | None:
    """Return the element type of a result of channels, where an input says it."""
    for name in _TYPED_LIKE.get(role, ()):
        array = call.by_role(name)
        if array is not None:
            return element_type(array.dtype)
    return None
