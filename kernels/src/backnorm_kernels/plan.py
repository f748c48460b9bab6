"""Decide how a problem is computed on a CPU. `plan` returns the decisions as a `Plan`.

A plan is a function of metadata: `plan` reads no array and no environment variable, and measures
nothing. Only the division into chunks and blocks influences the bits of a result, and this division
depends only on the shape. Tiles, items, groups, stores and threads change only the speed, and may
depend on the machine.

The measurements behind the rules are in docs/decisions.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from backnorm import interfaces
from backnorm.dtypes import is_16_bit
from backnorm.interfaces import summary
from backnorm.layout import Extents
from backnorm.machine import Machine, counted
from backnorm.problem import Problem
from backnorm_kernels.geometry import Columns, Segments, round_up

# The number of elements of a chunk. A chunk is added up in 16 running sums of at most 130 terms
# each. So if a sum is computed in float64, its error is at most 2^-45 times the sum of the
# magnitudes of its terms.
_CHUNK = 2048

# A channel has at most `_MOST_BLOCKS` blocks. All channels together have at most `_MOST_PARTIALS`
# blocks. But if there are more than `_MOST_PARTIALS` channels, each channel has one block. The
# partial sums of `_MOST_PARTIALS` blocks take 512 KiB.
_MOST_BLOCKS = 64
_MOST_PARTIALS = 16384

# If segments (contiguous runs of a channel) have more than `_GROUP` elements, the size of a block
# is chosen so that all channels together have about `_ENOUGH_BLOCKS` blocks. A block then has at
# least `_LEAST_CHUNKS` chunks, and at most `_MOST_CHUNKS` unless the limits above require more.
_ENOUGH_BLOCKS = 1024
_LEAST_CHUNKS, _MOST_CHUNKS = 8, 1024

# A block has at least this many rows. With fewer rows, the fixed time of an item would be a large
# part of the time in which it sums the rows.
_LEAST_ROWS = 128

# The fewest elements of a segment, a contiguous run of one channel. If the runs of x are shorter
# than this, the geometry is *columns*.
_SHORT = 16

# How many elements a group of channels has, approximately, in each sample. These elements of the
# sample are adjacent in memory.
_GROUP = 4096
_LARGE_GROUP = 4 * _GROUP

# A core's own cache is large enough for a group of channels if it has at least this many bytes.
_OWN_CACHE = 2 << 20

# If a core's own cache has fewer bytes than this, reading several rows of the array side by side is
# slower than reading the rows one after the other.
_SMALL_CACHE = 1 << 20

# The largest number of channels in a group. The running sums of this number of channels fit in the
# first-level cache.
_MOST_GROUP = 64

# The largest number of columns in a tile. The running sums and coefficients of this number of
# columns fit in the first-level cache.
_TILE = 1024
_LEAST_TILE = 128

# The most and the fewest elements of an item. If items were smaller, claiming them (0.3 us for each
# item) would take too large a part of the time. The work is divided into several items even for a
# single thread. The reason is that the second pass begins with the last item of the first pass,
# whose x and dy are still in the cache.
_SHARE = 65536
_LEAST_SHARE = 8192

# If the coefficients of a row have at most this many bytes, they fit in the first-level cache
# together with the row.
_COEFFICIENTS = 16 << 10

# If a problem has fewer elements than this, a second thread costs more time than it saves.
_SERIAL = 32768


@dataclass(frozen=True, slots=True)
class Plan(interfaces.Plan):
    """How a problem is computed; ``print(plan)`` shows it.

    Attributes
    ----------
    geometry : Segments or Columns
        The kind of kernels, and how they divide the arrays.
    grouped : bool
        Whether a channel is written while it is in the cache, instead of in a second pass.
    streaming : bool
        Whether the output is written past the caches.
    threads : int
    reasons : tuple of str
        The reasons of the decisions, as text.
    """

    geometry: Segments | Columns
    grouped: bool
    streaming: bool
    threads: int
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        """Return the plan as text, one fact per line."""
        grouped = "reduce and apply one channel group after another"
        lines = [
            *summary(self.problem, self.extents),
            f"  kernels  {_described(self.geometry)}",
            f"  schedule {grouped if self.grouped else 'two passes'}",
            f"  stores   {'streaming' if self.streaming else 'ordinary'}",
            f"  threads  {self.threads}",
        ]
        return "\n".join(lines + [f"  because  {reason}" for reason in self.reasons])


def _described(geometry: Segments | Columns) -> str:
    if isinstance(geometry, Segments):
        return (
            f"segments: {geometry.chunks} chunks of {geometry.rows} x {geometry.length} elements "
            f"a channel, in {geometry.blocks} blocks, {geometry.group} channels together"
        )
    return (
        f"columns: {geometry.rows} rows of {geometry.width} columns"
        f"{f' + {geometry.rest} elements' if geometry.rest else ''}, "
        f"{geometry.blocks} blocks of {geometry.block} rows, tiles of {geometry.tile}"
    )


class _Task(NamedTuple):
    """A problem on a machine, and facts that several functions of this module use.

    Attributes
    ----------
    problem : Problem
    extents : Extents
    machine : Machine
    threads : int
        The threads of the plan, at most those of the machine.
    inputs : int
        The number of arrays of x's shape that every call reads.
    inputs_stay : bool
        Whether those arrays fit in the shared cache.
    streaming : bool
        Whether the output is written past the caches.
    """

    problem: Problem
    extents: Extents
    machine: Machine
    threads: int
    inputs: int
    inputs_stay: bool
    streaming: bool

    @property
    def share(self) -> int:
        """The number of elements of an item: an eighth of the elements that each thread gets, but
        at least `_LEAST_SHARE` and at most `_SHARE`. The number is a multiple of 64, so that no two
        items write to the same byte of a mask.
        """
        even = round_up(self.problem.size // (8 * self.threads), 64)
        return max(_LEAST_SHARE, min(_SHARE, even))

    @property
    def coefficient(self) -> int:
        """The size of a coefficient in bytes."""
        return 4 if self.problem.arithmetic == "float32" else 8

    @property
    def has_small_cache(self) -> bool:
        """Whether a core's own cache is too small for reading several rows side by side."""
        return self.machine.cache_per_core < _SMALL_CACHE

    @property
    def has_large_cache(self) -> bool:
        """Whether a core's own cache can hold a group (channels that are summed together)."""
        return self.machine.cache_per_core >= _OWN_CACHE


