"""Cases with more elements than a 32-bit index can count.

All channels, and their exact results, are copies of the channels and the exact results of a small
case.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from backnorm.conformance.battery import Case
from backnorm.conformance.verify.operations import RefusedError, operation_of

_GIB = 1 << 30
_MEMINFO = Path("/proc/meminfo")


def available_bytes() -> int:
    """Return how many bytes of memory this process can use without making the system swap.

    On systems other than Linux, return the size of the machine's whole memory, used or not.
    """
    if not _MEMINFO.is_file():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    lines = _MEMINFO.read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) << 10


@contextlib.contextmanager
def limited_memory(case: Case, allowed: int) -> Iterator[None]:
    """Limit the data memory of this process to `allowed` bytes, so that the system does not swap.

    Raises
    ------
    RefusedError
        If the inputs and outputs of the case alone need more.
    """
    arrays = 3 if operation_of(case).name == "backward" else 2
    needed = arrays * case.repeats * case.data.x.nbytes
    if needed > allowed:
        raise RefusedError(
            f"the inputs and outputs take {needed / _GIB:.1f} GiB, of {allowed / _GIB:.1f} GiB "
            "that are available"
        )
    before = resource.getrlimit(resource.RLIMIT_DATA)
    hard = before[1]
    soft = allowed if hard == resource.RLIM_INFINITY else min(allowed, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def repeated(case: Case) -> Case:
    """Return a case with `case.repeats` copies of the channels, one after the other.

    `case` must have the layout NCX, and the first axis of its x must have the size 1.
    """
    data, times = case.data, case.repeats

    def elements(array: np.ndarray) -> np.ndarray:
        large = np.empty((times, *array.shape[1:]), array.dtype)
        large[...] = array
        return large.reshape(1, -1, *array.shape[2:])

    x = elements(data.x)
    many = replace(
        data,
        x=x,
        dy=elements(data.dy) if operation_of(case).name == "backward" else x,
        mean=np.tile(data.mean, times),
        variance=np.tile(data.variance, times),
        gamma=np.tile(data.gamma, times),
        beta=np.tile(data.beta, times),
    )
    return replace(case, data=many, repeats=1)


def worst_parts(
    outputs: Mapping[str, np.ndarray | None], case: Case
) -> dict[str, np.ndarray | None]:
    """Return, for each output, the results of only one copy of the channels.

    An output has results for `case.repeats` copies of the same channels (see `repeated`). The copy
    is chosen whose results differ most from those of the first copy.
    """
    return {
        name: None if array is None else _worst_part(array, case.repeats)
        for name, array in outputs.items()
    }


def _worst_part(array: np.ndarray, times: int) -> np.ndarray:
    channels = array.shape[1] if array.ndim > 1 else array.size
    if channels % times:
        # An array of a wrong shape is returned as it is: the judge reports the shape.
        return array
    parts = array.reshape(times, -1)
    first, worst, most = parts[0], 0, 0.0
    bits = parts.view(np.uint8)
    for k in range(1, times):
        if np.array_equal(bits[k], bits[0]):
            continue
        with np.errstate(all="ignore"):
            gap = np.abs(parts[k].astype(np.float64) - first.astype(np.float64)).max()
        gap = np.inf if np.isnan(gap) else gap
        if gap > most:
            worst, most = k, gap
    shape = (1, channels // times, *array.shape[2:]) if array.ndim > 1 else (channels // times,)
    part: np.ndarray = parts[worst].reshape(shape)
    return part
