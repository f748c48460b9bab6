"""Exchange of statistics between the processes of a group: 2C + 1 float64 numbers each way.

*Forward*: mean and variance of each process's own elements, and their number. They are combined by
the formula for parallel variances (Chan, Golub and LeVeque, 1979), which loses no digits whatever
the means; sums of squares would lose all of them. A small group gathers the numbers of all
processes and combines them in the order of ranks: 8 * (2C + 1) bytes of every process. In a large
one that would take long, as bytes and, by rings, waiting grow with the group; so two sums are made
one after the other: of the means, weighted, and then of the variances and the squared distances of
the means. Each process receives twice 8 * (2C + 1) bytes, whatever the size of the group.

*Backward*: the sums of 2C numbers; the number of elements is known from the forward pass.

*Reproducible sums* are integers, with the bins that they count in (`binned`): 8C + 1 numbers each
way, or 10C + 1 of float64 elements. A small group gathers them as well; a large one first agrees on
the top bins, by a maximum of 2C numbers, and then adds up the rest.

*Agreement*: processes that call their layers in different orders, or with different settings, would
combine the statistics of different layers. So an exchange begins with its description: layer,
channels, pass and settings in a gathered message, their digest in one that is reduced. Its first
message has one length, whatever the layer is, because a backend may end a process that receives
more than it expects. What that has no room for follows when all descriptions are found to be equal.
Where they differ every process raises. A GPU is not waited for: there the statistics become NaN.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Callable
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from backnorm import binned
from backnorm.binned import SPECIAL, raised, tops_of, with_tops
from backnorm.errors import BacknormError
from backnorm.torch.dispatch import needs_dispatcher
from backnorm.torch.registry import Operation, register

__all__ = [
    "SynchronisationError",
    "bins_of_all",
    "check_count",
    "group_of",
    "is_first",
    "moments_of_all",
    "name_of",
    "sums_of_all",
]

# Processes up to which each receives the numbers of all. By a ring that takes a hop less than
# there are processes, in each pass; the three sums of both passes, each up and down a tree, take
# six times the logarithm to base two: of 12 processes 22 hops and 21.5.
_GATHERED = 12

# The int64 numbers that a message begins with: its description, a digest and then the first 120
# bytes of the text; and statistics, of which those of 512 channels need no second message.
_DESCRIPTION, _STATISTICS = 16, 1025

# For each group, the numbers of layers without a name, and the numbers to come.
_NUMBERS: WeakKeyDictionary[Any, tuple[WeakKeyDictionary[torch.nn.Module, int], Any]]
_NUMBERS = WeakKeyDictionary()

# Its name until PyTorch 2.12. Neither is there where PyTorch was built without processes.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(
    dist, "all_gather_into_tensor", None
)


class SynchronisationError(BacknormError, RuntimeError):
    """The processes of a group could not exchange the statistics of a layer."""


def group_of(group: Any) -> Any:
    """Return the process group to exchange with, or None if this process is alone."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD if group is None else group
    return group if dist.get_world_size(group) > 1 else None


def name_of(layer: torch.nn.Module, group: Any) -> str:
    """Return what the description of an exchange calls a layer.

    That is its name where `convert` gave it one. The others are numbered in the order in which the
    group first exchanges their statistics: where processes agree in each step, their numbers do.
    """
    name: str = layer.name
    if "name" in vars(layer) or torch.compiler.is_compiling():
        return name
    numbers, count = _NUMBERS.setdefault(group, (WeakKeyDictionary(), itertools.count(1)))
    number = numbers.get(layer)
    if number is None:
        number = numbers[layer] = next(count)
    return f"{name} (number {number} of its group)"


def check_count(count: int, group: Any) -> None:
    """Raise if a part has more elements in a channel than reproducible sums of all parts hold.

    Each process checks its own part, before any exchange, as if all parts were as large.
    """
    binned.check_count("input", dist.get_world_size(group) * count)


def is_first(group: Any) -> bool:
    """Return whether this is the first process of a group; None is this one alone."""
    return group is None or dist.get_rank(group) == 0


