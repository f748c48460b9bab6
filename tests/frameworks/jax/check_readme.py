"""The README's code for jax runs."""

from __future__ import annotations

import numpy as np


def test_the_code_of_the_readme_runs(run_readme):
    names = run_readme("backnorm.jax")
    x = names["x"]
    np.testing.assert_allclose(names["mean"], x.mean((0, 1)), atol=1e-6)
    np.testing.assert_allclose(names["variance"], x.var((0, 1)), atol=1e-6)
