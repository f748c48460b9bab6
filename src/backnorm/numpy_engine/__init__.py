"""The engine that computes with NumPy alone: it needs no compiler, and uses one thread.

`stages` has the formulas, `sums` adds up the terms of channels, and `memory` reads and writes
blocks of arrays. All elements are computed in float64. Sums of float64 elements are compensated, so
the results are within the same bounds (`backnorm.conformance.judge.budget`) as those of the
kernels.
"""

from backnorm.numpy_engine.stages import planned

__all__ = ["planned"]
