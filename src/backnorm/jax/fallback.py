"""The warning where `jax.numpy` code runs because kernels cannot be called."""

from __future__ import annotations

import functools
import warnings

__all__ = ["warn_of_formulas"]


@functools.cache
def warn_of_formulas(problem: str, reason: str) -> None:
    """Warn, once in a process, that formulas run; `problem` is what backnorm cannot do."""
    warnings.warn(
        f"backnorm cannot {problem} and runs jax.numpy code: {reason}", RuntimeWarning, stacklevel=3
    )
