"""Libraries that only an extra of the package brings, imported where they are needed."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from backnorm.errors import BacknormError

__all__ = ["needs"]


def needs(module: str, purpose: str, extra: str = "bench") -> Any:
    """Import and return a module that the extra `extra` of this package brings.

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
            f"which is not installed: pip install 'backnorm[{extra}]'"
        ) from error
    return imported
