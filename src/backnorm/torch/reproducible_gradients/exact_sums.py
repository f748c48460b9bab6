"""Sums over processes, with the same bits in any order and for any number of processes.

A floating-point sum depends on the order of its terms, because every addition rounds. Here each
term is rounded before the addition, to a multiple of a *quantum* that is large enough for every sum
of such multiples to be exact in float64. Then no addition rounds, and the order has no effect.
This is the method of Demmel and Nguyen, "Fast reproducible floating-point summation", 2013, with
one bin.

1. An all-reduce with the operation MAX finds, for each element, the largest exponent of its terms
   in all processes.
2. The quantum of an element is 2**-40 times the smallest power of two that exceeds the magnitudes
   of all terms of the element. Terms are rounded to multiples of the quantum (to nearest, ties to
   even): add an *anchor* of 1.5 * 2**52 quanta, and subtract it.
3. An all-reduce SUM adds up the rounded terms of each element, in float64. The magnitude of a term
   is at most 2**40 quanta, and a sum has at most 2**13 terms. So a partial sum has at most 2**53
   quanta, and is exact.
4. The sum is divided by `divisor`, and rounded to the type of the elements.

*Bytes*: for each element, the processes exchange 1 byte in step 1 and 8 bytes in step 3. (A plain
all-reduce of float32 exchanges 4 bytes.) If all elements of a block shared one quantum, step 1
would exchange fewer bytes. But if a block had large and small elements, the small elements would
then lose their digits. For a float64 element, there are two quanta and two sums: 4 bytes are
exchanged in step 1, and 16 bytes in step 3.

*Error*: rounding a term changes it by at most 2**-40 times the magnitude of the largest term
(2**-80 times for float64 elements). So the error of a sum of N terms is at most N * 2**-40 times
the magnitude of the largest term (N * 2**-80 times for float64 elements), plus half a unit in the
last place of the sum. The error of a plain float32 sum is up to N * 2**-24 times the sum of the
terms' magnitudes. Sums of 16-bit elements are rounded to float32, and then to 16 bits, as in
PyTorch. float64 terms are scaled by 2**-32, so that anchors are finite; terms below 2**-1043 count
as zero.

If terms are NaN or infinite, the result is the NaN or infinity that an IEEE sum gives in any order
of these terms. If all terms of a sum are zeros, the sum is +0, even if the terms are -0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from backnorm.errors import ArgumentTypeError, ArgumentValueError

_BITS = 40
#: The largest number of terms whose sum is certain to be exact.
MAX_TERMS = 2 ** (53 - _BITS)

# On a CPU, this many elements are processed at a time, so that intermediate tensors stay in its
# caches.
_BLOCK = 2**16


class Part(NamedTuple):
    """Terms of adjacent elements: the index of the first element, and a term for each element."""

    first: int
    values: Tensor


class _Format(NamedTuple):
    """The constants of the algorithm for one element type. Before elements are summed, they are
    converted to the type `wide` and then multiplied by `scale`.
    """

    wide: torch.dtype
    integer: torch.dtype
    mantissa_bits: int
    bias: int
    exponent_dtype: torch.dtype
    # The exponent field of an element's largest term is limited to the range from `least` to
    # `most`. In this range, the element's anchors are normal numbers.
    least: int
    most: int
    quanta: int
    scale: float


# `_SINGLE` is the format for float32 elements, and for 16-bit elements, which are converted to
# float32. `_DOUBLE` is the format for float64 elements.
_SINGLE = _Format(torch.float32, torch.int32, 23, 127, torch.uint8, 0, 255, 1, 1.0)
_DOUBLE = _Format(torch.float64, torch.int64, 52, 1023, torch.int32, 28, 2014, 2, 2.0**-32)
_FORMATS = dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), _SINGLE)
_FORMATS[torch.float64] = _DOUBLE


def sum_of_all(
    own: Tensor, parts: Iterable[Part], group: dist.ProcessGroup | None, divisor: float = 1.0
) -> torch.futures.Future[Tensor]:
    """Replace each element of `own` by the sum of the element's terms from all processes.

    The sum is divided by `divisor`.

    All processes of the group must call this function for the same elements. If there are several
    calls, all processes must make them in the same order.

    Parameters
    ----------
    own : Tensor, shape (n,)
        One term of each element: float32, float64, float16 or bfloat16.
    parts : iterable of Part
        Further terms, of the same type.
    group : ProcessGroup or None
    divisor : float
        Division by a power of two is exact.

    Returns
    -------
    torch.futures.Future
        Holds `own`. The call waits until exponents have been exchanged. Sums are exchanged while
        this process continues. (If a callback of the first exchange began the second, processes
        could begin exchanges in different orders.)

    Raises
    ------
    ArgumentTypeError
        If the elements have another type.
    ArgumentValueError
        In all processes, if an element can have more than `MAX_TERMS` terms: the largest number in
        one process times the number of processes.
    """
    if own.dtype not in _FORMATS:
        raise ArgumentTypeError(
            "bucket", "must have gradients of a type that can be added reproducibly",
            came=own.dtype, accepted=", ".join(map(str, _FORMATS)),
        )  # fmt: skip
    terms = [Part(0, own), *parts]
    exponents = largest_exponents(terms, own)
    count = 1 + max(Counter(part.first for part in terms[1:]).values(), default=0)
    # The count is encoded as bytes that add up to it: 255, 255, ..., the rest, then zeros. If one
    # count is larger than another, none of its bytes is smaller than the same byte of the other
    # count. So the maximum of each byte over all processes gives the code of the largest count.
    starts = torch.arange(0, MAX_TERMS + 1, 255, device=own.device)
    code = (min(count, MAX_TERMS + 1) - starts).clamp(0, 255).to(exponents.dtype)
    message = torch.cat((exponents, code))
    dist.all_reduce(message, dist.ReduceOp.MAX, group=group)
    exponents, code = message[: len(own)], message[len(own) :]
    total = dist.get_world_size(group) * int(code.sum())
    if total > MAX_TERMS:
        raise ArgumentValueError(
            "micro_batch", "must be large enough for sums of gradients to be exact",
            came=f"up to {total} gradients to add", accepted=f"at most {MAX_TERMS}",
        )  # fmt: skip
    sums = rounded_sums(terms, exponents, own)

    def finish(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        # If the exchange failed, this call of `value` raises an error.
        future.value()
        return store_sums(own, sums, divisor)

    work = dist.all_reduce(sums, group=group, async_op=True)
    return work.get_future().then(finish)


def largest_exponents(terms: Sequence[Part], own: Tensor) -> Tensor:
    """Return, for each element of `own`, the largest exponent of the element's terms."""
    form = _FORMATS[own.dtype]
    exponents = own.new_zeros(own.shape, dtype=form.exponent_dtype)
    mask = 2 * form.bias + 1
    for place, values in _blocks(terms):
        bits = _scaled(values, form.wide, form.scale).view(form.integer)
        fields = (bits >> form.mantissa_bits).bitwise_and_(mask).clamp_(form.least, form.most)
        largest = exponents[place]
        torch.maximum(largest, fields.to(largest.dtype), out=largest)
    return exponents


