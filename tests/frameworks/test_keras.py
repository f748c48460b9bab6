"""The checks in `keras/` with each of Keras's backends, each file in a process of its own."""

from __future__ import annotations

import pytest

from . import children


@pytest.mark.timeout(children.LIMIT + 60)
@pytest.mark.parametrize("file", children.files("keras"))
@pytest.mark.parametrize("backend", ["tensorflow", "torch", "jax"])
def test_checks(file, backend):
    children.run("keras", file, backend, KERAS_BACKEND=backend)
