"""Decide how a problem is computed on a GPU: `plan_gpu` returns the plan that `launch` executes.

Like a CPU's plan, a GPU's plan is a pure function of metadata. The bits of a result depend on
tiles, warps, blocks, schedule and arithmetic. All of these follow from the problem and its memory
layout, so every device returns the same bits. Triton's autotuner chooses only how many tiles a loop
loads ahead (see `kernels.tuning`), which changes no bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from backnorm.dtypes import FLOAT64, is_16_bit
from backnorm.gpu.geometry import Arithmetic, Tiling, power_of_two
from backnorm.layout import Extents
from backnorm.problem import Problem

Schedule = Literal["complete", "two passes"]

# Operations that compute mean and variance.
_OF_MOMENTS = ("forward", "reduce_forward")

# A warp has `_WARP` threads. With one load instruction, a thread reads at most `_VECTOR` bytes.
# Contiguous memory of `_RUN` bytes or more is read at full speed.
_WARP = 32
_VECTOR = 16
_RUN = 64

# Most of the numbers below, and the numbers that `_warps`, `_vectors` and `_stages` return, are the
# best of some thirty candidates. The candidates were timed on an H200 for 94 layers: those of
# ResNet-50 at batches of 32 and 256, and small layers. Each layer was timed contiguous and
# channels_last, in float32 and in bfloat16. Five numbers (`_TALL`, `_LEAST_ROW`, `_MOST_REPEATS`,
# `_FEW` and `_PROGRAMS`) are estimates, which were not compared with other candidates.
# `docs/gpu.md` has times of calls whose plans use these numbers.

# A run is a sequence of adjacent elements of one channel. If runs have fewer elements than
# `_SHORT`, programs read rows that contain all channels.
_SHORT = 1024

# If a channel has several adjacent elements (inner > 1), the schedule "two passes" uses the
# geometry *columns* only for arrays with at least this many rows (`outer`). `_as_columns` has the
# other conditions, and an exception for masks.
_TALL = 32

# If a row has fewer elements than this, it is joined with the rows that follow it in memory.
_LEAST_ROW = 32
_MOST_REPEATS = 16

# The number of elements that a program reads. This number is so large that starting a program and
# adding up its final sum take only a small part of the time. It is so small that only a small part
# of the device is idle while the last programs run.
_SHARE = 32768

# The largest number of bytes in a tile's row, in the geometry *columns* with two passes. Wider
# tiles would not be read faster, but each program would store more partial results: it stores one
# for each column of its tiles.
_COLUMNS = 256

# The fewest rows that a program reads, in the geometry *columns*. For each column, a program stores
# two float64 numbers in a backward pass, and four in a forward pass. If a program read fewer rows,
# storing these numbers would be a large part of the program's memory traffic. If a program with
# only `_LEAST_ROWS` rows would mean more than about `_ENOUGH` programs, each program reads more
# rows, so that the second kernel has fewer partial results to add up. If there would be fewer than
# `_FEW` programs, tiles are made narrower, which makes more programs.
_LEAST_ROWS = 128
_ENOUGH = 512
_FEW = 512

# In the geometry *segments*, a problem with enough tiles is divided among at least this number of
# programs, so that each multiprocessor runs several programs.
_PROGRAMS = 1024

# If a unit (a channel, or the columns of a tile) has at most `_COMPLETE` elements, one launch of a
# kernel is faster than three launches (sum, finish, apply). With one launch, a single program reads
# the whole unit, at about 100 GB/s. With three, many programs share a unit, but each further launch
# costs about 3 microseconds. For odd runs (see `_ODD`), the largest number of elements is
# `_COMPLETE_ODD`.
_COMPLETE = 32768
_COMPLETE_ODD = 8192

# In the geometry *segments*, if a program computes a whole unit with more elements than this
# number, the program prefetches tiles.
_AHEAD = 16384

# A channel's runs (contiguous elements) are odd if their size is not a multiple of this number of
# bytes. With one load instruction, a thread reads fewer bytes of an odd run than of a run that is
# not odd. Programs that prefetched odd runs took several times as long as programs that did not.
_ODD = 8


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """How a problem is computed on a GPU; printable with ``print(plan)``.

    Attributes
    ----------
    problem : Problem
    extents : Extents
        The arrays as (outer, channels, inner).
    tiling : Tiling
    schedule : {"complete", "two passes"}
        complete: a program sums and writes all elements of its channels. two passes: sums and
        output have separate launches.
    arithmetic : Arithmetic
        The arithmetic of elements, and of the sums of a backward pass. Mean and variance have the
        accuracy of float64 even if it is float32.
    reasons : tuple of str
        The reasons of the decisions, as text.
    """

    problem: Problem
    extents: Extents
    tiling: Tiling
    schedule: Schedule
    arithmetic: Arithmetic
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        """Return the plan as text, one fact per line."""
        problem, extents, tiling = self.problem, self.extents, self.tiling
        shape = "x".join(map(str, problem.shape))
        axes = ", ".join(map(str, problem.channel_axes))
        kind = "columns" if tiling.columns else "segments"
        apart = self.arithmetic == "float32" and problem.operation in _OF_MOMENTS
        moments = ", mean and variance float64" if apart else ""
        stages = "stages tuned" if tiling.stages is None else f"{tiling.stages} stages"
        lines = [
            f"{problem.operation} {problem.dtype} {shape}, channel axis {axes}, "
            f"statistics {problem.statistics_dtype}",
            f"  memory     outer {extents.outer}, channels {extents.channels}, "
            f"inner {extents.inner}",
            f"  kernels    {kind}: tiles of {tiling.tile_rows} x {tiling.tile_columns} elements, "
            f"{tiling.units} units of {tiling.blocks} programs of {tiling.per_block} tiles, "
            f"{tiling.warps} warps, {stages}",
            f"  schedule   {self.schedule}",
            f"  arithmetic {self.arithmetic}{moments}",
        ]
        return "\n".join(lines + [f"  because    {reason}" for reason in self.reasons])


def plan_gpu(problem: Problem, extents: Extents) -> GpuPlan:
    """Decide how `problem` is computed on a GPU.

    Parameters
    ----------
    problem : Problem
    extents : Extents
        Memory form of x, dy and dx.

    Returns
    -------
    GpuPlan
    """
    if problem.reproducible or (problem.activation is not None and not problem.relu):
        raise ValueError("no GPU kernel has reproducible sums or an activation other than a ReLU")
    arithmetic, why = _arithmetic(problem)
    schedule, reason = _schedule(problem, extents)
    reasons = f"{arithmetic}: {why}", f"{schedule}: {reason}"
    tiling = _tiling(problem, extents, schedule)
    return GpuPlan(problem, extents, tiling, schedule, arithmetic, reasons)


def _arithmetic(problem: Problem) -> tuple[Arithmetic, str]:
    """Return the arithmetic of elements, and the reason.

    In float32 arithmetic, only the sums for mean and variance have the accuracy of float64. The
    variance is the difference of two numbers that are computed from these sums, so the leading
    digits of the two numbers may cancel. All other sums are float32 sums that are compensated; such
    a sum takes as many registers as a float64 sum.
    """
    if problem.dtype == FLOAT64:
        return "compensated", "no type is wider than float64"
    if problem.arithmetic == "float64":
        return "float64", "wider than the elements"
    suffices = is_16_bit(problem.dtype)
    return "float32", "suffices for 16-bit elements" if suffices else "requested"


def _schedule(problem: Problem, extents: Extents) -> tuple[Schedule, str]:
    """Return the schedule, and the reason."""
    if problem.operation not in ("backward", "forward"):
        return "two passes", "the operation has only one of the passes"
    if not _holds_channels(problem, extents):
        return "two passes", "the elements of a channel are in several units"
    units = _tiling(problem, extents, "complete").units
    unit = problem.size // max(1, units)
    most = _COMPLETE_ODD if _is_odd(problem, extents) else _COMPLETE
    if unit <= most:
        return "complete", f"one launch: a unit has no more than {most} elements"
    return "two passes", f"{units} units of {unit} elements are divided among programs"


def _warps(problem: Problem, extents: Extents, schedule: Schedule, columns: bool) -> int:
    """Return the number of warps of a program.

    In the schedule "two passes", a program has only one or two warps, so that many programs run on
    a multiprocessor at the same time. In the schedule "complete", a program may run alone on its
    multiprocessor, so it has 8 or 16 warps, or 4 if it reads odd runs (see `_ODD`).
    """
    if schedule == "two passes":
        return 1 if is_16_bit(problem.dtype) and not columns else 2
    if columns:
        # A thread holds the coefficients of all its columns in registers. With 16-bit elements a
        # thread has eight columns, so the registers suffice for only 8 warps.
        return 8 if is_16_bit(problem.dtype) else 16
    return 4 if _is_odd(problem, extents) else 8


def _vectors(problem: Problem, schedule: Schedule, columns: bool) -> int:
    """Return how many times `_VECTOR` bytes a thread reads of a tile."""
    if schedule == "two passes" and columns:
        # A thread keeps two float64 sums of each of its elements in registers. Four vectors have 32
        # elements of 16 bits, whose sums would take 128 registers.
        return 4 if problem.operation in _OF_MOMENTS and not is_16_bit(problem.dtype) else 2
    return 1 if is_16_bit(problem.dtype) else 2


def _stages(problem: Problem, extents: Extents, columns: bool, tiles: int) -> int:
    """Return how many tiles a program of the schedule "complete" loads or computes at a time."""
    prefetches = columns or (problem.count > _AHEAD and not _is_odd(problem, extents))
    return 3 if prefetches and tiles > 2 else 1


def _tiling(problem: Problem, extents: Extents, schedule: Schedule) -> Tiling:
    outer, channels, inner = extents
    complete = schedule == "complete"
    itemsize = problem.dtype.itemsize
    vector = _VECTOR // itemsize
    columns = _as_columns(problem, extents, vector, complete=complete)
    repeats = _repeats(problem, extents, vector) if columns else 1
    width = channels * inner * repeats if columns else inner
    rows = -(-problem.size // max(1, width)) if columns else outer
    warps = _warps(problem, extents, schedule, columns)
    elements = warps * _WARP * vector * _vectors(problem, schedule, columns)
    run = _RUN // itemsize
    if columns:
        # If there would be too few programs, tiles are made narrower, which gives more programs.
        tile_columns = _best(width, run, run if complete else _COLUMNS // itemsize)
        least = min(rows, _LEAST_ROWS)
        while tile_columns > run and -(-width // tile_columns) * (rows // max(1, least)) < _FEW:
            tile_columns //= 2
    else:
        tile_columns = _best(width, run, elements)
    tile_rows = min(max(1, elements // tile_columns), power_of_two(rows))
    pieces = 1 if columns else max(1, -(-width // tile_columns))
    units = max(1, -(-width // tile_columns)) if columns else channels
    tiles = -(-rows // tile_rows) * pieces
    tile = tile_rows * tile_columns
    if complete:
        per_block = tiles
    elif columns:
        rows_each = rows * units // _ENOUGH
        per_block = -(-max(_LEAST_ROWS, rows_each) // tile_rows)
    else:
        per_block = min(_SHARE, -(-problem.size // _PROGRAMS)) // tile
    per_block = max(1, per_block)
    return Tiling(
        columns=columns,
        rows=rows,
        width=width,
        repeats=repeats,
        partial=columns and rows * width != problem.size,
        tile_rows=tile_rows,
        tile_columns=tile_columns,
        units=units,
        pieces=pieces,
        tiles=tiles,
        per_block=per_block,
        blocks=-(-tiles // per_block),
        warps=max(1, min(warps, tile // (_WARP * vector))),
        stages=_stages(problem, extents, columns, per_block) if complete else None,
        align=math.gcd(16, width, problem.size),
    )


def _as_columns(problem: Problem, extents: Extents, vector: int, *, complete: bool) -> bool:
    """Whether to use the geometry "columns", whose rows contain all channels."""
    outer, channels, inner = extents
    if inner == 1:
        return True
    if channels == 1:
        return False
    if inner % 8 and _has_mask(problem):
        # A program must read and write whole bytes of the mask, but a run of one channel may begin
        # in the middle of a byte.
        return True
    # With the schedule "complete", the geometry is "segments" even if runs are short or unaligned.
    # Unaligned runs are then read element by element, but this is still faster than two passes.
    return not complete and outer >= _TALL and (inner < _SHORT or inner % vector != 0)


def _has_mask(problem: Problem) -> bool:
    """Whether the problem's kernels read or write the mask of a ReLU."""
    reads = any(operand.kind == "mask" for operand in problem.signature.operands)
    return problem.relu and (reads or problem.writes_mask)


