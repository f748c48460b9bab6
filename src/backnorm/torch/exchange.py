"""Exchange of statistics between the processes of a group, for C channels.

*Forward*: each process sends the mean and the variance of its own elements of each channel, and the
number of these elements. The formula for parallel variances (Chan, Golub and LeVeque, 1979)
combines them. The formula loses no digits if the means are much larger than the deviations. (A
variance computed from sums of squares could then lose all digits.) A small group gathers 2C + 1
float64 numbers from every process and combines them in the order of ranks. In a large group,
gathering would take long: the number of bytes that a process receives is proportional to the size
of the group. If the processes form a ring, the latency is proportional to the size of the group,
too. So a large group makes two all-reduce sums instead. The first all-reduce adds up two things:
the number of elements of each process, and the means of each process multiplied by its number of
elements. The quotient of the two sums is the mean of all elements. For the second sum, each process
squares the distance of its mean from the mean of all elements, adds its variance, and multiplies
the result by its number of elements. Together, these two all-reduce sums have 2C + 1 numbers. If
the processes form a ring, each process receives every number twice in an all-reduce. So a process
receives 16 * (2C + 1) bytes (and padding), however large the group is.

*Backward*: the processes exchange 2C sums and the number of elements.

*Reproducible sums* are exchanged as integers: the top bin and three digits of each sum
(four for float64 elements), and the number of elements. These are 8C + 1 numbers in each pass
(float64: 10C + 1). A small group gathers these numbers from all processes. In a large group, a
first all-reduce finds the maximum of the processes' top bins, for each of the 2C sums. Every
process moves its digits to this common top bin, and a second all-reduce adds up the digits.

*Agreement*: if processes called their layers in different orders, or with different settings, they
would combine statistics that do not belong together. Therefore the first message begins with a
description of layer, channels, pass and settings. If the exchange is an all-reduce, the first
message has only a digest of the description. The first message is padded to one length for all
layers, because a backend may end a process that receives more than it expects. If descriptions
differ, every process raises an error before it exchanges more numbers. On a GPU, raising would need
synchronisation with the device, so the statistics become NaN instead.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from backnorm.errors import BacknormError
from backnorm.reproducible_sums import SPECIAL, raised, tops_of, with_tops

# A group of at most this many processes is small: every process of the group gathers the numbers of
# all processes. With n processes on a ring, gathering takes 2 * (n - 1) hops for both passes. A
# larger group makes three all-reduce sums instead: two in the forward pass and one in the backward
# pass. On a tree, each sum takes 2 * log2(n) hops, and all three take 6 * log2(n). For 12
# processes, gathering takes 22 hops, and the sums take 21.5.
_GATHERED = 12

# The first message of an exchange has two parts of these lengths, in units of 8 bytes. The first
# part stands for a text that describes layer, channels, pass and settings. It has a digest of this
# text (8 bytes), and the first 120 bytes of the text. The second part has the first 1025 numbers of
# the statistics. If the statistics have more than 1025 numbers, the remaining numbers are sent in a
# second message.
_DESCRIPTION, _STATISTICS = 16, 1025

# Maps each process group to two things for layers without a name (see `name_of`): the numbers that
# such layers have got so far, and a counter that gives the next layer its number.
_NUMBERS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

# In older versions of PyTorch, the function `all_gather_single` is named `all_gather_into_tensor`.
# If PyTorch was built without `torch.distributed`, it has neither of the two functions.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(
    dist, "all_gather_into_tensor", None
)


class SynchronisationError(BacknormError, RuntimeError):
    """The processes of a group could not exchange the statistics of a layer."""


def group_of(group: Any) -> Any:
    """Return the process group that exchanges statistics, or None if it has only this process."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD if group is None else group
    return group if dist.get_world_size(group) > 1 else None