@functools.lru_cache(maxsize=1024)
def plan(problem: Problem, extents: Extents, machine: Machine) -> Plan:
    """Return the plan of a problem.

    Parameters
    ----------
    problem : Problem
    extents : Extents
        Memory form of x, dy and dx.
    machine : Machine
        The machine, with the number of threads to use.
    """
    size, reasons = problem.size, []
    threads = machine.threads if size >= _SERIAL else 1
    if threads == 1 and machine.threads > 1:
        reasons.append(f"serial: {size} elements are fewer than {_SERIAL}")
    operands = problem.signature.operands
    inputs = sum(operand.kind == "data" and operand.required for operand in operands)
    # If the inputs and the output together do not fit in the cache, the output is written by
    # streaming stores, which bypass the cache. If the inputs are read twice (first for the sums,
    # then for the output), inputs and output may take only half of the cache, so that the inputs
    # stay in it.
    written, shared = problem.data_bytes, counted(machine.cache_shared)
    moved = (inputs + 1 + problem.residual) * written
    room = shared if problem.operation == "inference" else shared // 2
    streaming, inputs_stay = moved > room, inputs * written <= shared
    reasons.append(
        f"{'streaming' if streaming else 'ordinary'} stores: inputs and output are "
        f"{moved >> 10} KiB, the cache has room for {room >> 10} KiB"
    )
    task = _Task(problem, extents, machine, threads, inputs, inputs_stay, streaming)
    is_long = extents.inner >= _SHORT or extents.channels == 1
    geometry = _segments(task) if is_long else _columns(task)
    grouped, reason = _group(task, geometry)
    return Plan(problem, extents, geometry, grouped, streaming, threads, (*reasons, reason))


def is_legal(decided: Plan) -> bool:
    """Whether the kernels accept a plan.

    If a kernel writes a mask, each item and each group must end where a byte of the mask ends.
    """
    problem, extents, geometry = decided.problem, decided.extents, decided.geometry
    if not problem.writes_mask:
        return True
    if isinstance(geometry, Columns):
        return geometry.share * geometry.width % 8 == 0 or geometry.share >= geometry.rows
    if decided.grouped:
        group = geometry.group * extents.inner % 8 == 0 or geometry.group >= extents.channels
        return group and (extents.channels * extents.inner % 8 == 0 or extents.outer == 1)
    return geometry.share % 8 == 0 or geometry.share >= problem.size


