"""Workload files, and the cells that options choose from them."""

from __future__ import annotations

import itertools

import pytest
import typer

from benchmarks.cells import ITEMSIZE, OPERATIONS, quick, select, workloads


def shapes(suite, device="cpu"):
    return set(map(tuple, workloads(device)[suite]["shapes"]))


def test_workloads_have_reference_known_options_and_distinct_shapes():
    for name, workload in workloads("cuda").items():
        assert workload["name"] == name
        assert workload["title"]
        assert workload["reference"]
        assert set(workload["ops"]) <= set(OPERATIONS)
        assert set(workload["dtypes"]) <= set(ITEMSIZE)
        assert len(set(map(tuple, workload["shapes"]))) == len(workload["shapes"])


def test_workloads_of_cuda_add_resnet50_and_tensorflow_shapes_at_batch_256():
    assert set(workloads("cuda")) == {"batch256", *workloads()}
    expected = {(256, *rest) for _, *rest in shapes("resnet50") | shapes("tensorflow")}
    assert shapes("batch256", "cuda") == expected


def test_select_of_sweep_spans_one_kibibyte_to_one_gibibyte():
    sizes = [cell.nbytes for cell in select("sweep", "all", "all", "NCX")]
    assert (sizes[0], sizes[-1]) == (1 << 10, 1 << 30)
    assert all(a < b <= 2 * a for a, b in itertools.pairwise(sizes))


def test_select_of_all_returns_listed_cells_grouped_by_arrays():
    cells = select("all", "all", "all", "all")
    assert len(set(cells)) == len(cells)
    for name, workload in workloads().items():
        found = [cell for cell in cells if cell.suite == name]
        assert {cell.op for cell in found} == set(workload["ops"])
        assert {cell.dtype for cell in found} == set(workload["dtypes"])
        assert {cell.shape for cell in found} == shapes(name)
    arrays = [(cell.suite, cell.shape, cell.layout, cell.dtype) for cell in cells]
    changes = sum(a != b for a, b in itertools.pairwise(arrays))
    assert changes == len(set(arrays)) - 1


def test_select_filters_by_suite_operation_dtype_and_layout():
    cells = select("3d,small", "forward, backward", "float64", "NXC")
    assert {cell.suite for cell in cells} == {"3d", "small"}
    assert {cell.op for cell in cells} == {"forward", "backward"}
    assert {cell.dtype for cell in cells} == {"float64"}
    assert {cell.layout for cell in cells} == {"NXC"}
    # Named ones need not be listed in the file.
    assert {c.op for c in select("sweep", "forward", "float16", "all")} == {"forward"}


def test_select_of_rank_2_shapes_returns_one_layout():
    cells = select("other", "backward", "float32", "all")
    assert [cell.layout for cell in cells if len(cell.shape) == 2] == ["NCX"]


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("name", ["purple", "", ","])
def test_select_with_unknown_name_raises_bad_parameter(place, name):
    choice = ["small", "backward", "float32", "NCX"]
    choice[place] = name
    with pytest.raises(typer.BadParameter, match=r"got ('purple'|no name); expected .*, all"):
        select(*choice)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_quick_returns_at_most_16_listed_cells_of_both_layouts(device):
    cells = quick(device)
    assert len(cells) <= 16
    assert {cell.layout for cell in cells} == {"NCX", "NXC"}
    assert {cell.op for cell in cells} >= {"backward", "forward"}
    found = workloads(device)
    assert all([*cell.shape] in found[cell.suite]["shapes"] for cell in cells)
