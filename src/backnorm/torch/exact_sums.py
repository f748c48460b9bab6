"""Sums over processes that have the same bits in any order, however many processes there are.

Floating-point sums depend on their order, as every addition rounds. Here contributions are rounded
before, each by itself, to multiples of one *quantum* of which float64 can hold any sum that occurs:
then no addition rounds, and the order is lost. (Demmel and Nguyen, "Fast reproducible
floating-point summation", 2013; this is theirs with one bin.)

1. The exponent of the largest contribution to each element, of all processes: all-reduce MAX.
2. The quantum of an element is 2**-40 of the next power of two above that. Contributions are
   rounded to it (to nearest, ties to even), by adding an anchor of 1.5 * 2**52 quanta and taking
   it away again.
3. The float64 sum of what was rounded: all-reduce SUM. Up to 2**13 contributions of at most 2**40
   quanta each are at most 2**53 quanta, so all sums on the way are exact.
4. The sum is rounded to the type of the elements.

*Bytes* of each element: 1 and 8, where a plain sum of float32 has 4. One quantum for a block of
elements would save the 1, and take their digits from small elements that lie beside large ones.
float64 elements have twice 40 bits, in two quanta and two sums: 4 and 16 bytes.

*Error*: a contribution is off by at most 2**-40 of the largest (float64: 2**-80), so N of them are
off by N * 2**-40 of the largest, and then half a unit in the last place. A plain sum is off by up
to N * 2**-24 of the sum of all magnitudes. Elements of 16 bits are rounded to float32 first, as
PyTorch does it. float64 is computed at 2**-32 of its size, so that anchors are finite; what is
less than 2**-1043 counts as zero there.

NaN and infinities give what IEEE's sum gives in any order. Sums of zeros are +0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from backnorm.allocation import LARGE, advise
from backnorm.errors import ArgumentTypeError, ArgumentValueError

__all__ = ["MOST", "Part", "largest_exponents", "rounded_sums", "sum_of_all", "sums_to"]

_BITS = 40
#: Contributions to an element, at most.
MOST = 2 ** (53 - _BITS)

# So that a digit to this base, and one more, is a byte.
_BASE = 255

# Elements that are rounded in one go on a CPU, so that what lies between stays in its caches.
_BLOCK = 2**16


class Part(NamedTuple):
    """Contributions to elements that lie side by side: where the first is, and all of them."""

    first: int
    values: Tensor


class _Format(NamedTuple):
    """Where the exponent of an element is, and how elements are rounded."""

    wide: torch.dtype
    bits: torch.dtype
    shift: int
    bias: int
    sent: torch.dtype
    quanta: int
    scale: float
    # Exponents whose anchors are normal numbers.
    least: int
    most: int


# Elements of 16 bits are float32 numbers.
_SINGLE = _Format(torch.float32, torch.int32, 23, 127, torch.uint8, 1, 1.0, 0, 255)
_DOUBLE = _Format(torch.float64, torch.int64, 52, 1023, torch.int32, 2, 2.0**-32, 28, 2014)
_FORMATS = {
    torch.float32: _SINGLE,
    torch.float16: _SINGLE,
    torch.bfloat16: _SINGLE,
    torch.float64: _DOUBLE,
}


def sum_of_all(own: Tensor, parts: Iterable[Part], group: Any, divisor: float = 1.0) -> Any:
    """Put the sum of all contributions of all processes in `own`, divided.

    The processes of the group must call it for the same elements, in the same order.

    Parameters
    ----------
    own : Tensor, shape (n,)
        Contributions of this process, one to each element: float32, float64, float16 or bfloat16.
    parts : iterable of Part
        More of them, of the same type.
    group : ProcessGroup
    divisor : float
        A power of two loses nothing.

    Returns
    -------
    torch.futures.Future
        Of `own`. Exponents are exchanged at once; the sum is while this process goes on. (Were it
        begun when the exponents have come, processes would begin sums in different orders.)

    Raises
    ------
    ArgumentTypeError
        If the elements are of another type.
    ArgumentValueError
        In all processes, if there can be more than `MOST` contributions to an element: the largest
        number of any process times the number of processes.
    """
    if own.dtype not in _FORMATS:
        raise ArgumentTypeError(
            "bucket", "has gradients that cannot be added reproducibly", came=own.dtype,
            accepted=", ".join(map(str, _FORMATS)),
        )  # fmt: skip
    contributions = [Part(0, own), *parts]
    exponents = largest_exponents(contributions, own)
    of_one = 1 + max(Counter(first for first, _ in contributions[1:]).values(), default=0)
    message = torch.cat((exponents, exponents.new_tensor(_count_in_bytes(of_one))))
    dist.all_reduce(message, dist.ReduceOp.MAX, group=group)
    exponents, counts = message[: len(own)], message[len(own) :]
    of_all = dist.get_world_size(group) * _largest_count(counts.tolist())
    if of_all > MOST:
        raise ArgumentValueError(
            "micro_batch", "is so small that sums of gradients would be rounded",
            came=f"up to {of_all} gradients to add", accepted=f"at most {MOST}",
        )  # fmt: skip
    sums = rounded_sums(contributions, exponents, own)

    def finish(future: Any) -> Tensor:
        # Raises if the exchange failed.
        future.value()
        return sums_to(own, sums, divisor)

    return dist.all_reduce(sums, group=group, async_op=True).get_future().then(finish)


def _count_in_bytes(count: int) -> list[int]:
    """Return a number as bytes; their maxima over processes are those of the largest number.

    The digits of the number to base 255 are the place of a byte that is not zero, and the byte
    less one. `MOST` + 1 stands for all larger numbers.
    """
    high, low = divmod(min(count, MOST + 1), _BASE)
    found = [0] * ((MOST + 1) // _BASE + 1)
    found[high] = low + 1
    return found


def _largest_count(maxima: list[int]) -> int:
    """Return the number that maxima of `_count_in_bytes` are of."""
    high = max(k for k, byte in enumerate(maxima) if byte)
    return high * _BASE + maxima[high] - 1


def largest_exponents(contributions: Sequence[Part], own: Tensor) -> Tensor:
    """Return the largest exponent of the contributions to each element of `own`, as its bits."""
    form = _FORMATS[own.dtype]
    found = own.new_zeros(own.shape, dtype=form.sent)
    field = torch.iinfo(form.bits).max >> form.shift
    for where, values in _blocks(contributions):
        bits = _scaled(values, form.wide, form).view(form.bits)
        torch.maximum(found[where], ((bits >> form.shift) & field).to(form.sent), out=found[where])
    return found


def rounded_sums(contributions: Sequence[Part], exponents: Tensor, own: Tensor) -> Tensor:
    """Return sums of contributions that are rounded to quanta: float64, shape (quanta, n)."""
    form = _FORMATS[own.dtype]
    sums = own.new_empty(form.quanta, *own.shape, dtype=torch.float64)
    if own.is_cpu and sums.nbytes >= LARGE:
        advise(sums.data_ptr(), sums.nbytes)
    sums.zero_()
    # The anchor's, where the exponent's bits are 0: all contributions are below 2 ** (1 - bias).
    anchors = [
        (1 - form.bias - _BITS * (k + 1) + 52 + 1023 << 52) | (1 << 51) for k in range(form.quanta)
    ]
    for where, values in _blocks(contributions):
        rest = _scaled(values, torch.float64, form)
        powers = exponents[where].long().clamp_(form.least, form.most) << 52
        for total, bits in zip(sums, anchors, strict=True):
            anchor = (powers + bits).view(torch.float64)
            rounded = (rest + anchor).sub_(anchor)
            total[where] += rounded
            if form.quanta > 1:
                # Of NaN and infinities the first sum has all.
                rest = rest.sub_(rounded).nan_to_num_(0.0, 0.0, 0.0)
    return sums


def sums_to(own: Tensor, sums: Tensor, divisor: float) -> Tensor:
    """Put sums in `own`, divided and rounded."""
    form = _FORMATS[own.dtype]
    for where, values in _blocks([Part(0, own)]):
        total = sums[0, where] if form.quanta == 1 else sums[:, where].sum(0)
        values.copy_(total / (divisor * form.scale))
    return own


def _scaled(values: Tensor, dtype: torch.dtype, form: _Format) -> Tensor:
    wide = values.to(dtype)
    return wide if form.scale == 1.0 else wide * form.scale


def _blocks(contributions: Iterable[Part]) -> Iterator[tuple[slice, Tensor]]:
    """Yield contributions in blocks, and which elements they are of."""
    for first, values in contributions:
        size = len(values)
        for begin in range(0, size, _BLOCK if values.is_cpu else max(size, 1)):
            block = values[begin : begin + _BLOCK] if values.is_cpu else values
            yield slice(first + begin, first + begin + len(block)), block
