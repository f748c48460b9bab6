"""The checks in `jax/`, each file in a process of its own."""

from __future__ import annotations

import pytest

from . import children


@pytest.mark.timeout(children.LIMIT + 60)
@pytest.mark.parametrize("file", children.files("jax"))
def test_checks(file):
    children.run("jax", file, "jax")


@pytest.mark.sweep
@pytest.mark.timeout(children.LIMIT + 60)
@pytest.mark.parametrize("file", children.files("jax"))
def test_rare_checks(file):
    children.run("jax", file, "jax", sweep=True)
