"""The skeleton of a kernel: all of the kernel's code except the code that computes an item. The
kernels of all geometries share the skeleton.

The participants of a call run the kernel. The record says how many participants there may be. The
calling thread fills the table of channels, and the other participants wait until the table is
filled. Then each participant takes items from the work queue until none is left. Items of the first
phase compute sums. The participant that completes the last of these items computes the coefficients
of the channels from the sums. Items of the second phase write the output. If a record is `grouped`,
one item computes the sums, the coefficients and the output of its channels, and there is no second
phase.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from backnorm_kernels.kernels.channels import row_pitch
from backnorm_kernels.kernels.jit import outlined
from backnorm_kernels.kernels.operands import Table
from backnorm_kernels.kernels.record import (
    cells_of,
    common_head,
    own_of,
    scratch_of,
)
from backnorm_kernels.kernels.stages import after, before
from backnorm_kernels.kernels.work_queue import (
    arrive_at_barrier,
    complete_item,
    open_barrier,
    take_item,
    take_next_item,
    wait_at_barrier,
)
from backnorm_kernels.record import JOINED


class Steps(NamedTuple):
    """The functions in which the kernels of one geometry differ from those of another.

    Attributes
    ----------
    head_at
        Converts an address to the head of a record.
    extents
        (head) -> the extents (outer, channels, inner) of the array.
    sums_of
        (kind, head, cells, table, own) -> the `Sums` of a participant.
    output_of
        (kind, head, cells, sums) -> the `Output`.
    sum_item
        (kind, head, sums, output, item): compute an item of the first phase.
    combine
        (kind, head, sums): solve for the coefficients of all channels, after the first phase.
    prepare
        (head, table, output): prepare the coefficients, before the first item of the second phase.
    write_item
        (head, output, item): compute an item of the second phase.
    """

    head_at: Any
    extents: Any
    sums_of: Any
    output_of: Any
    sum_item: Any
    combine: Any
    prepare: Any
    write_item: Any


def kernel(steps: Steps) -> Any:
    """Return the kernel of a geometry."""
    head_at, extents, sums_of, output_of, sum_item, combine, prepare, write_item = steps

    @outlined
    def run(kind, record, index):
        """Run the kernel as the participant `index` of a record.

        Returns
        -------
        int
            0; or, if the index is JOINED, the result of the call: see `record.ended`.
        """
        head, common, cells = head_at(record), common_head(record), cells_of(record)
        pitch = row_pitch(head.channels)
        table = Table(scratch_of(kind, common, record), pitch, head.channels)
        if index == JOINED:
            return after(kind, common, table)
        own = own_of(kind, common, record, index)
        sums = sums_of(kind, head, cells, table, own)
        output = output_of(kind, head, cells, sums)
        before(kind, common, cells, index, table, extents(head))
        summed, items = head.summed, head.items
        prepared = False
        item = take_item(cells, summed, items, index)
        while item < items:
            if item < summed:
                sum_item(kind, head, sums, output, item)
                if head.grouped == 0 and arrive_at_barrier(cells, summed):
                    combine(kind, head, sums)
                    open_barrier(cells)
            else:
                if summed > 0:
                    wait_at_barrier(cells)
                if not prepared:
                    prepare(head, table, output)
                    prepared = True
                write_item(head, output, item - summed)
            complete_item(cells)
            item = take_next_item(cells, summed, items, index)
        return 0

    return run
