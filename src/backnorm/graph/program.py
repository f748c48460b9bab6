"""Programs: operators of any dialect in topological order, and their tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from backnorm.errors import ArgumentValueError
from backnorm.graph.strict_json import expect

_LONGEST_NAME = 200
# A .safetensors file keeps its metadata under this key, so no tensor may have this name.
_RESERVED_NAMES = ("__metadata__",)


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
    id : int or None
        The id of the logical tensor in a oneDNN graph; None in a call.
    """

    key: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...] | None = None
    dtype: np.dtype | None = None
    stride: tuple[int, ...] | None = None
    id: int | None = None


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
    id : int or None
        The id of the operator in a oneDNN graph; None in a call.
    """

    dialect: str
    op: str
    label: str
    attributes: Mapping[str, object]
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    id: int | None = None


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


def check_name(value: object, where: str) -> str:
    """Return `value` if it can name a tensor: short, printable, not reserved in tensor files."""
    name = expect(value, str, where)
    if not (0 < len(name) <= _LONGEST_NAME and name.isprintable()) or name in _RESERVED_NAMES:
        raise ArgumentValueError(
            where,
            "cannot name a tensor",
            came=repr(name[:_LONGEST_NAME]),
            accepted=f"1 to {_LONGEST_NAME} printable characters",
        )
    return name
