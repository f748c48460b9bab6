"""Report the processor time of a run of pytest: seconds per folder and the twenty slowest tests.

The time of a test is that of its process, with all threads, and of the children that ended during
the test; a fixture counts towards the test that sets it up. `BACKNORM_TEST_TIMES` names a file to
which each run adds a line; `python -m tests.support.processor_time FILE` reports their sum.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

SLOWEST = 20
_PROPERTY = "processor seconds"


def _seconds():
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


class ProcessorTime:
    """A plugin for pytest, with and without workers."""

    def __init__(self, config):
        self.worker_output = getattr(config, "workeroutput", None)
        self.begin = time.monotonic()
        self.last = 0.0
        self.tests = defaultdict(float)
        self.of_workers = 0.0

    def pytest_collection_finish(self):
        self.last = _seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item):
        """Add to a report the time since the report before it."""
        report = yield
        now = _seconds()
        report.user_properties = [(_PROPERTY, now - self.last)]
        self.last = now
        return report

    def pytest_runtest_logreport(self, report):
        self.tests[report.nodeid] += dict(report.user_properties).get(_PROPERTY, 0.0)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.of_workers += getattr(node, "workeroutput", {}).get(_PROPERTY, 0.0)

    def pytest_sessionfinish(self):
        if self.worker_output is not None:
            self.worker_output[_PROPERTY] = _seconds()

    def pytest_terminal_summary(self, terminalreporter):
        if self.worker_output is not None:
            return
        # Workers are children, too, and some have not ended yet.
        seconds = time.process_time() + self.of_workers if self.of_workers else _seconds()
        run = {
            "seconds": seconds,
            "wall": time.monotonic() - self.begin,
            "tests": dict(self.tests),
        }
        file = os.environ.get("BACKNORM_TEST_TIMES")
        if file:
            with Path(file).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(run) + "\n")
        terminalreporter.section("processor time")
        terminalreporter.write_line(report([run]))


def report(runs):
    """Return the tables of one or several runs as text."""
    tests = [(seconds, test) for run in runs for test, seconds in run["tests"].items()]
    folders = defaultdict(lambda: [0.0, 0])
    for seconds, test in tests:
        folder = folders[_folder(test)]
        folder[0] += seconds
        folder[1] += 1
    total = sum(run["seconds"] for run in runs)
    rest = total - sum(seconds for seconds, _ in tests)
    lines = ["seconds  tests  folder"]
    lines += [
        f"{seconds:7.1f} {count:6}  {folder}"
        for folder, (seconds, count) in sorted(folders.items(), key=lambda row: -row[1][0])
    ]
    lines += [f"{rest:7.1f}         start and collection of {len(runs)} runs"]
    wall = sum(run["wall"] for run in runs)
    lines += [f"{total:7.1f} {len(tests):6}  in all, {wall:.0f} by the clock"]
    lines += ["", f"seconds  slowest {SLOWEST} tests"]
    lines += [f"{seconds:7.1f}  {test}" for seconds, test in sorted(tests, reverse=True)[:SLOWEST]]
    return "\n".join(lines)


def _folder(test):
    """Return the folder of a test's name, below `tests/frameworks` that of the framework."""
    parts = Path(test.partition("::")[0]).parent.parts
    return "/".join(parts[: 3 if "frameworks" in parts else 2])


if __name__ == "__main__":
    print(report([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]))
