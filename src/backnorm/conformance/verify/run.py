"""Run a subject on cases, in processes that may crash, and judge the outputs of each case."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from backnorm.conformance.battery import Case, Recipe
from backnorm.conformance.diagnosis import Diagnosis
from backnorm.conformance.verify._events import Outcome
from backnorm.conformance.verify._process import outcomes_of_worker
from backnorm.conformance.verify.cases import has_case, of_operation, recipes, variants_to_draw
from backnorm.conformance.verify.conditions import Facts
from backnorm.conformance.verify.draws import is_drawn, search
from backnorm.conformance.verify.job import Job
from backnorm.conformance.verify.operations import OPERATIONS, Operation, varied
from backnorm.conformance.verify.verdicts import Judgement, Verdict, judged, with_stale_outputs
from backnorm.errors import ArgumentValueError

__all__ = ["Results", "verify"]

Progress = Callable[[int, int], None]

# After the budget is over, a drawn case may run for this many seconds.
_OVERTIME = 3.0
# A worker has the names of this many cases, so that it need not wait until a case is judged.
_AHEAD = 16
# At most this many cases that are no diagnostic cases are diagnosed.
_HINTS = 6
# If the subject crashes or hangs on this many cases in a row, the remaining cases are not run.
_MOST_ENDS = 8


@dataclass(slots=True)
class Results:
    """The results of a run.

    Attributes
    ----------
    job : Job
    verdicts : list of Verdict
    recipes : dict
        The recipes of the cases by name.
    diagnoses : dict
        The mistakes that outputs show, by case: those of diagnostic cases, and of the first case
        with wrong outputs in each group in which no diagnostic case shows any.
    facts : dict
        The facts of the cases that were judged, except drawn ones.
    unchanged : set
        The cases and outputs whose bits were wrongly equal for another input.
    seconds : float
    interrupted : bool
    """

    job: Job
    verdicts: list[Verdict] = field(default_factory=list)
    recipes: dict[str, Recipe] = field(default_factory=dict)
    diagnoses: dict[str, Diagnosis] = field(default_factory=dict)
    facts: dict[str, Facts] = field(default_factory=dict)
    unchanged: set[tuple[str, str]] = field(default_factory=set)
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def operation(self) -> Operation:
        """The operation that the run judges, with the results that the subject can have."""
        operation, schema = OPERATIONS[self.job.selection.operation], self.job.schema
        roles = () if schema is None else schema.results
        more = tuple(name for name in operation.more if name in roles)
        return replace(operation, results=operation.results + more)

    def _needs_hint(self, recipe: Recipe) -> bool:
        """Whether a case is diagnosed because no case like it was."""
        hints = [name for name in self.diagnoses if not is_diagnostic(name)]
        known = {group_of(self.recipes[name]) for name in self.diagnoses}
        return len(hints) < _HINTS and group_of(recipe) not in known

    def add(self, outcome: Outcome, case: Case | None = None) -> None:
        """Judge the outcome of a case. The case is drawn, unless it is passed."""
        recipe = self.recipes[outcome.case]
        self.keep(recipe, self.judgement(outcome, recipe, case))

    def judgement(self, outcome: Outcome, recipe: Recipe, case: Case | None = None) -> Judgement:
        """Return the judgement of the outcome of a recipe's case."""
        if outcome.fault is not None:
            types = str(recipe.variant.dtype), recipe.variant.data_format
            verdicts = [
                Verdict(recipe.name, output, *types, outcome.fault, outcome.text)
                for output in self.operation.results
            ]
            return Judgement(verdicts, None, ())
        job = self.job
        drawn = case or recipe.case(job.selection.seed)
        case = case or job.received(drawn, outcome.options)
        if not is_drawn(recipe.name):
            self.facts[recipe.name] = Facts.of(case, recipe.purpose)
        return judged(
            case,
            outcome,
            any_order=job.any_order,
            is_diagnosed=is_diagnostic(recipe.name)
            or is_drawn(recipe.name)
            or self._needs_hint(recipe),
            varied=lambda _, name: job.received(varied(drawn, name), outcome.options),
        )

    def keep(self, recipe: Recipe, found: Judgement) -> None:
        """Add the judgement of a recipe's case to the results."""
        self.recipes[recipe.name] = recipe
        self.verdicts += found.verdicts
        self.unchanged |= {(recipe.name, output) for output in found.unchanged}
        if found.diagnosis is not None:
            self.diagnoses[recipe.name] = found.diagnosis


def group_of(recipe: Recipe) -> tuple[str, str, bool]:
    """Return a case's element type, its layout, and whether it is a case of training. If two cases
    agree in all three, the diagnosis of one case also explains errors of the other.
    """
    return str(recipe.variant.dtype), recipe.variant.data_format, recipe.training


def is_diagnostic(case: str) -> bool:
    """Whether a case of this name has data that distinguish mistakes."""
    return case.startswith("diagnostic-")


