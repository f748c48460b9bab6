"""Run the fuzz for every mutant, each in a child of its own; print by name what came of it.

"crashed" and "found" are as it should be, "nothing" is not.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import warnings

from driver import Fuzz
from guarded import Guarded
from wrong_kernels import MUTANTS

#: Problems until a mutant must have been found.
PROBLEMS = 600

_FOUND = 3


def _child(name: str) -> None:
    """Compute problems until one is wrong; end the process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    fuzz = Fuzz(Guarded())
    MUTANTS[name](fuzz.guarded)
    for seed in range(PROBLEMS):
        if any(fuzz.found(seed)):
            os._exit(_FOUND)
    os._exit(0)


def _outcome(name: str) -> str:
    child = os.fork()
    if not child:
        try:
            _child(name)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return "crashed" if os.WTERMSIG(status) in (signal.SIGSEGV, signal.SIGBUS) else "ended"
    return {_FOUND: "found", 0: "nothing"}.get(os.WEXITSTATUS(status), "failed")


if __name__ == "__main__":
    warnings.simplefilter("error")
    print(json.dumps({name: _outcome(name) for name in MUTANTS}))
