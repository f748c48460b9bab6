"""`verify --budget` with a number of draws in the place of seconds, for machines of any speed."""

from __future__ import annotations

import itertools
from dataclasses import replace

from backnorm.conformance.verify.run import verify


def verified_with(job, draws):
    """Run a job whose search ends after this many draws."""
    number = itertools.count(1)

    def progress(*_):
        if next(number) > draws:
            raise KeyboardInterrupt

    return verify(replace(job, budget=100.0), progress)
