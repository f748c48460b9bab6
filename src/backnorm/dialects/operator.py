"""Declare the operators of a dialect as functions.

A dialect's module declares an operator by a function with the signature and the documentation of
the specification, and without a body. The type of each parameter has the parameter's role
(`roles.py`); the decorator `operator` gets the dialect's rules, and the role of each result. The
first call is checked against the schema that is read from the function (`_check`), translated to a
call of backnorm's own operation (the canonical call, `_call`), planned (`_run`) and cached. A later
call of plain arrays with the same types, shapes and attributes finds the planned call in the cache,
and runs it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

from backnorm.arithmetics import Arithmetic, resolved
from backnorm.arrays import NUMPY
from backnorm.dialects._attributes import check_attributes
from backnorm.dialects._call import Call, CanonicalCall, canonical_call
from backnorm.dialects._check import check_inputs, check_mask, check_outputs
from backnorm.dialects._declaration import schema_of
from backnorm.dialects._run import Finish, PlannedCall, planned_call
from backnorm.dialects._statistics import native
from backnorm.dialects.schema import OperatorSchema, Rules, TensorSpec
from backnorm.errors import ArgumentTypeError
from backnorm.executable import CALLS, NO_FACTS, settings
from backnorm.signature import SIGNATURES, Operation

__all__ = ["Operator", "Outputs", "operator"]

P = ParamSpec("P")
R = TypeVar("R")

#: Requested outputs: a number n (the first n), names, or None (all).
Outputs = int | Collection[str] | None
Translate = Callable[[Call, CanonicalCall], CanonicalCall]

# The classes of attributes whose values tell calls apart, beside those of NumPy.
_CLASSES = frozenset({type(None), bool, int, float, str})


def operator(
    rules: Rules,
    operation: Operation,
    /,
    *,
    translate: Translate = lambda call, canonical: canonical,
    finish: Finish = lambda call, arrays, results: results,
    compute: Callable[..., Any] | None = None,
    described_by: Callable[..., Any] | None = None,
    name: str | None = None,
    **results: TensorSpec,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for the function that declares an operator; it gives the function a body.

    Parameters
    ----------
    rules : Rules
        The rules of the dialect.
    operation : {"backward", "forward", "inference", "reduce", "apply"}
    translate : callable, optional
        ``translate(call, canonical)`` returns the canonical call for a checked call; `canonical` is
        the canonical call by roles alone. It may raise an ArgumentError if the call breaks a rule
        that no table expresses. It must not read the values of arrays, because a repeated call is
        not translated again.
    finish : callable, optional
        ``finish(call, arrays, results)`` completes the results of the canonical call, and returns
        all results by role. It is called if the operator has outputs that backnorm's operation does
        not have, if the canonical call is `blended` (see `CanonicalCall`), or if memory for the
        gradients of parameters is given. `call` has the shapes and types of the inputs, `arrays`
        their values by name, and `results` the requested outputs that the canonical call has.
    compute : callable, optional
        For an operator that computes only a part of a gradient: ``compute(call, **others)`` returns
        the results for a checked call, and for the arguments that have no role.
    described_by : callable, optional
        The operator whose docstring also describes this one.
    name : str, optional
        The name of the operator, if it is declared by the function of another operator, which has
        the same signature and other rules.
    **results : TensorSpec
        The role of each result, by the specification's name, in the specification's order.
    """

    def declare(function: Callable[P, R]) -> Callable[P, R]:
        if described_by is not None:
            function.__doc__ = described_by.__doc__
        op = function.__name__ if name is None else name
        schema = schema_of(rules, operation, function, results, op)
        own = Operator(schema, function, translate, finish, compute)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            returned: R = own(*args, **kwargs)
            return returned

        call.__name__ = call.__qualname__ = op
        own.function = call
        call.operator = own  # type: ignore[attr-defined]
        return call

    return declare


