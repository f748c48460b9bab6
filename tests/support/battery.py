"""The parts of the name of a battery's case."""

from __future__ import annotations

import re

_NAME = re.compile(r"(.+)-(b?float\d+-b?float\d+)-(NCX|NXC)(-in-float\d+)?")


def facets_of(name):
    """Return the kind of trouble, the types, the layout, and the arithmetic if it is not theirs."""
    return _NAME.fullmatch(name).groups()
