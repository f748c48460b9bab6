"""Calls on tensors that were seen before: from their metadata to the kernels.

What the checks of a call look at is the same in every step of a training loop. Their outcome is
kept by the metadata of the tensors, and the kernels get addresses: no array is made.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from backnorm.cpu.stage import Stage
from backnorm.recall import Kept

__all__ = ["Step", "address", "facts", "keep", "known"]


class Step:
    """The kernels of a forward pass and, once known, of its backward pass.

    Attributes
    ----------
    stage : Stage
        What the forward pass runs.
    x, weight : Hashable
        The metadata of these tensors.
    threads : int
        How many were allowed.
    backwards : dict of bool to Stage
        What the backward pass runs, with or without a gradient for the residual.
    """

    __slots__ = ("backwards", "stage", "threads", "weight", "x")

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.x: Hashable = None
        self.threads = 0
        self.weight: Hashable = None
        self.backwards: dict[bool, Stage] = {}


#: Steps that need neither checks nor copies.
known: Kept[Step] = Kept()


def keep(key: Hashable, step: Step, given: tuple[Any, ...], used: tuple[Any, ...]) -> bool:
    """Keep a step that passed the checks, if it used the tensors that were given; say whether."""
    direct = all(one is other for one, other in zip(given, used, strict=True))
    if direct:
        known.keep(key, step)
    return direct


def facts(tensor: Tensor | None) -> Hashable:
    """Return what the checks look at, and the strides."""
    if tensor is None:
        return None
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def address(tensor: Tensor | None) -> int:
    """Return where the elements are, 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()
