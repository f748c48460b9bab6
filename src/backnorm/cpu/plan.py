"""How it is done: `plan(problem, extents, machine)` decides, once; execution only follows.

A plan is a pure function of metadata: no array is looked at, no environment is read, nothing is
measured. What the bits of a result depend on (chunks, blocks) is derived from the shape alone;
what only speed depends on (tiles, shares, grouping, streaming, threads) may look at the machine.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from backnorm.cpu.geometry import Columns, Segments, round_up
from backnorm.dtypes import is_16_bit
from backnorm.layout import Extents
from backnorm.machine import Machine, counted
from backnorm.problem import Problem

__all__ = ["AT_ONCE", "SCHEDULE", "Plan", "plan"]

#: Fields of a plan beside its geometry: only speed depends on them.
SCHEDULE = ("grouped", "streaming", "threads")

#: The operations that read everything once, and sum nothing.
AT_ONCE = ("inference", "activation_backward")

# Elements of a chunk: each of its 16 running sums gets at most 130 of them, which bounds the error
# of a float64 sum to 2^-45 of the sum of magnitudes with room to spare.
_CHUNK = 2048

# Partial sums a channel may have: 16 KiB doubles for all channels together keep the partial sums
# at 512 KiB, and 64 blocks are enough to share out.
_MOST_BLOCKS = 64
_MOST_PARTIALS = 16384

# Of long segments: blocks of all channels together that are enough to share out, and chunks that a
# block has at least, and at most.
_ENOUGH_BLOCKS = 1024
_LEAST_CHUNKS, _MOST_CHUNKS = 8, 1024

# Rows below which a block is not worth an item of its own.
_LEAST_ROWS = 128

# Segments shorter than this are summed as columns: one vector a segment costs 1.6 times as much.
_SHORT = 16

# Elements of memory that a group of channels has side by side, so that memory is read in long
# runs; see `_together`.
_GROUP = 4096
_LARGE_GROUP = 4 * _GROUP

# A core's own cache from which on it pays to keep a group in it.
_OWN_CACHE = 2 << 20

# A core's own cache below which rows side by side do not pay; see `_abreast`.
_SMALL_CACHE = 1 << 20

# Running sums of so many channels still fit in the first-level cache.
_MOST_GROUP = 64

# Columns of a tile of the sums: all that are known of them fit in the first-level cache.
_TILE = 1024
_LEAST_TILE = 128

# Elements of an item: claiming one costs a trip between processors, some 0.3 µs. A single thread
# has several, too: the second pass takes the last first, whose x and dy are still in its cache.
# Times of a float32 backward pass in NXC by those as one item (Intel Xeon, 2 MiB of L2): (32, 64,
# 14, 14) 0.86, (256, 1000) 0.87, (16, 128, 17, 16) 0.90, (8, 64, 40, 40) 0.93; 0.95 to 1.00 where
# next to nothing stays in the cache, or everything.
_SHARE = 65536
_LEAST_SHARE = 8192

# Bytes of the coefficients of a row that the first-level cache holds beside the row.
_COEFFICIENTS = 16 << 10

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
    grouped : bool
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
    grouped: bool
    streaming: bool
    threads: int
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        """Return the plan as text, a fact a line."""
        problem, extents = self.problem, self.extents
        shape = "x".join(map(str, problem.shape))
        axes = ", ".join(map(str, problem.channel_axes))
        lines = [
            f"{problem.operation} {problem.dtype} {shape}, channel axis {axes}, "
            f"statistics {problem.statistics_dtype}, arithmetic {problem.arithmetic}",
            f"  memory   outer {extents.outer}, channels {extents.channels}, inner {extents.inner}",
            f"  kernels  {_describe(self.geometry)}",
            f"  schedule {_describe_schedule(self)}",
            f"  stores   {'streaming' if self.streaming else 'ordinary'}",
            f"  threads  {self.threads}",
        ]
        return "\n".join(lines + [f"  because  {reason}" for reason in self.reasons])


def _describe_schedule(plan: Plan) -> str:
    return "reduce and apply one channel group after another" if plan.grouped else "two passes"


def _describe(geometry: Segments | Columns) -> str:
    if isinstance(geometry, Segments):
        return (
            f"segments: {geometry.chunks} chunks of {geometry.rows} x {geometry.length} elements "
            f"a channel, in {geometry.blocks} blocks, {geometry.group} channels together"
        )
    return (
        f"columns: {geometry.rows} rows of {geometry.width} columns"
        f"{f' + {geometry.rest} elements' if geometry.rest else ''}, "
        f"{geometry.blocks} blocks of {geometry.block} rows, tiles of {geometry.tile}"
        f"{', written by tiles' if geometry.by_tile else ''}"
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

    written = size * problem.dtype.itemsize
    # What fits in the last-level cache beside the inputs is best written there. But the cache is
    # not ours alone, and where the inputs are read twice it should keep those. Nanoseconds an
    # element with streaming and with ordinary stores, 32 MiB of cache (AMD Zen 5): backward, arrays
    # of 5 MiB, 0.18 and 0.19, of 9 MiB 0.27 and 0.43; inference, 9 MiB 0.10 and 0.05, 29 MiB 0.06
    # and 0.09.
    # A core's own cache does not decide: dx that it cannot hold beside x and dy takes 0.9 to 0.97
    # of the time if it is written past all caches (three arrays of 1 to 3 MiB, Intel Xeon, 2 MiB of
    # L2), but reading it then takes 0.23 ns an element instead of 0.09.
    inputs = _inputs(problem)
    arrays = inputs + 1 + problem.residual
    shared = counted(machine.cache_shared)
    room = shared if problem.operation in AT_ONCE else shared // 2
    streaming = arrays * written > room
    share = _share(size, threads)
    memory = _Memory(
        inputs,
        # For what the sums read: nothing else is kept in the cache meanwhile.
        held=inputs * written <= shared,
        streaming=streaming,
        sums=not problem.operation.startswith((*AT_ONCE, "apply")),
        coefficient=4 if problem.arithmetic == "float32" else 8,
        channel=inputs * written // max(1, extents.channels),
        cold=problem.operation == "activation_backward",
        marks=problem.writes_mask,
        reproducible=problem.reproducible,
        small=machine.cache_per_core < _SMALL_CACHE,
        large=machine.cache_per_core >= _OWN_CACHE,
    )
    geometry = _geometry(extents, threads, share, memory, machine)
    reasons.append(
        f"{'streaming' if streaming else 'ordinary'} stores: inputs and output are "
        f"{arrays * written >> 10} KiB, the cache has room for {room >> 10} KiB"
    )
    grouped, reason = _group(problem, extents, geometry, memory, machine, threads, exchanged)
    reasons.append(reason)
    return Plan(problem, extents, geometry, grouped, streaming, threads, tuple(reasons))


class _Memory(NamedTuple):
    """What a plan of rows must know of what is read and written.

    Attributes
    ----------
    inputs : int
        How many arrays of x's shape are always read.
    held : bool
        Whether those fit in the shared cache.
    streaming : bool
        Whether the output is written past the caches.
    sums : bool
        Whether anything is summed before it is written.
    coefficient : int
        Bytes of a coefficient.
    channel : int
        Bytes of a channel of the inputs.
    cold : bool
        Whether x is in no cache, as nobody has read it since the forward pass.
    marks : bool
        Whether the mask of a ReLU is written.
    reproducible : bool
        Whether sums are the same however they are cut: blocks are then for sharing out alone.
    small, large : bool
        Whether a core's own cache is: where it is small, rows are to be written one after another.
    """

    inputs: int
    held: bool
    streaming: bool
    sums: bool
    coefficient: int
    channel: int
    cold: bool
    marks: bool
    reproducible: bool
    small: bool
    large: bool


def _inputs(problem: Problem) -> int:
    """Return how many arrays of x's shape are always read."""
    operands = problem.signature.operands
    return sum(operand.kind == "data" and operand.required for operand in operands)


