"""The element types, and functions of them, by the names that tests use."""

from __future__ import annotations

from backnorm.dtypes import (
    BFLOAT16,
    ELEMENT_TYPES,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    is_16_bit,
    rounded,
    statistics_types,
)

__all__ = [
    "BFLOAT16",
    "ELEMENT_TYPES",
    "FLOAT16",
    "FLOAT32",
    "FLOAT64",
    "is_16_bit",
    "rounded",
    "statistics_types",
]
