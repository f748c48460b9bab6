"""The settings of hypothesis are the same wherever the tests run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import tests.conftest
from hypothesis import settings
print(settings.default, settings.get_current_profile_name())
"""


@pytest.fixture
def settings_in():
    """Return hypothesis's settings in a new process of the tests, as text."""

    def run(environment):
        own = {name: value for name, value in os.environ.items() if name != "CI"}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], cwd=Path(__file__).parents[1], env=own | environment,
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout

    return run


def test_settings_with_ci_in_environment_are_those_without(settings_in):
    alone = settings_in({})
    assert "deadline=None" in alone
    assert "derandomize=True" in alone
    assert settings_in({"CI": "true"}) == alone
