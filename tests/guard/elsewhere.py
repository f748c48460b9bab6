"""Modules of other folders of the tests."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["module_of"]

# Scripts of this folder run by themselves; modules of others import `tests.support`.
sys.path.append(str(Path(__file__).parents[2]))


@functools.cache
def module_of(path: str) -> ModuleType:
    """Return the module in a file of the tests."""
    file = Path(__file__).parent.parent / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
