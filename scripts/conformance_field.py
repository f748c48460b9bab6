"""Measure the contents of docs/conformance.md: implementations, the tests of projects, errors.

Every implementation runs in its own processes, one after the other. A case on which it ends its
process is a verdict like others.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import itertools
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from backnorm import machine
from backnorm.conformance.audit import audit
from backnorm.conformance.audit.data import LOSSES
from backnorm.conformance.audit.policies import POLICIES
from backnorm.conformance.data import realistic_data
from backnorm.conformance.judge import GRADIENTS
from backnorm.conformance.ladder import GradientLadder
from backnorm.conformance.verify.cases import DTYPES, LAYOUTS
from backnorm.conformance.verify.verdicts import STATUSES, UNJUDGED
from backnorm.peers import onednn
from benchmarks.peers.base import Data
from benchmarks.studies.errors import gradients_of

__all__ = ["DRAWN", "ROOT", "SHAPE", "SUBJECTS", "measured"]

ROOT = Path(__file__).resolve().parents[1]

#: The implementations in the order of the page: label, package, and the command that judges it.
SUBJECTS = (
    ("PyTorch", "torch", "backnorm verify torch"),
    ("PyTorch, compiled", "torch", "backnorm verify torch-compiled"),
    ("TensorFlow, Eigen", "tensorflow-cpu", "TF_ENABLE_ONEDNN_OPTS=0 backnorm verify tensorflow"),
    ("TensorFlow, oneDNN", "tensorflow-cpu", "TF_ENABLE_ONEDNN_OPTS=1 backnorm verify tensorflow"),
    ("TensorFlow, XLA", "tensorflow-cpu", "backnorm verify tensorflow-xla"),
    ("JAX, flax's formula", "jax", "backnorm verify jax"),
    ("oneDNN, primitive", "oneDNN", "backnorm verify onednn"),
    ("oneDNN, Graph", "oneDNN", "backnorm verify onednn-graph"),
    ("NumPy, textbook", "numpy", "backnorm verify numpy"),
    ("backnorm", "backnorm", "backnorm verify backnorm"),
    ("backnorm, float32", "backnorm", "BACKNORM_ARITHMETIC=float32 backnorm verify backnorm"),
)  # fmt: skip

# Statuses of cases without results.
_ENDS = "error", "out_of_memory", "hang", "crash"
# A single case does not need this long time limit, so it is not part of shown commands.
_TIMEOUT = " --timeout 120"

#: Labels and colours of the implementations in the pictures; the first is drawn above the others.
DRAWN = {"backnorm": ("backnorm", "C0"), "tensorflow": ("TensorFlow", "C2"),
         "torch": ("PyTorch", "C1"), "numpy": ("NumPy, textbook formula", "C3")}  # fmt: skip
#: The shape of x in the pictures, channels last.
SHAPE = (32, 28, 28, 16)
# Each of this many bins of condition numbers has its worst element, and some at random.
_BINS, _POINTS = 36, 6

# Shapes of the audited tests: three sizes of the sums.
_SHAPES = ((4, 8, 7, 7), (16, 8, 14, 14), (32, 8, 28, 28))


def measured(stored: dict[str, Any], parts: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield everything that the page shows, after each step of a measurement.

    Parameters
    ----------
    stored : dict
        The earlier measurements.
    parts : collection of str
        Packages of :data:`SUBJECTS`, "tests" and "points"; the others keep their earlier
        measurements. Empty: everything is measured.
    """
    known = {*(package for _, package, _ in SUBJECTS), "tests", "points"}
    if not known.issuperset(parts):
        sys.exit(f"--measure: unknown part; got {' '.join(parts)}; expected {', '.join(known)}")
    rows = {row["label"]: row for row in stored["subjects"]}
    for label, package, command in SUBJECTS:
        if package in (parts or known):
            rows[label] = subject(label, package, command)
            ordered = [rows[each] for each, _, _ in SUBJECTS if each in rows]
            yield (stored := stored | {"subjects": ordered})
    if "tests" in (parts or known):
        yield (stored := stored | {"tests": list(_tests())})
    if "points" in (parts or known):
        yield stored | {"points": {name: points(name) for name in DRAWN}}


