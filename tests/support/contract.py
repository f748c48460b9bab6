"""A warm call, then a hostile operand or option: what the front doors' scripts and tests share.

A script prints a line for each case that it begins and for each outcome, so that after a crash the
last line names the case (`run_cases` in `tests/conftest.py` reads them). There are tens of
thousands of cases: with the argument `sample`, as in `make test`, a script calls a share of them,
drawn by a seed.
"""

from __future__ import annotations

import json
import random
import sys
import zlib
from collections.abc import Iterable, Iterator
from typing import TypeVar

__all__ = ["begin", "report", "sampled", "share_of"]

Case = TypeVar("Case")

SHARE = 0.04


def begin(case: str) -> None:
    """Print the name of a case before its calls."""
    print(json.dumps({"begins": case}), flush=True)


def report(case: str, outcomes: Iterable[str]) -> None:
    """Print the outcomes of a case, each once."""
    print(json.dumps({"case": case, "found": sorted(set(outcomes))}))


def share_of(arguments: list[str] | None = None) -> float:
    """Return the share of cases that the arguments of a script ask for."""
    return SHARE if "sample" in (sys.argv[1:] if arguments is None else arguments) else 1.0


def sampled(cases: Iterable[Case], share: float, name: str) -> Iterator[Case]:
    """Yield a share of the cases, drawn by a seed that is made of a name."""
    rng = random.Random(zlib.crc32(name.encode()))
    return (case for case in cases if share == 1.0 or rng.random() < share)
