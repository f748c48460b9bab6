"""Levels below that of this processor give the same bits.

`test_bits` has every operation; here is a little of what differs most.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from backnorm_kernels import library

_CODE = """
import hashlib
import sys
import numpy as np
import backnorm
rng = np.random.default_rng(0)
dtype = np.dtype(sys.argv[1])
x = rng.standard_normal((203, 21)).astype(dtype)
dy = (rng.standard_normal(x.shape) + x).astype(dtype)
dy[3, 4] = 1e-7
wide = x.astype(np.float64)
mean, variance = wide.mean(0).astype(np.float32), wide.var(0).astype(np.float32)
digest = hashlib.sha256()
for array in backnorm.batch_norm_backward(x, dy, mean, variance, epsilon=1e-3):
    digest.update(array.tobytes())
print(digest.hexdigest())
"""

# What each level lacks, and element types and arithmetics for which that matters.
_LEVELS = [
    # AVX-512
    ("x86-64-v3", "float32", "float64"),
    ("x86-64-v3", "float32", "float32"),
    # AVX, fused multiply-add and conversions of halves
    ("x86-64", "float16", "float32"),
    ("x86-64", "float32", "float32"),
]


def _digest(dtype, **environment):
    done = subprocess.run(
        [sys.executable, "-c", _CODE, dtype],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.long
@pytest.mark.parametrize(("level", "dtype", "arithmetic"), _LEVELS)
def test_backward_at_lower_cpu_level_has_the_same_bits(level, dtype, arithmetic):
    if level not in library.supported()[1:]:
        pytest.skip("not a level below that of this processor")
    options = {"BACKNORM_ARITHMETIC": arithmetic}
    assert _digest(dtype, BACKNORM_CPU_LEVEL=level, **options) == _digest(dtype, **options)