class Operator:
    """An operator of a dialect.

    Attributes
    ----------
    schema : OperatorSchema
        The schema of calls in training.
    function : callable
        The function that the dialect's module has under the operator's name.
    """

    def __init__(
        self,
        schema: OperatorSchema,
        function: Callable[..., Any],
        translate: Translate,
        finish: Finish,
        compute: Callable[..., Any] | None,
    ) -> None:
        self.schema, self.function = schema, function
        self._translate, self._finish, self._compute = translate, finish, compute
        self._signature = inspect.signature(function, eval_str=True)
        self._names = tuple(self._signature.parameters)
        known = {*schema.names, "arithmetic", "outputs", "output_mask"}
        if schema.takes_memory:
            known.add(schema.outputs[0].name)
        # Only `compute` gets the arguments that have no role.
        self._others = [name for name in self._names if name not in known]
        if self._others and compute is None:
            raise ValueError(f"{self}: the parameter {self._others[0]} has no role")
        returned = self._signature.return_annotation
        is_class = isinstance(returned, type) and issubclass(returned, (tuple, np.ndarray))
        self._outcome = returned if is_class else tuple

    def __repr__(self) -> str:
        return f"backnorm.dialects.{self.schema.dialect}.{self.schema.op}"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # Pickle stores the name of the function, and takes the operator from the function.
        return getattr, (self.function, "operator")

    @property
    def is_part(self) -> bool:
        """Whether the operator computes only a part of a gradient."""
        return self._compute is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the operator's function returns for these arguments."""
        values = *args, *kwargs.values()
        key: Hashable
        try:
            key = self, *kwargs, settings(), *map(_facts, values)
            repeated: PlannedCall | None = CALLS.get(key)
        except NO_FACTS:
            key = repeated = None
        except Exception:
            # An exception has two possible sources. If a method of an invalid attribute raised it,
            # `_first` checks the attribute and raises a clearer exception. If a signal handler
            # raised it, `_first` returns, and the same exception is raised again.
            self._first(None, args, kwargs)
            raise
        if repeated is None:
            return self._first(key, args, kwargs)
        return repeated(values)

    def _first(self, key: Hashable | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Check and run a call; cache the planned call, unless `key` is None."""
        try:
            arguments = self._signature.bind_partial(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{self.schema.op}() {error}") from None
        schema, arithmetic = self.schema, arguments.get("arithmetic")
        inputs = {t.name: arguments[t.name] for t in schema.inputs if t.name in arguments}
        attributes = {a.name: arguments[a.name] for a in schema.attributes if a.name in arguments}
        outputs = arguments.get("outputs")
        every = [tensor.name for tensor in schema.outputs]
        if schema.choice == "output_mask":
            flags = check_mask(schema, arguments.get("output_mask"))
            outputs = [name for name, flag in zip(every, flags, strict=True) if flag]
        call = self.checked(inputs, attributes, outputs, arithmetic)
        if self._compute is not None:
            return self._compute(call, **{name: arguments.get(name) for name in self._others})
        returned: Sequence[str | None] = call.outputs
        if schema.choice != "outputs":
            returned = [name if name in call.outputs else None for name in every]
        names = (*self._names[: len(args)], *kwargs)
        found = self._planned(call, names, returned, self._outcome)
        values = zip(names, (*args, *kwargs.values()), strict=True)
        results = found([call.inputs.get(name, value) for name, value in values])
        tensors = {*inputs, schema.words["out"]}
        # The values of an array's elements are not in the key. So inputs must be plain arrays, and
        # attributes must not be arrays.
        if key is not None and all(
            type(value) in NUMPY.classes if name in tensors else type(value) is not np.ndarray
            for name, value in arguments.items()
        ):
            CALLS.keep(key, found)
        return results

    def schema_for(self, attributes: Mapping[str, object]) -> OperatorSchema:
        """Return the schema that a call with these attributes follows."""
        schema = self.schema
        for spec in schema.attributes:
            if spec.role in ("training", "frozen"):
                flag = attributes.get(spec.name, spec.default)
                if type(flag) in (bool, np.bool_) and bool(flag) == (spec.role == "frozen"):
                    return schema.with_constants
        return schema

    def invoke(
        self,
        inputs: Mapping[str, object],
        attributes: Mapping[str, object],
        outputs: Outputs = None,
        *,
        out: Any = None,
        arithmetic: Arithmetic | None = None,
    ) -> dict[str, np.ndarray]:
        """Call the operator with arguments by the dialect's names.

        Parameters
        ----------
        inputs : mapping of str to array
            Optional inputs may be omitted or None.
        attributes : mapping of str to value
            Attributes with a default may be omitted.
        outputs : int or collection of str, optional
            The number of outputs, counted from the first, or their names; None: all.
        out : numpy.ndarray, optional
            Memory for the first output. In a backward pass, it may be the array dy itself.
        arithmetic : {"float32", "float64"}, optional
            The type in which elements are computed; see `backnorm.arithmetic`.

        Returns
        -------
        dict of str to numpy.ndarray
            The requested outputs by name, in the schema's order.
        """
        call = self.checked(inputs, attributes, outputs, arithmetic)
        values = self._planned(call, [*call.inputs], call.outputs)([*call.inputs.values()], out)
        return dict(zip(call.outputs, values, strict=True))

    def canonical(
        self,
        inputs: Mapping[str, object],
        attributes: Mapping[str, object],
        outputs: Outputs = None,
        *,
        arithmetic: Arithmetic | None = None,
    ) -> CanonicalCall:
        """Check a call and return the canonical call, without running it."""
        call = self.checked(inputs, attributes, outputs, arithmetic)
        canonical = self._translate(call, canonical_call(call))
        results = {result.name for result in SIGNATURES[canonical.operation].results}
        computed = {role: name for role, name in canonical.outputs.items() if role in results}
        return replace(canonical, outputs=computed)

    def checked(
        self,
        inputs: Mapping[str, object],
        attributes: Mapping[str, object],
        outputs: Outputs = None,
        arithmetic: Arithmetic | None = None,
    ) -> Call:
        """Return the call, checked against the schema."""
        for name, values in {"inputs": inputs, "attributes": attributes}.items():
            if not issubclass(type(values), Mapping):
                raise ArgumentTypeError(
                    name, "must be a mapping", came=type(values).__name__, accepted="values by name"
                )
        schema = self.schema_for(attributes)
        checked = check_attributes(schema, attributes)
        arrays = check_inputs(schema, checked, inputs)
        computed_in = resolved(native(arrays[schema.words["x"]]), arithmetic)
        return Call(schema, arrays, checked, check_outputs(schema, outputs, arrays), computed_in)

    def _planned(
        self,
        call: Call,
        names: Sequence[str],
        outputs: Sequence[str | None],
        outcome: type = tuple,
    ) -> PlannedCall:
        canonical = self._translate(call, canonical_call(call))
        return planned_call(call, canonical, self._finish, names, outputs, outcome)


def _facts(value: Any) -> Hashable:
    """Return what a planned call depends on: for an array, all but the values of its elements."""
    kind = type(value)
    if kind is np.ndarray:
        flags = value.flags
        # A contiguous array cannot have elements that share memory; for others, strides say it.
        strides = None if flags.c_contiguous else value.strides
        return value.shape, value.dtype, flags.num, strides
    # The facts have the classes of values, because True, 1 and 1.0 are equal.
    if kind in _CLASSES or issubclass(kind, np.generic):
        return kind, value
    if kind is list or kind is tuple:
        return kind, *map(type, value), *value
    # Methods of other classes may raise, or mean anything. Such a call is not kept.
    raise TypeError(kind)
