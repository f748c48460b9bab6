"""Workload files, and the cells that options choose from them."""

from __future__ import annotations

import itertools

import pytest
import typer

from benchmarks.cells import ITEMSIZE, OPERATIONS, quick, select, workloads

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
def test_workloads_have_their_shapes(suite, expected):
    assert set(map(tuple, workloads()[suite]["shapes"])) == expected


def test_workloads_say_where_their_shapes_come_from():
    for name, workload in workloads("cuda").items():
        assert workload["name"] == name
        assert workload["title"]
        assert workload["reference"]
        assert set(workload["ops"]) <= set(OPERATIONS)
        assert set(workload["dtypes"]) <= set(ITEMSIZE)
        assert len(set(map(tuple, workload["shapes"]))) == len(workload["shapes"])


def test_workloads_of_a_gpu_have_resnet_50_and_tensorflow_at_batch_256():
    assert set(workloads("cuda")) == {"batch256", *workloads()}
    found = set(map(tuple, workloads("cuda")["batch256"]["shapes"]))
    assert found == {(256, *rest) for _, *rest in shapes(RESNET50) | shapes(TENSORFLOW)}


def test_select_sweep_goes_from_a_kibibyte_to_a_gibibyte():
    sizes = [cell.nbytes for cell in select("sweep", "all", "all", "NCX")]
    assert (sizes[0], sizes[-1]) == (1 << 10, 1 << 30)
    assert all(a < b <= 2 * a for a, b in itertools.pairwise(sizes))


def test_select_all_is_what_the_files_list_with_the_same_arrays_side_by_side():
    cells = select("all", "all", "all", "all")
    assert len(set(cells)) == len(cells)
    for name, workload in workloads().items():
        found = [cell for cell in cells if cell.suite == name]
        assert {cell.op for cell in found} == set(workload["ops"])
        assert {cell.dtype for cell in found} == set(workload["dtypes"])
        assert {cell.shape for cell in found} == set(map(tuple, workload["shapes"]))
    arrays = [(cell.suite, cell.shape, cell.layout, cell.dtype) for cell in cells]
    changes = sum(a != b for a, b in itertools.pairwise(arrays))
    assert changes == len(set(arrays)) - 1


def test_select_chooses_by_every_option():
    cells = select("3d,small", "forward, backward", "float64", "NXC")
    assert {cell.suite for cell in cells} == {"3d", "small"}
    assert {cell.op for cell in cells} == {"forward", "backward"}
    assert {cell.dtype for cell in cells} == {"float64"}
    assert {cell.layout for cell in cells} == {"NXC"}
    # Named ones need not be listed in the file.
    assert {c.op for c in select("sweep", "forward", "float16", "all")} == {"forward"}


def test_select_rank_2_has_one_layout():
    cells = select("other", "backward", "float32", "all")
    assert [cell.layout for cell in cells if len(cell.shape) == 2] == ["NCX"]


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("name", ["purple", "", ","])
def test_select_unknown_name_is_refused(place, name):
    choice = ["small", "backward", "float32", "NCX"]
    choice[place] = name
    with pytest.raises(typer.BadParameter, match=r"got ('purple'|no name); expected .*, all"):
        select(*choice)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_quick_has_few_known_cells_of_every_kind(device):
    cells = quick(device)
    assert len(cells) <= 16
    assert {cell.layout for cell in cells} == {"NCX", "NXC"}
    assert {cell.op for cell in cells} >= {"backward", "forward"}
    found = workloads(device)
    assert all([*cell.shape] in found[cell.suite]["shapes"] for cell in cells)