def _repeats(problem: Problem, extents: Extents, vector: int) -> int:
    """Return how many times the sequence of all channels is repeated in a row. The number is so
    large that rows are wide and aligned, if that is possible.
    """
    row = extents.channels * extents.inner
    multiple = max(vector, 8 if problem.relu else 1)
    repeats = multiple // math.gcd(row, multiple)
    if not problem.relu and extents.outer < 2 * repeats:
        repeats = 1
    while 0 < row * repeats < _LEAST_ROW and repeats < _MOST_REPEATS and extents.outer > repeats:
        repeats *= 2
    return repeats


def _best(width: int, least: int, most: int) -> int:
    """Return a tile's number of columns, a power of two.

    The last tile of a row may extend beyond the row, so the tiles of a row can have more columns in
    all than the row. For each candidate number the columns of all tiles are added up. Let `fewest`
    be the smallest of these totals. The result is the largest candidate whose total is at most 9/8
    of `fewest`.
    """
    candidates = [1 << power for power in range(least.bit_length() - 1, most.bit_length())]
    spent = {columns: -(-max(1, width) // columns) * columns for columns in candidates}
    fewest = min(spent.values())
    return max(columns for columns in candidates if spent[columns] <= fewest * 9 // 8)


def _holds_channels(problem: Problem, extents: Extents) -> bool:
    """Whether this is a pass with two phases, and a unit of work can have a whole channel."""
    vector = _VECTOR // problem.dtype.itemsize
    return problem.operation in ("backward", "forward") and (
        not _as_columns(problem, extents, vector, complete=True)
        or (extents.inner == 1 and _repeats(problem, extents, vector) == 1)
    )


def _is_odd(problem: Problem, extents: Extents) -> bool:
    """Whether a channel's contiguous runs are odd: their size is no multiple of `_ODD` bytes."""
    return extents.inner > 1 and extents.inner * problem.dtype.itemsize % _ODD != 0
