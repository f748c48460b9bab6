"""The record is described once: what Python fills in is what the kernels read."""

from __future__ import annotations

import ast
import ctypes
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from backnorm_kernels import record, stage
from backnorm_kernels.kinds import Kind
from backnorm_kernels.record import (
    ADDRESSES,
    CLAIMED,
    GEOMETRIES,
    LAYOUT,
    LINE,
    SLOTS,
    dtype_of,
    head_of,
    slots,
    template,
)

_SOURCE = Path(record.__file__)
_KERNELS = _SOURCE.parent / "kernels"

each_geometry = pytest.mark.parametrize("geometry", GEOMETRIES)


@each_geometry
def test_dtype_of_geometry_stores_each_field_in_one_cell(geometry):
    kind, described = dtype_of(geometry), slots(geometry)
    assert list(kind.names) == [field.name for field in described]
    assert sorted(described.values()) == list(dict.fromkeys(described.values()))
    assert 0 <= min(described.values()) <= max(described.values()) < kind.itemsize // 8
    for field, slot in described.items():
        dtype, offset = kind.fields[field.name]
        assert offset == 8 * slot
        assert dtype == (np.float64 if field.kind == "float" else np.int64)
        assert field.meaning


@each_geometry
def test_common_fields_have_the_same_offsets_in_each_geometry(geometry):
    kind = dtype_of(geometry)
    assert {name: kind.fields[name][1] for name in SLOTS} == {
        name: 8 * slot for name, slot in SLOTS.items()
    }
    own = {field.name for field in GEOMETRIES[geometry]}
    assert not own & SLOTS.keys()
    assert own | SLOTS.keys() == set(kind.names)
    assert dtype_of("").names == tuple(SLOTS)


@each_geometry
@pytest.mark.parametrize("participants", [1, 2])
def test_stage_call_passes_its_values_to_kernel_in_record(geometry, participants, monkeypatch):
    seen = []

    def run(address, header):
        cells = (ctypes.c_int64 * CLAIMED).from_address(address)
        seen.append(head_of(np.array(cells), geometry)[0])
        cells[SLOTS["ready"]] = 1
        return 1

    monkeypatch.setattr("backnorm_kernels.library.address", lambda kind: 4711)
    monkeypatch.setattr(stage, "runner", lambda: run)
    monkeypatch.setattr(stage, "region", lambda: 3)
    numbers = {field.name: 100 + k for k, field in enumerate(GEOMETRIES[geometry])}
    values = {"epsilon": 0.25, "summed": 5, "items": 7, "streaming": True, "prepares": 2}
    call = stage.Stage(
        Kind(geometry, "float64", "float64", "forward"),
        numbers,
        channels=3,
        partial=0,
        own=8,
        participants=participants,
        **values,
    )
    assert call(range(1, len(ADDRESSES) + 1), momentum=0.5, count=77) == -1
    assert call([0] * len(ADDRESSES), momentum=0.0, count=78) == -1
    first, second = seen
    assert [first[name] for name in ADDRESSES] == [*range(1, len(ADDRESSES) + 1)]
    assert not any(second[name] for name in ADDRESSES)
    assert (first["momentum"], first["count"]) == (0.5, 77)
    assert (second["momentum"], second["count"]) == (0.0, 78)
    for head in seen:
        assert {name: head[name] for name in numbers} == numbers
        assert {name: head[name] for name in values} == values
        assert (head["layout"], head["participants"]) == (LAYOUT, participants)
        # Every call begins anew, and only with others in a region.
        assert (head["ready"], head["function"]) == (0, 4711)
        assert head["region"] == (3 if participants > 1 else 0)


def _named_in(path):
    """Return the fields of heads that a kernel's source reads or writes, and the slots."""
    heads, slots = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            heads |= {node.attr} if node.value.id == "head" else set()
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            named = node.value.id == "SLOTS" and isinstance(node.slice, ast.Constant)
            slots |= {node.slice.value} if named else set()
        # The type of an operand, and the fields of its parts.
        if isinstance(node, ast.Tuple) and path.stem == "record":
            parts = [part.value for part in node.elts if isinstance(part, ast.Constant)]
            slots |= {part for part in parts if isinstance(part, str)}
    return heads, slots


@each_geometry
def test_kernel_source_uses_only_fields_of_its_geometry(geometry):
    heads, _ = _named_in(_KERNELS / f"{geometry}.py")
    own = {field.name for field in GEOMETRIES[geometry]}
    assert heads <= own | SLOTS.keys()
    assert own <= heads


def test_common_kernels_use_only_common_fields():
    read = set()
    both = set(dtype_of("segments").names) & set(dtype_of("columns").names)
    for path in _KERNELS.glob("*.py"):
        heads, slots = _named_in(path)
        assert slots <= SLOTS.keys(), path
        if path.stem not in GEOMETRIES:
            # The skeleton is that of both geometries.
            assert heads <= (both if path.stem == "skeleton" else SLOTS.keys()), path
        read |= heads | slots
    # Addresses are also named in other ways; the layout and the size are for Python alone.
    assert SLOTS.keys() - read <= {*ADDRESSES, "layout", "bytes"}


