"""A plug-in of pytest: ``pytest --backnorm mykernel:backward`` runs the cases of backnorm verify.

It imports nothing of the package unless the option is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

__all__ = ["pytest_addoption", "pytest_collection_modifyitems", "pytest_configure_node"]

#: By the name of a test: "passed", "failed" or "skipped", and the reason.
Outcomes = dict[str, tuple[str, str]]
_OUTCOMES = pytest.StashKey[Outcomes]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("backnorm", "batch normalisation's backward pass")
    group.addoption(
        "--backnorm", metavar="SUBJECT", help="judge module:function, see backnorm verify"
    )
    group.addoption(
        "--backnorm-dialect", metavar="DIALECT", help="the dialect whose arguments it has"
    )
    group.addoption("--backnorm-tier", default="smoke", choices=["smoke", "full"])
    group.addoption("--backnorm-dtypes", default="float32,bfloat16,float16")
    group.addoption("--backnorm-at-least", default="serial", metavar="RUNG")
    group.addoption("--backnorm-report", metavar="FILE", help="write the verdicts as JSON")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add a test for each output of each case."""
    if config.getoption("--backnorm") is None:
        return
    from backnorm.conformance.judge import GRADIENTS
    from backnorm.conformance.verify.cases import selected

    items += [
        _Item.from_parent(session, name=f"backnorm::{case.name}::{output}")
        for case in selected(_selection(config))
        for output in GRADIENTS
    ]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give the outcomes to a worker of pytest-xdist, so that only its controller runs the cases."""
    if node.config.getoption("--backnorm") is not None:
        node.workerinput["backnorm"] = _outcomes(node.config)


def _selection(config: pytest.Config) -> Any:
    from backnorm.conformance.ladder import RUNGS
    from backnorm.conformance.verify.cases import DTYPES, Selection, check_names
    from backnorm.errors import BacknormError

    dtypes = tuple(config.getoption("--backnorm-dtypes").split(","))
    try:
        check_names("--backnorm-dtypes", dtypes, DTYPES)
        check_names("--backnorm-at-least", [config.getoption("--backnorm-at-least")], RUNGS)
    except BacknormError as error:
        raise pytest.UsageError(str(error)) from None
    return Selection(config.getoption("--backnorm-tier"), dtypes)


def _outcomes(config: pytest.Config) -> Outcomes:
    """Return the outcomes of a run on all cases. The first call runs the cases, except in a worker
    of pytest-xdist, which gets the outcomes from its controller.
    """
    if hasattr(config, "workerinput"):
        return dict(config.workerinput["backnorm"])
    if _OUTCOMES not in config.stash:
        config.stash[_OUTCOMES] = _judged(config)
    return config.stash[_OUTCOMES]


def _judged(config: pytest.Config) -> Outcomes:
    """Run all cases, write the report, and return the outcomes."""
    from backnorm.conformance.ladder import is_at_least
    from backnorm.conformance.verify._report import as_json
    from backnorm.conformance.verify.findings import findings, sentence
    from backnorm.conformance.verify.run import Job, verify
    from backnorm.errors import BacknormError

    job = Job(
        config.getoption("--backnorm"), _selection(config), config.getoption("--backnorm-dialect")
    )
    at_least = config.getoption("--backnorm-at-least")
    try:
        results = verify(job)
    except BacknormError as error:
        pytest.exit(f"--backnorm: {error}", pytest.ExitCode.USAGE_ERROR)
    found = findings(results, at_least)
    report = config.getoption("--backnorm-report")
    if report is not None:
        Path(report).write_text(as_json(results, found, at_least))
    is_judged = any(verdict.is_judged for verdict in results.verdicts)
    outcomes = {}
    for verdict in results.verdicts:
        outcome = "failed", f"nothing is judged: {verdict.text}"
        if is_judged and not verdict.is_judged:
            outcome = "skipped", verdict.text
        elif is_at_least(verdict.status, at_least):
            outcome = "passed", ""
        elif is_judged:
            text = sentence(verdict, found)
            if verdict.grade is not None:
                text += f"; error {verdict.grade.ulp:.4g} ulp at {verdict.grade.where}"
            outcome = "failed", f"{verdict.output} is {verdict.status}: {text}"
        outcomes[f"backnorm::{verdict.case}::{verdict.output}"] = outcome
    return outcomes


class _Item(pytest.Item):
    """A test, which judges one output in one case."""

    def runtest(self) -> None:
        """Fail if the output is worse than the rung of ``--backnorm-at-least``."""
        outcome, text = _outcomes(self.config).get(self.name, ("skipped", "not run"))
        if outcome == "skipped":
            pytest.skip(text)
        if outcome == "failed":
            raise AssertionError(text)

    def repr_failure(self, excinfo: Any, style: Any = None) -> str:
        """Return the message without a traceback."""
        return str(excinfo.value)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Return the path of the test, None (the test has no line in a file), and its name."""
        return self.path, None, self.name
