"""All dialects, layouts and types on real tensors, checked and compared (`backnorm demo`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

import backnorm
from backnorm.cli.check import check
from backnorm.cli.demo_cases import Case, Layer, cases, load_layers
from backnorm.cli.measure import timed, traffic
from backnorm.cli.progress import progress
from backnorm.cli.report import finite
from backnorm.dialects import registry
from backnorm.dtypes import is_16_bit

__all__ = ["Agreement", "DemoReport", "DemoRow", "run_demo"]

# A call takes well under a millisecond here; the median of a few calls is steady enough.
_REPEAT = 5
_GRADIENTS = ("dx", "dgamma", "dbeta")


@dataclass(frozen=True, slots=True)
class DemoRow:
    """One case, over all layers.

    Attributes
    ----------
    case : Case
    seconds : float
        Sum over the layers of the median time of a call.
    traffic : int
        Bytes, by the convention of :func:`backnorm.cli.measure.traffic`.
    worst_ulp : float
        Largest error of any gradient, in ulps of its type.
    budget_used : float
        Largest error as a part of what is allowed at that element.
    failures : tuple of str
        What the oracle rejects.
    """

    case: Case
    seconds: float
    traffic: int
    worst_ulp: float
    budget_used: float
    failures: tuple[str, ...]

    @property
    def bandwidth(self) -> float:
        """GB/s."""
        return self.traffic / self.seconds / 1e9

    def to_dict(self) -> dict[str, object]:
        """Return plain values."""
        return {
            "dialect": self.case.dialect,
            "op": self.case.op,
            "call": self.case.call,
            "layout": self.case.layout,
            "dtype": str(self.case.dtype),
            "seconds": self.seconds,
            "gigabytes_per_second": self.bandwidth,
            "worst_ulp": finite(self.worst_ulp),
            "budget_used": finite(self.budget_used),
            "passed": not self.failures,
            "failures": list(self.failures),
        }


@dataclass(frozen=True, slots=True)
class Agreement:
    """Whether all results for one type of data are the same bits, whatever the dialect.

    Dialects that are given the inverse standard deviation are compared with each other: it is
    rounded, and stands for another variance. Results of float32 and float64 are the same whatever
    the layout; 16-bit data is summed in float32 at
    first, and the order of that is the layout's. `compared` counts the arrays that were compared
    with another; gradients of parameters are compared between the dialects that return them in
    one type.
    """

    dtype: str
    compared: int
    differences: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """Return plain values."""
        return {
            "dtype": self.dtype,
            "compared": self.compared,
            "agree": not self.differences,
            "differences": list(self.differences),
        }


@dataclass(frozen=True, slots=True)
class DemoReport:
    """All rows, and what comparing them showed."""

    layers: tuple[Layer, ...]
    rows: tuple[DemoRow, ...]
    agreements: tuple[Agreement, ...]
    threads: int

    @property
    def passed(self) -> bool:
        """Whether every result is within its budget and all dialects agree."""
        return not self.problems

    @property
    def problems(self) -> list[str]:
        """Everything that is wrong, a line each."""
        wrong = [f"{row.case.call} {failure}" for row in self.rows for failure in row.failures]
        return wrong + [text for a in self.agreements for text in a.differences]

    @property
    def verdict(self) -> str:
        """The outcome in words."""
        if self.problems:
            return "\n".join(["FAILED:", *self.problems])
        dialects = len({row.case.dialect for row in self.rows})
        compared = sum(agreement.compared for agreement in self.agreements)
        return (
            f"All {dialects} dialects agree bit for bit ({len(self.rows)} calls on "
            f"{len(self.layers)} layers, {compared} comparisons), and every gradient is the exact "
            "one within its error budget."
        )

    def to_dict(self) -> dict[str, object]:
        """Return plain values."""
        return {
            "layers": [{"name": la.name, "shape": list(la.x.shape)} for la in self.layers],
            "threads": self.threads,
            "rows": [row.to_dict() for row in self.rows],
            "agreements": [agreement.to_dict() for agreement in self.agreements],
            "passed": self.passed,
        }


@dataclass(frozen=True, slots=True, eq=False)
class _Result:
    """One gradient, in the shape of the layer's own tensors."""

    label: str
    array: np.ndarray


# Results that must be equal, by (type of data, layer, gradient, type of gradient, layout if it may
# make a difference, what the dialect is given beside the mean).
_Groups = dict[tuple[str, str, str, str, str, str], list[_Result]]


def run_demo() -> DemoReport:
    """Run all cases on the tensors that ship with the package."""
    layers = load_layers()
    rows = []
    groups: _Groups = {}
    everything = list(cases())
    with progress(len(everything)) as advance:
        for case in everything:
            advance(f"{case.call} {case.dtype}")
            rows.append(_run_case(case, layers, groups))
    return DemoReport(tuple(layers), tuple(rows), _compare(groups), backnorm.get_num_threads())


def _run_case(case: Case, layers: Sequence[Layer], groups: _Groups) -> DemoRow:
    operator = registry.operator(case.dialect, case.op)
    seconds, moved, worst, used, failures = 0.0, 0, 0.0, 0.0, []
    for layer in layers:
        inputs, attributes = case.inputs(layer), case.attributes(layer)
        canonical = operator.canonical(inputs, attributes)
        outputs, took = timed(partial(operator.invoke, inputs, attributes), _REPEAT)
        seconds += took
        moved += traffic(canonical, inputs)
        for name, verdict in check(canonical, inputs, outputs).items():
            worst = max(worst, verdict.worst_ulp)
            used = max(used, verdict.worst_excess)
            if not verdict.passed:
                failures.append(f"{case.dtype} {layer.name} {name}: {verdict.detail}")
        for gradient in _GRADIENTS:
            array = outputs[canonical.outputs[gradient]]
            if gradient == "dx":
                array = case.channels_first(array, layer)
            layout = case.layout if is_16_bit(case.dtype) else ""
            kind, given = str(array.dtype), case.schema.encoding
            key = (str(case.dtype), layer.name, gradient, kind, layout, given)
            groups.setdefault(key, []).append(_Result(case.call, array))
    return DemoRow(case, seconds, moved, worst, used, tuple(failures))


def _compare(groups: _Groups) -> tuple[Agreement, ...]:
    """Compare, in each group, every result with the first one, bit for bit."""
    agreements = []
    for dtype in dict.fromkeys(key[0] for key in groups):
        compared, differences = 0, []
        for key, (first, *others) in groups.items():
            if key[0] != dtype:
                continue
            for other in others:
                compared += 1
                if first.array.tobytes() != other.array.tobytes():
                    differences.append(
                        f"{dtype} {key[1]} {key[2]}: {other.label} differs from {first.label} in "
                        f"{np.count_nonzero(first.array != other.array)} elements"
                    )
        agreements.append(Agreement(dtype, compared, tuple(differences)))
    return tuple(agreements)