def rounded_sums(terms: Sequence[Part], exponents: Tensor, own: Tensor) -> Tensor:
    """Round terms to multiples of each quantum, and return the sums of the rounded terms.

    The result is a float64 tensor with one row for each quantum.
    """
    form = _FORMATS[own.dtype]
    sums = own.new_zeros(form.quanta, *own.shape, dtype=torch.float64)
    # The first quantum is 2**-40 times the power of two above the largest term. The second quantum
    # is 2**-40 times the first quantum. An anchor is 1.5 * 2**52 quanta: its exponent stands for
    # 2**52 quanta, and the highest bit of its significand for the factor 1.5.
    anchors = [
        1023 - form.bias + 1 - _BITS * (k + 1) + 52 << 52 | 1 << 51 for k in range(form.quanta)
    ]
    for place, values in _blocks(terms):
        rest = _scaled(values, torch.float64, form.scale)
        fields = exponents[place].long() << 52
        for sum_, bits in zip(sums[:, place], anchors, strict=True):
            anchor = (fields + bits).view(torch.float64)
            rounded = (rest + anchor).sub_(anchor)
            sum_ += rounded
            if form.quanta > 1:
                # NaN and infinities are added to the first sum alone: in `rest`, they are replaced
                # by 0.
                rest = rest.sub_(rounded).nan_to_num_(0.0, 0.0, 0.0)
    return sums


def store_sums(own: Tensor, sums: Tensor, divisor: float) -> Tensor:
    """Divide the sums by `divisor`, and round them to the type of `own`. Store the rounded sums in
    `own`, and return `own`.
    """
    scale = divisor * _FORMATS[own.dtype].scale
    for place, values in _blocks([Part(0, own)]):
        total = sums[0, place] if len(sums) == 1 else sums[:, place].sum(0)
        values.copy_(total / scale)
    return own


def _scaled(values: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    wide = values.to(dtype)
    return wide if scale == 1.0 else wide * scale


def _blocks(terms: Iterable[Part]) -> Iterator[tuple[slice, Tensor]]:
    """Yield the terms in blocks. A block is a pair: a slice of the elements, and a term for each
    element of this slice.
    """
    for first, values in terms:
        for block in values.split(_BLOCK if values.is_cpu else max(len(values), 1)):
            yield slice(first, first + len(block)), block
            first += len(block)