def test_claims_begin_at_first_cache_line_after_fields():
    assert LINE * 8 == 64
    assert CLAIMED % LINE == 0
    sizes = {dtype_of(geometry).itemsize // 8 for geometry in GEOMETRIES}
    assert sizes == {dtype_of("").itemsize // 8}
    assert 0 <= CLAIMED - max(sizes) < LINE


def _layout_of(source, monkeypatch):
    """Return what `LAYOUT` is in the module that a source makes."""
    module = types.ModuleType("another_record")
    # Where a data class looks for the module that it is in.
    monkeypatch.setitem(sys.modules, "another_record", module)
    exec(compile(source, "another_record", "exec"), module.__dict__)
    return module.LAYOUT


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ('"float", momentum=', '"int", momentum='),
        ("        mask=", '        another="new",\n        mask='),
        ("        own=", '        another="new",\n        own='),
        ('refused="', 'another="new",\n    refused="'),
        ("        tile=", '        another="new",\n        tile='),
        ('outer="samples",\n        channels=', 'channels="samples",\n        outer='),
    ],
    ids=["kind", "address", "problem", "shared", "geometry", "order"],
)
def test_layout_differs_for_changed_record_description(was, becomes, monkeypatch):
    source = _SOURCE.read_text()
    assert source.count(was) == 1
    assert _layout_of(source, monkeypatch) == LAYOUT
    assert _layout_of(source.replace(was, becomes), monkeypatch) != LAYOUT


@each_geometry
@pytest.mark.parametrize("participants", [1, 2, 9])
@pytest.mark.parametrize(("own", "scratch"), [(0, 0), (64, 0), (192, 640)])
def test_template_stores_aligned_sizes_and_offsets(geometry, participants, own, scratch):
    cells = template(geometry, participants, own, scratch)
    head = {name: int(head_of(cells, geometry)[name][0]) for name in SLOTS}
    claims = 2 * LINE * participants
    assert cells.size == CLAIMED + claims
    assert (head["layout"], head["participants"]) == (LAYOUT, participants)
    assert head["scratch"] == 8 * (CLAIMED + claims)
    assert head["own"] == head["scratch"] + scratch
    assert head["own_bytes"] == own
    assert head["bytes"] == head["own"] + participants * own
    # Everything begins at a cache line.
    assert not any(head[name] % 64 for name in ("scratch", "own", "own_bytes", "bytes"))
    filled = {"layout", "participants", "scratch", "own", "own_bytes", "bytes"}
    assert not any(head[name] for name in SLOTS.keys() - filled)


@pytest.mark.parametrize("scratch", [0, 64, 4096, 1 << 20])
def test_record_memory_begins_at_cache_line(scratch):
    cells = template("segments", 2, 128, scratch)
    size = int(head_of(cells, "segments")["bytes"][0])
    for _ in range(10):
        made = stage._Record(cells, size)
        assert made.address % 64 == 0
        assert made.address == made.cells.ctypes.data
        assert made.cells.nbytes == size
        np.testing.assert_array_equal(made.cells[: cells.size], cells)


def test_large_records_are_shared_by_stages_and_limited_in_number(monkeypatch):
    monkeypatch.setattr(stage, "runner", lambda: lambda record, header: 1)
    monkeypatch.setattr("backnorm_kernels.library.address", lambda kind: 4711)
    stage._large.clear()
    numbers = {field.name: 1 for field in GEOMETRIES["segments"]}
    kind = Kind("segments", "float64", "float64", "forward")

    def made(size, **fields):
        return stage.Stage(
            kind, numbers, channels=0, partial=size // 8, own=8, participants=1, **fields
        )

    one, other = made(stage._KEPT, items=3), made(stage._KEPT, items=4)
    assert one([0] * len(ADDRESSES)) == -1
    (first,) = stage._large
    assert other([0] * len(ADDRESSES), count=5) == -1
    assert list(stage._large) == [first]
    # What one stage has written there is not the other's.
    head = head_of(first.cells, "segments")
    assert (head["items"], head["count"]) == (4, 5)
    assert one([0] * len(ADDRESSES)) == -1
    assert (head["items"], head["count"]) == (3, 0)
    assert made(2 * stage._LARGEST)([0] * len(ADDRESSES)) == -1
    assert made(9 * stage._KEPT)([0] * len(ADDRESSES)) == -1
    assert list(stage._large) == [first]

    def run(record, header, depth=[0]):  # noqa: B006
        """Begin further calls before this one ends, as other threads would."""
        depth[0] += 1
        if depth[0] < 20:
            made(stage._KEPT + 64 * depth[0])([0] * len(ADDRESSES))
        return 1

    monkeypatch.setattr(stage, "runner", lambda: run)
    one([0] * len(ADDRESSES))
    assert len(stage._large) == stage._MOST
    assert {kept.cells.nbytes for kept in stage._large} == {stage._LARGEST}
    stage._large.clear()
