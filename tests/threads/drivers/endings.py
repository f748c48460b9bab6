"""How a process ends while threads compute: ``endings.py HOW``."""

import atexit
import sys
import threading
import time

from layer import Layer

options = sys.argv[1]
layer = Layer()
if options in ("daemon", "daemon_raises"):

    def compute() -> None:
        while True:
            layer()

    for _ in range(3):
        threading.Thread(target=compute, daemon=True).start()
    time.sleep(0.05)
elif options == "atexit":
    atexit.register(lambda: print(layer.is_right()))
elif options == "finaliser":

    class Late:
        def __init__(self) -> None:
            self.work = layer.is_right

        def __del__(self) -> None:
            self.work()

    kept = Late()
    sys.kept = kept
layer()
if options == "daemon_raises":
    raise SystemExit(0)
