"""The oneDNN Graph model: operators joined by logical tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """Metadata of a tensor. Two logical tensors with the same id describe the same tensor.

    Attributes
    ----------
    id : int
    dtype : numpy.dtype
    shape : tuple of int or None
        None for an output whose shape is not known before the graph runs.
    stride : tuple of int or None
        In elements; None unless `layout_type` is "strided" and the shape is known.
    layout_type : {"strided", "any", "undef"}
    property_type : {"undef", "variable", "constant"}
    name : str or None
        An extension of backnorm: oneDNN's own files have no names of tensors.
    """

    id: int
    dtype: np.dtype
    shape: tuple[int, ...] | None
    stride: tuple[int, ...] | None
    layout_type: str
    property_type: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator: its kind, attributes, and the ids of its logical tensors in index order."""

    id: int
    name: str
    kind: str
    attributes: Mapping[str, object]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """A valid, acyclic graph.

    Attributes
    ----------
    operators : tuple of Operator
        In topological order: each follows the producers of its inputs.
    tensors : mapping of int to LogicalTensor
    outputs : tuple of int
        Ids of the tensors that the graph returns.
    notes : tuple of str
        Remarks to show to the user.
    """

    operators: tuple[Operator, ...]
    tensors: Mapping[int, LogicalTensor]
    outputs: tuple[int, ...]
    notes: tuple[str, ...] = ()
