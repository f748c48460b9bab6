"""How it is done: `plan(problem, extents, machine)` decides, once; execution only follows.

A plan is a pure function of metadata: no array is looked at, no environment is read, nothing is
measured. What the bits of a result depend on (chunks, blocks) is derived from the shape alone;
what only speed depends on (tiles, shares, fusion, streaming, threads) may look at the machine.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from backnorm.kernels.cpu.geometry import Columns, Segments
from backnorm.layout import Extents
from backnorm.machine import Machine
from backnorm.problem import Problem

__all__ = ["Plan", "plan"]

# Elements of a chunk: each of 32 running sums gets 128 of them, which bounds the error of a
# float64 sum to 2^-45 of the sum of magnitudes with room to spare.
_CHUNK = 4096

# Partial sums a channel may have: 16 KiB doubles for all channels together keep the partial sums
# at 512 KiB, and 64 blocks are enough to share out.
_MOST_BLOCKS = 64
_MOST_PARTIALS = 16384

# Rows below which a block is not worth an item of its own.
_LEAST_ROWS = 512

# Segments shorter than this are summed as columns: a short segment pays for splats, for a tail,
# and for jumping to the next one.
_SHORT = 1024

# Columns of a fused tile: with four coefficients and four sums a column this is 64 KiB at 1024.
_FUSED_WIDTH = 800

# Columns of a reduction tile and elements of an apply item.
_REDUCE_WIDTH = 256
_SHARE = 65536

# Below this many elements a second thread costs more than it brings.
_SERIAL = 32768


@dataclass(frozen=True, slots=True)
class Plan:
    """A decided computation, printable with ``print(plan)``.

    Attributes
    ----------
    problem : Problem
    extents : Extents
        The arrays as (outer, channels, inner).
    geometry : Segments or Columns
        Which kernels, and how they cut the arrays.
    fused : bool
        Whether a channel is written while still in the cache, instead of in a second pass over all.
    streaming : bool
        Whether the output is written past the caches.
    threads : int
    reasons : tuple of str
        Why, for people.
    """

    problem: Problem
    extents: Extents
    geometry: Segments | Columns
    fused: bool
    streaming: bool
    threads: int
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        """Return the plan as text, a fact a line."""
        problem, extents = self.problem, self.extents
        shape = "x".join(map(str, problem.shape))
        lines = [
            f"{problem.operation} {problem.dtype} {shape}, channel axis {problem.channel_axis}, "
            f"statistics {problem.statistics_dtype}",
            f"  memory   outer {extents.outer}, channels {extents.channels}, inner {extents.inner}",
            f"  kernels  {_describe(self.geometry)}",
            f"  schedule {'reduce and apply channel by channel' if self.fused else 'two passes'}",
            f"  stores   {'streaming' if self.streaming else 'ordinary'}",
            f"  threads  {self.threads}",
        ]
        return "\n".join(lines + [f"  because  {reason}" for reason in self.reasons])


def _describe(geometry: Segments | Columns) -> str:
    if isinstance(geometry, Segments):
        return (
            f"segments: {geometry.chunks} chunks of {geometry.rows} x {geometry.length} elements "
            f"a channel, in {geometry.blocks} blocks"
        )
    return (
        f"columns: {geometry.rows} rows of {geometry.width} columns"
        f"{f' + {geometry.rest} elements' if geometry.rest else ''}, "
        f"{geometry.blocks} blocks of {geometry.block} rows, tiles of {geometry.tile}"
    )


@functools.lru_cache(maxsize=1024)
def plan(problem: Problem, extents: Extents, machine: Machine, *, exchanged: bool = False) -> Plan:
    """Decide how `problem` is computed.

    Parameters
    ----------
    problem : Problem
    extents : Extents
        Memory form of x, dy and dx.
    machine : Machine
        The machine, its `threads` being those to use.
    exchanged : bool
        Whether the sums are exchanged with other machines between the phases; the phases are then
        separate passes.

    Returns
    -------
    Plan
    """
    reasons = []
    size = problem.size
    threads = machine.threads if size >= _SERIAL else 1
    if threads == 1 and machine.threads > 1:
        reasons.append(f"serial: {size} elements are fewer than {_SERIAL}")

    geometry = _geometry(extents)
    written = size * problem.dtype.itemsize
    # What fits in the last-level cache beside its two inputs is best written there.
    streaming = 3 * written > machine.cache_shared
    reasons.append(
        f"{'streaming' if streaming else 'ordinary'} stores: two inputs and the output are "
        f"{3 * written >> 10} KiB, the last-level cache {machine.cache_shared >> 10} KiB"
    )
    fused, reason = _fuse(problem, extents, geometry, machine, threads, exchanged)
    reasons.append(reason)
    return Plan(problem, extents, geometry, fused, streaming, threads, tuple(reasons))


def _geometry(extents: Extents) -> Segments | Columns:
    if extents.inner >= _SHORT:
        return _segments(extents)
    return _columns(extents)


def _segments(extents: Extents) -> Segments:
    outer, channels, inner = extents
    if inner >= _CHUNK:
        pieces = -(-inner // _CHUNK)
        # Whole vectors, all pieces about the same.
        length = _up(-(-inner // pieces), 8)
        pieces = -(-inner // length)
        # A last piece shorter than a vector could not be read as one.
        if inner - (pieces - 1) * length < 8:
            length = _up(length + 8, 8)
            pieces = -(-inner // length)
        rows = 1
    else:
        length, pieces = inner, 1
        rows = _CHUNK // inner
    chunks = -(-outer // rows) * pieces
    block = max(1, -(-chunks // _most_blocks(channels)))
    share = max(_SHARE, _up(inner, 64)) if inner < _SHARE else _SHARE
    return Segments(rows, length, chunks, block, max(1, -(-chunks // block)), share)


def _columns(extents: Extents) -> Columns:
    outer, channels, inner = extents
    row = channels * inner
    # A row of less than two vectors is joined with its neighbours.
    repeats = -(-16 // row) if 0 < row < 16 else 1
    rows, left = divmod(outer, repeats)
    width = row * repeats
    rest = left * row
    blocks = max(1, min(rows // _LEAST_ROWS, _most_blocks(width)))
    block = max(1, _up(-(-rows // blocks), 64))
    # An empty array has one empty block.
    blocks = max(1, -(-rows // block) + (rest > 0))
    tiles = max(1, -(-width // _REDUCE_WIDTH))
    tile = max(16, _up(-(-width // tiles), 16))
    groups = max(1, -(-row // _FUSED_WIDTH))
    fused_tile = max(1, -(-channels // groups)) * inner
    share = max(1, _SHARE // max(1, width))
    return Columns(rows, width, rest, repeats, block, blocks, tile, fused_tile, share)


def _fuse(
    problem: Problem,
    extents: Extents,
    geometry: Segments | Columns,
    machine: Machine,
    threads: int,
    exchanged: bool,
) -> tuple[bool, str]:
    if exchanged:
        return False, "two passes: the sums are exchanged in between"
    if problem.operation == "backward" and not problem.training:
        return False, "two passes: with frozen statistics dx does not need x"
    if isinstance(geometry, Segments):
        items, width = extents.channels, extents.inner
    elif geometry.rest or geometry.repeats > 1 or extents.inner == 1:
        return False, "two passes: a row holds every channel"
    else:
        items, width = -(-geometry.width // geometry.fused_tile), geometry.fused_tile
    inputs = 2 if problem.operation == "backward" else 1
    held = inputs * extents.outer * width * problem.dtype.itemsize
    cache = max(machine.cache_per_core, machine.cache_shared // threads)
    if held > cache:
        return False, f"two passes: {held >> 10} KiB of a channel group exceed {cache >> 10} KiB"
    if items % threads and items < 4 * threads:
        return False, f"two passes: {items} channel groups cannot keep {threads} threads busy"
    return True, f"fused: {held >> 10} KiB of a channel group stay in {cache >> 10} KiB of cache"


def _most_blocks(channels: int) -> int:
    return max(1, min(_MOST_BLOCKS, _MOST_PARTIALS // max(1, channels)))


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
