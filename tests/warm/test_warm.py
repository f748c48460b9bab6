"""After `backnorm warm` no public call compiles: in processes of their own, in an empty cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys

_CALLS = """
import itertools
import numpy as np
import backnorm
from backnorm import execute
from backnorm.machine import Machine

SHAPES = (
    (4, 8, 56, 56), (3, 5, 7, 7), (6, 4, 4, 4), (9, 33, 2, 2), (2, 2048), (50000, 3), (70, 1, 9),
    (1, 6, 1000), (1, 3, 20001), (0, 4, 5), (3, 4, 0), (3, 0, 5), (40, 513),
)
MACHINES = (execute.detect(), Machine(1, 1, 1, "tiny"), Machine(8, 1 << 30, 1 << 30, "huge"))
rng = np.random.default_rng(0)
for shape, data_format, machine in itertools.product(SHAPES, ("NCX", "NXC"), MACHINES):
    execute.detect = lambda: machine
    backnorm.set_num_threads(machine.threads)
    options = {"data_format": data_format}
    x = rng.standard_normal(shape, np.float32)
    dy = rng.standard_normal(shape, np.float32)
    x.flags.writeable = False
    channels = shape[1 if data_format == "NCX" else -1]
    mean, variance = rng.random((2, channels), np.float32)
    for a, b in itertools.product((None, variance), (None, mean)):
        backnorm.batch_norm_forward(x, a, b, epsilon=1e-3, **options)
        backnorm.batch_norm_inference(x, mean, variance, a, b, epsilon=0.5, **options)
    for gamma, training in itertools.product((None, mean), (True, False)):
        arguments = (x, dy, mean, variance, gamma)
        backnorm.batch_norm_backward(*arguments, epsilon=1e-5, training=training, **options)
        sums = backnorm.reduce(x, dy, mean, **options)
        backnorm.apply(
            *arguments, sums, epsilon=1, training=training, out=np.empty_like(x), **options
        )
"""


def process(folder, *arguments):
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "BACKNORM_CACHE_DIR": str(folder)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def kernels(folder):
    return {path: path.stat().st_mtime_ns for path in folder.glob("*.nbc")}


def test_warm_leaves_nothing_to_compile(tmp_path):
    warm = ("-m", "backnorm", "warm", "--dtype", "float32", "--json")
    report = json.loads(process(tmp_path, *warm))
    compiled = kernels(tmp_path)
    assert report["compiled"] == report["cache"]["kernels"] == len(compiled) > 10
    assert (report["present"], report["failures"], report["removed"]) == (0, [], None)
    assert report["cache"]["folder"] == str(tmp_path)

    process(tmp_path, "-c", _CALLS)
    assert kernels(tmp_path) == compiled

    # Records apart, the kernels are found by those who look for them.
    for path in tmp_path.glob("*.job"):
        path.unlink()
    for removed in (0, 1):
        for path in sorted(compiled)[:removed]:
            path.unlink()
        report = json.loads(process(tmp_path, *warm))
        assert (report["compiled"], report["present"]) == (removed, len(compiled) - removed)
    assert set(kernels(tmp_path)) == set(compiled)
