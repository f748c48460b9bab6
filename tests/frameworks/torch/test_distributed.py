"""Training in two processes: FSDP2, DDP and distributed tensors, as with PyTorch's layers."""

from __future__ import annotations

import pytest

from . import distributed_cases

pytestmark = pytest.mark.long

NAMES = [name for name, *_ in distributed_cases.cases()]


@pytest.fixture(scope="module")
def results(processes):
    """The outcomes of all cases in both processes, which end with this one."""
    return processes(distributed_cases, 2)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "mixed"])
def test_distributed_results_match_pytorch_layers(name, results, close):
    for result in results:
        (expected, place), *ours = result[name].values()
        assert ours
        for found, where in ours:
            close(found, expected, factor=4)
            assert where == place


def test_mixture_of_tensor_and_dtensor_is_rejected_as_in_pytorch(results):
    for result in results:
        for said in result["mixed"].values():
            assert "got mixed torch.Tensor and DTensor" in said
