"""Measure the contents of docs/conformance.md: implementations, the tests of projects, errors.

Every implementation runs in its own processes, one after the other.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from backnorm import machine
from backnorm.conformance.formula import BACKWARD, WRONG
from backnorm.conformance.judge import GRADIENTS
from backnorm.conformance.ladder import GradientLadder
from backnorm.conformance.verify import audit_data
from backnorm.conformance.verify.audit import RIGHT, audit
from backnorm.conformance.verify.cases import DTYPES, LAYOUTS, Selection, selected
from backnorm.conformance.verify.findings import counts, findings
from backnorm.conformance.verify.policies import POLICIES
from backnorm.conformance.verify.run import STATUSES, UNJUDGED, Job, Results, verify
from backnorm.peers import onednn

__all__ = ["REPRODUCTION", "SUBJECTS", "measured"]

#: PyTorch's defect, as the page shows it.
REPRODUCTION = """\
import torch

x, dy = torch.rand(2, 50, 400, 8, generator=torch.manual_seed(0)).bfloat16().transpose(2, 3)
for a, b in ((x, dy), (x.contiguous(), dy.contiguous())):
    (layer := torch.nn.BatchNorm1d(8))(a).backward(b)
    print(layer.bias.grad[:4].round().tolist(), dy.double().sum((0, 2))[:4].round().tolist())
"""

_SELECTION = Selection(dtypes=tuple(DTYPES))
_ERRORS = str(Path(__file__).with_name("conformance_errors.py"))
# Shapes of the audited tests: three sizes of the sums.
_SHAPES = ((4, 8, 7, 7), (16, 8, 14, 14), (32, 8, 28, 28))


@dataclass(frozen=True, slots=True)
class Contestant:
    """A row of the table: a subject of `backnorm verify`, with its packages and environment."""

    label: str
    subject: str
    packages: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


#: In the order of the page.
SUBJECTS = (
    Contestant("PyTorch", "torch", ("torch",)),
    Contestant("PyTorch, compiled", "torch-compiled", ("torch",)),
    Contestant(
        "TensorFlow, Eigen", "tensorflow", ("tensorflow-cpu",), {"TF_ENABLE_ONEDNN_OPTS": "0"}
    ),
    Contestant(
        "TensorFlow, oneDNN", "tensorflow", ("tensorflow-cpu",), {"TF_ENABLE_ONEDNN_OPTS": "1"}
    ),
    Contestant("TensorFlow, XLA", "tensorflow-xla", ("tensorflow-cpu",)),
    Contestant("JAX, flax's formula", "jax", ("jax",)),
    Contestant("oneDNN, primitive", "onednn", ()),
    Contestant("oneDNN, Graph", "onednn-graph", ()),
    Contestant("NumPy, textbook", "numpy", ("numpy",)),
    Contestant("backnorm", "backnorm", ("backnorm",)),
    Contestant(
        "backnorm, float32", "backnorm", ("backnorm",), {"BACKNORM_ARITHMETIC": "float32"}
    ),
)  # fmt: skip
#: The implementations in the picture.
_DRAWN = {"numpy": "NumPy, textbook", "tensorflow": "TensorFlow, Eigen", "torch": "PyTorch",
          "backnorm": "backnorm"}  # fmt: skip

#: The implementations whose second order is measured.
_SECOND = {"torch": "PyTorch", "backnorm": "backnorm"}


def measured() -> dict[str, Any]:
    """Return everything that the page shows."""
    return {
        "machine": _machine(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "subjects": [_subject(each) for each in SUBJECTS],
        "tests": list(_tests()),
        "battery": _battery(),
        "second_order": {
            label: json.loads(_python(_ERRORS, "second", name)) for name, label in _SECOND.items()
        },
        "reproduction": _python("-c", REPRODUCTION),
        "points": {name: json.loads(_python(_ERRORS, "points", name)) for name in _DRAWN},
    }


def _machine() -> str:
    return f"{machine.detect().name}, {os.cpu_count()} processors"


def _subject(contestant: Contestant) -> dict[str, Any]:
    print(contestant.label, file=sys.stderr, flush=True)
    with _environment(contestant.environment):
        results = verify(Job(contestant.subject, _SELECTION, timeout=120.0))
    known = counts(results)
    # The environment variables of a command that repeats the run.
    prefix = "".join(f"{name}={value} " for name, value in contestant.environment.items())
    return {
        "label": contestant.label,
        "version": _version(contestant),
        "command": f"{prefix}backnorm verify {contestant.subject}",
        "cases": len({v.case for v in results.verdicts if v.is_judged}),
        "of": len({v.case for v in results.verdicts}),
        "judged": known["judged"],
        "passed": known["passed"],
        "refused": sorted({v.text for v in results.verdicts if v.status == "refused"}),
        "cells": _cells(results),
        "findings": [
            {"says": each.says, "cases": len(each.cases), "reproduce": prefix + each.reproduce}
            # A single case does not need the long timeout.
            for each in findings(replace(results, job=Job(contestant.subject, _SELECTION)))
        ],
    }


def _cells(results: Results) -> dict[str, dict[str, str]]:
    """Return the worst status of an output, by type and layout."""
    found: dict[str, dict[str, str]] = {}
    for dtype in DTYPES:
        for layout in LAYOUTS:
            own = [v for v in results.verdicts if (v.dtype, v.layout) == (dtype, layout)]
            for output in GRADIENTS:
                every = [v.status for v in own if v.output == output]
                judged = [status for status in every if status not in UNJUDGED]
                worst = max(judged or every, key=STATUSES.index)
                found.setdefault(f"{dtype} {layout}", {})[output] = worst
    return found


def _version(contestant: Contestant) -> str:
    if not contestant.packages:
        return f"oneDNN {onednn.Library(1).version}"
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in contestant.packages)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _tests() -> Iterator[dict[str, Any]]:
    """Yield audits of every project's test, and of one test with other losses and data."""
    for name, policy in POLICIES.items():
        yield _test(name, name, policy.data, policy.loss)
    for loss in audit_data.LOSSES[1:]:
        yield _test(f"pytorch, loss {loss}", "pytorch", "randn", loss)
    yield _test("pytorch, random gamma and beta", "pytorch", "layer", "none")
    yield _test("pytorch, random gamma and beta, loss cube", "pytorch", "layer", "cube")


