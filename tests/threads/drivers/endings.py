"""How a process ends while threads compute: ``endings.py CASE``. At its end, a wrong result of a
handler changes the exit status.
"""

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable

from layer import Layer

options = sys.argv[1]
layer = Layer()


def check(layer: Layer = layer, leave: Callable[[int], None] = os._exit) -> None:
    """End the process with status 3 if the gradients are wrong."""
    if not layer.is_right():
        leave(3)


if options in ("daemon", "daemon_raises"):

    def compute() -> None:
        while True:
            layer()

    for _ in range(3):
        threading.Thread(target=compute, daemon=True).start()
    time.sleep(0.05)
elif options == "atexit":
    atexit.register(check)
elif options in ("finaliser", "late_finaliser"):

    class Late:
        def __init__(self) -> None:
            self.check = check

        def __del__(self) -> None:
            self.check()

    kept = Late()
    if options == "late_finaliser":
        # Python clears `sys` last. Modules are empty then, so the check raises an error that Python
        # ignores. The process must not crash.
        sys.kept = kept
layer()
if options == "daemon_raises":
    raise SystemExit(0)
