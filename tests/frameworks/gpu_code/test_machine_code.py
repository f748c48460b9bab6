"""The machine code of the GPU's kernels, compiled without a GPU."""

from __future__ import annotations

import itertools
import re

import pytest

from backnorm.gpu.kernels.tuning import CONFIGURATIONS

from .compiled import compiled, problem_of

LARGE = {
    "NCX": ((256, 256, 56, 56), 1),
    "NCX, rows of 1225": ((256, 128, 35, 35), 1),
    "NXC": ((256, 56, 56, 256), 3),
}
COMPLETE = {
    "NCX": ((8, 16, 8, 8), 1),
    "NXC": ((16, 7, 7, 512), 3),
    "NCX, runs of 49": ((64, 2048, 7, 7), 1),
    "NCX, runs of 64": ((256, 512, 8, 8), 1),
}

# Elements of a 16-byte access, as PTX has it.
WIDE = ("v4.b32", "v2.b64")

# An asynchronous copy of 16 bytes.
COPIED = r"cp\.async\.c[ag]\.shared\.global[^;]*0x10"


# Elements, and what they are computed in where that is not their own.
COMPUTED = [
    ("float32", None),
    ("bfloat16", None),
    ("float64", None),
    ("float32", "float32"),
    ("bfloat16", "float64"),
]


TYPES = ["float32", "bfloat16"]


def pairs(firsts, seconds):
    """Return all pairs of two lists of two; make test has those in which both change."""
    return [
        pytest.param(first, second, marks=[] if i == k else [pytest.mark.long])
        for i, first in enumerate(firsts)
        for k, second in enumerate(seconds)
    ]


def large_problems():
    """Yield every combination; those that differ least from the others have longer tiers."""
    for operation, layout, (dtype, arithmetic), relu in itertools.product(
        ["forward", "backward"], LARGE, COMPUTED, [False, True]
    ):
        rare = relu != (dtype == "bfloat16") or (dtype == "float64" and layout != "NXC")
        rare |= arithmetic is not None and layout == "NCX, rows of 1225"
        name = f"{operation}-{layout}-{dtype}-{'relu' if relu else 'plain'}"
        if arithmetic is not None:
            name += f"-in-{arithmetic}"
        slow = dtype == "float64" or arithmetic is not None
        marks = [pytest.mark.sweep] if rare else [pytest.mark.long] if slow else []
        yield pytest.param(operation, layout, dtype, arithmetic, relu, id=name, marks=marks)


@pytest.mark.covering(2)
@pytest.mark.parametrize(
    ("operation", "layout", "dtype", "arithmetic", "relu"), list(large_problems())
)
def test_large_problem_compiles_to_three_kernels_without_spills_or_atomics(
    operation, layout, dtype, arithmetic, relu, tmp_path
):
    problem = problem_of(operation, *LARGE[layout], dtype, relu=relu, arithmetic=arithmetic)
    codes = {code.name: code for code in compiled(problem, "h200", tmp_path)}
    assert len(codes) == 3
    for name, code in codes.items():
        # (8 bytes of stack are what ptxas's own division of float64 wants.)
        assert code.spilled <= 8, name
        # Four programs share a multiprocessor at the least, of 65536 registers.
        assert 4 * code.warps * 32 * code.registers <= 65536, name
        assert "atom" not in code.ptx, name
        assert not re.search(r"\bred\.", code.ptx), name
        # Subnormal numbers are numbers.
        assert "ftz" not in code.ptx, name
    arrays = 1 if operation == "forward" else 2
    sums, apply = codes[f"{operation}_sums"].ptx, codes[f"{operation}_apply"].ptx
    # Large arrays are read ahead of the arithmetic, 16 bytes at a time, and so they are written.
    for text in (sums, apply):
        assert len(re.findall(COPIED, text)) >= 2 * arrays
    assert any(f"st.global.{wide}" in apply for wide in WIDE)