def _test(label: str, name: str, data: str, loss: str) -> dict[str, Any]:
    print(label, file=sys.stderr, flush=True)
    policy, runs = POLICIES[name], []
    for shape in _SHAPES:
        runs += audit_data.runs(data, shape, loss, policy.epsilon, DTYPES["float32"])
    found = audit(policy.test("float32"), runs)
    return {
        "label": label,
        "tolerance": policy.text("float32"),
        "source": policy.source,
        "data": data,
        "loss": loss,
        "caught": len(found.caught),
        "missed": len(found.missed),
        "invisible": len(found.invisible),
        "false_alarms": dict(found.false_alarms),
        "runs": found.runs,
    }


def _battery() -> dict[str, Any]:
    """Return the number of wrong kernels that verify rejects, and of rejected right results."""
    caught: set[str] = set()
    alarms, number = dict.fromkeys(RIGHT, 0), 0
    for case in selected(_SELECTION):
        ladder, number = GradientLadder.of(*case.operands, **case.options), number + 1

        def fails(kernel: Any, ladder: GradientLadder = ladder, case: Any = case) -> bool:
            gradients = kernel(*case.operands, **case.options)
            return not all(
                ladder.grade(name, actual).passed
                for name, actual in zip(GRADIENTS, gradients, strict=True)
            )

        others = [mistake for mistake in WRONG if mistake.name not in caught]
        caught |= {mistake.name for mistake in others if fails(BACKWARD.wrong(mistake))}
        for name, kernel in RIGHT.items():
            alarms[name] += fails(kernel(case.data.x.dtype))
    return {"caught": len(caught), "of": len(WRONG), "false_alarms": alarms, "runs": number}


def _python(*arguments: str) -> str:
    """Return the output of a new Python process."""
    environment = os.environ | {"TF_ENABLE_ONEDNN_OPTS": "0"}
    command = [sys.executable, *arguments]
    done = subprocess.run(  # noqa: S603 (the code above)
        command, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout
