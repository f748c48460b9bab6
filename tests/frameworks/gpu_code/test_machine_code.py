"""The machine code of the GPU's kernels, compiled without a GPU."""

from __future__ import annotations

import itertools
import re

import pytest

from .compiled import compiled, problem_of

LARGE = {
    "NCX": ((256, 256, 56, 56), 1),
    "NCX, rows of 1225": ((256, 128, 35, 35), 1),
    "NXC": ((256, 56, 56, 256), 3),
}
COMPLETE = {
    "NCX": ((8, 16, 8, 8), 1),
    "NXC": ((16, 7, 7, 512), 3),
    "NCX, runs of 49": ((256, 2048, 7, 7), 1),
    "NCX, runs of 64": ((256, 512, 8, 8), 1),
}

# Elements of a 16-byte access, as PTX has it.
WIDE = ("v4.b32", "v2.b64")


def large_problems():
    """Yield every combination; the sweep has those that are least apart from the others."""
    for operation, layout, dtype, relu in itertools.product(
        ["forward", "backward"], LARGE, ["float32", "bfloat16", "float64"], [False, True]
    ):
        rare = relu != (dtype == "bfloat16") or (dtype == "float64" and layout != "NXC")
        name = f"{operation}-{layout}-{dtype}-{'relu' if relu else 'plain'}"
        marks = [pytest.mark.sweep] if rare else []
        yield pytest.param(operation, layout, dtype, relu, id=name, marks=marks)


@pytest.mark.parametrize(("operation", "layout", "dtype", "relu"), list(large_problems()))
def test_large_problems(operation, layout, dtype, relu, tmp_path):
    problem = problem_of(operation, *LARGE[layout], dtype, relu=relu)
    codes = {code.name: code for code in compiled(problem, "h200", tmp_path)}
    assert len(codes) == 3
    for name, code in codes.items():
        # (8 bytes of stack are what ptxas's own division of float64 wants.)
        assert code.spilled <= 8, name
        # Four programs of four warps share a multiprocessor at the least.
        assert code.registers <= 128, name
        assert "atom" not in code.ptx, name
        assert not re.search(r"\bred\.", code.ptx), name
        # Subnormal numbers are numbers.
        assert "ftz" not in code.ptx, name
    arrays = 1 if operation == "forward" else 2
    sums, apply = codes[f"{operation}_sums"].ptx, codes[f"{operation}_apply"].ptx
    # Large arrays are read ahead of the arithmetic, 16 bytes at a time, and so they are written.
    for text in (sums, apply):
        assert len(re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*0x10", text)) >= 2 * arrays
    assert any(f"st.global.{wide}" in apply for wide in WIDE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", COMPLETE)
@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_one_kernel_where_that_is_enough(operation, layout, dtype, tmp_path):
    (code,) = compiled(problem_of(operation, *COMPLETE[layout], dtype), "h200", tmp_path)
    assert code.name == f"{operation}_complete"
    assert code.spilled <= 8
    assert ("ld.global.v4.b32" in code.ptx) is ("49" not in layout)
    assert "atom" not in code.ptx


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_pairs_are_not_contracted(operation, dtype, tmp_path):
    problem = problem_of(operation, *LARGE["NCX"], dtype)
    for code in compiled(problem, "l40s", tmp_path):
        assert code.spilled <= 8
        # Every contraction is one that is written: a product's rounding error.
        products = len(re.findall(r"mul(?:\.rn)?\.f32", code.ptx))
        assert len(re.findall(r"fma\.rn\.f32", code.ptx)) <= products


@pytest.mark.parametrize("device", ["a100", "t4"])
def test_other_devices(device, tmp_path):
    for code in compiled(problem_of("backward", *LARGE["NXC"], "float32"), device, tmp_path):
        assert code.spilled <= 8
