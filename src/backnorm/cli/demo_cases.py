"""The calls of `backnorm demo`: every dialect, layout and type, on real tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from backnorm.cli.npz import NpzFile
from backnorm.dialects import registry
from backnorm.dialects.schema import ELEMENT_TYPE_NAMES, OperatorSchema, TensorSpec
from backnorm.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64

__all__ = ["LAYERS", "Case", "Layer", "cases", "load_layers"]

LAYERS = ("conv8", "conv4", "dense")
TYPES = (FLOAT32, BFLOAT16, FLOAT16, FLOAT64)
LAYOUTS = ("NCX", "NXC")

# Most epsilons are a float32; a double gets the same value.
_EPSILON = float(np.float32(1e-5))


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Tensors of one batch-normalisation layer in training: float32, channels first."""

    name: str
    x: np.ndarray
    dy: np.ndarray
    mean: np.ndarray
    variance: np.ndarray
    gamma: np.ndarray


@dataclass(frozen=True, slots=True)
class Case:
    """One dialect's backward operator, in one layout and one type.

    Attributes
    ----------
    schema : OperatorSchema
    layout : {"NCX", "NXC"}
        Of memory. A dialect that knows channel axis 1 alone gets a transposed view for NXC.
    dtype : numpy.dtype
        Of x and dy.
    """

    schema: OperatorSchema
    layout: str
    dtype: np.dtype

    @property
    def dialect(self) -> str:
        """The dialect's name."""
        return self.schema.dialect

    @property
    def op(self) -> str:
        """The operator's name."""
        return self.schema.op

    def attributes(self, layer: Layer) -> dict[str, object]:
        """Return the operator's attributes."""
        rank = self._rank(layer)
        fitting = [f.name for f in self.schema.formats if self._fits(f.layout, f.rank, rank)]
        values = {
            "epsilon": _EPSILON,
            "training": True,
            "data_format": fitting[0] if fitting else None,
            "channel_axis": self._axis(rank),
        }
        return {
            spec.name: values[spec.role] if spec.role is not None else spec.usual
            for spec in self.schema.attributes
            if spec.role is not None or spec.required
        }

    @property
    def call(self) -> str:
        """The call, for people."""
        chosen = [f.name for f in self.schema.formats if f.layout == self.layout]
        return f"{self.dialect}.{self.op}({chosen[0] if len(self.schema.formats) > 1 else ''})"

    def inputs(self, layer: Layer) -> dict[str, np.ndarray]:
        """Return the operator's inputs.

        The parameters are rounded to the type of the data even where the dialect then takes
        them in float32, so that all dialects compute on the same numbers.
        """
        return {
            tensor.name: self._tensor(tensor, layer)
            for tensor in self.schema.inputs
            if tensor.required or tensor.role in ("gamma", "mean", "inverse_deviation")
        }

    def channels_first(self, dx: np.ndarray, layer: Layer) -> np.ndarray:
        """Return the gradient of x in the shape of the layer's own tensors."""
        first = np.moveaxis(dx, self._axis(dx.ndim), 1)
        return np.ascontiguousarray(first).reshape(layer.x.shape)

    def _tensor(self, tensor: TensorSpec, layer: Layer) -> np.ndarray:
        if tensor.kind == "opaque":
            return np.zeros(0, FLOAT32)
        if tensor.kind == "data":
            return self._data(getattr(layer, tensor.role))
        if tensor.role == "inverse_deviation":
            values = 1.0 / np.sqrt(layer.variance.astype(FLOAT64) + _EPSILON)
        elif tensor.role == "beta":
            values = np.zeros_like(layer.gamma)
        else:
            values = getattr(layer, tensor.role)
        array: np.ndarray = values.astype(self.dtype).astype(self._parameter_type())
        if tensor.kind == "kept":
            shape = [1] * self._rank(layer)
            shape[self._axis(len(shape))] = -1
            array = array.reshape(shape)
        return array

    def _data(self, array: np.ndarray) -> np.ndarray:
        shape = array.shape + (1,) * (self.schema.ranks[0] - array.ndim)
        array = array.reshape(shape).astype(self.dtype)
        if self.layout == "NCX":
            return array
        last = np.ascontiguousarray(np.moveaxis(array, 1, -1))
        return np.moveaxis(last, -1, self._axis(array.ndim))

    def _rank(self, layer: Layer) -> int:
        return max(layer.x.ndim, self.schema.ranks[0])

    def _axis(self, rank: int) -> int:
        """Return the channel axis as the dialect sees it."""
        takes_last = any(f.is_any or f.layout == "NXC" for f in self.schema.formats)
        return rank - 1 if self.layout == "NXC" and takes_last else 1

    def _fits(self, layout: str, own: int | None, rank: int) -> bool:
        return layout == self.layout and own in (None, rank)

    def _parameter_type(self) -> np.dtype:
        """Return the type of parameters: float32, if it may be."""
        types = next(
            [ELEMENT_TYPE_NAMES[name] for name in rule.channel]
            for rule in self.schema.type_rules
            if ELEMENT_TYPE_NAMES[rule.data] == self.dtype
        )
        return FLOAT32 if FLOAT32 in types else types[0]


def cases() -> Iterator[Case]:
    """Yield every case, by type, dialect and layout."""
    schemas = [
        next(op.schema for op in ops.values() if op.schema.operation == "backward")
        for ops in map(registry.operators, registry.DIALECTS)
    ]
    for dtype in TYPES:
        for schema in schemas:
            if any(ELEMENT_TYPE_NAMES[rule.data] == dtype for rule in schema.type_rules):
                for layout in LAYOUTS:
                    yield Case(schema, layout, dtype)


def load_layers() -> list[Layer]:
    """Return the tensors that ship with the package (see data/README.md there)."""
    with resources.as_file(resources.files("backnorm") / "data/digits_batchnorm.npz") as path:
        return _load(path)


def _load(path: Path) -> list[Layer]:
    fields = ("x", "dy", "mean", "variance", "gamma")
    with NpzFile(path) as file:
        return [Layer(n, *(file.load(f"{n}.{field}") for field in fields)) for n in LAYERS]
