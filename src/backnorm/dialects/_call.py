"""A checked call of a dialect's operator, and the canonical call that it corresponds to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from backnorm.arithmetics import Arithmetic
from backnorm.dialects._statistics import statistics_of, variance_of_inverse
from backnorm.dialects.schema import OperatorSchema
from backnorm.layout import kept_shape
from backnorm.signature import SIGNATURES, Operation

# The canonical operands that a dialect's call can provide.
_GIVEN = ("x", "dy", "mean", "variance", "gamma", "beta")
_DATA = ("x", "dy", "dx", "y")


@dataclass(frozen=True, eq=False)
class Call:
    """A checked call: arrays and attributes by the dialect's names.

    In a call that is cached, `inputs` are shapes and types instead of arrays.
    """

    schema: OperatorSchema
    inputs: Mapping[str, Any]
    attributes: Mapping[str, object]
    outputs: tuple[str, ...]
    arithmetic: Arithmetic

    def by_role(self, role: str) -> Any:
        """Return the input that backnorm calls `role`, or None if the input is absent."""
        return self.inputs.get(self.schema.words.get(role, ""))

    def number(self, name: str) -> float:
        """Return the value of the attribute `name`, which is a number."""
        value = self.attributes[name]
        assert isinstance(value, float)
        return value

    @cached_property
    def channel_axes(self) -> tuple[int, ...]:
        """The axes of x that are not reduced."""
        return self.schema.channel_axes_of(self.attributes, self.inputs)

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """The shape of x, but with size 1 along each axis that is reduced."""
        return kept_shape(self.inputs[self.schema.words["x"]].shape, self.channel_axes)

    @cached_property
    def count(self) -> int:
        """Number of elements per channel."""
        shape, axes = self.inputs[self.schema.words["x"]].shape, self.channel_axes
        return math.prod(size for axis, size in enumerate(shape) if axis not in axes)


@dataclass(frozen=True, slots=True)
class CanonicalCall:
    """The canonical call that a dialect's call corresponds to.

    Attributes
    ----------
    operation : {"backward", "forward", "inference"}
    data_format : {"NCX", "NXC"}
    training : bool
    epsilon : float
        The value in use. It is rounded to float32 if the dialect's attribute is a float32. It is 0
        if the dialect takes an inverse standard deviation, which already includes epsilon.
    inputs : dict
        Canonical name (x, dy, mean, variance, gamma, beta) -> the dialect's input name, for the
        inputs that are present and used.
    outputs : dict
        Canonical name (dx, dgamma, dbeta; or y, mean, variance) -> the dialect's output name,
        for the outputs that are returned.
    channel_axes : tuple of int
        The axes of the dialect's tensors that are not reduced. If they differ from the channel axis
        of `data_format`, `as_canonical` reshapes the tensors.
    inverse_std : bool
        Whether the input for `variance`, or the variance that a forward pass returns, is in fact
        ``1 / sqrt(variance + epsilon)``.
    weight : float or None
        The weight of the batch in the running statistics; None: they are not updated.
    blended : bool
        Whether the operator's `finish` writes the results, e.g. weighted and added to the previous
        contents of the memory.
    arithmetic : {"float32", "float64"}
    """

    operation: Operation
    data_format: Literal["NCX", "NXC"]
    training: bool
    epsilon: float
    arithmetic: Arithmetic
    inputs: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    channel_axes: tuple[int, ...] = (1,)
    inverse_std: bool = False
    weight: float | None = None
    blended: bool = False

    @property
    def recomputes(self) -> bool:
        """Whether this is a backward pass that computes its statistics from x."""
        return self.operation == "backward" and "mean" not in self.inputs

    def arrays(self, inputs: Mapping[str, object]) -> dict[str, np.ndarray]:
        """Return the inputs by their canonical names; `inputs` has them by the dialect's names.

        An inverse standard deviation is converted to a float64 variance that includes epsilon.
        If the dialect's call has no statistics, they are computed from x in float64.
        """
        arrays = {role: np.asarray(inputs[name]) for role, name in self.inputs.items()}
        if self.recomputes:
            x = arrays["x"]
            arrays["mean"], arrays["variance"] = statistics_of(x, self.channel_axes, self.epsilon)
        if self.inverse_std and "variance" in arrays:
            arrays["variance"] = variance_of_inverse(arrays["variance"])
        return {role: self.as_canonical(role, array) for role, array in arrays.items()}

    def as_canonical(self, role: str, array: np.ndarray) -> np.ndarray:
        """Return an input or output of the dialect in the form of the canonical operator.

        The dialect may have several channel axes, or another one than `data_format`. The result
        then has two axes: the first has the elements of a channel, the second has the channels,
        which are all combinations of indices of the dialect's channel axes.
        """
        if role not in _DATA:
            return array.reshape(-1)
        axis = 1 if self.data_format == "NCX" else array.ndim - 1
        if self.channel_axes == (axis,) and array.ndim > 1:
            return array
        last = tuple(range(-len(self.channel_axes), 0))
        channels = math.prod(array.shape[axis] for axis in self.channel_axes)
        count = math.prod(s for axis, s in enumerate(array.shape) if axis not in self.channel_axes)
        return np.moveaxis(array, self.channel_axes, last).reshape(count, channels)


def canonical_call(call: Call) -> CanonicalCall:
    """Return the call of backnorm's operation that is equivalent to `call`.

    The schema gives each tensor and attribute of the dialect a role, which is the name that
    backnorm's operation has for it (such as `gamma`).
    """
    schema = call.schema
    training = bool(call.attributes.get(schema.words.get("training", ""), not schema.frozen))
    takes_inverse = call.by_role("inverse_deviation") is not None
    returns_inverse = "inverse_deviation" in {tensor.role for tensor in schema.outputs}
    names = {t.role: t.name for t in schema.inputs if t.name in call.inputs}
    if takes_inverse:
        names["variance"] = names["inverse_deviation"]
    signature = SIGNATURES[schema.operation]
    canonical = CanonicalCall(
        schema.operation,
        schema.format_of(call.attributes).layout,
        schema.operation != "inference" and training,
        0.0 if takes_inverse else call.number(schema.words["epsilon"]),
        call.arithmetic,
        {name: names[name] for name in signature.names if name in names and name in _GIVEN},
        {t.role: t.name for t in schema.outputs if t.name in call.outputs},
        call.channel_axes,
        takes_inverse or returns_inverse,
        _weight(call),
    )
    if schema.operation == "forward" and not training:
        return with_given_statistics(call, canonical)
    return canonical


def _weight(call: Call) -> float | None:
    """Return the weight of the batch in the running statistics that a call returns, if it does.

    An empty batch has the weight 0, so that the running statistics do not change.
    """
    words = call.schema.words
    if call.schema.operation != "forward" or call.by_role("running_mean") is None:
        return None
    if not call.count:
        return 0.0
    if "batch_weight" in words:
        return call.number(words["batch_weight"])
    if "old_weight" not in words:
        return None
    name = words["old_weight"]
    return 0.5 if call.attributes[name] is None else 1.0 - call.number(name)


def with_given_statistics(call: Call, canonical: CanonicalCall) -> CanonicalCall:
    """Return the canonical call of a forward pass whose statistics are the running ones."""
    words = call.schema.words
    statistics = {
        role: words.get(role) or words[f"running_{role}"] for role in ("mean", "variance")
    }
    return replace(
        canonical,
        operation="inference",
        training=False,
        inputs=canonical.inputs | statistics,
        inverse_std=False,
        weight=None,
    )
