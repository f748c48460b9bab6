"""What a run reports, as plain values: the same for tables and for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from backnorm.conformance.judge import Verdict

__all__ = ["RunReport", "StepReport", "TensorFacts", "finite", "verdicts_to_dict"]


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """Metadata of an input or output of a step.

    Attributes
    ----------
    port : str
        The operator's name for it.
    name : str or None
        Its name in the tensor file; None for an output that is not written.
    shape : tuple of int
    dtype : str
    random : bool
        Whether it was made up.
    """

    port: str
    name: str | None
    shape: tuple[int, ...]
    dtype: str
    random: bool = False

    @classmethod
    def of(
        cls, port: str, name: str | None, array: np.ndarray, *, random: bool = False
    ) -> TensorFacts:
        """Return the facts of `array`."""
        return cls(port, name, array.shape, str(array.dtype), random)

    def to_dict(self) -> dict[str, object]:
        """Return plain values."""
        return {
            "port": self.port,
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "random": self.random,
        }


@dataclass(frozen=True, slots=True)
class StepReport:
    """One operator that was run.

    Attributes
    ----------
    dialect, op, label : str
    layout : str
        "NCX" or "NXC".
    arithmetic : str
        What elements are computed in.
    inputs, outputs : tuple of TensorFacts
    seconds : float
        Of one call.
    traffic : int
        Bytes by the convention of :func:`backnorm.cli.measure.traffic`.
    verdicts : mapping of str to Verdict, or None
        By output; None if not checked.
    """

    dialect: str
    op: str
    label: str
    layout: str
    arithmetic: str
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    seconds: float
    traffic: int
    verdicts: Mapping[str, Verdict] | None = None

    @property
    def bandwidth(self) -> float:
        """GB/s."""
        return self.traffic / self.seconds / 1e9 if self.seconds > 0 else 0.0

    @property
    def passed(self) -> bool:
        """Whether no output failed its check."""
        return all(verdict.passed for verdict in (self.verdicts or {}).values())

    @property
    def budget_used(self) -> float | None:
        """Largest error of any checked output as a part of what is allowed there (1: all)."""
        if self.verdicts is None:
            return None
        return max((verdict.worst_excess for verdict in self.verdicts.values()), default=0.0)

    @property
    def worst_ulp(self) -> float | None:
        """Largest error of any checked output, in its ulps."""
        if self.verdicts is None:
            return None
        return max((verdict.worst_ulp for verdict in self.verdicts.values()), default=0.0)

    def to_dict(self) -> dict[str, object]:
        """Return plain values."""
        return {
            "dialect": self.dialect,
            "op": self.op,
            "label": self.label,
            "layout": self.layout,
            "arithmetic": self.arithmetic,
            "inputs": [tensor.to_dict() for tensor in self.inputs],
            "outputs": [tensor.to_dict() for tensor in self.outputs],
            "seconds": self.seconds,
            "gigabytes_per_second": self.bandwidth,
            "worst_ulp": finite(self.worst_ulp),
            "budget_used": finite(self.budget_used),
            "check": None if self.verdicts is None else verdicts_to_dict(self.verdicts),
        }


@dataclass(slots=True)
class RunReport:
    """A whole run."""

    file: str
    threads: int
    repeat: int
    steps: list[StepReport] = field(default_factory=list)
    written: str | None = None

    @property
    def passed(self) -> bool:
        """Whether no step failed its check."""
        return all(step.passed for step in self.steps)

    def to_dict(self) -> dict[str, object]:
        """Return plain values."""
        return {
            "file": self.file,
            "threads": self.threads,
            "repeat": self.repeat,
            "steps": [step.to_dict() for step in self.steps],
            "written": self.written,
            "passed": self.passed,
        }


def verdicts_to_dict(verdicts: Mapping[str, Verdict]) -> dict[str, object]:
    """Return verdicts as plain values."""
    return {
        name: {
            "worst_ulp": finite(verdict.worst_ulp),
            "worst_excess": finite(verdict.worst_excess),
            "passed": verdict.passed,
            "where": list(verdict.where),
            "detail": verdict.detail,
        }
        for name, verdict in verdicts.items()
    }


def finite(value: float | None) -> float | str | None:
    """Return `value` as JSON can hold it: infinity and NaN become strings."""
    return value if value is None or math.isfinite(value) else str(value)
