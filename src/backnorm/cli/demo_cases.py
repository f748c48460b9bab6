"""The calls of `backnorm demo`: every dialect, layout and type, on real tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from backnorm.cli.npz import NpzFile
from backnorm.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64

__all__ = ["LAYERS", "Case", "Layer", "cases", "load_layers"]

LAYERS = ("conv8", "conv4", "dense")
TYPES = (FLOAT32, BFLOAT16, FLOAT16, FLOAT64)
LAYOUTS = ("NCX", "NXC")

# oneDNN's and TensorFlow's epsilon is a float32; nGraph's double gets the same value.
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
    dialect, op : str
    layout : {"NCX", "NXC"}
        Of memory. nGraph knows channel axis 1 alone: with NXC it gets a transposed view.
    dtype : numpy.dtype
        Of x and dy.
    """

    dialect: str
    op: str
    layout: str
    dtype: np.dtype

    @property
    def attributes(self) -> dict[str, object]:
        """The operator's attributes."""
        if self.dialect == "ngraph":
            return {"epsilon": _EPSILON}
        if self.dialect == "tensorflow":
            return {
                "epsilon": _EPSILON,
                "data_format": "NCHW" if self.layout == "NCX" else "NHWC",
            }
        return {"epsilon": _EPSILON, "data_format": self.layout}

    @property
    def call(self) -> str:
        """The call, for people."""
        return f"{self.dialect}.{self.op}({self.attributes.get('data_format', '')})"

    def inputs(self, layer: Layer) -> dict[str, np.ndarray]:
        """Return the operator's inputs.

        The parameters are rounded to the type of the data even where the dialect then takes
        them in float32, so that all dialects compute on the same numbers.
        """
        wide = self.dtype if self.dialect == "ngraph" else _parameter_type(self.dtype)
        arrays = {"x": self._data(layer.x), "dy": self._data(layer.dy)}
        for name in ("mean", "variance", "gamma"):
            arrays[name] = getattr(layer, name).astype(self.dtype).astype(wide)
        arrays["beta"] = np.zeros_like(arrays["gamma"])
        arrays["nothing"] = np.zeros(0, FLOAT32)
        return {port: arrays[name] for port, name in _PORTS[self.dialect].items()}

    def channels_first(self, dx: np.ndarray, layer: Layer) -> np.ndarray:
        """Return the gradient of x in the shape of the layer's own tensors."""
        first = dx if self.layout == "NCX" or self.dialect == "ngraph" else np.moveaxis(dx, -1, 1)
        return np.ascontiguousarray(first).reshape(layer.x.shape)

    def _data(self, array: np.ndarray) -> np.ndarray:
        if self.dialect == "tensorflow" and array.ndim == 2:
            array = array[:, :, None, None]
        array = array.astype(self.dtype)
        if self.layout == "NCX":
            return array
        last = np.ascontiguousarray(np.moveaxis(array, 1, -1))
        return np.moveaxis(last, -1, 1) if self.dialect == "ngraph" else last


def cases() -> Iterator[Case]:
    """Yield every case, by type, dialect and layout; float64 is nGraph's alone."""
    for dtype in TYPES:
        for dialect, op in _OPERATORS.items():
            if dtype == FLOAT64 and dialect != "ngraph":
                continue
            for layout in LAYOUTS:
                yield Case(dialect, op, layout, dtype)


def load_layers() -> list[Layer]:
    """Return the tensors that ship with the package (see data/README.md there)."""
    with resources.as_file(resources.files("backnorm") / "data/digits_batchnorm.npz") as path:
        return _load(path)


def _load(path: Path) -> list[Layer]:
    fields = ("x", "dy", "mean", "variance", "gamma")
    with NpzFile(path) as file:
        return [Layer(n, *(file.load(f"{n}.{field}") for field in fields)) for n in LAYERS]


def _parameter_type(dtype: np.dtype) -> np.dtype:
    return FLOAT64 if dtype == FLOAT64 else FLOAT32


_OPERATORS = {
    "onednn_graph": "BatchNormTrainingBackward",
    "onednn_spec": "BatchNormTrainingBackprop",
    "ngraph": "BatchNormTrainingBackprop",
    "tensorflow": "FusedBatchNormGradV3",
}

# Input of the dialect's operator -> what it is.
_PORTS: Mapping[str, Mapping[str, str]] = {
    "onednn_graph": {
        "src": "x",
        "diff_dst": "dy",
        "mean": "mean",
        "variance": "variance",
        "gamma": "gamma",
    },
    "onednn_spec": {
        "input_forward": "x",
        "output_delta": "dy",
        "mean": "mean",
        "variance": "variance",
        "gamma": "gamma",
    },
    "ngraph": {
        "input": "x",
        "gamma": "gamma",
        "beta": "beta",
        "mean": "mean",
        "variance": "variance",
        "delta": "dy",
    },
    "tensorflow": {
        "y_backprop": "dy",
        "x": "x",
        "scale": "gamma",
        "reserve_space_1": "mean",
        "reserve_space_2": "variance",
        "reserve_space_3": "nothing",
    },
}