def name_of(layer: torch.nn.Module, group: Any) -> str:
    """Return the name of a layer, for the `description` of an `Exchange`.

    `convert` sets the attribute `name` of every synchronised layer in the model. Layers without a
    name are numbered in the order in which the group first exchanges their statistics. Processes
    that call layers in the same order assign the same numbers.
    """
    name: str = layer.name
    if "name" in vars(layer) or torch.compiler.is_compiling():
        return name
    numbers, count = _NUMBERS.setdefault(group, (WeakKeyDictionary(), itertools.count(1)))
    if layer not in numbers:
        numbers[layer] = next(count)
    return f"{name} (number {numbers[layer]} of its group)"


class Exchange:
    """One exchange of numbers between the processes of a group. The exchange also checks that all
    processes have the same `description`.

    Parameters
    ----------
    group : str
        The name of the group.
    description : str
        Layer, channels, pass and settings, which must be the same in all processes.
    local : Tensor, shape (n,)
        The numbers of this process, of which the last is the number of its elements.
    """

    def __init__(self, group: str, description: str, local: Tensor) -> None:
        # A PyTorch that was built without `torch.distributed` does not have this module.
        from torch.distributed.distributed_c10d import _resolve_process_group

        self._group, self._local = _resolve_process_group(group), local
        self._size, self.rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        self._text = f"{description}, {local.shape[0]} numbers"
        self._is_gathered = self._size <= _GATHERED

    def moments(self) -> Tensor:
        """Return the means and biased variances over the elements of all processes, followed by the
        number of these elements.
        """
        channels = self._local.shape[0] // 2
        if self._is_gathered:
            every = self._gathered()
            counts = every[:, -1:]
            total = counts.sum()
            weights = counts / total.clamp(min=1.0)
            means, variances = every[:, :channels], every[:, channels:-1]
            mean = (weights * means).sum(0)
            distances = means - mean
            variance = (weights * (variances + distances * distances)).sum(0)
            return self._result(mean, variance, total.view(1))
        mean, variance, count = self._local.split((channels, channels, 1))
        sums = self._reduced(torch.cat((mean * count, count)), dist.ReduceOp.SUM)
        total = sums[-1:]
        elements = total.clamp(min=1.0)
        mean_of_all = sums[:-1] / elements
        distances = mean - mean_of_all
        squares = self._sum(count * (variance + distances * distances))
        return self._result(mean_of_all, squares / elements, total)

    def sums(self) -> Tensor:
        """Return, for each number of the message, its sum over all processes."""
        if self._is_gathered:
            return self._result(self._gathered().sum(0))
        return self._result(self._reduced(self._local, dist.ReduceOp.SUM))

    def bins(self, rows: int) -> Tensor:
        """Return the reproducible sums over the elements of all processes, as a flat tensor: the
        `rows` rows of bins, followed by the number of elements.
        """
        every = self._gathered() if self._is_gathered else self._local[None]
        bins = every[:, :-1].reshape(len(every), rows, -1).transpose(0, 1)
        tops = tops_of(bins).amax(1)
        if not self._is_gathered:
            tops = self._reduced(tops.flatten(), dist.ReduceOp.MAX).view(2, -1)
        digits = raised(bins, tops[:, None], torch).sum(1)
        numbers = torch.cat((digits.flatten(), every[:, -1].sum().view(1)))
        if not self._is_gathered:
            numbers = self._sum(numbers)
        total = with_tops(numbers[:-1].view(rows, -1), tops, torch)
        return self._result(total.flatten(), numbers[-1:])

    def _gathered(self) -> Tensor:
        """Return one row of numbers for each process, and compare the processes' descriptions."""
        begin, rest = _split(self._local)
        expected = _described(self._text).to(begin.device)
        rows = self._rows(torch.cat((expected, begin.view(torch.int64))))
        self._compare(rows[:, :_DESCRIPTION], expected)
        found = rows[:, _DESCRIPTION:].contiguous().view(begin.dtype)
        if rest.shape[0]:
            found = torch.cat((found, self._rows(rest)), 1)
        return found[:, : self._local.shape[0]].contiguous()

    def _reduced(self, own: Tensor, operation: Any) -> Tensor:
        """Return the sum or maximum of `own` over all processes, and check that all processes have
        the same description (`self._text`).
        """
        begin, rest = _split(own)
        # The digest has 32 bits, so that float64 sums of digests are exact. Each process sends two
        # numbers: its digest d, and -d. If `operation` is the maximum, the processes get the
        # largest digest and minus the smallest digest. These are d and -d in every process only if
        # all digests are equal.
        digest = int(_described(self._text)[0]) & 0xFFFFFFFF
        head = own.new_tensor([digest, -digest])
        message = torch.cat((head, begin))
        self._call(dist.all_reduce, message, op=operation)
        self._compare(message[:2], head * self._size if operation == dist.ReduceOp.SUM else head)
        if rest.shape[0]:
            rest = rest.clone()
            self._call(dist.all_reduce, rest, op=operation)
        return torch.cat((message[2:], rest))[: own.shape[0]]

    def _sum(self, own: Tensor) -> Tensor:
        """Replace the numbers in `own` by their sums over all processes; return `own`."""
        self._call(dist.all_reduce, own, op=dist.ReduceOp.SUM)
        return own

    def _result(self, *parts: Tensor) -> Tensor:
        """Return the parts as one tensor.

        On a GPU, every number is NaN (in an integer tensor: `SPECIAL`) if the descriptions of two
        processes differ. On a CPU, `_compare` has then already raised an error.
        """
        numbers = torch.cat(parts)
        if numbers.is_cpu:
            return numbers
        nothing = math.nan if numbers.is_floating_point() else SPECIAL
        return torch.where(self._agree, numbers, numbers.new_full((), nothing))

    def _compare(self, found: Tensor, expected: Tensor) -> None:
        """Compare the processes' descriptions, or digests of them.

        Suppose that two processes have different descriptions. On a CPU, every process then raises
        an error. On a GPU, `_result` returns NaN (or SPECIAL, for integers) instead of the
        exchanged numbers.
        """
        self._agree = (found == expected).all()
        if not found.is_cpu or self._agree:
            return
        descriptions = self._rows(_described(self._text))
        own = descriptions[self.rank]
        rank = next(k for k, other in enumerate(descriptions) if not other.equal(own))
        raise SynchronisationError(
            "all processes must call the same layers in the same order, with the same settings; "
            f"got {_text_of(descriptions[rank])!r} from rank {rank}; expected {_text_of(own)!r}, "
            f"as in this process (rank {self.rank} of {self._size})"
        )

    def _rows(self, own: Tensor) -> Tensor:
        every = own.new_empty(self._size * own.shape[0])
        self._call(_all_gather, every, own)
        return every.view(self._size, -1)

    def _call(self, collective: Callable[..., Any], *tensors: Tensor, **options: Any) -> None:
        try:
            collective(*tensors, group=self._group, **options)
        except RuntimeError as error:
            raise SynchronisationError(
                f"{self._text}: this process (rank {self.rank} of {self._size}) could not "
                "exchange its statistics with the others; another process may have ended, raised, "
                f"or left out this layer: {error}"
            ) from error


def _split(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Divide the numbers of a process into two messages.

    The first message has the first `_STATISTICS` numbers, padded with zeros if there are fewer. The
    second message has the remaining numbers.
    """
    numbers = pad(numbers, (0, max(0, _STATISTICS - numbers.shape[0])))
    return numbers[:_STATISTICS], numbers[_STATISTICS:]


def _described(text: str) -> Tensor:
    """Return the digest of a text, and then its first 120 bytes, as int64 numbers."""
    encoded = text.encode()
    digest = hashlib.blake2b(encoded, digest_size=8).digest()
    whole = (digest + encoded)[: 8 * _DESCRIPTION].ljust(8 * _DESCRIPTION, b"\0")
    return torch.frombuffer(bytearray(whole), dtype=torch.int64)


def _text_of(description: Tensor) -> str:
    text: bytes = description[1:].numpy().tobytes()
    return text.rstrip(b"\0").decode(errors="replace")
