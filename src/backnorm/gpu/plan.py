"""Decide how a problem is computed on a GPU: `plan_gpu` returns the plan that `launch` executes.

Like a CPU's plan, a GPU's plan is a pure function of metadata. The bits of a result depend on
tiles, blocks, schedule and arithmetic. Without tuning, tiles, blocks and schedule follow from the
problem and its memory layout, so all devices that compute in the same arithmetic return the same
bits. Only one choice depends on the device. If elements of up to 32 bits need the accuracy of
float64, some devices compute in float64, and others in pairs of float32 (see `kernels.arithmetic`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from backnorm.dtypes import FLOAT64, is_16_bit
from backnorm.gpu.device import Gpu
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

# Most of the numbers below, and the numbers of `_knobs`, are the best of some thirty candidates.
# The candidates were timed on an H200 for 94 layers: those of ResNet-50 at batches of 32 and 256,
# and small layers. Each layer was timed contiguous and channels_last, in float32 and in bfloat16.
# Five numbers (`_TALL`, `_NARROW`, `_MOST_REPEATS`, `_FEW` and `_PROGRAMS`) are estimates, which
# were not compared with other candidates. `docs/gpu.md` has times of calls whose plans use these
# numbers.

# A run is a sequence of adjacent elements of one channel. If runs have fewer elements than
# `_SHORT`, programs read rows that contain all channels.
_SHORT = 1024

# If a channel has several adjacent elements (inner > 1), the schedule "two passes" uses the
# geometry *columns* only for arrays with at least this many rows (`outer`). `_as_columns` has the
# other conditions, and an exception for masks.
_TALL = 32

# If a row has fewer elements than this, it is joined with the rows that follow it in memory.
_NARROW = 32
_MOST_REPEATS = 16

# The number of elements that a program reads. This number is so large that starting a program and
# adding up its final sum take only a small part of the time. It is so small that only a small part
# of the device is idle while the last programs run.
_SHARE = 32768
_SHARES = (_SHARE, 2 * _SHARE)

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
class Knobs:
    """The choices of a plan that tuning may vary; the rest follows from problem, layout and device.

    Attributes
    ----------
    schedule : {"complete", "two passes"}
        complete: a program sums and writes all elements of its channels. two passes: sums and
        output have separate launches.
    warps : int
        Warps of a program; a power of two.
    vectors : int
        Runs of 16 bytes that a thread reads of a tile; a power of two.
    stages : int
        Tiles that are being loaded or computed at the same time; 1 means no prefetching.
    share : int
        Only for two passes. In segments: the most elements of a program. In columns, the rows of a
        program are proportional to `share`.
    """

    schedule: Schedule
    warps: int
    vectors: int
    stages: int
    share: int


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
        As in `Knobs`.
    arithmetic : Arithmetic
        The arithmetic of elements, and of the sums of a backward pass.
    moments : Arithmetic
        The arithmetic of the sums from which mean and variance are computed. It has the accuracy of
        float64 even if elements are computed in float32.
    reasons : tuple of str
        The reasons of the decisions, as text.
    """

    problem: Problem
    extents: Extents
    tiling: Tiling
    schedule: Schedule
    arithmetic: Arithmetic
    moments: Arithmetic
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        """Return the plan as text, one fact per line."""
        problem, extents, tiling = self.problem, self.extents, self.tiling
        shape = "x".join(map(str, problem.shape))
        axes = ", ".join(map(str, problem.channel_axes))
        kind = "columns" if tiling.columns else "segments"
        apart = self.moments != self.arithmetic and problem.operation in _OF_MOMENTS
        moments = f", mean and variance {self.moments}" if apart else ""
        lines = [
            f"{problem.operation} {problem.dtype} {shape}, channel axis {axes}, "
            f"statistics {problem.statistics_dtype}",
            f"  memory     outer {extents.outer}, channels {extents.channels}, "
            f"inner {extents.inner}",
            f"  kernels    {kind}: tiles of {tiling.tile_rows} x {tiling.tile_columns} elements, "
            f"{tiling.units} units of {tiling.blocks} programs of {tiling.per_block} tiles, "
            f"{tiling.warps} warps, {tiling.stages} stages",
            f"  schedule   {self.schedule}",
            f"  arithmetic {self.arithmetic}{moments}",
        ]
        return "\n".join(lines + [f"  because    {reason}" for reason in self.reasons])


@functools.lru_cache(maxsize=1024)
def plan_gpu(problem: Problem, extents: Extents, gpu: Gpu, knobs: Knobs | None = None) -> GpuPlan:
    """Decide how `problem` is computed on a GPU.

    Parameters
    ----------
    problem : Problem
    extents : Extents
        Memory form of x, dy and dx.
    gpu : Gpu
    knobs : Knobs, optional
        The choices, for tuning and tests; None: those of the heuristic. A schedule that the shape
        does not allow raises ValueError.

    Returns
    -------
    GpuPlan
    """
    if problem.reproducible or (problem.activation is not None and not problem.relu):
        raise ValueError("no GPU kernel has reproducible sums or an activation other than a ReLU")
    arithmetic, moments, reasons = _arithmetics(problem, gpu)
    if knobs is None:
        knobs, reason = _choice(problem, extents)
    elif knobs.schedule == "complete" and not _holds_channels(problem, extents):
        raise ValueError("no program can hold a channel: its elements are in several units")
    else:
        reason = "requested"
    reasons = (*reasons, f"{knobs.schedule}: {reason}")
    tiling = _tiling(problem, extents, knobs)
    return GpuPlan(problem, extents, tiling, knobs.schedule, arithmetic, moments, reasons)