def verify(job: Job, progress: Progress | None = None) -> Results:
    """Run a job and return its results.

    Parameters
    ----------
    job : Job
    progress : callable, optional
        Called with the number of finished cases and the number of all cases; while cases are drawn,
        with the seconds since the first and the seconds of the budget.

    Raises
    ------
    ArgumentError
        If the subject cannot be imported, there is no such dialect or operator, no case is
        selected, or a huge one for a subject that does not take it.
    """
    chosen = job.selection
    if chosen.huge and (job.command or chosen.operation not in ("backward", "forward")):
        raise ArgumentValueError(
            "--huge", "must be used with a function of the operation backward or forward",
            came="a command" if job.command else chosen.operation,
        )  # fmt: skip
    results = Results(job, recipes={recipe.name: recipe for recipe in recipes(job.selection)})
    if not results.recipes and not job.budget:
        raise ArgumentValueError(
            "--only", "no case is selected", came=job.selection.only,
            accepted="globs such as 'realistic*'", hint="backnorm cases list prints the names",
        )  # fmt: skip
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="backnorm-verify-") as folder:
        try:
            outcomes = _outcomes(job, list(results.recipes), Path(folder))
            for done, outcome in enumerate(outcomes, 1):
                results.add(outcome)
                if progress is not None:
                    progress(done, len(results.recipes))
            if job.budget:
                _Draws(results, Path(folder)).run(progress)
        except KeyboardInterrupt:
            results.interrupted = True
    results.verdicts = with_stale_outputs(results.verdicts, results.unchanged)
    results.seconds = time.perf_counter() - started
    return results


def _outcomes(job: Job, names: Sequence[str], folder: Path) -> Iterator[Outcome]:
    """Yield the outcome of each case. If a worker ends, another one runs the remaining cases."""
    waiting, ends, text = list(names), 0, "the process ended before this case"
    while waiting and ends < _MOST_ENDS:
        number = len(waiting)
        for outcome in outcomes_of_worker(job, iter(tuple(waiting)), folder, ahead=_AHEAD):
            waiting.remove(outcome.case)
            yield outcome
            ends = ends + 1 if outcome.fault in ("crash", "hang") else 0
            # If the subject is a command, each call of it is a separate process, and a crash of
            # that process does not end the worker. So several calls can crash or hang in one
            # worker.
            if ends == _MOST_ENDS:
                text = f"the subject ended {ends} processes in a row"
                break
        if len(waiting) == number:
            break
    if len(waiting) == len(names) and job.memory:
        raise ArgumentValueError(
            "--memory", "must suffice for Python and a case", came=f"{job.memory} MiB"
        )
    for name in waiting:
        yield Outcome(name, "not_run", text)


@dataclass(slots=True)
class _Draws:
    """Random cases, which a subject runs one after the other.

    Attributes
    ----------
    results : Results
    folder : Path
    known : set
        The outputs and statuses that have a finding already. Cases that show nothing else are not
        searched further, and not reported.
    """

    results: Results
    folder: Path
    known: set[tuple[str, str]] = field(default_factory=set)
    _found: dict[str, Judgement] = field(default_factory=dict)
    _outcomes: Generator[Outcome] | None = None
    _name: str = ""
    _started: float = field(default_factory=time.monotonic)
    _progress: Progress | None = None

    def run(self, progress: Progress | None) -> None:
        """Search for failing cases until the time is over; keep the smallest of each search."""
        self._progress = progress
        self.known |= _failures(*self.results.verdicts)
        try:
            self._search()
        finally:
            if self._outcomes is not None:
                self._outcomes.close()

    def _search(self) -> None:
        results, selection = self.results, self.results.job.selection
        deadline, seed = self._started + results.job.budget, selection.seed
        while time.monotonic() < deadline:
            recipe = search(
                self._fails,
                variants_to_draw(selection),
                selection.operation,
                deadline=deadline,
                seed=seed,
                folder=self.folder,
            )
            if recipe is None:
                return
            results.keep(recipe, self._found[recipe.name])
            self.known |= _failures(*self._found[recipe.name].verdicts)
            seed += 1

    def _fails(self, recipe: Recipe) -> bool:
        """Whether a case has a failure that is not known."""
        selection, name = self.results.job.selection, recipe.name
        if self._progress is not None:
            self._progress(int(time.monotonic() - self._started), int(self.results.job.budget))
        if selection.skips(name) or not has_case(recipe, selection.operation):
            return False
        if name not in self._found:
            recipe = of_operation(recipe, selection.operation)
            found = self.results.judgement(self._outcome(name), recipe)
            self._found[name] = found
            if not _failures(*found.verdicts):
                self.results.keep(recipe, found)
        return not _failures(*self._found[name].verdicts) <= self.known

    def _outcome(self, name: str) -> Outcome:
        """Return the outcome of a case, from the worker of the case before unless it has ended."""
        self._name, job = name, self.results.job
        outcome = None if self._outcomes is None else next(self._outcomes, None)
        if outcome is None:
            names = iter(lambda: self._name, "")
            self._outcomes = outcomes_of_worker(
                job, names, self.folder, deadline=self._started + job.budget + _OVERTIME
            )
            outcome = next(self._outcomes, None)
        return outcome or Outcome(name, "not_run", "the process ended before this case")


def _failures(*verdicts: Verdict) -> set[tuple[str, str]]:
    """Return output and status of the verdicts that have failed."""
    return {(verdict.output, verdict.status) for verdict in verdicts if not verdict.passed}
