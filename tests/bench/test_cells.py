"""Workload files, and the cells that options choose from them."""

from __future__ import annotations

import itertools

import pytest

from backnorm.errors import ArgumentValueError, BacknormError
from benchmarks.cells import OPERATIONS, representative, select, workloads
from benchmarks.model import ITEMSIZE

ALL = ["all"]

RESNET50 = """50,64,112,112 50,256,56,56 50,64,56,56 50,512,28,28 50,128,28,28 50,1024,14,14
    50,256,14,14 50,2048,7,7 50,512,7,7"""
INCEPTION = "96,32,149,149 96,80,73,73 96,64,35,35 96,160,17,17 96,384,8,8"
TENSORFLOW = "64,64,56,56 64,256,56,56 64,128,28,28 64,512,28,28 64,1024,14,14"
OTHER = "4096,512 32,27,7 64,3,224,224 8,1,512,512 8,4096,2,2"
DENSENET = "64,112,112 128,57,57 224,29,29 864,15,15 1024,8,8"


def shapes(text):
    return {tuple(map(int, word.split(","))) for word in text.split()}


@pytest.mark.parametrize(
    ("suite", "expected"),
    [
        ("resnet50", shapes(RESNET50)),
        ("inception", shapes(INCEPTION)),
        ("densenet", {(n, *rest) for n in (1, 32) for rest in shapes(DENSENET)}),
        ("tensorflow", shapes(TENSORFLOW)),
        ("3d", shapes("32,128,12,10,8 2,32,64,64,64")),
        ("other", shapes(OTHER)),
    ],
)
def test_a_suite_has_its_shapes(suite, expected):
    assert set(workloads()[suite].shapes) == expected


def test_small_problems_are_small():
    small = workloads()["small"].shapes
    assert (8, 16, 8, 8) in small
    cells = select(["small"], ["backward"], ["float64"], ALL)
    assert all(cell.nbytes <= 1 << 20 for cell in cells)


def test_the_sweep_goes_from_a_kibibyte_to_a_gibibyte_in_one_family():
    cells = select(["sweep"], ALL, ALL, ["NCX"])
    sizes = [cell.nbytes for cell in cells]
    assert sizes[0] == 1 << 10
    assert sizes[-1] == 1 << 30
    assert sizes == sorted(sizes)
    assert all(b <= 2 * a for a, b in itertools.pairwise(sizes))
    assert {(cell.shape[1], cell.shape[2] == cell.shape[3]) for cell in cells} == {(64, True)}


def test_every_file_says_where_its_shapes_come_from():
    for name, workload in workloads().items():
        assert workload.name == name
        assert workload.title
        assert workload.reference
        assert set(workload.ops) <= set(OPERATIONS)
        assert set(workload.dtypes) <= set(ITEMSIZE)
        assert len(set(workload.shapes)) == len(workload.shapes)


def test_all_means_what_the_files_list():
    cells = select(ALL, ALL, ALL, ALL)
    assert len(set(cells)) == len(cells)
    for name, workload in workloads().items():
        found = [cell for cell in cells if cell.suite == name]
        assert {cell.op for cell in found} == set(workload.ops)
        assert {cell.dtype for cell in found} == set(workload.dtypes)
        assert {cell.shape for cell in found} == set(workload.shapes)


def test_options_choose():
    cells = select(["3d", "small"], ["forward", "backward"], ["float64"], ["NXC"])
    assert {cell.suite for cell in cells} == {"3d", "small"}
    assert {cell.op for cell in cells} == {"forward", "backward"}
    assert {cell.dtype for cell in cells} == {"float64"}
    assert {cell.layout for cell in cells} == {"NXC"}


def test_what_is_asked_for_by_name_need_not_be_listed():
    assert {c.op for c in select(["sweep"], ["forward"], ["float16"], ALL)} == {"forward"}


def test_rank_2_has_one_layout():
    cells = select(["other"], ["backward"], ["float32"], ALL)
    assert [cell.layout for cell in cells if len(cell.shape) == 2] == ["NCX"]


def test_cells_on_the_same_arrays_are_side_by_side():
    cells = select(ALL, ALL, ALL, ALL)
    arrays = [(cell.suite, cell.shape, cell.layout, cell.dtype) for cell in cells]
    changes = sum(a != b for a, b in itertools.pairwise(arrays))
    assert changes == len(set(arrays)) - 1


@pytest.mark.parametrize(
    ("place", "option", "accepted"),
    [
        (0, "--suite", "resnet50, inception"),
        (1, "--op", "backward, forward, inference, all"),
        (2, "--dtype", "bfloat16"),
        (3, "--layout", "NCX, NXC, all"),
    ],
)
def test_an_unknown_name_is_refused(place, option, accepted):
    choice = [["small"], ["backward"], ["float32"], ["NCX"]]
    choice[place] = ["small", "purple"] if place == 0 else ["purple"]
    with pytest.raises(ArgumentValueError, match="'purple'") as refusal:
        select(*choice)
    assert isinstance(refusal.value, BacknormError)
    assert refusal.value.argument == option
    assert accepted in str(refusal.value)


def test_no_name_is_refused():
    with pytest.raises(ArgumentValueError, match="--op: names nothing"):
        select(["small"], [], ["float32"], ["NCX"])


def test_a_gpu_has_all_suites_of_the_cpu_and_one_more():
    on_gpu = workloads("cuda")
    assert set(on_gpu) == {"batch256", *workloads()}
    assert all(on_gpu[name] == workload for name, workload in workloads().items())


def test_batch_256_has_the_shapes_of_resnet_50_and_of_tensorflow():
    found = set(workloads("cuda")["batch256"].shapes)
    expected = {(256, *rest) for _, *rest in shapes(RESNET50) | shapes(TENSORFLOW)}
    assert found == expected


def test_a_suite_of_another_device_is_unknown():
    assert select(["batch256"], ALL, ALL, ALL, "cuda")
    with pytest.raises(ArgumentValueError, match=r"'batch256'; accepted: resnet50, "):
        select(["batch256"], ALL, ALL, ALL, "cpu")


def test_all_on_a_gpu_begins_with_batch_256():
    cells = select(ALL, ["backward"], ["float32"], ALL, "cuda")
    assert cells[0].suite == "batch256"
    assert len(set(cells)) == len(cells)


def test_a_quick_run_on_a_gpu_has_large_and_small_cells():
    cells = representative("cuda")
    assert {cell.layout for cell in cells} == {"NCX", "NXC"}
    assert {cell.op for cell in cells} == set(OPERATIONS)
    known = {(name, shape) for name, w in workloads("cuda").items() for shape in w.shapes}
    assert {(cell.suite, cell.shape) for cell in cells} <= known
    assert (8, 16, 8, 8) in {cell.shape for cell in cells}
    assert max(cell.nbytes for cell in cells) > 60 << 20


def test_a_quick_run_has_cells_of_every_kind():
    cells = representative()
    assert len(cells) <= 16
    assert {cell.layout for cell in cells} == {"NCX", "NXC"}
    assert {cell.dtype for cell in cells} == {"float32"}
    assert {cell.op for cell in cells} >= {"backward", "forward"}
    known = {(name, shape) for name, w in workloads().items() for shape in w.shapes}
    assert {(cell.suite, cell.shape) for cell in cells} <= known
