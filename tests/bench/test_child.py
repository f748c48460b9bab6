"""A worker process ends with the process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CHILD = """
import os, time
from benchmarks.child import serve_parent

class Work:
    def pid(self):
        return os.getpid()

    def work(self):
        time.sleep(600)

serve_parent(Work())
"""

PARENT = """
from benchmarks.child import Child

child = Child("at_work")
print(child.ask("pid"), flush=True)
child.ask("work")
"""


def test_child_of_a_killed_process_ends(tmp_path, monkeypatch):
    (tmp_path / "at_work.py").write_text(CHILD)
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    os.kill(child, 0)
    parent.kill()
    parent.communicate(timeout=60)
    for _ in range(200):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the child works on")
