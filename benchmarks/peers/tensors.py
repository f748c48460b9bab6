"""Convert NumPy arrays to PyTorch tensors (N, C, spatial ...), and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from backnorm.peers.torch_tensors import to_array, to_tensor
from benchmarks.cells import Cell, Form
from benchmarks.peers.base import Data, Prepared

__all__ = ["LayerTensors", "allocating", "elements", "layer_tensors", "named_arrays"]

# Results of x's shape.
_WHOLE = ("dx", "y")


class LayerTensors(NamedTuple):
    """A cell's tensors: x and dy as (N, C, spatial ...), in the memory order of the layout."""

    x: Any
    dy: Any
    mean: Any
    variance: Any
    gamma: Any
    beta: Any


def layer_tensors(data: Data, place: str = "cpu") -> LayerTensors:
    """Return a cell's tensors on a PyTorch device; on the CPU they share the arrays' memory."""
    last = data.data_format == "NXC"
    x, dy = (elements(array, last, place) for array in (data.x, data.dy))
    vectors = data.mean, data.variance, data.gamma, data.beta
    return LayerTensors(x, dy, *(to_tensor(vector).to(place) for vector in vectors))


def elements(array: np.ndarray, last: bool, place: str = "cpu") -> Any:
    """Return an array of x's shape as a tensor; on the CPU both share their memory.

    Parameters
    ----------
    array : numpy.ndarray
        Contiguous.
    last : bool
        Whether the channels are the array's last axis. The result is then a view with the channels
        as second axis and channels_last memory (channels_last_3d for volumes).
    place : str
        PyTorch's name of a device.
    """
    # Move the tensor while it is contiguous, because a move may change the strides of a view.
    tensor = to_tensor(array).to(place)
    return tensor.movedim(-1, 1) if last else tensor


def named_arrays(names: Iterable[str], tensors: Iterable[Any], last: bool) -> dict[str, np.ndarray]:
    """Return as many tensors as there are names, as arrays in the cell's layout."""
    return {
        name: to_array(tensor.movedim(1, -1) if last and name in _WHOLE else tensor)
        for name, tensor in zip(names, tensors, strict=False)
    }


def allocating(cell: Cell, names: Iterable[str], call: Callable[[], Any]) -> dict[Form, Prepared]:
    """Return the allocating form of a contestant whose call returns a tensor, or several."""

    def results(returned: Any) -> dict[str, np.ndarray]:
        tensors = returned if isinstance(returned, tuple) else (returned,)
        return named_arrays(names, tensors, cell.layout == "NXC")

    return {"allocate": Prepared(call, results)}
