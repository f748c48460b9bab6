"""Programs: operators of any dialect in topological order, and their tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from backnorm.errors import ArgumentValueError

#: If a backward pass is fused with a ReLUBackward, it has one more input, which is the src or the
#: dst of the ReLU. This is the name of this input.
RELU_PORT = "relu"


@dataclass(frozen=True, slots=True)
class Tensor:
    """The declaration of a tensor in a program.

    Attributes
    ----------
    key : str
        The name of the tensor in the program's steps and in result files.
    aliases : tuple of str
        All names under which the tensor may be supplied, including the key.
    shape : tuple of int or None
        None if not declared.
    dtype : numpy.dtype or None
    stride : tuple of int or None
        Declared distance, in elements, between neighbours along each axis.
    """

    key: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...] | None = None
    dtype: np.dtype | None = None
    stride: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One operator of a program.

    Attributes
    ----------
    dialect, op : str
        The operator's name in `backnorm.dialects.registry` or `backnorm.graph.pointwise`.
    label : str
        The name of this step in tables and errors.
    attributes : mapping
        The attributes by the dialect's names.
    inputs, outputs : mapping of str to str
        The tensor's key for each supplied input and each requested output, by the operator's
        names for them.
    dtype : numpy.dtype or None
        The element type of the first output; None if not declared.
    relu : bool
        Whether a ReLU after the normalisation, or a ReLUBackward before the backward pass, is fused
        into this step. A fused backward pass has the input `RELU_PORT`.
    """

    dialect: str
    op: str
    label: str
    attributes: Mapping[str, object]
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    dtype: np.dtype | None = None
    relu: bool = False

    @property
    def title(self) -> str:
        """The name of the operator, and that of the ReLU or ReLUBackward fused with it, if any."""
        if not self.relu:
            return self.op
        return f"ReLUBackward + {self.op}" if RELU_PORT in self.inputs else f"{self.op} + ReLU"


@dataclass(frozen=True, slots=True)
class Program:
    """Steps in topological order, and their tensors.

    Attributes
    ----------
    steps : tuple of Step
    tensors : mapping of str to Tensor
        All tensors that a step reads or writes, by key.
    results : mapping of str to str
        The results to return: name of the result -> key of the tensor.
    notes : tuple of str
        Remarks to show to the user.
    """

    steps: tuple[Step, ...]
    tensors: Mapping[str, Tensor]
    results: Mapping[str, str]
    notes: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        """The keys of the tensors that a step reads and no step produces."""
        produced = {key for step in self.steps for key in step.outputs.values()}
        read = dict.fromkeys(key for step in self.steps for key in step.inputs.values())
        return tuple(key for key in read if key not in produced)

    def find_inputs(self, names: Collection[str]) -> dict[str, str]:
        """Return the inputs that have a name in `names`, as a dict from their keys to these names.

        Raises
        ------
        ArgumentValueError
            If `names` contains two names of one tensor.
        """
        found = {}
        for key in self.inputs:
            present = [alias for alias in self.tensors[key].aliases if alias in names]
            if len(present) > 1:
                raise ArgumentValueError(
                    present[1], f"is another name of {present[0]!r}, and both are given"
                )
            if present:
                found[key] = present[0]
        return found
