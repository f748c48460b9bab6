from __future__ import annotations

import pytest

from . import synthetic


@pytest.fixture(scope="session")
def result():
    return synthetic.result()