def _arithmetics(problem: Problem, gpu: Gpu) -> tuple[Arithmetic, Arithmetic, tuple[str, ...]]:
    """Return the arithmetic of elements, the arithmetic of mean and variance, and the reasons.

    In float32 arithmetic, only the sums for mean and variance have the accuracy of float64. The
    variance is the difference of two numbers that are computed from these sums, so the leading
    digits of the two numbers may cancel. All other sums are float32 sums that are compensated; such
    a sum takes as many registers as a float64 sum.
    """
    wide, reason = _wide(problem, gpu)
    if problem.arithmetic == "float64":
        return wide, wide, (reason,)
    why = "suffices for 16-bit elements" if is_16_bit(problem.dtype) else "requested"
    if problem.operation not in _OF_MOMENTS:
        return "float32", wide, (f"float32: {why}",)
    return "float32", wide, (f"float32: {why}", f"mean and variance in {reason}")


def _wide(problem: Problem, gpu: Gpu) -> tuple[Arithmetic, str]:
    """Return how "float64" arithmetic is carried out on this device, and the reason.

    All three ways meet the error budget of float64 arithmetic (`conformance.judge.budget`).
    """
    if problem.dtype == FLOAT64:
        return "compensated", "compensated: no type is wider than float64"
    if gpu.fast_float64:
        return "float64", f"float64: {gpu.name} computes it at memory speed"
    return "pairs", f"pairs of float32: {gpu.name} is slow at float64"


def candidates(problem: Problem, extents: Extents) -> Iterator[Knobs]:
    """Yield the knobs that tuning tries for a problem, first those that `_choice` returns."""
    chosen, _ = _choice(problem, extents)
    yield chosen
    tried = [
        Knobs("two passes", warps, vectors, stages, share)
        for warps, vectors, stages, share in itertools.product((2, 4), (1, 2, 4), (2, 4), _SHARES)
    ]
    if _holds_channels(problem, extents):
        tried += [
            Knobs("complete", warps, vectors, stages, 0)
            for warps, vectors, stages in itertools.product((4, 8, 16), (1, 2), (1, 3))
        ]
    yield from (knobs for knobs in tried if knobs != chosen)


def _knobs(problem: Problem, extents: Extents, schedule: Schedule) -> Knobs:
    """Return the knobs that a schedule has without tuning.

    In the schedule "two passes", a program has only one or two warps, so that many programs run on
    a multiprocessor at the same time. Such a program loads up to four tiles at a time. In the
    schedule "complete", a program may run alone on its multiprocessor, so it has 8 or 16 warps, or
    4 if it reads odd runs (see `_ODD`).
    """
    complete = schedule == "complete"
    narrow = is_16_bit(problem.dtype)
    vectors = 1 if narrow else 2
    columns = _as_columns(problem, extents, _VECTOR // problem.dtype.itemsize, complete=complete)
    if not complete:
        if columns:
            # If 16-bit elements are computed in pairs of float32, a thread has too few registers
            # for four vectors, so plans for 16-bit elements use two vectors.
            vectors = 4 if problem.operation in _OF_MOMENTS and not narrow else 2
        return Knobs(schedule, 1 if narrow and not columns else 2, vectors, 4, _SHARE)
    if columns:
        # A thread holds the coefficients of all its columns in registers. With 16-bit elements a
        # thread has eight columns, so the registers suffice for only 8 warps.
        return Knobs(schedule, 8 if narrow else 16, vectors, 3, 0)
    if _is_odd(problem, extents):
        return Knobs(schedule, 4, vectors, 1, 0)
    return Knobs(schedule, 8, vectors, 3 if problem.count > _AHEAD else 1, 0)


def _tiling(problem: Problem, extents: Extents, knobs: Knobs) -> Tiling:
    outer, channels, inner = extents
    complete = knobs.schedule == "complete"
    itemsize = problem.dtype.itemsize
    vector = _VECTOR // itemsize
    columns = _as_columns(problem, extents, vector, complete=complete)
    repeats = _repeats(problem, extents, vector) if columns else 1
    width = channels * inner * repeats if columns else inner
    rows = -(-problem.size // max(1, width)) if columns else outer
    elements, run = knobs.warps * _WARP * knobs.vectors * vector, _RUN // itemsize
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
        rows_each = rows * units * knobs.share // (_ENOUGH * _SHARE)
        per_block = -(-max(_LEAST_ROWS, rows_each) // tile_rows)
    else:
        per_block = min(knobs.share, -(-problem.size // _PROGRAMS)) // tile
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
        warps=max(1, min(knobs.warps, tile // (_WARP * vector))),
        stages=knobs.stages if per_block > 2 else 1,
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
    while 0 < row * repeats < _NARROW and repeats < _MOST_REPEATS and extents.outer > repeats:
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


def _choice(problem: Problem, extents: Extents) -> tuple[Knobs, str]:
    """Return the knobs that are used without tuning, and the reason for their schedule."""
    apart = _knobs(problem, extents, "two passes")
    if problem.operation not in ("backward", "forward"):
        return apart, "the operation has only one of the passes"
    if not _holds_channels(problem, extents):
        return apart, "the elements of a channel are in several units"
    whole = _knobs(problem, extents, "complete")
    tiling = _tiling(problem, extents, whole)
    unit = problem.size // max(1, tiling.units)
    most = _COMPLETE_ODD if _is_odd(problem, extents) else _COMPLETE
    if unit <= most:
        return whole, f"one launch: a unit has no more than {most} elements"
    return apart, f"{tiling.units} units of {unit} elements are divided among programs"