def subject(label: str, package: str, command: str) -> dict[str, Any]:
    """Return a row of the page, from the report of a command, which judges all types."""
    environment, _, arguments = command.partition("backnorm ")
    report = json.loads(
        _output(
            "env", *shlex.split(environment), sys.executable, "-m", "backnorm",
            *shlex.split(f"{arguments} --dtypes {','.join(DTYPES)}{_TIMEOUT} --json -"),
        )
    )  # fmt: skip
    verdicts, cells = report["verdicts"], dict[str, dict[str, str]]()
    for dtype, layout, output in itertools.product(DTYPES, LAYOUTS, GRADIENTS):
        own = dtype, layout, output
        every = {v["status"] for v in verdicts if (v["dtype"], v["layout"], v["output"]) == own}
        # A case without results does not hide the worst results of the other cases.
        ends = every.intersection(_ENDS)
        every -= ends
        worst = max(every.difference(UNJUDGED) or every, key=STATUSES.index, default=None)
        shown = [*([worst] if worst else []), *sorted(ends)] or ["not_run"]
        cells.setdefault(f"{dtype} {layout}", {})[output] = ", ".join(shown)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {
        "label": label,
        "measured": f"{today} on {machine.detect().name}, {os.cpu_count()} processors",
        "version": f"{package} {_version(package)}",
        "command": command,
        "cases": len({v["case"] for v in verdicts if v["status"] not in UNJUDGED}),
        "of": len({v["case"] for v in verdicts}),
        "judged": report["counts"]["judged"],
        "passed": report["counts"]["passed"],
        "refused": sorted({v["text"] for v in verdicts if v["status"] == "refused"}),
        "cells": cells,
        "findings": list(_first_of_kinds(report["findings"], environment)),
    }


def _first_of_kinds(findings: Iterable[dict[str, Any]], environment: str) -> Iterator[Any]:
    """Yield the first finding of each kind, with the numbers of findings and cases of the kind."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for finding in findings:
        kinds.setdefault(finding["id"], []).append(finding)
    for first, *others in kinds.values():
        yield {
            "says": first["says"],
            "findings": 1 + len(others),
            "cases": sum(each["cases"] for each in (first, *others)),
            "reproduce": environment + first["reproduce"].replace(_TIMEOUT, ""),
        }


def _version(package: str) -> str:
    return onednn.Library(1).version if package == "oneDNN" else importlib.metadata.version(package)


def points(name: str) -> list[list[float]]:
    """Return [condition, relative error] of the worst element of dx and of random ones, by bin."""
    rng = np.random.default_rng(0)
    layer = realistic_data(SHAPE, DTYPES["float32"], data_format="NXC", rng=rng)
    x, dy, *channels = layer.backward_inputs
    dy = dy + np.float32(0.5)
    data = Data(x, dy, *channels, layer.beta, **layer.options, out=np.empty_like(x))
    ladder = GradientLadder.of(x, dy, *channels, **layer.options)
    with gradients_of(name, {"TF_ENABLE_ONEDNN_OPTS": "0"}) as gradients:
        dx = gradients(data)["dx"]
    exact = ladder.value("dx")
    error = np.abs((dx.astype(np.float64) - exact.hi) - exact.lo) / np.abs(exact.hi)
    condition = ladder.terms("dx") / np.abs(exact.hi)
    order = np.argsort(condition, axis=None)
    edges = np.searchsorted(condition.flat[order], np.logspace(0, 6, _BINS + 1))
    found: list[list[float]] = []
    for own in itertools.starmap(lambda low, high: order[low:high], itertools.pairwise(edges)):
        if len(own):
            drawn = rng.choice(own, min(_POINTS, len(own)), replace=False)
            chosen = sorted({*map(int, drawn), int(own[np.argmax(error.flat[own])])})
            found += [[float(f"{v.flat[k]:.3g}") for v in (condition, error)] for k in chosen]
    return found


def _tests() -> Iterator[dict[str, Any]]:
    """Yield audits of every project's test, and of one test with other losses and data."""
    rows, pytorch = dict(POLICIES), POLICIES["pytorch"]
    rows |= {f"pytorch, loss {loss}": replace(pytorch, loss=loss) for loss in LOSSES[1:]}
    random = "pytorch, random gamma and beta"
    rows[random] = replace(pytorch, data="layer")
    rows[f"{random}, loss cube"] = replace(pytorch, data="layer", loss="cube")
    for label, policy in rows.items():
        print(label, file=sys.stderr, flush=True)
        found = audit(policy.test("float32"), policy.runs(DTYPES["float32"], _SHAPES))
        yield {
            "label": label,
            "tolerance": policy.text("float32"),
            "source": policy.source,
            "forgives": policy.forgives,
            "data": policy.data,
            "loss": policy.loss,
            "caught": len(found.caught),
            "missed": [mistake.name for mistake in found.missed],
            "invisible": [mistake.name for mistake in found.invisible],
            "false_alarms": dict(found.false_alarms),
            "runs": found.runs,
        }


def _output(*command: str) -> str:
    """Return the output of a process; its status may be 1, as that of a command with findings."""
    print(*command[-2:], file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)  # noqa: S603 (ours)
    if done.returncode > 1:
        sys.exit(f"{shlex.join(command)}: exit status {done.returncode}")
    return done.stdout
