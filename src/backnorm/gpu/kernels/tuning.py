"""The configurations of kernels that Triton's autotuner chooses from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import triton

# A loop loads STAGES - 1 tiles ahead of the tile that it computes; 1 means no prefetching. The
# order of a sum depends on tiles and on the number of warps, which follow from the problem, but not
# on STAGES. So the bits of results do not depend on the configuration. For `num_warps`, None stands
# for the number that a launch passes.
CONFIGURATIONS = [triton.Config({"STAGES": stages}, num_warps=None) for stages in (1, 3, 4)]


def tuned(restored: Sequence[str] = ()) -> Callable[[Any], Any]:
    """Return a decorator that lets the autotuner choose a kernel's STAGES.

    The first launch with another KEY, a text that names FORM, times every configuration. The choice
    is kept on disk, in Triton's cache. KEY exists because this cache needs keys that JSON can
    represent, which a tuple of constants is not.

    Parameters
    ----------
    restored : sequence of str
        The arrays that the kernel may both read and write. They are restored between runs.
    """
    return triton.autotune(
        CONFIGURATIONS, key=["KEY"], restore_value=list(restored), cache_results=True
    )
