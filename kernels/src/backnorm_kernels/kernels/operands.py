"""Named tuples that kernels pass on instead of long lists of parameters."""

from __future__ import annotations

from typing import Any, NamedTuple


class Table(NamedTuple):
    """The table of channels: see `backnorm_kernels.scratch`.

    `pitch` is the distance between two rows, in float64 elements.
    """

    values: Any
    pitch: Any
    channels: Any


class Pairs(NamedTuple):
    """Two sums per column, each a pair (high, low), in four rows.

    Each row begins `pitch` elements after the row before it.
    """

    values: Any
    pitch: Any


class Operands(NamedTuple):
    """The arrays that are summed: x and dy.

    In a forward pass, only x is summed, and `dy` is an `Epilogue` instead of a `Gradient`.
    """

    x: Any
    dy: Any


class Rows(NamedTuple):
    """The coefficients of channels or columns, in four rows: mean, shift, slope and gain.

    Each row begins `pitch` elements after the row before it.
    """

    values: Any
    pitch: Any


class Output(NamedTuple):
    """The arrays of the second phase, and the coefficients from which the output is computed.

    Attributes
    ----------
    x
        The input.
    dy
        A `Gradient`, or the `Epilogue` of a forward pass.
    out
        The output, which is written.
    exact, rows : Rows
        The coefficients in float64, and in the type in which elements are computed.
    period : int
        The number of channels or columns after which coefficients repeat.
    streaming : bool
        Whether the output is written past the caches.
    frozen : bool
        Whether dx is computed from dy alone.
    """

    x: Any
    dy: Any
    out: Any
    exact: Any
    rows: Any
    period: Any
    streaming: Any
    frozen: Any


class Bins(NamedTuple):
    """The bins of columns; the module `bins` explains them.

    `values` is float64 memory. For each of the two sums, it has a row for the limit and a row for
    each digit. The distance between two rows is `pitch` elements.
    """

    values: Any
    pitch: Any


class Sums(NamedTuple):
    """The operands and memory of a participant for the items of the first phase.

    Attributes
    ----------
    operands : Operands
    table : Table
    scratch
        The memory of the participant: a named tuple of the geometry.
    pairs : Pairs
        The partial sums of all participants.
    """

    operands: Any
    table: Any
    scratch: Any
    pairs: Any
