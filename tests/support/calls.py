"""Every operator under test with good arguments, and how it is called.

The operators are those of the dialects, the dialects' functions that compute a part of a gradient,
and backnorm's own, whose rules are written here as a dialect's are.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from backnorm.dialects.operator import Operator
from backnorm.dialects.registry import (
    DIALECTS,
    PARTS,
    CanonicalCall,
    operators,
    parts,
)
from backnorm.dialects.roles import channel, data
from backnorm.dialects.schema import (
    ELEMENT_TYPE_NAMES,
    AttributeSpec,
    FormatSpec,
    OperatorSchema,
    type_rules,
)

__all__ = [
    "CHANNELS",
    "OTHER_LAYOUTS",
    "PARTS_OF_GRADIENTS",
    "SUBJECTS",
    "Subject",
    "dialect_subjects",
]

Arrays = dict[str, Any]

CHANNELS = 3
# The arguments of functions of parts that no table has.
FLAGS = ("input_g", "weight_g", "bias_g")


@dataclass(frozen=True)
class Subject:
    """One operator, in its first format unless another one is given."""

    schema: OperatorSchema
    format: FormatSpec | None = None

    @cached_property
    def name(self) -> str:
        """The names of the dialect and the operator, and the format if given."""
        name = f"{self.schema.dialect}.{self.schema.op}"
        return f"{name} {self.format.name}" if self.format else name

    @cached_property
    def operator(self) -> Callable[..., Any]:
        """What users call."""
        dialect, op = self.schema.dialect, self.schema.op
        if dialect in DIALECTS and op in operators(dialect):
            return operators(dialect)[op]
        return getattr(importlib.import_module(PARTS.get(dialect, dialect)), op)

    @cached_property
    def memory(self) -> str | None:
        """The name of the argument that takes memory for the first output."""
        if self.schema.dialect == "backnorm":
            return "out"
        first = self.schema.outputs[0].name
        return first if self.schema.takes_memory else self.schema.words.get("memory_dx")

    @property
    def layout(self) -> str:
        """The layout of the format."""
        return (self.format or self.schema.formats[0]).layout

    @property
    def epsilon(self) -> AttributeSpec | None:
        """The attribute, if there is one."""
        return next((spec for spec in self.schema.attributes if spec.role == "epsilon"), None)

    @property
    def axis(self) -> int:
        """The channel axis of arrays of rank 4."""
        return 1 if self.layout == "NCX" else 3

    def shape(self, *others: int, channels: int = CHANNELS) -> tuple[int, ...]:
        """Return a shape with the channels among other axes."""
        place = 1 if self.layout == "NCX" else len(others)
        return (*others[:place], channels, *others[place:])

    @cached_property
    def type_pairs(self) -> tuple[tuple[np.dtype, np.dtype], ...]:
        """Element types of data and of per-channel tensors that may be given together."""
        return tuple(
            (ELEMENT_TYPE_NAMES[rule.data], ELEMENT_TYPE_NAMES[name])
            for rule in self.schema.type_rules
            for name in rule.channel
        )

    def arrays(
        self,
        shape: tuple[int, ...] | None = None,
        dtype: Any = np.float32,
        channel: Any = np.float32,
        *,
        offset: float = 1.0,
        scale: float = 3.0,
        seed: int = 7,
    ) -> Arrays:
        """Return good inputs by role, one axis per channel; no memory, nothing unused."""
        shape = self.shape(4, 5, 2) if shape is None else shape
        rng = np.random.default_rng(seed)
        axis = 1 if self.layout == "NCX" and len(shape) > 1 else len(shape) - 1
        others = tuple(i for i in range(len(shape)) if i != axis)
        x = (rng.normal(size=shape) * scale + offset).astype(dtype)
        wide, c = x.astype(np.float64), shape[axis]
        mean = wide.mean(others) if x.size else np.zeros(c)
        variance = wide.var(others) if x.size else np.ones(c)
        gamma, beta, sum_dy, sum_dy_xmu = rng.normal(size=(4, c))
        values = {
            "x": x,
            "dy": rng.normal(size=shape).astype(dtype),
            "mean": mean,
            "variance": variance,
            "inverse_deviation": 1 / np.sqrt(variance + 1e-3),
            "gamma": gamma,
            "beta": beta,
            "running_mean": mean,
            "running_variance": variance,
            "dgamma": sum_dy_xmu,
            "dbeta": sum_dy,
            "ignored": np.zeros(c),
            "reserve": np.zeros(c),
        }
        return {
            tensor.role: values[tensor.role]
            if tensor.kind == "data"
            else values[tensor.role].astype(channel)
            for tensor in self.schema.inputs
            if tensor.role in values and (tensor.required or tensor.kind != "opaque")
        }

    def named(self, arrays: Mapping[str, Any]) -> Arrays:
        """Return inputs by name, as the operator takes them, of inputs by role."""
        rank = max(2, np.ndim(arrays["x"])) if isinstance(arrays["x"], np.ndarray) else 4
        kept = (1, -1, *[1] * (rank - 2)) if self.layout == "NCX" else (*[1] * (rank - 1), -1)

        def shaped(array: Any, kind: str) -> Any:
            if kind != "kept" or not isinstance(array, np.ndarray):
                return array
            return array[:, None, None] if array.ndim != 1 else array.reshape(kept)

        return {
            tensor.name: shaped(arrays[tensor.role], tensor.kind)
            for tensor in self.schema.inputs
            if tensor.role in arrays
        }

    def attributes(self, epsilon: object = 1e-3) -> dict[str, Any]:
        """Return the attributes that a call in training must have.

        Flags are among them even if they have a default, which may be for constant statistics.
        """
        values = {
            "epsilon": epsilon,
            "channel_axis": 1,
            "data_format": (self.format or self.schema.formats[0]).name,
            "training": True,
            "frozen": False,
            "reduced_axes": tuple(axis for axis in range(4) if axis != self.axis),
        }
        return {
            spec.name: values.get(spec.role, spec.example)
            for spec in self.schema.attributes
            if spec.required
            or spec.role in ("epsilon", "training", "frozen")
            or (spec.role == "data_format" and self.format)
        }

    def options(self) -> dict[str, Any]:
        """Return what a call needs besides inputs and attributes."""
        found = {name: True for name in FLAGS if name in self.schema.order}
        if self.schema.choice == "output_mask":
            found["output_mask"] = [True] * len(self.schema.outputs)
        if "count" in self.schema.order:
            count = {"count": np.array([40, 0])}
            found |= {name: np.ones(CHANNELS, "f") for name in ("sum_dy", "sum_dy_xmu")} | count
        return found

    def good(self, types: tuple[Any, Any] = (np.float32, np.float32), seed: int = 7) -> Arrays:
        """Return the arguments of a good call by name."""
        inputs = self.named(self.arrays(None, *types, seed=seed))
        return inputs | self.attributes() | self.options()

    def call(self, **arguments: Any) -> Any:
        """Call the operator as its users do, by the names of its specification."""
        return self.operator(**arguments)

    def returned(self, **arguments: Any) -> list[Any]:
        """Return the results of `call` in a list."""
        results = self.call(**arguments)
        return list(results) if isinstance(results, tuple) else [results]

    def fresh(self, **arguments: Any) -> list[Any]:
        """Return the same of a call that finds nothing of earlier calls."""
        if self.name in PARTS_OF_GRADIENTS:
            return self.returned(**arguments)
        mask = arguments.pop("output_mask", None)
        names = [tensor.name for tensor in self.schema.outputs]
        if mask is None:
            found = self.invoke(**arguments)
            return [*found.values()] if "outputs" in self.schema.order else [*map(found.get, names)]
        outputs = [name for name, flag in zip(names, mask, strict=True) if flag]
        found = self.invoke(**arguments, outputs=outputs)
        return [found.get(name) for name in names]

    def invoke(self, **arguments: Any) -> dict[str, np.ndarray]:
        """Call the operator by its name in the registry."""
        options = {name: arguments.pop(name, None) for name in ("outputs", "arithmetic")}
        if self.schema.takes_memory:
            options["out"] = arguments.pop(self.schema.outputs[0].name, None)
        return self._declared.invoke(*self._by_kind(arguments), **options)

    def canonical(self, **arguments: Any) -> CanonicalCall:
        """Return backnorm's own call that is the same as a call of the operator."""
        outputs = arguments.pop("outputs", None)
        return self._declared.canonical(*self._by_kind(arguments), outputs)

    @property
    def _declared(self) -> Operator:
        """The operator in the registry."""
        return operators(self.schema.dialect)[self.schema.op]

    def _by_kind(self, arguments: dict[str, Any]) -> tuple[Arrays, dict[str, Any]]:
        """Return the inputs and the attributes among the arguments."""
        names = [*(tensor.name for tensor in self.schema.inputs), "no_such_input"]
        inputs = {name: arguments[name] for name in names if name in arguments}
        attributes = {name: arguments[name] for name in arguments if name not in inputs}
        return inputs, attributes

    def run(self, arrays: Arrays, epsilon: object = 1e-3, out: object = None) -> Arrays:
        """Call the operator with inputs by role; return results by role, one axis per channel."""
        memory = {} if out is None else {self.memory: out}
        inputs = self.named(arrays) | self.attributes(epsilon) | self.options()
        returned = zip(self.schema.outputs, self.returned(**inputs, **memory), strict=True)
        return {
            tensor.role: array.reshape(-1) if tensor.kind == "kept" else array
            for tensor, array in returned
        }


