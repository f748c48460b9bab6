"""`verify` without a process of its own: for subjects that neither crash nor hang.

A worker takes half a second to start, with PyTorch two seconds. The calls and the judgement are
those of `verify`; what its process isolates is tested in `test_verify.py`.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from unittest import mock

from backnorm.conformance.verify import _worker
from backnorm.conformance.verify.cases import recipes
from backnorm.conformance.verify.run import Results
from backnorm.conformance.verify.verdicts import with_stale_outputs


class _NoRecord:
    """A record of nothing. (A mock would keep the memory of all calls: more than a process may
    map.)
    """

    def __init__(self, folder):
        pass

    def expect(self, arrays):
        pass


def verified(job):
    """Return the results of a job."""
    results = Results(job, recipes={recipe.name: recipe for recipe in recipes(job.selection)})
    with (
        # A subject in a file puts the folder of the file on the path.
        mock.patch.object(sys, "path", [*sys.path]),
        # A record is the stack of the handlers of signals.
        mock.patch.object(_worker, "SegfaultRecord", _NoRecord),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        events = os.open(os.devnull, os.O_WRONLY)
        worker = _worker.Worker(job, Path(os.devnull), events)
        with worker.events:
            for recipe in results.recipes.values():
                results.add(worker.outcome(recipe.case(job.selection.seed)))
    results.verdicts = with_stale_outputs(results.verdicts, results.unchanged)
    return results
