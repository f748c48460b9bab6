"""The one set of Numba options.

Nothing here compiles: `backnorm.cpu.build` does, when the package is built; the tests of vectors
have Numba compile what they call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

__all__ = ["inlined", "outlined"]

# What is called from Python (in tests alone) has functions of its own around it.
_OPTIONS = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}


def inlined(function: Callable[..., Any]) -> Any:
    """Compile `function` as a part of the kernels that call it."""
    return numba.njit(forceinline=True, no_cpython_wrapper=True, **_OPTIONS)(function)


def outlined(function: Callable[..., Any]) -> Any:
    """Compile `function` as a kernel, or as a call for the kernels to make."""
    return numba.njit(no_cpython_wrapper=True, **_OPTIONS)(function)