def _operator(exchange: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Register an exchange as an operator, for compilers and for batched gradients.

    The dispatcher calls the operator for each gradient of a batch in turn. A call on a plain tensor
    is a call of the function itself, which takes less time.
    """

    def kernel(own: Tensor, channels: int, description: str, layer: str, group: str) -> Tensor:
        return exchange(own, channels, description, layer, _group_named(group))

    def fake(own: Tensor, *_: Any) -> Tensor:
        return torch.empty_like(own)

    operator = register(Operation(exchange.__name__, kernel, fake, reference="own"))

    @functools.wraps(exchange)
    def call(own: Tensor, channels: int, description: str, layer: str, group: Any) -> Tensor:
        if needs_dispatcher(own):
            result: Tensor = operator(own, channels, description, layer, group.group_name)
            return result
        return exchange(own, channels, description, layer, group)

    return call


def _group_named(name: str) -> Any:
    # Only where PyTorch was built with processes.
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)


@_operator
def moments_of_all(own: Tensor, channels: int, description: str, layer: str, group: Any) -> Tensor:
    """Return the moments of the elements of all processes.

    Parameters
    ----------
    own : Tensor, shape (2C + 1,)
        Means, biased variances and number of elements, of this process's elements.
    channels : int
        C
    description : str
        The pass and the settings of the layer, which must be the same in all processes.
    layer : str
        The name of the layer, which must be the same in all processes.
    group : ProcessGroup
    """
    exchange = _Exchange(group, layer, description, channels, own)
    if exchange.size <= _GATHERED:
        every = exchange.gathered(own)
        counts = every[:, -1:]
        total = counts.sum()
        shares = counts / total.clamp(min=1.0)
        means, variances = every[:, :channels], every[:, channels:-1]
        mean = (shares * means).sum(0)
        apart = means - mean
        variance = (shares * (variances + apart * apart)).sum(0)
        return exchange.result(torch.cat((mean, variance, total.view(1))))
    mean, variance, count = own[:channels], own[channels:-1], own[-1:]
    sums = exchange.reduced(torch.cat((mean * count, count)), dist.ReduceOp.SUM)
    total = sums[-1:]
    elements = total.clamp(min=1.0)
    mean_of_all = sums[:-1] / elements
    apart = mean - mean_of_all
    squares = exchange.sum(count * (variance + apart * apart))
    return exchange.result(torch.cat((mean_of_all, squares / elements, total)))


@_operator
def sums_of_all(own: Tensor, channels: int, description: str, layer: str, group: Any) -> Tensor:
    """Return the sums of all processes.

    Parameters
    ----------
    own : Tensor, shape (2C,)
    channels, description, layer, group
        As of `moments_of_all`.
    """
    exchange = _Exchange(group, layer, description, channels, own)
    if exchange.size <= _GATHERED:
        return exchange.result(exchange.gathered(own).sum(0))
    return exchange.result(exchange.reduced(own, dist.ReduceOp.SUM))


@_operator
def bins_of_all(own: Tensor, channels: int, description: str, layer: str, group: Any) -> Tensor:
    """Return the reproducible sums of all processes.

    Parameters
    ----------
    own : int64 Tensor, shape (rows * C + 1,)
        Those of this process, and its number of elements.
    channels, description, layer, group
        As of `moments_of_all`.
    """
    exchange = _Exchange(group, layer, description, channels, own)
    rows = own.shape[0] // channels if channels else 2
    if exchange.size <= _GATHERED:
        every = exchange.gathered(own)
        count = every[:, -1].sum()
        bins = every[:, :-1].reshape(exchange.size, rows, channels).transpose(0, 1)
        tops = tops_of(bins).amax(1, keepdim=True)
        total = raised(bins, tops, torch).sum(1)
        tops = tops[:, 0]
    else:
        bins = own[:-1].view(rows, channels)
        tops = exchange.reduced(tops_of(bins).flatten(), dist.ReduceOp.MAX).view(2, channels)
        sums = exchange.sum(torch.cat((raised(bins, tops, torch).flatten(), own[-1:])))
        total, count = sums[:-1].view(rows, channels), sums[-1]
    return exchange.result(torch.cat((with_tops(total, tops, torch).flatten(), count.view(1))))


class _Exchange:
    """One exchange of the processes of a group: its collectives, and the check that they agree."""

    def __init__(
        self, group: Any, layer: str, description: str, channels: int, own: Tensor
    ) -> None:
        self.group, self.layer = group, layer
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.text = f"{layer}, {channels} channels, {description}, {own.shape[0]} numbers"

    def gathered(self, own: Tensor) -> Tensor:
        """Return the numbers of all processes, a row each."""
        begin, rest = own[:_STATISTICS], own[_STATISTICS:]
        expected = _described(self.text).to(own.device)
        padding = expected.new_zeros(_STATISTICS - begin.shape[0])
        rows = self._rows(torch.cat((expected, begin.view(torch.int64), padding)))
        descriptions, statistics = rows[:, :_DESCRIPTION], rows[:, _DESCRIPTION:]
        self._compare(descriptions, expected)
        found = statistics[:, : begin.shape[0]].contiguous().view(own.dtype)
        return torch.cat((found, self._rows(rest)), 1) if rest.shape[0] else found

    def reduced(self, own: Tensor, operation: Any) -> Tensor:
        """Return the sum or maximum of the numbers of all processes: the first of an exchange."""
        begin, rest = own[:_STATISTICS], own[_STATISTICS:]
        # Of 32 bits, so that a sum is exact. Two maxima are a maximum and a minimum.
        digest = int(_described(self.text)[0]) & 0xFFFFFFFF
        head = own.new_tensor([digest, -digest])
        message = torch.cat((head, begin, own.new_zeros(_STATISTICS - begin.shape[0])))
        self._call(dist.all_reduce, message, op=operation)
        expected = head * self.size if operation == dist.ReduceOp.SUM else head
        self._compare(message[:2], expected)
        found = message[2:][: begin.shape[0]]
        if rest.shape[0]:
            rest = rest.clone()
            self._call(dist.all_reduce, rest, op=operation)
            found = torch.cat((found, rest))
        return found

    def sum(self, own: Tensor) -> Tensor:
        """Return the sum of the numbers of all processes, in their place."""
        self._call(dist.all_reduce, own, op=dist.ReduceOp.SUM)
        return own

    def result(self, numbers: Tensor) -> Tensor:
        """Return the result of the exchange; on a GPU what becomes NaN if processes differ."""
        if numbers.is_cpu:
            return numbers
        nothing = math.nan if numbers.is_floating_point() else SPECIAL
        return torch.where(self.agree, numbers, numbers.new_full((), nothing))

    def _compare(self, found: Tensor, expected: Tensor) -> None:
        self.agree = (found == expected).all()
        if found.is_cpu and not self.agree:
            # In all processes, each of which differs from another one.
            self._refuse(self._rows(_described(self.text)))

    def _rows(self, own: Tensor) -> Tensor:
        every = own.new_empty(self.size * own.shape[0])
        self._call(_all_gather, every, own.contiguous())
        return every.view(self.size, -1)

    def _call(self, collective: Callable[..., Any], *tensors: Tensor, **options: Any) -> None:
        try:
            collective(*tensors, group=self.group, **options)
        except RuntimeError as error:
            raise SynchronisationError(
                f"{self.layer}: this process (rank {self.rank} of {self.size}) could not exchange "
                "its statistics with the others; one of them may have ended, raised, or left out "
                f"this layer: {error}"
            ) from error

    def _refuse(self, descriptions: Tensor) -> NoReturn:
        texts = [_text_of(row) for row in descriptions]
        own = _text_of(_described(self.text))
        rank = next(
            k for k, row in enumerate(descriptions) if not row.equal(descriptions[self.rank])
        )
        raise SynchronisationError(
            f"{self.layer}: all processes must call the same layers in the same order, with the "
            f"same settings; got {texts[rank]!r} from rank {rank}; expected {own!r}, as in this "
            f"process (rank {self.rank} of {self.size})"
        )


@functools.lru_cache(4096)
def _described(text: str) -> Tensor:
    """Return a text as int64 numbers, of which the first is its digest."""
    encoded = text.encode()
    digest = hashlib.blake2b(encoded, digest_size=8).digest()
    whole = (digest + encoded)[: 8 * _DESCRIPTION].ljust(8 * _DESCRIPTION, b"\0")
    return torch.frombuffer(bytearray(whole), dtype=torch.int64)


def _text_of(description: Tensor) -> str:
    text: bytes = description[1:].numpy().tobytes()
    return text.rstrip(b"\0").decode(errors="replace")
