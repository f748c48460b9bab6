"""How numbers and machines read, on every page alike."""

from __future__ import annotations

import math

from backnorm.cli.text import counted

__all__ = [
    "DASH",
    "TIMES",
    "bytes_text",
    "counted",
    "machine_line",
    "milliseconds",
    "percent",
    "power",
    "ratio_text",
    "scientific",
]

#: What stands in a table where there is no number.
DASH = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def machine_line(cpu: str, threads: int, date: str) -> str:
    """Return where and when something ran, for the head of a page; without what is empty.

    Parameters
    ----------
    cpu : str
    threads : int
    date : str
        ISO 8601; only the day is shown.
    """
    return " · ".join(text for text in (cpu, counted(threads, "thread"), date[:10]) if text)


def milliseconds(seconds: float | None) -> str:
    """Return milliseconds in three significant digits; a dash for None."""
    if seconds is None:
        return DASH
    value = seconds * 1e3
    return f"{value:.{min(max(2 - math.floor(math.log10(value)), 0), 5)}f}"


def ratio_text(ratio: float | None) -> str:
    """Return a ratio in two decimals; a dash for None and NaN."""
    return DASH if ratio is None or math.isnan(ratio) else f"{ratio:.2f}"


def percent(share: float | None) -> str:
    """Return a share in whole percents; a dash for None and NaN."""
    return DASH if share is None or math.isnan(share) else f"{share * 100:.0f} %"


def bytes_text(size: float) -> str:
    """Return a size in the largest binary unit that it fills."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"


def power(exponent: int) -> str:
    """Return a power of ten."""
    return f"10{str(exponent).translate(_RAISED)}"


def scientific(value: float) -> str:
    """Return a number in two digits and a power of ten; 0, infinity and NaN as they are."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits, _, exponent = f"{value:.1e}".partition("e")
    return f"{digits}{TIMES}{power(int(exponent))}"
