"""Packages and programs that some tests need; without these, the tests are skipped, or fail."""

from __future__ import annotations

import os

import pytest

#: Whether a missing one is a failure. The Makefile sets this once it has installed all of them.
ALL = os.environ.get("BACKNORM_REQUIRE_PEERS") == "1"


def require(found, what):
    """Go on if it is there; without it skip the test, or fail it."""
    if found:
        return
    message = f"not installed: {what}"
    if ALL:
        pytest.fail(message)
    pytest.skip(message)
