"""Forks after calls, and in the middle of calls of another thread: ``forks.py COUNT [torch]``."""

import os
import signal
import sys
import threading

if "torch" in sys.argv:
    import torch

    # Its team is there before anything is forked.
    torch.randn(64, 64, 64).mul_(2)

from layer import Layer, at_rest, verdict

from backnorm_kernels.threads import service

layer = Layer()


def child_fails() -> bool:
    child = os.fork()
    if child == 0:
        # That of PyTorch waits for ever for threads that are not here.
        signal.alarm(100)
        own = service().name == "pool"
        os._exit(0 if own and all(layer.is_right() for _ in range(3)) else 3)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


def grandchild_fails() -> bool:
    child = os.fork()
    if child == 0:
        signal.alarm(100)
        os._exit(child_fails() or not layer.is_right())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


def compute() -> None:
    while not stop:
        layer()


count = int(sys.argv[1])
after = sum(child_fails() for _ in range(count // 2))
stop = False
thread = threading.Thread(target=compute)
thread.start()
during = sum(child_fails() for _ in range(count // 2))
stop = True
thread.join()
verdict(
    after=after,
    during=during,
    of_a_child=int(grandchild_fails()),
    right=layer.is_right(),
    at_rest=True if "torch" in sys.argv else at_rest(),
)
