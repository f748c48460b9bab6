"""Our time by layout, in cells large enough: over each peer's, over the floor's, and its limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pandas as pd

from benchmarks.model import OURS_IN_FLOAT32, Operation, Result
from benchmarks.report.figures import cells, mean
from benchmarks.report.words import DASH, label, ratio_text

__all__ = ["LIMITS", "PEERS", "Limit", "layout_cells", "layout_tables", "limits_table"]

#: Who is compared one by one; the best peer is of all.
PEERS = ("torch", "tensorflow", "jax", "onednn")

# Bytes of x above which cells count: below, a call from Python costs more than the work.
_SMALL = 64 << 10

# Bytes of all arrays together that no cache is to hold.
_FAR = 48_000_000

# What is shown together; of float64 there are few cells.
_KINDS = {"float32": "float32", "bfloat16": "16 bits", "float16": "16 bits"}

# Columns of `layout_cells`, and whom they are beside.
_BESIDE = {"ratio": "the best peer", "in_float32": "the best peer", **{p: label(p) for p in PEERS}}


@dataclass(frozen=True, slots=True)
class Limit:
    """How much of another's time a float32 cell of an operation should take at the most.

    Attributes
    ----------
    op : str
    column : str
        Of `layout_cells`: whose time, and in which arithmetic ours.
    most : float
    """

    op: Operation
    column: str
    most: float

    def __str__(self) -> str:
        """Return what is counted, the cells above it."""
        arithmetic = ' with `arithmetic="float32"`' if self.column == "in_float32" else ""
        above = "slower than" if self.most == 1 else f"above {self.most:g} of"
        return f"{self.op}{arithmetic}, {above} {_BESIDE[self.column]}"


#: What no cell should exceed.
LIMITS = (
    Limit("backward", "in_float32", 0.9),
    Limit("backward", "torch", 1.0),
    Limit("backward", "tensorflow", 1.0),
    Limit("backward", "jax", 1.0),
    Limit("backward", "onednn", 1.25),
    Limit("forward", "ratio", 0.9),
    Limit("inference", "ratio", 1.0),
)


def layout_cells(result: Result) -> pd.DataFrame:
    """Return the distinct cells of float32 and 16 bits whose x is above 64 KiB.

    Columns are those of `cells`; `kind`, "float32" or "16 bits"; for each of `PEERS` our time over
    its; our time over the floor's, `to_floor` without a choice of arithmetic and
    `floor_in_float32`; and the same where all arrays together exceed 48 MB, `far` and
    `far_in_float32`. NaN where there is none.
    """
    frame = cells(result)
    kinds = pd.Categorical(frame.dtype.astype(str).map(_KINDS), dict.fromkeys(_KINDS.values()))
    frame = frame.assign(kind=kinds)
    frame = frame[(frame.nbytes > _SMALL) & frame.kind.notna()]
    far = [row.cell.least_traffic > _FAR for row in frame.row]
    figures = {
        **{peer: [row.ratio(peer=peer) for row in frame.row] for peer in PEERS},
        "floor_in_float32": [row.ratio_to_floor(OURS_IN_FLOAT32) for row in frame.row],
    }
    frame = frame.assign(**{name: pd.Series(v, frame.index, float) for name, v in figures.items()})
    return frame.assign(
        far=frame.to_floor.where(far), far_in_float32=frame.floor_in_float32.where(far)
    )


def layout_tables(frame: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Yield a table of means by operation and layout for float32, and one for 16 bits.

    In brackets stand the cells above 1. What `frame`, of `layout_cells`, has no cells of is left
    out.
    """
    for kind, found in frame.groupby("kind", observed=True):
        figures = _of_float32 if kind == "float32" else _of_16_bits
        lines = [
            {kind: f"{op}, {layout}", **figures(part)}
            for op, of_op in found.groupby("op", observed=True)
            for layout, part in (*of_op.groupby("layout"), ("both", of_op))
        ]
        yield pd.DataFrame(lines, dtype=str)


def limits_table(frames: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return in how many of some machines' `layout_cells` each of `LIMITS` is exceeded.

    And in how many of those it asks for less time than the floor takes.
    """
    lines = [
        (str(limit), *(_exceeded(frame, limit) for frame in frames.values())) for limit in LIMITS
    ]
    return pd.DataFrame(lines, columns=["float32 cells", *frames], dtype=str)


def _exceeded(frame: pd.DataFrame, limit: Limit) -> str:
    frame = frame[(frame.kind == "float32") & (frame.op == limit.op)]
    ratios = frame[limit.column]
    to_floor = frame.floor_in_float32 if limit.column == "in_float32" else frame.to_floor
    below = ((ratios > limit.most) & (limit.most * to_floor < ratios)).sum()
    return _above(ratios, limit.most) + (f"; {below} below the floor" if below else "")


def _of_float32(frame: pd.DataFrame) -> dict[str, str]:
    """Return the texts of a line, by the headings of their columns."""
    return {
        "default, best peer": f"{_mean(frame.ratio)} ({_above(frame.ratio)})",
        '`arithmetic="float32"`, best peer': _beside(frame.in_float32),
        **{label(peer): _beside(frame[peer]) for peer in PEERS},
        "floor, default and float32": f"{_mean(frame.far)}, {_mean(frame.far_in_float32)}",
    }


def _of_16_bits(frame: pd.DataFrame) -> dict[str, str]:
    return {
        "best peer": f"{_mean(frame.ratio)} ({_above(frame.ratio)})",
        **{label(peer): _beside(frame[peer]) for peer in PEERS},
        "floor": _mean(frame.far),
    }


def _beside(ratios: pd.Series) -> str:
    """Return a mean, and the cells above 1 if there are any."""
    above = (ratios > 1).sum()
    return f"{_mean(ratios)} ({above})" if above else _mean(ratios)


def _mean(ratios: pd.Series) -> str:
    return ratio_text(mean(ratios))


def _above(ratios: pd.Series, most: float = 1.0) -> str:
    """Return how many ratios are larger, of how many there are."""
    return f"{(ratios > most).sum()} of {ratios.count()}" if ratios.count() else DASH
