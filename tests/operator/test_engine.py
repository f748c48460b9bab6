"""The fixture `engine`, by which the tests of this folder run with each engine."""

from __future__ import annotations

import numpy as np

import backnorm


def test_engine_of_parameter_plans_the_calls_of_a_test(engine):
    x = np.ones((4, 3, 2), np.float32)
    plan = backnorm.explain(x, x, x[0, :, 0], x[0, :, 0], epsilon=1e-5)
    package = {"numpy": "backnorm.numpy_engine", "kernels": "backnorm_kernels"}[engine]
    assert type(plan).__module__.startswith(package + ".")
