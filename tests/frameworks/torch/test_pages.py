"""The code on the pages about PyTorch runs, and prints what they say."""

from __future__ import annotations

import pytest

from ...support.pages import pages_of, run


@pytest.mark.parametrize("page", pages_of("torch"))
def test_page_code_runs(page):
    run(page)
