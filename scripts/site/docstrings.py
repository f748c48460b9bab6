"""Extend griffe, which reads the sources for the reference: docstrings are reStructuredText, and
pages are Markdown.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["Docstrings"]

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):(?=`)")
# Two colons before an indented block: on a line of their own, or behind text.
_ALONE = re.compile(r"^[ \t]*::[ \t]*\n", re.MULTILINE)
_BEHIND = re.compile(r"::[ \t]*$", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Writes docstrings as Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Write the docstring of an object."""
        if obj.docstring:
            obj.docstring.value = _markdown(obj.docstring.value)


def _markdown(text: str) -> str:
    return _BEHIND.sub(":", _ALONE.sub("", _ROLE.sub("", text)))
