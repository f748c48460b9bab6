"""Make the stages (kernels with their records) of a problem according to its plan."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from backnorm import interfaces
from backnorm.problem import Problem
from backnorm.reproducible_sums import bin_rows
from backnorm_kernels.geometry import Segments
from backnorm_kernels.kinds import Kind
from backnorm_kernels.plan import Plan, is_legal
from backnorm_kernels.record import FROM_DATA, FROM_STATISTICS, GEOMETRIES, MEANS_ALONE
from backnorm_kernels.scratch import bins_own, columns_own, segments_own, table_pitch
from backnorm_kernels.stage import Stage


class Launch(interfaces.Launch):
    """The kernels of a problem on a CPU.

    Parameters
    ----------
    problem : Problem
    plan : Plan
    header : int
        See `stage.Stage`.
    """

    def __init__(self, problem: Problem, plan: Plan, header: int) -> None:
        assert is_legal(plan), plan
        extents, geometry, dtype = plan.extents, plan.geometry, problem.dtype
        grouped = plan.grouped
        count, channels = extents.outer * extents.inner, extents.channels
        self._grouped, self._threads = grouped, plan.threads
        # For the 16-bit types, all kernels are compiled for the arithmetic float32. If the
        # problem's arithmetic is float64, the record's field `in_float64` makes these kernels
        # compute in float64.
        compiled = "float32" if dtype.itemsize == 2 else problem.arithmetic
        in_float32, binned = compiled == "float32", problem.reproducible
        rows = bin_rows(dtype.itemsize)
        if isinstance(geometry, Segments):
            batches = -(-channels // (geometry.group * geometry.batch))
            self._summed = batches if grouped else batches * geometry.blocks
            self._written = -(-count * channels // geometry.share)
            own = segments_own(geometry.group, channels, in_float32=in_float32)
            kept, pitch = (0 if grouped else geometry.blocks), table_pitch(channels)
        else:
            tiles = -(-geometry.width // geometry.tile)
            self._summed = geometry.blocks * tiles
            self._written = max(1, -(-geometry.rows // geometry.share))
            spread = geometry.width != channels
            own = columns_own(geometry.tile, geometry.width, spread=spread, in_float32=in_float32)
            kept, pitch = geometry.blocks, table_pitch(geometry.width)
        self._partial = 4 * kept * pitch
        if binned:
            self._partial = kept * rows * pitch + (rows + 4) * table_pitch(channels)
            group = table_pitch(geometry.group) if isinstance(geometry, Segments) else 0
            own += bins_own(group, rows)
        if count * channels == 0:
            self._summed = self._written = 0
        self._forward = problem.signature.normalises
        direction = "forward" if self._forward else "backward"
        # When NumPy's results get their memory, huge pages are requested (`backnorm.allocation`).
        new = 0 if header else problem.data_bytes
        name, statistics = type(geometry).__name__.lower(), problem.statistics_dtype
        known = extents._asdict() | dataclasses.asdict(geometry)
        self._source = FROM_DATA if self._forward else FROM_STATISTICS
        self._stage = functools.partial(
            Stage,
            Kind(name, dtype.name, compiled, direction),
            {field.name: known[field.name] for field in GEOMETRIES[name]},
            channels=channels,
            own=own,
            header=header,
            epsilon=problem.epsilon,
            count=count,
            streaming=plan.streaming,
            out_bytes=new,
            residual_bytes=new if problem.residual and not self._forward else 0,
            in_float64=problem.arithmetic != compiled,
            binned=binned,
            inverse=problem.inverse,
            frozen=not (self._forward or problem.training),
            relu=problem.relu,
            ceiling=problem.ceiling,
            beyond=_beyond(problem.ceiling, dtype),
            correction=1.0 if problem.biased else count / max(count - 1, 1),
            statistics=0 if statistics == dtype else 8 * statistics.itemsize,
        )

    @functools.cached_property
    def whole(self) -> Stage:
        """Sum every channel, compute its coefficients, and write the output and the results."""
        items = self._summed if self._grouped else self._summed + self._written
        fields = {"prepares": self._source, "finishes": True, "grouped": self._grouped}
        return self._of(self._summed, items, **fields)

    @functools.cached_property
    def sum(self) -> Stage:
        """Write the pivots to the table, and sum every channel. In a forward pass, a channel's
        pivot is a number near its mean, computed from a few elements of x. In a backward pass, the
        pivot is the given mean.
        """
        source = FROM_DATA if self._forward else MEANS_ALONE
        return self._of(self._summed, self._summed, prepares=source)

    @functools.cached_property
    def sum_and_solve(self) -> Stage:
        """Sum every channel, write its results, and write its coefficients to the table."""
        return self._of(self._summed, self._summed, prepares=self._source, finishes=True)

    @functools.cached_property
    def write(self) -> Stage:
        """Write the output: y from statistics, or dx from statistics and sums."""
        fields = {"prepares": FROM_STATISTICS, "settles": not self._forward}
        return self._of(0, self._written, **fields)

    @functools.cached_property
    def write_and_finish(self) -> Stage:
        """Write the output and the per-channel results of a forward pass, from given moments."""
        fields = {"prepares": self._source, "settles": True, "finishes": True}
        return self._of(0, self._written, **fields)

    def _of(self, summed: int, items: int, **fields: int) -> Stage:
        participants = max(1, min(self._threads, items))
        partial = self._partial if summed else 0
        return self._stage(
            partial=partial, participants=participants, summed=summed, items=items, **fields
        )


def _beyond(ceiling: float, dtype: np.dtype) -> int:
    """Return an integer that is greater than the bit pattern of every positive element below the
    ceiling. Kernels compare the bit patterns of elements with this integer (the field `beyond` of
    the record).
    """
    (bits,) = np.array([ceiling]).astype(dtype).view(f"i{dtype.itemsize}")
    return int(bits) + math.isinf(ceiling)
