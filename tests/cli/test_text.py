"""How numbers of things read."""

from __future__ import annotations

import pytest

from backnorm.cli.text import counted


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 threads"), (1, "1 thread"), (2, "2 threads"), (21, "21 threads")]
)
def test_one_thing_is_singular(number, text):
    assert counted(number, "thread") == text