def _share(size: int, threads: int) -> int:
    """Return the elements of an item: few items, but enough to share them out evenly.

    Whole vectors, so that all but the last end with a byte of a ReLU's mask.
    """
    return max(_LEAST_SHARE, min(_SHARE, round_up(size // (8 * threads), 64)))


def _geometry(
    extents: Extents, threads: int, share: int, memory: _Memory, machine: Machine
) -> Segments | Columns:
    if extents.inner >= _SHORT or extents.channels == 1:
        together = _together(extents, machine)
        return _segments(extents, threads, share, together, memory)
    return _columns(extents, threads, share, memory)


def _segments(
    extents: Extents, threads: int, share: int, together: int, memory: _Memory
) -> Segments:
    outer, channels, inner = extents
    pieces = max(1, -(-inner // _CHUNK))
    # Whole cache lines, all pieces about the same.
    length = max(16, round_up(-(-inner // pieces), 16))
    pieces = -(-inner // length)
    # A chunk is either rows or a piece of one.
    rows = 1 if pieces > 1 else max(1, _CHUNK // length)
    chunks = -(-outer // rows) * pieces
    # Long runs of memory, but enough groups to share out.
    groups = max(-(-channels // together), min(channels, 4 * threads))
    block = _block(chunks, channels, inner)
    if memory.reproducible:
        block = _reproducible_block(chunks, groups, threads)
    group = max(1, -(-channels // max(1, groups)))
    blocks = max(1, -(-chunks // block))
    batch = max(1, share // max(1, outer * group * inner))
    return Segments(rows, length, chunks, block, blocks, group, batch, share)


def _together(extents: Extents, machine: Machine) -> int:
    """Return how many channels to take together: a run of memory, and what a cache keeps of them.

    Nanoseconds an element with runs of 4096 elements and of 16,384, 2 threads (AMD Zen 5, 1 MiB of
    L2; forward and backward bfloat16, forward and backward float32):

    ================  ============  ============  ============  ============
    (50, 128, 28, 28)  0.13 0.10     0.28 0.23     0.25 0.20     0.43 0.35
    (50, 1024, 14, 14) 0.21 0.16     0.31 0.22     0.23 0.17     0.40 0.41
    (96, 64, 35, 35)   0.26 0.14     0.27 0.21     0.33 0.27     0.38 0.40
    (32, 864, 15, 15)  0.18 0.14     0.22 0.17     0.20 0.16     0.43 0.41
    ================  ============  ============  ============  ============

    A segment of several pieces is read a piece at a time: channels beside it break the run, and
    (50, 64, 56, 56) in float32 takes 0.55 with eight channels instead of 0.43. Where a core's own
    cache is large, short runs are as good, and leave more groups to share out: with 8 to 16
    channels instead of 40 to 62 (32, 864, 15, 15) and (8, 512, 20, 20) take 0.80 to 0.95 of the
    time (Intel Xeon, 2 MiB of L2); the mean of 14 shapes, forward and backward, is 0.97.
    """
    inner = max(1, extents.inner)
    least = max(1, min(_MOST_GROUP, _GROUP // inner))
    if inner > _CHUNK or machine.cache_per_core >= _OWN_CACHE:
        return least
    return max(least, min(_MOST_GROUP, round_up(_LARGE_GROUP // inner, 8)))


def _columns(extents: Extents, threads: int, share: int, memory: _Memory) -> Columns:
    outer, channels, inner = extents
    row = channels * inner
    # A row of less than two vectors is joined with its neighbours.
    repeats = -(-16 // row) if 0 < row < 16 else 1
    rows, left = divmod(outer, repeats)
    width = row * repeats
    rest = left * row
    blocks = max(1, min(rows // _LEAST_ROWS, _most_blocks(width)))
    block = max(1, round_up(-(-rows // blocks), 64))
    if memory.reproducible:
        # Tiles as wide as they may be: a row's run of memory is what takes time. Of 256 columns
        # (50, 1024, 14, 14) takes 1.1 times as long.
        block = round_up(_reproducible_block(rows, -(-width // _TILE), threads), 64)
        blocks = -(-rows // block)
    # An empty array has one empty block.
    blocks = max(1, -(-rows // block) + (rest > 0))
    # A tile with all rows of a block, for every thread at least one.
    tiles = max(-(-width // _TILE), min(width // _LEAST_TILE, -(-2 * threads // blocks)), 1)
    tile = max(16, round_up(-(-width // tiles), 16))
    # Of a single block every thread sums some tiles, and is to write those: x and dy are in its
    # cache, not in another's. Of the time of rows (2 threads of an Intel Xeon, float32, backward):
    # (8, 2048, 5, 5) 0.87, (128, 2048) 0.86. Where a core's own cache is smaller nothing is gained:
    # the same 1.27 and 1.08, and after a convolution, 1.26 and 1.19 (AMD Zen 5, 1 MiB).
    # A tile has whole lines of all types; but not of a mask: two threads then write to one line,
    # and ReLU forward passes of (8, 512, 5, 5) take 166 us instead of 28, of (8, 2048, 5, 5) 106
    # instead of 81.
    by_tile = memory.sums and blocks == 1 and threads > 1 and not memory.streaming
    by_tile = by_tile and memory.large and not memory.marks
    by_tile = by_tile and width % 32 == tile % 32 == 0
    height = max(1, share // max(1, tile if by_tile else width))
    if width % 8:
        # An item ends with a byte of a ReLU's mask.
        height = round_up(height, 8)
    depth = _depth(width, memory)
    abreast = _abreast(width, memory, by_tile=by_tile)
    cut = (rows, width, rest, repeats, block, blocks, tile, depth, height, abreast)
    return Columns(*cut, by_tile=by_tile)


def _depth(width: int, memory: _Memory) -> int:
    """Return how many rows to sum side by side.

    More visits the running sums less often. But memory is then read out of order, which the
    hardware prefetcher does not follow. From the caches kernels prefetch: 16 rows take 0.9 of the
    time of four, backward, and eight 0.94 forward, whether x is in a cache or, as in a model, in
    none (ten shapes of 0.8 to 13 MB, AMD Zen 5, 2 threads). Beyond them prefetching does not
    suffice. Milliseconds of a float32 reduction on one processor, without it (AMD Zen 4):

    ================  =====  =====  =====  =====
    rows, columns         1      2      4      8
    ================  =====  =====  =====  =====
    2450, 512          0.45   0.32   0.29   0.27
    78400, 16          0.39   0.27   0.22   0.20
    156800, 256         9.2   18.2   18.0   21.1
    627200, 64         12.1   11.3   11.9   12.3
    ================  =====  =====  =====  =====

    Two processors of that kind wait for running sums, too, where rows are narrow or whole pages: in
    float64 arithmetic, of the time with one row, (64, 1024, 28, 28) takes 0.85 with four and
    (50, 1024, 14, 14) 0.87, (32, 128, 57, 57) and (96, 80, 73, 73) 0.9, but (32, 192, 57, 57) and
    (50, 256, 56, 56) 1.17; in float32 arithmetic (32, 128, 57, 57) 1.24.

    That is of two arrays. A forward pass reads one. Where that is `held` in the cache, and where
    rows are narrow or whole pages, running sums take its time, not memory: with one or two rows
    (50, 128, 28, 28), (50, 64, 56, 56) and (50, 1024, 14, 14) took 1.14 to 1.45 times as long as
    with eight, (96, 80, 73, 73) and (32, 128, 57, 57) 1.2 times, but (50, 256, 56, 56) and
    (50, 512, 28, 28) take 0.9 with one.

    Where rows are to be written in order (see `_abreast`), narrow ones are to be read so, too: a
    backward pass of (50, 128, 28, 28) takes 0.69 ns an element with one and 1.06 with four,
    (32, 128, 57, 57) 0.83 and 0.99, but (50, 2048, 7, 7) 1.01 and 0.74 (AMD Zen 3).
    """
    if width <= 32:
        return 8
    if not memory.streaming:
        return 8 if memory.inputs == 1 else 16
    if memory.inputs == 1:
        return 8 if memory.held or not 128 < width < 1024 else 1
    narrow = width <= (64 if memory.small else 128)
    if width >= 1024 or (narrow and memory.coefficient == 8):
        return 4
    return 2 if width <= 64 else 1


def _abreast(width: int, memory: _Memory, *, by_tile: bool) -> int:
    """Return how many rows to write side by side.

    Coefficients are then read once for several rows. But memory is best read and written in order,
    unless those of a row are too many for the first-level cache; and rows apart are streams, of
    which there should not be more than the prefetcher follows. Nanoseconds an element beyond the
    caches, 2 threads (AMD Zen 4; the first four backward, AMD Zen 5, 32 MiB of cache):

    ===========  ==============  ============  =====  =====  =====
    operation    rows, columns   coefficients      1      4      8
    ===========  ==============  ============  =====  =====  =====
    backward     9800, 256              8 KiB   0.25   0.22   0.27
    backward     39200, 512            16 KiB   0.40   0.48   0.52
    backward     9800, 1024            32 KiB   0.63   0.66   0.60
    backward     2450, 2048            64 KiB   0.74   0.60   0.55
    backward     9800, 1024            32 KiB   0.74   0.60   0.75
    backward     2450, 2048            64 KiB   0.58   0.47   0.65
    in float32   2450, 2048            32 KiB   0.48   0.42   0.45
    bfloat16     50176, 1024           16 KiB   0.39   0.45   0.49
    inference    39200, 512            12 KiB   0.21   0.26   0.22
    inference    8100, 768             18 KiB   0.27   0.20   0.17
    inference    2450, 2048            48 KiB   0.31   0.18   0.16
    bfloat16     9800, 1024            12 KiB   0.08   0.13   0.13
    ===========  ==============  ============  =====  =====  =====

    In the caches four rows are as good as eight, but where rows are short, as those of a tile:
    backward passes of 128 to 256 rows of 768 to 2048 columns take 0.82 to 0.98 of the time with
    eight.

    A processor with less than 1 MiB of its own a core does not follow such streams, above all
    where rows are whole pages, so that all begin in the same set of its caches. Nanoseconds an
    element of float32 (AMD Zen 3, 512 KiB, 2 threads):

    ===========  ==============  =====  =====  =====  =====
    operation    rows, columns       1      2      4      8
    ===========  ==============  =====  =====  =====  =====
    inference    9800, 1024       0.27   0.45   1.11   1.25
    inference    2450, 2048       0.31   0.40   1.05   1.15
    inference    7200, 864        0.25   0.30   0.22   0.20
    inference    156800, 256      0.27   0.42   0.41   0.34
    inference    511584, 80       0.26   0.26   0.25   0.29
    inference    156800, 64       0.24   0.21   0.21   0.24
    bfloat16     627200, 64       0.22   0.24   0.20   0.19
    backward     9800, 1024       0.63   0.82   1.67   1.85
    backward     2450, 2048       0.73   1.78   1.66   1.42
    backward     7200, 864        0.67   0.72   0.68   0.73
    backward     511584, 80       0.65   0.66   0.75   0.88
    backward     627200, 64       0.64   0.62   0.61   0.65
    ===========  ==============  =====  =====  =====  =====

    The same holds where the shared cache has all, if the coefficients are few. Times with rows
    written one after another (and, forward, summed eight side by side) by those with four rows side
    by side, right after a convolution and of calls in a row (the same processor, float32):

    ===========  =============  =========  ======
    operation    rows, columns  after one  in row
    ===========  =============  =========  ======
    forward      12800, 128          0.85    1.00
    forward      3200, 192           0.96    0.89
    forward      3200, 512           0.96    0.95
    forward      800, 480            0.95    0.99
    forward      800, 1024           1.10    1.12
    backward     3200, 128           0.77    0.92
    backward     3200, 192           0.88    0.94
    backward     800, 480            0.88    0.94
    backward     800, 1024           1.14    1.05
    ===========  =============  =========  ======

    And of all processors where x is in no cache while dy is. Nanoseconds an element of the gradient
    before an activation, which reads each once, float32 (AMD Zen 5, 1 MiB, 2 threads; calls in a
    row take 0.19 to 0.24 with any number):

    =============  =====  =====  =====  =====
    rows, columns      1      2      4      8
    =============  =====  =====  =====  =====
    12800, 144      0.21   0.43   0.50   0.47
    3200, 240       0.23   0.52   0.42   0.50
    800, 480        0.29   0.57   0.64   0.50
    200, 1152       0.39   0.41   0.46   0.44
    12800, 64       0.22   0.23   0.25   0.29
    =============  =====  =====  =====  =====
    """
    # Means, shifts and gains; slopes, too, where there is dy.
    few = (2 + memory.inputs) * memory.coefficient * width <= _COEFFICIENTS
    if by_tile:
        return 8
    if memory.cold:
        return 1
    if not memory.streaming:
        return 1 if memory.small and few and width > 64 else 4
    if memory.small:
        return 4 if width <= 64 else 1
    if few:
        return 1
    return 8 if memory.inputs == 1 else 4


def _group(
    problem: Problem,
    extents: Extents,
    geometry: Segments | Columns,
    memory: _Memory,
    machine: Machine,
    threads: int,
    exchanged: bool,
) -> tuple[bool, str]:
    if exchanged:
        return False, "two passes: the sums are exchanged in between"
    if isinstance(geometry, Columns):
        # Tiles of columns could be groups, but memory in short runs comes too slowly. Of the time
        # of two passes (Intel Xeon, 2 MiB of L2, 0.2 to 1.6 MB of x and dy a tile): 16 columns 2.1
        # to 2.7, 32 columns 1.2 to 1.5, 64 columns 1.2 to 1.4, with prefetching no better.
        return False, "two passes: a row holds every channel"
    runs = (geometry.group * extents.inner, extents.channels * extents.inner * (extents.outer > 1))
    if problem.writes_mask and any(run % 8 for run in runs):
        return False, "two passes: a channel group does not end with a byte of the mask"
    items = -(-extents.channels // (geometry.group * geometry.batch))
    held = memory.channel * geometry.group
    own = machine.cache_per_core >= _OWN_CACHE
    if memory.held and memory.streaming and is_16_bit(problem.dtype) and not own:
        # Two passes in the order of memory take 0.89 of the time, if all is read from the shared
        # cache in the second: bfloat16, 9 to 30 MiB of inputs, forward and backward (AMD Zen 5, 1
        # MiB of L2 and 32 of L3, 2 threads). float32 takes 1.0 forward and 1.1 backward.
        return False, "two passes: all inputs stay in the shared cache"
    cache = max(machine.cache_per_core, counted(machine.cache_shared) // threads)
    if held > cache:
        return False, f"two passes: {held >> 10} KiB of a channel group exceed {cache >> 10} KiB"
    if items % threads and items < 4 * threads:
        return False, f"two passes: {items} channel groups cannot keep {threads} threads busy"
    return True, f"grouped: {held >> 10} KiB of a channel group stay in {cache >> 10} KiB of cache"


def _block(chunks: int, channels: int, inner: int) -> int:
    """Return how many chunks of a channel make a block.

    What is done once a block, of a group of channels, takes as long as summing some hundred
    elements, and where blocks are summed by themselves, the next item has another channel. Where a
    channel's own segments are long runs of memory, few blocks read it in order. Nanoseconds an
    element of a reduction with blocks of a chunk and of 16 (one thread, AMD Zen 5): bfloat16
    (8, 64, 80, 80) 0.13 and 0.08, (32, 64, 112, 112) 0.23 and 0.09, float32 0.15 and 0.09, 0.28 and
    0.14. Shorter segments of the next channels are read before the next rows of the same ones:
    with blocks of 16 chunks (50, 256, 56, 56) took 0.4 instead of 0.16.
    """
    most = _most_blocks(channels)
    if inner <= _GROUP:
        return max(1, -(-chunks // most))
    wanted = max(-(-_ENOUGH_BLOCKS // max(1, channels)), -(-chunks // _MOST_CHUNKS))
    return max(_LEAST_CHUNKS, -(-chunks // min(wanted, most)))


def _reproducible_block(pieces: int, groups: int, threads: int) -> int:
    """Return how many pieces make a block: no more blocks than it takes to share them out.

    What is begun anew with each costs more than of plain sums: the limits are those of the first
    terms again, which are then taken apart twice. With as many blocks as those have, two segments
    each, a reduction of (32, 128, 28, 28) took 0.98 ns an element, and of (32, 64, 112, 112), in
    long ones, 0.68 (one thread of an AMD Zen 4).
    """
    blocks = min(_MOST_BLOCKS, -(-2 * threads // max(1, groups)))
    return max(1, -(-pieces // blocks))


def _most_blocks(channels: int) -> int:
    return max(1, min(_MOST_BLOCKS, _MOST_PARTIALS // max(1, channels)))
