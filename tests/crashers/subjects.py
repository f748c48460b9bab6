"""The operators under attack: the canonical ones and every operator of every dialect.

Each is called through its front door, by the names that its users write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

import backnorm
from backnorm.dialects.registry import DIALECTS, operators
from backnorm.dialects.schema import ELEMENT_TYPE_NAMES, AttributeSpec, TensorSpec
from tests.support.attributes import attributes_in_training

Arrays = dict[str, np.ndarray]
Results = dict[str, np.ndarray]

SHAPES = {"NXC": (4, 3, 3, 5), "NCX": (4, 5, 3, 3)}
_TYPES = ("f64", "f32", "f16", "bf16")


@dataclass(frozen=True)
class Subject:
    """One operator; `call` takes arrays by role and returns results by role."""

    name: str
    operation: str
    layout: str
    tensors: tuple[TensorSpec, ...]
    call: Callable[..., Results]
    epsilon: AttributeSpec | None = None
    min_rank: int = 2
    out_word: str = "out"
    min_channels: int = 0
    type_pairs: tuple[tuple[np.dtype, np.dtype], ...] = ()
    takes_out: bool = True
    training: bool = True
    copies_one: bool = False

    @property
    def words(self) -> dict[str, str]:
        """The operator's word for each role."""
        return {tensor.role: tensor.name for tensor in self.tensors}

    def arrays(
        self,
        shape: tuple[int, ...] | None = None,
        dtype: object = np.float32,
        channel: object = np.float32,
        *,
        offset: float = 1.0,
        scale: float = 3.0,
    ) -> Arrays:
        """Return good inputs by role."""
        shape = shape or SHAPES[self.layout]
        rng = np.random.default_rng(7)
        axis = 1 if self.layout == "NCX" else len(shape) - 1
        others = tuple(i for i in range(len(shape)) if i != axis)
        x = (rng.normal(size=shape) * scale + offset).astype(dtype)
        wide, c = x.astype(np.float64), shape[axis]
        filled = x.size > 0
        values = {
            "x": x,
            "dy": rng.normal(size=shape).astype(dtype),
            "mean": wide.mean(others) if filled else np.zeros(c),
            "variance": wide.var(others) if filled else np.ones(c),
            "inverse_deviation": 1 / np.sqrt((wide.var(others) if filled else np.ones(c)) + 1e-3),
            "gamma": rng.normal(size=c),
            "beta": rng.normal(size=c),
        }
        values["running_mean"], values["running_variance"] = values["mean"], values["variance"]
        values["ignored"] = np.zeros(c)
        kinds = {tensor.role: tensor.kind for tensor in self.tensors}
        return {
            role: values[role] if kind == "data" else values[role].astype(channel)
            for role, kind in kinds.items()
            if not role.startswith("memory_")
        }


def _canonical() -> Iterator[Subject]:
    data = {role: TensorSpec(role, role, "", "data") for role in ("x", "dy")}
    stats = {role: TensorSpec(role, role, "", "channel") for role in ("mean", "variance")}
    optional = {role: TensorSpec(role, role, "", "channel", False) for role in ("gamma", "beta")}
    pairs = tuple(
        (ELEMENT_TYPE_NAMES[a], ELEMENT_TYPE_NAMES[b])
        for a in _TYPES
        for b in _TYPES
        if a == b or (a in ("f16", "bf16") and b == "f32")
    )
    tables: dict[str, tuple[TensorSpec, ...]] = {
        "backward": (*data.values(), *stats.values(), optional["gamma"]),
        "forward": (data["x"], *optional.values()),
        "inference": (data["x"], *stats.values(), *optional.values()),
    }
    functions = {
        "backward": backnorm.batch_norm_backward,
        "forward": backnorm.batch_norm_forward,
        "inference": backnorm.batch_norm_inference,
    }

    def caller(operation: str, layout: str) -> Callable[..., Results]:
        def call(
            arrays: Mapping[str, object], epsilon: object = 1e-3, out: object = None
        ) -> Results:
            operands = dict(arrays)
            # Missing arrays are missing: what Python itself says of them is no test of ours.
            for tensor in tables[operation]:
                operands.setdefault(tensor.role, None)
            result = functions[operation](**operands, epsilon=epsilon, data_format=layout, out=out)
            return {"y": result} if operation == "inference" else result._asdict()

        return call

    for layout in ("NCX", "NXC"):
        for operation, tensors in tables.items():
            yield Subject(
                f"canonical-{operation}-{layout}", operation, layout, tensors,
                caller(operation, layout), AttributeSpec("epsilon", "f64"), type_pairs=pairs,
            )  # fmt: skip


def dialect_subjects() -> Iterator[Subject]:
    """Every operator of every dialect, in each revision."""
    for dialect in DIALECTS:
        for op in operators(dialect).values():
            for schema in op.schemas.values():
                layout = schema.formats[0].layout
                name = "-".join(filter(None, (dialect, schema.op, schema.revision)))
                epsilon = next((a for a in schema.attributes if a.role == "epsilon"), None)
                yield Subject(
                    name,
                    schema.operation,
                    layout,
                    schema.inputs,
                    _front_door(dialect, op, schema),
                    epsilon,
                    min_rank=schema.ranks[0],
                    out_word=schema.outputs[0].name,
                    min_channels=schema.min_channels,
                    type_pairs=tuple(
                        (ELEMENT_TYPE_NAMES[rule.data], ELEMENT_TYPE_NAMES[channel])
                        for rule in schema.type_rules
                        for channel in rule.channel
                    ),
                    takes_out=schema.takes_memory or "memory_dx" in schema.words,
                    training=not schema.frozen,
                    copies_one=schema.copies_one,
                )


def _front_door(dialect, op, schema):
    tensors = {tensor.role: tensor for tensor in schema.inputs}
    roles = [tensor.role for tensor in schema.outputs]
    mask = {"output_mask": [True] * 3} if schema.choice == "output_mask" else {}

    def call(arrays: Mapping[str, object], epsilon: object = 1e-3, out: object = None) -> Results:
        inputs = {
            tensors[role].name: _shaped(tensors[role], array) for role, array in arrays.items()
        }
        memory = {} if out is None else {schema.outputs[0].name: out}
        attributes = attributes_in_training(schema, epsilon)
        if schema.style == "configured":
            revision = {"revision": schema.revision} if schema.revision else {}
            result = op(**attributes, **revision)(**inputs, **memory)
        else:
            result = op(**inputs, **attributes, **mask, **memory)
        if isinstance(result, np.ndarray):
            result = (result,)
        return {
            role: array.reshape(-1) if tensor.kind == "kept" else array
            for role, tensor, array in zip(roles, schema.outputs, result, strict=True)
        }

    return call


def _shaped(tensor: TensorSpec, array: object) -> object:
    """Return what is given per channel as the operator takes it."""
    if tensor.kind != "kept" or not isinstance(array, np.ndarray):
        return array
    return array[:, None, None] if array.ndim != 1 else array.reshape(1, -1, 1, 1)


SUBJECTS = {subject.name: subject for subject in (*_canonical(), *dialect_subjects())}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