def dialect_subjects() -> Iterator[Subject]:
    """Yield every operator of every dialect."""
    for dialect in DIALECTS:
        for operator in operators(dialect).values():
            yield Subject(operator.schema)


def _own() -> Iterator[Subject]:
    """Yield backnorm's own operators. They are always called with `data_format`."""
    x, dy, dx, y = (data(name, "", name=name) for name in ("x", "dy", "dx", "y"))
    statistics = tuple(channel(name, "", name=name) for name in ("mean", "variance"))
    gamma, beta = (channel(name, "", name=name, required=False) for name in ("gamma", "beta"))
    parameters = tuple(channel(name, "", name=name) for name in ("dgamma", "dbeta"))
    own = partial(
        OperatorSchema,
        dialect="backnorm",
        source="backnorm",
        attributes=(
            AttributeSpec("f64", "epsilon", name="epsilon", required=False, default=1e-5),
            AttributeSpec("string", "data_format", name="data_format", choices=("NCX", "NXC")),
        ),
        type_rules=type_rules(f64="f64", f32="f32", f16="f16 f32", bf16="bf16 f32"),
        formats=(FormatSpec("NCX", "NCX"), FormatSpec("NXC", "NXC")),
    )
    for operation, inputs, outputs in (
        ("backward", (x, dy, *statistics, gamma), (dx, *parameters)),
        ("forward", (x, gamma, beta), (y, *statistics)),
        ("inference", (x, *statistics, gamma, beta), (y,)),
    ):
        yield Subject(own(op=f"batch_norm_{operation}", operation=operation, inputs=inputs,
                          outputs=outputs))  # fmt: skip


#: Each operator by its name: those of dialects, and backnorm's own.
SUBJECTS = {subject.name: subject for subject in (*dialect_subjects(), *_own())}
#: backnorm's own operators in the layout NXC.
OTHER_LAYOUTS = [Subject(subject.schema, subject.schema.formats[1]) for subject in _own()]
#: Each function that computes a part of a gradient, by its name.
PARTS_OF_GRADIENTS = {
    subject.name: subject for dialect in PARTS for subject in map(Subject, parts(dialect).values())
}
