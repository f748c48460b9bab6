"""Write vectors of the output. Where float32 is not exact enough, elements are recomputed in
float64: see `float32`.

A *position* says where the coefficients for a vector of elements are. In the geometry *columns*, a
position is the column of the vector's first element. In *segments*, it is the channel of the first
element, and the number of elements that the segment has from there on.
"""

from __future__ import annotations

from typing import Any

from backnorm_kernels.kernels.epilogue import has_relu, is_forward, with_relu
from backnorm_kernels.kernels.float32 import as_singles, both_hold, holds, lanes_of
from backnorm_kernels.kernels.formulas import elements
from backnorm_kernels.kernels.jit import boolean, by_type, inlined, nothing
from backnorm_kernels.kernels.memory import store, store_first, stream
from backnorm_kernels.kernels.operands import Operands, Output
from backnorm_kernels.kernels.vector import Singles, high_half, low_half, marked, where_finite
from backnorm_kernels.scratch import LANES


def writers(exact_at: Any) -> tuple[Any, Any, Any]:
    """Return a geometry's functions that write two vectors, one vector, and a part of a vector.

    A vector has sixteen elements, and `position` says where it is. `exact_at(output, position,
    first)` returns the float64 coefficients for eight of them: for the first eight if `first` is 0,
    for the last eight if `first` is 8.
    """

    @inlined
    def write_half(output, i, count, position, first, value):
        coefficients = exact_at(output, position, first)
        again = elements(output, i + first, count - first, coefficients)
        store_first(output.out, i + first, count - first, where_finite(value, value, again))

    # This function is inlined, because a call would make the loops of the kernels spill registers.
    @inlined
    def write_exactly(output, i, count, position, value):
        value = marked(value)
        write_half(output, i, count, position, 0, low_half(value))
        write_half(output, i, count, position, LANES, high_half(value))

    @by_type
    def write_again(output, i, count, position, value):
        """Write `count` elements of `value`.

        Elements that are not `sound` are first computed again in float64 (see `float32`).
        """
        return write_exactly.py_func if value == Singles else nothing

    @inlined
    def write_two(output, i, values, positions, streaming):
        left, right = values
        lanes = lanes_of(output.rows.values)
        if not both_hold(output, left, right):
            write_again(output, i, lanes, positions[0], as_singles(left))
            write_again(output, i + lanes, lanes, positions[1], as_singles(right))
        elif streaming:
            stream(output.out, i, left)
            stream(output.out, i + lanes, right)
        else:
            store(output.out, i, left)
            store(output.out, i + lanes, right)

    @inlined
    def write_one(output, i, position, value, streaming):
        lanes = lanes_of(output.rows.values)
        if not holds(value, lanes):
            write_again(output, i, lanes, position, as_singles(value))
        elif streaming:
            stream(output.out, i, value)
        else:
            store(output.out, i, value)

    @inlined
    def write_first(output, i, count, position, coefficients):
        value = elements(output, i, count, coefficients)
        if holds(value, count):
            store_first(output.out, i, count, value)
        else:
            write_again(output, i, count, position, value)

    return write_two, write_one, write_first


@by_type
def in_each_case(write, output, task):
    """Call write(output, task), with flags of the output as constants: whether a ReLU follows, and
    whether statistics are frozen. So LLVM compiles `write` for each case, and a loop tests none of
    the flags.
    """

    def forward(write, output, task):
        if has_relu(output.dy):
            write(_case(output, boolean(True), boolean(False)), task)
        else:
            write(_case(output, boolean(False), boolean(False)), task)

    def backward(write, output, task):
        if output.frozen:
            if has_relu(output.dy):
                write(_case(output, boolean(True), boolean(True)), task)
            else:
                write(_case(output, boolean(False), boolean(True)), task)
        elif has_relu(output.dy):
            write(_case(output, boolean(True), boolean(False)), task)
        else:
            write(_case(output, boolean(False), boolean(False)), task)

    return forward if is_forward(output[1]) else backward


@inlined
def _case(output, relu, frozen):
    x, dy, out, exact, rows, period, streaming, _ = output
    dy, out = with_relu(dy, relu), with_relu(out, relu)
    return Output(x, dy, out, exact, rows, period, streaming, frozen)


@by_type
def sum_each_case(add, operands, task):
    """Call add(operands, task), with the flag of dy as a constant: see `in_each_case`."""

    def backward(add, operands, task):
        x, dy = operands
        if has_relu(dy):
            add(Operands(x, with_relu(dy, boolean(True))), task)
        else:
            add(Operands(x, with_relu(dy, boolean(False))), task)

    if is_forward(operands[1]):
        return lambda add, operands, task: add(operands, task)
    return backward
