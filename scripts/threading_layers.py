"""Try each threading layer in the situations that a library meets.

Run ``python scripts/threading_layers.py``; docs/decisions/own-threads.md quotes the output. Each
trial has its own process, because some trials end the process.
"""

from __future__ import annotations

import subprocess
import sys

_COMMON = """
import os, sys, threading, time
import numpy as np
layer = {layer!r}
a = np.random.default_rng(0).standard_normal((64, 20000))
if layer == "backnorm":
    import backnorm
    x = a.reshape(8, 8, 20000).astype(np.float32)
    statistics = np.ones(8, np.float32)
    def work():
        backnorm.batch_norm_backward(x, x * x, statistics, statistics, epsilon=1e-5)
    from backnorm_kernels.record import ADDRESSES
    from benchmarks.peers.floor import stage_of
    # Each of the two items moves one vector.
    nothing, cell = stage_of(16, False, False, 2), np.zeros(16)
    addresses = [cell.ctypes.data, 0, cell.ctypes.data] + [0] * (len(ADDRESSES) - 3)
    def region():
        nothing(*addresses)
else:
    import numba
    numba.config.THREADING_LAYER = layer
    @numba.njit(parallel=True)
    def total(a):
        out = np.zeros(a.shape[0])
        for i in numba.prange(a.shape[0]):
            out[i] = a[i].sum()
        return out
    def work():
        total(a)
    @numba.njit(parallel=True)
    def nothing(out):
        for i in numba.prange(2):
            out[i] = i
    cell = np.zeros(2)
    def region():
        nothing(cell)
work()
"""

_TRIALS = {
    "plain call": "print('works')",
    "forked child": """
child = os.fork()
if child == 0:
    work()
    os._exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print('works' if status == 0 else f'child ended with {status}')
""",
    "four Python threads at once": """
def many():
    for _ in range(50):
        work()
threads = [threading.Thread(target=many) for _ in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
print('works')
""",
    "PyTorch's OpenMP busy in another thread": """
import torch
stop = False
def busy():
    t = torch.randn(600, 600)
    while not stop:
        t @ t
thread = threading.Thread(target=busy); thread.start()
for _ in range(50):
    work()
stop = True; thread.join()
print('works')
""",
    "empty region, two items": """
region()
times = []
for _ in range(20000):
    start = time.perf_counter(); region(); times.append(time.perf_counter() - start)
print(f'{np.median(times) * 1e6:.1f} us (90%: {np.quantile(times, 0.9) * 1e6:.1f})')
""",
}


def main() -> None:
    """Print a line for every layer and trial."""
    for trial, code in _TRIALS.items():
        for layer in ("omp", "workqueue", "tbb", "backnorm"):
            print(f"{trial:42} {layer:10} {_run(_COMMON.format(layer=layer) + code)}", flush=True)


def _run(code: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603 (the code above)
            [sys.executable, "-W", "ignore", "-c", code],
            capture_output=True,
            text=True,
            timeout=100,
        )
    except subprocess.TimeoutExpired:
        return "hangs (100 s)"
    if done.returncode == 0:
        return done.stdout.strip().splitlines()[-1]
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return f"exit {done.returncode}: {lines[-1] if lines else ''}"


if __name__ == "__main__":
    main()
