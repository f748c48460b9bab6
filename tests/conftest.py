"""Fixtures that make the tests strict: seeded data, read-only inputs, outputs poisoned with NaN."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from typer.testing import CliRunner

from tests.support import engines, internals, tiers
from tests.support.processor_time import ProcessorTime

# A test passes everywhere or nowhere. Libraries behave otherwise on servers that run tests:
# hypothesis loads another profile, PyTorch raises errors instead of warnings, Typer prints colours.
for _name in ("CI", "GITHUB_ACTIONS"):
    os.environ.pop(_name, None)
# Every run has the same examples. An example has no deadline, because the first one may compile a
# function.
settings.register_profile(
    "backnorm",
    # Without `parent`, the profile would inherit from the one that hypothesis chose by `CI`.
    parent=settings.get_profile("default"),
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("backnorm")


def pytest_configure(config):
    config.pluginmanager.register(ProcessorTime(config))
    config.pluginmanager.register(tiers)
    config.pluginmanager.register(engines)


class Cases(NamedTuple):
    """The outcomes of a script, case by case, and the end of its process."""

    done: subprocess.CompletedProcess
    found: dict[str, list[str]]
    begun: list[str]

    def check_survival(self):
        last = self.begun[-1] if self.begun else "no case"
        done = self.done
        assert done.returncode == 0, f"ended with {done.returncode} in {last!r}:\n{done.stderr}"
        assert list(self.found) == list(dict.fromkeys(self.begun))

    def check_outcomes(self):
        wrong = [f"{case}: {kinds}" for case, kinds in self.found.items()
                 if kinds not in (["error"], ["result"])]  # fmt: skip
        assert not wrong, "\n".join(wrong)


@pytest.fixture
def near_middles(rng):
    """Return a function of a 16-bit type: float64 between two of its values, and the nearest ones.

    They are so near to the middle that float32 mostly cannot tell them from it, or in it.
    """

    def make(dtype):
        below = np.concatenate([rng.uniform(1, 2, 1000), 2.0 ** rng.uniform(-26, 15, 1000)])
        below = below.astype(dtype)
        above = np.nextafter(below, dtype.type(np.inf))
        middle = (below.astype("d") + above.astype("d")) / 2
        near = middle * (1 + rng.choice([-1, 0, 1], 2000) * 2.0 ** -rng.integers(26, 52, 2000))
        even = np.where(below.view(np.uint16) % 2 == 0, below, above)
        nearest = np.select([near < middle, near > middle], [below, above], even).astype(dtype)
        return near, nearest

    return make


@pytest.fixture
def same():
    """Assert that arrays agree in type, shape and every bit (NaN equal to NaN)."""

    def check(actual, expected):
        assert len(actual) == len(expected)
        for a, e in zip(actual, expected, strict=True):
            assert a.dtype == e.dtype
            assert a.shape == e.shape
            np.testing.assert_array_equal(a.astype(np.float64), e.astype(np.float64))
            assert (np.signbit(a.astype(np.float64)) == np.signbit(e.astype(np.float64))).all()

    return check


@pytest.fixture(scope="module")
def run_cases(tmp_path_factory):
    """Run a script that prints what it begins and what it found; it may crash."""

    def run(script, *arguments):
        log = tmp_path_factory.mktemp("cases") / "log"
        # As a module, so that scripts share what is beside them.
        root = Path(__file__).parents[1]
        module = ".".join(Path(script).relative_to(root).with_suffix("").parts)
        command = [sys.executable, "-X", "faulthandler", "-m", module, *arguments]
        with log.open("w") as stream:
            done = subprocess.run(
                command, cwd=root, stdout=stream, stderr=subprocess.PIPE, text=True,
                timeout=900 if arguments else 240, check=False,
            )  # fmt: skip
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        found = {line["case"]: line["found"] for line in lines if "case" in line}
        return Cases(done, found, [line["begins"] for line in lines if "begins" in line])

    return run


@pytest.fixture
def cli(app):
    """Run a command, the fixture `app`, in this process; a traceback of ours fails the test."""

    def invoke(*args):
        result = CliRunner().invoke(app, [str(arg) for arg in args])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


@pytest.fixture
def refused(cli):
    """Run the command, assert that it refuses what it got in one line, and return that line."""

    def invoke(*args):
        result = cli(*args)
        assert (result.exit_code, result.stdout) == (2, ""), result.output
        assert result.stderr.startswith("backnorm: error: ")
        assert result.stderr.count("\n") == 1
        assert "Traceback" not in result.stderr
        return result.stderr.strip()

    return invoke


@pytest.fixture
def rng(request):
    """A generator of random numbers that is seeded by the name of the test."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


@pytest.fixture
def poison():
    """Fill an array with NaN and return it: what is not written afterwards shows."""

    def fill(array):
        array.fill(np.nan)
        return array

    return fill


@pytest.fixture
def read_only():
    """Return read-only views: a kernel that writes to its inputs fails."""

    def views(*arrays):
        result = []
        for array in arrays:
            view = array.view()
            view.flags.writeable = False
            result.append(view)
        return result

    return views


@pytest.fixture
def hangup():
    """Let SIGHUP be what it usually is to the processes of a test, also under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(autouse=True)
def poisoned_allocations(monkeypatch):
    """Poison the engine's outputs and scratch memory; returns the list of outputs allocated."""
    return internals.poison_new_memory(monkeypatch)


@pytest.fixture(scope="session")
def heed_interrupts():
    """The `preexec_fn` of a child that is to be interrupted; undoes what a shell does in jobs."""

    def heed():
        # A shell has its commands in the background ignore SIGINT, and children inherit that.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return heed
