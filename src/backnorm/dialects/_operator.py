"""What the operators of all dialects share: from a call in the dialect's words to its results.

bind (check against the schema) -> canonical_call (which canonical operation this is) -> run
-> finish (outputs that only this dialect has).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from backnorm.dialects._attributes import check_attributes
from backnorm.dialects._call import Call, CanonicalCall, canonical_call
from backnorm.dialects._check import check_inputs, check_outputs
from backnorm.dialects._run import run
from backnorm.dialects.schema import OperatorSchema
from backnorm.errors import ArgumentTypeError

__all__ = ["DialectOperator", "Outputs"]

#: How outputs are requested: that many from the first, by name, or (None) all.
Outputs = int | Collection[str] | None


class DialectOperator:
    """An operator of a dialect. Subclasses set `schema` and add the dialect's calling style."""

    schema: OperatorSchema

    @classmethod
    def schema_for(cls, attributes: Mapping[str, object]) -> OperatorSchema:
        """Return the schema that a call with these attributes follows."""
        return cls.schema

    @classmethod
    def invoke(
        cls,
        inputs: Mapping[str, object],
        attributes: Mapping[str, object],
        outputs: Outputs = None,
        *,
        out: object = None,
    ) -> dict[str, np.ndarray]:
        """Call by the dialect's names; return the requested outputs in index order.

        `out` is an array for the first output; it may be the gradient that comes in.
        """
        call = cls.bind(inputs, attributes, outputs, out=out)
        results = cls.finish(call, run(call, cls.canonical_call(call)))
        return {name: results[name] for name in call.outputs}

    @classmethod
    def canonical(
        cls,
        inputs: Mapping[str, object],
        attributes: Mapping[str, object],
        outputs: Outputs = None,
    ) -> CanonicalCall:
        """Check the call and return which canonical call it is, without running it."""
        return cls.canonical_call(cls.bind(inputs, attributes, outputs))

    @classmethod
    def bind(
        cls,
        inputs: Mapping[str, object],
        attributes: Mapping[str, object],
        outputs: Outputs = None,
        *,
        out: object = None,
    ) -> Call:
        """Check a call against the schema."""
        schema = cls.schema_for(attributes)
        checked = check_attributes(schema, attributes)
        call = Call(
            schema,
            check_inputs(schema, checked, inputs),
            checked,
            check_outputs(schema, outputs),
            _check_out(schema, out),
        )
        cls.check(call)
        return call

    @classmethod
    def check(cls, call: Call) -> None:
        """Check what the schema cannot say."""

    @classmethod
    def canonical_call(cls, call: Call) -> CanonicalCall:
        """Return which canonical call this is."""
        return canonical_call(call)

    @classmethod
    def finish(cls, call: Call, results: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Add the outputs that only this dialect has; `results` are by output name."""
        return results


def _check_out(schema: OperatorSchema, out: object) -> np.ndarray | None:
    if out is None or isinstance(out, np.ndarray):
        return out
    raise ArgumentTypeError(
        schema.outputs[0].name,
        "the memory for an output must be a NumPy array",
        came=type(out).__name__,
        accepted="numpy.ndarray",
    )
