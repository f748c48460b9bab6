"""Libraries that only a dependency group brings, imported where they are needed."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from backnorm.errors import BacknormError

__all__ = ["needs"]


def needs(module: str, purpose: str, install: str = "--group bench") -> Any:
    """Import and return a module that pip brings if told to install `install`.

    Raises
    ------
    BacknormError
        If it is not installed; says how to install it.
    """
    try:
        imported: ModuleType = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise BacknormError(
            f"{purpose} need{'' if purpose.endswith('s') else 's'} {error.name}, "
            f"which is not installed: pip install {install}"
        ) from error
    return imported
