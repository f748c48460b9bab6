"""One checked call of a dialect's operator, and which canonical call it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from backnorm.dialects._axis import channel_from_second, channel_to_second
from backnorm.dialects._check import axis_of, format_of
from backnorm.dialects._statistics import variance_of_inverse
from backnorm.dialects.schema import OperatorSchema
from backnorm.problem import Operation

__all__ = ["Call", "CanonicalCall", "canonical_call"]

_RESULTS = {
    "backward": ("dx", "dgamma", "dbeta"),
    "forward": ("y", "mean", "variance"),
    "inference": ("y",),
}
_ARGUMENTS = {
    "backward": ("x", "dy", "mean", "variance", "gamma"),
    "forward": ("x", "gamma", "beta"),
    "inference": ("x", "mean", "variance", "gamma", "beta"),
}
# Roles of tensors that have the shape of x.
_DATA = ("x", "dy", "dx", "y")


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One checked call: arrays and attributes by the dialect's names."""

    schema: OperatorSchema
    inputs: Mapping[str, np.ndarray]
    attributes: Mapping[str, object]
    outputs: tuple[str, ...]
    out: np.ndarray | None = None

    def by_role(self, role: str) -> np.ndarray | None:
        """Return the input with a canonical role, or None if it is not given."""
        for tensor in self.schema.inputs:
            if tensor.role == role:
                return self.inputs.get(tensor.name)
        return None

    def number(self, name: str) -> float:
        """Return the attribute `name`, a number."""
        value = self.attributes[name]
        assert isinstance(value, float)
        return value


@dataclass(frozen=True, slots=True)
class CanonicalCall:
    """Which canonical call a dialect's call is.

    Attributes
    ----------
    operation : {"backward", "forward", "inference"}
    data_format : {"NCX", "NXC"}
    training : bool
    epsilon : float
        As used: rounded to float32 where the dialect's attribute is one, 0 where the dialect
        was given an inverse standard deviation (which has epsilon inside).
    inputs : dict
        Canonical name (x, dy, mean, variance, gamma, beta) -> the dialect's input name, for the
        inputs that are given and enter the result.
    outputs : dict
        Canonical name (dx, dgamma, dbeta; or y, mean, variance) -> the dialect's output name,
        for the outputs that are returned.
    inverse_std : bool
        Whether the input for `variance` holds ``1 / sqrt(variance + epsilon)``.
    channel_axis : int or None
        The channel axis of the dialect's tensors, where it may be any. To the canonical call they
        are NCX: views with that axis second.
    """

    operation: Operation
    data_format: str
    training: bool
    epsilon: float
    inputs: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    inverse_std: bool = False
    channel_axis: int | None = None

    def arrays(self, inputs: Mapping[str, object]) -> dict[str, np.ndarray]:
        """Return canonical name -> array, from arrays by the dialect's names.

        An inverse standard deviation becomes the float64 variance to use with `epsilon` = 0.
        """
        arrays = {role: np.asarray(inputs[name]) for role, name in self.inputs.items()}
        if self.inverse_std:
            arrays["variance"] = variance_of_inverse(arrays["variance"])
        return {role: self.to_canonical(role, array) for role, array in arrays.items()}

    def to_canonical(self, role: str, array: np.ndarray) -> np.ndarray:
        """Return an input or output of the dialect as the canonical operator sees it."""
        if self.channel_axis is None or role not in _DATA:
            return array
        return channel_to_second(array, self.channel_axis)

    def from_canonical(self, role: str, array: np.ndarray, rank: int) -> np.ndarray:
        """Return a canonical output as the dialect has it, its data being of `rank` axes."""
        if self.channel_axis is None or role not in _DATA:
            return array
        return channel_from_second(array, self.channel_axis, rank)


def canonical_call(call: Call, operation: Operation | None = None) -> CanonicalCall:
    """Return the canonical call by the roles in the schema (as `operation`, if given)."""
    schema = call.schema
    operation = operation or schema.operation
    by_role = {a.role: call.attributes[a.name] for a in schema.attributes if a.role is not None}
    epsilon = by_role["epsilon"]
    assert isinstance(epsilon, float)
    arguments, results = _ARGUMENTS[operation], _RESULTS[operation]
    return CanonicalCall(
        operation,
        format_of(schema, call.attributes).layout,
        operation != "inference" and bool(by_role.get("training", True)),
        epsilon,
        {t.role: t.name for t in schema.inputs if t.role in arguments and t.name in call.inputs},
        {t.role: t.name for t in schema.outputs if t.role in results and t.name in call.outputs},
        channel_axis=axis_of(schema, call.attributes) if "channel_axis" in schema.words else None,
    )
