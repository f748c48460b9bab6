"""A plug-in of pytest: ``pytest --backnorm mykernel:backward`` runs the cases of backnorm verify.

It imports nothing of the package unless the option is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

__all__ = ["pytest_addoption", "pytest_collection_modifyitems"]


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
    subject = config.getoption("--backnorm")
    if subject is None:
        return
    from backnorm.conformance.judge import GRADIENTS
    from backnorm.conformance.ladder import RUNGS
    from backnorm.conformance.verify.cases import DTYPES, Selection, check_names, selected
    from backnorm.conformance.verify.run import Job
    from backnorm.errors import BacknormError

    dtypes = tuple(config.getoption("--backnorm-dtypes").split(","))
    try:
        check_names("--backnorm-dtypes", dtypes, DTYPES)
        check_names("--backnorm-at-least", [config.getoption("--backnorm-at-least")], RUNGS)
    except BacknormError as error:
        raise pytest.UsageError(str(error)) from None
    selection = Selection(config.getoption("--backnorm-tier"), dtypes)
    job = Job(subject, selection, config.getoption("--backnorm-dialect"))
    shared = _Run(job, config)
    for case in selected(selection):
        for output in GRADIENTS:
            name = f"backnorm::{case.name}::{output}"
            items.append(_Item.from_parent(session, name=name, run=shared, key=(case.name, output)))


class _Run:
    """One run of `verify` on all cases, which all tests share. The first test starts it."""

    def __init__(self, job: Any, config: pytest.Config) -> None:
        self._job, self._config = job, config
        self._verdicts: dict[tuple[str, str], Any] | None = None
        self.is_judged = False
        self.findings: list[Any] = []

    def verdict(self, key: tuple[str, str]) -> Any:
        """Return the verdict on an output of a case."""
        if self._verdicts is None:
            from backnorm.conformance.verify._report import as_json
            from backnorm.conformance.verify.findings import findings
            from backnorm.conformance.verify.run import verify
            from backnorm.errors import BacknormError

            try:
                results = verify(self._job)
            except BacknormError as error:
                pytest.exit(f"--backnorm: {error}", pytest.ExitCode.USAGE_ERROR)
            self._verdicts = {(v.case, v.output): v for v in results.verdicts}
            self.is_judged = any(v.is_judged for v in results.verdicts)
            at_least = self._config.getoption("--backnorm-at-least")
            self.findings = findings(results, at_least)
            report = self._config.getoption("--backnorm-report")
            if report is not None:
                Path(report).write_text(as_json(results, self.findings, at_least))
        return self._verdicts.get(key)


class _Item(pytest.Item):
    """A test, which judges one output in one case."""

    def __init__(self, *, run: _Run, key: tuple[str, str], **named: Any) -> None:
        super().__init__(**named)
        self._run, self._key = run, key

    def runtest(self) -> None:
        """Fail if the output is worse than the rung of ``--backnorm-at-least``."""
        from backnorm.conformance.ladder import is_at_least
        from backnorm.conformance.verify.findings import sentence

        verdict = self._run.verdict(self._key)
        if verdict is None:
            pytest.skip("not run")
        if not self._run.is_judged:
            raise AssertionError(f"nothing is judged: {verdict.text}")
        if not verdict.is_judged:
            pytest.skip(verdict.text)
        at_least = self.config.getoption("--backnorm-at-least")
        if not is_at_least(verdict.status, at_least):
            text = sentence(verdict, self._run.findings)
            if verdict.grade is not None:
                text += f"; error {verdict.grade.ulp:.4g} ulp at {verdict.grade.where}"
            raise AssertionError(f"{self._key[1]} is {verdict.status}: {text}")

    def repr_failure(self, excinfo: Any, style: Any = None) -> str:
        """Return the message without a traceback."""
        return str(excinfo.value)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Return the path of the test, None (the test has no line in a file), and its name."""
        return self.path, None, self.name
