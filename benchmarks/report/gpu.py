"""What a report says of a run on a GPU alone: how to read it, targets, whole calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from benchmarks.cuda.watches import SMALL
from benchmarks.model import (
    LEAST_PASSES,
    OURS,
    PASSES,
    Form,
    GpuFacts,
    Outcome,
    Result,
    Row,
    geometric_mean,
)
from benchmarks.report.figures import cells, distinct, peer_columns
from benchmarks.report.words import (
    bytes_text,
    label,
    milliseconds,
    percent,
    ratio_text,
    speed_text,
)

__all__ = ["GOALS", "Goals", "attained", "goals", "notes", "whole_calls"]

#: The shapes of ResNet-50 and of TensorFlow's benchmark at a batch of 256.
_SUITE = "batch256"

#: The problem whose whole call is compared.
_PROBLEM = (8, 16, 8, 8)

#: Contestants that are PyTorch's own operators.
_PYTORCH = ("torch", "cudnn")


@dataclass(frozen=True, slots=True)
class Goals:
    """What a run on an H200 is to come to.

    Attributes
    ----------
    worst, mean : float
        Our time over the best peer's at batch 256: in every cell, and in the geometric mean, at
        the most.
    attained : float
        The part of the bandwidth of copying, beyond the L2, at the least.
    whole : float
        Our whole call over PyTorch's on (8, 16, 8, 8), at the most.
    """

    worst: float = 0.9
    mean: float = 0.6
    attained: float = 0.85
    whole: float = 1.0


GOALS = Goals()


def notes(result: Result) -> list[str]:
    """Return sentences on how to read the times of a run on a GPU; none for one on the CPU."""
    if result.gpu is None:
        return []
    least, two = _passes(LEAST_PASSES), _passes(PASSES)
    return [
        "Times are the device's: CUDA events around a call, behind work that lasts until the host "
        f"has queued it. Before each call on more than {bytes_text(SMALL)} of x the L2 is read "
        "empty; smaller problems find it as the call before has left it.",
        f"{label('torch')} is its native CUDA kernels, which never ask cuDNN; {label('cudnn')} the "
        f"operators that do; {label('compile')} and {label('jax')} compile the formula as one "
        f"writes it. NXC is channels_last memory. {label('jax')}'s streams are not PyTorch's: it "
        "is timed by the host's clock, many calls in a row, with the L2 read empty before a row.",
        f"The floor is what has to be moved whatever the order of work, in arrays of x's size "
        f"({least}), at the measured bandwidth of copying, {_speed(result.gpu)}. A backward pass "
        f"that goes over its data twice moves {PASSES['backward']}: GB/s count two passes ({two}), "
        "and so does the part of the bandwidth that is attained.",
    ]


def goals(result: Result) -> list[str]:
    """Return a line for each target of a run on a GPU and what came of it; none for the CPU's."""
    gpu = result.gpu
    if gpu is None:
        return []
    frame = cells(result)
    beyond = frame[frame.large]
    return [
        f"bandwidth of copying: {_speed(gpu)}",
        _goal(
            "ours / best peer at batch 256",
            frame[frame.suite == _SUITE].set_index("row").ratio,
            f"targets: {GOALS.worst:.2f} in every cell, {GOALS.mean:.2f} in the mean",
            limit=GOALS.worst,
            text=ratio_text,
        ),
        _goal(
            f"part of the bandwidth of copying, x beyond the L2 ({bytes_text(gpu.cache)})",
            pd.Series([attained(row, gpu) for row in beyond.row], beyond.row, dtype=float),
            f"target: {percent(GOALS.attained)} in every cell; counted: {_passes(PASSES)}",
            limit=GOALS.attained,
            text=percent,
            least=True,
        ),
        _whole_call(frame),
    ]


def attained(row: Row, gpu: GpuFacts) -> float | None:
    """Return the part of the bandwidth of copying that ours attains, two passes counted."""
    ours = row.ours()
    if ours is None or ours.timing is None:
        return None
    return row.cell.traffic / ours.timing.median / gpu.bandwidth


def whole_calls(result: Result) -> pd.DataFrame:
    """Return the table of whole calls, dispatch included; without lines if there are none."""
    rows = [row for row in distinct(result.rows) if any(o.whole for o in row.outcomes)]
    columns: list[tuple[str, Form]] = [(OURS, "allocate"), *peer_columns(rows)]
    head = ["cell", *(f"{label(name)}, ms" + " (ratio)" * (name != OURS) for name, _ in columns)]
    lines = [[str(row.cell), *(_whole_text(row, *key) for key in columns)] for row in rows]
    return pd.DataFrame(lines, columns=head, dtype=str)


def _goal(
    what: str,
    values: pd.Series,
    target: str,
    *,
    limit: float,
    text: Callable[[float], str],
    least: bool = False,
) -> str:
    """Return how far a target is met by the values of rows, which should be at most `limit`.

    At least, if `least`. NaN is counted, too: a row without such a figure.
    """
    found = values.dropna()
    if found.empty:
        return f"{what}: not measured ({target})"
    row = found.idxmin() if least else found.idxmax()
    missed = (found < limit) if least else (found > limit)
    without = f" (and {len(values) - len(found)} without such a figure)"
    return (
        f"{what}: worst {text(found[row])} ({row.cell}), {'below' if least else 'above'} "
        f"{text(limit)} in {missed.sum()} of {len(found)} cells"
        f"{without * (len(found) < len(values))}, geometric mean {text(geometric_mean(found))} "
        f"({target})"
    )


def _whole_call(frame: pd.DataFrame) -> str:
    shape = ",".join(map(str, _PROBLEM))
    what = f"whole call on ({shape}), dispatch included, ours / PyTorch"
    target = f"target: {GOALS.whole:.2f} in every cell"
    found = [
        (ratio, row, peer)
        for row in frame.row
        if row.cell.shape == _PROBLEM
        for peer in row.outcomes
        if peer.contestant in _PYTORCH and (ratio := row.whole_ratio_to(peer)) is not None
    ]
    if not found:
        return f"{what}: not measured ({target})"
    worst, row, peer = max(found, key=lambda entry: entry[0])
    return (
        f"{what}: worst {worst:.2f} ({row.cell}, {_microseconds(row.find(OURS, peer.form))} to "
        f"{_microseconds(peer)} of {label(peer.contestant)}) ({target})"
    )


def _whole_text(row: Row, contestant: str, form: Form) -> str:
    outcome = row.find(contestant, form)
    if outcome is None or outcome.whole is None:
        return ""
    time = milliseconds(outcome.whole.median)
    if contestant == OURS:
        return time
    return f"{time} ({ratio_text(row.whole_ratio_to(outcome))})"


def _passes(passes: dict[Any, int]) -> str:
    return ", ".join(f"{op} {count}" for op, count in passes.items())


def _speed(gpu: GpuFacts) -> str:
    return f"{speed_text(gpu.bandwidth / 1e9)} GB/s"


def _microseconds(outcome: Outcome | None) -> str:
    assert outcome is not None
    assert outcome.whole is not None
    return f"{outcome.whole.median * 1e6:.1f} µs"
