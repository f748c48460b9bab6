"""How names, numbers and outcomes read, on every page alike."""

from __future__ import annotations

import math
from collections.abc import Iterable

from backnorm.cli.text import counted
from benchmarks.model import Cell, Condition, Environment, Form, GpuFacts, Result, Row

__all__ = [
    "CONDITION_WORDS",
    "DASH",
    "STATUS_MARKS",
    "TIMES",
    "bytes_text",
    "caches_text",
    "condition_note",
    "environment_lines",
    "gpu_lines",
    "label",
    "legend",
    "milliseconds",
    "percent",
    "processor_text",
    "ratio_text",
    "roof",
    "settings_lines",
    "shape_text",
    "speed_text",
    "versions_text",
    "where_text",
]

#: What stands in a table where there is no number.
DASH = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"

#: What stands in a table for an outcome without a time, or beside one that is not right.
STATUS_MARKS = {
    "inaccurate": "‡",
    "missing": "not installed",
    "unsupported": "n/s",
    "crashed": "crashed",
}

#: A condition, for a heading.
CONDITION_WORDS: dict[Condition, str] = {
    "quiet": "calls in a row",
    "after-convolution": "each call right after a convolution",
}

_CONDITION_NOTES: dict[Condition, str] = {
    "quiet": (
        "Condition: quiet. In its turn a contestant is called again and again with nothing "
        "between, so its own threads are awake, and nobody else's are at work."
    ),
    "after-convolution": (
        "Condition: after-convolution. Right before every call that is timed PyTorch computes a "
        "convolution, as it does before most such layers of a network. Its threads are still "
        "awake and look for work when the call begins, and whoever has threads of his own has to "
        "share the processors with them. The time of the convolution itself does not count. A "
        "sample is one call."
    ),
}
_LABELS = {
    "backnorm-float32": "backnorm in float32",
    "torch": "PyTorch",
    "cudnn": "cuDNN",
    "compile": "torch.compile",
    "tensorflow": "TensorFlow",
    "jax": "JAX",
    "onednn": "oneDNN",
    "numpy": "NumPy",
}
_STATUS_WORDS = {
    "inaccurate": "computed and timed, but less exact than a float32 implementation should be",
    "missing": "",
    "unsupported": "does not support this",
    "crashed": "ended its process",
}
_SETTINGS = {
    "rounds": "Turns of each call",
    "samples": "Samples of a turn",
    "warm": "Seconds of calls that do not count, at the beginning of a turn",
    "least": "Seconds of a sample, at the least",
    "limit": "Seconds after which a call gets no further turn",
}
_MOST_DETAILS = 3


def label(contestant: str, form: Form | None = None) -> str:
    """Return a contestant's name, with its form if one is given."""
    name = _LABELS.get(contestant, contestant)
    return name if form is None else f"{name} ({form})"


def shape_text(cell: Cell) -> str:
    """Return the shape as 50 x 64 x 112 x 112 with multiplication signs."""
    return TIMES.join(map(str, cell.shape))


def speed_text(speed: float | None) -> str:
    """Return GB/s in three digits, thousands in full; a dash for None."""
    if speed is None:
        return DASH
    return f"{speed:.3g}" if speed < 999.5 else f"{speed:.0f}"


def processor_text(environment: Environment) -> str:
    """Return the name of a processor, with that of its kind if it is known."""
    kind = environment.microarchitecture
    return f"{environment.cpu} ({kind})" if kind else environment.cpu


def where_text(environment: Environment, between: str = ", ") -> str:
    """Return where and when a benchmark ran: the processor, its threads, the day."""
    threads, day = counted(environment.threads, "thread"), environment.date[:10]
    return between.join(text for text in (processor_text(environment), threads, day) if text)


def versions_text(environment: Environment) -> str:
    """Return the packages that took part, with their versions."""
    return ", ".join(f"{name} {version}" for name, version in environment.versions.items())


def caches_text(environment: Environment) -> str:
    """Return the sizes of the caches."""
    sizes = environment.cache_per_core, environment.cache_shared
    per_core, shared = map(bytes_text, sizes)
    return f"{per_core} a core, {shared} shared"


def environment_lines(environment: Environment) -> list[tuple[str, str]]:
    """Return names and values of where a benchmark ran."""
    return [
        ("Processor", processor_text(environment)),
        ("Processors, threads used", f"{environment.processors}, {environment.threads}"),
        ("Cache", caches_text(environment)),
        ("System", environment.system),
        ("Python", environment.python),
        ("Versions", versions_text(environment)),
        ("Date", environment.date),
    ]


def gpu_lines(gpu: GpuFacts | None) -> list[tuple[str, str]]:
    """Return names and values of a run's GPU; none without one."""
    if gpu is None:
        return []
    versions = f"{gpu.driver or 'not known'}, {gpu.cuda}"
    clocks = ", ".join(
        f"{clock} MHz" if clock else "not known" for clock in (gpu.clock, gpu.memory_clock)
    )
    return [
        ("GPU", f"{gpu.name}, capability {gpu.capability}"),
        ("Multiprocessors", str(gpu.multiprocessors)),
        ("Memory, L2", f"{bytes_text(gpu.memory)}, {bytes_text(gpu.cache)}"),
        ("Driver, CUDA", versions),
        ("Highest clocks, memory", clocks),
        ("Bandwidth of copying", f"{speed_text(gpu.bandwidth / 1e9)} GB/s, measured"),
    ]


def condition_note(result: Result) -> str:
    """Return what came before the calls that were timed; "" for a GPU, whose notes tell it."""
    return "" if result.gpu else _CONDITION_NOTES[result.condition]


def roof(result: Result) -> str:
    """Return what the roof of a plot of speeds is, and what a mark above it means."""
    if result.gpu is None:
        return (
            "The roof is the measured speed of moving the same memory and nothing else. Marks "
            "above it save passes by way of the caches"
        )
    return (
        "The roof is the floor: what must be moved whatever the order of work, at the measured "
        "bandwidth of copying. All speeds count the same passes"
    )


def settings_lines(result: Result) -> list[tuple[str, str]]:
    """Return names and values of how a benchmark was run."""
    return [
        (_SETTINGS.get(name, name.replace("_", " ")), str(value))
        for name, value in result.settings.items()
    ]


def legend(rows: Iterable[Row]) -> list[str]:
    """Return a line for every contestant and status other than "ok", with the first reasons."""
    cells: dict[tuple[str, str], int] = {}
    details: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        for outcome in row.outcomes:
            if outcome.status == "ok":
                continue
            key = (outcome.contestant, outcome.status)
            cells[key] = cells.get(key, 0) + 1
            if outcome.detail:
                details.setdefault(key, {})[outcome.detail] = None
    lines = []
    for (contestant, status), count in cells.items():
        reasons = list(details.get((contestant, status), {}))
        more = [f"and {len(reasons) - _MOST_DETAILS} more"] if len(reasons) > _MOST_DETAILS else []
        told = "; ".join([*reasons[:_MOST_DETAILS], *more])
        lines.append(
            f"{STATUS_MARKS[status]}: {f'{label(contestant)} {_STATUS_WORDS[status]}'.strip()} "
            f"({count} time{'s' if count > 1 else ''}{': ' + told if told else ''})"
        )
    return lines


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
