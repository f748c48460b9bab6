"""Processors without the instructions that this one may have: the same bits, only slower."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

_CODE = """
import hashlib
import ml_dtypes
import numpy as np
import backnorm
rng = np.random.default_rng(0)
digest = hashlib.sha256()
for dtype in (np.float16, ml_dtypes.bfloat16, np.float64):
    x = rng.standard_normal((203, 21)).astype(dtype)
    dy = (rng.standard_normal(x.shape) + x).astype(dtype)
    dy[3, 4] = 1e-7
    statistics = dtype if dtype is np.float64 else np.float32
    wide = x.astype(np.float64)
    mean, variance = wide.mean(0).astype(statistics), wide.var(0).astype(statistics)
    for array in backnorm.batch_norm_backward(x, dy, mean, variance, epsilon=1e-3):
        digest.update(array.tobytes())
print(digest.hexdigest())
"""

# What each generation lacks: nehalem AVX, fused multiply-add and halves; haswell AVX-512.
_PROCESSORS = {
    "nehalem": "+sse4.2,+popcnt",
    "haswell": "+avx,+avx2,+fma,+f16c,+sse4.2,+bmi,+bmi2",
}


def _digest(**environment):
    done = subprocess.run(
        [sys.executable, "-c", _CODE],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86-64 processors")
# Either compiles every kernel anew.
@pytest.mark.parametrize("name", [pytest.param("nehalem", marks=pytest.mark.sweep), "haswell"])
def test_older_processors_compute_the_same_bits(tmp_path, name):
    older = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": _PROCESSORS[name]}
    assert _digest(BACKNORM_CACHE_DIR=str(tmp_path), **older) == _digest()
