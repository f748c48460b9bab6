"""The README's code for keras runs."""

from __future__ import annotations


def test_the_code_of_the_readme_runs(run_readme):
    names = run_readme("backnorm.keras")
    x = names["x"]
    assert names["BatchNormalization"]()(x, training=True).shape == x.shape
