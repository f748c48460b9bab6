"""The parameters of every kernel: sizes at run time (Frame), the rest at compile time (Form)."""

from __future__ import annotations

from typing import Any, NamedTuple

from backnorm.gpu.geometry import Arithmetic


class Frame(NamedTuple):
    """The sizes that a kernel works with; `geometry.Tiling` explains them. The fields whose names
    end in `_units` are sizes divided by Form.align.
    """

    rows: Any
    width_units: Any
    total_units: Any
    channels: Any
    inner: Any
    pieces: Any
    tiles: Any
    per_block: Any
    units: Any


#: The names of the kernels' size arguments. Kernels are not compiled again for other values of
#: these arguments.
SIZES = Frame._fields

#: The names of the size arguments of those kernels that add up partial results.
PARTS = ("channels", "inner", "parts", "elements")

#: Arguments that may differ in every call: the weight of the batch in the running statistics, as a
#: sum of two numbers, high and low.
NUMBERS = ("momentum", "momentum_low")

#: Arguments that point to per-channel arrays, which may have any alignment.
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
    """The compile-time parameters of a kernel.

    Attributes
    ----------
    columns, partial, tile_rows, tile_columns, stages, align
        See `geometry.Tiling`.
    arithmetic, moments : Arithmetic
        The arithmetic of elements, and that of the sums from which mean and variance are computed;
        see `arithmetic`.
    relu, residual : bool
        Whether there is a ReLU, and a residual before it.
    ceiling : float
        The ceiling of the ReLU, or infinity.
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
