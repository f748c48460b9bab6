"""What the options of `python -m benchmarks models` ask for: measured, shown, written."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

import backnorm
from backnorm.cli.progress import progress
from backnorm.files import check_writable
from benchmarks.cells import chosen, words
from benchmarks.environment import write_rows
from benchmarks.model import Environment
from benchmarks.models.cases import BATCHES, LAYOUTS, MODELS, PRECISIONS, VARIANTS, Row, cases
from benchmarks.models.run import SETTINGS, Run, models_table, summary_lines

__all__ = ["ModelsReport", "run_models"]


@dataclass(frozen=True, slots=True)
class ModelsReport:
    """What came of it; `interrupted`: of the first cases."""

    rows: list[Row]
    environment: Environment
    interrupted: bool

    def table(self) -> Table:
        """Return a row for each variant of each case."""
        return models_table(self.rows, self.environment)

    def summary(self) -> list[str]:
        """Return a line for each variant of ours."""
        return summary_lines(self.rows)


def run_models(
    wanted: tuple[str, str, str, str, str], rounds: int, out: Path | None
) -> ModelsReport:
    """Measure these models, layouts, precisions, batches and variants, as typed.

    Raises
    ------
    BacknormError
        For a name that is not known, or a file that cannot be written.
    """
    model, layout, precision, batch, variant = map(words, wanted)
    models = chosen("--model", model, tuple(MODELS))
    layouts = chosen("--layout", layout, LAYOUTS)
    precisions = chosen("--precision", precision, PRECISIONS)
    batches = chosen("--batch", batch, BATCHES)
    variants = chosen("--variant", variant, VARIANTS)
    if out is not None:
        check_writable(out)
    every = list(cases(models, layouts, precisions, batches))
    settings = dataclasses.replace(SETTINGS, rounds=rounds)
    run, interrupted = Run(every, variants, backnorm.get_num_threads(), settings), False
    try:
        with progress(len(every)) as advance:
            run.measure(advance)
    except KeyboardInterrupt:
        interrupted = True
    if out is not None:
        write_rows(list(map(dataclasses.asdict, run.rows)), run.environment(), out)
    return ModelsReport(run.rows, run.environment(), interrupted)
