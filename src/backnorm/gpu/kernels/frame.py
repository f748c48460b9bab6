"""What every kernel is told of the array: sizes when it runs, the rest when it is compiled."""

from __future__ import annotations

from typing import Any, NamedTuple

from backnorm.gpu.geometry import Arithmetic

__all__ = ["CHANNELS", "NUMBERS", "PARTS", "SIZES", "Form", "Frame"]


class Frame(NamedTuple):
    """Sizes, within kernels; see `geometry.Tiling`. Those in units are multiples of Form.align."""

    rows: Any
    width_units: Any
    total_units: Any
    channels: Any
    inner: Any
    pieces: Any
    tiles: Any
    per_block: Any
    units: Any


#: The kernels' arguments of these names: no kernel is compiled anew for another size.
SIZES = Frame._fields

#: The same of the kernels that add up partial results.
PARTS = ("channels", "inner", "parts", "elements")

#: Arguments that are other at every call: the share of a batch in running statistics.
NUMBERS = ("momentum", "momentum_low")

#: Arguments that point to a value per channel: they may lie anywhere in memory.
CHANNELS = (
    "p_mean",
    "p_variance",
    "p_gamma",
    "p_beta",
    "p_dgamma",
    "p_dbeta",
    "p_running_mean",
    "p_running_variance",
    "p_moved_mean",
    "p_moved_variance",
)


class Form(NamedTuple):
    """What a kernel is compiled for.

    Attributes
    ----------
    columns, partial, tile_rows, tile_columns, stages, align
        See `geometry.Tiling`.
    arithmetic, moments : Arithmetic
        Of elements, and of the sums that mean and variance are made of; see `arithmetic`.
    relu, residual : bool
        Whether there is a ReLU, and a residual before it.
    ceiling : float
        Of the ReLU; infinity without one.
    training : bool
        Whether the statistics are functions of x.
    has_gamma, has_beta : bool
    epsilon : float
    """

    columns: bool
    partial: bool
    tile_rows: int
    tile_columns: int
    stages: int
    align: int
    arithmetic: Arithmetic
    moments: Arithmetic
    relu: bool
    residual: bool
    training: bool
    has_gamma: bool
    has_beta: bool
    epsilon: float
    ceiling: float
