"""The checks in `tensorflow/`, each file in a process of its own."""

from __future__ import annotations

import pytest

from . import children


@pytest.mark.timeout(children.LIMIT + 60)
@pytest.mark.parametrize("file", children.files("tensorflow"))
def test_checks(file):
    children.run("tensorflow", file, "tensorflow")


@pytest.mark.sweep
@pytest.mark.timeout(children.LIMIT + 60)
def test_rare_checks():
    children.run("tensorflow", "check_operands.py", "tensorflow", sweep=True)
