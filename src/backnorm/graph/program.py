"""A program: operators of any dialect, in an order in which they can run, and their tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from backnorm.errors import ArgumentValueError

__all__ = ["Program", "Step", "Tensor"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """What a program says of one of its tensors.

    Attributes
    ----------
    key : str
        The name by which the program's steps, and result files, know it.
    aliases : tuple of str
        All names under which it may be supplied, the key included.
    shape : tuple of int or None
        None where the program does not say.
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
        The operator, as `backnorm.dialects.registry` knows it.
    label : str
        What to call this step in tables and errors.
    attributes : mapping
        By the dialect's names.
    inputs, outputs : mapping of str to str
        From the operator's own name of a given input, or of a requested output, to the key of a
        tensor.
    """

    dialect: str
    op: str
    label: str
    attributes: Mapping[str, object]
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Program:
    """Steps in an order in which they can run, and their tensors.

    Attributes
    ----------
    steps : tuple of Step
    tensors : mapping of str to Tensor
        By key: every tensor that a step reads or writes.
    results : mapping of str to str
        What to hand back: name of the result -> key of the tensor.
    inputs : tuple of str
        Keys of the tensors that no step produces (derived).
    """

    steps: tuple[Step, ...]
    tensors: Mapping[str, Tensor]
    results: Mapping[str, str]
    inputs: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        produced = {key for step in self.steps for key in step.outputs.values()}
        read = dict.fromkeys(key for step in self.steps for key in step.inputs.values())
        object.__setattr__(self, "inputs", tuple(key for key in read if key not in produced))

    def find_inputs(self, names: Collection[str]) -> dict[str, str]:
        """Return the key of each input that `names` supplies, with the name that supplies it.

        Raises
        ------
        ArgumentValueError
            If `names` holds one tensor under two of its names.
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
