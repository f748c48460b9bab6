"""A run on a GPU from campaign to rows, in worker processes, on CPU tensors.

The GPU is made up; device, watches, session and contestants are those of a real one. Only cuDNN's
operators are PyTorch's decompositions of them, and nothing is compiled by a C++ compiler.
"""

from __future__ import annotations

import itertools

import pytest

from backnorm.errors import ArgumentValueError
from benchmarks import peers
from benchmarks.campaign import Campaign
from benchmarks.device import PLACES
from benchmarks.model import Cell
from benchmarks.runner import Runner

pytestmark = pytest.mark.peer

OPERATIONS = ("backward", "forward", "inference")
LAYOUTS = ("NCX", "NXC")


def statuses(row):
    return {outcome.contestant: outcome.status for outcome in row.outcomes}


def outcome(row, contestant):
    (found,) = [o for o in row.outcomes if o.contestant == contestant]
    return found


def measured(places, cells, settings):
    with Runner(places, 1, "cuda") as runner:
        return [runner.measure(cell, settings) for cell in cells]


def small(**changes):
    return Cell(
        **{
            "suite": "small",
            "op": "backward",
            "shape": (4, 3, 5, 7),
            "layout": "NCX",
            "dtype": "float32",
            **changes,
        }
    )


def test_every_contestant_does_what_it_is_timed_for(gpu, hasty):
    cells = [
        small(op=op, layout=layout, shape=shape)
        for shape in ((4, 3, 5, 7), (6, 5, 9), (2, 3, 2, 3, 2))
        for layout, op in itertools.product(LAYOUTS, OPERATIONS)
    ]
    for row in measured(gpu, cells, hasty):
        assert statuses(row) == dict.fromkeys(peers.CONTESTANTS["cuda"], "ok"), row


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_every_type_is_done(gpu, hasty, dtype):
    cells = [small(op=op, dtype=dtype) for op in OPERATIONS]
    for row in measured(gpu, cells, hasty):
        assert statuses(row) == dict.fromkeys(gpu, "ok"), row


def test_small_calls_have_two_times_and_large_ones_that_of_the_device(gpu, hasty):
    # 1.2 MB of x: beyond what counts as small.
    large = small(op="inference", shape=(10, 3, 100, 100), dtype="float32")
    gpu = {name: gpu[name] for name in ("backnorm", "torch", "jax")}
    for row, whole in zip(measured(gpu, [small(), large], hasty), (True, False), strict=True):
        for found in row.outcomes:
            assert found.status == "ok"
            assert found.timing.samples == 4
            assert (found.whole is not None) == whole
            assert found.whole is None or found.whole.samples == 4


def test_the_floor_is_what_must_be_moved_at_the_speed_of_copying(gpu, hasty):
    with Runner({"floor": gpu["floor"]}, 1, "cuda") as runner:
        rows = [runner.measure(small(op=op), hasty) for op in OPERATIONS]
    arrays = {"backward": 3, "forward": 2, "inference": 2}
    for row in rows:
        (floor,) = row.outcomes
        seconds = arrays[row.cell.op] * row.cell.nbytes / runner.gpu.bandwidth
        assert (floor.form, floor.status) == ("out", "ok")
        assert floor.timing.median == pytest.approx(seconds)
        assert floor.timing.p20 <= floor.timing.median <= floor.timing.p80


def test_ours_must_be_exact_to_the_last_place(gpu, hasty):
    (row,) = measured({"backnorm": "fake_gpu:WrongOurs"}, [small()], hasty)
    assert outcome(row, "backnorm").status == "inaccurate"
    assert outcome(row, "backnorm").detail.startswith("dx")


def test_a_wrong_peer_is_said_to_be_wrong(gpu, hasty):
    (row,) = measured({"torch": "fake_gpu:WrongNative"}, [small()], hasty)
    assert outcome(row, "torch").status == "inaccurate"


def test_a_device_that_does_not_survive_an_error_is_started_again(gpu, hasty):
    places = {"backnorm": gpu["backnorm"], "torch": "fake_gpu:BreakingNative"}
    broken, whole = measured(places, [small(layout="NXC"), small()], hasty)
    assert statuses(broken) == {"backnorm": "ok", "torch": "crashed"}
    assert "an illegal memory access" in outcome(broken, "torch").detail
    assert statuses(whole) == {"backnorm": "ok", "torch": "ok"}


def test_arrays_too_large_for_the_device_are_left_out(gpu, hasty):
    places = {"backnorm": gpu["backnorm"], "torch": "fake_gpu:Greedy"}
    # Three of 4.8 MB, where 16 MiB are free.
    fine, large = measured(places, [small(), small(shape=(40, 3, 100, 100))], hasty)
    assert statuses(fine) == {"backnorm": "ok", "torch": "unsupported"}
    assert "GB" in outcome(fine, "torch").detail
    assert set(statuses(large).values()) == {"unsupported"}


def test_who_has_no_gpu_is_missing(gpu, hasty):
    places = {name: peers.CONTESTANTS["cuda"][name] for name in ("cudnn", "jax")}
    (row,) = measured(places, [small()], hasty)
    # A GPU would have to be hidden from JAX for this.
    if outcome(row, "jax").status == "missing":
        assert "jax" in outcome(row, "jax").detail
    assert outcome(row, "cudnn").status in ("missing", "unsupported")


def test_a_campaign_records_the_gpu(gpu, hasty):
    places = {name: gpu[name] for name in ("backnorm", "torch")}
    campaign = Campaign([small()], places, 1, hasty, "cuda")
    campaign.check()
    campaign.run(lambda *_: None)
    result = campaign.result()
    assert result.device == "cuda"
    assert result.gpu.name == "Fake"
    assert result.gpu.bandwidth > 1e6
    assert result.caches == (4 << 10,)
    assert campaign.failures() == []
    assert set(result.environment.versions) >= {"backnorm", "torch"}


def test_a_device_that_is_not_there_is_refused_in_its_own_words(gpu, hasty, monkeypatch):
    monkeypatch.setitem(PLACES, ("cuda", "quiet"), "fake_gpu:AbsentGpu")
    with pytest.raises(ArgumentValueError) as refusal:
        Campaign([small()], gpu, 1, hasty, "cuda").check()
    assert str(refusal.value) == (
        "--device cuda: no CUDA device; got a toaster; accepted: cpu; buy one"
    )
    with pytest.raises(ArgumentValueError, match="no CUDA device"):
        measured(gpu, [small()], hasty)


def test_a_campaign_on_the_cpu_asks_nothing(hasty, monkeypatch):
    monkeypatch.setitem(PLACES, ("cpu", "quiet"), "nowhere:Nothing")
    Campaign([small()], {}, 1, hasty).check()