def _segments(task: _Task) -> Segments:
    outer, channels, inner = task.extents
    pieces = max(1, -(-inner // _CHUNK))
    # The pieces of a segment are about equally long. In every piece except the last, the number of
    # elements is a multiple of 16.
    length = max(16, round_up(-(-inner // pieces), 16))
    pieces = -(-inner // length)
    # A chunk is one or more whole segments, or one piece of a segment.
    rows = 1 if pieces > 1 else max(1, _CHUNK // length)
    chunks = -(-outer // rows) * pieces
    # Groups have many channels, so that memory is read in long runs. But if there are enough
    # channels, the groups are so small that every thread has at least four of them.
    groups = max(-(-channels // _together(task)), min(channels, 4 * task.threads))
    group = max(1, -(-channels // max(1, groups)))
    if task.problem.reproducible:
        block = _reproducible_block(chunks, groups, task.threads)
    else:
        block = _block(chunks, channels, inner)
    blocks = max(1, -(-chunks // block))
    batch = max(1, task.share // max(1, outer * group * inner))
    return Segments(rows, length, chunks, block, blocks, group, batch, task.share)


def _together(task: _Task) -> int:
    """Return how many channels are summed together, so that memory is read in long runs.

    If a segment is longer than a chunk, its pieces are adjacent in memory, and the channel is
    summed alone. If such a channel were summed together with others, its pieces would not be read
    one after the other. If a core has a large cache of its own, it reads short runs as fast as long
    ones, so fewer channels are summed together.
    """
    inner = max(1, task.extents.inner)
    least = max(1, min(_MOST_GROUP, _GROUP // inner))
    if inner > _CHUNK or task.has_large_cache:
        return least
    return max(least, min(_MOST_GROUP, round_up(_LARGE_GROUP // inner, 8)))


def _block(chunks: int, channels: int, inner: int) -> int:
    """Return how many chunks of a channel make a block.

    Each block adds a fixed time, about that of summing a few hundred elements. Therefore long
    segments have few blocks. An item sums one block of each channel of a group. The next item sums
    the blocks at the same place in the next group of channels. If segments are short, there are
    many blocks, each of few rows. An item and the item after it then read the same few rows: first
    of one group of channels, then of the next group, which is adjacent in memory.
    """
    most = _most_blocks(channels)
    if inner <= _GROUP:
        return max(1, -(-chunks // most))
    wanted = max(-(-_ENOUGH_BLOCKS // max(1, channels)), -(-chunks // _MOST_CHUNKS))
    return max(_LEAST_CHUNKS, -(-chunks // min(wanted, most)))


def _reproducible_block(pieces: int, groups: int, threads: int) -> int:
    """Return how many pieces make a block of reproducible sums.

    All groups together have about two blocks for each thread. But each group has at least one
    block. With more blocks, the call would take longer, because every block initialises bins of its
    own. The bits of reproducible sums do not depend on how pieces are divided into blocks.
    """
    blocks = min(_MOST_BLOCKS, -(-2 * threads // max(1, groups)))
    return max(1, -(-pieces // blocks))


def _most_blocks(channels: int) -> int:
    return max(1, min(_MOST_BLOCKS, _MOST_PARTIALS // max(1, channels)))


def _columns(task: _Task) -> Columns:
    outer, channels, inner = task.extents
    row, threads = channels * inner, task.threads
    # A row of fewer than 16 elements (two vectors of float64) is joined with the rows after it to
    # one wider row.
    repeats = -(-16 // row) if 0 < row < 16 else 1
    rows, left = divmod(outer, repeats)
    width, rest = row * repeats, left * row
    if task.problem.reproducible:
        # Tiles are as wide as possible, because the short runs of narrow tiles take longer to read.
        # There may then be fewer tiles than threads, so the rows are also divided into blocks.
        block = round_up(_reproducible_block(rows, -(-width // _TILE), threads), 64)
    else:
        blocks = max(1, min(rows // _LEAST_ROWS, _most_blocks(width)))
        block = max(1, round_up(-(-rows // blocks), 64))
    # If the array is empty, there is one block without elements.
    blocks = max(1, -(-rows // block) + (rest > 0))
    # A tile has all rows of a block, and some of its columns. If there are enough columns, they are
    # divided into so many tiles that all blocks together have about two tiles for each thread, or
    # more.
    tiles = max(-(-width // _TILE), min(width // _LEAST_TILE, -(-2 * threads // blocks)), 1)
    tile = max(16, round_up(-(-width // tiles), 16))
    height = max(1, task.share // max(1, width))
    if width % 8:
        # A byte of a ReLU's mask has the bits of eight elements, and two items must not write to
        # the same byte. So an item writes a multiple of eight rows.
        height = round_up(height, 8)
    depth = _depth(width, task)
    abreast = _abreast(width, task)
    return Columns(rows, width, rest, repeats, block, blocks, tile, depth, height, abreast)


def _depth(width: int, task: _Task) -> int:
    """Return how many rows are summed side by side.

    If rows are summed side by side, the running sums are loaded and stored once for all of them.
    But each row is a separate stream of loads. The hardware prefetcher follows several streams if
    the data is in a cache. If the data is not in a cache, the prefetcher does so only if rows are
    narrow, or have at least 1024 elements (a page of float32).
    """
    if width <= 32:
        return 8
    if not task.streaming:
        return 8 if task.inputs == 1 else 16
    if task.inputs == 1:
        return 8 if task.inputs_stay or not 128 < width < 1024 else 1
    few = width <= (64 if task.has_small_cache else 128)
    if width >= 1024 or (few and task.coefficient == 8):
        return 4
    return 2 if width <= 64 else 1


def _abreast(width: int, task: _Task) -> int:
    """Return how many rows are written side by side. Side by side means: first the first cache
    lines of all these rows are written, then their second lines, and so on.

    If rows are written side by side, a coefficient is loaded once for all of them, which saves
    loads. But each row adds a stream of loads and a stream of stores, which can cost more time than
    the saved loads. So rows are written one after another (the result is 1) in these cases:

    - if a core's own cache is small and rows have more than 64 columns. Without streaming stores,
      the coefficients of a row must also be few;
    - if stores are streaming, a core's own cache is not small, and the coefficients are few.
    """
    # A row has three coefficients for each column, or four if dy is read. `few` says whether the
    # coefficients of a row take at most `_COEFFICIENTS` bytes.
    few = (2 + task.inputs) * task.coefficient * width <= _COEFFICIENTS
    if not task.streaming:
        return 1 if task.has_small_cache and few and width > 64 else 4
    if task.has_small_cache:
        return 4 if width <= 64 else 1
    if few:
        return 1
    return 8 if task.inputs == 1 else 4


def _group(task: _Task, geometry: Segments | Columns) -> tuple[bool, str]:
    """Return whether each group of channels is written while its inputs are cached.

    The second result is a text that gives the reason for this choice.
    """
    problem, (outer, channels, inner) = task.problem, task.extents
    machine, threads = task.machine, task.threads
    if problem.signature.is_phase:
        return False, "two passes: the sums are exchanged in between"
    if isinstance(geometry, Columns):
        return False, "two passes: a row holds every channel"
    runs = (geometry.group * inner, channels * inner * (outer > 1))
    if problem.writes_mask and any(run % 8 for run in runs):
        return False, "two passes: a channel group does not end with a byte of the mask"
    if (
        task.inputs_stay
        and task.streaming
        and is_16_bit(problem.dtype)
        and not task.has_large_cache
    ):
        return False, "two passes: all inputs stay in the shared cache"
    items = -(-channels // (geometry.group * geometry.batch))
    channel = task.inputs * problem.data_bytes // max(1, channels)
    size = channel * geometry.group
    cache = max(machine.cache_per_core, counted(machine.cache_shared) // threads)
    if size > cache:
        return False, f"two passes: {size >> 10} KiB of a channel group exceed {cache >> 10} KiB"
    if items % threads and items < 4 * threads:
        return False, f"two passes: {items} channel groups cannot keep {threads} threads busy"
    return True, f"grouped: {size >> 10} KiB of a channel group stay in {cache >> 10} KiB of cache"
