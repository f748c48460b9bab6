"""The process of one variant of `models`: ``python -m benchmarks.models.worker DESCRIPTOR``."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence

from backnorm.steps import Judgement, judge
from benchmarks.child import serve_parent
from benchmarks.models import steps
from benchmarks.models.cases import Case

__all__ = ["Work"]


class Work:
    """A trainer; the parent calls these methods."""

    def start(self, threads: int, case: Case) -> dict[str, str]:
        """Make the model of a case; return the versions of its framework."""
        module = importlib.import_module(case.framework.module)
        versions: dict[str, str] = module.start(threads)
        self._trainer: steps.Trainer = module.Trainer(case)
        return versions

    def judge(self, variants: Sequence[str]) -> dict[str, Judgement]:
        """Judge variants: see `backnorm.steps.judge`."""
        return judge(self._trainer, variants)

    def begin(self, variant: str) -> int:
        """Make the first steps of a variant, until no step takes new memory.

        Returns
        -------
        int
            Bytes by which resident memory grew in the first three steps.
        """
        self._step = self._trainer.step(variant)
        grown = steps.growth(self._step)
        steps.reserve(self._step, grown)
        return grown

    def step(self) -> float:
        """Return the seconds of a step."""
        start = time.perf_counter()
        self._step()
        return time.perf_counter() - start

    def normalization(self) -> float | None:
        """Return the seconds of a step in normalisation, activations and additions, if known."""
        return self._step.normalization()


if __name__ == "__main__":
    serve_parent(Work())
