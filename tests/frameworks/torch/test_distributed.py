"""Training in two processes: FSDP2, DDP and distributed tensors, as with PyTorch's layers."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from . import distributed_cases

pytestmark = pytest.mark.long

NAMES = [name for name, *_ in distributed_cases.cases()]
# Seconds for both processes, less than one test may take.
LIMIT = 240


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What came of all cases, in both processes; they end with this one."""
    folder = tmp_path_factory.mktemp("distributed")
    program = str(Path(distributed_cases.__file__))
    logs = [folder / f"{rank}.txt" for rank in range(2)]
    running = []
    try:
        for rank, log in enumerate(logs):
            arguments = str(rank), str(folder / "store"), str(folder / f"{rank}.pt")
            with log.open("w") as stream:
                running.append(
                    subprocess.Popen(
                        [sys.executable, program, *arguments], stdout=stream, stderr=stream
                    )
                )
        end = time.monotonic() + LIMIT
        for process in running:
            process.wait(end - time.monotonic())
    finally:
        for process in running:
            process.kill()
            process.wait()
    said = "\n".join(log.read_text()[-5000:] for log in logs)
    assert [process.returncode for process in running] == [0, 0], said
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "mixed"])
def test_the_same_as_with_pytorchs_layers(name, results, close):
    for result in results:
        (expected, place), *ours = result[name].values()
        assert ours
        for found, where in ours:
            close(found, expected, factor=4)
            assert where == place


def test_a_mixture_is_refused_as_by_pytorch(results):
    for result in results:
        for said in result["mixed"].values():
            assert "got mixed torch.Tensor and DTensor" in said
