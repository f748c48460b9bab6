"""The command and several processes at once, in the middle of parallel calls."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from backnorm import machine

DRIVERS = Path(__file__).parent / "drivers"

pytestmark = [
    pytest.mark.skipif(machine.processors() < 2, reason="needs two processors"),
    pytest.mark.usefixtures("hangup"),
]

CALL = {
    "dialect": "tensorflow",
    "op": "FusedBatchNormGradV3",
    "attributes": {"data_format": "NHWC"},
    "shapes": {"x": [16, 40, 40, 32]},
    "types": {"x": "float32"},
}


def _outcome(path, number, heed_interrupts, seed):
    """Send a signal to a run at a random moment; return the exit status."""
    process = subprocess.Popen(
        [sys.executable, "-m", "backnorm", "run", str(path), "--random", "1", "--repeat", "100000"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=heed_interrupts,
    )
    time.sleep(random.Random(seed).uniform(0.2, 1.5))
    try:
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    if process.returncode == 1:
        # Python was still importing the package: what comes of a signal then is not ours to say.
        assert b"import" in errors, errors
        return 128 + number
    return process.returncode


def _check(tmp_path, count, heed_interrupts):
    path = tmp_path / "call.json"
    path.write_text(json.dumps(CALL))
    for seed in range(count):
        number = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)[seed % 3]
        # What the command says of a signal that Python has told it of.
        status = _outcome(path, number, heed_interrupts, seed)
        assert status in (-number, 128 + number), f"{status} of signal {number}, seed {seed}"


@pytest.mark.long
def test_run_on_signal_exits_with_status_of_signal(tmp_path, heed_interrupts):
    _check(tmp_path, 6, heed_interrupts)


@pytest.mark.sweep
@pytest.mark.timeout(1200)
def test_run_on_each_of_300_signals_exits_with_status_of_signal(tmp_path, heed_interrupts):
    _check(tmp_path, 300, heed_interrupts)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_torchrun_ranks_use_as_many_threads_as_pytorch(ranks):
    pytest.importorskip("torch")
    environment = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            str(DRIVERS / "ranks.py"),
        ],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count("'wrong': 0") == ranks