@pytest.mark.parametrize(
    ("dtype", "arithmetic"),
    [
        ("float32", None),
        ("bfloat16", None),
        pytest.param("float32", "float32", marks=pytest.mark.long),
        pytest.param("bfloat16", "float64", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("layout", COMPLETE)
@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.covering(2)
def test_complete_schedule_compiles_to_one_kernel(operation, layout, dtype, arithmetic, tmp_path):
    problem = problem_of(operation, *COMPLETE[layout], dtype, arithmetic=arithmetic)
    (code,) = compiled(problem, "h200", tmp_path)
    assert code.name == f"{operation}_complete"
    assert code.spilled <= 8
    wide = "ld.global.v4.b32" in code.ptx or re.search(COPIED, code.ptx)
    assert bool(wide) is ("49" not in layout)
    assert "atom" not in code.ptx


@pytest.mark.parametrize(("operation", "layout"), pairs(["forward", "backward"], ["NCX", "NXC"]))
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_sums_have_the_same_order_in_every_configuration(operation, layout, dtype, tmp_path):
    problem, orders = problem_of(operation, *LARGE[layout], dtype), []
    for configuration in CONFIGURATIONS:
        stages = configuration.kwargs["STAGES"]
        sums, *_ = compiled(problem, "h200", tmp_path, stages)
        orders.append(reductions(sums.ttgir))
    # An order has the elements of each thread, and how threads share a tile.
    assert len(orders[0]) == {"forward": 3, "backward": 2}[operation] * (1 + (layout == "NCX"))
    assert orders[1:] == orders[:-1]


def reductions(code):
    """Return the shape of each tile that is summed, and its division among threads."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", code, re.MULTILINE))
    found = re.findall(r"\}\) : \(tensor<([\dx]+)x\w+, ([^>]*(?:<[^>]*>)?[^>]*)>\) -> ", code)
    return [
        (shape, re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), layout))
        for shape, layout in found
    ]


# A contraction takes the rounding error away that a compensated sum is to find.
@pytest.mark.parametrize(("layout", "dtype"), pairs(["NCX", "NXC"], TYPES))
def test_sums_in_float32_are_not_contracted(layout, dtype, tmp_path):
    problem = problem_of("backward", *LARGE[layout], dtype, arithmetic="float32")
    for device in ("h200", "l40s"):
        codes = {code.name: code.ptx for code in compiled(problem, device, tmp_path)}
        assert not re.search(r"fma\.rn\.f32", codes["backward_sums"])
        # Every element has one that is written.
        assert re.search(r"fma\.rn\.f32", codes["backward_apply"])


@pytest.mark.parametrize(("layout", "dtype"), pairs(["NCX", "NXC"], TYPES))
def test_loops_in_float32_contain_no_float64(layout, dtype, tmp_path):
    found = {}
    for arithmetic in ("float32", "float64"):
        problem = problem_of("backward", *LARGE[layout], dtype, arithmetic=arithmetic)
        for code in compiled(problem, "h200", tmp_path):
            found[code.name, arithmetic] = loops(code.ptx)
    for name in ("backward_sums", "backward_apply"):
        assert "f64" in found[name, "float64"]
        assert found[name, "float32"]
        assert "f64" not in found[name, "float32"]


def loops(ptx):
    """Return the text of all loops: from a label to the last branch back to it."""
    lines, starts, inside = ptx.splitlines(), {}, set()
    for number, line in enumerate(lines):
        if label := re.match(r"(\$\w+):", line):
            starts[label[1]] = number
        elif branch := re.search(r"\bbra(?:\.uni)?\s+(\$\w+)", line):
            inside |= set(range(starts.get(branch[1], number), number))
    return "\n".join(lines[number] for number in sorted(inside))


@pytest.mark.parametrize("device", ["a100", "t4"])
def test_backward_for_other_devices_spills_no_registers(device, tmp_path):
    for code in compiled(problem_of("backward", *LARGE["NXC"], "float32"), device, tmp_path):
        assert code.spilled <= 8
